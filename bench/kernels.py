"""The library's kernel tables: what each row compiles to, and a run with some of the rows only.

The one module here that looks behind the library's public names. What it finds is about kernels, not about calls: a timing, also one under
`only_family`, goes through `cupyflash.attention` as a user's call does.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import cupyflash
from cupyflash import api, device, environment, jit, plan, variants

ALL_OPTIONS = ("alibi", "bias", "local", "lse", "mask", "sink", "softcap", "used")


def families() -> tuple[str, ...]:
    return tuple(dict.fromkeys(row.family for row in variants.FORWARD))


@contextmanager
def only_family(family: str | None) -> Iterator[None]:
    """Inside, the library plans with the rows of this family alone, to time a kernel where a better one exists; None is no restriction.

    The table is a constant of `plan` and plans are cached, so both are swapped; a public switch would be one more thing that a plan
    depends on. Not for threads that compute meanwhile.
    """
    if family is None:
        yield
        return
    names = vars(plan)
    before = names["FORWARD"]
    try:
        names["FORWARD"] = tuple(row for row in before if row.family == family)
        _forget_plans()
        yield
    finally:
        names["FORWARD"] = before
        _forget_plans()


def _forget_plans() -> None:
    for module in (api, plan):
        for function in vars(module).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()


class Built(NamedTuple):
    """A row's variant for one dtype and what NVRTC made of it; `error` is the compiler's, `warnings` are lines of its log."""

    name: str
    why: str
    head_dim: int
    smem_bytes: int
    registers: int | None = None
    spilled_bytes: int | None = None
    stack_bytes: int | None = None
    seconds: float | None = None
    warnings: tuple[str, ...] = ()
    error: str | None = None


def candidates(arch: str, dtypes: tuple[str, ...], head_dim: int | None = None) -> list[tuple[Any, str]]:
    """(variant, why) of each row that serves one of the dtypes, the head dim if given, and a device of this arch; at the row's own
    width, without options, or with all of them where the row is there for options."""
    spec = device.KNOWN[arch]
    found = []
    for row in variants.FORWARD:
        flags = ALL_OPTIONS if row.options else ()
        for dtype in (dtype for dtype in dtypes if dtype in row.dtypes):
            variant = variants.Variant(row.family, dtype, row.head_dim, row.head_dim, flags, row.config)
            serves = (head_dim or 0) <= row.head_dim and spec.capability >= row.capability and variant.smem_bytes <= spec.smem_bytes
            if serves:
                found.append((variant, row.why))
    return found


def architectures() -> tuple[str, ...]:
    return tuple(device.KNOWN)


def build(chosen: list[tuple[Any, str]], arch: str) -> Iterator[Built]:
    """Compile them by NVRTC in parallel, and give each back in the order of the table as soon as it is there. Needs no GPU; SetupError with
    the pip line where there is no NVRTC."""
    environment.load_nvrtc()
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:  # NVRTC compiles outside of Python's lock
        yield from pool.map(lambda row: _build(row[0], row[1], arch), chosen)


def _build(variant: Any, why: str, arch: str) -> Built:
    built = Built(variant.name, why, variant.head_dim, variant.smem_bytes)
    start = time.perf_counter()
    try:
        _, log = jit.compile_cubin(jit.render(variant, arch), ("--ptxas-options=-v",))
    except cupyflash.CompileError as error:
        first = next((line for line in str(error).splitlines() if "error" in line), str(error))
        return built._replace(error=first)

    def most(pattern: str) -> int:
        return max(map(int, re.findall(pattern, log)), default=0)

    return built._replace(
        registers=most(r"Used (\d+) registers"),
        spilled_bytes=most(r"(\d+) bytes spill stores"),
        stack_bytes=most(r"(\d+) bytes stack frame"),
        seconds=time.perf_counter() - start,
        warnings=tuple(line.strip() for line in log.splitlines() if re.search(r"warning|\(C75\d\d\)", line)),
    )
