"""The float64 reference against a loop in plain Python, finite differences, and pictures drawn by hand."""

from __future__ import annotations

import doctest
import math
import random

import numpy as np
import pytest
from allpairspy import AllPairs
from judge import standard_attention, standard_gradients

from cupyflash import reference


def loop_attention(q, k, v, causal, window_size, softmax_scale, softcap, bias, mask, alibi_slopes, sink, seqused_q, seqused_k):
    """(out, lse) as nested lists from nested lists q, k, v[b][h][s][d], bias and mask[b][h][i][j], alibi_slopes[b][h], sink[h]."""
    outs, lses = [], []
    for b, heads in enumerate(q):
        outs.append([])
        lses.append([])
        for h, rows in enumerate(heads):
            keys, values = (x[b][h * len(x[b]) // len(heads)] for x in (k, v))
            used_q = max(0, min(seqused_q[b], len(rows))) if seqused_q else len(rows)
            used_k = max(0, min(seqused_k[b], len(keys))) if seqused_k else len(keys)
            offset = 0 if causal == "top_left" else used_k - used_q
            outs[b].append([])
            lses[b].append([])
            for i, row in enumerate(rows):
                seen = []  # (score, value) of the keys that the row sees
                for j, (key, value) in enumerate(zip(keys, values, strict=True)):
                    ahead = j - i - offset
                    left, right = window_size or (None, None)
                    if i >= used_q or j >= used_k or (causal and ahead > 0) or (mask and not mask[b][h][i][j]):
                        continue
                    if (left not in (None, -1) and -ahead > left) or (right not in (None, -1) and ahead > right):
                        continue
                    s = sum(x * y for x, y in zip(row, key, strict=True)) * (softmax_scale or 1 / math.sqrt(len(row)))
                    if softcap:
                        s = softcap * math.tanh(s / softcap)
                    if alibi_slopes:
                        s -= alibi_slopes[b][h] * abs(ahead)
                    if bias:
                        s += bias[b][h][i][j]
                    seen.append((s, value))
                if sink and i < used_q:
                    seen.append((sink[h], [0.0] * len(values[0])))
                total = sum(math.exp(s) for s, _ in seen)
                outs[b][h].append([sum(math.exp(s) * value[d] for s, value in seen) / (total or 1) for d in range(len(values[0]))])
                lses[b][h].append(math.log(total) if seen else -math.inf)
    return outs, lses


OPTIONS = {
    "causal": (False, True, "top_left"),
    "window_size": (None, (1, 1), (2, None), (-1, 0)),
    "softcap": (None, 1.5),
    "softmax_scale": (None, 0.9),
    "bias": (None, "bhqk", "11qk", "b11k", "qk"),
    "mask": (None, "bhqk", "b11k", "1hq1", "qk"),
    "alibi_slopes": (None, "h", "bh"),
    "sink": (False, True),
    "seqused_q": (None, (3, 1), (9, 0)),
    "seqused_k": (None, (2, 4), (3, -1)),
    "heads": ((2, 2), (4, 2), (2, 1)),
    "lengths": ((3, 4), (4, 3), (1, 4)),
    "layout": ("bshd", "bhsd", "sbhd"),
}
PAIRS = [dict(zip(OPTIONS, values, strict=True)) for values in AllPairs(list(OPTIONS.values()))]
_draw = random.Random(0)
MORE = [{name: _draw.choice(values) for name, values in OPTIONS.items()} for _ in range(100)]
B, D, DV = 2, 3, 2


def build(case, rng):
    """(q, k, v) in (B, H, S, D) order and the array options and plain options of one case."""
    Hq, Hkv = case["heads"]
    Sq, Sk = case["lengths"]
    size = {"b": B, "h": Hq, "q": Sq, "k": Sk, "1": 1}
    arrays = {
        "q": rng.standard_normal((B, Hq, Sq, D)),
        "k": rng.standard_normal((B, Hkv, Sk, D)),
        "v": rng.standard_normal((B, Hkv, Sk, DV)),
    }
    for name in ("bias", "alibi_slopes"):
        if case[name]:
            arrays[name] = rng.standard_normal([size[axis] for axis in case[name]])
    if case["sink"]:
        arrays["sink"] = rng.standard_normal(Hq)
    options = {name: case[name] for name in ("causal", "window_size", "softcap", "softmax_scale", "seqused_q", "seqused_k")}
    options["mask"] = rng.random([size[axis] for axis in case["mask"]]) < 0.7 if case["mask"] else None
    return arrays, options


def to_layout(x, layout):
    return np.transpose(x, ["bhsd".index(axis) for axis in layout])


def call(function, arrays, options, layout, *first, **more):
    qkv = [to_layout(arrays[name], layout) for name in "qkv"]
    rest = {name: x for name, x in arrays.items() if name not in "qkv"}
    return function(*first, *qkv, **rest, **options, **more, layout=layout)


@pytest.mark.parametrize("case", PAIRS + MORE)
def test_equals_the_plain_python_loop(case, rng):
    """KF-018 for each pair of options and for 100 random combinations; the grid formula of judge.py agrees too."""
    arrays, options = build(case, rng)
    Hq, (Sq, Sk) = case["heads"][0], case["lengths"]
    scores = (B, Hq, Sq, Sk)
    full = {"bias": scores, "mask": scores, "alibi_slopes": (B, Hq), "sink": (Hq,)}
    given = {name: (arrays | options).get(name) for name in full}
    lists = {name: None if x is None else np.broadcast_to(x, full[name]).tolist() for name, x in given.items()}
    expected_out, expected_lse = loop_attention(*(arrays[name].tolist() for name in "qkv"), **(options | lists))
    out, lse = call(reference.attention, arrays, options, case["layout"], return_lse=True)
    assert out.dtype == lse.dtype == np.float64
    np.testing.assert_allclose(out, to_layout(expected_out, case["layout"]), rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-13)
    grid_out, grid_lse = call(standard_attention, arrays, options, case["layout"], dtype="float64")
    np.testing.assert_allclose(grid_out, out, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(grid_lse, lse, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("case", PAIRS)
def test_gradients_equal_finite_differences(case, with_dlse, rng):
    """Along random directions, which see an error in any element; the gradients of judge.py's grid formula are the same."""
    arrays, options = build(case, rng)
    layout = case["layout"]
    out, lse = call(reference.attention, arrays, options, layout, return_lse=True)
    dout, dlse = rng.standard_normal(out.shape), rng.standard_normal(lse.shape) if with_dlse else None

    def loss(values):
        out, lse = call(reference.attention, values, options, layout, return_lse=True)
        return np.vdot(out, dout) + (np.vdot(np.where(lse == -np.inf, 0, lse), dlse) if with_dlse else 0)

    grads = call(reference.attention_backward, arrays, options, layout, dout, dlse=dlse)
    for name, grad in call(standard_gradients, arrays, options, layout, dout, dlse=dlse, dtype="float64").items():
        np.testing.assert_allclose(grad, getattr(grads, f"d{name}"), rtol=1e-11, atol=1e-12, err_msg=name)
    for name in ("q", "k", "v", "bias", "alibi_slopes", "sink"):
        grad = getattr(grads, f"d{name}")
        if name not in arrays:
            assert grad is None
            continue
        x = arrays[name]
        assert grad.shape == (to_layout(x, layout) if name in "qkv" else x).shape
        if name in "qkv":
            grad = np.transpose(grad, [layout.index(axis) for axis in "bhsd"])
        for direction in rng.standard_normal((2, *x.shape)):
            step = 1e-5 * direction
            slope = (loss({**arrays, name: x + step}) - loss({**arrays, name: x - step})) / 2e-5
            assert np.vdot(grad, direction) == pytest.approx(slope, rel=1e-7, abs=1e-8), name


def picture(Sq, Sk, **options):
    """One string a query row, x where it sees the key: with v the identity an output row is its row of weights."""
    weights = reference.attention(np.zeros((Sq, 1, 1)), np.zeros((Sk, 1, 1)), np.eye(Sk)[:, None], **options)
    return ["".join(".x"[int(w > 0)] for w in row) for row in weights[:, 0]]


def test_causal_ends_in_the_bottom_right_corner():
    """KF-010, KF-011, KF-013."""
    assert picture(2, 5, causal=True) == picture(2, 5, causal="bottom_right") == ["xxxx.", "xxxxx"]
    assert picture(5, 2, causal=True) == ["..", "..", "..", "x.", "xx"]
    assert picture(2, 5, causal="top_left") == ["x....", "xx..."]
    assert picture(5, 2, causal="top_left") == ["x.", "xx", "xx", "xx", "xx"]
    assert picture(1, 4, causal=True) == ["xxxx"]


def test_windows_are_inclusive_distances_from_the_diagonal():
    """KF-011, KF-014, KF-016."""
    assert picture(5, 2, window_size=(1, 0)) == ["..", "..", "..", "x.", "xx"]
    assert picture(5, 5, window_size=(1, 2)) == ["xxx..", "xxxx.", ".xxxx", "..xxx", "...xx"]
    assert picture(2, 5, window_size=(0, 0)) == ["...x.", "....x"]
    assert picture(2, 5, window_size=(None, 0)) == picture(2, 5, window_size=(-1, 0)) == picture(2, 5, causal=True)
    assert picture(3, 3, window_size=(1, 2), causal=True) == ["x..", "xx.", ".xx"]
    assert picture(3, 3, window_size=(None, None)) == picture(3, 3, window_size=(-1, -1)) == ["xxx"] * 3
    assert picture(2, 5, window_size=(0, 1), causal="top_left") == ["x....", ".x..."]
    rows = picture(64, 64, window_size=(3, 0))
    assert rows == ["".join("x" if max(0, i - 3) <= j <= i else "." for j in range(64)) for i in range(64)]
    out, lse = reference.attention(np.zeros((129, 1, 1)), np.zeros((32, 1, 1)), np.ones((32, 1, 1)), window_size=(32, 64), return_lse=True)
    assert ((lse == -np.inf) == (out[..., 0].T == 0)).all()
    assert (lse == -np.inf).sum() == 129 - 32 - 64  # the first rows lie more than 64 keys before key 0


def test_used_lengths_move_the_diagonal():
    assert picture(3, 5, causal=True, seqused_k=[4]) == ["xx...", "xxx..", "xxxx."]
    assert picture(3, 5, causal=True, seqused_q=[2]) == ["xxxx.", "xxxxx", "....."]
    assert picture(3, 5, causal=True, seqused_q=[2], seqused_k=[2]) == ["x....", "xx...", "....."]
    assert picture(3, 5, causal="top_left", seqused_k=[2]) == ["x....", "xx...", "xx..."]
    assert picture(2, 3, seqused_q=[-4], seqused_k=[9]) == ["...", "..."]
    assert picture(2, 3, seqused_q=[7], seqused_k=[9]) == ["xxx", "xxx"]


def test_alibi_follows_the_diagonal():
    """-slope * distance is read off the log of the weights."""
    for options, offset in (({}, 3), ({"causal": "top_left"}, 0), ({"seqused_k": [4]}, 2), ({"seqused_q": [1]}, 4)):
        q, k = np.zeros((2, 1, 1)), np.zeros((5, 1, 1))
        out, lse = reference.attention(q, k, np.eye(5)[:, None], alibi_slopes=[0.5], return_lse=True, **options)
        with np.errstate(divide="ignore"):
            scores = np.log(out[0, 0]) + lse[0, 0]
        seen = out[0, 0] > 0
        np.testing.assert_allclose(scores[seen], (-0.5 * np.abs(offset - np.arange(5)))[seen], atol=1e-14)


def test_query_heads_share_key_heads_in_order():
    """KF-021."""
    v = np.broadcast_to(np.array([0.0, 1.0])[:, None], (4, 2, 1))
    out = reference.attention(np.zeros((2, 6, 3)), np.zeros((4, 2, 3)), v)
    assert out[..., 0].tolist() == [[0, 0, 0, 1, 1, 1]] * 2


@pytest.mark.parametrize(
    "options",
    [
        {"mask": np.zeros((2, 3), bool)},
        {"bias": np.full((2, 3), -np.inf)},
        {"seqused_k": [0, 0]},
        {"window_size": (0, 0), "causal": "top_left", "mask": ~np.eye(2, 3, dtype=bool)},
    ],
    ids=["mask", "bias", "seqused_k", "window"],
)
def test_rows_without_keys(options, rng):
    q, k, v, dout = (rng.standard_normal((2, S, 2, 4)) for S in (2, 3, 3, 2))
    dlse = np.full((2, 2, 2), np.nan)
    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    assert not out.any()
    assert (lse == -np.inf).all()
    grads = reference.attention_backward(dout, q, k, v, dlse=dlse, **options)
    assert not any(grad.any() for grad in grads if grad is not None)

    sink = np.array([0.5, -2.0])
    out, lse = reference.attention(q, k, v, sink=sink, return_lse=True, **options)
    assert not out.any()
    assert (lse == sink[:, None]).all()
    grads = reference.attention_backward(dout, q, k, v, sink=sink, dlse=np.ones((2, 2, 2)), **options)
    assert grads.dsink.tolist() == [4, 4]
    assert not any(grad.any() for grad in grads[:3])


def test_a_sink_of_minus_infinity_is_none(rng):
    q, k, v, dout = (rng.standard_normal((1, 3, 1, 4)) for _ in range(4))
    dlse = np.array([[[np.nan, np.nan, 1.0]]])  # of rows with an LSE of -inf
    for options in ({}, {"sink": [-np.inf]}):
        out, lse = reference.attention(q, k, v, seqused_k=[1], causal=True, return_lse=True, **options)
        grads = reference.attention_backward(dout, q, k, v, dlse=dlse, seqused_k=[1], causal=True, **options)
        assert (lse[0, 0, :2] == -np.inf).all()
        assert not out[0, :2].any()
        assert np.array_equal(out[0, 2], v[0, 0])
        assert all(np.isfinite(grad).all() for grad in grads if grad is not None)
    assert grads.dsink.tolist() == [0]


def test_rows_past_their_used_length_are_zero_even_with_a_sink(rng):
    q, k, v, dout = (rng.standard_normal((2, 3, 1, 4)) for _ in range(4))
    q[0, 2] = q[1] = dout[0, 2] = dout[1] = np.nan
    options = {"sink": [1.0], "seqused_q": [2, 0]}
    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    assert (lse[:, 0] == -np.inf).tolist() == [[False, False, True], [True] * 3]
    assert not out[lse.transpose(0, 2, 1) == -np.inf].any()
    grads = reference.attention_backward(dout, q, k, v, **options)
    assert all(np.isfinite(grad).all() for grad in grads if grad is not None)
    assert not grads.dq[1].any()


def test_hidden_keys_never_matter(rng):
    """KF-004, KF-005, KF-040: NaN and inf in keys that a row does not see change nothing in it."""
    q, k, v, dout = (rng.standard_normal((2, 5, 2, 4)) for _ in range(4))
    mask = rng.random((2, 1, 5, 5)) < 0.5
    mask[..., 3] = False
    options = {"seqused_k": [4, 2], "mask": mask, "causal": True}
    poisoned_k, poisoned_v = k.copy(), v.copy()
    for x, y in ((poisoned_k, np.nan), (poisoned_v, np.inf)):
        x[:, 3:] = x[1, 2:] = y
    for a, b in zip(
        (*reference.attention(q, k, v, return_lse=True, **options), *reference.attention_backward(dout, q, k, v, **options)),
        (
            *reference.attention(q, poisoned_k, poisoned_v, return_lse=True, **options),
            *reference.attention_backward(dout, q, poisoned_k, poisoned_v, **options),
        ),
        strict=True,
    ):
        assert a is b is None or np.array_equal(a, b)

    last_key = np.where(np.arange(5)[None, :, None, None] == 4, np.nan, v)
    out = reference.attention(q, k, last_key, causal=True)
    assert np.array_equal(out[:, :4], reference.attention(q, k, v, causal=True)[:, :4])
    assert np.isnan(out[:, 4]).all()


@pytest.mark.parametrize("zero", ["B", "Sq", "Sk", "H"])
def test_zero_sizes(zero):
    """KF-069, KF-070."""
    size = {"B": 2, "Sq": 3, "Sk": 4, "H": 2} | {zero: 0}
    q, k, v = (np.ones((size["B"], size[S], size["H"], D)) for S, D in (("Sq", 5), ("Sk", 5), ("Sk", 6)))
    out, lse = reference.attention(q, k, v, causal=True, return_lse=True)
    assert out.shape == (size["B"], size["Sq"], size["H"], 6)
    assert lse.shape == (size["B"], size["H"], size["Sq"])
    assert not out.any()
    assert (lse == -np.inf).all()
    grads = reference.attention_backward(np.ones(out.shape), q, k, v, causal=True)
    assert [grad.shape for grad in grads[:3]] == [q.shape, k.shape, v.shape]
    assert not any(grad.any() for grad in grads[:3])


def test_large_scores_do_not_overflow(rng):
    """KF-007, KF-008."""
    out, lse = reference.attention([[[133120.0] * 64]], [[[133120.0] * 64]], [[[133120.0] * 64]], return_lse=True)
    assert (out == 133120).all()
    assert lse[0, 0] == pytest.approx(133120.0**2 * 8, rel=1e-12)
    q, k = np.full((1, 1, 128), 43.3), -np.full((3, 1, 128), 43.3)
    out, lse = reference.attention(q, k, np.eye(3)[:, None], return_lse=True)
    np.testing.assert_allclose(out[0, 0], [1 / 3] * 3)
    assert lse[0, 0] == pytest.approx(-(128**0.5) * 43.3**2 + math.log(3))


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd"])
def test_one_batch_may_lack_its_axis(layout, rng):
    """The result and the gradients lack it too, and the LSE is (Hq, Sq) in every layout."""
    q, k, v, dout = (rng.standard_normal((1, H, S, 4)) for H, S in ((4, 3), (2, 5), (2, 5), (4, 3)))
    dlse, axis = rng.standard_normal((1, 4, 3)), layout.index("b")
    full = [to_layout(x, layout) for x in (q, k, v, dout)]
    flat = [x.squeeze(axis) for x in full]
    options = {"causal": True, "layout": layout, "sink": [0.1] * 4}
    out, lse = reference.attention(*full[:3], return_lse=True, **options)
    flat_out, flat_lse = reference.attention(*flat[:3], return_lse=True, **options)
    assert np.array_equal(flat_out, out.squeeze(axis))
    assert np.array_equal(flat_lse, lse[0])
    assert flat_lse.shape == (4, 3)
    assert np.array_equal(reference.attention(*flat[:3], **options), flat_out)
    grads = reference.attention_backward(full[3], *full[:3], dlse=dlse, **options)
    flat_grads = reference.attention_backward(flat[3], *flat[:3], dlse=dlse[0], **options)
    for x, grad, flat_grad in zip(flat, grads[:3], flat_grads[:3], strict=False):
        assert np.array_equal(flat_grad, grad.squeeze(axis))
        assert flat_grad.shape == x.shape


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("layout", {"layout": "bdsh"}),
        ("causal", {"causal": "lower"}),
        ("window_size", {"window_size": (-1, -3)}),  # KF-015
        ("softcap", {"softcap": 0.0}),
        ("mask", {"mask": np.zeros((3, 3))}),
        ("alibi_slopes", {"alibi_slopes": [1.0] * 5}),  # KF-022
        ("sink", {"sink": [1.0] * 3}),
        ("seqused_k", {"seqused_k": [1, 2, 3]}),
        ("seqused_q", {"seqused_q": [1.0, 2.0]}),
        ("broadcast", {"bias": np.zeros((3, 4))}),
        ("3 heads and q has 4", {"k": np.zeros((2, 3, 3, 5)), "v": np.zeros((2, 3, 3, 5))}),  # KF-025
        ("k", {"k": np.zeros((2, 3, 4, 6))}),
        ("v", {"v": np.zeros((2, 2, 4, 5))}),
        ("dimensions", {"v": np.zeros((3, 4, 5))}),
        ("head_dim 0", {"q": np.zeros((2, 3, 4, 0)), "k": np.zeros((2, 3, 4, 0))}),
    ],
)
def test_what_does_not_fit_is_refused(message, change):
    arrays = {name: change.pop(name, np.zeros((2, 3, 4, 5))) for name in "qkv"}
    with pytest.raises(ValueError, match=message):
        reference.attention(*arrays.values(), **change)


def test_gradients_that_do_not_fit_are_refused():
    x = np.zeros((2, 3, 4, 5))
    with pytest.raises(ValueError, match="dout"):
        reference.attention_backward(np.zeros((2, 3, 4, 6)), x, x, x)
    with pytest.raises(ValueError, match="dlse"):
        reference.attention_backward(x, x, x, x, dlse=np.zeros((2, 3, 4)))


def test_examples_of_the_docstrings():
    failed, tried = doctest.testmod(reference)
    assert tried > 5
    assert failed == 0
