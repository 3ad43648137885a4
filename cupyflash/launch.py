"""Plan + buffers + stream -> queued kernels. It decides nothing and waits for nothing."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Sequence
from typing import Any

from cupyflash import jit, tensormap
from cupyflash.device import DeviceSpec
from cupyflash.environment import load_cupy
from cupyflash.errors import LaunchError, StateError
from cupyflash.params import BACKWARD, POINTERS
from cupyflash.plan import Plan


class _Scratch(threading.local):
    """One thread's parameter buffer, and the devices whose context it has made current. The driver copies parameters before it returns."""

    def __init__(self) -> None:
        buffer = (ctypes.c_char * BACKWARD.size)()  # the largest, which begins with the forward's
        self.buffer = memoryview(buffer).cast("B")  # it holds `buffer`
        maps = (ctypes.c_char * (5 * tensormap.MAP_BYTES))()  # one more, for an aligned place in it
        self.maps_address = -(-ctypes.addressof(maps) // tensormap.MAP_BYTES) * tensormap.MAP_BYTES
        first = self.maps_address - ctypes.addressof(maps)
        self.maps = memoryview(maps).cast("B")[first:]
        self.pointers = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), self.maps_address)  # a kernel without maps has one parameter
        self.address = ctypes.addressof(self.pointers)
        self.ready: set[int] = set()


_scratch = _Scratch()
_first_process: int | None = None


def run(plan: Plan, pointers: Sequence[int], numbers: bytes, maps: bytes, spec: DeviceSpec, device_id: int, stream: int) -> None:
    """Queue the plan's kernels on `stream` of the device; the caller's current device is left as it was.

    `pointers` and `numbers` are the two parts of the parameter struct, as params.py makes them; for a backward call the pointers of the
    forward's part, and all that follows them. `maps` are the tensor maps of q, k, v and perhaps out without their addresses, or nothing.
    """
    driver, runtime = _cuda()
    scratch = _scratch
    current = runtime.getDevice()
    context = 0
    if current != device_id or device_id not in scratch.ready:
        context = driver.ctxGetCurrent()
        runtime.setDevice(device_id)  # also binds the context in a thread that has not touched CUDA yet
        scratch.ready.add(device_id)
    try:
        if maps:
            scratch.maps[: len(maps)] = maps
            for n in range(len(maps) // tensormap.MAP_BYTES):
                tensormap.replace_address(scratch.maps_address + n * tensormap.MAP_BYTES, pointers[n])
        for variant, (x, y, z), threads, smem_bytes, *_ in plan.steps:
            kernel = jit.load(variant, spec.arch, device_id, stream)
            buffer = scratch.buffer
            POINTERS.pack_into(buffer, 0, *pointers)
            buffer[POINTERS.size : POINTERS.size + len(numbers)] = numbers
            try:
                driver.launchKernel(kernel.handle, x, y, z, threads, 1, 1, smem_bytes, stream, scratch.address, 0)
            except driver.CUDADriverError as e:
                raise LaunchError(f"the driver refused {variant.name} on a grid of {x, y, z}: {e}; please report it") from e
    finally:
        if current != device_id:  # not by setDevice, which would make a context of 500 MB on a GPU that has none
            driver.ctxSetCurrent(context)
            if runtime.getDevice() != current:
                runtime.setDevice(current)


@functools.cache
def _cuda() -> tuple[Any, Any]:
    cuda = load_cupy().cuda  # what launches for every library
    return cuda.driver, cuda.runtime


def check_process() -> None:
    """StateError in a process forked from one that had used the GPU."""
    global _first_process
    pid = os.getpid()
    if _first_process is None:
        _first_process = pid
    elif pid != _first_process:
        raise StateError("this process was forked from one that had used the GPU, and CUDA does not survive that: start it with 'spawn'")
