"""Flags of the timing commands: the command of a line, CSV and Markdown, the target of noise, clocks that are held down."""

from __future__ import annotations

import csv
import io
import json
import shlex
from dataclasses import replace
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from bench import cli, gpu, limits, nvml, peers, report, tables, timing
from bench.cases import CacheCase, Case, drawn_lengths, packed

CASE = Case(2, 48, 48, 4, 2, 16, 24, "float32", causal=True)
CACHED = CacheCase(3, 1, 50, 4, 2, 16, 24, "float32")
SMALL = ("--seqlen", "16,32", "--heads", "2", "--dim", "8", "--min-time", "0.01", "--rounds", "2")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(gpu, "why_not", lambda: "no NVIDIA driver, so no GPU")
    monkeypatch.setattr(limits, "stored", lambda place: None)
    monkeypatch.setattr(timing.Place, "ceilings", lambda place: timing.Ceilings(1e11, 1e10))
    monkeypatch.setattr(timing, "WARM_UP_S", 0.0)


def run(*arguments: str, **environment: str | None) -> Result:
    return CliRunner().invoke(cli.main, arguments, env={"NO_COLOR": None, "FORCE_COLOR": None, "COLUMNS": None, **environment})


@pytest.fixture
def timed(monkeypatch):
    """What a command would time, and how."""

    def of(*arguments: str) -> tuple[list[Case], dict]:
        found: list = []

        def run_timings(report, cases, peers, place, **how):
            found[:] = cases, {**how, "peers": [peer.name for peer in peers]}
            return []

        monkeypatch.setattr(cli, "run_timings", run_timings)
        result = run(*arguments)
        assert result.exit_code == 0, result.output
        return found[0], found[1]

    return of


@pytest.mark.parametrize(
    "case",
    [
        *(CASE, replace(CASE, seqlen_k=4096, causal=False), replace(CASE, window_size=(7, None), softcap=2.5, extras=("sink",))),
        *(replace(CASE, backward=True), replace(CASE, backward=True, deterministic=True, window_size=(None, 0))),
        *(replace(CASE, **packed((64,) * 3)), replace(CASE, **packed(drawn_lengths(3000, 500)), backward=True)),
        *(CACHED, replace(CACHED, page_size=16, cache_dtype="int8"), replace(CACHED, seqlen_q=7, causal=True, window_size=(9, 0))),
    ],
)
def test_the_command_of_a_case_makes_it_again(timed, case):
    name, *arguments = shlex.split(tables.command_of(case, ["cupyflash", "standard"], ["--warm"]))
    cases, how = timed(*arguments)
    assert name == "cupyflash-bench"
    assert cases == [case]
    assert how["cold"] is False
    assert how["peers"] == ["cupyflash", "standard"]


def test_repro_prints_it_with_what_was_asked(timed, tmp_path):
    given = ("--max-noise", "2.5%", "--warm", "--device", "host", "--site", str(tmp_path), "--peers", "cupyflash")
    done = run("fwd", *SMALL, *given, "--repro", COLUMNS="60")
    assert done.exit_code == 0, done.output
    lines = [line.strip() for line in done.stdout.splitlines() if "cupyflash-bench" in line]
    assert len(lines) == 2
    for line, seqlen in zip(lines, (16, 32), strict=True):
        words = shlex.split(line)
        assert words[:2] == ["cupyflash-bench", "compare"]
        for pair in (("--max-noise", "2.5%"), ("--min-time", "0.01"), ("--rounds", "2"), ("--device", "host"), ("--site", str(tmp_path))):
            assert pair[1] == words[words.index(pair[0]) + 1]
        cases, how = timed(*words[1:])
        assert cases == [Case(1, seqlen, seqlen, 2, 2, 8, 8, "float32")]
        assert how == {"timer": None, "cold": False, "min_rounds": 2, "min_s": 0.01, "max_noise": 0.025, "peers": ["cupyflash"]}
    assert "cupyflash-bench" not in run("fwd", *SMALL).stdout


