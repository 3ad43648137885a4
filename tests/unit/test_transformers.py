"""`cupyflash.transformers` in models of Hugging Face transformers, made from configs: they compute what "eager" has them compute."""

from __future__ import annotations

import doctest
import inspect
import runpy
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

NO_TRANSFORMERS = "transformers is not installed; pip install transformers"
torch = pytest.importorskip("torch", reason="PyTorch is not installed; pip install torch")
transformers = pytest.importorskip("transformers", reason=NO_TRANSFORMERS)

from transformers import AttentionInterface, AutoModel, AutoModelForCausalLM, DynamicCache, masking_utils  # noqa: E402

import cupyflash.transformers as ours  # noqa: E402
from cupyflash import ArgumentError, SetupError, UnsupportedError  # noqa: E402

NAME = "cupy_attention"
SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
WINDOW = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 6}),
    "gemma2": ("Gemma2Config", WINDOW | {"attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 9, "final_logit_softcapping": None}),
    "gpt_oss": ("GptOssConfig", WINDOW | {"num_local_experts": 2, "num_experts_per_tok": 1}),
}
# What models call their cache, which was past_key_values before 5.24.
CACHE = "cache" if "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters else "past_key_values"
BOUND = 3e-5  # of float32, absolute and relative at once; both sides round


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    ours.register(NAME)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices of 64: beside other processes a second thread costs ten times what it saves
    yield
    torch.set_num_threads(threads)
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        interface._global_mapping.pop(NAME)


def pair(name: str, **changes: Any) -> tuple[Any, Any]:
    """The same random model twice: with attention by cupyflash, and by transformers' own formula."""
    config_name, options = CONFIGS[name]
    return both(AutoModelForCausalLM, getattr(transformers, config_name), {**SHAPE, **options, **changes})


def both(auto: Any, config: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    torch.manual_seed(7)
    model, eager = (auto.from_config(config(**options), attn_implementation=which).eval() for which in (NAME, "eager"))
    eager.load_state_dict(model.state_dict())
    assert (model.config._attn_implementation, eager.config._attn_implementation) == (NAME, "eager")
    return model, eager


def tokens(batch: int, seqlen: int) -> Any:
    return torch.randint(2, 97, (batch, seqlen), generator=torch.Generator().manual_seed(batch * seqlen))


def padded(lengths: list[int], side: str) -> Any:
    """(B, S), 1 where there is a token."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return (mask.flip(1) if side == "left" else mask).long()


def agree(got: Any, want: Any, bound: float = BOUND) -> None:
    worst = ((got - want).abs() / (1 + want.abs())).max().item()
    assert worst <= bound, f"largest error {worst:.3g}, allowed {bound:.3g}"  # a NaN is not <= anything


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("side", ["none", "left", "right"])
@torch.no_grad()
def test_logits_are_those_of_eager(name: str, side: str) -> None:
    model, eager = pair(name)
    ids = tokens(3, 19)
    mask = torch.ones_like(ids) if side == "none" else padded([19, 4, 11], side)
    got, want = (m(input_ids=ids, attention_mask=mask).logits for m in (model, eager))
    agree(got[mask == 1], want[mask == 1])
    if side == "left":
        with pytest.raises(AssertionError):  # the bound would see a padding that is dropped
            agree(eager(input_ids=ids).logits[mask == 1], want[mask == 1], 100 * BOUND)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@torch.no_grad()
def test_generate_is_that_of_eager(name: str, cache: str) -> None:
    """A static cache has more slots than are in use; a window of 6 is passed while prompts are read and while tokens are made."""
    model, eager = pair(name)
    mask = padded([9, 3, 5], "left")
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "cache_implementation": cache}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    got, want = (m.generate(tokens(3, 9), **options) for m in (model, eager))
    assert torch.equal(got.sequences, want.sequences)
    for ours_, theirs in zip(got.logits, want.logits, strict=True):
        agree(ours_, theirs)


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@torch.no_grad()
def test_generate_from_a_prompt_in_pieces(name: str, cache: str) -> None:
    """Pieces of 8 tokens are longer than the window, so caches have dropped keys; padding reaches into the last piece."""
    model, eager = pair(name)
    options = {"attention_mask": padded([27, 2, 11], "left"), "max_new_tokens": 3, "do_sample": False, "cache_implementation": cache}
    options |= {"prefill_chunk_size": 8, "return_dict_in_generate": True, "output_logits": True}
    got, want = (m.generate(tokens(3, 27), **options) for m in (model, eager))
    assert torch.equal(got.sequences, want.sequences)
    for ours_, theirs in zip(got.logits, want.logits, strict=True):
        agree(ours_, theirs)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("pieces", [(7, 5, 1, 4), (3, 12)])
@torch.no_grad()
def test_a_prompt_in_pieces_stands_at_the_last_key(name: str, pieces: tuple[int, ...]) -> None:
    """Queries after cached keys: causal from the bottom-right corner."""
    model, eager = pair(name)
    ids, begin = tokens(2, sum(pieces)), 0
    caches = [DynamicCache(config=m.config) for m in (model, eager)]
    whole = eager(input_ids=ids).logits
    for n in pieces:
        part = ids[:, begin : begin + n]
        got, want = (m(**{"input_ids": part, CACHE: c, "use_cache": True}).logits for m, c in zip((model, eager), caches, strict=True))
        agree(got, want)
        agree(got, whole[:, begin : begin + n])
        begin += n


LENGTHS = [5, 1, 9, 2]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("told_by", ["position_ids", "cu_seq_lens"])
@torch.no_grad()
def test_packed_sequences_do_not_see_each_other(name: str, told_by: str) -> None:
    model, eager = pair(name)
    sequences = [tokens(1, n) for n in LENGTHS]
    given = {"input_ids": torch.cat(sequences, 1), "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None]}
    if told_by == "cu_seq_lens":
        offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
        given |= {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 9, "max_length_k": 9}
    want = torch.cat([eager(input_ids=ids).logits for ids in sequences], 1)
    agree(model(**given, use_cache=False).logits, want)
    with pytest.raises(AssertionError):
        agree(eager(input_ids=given["input_ids"]).logits, want, 100 * BOUND)


def test_positions_are_read_again_where_they_were_written() -> None:
    """Each layer gets the same tensor, so what was read of it is kept; a later call may find other numbers in it."""
    model, _ = pair("gpt_oss")
    ids, places = tokens(1, 9), torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]])
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            places = places.clone()
            packed = model(input_ids=ids, position_ids=places, use_cache=False).logits
            places[:] = torch.arange(9)
            agree(model(input_ids=ids, position_ids=places, use_cache=False).logits, model(input_ids=ids, use_cache=False).logits)
            places[0, 3:] = torch.arange(6)
            agree(model(input_ids=ids, position_ids=places, use_cache=False).logits, packed)


@torch.no_grad()
def test_packed_rows_of_a_batch() -> None:
    """Both rows hold several sequences: a row begins a sequence, too."""
    model, eager = pair("llama")
    given = {"input_ids": tokens(2, 9), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5], [0, 0, 1, 2, 3, 0, 1, 0, 1]])}
    agree(model(**given, use_cache=False).logits, eager(**given, use_cache=False).logits)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", ["whole", "padded", "packed"])
def test_training_has_the_gradients_of_eager(name: str, kind: str) -> None:
    """Of every parameter, sinks among them; through masks, lengths and offsets."""
    ids = tokens(1 if kind == "packed" else 2, 17)
    given: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if kind == "padded":
        given["attention_mask"] = padded([17, 6], "right")
    weights = given.get("attention_mask", torch.ones_like(ids))[..., None]
    apart = [{**given, "input_ids": part} for part in ids.split((8, 9), 1)] if kind == "packed" else [given]
    if kind == "packed":
        given = {**given, "position_ids": torch.tensor([[*range(8), *range(9)]])}
    grads = []
    for model, calls in zip(pair(name), ([given], apart), strict=True):
        logits = torch.cat([model.train()(**call).logits for call in calls], 1)
        (logits * weights).square().mean().backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    assert name != "gpt_oss" or any(n.endswith("sinks") and g.abs().max() > 0 for n, g in grads[0].items())
    for n, want in grads[1].items():
        size = want.abs().max() or 1  # none reaches an expert that no token went to
        agree(grads[0][n] / size, want / size, 10 * BOUND)


@torch.no_grad()
def test_encoders_see_both_sides() -> None:
    options = {**SHAPE, "hidden_size": 32, "num_attention_heads": 2}
    options = {name: x for name, x in options.items() if name not in ("head_dim", "num_key_value_heads")}
    models = both(AutoModel, transformers.BertConfig, options)
    for mask in (None, padded([13, 5], "right"), padded([13, 5], "left")):
        got, want = (m(input_ids=tokens(2, 13), attention_mask=mask).last_hidden_state for m in models)
        seen = slice(None) if mask is None else mask == 1
        agree(got[seen], want[seen])


@torch.no_grad()
def test_a_mask_of_ones_own_is_taken_as_it_is() -> None:
    """4-D masks: bool hides, float is added. A prefix that all tokens see is no pattern of a decoder's."""
    model, eager = pair("llama")
    ids = tokens(2, 11)
    allowed = torch.ones(11, 11).tril().bool()
    allowed[:, :4] = True
    added = torch.zeros(11, 11).masked_fill(~allowed, torch.finfo(torch.float32).min)[None, None].expand(2, 1, -1, -1)
    want = eager(input_ids=ids, attention_mask=added).logits
    agree(model(input_ids=ids, attention_mask=allowed[None, None].expand(2, 1, -1, -1)).logits, want)
    agree(model(input_ids=ids, attention_mask=added).logits, want)


# --- the mask function -----------------------------------------------------------------------------------------------------------------


def told(pattern: Any = masking_utils.causal_mask_function, q_length: int = 5, kv_length: int = 5, **options: Any) -> Any:
    return ours.attention_mask(2, q_length, kv_length, mask_function=pattern, **options)


SLIDING = masking_utils.sliding_window_causal_mask_function(3)
CHUNKED = masking_utils.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("pattern", [masking_utils.causal_mask_function, SLIDING])
def test_no_mask_is_made_where_nothing_is_padded(pattern: Any) -> None:
    assert told(pattern) is None
    assert told(pattern, attention_mask=torch.ones(2, 5, dtype=torch.bool)) is None
    assert told(pattern, q_length=2, q_offset=3) is None
    assert told(pattern, q_length=1, q_offset=4) is None
    assert told(pattern, q_length=2, q_offset=9, kv_offset=6) is None  # a cache that has dropped six keys


@pytest.mark.parametrize("pattern", [masking_utils.causal_mask_function, SLIDING])
def test_padding_and_unused_slots_are_told_without_an_array_of_rows_and_keys(pattern: Any) -> None:
    left = padded([5, 2], "left").bool()
    assert torch.equal(told(pattern, attention_mask=left), left)
    dropped = {"q_length": 2, "kv_length": 3, "q_offset": 3, "kv_offset": 2}
    assert told(pattern, **dropped, attention_mask=padded([5, 4], "left").bool()) is None
    assert torch.equal(told(pattern, **dropped, attention_mask=left), left)
    assert told(pattern, **{**dropped, "kv_length": 4}, attention_mask=left).shape == (2, 1, 2, 4)
    slots = told(pattern, kv_length=12, q_offset=torch.tensor(0), attention_mask=left)
    assert torch.equal(slots, left)
    slots = told(pattern, kv_length=12, q_offset=torch.tensor(2))
    assert slots.shape == (2, 7)
    assert slots.all()
    assert torch.equal(told(pattern, kv_length=12, q_offset=2, attention_mask=slots), slots)  # generate asks twice


@pytest.mark.parametrize(
    ("pattern", "options"),
    [
        (CHUNKED, {}),
        (masking_utils.or_masks(masking_utils.causal_mask_function, lambda b, h, q, kv: kv == 4), {"use_vmap": True}),
        (masking_utils.sliding_window_bidirectional_mask_function(1), {"allow_is_causal_skip": False}),
        (masking_utils.bidirectional_mask_function, {"allow_is_causal_skip": False}),
        (masking_utils.causal_mask_function, {"allow_is_causal_skip": False}),
        (SLIDING, {"q_length": 1, "q_offset": torch.tensor(2)}),  # a step over a static cache, whose length is not waited for
        (SLIDING, {"q_length": 3, "q_offset": 4}),  # queries past the last key
    ],
)
def test_any_other_pattern_is_a_mask_in_full(pattern: Any, options: dict[str, Any]) -> None:
    arguments = {"q_length": 5, "kv_length": 5, **options}
    want = masking_utils.sdpa_mask(2, mask_function=pattern, **arguments | {"allow_is_causal_skip": False})
    got = told(pattern, **options)
    assert got.shape == (2, 1, arguments["q_length"], 5)
    assert torch.equal(got, want)


def test_packed_patterns_become_offsets() -> None:
    sequence_of = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 2, 2, 2]])
    for pattern in (masking_utils.causal_mask_function, SLIDING):
        packed = masking_utils.and_masks(pattern, masking_utils.packed_sequence_mask_function(sequence_of))
        got = told(packed, allow_is_causal_skip=False)
        assert got.dtype == torch.int32
        assert got.tolist() == [0, 2, 5, 6, 7, 10]


