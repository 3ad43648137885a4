"""The edge: each library's arrays in, the same library's out, nothing copied, nothing imported; the device half on stand-ins."""

from __future__ import annotations

import ctypes
import math
import sys
import threading
import types
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError, DeviceError, ShapeError, UnsupportedError, arrays
from cupyflash.arrays import HOST, ArrayView

F32 = np.float32


def pair(rng: np.random.Generator, dtype: Any = F32) -> tuple[Any, Any, Any]:
    q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 6)))
    return q, k, v


# --- NumPy ---------------------------------------------------------------------------------------------------------------------------


def test_a_view_shares_the_memory() -> None:
    x = np.arange(48, dtype=F32).reshape(2, 3, 8)[:, 1:, ::2]
    view = arrays.view(x, "x")
    assert view == ArrayView(x.ctypes.data, (2, 2, 4), (24, 8, 2), "float32", HOST, "numpy", x)
    assert np.shares_memory(arrays.on_host(view), x)
    np.testing.assert_array_equal(arrays.on_host(view), x)


def test_kf_081_read_only_inputs_are_inputs_but_no_output(rng: np.random.Generator) -> None:
    q, k, v = pair(rng)
    expected = cupyflash.attention(q, k, v)
    for x in (q, k, v):
        x.flags.writeable = False
    np.testing.assert_array_equal(cupyflash.attention(q, k, v), expected)
    expected.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only: pass an array that can be written"):
        cupyflash.attention(q, k, v, out=expected)


class Annotated(np.ndarray):  # type: ignore[type-arg]
    pass


@pytest.mark.parametrize("wrap", [np.ma.asarray, lambda x: x.view(Annotated)])
def test_subclasses_are_refused(rng: np.random.Generator, wrap: Any) -> None:
    q, k, v = pair(rng)
    with pytest.raises(ArgumentError, match=r"k is a (MaskedArray|Annotated): subclasses of ndarray are not supported"):
        cupyflash.attention(q, wrap(k), v)


def test_strides_that_are_no_whole_elements() -> None:
    records = np.zeros((1, 4, 2, 8), np.dtype({"names": ["x"], "formats": ["f4"], "offsets": [0], "itemsize": 6}))
    with pytest.raises(ShapeError, match=r"q has strides of .* bytes for elements of 4"):
        arrays.view(records["x"], "q")


def test_out_may_not_touch_an_input(rng: np.random.Generator) -> None:
    q, k, v = pair(rng)
    with pytest.raises(ShapeError, match="out overlaps q in memory"):
        cupyflash.attention(q, q[:, :, :2], q[:, :, 2:], out=q)
    packed = rng.standard_normal((2, 5, 4, 4, 8)).astype(F32)  # interleaved with the inputs, but no element shared
    q, k, v, out = (packed[:, :, n] for n in range(4))
    expected = cupyflash.attention(q.copy(), k.copy(), v.copy())
    assert cupyflash.attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(out, expected)
    with pytest.raises(ShapeError, match=r"out has strides .*share"):
        cupyflash.attention(q, k, v, out=np.lib.stride_tricks.as_strided(expected.copy(), q.shape, (0, 128, 32, 4)))
    empty = np.broadcast_to(np.zeros((), F32), (2, 0, 4, 6)).copy()  # no element, so none is shared, whatever the strides
    arrays.check_out("out", empty, arrays.view(empty, "out")._replace(strides=(0, 0, 0, 0)), {})
    parts = rng.standard_normal((1, 3, 2, 8)).astype(F32), rng.standard_normal((1, 2, 3)).astype(F32)
    with pytest.raises(ShapeError, match=r"lse_out overlaps lses\[0\]"):
        cupyflash.merge_states([parts[0]], [parts[1]], lse_out=parts[1])


def test_storage_order() -> None:
    def order(shape: tuple[int, ...], axes: tuple[int, ...]) -> Any:
        stored = np.zeros([shape[a] for a in axes], F32)
        return arrays.storage_order(arrays.view(stored.transpose(np.argsort(axes)), "x"))

    assert order((2, 3, 4, 5), (0, 1, 2, 3)) is None
    assert order((2, 3, 4, 5), (0, 2, 1, 3)) == (0, 2, 1, 3)
    assert order((2, 3, 4, 5), (2, 1, 0, 3)) == (2, 1, 0, 3)
    assert order((2, 1, 4, 5), (0, 2, 1, 3)) is None  # an axis of one has no place
    assert arrays.storage_order(arrays.view(np.zeros((2, 3, 8, 5), F32)[:, :, ::2], "x")) is None


