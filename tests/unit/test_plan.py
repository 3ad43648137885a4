"""The planner and its tables, for every architecture, without one."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import jit, params, plan, variants
from cupyflash.arrays import ArrayView
from cupyflash.device import HOST_SPEC, KNOWN, DeviceSpec
from cupyflash.problem import AttentionProblem, BackwardOperands, BackwardProblem, CacheProblem, Operands
from cupyflash.variants import BACKWARD, CACHED, DECODE, FORWARD, LESSON, BwdConfig, FwdConfig, Variant


def problem(**fields: Any) -> AttentionProblem:
    base = {"dtype": "bfloat16", "out_dtype": fields.get("dtype", "bfloat16"), "batch": 2, "seqlen_q": 1000, "seqlen_k": 900}
    base |= {"num_heads_q": 8, "num_heads_kv": 2, "head_dim": 128, "head_dim_v": 128, "softmax_scale": 0.1}
    return AttentionProblem(**(base | fields))


@pytest.mark.parametrize("arch", KNOWN)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_every_supported_problem_has_a_row_that_fits_the_device(arch: str, dtype: str) -> None:
    device = KNOWN[arch]
    for d, dv in itertools.product((1, 8, 33, 64, 96, 128, 192, 256), repeat=2):
        (step,) = plan.forward(problem(dtype=dtype, head_dim=d, head_dim_v=dv), device).steps
        v = step.variant
        tensor_cores = "fwd_sm90" if arch == "90a" else "fwd_sm80"
        assert v.family == (tensor_cores if dtype in ("float16", "bfloat16") else "fwd_simple")
        assert v.head_dim >= d
        assert v.head_dim_v >= dv
        assert v.smem_bytes <= device.smem_bytes
        assert v.threads <= 1024
        assert step.why


@pytest.mark.parametrize("row", [r for r in FORWARD if isinstance(r.config, FwdConfig)], ids=lambda r: f"{r.head_dim}-{r.config.tile}")
def test_accumulators_of_a_tiled_row_fit_the_registers(row: variants.Row) -> None:
    """S and O of a warp's rows in float32, spread over 32 lanes, must leave room for P, addresses and fragments in 255 registers: 31
    others are too few without spills, and a row that says so may have them."""
    c = row.config
    assert isinstance(c, FwdConfig)
    assert c.block_m % (16 * c.warps) == 0  # mma.sync m16n8k16
    assert c.block_n % 16 == 0
    rows = c.block_m // c.warps
    assert rows * (c.block_n + row.head_dim) // 32 <= (224 if "spill" in row.why else 200)


@pytest.mark.parametrize("row", [r for r in BACKWARD if isinstance(r.config, BwdConfig)], ids=lambda r: f"{r.head_dim}-{r.config.tile}")
def test_a_tiled_row_of_the_backward_shares_its_products_among_its_warps(row: variants.Row) -> None:
    c = row.config
    assert isinstance(c, BwdConfig)
    for rows, columns, along in (
        (c.block_m, c.block_n, c.warps_m),  # S and dP
        (c.block_n, 16 * c.warps // c.warps_n, c.warps_n),  # dK and dV: columns go to the warps 16 at a time, in turn
        (c.block_m, 16 * c.warps // c.warps_q, c.warps_q),  # dQ
    ):
        assert c.warps % along == 0
        assert rows % (16 * along) == 0
        assert columns % (16 * (c.warps // along)) == 0
    accumulators = c.block_n * 2 * row.head_dim // (32 * c.warps)  # dK and dV, which stay
    tiles = max(2 * c.block_m * c.block_n, c.block_m * row.head_dim) // (32 * c.warps)  # S and dP, then dQ
    limit = min(255, 65536 // (32 * c.warps * c.blocks))
    assert accumulators + tiles <= limit - 28
    r = row.dq
    assert r is not None
    assert r.block_m in (16 * r.warps, 32 * r.warps)
    assert (2 * r.block_n + row.head_dim) * r.block_m // (32 * r.warps) <= min(255, 65536 // (32 * r.warps * r.blocks)) - 28


def test_the_head_dim_picks_the_row_and_the_shared_memory_the_tile() -> None:
    def tile(d: int, arch: str) -> str:
        return plan.forward(problem(head_dim=d, head_dim_v=d), KNOWN[arch]).steps[0].variant.name

    assert tile(64, "80") == "fwd_sm80__bf16_d64__m128n128s2w4"
    assert tile(40, "80") == "fwd_sm80__bf16_d48__m128n128s2w4"
    assert tile(256, "100") == "fwd_sm80__bf16_d256__m128n64s2w8"
    assert tile(256, "90a") == "fwd_sm90__bf16_d256__m128n64s2q1o"
    assert tile(256, "86") == "fwd_sm80__bf16_d256__m64n32s2w4"

    def of_backward(d: int, arch: str, **fields: Any) -> str:
        p = BackwardProblem(problem(head_dim=d, head_dim_v=d, **fields), ("v",))
        return plan.backward(p, KNOWN[arch]).steps[1].variant.name.removeprefix("bwd_sm80__bf16_")

    assert of_backward(40, "90a") == "d48__m64n64s2w4g222b3"
    assert [of_backward(128, arch) for arch in KNOWN] == [f"d128__{tile}" for tile in _TILES_OF_128]
    assert [of_backward(256, arch, mask=True) for arch in KNOWN] == [f"d256__{tile}__mask" for tile in _TILES_OF_256]


_TILES_OF_128 = (
    "m64n128s2w8g242b1", "m32n64s2w4g222b2", "m32n64s2w4g222b2", "m64n128s2w8g242b1", "m64n128s2w8g242b1", "m32n64s2w4g222b2"
)  # fmt: skip
_TILES_OF_256 = (
    "m32n64s2w8g222b1", "m32n32s1w4g212b2", "m32n32s1w4g212b2", "m64n64s2w8g222b1", "m64n64s2w8g222b1", "m32n32s1w4g212b2"
)  # fmt: skip


@pytest.mark.parametrize("dims", [{"head_dim": 44}, {"head_dim_v": 44}])
def test_a_row_that_ends_inside_16_bytes_is_loaded_element_by_element(dims: dict[str, int]) -> None:
    variant = plan.forward(problem(**{"head_dim": 48, "head_dim_v": 48, **dims}), KNOWN["80"]).steps[0].variant
    assert variant.flags == ("unaligned",)


def test_options_take_the_rows_that_leave_room_for_them() -> None:
    for options in ({"softcap": 2.0}, {"window_left": 3}, {"mask": True}, {"aligned16": False}):
        config = plan.forward(problem(**options), KNOWN["80"]).steps[0].variant.config
        assert config == FwdConfig(64, 64, 2, 4)
    assert plan.forward(problem(window_right=0, write_lse=True), KNOWN["80"]).steps[0].variant.config == FwdConfig(128, 64, 2, 4)


def test_what_tensor_maps_cannot_describe_runs_without_them() -> None:
    def family(**fields: Any) -> str:
        return plan.forward(problem(**fields), KNOWN["90a"]).steps[0].variant.family

    assert family() == "fwd_sm90"
    assert family(tensor_maps=False) == family(tensor_maps=False, aligned16=False) == "fwd_sm80"
    (step,) = plan.forward(problem(head_dim=64, head_dim_v=64), KNOWN["90a"]).steps
    assert step.boxes == (("q", 256), ("k", 64), ("v", 64), ("out", 8))
    (step,) = plan.forward(problem(head_dim=64, head_dim_v=128), KNOWN["90a"]).steps  # O's rows do not fit Q's memory
    assert [name for name, _ in step.boxes] == ["q", "k", "v"]
    assert plan.forward(problem(), KNOWN["80"]).steps[0].boxes == ()


def test_rows_for_short_calls_and_for_causal_ones() -> None:
    def tile(**fields: Any) -> str:
        return plan.forward(problem(**fields), KNOWN["90a"]).steps[0].variant.config.tile

    assert tile(seqlen_k=1024) == "m128n96s3q2"
    assert tile(seqlen_k=1025) == "m192n64s3q2p"
    assert tile(seqlen_k=1025, window_right=0) == tile(seqlen_k=1025, window_left=9) == "m192n64s4q2"
    assert tile(seqlen_k=4096, window_right=0) == tile(seqlen_k=4096, window_left=9) == "m192n80s2q2"
    assert tile(seqlen_k=4096, window_left=2000, window_right=0) == "m192n64s4q2"  # no row sees more than 2001 keys
    assert tile(seqlen_k=4096, head_dim=192, head_dim_v=192) == "m128n64s2q1o"
    assert tile(seqlen_k=4096, head_dim=192, head_dim_v=128) == tile(seqlen_k=4096, head_dim=136, head_dim_v=72) == "m128n96s2q1o"


def test_a_window_a_sink_and_used_lengths_stay_in_the_fast_rows_of_sm_90() -> None:
    fast = {row.config for row in FORWARD if row.family == "fwd_sm90" and not row.options}
    for fields in (
        {"window_left": 3},
        {"sink": "float32"},
        {"sink": "bfloat16"},
        {"seqused_k": True},
        {"window_left": 3, "seqused_q": True},
    ):
        assert plan.forward(problem(**fields), KNOWN["90a"]).steps[0].variant.config in fast
    for fields in ({"softcap": 2.0}, {"mask": True}, {"bias": "float32"}, {"alibi": True}):
        assert plan.forward(problem(**fields), KNOWN["90a"]).steps[0].variant.config not in fast


def test_names_hold_the_flags_that_change_the_code() -> None:
    p = problem(window_right=0, write_lse=True, sink="float32", softcap=3.0, bias="bfloat16", out_dtype="float32", aligned16=False)
    name = plan.forward(p, KNOWN["80"]).steps[0].variant.name
    assert name == "fwd_sm80__bf16_d128__m64n64s2w4__bias_causal_lse_outfloat32_sinkf32_softcap_unaligned"
    assert "local" in plan.forward(problem(window_left=3), KNOWN["80"]).steps[0].variant.name
    assert "d192v128" in plan.forward(problem(head_dim=192), KNOWN["80"]).steps[0].variant.name


def test_run_time_numbers_do_not_change_the_variant() -> None:
    def variant(**fields: Any) -> Variant:
        return plan.forward(problem(**fields), KNOWN["90a"]).steps[0].variant

    assert variant() == variant(batch=7, seqlen_q=300, seqlen_k=9, num_heads_q=6, softmax_scale=1.0)
    assert variant(softcap=2.0) == variant(softcap=50.0)
    assert variant(window_left=2) == variant(window_left=30, window_right=4)


def test_few_rows_are_decoded_where_tiles_would_leave_the_gpu_idle() -> None:
    def family(**fields: Any) -> str:
        heads = {"batch": 1, "seqlen_q": 4, "seqlen_k": 2048, "num_heads_q": 32, "num_heads_kv": 8}
        return plan.forward(problem(**heads | fields), KNOWN["90a"]).steps[-1].variant.family.removesuffix("_cluster")

    assert family() == family(batch=64) == family(seqlen_q=1) == "decode"
    assert family(seqlen_q=16) == family(batch=64, num_heads_q=8) == "decode"  # 64 rows of one tile, and 32 tiles for 132 SMs; four rows
    assert family(seqlen_q=17) == family(batch=64, seqlen_q=5) == family(batch=64, num_heads_q=8, seqlen_q=5) == "fwd_sm90"
    assert family(seqlen_k=0) == family(mask=True) == "fwd_sm90"
    assert plan.forward(problem(batch=1, seqlen_q=1, dtype="float32"), KNOWN["90a"]).steps[0].variant.family == "fwd_simple"


def test_one_token_of_grouped_heads_has_one_kernel_packed_or_not() -> None:
    """`supports` and `warmup` ask about the call as it is stated; the call itself has made rows of the heads that share a key head."""
    found = set()
    for heads_q, heads_kv, batch, seqlen_k in itertools.product((4, 8, 32, 64), (1, 4), (1, 16, 64), (128, 4096)):
        stated = problem(batch=batch, seqlen_q=1, seqlen_k=seqlen_k, num_heads_q=heads_q, num_heads_kv=heads_kv)
        packed = stated._replace(seqlen_q=heads_q // heads_kv, num_heads_q=heads_kv)
        variant, same = (plan.forward(p, KNOWN["90a"]).steps[-1].variant for p in (stated, packed))
        assert variant == same, stated
        found.add(variant.family)
    assert found >= {"decode", "fwd_sm90"}


def test_an_empty_problem_launches_nothing() -> None:
    for axis in ("batch", "seqlen_q", "num_heads_q"):
        assert plan.forward(problem(**{axis: 0}), KNOWN["90a"]).steps == ()
    (step,) = plan.forward(problem(seqlen_k=0), KNOWN["90a"]).steps  # but zeros must be written
    assert step.grid[0] > 0


def test_the_grid_is_one_dimensional() -> None:
    """KF-062: batch and heads past 65535."""
    (step,) = plan.forward(problem(batch=65537, num_heads_q=3, num_heads_kv=3, seqlen_q=129), KNOWN["80"]).steps
    assert step.grid == (65537 * 3 * 2, 1, 1)


def test_arguments_are_the_buffers_in_use() -> None:
    assert plan.forward(problem(write_lse=True, mask=True), KNOWN["80"]).steps[0].args == ("q", "k", "v", "out", "lse", "mask")


def backward(wrt: tuple[str, ...] = ("q", "k", "v"), more: dict[str, Any] | None = None, **fields: Any) -> plan.Plan:
    return plan.backward(BackwardProblem(problem(**fields), wrt, **(more or {})), KNOWN["90a"])


def test_short_walks_of_narrow_heads_have_the_next_keys_under_way() -> None:
    def tile(**fields: Any) -> str:
        heads = {"num_heads_q": 2, "num_heads_kv": 2, "head_dim": 64, "head_dim_v": 64}
        (step,) = (s for s in backward(**heads | fields).steps if s.variant.family == "bwd_sm90")
        return step.variant.config.tile

    assert tile(seqlen_q=1024, seqlen_k=9000) == tile(seqlen_q=9000, window_left=1016, window_right=7) == "m128n128s2k2"
    assert tile(seqlen_q=1025) == tile(seqlen_q=513, num_heads_q=4) == "m128n128s2"


def test_the_heads_of_a_causal_call_are_taken_so_that_blocks_get_equal_loads() -> None:
    """There and back over 132 blocks, from the order of the tiles as fwd_sm90.cu has it."""

    def spread(sections: int | None, head_dim: int, heads: int, length: int) -> float:
        p = problem(batch=1, num_heads_q=heads, num_heads_kv=heads, seqlen_q=length, seqlen_k=length, window_right=0)
        p = p._replace(head_dim=head_dim, head_dim_v=head_dim)
        planned = plan.forward(p, KNOWN["90a"])
        c, section = planned.steps[0].variant.config, sections or planned.section
        row_blocks, loads = -(-length // c.block_m), [0.0] * 132
        for tile in range(row_blocks * heads):
            n, inside = divmod(tile, section * row_blocks)
            row_block = inside // min(section, heads - n * section)
            if (heads - 1) // section % 2 == n % 2:
                row_block = row_blocks - 1 - row_block
            turn, place = divmod(tile, 132)
            last = length - (row_blocks - 1 - row_block) * c.block_m  # rows are counted from the last one up
            loads[131 - place if turn % 2 else place] += 1.5 + -(-last // c.block_n)
        return max(loads) / (sum(loads) / 132)

    assert spread(64, 128, 256, 1024) > 1.04 > 1.02 > spread(None, 128, 256, 1024)
    assert spread(1, 256, 8, 16384) > 1.7 > 1.01 > spread(None, 256, 8, 16384)
    assert plan.forward(problem(seqlen_k=4096), KNOWN["90a"]).section == 1  # all tiles are as long


def test_sections_of_a_backward_share_the_l2_whatever_their_loads() -> None:
    for head_dim, tokens, length in itertools.product((64, 128, 256), (1 << 14, 1 << 15, 1 << 16), (512, 2048, 4096, 8192)):
        heads = {"num_heads_q": 2048 // head_dim, "num_heads_kv": 2048 // head_dim, "batch": tokens // length}
        for right in (None, 0):
            shape = heads | {"seqlen_q": length, "seqlen_k": length, "head_dim": head_dim, "head_dim_v": head_dim, "window_right": right}
            assert 8 << 20 <= backward(**shape).section * 8 * length * head_dim <= 32 << 20


def test_more_tiles_than_a_kernel_can_count_are_refused() -> None:
    """Also where a block takes tile after tile, and the grid is small."""
    many = problem(batch=1 << 20, num_heads_q=1 << 11, num_heads_kv=1 << 11, seqlen_q=5, seqlen_k=1)
    with pytest.raises(cupyflash.UnsupportedError, match=r"fwd_sm90.* would need 2147483648 blocks"):
        plan.forward(many, KNOWN["90a"])
    with pytest.raises(cupyflash.UnsupportedError, match=r"would need 2147483648 blocks"):
        plan.backward(BackwardProblem(many, ("q", "k", "v")), KNOWN["90a"])


def test_a_backward_is_delta_then_gradients_then_sums_over_rows() -> None:
    rows, keys = 2 * 8 * 1000, 2 * 2 * 900
    steps, workspaces, *_ = backward(window_right=0, softcap=2.0, dtype="float32", out_dtype="float64")
    assert [step.variant.name for step in steps] == [
        "bwd_delta__f32_d128__w4__outfloat64",
        "bwd_simple__f32_d128__w4__causal_outfloat64_softcap",
    ]
    assert [step.grid[0] for step in steps] == [2 * 8 * 32, (rows + keys) // 4]
    assert workspaces == (("row_lse", 4 * rows), ("row_delta", 4 * rows))
    bias = {"bias_shape": (1, 8, 1000, 900)}
    steps, workspaces, *_ = backward(("bias", "alibi_slopes", "sink"), bias, bias="float32", alibi=True, sink="float32", dtype="float64")
    assert [step.variant.name for step in steps][::2] == ["bwd_delta__f64_d128__w4__sinkf32", "bwd_sum__f64__w4__alibi_sinkf32"]
    assert [step.grid[0] for step in steps][1:] == [(rows + keys + 8 * 1000 * 900) // 4, 16 // 4]
    assert workspaces == tuple((name, 8 * rows) for name in ("row_lse", "row_delta", "row_slope", "row_sink"))
    assert backward(("alibi_slopes",), {"slopes_batch": 2}, alibi=True).steps[-1].grid[0] == 16 // 4


def test_a_tiled_backward_adds_dq_up_or_computes_it_apart() -> None:
    """B 2, Sq 1000, Sk 900, Hq 8, Hkv 2, D 128: by tiles of 64 x 128, on Hopper by wgmma if it adds dq up; dq alone by 128 x 32."""
    rows = 2 * 8 * 1000
    vectors = (("row_lse", 4 * rows), ("row_delta", 4 * rows))

    def launched(*given: Any, **fields: Any) -> tuple[dict[str, int], tuple[tuple[str, int], ...]]:
        steps, workspaces, *_ = backward(*given, **fields)
        assert all(0 < step.smem_bytes <= KNOWN["90a"].smem_bytes for step in steps if "sm80" in step.variant.family)
        return {step.variant.name.replace("__bf16", ""): step.grid[0] for step in steps}, workspaces

    keys, alone = "bwd_sm80_d128__m64n128s2w8g242b1", {"bwd_sm80_dq_d128__m128n32s2w4b2": 2 * 8 * 8}
    delta, dk_dv = {"bwd_delta_d128__w4": 2 * 8 * 32}, {keys: 2 * 2 * 8}
    reference = (*vectors, ("row_reference", 4 * rows))
    sums = (*reference, ("dq_sum", 2 * 8 * 1024 * 128 * 4))
    convert = {"bwd_convert_d128__w4": 2 * 8 * 16}
    assert launched() == (
        delta | {"bwd_sm90_d128__m64n128s2__splits": 4 * 2 * 2 * 8} | {f"{name}__panels": n for name, n in convert.items()},
        (*sums, ("next_tile", 4 + 4 * 32), ("part_sums", 4 * 32 * 128 * (128 + 128) * 4)),
    )
    assert launched(tensor_maps=False) == (delta | {f"{keys}__dq": 2 * 2 * 8} | convert, sums)
    assert launched(("q", "k", "v"), {"deterministic": True}) == (delta | dk_dv | alone, reference)
    assert launched(("q",)) == (delta | alone, reference)
    assert launched(("v",)) == (delta | dk_dv, reference)
    names, workspaces = launched(("q", "k", "alibi_slopes"), alibi=True)  # their part of each row is a sum in one order, too
    assert [name.split("_d128")[0] for name in names] == ["bwd_delta", "bwd_sm80", "bwd_sm80_dq", "bwd_sum__w4__alibi"]
    assert workspaces == (*vectors, ("row_slope", 4 * rows), ("row_reference", 4 * rows))


@pytest.mark.parametrize(
    ("heads", "seqlen", "dim", "fields", "split"),
    [
        (16, 16384, 128, {}, (68, 5)),  # 15.5 tiles an SM: in 16 rounds, or 15 and a little more than half of one
        (32, 16384, 64, {}, (4, 16)),
        (128, 2048, 128, {}, (68, 3)),
        (256, 1024, 128, {}, (0, 1)),  # a part would cost as much as it saves
        (512, 1024, 64, {}, (0, 1)),
        (4, 2048, 128, {}, (64, 2)),  # fewer tiles than SMs
        (33, 1024, 128, {}, (0, 1)),  # two whole rounds
        (16, 16384, 128, {"window_right": 0}, (0, 1)),
        (16, 16384, 128, {"window_left": 99}, (0, 1)),
        (16, 16384, 128, {"packed": True}, (0, 1)),
        (8, 16384, 256, {}, (0, 1)),
    ],
)
def test_the_last_tiles_of_a_backward_are_split(heads: int, seqlen: int, dim: int, fields: dict[str, Any], split: tuple[int, int]) -> None:
    sizes = {"batch": 1, "num_heads_q": heads, "num_heads_kv": heads, "seqlen_q": seqlen, "seqlen_k": seqlen}
    found = backward(("q", "k", "v"), **sizes, head_dim=dim, head_dim_v=dim, **fields)
    assert found.splits == split
    assert any("splits" in step.variant.flags for step in found.steps) == (split[0] > 0)


@pytest.mark.parametrize(("dim", "whole"), [(64, 16), (128, 64), (256, 16)])
def test_the_sums_of_packed_sequences_lie_apart(rng: np.random.Generator, dim: int, whole: int) -> None:
    """The sums of each sequence, and of what lies before and behind them all, begin where `sum_rows_before` in work.cuh says; a kernel adds
    up to 63 rows past the end of one, and nothing past those of the head."""
    for batch, tokens in ((1, 128), (1, 191), (3, 449), (7, 1000), (64, 9001)):  # shorter ones have a kernel for dq
        columns, rows = backward(
            ("q", "k", "v"), packed=True, batch=batch, seqlen_q=tokens, seqlen_k=tokens, head_dim=dim, head_dim_v=dim
        ).sums
        assert columns == dim
        for _ in range(20):
            ends = np.array([0, *np.sort(rng.integers(0, tokens + 1, batch + 1)), tokens])
            begins = (ends[:-1] + whole * np.arange(batch + 2)) // whole * whole
            lengths = np.diff(ends)
            assert (begins[:-1] + -(-lengths[:-1] // whole) * whole <= begins[1:]).all()
            assert (begins + -(-lengths // 64) * 64 <= rows).all()


def test_delta_shares_a_warp_out_by_the_width_of_out() -> None:
    """A block has 4 warps of 16, 8 or 4 rows, whatever the dtype; rows that are no whole 16-byte loads are read by elements."""
    for dv, width, rows in ((1, 64, 64), (64, 64, 64), (65, 128, 32), (128, 128, 32), (129, 256, 16), (256, 256, 16)):
        step = backward(head_dim_v=dv, head_dim=256, dtype="float16" if dv % 8 else "float64").steps[0]
        assert (step.variant.head_dim, step.variant.head_dim_v) == (width, width)
        assert step.grid == (2 * 8 * -(-1000 // rows), 1, 1)
        assert ("unaligned" in step.variant.flags) == bool(dv % 8)
    for dtype in ("bfloat16", "float32"):
        assert backward(dtype=dtype, aligned16=False).steps[0].variant.flags == ("unaligned",)
        assert backward(dtype=dtype, head_dim=60).steps[0].variant.flags == ("unaligned",)


def test_dbias_has_a_block_for_each_of_its_tiles() -> None:
    for shape, blocks in (((2, 8, 1000, 900), 16 * 16 * 15), ((1, 1, 1000, 1), 16), ((1, 8, 1, 900), 8 * 15), ((1, 1, 1, 1), 1)):
        steps, *_ = backward(("bias",), {"bias_shape": shape}, bias="bfloat16")
        assert [(step.variant.family, step.grid[0]) for step in steps[1:]] == [("bwd_sm80_dbias", blocks)]


def test_a_dbias_that_passes_the_longest_grid_is_refused() -> None:
    long: dict[str, Any] = {"bias": "float32", "dtype": "float32", "seqlen_q": 1 << 16, "seqlen_k": 1 << 16}
    with pytest.raises(
        cupyflash.UnsupportedError, match=r"bwd_simple__.* would need \d+ blocks and a grid has 2\^31 - 1; calls on fewer heads"
    ):
        backward(("bias",), {"bias_shape": (1, 8, 1 << 16, 1 << 16)}, **long)
    assert backward(("bias",), {"bias_shape": (1, 8, 1 << 16, 1 << 16)}, **{**long, "dtype": "bfloat16"}).steps[1].grid[0] == 8 << 20


def test_an_empty_backward_launches_what_writes_zeros() -> None:
    families = [step.variant.family for step in backward(seqlen_q=0, tensor_maps=False).steps]
    assert families == ["bwd_sm80"]  # dk and dv
    assert backward(batch=0).steps == ()
    assert [step.variant.family for step in backward(seqlen_k=0, sink="float32", wrt=("q", "sink")).steps] == [
        "bwd_delta", "bwd_sm80_dq", "bwd_sum"
    ]  # fmt: skip
    assert [step.variant.family for step in backward(seqlen_k=0).steps] == ["bwd_delta", "bwd_convert"]
    assert [step.variant.family for step in backward(seqlen_q=0, dtype="float32").steps] == ["bwd_simple"]


@pytest.mark.parametrize("arch", KNOWN)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_every_supported_problem_has_a_backward(arch: str, dtype: str) -> None:
    for d, dv in itertools.product((1, 33, 64, 256), repeat=2):
        for flags in ({}, {"bias": dtype, "aligned16": False}):
            p = BackwardProblem(problem(dtype=dtype, head_dim=d, head_dim_v=dv, **flags), ("q", "k"))
            for deterministic in (False, True):
                step = plan.backward(p._replace(deterministic=deterministic), KNOWN[arch]).steps[1]
                v = step.variant
                hopper = arch == "90a" and d % 8 == dv % 8 == 0 and not (flags or deterministic)
                narrow, wide = hopper and max(d, dv) <= 64, hopper and d > 64
                tensor_cores = "bwd_sm90" if narrow else "bwd_sm90_wide" if wide else "bwd_sm80"
                assert v.family == (tensor_cores if dtype in ("float16", "bfloat16") else "bwd_simple")
                assert (v.head_dim >= d, v.head_dim_v >= dv) == (True, True)
                assert ("dq" in v.flags) == (v.family == "bwd_sm80" and not deterministic)
                assert step.smem_bytes <= KNOWN[arch].smem_bytes
                assert step.threads <= 1024
                assert step.why
    with pytest.raises(cupyflash.UnsupportedError, match="256 is the largest for forward and backward"):
        plan.backward(BackwardProblem(problem(head_dim=257), ("q",)), KNOWN[arch])


def test_host_is_a_device_like_another() -> None:
    (step,) = plan.forward(problem(), HOST_SPEC).steps
    assert step.variant.family == "host"
    assert cupyflash.supports(head_dim=64, dtype="float64", mask=True, sink=True).reason.startswith("host__f64_d64__mask_sinkf32: ")


def test_kf_131_a_device_without_the_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    small = DeviceSpec("80", 10, 16 << 10, 1 << 20)
    assert plan.forward(problem(), small).steps[0].variant.family == "fwd_simple"
    monkeypatch.setattr(plan, "FORWARD", tuple(r for r in FORWARD if r.family != "fwd_simple"))
    with pytest.raises(cupyflash.UnsupportedError, match=r"bfloat16 with head_dim 128.*sm_80.*would need 98304 bytes.* a block has 16384"):
        plan.forward(problem(seqlen_q=77), small)


def test_an_old_gpu_gets_the_simple_kernel() -> None:
    assert plan.forward(problem(), DeviceSpec("75", 40, 65_536, 4 << 20)).steps[0].variant.name == "fwd_simple__bf16_d128__w4"


def test_no_call_comes_to_a_row_that_is_for_comparison_alone() -> None:
    assert {row.family for row in LESSON}.isdisjoint(row.family for row in (*FORWARD, *BACKWARD, *CACHED, *DECODE))
    sizes = itertools.product(KNOWN, ("float16", "bfloat16"), (16, 64, 128), (1, 64, 4096), (None, 0))
    for arch, dtype, d, seqlen, right in sizes:
        p = problem(dtype=dtype, head_dim=d, head_dim_v=d, seqlen_q=seqlen, seqlen_k=4096, window_right=right, tensor_maps=False)
        planned = (plan.forward(p, KNOWN[arch]), plan.cached(CacheProblem(p, dtype, 16), KNOWN[arch]))
        assert {step.variant.family for steps in planned for step in steps.steps}.isdisjoint(row.family for row in LESSON)


def test_keys_outside_has_a_block_a_head_and_its_rows_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "FORWARD", LESSON)

    def planned(arch: str, **fields: Any) -> plan.Plan:
        return plan.forward.__wrapped__(problem(**fields), KNOWN[arch])  # its cache knows nothing of this table

    found = planned("90a", write_lse=True, window_right=0)
    (step,) = found.steps
    assert step.variant.name == "fwd_keys_outside__bf16_d128__m128n64s4__causal_lse"
    assert (step.grid, step.threads) == ((2 * 8, 1, 1), 8 * 32)
    assert step.smem_bytes == 2 * 128 * 128 * 2 + 256 * (128 + 128) * 2  # two tiles of Q, 256 keys
    assert found.workspaces == (("part_out", 2 * 8 * 1024 * 128 * 4), ("part_lse", 2 * 8 * 1024 * 2 * 4))  # 1000 rows in blocks of 128
    assert [planned(arch).steps[0].variant.config.tile for arch in KNOWN] == [
        "m128n64s4" if KNOWN[arch].smem_bytes > 196608 else "m64n64s2" for arch in KNOWN
    ]
    assert planned("80", head_dim=40, head_dim_v=40).steps[0].variant.name == "fwd_keys_outside__bf16_d48__m128n64s8"
    assert planned("86", head_dim=64, head_dim_v=64).steps[0].variant.config.tile == "m128n64s4"
    for fields in ({"softcap": 5.0}, {"window_left": 9}, {"packed": True}, {"head_dim": 256}, {"dtype": "float32"}, {"aligned16": False}):
        with pytest.raises(cupyflash.UnsupportedError, match="no kernel for"):
            planned("90a", **fields)


def test_supports_answers_with_the_reason_of_the_error() -> None:
    answer = cupyflash.supports(head_dim=64, num_heads_q=6, num_heads_kv=4)
    assert not answer
    assert answer.reason == "k has 4 heads and q has 6: num_heads_q must be a multiple of num_heads_kv"
    assert not cupyflash.supports(head_dim=64, dtype="int8")
    assert cupyflash.supports(head_dim=64, device="sm_90a").reason.startswith("fwd_sm90__f16_d64__")
    assert cupyflash.supports(head_dim=64, dtype="float32", device="sm_86").reason.startswith("fwd_simple__f32_d64__")
    assert "'host' or one of 'sm_80'" in cupyflash.supports(head_dim=64, device="tpu").reason
    with pytest.raises(TypeError, match=r"supports\(\) has no argument 'is_causal'"):
        cupyflash.supports(head_dim=64, is_causal=True)  # type: ignore[call-arg]


def test_supports_answers_for_backward_calls() -> None:
    answer = cupyflash.supports(
        head_dim=64, dtype="bfloat16", device="sm_90a", sink=True, bias=True, wrt=("q", "bias", "sink", "alibi_slopes")
    )
    assert answer.reason.startswith("bwd_sm80_dq__bf16_d64__m128n32s2w4b2__bias_sinkf32: ")
    assert [v.family for v in answer.variants] == ["bwd_delta", "bwd_sm80_dq", "bwd_sm80_dbias", "bwd_sum"]
    assert cupyflash.supports(head_dim=64, wrt=["q"]).reason.startswith("host__")
    assert cupyflash.supports(head_dim=300, wrt=["q"]).reason == cupyflash.supports(head_dim=300).reason
    assert "wrt=('p',) must be a tuple of names" in cupyflash.supports(head_dim=64, wrt=("p",)).reason
    assert cupyflash.supports(head_dim=64, device="sm_80", seqlen_q=0, seqlen_k=5, wrt=("k",)).reason.startswith("bwd_sm80__")


def planned_over_cache(
    device: DeviceSpec = KNOWN["90a"], cache_dtype: str = "bfloat16", page_size: int | None = 16, **more: Any
) -> plan.Plan:
    fields = {"seqlen_q": 1} | {name: more.pop(name) for name in [*more] if name in AttentionProblem._fields}
    return plan.cached(CacheProblem(problem(**fields), cache_dtype, page_size, **more), device)


def test_a_call_over_a_cache_is_attention_after_what_it_reads() -> None:
    planned = functools.partial(planned_over_cache, dtype="float32", cache_dtype="float32")
    (step,) = planned().steps  # lengths are read where they are
    assert (step.variant.name, step.grid, planned().workspaces) == ("fwd_simple__f32_d128__w4__paged_used", (4, 1, 1), ())
    assert planned(page_size=None).steps[0].variant.name == "fwd_simple__f32_d128__w4__used"
    append, attention = planned(seqlen_new=3).steps
    assert (append.variant.name, append.grid) == ("cache_append__f32__w4__paged", ((2 * 2 * 3 * 2 + 1 + 3) // 4, 1, 1))
    assert attention.variant == step.variant
    assert planned(seqlen_new=3, leftpad=True).workspaces == (("used_k", 8), ("first_k", 8))
    append, _ = planned(rotary_dim=64, rotary="float32", cache_dtype="int8").steps
    assert (append.variant.name, append.grid) == ("cache_append__f32__w4__cachedint8_paged", (5, 1, 1))
    assert planned(rotary_dim=64, rotary="float32").workspaces == (("rotated_q", 2 * 8 * 128 * 4), ("used_k", 8))
    assert planned(cu_seqlens_k=True, packed=True).workspaces == (("used_k", 8),)
    assert planned(num_heads_q=0, batch=0) == plan.Plan(())
    assert [step.variant.family for step in planned(num_heads_q=0, seqlen_new=3).steps] == ["cache_append"]
    assert [step.variant.family for step in planned(batch=0, packed=True, cu_seqlens_k=True).steps] == ["fwd_simple"]
    with pytest.raises(cupyflash.UnsupportedError, match=r"cache_append__f32__w4__paged would need \d+ blocks"):
        planned(seqlen_new=1 << 30)
    for arch in KNOWN:
        families = [step.variant.family for step in planned(KNOWN[arch], head_dim=576, head_dim_v=512, seqlen_new=1).steps]
        assert families == ["cache_append", "fwd_simple"]
    (append, *_) = planned_over_cache(rotary_dim=64, rotary="float32", cache_dtype="int8").steps
    assert append.variant.name == "cache_append__bf16__w4__cachedint8_paged_rotaryf32"


def test_decode_has_a_block_or_two_for_each_sm() -> None:
    planned = functools.partial(planned_over_cache, batch=32, num_heads_q=32, num_heads_kv=8, seqlen_k=8192)
    append, begin, step = planned(seqlen_new=1).steps
    assert [append.variant.family, begin.variant.name] == ["cache_append", "decode_begin__f32__w4"]
    assert step.variant.name == "decode__bf16_d128__m16n16s3w4b2__paged_used_wholepages"
    assert (step.grid, planned().section, planned().splits) == ((128, 1, 1), 8, (0, 256))  # 16 teams of 8 heads
    assert planned().workspaces == (("part_out", 256 * 16 * 128 * 4), ("part_lse", 256 * 16 * 4), ("arrived", 256 * 4))
    assert planned(page_size=24).steps[-1].variant.flags == ("paged", "used")
    assert planned(page_size=None).steps[-1].variant.flags == ("used",)
    assert planned(page_size=None, leftpad=True).steps[-1].variant.flags == ("paged", "used")
    assert planned(page_size=None, batch_idx=True).steps[-1].variant.flags == ("paged", "used")
    assert planned(batch=128).steps[-1].grid == (256, 1, 1)  # more to begin and to end; 1024 tiles, four each
    assert planned(batch=67).steps[-1].grid == (264, 1, 1)
    narrow = planned(cache_dtype="int8", page_size=None).steps[-1]
    assert (narrow.variant.name, narrow.grid) == ("decode__bf16_d128__m16n32s3w4b2__cachedint8_used", (256, 1, 1))
    assert planned(num_heads_q=36, num_heads_kv=6).section == 6
    assert planned(num_heads_q=37, num_heads_kv=37).section == 1  # a team of all would leave every fourth block without work
    assert planned(split_size=1000).splits == (16, 32 * 8 * 8)
    assert planned(num_splits=5).splits == (-5, 32 * 8 * 5)
    assert planned(split_size=1000).steps[-1].variant.flags == ("paged", "splits", "used", "wholepages")
    for arch in KNOWN:  # some rows fit the shared memory of each
        assert {planned(KNOWN[arch], head_dim=d, head_dim_v=d).steps[-1].variant.family for d in (64, 128, 256)} == {"decode"}


def test_one_sequence_of_few_heads_is_decoded_in_clusters() -> None:
    planned = functools.partial(planned_over_cache, batch=1, num_heads_q=32, num_heads_kv=8, seqlen_k=8192)
    (step,) = planned().steps
    assert (step.variant.name, step.grid) == ("decode_cluster__bf16_d128__m16n16s3w4b2c16__paged_used_wholepages", (128, 1, 1))
    assert planned(num_heads_kv=32).steps[0].variant.config.cluster == 4
    others = {"batch": 2}, {"seqlen_k": 8193}, {"num_heads_kv": 4}, {"num_splits": 3}, {"packed": True}, {"device": KNOWN["80"]}
    for other in others:
        assert planned(**other).steps[-1].variant.family == "decode"


def test_many_query_rows_over_a_cache_have_the_tiles_of_the_forward() -> None:
    def families(device: str = "90a", page_size: int | None = None, cache_dtype: str = "bfloat16", **more: Any) -> list[str]:
        fields = {name: more.pop(name) for name in [*more] if name in AttentionProblem._fields}
        steps = plan.cached(CacheProblem(problem(**fields), cache_dtype, page_size, **more), KNOWN[device]).steps
        return [step.variant.family for step in steps]

    few = ["decode_begin", "decode"]
    assert families(seqlen_q=64) == ["fwd_sm90"]
    assert families(seqlen_q=63) == few
    assert families(seqlen_q=64, seqlen_new=64) == ["cache_append", "fwd_sm90"]
    assert families("80") == families(tensor_maps=False) == ["fwd_sm80"]
    assert families(mask=True) == families(mask=True, seqlen_q=1) == ["fwd_sm90"]  # decode has none
    assert families(split_size=64) == families(num_splits=2) == families(leftpad=True) == families("80", page_size=16) == few
    assert families(num_splits=1) == ["fwd_sm90"]
    assert families(cache_dtype="int8") == few
    assert families(dtype="float32", cache_dtype="float32") == families(cache_dtype="int8", mask=True) == ["fwd_simple"]
    step = plan.cached(CacheProblem(problem(window_right=0), "bfloat16", None), KNOWN["90a"]).steps[-1]
    assert step.variant.flags == ("causal", "used")
    lengths = (100, 1 << 17)  # of the buffers; how much of them is in use is not known
    plans = [plan.cached(CacheProblem(problem(window_right=0, seqlen_k=n), "bfloat16", None), KNOWN["90a"]) for n in lengths]
    assert plans[0].steps == plans[1].steps

    for paged in ({"page_size": 16}, {"page_size": 4096}, {"batch_idx": True}):
        assert families(**paged) == families(**paged, mask=True) == ["fwd_sm90"]
        assert families(**paged, seqlen_q=1) == families(**paged, tensor_maps=False) == families("100", **paged) == few
    assert families(page_size=8) == families(page_size=24) == few
    assert families(page_size=900, seqlen_k=900) == ["fwd_sm90"]  # one page a sequence
    assert families(page_size=16, dtype="float32", cache_dtype="float32") == ["fwd_simple"]
    packed = {"packed": True, "batch": 10}
    assert families(**packed, seqlen_q=640) == families(**packed, seqlen_q=640, page_size=64) == ["packed_tiles", "fwd_sm90"]
    assert families(**packed, seqlen_q=639) == few
    assert families("80", **packed, seqlen_q=640) == few


@pytest.mark.parametrize(
    ("page_size", "tile"), [(16, "n64s4q2r16"), (48, "n64s4q2r16"), (64, "n64s4q2r64"), (160, "n80s2q2r80"), (None, "n80s2q2r80")]
)
def test_pages_are_copied_by_what_lies_together_in_a_page_and_in_a_block(page_size: int | None, tile: str) -> None:
    p = problem(window_right=0, seqlen_k=4800)
    *_, step = plan.cached(CacheProblem(p, "bfloat16", page_size, batch_idx=page_size is None), KNOWN["90a"]).steps
    assert step.variant.name == f"fwd_sm90__bf16_d128__m192{tile}__causal_paged_used"
    rows = int(tile.split("r")[1])
    assert step.boxes == (("q", 192), ("k", rows), ("v", rows), ("out", 16))


def test_sections_of_packed_queries_count_the_keys_of_all_sequences() -> None:
    """Each may have all of its slots in use; the kernel that orders the tiles has room for 64 sections."""
    p = problem(packed=True, batch=100, seqlen_q=100_000, seqlen_k=1 << 20)
    planned = plan.cached(CacheProblem(p, "bfloat16", 64), KNOWN["90a"])
    assert planned.section >= 100 * (1 << 20) / 64
    assert planned.steps[0].variant.flags == ("local", "packed", "paged", "used")
    assert planned.tiles == (192, 0)


def test_latent_heads_have_a_kernel_of_their_own_on_hopper() -> None:
    latent = {"head_dim": 576, "head_dim_v": 512, "num_heads_q": 128, "num_heads_kv": 1, "values_in_keys": True}

    def first(arch: str = "90a", **asked: Any) -> Any:
        return planned_over_cache(KNOWN[arch], **latent | asked).steps[0]

    step, merge = planned_over_cache(KNOWN["90a"], **latent, batch=2, seqlen_k=8192).steps
    assert (step.variant.family, step.grid, step.threads) == ("latent_sm90", (132, 1, 1), 384)
    assert (merge.variant.family, merge.threads, merge.grid, merge.smem_bytes) == ("latent_merge", 128, (1056, 1, 1), 0)
    assert first(seqlen_q=200).variant.family == "latent_sm90"  # no tile of the forward is so wide
    narrow = first(head_dim=320, head_dim_v=248).variant
    assert (narrow.family, narrow.head_dim, narrow.head_dim_v) == ("latent_sm90", 320, 256)
    for asked in (
        *({"arch": "80"}, {"arch": "100"}, {"mask": True}, {"cache_dtype": "int8"}, {"head_dim": 570, "head_dim_v": 500}),
        *({"aligned16": False}, {"head_dim": 320, "head_dim_v": 296}, {"values_in_keys": False}),
    ):
        assert first(**asked).variant.family == "fwd_simple", asked  # type: ignore[arg-type]


def test_supports_and_warmup_answer_for_caches() -> None:
    asked: dict[str, Any] = {"head_dim": 128, "dtype": "bfloat16", "device": "sm_90a", "cached": True, "num_heads_q": 32, "num_heads_kv": 8}
    answer = cupyflash.supports(**asked, batch=32, seqlen_q=1, seqlen_k=4096, page_size=16, seqlen_new=1, rotary_dim=64, cache_dtype="int8")
    assert [v.family for v in answer.variants] == ["cache_append", "decode_begin", "decode"]
    assert answer.reason.startswith("decode__bf16_d128__m16n32s3w4b2__cachedint8_paged_used: ")
    assert answer.variants[0].flags == ("cachedint8", "paged", "rotaryf32")
    answer = cupyflash.supports(**asked, batch=1, seqlen_q=1, seqlen_k=4096)
    assert answer.reason.startswith("decode_cluster__bf16_d128__m16n16s3w4b2c16__used: ")
    assert cupyflash.supports(**asked, seqlen_q=9, split_size=256, packed=True).variants[1].flags == ("packed", "paged", "splits", "used")
    latent = asked | {"head_dim": 576, "head_dim_v": 512, "seqlen_q": 1}
    assert cupyflash.supports(**latent).reason.startswith("latent_sm90__bf16_d576v512__m64n64s2w12b1__used: ")
    assert cupyflash.supports(**latent | {"device": "sm_80"}).reason.startswith("fwd_simple__")
    assert cupyflash.supports(**asked | {"device": "host"}, page_size=7).reason.startswith("host__")
    for more, reason in (
        ({"wrt": ("q",)}, "attention over a cache takes no bias and has no gradient"),
        ({"bias": True}, "attention over a cache takes no bias and has no gradient"),
        ({"page_size": 0}, "page_size=0 must be at least 1"),
        ({"cache_dtype": "float32"}, "k_cache is float32"),
        ({"split_size": 0}, "split_size=0"),
    ):
        answer = cupyflash.supports(**asked, **more)
        assert not answer
        assert reason in answer.reason


def test_specs_are_what_the_architectures_have() -> None:
    assert KNOWN["90a"].capability == 90
    assert HOST_SPEC.capability == 0
    assert all(dataclasses.is_dataclass(spec) and spec.arch == arch for arch, spec in KNOWN.items())


# --- the parameter struct: two languages, one layout ----------------------------------------------------------------------------------


def c_fields(text: str, struct: str) -> list[tuple[str, str]]:
    """(name, struct code) of each member of a struct of params.cuh, in order; those of the one that it begins with are its own, and so are
    the elements of an array."""
    body = re.search(rf"struct {struct} \{{(.*?)\}};", re.sub(r"//.*", "", text), re.S)
    assert body is not None
    codes = {"longlong": "q", "double": "d", "int": "i", "unsigned": "I", "float": "f"}
    sizes = dict(re.findall(r"constexpr int (\w+) = (\d+);", text))
    fields: list[tuple[str, str]] = []
    for declaration in filter(str.strip, body[1].split(";")):
        if "ForwardParams" in declaration:
            fields += c_fields(text, "ForwardParams")
            continue
        kind, names = re.match(r"\s*((?:const\s+)?(?:unsigned char|long long|\w+)(?:\s*\*)?)\s+(.*)", declaration, re.S).groups()  # type: ignore[union-attr]
        code = "Q" if "*" in kind else codes[kind.replace(" ", "")]
        for name in map(str.strip, names.split(",")):
            name, _, size = name.rstrip("]").partition("[")
            fields += [(f"{name}[{n}]", code) for n in range(int(sizes[size]))] if size else [(name, code)]
    return fields


def test_params_mirror_the_cuda_struct() -> None:
    text = (jit.source_root() / "primitives" / "params.cuh").read_text()
    for name, fields, packed in (
        ("ForwardParams", params.FORWARD_FIELDS, params.FORWARD),
        ("CacheParams", params.CACHE_FIELDS, params.CACHE),
        ("BackwardParams", params.BACKWARD_FIELDS, params.BACKWARD),
        ("MergeParams", params.MERGE_FIELDS, params.MERGE),
    ):
        assert c_fields(text, name) == list(fields)
        assert struct.calcsize("@" + "".join(code for _, code in fields)) == packed.size  # no padding, as a C compiler lays them out
    assert params.FORWARD.size % 8 == 0  # nor behind it, where the backward's fields begin
    assert max(params.CACHE.size, params.BACKWARD.size, params.MERGE.size) <= 4096  # what a kernel's parameters may take


def pointers(operands: Operands, lse: ArrayView | None) -> list[int]:
    """The first fields of an argument."""
    there = operands._asdict() | {"lse": lse}
    return [0 if there.get(name) is None else there[name].ptr for name in params.POINTER_NAMES]


def test_a_packed_call_holds_each_value_under_its_name() -> None:
    def fake(ptr: int, *strides: int) -> ArrayView:
        return ArrayView(ptr, (1,) * len(strides), strides, "bfloat16", 0, "cupy", None)

    operands = Operands(
        fake(1, 10, 11, 12, 1), fake(2, 20, 21, 22, 1), fake(3, 30, 31, 32, 1), fake(4, 40, 41, 42, 1), mask=fake(7, 0, 0, 70, 71)
    )
    p = problem(window_right=0, softcap=2.0, mask=True)
    buffer = params.POINTERS.pack(*pointers(operands, None)) + params.numbers(p, operands)
    packed = dict(zip((name for name, _ in params.FORWARD_FIELDS), params.FORWARD.unpack(buffer), strict=True))
    assert (packed["q"], packed["k"], packed["v"], packed["out"], packed["lse"], packed["bias"], packed["mask"]) == (1, 2, 3, 4, 0, 0, 7)
    assert [packed[f"{name}_stride_seq"] for name in ("q", "k", "v", "out")] == [11, 21, 31, 41]
    assert [packed[f"mask_stride_{axis}"] for axis in ("batch", "head", "q", "k")] == [0, 0, 70, 71]
    assert (packed["window_left"], packed["window_right"], packed["top_left"]) == (2**31 - 1, 0, 0)
    assert (packed["seqlen_q"], packed["head_dim_v"], packed["softcap"]) == (1000, 128, 2.0)
    assert packed["softmax_scale_log2"] == pytest.approx(0.1 * 1.4426950408889634)
    for lse in (None, fake(8, 1, 1, 1)):  # only the addresses that are there, to the same places
        given = [ptr for ptr in pointers(operands, lse) if ptr]
        codes = params.pointers_given(operands, lse)
        assert struct.pack(f"<{codes}", *given) == params.POINTERS.pack(*pointers(operands, lse))


def test_a_packed_backward_call_holds_each_value_under_its_name() -> None:
    def fake(ptr: int, *strides: int) -> ArrayView:
        return ArrayView(ptr, (1,) * len(strides), strides, "bfloat16", 0, "cupy", None)

    operands = Operands(fake(1, 10, 11, 12, 1), fake(2, 20, 21, 22, 1), fake(3, 30, 31, 32, 1), fake(4, 40, 41, 42, 1))
    more = BackwardOperands(fake(5, 50, 51, 52, 53), fake(6, 60, 61, 62), dk=fake(7, 70, 71, 72, 1), dbias=fake(8, 0, 0, 9, 1))
    p = BackwardProblem(problem(bias="bfloat16"), ("k", "bias"), bias_shape=(1, 1, 1000, 900))
    buffers = {"dout": more.dout, "dk": more.dk, "dbias": more.dbias, "row_delta": fake(9)}
    first = params.POINTERS.pack(*pointers(operands, more.lse))
    numbers = params.numbers(p.forward, operands), params.backward_numbers(p, more)
    own = params.backward_pointers([buffers[name].ptr if name in buffers else 0 for name in params.BACKWARD_POINTER_NAMES])
    buffer = first + numbers[0] + own + numbers[1]
    packed = dict(zip((name for name, _ in params.BACKWARD_FIELDS), params.BACKWARD.unpack(buffer), strict=True))
    named = {"q": 1, "out": 4, "lse": 6, "dout": 5, "dlse": 0, "dq": 0, "dk": 7, "dv": 0, "dbias": 8, "row_lse": 0, "row_delta": 9}
    assert {name: packed[name] for name in named} == named
    for name in ("q", "k", "v", "out", "dout", "row_delta"):  # for the tensor maps
        assert struct.unpack_from("<Q", buffer, params.offset_of(name)) == (packed[name],)
    assert [packed[f"dout_stride_{axis}"] for axis in ("batch", "seq", "head", "dim")] == [50, 51, 52, 53]
    assert [packed[f"lse_stride_{axis}"] for axis in ("batch", "head", "seq")] == [60, 61, 62]
    assert [packed[f"{name}_stride_seq"] for name in ("dq", "dk", "dv")] == [0, 71, 0]
    assert [packed[name] for name in ("dbias_batch", "dbias_heads", "dbias_q", "dbias_k", "dalibi_batch")] == [1, 1, 1000, 900, 1]


def test_sources_are_beside_the_package_or_in_it() -> None:
    root = jit.source_root()
    assert (root / "README.md").is_file()
    assert root.name == "cuda_src"
    assert Path(jit.__file__).parent in (root.parent, root.parent / "cupyflash")
