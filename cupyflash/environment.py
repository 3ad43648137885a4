"""What this installation is made of: `show_config`, the text that an issue needs and that cupyflash-bench doctor starts from."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import numpy as np

from cupyflash._version import __version__


def show_config(mode: str = "stdout") -> dict[str, Any] | None:
    """Print the versions and devices that cupyflash would use, or return them; the counterpart of `numpy.show_config`.

    Parameters
    ----------
    mode : "stdout" to print, "dicts" to return a dict with the keys cupyflash, python, numpy, cupy, nvrtc, driver, devices and
        cache_dir. What is missing is None, or an empty list for devices. `driver` is the newest CUDA version that it runs.

    Raises
    ------
    ValueError : for another mode.

    Imports CuPy if it is installed (0.4 s); never raises because of what is missing.

    >>> import cupyflash
    >>> sorted(cupyflash.show_config(mode="dicts"))
    ['cache_dir', 'cupy', 'cupyflash', 'devices', 'driver', 'numpy', 'nvrtc', 'python']
    """
    if mode not in ("stdout", "dicts"):
        raise ValueError(f"mode={mode!r} is unknown: it is 'stdout' or 'dicts'")
    config: dict[str, Any] = {
        "cupyflash": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cupy": None,
        "nvrtc": None,
        "driver": None,
        "devices": [],
        "cache_dir": str(cache_dir()),
    }
    config.update(_gpu())
    if mode == "dicts":
        return config
    for name, value in config.items():
        print(f"{name:<10} {'none' if value in (None, []) else value}")  # noqa: T201
    return None


def cache_dir() -> Path:
    """The folder of compiled kernels: CUPYFLASH_CACHE_DIR, else CuPy's own."""
    ours = os.environ.get("CUPYFLASH_CACHE_DIR") or os.environ.get("CUPY_CACHE_DIR")
    return Path(ours) if ours else Path("~/.cupy/kernel_cache").expanduser()


def _gpu() -> dict[str, Any]:
    found: dict[str, Any] = {}
    try:
        import cupy

        found["cupy"] = cupy.__version__
        found["nvrtc"] = "{}.{}".format(*cupy.cuda.nvrtc.getVersion())
        driver = cupy.cuda.runtime.driverGetVersion()
        found["driver"] = f"{driver // 1000}.{driver % 1000 // 10}" if driver else None
        found["devices"] = [cupy.cuda.runtime.getDeviceProperties(i)["name"].decode() for i in range(cupy.cuda.runtime.getDeviceCount())]
    except Exception as e:
        if not isinstance(e, ModuleNotFoundError):
            found["error"] = f"{type(e).__name__}: {e}".splitlines()[0]
    return found
