"""cupyflash-bench plot: what is drawn, as a picture and as bars."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bench import cli, plot, records, report
from bench.cases import CacheCase, Case

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
CASE = Case(4, 4096, 4096, 8, 2, 64, 64, "bfloat16", causal=True)
CACHED = CacheCase(8, 1, 8192, 32, 8, 128, 128, "bfloat16")
HEADER = {"record": "environment", "time": "2026-01-02T00:00:00+00:00", "devices": [{"name": "GPU X"}], "peers": {"fa3": "3.0"}}


def run(*arguments: str, **environment: str | None) -> Result:
    arguments = tuple(map(str, arguments))
    return CliRunner().invoke(cli.main, arguments, env={"NO_COLOR": None, "FORCE_COLOR": None, "COLUMNS": None, **environment})


@pytest.fixture
def write(tmp_path):
    def write(*lines: tuple[Case, str, float], name: str = "a.jsonl", flops_per_s: float | None = 500e12) -> Path:
        path = tmp_path / name
        records = [HEADER, {"record": "ceilings", "place": "gpu", "flops_per_s": flops_per_s, "bytes_per_s": 4e12}]
        records += [{**report.case_fields(case), "peer": peer, "ms": ms, "spread": 0.01} for case, peer, ms in lines]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    return write


@pytest.fixture
def grid(write):
    """Two lengths, causal and not, two peers."""
    sizes = [replace(CASE, seqlen_q=n, seqlen_k=n, causal=causal) for causal in (True, False) for n in (4096, 2048)]
    return write(*((case, peer, ms) for case in sizes for peer, ms in (("fa3", 2.0), ("cupyflash", 1.0))))


def composed(*files: Path, **options) -> plot.Picture:
    read = [records.read(path, last=True) for path in files]
    return plot.compose(read, **{"in_ms": False, "peers": None, "mode": None, "dim": None, "tokens": None, **options})


def test_panels_lines_and_points(grid):
    picture = composed(grid)
    assert [one.title for one in picture.panels] == ["all keys", "causal"]
    assert (picture.title, picture.unit, picture.ceiling) == ("Forward, bf16, D 64, 8/2 heads", "TFLOP/s", 500)
    assert picture.source == "GPU X, 2026-01-02, fa3 3.0"
    # 4 D a visible pair and query head, 4 sequences, 8 heads, in 1 ms.
    whole, causal = (dict(one.lines["cupyflash"]) for one in picture.panels)
    assert whole == {
        2048: pytest.approx(4 * 64 * 4 * 8 * 2048**2 / 1e-3 / 1e12),
        4096: pytest.approx(4 * 64 * 4 * 8 * 4096**2 / 1e-3 / 1e12),
    }
    assert causal[4096] == pytest.approx(4 * 64 * 4 * 8 * (4096 * 4097 / 2) / 1e-3 / 1e12)
    assert picture.panels[0].lines["fa3"][0] == (2048, pytest.approx(whole[2048] / 2))
    assert composed(grid, in_ms=True).panels[0].lines["fa3"] == [(2048, 2.0), (4096, 2.0)]
    assert list(plot.looks(picture)) == ["cupyflash", "fa3"]


def test_decode_is_bytes_over_keys(write):
    file = write(*((replace(CACHED, batch=n), "cupyflash", 0.1) for n in (1, 8)))
    picture = composed(file)
    kv = 2 * 2 * 8192 * 8 * 128
    qo = 2 * 2 * 32 * 128
    assert picture.panels[0].lines["cupyflash"] == [
        (8192, pytest.approx((kv + qo) / 1e-4 / 1e12)),
        (65536, pytest.approx(8 * (kv + qo) / 1e-4 / 1e12)),
    ]
    assert (picture.unit, picture.ceiling, picture.length) == ("TB/s", 4, "keys of all sequences")


def test_what_is_drawn_can_be_chosen(grid, write):
    assert len(composed(grid, tokens=(16384,)).panels) == 2  # each with one length: there are no others
    assert set(composed(grid, peers="fa3").panels[0].lines) == {"fa3"}
    with pytest.raises(cli.click.BadParameter, match="nothing is left"):
        composed(grid, dim=((128, 128),))
    other = write((replace(CASE, window_size=(7, 0)), "cupyflash", 1.0), name="b.jsonl")
    assert len(composed(grid, other).panels) == 2  # a window with one length is no line
    again = write((replace(CASE, causal=False), "fa3", 0.5), name="c.jsonl")
    y = dict(composed(grid, again).panels[0].lines["fa3"])
    assert y[4096] == pytest.approx(4 * 64 * 4 * 8 * 4096**2 / 0.5e-3 / 1e12)


def test_the_second_run_of_a_file_counts(write):
    long = replace(CASE, seqlen_q=8192, seqlen_k=8192)
    picture = composed(write((CASE, "fa3", 1.0), (long, "fa3", 1.0), (CASE, "fa3", 4.0)), in_ms=True)
    assert picture.panels[0].lines["fa3"] == [(4096, 4.0), (8192, 1.0)]


def test_ticks_have_room():
    assert plot.spaced([512, 1024, 2048, 4096]) == [512, 1024, 2048, 4096]
    assert plot.spaced([1024, 8192, 65536, 262144, 524288, 1048576]) == [1024, 8192, 65536, 262144, 1048576]
    assert plot.spaced([7]) == [7]
    assert [plot.thousands(n) for n in (512, 4096, 1 << 20)] == ["512", "4k", "1M"]


def test_bars_in_the_terminal(grid):
    done = run("plot", grid, COLUMNS="60")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "Forward, bf16, D 64, 8/2 heads: TFLOP/s"
    assert max(map(len, lines)) <= 60
    bars = {line.split()[-1]: line.count("█") for line in lines if "█" in line}
    assert bars["137"] == 31  # all the room that there is; 4 D 4 8 4096² FLOPs in 1 ms
    assert bars["68.7"] in (15, 16)
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("file", ["h200-fwd.jsonl", "h200-bwd.jsonl"])
@pytest.mark.parametrize("kind", ["png", "svg"])
def test_pictures(tmp_path, file, kind):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib; pip install 'cupyflash[plot]'")
    outs = [tmp_path / f"{i}.{kind}" for i in range(2)]
    for out in outs:
        done = run("plot", RESULTS / file, "--dim", "64,128,256", "--tokens", "16k", "--out", out)
        assert (done.exit_code, done.stderr) == (0, "")
        assert done.stdout.startswith(f"{out}: 6 panels, ")
    content = outs[0].read_bytes()
    assert content == outs[1].read_bytes()  # nothing but the numbers decides them
    assert len(content) < 150_000
    if kind == "png":
        assert (content[:8], int.from_bytes(content[16:20], "big")) == (b"\x89PNG\r\n\x1a\n", 1200)
    else:
        text = content.decode()
        for word in ("cupyflash", "sdpa-cudnn", "D 128, 16 heads, causal", "sequence length", "TFLOP/s", "matmul"):
            assert word in text


def test_pictures_in_milliseconds(tmp_path, grid):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib; pip install 'cupyflash[plot]'")
    out = tmp_path / "a.svg"
    assert run("plot", grid, "--time", "--out", out).exit_code == 0
    assert "Lower is better" in out.read_text()
    assert "matmul" not in out.read_text()


@pytest.mark.parametrize("path", sorted(set(RESULTS.glob("*.svg")) - set(RESULTS.glob("*-lesson-*"))), ids=lambda path: path.name)
def test_the_committed_pictures_are_of_the_committed_numbers(path, tmp_path):
    """By what does not depend on the version of matplotlib: the names, and the ceiling."""
    text = path.read_text()
    picture = composed(path.with_suffix(".jsonl"), dim=((64, 64), (128, 128), (256, 256)), tokens=(16384,))
    for name in (*plot.looks(picture), picture.source, f"matmul {report.digits(picture.ceiling)}", *(one.title for one in picture.panels)):
        assert name in text
    assert len(text) < 150_000


def test_without_matplotlib_there_are_bars_and_the_pip_line(monkeypatch, tmp_path, grid):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find_spec(name, *rest))
    done = run("plot", grid, "--out", tmp_path / "a.png")
    assert done.exit_code == 3
    assert done.stderr == "cupyflash-bench: a picture needs matplotlib: pip install 'cupyflash[plot]'\n"
    assert "█" in done.stdout
    assert not (tmp_path / "a.png").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--out", "a.jpg"], "'--out': 'a.jpg' ends neither in .png nor in .svg"),
        (["--mode", "bwd"], "nothing is left to draw"),
        (["--mode", "x"], "'x' is not one of 'fwd', 'bwd', 'decode'"),
        (["--dim", "a"], "'a' is neither a number nor a pair"),
        (["--tokens", "12q"], "'12q' is no size"),
        (["--peers", "fa9"], "nothing is left to draw"),
        (["nowhere.jsonl"], "'nowhere.jsonl' does not exist"),
    ],
)
def test_mistakes_are_one_line(grid, options, says):
    done = run("plot", grid, *options)
    assert done.exit_code == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_modes_and_folders(write, grid, tmp_path):
    both = write((CASE, "fa3", 1.0), (replace(CASE, backward=True), "fa3", 1.0), name="both.jsonl")
    done = run("plot", both)
    assert (done.exit_code, "there are bwd and fwd in it: choose one by --mode" in done.stderr) == (2, True)
    assert run("plot", both, "--mode", "bwd").exit_code == 0
    assert run("plot").exit_code == 2
    if importlib.util.find_spec("matplotlib"):
        done = run("plot", grid, "--out", tmp_path / "no" / "a.svg")
        assert (done.exit_code, "cannot write" in done.stderr, done.stderr.count("\n")) == (2, True, 1)
