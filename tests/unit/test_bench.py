"""cupyflash-bench: what its numbers mean, how it judges, what it prints, and how it ends."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner, Result

import cupyflash
from bench import check, cli, machine, peers, report, timing
from bench.cases import Case, available_dtypes, check_suite

SMALL = Case(1, 48, 48, 2, 2, 16, 16, "float32", causal=True)
DECODE = replace(SMALL, batch=2, seqlen_q=1, num_heads_kv=1, causal=False)

RESULT_FIELDS = {
    *("mode", "head_dim", "head_dim_v", "num_heads_q", "num_heads_kv", "batch", "seqlen_q", "seqlen_k", "causal", "dtype"),
    *("peer", "ms", "spread", "host_us", "ratio_to_best"),
}


def run(*arguments: str, **environment: str | None) -> Result:
    return CliRunner().invoke(cli.main, arguments, env={"NO_COLOR": None, "FORCE_COLOR": None, "COLUMNS": None, **environment})


def lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def small(monkeypatch):
    """Commands that take milliseconds: tiny suites, short rounds, no ceilings to measure."""
    suite = {"plain": (replace(SMALL, return_lse=True),), "sink": (replace(SMALL, extras=("sink",), return_lse=True),)}
    monkeypatch.setattr(cli, "tour_suite", lambda: (SMALL, DECODE))
    monkeypatch.setattr(cli, "check_suite", lambda full: suite)
    monkeypatch.setattr(peers.Peer, "place", timing.HOST._replace(ceilings=lambda: timing.Ceilings(1e11, 1e10)))
    monkeypatch.setattr(timing, "WARM_UP_S", 0.0)
    measure = timing.measure
    monkeypatch.setattr(timing, "measure", lambda calls, timer, min_s, max_s: measure(calls, timer, min_s=0, max_s=0, warm_up_s=0))


# --- what a case costs --------------------------------------------------------------------------------------------------------


def test_flops_count_visible_pairs():
    """KF-119: about half for causal, exactly S(S+1)/2 pairs, not S²/2."""
    case = Case(2, 4096, 4096, 4, 4, 64, 64, "float32")
    assert case.flops == 4 * 64 * 4 * 2 * 4096 * 4096
    assert replace(case, causal=True).flops == 4 * 64 * 4 * 2 * (4096 * 4097 // 2)
    assert replace(case, head_dim=192, head_dim_v=128).flops == 2 * (192 + 128) * 4 * 2 * 4096 * 4096


def test_flops_of_decode():
    """KF-120."""
    case = Case(8, 1, 4096, 32, 8, 128, 128, "float16")
    assert case.flops == replace(case, causal=True).flops == 536_870_912
    assert case.mode == "decode"
    assert case.num_bytes == 2 * (2 * 8 * 4096 * 8 * 128 + 2 * 8 * 32 * 128)  # the grouped heads of K and V are read once


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, (3, 0), (0, 0), (None, 2), (4, None), (-1, -1), (2, 5), (32, 64)])
@pytest.mark.parametrize("seqlen", [(7, 7), (5, 2), (2, 5), (1, 9), (40, 6), (3, 0)])
def test_visible_pairs_are_those_of_the_definition(seqlen, window, causal):
    Sq, Sk = seqlen
    i, j = np.arange(Sq)[:, None] + Sk - Sq, np.arange(Sk)
    left, right = ((None if side in (None, -1) else side) for side in (window or (None, None)))
    seen = np.ones((Sq, Sk), bool)
    seen &= (j <= i) if causal else True
    seen &= (j >= i - left) if left is not None else True
    seen &= (j <= i + right) if right is not None else True
    assert Case(1, Sq, Sk, 1, 1, 8, 8, "float32", causal, window).visible_pairs == seen.sum()


def test_inputs_are_the_same_each_time():
    case = replace(SMALL, extras=("alibi", "bias", "mask", "sink", "seqused"))
    first, second = case.inputs(), case.inputs()
    assert first.q.shape == (1, 48, 2, 16)
    for name, value in first.options.items():
        assert np.array_equal(value, second.options[name]), name
    assert not np.array_equal(first.q, case.inputs(seed=1).q)


# --- timing -------------------------------------------------------------------------------------------------------------------


class Clock:
    """Time that passes only in calls, and a note of who ran."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ran: list[str] = []

    def __call__(self) -> float:
        return self.now

    def call(self, name: str, *seconds: float):
        """A call that takes these seconds in turn, and the last of them from then on."""
        left = list(seconds)

        def work() -> str:
            self.ran.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]
            return name

        return work

    def timer(self, call) -> timing.Tick:
        start = self.now
        call()
        return timing.Tick((self.now - start) * 1e3, 7.0)


