"""cupyflash-bench lesson: pages made of times that are made up here, their numbers compared with formulas of this file."""

from __future__ import annotations

import importlib.util
import json
import re
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bench import cli, gpu, kernels, lesson, lesson_pages, plot, records, report
from bench.lesson_pages import LESSONS
from bench.timing import HOST

FLOPS_PER_S, BYTES_PER_S, SMS = 800e12, 4e12, 132
HEADER = {
    "record": "environment",
    "time": "2026-01-02T00:00:00+00:00",
    "devices": [{"name": "NVIDIA H200"}],
    "peers": {"standard": "CuPy 1"},
}
CEILINGS = {"record": "ceilings", "place": "gpu", "flops_per_s": FLOPS_PER_S, "bytes_per_s": BYTES_PER_S}
MS = {"cupyflash": 0.5, "standard": 1.5, "fwd_keys_outside": 2.0, "fwd_sm80": 1.0, "fwd_sm90": 0.25}


@pytest.fixture(autouse=True)
def pictures():
    pytest.importorskip("matplotlib", reason="the plot of a lesson needs matplotlib; pip install 'cupyflash[plot]'")


def run(*arguments: object, **environment: str | None) -> Result:
    words = ["lesson", *map(str, arguments)]
    return CliRunner().invoke(cli.main, words, env={"NO_COLOR": None, "FORCE_COLOR": None, "COLUMNS": None, **environment})


@pytest.fixture
def write(tmp_path):
    """A file of a lesson: MS of each peer, but for what `ms` says of a case and a peer; None leaves it out."""

    def write(name: str, ms=lambda case, peer: MS[peer], host_us: float = 20.0, header=HEADER) -> Path:
        found = [(case, peer, ms(case, peer)) for case in LESSONS[name].cases for peer in LESSONS[name].peers]
        more = {"spread": 0.01, "host_us": host_us}
        results = [{**report.case_fields(case), "peer": peer, "ms": took, **more} for case, peer, took in found if took is not None]
        path = tmp_path / f"x-{name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in (header, CEILINGS, *results)))
        return path

    return write


def made(path: Path, name: str, folder: Path) -> str:
    done = run(name, "--from", path, "--to", folder)
    assert done.exit_code == 0, done.output
    return (folder / "lessons" / f"{name}.md").read_text()


def words(page: str) -> str:
    """The text without line ends."""
    return " ".join(page.split())


def table(page: str) -> list[dict[str, str]]:
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|"))
    return [dict(zip(head, row, strict=True)) for row in rows]


@pytest.mark.parametrize("name", LESSONS)
def test_a_page_is_the_same_bytes_again(name, write, tmp_path):
    path = write(name)
    pages = [made(path, name, tmp_path / n) for n in "ab"]
    assert pages[0] == pages[1]
    for kind in ("png", "svg"):
        first, second = ((tmp_path / n / "results" / f"x-{name}.{kind}").read_bytes() for n in "ab")
        assert first == second
        assert len(first) < 60_000
    assert f"](../results/x-{name}.png)" in pages[0]
    assert "## Where it does not help" in pages[0]
    assert f"`cupyflash-bench lesson {name} --measure x-{name}.jsonl` has timed it" in words(pages[0])
    assert "NVIDIA H200, 2026-01-02, standard CuPy 1" in words(pages[0])
    assert max(map(len, (line for line in pages[0].splitlines() if line[:1] not in "|!"))) <= lesson.WIDTH
    assert not re.search(r"\b(nan|inf|None)\b|[{}]|no header", pages[0])


@pytest.mark.parametrize("name", LESSONS)
def test_times_are_of_the_file(name, write, tmp_path):
    """Of one case, and then of another, every time is twice as long: the page says so."""
    before = made(write(name), name, tmp_path)
    for slow in (LESSONS[name].cases[0], LESSONS[name].cases[-1]):
        assert made(write(name, lambda case, peer, slow=slow: MS[peer] * (2 if case == slow else 1)), name, tmp_path) != before


