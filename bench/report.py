"""What comes out: the tables (plain text where the terminal, a pipe or NO_COLOR asks for it), the progress bar, and the JSON lines."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from . import limits
from .cases import DTYPES, SEED, CacheCase, Case, drawn_lengths, short
from .check import LIMITS, Verdict
from .kernels import Built, Trial, source_line
from .machine import Diagnosis
from .peers import OURS, Comparison, Outcome
from .timing import NOISE, Place, Timing
from .tune import Tuned

WIDE = 80  # the tables need 76 columns; below WIDE they drop some and fit 60
WIDER = 90  # what the table of a GPU needs
NAME = 11  # what the names of most peers need, and with it the tables; longer ones make both wider
MAX_LENGTHS = 300  # as many numbers no record has
PIPED = 100  # a pipe has no width of its own, and nobody gains from columns dropped in a log


def console(*, stderr: bool = False) -> Console:
    """A console that writes no escape code into a pipe, nor with NO_COLOR set (rich alone would keep bold and dim)."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS") else PIPED
    return Console(stderr=stderr, highlight=False, width=width, color_system=None if os.environ.get("NO_COLOR") else "auto")


# --- JSON lines ---------------------------------------------------------------------------------------------------------------------


def case_fields(case: Case) -> dict[str, Any]:
    sizes = ("head_dim", "head_dim_v", "num_heads_q", "num_heads_kv", "batch", "seqlen_q", "seqlen_k")
    fields = {name: getattr(case, name) for name in ("mode", *sizes, "causal", "window_size", "softcap", "dtype")}
    fields |= {"deterministic": True} if case.deterministic else {}
    fields |= {"extras": list(case.extras)} if case.extras else {}
    if isinstance(case, CacheCase):
        return {**fields, "page_size": case.page_size or None, "cache_dtype": case.dtypes[1]}
    return {**fields, **packing_fields(case)} if case.lengths else fields


def packing_fields(case: Case) -> dict[str, Any]:
    """What tells packed sequences from others and makes them again: how many there are is `batch`; `lengths` is null where they are
    too many to read, `seed` where they are not those of `drawn_lengths` with that seed."""
    tokens, longest = case.tokens[0], max(case.lengths)
    drawn = not case.equal and case.lengths == drawn_lengths(tokens, longest)
    lengths = list(case.lengths) if case.batch < MAX_LENGTHS else None
    return {"tokens": tokens, "longest": longest, "seed": SEED if drawn else None, "lengths": lengths}


def result_line(found: Comparison, outcome: Outcome) -> dict[str, Any]:
    """A timed outcome: the one line without a "record" field, which every other line has.

    Decode says gbps, everything else tflops, because that is what limits each; more than one token over a cache, both. host_us is null on
    host arrays: there the call is host time from end to end, and `ms` has said it. ratio_to_best is this peer's speed over that of the
    fastest *other* peer of the case, so a winner shows by how much (null when it ran alone). `cold` is whether each call found its inputs
    out of the L2 cache, null where that is not controlled; `error` is the largest of the check before the timing, `kernel` the variant that
    the library chose, of a bwd that or those that compute the gradients.
    """
    case, timing = found.case, timed(outcome)
    return {
        **case_fields(case),
        "peer": outcome.peer,
        "ms": timing.ms,
        "spread": timing.spread,
        **rate_fields(case, timing),
        "host_us": timing.host_us,
        "ratio_to_best": outcome.ratio_to_best,
        "timer": outcome.timer or found.timer,
        "cold": found.cold,
        "rounds": timing.rounds,
        "clock_mhz": timing.clock_mhz,
        "error": finite(outcome.verdict.error) if outcome.verdict else None,
        "kernel": found.kernel if outcome.peer == OURS else None,
        "note": "; ".join(notes(found)) or None,
    }


def notes(found: Comparison) -> list[str]:
    apart = [f"{outcome.peer} by the wall clock" for outcome in found.outcomes if outcome.timer]
    return [text for text in (found.note, f"slowed by {found.slowed}" if found.slowed else "", *apart) if text]


def rate_fields(case: Case, timing: Timing) -> dict[str, float]:
    gbps = {"gbps": case.num_bytes / timing.ms / 1e6} if case.mode == "decode" else {}
    return {**gbps, **({"tflops": case.flops / timing.ms / 1e9} if shows_flops(case) else {})}


