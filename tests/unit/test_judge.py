"""The judge must fail what is wrong, or every other test is worth nothing."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from judge import BOUND, FLOOR_EPS, judge, standard_attention

DTYPES = ("float16", "bfloat16", "float32", "float64")
NAN, INF = np.nan, np.inf


@pytest.fixture(params=DTYPES)
def case(request, rng):
    """(dtype, out, lse, standard out, standard lse) of one attention; out and lse are float64 values."""
    dtype = np.dtype(request.param)
    q, k, v = (rng.standard_normal((2, 9, 2, 16)).astype(dtype) for _ in range(3))
    out, lse = standard_attention(*(x.astype(np.float64) for x in (q, k, v)), dtype="float64", causal=True)
    return dtype, out, lse, *standard_attention(q, k, v, dtype=dtype, causal=True)


def test_rounded_truth_and_the_formula_itself_pass(case):
    dtype, out, lse, standard, standard_lse = case
    lse_dtype = np.float64 if dtype == np.float64 else np.float32
    judge(out.astype(dtype), out, standard, dtype=dtype, name="rounded")
    judge(standard.astype(dtype), out, standard, dtype=dtype, name="formula")
    judge(lse.astype(lse_dtype), lse, standard_lse, dtype=dtype, name="rounded", kind="lse")
    judge(out.astype(dtype), out, standard, dtype=dtype, name="rounded", kind="gradient")


@pytest.mark.parametrize("kind", ["out", "lse", "gradient"])
def test_one_wrong_value_is_found_and_shown(case, kind):
    dtype, out, lse, standard, standard_lse = case
    want, plain = (lse, standard_lse) if kind == "lse" else (out, standard)
    got = want.copy()
    got.flat[-1] += 3 * BOUND[dtype.name] * (1 + abs(got.flat[-1]))
    last = [n - 1 for n in want.shape]
    with pytest.raises(AssertionError) as failure:
        judge(got, want, plain, dtype=dtype, name="fwd_simple", kind=kind)
    message = str(failure.value)
    assert message.startswith("fwd_simple: ")
    assert f"{kind}{last}" in message
    assert repr(got.flat[-1]) in message
    assert repr(want.flat[-1]) in message
    assert f"1 of {want.size} wrong" in message


def test_swapped_rows_heads_and_batches(case):
    dtype, out, lse, standard, standard_lse = case
    for axis in (0, 1, 2):
        with pytest.raises(AssertionError):
            judge(np.flip(out, axis).astype(dtype), out, standard, dtype=dtype, name="swapped")
        with pytest.raises(AssertionError):
            judge(np.flip(lse, axis), lse, standard_lse, dtype=dtype, name="swapped", kind="lse")


@pytest.mark.parametrize("dtype", DTYPES)
def test_twice_the_error_of_the_formula_is_the_limit(dtype, rng):
    expected = rng.uniform(-1, 1, (3, 4))
    off = BOUND[dtype] / 8
    standard = expected.copy()
    standard[1, 2] -= off
    for error in (1.9 * off, -1.9 * off):
        judge(expected + error, expected, standard, dtype=dtype, name="under twice")
    floor = float(ml_dtypes.finfo(dtype).eps) / 2 + FLOOR_EPS * np.finfo("float64" if dtype == "float64" else "float32").eps
    for error in (2.1 * off + floor, -2.1 * off - floor):
        with pytest.raises(AssertionError, match=r"out\[0, 0\]"):
            judge(expected + error, expected, standard, dtype=dtype, name="over twice")


@pytest.mark.parametrize("exact_weights", [False, True])
def test_rounding_the_weights_is_half_an_ulp_more(exact_weights):
    want = np.full((1, 1, 1, 4), 1.5)
    ulp = np.float16(1.5 + 2.0**-10)  # formula exact: half an ulp is allowed, or one
    got = want.astype(np.float16)
    got[..., 2] = ulp
    if exact_weights:
        judge(got, want, want, dtype=np.float16, name="x", exact_weights=True)
        got[..., 2] += np.float16(2.0**-10)
    with pytest.raises(AssertionError, match=r"out\[0, 0, 0, 2\]"):
        judge(got, want, want, dtype=np.float16, name="x", exact_weights=exact_weights)


def test_a_poor_formula_cannot_excuse_a_poor_result(case):
    dtype, out, _, standard, _ = case
    got = out + 3 * BOUND[dtype.name] * (1 + np.abs(out))
    for poor in (standard + 1.0, np.full_like(standard, NAN), np.full_like(standard, INF)):
        judge(out.astype(dtype), out, poor, dtype=dtype, name="good result, poor formula")
        with pytest.raises(AssertionError):
            judge(got, out, poor, dtype=dtype, name="poor result, poor formula")


def test_unwritten_output(case):
    dtype, out, lse, standard, standard_lse = case
    with pytest.raises(AssertionError, match=f"{out.size} of {out.size} wrong"):
        judge(np.full_like(out, NAN), out, standard, dtype=dtype, name="unwritten")
    one_row = out.copy()
    one_row[1, 8, 1] = NAN
    with pytest.raises(AssertionError, match=r"out\[1, 8, 1, 0\] is .*nan"):
        judge(one_row, out, standard, dtype=dtype, name="one row unwritten")
    with pytest.raises(AssertionError):
        judge(np.full_like(lse, NAN), lse, standard_lse, dtype=dtype, name="unwritten", kind="lse")


@pytest.mark.parametrize("want", [NAN, INF, -INF, 1.0])
@pytest.mark.parametrize("got", [NAN, INF, -INF, 1.0])
@pytest.mark.parametrize("kind", ["out", "lse", "gradient"])
def test_special_values_sit_in_the_same_places(got, want, kind):
    expected, actual = np.array([[2.0, want]]), np.array([[2.0, got]])
    if repr(got) == repr(want):
        judge(actual, expected, expected, dtype="float32", name="same", kind=kind)
    else:
        with pytest.raises(AssertionError):
            judge(actual, expected, expected, dtype="float32", name="other", kind=kind)


def test_a_row_without_keys_is_exactly_zero():
    want = np.array([[1.0, 0.0], [0.0, 0.0]])
    rounded, leftover = np.array([[1.0, 1e-8], [0.0, 0.0]]), np.array([[1.0, 0.0], [0.0, 1e-8]])
    judge(rounded, want, want, dtype="float32", name="this row sees keys")
    judge(leftover, want, want, dtype="float32", name="gradients may round", kind="gradient")
    with pytest.raises(AssertionError, match=r"out\[1, 1\] .* limit 0 "):
        judge(leftover, want, want, dtype="float32", name="this row does not")


def test_shapes_must_agree_without_broadcasting():
    with pytest.raises(AssertionError, match="shape"):
        judge(np.zeros((1, 3)), np.zeros((2, 3)), np.zeros((2, 3)), dtype="float32", name="broadcast")


def test_empty_results_pass():
    judge(np.zeros((0, 4)), np.zeros((0, 4)), np.zeros((0, 4)), dtype="float16", name="no rows")
