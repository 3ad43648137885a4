"""`pytest tests/gpu --record` writes record.json: what was run on which GPU, with a digest of the sources that decide what runs there.

Outcomes are added to a record of the same sources and the same machine, so the tests may run in parts, also at the same time; otherwise a
new record begins.
What a part leaves out is no secret: a unit test compares the record with the tests that there are.
"""

from __future__ import annotations

import ast
import datetime
import hashlib
import itertools
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

RECORD = Path(__file__).with_name("record.json")
ROOT = Path(__file__).resolve().parents[2]
HOST_SIDE = (
    *("api", "arrays", "backward", "cache", "device", "environment", "jax", "jit", "launch", "params", "plan", "problem", "tensormap"),
    *("sizes", "torch", "variants"),
)

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take three quarters of the GPU's memory

# A test is (file, function, its parameters); its outcome "passed", "failed", or "skipped: " with the reason.
Test = tuple[str, str, str]
Nested = dict[str, dict[str, dict[str, str]]]

_outcomes: dict[Test, str] = {}
_collected: set[Test] = set()


def digest() -> str:
    """Of all that decides what runs on a GPU, without comments: the CUDA sources, and the modules that choose, compile and launch."""
    cuda = sorted((ROOT / "cuda_src").rglob("*.cu*"))
    code = [" ".join(re.sub(r"//.*", "", file.read_text()).split()) for file in cuda]
    host = [re.sub(r"(?m)(^\s*|  )# .*$", "", without_docstrings((ROOT / "cupyflash" / f"{name}.py").read_text())) for name in HOST_SIDE]
    return hashlib.sha256("\0".join(code + host).encode()).hexdigest()


def without_docstrings(source: str) -> str:
    told = [
        node.body[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None
    ]
    lines = {n for docstring in told for n in range(docstring.lineno, (docstring.end_lineno or 0) + 1)}
    return "\n".join(line for n, line in enumerate(source.splitlines(), 1) if n not in lines)


def named(nodeid: str) -> Test:
    path, _, name = nodeid.partition("::")
    function, _, parameters = name.partition("[")
    return Path(path).name, function, parameters.removesuffix("]")


def nested(outcomes: dict[Test, str]) -> Nested:
    """As the file keeps them: file, functions that have the same, outcome, and the parameters as one text."""
    found: dict[str, dict[str, dict[str, set[str]]]] = {}
    for (file, function, parameters), outcome in outcomes.items():
        escaped = re.sub(r"[\\{},]|(?<=\.)\.", r"\\\g<0>", parameters)
        found.setdefault(file, {}).setdefault(function, {}).setdefault(outcome, set()).add(escaped)
    alike: dict[str, dict[tuple[tuple[str, str], ...], list[str]]] = {}
    for file, functions in sorted(found.items()):
        for function, by_outcome in sorted(functions.items()):
            key = tuple((outcome, folded(names)) for outcome, names in sorted(by_outcome.items()))
            alike.setdefault(file, {}).setdefault(key, []).append(function)
    return {file: {" ".join(functions): dict(key) for key, functions in keys.items()} for file, keys in alike.items()}


def flat(tests: Nested) -> dict[Test, str]:
    return {
        (file, function, re.sub(r"\\(.)", r"\1", parameters)): outcome
        for file, functions in tests.items()
        for alike, outcomes in functions.items()
        for outcome, names in outcomes.items()
        for parameters in unfolded(names)
        for function in alike.split()
    }


def folded(names: Iterable[str]) -> str:
    """Names as one text with what they share written once, as a shell expands it: a1-x, a2-x, a3-x, b1 as {a{1..3}-x,b1}."""
    tails: dict[str, set[str]] = {}
    for name in names:
        first = re.match(r"\d+|-|[^\d-]*", name)
        tails.setdefault(first[0], set()).add(name[first.end() :])  # type: ignore[index,union-attr]
    heads: dict[frozenset[str], list[str]] = {}
    for head, rest in tails.items():
        heads.setdefault(frozenset(rest), []).append(head)
    ends = series(heads.pop(frozenset({""}), []))
    return braced(sorted([*ends, *[braced(series(alike)) + folded(rest) for rest, alike in heads.items()]]))


def braced(texts: list[str]) -> str:
    return texts[0] if len(texts) == 1 and not re.fullmatch(r"\d+\.\.\d+", texts[0]) else "{" + ",".join(texts) + "}"


def series(heads: list[str]) -> list[str]:
    """Three numbers or more that follow each other as first..last."""
    pieces: list[tuple[int, int]] = []
    for n in sorted(int(head) for head in heads if re.fullmatch(r"0|[1-9]\d*", head)):
        if pieces and pieces[-1][1] == n - 1:
            pieces[-1] = pieces[-1][0], n
        else:
            pieces.append((n, n))
    numbers = [[f"{a}..{b}"] if b > a + 1 else [str(n) for n in range(a, b + 1)] for a, b in pieces]
    return [*sorted(head for head in heads if not re.fullmatch(r"0|[1-9]\d*", head)), *itertools.chain.from_iterable(numbers)]


def unfolded(text: str) -> list[str]:
    """The names of a text that `folded` made."""
    names, rest = _product(text)
    assert not rest, f"{rest!r} is left of {text!r}"
    return names


def _product(text: str) -> tuple[list[str], str]:
    """The names of a text up to a comma or brace that is not its own, and what is left."""
    names = [""]
    while text and text[0] not in ",}":
        if text[0] == "{":
            pieces: list[str] = []
            while text[0] != "}":
                numbers = re.match(r"(\d+)\.\.(\d+)(?=[,}])", text[1:])
                if numbers:
                    some, text = [str(n) for n in range(int(numbers[1]), int(numbers[2]) + 1)], text[1 + numbers.end() :]
                else:
                    some, text = _product(text[1:])
                pieces += some
            text = text[1:]
        else:
            plain = re.match(r"(?:[^\\{},]|\\.)+", text)
            pieces, text = [plain[0]], text[plain.end() :]  # type: ignore[index,union-attr]
        names = [name + piece for name in names for piece in pieces]
    return names, text


def merged(old: dict[Test, str], new: dict[Test, str]) -> dict[Test, str]:
    """The newer outcome of each test; but a skip, as where a machine has one GPU, takes nothing away."""
    return old | {test: outcome for test, outcome in new.items() if test not in old or not outcome.startswith("skipped")}


@pytest.fixture
def returns_memory() -> Iterator[None]:
    """For tests that take gigabytes: what CuPy and torch have kept of the GPU's memory goes back, since others run beside them."""
    yield
    if "cupy" in sys.modules:
        sys.modules["cupy"].get_default_memory_pool().free_all_blocks()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="add the outcomes of this run to tests/gpu/record.json")
    parser.addoption("--missing", action="store_true", help="leave out what has passed or was skipped by a record of these sources")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.record:
        try:
            import cupy

            cupy.cuda.runtime.getDeviceCount()
        except Exception as e:
            raise pytest.UsageError(f"--record needs a GPU: {e}") from e


