"""What is timed side by side, each an adapter of a few lines; adding one to PEERS is all it takes. `compare` runs a case through them.

An adapter has no say in how it is timed or checked. It binds a case's arrays to a call, and says why it cannot run where it cannot.
"""

from __future__ import annotations

import functools
import importlib
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

import cupyflash

from . import check, cublas, gpu, timing
from .cases import ITEMSIZE, Array, CacheCase, Case, Inputs
from .libraries import FlashAttention, FlashInfer, Jax, Sdpa, TorchVarlen, Triton, XFormers
from .peer import ONLY_PACKED, Peer, formula_cannot
from .timing import HOST, Call, CaptureError, Place, Round, Timing

OURS = "cupyflash"


class CupyFlash(Peer):
    """The library, on whatever arrays there are."""

    name, place = OURS, ""

    def version(self) -> str:
        return cupyflash.__version__

    def bind(self, case: Case, inputs: Inputs) -> Call:
        q, k, v, options, dout = inputs
        attention: Any = getattr(cupyflash, case.function)
        if not case.backward:
            return lambda: attention(q, k, v, **options)
        out, lse, _ = attention(q, k, v, return_lse=True, **options)
        return lambda: cupyflash.attention_backward(dout, q, k, v, out, lse, deterministic=case.deterministic, **options)


class CupyFlashDense(CupyFlash):
    """The library's call for arrays with a batch axis, on the same memory: what packing costs where it is not needed."""

    name, only_for = f"{OURS}-dense", "packed"

    def why_not(self, case: Case, place: Place) -> str | None:
        if not case.lengths:
            return ONLY_PACKED
        return None if case.equal else "these sequences have many lengths; --varlen --seqlen packs equal ones"

    def bind(self, case: Case, inputs: Inputs) -> Call:
        dense = replace(case, lengths=())
        arrays = (None if x is None else x.reshape(case.batch, -1, *x.shape[1:]) for x in (*inputs[:3], inputs.dout))
        q, k, v, dout = arrays
        call = super().bind(dense, Inputs(q, k, v, dense.options, dout))
        if not case.backward:
            return lambda: call().reshape(case.out_shape)
        shapes = case.shapes
        return lambda: tuple(x.reshape(shape) for x, shape in zip(call(), shapes, strict=False))


class Gather(CupyFlash):
    """What an attention without pages needs: all pages copied into one array first, then the library's call over that."""

    name, only_for = "gather", "cache"

    def why_not(self, case: Case, place: Place) -> str | None:
        return None if "page_table" in case.packing else "it is for keys in pages (decode --page-size)"

    def bind(self, case: Case, inputs: Inputs) -> Call:
        q, k, v, options, _ = inputs
        pages = options["page_table"].reshape(-1)
        options = {name: option for name, option in options.items() if name != "page_table"}

        def gathered(x: Any) -> Any:
            copy = x.index_select(0, pages) if hasattr(x, "index_select") else x.take(pages, axis=0)
            return copy.reshape(case.batch, -1, *x.shape[2:])

        return lambda: cupyflash.attention_with_kvcache(q, gathered(k), gathered(v), **options)


class Standard(Peer):
    """The three-step formula, as well as NumPy can do it: every score in memory at once, one batched matmul for each product."""

    name, place, package = "standard", "host", "numpy"

    def why_not(self, case: Case, place: Place) -> str | None:
        return formula_cannot(case, max(4, ITEMSIZE[case.dtype]), place)

    def bind(self, case: Case, inputs: Inputs) -> Call:
        (q, k, v), scale = inputs[:3], case.softmax_scale or case.head_dim**-0.5
        if not case.backward:
            return lambda: standard(q, k, v, scale, causal=case.causal)
        out = standard(q, k, v, scale, causal=case.causal)
        return lambda: standard_gradients(inputs.dout, q, k, v, out, scale, causal=case.causal)


def standard(q: Array, k: Array, v: Array, scale: float, *, causal: bool) -> Array:
    """softmax(scale q kᵀ) v in float32 (float64 for float64), then back to q's dtype.

    What makes it strong: no copy of k or v (BLAS reads their strides), grouped heads as more rows of one matmul, the scale on q and the
    division on out (S·D numbers each, not S²), softmax in place.
    """
    weights, row_sum = _weights(q, k, scale, causal)
    sums: Array = np.matmul(weights, v.astype(weights.dtype, copy=False).transpose(0, 2, 1, 3))
    sums /= row_sum
    return _heads(sums, q)


