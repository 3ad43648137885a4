"""Every pair of options of `cupyflash.attention_backward`, on NumPy arrays, against the float64 reference under the judge's limit.

The options are those of test_pairs.py and what the backward has of its own. Results start as NaN, and so does all that no row may read,
among them dout and out of unused rows. In float64 the gradients are also compared with finite differences of `cupyflash.attention` itself.
"""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from allpairspy import AllPairs
from judge import judge, standard_gradients
from test_pairs import OPTIONS as FORWARD
from test_pairs import build, stored

import cupyflash
from cupyflash import reference

ALL = ("q", "k", "v", "bias", "alibi_slopes", "sink")
OPTIONS = {
    **{name: values for name, values in FORWARD.items() if name not in ("out", "return_lse")},
    "Sq": (1, 7, 64, 149, 0),
    "Sk": (1, 13, 128, 389, 0),  # 389 is more than the 256 keys of a block, and prime
    # Gradients are proportional to it, and so is what they inherit from the rounding of out: with the 0.7 of the forward and D = 72 that
    # alone is more than the judge's fixed bound for 16 bits.
    "softmax_scale": (None, 0.2),
    "dlse": (False, True),
    "dout": ("contiguous", "transposed", "packed", "offset", "expanded", "sparse"),
    "lse": ("contiguous", "transposed"),
    "wrt": (ALL, ("q", "k", "v"), ("q",), ("k", "bias"), ("v",), ("sink", "alibi_slopes")),
    "results": (None, "contiguous", "strided"),
    "deterministic": (False, True),
}
PAIRS = [dict(zip(OPTIONS, values, strict=True)) for values in AllPairs(list(OPTIONS.values()))]
_draw = random.Random(1)
MORE = [{name: _draw.choice(values) for name, values in OPTIONS.items()} for _ in range(100)]


def gradient_of_out(x, storage, layout):
    """The values of x (B, S, H, D) as a view in the axis order of the call, of which `expanded` and `sparse` have no dense last axis."""
    if storage == "expanded":  # as the gradient of a sum over heads and dims is
        x = np.broadcast_to(x[:, :, :1, :1], x.shape)
    elif storage == "sparse":
        x = np.repeat(x, 2, axis=-1)[..., ::2]
    else:
        return stored(x, storage, layout)
    return x.transpose(["bshd".index(axis) for axis in layout])


def poison_unused(case, options, q, k, v, out, dout, rows):
    """NaN wherever no row reads: past the used lengths, and in keys that the mask hides from all."""
    for b, used in enumerate(options.get("seqused_k", ())):
        k[b, used:] = v[b, used:] = np.nan
    for b, used in enumerate(options.get("seqused_q", ())):
        for x in (q, out, dout, *(vector.swapaxes(1, 2) for vector in rows)):
            x[b, used:] = np.nan
    if case["mask"] in ("k", "b11k"):
        hidden = ~np.broadcast_to(options["mask"], (len(k), 1, 1, case["Sk"]))[:, 0, 0]
        k[hidden] = v[hidden] = np.nan


