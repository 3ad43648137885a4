"""Calls from many threads, and from processes made by fork."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed; pip install 'cupyflash[cuda13]'")

from on_gpu import LIBRARIES, TORCH, Move, agrees, few_sms  # noqa: E402

import cupyflash  # noqa: E402
from cupyflash import jit  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("library", LIBRARIES)
def test_kf_097_threads_agree_and_each_kernel_is_loaded_once(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    """8 threads that have never touched CUDA, all at kernels that nobody has loaded; nothing else here has these head dims and options."""
    head_dims = {"cupy": (144, 160, 192, 208), "torch": (176, 224, 240, 256)}[library]
    move, softcap = Move(library), 7.0
    values = {d: rng.standard_normal((3, 1, 70, 2, d)).astype(np.float16) for d in head_dims}
    arrays = {d: move(*x) for d, x in values.items()}
    cupy.cuda.runtime.deviceSynchronize()
    loaded: collections.Counter[Any] = collections.Counter()
    load, start = jit._load, threading.Barrier(8)

    def counted(variant: Any, *rest: Any) -> Any:
        loaded[variant.name] += 1
        return load(variant, *rest)

    def calls(n: int) -> dict[int, Any]:
        start.wait()
        order = head_dims[n % 4 :] + head_dims[: n % 4]
        return {d: move.back(cupyflash.attention(*arrays[d], softcap=softcap)) for d in order}

    monkeypatch.setattr(jit, "_load", counted)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(calls, range(8)))
    assert sorted(loaded.values()) == [1] * 4, loaded
    for d in head_dims:
        agrees(move, *values[d], name=f"D={d}", softcap=softcap)
        alone = move.attention(*values[d], softcap=softcap)
        assert {result[d].tobytes() for result in results} == {alone.tobytes()}


@pytest.mark.parametrize("library", LIBRARIES)
def test_kf_097_a_first_call_in_a_thread_that_has_no_context(rng: np.random.Generator, library: str) -> None:
    """The driver encodes no tensor map there; nothing else here has this length."""
    move, values = Move(library), rng.standard_normal((4, 1, 83, 2, 64)).astype(np.float16)

    def call() -> tuple[Any, ...]:
        q, k, v, dout = move(*values)
        out, lse, _ = cupyflash.attention(q, k, v, return_lse=True)
        return (*map(move.back, (out, *cupyflash.attention_backward(dout, q, k, v, out, lse)[:3])),)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        there = pool.submit(call).result()
    assert [x.tobytes() for x in there] == [x.tobytes() for x in call()]


@pytest.mark.parametrize("library", LIBRARIES)
def test_kf_097_four_threads_of_two_hundred_calls(rng: np.random.Generator, library: str) -> None:
    """Each thread's parameters are its own: with shared ones a call would read another's shapes and addresses."""
    move = Move(library)
    cases = [move(*rng.standard_normal((3, 1, 20 + 30 * n, 2, 32 * (n + 1))).astype(np.float16)) for n in range(4)]
    expected = [move.back(cupyflash.attention(*arrays, causal=True)) for arrays in cases]
    start = threading.Barrier(4)

    def calls(n: int) -> list[Any]:
        start.wait()
        return [cupyflash.attention(*cases[(n + turn) % 4], causal=True) for turn in range(200)]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(calls, range(4)))
    cupy.cuda.runtime.deviceSynchronize()
    for n, outs in enumerate(results):
        for turn, out in enumerate(outs):
            assert move.back(out).tobytes() == expected[(n + turn) % 4].tobytes(), (n, turn)


def stream_of(library: str) -> contextlib.AbstractContextManager[Any]:
    """A new stream of the library as the current one of this thread."""
    if library == "cupy":
        stream: contextlib.AbstractContextManager[Any] = cupy.cuda.Stream(non_blocking=True)
        return stream
    torch = pytest.importorskip("torch", reason=TORCH)
    return torch.cuda.stream(torch.cuda.Stream())  # type: ignore[no-any-return]


@pytest.mark.parametrize("library", LIBRARIES)
def test_kf_097_backward_of_eight_threads_on_streams_of_their_own(rng: np.random.Generator, library: str) -> None:
    """Sums of dq and counts of tiles are each call's own."""
    move, cases = Move(library), []
    for n in range(4):
        dout, q, k, v = rng.standard_normal((4, 1, 150 + 100 * n, 4, (64, 128, 64, 192)[n])).astype(np.float16)
        out, lse, _ = cupyflash.attention(q, k, v, causal=True, return_lse=True)
        cases.append(move(dout, q, k, v, out, lse))
    start = threading.Barrier(8)

    def calls(n: int) -> list[Any]:
        start.wait()
        with stream_of(library):
            grads = [cupyflash.attention_backward(*cases[(n + turn) % 4], causal=True) for turn in range(40)]
            return [[move.back(grad) for grad in each[:3]] for each in grads]

    with few_sms(3):
        expected = [[move.back(grad) for grad in cupyflash.attention_backward(*arrays, causal=True)[:3]] for arrays in cases]
        cupy.cuda.runtime.deviceSynchronize()
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            results = list(pool.map(calls, range(8)))
    for n, turns in enumerate(results):
        for turn, (dq, dk, dv) in enumerate(turns):
            want = expected[(n + turn) % 4]
            assert (dk.tobytes(), dv.tobytes()) == (want[1].tobytes(), want[2].tobytes()), (n, turn)
            np.testing.assert_allclose(dq.astype(np.float32), want[0].astype(np.float32), rtol=2e-3, atol=2e-3, err_msg=f"{n} {turn}")