def standard_gradients(dout: Array, q: Array, k: Array, v: Array, out: Array, scale: float, *, causal: bool) -> tuple[Array, Array, Array]:
    """(dq, dk, dv) in the same way: P is computed again, dP becomes dS in place, and the sum over a row of dS is that of dout * out."""
    P, row_sum = _weights(q, k, scale, causal)
    P /= row_sum
    K, V = (x.astype(P.dtype, copy=False).transpose(0, 2, 1, 3) for x in (k, v))
    dO = _rows(dout, k, P.dtype)
    dS = np.matmul(dO, V.swapaxes(-1, -2))
    dS -= np.einsum("bhsd,bhsd->bhs", dO, _rows(out, k, P.dtype))[..., None]
    dS *= P
    factor = P.dtype.type(scale)
    dq, dk = np.matmul(dS, K) * factor, np.matmul(dS.swapaxes(-1, -2), _rows(q, k, P.dtype)) * factor
    return _heads(dq, q), _heads(dk, k), _heads(np.matmul(P.swapaxes(-1, -2), dO), v)


def _weights(q: Array, k: Array, scale: float, causal: bool) -> tuple[Array, Array]:
    """exp(S - max S) of all scores (B, Hkv, Hq/Hkv · Sq, Sk), and the sums of its rows: 1 for a row without keys, which is all zeros."""
    dtype = np.promote_types(q.dtype, np.float32) if q.dtype.kind == "f" else np.dtype(np.float32)
    weights: Array = np.matmul(_rows(q, k, dtype) * dtype.type(scale), k.astype(dtype, copy=False).transpose(0, 2, 3, 1))
    if causal:
        Sq, Sk = q.shape[1], k.shape[1]
        hidden = np.arange(Sk) > np.arange(Sq)[:, None] + (Sk - Sq)
        np.copyto(weights.reshape(len(q), q.shape[2], Sq, Sk), -np.inf, where=hidden)
    row_max = weights.max(axis=-1, keepdims=True, initial=-np.inf)
    weights -= np.where(np.isfinite(row_max), row_max, 0)
    np.exp(weights, out=weights)
    row_sum = weights.sum(axis=-1, keepdims=True)
    return weights, np.where(row_sum == 0, 1, row_sum)


def _rows(x: Array, k: Array, dtype: np.dtype[Any]) -> Array:
    """(B, S, Hq, D) as (B, Hkv, Hq/Hkv · S, D)."""
    B, _, _, D = x.shape
    rows: Array = x.astype(dtype, copy=False).transpose(0, 2, 1, 3).reshape(B, k.shape[2], -1, D)
    return rows


def _heads(rows: Array, like: Array) -> Array:
    """The way back, to the shape and dtype of q, k or v but with the rows' own D."""
    B, S, H, _ = like.shape
    heads: Array = rows.reshape(B, H, S, -1).transpose(0, 2, 1, 3).astype(like.dtype, copy=False)
    return heads


