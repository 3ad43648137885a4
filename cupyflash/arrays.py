"""The edge: any library's arrays in, results out in the caller's library, from its allocator, on its stream.

An array is read as (address, kind, owner). The kind is all but where it lies, in the library's own words, so that reading costs little and
calls of equal kinds share one preparation; only that describes a kind, as an ArrayView.

No framework is imported here. An array of a library can only exist if that library is loaded, so it is looked up in sys.modules; CuPy
is imported only for an unknown producer's array in GPU memory, which is handed back as a CuPy array. Pointers, shapes and strides are
read from the attributes of each library: a DLPack round trip costs 19-29 us a tensor on an H200's host, data_ptr() and its kin 0.9.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import importlib
import itertools
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from cupyflash.errors import ArgumentError, CupyflashError, DeviceError, DtypeError, SetupError, ShapeError, StateError, UnsupportedError

HOST = -1  # device_id of arrays in host memory


class ArrayView(NamedTuple):
    """Where an array lies and what it holds; `owner` keeps the memory alive. Strides count elements; dtype is NumPy's name."""

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device_id: int
    library: str
    owner: Any


# (library, address modulo 16, shape, strides, dtype, device_id): all but where an array lies, hashable, and in the words of its library,
# since reading is a third of a call's time on the host. NumPy's and CuPy's strides count bytes; those of torch count elements, or are True
# where they are C's, which takes half the time to read and less to hash.
Kind = tuple[str, int, tuple[int, ...], Any, Any, int]
Array = tuple[int, Kind, Any]  # as it is read: address, kind, owner


