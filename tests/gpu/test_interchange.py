"""Arrays in and out on a GPU: whoever made them, the result is the caller's, of the same bits, and nothing is kept."""

from __future__ import annotations

import ctypes
import gc
import itertools
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / "unit")]
cupy = pytest.importorskip("cupy", reason="CuPy is not installed; pip install 'cupyflash[cuda13]'")

from judge import judge, standard_attention  # noqa: E402
from on_gpu import LIBRARIES, TORCH, Move  # noqa: E402
from test_arrays import NO_JAX, DLManagedTensor, DLTensor  # noqa: E402

import cupyflash  # noqa: E402
from cupyflash import ArgumentError  # noqa: E402

pytestmark = pytest.mark.gpu

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
SQ, SK = 70, 130


def make(rng: np.random.Generator, dtype: Any = np.float16) -> tuple[Any, ...]:
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in ((2, SQ, 4, 64), (2, SK, 2, 64), (2, SK, 2, 64)))


def every_option(rng: np.random.Generator) -> dict[str, Any]:
    return {
        "causal": True,
        "window_size": (90, 0),
        "softcap": 20.0,
        "bias": rng.standard_normal((4, SQ, SK)).astype(np.float32),
        "mask": rng.random((2, 1, 1, SK)) < 0.8,
        "alibi_slopes": rng.uniform(0.01, 0.3, (2, 4)).astype(np.float32),
        "sink": rng.standard_normal(4).astype(np.float32),
        "seqused_k": np.array([SK, 77], np.int32),
    }


