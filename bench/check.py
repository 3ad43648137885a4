"""Right or wrong: a result against float64 attention of the same inputs, with the limits that every table and test here uses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import cupyflash

from .cases import Array, Case, Inputs
from .timing import HOST, Place

# Allowed error of out, absolute and relative alike: |out - ref| <= limit * (1 + |ref|). The 16-bit types are limited by their own
# rounding of the result and of P (fp16 has 11 bits, bf16 has 8); float64 has room for sums in another order.
LIMITS = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 2e-5, "float64": 1e-12}


SMALL = Case(1, 33, 47, 2, 1, 24, 16, "float32", causal=True, return_lse=True)  # one attention to say whether a path works at all


class Verdict(NamedTuple):
    """Largest |out - ref| / (1 + |ref|) against `limit`; `lse_error` is that of the LSE in units of its own limit, None if not asked.

    `note` says what happened instead of a result; `skipped` marks a case that the library says it does not support, which is no error.
    """

    error: float
    limit: float
    lse_error: float | None = None
    note: str = ""
    skipped: bool = False

    @property
    def ok(self) -> bool:
        return self.skipped or (self.error <= self.limit and (self.lse_error is None or self.lse_error <= 1))

    def __str__(self) -> str:
        lse = "" if self.lse_error is None else f", LSE error {self.lse_error:.2g} of its limit"
        return self.note or f"error {self.error:.2g}, limit {self.limit:.2g}{lse}"


def run(case: Case, place: Place = HOST) -> Verdict:
    """Compute the case with the library and judge it; an exception is a verdict too."""
    inputs = case.inputs()
    given = poisoned(case, inputs)
    options = {name: place.put(value) if isinstance(value, np.ndarray) else value for name, value in given.options.items()}
    try:
        result = cupyflash.attention(*map(place.put, given[:3]), **options)
        out, lse = place.fetch(result.out), place.fetch(result.lse)
    except NotImplementedError as error:
        return Verdict(0.0, LIMITS[case.dtype], note=f"not supported: {error}", skipped=True)
    except Exception as error:  # whatever the library throws at a valid call is a finding, and the other cases still run
        return failure(case, error)
    return judge(case, inputs, out, lse)


def failure(case: Case, error: Exception) -> Verdict:
    return Verdict(math.inf, LIMITS[case.dtype], note=f"{type(error).__name__}: {error}")


def judge(case: Case, inputs: Inputs, out: Array, lse: Array | None = None) -> Verdict:
    """Compare every row of `out` and `lse` with the reference. Keys that no query owns are clean here, whatever the call was given."""
    expected, expected_lse = _reference(inputs)
    lse_error = None
    if lse is not None:
        lse_error = _worst(lse, expected_lse, 1e-4 + 2e-6 * np.abs(np.where(np.isfinite(expected_lse), expected_lse, 0)))
    return Verdict(_worst(out, expected, 1 + np.abs(expected)), LIMITS[case.dtype], lse_error)


class Spot(NamedTuple):
    """A part of one of a call's results in float64, and what its errors are measured by."""

    result: int
    where: tuple[Any, ...]
    expected: Array
    scale: Array


class Spots(NamedTuple):
    """What a timed call is worth checking for, since float64 over all of it would take longer than the timing: some parts of its results
    when it is called with `inputs`. Only these parts are copied from the place. Of the `extras` the sink alone."""

    inputs: Inputs
    parts: list[Spot]
    limit: float


def spots(case: Case, inputs: Inputs, place: Place = HOST) -> Spots:
    """The parts of a case's results that are checked: of a few heads of the first, the last and the longest sequence."""
    return _gradient_spots(case, inputs, place) if case.backward else _out_spots(case, inputs, place)


def _sequences(case: Case) -> list[int]:
    return sorted({0, case.batch - 1, int(np.argmax(case.lengths or (0,)))})


def spot_check(case: Case, spots: Spots, results: Sequence[Any], place: Place = HOST) -> Verdict:
    """Compare results, (out,) or (dq, dk, dv) and whatever follows them, with the spots."""
    shapes = case.shapes if case.backward else (case.out_shape,)
    if [tuple(result.shape) for result in results[: len(shapes)]] != list(shapes):
        return Verdict(math.inf, spots.limit)
    errors = (_worst(place.fetch(results[part.result][part.where]), part.expected, part.scale) for part in spots.parts)
    return Verdict(max(errors, default=0.0), spots.limit)


