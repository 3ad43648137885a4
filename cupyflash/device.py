"""What a device is to the planner, and the functions that ask the driver for it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from cupyflash.environment import load_cupy, load_nvrtc
from cupyflash.errors import DeviceError


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


def named(name: str) -> DeviceSpec:
    """The spec of "host", of "cuda", the current GPU, or of an architecture; the "a" of sm_90a is part of its instructions' name only."""
    if name in ("host", "cuda"):
        return HOST_SPEC if name == "host" else query(current())
    arch = name.removeprefix("sm_")
    spec = KNOWN.get(arch) or KNOWN.get(f"{arch}a")
    if spec is None:
        known = ", ".join(repr(f"sm_{arch}") for arch in KNOWN)
        raise DeviceError(f"device={name!r} is unknown: it is 'cuda' for the current GPU, 'host' or one of {known}")
    return spec


def current() -> int:
    """The id of the current CUDA device; DeviceError where there is none."""
    runtime = load_cupy().cuda.runtime
    try:
        runtime.getDeviceCount()  # getDevice alone would say 0 on a machine without a GPU
        return int(runtime.getDevice())
    except runtime.CUDARuntimeError as e:
        if not runtime.driverGetVersion():
            raise DeviceError("no NVIDIA driver is loaded: where it is, nvidia-smi works, in a container with --gpus all") from e
        raise DeviceError(f"no GPU can be used ({e}): nvidia-smi -L lists those there are, CUDA_VISIBLE_DEVICES hides some") from e


@functools.lru_cache
def query(device_id: int) -> DeviceSpec:
    """The spec of a CUDA device, asked once a process; -1, the id of host memory, is `HOST_SPEC` and asks no driver.

    DeviceError where NVRTC cannot compile for it.
    """
    if device_id < 0:
        return HOST_SPEC
    properties = load_cupy().cuda.runtime.getDeviceProperties(device_id)
    major, minor = properties["major"], properties["minor"]
    _check_compiler(properties["name"].decode(), major, minor)
    return DeviceSpec(
        arch=f"{major}{minor}" + ("a" if major == 9 else ""),
        num_sms=properties["multiProcessorCount"],
        smem_bytes=properties["sharedMemPerBlockOptin"],
        l2_bytes=properties["l2CacheSize"],
    )


def served() -> list[int]:
    """The compute capabilities, 90 for 9.0, that NVRTC compiles the kernels for: `__grid_constant__` of their argument begins with 7.0."""
    return sorted(arch for arch in load_nvrtc().getSupportedArchs() if arch >= 70)


def _check_compiler(name: str, major: int, minor: int) -> None:
    capability, archs = 10 * major + minor, served()
    if capability in archs:
        return
    version = ".".join(map(str, load_nvrtc().getVersion()))
    oldest, newest = (f"{arch // 10}.{arch % 10}" for arch in (archs[0], archs[-1]))
    if capability > archs[0]:
        way_out = "pip install -U 'cupyflash[cuda13]', in a fresh environment, brings the newest"
    else:
        way_out = "pip install 'cupyflash[cuda12]', in a fresh environment, brings one for 7.0 and newer, and older GPUs have no kernel"
    raise DeviceError(
        f"{name} has compute capability {major}.{minor}, and NVRTC {version} compiles the kernels for {oldest} to {newest}: {way_out}"
    )
