"""cupyflash-bench: what its numbers mean, how it judges, what it prints, and how it ends."""

from __future__ import annotations

import itertools
import json
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from click.testing import CliRunner, Result

import cupyflash
from bench import check, cli, cublas, gpu, kernels, limits, machine, nvml, peers, report, timing
from bench.cases import DESCALE, SEED, CacheCase, Case, available_dtypes, check_suite, drawn_lengths, packed

SMALL = Case(1, 48, 48, 2, 2, 16, 16, "float32", causal=True)
DECODE = replace(SMALL, batch=2, seqlen_q=1, num_heads_kv=1, causal=False)
BACKWARD = replace(SMALL, backward=True)
PACKED = replace(SMALL, num_heads_q=4, **packed((5, 1, 70, 24)))  # neither the first nor the last is the longest
CACHED = CacheCase(3, 1, 50, 4, 2, 16, 24, "float32")
PAGED = replace(CACHED, page_size=16)  # the last page of a sequence is not full
CHUNK = replace(PAGED, seqlen_q=7, causal=True)

RESULT_FIELDS = {
    *("mode", "head_dim", "head_dim_v", "num_heads_q", "num_heads_kv", "batch", "seqlen_q", "seqlen_k", "causal", "window_size"),
    *("softcap", "dtype", "peer", "ms", "spread", "host_us", "ratio_to_best", "timer", "cold", "rounds", "clock_mhz", "error"),
    *("kernel", "note"),
}
PACKED_FIELDS = {"tokens", "longest", "seed", "lengths"}
CACHE_FIELDS = {"page_size", "cache_dtype"}


WHY_NOT = gpu.why_not


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """The same here as on a machine with a GPU: what needs one is in tests/gpu."""
    monkeypatch.setattr(gpu, "why_not", lambda: "no NVIDIA driver, so no GPU")
    monkeypatch.setattr(limits, "stored", lambda place: None)


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
    monkeypatch.setattr(timing.Place, "ceilings", lambda place: timing.Ceilings(1e11, 1e10))
    monkeypatch.setattr(timing, "WARM_UP_S", 0.0)
    measure = timing.measure
    monkeypatch.setattr(timing, "measure", lambda rounds, **how: measure(rounds, min_s=0, max_s=0, min_rounds=2))


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


def test_the_backward_counts_five_products_and_moves_everything_twice():
    """The field's convention: 2.5 times the forward where D = Dv, in which the scores that are computed again count."""
    case = Case(2, 512, 512, 4, 2, 64, 64, "float16", causal=True)
    back = replace(case, backward=True)
    assert (case.mode, back.mode, replace(back, seqlen_q=1).mode) == ("fwd", "bwd", "bwd")
    assert back.flops == 2.5 * case.flops == 10 * 64 * 4 * 2 * (512 * 513 // 2)
    assert replace(back, head_dim=192, head_dim_v=128).flops == 2 * (3 * 192 + 2 * 128) * 4 * 2 * (512 * 513 // 2)
    assert back.num_bytes == 2 * (4 * 2 * 512 * 4 * 64 + 4 * 2 * 512 * 2 * 64)  # q, out, dout, dq; k, v, dk, dv
    assert replace(back, deterministic=True).label == f"{case.label} deterministic"


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
    back = replace(case, backward=True).inputs()
    assert (first.dout is None, back.dout.shape) == (True, (1, 48, 2, 16))
    assert np.array_equal(first.q, back.q)


@pytest.mark.parametrize(("tokens", "longest"), [(32768, 8192), (1 << 20, 4096), (5000, 777), (100, 100), (101, 100), (64, 3), (9, 1)])
def test_lengths_are_drawn_as_promised(tokens, longest):
    lengths = drawn_lengths(tokens, longest)
    assert (sum(lengths), max(lengths), min(lengths) >= 1) == (tokens, longest, True)
    assert lengths == drawn_lengths.__wrapped__(tokens, longest)


def test_drawn_lengths_are_log_normal():
    logs = np.log(drawn_lengths(1 << 24, 8192))
    assert np.median(logs) == pytest.approx(np.log(512), abs=0.03)
    assert np.subtract(*np.quantile(logs, (0.84134, 0.15866))) / 2 == pytest.approx(1, abs=0.03)
    assert drawn_lengths(32768, 8192).index(8192) not in (0, len(drawn_lengths(32768, 8192)) - 1)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, (20, 3)), (True, (5, None))])
def test_packed_sequences_cost_what_each_costs_alone(causal, window, backward):
    case = replace(PACKED, causal=causal, window_size=window, backward=backward, head_dim_v=24)
    alone = [replace(case, batch=1, seqlen_q=n, seqlen_k=n, lengths=()) for n in case.lengths]
    assert [case.alone(b) for b in range(case.batch)] == alone
    for name in ("visible_pairs", "flops", "num_bytes", "num_scores"):
        assert getattr(case, name) == sum(getattr(one, name) for one in alone), name
    assert case.mode == ("bwd" if backward else "fwd")
    dense = replace(case, batch=3, seqlen_q=70, seqlen_k=70, lengths=())
    equal = replace(case, **packed((70,) * 3))
    for name in ("flops", "num_bytes", "num_scores", "tokens"):
        assert getattr(equal, name) == getattr(dense, name), name
    assert (equal.equal, case.equal, dense.equal) == (True, False, True)


def test_packed_inputs_are_those_of_attention_varlen():
    case = replace(PACKED, head_dim_v=24, backward=True)
    q, k, v, options, dout = case.inputs()
    assert [x.shape for x in (q, k, v, dout)] == [*case.shapes, case.out_shape] == [(100, 4, 16), (100, 2, 16), (100, 2, 24), (100, 4, 24)]
    assert options["cu_seqlens_q"].tolist() == [0, 5, 6, 76, 100]
    assert options["cu_seqlens_q"].dtype == np.int32
    assert {name: options[name] for name in options if name != "cu_seqlens_q"} == {"causal": True, "max_seqlen_q": 70, "max_seqlen_k": 70}
    assert replace(case, **packed((1, 1))).mode == "bwd"
    assert replace(PACKED, **packed((1, 1))).mode == "fwd"  # a cache has more keys than queries


@pytest.mark.parametrize(
    ("lengths", "label"),
    [
        ((5, 1, 70, 24), "fp32 100 tokens in 4 sequences, longest 70, H 4/2 D 16 causal"),
        ((4096,) * 8, "fp32 32k tokens in 8 sequences of 4k, H 4/2 D 16 causal"),
        ((512,), "fp32 512 tokens in 1 sequence of 512, H 4/2 D 16 causal"),
    ],
)
def test_the_label_of_packed_sequences(lengths, label):
    assert replace(PACKED, **packed(lengths)).label == label


# --- timing -------------------------------------------------------------------------------------------------------------------


def test_a_cache_costs_what_its_keys_do():
    """However they lie: a page that is not full is not read to its end. Keys of one byte are half of two."""
    dense = Case(8, 1, 5000, 32, 8, 128, 128, "bfloat16")
    sizes = [getattr(dense, name) for name in ("batch", "seqlen_q", "seqlen_k", "num_heads_q", "num_heads_kv", "head_dim", "head_dim_v")]
    cached = CacheCase(*sizes, "bfloat16", page_size=64)
    assert (cached.num_bytes, cached.flops, cached.mode) == (dense.num_bytes, dense.flops, "decode")
    assert dense.num_bytes - replace(cached, cache_dtype="float8_e4m3fn").num_bytes == 2 * 8 * 5000 * 8 * 128
    assert replace(cached, seqlen_q=512).mode == "decode"
    assert cached.label == "bf16 B 8 S 1x5000 H 32/8 D 128, pages of 64"
    chunk = replace(cached, seqlen_q=512, causal=True, page_size=0, cache_dtype="float8_e4m3fn")
    assert chunk.label == "bf16 B 8 S 512x5000 H 32/8 D 128 causal, fp8 cache"


def test_pages_are_shuffled_and_the_same_each_time():
    first, second = PAGED.inputs(), PAGED.inputs()
    table = first.options["page_table"]
    assert sorted(table.ravel()) == list(range(3 * 4))
    assert list(table.ravel()) != list(range(3 * 4))
    assert np.array_equal(table, second.options["page_table"])
    assert (table.dtype, first.options["cache_seqlens"].tolist()) == (np.int32, [50, 50, 50])
    assert (first.k.shape, first.v.shape) == ((12, 16, 2, 16), (12, 16, 2, 24))
    k, v = PAGED.keys_at(first, 1, slice(15, 50), 1)
    assert np.array_equal(k[:2], [first.k[table[1, 0], 15, 1], first.k[table[1, 1], 0, 1]])
    assert v.shape == (35, 24)
    assert "page_table" not in CACHED.inputs().options


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

    def round(self, name: str, *seconds: float) -> timing.Round:
        call = self.call(name, *seconds)

        def round_() -> timing.Tick:
            start = self.now
            call()
            return timing.Tick((self.now - start) * 1e3, 7.0, 1500.0)

        return round_


def test_warm_up_is_by_time_and_rounds_interleave():
    """KF-121: the warm-up ends after its time, however short the calls are; medians and spread are of the rounds alone."""
    clock = Clock()
    rounds = {"a": clock.round("a", *[0.05] * 20, 0.01), "b": clock.round("b", 0.02)}
    timings = timing.measure(rounds, min_s=0.1, max_s=1.0, warm_up_s=1.0, clock=clock)
    assert clock.ran[:20] == ["a"] * 20  # 20 calls of 0.05 s are the second
    assert clock.ran[20:70] == ["b"] * 50
    assert clock.ran[70:] == ["a", "b"] * timings["a"].rounds
    assert timings["a"].ms == pytest.approx(10)
    assert timings["b"].ms == pytest.approx(20)
    assert timings["a"].spread == pytest.approx(0)
    assert (timings["a"].host_us, timings["a"].clock_mhz) == (7.0, 1500.0)
    assert 0.1 <= timings["a"].rounds * 0.03 / 2 <= 0.2


def test_rounds_go_on_while_a_spread_is_large_but_not_for_ever():
    clock = Clock()
    noisy = clock.round("a", *[0.01, 0.02] * 1000)
    timings = timing.measure({"a": noisy}, min_s=0.1, max_s=0.6, warm_up_s=0, clock=clock)
    assert 0.6 <= timings["a"].rounds * 0.015 <= 0.7
    assert timings["a"].spread > timing.NOISE
    slow = timing.measure({"a": clock.round("a", 9.0)}, min_s=0.1, max_s=0.2, warm_up_s=0, clock=clock)
    assert slow["a"].rounds == timing.MIN_ROUNDS


def test_spread_is_the_interquartile_range_over_the_median():
    found = timing.summary([timing.Tick(ms) for ms in (10, 11, 12, 13, 90)])
    assert found == (12, pytest.approx(2 / 12), None, None, 5)


class Compiling(peers.Peer):
    """A peer whose first call compiles for 0.2 s."""

    name, place = "compiling", "host"

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
    (outcome,) = peers.compare(replace(SMALL, seqlen_q=4, seqlen_k=4), [Compiling()], min_s=0.01).outcomes
    assert outcome.first_ms > 200
    assert outcome.timing.ms < 100
    assert outcome.ratio_to_best is None


def test_peak_memory_is_what_numpy_held():
    assert 16e6 <= timing.HOST.peak_bytes(lambda: np.concatenate([np.ones(1_000_000)])) < 16.2e6


def test_compare_times_every_peer_and_says_who_is_faster():
    found = {outcome.peer: outcome for outcome in peers.compare(SMALL, peers.peers_at("host"), min_s=0.02).outcomes}
    assert set(found) == {"cupyflash", "standard"}
    ours, theirs = found["cupyflash"], found["standard"]
    assert ours.verdict.ok
    assert theirs.verdict.ok
    assert ours.ratio_to_best == pytest.approx(theirs.timing.ms / ours.timing.ms)
    assert ours.timing.host_us is None  # on the host the call is host time: ms says it
    assert 0 < ours.peak_bytes < 1e6


@pytest.mark.parametrize("deterministic", [False, True])
def test_compare_times_gradients(monkeypatch, deterministic):
    """On the host; each call is the backward alone, and the forward came before."""
    called = []
    for name in ("attention", "attention_backward"):
        function = getattr(cupyflash, name)
        monkeypatch.setattr(
            cupyflash, name, lambda *arrays, f=function, n=name, **o: called.append((n, o.get("deterministic"))) or f(*arrays, **o)
        )
    case = replace(BACKWARD, num_heads_kv=1, deterministic=deterministic)
    for outcome in peers.compare(case, peers.peers_at("host"), min_s=0.02).outcomes:
        assert outcome.verdict.ok, (outcome.peer, str(outcome.verdict))
        assert outcome.verdict.limit == 2 * check.LIMITS["float32"]
        assert outcome.timing
        assert outcome.peak_bytes > sum(map(np.prod, case.shapes)) * 4
    of_forward = [name for name, _ in called].count("attention")
    assert of_forward == 2  # for the arrays that are timed, and for those of the check
    assert set(called) == {("attention", None), ("attention_backward", deterministic)}


