"""The kernels' parameter structs, field for field the mirror of cuda_src/primitives/params.cuh, and how a call is packed into it.

Eight-byte fields stand before four-byte ones, so the C++ struct has no padding and the two layouts are one string of struct codes;
tests/unit/test_plan.py compares the field lists of both languages.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

from cupyflash.problem import (
    MAX_PARTS,
    AttentionProblem,
    BackwardOperands,
    BackwardProblem,
    CacheOperands,
    CacheProblem,
    MergeOperands,
    MergeProblem,
    Operands,
)

_LOG2E = math.log2(math.e)

# What a call may have beside Operands and LSE.
_MORE = ("row_tiles", "key_tiles", "page_table", "first_k", "k_descale", "v_descale", "part_out", "part_lse", "arrived")

POINTER_NAMES = (*Operands._fields, "lse", *_MORE)

# (name, struct code): Q a pointer, q an int64 stride in elements, d double, i int32, I uint32, f float.
FORWARD_FIELDS = (
    *((name, "Q") for name in POINTER_NAMES),
    *((f"{name}_stride_{axis}", "q") for name in ("q", "k", "v", "out") for axis in ("batch", "seq", "head")),
    *((f"{name}_stride_{axis}", "q") for name in ("bias", "mask") for axis in ("batch", "head", "q", "k")),
    *((f"alibi_stride_{axis}", "q") for axis in ("batch", "head")),
    *((f"{name}_stride", "q") for name in ("sink", "seqused_q", "seqused_k", "cu_seqlens_q", "cu_seqlens_k", "page_table", "first_k")),
    *((f"{name}_descale_stride_{axis}", "q") for name in "kv" for axis in ("batch", "head")),
    *((name, "d") for name in ("softmax_scale", "softcap")),
    *((name, "i") for name in ("batch", "seqlen_q", "seqlen_k", "num_heads_q", "num_heads_kv", "head_dim", "head_dim_v")),
    *((name, "i") for name in ("window_left", "window_right", "top_left", "section", "tile_rows", "tile_keys")),
    *((name, "i") for name in ("page_size", "num_pages", "split", "parts", "group", "head_groups", "group_shift", "page_shift")),
    *((name, "I") for name in ("group_multiplier", "page_multiplier")),
    *((name, "f") for name in ("softmax_scale_log2", "k_descale_of_all", "v_descale_of_all")),
)
FORWARD = struct.Struct("<" + "".join(code for _, code in FORWARD_FIELDS))
POINTERS = struct.Struct("<" + "".join(code for _, code in FORWARD_FIELDS if code == "Q"))  # the first fields; the rest is NUMBERS
_NUMBERS = struct.Struct("<" + "".join(code for _, code in FORWARD_FIELDS if code != "Q"))

# What follows the forward's fields in the argument of the backward's kernels: gradients and workspaces by the names of their buffers.
BACKWARD_POINTER_NAMES = (
    *("dout", "dlse", "dq", "dk", "dv", "dbias", "dalibi_slopes", "dsink"),
    *("row_lse", "row_delta", "row_slope", "row_sink", "row_reference", "dq_sum", "next_tile", "part_sums"),
)
_BACKWARD_NUMBERS = (
    *(f"dout_stride_{axis}" for axis in ("batch", "seq", "head", "dim")),
    *(f"{name}_stride_{axis}" for name in ("lse", "dlse") for axis in ("batch", "head", "seq")),
    *(f"{name}_stride_{axis}" for name in ("dq", "dk", "dv") for axis in ("batch", "seq", "head")),
    *("dbias_batch", "dbias_heads", "dbias_q", "dbias_k", "dalibi_batch", "dq_sum_width", "dq_sum_rows", "split_tiles", "split_parts"),
)
BACKWARD_FIELDS = (*FORWARD_FIELDS, *((name, "Q") for name in BACKWARD_POINTER_NAMES), *((name, "q") for name in _BACKWARD_NUMBERS))
BACKWARD = struct.Struct("<" + "".join(code for _, code in BACKWARD_FIELDS))
_POINTERS_OF_BACKWARD = struct.Struct(f"<{len(BACKWARD_POINTER_NAMES)}Q")
_NUMBERS_OF_BACKWARD = struct.Struct(f"<{len(_BACKWARD_NUMBERS)}q")

# The same of cache_append.cu.
CACHE_POINTER_NAMES = (
    *("q", "k_new", "v_new", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_leftpad", "rotary_positions"),
    *("k_cache", "v_cache", "rotated_q", "used_k", "first_k"),
)
_CACHE_STRIDES = (
    *(f"{name}_stride_{axis}" for name in ("q", "k_new", "v_new") for axis in ("batch", "seq", "head")),
    *(f"{name}_stride" for name in ("rotary_cos", "rotary_sin", "cache_seqlens", "cache_leftpad", "rotary_positions")),
)
_CACHE_NUMBERS = ("seqlen_new", "rotary_dim", "rotary_length", "rotary_interleaved")
CACHE_FIELDS = (
    *FORWARD_FIELDS,
    *((name, "Q") for name in CACHE_POINTER_NAMES),
    *((name, "q") for name in _CACHE_STRIDES),
    *((name, "i") for name in _CACHE_NUMBERS),
)
CACHE = struct.Struct("<" + "".join(code for _, code in CACHE_FIELDS))
_POINTERS_OF_CACHE = struct.Struct(f"<{len(CACHE_POINTER_NAMES)}Q")
_NUMBERS_OF_CACHE = struct.Struct(f"<{len(_CACHE_STRIDES)}q{len(_CACHE_NUMBERS)}i")

# The argument of merge_states.cu, which has nothing of the forward's. What there is of each part is an array: a field for each element.
_MERGE_AXES = {"out": ("batch", "seq", "head", "dim"), "lse": ("batch", "head", "seq")}
MERGE_FIELDS = (
    *((name, "Q") for name in ("out", "lse")),
    *((f"{name}[{n}]", "Q") for name in ("outs", "lses") for n in range(MAX_PARTS)),
    *((f"{name}_stride_{axis}", "q") for name, axes in _MERGE_AXES.items() for axis in axes),
    *((f"{name}s_stride_{axis}[{n}]", "q") for name, axes in _MERGE_AXES.items() for axis in axes for n in range(MAX_PARTS)),
    *((name, "i") for name in ("parts", "batch", "seqlen", "num_heads", "head_dim_v", "chunks")),
)
MERGE = struct.Struct("<" + "".join(code for _, code in MERGE_FIELDS))
_NUMBERS_OF_MERGE = struct.Struct("<" + "".join(code for _, code in MERGE_FIELDS if code != "Q"))

UNLIMITED = 2**31 - 1  # a window's distance that hides nothing


def offset_of(name: str) -> int:
    """Where in the structs a pointer lies, in bytes."""
    names = [field for field, _ in FORWARD_FIELDS]
    return 8 * names.index(name) if name in names else FORWARD.size + 8 * BACKWARD_POINTER_NAMES.index(name)


def pointers_given(operands: Operands, lse: Any, **more: Any) -> str:
    """The struct codes of the first fields for the addresses of those that are not None; the others are padding, which is packed as 0."""
    return "".join("8x" if view is None else "Q" for view in (*operands, lse, *map(more.get, _MORE)))


def numbers(
    p: AttentionProblem,
    a: Operands,
    section: int = 1,
    tiles: tuple[int, int] = (0, 0),
    cache: CacheOperands | None = None,
    descales: tuple[float, float] = (1, 1),
    splits: tuple[int, int] = (0, 0),
) -> bytes:
    """All that follows the pointers: the same for calls of the same shapes, strides and options; `section` and `tiles` are the plan's, and
    `descales` serve where the cache has no arrays of them."""
    group = p.num_heads_q // max(p.num_heads_kv, 1)
    page_size, num_pages = (0, 0) if cache is None else (a.k.shape[1], a.k.shape[0])
    (group_shift, group_multiplier), (page_shift, page_multiplier) = _divisor(group), _divisor(page_size)
    return _NUMBERS.pack(
        *a.q.strides[:3],
        *a.k.strides[:3],
        *a.v.strides[:3],
        *a.out.strides[:3],
        *_strides(a.bias, 4),
        *_strides(a.mask, 4),
        *_strides(a.alibi_slopes, 2),
        *_strides(a.sink, 1),
        *_strides(a.seqused_q, 1),
        *_strides(a.seqused_k, 1),
        *_strides(a.cu_seqlens_q, 1),
        *_strides(a.cu_seqlens_k, 1),
        *((0,) * 6 if cache is None else _strides_of_pages(cache)),
        p.softmax_scale,
        p.softcap or 0.0,
        p.batch,
        p.seqlen_q,
        p.seqlen_k,
        p.num_heads_q,
        p.num_heads_kv,
        p.head_dim,
        p.head_dim_v,
        UNLIMITED if p.window_left is None else p.window_left,
        UNLIMITED if p.window_right is None else p.window_right,
        p.top_left,
        section,
        *tiles,
        page_size,
        num_pages,
        *splits,
        group,
        p.num_heads_kv // section,
        group_shift,
        page_shift,
        group_multiplier,
        page_multiplier,
        p.softmax_scale * _LOG2E,
        *descales,
    )


def _divisor(d: int) -> tuple[int, int]:
    """(shift, multiplier) by which `quotient` in seqlen.cuh divides by d (Granlund and Montgomery, PLDI 1994); nothing is divided by 0."""
    d = max(d, 1)
    shift = (d - 1).bit_length()
    return shift, (((1 << shift) - d) << 32) // d + 1


def _strides_of_pages(cache: CacheOperands) -> tuple[int, ...]:
    table = cache.cache_batch_idx if cache.page_table is None else cache.page_table  # an entry for a sequence is its one page
    return (
        _strides(table, 2)[0],
        *_strides(cache.cache_leftpad, 1),
        *_strides(cache.k_descale, 2),
        *_strides(cache.v_descale, 2),
    )


def cache_pointers(addresses: Sequence[int]) -> bytes:
    """The addresses of what cache_append.cu reads and writes, as CACHE_POINTER_NAMES has them; 0 for what is not there."""
    return _POINTERS_OF_CACHE.pack(*addresses)


def cache_numbers(p: CacheProblem, q: Any, lengths: Any, c: CacheOperands) -> bytes:
    """What follows those pointers: the same for every call of the same shapes, strides and options. `lengths` are those before the call."""
    return _NUMBERS_OF_CACHE.pack(
        *q.strides[:3],
        *_strides(c.k_new, 4)[:3],
        *_strides(c.v_new, 4)[:3],
        *(_strides(table, 2)[0] for table in (c.rotary_cos, c.rotary_sin)),
        *_strides(lengths, 1),
        *_strides(c.cache_leftpad, 1),
        *_strides(c.rotary_positions, 1),
        p.seqlen_new,
        p.rotary_dim,
        0 if c.rotary_cos is None else c.rotary_cos.shape[0],
        p.rotary_interleaved,
    )


def backward_pointers(addresses: Sequence[int]) -> bytes:
    """The addresses of a backward call's own arrays and workspaces, in the order of their names; 0 for what is not there."""
    return _POINTERS_OF_BACKWARD.pack(*addresses)