@pytest.mark.parametrize("options", ["none", "causal", "every"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cupy_and_torch_get_the_same_bits_and_the_host_agrees(rng: np.random.Generator, dtype: str, options: str) -> None:
    q, k, v = make(rng, DTYPES[dtype])
    given: dict[str, Any] = {"none": {}, "causal": {"causal": True}, "every": every_option(rng)}[options]
    results = [Move(library).attention(q, k, v, **given, return_lse=True) for library in LIBRARIES]
    for one, other in zip(results[0][:2], results[1][:2], strict=True):
        assert one.dtype == other.dtype
        assert one.tobytes() == other.tobytes()
    on_host = cupyflash.attention(q, k, v, **given, return_lse=True)
    expected = cupyflash.reference.attention(q, k, v, **given, return_lse=True)
    standard = standard_attention(q, k, v, dtype=q.dtype, **given)
    for result in (results[0], on_host):
        judge(result.out, expected[0], standard[0], dtype=q.dtype, name=dtype)
        judge(result.lse, expected[1], standard[1], dtype=q.dtype, name=dtype, kind="lse")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("library", LIBRARIES)
def test_kf_079_the_result_is_as_q_is(rng: np.random.Generator, library: str, dtype: str) -> None:
    move = Move(library)
    q, k, v = move(*make(rng, DTYPES[dtype]))
    out, lse, _ = cupyflash.attention(q, k, v, return_lse=True)
    assert type(out) is type(lse) is type(q)
    assert out.dtype == q.dtype
    assert str(lse.dtype).removeprefix("torch.") == ("float64" if dtype == "float64" else "float32")
    assert (tuple(out.shape), tuple(lse.shape)) == ((2, SQ, 4, 64), (2, 4, SQ))
    assert out.device == lse.device == q.device
    wide = cupyflash.attention(q, k, v, out_dtype="float32")
    assert str(wide.dtype).removeprefix("torch.") == "float32"
    target = wide * float("nan")
    assert cupyflash.attention(q, k, v, out=target, out_dtype="float32") is target
    assert bool((target == wide).all())


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_kf_032_layout_and_storage_order_are_qs(rng: np.random.Generator, library: str, layout: str) -> None:
    move = Move(library)
    arrays = make(rng)
    expected = move.attention(*arrays)
    axes = ["bshd".index(axis) for axis in layout]
    for order in ("bshd", "bhsd", "sbhd"):
        stored = ["bshd".index(axis) for axis in order]
        views = [np.ascontiguousarray(x.transpose(stored)).transpose([stored.index(a) for a in axes]) for x in arrays]
        q, k, v = move(*views)
        out = cupyflash.attention(q, k, v, layout=layout)
        np.testing.assert_array_equal(move.back(out), expected.transpose(axes))
        assert (out.stride() if library == "torch" else out.strides) == (q.stride() if library == "torch" else q.strides)


# --- nothing is kept -------------------------------------------------------------------------------------------------------------------


def test_kf_083_ten_thousand_calls_keep_nothing(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch", reason=TORCH)

    def calls(count: int) -> None:
        for n in range(count):
            q, k, v = torch.empty(3, 1, 16 + n % 7, 2, 64, dtype=torch.float16, device="cuda")
            cupyflash.attention(q, k, v, causal=True, return_lse=n % 2 == 0)

    def state() -> dict[str, int]:
        torch.cuda.synchronize()
        gc.collect()
        pool = cupy.get_default_memory_pool()
        return {"torch": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved(), "cupy": pool.total_bytes()}

    calls(100)
    before, blocks = state(), sys.getallocatedblocks()
    calls(10_000)
    assert state() == before
    assert sys.getallocatedblocks() - blocks < 1000  # a leak of one object a call is 10,000


@pytest.mark.parametrize("order", list(itertools.permutations(("input", "result", "other"))), ids="-".join)
@pytest.mark.parametrize("library", LIBRARIES)
def test_kf_084_arrays_are_freed_once_in_any_order(rng: np.random.Generator, library: str, order: tuple[str, ...]) -> None:
    """An array of one library, the result, and another library's view of that: whichever goes first, the others keep their memory."""
    torch = pytest.importorskip("torch", reason=TORCH)
    values = make(rng)[1]
    expected = Move(library).attention(values, values, values)

    def held() -> int:
        gc.collect()
        return int(cupy.get_default_memory_pool().used_bytes() + torch.cuda.memory_allocated())

    before = held()
    alive = {"input": cupy.asarray(values) if library == "cupy" else torch.from_numpy(values).cuda()}
    alive["result"] = cupyflash.attention(*[alive["input"]] * 3)
    alive["other"] = torch.from_dlpack(alive["result"]) if library == "cupy" else cupy.from_dlpack(alive["result"])
    assert held() > before
    for name in order:
        del alive[name]
        filler = [
            torch.full((2, SK, 2, 64), torch.nan, dtype=torch.float16, device="cuda") for _ in range(3)
        ]  # what was freed is overwritten
        filler += [cupy.full((2, SK, 2, 64), cupy.nan, cupy.float16) for _ in range(3)]
        for left, array in alive.items():
            on_host = cupy.asnumpy(array) if isinstance(array, cupy.ndarray) else array.cpu().numpy()
            np.testing.assert_array_equal(on_host, values if left == "input" else expected)
        del filler
        array = None
    assert held() == before


# --- other libraries read our results, and we theirs -----------------------------------------------------------------------------------


def jax_with_a_gpu() -> Any:
    jax = pytest.importorskip("jax", reason=NO_JAX)
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX has no GPU; pip install 'jax[cuda13]'")
    return jax


@pytest.mark.parametrize("consumer", ["cupy", "torch", "jax"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_kf_086_results_go_to_any_library(rng: np.random.Generator, library: str, consumer: str) -> None:
    move = Move(library)
    arrays = make(rng, np.float32)
    out = cupyflash.attention(*move(*arrays))
    if consumer == "jax":
        taken = np.asarray(jax_with_a_gpu().dlpack.from_dlpack(out))
    elif consumer == "torch":
        taken = pytest.importorskip("torch", reason=TORCH).from_dlpack(out).cpu().numpy()
    else:
        taken = cupy.asnumpy(cupy.from_dlpack(out))
    np.testing.assert_array_equal(taken, move.back(out))


class Recorder:
    """A library that nobody knows: it hands out a CuPy array's capsules and notes for which stream they were asked."""

    def __init__(self, array: Any, asked: list[Any]) -> None:
        self.array, self.asked = array, asked

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, stream: Any = "nothing", max_version: Any = None, dl_device: Any = None, copy: Any = None) -> Any:
        self.asked.append(stream)
        return self.array.__dlpack__(stream=stream, max_version=max_version)


class OldRecorder(Recorder):
    def __dlpack__(self, stream: Any = "nothing") -> Any:  # type: ignore[override]
        self.asked.append(stream)
        return self.array.__dlpack__(stream=stream)


@pytest.mark.parametrize("producer", [Recorder, OldRecorder])
@pytest.mark.parametrize("on", ["default", "current", "given"])
def test_kf_087_088_producers_learn_the_stream(rng: np.random.Generator, producer: type[Recorder], on: str) -> None:
    """1 is the legacy default stream and 0 is no stream in DLPack's words; data is made ready for the stream that reads it."""
    asked: list[Any] = []
    values = make(rng)
    expected = Move("cupy").attention(*values)
    arrays = [producer(x, asked) for x in Move("cupy")(*values)]
    side = cupy.cuda.Stream(non_blocking=True)
    with side if on == "current" else cupy.cuda.Stream.null:
        out = cupyflash.attention(*arrays, stream=side if on == "given" else None)
    side.synchronize()
    assert type(out) is cupy.ndarray
    np.testing.assert_array_equal(cupy.asnumpy(out), expected)
    assert [type(stream) for stream in asked[-3:]] == [int] * 3
    assert set(asked[-3:]) == {1 if on == "default" else side.ptr}


class HandMade:
    """Capsules made by hand of a CuPy array: strides left NULL, and their release counted."""

    def __init__(self, array: Any) -> None:
        self.array, self.released = array, 0

        @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        def release(_: Any) -> None:
            self.released += 1

        self.release = release
        self.shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        code = 4 if array.dtype == ml_dtypes.bfloat16 else 2
        kind = (ctypes.c_uint8 * 4)(code, 8 * array.itemsize, 1, 0)
        tensor = DLTensor(array.data.ptr, (ctypes.c_int32 * 2)(2, array.device.id), array.ndim, kind, self.shape, None, 0)
        self.managed = DLManagedTensor(tensor, None, ctypes.cast(release, ctypes.c_void_p))

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self.array.device.id)

    def __dlpack__(self, stream: Any = None) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.managed), b"dltensor", None)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_kf_080_null_strides_are_row_major(rng: np.random.Generator, dtype: str) -> None:
    values = make(rng, DTYPES[dtype])
    producers = [HandMade(x) for x in Move("cupy")(*values)]
    out = cupyflash.attention(*producers)
    np.testing.assert_array_equal(Move("cupy").back(out), Move("cupy").attention(*values))
    gc.collect()
    assert [producer.released for producer in producers] == [1, 1, 1]


class CudaInterface:
    def __init__(self, array: Any, read_only: bool) -> None:
        self.array = array
        self.__cuda_array_interface__ = array.__cuda_array_interface__ | {"data": (array.data.ptr, read_only)}


@pytest.mark.parametrize("read_only", [False, True])
def test_kf_081_cuda_array_interface(rng: np.random.Generator, read_only: bool) -> None:
    values = make(rng)
    arrays = Move("cupy")(*values)
    out = cupyflash.attention(*(CudaInterface(x, read_only) for x in arrays))
    assert type(out) is cupy.ndarray
    np.testing.assert_array_equal(cupy.asnumpy(out), Move("cupy").attention(*values))
    with pytest.raises(ArgumentError, match="out is a CudaInterface: results are written into arrays of CuPy, torch and NumPy only"):
        cupyflash.attention(*(CudaInterface(x, read_only) for x in arrays), out=CudaInterface(out, read_only))


def test_kf_082_gradients_are_never_lost_silently(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch", reason=TORCH)
    q, k, v = Move("torch")(*make(rng, np.float32))
    expected = cupyflash.attention(q, k, v)
    q.requires_grad_()
    out = cupyflash.attention(q, k, v)  # tests/gpu/test_torch_gpu.py has its gradients
    assert torch.equal(out, expected)
    assert out.requires_grad
    with torch.no_grad():
        assert torch.equal(cupyflash.attention(q, k, v), expected)
    assert torch.equal(cupyflash.attention(q.detach(), k, v), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kf_079_jax_arrays_on_a_gpu(rng: np.random.Generator, dtype: str) -> None:
    jax = jax_with_a_gpu()
    q, k, v = (jax.numpy.asarray(x, dtype=dtype) for x in make(rng, np.float32))
    out = cupyflash.attention(q, k, v)
    assert isinstance(out, jax.Array)
    assert out.dtype == dtype
    assert out.devices() == q.devices()
    given = [np.asarray(x) for x in (q, k, v)]
    judge(out, cupyflash.reference.attention(*given), standard_attention(*given, dtype=given[0].dtype)[0], dtype=given[0].dtype, name=dtype)


def test_libraries_do_not_mix(rng: np.random.Generator) -> None:
    q, k, v = make(rng)
    with pytest.raises(ArgumentError, match=r"k is a torch array and q a cupy one"):
        cupyflash.attention(*Move("cupy")(q), *Move("torch")(k, v))
    with pytest.raises(ArgumentError, match="k is a numpy array and q a torch one"):
        cupyflash.attention(*Move("torch")(q), k, v)
