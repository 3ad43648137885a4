"""The commands of cupyflash-bench: they read the options, call the modules that do the work, and answer with an exit code.

0: good; 1: a check failed; 2: a mistake in the command; 3: no GPU, or something in the setup is missing.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import click

import cupyflash

from . import check as checking
from .cases import DTYPES, Case, available_dtypes, check_suite, tour_suite
from .machine import diagnose, environment
from .peers import LATE, PEERS, Outcome, Peer, compare
from .report import Report, console

GOOD, FAILED, USAGE, SETUP = 0, 1, 2, 3
TOUR_S = 22.0  # a case that would not be over by then is left out: the tour promises half a minute, also on a slow machine


def as_sizes(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Sizes in a list: "512", "4k", "1k,4k", "512:16k:x2" (each one twice the last)."""

    def size(text: str) -> int:
        number = int(text[:-1]) * 1024 if text[-1:] in ("k", "K") else int(text)
        if number < 1:
            raise ValueError
        return number

    def sizes(part: str) -> list[int]:
        if ":" not in part:
            return [size(part)]
        first, last, factor = part.split(":")
        if not factor.startswith("x") or int(factor[1:]) < 2:
            raise ValueError
        powers = itertools.accumulate(itertools.repeat(int(factor[1:])), lambda number, by: number * by, initial=size(first))
        return list(itertools.takewhile(lambda number: number <= size(last), powers))

    if value is None:
        return None
    try:
        return tuple(number for part in value.split(",") for number in sizes(part))
    except ValueError:
        raise click.BadParameter(f"{value!r} is no size: write 512, 4k, 1k,4k or 512:16k:x2") from None