class StandardOnGpu(Peer):
    """The same formula in CuPy, in the inputs' dtype with float32 sums: cuBLAS for the products, a few passes over all scores between.
    k and v are read where they are; the query heads of a group are made the rows of one matrix, by a copy of q. The gradients are made
    of the same products and of P, which an LSE kept from the forward makes without sums over its rows."""

    name = "standard"

    def missing(self) -> str | None:
        return gpu.why_no_cublas()

    def version(self) -> str:
        return f"CuPy {importlib.import_module('cupy').__version__}"

    def why_not(self, case: Case, place: Place) -> str | None:
        return formula_cannot(case, ITEMSIZE[case.dtype], place)

    def bind(self, case: Case, inputs: Inputs) -> Call:
        cp = importlib.import_module("cupy")
        q, k, v, *dout = (x if isinstance(x, cp.ndarray) else cp.from_dlpack(x) for x in (*inputs[:3], inputs.dout) if x is not None)
        Sq, Sk, Hkv = q.shape[1], k.shape[1], k.shape[2]
        scale = case.softmax_scale or case.head_dim**-0.5
        hide, row_max, row_sum, weigh, divide, row_dot, differ = _passes("float64" if case.dtype == "float64" else "float32")
        keys_across, keys, values_across, values = (x.transpose(0, 2, *axes) for x in (k, v) for axes in ((3, 1), (1, 3)))

        def rows(x: Any) -> Any:
            return x.transpose(0, 2, 1, 3).reshape(len(x), Hkv, -1, x.shape[3])

        def heads(x: Any, like: Any) -> Any:
            return x.reshape(len(x), like.shape[2], like.shape[1], -1).transpose(0, 2, 1, 3)

        def product(a: Any, b: Any) -> Any:
            out = cp.empty((*a.shape[:3], b.shape[3]), q.dtype)
            cublas.multiply(a, b, out)
            return out

        def scores() -> Any:
            found = product(rows(q), keys_across)
            if case.causal:
                hide(Sq, Sk, Sk - Sq, found)
            return found

        def forward() -> Any:
            weights = scores()
            weigh(row_max(weights, axis=-1, keepdims=True), scale, weights)
            out = product(weights, values)
            divide(row_sum(weights, axis=-1, keepdims=True), out)
            return heads(out, q)

        if not case.backward:
            return forward
        out, found = rows(forward()), scores()
        level = row_max(found, axis=-1, keepdims=True)  # becomes LSE / scale
        weigh(level, scale, found)
        level += cp.log(row_sum(found, axis=-1, keepdims=True)) / scale

        def backward() -> Any:
            P, dO = scores(), rows(dout[0])
            weigh(level, scale, P)
            dS = product(dO, values_across)
            differ(P, row_dot(dO, out, axis=-1, keepdims=True), scale, dS)
            dq, dk, dv = product(dS, keys), product(dS.swapaxes(2, 3), rows(q)), product(P.swapaxes(2, 3), dO)
            return heads(dq, q), heads(dk, k), heads(dv, v)

        del found
        return backward


@functools.cache
def _passes(wide: str) -> tuple[Any, ...]:
    """What `standard` on a GPU does between and after its products, computed in the dtype `wide` whatever the scores' own; the last two are
    delta and the dS that a dP becomes."""
    cp = importlib.import_module("cupy")
    real = {"float64": "double", "float32": "float"}[wide]
    none = f"-({real})__int_as_float(0x7f800000)"  # -inf: the maximum of a row that sees no key, whose weights are zeros
    return (
        cp.ElementwiseKernel("int64 Sq, int64 Sk, int64 offset", "T s", f"if (i % Sk > i / Sk % Sq + offset) s = T({none})", "hide"),
        cp.ReductionKernel("T x", f"{wide} y", f"({real})x", "max(a, b)", "y = a", none, "row_max", reduce_type=real),
        cp.ReductionKernel("T x", f"{wide} y", f"({real})x", "a + b", "y = a", "0", "row_sum", reduce_type=real),
        cp.ElementwiseKernel(f"{wide} m, {wide} scale", "T s", f"s = T(isinf(m) ? ({real})0 : exp(scale * (({real})s - m)))", "weigh"),
        cp.ElementwiseKernel(f"{wide} l", "T o", f"o = T(l == 0 ? ({real})0 : ({real})o / l)", "divide"),
        cp.ReductionKernel("T x, T y", f"{wide} z", f"({real})x * ({real})y", "a + b", "z = a", "0", "row_dot", reduce_type=real),
        cp.ElementwiseKernel(f"T p, {wide} delta, {wide} scale", "T s", f"s = T(({real})p * (({real})s - delta) * scale)", "differ"),
    )


PEERS: tuple[Peer, ...] = (
    CupyFlash(),
    CupyFlashDense(),
    Standard(),
    StandardOnGpu(),
    Gather(),
    Sdpa("sdpa-flash", "flash"),
    Sdpa("sdpa-cudnn", "cudnn"),
    Sdpa("sdpa-mem", "mem_efficient"),
    Sdpa("sdpa-math", "math"),
    TorchVarlen(),
    FlashAttention("fa2", "flash_attn.flash_attn_interface", "flash-attn", -1),
    FlashAttention("fa3", "flash_attn_interface", "tokenspeed-fa3", -1),
    FlashAttention("fa4", "flash_attn.cute", "flash-attn-4", None),
    FlashInfer(),
    XFormers(),
    Triton(),
    Jax(),
)