def test_warm_up_is_by_time_and_rounds_interleave():
    """KF-121: the warm-up ends after its time, however short the calls are; medians and spread are of the rounds alone."""
    clock = Clock()
    calls = {"a": clock.call("a", *[0.05] * 20, 0.01), "b": clock.call("b", 0.02)}
    timings = timing.measure(calls, clock.timer, min_s=0.1, max_s=1.0, warm_up_s=1.0, clock=clock)
    assert clock.ran[:20] == ["a"] * 20  # 20 calls of 0.05 s are the second
    assert clock.ran[20:70] == ["b"] * 50
    assert clock.ran[70:] == ["a", "b"] * timings["a"].rounds
    assert timings["a"].ms == pytest.approx(10)
    assert timings["b"].ms == pytest.approx(20)
    assert timings["a"].spread == pytest.approx(0)
    assert timings["a"].host_us == 7.0
    assert 0.1 <= timings["a"].rounds * 0.03 / 2 <= 0.2


def test_rounds_go_on_while_a_spread_is_large_but_not_for_ever():
    clock = Clock()
    noisy = clock.call("a", *[0.01, 0.02] * 1000)
    timings = timing.measure({"a": noisy}, clock.timer, min_s=0.1, max_s=0.6, warm_up_s=0, clock=clock)
    assert 0.6 <= timings["a"].rounds * 0.015 <= 0.7
    assert timings["a"].spread > timing.NOISE
    slow = timing.measure({"a": clock.call("a", 9.0)}, clock.timer, min_s=0.1, max_s=0.2, warm_up_s=0, clock=clock)
    assert slow["a"].rounds == timing.MIN_ROUNDS


def test_spread_is_the_interquartile_range_over_the_median():
    found = timing.summary([timing.Tick(ms, None) for ms in (10, 11, 12, 13, 90)])
    assert (found.ms, found.spread, found.host_us, found.rounds) == (12, pytest.approx(2 / 12), None, 5)


class Compiling(peers.Peer):
    """A peer whose first call compiles for 0.2 s."""

    name = "compiling"

    def bind(self, case, inputs):
        compiled = []

        def call():
            if not compiled:
                time.sleep(0.2)
                compiled.append(True)
            return np.asarray(cupyflash.reference.attention(*inputs[:3], **inputs.options), np.float32)

        return call


def test_the_first_call_is_apart():
    """KF-123: what a first call costs is reported, and is in no median."""
    (outcome,) = peers.compare(replace(SMALL, seqlen_q=4, seqlen_k=4), [Compiling()], min_s=0.01)
    assert outcome.first_ms > 200
    assert outcome.timing.ms < 100
    assert outcome.ratio_to_best is None


def test_peak_memory_is_what_numpy_held():
    assert 16e6 <= timing.peak_bytes(lambda: np.concatenate([np.ones(1_000_000)])) < 16.2e6


def test_compare_times_every_peer_and_says_who_is_faster():
    found = {outcome.peer: outcome for outcome in peers.compare(SMALL, min_s=0.02)}
    assert set(found) == {"cupyflash", "standard"}
    ours, theirs = found["cupyflash"], found["standard"]
    assert ours.verdict.ok
    assert theirs.verdict.ok
    assert ours.ratio_to_best == pytest.approx(theirs.timing.ms / ours.timing.ms)
    assert ours.timing.host_us is None  # on the host the call is host time: ms says it
    assert 0 < ours.peak_bytes < 1e6


class Wrong(peers.Peer):
    name = "wrong"

    def bind(self, case, inputs):
        return lambda: np.zeros_like(inputs.q)


class Broken(peers.Peer):
    def __init__(self, error: Exception) -> None:
        self.name = type(error).__name__
        self.error = error

    def bind(self, case, inputs):
        raise self.error


def test_wrong_and_broken_peers_are_not_timed():
    wrong, broken, cannot, good = peers.compare(
        SMALL,
        [Wrong(), Broken(RuntimeError("no such symbol")), Broken(NotImplementedError("no head_dim 16")), peers.CupyFlash()],
        min_s=0.01,
    )
    assert wrong.timing is broken.timing is cannot.timing is None
    assert not wrong.verdict.ok
    assert "RuntimeError: no such symbol" in str(broken.verdict)
    assert cannot.why_not == "no head_dim 16"
    assert good.timing


