"""cupyflash-bench on a GPU: what its timers measure, what its peers compute, and its commands as a user runs them."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("cupy", reason="CuPy is not installed; pip install 'cupyflash[cuda13]'")

from bench import check, cli, gpu, host, kernels, peers, timing
from bench.cases import CacheCase, Case, check_suite

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # torch and the peers have warnings of their own

SMALL = Case(2, 256, 256, 8, 8, 64, 64, "bfloat16", causal=True)
DECODE = replace(SMALL, seqlen_q=1, seqlen_k=4096, num_heads_kv=2, causal=False)
CACHED = CacheCase(3, 1, 2000, 8, 2, 128, 128, "bfloat16")


@pytest.fixture(autouse=True)
def briefly(monkeypatch):
    """What these tests ask of a number needs no steady clock."""
    monkeypatch.setattr(timing, "WARM_UP_S", 0.02)


@pytest.fixture(scope="module")
def place():
    return gpu.open_place()


@pytest.fixture(params=["with torch", "CuPy alone"])
def either(request, place, monkeypatch):
    """The place as it is, and as it would be where torch is not installed."""
    if request.param == "with torch" and place.torch is None:
        pytest.skip("torch with CUDA is not installed")
    if request.param == "CuPy alone":
        pytest.importorskip("ml_dtypes", reason="bfloat16 in CuPy needs ml_dtypes; pip install ml_dtypes")
        monkeypatch.setattr(gpu, "torch_with_cuda", lambda: None)
        return gpu.Gpu()
    return place


def spin_call(place, us: float):
    return lambda: place._spin((1,), (1,), (int(us * 1e3),))


@pytest.mark.parametrize("timer", ["graph", "events"])
@pytest.mark.parametrize("us", [30, 300, 20_000])
def test_timers_measure_the_gpu_and_not_the_host(either, timer, us):
    """A kernel that spins for a known time, called by a host that takes longer to call it than the kernel runs."""

    def slow_host():
        time.sleep(1e-4)
        spin_call(either, us)()

    with either:
        tick = either.timers[timer]([slow_host])()
    assert tick.ms * 1e3 == pytest.approx(us, rel=0.03, abs=5)  # of which some microseconds are between one kernel and the next
    assert tick.host_us > 100


def test_the_wall_timer_has_the_host_in_it(place):
    with place:
        tick = place.timers["wall"]([spin_call(place, 1000)])()
    assert tick.ms > 1
    assert tick.host_us < 900  # only queued


def test_a_call_that_waits_cannot_be_captured_and_is_timed_by_events(place):
    def waits():
        spin_call(place, 100)()
        place.wait()

    with place:
        with pytest.raises(timing.CaptureError):
            place.timers["graph"]([waits])
        assert place.timers["events"]([waits])().ms > 0.09
        assert place.timers["graph"]([spin_call(place, 100)])().ms == pytest.approx(0.1, rel=0.1)  # the stream has survived


def test_inputs_are_normal_and_cold(either):
    with either:
        sets = either.inputs(SMALL)
        assert len(sets) * SMALL.num_bytes >= either.cache_bytes
        assert len(either.inputs(SMALL, cold=False)) == 1
        first, second = either.fetch(sets[0].q), either.fetch(sets[1].q)
    assert first.shape == SMALL.shapes[0]
    assert abs(first.mean()) < 0.02
    assert first.std() == pytest.approx(1, abs=0.02)
    assert np.abs(first).max() > 3.5
    assert abs((first * second).mean()) < 0.02


COMPILED = ("triton", "jax")  # for seconds, for each shape


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("case", [SMALL, DECODE, replace(SMALL, causal=False, num_heads_kv=2)])
def test_every_peer_that_runs_a_case_is_right(either, case, dtype):
    case = replace(case, dtype=dtype)
    quick = [peer for peer in peers.peers_at("gpu") if peer.name not in COMPILED]
    found = peers.compare(case, quick, either, min_s=0.01, min_rounds=2)
    for outcome in found.outcomes:
        assert outcome.verdict is None or outcome.verdict.ok, (outcome.peer, str(outcome.verdict))
        assert outcome.timing or outcome.why_not, outcome.peer
    ours = found.outcomes[0]
    assert ours.peer == peers.OURS
    assert ours.timing.ms > 0
    assert ours.timing.host_us > 0
    out_bytes = np.prod(case.shapes[0]) * (4 if dtype == "float32" else 2)
    assert out_bytes <= ours.peak_bytes < out_bytes + (8 << 20)
    assert found.kernel.startswith("decode" if case.seqlen_q == 1 and dtype != "float32" else "fwd_")
    assert found.cold


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", COMPILED)
def test_peers_that_are_compiled_are_right(place, name, backward):
    both = peers.peers_at("gpu", ("cupyflash", name))
    if reason := both[1].missing():
        pytest.skip(f"{name}: {reason}")
    case = replace(SMALL, dtype="bfloat16", num_heads_kv=2, backward=backward)
    ours, other = peers.compare(case, both, place, min_s=0.01, min_rounds=2).outcomes
    if name == "triton" and backward:
        assert other.why_not == "only its forward is timed here"
        return
    assert other.why_not is None
    assert other.verdict.ok, str(other.verdict)
    assert (other.timer, other.ratio_to_best is None) == (("burst", True) if name == "jax" else ("", False))
    assert ours.timing


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize(("page_size", "cache_dtype"), [(0, ""), (16, ""), (0, "int8"), (64, "int8"), (64, "float8_e4m3fn")])
def test_every_peer_over_a_cache_is_right(either, rows, page_size, cache_dtype):
    if cache_dtype == "float8_e4m3fn" and either.torch is None:
        pytest.skip("CuPy has no float8")
    case = replace(CACHED, seqlen_q=rows, causal=rows > 1, page_size=page_size, cache_dtype=cache_dtype)
    quick = [peer for peer in peers.peers_at("gpu", keys="cache") if peer.name not in COMPILED]
    found = peers.compare(case, quick, either, min_s=0.01, min_rounds=2)
    outcomes = {outcome.peer: outcome for outcome in found.outcomes}
    for outcome in found.outcomes:
        assert outcome.verdict is None or outcome.verdict.ok, (outcome.peer, str(outcome.verdict))
        assert outcome.timing or outcome.why_not, outcome.peer
    assert outcomes[peers.OURS].timing
    assert (outcomes["gather"].timing is not None) == (page_size > 0), outcomes["gather"].why_not
    loaded = {variant.name for variant, _ in kernels.jit._kernels}
    assert loaded.issuperset(found.kernel.split(", "))
    assert found.cold


def test_the_formula_is_there_where_cublas_is(either):
    if reason := gpu.why_no_cublas():
        pytest.skip(reason)
    (outcome,) = peers.compare(SMALL, [peers.StandardOnGpu()], either, min_s=0.01, min_rounds=2).outcomes
    assert outcome.why_not is None
    assert outcome.verdict.ok, str(outcome.verdict)
    assert outcome.peak_bytes >= SMALL.num_scores * 2
    large = replace(SMALL, batch=64, seqlen_q=1 << 16, seqlen_k=1 << 16)
    assert "GB are free" in peers.StandardOnGpu().why_not(large, either)


@pytest.mark.parametrize("case", [replace(SMALL, seqlen_k=300, num_heads_kv=2, head_dim_v=40), DECODE])
def test_the_formula_can_be_recorded_in_a_graph(either, case):
    """Else every peer of its case would be timed by another timer."""
    if reason := gpu.why_no_cublas():
        pytest.skip(reason)
    with either:
        (inputs,) = either.inputs(case, cold=False)
        call = peers.StandardOnGpu().bind(case, inputs)
        call()
        assert either.timers["graph"]([call])().ms > 0


def test_host_time_is_that_of_warm_calls(place):
    with place:
        (inputs,) = place.inputs(SMALL, cold=False)
        call = peers.CupyFlash().bind(SMALL, inputs)
        call()
        place.wait()
        start = time.perf_counter()
        for _ in range(100):
            call()
        us = (time.perf_counter() - start) * 1e4
        place.wait()
        assert place.timers["events"]([call])().host_us == pytest.approx(us, rel=0.5, abs=10)


def test_a_wrong_kernel_is_not_timed(place, monkeypatch):
    """Zeros, of 16k keys: smaller than the limit of bfloat16, and wrong all the same."""
    case = replace(DECODE, seqlen_k=16384)
    monkeypatch.setattr(peers.CupyFlash, "bind", lambda self, case, inputs: lambda: inputs.q * 0)
    (outcome,) = peers.compare(case, [peers.CupyFlash()], place, min_s=0.01).outcomes
    assert not outcome.verdict.ok
    assert outcome.timing is None


@pytest.mark.parametrize("family", ["fwd_simple", "fwd_keys_outside"])
def test_a_family_alone_is_what_runs(place, family):
    with kernels.only_family(family):
        found = peers.compare(SMALL, [peers.CupyFlash()], place, min_s=0.01, min_rounds=2)
    assert found.kernel.startswith(family)
    assert found.outcomes[0].verdict.ok


def test_ceilings_are_those_of_a_gpu(place):
    flops_per_s, bytes_per_s = place.ceilings()
    assert bytes_per_s > 1e11
    assert flops_per_s is None or flops_per_s > 1e12


def test_rates_of_a_gpu(place):
    rates = place.rates(min_s=0.05)
    assert rates["copy"] > 1e11
    assert 0.5 < rates["copy"] / rates["read"] < 1.2
    assert 0.1 < rates["launch_us"] < 50
    assert 0.1 < rates["launch_host_us"] < 500
    assert all(rate > 1e12 for name, rate in rates.items() if name.startswith("matmul"))
    assert place.free_bytes() > 4 << 30  # nothing of it is held


def test_the_smoke_test_of_doctor():
    assert gpu.smoke().ok


def run(*arguments: str):
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def test_compare_as_a_user_runs_it(tmp_path):
    file = tmp_path / "results.jsonl"
    shapes = ["--tokens", "2k", "--seqlen", "1k", "--dim", "128", "--heads", "auto", "--both"]
    run("compare", *shapes, "--peers", "cupyflash,sdpa-flash", "--min-time", "0.02", "--json", str(file))
    header, ceilings, *records = map(json.loads, file.read_text().splitlines())
    assert header["devices"]
    assert header["peers"]["cupyflash"]
    assert ceilings["place"] == "gpu"
    ours = [record for record in records if "record" not in record and record["peer"] == "cupyflash"]
    assert [record["causal"] for record in ours] == [False, True]
    for record in ours:
        assert record["timer"] in ("graph", "events")
        assert record["host_us"] > 0
        assert record["error"] < check.LIMITS["bfloat16"]


def test_decode_as_a_user_runs_it(tmp_path):
    file = tmp_path / "results.jsonl"
    shapes = ["--cells", "1:4k,8:1k", "--page-size", "0,16", "--peers", "cupyflash,gather,sdpa-flash,fa3"]
    result = run("decode", *shapes, "--min-time", "0.02", "--json", str(file))
    _, ceilings, *records = map(json.loads, file.read_text().splitlines())
    ours = [record for record in records if "record" not in record and record["peer"] == "cupyflash"]
    assert [(record["batch"], record["seqlen_k"], record["page_size"]) for record in ours] == [
        (batch, keys, page_size) for batch, keys in ((1, 4096), (8, 1024)) for page_size in (None, 16)
    ]
    for record in ours:
        assert record["timer"] in ("graph", "events")
        assert 0 < record["gbps"] * 1e9 < 1.2 * ceilings["bytes_per_s"]  # cold: no call finds its cache in L2
        assert record["error"] < check.LIMITS["bfloat16"]
    assert "decode bf16 B 8 S 1x1k H 32/8 D 128, pages of 16" in result.stdout


def test_tiles_are_timed_each_by_its_own_row(tmp_path):
    file, table = tmp_path / "tiles.jsonl", vars(kernels.plan)["FORWARD"]
    case = ["--dim", "64", "--seqlen", "256", "--causal", "--rounds", "2", "--min-time", "0.02"]
    result = run("variants", "--tune", "--family", "fwd_sm80", *case, "--tiles", "64x32,64x64", "--spills", "100", "--json", str(file))
    assert vars(kernels.plan)["FORWARD"] is table
    _, *tiles, row = map(json.loads, file.read_text().splitlines())
    timed = {tile["tile"]: tile for tile in tiles if tile["ms"]}
    assert {"m64n32s2w4", "m64n64s2w4"} < timed.keys()
    loaded = {variant.name: variant for variant, _ in kernels.jit._kernels}
    for tile in timed.values():
        assert loaded[tile["kernel"]].family == "fwd_sm80"
        assert tile["timer"] == "graph"
        assert tile["error"] < check.LIMITS["bfloat16"]
        assert tile["ratio_to_now"] > 0
    assert row["line"].startswith("_sm80(64, False, ")
    assert row["line"] in result.stdout


def test_the_tour_is_over_in_time(monkeypatch):
    """Its first and its last case; that a late one is left out is tested without a GPU."""
    suite = cli.gpu_tour_suite()
    monkeypatch.setattr(cli, "gpu_tour_suite", lambda: (suite[0], suite[-1]))
    start = time.perf_counter()
    result = run()
    assert time.perf_counter() - start < 15  # all cases are promised in 30 s; the first tour on a machine also compiles
    assert "decode bf16" in result.stdout
    if gpu.why_no_cublas() is None:
        assert "tokens the formula holds" in result.stdout


def test_check_on_the_gpu(monkeypatch):
    """A part of the suite, by the command's own way to the GPU and back; the kernels' own tests compute every option."""
    suite = check_suite()
    few = {group: tuple(case for case in suite[group] if case.dtype in ("float16", "float32")) for group in ("causal", "seqused")}
    monkeypatch.setattr(cli, "check_suite", lambda full: few)
    result = run("check")
    assert "FAIL" not in result.stdout
    assert result.stdout.count("PASS") == len(few)


def test_host_times(tmp_path):
    """Of all frameworks that are there; how long is for bench/results to say."""
    file = tmp_path / "host.jsonl"
    found = CliRunner().invoke(host.main, ["--json", str(file)], catch_exceptions=False)
    environment, *lines = map(json.loads, file.read_text().splitlines())
    assert environment["devices"]
    assert [line["call"] for line in lines][:2] == ["cupy: attention", "cupy: attention, out="]
    assert all(1 < line["us"] < 10_000 for line in lines)
    assert len(found.output.splitlines()) == 1 + len(lines)  # under a heading