def test_wrong_gradients_are_not_timed(monkeypatch):
    gradients = peers.standard_gradients
    monkeypatch.setattr(peers, "standard_gradients", lambda *arrays, **o: (*gradients(*arrays, **o)[:2], arrays[3]))
    (outcome,) = peers.compare(BACKWARD, [peers.Standard()]).outcomes
    assert not outcome.verdict.ok
    assert outcome.timing is None


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_compare_times_packed_sequences(monkeypatch, backward, deterministic):
    called = []
    for name in ("attention", "attention_varlen", "attention_backward"):
        function = getattr(cupyflash, name)
        monkeypatch.setattr(cupyflash, name, lambda *arrays, f=function, n=name, **o: called.append((n, o)) or f(*arrays, **o))
    case = replace(PACKED, backward=backward, deterministic=deterministic)
    everyone = peers.peers_at("host", keys="packed")
    ours, dense, formula = peers.compare(case, everyone, min_s=0.01).outcomes
    assert ours.verdict.ok, str(ours.verdict)
    assert ours.timing
    assert dense.why_not == "these sequences have many lengths; --varlen --seqlen packs equal ones"
    assert "with a batch axis" in formula.why_not
    assert {name for name, _ in called} == {"attention_varlen", *(["attention_backward"] if backward else [])}
    for name, options in called:
        assert options["cu_seqlens_q"].tolist() == [0, 5, 6, 76, 100]
        assert options["max_seqlen_q"] == options["max_seqlen_k"] == 70
        assert options.get("deterministic") == (deterministic if name == "attention_backward" else None)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("case", [PACKED, replace(PACKED, backward=True, head_dim_v=24, window_size=(9, 0))])
def test_equal_lengths_are_timed_beside_the_dense_call(monkeypatch, case):
    """On the same memory, of which it takes views."""
    case = replace(case, **packed((23,) * 3))
    inputs, seen = case.inputs(), []
    monkeypatch.setattr(case.__class__, "inputs", lambda self, seed=0: inputs)
    attention = cupyflash.attention
    monkeypatch.setattr(cupyflash, "attention", lambda *arrays, **o: seen.extend(arrays) or attention(*arrays, **o))
    ours, dense = peers.compare(case, [peers.CupyFlash(), peers.CupyFlashDense()], min_s=0.01).outcomes
    for outcome in (ours, dense):
        assert outcome.verdict.ok, (outcome.peer, str(outcome.verdict))
        assert outcome.timing
    assert dense.ratio_to_best == pytest.approx(ours.timing.ms / dense.timing.ms)
    assert [x.shape for x in seen[:3]] == [(3, 23, 4, 16), (3, 23, 2, 16), (3, 23, 2, case.head_dim_v)]
    assert all(np.shares_memory(x, packed_x) for x, packed_x in zip(seen[:3], inputs[:3], strict=True))
    assert peers.CupyFlashDense().why_not(replace(case, lengths=()), timing.HOST) == "it is for packed sequences (--varlen)"


def test_peers_of_packed_sequences_are_not_asked_for_others():
    names = [{peer.name for peer in peers.peers_at("gpu", keys=keys)} for keys in ("", "packed")]
    assert names[1] - names[0] == {"cupyflash-dense", "torch-varlen"}
    assert names[0] < names[1]
    assert [peer.name for peer in peers.peers_at("gpu", ["torch-varlen"])] == ["torch-varlen"]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("cache_dtype", ["", "float8_e4m3fn", "int8"])
@pytest.mark.parametrize("case", [CACHED, PAGED, replace(CHUNK, page_size=0), CHUNK, replace(PAGED, page_size=1)])
def test_compare_times_calls_over_a_cache(monkeypatch, case, cache_dtype):
    pytest.importorskip("ml_dtypes", reason="float8 in NumPy needs ml_dtypes; pip install ml_dtypes")
    given, with_kvcache = [], cupyflash.attention_with_kvcache
    monkeypatch.setattr(cupyflash, "attention_with_kvcache", lambda *x, **o: given.append((x, o)) or with_kvcache(*x, **o))
    case = replace(case, cache_dtype=cache_dtype)
    ours, formula, gather = peers.compare(case, peers.peers_at("host", keys="cache"), min_s=0.01).outcomes
    assert (ours.verdict.ok, ours.timing is None) == (True, False), str(ours.verdict)
    (q, k, _), options = given[0]
    assert (q.shape, k.dtype.name, options["causal"]) == (case.shapes[0], cache_dtype or "float32", case.seqlen_q > 1)
    assert (options.get("page_table") is not None, options.get("k_descale")) == (case.page_size > 0, 1 / 16 if cache_dtype else None)
    if case.page_size:
        assert (gather.verdict.ok, gather.timing is None) == (True, False), str(gather.verdict)
        (_, k, v), options = next((arrays, options) for arrays, options in given if "page_table" not in options)
        assert (k.shape[0], k.shape[1] >= 50, v.shape[2:]) == (3, True, (2, 24))
        assert formula.why_not == "it takes no pages"
    else:
        assert gather.why_not == "it is for keys in pages (decode --page-size)"
        assert formula.why_not == ("its keys must have q's dtype" if cache_dtype else None)
        assert cache_dtype or formula.verdict.ok


@pytest.mark.parametrize("wrong", ["page_table", "cache_seqlens", "v_descale"])
def test_a_cache_that_is_read_wrongly_is_seen(monkeypatch, wrong):
    def with_kvcache(*arrays, **options):
        options[wrong] = options[wrong][::-1] - (wrong == "cache_seqlens") if wrong != "v_descale" else 0.06
        return function(*arrays, **options)

    function = cupyflash.attention_with_kvcache
    monkeypatch.setattr(cupyflash, "attention_with_kvcache", with_kvcache)
    (outcome,) = peers.compare(replace(PAGED, cache_dtype="int8"), [peers.CupyFlash()]).outcomes
    assert not outcome.verdict.ok
    assert outcome.timing is None


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
    ours = Broken(RuntimeError("ours"))
    ours.name = peers.OURS
    everyone = [Wrong(), Broken(RuntimeError("no such symbol")), Broken(NotImplementedError("no head_dim 16")), ours, peers.Standard()]
    wrong, broken, cannot, failed, good = peers.compare(SMALL, everyone, min_s=0.01).outcomes
    assert wrong.timing is broken.timing is cannot.timing is failed.timing is None
    assert not wrong.verdict.ok
    assert broken.why_not == "RuntimeError: no such symbol"
    assert broken.verdict is None  # another library's failure is no failed check of ours
    assert cannot.why_not == "no head_dim 16"
    assert "RuntimeError: ours" in str(failed.verdict)
    assert good.timing


def test_a_case_that_would_be_late_is_left_out():
    for outcome in peers.compare(SMALL, peers.peers_at("host"), deadline=time.perf_counter()).outcomes:
        assert outcome.timing is None
        assert outcome.why_not == peers.LATE


def test_the_formula_says_when_it_does_not_fit():
    why_not = peers.Standard().why_not(replace(SMALL, seqlen_q=1 << 20, seqlen_k=1 << 20), timing.HOST)
    assert "8796.1 GB" in why_not
    why_not = peers.Standard().why_not(replace(BACKWARD, seqlen_q=1 << 20, seqlen_k=1 << 20), timing.HOST)
    assert "17592.2 GB" in why_not  # P and dS


def test_all_peers_of_a_case_share_the_timer():
    """One call that a graph cannot record sends every peer to the next timer."""

    def graph(calls):
        if "waits" in calls:
            raise timing.CaptureError("RuntimeError: operation not permitted when stream is capturing")
        return lambda: timing.Tick(1.0)

    timers = {"graph": graph, "events": lambda calls: lambda: timing.Tick(2.0), "wall": None}
    name, rounds, note = peers._rounds({"a": ["queues"], "b": ["waits"]}, timers, None)
    assert (name, rounds["a"]().ms, rounds["b"]().ms) == ("events", 2.0, 2.0)
    assert note == "graph cannot record a call: RuntimeError: operation not permitted when stream is capturing"
    assert peers._rounds({"a": ["queues"]}, timers, None)[::2] == ("graph", "")
    assert peers._rounds({"a": ["queues"]}, timers, "events")[0] == "events"


# --- peers in GPU memory, as far as they can be seen without a GPU --------------------------------------------------------------


@pytest.fixture
def torch(monkeypatch):
    """torch on the CPU in the place of torch with CUDA; its switches of SDPA back ends as they were afterwards."""
    torch = pytest.importorskip("torch", reason="torch is not installed; pip install torch")
    monkeypatch.setattr(gpu, "torch_with_cuda", lambda: torch)
    names = peers.Sdpa._BACKENDS
    before = [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in names]
    yield torch
    for name, on in zip(names, before, strict=True):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(on)


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("case", [SMALL, replace(SMALL, causal=False, seqlen_k=77, num_heads_q=6, softmax_scale=0.3), DECODE])
def test_sdpa_is_given_the_case(torch, case, contiguous):
    inputs = case.inputs()
    tensors = as_tensors(torch, inputs)
    peer = peers.Sdpa("sdpa", "math", contiguous=contiguous)
    assert peer.why_not(case, timing.HOST) is None
    out = peer.bind(case, tensors)()
    assert check.judge(case, inputs, out.numpy()).ok
    assert torch.backends.cuda.math_sdp_enabled()
    assert not torch.backends.cuda.flash_sdp_enabled()


def as_tensors(torch, inputs: peers.Inputs) -> peers.Inputs:
    names = [name for name in ("q", "k", "v", "dout") if getattr(inputs, name) is not None]
    options = {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in inputs.options.items()}
    return inputs._replace(options=options, **{name: torch.from_numpy(getattr(inputs, name)) for name in names})


@pytest.fixture
def of_tensors(monkeypatch):
    """Host memory that hands out torch's tensors."""
    inputs, keep_rows = timing.Place.inputs, timing.Place.keep_rows

    def on(torch) -> timing.Place:
        place = timing.Place()
        monkeypatch.setattr(place, "inputs", lambda case, cold: [as_tensors(torch, one) for one in inputs(place, case)])
        monkeypatch.setattr(place, "keep_rows", lambda array, rows: torch.from_numpy(keep_rows(place, array.numpy(), rows)))
        return place

    return on


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize(
    "case", [BACKWARD, replace(BACKWARD, causal=False, batch=2, seqlen_k=77, num_heads_q=6, head_dim_v=24, softmax_scale=0.3)]
)
def test_sdpa_is_differentiated(torch, of_tensors, case, contiguous):
    (outcome,) = peers.compare(case, [peers.Sdpa("sdpa", "math", contiguous=contiguous)], of_tensors(torch), min_s=0.01).outcomes
    assert outcome.why_not is None
    assert outcome.verdict.ok, str(outcome.verdict)
    assert outcome.timing
    assert not torch.backends.cuda.flash_sdp_enabled()  # what the forward was told


@pytest.mark.usefixtures("torch")
def test_sdpa_says_what_it_would_compute_otherwise():
    peer = peers.Sdpa("sdpa-flash", "flash")
    assert "deterministic" in peer.why_not(replace(BACKWARD, deterministic=True), timing.HOST)
    assert "top left" in peer.why_not(replace(SMALL, seqlen_k=77), timing.HOST)
    assert "window" in peer.why_not(replace(SMALL, window_size=(3, 0)), timing.HOST)
    assert "nested tensors" in peer.why_not(PACKED, timing.HOST)
    assert peer.why_not(CACHED, timing.HOST) is None
    assert peer.why_not(PAGED, timing.HOST) == "it takes no pages"
    assert "top left" in peer.why_not(replace(CHUNK, page_size=0), timing.HOST)
    assert peer.why_not(replace(CACHED, cache_dtype="int8"), timing.HOST) == "its keys must have q's dtype"


@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize(("name", "unlimited"), [("fa3", -1), ("fa4", None)])
def test_flash_attention_is_given_the_case(monkeypatch, name, unlimited):
    given = {}
    module = type(sys)("flash_attn_fake")
    module.flash_attn_func = lambda q, k, v, **options: given.update(options, shapes=(q, k, v)) or ("out", "lse")
    monkeypatch.setitem(sys.modules, "flash_attn_fake", module)
    module.__spec__ = "found"
    peer = peers.FlashAttention(name, "flash_attn_fake", "none", unlimited)
    assert peer.missing() is None
    case = replace(SMALL, window_size=(7, None), softcap=3.0)
    assert peer.bind(case, peers.Inputs("q", "k", "v", {}))() == ("out", "lse")
    options = {"causal": True, "window_size": (7, unlimited), "softcap": 3.0, "softmax_scale": None}
    assert given == {**options, "shapes": ("q", "k", "v")}
    assert ("num_splits" in given) is False
    peer.bind(DECODE, peers.Inputs("q", "k", "v", {}))()
    assert ("num_splits" in given) == (name == "fa3")
    assert "no module flash_nope (flash-nope); --site" in peers.FlashAttention("x", "flash_nope", "flash-nope", None).missing()


@pytest.fixture
def flash_attention(torch, monkeypatch):
    """FlashAttention's function, by torch on the CPU: what it was given, and the peer for it."""
    given = {}
    module = type(sys)("flash_attn_fake")

    def flash_attn_func(q, k, v, **options):
        given.update(options)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=options["causal"], enable_gqa=True)
        return out.transpose(1, 2), "lse"

    module.flash_attn_func = flash_attn_func
    module.__spec__ = "found"
    monkeypatch.setitem(sys.modules, "flash_attn_fake", module)
    return SimpleNamespace(given=given, module=module, peer=peers.FlashAttention("fa3", "flash_attn_fake", "none", -1))


@pytest.mark.parametrize("deterministic", [False, True])
def test_flash_attention_is_differentiated(torch, of_tensors, flash_attention, deterministic):
    case = replace(BACKWARD, num_heads_q=4, deterministic=deterministic)
    (outcome,) = peers.compare(case, [flash_attention.peer], of_tensors(torch), min_s=0.01).outcomes
    assert outcome.verdict.ok, str(outcome.verdict)
    assert outcome.timing
    assert flash_attention.given.get("deterministic", False) is deterministic


FA3 = "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, softmax_scale=None, causal=False, {}"
FA4 = "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None, causal=False, {}"
FLASH = {
    "fa3": FA3.format("window_size=(-1, -1), softcap=0.0, deterministic=False"),
    "fa4": FA4.format("window_size=(None, None), softcap=0.0, deterministic=False"),
    # FA4 as it was at first.
    "fa4 of 2025": FA4.replace("max_seqlen_q=None, max_seqlen_k=None, ", "").format("window_size=(None, None), softcap=0.0"),
}


