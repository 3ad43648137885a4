"""`cupyflash.flash_attn` on a GPU: each function in 16 bits against the formula in float64, with gradients, caches and graphs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / "unit")]
cupy = pytest.importorskip("cupy", reason="CuPy is not installed; pip install 'cupyflash[cuda13]'")
torch = pytest.importorskip("torch", reason="PyTorch is not installed; pip install torch")

from test_flash_attn import OPTIONS, formula, gradients, rotated  # noqa: E402

import cupyflash.flash_attn as fa  # noqa: E402
from cupyflash import launch  # noqa: E402

pytestmark = pytest.mark.gpu
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    parameters, launches = launch._parameters, []
    monkeypatch.setattr(launch, "_parameters", lambda *args: (launches.append(1), parameters(*args))[1])
    yield
    assert launches, "no call launched anything: they may have run on the host"


def normal(*shape: int, dtype: Any, seed: int = 0, grad: bool = False) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).cuda().to(dtype).requires_grad_(grad)


def ints(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def judged(got: Any, want: Any, plain: Any, factor: float = 2) -> None:
    """At most `factor` times the error of the formula in the same dtype, and half an ulp of the largest."""
    error, of_formula, size = ((a.double() - want).abs().max().item() for a in (got, plain, torch.zeros_like(want)))
    limit = factor * of_formula + torch.finfo(got.dtype).eps / 2 * size
    assert error <= limit, f"error {error:.3g}, limit {limit:.3g}"  # a NaN is not <= anything


def on_gpu(options: dict[str, Any]) -> dict[str, Any]:
    return {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}


def split(packed: Any, dtype: Any, axis: int) -> list[Any]:
    return [x.to(dtype) for x in packed.unbind(axis)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("given", "meant"), OPTIONS)
def test_dense(dtype: str, given: dict[str, Any], meant: dict[str, Any]) -> None:
    given, meant = on_gpu(given), on_gpu(meant)
    q, kv = normal(2, 190, 4, 64, dtype=DTYPES[dtype], grad=True), normal(2, 211, 2, 2, 64, dtype=DTYPES[dtype], seed=1, grad=True)
    inputs = [q, kv]
    out, lse, _ = fa.flash_attn_kvpacked_func(q, kv, **given, return_attn_probs=True)
    (want, want_lse), (plain, _) = (formula(q.to(to), *split(kv, to, 2), **meant) for to in (torch.float64, DTYPES[dtype]))
    judged(out, want, plain)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)
    found = [gradients([x], inputs) for x in (out, want, plain)]
    for got, g_want, g_plain in zip(*found, strict=True):
        judged(got, g_want.double(), g_plain, factor=3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("given", "meant"), OPTIONS)
def test_varlen(dtype: str, given: dict[str, Any], meant: dict[str, Any]) -> None:
    given, meant = on_gpu(given), on_gpu(meant)
    lengths = [130, 0, 1, 67]
    qkv = normal(sum(lengths), 3, 4, 64, dtype=DTYPES[dtype], grad=True)
    out = fa.flash_attn_varlen_qkvpacked_func(qkv, ints(0, 130, 130, 131, 198), 130, **given)
    results = []
    for to in (torch.float64, DTYPES[dtype]):
        parts = [formula(*split(x[None], to, 2), **meant)[0][0] for x in qkv.split(lengths) if len(x)]
        results.append(torch.cat(parts))
    judged(out, *results)
    (got,), (g_want,), (g_plain,) = (gradients([x], [qkv]) for x in (out, *results))
    judged(got, g_want.double(), g_plain, factor=3)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("rotary", [None, False, True])
@pytest.mark.parametrize("new", [1, 5])
def test_a_cache_in_a_captured_graph(paged: bool, rotary: bool | None, new: int) -> None:
    """Appended, rotated and attended; each replay at the lengths that are there then, or at the number that was given."""
    dtype, slots, size, held = torch.float16, 256, 64, [0, 5, 201]
    q, k, v = normal(3, new, 8, 64, dtype=dtype), *(normal(3, new, 2, 64, dtype=dtype, seed=s) for s in (1, 2))
    angles = torch.rand(slots, 16) * 6
    before = normal(2, 3, slots, 2, 64, dtype=dtype, seed=6)
    lengths = ints(9, 9, 9)
    options: dict[str, Any] = {"causal": True, "cache_seqlens": lengths}
    if rotary is not None:
        options |= {"rotary_cos": angles.cos().cuda(), "rotary_sin": angles.sin().cuda(), "rotary_interleaved": rotary}
    if paged:
        order = torch.randperm(3 * slots // size, generator=torch.Generator().manual_seed(1)).cuda()
        options["block_table"] = order.view(3, -1).int()

    def caches() -> Any:
        if not paged:
            return before.clone()
        pages = torch.empty(2, len(order), size, 2, 64, dtype=dtype, device="cuda")
        pages[:, order] = before.reshape(2, -1, size, 2, 64)
        return pages

    there = caches()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        fa.flash_attn_with_kvcache(q, *there, k, v, **options)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fa.flash_attn_with_kvcache(q, *there, k, v, **options)
    there.copy_(caches())
    lengths.copy_(ints(*held))
    graph.replay()
    after = there[:, order].reshape(before.shape) if paged else there
    for b, n in enumerate(held):
        results = []
        for to in (torch.float64, dtype):
            turned = [x[b].double() if rotary is None else rotated(x[b].double(), angles.cuda().double(), n, rotary) for x in (q, k)]
            keys, values = torch.cat([before[0, b, :n].double(), turned[1]]), torch.cat([before[1, b, :n], v[b]])
            results.append(formula(*(x[None].to(to) for x in (turned[0], keys, values)), causal=True)[0][0])
        judged(out[b], *results)
        torch.testing.assert_close(after[0, b, : n + new].double(), keys, rtol=1e-3, atol=1e-3)
        assert torch.equal(after[1, b, : n + new], values)
        assert torch.equal(after[:, b, n + new :], before[:, b, n + new :])


def test_a_length_that_is_a_number_is_captured() -> None:
    q, k, v = normal(2, 1, 8, 64, dtype=torch.float16), *(normal(2, 300, 2, 64, dtype=torch.float16, seed=s) for s in (1, 2))
    eager = fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=217)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=217)
    graph.replay()
    assert torch.equal(out, eager)
    wide = [x.double() for x in (q, k[:, :217], v[:, :217])]
    judged(out, formula(*wide)[0], formula(q, k[:, :217], v[:, :217])[0])


def test_deterministic_gradients_have_the_same_bits() -> None:
    qkv = normal(2, 700, 3, 4, 64, dtype=torch.bfloat16, grad=True)
    grads = [gradients([fa.flash_attn_qkvpacked_func(qkv, causal=True, deterministic=True)], [qkv])[0] for _ in range(5)]
    assert all(torch.equal(g, grads[0]) for g in grads)


def test_padding_on_the_gpu() -> None:
    x, mask = normal(2, 5, 4, 64, dtype=torch.float16), torch.tensor([[1, 1, 0, 0, 0], [0, 1, 1, 1, 1]]).cuda()
    flat, indices, cu_seqlens, longest, _ = fa.unpad_input(x, mask)
    assert cu_seqlens.is_cuda
    out = fa.flash_attn_varlen_func(flat, flat, flat, cu_seqlens, cu_seqlens, longest, longest)
    padded = fa.pad_input(out, indices, 2, 5)
    judged(padded[0, :2], *(formula(*(x[:1, :2].to(to),) * 3)[0][0] for to in (torch.float64, torch.float16)))
    assert not padded[mask == 0].any()
