"""How a call is timed: rounds that interleave the peers, the median, the spread, and the place where the arrays are.

The first call of each peer is timed by `first_call` and never again: compilation, thread pools and page faults belong to it, and
`measure` warms every peer up by time, not by count, before the first round that counts.
"""

from __future__ import annotations

import itertools
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .cases import Case, Inputs
from .machine import available_memory

Call = Callable[[], Any]


class Tick(NamedTuple):
    """One round: milliseconds of a call where the work is done; where the host only queues that work, the host's microseconds until a
    call returns; and the clock of the GPU's SMs while it worked."""

    ms: float
    host_us: float | None = None
    clock_mhz: float | None = None


Round = Callable[[], Tick]
# A Timer prepares the rounds of one peer, whose calls are the same work on different buffers, to be taken in turn.
Timer = Callable[[Sequence[Call]], Round]


class CaptureError(Exception):
    """A call that a CUDA graph cannot record; the text is the reason."""


def wall(calls: Sequence[Call]) -> Round:
    """The wall clock, for calls that return when the work is done. The call *is* host time, so host_us has nothing of its own to say."""
    (call,) = calls

    def round_() -> Tick:
        start = time.perf_counter()
        call()
        return Tick((time.perf_counter() - start) * 1e3)

    return round_


BURST_S = 0.05


def burst(calls: Sequence[Call], wait: Call) -> Round:
    """The wall clock around so many calls as take BURST_S, and the `wait` for the last: for work that is queued where no timer of a place
    sees it. What a call costs the host is in it wherever the GPU would be done sooner."""
    in_turn = itertools.cycle(calls)

    def some(count: int) -> Tick:
        start = time.perf_counter()
        for call in itertools.islice(in_turn, count):
            call()
        host_s = time.perf_counter() - start
        wait()
        return Tick((time.perf_counter() - start) / count * 1e3, host_s / count * 1e6)

    some(len(calls))
    count = max(1, min(round(BURST_S * 1e3 / max(some(3).ms, 1e-3)), 1000))
    return lambda: some(count)


class Timing(NamedTuple):
    """The rounds of one peer: medians, and the interquartile range over the median as the spread."""

    ms: float
    spread: float
    host_us: float | None
    clock_mhz: float | None
    rounds: int


NOISE = 0.05  # a spread above this is printed with a mark: the number is not final
MIN_ROUNDS = 7
WARM_UP_S = 0.15


def first_call(call: Call, wait: Call) -> tuple[float, Any]:
    """Milliseconds until the work of a call is done, and its result."""
    start = time.perf_counter()
    result = call()
    wait()
    return (time.perf_counter() - start) * 1e3, result


