"""`cupyflash-bench explain`: the report of `cupyflash.explain` for one case or a sweep, and what this GPU measures beside it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import click

import cupyflash

from . import gpu, ncu
from . import peers as contestants
from .cases import CACHE_DTYPES, CacheCase, Case, explain_suite
from .cli import (
    FAILED,
    GOOD,
    SETUP,
    SIZES,
    all_of,
    as_cases,
    as_sizes,
    cache_cases,
    case_options,
    data_options,
    deterministic_option,
    dtype_name,
    exit_code,
    json_option,
    open_report,
)
from .peers import OURS, Comparison
from .report import Report, case_fields, digits, si
from .timing import HOST, Ceilings, Place

TOLERANCE = 0.1  # of the bytes counted: as near the model's have to be
SUITES = {"acceptance": explain_suite}


class Measured(NamedTuple):
    """What a GPU says of a case: the time, where the result was right, and the launches with their bytes, or why there are none."""

    found: Comparison
    launches: list[ncu.Counted]
    why_not: str | None

    @property
    def num_bytes(self) -> int:
        return sum(one.read + one.written for one in self.launches)


@click.command("explain", epilog=SIZES.replace("timed", "explained"))
@all_of(
    *case_options(),
    *data_options("64"),
    click.option("--mode", type=click.Choice(["fwd", "bwd"]), default="fwd", show_default=True, help="The forward pass, or the backward."),
    deterministic_option,
    click.option("--cache-len", callback=as_sizes, metavar="SIZES", help="Keys of each sequence in a cache; --seqlen is 1 then, a decode."),
    click.option("--page-size", callback=as_sizes, metavar="SIZES", help="Slots of a page of the cache; default a cache without pages."),
    click.option("--cache", type=click.Choice([*CACHE_DTYPES.values()]), help="What the cache is kept in; default --dtype."),
    click.option("--cases", "suite", type=click.Choice([*SUITES]), help="Named cases, in place of all options above."),
    click.option("--device", metavar="NAME", help="h200, h100, a100, sm_90a, ...; default the GPU here, else h200."),
    click.option("--measure", is_flag=True, help="Beside it the time on this GPU and, where ncu is installed, the bytes of its memory."),
    json_option,
)
def command(suite: str | None, device: str | None, measure: bool, json_file: str | None, dtype: str | None, **options: Any) -> int:
    """What a call launches, computes and moves, and whether tiles help it.

    Needs no GPU: the numbers come from the plan of the call and from what the GPU reaches. --measure compares them with a GPU; with --cases
    acceptance, exit code 1 if its bytes are more than 10 % off.
    """
    context = click.get_current_context()
    given = [name for name in options if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT]
    if suite and (given or dtype):
        raise click.UsageError(f"--cases says what --{(given or ['dtype'])[0].replace('_', '-')} would")
    cases = list(SUITES[suite]()) if suite else stated_cases(dtype_name(dtype or "bf16"), **options)
    if measure and device not in (None, "cuda"):
        raise click.BadParameter("what is measured is this GPU: leave --device out", param_hint="'--measure'")
    place = gpu.open_place() if measure or device == "cuda" else None
    here = "h200" if gpu.why_not() else "cuda"
    try:
        found = [cupyflash.explain(device=device or here, **keywords(case)) for case in cases]
    except cupyflash.CupyflashError as error:
        raise click.UsageError(str(error)) from None
    off = False
    with ExitStack() as stack:
        report = open_report(json_file, stack)
        ceilings = place.ceilings() if place and measure else None
        for n, (case, explained) in enumerate(zip(cases, found, strict=True)):
            if place and ceilings:
                explained = at_ceilings(explained, ceilings)
            if n:
                report.say()
            elif device is None and here == "h200":
                report.say("There is no GPU, so this is of an H200; --device names others.", "dim")
            show(report, explained)
            measured = measure_case(case, place) if place and measure else None
            if measured:
                show_measured(report, explained, measured)
                off |= exit_code([measured.found]) == FAILED or bool(suite and not near(explained, measured))
            report.record({"record": "explain", **case_fields(case), **explained.to_dict(), **measured_fields(explained, measured)})
    return FAILED if off else SETUP if suite and measure and ncu.why_not() else GOOD


def stated_cases(
    dtype: str,
    *,
    mode: str,
    deterministic: bool,
    cache_len: tuple[int, ...] | None,
    page_size: tuple[int, ...] | None,
    cache: str | None,
    seqlen: tuple[int, ...] | None,
    **options: Any,
) -> Sequence[Case]:
    """Every combination of the options; no array is made, so that no dtype needs a package here."""
    if deterministic and mode != "bwd":
        raise click.BadParameter("it is for --mode bwd: results of the forward always are", param_hint="'--deterministic'")
    if cache_len is None:
        if page_size or cache:
            raise click.BadParameter("it is for a cache: add --cache-len", param_hint="'--page-size'" if page_size else "'--cache'")
        made = as_cases(HOST, dtype="float32", seqlen=seqlen, backward=mode == "bwd", deterministic=deterministic, **options)
        return [replace(case, dtype=dtype) for case in made]
    refused = ("seqlen_k", "tokens", "varlen", "longest", "window", "softcap", "sink", "causal")
    if wrong := next((name for name in refused if options[name]), None) or (mode == "bwd" and "mode"):
        raise click.BadParameter("it is not for a cache, which --cache-len is about", param_hint=f"'--{wrong.replace('_', '-')}'")
    heads, dim, batch = options["heads"], options["dim"], options["batch"]
    kept = {brief: name for name, brief in CACHE_DTYPES.items()}.get(cache or "", "")
    sizes: dict[str, Any] = {"batch": batch, "seqlen_k": cache_len, "rows": seqlen or (1,), "page_size": page_size or (0,)}
    caches: list[CacheCase] = []
    for one in dim:
        pairs = (heads or (max(1, 2048 // one[0]),) * 2,)
        caches += cache_cases(HOST, **sizes, cells=None, heads=pairs, cache=None, dim=(one,), dtype="float32")
    return [replace(case, dtype=dtype, cache_dtype=kept) for case in caches]


def keywords(case: Case) -> dict[str, Any]:
    """The case as `cupyflash.explain` takes it."""
    found = contestants.problem(case)
    if case.lengths:
        found = {name: value for name, value in found.items() if name not in ("batch", "seqlen_q", "seqlen_k", "packed")}
        found["lengths"] = case.lengths
    return found | ({"deterministic": True} if case.deterministic else {})


def at_ceilings(explained: Any, ceilings: Ceilings) -> Any:
    """By what this GPU reached just now; the matmul says nothing of other dtypes than those of 16 bits."""
    known = {name: rate for name, rate in zip(("half", "bytes_per_s"), ceilings, strict=True) if rate}
    return replace(explained, gpu=explained.gpu._replace(**known, source="measured now"))


def measure_case(case: Case, place: Place) -> Measured:
    """Bytes first, while nothing of the case is in this process's memory."""
    try:
        launches, why_not = ncu.count(case), None
    except ncu.NcuError as error:
        launches, why_not = [], str(error)
    return Measured(contestants.compare(case, contestants.peers_at(place.name, (OURS,)), place), launches, why_not)