def with_signature(arguments: str, function):
    """A function of these arguments that calls another with all of them by name."""
    return eval(f"lambda {arguments}: function(locals())", {"function": function})


def by_sequence(torch, given: dict, offsets, causal: bool):
    """Packed attention by torch on the CPU."""
    q, k, v = (given.get(name, given.get(name[0])) for name in ("query", "key", "value"))
    outs = []
    for begin, end in itertools.pairwise(offsets.tolist()):
        heads = (x[None, begin:end].transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=causal, enable_gqa=True)
        outs.append(out.transpose(1, 2)[0])
    return torch.cat(outs)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("version", FLASH)
def test_flash_attention_takes_packed_sequences(torch, of_tensors, monkeypatch, version, backward, causal):
    given = {}

    def varlen(arguments):
        given.update(arguments)
        assert arguments["cu_seqlens_k"] is arguments["cu_seqlens_q"]
        return by_sequence(torch, arguments, arguments["cu_seqlens_q"], arguments["causal"]), "lse"

    module = SimpleNamespace(flash_attn_varlen_func=with_signature(FLASH[version], varlen), __spec__="found")
    monkeypatch.setitem(sys.modules, "flash_attn_fake", module)
    peer = peers.FlashAttention(version[:3], "flash_attn_fake", "none", {"fa3": -1}.get(version))
    case = replace(PACKED, causal=causal, backward=backward)
    (outcome,) = peers.compare(case, [peer], of_tensors(torch), min_s=0.01).outcomes
    assert outcome.why_not is None
    assert outcome.verdict.ok, str(outcome.verdict)
    assert outcome.timing
    assert given["window_size"] == ((-1, -1) if version == "fa3" else (None, None))
    assert given["cu_seqlens_q"].dtype == torch.int32
    longest = None if version == "fa4 of 2025" else 70
    assert given.get("max_seqlen_q") == given.get("max_seqlen_k") == longest


FA3_CACHE = (
    "q, k_cache, v_cache, cache_seqlens=None, page_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("case", [CACHED, PAGED])
def test_peers_are_given_the_cache(torch, of_tensors, monkeypatch, case):
    given = {}

    def with_kvcache(arguments):
        given.update(arguments)
        k, v = (arguments[name] for name in ("k_cache", "v_cache"))
        if (table := arguments["page_table"]) is not None:
            k, v = (x[table].flatten(1, 2)[:, : int(arguments["cache_seqlens"][0])] for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (arguments["q"], k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)

    module = SimpleNamespace(flash_attn_with_kvcache=with_signature(f"{FA3_CACHE}num_splits=1", with_kvcache), __spec__="found")
    monkeypatch.setitem(sys.modules, "flash_attn_fake", module)
    fa3 = peers.FlashAttention("fa3", "flash_attn_fake", "none", -1)
    everyone = (peers.CupyFlash(), fa3, *((peers.Gather(),) if case.page_size else (peers.Sdpa("sdpa", "math"),)))
    for outcome in peers.compare(case, everyone, of_tensors(torch), min_s=0.01).outcomes:
        assert outcome.why_not is None, outcome.peer
        assert outcome.verdict.ok, (outcome.peer, str(outcome.verdict))
        assert outcome.timing
    assert given["cache_seqlens"].tolist() == [50] * 3
    assert (given["page_table"] is None, given["num_splits"]) == (not case.page_size, 0)
    assert fa3.why_not(replace(case, cache_dtype="float8_e4m3fn"), timing.HOST) == "its keys must have q's dtype"


@pytest.mark.usefixtures("torch")
def test_flash_attention_4_has_only_arrays_for_a_cache(monkeypatch):
    given = {}
    function = with_signature(FA4.format("window_size=(None, None), softcap=0.0"), lambda arguments: given.update(arguments) or "out")
    monkeypatch.setitem(sys.modules, "flash_attn_fake", SimpleNamespace(flash_attn_func=function, __spec__="found"))
    peer = peers.FlashAttention("fa4", "flash_attn_fake", "none", None)
    assert peer.why_not(CACHED, timing.HOST) is None
    assert peer.bind(CACHED, CACHED.inputs())() == "out"
    assert given["k"].shape == (3, 50, 2, 16)
    assert peer.why_not(PAGED, timing.HOST) == "it takes no pages"


TORCH = "query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, "
TORCH_VARLEN = {
    "2.10": TORCH + "is_causal=False, return_aux=None",
    "2.11": TORCH + "*, return_aux=None, scale=None, window_size=(-1, -1)",
    "2.12": TORCH + "*, return_aux=None, scale=None, window_size=(-1, -1), enable_gqa=False, seqused_k=None",
}
ATEN = TORCH + "dropout_p, is_causal, return_debug_mask, *, scale=None, window_size_left=None, window_size_right=None"


@pytest.fixture
def torch_varlen(torch, monkeypatch):
    """torch's function for packed sequences, of a version or None for one that has none: what it was given."""

    def of(version: str | None) -> dict:
        given = {}

        def varlen(arguments):
            given.update(arguments)
            windows = arguments.get("window_size", (-1, 0 if arguments.get("is_causal") else -1))
            return by_sequence(torch, arguments, arguments["cu_seq_q"], causal=windows[1] == 0)

        module = version and SimpleNamespace(varlen_attn=with_signature(TORCH_VARLEN[version], varlen))
        monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", with_signature(ATEN, lambda given: (varlen(given), "lse")))
        return given

    return of


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("version", [*TORCH_VARLEN, None])
def test_torch_takes_packed_sequences(torch, of_tensors, torch_varlen, version, backward, causal):
    given = torch_varlen(version)
    case = replace(PACKED, causal=causal, backward=backward)
    (outcome,) = peers.compare(case, [peers.TorchVarlen()], of_tensors(torch), min_s=0.01).outcomes
    assert outcome.why_not is None
    assert outcome.verdict.ok, str(outcome.verdict)
    assert outcome.timing
    assert (given["max_q"], given["max_k"]) == (70, 70)
    assert given["cu_seq_k"] is given["cu_seq_q"]
    assert given.get("enable_gqa") == (True if version == "2.12" else None)
    assert given.get("dropout_p") == (0.0 if version is None else None)


def test_torch_is_given_windows_where_it_has_them(torch, torch_varlen):
    case = replace(PACKED, window_size=(7, None))
    inputs = as_tensors(torch, case.inputs())
    given = torch_varlen("2.11")
    peers.TorchVarlen().bind(case, inputs)()
    assert (given["window_size"], given["scale"]) == ((7, 0), None)
    given = torch_varlen(None)
    peers.TorchVarlen().bind(replace(case, causal=False, window_size=(None, 5), softmax_scale=0.3), inputs)()
    assert [given[name] for name in ("window_size_left", "window_size_right", "scale", "is_causal")] == [-1, 5, 0.3, False]
    torch_varlen("2.10")
    with pytest.raises(NotImplementedError, match="no window and no scale"):
        peers.TorchVarlen().bind(case, inputs)


@pytest.mark.usefixtures("torch")
def test_torch_says_which_packed_sequences_it_cannot_take():
    peer = peers.TorchVarlen()
    assert peer.missing() is None
    assert peer.why_not(PACKED, timing.HOST) is None
    assert "for packed sequences" in peer.why_not(SMALL, timing.HOST)
    assert "softcap" in peer.why_not(replace(PACKED, softcap=3.0), timing.HOST)
    assert "deterministic" in peer.why_not(replace(PACKED, backward=True, deterministic=True), timing.HOST)


def test_a_build_without_a_backward_says_so(torch, of_tensors, flash_attention):
    function = flash_attention.module.flash_attn_func
    flash_attention.module.flash_attn_func = lambda *arrays, **options: function(*arrays, **options)[0].detach()
    (outcome,) = peers.compare(BACKWARD, [flash_attention.peer], of_tensors(torch)).outcomes
    assert outcome.why_not == "this build of it has no backward"


class FakeCupy:
    """A GPU on which a call takes `gpu_ms` and its queuing `host_ms`: time is counted, nothing is computed."""

    def __init__(self, gpu_ms: float, host_ms: float) -> None:
        self.gpu_ms, self.host_ms = gpu_ms, host_ms
        self.host = self.busy_until = 0.0
        self.calls = 0
        self.capturing = False
        self.cuda = self
        self.Event = lambda: FakeEvent(self)

    def call(self) -> None:
        self.calls += 1
        self.queue(self.gpu_ms)
        self.host += self.host_ms

    def queue(self, ms: float) -> None:
        self.busy_until = max(self.busy_until, self.host) + ms

    def synchronize(self) -> None:
        self.host = max(self.host, self.busy_until)

    def get_elapsed_time(self, first, last) -> float:
        return last.at - first.at

    def spin(self, grid, block, arguments) -> None:
        self.queue(arguments[0] / 1e6)


class FakeEvent:
    def __init__(self, cupy: FakeCupy) -> None:
        self.cupy = cupy

    def record(self, stream) -> None:
        self.at = max(self.cupy.busy_until, self.cupy.host)

    @property
    def done(self) -> bool:
        return self.at <= self.cupy.host

    def synchronize(self) -> None:
        self.cupy.host = max(self.cupy.host, self.at)


@pytest.fixture
def place(monkeypatch):
    def make(gpu_ms: float, host_ms: float) -> tuple[gpu.Gpu, FakeCupy]:
        cupy = FakeCupy(gpu_ms, host_ms)
        place = object.__new__(gpu.Gpu)
        place.__dict__.update(_cupy=cupy, _stream=cupy, _spin=cupy.spin, _sensor=None, torch=None)
        monkeypatch.setattr(place, "wait", cupy.synchronize)
        return place, cupy

    return make


@pytest.mark.parametrize("library", ["torch", "cupy"])
@pytest.mark.parametrize("case", [replace(PACKED, backward=True), PACKED, SMALL])
def test_a_gpu_has_packed_inputs_as_any(place, monkeypatch, case, library):
    """Each set of buffers has its own arrays, of the library that all peers get; where the sequences begin is there once."""
    there, _ = place(1.0, 0.1)
    monkeypatch.setattr(there, "_normal", lambda shape, dtype, seed: (shape, dtype, seed))
    monkeypatch.setattr(there, "put", lambda array: ("cupy", array))
    there.cache_bytes = 3 * case.num_bytes
    if library == "torch":
        there.torch = SimpleNamespace(as_tensor=lambda array, device: ("torch", array))
    sets = there.inputs(case)
    assert len(sets) == 3
    for inputs in sets:
        shapes = [x[0] for x in (*inputs[:3], inputs.dout) if x]
        assert shapes == [*case.shapes, *([case.out_shape] if case.backward else [])]
        expected = case.packing
        if expected:
            name, offsets = inputs.options["cu_seqlens_q"]
            assert (name, offsets.tolist(), offsets.dtype) == (library, [0, 5, 6, 76, 100], np.int32)
            assert offsets is sets[0].options["cu_seqlens_q"][1]
            expected = {**expected, "cu_seqlens_q": inputs.options["cu_seqlens_q"]}
        assert inputs.options == {**case.options, **expected}
    assert len({x for inputs in sets for x in inputs[:3]}) == 9


def test_a_gpu_has_one_page_table_for_all_buffers(place, monkeypatch):
    """As the layers of a model have; and it is there as long as the calls are that read it."""
    there, _ = place(1.0, 0.1)
    monkeypatch.setattr(there, "_normal", lambda shape, dtype, seed: (shape, dtype, seed))
    monkeypatch.setattr(there, "put", lambda array: ("cupy", array))
    case = replace(PAGED, cache_dtype="int8")
    there.cache_bytes = 3 * case.num_bytes
    sets = there.inputs(case)
    assert len({x for inputs in sets for x in inputs[:3]}) == 9
    for inputs in sets:
        assert [x[:2] for x in inputs[:3]] == [*zip(case.shapes, ("float32", "int8", "int8"), strict=True)]
        assert inputs.options["page_table"] is sets[0].options["page_table"]
    name, table = sets[0].options["page_table"]
    assert (name, table.tolist()) == ("cupy", case.page_table.tolist())


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_a_quantised_cache_in_gpu_memory_is_normal(torch, place, dtype):
    there, _ = place(1.0, 0.1)
    randn = SimpleNamespace(manual_seed=lambda seed: torch.Generator().manual_seed(seed))
    there.torch = SimpleNamespace(
        Generator=lambda device: randn,
        randn=lambda shape, device, **how: torch.randn(shape, **how),
        **{name: getattr(torch, name) for name in ("float16", "int8", "float8_e4m3fn")},
    )
    x = there._normal((64, 1024), dtype, 7)
    assert x.dtype == getattr(torch, dtype)
    assert (x.double() * DESCALE).std() == pytest.approx(1, abs=0.03)  # what lies between two integers is cut off
    assert (x.double() * DESCALE).abs().max() > 3.5


@pytest.mark.parametrize("shape", [(2, 9, 3, 4), (9, 3, 4)])
def test_rows_are_kept_in_both_memories(place, shape):
    there, cupy = place(1.0, 0.1)
    cupy.ndarray = np.ndarray
    x = np.random.default_rng(0).standard_normal(shape)
    for memory in (there, timing.HOST):
        kept = memory.keep_rows(x, [slice(1, 5, 2), slice(8, 9)])
        rows = [1, 3, 8]
        assert np.array_equal(kept[..., rows, :, :], x[..., rows, :, :])
        assert not np.delete(kept, rows, axis=-3).any()


@pytest.mark.parametrize(("gpu_ms", "host_ms"), [(0.005, 0.1), (0.05, 0.001), (20.0, 0.05)])
def test_events_count_no_host_time(place, gpu_ms, host_ms):
    """Also where a call takes the GPU a twentieth of the time that queuing it takes: it waits behind a spinning kernel."""
    there, cupy = place(gpu_ms, host_ms)
    round_ = there._events([cupy.call])
    for _ in range(3):
        assert round_().ms == pytest.approx(gpu_ms)
    before = cupy.calls
    round_()
    timed = cupy.calls - before
    assert timed * gpu_ms >= gpu.ROUND_MS or timed == gpu.MAX_CALLS


def test_a_round_takes_whole_turns_through_the_buffers(place):
    there, cupy = place(0.01, 0.001)
    ran = []
    buffers = [lambda n=n: (ran.append(n), cupy.call()) for n in range(7)]
    round_ = there._events(buffers)
    round_()
    ran.clear()
    round_()
    assert ran == list(range(7)) * (gpu.MAX_CALLS // 7)


@pytest.mark.parametrize(("gpu_ms", "burst"), [(0.005, 200), (0.3, 24), (5.0, 24), (20.0, 12), (1000.0, 4)])
def test_host_time_is_that_of_calls_without_a_wait(place, monkeypatch, gpu_ms, burst):
    """The calls after a wait are slow, and are left out; no call of the rest waits for the GPU."""
    there, cupy = place(gpu_ms, 0.02)
    monkeypatch.setattr(gpu, "time", SimpleNamespace(perf_counter=lambda: cupy.host / 1e3))
    cold = [True]

    def call():
        cupy.call()
        cupy.host += 0.5 if cold else 0
        cold.clear()

    count, ms = there._count([cupy.call])
    before = cupy.calls
    assert there._host_us([call], count, ms) == pytest.approx(20)
    assert cupy.calls - before == burst


def test_host_time_is_taken_once_a_peer(place, monkeypatch):
    there, cupy = place(1.0, 0.02)
    taken = iter([12.5])
    monkeypatch.setattr(there, "_host_us", lambda calls, count, ms: next(taken))
    round_ = there._events([cupy.call])
    assert [round_().host_us for _ in range(3)] == [12.5] * 3


def test_work_that_waits_for_the_gpu_is_timed_as_it_comes(place):
    there, cupy = place(0.1, 0.01)

    def waits():
        cupy.call()
        cupy.host = max(cupy.host, cupy.busy_until)

    assert there._events([waits])().ms > 0  # and the spin does not grow for ever


def test_a_call_that_cannot_be_captured_says_why(place, monkeypatch):
    there, cupy = place(1.0, 0.01)

    def capture(work):
        raise RuntimeError("cudaErrorStreamCaptureUnsupported:\noperation not permitted")

    monkeypatch.setattr(there, "_capture", capture)
    with pytest.raises(timing.CaptureError, match="RuntimeError: cudaErrorStreamCaptureUnsupported: operation not permitted"):
        there._graph([cupy.call])


@pytest.mark.parametrize("dtype", available_dtypes())
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "seqlen", "dim"), [((4, 4), (20, 20), (16, 16)), ((6, 2), (5, 30), (8, 12)), ((2, 1), (30, 5), (7, 7))])
def test_the_formula_is_attention(heads, seqlen, dim, causal, dtype):
    case = Case(2, *seqlen, *heads, *dim, dtype, causal)
    inputs = case.inputs()
    verdict = check.judge(case, inputs, peers.Standard().bind(case, inputs)())
    assert verdict.ok, verdict


@pytest.mark.parametrize("dtype", available_dtypes())
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "seqlen", "dim"), [((4, 4), (20, 20), (16, 16)), ((6, 2), (5, 30), (8, 12)), ((2, 1), (30, 5), (7, 7))])
@pytest.mark.parametrize("peer", [peers.Standard(), peers.StandardOnGpu()])
def test_the_formula_of_the_gradients_is_their_definition(peer, numpy_as_cupy, heads, seqlen, dim, causal, dtype):
    """All of them, next to those of the library's reference."""
    case = Case(2, *seqlen, *heads, *dim, dtype, causal, backward=True)
    inputs = case.inputs()
    expected = cupyflash.reference.attention_backward(*(x.astype(np.float64) for x in (inputs.dout, *inputs[:3])), causal=causal)
    for actual, gradient, x in zip(peer.bind(case, inputs)(), expected, inputs[:3], strict=False):
        assert actual.dtype == x.dtype
        assert check._worst(actual, np.asarray(gradient), 1 + np.abs(gradient)) < 2 * check.LIMITS[dtype]


