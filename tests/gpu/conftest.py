"""`pytest tests/gpu --record` writes record.json: what was run on which GPU, with a digest of the sources that decide what runs there."""

from __future__ import annotations

import collections
import datetime
import hashlib
import json
import re
from pathlib import Path

import pytest

RECORD = Path(__file__).with_name("record.json")
ROOT = Path(__file__).resolve().parents[2]
HOST_SIDE = ("api", "arrays", "device", "jit", "launch", "params", "plan", "problem", "variants")

_outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)


def digest() -> str:
    """Of all that decides what runs on a GPU: the CUDA sources without their comments, and the modules that choose, compile and launch."""
    cuda = sorted((ROOT / "cuda_src").rglob("*.cu*"))
    code = [" ".join(re.sub(r"//.*", "", file.read_text()).split()) for file in cuda]
    host = [(ROOT / "cupyflash" / f"{name}.py").read_text() for name in HOST_SIDE]
    return hashlib.sha256("\0".join(code + host).encode()).hexdigest()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write tests/gpu/record.json with the outcomes of this run")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        _outcomes[report.nodeid.partition("::")[2].partition("[")[0]][report.outcome] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not session.config.getoption("record", default=False):
        return
    import cupy

    runtime = cupy.cuda.runtime
    record = {
        "digest": digest(),
        "device": runtime.getDeviceProperties(0)["name"].decode(),
        "driver": runtime.driverGetVersion(),
        "cupy": cupy.__version__,
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "tests": {name: dict(counts) for name, counts in sorted(_outcomes.items())},
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
