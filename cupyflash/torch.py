"""PyTorch: attention with gradients, in compiled and exported code, under vmap, and behind `scaled_dot_product_attention`.

Eager calls take the shortest way: without gradients straight to `cupyflash.attention`, with them through one `torch.autograd.Function`.
Where torch has to see the call (torch.compile, torch.export, fake tensors, torch.func, dispatch modes), it is an operator of
`torch.ops.cupyflash`, with its own fake kernel, gradient and vmap rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cupyflash import api, arrays
from cupyflash.api import AttentionResult
from cupyflash.arrays import ArrayView
from cupyflash.backward import attention_backward
from cupyflash.errors import ArgumentError, SetupError, UnsupportedError
from cupyflash.keywords import entry
from cupyflash.problem import DIFFERENTIABLE, Causal, Window

try:
    import torch
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
        float32 are cast to its dtype, as torch's own attention does.
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
    given = {"bias": bias, "mask": mask, "alibi_slopes": alibi_slopes, "sink": sink, "seqused_q": seqused_q, "seqused_k": seqused_k}
    options: dict[str, Any] = {
        "causal": causal,
        "window_size": window_size,
        "softmax_scale": softmax_scale,
        "softcap": softcap,
        "layout": layout,
    }
    return _attend(api.attention, (q, k, v), given, options, out, out_dtype, return_lse, deterministic, stream)


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
    return _attend(api.attention_varlen, (q, k, v), given, options, out, out_dtype, return_lse, deterministic, stream)


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


# --- eager calls -------------------------------------------------------------------------------------------------------------------


def _check_tensors(*qkv: Any) -> None:
    for name, x in zip("qkv", qkv, strict=True):
        if not isinstance(x, torch.Tensor):
            raise ArgumentError(
                f"{name} is a {type(x).__module__}.{type(x).__name__}: it must be a torch tensor; `cupyflash` takes any array"
            )


def _autocast(*tensors: Any) -> list[Any]:
    dtype = torch.get_autocast_dtype("cuda" if tensors[0].is_cuda else "cpu")
    narrowed = {torch.float16, torch.bfloat16, torch.float32}
    return [x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype in narrowed else x for x in tensors]


def _attend(
    function: Callable[..., Any],
    qkv: tuple[Any, Any, Any],
    given: dict[str, Any],
    options: dict[str, Any],
    out: Any,
    out_dtype: Any,
    return_lse: bool,
    deterministic: bool | None,
    stream: Any,
) -> Any:
    given = {name: x for name, x in given.items() if x is not None}
    is_seen = _is_seen(*qkv, *given.values())
    if not (is_seen or _requires_grad(*qkv, *given.values(), out)):
        return function(*qkv, **given, **options, out=out, out_dtype=out_dtype, return_lse=return_lse, stream=stream)
    _refuse(out=out, stream=stream)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if is_seen:
        options |= {"out_dtype": out_dtype, "deterministic": deterministic}
        result, lse = _operate(function.__name__, {**dict(zip("qkv", qkv, strict=True)), **given}, options)
    else:
        vectors = [name for name, x in given.items() if isinstance(x, np.ndarray)]
        given |= {name: arrays.vector(given[name], arrays.view(qkv[0].detach(), "q"), name) for name in vectors}
        call = _Call(function, (*"qkv", *given), options, out_dtype, deterministic)
        result, lse = _apply(call, *qkv, *given.values())
    return AttentionResult(result, lse) if return_lse else result


def _requires_grad(*tensors: Any) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors)


def _is_seen(*tensors: Any) -> bool:
    """Whether torch has to see the call: it traces or transforms it, or a tensor is of a type that computes in its own way."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack():
        return True
    return not {type(x) for x in tensors} <= _PLAIN and any(arrays.computes_its_own_way(x) for x in tensors)


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
        wanted = [name for name, needed in zip(call.names, ctx.needs_input_grad[1:], strict=True) if needed]
        dout = _zeros_like(out) if dout is None else dout
        options = {**call.options, "deterministic": call.deterministic}
        if torch.is_grad_enabled():  # create_graph=True: the operator says what its own gradient is
            needed = dict(zip(call.names, ctx.needs_input_grad[1:], strict=True))
            found = _call_backward(dout, dlse, out, lse, given | _canonical(options), needed)
            return None, *[found.get(name) for name in call.names]
        q, k, v = tensors[:3]
        others = dict(zip(call.names[3:], tensors[3:], strict=True))
        grads = attention_backward(dout, q, k, v, out, lse, dlse=dlse, wrt=tuple(wanted), **others, **options)
        return None, *[getattr(grads, f"d{name}", None) for name in call.names]


_apply: Any = _Attention.apply


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
    given["window_size"] = given.pop("window_left"), given.pop("window_right")
    for cache in "kv":
        if f"{cache}_scale" in given:
            given[f"{cache}_descale"] = given.pop(f"{cache}_scale")
    return given


def _operator(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """What an operator of a forward does."""

    @torch.no_grad()
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
        *tensors, out, lse = ctx.saved_tensors
        given = ctx.options | dict(zip(ctx.names, tensors, strict=True))
        needed = dict(zip(_ARGUMENTS[name], ctx.needs_input_grad, strict=True))
        found = _call_backward(_zeros_like(out) if dout is None else dout, dlse, out, lse, given, needed)
        return tuple([found.get(argument) for argument in _ARGUMENTS[name]])

    return backward


def _call_backward(dout: Any, dlse: Any, out: Any, lse: Any, given: dict[str, Any], needed: dict[str, bool]) -> dict[str, Any]:
    args = _backward_arguments(dout, dlse, out, lse, given, needed)
    return _gradients(needed, torch.ops.cupyflash.attention_backward.default(*args))


def _backward_arguments(dout: Any, dlse: Any, out: Any, lse: Any, given: dict[str, Any], needed: dict[str, bool]) -> list[Any]:
    given = {"layout": "bshd", **given, "dout": dout, "dlse": dlse, "out": out, "lse": lse}
    given["wanted"] = [needed.get(name, False) for name in DIFFERENTIABLE]
    return [given.get(argument) for argument in _ARGUMENTS["attention_backward"]]


def _gradients(needed: dict[str, bool], grads: Any) -> dict[str, Any]:
    return dict(zip([name for name in DIFFERENTIABLE if needed.get(name)], grads, strict=True))


@torch.no_grad()
def _backward(*args: Any) -> list[Any]:
    given = _named("attention_backward", args)
    wrt = tuple(name for name, wanted in zip(DIFFERENTIABLE, given.pop("wanted"), strict=True) if wanted)
    dout, q, k, v, out, lse = (given.pop(argument) for argument in _ARGUMENTS["attention_backward"][:6])
    grads = attention_backward(dout, q, k, v, out, lse, wrt=wrt, **given)
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
        return tuple(getattr(torch.ops.cupyflash, name).default(*args))  # type: ignore[return-value]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
        ctx.name = inputs[0]
        _save(ctx.name)(ctx, inputs[1:], output)

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
        *tensors, out, lse = ctx.saved_tensors
        given = ctx.options | dict(zip(ctx.names, tensors, strict=True))
        needed = dict(zip(_ARGUMENTS[ctx.name], ctx.needs_input_grad[1:], strict=True))
        args = _backward_arguments(_zeros_like(out) if dout is None else dout, dlse, out, lse, given, needed)
        found = _gradients(needed, _TransformedBackward.apply(*args))  # type: ignore[no-untyped-call]
        return None, *[found.get(argument) for argument in _ARGUMENTS[ctx.name]]


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
