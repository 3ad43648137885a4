"""What the GPU tests share: arrays moved to a GPU and back with their strides, rows of the kernel table forced, kernels compiled ahead."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
import os
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import cupy
import ml_dtypes
import numpy as np
import pytest
from judge import judge, standard_attention

import cupyflash
from cupyflash import api, arrays, backward, cache, device, jit, plan, reference, variants
from cupyflash.problem import ITEMSIZE

LIBRARIES = ("cupy", "torch")
TORCH = "PyTorch is not installed; pip install torch"
host_attention, host_varlen = cupyflash.attention, cupyflash.attention_varlen
host_backward, host_vjp = cupyflash.attention_backward, cupyflash.attention_vjp
host_kvcache, host_merge = cupyflash.attention_with_kvcache, cupyflash.merge_states


class Move:
    """NumPy arrays to one library's arrays in GPU memory: the whole buffer under a view is moved, and the view taken there."""

    def __init__(self, library: str) -> None:
        self.library = library
        if library == "torch":
            pytest.importorskip("torch", reason=TORCH)

    def there(self, x: Any, moved: dict[int, Any] | None = None) -> tuple[Any, Any]:
        """(the array on the GPU, its buffer there); views of one buffer share it there if they are given the same `moved`."""
        moved = {} if moved is None else moved
        base = x
        while isinstance(base.base, np.ndarray):  # under others lies what is not NumPy's: bytes, or a tensor
            base = base.base
        if id(base) not in moved:
            moved[id(base)] = cupy.asarray(base.ravel(order="K").view(np.uint8)) if base.size else cupy.empty(16, np.uint8)
        memory = moved[id(base)]
        offset = x.ctypes.data - base.ctypes.data if x.size else 0
        array = cupy.ndarray(
            x.shape, x.dtype, cupy.cuda.MemoryPointer(memory.data.mem, memory.data.ptr - memory.data.mem.ptr + offset), x.strides
        )
        if self.library == "torch":
            import torch

            bits = {ml_dtypes.bfloat16: np.int16, ml_dtypes.float8_e4m3fn: np.uint8}.get(x.dtype.type)
            array = torch.from_dlpack(array.view(bits) if bits else array)
            array = array.view(getattr(torch, x.dtype.name)) if bits else array
        return array, memory

    def __call__(self, *arrays: Any) -> list[Any]:
        return [self.there(x)[0] for x in arrays]

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        return {name: self.there(x)[0] if isinstance(x, np.ndarray) else x for name, x in options.items()}

    def back(self, y: Any) -> Any:
        if self.library == "torch":
            import torch

            if y.dtype == torch.bfloat16:
                return y.cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
            return y.cpu().numpy()
        strides = y.strides
        flat = cupy.asnumpy(y)
        order = sorted(range(y.ndim), key=lambda a: -strides[a])
        return flat.transpose(order).copy().transpose(np.argsort(order))

    def attention(self, *arrays: Any, **options: Any) -> Any:
        return self.computed(host_attention, arrays, **options)

    def attention_varlen(self, *arrays: Any, **options: Any) -> Any:
        return self.computed(host_varlen, arrays, **options)

    def attention_with_kvcache(self, *arrays: Any, **options: Any) -> Any:
        """The caches are moved there and back, as they may have been written."""
        return self.computed(host_kvcache, arrays, written=slice(1, 3), **options)

    def computed(
        self, function: Callable[..., Any], arrays: tuple[Any, ...], *, written: slice = slice(0), out: Any = None, **options: Any
    ) -> Any:
        moved: dict[int, Any] = {}
        there = [self.there(x, moved) if isinstance(x, np.ndarray) else (x, None) for x in arrays]
        target, memory = self.there(out) if isinstance(out, np.ndarray) else (out, None)
        result = function(*(array for array, _ in there), out=target, **self.options(options))
        for x, (_, buffer) in zip(arrays[written], there[written], strict=True):
            self.copy_back(x, buffer)
        parts = result if isinstance(result, tuple) else (result,)
        if memory is not None:
            assert parts[0] is target
            self.copy_back(out, memory)
        host = [out if n == 0 and out is not None else None if y is None else self.back(y) for n, y in enumerate(parts)]
        return cupyflash.AttentionResult(*host) if isinstance(result, tuple) else host[0]

    def merge_states(self, outs: Any, lses: Any, *, out: Any = None, lse_out: Any = None) -> tuple[Any, Any]:
        moved: dict[int, Any] = {}  # a target may be a part, which is an error
        parts = [[self.there(x, moved)[0] for x in arrays] for arrays in (outs, lses)]
        targets = [(None, None) if x is None else self.there(x, moved) for x in (out, lse_out)]
        results = host_merge(*parts, out=targets[0][0], lse_out=targets[1][0])
        for x, (there, memory), result in zip((out, lse_out), targets, results, strict=True):
            if x is not None:
                assert result is there
                self.copy_back(x, memory)
        return self.back(results[0]) if out is None else out, self.back(results[1]) if lse_out is None else lse_out

    def copy_back(self, x: Any, memory: Any) -> None:
        """The buffer under a view, as it is on the GPU now."""
        base = x
        while isinstance(base.base, np.ndarray):
            base = base.base
        if base.size:
            base.ravel(order="K").view(np.uint8)[...] = cupy.asnumpy(memory)[: base.nbytes]

    def gradients(self, grads: Any, targets: dict[str, Any]) -> Any:
        """Gradients on the GPU as NumPy's; `targets` are the host arrays, with array and buffer there, of those that were given."""
        found = {name: grad if grad is None else self.back(grad) for name, grad in grads._asdict().items()}
        for name, (x, there, memory) in targets.items():
            assert getattr(grads, name) is there
            self.copy_back(x, memory)
            found[name] = x
        return cupyflash.Gradients(**found)

    def attention_backward(self, *arrays: Any, dq: Any = None, dk: Any = None, dv: Any = None, **options: Any) -> Any:
        moved: dict[int, Any] = {}
        targets = {name: (x, *self.there(x, moved)) for name, x in (("dq", dq), ("dk", dk), ("dv", dv)) if x is not None}
        there = [self.there(x)[0] if isinstance(x, np.ndarray) else x for x in arrays]
        grads = host_backward(*there, **self.options(options), **{name: array for name, (_, array, _) in targets.items()})
        return self.gradients(grads, targets)

    def attention_vjp(self, q: Any, k: Any, v: Any, /, **options: Any) -> Any:
        out, pullback = host_vjp(*self(q, k, v), **self.options(options))
        parts = [None if y is None else self.back(y) for y in (out if isinstance(out, tuple) else (out,))]

        def back(dout: Any, dlse: Any = None) -> Any:
            return self.gradients(pullback(self.there(dout)[0], None if dlse is None else self.there(dlse)[0]), {})

        return cupyflash.AttentionResult(*parts) if isinstance(out, tuple) else parts[0], back


