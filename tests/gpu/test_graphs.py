"""Calls inside the capture of a CUDA graph: replays compute what the arrays hold then, and what cannot be captured is refused."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed; pip install 'cupyflash[cuda13]'")

from on_gpu import LIBRARIES, TORCH, Move, few_sms  # noqa: E402

import cupyflash  # noqa: E402
from cupyflash import jit  # noqa: E402

pytestmark = pytest.mark.gpu

SHAPE = (2, 300, 4, 64)


class Graph:
    """A graph of torch or of CuPy around one function."""

    def __init__(self, library: str) -> None:
        self.library = library
        if library == "torch":
            torch = pytest.importorskip("torch", reason=TORCH)
            self.graph: Any = torch.cuda.CUDAGraph()
        else:
            self.stream = cupy.cuda.Stream(non_blocking=True)

    def capture(self, function: Any) -> Any:
        if self.library == "torch":
            import torch

            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # where the call is refused
                with torch.cuda.graph(self.graph):
                    return function()
        cupy.cuda.runtime.deviceSynchronize()
        with self.stream:
            self.stream.begin_capture()
            try:
                return function()
            finally:
                self.graph = self.stream.end_capture()

    def replay(self) -> None:
        if self.library == "torch":
            self.graph.replay()
        else:
            self.graph.launch(self.stream)
        cupy.cuda.runtime.deviceSynchronize()


def overwrite(move: Move, target: Any, values: np.ndarray) -> None:
    (source,) = move(values)
    if move.library == "torch":
        target.copy_(source)
    else:
        target[...] = source
    cupy.cuda.runtime.deviceSynchronize()


def random(rng: np.random.Generator) -> list[np.ndarray]:
    return [*rng.standard_normal((3, *SHAPE)).astype(np.float16), rng.integers(1, SHAPE[1] + 1, SHAPE[0]).astype(np.int32)]


@pytest.mark.parametrize("given", ["out", "fresh"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_kf_092_a_replay_reads_what_the_arrays_hold_then(rng: np.random.Generator, library: str, given: str) -> None:
    """Inputs and used lengths alike: the first capture sees one key, later ones up to all."""
    move = Move(library)
    q, k, v, used = move(*random(rng)[:3], np.ones(SHAPE[0], np.int32))
    out = cupyflash.attention(q, k, v, causal=True, seqused_k=used)  # loads the kernel
    graph = Graph(library)
    target = out if given == "out" else None
    if library == "cupy" and given == "fresh":
        with graph.stream:  # CuPy's pool may not grow in a capture, and keeps its blocks by stream
            del out
            cupyflash.attention(q, k, v, causal=True, seqused_k=used)
    captured = graph.capture(lambda: cupyflash.attention(q, k, v, causal=True, seqused_k=used, out=target))
    assert (captured is target) == (given == "out")
    for _ in range(3):
        values = random(rng)
        for array, new in zip((q, k, v, used), values, strict=True):
            overwrite(move, array, new)
        overwrite(move, captured, np.full(SHAPE, np.nan, np.float16))
        graph.replay()
        fresh = move.attention(*values[:3], causal=True, seqused_k=values[3])
        assert move.back(captured).tobytes() == fresh.tobytes()
    everything = np.full(SHAPE[0], SHAPE[1], np.int32)  # from one key to all of them, as in KF-094
    overwrite(move, used, everything)
    graph.replay()
    assert move.back(captured).tobytes() == move.attention(*values[:3], causal=True, seqused_k=everything).tobytes()


def backward_inputs(rng: np.random.Generator, head_dim: int) -> list[np.ndarray]:
    """dout, q, k, v, out and lse."""
    dout, q, k, v = rng.standard_normal((4, 2, 300, 4, head_dim)).astype(np.float16)
    out, lse, _ = cupyflash.attention(q, k, v, causal=True, return_lse=True)
    return [dout, q, k, v, out, lse]


def same_gradients(move: Move, grads: Any, expected: Any, deterministic: bool) -> None:
    """dk and dv are added up in one order, and dq where that is asked for; else its sums may end in another rounding."""
    dq, dk, dv = (move.back(grad) for grad in grads[:3])
    assert (dk.tobytes(), dv.tobytes()) == (move.back(expected.dk).tobytes(), move.back(expected.dv).tobytes())
    room = 0 if deterministic else 2e-3
    np.testing.assert_allclose(dq.astype(np.float32), move.back(expected.dq).astype(np.float32), rtol=room, atol=room)


@pytest.mark.parametrize(("head_dim", "deterministic"), [(64, False), (128, False), (192, False), (128, True)])
@pytest.mark.parametrize("library", LIBRARIES)
def test_kf_092_a_replay_of_a_backward(rng: np.random.Generator, library: str, head_dim: int, deterministic: bool) -> None:
    """Sums of dq and the count of tiles begin at 0 in each replay: twice in a row, and again after each change of the arrays."""
    move = Move(library)
    options = {"causal": True, "deterministic": deterministic}
    arrays = move(*backward_inputs(rng, head_dim))
    graph = Graph(library)
    with few_sms(5):  # blocks that ask for tile after tile
        grads = cupyflash.attention_backward(*arrays, **options)  # loads the kernels
        results = dict(zip(("dq", "dk", "dv"), grads[:3], strict=True))
        if library == "cupy":
            with graph.stream:  # CuPy's pool may not grow in a capture, and keeps its blocks by stream
                cupyflash.attention_backward(*arrays, **options, **results)
        graph.capture(lambda: cupyflash.attention_backward(*arrays, **options, **results))
        for _ in range(3):
            for array, new in zip(arrays, backward_inputs(rng, head_dim), strict=True):
                overwrite(move, array, new)
            expected = cupyflash.attention_backward(*arrays, **options)
            for _ in range(2):
                for grad in results.values():
                    overwrite(move, grad, np.full(grad.shape, np.nan, np.float16))
                graph.replay()
                same_gradients(move, grads, expected, deterministic)


def test_kf_092_the_workspaces_of_a_captured_backward_are_nobody_elses(rng: np.random.Generator) -> None:
    """CuPy's pool keeps blocks by stream and size, and would give them away once the call has returned."""
    move, graph = Move("cupy"), Graph("cupy")
    arrays = move(*backward_inputs(rng, 128))
    with graph.stream:
        results = dict(zip(("dq", "dk", "dv"), cupyflash.attention_backward(*arrays, causal=True)[:3], strict=True))
    graph.capture(lambda: cupyflash.attention_backward(*arrays, causal=True, **results))
    with graph.stream:
        others = [cupy.full(num_bytes, 7, np.uint8) for num_bytes in (4, 9600, 2 * 4 * 320 * 128 * 4) for _ in range(8)]
    graph.replay()
    assert all(bool((other == 7).all()) for other in others)


