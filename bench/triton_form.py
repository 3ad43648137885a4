"""FlashAttention-2's forward in Triton: what a kernel of one page reaches, to be timed beside the others. Needs triton and torch.

The form is that of Triton's tutorials: a program has a block of rows of one head and walks the blocks of keys, first those that all of its
rows see and then, under a causal mask, those on the diagonal; base-2 exponentials; tiles, warps and stages found by trial for each shape.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_TILES = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=warps, num_stages=stages)
    for m, n, warps, stages in (
        (64, 32, 4, 3),
        (64, 64, 4, 3),
        (128, 32, 4, 4),
        (128, 64, 4, 3),
        (128, 64, 8, 3),
        (128, 128, 8, 2),
        (128, 128, 8, 3),
    )
]


@triton.jit
def _walk(
    acc, row_max, row_sum, q, k_ptr, v_ptr, first, last, rows, columns, scale_log2, sk, offset, stride_k, stride_v,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    for start in range(first, last, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        inside = keys < sk
        k = tl.load(k_ptr + keys[None, :] * stride_k + columns[:, None], mask=inside[None, :], other=0.0)
        scores = tl.dot(q, k) * scale_log2
        if MASKED:
            seen = inside[None, :]
            if CAUSAL:
                seen = seen & (keys[None, :] <= rows[:, None] + offset)
            scores = tl.where(seen, scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        reference = tl.where(new_max == -float("inf"), 0.0, new_max)
        weights = tl.math.exp2(scores - reference[:, None])
        rescale = tl.math.exp2(row_max - reference)
        v = tl.load(v_ptr + keys[:, None] * stride_v + columns[None, :], mask=inside[:, None], other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None])
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        row_max = new_max
    return acc, row_max, row_sum


@triton.autotune(configs=_TILES, key=["sq", "sk", "D", "CAUSAL"])
@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, out_ptr, scale_log2, heads, group, sq, sk,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh, stride_ob, stride_os, stride_oh,
    D: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    block, batch, head = tl.program_id(0), (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    if CAUSAL:  # the longest first
        block = tl.num_programs(0) - 1 - block
    rows, columns, offset = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, D), sk - sq
    q_ptr += batch * stride_qb + head * stride_qh
    k_ptr += batch * stride_kb + head // group * stride_kh
    v_ptr += batch * stride_vb + head // group * stride_vh
    q = tl.load(q_ptr + rows[:, None] * stride_qs + columns[None, :], mask=rows[:, None] < sq, other=0.0)
    acc = tl.zeros([BLOCK_M, D], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    full, last = sk // BLOCK_N * BLOCK_N, sk
    if CAUSAL:
        full = tl.minimum(full, tl.maximum(block * BLOCK_M + offset + 1, 0) // BLOCK_N * BLOCK_N)
        last = tl.minimum(sk, tl.maximum((block + 1) * BLOCK_M + offset, 0))
    acc, row_max, row_sum = _walk(
        acc, row_max, row_sum, q, k_ptr, v_ptr, 0, full, rows, columns, scale_log2, sk, offset, stride_ks, stride_vs,
        MASKED=False, CAUSAL=CAUSAL, BLOCK_N=BLOCK_N,
    )  # fmt: skip
    acc, row_max, row_sum = _walk(
        acc, row_max, row_sum, q, k_ptr, v_ptr, full, last, rows, columns, scale_log2, sk, offset, stride_ks, stride_vs,
        MASKED=True, CAUSAL=CAUSAL, BLOCK_N=BLOCK_N,
    )  # fmt: skip
    out = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    out_ptr += batch * stride_ob + head * stride_oh
    tl.store(out_ptr + rows[:, None] * stride_os + columns[None, :], out.to(q.dtype), mask=rows[:, None] < sq)


def attention(q: Any, k: Any, v: Any, scale: float, *, causal: bool) -> Any:
    """softmax(scale q kᵀ) v of torch tensors (B, S, H, D) of 16 bits on a GPU, whose last axis is contiguous; D is a power of two of at
    least 16; the causal mask is bottom-right aligned. The result is new, of q's shape and dtype."""
    batch, sq, heads, dim = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    strides = [x.stride(axis) for x in (q, k, v, out) for axis in (0, 1, 2)]
    grid = lambda tile: (triton.cdiv(sq, tile["BLOCK_M"]), batch * heads)  # noqa: E731
    scale_log2 = scale * 1.4426950408889634
    _forward[grid](q, k, v, out, scale_log2, heads, heads // k.shape[2], sq, k.shape[1], *strides, D=dim, CAUSAL=causal)
    return out
