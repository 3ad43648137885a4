"""Right or wrong: a result against float64 attention of the same inputs, with the limits that every table and test here uses."""

from __future__ import annotations

import itertools
import math
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


def spot_check(case: Case, inputs: Inputs, out: Any, place: Place = HOST, rows: int = 32) -> Verdict:
    """Compare `rows` queries at the start, in the middle and at the end, of the first, a middle and the last head of the first and the
    last sequence: what a timed call is worth checking for, since float64 over all of it would take longer than the timing.

    Only the slices that are looked at are copied from the place. Of n keys with like weights the result shrinks as 1/sqrt(n), so that
    an error of LIMITS would be all of it: a row is measured by three times its own size where that is below 1. No `extras`.
    """
    if tuple(out.shape) != (*case.shapes[0][:3], case.head_dim_v):
        return Verdict(math.inf, LIMITS[case.dtype])
    first_key, end_key = case.visible_keys()
    ends = sorted({min(rows, case.seqlen_q), (case.seqlen_q + rows) // 2, case.seqlen_q} - {0})
    worst = 0.0
    for b, h, end in itertools.product({0, case.batch - 1}, {0, case.num_heads_q // 2, case.num_heads_q - 1}, ends):
        start, h_kv = max(end - rows, 0), h * case.num_heads_kv // case.num_heads_q
        first, last = first_key[start:end, None], end_key[start:end, None]
        keys = slice(int(first.min()), int(last.max()))
        q, actual = (place.fetch(array[b : b + 1, start:end, h : h + 1]) for array in (inputs.q, out))
        k, v = (place.fetch(array[b : b + 1, keys, h_kv : h_kv + 1]) for array in (inputs.k, inputs.v))
        j = np.arange(keys.start, keys.stop)
        expected = _formula(case, q[0, :, 0], k[0, :, 0], v[0, :, 0], (first <= j) & (j < last))[None, :, None]
        size = np.sqrt((expected * expected).mean(axis=-1, keepdims=True))
        worst = max(worst, _worst(actual, expected, np.clip(3 * size, 1e-9, 1) + np.abs(expected)))
    return Verdict(worst, LIMITS[case.dtype])


def _formula(case: Case, q: Array, k: Array, v: Array, visible: Array) -> Array:
    """softmax(scale q kᵀ) v of one head in float64: the reference gathers keys row by row, too slow for rows of 64k of them."""
    scores = q @ k.T * (case.softmax_scale or case.head_dim**-0.5)
    if case.softcap is not None:
        scores = case.softcap * np.tanh(scores / case.softcap)
    scores = np.where(visible, scores, -np.inf)
    row_max = scores.max(axis=1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isfinite(row_max), row_max, 0))
    row_sum = weights.sum(axis=1, keepdims=True)
    out: Array = weights @ v / np.where(row_sum == 0, 1, row_sum)
    return out


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
