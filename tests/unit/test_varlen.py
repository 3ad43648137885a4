"""Every pair of options of `cupyflash.attention_varlen` and of its gradients, on NumPy arrays, against the float64 reference.

The reference and the judge's formula compute each sequence alone; what they give is put where the sequence lies. Results start as NaN, and
so does all that belongs to no sequence or lies past its used length. In float64 the gradients are also compared with finite differences.
"""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
from allpairspy import AllPairs
from judge import judge, standard_attention, standard_gradients
from test_pairs import stored

import cupyflash
from cupyflash import reference

ALL = ("q", "k", "v", "bias", "alibi_slopes", "sink")
# Rows and keys of each sequence; 277 is more than the 256 keys of a block of the host path, and prime.
LENGTHS = {
    "one": ((23,), (31,)),
    "mixed": ((3, 0, 5, 1, 13), (4, 7, 0, 1, 13)),
    "equal": ((7, 7, 7), (7, 7, 7)),
    "runs": ((2, 2, 2, 5, 5, 0, 0, 1), (3, 3, 4, 5, 5, 1, 1, 0)),
    "single": ((1,) * 40, (1,) * 40),
    "uneven": ((1, 131, 2), (2, 277, 1)),
    "corners": ((5, 2, 1), (2, 5, 16)),
    "empty": ((0, 0), (0, 0)),
    "no keys": ((4, 2), (0, 0)),
    "none": ((), ()),
}
OPTIONS = {
    "dtype": ("float16", "bfloat16", "float32", "float64"),
    "lengths": tuple(LENGTHS),
    "around": ((0, 0), (3, 5)),  # tokens before the first sequence, and behind the last
    "heads": ((1, 1), (3, 3), (4, 2), (6, 1)),
    "dims": ((8, 8), (64, 64), (5, 3), (33, 40), (1, 2), (72, 16)),
    "causal": (False, True, "top_left"),
    "window_size": (None, (3, 0), (0, 2), (17, 5), (None, 4), (30, -1)),
    "softmax_scale": (None, 0.2),
    "softcap": (None, 2.5),
    "alibi_slopes": (None, "h", "bh"),
    "sink": (None, "float32", "own"),
    "seqused_q": (None, (0.6, 1.0), (9.0, 0.0, 0.5)),  # fractions of the lengths in turn; above them it is clamped
    "seqused_k": (None, (1.0, 0.4), (0.0, 9.0, 0.7)),
    "max_seqlen": (None, "true", "too small", "too large"),
    "offsets": ("by place", "by name", "strided"),
    "storage": ("contiguous", "transposed", "packed", "offset"),
}
FORWARD = {**OPTIONS, "out": (None, "contiguous", "strided"), "out_dtype": (None, "float32"), "return_lse": (False, True)}
BACKWARD = {
    **OPTIONS,
    "dlse": (False, True),
    "dout": ("contiguous", "transposed", "packed", "offset", "expanded", "sparse"),
    "lse": ("contiguous", "transposed"),
    "wrt": (ALL, ("q", "k", "v"), ("q",), ("k",), ("v",), ("sink", "alibi_slopes")),
    "results": (None, "contiguous", "strided"),
    "deterministic": (False, True),
}


def pairs_and_more(options, seed, more):
    draw = random.Random(seed)
    pairs = [dict(zip(options, values, strict=True)) for values in AllPairs(list(options.values()))]
    return pairs, pairs + [{name: draw.choice(values) for name, values in options.items()} for _ in range(more)]


FORWARD_PAIRS, FORWARD_CASES = pairs_and_more(FORWARD, 0, 100)
BACKWARD_PAIRS, BACKWARD_CASES = pairs_and_more(BACKWARD, 1, 70)


