"""PyTorch: attention with gradients, in compiled and exported code, under vmap, and behind `scaled_dot_product_attention`.

Eager calls take the shortest way: without gradients straight to `cupyflash.attention`, with them through one `torch.autograd.Function`.
Where torch has to see the call (torch.compile, torch.export, fake tensors, torch.func, dispatch modes), it is an operator of
`torch.ops.cupyflash`, with its own fake kernel, gradient and vmap rule.
"""

from __future__ import annotations

import collections
import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cupyflash import api, arrays, backward
from cupyflash.api import AttentionResult
from cupyflash.arrays import ArrayView
from cupyflash.errors import ArgumentError, SetupError, ShapeError, UnsupportedError
from cupyflash.keywords import entry
from cupyflash.problem import DIFFERENTIABLE, Causal, Window

try:
    import torch
    from torch.autograd import forward_ad
    from torch.utils.flop_counter import register_flop_formula
except ImportError as e:
    raise SetupError("cupyflash.torch needs PyTorch: pip install torch") from e

_PLAIN = {torch.Tensor, torch.nn.Parameter}
_NO_GRAD = "call inside torch.no_grad(), or pass tensors that do not require grad"


@entry
def attention(
    q: Any,
    k: Any,
    v: Any,
    /,
    *,
    causal: Causal = False,
    window_size: Window | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    sink: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    layout: str = "bshd",
    out: Any = None,
    out_dtype: Any = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    stream: Any = None,
) -> Any:
    """`cupyflash.attention` of torch tensors, with gradients.

    Those of q, k, v, bias, alibi_slopes and sink, where they require grad, also through the LSE where it is returned. Nothing of size
    Sq x Sk is kept for them: q, k, v, the other tensors, out and lse are (FlashAttention-2, Dao, arXiv 2307.08691, algorithm 2). Works in
    torch.compile, torch.export, checkpoints, torch.func.vmap and CUDA graphs.

    Parameters
    ----------
    q, k, v and the options : as in `cupyflash.attention`, as torch tensors. Inside torch.autocast q, k, v and bias of float16, bfloat16 or
        float32 are cast to its dtype, as torch's own attention does; by `cupyflash.attention` only where a call lands here.
    out, stream : only where nothing requires grad, and not in compiled code. The backward runs on the stream that was current.
    deterministic : as in `cupyflash.attention_backward`; None is what torch.are_deterministic_algorithms_enabled() says.

    Returns
    -------
    out, or AttentionResult(out, lse, max_logits=None), as `cupyflash.attention`.

    Raises
    ------
    As `cupyflash.attention`. UnsupportedError where a gradient is differentiated again.

    Examples
    --------
    >>> import torch, cupyflash.torch
    >>> q, k, v = (torch.ones(1, 16, 4, 32, requires_grad=True) for _ in "qkv")
    >>> out, lse, _ = cupyflash.torch.attention(q, k, v, causal=True, return_lse=True)
    >>> (out.sum() + lse.sum()).backward()
    >>> q.grad.shape
    torch.Size([1, 16, 4, 32])
    """
    _check_tensors(q, k, v)
    if torch.is_autocast_enabled("cuda" if q.is_cuda else "cpu"):
        q, k, v, bias = _autocast(q, k, v, bias)
    given: dict[str, Any] = {}
    if not (bias is mask is alibi_slopes is sink is seqused_q is seqused_k is None):
        given = {"bias": bias, "mask": mask, "alibi_slopes": alibi_slopes, "sink": sink, "seqused_q": seqused_q, "seqused_k": seqused_k}
    options: dict[str, Any] = {
        "causal": causal,
        "window_size": window_size,
        "softmax_scale": softmax_scale,
        "softcap": softcap,
        "layout": layout,
    }
    return _attend("attention", (q, k, v), given, options, out, out_dtype, return_lse, deterministic, stream)


@entry
def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    /,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Any = None,
    causal: Causal = False,
    window_size: Window | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    sink: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    out: Any = None,
    out_dtype: Any = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    stream: Any = None,
) -> Any:
    """`cupyflash.attention_varlen` of torch tensors, with gradients as in `attention`.

    Parameters
    ----------
    q, k, v : (Tq, Hq, D), (Tk, Hkv, D) and (Tk, Hkv, Dv), packed, and the options : as in `cupyflash.attention_varlen`, as torch tensors.
        Autocast as in `attention`, but not over pages.
    page_table : there is no gradient through pages: tensors that require grad are an UnsupportedError.
    out, stream, deterministic : as in `attention`.

    Returns
    -------
    out, or AttentionResult(out, lse, max_logits=None), as `cupyflash.attention_varlen` (Dao, arXiv 2307.08691).

    Raises
    ------
    As `cupyflash.attention_varlen`. UnsupportedError where a gradient is differentiated again.

    Examples
    --------
    >>> import torch, cupyflash.torch
    >>> q = torch.ones(10, 4, 32, requires_grad=True)  # sequences of 3 and 7 tokens
    >>> cu_seqlens = torch.tensor([0, 3, 10], dtype=torch.int32)
    >>> cupyflash.torch.attention_varlen(q, q, q, cu_seqlens, causal=True).sum().backward()
    >>> q.grad.shape
    torch.Size([10, 4, 32])
    """
    _check_tensors(q, k, v)
    given = {"alibi_slopes": alibi_slopes, "sink": sink, "seqused_q": seqused_q, "seqused_k": seqused_k}
    given |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    options: dict[str, Any] = {"causal": causal, "window_size": window_size, "softmax_scale": softmax_scale, "softcap": softcap}
    options |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    if page_table is not None:
        given = {"q": q, "k": k, "v": v, **given, "page_table": page_table}
        options |= {"out": out, "out_dtype": out_dtype, "return_lse": return_lse, "stream": stream}
        return _over_cache("attention_paged", api.attention_varlen, given, options)
    if torch.is_autocast_enabled("cuda" if q.is_cuda else "cpu"):
        q, k, v, _ = _autocast(q, k, v, None)
    return _attend("attention_varlen", (q, k, v), given, options, out, out_dtype, return_lse, deterministic, stream)


