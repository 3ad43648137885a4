"""Options under the names that other libraries give them: the error of a call that uses one says what it is called here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from cupyflash.arrays import Elsewhere
from cupyflash.errors import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")

_SCALE = "it is called 'softmax_scale'"
_CAP = "it is called 'softcap'"
_WINDOW = "it is called 'window_size', a pair (left, right) of inclusive distances from the diagonal"
_SINK = "it is called 'sink', shape (Hq,)"
_USED = "for padded keys give their lengths as 'seqused_k', or a bool 'mask'"
_LSE = "it is called 'return_lse'"
_MASK = "a bool array is 'mask' (True: may attend), a float one to add is 'bias'"
_CACHED = "caches are what `cupyflash.attention_with_kvcache` takes, and `cupyflash.attention_varlen` keys in pages"
_PACKED = "packed sequences are what `cupyflash.attention_varlen` takes"
_FP8 = "fp8 inputs and their scales are not built yet, but for the caches of `cupyflash.attention_with_kvcache`"

FOREIGN = {
    **dict.fromkeys(("scale", "sm_scale", "attn_scale", "logits_scale", "scaling", "qk_scale"), _SCALE),
    **dict.fromkeys(("is_causal", "causal_mask"), "it is called 'causal' (bottom-right when lengths differ)"),
    **dict.fromkeys(("window", "sliding_window", "local_window_size", "window_left", "window_size_left", "window_right"), _WINDOW),
    **dict.fromkeys(("soft_cap", "logits_soft_cap", "logit_softcapping", "cap"), _CAP),
    **dict.fromkeys(("alibi", "slopes"), "it is called 'alibi_slopes', shape (Hq,) or (B, Hq)"),
    **dict.fromkeys(("attn_mask", "attention_mask", "custom_mask"), _MASK),
    "attn_bias": "it is called 'bias'",
    **dict.fromkeys(("sinks", "s_aux", "learnable_sink", "softmax_offset"), _SINK),
    **dict.fromkeys(("key_padding_mask", "kv_seq_lengths", "key_value_seq_lengths", "cache_seqlens", "kv_len"), _USED),
    "query_seq_lengths": "it is called 'seqused_q', int32 of shape (B,)",
    **dict.fromkeys(("return_softmax_lse", "return_attn_probs", "return_residuals", "need_weights", "softmax_lse"), _LSE),
    **dict.fromkeys(("dropout", "dropout_p", "dropout_rate"), "dropout is not built yet"),
    **dict.fromkeys(("score_mod", "mask_mod", "block_mask"), "functions on scores are not built yet; 'bias' and 'mask' take arrays"),
    **dict.fromkeys(("block_table", "block_tables", "page_table", "k_new", "v_new", "cache_batch_idx", "cache_leftpad"), _CACHED),
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_kv", "cu_seq_q", "cu_seq_k"), _PACKED),
    **dict.fromkeys(("qo_indptr", "kv_indptr", "seqstart_q", "seqstart_k"), _PACKED),
    **dict.fromkeys(("max_seqlen", "max_seqlen_q", "max_seqlen_k", "max_seqlen_kv", "max_q", "max_k"), _PACKED),
    **dict.fromkeys(("descale_q", "descale_k", "descale_v", "q_descale", "k_descale", "v_descale"), _FP8),
    **dict.fromkeys(("enable_gqa", "num_kv_heads"), "grouped heads are read off the shapes of q and k"),
    **dict.fromkeys(("qkv_format", "tensor_layout", "input_layout"), "it is called 'layout': 'bshd', 'bhsd' or 'sbhd'"),
    "qkv": "pass three slices of the packed array: views are not copied",
}

# Where a function takes packed sequences.
_OFFSETS = {
    **dict.fromkeys(("cu_seqlens", "qo_indptr", "cu_seq_q", "seqstart_q"), "it is called 'cu_seqlens_q', int32 of shape (B + 1,)"),
    **dict.fromkeys(("cu_seqlens_kv", "kv_indptr", "cu_seq_k", "seqstart_k"), "it is called 'cu_seqlens_k', int32 of shape (B + 1,)"),
    **dict.fromkeys(("max_seqlen", "max_q"), "it is called 'max_seqlen_q'"),
    **dict.fromkeys(("max_seqlen_kv", "max_k"), "it is called 'max_seqlen_k'"),
}

# Where a function takes keys in pages, and where it takes a cache.
_PAGES = dict.fromkeys(
    ("block_table", "block_tables", "page_table_k", "kv_page_indices"), "it is called 'page_table', int32 of (B, max_pages)"
)
_CACHE = {
    **dict.fromkeys(("cu_seqlens_q", "qo_indptr"), "it is called 'cu_seqlens_q', int32 of shape (B + 1,)"),
    **dict.fromkeys(
        ("seqused_k", "kv_len", "kv_len_arr", "seq_lens", "kv_seq_lengths", "key_value_seq_lengths", "cu_seqlens_k", "kv_indptr"),
        "it is called 'cache_seqlens', int32 of shape (B,), and does not count the new tokens of the call",
    ),
    **dict.fromkeys(("k", "key", "k_append"), "it is called 'k_new'"),
    **dict.fromkeys(("v", "value", "v_append"), "it is called 'v_new'"),
    **dict.fromkeys(("rotary_seqlens", "position_ids", "pos_ids"), "it is called 'rotary_positions', the first of each sequence"),
    **dict.fromkeys(("cos", "sin"), "they are called 'rotary_cos' and 'rotary_sin'"),
    **dict.fromkeys(("leftpad_k", "leftpad"), "it is called 'cache_leftpad', int32 of shape (B,)"),
    **dict.fromkeys(("descale_k", "k_scale", "kv_scale"), "it is called 'k_descale', what numbers of the cache are multiplied by"),
    **dict.fromkeys(("descale_v", "v_scale"), "it is called 'v_descale', what numbers of the cache are multiplied by"),
    **dict.fromkeys(("layout", "qkv_format", "tensor_layout", "input_layout"), "it is called 'kv_layout': 'nhd' or 'hnd'"),
    **dict.fromkeys(("bias", "attn_bias"), "scores over a cache take 'mask', 'alibi_slopes' and 'softcap', and no bias"),
    **dict.fromkeys(("scheduler_metadata", "tile_scheduler_metadata"), "it is called 'plan', of `cupyflash.plan_decode`"),
    "fixed_split_size": "it is called 'split_size', in keys",
}

_NO_GRID = "packed sequences have no common Sq x Sk for it; pad them for `cupyflash.attention`"
_NO_ORDER = "packed arrays are (T, H, D); their strides are free, so a view with the axes in that order is read in place"

# What the functions of cupyflash.jax do not take.
_XLA = {
    "out": "JAX arrays cannot be written: use the returned one",
    "stream": "calls run on the stream that XLA gives them",
}

# What has no meaning there.
_NOT_PACKED = {
    **dict.fromkeys(("mask", "attn_mask", "attention_mask", "custom_mask"), f"{_NO_GRID} (mask_mod is not built yet)"),
    **dict.fromkeys(("bias", "attn_bias"), f"{_NO_GRID} (score_mod is not built yet)"),
    **dict.fromkeys(("layout", "qkv_format", "tensor_layout", "input_layout"), _NO_ORDER),
    **dict.fromkeys(("score_mod", "mask_mod", "block_mask"), "functions on scores are not built yet"),
    **{name: "'seqused_k' says how many keys of each sequence are in use" for name, hint in FOREIGN.items() if hint is _USED},
}


def refuse_unpacked(**options: Any) -> None:
    """ArgumentError for an option of `attention` that means nothing where sequences are packed, unless it is None or as by default."""
    for name, option in options.items():
        if option is not None and not (name == "layout" and option == "bshd"):
            raise ArgumentError(f"{name}= was given for packed sequences: {_NOT_PACKED[name]}")


def entry(function: Callable[P, R]) -> Callable[P, R]:
    """How calls come in: unknown keywords are refused with the name that the option has here, and a call with arrays that a framework has
    to see used is that framework's module's. The signature stays the function's own.

    That takes a wrapper, and 0.2 us of each call. A function for which this is much takes `**unknown: NoReturn`, does both itself
    (`foreign_keyword`, `Elsewhere.land`), and is given back as it is, without that parameter in its signature.
    """
    if function.__code__.co_flags & inspect.CO_VARKEYWORDS:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        function.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
        return function

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Elsewhere as e:
            elsewhere = e
        except TypeError:
            if inspect.signature(function).parameters.keys() >= kwargs.keys():  # found here alone: 0.3 ms of an import each
                raise
            raise foreign_keyword(function, kwargs) from None
        return elsewhere.land(function, args, kwargs)  # type: ignore[no-any-return]

    return checked


def foreign_keyword(function: Callable[..., Any], keywords: Mapping[str, Any]) -> ArgumentError:
    """The error for the first of the keywords that the function does not take."""
    parameters = inspect.signature(function).parameters.values()
    known = [p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY]
    unknown = next(name for name in keywords if name not in known)
    import difflib

    close = difflib.get_close_matches(unknown, known, n=1)
    meanings = FOREIGN | (_OFFSETS if "cu_seqlens_q" in known else {}) | (_PAGES if "page_table" in known else {})
    meanings |= _NOT_PACKED if function.__name__ == "attention_varlen" else _CACHE if "cache_seqlens" in known else {}
    meanings |= _XLA if function.__module__ == "cupyflash.jax" else {}
    hint = meanings.get(unknown) or (f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(sorted(known))}")
    return ArgumentError(f"{function.__name__}() has no argument {unknown!r}; {hint}")
