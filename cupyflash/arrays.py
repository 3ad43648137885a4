"""The edge: any library's array in as an ArrayView, results out in the caller's library, from its allocator, on its stream.

No framework is imported here. An array of a library can only exist if that library is loaded, so it is looked up in sys.modules; CuPy
is imported only for an unknown producer's array in GPU memory, which is handed back as a CuPy array. Pointers, shapes and strides are
read from the attributes of each library: a DLPack round trip costs 19-29 us a tensor on an H200's host, data_ptr() and its kin 0.9.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
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

    @property
    def kind(self) -> Kind:
        """All but where it lies: what a call's checks and plan depend on, so that they can be cached."""
        return self[0] % 16, self[1:6]


Kind = tuple[int, tuple[tuple[int, ...], tuple[int, ...], str, int, str]]  # the address modulo 16; the fields between ptr and owner
_new: Any = tuple.__new__  # an ArrayView of a tuple in 0.1 us, where the class called by its name takes 0.3: three or four a call
Prepared = TypeVar("Prepared")


def cached_by_kinds(prepare: Callable[..., Prepared]) -> Callable[..., Prepared]:
    """`prepare(kinds, *options)`, cached, since a model makes the same calls over and over; kinds are given as any sequence."""
    cached = functools.lru_cache(maxsize=1024, typed=True)(prepare)  # typed: 1 is not True to `causal`

    @functools.wraps(prepare)
    def prepared(kinds: Iterable[Kind | None], *options: Any) -> Prepared:
        kinds = tuple(kinds)
        try:
            return cached(kinds, *options)
        except TypeError as e:
            if isinstance(e, CupyflashError):
                raise
            return prepare(kinds, *options)  # an option that cannot be hashed is a wrong one: let its check name it

    prepared.cache_clear, prepared.cache_info = cached.cache_clear, cached.cache_info  # type: ignore[attr-defined]
    return prepared


def view(array: Any, name: str, stream: Any = None) -> ArrayView:
    """The view of any supported library's array; nothing is copied. `name` is the argument's, for the message; a DLPack producer is
    told `stream`, or else CuPy's current one, as the one that reads."""
    reader = _READERS.get(type(array)) or _find_reader(array, name)
    if stream is not None and reader is _view_dlpack and array.__dlpack_device__()[0] != 1:
        with _import_cupy(name).cuda.Stream.from_external(_Handle(stream_handle(stream))):
            return reader(array, name)
    return reader(array, name)


# --- reading each library's arrays -------------------------------------------------------------------------------------------------

_READERS: dict[type, Callable[[Any, str], ArrayView]] = {}


def _find_reader(array: Any, name: str) -> Callable[[Any, str], ArrayView]:
    reader = _READERS[type(array)] = _choose_reader(array, name)
    return reader


def _choose_reader(array: Any, name: str) -> Callable[[Any, str], ArrayView]:
    kind = type(array)
    cupy, torch, jax = (sys.modules.get(module) for module in ("cupy", "torch", "jax"))
    if cupy is not None and isinstance(array, cupy.ndarray):
        return _exactly(kind, cupy.ndarray, name, _view_cupy)
    if torch is not None and isinstance(array, torch.Tensor):
        return _exactly(kind, torch.Tensor if kind is not torch.nn.Parameter else kind, name, _view_torch)
    if jax is not None and isinstance(array, jax.core.Tracer):
        return _refuse_tracer
    if jax is not None and isinstance(array, jax.Array):
        return _view_jax
    if isinstance(array, np.ndarray):
        return _exactly(kind, np.ndarray, name, _view_numpy)
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _view_dlpack
    if hasattr(array, "__cuda_array_interface__"):
        return _view_cuda_interface
    raise ArgumentError(
        f"{name} is a {kind.__module__}.{kind.__name__}: it must be a CuPy, PyTorch, JAX or NumPy array, or one that exports DLPack; "
        f"numpy.asarray({name}) makes one of lists and numbers"
    )


def _exactly(kind: type, base: type, name: str, reader: Callable[[Any, str], ArrayView]) -> Callable[[Any, str], ArrayView]:
    """Subclasses change what an array means (a mask, units, a mode of recording), so none is taken for its base silently."""
    if kind is not base:
        raise ArgumentError(f"{name} is a {kind.__name__}: subclasses of {base.__name__} are not supported, pass a plain one")
    return reader