def test_a_case_that_would_be_late_is_left_out():
    for outcome in peers.compare(SMALL, deadline=time.perf_counter()):
        assert outcome.timing is None
        assert outcome.why_not == peers.LATE


def test_the_formula_says_when_it_does_not_fit():
    why_not = peers.Standard().why_not(replace(SMALL, seqlen_q=1 << 20, seqlen_k=1 << 20))
    assert "8796.1 GB" in why_not


@pytest.mark.parametrize("dtype", available_dtypes())
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "seqlen", "dim"), [((4, 4), (20, 20), (16, 16)), ((6, 2), (5, 30), (8, 12)), ((2, 1), (30, 5), (7, 7))])
def test_the_formula_is_attention(heads, seqlen, dim, causal, dtype):
    case = Case(2, *seqlen, *heads, *dim, dtype, causal)
    inputs = case.inputs()
    verdict = check.judge(case, inputs, peers.Standard().bind(case, inputs)())
    assert verdict.ok, verdict


# --- right or wrong -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("row", [0, 149, 299])
def test_spot_check_sees_first_middle_and_last_rows(row, causal):
    case = Case(1, 300, 310, 2, 1, 16, 16, "float32", causal)
    inputs = case.inputs()
    out = cupyflash.attention(*inputs[:3], **inputs.options)
    assert check.spot_check(case, inputs, out).ok
    out[0, row, 1, 3] += 1e-3
    assert not check.spot_check(case, inputs, out).ok


def test_judge_wants_nan_and_infinity_in_the_same_places():
    case = replace(SMALL, seqlen_k=20, return_lse=True)  # 28 rows see no key
    inputs = case.inputs()
    result = cupyflash.attention(*inputs[:3], **inputs.options)
    assert check.judge(case, inputs, result.out, result.lse).ok
    assert not check.judge(case, inputs, result.out, np.nan_to_num(result.lse, neginf=-1e30)).ok
    assert not check.judge(case, inputs, np.where(result.out == 0, np.nan, result.out), result.lse).ok
    assert not check.judge(case, inputs, result.out[:, :-1], result.lse).ok


def test_limits_are_those_of_the_dtype():
    for dtype, size in (("float16", 3e-3), ("float32", 5e-5), ("float64", 1e-11)):
        case = replace(SMALL, dtype=dtype, return_lse=True)
        inputs = case.inputs()
        out, lse = cupyflash.reference.attention(*inputs[:3], **inputs.options)
        assert check.judge(case, inputs, out, lse).ok
        assert not check.judge(case, inputs, out + size * (1 + np.abs(out)), lse).ok
        assert not check.judge(case, inputs, out, lse + 5e-4).ok


def test_keys_past_the_used_length_are_poisoned():
    case = replace(SMALL, batch=3, extras=("seqused",), return_lse=True)
    inputs = check.poisoned(case, case.inputs())
    used = inputs.options["seqused_k"]
    for b in range(3):
        assert np.isnan(inputs.k[b, used[b] :]).all()
        assert np.isfinite(inputs.v[b, : used[b]]).all()
    assert check.run(case).ok


def test_the_suite_covers_every_option_in_every_dtype():
    cases = [case for group in check_suite().values() for case in group]
    for dtype in available_dtypes():
        mine = [case for case in cases if case.dtype == dtype]
        assert {extra for case in mine for extra in case.extras} == {"alibi", "bias", "mask", "sink", "seqused"}
        assert any(case.window_size for case in mine)
        assert any(case.softcap for case in mine)
        assert any(case.num_heads_q > case.num_heads_kv for case in mine)
        assert any(case.head_dim % 8 for case in mine)
        assert any(case.causal and case.seqlen_q > case.seqlen_k > 0 for case in mine)  # empty rows
        assert any(case.seqlen_k == 0 for case in mine)
    assert len(check_suite(full=True)["at random"]) == 400


# --- commands -----------------------------------------------------------------------------------------------------------------