# --- any DLPack producer ---------------------------------------------------------------------------------------------------------------


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class DLManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class Producer:
    """A library that nobody knows, whose capsules are made by hand: strides left NULL, as DLPack allows for compact arrays."""

    def __init__(self, array: Any, code: int = 2) -> None:
        self.array = np.ascontiguousarray(array)
        shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        dtype = (ctypes.c_uint8 * 4)(code, 8 * array.itemsize, 1, 0)
        tensor = DLTensor(self.array.ctypes.data, (ctypes.c_int32 * 2)(1, 0), array.ndim, dtype, shape, None, 0)
        self.managed, self.shape = DLManagedTensor(tensor, None, None), shape

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, stream: Any = None) -> Any:  # KF-088: no max_version
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.managed), b"dltensor", None)


def test_kf_080_088_unknown_producers_with_null_strides(rng: np.random.Generator) -> None:
    q, k, v = pair(rng)
    out = cupyflash.attention(Producer(q), Producer(k), Producer(v))
    assert type(out) is np.ndarray
    np.testing.assert_array_equal(out, cupyflash.attention(q, k, v))


def test_kf_079_bfloat16_through_dlpack(rng: np.random.Generator) -> None:
    q, k, v = pair(rng, ml_dtypes.bfloat16)
    out = cupyflash.attention(*(Producer(x.view(np.uint16), code=4) for x in (q, k, v)))
    assert out.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(out, cupyflash.attention(q, k, v))
    target = Producer(np.zeros((2, 5, 4, 6), F32))
    with pytest.raises(ArgumentError, match="out is a Producer: results are written into arrays of CuPy, torch and NumPy only"):
        cupyflash.attention(*(Producer(x.astype(F32)) for x in (q, k, v)), out=target)


