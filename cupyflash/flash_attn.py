"""The functions of the package `flash_attn`, with its names, argument order, defaults and layouts, computed by cupyflash.

``import cupyflash.flash_attn as flash_attn`` in code of one's own; for code of others, which imports the package by name, `install` first.
Arguments are those of flash_attn 2.8 in its order (FlashAttention-2: Dao, arXiv 2307.08691); what FlashAttention-3 (Shah et al., arXiv
2407.08608) adds goes by name. What is not built raises UnsupportedError unless it is as by default. float32, float64, any head_dim up to
256, any page size and tensors in host memory are fine as well. Not in here: layers, losses, rotary embedding on its own.
"""

from __future__ import annotations

import sys
from typing import Any

from cupyflash._version import __version__ as _own_version
from cupyflash.errors import ArgumentError, SetupError, ShapeError, StateError, UnsupportedError

try:
    import torch
except ImportError as e:
    raise SetupError("cupyflash.flash_attn needs PyTorch: pip install torch") from e
from cupyflash.torch import attention, attention_varlen, attention_with_kvcache

__version__ = f"2.8.3+cupyflash.{_own_version}"  # the release whose arguments these are, for code that compares versions
bert_padding = flash_attn_interface = sys.modules[__name__]  # submodules of the package: their functions are here

Tensor = Any  # torch.Tensor
Window = tuple[int, int]


def install() -> None:
    """Have ``import flash_attn``, ``flash_attn.flash_attn_interface`` and ``flash_attn.bert_padding`` find this module from now on.

    Call it before anything imports the package: code that has taken a function from another `flash_attn` keeps it.

    Raises
    ------
    StateError (a RuntimeError) : where another `flash_attn` is imported already.

    Examples
    --------
    >>> import cupyflash.flash_attn
    >>> cupyflash.flash_attn.install()
    >>> from flash_attn.bert_padding import pad_input, unpad_input
    """
    here = sys.modules[__name__]
    names = ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn.bert_padding")
    if any(sys.modules.get(name, here) is not here for name in names):
        raise StateError("flash_attn is imported already: call cupyflash.flash_attn.install() before whatever imports it")
    sys.modules.update(dict.fromkeys(names, here))


# --- arguments -------------------------------------------------------------------------------------------------------------------------

_FP8 = "pass 16-bit tensors: fp8 is built for the caches of flash_attn_with_kvcache alone"
# What no function takes but as by default, and what to do instead.
_WAYS_OUT = {
    "dropout_p": "pass 0.0: dropout is not built yet",
    "qv": "scores are the same with qv concatenated to q, and v to k, along the head dimension",
    **dict.fromkeys(("q_descale", "k_descale", "v_descale"), _FP8),
    "attention_chunk": "pass 0: windows are built, by window_size, and chunks are not",
    "num_splits": "pass 0 or 1: keys are split in flash_attn_with_kvcache alone",
    "pack_gqa": "pass None: the heads that share a key head are packed where it is faster",
    "sm_margin": "pass 0: kernels take the whole GPU",
    "scheduler_metadata": "pass None: calls need no plan",
    "cu_seqlens_k_new": "pass the tensor that is cu_seqlens_q: there are as many new tokens as queries",
}


def _refuse(others: dict[str, Any], **named: Any) -> None:
    """An error for the first argument that is unknown, or neither None nor 0 (False, of a number of splits 1)."""
    for name, value in (named | others).items():
        if name not in _WAYS_OUT:
            raise ArgumentError(f"no function of flash_attn 2 or 3 has an argument {name!r} here")
        nothing = isinstance(value, int | float) and name != "pack_gqa" and value in ((0, 1) if name == "num_splits" else (0,))
        if value is not None and not nothing:
            shown = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
            raise UnsupportedError(f"{name} is {shown}, and there is nothing for it", (_WAYS_OUT[name],))


def _options(softmax_scale: float | None, causal: bool, window_size: Window, softcap: float, with_lse: bool) -> dict[str, Any]:
    """Options in cupyflash's words. `(-1, -1)` and a soft cap of 0 or less are none."""
    return {
        "softmax_scale": softmax_scale,
        "causal": bool(causal),
        "window_size": None if window_size in ((-1, -1), [-1, -1]) else window_size,
        "softcap": softcap if softcap and softcap > 0 else None,
        "return_lse": with_lse,
    }


def _unpacked(packed: Tensor, name: str, parts: int, ndim: int) -> Any:
    """The `parts` tensors that lie side by side on the third axis from behind; their gradient is one tensor again."""
    if packed.dim() != ndim or packed.shape[-3] != parts:
        wanted = "(B, S" if ndim == 5 else "(T"
        raise ShapeError(f"{name} has shape {tuple(packed.shape)}: it must be {wanted}, {parts}, H, D)")
    return packed.unbind(-3)


