"""Each kernel row through NVRTC for each architecture that can select it, without a GPU: no spill, no local memory, no warning.

All of the cases that were asked for compile at once, on all cores; conftest.py prints what each one takes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

from cupyflash import jit, plan
from cupyflash.device import KNOWN, served
from cupyflash.problem import QUANTISED, AttentionProblem, BackwardProblem, CacheProblem, MergeProblem
from cupyflash.variants import (
    BACKWARD,
    CACHED,
    DECODE,
    FORWARD,
    LATENT,
    LESSON,
    PLAIN,
    BwdConfig,
    FwdConfig,
    Row,
    SimpleConfig,
    Sm90Config,
    Variant,
)

pytest.importorskip("cupy", reason="CuPy is not installed; pip install 'cupyflash[cuda13]'")

ALL = ("alibi", "bias", "local", "lse", "mask", "sink", "softcap", "used")
# Rows whose `why` says that they spill and are still the fastest, or the only ones: bytes allowed.
SPILLS = {
    (64, "m128n128s2w4", False): 84,
    (128, "m128n64s2w4", False): 56,
    (192, "m128n32s2w4", False): 100,
    (96, "m64n64s2w4g222b2", False): 16,
    (64, "m128n128s2", False): 12,
    (64, "m128n128s2k2", False): 20,
    (192, "m64n64s3", False): 8,
    (256, "m64n64s2", False): 12,
    (128, "m64n128s2", False): 16,
    (576, "w4", True): 24,
    (576, "m64n64s2w12b1", True): 620,
}
# Of packed sequences more has to be known. On Hopper it is the copying thread that spills, which has 24 or 32 registers, what a tile begins
# with, and a key that is computed again; the loops of the products have none.
SPILLS_OF_PACKED = {"fwd_sm80": 140, "fwd_sm90": 56, "bwd_sm80": 8, "bwd_sm80_dq": 8, "bwd_sm90": 72, "bwd_sm90_wide": 56}
SPILLS_ON_BLACKWELL = {
    (96, "m64n64s2w4g222b2", False): 28,
    (128, "m32n64s2w4g222b2", True): 8,
    (128, "m64n128s2w8g242b1", False): 40,
    (256, "m64n64s2w8g222b1", False): 36,
    (256, "m64n64s2w8g222b1", True): 104,
    (256, "m16n16s2w2b1", True): 12,
}


class Case(NamedTuple):
    variant: Variant
    arch: str


class Compiled(NamedTuple):
    registers: int
    stack_bytes: int
    spilled_bytes: int
    log: str


def cases(row: Row) -> Iterator[Case]:
    """Without a flag, under a causal mask, and with all that the row serves; packed sequences for one dtype and architecture."""
    masks = [("causal",) if row.causal else ()]
    flags = (*ALL, "unaligned") if isinstance(row.config, FwdConfig | BwdConfig) else ALL
    if not row.options:
        windows = "local" in PLAIN[row.family] and row.causal is not False  # never with a causal mask
        left_out = {"packed", "sink", "causal" if windows or row.causal is False else "", "" if windows else "local"}
        flags = tuple(sorted(PLAIN[row.family] - left_out))
        masks += [("causal",)] if windows and row.causal is None else []
    packed = [tuple(sorted({*chosen, "packed"} - {"bias", "mask"})) for chosen in (masks[0], flags) if row not in LESSON]
    for dtype in row.dtypes:
        for arch in archs(row, dtype):
            alone = dtype in ("bfloat16", "float32") and arch == (row.arch or ("80" if row.capability == 80 else "90a"))
            for chosen in (*masks, flags, *(packed if alone else ())):
                variant = Variant(row.family, dtype, *row.head_dims, chosen, row.config)
                if serves(row, variant, arch):
                    yield from (Case(form, arch) for form in forms(variant, row, arch))


def archs(row: Row, dtype: str) -> Iterable[str]:
    """bf16 for each; fp16, which has other names of instructions only, float32 and float64 for one. Of the backward nothing for sm_89,
    whose code is that of sm_86."""
    if dtype in ("float32", "float64"):
        return ("90a",)
    if dtype == "float16":
        return (row.arch or "80",)
    return KNOWN if row not in BACKWARD else [arch for arch in KNOWN if arch != "89"]


def serves(row: Row, variant: Variant, arch: str) -> bool:
    """Whether a call on this architecture can come to the row: it runs there, and no row before it takes all that it could."""

    def runs(other: Row) -> bool:
        here = variant._replace(family=other.family, config=other.config)
        smem_bytes = max(v.smem_bytes for v in (here, *plan.companions(here, other)))
        capable = KNOWN[arch].capability >= other.capability and other.arch in (None, arch)
        return capable and smem_bytes <= KNOWN[arch].smem_bytes

    table = next(rows for rows in (FORWARD, BACKWARD, LESSON) if row in rows)
    for other in table[: table.index(row)]:
        takes = other.options or PLAIN[other.family].issuperset(variant.flags)
        takes = takes and variant.dtype in other.dtypes and all(a >= b for a, b in zip(other.head_dims, row.head_dims, strict=True))
        if takes and other.arch is None and other.causal is None and runs(other):
            return False
    return runs(row)


def forms(variant: Variant, row: Row, arch: str) -> Iterator[Variant]:
    """The kernels that a row may launch. On Hopper without a mask one that splits tiles as well. Of the tiled backward: dk and dv with dq;
    without it, for one architecture, as that has less to hold; dq alone; and the gradient of a bias."""
    if not isinstance(row.config, BwdConfig):
        yield variant
        if row.family == "bwd_sm90" and not {"causal", "local", "packed"}.intersection(variant.flags):
            yield variant._replace(flags=tuple(sorted((*variant.flags, "splits"))))
        return
    yield variant._replace(flags=tuple(sorted((*variant.flags, "dq"))))
    if arch == "80" and variant.dtype == "bfloat16" and "packed" not in variant.flags:
        yield variant
    dq, dbias = plan.companions(variant, row)
    yield from (dq, dbias) if "bias" in variant.flags else (dq,)


def around() -> Iterator[Case]:
    """What runs before and after the kernels of the backward's rows: with and without options, of each width, for one architecture."""
    options = {"alibi": True, "bias": "float32", "sink": "float32", "seqused_k": True, "aligned16": False}
    packed = {"alibi": True, "sink": "float32", "packed": True}
    for dtype in BACKWARD[-1].dtypes:
        for given, wrt in (({}, ("q", "k")), (options, ("q", "alibi_slopes", "sink")), (packed, ("q", "k", "alibi_slopes", "sink"))):
            for d in sorted({row.head_dim for row in BACKWARD}):
                p = AttentionProblem(dtype, dtype, 1, 999, 999, 1, 1, d, d, 0.125, **given)  # type: ignore[arg-type]
                for step in plan.backward(BackwardProblem(p, wrt), KNOWN["90a"]).steps:
                    if step.variant.family in ("bwd_delta", "bwd_convert", "bwd_sum", "packed_tiles"):
                        yield Case(step.variant, "90a")
    for paged in ("paged",), ():
        yield Case(Variant("packed_tiles", "float32", 0, 0, ("fromlast", "local", "packed", *paged, "used"), SimpleConfig(8)), "90a")