def peers_at(place: str, names: Sequence[str] | None = None, *, keys: str = "") -> tuple[Peer, ...]:
    """The peers that take arrays of a place: the named ones, or all, without those that are only for other `keys`."""
    at_place = (peer for peer in PEERS if peer.place in ("", place))
    return tuple(peer for peer in at_place if (peer.only_for in ("", keys) if names is None else peer.name in names))


def versions(peers: Sequence[Peer]) -> dict[str, str]:
    """What each peer is, or why it is not there."""
    return {peer.name: f"not found: {reason}" if (reason := peer.missing()) else peer.version() for peer in peers}


LATE = "it would take too long here"


class Outcome(NamedTuple):
    """What one peer did with one case: timed, or not (`why_not`), or wrong (a verdict that is not ok; then it was not timed)."""

    peer: str
    why_not: str | None = None
    verdict: check.Verdict | None = None
    first_ms: float | None = None
    timing: Timing | None = None
    peak_bytes: int | None = None
    timer: str = ""  # its own, where that is not the one of the comparison
    ratio_to_best: float | None = None  # speed against the fastest other peer of the same case: above 1 is faster than all of them


class Comparison(NamedTuple):
    """The outcomes of a case, and what they share: the timer, whether each call found its inputs cold (None: not controlled), the kernels
    that the library chose, why the timer is not the one asked for, and what held the clock down meanwhile."""

    case: Case
    outcomes: list[Outcome]
    timer: str = ""
    cold: bool | None = None
    kernel: str | None = None
    note: str = ""
    slowed: str = ""


def compare(
    case: Case,
    peers: Sequence[Peer],
    place: Place = HOST,
    *,
    timer: str | None = None,
    cold: bool = True,
    min_s: float = 0.3,
    min_rounds: int = timing.MIN_ROUNDS,
    max_noise: float = timing.NOISE,
    deadline: float | None = None,
) -> Comparison:
    """Run the case by each peer: first call, check of its result, interleaved rounds, memory. Wrong results are not timed.

    `deadline` (of time.perf_counter) drops the rounds of a case that would not be over by then.
    """
    with place:
        sets = place.inputs(case, cold=cold)
        spots = check.spots(case, sets[0], place)
        outcomes: dict[str, Outcome] = {}
        ready: dict[str, list[Call]] = {}
        for peer in peers:
            outcomes[peer.name], calls = _first(case, peer, place, sets, spots)
            if calls:
                ready[peer.name] = calls
        found = Comparison(case, [])
        if ready and deadline is not None and _is_late(place, ready, outcomes, deadline, min_rounds):
            outcomes |= {name: outcomes[name]._replace(why_not=LATE) for name in ready}
        elif ready:
            apart = {peer.name for peer in peers if peer.own_queue} & set(ready)
            name, rounds, note = _rounds({name: calls for name, calls in ready.items() if name not in apart}, place.timers, timer)
            rounds |= {name: timing.burst(ready[name], place.wait) for name in apart}
            place.slowed()  # what was before
            timings = timing.measure(rounds, min_s=min_s, max_s=4 * min_s, min_rounds=min_rounds, noise=max_noise)
            is_cold = len(sets) * case.num_bytes >= place.cache_bytes if place.cache_bytes else None
            kernel = ", ".join(_kernels(case)) if place.arch else None
            found = found._replace(timer=name, cold=is_cold, kernel=kernel, note=note, slowed=place.slowed())
            del rounds  # graphs hold memory
            for name, calls in ready.items():
                if name in apart:
                    outcomes[name] = outcomes[name]._replace(timing=timings[name], timer="burst")
                    continue
                others = [timings[other].ms for other in timings if other not in (name, *apart)]
                ratio = min(others) / timings[name].ms if others else None
                peak = place.peak_bytes(calls[0])
                outcomes[name] = outcomes[name]._replace(timing=timings[name], peak_bytes=peak, ratio_to_best=ratio)
        return found._replace(outcomes=list(outcomes.values()))


