"""Work is queued on the caller's stream, with the caller's allocator, and the call waits for nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed; pip install 'cupyflash[cuda13]'")

from on_gpu import LIBRARIES, TORCH, Move, spin  # noqa: E402

import cupyflash  # noqa: E402

pytestmark = pytest.mark.gpu

SHAPE = (2, 200, 4, 64)
BUSY_MS = 100  # the host needs 0.03 for a call, and some tens at the most for all that a test does meanwhile


class Side:
    """A stream of CuPy or torch that waits for no other, and what is done on it."""

    def __init__(self, library: str) -> None:
        self.library = library
        if library == "torch":
            torch = pytest.importorskip("torch", reason=TORCH)
            self.stream = torch.cuda.Stream()
            self.current: Callable[[], Any] = lambda: torch.cuda.stream(self.stream)
            self.handle, self.synchronize = self.stream.cuda_stream, self.stream.synchronize
        else:
            self.stream = cupy.cuda.Stream(non_blocking=True)
            self.current = lambda: self.stream
            self.handle, self.synchronize = self.stream.ptr, self.stream.synchronize

    def busy(self) -> bool:
        return not (self.stream.query() if self.library == "torch" else self.stream.done)


def copy(target: Any, source: Any) -> None:
    """On the current stream of their library."""
    if isinstance(target, cupy.ndarray):
        target[...] = source
    else:
        target.copy_(source)


def inputs(rng: np.random.Generator, library: str) -> tuple[Move, list[Any], Any]:
    """(the way there, float16 arrays on the GPU, what attention makes of them); the kernels are loaded, so nothing waits for NVRTC."""
    move = Move(library)
    arrays = move(*rng.standard_normal((3, *SHAPE)).astype(np.float16))
    expected = move.back(cupyflash.attention(*arrays))
    spin(0, 1)
    cupy.cuda.runtime.deviceSynchronize()
    return move, arrays, expected


@pytest.mark.parametrize("library", LIBRARIES)
def test_kf_090_the_current_stream_orders_the_call_after_what_makes_its_inputs(rng: np.random.Generator, library: str) -> None:
    move, arrays, expected = inputs(rng, library)
    targets = [x * float("nan") for x in arrays]
    copy(targets[0], targets[0] * 1)  # CuPy compiles its kernel
    side = Side(library)
    cupy.cuda.runtime.deviceSynchronize()
    with side.current():
        spin(side.handle, BUSY_MS)
        for target, x in zip(targets, arrays, strict=True):
            copy(target, x)
        out = cupyflash.attention(*targets)
        assert side.busy(), "the call waited for the stream, or the stream did not spin"
    side.synchronize()
    np.testing.assert_array_equal(move.back(out), expected)


FORMS: dict[str, Callable[[Any, int], Any]] = {
    "stream": lambda stream, handle: stream,
    "handle": lambda stream, handle: handle,
    "protocol": lambda stream, handle: type("Stream", (), {"__cuda_stream__": lambda self: (0, handle)})(),
}


@pytest.mark.parametrize("of", LIBRARIES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_kf_090_stream_in_anyones_words(rng: np.random.Generator, library: str, form: str, of: str) -> None:
    """The current stream is another one, on which the call would read NaN."""
    move, arrays, expected = inputs(rng, library)
    targets = [x * float("nan") for x in arrays]
    out = targets[0] * 1
    side, own = Side(of), Side(library)
    cupy.cuda.runtime.deviceSynchronize()
    spin(side.handle, BUSY_MS)
    for target, x in zip(targets, arrays, strict=True):
        to, source = (a.data_ptr() if library == "torch" else a.data.ptr for a in (target, x))
        cupy.cuda.runtime.memcpyAsync(to, source, x.nbytes, cupy.cuda.runtime.memcpyDeviceToDevice, side.handle)
    with own.current():
        assert cupyflash.attention(*targets, out=out, stream=FORMS[form](side.stream, side.handle)) is out
    assert side.busy()
    side.synchronize()
    np.testing.assert_array_equal(move.back(out), expected)


@pytest.mark.parametrize("library", LIBRARIES)
def test_kf_089_inputs_freed_while_another_stream_still_reads_them(rng: np.random.Generator, library: str) -> None:
    """With `stream=` the library of the arrays does not know who reads them: a freed block would be handed out and overwritten at once."""
    move, arrays, expected = inputs(rng, library)
    side = Side(library)
    inputs_here = [x * 1 for x in arrays]  # allocated on the current stream
    nan = arrays[0] * float("nan")
    cupy.cuda.runtime.deviceSynchronize()
    spin(side.handle, BUSY_MS)
    out = cupyflash.attention(*inputs_here, stream=side.stream)
    del inputs_here
    filler = [nan * 1 for _ in range(8)]  # takes their place where they were let go
    assert side.busy()
    side.synchronize()
    np.testing.assert_array_equal(move.back(out), expected)
    del filler


@pytest.mark.parametrize("vector", [None, "alibi_slopes", "seqused_k"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_call_waits_for_nothing(rng: np.random.Generator, library: str, vector: str | None) -> None:
    """Nor does the copy of a small NumPy vector to the device."""
    values = {"alibi_slopes": rng.random(SHAPE[2]).astype(np.float32), "seqused_k": np.array([150, 90], np.int32)}
    options = {vector: values[vector]} if vector else {}
    move, arrays, _ = inputs(rng, library)
    expected = move.back(cupyflash.attention(*arrays, **options))
    side = Side(library)
    with side.current():
        cupyflash.attention(*arrays, **options)  # the side stream's share of the allocator
        side.synchronize()
        spin(side.handle, BUSY_MS)
        out = cupyflash.attention(*arrays, **options)
        assert side.busy()
    side.synchronize()
    np.testing.assert_array_equal(move.back(out), expected)


def used_by_torch() -> tuple[int, int]:
    torch = pytest.importorskip("torch", reason=TORCH)
    stats = torch.cuda.memory_stats()
    return int(stats["allocation.all.allocated"]), int(stats["allocated_bytes.all.current"])


def used_by_cupy() -> tuple[int, int, int]:
    pool = cupy.get_default_memory_pool()
    return pool.used_bytes(), pool.total_bytes(), pool.n_free_blocks()


@pytest.mark.parametrize("library", LIBRARIES)
def test_results_come_from_the_callers_allocator(rng: np.random.Generator, library: str) -> None:
    pytest.importorskip("torch", reason=TORCH)
    _, arrays, _ = inputs(rng, library)
    given = cupyflash.attention(*arrays, return_lse=True)  # its kernel is loaded
    of_torch, of_cupy = used_by_torch(), used_by_cupy()
    result = cupyflash.attention(*arrays, return_lse=True)
    out_bytes, lse_bytes = (np.prod(SHAPE) * 2, np.prod(SHAPE[:3]) * 4)
    if library == "torch":
        assert used_by_cupy() == of_cupy
        count, size = (after - before for before, after in zip(of_torch, used_by_torch(), strict=True))
        assert count == 2
    else:
        assert used_by_torch() == of_torch
        size = used_by_cupy()[0] - of_cupy[0]
    assert out_bytes + lse_bytes <= size <= out_bytes + lse_bytes + 2 * 512  # both round up to 512
    before = used_by_torch(), used_by_cupy()
    assert cupyflash.attention(*arrays, out=given.out) is given.out  # with out= nothing is allocated at all
    assert (used_by_torch(), used_by_cupy()) == before
    del result


def test_a_stream_that_is_none(rng: np.random.Generator) -> None:
    _, arrays, _ = inputs(rng, "cupy")
    with pytest.raises(cupyflash.ArgumentError, match="stream is a str: it must be a stream of CuPy or torch, a handle"):
        cupyflash.attention(*arrays, stream="default")
