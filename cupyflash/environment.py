"""What this installation is made of: CuPy, NVRTC, the folder of compiled kernels; and `show_config`, which says what was found."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import logging
import os
import platform
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cupyflash._version import __version__
from cupyflash.errors import SetupError

_log = logging.getLogger("cupyflash")
_log.addHandler(logging.NullHandler())


def show_config(mode: str = "stdout") -> dict[str, Any] | None:
    """Print the versions and devices that cupyflash would use, or return them; the counterpart of `numpy.show_config`.

    Parameters
    ----------
    mode : "stdout" to print, "dicts" to return a dict with the keys cupyflash, python, numpy, cupy, nvrtc, driver, devices and
        cache_dir, and error where CuPy cannot use a GPU. What is missing is None, or an empty list for devices. `driver` is the newest
        CUDA version that it runs.

    Raises
    ------
    ValueError : for another mode.

    Imports CuPy if it is installed (0.4 s); never raises because of what is missing.

    >>> import cupyflash
    >>> cupyflash.show_config(mode="dicts")["cupyflash"] == cupyflash.__version__
    True
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
    """The folder of compiled kernels: CUPYFLASH_CACHE_DIR, else CuPy's own. Read at each use, so it may be set after the import."""
    return Path(os.environ.get("CUPYFLASH_CACHE_DIR") or _cupy_cache_dir())


def _cupy_cache_dir() -> str:
    # Not Path.expanduser: it raises where there is no home.
    return os.environ.get("CUPY_CACHE_DIR") or os.path.expanduser("~/.cupy/kernel_cache")  # noqa: PTH111


_warned = False


def warn_unwritable(folder: Path, why: str | None) -> None:
    """One warning a process: what it says to do mends every folder."""
    global _warned
    if not _warned:
        _warned = True
        what = "kernels are compiled again in each process, because %s cannot be written (%s): set CUPYFLASH_CACHE_DIR to a folder that can"
        _log.warning(what, folder, why)


def load_cupy() -> Any:
    """CuPy, imported; SetupError with the pip line where it is absent or broken."""
    try:
        fresh = "cupy" not in sys.modules and importlib.util.find_spec("cupy") is not None
        with _cache_dir_for_cupy() if fresh else contextlib.nullcontext():
            import cupy
    except ModuleNotFoundError as e:
        if e.name != "cupy":
            raise setup_error(f"CuPy does not load: {e}") from e
        raise setup_error("kernels run through CuPy, which is not installed") from e
    except ImportError as e:
        last_line = str(e).strip(" =\n").splitlines()[-1:]
        raise setup_error(f"CuPy does not load: {''.join(last_line).strip()}") from e
    except OSError as e:
        raise SetupError(f"CuPy does not load: {e}; set CUPY_CACHE_DIR to a folder that can be written") from e
    return cupy


def load_nvrtc() -> Any:
    """CuPy's module of NVRTC's functions; SetupError with the pip line where the library is absent."""
    nvrtc = load_cupy().cuda.nvrtc
    try:
        nvrtc.getVersion()
    except RuntimeError as e:  # CuPy loads the library at the first call
        raise setup_error("NVRTC, which compiles the kernels, is not found") from e
    return nvrtc


def setup_error(problem: str) -> SetupError:
    """The problem with the command that mends it; where two CuPy packages overwrite each other, that is it."""
    import importlib.metadata  # 10 ms, which only an error costs

    pattern = r"cupy([-_](cuda|rocm).*)?"
    wheels = sorted({d.name for d in importlib.metadata.distributions() if re.fullmatch(pattern, d.name or "")})
    install = "pip install 'cupyflash[cuda13]' (or [cuda12] for a CUDA 12 driver)"
    if len(wheels) > 1:
        problem += f"; {' and '.join(wheels)} are both installed and overwrite each other"
        install = f"pip uninstall -y {' '.join(wheels)} && {install}"
        return SetupError(f"{problem}: {install}")
    if wheels and (major := re.match(r"cupy-cuda(\d\d)x", wheels[0])):
        install = f"pip install 'cupyflash[cuda{major[1]}]'"
    return SetupError(f"{problem}: {install}")


_importing = threading.Lock()


@contextlib.contextmanager
def _cache_dir_for_cupy() -> Iterator[None]:
    """`import cupy` makes CUPY_CACHE_DIR and fails where it cannot: there it gets ours, else one that lives as long as this process."""
    with _importing:
        given = os.environ.get("CUPY_CACHE_DIR")
        folder = Path(_cupy_cache_dir())
        if why := why_unwritable(folder):
            if why_unwritable(cache_dir()):
                warn_unwritable(folder, why)
                import shutil
                import tempfile  # with hashlib and random, 3 ms of an import that hardly ever needs it

                folder = Path(tempfile.mkdtemp(prefix="cupyflash-"))
                atexit.register(shutil.rmtree, folder, ignore_errors=True)
            else:
                folder = cache_dir()
        os.environ["CUPY_CACHE_DIR"] = str(folder)
        try:
            yield
        finally:
            os.environ.pop("CUPY_CACHE_DIR")
            if given is not None:
                os.environ["CUPY_CACHE_DIR"] = given


def why_unwritable(folder: Path) -> str | None:
    """None where files can be made in the folder, which is created if need be."""
    if folder.parts[:1] == ("~",):  # as a container has it that runs as a user without an entry
        return "there is no home directory"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        return e.strerror
    return None if os.access(folder, os.W_OK | os.X_OK) else "no permission"


def _gpu() -> dict[str, Any]:
    found: dict[str, Any] = {}
    try:
        cupy = load_cupy()
        found["cupy"] = cupy.__version__
        found["nvrtc"] = "{}.{}".format(*cupy.cuda.nvrtc.getVersion())
        driver = cupy.cuda.runtime.driverGetVersion()
        found["driver"] = f"{driver // 1000}.{driver % 1000 // 10}" if driver else None
        found["devices"] = [cupy.cuda.runtime.getDeviceProperties(i)["name"].decode() for i in range(cupy.cuda.runtime.getDeviceCount())]
    except Exception as e:
        if not isinstance(e.__cause__, ModuleNotFoundError):
            found["error"] = f"{type(e).__name__}: {e}".splitlines()[0]
    return found
