"""Every pair of options of `cupyflash.attention`, on NumPy arrays, against the float64 reference under the judge's limit.

The covering array has each value of each option together with each value of every other one, in about a hundred calls; random
combinations after it add some of the triples. Outputs start as NaN, and so do all places that no row may read.
"""

from __future__ import annotations

import itertools
import random

import ml_dtypes
import numpy as np
import pytest
from allpairspy import AllPairs
from judge import judge, standard_attention

import cupyflash
from cupyflash import reference

B = 2
BLOCK = 512  # two of the blocks of 256 keys that the host path takes: 641 is more, and prime

OPTIONS = {
    "dtype": ("float16", "bfloat16", "float32", "float64"),
    "Sq": (1, 7, 64, 277, 0),
    "Sk": (1, 13, 128, BLOCK + 129, 0),
    "heads": ((1, 1), (3, 3), (4, 2), (6, 1)),
    "dims": ((8, 8), (64, 64), (5, 3), (33, 40), (1, 2), (72, 16)),
    "causal": (False, True, "top_left"),
    "window_size": (None, (3, 0), (0, 2), (17, 5), (None, 4), (30, -1)),
    "softmax_scale": (None, 0.7),
    "softcap": (None, 2.5),
    "alibi_slopes": (None, "h", "bh"),
    "bias": (None, "bhqk", "11qk", "1hqk", "qk", "b11k", "hq1"),
    "bias_dtype": ("float32", "own"),
    "mask": (None, "bhqk", "qk", "b11k", "1hq1", "k"),
    "sink": (None, "float32", "own"),
    "seqused_q": (None, (0.6, 1.0), (9.0, 0.0)),  # fractions of the allocation; above it is clamped
    "seqused_k": (None, (1.0, 0.4), (0.0, 9.0)),
    "layout": ("bshd", "bhsd", "sbhd"),
    "ndim": (4, 3),
    "storage": ("contiguous", "transposed", "packed", "offset"),
    "out": (None, "contiguous", "strided"),
    "return_lse": (False, True),
}
PAIRS = [dict(zip(OPTIONS, values, strict=True)) for values in AllPairs(list(OPTIONS.values()))]
_draw = random.Random(0)
MORE = [{name: _draw.choice(values) for name, values in OPTIONS.items()} for _ in range(150)]


def stored(x, storage, layout):
    """The values of x (B, S, H, D) as a view of NaN-filled memory of another shape, in the axis order of the call."""
    order = {"contiguous": layout, "transposed": "bshd" if layout != "bshd" else "bhsd", "packed": "bshd", "offset": layout}[storage]
    room = {"packed": (0, 3, 5, 0), "offset": (1, 1, 1, 3)}.get(storage, (0, 0, 0, 0))  # beyond x along b, s, h, d
    start = [int(storage == "offset" and axis in "sd") for axis in order]
    size = dict(zip("bshd", x.shape, strict=True))
    memory = np.full([size[axis] + room["bshd".index(axis)] for axis in order], np.nan, x.dtype)
    view = memory[tuple(slice(first, first + size[axis]) for first, axis in zip(start, order, strict=True))]
    view = view.transpose([order.index(axis) for axis in layout])
    view[...] = x.transpose(["bshd".index(axis) for axis in layout])
    return view


def build(case, rng):
    """q, k, v as (B, S, H, D), and the options of one case but for out and return_lse."""
    batch = B if case["ndim"] == 4 else 1
    dtype, (Hq, Hkv), (D, Dv), Sq, Sk = np.dtype(case["dtype"]), case["heads"], case["dims"], case["Sq"], case["Sk"]
    size = {"b": batch, "h": Hq, "q": Sq, "k": Sk, "1": 1}

    def normal(*shape, dtype=dtype):
        return rng.standard_normal(shape).astype(dtype)

    def broadcast_shape(axes):
        return [size[axis] for axis in axes]

    q, k, v = normal(batch, Sq, Hq, D), normal(batch, Sk, Hkv, D), normal(batch, Sk, Hkv, Dv)
    options = {name: case[name] for name in ("causal", "window_size", "softmax_scale", "softcap", "layout")}
    if case["alibi_slopes"]:
        options["alibi_slopes"] = rng.uniform(0.01, 0.5, broadcast_shape(case["alibi_slopes"])).astype(np.float32)
    if case["bias"]:
        shape = broadcast_shape(case["bias"])
        bias = np.where(rng.random(shape) < 0.1, -np.inf, rng.standard_normal(shape))
        options["bias"] = bias.astype(dtype if case["bias_dtype"] == "own" else np.float32)
    if case["mask"]:
        options["mask"] = rng.random(broadcast_shape(case["mask"])) < 0.7
    if case["sink"]:
        options["sink"] = normal(Hq, dtype=dtype if case["sink"] == "own" else np.float32)
    for name, allocated in (("seqused_q", Sq), ("seqused_k", Sk)):
        if case[name]:
            options[name] = np.array([int(part * allocated) for part in case[name][:batch]], np.int32)
    return q, k, v, options