def build(case, rng):
    """The arrays of a call by name and its options, and what is known of each sequence: where it lies, and its options alone."""
    dtype, (Hq, Hkv), (D, Dv), (before, behind) = np.dtype(case["dtype"]), case["heads"], case["dims"], case["around"]
    lengths = LENGTHS[case["lengths"]]
    cu_seqlens_q, cu_seqlens_k = (np.cumsum([before, *n]).astype(np.int32) for n in lengths)
    Tq, Tk = cu_seqlens_q[-1] + behind, cu_seqlens_k[-1] + behind

    def normal(*shape, dtype=dtype):
        return rng.standard_normal(shape).astype(dtype)

    arrays = {"q": normal(Tq, Hq, D), "k": normal(Tk, Hkv, D), "v": normal(Tk, Hkv, Dv)}
    options = {name: case[name] for name in ("causal", "window_size", "softmax_scale", "softcap")}
    if case["alibi_slopes"]:
        size = {"b": len(lengths[0]), "h": Hq}
        options["alibi_slopes"] = rng.uniform(0.01, 0.5, [size[axis] for axis in case["alibi_slopes"]]).astype(np.float32)
    if case["sink"]:
        options["sink"] = normal(Hq, dtype=dtype if case["sink"] == "own" else np.float32)
    for name, has in (("seqused_q", lengths[0]), ("seqused_k", lengths[1])):
        if case[name]:
            options[name] = np.array([int(part * n) for part, n in zip(itertools.cycle(case[name]), has, strict=False)], np.int32)
    sequences = []
    for b in range(len(lengths[0])):
        alone = dict(options)
        if case["alibi_slopes"] == "bh":
            alone["alibi_slopes"] = options["alibi_slopes"][b]
        alone |= {name: options[name][b : b + 1] for name in ("seqused_q", "seqused_k") if name in options}
        rows, keys = (slice(cu[b], cu[b + 1]) for cu in (cu_seqlens_q, cu_seqlens_k))
        sequences.append(SimpleNamespace(b=b, rows=rows, keys=keys, options=alone))
    if case["max_seqlen"]:
        hint = {"true": 0, "too small": -1, "too large": 1000}[case["max_seqlen"]]
        options |= {f"max_seqlen_{x}": max(max(n, default=0) + hint, 0) for x, n in zip("qk", lengths, strict=True)}
    offsets = [cu_seqlens_q, cu_seqlens_k]
    if case["offsets"] == "strided":
        offsets = [np.repeat(cu, 2)[::2] for cu in offsets]
    if lengths[0] == lengths[1] and case["offsets"] != "strided":
        offsets.pop()  # q's are k's
    return arrays, options, offsets, sequences


def poison_unused(arrays, sequences, rows=(), more=()):
    """NaN in all tokens that are of no sequence or past its used length; `rows` (Hq, Tq) and `more` (Tq, Hq, Dv) go with q."""
    unused_q, unused_k = (np.ones(len(arrays[name]), bool) for name in "qk")
    for s in sequences:
        for unused, where, name in ((unused_q, s.rows, "seqused_q"), (unused_k, s.keys, "seqused_k")):
            length = where.stop - where.start
            unused[where][: min(length, s.options.get(name, [length])[0])] = False
    for x in (arrays["q"], *more, *(x.T for x in rows)):
        x[unused_q] = np.nan
    for name in "kv":
        arrays[name][unused_k] = np.nan
    return unused_q


def packed_call(function, arrays, options, offsets, case, **more):
    if case["offsets"] == "by name":
        more |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), offsets, strict=False))
        offsets = []
    return function(*arrays, *offsets, **options, **more)


def stored_tokens(x, storage):
    return stored(x[None], storage, "bshd")[0]