@pytest.fixture(autouse=True, params=LIBRARIES)
def on_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`cupyflash.attention` and `merge_states` compute on the GPU for the length of a test."""
    move = Move(request.param)

    @functools.wraps(host_attention)
    def attention(*arrays: Any, **options: Any) -> Any:
        return move.attention(*arrays, **options)

    monkeypatch.setattr(cupyflash, "attention", attention)
    monkeypatch.setattr(cupyflash, "merge_states", move.merge_states)
    return attention


# --- rows of the kernel table ----------------------------------------------------------------------------------------------------------


def row_name(row: variants.Row) -> str:
    return f"{row.family}-{row.head_dim}-{row.config.tile}" + "-options" * row.options


def forget() -> None:
    """Empty the caches of the modules that plan, so that each call is planned anew."""
    for cached in itertools.chain.from_iterable(vars(module).values() for module in (api, backward, cache, plan)):
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()


@contextlib.contextmanager
def only(*rows: variants.Row, table: str = "FORWARD") -> Iterator[None]:
    """Calls of any length choose among these rows alone."""
    with pytest.MonkeyPatch.context() as patch:
        if table == "FORWARD" and rows != variants.FORWARD:  # calls of few rows, too
            patch.setattr(plan, "DECODE", ())
        patch.setattr(plan, table, tuple(row._replace(longest=None) for row in rows))
        forget()
        try:
            yield
        finally:
            forget()


@contextlib.contextmanager
def few_sms(num_sms: int) -> Iterator[list[plan.Plan]]:
    """Calls are planned for a GPU of so few SMs that the blocks of small calls, too, take tile after tile; the list gets each plan."""
    planned: list[plan.Plan] = []

    def for_few(choose: Callable[..., plan.Plan]) -> Callable[..., plan.Plan]:
        def chosen(problem: Any, spec: device.DeviceSpec) -> plan.Plan:
            planned.append(choose(problem, dataclasses.replace(spec, num_sms=num_sms)))
            return planned[-1]

        return chosen

    with pytest.MonkeyPatch.context() as patch:
        for name in ("forward", "backward"):
            patch.setattr(plan, name, for_few(getattr(plan, name).__wrapped__))  # without its cache, which `only` could not empty
        forget()
        try:
            yield planned
        finally:
            forget()


def grids(planned: Iterable[plan.Plan], family: str) -> set[int]:
    """How many blocks the kernels of a family were launched with."""
    return {step.grid[0] for p in planned for step in p.steps if step.variant.family == family}


def fits(row: variants.Row) -> bool:
    """Whether this GPU can run the row."""
    spec = device.query(0)
    widest = variants.Variant(row.family, row.dtypes[0], *row.head_dims, (), row.config)
    smem_bytes = max(kernel.smem_bytes for kernel in (widest, *plan.companions(widest, row)))
    return spec.capability >= row.capability and row.arch in (None, spec.arch) and spec.smem_bytes >= smem_bytes


@contextlib.contextmanager
def nan_memory() -> Iterator[None]:
    """What the library makes for a call, results and workspaces, starts as NaN."""
    allocator = arrays.allocator

    def of_nan(made: Any, like: Any) -> arrays.Allocator:
        allocate = allocator(made, like)
        num_bytes = math.prod(made.shape) * (1 if made.dtype == "uint8" else ITEMSIZE[made.dtype])
        if not num_bytes or made.device_id < 0:
            return allocate

        def filled(owner: Any) -> tuple[int, Any]:
            ptr, new = allocate(owner)
            cupy.cuda.runtime.memsetAsync(ptr, 0xFF, num_bytes, arrays.current_stream(like))
            return ptr, new

        return filled

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "allocator", of_nan)
        yield


def needs(row: variants.Row) -> None:
    if not fits(row):
        pytest.skip(f"sm_{device.query(0).arch} cannot run {row_name(row)}")


def compile_ahead(kernels: Iterable[variants.Variant]) -> None:
    """A kernel takes NVRTC 0.3 to 2 s, without the GIL: all that a file needs compile at once.

    Each worker of pytest-xdist begins at a place of its own, and finds on disk what others have compiled when it comes there.
    """
    arch = device.query(0).arch
    worker, workers = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ordered = sorted(kernels, key=lambda variant: variant.name)
    first = len(ordered) * worker // workers

    def load(variant: variants.Variant) -> None:
        cupy.cuda.Device(0).use()
        jit.load(variant, arch, 0)

    with concurrent.futures.ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // workers)) as pool:
        list(pool.map(load, ordered[first:] + ordered[:first]))


def run_each_once(request: pytest.FixtureRequest, seeded: Callable[[Any], np.random.Generator]) -> None:
    """The tests that a file has from elsewhere, one way each, as they are on the host: the caller notes what is planned. Not in a worker of
    pytest-xdist: each would run them all, which takes longer than the kernels that compile when a test comes to them."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    for item in request.session.items:
        ways = item.callspec.params if item.path == request.path else {}
        if (ways.get("on_gpu"), ways.get("kernel")) == ("cupy", "chosen") and item.obj.__module__ != request.module.__name__:
            wanted = inspect.signature(item.obj).parameters
            given = {name: value for name, value in (ways | {"rng": seeded(item)}).items() if name in wanted}
            with contextlib.suppress(Exception, pytest.fail.Exception):  # what only holds on a GPU
                item.obj(**given)