def shows_flops(case: Case) -> bool:
    """One token over a cache waits for bytes alone; of a chunk of tokens either may be the limit."""
    return case.mode != "decode" or case.seqlen_q > 1


def tile_record(tuned: Tuned, name: str, trial: Trial | None, outcome: Outcome | None) -> dict[str, Any]:
    """One row of a tuning, a tile or a peer (whose `kernel` is null): what it was compiled to, and its time or why it has none."""
    found, verdict, timing = tuned.found, outcome.verdict if outcome else None, outcome.timing if outcome else None
    to_now, to_peer = tuned.ratios(outcome) if outcome and timing else (None, None)
    built = trial.built._asdict() if trial else {}
    wrong = str(verdict) if verdict and not verdict.ok else None
    return {
        "record": "tile",
        **case_fields(found.case),
        "tile": name,
        "kernel": built.get("name"),
        **{field: built.get(field) for field in ("registers", "smem_bytes", "spilled_bytes", "warnings")},
        "is_now": trial is not None and trial is tuned.trials[0],
        "not_timed": (trial.why_not if trial else None) or (outcome.why_not if outcome else None) or wrong,
        "error": finite(verdict.error) if verdict else None,
        **({"ms": timing.ms, "spread": timing.spread, **rate_fields(found.case, timing)} if timing else {"ms": None}),
        **({"rounds": timing.rounds, "clock_mhz": timing.clock_mhz, "timer": found.timer, "cold": found.cold} if timing else {}),
        "ratio_to_now": to_now,
        "ratio_to_peer": to_peer,
    }


def outcome_record(case: Case, outcome: Outcome) -> dict[str, Any]:
    """What is kept out of the result line: the first call, memory, the check before the timing, or why there is no result."""
    verdict = outcome.verdict
    return {
        "record": "run",
        **case_fields(case),
        "peer": outcome.peer,
        "first_call_ms": outcome.first_ms,
        "peak_bytes": outcome.peak_bytes,
        "error": finite(verdict.error) if verdict else None,
        "limit": verdict.limit if verdict else None,
        "not_timed": outcome.why_not or (str(verdict) if verdict and not verdict.ok else None),
    }


def check_record(group: str, case: Case, verdict: Verdict) -> dict[str, Any]:
    errors = {"error": finite(verdict.error), "limit": verdict.limit, "lse_error": finite(verdict.lse_error)}
    return {"record": "check", "group": group, **asdict(case), **errors, "ok": verdict.ok, "skipped": verdict.skipped, "note": verdict.note}


def finite(error: float | None) -> float | None:
    """Strict JSON has no infinity: an error without bound (other shape, NaN elsewhere, an exception) is null, and the record says so."""
    return error if error is not None and math.isfinite(error) else None


def timed(outcome: Outcome) -> Timing:
    if outcome.timing is None:
        raise ValueError(f"{outcome.peer} was not timed: {outcome.why_not or outcome.verdict}")
    return outcome.timing


def conditions(found: Comparison) -> list[str]:
    """How a case was timed: the timer, the caches, the clock, the kernel."""
    clocks = [outcome.timing.clock_mhz for outcome in found.outcomes if outcome.timing and outcome.timing.clock_mhz]
    low, high = (f"{bound(clocks):.0f}" for bound in (min, max)) if clocks else ("", "")
    clock = f"{low} MHz" if low == high else f"{low}-{high} MHz"
    warmth = {None: "", True: "cold", False: "hot"}[found.cold]
    return [text for text in (found.timer, warmth, clock if clocks else "clock unknown", found.kernel, *notes(found)) if text]


# --- text ---------------------------------------------------------------------------------------------------------------------------


def digits(value: float) -> str:
    """Three significant digits without an exponent: 0.0123, 1.23, 12.3, 123, 1234."""
    rounded = float(f"{value:.3g}")  # first, or 9.999 would become "10.00"
    if rounded <= 0 or rounded >= 1000:
        return f"{value:.0f}"
    return f"{rounded:.{max(0, 2 - math.floor(math.log10(rounded)))}f}"


