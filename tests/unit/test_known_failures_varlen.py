"""Failures that users of other libraries reported of packed sequences, forward and backward, each a test that names its row (KF-nnn).

Rows about other things are here in their packed form, where packing could bring them back. Errors of arguments are in test_packed.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from test_known_failures import BOUNDS, DTYPES, LENGTHS, poisoned

import cupyflash
from cupyflash import reference

ALL = ("q", "k", "v", "alibi_slopes", "sink")


def offsets(lengths: Any, first: int = 0) -> Any:
    return np.cumsum([first, *lengths]).astype(np.int32)


def inputs(
    rng: np.random.Generator, tokens_q: int, tokens_k: int, heads: Any = (4, 2), dims: Any = (16, 16), dtype: str = "float32"
) -> Any:
    """q, k, v and dout."""
    (hq, hkv), (d, dv) = heads, dims
    shapes = (tokens_q, hq, d), (tokens_k, hkv, d), (tokens_k, hkv, dv), (tokens_q, hq, dv)
    return [rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in shapes]


def compute(q: Any, k: Any, v: Any, dout: Any, cu_q: Any, cu_k: Any = None, *, dlse: Any = None, **options: Any) -> Any:
    """(out, lse, gradients), of a forward call and a backward call into NaN-filled memory."""
    out = poisoned((*q.shape[:-1], v.shape[-1]), q.dtype)
    result = cupyflash.attention_varlen(q, k, v, cu_q, cu_k, out=out, return_lse=True, **options)
    assert result.out is out
    targets = {f"d{name}": poisoned(x.shape, x.dtype) for name, x in zip("qkv", (q, k, v), strict=True)}
    more = {"dlse": dlse, "wrt": ALL, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, **targets}
    return out, result.lse, cupyflash.attention_backward(dout, q, k, v, out, result.lse, **more, **options)


def agrees(q: Any, k: Any, v: Any, dout: Any, cu_q: Any, cu_k: Any = None, *, dlse: Any = None, **options: Any) -> Any:
    """Compute, and compare each sequence with the float64 reference, and what belongs to none with zeros; return what was computed."""
    out, lse, grads = compute(q, k, v, dout, cu_q, cu_k, dlse=dlse, **options)
    sizes = {"q": q, "k": k, "v": v} | {name: options[name] for name in ("alibi_slopes", "sink") if name in options}
    expected, expected_lse = np.zeros(out.shape), np.full(lse.shape, -np.inf)
    wanted = {name: np.zeros(x.shape) for name, x in sizes.items()}
    for b in range(len(cu_q) - 1):
        rows, keys = slice(*cu_q[b : b + 2]), slice(*(cu_q if cu_k is None else cu_k)[b : b + 2])
        alone = dict(options) | {name: options[name][b : b + 1] for name in ("seqused_q", "seqused_k") if name in options}
        if each := np.ndim(options.get("alibi_slopes")) == 2:
            alone["alibi_slopes"] = options["alibi_slopes"][b]
        alone = {name: x for name, x in alone.items() if not name.startswith("max_seqlen")}
        expected[rows], expected_lse[:, rows] = reference.attention(q[rows], k[keys], v[keys], return_lse=True, **alone)
        through = None if dlse is None else dlse[:, rows]
        want = reference.attention_backward(dout[rows], q[rows], k[keys], v[keys], dlse=through, **alone)
        places = {"q": rows, "k": keys, "v": keys, "alibi_slopes": b if each else ..., "sink": ...}
        for name, total in wanted.items():
            total[places[name]] += getattr(want, f"d{name}")
    bound = BOUNDS[q.dtype.name]
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=bound, atol=bound)
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-6, atol=1e-4)
    for name, want in wanted.items():
        grad = getattr(grads, f"d{name}").astype(np.float64)
        np.testing.assert_allclose(grad, want, rtol=2 * bound, atol=2 * bound, err_msg=name)
    return out, lse, grads


def is_zero(x: Any) -> bool:
    return bool((x.astype(np.float64) == 0).all())


def same(result: Any, expected: Any, rounding: float = 0) -> None:
    """What a call may not read changes nothing. tests/gpu compares by another function, where 16 bits may be rounded otherwise."""
    np.testing.assert_allclose(result.astype(np.float64), expected.astype(np.float64), rtol=0, atol=rounding)


def all_same(one: Any, other: Any) -> None:
    for result, expected in zip((*one[:2], *one[2][:3]), (*other[:2], *other[2][:3]), strict=True):
        same(result, expected)


# --- of packed sequences -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False, "top_left"])
def test_kf_033_empty_rows_between_others(rng: np.random.Generator, dtype: str, causal: Any) -> None:
    cu_q, cu_k = offsets([1, 0, 1]), offsets([3, 0, 5])
    agrees(*inputs(rng, 2, 8, (9, 3), (64, 64), dtype), cu_q, cu_k, causal=causal)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_kf_034_keys_of_sequences_without_queries_have_gradients_of_zero(rng: np.random.Generator, dtype: str, d: int) -> None:
    cu_q, cu_k = offsets([0, 5, 3, 0]), offsets([7, 6, 4, 9])
    for causal in (False, True):
        _, _, grads = agrees(*inputs(rng, 8, 26, (2, 1), (d, d), dtype), cu_q, cu_k, causal=causal)
        for grad in (grads.dk, grads.dv):
            assert is_zero(grad[:7])
            assert is_zero(grad[17:])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sink", [False, True])
def test_kf_003_035_no_keys_at_all(rng: np.random.Generator, causal: bool, sink: bool) -> None:
    cu_q, cu_k = offsets([3, 0, 4]), offsets([0, 0, 0])
    options: dict[str, Any] = {"sink": np.ones(4, np.float32)} if sink else {}
    dlse = rng.standard_normal((4, 7)).astype(np.float32)
    out, lse, grads = agrees(*inputs(rng, 7, 0), cu_q, cu_k, causal=causal, dlse=dlse, **options)
    assert is_zero(out)
    np.testing.assert_array_equal(lse, 1 if sink else -np.inf)
    assert is_zero(grads.dq)
    assert grads.dk.shape == (0, 2, 16)
    around = inputs(rng, 7, 30)  # keys that belong to no sequence
    agrees(*around, cu_q, offsets([0, 0, 0], 12), causal=causal, dlse=dlse, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kf_036_nothing_is_written_around_the_results(rng: np.random.Generator, dtype: str) -> None:
    """Results between regions that nobody may touch, next to one another in one array."""
    cu_q, cu_k = offsets([2, 3, 2]), offsets([4, 0, 4])
    q, k, v, dout = inputs(rng, 7, 8, dtype=dtype)
    canvas = np.full((3 * 7 + 2 * 8 + 4 * 6, 4, 16), 7, DTYPES[dtype])
    out, dq, dk, dv = canvas[6:13], canvas[19:26], canvas[32:40, 1:3], canvas[46:54, 1:3]
    result = cupyflash.attention_varlen(q, k, v, cu_q, cu_k, out=out, return_lse=True)
    targets = {"dq": dq, "dk": dk, "dv": dv}
    cupyflash.attention_backward(dout, q, k, v, out, result.lse, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **targets)
    same(out, agrees(q, k, v, dout, cu_q, cu_k)[0])
    assert is_zero(out[2:5])
    for x in (out, dq, dk, dv):
        x[...] = 7
    np.testing.assert_array_equal(canvas.astype(float), 7)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_kf_037_tokens_behind_the_last_offset(rng: np.random.Generator, dtype: str) -> None:
    cu = np.array([0, 144, 432, 944], np.int32)
    arrays = inputs(rng, 946, 946, (2, 1), (8, 8), dtype)
    clean = compute(*arrays, cu, causal=True)
    for x in arrays:
        x[944:] = np.nan
    out, lse, grads = compute(*arrays, cu, causal=True)
    all_same((out, lse, grads), clean)
    for x in (out, *grads[:3]):
        assert is_zero(x[944:])
    np.testing.assert_array_equal(lse[:, 944:], -np.inf)


def test_kf_037_tokens_around_the_sequences_agree(rng: np.random.Generator) -> None:
    """Also before the first, other numbers of them in q and in k, and where there is no sequence."""
    for dtype in DTYPES:
        q, k, v, dout = inputs(rng, 50, 70, dtype=dtype)
        for cu_q, cu_k in ((offsets([7, 13], 5), offsets([11, 3], 30)), (offsets([], 3), offsets([], 9)), (offsets([0], 50), offsets([9]))):
            agrees(q, k, v, dout, cu_q, cu_k, causal=True)


@pytest.mark.parametrize("hint", [0, 1, 64, 130, 4096])
def test_kf_038_a_wrong_longest_sequence_changes_nothing(rng: np.random.Generator, hint: int) -> None:
    for cu in (offsets([130]), offsets([3, 127])):
        agrees(*inputs(rng, 130, 130), cu, causal=True, max_seqlen_q=hint, max_seqlen_k=hint)


@pytest.mark.parametrize("lengths", [[1, 300, 2], [301], [1] * 40 + [263]])
@pytest.mark.parametrize("causal", [False, True])
def test_kf_039_very_uneven_lengths(rng: np.random.Generator, lengths: list[int], causal: bool) -> None:
    """cu_seqlens are the last bytes of their memory, as are the arrays."""
    total = sum(lengths)
    cu = np.concatenate([np.full(5, -1, np.int32), offsets(lengths)])[5:]
    arrays = [np.concatenate([np.full_like(x[:3], np.nan), x])[3:] for x in inputs(rng, total, total, (2, 1))]
    agrees(*arrays, cu, causal=causal)
    agrees(*arrays, cu, cu.copy(), window_size=(20, 3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (4, 2), "softcap": 3.0}])
def test_kf_005_040_057_used_lengths_with_nan_behind_them(rng: np.random.Generator, dtype: str, options: dict[str, Any]) -> None:
    cu_q, cu_k = offsets([20, 20, 20, 3], 1), offsets([20, 20, 33, 5], 2)
    used: dict[str, Any] = {"seqused_q": np.array([20, 0, 7, 9], np.int32), "seqused_k": np.array([13, 20, 0, 3], np.int32)}
    q, k, v, dout = inputs(rng, 64, 82, dtype=dtype)
    clean = agrees(q, k, v, dout, cu_q, cu_k, **used, **options)
    for arrays, cu, name in (((q, dout), cu_q, "seqused_q"), ((k, v), cu_k, "seqused_k")):
        for x in arrays:
            unused = np.ones(len(x), bool)
            for begin, end, n in zip(cu[:-1], cu[1:], used[name], strict=True):
                unused[begin : min(begin + n, end)] = False
            x[unused] = np.nan
    all_same(compute(q, k, v, dout, cu_q, cu_k, **used, **options), clean)
    out, lse, grads = clean
    for x in (out, grads.dq):
        assert is_zero(x[21:41])
    assert is_zero(grads.dk[15:22])
    assert is_zero(grads.dv[42:75])
    np.testing.assert_array_equal(lse[:, 21:41], -np.inf)


@pytest.mark.parametrize("cu_q", [[0, 9, 4, 12], [-3, 5, 12, 12], [0, 5, 99, 100], [2**31 - 1, 0, -(2**31), 7], [12, 12, 0, 0]])
def test_kf_130_offsets_that_decrease_or_leave_the_array_are_clamped(rng: np.random.Generator, cu_q: list[int]) -> None:
    """What such a call gives means nothing where sequences overlap, but it writes only where its results are."""
    q, k, v, dout = inputs(rng, 12, 12)
    cu, regular = np.array(cu_q, np.int32), offsets([3, 4, 5])
    around = {name: np.full((18, *x.shape[1:]), 7, np.float32) for name, x in {"out": q, "dq": q, "dk": k, "dv": v}.items()}
    for offsets_of in ((cu, cu), (cu, regular), (regular, cu)):
        inside = {name: x[3:15] for name, x in around.items()}
        out = inside.pop("out")
        lse = cupyflash.attention_varlen(q, k, v, *offsets_of, out=out, return_lse=True).lse
        more = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), offsets_of, strict=True))
        cupyflash.attention_backward(dout, q, k, v, out, lse, **more, **inside)
        for x in around.values():
            np.testing.assert_array_equal(x[:3], 7)
            np.testing.assert_array_equal(x[15:], 7)


def test_kf_130_offsets_past_the_array_are_its_end(rng: np.random.Generator) -> None:
    q, k, v, dout = inputs(rng, 12, 12)
    all_same(compute(q, k, v, dout, np.array([-5, 4, 99, 120], np.int32)), agrees(q, k, v, dout, offsets([4, 8, 0])))


# --- NaN, rows without keys, corners, windows --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [1, 64, 80])
def test_kf_001_002_causal_rows_without_a_key(rng: np.random.Generator, dtype: str, d: int) -> None:
    cu_q, cu_k = offsets([5, 3, 6]), offsets([2, 3, 3])
    q, k, v, dout = inputs(rng, 14, 8, dims=(d, d), dtype=dtype)
    clean = agrees(q, k, v, dout, cu_q, cu_k, causal=True)
    out, lse, grads = clean
    empty = [0, 1, 2, 8, 9, 10]
    for x in (out, grads.dq):
        assert is_zero(x[empty])
    np.testing.assert_array_equal(lse[:, empty], -np.inf)
    dout[empty] = np.nan  # a row that sees no key contributes nothing, whatever arrives there
    all_same(compute(q, k, v, dout, cu_q, cu_k, causal=True), clean)


def test_kf_003_011_016_windows_without_a_key(rng: np.random.Generator) -> None:
    cu_q, cu_k = offsets([300, 129, 5]), offsets([4, 32, 2])
    arrays = inputs(rng, 434, 38, (1, 1))
    agrees(*arrays, cu_q, cu_k, window_size=(2, 1), causal="top_left")
    agrees(*arrays, cu_q, cu_k, window_size=(32, 64))
    agrees(*arrays, cu_q, cu_k, window_size=(1, 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_kf_004_nan_of_a_sequence_stays_in_it(rng: np.random.Generator, dtype: str, bad: float) -> None:
    """Next to others in the same block of keys; and in its own, in rows that see it."""
    cu = offsets([60, 70, 1, 40])
    q, k, v, dout = inputs(rng, 171, 171, (2, 1), (32, 32), dtype)
    clean = compute(q, k, v, dout, cu, causal=True)
    k[129] = v[129] = bad  # the last key of the second
    out, lse, grads = compute(q, k, v, dout, cu, causal=True)
    others = np.arange(171) != 129
    in_others = (np.arange(171) < 60) | (np.arange(171) >= 130)
    same(out[others], clean[0][others])
    same(lse[:, others], clean[1][:, others])
    same(grads.dq[others], clean[2].dq[others])
    for name in ("dk", "dv"):
        same(getattr(grads, name)[in_others], getattr(clean[2], name)[in_others])
    assert np.isnan(out[129].astype(np.float32)).all()


def visible_keys(lengths_q: Any, lengths_k: Any, **options: Any) -> list[list[set[int]]]:
    """Which keys each row of each sequence sees, read off the output: V is the identity, and every score is equal."""
    cu_q, cu_k = offsets(lengths_q), offsets(lengths_k)
    q, k = np.zeros((cu_q[-1], 1, 4), np.float32), np.zeros((cu_k[-1], 1, 4), np.float32)
    out = cupyflash.attention_varlen(q, k, np.eye(cu_k[-1], dtype=np.float32)[:, None], cu_q, cu_k, **options)
    return [[set((np.flatnonzero(row) - cu_k[b]).tolist()) for row in out[cu_q[b] : cu_q[b + 1], 0]] for b in range(len(lengths_q))]


def test_kf_010_011_012_013_each_sequence_has_its_corner() -> None:
    wide, high = [{0, 1, 2, 3}, {0, 1, 2, 3, 4}], [set(), set(), set(), {0}, {0, 1}]
    assert visible_keys([2, 5, 1, 0], [5, 2, 16, 3], causal=True) == [wide, high, [{*range(16)}], []]
    assert visible_keys([5, 2], [2, 5], causal="top_left") == [[{0}, {0, 1}, {0, 1}, {0, 1}, {0, 1}], [{0}, {0, 1}]]
    assert visible_keys([5, 2], [2, 5], window_size=(1, 0)) == [high, [{2, 3}, {3, 4}]]
    assert visible_keys([5, 5], [2, 2], window_size=(0, 0)) == [[set(), set(), set(), {0}, {1}]] * 2


def test_kf_014_window_of_three_sees_four_keys() -> None:
    expected = [{*range(max(0, i - 3), i + 1)} for i in range(64)]
    assert visible_keys([64, 1, 64], [64, 1, 64], window_size=(3, 0)) == [expected, [{0}], expected]


@pytest.mark.parametrize("dtype", DTYPES)
def test_kf_017_causal_gradients_differ_from_the_others(rng: np.random.Generator, dtype: str) -> None:
    arrays = inputs(rng, 192, 192, (2, 2), dtype=dtype)
    full, causal = (agrees(*arrays, offsets([96, 96]), causal=causal)[2] for causal in (False, True))
    for one, other in zip(full[:3], causal[:3], strict=True):
        assert np.abs(one.astype(np.float64) - other.astype(np.float64)).max() > 0.1


# --- scores, heads -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_kf_019_020_softcap_of_grouped_heads(rng: np.random.Generator, causal: bool) -> None:
    q, k, v, dout = inputs(rng, 140, 140, dims=(32, 32))
    q *= 12  # logits of about 30 and more
    used = np.array([70, 41, 0], np.int32)
    agrees(q, k, v, dout / 8, offsets([70, 60, 10]), softcap=15.0, causal=causal, seqused_q=used, seqused_k=used)


def test_kf_021_group_order_of_query_heads() -> None:
    q, k = np.ones((5, 6, 8), np.float32), np.ones((7, 2, 8), np.float32)
    v = np.broadcast_to(np.arange(2, dtype=np.float32)[:, None], (7, 2, 8)).copy()
    out = cupyflash.attention_varlen(q, k, v, offsets([2, 3]), offsets([4, 3]))
    np.testing.assert_array_equal(out[:, :3], 0)
    np.testing.assert_array_equal(out[:, 3:], 1)


def test_kf_022_slopes_for_all_sequences_or_for_each(rng: np.random.Generator) -> None:
    cu_q, cu_k = offsets([33, 0, 20, 7]), offsets([65, 5, 20, 3])
    arrays, slopes = inputs(rng, 60, 93), rng.random((4, 4)).astype(np.float32)
    each = agrees(*arrays, cu_q, cu_k, alibi_slopes=slopes, causal=True)
    assert each[2].dalibi_slopes.shape == (4, 4)
    shared = agrees(*arrays, cu_q, cu_k, alibi_slopes=slopes[0])
    apart = agrees(*arrays, cu_q, cu_k, alibi_slopes=np.stack([slopes[0]] * 4))
    all_same(shared, apart)
    np.testing.assert_allclose(shared[2].dalibi_slopes, apart[2].dalibi_slopes.sum(axis=0), rtol=1e-5, atol=1e-5)


# --- strides -----------------------------------------------------------------------------------------------------------------------------


def transposed(x: Any) -> Any:
    """The same values stored as (H, T, D)."""
    return np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kf_026_027_032_each_operand_as_a_transposed_view(rng: np.random.Generator, dtype: str) -> None:
    cu_q, cu_k = offsets([4, 4, 1]), offsets([6, 6, 1])
    for d in (1, 8, 33, 64, 100, 128, 256):
        q, k, v, dout = inputs(rng, 9, 13, (2, 2), (d, d), dtype)
        out, lse, expected = compute(q, k, v, dout, cu_q, cu_k)
        arrays = [dout, q, k, v, out]
        for n in range(5):
            views = [transposed(x) if m == n else x for m, x in enumerate(arrays)]
            again = cupyflash.attention_varlen(*views[1:4], cu_q, cu_k)
            np.testing.assert_array_equal(again, out)
            if n == 1 and d > 1:
                assert again.swapaxes(0, 1).flags.c_contiguous  # stored as q is
            grads = cupyflash.attention_backward(*views, lse, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
            for grad, want in zip(grads[:3], expected[:3], strict=True):
                same(grad, want)
        target = transposed(poisoned(out.shape, out.dtype))
        assert cupyflash.attention_varlen(q, k, v, cu_q, cu_k, out=target) is target
        np.testing.assert_array_equal(target, out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kf_028_any_storage_offset(rng: np.random.Generator, dtype: str) -> None:
    size = 17 * 2 * 40
    buffer = rng.standard_normal(size + 4).astype(DTYPES[dtype])
    views = [buffer[offset : offset + size].reshape(17, 2, 40) for offset in (1, 2, 3, 4)]
    cu = offsets([5, 12])
    for result, expected in zip(compute(*views, cu)[:2], compute(*[x.copy() for x in views], cu)[:2], strict=True):
        same(result, expected)
    agrees(*views, cu)


@pytest.mark.parametrize("stride", [0, 4, 12345 * 4])
@pytest.mark.parametrize("axis", [0, 1])
def test_kf_030_the_stride_of_an_axis_of_one_means_nothing(rng: np.random.Generator, axis: int, stride: int) -> None:
    shape = tuple(1 if a == axis else n for a, n in enumerate((5, 2, 16)))
    arrays = [rng.standard_normal(shape).astype(np.float32) for _ in range(4)]
    strange = [
        np.lib.stride_tricks.as_strided(x, shape, tuple(stride if a == axis else s for a, s in enumerate(x.strides))) for x in arrays
    ]
    cu = offsets([0, shape[0]])
    all_same(compute(*strange, cu), compute(*arrays, cu))


def test_kf_032_every_other_token(rng: np.random.Generator) -> None:
    whole = inputs(rng, 40, 40)
    views = [x[1::2] for x in whole]
    cu = offsets([7, 7, 6])
    agrees(*views, cu, causal=True)
    out = poisoned((40, 4, 16), np.float32)
    result = cupyflash.attention_varlen(*views[:3], cu, causal=True, out=out[::2])
    np.testing.assert_array_equal(result, cupyflash.attention_varlen(*[x.copy() for x in views[:3]], cu, causal=True))
    assert np.isnan(out[1::2]).all()


# --- LSE ---------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_kf_052_053_the_lse_has_a_row_for_each_token(rng: np.random.Generator, dtype: str) -> None:
    q, k, v, _ = inputs(rng, 12, 12, dtype=dtype)
    lse = cupyflash.attention_varlen(q, k, v, offsets([3, 9]), return_lse=True).lse
    assert lse.shape == (4, 12)
    assert lse.dtype == (np.float64 if dtype == "float64" else np.float32)
    scores = np.einsum("ihd,jhd->hij", q.astype(float), np.repeat(k, 2, 1).astype(float)) / 4
    for s in (slice(0, 3), slice(3, 12)):
        np.testing.assert_allclose(lse[:, s], np.log(np.exp(scores[:, s, s]).sum(-1)), rtol=2e-6, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kf_054_055_a_gradient_through_the_lse_of_any_strides(rng: np.random.Generator, dtype: str) -> None:
    cu_q, cu_k = offsets([40, 0, 7]), offsets([50, 3, 5])
    q, k, v, dout = inputs(rng, 47, 58, dtype=dtype)
    wide = np.float64 if dtype == "float64" else np.float32
    for options in ({}, {"causal": True, "softcap": 2.0}, {"sink": np.ones(4, wide)}):
        dlse = rng.standard_normal((4, 47)).astype(wide)
        out, lse, expected = agrees(q, k, v, np.zeros_like(dout), cu_q, cu_k, dlse=dlse, **options)
        assert np.abs(expected.dq.astype(np.float64)).max() > 0.01
        assert is_zero(expected.dv)
        turned = [np.ascontiguousarray(x.T).T for x in (lse, dlse)]
        more = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "dlse": turned[1], **options}
        for grad, want in zip(
            cupyflash.attention_backward(np.zeros_like(dout), q, k, v, out, turned[0], **more)[:3], expected, strict=False
        ):
            same(grad, want)


# --- sizes -------------------------------------------------------------------------------------------------------------------------------


def test_kf_056_072_all_pairs_of_lengths_in_one_call(rng: np.random.Generator) -> None:
    pairs = [*itertools.product(LENGTHS, LENGTHS)]
    cu_q, cu_k = (offsets(lengths) for lengths in zip(*pairs, strict=True))
    arrays = inputs(rng, cu_q[-1], cu_k[-1], (1, 1), (8, 8))
    agrees(*arrays, cu_q, cu_k, causal=True)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_kf_058_062_more_than_65535_sequences(rng: np.random.Generator, dtype: str) -> None:
    """Of one token each: out is v, and dv is dout."""
    q, k, v, dout = inputs(rng, 65537, 65537, (1, 1), (4, 4), dtype)
    out, pullback = cupyflash.attention_vjp(q, k, v, cu_seqlens_q=np.arange(65538, dtype=np.int32))
    np.testing.assert_array_equal(out, v)
    np.testing.assert_array_equal(pullback(dout).dv, dout)


def test_twenty_thousand_sequences_of_few_tokens(rng: np.random.Generator) -> None:
    lengths = rng.integers(0, 3, 20000)
    cu = offsets(lengths)
    q, k, v, dout = inputs(rng, cu[-1], cu[-1], (2, 1), (4, 4))
    out, _, grads = compute(q, k, v, dout, cu, causal=True)
    first = cu[:-1][lengths > 0]  # sees itself alone
    np.testing.assert_allclose(out[first], np.repeat(v[first], 2, axis=1), rtol=1e-6)
    assert np.abs(grads.dq[first]).max() < 1e-5
    alone = cu[:-1][lengths == 1]
    np.testing.assert_allclose(grads.dv[alone], dout[alone].sum(axis=1, keepdims=True), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dims", [(5, 5), (33, 33), (59, 59), (100, 100), (64, 128), (128, 64), (192, 128), (96, 40)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kf_066_073_odd_head_dims_and_value_dims_that_differ(rng: np.random.Generator, dims: tuple[int, int], dtype: str) -> None:
    agrees(*inputs(rng, 42, 50, (2, 1), dims, dtype), offsets([19, 0, 23]), offsets([23, 4, 23]), causal=True)


@pytest.mark.parametrize("dims", [(257, 256), (64, 257)])
def test_kf_067_the_largest_head_dim_and_one_more(rng: np.random.Generator, dims: tuple[int, int]) -> None:
    q, k, v, dout = inputs(rng, 3, 4, dims=dims)
    cu = {"cu_seqlens_q": offsets([3]), "cu_seqlens_k": offsets([4])}
    with pytest.raises(NotImplementedError, match="256 is the largest for forward and backward"):
        cupyflash.attention_varlen(q, k, v, **cu)
    with pytest.raises(NotImplementedError, match="256 is the largest for forward and backward"):
        cupyflash.attention_backward(dout, q, k, v, dout, np.zeros((4, 3), np.float32), **cu)
    agrees(*inputs(rng, 3, 4, dims=(256, 256)), *cu.values())


def test_kf_068_every_multiple_of_eight(rng: np.random.Generator) -> None:
    for d in range(8, 257, 8):
        agrees(*inputs(rng, 3, 5, (2, 1), (d, d), "float16"), offsets([1, 2]), offsets([2, 3]))


@pytest.mark.parametrize("sequences", [0, 1, 3])
@pytest.mark.parametrize(("tokens_q", "tokens_k"), [(0, 0), (4, 0), (0, 4), (4, 6)])
@pytest.mark.parametrize("heads", [(4, 2), (0, 2), (0, 0)])
def test_kf_069_070_zero_sizes(rng: np.random.Generator, sequences: int, tokens_q: int, tokens_k: int, heads: Any) -> None:
    """Sequences without tokens, in arrays with and without."""
    arrays, cu = inputs(rng, tokens_q, tokens_k, heads), np.zeros(sequences + 1, np.int32)
    each = {"alibi_slopes": np.ones((sequences, heads[0]), np.float32), "seqused_k": np.zeros(sequences, np.int32)}
    for options in ({}, {"causal": True}, {"softcap": 2.0, "window_size": (1, 1)}, each, {"alibi_slopes": np.ones(heads[0], np.float32)}):
        out, lse, grads = compute(*arrays, cu, cu, **options)
        assert lse.shape == (heads[0], tokens_q)
        np.testing.assert_array_equal(lse, -np.inf)
        for x in (out, *(grad for grad in grads if grad is not None)):
            assert is_zero(x)
        assert (grads.dalibi_slopes is not None) == ("alibi_slopes" in options)


def test_kf_071_one_query_of_many_heads(rng: np.random.Generator) -> None:
    agrees(*inputs(rng, 3, 60, (32, 32), (128, 128)), offsets([1, 1, 1]), offsets([20, 20, 20]), causal=True)
    agrees(*inputs(rng, 1, 20, (32, 4), (128, 128), "float16"), offsets([1]), offsets([20]))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_kf_074_every_run_has_the_same_bits(rng: np.random.Generator, dtype: str) -> None:
    cu = offsets([700, 1, 0, 300, 300, 5])
    arrays = inputs(rng, 1306, 1306, (4, 2), dtype=dtype)
    options: dict[str, Any] = {"causal": True, "sink": np.ones(4, np.float32), "alibi_slopes": np.full(4, 0.01, np.float32)}
    out, lse, _ = cupyflash.attention_varlen(*arrays[:3], cu, return_lse=True, **options)
    runs = []
    for _ in range(5):
        more = {"wrt": ALL, "deterministic": True, "cu_seqlens_q": cu}
        grads = cupyflash.attention_backward(arrays[3], *arrays[:3], out, lse, **more, **options)
        again = cupyflash.attention_varlen(*arrays[:3], cu, **options)
        runs.append([x.tobytes() for x in (again, *grads) if x is not None])
    assert all(run == runs[0] for run in runs)
