"""Bytes of DRAM that the kernels of one call move, counted by NVIDIA Nsight Compute (`ncu`) in a process of its own.

`python -m bench.ncu CASE` is that process: a case as JSON, its call once unseen, for what is compiled, and once between the marks of the
profiler.
"""

from __future__ import annotations

import csv
import importlib
import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from . import gpu, peers
from .cases import CacheCase, Case

READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
# Each kernel finds no cache filled; both metrics are counted in one pass, so none runs twice.
OPTIONS = ("--csv", "--print-units", "base", "--metrics", f"{READ},{WRITTEN}", "--cache-control", "all", "--clock-control", "none")
PLACES = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute/*", "/usr/local/cuda*/nsight-compute-*")


class Counted(NamedTuple):
    """One launch."""

    kernel: str
    read: int
    written: int


class NcuError(Exception):
    """Why nothing was counted, in a line."""


def find() -> str | None:
    """Where ncu is, on the PATH or where NVIDIA's installers put it."""
    if found := shutil.which("ncu"):
        return found
    folders = (folder for place in PLACES for folder in sorted(Path("/").glob(place[1:]), reverse=True))
    return next((str(folder / "ncu") for folder in folders if (folder / "ncu").is_file()), None)


def why_not() -> str | None:
    """Why bytes cannot be counted here, or None."""
    return None if find() else "ncu (NVIDIA Nsight Compute) is not installed: https://developer.nvidia.com/nsight-compute"


def count(case: Case) -> list[Counted]:
    """The launches of a case's call in order; NcuError where ncu or the call fails."""
    if reason := why_not():
        raise NcuError(reason)
    command = [str(find()), *OPTIONS, "--profile-from-start", "off", sys.executable, "-m", __spec__.name, json.dumps(asdict(case))]
    root = Path(__file__).resolve().parents[len(__spec__.name.split(".")) - 1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if found := parse(done.stdout):
        return found
    said = [line for line in (done.stdout + done.stderr).splitlines() if "==ERROR==" in line] or done.stderr.splitlines()[-1:]
    if "ERR_NVGPUCTRPERM" in done.stdout + done.stderr:
        said = ["this user may not read the GPU's counters (ERR_NVGPUCTRPERM): run as root, or with NVreg_RestrictProfilingToAdminUsers=0"]
    raise NcuError(f"ncu counted nothing: {' '.join(said)}" if said else "ncu counted nothing and does not say why")


def parse(text: str) -> list[Counted]:
    """Launches in what `ncu --csv` prints, one row a metric, among lines of its own and of the program."""
    lines = text.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    launches: dict[str, dict[str, str]] = {}
    for row in csv.DictReader(line for line in lines[start:] if line.startswith('"')):
        launch = launches.setdefault(row["ID"], {"kernel": row["Kernel Name"].partition("(")[0]})
        launch[row["Metric Name"]] = row["Metric Value"]
    return [Counted(one["kernel"], _bytes(one, READ), _bytes(one, WRITTEN)) for one in launches.values()]


def _bytes(launch: dict[str, str], metric: str) -> int:
    try:
        return round(float(launch[metric].replace(",", "")))
    except (KeyError, ValueError):
        raise NcuError(f"ncu says {launch.get(metric, 'nothing')!r} of {metric}, which this GPU may not count") from None


def run_once(case: Case) -> None:
    """What ncu sees."""
    place = gpu.open_place()
    with place:
        call = peers.CupyFlash().bind(case, place.inputs(case, cold=False)[0])
        call()
        place.wait()
        with importlib.import_module("cupyx.profiler").profile():
            call()
            place.wait()


def case_of(text: str) -> Case:
    """A case from its JSON, whose lists are tuples."""
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in json.loads(text).items()}
    return (CacheCase if "page_size" in fields else Case)(**fields)


if __name__ == "__main__":
    run_once(case_of(sys.argv[1]))
