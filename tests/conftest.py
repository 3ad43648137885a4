"""What every test shares: the import path, a seed of its own, the markers, and `--forbid-skips`."""

from __future__ import annotations

import functools
import os
import sys
import warnings
import zlib
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).resolve().parent
# tests/ for `judge`; the checkout for `bench`, which only an install knows as cupyflash.bench
sys.path[:0] = [str(TESTS), str(TESTS.parent)]


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers seeded by the test's own id: the same in every run and order, other ones for each parameter."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forbid-skips", action="store_true", help="a skipped test fails: for runs where everything is installed")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):  # pytest-xdist: before its workers start. A BLAS on all cores in each waits for the others.
        for library in ("OMP", "OPENBLAS", "MKL"):
            os.environ.setdefault(f"{library}_NUM_THREADS", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and (reason := why_no_gpu()):
            item.add_marker(pytest.mark.skip(reason=reason))


@functools.cache
def why_no_gpu() -> str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy warns where it finds no toolkit, which is one of the answers here
            import cupy

            cupy.cuda.runtime.getDeviceCount()
    except ImportError as error:
        return f"no GPU: CuPy does not load ({error}); pip install 'cupyflash[cuda13]' or [cuda12]"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no GPU: {error}"
    return None


# No installation mends this one: it waits for a GPU, and tests/gpu/record.json says why.
PENDING = "the GPU tests have not all run on these sources"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if not hasattr(report, "wasxfail"):  # an expected failure is reported as skipped, too
        forbid_skip(item.config, report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield  # a whole file that skips itself, as importorskip does
    forbid_skip(collector.config, report)
    return report


def forbid_skip(config: pytest.Config, report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and config.getoption("forbid_skips"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        if PENDING in str(reason):
            return
        report.outcome = "failed"
        report.longrepr = f"--forbid-skips: {reason}"
