"""cupyflash.torch on a GPU: gradients, compiled code, CUDA graphs, streams, torch's own calls. `PYTHONPATH=. python
tests/gpu/test_torch_gpu.py` prints host times of its ways to a kernel, for bench/NOTES.md."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; pip install torch")

from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import cupyflash  # noqa: E402
import cupyflash.torch as ours  # noqa: E402
from bench.examples import train_gpt  # noqa: E402
from cupyflash.errors import UnsupportedError  # noqa: E402

pytestmark = pytest.mark.gpu

BOUND = {torch.float16: 1e-2, torch.bfloat16: 8e-2, torch.float32: 2e-4}


@pytest.fixture(autouse=True)
def _seed(rng: np.random.Generator) -> None:
    torch.manual_seed(int(rng.integers(2**31)))


def randn(*shape: int, dtype: Any = torch.float16, grad: bool = True) -> Any:
    return torch.randn(shape, dtype=dtype, device="cuda").requires_grad_(grad)


def qkv(dtype: Any = torch.float16, length: int = 200, head_dim: int = 64, grad: bool = True) -> list[Any]:
    return [randn(2, length, heads, head_dim, dtype=dtype, grad=grad) for heads in (4, 2, 2)]


def by_definition(q: Any, k: Any, v: Any, bias: Any = None, sink: Any = None) -> tuple[Any, Any]:
    """(out, lse) of causal attention in float64, whose gradients torch has."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if bias is not None:
        scores = scores + bias.double()
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cuda").triu(1 + scores.shape[-1] - scores.shape[-2])
    scores = scores.masked_fill(hidden, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.double()[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : k.shape[2]] @ v).transpose(1, 2), scores.logsumexp(-1)


def loss(out: Any, lse: Any) -> Any:
    return out.double().sin().sum() + lse.double().cos().sum()


def close(got: Any, want: Any, dtype: Any) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.detach().double(), b.detach().double(), rtol=BOUND[dtype], atol=BOUND[dtype])


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_kf_082_gradients_of_every_tensor(dtype: Any, head_dim: int) -> None:
    tensors = [*qkv(dtype, 130, head_dim), randn(4, 130, 130, dtype=dtype), randn(4, dtype=torch.float32)]
    q, k, v, bias, sink = tensors
    out, lse, _ = cupyflash.attention(q, k, v, causal=True, bias=bias, sink=sink, return_lse=True)
    expected = by_definition(*tensors)
    close((out, lse), expected, dtype)
    close(torch.autograd.grad(loss(out, lse), tensors), torch.autograd.grad(loss(*expected), tensors), dtype)


def test_packed_sequences() -> None:
    q, k, v = randn(300, 4, 64), randn(300, 2, 64), randn(300, 2, 64)
    cuts = torch.tensor([0, 100, 100, 300], dtype=torch.int32, device="cuda")
    out = cupyflash.attention_varlen(q, k, v, cuts, causal=True)
    want = torch.cat([by_definition(*[x[None, rows] for x in (q, k, v)])[0][0] for rows in (slice(0, 100), slice(100, 300))])
    weight = torch.randn_like(want)
    grads = [torch.autograd.grad((x.double() * weight).sum(), (q, k, v)) for x in (out, want)]
    close([out, *grads[0]], [want, *grads[1]], torch.float16)


def test_deterministic_gradients_repeat_themselves() -> None:
    tensors = qkv(length=700)
    runs = [torch.autograd.grad(ours.attention(*tensors, causal=True, deterministic=True).float().sin().sum(), tensors) for _ in range(3)]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def test_nothing_of_size_sq_x_sk_is_kept() -> None:
    tensors = qkv(torch.bfloat16, length=8192)
    ours.attention(*tensors, causal=True).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ours.attention(*tensors, causal=True).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 2 * 4 * 8192 * 8192 // 4  # an eighth of the scores in two bytes


@pytest.mark.filterwarnings("ignore")  # of what inductor imports, and of settings that would be faster
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_compiled_code_computes_the_same(backend: str) -> None:
    def model(q: Any, k: Any, v: Any) -> Any:
        out, lse, _ = cupyflash.attention(q * 1.5, k, v, causal=True, return_lse=True, **options)
        return loss(out, lse)

    options: dict[str, Any] = {} if backend == "inductor" else {"window_size": (50, 0)}
    torch._dynamo.reset()
    fast = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    for length in (200, 130):
        tensors = qkv(torch.float16, length)
        got, want = fast(*tensors), model(*tensors)
        close([got, *torch.autograd.grad(got, tensors)], [want, *torch.autograd.grad(want, tensors)], torch.float16)


@pytest.mark.filterwarnings("ignore")  # of what inductor imports, and of settings that would be faster
def test_compiled_into_a_cuda_graph() -> None:
    torch._dynamo.reset()

    def model(q: Any, k: Any, v: Any) -> Any:
        return ours.attention(q * 1.5, k, v, causal=True, deterministic=True).float().sin().sum()

    fast = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        tensors = qkv()
        torch.compiler.cudagraph_mark_step_begin()
        got = torch.autograd.grad(fast(*tensors), tensors)
        close(got, torch.autograd.grad(model(*tensors), tensors), torch.float16)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # of the step that warmed up on another one
def test_kf_092_a_cuda_graph_of_forward_and_backward() -> None:
    tensors = qkv()

    def step() -> Any:
        out, lse, _ = ours.attention(*tensors, causal=True, return_lse=True, deterministic=True)
        return out, *torch.autograd.grad(out.float().sin().sum() + lse.sum(), tensors)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # loads the kernels
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        with torch.no_grad():
            for x in tensors:
                x.copy_(torch.randn_like(x))
        graph.replay()
        got = [x.clone() for x in captured]
        assert all(torch.equal(a, b) for a, b in zip(got, step(), strict=True))


