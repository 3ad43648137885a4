"""`cupyflash-bench lesson`: why tiles are fast, and where they are not, as pages made of measured JSON lines."""

from __future__ import annotations

import importlib.util
import json
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

import cupyflash

from . import gpu, kernels
from . import peers as contestants
from .cases import Case, Inputs
from .cli import GOOD, SETUP, all_of, exit_code, open_report, run_timings
from .explain import at_ceilings, keywords
from .lesson_pages import LESSONS, Lesson, Page, Row
from .peers import CupyFlash
from .plot import draw
from .records import File, origin, read
from .timing import Call, Ceilings, Place

FOLDER = Path(__file__).parent
MIN_S = 0.1  # of rounds: all lessons together are then less than two minutes of a GPU
WIDTH = 120


class Family(CupyFlash):
    """The library with the kernels of one family alone."""

    place = "gpu"

    def __init__(self, name: str) -> None:
        self.name = name

    def missing(self) -> str | None:
        return None if self.name in kernels.families() else "there is no such family"

    def bind(self, case: Case, inputs: Inputs) -> Call:
        call = super().bind(case, inputs)

        def forced() -> Any:
            with kernels.only_family(self.name):
                return call()

        return forced


def file_of(name: str) -> Path:
    return FOLDER / "results" / f"h200-lesson-{name}.jsonl"


@click.command("lesson", epilog="Lessons: " + "; ".join(f"{name}: {lesson.about}" for name, lesson in LESSONS.items()) + ".")
@all_of(
    click.argument("name", type=click.Choice([*LESSONS])),
    click.option(
        "--measure",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE.jsonl",
        help="Time the cases on this GPU, half a minute.",
    ),
    click.option("--from", "source", type=click.Path(path_type=Path), metavar="FILE.jsonl", help="Measured before; default the one here."),
    click.option("--to", "folder", type=click.Path(path_type=Path), metavar="DIR", help="Default the bench's own, with --from this one."),
)
def command(name: str, measure: Path | None, source: Path | None, folder: Path | None) -> int:
    """Make a page on what tiles save and where they do not: text, a table and a plot from measured times.

    Writes lessons/NAME.md and, under results/, the plot as PNG and SVG (pip install 'cupyflash[plot]'); the same bytes from the same
    FILE. With --measure it writes that file, and no page.
    """
    if measure:
        if source:
            raise click.UsageError("--measure writes a file and --from reads one: make the page by a second command")
        if reason := gpu.why_not():
            raise cupyflash.SetupError(f"--measure times kernels on a GPU: {reason}")
        return time_lesson(LESSONS[name], measure, gpu.open_place())
    if source is None and not file_of(name).exists():
        raise click.BadParameter(f"{name!r} has not been measured here: first --measure FILE.jsonl, then --from FILE.jsonl")
    if importlib.util.find_spec("matplotlib") is None:
        click.echo("cupyflash-bench: the plot of a lesson needs matplotlib: pip install 'cupyflash[plot]'", err=True)
        return SETUP
    file = read(source or file_of(name), last=True)
    folder = folder or (FOLDER if source is None else Path())
    page = LESSONS[name].page(rows_of(LESSONS[name], file), file)
    text, stem = folder / "lessons" / f"{name}.md", file.path.stem
    pictures = [folder / "results" / f"{stem}{kind}" for kind in (".png", ".svg")]
    try:
        for path in (text, pictures[0]):
            path.parent.mkdir(parents=True, exist_ok=True)
        for path in pictures:
            draw(page.picture, path)
        text.write_text(markdown(name, page, file), encoding="utf-8")
    except OSError as error:
        raise click.BadParameter(f"cannot write {error.filename}: {error.strerror}", param_hint="'--to'") from None
    for path in (text, *pictures):
        click.echo(f"{path}: {path.stat().st_size / 1e3:.0f} kB")
    return GOOD


def time_lesson(lesson: Lesson, json_file: Path, place: Place) -> int:
    """Time its cases. In the file are those lines that a page is made of: it is there to be committed."""
    known = contestants.peers_at(place.name, lesson.peers)
    families = [Family(name) for name in lesson.peers if name not in {peer.name for peer in known}]
    with ExitStack() as stack:
        report = open_report(str(json_file), stack, peers=contestants.versions([CupyFlash(), *known]))
        found = run_timings(report, lesson.cases, [*known, *families], place, min_s=MIN_S)
    lines = json_file.read_text(encoding="utf-8").splitlines(keepends=True)
    json_file.write_text("".join(line for line in lines if json.loads(line).get("record") != "run"), encoding="utf-8")
    return exit_code(found)


def rows_of(lesson: Lesson, file: File) -> list[Row]:
    """The cases of a lesson as the file has them; click.BadParameter where one is not in it."""
    devices = file.environment.get("devices") or [{}]
    ceilings = Ceilings(file.ceilings.get("flops_per_s"), file.ceilings.get("bytes_per_s"))
    rows = []
    for case in lesson.cases:
        results = {name: found for name in lesson.peers if (found := file.results.get((case, name)))}
        if missing := [name for name in lesson.peers if name not in results and name not in lesson.optional]:
            raise click.BadParameter(f"{file.path} has no time of {missing[0]} for {case.mode} {case.label}: measure it with --measure")
        try:
            model = cupyflash.explain(device=str(devices[0].get("name", "h200")), **keywords(case))
        except cupyflash.CupyflashError as error:
            raise click.BadParameter(f"{file.path}: {error}") from None
        host_us = {name: found.host_us for name, found in results.items() if found.host_us is not None}
        rows.append(Row(case, {name: found.ms for name, found in results.items()}, host_us, at_ceilings(model, ceilings)))
    return rows


def markdown(name: str, page: Page, file: File) -> str:
    command, stem = f"cupyflash-bench lesson {name}", file.path.stem
    made = f"""
        `{command} --measure {stem}.jsonl` has timed it ({origin(file)}): bfloat16, medians of rounds in turn, inputs out of the L2, no host
        time in what the GPU takes. `{command}` makes this page and its plot of `bench/results/{stem}.jsonl`. Bytes, bounds and blocks are
        those of `cupyflash.explain`, at the ceilings measured in the same run. A MB is 10⁶ bytes.
    """
    rows = (page.head, "|".join(["---:"] * len(page.cells[0])), *map(" | ".join, page.cells))
    return "\n".join(
        (
            f"# {page.title}",
            *paragraphs(page.text),
            *(f"| {row} |" for row in rows),
            f"\n![{page.picture.title}](../results/{stem}.png)\n",
            "## Where it does not help",
            *paragraphs(page.limits),
            "## How it was made",
            *paragraphs(made),
        )
    )


def paragraphs(text: str) -> Iterator[str]:
    """Those of a text that empty lines part, each in lines of WIDTH and with an empty one after it."""
    for paragraph in text.strip().split("\n\n"):
        words = " ".join(paragraph.split())
        indent = "  " * words.startswith("- ")
        yield textwrap.fill(words, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) + "\n"
