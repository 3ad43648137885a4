"""tests/gpu/record.json holds each GPU test that there is, of these sources, and no failure."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
GPU = TESTS / "gpu"
RUN = "run `pytest tests/gpu --record` on a GPU and commit tests/gpu/record.json"

# Failures of other libraries that concern what is built, each named by a test.
KNOWN_FAILURES = {*range(1, 23), *range(25, 119), 124, 130}


@pytest.fixture(scope="module")
def conftest() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_conftest", GPU / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def record() -> Any:
    return json.loads((GPU / "record.json").read_text())


def test_the_record_has_no_failure(conftest: Any, record: Any) -> None:
    outcomes = conftest.flat(record["tests"])
    assert {test: outcome for test, outcome in outcomes.items() if not outcome.startswith(("passed", "skipped: "))} == {}


def test_the_record_is_of_these_sources(conftest: Any, record: Any) -> None:
    skip_while_pending(record)
    assert record["digest"] == conftest.digest(), RUN
    assert record["tests"]


def test_the_record_has_each_test(conftest: Any, record: Any) -> None:
    pytest.importorskip("cupy", reason="without CuPy the GPU tests cannot be listed; pip install 'cupyflash[cuda13]'")
    skip_while_pending(record)
    command = (sys.executable, "-m", "pytest", "tests/gpu", "--collect-only", "-q", "-p", "no:cacheprovider")
    listed = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=True).stdout
    tests = {conftest.named(line) for line in listed.splitlines() if "::" in line}
    files = {file for file, _, _ in tests}  # a file that needs a package that is not here lists nothing
    recorded = {test for test in conftest.flat(record["tests"]) if test[0] in files}
    assert tests == recorded, RUN


def skip_while_pending(record: Any) -> None:
    if record.get("pending"):
        pytest.skip(f"the GPU tests have not all run on these sources: {record['pending']}")


def test_outcomes_are_added_to_those_before(conftest: Any) -> None:
    before = {("f", "a", "x-1"): "passed", ("f", "a", "y"): "failed", ("f", "b", ""): "skipped: needs 2 GPUs"}
    before |= {
        ("f", function, name): "passed"
        for function in ("c", "d")
        for name in ("", "0", "2", "1", "10", "007", "a-9", "a-10", "a-12", "a-", "-3")
    }
    after = {("f", "a", "x-1"): "skipped: needs 2 GPUs", ("f", "a", "y"): "passed", ("f", "b", ""): "passed", ("g", "c", ""): "passed"}
    assert set(conftest.merged(before, after).values()) == {"passed"}
    assert conftest.flat(conftest.nested(before)) == before
    assert conftest.nested(before)["f"]["a"] == {"passed": "x-1", "failed": "y"}
    assert [*conftest.nested(before)["f"]] == ["a", "b", "c d"]
    assert conftest.named("tests/gpu/f.py::a[x[1]-y::z]") == ("f.py", "a", "x[1]-y::z")


def test_the_ways_of_a_case_are_one_case(conftest: Any) -> None:
    module = types.SimpleNamespace(WAYS={"cupy", "torch", "sm80"})
    items = [types.SimpleNamespace(nodeid=f"g/f.py::a[{way}-cupyx-3]", module=module) for way in ("sm80-cupy", "torch")]
    assert {conftest.case_of(item) for item in items} == {("f.py", "a", "cupyx-3")}
    assert conftest.case_of(types.SimpleNamespace(nodeid="g/f.py::b")) == ("f.py", "b", "")


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([""], ""),
        (["", "x"], "{,x}"),
        (["a1-x", "a2-x", "a3-x", "b1"], "{a{1..3}-x,b1}"),
        (["0", "1", "2", "10", "007", "a-"], "{0..2,007,10,a-}"),
        (["0", "1", "2"], "{0..2}"),
        (["bfloat16", "float16", "float32"], "{bfloat16,float{16,32}}"),
        (["fwd_sm80-64-cupy", "fwd_sm80-64-torch", "fwd_sm90-64-cupy"], "fwd_sm{80-64-{cupy,torch},90-64-cupy}"),
        (["{'a': 1, 'b': 2}", "x[1]-y::z", "\\\\", "1..3", "..", "0.5"], None),
    ],
)
def test_names_are_folded_without_loss(conftest: Any, names: list[str], text: str | None) -> None:
    outcomes = {("f", "a", name): "passed" for name in names}
    assert conftest.flat(conftest.nested(outcomes)) == outcomes
    if text is not None:
        assert conftest.folded(names) == text
        assert sorted(conftest.unfolded(text)) == sorted(names)


def test_the_digest_does_not_read_what_is_told(conftest: Any) -> None:
    told, kept = '"""Told."""', 'return """kept"""'
    source = f'{told}\nx = 1\nclass A:\n    """Told\n    at length."""\n    def f(self):\n        {told}\n        {kept}\n'
    assert conftest.without_docstrings(source) == f"x = 1\nclass A:\n    def f(self):\n        {kept}"


def test_each_known_failure_is_named_by_a_test() -> None:
    names = re.findall(r"(?m)^def test_kf_(\d{3}(?:_\d{3})*)_", "\n".join(file.read_text() for file in TESTS.rglob("test_*.py")))
    assert KNOWN_FAILURES - {int(number) for name in names for number in name.split("_")} == set()
