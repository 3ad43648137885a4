"""The library's kernel tables: what each row compiles to, a run with some of the rows only, and the rows that could be there.

The one module here that looks behind the library's public names. What it finds is about kernels, not about calls: a timing, also one under
`only_rows`, goes through `cupyflash.attention` or `attention_backward` as a user's call does.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import cupyflash
from cupyflash import api, backward, device, environment, jit, plan, variants

ALL_OPTIONS = ("alibi", "bias", "local", "mask", "sink", "softcap", "used")


def cache_dir() -> Path:
    """The folder of compiled kernels."""
    return environment.cache_dir()


def families(table: str = "FORWARD") -> tuple[str, ...]:
    """Those that a timing can ask for."""
    return tuple(dict.fromkeys(row.family for row in (*vars(variants)[table], *_LESSONS.get(table, ()))))


_LESSONS = {"FORWARD": variants.LESSON}  # rows beside a table that only their name brings into play


@contextmanager
def only_family(family: str | None) -> Iterator[None]:
    """Inside, the library plans with the rows of this family alone, to time a kernel where a better one exists; None is no restriction.
    The family of a backward leaves the forward as it is."""
    table = "BACKWARD" if family in families("BACKWARD") else "FORWARD"
    rows = vars(plan)[table]
    if family is not None:
        rows = tuple(row for row in (*rows, *_LESSONS.get(table, ())) if row.family == family)
    with only_rows(rows, table):
        yield


@contextmanager
def only_rows(rows: tuple[Any, ...], table: str = "FORWARD") -> Iterator[None]:
    """Inside, these rows are the library's table.

    The table is a constant of `plan` and plans are cached, so both are swapped; a public switch would be one more thing that a plan
    depends on. Not for threads that compute meanwhile.
    """
    names = vars(plan)
    before = {name: names[name] for name in (table, "DECODE")}
    try:
        if table == "FORWARD" and rows != variants.FORWARD:  # calls of few rows, too
            names["DECODE"] = ()
        names[table] = rows
        _forget_plans()
        yield
    finally:
        names.update(before)
        _forget_plans()


def _forget_plans() -> None:
    for module in (api, backward, plan):
        for function in vars(module).values():
            if hasattr(function, "cache_clear") and function.__module__ == module.__name__:  # not what it imports: a device stays the same
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
    width, without options, or with all of them where the row is there for options. Below the first row that may launch another kernel
    beside its own stands that one."""
    spec = device.KNOWN[arch]
    found: dict[Any, str] = {}
    for row in (*variants.FORWARD, *variants.BACKWARD):
        options = (*ALL_OPTIONS, "lse") if row in variants.FORWARD else ALL_OPTIONS
        flags = tuple(sorted(options)) if row.options else ()
        for dtype in (dtype for dtype in dtypes if dtype in row.dtypes):
            variant = variants.Variant(row.family, dtype, *row.head_dims, flags, row.config)
            beside = plan.companions(variant, row)
            runs = spec.capability >= row.capability and row.arch in (None, arch)
            if runs and _serves(row, head_dim) and max(one.smem_bytes for one in (variant, *beside)) <= spec.smem_bytes:
                adds = ("dq",) if beside else ()  # what another kernel can do: in most calls this one does it, too
                found[variant._replace(flags=tuple(sorted((*flags, *adds))))] = row.why
                for one in beside:
                    if row.options or one.family != "bwd_sm80_dbias":
                        found.setdefault(one, _BESIDE[one.family])
    return list(found.items())


_BESIDE = {"bwd_sm80_dq": "of the row above: dq alone, or in one order of additions", "bwd_sm80_dbias": "of the row above: dbias"}