def test_traffic_counts_the_scores(write, tmp_path):
    page = made(write("traffic", lambda case, peer: case.seqlen_q / 1e3 * {"cupyflash": 1, "standard": 5.5}[peer]), "traffic", tmp_path)
    rows = table(page)
    assert [(row["D"], row["S"]) for row in rows] == [(d, s) for d in ("64", "128") for s in ("512", "1k", "2k", "4k", "8k")]
    for case, row in zip(LESSONS["traffic"].cases, rows, strict=True):
        n, dim = case.seqlen_q, case.head_dim
        scores, rest = (2 * case.batch * case.num_heads_q * n * x for x in (4 * n, 4 * dim))  # bytes
        assert case.batch * n == 16384
        assert row["S and P / tiles"] == f"{n // dim}x"
        assert float(row["tiles MB"]) == pytest.approx(rest / 1e6, rel=0.005)
        assert float(row["standard MB"]) == pytest.approx((scores + rest) / 1e6, rel=0.005)
        assert float(row["gain measured"][:-1]) == 5.5
        flops_s = 4 * dim * n * n * case.batch * case.num_heads_q / FLOPS_PER_S
        tiles_s = max(flops_s, rest / BYTES_PER_S)
        thirds = [(flops_s / 2, scores / 4 + rest / 2), (0, scores / 2), (flops_s / 2, scores / 4 + rest / 2)]  # Q K^T, softmax, P V
        whole_s = sum(max(flops, moved / BYTES_PER_S) for flops, moved in thirds)
        assert float(row["gain at ceilings"][:-1]) == pytest.approx(whole_s / tiles_s, rel=0.006)
    text = words(page)
    assert "At D = 64 that is 8x with S = 512 and 64x with S = 4k." in text
    assert "the bytes gain 8x to 128x, and the time gains 5.5x to 5.5x" in text
    ratios = [(8 / BYTES_PER_S) / (4 * dim / FLOPS_PER_S) for dim in (64, 128)]
    assert f"which is {ratios[0]:.3g} to 1 at D = 64" in text
    assert f"the latter from {ratios[0]:.3g} to {ratios[1]:.3g}" in text
    assert "Less than 2x is gained with no length here." in text


def test_short_says_where_the_gain_is_lost(write, tmp_path):
    """Standard attention is faster at 128, less than twice as slow at 256 and three times as slow beyond."""

    def ms(case, peer):
        ours = case.seqlen_q / 1e5
        return ours if peer == "cupyflash" else ours * {128: 0.5, 256: 1.5}.get(case.seqlen_q, 3.0)

    page = made(write("short", ms), "short", tmp_path)
    text, rows = words(page), table(page)
    assert "the gain is below 2 at S = 128 and 256 with 12 heads, 128 and 256 with 32 heads, and standard attention is" in text
    assert "the faster one at S = 128 with 12 heads, 128 with 32 heads." in text
    # The host's 20 us are more than S / 100 us up to 1024; S and P of 12 heads are 2 x 2 x 12 S² bytes, of which the L2 holds 32 MB.
    assert "library's kernel at S = 128, 256, 512 and 1k with 12 heads, 128, 256, 512 and 1k with 32 heads." in text
    assert "stay in the L2 at S = 128, 256 and 512 with 12 heads, 128, 256 and 512 with 32 heads." in text
    assert [row["gain"] for row in rows[:4]] == ["0.5x", "1.5x", "3x", "3x"]
    # Calls take 20 us or S / 100: at 512 the tiles wait for the host and standard attention does not come to it; from 2k on nothing waits.
    assert [row["gain of calls"] for row in rows[:6]] == ["1x", "1x", "1x", f"{1024 * 0.03 / 20:.3g}x", "3x", "3x"]
    for row in rows:
        assert int(row["idle SMs"]) == max(SMS - int(row["blocks"]), 0)
        n = int(row["S"].removesuffix("k")) * (1024 if "k" in row["S"] else 1)
        dim, heads = int(row["D"]), int(row["heads"])
        bound_us = max(4 * dim * n * n * heads / FLOPS_PER_S, 8 * n * dim * heads / BYTES_PER_S) * 1e6
        assert float(row["bound us"]) == pytest.approx(bound_us, rel=0.006)
    assert "The host takes 20 us for a call of the library and 20 us for" in text