@pytest.hookimpl(tryfirst=True)  # before -k and -m take any away
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("lf", False) and not any("::" in arg for arg in config.args):  # else files are collected in part
        _collected.update(named(item.nodeid) for item in items)
    if config.option.missing:
        record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        outcomes = flat(record["tests"]) if record.get("digest") == digest() else {}
        there = {item for item in items if outcomes.get(named(item.nodeid), "failed") != "failed"}
        config.hook.pytest_deselected(items=[*there])
        items[:] = [item for item in items if item not in there]
    # The ways of a case side by side: they share references and kernels, so that one worker of pytest-xdist should have them.
    first: dict[Test, int] = {}
    cases = {item: case_of(item) for item in items}
    for n, item in enumerate(items):
        first.setdefault(cases[item], n)
    items.sort(key=lambda item: first[cases[item]])


def case_of(item: pytest.Item) -> Test:
    """The test without those of its parameters that its file calls ways."""
    file, function, parameters = named(item.nodeid)
    ways = getattr(getattr(item, "module", None), "WAYS", ())
    return file, function, "-".join(part for part in parameters.split("-") if part not in ways)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        reason = f": {report.longrepr[2].removeprefix('Skipped: ')}" if isinstance(report.longrepr, tuple) else ""
        _outcomes[named(report.nodeid)] = report.outcome + reason


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not session.config.option.record or not _outcomes:
        return
    import fcntl

    import cupy

    runtime = cupy.cuda.runtime
    now = {
        "digest": digest(),
        "device": runtime.getDeviceProperties(0)["name"].decode(),
        "driver": runtime.driverGetVersion(),
        "cupy": cupy.__version__,
        "nvrtc": ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
    }
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    with RECORD.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # another part may end now
        file.seek(0)
        record = json.loads(file.read() or "{}")
        old = flat(record["tests"]) if all(record.get(key) == value for key, value in now.items()) else {}
        files = {name for name, _, _ in _collected}
        kept = {test: outcome for test, outcome in old.items() if test in _collected or test[0] not in files}
        text = json.dumps(now | {"date": date, "tests": nested(merged(kept, _outcomes))}, indent=1) + "\n"
        text = re.sub(r"\n {3,}", "", text)  # a line a function
        file.seek(0)
        file.truncate()
        file.write(text)