@pytest.mark.parametrize("case", FORWARD_CASES)
def test_pair(case, rng):
    arrays, options, offsets, sequences = build(case, rng)
    dtype = arrays["q"].dtype
    out_dtype = np.dtype(case["out_dtype"] or dtype)
    shape = (*arrays["q"].shape[:2], arrays["v"].shape[2])
    expected, standard = np.zeros(shape), np.zeros(shape)
    expected_lse, standard_lse = np.full(shape[1::-1], -np.inf), np.full(shape[1::-1], -np.inf)
    for s in sequences:
        alone = arrays["q"][s.rows], arrays["k"][s.keys], arrays["v"][s.keys]
        expected[s.rows], expected_lse[:, s.rows] = reference.attention(*alone, **s.options, return_lse=True)
        standard[s.rows], standard_lse[:, s.rows] = standard_attention(*alone, dtype=dtype, **s.options)
    poison_unused(arrays, sequences)
    views = [stored_tokens(x, case["storage"]) for x in arrays.values()]
    before = [x.tobytes() for x in (*views, *offsets)]
    out = None
    if case["out"]:
        room = 3 if case["out"] == "strided" else 0
        out = np.full((*shape[:-1], shape[-1] + room), np.nan, out_dtype)[..., : shape[-1]]

    more = {"out": out, "out_dtype": case["out_dtype"], "return_lse": case["return_lse"]}
    result = packed_call(cupyflash.attention_varlen, views, options, offsets, case, **more)

    lse = None
    if case["return_lse"]:
        assert result.max_logits is None
        result, lse = result.out, result.lse
    assert type(result) is np.ndarray
    assert result.dtype == out_dtype
    assert out is None or result is out
    judge(result, expected, standard, dtype=out_dtype if out_dtype.itemsize < dtype.itemsize else dtype, name="attention_varlen")
    if lse is not None:
        assert lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
        judge(lse, expected_lse, standard_lse, dtype=dtype, name="attention_varlen", kind="lse")
    if case["out"] == "strided" and result.size:
        assert np.isnan(result.base[..., -3:].astype(np.float32)).all()
    assert [x.tobytes() for x in (*views, *offsets)] == before


def gradient_of_out(x, storage):
    if storage == "expanded":  # as the gradient of a sum over heads and dims is
        return np.broadcast_to(x[:, :1, :1], x.shape)
    return np.repeat(x, 2, axis=-1)[..., ::2] if storage == "sparse" else stored_tokens(x, storage)


