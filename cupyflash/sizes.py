"""A call stated by its sizes, without arrays: what `supports`, `warmup` and `explain` are asked about."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from cupyflash import plan
from cupyflash.arrays import HOST, ArrayView
from cupyflash.device import DeviceSpec
from cupyflash.errors import ShapeError, UnsupportedError
from cupyflash.keywords import refuse_unpacked
from cupyflash.problem import (
    DIFFERENTIABLE,
    AttentionProblem,
    BackwardProblem,
    CacheOperands,
    CacheProblem,
    Causal,
    Operands,
    Window,
    dense,
    differentiated,
    varlen,
)
from cupyflash.problem import cached as over_cache
from cupyflash.variants import MAX_HEAD_DIM

Problem = AttentionProblem | BackwardProblem | CacheProblem


def planned(problem: Problem, device: DeviceSpec) -> plan.Plan:
    if isinstance(problem, AttentionProblem):
        return plan.forward(problem, device)
    return plan.backward(problem, device) if isinstance(problem, BackwardProblem) else plan.cached(problem, device)


def stated(
    *,
    head_dim: int,
    head_dim_v: int | None = None,
    dtype: str = "float16",
    batch: int = 1,
    seqlen_q: int = 1024,
    seqlen_k: int | None = None,
    num_heads_q: int = 8,
    num_heads_kv: int | None = None,
    causal: Causal = False,
    window_size: Window | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    bias: bool = False,
    mask: bool = False,
    alibi_slopes: bool = False,
    sink: bool = False,
    seqused_q: bool = False,
    seqused_k: bool = False,
    out_dtype: str | None = None,
    return_lse: bool = False,
    packed: bool = False,
    wrt: Sequence[str] = (),
    deterministic: bool = False,
    cached: bool = False,
    page_size: int | None = None,
    cache_dtype: str | None = None,
    seqlen_new: int = 0,
    rotary_dim: int = 0,
    num_splits: int | None = None,
    split_size: int | None = None,
) -> Problem:
    """The problem that a call with such arrays is, contiguous ones; the keywords are those of `supports`. Whatever the call would raise
    about them is raised here."""
    hkv, sk, dv = num_heads_kv or num_heads_q, seqlen_q if seqlen_k is None else seqlen_k, head_dim_v or head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "q": (batch, seqlen_q, num_heads_q, head_dim),
        "k": (batch, sk, hkv, head_dim),
        "v": (batch, sk, hkv, dv),
    }
    if packed:
        shapes = {name: (batch * seqlen, *rest) for name, (_, seqlen, *rest) in shapes.items()}
    options = {
        "bias": (bias, (seqlen_q, sk), dtype),
        "mask": (mask, (seqlen_q, sk), "bool"),
        "alibi_slopes": (alibi_slopes, (num_heads_q,), "float32"),
        "sink": (sink, (num_heads_q,), "float32"),
        "seqused_q": (seqused_q, (batch,), "int32"),
        "seqused_k": (seqused_k, (batch,), "int32"),
        "cu_seqlens_q": (packed, (batch + 1,), "int32"),
        "cu_seqlens_k": (packed, (batch + 1,), "int32"),
    }
    views = {name: shape_only(shape, dtype) for name, shape in shapes.items()}
    views |= {name: shape_only(shape, kind) for name, (given, shape, kind) in options.items() if given}
    state: Callable[..., tuple[AttentionProblem, Operands]] = dense
    how: dict[str, Any] = {
        "causal": causal,
        "window_size": window_size,
        "softmax_scale": softmax_scale,
        "softcap": softcap,
        "out_dtype": out_dtype,
        "return_lse": return_lse,
    }
    if packed:
        refuse_unpacked(bias=bias or None, mask=mask or None)
        state = functools.partial(varlen, max_seqlen_q=seqlen_q, max_seqlen_k=sk)
    if cached:
        if bias or wrt:
            raise UnsupportedError("attention over a cache takes no bias and has no gradient", ("attention and attention_varlen do",))
        more = _cache_shapes(batch, sk, hkv, (head_dim, dv), page_size, cache_dtype or dtype, dtype, seqlen_new, rotary_dim, packed)
        views |= {name: more.pop(name) for name in "kv"}
        views.pop("cu_seqlens_k", None)
        how["same_start"] = head_dim > MAX_HEAD_DIM and dv < head_dim  # latent heads
        how |= {"num_splits": num_splits, "split_size": split_size, "max_seqlen_q": seqlen_q if packed else None}
        return over_cache(Operands(**views), CacheOperands(**more), **how)[0]
    problem, _ = state(Operands(**views), **how)
    names = tuple(name for name in DIFFERENTIABLE if name in differentiated(wrt) and name in views)
    if not wrt:
        return problem
    bias_shape = (1, 1, seqlen_q, sk) if "bias" in names else ()
    return BackwardProblem(problem._replace(write_lse=False), names, deterministic=deterministic, bias_shape=bias_shape)


def _cache_shapes(
    batch: int,
    slots: int,
    heads: int,
    dims: tuple[int, int],
    page_size: int | None,
    cache_dtype: str,
    dtype: str,
    seqlen_new: int,
    rotary_dim: int,
    packed: bool,
) -> dict[str, ArrayView]:
    """A cache and what comes with it, by the names of Operands and CacheOperands."""
    if page_size is not None and page_size < 1:
        raise ShapeError(f"page_size={page_size} must be at least 1")
    paged = page_size is not None
    pages = 1 if page_size is None else -(-slots // page_size)
    entries = (batch, slots) if page_size is None else (batch * pages, page_size)
    tokens = (batch * seqlen_new,) if packed else (batch, seqlen_new)
    made = {"cache_seqlens": shape_only((batch,), "int32")}
    if paged:
        made["page_table"] = shape_only((batch, pages), "int32")
    for name, dim in zip("kv", dims, strict=True):
        made[name] = shape_only((*entries, heads, dim), cache_dtype)
        if dims[0] > MAX_HEAD_DIM and name == "v" and dim < dims[0]:  # latent heads: columns of the keys
            made[name] = made[name]._replace(strides=made["k"].strides)
        if seqlen_new:
            made[f"{name}_new"] = shape_only((*tokens, heads, dim), dtype)
    if rotary_dim:
        made |= {name: shape_only((slots, rotary_dim // 2), "float32") for name in ("rotary_cos", "rotary_sin")}
    return made


def shape_only(shape: tuple[int, ...], dtype: str) -> ArrayView:
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return ArrayView(0, shape, strides, dtype, HOST, "numpy", None)