@entry
def attention_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    /,
    *,
    cache_seqlens: Any,
    k_new: Any = None,
    v_new: Any = None,
    page_table: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary_interleaved: bool = False,
    rotary_positions: Any = None,
    cu_seqlens_q: Any = None,
    max_seqlen_q: int | None = None,
    causal: Causal = True,
    window_size: Window | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    sink: Any = None,
    mask: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    kv_layout: str = "nhd",
    num_splits: int | None = None,
    split_size: int | None = None,
    plan: Any = None,
    out: Any = None,
    return_lse: bool = False,
    stream: Any = None,
) -> Any:
    """`cupyflash.attention_with_kvcache` of torch tensors, in compiled code, too. The cache is written in place, without gradient.

    Parameters
    ----------
    q : (B, Sq, Hq, D) or (Tq, Hq, D), k_cache, v_cache : (B, Sc, Hkv, D) and (B, Sc, Hkv, Dv), or pages, and the options : as in
        `cupyflash.attention_with_kvcache`, as torch tensors. Autocast changes nothing here, since it cannot change the cache.
    out, stream, plan : not in compiled code.

    Returns
    -------
    out, or AttentionResult(out, lse, max_logits=None), as `cupyflash.attention_with_kvcache` (Kwon et al., arXiv 2309.06180).

    Raises
    ------
    As `cupyflash.attention_with_kvcache`. UnsupportedError, before anything is written, where a tensor requires grad.

    Examples
    --------
    >>> import torch, cupyflash.torch
    >>> q, k, v = torch.randn(3, 2, 1, 4, 32)
    >>> k_cache, v_cache = torch.zeros(2, 2, 16, 4, 32)
    >>> used = torch.tensor([0, 0], dtype=torch.int32)
    >>> out = cupyflash.torch.attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=used, k_new=k, v_new=v)
    >>> torch.equal(k_cache[:, :1], k) and torch.allclose(out, v)
    True
    """
    _check_tensors(q, k_cache, v_cache)
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": cache_seqlens, "k_new": k_new, "v_new": v_new}
    given |= {"page_table": page_table, "cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad, "rotary_cos": rotary_cos}
    given |= {"rotary_sin": rotary_sin, "rotary_positions": rotary_positions, "cu_seqlens_q": cu_seqlens_q, "alibi_slopes": alibi_slopes}
    given |= {"sink": sink, "mask": mask, "k_descale": k_descale, "v_descale": v_descale}
    options: dict[str, Any] = {
        "rotary_interleaved": rotary_interleaved,
        "max_seqlen_q": max_seqlen_q,
        "causal": causal,
        "window_size": window_size,
    }
    options |= {"softmax_scale": softmax_scale, "softcap": softcap, "kv_layout": kv_layout, "num_splits": num_splits}
    options |= {"split_size": split_size, "plan": plan, "out": out, "return_lse": return_lse, "stream": stream}
    operator = "attention_over_cache" if k_new is v_new is None else "attention_with_kvcache"
    return _over_cache(operator, api.attention_with_kvcache, given, options)


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """torch.nn.functional.scaled_dot_product_attention, computed by `attention`: the same arguments, the same result.

    Parameters
    ----------
    query : (..., Hq, L, E); any number of leading axes, broadcast as torch does, or none, or no heads. dtypes as in `attention`. Axes of
        the batch beyond one become one: a view where strides can say it.
    key, value : (..., Hkv, S, E) and (..., Hkv, S, Ev). Hkv is Hq, or 1, or with enable_gqa what divides Hq.
    attn_mask : broadcastable to (..., Hq, L, S): bool, True where a query may attend, or of query's dtype or float32, added to the scores;
        a float one has a gradient where it requires one.
    dropout_p : 0; more is an UnsupportedError.
    is_causal : query i sees keys up to i, counted from the first of each (the upper left corner), however many keys there are.
    scale : default 1 / sqrt(E).

    Returns
    -------
    (..., Hq, L, Ev), stored in query's axis order. A row whose mask hides every key is 0, as in torch from 2.5 on;
    before that, and in some of its backends, it is NaN. It is computed as in FlashAttention-2 (Dao, arXiv 2307.08691).

    Raises
    ------
    ShapeError, DtypeError, ArgumentError, DeviceError : as `attention`, in its words. ArgumentError for is_causal with attn_mask.

    Examples
    --------
    >>> import torch, cupyflash.torch
    >>> q, k, v = torch.randn(3, 2, 4, 16, 32)
    >>> ours = cupyflash.torch.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(ours, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), atol=1e-5)
    True
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor) or x.dim() < 2:
            what = f"has {x.dim()} axes" if isinstance(x, torch.Tensor) else f"is a {type(x).__module__}.{type(x).__name__}"
            raise ArgumentError(f"{name} {what}: it must be a torch tensor of two axes or more, length and features the last")
    if dropout_p != 0.0:
        raise UnsupportedError(f"dropout_p={dropout_p} was given: dropout is not built yet", ("pass dropout_p=0.0, as in evaluation",))
    if attn_mask is not None and is_causal:
        raise ArgumentError("is_causal=True was given with attn_mask=, which would hide keys twice: put the diagonal into the mask")
    alike = query.dim() == key.dim() == value.dim() == 4 and query.shape[0] == key.shape[0] == value.shape[0]
    if alike and (enable_gqa or query.shape[1] == key.shape[1] == value.shape[1]):  # most calls, and what follows takes 10 us
        q, k, v, mask, batch = query, key, value, attn_mask, None
    else:
        q, k, v, mask, batch = _broadcast(query, key, value, attn_mask, enable_gqa)
    option = "mask" if mask is not None and mask.dtype == torch.bool else "bias"
    options: dict[str, Any] = {option: mask, "causal": "top_left" if is_causal else False, "softmax_scale": scale}
    out = attention(q, k, v, layout="bhsd", **options)
    if batch is None:
        return out
    axes = max(query.dim(), key.dim(), value.dim())
    return out.unflatten(0, batch) if axes >= 4 else out[(0,) * (4 - axes)]


def _broadcast(q: Any, k: Any, v: Any, mask: Any, enable_gqa: bool) -> tuple[Any, Any, Any, Any, Any]:
    """q, k, v and mask of any leading axes with four, and the axes that the batch stands for."""
    shapes = f"query {tuple(q.shape)}, key {tuple(k.shape)} and value {tuple(v.shape)}"
    axes = max(q.dim(), k.dim(), v.dim(), 4)
    q, k, v = (x.reshape(*[1] * (axes - x.dim()), *x.shape) for x in (q, k, v))
    try:
        batch = _broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
        (heads,) = q.shape[-3:-2] if enable_gqa else _broadcast_shapes(q.shape[-3:-2], k.shape[-3:-2], v.shape[-3:-2])
        if mask is not None and len(batch) > 1:
            mask = mask.reshape(*[1] * (axes - mask.dim()), *mask.shape)
            mask = mask.expand(*batch, *mask.shape[-3:]).flatten(0, -4)
    except RuntimeError as e:
        raise ShapeError(f"{shapes} do not broadcast; heads that several query heads share need enable_gqa=True") from e
    heads_kv = -1 if enable_gqa or k.shape[-3] == v.shape[-3] else heads  # one key head may serve all, without a view of it for each
    q = q.expand(*batch, heads, -1, -1).flatten(0, -4)
    k, v = (x.expand(*batch, heads_kv, -1, -1).flatten(0, -4) for x in (k, v))
    return q, k, v, mask, batch


# These have no types.
_broadcast_shapes: Any = torch.broadcast_shapes
_unpack_dual: Any = forward_ad.unpack_dual


def activate() -> None:
    """Have torch's own scaled_dot_product_attention and variable-length attention on CUDA computed by cupyflash, where torch chooses its
    flash backend: float16 or bfloat16, without a mask.

    Registered as "CUPYFLASH" with torch.nn.attention.register_flash_attention_impl, and activated there, which restores what another
    library had activated. The flash backend is FlashAttention-2's (Dao, arXiv 2307.08691) until then.

    Parameters
    ----------
    None. Shapes and dtypes are what torch's flash backend takes: (B, H, S, D), or packed (T, H, D), up to D = 256.

    Raises
    ------
    UnsupportedError : from a torch without that hook. Later, from calls with dropout, which names the argument.

    Examples
    --------
    >>> import torch.nn.attention, cupyflash.torch
    >>> cupyflash.torch.activate()
    >>> torch.nn.attention.current_flash_attention_impl()
    'CUPYFLASH'
    >>> cupyflash.torch.deactivate()
    """
    hooks = _hooks()
    hooks.register_flash_attention_impl(_NAME, register_fn=_Override)
    hooks.activate_flash_attention_impl(_NAME)


def deactivate() -> None:
    """Give torch its own flash attention back, if `activate` has put cupyflash there; else nothing happens.

    Parameters
    ----------
    None, as of `activate` (for attention as in Dao, arXiv 2307.08691), of any shapes and dtypes.

    Raises
    ------
    UnsupportedError : from a torch without the hook.

    Examples
    --------
    >>> import torch.nn.attention, cupyflash.torch
    >>> cupyflash.torch.deactivate()
    >>> torch.nn.attention.current_flash_attention_impl() is None
    True
    """
    hooks = _hooks()
    if hooks.current_flash_attention_impl() == _NAME:
        hooks.restore_flash_attention_impl()


# --- eager calls -------------------------------------------------------------------------------------------------------------------


def _check_tensors(*qkv: Any) -> None:
    for name, x in zip("qkv", qkv, strict=True):
        if type(x) is not torch.Tensor and not isinstance(x, torch.Tensor):
            raise ArgumentError(
                f"{name} is a {type(x).__module__}.{type(x).__name__}: it must be a torch tensor; `cupyflash` takes any array"
            )


def _autocast(*tensors: Any) -> list[Any]:
    dtype = torch.get_autocast_dtype("cuda" if tensors[0].is_cuda else "cpu")
    narrowed = {torch.float16, torch.bfloat16, torch.float32}
    return [x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype in narrowed else x for x in tensors]


def _attend(
    name: str,
    qkv: tuple[Any, Any, Any],
    given: dict[str, Any],
    options: dict[str, Any],
    out: Any,
    out_dtype: Any,
    return_lse: bool,
    deterministic: bool | None,
    stream: Any,
) -> Any:
    given = {argument: x for argument, x in given.items() if x is not None}
    tensors = (*qkv, *given.values())
    is_seen, function = _is_seen(*tensors), getattr(api, name)
    if not (is_seen or _requires_grad(*tensors, out)):
        return function(*qkv, **given, **options, out=out, out_dtype=out_dtype, return_lse=return_lse, stream=stream)
    _refuse(out=out, stream=stream)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if is_seen:
        options |= {"out_dtype": out_dtype, "deterministic": deterministic}
        result, lse = _operate(name, {**dict(zip("qkv", qkv, strict=True)), **given}, options)
    else:
        for argument, x in given.items():
            if isinstance(x, np.ndarray):
                given[argument] = arrays.vector(x, arrays.view(qkv[0].detach(), "q"), argument)
        result, lse = _apply(_Call(function, (*"qkv", *given), options, out_dtype, deterministic), *qkv, *given.values())
    return AttentionResult(result, lse) if return_lse else result


def _requires_grad(*tensors: Any) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors)


def _is_seen(*tensors: Any) -> bool:
    """Whether torch has to see the call: it traces or transforms it, or a tensor is of a type that computes in its own way."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack():
        return True
    if forward_ad._current_level >= 0:
        for x in tensors:
            if isinstance(x, torch.Tensor) and _unpack_dual(x).tangent is not None:
                raise UnsupportedError(
                    "a tensor has a tangent: forward-mode derivatives are not built", ("torch.func.vjp and jacrev work",)
                )
    return not _PLAIN.issuperset(map(type, tensors)) and any(arrays.computes_its_own_way(x) for x in tensors)


def _refuse(**options: Any) -> None:
    for name, option in options.items():
        if option is not None:
            way_out = f"leave {name}= out" + (", and call inside torch.cuda.stream(...)" if name == "stream" else "")
            raise UnsupportedError(f"{name}= was given where torch records the call, for gradients or a compiled function", (way_out,))


class _Call(NamedTuple):
    function: Callable[..., Any]
    names: tuple[str, ...]  # of the tensors
    options: dict[str, Any]
    out_dtype: Any
    deterministic: bool


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, q: Any, k: Any, v: Any, *others: Any) -> tuple[Any, Any]:
        given = dict(zip(call.names[3:], others, strict=True))
        out, lse, _ = call.function(q, k, v, **given, **call.options, out_dtype=call.out_dtype, return_lse=True)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, *others, out, lse)
        ctx.call = call
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
        call = ctx.call
        *tensors, out, lse = ctx.saved_tensors
        given = dict(zip(call.names, tensors, strict=True))
        needed = dict(zip(call.names, ctx.needs_input_grad[1:], strict=True))
        options = {**call.options, "deterministic": call.deterministic}
        if torch.is_grad_enabled() or _is_seen(dout, dlse):  # create_graph=True, say: the operator tells what its own gradient is
            operator = torch.ops.cupyflash.attention_backward.default
            found = _call_backward(operator, dout, dlse, out, lse, given | _canonical(options), needed)
            return None, *[found.get(name) for name in call.names]
        q, k, v = (given.pop(name) for name in "qkv")
        dout = _zeros_like(out) if dout is None else dout
        wrt = tuple([name for name in call.names if needed[name]])
        grads = backward.attention_backward(dout, q, k, v, out, lse, dlse=dlse, wrt=wrt, **given, **options)
        return None, *[getattr(grads, f"d{name}", None) for name in call.names]


