"""Models of Hugging Face transformers on a GPU in 16 bits: as near to "eager" in float32 as "eager" in 16 bits is; and `generate`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / "unit")]
cupy = pytest.importorskip("cupy", reason="CuPy is not installed; pip install 'cupyflash[cuda13]'")
torch = pytest.importorskip("torch", reason="PyTorch is not installed; pip install torch")
transformers = pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")

from test_transformers import CACHE, CONFIGS, agree, padded, pair, registered, tokens  # noqa: E402, F401

from cupyflash import launch  # noqa: E402

pytestmark = pytest.mark.gpu
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
# Tiles of head_dim 64, and sequences of several; one expert, since in 16 bits a token may go to another.
SIZES = {"hidden_size": 128, "head_dim": 64, "initializer_range": 0.1, "max_position_embeddings": 512}
OF_MODEL: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 50},
    "gemma2": {"sliding_window": 50},
    "gpt_oss": {"sliding_window": 50, "num_local_experts": 1},
}


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    parameters, launches = launch._parameters, []
    monkeypatch.setattr(launch, "_parameters", lambda *args: (launches.append(1), parameters(*args))[1])
    yield
    assert launches, "no call launched anything: they may have run on the host"


def three(name: str, dtype: str) -> list[Any]:
    """Ours and eager in 16 bits, and eager in float32, all with the weights as rounded to 16."""
    model, eager = (m.cuda().to(DTYPES[dtype]) for m in pair(name, **SIZES, **OF_MODEL.get(name, {})))
    _, wide = pair(name, **SIZES, **OF_MODEL.get(name, {}))
    wide.load_state_dict(model.state_dict())
    return [model, eager, wide.cuda()]


def judged(got: Any, plain: Any, want: Any, factor: float = 2) -> None:
    error, of_eager = ((x.float() - want).abs().max().item() for x in (got, plain))
    limit = factor * of_eager + torch.finfo(got.dtype).eps / 2 * want.abs().max().item()
    assert error <= limit, f"error {error:.3g}, limit {limit:.3g}"  # a NaN is not <= anything


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_logits(name: str, dtype: str) -> None:
    models, ids = three(name, dtype), tokens(3, 200).cuda()
    for mask in (None, padded([200, 70, 131], "left").cuda(), padded([200, 70, 131], "right").cuda()):
        seen = slice(None) if mask is None else mask == 1
        judged(*(m(input_ids=ids, attention_mask=mask).logits[seen] for m in models))


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_packed_sequences(name: str) -> None:
    model, eager, wide = three(name, "bfloat16")
    sequences = [tokens(1, n).cuda() for n in (130, 1, 67)]
    ids = torch.cat(sequences, 1)
    places = torch.cat([torch.arange(x.shape[1], device="cuda") for x in sequences])[None]
    apart = [torch.cat([m(input_ids=x).logits for x in sequences], 1) for m in (eager, wide)]
    judged(model(input_ids=ids, position_ids=places, use_cache=False).logits, *apart)
    offsets = torch.tensor([0, 130, 131, 198], device="cuda")
    lengths = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 130, "max_length_k": 130}
    judged(model(input_ids=ids, position_ids=places, use_cache=False, **lengths).logits, *apart)


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_a_prompt_in_pieces(name: str) -> None:
    models, ids, begin = three(name, "bfloat16"), tokens(2, 131).cuda(), 0
    caches = [transformers.DynamicCache(config=m.config) for m in models]
    for n in (70, 58, 1, 1, 1):
        part = {"input_ids": ids[:, begin : begin + n], "use_cache": True}
        judged(*(m(**part, **{CACHE: cache}).logits for m, cache in zip(models, caches, strict=True)))
        begin += n


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("kind", ["whole", "padded"])
def test_gradients(name: str, kind: str) -> None:
    ids = tokens(2, 131).cuda()
    mask = torch.ones_like(ids) if kind == "whole" else padded([131, 60], "left").cuda()
    grads = []
    for model in three(name, "bfloat16"):
        (model(input_ids=ids, attention_mask=mask, use_cache=False).logits.float() * mask[..., None]).square().mean().backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    for n, want in grads[2].items():
        judged(grads[0][n], grads[1][n], want, factor=3)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@torch.no_grad()
def test_generate_in_float32(name: str, cache: str) -> None:
    """Whose tokens are those of eager, as no two are so near to each other."""
    model, eager = (m.cuda() for m in pair(name, **SIZES | {"initializer_range": 0.3}, **OF_MODEL.get(name, {})))
    mask = padded([60, 20, 41], "left").cuda()
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    got, want = (m.generate(tokens(3, 60).cuda(), **options, return_dict_in_generate=True, output_logits=True) for m in (model, eager))
    assert torch.equal(got.sequences, want.sequences)
    for ours, theirs in zip(got.logits, want.logits, strict=True):
        agree(ours, theirs, 1e-4)


@torch.no_grad()
def test_generate_with_a_compiled_step() -> None:
    """What transformers does by itself over a static cache on a GPU; "aot_eager", which compiles in a second or two."""
    model, eager = (m.cuda() for m in pair("llama", **SIZES | {"initializer_range": 0.3}))
    config = transformers.CompileConfig(backend="aot_eager", mode=None, fullgraph=True)
    options = {"attention_mask": padded([60, 20], "left").cuda(), "max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    got = model.generate(tokens(2, 60).cuda(), **options, compile_config=config)
    assert torch.equal(got, eager.generate(tokens(2, 60).cuda(), **options, disable_compile=True))
