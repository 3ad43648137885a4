"""What measures the host time of a call."""

from __future__ import annotations

import time

import pytest

from bench import host


def test_rounds_end_with_waiting_which_is_not_counted() -> None:
    calls, waits = [], []

    def wait(made: object) -> None:
        waits.append(made)
        time.sleep(0.02)

    def call() -> int:
        calls.append("quick")
        time.sleep(0.001)
        return len(calls)

    def slow() -> None:  # in every other round
        calls.append("slow")
        time.sleep(0.001 if calls.count("slow") % 10 > 5 else 0.002)

    found = host.taken({"quick": (call, wait), "slow": (slow, lambda made: None)}, rounds=4, count=5)
    assert found["quick"].median == pytest.approx(1000, rel=0.5)
    assert found["slow"].best == pytest.approx(1000, rel=0.5)
    assert found["slow"].median > 1300
    assert len(waits) == 1 + 4
    assert [name for name, previous in zip(calls, ["", *calls], strict=False) if name != previous] == [
        "quick",
        "slow",
    ] * 5  # rounds take turns