# What Function.apply calls when no transform of torch.func is active: 2 us of a call that should take 40.
_apply: Any = super(torch.autograd.Function, _Attention).apply


def _zeros_like(out: Any) -> Any:
    """For a gradient through the LSE alone: one element, which a backward reads at every place."""
    return out.new_zeros(()).expand(out.shape)


def _over_cache(operator: str, function: Callable[..., Any], given: dict[str, Any], options: dict[str, Any]) -> Any:
    given = {name: x for name, x in given.items() if x is not None}
    if _requires_grad(*given.values(), options["out"]):
        name = next(name for name, x in [*given.items(), ("out", options["out"])] if isinstance(x, torch.Tensor) and x.requires_grad)
        raise UnsupportedError(f"{name} requires grad, and there is no gradient through a cache or pages", (_NO_GRAD,))
    if not _is_seen(*given.values()):
        q, k, v, *_ = given.values()
        return function(q, k, v, **dict([*given.items()][3:]), **options)
    _refuse(**{name: options.pop(name, None) for name in ("out", "stream", "plan")})
    return_lse = options.pop("return_lse")
    out, lse = _operate(operator, given, options)
    return AttentionResult(out, lse) if return_lse else out


# --- operators ---------------------------------------------------------------------------------------------------------------------

_SHARED = ("causal", "window_left", "window_right", "softmax_scale", "softcap")
_OPTIONAL = ("alibi_slopes", "sink", "seqused_q", "seqused_k")
_OFFSETS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_CACHE = (
    *("q", "k_cache", "v_cache", "cache_seqlens", "k_new", "v_new", "page_table", "cache_batch_idx", "cache_leftpad", "rotary_cos"),
    *("rotary_sin", "rotary_positions", "cu_seqlens_q", "alibi_slopes", "sink", "mask", "k_descale", "v_descale", "k_scale", "v_scale"),
    *("rotary_interleaved", "max_seqlen_q", *_SHARED, "kv_layout", "num_splits", "split_size"),
)
_ARGUMENTS = {
    "attention": ("q", "k", "v", "bias", "mask", *_OPTIONAL, "layout", *_SHARED, "out_dtype", "deterministic"),
    "attention_varlen": ("q", "k", "v", *_OFFSETS, *_OPTIONAL, *_SHARED, "out_dtype", "deterministic"),
    "attention_paged": ("q", "k", "v", "page_table", *_OFFSETS, *_OPTIONAL, *_SHARED, "out_dtype"),
    "attention_over_cache": _CACHE,
    "attention_with_kvcache": _CACHE,  # which writes into it
    "attention_backward": (
        *("dout", "q", "k", "v", "out", "lse", "dlse", "bias", "mask"),
        *(*_OFFSETS, *_OPTIONAL, "layout", *_SHARED, "deterministic", "wanted"),
    ),
}
_TYPES = {
    **dict.fromkeys(("q", "k", "v", "k_cache", "v_cache", "cache_seqlens", "dout", "out", "lse"), "Tensor"),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), "SymInt?"),
    **dict.fromkeys(("window_left", "window_right"), "SymInt"),
    **dict.fromkeys(("softmax_scale", "softcap", "k_scale", "v_scale"), "float?"),
    **dict.fromkeys(("num_splits", "split_size"), "int?"),
    **dict.fromkeys(("layout", "kv_layout"), "str"),
    **dict.fromkeys(("deterministic", "rotary_interleaved"), "bool"),
    **dict.fromkeys(("causal",), "str?"),
    **dict.fromkeys(("out_dtype",), "ScalarType?"),
    **dict.fromkeys(("wanted",), "bool[]"),
}  # the other arguments are "Tensor?"