@pytest.fixture
def numpy_as_cupy(monkeypatch):
    """NumPy in CuPy's place, and what the small kernels of the formula are to do."""

    def multiply(a, b, out) -> None:
        out[:] = np.matmul(a.astype(np.float64), b.astype(np.float64))

    def reduce(function):
        return lambda *arrays, axis, keepdims: function(*(x.astype(np.float64) for x in arrays)).sum(axis=axis, keepdims=keepdims)

    def hide(Sq, Sk, offset, s) -> None:
        i = np.arange(s.size).reshape(s.shape)
        s[i % Sk > i // Sk % Sq + offset] = -np.inf

    def weigh(m, scale, s) -> None:
        s[:] = np.where(np.isinf(m), 0, np.exp(scale * (s.astype(np.float64) - np.where(np.isinf(m), 0, m))))

    def divide(l, o) -> None:  # noqa: E741
        o[:] = np.where(l == 0, 0, o / np.where(l == 0, 1, l))

    def differ(p, delta, scale, s) -> None:
        s[:] = p.astype(np.float64) * (s - delta) * scale

    def row_max(x, axis, keepdims):
        return x.astype(np.float64).max(axis=axis, keepdims=keepdims)

    passes = hide, row_max, reduce(lambda x: x), weigh, divide, reduce(lambda x, y: x * y), differ

    def log(x):
        with np.errstate(divide="ignore"):
            return np.log(x)

    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=np.ndarray, empty=np.empty, log=log))
    monkeypatch.setattr(cublas, "multiply", multiply)
    monkeypatch.setattr(peers, "_passes", lambda wide: passes)


@pytest.mark.parametrize("case", [SMALL, replace(SMALL, num_heads_kv=1, seqlen_k=20), DECODE])
def test_the_formula_on_a_gpu_is_attention(numpy_as_cupy, case):
    inputs = case.inputs()
    assert check.judge(case, inputs, peers.StandardOnGpu().bind(case, inputs)()).ok


class FakeCublas:
    """BLAS as its manual has it, on NumPy arrays: a matrix is a pointer, column-major, with a leading dimension and a step to the next."""

    def __init__(self, *arrays) -> None:
        self.buffers = [array if array.base is None else array.base for array in arrays]
        self.calls = 0

    def cublasSetStream_v2(self, handle, stream) -> int:  # noqa: N802
        return 0

    def cublasSetWorkspace_v2(self, handle, workspace, num_bytes) -> int:  # noqa: N802
        return 0

    def matrix(self, pointer, rows: int, columns: int, leading: int):
        """The flat memory, and where in it the matrix is."""
        for buffer in self.buffers:
            start, odd = divmod(pointer - buffer.ctypes.data, buffer.itemsize)
            if 0 <= start < buffer.size:
                assert odd == 0
                assert leading >= max(1, rows)
                return buffer.reshape(-1), start + np.arange(rows)[:, None] + leading * np.arange(columns)
        raise AssertionError("no such address")

    def cublasGemmStridedBatchedEx(  # noqa: N802
        self,
        handle,
        op_a,
        op_b,
        m,
        n,
        k,
        alpha,
        a,
        a_type,
        lda,
        a_step,
        b,
        b_type,
        ldb,
        b_step,
        beta,
        c,
        c_type,
        ldc,
        c_step,
        count,
        compute,
        algo,
    ) -> int:
        assert (alpha._obj.value, beta._obj.value) == (1, 0)
        assert (a_type, b_type, c_type, compute) == (0, 0, 0, 68)
        self.calls += 1
        for i in range(count):
            a_at, b_at, c_at = (x.value + i * step.value * 4 for x, step in ((a, a_step), (b, b_step), (c, c_step)))
            flat_a, in_a = self.matrix(a_at, *((k, m) if op_a else (m, k)), lda)
            flat_b, in_b = self.matrix(b_at, *((n, k) if op_b else (k, n)), ldb)
            flat_c, in_c = self.matrix(c_at, m, n, ldc)
            flat_c[in_c] = (flat_a[in_a].T if op_a else flat_a[in_a]) @ (flat_b[in_b].T if op_b else flat_b[in_b])
        return 0