# --- comparison ------------------------------------------------------------------------------------------------------------------------


def agrees(move: Move, q: Any, k: Any, v: Any, /, *, name: str, exact_weights: bool = False, **options: Any) -> None:
    """Compute NumPy inputs on the GPU into NaN-filled memory, and judge the result by the formula in float64.

    The expectation is the judge's own formula in float64, which takes less time than the library's reference, a loop over rows; for
    float64, where the formula is also the standard, that reference.
    """
    out = np.full((*q.shape[:-1], v.shape[-1]), np.nan, q.dtype)
    result = move.attention(q, k, v, out=out, **options)
    lse = None if result is out else result.lse
    given = {option: x for option, x in options.items() if option != "return_lse"}
    if q.dtype == np.float64:
        expected, expected_lse = reference.attention(q, k, v, return_lse=True, **given)
    else:
        expected, expected_lse = standard_attention(*(x.astype(np.float64) for x in (q, k, v)), dtype=np.float64, **given)
    standard, standard_lse = standard_attention(q, k, v, dtype=q.dtype, **given)
    judge(out, expected, standard, dtype=q.dtype, name=name, exact_weights=exact_weights)
    if lse is not None:
        judge(lse, expected_lse, standard_lse, dtype=q.dtype, name=name, kind="lse")


# --- streams ---------------------------------------------------------------------------------------------------------------------------

_SPIN = """
extern "C" __global__ void spin(long long nanoseconds) {
  long long start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); } while (now - start < nanoseconds);
}
"""


@functools.cache
def _spin() -> Any:
    return cupy.RawKernel(_SPIN, "spin")


def spin(handle: int, milliseconds: int) -> None:
    """Keep the stream with this handle busy for so long."""
    _spin()((1,), (1,), (np.int64(milliseconds * 1_000_000),), stream=types.SimpleNamespace(ptr=handle))
