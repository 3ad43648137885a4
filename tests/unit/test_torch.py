"""cupyflash.torch on the CPU: gradients, operators in compiled and exported code, torch.func, SDPA's signature and the hook behind it."""

from __future__ import annotations

import doctest
import functools
import inspect
import itertools
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; pip install torch")

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa  # noqa: E402
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import cupyflash  # noqa: E402
import cupyflash.torch as ours  # noqa: E402
from cupyflash.errors import ArgumentError, DtypeError, ShapeError, UnsupportedError  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
Tensors = list[Any]


@pytest.fixture(autouse=True)
def _fresh(rng: np.random.Generator) -> Iterator[None]:
    torch.manual_seed(int(rng.integers(2**31)))
    torch._dynamo.reset()
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # idle threads of torch wait by spinning
    yield
    torch.set_num_threads(before)


def randn(*shape: int, dtype: Any = torch.float64, grad: bool = True) -> Any:
    return torch.randn(shape, dtype=dtype).requires_grad_(grad)


def qkv(dtype: Any = torch.float64, grad: bool = True, batch: int = 2, seqlen_q: int = 5, seqlen_k: int = 7) -> Tensors:
    return [randn(batch, *shape, dtype=dtype, grad=grad) for shape in ((seqlen_q, 4, 8), (seqlen_k, 2, 8), (seqlen_k, 2, 6))]


def offsets(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32)