FIRST = """
import cupyflash, torch
import numpy as np

q = torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.float16)
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        cupyflash.attention(q, q, q)
except cupyflash.StateError as e:
    assert "warmup" in str(e) and "capture" in str(e), e
else:
    raise SystemExit("the first call of all was captured")
cupyflash.warmup({"head_dim": 64, "dtype": "float16", "seqlen_q": 64, "num_heads_q": 2})
graph, out = torch.cuda.CUDAGraph(), torch.full_like(q, torch.nan)
with torch.cuda.graph(graph):
    cupyflash.attention(q, q, q, out=out)
graph.replay()
assert torch.equal(out, cupyflash.attention(q, q, q))
expected = cupyflash.reference.attention(*[q.cpu().numpy()] * 3)
np.testing.assert_allclose(out.cpu().numpy(), expected, rtol=2e-3, atol=2e-3)
print("done")
"""


def test_kf_093_the_first_call_of_a_process_inside_a_capture() -> None:
    pytest.importorskip("torch", reason=TORCH)
    run = subprocess.run((sys.executable, "-c", FIRST), capture_output=True, text=True, timeout=120)
    assert run.stdout == "done\n", run.stderr


@pytest.fixture
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By this process, whichever tests have run in it."""
    monkeypatch.setattr(jit, "_kernels", {})


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize("library", LIBRARIES)
def test_kf_093_a_kernel_that_is_not_loaded_yet(rng: np.random.Generator, library: str) -> None:
    """Calls of these shapes have not been made before, so none holds its kernels."""
    head_dim = {"cupy": 152, "torch": 136}[library]
    move = Move(library)
    values = rng.standard_normal((3, 1, 50, 2, head_dim)).astype(np.float16)
    arrays = move(*values)
    out, sink = arrays[0] * float("nan"), move(np.zeros(2, np.float32))[0]
    options: dict[str, Any] = {"softcap": 3.0, "sink": sink, "out": out}
    with pytest.raises(cupyflash.StateError, match=r"not loaded yet.*cupyflash\.warmup\(\.\.\.\).*before the capture"):
        Graph(library).capture(lambda: cupyflash.attention(*arrays, **options))
    cupyflash.warmup({"head_dim": head_dim, "softcap": 3.0, "sink": True, "seqlen_q": 50, "num_heads_q": 2})
    graph = Graph(library)
    graph.capture(lambda: cupyflash.attention(*arrays, **options))
    graph.replay()
    np.testing.assert_array_equal(move.back(out), move.attention(*values, softcap=3.0, sink=np.zeros(2, np.float32)))


@pytest.mark.usefixtures("nothing_is_loaded")
def test_kf_093_kernels_of_a_backward_that_are_not_loaded_yet(rng: np.random.Generator) -> None:
    move, graph = Move("torch"), Graph("torch")
    arrays = move(*backward_inputs(rng, 232))

    def backward() -> Any:
        return cupyflash.attention_backward(*arrays, causal=True, wrt=("k", "v"))

    with pytest.raises(cupyflash.StateError, match=r"not loaded yet.*before the capture"):
        graph.capture(backward)
    expected, graph = backward(), Graph("torch")
    captured = graph.capture(backward)
    graph.replay()
    assert [move.back(grad).tobytes() for grad in captured[1:3]] == [move.back(grad).tobytes() for grad in expected[1:3]]


@pytest.mark.parametrize("vector", ["alibi_slopes", "seqused_k", "seqused_q"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_numpy_vector_is_refused_in_a_capture(rng: np.random.Generator, library: str, vector: str) -> None:
    """Its values would be copied once, when they are captured, or the copy would spoil the capture."""
    move = Move(library)
    arrays = move(*random(rng)[:3])
    value = np.ones(SHAPE[2], np.float32) if vector == "alibi_slopes" else np.full(SHAPE[0], 9, np.int32)
    out = cupyflash.attention(*arrays, **{vector: value})
    with pytest.raises(cupyflash.StateError, match=rf"{vector} is a NumPy array.*capture"):
        Graph(library).capture(lambda: cupyflash.attention(*arrays, **{vector: value}, out=out))
    there = move(value)[0]
    graph = Graph(library)
    graph.capture(lambda: cupyflash.attention(*arrays, **{vector: there}, out=out))
    graph.replay()
    np.testing.assert_array_equal(move.back(out), move.back(cupyflash.attention(*arrays, **{vector: value})))
