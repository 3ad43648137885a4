"""What comes out: the tables (plain text where the terminal, a pipe or NO_COLOR asks for it), the progress bar, and the JSON lines."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from .cases import DTYPES, Case, short
from .check import LIMITS, Verdict
from .machine import Diagnosis
from .peers import Outcome
from .timing import NOISE, Ceilings

WIDE = 80  # the tables need 76 columns; below WIDE they drop some and fit 60
PIPED = 100  # a pipe has no width of its own, and nobody gains from columns dropped in a log


def console(*, stderr: bool = False) -> Console:
    """A console that writes no escape code into a pipe, nor with NO_COLOR set (rich alone would keep bold and dim)."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS") else PIPED
    return Console(stderr=stderr, highlight=False, width=width, color_system=None if os.environ.get("NO_COLOR") else "auto")


# --- JSON lines ---------------------------------------------------------------------------------------------------------------------


def case_fields(case: Case) -> dict[str, Any]:
    names = ("mode", "head_dim", "head_dim_v", "num_heads_q", "num_heads_kv", "batch", "seqlen_q", "seqlen_k", "causal", "dtype")
    return {name: getattr(case, name) for name in names}


def result_line(case: Case, outcome: Outcome) -> dict[str, Any]:
    """A timed outcome: the one line without a "record" field, which every other line has.

    Decode says gbps, everything else tflops, because that is what limits each. host_us is null on host arrays: there the call is host
    time from end to end, and `ms` has said it. ratio_to_best is this peer's speed over that of the fastest *other* peer of the case, so
    a winner shows by how much (null when it ran alone).
    """
    ms, spread, host_us, _ = timed(outcome)
    rate = {"gbps": case.num_bytes / ms / 1e6} if case.mode == "decode" else {"tflops": case.flops / ms / 1e9}
    return {
        **case_fields(case),
        "peer": outcome.peer,
        "ms": ms,
        "spread": spread,
        **rate,
        "host_us": host_us,
        "ratio_to_best": outcome.ratio_to_best,
    }


