"""What `cupyflash-bench ceilings` has measured on this machine, kept for the tables of later runs."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from .kernels import cache_dir
from .machine import cpu_name, nvidia_driver, usable_cores
from .timing import Ceilings, Place

FILE = "cupyflash-ceilings.json"


class Stored(NamedTuple):
    """Rates by name as `Place.rates` gives them, and the day."""

    rates: dict[str, float]
    day: str

    @property
    def ceilings(self) -> Ceilings:
        return Ceilings(best_matmul(self.rates), self.rates.get("read"))


def best_matmul(rates: dict[str, float]) -> float | None:
    return next((rates[name] for name in ("matmul_bf16", "matmul_fp16", "matmul_fp32") if name in rates), None)


def device_name(place: Place) -> str:
    """What the rates are of: the kind of GPU, or the CPU with the cores that this process may use."""
    if place.arch is None:
        return f"{cpu_name()}, {usable_cores()} cores"
    return next((gpu.name for gpu in nvidia_driver().gpus), place.arch)


def stored(place: Place) -> Stored | None:
    """What is kept of this device, or None, also where the file cannot be read."""
    try:
        kept = _read()[device_name(place)]
        return Stored({str(name): float(rate) for name, rate in kept["rates"].items()}, str(kept["day"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def store(place: Place, rates: dict[str, float]) -> Path:
    """Keep them beside the compiled kernels; OSError where that folder cannot be written."""
    folder = cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    kept = {**_read(), device_name(place): {"rates": rates, "day": datetime.date.today().isoformat()}}
    part = folder / f"{FILE}.{os.urandom(8).hex()}.part"
    part.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    return part.replace(folder / FILE)


def forget(place: Place) -> None:
    kept = _read()
    if kept.pop(device_name(place), None):
        (cache_dir() / FILE).write_text(json.dumps(kept, indent=1), encoding="utf-8")


def _read() -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        kept = json.loads((cache_dir() / FILE).read_text(encoding="utf-8"))
        if isinstance(kept, dict):
            return kept
    return {}