def test_bfloat16_without_ml_dtypes_names_the_package(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = pair(rng)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    arrays._numpy_dtype.cache_clear()
    with pytest.raises(cupyflash.SetupError, match="pip install ml_dtypes"):
        cupyflash.attention(q, k, v, out_dtype="bfloat16")


class ElsewherePretender:
    """Says that it lies on some device; nothing may ask it for more."""

    def __init__(self, device: tuple[int, int]) -> None:
        self.device = device

    def __dlpack__(self, **_: Any) -> Any:
        raise AssertionError("the capsule of an array that cannot be used was taken")

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


def test_a_device_that_nothing_serves() -> None:
    x = ElsewherePretender((10, 0))  # ROCm
    with pytest.raises(DeviceError, match=r"q is on the DLPack device \(10, 0\)"):
        cupyflash.attention(x, x, x)


def test_gpu_memory_without_cupy_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    x = ElsewherePretender((2, 0))
    with pytest.raises(cupyflash.SetupError, match=r"q is in GPU memory and CuPy is not installed: pip install 'cupyflash\[cuda13\]'"):
        cupyflash.attention(x, x, x)


# --- one call, one library, one place ----------------------------------------------------------------------------------------------------


def view_of(library: str, device_id: int) -> ArrayView:
    return ArrayView(0, (1,), (1,), "float32", device_id, library, None)


def test_mixed_libraries_are_listed() -> None:
    views = {"q": view_of("torch", 0), "k": view_of("cupy", 0)}
    with pytest.raises(ArgumentError, match=r"k is a cupy array and q a torch one.*\(q torch, k cupy\)"):
        arrays.check_together(views)


def test_devices_are_named() -> None:
    for other, where in ((1, "on cuda:1"), (HOST, "in host memory")):
        with pytest.raises(DeviceError, match=f"k is {where} and q on cuda:0: move one of them"):
            arrays.check_together({"q": view_of("cupy", 0), "k": view_of("cupy", other)})


def test_small_vectors_may_be_numpy() -> None:
    arrays.check_together({"q": view_of("torch", HOST), "seqused_k": view_of("numpy", HOST)})
    with pytest.raises(ArgumentError):
        arrays.check_together({"q": view_of("torch", HOST), "sink": view_of("numpy", HOST)})


# --- the device half, on stand-ins for CuPy and torch ------------------------------------------------------------


class FakeCupyArray:
    """As cupy.ndarray is called and read; device 1, in host memory."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, memory: Any = None, strides: Any = None) -> None:
        self.data = memory or alloc(math.prod(shape) * np.dtype(dtype).itemsize)
        self.stored = np.ndarray(shape, dtype, self.data.memory, strides=strides)
        self.shape, self.dtype, self.strides = self.stored.shape, self.stored.dtype, self.stored.strides


def alloc(num_bytes: int) -> Any:
    memory = np.zeros(num_bytes, np.uint8)
    return types.SimpleNamespace(ptr=memory.ctypes.data, device_id=1, memory=memory)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = types.ModuleType("cupy")

    def stream(device_id: int) -> Any:
        return types.SimpleNamespace(ptr=100 + device_id)

    module.ndarray = FakeCupyArray  # type: ignore[attr-defined]
    module.cuda = types.SimpleNamespace(alloc=alloc, get_current_stream=stream)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(arrays, "READERS", arrays._Readers())
    return module


def test_cupy_arrays_are_read_by_attributes_and_allocated_by_cupy(cupy: Any) -> None:
    like = arrays.view(FakeCupyArray((2, 3, 4, 8), np.float16), "q")
    assert (like.device_id, like.library, like.dtype, like.strides) == (1, "cupy", "float16", (96, 32, 8, 1))
    made = arrays.empty(like, (2, 3, 4, 6), "float32", order=(0, 2, 1, 3))
    assert (made.shape, made.strides, made.library, made.device_id) == ((2, 3, 4, 6), (72, 6, 18, 1), "cupy", 1)
    assert (made.owner.strides, made.owner.data.ptr) == ((288, 24, 72, 4), made.ptr)
    assert arrays.give_back(made.owner, like) is made.owner
    assert arrays.current_stream(like) == 101


def test_a_gpu_cannot_read_inside_an_element() -> None:
    with pytest.raises(ShapeError, match="k starts at address 0x102, inside an element of float32"):
        arrays.check_together({"q": view_of("cupy", 0), "k": view_of("cupy", 0)._replace(ptr=0x102)})


def test_what_a_stream_still_reads_is_held_until_its_event_has_happened() -> None:
    """By many threads at once: each array goes after its own event, and not before."""
    dropped: list[int] = []

    class Event:
        done = False

    class Array:
        def __init__(self, event: Event, n: int) -> None:
            self.event, self.n = event, n

        def __del__(self) -> None:
            dropped.append(self.n if self.event.done else -1)

    events = [Event() for _ in range(400)]

    def hold(first: int) -> None:
        for n in range(first, 400, 4):
            arrays._hold(events[n], [Array(events[n], n)])
            events[n].done = n != 399

    arrays._held.clear()
    threads = [threading.Thread(target=hold, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert -1 not in dropped
    assert 399 not in dropped
    events[399].done = True
    arrays._hold(Event(), [])
    assert sorted(dropped) == list(range(400))
    arrays._held.clear()


def test_streams_in_anyones_words() -> None:
    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, 9)

    for stream in (9, types.SimpleNamespace(ptr=9), types.SimpleNamespace(cuda_stream=9), Protocol()):
        assert arrays.stream_handle(stream) == 9
    for wrong in ("default", True):
        with pytest.raises(ArgumentError, match=f"stream is a {type(wrong).__name__}"):
            arrays.stream_handle(wrong)


@pytest.mark.parametrize("raw", [True, False])
def test_torch_current_stream(monkeypatch: pytest.MonkeyPatch, raw: bool) -> None:
    c = types.SimpleNamespace(_cuda_getCurrentRawStream=lambda device_id: 40 + device_id) if raw else types.SimpleNamespace()
    current = types.SimpleNamespace(current_stream=lambda device_id: types.SimpleNamespace(cuda_stream=40 + device_id))
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(_C=c, cuda=current))
    assert arrays.current_stream(view_of("torch", 2)) == 42


# --- PyTorch and JAX, where installed

NO_TORCH = "PyTorch is not installed; pip install torch"
NO_JAX = "JAX is not installed; pip install jax"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_kf_085_torch_cpu_tensors(rng: np.random.Generator, dtype: str) -> None:
    torch = pytest.importorskip("torch", reason=NO_TORCH)
    arrays_in = pair(rng)
    q, k, v = (torch.from_numpy(x).to(getattr(torch, dtype)) for x in arrays_in)
    result = cupyflash.attention(q, k, v, causal=True, return_lse=True)
    assert type(result.out) is torch.Tensor
    assert result.out.dtype == q.dtype
    assert result.lse.dtype == (torch.float64 if dtype == "float64" else torch.float32)
    expected = cupyflash.reference.attention(*(x.double().numpy() for x in (q, k, v)), causal=True)
    bound = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 2e-5, "float64": 1e-12}[dtype]
    np.testing.assert_allclose(result.out.double().numpy(), expected, rtol=bound, atol=bound)
    same = [x.numpy() if dtype != "bfloat16" else x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) for x in (q, k, v, result.out)]
    np.testing.assert_array_equal(cupyflash.attention(*same[:3], causal=True), same[3])  # the same bits as NumPy's
    out = torch.full_like(result.out, torch.nan)
    assert cupyflash.attention(q, k, v, causal=True, out=out, out_dtype=q.dtype) is out
    assert torch.equal(out, result.out)


def test_torch_results_keep_qs_strides_and_take_numpy_vectors(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch", reason=NO_TORCH)
    q, k, v = (torch.from_numpy(x).transpose(1, 2).contiguous().transpose(1, 2) for x in pair(rng))
    out = cupyflash.attention(q, k, v, seqused_k=np.array([3, 7], np.int32))
    assert out.stride() == (120, 6, 30, 1)
    bias = torch.zeros(7).expand(5, 7)  # stride 0 is a broadcast like another
    assert torch.equal(cupyflash.attention(q, k, v, bias=bias), cupyflash.attention(q, k, v))


def test_torch_strides_are_read_where_they_are_not_those_of_c() -> None:
    torch = pytest.importorskip("torch", reason=NO_TORCH)
    x = torch.arange(480, dtype=torch.float32)
    for shape, strides in (((2, 3, 4, 5), (60, 20, 5, 1)), ((2, 3, 4, 5), (60, 5, 15, 1)), ((2, 3, 1, 5), (120, 40, 0, 1))):
        view = arrays.view(x.as_strided(shape, strides), "x")
        assert (view.shape, view.strides, type(view.shape)) == (shape, strides, tuple)
    odd = arrays.view(x.as_strided((1, 3, 1, 5), (7, 5, 0, 1)), "x")  # an axis of one is never stepped along
    assert odd.strides == (15, 5, 5, 1)
    kinds = {arrays.READERS[torch.Tensor](x.as_strided((2, 3), strides), "x")[1] for strides in ((3, 1), (1, 2), (4, 1), (3, 1))}
    assert len(kinds) == 3


def test_kf_082_gradients_are_never_lost_silently(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch", reason=NO_TORCH)
    q, k, v = (torch.from_numpy(x) for x in pair(rng))
    expected = cupyflash.attention(q, k, v)
    k.requires_grad_()
    out = cupyflash.attention(q, k, v)  # tests/unit/test_torch.py has its gradients
    assert torch.equal(out, expected)
    assert out.requires_grad
    with pytest.raises(UnsupportedError, match=r"lses\[0\] requires grad.*pass lses\[0\].detach\(\), or call inside torch.no_grad\(\)"):
        cupyflash.merge_states([q], [torch.zeros(2, 4, 5).requires_grad_()])
    with torch.no_grad():
        assert torch.equal(cupyflash.attention(q, k, v), expected)
        assert torch.equal(cupyflash.attention(q, torch.nn.Parameter(k), v), expected)


def test_torch_tensors_that_are_not_what_they_seem(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch", reason=NO_TORCH)
    q, k, v = (torch.from_numpy(x) for x in pair(rng))
    with pytest.raises(DeviceError, match="q is on the torch device 'meta': it must be on 'cpu' or 'cuda'"):
        cupyflash.attention(q.to("meta"), k, v)
    with pytest.raises(ArgumentError, match=r"q is a torch.sparse_coo tensor without memory of its own: it must be dense"):
        cupyflash.attention(q.to_sparse(), k, v)
    with pytest.raises(ArgumentError, match=r"q is a lazily negated.*q.resolve_neg\(\)"):
        cupyflash.attention(torch._neg_view(q), k, v)
    with pytest.raises(ArgumentError, match="k is a numpy array and q a torch one"):
        cupyflash.attention(q, k.numpy(), v)

    class Mode(torch.Tensor):  # type: ignore[misc,name-defined]
        pass

    with pytest.raises(ArgumentError, match="q is a Mode: subclasses of Tensor are not supported"):
        cupyflash.attention(q.as_subclass(Mode), k, v)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_kf_079_085_jax_cpu_arrays(rng: np.random.Generator, dtype: str) -> None:
    jax = pytest.importorskip("jax", reason=NO_JAX)
    q, k, v = (jax.numpy.asarray(x, dtype=dtype) for x in pair(rng))
    out, lse, _ = cupyflash.attention(q, k, v, causal=True, return_lse=True)
    assert isinstance(out, jax.Array)
    assert isinstance(lse, jax.Array)
    assert out.dtype == q.dtype
    assert out.devices() == q.devices()
    np.testing.assert_array_equal(np.asarray(out), cupyflash.attention(*(np.asarray(x) for x in (q, k, v)), causal=True))
    wide = cupyflash.attention(q, k, v, causal=True, out_dtype=jax.numpy.float32)
    assert wide.dtype == "float32"
    with pytest.raises(ArgumentError, match="JAX arrays cannot be written"):
        cupyflash.attention(q, k, v, out=out)
    with pytest.raises(cupyflash.DtypeError, match="jax_enable_x64"):
        cupyflash.attention(q, k, v, out_dtype="float64")


def test_jax_tracers_take_the_call_to_cupyflash_jax(rng: np.random.Generator) -> None:
    jax = pytest.importorskip("jax", reason=NO_JAX)
    q, k, v = (jax.numpy.asarray(x) for x in pair(rng))
    np.testing.assert_array_equal(jax.jit(cupyflash.attention)(q, k, v), cupyflash.attention(q, k, v))