def si(value: float, unit: str) -> str:
    """41_943_040 B -> "41.9 MB"."""
    rounded = float(f"{value:.3g}")
    power = min(int(math.log10(rounded) // 3), 4) if rounded >= 1 else 0
    return f"{digits(rounded / 1000**power)} {' kMGT'[power].strip()}{unit}"


class Columns:
    """A table printed row by row, while the work goes on: (title, width, terminal width from which it is shown), the first to the left."""

    def __init__(self, table: Console, columns: Sequence[tuple[str, int, int]]) -> None:
        self.table = table
        self.columns = [(width, table.width >= shown_from) for _, width, shown_from in columns]
        self.row([(title, "bold") for title, _, _ in columns])

    def row(self, cells: Iterable[tuple[str, str]]) -> None:
        line = Text("  ", no_wrap=True, overflow="ellipsis")
        for index, ((text, style), (width, shown)) in enumerate(zip(cells, self.columns, strict=True)):
            if shown:
                line.append(text.rjust(width) if index else text.ljust(width), style)
        line.rstrip()
        self.table.print(line)


class Report:
    """Takes what a command finds as it is found: rows go to `table`, records to `lines` (each flushed, so that a break loses nothing)."""

    def __init__(self, table: Console, lines: IO[str] | None = None) -> None:
        self.table = table
        self.lines = lines
        self.noise = NOISE
        self.command_of: Callable[[Case], str] | None = None  # to print it with each case
        bar = BarColumn(bar_width=20)
        columns = (TextColumn("  {task.description}"), bar, MofNCompleteColumn(), TimeElapsedColumn())
        errors = console(stderr=True)
        self._bar = Progress(*columns, console=errors, transient=True) if errors.is_terminal else None
        self._task: TaskID | None = None

    def record(self, fields: dict[str, Any]) -> None:
        if self.lines is not None:
            self.lines.write(json.dumps(fields, allow_nan=False) + "\n")
            self.lines.flush()

    def say(self, text: str = "", style: str = "", *, paste: bool = False) -> None:
        """A paragraph, broken at the terminal's width; what is there to `paste` stays whole, whatever the width."""
        if paste:
            self.table.print(Text(text, style), soft_wrap=True)
            return
        for line in Text(text, style).wrap(self.table, self.table.width):
            line.rstrip()
            self.table.print(line)

    @contextmanager
    def progress(self, total: int) -> Iterator[None]:
        """A bar on stderr, only if that is a terminal, and gone when the work is."""
        if self._bar is None:
            yield
            return
        self._task = self._bar.add_task("", total=total)
        with self._bar:
            yield

    def advance(self, by: int = 0, *, to: str | None = None) -> None:
        """The bar: `by` more are done, and `to` is what comes now."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=by, description=to)

    @contextmanager
    def _printing(self) -> Iterator[None]:
        """Rows and the bar may share a terminal: the bar steps aside while a row is printed."""
        if self._bar is not None:
            self._bar.stop()
        try:
            yield
        finally:
            if self._bar is not None:
                self._bar.start()

    # Timing ---------------------------------------------------------------------------------------------------------------------

    def introduce(self, machine: dict[str, Any], place: Place) -> None:
        """What this machine is, and where the arrays of what follows are."""
        memory = f", {machine['memory_bytes'] / 1e9:.0f} GB" if machine["memory_bytes"] else ""
        gpus = ", ".join(f"{gpu['name']} ({gpu['arch']})" for gpu in machine["devices"]) or "none"
        self.say(f"cupyflash {machine['cupyflash']}: tiled attention and the three-step formula", "bold")
        self.say(f"  cpu   {machine['cpu']}, {machine['cores']} cores{memory}")
        self.say(f"  numpy {machine['numpy']}, {machine['blas'] or 'BLAS unknown'}")
        self.say(f"  gpu   {gpus}" + ("" if place.arch else ": arrays are NumPy"))

    def start_timings(self, place: Place, names: Iterable[str], cases: Sequence[Case]) -> None:
        """Measure what the machine can reach, and begin the table, in which these peers have room and these cases what limits them."""
        kept = limits.stored(place)
        self._ceilings = kept.ceilings if kept else place.ceilings()
        self.record({"record": "ceilings", "place": place.name, **self._ceilings._asdict(), "measured": kept.day if kept else None})
        flops, read = self._ceilings
        matmul = f"{si(flops, 'FLOP/s')} matmul" if flops else "matmul unknown (no cuBLAS)"
        self.say(f"  peak  {matmul}, {si(read, 'B/s') if read else 'unknown'} read, measured {kept.day if kept else 'now'}\n")
        queued = place.arch is not None
        self._name = max([NAME, *(len(name) + 1 for name in names)])
        wide, wider = (width + self._name - NAME for width in (WIDE, WIDER))
        first_ms = ("first ms", 9, wider if queued else wide)
        host_us = (("host us", 9, wide),) if queued else ()
        self._both = any(case.mode == "decode" and shows_flops(case) for case in cases)
        second_rate = (("FLOP/s", 13, wider + 10),) if self._both else ()
        rest = (*second_rate, *host_us, ("of peak", 9, wide), ("memory", 9, 0), ("speed", 8, 0))
        self._rows = Columns(self.table, (("", self._name, 0), first_ms, ("ms", 9, 0), ("±", 6, wide), ("rate", 14, 0), *rest))
        self._queued = queued

    def explain_columns(self, modes: Container[str]) -> None:
        """What the numbers of the timing table mean, where they are read."""
        self.say()
        queued = (
            "ms      on the GPU alone; no host time is in it unless the timer is wall",
            "host us until a warm call returns, its work only queued",
            "cold    rotating buffers, so that no call finds its inputs in L2",
        )
        flops = "2 (D + Dv) FLOPs a visible pair and query head"
        rates = {
            "fwd": flops,
            "bwd": "2 (3 D + 2 Dv) FLOPs a visible pair and query head, the scores computed again among them",
            "decode": "bytes of q, k, v and out, each once",
        }
        for line in (
            *(f"{mode:<8}{text}" for mode, text in rates.items() if mode in modes),
            *([f"FLOP/s  {flops}"] if self._both else []),
            *(queued if self._queued else ()),
            "memory  the most that a call holds beyond its inputs",
            f"speed   against the fastest other; ~: spread above {self.noise * 100:.3g}%"
            + (", or clock held down" if self._queued else ""),
        ):
            self.say(f"  {line}", "dim")

    def memory_lesson(self, found: Sequence[Comparison]) -> None:
        """The table's point in a sentence: what the largest case that both did held in tiles and as whole scores, and where that leads."""
        held = [(one.case, {outcome.peer: outcome.peak_bytes or 0 for outcome in one.outcomes if outcome.timing}) for one in found]
        if both := [(case, peaks) for case, peaks in held if {OURS, "standard"} <= peaks.keys()]:
            case, peaks = max(both, key=lambda one: one[0].num_scores)
            seqlen = case.seqlen_q
            tiled, whole = si(peaks[OURS], "B"), si(peaks["standard"], "B")
            grown = si(peaks["standard"] * ((1 << 18) / seqlen) ** 2, "B")
            self.say(f"\nWith {short(seqlen)} tokens the formula holds {whole}, the tiles {tiled}. With 256k it would hold {grown}.")

    def next_steps(self, *steps: tuple[str, str]) -> None:
        self.say("\nNext", "bold")
        for command, what in steps:
            self.say(f"  cupyflash-bench {command:<44}{what}" if self.table.width >= 90 else f"  cupyflash-bench {command}")

    def timings(self, found: Comparison) -> None:
        for outcome in found.outcomes:
            if outcome.timing:
                self.record(result_line(found, outcome))
            self.record(outcome_record(found.case, outcome))
        with self._printing():
            self.say(f"  {found.case.mode} {found.case.label}", "cyan")
            if self.command_of:
                self.say(f"  {self.command_of(found.case)}", "dim", paste=True)
            if self._queued and found.timer:
                self.say(f"  {', '.join(conditions(found))}", "dim")
            for outcome in found.outcomes:
                if outcome.timing:
                    self._rows.row(self._cells(found, outcome))
                else:
                    wrong = outcome.verdict is not None and not outcome.verdict.ok
                    text = f"WRONG: {outcome.verdict}" if wrong else f"not timed: {outcome.why_not}"
                    self.say(f"  {outcome.peer:<{self._name}}{text}", "bold red" if wrong else "dim")

    def _cells(self, found: Comparison, outcome: Outcome) -> list[tuple[str, str]]:
        case = found.case
        ms, spread, host_us, _, _ = timed(outcome)
        noisy = spread > self.noise or bool(found.slowed)
        if case.mode == "decode":
            rate, unit, peak = case.num_bytes / ms * 1e3, "B/s", self._ceilings.bytes_per_s
        else:
            rate, unit, peak = case.flops / ms * 1e3, "FLOP/s", self._ceilings.flops_per_s
        ratio = outcome.ratio_to_best
        return [
            (outcome.peer, "bold" if outcome.peer == OURS else ""),
            (digits(outcome.first_ms or 0), "dim"),
            (("~" if noisy else "") + digits(ms), "yellow" if noisy else ""),
            (f"{spread:.1%}" if spread < 0.1 else f"{spread:.0%}", "yellow" if noisy else "dim"),
            (si(rate, unit), ""),
            *([(si(case.flops / ms * 1e3, "FLOP/s") if shows_flops(case) else "", "")] if self._both else []),
            *([(digits(host_us), "dim") if host_us is not None else ("", "")] if self._queued else []),
            (f"{rate / peak:.0%}" if peak else "", "dim"),
            (si(outcome.peak_bytes, "B") if outcome.peak_bytes is not None else "", ""),
            (f"{ratio:.2f}x" if ratio is not None else "", "green" if ratio is not None and ratio >= 1 else ""),
        ]

    def peers(self, found: dict[str, str]) -> None:
        width = max([12, *(len(name) + 1 for name in found)])
        for name, version in found.items():
            self.say(f"{name:<{width}}{version}", paste=True)

    # Kernels --------------------------------------------------------------------------------------------------------------------

    def start_kernels(self, arch: str) -> None:
        self.say(f"Kernel tables for sm_{arch}, top to bottom; the first row that fits a call runs it", "bold")
        columns = (("", 46, 0), ("registers", 10, 0), ("shared", 10, 0), ("spilled B", 11, WIDE), ("compiled s", 12, WIDER))
        self._rows = Columns(self.table, columns)

    def kernel(self, built: Built, arch: str) -> None:
        self.record({"record": "variant", "arch": arch, **built._asdict()})
        with self._printing():
            if len(built.name) > 45:  # the name of a variant with every option is longer than any column
                self.say(f"  {built.name}")
            spilled = built.spilled_bytes or 0
            cells = [("" if len(built.name) > 45 else built.name, ""), (str(built.registers or ""), ""), (si(built.smem_bytes, "B"), "")]
            seconds = digits(built.seconds) if built.seconds is not None else ""
            self._rows.row([*cells, (str(spilled), "yellow" if spilled else "dim"), (seconds, "dim")])
            self.say(f"    {built.why}", "dim")
            for line in (*built.warnings, *([built.error] if built.error else [])):
                self.say(f"    {line}", "bold red")

    def start_tuning(self, arch: str) -> None:
        self.say(f"Tiles on sm_{arch}, the fastest first; * is the row that is there now", "bold")
        columns = (("", 19, 0), ("registers", 10, WIDE), ("shared", 10, WIDER), ("ms", 9, 0), ("±", 6, WIDE), ("rate", 14, 0))
        self._rows = Columns(self.table, (*columns, ("to now", 8, 0), ("to peer", 8, 0)))

    def tuned(self, tuned: Tuned, chip: str) -> None:
        """The table of a case: what was timed, what was not and why, and the row to paste."""
        found, tiles = tuned.found, tuned.tiles
        outcomes = {outcome.peer: outcome for outcome in (*tuned.timed, *found.outcomes)}
        row = tuned.row(chip)
        with self._printing():
            self.say(f"  {found.case.mode} {found.case.label}", "cyan")
            self.say(f"  {', '.join(conditions(found))}", "dim")
            for name in dict.fromkeys((*outcomes, *tiles)):
                trial, outcome = tiles.get(name), outcomes.get(name)
                fields = tile_record(tuned, name, trial, outcome)
                self.record(fields)
                name += " *" * fields["is_now"]
                if outcome is None or outcome.timing is None:
                    wrong = outcome is not None and outcome.verdict is not None
                    text = f"{'WRONG' if wrong else 'not timed'}: {fields['not_timed']}"
                    self.say(f"  {name:<19}{text}", "bold red" if wrong else "dim")
                    continue
                ms, spread = outcome.timing[:2]
                amount, unit = (found.case.num_bytes, "B/s") if found.case.mode == "decode" else (found.case.flops, "FLOP/s")
                ratios = [(f"{ratio:.2f}x" if ratio else "", "green" if ratio and ratio >= 1 else "") for ratio in tuned.ratios(outcome)]
                cells = [(name, "bold" if trial else ""), (str(trial.built.registers or "") if trial else "", "")]
                cells += [(si(trial.built.smem_bytes, "B") if trial else "", ""), (digits(ms), "yellow" if spread > NOISE else "")]
                self._rows.row([*cells, (f"{spread:.1%}", "dim"), (si(amount / ms * 1e3, unit), ""), *ratios])
            if row is not None:
                self.record({"record": "row", **case_fields(found.case), "line": source_line(row)})
                self.say(f"  {source_line(row)}\n", paste=True)

    # Check ----------------------------------------------------------------------------------------------------------------------

    def start_checks(self, dtypes: Iterable[str], place: Place) -> None:
        self.say(f"{'GPU' if place.arch else 'Host'} arrays: max |out - ref| / (1 + |ref|), ref in float64")
        if self.table.width >= WIDE:
            self.say("LSE: the largest share of its limit, which is 1e-4 + 2e-6 |LSE|\n")
        self._dtypes = tuple(dtypes)
        columns = [("", 15, 0), ("cases", 7, WIDE), *((DTYPES[dtype], 9, 0) for dtype in self._dtypes)]
        self._rows = Columns(self.table, (*columns, ("LSE", 8, WIDE), ("", 6, 0)))
        limits = (f"{LIMITS[dtype]:.1e}" for dtype in self._dtypes)
        self._rows.row([(text, "dim") for text in ("limit", "", *limits, "100%", "")])

    def checks(self, group: str, verdicts: list[tuple[Case, Verdict]]) -> None:
        """One row: the group's largest error in each dtype, and its largest LSE error as a share of the limit."""
        for case, verdict in verdicts:
            self.record(check_record(group, case, verdict))
        judged = [(case, verdict) for case, verdict in verdicts if not verdict.skipped]
        ok = all(verdict.ok for _, verdict in verdicts)
        cells = [(group, ""), (str(len(verdicts)), "dim")]
        for dtype in self._dtypes:
            of_dtype = [verdict for case, verdict in judged if case.dtype == dtype]
            worst = max((verdict.error for verdict in of_dtype), default=None)
            cells.append(("-" if worst is None else f"{worst:.1e}", "" if all(v.ok for v in of_dtype) else "bold red"))
        lse = max((verdict.lse_error for _, verdict in judged if verdict.lse_error is not None), default=None)
        cells.append(("-" if lse is None else f"{lse:.0%}" if lse < 10 else f"{lse:.0e}", "" if lse is None or lse <= 1 else "bold red"))
        word = ("PASS", "green") if ok and judged else ("FAIL", "bold red") if not ok else ("skip", "yellow")
        with self._printing():
            self._rows.row([*cells, word])

    # Doctor ---------------------------------------------------------------------------------------------------------------------

    def diagnosis(self, found: Diagnosis, host: Verdict, gpu: Verdict | None) -> None:
        """The verdicts are those of one small attention on each path; that of the GPU None where it could not be tried."""
        for name, value in found.facts:
            self.say(f"{name:<13}{value}", paste=True)
        self.say()
        self.say(f"{'host path':<13}" + ("works (NumPy arrays and others in host memory)" if host.ok else f"WRONG: {host}"))
        works = "works (a kernel was compiled, run and compared with float64)"
        self.say(f"{'gpu path':<13}" + ("not ready" if gpu is None else works if gpu.ok else f"WRONG: {gpu}"))
        for number, (why, way_out) in enumerate(found.problems, 1):
            self.say(f"\n{number}. {why}")
            for line in way_out.splitlines():
                self.say(f"     {line}", "bold", paste=True)