def as_pair(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, int]:
    """One number or two: heads "8" or "32/8", head dims "128" or "192-128"."""
    try:
        numbers = [int(part) for part in value.replace("-", "/").split("/")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or min(numbers) < 1:
        raise click.BadParameter(f"{value!r} is neither a number nor a pair such as {param.metavar}")
    return numbers[0], numbers[-1]


def as_peers(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[Peer, ...]:
    known = {peer.name: peer for peer in PEERS}
    names = list(known) if value is None else value.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise click.BadParameter(f"there is no {unknown[0]!r} here, only {', '.join(known)}")
    return tuple(known[name] for name in names)


class Commands(click.Group):
    """A group whose first command is the tour, whose mistakes are one line, and whose commands return their exit code."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {option for parameter in self.get_params(ctx) for option in parameter.opts}
        if not args or (args[0].startswith("-") and args[0].split("=")[0] not in own):
            args = ["tour", *args]
        return super().parse_args(ctx, args)

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> Any:
        try:
            sys.exit(super().main(args, *rest, **{**options, "standalone_mode": False}) or GOOD)
        except click.UsageError as error:
            command = error.ctx.command_path if error.ctx else "cupyflash-bench"
            message = " ".join(error.format_message().split()).rstrip(".")
            click.echo(f"{command}: {message} (see {command} --help)", err=True)
            sys.exit(USAGE)
        except cupyflash.SetupError as error:
            click.echo(f"cupyflash-bench: {error}", err=True)
            sys.exit(SETUP)
        except click.Abort:
            click.echo("cupyflash-bench: interrupted", err=True)
            sys.exit(130)  # as a shell reports SIGINT


F = TypeVar("F", bound=Callable[..., Any])


def json_option(function: F) -> F:
    text = "Write JSON lines to FILE, the environment first; '-' is stdout, and the table moves to stderr."
    return click.option("--json", "json_file", type=click.Path(dir_okay=False, allow_dash=True), metavar="FILE", help=text)(function)


def open_report(json_file: str | None, stack: ExitStack) -> Report:
    """The report of a command, with the header record already in its JSON lines."""
    if json_file is None:
        return Report(console())
    try:
        lines = click.open_file(json_file, "w", encoding="utf-8")
    except OSError as error:
        raise click.BadParameter(f"cannot write {json_file}: {error.strerror}", param_hint="'--json'") from None
    report = Report(console(stderr=json_file == "-"), stack.enter_context(lines))
    report.record(environment())
    return report


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(cupyflash.__version__, message="cupyflash %(version)s")
def main() -> None:
    """Exact attention on this machine: what it costs, whether it is right, what is missing.

    Without a command: a tour of at most 30 seconds.

    Exit codes: 0 good, 1 a check failed, 2 a mistake in the command, 3 no GPU or something missing in the setup.
    """


@main.command()
@json_option
def tour(json_file: str | None) -> int:
    """What this machine does, in 30 seconds (the default)."""
    deadline = time.perf_counter() + TOUR_S
    with ExitStack() as stack:
        report = open_report(json_file, stack)
        has_gpu = report.introduce(environment())
        outcomes = run_timings(report, tour_suite(), PEERS, min_s=0.3, deadline=deadline)
        report.memory_lesson(outcomes)
        report.next_steps(
            ("check", "is every option right on this machine?"),
            ("fwd --seqlen 1k:4k:x2 --heads 8/2 --causal", "the same for your shapes"),
            ("doctor", "is everything there that the GPU needs?" if has_gpu else "what a GPU would need"),
        )
    return exit_code(outcomes)


@main.command()
@click.option("--batch", callback=as_sizes, default="1", show_default=True, metavar="SIZES", help="Sequences.")
@click.option("--seqlen", callback=as_sizes, default="1k", show_default=True, metavar="SIZES", help="Queries, and keys as many.")
@click.option("--seqlen-k", callback=as_sizes, metavar="SIZES", help="Keys, where they are not as many.")
@click.option("--heads", callback=as_pair, default="8", show_default=True, metavar="32/8", help="Query heads / key heads.")
@click.option("--dim", callback=as_pair, default="64", show_default=True, metavar="192-128", help="Head dim of q and k - of v.")
@click.option("--dtype", default="fp32", show_default=True, metavar="NAME", help=", ".join(DTYPES.values()) + ".")
@click.option("--causal/--no-causal", default=False, show_default=True, help="Bottom-right where the lengths differ.")
@click.option("--peers", callback=as_peers, metavar="NAMES", help=f"Of {', '.join(peer.name for peer in PEERS)}; default all.")
@click.option("--min-time", type=click.FloatRange(min=0.01), default=0.5, show_default=True, metavar="S", help="Seconds of rounds a peer.")
@json_option
def fwd(
    batch: tuple[int, ...],
    seqlen: tuple[int, ...],
    seqlen_k: tuple[int, ...] | None,
    heads: tuple[int, int],
    dim: tuple[int, int],
    dtype: str,
    causal: bool,
    peers: tuple[Peer, ...],
    min_time: float,
    json_file: str | None,
) -> int:
    """Time the forward pass of your own shapes.

    SIZES are lists: 512, 4k, 1k,4k or 512:16k:x2 (each twice the last); every combination is timed.
    """
    if heads[0] % heads[1]:
        raise click.BadParameter(f"{heads[0]} query heads are no multiple of {heads[1]} key heads", param_hint="'--heads'")
    name = {brief: name for name, brief in DTYPES.items()}.get(dtype, dtype)
    if name not in DTYPES:
        raise click.BadParameter(f"{dtype!r} is not one of {', '.join(DTYPES.values())}", param_hint="'--dtype'")
    if name not in available_dtypes():
        raise click.BadParameter("bfloat16 on the host needs ml_dtypes: pip install ml_dtypes", param_hint="'--dtype'")
    shapes = ((b, sq, sk) for b in batch for sq in seqlen for sk in seqlen_k or (sq,))
    with ExitStack() as stack:
        cases = [Case(*shape, *heads, *dim, name, causal) for shape in shapes]
        return exit_code(run_timings(open_report(json_file, stack), cases, peers, min_s=min_time))


@main.command()
@click.option("--full", is_flag=True, help="Add long sequences and 400 random cases: half a minute.")
@json_option
def check(full: bool, json_file: str | None) -> int:
    """Compare every option with float64 on this machine; exit code 1 if anything is wrong."""
    suite = check_suite(full=full)
    start = time.perf_counter()
    with ExitStack() as stack:
        report = open_report(json_file, stack)
        report.start_checks(available_dtypes())
        wrong, skipped, total = [], [], 0
        with report.progress(sum(map(len, suite.values()))):
            for group, cases in suite.items():
                report.advance(to=group)
                verdicts = []
                for case in cases:
                    verdicts.append((case, checking.run(case)))
                    report.advance(1)
                report.checks(group, verdicts)
                wrong += [(case, verdict) for case, verdict in verdicts if not verdict.ok]
                skipped += [(case, verdict) for case, verdict in verdicts if verdict.skipped]
                total += len(cases)
        report.say()
        for case, verdict in wrong:
            report.say(f"FAIL {case.label}: {verdict}", "bold red")
            report.say(f"     {case}", "dim", paste=True)
        for note in sorted({verdict.note for _, verdict in skipped}):
            report.say(f"skip {note}", "yellow")
        passed = total - len(wrong) - len(skipped)
        rest = (f", {len(wrong)} FAILED" if wrong else "") + (f", {len(skipped)} not supported" if skipped else "")
        report.say(f"{passed} of {total} pass{rest}, {time.perf_counter() - start:.0f} s", "bold red" if wrong else "bold green")
    return FAILED if wrong else GOOD


@main.command()
def doctor() -> int:
    """Say what is installed and what is missing, to read or to paste in an issue.

    Works without a GPU and without CuPy. Exit code 0: arrays in GPU memory can be computed here; 3: not, and the text says why.
    """
    found = diagnose()
    Report(console()).diagnosis(found)
    return FAILED if not found.host.ok else SETUP if found.problems else GOOD


def run_timings(
    report: Report, cases: Sequence[Case], peers: Sequence[Peer], *, min_s: float, deadline: float | None = None
) -> list[tuple[Case, list[Outcome]]]:
    """Time the cases; print and record each as it is done."""
    report.start_timings(peers[0].place.ceilings())
    outcomes = []
    too_much = math.inf  # FLOPs of the first case that the deadline dropped: another as large is not even tried
    with report.progress(len(cases)):
        for case in cases:
            report.advance(to=f"{case.mode} {case.label}")
            if case.flops < too_much:
                found = compare(case, peers, min_s=min_s, deadline=deadline)
                if any(outcome.why_not == LATE for outcome in found):
                    too_much = case.flops
            else:
                found = [Outcome(peer.name, why_not=LATE) for peer in peers]
            report.timings(case, found)
            report.advance(1)
            outcomes.append((case, found))
    report.explain_columns()
    return outcomes


def exit_code(outcomes: list[tuple[Case, list[Outcome]]]) -> int:
    """A wrong result is a failed check; a peer that could not run is not."""
    return FAILED if any(outcome.verdict and not outcome.verdict.ok for _, found in outcomes for outcome in found) else GOOD
