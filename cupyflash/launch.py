"""Plan + buffers + stream -> queued kernels. It decides nothing and waits for nothing."""

from __future__ import annotations

import ctypes
import os
import threading

from cupyflash import jit
from cupyflash.device import DeviceSpec
from cupyflash.errors import LaunchError, SetupError, StateError
from cupyflash.params import FORWARD, POINTERS
from cupyflash.plan import Plan


class _Scratch(threading.local):
    """One thread's parameter buffer, and the devices whose context it has made current. The driver copies parameters before it returns."""

    def __init__(self) -> None:
        self.buffer = (ctypes.c_char * FORWARD.size)()
        self.pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.buffer))
        self.address = ctypes.addressof(self.pointers)
        self.numbers = ctypes.addressof(self.buffer) + POINTERS.size
        self.ready: set[int] = set()


_scratch = _Scratch()
_first_process: int | None = None


def run(plan: Plan, pointers: tuple[int, ...], numbers: bytes, spec: DeviceSpec, device_id: int, stream: int) -> None:
    """Queue the plan's kernels on `stream` of the device; the caller's current device is left as it was.

    `pointers` and `numbers` are the two parts of the parameter struct, as params.py makes them.
    """
    from cupy.cuda import driver, runtime

    _check_process()
    scratch = _scratch
    current = runtime.getDevice()
    if current != device_id or device_id not in scratch.ready:
        runtime.setDevice(device_id)  # also binds the context in a thread that has not touched CUDA yet
        scratch.ready.add(device_id)
    try:
        for step in plan.steps:
            variant = step.variant
            kernel = jit.load(variant, spec.arch, device_id)
            POINTERS.pack_into(scratch.buffer, 0, *pointers)
            ctypes.memmove(scratch.numbers, numbers, len(numbers))
            try:
                driver.launchKernel(kernel.handle, *step.grid, variant.threads, 1, 1, variant.smem_bytes, stream, scratch.address, 0)
            except driver.CUDADriverError as e:
                raise LaunchError(f"the driver refused {variant.name} on a grid of {step.grid}: {e}; please report it") from e
    finally:
        if current != device_id:
            runtime.setDevice(current)


def check_cupy() -> None:
    """CuPy is what launches for every library; SetupError with the pip line where it is missing."""
    try:
        import cupy  # noqa: F401
    except ImportError as e:
        raise SetupError("kernels run through CuPy, which is not installed: pip install 'cupyflash[cuda13]' (or [cuda12])") from e


def _check_process() -> None:
    global _first_process
    pid = os.getpid()
    if _first_process is None:
        _first_process = pid
    elif pid != _first_process:
        raise StateError("this process was forked from one that had used the GPU, and CUDA does not survive that: start it with 'spawn'")
