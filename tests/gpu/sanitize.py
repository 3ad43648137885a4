"""The kernels of a family at small sizes, for NVIDIA's compute-sanitizer: dense and packed, every option, forward or backward; of `decode`
and `decode_cluster` caches with and without pages, of bytes, split, and with tokens that are appended and turned.

    compute-sanitizer --tool memcheck python tests/gpu/sanitize.py fwd_sm90
    compute-sanitizer --tool racecheck --num-cuda-barriers 64 python tests/gpu/sanitize.py --every-lane bwd_sm90

racecheck does not see that what lanes read before a `__syncwarp` is over when one of them arrives at an mbarrier for its warp, and reports
the buffers of the Hopper backward that are released so. With --every-lane each lane arrives itself, and nothing else is changed.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path[:0] = [str(Path(__file__).parents[depth]) for depth in (0, 1, 2)]
import cupy  # noqa: E402
from on_gpu import only  # noqa: E402

import cupyflash  # noqa: E402
from cupyflash import device, jit, plan, variants  # noqa: E402

FORWARD = {"bwd_simple": "fwd_simple", "bwd_sm80": "fwd_sm80", "bwd_sm90": "fwd_sm90", "bwd_sm90_wide": "fwd_sm90"}
DIMS = {"fwd_simple": (32,), "fwd_keys_outside": (40, 64, 128), "bwd_simple": (32,), "bwd_sm90": (64, 128), "bwd_sm90_wide": (192, 256)}
OTHERS = (64, 96, 128)

# One lane arrives for its warp, so barriers count warps: each lane, so they count threads.
EVERY_LANE = {
    "  if (threadIdx.x % 32 == 0) mbarrier_arrive(smem_address(&barrier));": "  mbarrier_arrive(smem_address(&barrier));",
    "mbarrier_init(smem_address(&smem.keys_empty[n]), 8 + 1)": "mbarrier_init(smem_address(&smem.keys_empty[n]), 256 + 32)",
    "mbarrier_init(smem_address(&smem.q_empty[n]), 8)": "mbarrier_init(smem_address(&smem.q_empty[n]), 256)",
    "mbarrier_init(smem_address(&smem.dout_empty[n]), 8)": "mbarrier_init(smem_address(&smem.dout_empty[n]), 256)",
    "mbarrier_init(smem_address(&smem.dq_full[g]), 4)": "mbarrier_init(smem_address(&smem.dq_full[g]), 128)",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    tables = (*variants.FORWARD, *variants.LESSON, *variants.BACKWARD, *variants.DECODE)
    parser.add_argument("family", choices=sorted({row.family for row in tables}))
    parser.add_argument("--every-lane", action="store_true")
    asked = parser.parse_args()
    family, backward = asked.family, asked.family.startswith("bwd")
    ran, render = set(), jit.render

    def noted(variant: variants.Variant, arch: str) -> jit.Unit:
        ran.add(variant.name)
        unit = render(variant, arch)
        if asked.every_lane and variant.family.startswith("bwd_sm90"):
            for one, every in EVERY_LANE.items():
                assert one in unit.source, one
                unit = unit._replace(source=unit.source.replace(one, every))
        return unit

    if family.startswith("decode"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jit, "render", noted)
            count = over_caches([row for row in variants.DECODE if row.family == family])
        told(family, count, ran)
        return

    every: list[dict[str, Any]] = [{}, {"causal": True}, {"window_size": (33, 7)}]
    if not family.startswith("bwd_sm90"):  # whose rows serve no option
        every.append({"softcap": 5.0, "alibi_slopes": cupy.ones(2, np.float32), "sink": cupy.zeros(2, np.float32)})
    orders = (False, True) if family == "bwd_sm80" else (False,)
    lesson = family == "fwd_keys_outside"  # dense, without options
    if lesson:
        every = every[:2]
    forward = [row for row in (*variants.FORWARD, *variants.LESSON) if row.family == FORWARD.get(family, family)]
    calls = list(itertools.product(DIMS.get(family, OTHERS), (False,) if lesson else (False, True), orders, every))
    with pytest.MonkeyPatch.context() as patch, only(*forward):
        patch.setattr(jit, "render", noted)
        patch.setattr(plan, "_SHORT_SEQUENCES", 0)  # that the Hopper kernels serve these
        with only(*[row for row in variants.BACKWARD if row.family == family], table="BACKWARD"):
            for dim, packed, deterministic, options in calls:
                call(dim, packed, backward, deterministic, **options)
    told(family, len(calls), ran)


def told(family: str, count: int, ran: set[str]) -> None:
    sys.stdout.write("\n  ".join([f"{family}: {count} calls of {len(ran)} kernels", *sorted(ran)]) + "\n")


# (page size, dtype of the cache, splits, whether tokens are appended)
CACHES: list[tuple[int, str, dict[str, int], bool]] = [
    *((0, "float16", {}, False), (0, "float16", {}, True), (16, "float16", {}, True), (64, "float16", {}, False)),
    *(
        (24, "int8", {}, True),
        (64, "int8", {}, False),
        (0, "float16", {"num_splits": 3}, False),
        (16, "float16", {"split_size": 100}, False),
    ),
]


def over_caches(rows: list[variants.Row]) -> int:
    """Calls by each row, of 2 query tokens and 2 heads a key head, over sequences of 1, 300 and 0 keys, or where there are clusters one of
    300 with as many key heads as fill the GPU; plain, and with all options."""
    count = 0
    options = {"window_size": (150, 0), "softcap": 5.0}
    for row in rows:
        cluster = row.config.cluster if isinstance(row.config, variants.DecodeConfig) else 1
        heads = device.query(0).num_sms // cluster if cluster > 1 else 2
        lengths = [300] if cluster > 1 else [1, 300, 0]
        with only(row, table="DECODE"):
            for (page_size, kept, splits, appends), given in itertools.product(CACHES, ({}, options)):
                if not (splits and cluster > 1):
                    cache_call(row.head_dim, heads, lengths, page_size, kept, appends, **splits, **given)
                    count += 1
    return count


def cache_call(dim: int, heads: int, lengths: list[int], page_size: int, kept: str, appends: bool, **options: Any) -> None:
    rng = np.random.default_rng(0)
    batch, slots = len(lengths), 312  # room for what is appended, and no multiple of what a block takes at a time
    pages = -(-slots // page_size) if page_size else 1
    shape = (batch * pages, page_size or slots, heads, dim)

    def normal(*shape: int) -> Any:
        return cupy.asarray(rng.standard_normal(shape).astype(np.float16))

    caches = [normal(*shape) if kept == "float16" else cupy.asarray(rng.integers(-99, 99, shape).astype(kept)) for _ in "kv"]
    if "softcap" in options:
        options |= {"sink": cupy.zeros(2 * heads, np.float32), "alibi_slopes": cupy.ones(2 * heads, np.float32)}
    if page_size:
        options["page_table"] = cupy.asarray(rng.permutation(batch * pages).reshape(batch, pages).astype(np.int32))
    if kept != "float16":
        options |= {"k_descale": 0.01, "v_descale": 0.01}
    if appends:
        options |= {name: normal(batch, 2, heads, dim) for name in ("k_new", "v_new")}
        options |= {name: cupy.ones((slots + 8, dim // 2), np.float32) for name in ("rotary_cos", "rotary_sin")}
    cupyflash.attention_with_kvcache(
        normal(batch, 2, 2 * heads, dim), *caches, cache_seqlens=cupy.asarray(np.array(lengths, np.int32)), **options
    )
    cupy.cuda.runtime.deviceSynchronize()


def call(dim: int, packed: bool, backward: bool, deterministic: bool, **options: Any) -> None:
    rng = np.random.default_rng(0)
    offsets = {"cu_seqlens_q": cupy.asarray(np.array([0, 130, 130, 131, 331], np.int32))} if packed else {}
    shapes = [(335, heads, dim) if packed else (1, rows, heads, dim) for rows, heads in ((130, 2), (197, 1), (197, 1), (130, 2))]
    q, k, v, dout = (cupy.asarray(rng.standard_normal(shape).astype(np.float16)) for shape in shapes)
    attend: Any = cupyflash.attention_varlen if packed else cupyflash.attention
    out, lse, _ = attend(q, k, v, *offsets.values(), return_lse=True, **options)
    if backward:
        cupyflash.attention_backward(dout, q, k, v, out, lse, deterministic=deterministic, **offsets, **options)
    cupy.cuda.runtime.deviceSynchronize()


if __name__ == "__main__":
    main()
