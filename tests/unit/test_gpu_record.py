"""tests/gpu/record.json is of these sources: what runs on the GPU was last changed before it was last tested there."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

GPU = Path(__file__).resolve().parents[1] / "gpu"


def test_the_record_is_of_these_sources_and_has_no_failure() -> None:
    spec = importlib.util.spec_from_file_location("gpu_conftest", GPU / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    record = json.loads((GPU / "record.json").read_text())
    if record.get("pending"):
        pytest.skip(f"the GPU tests have not run on these sources yet: {record['pending']}")
    assert record["digest"] == conftest.digest(), "run `pytest tests/gpu --record` on a GPU and commit tests/gpu/record.json"
    assert record["tests"]
    for name, outcomes in record["tests"].items():
        assert set(outcomes) == {"passed"}, name
