"""cupyflash as an attention implementation of Hugging Face transformers: `register` once, then ``attn_implementation="cupy_attention"``.

transformers asks twice: a mask function once for each pattern of a forward pass, and the attention function in each layer. What the first
says the second understands by its shape, since models hand it on as it is:

- None: nothing is hidden but by causality and the layer's window, and the last query stands at the last key.
- (B, n) bool: so it is among the first n keys (a static cache has room for more), of which padding is False. If there are fewer keys, a
  cache has dropped the first.
- (n + 1,) int32: rows are n packed sequences behind one another, with these offsets.
- (B or 1, H or 1, Sq, Sk): all that a query may see (bool), or what its scores get added (float): any other pattern.

The first three hold no Sq x Sk array, so they are told whenever the pattern is one of transformers' own; anything else becomes the last.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from cupyflash.errors import ArgumentError, SetupError, UnsupportedError

try:
    import torch
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
    from transformers.masking_utils import sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
except ImportError as e:
    raise SetupError("cupyflash.transformers needs PyTorch and transformers: pip install torch 'transformers>=5.17'") from e
from cupyflash.torch import attention, attention_varlen

if "q_offset" not in inspect.signature(sdpa_mask).parameters:
    raise SetupError(f"transformers {transformers.__version__} is too old: pip install -U 'transformers>=5.17'")

Tensor = Any  # torch.Tensor


def register(name: str = "cupy_attention") -> None:
    """Make `name` an attention implementation of transformers, so that models compute their attention by cupyflash.

    Both of what transformers wants are registered: the attention function, and the mask function, without which models would drop the
    padding. Decoders and encoders, padding on either side, sliding windows, soft caps, sinks (`s_aux`), grouped heads as they are, added
    position biases, dynamic and static caches in `generate`, and packed inputs, by `cu_seq_lens_q` or by restarting `position_ids`. The
    attention is that of `cupyflash.attention` and `cupyflash.attention_varlen`: FlashAttention-2 (Dao, arXiv 2307.08691). Masks of any
    other pattern are computed as for "sdpa", as an array of Sq x Sk.

    Parameters
    ----------
    name : what to pass as `attn_implementation`. It must not contain "flash": transformers takes such a name for one of its own
        implementations and fails at the first model. Registering a name again changes nothing.

    Models then pass q (B, Hq, Sq, D), k (B, Hkv, Sk, D) and v (B, Hkv, Sk, Dv) in float16, bfloat16, float32 or float64, on a GPU or in
    host memory, and get (B, Sq, Hq, Dv) and no attention weights. A row that sees no key, as one of padding, gives 0.

    Raises
    ------
    ArgumentError (a TypeError) : for a name that contains "flash" or that another implementation has.
    SetupError (an ImportError), on import : without PyTorch, or a transformers from 5.17 on.
    Models raise UnsupportedError (a NotImplementedError) : for dropout in training, `output_attentions`, the paged cache of continuous
        batching, and a layer that keeps its window to itself where its keys are more than that.

    Examples
    --------
    >>> import torch, cupyflash.transformers
    >>> from transformers import AutoModelForCausalLM, LlamaConfig
    >>> cupyflash.transformers.register()
    >>> config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    >>> model = AutoModelForCausalLM.from_config(config, attn_implementation="cupy_attention")
    >>> model(torch.tensor([[3, 1, 4, 1, 5]])).logits.shape
    torch.Size([1, 5, 50])
    """
    if "flash" in name:
        raise ArgumentError(f"name={name!r} contains 'flash', which makes transformers look for a package: take one as 'cupy_attention'")
    if name == "eager" or ALL_ATTENTION_FUNCTIONS.get(name, attention_forward) is not attention_forward:
        raise ArgumentError(f"name={name!r} is another implementation's: take one that is free, as 'cupy_attention'")
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)


# --- what is hidden --------------------------------------------------------------------------------------------------------------------


def _code(function: Any) -> CodeType:
    return function.__code__  # type: ignore[no-any-return]


_CAUSAL = masking_utils.causal_mask_function
_ALL = masking_utils.bidirectional_mask_function
# Patterns are closures that transformers' functions make: two that the same function made have the same code.
_WINDOW = _code(masking_utils.sliding_window_overlay(1))
_PACKED = _code(masking_utils.packed_sequence_mask_function(torch.zeros(1, 1)))
_BOTH = _code(masking_utils.and_masks(_CAUSAL))
# Positions restart where a sequence does and go up by one, so inside of a sequence their distances are those of the indices.
_remap = getattr(masking_utils, "remap_positions_for_packed_sequence", None)  # 5.17 has none
_REMAPPED = _remap and _code(_remap(_CAUSAL, torch.zeros(1, 1)))


def _parts(pattern: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """What must all hold for a pattern to: each a function, or the code of one that was made, with what it holds."""
    code = getattr(pattern, "__code__", None)
    if pattern is _CAUSAL or pattern is _ALL or code is None:
        yield pattern, {}
        return
    held = {name: cell.cell_contents for name, cell in zip(code.co_freevars, pattern.__closure__ or (), strict=True)}
    if code is _BOTH:
        for part in held["mask_functions"]:
            yield from _parts(part)
    elif code is _REMAPPED:
        yield from _parts(held["mask_function"])
    else:
        yield code, held


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = _CAUSAL,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **options: Any,
) -> Tensor | None:
    """transformers' mask function: what is said of one pattern to the layers that have it, in the words at the top of this file."""

    def in_full() -> Tensor | None:
        mask: Tensor | None = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            **options,
        )
        return mask

    # Compiled code can read neither closures nor values. A static cache's length is on the device: no step of decoding waits for it.
    if torch.compiler.is_compiling() or (isinstance(q_offset, torch.Tensor) and q_length == 1):
        return in_full()
    parts = dict(_parts(mask_function))
    if parts.keys() == {_ALL} and allow_is_bidirectional_skip:
        used = kv_length
    elif parts.keys() - {_WINDOW} == {_CAUSAL, _PACKED} and attention_mask is None:
        return _offsets(parts[_PACKED]["packed_sequence_mask"])
    elif parts.keys() - {_WINDOW} == {_CAUSAL} and allow_is_causal_skip:
        used = int(q_offset) + q_length - kv_offset  # later keys are hidden from all
    else:
        return in_full()
    end = kv_offset + used
    if not 0 < used <= kv_length or (kv_offset and used < kv_length) or (attention_mask is not None and attention_mask.shape[1] < end):
        return in_full()
    if attention_mask is None or attention_mask[:, kv_offset:end].all():
        if used == kv_length:
            return None
        return torch.ones(1, end, dtype=torch.bool, device=options.get("device")).expand(batch_size, -1)
    return attention_mask[:, :end]  # with the keys that a cache has dropped: `generate` may ask again with what it was told


