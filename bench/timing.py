"""How a call is timed: one number at a time (Timer), rounds that interleave the peers, the median, the spread, and peak memory.

The first call of each peer is timed by `first_call` and never again: compilation, thread pools and page faults belong to it, and
`measure` warms every peer up by time, not by count, before the first round that counts.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

Call = Callable[[], Any]


class Tick(NamedTuple):
    """One call: its milliseconds where the work is done and, where the host only queues that work, the host's microseconds."""

    ms: float
    host_us: float | None


# A Timer runs the call once and waits for its result. On host arrays that is the wall clock; a GPU's is two events on the stream.
Timer = Callable[[Call], Tick]


def wall(call: Call) -> Tick:
    """The wall clock, for calls that return when the work is done. The call *is* host time, so host_us has nothing of its own to say."""
    start = time.perf_counter()
    call()
    return Tick((time.perf_counter() - start) * 1e3, None)


class Timing(NamedTuple):
    """The rounds of one peer: medians, and the interquartile range over the median as the spread."""

    ms: float
    spread: float
    host_us: float | None
    rounds: int


NOISE = 0.05  # a spread above this is printed with a mark: the number is not final
MIN_ROUNDS = 5
WARM_UP_S = 0.1


def first_call(call: Call, timer: Timer = wall) -> tuple[float, Any]:
    """Milliseconds and result of a peer's first call."""
    results: list[Any] = []
    tick = timer(lambda: results.append(call()))
    return tick.ms, results[0]


def measure(
    calls: Mapping[str, Call],
    timer: Timer = wall,
    *,
    min_s: float = 0.3,
    max_s: float = 2.0,
    warm_up_s: float = WARM_UP_S,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time the calls in turn (A B A B ...), so that a change of clock or of load meets all of them alike.

    Rounds go on for `min_s` seconds a peer, then until every spread is below NOISE, but not past `max_s` a peer; never fewer than
    MIN_ROUNDS.
    """
    for call in calls.values():
        end = clock() + warm_up_s
        while True:
            timer(call)
            if clock() >= end:
                break
    ticks: dict[str, list[Tick]] = {name: [] for name in calls}
    start = clock()
    while True:
        for name, call in calls.items():
            ticks[name].append(timer(call))
        spent = (clock() - start) / len(calls)
        timings = {name: summary(rounds) for name, rounds in ticks.items()} if spent >= min_s else {}
        quiet = timings and all(timing.spread <= NOISE for timing in timings.values())
        enough = all(len(rounds) >= MIN_ROUNDS for rounds in ticks.values())
        if enough and (quiet or spent >= max_s):
            return timings


def summary(ticks: list[Tick]) -> Timing:
    ms = np.array([tick.ms for tick in ticks])
    low, median, high = np.quantile(ms, (0.25, 0.5, 0.75))
    host = [tick.host_us for tick in ticks if tick.host_us is not None]
    spread = float((high - low) / median) if median > 0 else 0.0
    return Timing(float(median), spread, float(np.median(host)) if host else None, len(ticks))


def peak_bytes(call: Call) -> int:
    """The most that the call held at once beyond its inputs, its result included; a run of its own, because tracing slows Python.

    NumPy reports its buffers to tracemalloc; BLAS's own pack buffers (some MB a thread) it cannot see.
    """
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class Ceilings(NamedTuple):
    """What this machine reaches at best, measured minutes ago, not read off a data sheet."""

    flops_per_s: float
    bytes_per_s: float


def host_ceilings() -> Ceilings:
    """float32 matmul of 1024³ (2.1 GFLOP) and a dot product over 128 MB, which no cache holds: 0.5 s together."""
    a, b = np.ones((1024, 1024), np.float32), np.ones((1024, 1024), np.float32)
    out = np.empty_like(a)
    big = np.ones(1 << 25, np.float32)
    matmul, read = measure({"matmul": lambda: np.matmul(a, b, out=out), "read": lambda: np.dot(big, big)}, min_s=0.1, max_s=0.2).values()
    return Ceilings(2 * 1024**3 / matmul.ms * 1e3, big.nbytes / read.ms * 1e3)


class Place(NamedTuple):
    """Where arrays live, and with it how a call on them is timed, what it can reach, and how its memory is seen."""

    timer: Timer
    ceilings: Callable[[], Ceilings]
    peak_bytes: Callable[[Call], int]


HOST = Place(wall, host_ceilings, peak_bytes)