# --- errors ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cupyflash", "flash_attention_2", "my_flash"])
def test_a_name_that_transformers_takes_for_its_own_is_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match="contains 'flash'"):
        ours.register(name)


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_a_name_of_another_implementation_is_refused(name: str) -> None:
    before = AttentionInterface().get(name)
    with pytest.raises(ArgumentError, match="another implementation's"):
        ours.register(name)
    assert AttentionInterface().get(name) is before


def test_registering_again_changes_nothing() -> None:
    ours.register(NAME)
    assert AttentionInterface()[NAME] is ours.attention_forward


def test_dropout_is_refused_in_training_alone() -> None:
    model, _ = pair("llama", attention_dropout=0.1)
    model(input_ids=tokens(1, 3))
    with pytest.raises(UnsupportedError, match=r"dropout=0\.1: dropout is not built yet; set config\.attention_dropout = 0\.0"):
        model.train()(input_ids=tokens(1, 3))


def layer(**config: Any) -> Any:
    module = torch.nn.Module()
    module.is_causal, module.config = True, transformers.PretrainedConfig(**config)
    return module


def test_what_is_not_built_is_refused() -> None:
    q = torch.ones(1, 2, 5, 8)
    for options, message in (
        ({"output_attentions": True}, "attention weights are never made"),
        ({"block_table": torch.zeros(1)}, "paged cache of continuous batching"),
        ({"position_bias": torch.zeros(1, 2, 5, 5), "cu_seq_lens_q": torch.tensor([0, 5])}, "position_bias was given for packed sequences"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            ours.attention_forward(layer(), q, q, q, None, **options)


def test_a_window_that_a_layer_keeps_to_itself_is_not_dropped() -> None:
    q = torch.ones(1, 2, 5, 8)
    with pytest.raises(UnsupportedError, match=r"does not pass sliding_window= and config\.sliding_window=4 is less than the 5 keys"):
        ours.attention_forward(layer(sliding_window=4), q, q, q, None)
    ours.attention_forward(layer(sliding_window=5), q, q, q, None)
    ours.attention_forward(layer(sliding_window=4), q, q, q, None, sliding_window=None)
    ours.attention_forward(layer(sliding_window=4), q, q, q, torch.ones(1, 1, 5, 5, dtype=torch.bool))


def test_results_are_stored_as_models_read_them() -> None:
    """(B, S, H, D) without a copy, of queries that were projected so and turned."""
    x = torch.randn(2, 7, 4, 16)
    out, weights = ours.attention_forward(layer(), *(x.transpose(1, 2),) * 3, None)
    assert out.shape == (2, 7, 4, 16)
    assert out.is_contiguous()
    assert weights is None


@torch.no_grad()
def test_position_biases_are_added() -> None:
    q, k, v = torch.randn(3, 2, 4, 6, 8, dtype=torch.float64).unbind()
    bias = torch.randn(1, 4, 6, 6, dtype=torch.float64)
    seen = torch.rand(2, 1, 6, 6) > 0.3
    seen |= torch.eye(6, dtype=torch.bool)
    scores = q @ k.transpose(2, 3) / 8**0.5 + bias
    for mask, hidden in (
        (None, torch.ones(6, 6, dtype=torch.bool).triu(1)),
        (seen, ~seen),
        (torch.zeros(6, 6, dtype=torch.float64).masked_fill(~seen, -torch.inf), ~seen),
    ):
        want = (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(1, 2)
        torch.testing.assert_close(ours.attention_forward(layer(), q, k, v, mask, position_bias=bias)[0], want, rtol=1e-12, atol=1e-12)


def test_without_transformers_the_error_says_what_to_install() -> None:
    code = "import sys; sys.modules['transformers'] = None\n"
    code += "try: import cupyflash.transformers\nexcept Exception as e: print(type(e).__name__, e)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == "SetupError cupyflash.transformers needs PyTorch and transformers: pip install torch 'transformers>=5.17'\n"


def test_a_transformers_that_asks_otherwise_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda cache_position: None)
    with pytest.raises(SetupError, match=r"is too old: pip install -U 'transformers>=5\.17'"):
        runpy.run_path(ours.__file__)


def test_examples_of_the_docstrings() -> None:
    assert doctest.testmod(ours).failed == 0
