"""What is timed side by side, each an adapter of a few lines; adding one to PEERS is all it takes. `compare` runs a case through them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import cupyflash

from . import check, timing
from .cases import Array, Case, Inputs
from .machine import available_memory
from .timing import Call, Timing


class Peer:
    """One way to compute attention. Subclasses give `bind`, and whatever differs from an implementation on host arrays."""

    name = ""
    place: timing.Place = timing.HOST  # peers that are compared share one

    def why_not(self, case: Case) -> str | None:
        """Why this peer cannot run the case, or None."""
        return None

    def bind(self, case: Case, inputs: Inputs) -> Call:
        """A call without arguments that does the attention and nothing else: conversions, copies and warnings come before."""
        raise NotImplementedError

    def to_host(self, result: Any) -> tuple[Array, Array | None]:
        """out (B, Sq, Hq, Dv) and, if the case asked for it, lse (B, Hq, Sq)."""
        return np.asarray(result), None


class CupyFlash(Peer):
    """The library on host arrays."""

    name = "cupyflash"

    def bind(self, case: Case, inputs: Inputs) -> Call:
        q, k, v, options = inputs
        return lambda: cupyflash.attention(q, k, v, **options)

    def to_host(self, result: Any) -> tuple[Array, Array | None]:
        return (result.out, result.lse) if isinstance(result, cupyflash.AttentionResult) else (result, None)


class Standard(Peer):
    """The three-step formula, as well as NumPy can do it: every score in memory at once, one batched matmul for each product."""

    name = "standard"

    def why_not(self, case: Case) -> str | None:
        if case.window_size or case.softcap or case.extras:
            return "it has no window, softcap, bias or mask"
        free = available_memory()
        if free is not None and case.score_bytes > free // 2:
            return f"its scores take {case.score_bytes / 1e9:.1f} GB and {free / 1e9:.1f} GB are free"
        return None

    def bind(self, case: Case, inputs: Inputs) -> Call:
        scale = case.softmax_scale or case.head_dim**-0.5
        return lambda: standard(inputs.q, inputs.k, inputs.v, scale, causal=case.causal)


def standard(q: Array, k: Array, v: Array, scale: float, *, causal: bool) -> Array:
    """softmax(scale q kᵀ) v in float32 (float64 for float64), then back to q's dtype.

    What makes it strong: no copy of k or v (BLAS reads their strides), grouped heads as more rows of one matmul, the scale on q and the
    division on out (S·D numbers each, not S²), softmax in place.
    """
    B, Sq, Hq, D = q.shape
    Sk, Hkv, Dv = k.shape[1], k.shape[2], v.shape[3]
    dtype = np.promote_types(q.dtype, np.float32) if q.dtype.kind == "f" else np.dtype(np.float32)
    rows = (q.astype(dtype, copy=False) * dtype.type(scale)).transpose(0, 2, 1, 3).reshape(B, Hkv, -1, D)
    scores = np.matmul(rows, k.astype(dtype, copy=False).transpose(0, 2, 3, 1))  # (B, Hkv, Hq/Hkv · Sq, Sk)
    if causal:
        hidden = np.arange(Sk) > np.arange(Sq)[:, None] + (Sk - Sq)
        np.copyto(scores.reshape(B, Hq, Sq, Sk), -np.inf, where=hidden)
    row_max = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    scores -= np.where(np.isfinite(row_max), row_max, 0)  # a row without keys: exp(-inf - 0) = 0, out 0
    np.exp(scores, out=scores)
    row_sum = scores.sum(axis=-1, keepdims=True)
    sums = np.matmul(scores, v.astype(dtype, copy=False).transpose(0, 2, 1, 3))
    sums /= np.where(row_sum == 0, 1, row_sum)
    out: Array = sums.reshape(B, Hq, Sq, Dv).transpose(0, 2, 1, 3).astype(q.dtype, copy=False)
    return out


PEERS: tuple[Peer, ...] = (CupyFlash(), Standard())


LATE = "it would take too long here"


class Outcome(NamedTuple):
    """What one peer did with one case: timed, or not (`why_not`), or wrong (a verdict that is not ok; then it was not timed)."""

    peer: str
    why_not: str | None = None
    verdict: check.Verdict | None = None
    first_ms: float | None = None
    timing: Timing | None = None
    peak_bytes: int | None = None
    ratio_to_best: float | None = None  # speed against the fastest other peer of the same case: above 1 is faster than all of them


def compare(case: Case, peers: Sequence[Peer] = PEERS, *, min_s: float = 0.3, deadline: float | None = None) -> list[Outcome]:
    """Run the case by each peer: first call, check of its result, interleaved rounds, memory. Wrong results are not timed.

    `deadline` (of time.perf_counter) drops the rounds of a case that would not be over by then.
    """
    inputs = case.inputs()
    outcomes: dict[str, Outcome] = {}
    ready: dict[str, tuple[Peer, Call]] = {}
    for peer in peers:
        if reason := peer.why_not(case):
            outcomes[peer.name] = Outcome(peer.name, why_not=reason)
            continue
        try:
            call = peer.bind(case, inputs)
            first_ms, result = timing.first_call(call, peer.place.timer)
        except NotImplementedError as error:
            outcomes[peer.name] = Outcome(peer.name, why_not=str(error))
            continue
        except Exception as error:  # one peer's failure is a line of the table; the others still run
            outcomes[peer.name] = Outcome(peer.name, verdict=check.failure(case, error))
            continue
        verdict = check.spot_check(case, inputs, peer.to_host(result)[0])
        outcomes[peer.name] = Outcome(peer.name, verdict=verdict, first_ms=first_ms)
        if verdict.ok:
            ready[peer.name] = (peer, call)
    rounds = timing.MIN_ROUNDS + 2  # one of warm-up, those that count, one for memory
    once_s = sum(outcomes[name].first_ms or 0 for name in ready) / 1e3
    if deadline is not None and once_s * rounds > deadline - time.perf_counter():
        once_s = sum(peer.place.timer(call).ms for peer, call in ready.values()) / 1e3  # a first call may be slow for reasons of its own
        if once_s * rounds > deadline - time.perf_counter():
            return [outcome._replace(why_not=LATE) if outcome.peer in ready else outcome for outcome in outcomes.values()]
    if ready:
        timer = next(iter(ready.values()))[0].place.timer
        timings = timing.measure({name: call for name, (_, call) in ready.items()}, timer, min_s=min_s, max_s=4 * min_s)
        for name, (peer, call) in ready.items():
            others = [timings[other].ms for other in timings if other != name]
            ratio = min(others) / timings[name].ms if others else None
            outcomes[name] = outcomes[name]._replace(timing=timings[name], peak_bytes=peer.place.peak_bytes(call), ratio_to_best=ratio)
    return list(outcomes.values())
