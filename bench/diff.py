"""`cupyflash-bench diff`: two files of timings, case by case."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from .cases import Case
from .cli import FAILED, GOOD, all_of, as_share, json_option, open_report
from .records import File, Result, in_both, origin, read
from .report import WIDE, Columns, Report, case_fields, digits
from .timing import NOISE

NVML = (("clock", "max_clock_mhz", "MHz"), ("power", "power_limit_w", "W"))
STYLES = {"SAME": "dim", "FASTER": "green", "SLOWER": "bold red", "UNSURE": "yellow"}


class Change(NamedTuple):
    """A case in both files: `ratio` is the second time over the first, `band` the change that the two runs could hide."""

    case: Case
    peer: str
    before: Result
    after: Result
    ratio: float
    band: float
    verdict: str
    why: str = ""


def judge(before: Result, after: Result, floor: float = 0.02) -> Change:
    """What two medians say, given how far the rounds of each are spread.

    The band is half the sum of the two spreads (interquartile ranges over the medians), or `floor` where that is more: beyond it the
    interquartile ranges no longer overlap. The ratio of the times is FASTER or SLOWER outside the band, inside it SAME; but UNSURE where
    the band is wider than 5 %, in which a change that matters could hide, or where the two were not timed in the same way. The floor is
    there because two runs differ by more than their rounds do: by the chip's temperature, its power, what ran before.
    """
    ratio, band = after.ms / before.ms, max(floor, (before.spread + after.spread) / 2)
    differ = [name for name in ("timer", "cold") if before.how.get(name, after.how.get(name)) != after.how.get(name, before.how.get(name))]
    how = " and ".join(f"{name} {before.how[name]} and {after.how[name]}" for name in differ)
    verdict = "SAME" if abs(math.log(ratio)) <= band else "SLOWER" if ratio > 1 else "FASTER"
    noisy = verdict == "SAME" and band > max(NOISE, floor)
    why = how or (f"a change of {band:.0%} could hide in the spreads" if noisy else "")
    return Change(after.case, after.peer, before, after, ratio, band, "UNSURE" if why else verdict, why)


file = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command("diff")
@all_of(
    click.argument("before", type=file),
    click.argument("after", type=file),
    click.option("--fail-if-slower", callback=as_share, metavar="3%", help="Exit code 1 where a SLOWER case is slower by more than this."),
    click.option("--floor", callback=as_share, default="2%", show_default=True, metavar="2%", help="No smaller change is called one."),
    click.option("--peers", metavar="NAMES", help="Only these, of those in the files."),
    click.option("--quiet", is_flag=True, help="Leave out the rows of what is SAME."),
    json_option,
)
def command(before: Path, after: Path, fail_if_slower: float | None, floor: float, peers: str | None, quiet: bool, json_file: Any) -> int:
    """What has become FASTER or SLOWER from one file of JSON lines to another.

    A change counts where the interquartile ranges of the two runs do not overlap, and from --floor on. UNSURE: the runs are too noisy to
    say (a band above 5 %), or were timed in different ways. Where a file has several runs of a case, their median and their largest
    spread count.
    """
    if fail_if_slower is not None and fail_if_slower < floor:
        raise click.BadParameter(f"it is below the --floor of {floor:.1%}, under which no change counts", param_hint="'--fail-if-slower'")
    files = read(before), read(after)
    chosen = names(files, peers)
    keys = [key for key in in_both(files) if key[1] in chosen]
    if not keys:
        raise click.BadParameter(f"{before} and {after} have no case in common")
    changes = [judge(files[0].results[key], files[1].results[key], floor) for key in keys]
    slow = [change for change in changes if fail_if_slower is not None and change.verdict == "SLOWER" and change.ratio > 1 + fail_if_slower]
    with ExitStack() as stack:
        report = open_report(json_file, stack, compared=[str(before), str(after)], floor=floor)
        show(report, files, changes, quiet=quiet)
        for one, other in (files, files[::-1]):
            show_alone(report, one, [key for key in one.results if key[1] in chosen and key not in other.results], quiet=quiet)
        summarise(report, changes)
        if fail_if_slower is not None:
            report.say(f"{len(slow) or 'none'} slower by more than {fail_if_slower:.1%}", "bold red" if slow else "bold green")
    return FAILED if slow else GOOD


def names(files: tuple[File, File], peers: str | None) -> set[str]:
    known = {peer for one in files for _, peer in one.results}
    chosen = set(peers.split(",")) if peers else known
    if unknown := sorted(chosen - known):
        raise click.BadParameter(f"no file has {unknown[0]!r}, only {', '.join(sorted(known))}", param_hint="'--peers'")
    return chosen


def show(report: Report, files: tuple[File, File], changes: list[Change], *, quiet: bool) -> None:
    for letter, one in zip("AB", files, strict=True):
        report.say(f"{letter}  {one.path.name}: {origin(one)}")
    if len(machines := {machine_of(one) for one in files}) > 1:
        report.say(f"not the same machine: {' and '.join(sorted(machines))}", "yellow")
    report.say()
    width = max(13, *(len(change.peer) + 1 for change in changes))
    rows = Columns(report.table, (("", width, 0), ("A ms", 9, 0), ("B ms", 9, 0), ("B / A", 8, 0), ("band", 8, WIDE), ("", 9, 0)))
    case = None
    for change in changes:
        report.record(
            {
                "record": "change",
                **case_fields(change.case),
                "peer": change.peer,
                "ms_before": change.before.ms,
                "ms_after": change.after.ms,
                **{name: getattr(change, name) for name in ("ratio", "band", "verdict", "why")},
            }
        )
        if quiet and change.verdict == "SAME":
            continue
        if change.case != case:
            case = change.case
            report.say(f"  {case.mode} {case.label}", "cyan")
        style = STYLES[change.verdict]
        times = ((digits(result.ms), "") for result in (change.before, change.after))
        rows.row(((change.peer, ""), *times, (f"{change.ratio:.3f}", style), (f"±{change.band:.1%}", "dim"), (change.verdict, style)))
        if change.why:
            report.say(f"    {change.why}", "dim")


def machine_of(file: File) -> str:
    """What a time depends on besides the code, as far as the header says it."""
    found = file.environment
    if file.ceilings.get("place") == "host" or not found.get("devices"):
        return f"{found.get('cpu')}, {found.get('cores')} cores"
    nvml = found.get("nvml") or {}
    words = (found["devices"][0]["name"], *(f"{name} {nvml[field]:g} {unit}" for name, field, unit in NVML if nvml.get(field)))
    return " ".join((*words, *([f"driver {nvml['driver_release']}"] if "driver_release" in nvml else [])))


def show_alone(report: Report, one: File, keys: list[tuple[Case, str]], *, quiet: bool) -> None:
    """The cases that only one of the files has, each with its peers."""
    if keys:
        report.say(f"\n{len(keys)} only in {one.path.name}" + ("" if quiet else ":"), "dim")
    cases: dict[Case, list[str]] = {}
    for case, peer in keys:
        report.record({"record": "alone", **case_fields(case), "peer": peer, "file": str(one.path)})
        cases.setdefault(case, []).append(peer)
    for case, peers in () if quiet else cases.items():
        report.say(f"  {case.mode} {case.label}: {', '.join(peers)}", "dim")


def summarise(report: Report, changes: list[Change]) -> None:
    """How many of each, and for each peer the median ratio: one that all share is the machine's, not the code's."""
    counts = Counter(change.verdict for change in changes)
    of_peers = {
        peer: float(np.median([change.ratio for change in changes if change.peer == peer]))
        for peer in dict.fromkeys(change.peer for change in changes)
    }
    report.record({"record": "summary", **{verdict: counts[verdict] for verdict in STYLES}, "median_ratio": of_peers})
    report.say()
    report.say(f"{len(changes)} in both: " + ", ".join(f"{counts[verdict]} {verdict}" for verdict in STYLES if counts[verdict]), "bold")
    report.say("median B / A: " + ", ".join(f"{peer} {ratio:.3f}" for peer, ratio in of_peers.items()), "dim")
