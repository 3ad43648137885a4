"""How the host path runs: memory that does not grow with Sq x Sk, threads, the process's BLAS left as it was."""

from __future__ import annotations

import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import threadpoolctl

import cupyflash
from cupyflash import host, reference

F32 = np.float32


def long(rng: np.random.Generator, seqlen: int = 1100, heads: int = 2) -> list[Any]:
    """Long enough that threads are used."""
    q, k, v = rng.standard_normal((3, 1, seqlen, heads, 16)).astype(F32)
    assert heads * seqlen**2 > host._SERIAL
    return [q, k, v]


def blas_threads() -> list[int]:
    return [lib["num_threads"] for lib in threadpoolctl.threadpool_info() if lib["user_api"] == "blas"]


def peak_bytes(seqlen: int) -> int:
    q, k, v = np.zeros((3, 1, seqlen, 8, 64), F32)
    tracemalloc.start()
    try:
        cupyflash.attention(q, k, v, causal=True)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_extra_memory_at_4096_is_far_below_the_score_matrix() -> None:
    assert peak_bytes(4096) < 64 << 20  # the matrix alone: 512 MB


def test_extra_memory_grows_with_the_result_only() -> None:
    small, large = peak_bytes(2048), peak_bytes(8192)
    assert large - small < 2 * 6144 * 8 * 64 * 4  # twice the growth of out; the score matrix grows by 2 GB


@pytest.mark.parametrize("cpus", [1, 2, 5])
def test_results_do_not_depend_on_the_number_of_threads(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, cpus: int) -> None:
    arrays = long(rng)
    expected = cupyflash.attention(*arrays, causal=True)
    monkeypatch.setattr(host, "_num_cpus", lambda: cpus)
    with threadpoolctl.threadpool_limits(1, user_api="blas"):  # one CPU runs tiles in turn, with BLAS as it is
        out = cupyflash.attention(*arrays, causal=True)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_allclose(out, reference.attention(*arrays, causal=True), rtol=2e-5, atol=2e-5)


def test_blas_has_its_threads_back_after_the_call(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_num_cpus", lambda: 2)
    arrays = long(rng)
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        before = blas_threads()
        seen: list[list[int]] = []
        step = host.score_step

        def spy(*args: Any) -> Any:
            seen.append(blas_threads())
            return step(*args)

        monkeypatch.setattr(host, "score_step", spy)
        cupyflash.attention(*arrays)
        assert all(n == 1 for threads in seen for n in threads)
        assert blas_threads() == before

        def fails(*_: Any) -> None:
            raise MemoryError

        monkeypatch.setattr(host, "score_step", fails)
        with pytest.raises(MemoryError):
            cupyflash.attention(*arrays)
        assert blas_threads() == before


def test_calls_from_many_threads(rng: np.random.Generator) -> None:
    before = blas_threads()
    problems = [(long(rng, 1100 + 13 * n), {"causal": bool(n % 2)}) for n in range(6)]
    expected = [cupyflash.attention(*arrays, **options) for arrays, options in problems]
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda p: cupyflash.attention(*p[0], **p[1]), problems))
    for out, one in zip(results, expected, strict=True):
        np.testing.assert_allclose(out, one, rtol=1e-6, atol=1e-6)
    assert blas_threads() == before
