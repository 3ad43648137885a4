"""More than 2^31 elements: every offset in an array is 64 bits wide; and 128k tokens. Torch makes the arrays on the GPU: 22 GB at most, of
packed sequences 48."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed; pip install 'cupyflash[cuda13]'")

from on_gpu import TORCH, Move, nan_memory, only  # noqa: E402

import cupyflash  # noqa: E402
from cupyflash import variants  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, params=["chosen", "fwd_simple"])
def kernel(request: pytest.FixtureRequest) -> Iterator[None]:
    """The rows of one family, or all of both tables."""
    table = "BACKWARD" if request.param.startswith("bwd") else "FORWARD"
    with only(*[row for row in getattr(variants, table) if request.param in ("chosen", row.family)], table=table):
        yield


chosen = pytest.mark.parametrize("kernel", ["chosen"], indirect=True)


@pytest.fixture
def torch(returns_memory: None) -> Any:
    torch = pytest.importorskip("torch", reason=TORCH)
    needs(torch, 24e9)
    torch.manual_seed(0)
    return torch


def needs(torch: Any, num_bytes: float) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < num_bytes:
        pytest.skip(f"needs {num_bytes / 1e9:.0f} GB of free GPU memory, there are {free / 1e9:.0f}")


def test_kf_060_keys_stored_sequence_first(torch: Any) -> None:
    """(Sk, B, D) viewed as (B, Sk, 1, D). Row r sees nearly only key Sk - 1 - r, and the last keys lie past element 2^31."""
    batch, sk, d = 128, 2**18 + 8, 64
    k, v = (torch.randn(sk, batch, d, dtype=torch.float16, device="cuda") for _ in range(2))
    assert k.numel() > 2**31
    q = torch.zeros(batch, 4, 1, d, dtype=torch.float16, device="cuda")
    for r in range(4):
        k[sk - 1 - r, :, :] = 0
        k[sk - 1 - r, :, r] = q[:, r, :, r] = 40  # 1600 / 8, against 5 of the others
    out = cupyflash.attention(q, *(x.transpose(0, 1)[:, :, None] for x in (k, v)))
    expected = v[-4:].flip(0).transpose(0, 1)[:, :, None]
    assert torch.equal(out, expected)
    exact = torch.softmax(q[5, :, 0].double() @ k[:, 5].double().T / 8, -1) @ v[:, 5].double()
    assert torch.allclose(out[5, :, 0].double(), exact, rtol=2e-3, atol=2e-3)


def test_more_queries_and_results_than_2_to_31_elements(torch: Any) -> None:
    sq, heads, d = 2**18 + 8, 64, 128
    q = torch.randn(1, sq, heads, d, dtype=torch.float16, device="cuda")
    k, v = (torch.randn(1, 16, heads, d, dtype=torch.float16, device="cuda") for _ in range(2))
    assert q.numel() > 2**31
    out = torch.full_like(q, torch.nan)
    lse = cupyflash.attention(q, k, v, out=out, return_lse=True).lse
    assert not out.isnan().any()
    for rows in (slice(0, 3), slice(sq // 2, sq // 2 + 3), slice(sq - 9, sq)):
        scores = torch.einsum("shd,khd->hsk", q[0, rows].double(), k[0].double()) / d**0.5
        exact = torch.einsum("hsk,khd->shd", torch.softmax(scores, -1), v[0].double())
        assert torch.allclose(out[0, rows].double(), exact, rtol=2e-3, atol=2e-3)
        assert torch.allclose(lse[0, :, rows].double(), torch.logsumexp(scores, -1), rtol=2e-6, atol=1e-4)


@pytest.mark.parametrize("option", ["mask", "bias"])
def test_kf_065_a_mask_or_a_bias_of_more_than_2_to_31_elements(torch: Any, option: str) -> None:
    """Each row sees one key, another one for each: its result is that key's value, exactly."""
    n, d = 46_349, 32
    q, k, v = (torch.randn(1, n, 1, d, dtype=torch.float16, device="cuda") for _ in range(3))
    seen = torch.arange(n, device="cuda") * 7919 % n
    values, there = (torch.bool, True) if option == "mask" else (torch.float16, 6e4)
    table = torch.zeros(n, n, dtype=values, device="cuda")
    assert table.numel() > 2**31
    table[torch.arange(n, device="cuda"), seen] = there
    assert torch.equal(cupyflash.attention(q, k, v, **{option: table}), v[:, seen])


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_kf_065_batches_more_than_2_to_31_elements_apart(rng: np.random.Generator, torch: Any, library: str) -> None:
    move = Move(library)
    values = rng.standard_normal((3, 2, 70, 2, 64)).astype(np.float16)
    q, k, v = move(*values)
    memory = torch.empty(2**31 + 70_000, dtype=torch.float16, device="cuda")
    memory[:70_000] = memory[-70_000:] = torch.nan
    strides = (2**31 + 8, 2 * 64, 64, 1)
    if library == "torch":
        far = memory.as_strided(k.shape, strides)
    else:
        flat = cupy.from_dlpack(memory)
        far = cupy.ndarray(k.shape, flat.dtype, flat.data, tuple(2 * s for s in strides))
    for batch in range(2):
        far[batch] = k[batch]  # CuPy's own copies of an array of such strides may count in 32 bits
    cupy.cuda.runtime.deviceSynchronize()
    expected = move.attention(*values)
    np.testing.assert_array_equal(move.back(cupyflash.attention(q, far, v)), expected)
    np.testing.assert_array_equal(move.back(cupyflash.attention(q, k, far)), move.attention(values[0], values[1], values[1]))


