"""Failures in the gradients of other attention libraries, each a test that names its row (KF-nnn), on the host path.

Rows that concern both directions have their forward half in test_known_failures.py.
"""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import numpy as np
import pytest
from test_known_failures import BOUNDS, DTYPES, LENGTHS, make, poisoned, transposed

import cupyflash
from cupyflash import reference

ALL = ("q", "k", "v", "bias", "alibi_slopes", "sink")


def gradients(q: Any, k: Any, v: Any, dout: Any, *, dlse: Any = None, **options: Any) -> cupyflash.Gradients:
    """All gradients, of a forward call and a backward call into NaN-filled memory."""
    out, lse, _ = cupyflash.attention(q, k, v, return_lse=True, **options)
    targets = {f"d{name}": poisoned(x.shape, x.dtype) for name, x in zip("qkv", (q, k, v), strict=True)}
    return cupyflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, wrt=ALL, **targets, **options)


def agrees(q: Any, k: Any, v: Any, dout: Any, **options: Any) -> cupyflash.Gradients:
    """Compute all gradients and compare them with the float64 reference, with twice the sanity bound of the forward."""
    grads = gradients(q, k, v, dout, **options)
    expected = reference.attention_backward(dout, q, k, v, **options)
    bound = 2 * BOUNDS[q.dtype.name]
    for name, grad, want in zip(grads._fields, grads, expected, strict=True):
        assert (grad is None) == (want is None)
        if grad is not None:
            np.testing.assert_allclose(grad.astype(np.float64), want, rtol=bound, atol=bound, err_msg=name)
    return grads


def inputs(
    rng: np.random.Generator, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...] | None = None, dtype: str = "float32"
) -> Any:
    """q, k, v and dout."""
    return [*make(rng, q, k, v, dtype), *make(rng, (*q[:-1], (v or k)[-1]), (1,), dtype=dtype)[:1]]


# BLAS adds up in another order for other sizes and strides, on some processors: with OPENBLAS_CORETYPE=Haswell, not with SkylakeX.
ROUNDING = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2e-6, "float64": 2e-15}


def same(grad: Any, expected: Any, rounding: float = 0) -> None:
    """What a call may not read changes nothing. tests/gpu compares by another function, where 16 bits may be rounded otherwise."""
    np.testing.assert_allclose(grad.astype(np.float64), expected.astype(np.float64), rtol=rounding, atol=min(rounding, 2e-6))


def is_zero(x: Any) -> bool:
    return bool((x.astype(np.float64) == 0).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ones", [True, False])
def test_kf_001_002_causal_rows_without_a_key(rng: np.random.Generator, dtype: str, ones: bool) -> None:
    q, k, v, dout = inputs(rng, (2, 6, 4, 16), (2, 3, 2, 16), dtype=dtype)
    if ones:
        dout[...] = 1
    grads = agrees(q, k, v, dout, causal=True)
    assert is_zero(grads.dq[:, :3])
    dout[:, :3] = np.nan  # a row that sees no key contributes nothing, whatever arrives there
    for grad, clean in zip(gradients(q, k, v, dout, causal=True)[:3], grads[:3], strict=True):
        same(grad, clean)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"sink": np.zeros(2, np.float32)}, {"softcap": 5.0}])
def test_kf_003_035_no_key_at_all(rng: np.random.Generator, options: dict[str, Any]) -> None:
    q, k, v, dout = inputs(rng, (2, 4, 2, 16), (2, 0, 2, 16))
    dlse = rng.standard_normal((2, 2, 4)).astype(np.float32)
    grads = agrees(q, k, v, dout, dlse=dlse, **options)
    assert is_zero(grads.dq)
    assert grads.dk.shape == k.shape
    if "sink" in options:
        np.testing.assert_allclose(grads.dsink, dlse.sum(axis=(0, 2)), rtol=1e-6)  # the LSE is the sink