def test_version_and_help_need_no_gpu_and_no_cupy(monkeypatch):
    """KF-116."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(machine, "nvidia_driver", lambda: machine.Driver(None, []))
    assert run("--version").output == f"cupyflash {cupyflash.__version__}\n"
    for arguments in (["-h"], ["--help"], *([name, "-h"] for name in cli.main.commands)):
        result = run(*arguments)
        assert result.exit_code == 0
        assert "Usage:" in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nope"], "No such command 'nope'"),
        (["--bogus"], "No such option"),
        (["check", "extra"], "extra"),
        (["--json"], "--json"),
        (["check", "--json", "/no/such/folder/x.jsonl"], "cannot write /no/such/folder/x.jsonl"),
        (["fwd", "--seqlen", "4q"], "'4q' is no size: write 512, 4k"),
        (["fwd", "--seqlen", "0"], "'0' is no size"),
        (["fwd", "--seqlen", "1k:4k:2"], "'1k:4k:2' is no size"),
        (["fwd", "--batch", ""], "'' is no size"),
        (["fwd", "--heads", "6/4"], "6 query heads are no multiple of 4 key heads"),
        (["fwd", "--heads", "8/"], "'8/' is neither a number nor a pair such as 32/8"),
        (["fwd", "--dim", "-3"], "'-3' is neither"),
        (["fwd", "--dtype", "int8"], "'int8' is not one of fp16, bf16, fp32, fp64"),
        (["fwd", "--peers", "cupyflash,fa9"], "there is no 'fa9' here, only cupyflash, standard"),
        (["fwd", "--min-time", "0"], "not in the range"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments, says):
    result = run(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("text", "sizes"), [("512", (512,)), ("4k", (4096,)), ("1k,4K", (1024, 4096)), ("512:4k:x2", (512, 1024, 2048, 4096)), ("1:2,9", ())]
)
def test_sizes(text, sizes):
    option = next(option for option in cli.main.commands["fwd"].params if option.name == "seqlen")
    if sizes:
        assert cli.as_sizes(None, option, text) == sizes
    else:
        with pytest.raises(cli.click.BadParameter):
            cli.as_sizes(None, option, text)


@pytest.mark.usefixtures("small")
def test_the_tour_is_the_default():
    result = run()
    assert result.exit_code == 0, result.output
    for text in (
        "cpu",
        "fwd fp32 B 1 S 48 H 2 D 16 causal",
        "decode fp32 B 2 S 1x48 H 2/1 D 16",
        "standard",
        "Next",
        "cupyflash-bench check",
    ):
        assert text in result.stdout
    assert result.stderr == ""  # no progress bar where there is no terminal


@pytest.mark.usefixtures("small")
def test_json_lines_carry_exactly_the_fields():
    result = run("--json", "-")
    assert result.exit_code == 0
    header, *records = lines(result.stdout)  # every line parses: the table is elsewhere
    assert header["record"] == "environment"
    assert {"cupyflash", "python", "numpy", "cupy", "nvrtc", "driver", "devices", "cpu", "cores", "blas", "time", "command"} <= set(header)
    results = [record for record in records if "record" not in record]
    assert [(record["mode"], record["peer"]) for record in results] == [
        *(("fwd", "cupyflash"), ("fwd", "standard"), ("decode", "cupyflash"), ("decode", "standard"))
    ]
    for record in results:
        assert set(record) == RESULT_FIELDS | {"gbps" if record["mode"] == "decode" else "tflops"}
        assert record["host_us"] is None
    tflops = SMALL.flops / results[0]["ms"] / 1e9
    assert results[0]["tflops"] == pytest.approx(tflops)
    assert results[2]["gbps"] == pytest.approx(DECODE.num_bytes / results[2]["ms"] / 1e6)
    runs = [record for record in records if record.get("record") == "run"]
    assert all(record["first_call_ms"] > 0 and record["peak_bytes"] > 0 and record["not_timed"] is None for record in runs)
    assert "standard" in result.stderr


@pytest.mark.usefixtures("small")
def test_json_into_a_file_leaves_the_table_on_stdout(tmp_path):
    file = tmp_path / "results.jsonl"
    shapes = [
        "--batch",
        "1,2",
        "--seqlen",
        "16:32:x2",
        "--seqlen-k",
        "40",
        "--heads",
        "4/2",
        "--dim",
        "24-8",
        "--dtype",
        "fp64",
        "--causal",
    ]
    result = run("fwd", *shapes, "--json", str(file))
    assert result.exit_code == 0, result.output
    assert "fwd fp64 B 2 S 32x40 H 4/2 D 24-8 causal" in result.stdout
    results = [record for record in lines(file.read_text()) if "record" not in record]
    shapes = [(record["batch"], record["seqlen_q"]) for record in results if record["peer"] == "cupyflash"]
    assert shapes == [(1, 16), (1, 32), (2, 16), (2, 32)]


@pytest.mark.usefixtures("small")
def test_a_wrong_result_ends_in_exit_code_1(monkeypatch):
    monkeypatch.setattr(peers, "standard", lambda q, *_, **__: np.full_like(q, np.inf))
    result = run("--json", "-")
    assert result.exit_code == 1
    assert "WRONG: error inf" in result.stderr
    wrong = [record for record in lines(result.stdout) if record.get("peer") == "standard"]
    assert all(record["record"] == "run" and record["error"] is None and "inf" in record["not_timed"] for record in wrong)


def test_check_passes_here():
    """The whole default suite, as a user runs it."""
    result = run("check", "--json", "-")
    assert result.exit_code == 0, result.stderr
    records = [record for record in lines(result.stdout) if record["record"] == "check"]
    assert len(records) == sum(map(len, check_suite().values()))
    assert all(record["ok"] and record["error"] <= record["limit"] for record in records)
    assert "PASS" in result.stderr
    assert "FAIL" not in result.stderr
    assert f"{len(records)} of {len(records)} pass" in result.stderr


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("attention", "code", "says"),
    [
        (lambda q, k, v, **_: cupyflash.AttentionResult(np.zeros_like(q), np.zeros(1), None), 1, "FAIL fp32 B 1 S 48 H 2 D 16 causal"),
        (lambda q, k, v, **_: 1 / 0, 1, "ZeroDivisionError: division by zero"),
        (lambda q, k, v, **_: (_ for _ in ()).throw(cupyflash.UnsupportedError("no sinks")), 0, "skip not supported: no sinks"),
    ],
)
def test_check_says_what_failed(monkeypatch, attention, code, says):
    monkeypatch.setattr(cupyflash, "attention", attention)
    result = run("check")
    assert result.exit_code == code
    assert says in result.stdout


@pytest.mark.usefixtures("small")
def test_an_interrupt_is_no_traceback(monkeypatch):
    def interrupt(case):
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "run", interrupt)
    result = run("check")
    assert result.exit_code == 130
    assert result.stderr.strip() == "cupyflash-bench: interrupted"


# --- text ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("command", [[], ["check"], ["doctor"]])
@pytest.mark.parametrize("width", [60, 80, 100])
def test_nothing_is_wider_than_the_terminal(command, width):
    result = run(*command, COLUMNS=str(width))
    for line in result.stdout.splitlines():
        assert len(line) <= width
        assert line == line.rstrip()
        assert "…" not in line
    if not command:
        assert ("first ms" in result.stdout) == (width >= 80)  # columns go before lines break


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("command", [[], ["check"], ["doctor"]])
def test_no_color_and_pipes_get_plain_text(command):
    assert "\x1b" in run(*command, FORCE_COLOR="1").stdout  # so that the next lines test something
    assert "\x1b" not in run(*command, FORCE_COLOR="1", NO_COLOR="1").stdout
    assert "\x1b" not in run(*command).stdout


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.01234, "0.0123"), (1.234, "1.23"), (9.999, "10.0"), (12.34, "12.3"), (123.4, "123"), (999.7, "1000"), (12345.6, "12346"), (0, "0")],
)
def test_three_digits(value, text):
    assert report.digits(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (999, "999 B"), (41_943_040, "41.9 MB"), (999_999, "1.00 MB"), (2.5e12, "2.50 TB")]
)
def test_units(value, text):
    assert report.si(value, "B") == text


# --- doctor -------------------------------------------------------------------------------------------------------------------

H200 = machine.Gpu("NVIDIA H200", "sm_90", 150_000_000_000)


@pytest.fixture
def doctor(monkeypatch):
    """The doctor on a machine made up for the test; a good one with CUDA 13 unless said otherwise."""

    def run_on(driver=("13.0", [H200], None), cupy=("cupy-cuda13x",), nvrtc="13.0", headers="/usr/include", unwritable=None, **config):
        found = {**cupyflash.show_config(mode="dicts"), "nvrtc": nvrtc, **config}
        monkeypatch.setattr(cupyflash, "show_config", lambda mode: found)
        monkeypatch.setattr(machine, "nvidia_driver", lambda: machine.Driver(*driver))
        monkeypatch.setattr(machine, "cupy_wheels", lambda: dict.fromkeys(cupy, "14.2.0"))
        monkeypatch.setattr(machine, "cuda_headers", lambda: headers)
        monkeypatch.setattr(machine, "why_not_writable", lambda folder: unwritable)
        return run("doctor")

    return run_on


def test_doctor_finds_nothing_missing(doctor):
    result = doctor()
    assert result.exit_code == 0
    for text in (
        "NVIDIA H200, sm_90, 150 GB",
        "cupy-cuda13x 14.2.0",
        "CUDA 13.0",
        "nothing is missing",
        "host path    works",
        np.__version__,
    ):
        assert text in result.stdout


@pytest.mark.parametrize(
    ("state", "says"),
    [
        # KF-116: nothing there at all; then a driver, and the extra that it can run.
        (
            {"driver": (None, [], None), "cupy": (), "nvrtc": None, "headers": None},
            [
                "No NVIDIA driver",
                "pip install 'cupyflash[cuda13]'  # driver 580 or newer",
                "pip install 'cupyflash[cuda12]'  # driver 525 or newer",
            ],
        ),
        ({"cupy": (), "nvrtc": None}, ["CuPy is not installed", "  pip install 'cupyflash[cuda13]'\n"]),
        ({"driver": ("12.4", [H200], None), "cupy": (), "nvrtc": None}, ["  pip install 'cupyflash[cuda12]'\n"]),
        ({"driver": ("14.1", [H200], None), "cupy": (), "nvrtc": None}, ["  pip install 'cupyflash[cuda13]'\n"]),
        ({"driver": ("11.8", [H200], None)}, ["The driver speaks CUDA 11.8", "driver 525 or newer"]),
        ({"driver": ("13.0", [], "cuInit returned 100")}, ["No GPU can be used: cuInit returned 100", "CUDA_VISIBLE_DEVICES"]),
        # KF-117: both named, both removed.
        (
            {"cupy": ("cupy-cuda12x", "cupy-cuda13x")},
            [
                "cupy-cuda12x and cupy-cuda13x are both installed",
                "pip uninstall -y cupy-cuda12x cupy-cuda13x\n     pip install 'cupyflash[cuda13]'",
            ],
        ),
        (
            {"driver": ("12.4", [H200], None)},
            [
                "cupy-cuda13x needs a newer driver than one of CUDA 12.4",
                "pip uninstall -y cupy-cuda13x\n     pip install 'cupyflash[cuda12]'",
            ],
        ),
        # What is missing beside an installed CuPy is that CuPy's own, whatever the driver could run.
        ({"cupy": ("cupy-cuda12x",), "nvrtc": None}, ["CuPy cannot compile", "pip install 'cupyflash[cuda12]'"]),
        (
            {"nvrtc": None, "error": "OSError: no libnvrtc"},
            ["CuPy cannot compile: OSError: no libnvrtc", "pip install 'cupyflash[cuda13]'"],
        ),
        ({"headers": None}, ["The CUDA headers (cuda_fp16.h) were not found", "pip install 'cupyflash[cuda13]'"]),
        ({"unwritable": "Permission denied: /cache"}, ["cannot be written: Permission denied: /cache", "CUPYFLASH_CACHE_DIR"]),
    ],
)
def test_doctor_names_what_is_missing_and_the_line_that_mends_it(doctor, state, says):
    result = doctor(**state)
    assert result.exit_code == 3
    for text in says:
        assert text in result.stdout
    assert "host path    works" in result.stdout


def test_doctor_without_cupy_on_this_machine(monkeypatch):
    """Nothing made up but that CuPy is not there: a real probe of everything else, and no traceback."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(machine, "cupy_wheels", dict)
    result = run("doctor")
    assert result.exit_code == 3
    assert "not installed" in result.stdout
    assert "pip install 'cupyflash[cuda1" in result.stdout


def test_doctor_says_when_the_host_path_is_wrong(doctor, monkeypatch):
    monkeypatch.setattr(cupyflash, "attention", lambda q, k, v, **_: cupyflash.AttentionResult(np.zeros_like(q), np.zeros(1), None))
    result = doctor()
    assert result.exit_code == 1
    assert "WRONG" in result.stdout


def test_cache_folder_is_tried_without_leaving_anything(tmp_path):
    assert machine.why_not_writable(tmp_path / "a" / "b") is None
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert "file" in machine.why_not_writable(tmp_path / "file" / "cache")


def test_no_driver_is_an_answer(monkeypatch):
    def no_library(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(machine.ctypes, "CDLL", no_library)
    assert machine.nvidia_driver() == machine.Driver(None, [])


def test_a_driver_without_a_device_is_an_answer(monkeypatch):
    class Lib:
        def cuDriverGetVersion(self, version):  # noqa: N802
            version._obj.value = 12080
            return 0

        def cuInit(self, flags):  # noqa: N802
            return 100

    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: Lib())
    assert machine.nvidia_driver() == machine.Driver("12.8", [], "cuInit returned 100")