def _offsets(sequence_of: Tensor) -> Tensor:
    """Where sequences begin, and the end, in rows that follow one another; `sequence_of` (B, S) has a number for each token's sequence."""
    begins = torch.ones_like(sequence_of, dtype=torch.bool)
    begins[:, 1:] = sequence_of[:, 1:] != sequence_of[:, :-1]
    return torch.cat([begins.flatten().nonzero().flatten(), begins.new_full((1,), begins.numel(), dtype=torch.int64)]).int()


# --- the attention ---------------------------------------------------------------------------------------------------------------------

_NOT_GIVEN = -1


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = _NOT_GIVEN,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    position_ids: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: (B, H, S, D) in, (B, S, H, Dv) out, by strides alone."""
    _refuse(dropout, others)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    options: dict[str, Any] = {"softmax_scale": scaling, "softcap": softcap, "sink": s_aux}
    if attention_mask is not None and attention_mask.dim() == 4:
        if attention_mask.dtype == torch.bool:
            options |= {"mask": attention_mask, "bias": position_bias}
        else:
            options["bias"] = attention_mask if position_bias is None else attention_mask + position_bias
        return attention(q, k, v, **options), None

    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    window = _window(module, sliding_window, k.shape[1])
    if window is not None:
        # w keys with the query's own; without causality transformers has its flash implementations see as many on the other side.
        options["window_size"] = (window - 1, 0 if causal else window - 1)
    if attention_mask is not None and attention_mask.dim() == 2:
        n = attention_mask.shape[1]
        k, v = k[:, :n], v[:, :n]
        options["mask"] = attention_mask[:, None, None, -k.shape[1] :]
        return attention(q, k, v, causal=causal, bias=position_bias, **options), None
    if cu_seq_lens_q is None:
        cu_seq_lens_q = _restarts(position_ids, q, k) if attention_mask is None else attention_mask
    if cu_seq_lens_q is None:
        return attention(q, k, v, causal=causal, bias=position_bias, **options), None
    if position_bias is not None:
        raise UnsupportedError("position_bias was given for packed sequences", ("pad them instead",))
    offsets = [None if x is None else x.int() for x in (cu_seq_lens_q, cu_seq_lens_k)]
    hints = {"max_seqlen_q": max_length_q, "max_seqlen_k": max_length_k}
    options |= {name: x for name, x in hints.items() if isinstance(x, int)}
    out = attention_varlen(*(x.flatten(0, 1) for x in (q, k, v)), *offsets, causal=causal, **options)
    return out.unflatten(0, q.shape[:2]), None


def _restarts(position_ids: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Offsets of the sequences of one row, where its positions restart: some models do not tell the mask function of their positions."""
    if position_ids is None or position_ids.dim() != 2 or torch.compiler.is_compiling():
        return None
    if len(q) != 1 or not 1 < q.shape[1] == k.shape[1] == position_ids.shape[1]:
        return None
    if position_ids.is_inference():  # which does not count how often it was written
        return _read_positions.__wrapped__(position_ids, 0)
    return _read_positions(position_ids, position_ids._version)


@functools.lru_cache(maxsize=1)  # each layer gets the same tensor, and reading it waits for the GPU
def _read_positions(position_ids: Tensor, version: int) -> Tensor | None:
    sequence_of = masking_utils.find_packed_sequence_indices(position_ids)
    return None if sequence_of is None else _offsets(sequence_of)


def _refuse(dropout: float, others: dict[str, Any]) -> None:
    if dropout:
        raise UnsupportedError(f"dropout={dropout}: dropout is not built yet", ("set config.attention_dropout = 0.0", "call model.eval()"))
    if others.get("output_attentions"):
        raise UnsupportedError("output_attentions=True: attention weights are never made", ("attn_implementation='eager' makes them",))
    if others.get("block_table") is not None:
        raise UnsupportedError(
            "block_table: the paged cache of continuous batching is not served", ("model.generate has dynamic and static caches",)
        )


def _window(module: Any, sliding_window: int | None, seqlen_k: int) -> int | None:
    """The layer's window, if it hides anything. Some models keep it in their masks alone, and whether this layer has it nobody can tell."""
    if sliding_window != _NOT_GIVEN:
        return sliding_window
    of_model = getattr(getattr(module, "config", None), "sliding_window", None)
    if of_model is not None and of_model < seqlen_k:
        raise UnsupportedError(
            f"{type(module).__name__} does not pass sliding_window= and config.sliding_window={of_model} is less than the {seqlen_k} keys",
            ("set config.sliding_window = None if no layer has a window", "attn_implementation='sdpa' has it in its masks"),
        )
    return None