def near(explained: Any, measured: Measured) -> bool:
    """Whether the model's bytes are near those counted, or nothing was."""
    return not measured.launches or abs(explained.num_bytes / measured.num_bytes - 1) <= TOLERANCE


def show(report: Report, explained: Any) -> None:
    """The report, its headings in bold, the verdict in colour."""
    verdict = "green" if explained.helps else "yellow"
    for n, line in enumerate(explained.text(max(report.table.width, 60)).splitlines()):
        heading = n == 0 or line.startswith(("Launches", "HBM bytes", "Roofline"))
        report.say(line, "bold" if heading else verdict if line.startswith("Flash ") else "")


def show_measured(report: Report, explained: Any, measured: Measured) -> None:
    """The time and the bytes of each kernel, and what the model says of them."""
    report.say("\nMeasured", "bold")
    for outcome in measured.found.outcomes:
        if outcome.timing is None:
            report.say(f"  not timed: {outcome.why_not or outcome.verdict}", "bold red")
            continue
        ms, bound = outcome.timing.ms, explained.seconds
        share = f", the bound is {bound * 1e3 / ms:.0%} of it" if bound else ""
        report.say(f"  time         {digits(ms)} ms ± {outcome.timing.spread:.1%}{share}")
    if measured.why_not:
        report.say(f"  bytes        not counted: {measured.why_not}", "yellow")
        return
    for counted, modelled in itertools.zip_longest(measured.launches, explained.tiled):
        name = counted.kernel if counted else modelled.kernel.partition("__")[0]
        report.say(f"  {name:<13}{ratio_line(modelled.num_bytes if modelled else 0, counted.read + counted.written if counted else 0)}")
    style = "green" if near(explained, measured) else "bold red"
    report.say(f"  {'all bytes':<13}{ratio_line(explained.num_bytes, measured.num_bytes)}", style)


def ratio_line(modelled: int, counted: int) -> str:
    ratio = f", {modelled / counted:.2f} of it" if counted else ""
    return f"{si(counted, 'B')} counted, model {si(modelled, 'B')}{ratio}"


def measured_fields(explained: Any, measured: Measured | None) -> dict[str, Any]:
    if measured is None:
        return {}
    timing = next((outcome.timing for outcome in measured.found.outcomes), None)
    return {
        "measured": {
            "ms": timing.ms if timing else None,
            "spread": timing.spread if timing else None,
            "clock_mhz": timing.clock_mhz if timing else None,
            "num_bytes": measured.num_bytes or None,
            "launches": [one._asdict() for one in measured.launches],
            "model_over_counted": explained.num_bytes / measured.num_bytes if measured.num_bytes else None,
            "not_counted": measured.why_not,
        }
    }