@pytest.fixture
def fake_cublas(monkeypatch):
    """`cublas.multiply` on NumPy arrays; returns how many calls of BLAS it made."""

    def multiply(*arrays) -> int:
        library = FakeCublas(*arrays)
        cuda = SimpleNamespace(Device=lambda: SimpleNamespace(id=0), get_current_stream=lambda: SimpleNamespace(ptr=7))
        monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
        monkeypatch.setattr(cublas, "_library", lambda device: (library, None, SimpleNamespace(ptr=0)))
        names = ("shape", "strides", "itemsize", "dtype")
        cublas.multiply(
            *(SimpleNamespace(data=SimpleNamespace(ptr=x.ctypes.data), **{name: getattr(x, name) for name in names}) for x in arrays)
        )
        return library.calls

    return multiply


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize(
    ("seqlen", "dim"), [((7, 7), (8, 8)), ((5, 12), (8, 3)), ((1, 9), (4, 6)), ((9, 1), (4, 6)), ((1, 1), (1, 1)), ((6, 5), (1, 1))]
)
def test_blas_is_given_the_products_of_the_formula(fake_cublas, batch, heads, seqlen, dim):
    """No copy of k and v: as (B, S, H, D) they lie, and k is transposed."""
    (Sq, Sk), (Hq, Hkv), (D, Dv) = seqlen, heads, dim
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape, dtype=np.float32) for shape in Case(batch, *seqlen, *heads, *dim, "float32").shapes)
    rows = np.ascontiguousarray(q.transpose(0, 2, 1, 3).reshape(batch, Hkv, -1, D))
    scores, out = (np.full((batch, Hkv, Hq // Hkv * Sq, columns), np.nan, np.float32) for columns in (Sk, Dv))
    keys, values = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
    assert fake_cublas(rows, keys, scores) == fake_cublas(scores, values, out) == min(batch, Hkv)
    np.testing.assert_allclose(scores, rows @ keys, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out, scores @ values, rtol=1e-5, atol=1e-5)
    dk = np.full((batch, Hkv, Sk, D), np.nan, np.float32)
    assert fake_cublas(scores.swapaxes(2, 3), rows, dk) == min(batch, Hkv)
    np.testing.assert_allclose(dk, scores.swapaxes(2, 3) @ rows, rtol=1e-5, atol=1e-5)


def test_what_blas_cannot_read_is_an_error(fake_cublas):
    a, b, out = (np.zeros((1, 1, 4, 4), np.float32) for _ in range(3))
    with pytest.raises(ValueError, match="no dense axis"):
        fake_cublas(np.zeros((1, 1, 4, 8), np.float32)[..., ::2], b, out)
    with pytest.raises(ValueError, match="rows of the result"):
        fake_cublas(a, b, out.swapaxes(2, 3))


class FakeGpu(timing.Place):
    """Host memory that is a GPU in what the commands see of it."""

    name, arch, cache_bytes = "gpu", "sm_90a", 1 << 20

    def __init__(self) -> None:
        ticks = iter(range(1, 10**6))
        self.timers = {name: lambda calls: lambda: timing.Tick(1.0, 12.5, 1500.0 + next(ticks) % 2) for name in ("graph", "events", "wall")}

    def inputs(self, case, *, cold=True):
        return [case.inputs(seed) for seed in range(8 if cold else 1)]


@pytest.fixture
def gpu_machine(monkeypatch):
    monkeypatch.setattr(gpu, "why_not", lambda: None)
    monkeypatch.setattr(gpu, "open_place", FakeGpu)
    monkeypatch.setattr(gpu, "why_no_cublas", lambda: "CuPy finds no cuBLAS (libcublas.so.13)")
    monkeypatch.setattr(cli, "gpu_tour_suite", lambda: (SMALL, DECODE))
    monkeypatch.setattr(cupyflash, "warmup", lambda problems: [])


LISTED = machine.Driver("12.4", [machine.Gpu("NVIDIA A100", "sm_80", 40 << 30)])


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("command", [("tour",), ("fwd", "--seqlen", "32"), ("check",)])
def test_a_gpu_that_cannot_be_used_is_not_passed_over_in_silence(monkeypatch, command):
    monkeypatch.setattr(cli, "nvidia_driver", lambda: LISTED)
    monkeypatch.setattr(gpu, "why_not", lambda: "CuPy is not installed: pip install [cuda12]")
    said = "There is a GPU, and arrays are in host memory all the same: CuPy is not installed: pip install [cuda12]"
    assert said in run(*command, COLUMNS="200").stderr
    assert said not in run(*command, "--device", "host", COLUMNS="200").stderr


def test_why_a_gpu_cannot_be_used_is_the_librarys_own_answer(monkeypatch):
    monkeypatch.setattr(gpu, "nvidia_driver", lambda: LISTED)
    for answer, expected in (
        (cupyflash.Support(False, "the driver is too old"), "the driver is too old"),
        (cupyflash.Support(True, "x"), None),
    ):
        monkeypatch.setattr(cupyflash, "supports", lambda answer=answer, **call: answer if call["device"] == "cuda" else None)
        assert WHY_NOT() == expected


@pytest.mark.usefixtures("small", "gpu_machine")
def test_compare_on_a_gpu_says_how_it_timed():
    result = run("compare", "--seqlen", "32", "--dtype", "fp32", "--peers", "cupyflash,standard,fa4", "--json", "-", "--timer", "events")
    assert result.exit_code == 0, result.stderr
    header, ceilings, ours, *rest = lines(result.stdout)
    assert header["peers"]["standard"] == "not found: CuPy finds no cuBLAS (libcublas.so.13)"
    assert ceilings["place"] == "gpu"
    assert (ours["timer"], ours["cold"], ours["host_us"], ours["clock_mhz"]) == ("events", True, 12.5, 1500.5)
    assert [record["peer"] for record in rest if record["not_timed"]] == ["standard", "fa4"]
    for text in ("host us", "12.5", "events, cold, 15", " MHz", "not timed: CuPy finds no cuBLAS"):
        assert text in result.stderr
    assert json.loads(run("fwd", "--seqlen", "32", "--dtype", "fp32", "--warm", "--json", "-").stdout.splitlines()[2])["cold"] is False


BOTH_WIDTHS = ("--seqlen", "32", "--dim", "128,256", "--heads", "2")


@pytest.mark.usefixtures("small", "gpu_machine")
@pytest.mark.parametrize(
    ("how", "names"),
    [
        ((), (["bwd_sm90__bf16_d128__m64n128s2__causal"], ["bwd_sm90_wide__bf16_d256__m64n64s2__causal"])),
        (
            ("--deterministic",),
            tuple([f"{family}__bf16_d{dim}__{{}}__causal" for family in ("bwd_sm80", "bwd_sm80_dq")] for dim in (128, 256)),
        ),
    ],
)
@pytest.mark.parametrize("command", [("bwd",), ("compare", "--mode", "bwd")])
def test_gradients_on_a_gpu_by_the_kernels_that_compute_them(monkeypatch, command, how, names):
    """bwd and compare --mode bwd from the options to the records; computed on the host, planned as for an H200."""
    pytest.importorskip("ml_dtypes", reason="bfloat16 in NumPy needs ml_dtypes; pip install ml_dtypes")
    monkeypatch.setattr(kernels.device, "current", lambda: 0)
    monkeypatch.setattr(kernels.device, "query", lambda device_id: kernels.device.KNOWN["90a"])
    peer_names = ("--peers", "cupyflash,standard,sdpa-flash,fa4", "--causal", "--json", "-")
    result = run(*command, *BOTH_WIDTHS, *how, *peer_names, COLUMNS="140")
    assert result.exit_code == 0, result.output
    header, _, *records = lines(result.stdout)
    assert header["peers"]["fa4"].startswith("not found: ")
    timed = [record for record in records if "record" not in record]
    assert [(record["mode"], record["peer"], record["head_dim"]) for record in timed] == [("bwd", "cupyflash", d) for d in (128, 256)]
    for record, chosen in zip(timed, names, strict=True):
        assert set(record) == RESULT_FIELDS | {"tflops"} | ({"deterministic"} if how else set())
        found = record["kernel"].split(", ")
        assert [name.split("__")[:2] for name in found] == [name.split("__")[:2] for name in chosen]
        assert all(name in chosen or "{}" in expected for name, expected in zip(found, chosen, strict=True))
        case = Case(1, 32, 32, 2, 2, record["head_dim"], record["head_dim_v"], "bfloat16", True, backward=True)
        assert record["tflops"] == pytest.approx(case.flops / record["ms"] / 1e9)
        assert (record["timer"], record["cold"], record["host_us"]) == ("graph", True, 12.5)
        assert 0 < record["error"] < 3.2e-2
    not_timed = [record for record in records if record.get("record") == "run" and record["not_timed"]]
    assert [record["peer"] for record in not_timed] == ["standard", "sdpa-flash", "fa4"] * 2
    exact = " deterministic" if how else ""
    for text in (f"  bwd bf16 B 1 S 32 H 2 D 128 causal{exact}\n", "bwd     2 (3 D + 2 Dv) FLOPs", timed[0]["kernel"]):
        assert text in result.stderr
    assert "fwd     2 (D" not in result.stderr


@pytest.mark.usefixtures("small", "gpu_machine")
def test_packed_sequences_on_a_gpu(monkeypatch):
    """Equal ones beside the dense call, then a mix; computed on the host, planned as for an H200."""
    monkeypatch.setattr(kernels.device, "current", lambda: 0)
    monkeypatch.setattr(kernels.device, "query", lambda device_id: kernels.device.KNOWN["90a"])
    shapes = ("--varlen", "--tokens", "96", "--heads", "2", "--dim", "128", "--dtype", "fp16", "--json", "-")
    for mode, kernel in (("fwd", "fwd_sm90__f16_d128__"), ("bwd", "bwd_")):
        result = run("compare", "--mode", mode, *shapes, "--seqlen", "32", COLUMNS="140")
        assert result.exit_code == 0, result.output
        header, _, *records = lines(result.stdout)
        assert {"cupyflash-dense", "torch-varlen", "fa3", "fa4"} < set(header["peers"])
        ours, dense = (record for record in records if "record" not in record)
        assert (ours["peer"], dense["peer"]) == ("cupyflash", "cupyflash-dense")
        assert ours["kernel"].startswith(kernel)
        assert "packed" in ours["kernel"]
        assert "packed_tiles" not in ours["kernel"]
        assert dense["kernel"] is None
        assert {record["not_timed"] for record in records if record.get("peer") == "sdpa-flash"} == {"torch with CUDA is not installed"}
        assert "  cupyflash-dense " in result.stderr
        mixed = json.loads(run(mode, *shapes, "--longest", "40").stdout.splitlines()[2])
        assert mixed["kernel"].startswith(kernel)


def test_the_kernels_of_a_mix_are_those_that_the_library_chooses(monkeypatch):
    """Tiles by the longest sequence; what adds up dq by how many tokens a sequence has in the mean."""
    monkeypatch.setattr(kernels.device, "current", lambda: 0)
    monkeypatch.setattr(kernels.device, "query", lambda device_id: kernels.device.KNOWN["90a"])
    case = Case(1, 1, 1, 8, 8, 64, 64, "float16", backward=True)
    for lengths in ((8192, *(1000,) * 30), (4000, *(20,) * 80), (100, *(20,) * 80), (4096,) * 4, (1024,) * 4):
        mix = replace(case, **packed(lengths))
        sizes = (len(lengths), *mix.tokens, 8, 8, 64, 64)
        hints = {"packed": True, "longest_q": max(lengths), "longest_k": max(lengths)}
        forward = kernels.plan.AttentionProblem("float16", "float16", *sizes, softmax_scale=1.0, **hints)
        steps = kernels.plan.backward(kernels.plan.BackwardProblem(forward, ("q", "k", "v")), kernels.device.KNOWN["90a"]).steps
        expected = [step.variant.name for step in steps if step.variant.family not in peers._AROUND]
        assert peers._kernels(mix) == expected, lengths


@pytest.mark.usefixtures("small", "gpu_machine")
def test_decode_on_a_gpu(monkeypatch):
    """Computed on the host, planned as for an H200."""
    monkeypatch.setattr(kernels.device, "current", lambda: 0)
    monkeypatch.setattr(kernels.device, "query", lambda device_id: kernels.device.KNOWN["90a"])
    shapes = ("--cells", "2:96", "--heads", "4/2", "--dtype", "fp16", "--page-size", "0,16", "--rows", "1,5")
    result = run("decode", *shapes, "--json", "-", COLUMNS="140")
    assert result.exit_code == 0, result.output
    header, _, *records = lines(result.stdout)
    assert {peer.name for peer in peers.PEERS if peer.place != "host" and peer.only_for != "packed"} == set(header["peers"])
    timed = [record for record in records if "record" not in record]
    ours = [record for record in timed if record["peer"] == "cupyflash"]
    assert [record["kernel"].split("__")[0] for record in ours] == ["decode"] * 4
    assert ["paged" in record["kernel"] for record in ours] == [False, True] * 2
    assert all((record["timer"], record["cold"], record["host_us"]) == ("graph", True, 12.5) for record in timed)
    for text in ("FLOP/s", "host us", "decode  bytes of q, k, v and out", "FLOP/s  2 (D + Dv) FLOPs", "of peak"):
        assert text in result.stderr
    assert "'--cache': fp8 needs torch with CUDA, which is not installed" in run("decode", *shapes, "--cache", "fp8").stderr


@pytest.mark.parametrize("cache_dtype", ["", "int8"])
@pytest.mark.parametrize("case", [CACHED, PAGED, CHUNK])
def test_the_kernels_over_a_cache_are_those_of_the_call(monkeypatch, case, cache_dtype):
    planned, case = [], replace(case, cache_dtype=cache_dtype)
    monkeypatch.setattr(cupyflash.api, "named", lambda name: name)
    monkeypatch.setattr(kernels.plan, "cached", lambda *problem_and_device: planned.append(problem_and_device) or kernels.plan.Plan(()))
    cupyflash.cache._prepare.cache_clear()
    peers.CupyFlash().bind(case, case.inputs())()
    assert peers._kernels(case) == []
    (called, on_host), (asked, on_gpu) = planned
    assert (on_host, on_gpu) == (kernels.device.HOST_SPEC, "cuda")
    assert asked == called._replace(k_descale=1.0, v_descale=1.0)


@pytest.mark.usefixtures("small", "gpu_machine")
def test_a_family_of_the_backward_on_a_gpu(monkeypatch):
    monkeypatch.setattr(kernels.device, "current", lambda: 0)
    monkeypatch.setattr(kernels.device, "query", lambda device_id: kernels.device.KNOWN["90a"])
    shapes = ("--seqlen", "32", "--heads", "2", "--dtype", "fp16", "--peers", "cupyflash", "--json", "-")
    result = run("bwd", *shapes, "--family", "bwd_sm80")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[2])["kernel"].startswith("bwd_sm80__f16_d64__")
    assert "'fwd_sm80' is no family of GPU kernels here: bwd_sm90, " in run("bwd", *shapes, "--family", "fwd_sm80").stderr
    assert "'bwd_sm80' is no family of GPU kernels here: fwd_sm90, " in run("compare", *shapes, "--family", "bwd_sm80").stderr


@pytest.mark.usefixtures("small", "gpu_machine")
@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_tour_of_a_gpu_fits_the_terminal(width):
    result = run("tour", COLUMNS=str(width))
    assert result.exit_code == 0, result.output
    assert "compare --tokens 16k" in result.stdout
    assert ("host us" in result.stdout.split("decode  bytes")[0]) == (width >= 80)
    for line in result.stdout.splitlines():
        assert len(line) <= width
        assert "…" not in line


@pytest.mark.usefixtures("small", "gpu_machine")
def test_check_takes_the_arrays_to_the_gpu_and_back(monkeypatch):
    """The GPU path is checked by what comes back from there, and by many threads at once."""
    monkeypatch.setattr(FakeGpu, "put", lambda self, array: ("there", array))
    attention = cupyflash.attention

    def on_gpu(*arrays, **options):
        (_, q), (_, k), (_, v) = arrays
        return attention(q, k, v, **{name: x[1] if isinstance(x, tuple) else x for name, x in options.items()})

    monkeypatch.setattr(cupyflash, "attention", on_gpu)
    result = run("check")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("GPU arrays:")
    monkeypatch.setattr(FakeGpu, "fetch", lambda self, array: np.zeros_like(array))
    assert run("check").exit_code == 1


# --- right or wrong -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, (20, 3)), (True, (5, None)), (False, (None, 0))])
@pytest.mark.parametrize("row", [0, 149, 299])
def test_spot_check_sees_first_middle_and_last_rows(row, causal, window):
    case = Case(1, 300, 310, 4, 2, 16, 16, "float32", causal, window)
    inputs = case.inputs()
    out = cupyflash.attention(*inputs[:3], **inputs.options)
    spots = check.spots(case, inputs)
    assert check.spot_check(case, spots, (out,)).ok
    out[0, row, 2, 3] += 1e-3
    assert not check.spot_check(case, spots, (out,)).ok
    assert not check.spot_check(case, spots, (out[:, :-1],)).ok


def test_spot_check_measures_rows_by_their_size():
    """A mean of 16k values is smaller than the limit of bfloat16: zeros would pass if 1 were the measure."""
    case = Case(1, 8, 16384, 1, 1, 16, 16, "float32")
    inputs, coarse = case.inputs(), replace(case, dtype="bfloat16")
    out, spots = cupyflash.attention(*inputs[:3]), check.spots(coarse, inputs)
    assert np.abs(out).max() < check.LIMITS["bfloat16"] * 4
    assert check.spot_check(coarse, spots, (out,)).ok
    assert not check.spot_check(coarse, spots, (np.zeros_like(out),)).ok
    part = cupyflash.attention(inputs.q, inputs.k[:, 512:], inputs.v[:, 512:])  # one tile of 32 forgotten
    assert not check.spot_check(coarse, spots, (part,)).ok


def test_spot_check_of_rows_without_keys():
    case = replace(SMALL, seqlen_k=20)  # 28 rows see none
    inputs = case.inputs()
    out = cupyflash.attention(*inputs[:3], causal=True)
    assert check.spot_check(case, check.spots(case, inputs), (out,)).ok
    out[0, 3] = 1e-6  # they are zeros, not nearly so
    assert not check.spot_check(case, check.spots(case, inputs), (out,)).ok


GRADIENTS = replace(BACKWARD, batch=2, seqlen_q=300, seqlen_k=310, num_heads_q=4)


def gradients_of(case: Case, spots: check.Spots) -> list[np.ndarray]:
    """(dq, dk, dv) of what is checked, by the library on the host."""
    q, k, v, options, dout = spots.inputs
    out, lse, _ = cupyflash.attention(q, k, v, return_lse=True, **options)
    return list(cupyflash.attention_backward(dout, q, k, v, out, lse, **options)[:3])


@pytest.mark.parametrize("dtype", available_dtypes())
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": False, "head_dim_v": 40},
        {"window_size": (20, 3), "causal": False},
        {"softcap": 2.0, "softmax_scale": 0.7},
        {"seqlen_k": 100},  # rows without keys
        {"seqlen_q": 1},
        {"seqlen_k": 1, "causal": False},
        {"num_heads_q": 2},
    ],
)
def test_gradients_of_a_few_queries_are_checked_against_float64(changes, dtype):
    case = replace(GRADIENTS, dtype=dtype, **changes)
    spots = check.spots(case, case.inputs())
    verdict = check.spot_check(case, spots, gradients_of(case, spots))
    assert verdict.ok, str(verdict)
    assert verdict.limit == 2 * check.LIMITS[dtype]


