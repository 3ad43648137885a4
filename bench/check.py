"""Right or wrong: a result against float64 attention of the same inputs, with the limits that every table and test here uses."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

import cupyflash

from .cases import Array, Case, Inputs

# Allowed error of out, absolute and relative alike: |out - ref| <= limit * (1 + |ref|). The 16-bit types are limited by their own
# rounding of the result and of P (fp16 has 11 bits, bf16 has 8); float64 has room for sums in another order.
LIMITS = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 2e-5, "float64": 1e-12}


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


def run(case: Case) -> Verdict:
    """Compute the case with the library on this machine and judge it; an exception is a verdict too."""
    inputs = case.inputs()
    try:
        result = cupyflash.attention(*poisoned(case, inputs)[:3], **inputs.options)
    except NotImplementedError as error:
        return Verdict(0.0, LIMITS[case.dtype], note=f"not supported: {error}", skipped=True)
    except Exception as error:  # whatever the library throws at a valid call is a finding, and the other cases still run
        return failure(case, error)
    return judge(case, inputs, result.out, result.lse)


def failure(case: Case, error: Exception) -> Verdict:
    return Verdict(math.inf, LIMITS[case.dtype], note=f"{type(error).__name__}: {error}")


def judge(case: Case, inputs: Inputs, out: Array, lse: Array | None = None) -> Verdict:
    """Compare every row of `out` and `lse` with the reference. Keys that no query owns are clean here, whatever the call was given."""
    expected, expected_lse = _reference(inputs)
    lse_error = None
    if lse is not None:
        lse_error = _worst(lse, expected_lse, 1e-4 + 2e-6 * np.abs(np.where(np.isfinite(expected_lse), expected_lse, 0)))
    return Verdict(_worst(out, expected, 1 + np.abs(expected)), LIMITS[case.dtype], lse_error)


def spot_check(case: Case, inputs: Inputs, out: Array, rows: int = 32) -> Verdict:
    """Compare the first, the middle and the last `rows` queries of each head: what a timed call is worth checking for.

    float64 over all of a long sequence would take longer than the timing. A block of queries ending at row e, with the first
    e + Sk - Sq keys, is itself a bottom-right causal problem; without a diagonal the keys stay whole.
    """
    worst = 0.0
    for end in sorted({min(rows, case.seqlen_q), (case.seqlen_q + rows) // 2, case.seqlen_q}):
        start, keys = max(end - rows, 0), max(end + case.seqlen_k - case.seqlen_q, 0) if case.causal else case.seqlen_k
        block = Inputs(inputs.q[:, start:end], inputs.k[:, :keys], inputs.v[:, :keys], inputs.options)
        expected, _ = _reference(block)
        worst = max(worst, _worst(out[:, start:end], expected, 1 + np.abs(expected)))
    return Verdict(worst, LIMITS[case.dtype])


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