# --- gradients -------------------------------------------------------------------------------------------------------------------------

# Of the root mean square error by that of the result: rounding P, dS and the result costs 2^-11.7 and 2^-8.7, in single rows up to 1.4
# times that.
ROOM = {"float16": 2**-10.5, "bfloat16": 2**-7.5}


def close(grad: Any, exact: Any, name: str) -> None:
    error = float((grad.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())
    assert error < ROOM[str(grad.dtype).removeprefix("torch.")], f"{name}: relative error {error:.3g}"


def exact_results(torch: Any, dout: Any, q: Any, k: Any, v: Any, causal: bool) -> tuple[Any, Any, Any, Any]:
    """out, dq, dk and dv of some query heads (heads, Sq, D) that read one key head (Sk, D), by the formula in float64."""
    dout, q, k, v = (x.double() for x in (dout, q, k, v))
    scores = q @ k.T / q.shape[-1] ** 0.5
    if causal:
        rows, keys = (torch.arange(n, device=q.device) for n in scores.shape[-2:])
        scores.masked_fill_(keys > rows[:, None] + (len(k) - q.shape[1]), -torch.inf)
    weights = torch.softmax(scores, -1)
    del scores
    out, dv = weights @ v, (weights.mT @ dout).sum(0)
    ds = weights.mul_((dout @ v.T).sub_((dout * out).sum(-1, keepdim=True))) / q.shape[-1] ** 0.5
    return out, ds @ k, (ds.mT @ q).sum(0), dv


@pytest.mark.parametrize("kernel", ["chosen", "bwd_sm80", "bwd_simple"], indirect=True)
def test_kf_060_gradients_of_keys_stored_sequence_first(torch: Any) -> None:
    """Keys, values and their gradients as (Sk, B, D): each of more than 2^31 elements, the last key past it."""
    batch, sk, d = 128, 2**18 + 8, 64
    k, v = (torch.randn(sk, batch, d, dtype=torch.float16, device="cuda").transpose(0, 1)[:, :, None] for _ in range(2))
    q = torch.zeros(batch, 4, 1, d, dtype=torch.float16, device="cuda")
    for r in range(4):  # a row sees nearly only one of the last keys
        k[:, sk - 1 - r] = 0
        k[:, sk - 1 - r, 0, r] = q[:, r, 0, r] = 11
    dout = torch.randn(batch, 4, 1, d, dtype=torch.float16, device="cuda")
    out, lse, _ = cupyflash.attention(q, k, v, return_lse=True)
    dk, dv = (torch.full((sk, batch, d), torch.nan, dtype=torch.float16, device="cuda").transpose(0, 1)[:, :, None] for _ in range(2))
    assert dk.numel() > 2**31
    dq = cupyflash.attention_backward(dout, q, k, v, out, lse, dk=dk, dv=dv).dq
    assert not any(grad.isnan().any() for grad in (dq, dk, dv))
    for b in (0, 77, batch - 1):
        exact = exact_results(torch, *(x[b].transpose(0, 1) for x in (dout, q)), k[b, :, 0], v[b, :, 0], causal=False)
        assert torch.allclose(dq[b].transpose(0, 1).double(), exact[1], rtol=4e-3, atol=4e-3)
        for grad, want, name in ((dk, exact[2], "dk"), (dv, exact[3], "dv")):
            assert torch.allclose(grad[b, :, 0].double(), want, rtol=4e-3, atol=4e-3), name
            assert want[-4:].abs().max() > 0.1, name


@pytest.mark.parametrize(
    ("d", "dtype", "causal"), [(64, "bfloat16", True), (128, "bfloat16", True), (128, "float16", False), (192, "bfloat16", True)]
)
@chosen
def test_more_tiles_than_blocks_of_heads_in_several_sections(torch: Any, d: int, dtype: str, causal: bool) -> None:
    """Ten key heads of 33 blocks of keys or more, in several sections under a causal mask, the last of them not full."""
    batch, s, hq, hkv = 2, 4096 + 17, 10, 5
    q, k, v, dout = (torch.randn(batch, s, h, d, dtype=getattr(torch, dtype), device="cuda") for h in (hq, hkv, hkv, hq))
    out, lse, _ = cupyflash.attention(q, k, v, causal=causal, return_lse=True)
    grads = cupyflash.attention_backward(dout, q, k, v, out, lse, causal=causal)
    for b in range(batch):
        for h in range(hkv):
            heads = slice(2 * h, 2 * h + 2)
            exact = exact_results(torch, *(x[b, :, heads].transpose(0, 1) for x in (dout, q)), k[b, :, h], v[b, :, h], causal)
            found = (*(x[b, :, heads].transpose(0, 1) for x in (out, grads.dq)), grads.dk[b, :, h], grads.dv[b, :, h])
            for name, x, want in zip(("out", "dq", "dk", "dv"), found, exact, strict=True):
                close(x, want, f"{name} of batch {b}, key head {h}")


@pytest.mark.parametrize("library", ["cupy", "torch"])
@pytest.mark.parametrize("kernel", ["chosen", "fwd_sm80", "bwd_sm80"], indirect=True)
def test_kf_065_packed_sequences_of_more_than_2_to_31_elements(torch: Any, library: str) -> None:
    """The last of three, forward and backward, as by itself."""
    needs(torch, 48e9)
    heads, d, last = 16, 64, 300
    tokens = 2**31 // (heads * d) + 1000
    small = [torch.randn(last, heads, d, dtype=torch.float16, device="cuda") for _ in range(4)]
    big = [torch.zeros(tokens, heads, d, dtype=torch.float16, device="cuda") for _ in range(4)]
    assert big[0].numel() > 2**31
    for x, values in zip(big, small, strict=True):
        x[-last:] = values

    def results(arrays: list[Any], offsets: list[int]) -> list[Any]:
        arrays = [*arrays, torch.tensor(offsets, dtype=torch.int32, device="cuda")]
        torch.cuda.synchronize()
        q, k, v, dout, cu = (cupy.from_dlpack(x) for x in arrays) if library == "cupy" else arrays
        options = {"window_size": (40, 0)}  # of the long sequence little is to be computed
        with nan_memory():
            out, lse, _ = cupyflash.attention_varlen(q, k, v, cu, return_lse=True, **options)
            grads = cupyflash.attention_backward(dout, q, k, v, out, lse, cu_seqlens_q=cu, **options)
        return [torch.from_dlpack(x)[-last:].double() for x in (out, grads.dq, grads.dk, grads.dv)]

    found, alone = results(big, [0, 10, tokens - last, tokens]), results(small, [0, last])
    for name, x, want in zip(("out", "dq", "dk", "dv"), found, alone, strict=True):
        assert torch.allclose(x, want, rtol=4e-3, atol=4e-3), name


def measured(torch: Any, call: Any) -> tuple[Any, int]:
    """What a call returns, and how many bytes more than that it had at a time."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    given = sum(x.numel() * x.element_size() for x in result if x is not None)
    return result, torch.cuda.max_memory_allocated() - before - given


@chosen
def test_forward_and_backward_of_128k_tokens(torch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The extra memory grows with S, where the scores grow with its square. Some rows of the gradients against float64."""
    s, heads, d = 2**17, 16, 128
    q, k, v, dout = (torch.randn(1, s, heads, d, dtype=torch.bfloat16, device="cuda") for _ in range(4))
    forward, extra_forward = measured(torch, lambda: cupyflash.attention(q, k, v, causal=True, return_lse=True))
    rows = heads * s
    extra, bounds = {}, {False: rows * (3 * 4 + 4 * d), True: rows * 3 * 4}  # LSE, delta and a reference of each row; sums of dq in float32
    heads_exact = {head: sampled_gradients(torch, *(x[0, :, head] for x in (dout, q, k, v))) for head in (0, heads - 1)}
    arrays = dout, q, k, v, forward.out, forward.lse
    for deterministic in (True, False):
        backward = functools.partial(cupyflash.attention_backward, *arrays, causal=True, deterministic=deterministic)
        grads, extra[deterministic] = measured(torch, backward)
        for head, (rows_exact, keys_exact) in heads_exact.items():
            for i, exact in rows_exact.items():
                close(grads.dq[0, i, head], exact, f"dq of row {i}, head {head}")
            for j, (dk, dv) in keys_exact.items():
                close(grads.dk[0, j, head], dk, f"dk of key {j}, head {head}")
                close(grads.dv[0, j, head], dv, f"dv of key {j}, head {head}")
    sizes = [f"{n / 2**30:.3f}" for n in (extra_forward, extra[False], extra[True], heads * s * s * 2)]
    with capsys.disabled():
        sys.stdout.write(
            f"\nB=1 S=131072 H=16 D=128 bf16 causal, GiB beside inputs and results: forward {sizes[0]}, backward {sizes[1]}, "
            f"deterministic {sizes[2]}; S x S scores of 2 bytes would have {sizes[3]}\n"
        )
    assert extra_forward <= 1 << 20
    assert all(extra[deterministic] <= 1.1 * bound for deterministic, bound in bounds.items())


def sampled_gradients(torch: Any, dout: Any, q: Any, k: Any, v: Any) -> tuple[dict[int, Any], dict[int, tuple[Any, Any]]]:
    """dq of some rows, and dk and dv of some keys, of one head (S, D) under a causal mask, by the formula in float64: a block of rows at a
    time, each of which some of the keys need."""
    s, d = q.shape
    chosen_rows, chosen_keys = (1000, s // 2 - 1, s // 2, s - 1), (0, 127, 128, s // 2 + 5, s - 300)
    dout, q, k, v = (x.double() for x in (dout, q, k, v))
    columns = torch.arange(s, device=q.device)
    sampled = torch.tensor(chosen_keys, device=q.device)
    dq, dk, dv = {}, 0, 0
    for first in range(0, s, 2048):
        rows, end = slice(first, first + 2048), first + 2048
        scores = (q[rows] @ k[:end].T).mul_(1 / math.sqrt(d))
        scores.masked_fill_(columns[:end] > columns[rows, None], -torch.inf)
        weights = torch.softmax(scores, -1)
        del scores
        delta = (dout[rows] * (weights @ v[:end])).sum(-1, keepdim=True)
        seen = sampled[sampled < end]
        some = torch.zeros(2048, len(sampled), dtype=torch.float64, device=q.device)
        some[:, : len(seen)] = weights[:, seen]
        ds = some * (dout[rows] @ v[sampled].T - delta) / math.sqrt(d)
        dv, dk = dv + some.T @ dout[rows], dk + ds.T @ q[rows]
        for i in chosen_rows:
            if first <= i < end:
                r = i - first
                dq[i] = (weights[r] * (v[:end] @ dout[i] - delta[r])) @ k[:end] / math.sqrt(d)
    return dq, {j: (dk[n], dv[n]) for n, j in enumerate(chosen_keys)}