class Elsewhere(Exception):  # noqa: N818  # no error: it takes a call to where it is computed
    """An array that its framework has to see used: one that requires grad, is traced, or lives on the framework's own stream. Raised by its
    reader, this brings the call to the framework's module (see `keywords.entry`)."""

    def __init__(self, framework: str, name: str, what: str, way_out: str) -> None:
        super().__init__(f"{name} {what}")
        self.framework, self.way_out = framework, way_out

    def land(self, function: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """The result of the function of that name in the module of the framework."""
        there = getattr(importlib.import_module(f"cupyflash.{self.framework}"), function.__name__, None)
        if there is None:
            raise UnsupportedError(f"{self}, and {function.__name__} has no form for that", (self.way_out,))
        return there(*args, **options)


def read(array: Any, name: str, stream: Any = None) -> Array:
    """Any supported library's array; nothing is copied. `name` is the argument's, for the message; a DLPack producer is told `stream`, or
    else CuPy's current one, as the one that reads."""
    if stream is not None:
        reader = READERS.get(type(array)) or _choose_reader(array, name)
        if reader is _read_dlpack and array.__dlpack_device__()[0] != 1:
            with _import_cupy(name).cuda.Stream.from_external(_Handle(stream_handle(stream))):
                return reader(array, name)
    return READERS[type(array)](array, name)


def describe(kind: Kind, name: str) -> ArrayView:
    """A kind in words that all libraries share: a view without owner, and with no address but its alignment."""
    library, ptr, shape, strides, dtype, device_id = kind
    if library == "torch":
        shape = tuple(shape)
        strides = strides_of(shape, None) if strides is True else strides
        return ArrayView(ptr, shape, strides, _torch_name(dtype), device_id, library, None)
    size = dtype.itemsize
    if library == "xla":
        return ArrayView(ptr, shape, strides_of(shape, None), _name_of(dtype), device_id, library, None)
    if size == 0 or any(s % size for s in strides):
        raise ShapeError(f"{name} has strides of {strides} bytes for elements of {size}: pass {name}.copy()")
    return ArrayView(ptr, shape, tuple([s // size for s in strides]), _name_of(dtype), device_id, library, None)


def located(views: Mapping[str, ArrayView], given: Iterable[Array | None]) -> dict[str, ArrayView]:
    """Described arrays where they lie; `given` has them in the same order, and None in between for others."""
    read = [array for array in given if array is not None]
    return {name: ArrayView(ptr, *view[1:6], owner) for (name, view), (ptr, _, owner) in zip(views.items(), read, strict=True)}


def view(array: Any, name: str) -> ArrayView:
    """An array read and described at once."""
    ptr, kind, owner = read(array, name)
    return describe(kind, name)._replace(ptr=ptr, owner=owner)


Prepared = TypeVar("Prepared")


def cached_by_kinds(prepare: Callable[..., Prepared]) -> functools._lru_cache_wrapper[Prepared]:
    """`prepare(kinds, *options)`, cached, since a model makes the same calls over and over; but not into a forked process, where preparing
    is what finds out that the GPU cannot be used."""
    cached = functools.lru_cache(maxsize=1024, typed=True)(prepare)  # typed: 1 is not True to `causal`
    if hasattr(os, "register_at_fork"):  # elsewhere nothing forks
        os.register_at_fork(after_in_child=cached.cache_clear)
    return cached


def prepared(prepare: functools._lru_cache_wrapper[Prepared], kinds: tuple[Any, ...], *options: Any) -> Prepared:
    """`prepare(kinds, *options)`, also where an option cannot be hashed: then it is a wrong one, and its check names it."""
    try:
        return prepare(kinds, *options)
    except TypeError as e:
        if isinstance(e, CupyflashError):
            raise
        return prepare.__wrapped__(kinds, *options)


# --- reading each library's arrays -------------------------------------------------------------------------------------------------

Reader = Callable[[Any, str], Array]


class _Readers(dict[type, Reader]):
    """What reads arrays of a type."""

    def __missing__(self, kind: type) -> Reader:
        return _read_first


READERS = _Readers()


def _read_first(array: Any, name: str) -> Array:
    reader = READERS[type(array)] = _choose_reader(array, name)
    return reader(array, name)


def _choose_reader(array: Any, name: str) -> Reader:
    kind = type(array)
    cupy, torch, jax = (sys.modules.get(module) for module in ("cupy", "torch", "jax"))
    if cupy is not None and isinstance(array, cupy.ndarray):
        return _exactly(kind, cupy.ndarray, name, _read_cupy)
    if torch is not None and isinstance(array, torch.Tensor):
        if computes_its_own_way(array):
            return _refuse_torch
        return _exactly(kind, torch.Tensor if kind is not torch.nn.Parameter else kind, name, _read_torch)
    if jax is not None and isinstance(array, jax.core.Tracer):
        return _refuse_tracer
    if jax is not None and isinstance(array, jax.Array):
        return _read_jax
    if isinstance(array, np.ndarray):
        return _exactly(kind, np.ndarray, name, _read_numpy)
    if kind is XlaArray:
        return _read_xla
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _read_dlpack
    if hasattr(array, "__cuda_array_interface__"):
        return _read_cuda_interface
    raise ArgumentError(
        f"{name} is a {kind.__module__}.{kind.__name__}: it must be a CuPy, PyTorch, JAX or NumPy array, or one that exports DLPack; "
        f"numpy.asarray({name}) makes one of lists and numbers"
    )


def _exactly(kind: type, base: type, name: str, reader: Reader) -> Reader:
    """Subclasses change what an array means (a mask, units, a mode of recording), so none is taken for its base silently."""
    if kind is not base:
        raise ArgumentError(f"{name} is a {kind.__name__}: subclasses of {base.__name__} are not supported, pass a plain one")
    return reader


def _read_numpy(array: Any, name: str) -> Array:
    ptr = array.ctypes.data
    return ptr, ("numpy", ptr % 16, array.shape, array.strides, array.dtype, HOST), array


def _read_cupy(array: Any, name: str) -> Array:
    data = array.data
    ptr = data.ptr
    return ptr, ("cupy", ptr % 16, array.shape, array.strides, array.dtype, data.device_id), array


def _read_torch(tensor: Any, name: str) -> Array:
    try:
        ptr, strides = tensor.data_ptr(), tensor.is_contiguous() or tensor.stride()
    except RuntimeError as e:  # a sparse or quantised tensor, one of a functional transform
        if sys.modules["torch"]._C._are_functorch_transforms_active():
            _refuse_torch(tensor, name)
        raise ArgumentError(f"{name} is a {tensor.layout} tensor without memory of its own: it must be dense") from e
    if tensor.requires_grad or tensor.is_neg() or not tensor.is_cuda:
        _check_torch(tensor, name)
    return ptr, ("torch", ptr % 16, tensor.shape, strides, tensor.dtype, tensor.get_device()), tensor  # of the host it is -1


def computes_its_own_way(tensor: Any) -> bool:
    """Whether a tensor is of a type that takes each operator of torch itself, as a fake tensor does, and has no values to read."""
    torch = sys.modules["torch"]
    return isinstance(tensor, torch.Tensor) and type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _refuse_torch(tensor: Any, name: str) -> Array:
    raise Elsewhere("torch", name, f"is a {type(tensor).__name__} that torch traces or transforms", "call it on plain tensors")


def _check_torch(tensor: Any, name: str) -> None:
    if tensor.is_neg():  # conjugated ones are complex, which no argument may be
        raise ArgumentError(f"{name} is a lazily negated view: pass {name}.resolve_neg()")
    if tensor.requires_grad and sys.modules["torch"].is_grad_enabled():
        raise Elsewhere("torch", name, "requires grad", f"pass {name}.detach(), or call inside torch.no_grad()")
    if not (tensor.is_cuda or tensor.is_cpu):
        raise DeviceError(f"{name} is on the torch device {str(tensor.device)!r}: it must be on 'cpu' or 'cuda'")


@functools.cache
def _torch_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _read_jax(array: Any, name: str) -> Array:
    devices = array.devices()
    if len(devices) != 1:
        raise ArgumentError(f"{name} is sharded over {len(devices)} devices: call cupyflash on each shard, inside jax.shard_map")
    platform = next(iter(devices)).platform
    if platform != "cpu":
        # Its memory may be reused while a kernel on another stream still reads it, so the call has to run on JAX's own.
        way_out = f"numpy.asarray({name}) or cupy.from_dlpack({name}) gives an array that works"
        raise Elsewhere("jax", name, f"is a JAX array on {platform!r}", way_out)
    ptr, kind, _ = _read_numpy(np.asarray(array), name)  # no copy; waits until the value is there
    return ptr, ("jax", *kind[1:]), array


def _refuse_tracer(tracer: Any, name: str) -> Array:
    raise Elsewhere("jax", name, "is a JAX tracer", "call it outside of the traced function, on concrete arrays")


class _Capsule:
    """A DLPack capsule as an object that numpy.from_dlpack and cupy.from_dlpack take."""

    def __init__(self, capsule: Any, device: tuple[int, int]) -> None:
        self._capsule, self._device = capsule, device

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def _read_dlpack(array: Any, name: str) -> Array:
    device_type, device_id = array.__dlpack_device__()
    if device_type == 1:
        try:
            capsule = array.__dlpack__(max_version=(1, 0))
        except TypeError:  # producers from before DLPack 1.0 take no max_version
            capsule = array.__dlpack__()
        bf16 = _take_bfloat16_bits(capsule)
        base = np.from_dlpack(_Capsule(capsule, (1, 0)))
        return _read_numpy(base.view(_numpy_dtype("bfloat16")) if bf16 else base, name)
    if device_type in (2, 13):
        cupy = _import_cupy(name)
        with cupy.cuda.Device(device_id):
            return _read_cupy(cupy.from_dlpack(array), name)
    raise DeviceError(
        f"{name} is on the DLPack device ({device_type}, {device_id}): it must be in host memory (1) or on a CUDA GPU (2, 13)"
    )


def _read_cuda_interface(array: Any, name: str) -> Array:
    return _read_cupy(_import_cupy(name).asarray(array), name)


# Fields of struct DLTensor: data 0, device 8, ndim 16, dtype 20 (code, bits, lanes), shape 24, strides 32, byte_offset 40. In a versioned
# capsule it stands behind version, manager, deleter and flags.
_DLPACK_FORMS = ((b"dltensor_versioned", 32), (b"dltensor", 0))
_DLPACK_DTYPE, _DLPACK_OFFSET = 20, 40
_BFLOAT16 = bytes((4, 16, 1, 0))
_UINT16 = bytes((1, 16, 1, 0))


def _dl_tensor(capsule: Any) -> int:
    """The address of a capsule's DLTensor; 0 of one that is used up."""
    is_valid, get_pointer = ctypes.pythonapi.PyCapsule_IsValid, ctypes.pythonapi.PyCapsule_GetPointer
    is_valid.argtypes = get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    is_valid.restype, get_pointer.restype = ctypes.c_int, ctypes.c_void_p
    for capsule_name, tensor in _DLPACK_FORMS:
        if is_valid(capsule, capsule_name):
            return int(get_pointer(capsule, capsule_name)) + tensor
    return 0


def _take_bfloat16_bits(capsule: Any) -> bool:
    """NumPy refuses bfloat16 capsules, so name the elements uint16 in place; say whether that was needed."""
    tensor = _dl_tensor(capsule)
    if tensor and ctypes.string_at(tensor + _DLPACK_DTYPE, 4) == _BFLOAT16:
        ctypes.memmove(tensor + _DLPACK_DTYPE, _UINT16, 4)
        return True
    return False


def dlpack_address(array: Any) -> int:
    """Where the first element of a DLPack exporter's array lies, while the array lives."""
    capsule = array.__dlpack__(max_version=(1, 0))
    tensor = _dl_tensor(capsule)
    return ctypes.c_uint64.from_address(tensor).value + ctypes.c_uint64.from_address(tensor + _DLPACK_OFFSET).value


def _import_cupy(name: str) -> Any:
    try:
        import cupy
    except ImportError as e:
        raise SetupError(
            f"{name} is in GPU memory and CuPy is not installed: pip install 'cupyflash[cuda13]' (or [cuda12] for a CUDA 12 driver)"
        ) from e
    return cupy


# --- dtypes ------------------------------------------------------------------------------------------------------------------------

_NAMES: dict[Any, str] = {}


def _name_of(dtype: Any) -> str:
    name = _NAMES.get(dtype)
    if name is None:  # dtype.name costs over a microsecond, and drops the byte order
        name = dtype.name if dtype.isnative else f"{dtype.name} in foreign byte order"
        _NAMES[dtype] = name
    return name


def dtype_name(dtype: Any, name: str = "out_dtype") -> str:
    """The name of a dtype given in any library's words: a string, a NumPy or torch dtype, a scalar type; `name` is the argument's."""
    if isinstance(dtype, str):
        return dtype
    if type(dtype).__module__ == "torch":
        return _torch_name(dtype)
    try:
        return _name_of(np.dtype(dtype))
    except TypeError:
        raise ArgumentError(f"{name}={dtype!r} is no dtype: it is a name as 'float32', or a dtype of NumPy, torch or JAX") from None


@functools.cache
def _numpy_dtype(name: str) -> Any:
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as e:
        raise SetupError("NumPy has no bfloat16 of its own: pip install ml_dtypes") from e
    return np.dtype(ml_dtypes.bfloat16)


# --- one call's arrays belong together -----------------------------------------------------------------------------------------------

# Small vectors that a caller of any library may hold as NumPy arrays.
VECTORS = frozenset({"alibi_slopes", "seqused_q", "seqused_k", "cu_seqlens_q", "cu_seqlens_k"}) | {
    *("page_table", "cache_seqlens", "cache_batch_idx", "cache_leftpad", "rotary_positions", "k_descale", "v_descale")
}


def check_together(views: dict[str, ArrayView]) -> None:
    """All arrays come from one library and lie on one device."""
    first, base = next(iter(views.items()))
    for name, other in views.items():
        if other.library != base.library and not (name in VECTORS and other.library == "numpy"):
            which = ", ".join(f"{n} {v.library}" for n, v in views.items())
            raise ArgumentError(
                f"{name} is a {other.library} array and {first} a {base.library} one: a call takes arrays of one library ({which})"
            )
        if other.device_id != base.device_id and not (name in VECTORS and other.library == "numpy"):
            raise DeviceError(f"{name} is {place(other)} and {first} {place(base)}: move one of them")
        if other.device_id != HOST and other.ptr % _itemsize(other.dtype):
            raise ShapeError(
                f"{name} starts at address {other.ptr:#x}, inside an element of {other.dtype}, which a GPU cannot read: pass {name}.copy()"
            )


def to_device(vector: Any, like: ArrayView, name: str) -> Array:
    """A small NumPy vector as an array of `like`'s library on its device, copied on its current stream; StateError in a capture."""
    if is_capturing(like):
        raise StateError(
            f"{name} is a NumPy array, and its copy to the GPU must not be captured: pass a {like.library} array on the device, whose "
            "values each replay then reads"
        )
    if like.library == "torch":
        return _read_torch(sys.modules["torch"].from_numpy(np.ascontiguousarray(vector)).to(like.owner.device, non_blocking=True), name)
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(like.device_id):
        return _read_cupy(cupy.asarray(np.ascontiguousarray(vector)), name)


def place(view: ArrayView) -> str:
    return "in host memory" if view.device_id == HOST else f"on cuda:{view.device_id}"


def check_out(name: str, array: Any, out: ArrayView, views: Mapping[str, ArrayView | None]) -> None:
    """`out=` can be written, has one place for each element, and shares none with another array of the call; `views` may hold `name`."""
    check_writable(name, array, out.library, out.owner)
    check_apart(name, out, views)


def check_writable(name: str, array: Any, library: str, owner: Any) -> None:
    """The first half of `check_out`: about the array as its library has it."""
    if owner is not array:
        raise ArgumentError(f"{name} is a {type(array).__name__}: results are written into arrays of CuPy, torch and NumPy only")
    if library == "jax":
        way_out = "cupyflash.jax.attention_with_kvcache returns new ones" if name.endswith("_cache") else "use the returned one"
        raise ArgumentError(f"{name}= is a JAX array: JAX arrays cannot be written, {way_out}")
    if library == "numpy" and not owner.flags.writeable:
        raise ShapeError(f"{name} is read-only: pass an array that can be written")
    if library == "torch" and owner.requires_grad:
        raise ArgumentError(f"{name} requires grad: pass a tensor that does not")


def check_apart(name: str, out: ArrayView, views: Mapping[str, ArrayView | None]) -> None:
    """The second half: about addresses and strides alone."""
    if _folds(out.shape, out.strides):
        raise ShapeError(f"{name} has strides {out.strides}: each must be positive, so that no two elements share a place")
    for other, view in views.items():
        if view is not None and other != name and _overlap(out, view):
            raise ShapeError(f"{name} overlaps {other} in memory: each result needs memory of its own; pass another array")


@functools.lru_cache(maxsize=1024)
def _folds(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    return 0 not in shape and any(s <= 0 and n > 1 for n, s in zip(shape, strides, strict=True))


def _overlap(a: ArrayView, b: ArrayView) -> bool:
    (a_before, a_behind), (b_before, b_behind) = _reach(*a[1:4]), _reach(*b[1:4])
    if a.device_id != b.device_id or a.ptr + a_behind <= b.ptr + b_before or b.ptr + b_behind <= a.ptr + a_before:
        return False
    if 0 in a.shape or 0 in b.shape:
        return False
    # NumPy's exact test reads addresses only, so it serves device memory as well. It gives up on contrived strides: then be safe.
    try:
        return np.shares_memory(_shadow(a), _shadow(b), max_work=1_000_000)  # type: ignore[arg-type]  # NumPy's stub knows -1 and 0 only
    except np.exceptions.TooHardError:
        return True


@functools.lru_cache(maxsize=1024)
def _reach(shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> tuple[int, int]:
    """From an array's address to the first byte of any element, and to behind the last."""
    reach = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
    size = _itemsize(dtype)
    return size * sum(r for r in reach if r < 0), size * (1 + sum(r for r in reach if r > 0))


class _Shadow:
    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def _shadow(view: ArrayView) -> Any:
    size = _itemsize(view.dtype)
    strides = tuple(s * size for s in view.strides)
    return np.asarray(_Shadow({"version": 3, "data": (view.ptr, True), "shape": view.shape, "strides": strides, "typestr": f"|V{size}"}))


# dtypes that NumPy has from ml_dtypes alone, as the bits that the host path computes on.
_BITS: dict[str, np.dtype[Any]] = {"bfloat16": np.dtype(np.uint16), "float8_e4m3fn": np.dtype(np.uint8)}


@functools.cache
def _itemsize(dtype: str) -> int:
    return (_BITS.get(dtype) or np.dtype(dtype)).itemsize


# --- results ---------------------------------------------------------------------------------------------------------------------------


def fresh(like: ArrayView, shape: tuple[int, ...], dtype: str, order: tuple[int, ...] | None = None) -> ArrayView:
    """What a dense result in `like`'s library and place will be; `order` lists the axes from the slowest in memory to the fastest."""
    if like.library in ("jax", "xla"):  # their results are compact; of arrays of JAX in NumPy memory, and JAX's in give_back
        _check_jax_dtype(dtype)
        order = None
    return ArrayView(0, shape, strides_of(shape, order), dtype, like.device_id, like.library, None)


Allocator = Callable[[Any], tuple[int, Any]]  # an array of the caller -> a new array with its address


def allocator(made: ArrayView, like: ArrayView) -> Allocator:
    """What makes uninitialised arrays as `made`, with the allocator of the library of an array as `like`; a GPU must be the current one."""
    makers = {"torch": _torch_allocator, "cupy": _cupy_allocator, "xla": _xla_allocator}
    return makers.get(made.library, _numpy_allocator)(made, like)


def workspaces(sizes: Sequence[tuple[str, int]], like: ArrayView) -> Callable[[Any], tuple[list[int], Any]]:
    """What makes all workspaces of a call, of (name, bytes): their addresses, and the one array that they lie in, each from a multiple of
    256 bytes on. An array for each would take the host 1 to 2 us more, and a backward has five."""
    *places, num_bytes = itertools.accumulate((-(-n // 256) * 256 for _, n in sizes), initial=0)
    allocate = allocator(fresh(like, (num_bytes,), "uint8"), like)

    def make(owner: Any) -> tuple[list[int], Any]:
        ptr, made = allocate(owner)
        return [ptr + place for place in places], made

    return make


def empty(like: ArrayView, shape: tuple[int, ...], dtype: str, order: tuple[int, ...] | None = None) -> ArrayView:
    made = fresh(like, shape, dtype, order)
    ptr, owner = allocator(made, like)(like.owner)
    return made._replace(ptr=ptr, owner=owner)


def _torch_allocator(made: ArrayView, like: ArrayView) -> Allocator:
    torch, shape, strides, device_id = sys.modules["torch"], made.shape, made.strides, made.device_id
    dtype = getattr(torch, made.dtype)
    options = {} if made.dtype == like.dtype else {"dtype": dtype}

    def allocate(tensor: Any) -> tuple[int, Any]:
        owner = tensor.new_empty_strided(shape, strides, **options)  # 1.8 us; torch.empty_strided with a device 4.2
        return owner.data_ptr(), owner

    if device_id == HOST or not hasattr(torch._C, "_dynamo") or not hasattr(torch._C._dynamo.guards, "_empty_strided_cuda"):
        return allocate
    empty_strided, current_device = torch._C._dynamo.guards._empty_strided_cuda, torch._C._cuda_getDevice

    def allocate_on_current(tensor: Any) -> tuple[int, Any]:
        if current_device() != device_id:  # torch may still mean another one than CUDA does, so as not to make a context there
            return allocate(tensor)
        owner = empty_strided(shape, strides, dtype)  # as code of torch.compile does: past the dispatcher, in half the time
        return owner.data_ptr(), owner

    return allocate_on_current


def _cupy_allocator(made: ArrayView, like: ArrayView) -> Allocator:
    cupy, shape, dtype = sys.modules["cupy"], made.shape, _numpy_dtype(made.dtype)
    ndarray, alloc = cupy.ndarray, cupy.cuda.alloc
    strides, num_bytes = tuple([s * dtype.itemsize for s in made.strides]), math.prod(shape) * dtype.itemsize

    def allocate(_: Any) -> tuple[int, Any]:
        memory = alloc(num_bytes)
        return memory.ptr, ndarray(shape, dtype, memory, strides)  # cupy.empty takes 0.3 us more, and has no strides

    return allocate


def _xla_allocator(made: ArrayView, like: ArrayView) -> Allocator:
    shape, dtype = made.shape, _numpy_dtype(made.dtype)
    return lambda _: _xla.take(shape, dtype)


def _numpy_allocator(made: ArrayView, like: ArrayView) -> Allocator:
    shape, dtype = made.shape, _numpy_dtype(made.dtype)
    strides = tuple([s * dtype.itemsize for s in made.strides])

    def allocate(_: Any) -> tuple[int, Any]:
        owner: Any = np.ndarray(shape, dtype, strides=strides)
        return owner.ctypes.data, owner

    return allocate


@functools.lru_cache(maxsize=1024)
def strides_of(shape: tuple[int, ...], order: tuple[int, ...] | None) -> tuple[int, ...]:
    """Strides in elements of a dense array whose axes lie in memory in this order; None is C order."""
    strides = [0] * len(shape)
    step = 1
    for axis in reversed(order or range(len(shape))):
        strides[axis] = step
        step *= max(shape[axis], 1)
    return tuple(strides)


def storage_order(view: ArrayView) -> tuple[int, ...] | None:
    """The axes of a dense array from the slowest in memory to the fastest; None where it is dense in no order or in C order."""
    last = len(view.shape) - 1
    axes = sorted(range(last), key=lambda a: (bool(view.shape[a] > 1), -view.strides[a]))  # a bool, too, of torch's symbolic sizes
    ordered = [*axes, last]
    step = 1
    for axis in reversed(ordered):
        if view.shape[axis] > 1:
            if view.strides[axis] != step:
                return None
            step *= view.shape[axis]
    long = [a for a in ordered if view.shape[a] > 1]
    return None if long == sorted(long) else tuple(ordered)


def give_back(result: Any, like: ArrayView) -> Any:
    """The array that was made for a result as one of the caller's own type."""
    if like.library != "jax":
        return result
    return sys.modules["jax"].device_put(result, next(iter(like.owner.devices())))


def concatenate(views: Sequence[ArrayView]) -> Any:
    """Arrays of one library and place one behind the other, by that library."""
    like, owners = views[0], [view.owner for view in views]
    if like.library == "torch":
        return sys.modules["torch"].cat(owners)
    if like.library == "jax":
        return sys.modules["jax"].numpy.concatenate(owners)
    if like.library == "cupy":
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(like.device_id):
            return cupy.concatenate(owners)
    return np.concatenate(owners)


def vector(values: np.ndarray[Any, Any], like: ArrayView, name: str) -> Any:
    """A small NumPy vector as an array of `like`'s library in its place."""
    if like.device_id != HOST:
        return to_device(values, like, name)[2]
    return sys.modules["torch"].from_numpy(values) if like.library == "torch" else give_back(values, like)


def _check_jax_dtype(dtype: str) -> None:
    if dtype == "float64" and not sys.modules["jax"].config.jax_enable_x64:
        raise DtypeError("out_dtype is float64 and JAX holds no float64 until jax.config.update('jax_enable_x64', True)")


def on_host(view: ArrayView) -> np.ndarray[Any, Any]:
    """The NumPy array over a host view's memory, with the view's shape and strides; bfloat16 and float8_e4m3fn as their bits."""
    base = view.owner
    if view.library == "torch":
        torch = sys.modules["torch"]
        base = base.detach()
        base = (base.view({2: torch.int16, 1: torch.uint8}[base.itemsize]) if view.dtype in _BITS else base).numpy()
    base = np.asarray(base)
    dtype = _BITS.get(view.dtype) or np.dtype(view.dtype)
    strides = tuple(s * dtype.itemsize for s in view.strides)
    return np.lib.stride_tricks.as_strided(base.view(dtype), view.shape, strides)


# --- streams -----------------------------------------------------------------------------------------------------------------------------


def stream_reader(like: ArrayView) -> Callable[[], int]:
    """What gives the handle of the current stream of the library that `like` comes from, on its device."""
    device_id = like.device_id
    if like.library == "torch":
        torch = sys.modules["torch"]
        if raw := getattr(torch._C, "_cuda_getCurrentRawStream", None):  # 0.1 us; torch.cuda.current_stream() 3.3
            return functools.partial(raw, device_id)
        return lambda: int(torch.cuda.current_stream(device_id).cuda_stream)
    if like.library == "xla":
        return lambda: _xla.stream
    get_current_stream = sys.modules["cupy"].cuda.get_current_stream
    return lambda: int(get_current_stream(device_id).ptr)


def current_stream(like: ArrayView) -> int:
    return stream_reader(like)()


def is_capturing(like: ArrayView) -> bool:
    """Whether the current stream of `like`'s library records a CUDA graph."""
    if like.library == "torch":
        return bool(sys.modules["torch"].cuda.is_current_stream_capturing())
    return bool(sys.modules["cupy"].cuda.get_current_stream(like.device_id).is_capturing())


# Workspaces of captured calls, for good: CuPy's pool would give their memory away while replays still write there. (PyTorch's graphs have
# pools of their own, and those of XLA's are memory of XLA.)
_captured: list[Any] = []


def keep_if_captured(made: Any, like: ArrayView) -> None:
    """Hold the workspaces of a call until the process ends, if the call is recorded into a CUDA graph whose replays write there again."""
    if like.library not in ("torch", "xla") and is_capturing(like):
        _captured.append(made)


def stream_handle(stream: Any) -> int:
    """The handle of a stream in any library's words."""
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    for attribute in ("ptr", "cuda_stream"):  # CuPy's and torch's names
        if hasattr(stream, attribute):
            return int(getattr(stream, attribute))
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    raise ArgumentError(f"stream is a {type(stream).__name__}: it must be a stream of CuPy or torch, a handle, or have __cuda_stream__")


_AS_IT_IS = contextlib.nullcontext()


def on_stream(stream: Any, inputs: Sequence[ArrayView | None]) -> contextlib.AbstractContextManager[None]:
    """Make `stream` the current one of the inputs' library, unless it is None; afterwards the inputs' memory stays theirs until the
    stream has done what was queued, although the allocators of both libraries know only the stream that an array was made on."""
    return _AS_IT_IS if stream is None else _on_stream(stream, [view for view in inputs if view is not None])


@contextlib.contextmanager
def _on_stream(stream: Any, inputs: list[ArrayView]) -> Iterator[None]:
    like = inputs[0]
    if like.device_id == HOST:
        raise DeviceError("stream= was given and the arrays are in host memory: streams belong to a GPU")
    handle = stream_handle(stream)
    if handle == current_stream(like):
        yield
    elif like.library == "torch":
        torch = sys.modules["torch"]
        external = torch.cuda.ExternalStream(handle, device=like.device_id)
        with torch.cuda.stream(external):
            yield
            if not is_capturing(like):
                for view in inputs:
                    if view.device_id == like.device_id:
                        view.owner.record_stream(external)
    else:
        cuda = sys.modules["cupy"].cuda
        with cuda.Device(like.device_id), cuda.Stream.from_external(_Handle(handle)) as external:
            yield
            if not is_capturing(like):
                _hold(external.record(), [view.owner for view in inputs])


class _Handle:
    """A stream as the protocol that CuPy reads has it."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


_held: collections.deque[tuple[Any, list[Any]]] = collections.deque()
_holding = threading.Lock()


def _hold(event: Any, owners: list[Any]) -> None:
    """Keep arrays alive until the event has happened; what earlier calls held goes when a later one finds theirs done."""
    done: list[Any] = []  # dropped after the lock: an array's release runs its allocator
    with _holding:  # without it another thread could take the one found done, and this one drop the next
        _held.append((event, owners))
        while _held and _held[0][0].done:
            done.append(_held.popleft())


# --- inside XLA --------------------------------------------------------------------------------------------------------------------------


class XlaArray:
    """Memory that XLA lends to a callback, dense in C order; or, without a buffer, such an array of a call that is only traced."""

    __slots__ = ("buffer", "kind", "ptr")

    def __init__(self, buffer: Any, ptr: int, shape: tuple[int, ...], dtype: Any, device_id: int) -> None:
        self.buffer, self.ptr, self.kind = buffer, ptr, ("xla", ptr % 16, shape, True, dtype, device_id)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        if self.buffer is None:
            raise _Traced
        return np.asarray(self.buffer)


def _read_xla(array: Any, name: str) -> Array:
    return array.ptr, array.kind, array


class _Traced(Exception):  # noqa: N818  # no error: how a traced call ends in host memory, before it reads any
    pass


class _Xla(threading.local):
    """What the calls of a thread find inside a callback: the stream, and what takes the next of XLA's outputs for an array to be made."""

    stream: int
    take: Callable[[tuple[int, ...], Any], tuple[int, XlaArray]]


_xla = _Xla()


def traced(call: Callable[[list[XlaArray]], Any], given: Sequence[tuple[tuple[int, ...], Any]], device_id: int) -> list[Any]:
    """The (shape, dtype) of all arrays that a call makes, results and workspaces, in its order. The call is checked, planned and, for a
    GPU, compiled, but it ends where memory would be read; `given` has the (shape, dtype) of its arrays."""
    made: list[Any] = []

    def take(shape: tuple[int, ...], dtype: Any) -> tuple[int, XlaArray]:
        made.append((shape, dtype))
        return 0, XlaArray(None, 0, shape, dtype, device_id)

    _xla.stream, _xla.take = -1, take
    with contextlib.suppress(_Traced):
        call([XlaArray(None, n << 44, shape, dtype, device_id) for n, (shape, dtype) in enumerate(given, 1)])  # apart from each other
    return made


def in_xla(call: Callable[[list[XlaArray]], Any], given: list[XlaArray], outputs: list[XlaArray], stream: int) -> None:
    """Make a call on XLA's stream, where the arrays that it makes are XLA's outputs."""
    left = iter(outputs)

    def take(shape: tuple[int, ...], dtype: Any) -> tuple[int, XlaArray]:
        array = next(left, None)
        if array is None or array.kind[2] != shape:
            raise StateError("the call was traced for another kind of GPU than it runs on: trace it again, with jax.default_device set")
        return array.ptr, array

    _xla.stream, _xla.take = stream, take
    call(given)