def _first(case: Case, peer: Peer, place: Place, sets: Sequence[Inputs], spots: check.Spots) -> tuple[Outcome, list[Call]]:
    """The first call of a peer and the check of its result; its calls, one for each set of inputs, if they are worth timing."""
    if reason := peer.missing() or peer.why_not(case, place):
        return Outcome(peer.name, why_not=reason), []
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            calls = [peer.bind(case, inputs) for inputs in sets]
            checked = calls[0] if spots.inputs is sets[0] else peer.bind(case, spots.inputs)
            first_ms, result = timing.first_call(checked, place.wait)
    except NotImplementedError as error:
        return Outcome(peer.name, why_not=str(error)), []
    except Exception as error:  # one peer's failure is a line of the table; the others still run
        if peer.name == OURS:
            return Outcome(peer.name, verdict=check.failure(case, error)), []
        reasons = [f"{type(error).__name__}: {error}", *(str(warning.message) for warning in said)]
        return Outcome(peer.name, why_not="; ".join(" ".join(text.split())[:120] for text in reasons[:3])), []
    verdict = check.spot_check(case, spots, result if isinstance(result, tuple) else (result,), place)
    return Outcome(peer.name, verdict=verdict, first_ms=first_ms), calls if verdict.ok else []


def _is_late(place: Place, ready: Mapping[str, list[Call]], outcomes: Mapping[str, Outcome], deadline: float, min_rounds: int) -> bool:
    rounds = min_rounds + 2  # one of warm-up, those that count, one for memory
    once_s = sum(outcomes[name].first_ms or 0 for name in ready) / 1e3
    if once_s * rounds <= deadline - time.perf_counter():
        return False
    # A first call may be slow for reasons of its own.
    once_s = sum(timing.first_call(calls[0], place.wait)[0] for calls in ready.values()) / 1e3
    return once_s * rounds > deadline - time.perf_counter()


def _rounds(
    ready: Mapping[str, Sequence[Call]], timers: Mapping[str, Callable[[Sequence[Call]], Round]], timer: str | None
) -> tuple[str, dict[str, Round], str]:
    """The name of the timer, the rounds of every peer by it, and a note: peers are only compared by one and the same timer, so where a
    call cannot be captured all take the next one."""
    first, *others = list(timers)[list(timers).index(timer) if timer else 0 :]
    try:
        return first, {peer: timers[first](calls) for peer, calls in ready.items()}, ""
    except CaptureError as error:
        name, rounds, note = _rounds(ready, timers, others[0])
        return name, rounds, note or f"{first} cannot record a call: {error}"


def problem(case: Case) -> dict[str, Any]:
    """The case as cupyflash.supports and cupyflash.warmup take it, which know packed sequences of one length: the longest. The scales of a
    quantised cache change no kernel."""
    sizes = ("batch", "seqlen_q", "seqlen_k", "num_heads_q", "num_heads_kv", "head_dim", "head_dim_v", "dtype")
    more = {name: x for name, x in case.options.items() if not name.endswith("_descale")}
    more |= dict.fromkeys(case.sink, True)
    more |= {**({"packed": True} if case.lengths else {}), **({"wrt": ("q", "k", "v")} if case.backward else {})}
    if isinstance(case, CacheCase):
        more |= {"cached": True, "page_size": case.page_size or None, "cache_dtype": case.cache_dtype or None}
    return {**{name: getattr(case, name) for name in sizes}, **more}


# What is launched before and after the kernels of a packed forward, of a backward's gradients and of a decode.
_AROUND = ("packed_tiles", "bwd_delta", "bwd_convert", "bwd_sum", "decode_begin", "latent_merge")


def _kernels(case: Case) -> list[str]:
    """The names of the library's kernels for a case. A deterministic dq is planned as one that is asked for alone."""
    asked: list[dict[str, Any]] = [{"wrt": ("k", "v")}, {"wrt": ("q",)}] if case.deterministic else [{}]

    def chosen(**sizes: int) -> list[Any]:
        answers = (cupyflash.supports(device="cuda", **{**problem(case), **wrt, **sizes}) for wrt in asked)
        return [variant for answer in answers for variant in answer.variants if variant.family not in _AROUND]

    found = chosen()
    if not case.equal:  # tiles go by the longest sequence, families by the mean as well, and `supports` is only told of equal ones
        mean = case.tokens[0] // case.batch
        of_mean = chosen(seqlen_q=mean, seqlen_k=mean)
        if [variant.family for variant in of_mean] != [variant.family for variant in found]:
            found = of_mean
    return list(dict.fromkeys(variant.name for variant in found))
