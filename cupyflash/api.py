"""The public functions. Each is one straight line: view the arrays, state the problem, plan it, compute it, give the result back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from cupyflash import arrays, cache, host, jit, launch, params, plan
from cupyflash.arrays import HOST, Array, ArrayView, Kind
from cupyflash.device import HOST_SPEC, current, named, query
from cupyflash.errors import ArgumentError, CupyflashError, DeviceError, UnsupportedError
from cupyflash.keywords import entry, foreign_keyword, refuse_unpacked
from cupyflash.problem import (
    AttentionProblem,
    Causal,
    MergeOperands,
    MergeProblem,
    Operands,
    Window,
    dense,
    merging,
    pack_heads,
    to_axes,
    to_bshd,
    varlen,
)
from cupyflash.sizes import planned, stated
from cupyflash.variants import Variant


class AttentionResult(NamedTuple):
    """What `attention` returns when more than the output is asked for; what was not asked for is None."""

    out: Any
    lse: Any = None
    max_logits: Any = None


class Support(NamedTuple):
    """The answer of `supports`, true where `ok`: the variants that would run and why, or why none does and what does work."""

    ok: bool
    reason: str
    alternatives: tuple[str, ...] = ()
    variants: tuple[Variant, ...] = ()

    def __bool__(self) -> bool:
        return self.ok


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
    stream: Any = None,
    **unknown: NoReturn,
) -> Any:
    """Exact attention, softmax(scale * q k^T) v, without the Sq x Sk matrix in memory.

    For query row i and key j of one batch and head, in this order: ``s = softmax_scale * (q_i . k_j)``, softcap, ALiBi, bias, then
    causal, window, mask and used lengths decide which keys the row sees, the sink joins, and ``out_i = sum_j softmax(s)_j v_j``.
    Computed tile by tile with the online softmax of FlashAttention-2 (Dao, arXiv 2307.08691, algorithm 1), where the arrays are: in
    host memory by NumPy, in GPU memory by CUDA kernels. Nothing is moved or copied.

    Parameters
    ----------
    q : (B, Sq, Hq, D), any of CuPy, PyTorch, JAX, NumPy or a DLPack exporter; float16, bfloat16, float32 or float64. The last axis
        must be dense (stride 1); every other stride is free, so slices of a packed array and transposed views are read in place.
    k, v : (B, Sk, Hkv, D) and (B, Sk, Hkv, Dv), of q's library, device and dtype. Hq must be a multiple of Hkv: query head h reads
        key head h // (Hq // Hkv). D and Dv are 1 to 256 and may differ. 3-D arrays, without B, are one batch and come back 3-D.
    causal : True hides keys after the diagonal ``j = i + offset``, with offset = Sk - Sq (used lengths, where given): the last query
        sees the last key, as in "bottom_right". "top_left" is offset = 0. For Sq=2, Sk=5 (left) and Sq=5, Sk=2 (right), x visible::

            x x x x .        . .
            x x x x x        . .
                             . .
                             x .
                             x x
    window_size : (left, right), inclusive distances from the same diagonal; None or -1 is unlimited. With causal, right is at most 0.
        (3, 0) sees four keys: three before the diagonal and its own.
    softmax_scale : default 1 / sqrt(D).
    softcap : c > 0 bounds scores to (-c, c) by ``s = c * tanh(s / c)``.
    bias : added to the scores, in their units; broadcastable to (B, Hq, Sq, Sk) in every layout; q's dtype or float32.
    mask : bool, True where a query may attend; broadcasts as bias.
    alibi_slopes : (Hq,) or (B, Hq), float32: adds ``-slope * abs(i + offset - j)`` (Press et al., arXiv 2108.12409).
    sink : (Hq,), float32 or q's dtype: one more key with this logit, not scaled or capped, and value zero.
    seqused_q, seqused_k : (B,), int32: rows and keys in use; what lies past them is not read. Clamped to the allocation.
    layout : axis order of q, k, v and the result: "bshd", "bhsd" or "sbhd". Strides only, no copy.
    out : array for the result, returned as such; of q's library, not overlapping an input. Any strides, the last axis dense.
    out_dtype : dtype of the result; default q's.
    return_lse : also return the natural log of each row's softmax denominator.
    stream : stream of CuPy or torch, or a handle, for arrays in GPU memory; default the current one of q's library. It is the current one
        for the call, and inputs that the caller drops are kept until it is done with them.

    Returns
    -------
    out : (B, Sq, Hq, Dv) in q's layout and library, stored in q's axis order where q is dense. Or, with return_lse,
    AttentionResult(out, lse, max_logits=None) : lse is (B, Hq, Sq), (Hq, Sq) for 3-D inputs, in any layout; float32, float64 for
        float64 inputs. With a sink it counts the sink.

    A row that sees no key gives out 0 and lse -inf (with a sink: lse = sink). Rows past seqused_q give 0 and -inf. What lies in
    places that a row does not see, NaN included, never changes its result.

    Raises
    ------
    ShapeError (a ValueError), DtypeError (a TypeError), ArgumentError (a TypeError), DeviceError (a ValueError), UnsupportedError
    (a NotImplementedError) : before anything is computed, naming the argument; `out` is then untouched.

    Examples
    --------
    >>> import numpy as np, cupyflash
    >>> q = np.random.default_rng(0).standard_normal((2, 128, 8, 64), dtype=np.float32)
    >>> k, v = q[:, :, :2] * 0.5, q[:, :, 2:4]          # two key heads serve eight query heads
    >>> cupyflash.attention(q, k, v, causal=True).shape
    (2, 128, 8, 64)
    >>> out, lse, _ = cupyflash.attention(q, k, v, window_size=(31, 0), return_lse=True)
    >>> lse.shape
    (2, 8, 128)
    """
    if unknown:
        raise foreign_keyword(attention, unknown)
    elsewhere = None
    try:
        # Most calls, and 1.5 us less of their time.
        if out is bias is mask is alibi_slopes is sink is seqused_q is seqused_k is stream is None:
            reader = arrays.READERS
            q_, k_, v_, rest = reader[type(q)](q, "q"), reader[type(k)](k, "k"), reader[type(v)](v, "v"), []
            kinds: tuple[Any, ...] = q_[1], k_[1], v_[1]
        else:
            every = zip(_DENSE_NAMES, (q, k, v, out, bias, mask, alibi_slopes, sink, seqused_q, seqused_k), strict=True)
            given: Any = [None if x is None and name not in _NAMES[:3] else arrays.read(x, name, stream) for name, x in every]
            q_, k_, v_, *rest = given
            kinds = tuple([array and array[1] for array in given])
    except arrays.Elsewhere as e:
        elsewhere = e
    if elsewhere is not None:
        options: dict[str, Any] = {"causal": causal, "window_size": window_size, "softmax_scale": softmax_scale, "softcap": softcap}
        options |= {"bias": bias, "mask": mask, "alibi_slopes": alibi_slopes, "sink": sink, "seqused_q": seqused_q, "seqused_k": seqused_k}
        options |= {"layout": layout, "out": out, "out_dtype": out_dtype, "return_lse": return_lse, "stream": stream}
        return elsewhere.land(attention, (q, k, v), {name: option for name, option in options.items() if option is not None})
    if isinstance(window_size, list):
        window_size = tuple(window_size)
    if out_dtype is not None:
        out_dtype = arrays.dtype_name(out_dtype)
    try:
        call = _prepare(kinds, layout, causal, window_size, softmax_scale, softcap, out_dtype, return_lse)
    except TypeError as e:
        if isinstance(e, CupyflashError):
            raise
        # An option that cannot be hashed is a wrong one: let its check name it.
        call = _prepare.__wrapped__(kinds, layout, causal, window_size, softmax_scale, softcap, out_dtype, return_lse)
    if out is not None:
        views = arrays.located(call.views, given)
        arrays.check_out("out", out, views["out"], views)
    if stream is None and call.current_context() in call.contexts:
        return call.compute(q_, k_, v_, rest, out)
    with arrays.on_stream(stream, [*arrays.located(call.views, (q_, k_, v_, *rest)).values()]), launch.on_device(call.device_id):
        return call.compute(q_, k_, v_, rest, out)


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
    stream: Any = None,
) -> Any:
    """Exact attention of B sequences of any lengths, packed one behind the other in arrays without padding.

    Sequence b is the rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` of q and the keys ``cu_seqlens_k[b]`` to ``cu_seqlens_k[b + 1]``
    of k and v, as in FlashAttention's `varlen` functions (Dao, arXiv 2307.08691). Its result is what `attention` computes of these rows and
    keys alone, in the same order of operations. `cupyflash.pack` makes packed arrays of separate ones.

    Parameters
    ----------
    q : (Tq, Hq, D) : Tq tokens of all sequences. Libraries, dtypes and strides as in `attention`.
    k, v : (Tk, Hkv, D) and (Tk, Hkv, Dv), of q's library, device and dtype; Hq a multiple of Hkv, D and Dv 1 to 256.
    cu_seqlens_q, cu_seqlens_k : (B + 1,), int32, where q is, or in NumPy. None for k's: the same as q's, and then Tk is Tq. Equal offsets
        are an empty sequence; tokens before the first and behind the last offset belong to none. Offsets in GPU memory are not read by the
        host, so a captured CUDA graph may have other ones in each replay. Offsets that decrease, or lie outside of 0 to T, are clamped:
        begin to [0, T], end to [begin, T]; with CUPYFLASH_DEBUG=check a warning of the host path says so.
    max_seqlen_q, max_seqlen_k : the longest sequence, if known: helps to choose a kernel. Too small a number costs time, not correctness.
    page_table : (B, max_pages), int32: k and v then are pages (num_pages, page_size, Hkv, D), of q's dtype, and key j of sequence b is
        ``k[page_table[b, j // page_size], j % page_size]``. How many keys a sequence has say cu_seqlens_k, of which only the differences
        count, or seqused_k, or the lesser of both; one must be given. `attention_with_kvcache` says more of pages.
    causal, window_size : as in `attention`, around the diagonal of each sequence, with offset = its keys - its rows (used ones, where
        given); "top_left" is offset = 0.
    softmax_scale, softcap : as in `attention`.
    alibi_slopes : (Hq,) or (B, Hq), float32: adds ``-slope * abs(i + offset - j)``, i and j counted in the sequence.
    sink : (Hq,), float32 or q's dtype: in every sequence one more key with this logit and value zero.
    seqused_q, seqused_k : (B,), int32: rows and keys of each sequence in use, from its first; clamped to its length.
    out, out_dtype, return_lse, stream : as in `attention`.

    Returns
    -------
    out : (Tq, Hq, Dv) in q's library, stored in q's axis order where q is dense. Or, with return_lse,
    AttentionResult(out, lse, max_logits=None) : lse is (Hq, Tq), natural log; float32, float64 for float64 inputs.

    A row that sees no key gives out 0 and lse -inf (with a sink: lse = sink). Rows of no sequence, and past seqused_q, give 0 and -inf.
    What lies in tokens of no sequence, or past used lengths, NaN included, never enters a result.

    Raises
    ------
    ShapeError, DtypeError, ArgumentError, DeviceError, UnsupportedError : as `attention`, before anything is computed. `mask`, `bias` and
    `layout` are no arguments: they have no meaning in packed arrays.

    Examples
    --------
    >>> import numpy as np, cupyflash
    >>> q = np.random.default_rng(0).standard_normal((10, 8, 64), dtype=np.float32)  # three sequences: of 3, 0 and 7 tokens
    >>> k, v = q[:, :2] * 0.5, q[:, 2:4]
    >>> cu_seqlens = np.array([0, 3, 3, 10], np.int32)
    >>> out, lse, _ = cupyflash.attention_varlen(q, k, v, cu_seqlens, causal=True, return_lse=True)
    >>> out.shape, lse.shape
    ((10, 8, 64), (8, 10))
    >>> alone = cupyflash.attention(q[3:], k[3:], v[3:], causal=True)
    >>> bool(np.allclose(out[3:], alone, atol=1e-6))
    True
    """
    if page_table is not None:
        if seqused_k is None and cu_seqlens_k is None:
            raise ArgumentError("page_table= was given without seqused_k= or cu_seqlens_k=, which say how many keys each sequence has")
        paged = {"q": q, "k": k, "v": v, "out": out, "alibi_slopes": alibi_slopes, "sink": sink, "seqused_q": seqused_q}
        paged |= {"seqused_k": seqused_k, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "page_table": page_table}
        result, lse = cache.attention(
            paged,
            stream=stream,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            causal=causal,
            window_size=tuple(window_size) if isinstance(window_size, list) else window_size,
            softmax_scale=softmax_scale,
            softcap=softcap,
            out_dtype=None if out_dtype is None else arrays.dtype_name(out_dtype),
            return_lse=return_lse,
        )
        return AttentionResult(result, lse) if return_lse else result
    every = (q, k, v, out, None, None, alibi_slopes, sink, seqused_q, seqused_k, cu_seqlens_q, cu_seqlens_k)
    named = zip(_NAMES, every, strict=True)
    given: Any = [None if x is None and name not in ("q", "k", "v", "cu_seqlens_q") else arrays.read(x, name, stream) for name, x in named]
    kinds = tuple([array and array[1] for array in given])
    window = tuple(window_size) if isinstance(window_size, list) else window_size
    dtype = None if out_dtype is None else arrays.dtype_name(out_dtype)
    hints = max_seqlen_q, max_seqlen_k
    call = arrays.prepared(_prepare, kinds, "bshd", causal, window, softmax_scale, softcap, dtype, return_lse, *hints)
    given[-1] = given[-1] or given[-2]
    q_, k_, v_, *rest = given
    if out is not None:
        views = arrays.located(call.views, given)
        arrays.check_out("out", out, views["out"], views)
    if stream is None and call.current_context() in call.contexts:
        return call.compute(q_, k_, v_, rest, out)
    with arrays.on_stream(stream, [*arrays.located(call.views, given).values()]), launch.on_device(call.device_id):
        return call.compute(q_, k_, v_, rest, out)


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
    """Exact attention of new queries over keys that are kept in a cache, to which the new tokens are appended first, in place.

    For each sequence: rotary embedding turns its queries and new keys, the new keys and values are written behind the `cache_seqlens` that
    the cache holds, and the queries attend over all of them, in the order of operations of `attention`. Lengths stay where the arrays
    are, so that a captured CUDA graph may have other ones in each replay. Pages are those of PagedAttention (Kwon et al., arXiv
    2309.06180), splits those of Flash-Decoding (Dao et al. 2023).

    Parameters
    ----------
    q : (B, Sq, Hq, D), or packed (Tq, Hq, D) with cu_seqlens_q. Libraries, dtypes and strides as in `attention`.
    k_cache, v_cache : (B, Sc, Hkv, D) and (B, Sc, Hkv, Dv), or with page_table (num_pages, page_size, Hkv, D) and (num_pages, page_size,
        Hkv, Dv), page_size at least 1; with kv_layout="hnd" the two middle axes change places. Of q's dtype, or float8_e4m3fn or int8.
        Views into one array are fine. D is 1 to 576 and Dv 1 to 512: ``v_cache = k_cache[..., :512]`` serves DeepSeek's latent attention
        (arXiv 2405.04434), with new tokens written by the caller, since what is appended must not overlap.
    cache_seqlens : (B,), int32: how many slots of each sequence are in use **before** this call; new tokens take those behind them, and
        sequence b then has ``cache_seqlens[b] + Sn`` keys. (So it is in FlashAttention-2 and -3, too. vLLM and SGLang count the new ones:
        pass theirs if the cache holds the new tokens already, and no k_new.) The array is not changed.
    k_new, v_new : (B, Sn, Hkv, D) and (B, Sn, Hkv, Dv), packed (Tq, Hkv, D) and (Tq, Hkv, Dv) with the offsets of q; of q's dtype. Tokens
        to append; those past the end of the cache, or of the row of page_table, are dropped and never written elsewhere.
    page_table : (B, max_pages), int32: slot j of sequence b is ``k_cache[page_table[b, j // page_size], j % page_size]``. Rows are dense,
        as are those of rotary_cos and rotary_sin. Entries past a sequence's length are never read. Sequences may share pages, as of a
        common prefix, but for those they append to.
    cache_batch_idx : (B,), int32: sequence b is entry cache_batch_idx[b] of a cache of any batch; not with page_table.
    cache_leftpad : (B,), int32: slots at the beginning of each sequence that hold no key; at most cache_seqlens, which counts them.
    rotary_cos, rotary_sin : (positions, rotary_dim / 2), float32 or q's dtype: rotary embedding (Su et al., arXiv 2104.09864) of the first
        rotary_dim elements of each query and new key; keys in the cache have had theirs.
    rotary_interleaved : pairs are neighbours (GPT-J), elements 2i and 2i + 1; else halves (GPT-NeoX), elements i and i + rotary_dim / 2.
    rotary_positions : (B,), int32: the position of the first query of each sequence; default the slot on its diagonal, which is
        ``cache_seqlens + Sn - Sq``. New keys stand so that the last one has the position of the last query.
    cu_seqlens_q, max_seqlen_q : as in `attention_varlen`.
    causal, window_size : as in `attention`, but causal by default, around the diagonal of each sequence, with offset = its keys, new ones
        too and without leftpad, - its queries: the last query sees the last key.
    softmax_scale, softcap, sink : as in `attention`. alibi_slopes : as in `attention_varlen`.
    mask : bool, True where a query may attend, broadcastable to (B, Hq, Sq, slots): slots is Sc or ``max_pages * page_size``. Not packed.
    k_descale, v_descale : a float, or float32 of shape (), (Hkv,) or (B, Hkv): what numbers of a float8_e4m3fn or int8 cache are to be
        multiplied by, default 1. New tokens are divided by it and rounded to nearest even, those too large to the largest.
    kv_layout : "nhd" or "hnd". Strides only, no copy.
    num_splits, split_size : into how many parts keys are split, or how many keys a part has; None leaves it to cupyflash. With split_size
        the result of a sequence has the same bits whatever else is in the batch. What never splits keys, the host path and float32 and
        float64 on a GPU, has nothing to do for either.
    plan : of `plan_decode`, made for such calls.
    out, return_lse, stream : as in `attention`. In the capture of a CUDA graph of CuPy's a call that appends or rotates keeps its
        workspaces, 4 bytes a sequence and as much as q, until the process ends.

    Returns
    -------
    out : (B, Sq, Hq, Dv) or (Tq, Hq, Dv), in q's library and dtype, stored in q's axis order where q is dense. Or, with return_lse,
    AttentionResult(out, lse, max_logits=None) : lse is (B, Hq, Sq) or (Hq, Tq), natural log; float32, float64 for float64 inputs.
    Of JAX tracers and arrays in GPU memory what `cupyflash.jax.attention_with_kvcache` returns: with k_new the caches, too.

    A row that sees no key gives out 0 and lse -inf (with a sink: lse = sink). What lies in slots that no row sees, NaN included, never
    enters a result. Clamped are lengths past the slots there are, positions past rotary_cos and, where a sequence uses them, entries of
    page_table and cache_batch_idx outside of the cache; nothing is written through such an entry. With CUPYFLASH_DEBUG=check a warning of
    the host path says so.

    Raises
    ------
    ShapeError, DtypeError, ArgumentError, DeviceError, UnsupportedError : as `attention`, before anything is written.

    Examples
    --------
    >>> import numpy as np, cupyflash
    >>> rng = np.random.default_rng(0)
    >>> k_cache, v_cache = np.zeros((2, 6, 16, 2, 64), np.float32)   # six pages of 16 slots
    >>> page_table = np.array([[4, 0, 1], [2, 5, 3]], np.int32)
    >>> lengths = np.array([0, 0], np.int32)
    >>> for new in (20, 1, 1):                                       # a prompt, then token by token
    ...     q, k, v = (rng.standard_normal((2, new, heads, 64), dtype=np.float32) for heads in (8, 2, 2))
    ...     out = cupyflash.attention_with_kvcache(
    ...         q, k_cache, v_cache, cache_seqlens=lengths, k_new=k, v_new=v, page_table=page_table
    ...     )
    ...     lengths += new
    >>> out.shape, lengths
    ((2, 1, 8, 64), array([22, 22], dtype=int32))
    >>> bool((k_cache[3] == 0).all())                                # nobody has come so far
    True
    """
    if cu_seqlens_q is not None:
        refuse_unpacked(mask=mask)
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "out": out, "mask": mask, "alibi_slopes": alibi_slopes, "sink": sink}
    given |= {"cu_seqlens_q": cu_seqlens_q, "cache_seqlens": cache_seqlens, "k_new": k_new, "v_new": v_new, "page_table": page_table}
    given |= {"cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
    given |= {"rotary_positions": rotary_positions, "k_descale": k_descale, "v_descale": v_descale}
    result, lse = cache.attention(
        given,
        stream=stream,
        decode_plan=plan,
        kv_layout=kv_layout,
        rotary_interleaved=rotary_interleaved,
        num_splits=num_splits,
        split_size=split_size,
        max_seqlen_q=max_seqlen_q,
        causal=causal,
        window_size=tuple(window_size) if isinstance(window_size, list) else window_size,
        softmax_scale=softmax_scale,
        softcap=softcap,
        return_lse=return_lse,
    )
    return AttentionResult(result, lse) if return_lse else result


_NAMES = Operands._fields
_DENSE_NAMES = _NAMES[:-2]  # without cu_seqlens_*
Compute = Callable[[Array, Array, Array, list[Array | None], Any], Any]  # (q, k, v, the other operands or nothing, `out`) -> the result


@dataclass(frozen=True, slots=True)  # whose fields are read faster than those of a named tuple
class Call:
    """All that calls of the same shapes, strides, dtypes and options share."""

    views: dict[str, ArrayView]  # of the arrays given, without addresses
    device_id: int
    current_context: Callable[[], int]
    contexts: set[int]  # while one of these is the current one, `compute` can run as things are
    compute: Callable[..., Any]  # as Compute; of `merge_states`, of the arrays as they were read


@arrays.cached_by_kinds
def _prepare(
    kinds: tuple[Kind | None, ...],
    layout: str,
    causal: Causal,
    window_size: Window | None,
    softmax_scale: float | None,
    softcap: float | None,
    out_dtype: str | None,
    return_lse: bool,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> Call:
    """Check and plan a call; the kinds are those of q, k and v, or of all operands but cu_seqlens_*, or of all."""
    views = {name: arrays.describe(kind, name) for name, kind in zip(_NAMES, kinds, strict=False) if kind is not None}
    arrays.check_together(views)
    like = views["q"]
    there = {  # a NumPy vector beside GPU arrays as it will be on the device
        name: view if view.device_id == like.device_id else arrays.fresh(view, view.shape, view.dtype) for name, view in views.items()
    }
    options: dict[str, Any] = {"causal": causal, "window_size": window_size, "softmax_scale": softmax_scale, "softcap": softcap}
    options |= {"out_dtype": out_dtype, "return_lse": return_lse}
    if "cu_seqlens_q" in views:
        problem, operands = varlen(Operands(**there), **options, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
        views.setdefault("cu_seqlens_k", views["cu_seqlens_q"])
    else:
        problem, operands = dense(Operands(**there), **options, layout=layout)
    host_vectors = [name for name, view in views.items() if view.device_id != like.device_id]
    out = arrays.fresh(like, (*like.shape[:-1], problem.head_dim_v), problem.out_dtype, arrays.storage_order(like))
    lse_shape = (problem.batch, problem.num_heads_q, problem.seqlen_q)[4 - len(out.shape) :]
    lse = arrays.fresh(like, lse_shape, problem.lse_dtype) if return_lse else None
    if operands.out is None:
        operands = operands._replace(out=to_bshd(out, "out", layout, like))
    if like.device_id == HOST:
        return Call(views, HOST, int, {0}, _on_host(problem, operands, like, out, lse))  # int() is 0, which is no context
    compute = _on_gpu(problem, operands, like, out, lse, host_vectors)
    return Call(views, like.device_id, launch.context_reader(), launch.contexts(like.device_id), compute)


def _on_gpu(
    problem: AttentionProblem,
    operands: Operands,
    like: ArrayView,
    out_view: ArrayView,
    lse_view: ArrayView | None,
    host_vectors: list[str],  # which operands are NumPy arrays beside GPU arrays
) -> Compute:
    """What computes calls on a GPU, which must be the current one."""
    launch.check_process()
    device = query(like.device_id)
    problem, operands = pack_heads(problem, operands)
    schedule = plan.forward(problem, device)
    numbers = (params.numbers(problem, operands, schedule.section, schedule.tiles, splits=schedule.splits),)
    maps = launch.maps_of(schedule, operands._asdict(), like.device_id)
    packing = launch.Packing(params.pointers_given(operands, lse_view, **dict(schedule.workspaces)), numbers, params.FORWARD.size, *maps)
    queue = launch.launcher(schedule, packing, device, like.device_id, arrays.stream_reader(like))
    allocate_out, allocate_lse = arrays.allocator(out_view, like), lse_view and arrays.allocator(lse_view, like)
    make_workspaces = arrays.workspaces(schedule.workspaces, like) if schedule.workspaces else None
    only_out = allocate_lse is None and make_workspaces is None
    others = [n for n, name in enumerate(_NAMES[3:]) if n and getattr(operands, name) is not None]  # where in `rest`

    def compute(q: Array, k: Array, v: Array, rest: list[Any], out: Any) -> Any:
        out_ptr, out = allocate_out(q[2]) if out is None else (rest[0][0], out)
        addresses: tuple[int, ...] = q[0], k[0], v[0], out_ptr
        if rest:
            for name in host_vectors:
                n = _NAMES.index(name) - 3
                rest[n] = arrays.to_device(rest[n][2], like._replace(owner=q[2]), name)
            addresses += tuple([rest[n][0] for n in others])
        if only_out:
            queue(addresses)
            return out
        lse = None
        if allocate_lse is not None:
            lse_ptr, lse = allocate_lse(q[2])
            addresses += (lse_ptr,)
        if make_workspaces is not None:
            places, made = make_workspaces(q[2])
            arrays.keep_if_captured(made, like)
            addresses += (*places,)
        queue(addresses)
        return out if lse is None else AttentionResult(out, lse)

    return compute


def _on_host(problem: AttentionProblem, operands: Operands, like: ArrayView, out_view: ArrayView, lse_view: ArrayView | None) -> Compute:
    plan.forward(problem, HOST_SPEC)
    allocate_out, allocate_lse = arrays.allocator(out_view, like), lse_view and arrays.allocator(lse_view, like)

    def at(view: Any, owner: Any) -> Any:
        return view and arrays.on_host(view._replace(owner=owner))

    def compute(q: Array, k: Array, v: Array, rest: list[Any], out: Any) -> Any:
        if out is None:
            _, out = allocate_out(q[2])
        _, lse = allocate_lse(q[2]) if allocate_lse else (0, None)
        rows = at(lse_view, lse)
        rows = rows if rows is None or rows.ndim == 3 else rows[None]  # also where q has no batch axis
        owners = (q[2], k[2], v[2], out, *[array and array[2] for array in rest[1:]])
        host.attention(problem, Operands(*map(at, operands, owners)), rows)
        this = like._replace(owner=q[2])
        out = arrays.give_back(out, this)
        return out if lse is None else AttentionResult(out, arrays.give_back(lse, this))

    return compute


@entry
def merge_states(outs: Sequence[Any], lses: Sequence[Any], /, *, out: Any = None, lse_out: Any = None) -> tuple[Any, Any]:
    """Attention over the union of disjoint sets of keys, from the attention over each set.

    ``lse = log(sum_n exp(lse_n))`` and ``out = sum_n exp(lse_n - lse) out_n``: how split-KV decoding, cascades over a shared prefix,
    ring attention and chunked prefill join their parts (Flash-Decoding, Dao et al. 2023; FlashInfer, arXiv 2501.01005, section 2.2).
    Associative and commutative up to rounding. If the calls that made the parts had a sink, it must have been given to exactly one.

    A cascade reads the keys that many requests have in common once for all of them: the rows of all requests, packed, are one sequence over
    the pages of the prefix (without a mask), each request's rows are a sequence over its own pages (causal), and the two are merged::

        shared = attention_varlen(q, k, v, [0, Tq], page_table=prefix_pages[None], seqused_k=[prefix], return_lse=True)
        own = attention_varlen(q, k, v, cu_seqlens_q, page_table=own_pages, seqused_k=own_lengths, causal=True, return_lse=True)
        out, lse = merge_states([shared.out, own.out], [shared.lse, own.lse])

    ``bench/examples/shared_prefix.py`` is that for a step of a decode, its heads as rows and the prefix in parts, so that they fill a GPU.

    Parameters
    ----------
    outs : N arrays of one shape, (B, S, H, Dv) or (S, H, Dv), one library and one of the dtypes of `attention`; any strides. In GPU memory
        up to 32, which one kernel merges on the current stream of their library.
    lses : N arrays, (B, H, S) or (H, S), natural log: float32, or float64 with float64 outs.
    out, lse_out : arrays for the results, returned as such; not overlapping an input.

    Returns
    -------
    (out, lse) : shaped and typed as each part. A part whose lse is -inf has no weight, whatever its out holds; where all are -inf
        the result is 0 and -inf.

    Raises
    ------
    ShapeError, DtypeError, ArgumentError, DeviceError, UnsupportedError : as `attention`. More than 32 parts in GPU memory are an
        UnsupportedError: merge groups of them, then the results.

    Examples
    --------
    >>> import numpy as np, cupyflash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 64, 4, 32), dtype=np.float32)
    >>> parts = [cupyflash.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 40), slice(40, 64))]
    >>> out, lse = cupyflash.merge_states([p.out for p in parts], [p.lse for p in parts])
    >>> bool(np.allclose(out, cupyflash.attention(q, k, v), atol=1e-6))
    True
    """
    if not outs or len(outs) != len(lses):
        raise ArgumentError(f"outs holds {len(outs)} arrays and lses {len(lses)}: they must be as many, and at least one")
    every = zip(_names_of_parts(len(outs)), (*outs, *lses, out, lse_out), strict=True)
    given = [None if x is None and name in ("out", "lse_out") else arrays.read(x, name) for name, x in every]
    call = arrays.prepared(_prepare_merge, tuple([array and array[1] for array in given]))
    if not (out is lse_out is None):
        views = arrays.located(call.views, given)
        for name, target in (("out", out), ("lse_out", lse_out)):
            if target is not None:
                arrays.check_out(name, target, views[name], views)
    if call.current_context() in call.contexts:
        out, lse_out = call.compute(given)
    else:
        with launch.on_device(call.device_id):
            out, lse_out = call.compute(given)
    return out, lse_out


@functools.cache
def _names_of_parts(parts: int) -> tuple[str, ...]:
    return (*[f"outs[{n}]" for n in range(parts)], *[f"lses[{n}]" for n in range(parts)], "out", "lse_out")


@arrays.cached_by_kinds
def _prepare_merge(kinds: tuple[Kind | None, ...]) -> Call:
    """Check and plan a call of `merge_states`; the kinds are those of outs, lses, `out` and `lse_out`."""
    parts = len(kinds) // 2 - 1
    names = _names_of_parts(parts)
    views = {name: arrays.describe(kind, name) for name, kind in zip(names, kinds, strict=True) if kind is not None}
    arrays.check_together(views)
    every = [views.get(name) for name in names]
    problem, operands = merging(MergeOperands(tuple(every[:parts]), tuple(every[parts:-2]), *every[-2:]))
    like = views["outs[0]"]
    out = arrays.fresh(like, like.shape, problem.dtype, arrays.storage_order(like))
    lse = arrays.fresh(like, operands.lses[0].shape[4 - len(like.shape) :], problem.lse_dtype)
    if operands.out is None:
        operands = operands._replace(out=to_axes(out, 4))
    if operands.lse is None:
        operands = operands._replace(lse=to_axes(lse, 3))
    on_host = like.device_id == HOST
    merge = _merge_on_host(problem, operands) if on_host else _merge_on_gpu(problem, operands, like)
    allocate_out, allocate_lse = arrays.allocator(out, like), arrays.allocator(lse, like)

    def compute(given: list[Any]) -> tuple[Any, Any]:
        owner = given[0][2]
        made_out, made_lse = given[-2] or allocate_out(owner), given[-1] or allocate_lse(owner)
        merge([made_out, made_lse, *given[:-2]])
        this = like._replace(owner=owner)
        return arrays.give_back(made_out[-1], this), arrays.give_back(made_lse[-1], this)

    if on_host:
        return Call(views, HOST, int, {0}, compute)
    return Call(views, like.device_id, launch.context_reader(), launch.contexts(like.device_id), compute)


Merge = Callable[[list[Any]], None]  # (out, lse, outs and lses, each an address first and its array last)


def _merge_on_gpu(problem: MergeProblem, operands: MergeOperands, like: ArrayView) -> Merge:
    launch.check_process()
    device = query(like.device_id)
    schedule = plan.merging(problem, device)
    packing = launch.Packing(params.merge_pointers_given(problem.parts), (params.merge_numbers(problem, operands),), params.MERGE.size)
    queue = launch.launcher(schedule, packing, device, like.device_id, arrays.stream_reader(like))
    return lambda given: queue(tuple([array[0] for array in given]))


def _merge_on_host(problem: MergeProblem, operands: MergeOperands) -> Merge:
    views = operands.out, operands.lse, *operands.outs, *operands.lses

    def merge(given: list[Any]) -> None:
        out, lse, *parts = [arrays.on_host(view._replace(owner=array[-1])) for view, array in zip(views, given, strict=True)]
        host.merge(parts[: problem.parts], parts[problem.parts :], out, lse, problem.dtype)

    return merge


@entry
def supports(
    *,
    head_dim: int,
    head_dim_v: int | None = None,
    dtype: str = "float16",
    device: str = "host",
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
    cached: bool = False,
    page_size: int | None = None,
    cache_dtype: str | None = None,
    seqlen_new: int = 0,
    rotary_dim: int = 0,
    num_splits: int | None = None,
    split_size: int | None = None,
) -> Support:
    """Whether `attention` computes such a call, without arrays and without a GPU; the same checks and tables decide both.

    Parameters
    ----------
    head_dim, head_dim_v, batch, seqlen_q, seqlen_k, num_heads_q, num_heads_kv : sizes; head_dim_v, seqlen_k and num_heads_kv are by
        default those of q.
    dtype, out_dtype : names, as "bfloat16".
    device : "host", "cuda" for the current GPU, or an architecture as "sm_80", "sm_90a".
    bias, mask, alibi_slopes, sink, seqused_q, seqused_k : whether the call has such an array.
    causal, window_size, softmax_scale, softcap, return_lse : as in `attention`.
    packed : the question is about `attention_varlen`, of `batch` sequences of these lengths.
    wrt : with names, as in `attention_backward`, the question is about that call.
    cached : the question is about `attention_with_kvcache`, with room for seqlen_k keys a sequence: in pages of `page_size` if that is
        given, of `cache_dtype` if they are not of q's, where `seqlen_new` tokens a sequence are appended and `rotary_dim` dims rotated;
        num_splits and split_size as there. With `packed`, queries have cu_seqlens_q. Beyond head_dim 256 a narrower head_dim_v is taken for
        the first columns of the keys (latent heads): values in memory of their own have another kernel.

    Returns
    -------
    Support(ok, reason, alternatives, variants), true where ok.

    Raises
    ------
    ArgumentError : for an unknown keyword only; whatever `attention` would raise becomes the reason.

    Examples
    --------
    >>> import cupyflash
    >>> bool(cupyflash.supports(head_dim=128, dtype="bfloat16", causal=True))
    True
    >>> cupyflash.supports(head_dim=300).reason
    'no kernel for head_dim 300: 256 is the largest for forward and backward'
    """
    sizes = {**locals()}
    del sizes["device"]
    try:
        return _supported(planned(stated(**sizes), named(device)))
    except UnsupportedError as e:
        return Support(False, e.reason, e.alternatives)
    except CupyflashError as e:
        return Support(False, str(e))


def _supported(schedule: plan.Plan) -> Support:
    helpers = ("packed_tiles", "bwd_delta", "cache_append", "decode_begin")
    step = next((step for step in schedule.steps if step.variant.family not in helpers), None)  # a table chose it
    variants = tuple(step.variant for step in schedule.steps)
    return Support(True, f"{step.variant.name}: {step.why}" if step else "nothing is to be computed", (), variants)


class Report(NamedTuple):
    """One kernel of a `warmup`: whether its file was there before, and where it lies; None is in memory only."""

    variant: str
    arch: str
    seconds: float
    cached: bool
    path: str | None


@entry
def warmup(problems: dict[str, Any] | Sequence[dict[str, Any]], /, *, arch: str | None = None) -> list[Report]:
    """Compile ahead what calls of `attention`, `attention_varlen` and `attention_backward` will need: for the current GPU, or for another
    one without any.

    A kernel is compiled at the first call that needs it, which takes up to some seconds and raises StateError inside a stream capture.
    This compiles on all cores, into files of the cache folder that every later process reads; for the current GPU it also loads them.
    The folder is CUPYFLASH_CACHE_DIR, else CuPy's own: copy it to where calls are made. A file serves the NVRTC version that wrote it, so
    have the same one there; another one compiles again.

    Parameters
    ----------
    problems : the calls, each a dict of keywords as `supports` takes them, or one such dict; with `wrt` it is a backward call. Lengths,
        batch and number of heads matter to calls of few rows alone: up to 64 of the query heads that share a key head may have another
        kernel, and seqlen_q=1 drops what a single query makes pointless, as causal. Arrays are taken as
        contiguous, a bias as of q's dtype and a sink as float32: rows that do not start at multiples of 16 bytes, and other dtypes of these
        two, are other kernels.
    arch : None for the current GPU, else an architecture as "sm_80", "sm_90a".

    Returns
    -------
    A list of Report(variant, arch, seconds, cached, path), one a kernel.

    Raises
    ------
    UnsupportedError : for a call that `supports` refuses, with its reason. ArgumentError : for an unknown keyword.
    DeviceError : without a GPU where arch is None, or for an unknown arch. SetupError : without CuPy or NVRTC.

    Examples
    --------
    >>> import cupyflash
    >>> calls = [dict(head_dim=64, dtype=dtype, causal=True) for dtype in ("float16", "bfloat16")]
    >>> [report.arch for report in cupyflash.warmup(calls, arch="sm_80")]  # needs CuPy and NVRTC, and no GPU
    ['sm_80', 'sm_80']
    """
    device_id = current() if arch is None else None
    name = arch or "cuda"
    if (spec := named(name)) is HOST_SPEC:
        raise DeviceError("arch='host' has nothing to compile: it is an architecture as 'sm_90a', or None for the current GPU")
    variants: dict[Variant, None] = {}
    for problem in [problems] if isinstance(problems, dict) else problems:
        answer = supports(**{**problem, "device": name})
        if not answer:
            raise UnsupportedError(answer.reason, answer.alternatives)
        variants |= dict.fromkeys(answer.variants)
    cubins = jit.build_all(list(variants), spec.arch, device_id)
    return [
        Report(variant.name, f"sm_{spec.arch}", cubin.seconds, cubin.cached, str(cubin.path) if cubin.path else None)
        for variant, cubin in zip(variants, cubins, strict=True)
    ]