def _view_numpy(array: Any, name: str) -> ArrayView:
    dtype = array.dtype
    itemsize = dtype.itemsize
    if itemsize == 0 or any(s % itemsize for s in array.strides):
        raise ShapeError(f"{name} has strides of {array.strides} bytes for elements of {itemsize}: pass {name}.copy()")
    strides = tuple(s // itemsize for s in array.strides)
    return ArrayView(array.ctypes.data, array.shape, strides, _name_of(dtype), HOST, "numpy", array)


def _view_cupy(array: Any, name: str) -> ArrayView:
    dtype, data = array.dtype, array.data
    strides = _in_elements(array.strides, dtype.itemsize)
    view: ArrayView = _new(ArrayView, (data.ptr, array.shape, strides, _name_of(dtype), data.device_id, "cupy", array))
    return view


@functools.lru_cache(maxsize=1024)
def _in_elements(strides: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(s // itemsize for s in strides)


def _view_torch(tensor: Any, name: str) -> ArrayView:
    try:
        ptr, strides = tensor.data_ptr(), tensor.stride()
    except RuntimeError as e:  # a sparse or quantised tensor, one of a functional transform
        raise ArgumentError(f"{name} is a {tensor.layout} tensor without memory of its own: it must be dense") from e
    if tensor.is_neg():  # conjugated ones are complex, which no argument may be
        raise ArgumentError(f"{name} is a lazily negated view: pass {name}.resolve_neg()")
    if tensor.requires_grad and sys.modules["torch"].is_grad_enabled():
        raise UnsupportedError(
            f"{name} requires grad, and gradients through torch are not built yet: a result without them would lose them silently",
            (f"pass {name}.detach(), or call inside torch.no_grad(); cupyflash.attention_vjp gives gradients",),
        )
    device_id = tensor.get_device()  # -1 in host memory
    if not (tensor.is_cpu if device_id == HOST else tensor.is_cuda):
        raise DeviceError(f"{name} is on the torch device {str(tensor.device)!r}: it must be on 'cpu' or 'cuda'")
    view: ArrayView = _new(ArrayView, (ptr, tuple(tensor.shape), strides, _torch_name(tensor.dtype), device_id, "torch", tensor))
    return view


@functools.cache
def _torch_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _view_jax(array: Any, name: str) -> ArrayView:
    devices = array.devices()
    if len(devices) != 1:
        raise ArgumentError(f"{name} is sharded over {len(devices)} devices: call cupyflash on each shard, inside jax.shard_map")
    platform = next(iter(devices)).platform
    if platform != "cpu":
        raise UnsupportedError(
            f"{name} is a JAX array on {platform!r}: its memory may be reused while a kernel on another stream still reads it, and the "
            "call that runs on JAX's own stream is not built yet",
            ("numpy.asarray, cupy.from_dlpack or jax.device_put to a CPU device give arrays that work",),
        )
    base = _view_numpy(np.asarray(array), name)  # no copy; waits until the value is there
    return base._replace(library="jax", owner=array)


def _refuse_tracer(tracer: Any, name: str) -> ArrayView:
    raise UnsupportedError(
        f"{name} is a JAX tracer: calls inside jax.jit, grad and vmap are not built yet",
        ("call cupyflash outside of the traced function, on concrete arrays",),
    )


class _Capsule:
    """A DLPack capsule as an object that numpy.from_dlpack and cupy.from_dlpack take."""

    def __init__(self, capsule: Any, device: tuple[int, int]) -> None:
        self._capsule, self._device = capsule, device

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def _view_dlpack(array: Any, name: str) -> ArrayView:
    device_type, device_id = array.__dlpack_device__()
    if device_type == 1:
        try:
            capsule = array.__dlpack__(max_version=(1, 0))
        except TypeError:  # producers from before DLPack 1.0 take no max_version
            capsule = array.__dlpack__()
        bf16 = _take_bfloat16_bits(capsule)
        base = _view_numpy(np.from_dlpack(_Capsule(capsule, (1, 0))), name)
        return base._replace(dtype="bfloat16", owner=base.owner.view(_numpy_dtype("bfloat16"))) if bf16 else base
    if device_type in (2, 13):
        cupy = _import_cupy(name)
        with cupy.cuda.Device(device_id):
            return _view_cupy(cupy.from_dlpack(array), name)
    raise DeviceError(
        f"{name} is on the DLPack device ({device_type}, {device_id}): it must be in host memory (1) or on a CUDA GPU (2, 13)"
    )


def _view_cuda_interface(array: Any, name: str) -> ArrayView:
    return _view_cupy(_import_cupy(name).asarray(array), name)


# Fields of struct DLTensor: data 0, device 8, ndim 16, dtype 20 (code, bits, lanes), shape 24, strides 32. In a versioned capsule it
# stands behind version, manager, deleter and flags.
_DLPACK_FORMS = ((b"dltensor_versioned", 32), (b"dltensor", 0))
_DLPACK_DTYPE = 20
_BFLOAT16 = bytes((4, 16, 1, 0))
_UINT16 = bytes((1, 16, 1, 0))


def _take_bfloat16_bits(capsule: Any) -> bool:
    """NumPy refuses bfloat16 capsules, so name the elements uint16 in place; say whether that was needed."""
    is_valid, get_pointer = ctypes.pythonapi.PyCapsule_IsValid, ctypes.pythonapi.PyCapsule_GetPointer
    is_valid.argtypes = get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    is_valid.restype, get_pointer.restype = ctypes.c_int, ctypes.c_void_p
    for capsule_name, tensor in _DLPACK_FORMS:
        if is_valid(capsule, capsule_name):
            field = get_pointer(capsule, capsule_name) + tensor + _DLPACK_DTYPE
            if ctypes.string_at(field, 4) == _BFLOAT16:
                ctypes.memmove(field, _UINT16, 4)
                return True
    return False


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


def dtype_name(dtype: Any) -> str:
    """The name of a dtype given in any library's words: a string, a NumPy or torch dtype, a scalar type."""
    if isinstance(dtype, str):
        return dtype
    if type(dtype).__module__ == "torch":
        return _torch_name(dtype)
    try:
        return _name_of(np.dtype(dtype))
    except TypeError:
        raise ArgumentError(f"out_dtype={dtype!r} is no dtype: it is a name as 'float32', or a dtype of NumPy, torch or JAX") from None


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
VECTORS = frozenset({"alibi_slopes", "seqused_q", "seqused_k"})


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


def to_device(vector: ArrayView, like: ArrayView, name: str) -> ArrayView:
    """A small host vector as an array of `like`'s library on its device, copied on its current stream; StateError in a capture."""
    if is_capturing(like):
        raise StateError(
            f"{name} is a NumPy array, and its copy to the GPU must not be captured: pass a {like.library} array on the device, whose "
            "values each replay then reads"
        )
    if like.library == "torch":
        owner = sys.modules["torch"].from_numpy(np.ascontiguousarray(vector.owner)).to(like.owner.device, non_blocking=True)
        return _view_torch(owner, name)
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(like.device_id):
        return _view_cupy(cupy.asarray(np.ascontiguousarray(vector.owner)), name)


def place(view: ArrayView) -> str:
    return "in host memory" if view.device_id == HOST else f"on cuda:{view.device_id}"


def check_out(name: str, array: Any, out: ArrayView, views: Mapping[str, ArrayView | None]) -> None:
    """`out=` can be written, has one place for each element, and shares none with another array of the call; `views` may hold `name`."""
    if out.owner is not array:
        raise ArgumentError(f"{name} is a {type(array).__name__}: results are written into arrays of CuPy, torch and NumPy only")
    if out.library == "jax":
        raise ArgumentError(f"{name}= is a JAX array: JAX arrays cannot be written, use the returned one")
    if out.library == "numpy" and not out.owner.flags.writeable:
        raise ShapeError(f"{name} is read-only: pass an array that can be written")
    if out.library == "torch" and out.owner.requires_grad:
        raise ArgumentError(f"{name} requires grad: pass a tensor that does not")
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


@functools.cache
def _itemsize(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


# --- results ---------------------------------------------------------------------------------------------------------------------------


def empty(like: ArrayView, shape: tuple[int, ...], dtype: str, order: tuple[int, ...] | None = None) -> ArrayView:
    """An uninitialised array in `like`'s library and place; `order` lists the axes from the slowest in memory to the fastest."""
    strides = strides_of(shape, order)
    if like.library == "torch":
        if dtype == like.dtype:
            owner = like.owner.new_empty_strided(shape, strides)  # 1.8 us; torch.empty_strided with a device 4.2
        else:
            owner = like.owner.new_empty_strided(shape, strides, dtype=getattr(sys.modules["torch"], dtype))
        result: ArrayView = _new(ArrayView, (owner.data_ptr(), shape, strides, dtype, like.device_id, "torch", owner))
        return result
    axes = order or tuple(range(len(shape)))
    stored = tuple([shape[a] for a in axes])
    back = tuple([axes.index(a) for a in range(len(axes))])
    if like.library == "cupy":
        cuda = sys.modules["cupy"].cuda
        with _AS_IT_IS if cuda.runtime.getDevice() == like.device_id else cuda.Device(like.device_id):
            owner = sys.modules["cupy"].empty(stored, dtype=_numpy_dtype(dtype))
        owner = owner.transpose(back) if order else owner
        return ArrayView(owner.data.ptr, shape, strides, dtype, like.device_id, "cupy", owner)
    # A JAX array cannot be written: its result is computed in NumPy memory, compact, and becomes JAX's in give_back.
    if like.library == "jax":
        _check_jax_dtype(dtype)
        stored, back = shape, tuple(range(len(shape)))
    return _view_numpy(np.empty(stored, dtype=_numpy_dtype(dtype)).transpose(back), "out")._replace(library=like.library)


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
    axes = sorted(range(last), key=lambda a: (view.shape[a] > 1, -view.strides[a]))
    ordered = [*axes, last]
    step = 1
    for axis in reversed(ordered):
        if view.shape[axis] > 1:
            if view.strides[axis] != step:
                return None
            step *= view.shape[axis]
    long = [a for a in ordered if view.shape[a] > 1]
    return None if long == sorted(long) else tuple(ordered)


def give_back(result: ArrayView, like: ArrayView) -> Any:
    """The result as an array of the caller's own type."""
    if like.library != "jax":
        return result.owner
    return sys.modules["jax"].device_put(result.owner, next(iter(like.owner.devices())))


def _check_jax_dtype(dtype: str) -> None:
    if dtype == "float64" and not sys.modules["jax"].config.jax_enable_x64:
        raise DtypeError("out_dtype is float64 and JAX holds no float64 until jax.config.update('jax_enable_x64', True)")


def on_host(view: ArrayView) -> np.ndarray[Any, Any]:
    """The NumPy array over a host view's memory, with the view's shape and strides; bfloat16 as its bits in uint16."""
    base = view.owner
    if view.library == "torch":
        torch = sys.modules["torch"]
        base = base.detach()
        base = (base.view(torch.int16) if view.dtype == "bfloat16" else base).numpy()
    base = np.asarray(base)
    dtype = np.dtype(np.uint16) if view.dtype == "bfloat16" else np.dtype(view.dtype)
    strides = tuple(s * dtype.itemsize for s in view.strides)
    return np.lib.stride_tricks.as_strided(base.view(dtype), view.shape, strides)


# --- streams -----------------------------------------------------------------------------------------------------------------------------


def current_stream(like: ArrayView) -> int:
    """The handle of the current stream of the library that `like` comes from, on its device."""
    if like.library == "torch":
        torch = sys.modules["torch"]
        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # 0.1 us; torch.cuda.current_stream() 3.3
        return int(raw(like.device_id) if raw else torch.cuda.current_stream(like.device_id).cuda_stream)
    return int(sys.modules["cupy"].cuda.get_current_stream(like.device_id).ptr)


def is_capturing(like: ArrayView) -> bool:
    """Whether the current stream of `like`'s library records a CUDA graph."""
    if like.library == "torch":
        return bool(sys.modules["torch"].cuda.is_current_stream_capturing())
    return bool(sys.modules["cupy"].cuda.get_current_stream(like.device_id).is_capturing())


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
