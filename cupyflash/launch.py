"""Plan + addresses + stream -> queued kernels. It decides nothing and waits for nothing."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cupyflash import jit, params, tensormap
from cupyflash.device import DeviceSpec
from cupyflash.environment import load_cupy
from cupyflash.errors import LaunchError, StateError
from cupyflash.plan import Plan


class Packing:
    """How the addresses of a call become the parameters of its kernels: the struct of params.py, and tensor maps of some operands.

    The struct begins with addresses, for which `pointers` has the codes, and goes on with `numbers`, between whose parts a backward call
    has more addresses. `maps` have those of no array yet: for each, `offsets` says where in the struct its address is.
    """

    def __init__(
        self, pointers: str, numbers: tuple[bytes, ...], struct_bytes: int, maps: bytes = b"", offsets: tuple[int, ...] = ()
    ) -> None:
        self.numbers, self.maps, self.offsets = numbers, maps, offsets
        rest = struct_bytes - struct.calcsize(f"<{pointers}")
        self.content = struct.Struct(f"<{len(maps)}s{pointers}{rest}s2Q")  # maps, struct, and where these two lie
        self.memory = ctypes.c_char * (self.content.size + 63)  # maps must start at a multiple of 64


def maps_of(plan: Plan, operands: Mapping[str, Any], device_id: int) -> tuple[bytes, tuple[int, ...]]:
    """The tensor maps of a plan, for all of its kernels that have any, and where in the struct their addresses are."""
    boxes = next((step.boxes for step in plan.steps if step.boxes), ())
    if not boxes:
        return b"", ()
    with on_device(device_id):  # in a thread that has no context yet the driver would refuse to encode
        maps = b"".join(tensormap.encode(operands[name], rows) for name, rows in boxes)
    return maps, tuple(params.offset_of(name) for name, _ in boxes)


Queue = Callable[..., None]  # (addresses as `pointers` packs them, the packed addresses between the numbers)


def launcher(plan: Plan, packing: Packing, spec: DeviceSpec, device_id: int, current_stream: Callable[[], int]) -> Queue:
    """What queues the plan's kernels on the current stream of their device, which must be the current one; for any number of threads."""
    driver, _ = _cuda()
    start, refused = driver.launchKernel, driver.CUDADriverError
    kernels: list[tuple[jit.Kernel, int, int, int, int, int, str]] = []

    def load(stream: int) -> list[tuple[jit.Kernel, int, int, int, int, int, str]]:
        nonlocal kernels
        kernels = [
            (jit.load(step.variant, spec.arch, device_id, stream), *step.grid, step.threads, step.smem_bytes, step.variant.name)
            for step in plan.steps
        ]
        return kernels

    def queue(addresses: tuple[int, ...], more: bytes = b"") -> None:
        stream = current_stream()
        if stream < 0:  # the call is only traced: what it will need is loaded now, since it may then be captured
            load(0)
            return
        address, _memory = _parameters(packing, addresses, more)
        loaded = kernels or load(stream)
        try:
            for kernel, x, y, z, threads, smem_bytes, name in loaded:  # noqa: B007
                start(kernel.handle, x, y, z, threads, 1, 1, smem_bytes, stream, address, 0)
        except refused as e:
            raise LaunchError(f"the driver refused {name} on a grid of {x, y, z}: {e}; please report it") from e

    return queue


@functools.lru_cache(maxsize=2048)  # 3 MB
def _parameters(packing: Packing, addresses: tuple[int, ...], more: bytes) -> tuple[int, Any]:
    """Where the driver reads the parameters, and what holds that memory.

    They are kept, since allocators give the same addresses again and again and a call that finds its parameters takes a third less time. No
    thread writes into them any more.
    """
    memory, maps = packing.memory(), packing.maps
    start = ctypes.addressof(memory)
    place = -(-start // 64) * 64
    packing.content.pack_into(memory, place - start, maps, *addresses, more.join(packing.numbers), place + len(maps), place)
    for n, offset in enumerate(packing.offsets):
        address = ctypes.c_uint64.from_address(place + len(maps) + offset).value
        tensormap.replace_address(place + n * tensormap.MAP_BYTES, address)
    return place + packing.content.size - 16, memory  # a kernel without maps has one parameter


@functools.cache
def contexts(device_id: int) -> set[int]:
    """Those of a device that `on_device` has found or made current. While one of them is, there is no need for it: a question that the
    driver answers at once, also for a thread that has no context yet."""
    return set()


def context_reader() -> Callable[[], int]:
    """What tells the current context of the thread, 0 for none."""
    read: Callable[[], int] = _cuda()[0].ctxGetCurrent
    return read


@contextlib.contextmanager
def on_device(device_id: int) -> Iterator[None]:
    """Make the device the current one, and leave the caller's as it was. Host memory (-1) needs none."""
    if device_id < 0:
        yield
        return
    driver, runtime = _cuda()
    current, context = runtime.getDevice(), driver.ctxGetCurrent()
    if current != device_id or not context:
        runtime.setDevice(device_id)  # also binds the context in a thread that has not touched CUDA yet
    contexts(device_id).add(driver.ctxGetCurrent())
    try:
        yield
    finally:
        if current != device_id:  # not by setDevice, which would make a context of 500 MB on a GPU that has none
            driver.ctxSetCurrent(context)
            if runtime.getDevice() != current:
                runtime.setDevice(current)


@functools.cache
def _cuda() -> tuple[Any, Any]:
    cuda = load_cupy().cuda  # what launches for every library
    return cuda.driver, cuda.runtime


_first_process: int | None = None


def check_process() -> None:
    """StateError in a process forked from one that had used the GPU."""
    global _first_process
    pid = os.getpid()
    if _first_process is None:
        _first_process = pid
    elif pid != _first_process:
        raise StateError("this process was forked from one that had used the GPU, and CUDA does not survive that: start it with 'spawn'")
