"""Each kernel row through NVRTC for each architecture that can select it, without a GPU: no spill, no local memory, no warning."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from cupyflash import jit
from cupyflash.device import KNOWN
from cupyflash.variants import FORWARD, PLAIN, FwdConfig, Row, Variant

pytest.importorskip("cupy", reason="CuPy is not installed; pip install 'cupyflash[cuda13]'")

ALL = ("alibi", "bias", "local", "lse", "mask", "sink", "softcap", "used")
# Rows whose `why` says that they spill and are still the fastest, or the only ones: bytes allowed.
SPILLS = {
    (64, "m128n128s2w4", False): 160,
    (96, "m128n64s2w4", False): 104,
    (128, "m128n64s2w4", False): 64,
    (192, "m64n64s2w4", False): 88,
    (256, "m64n32s2w4", True): 48,
}


def variants(row: Row) -> Iterator[tuple[Variant, str]]:
    flags = (*ALL, "unaligned") if isinstance(row.config, FwdConfig) else ALL
    for arch, device in KNOWN.items():
        for dtype in ("float16", "bfloat16"):
            for chosen in ((), tuple(sorted(PLAIN)) if not row.options else flags):
                variant = Variant(row.family, dtype, row.head_dim, row.head_dim, chosen, row.config)
                if device.capability >= row.capability and variant.smem_bytes <= device.smem_bytes:
                    yield variant, arch


CASES = [pytest.param(row, v, arch, id=f"{v.name}-sm_{arch}") for row in FORWARD for v, arch in variants(row)]


@pytest.mark.parametrize(("row", "variant", "arch"), CASES)
def test_compiles_without_spills(row: Row, variant: Variant, arch: str, record_property: Any) -> None:
    _, log = jit.compile_cubin(jit.render(variant, arch), ("--ptxas-options=-v",))
    registers = int(re.search(r"Used (\d+) registers", log)[1])  # type: ignore[index]
    stack, spilled = map(int, re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", log).groups())  # type: ignore[union-attr]
    record_property("registers", registers)
    print(f"{variant.name:<90} sm_{arch:<4} {registers:>4} registers {variant.smem_bytes:>7} B shared {spilled:>4} B spilled")  # noqa: T201
    allowed = SPILLS.get((row.head_dim, row.config.tile, row.options), 0)
    assert spilled <= allowed
    assert stack <= allowed
    assert not re.search(r"warning|\(C75\d\d\)", log), log


def test_spills_are_explained_by_their_rows() -> None:
    for key in SPILLS:
        (row,) = (r for r in FORWARD if (r.head_dim, r.config.tile, r.options) == key)
        assert "spill" in row.why


def test_float32_and_float64_have_the_simple_kernel() -> None:
    for dtype in ("float32", "float64"):
        config = next(row.config for row in FORWARD if row.family == "fwd_simple")
        for flags in ((), ALL):
            _, log = jit.compile_cubin(
                jit.render(Variant("fwd_simple", dtype, 256, 256, flags, config), "90a"), ("--ptxas-options=-v",)
            )
            assert "0 bytes stack frame, 0 bytes spill stores" in log
