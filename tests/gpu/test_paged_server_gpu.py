"""The example of a server with its cache in GPU memory: the sample that it checks is right, by the kernels of few rows."""

from __future__ import annotations

from typing import Any

import pytest

from bench.examples import paged_server
from cupyflash import device, plan

pytest.importorskip("cupy", reason="CuPy is not installed; pip install 'cupyflash[cuda13]'")

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("pages", ["40", "400"])
def test_the_server_runs_on_a_gpu(pages: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    families: set[str] = set()

    def noting(problem: Any, spec: Any, choose: Any = plan.cached) -> Any:
        schedule = choose(problem, spec)
        families.update(step.variant.family for step in schedule.steps)
        return schedule

    monkeypatch.setattr(plan, "cached", noting)
    assert paged_server.main(["--device", "gpu", "--requests", "100", "--pages", pages]) == 0
    assert capsys.readouterr().out.startswith("100 of 100 requests, ")
    assert {"cache_append", "decode" if device.query(0).capability >= 80 else "fwd_simple"} <= families
