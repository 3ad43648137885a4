"""Presets, and the sinks and windows that some of them need."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner, Result

import cupyflash
from bench import check, cli, gpu, peers, timing
from bench.cases import CacheCase, Case
from bench.presets import PRESETS

CASE = Case(2, 40, 40, 4, 2, 16, 16, "float32", causal=True, extras=("sink",))

# heads, key heads, head_dim, sliding window or None, soft cap, sinks: of the models' config.json, typed again.
CONFIGS = {
    "llama3-8b": (32, 8, 128, None, None, False),
    "llama3-70b": (64, 8, 128, None, None, False),
    "qwen3-8b": (32, 8, 128, None, None, False),
    "qwen3-32b": (64, 8, 128, None, None, False),
    "gemma2-9b": (16, 8, 256, None, 50.0, False),
    "gemma2-9b-local": (16, 8, 256, 4096, 50.0, False),
    "gemma3-12b": (16, 8, 256, None, None, False),
    "gemma3-12b-local": (16, 8, 256, 1024, None, False),
    "gpt-oss-20b": (64, 8, 64, None, None, True),
    "gpt-oss-20b-local": (64, 8, 64, 128, None, True),
    "deepseek-v3": (128, 128, 192, None, None, False),
    "vit-l": (16, 16, 64, None, None, False),
    "dit-xl": (16, 16, 72, None, None, False),
}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(gpu, "why_not", lambda: "no NVIDIA driver, so no GPU")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, arguments)


@pytest.fixture
def cases(monkeypatch):
    """The cases that a command would time."""

    def of(*arguments: str) -> list[Case]:
        asked: list[Case] = []
        monkeypatch.setattr(cli, "run_timings", lambda report, cases, *_, **__: asked.extend(cases) or [])
        result = run(*arguments)
        assert result.exit_code == 0, result.output
        return asked

    return of


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("command", ["fwd", "bwd", "compare", "decode"])
def test_a_preset_is_the_model(cases, name, command):
    (case,) = cases(command, "--preset", name)
    heads, heads_kv, dim, sliding, softcap, sink = CONFIGS[name]
    assert (case.softcap, case.extras) == (softcap, ("sink",) if sink else ())
    assert case.window_size == ((sliding - 1, 0) if sliding else None)
    if sliding:  # a window of n tokens counts the query's own
        first, end = replace(case, seqlen_q=9000, seqlen_k=9000).visible_keys()
        assert (end - first)[-1] == sliding
    if command == "decode":
        sizes = (128, 1, 576, 512) if name == "deepseek-v3" else (heads, heads_kv, dim, dim)
        assert (case.seqlen_q, case.seqlen_k) == (1, 8192)
    else:
        sizes = (heads, heads_kv, dim, 128 if name == "deepseek-v3" else dim)
        assert case.causal == (name not in ("vit-l", "dit-xl"))
        assert case.seqlen_q == {"vit-l": 197, "dit-xl": 256}.get(name, 1024)
    assert (case.num_heads_q, case.num_heads_kv, case.head_dim, case.head_dim_v) == sizes
    assert cupyflash.supports(**{**peers.problem(case), "dtype": "bfloat16", "device": "sm_90a"})


def test_options_beside_a_preset_overrule_it(cases):
    given = ["--seqlen", "2k,4k", "--heads", "4", "--no-causal", "--window", "7,7", "--softcap", "30"]
    for arguments in (["fwd", *given, "--preset", "gemma2-9b-local"], ["fwd", "--preset", "gemma2-9b-local", *given]):
        found = cases(*arguments)
        assert [case.seqlen_q for case in found] == [2048, 4096]
        case = found[0]
        assert (case.num_heads_q, case.head_dim, case.causal, case.window_size, case.softcap) == (4, 256, False, (7, 7), 30.0)
    assert cases("decode", "--preset", "llama3-8b", "--cells", "1:64k", "--page-size", "16")[0].head_dim == 128


def test_kernels_are_chosen_with_the_sink():
    assert peers.problem(CASE)["sink"] is True
    assert "sink" not in peers.problem(replace(CASE, extras=()))


@pytest.mark.parametrize("case", [CASE, replace(CASE, backward=True), CacheCase(2, 1, 40, 4, 2, 16, 16, "float32", extras=("sink",))])
def test_sinks_are_checked_and_timed(monkeypatch, case):
    monkeypatch.setattr(timing, "WARM_UP_S", 0.0)
    ours, formula = peers.compare(case, [peers.CupyFlash(), peers.Standard()], min_s=0.01, min_rounds=2).outcomes
    assert ours.verdict.ok, str(ours.verdict)
    assert ours.timing
    assert "softcap, bias or mask" in formula.why_not
    drawn = case.sink
    monkeypatch.setattr(Case, "sink", property(lambda self: {"sink": drawn["sink"] + np.float32(0.01)}))
    inputs = case.inputs()
    inputs.options["sink"] = drawn["sink"]
    monkeypatch.setattr(timing.Place, "inputs", lambda self, case, cold: [inputs])
    (wrong,) = peers.compare(case, [peers.CupyFlash()]).outcomes
    assert not wrong.verdict.ok
    assert peers.FlashAttention("fa4", "none", "none", None).why_not(case, timing.HOST) == "its sinks are timed nowhere here"


def test_the_float64_weights_with_a_sink_are_the_references():
    inputs = CASE.inputs()
    q, k, v = (np.asarray(x, np.float64) for x in inputs[:3])
    expected = cupyflash.reference.attention(q, k, v, causal=True, sink=inputs.options["sink"])
    visible = np.tril(np.ones((40, 40), bool))
    for head in range(4):
        weights, _ = check._weights(CASE, q[0, :, head], k[0, :, head // 2], visible, head)
        assert np.allclose(weights @ v[0, :, head // 2], np.asarray(expected)[0, :, head], rtol=0, atol=1e-14)


def test_bytes_of_a_window_are_of_the_keys_in_it():
    cached = CacheCase(4, 1, 8192, 64, 8, 64, 64, "bfloat16", window_size=(127, 0))
    assert cached.num_bytes == 2 * 4 * (2 * 64 * 64 + 128 * 2 * 8 * 64)
    assert replace(cached, seqlen_q=3).num_bytes == 2 * 4 * (3 * 2 * 64 * 64 + 130 * 2 * 8 * 64)
    dense = Case(1, 1024, 1024, 8, 8, 64, 64, "bfloat16", causal=True, window_size=(127, 0))
    assert dense.num_bytes == replace(dense, window_size=None).num_bytes


def test_an_unknown_preset_is_a_mistake():
    for command in ("fwd", "bwd", "decode", "compare"):
        result = run(command, "--preset", "gpt-5")
        assert result.exit_code == 2
        assert "'gpt-5' is not one of 'llama3-8b', " in result.stderr
        assert result.stderr.count("\n") == 1