def test_the_check_of_gradients_sees_what_is_wrong():
    """Few queries have a dout, all of these and all keys of a few heads are looked at; errors are measured by the row's terms."""
    spots = check.spots(GRADIENTS, GRADIENTS.inputs())
    given = np.abs(spots.inputs.dout).sum(axis=(0, 2, 3)) > 0
    assert given[-1]
    assert 30 < given.sum() < 200
    assert (np.diff(np.flatnonzero(given)) % 2 == 1).all()  # of tiles of even size not always the same row
    good = gradients_of(GRADIENTS, spots)
    assert {part.result for part in spots.parts} == {0, 1, 2}

    def ok(*results) -> bool:
        return check.spot_check(GRADIENTS, spots, results).ok

    assert ok(*good)
    assert ok(*good, None, None, None)  # other gradients, that were not asked for
    for which, index in ((0, (0, 299, 0)), (0, (1, np.flatnonzero(given)[0], 3)), (1, (0, 0, 0)), (1, (1, 309, 1)), (2, (0, 155, 1))):
        bad = [x.copy() for x in good]
        bad[which][index] *= 1.01
        assert not ok(*bad)
        assert not ok(*(np.where(x == bad[which][index][0], np.nan, x) for x in bad))
    assert not ok(good[0], good[2], good[1])
    assert not ok(*(x[:, :-1] for x in good))
    part = spots._replace(inputs=spots.inputs._replace(dout=spots.inputs.dout.copy()))
    part.inputs.dout[:, 128:192] = 0  # a tile of queries forgotten by dk and dv
    _, dk, dv = gradients_of(GRADIENTS, part)
    coarse = replace(GRADIENTS, dtype="bfloat16")
    in_bf16 = check.spots(coarse, GRADIENTS.inputs())
    assert check.spot_check(coarse, in_bf16, good).ok
    assert not check.spot_check(coarse, in_bf16, (good[0], dk, good[2])).ok
    assert not check.spot_check(coarse, in_bf16, (good[0], good[1], dv)).ok


def test_gradients_of_rows_without_keys_are_zeros():
    case = replace(BACKWARD, seqlen_k=20)  # 28 rows see none
    spots = check.spots(case, case.inputs())
    good = gradients_of(case, spots)
    assert check.spot_check(case, spots, good).ok
    good[0][0, 3] = 1e-6
    assert not check.spot_check(case, spots, good).ok


def test_the_check_of_gradients_is_bounded():
    """A few queries of each head, however many heads share a key head and however long the keys are."""
    for case, most in ((replace(GRADIENTS, seqlen_q=16384, seqlen_k=16384, num_heads_q=1, num_heads_kv=1), 128), (GRADIENTS, 64)):
        (dq, *_) = check.spots(case, case.inputs()).parts
        assert most / 2 <= len(dq.expected) <= most


def packed_results(case: Case, inputs) -> list[np.ndarray]:
    q, k, v, options, dout = inputs
    out, lse, _ = cupyflash.attention_varlen(q, k, v, return_lse=True, **options)
    return list(cupyflash.attention_backward(dout, q, k, v, out, lse, **options)[:3]) if case.backward else [out]


@pytest.mark.parametrize("lengths", [(5, 1, 70, 24), (300, 33), (1, 31, 32, 130), (64,), (2, 2)])
@pytest.mark.parametrize("changes", [{}, {"causal": False, "head_dim_v": 40}, {"window_size": (20, 3), "causal": False, "softcap": 2.0}])
@pytest.mark.parametrize("backward", [False, True])
def test_packed_sequences_are_checked_each_alone(lengths, changes, backward):
    """Every row of short ones; of long ones the first, middle and last, or a few queries and all keys."""
    case = replace(PACKED, backward=backward, **packed(lengths), **changes)
    spots = check.spots(case, case.inputs())
    good = packed_results(case, spots.inputs)
    verdict = check.spot_check(case, spots, good)
    assert verdict.ok, str(verdict)
    assert not check.spot_check(case, spots, [x[None] for x in good]).ok
    for part in spots.parts:
        bad = [x.copy() for x in good]
        bad[part.result][part.where] += part.scale * 2 * spots.limit
        assert not check.spot_check(case, spots, bad).ok
    ends = case.cu_seqlens
    for b in {0, len(lengths) - 1, int(np.argmax(lengths))}:
        mine = [part.where[0] for part in spots.parts if ends[b] <= part.where[0].start < part.where[0].stop <= ends[b + 1]]
        assert {ends[b + 1] - 1} <= {range(where.start, where.stop)[:: where.step or 1][-1] for where in mine}
    assert all(any(ends[b] <= part.where[0].start < part.where[0].stop <= ends[b + 1] for b in range(len(lengths))) for part in spots.parts)


@pytest.mark.parametrize("backward", [False, True])
def test_what_leaks_from_a_packed_sequence_to_the_next_is_wrong(backward):
    """Also gradients, of which a neighbour that is not checked itself could have none to give."""
    case = replace(PACKED, causal=False, backward=backward, **packed((64, 40, 60, 1)))
    spots = check.spots(case, case.inputs())
    assert check.spot_check(case, spots, packed_results(case, spots.inputs)).ok
    for wrong in ([0, 65, 104, 164, 165], [0, 64, 104, 163, 165]):
        offsets = {**spots.inputs.options, "cu_seqlens_q": np.array(wrong, np.int32)}
        results = packed_results(case, spots.inputs._replace(options=offsets))
        assert not check.spot_check(case, spots, results).ok
    if backward:
        given = np.abs(spots.inputs.dout).sum(axis=(1, 2)) > 0
        assert given[64:164].all()
        assert np.array_equal(spots.inputs.dout[64:104], case.inputs().dout[64:104])


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
        (["fwd", "--peers", "cupyflash,fa9"], "there is no 'fa9' here, only cupyflash, cupyflash-dense, standard"),
        (["compare", "--peers", "fa4"], "none of fa4 computes on the host"),
        (["fwd", "--min-time", "0"], "not in the range"),
        (["fwd", "--rounds", "0"], "not in the range"),
        (["fwd", "--timer", "graph"], "'graph' needs a GPU"),
        (["fwd", "--timer", "sundial"], "is not one of 'graph', 'events', 'wall'"),
        (["fwd", "--family", "fwd_sm80"], "'fwd_sm80' is no family of GPU kernels here"),
        (["bwd", "--family", "bwd_sm80"], "'bwd_sm80' is no family of GPU kernels here: bwd_sm90, "),
        (["bwd", "--heads", "6/4"], "6 query heads are no multiple of 4 key heads"),
        (["bwd", "--timer", "graph"], "'graph' needs a GPU"),
        (["bwd", "--mode", "bwd"], "No such option"),
        (["fwd", "--deterministic"], "No such option"),
        (["compare", "--mode", "decode"], "'decode' is not one of 'fwd', 'bwd'"),
        (["compare", "--deterministic"], "'--deterministic': it is for --mode bwd"),
        (["fwd", "--window", "4096"], "'4096' is no window: write 4096,0"),
        (["fwd", "--window", "-3,0"], "'-3,0' is no window"),
        (["fwd", "--softcap", "0"], "not in the range"),
        (["fwd", "--tokens", "512"], "fewer tokens than one sequence has"),
        (["fwd", "--varlen", "--batch", "2"], "'--batch': with --varlen there are as many sequences as make --tokens"),
        (["bwd", "--varlen", "--seqlen-k", "2k"], "'--seqlen-k': with --varlen the keys of a sequence are as many as its queries"),
        (["compare", "--varlen", "--seqlen", "1k", "--longest", "2k"], "'--longest': with --seqlen all sequences have that length"),
        (["fwd", "--longest", "2k"], "'--longest': it is for --varlen"),
        (["fwd", "--varlen", "--longest", "2k,4k"], "'--longest': '2k,4k' is not one size: write 512 or 4k"),
        (["fwd", "--varlen", "--longest", "-1"], "'-1' is no size"),
        (["fwd", "--varlen", "--tokens", "16k,4k"], "'--tokens': fewer tokens than the longest sequence has, 8k"),
        (["fwd", "--varlen", "--tokens", "1k", "--seqlen", "512,2k"], "'--tokens': fewer tokens than the longest sequence has, 2k"),
        (["decode", "--cells", "8"], "'8' has something else than sequences:keys: write 1:64k,32:8k"),
        (["decode", "--cells", "1:4q"], "'1,4q' is no size"),
        (["decode", "--cells", "1:1k", "--batch", "2"], "'--cells': its pairs say what --batch and --seqlen-k would"),
        (["decode", "--rows", "1,512", "--seqlen-k", "256"], "'--rows': more new tokens than the cache has keys of a sequence"),
        (["decode", "--heads", "32/8,6/4"], "6 query heads are no multiple of 4 key heads"),
        (["decode", "--page-size", "16,-1"], "'16,-1' is no size"),
        (["decode", "--cache", "int4"], "'int4' is not one of 'fp8', 'int8'"),
        (["decode", "--peers", "fa3"], "none of fa3 computes on the host"),
        (["decode", "--causal"], "No such option"),
        (["tour", "--varlen"], "No such option"),
        (["variants", "--tune", "--varlen"], "No such option"),
        (["variants", "--arch", "sm_70"], "'sm_70' is none of sm_80"),
        (["variants", "--dtype", "fp8"], "'fp8' is not one of"),
        (["variants", "--dim", "300"], "no row serves 300"),
        (["variants", "--seqlen-k", "4k"], "--seqlen-k is for --tune"),
        (["variants", "--tune", "--arch", "sm_80"], "--arch is not for --tune, which runs on this GPU"),
        (["variants", "--tune", "--tiles", "128xa"], "'128/a' is neither a number nor a pair such as 128x80"),
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


@pytest.mark.parametrize("command", [["tour"], ["fwd"], ["bwd"], ["decode"], ["compare"], ["check"]])
def test_without_a_gpu_the_gpu_is_a_setup_problem(command):
    result = run(*command, "--device", "gpu")
    assert result.exit_code == 3
    assert result.stderr == "cupyflash-bench: no GPU to use (no NVIDIA driver, so no GPU); --device host computes in host memory\n"


@pytest.fixture
def cases(monkeypatch):
    """The cases that a command would time."""

    def of(*arguments: str) -> list[Case]:
        asked = []
        monkeypatch.setattr(cli, "run_timings", lambda report, cases, *_, **__: asked.extend(cases) or [])
        result = run("fwd", *arguments)
        assert result.exit_code == 0, result.output
        return asked

    return of