def test_dtypes_are_a_list(timed):
    cases, _ = timed("fwd", "--dtype", "fp32,fp64", "--seqlen", "16,32")
    assert [(case.dtype, case.seqlen_q) for case in cases] == [(name, n) for name in ("float32", "float64") for n in (16, 32)]
    cases, _ = timed("decode", "--dtype", "fp16,fp32")
    assert [case.dtype for case in cases] == ["float16", "float32"]
    done = run("fwd", "--dtype", "fp32,fp8")
    assert (done.exit_code, "'fp8' is not one of" in done.stderr) == (2, True)


def test_csv_is_the_result_lines(tmp_path):
    done = run("compare", *SMALL, "--window", "3,0", "--csv", str(tmp_path / "a.csv"), "--json", "-")
    assert done.exit_code == 0, done.output
    results = [record for record in map(json.loads, done.stdout.splitlines()) if "record" not in record]
    rows = list(csv.DictReader(io.StringIO((tmp_path / "a.csv").read_text())))
    assert len(rows) == len(results) == 2
    for row, result in zip(rows, results, strict=True):
        assert set(row) == set(result)
        assert (float(row["ms"]), int(row["seqlen_q"]), row["window_size"]) == (result["ms"], result["seqlen_q"], "3 0")


def test_markdown_on_stdout():
    done = run("compare", *SMALL, "--peers", "cupyflash,standard", "--softcap", "5", "--md", "-")
    assert done.exit_code == 0, done.output
    header, rule, *rows = done.stdout.splitlines()
    assert header.count("|") == rule.count("|") == 7
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[:2] for row in cells] == [
        [f"fwd fp32 B 1 S {n} H 2 D 8 softcap 5", peer] for n in (16, 32) for peer in ("cupyflash", "standard")
    ]
    assert cells[0][4].endswith("FLOP/s")
    assert cells[1][2] == "it has no window, softcap, bias or mask"
    assert "first ms" in done.stderr  # the table is there
    ms, rate = float(cells[0][2]), float(cells[0][4].split()[0])
    unit = {"M": 1e6, "k": 1e3, "G": 1e9}[cells[0][4].split()[1][0]]
    assert rate * unit == pytest.approx(4 * 8 * 2 * 16 * 16 / ms * 1e3, rel=0.02)


def test_decode_in_markdown_is_in_bytes():
    done = run("decode", "--cells", "1:64", "--heads", "2", "--dim", "8", "--min-time", "0.01", "--peers", "cupyflash", "--md", "-")
    assert done.stdout.splitlines()[2].split("|")[5].strip().endswith("B/s")


def test_rounds_go_on_until_the_noise_is_below_the_target():
    times = iter([0.010, 0.011, 0.012] * 10000)
    clock = SimpleNamespace(now=0.0)

    def round_() -> timing.Tick:
        ms = next(times)
        clock.now += ms
        return timing.Tick(ms * 1e3)

    def rounds(noise: float) -> int:
        how = {"min_s": 0.1, "max_s": 1.0, "warm_up_s": 0.0, "noise": noise, "clock": lambda: clock.now}
        return timing.measure({"a": round_}, **how)["a"].rounds

    assert rounds(0.2) < 12
    assert rounds(0.02) > 80


def comparison(spread: float = 0.01, slowed: str = "") -> peers.Comparison:
    outcome = peers.Outcome("cupyflash", first_ms=1.0, timing=timing.Timing(1.0, spread, 5.0, 1500.0, 9), peak_bytes=1)
    return peers.Comparison(CASE, [outcome], timer="graph", slowed=slowed)


@pytest.mark.parametrize(
    ("spread", "noise", "slowed", "marked"), [(0.01, 0.05, "", False), (0.04, 0.03, "", True), (0.01, 0.05, "heat", True)]
)
def test_what_is_not_final_is_marked(capsys, spread, noise, slowed, marked):
    shown = report.Report(report.console())
    shown.noise = noise
    shown.start_timings(timing.HOST, ["cupyflash"], [CASE])
    shown._queued = True
    shown._rows = report.Columns(shown.table, [("", 11, 0)] + [(f"{n}", 9, 0) for n in range(8)])
    found = comparison(spread, slowed)
    shown.timings(found)
    shown.explain_columns({"fwd"})
    text = capsys.readouterr().out
    assert ("~1.00" in text) == marked
    assert ("slowed by heat" in text) == bool(slowed)
    assert f"~: spread above {noise * 100:g}%, or clock held down" in text
    line = report.result_line(found, found.outcomes[0])
    assert line["note"] == ("slowed by heat" if slowed else None)