# --- attention -------------------------------------------------------------------------------------------------------------------------


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    **others: Any,
) -> Any:
    """Attention with gradients, softmax(scale * q k^T) v: `cupyflash.attention` under the name and with the arguments of flash_attn.

    Parameters
    ----------
    q : (B, Sq, Hq, D), k : (B, Sk, Hkv, D), v : (B, Sk, Hkv, Dv); float16, bfloat16, float32 or float64, of one dtype and device; Hq a
        multiple of Hkv.
    dropout_p : 0.0.
    softmax_scale : default 1 / sqrt(D).
    causal : the last query sees the last key ("bottom-right").
    window_size : (left, right), inclusive distances from that diagonal; -1 is unlimited.
    softcap : above 0, scores are bounded by ``softcap * tanh(s / softcap)``.
    alibi_slopes : (Hq,) or (B, Hq), float32.
    deterministic : gradients have the same bits in each run, as the result always has; False leaves it to
        torch.use_deterministic_algorithms.
    return_attn_probs : also return the LSE.
    s_aux : (Hq,), float32 or q's dtype: a sink, one more key with this score and no value.
    others : the arguments that FlashAttention-3 adds, as by default: qv, q_descale, k_descale, v_descale, attention_chunk, num_splits,
        pack_gqa, sm_margin.

    Returns
    -------
    out : (B, Sq, Hq, Dv), or (out, softmax_lse, None) with return_attn_probs: softmax_lse is (B, Hq, Sq), float32 (float64 for float64).
    A row that sees no key gives 0 and -inf.

    Raises
    ------
    UnsupportedError : for what is not built. ShapeError, DtypeError, ArgumentError, DeviceError : as `cupyflash.attention`.

    Examples
    --------
    >>> import torch, cupyflash.flash_attn as flash_attn
    >>> q, k, v = torch.randn(3, 2, 16, 4, 32).unbind()
    >>> flash_attn.flash_attn_func(q, k, v, causal=True).shape
    torch.Size([2, 16, 4, 32])
    """
    _refuse(others, dropout_p=dropout_p)
    options = _options(softmax_scale, causal, window_size, softcap, return_attn_probs)
    options["deterministic"] = deterministic or None
    result = attention(q, k, v, alibi_slopes=alibi_slopes, sink=s_aux, **options)
    return (result.out, result.lse, None) if return_attn_probs else result


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Any:
    """`flash_attn_func` of k and v in one tensor (B, Sk, 2, Hkv, D), which is read in place and has one gradient.

    Examples
    --------
    >>> import torch, cupyflash.flash_attn as flash_attn
    >>> flash_attn.flash_attn_kvpacked_func(torch.randn(2, 16, 4, 32), torch.randn(2, 16, 2, 2, 32)).shape
    torch.Size([2, 16, 4, 32])
    """
    return flash_attn_func(q, *_unpacked(kv, "kv", 2, 5), *args, **options)


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, num_heads_q: int | None = None, **options: Any) -> Any:
    """`flash_attn_func` of q, k and v in one tensor, which is read in place and has one gradient.

    qkv is (B, S, 3, H, D) or, with num_heads_q as in FlashAttention-3, (B, S, num_heads_q + 2 Hkv, D).

    Examples
    --------
    >>> import torch, cupyflash.flash_attn as flash_attn
    >>> flash_attn.flash_attn_qkvpacked_func(torch.randn(2, 16, 3, 4, 32), causal=True).shape
    torch.Size([2, 16, 4, 32])
    """
    if num_heads_q is None:
        return flash_attn_func(*_unpacked(qkv, "qkv", 3, 5), *args, **options)
    num_heads_kv, left_over = divmod(qkv.shape[-2] - num_heads_q, 2)
    if qkv.dim() != 4 or left_over or num_heads_kv < 1:
        raise ShapeError(f"qkv has shape {tuple(qkv.shape)}: with num_heads_q={num_heads_q} it must be (B, S, {num_heads_q} + 2 Hkv, D)")
    return flash_attn_func(*qkv.split((num_heads_q, num_heads_kv, num_heads_kv), -2), *args, **options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> Any:
    """Attention with gradients of sequences packed behind one another: `cupyflash.attention_varlen` as flash_attn calls it.

    Parameters
    ----------
    q : (Tq, Hq, D), k : (Tk, Hkv, D), v : (Tk, Hkv, Dv), dtypes as in `flash_attn_func`. With block_table k and v are pages, (num_pages,
        page_size, Hkv, D) and (num_pages, page_size, Hkv, Dv), and there are no gradients.
    cu_seqlens_q, cu_seqlens_k : (B + 1,), int32.
    max_seqlen_q, max_seqlen_k : the longest sequences, which help to choose a kernel.
    block_table : (B, max_pages), int32.
    seqused_q, seqused_k : (B,), int32: of each sequence only so many tokens.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, s_aux, others :
        as in `flash_attn_func`.

    Returns
    -------
    out : (Tq, Hq, Dv), or (out, softmax_lse, None) with return_attn_probs: softmax_lse is (Hq, Tq).

    Raises
    ------
    As `flash_attn_func`.

    Examples
    --------
    >>> import torch, cupyflash.flash_attn as flash_attn
    >>> q, k, v = torch.randn(3, 10, 4, 32).unbind()
    >>> offsets = torch.tensor([0, 3, 10], dtype=torch.int32)
    >>> flash_attn.flash_attn_varlen_func(q, k, v, offsets, offsets, 7, 7, causal=True).shape
    torch.Size([10, 4, 32])
    """
    _refuse(others, dropout_p=dropout_p)
    options = _options(softmax_scale, causal, window_size, softcap, return_attn_probs)
    options |= {
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
        "page_table": block_table,
        "deterministic": deterministic or None,
    }
    options |= {"alibi_slopes": alibi_slopes, "sink": s_aux, "seqused_q": seqused_q, "seqused_k": seqused_k}
    result = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)
    return (result.out, result.lse, None) if return_attn_probs else result


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Any:
    """`flash_attn_varlen_func` of k and v in one tensor (Tk, 2, Hkv, D), which is read in place and has one gradient.

    Examples
    --------
    >>> import torch, cupyflash.flash_attn as flash_attn
    >>> offsets = torch.tensor([0, 3, 10], dtype=torch.int32)
    >>> q, kv = torch.randn(10, 4, 32), torch.randn(10, 2, 2, 32)
    >>> flash_attn.flash_attn_varlen_kvpacked_func(q, kv, offsets, offsets, 7, 7).shape
    torch.Size([10, 4, 32])
    """
    return flash_attn_varlen_func(q, *_unpacked(kv, "kv", 2, 4), *args, **options)


def flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **options: Any) -> Any:
    """`flash_attn_varlen_func` of q, k and v in one tensor (T, 3, H, D), which is read in place and has one gradient.

    Examples
    --------
    >>> import torch, cupyflash.flash_attn as flash_attn
    >>> offsets = torch.tensor([0, 3, 10], dtype=torch.int32)
    >>> flash_attn.flash_attn_varlen_qkvpacked_func(torch.randn(10, 3, 4, 32), offsets, 7).shape
    torch.Size([10, 4, 32])
    """
    offsets = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": max_seqlen, "max_seqlen_k": max_seqlen}
    return flash_attn_varlen_func(*_unpacked(qkv, "qkv", 3, 4), *offsets.values(), *args, **options)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> Any:
    """Attention over a cache, to which new tokens are appended first, in place: `cupyflash.attention_with_kvcache` as flash_attn calls it.

    Parameters
    ----------
    q : (B, Sq, Hq, D), or packed (Tq, Hq, D) with cu_seqlens_q (B + 1,), int32; dtypes as in `flash_attn_func`.
    k_cache, v_cache : (B_cache, Sc, Hkv, D) and (B_cache, Sc, Hkv, Dv), or with block_table (num_pages, page_size, Hkv, D) and (num_pages,
        page_size, Hkv, Dv). Of q's dtype, or float8_e4m3fn or int8 with k_descale and v_descale.
    k, v : (B, Sn, Hkv, D) and (B, Sn, Hkv, Dv): tokens to append.
    rotary_cos, rotary_sin : (positions, rotary_dim / 2): turn q and k, which stand at ``cache_seqlens`` and behind, or at rotary_seqlens
        (B,). There must be as many new tokens as queries and, if there is more than one, a mask: causal or a window.
    cache_seqlens : int, or (B,), int32: how many slots are in use before the call; without k by default all.
    cache_batch_idx, cache_leftpad : (B,), int32: entry of the cache, and slots at its beginning that hold nothing, for each sequence.
    block_table : (B, max_pages), int32, also by its name in FlashAttention-3, page_table.
    rotary_interleaved : pairs are neighbours; else halves.
    num_splits : into how many parts keys are split; 0 leaves it to cupyflash.
    return_softmax_lse : also return the LSE.
    softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux, others : as in `flash_attn_func`.

    Returns
    -------
    out : (B, Sq, Hq, Dv) or (Tq, Hq, Dv), or (out, softmax_lse) with return_softmax_lse: softmax_lse is (B, Hq, Sq) or (Hq, Tq).

    Raises
    ------
    As `flash_attn_func`, before anything is written.

    Examples
    --------
    >>> import torch, cupyflash.flash_attn as flash_attn
    >>> k_cache, v_cache = torch.zeros(2, 2, 64, 2, 32)
    >>> q, k, v = torch.randn(2, 1, 4, 32), torch.randn(2, 1, 2, 32), torch.randn(2, 1, 2, 32)
    >>> flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=17, causal=True).shape
    torch.Size([2, 1, 4, 32])
    >>> bool((k_cache[:, 17] == k[:, 0]).all())
    True
    """
    _refuse(others, cu_seqlens_k_new=None if cu_seqlens_k_new is cu_seqlens_q else cu_seqlens_k_new)
    if block_table is not None and page_table is not None:
        raise ArgumentError("block_table= and page_table= are one argument: give one")
    pages = page_table if block_table is None else block_table
    if cache_seqlens is None:
        if k is not None:
            raise ArgumentError("k= was given without cache_seqlens=, which says where the new tokens go")
        cache_seqlens = k_cache.shape[1] * (1 if pages is None else pages.shape[1])
    if isinstance(cache_seqlens, int):
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    options = _options(softmax_scale, causal, window_size, softcap, return_softmax_lse)
    if rotary_cos is not None or rotary_sin is not None:
        _check_rotary(q, k, bool(causal) or options["window_size"] is not None, cu_seqlens_q is not None)
        options |= {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "rotary_interleaved": rotary_interleaved}
        options["rotary_positions"] = cache_seqlens if rotary_seqlens is None else rotary_seqlens
    options |= {"k_new": k, "v_new": v, "cache_seqlens": cache_seqlens, "cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad}
    options |= {"page_table": pages, "cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q, "num_splits": num_splits or None}
    options |= {"alibi_slopes": alibi_slopes, "sink": s_aux, "k_descale": k_descale, "v_descale": v_descale}
    result = attention_with_kvcache(q, k_cache, v_cache, **options)
    return (result.out, result.lse) if return_softmax_lse else result


def _check_rotary(q: Tensor, k: Tensor | None, masked: bool, packed: bool) -> None:
    """flash_attn turns queries and new keys both from cache_seqlens on and, where nothing is masked, all queries as if at one position."""
    if k is None:
        raise ArgumentError("rotary_cos= was given without k=: flash_attn rotates only with new tokens")
    if not packed and q.shape[1] != k.shape[1]:
        raise UnsupportedError(
            f"rotary_cos with {q.shape[1]} queries and {k.shape[1]} new tokens of a sequence", ("pass as many, or rotate before the call",)
        )
    if not masked and (packed or q.shape[1] != 1):
        raise UnsupportedError(
            "rotary_cos with neither causal nor a window, where flash_attn turns all queries to one position",
            ("pass causal=True, or rotate before the call",),
        )


# --- padding ---------------------------------------------------------------------------------------------------------------------------


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """The rows of x (N, ...) at indices (M,), int64, as (M, ...); differentiable."""
    return x.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Values (M, ...) as rows `indices` (M,), int64, of zeros (first_axis_dim, ...); differentiable."""
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of a padded batch behind one another, as `flash_attn_varlen_func` takes them; differentiable. Waits for the GPU.

    Parameters
    ----------
    hidden_states : (B, S, ...).
    attention_mask : (B, S), bool or int: not 0 is a token, 0 is padding.
    unused_mask : (B, S), bool or int: not 0 is a place that is kept as well, but not in use.

    Returns
    -------
    (tokens, indices, cu_seqlens, max_seqlen, seqused) : (T, ...); (T,), int64, where each was in the flat batch; (B + 1,), int32; the
    longest sequence; (B,), int32, without those not in use.

    Examples
    --------
    >>> import torch, cupyflash.flash_attn as flash_attn
    >>> mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    >>> tokens, indices, cu_seqlens, longest, _ = flash_attn.unpad_input(torch.randn(2, 3, 8), mask)
    >>> indices.tolist(), cu_seqlens.tolist(), longest
    ([0, 1, 4, 5], [0, 2, 4], 2)
    >>> flash_attn.pad_input(tokens, indices, 2, 3).shape
    torch.Size([2, 3, 8])
    """
    used = attention_mask != 0
    kept = used if unused_mask is None else used | (unused_mask != 0)
    lengths = kept.sum(1, dtype=torch.int32)
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)])
    indices = kept.flatten().nonzero().flatten()
    longest = int(lengths.max()) if len(lengths) else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest, used.sum(1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The tokens (T, ...) of `unpad_input` at their places (T,) in (batch, seqlen, ...), zeros elsewhere; differentiable."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
