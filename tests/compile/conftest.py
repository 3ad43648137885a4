"""Prints at the end what each kernel that was compiled takes, also where the tests pass: shared memory, registers, spills."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rows: dict[tuple[str, int], list[str]] = {}
    for report in (*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")):
        for name, value in report.user_properties:
            if name == "compiled" and report.when == "call":
                variant, smem_bytes, arch, takes = value
                rows.setdefault((variant, smem_bytes), []).append(f"sm_{arch} {takes}")
    if rows:
        terminalreporter.section("kernels: bytes of shared memory; for each architecture registers, + bytes spilled")
        width = max(len(variant) for variant, _ in rows)
        for (variant, smem_bytes), takes in rows.items():
            terminalreporter.write_line(f"{variant:<{width}} {smem_bytes:>6}  {', '.join(takes)}")
