"""The example of a cascade: its rows are those of attention by definition, and a wrong one does not pass."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import cupyflash
from bench.examples import shared_prefix
from bench.examples.shared_prefix import Model, Step

MODEL = Model(heads_q=6, heads_kv=2, head_dim=16, page_size=8, dtype="float32")


def steps(batch: int = 5, prefix: int = 48, own: int = 13, pages: int = 40, model: Model = MODEL) -> list[Step]:
    rng = np.random.default_rng(3)
    shape = (pages, model.page_size, model.heads_kv, model.head_dim)
    caches = tuple(rng.standard_normal(shape, dtype=np.float32).astype(model.dtype) for _ in "kv")
    return shared_prefix.steps_of(model, batch, prefix, own, caches, np.asarray)


def by_definition(step: Step, prefix: int, own: int) -> Any:
    """Softmax in float64 over the keys of each request: the prefix's pages, then those that only it has."""
    B, _, Hq, D = step.q.shape
    group = Hq // step.k_cache.shape[2]
    out = np.empty((B, 1, Hq, D))
    for b in range(B):
        tables = [*range(step.first, step.first + step.prefix_pages)], step.own_table[b]
        k, v = (
            np.concatenate([cache[table].reshape(-1, *cache.shape[2:])[:n] for table, n in zip(tables, (prefix, own), strict=True)])
            for cache in (step.k_cache.astype(float), step.v_cache.astype(float))
        )
        for h in range(Hq):
            weights = np.exp(k[:, h // group] @ step.q[b, 0, h].astype(float) / np.sqrt(D))
            out[b, 0, h] = weights @ v[:, h // group] / weights.sum()
    return out


@pytest.mark.parametrize("parts", [1, 2, 3, 6])
@pytest.mark.parametrize("own", [1, 8, 13])
def test_both_ways_are_attention(parts, own):
    found = steps(own=own, pages=6 + 5 * -(-own // 8))
    assert len(found) == 1
    wanted = by_definition(found[0], 48, own)
    for out in (shared_prefix.one_call(found[0]), shared_prefix.cascade(found[0], parts)):
        assert out.shape == (5, 1, 6, 16)
        np.testing.assert_allclose(out, wanted, atol=2e-6)


def test_steps_share_no_page():
    """As many as there is room for, each with pages of its own; the prefix is in all rows of a table."""
    found = steps(batch=2, prefix=16, own=9, pages=19)  # 2 + 2 x 2 pages a step
    assert [step.first for step in found] == [0, 6, 12]
    pages = [set(step.table.ravel()) for step in found]
    assert [len(one) for one in pages] == [6, 6, 6]
    assert not pages[0] & pages[1]
    assert (found[1].table[:, :2] == [6, 7]).all()
    assert found[1].lengths.tolist() == [25, 25]
    np.testing.assert_allclose(shared_prefix.cascade(found[2], 2), by_definition(found[2], 16, 9), atol=2e-6)


def test_half_precision_is_within_its_limit():
    half = MODEL._replace(dtype="float16")
    (step,) = steps(model=half, pages=16)
    apart = shared_prefix.difference(shared_prefix.cascade(step, 3), shared_prefix.one_call(step), shared_prefix.HOST)
    assert 0 < apart < shared_prefix.AGREEMENT["float16"]


def test_parts_fill_what_computes_and_divide_the_pages():
    assert shared_prefix.parts_of(128, 128, 8, 132) == 16  # 32 requests of 4 rows a key head: 8 tiles
    assert shared_prefix.parts_of(512, 512, 8, 132) == 4  # 32 tiles
    assert shared_prefix.parts_of(100, 128, 8, 132) == 10  # 16 would not divide
    assert shared_prefix.parts_of(62, 1, 1, 132) == 31  # with the requests' own 32, as many as one kernel merges
    assert shared_prefix.parts_of(7, 5000, 8, 2) == 1


def test_the_command(tmp_path, capsys):
    file = tmp_path / "a.jsonl"
    arguments = ["--device", "host", "--batch", "2,3", "--prefix", "64", "--own", "5", "--min-time", "0.01", "--json", str(file)]
    assert shared_prefix.main(arguments) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 4
    assert max(map(len, printed)) <= 60
    header, *lines = map(json.loads, file.read_text().splitlines())
    assert header["record"] == "environment"
    assert [line["batch"] for line in lines] == [2, 3]
    for line in lines:
        assert line["gain"] == pytest.approx(line["one_call_ms"] / line["cascade_ms"])
        assert line["fewer_keys"] == pytest.approx(line["batch"] * 69 / (64 + line["batch"] * 5))
        assert line["error"] < 1e-5


def test_a_wrong_cascade_fails(capsys, monkeypatch):
    """The requests' own keys are forgotten."""
    monkeypatch.setattr(cupyflash, "merge_states", lambda outs, lses: (outs[0], lses[0]))
    assert shared_prefix.main(["--device", "host", "--batch", "2", "--prefix", "64", "--own", "5", "--min-time", "0.01"]) == 1
    assert "WRONG: above 1e-05" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prefix", "8x"], "--prefix: '8x' is no size: write 512, 8k or 8k,32k"),
        (["--prefix", "100"], "--prefix: 100 is no multiple of 16, the tokens of a page"),
        (["--parts", "5"], "--parts: 5 is not a divisor, up to 31, of the 64 pages of the prefix"),
        (["--parts", "0"], "--parts: 0 is not a divisor"),
        (["--json", "/nowhere/a"], "--json: cannot write /nowhere/a: No such file or directory"),
    ],
)
def test_mistakes(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        shared_prefix.main(["--device", "host", *arguments])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_said(capsys, monkeypatch):
    monkeypatch.setattr(shared_prefix.gpu, "why_not", lambda: "no NVIDIA driver, so no GPU")
    assert shared_prefix.main(["--device", "gpu"]) == 3
    assert "--device gpu: no NVIDIA driver, so no GPU" in capsys.readouterr().err