def over_caches() -> Iterator[Case]:
    """The last row for caches, which serves everything, and what runs before it: of all dtypes for one architecture, of one for each; over
    bytes once with all options, and where float64 leaves the fewest registers."""
    options = {"alibi": True, "mask": True, "sink": "float32", "softcap": 2.0, "window_left": 9, "write_lse": True}
    packed = options | {"packed": True, "mask": False, "seqused_q": True}
    row = CACHED[-1]
    asked: list[tuple[str, str, dict[str, Any], str]] = [("float64", "int8", {}, "90a")]
    asked += [("bfloat16", cache_dtype, options, "90a") for cache_dtype in QUANTISED]
    for dtype in row.dtypes:
        asked += [(dtype, dtype, given, arch) for given in ({}, packed) for arch in (KNOWN if dtype == "bfloat16" else ("90a",))]
    for dtype, cache_dtype, given, arch in asked:
        p = AttentionProblem(dtype, dtype, 1, 9, 999, 1, 1, *row.head_dims, 0.125, **given)
        for step in plan.cached(CacheProblem(p, cache_dtype, 16, 9, 64, rotary="float32" if given else dtype), KNOWN[arch]).steps:
            yield Case(step.variant, arch)
    chunks = AttentionProblem("bfloat16", "bfloat16", 1, 999, 999, 1, 1, 64, 64, 0.125, packed=True)
    yield Case(plan.cached(CacheProblem(chunks, "bfloat16", 16), KNOWN["90a"]).steps[0].variant, "90a")


def over_pages(row: Row) -> Iterator[Case]:
    """What a row of fwd_sm90 has for keys in pages, whose lengths are always read: packed, of one dtype, 16 keys at a time."""
    config = row.config
    if isinstance(config, Sm90Config):
        for variant, arch in cases(row):
            if variant.dtype == "bfloat16" and {"lse", "packed"} <= set(variant.flags):
                flags = tuple(sorted({*variant.flags, "paged", "used"} - {"bias"}))
                yield Case(variant._replace(flags=flags, config=config._replace(page_rows=16)), arch)


def decoding() -> Iterator[Case]:
    """The kernels of few rows, of each width that the table has: without an option, with all, over caches of bytes. The fewest that differ
    for architectures that have no instructions of their own."""
    options = {"alibi": True, "sink": "float32", "softcap": 2.0, "window_left": 9, "window_right": 0, "write_lse": True}
    packed = options | {"packed": True, "aligned16": False, "seqused_q": True}
    everything: tuple[Any, ...] = (packed, {"page_size": 24, "num_splits": 9})
    few = (everything, ({}, {"page_size": 16, "cache_dtype": "float8_e4m3fn"}))
    many = (*few, ({}, {"page_size": None}), (options, {"page_size": 32}), ({}, {"page_size": None, "cache_dtype": "int8"}))
    for d in sorted({row.head_dim for row in DECODE}):
        for arch in KNOWN:
            for given, more in many if arch == "90a" else few:
                for batch in (32, 1):  # alone in clusters, where there are any
                    p = AttentionProblem("bfloat16", "bfloat16", batch, 1, 999, 8, 8, d, d, 0.125, **given)
                    problem = CacheProblem(p, **{"cache_dtype": "bfloat16", **more})
                    yield Case(plan.cached(problem, KNOWN[arch]).steps[-1].variant, arch)


