"""cupyflash-bench diff: the verdicts, and what is read of the files."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bench import cli, diff, records, report
from bench.cases import CacheCase, Case, packed

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
CASE = Case(1, 1024, 1024, 8, 2, 64, 64, "bfloat16", causal=True)


def run(*arguments: str, **environment: str | None) -> Result:
    arguments = tuple(map(str, arguments))
    return CliRunner().invoke(cli.main, arguments, env={"NO_COLOR": None, "FORCE_COLOR": None, "COLUMNS": None, **environment})


def line(case: Case = CASE, ms: float = 1.0, spread: float = 0.01, peer: str = "cupyflash", **more) -> str:
    return json.dumps({**report.case_fields(case), "peer": peer, "ms": ms, "spread": spread, **more})


@pytest.fixture
def write(tmp_path):
    def write(name: str, *lines: str) -> Path:
        path = tmp_path / name
        path.write_text("\n".join(lines) + "\n")
        return path

    return write


def result(ms: float, spread: float, **how) -> records.Result:
    return records.Result(CASE, "cupyflash", ms, spread, how)


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ((1.0, 0.001), (1.019, 0.001), "SAME"),  # under the floor of 2 %
        ((1.0, 0.001), (1.021, 0.001), "SLOWER"),
        ((1.0, 0.001), (0.979, 0.001), "FASTER"),
        ((1.0, 0.04), (1.035, 0.04), "SAME"),  # 0.98..1.02 and 1.015..1.055 overlap
        ((1.0, 0.04), (1.045, 0.04), "SLOWER"),
        ((1.0, 0.04), (1 / 1.045, 0.04), "FASTER"),  # the same, seen from the other side
        ((1.0, 0.08), (1.0, 0.08), "UNSURE"),
        ((1.0, 0.08), (1.2, 0.08), "SLOWER"),  # noise of 8 % does not hide 20 %
    ],
)
def test_verdicts(before, after, verdict):
    assert diff.judge(result(*before), result(*after)).verdict == verdict


def test_what_was_timed_in_another_way_is_not_compared():
    """KF-122: a time out of the L2 cache is no time out of memory."""
    change = diff.judge(result(1.0, 0.0, cold=True, timer="graph"), result(0.5, 0.0, cold=False, timer="graph"))
    assert (change.verdict, change.why) == ("UNSURE", "cold True and False")
    assert diff.judge(result(1.0, 0.0, cold=True), result(1.0, 0.0)).verdict == "SAME"  # the other file does not say


def test_the_floor_is_the_users():
    assert diff.judge(result(1.0, 0.0), result(1.04, 0.0), floor=0.05).verdict == "SAME"
    assert diff.judge(result(1.0, 0.0), result(1.005, 0.0), floor=0.001).verdict == "SLOWER"


def test_a_file_against_itself_is_the_same():
    done = run("diff", RESULTS / "h200-decode.jsonl", RESULTS / "h200-decode.jsonl", "--fail-if-slower", "2%")
    assert done.exit_code == 0
    assert "154 in both: 154 SAME" in done.stdout
    assert "only in" not in done.stdout


def test_two_runs_of_one_build_are_the_same(write):
    """The committed file has one grid twice, by one build, 40 s apart: SAME in 95 % of the cases, and SLOWER in all of them if their times
    are 15 % longer."""
    text = (RESULTS / "h200-fwd-repeated.jsonl").read_text()
    runs = [run for run in re.split(r'(?m)^(?={"record":"environment")', text) if run]
    first, second = (write(f"{i}.jsonl", *run.splitlines()) for i, run in enumerate(runs))
    done = run("diff", first, second, "--json", "-")
    *_, summary = map(json.loads, done.stdout.splitlines())
    cases = [line for line in map(json.loads, runs[0].splitlines()) if "record" not in line]
    assert len(cases) == 36
    assert summary["SAME"] >= 0.95 * len(cases)
    slowed = write("slow.jsonl", *(json.dumps({**before, "ms": before["ms"] * 1.15}) for before in cases))
    done = run("diff", first, slowed, "--fail-if-slower", "3%", "--json", "-")
    *_, summary = map(json.loads, done.stdout.splitlines())
    assert (done.exit_code, summary["SLOWER"]) == (1, len(cases))
    assert summary["median_ratio"]["cupyflash"] == pytest.approx(1.15)


def test_exit_codes_and_what_is_listed(write):
    cached = CacheCase(4, 1, 8192, 32, 8, 128, 128, "bfloat16", page_size=16)
    before = write("a.jsonl", line(), line(peer="fa3"), line(cached))
    after = write("b.jsonl", line(ms=1.1), line(peer="fa3"), line(replace(CASE, batch=2)))
    assert run("diff", before, after).exit_code == 0
    done = run("diff", before, after, "--fail-if-slower", "3%")
    assert done.exit_code == 1
    assert "1 slower by more than 3.0%" in done.stdout
    assert "1 only in a.jsonl:\n  decode bf16 B 4 S 1x8k H 32/8 D 128, pages of 16: cupyflash\n" in done.stdout
    assert "1 only in b.jsonl:\n  fwd bf16 B 2 S 1k H 8/2 D 64 causal: cupyflash\n" in done.stdout
    assert "1.100   ±2.0%   SLOWER" in done.stdout
    assert "median B / A: cupyflash 1.100, fa3 1.000" in done.stdout
    assert run("diff", before, after, "--fail-if-slower", "11%").exit_code == 0
    assert run("diff", before, after, "--fail-if-slower", "3%", "--peers", "fa3").exit_code == 0
    quiet = run("diff", before, after, "--quiet").stdout
    assert "SLOWER" in quiet
    assert "fa3 " not in quiet.split("median")[0]


def test_other_machines_are_named(write):
    def header(watts: float) -> str:
        nvml = {"driver_release": "580.1", "max_clock_mhz": 1980, "power_limit_w": watts, "clock_mhz": watts}
        return json.dumps({"record": "environment", "devices": [{"name": "GPU X"}], "nvml": nvml, "time": f"{watts}"})

    files = [write(f"{watts}.jsonl", header(watts), line()) for watts in (700, 500)]
    text = "not the same machine: GPU X clock 1980 MHz power 500 W driver 580.1 and GPU X clock 1980 MHz power 700 W driver 580.1"
    assert text in " ".join(run("diff", *files).stdout.split())
    assert "not the same machine" not in run("diff", files[0], files[0]).stdout
    host = [write(f"{n}.jsonl", json.dumps({"record": "environment", "cpu": "CPU X", "cores": n}), line()) for n in (2, 4)]
    assert "not the same machine: CPU X, 2 cores and CPU X, 4 cores" in run("diff", *host).stdout


def test_runs_of_one_file_are_joined(write):
    """The median of three; what lies between them is noise that no single run has seen."""
    file = records.read(write("a.jsonl", line(ms=1.0), line(ms=1.2, spread=0.03), line(ms=1.1)))
    (joined,) = file.results.values()
    assert (joined.ms, joined.spread, joined.runs) == (1.1, pytest.approx(0.2 / 1.1), 3)


@pytest.mark.parametrize(
    "case",
    [
        *(CASE, replace(CASE, backward=True, deterministic=True), replace(CASE, window_size=(4095, None), softcap=50.0, head_dim_v=32)),
        *(replace(CASE, **packed((5, 1, 70))), replace(CASE, **packed((64,) * 400)), replace(CASE, extras=("sink",))),
        CacheCase(2, 3, 100, 8, 2, 64, 64, "bfloat16", causal=True),
        CacheCase(2, 1, 100, 8, 2, 64, 64, "bfloat16", page_size=16, cache_dtype="float8_e4m3fn"),
    ],
)
def test_fields_make_the_case_again(case):
    assert records.case_of(json.loads(json.dumps(report.case_fields(case)))) == case


WITHOUT_CASES = {"h200-explain.jsonl": "explain", "h200-host.jsonl": "host", "h200-prefix.jsonl": "shared_prefix"}


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.jsonl")), ids=lambda path: path.name)
def test_the_committed_files_can_be_read(path):
    if path.name in WITHOUT_CASES:
        kinds = [json.loads(line)["record"] for line in path.read_text().splitlines()]
        assert kinds[0] == "environment"
        assert {*kinds[1:]} == {WITHOUT_CASES[path.name]}
        return
    file = records.read(path)
    for (case, peer), found in file.results.items():
        assert (found.case, found.peer) == (case, peer)
    assert "NVIDIA H200" in records.origin(file)


@pytest.mark.parametrize(
    ("lines", "options", "says"),
    [
        (["no json"], [], "a.jsonl, line 1, is no line of this bench: no JSON"),
        (["[1]"], [], "line 1, is no line of this bench: no object"),
        ([line(), '{"mode": "fwd"}'], [], "line 2, is no line of this bench: it has no batch"),
        ([line(ms=0.0)], [], "ms 0, spread 0.01"),
        (['{"record": "environment"}'], [], "a.jsonl has no timings"),
        ([line(replace(CASE, batch=7))], [], "have no case in common"),
        ([line()], ["--fail-if-slower", "3"], "'3' is no share: write 3%"),
        ([line()], ["--fail-if-slower", "1%"], "it is below the --floor of 2.0%"),
        ([line()], ["--floor", "x%"], "'x%' is no share"),
        ([line()], ["--peers", "fa9"], "no file has 'fa9', only cupyflash"),
        ([line()], ["--json", "/nowhere/x"], "cannot write /nowhere/x"),
    ],
)
def test_mistakes_are_one_line(write, lines, options, says):
    done = run("diff", write("a.jsonl", *lines), write("b.jsonl", line()), *options)
    assert done.exit_code == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_files_that_are_not_there(write):
    done = run("diff", write("a.jsonl", line()), "nowhere.jsonl")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "'nowhere.jsonl' does not exist" in done.stderr
    assert run("diff", write("a.jsonl", line())).exit_code == 2


@pytest.mark.parametrize("width", [60, 100])
def test_nothing_is_wider_than_the_terminal(write, width):
    done = run("diff", RESULTS / "h200-fwd.jsonl", RESULTS / "h200-fwd-sm80.jsonl", COLUMNS=str(width))
    assert max(map(len, done.stdout.splitlines())) <= width
    assert "\x1b" not in done.stdout
