"""Each kernel row through NVRTC for each architecture that can select it, without a GPU: no spill, no local memory, no warning.

All of the cases that were asked for compile at once, on all cores; conftest.py prints what each one takes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import pytest

from cupyflash import jit, plan
from cupyflash.device import KNOWN, served
from cupyflash.problem import AttentionProblem, BackwardProblem
from cupyflash.variants import BACKWARD, FORWARD, PLAIN, FwdConfig, Row, Variant

pytest.importorskip("cupy", reason="CuPy is not installed; pip install 'cupyflash[cuda13]'")

ALL = ("alibi", "bias", "local", "lse", "mask", "sink", "softcap", "used")
# Rows whose `why` says that they spill and are still the fastest, or the only ones: bytes allowed.
SPILLS = {
    (64, "m128n128s2w4", False): 72,
    (128, "m128n64s2w4", False): 48,
    (192, "m128n32s2w4", False): 84,
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
    """fp16 and bf16, without a flag and with all that the row serves; float32 and float64 for one architecture."""
    flags = (*ALL, "unaligned") if isinstance(row.config, FwdConfig) else ALL
    if not row.options:
        left_out = {"local", "causal"} if row.causal is False else {"causal"} if "local" in PLAIN[row.family] else set()  # never both
        flags = tuple(sorted(PLAIN[row.family] - left_out - {"sink"}))
    for arch, device in KNOWN.items():
        for dtype in row.dtypes:
            for chosen in (("causal",) if row.causal else (), flags):
                variant = Variant(row.family, dtype, *row.head_dims, chosen, row.config)
                half = dtype in ("float16", "bfloat16")
                runs = device.capability >= row.capability and row.arch in (None, arch)
                if runs and variant.smem_bytes <= device.smem_bytes and (half or arch == "90a"):
                    yield Case(variant, arch)


def around(row: Row) -> Iterator[Case]:
    """What runs before and after a kernel of the backward: with and without options, for the dtypes and one architecture."""
    options = {"alibi": True, "bias": "float32", "sink": "float32", "seqused_k": True}
    for dtype in row.dtypes:
        for given, wrt in (({}, ("q",)), (options, ("q", "alibi_slopes", "sink"))):
            p = AttentionProblem(dtype, dtype, 1, 8, 8, 1, 1, 64, 64, 0.125, **given)  # type: ignore[arg-type]
            for step in plan.backward(BackwardProblem(p, wrt), KNOWN["90a"]).steps:
                if step.variant.family != row.family:
                    yield Case(step.variant, "90a")


CASES = [
    pytest.param(row, case, id=f"{case.variant.name}-sm_{case.arch}")
    for row in (*FORWARD, *BACKWARD)
    for case in (*cases(row), *(around(row) if row in BACKWARD else ()))
]


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
    allowed = SPILLS.get((row.head_dim, row.config.tile, row.options), 0)
    assert found.spilled_bytes <= allowed
    assert found.stack_bytes <= allowed
    assert not re.search(r"warning|\(C75\d\d\)", found.log), found.log


def test_spills_are_explained_by_their_rows() -> None:
    for key in SPILLS:
        (row,) = (r for r in FORWARD if (r.head_dim, r.config.tile, r.options) == key)
        assert "spill" in row.why


@pytest.mark.parametrize("row", [FORWARD[-1], BACKWARD[-1]], ids=lambda row: row.family)
def test_the_simple_kernel_compiles_for_each_architecture_that_nvrtc_knows(row: Row) -> None:
    """Any GPU for which `device.query` has no error has a kernel."""
    archs = served()
    assert row.capability == 0
    assert {int(arch.rstrip("a")) for arch in KNOWN} <= set(archs)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(lambda arch: compiled(Case(Variant(row.family, "bfloat16", 64, 64, ALL, row.config), str(arch))), archs))
    assert [(c.stack_bytes, c.spilled_bytes) for c in found] == [(0, 0)] * len(archs)