def test_tokens_heads_and_both_make_the_grid(cases):
    grid = cases("--tokens", "16k", "--seqlen", "4k:16k:x4", "--dim", "64,192-128", "--heads", "auto", "--both")
    found = [(case.head_dim, case.head_dim_v, case.causal, case.batch, case.seqlen_q, case.num_heads_q, case.num_heads_kv) for case in grid]
    assert found == [
        *((64, 64, causal, batch, 16384 // batch, 32, 32) for causal in (False, True) for batch in (4, 1)),
        *((192, 128, causal, batch, 16384 // batch, 10, 10) for causal in (False, True) for batch in (4, 1)),
    ]


def test_the_backward_of_the_same_grid(cases, monkeypatch):
    asked = []
    monkeypatch.setattr(cli, "run_timings", lambda report, cases, *_, **__: asked.append(cases) or [])
    shapes = ("--tokens", "4k", "--seqlen", "1k,4k", "--dim", "64,128", "--heads", "auto", "--both", "--window", "256,0")
    for command in (["bwd"], ["compare", "--mode", "bwd"], ["bwd", "--deterministic"], ["compare", "--mode", "bwd", "--deterministic"]):
        assert run(*command, *shapes).exit_code == 0
    forward = cases(*shapes)
    backward, exact = ([replace(case, backward=True, deterministic=way) for case in forward] for way in (False, True))
    assert asked[:4] == [backward, backward, exact, exact]


def test_options_of_a_case(cases):
    (case,) = cases("--window", "4096,-", "--softcap", "30", "--causal", "--seqlen", "1", "--seqlen-k", "8k", "--heads", "32/8")
    assert (case.window_size, case.softcap, case.causal, case.mode) == ((4096, None), 30.0, True, "decode")
    assert case.label == "fp32 B 1 S 1x8k H 32/8 D 64 causal window 4096,- softcap 30"
    assert [case.causal for case in cases("--no-causal")] == [case.causal for case in cases()] == [False]


def test_packed_cases(cases):
    mixes = cases("--varlen", "--tokens", "32k,64k", "--dim", "64,128", "--both", "--heads", "8/2")
    assert [(case.tokens[0], case.head_dim, case.causal) for case in mixes] == [
        (tokens, dim, causal) for dim in (64, 128) for causal in (False, True) for tokens in (32768, 65536)
    ]
    assert {case.lengths for case in mixes} == {drawn_lengths(32768, 8192), drawn_lengths(65536, 8192)}
    assert all((case.batch, case.seqlen_q, case.seqlen_k) == (len(case.lengths), 8192, 8192) for case in mixes)
    (case,) = cases("--varlen", "--longest", "2k", "--window", "256,0", "--softcap", "30", "--dtype", "fp64")
    assert case.lengths == drawn_lengths(32768, 2048)
    assert (case.window_size, case.softcap, case.dtype, case.num_heads_kv) == ((256, 0), 30.0, "float64", 8)
    equal = cases("--varlen", "--seqlen", "1k,4k", "--tokens", "9k")
    assert [case.lengths for case in equal] == [(1024,) * 9, (4096,) * 2]  # as many as the dense cases of these tokens have
    dense = cases("--seqlen", "1k,4k", "--tokens", "9k")
    assert [replace(case, lengths=()) for case in equal] == dense


def test_the_backward_of_packed_cases(cases, monkeypatch):
    asked = []
    monkeypatch.setattr(cli, "run_timings", lambda report, cases, *_, **__: asked.append(cases) or [])
    shapes = ("--varlen", "--longest", "1k", "--causal")
    assert run("bwd", *shapes, "--deterministic").exit_code == run("compare", "--mode", "bwd", *shapes).exit_code == 0
    (forward,) = cases(*shapes)
    assert asked[:2] == [[replace(forward, backward=True, deterministic=True)], [replace(forward, backward=True)]]


def test_cases_over_a_cache(monkeypatch):
    asked = []
    monkeypatch.setattr(cli, "run_timings", lambda report, cases, *_, **__: asked.append(cases) or [])
    assert run("decode").exit_code == 0
    assert asked == [[CacheCase(1, 1, 8192, 32, 8, 128, 128, "float32")]]
    assert run("decode", "--cells", "1:512k,128:2k", "--heads", "32/8,64/8", "--page-size", "0,16", "--cache", "int8").exit_code == 0
    assert asked[1] == [
        CacheCase(batch, 1, keys, heads, 8, 128, 128, "float32", page_size=page_size, cache_dtype="int8")
        for heads in (32, 64)
        for batch, keys in ((1, 1 << 19), (128, 2048))
        for page_size in (0, 16)
    ]
    assert run("decode", "--batch", "8", "--rows", "512", "--seqlen-k", "16896", "--dim", "192-128", "--dtype", "fp16").exit_code == 0
    assert asked[2] == [CacheCase(8, 512, 16896, 32, 8, 192, 128, "float16", causal=True)]


def test_list_peers_says_what_is_not_there():
    assert run("compare", "--list-peers").output == f"cupyflash   {cupyflash.__version__}\nstandard    {np.__version__}\n"
    with_packed = run("compare", "--list-peers", "--varlen").output
    assert f"cupyflash-dense {cupyflash.__version__}\nstandard        {np.__version__}\n" in with_packed
    missing = peers.versions([peers.FlashAttention("fa4", "flash_attn.cute", "flash-attn-4", None)])
    assert missing["fa4"].startswith("not found: torch with CUDA is not installed")


def test_site_folders_are_read_with_their_pth_files(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "inside").mkdir()
    (tmp_path / "peer.pth").write_text("inside\n")
    (tmp_path / "inside" / "peer_of_the_test.py").write_text("x = 1\n")
    assert run("compare", "--site", str(tmp_path), "--list-peers").exit_code == 0
    assert __import__("peer_of_the_test").x == 1
    assert sys.path[0] == str(tmp_path)


def test_one_family_alone_and_the_table_as_before():
    sizes = {"head_dim": 64, "dtype": "bfloat16", "device": "sm_80"}
    best, table = cupyflash.supports(**sizes).reason, vars(kernels.plan)["FORWARD"]
    with kernels.only_family("fwd_simple"):
        assert cupyflash.supports(**sizes).reason.startswith("fwd_simple__bf16_d64__")
        assert {row.family for row in vars(kernels.plan)["FORWARD"]} == {"fwd_simple"}
    assert vars(kernels.plan)["FORWARD"] is table
    assert cupyflash.supports(**sizes).reason == best
    with pytest.raises(KeyError), kernels.only_family("fwd_simple"):
        raise KeyError
    assert cupyflash.supports(**sizes).reason == best
    with kernels.only_family(None):
        assert cupyflash.supports(**sizes).reason == best


def test_a_family_for_comparison_comes_into_play_by_its_name_alone():
    sizes = {"head_dim": 64, "dtype": "bfloat16", "device": "sm_90a"}
    best, table = cupyflash.supports(**sizes).reason, vars(kernels.plan)["FORWARD"]
    assert kernels.families()[-1] == "fwd_keys_outside"
    assert "fwd_keys_outside" not in kernels.families("BACKWARD")
    with kernels.only_family("fwd_keys_outside"):
        assert cupyflash.supports(**sizes, causal=True).reason.startswith("fwd_keys_outside__bf16_d64__m128n64s8__causal: ")
        assert cupyflash.supports(**sizes, seqlen_q=1).reason.startswith("fwd_keys_outside__")
        assert cupyflash.supports(**sizes, softcap=5.0).reason.startswith("no kernel for bfloat16 with head_dim 64")
    with kernels.only_family(None):
        assert vars(kernels.plan)["FORWARD"] is table
    assert cupyflash.supports(**sizes).reason == best


def test_one_family_of_the_backward_alone():
    sizes = {"head_dim": 64, "dtype": "bfloat16", "device": "sm_90a"}
    forward, backward = (lambda **wrt: cupyflash.supports(**sizes, **wrt).reason), {"wrt": ("q", "k", "v")}
    before = forward(), forward(**backward)
    with kernels.only_family("bwd_sm80"):
        assert forward() == before[0]
        assert forward(**backward).startswith("bwd_sm80__bf16_d64__")
    assert (forward(), forward(**backward)) == before
    assert before[1].startswith("bwd_sm90__bf16_d64__")


def test_gradients_planned_before_are_planned_anew():
    inputs = BACKWARD.inputs()
    call = peers.CupyFlash().bind(BACKWARD, inputs)
    call()
    prepared = kernels.backward._prepare.cache_info
    assert prepared().currsize >= 1
    with kernels.only_family("bwd_simple"):
        assert prepared().currsize == 0
        call()
    assert prepared().currsize == 0


def test_calls_planned_before_are_planned_anew():
    """Else a call of the same shapes would go on with the kernel that it had."""
    cached = [f for module in (kernels.api, kernels.plan) for f in vars(module).values() if hasattr(f, "cache_info")]

    def planned() -> int:
        return sum(function.cache_info().currsize for function in cached if function.__module__ != "cupyflash.device")

    cupyflash.attention(*SMALL.inputs()[:3])
    assert planned() >= 2
    with kernels.only_family("fwd_simple"):
        assert planned() == 0
        cupyflash.attention(*SMALL.inputs()[:3])
    assert planned() == 0


LOG = """ptxas info    : Compiling entry function 'fwd' for 'sm_90a'
ptxas info    : Function properties for fwd
    48 bytes stack frame, 44 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers
ptxas warning : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"""


def test_variants_lists_the_rows(monkeypatch):
    pytest.importorskip("cupy", reason="CuPy is not installed; pip install 'cupyflash[cuda13]'")
    monkeypatch.setattr(kernels.jit, "compile_cubin", lambda unit, options: (b"", LOG))
    result = run("variants", "--arch", "sm_80", "--dtype", "fp16,fp32", "--dim", "100", "--json", "-")
    assert result.exit_code == 0, result.stderr
    header, *rows = lines(result.stdout)
    assert header["record"] == "environment"
    assert rows[0] | {"registers": 255, "spilled_bytes": 44, "stack_bytes": 48, "record": "variant", "arch": "80"} == rows[0]
    assert "(C7510)" in rows[0]["warnings"][0]
    assert all(row["head_dim"] >= 100 for row in rows)
    assert {row["name"].split("__")[1].split("_")[0] for row in rows} == {"f16", "f32"}
    for text in (rows[0]["name"], rows[0]["why"], "255", "44", "serialized"):
        assert text in result.stderr


@pytest.mark.parametrize(("dim", "arch"), [(64, "90a"), (100, "90a"), (256, "80")])
def test_the_rows_of_the_backward_are_listed_with_what_they_launch_beside(dim, arch):
    found = [variant for variant, _ in kernels.candidates(arch, ("bfloat16",), dim) if variant.family.startswith("bwd")]
    assert len({variant.name for variant in found}) == len(found)
    planned = {}
    for options in ({}, {"bias": True, "sink": True}):
        for wrt in (("q", "k", "v"), ("q",), *([("bias",)] if options else [])):
            answer = cupyflash.supports(head_dim=dim, dtype="bfloat16", device=f"sm_{arch}", wrt=wrt, **options)
            planned |= {(v.family, v.config): v for v in answer.variants if v.family not in peers._AROUND}
    listed = {(variant.family, variant.config) for variant in found}
    assert set(planned) <= listed
    families = {variant.family for variant in found}
    assert ("bwd_sm90" in families) == (arch == "90a")  # D = 100 in tiles of 128
    assert {"bwd_sm80", "bwd_sm80_dq", "bwd_sm80_dbias", "bwd_simple"} <= families
    assert all(("dq" in variant.flags) == (variant.family == "bwd_sm80") for variant in found)
    assert not any("lse" in variant.flags for variant in found)


def test_variants_that_do_not_compile_end_in_exit_code_1(monkeypatch):
    pytest.importorskip("cupy", reason="CuPy is not installed; pip install 'cupyflash[cuda13]'")

    def fails(unit, options):
        raise cupyflash.CompileError("fwd did not compile: fwd.cu(3): error: expected a ;")

    monkeypatch.setattr(kernels.jit, "compile_cubin", fails)
    result = run("variants", "--dim", "256")
    assert result.exit_code == 1
    assert "expected a ;" in result.stdout


def test_variants_without_nvrtc_says_the_pip_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    result = run("variants")
    assert result.exit_code == 3
    assert "pip install 'cupyflash[cuda1" in result.stderr


# --- tuning -------------------------------------------------------------------------------------------------------------------


class Warps(NamedTuple):
    warps: int


class OfWarps(NamedTuple):
    block_m: int
    block_n: int
    stages: int
    warps: int


class OfWarpgroups(NamedTuple):
    block_m: int
    block_n: int
    stages: int
    other: bool


def test_the_rules_of_what_is_tried():
    assert [config.warps for config in kernels.configs(Warps(4))] == [1, 2, 4, 8, 16]
    found = kernels.configs(OfWarps(128, 64, 2, 4))
    assert len(found) == len(set(found)) == 15
    assert {(config.block_m, config.warps, config.stages) for config in found} == {(64, 4, 2), (128, 4, 2), (128, 8, 2)}
    found = kernels.configs(OfWarpgroups(128, 64, 2, True))
    assert len(found) == len(set(found)) == 40
    assert {config[0] for config in found} == {128, 192}
    assert {config[2:] for config in found} == {(2, True), (3, True)}
    assert kernels.configs(OfWarps(128, 64, 2, 4), ((256, 64),)) == [OfWarps(256, 64, 2, 8)]
    assert kernels.configs(OfWarpgroups(128, 64, 2, True), ((64, 8), (100, 64))) == [OfWarpgroups(64, 8, s, True) for s in (2, 3)]


def test_rows_are_written_as_they_stand_in_the_table():
    """So that what tuning prints can be pasted: each row of the table is printed as an expression that is the row."""
    for row in vars(kernels.plan)["FORWARD"]:
        assert eval(kernels.source_line(row).rstrip(","), dict(vars(kernels.variants))) == row
    row = next(row for row in vars(kernels.plan)["FORWARD"] if row.family == "fwd_sm80")
    assert kernels.source_line(row).startswith(f"_sm80({row.head_dim}, {row.options}, {row.config.block_m}, ")
    assert kernels.source_line(row._replace(capability=86)).startswith("Row(family='fwd_sm80', ")


FIT = """    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers"""
NOW = "m128n128s2w4"  # the tile of the row that `tuning` stands on


@pytest.fixture
def tuning(monkeypatch):
    """A GPU whose calls take what `ms` says of the row that is the table meanwhile; `logs` are the compiler's of a tile."""
    pytest.importorskip("cupy", reason="CuPy is not installed; pip install 'cupyflash[cuda13]'")
    names, attention = vars(kernels.plan), cupyflash.attention
    row = next(row for row in names["FORWARD"] if row.family == "fwd_sm80" and row.head_dim == 64)
    row = row._replace(config=row.config._replace(block_m=128, block_n=128, warps=4))
    monkeypatch.setitem(names, "FORWARD", (row, names["FORWARD"][-1]))
    state = SimpleNamespace(ms={NOW: 4.0, "m64n32s2w4": 5.0, "m64n64s2w4": 2.0}, logs={}, wrong=(), calls=[])

    def call(*arrays, **options):
        (row,) = names["FORWARD"]
        state.calls.append(row.config.tile)
        return attention(*arrays, **options) * (2 if row.config.tile in state.wrong else 1)

    def timer(calls):
        def round_():
            calls[0]()
            return timing.Tick(state.ms[state.calls[-1]], 300.0, 1500.0)

        return round_

    class Place(FakeGpu):
        def __init__(self) -> None:
            self.timers = {"graph": timer}

    monkeypatch.setattr(cupyflash, "attention", call)
    monkeypatch.setattr(gpu, "open_place", Place)
    monkeypatch.setattr(kernels.device, "current", lambda: 0)
    monkeypatch.setattr(kernels.device, "query", lambda device_id: kernels.device.KNOWN["90a"])
    monkeypatch.setattr(kernels.jit, "_in_memory", {})
    monkeypatch.setattr(kernels.jit, "compile_cubin", lambda unit, options: (b"", state.logs.get(unit.variant.split("__")[2], FIT)))
    return state


TUNE = ("variants", "--tune", "--dtype", "fp16", "--seqlen", "64", "--heads", "1", "--tiles", "64x32,64x64,128x64,128x96,64x1024")


@pytest.mark.usefixtures("small", "gpu_machine")
def test_tuning_times_each_tile_by_its_own_row(tuning):
    table = vars(kernels.plan)["FORWARD"]
    tuning.logs = {"m128n64s2w8": LOG, "m128n64s2w4": LOG.replace("44 bytes spill", "0 bytes spill")}
    tuning.logs |= {"m128n96s2w8": FIT.replace("168", "300"), "m128n96s2w4": FIT.replace("0 bytes spill", "8 bytes spill")}
    tuning.logs[NOW] = LOG  # whatever the row is like that is there now, it is timed
    result = run(*TUNE, "--causal", "--json", "-")
    assert result.exit_code == 0, result.output
    assert vars(kernels.plan)["FORWARD"] is table
    header, *tiles, row = lines(result.stdout)
    assert header["record"] == "environment"
    timed = [(tile["tile"], tile["ms"], tile["ratio_to_now"], tile["is_now"]) for tile in tiles if tile["ms"]]
    assert timed == [("m64n64s2w4", 2.0, 2.0, False), (NOW, 4.0, 1.0, True), ("m64n32s2w4", 5.0, 0.8, False)]
    assert set(tuning.calls) == {tile for tile, *_ in timed}
    assert tiles[0]["kernel"] == "fwd_sm80__f16_d64__m64n64s2w4__causal"
    assert tiles[0]["registers"] == 168
    assert (tiles[0]["timer"], tiles[0]["rounds"] >= 2, tiles[0]["ratio_to_peer"], "host_us" in tiles[0]) == ("graph", True, None, False)
    reasons = {tile["tile"]: tile["not_timed"] for tile in tiles if not tile["ms"]}
    assert reasons.pop("m128n64s2w8") == "spills 44 bytes"
    assert "(C7510)" in reasons.pop("m128n64s2w4")
    assert reasons.pop("m128n96s2w8") == "77824 registers for 256 threads, and an SM has 65536"
    assert reasons.pop("m128n96s2w4") == "spills 8 bytes"
    assert reasons.pop("m64n1024s2w4") == "532480 bytes of shared memory, and a block has 232448"
    assert reasons == {}
    assert row["line"].startswith('_sm80(64, False, 64, 64, 4, "')
    assert f" for {NOW} (TFLOP/s, " in row["line"]
    assert row["line"].endswith('fp16 B 1 S 64 H 1 D 64 causal)"),')
    for text in (f"{NOW} *", "2.00x", "m64n1024s2w4       not timed: 532480 bytes", row["line"]):
        assert text in result.stderr


@pytest.mark.usefixtures("small", "gpu_machine")
def test_a_tile_that_is_wrong_ends_in_exit_code_1(tuning):
    tuning.wrong = ("m64n64s2w4",)
    tuning.ms |= dict.fromkeys(("m128n64s2w4", "m128n64s2w8", "m128n96s2w4", "m128n96s2w8"), 4.5)
    result = run(*TUNE, COLUMNS="60")
    assert result.exit_code == 1
    assert "m64n64s2w4         WRONG: error " in result.stdout
    assert '_sm80(64, False, 128, 128, 4, "' in result.stdout  # the best of the others is what there is
    assert all(len(line) <= 60 for line in result.stdout.splitlines() if "_sm80(" not in line)


@pytest.mark.usefixtures("small", "gpu_machine")
def test_tuning_beside_a_peer(monkeypatch, tuning):
    class Fast(peers.Standard):
        name, place = "fast", "gpu"

        def bind(self, case, inputs):
            call = super().bind(case, inputs)
            return lambda: tuning.calls.append("fast") or call()

    monkeypatch.setattr(peers, "PEERS", (peers.CupyFlash(), Fast()))
    monkeypatch.setattr(cli, "PEERS", peers.PEERS)
    tuning.ms |= {"fast": 1.0}
    result = run(*TUNE[:-1], "64x32", "--both", "--peers", "cupyflash,fast", "--json", "-")
    assert result.exit_code == 0, result.output
    header, *tiles = lines(result.stdout)
    assert set(header["peers"]) == {"fast"}
    assert [(tile["tile"], tile["ratio_to_peer"], tile["kernel"] is None) for tile in tiles[:3]] == [
        ("fast", 1.0, True),
        (NOW, 0.25, False),
        ("m64n32s2w4", 0.2, False),
    ]
    assert "; fast " in tiles[3]["line"]
    assert [tile["causal"] for tile in tiles] == [False] * 4 + [True] * 4


@pytest.mark.usefixtures("small", "gpu_machine", "tuning")
def test_a_family_that_has_no_row_for_the_case_is_a_mistake():
    result = run(*TUNE, "--dim", "300")
    assert result.exit_code == 2
    assert "'--dim': no kernel for head_dim 300" in result.stderr
    result = run("variants", "--tune", "--dtype", "fp32", "--family", "fwd_sm80")
    assert result.exit_code == 2
    assert "'--family': no kernel for float32" in result.stderr
    assert "'fwd_x' is no family" in run(*TUNE, "--family", "fwd_x").stderr


def test_tuning_without_a_gpu_says_why_in_one_line():
    result = run("variants", "--tune")
    assert result.exit_code == 3
    assert result.stderr == "cupyflash-bench: --tune times kernels on a GPU: no NVIDIA driver, so no GPU\n"


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
        assert record["host_us"] is record["clock_mhz"] is record["cold"] is None
        assert (record["timer"], record["rounds"]) == ("wall", 2)
        assert record["error"] < 2e-5
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
@pytest.mark.parametrize("command", ["fwd", "bwd"])
def test_packed_sequences_from_the_options_to_the_records(command):
    result = run(command, "--varlen", "--tokens", "200", "--longest", "64", "--heads", "4/2", "--dim", "24-8", "--causal", "--json", "-")
    assert result.exit_code == 0, result.output
    _, _, *records = lines(result.stdout)
    assert [record.get("record") for record in records] == [None, "run", "run"]
    ours, ran, formula = records
    assert set(ours) == RESULT_FIELDS | PACKED_FIELDS | {"tflops"}
    lengths = drawn_lengths(200, 64)
    case = Case(1, 1, 1, 4, 2, 24, 8, "float32", True, backward=command == "bwd")
    case = replace(case, **packed(lengths))
    for record in records:
        assert (record["mode"], record["batch"], record["seqlen_q"], record["seqlen_k"]) == (command, len(lengths), 64, 64)
        assert [record[name] for name in ("tokens", "longest", "seed", "lengths")] == [200, 64, SEED, list(lengths)]
    assert ours["tflops"] == pytest.approx(case.flops / ours["ms"] / 1e9)
    assert ours["error"] <= ran["limit"]
    assert "with a batch axis" in formula["not_timed"]
    assert f"{command} fp32 200 tokens in {len(lengths)} sequences, longest 64, H 4/2 D 24-8 causal" in result.stderr


@pytest.mark.usefixtures("small")
def test_decode_from_the_options_to_the_records():
    shapes = ("--cells", "2:50", "--rows", "1,5", "--page-size", "0,16", "--heads", "4/2", "--dim", "24-8", "--cache", "int8")
    result = run("decode", *shapes, "--json", "-")
    assert result.exit_code == 0, result.output
    _, _, *records = lines(result.stdout)
    ours = [record for record in records if record["peer"] == "cupyflash" and "record" not in record]
    cases = [CacheCase(2, n, 50, 4, 2, 24, 8, "float32", n > 1, page_size=size, cache_dtype="int8") for n in (1, 5) for size in (0, 16)]
    for record, case in zip(ours, cases, strict=True):
        assert set(record) == RESULT_FIELDS | CACHE_FIELDS | {"gbps"} | ({"tflops"} if case.seqlen_q > 1 else set())
        sizes = {"batch": 2, "seqlen_q": case.seqlen_q, "seqlen_k": 50, "page_size": case.page_size or None, "cache_dtype": "int8"}
        assert {name: record[name] for name in sizes} == sizes
        assert (record["mode"], record["gbps"]) == ("decode", pytest.approx(case.num_bytes / record["ms"] / 1e6))
        assert record.get("tflops", 0) == pytest.approx(case.flops / record["ms"] / 1e9 if case.seqlen_q > 1 else 0)
        assert f"decode {case.label}\n" in result.stderr
    gathers = [record for record in records if record["peer"] == "gather" and "record" not in record]
    assert [record["page_size"] for record in gathers] == [16, 16]
    assert gathers[0]["ratio_to_best"] == pytest.approx(ours[1]["ms"] / gathers[0]["ms"])


@pytest.mark.parametrize(
    ("lengths", "seed", "listed"),
    [((32,) * 3, None, True), (drawn_lengths(300, 1), None, False), (drawn_lengths(4000, 64), SEED, False), ((3, 4), None, True)],
)
def test_records_make_packed_sequences_again(lengths, seed, listed):
    assert (len(lengths) < 300) == listed
    fields = report.case_fields(replace(PACKED, **packed(lengths)))
    assert (fields["seed"], fields["lengths"]) == (seed, list(lengths) if listed else None)
    assert (fields["batch"], fields["tokens"], fields["longest"]) == (len(lengths), sum(lengths), max(lengths))
    assert not PACKED_FIELDS & set(report.case_fields(SMALL))


@pytest.mark.usefixtures("small")
def test_equal_packed_sequences_beside_the_dense_call():
    result = run("compare", "--varlen", "--tokens", "96", "--seqlen", "32", "--mode", "bwd", "--heads", "2", "--json", "-")
    assert result.exit_code == 0, result.output
    ours, dense = (record for record in lines(result.stdout) if "record" not in record)
    assert (ours["peer"], dense["peer"]) == ("cupyflash", "cupyflash-dense")
    assert ours["ratio_to_best"] == pytest.approx(dense["ms"] / ours["ms"])
    assert (ours["lengths"], ours["seed"], ours["batch"]) == ([32] * 3, None, 3)


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
    def interrupt(case, place):
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "run", interrupt)
    result = run("check")
    assert result.exit_code == 130
    assert result.stderr.strip() == "cupyflash-bench: interrupted"


# --- text ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "command",
    [
        *([], ["check"], ["doctor"], ["bwd", "--seqlen", "32", "--heads", "2"]),
        ["compare", "--varlen", "--tokens", "96", "--seqlen", "32", "--heads", "2"],
        ["decode", "--seqlen-k", "40", "--heads", "4/2", "--rows", "1,3", "--page-size", "0,16", "--cache", "int8"],
    ],
)
@pytest.mark.parametrize("width", [60, 80, 85, 100])
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

WORKS = check.Verdict(1e-7, 2e-5)
H200 = machine.Gpu("NVIDIA H200", "sm_90", 150_000_000_000)


@pytest.fixture
def doctor(monkeypatch):
    """The doctor on a machine made up for the test; a good one with CUDA 13 unless said otherwise."""

    def run_on(
        driver=("13.0", [H200], None), cupy=("cupy-cuda13x",), nvrtc="13.0", headers="/usr/include", unwritable=None, smoke=WORKS, **config
    ):
        found = {**cupyflash.show_config(mode="dicts"), "nvrtc": nvrtc, **config}
        monkeypatch.setattr(cupyflash, "show_config", lambda mode: found)
        monkeypatch.setattr(machine, "nvidia_driver", lambda: machine.Driver(*driver))
        monkeypatch.setattr(machine, "cupy_wheels", lambda: dict.fromkeys(cupy, "14.2.0"))
        monkeypatch.setattr(machine, "cuda_headers", lambda: headers)
        monkeypatch.setattr(machine, "why_not_writable", lambda folder: unwritable)
        monkeypatch.setattr(gpu, "smoke", lambda: smoke)
        return run("doctor")

    return run_on


def test_doctor_finds_nothing_missing(doctor):
    result = doctor()
    assert result.exit_code == 0
    for text in (
        "NVIDIA H200, sm_90, 150 GB",
        "cupy-cuda13x 14.2.0",
        "CUDA 13.0",
        "gpu path     works",
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


def test_doctor_says_when_the_gpu_path_is_wrong(doctor):
    result = doctor(smoke=check.failure(check.SMALL, RuntimeError("CUDA_ERROR_INVALID_IMAGE")))
    assert result.exit_code == 1
    assert "gpu path     WRONG: RuntimeError: CUDA_ERROR_INVALID_IMAGE" in result.stdout


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


def test_nvml_says_what_it_knows_of_a_gpu(monkeypatch):
    """A GPU that keeps its power to itself still tells its clock; one that is not there is an OSError."""
    asked = []

    class Lib:
        def __getattr__(self, name):
            def function(*arguments):
                asked.append(name)
                if name in ("nvmlDeviceGetClockInfo", "nvmlDeviceGetMaxClockInfo"):
                    arguments[-1]._obj.value = 1650 if "Max" not in name else 1980
                if name == "nvmlSystemGetDriverVersion":
                    arguments[0].value = b"580.82.07"
                return 3 if "Power" in name or arguments[:1] == (b"none",) else 0

            return function

    monkeypatch.setattr(nvml.ctypes, "CDLL", lambda name: Lib())
    sensor = nvml.Sensor("0000:19:00.0")
    assert "nvmlDeviceGetHandleByPciBusId_v2" in asked
    assert sensor.clock_mhz() == 1650
    limits = {"max_clock_mhz": 1980, "power_limit_w": None, "power_w": None}
    assert sensor.facts() == {"driver_release": "580.82.07", "clock_mhz": 1650, **limits}
    with pytest.raises(OSError, match="nvmlDeviceGetHandleByPciBusId_v2 returned 3"):
        nvml.Sensor("none")


def test_latent_heads_are_kept_once():
    """Of 576 columns a key, 512 of them the value's: the same memory, which is counted and read once."""
    case = CacheCase(3, 1, 50, 4, 1, 576, 512, "float32")
    inputs = case.inputs()
    assert np.shares_memory(inputs.k, inputs.v)
    assert inputs.v.shape == (3, 50, 1, 512)
    assert case.num_bytes == 4 * (3 * 50 * 576 + 3 * 4 * (576 + 512))
    assert not CACHED.latent
    (outcome,) = peers.compare(case, [peers.CupyFlash()], min_s=0.01).outcomes
    assert outcome.verdict.ok