def backward_numbers(p: BackwardProblem, g: BackwardOperands, sums: tuple[int, int] = (0, 0), splits: tuple[int, int] = (0, 1)) -> bytes:
    """What follows those pointers: the same for every call of the same shapes, strides and options; `sums` and `splits` are the plan's."""
    return _NUMBERS_OF_BACKWARD.pack(
        *g.dout.strides,
        *g.lse.strides,
        *_strides(g.dlse, 3),
        *_strides(g.dq, 4)[:3],
        *_strides(g.dk, 4)[:3],
        *_strides(g.dv, 4)[:3],
        *(p.bias_shape or (0, 0, 0, 0)),
        p.slopes_batch,
        *sums,
        *splits,
    )


def merge_pointers_given(parts: int) -> str:
    """The struct codes of the first fields for the addresses of out, lse, outs and lses, in this order."""
    of_parts = f"{parts}Q{8 * (MAX_PARTS - parts)}x"
    return f"2Q{of_parts}{of_parts}"


def merge_numbers(p: MergeProblem, a: MergeOperands) -> bytes:
    """What follows those pointers: the same for every call of the same shapes and strides."""
    strides = [*a.out.strides, *a.lse.strides]
    for views in (a.outs, a.lses):
        for of_axis in zip(*[view.strides for view in views], strict=True):
            strides += [*of_axis, *[0] * (MAX_PARTS - p.parts)]
    return _NUMBERS_OF_MERGE.pack(*strides, p.parts, p.batch, p.seqlen, p.num_heads, p.head_dim_v, p.chunks)


def _strides(view: Any, n: int) -> tuple[int, ...]:
    return view.strides if view is not None else (0,) * n