@pytest.mark.parametrize("case", PAIRS + MORE)
def test_pair(case, rng):
    q, k, v, options = build(case, rng)
    layout, dtype = case["layout"], q.dtype

    def in_layout(x):
        x = x.transpose(["bshd".index(axis) for axis in layout])
        return x if case["ndim"] == 4 else x.squeeze(layout.index("b"))

    clean = [in_layout(x) for x in (q, k, v)]
    expected, expected_lse = reference.attention(*clean, **options, return_lse=True)
    standard, standard_lse = standard_attention(*clean, dtype=dtype, **options)

    for b, used in enumerate(options.get("seqused_k", ())):
        k[b, used:] = v[b, used:] = np.nan
    for b, used in enumerate(options.get("seqused_q", ())):
        q[b, used:] = np.nan
    if case["mask"] in ("k", "b11k"):
        hidden = ~np.broadcast_to(options["mask"], (len(k), 1, 1, case["Sk"]))[:, 0, 0]
        k[hidden] = v[hidden] = np.nan
    views = [stored(x, case["storage"], layout) for x in (q, k, v)]
    if case["ndim"] == 3:
        views = [x.squeeze(layout.index("b")) for x in views]
    before = [x.tobytes() for x in views]
    out = None
    if case["out"]:
        room = 3 if case["out"] == "strided" else 0
        out = np.full((*expected.shape[:-1], expected.shape[-1] + room), np.nan, dtype)[..., : expected.shape[-1]]

    result = cupyflash.attention(*views, **options, out=out, return_lse=case["return_lse"])

    lse = None
    if case["return_lse"]:
        assert result.max_logits is None
        result, lse = result.out, result.lse
    assert type(result) is np.ndarray
    assert result.dtype == dtype
    assert out is None or result is out
    judge(result, expected, standard, dtype=dtype, name="attention")
    if lse is not None:
        assert lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
        judge(lse, expected_lse, standard_lse, dtype=dtype, name="attention", kind="lse")
    if case["out"] == "strided" and result.size:
        assert np.isnan(result.base[..., -3:].astype(np.float32)).all()
    assert [x.tobytes() for x in views] == before


def test_the_covering_array_has_every_pair():
    for one, other in itertools.combinations(OPTIONS, 2):
        wanted = set(itertools.product(OPTIONS[one], OPTIONS[other]))
        assert wanted == {(case[one], case[other]) for case in PAIRS}, (one, other)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_slices_of_one_projection(dtype, rng):
    """KF-031: q, k and v as heads of one (B, S, Hq + 2 Hkv, D) array, and of one (B, S, 3, H, D)."""
    fused = rng.standard_normal((2, 37, 4 + 2 + 2, 16)).astype(dtype)
    stacked = rng.standard_normal((2, 37, 3, 2, 16)).astype(dtype)
    for q, k, v in (np.split(fused, [4, 6], axis=2), np.moveaxis(stacked, 2, 0)):
        expected = reference.attention(q, k, v, causal=True)
        standard, _ = standard_attention(q, k, v, dtype=dtype, causal=True)
        judge(cupyflash.attention(q, k, v, causal=True), expected, standard, dtype=dtype, name="slices")
        copies = [x.copy() for x in (q, k, v)]
        assert np.array_equal(cupyflash.attention(*copies, causal=True), cupyflash.attention(q, k, v, causal=True))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_results_round_to_nearest_even(dtype):
    """One key: out is v in out_dtype, whatever its values. A truncated bfloat16 would pass a judge that allows twice half an ulp."""
    v = np.array([1 + n / 1024 for n in range(64)] + [-3.0e38, 1e-30, 0.0, np.inf, -np.inf, np.nan], np.float32).reshape(1, 1, 1, -1)
    q = np.ones((1, 3, 1, 8), np.float32)
    out = cupyflash.attention(q, q[:, :1], v, out_dtype=dtype)
    with np.errstate(over="ignore"):
        expected = np.repeat(v.astype(dtype), 3, axis=1)
    assert out.dtype == expected.dtype
    np.testing.assert_array_equal(out.astype(np.float64), expected.astype(np.float64))


def test_bfloat16_is_that_of_ml_dtypes():
    x = np.ones((1, 2, 1, 4), ml_dtypes.bfloat16)
    assert cupyflash.attention(x, x, x).dtype == ml_dtypes.bfloat16