def test_batch_says_what_key_heads_are_worth(write, tmp_path):
    def ms(case, peer):
        ours = case.num_heads_kv / 10 if case.mode == "decode" else case.batch / 100
        return ours * (1 if peer == "cupyflash" else 1.25)

    page = made(write("batch", ms), "batch", tmp_path)
    text, rows = words(page), table(page)
    assert (
        "With S = 128, 512 times the sequences take 512 times as long, and tiles gain 1.25x, 1.25x, 1.25x and 1.25x in batches of" in text
    )
    assert "it takes 0.04 ms with 32, 0.04 ms with 8 and 0.04 ms with 1." in text
    keys, out = 2 * 32 * 8192 * 128 * 2, 2 * 32 * 32 * 128 * 2  # bytes of K and V of a key head, and of q and out of all
    saved = (32 * keys + out) / (8 * keys + out)
    found = re.search(r"with 8 it moves ([\d.]+) times fewer bytes and is 4 times as fast", text)
    assert found
    assert float(found[1]) == pytest.approx(saved, rel=0.01)
    assert "with 1 it moves" in text
    assert "is 32 times as fast" in text
    decode = [row for row in rows if row["call"] == "decode"]
    assert [row["heads"] for row in decode] == ["32", "32/8", "32/1"]
    assert [row["gain"] for row in decode] == ["1.25x"] * 3
    assert float(decode[0]["tiles MB"]) == pytest.approx((32 * keys + out) / 1e6, rel=0.005)
    assert f"at {(32 * keys + out) / 3.2e-3 / BYTES_PER_S:.0%}, " in text
    assert {row["limit"] for row in decode} == {"bytes"}
    prefill = [row for row in rows if row["call"] == "causal"]
    assert {row["limit"] for row in prefill} == {"FLOPs"}


def test_steps_are_compared_with_the_one_before(write, tmp_path):
    page = made(write("steps"), "steps", tmp_path)
    text, rows = words(page), table(page)
    assert "The same attention in 4 forms" in text
    assert [float(part) for part in re.findall(r"\. ([\d.]+) times the speed\.", text)] == [0.75, 2, 4]
    assert "All steps together are 6x at S = 1k, 6x at S = 4k and 6x at S = 16k with D = 64." in text
    assert "keys outside at S = 1k with D = 64 (0.75x)" in text
    for case, row in zip(LESSONS["steps"].cases, rows, strict=True):
        flops = 4 * case.head_dim * case.seqlen_q**2 * case.batch * case.num_heads_q
        assert float(row["overlap, TFLOP/s"]) == pytest.approx(flops / 0.25e-3 / 1e12, rel=0.006)
        assert float(row["whole scores, TFLOP/s"]) == pytest.approx(flops / 1.5e-3 / 1e12, rel=0.006)


def test_a_step_that_was_not_timed_is_left_out(write, tmp_path):
    """All of one family, and of another what its kernels do not serve."""
    gone = made(write("steps", lambda case, peer: None if peer == "fwd_keys_outside" else MS[peer]), "steps", tmp_path)
    assert "in 3 forms" in words(gone)
    assert "FlashAttention 1" not in gone
    assert [float(part) for part in re.findall(r"\. ([\d.]+) times the speed\.", words(gone))] == [1.5, 4]
    some = made(write("steps", lambda case, peer: None if (peer, case.head_dim) == ("fwd_sm80", 128) else MS[peer]), "steps", tmp_path)
    assert [row["queries outside, TFLOP/s"] == "-" for row in table(some)] == [False] * 3 + [True] * 3


def test_what_is_drawn(write):
    file = records.read(write("batch"), last=True)
    page = lesson_pages.batch(lesson.rows_of(LESSONS["batch"], file), file)
    picture = page.picture
    assert [one.length for one in picture.panels] == ["sequences", "sequences", "key heads", "key heads"]
    assert picture.panels[0].lines == {"cupyflash": [(b, 0.5) for b in (1, 8, 64, 512)], "standard": [(b, 1.5) for b in (1, 8, 64, 512)]}
    assert [x for x, _ in picture.panels[3].lines["cupyflash"]] == [1, 8, 32]
    assert picture.log