def _out_spots(case: Case, inputs: Inputs, place: Place, rows: int = 32) -> Spots:
    """`rows` queries at the start, in the middle and at the end, of the first, a middle and the last head.

    Of n keys with like weights the result shrinks as 1/sqrt(n), so that an error of LIMITS would be all of it: a row is measured by three
    times its own size where that is below 1.
    """
    parts = []
    k_descale, v_descale = (inputs.options.get(name, 1.0) for name in ("k_descale", "v_descale"))
    for b in _sequences(case):
        one = case.alone(b)
        first_key, end_key = one.visible_keys()
        ends = {min(end, one.seqlen_q) for end in (rows, (one.seqlen_q + rows) // 2, one.seqlen_q)} - {0}
        for h, end in itertools.product({0, case.num_heads_q // 2, case.num_heads_q - 1}, sorted(ends)):
            start, h_kv = max(end - rows, 0), h * case.num_heads_kv // case.num_heads_q
            first, last = first_key[start:end, None], end_key[start:end, None]
            keys = slice(int(first.min()), int(last.max()))
            where = case.at(b, slice(start, end), h)
            q, k, v = (place.fetch(x) for x in (inputs.q[where], *case.keys_at(inputs, b, keys, h_kv)))
            j = np.arange(keys.start, keys.stop)
            expected = _weights(case, k_descale * q, k, (first <= j) & (j < last), h)[0] @ v * v_descale
            size = np.sqrt((expected * expected).mean(axis=-1, keepdims=True))
            parts.append(Spot(0, where, expected, np.clip(3 * size, 1e-9, 1) + np.abs(expected)))
    return Spots(inputs, parts, LIMITS[case.dtype])


def _gradient_spots(case: Case, inputs: Inputs, place: Place, rows: int = 128) -> Spots:
    """About `rows` queries evenly spread, of all query heads of the first, a middle and the last key head; and all keys of these heads.

    Every query adds to the gradients of its keys, so that float64 over few of them is no check of dk and dv. The call that is checked
    is given a dout of zeros but for these queries: then no other adds to anything. Packed sequences beside those that are checked keep
    theirs: nothing of it may get here.

    A gradient may be all but 0 where its terms are not, and rounding is of the terms: a row is measured by three times their size. dP and
    delta cancel, too: dS is measured by P (|dP| + |delta|). A float16 below the smallest normal number has errors as large as that one.
    As in the tests, gradients have twice the limit of out.
    """
    group = case.num_heads_q // case.num_heads_kv
    tiny = 2.0**-14 if case.dtype == "float16" else 0.0

    def spot(result: int, where: tuple[Any, ...], expected: Array, squares: Array) -> Spot:
        size = np.maximum(3 * np.sqrt(squares), max(tiny, 1e-9))[:, None]
        return Spot(result, where, expected, size + np.abs(expected))

    parts, kept = [], {b: slice(0, n) for b, n in enumerate(case.lengths)}
    for b in _sequences(case):
        one = case.alone(b)
        step = -(-one.seqlen_q // max(8, min(rows // group, (1 << 22) // one.seqlen_k))) | 1  # odd: not the same row of every tile
        chosen = kept[b] = slice((one.seqlen_q - 1) % step, one.seqlen_q, step)
        first, end = (bound[chosen, None] for bound in one.visible_keys())
        j = np.arange(one.seqlen_k)
        visible = (first <= j) & (j < end)
        for h_kv in {0, case.num_heads_kv // 2, case.num_heads_kv - 1}:
            keys = case.at(b, slice(0, one.seqlen_k), h_kv)
            k, v = (place.fetch(x[keys]) for x in (inputs.k, inputs.v))
            of_keys: list[Any] = [0, 0, 0, 0]
            for h in range(h_kv * group, (h_kv + 1) * group):
                where = case.at(b, chosen, h)
                q, dout = (place.fetch(x[where]) for x in (inputs.q, inputs.dout))
                (dq, *sums), (square, *squares) = _gradients(case, q, k, v, dout, visible, tiny, h)
                parts.append(spot(0, where, dq, square))
                of_keys = [so_far + more for so_far, more in zip(of_keys, (*sums, *squares), strict=True)]
            dk, dv, squares_k, squares_v = of_keys
            parts += [spot(1, keys, dk, squares_k), spot(2, keys, dv, squares_v)]
    # Of an array with a batch axis the same rows of each sequence.
    given = [case.at(b, some, 0)[0] for b, some in kept.items()] if case.lengths else [kept[0]]
    return Spots(inputs._replace(dout=place.keep_rows(inputs.dout, given)), parts, 2 * LIMITS[case.dtype])


def _weights(case: Case, q: Array, k: Array, visible: Array, head: int) -> tuple[Array, Array]:
    """softmax(scale q kᵀ) of one head in float64, its sink in the sum, and what the soft cap leaves of a change of a score: the reference
    gathers keys row by row, too slow for rows of 64k of them."""
    scores = q @ k.T * (case.softmax_scale or case.head_dim**-0.5)
    slope = np.ones(())
    if case.softcap is not None:
        capped = np.tanh(scores / case.softcap)
        scores, slope = case.softcap * capped, 1 - capped * capped
    scores = np.where(visible, scores, -np.inf)
    sink = float(case.sink["sink"][head]) if case.sink else -np.inf
    row_max = scores.max(axis=1, keepdims=True, initial=sink)
    row_max = np.where(np.isfinite(row_max), row_max, 0)
    weights = np.exp(scores - row_max)
    row_sum = weights.sum(axis=1, keepdims=True) + np.exp(sink - row_max)
    return weights / np.where(row_sum == 0, 1, row_sum), slope


def _gradients(
    case: Case, q: Array, k: Array, v: Array, dout: Array, visible: Array, tiny: float, head: int
) -> tuple[tuple[Array, Array, Array], tuple[Array, Array, Array]]:
    """(dq, dk, dv) of one head in float64, and for each row the mean square of what its terms would add up to if they were independent."""
    scale = case.softmax_scale or case.head_dim**-0.5
    P, slope = _weights(case, q, k, visible, head)
    dP, delta = dout @ v.T, (dout * (P @ v)).sum(axis=1, keepdims=True)
    dS = scale * slope * P * (dP - delta)
    size_S, size_P = (np.where(visible, np.maximum(x, tiny), 0) for x in (slope * P * (np.abs(dP) + np.abs(delta)), P))
    squares_S, squares_P = (scale * size_S) ** 2, size_P**2
    q2, k2, dout2 = ((x * x).mean(axis=1) for x in (q, k, dout))
    return (dS @ k, dS.T @ q, P.T @ dout), (squares_S @ k2, squares_S.T @ q2, squares_P.T @ dout2)


def poisoned(case: Case, inputs: Inputs) -> Inputs:
    """The same inputs with NaN in the keys and values past `seqused_k`: nothing may read what no query owns."""
    if "seqused" not in case.extras:
        return inputs
    unused = np.arange(case.seqlen_k) >= inputs.options["seqused_k"][:, None]
    k, v = inputs.k.copy(), inputs.v.copy()
    k[unused], v[unused] = np.nan, np.nan
    return inputs._replace(k=k, v=v)


def _reference(inputs: Inputs) -> tuple[Array, Array]:
    """float64 attention of the inputs as they are: rounded to their dtype first, exact from there on."""
    q, k, v = (array.astype(np.float64) for array in inputs[:3])
    options = {name: value for name, value in inputs.options.items() if name != "return_lse"}
    out, lse = cupyflash.reference.attention(q, k, v, **options, return_lse=True)
    return np.asarray(out), np.asarray(lse)


def _worst(actual: Any, expected: Array, scale: Array) -> float:
    """max |actual - expected| / scale; infinite where shapes differ or where NaN, inf or -inf are not in the same places."""
    actual = np.asarray(actual).astype(np.float64)
    if actual.shape != expected.shape:
        return math.inf
    finite = np.isfinite(expected)
    if not np.array_equal(actual[~finite], expected[~finite], equal_nan=True) or not np.isfinite(actual[finite]).all():
        return math.inf
    return float((np.abs(actual - np.where(finite, expected, 0))[finite] / scale[finite]).max(initial=0.0))
