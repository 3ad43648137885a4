"""Failures that users of other attention libraries reported, each a test that names its row (KF-nnn), on the host path.

Rows about interchange are in test_arrays.py, about errors of arguments in test_problem.py, about benchmarks in test_bench.py.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyflash
from cupyflash import reference

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
# atol = rtol: the sanity bounds; test_pairs.py judges by the tighter rule of judge.py.
BOUNDS = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 2e-5, "float64": 1e-12}


def make(rng: np.random.Generator, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...] | None = None, dtype: str = "float32") -> Any:
    return [rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in (q, k, v or k)]


def poisoned(shape: tuple[int, ...], dtype: Any) -> Any:
    return np.full(shape, np.nan, dtype)


def agrees(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
    """Compute into NaN-filled memory, compare with the float64 reference, return (out, lse)."""
    out = poisoned((*q.shape[:-1], v.shape[-1]), q.dtype)
    result = cupyflash.attention(q, k, v, out=out, return_lse=True, **options)
    assert result.out is out
    expected, expected_lse = reference.attention(q, k, v, return_lse=True, **options)
    bound = BOUNDS[q.dtype.name]
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=bound, atol=bound)
    np.testing.assert_allclose(result.lse, expected_lse, rtol=2e-6, atol=1e-4)
    return out, result.lse


def assert_empty(out: Any, lse: Any, rows: Any) -> None:
    np.testing.assert_array_equal(out[:, rows].astype(np.float32), 0)
    np.testing.assert_array_equal(lse[:, :, rows], -np.inf)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [1, 64, 80])
def test_kf_001_causal_rows_without_a_key_are_zero(rng: np.random.Generator, dtype: str, d: int) -> None:
    q, k, v = make(rng, (1, 5, 2, d), (1, 2, 2, d), dtype=dtype)
    assert_empty(*agrees(q, k, v, causal=True), slice(0, 3))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"sink": np.zeros(2, np.float32)}, {"softcap": 5.0}])
def test_kf_003_no_key_at_all(rng: np.random.Generator, options: dict[str, Any]) -> None:
    q, k, v = make(rng, (2, 4, 2, 16), (2, 0, 2, 16))
    out, lse = agrees(q, k, v, **options)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, 0 if "sink" in options else -np.inf)


def test_kf_003_window_without_a_key(rng: np.random.Generator) -> None:
    q, k, v = make(rng, (1, 300, 1, 16), (1, 4, 1, 16))
    assert_empty(*agrees(q, k, v, window_size=(2, 1), causal="top_left"), slice(6, None))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_kf_004_nan_in_a_hidden_key_reaches_only_rows_that_see_it(rng: np.random.Generator, dtype: str, bad: float) -> None:
    q, k, v = make(rng, (1, 130, 2, 32), (1, 130, 2, 32), dtype=dtype)
    clean = reference.attention(q, k, v, causal=True)
    k[:, -1] = v[:, -1] = bad
    out = cupyflash.attention(q, k, v, causal=True)
    np.testing.assert_allclose(out[:, :129].astype(np.float64), clean[:, :129], rtol=BOUNDS[dtype], atol=BOUNDS[dtype])
    assert np.isnan(out[:, 129].astype(np.float32)).all()


@pytest.mark.parametrize("hide", ["mask", "seqused_k", "top_left", "window"])
def test_kf_004_also_when_another_option_hides_the_key(rng: np.random.Generator, hide: str) -> None:
    q, k, v = make(rng, (2, 70, 4, 24), (2, 600, 2, 24))
    visible = np.arange(600)[None] < 555
    options: dict[str, dict[str, Any]] = {
        "mask": {"mask": visible},
        "seqused_k": {"seqused_k": np.array([555, 550], np.int32)},
        "top_left": {"causal": "top_left"},
        "window": {"causal": "top_left", "window_size": (3, 400)},
    }
    clean = reference.attention(q, k, v, **options[hide])
    k[:, 555:] = v[:, 555:] = np.nan
    np.testing.assert_allclose(cupyflash.attention(q, k, v, **options[hide]), clean, rtol=2e-5, atol=2e-5)


def test_a_visible_infinity_of_v_arrives_where_it_is_seen(rng: np.random.Generator) -> None:
    q, k, v = make(rng, (1, 40, 1, 8), (1, 40, 1, 8))
    v[0, 20, 0, 3] = np.inf
    out = cupyflash.attention(q, k, v, causal=True)
    assert np.isfinite(out[0, :20]).all()
    assert np.isinf(out[0, 20:, 0, 3]).all()
    assert np.isfinite(np.delete(out, 3, axis=3)).all()


def test_kf_007_huge_equal_logits() -> None:
    x = np.full((1, 1, 1, 64), 133120, ml_dtypes.bfloat16)
    out, lse, _ = cupyflash.attention(x, x, x, return_lse=True)
    np.testing.assert_array_equal(out, x)
    np.testing.assert_allclose(lse, 133120.0**2 * 64 / 8, rtol=1e-6)


def test_kf_008_very_negative_logits_keep_the_row(rng: np.random.Generator) -> None:
    q = np.full((1, 1, 1, 128), 43.3, np.float32)
    k = np.full((1, 50, 1, 128), -43.3, np.float32) + rng.standard_normal((1, 50, 1, 1)).astype(np.float32) * 1e-3
    v = np.ones((1, 50, 1, 16), np.float32)
    out, lse, _ = cupyflash.attention(q, k, v, return_lse=True)
    np.testing.assert_allclose(out, 1, rtol=1e-5)
    np.testing.assert_allclose(lse, reference.attention(q, k, v, return_lse=True)[1], rtol=2e-6)
    assert lse[0, 0, 0] < -2e4


def test_kf_009_merging_states_without_keys(rng: np.random.Generator) -> None:
    outs = [rng.standard_normal((1, 6, 2, 8)).astype(np.float32) for _ in range(2)]
    lses = [rng.standard_normal((1, 2, 6)).astype(np.float32) for _ in range(2)]
    lses[0][..., :4] = -np.inf
    for lse in lses:
        lse[..., 4] = -np.inf
    out, lse = cupyflash.merge_states(outs, lses, out=poisoned(outs[0].shape, np.float32), lse_out=poisoned(lses[0].shape, np.float32))
    np.testing.assert_array_equal(out[:, :4], outs[1][:, :4])
    np.testing.assert_array_equal(lse[..., :4], lses[1][..., :4])
    np.testing.assert_array_equal(out[:, 4], 0)
    np.testing.assert_array_equal(lse[..., 4], -np.inf)
    weight = 1 / (1 + np.exp(lses[1][0, :, 5] - lses[0][0, :, 5], dtype=np.float64))[:, None]
    np.testing.assert_allclose(out[0, 5], weight * outs[0][0, 5] + (1 - weight) * outs[1][0, 5], rtol=1e-5)


def visible_keys(sq: int, sk: int, **options: Any) -> list[set[int]]:
    """Which keys each row sees, read off the output: V is the identity, and every score is equal."""
    q, k = np.zeros((1, sq, 1, 4), np.float32), np.zeros((1, sk, 1, 4), np.float32)
    out = cupyflash.attention(q, k, np.eye(sk, dtype=np.float32)[None, :, None], **options)
    np.testing.assert_array_equal(out, reference.attention(q, k, np.eye(sk)[None, :, None], **options).astype(np.float32))
    return [set(np.flatnonzero(row)) for row in out[0, :, 0]]


def test_kf_010_causal_is_bottom_right() -> None:
    assert visible_keys(2, 5, causal=True) == [{0, 1, 2, 3}, {0, 1, 2, 3, 4}]


def test_kf_011_causal_with_fewer_keys_than_queries() -> None:
    assert visible_keys(5, 2, causal=True) == [set(), set(), set(), {0}, {0, 1}]
    assert visible_keys(5, 2, window_size=(1, 0)) == [set(), set(), set(), {0}, {0, 1}]
    assert visible_keys(5, 2, window_size=(0, 0)) == [set(), set(), set(), {0}, {1}]


def test_kf_012_one_query_sees_the_whole_cache(rng: np.random.Generator) -> None:
    assert visible_keys(1, 16, causal=True) == [set(range(16))]
    q, k, v = make(rng, (3, 1, 4, 32), (3, 16, 2, 32))
    np.testing.assert_array_equal(cupyflash.attention(q, k, v, causal=True), cupyflash.attention(q, k, v))


def test_kf_013_both_corners_are_pictured_in_the_docs() -> None:
    doc = cupyflash.attention.__doc__ or ""
    assert "bottom_right" in doc
    assert visible_keys(5, 2, causal="top_left") == [{0}, {0, 1}, {0, 1}, {0, 1}, {0, 1}]
    drawn: dict[tuple[int, int], list[list[str]]] = {(2, 5): [], (5, 2): []}
    for cells in (line.split() for line in doc.splitlines() if line.strip() and set(line) <= {"x", ".", " "}):
        drawn[5, 2].append(cells[-2:])
        if len(cells) > 2:
            drawn[2, 5].append(cells[:5])
    for (sq, sk), rows in drawn.items():
        assert [{j for j, cell in enumerate(row) if cell == "x"} for row in rows] == visible_keys(sq, sk, causal=True)


def test_kf_014_window_of_three_sees_four_keys() -> None:
    assert visible_keys(64, 64, window_size=(3, 0)) == [set(range(max(0, i - 3), i + 1)) for i in range(64)]


@pytest.mark.parametrize("window_size", [(-1, -3), (-2, 0), (3, -7)])
def test_kf_015_only_minus_one_is_unlimited(rng: np.random.Generator, window_size: tuple[int, int]) -> None:
    q, k, v = make(rng, (1, 9, 2, 8), (1, 12, 2, 8))
    with pytest.raises(ValueError, match=rf"window_size=\({window_size[0]}, {window_size[1]}\) has a distance below 0: only -1 or None"):
        cupyflash.attention(q, k, v, window_size=window_size)
    unlimited = cupyflash.attention(q, k, v)
    np.testing.assert_array_equal(cupyflash.attention(q, k, v, window_size=(-1, -1)), unlimited)
    np.testing.assert_array_equal(cupyflash.attention(q, k, v, window_size=(None, None)), unlimited)


def test_kf_016_window_with_more_queries_than_keys(rng: np.random.Generator) -> None:
    q, k, v = make(rng, (1, 129, 2, 16), (1, 32, 2, 16))
    assert_empty(*agrees(q, k, v, window_size=(32, 64)), slice(0, 33))


@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_kf_018_more_keys_than_queries(rng: np.random.Generator, causal: Any) -> None:
    agrees(*make(rng, (2, 3, 2, 16), (2, 128, 2, 16)), causal=causal)


@pytest.mark.parametrize("causal", [False, True])
def test_kf_019_softcap_comes_before_bias_and_mask(rng: np.random.Generator, causal: bool) -> None:
    q, k, v = make(rng, (1, 70, 2, 32), (1, 70, 2, 32))
    q *= 12  # logits of about 30 and more
    bias = rng.standard_normal((70, 70)).astype(np.float32) * 10
    mask = rng.random((70, 70)) < 0.7
    agrees(q, k, v, softcap=15.0, causal=causal, bias=bias, mask=mask)


def test_kf_021_group_order_of_query_heads() -> None:
    q, k = np.ones((1, 3, 6, 8), np.float32), np.ones((1, 4, 2, 8), np.float32)
    v = np.broadcast_to(np.arange(2, dtype=np.float32)[:, None], (1, 4, 2, 8)).copy()
    out = cupyflash.attention(q, k, v)
    np.testing.assert_array_equal(out[:, :, :3], 0)
    np.testing.assert_array_equal(out[:, :, 3:], 1)


def test_kf_022_slopes_for_all_batches_or_for_each(rng: np.random.Generator) -> None:
    q, k, v = make(rng, (2, 33, 4, 16), (2, 65, 2, 16))
    slopes = rng.random((2, 4)).astype(np.float32)
    agrees(q, k, v, alibi_slopes=slopes, causal=True)
    out, _ = agrees(q, k, v, alibi_slopes=slopes[0])
    np.testing.assert_array_equal(out, cupyflash.attention(q, k, v, alibi_slopes=np.stack([slopes[0]] * 2)))
    with pytest.raises(ValueError, match=r"alibi_slopes has shape \(5,\).*\(Hq,\) or \(B, Hq\) = \(4,\) or \(2, 4\)"):
        cupyflash.attention(q, k, v, alibi_slopes=np.ones(5, np.float32))


def test_kf_025_heads_that_do_not_group(rng: np.random.Generator) -> None:
    q, k, v = make(rng, (1, 3, 4, 8), (1, 3, 3, 8))
    with pytest.raises(ValueError, match="k has 3 heads and q has 4: num_heads_q must be a multiple of num_heads_kv"):
        cupyflash.attention(q, k, v)


def transposed(x: Any) -> Any:
    """The same values stored as (B, H, S, D)."""
    return np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kf_026_027_each_operand_as_a_transposed_view(rng: np.random.Generator, dtype: str) -> None:
    for d in (1, 8, 33, 64, 100, 128, 256):
        arrays = make(rng, (2, 9, 2, d), (2, 13, 2, d), dtype=dtype)
        expected = cupyflash.attention(*arrays)
        for n in range(3):
            views = [transposed(x) if m == n else x for m, x in enumerate(arrays)]
            np.testing.assert_array_equal(cupyflash.attention(*views), expected)
        out = transposed(poisoned(expected.shape, expected.dtype))
        assert cupyflash.attention(*arrays, out=out) is out
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kf_028_any_storage_offset(rng: np.random.Generator, dtype: str) -> None:
    shape, size = (1, 17, 2, 40), 17 * 2 * 40
    buffer = rng.standard_normal(size + 3).astype(DTYPES[dtype])
    q, k, v = (buffer[offset : offset + size].reshape(shape) for offset in (1, 2, 3))
    np.testing.assert_array_equal(cupyflash.attention(q, k, v), cupyflash.attention(q.copy(), k.copy(), v.copy()))


def test_kf_028_bytes_that_do_not_align(rng: np.random.Generator) -> None:
    x = rng.standard_normal((1, 5, 1, 8)).astype(np.float32)
    odd = np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(x.shape)
    assert not odd.flags.aligned
    np.testing.assert_array_equal(cupyflash.attention(odd, odd, odd), cupyflash.attention(x, x, x))


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1, 2)])
def test_kf_029_a_sparse_last_axis_is_an_error_with_the_way_out(rng: np.random.Generator, which: tuple[int, ...]) -> None:
    arrays = make(rng, (1, 6, 2, 16), (1, 6, 2, 16))
    for n in which:
        arrays[n] = np.repeat(arrays[n], 2, axis=-1)[..., ::2]
    name = "qkv"[which[0]]
    with pytest.raises(ValueError, match=rf"{name} has stride 2 on its last axis: it must be 1.*{name}\.copy\(\)"):
        cupyflash.attention(*arrays)


@pytest.mark.parametrize("stride", [0, 4, 12345 * 4])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_kf_030_the_stride_of_an_axis_of_one_means_nothing(rng: np.random.Generator, axis: int, stride: int) -> None:
    shape = tuple(1 if a == axis else n for a, n in enumerate((2, 3, 2, 16)))
    q, k, v = make(rng, shape, shape)
    strange = [
        np.lib.stride_tricks.as_strided(x, shape, tuple(stride if a == axis else s for a, s in enumerate(x.strides))) for x in (q, k, v)
    ]
    np.testing.assert_array_equal(cupyflash.attention(*strange), cupyflash.attention(q, k, v))


@pytest.mark.parametrize("dtype", DTYPES)
def test_kf_031_slices_of_a_packed_array(rng: np.random.Generator, dtype: str) -> None:
    packed = rng.standard_normal((2, 21, 3, 4, 24)).astype(DTYPES[dtype])
    q, k, v = (packed[:, :, n] for n in range(3))
    np.testing.assert_array_equal(cupyflash.attention(q, k, v), cupyflash.attention(q.copy(), k.copy(), v.copy()))


def test_kf_032_the_result_is_stored_as_q_is(rng: np.random.Generator) -> None:
    q, k, v = make(rng, (2, 5, 3, 8), (2, 7, 3, 8), (2, 7, 3, 10))
    out = cupyflash.attention(transposed(q), k, v)
    assert out.shape == (2, 5, 3, 10)
    assert out.transpose(0, 2, 1, 3).flags.c_contiguous
    swapped = [x.transpose(0, 2, 1, 3) for x in (q, k, v)]  # (B, H, S, D) views of (B, S, H, D) storage
    bhsd = cupyflash.attention(*swapped, layout="bhsd")
    assert bhsd.shape == (2, 3, 5, 10)
    assert bhsd.transpose(0, 2, 1, 3).flags.c_contiguous
    np.testing.assert_array_equal(bhsd.transpose(0, 2, 1, 3), cupyflash.attention(q, k, v))
    packed = np.zeros((2, 5, 3, 3, 8), np.float32)[:, :, 0]  # dense in no order: the result is compact
    assert cupyflash.attention(packed, k, v).flags.c_contiguous
    target = np.full((2, 5, 2, 3, 10), np.nan, np.float32)
    result = cupyflash.attention(q, k, v, out=target[:, :, 1])
    np.testing.assert_array_equal(result, cupyflash.attention(q, k, v))
    assert np.isnan(target[:, :, 0]).all()


@pytest.mark.parametrize("shape", [(65537, 1, 1, 4), (1, 1, 65537, 4), (70, 1, 1000, 4)])
def test_kf_062_more_than_65535_batches_or_heads(rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    q, k, v = make(rng, shape, shape)
    np.testing.assert_array_equal(cupyflash.attention(q, k, v), v)


def test_kf_063_a_failed_computation_raises_and_returns_nothing(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = make(rng, (1, 8, 2, 8), (1, 8, 2, 8))
    from cupyflash import host

    def fails(*_: Any, **__: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(host, "score_step", fails)
        with pytest.raises(MemoryError):
            cupyflash.attention(q, k, v)
    agrees(q, k, v)  # and the process goes on


def test_kf_064_an_absurd_batch_stride_of_one_batch(rng: np.random.Generator) -> None:
    q, k, v = make(rng, (1, 8, 2, 8), (1, 8, 2, 8))
    strange = [np.lib.stride_tricks.as_strided(x, x.shape, ((2**31 + 8) * 4, *x.strides[1:])) for x in (q, k, v)]
    np.testing.assert_array_equal(cupyflash.attention(*strange), cupyflash.attention(q, k, v))


def test_kf_065_batches_more_than_2_to_31_elements_apart(rng: np.random.Generator) -> None:
    q, k, v = make(rng, (2, 8, 2, 8), (2, 8, 2, 8), dtype="float16")
    apart = np.empty(2**31 + 1024, np.float16)  # pages that are not touched cost nothing
    far = np.lib.stride_tricks.as_strided(apart, k.shape, ((2**31 + 8) * 2, *k.strides[1:]))
    far[...] = k
    np.testing.assert_array_equal(cupyflash.attention(q, far, v), cupyflash.attention(q, k, v))


@pytest.mark.parametrize("d", [5, 33, 59, 72, 100])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kf_066_odd_head_dims(rng: np.random.Generator, d: int, dtype: str) -> None:
    agrees(*make(rng, (1, 19, 2, d), (1, 23, 2, d), dtype=dtype), causal=True)


@pytest.mark.parametrize(("d", "dv"), [(256, 256), (257, 256), (64, 257), (300, 300)])
def test_kf_067_the_largest_head_dim_and_one_more(rng: np.random.Generator, d: int, dv: int) -> None:
    q, k, v = make(rng, (1, 3, 1, d), (1, 4, 1, d), (1, 4, 1, dv))
    if max(d, dv) <= 256:
        agrees(q, k, v)
        return
    with pytest.raises(NotImplementedError, match="256 is the largest for forward and backward") as caught:
        cupyflash.attention(q, k, v)
    assert isinstance(caught.value, cupyflash.UnsupportedError)
    assert str(max(d, dv)) in caught.value.reason
    assert not cupyflash.supports(head_dim=d, head_dim_v=dv)


def test_kf_068_every_multiple_of_eight(rng: np.random.Generator) -> None:
    for d in range(8, 257, 8):
        agrees(*make(rng, (1, 3, 2, d), (1, 5, 1, d), dtype="float16"))


def test_kf_069_070_zero_sizes(rng: np.random.Generator) -> None:
    sizes = {"B": 2, "Sq": 5, "Sk": 7, "H": 3, "D": 8}
    for axis in sizes:
        n = sizes | {axis: 0}
        q, k, v = make(rng, (n["B"], n["Sq"], n["H"], n["D"]), (n["B"], n["Sk"], n["H"], n["D"]))
        if axis == "D":
            with pytest.raises(cupyflash.ShapeError, match="q has head_dim 0: it must be at least 1"):
                cupyflash.attention(q, k, v)
            continue
        for options in ({}, {"causal": True}, {"softcap": 2.0, "window_size": (1, 1)}):
            out, lse, _ = cupyflash.attention(q, k, v, return_lse=True, **options)
            assert out.shape == q.shape
            assert out.dtype == q.dtype
            assert lse.shape == (n["B"], n["H"], n["Sq"])
            np.testing.assert_array_equal(out, 0)  # empty, or no key to see
            np.testing.assert_array_equal(lse, -np.inf)


def test_kf_071_one_query_of_many_heads(rng: np.random.Generator) -> None:
    agrees(*make(rng, (1, 1, 32, 128), (1, 20, 32, 128)), causal=True)
    agrees(*make(rng, (2, 1, 32, 128), (2, 20, 4, 128), dtype="float16"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_kf_071_one_query_of_grouped_heads(rng: np.random.Generator, layout: str, dtype: str) -> None:
    """A GPU takes the heads of a group as rows of one tile, but where an option tells the heads apart; q and out here are slices."""
    used = np.array([300, 0], np.int32)
    heads = rng.standard_normal(12).astype(np.float32)
    mask = rng.random((2, 12, 1, 300)) < 0.7
    alone = ({}, {"causal": True}, {"seqused_k": used}, {"causal": "top_left"}, {"sink": heads}, {"mask": mask})
    for options in (*alone, {"alibi_slopes": np.abs(heads) / 8}):
        for window in (None, (40, 5)):
            q, k, v = make(rng, (2, 1, 15, 40), (2, 300, 4, 40), (2, 300, 4, 24), dtype)
            q = q[:, :, 2:14]
            if layout == "bhsd":
                q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
            agrees(q, k, v, layout=layout, window_size=window, **options)


LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255)


def test_kf_072_all_pairs_of_lengths(rng: np.random.Generator) -> None:
    for sq, sk in itertools.product(LENGTHS, LENGTHS):
        q, k, v = make(rng, (1, sq, 1, 8), (1, sk, 1, 8))
        agrees(q, k, v, causal=bool((sq + sk) % 2))


@pytest.mark.parametrize("sk", [1, 255, 256, 257, 509])  # 1, the key block - 1, itself, + 1, a prime
@pytest.mark.parametrize("sq", [1, 511, 512, 513, 521])
def test_lengths_around_the_blocks_of_the_host_path(rng: np.random.Generator, sq: int, sk: int) -> None:
    agrees(*make(rng, (1, sq, 1, 4), (1, sk, 1, 4)), window_size=(300, 40))


def test_kf_091_a_result_is_complete_when_the_call_returns(rng: np.random.Generator) -> None:
    q, k, v = make(rng, (4, 512, 4, 64), (4, 512, 4, 64))
    out = cupyflash.attention(q, k, v)
    at_once = out.copy()
    np.testing.assert_array_equal(at_once, cupyflash.attention(q, k, v))
    np.testing.assert_array_equal(at_once, out)


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("q", np.int32, "q is int32: it must be one of float16, bfloat16, float32, float64"),
        ("k", np.float64, "k is float64 and q is float32: q, k and v must have one dtype"),
        ("alibi_slopes", np.float16, "alibi_slopes is float16: it must be float32"),
        ("seqused_k", np.int64, "seqused_k is int64: it must be int32"),
        ("mask", np.float32, "mask is float32: it must be bool"),
    ],
)
def test_kf_114_bits_are_never_read_as_another_dtype(rng: np.random.Generator, name: str, dtype: Any, message: str) -> None:
    q, k, v = make(rng, (2, 5, 3, 8), (2, 7, 3, 8))
    given: dict[str, Any] = {"q": q, "k": k, "alibi_slopes": np.ones(3), "seqused_k": np.full(2, 4), "mask": np.ones((5, 7))}
    wrong = given[name].astype(dtype)
    arrays = (wrong if name == "q" else q, wrong if name == "k" else k, v)
    options = {} if name in ("q", "k") else {name: wrong}
    with pytest.raises(TypeError, match=message):
        cupyflash.attention(*arrays, **options)


def test_no_warning_of_numpy_reaches_the_caller(rng: np.random.Generator) -> None:
    q, k, v = make(rng, (1, 4, 1, 8), (1, 4, 1, 8), dtype="float16")
    v[0, 0] = np.inf
    k[0, 1] = np.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cupyflash.attention(q * np.float16(1000), k, v, causal=True)