def test_what_happened_before_the_rounds_does_not_count(monkeypatch):
    """The place is asked before the rounds, and again after them."""
    asked = iter(["heat", "hardware"])
    monkeypatch.setattr(timing.Place, "slowed", lambda place: next(asked))
    assert peers.compare(CASE, [peers.CupyFlash()], min_s=0.01, min_rounds=2).slowed == "hardware"


@pytest.mark.parametrize("name", ["nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"])
@pytest.mark.parametrize(
    ("bits", "reasons"), [(0x0, ""), (0x5, ""), (0x20, "heat"), (0x68, "hardware and heat"), (0x84, "the power supply")]
)
def test_nvml_says_what_holds_the_clock(monkeypatch, name, bits, reasons):
    """The limit of power, 4, is no reason: a chip with busy tensor cores is always at it."""

    class Lib:
        def __getattr__(self, function):
            def ask(*arguments):
                if "Reasons" in function:
                    if function != name:
                        return 13
                    arguments[-1]._obj.value = bits
                return 0

            return ask

    monkeypatch.setattr(nvml.ctypes, "CDLL", lambda path: Lib())
    there = object.__new__(gpu.Gpu)
    there.__dict__.update(_sensor=nvml.Sensor(), _slowed=set())
    there._clock_mhz()
    assert there.slowed() == reasons
    assert there.slowed() == ""  # since then nothing was asked


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--max-noise", "5"], "'--max-noise': '5' is no share: write 3%"),
        (["--max-noise", "-1%"], "'-1%' is no share"),
        (["--csv", "/nowhere/a.csv"], "'--csv': cannot write /nowhere/a.csv"),
        (["--md", "/nowhere/a.md"], "'--md': cannot write /nowhere/a.md"),
        (["--md", "-", "--csv", "-"], "only one of --json, --csv and --md can be stdout"),
        (["--json", "-", "--md", "-"], "only one of --json, --csv and --md can be stdout"),
    ],
)
@pytest.mark.parametrize("command", ["fwd", "bwd", "decode", "compare"])
def test_mistakes_are_one_line(command, options, says):
    done = run(command, *options)
    assert done.exit_code == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


# --- rows of known-failures that are about benchmarks ---------------------------------------------------------------------------


@pytest.mark.parametrize("backward", [False, True])
def test_flops_of_packed_sequences_are_of_their_lengths(backward):
    """KF-124: of 1, 4096 and 100 tokens, not of three times the longest and not of the mean."""
    case = Case(1, 1, 1, 8, 8, 64, 64, "bfloat16", backward=backward)
    case = replace(case, **packed((1, 4096, 100)))
    pairs = 1 + 4096**2 + 100**2
    assert case.flops == (10 if backward else 4) * 64 * 8 * pairs
    pairs = 1 + 4096 * 4097 // 2 + 100 * 101 // 2
    assert replace(case, causal=True).flops == (10 if backward else 4) * 64 * 8 * pairs


def test_a_decode_in_the_l2_cache_says_so(monkeypatch):
    """KF-122: hot where the caller asks for that or where buffers enough to be cold do not fit; cold where they rotate; and what rotates is
    made before the rounds, so that nothing but calls is in them."""
    monkeypatch.setattr(timing.Place, "cache_bytes", 1 << 20)
    made = []

    def inputs(self, case, *, cold=True):
        made.append(cold)
        return [case.inputs(seed) for seed in range(-(-self.cache_bytes // case.num_bytes) if cold else 1)]

    monkeypatch.setattr(timing.Place, "inputs", inputs)
    monkeypatch.setattr(timing.Place, "timers", {"wall": lambda calls: lambda: (calls[0](), timing.Tick(1.0))[1]})
    for cold, word in ((True, "cold"), (False, "hot")):
        found = peers.compare(CACHED, [peers.CupyFlash()], cold=cold, min_s=0.0, min_rounds=3)
        assert found.cold is cold
        assert word in report.conditions(found)
        assert report.result_line(found, found.outcomes[0])["cold"] is cold
    assert made == [True, False]