def _operate(name: str, tensors: dict[str, Any], options: dict[str, Any]) -> Any:
    """Call an operator with the arguments of the function that it stands for."""
    given = {**tensors, **_canonical(options)}
    for argument, x in tensors.items():
        if isinstance(x, np.ndarray):
            given[argument] = torch.from_numpy(x).to(given["q"].device)
        elif argument in ("k_descale", "v_descale") and not isinstance(x, torch.Tensor):
            given[argument], given[f"{argument[0]}_scale"] = None, float(x)
        elif not isinstance(x, torch.Tensor):
            raise ArgumentError(f"{argument} is a {type(x).__module__}.{type(x).__name__}: it must be a torch tensor")
    args = [given.get(argument) for argument in _ARGUMENTS[name]]
    if name in ("attention", "attention_varlen") and not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return _Transformed.apply(name, *args)  # type: ignore[no-untyped-call]
    return getattr(torch.ops.cupyflash, name).default(*args)


def _canonical(options: dict[str, Any]) -> dict[str, Any]:
    """Options in the types that an operator's arguments have."""
    causal, window, dtype = options["causal"], options["window_size"], options.get("out_dtype")
    if not isinstance(causal, (bool, str)):
        raise ArgumentError(f"causal={causal!r} must be True, False, 'bottom_right' or 'top_left'")
    if window is not None and (not isinstance(window, (tuple, list)) or len(window) != 2):
        raise ArgumentError(f"window_size={window!r} must be a pair (left, right) of ints; None or -1 means unlimited")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        dtype = getattr(torch, arrays.dtype_name(dtype), None)
        if not isinstance(dtype, torch.dtype):
            raise ArgumentError(f"out_dtype={options['out_dtype']!r} is no dtype of torch")
    left, right = [-1 if distance is None else distance for distance in window or (None, None)]
    causal = causal if isinstance(causal, str) else "bottom_right" if causal else None
    return {**options, "causal": causal, "window_left": left, "window_right": right, "out_dtype": dtype}