@pytest.mark.parametrize("case", BACKWARD_CASES)
def test_gradients_of_pair(case, rng):
    arrays, options, offsets, sequences = build(case, rng)
    dtype = arrays["q"].dtype
    out, lse, _ = packed_call(cupyflash.attention_varlen, arrays.values(), options, offsets, case, return_lse=True)
    dout = gradient_of_out(rng.standard_normal(out.shape).astype(dtype), case["dout"]).copy()
    dlse = rng.standard_normal(lse.shape).astype(lse.dtype) if case["dlse"] else None
    given = arrays | {name: options[name] for name in ("alibi_slopes", "sink") if name in options}
    expected, standard = ({name: np.zeros(x.shape) for name, x in given.items()} for _ in range(2))
    for s in sequences:
        places = {"q": s.rows, "k": s.keys, "v": s.keys, "alibi_slopes": s.b if case["alibi_slopes"] == "bh" else ..., "sink": ...}
        alone = [x[places[name]] for name, x in arrays.items()]
        through = None if dlse is None else dlse[:, s.rows]
        want = reference.attention_backward(dout[s.rows], *alone, dlse=through, **s.options)
        plain = standard_gradients(dout[s.rows], *alone, dlse=through, dtype=dtype, **s.options)
        for name in given:
            expected[name][places[name]] += getattr(want, f"d{name}")
            standard[name][places[name]] += plain[name]
    empty = (lse == -np.inf).T
    unused = poison_unused(arrays, sequences, [lse] if dlse is None else [lse, dlse], [out, dout])
    views = [gradient_of_out(dout, case["dout"]), *(stored_tokens(x, case["storage"]) for x in (*arrays.values(), out))]
    if case["lse"] == "transposed":
        lse = np.ascontiguousarray(lse.T).T
    before = [x.tobytes() for x in (*views, lse, *offsets)]
    results = {}
    for name in {"q", "k", "v"}.intersection(case["wrt"]) if case["results"] else ():
        shape, room = arrays[name].shape, 3 * (case["results"] == "strided")
        results[f"d{name}"] = np.full((*shape[:-1], shape[-1] + room), np.nan, dtype)[..., : shape[-1]]

    offsets_by_name = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), offsets, strict=False))
    more = {"dlse": dlse, "wrt": case["wrt"], "deterministic": case["deterministic"], **results, **offsets_by_name}
    grads = cupyflash.attention_backward(*views, lse, **more, **options)

    for name in ALL:
        grad = getattr(grads, f"d{name}")
        if name not in case["wrt"] or name not in given:
            assert grad is None
            continue
        assert type(grad) is np.ndarray
        assert (grad.shape, grad.dtype) == (given[name].shape, given[name].dtype)
        assert results.get(f"d{name}") is None or grad is results[f"d{name}"]
        judged = grad.dtype if grad.dtype.itemsize < dtype.itemsize else dtype
        unit = 1 if name != "alibi_slopes" else max([1, *itertools.chain(*LENGTHS[case["lengths"]])])  # slope * unit * (distance / unit)
        judge(grad / unit, expected[name] / unit, standard[name] / unit, dtype=judged, name=f"d{name}", kind="gradient")
        if name in "kv":
            np.testing.assert_array_equal(grad[(expected["v"] == 0).all(axis=-1)].astype(float), 0)  # keys that nobody sees
        if name == "q":
            np.testing.assert_array_equal(grad[empty].astype(float), 0)
            np.testing.assert_array_equal(grad[unused].astype(float), 0)
        if name in results and case["results"] == "strided" and grad.size:
            assert np.isnan(grad.base[..., -3:].astype(np.float32)).all()
    assert [x.tobytes() for x in (*views, lse, *offsets)] == before


@pytest.mark.parametrize(("options", "pairs"), [(FORWARD, FORWARD_PAIRS), (BACKWARD, BACKWARD_PAIRS)], ids=["forward", "backward"])
def test_the_covering_array_has_every_pair(options, pairs):
    for one, other in itertools.combinations(options, 2):
        wanted = set(itertools.product(options[one], options[other]))
        assert wanted == {(case[one], case[other]) for case in pairs}, (one, other)


SMALL = {"dtype": ("float64",), "dlse": (False, True), "lengths": tuple(name for name in LENGTHS if name not in ("uneven", "none"))}
DIFFERENCES = {name: SMALL.get(name, OPTIONS.get(name)) for name in (*OPTIONS, "dlse") if name != "storage"}