def by_definition(
    q: Any, k: Any, v: Any, bias: Any = None, mask: Any = None, alibi_slopes: Any = None, sink: Any = None, softcap: float | None = None
) -> tuple[Any, Any]:
    """(out, lse) of causal attention in bshd from the formula, in torch, whose autograd has every gradient of it."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None] - (k.shape[2] - q.shape[2])
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double().reshape(-1, q.shape[1], 1, 1) * distance.abs()
    if bias is not None:
        scores = scores + bias.double()
    scores = scores.masked_fill(distance > 0, -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.double()[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return (weights @ v).transpose(1, 2), scores.logsumexp(-1)


def loss(out: Any, lse: Any) -> Any:
    return (out.double().sin() * 1.5).sum() + lse.double().cos().sum()


def same(got: Any, want: Any, bound: float = 0) -> None:
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a.detach(), b.detach().to(a.dtype), rtol=bound, atol=bound)


# --- gradients ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("function", [cupyflash.attention, ours.attention], ids=["cupyflash", "cupyflash.torch"])
def test_kf_082_gradients_of_every_tensor(function: Callable[..., Any], dtype: Any) -> None:
    tensors = [*qkv(dtype), randn(4, 5, 7, dtype=dtype), randn(4, dtype=dtype), (torch.rand(4) + 0.1).requires_grad_()]
    q, k, v, bias, sink, slopes = tensors
    out, lse, _ = function(q, k, v, causal=True, bias=bias, sink=sink, alibi_slopes=slopes, softcap=3.0, return_lse=True)
    assert (out.dtype, lse.dtype) == (dtype, torch.float64 if dtype == torch.float64 else torch.float32)
    grads = torch.autograd.grad(loss(out, lse), tensors)
    expected = by_definition(q, k, v, bias, None, slopes, sink, 3.0)
    bound = {torch.float16: 8e-3, torch.bfloat16: 6e-2, torch.float32: 2e-5, torch.float64: 1e-12}[dtype]
    same((out, lse), expected, bound)
    same(grads, torch.autograd.grad(loss(*expected), tensors), max(bound, 2e-5 if dtype != torch.float64 else 1e-6))
    assert [grad.dtype for grad in grads] == [x.dtype for x in tensors]


def test_gradcheck() -> None:
    bias, sink, slopes = randn(2, 1, 5, 7), randn(4), torch.rand(4)

    def function(*tensors: Any) -> Any:
        q, k, v, bias, sink = tensors
        return ours.attention(q, k, v, bias=bias, sink=sink, alibi_slopes=slopes, window_size=(4, 1), return_lse=True)[:2]

    assert torch.autograd.gradcheck(function, (*qkv(), bias, sink))


def test_gradcheck_of_alibi_slopes() -> None:
    """They are float32, so their differences are not: a line through (q, k, v) fixed, from the definition."""
    q, k, v = qkv(grad=False)
    slopes = torch.rand(2, 4).requires_grad_()
    (grad,) = torch.autograd.grad(loss(*ours.attention(q, k, v, causal=True, alibi_slopes=slopes, return_lse=True)[:2]), slopes)
    wide = slopes.detach().double().requires_grad_()
    assert torch.autograd.gradcheck(lambda slopes: loss(*by_definition(q, k, v, alibi_slopes=slopes)), wide)
    same([grad], torch.autograd.grad(loss(*by_definition(q, k, v, alibi_slopes=wide)), wide), 1e-5)


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd"])
def test_gradcheck_of_layouts(layout: str) -> None:
    order = ["bshd".index(letter) for letter in layout]
    tensors = [x.detach().permute(order).contiguous().requires_grad_() for x in qkv()]
    assert torch.autograd.gradcheck(lambda *qkv: ours.attention(*qkv, causal="top_left", layout=layout), tensors)


def test_gradcheck_without_a_batch_axis() -> None:
    assert torch.autograd.gradcheck(lambda q, k, v: ours.attention(q[0], k[0], v[0], causal=True, return_lse=True)[:2], tuple(qkv(batch=1)))


def test_gradcheck_of_packed_sequences() -> None:
    q, k, v = randn(6, 4, 8), randn(9, 2, 8), randn(9, 2, 8)
    sink, used = randn(4), offsets(3, 0, 4)

    def function(q: Any, k: Any, v: Any, sink: Any) -> Any:
        options = {"sink": sink, "causal": True, "seqused_k": used, "max_seqlen_q": 3, "max_seqlen_k": 5, "return_lse": True}
        return ours.attention_varlen(q, k, v, offsets(0, 3, 3, 6), offsets(0, 4, 5, 9), **options)[:2]

    assert torch.autograd.gradcheck(function, (q, k, v, sink))
    packed, _ = function(q, k, v, sink)
    alone = by_definition(q[None, :3], k[None, :3], v[None, :3], sink=sink)[0][0]
    same([packed[:3]], [alone], 1e-12)


def test_kf_082_packed_tensors_land_there_too() -> None:
    q, k, v = randn(6, 4, 8), randn(6, 2, 8), randn(6, 2, 8)
    cupyflash.attention_varlen(q, k, v, offsets(0, 2, 6), causal=True).sum().backward()
    twin = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    sum(by_definition(*[x[None, rows] for x in twin])[0].sum() for rows in (slice(0, 2), slice(2, 6))).backward()
    same([x.grad for x in (q, k, v)], [x.grad for x in twin], 1e-12)


@pytest.mark.parametrize("of", ["out", "lse", "both"])
def test_a_gradient_through_the_lse_is_never_dropped(of: str) -> None:
    tensors = qkv()
    result = ours.attention(*tensors, causal=True, return_lse=True)[:2]
    expected = by_definition(*tensors)
    terms: dict[str, Callable[..., Any]] = {"out": lambda out, _: out.sum(), "lse": lambda _, lse: lse.sum(), "both": loss}
    got = torch.autograd.grad(terms[of](*result), tensors, allow_unused=True)
    want = torch.autograd.grad(terms[of](*expected), tensors, allow_unused=True, materialize_grads=True)
    same(got, want, 1e-12)


def test_only_what_is_asked_for_is_computed_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    backward = ours.backward.attention_backward
    monkeypatch.setattr(
        ours.backward, "attention_backward", lambda *args, **options: asked.append(options["wrt"]) or backward(*args, **options)
    )
    q, k, v = qkv()
    kept: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = ours.attention(q, k.detach(), v, causal=True)
    assert sorted(map(len, map(list, (x.shape for x in kept)))) == [3, 4, 4, 4, 4]  # lse and q, k, v, out
    out.sum().backward()
    assert asked == [("q", "v")]
    assert q.grad is not None
    assert k.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_gradients_nothing_is_recorded(dtype: Any) -> None:
    q, k, v = qkv(dtype)
    with torch.no_grad():
        out = ours.attention(q, k, v, causal=True)
        target = torch.empty_like(out)
        assert ours.attention(q, k, v, causal=True, out=target) is target
    assert torch.equal(out, target)
    assert (out.requires_grad, ours.attention(q, k, v, causal=True).requires_grad) == (False, True)
    assert torch.equal(out, ours.attention(q.detach(), k.detach(), v.detach(), causal=True))


@pytest.mark.parametrize(
    ("enabled", "option", "expected"), [(False, None, False), (True, None, True), (True, False, False), (False, True, True)]
)
def test_deterministic(monkeypatch: pytest.MonkeyPatch, enabled: bool, option: bool | None, expected: bool) -> None:
    asked: list[bool] = []
    backward = ours.backward.attention_backward
    monkeypatch.setattr(
        ours.backward, "attention_backward", lambda *args, **options: asked.append(options["deterministic"]) or backward(*args, **options)
    )
    torch.use_deterministic_algorithms(enabled)
    try:
        result = ours.attention(*qkv(), deterministic=option)
    finally:
        torch.use_deterministic_algorithms(False)
    result.sum().backward()
    assert asked == [expected]


def test_numpy_vectors_and_parameters() -> None:
    q, k, v = qkv()
    used = np.array([3, 7], np.int32)
    out = ours.attention(torch.nn.Parameter(q.detach()), k, v, causal=True, seqused_k=used)
    assert out.requires_grad
    assert torch.equal(out, ours.attention(q, k, v, causal=True, seqused_k=torch.from_numpy(used)))


def test_hooks_and_later_writes() -> None:
    q, k, v = qkv()
    out = ours.attention(q, k, v * 1)
    grad: list[Any] = []
    k.register_hook(grad.append)
    out.sum().backward(retain_graph=True)
    assert torch.equal(grad[0], k.grad)
    with torch.no_grad():
        k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_second_derivatives_are_refused() -> None:
    q, k, v = qkv()
    (grad,) = torch.autograd.grad(ours.attention(q, k, v).sum(), q, create_graph=True)  # which nothing has to use
    same([grad], torch.autograd.grad(ours.attention(q, k, v).sum(), q))
    with pytest.raises(UnsupportedError, match=r"differentiated again: second derivatives are not built; .*SDPBackend\.MATH"):
        torch.autograd.gradgradcheck(ours.attention, (q, k, v))


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # which torch's own forward mode says
def test_forward_mode_is_refused() -> None:
    q, k, v = qkv(grad=False)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(UnsupportedError, match="a tensor has a tangent: forward-mode derivatives are not built"):
            ours.attention(dual, k, v)
        assert torch.equal(ours.attention(q, k, v), cupyflash.attention(q, k, v))


# --- refusals ----------------------------------------------------------------------------------------------------------------------------


def test_what_has_no_gradient_says_so() -> None:
    q, k, v = qkv()
    for name, option in (("out", torch.empty(2, 5, 4, 6, dtype=q.dtype)), ("stream", 1)):
        with pytest.raises(UnsupportedError, match=rf"{name}= was given where torch records the call.*leave {name}= out"):
            ours.attention(q, k, v, **{name: option})
    with pytest.raises(UnsupportedError, match=r"out= was given"):
        cupyflash.attention(q.detach(), k.detach(), v.detach(), out=torch.empty(2, 5, 4, 6, dtype=q.dtype).requires_grad_())
    cache = [x.detach() for x in (k, v)]
    for call in (cupyflash.attention_with_kvcache, ours.attention_with_kvcache):
        with pytest.raises(UnsupportedError, match=r"q requires grad, and there is no gradient through a cache.*torch\.no_grad\(\)"):
            call(q, *cache, cache_seqlens=offsets(3, 4))
    with pytest.raises(UnsupportedError, match=r"sink requires grad, and there is no gradient through a cache"):
        ours.attention_with_kvcache(q.detach(), *cache, cache_seqlens=offsets(3, 4), sink=randn(4))
    with pytest.raises(UnsupportedError, match=r"q requires grad, and there is no gradient through a cache or pages"):
        ours.attention_varlen(q[0], *cache, offsets(0, 5), page_table=offsets(0)[None], seqused_k=offsets(6))
    with pytest.raises(UnsupportedError, match=r"outs\[0\] requires grad, and merge_states has no form for that"):
        cupyflash.merge_states([q], [torch.zeros(2, 4, 5, dtype=q.dtype)])


def test_wrong_arguments() -> None:
    q, k, v = qkv()
    with pytest.raises(ArgumentError, match=r"k is a numpy\.ndarray: it must be a torch tensor; `cupyflash` takes any array"):
        ours.attention(q, k.detach().numpy(), v)
    for function in (ours.attention, ours.attention_varlen, ours.attention_with_kvcache):
        with pytest.raises(ArgumentError, match=rf"{function.__name__}\(\) has no argument 'is_causal'; it is called 'causal'"):
            function(q, k, v, is_causal=True)
    with pytest.raises(ShapeError, match=r"k has 3 heads and q has 4"):
        ours.attention(q, *[torch.cat([x, x[:, :, :1]], 2) for x in (k, v)])
    with pytest.raises(DtypeError, match="mask"):
        ours.attention(q, k, v, mask=torch.zeros(5, 7, requires_grad=True))
    with pytest.raises(ArgumentError, match="window_size=3 is ambiguous"):
        ours.attention(q, k, v, window_size=3)

    class Mode(torch.Tensor):
        pass

    with pytest.raises(ArgumentError, match="q is a Mode: subclasses of Tensor are not supported"):
        ours.attention(q.as_subclass(Mode), k, v)


@pytest.mark.parametrize("name", ["attention", "attention_varlen", "attention_with_kvcache"])
def test_signatures_are_cupyflashs(name: str) -> None:
    mine = dict(inspect.signature(getattr(ours, name)).parameters)
    theirs = dict(inspect.signature(getattr(cupyflash, name)).parameters)
    added = {} if name == "attention_with_kvcache" else {"deterministic": mine.pop("deterministic")}
    assert all((p.kind, p.default) == (p.KEYWORD_ONLY, None) for p in added.values())
    assert list(mine.items()) == list(theirs.items())


def run_fresh(code: str) -> str:
    return subprocess.run((sys.executable, "-c", code), cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def test_import() -> None:
    assert run_fresh("import sys, cupyflash; print('torch' in sys.modules)") == "False"
    missing = "import sys; sys.modules['torch'] = None\ntry:\n  import cupyflash.torch\nexcept ImportError as e: print(type(e).__name__, e)"
    assert run_fresh(missing) == "SetupError cupyflash.torch needs PyTorch: pip install torch"
    assert run_fresh("import sys, cupyflash.torch; print('torch._dynamo' in sys.modules)") == "False"  # two seconds
    compiled = "import torch, cupyflash; f = torch.compile(lambda q: cupyflash.attention(q, q, q) * 2, fullgraph=True, backend='eager')"
    assert run_fresh(f"{compiled}; print(tuple(f(torch.ones(1, 4, 2, 8)).shape))") == "(1, 4, 2, 8)"


def test_examples() -> None:
    failed, tried = doctest.testmod(ours)
    assert (failed, tried > 20) == (0, True)


# --- operators ---------------------------------------------------------------------------------------------------------------------------


def arguments(name: str, **given: Any) -> tuple[Any, ...]:
    """What an operator takes, from what the function does."""
    options = {"causal": True, "window_size": None, "layout": "bshd", "kv_layout": "nhd", "deterministic": False, **given}
    return tuple([({"rotary_interleaved": False} | ours._canonical(options)).get(argument) for argument in ours._ARGUMENTS[name]])


def cached(dtype: Any = torch.float32, new: bool = True) -> dict[str, Any]:
    given = {"q": randn(2, 3, 4, 8, dtype=dtype, grad=False), "cache_seqlens": offsets(2, 5)}
    given |= {name: randn(2, 16, 2, 8, dtype=dtype, grad=False) for name in ("k_cache", "v_cache")}
    if new:
        given |= {name: randn(2, 3, 2, 8, dtype=dtype, grad=False) for name in ("k_new", "v_new")}
        given |= {name: torch.rand(16, 4) for name in ("rotary_cos", "rotary_sin")}
    return given


def samples() -> dict[str, tuple[str, tuple[Any, ...]]]:
    q, k, v = qkv()
    packed = {"q": randn(6, 4, 8), "k": randn(9, 2, 8), "v": randn(9, 2, 6)}
    cuts = {"cu_seqlens_q": offsets(0, 2, 6), "cu_seqlens_k": offsets(0, 4, 9)}
    all_of_it = {"bias": randn(4, 1, 7), "sink": randn(4), "alibi_slopes": torch.rand(4, requires_grad=True)}
    transposed = {name: x.detach().transpose(1, 2).requires_grad_() for name, x in zip("qkv", (q, k, v), strict=True)}
    out, lse, _ = cupyflash.attention(*[x.detach() for x in (q, k, v)], causal=True, return_lse=True)
    back = {"dout": torch.randn_like(out), "q": q.detach(), "k": k.detach(), "v": v.detach(), "out": out, "lse": lse}
    pages = {"q": packed["q"].detach(), "k": randn(4, 4, 2, 8, grad=False), "v": randn(4, 4, 2, 6, grad=False)}
    pages |= {"page_table": torch.tensor([[0, 2], [3, 1]], dtype=torch.int32), "seqused_k": offsets(5, 7)}
    every = {
        "attention": {"q": q, "k": k, "v": v, **all_of_it, "mask": torch.rand(5, 7) > 0.3, "seqused_k": offsets(5, 7)},
        "attention transposed": {**transposed, "layout": "bhsd"},
        "attention bfloat16 to float32": {
            **{name: x.detach().bfloat16().requires_grad_() for name, x in zip("qkv", (q, k, v), strict=True)},
            "out_dtype": torch.float32,
            "window_size": (2, None),
        },
        "attention one": {name: x[0].detach().requires_grad_() for name, x in zip("qkv", (q, k, v), strict=True)},
        "attention_varlen": {**packed, **cuts, "sink": randn(4), "max_seqlen_q": 4},
        "attention_paged": {**pages, "cu_seqlens_q": offsets(0, 2, 6)},
        "attention_over_cache": cached(new=False),
        "attention_with_kvcache": cached(),
        "attention_backward": {**back, "wanted": [True, False, True, False, False, False]},
        "attention_backward of more": {
            **back,
            "bias": randn(4, 1, 7, grad=False),
            "dlse": torch.ones_like(lse),
            "wanted": [True] * 4 + [False] * 2,
        },
    }
    return {name: (name.split()[0], arguments(name.split()[0], **given)) for name, given in every.items()}


@pytest.mark.parametrize("sample", [*samples()])
def test_opcheck(sample: str) -> None:
    name, args = samples()[sample]
    if name == "attention_with_kvcache":
        args = tuple([x.clone() if isinstance(x, torch.Tensor) else x for x in args])
    torch.library.opcheck(getattr(torch.ops.cupyflash, name).default, args)


def test_every_operator_is_checked() -> None:
    assert {name for name, _ in samples().values()} == set(ours._ARGUMENTS)


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))], ids=str)
def test_fake_tensors_have_the_strides_of_real_ones(order: tuple[int, ...]) -> None:
    back = [order.index(axis) for axis in range(3)]
    tensors = [x.detach().permute(*order, 3).contiguous().permute(*back, 3).requires_grad_() for x in qkv(torch.float16)]

    def results(*tensors: Any) -> Tensors:
        out, lse, _ = cupyflash.attention(*tensors, return_lse=True)
        return [out, lse, *torch.autograd.grad(out.sum() + lse.sum(), tensors)]

    with torch._subclasses.FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in tensors]
        found = results(*fake)
    for got, want in zip(found, results(*tensors), strict=True):
        assert type(got) is torch._subclasses.FakeTensor
        assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)


def compiled(function: Callable[..., Any], backend: str = "aot_eager") -> tuple[Callable[..., Any], Any]:
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, fullgraph=True, dynamic=True, backend=counter), counter


@pytest.mark.parametrize("function", [cupyflash.attention, ours.attention], ids=["cupyflash", "cupyflash.torch"])
def test_compiled_code_computes_the_same(function: Callable[..., Any]) -> None:
    sink = randn(4)

    def model(q: Any, k: Any, v: Any, bias: Any, sink: Any) -> Any:
        options = {"causal": True, "window_size": [4, 0], "softmax_scale": q.shape[-1] ** -0.5, "out_dtype": "float64"}
        return loss(*function(q * 1, k, v, **options, bias=bias, sink=sink, return_lse=True)[:2])

    fast, counter = compiled(model)
    for batch, seqlen_q, seqlen_k in ((2, 5, 7), (3, 4, 9), (4, 11, 11)):
        tensors = [*qkv(batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k), randn(4, seqlen_q, seqlen_k), sink]
        got, want = fast(*tensors), model(*tensors)
        same([got, *torch.autograd.grad(got, tensors)], [want, *torch.autograd.grad(want, tensors)], 1e-13)
    assert counter.frame_count <= 2  # the last has Sq = Sk, which makes sizes equal
    with torch.no_grad():
        same([fast(*tensors)], [model(*tensors)], 1e-13)


def test_compiled_packed_sequences() -> None:
    def model(q: Any, k: Any, v: Any, cu_seqlens: Any) -> Any:
        return cupyflash.attention_varlen(q * 1, k, v, cu_seqlens, causal=True, max_seqlen_q=q.shape[0]).sin().sum()

    fast, counter = compiled(model)
    for total in (6, 9, 14):
        tensors, cuts = [randn(total, 4, 8), randn(total, 2, 8), randn(total, 2, 8)], offsets(0, 2, total)
        got, want = fast(*tensors, cuts), model(*tensors, cuts)
        same([got, *torch.autograd.grad(got, tensors)], [want, *torch.autograd.grad(want, tensors)], 1e-13)
    assert counter.frame_count == 1


@pytest.mark.parametrize("scale", [None, 0.5, (2,), (2, 2)], ids=str)
@pytest.mark.parametrize("new", [True, False])
def test_kf_126_compiled_calls_over_a_cache(new: bool, scale: Any) -> None:
    """With every documented shape of a descale; the cache is written in place."""

    def model(q: Any, k_cache: Any, v_cache: Any, options: dict[str, Any]) -> Any:
        return cupyflash.attention_with_kvcache(q, k_cache, v_cache, **options) * 1

    given = cached(new=new) | {"causal": scale is not None}
    if scale is not None:
        given |= {name: (given[name] * 2).to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
        scales = [torch.rand(scale) + 0.5 if isinstance(scale, tuple) else scale for _ in "kv"]
        given |= dict(zip(("k_descale", "v_descale"), scales, strict=True))
    twin = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    fast, _ = compiled(model)
    before = given["k_cache"].clone()
    results = [
        function(*[these.pop(name) for name in ("q", "k_cache", "v_cache")], these)
        for function, these in ((fast, dict(given)), (model, dict(twin)))
    ]
    same(results[:1], results[1:])
    for name in ("k_cache", "v_cache"):
        assert torch.equal(given[name].view(torch.uint8), twin[name].view(torch.uint8))
    assert torch.equal(given["k_cache"].view(torch.uint8), before.view(torch.uint8)) != new


def test_kf_126_a_descale_of_a_wrong_shape_in_compiled_code() -> None:
    given = cached(new=False)
    q, k_cache, v_cache = given["q"], *[given[name].to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")]
    fast, _ = compiled(lambda *args: cupyflash.attention_with_kvcache(*args[:3], cache_seqlens=args[3], k_descale=args[4]))
    with pytest.raises(ShapeError, match=r"k_descale has shape \(3,\): .*\(2,\)"):
        fast(q, k_cache, v_cache, given["cache_seqlens"], torch.ones(3))


def test_compiled_pages() -> None:
    _, args = samples()["attention_paged"]
    given = dict(zip(ours._ARGUMENTS["attention_paged"], args, strict=True))
    names = ("q", "k", "v", "cu_seqlens_q", "page_table", "seqused_k")

    def model(q: Any, k: Any, v: Any, cuts: Any, pages: Any, used: Any) -> Any:
        return cupyflash.attention_varlen(q, k, v, cuts, page_table=pages, seqused_k=used, causal=True) * 2

    same([compiled(model)[0](*[given[name] for name in names])], [model(*[given[name] for name in names])])


def test_errors_in_compiled_code() -> None:
    q, k, v = qkv()
    with pytest.raises(ShapeError, match=r"k has shape .*|head_dim"):
        compiled(ours.attention)[0](q, k.detach()[..., :4].contiguous(), v)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"raise UnsupportedError\(f\"\{name\}= was given"):
        compiled(lambda q: ours.attention(q, k, v, stream=1))[0](q)
    partly = torch.compile(ours.attention, backend="aot_eager")  # torch runs what it cannot trace as it stands
    with pytest.raises(UnsupportedError, match="stream= was given where torch records the call"):
        partly(q, k, v, stream=1)
    with pytest.raises(ArgumentError, match="window_size=3 "):
        partly(q, k, v, window_size=3)
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(2, 5, 4, 8)
        with pytest.raises(ShapeError, match=r"q has shape \(5, 4\)"):
            ours.attention(fake[0, :, :, 0], fake, fake)
        with pytest.raises(ArgumentError, match="layout='bsdh' is unknown"):
            ours.attention(fake, fake, fake, layout="bsdh")


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # which inductor's own import says
def test_inductor() -> None:
    def model(q: Any, k: Any, v: Any) -> Any:
        return ours.attention(q.sin(), k, v, causal=True).cos().sum()

    tensors = qkv(torch.float32)
    got, want = compiled(model, "inductor")[0](*tensors), model(*tensors)
    same([got, *torch.autograd.grad(got, tensors)], [want, *torch.autograd.grad(want, tensors)], 1e-5)


class Model(torch.nn.Module):
    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return cupyflash.attention(q * 1, k, v, causal=True) * 2


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict: bool) -> None:
    q, k, v = qkv(torch.float32, grad=False)
    batch, length = torch.export.Dim("batch", min=2), torch.export.Dim("length", min=2)
    shapes = {"q": {0: batch}, "k": {0: batch, 1: length}, "v": {0: batch, 1: length}}
    program = torch.export.export(Model(), (q, k, v), dynamic_shapes=shapes, strict=strict)
    assert any("cupyflash.attention" in str(node.target) for node in program.graph.nodes)
    for batch_size, seqlen_k in ((2, 7), (3, 9)):
        tensors = qkv(torch.float32, grad=False, batch=batch_size, seqlen_k=seqlen_k)
        same([program.module()(*tensors)], [Model()(*tensors)])


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("fast", [False, True], ids=["eager", "compiled"])
def test_checkpoints(use_reentrant: bool, fast: bool) -> None:
    def block(q: Any, k: Any, v: Any) -> Any:
        return ours.attention(q.sin(), k, v, causal=True, return_lse=True)[0].cos()

    def model(*tensors: Any) -> Any:
        return checkpoint(block, *tensors, use_reentrant=use_reentrant).sum()

    tensors = qkv()
    (compiled(model)[0] if fast else model)(*tensors).backward()
    same([x.grad for x in tensors], torch.autograd.grad(block(*tensors).sum(), tensors), 1e-13)


def test_selective_checkpoints_see_the_operator() -> None:
    seen: list[str] = []

    def policy(_: Any, operator: Any, *args: Any, **options: Any) -> Any:
        seen.append(str(operator))
        return CheckpointPolicy.MUST_SAVE if "cupyflash" in str(operator) else CheckpointPolicy.PREFER_RECOMPUTE

    def block(*tensors: Any) -> Any:
        return ours.attention(*tensors, causal=True).sin().sum()

    tensors, contexts = qkv(), functools.partial(create_selective_checkpoint_contexts, policy)
    checkpoint(block, *tensors, use_reentrant=False, context_fn=contexts).backward()
    same([x.grad for x in tensors], torch.autograd.grad(block(*tensors), tensors))
    assert "cupyflash.attention.default" in seen


# --- autocast ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [False, True], ids=["eager", "compiled"])
def test_autocast_casts_as_torchs_own_attention_does(fast: bool) -> None:
    def model(q: Any, k: Any, v: Any, bias: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return ours.scaled_dot_product_attention(q, k, v, bias)

    tensors = [randn(2, 4, 5, 8, dtype=torch.float32) for _ in "qkv"] + [randn(5, 5, dtype=torch.float32)]
    with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
        want = torch_sdpa(*tensors)
    got = (compiled(model)[0] if fast else model)(*tensors)
    assert got.dtype == want.dtype == torch.bfloat16
    grads = torch.autograd.grad(got.float().sin().sum(), tensors)
    assert [grad.dtype for grad in grads] == [torch.float32] * 4
    same([got, *grads], [want, *torch.autograd.grad(want.float().sin().sum(), tensors)], 3e-2)
    exact = ours.scaled_dot_product_attention(*[x.bfloat16() for x in tensors])
    same([got], [exact])


def test_autocast_leaves_float64_packed_and_caches_as_torch_would() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert ours.attention(*qkv()).dtype == torch.float64
        packed = [x[0] for x in qkv(torch.float32, seqlen_q=7)]
        assert ours.attention_varlen(*packed, offsets(0, 7)).dtype == torch.bfloat16
        given = cached()
        first = [given.pop(name) for name in ("q", "k_cache", "v_cache")]
        assert ours.attention_with_kvcache(*first, **given).dtype == torch.float32


# --- torch.func --------------------------------------------------------------------------------------------------------------------------


def one_by_one(function: Callable[..., Any], in_dims: tuple[Any, ...], tensors: Tensors) -> Any:
    count = next(x.shape[axis] for x, axis in zip(tensors, in_dims, strict=True) if axis is not None)
    each = [function(*[x if a is None else x.select(a, n) for x, a in zip(tensors, in_dims, strict=True)]) for n in range(count)]
    return [torch.stack(results) for results in zip(*each, strict=True)]


@pytest.mark.parametrize("in_dims", [(0, 0, 0, 0, 0, None), (1, None, 2, None, None, None), (0, 0, None, 1, 0, 0)], ids=str)
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd"])
def test_vmap(layout: str, batched: bool, in_dims: tuple[Any, ...]) -> None:
    """And a gradient inside of it, and one around it."""

    def make(sizes: dict[str, int], letters: str, axis: int | None) -> Any:
        shape = [sizes[letter] for letter in letters if batched or letter != "b"]
        if axis is not None:
            shape.insert(axis, 3)
        return randn(*shape, grad=False)

    sizes = [{"b": 2, "s": n, "h": h, "d": 8} for n, h in ((5, 4), (7, 2), (7, 2))]
    tensors = [make(size, layout, axis) for size, axis in zip(sizes, in_dims[:3], strict=True)]
    tensors.append(make({"b": 2, "h": 4, "s": 5, "t": 7}, "bhst" if in_dims[3] == 0 else "hst", in_dims[3]))
    tensors += [make({"h": 4}, "h", axis).abs() for axis in in_dims[4:]]

    used = offsets(3, 7) if batched else offsets(4)

    def function(q: Any, k: Any, v: Any, bias: Any, slopes: Any, sink: Any) -> Any:
        options = {"seqused_k": used, "bias": bias, "alibi_slopes": slopes.float(), "sink": sink, "layout": layout, "causal": True}
        return cupyflash.attention(q, k, v, **options, return_lse=True)[:2]

    same(torch.vmap(function, in_dims)(*tensors), one_by_one(function, in_dims, tensors), 1e-13)
    gradient = torch.func.grad(lambda *tensors: loss(*function(*tensors)), tuple(range(6)))
    same(torch.vmap(gradient, in_dims)(*tensors), one_by_one(gradient, in_dims, tensors), 1e-6)

    def around(mapped: Callable[..., Any]) -> Any:
        return torch.func.grad(lambda *tensors: loss(*mapped(*tensors)), tuple(range(6)))(*tensors)

    same(around(torch.vmap(function, in_dims)), around(lambda *tensors: one_by_one(function, in_dims, list(tensors))), 1e-6)


def test_vmap_of_packed_sequences_and_caches() -> None:
    q = randn(3, 6, 4, 8, grad=False)
    cuts = torch.stack([offsets(0, 2, 6), offsets(0, 5, 6), offsets(0, 0, 6)])

    def packed(q: Any, cuts: Any) -> Any:
        return (cupyflash.attention_varlen(q, q, q, cuts, causal=True),)

    same(torch.vmap(packed)(q, cuts), one_by_one(packed, (0, 0), [q, cuts]))
    given = cached(new=False)
    queries = randn(3, *given["q"].shape, dtype=torch.float32, grad=False)

    def over_cache(q: Any) -> Any:
        return (ours.attention_with_kvcache(q, given["k_cache"], given["v_cache"], cache_seqlens=given["cache_seqlens"]),)

    same(torch.vmap(over_cache)(queries), one_by_one(over_cache, (0,), [queries]))
    new = {"k_new": given["k_cache"][:, :3], "v_new": given["v_cache"][:, :3], "cache_seqlens": given["cache_seqlens"]}
    with pytest.raises(UnsupportedError, match="vmap over a call that appends to a cache"):
        torch.vmap(lambda q: cupyflash.attention_with_kvcache(q, given["k_cache"], given["v_cache"], **new))(queries)


def test_second_derivatives_of_torch_func_are_refused() -> None:
    q, k, v = qkv(grad=False)
    with pytest.raises(UnsupportedError, match="second derivatives are not built"):
        torch.func.grad(lambda q: torch.func.grad(lambda q: ours.attention(q, k, v).sin().sum())(q).sum())(q)


# --- scaled_dot_product_attention ------------------------------------------------------------------------------------------------------


def test_the_signature_is_torchs() -> None:
    """Of a function in C, whose signature its docstring gives and, with types, the operator behind it."""
    mine = inspect.signature(ours.scaled_dot_product_attention).parameters
    (schema,) = [getattr(torch.ops.aten.scaled_dot_product_attention, name)._schema for name in ("default",)]
    theirs = [(a.name, a.default_value if a.has_default_value() else inspect.Parameter.empty) for a in schema.arguments]
    assert [(p.name, p.default) for p in mine.values()] == theirs
    written = "(" + ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default}" for p in mine.values()) + ")"
    assert written in " ".join(torch_sdpa.__doc__.split())


SDPA: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], Any, dict[str, Any]]] = [
    ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6), None, {}),
    ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6), None, {"is_causal": True}),
    ((2, 4, 7, 8), (2, 4, 5, 8), (2, 4, 5, 8), None, {"is_causal": True, "scale": 0.2}),
    ((2, 4, 7, 8), (2, 2, 5, 8), (2, 2, 5, 8), None, {"is_causal": True, "enable_gqa": True}),
    ((2, 4, 7, 8), (2, 1, 5, 8), (2, 1, 5, 8), (7, 5), {}),
    ((2, 4, 7, 8), (2, 1, 5, 8), (1, 4, 5, 8), (2, 1, 7, 5), {}),
    ((2, 1, 7, 8), (2, 4, 5, 8), (1, 4, 5, 8), None, {}),
    ((3, 2, 4, 7, 8), (3, 2, 4, 5, 8), (3, 2, 4, 5, 8), (7, 5), {}),
    ((3, 2, 4, 7, 8), (2, 4, 5, 8), (3, 1, 4, 5, 8), (3, 1, 1, 7, 5), {}),
    ((3, 2, 4, 7, 8), (3, 2, 2, 5, 8), (3, 2, 2, 5, 8), (2, 1, 7, 5), {"enable_gqa": True}),
    ((4, 7, 8), (4, 5, 8), (4, 5, 8), (4, 7, 5), {}),
    ((7, 8), (5, 8), (5, 8), (7, 5), {}),
]


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize(("q", "k", "v", "mask", "options"), SDPA, ids=lambda x: str(x).replace(" ", ""))
def test_sdpa_is_torchs(q: Any, k: Any, v: Any, mask: Any, options: dict[str, Any], kind: str) -> None:
    tensors = [randn(*shape) for shape in (q, k, v)]
    if mask is not None and kind == "bool":
        mask = torch.rand(mask) > 0.3
        mask[..., 2, :] = False  # a row that sees nothing
    elif mask is not None:
        mask = randn(*mask)
        tensors.append(mask)
    got = ours.scaled_dot_product_attention(*tensors[:3], mask, **options)
    with sdpa_kernel(SDPBackend.MATH):
        want = torch_sdpa(*tensors[:3], mask, **options)
    assert got.shape == want.shape
    same([got, *torch.autograd.grad(loss(got, got), tensors)], [want, *torch.autograd.grad(loss(want, want), tensors)], 1e-12)


def test_sdpa_reads_views_in_place_and_keeps_their_order() -> None:
    q, k, v = (randn(2, 5, 4, 8, grad=False).transpose(1, 2) for _ in "qkv")
    out = ours.scaled_dot_product_attention(q, k, v)
    assert out.stride() == q.stride()
    five = [x.unflatten(0, (2, 1)) for x in (q, k, v)]
    assert torch.equal(ours.scaled_dot_product_attention(*five)[:, 0], out)


def test_sdpa_in_compiled_code() -> None:
    def model(*tensors: Any) -> Any:
        return ours.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)

    tensors = [randn(3, 2, heads, 5, 8) for heads in (4, 2, 2)]
    same([compiled(model)[0](*tensors)], [model(*tensors)], 1e-13)


def test_sdpa_refuses_what_it_cannot() -> None:
    q, k, v = (randn(2, 4, 5, 8, grad=False) for _ in "qkv")
    with pytest.raises(UnsupportedError, match=r"dropout_p=0.1 was given.*dropout_p=0.0"):
        ours.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
    with pytest.raises(ArgumentError, match="is_causal=True was given with attn_mask="):
        ours.scaled_dot_product_attention(q, k, v, torch.ones(5, 5, dtype=torch.bool), is_causal=True)
    with pytest.raises(ShapeError, match=r"key \(2, 2, 5, 8\) .*enable_gqa=True"):
        ours.scaled_dot_product_attention(q, k[:, :2], v[:, :2])
    with pytest.raises(ArgumentError, match=r"query is a numpy\.ndarray"):
        ours.scaled_dot_product_attention(q.numpy(), k, v)


# --- torch's own flash attention -------------------------------------------------------------------------------------------------------


def test_a_torch_without_the_hook_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl", raising=False)
    with pytest.raises(UnsupportedError, match=r"has no hook .*cupyflash\.torch\.scaled_dot_product_attention"):
        ours.activate()


def test_activate_and_deactivate() -> None:
    names = ["_flash_attention_forward", "_flash_attention_backward", "_scaled_dot_product_flash_attention_backward"]
    names += ["_scaled_dot_product_flash_attention", "_flash_attention_forward_no_dropout_inplace"]

    def kernels() -> list[bool]:
        return [torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA") for name in names]

    before = kernels()
    ours.activate()
    try:
        assert torch.nn.attention.current_flash_attention_impl() == "CUPYFLASH"
        assert "CUPYFLASH" in torch.nn.attention.list_flash_attention_impls()
        assert all(kernels())
        ours.activate()  # again is once
    finally:
        ours.deactivate()
    assert torch.nn.attention.current_flash_attention_impl() is None
    assert kernels() == before
    ours.deactivate()


def test_overrides_take_what_torch_passes() -> None:
    """Each argument of each operator, by name, so that a torch with a new one is noticed."""
    for name in ("_flash_attention_forward", "_flash_attention_backward", "_scaled_dot_product_flash_attention"):
        theirs = [argument.name for argument in getattr(torch.ops.aten, name).default._schema.arguments]
        assert set(theirs) <= set(inspect.signature(getattr(ours, name)).parameters)


@pytest.mark.parametrize("causal", [False, True])
def test_overrides_compute_what_torchs_do(causal: bool) -> None:
    q, k, v = (randn(2, 4, 6, 8) for _ in "qkv")
    dout = randn(2, 4, 6, 8, grad=False)
    with torch.no_grad():
        out, lse, _, _, max_q, max_k, seed, offset, _ = ours._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=0.3)
        rest = (None, None, max_q, max_k, 0.0, causal, seed, offset)
        grads = ours._scaled_dot_product_flash_attention_backward(dout, q, k, v, out, lse, *rest, scale=0.3)
    with sdpa_kernel(SDPBackend.MATH):
        want = torch_sdpa(q, k, v, is_causal=causal, scale=0.3)
    same([out, *grads], [want, *torch.autograd.grad(want, (q, k, v), dout)], 1e-12)
    assert (max_q, max_k, lse.shape) == (6, 6, (2, 4, 6))


@pytest.mark.parametrize("window", [(None, None), (2, 0)])
def test_overrides_of_packed_sequences(window: tuple[Any, Any]) -> None:
    q, k, v = (randn(6, 4, 8) for _ in "qkv")
    cuts, dout, out = offsets(0, 2, 6), randn(6, 4, 8, grad=False), torch.empty(6, 4, 8, dtype=torch.float64)
    options = {"window_size_left": window[0], "window_size_right": window[1]}
    with torch.no_grad():
        result, lse, seed, unused, _ = ours._flash_attention_forward(q, k, v, cuts, cuts, 4, 4, 0.0, True, False, **options)
        again = ours._flash_attention_forward_no_dropout_inplace(out, q, k, v, cuts, cuts, 4, 4, 0.0, True, False, **options)
        grads = ours._flash_attention_backward(dout, q, k, v, result, lse, cuts, cuts, 4, 4, 0.0, True, seed, unused, **options)
    want = torch.cat(
        [by_definition(*[x[None, rows] for x in (q, k, v)], mask=near(rows, window[0]))[0][0] for rows in (slice(0, 2), slice(2, 6))]
    )
    same([result, out, again, *grads], [want, want, lse, *torch.autograd.grad(want, (q, k, v), dout)], 1e-12)


def near(rows: slice, left: int | None) -> Any:
    index = torch.arange(rows.stop - rows.start)
    return None if left is None else index >= index[:, None] - left


@pytest.mark.parametrize("options", [{"dropout_p": 0.1}, {"return_debug_mask": True}])
def test_overrides_refuse_what_they_have_not(options: dict[str, Any]) -> None:
    q = randn(2, 4, 6, 8, grad=False)
    with pytest.raises(UnsupportedError, match=next(iter(options))):
        ours._scaled_dot_product_flash_attention(q, q, q, **options)
    with pytest.raises(UnsupportedError, match="num_splits=2"):
        ours._flash_attention_forward(q, q, q, None, None, 6, 6, 0.0, False, False, num_splits=2)


# --- counts ------------------------------------------------------------------------------------------------------------------------------


def flops(function: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize("causal", [False, True])
def test_kf_119_a_flop_counter_counts_the_visible_pairs(causal: bool) -> None:
    q, k, v = (torch.zeros(1, 256, 2, 16, requires_grad=True) for _ in "qkv")
    pairs = 256 * 257 // 2 if causal else 256 * 256
    assert flops(lambda: ours.attention(q.detach(), k.detach(), v.detach(), causal=causal)) == 4 * 16 * 2 * pairs
    assert flops(lambda: ours.attention(q, k, v, causal=causal).sum().backward()) == (4 + 10) * 16 * 2 * pairs
    total = ours.attention(q, k, v, causal=causal).sum()
    assert flops(total.backward) == 10 * 16 * 2 * pairs


def test_kf_120_a_flop_counter_counts_query_heads() -> None:
    with torch._subclasses.FakeTensorMode():
        q, k = torch.empty(8, 1, 32, 128), torch.empty(8, 4096, 8, 128)
        assert flops(lambda: ours.attention(q, k, k, causal=True)) == 536_870_912


def test_kf_124_a_flop_counter_counts_true_lengths() -> None:
    q, lengths = torch.zeros(4197, 1, 8), (1, 4096, 100)
    cuts = offsets(*itertools.accumulate((0, *lengths)))
    assert flops(lambda: ours.attention_varlen(q, q, q, cuts)) == 4 * 8 * sum(n * n for n in lengths)
    windows = sum(min(i + 1, 10) for n in lengths for i in range(n))
    assert flops(lambda: ours.attention_varlen(q, q, q, cuts, causal=True, window_size=(9, 0))) == 4 * 8 * windows
    used = offsets(1, 96, 200)
    assert flops(lambda: ours.attention_varlen(q, q, q, cuts, seqused_k=used)) == 4 * 8 * (1 + 4096 * 96 + 100 * 100)