@pytest.mark.parametrize("masked", [False, True])
def test_kf_003_a_bias_of_minus_infinity_hides_every_key(rng: np.random.Generator, masked: bool) -> None:
    q, k, v, dout = inputs(rng, (2, 40, 2, 16), (2, 30, 1, 16))
    bias = np.where(np.arange(40)[:, None] % 4 == 1, -np.inf, 0).astype(np.float32)
    options = {"bias": np.broadcast_to(bias, (40, 30)), "mask": rng.random((40, 30)) < (0.7 if masked else 2)}
    clean = agrees(q, k, v, dout, **options)
    assert is_zero(clean.dq[:, 1::4])
    assert is_zero(clean.dbias[1::4])
    dout[:, 1::4] = np.nan
    for grad, same in zip(gradients(q, k, v, dout, **options), clean, strict=True):
        if grad is not None:
            np.testing.assert_array_equal(grad, same)


def test_kf_003_window_without_a_key(rng: np.random.Generator) -> None:
    q, k, v, dout = inputs(rng, (1, 300, 1, 16), (1, 9, 1, 16))
    grads = agrees(q, k, v, dout, window_size=(2, 1), causal="top_left")
    assert is_zero(grads.dq[:, 11:])
    grads = agrees(q[:, :2], k, v, dout[:, :2], window_size=(0, 1), causal="top_left")
    assert is_zero(grads.dk[:, 2:])
    assert is_zero(grads.dv[:, 2:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_kf_004_nan_in_a_hidden_key_reaches_only_rows_that_see_it(
    rng: np.random.Generator, dtype: str, bad: float, softcap: float | None
) -> None:
    q, k, v, dout = inputs(rng, (1, 130, 2, 32), (1, 130, 2, 32), dtype=dtype)
    clean = gradients(q[:, :129], k, v, dout[:, :129], causal="top_left", softcap=softcap)  # without the row that sees the last key
    k[:, -1] = v[:, -1] = bad
    grads = gradients(q, k, v, dout, causal=True, softcap=softcap)
    same(grads.dq[:, :129], clean.dq, ROUNDING[dtype])  # of one row more
    assert np.isnan(grads.dq[:, 129].astype(np.float32)).all()
    with_row = gradients(q[:, :129], k, v, dout[:, :129], causal="top_left", softcap=softcap)
    assert is_zero(with_row.dk[:, 129])
    assert is_zero(with_row.dv[:, 129])
    for grad, expected in zip(with_row[:3], clean[:3], strict=True):
        same(grad, expected)


@pytest.mark.parametrize("which", ["q", "dout"])
def test_kf_004_nan_in_a_row_reaches_only_keys_that_it_sees(rng: np.random.Generator, which: str) -> None:
    q, k, v, dout = inputs(rng, (1, 70, 2, 8), (1, 70, 2, 8))
    clean = gradients(q, k, v, dout, window_size=(4, 0))
    (q if which == "q" else dout)[0, 30] = np.nan
    grads = gradients(q, k, v, dout, window_size=(4, 0))
    seen = (np.arange(70) >= 26) & (np.arange(70) <= 30)
    for grad, same in ((grads.dk, clean.dk), (grads.dv, clean.dv)):
        np.testing.assert_array_equal(grad[:, ~seen], same[:, ~seen])
    assert np.isnan(grads.dk[:, seen]).all()
    assert np.isnan(grads.dq[:, 30]).all()
    np.testing.assert_array_equal(np.delete(grads.dq, 30, 1), np.delete(clean.dq, 30, 1))


@pytest.mark.parametrize("hide", ["mask", "seqused_k", "top_left", "window"])
def test_kf_004_040_also_when_another_option_hides_the_key(rng: np.random.Generator, hide: str) -> None:
    q, k, v, dout = inputs(rng, (2, 70, 4, 24), (2, 600, 2, 24))
    options: dict[str, dict[str, Any]] = {
        "mask": {"mask": np.arange(600)[None] < 555},
        "seqused_k": {"seqused_k": np.array([555, 550], np.int32)},
        "top_left": {"causal": "top_left"},
        "window": {"causal": "top_left", "window_size": (3, 400)},
    }
    clean = agrees(q, k, v, dout, softcap=4.0, **options[hide])
    k[:, 555:] = v[:, 555:] = np.nan
    for grad, same in zip(gradients(q, k, v, dout, softcap=4.0, **options[hide])[:3], clean[:3], strict=True):
        np.testing.assert_array_equal(grad, same)


def test_kf_007_008_huge_logits(rng: np.random.Generator) -> None:
    q, k, v, dout = inputs(rng, (1, 3, 1, 64), (1, 1, 1, 64))
    q[...], k[...] = 133120, 133120
    grads = gradients(q, k, v, dout)  # one key: its weight is 1
    np.testing.assert_allclose(grads.dv[0, 0], dout[0].sum(axis=0), rtol=1e-5, atol=1e-5)
    q, k = np.full((1, 1, 1, 128), 43.3, np.float32), np.full((1, 50, 1, 128), -43.3, np.float32)
    grads = gradients(q, k, np.ones((1, 50, 1, 16), np.float32), dout[:, :1, :, :16])
    np.testing.assert_allclose(grads.dv, np.broadcast_to(dout[:, :1, :, :16] / 50, grads.dv.shape), rtol=1e-2)  # e^LSE has an LSE of 2e4


@pytest.mark.parametrize("sizes", [(2, 5), (5, 2), (1, 16), (40, 40), (129, 32)])
@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("window_size", [None, (1, 0), (3, 0), (32, 64)])
def test_kf_010_016_018_each_corner_and_window(rng: np.random.Generator, sizes: Any, causal: Any, window_size: Any) -> None:
    sq, sk = sizes
    agrees(*inputs(rng, (1, sq, 2, 8), (1, sk, 2, 8)), causal=causal, window_size=window_size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kf_017_causal_gradients_differ_from_the_others(rng: np.random.Generator, dtype: str) -> None:
    arrays = inputs(rng, (2, 96, 2, 16), (2, 96, 2, 16), dtype=dtype)
    full, causal = (agrees(*arrays, causal=causal) for causal in (False, True))
    for one, other in zip(full[:3], causal[:3], strict=True):
        assert np.abs(one.astype(np.float64) - other.astype(np.float64)).max() > 0.1


@pytest.mark.parametrize("causal", [False, True])
def test_kf_019_020_softcap_of_grouped_heads(rng: np.random.Generator, causal: bool) -> None:
    q, k, v, dout = inputs(rng, (2, 70, 4, 32), (2, 70, 2, 32))
    q *= 12  # logits of about 30 and more
    bias = rng.standard_normal((70, 70)).astype(np.float32) * 10
    used = np.array([70, 41], np.int32)
    agrees(q, k, v, dout / 8, softcap=15.0, causal=causal, bias=bias, mask=rng.random((70, 70)) < 0.7, seqused_q=used, seqused_k=used)


def test_kf_021_query_heads_add_to_their_key_head(rng: np.random.Generator) -> None:
    q, k, v, dout = inputs(rng, (1, 3, 6, 8), (1, 4, 2, 8))
    dout[:, :, 3:] = 0
    grads = agrees(q, k, v, dout)
    assert is_zero(grads.dv[:, :, 1])
    assert is_zero(grads.dk[:, :, 1])
    alone = [gradients(q[:, :, h : h + 1], k[:, :, :1], v[:, :, :1], dout[:, :, h : h + 1]) for h in range(3)]
    np.testing.assert_allclose(grads.dk[:, :, :1], sum(g.dk for g in alone), rtol=1e-5, atol=1e-6)


def test_kf_022_slopes_for_all_batches_or_for_each(rng: np.random.Generator) -> None:
    q, k, v, dout = inputs(rng, (2, 33, 4, 16), (2, 65, 2, 16))
    slopes = rng.random((2, 4)).astype(np.float32)
    each = agrees(q, k, v, dout, alibi_slopes=slopes, causal=True)
    assert each.dalibi_slopes.shape == (2, 4)
    same = np.stack([slopes[0]] * 2)
    shared, apart = (gradients(q, k, v, dout, alibi_slopes=s).dalibi_slopes for s in (slopes[0], same))
    np.testing.assert_allclose(shared, apart.sum(axis=0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kf_026_027_each_operand_as_a_transposed_view(rng: np.random.Generator, dtype: str) -> None:
    for d in (1, 8, 33, 64, 100, 128, 256):
        q, k, v, dout = inputs(rng, (2, 9, 2, d), (2, 13, 2, d), dtype=dtype)
        out, lse, _ = cupyflash.attention(q, k, v, return_lse=True)
        arrays = [dout, q, k, v, out]
        expected = cupyflash.attention_backward(*arrays, lse)
        for n in range(5):
            views = [transposed(x) if m == n else x for m, x in enumerate(arrays)]
            for grad, want in zip(cupyflash.attention_backward(*views, lse)[:3], expected[:3], strict=True):
                np.testing.assert_allclose(grad.astype(float), want.astype(float), rtol=ROUNDING[dtype], atol=min(ROUNDING[dtype], 2e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_kf_028_any_storage_offset(rng: np.random.Generator, dtype: str) -> None:
    shape, size = (1, 17, 2, 40), 17 * 2 * 40
    buffer = rng.standard_normal(size + 4).astype(DTYPES[dtype])
    q, k, v, dout = (buffer[offset : offset + size].reshape(shape) for offset in (1, 2, 3, 4))
    for grad, same in zip(gradients(q, k, v, dout)[:3], gradients(q.copy(), k.copy(), v.copy(), dout.copy())[:3], strict=True):
        np.testing.assert_array_equal(grad, same)


def test_kf_029_a_dout_of_any_strides(rng: np.random.Generator) -> None:
    """As the gradients of sums and slices come: expanded, and sparse on the last axis."""
    q, k, v, dout = inputs(rng, (2, 6, 2, 16), (2, 7, 2, 16))
    for view in (np.broadcast_to(np.ones(1, np.float32), dout.shape), np.repeat(dout, 2, axis=-1)[..., ::2], dout[:1, :1]):
        view = np.broadcast_to(view, dout.shape)
        for grad, same in zip(gradients(q, k, v, view)[:3], gradients(q, k, v, view.copy())[:3], strict=True):
            np.testing.assert_allclose(grad, same, rtol=1e-5, atol=1e-6)  # dout . out is summed in another order


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_kf_030_the_stride_of_an_axis_of_one_means_nothing(rng: np.random.Generator, axis: int) -> None:
    shape = tuple(1 if a == axis else n for a, n in enumerate((2, 3, 2, 16)))
    arrays = inputs(rng, shape, shape)
    strange = [
        np.lib.stride_tricks.as_strided(x, shape, tuple(12345 * 4 if a == axis else s for a, s in enumerate(x.strides))) for x in arrays
    ]
    for grad, same in zip(gradients(*strange)[:3], gradients(*arrays)[:3], strict=True):
        np.testing.assert_array_equal(grad, same)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kf_031_gradients_into_slices_of_a_packed_array(rng: np.random.Generator, dtype: str) -> None:
    packed = rng.standard_normal((2, 21, 3, 4, 24)).astype(DTYPES[dtype])
    q, k, v = (packed[:, :, n] for n in range(3))
    out, lse, _ = cupyflash.attention(q, k, v, return_lse=True)
    dout = rng.standard_normal(out.shape).astype(out.dtype)
    expected = cupyflash.attention_backward(dout, q, k, v, out, lse)
    target = poisoned(packed.shape, packed.dtype)
    grads = cupyflash.attention_backward(dout, q, k, v, out, lse, dq=target[:, :, 0], dk=target[:, :, 1], dv=target[:, :, 2])
    for n in range(3):
        np.testing.assert_array_equal(target[:, :, n], expected[n])
        assert np.shares_memory(grads[n], target)


def test_kf_032_gradients_are_stored_as_their_inputs(rng: np.random.Generator) -> None:
    q, k, v, dout = inputs(rng, (2, 5, 3, 8), (2, 7, 3, 8), (2, 7, 3, 10))
    out, lse, _ = cupyflash.attention(transposed(q), k, transposed(v), return_lse=True)
    grads = cupyflash.attention_backward(dout, transposed(q), k, transposed(v), out, lse)
    assert grads.dq.transpose(0, 2, 1, 3).flags.c_contiguous
    assert grads.dk.flags.c_contiguous
    assert grads.dv.transpose(0, 2, 1, 3).flags.c_contiguous


@pytest.mark.parametrize("dtype", DTYPES)
def test_kf_054_a_gradient_through_the_lse_alone(rng: np.random.Generator, dtype: str) -> None:
    q, k, v, dout = inputs(rng, (2, 40, 4, 16), (2, 50, 2, 16), dtype=dtype)
    wide = np.float64 if dtype == "float64" else np.float32
    for options in ({}, {"causal": True, "softcap": 2.0}, {"sink": np.ones(4, wide)}):
        grads = agrees(q, k, v, np.zeros_like(dout), dlse=np.ones((2, 4, 40), wide), **options)
        assert np.abs(grads.dq.astype(np.float64)).max() > 0.01
        assert is_zero(grads.dv)
    out, pullback = cupyflash.attention_vjp(q, k, v, return_lse=True)
    dlse = rng.standard_normal(out.lse.shape).astype(wide)
    expected = reference.attention_backward(dout, q, k, v, dlse=dlse)
    bound = 2 * BOUNDS[dtype]
    np.testing.assert_allclose(pullback(dout, dlse).dk.astype(np.float64), expected.dk, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kf_055_the_lse_as_a_transposed_view(rng: np.random.Generator, dtype: str) -> None:
    q, k, v, dout = inputs(rng, (2, 40, 4, 16), (2, 50, 2, 16), dtype=dtype)
    out, lse, _ = cupyflash.attention(q, k, v, return_lse=True)
    dlse = rng.standard_normal(lse.shape).astype(lse.dtype)
    expected = cupyflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse)
    for axes in ((0, 2, 1), (2, 1, 0), (1, 0, 2)):
        turned = [np.ascontiguousarray(x.transpose(axes)).transpose(np.argsort(axes)) for x in (lse, dlse)]
        for grad, want in zip(cupyflash.attention_backward(dout, q, k, v, out, turned[0], dlse=turned[1])[:3], expected[:3], strict=True):
            same(grad, want)
    with pytest.raises(cupyflash.ShapeError, match=r"lse has shape \(2, 40, 4\): it must have shape \(B, Hq, Sq\) = \(2, 4, 40\)"):
        cupyflash.attention_backward(dout, q, k, v, out, lse.transpose(0, 2, 1))


@pytest.mark.parametrize("seqlen", [1, 17, 77, 130, 193])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kf_056_lengths_that_are_no_multiples(rng: np.random.Generator, seqlen: int, dtype: str) -> None:
    shape = (1, seqlen, 2, 64)
    for causal in (False, True):
        grads = agrees(*inputs(rng, shape, shape, dtype=dtype), causal=causal)
        assert all(np.isfinite(grad.astype(np.float64)).all() for grad in grads[:3])


@pytest.mark.parametrize("dtype", DTYPES)
def test_kf_057_a_sequence_of_used_length_zero(rng: np.random.Generator, dtype: str) -> None:
    q, k, v, dout = inputs(rng, (3, 20, 2, 16), (3, 20, 2, 16), dtype=dtype)
    used = {"seqused_q": np.array([20, 0, 7], np.int32), "seqused_k": np.array([20, 13, 0], np.int32)}
    grads = agrees(q, k, v, dout, causal=True, **used)
    for grad in grads[:3]:
        assert is_zero(grad[1:])


def test_kf_058_a_batch_of_8300(rng: np.random.Generator) -> None:
    shape = (8300, 1, 16, 128)
    q, k, v, dout = (np.broadcast_to(x, shape) for x in inputs(rng, (1, 1, 16, 128), (1, 1, 16, 128), dtype="float16"))
    grads = cupyflash.attention_vjp(q, k, v)[1](dout)
    np.testing.assert_array_equal(grads.dv, dout)
    for grad in (grads.dq, grads.dk):
        assert np.abs(grad.astype(np.float32)).max() < 0.05  # 0 but for what dout . out loses by the rounding of out


def test_kf_059_a_dout_whose_rows_lie_past_2_to_31_elements(rng: np.random.Generator) -> None:
    q, k, v, dout = inputs(rng, (1, 3, 2, 8), (1, 5, 2, 8), dtype="float16")
    apart = np.empty(2**31 + 4096, np.float16)  # pages that are not touched cost nothing
    far = np.lib.stride_tricks.as_strided(apart, dout.shape, (0, (2**30 + 512) * 2, 16, 2))
    far[...] = dout
    for grad, same in zip(gradients(q, k, v, far)[:3], gradients(q, k, v, dout)[:3], strict=True):
        np.testing.assert_array_equal(grad, same)


def test_kf_060_keys_stored_by_sequence_past_2_to_31_elements(rng: np.random.Generator) -> None:
    q, k, v, dout = inputs(rng, (2, 3, 1, 8), (2, 5, 1, 8), dtype="float16")
    apart = np.empty(2**31 + 4096, np.float16)
    far = np.lib.stride_tricks.as_strided(apart, k.shape, (64, (2**29 + 512) * 2, 16, 2))
    far[...] = k
    expected = gradients(q, k, v, dout)
    for grad, same in zip(gradients(q, far, v, dout)[:3], expected[:3], strict=True):
        np.testing.assert_array_equal(grad, same)
    out, lse, _ = cupyflash.attention(q, k, v, return_lse=True)
    cupyflash.attention_backward(dout, q, k, v, out, lse, dk=far)
    np.testing.assert_array_equal(far, expected.dk)


@pytest.mark.parametrize("shape", [(65537, 1, 1, 4), (1, 1, 65537, 4), (70, 1, 1000, 4)])
def test_kf_062_more_than_65535_batches_or_heads(rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    q, k, v, dout = inputs(rng, shape, shape)
    np.testing.assert_allclose(gradients(q, k, v, dout).dv, dout, rtol=1e-5)


@pytest.mark.parametrize("d", [5, 33, 59, 72, 100])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kf_066_odd_head_dims(rng: np.random.Generator, d: int, dtype: str) -> None:
    agrees(*inputs(rng, (1, 19, 2, d), (1, 23, 2, d), dtype=dtype), causal=True)


@pytest.mark.parametrize(("d", "dv"), [(256, 256), (257, 256), (64, 257)])
def test_kf_067_the_largest_head_dim_and_one_more(rng: np.random.Generator, d: int, dv: int) -> None:
    q, k, v, dout = inputs(rng, (1, 3, 1, d), (1, 4, 1, d), (1, 4, 1, dv))
    if max(d, dv) <= 256:
        agrees(q, k, v, dout)
        return
    with pytest.raises(NotImplementedError, match="256 is the largest for forward and backward"):
        cupyflash.attention_backward(dout, q, k, v, dout, np.zeros((1, 1, 3), np.float32))


def test_kf_068_every_multiple_of_eight(rng: np.random.Generator) -> None:
    for d in range(8, 257, 8):
        agrees(*inputs(rng, (1, 3, 2, d), (1, 5, 1, d), dtype="float16"))


def test_kf_069_070_zero_sizes(rng: np.random.Generator) -> None:
    sizes = {"B": 2, "Sq": 5, "Sk": 7, "H": 3}
    for axis in sizes:
        n = sizes | {axis: 0}
        q, k, v, dout = inputs(rng, (n["B"], n["Sq"], n["H"], 8), (n["B"], n["Sk"], n["H"], 8))
        arrays = {"bias": np.zeros((n["H"], 1, n["Sk"]), np.float32), "alibi_slopes": np.ones(n["H"], np.float32)}
        for options in ({}, {"causal": True}, {"softcap": 2.0, "window_size": (1, 1)}, arrays):
            grads = gradients(q, k, v, dout, **options)
            for grad, x in zip((*grads[:3], grads.dbias), (q, k, v, options.get("bias")), strict=True):
                if x is not None:
                    assert (grad.shape, grad.dtype) == (x.shape, x.dtype)
                    assert is_zero(grad)


def test_kf_071_one_query_of_many_heads(rng: np.random.Generator) -> None:
    agrees(*inputs(rng, (1, 1, 32, 128), (1, 20, 32, 128)), causal=True)
    agrees(*inputs(rng, (2, 1, 32, 128), (2, 20, 4, 128), dtype="float16"))


def test_kf_072_all_pairs_of_lengths(rng: np.random.Generator) -> None:
    for sq, sk in itertools.product(LENGTHS, LENGTHS):
        agrees(*inputs(rng, (1, sq, 1, 8), (1, sk, 1, 8)), causal=bool((sq + sk) % 2))


@pytest.mark.parametrize(("d", "dv"), [(64, 128), (128, 64), (192, 128), (96, 40)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kf_073_value_dims_that_differ(rng: np.random.Generator, d: int, dv: int, dtype: str) -> None:
    agrees(*inputs(rng, (1, 50, 2, d), (1, 60, 1, d), (1, 60, 1, dv), dtype=dtype), causal=True)


@pytest.mark.parametrize("deterministic", [True, False])
def test_kf_074_076_077_every_run_has_the_same_bits(rng: np.random.Generator, deterministic: bool) -> None:
    """Of one long sequence, of grouped heads into poisoned memory, and of a batch of short keys under large values."""
    cases: list[tuple[Any, Any, int]] = [((1, 2048, 1, 16), (1, 2048, 1, 16), 1), ((2, 300, 8, 16), (2, 700, 2, 16), 1)]
    for q_shape, k_shape, size in [*cases, ((9, 500, 1, 64), (9, 128, 1, 64), 3)]:
        arrays = [size * x for x in inputs(rng, q_shape, k_shape)]
        q, k, v, dout = arrays
        out, lse, _ = cupyflash.attention(q, k, v, return_lse=True)
        runs = []
        for _ in range(5):
            targets = {f"d{name}": poisoned(x.shape, x.dtype) for name, x in zip("qkv", (q, k, v), strict=True)}
            grads = cupyflash.attention_backward(dout, q, k, v, out, lse, deterministic=deterministic, **targets)
            runs.append([grad.tobytes() for grad in grads[:3]])
        assert all(run == runs[0] for run in runs)


def test_kf_075_deterministic_is_an_option_of_every_entry_point(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    from cupyflash import plan

    seen, choose = [], plan.backward
    monkeypatch.setattr(plan, "backward", lambda problem, device: (seen.append(problem.deterministic), choose(problem, device))[1])
    q, k, v, dout = inputs(rng, (1, 3, 1, 11), (1, 4, 1, 11))  # of a shape that no other test has: the plan is not cached
    out, lse, _ = cupyflash.attention(q, k, v, return_lse=True)
    cupyflash.attention_backward(dout, q, k, v, out, lse, deterministic=True)
    cupyflash.attention_vjp(q[:, :2], k, v, deterministic=True)[1](dout[:, :2])
    assert seen == [True, True]
    for function in (cupyflash.attention_backward, cupyflash.attention_vjp):
        assert "deterministic" in inspect.signature(function).parameters
    with pytest.raises(cupyflash.ArgumentError, match="deterministic=1 must be True or False"):
        cupyflash.attention_backward(dout, q, k, v, out, lse, deterministic=1)  # type: ignore[arg-type]
