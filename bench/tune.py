"""Tuning: the tiles that a row of the kernel tables could have, timed side by side for a case, and the row that comes out.

Each tile is a peer: its result is checked, and its rounds interleave with those of the others. `kernels` says which there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import cupyflash

from . import kernels, peers
from .cases import Case, Inputs
from .kernels import Trial
from .peer import Peer
from .peers import Comparison, Outcome
from .timing import Call, Place


class Tile(Peer):
    """The library with one row as its table. The row is there while a call is made, which is all that a graph records; the host time of
    such a call is that of planning it anew, and nobody's."""

    def __init__(self, row: Any) -> None:
        self.name, self.row = row.config.tile, row

    def version(self) -> str:
        return cupyflash.__version__

    def bind(self, case: Case, inputs: Inputs) -> Call:
        call = peers.CupyFlash().bind(case, inputs)

        def by_this_row() -> Any:
            with kernels.only_rows((self.row,)):
                return call()

        return by_this_row


class Tuned(NamedTuple):
    """The trials of a case, of which the first is the row that is there now, and what came of those that were timed, and of the peers."""

    trials: list[Trial]
    found: Comparison

    @property
    def tiles(self) -> dict[str, Trial]:
        return {trial.row.config.tile: trial for trial in self.trials}

    @property
    def timed(self) -> list[Outcome]:
        """Tiles and peers, the fastest first."""
        return sorted((one for one in self.found.outcomes if one.timing), key=_ms)

    def ratios(self, outcome: Outcome) -> tuple[float | None, float | None]:
        """Its speed against the row that is there now, and against the fastest peer: above 1 is faster."""
        now = next((one for one in self.timed if one.peer == self.trials[0].row.config.tile), None)
        theirs = next((one for one in self.timed if one.peer not in self.tiles), None)
        return _ms(now) / _ms(outcome) if now else None, _ms(theirs) / _ms(outcome) if theirs else None

    def row(self, chip: str) -> Any:
        """The row of the fastest tile, with what was measured as its reason; None if no tile was timed."""
        ours = [one for one in self.timed if one.peer in self.tiles]
        if not ours:
            return None
        best, *others = ours
        case, now = self.found.case, self.trials[0].row.config.tile
        against = sorted(others, key=lambda one: one.peer != now)[:1]  # the row that is there now, or the second where that is the best
        theirs = [one for one in self.timed if one.peer not in self.tiles][:1]
        unit, amount = ("GB/s", case.num_bytes / 1e6) if case.mode == "decode" else ("TFLOP/s", case.flops / 1e9)

        def rate(one: Outcome) -> str:
            number = amount / _ms(one)
            return f"{number:.0f}" if number >= 100 else f"{number:.3g}"

        why = rate(best) + "".join(f", against {rate(one)} for {one.peer}" for one in against)
        why += "".join(f"; {one.peer} {rate(one)}" for one in theirs)
        return self.tiles[best.peer].row._replace(why=f"{why} ({unit}, {chip}, {case.label})")


def _ms(outcome: Outcome) -> float:
    return outcome.timing.ms if outcome.timing else 0.0


def tune(
    case: Case, others: Sequence[Peer], place: Place, *, family: str | None, tiles: Sequence[tuple[int, int]], spills: int, **options: Any
) -> Tuned:
    """Compile the tiles, and time those without a fault beside the other peers; `options` are those of `compare`."""
    trials = kernels.trials(peers.problem(case), (place.arch or "").removeprefix("sm_"), family, tiles, spills)
    chosen = [Tile(trial.row) for trial in trials if trial.why_not is None]
    with kernels.only_family(family):
        return Tuned(trials, peers.compare(case, [*chosen, *others], place, **options))