def measure(
    rounds: Mapping[str, Round],
    *,
    min_s: float = 0.3,
    max_s: float = 2.0,
    min_rounds: int = MIN_ROUNDS,
    warm_up_s: float | None = None,
    noise: float = NOISE,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time the peers in turn (A B A B ...), so that a change of clock or of load meets all of them alike.

    Rounds go on for `min_s` seconds a peer, then until every spread is below `noise`, but not past `max_s` a peer; never fewer than
    `min_rounds`.
    """
    for round_ in rounds.values():
        end = clock() + (WARM_UP_S if warm_up_s is None else warm_up_s)
        while True:
            round_()
            if clock() >= end:
                break
    ticks: dict[str, list[Tick]] = {name: [] for name in rounds}
    start = clock()
    while True:
        for name, round_ in rounds.items():
            ticks[name].append(round_())
        spent = (clock() - start) / len(rounds)
        timings = {name: summary(of_one) for name, of_one in ticks.items()} if spent >= min_s else {}
        quiet = timings and all(timing.spread <= noise for timing in timings.values())
        enough = all(len(of_one) >= min_rounds for of_one in ticks.values())
        if enough and (quiet or spent >= max_s):
            return timings


def summary(ticks: list[Tick]) -> Timing:
    low, ms, high = np.quantile([tick.ms for tick in ticks], (0.25, 0.5, 0.75))
    spread = float((high - low) / ms) if ms > 0 else 0.0
    return Timing(float(ms), spread, _median(tick.host_us for tick in ticks), _median(tick.clock_mhz for tick in ticks), len(ticks))


def _median(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


class Ceilings(NamedTuple):
    """What this machine reaches at best, measured minutes ago, not read off a data sheet; None where nothing here can measure it."""

    flops_per_s: float | None
    bytes_per_s: float | None


class Place:
    """Where arrays live, and with it how they are made, how a call on them is timed, and how its memory is seen.

    As a context manager it is current: calls made inside are those that its timers see. This one is host memory.
    """

    name = "host"
    arch: str | None = None  # of the GPU, as cupyflash.supports takes it
    # Names -> timers, the default first; a case falls back to the next one where a peer's call cannot be captured.
    timers: Mapping[str, Timer] = {"wall": wall}
    cache_bytes = 0  # what has to be passed over between two uses of a buffer so that none of it is still cached; 0: that is not controlled

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *error: object) -> None:
        """Make the former place current again."""

    def inputs(self, case: Case, *, cold: bool = True) -> list[Inputs]:
        """The case's arrays; several sets of them where calls must rotate so that each finds its inputs `cold`."""
        return [case.inputs()]

    def put(self, array: Any) -> Any:
        """A NumPy array as one of this place."""
        return array

    def fetch(self, array: Any) -> Any:
        """An array of this place as a NumPy array of float64."""
        return np.asarray(array).astype(np.float64)

    def keep_rows(self, array: Any, rows: Sequence[slice]) -> Any:
        """A copy of a (B, S, H, D) or (T, H, D) array of which only these rows, of all heads, are not zeros."""
        kept = np.zeros_like(array)
        for some in rows:
            kept[..., some, :, :] = array[..., some, :, :]
        return kept

    def wait(self) -> None:
        """Until all queued work is done."""

    def slowed(self) -> str:
        """What has held the clock down since this was last asked, beside the limit of power, or ""."""
        return ""

    def free_bytes(self) -> int | None:
        """What can still be allocated, where the system says so."""
        return available_memory()

    def peak_bytes(self, call: Call) -> int:
        """The most that the call held at once beyond its inputs, its result included; a run of its own, because tracing slows Python.

        NumPy reports its buffers to tracemalloc; BLAS's own pack buffers (some MB a thread) it cannot see.
        """
        tracemalloc.start()
        try:
            call()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    def ceilings(self) -> Ceilings:
        """The two rates that tables divide by: half a second."""
        found = self.rates(("matmul_fp32", "read"), min_s=0.1)
        return Ceilings(found["matmul_fp32"], found["read"])

    def rates(self, names: Sequence[str] = ("read", "copy", "matmul_fp32"), *, min_s: float = 0.5) -> dict[str, float]:
        """FLOP/s and bytes/s at best, by name: a float32 matmul of 1024³ (2.1 GFLOP), and a dot product over and a copy of 128 MB, which no
        cache holds."""
        a, b = np.ones((1024, 1024), np.float32), np.ones((1024, 1024), np.float32)
        out = np.empty_like(a)
        big = np.ones(1 << 25, np.float32)
        other = np.empty_like(big) if "copy" in names else big
        work: dict[str, tuple[int, Call]] = {
            "read": (big.nbytes, lambda: np.dot(big, big)),
            "copy": (2 * big.nbytes, lambda: np.copyto(other, big)),
            "matmul_fp32": (2 * 1024**3, lambda: np.matmul(a, b, out=out)),
        }
        found = measure({name: wall([work[name][1]]) for name in names}, min_s=min_s, max_s=2 * min_s)
        return {name: work[name][0] / timing.ms * 1e3 for name, timing in found.items()}


HOST = Place()