@pytest.mark.parametrize("case", PAIRS + MORE)
def test_gradients_of_pair(case, rng):
    q, k, v, options = build(case, rng)
    layout, dtype = case["layout"], q.dtype
    lse_dtype = np.float64 if dtype == np.float64 else np.float32

    def in_layout(x):
        x = x.transpose(["bshd".index(axis) for axis in layout])
        return x if case["ndim"] == 4 else x.squeeze(layout.index("b"))

    clean = [in_layout(x) for x in (q, k, v)]
    out, lse, _ = cupyflash.attention(q, k, v, return_lse=True, **{**options, "layout": "bshd"})
    dout = gradient_of_out(rng.standard_normal(out.shape).astype(dtype), case["dout"], "bshd").copy()
    dlse = rng.standard_normal(lse.shape).astype(lse_dtype) if case["dlse"] else None
    empty = in_layout((lse == -np.inf).swapaxes(1, 2)[..., None])[..., 0]  # rows that see no key
    flat = (lambda x: None if x is None else x[0]) if case["ndim"] == 3 else (lambda x: x)
    expected = reference.attention_backward(in_layout(dout), *clean, dlse=flat(dlse), **options)
    standard = standard_gradients(in_layout(dout), *clean, dlse=flat(dlse), dtype=dtype, **options)

    poison_unused(case, options, q, k, v, out, dout, [lse] if dlse is None else [lse, dlse])
    lse, dlse = flat(lse), flat(dlse)
    views = [gradient_of_out(dout, case["dout"], layout), *(stored(x, case["storage"], layout) for x in (q, k, v, out))]
    if case["ndim"] == 3:
        views = [x.squeeze(layout.index("b")) for x in views]
    if case["lse"] == "transposed":
        lse = np.ascontiguousarray(lse.swapaxes(-1, -2)).swapaxes(-1, -2)
    before = [x.tobytes() for x in (*views, lse)]
    results = {}
    for name in {"q", "k", "v"}.intersection(case["wrt"]) if case["results"] else ():
        shape, room = clean["qkv".index(name)].shape, 3 * (case["results"] == "strided")
        results[f"d{name}"] = np.full((*shape[:-1], shape[-1] + room), np.nan, dtype)[..., : shape[-1]]

    grads = cupyflash.attention_backward(*views, lse, dlse=dlse, wrt=case["wrt"], deterministic=case["deterministic"], **results, **options)

    for name in ALL:
        grad = getattr(grads, f"d{name}")
        given = clean["qkv".index(name)] if name in "qkv" else options.get(name)
        if name not in case["wrt"] or given is None:
            assert grad is None
            continue
        assert type(grad) is np.ndarray
        assert (grad.shape, grad.dtype) == (given.shape, given.dtype)
        assert results.get(f"d{name}") is None or grad is results[f"d{name}"]
        want = getattr(expected, f"d{name}")
        judged = given.dtype if given.dtype.itemsize < dtype.itemsize else dtype
        judge(grad, want, standard[name], dtype=judged, name=f"d{name}", kind="gradient")
        if name in "kv":
            np.testing.assert_array_equal(grad[(expected.dv == 0).all(axis=-1)].astype(float), 0)  # keys that nobody sees
        if name == "q":
            np.testing.assert_array_equal(grad[empty].astype(float), 0)
        if name in results and case["results"] == "strided" and grad.size:
            assert np.isnan(grad.base[..., -3:].astype(np.float32)).all()
    assert [x.tobytes() for x in (*views, lse)] == before


def test_the_covering_array_has_every_pair():
    for one, other in itertools.combinations(OPTIONS, 2):
        wanted = set(itertools.product(OPTIONS[one], OPTIONS[other]))
        assert wanted == {(case[one], case[other]) for case in PAIRS}, (one, other)


SMALL = {"Sq": (1, 9, 34), "Sk": (1, 13, 40), "dtype": ("float64",), "dlse": (False, True)}
DIFFERENCES = {name: SMALL.get(name, FORWARD.get(name)) for name in (*FORWARD, "dlse") if name not in ("storage", "out", "return_lse")}


@pytest.mark.parametrize("case", [dict(zip(DIFFERENCES, values, strict=True)) for values in AllPairs(list(DIFFERENCES.values()))])
def test_gradients_are_finite_differences_of_attention(case, rng):
    """Along a random direction for each argument. What is float32, slopes and perhaps bias and sink, has its gradient rounded to that."""
    q, k, v, options = build({**case, "storage": "contiguous"}, rng)
    layout = options["layout"]
    if options.get("bias") is not None:
        options["bias"] = np.where(np.isneginf(options["bias"]), 0, options["bias"]).astype(options["bias"].dtype)
    arrays = {name: x.transpose(["bshd".index(axis) for axis in layout]) for name, x in (("q", q), ("k", k), ("v", v))}
    if case["ndim"] == 3:
        arrays = {name: x.squeeze(layout.index("b")) for name, x in arrays.items()}
    arrays |= {name: options.pop(name) for name in ("bias", "alibi_slopes", "sink") if name in options}

    def forward(values):
        values = dict(values)
        return cupyflash.attention(*[values.pop(name) for name in "qkv"], **values, **options, return_lse=True)

    out, lse, _ = forward(arrays)
    dout, dlse = rng.standard_normal(out.shape), rng.standard_normal(lse.shape) if case["dlse"] else None

    def loss(values):
        out, lse, _ = forward(values)
        return np.vdot(out, dout) + (np.vdot(np.where(lse == -np.inf, 0, lse), dlse) if case["dlse"] else 0)

    rest = {name: x for name, x in arrays.items() if name not in "qkv"}
    grads = cupyflash.attention_backward(dout, *(arrays[name] for name in "qkv"), out, lse, dlse=dlse, wrt=ALL, **rest, **options)
    for name, x in arrays.items():
        direction = rng.standard_normal(x.shape)
        step = 1e-5
        high, low = ((x + sign * step * direction).astype(x.dtype) for sign in (1, -1))
        slope = (loss({**arrays, name: high}) - loss({**arrays, name: low})) / 2
        change = np.vdot(getattr(grads, f"d{name}").astype(float), (high.astype(float) - low.astype(float)) / 2)
        tolerance = 1e-7 if x.dtype == np.float64 else 3e-5
        assert change == pytest.approx(slope, rel=tolerance, abs=tolerance * step), name
