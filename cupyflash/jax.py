"""Attention for JAX: eager and under jit, grad, vmap, scan, checkpoint and shard_map, computed by cupyflash on XLA's own stream.

Each function is an XLA callback on device buffers (`jax.experimental.buffer_callback`), with gradients by `jax.custom_vjp`. Shapes are
known when JAX traces, so that a wrong call raises there, before anything runs; for a GPU kernels are compiled there, too. Workspaces are
further outputs of the callback, thus XLA's memory: it takes 75 % of a GPU for itself, and its CUDA graphs write there in each replay.

Sharded arrays: call it inside `jax.shard_map`, where each device computes its shard. Under jit alone XLA gathers them, and each device
computes everything.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from cupyflash import api, arrays, backward
from cupyflash.api import AttentionResult
from cupyflash.arrays import HOST, XlaArray
from cupyflash.errors import ArgumentError, DtypeError, SetupError, ShapeError, UnsupportedError
from cupyflash.keywords import entry
from cupyflash.problem import DIFFERENTIABLE, Causal, Window

try:
    import jax
    from jax import numpy as jnp
    from jax.custom_derivatives import SymbolicZero
    from jax.experimental.buffer_callback import buffer_callback
except ImportError as e:
    raise SetupError("cupyflash.jax needs JAX 0.6.1 or newer: pip install -U jax (for a GPU 'jax[cuda13]' or 'jax[cuda12]')") from e

# Whether XLA may record calls into its CUDA graphs (command buffers), whose replays run no Python: of 360 calls in a training of 45 steps
# on an H200 58 were made, and a call takes 14 us of host time over an empty one, not 30. What it is when a call is traced counts.
command_buffers = True


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
    out_dtype: Any = None,
    return_lse: bool = False,
    deterministic: bool = False,
) -> Any:
    """`cupyflash.attention` for JAX arrays and tracers, with gradients.

    Forward and backward are FlashAttention-2's (Dao, arXiv 2307.08691), as `cupyflash.attention` and `cupyflash.attention_backward` say;
    gradients are for q, k, v, bias, alibi_slopes and sink, also through the LSE, and only those that JAX asks for are computed. vmap over
    q, k and v makes their axis part of the batch, in one call; over some of them alone, or over sink, one call after the other.

    Parameters
    ----------
    q : (B, Sq, Hq, D), a JAX array or tracer; float16, bfloat16, float32 or, with jax_enable_x64, float64.
    k, v : (B, Sk, Hkv, D) and (B, Sk, Hkv, Dv), of q's dtype. 3-D arrays are one batch.
    options : as in `cupyflash.attention`; arrays among them are JAX arrays, alibi_slopes, seqused_q and seqused_k also NumPy arrays. out
        and stream are not for JAX. What is no array is static under jit.
    deterministic : as in `cupyflash.attention_backward`, for the gradients.

    Returns
    -------
    out : (B, Sq, Hq, Dv), or AttentionResult(out, lse, max_logits=None) with return_lse, as from `cupyflash.attention`.

    Raises
    ------
    ShapeError, DtypeError, ArgumentError, DeviceError, UnsupportedError : as `cupyflash.attention`, when the call is traced.
    UnsupportedError for second-order gradients. SetupError, when the module is imported, without JAX 0.6.1 or newer.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, cupyflash.jax
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 64, 4, 32))
    >>> loss = lambda q, k, v: (cupyflash.jax.attention(q, k, v, causal=True) ** 2).sum()
    >>> dq, dk, dv = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    >>> dk.shape
    (1, 64, 4, 32)
    >>> cupyflash.attention(q, k, v).shape  # the same function; arrays of a CPU, outside of transformations, need no callback
    (1, 64, 4, 32)
    """
    given = {"q": q, "k": k, "v": v, "bias": bias, "mask": mask, "alibi_slopes": alibi_slopes, "sink": sink}
    given |= {"seqused_q": seqused_q, "seqused_k": seqused_k}
    options: dict[str, Any] = {"causal": causal, "window_size": window_size, "softmax_scale": softmax_scale, "softcap": softcap}
    options |= {"layout": layout, "out_dtype": out_dtype, "return_lse": bool(return_lse), "deterministic": deterministic}
    results = _called(_differentiable, given, 3, options)
    return AttentionResult(*results) if return_lse else results[0]


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
    out_dtype: Any = None,
    return_lse: bool = False,
    deterministic: bool = False,
) -> Any:
    """`cupyflash.attention_varlen` for JAX arrays and tracers, with gradients for q, k, v, alibi_slopes and sink.

    The forward and the backward of FlashAttention-2 (Dao, arXiv 2307.08691) for sequences packed one behind the other. Offsets may be
    traced: their values are read where the work is done, so one compilation serves any lengths that fit the arrays.

    Parameters
    ----------
    q : (Tq, Hq, D), k : (Tk, Hkv, D), v : (Tk, Hkv, Dv) : JAX arrays or tracers of one of the dtypes of `attention`.
    cu_seqlens_q, cu_seqlens_k : (B + 1,), int32, of JAX or NumPy.
    options : as in `cupyflash.attention_varlen`, but out and stream. deterministic : as in `attention`.

    Returns
    -------
    out : (Tq, Hq, Dv), or AttentionResult(out, lse, max_logits=None) with return_lse, as from `cupyflash.attention_varlen`.

    Raises
    ------
    As `attention`. UnsupportedError for gradients with a page_table.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, cupyflash.jax
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 10, 4, 32))
    >>> jax.jit(cupyflash.jax.attention_varlen)(q, k, v, jnp.array([0, 3, 10])).shape
    (10, 4, 32)
    """
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "page_table": page_table}
    given |= {"alibi_slopes": alibi_slopes, "sink": sink, "seqused_q": seqused_q, "seqused_k": seqused_k}
    options: dict[str, Any] = {"causal": causal, "window_size": window_size, "softmax_scale": softmax_scale, "softcap": softcap}
    options |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    options |= {"out_dtype": out_dtype, "return_lse": bool(return_lse), "deterministic": deterministic}
    results = _called(_differentiable, given, 4, options)
    return AttentionResult(*results) if return_lse else results[0]


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
    return_lse: bool = False,
) -> Any:
    """`cupyflash.attention_with_kvcache` for JAX arrays and tracers: new tokens are appended to caches that are returned.

    JAX arrays cannot be written, so that with k_new the result has the caches with the new tokens. XLA gives their memory on without a copy
    where nothing else reads the old ones: in the carry of `jax.lax.scan` and `fori_loop`, and under ``jit(..., donate_argnums=...)``.
    Elsewhere, as in an eager call, it copies both caches. Split keys are Flash-Decoding's (Dao et al. 2023), pages those of PagedAttention
    (Kwon et al., arXiv 2309.06180).

    Parameters
    ----------
    q : (B, Sq, Hq, D), or packed (Tq, Hq, D) with cu_seqlens_q; a JAX array or tracer of one of the dtypes of `attention`.
    k_cache, v_cache : (B, Sc, Hkv, D) and (B, Sc, Hkv, Dv), or pages; of q's dtype, float8_e4m3fn or int8.
    cache_seqlens : (B,), int32, of JAX or NumPy: slots in use before the call.
    options : as in `cupyflash.attention_with_kvcache`, but out and stream; arrays among them are JAX arrays, small vectors also NumPy's.

    Returns
    -------
    Without k_new : out, or AttentionResult(out, lse, max_logits=None) with return_lse, as from `cupyflash.attention_with_kvcache`.
    With k_new : (that, k_cache, v_cache).

    Raises
    ------
    As `attention`. UnsupportedError for gradients: attention over a cache has none.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, cupyflash.jax
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 5, 2, 1, 4, 32))  # five steps, two sequences
    >>> def step(carry, new):
    ...     k_cache, v_cache, lengths = carry
    ...     q, k, v = new
    ...     out, k_cache, v_cache = cupyflash.jax.attention_with_kvcache(
    ...         q, k_cache, v_cache, cache_seqlens=lengths, k_new=k, v_new=v
    ...     )
    ...     return (k_cache, v_cache, lengths + 1), out
    >>> caches = jnp.zeros((2, 2, 16, 4, 32))
    >>> (k_cache, v_cache, lengths), outs = jax.lax.scan(step, (*caches, jnp.zeros(2, jnp.int32)), (q, k, v))
    >>> outs.shape, lengths.tolist()
    ((5, 2, 1, 4, 32), [5, 5])
    """
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": cache_seqlens, "k_new": k_new, "v_new": v_new}
    given |= {"page_table": page_table, "cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad, "rotary_cos": rotary_cos}
    given |= {"rotary_sin": rotary_sin, "rotary_positions": rotary_positions, "cu_seqlens_q": cu_seqlens_q, "alibi_slopes": alibi_slopes}
    given |= {"sink": sink, "mask": mask, "k_descale": k_descale, "v_descale": v_descale}
    options: dict[str, Any] = {"rotary_interleaved": rotary_interleaved, "max_seqlen_q": max_seqlen_q, "causal": causal}
    options |= {"window_size": window_size, "softmax_scale": softmax_scale, "softcap": softcap, "kv_layout": kv_layout}
    options |= {"num_splits": num_splits, "split_size": split_size, "plan": plan, "return_lse": bool(return_lse)}
    options |= {name: x for name, x in given.items() if name.endswith("_descale") and isinstance(x, numbers.Real)}
    results = _called(_over_cache, {name: x for name, x in given.items() if name not in options}, 4, options)
    out = AttentionResult(*results[:2]) if return_lse else results[0]
    return out if k_new is None else (out, *results[-2:])


@entry
def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """`jax.nn.dot_product_attention`, argument by argument, computed by `attention` (FlashAttention-2, Dao, arXiv 2307.08691).

    The diagonal of is_causal and local_window_size is ``j = i``: query 0 sees key 0, also where lengths differ.

    Parameters
    ----------
    query : (B, T, N, H) or (T, N, H), key, value : (B, S, K, H) or (S, K, H), K a divisor of N; of one of the dtypes of `attention`.
        These and the other arrays are whatever `jax.numpy.asarray` takes.
    bias, mask : broadcastable to (B, N, T, S); bias of query's dtype or float32, mask bool, True where a query may attend.
    scale : default 1 / sqrt(H).
    query_seq_lengths, key_value_seq_lengths : (B,), int32: rows and keys in use.
    local_window_size : (left, right) or one int for both: a query sees keys from left before the diagonal to right after it. Without
        is_causal S may be shorter than T by at most left, and longer by at most right.
    implementation : None or "cupyflash"; the others are those of `jax.nn`.
    return_residual : also return the log of the softmax denominators.

    Returns
    -------
    out : as query. Or, with return_residual, (out, residual) : residual is (B, T, N) or (T, N), of key's dtype, without a gradient. A row
    that sees no key is 0, with residual -inf; in `jax.nn` it is the mean of all values.

    Raises
    ------
    As `attention`. ArgumentError for another implementation, ShapeError for a window below 0.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, cupyflash.jax
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 64, 4, 32))
    >>> ours = cupyflash.jax.dot_product_attention(q, k, v, is_causal=True)
    >>> bool(jnp.allclose(ours, jax.nn.dot_product_attention(q, k, v, is_causal=True), atol=1e-5))
    True
    """
    if implementation not in (None, "cupyflash"):
        raise ArgumentError(f"implementation={implementation!r} is none of this function's, None and 'cupyflash': jax.nn has the others")
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    bias, mask, used_q, used_k = (None if x is None else jnp.asarray(x) for x in (bias, mask, query_seq_lengths, key_value_seq_lengths))
    causal: Causal = "top_left" if is_causal else False
    window, rows = None, None
    if local_window_size is not None:
        window = _window(local_window_size)
        if not is_causal:  # the diagonal of such windows ends at the last keys, so they are moved, and no length may move it
            apart = key.shape[-3] - query.shape[-3]
            window = window[0] + apart, window[1] - apart
            if min(window) < 0:
                raise UnsupportedError(
                    f"local_window_size={local_window_size} without is_causal, of {query.shape[-3]} queries and {key.shape[-3]} keys, has "
                    "queries whose window begins behind the last key or ends before the first",
                    ("pass it as mask=",),
                )
            if used_k is not None:
                used = jnp.arange(key.shape[-3]) < used_k[:, None, None, None]
                mask, used_k = used if mask is None else mask & used, None
            if used_q is not None:
                rows = jnp.arange(query.shape[-3]) < used_q.reshape((*query.shape[:-3], 1))
                used_q = None
    out, lse, _ = attention(
        *(query, key, value),
        causal=causal,
        window_size=window,
        softmax_scale=scale,
        bias=bias,
        mask=mask,
        seqused_q=used_q,
        seqused_k=used_k,
        return_lse=True,
    )
    lse = jnp.swapaxes(lse, -1, -2)
    if rows is not None:
        out, lse = jnp.where(rows[..., None, None], out, 0), jnp.where(rows[..., None], lse, -jnp.inf)
    return (out, jax.lax.stop_gradient(lse.astype(key.dtype))) if return_residual else out


def _window(local_window_size: Any) -> tuple[int, int]:
    pair = (local_window_size,) * 2 if isinstance(local_window_size, numbers.Integral) else local_window_size
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(isinstance(n, numbers.Integral) for n in pair):
        raise ArgumentError(f"local_window_size={local_window_size!r} must be an int or a pair (left, right) of ints")
    if min(pair) < 0:
        raise ShapeError(f"local_window_size={local_window_size!r} must not be below 0")
    return int(pair[0]), int(pair[1])


# --- from arguments to a function of arrays ----------------------------------------------------------------------------------------


def _array(x: Any, name: str) -> Any:
    if isinstance(x, jax.Array):
        if not isinstance(x, jax.core.Tracer) and len(devices := x.sharding.device_set) > 1:
            raise ArgumentError(f"{name} is sharded over {len(devices)} devices: call cupyflash on each shard, inside jax.shard_map")
        return x
    if isinstance(x, np.ndarray) and name in arrays.VECTORS:
        if x.dtype.itemsize > 4:  # which JAX would narrow silently
            raise DtypeError(f"{name} is {x.dtype}: it must be {'float32' if x.dtype.kind == 'f' else 'int32'}")
        return x
    raise ArgumentError(f"{name} is a {type(x).__module__}.{type(x).__name__}: it must be a JAX array; jax.numpy.asarray({name}) makes one")


Function = Callable[..., tuple[Any, ...]]  # of arrays, to a tuple of arrays


def _called(build: Any, given: dict[str, Any], required: int, options: dict[str, Any]) -> tuple[Any, ...]:
    """The results of the function that `build` makes for arguments of these names and options, jitted and kept: a new one in each call
    would take XLA 29 ms. The first `required` of the arrays may not be None."""
    read = {name: _array(x, name) for n, (name, x) in enumerate(given.items()) if x is not None or n < required}
    if isinstance(options["window_size"], list):
        options["window_size"] = tuple(options["window_size"])
    if options.get("out_dtype") is not None:
        options["out_dtype"] = arrays.dtype_name(options["out_dtype"])
    results: tuple[Any, ...] = arrays.prepared(build, (*read,), command_buffers, (*options,), *options.values())(*read.values())
    return results


_kept = functools.lru_cache(maxsize=1024, typed=True)  # typed: 1 is not True to `causal`


@_kept
def _differentiable(names: tuple[str, ...], command_buffers: bool, option_names: tuple[str, ...], *values: Any) -> Any:
    """Attention of arrays with these names, dense or packed, and its gradients."""
    options = dict(zip(option_names, values, strict=True))
    return_lse, deterministic, layout = options.pop("return_lse"), options.pop("deterministic"), options.get("layout")
    function: Any = api.attention_varlen if "cu_seqlens_q" in names else api.attention
    kept = {name: option for name, option in options.items() if name != "out_dtype"} | {"deterministic": deterministic}

    @functools.cache
    def forward(return_lse: bool) -> Function:
        return _operation(function, names, options | {"return_lse": return_lse}, 1 + return_lse, layout, command_buffers)

    @functools.cache  # residuals are compared, the function in them, too
    def pullback(wrt: tuple[str, ...]) -> Function:
        def pull(xs: Sequence[Any], out: Any, lse: Any, dout: Any, dlse: Any = None) -> tuple[Any, ...]:
            if isinstance(dout, SymbolicZero):
                dout = jnp.zeros_like(out)
            given = {"dout": dout, **dict(zip(names[:3], xs[:3], strict=True)), "out": out, "lse": lse}
            given |= dict(zip(names[3:], xs[3:], strict=True))
            if dlse is not None and not isinstance(dlse, SymbolicZero):
                given["dlse"] = dlse
            operation = _operation(backward.attention_backward, (*given,), kept | {"wrt": wrt}, len(wrt), layout, command_buffers)
            gradients = dict(zip(wrt, operation(*given.values()), strict=True)) if wrt else {}
            return tuple(gradients.get(name) for name in names)

        return pull

    def attend_and_keep(*primals: Any) -> tuple[Any, Any]:
        if "page_table" in names:
            raise UnsupportedError(
                "page_table= was given: gradients of keys in pages are not built", ("gather the pages, and pass them packed",)
            )
        xs = [primal.value for primal in primals]
        wanted = {name for name, primal in zip(names, primals, strict=True) if primal.perturbed}
        results = forward(True)(*xs)
        pull = jax.tree_util.Partial(pullback(tuple([name for name in DIFFERENTIABLE if name in wanted])), xs, *results)
        return results[: 1 + return_lse], pull

    attend = jax.custom_vjp(lambda *xs: forward(return_lse)(*xs))
    attend.defvjp(attend_and_keep, lambda pull, cotangents: pull(*cotangents), symbolic_zeros=True)

    def cupyflash_attention(*xs: Any) -> Any:
        return attend(*_varying_alike(xs))

    return jax.jit(cupyflash_attention)


@_kept
def _over_cache(names: tuple[str, ...], command_buffers: bool, option_names: tuple[str, ...], *values: Any) -> Any:
    """Attention over a cache; with new tokens the last two results are the caches."""
    options = dict(zip(option_names, values, strict=True))
    written = (1, 2) if "k_new" in names else ()
    attend = _operation(api.attention_with_kvcache, names, options, 1 + options["return_lse"], None, command_buffers, written)

    def cupyflash_attention_with_kvcache(*xs: Any) -> Any:
        return attend(*_varying_alike(xs))

    return jax.jit(cupyflash_attention_with_kvcache)


# --- functions of cupyflash as operations of JAX -----------------------------------------------------------------------------------


def _operation(
    function: Callable[..., Any],
    names: tuple[str, ...],
    options: dict[str, Any],
    results: int,
    layout: str | None,  # of calls that vmap may make one call; None: it makes one after the other
    command_buffers: bool,
    written: tuple[int, ...] = (),  # which arrays the function writes: they are further results
) -> Function:
    """A function of cupyflash as one of JAX arrays with these names, which can be traced and mapped, but not differentiated."""
    positional = 6 if function is backward.attention_backward else 3

    def call(given: list[XlaArray]) -> None:
        function(*given[:positional], **dict(zip(names[positional:], given[positional:], strict=True)), **options)

    def compute(*xs: Any) -> tuple[Any, ...]:
        given = [(x.shape, x.dtype) for x in xs]
        made, *_ = [arrays.traced(call, given, device_id) for device_id in _devices(command_buffers)]
        made += [given[n] for n in written]
        outputs = buffer_callback(
            _callback(call, given, made, written),
            [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in made],
            input_output_aliases={n: len(made) - len(written) + m for m, n in enumerate(written)},
            command_buffer_compatible=command_buffers,
        )(*xs)
        mesh_axes = _mesh_axes(xs)  # buffer_callback does not say those of its outputs
        return tuple([_varying(x, mesh_axes) for x in (*outputs[:results], *outputs[len(made) - len(written) :])])

    operation = jax.custom_batching.custom_vmap(compute)

    def map_over(size: int, is_mapped: Sequence[bool], *xs: Any) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
        folding = _folding(names, xs, is_mapped, size, layout, options.get("wrt", ())) if layout else None
        if folding is not None:
            made = folding.unfold(operation(*folding.fold(xs, is_mapped)))
        else:

            def one(moved: list[Any]) -> Any:
                left = iter(moved)
                return operation(*[next(left) if moves else x for x, moves in zip(xs, is_mapped, strict=True)])

            made = jax.lax.map(one, [x for x, moves in zip(xs, is_mapped, strict=True) if moves])
        return made, (True,) * len(made)

    def refuse(primals: Any, tangents: Any) -> NoReturn:
        if function is api.attention_with_kvcache:
            raise UnsupportedError("attention over a cache has no gradient", ("that of attention and attention_varlen has",))
        raise UnsupportedError("attention has no second-order or forward-mode gradients", ("jax.nn.dot_product_attention has",))

    operation.def_vmap(map_over)
    refusing = jax.custom_jvp(operation)
    refusing.defjvp(refuse)
    as_typed: Function = refusing
    return as_typed


def _callback(
    call: Callable[[list[XlaArray]], None], given: list[tuple[Any, Any]], made: list[tuple[Any, Any]], written: tuple[int, ...]
) -> Callable[..., None]:
    """What XLA calls; `given` and `made` have the (shape, dtype) of its inputs and outputs."""

    def on_buffers(ctx: Any, outputs: Sequence[Any], *inputs: Any) -> None:
        device_type, device_id = inputs[0].__dlpack_device__()
        if device_type == 1:
            stream, device_id, address = 0, HOST, _address_on_host
        else:
            stream, address = ctx.stream, _address_on_gpu
        read = [XlaArray(x, address(x, what[1]), *what, device_id) for x, what in zip(inputs, given, strict=True)]
        taken = [XlaArray(x, address(x, what[1]), *what, device_id) for x, what in zip(outputs, made, strict=True)]
        for n, array in zip(written, taken[len(taken) - len(written) :], strict=True):
            read[n] = array
        arrays.in_xla(call, read, taken, stream)

    return on_buffers


def _address_on_host(buffer: Any, dtype: Any) -> int:
    return int(np.asarray(buffer).ctypes.data)


def _address_on_gpu(buffer: Any, dtype: Any) -> int:
    if dtype.kind == "V" and dtype.itemsize == 1:  # float8, which is not in the other protocol
        return arrays.dlpack_address(buffer)
    address: int = buffer.__cuda_array_interface__["data"][0]  # 0.75 us; a DLPack capsule takes 3.4
    return address


def _devices(command_buffers: bool) -> list[int]:
    """Where what is traced will run: first the default device, though a callback may find itself on another one; with command buffers all
    GPUs, since a kernel must be loaded before it is captured."""
    default = jax.config.jax_default_device or jax.local_devices()[0]
    if isinstance(default, str):
        default = jax.local_devices(backend=default)[0]
    if default.platform == "cpu":
        return [HOST]
    others = [device for device in jax.local_devices(backend=default.platform) if device != default] if command_buffers else []
    return [int(device.local_hardware_id) for device in (default, *others)]


# --- inside shard_map --------------------------------------------------------------------------------------------------------------


def _varying_alike(xs: Sequence[Any]) -> list[Any]:
    """Arrays as ones that differ along the same axes of the mesh, as those of a custom gradient have to."""
    axes = _mesh_axes(xs)
    return [_varying(x, axes) for x in xs]


def _mesh_axes(xs: Sequence[Any]) -> frozenset[str]:
    """Those along which any of the arrays differs."""
    return frozenset().union(*[_varies(x) for x in xs])


def _varies(x: Any) -> frozenset[str]:
    kind = jax.typeof(x)
    axes: frozenset[str] = kind.mat.varying if hasattr(kind, "mat") else getattr(kind, "vma", frozenset())  # before JAX 0.10
    return axes


def _varying(x: Any, axes: frozenset[str]) -> Any:
    missing = tuple(sorted(axes - _varies(x)))
    if not missing:
        return x
    return jax.lax.pcast(x, missing, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(x, missing)


# --- vmap: a mapped axis as part of the batch --------------------------------------------------------------------------------------

# How many axes these have, where all are there; the first is the batch, which may have size 1.
_OPTION_AXES = {"bias": 4, "mask": 4, "alibi_slopes": 2, "seqused_q": 1, "seqused_k": 1}


class _Folding(NamedTuple):
    """How calls of `attention` or `attention_backward` on mapped arrays are one call."""

    names: tuple[str, ...]
    shapes: dict[str, tuple[int, ...]]  # without the mapped axis
    size: int  # of the mapped axis
    batch: int | None  # None: arrays without that axis
    axis: int  # of the batch
    wrt: tuple[str, ...]

    def fold(self, xs: Sequence[Any], is_mapped: Sequence[bool]) -> list[Any]:
        return [self._folded(*each) for each in zip(self.names, xs, is_mapped, strict=True)]

    def unfold(self, made: Sequence[Any]) -> tuple[Any, ...]:
        return tuple([self._unfolded(*each) for each in zip(self.wrt or ("out", "lse"), made, strict=False)])

    def _folded(self, name: str, x: Any, is_mapped: bool) -> Any:
        if name == "sink":
            return x
        if name in _OPTION_AXES:
            shape = (1,) * (_OPTION_AXES[name] - len(self.shapes[name])) + self.shapes[name]
            if not is_mapped and shape[0] == 1 and len(shape) > 1 and name not in self.wrt:
                return x  # it serves the whole batch
            x = x.reshape((self.size if is_mapped else 1, *shape))
            x = jnp.broadcast_to(x, (self.size, self.batch or 1, *shape[1:]))
            return x.reshape(x.shape[0] * x.shape[1], *shape[1:])
        axis = self._axis_of(name)
        x = jnp.moveaxis(x if is_mapped else jnp.broadcast_to(x, (self.size, *x.shape)), 0, axis)
        return x if self.batch is None else x.reshape(*x.shape[:axis], self.size * self.batch, *x.shape[axis + 2 :])

    def _unfolded(self, name: str, x: Any) -> Any:
        if name in _OPTION_AXES:
            shape = self.shapes[name]
            x = x.reshape(self.size, self.batch or 1, *x.shape[1:])
            return (x.sum(1) if len(shape) < _OPTION_AXES[name] or shape[0] == 1 else x).reshape(self.size, *shape)
        axis = self._axis_of(name)
        x = x if self.batch is None else x.reshape(*x.shape[:axis], self.size, self.batch, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    def _axis_of(self, name: str) -> int:
        return 0 if name in ("lse", "dlse") else self.axis


def _folding(
    names: tuple[str, ...], xs: Sequence[Any], is_mapped: Sequence[bool], size: int, layout: str, wrt: tuple[str, ...]
) -> _Folding | None:
    """None where calls can only be made one after the other: keys that serve several queries would be copied, and a sink has no batch."""
    which = dict(zip(names, is_mapped, strict=True))
    if not (which["q"] and which["k"] and which["v"]) or which.get("sink") or "sink" in wrt:
        return None
    shapes = {name: x.shape[moves:] for name, x, moves in zip(names, xs, is_mapped, strict=True)}
    axis = layout.index("b")
    return _Folding(names, shapes, size, shapes["q"][axis] if len(shapes["q"]) == 4 else None, axis, wrt)