def _named(name: str, args: tuple[Any, ...]) -> dict[str, Any]:
    """The arguments of an operator as those of the function, without what is None."""
    given = {name: x for name, x in zip(_ARGUMENTS[name], args, strict=True) if x is not None}
    given.setdefault("causal", False)  # over a cache the default is True
    given["window_size"] = given.pop("window_left"), given.pop("window_right")
    for cache in "kv":
        if f"{cache}_scale" in given:
            given[f"{cache}_descale"] = given.pop(f"{cache}_scale")
    return given


def _without_gradients(compute: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.no_grad` but for 2 us of each call in code of torch.compile, which runs without gradients anyway."""

    @functools.wraps(compute)
    def call(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return compute(*args)
        with torch.no_grad():
            return compute(*args)

    return call


def _operator(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """What an operator of a forward does."""

    @_without_gradients
    def compute(*args: Any) -> tuple[Any, Any]:
        given = _named(name, args)
        given.pop("deterministic", None)
        q, k, v = (given.pop(argument) for argument in _ARGUMENTS[name][:3])
        out, lse, _ = function(q, k, v, **given, return_lse=True)
        return out, lse

    return compute


def _fake(name: str) -> Callable[..., Any]:
    """Its results without their values: out stored in q's axis order, lse (B, Hq, Sq) or (Hq, Tq)."""

    def compute(*args: Any) -> tuple[Any, Any]:
        given = dict(zip(_ARGUMENTS[name], args, strict=True))
        q, _, v = args[:3]
        letters = given.get("layout") or "bshd"
        if not 3 <= q.dim() <= 4:
            raise ShapeError(f"q has shape {tuple(q.shape)}: it must have three or four axes")
        if letters not in ("bshd", "bhsd", "sbhd"):
            raise ArgumentError(f"layout={letters!r} is unknown: it is one of 'bshd', 'bhsd', 'sbhd'")
        sizes = dict(zip(letters.replace("b", "") if q.dim() == 3 else letters, q.shape, strict=True))
        out = _empty(q, (*q.shape[:-1], v.shape[-1]), given.get("out_dtype") or q.dtype, stored_as=q)
        rows = [sizes[letter] for letter in "bhs" if letter in sizes]
        return out, _empty(q, rows, torch.float64 if q.dtype == torch.float64 else torch.float32)

    return compute


def _empty(like: Any, shape: Any, dtype: Any, stored_as: Any = None) -> Any:
    order = None
    if stored_as is not None:
        order = arrays.storage_order(ArrayView(0, stored_as.shape, stored_as.stride(), "", arrays.HOST, "torch", None))
    return like.new_empty_strided(shape, arrays.strides_of.__wrapped__(tuple(shape), order), dtype=dtype)


def _save(name: str) -> Callable[..., None]:
    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
        given = dict(zip(_ARGUMENTS[name], inputs, strict=True))
        ctx.names = [argument for argument, x in given.items() if isinstance(x, torch.Tensor)]
        ctx.options = {argument: x for argument, x in given.items() if argument not in ctx.names}
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*[given[argument] for argument in ctx.names], *output)

    return save


def _differentiate(name: str) -> Callable[..., Any]:
    def backward(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
        return _carry_back(ctx, name, ctx.needs_input_grad, torch.ops.cupyflash.attention_backward.default, dout, dlse)

    return backward


def _carry_back(ctx: Any, name: str, needed: Any, operator: Callable[..., Any], dout: Any, dlse: Any) -> tuple[Any, ...]:
    """The gradients of an operator's arguments, None for those that have none or need none, from what `_save` saved."""
    *tensors, out, lse = ctx.saved_tensors
    given = ctx.options | dict(zip(ctx.names, tensors, strict=True))
    found = _call_backward(operator, dout, dlse, out, lse, given, dict(zip(_ARGUMENTS[name], needed, strict=True)))
    return tuple([found.get(argument) for argument in _ARGUMENTS[name]])


def _call_backward(
    operator: Callable[..., Any], dout: Any, dlse: Any, out: Any, lse: Any, given: dict[str, Any], needed: dict[str, bool]
) -> dict[str, Any]:
    dout = _zeros_like(out) if dout is None else dout
    wanted = [needed.get(name, False) for name in DIFFERENTIABLE]
    given = {"layout": "bshd", **given, "dout": dout, "dlse": dlse, "out": out, "lse": lse, "wanted": wanted}
    grads = operator(*[given.get(argument) for argument in _ARGUMENTS["attention_backward"]])
    return dict(zip([name for name in DIFFERENTIABLE if needed.get(name)], grads, strict=True))


@_without_gradients
def _backward(*args: Any) -> list[Any]:
    given = _named("attention_backward", args)
    wrt = tuple(name for name, wanted in zip(DIFFERENTIABLE, given.pop("wanted"), strict=True) if wanted)
    dout, q, k, v, out, lse = (given.pop(argument) for argument in _ARGUMENTS["attention_backward"][:6])
    grads = backward.attention_backward(dout, q, k, v, out, lse, wrt=wrt, **given)
    return [getattr(grads, f"d{name}") for name in wrt]


def _fake_backward(*args: Any) -> list[Any]:
    given = dict(zip(_ARGUMENTS["attention_backward"], args, strict=True))
    wanted = [given[name] for name, is_wanted in zip(DIFFERENTIABLE, given["wanted"], strict=True) if is_wanted]
    return [_empty(x, x.shape, x.dtype, stored_as=x if any(x is given[n] for n in "qkv") else None) for x in wanted]


def _refuse_second(ctx: Any, *_: Any) -> None:
    raise UnsupportedError(
        "a gradient of attention was differentiated again: second derivatives are not built",
        ("torch.nn.functional.scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH) has them",),
    )


# --- torch.func --------------------------------------------------------------------------------------------------------------------


class _Transformed(torch.autograd.Function):
    """An operator of a forward as torch.func has to see it, which takes no operator's own gradient."""

    generate_vmap_rule = True  # by the rules of the operators

    @staticmethod
    def forward(name: str, *args: Any) -> tuple[Any, Any]:
        return tuple(getattr(torch.ops.cupyflash, name).default(*args))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
        ctx.name = inputs[0]
        _save(ctx.name)(ctx, inputs[1:], output)

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
        operator: Any = _TransformedBackward.apply
        return None, *_carry_back(ctx, ctx.name, ctx.needs_input_grad[1:], operator, dout, dlse)


class _TransformedBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Any, ...]:
        return tuple(torch.ops.cupyflash.attention_backward.default(*args))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        pass

    backward = staticmethod(_refuse_second)


def _vmap(name: str) -> Callable[..., Any]:
    """The rule of an operator: one call with the batch of vmap and B as its batch, where nothing is shared; else one an entry."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        operator = getattr(torch.ops.cupyflash, name).default
        returned: Callable[..., Any] = list if name == "attention_backward" else tuple
        given = dict(zip(_ARGUMENTS[name], args, strict=True))
        axes = {argument: axis for argument, axis in zip(given, in_dims, strict=True) if isinstance(given[argument], torch.Tensor)}
        if name == "attention_with_kvcache":
            raise UnsupportedError("vmap over a call that appends to a cache", ("pass the axis as the batch of the call",))
        dense = name == "attention" or (name == "attention_backward" and given["cu_seqlens_q"] is None and not any(given["wanted"][3:]))
        if not dense or axes.get("sink") is not None:
            entries = [
                operator(*[x if axes.get(argument) is None else x.select(axes[argument], n) for argument, x in given.items()])
                for n in range(info.batch_size)
            ]
            return returned(torch.stack(results) for results in zip(*entries, strict=True)), returned([0] * len(entries[0]))
        at = given["layout"].index("b")
        batch = None  # of each entry, whose arrays may have no axis for it
        if given["q"].dim() - (axes["q"] is not None) == 4:
            batch = given["q"].movedim(axes["q"] or 0, 0).shape[at + 1] if axes["q"] is not None else given["q"].shape[at]
        for argument, axis in axes.items():
            given[argument] = _merge(argument, given[argument], axis, info.batch_size, batch, at)
        results = operator(*given.values())
        places = [at, 0] if name == "attention" else [at] * len(results)
        if batch is not None:
            results = [x.unflatten(place, (info.batch_size, batch)) for x, place in zip(results, places, strict=True)]
        return returned(results), returned(places)

    return rule


def _merge(argument: str, x: Any, axis: int | None, count: int, batch: int | None, at: int) -> Any:
    """A tensor of an entry's call, or of `count` of them along `axis`, as one of the call for all; copied where strides cannot say it."""
    if argument in ("bias", "mask", "alibi_slopes"):
        x = x[None] if axis is None else x.movedim(axis, 0)
        full = 2 if argument == "alibi_slopes" else 4
        x = x.reshape(x.shape[0], *[1] * (full + 1 - x.dim()), *x.shape[1:])  # (count or 1, batch or 1, ...)
        if x.shape[:2] == (1, 1):
            return x[0] if full == 4 else x[0, 0]
        return x.expand(count, batch or 1, *x.shape[2:]).flatten(0, 1)
    if argument == "sink":
        return x
    at = at if argument in ("q", "k", "v", "out", "dout") else 0
    x = x.unsqueeze(at) if axis is None else x.movedim(axis, at)
    x = x.expand(*x.shape[:at], count, *x.shape[at + 1 :])
    return x if batch is None and x.dim() != 2 else x.flatten(at, at + 1)  # of two axes are seqused_*


_Library: Any = torch.library.Library  # which has no types
_LIBRARY = _Library("cupyflash", "DEF")


def _define(name: str, compute: Callable[..., Any], fake: Callable[..., Any], returns: str, **types: str) -> None:
    arguments = ", ".join(f"{(_TYPES | types).get(argument, 'Tensor?')} {argument}" for argument in _ARGUMENTS[name])
    _LIBRARY.define(f"{name}({arguments}) -> {returns}", tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"cupyflash::{name}", fake, lib=_LIBRARY)
    torch.library.register_vmap(f"cupyflash::{name}", _vmap(name), lib=_LIBRARY)


for _name, _function in (("attention", api.attention), ("attention_varlen", api.attention_varlen)):
    _define(_name, _operator(_name, _function), _fake(_name), "(Tensor, Tensor)")
    torch.library.register_autograd(f"cupyflash::{_name}", _differentiate(_name), setup_context=_save(_name), lib=_LIBRARY)
_define("attention_backward", _backward, _fake_backward, "Tensor[]")
torch.library.register_autograd("cupyflash::attention_backward", _refuse_second, lib=_LIBRARY)
_define("attention_paged", _operator("attention_paged", api.attention_varlen), _fake("attention_paged"), "(Tensor, Tensor)")
for _name, _types in (("attention_over_cache", {}), ("attention_with_kvcache", {"k_cache": "Tensor(a!)", "v_cache": "Tensor(b!)"})):
    _define(_name, _operator(_name, api.attention_with_kvcache), _fake(_name), "(Tensor, Tensor)", **_types)


# --- what torch.utils.flop_counter counts -------------------------------------------------------------------------------------------


def _visible_pairs(given: dict[str, Any]) -> Any:
    """How many scores a call has: those that causal, windows and lengths leave, in all heads."""
    layout = given.get("layout") or "bshd"
    if given.get("cu_seqlens_q") is None:
        q_axes, k_axes = [
            dict(zip(layout if x.dim() == 4 else layout.replace("b", ""), x.shape, strict=True)) for x in (given["q"], given["k"])
        ]
        batch, heads = q_axes.get("b", 1), q_axes["h"]
        lengths_q, lengths_k = [q_axes["s"]] * batch, [k_axes["s"]] * batch
    else:
        offsets_q, heads = given["cu_seqlens_q"], given["q"].shape[1]
        offsets_k = offsets_q if given["cu_seqlens_k"] is None else given["cu_seqlens_k"]
        lengths_q, lengths_k = offsets_q.diff().tolist(), offsets_k.diff().tolist()
    if given["seqused_q"] is not None:
        lengths_q = [min(lengths) for lengths in zip(lengths_q, given["seqused_q"].tolist(), strict=True)]
    if given["seqused_k"] is not None:
        lengths_k = [min(lengths) for lengths in zip(lengths_k, given["seqused_k"].tolist(), strict=True)]
    left, right = given["window_left"], given["window_right"]
    if given["causal"] is not None:
        right = 0
    pairs = 0
    for (seqlen_q, seqlen_k), count in collections.Counter(zip(lengths_q, lengths_k, strict=True)).items():
        diagonal = np.arange(seqlen_q) + (0 if given["causal"] == "top_left" else seqlen_k - seqlen_q)
        first = 0 if left < 0 else np.maximum(diagonal - left, 0)
        last = np.minimum(seqlen_k - 1, diagonal + (seqlen_k + seqlen_q if right < 0 else right))
        pairs += count * int(np.maximum(last - first + 1, 0).sum())
    return pairs * heads


def _flops(name: str, per_pair: tuple[int, int]) -> Callable[..., Any]:
    """Of the matrix products: two for each pair and element of D, as often as the first number says, and of Dv, as the second."""

    def count(*args: Any, **_: Any) -> Any:
        given = dict(zip(_ARGUMENTS[name], args, strict=True))
        return 2 * _visible_pairs(given) * (per_pair[0] * given["q"].shape[-1] + per_pair[1] * given["v"].shape[-1])

    return count


for _name, _per_pair in (("attention", (1, 1)), ("attention_varlen", (1, 1)), ("attention_backward", (3, 2))):
    register_flop_formula(getattr(torch.ops.cupyflash, _name), get_raw=True)(_flops(_name, _per_pair))


# --- behind torch's own flash attention --------------------------------------------------------------------------------------------------

_NAME = "CUPYFLASH"


def _hooks() -> Any:
    import torch.nn.attention

    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        raise UnsupportedError(
            f"torch {torch.__version__} has no hook for other libraries' flash attention; torch 2.13 has",
            ("call cupyflash.torch.scaled_dot_product_attention, which has the same arguments",),
        )
    return torch.nn.attention


class _Override:
    """The operators of torch that run its flash attention on CUDA, computed here; until it is removed."""

    def __init__(self) -> None:
        self.library = _Library("aten", "IMPL", "CUDA")
        with warnings.catch_warnings():  # torch tells that its kernels are overridden, which is what was asked for
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            for function in (
                _flash_attention_forward,
                _flash_attention_forward_no_dropout_inplace,
                _flash_attention_backward,
                _scaled_dot_product_flash_attention,
                _scaled_dot_product_flash_attention_backward,
            ):
                self.library.impl(function.__name__, torch.no_grad()(function), "CUDA")

    def remove(self) -> None:
        self.library = None


def _flash_options(
    scale: float | None, is_causal: bool, left: int | None = None, right: int | None = None, dropout_p: float = 0.0, **unused: Any
) -> dict[str, Any]:
    """Options of a call of torch's flash attention as `attention` has them."""
    if dropout_p != 0.0:
        raise UnsupportedError(f"dropout_p={dropout_p} was given: dropout is not built yet", ("cupyflash.torch.deactivate()",))
    for name, option in unused.items():
        if option:
            raise UnsupportedError(f"{name}={option!r} was given, which cupyflash has not", ("cupyflash.torch.deactivate()",))
    return {"softmax_scale": scale, "causal": is_causal, "window_size": (-1 if left is None else left, -1 if right is None else right)}


def _random_state(query: Any) -> tuple[Any, Any, Any]:
    """What dropout would have left for a backward, and the mask of a debugger: nothing reads them."""
    return (
        torch.empty(2, dtype=torch.uint64, device=query.device),
        torch.empty((), dtype=torch.uint64, device=query.device),
        query.new_empty(0),
    )


def _flash_attention_forward(
    query: Any,
    key: Any,
    value: Any,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Any = None,
    alibi_slopes: Any = None,
    block_table: Any = None,
    num_splits: int | None = None,
    out: Any = None,
) -> tuple[Any, ...]:
    unused = {"return_debug_mask": return_debug_mask, "num_splits": num_splits}
    options = _flash_options(scale, is_causal, window_size_left, window_size_right, dropout_p, **unused)
    options |= {"seqused_k": seqused_k, "alibi_slopes": alibi_slopes, "out": out, "return_lse": True}
    if cum_seq_q is None:
        _flash_options(None, False, block_table=block_table)
        result = api.attention(query, key, value, **options)
    else:
        options |= {"max_seqlen_q": max_q, "max_seqlen_k": max_k, "page_table": block_table}
        result = api.attention_varlen(query, key, value, cum_seq_q, cum_seq_k, **options)
    return (result.out, result.lse, *_random_state(query))


def _flash_attention_forward_no_dropout_inplace(out: Any, *args: Any, **options: Any) -> Any:
    return _flash_attention_forward(*args, **options, out=out)[1]


def _flash_attention_backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Any,
    unused: Any,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    layout: str = "bshd",
) -> tuple[Any, Any, Any]:
    options = _flash_options(scale, is_causal, window_size_left, window_size_right, dropout_p)
    if cum_seq_q is not None:
        options |= {"cu_seqlens_q": cum_seq_q, "cu_seqlens_k": cum_seq_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}
    options |= {"layout": layout, "deterministic": torch.are_deterministic_algorithms_enabled()}
    return backward.attention_backward(grad_out, query, key, value, out, logsumexp, **options)[:3]


def _scaled_dot_product_flash_attention(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    options = _flash_options(scale, is_causal, dropout_p=dropout_p, return_debug_mask=return_debug_mask)
    out, lse, _ = api.attention(query, key, value, layout="bhsd", return_lse=True, **options)
    return out, lse, None, None, query.shape[2], key.shape[2], *_random_state(query)


def _scaled_dot_product_flash_attention_backward(*args: Any, scale: float | None = None) -> tuple[Any, Any, Any]:
    return _flash_attention_backward(*args, scale=scale, layout="bhsd")