def latents() -> Iterator[Case]:
    """Of each dtype plain; with all options over pages, split and packed."""
    options = {"alibi": True, "sink": "float32", "softcap": 2.0, "window_left": 9, "write_lse": True, "packed": True, "seqused_q": True}
    for dtype, given, more in (
        ("float16", {}, {"page_size": None}),
        ("bfloat16", {}, {"page_size": None}),
        ("bfloat16", options, {"page_size": 24, "num_splits": 9}),
    ):
        p = AttentionProblem(dtype, dtype, 32, 1, 999, 128, 1, *LATENT[0].head_dims, 0.125, **given)  # type: ignore[arg-type]
        for step in plan.cached(CacheProblem(p, dtype, values_in_keys=True, **more), KNOWN["90a"]).steps:
            yield Case(step.variant, "90a")


def merging() -> Iterator[Case]:
    """Rows of whole pieces of 16 bytes and others: of all dtypes for one architecture, of one for each."""
    for dtype in FORWARD[-1].dtypes:
        for aligned in (True, False):
            for arch in KNOWN if dtype == "bfloat16" else ("90a",):
                (step,) = plan.merging(MergeProblem(dtype, 2, 1, 9, 1, 64, aligned), KNOWN[arch]).steps
                yield Case(step.variant, arch)


CASES = [
    pytest.param(row, case, id=f"{case.variant.name}-sm_{case.arch}")
    for row, found in (
        *((row, cases(row)) for row in (*FORWARD, *BACKWARD, *LESSON)),
        *((row, dict.fromkeys(over_pages(row))) for row in FORWARD),
        (BACKWARD[-1], dict.fromkeys(around())),
        (CACHED[-1], dict.fromkeys(over_caches())),
        (DECODE[-1], dict.fromkeys(decoding())),
        (LATENT[-1], dict.fromkeys(latents())),
        (FORWARD[-1], dict.fromkeys(merging())),
    )
    for case in found
]


def key_of(row: Row) -> tuple[int, str, bool]:
    return row.head_dim, row.config.tile, row.options


def compiled(case: Case) -> Compiled:
    _, log = jit.compile_cubin(jit.render(*case), ("--ptxas-options=-v",))
    (registers,) = re.findall(r"Used (\d+) registers", log)
    ((stack, spilled),) = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", log)
    return Compiled(int(registers), int(stack), int(spilled), log)


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest) -> Iterator[dict[Case, Future[Compiled]]]:
    asked = [item.callspec.params["case"] for item in request.session.items if "results" in getattr(item, "fixturenames", ())]
    pool = ThreadPoolExecutor(os.cpu_count())  # NVRTC scales over threads
    yield {case: pool.submit(compiled, case) for case in asked}
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize(("row", "case"), CASES)
def test_compiles_without_spills(
    row: Row, case: Case, results: dict[Case, Future[Compiled]], record_property: Callable[[str, object], None]
) -> None:
    found = results[case].result()
    takes = f"{found.registers}" + (f"+{found.spilled_bytes}" if found.spilled_bytes else "")
    record_property("compiled", (case.variant.name, case.variant.smem_bytes, case.arch, takes))
    allowed = (SPILLS | (SPILLS_ON_BLACKWELL if case.arch in ("100", "120") else {})).get(key_of(row), 0)
    if "packed" in case.variant.flags:
        allowed = max(allowed, SPILLS_OF_PACKED.get(case.variant.family, 0))
    assert found.spilled_bytes <= allowed
    assert found.stack_bytes <= -(-allowed // 8) * 8
    assert not re.search(r"warning|\(C75\d\d\)", found.log), found.log


def test_spills_are_explained_by_their_rows() -> None:
    for key in SPILLS:
        (row,) = (r for r in (*FORWARD, *BACKWARD, *CACHED, *LATENT) if key_of(r) == key)
        assert "spill" in row.why
    for key, num_bytes in SPILLS_ON_BLACKWELL.items():
        assert any(key_of(r) == key and f"{num_bytes} bytes" in r.why for r in (*BACKWARD, *DECODE))


@pytest.mark.parametrize("row", [FORWARD[-1], BACKWARD[-1]], ids=lambda row: row.family)
def test_the_simple_kernel_compiles_for_each_architecture_that_nvrtc_knows(row: Row) -> None:
    """Any GPU for which `device.query` has no error has a kernel."""
    archs = served()
    assert row.capability == 0
    assert {int(arch.rstrip("a")) for arch in KNOWN} <= set(archs)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(lambda arch: compiled(Case(Variant(row.family, "bfloat16", 64, 64, ALL, row.config), str(arch))), archs))
    assert [(c.stack_bytes, c.spilled_bytes) for c in found] == [(0, 0)] * len(archs)