def child(script: str) -> str:
    """What a script printed in a process of its own; its errors are the message."""
    run = subprocess.run((sys.executable, "-W", "ignore", "-c", script), capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout


MAKE = {
    "cupy": "import cupy\nmake = lambda n: cupy.ones((1, n, 2, 64), cupy.float16)",
    "torch": "import torch\nmake = lambda n: torch.ones(1, n, 2, 64, dtype=torch.float16, device='cuda')",
}

BEFORE = """
import os, sys
import cupyflash
assert not {{"cupy", "torch", "jax"}} & set(sys.modules)
pid = os.fork()
if pid == 0:
    try:
        {make}
        out = cupyflash.attention(make(300), make(300), make(300))
        assert bool((out == 1).all())
        os._exit(0)
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
assert os.waitpid(pid, 0)[1] == 0
print("done")
"""

AFTER = """
import os
import cupyflash
{make}
x = make(300)
expected = cupyflash.attention(x, x, x, return_lse=True)
pid = os.fork()
if pid == 0:
    try:
        for options in ({{}}, {{"return_lse": True}}, {{"out": expected.out}}, {{"causal": True}}):
            try:
                cupyflash.attention(x, x, x, **options)
            except cupyflash.StateError as e:
                assert isinstance(e, RuntimeError) and "fork" in str(e) and "spawn" in str(e), e
            else:
                raise AssertionError(options)
        os._exit(0)
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
assert os.waitpid(pid, 0)[1] == 0
assert bool((cupyflash.attention(x, x, x) == 1).all())
print("done")
"""


@pytest.mark.parametrize("library", LIBRARIES)
def test_kf_098_fork_before_the_first_call(library: str) -> None:
    if library == "torch":
        pytest.importorskip("torch", reason=TORCH)
    assert child(BEFORE.format(make=MAKE[library].replace("\n", "\n        "))) == "done\n"


@pytest.mark.parametrize("library", LIBRARIES)
def test_kf_099_fork_after_the_first_call(library: str) -> None:
    """Whatever the child would need, memory for a result or a new kernel, the first thing that it hears is what is wrong."""
    if library == "torch":
        pytest.importorskip("torch", reason=TORCH)
    assert child(AFTER.format(make=MAKE[library])) == "done\n"