def _serves(row: Any, head_dim: int | None) -> bool:
    serves = getattr(row.config, "serves", None)  # which widths up to the row's, where not all
    return head_dim is None or (head_dim <= row.head_dim and (serves is None or bool(serves(-(-head_dim // 16) * 16))))


def architectures() -> tuple[str, ...]:
    return tuple(device.KNOWN)


def build(chosen: list[tuple[Any, str]], arch: str, *, keep: bool = False) -> Iterator[Built]:
    """Compile them by NVRTC in parallel, and give each back in the order of the table as soon as it is there. Needs no GPU; SetupError with
    the pip line where there is no NVRTC. With `keep`, calls of this process run what was compiled here; no file is written."""
    environment.load_nvrtc()
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:  # NVRTC compiles outside of Python's lock
        yield from pool.map(lambda row: _build(row[0], row[1], arch, keep), chosen)


def _build(variant: Any, why: str, arch: str, keep: bool) -> Built:
    built = Built(variant.name, why, variant.head_dim, variant.smem_bytes)
    start = time.perf_counter()
    try:
        unit = jit.render(variant, arch)
        cubin, log = jit.compile_cubin(unit, ("--ptxas-options=-v",))
        if keep:
            jit._in_memory[jit._file_name(unit)] = cubin
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


# --- rows that could be there -------------------------------------------------------------------------------------------------------

REGISTERS = 65536  # of an SM of every architecture that has a tiled kernel


class Trial(NamedTuple):
    """A row that could stand in the table, its kernel, and why it is not worth a timing, if so."""

    row: Any
    built: Built
    why_not: str | None = None


def present(problem: dict[str, Any], family: str | None) -> tuple[Any, Any]:
    """The row that runs a problem on this GPU, or would if the table had this family alone, and its variant; UnsupportedError if none."""
    with only_family(family):
        for row in vars(plan)["FORWARD"]:
            with only_rows((row,)):
                found = cupyflash.supports(device="cuda", **problem)
            if found:
                return row, found.variants[0]
        raise cupyflash.UnsupportedError(cupyflash.supports(device="cuda", **problem).reason)


def configs(like: Any, tiles: Sequence[tuple[int, int]] = ()) -> list[Any]:
    """The configurations of a type that are tried, found by its fields; with `tiles`, (block_m, block_n), these instead of the rule's.

    `warps` alone: 1 to 16. Tiles of warps: 64 or 128 rows, 16 or 32 of them a warp, by 32 to 128 keys, stages as they are. Tiles of
    warpgroups (their warps follow from block_m): 128 or 192 rows, 64 a warpgroup, by 48 to 192 keys in steps of 16, 2 or 3 stages. Fields
    that are not named here stay as they are.
    """
    if like._fields == ("warps",):
        return [like._replace(warps=warps) for warps in (1, 2, 4, 8, 16)]
    if "warps" in like._fields:
        chosen = tiles or tuple(itertools.product((64, 128), (32, 48, 64, 96, 128)))
        found = [like._replace(block_m=m, block_n=n, warps=warps) for m, n in chosen for warps in (4, 8)]
        return [config for config in found if config.block_m in (16 * config.warps, 32 * config.warps)]
    chosen = tiles or tuple(itertools.product((128, 192), range(48, 193, 16)))
    return [like._replace(block_m=m, block_n=n, stages=stages) for m, n in chosen if m % 64 == 0 for stages in (2, 3)]


def trials(problem: dict[str, Any], arch: str, family: str | None, tiles: Sequence[tuple[int, int]], spills: int) -> list[Trial]:
    """The row that is there now, first and whatever became of it, and one for each other configuration, compiled for this GPU."""
    row, variant = present(problem, family)
    limit = device.named("cuda").smem_bytes
    variants_ = [variant._replace(config=config) for config in dict.fromkeys((row.config, *configs(row.config, tiles)))]
    built = {one.name: one for one in build([(v, "") for v in variants_ if v.smem_bytes <= limit], arch, keep=True)}

    def trial(v: Any) -> Trial:
        one = built.get(v.name) or Built(v.name, "", v.head_dim, v.smem_bytes)
        faults = _faults(one, v.threads, limit, spills) if v != variant or one.error else ()
        return Trial(row._replace(config=v.config), one, next(iter(faults), None))

    return [trial(v) for v in variants_]


def _faults(built: Built, threads: int, smem_limit: int, spills: int) -> Iterator[str]:
    if built.smem_bytes > smem_limit:
        yield f"{built.smem_bytes} bytes of shared memory, and a block has {smem_limit}"
    if built.error:
        yield built.error
    if (registers := -(-(built.registers or 0) // 8) * 8 * threads) > REGISTERS:
        yield f"{registers} registers for {threads} threads, and an SM has {REGISTERS}"
    if (built.spilled_bytes or 0) > spills:
        yield f"spills {built.spilled_bytes} bytes"
    yield from built.warnings


def source_line(row: Any) -> str:
    """The row as it stands in variants.py: by the function of its family there, where that can say all of it, else by Row."""
    values = {**row._asdict(), **row.config._asdict()}
    helper = vars(variants).get("_" + row.family.removeprefix("fwd_"))
    names = inspect.signature(helper).parameters if helper else {}
    if helper and names.keys() <= values.keys() and helper(**{name: values[name] for name in names}) == row:
        written = [
            _written(values[name]) if parameter.default is parameter.empty else f"{name}={_written(values[name])}"
            for name, parameter in names.items()
            if values[name] != parameter.default
        ]
        return f"{helper.__name__}({', '.join(written)}),"
    return f"{row!r},"


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