def test_the_backward_runs_on_the_stream_of_the_forward() -> None:
    tensors, side = qkv(length=1000), torch.cuda.Stream()
    want = torch.autograd.grad(ours.attention(*tensors, causal=True, deterministic=True).float().sin().sum(), tensors)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        total = ours.attention(*tensors, causal=True, deterministic=True).float().sin().sum()
    torch.cuda.current_stream().wait_stream(side)
    got = torch.autograd.grad(total, tensors)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("sample", ["attention", "attention_varlen", "attention_with_kvcache"])
def test_opcheck(sample: str) -> None:
    options = {
        "causal": True,
        "window_size": None,
        "layout": "bshd",
        "kv_layout": "nhd",
        "deterministic": True,
        "rotary_interleaved": False,
    }
    names = ("q", "k", "v") if sample != "attention_with_kvcache" else ("q", "k_cache", "v_cache")
    given = dict(zip(names, qkv(length=70, grad=sample != "attention_with_kvcache"), strict=True))
    if sample == "attention_varlen":
        given = {name: x.detach()[0].requires_grad_() for name, x in given.items()}
        given["cu_seqlens_q"] = torch.tensor([0, 30, 70], dtype=torch.int32, device="cuda")
    if sample == "attention_with_kvcache":
        given["q"] = given["q"][:, :3].contiguous()
        given["cache_seqlens"] = torch.tensor([5, 60], dtype=torch.int32, device="cuda")
        given |= {name: randn(2, 3, 2, 64, grad=False) for name in ("k_new", "v_new")}
    arguments = ours._canonical(options) | given
    operator = getattr(torch.ops.cupyflash, sample).default
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator, tuple([arguments.get(name) for name in ours._ARGUMENTS[sample]]), test_utils=tests)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints(use_reentrant: bool) -> None:
    def block(*tensors: Any) -> Any:
        return ours.attention(*tensors, causal=True, deterministic=True)

    tensors = qkv()
    checkpoint(block, *tensors, use_reentrant=use_reentrant).float().sin().sum().backward()
    want = torch.autograd.grad(block(*tensors).float().sin().sum(), tensors)
    assert all(torch.equal(x.grad, y) for x, y in zip(tensors, want, strict=True))


def test_autocast_casts_as_torchs_own_attention_does() -> None:
    tensors = [randn(2, 4, 100, 64, dtype=torch.float32) for _ in "qkv"]
    with torch.autocast("cuda", torch.bfloat16):
        out = ours.scaled_dot_product_attention(*tensors, is_causal=True)
        with sdpa_kernel(SDPBackend.MATH):
            want = torch_sdpa(*tensors, is_causal=True)
    assert out.dtype == want.dtype == torch.bfloat16
    grads = [torch.autograd.grad(x.float().sin().sum(), tensors) for x in (out, want)]
    assert all(grad.dtype == torch.float32 for grad in grads[0])
    close([out, *grads[0]], [want, *grads[1]], torch.bfloat16)


def test_vmap() -> None:
    tensors = [randn(3, 2, 50, heads, 64, grad=False) for heads in (4, 2, 2)]
    got = torch.vmap(lambda *tensors: cupyflash.attention(*tensors, causal=True))(*tensors)
    assert torch.equal(got, torch.stack([cupyflash.attention(*[x[n] for x in tensors], causal=True) for n in range(3)]))


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(100, 100), (100, 70), (70, 100)])
def test_sdpa_is_torchs(seqlen_q: int, seqlen_k: int) -> None:
    tensors = [randn(2, heads, length, 64) for heads, length in ((4, seqlen_q), (2, seqlen_k), (2, seqlen_k))]
    with sdpa_kernel(SDPBackend.MATH):
        want = torch_sdpa(*[x.float() for x in tensors], is_causal=True, enable_gqa=True)
    got = ours.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
    grads = [torch.autograd.grad(x.float().sin().sum(), tensors) for x in (got, want)]
    close([got, *grads[0]], [want, *grads[1]], torch.float16)


@pytest.mark.filterwarnings("ignore:.*[Oo]verriding a previously registered kernel")  # which is what it is for
def test_torchs_own_calls_after_activate(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        with pytest.raises(UnsupportedError, match="has no hook"):
            ours.activate()
        return
    calls: list[str] = []
    attention, backward = ours.api.attention, ours.backward.attention_backward
    monkeypatch.setattr(ours.api, "attention", lambda *args, **options: calls.append("forward") or attention(*args, **options))
    monkeypatch.setattr(ours.backward, "attention_backward", lambda *args, **o: calls.append("backward") or backward(*args, **o))
    tensors = [randn(2, 4, 100, 64) for _ in "qkv"]

    def step() -> list[Any]:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = torch_sdpa(*tensors, is_causal=True)
        return [out, *torch.autograd.grad(out.float().sin().sum(), tensors)]

    want = step()
    assert not calls
    ours.activate()
    try:
        close(step(), want, torch.float16)
        assert calls == ["forward", "backward"]
    finally:
        ours.deactivate()
    step()
    assert len(calls) == 2


def test_a_small_training_goes_as_with_torchs_own_attention() -> None:
    config = train_gpt.Config(layers=2, heads=4, heads_kv=2, batch=4, length=256)
    flash, math_ = (train_gpt.torchs_attention(backend) for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH))
    mine, first, second = (train_gpt.train(config, x, steps=20, device="cuda") for x in (train_gpt.flash_attention, flash, math_))
    assert mine.losses[-1] < mine.losses[0] - 1
    assert train_gpt.difference(mine, first) < 10 * train_gpt.difference(first, second) + 1e-3