@pytest.mark.parametrize("case", [dict(zip(DIFFERENCES, values, strict=True)) for values in AllPairs(list(DIFFERENCES.values()))])
def test_gradients_are_finite_differences_of_attention_varlen(case, rng):
    """Along a random direction for each argument, by way of `attention_vjp`. What is float32, slopes and perhaps a sink, has its gradient
    rounded to that."""
    arrays, options, offsets, _ = build(case, rng)
    arrays |= {name: options.pop(name) for name in ("alibi_slopes", "sink") if name in options}
    options |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), offsets, strict=False))

    def forward(values):
        values = dict(values)
        return cupyflash.attention_vjp(*[values.pop(name) for name in "qkv"], **values, **options, return_lse=True, wrt=ALL)

    (out, lse, _), pullback = forward(arrays)
    dout, dlse = rng.standard_normal(out.shape), rng.standard_normal(lse.shape) if case["dlse"] else None

    def loss(values):
        (out, lse, _), _ = forward(values)
        return np.vdot(out, dout) + (np.vdot(np.where(lse == -np.inf, 0, lse), dlse) if case["dlse"] else 0)

    grads = pullback(dout, dlse)
    for name, x in arrays.items():
        direction = rng.standard_normal(x.shape)
        step = 1e-5
        high, low = ((x + sign * step * direction).astype(x.dtype) for sign in (1, -1))
        slope = (loss({**arrays, name: high}) - loss({**arrays, name: low})) / 2
        change = np.vdot(getattr(grads, f"d{name}").astype(float), (high.astype(float) - low.astype(float)) / 2)
        tolerance = 1e-7 if x.dtype == np.float64 else 3e-5
        assert change == pytest.approx(slope, rel=tolerance, abs=tolerance * step), name


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("causal", [False, True])
def test_slices_of_one_projection(rng, dtype, causal):
    """KF-031: q, k and v, and their gradients, as parts of one (T, 3, H, D) array and of one (T, Hq + 2 Hkv, D)."""
    cu_seqlens = np.array([0, 9, 9, 30, 37], np.int32)
    stacked, fused = rng.standard_normal((37, 3, 2, 16)).astype(dtype), rng.standard_normal((37, 8, 16)).astype(dtype)
    for whole, parts in ((stacked, lambda x: np.moveaxis(x, 1, 0)), (fused, lambda x: np.split(x, [4, 6], axis=1))):
        slices, copies = list(parts(whole)), [x.copy() for x in parts(whole)]
        out, lse, _ = cupyflash.attention_varlen(*slices, cu_seqlens, causal=causal, return_lse=True)
        np.testing.assert_array_equal(out, cupyflash.attention_varlen(*copies, cu_seqlens, causal=causal))
        dout = rng.standard_normal(out.shape).astype(dtype)
        targets = np.full_like(whole, np.nan)
        into = dict(zip(("dq", "dk", "dv"), parts(targets), strict=True))
        options = {"cu_seqlens_q": cu_seqlens, "causal": causal, "deterministic": True}
        grads = cupyflash.attention_backward(dout, *slices, out, lse, **options, **into)
        expected = cupyflash.attention_backward(dout, *copies, out, lse, **options)
        for grad, want in zip(grads[:3], expected[:3], strict=True):
            np.testing.assert_array_equal(grad, want)
        assert not np.isnan(targets.astype(np.float32)).any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("used", [None, (20, 0, 7), (20, 20, 20)])
def test_equal_lengths_are_a_batch(rng, dtype, used):
    """What `attention` gives for a batch of sequences is what they give packed: of 72 rows a key head, which no GPU leaves to `decode`."""
    q, k, v, dout = (rng.standard_normal(shape).astype(dtype) for shape in ((3, 36, 4, 16), (3, 46, 2, 16), (3, 46, 2, 8), (3, 36, 4, 8)))
    options = {"causal": True, "sink": np.ones(4, np.float32), "alibi_slopes": rng.random((3, 4)).astype(np.float32)}
    if used:
        options |= {"seqused_q": np.array(used, np.int32), "seqused_k": np.array(used, np.int32)}
    wrt = ("q", "k", "v", "alibi_slopes", "sink")
    out, pullback = cupyflash.attention_vjp(q, k, v, return_lse=True, wrt=wrt, **options)
    expected = pullback(dout)
    flat = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v, dout)]
    cu_seqlens = {"cu_seqlens_q": np.arange(0, 109, 36, dtype=np.int32), "cu_seqlens_k": np.arange(0, 139, 46, dtype=np.int32)}
    packed, pullback = cupyflash.attention_vjp(*flat[:3], return_lse=True, wrt=wrt, **cu_seqlens, **options)
    grads = pullback(flat[3])
    bound = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 2e-6, "float64": 2e-15}[dtype]
    pairs = [(packed.out, out.out), (packed.lse, out.lse.swapaxes(0, 1)), *zip(grads, expected, strict=True)]
    for got, want in pairs:
        if want is not None:
            np.testing.assert_allclose(got.astype(float), want.reshape(got.shape).astype(float), rtol=bound, atol=bound)
