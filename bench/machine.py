"""What this machine is and what it lacks: the environment record of every result, and the text of `cupyflash-bench doctor`.

It starts from `cupyflash.show_config` and adds what that dict has no room for: the host, the driver's own word (libcuda through ctypes,
so that it can be read where CuPy is missing or broken), the wheels that are installed. Nothing here imports CuPy or a framework.
"""

from __future__ import annotations

import ctypes
import datetime
import os
import platform
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import cupyflash

from . import nvml

# The oldest driver of each CUDA major that has an extra (NVIDIA's minor-version compatibility: every 12.x runs on 525, every 13.x on 580).
DRIVERS = {13: "580", 12: "525"}
FRAMEWORKS = (
    *("torch", "jax", "ml_dtypes", "transformers", "triton"),
    *("flash-attn", "tokenspeed-fa3", "flash-attn-4", "flashinfer-python", "xformers", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
)


def environment() -> dict[str, Any]:
    """What a number depends on besides the code: the header record of JSON lines."""
    found = config()
    driver = nvidia_driver()
    return {
        "record": "environment",
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": sys.argv[1:],
        **found,
        "cache_dir": home_as_tilde(found["cache_dir"]),
        "driver": found["driver"] or driver.cuda,
        "devices": [gpu._asdict() for gpu in driver.gpus],
        "nvml": nvml_facts(),
        "packages": {name: version for name in FRAMEWORKS if (version := installed(name))},
        "blas": blas(),
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "memory_bytes": total_memory(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def config() -> dict[str, Any]:
    return cupyflash.show_config(mode="dicts") or {}


def blas() -> str | None:
    """Name and version of the BLAS that NumPy was built with, where NumPy says so (1.25 and later)."""
    try:
        found: Any = np.show_config(mode="dicts")
        return "{name} {version}".format(**found["Build Dependencies"]["blas"])
    except (TypeError, KeyError):
        return None


def cpu_name() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores that this process may use: in a container fewer than the machine has."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        return os.cpu_count() or 1


def total_memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def available_memory() -> int | None:
    """Bytes that can be allocated without swapping, where the system says so."""
    try:
        with Path("/proc/meminfo").open(encoding="ascii") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return total_memory()


def nvml_facts() -> dict[str, Any] | None:
    """The driver's release, clock and power limit of the first GPU, where there is one and it says so."""
    try:
        return nvml.Sensor().facts()
    except OSError:
        return None


class Gpu(NamedTuple):
    name: str
    arch: str
    memory_bytes: int


class Driver(NamedTuple):
    """What libcuda says: the newest CUDA version it runs ("13.0"; None without a driver), the GPUs, and why there are none."""

    cuda: str | None
    gpus: list[Gpu]
    error: str | None = None


def nvidia_driver() -> Driver:
    """Ask libcuda, which is there exactly where a driver is. Makes no context (cuInit alone), and never raises."""
    try:
        lib = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return Driver(None, [])

    def ask(function: str, *arguments: Any) -> None:
        if code := getattr(lib, function)(*arguments):
            raise RuntimeError(f"{function} returned {code}")

    cuda, gpus = None, []
    try:
        version, count = ctypes.c_int(), ctypes.c_int()
        ask("cuDriverGetVersion", ctypes.byref(version))
        cuda = f"{version.value // 1000}.{version.value % 1000 // 10}"
        ask("cuInit", 0)
        ask("cuDeviceGetCount", ctypes.byref(count))
        for ordinal in range(count.value):
            device, name, memory = ctypes.c_int(), ctypes.create_string_buffer(128), ctypes.c_size_t()
            major, minor = ctypes.c_int(), ctypes.c_int()
            ask("cuDeviceGet", ctypes.byref(device), ordinal)
            ask("cuDeviceGetName", name, len(name), device)
            ask("cuDeviceTotalMem_v2", ctypes.byref(memory), device)
            ask("cuDeviceGetAttribute", ctypes.byref(major), 75, device)  # COMPUTE_CAPABILITY_MAJOR
            ask("cuDeviceGetAttribute", ctypes.byref(minor), 76, device)  # COMPUTE_CAPABILITY_MINOR
            gpus.append(Gpu(name.value.decode(), f"sm_{major.value}{minor.value}", memory.value))
    except (RuntimeError, AttributeError, OSError) as error:  # AttributeError: a library without that function
        return Driver(cuda, gpus, str(error))
    return Driver(cuda, gpus)


class Problem(NamedTuple):
    why: str
    way_out: str  # lines to paste into a shell, or what to do where none helps


class Diagnosis(NamedTuple):
    """`facts` in the order to print them; `problems` keep GPU arrays from working, in the order to mend them."""

    facts: list[tuple[str, str]]
    problems: list[Problem]


def diagnose() -> Diagnosis:
    """Look at everything that matters. Nothing is left behind, nothing raises."""
    found, driver, wheels, headers = config(), nvidia_driver(), cupy_wheels(), cuda_headers()
    unwritable = why_not_writable(Path(found["cache_dir"]))
    missing = problems(found, driver, wheels, has_headers=headers is not None, unwritable=unwritable)
    facts = [
        ("cupyflash", found["cupyflash"]),
        ("python", f"{found['python']}, {platform.system()} {platform.machine()}"),
        ("numpy", found["numpy"] + (f", BLAS {name}" if (name := blas()) else "")),
        ("cpu", f"{cpu_name()}, {usable_cores()} cores"),
        ("cupy", ", ".join(f"{name} {version}" for name, version in wheels.items()) or "not installed"),
        ("nvrtc", found["nvrtc"] or nvrtc_wheel() or "not found"),
        ("headers", home_as_tilde(headers) if headers else "not found"),
        ("driver", f"CUDA {driver.cuda}{driver_release()}" if driver.cuda else "not found"),
        *(("gpu", f"{gpu.name}, {gpu.arch}, {gpu.memory_bytes / 1e9:.0f} GB") for gpu in driver.gpus),
        *([] if driver.gpus else [("gpu", f"none ({driver.error})" if driver.error else "none")]),
        ("cache", home_as_tilde(found["cache_dir"]) + (f", not writable: {unwritable}" if unwritable else ", writable")),
        *((name, version) for name in FRAMEWORKS if (version := installed(name))),
    ]
    return Diagnosis(facts, missing)


def problems(found: dict[str, Any], driver: Driver, wheels: dict[str, str], *, has_headers: bool, unwritable: str | None) -> list[Problem]:
    """What keeps GPU arrays from working, from what was found; the pip line is that of the installed CuPy, else that of the driver."""
    speaks = int(driver.cuda.split(".")[0]) if driver.cuda else None
    built_for = next((int(name[9:11]) for name in wheels if name[9:11].isdigit()), None)  # cupy-cuda12x -> 12; from source -> None
    too_new = speaks is not None and built_for is not None and built_for > speaks
    keeps = len(wheels) == 1 and built_for in DRIVERS and not too_new
    install = install_line(built_for if keeps else speaks)
    listed = []
    if speaks is None:
        listed.append(Problem("No NVIDIA driver, so no GPU. On a machine with one:", install))
    elif speaks < min(DRIVERS):
        listed.append(Problem(f"The driver speaks CUDA {driver.cuda}; 12.0 is the oldest that will do.", f"driver {DRIVERS[12]} or newer"))
    elif not driver.gpus:
        why = driver.error or "the driver lists none"
        listed.append(Problem(f"No GPU can be used: {why}.", "nvidia-smi lists what there is; CUDA_VISIBLE_DEVICES may hide it"))
    if len(wheels) > 1:
        names = list(wheels)
        why = f"{' and '.join(names)} are both installed; they overwrite each other."
        listed.append(Problem(why, f"pip uninstall -y {' '.join(names)}\n{install}"))
    elif too_new:
        name = next(iter(wheels))
        listed.append(Problem(f"{name} needs a newer driver than one of CUDA {driver.cuda}.", f"pip uninstall -y {name}\n{install}"))
    elif wheels and not found["nvrtc"]:
        error = found.get("error") or "NVRTC, the run-time compiler, was not found"
        listed.append(Problem(f"CuPy cannot compile: {error}.", install))
    elif wheels and not has_headers:
        listed.append(Problem("The CUDA headers (cuda_fp16.h) were not found.", install))
    elif not wheels and speaks:
        listed.append(Problem("CuPy is not installed.", install))
    if unwritable:
        listed.append(Problem(f"The cache folder cannot be written: {unwritable}.", "export CUPYFLASH_CACHE_DIR=/a/folder/of/yours"))
    return listed


def install_line(cuda: int | None) -> str:
    """The pip line for a CUDA major (a newer driver runs the newest we have); where nothing says which, both with what they ask for."""
    if cuda is not None and cuda >= min(DRIVERS):
        return f"pip install 'cupyflash[cuda{min(cuda, max(DRIVERS))}]'"
    return "\n".join(f"pip install 'cupyflash[cuda{major}]'  # driver {oldest} or newer" for major, oldest in DRIVERS.items())


def cupy_wheels() -> dict[str, str]:
    """Every installed distribution that writes the package `cupy`, with its version: two of them overwrite each other."""
    found = {(dist.metadata["Name"] or "").lower(): dist.version for dist in metadata.distributions()}
    return {name: version for name, version in sorted(found.items()) if name == "cupy" or name.startswith(("cupy-cuda", "cupy-rocm"))}


def nvrtc_wheel() -> str | None:
    """The version of an installed NVRTC wheel: what CuPy would find if it were there."""
    wheels = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
    return next((f"{version} (CuPy does not load it)" for wheel in wheels if (version := installed(wheel))), None)


def driver_release() -> str:
    """The driver's own number after a comma, as in ", release 580.82.07", where Linux says it."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="ascii").split()
    except OSError:
        return ""
    return next((f", release {word}" for word in words if word[:1].isdigit() and "." in word), "")


def cuda_headers() -> str | None:
    """Where cuda_fp16.h is: in the nvidia-cuda-runtime wheel, else in a toolkit's folder, in the order in which CuPy looks."""
    for wheel in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"):
        try:
            found = any(file.name == "cuda_fp16.h" for file in metadata.files(wheel) or ())
        except metadata.PackageNotFoundError:
            continue
        if found:
            return f"{wheel} {metadata.version(wheel)}"
    for root in (os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), os.environ.get("CONDA_PREFIX"), "/usr/local/cuda"):
        for folder in ("include", "targets/x86_64-linux/include"):
            if root and (Path(root) / folder / "cuda_fp16.h").is_file():
                return str(Path(root) / folder)
    return None


def why_not_writable(folder: Path) -> str | None:
    """None if a file can be made there, or in the nearest parent that exists (then the folder can be made, too)."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"{error.strerror}: {home_as_tilde(str(folder))}"


def installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def home_as_tilde(path: str) -> str:
    """A path as an issue may show it: without the name of the user."""
    home = str(Path.home())
    return "~" + path[len(home) :] if home != "/" and path.startswith(home + os.sep) else path
