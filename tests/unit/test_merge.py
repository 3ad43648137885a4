"""`merge_states` against its formula in float64. tests/emulated and tests/gpu run all of this by the kernel."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_known_failures import poisoned

import cupyflash
from cupyflash import ArgumentError, DtypeError, ShapeError
from cupyflash.problem import MAX_PARTS

F32 = np.float32
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": F32, "float64": np.float64}
# Lengths of one and of primes; rows of one element, of whole pieces of 16 bytes and of others; of more threads than a block has; packed.
SHAPES = [(1, 1, 1, 1), (2, 13, 3, 64), (1, 7, 5, 80), (3, 5, 2, 33), (17, 2, 48), (1, 2, 512)]


def states(rng: np.random.Generator, parts: int, shape: tuple[int, ...], dtype: Any) -> tuple[list[Any], list[Any]]:
    """outs and lses; about every third row of a part has no key and a NaN for an output."""
    *batch, seqlen, heads, _ = shape
    outs = [rng.standard_normal(shape).astype(dtype) for _ in range(parts)]
    lses = [(4 * rng.standard_normal((*batch, heads, seqlen))).astype(np.float64 if dtype is np.float64 else F32) for _ in range(parts)]
    for out, lse in zip(outs, lses, strict=True):
        without = rng.random(lse.shape) < 0.3
        lse[without] = -np.inf
        out[without.swapaxes(-1, -2)] = np.nan
    return outs, lses


def agrees(outs: list[Any], lses: list[Any], **targets: Any) -> tuple[Any, Any]:
    """Compare with the formula: a result is rounded once from the arithmetic, float32 or, for float64, float64."""
    out, lse = cupyflash.merge_states(outs, lses, **targets)
    stacked = np.stack(lses).astype(np.longdouble)  # float64 would be what it is to judge
    with np.errstate(divide="ignore", invalid="ignore"):
        expected_lse = np.logaddexp.reduce(stacked, axis=0)
        weights = np.where(stacked == -np.inf, 0, np.exp(stacked - expected_lse)).swapaxes(-1, -2)[..., None]
    values = np.where(weights == 0, 0, np.stack(outs).astype(np.float64).astype(np.longdouble))
    expected, size = (weights * values).sum(axis=0), (weights * np.abs(values)).sum(axis=0)
    assert (out.dtype, lse.dtype) == (outs[0].dtype, lses[0].dtype)
    eps = float(np.finfo(lse.dtype).eps)
    error = np.abs(out.astype(np.float64) - expected)
    assert (error <= float(ml_dtypes.finfo(out.dtype).eps) / 2 * np.abs(expected) + 16 * eps * size + 1e-7 * (out.itemsize == 2)).all()
    np.testing.assert_allclose(lse, expected_lse, rtol=4 * eps, atol=4 * eps)
    np.testing.assert_array_equal(out[(expected_lse == -np.inf).swapaxes(-1, -2)], 0)
    return out, lse


@pytest.mark.parametrize("parts", [1, 2, 3, MAX_PARTS])
@pytest.mark.parametrize("dtype", DTYPES)
def test_states_are_weighed_by_their_keys(rng: np.random.Generator, dtype: str, parts: int) -> None:
    for shape in SHAPES:
        outs, lses = states(rng, parts, shape, DTYPES[dtype])
        out, lse = agrees(outs, lses, out=poisoned(shape, DTYPES[dtype]), lse_out=poisoned(lses[0].shape, lses[0].dtype))
        made, made_lse = agrees(outs, lses)
        assert (made.tobytes(), made_lse.tobytes()) == (out.tobytes(), lse.tobytes())


@pytest.mark.parametrize("shape", [(0, 3, 2, 8), (2, 0, 2, 8), (3, 0, 8), (2, 3, 2, 0)])
def test_states_without_elements(rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    """Rows of no width still have an LSE."""
    out, lse = agrees(*states(rng, 2, shape, F32))
    assert (out.shape, lse.shape) == (shape, (*shape[:-3], shape[-2], shape[-3]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_strides(rng: np.random.Generator, dtype: str) -> None:
    """Parts in orders of their own, in wider arrays, from an odd element on, and every other element of a row."""
    shape = (2, 5, 3, 16)
    outs, lses = states(rng, 4, shape, DTYPES[dtype])
    memory = [np.zeros(n, DTYPES[dtype]) for n in (480, 960, 481, 960)]
    there = [
        memory[0].reshape(2, 3, 5, 16).swapaxes(1, 2),
        memory[1].reshape(5, 2, 3, 32)[..., 16:].swapaxes(0, 1),
        memory[2][1:].reshape(shape),
        memory[3].reshape(2, 5, 3, 32)[..., ::2],
    ]
    rows = [np.zeros((5, 2, 3, 2), lses[0].dtype)[..., 0].transpose(1, 2, 0) for _ in lses]
    for view, values in zip((*there, *rows), (*outs, *lses), strict=True):
        view[...] = values
    targets = [poisoned((2, 3, 5, 16), DTYPES[dtype]).swapaxes(1, 2), poisoned((2, 5, 3, 32), DTYPES[dtype])[..., ::2]]
    lse_target = poisoned((5, 2, 3), lses[0].dtype).transpose(1, 2, 0)
    for some in ([0, 1], [0, 1, 2], [3, 0], [3, 2, 1, 0]):
        expected, expected_lse = agrees([outs[n] for n in some], [lses[n] for n in some])
        for target in targets:
            out, lse = cupyflash.merge_states([there[n] for n in some], [rows[n] for n in some], out=target, lse_out=lse_target)
            assert out is target
            assert lse is lse_target
            np.testing.assert_array_equal(out, expected)
            np.testing.assert_array_equal(lse, expected_lse)
    out, _ = cupyflash.merge_states(there[:2], rows[:2])
    assert out.strides == there[0].strides  # the first part's axis order


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_lses_that_are_no_numbers_and_large_ones(rng: np.random.Generator, dtype: str) -> None:
    """+inf and NaN make their own row NaN, as in the formula, and no other; the size of an LSE costs no accuracy, nor that of an output."""
    outs, lses = states(rng, 3, (1, 8, 2, 16), DTYPES[dtype])
    outs, lses = [np.nan_to_num(out) for out in outs], [np.nan_to_num(lse, neginf=1) for lse in lses]
    lses[1][..., 2], lses[2][..., 3] = np.inf, np.nan
    lses[0][..., 4], lses[1][..., 4], lses[2][..., 4] = -2.5e4, -2.5e4 + 1, -np.inf
    lses[0][..., 5], lses[1][..., 5], lses[2][..., 5] = 3e4, 0, -3e4
    out, lse = cupyflash.merge_states(outs, lses)
    wrong = np.isin(np.arange(8), (2, 3))
    assert np.isnan(out[:, wrong]).all()
    assert np.isnan(lse[..., wrong]).all()
    agrees([out[:, ~wrong] for out in outs], [lse[..., ~wrong] for lse in lses])
    np.testing.assert_array_equal(out[:, 5], outs[0][:, 5])
    largest = [np.full((1, 2, 1, 16), np.finfo(out.dtype).max, out.dtype)] * 4
    np.testing.assert_array_equal(cupyflash.merge_states(largest, [np.zeros((1, 1, 2), lse.dtype)] * 4)[0], largest[0])


def test_a_failed_call_leaves_its_targets_alone(rng: np.random.Generator) -> None:
    outs, lses = states(rng, 2, (1, 6, 2, 8), F32)
    out, lse = np.full_like(outs[0], 7), np.full_like(lses[0], 7)
    for parts in ((outs, [lses[0], lses[1].astype(np.float64)]), ([outs[0], outs[1][:, 1:]], lses), ([out, outs[1]], lses)):
        with pytest.raises((DtypeError, ShapeError)):
            cupyflash.merge_states(*parts, out=out, lse_out=lse)
        assert (out == 7).all()
        assert (lse == 7).all()
    with pytest.raises(ShapeError, match=r"lse_out has strides .*share"):
        cupyflash.merge_states(outs, lses, out=out, lse_out=np.lib.stride_tricks.as_strided(lse, lse.shape, (0, 0, 4)))


def test_merge_states_checks_its_parts(rng: np.random.Generator) -> None:
    out, lse = rng.standard_normal((1, 6, 2, 8)).astype(F32), rng.standard_normal((1, 2, 6)).astype(F32)
    for error, message, outs, lses in (
        (ArgumentError, "outs holds 2 arrays and lses 1", [out, out], [lse]),
        (ArgumentError, "outs holds 0 arrays", [], []),
        (ShapeError, r"lses\[1\] has shape \(1, 6, 2\): it must be \(1, 2, 6\)", [out, out], [lse, lse.transpose(0, 2, 1)]),
        (ShapeError, r"outs\[1\] has shape \(1, 5, 2, 8\)", [out, out[:, 1:]], [lse, lse]),
        (DtypeError, r"lses\[0\] is float64: it must be float32", [out], [lse.astype(np.float64)]),
        (DtypeError, r"outs\[1\] is float16: it must be float32", [out, out.astype(np.float16)], [lse, lse]),
    ):
        with pytest.raises(error, match=message):
            cupyflash.merge_states(outs, lses)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, F32, np.float64])
@pytest.mark.parametrize("ndim", [3, 4])
def test_merge_states_is_attention_over_all_keys(rng: np.random.Generator, dtype: Any, ndim: int) -> None:
    q, k, v = rng.standard_normal((3, 2, 37, 4, 16)).astype(dtype)
    if ndim == 3:
        q, k, v = q[0], k[0], v[0]
    sink = np.zeros(4, F32)
    cuts = [(0, 0), (0, 10), (10, 11), (11, 37)]
    axis = ndim - 3
    parts = [
        cupyflash.attention(q, *(np.take(x, range(a, b), axis) for x in (k, v)), sink=sink if a == 10 else None, return_lse=True)
        for a, b in cuts
    ]
    out, lse = cupyflash.merge_states([p.out for p in parts], [p.lse for p in parts])
    expected, expected_lse = cupyflash.reference.attention(q, k, v, sink=sink, return_lse=True)
    assert out.dtype == q.dtype
    bound = {2: 1e-2 if dtype is not np.float16 else 2e-3, 4: 1e-5, 8: 1e-13}[q.itemsize]
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=bound, atol=bound)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5 if q.itemsize < 8 else 1e-13)


def test_merging_counts_for_nothing_what_saw_no_key(rng: np.random.Generator) -> None:
    """Dense and packed shapes; a part without keys may hold anything, and all parts without keys are 0 and -inf."""
    for shape in ((2, 3, 4, 8), (3, 4, 8)):
        out = rng.standard_normal(shape).astype(F32)
        lse = rng.standard_normal((*shape[:-3], shape[-2], shape[-3])).astype(F32)
        nothing, empty = np.full_like(out, np.nan), np.full_like(lse, -np.inf)
        for parts in (([nothing, out], [empty, lse]), ([out, nothing, nothing], [lse, empty, empty]), ([out], [lse])):
            merged, merged_lse = cupyflash.merge_states(*parts)
            np.testing.assert_array_equal(merged, out)
            np.testing.assert_array_equal(merged_lse, lse)
        merged, merged_lse = cupyflash.merge_states([nothing, nothing], [empty, empty])
        np.testing.assert_array_equal(merged, 0)
        np.testing.assert_array_equal(merged_lse, -np.inf)