def outcome_record(case: Case, outcome: Outcome) -> dict[str, Any]:
    """What is kept out of the result line: the first call, memory, the check before the timing, or why there is no result."""
    verdict = outcome.verdict
    return {
        "record": "run",
        **case_fields(case),
        "peer": outcome.peer,
        "first_call_ms": outcome.first_ms,
        "rounds": outcome.timing.rounds if outcome.timing else 0,
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


def timed(outcome: Outcome) -> Any:
    if outcome.timing is None:
        raise ValueError(f"{outcome.peer} was not timed: {outcome.why_not or outcome.verdict}")
    return outcome.timing


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
    """A table printed row by row, while the work goes on: (title, width, only where the terminal is WIDE), the first one to the left."""

    def __init__(self, table: Console, columns: Iterable[tuple[str, int, bool]]) -> None:
        wide = table.width >= WIDE
        self.table = table
        self.columns = [(width, wide or not only_wide) for _, width, only_wide in columns]
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

    def introduce(self, machine: dict[str, Any]) -> bool:
        """What this machine is; whether it has a GPU."""
        memory = f", {machine['memory_bytes'] / 1e9:.0f} GB" if machine["memory_bytes"] else ""
        gpus = ", ".join(f"{gpu['name']} ({gpu['arch']})" for gpu in machine["devices"])
        self.say(f"cupyflash {machine['cupyflash']}: tiled attention and the three-step formula", "bold")
        self.say(f"  cpu   {machine['cpu']}, {machine['cores']} cores{memory}")
        self.say(f"  numpy {machine['numpy']}, {machine['blas'] or 'BLAS unknown'}")
        self.say(f"  gpu   {gpus or 'none: arrays are NumPy'}")
        return bool(gpus)

    def start_timings(self, ceilings: Ceilings) -> None:
        self.record({"record": "ceilings", **ceilings._asdict()})
        self.say(f"  peak  {si(ceilings.flops_per_s, 'FLOP/s')} matmul, {si(ceilings.bytes_per_s, 'B/s')} read, measured now\n")
        self._ceilings = ceilings
        titles = (("", 11, False), ("first ms", 9, True), ("ms", 9, False), ("±", 6, True), ("rate", 14, False))
        self._rows = Columns(self.table, (*titles, ("of peak", 9, True), ("memory", 9, False), ("speed", 8, False)))

    def explain_columns(self) -> None:
        """What the numbers of the timing table mean, where they are read."""
        self.say()
        for line in (
            "fwd     2 (D + Dv) FLOPs a visible pair and query head",
            "decode  bytes of q, k, v and out, each once",
            "memory  the most that a call holds beyond its inputs",
            f"speed   against the fastest other; ~: spread above {NOISE:.0%}",
        ):
            self.say(f"  {line}", "dim")

    def memory_lesson(self, timed_cases: list[tuple[Case, list[Outcome]]]) -> None:
        """The table's point in a sentence: what the largest case held in tiles and as whole scores, and where that leads."""
        case, outcomes = max(timed_cases, key=lambda item: item[0].score_bytes)
        held = {outcome.peer: outcome.peak_bytes for outcome in outcomes if outcome.peak_bytes}
        if {"cupyflash", "standard"} <= held.keys():
            seqlen, tiled, whole = short(case.seqlen_q), si(held["cupyflash"], "B"), si(held["standard"], "B")
            at_64k = si(replace(case, seqlen_q=1 << 16, seqlen_k=1 << 16).score_bytes, "B")
            self.say(f"\nWith {seqlen} tokens the formula holds {whole}, the tiles {tiled}. With 64k its scores alone take {at_64k}.")

    def next_steps(self, *steps: tuple[str, str]) -> None:
        self.say("\nNext", "bold")
        for command, what in steps:
            self.say(f"  cupyflash-bench {command:<44}{what}" if self.table.width >= 90 else f"  cupyflash-bench {command}")

    def timings(self, case: Case, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.timing:
                self.record(result_line(case, outcome))
            self.record(outcome_record(case, outcome))
        with self._printing():
            self.say(f"  {case.mode} {case.label}", "cyan")
            for outcome in outcomes:
                if outcome.timing:
                    self._rows.row(self._cells(case, outcome))
                else:
                    wrong = outcome.verdict is not None and not outcome.verdict.ok
                    text = f"WRONG: {outcome.verdict}" if wrong else f"not timed: {outcome.why_not}"
                    self.say(f"  {outcome.peer:<11}{text}", "bold red" if wrong else "dim")

    def _cells(self, case: Case, outcome: Outcome) -> list[tuple[str, str]]:
        ms, spread, _, _ = timed(outcome)
        noisy = spread > NOISE
        if case.mode == "decode":
            rate, peak = case.num_bytes / ms * 1e3, self._ceilings.bytes_per_s
        else:
            rate, peak = case.flops / ms * 1e3, self._ceilings.flops_per_s
        ratio = outcome.ratio_to_best
        return [
            (outcome.peer, "bold" if outcome.peer == "cupyflash" else ""),
            (digits(outcome.first_ms or 0), "dim"),
            (("~" if noisy else "") + digits(ms), "yellow" if noisy else ""),
            (f"{spread:.0%}", "yellow" if noisy else "dim"),
            (si(rate, "B/s" if case.mode == "decode" else "FLOP/s"), ""),
            (f"{rate / peak:.0%}", "dim"),
            (si(outcome.peak_bytes, "B") if outcome.peak_bytes is not None else "", ""),
            (f"{ratio:.2f}x" if ratio is not None else "", "green" if ratio is not None and ratio >= 1 else ""),
        ]

    # Check ----------------------------------------------------------------------------------------------------------------------

    def start_checks(self, dtypes: Iterable[str]) -> None:
        self.say("Host arrays: max |out - ref| / (1 + |ref|), ref in float64")
        if self.table.width >= WIDE:
            self.say("LSE: the largest share of its limit, which is 1e-4 + 2e-6 |LSE|\n")
        self._dtypes = tuple(dtypes)
        columns = [("", 15, False), ("cases", 7, True), *((DTYPES[dtype], 9, False) for dtype in self._dtypes)]
        self._rows = Columns(self.table, (*columns, ("LSE", 8, True), ("", 6, False)))
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

    def diagnosis(self, found: Diagnosis) -> None:
        for name, value in found.facts:
            self.say(f"{name:<13}{value}", paste=True)
        self.say()
        self.say(f"{'host path':<13}" + ("works (NumPy arrays and others in host memory)" if found.host.ok else f"WRONG: {found.host}"))
        self.say(f"{'gpu path':<13}" + ("nothing is missing" if not found.problems else "not ready"))
        for number, (why, way_out) in enumerate(found.problems, 1):
            self.say(f"\n{number}. {why}")
            for line in way_out.splitlines():
                self.say(f"     {line}", "bold", paste=True)
