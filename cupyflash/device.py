"""What a device is to the planner, and the one function that asks the driver for it."""

from __future__ import annotations

import functools
from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceSpec:
    """`arch` is the compute capability as NVRTC names it without `sm_` ("80", "90a"), or "host" for arrays in host memory."""

    arch: str
    num_sms: int = 0
    smem_bytes: int = 0  # the most shared memory one block may have
    l2_bytes: int = 0

    @property
    def capability(self) -> int:
        """90 for "90a": what kernels compare with to know that an instruction exists."""
        return int(self.arch.rstrip("af")) if self.arch != "host" else 0


HOST_SPEC = DeviceSpec("host")

# One GPU of each architecture that a kernel table serves, for plans and compiles without a device. Shared memory a block:
# CUDA C++ programming guide, table of technical specifications by compute capability.
KNOWN = {
    "80": DeviceSpec("80", 108, 166_912, 40 << 20),  # A100
    "86": DeviceSpec("86", 84, 101_376, 6 << 20),  # RTX 3090, A40
    "89": DeviceSpec("89", 128, 101_376, 72 << 20),  # RTX 4090, L40
    "90a": DeviceSpec("90a", 132, 232_448, 50 << 20),  # H100, H200
    "100": DeviceSpec("100", 148, 232_448, 126 << 20),  # B200
    "120": DeviceSpec("120", 170, 101_376, 96 << 20),  # RTX 5090
}


@functools.lru_cache
def query(device_id: int) -> DeviceSpec:
    """The spec of a CUDA device, asked once a process; -1, the id of host memory, is `HOST_SPEC` and asks no driver."""
    if device_id < 0:
        return HOST_SPEC
    from cupy.cuda import runtime

    properties = runtime.getDeviceProperties(device_id)
    major, minor = properties["major"], properties["minor"]
    return DeviceSpec(
        arch=f"{major}{minor}" + ("a" if major == 9 else ""),
        num_sms=properties["multiProcessorCount"],
        smem_bytes=properties["sharedMemPerBlockOptin"],
        l2_bytes=properties["l2CacheSize"],
    )
