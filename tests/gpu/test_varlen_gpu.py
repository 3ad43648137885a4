"""Every test of packed sequences, forward and backward, on the GPU: through CuPy and torch, by the kernels that calls choose, by those of
sm_80, and by those that take one warp a row. Besides: captured graphs whose offsets change."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / "unit")]
cupy = pytest.importorskip("cupy", reason="CuPy is not installed; pip install 'cupyflash[cuda13]'")

import test_known_failures_varlen  # noqa: E402
from on_gpu import LIBRARIES, Move, compile_ahead, host_backward, host_varlen, host_vjp, nan_memory, only, run_each_once  # noqa: E402
from test_known_failures_varlen import *  # noqa: E402, F403
from test_same_as_host import seeded as seeded_of_ways  # noqa: E402
from test_varlen import *  # noqa: E402, F403

import cupyflash  # noqa: E402
from cupyflash import UnsupportedError, device, launch, plan, variants  # noqa: E402

pytestmark = pytest.mark.gpu

_OLDER = ("fwd_sm80", "fwd_simple", "bwd_sm80", "bwd_simple")
KERNELS = {
    "chosen": (variants.FORWARD, variants.BACKWARD),
    "sm80": tuple(tuple(row for row in table if row.family in _OLDER) for table in (variants.FORWARD, variants.BACKWARD)),
    "simple": (variants.FORWARD[-1:], variants.BACKWARD[-1:]),
}
WAYS = {*LIBRARIES, *KERNELS}


def seeded(item: Any) -> np.random.Generator:
    return seeded_of_ways(item, WAYS)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    return seeded(request.node)


@contextlib.contextmanager
def tables(name: str) -> Iterator[None]:
    forward, backward = KERNELS[name]
    with only(*forward), only(*backward, table="BACKWARD"):
        yield


@pytest.fixture(autouse=True, params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(test_known_failures_varlen, "same", same_in_the_dtype)
    with tables(request.param), nan_memory():
        yield


def same_in_the_dtype(result: np.ndarray, expected: np.ndarray, rounding: float = 0) -> None:
    """A tiled kernel adds up dq in no fixed order, and computes what a NaN has touched again in another one."""
    room = 2 * test_known_failures_varlen.BOUNDS[result.dtype.name] if result.dtype.itemsize == 2 else max(rounding, 1e-5)
    np.testing.assert_allclose(result.astype(np.float64), expected.astype(np.float64), rtol=room, atol=room)


@pytest.fixture(autouse=True, params=LIBRARIES)
def on_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Move]:
    """The functions of packed sequences compute on the GPU for the length of a test."""
    move, calls, launches, parameters = Move(request.param), [], [], launch._parameters
    monkeypatch.setattr(launch, "_parameters", lambda *args: (launches.append(1), parameters(*args))[1])

    def moved(host: Any, there: Any) -> Any:
        @functools.wraps(host)
        def call(*arrays: Any, **options: Any) -> Any:
            result = there(*arrays, **options)
            calls.append(1)
            return result

        return call

    monkeypatch.setattr(cupyflash, "attention_varlen", moved(host_varlen, move.attention_varlen))
    monkeypatch.setattr(cupyflash, "attention_backward", moved(host_backward, move.attention_backward))
    monkeypatch.setattr(cupyflash, "attention_vjp", moved(host_vjp, move.attention_vjp))
    yield move
    assert launches or not calls, "no call launched anything: they may have run on the host"


@pytest.fixture(scope="module", autouse=True)
def kernels(request: pytest.FixtureRequest) -> None:
    """Compile what the tests here will launch; which kernels is learnt by running each test once on the host."""
    problems: dict[str, dict[Any, None]] = {"forward": {}, "backward": {}}

    def noting(name: str, choose: Any) -> Any:
        return lambda problem, spec: (problems[name].setdefault(problem), choose(problem, spec))[1]

    with tables("chosen"), pytest.MonkeyPatch.context() as patch:
        for name in problems:
            patch.setattr(plan, name, noting(name, getattr(plan, name)))
        run_each_once(request, seeded)
    found = set()
    for way in KERNELS:
        with tables(way):
            for name, asked in problems.items():
                for problem in asked:
                    with contextlib.suppress(UnsupportedError):
                        found |= {step.variant for step in getattr(plan, name)(problem, device.query(0)).steps}
    compile_ahead(found)


def test_a_replayed_graph_reads_new_offsets(on_gpu: Move, rng: np.random.Generator) -> None:
    """Offsets and inputs change in the buffers of a captured forward and backward: replays give what fresh calls give."""
    tokens, mixes = 600, [[0, 100, 350, 350, 600], [0, 0, 7, 599, 600], [5, 5, 5, 300, 500]]
    host = [rng.standard_normal((tokens, 4, 64)).astype(np.float16) for _ in range(4)]
    q, k, v, dout = on_gpu(*host)
    (cu,) = on_gpu(np.array(mixes[0], np.int32))

    def call() -> list[Any]:
        out, lse, _ = host_varlen(q, k, v, cu, causal=True, return_lse=True)
        grads = host_backward(dout, q, k, v, out, lse, causal=True, cu_seqlens_q=cu, deterministic=True)
        return [out, lse, *grads[:3]]

    call()  # compiles
    if on_gpu.library == "torch":
        import torch

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = call()
        replay = graph.replay
    else:
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            results = call()
            graph = stream.end_capture()

        def replay() -> None:
            graph.launch(stream)
            stream.synchronize()

    for mix in mixes:
        new = on_gpu(*(rng.standard_normal(x.shape).astype(x.dtype) for x in host), np.array(mix, np.int32))
        for old, x in zip((q, k, v, dout, cu), new, strict=True):
            old[...] = x
        cupy.cuda.runtime.deviceSynchronize()
        replay()
        cupy.cuda.runtime.deviceSynchronize()
        for replayed, fresh in zip(results, call(), strict=True):
            assert on_gpu.back(replayed).tobytes() == on_gpu.back(fresh).tobytes(), mix