def test_committed_pages_are_those_of_the_command(tmp_path):
    """Byte by byte, where a lesson has been measured; of the picture, what does not depend on matplotlib's version."""
    pages = {path.stem for path in (lesson.FOLDER / "lessons").glob("*.md")}
    assert pages == {name for name in LESSONS if lesson.file_of(name).exists()}
    for name in pages:
        assert run(name, "--to", tmp_path).exit_code == 0
        same = (tmp_path / "lessons" / f"{name}.md").read_bytes() == (lesson.FOLDER / "lessons" / f"{name}.md").read_bytes()
        assert same, f"make it again: cupyflash-bench lesson {name}"
        file = records.read(lesson.file_of(name), last=True)
        picture = LESSONS[name].page(lesson.rows_of(LESSONS[name], file), file).picture
        drawn = lesson.file_of(name).with_suffix(".svg").read_text()
        assert all(word in drawn for word in (picture.title, picture.source, *plot.looks(picture), *(one.title for one in picture.panels)))
        assert lesson.file_of(name).with_suffix(".png").stat().st_size < 60_000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "Missing argument"),
        (("speed",), "'speed' is not one of 'traffic', 'short', 'batch', 'steps'"),
        (("traffic", "--from", "/nowhere/a.jsonl"), "cannot read /nowhere/a.jsonl: No such file or directory"),
        (("traffic", "--from", "a.jsonl", "--measure", "b.jsonl"), "--measure writes a file and --from reads one"),
    ],
)
def test_mistakes_are_one_line(arguments, said):
    done = run(*arguments)
    assert done.exit_code == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_what_a_file_lacks_is_one_line(write, tmp_path, monkeypatch):
    case = LESSONS["short"].cases[2]
    path = write("short", lambda one, peer: None if (one, peer) == (case, "standard") else 1.0)
    done = run("short", "--from", path, "--to", tmp_path)
    assert done.exit_code == 2
    assert f"{path} has no time of standard for fwd bf16 B 1 S 512 H 12 D 64: measure it with --measure" in done.stderr
    assert not (tmp_path / "lessons").exists()
    strange = write("short", header={**HEADER, "devices": [{"name": "Abacus"}]})
    done = run("short", "--from", strange, "--to", tmp_path)
    assert done.exit_code == 2
    assert "Abacus" in done.stderr
    monkeypatch.setattr(lesson, "FOLDER", tmp_path)
    done = run("short")
    assert done.exit_code == 2
    assert "'short' has not been measured here: first --measure FILE.jsonl" in done.stderr


def test_a_folder_that_cannot_be_written_is_one_line(write, tmp_path):
    (tmp_path / "lessons").write_text("a file")
    done = run("short", "--from", write("short"), "--to", tmp_path)
    assert done.exit_code == 2
    assert "cannot write" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_setup(write, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "why_not", lambda: "no NVIDIA driver, so no GPU")
    done = run("short", "--measure", tmp_path / "a.jsonl")
    assert (done.exit_code, (tmp_path / "a.jsonl").exists()) == (3, False)
    assert "--measure times kernels on a GPU: no NVIDIA driver" in done.stderr
    path, find = write("short"), importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find(name, *rest))
    done = run("short", "--from", path, "--to", tmp_path)
    assert done.exit_code == 3
    assert "pip install 'cupyflash[plot]'" in done.stderr


def test_measured_lines_can_be_read(tmp_path, monkeypatch):
    """On the host, as it would be on a GPU: peers in turn, families as peers, and one that is not there."""
    forced = []

    @contextmanager
    def only_family(name):
        forced.append(name)
        yield

    monkeypatch.setattr(kernels, "only_family", only_family)
    monkeypatch.setattr(kernels, "families", lambda: ("fwd_sm80",))
    case = replace(LESSONS["steps"].cases[0], batch=1, seqlen_q=32, seqlen_k=32, num_heads_q=1, num_heads_kv=1, dtype="float32")
    few = LESSONS["steps"]._replace(cases=(case,), peers=("standard", "fwd_sm80", "fwd_sm90"))
    assert lesson.time_lesson(few, tmp_path / "a.jsonl", HOST) == 0
    file = records.read(tmp_path / "a.jsonl")
    assert list(file.results) == [(case, "standard"), (case, "fwd_sm80")]
    assert len(forced) > 7
    assert set(forced) == {"fwd_sm80"}
    assert set(file.environment["peers"]) == {"cupyflash", "standard"}
    lines = list(map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines()))
    assert [line.get("record") for line in lines] == ["environment", "ceilings", None, None]  # small enough to be committed


def test_words():
    assert [lesson_pages.number(x) for x in (64.0, 8.533, 0.5, 12345.6, 999.7)] == ["64", "8.53", "0.5", "12346", "1000"]
    assert [lesson_pages.listed(x) for x in ([], [1], [1, 2], [1, 2, 3])] == ["none", "1", "1 and 2", "1, 2 and 3"]
    assert [lesson_pages.span(x) for x in ([2.0], [3, 1.0, 2], [1.001, 1.002])] == ["2", "1 to 3", "1"]


def test_help_names_the_lessons():
    shown = run("--help").stdout
    assert all(f"{name}: {lesson.about}" in words(shown) for name, lesson in LESSONS.items())
