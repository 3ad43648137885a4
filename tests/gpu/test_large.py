"""More than 2^31 elements: every offset in an array is 64 bits wide. The arrays are made on the GPU, by torch; 13 GB at the most."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed; pip install 'cupyflash[cuda13]'")

from on_gpu import TORCH, Move, only  # noqa: E402

import cupyflash  # noqa: E402
from cupyflash import variants  # noqa: E402

pytestmark = pytest.mark.gpu

KERNELS = {"chosen": variants.FORWARD, "fwd_simple": tuple(row for row in variants.FORWARD if row.family == "fwd_simple")}


@pytest.fixture(autouse=True, params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Iterator[None]:
    with only(*KERNELS[request.param]):
        yield


@pytest.fixture
def torch() -> Iterator[Any]:
    torch = pytest.importorskip("torch", reason=TORCH)
    free, _ = torch.cuda.mem_get_info()
    if free < 16e9:
        pytest.skip(f"needs 16 GB of free GPU memory, there are {free / 1e9:.0f}")
    torch.manual_seed(0)
    yield torch
    torch.cuda.empty_cache()


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
