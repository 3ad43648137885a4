"""cupyflash.jax: under JAX's transformations, against float64 and `jax.nn`; here on the CPU, on GPUs in tests/gpu/test_jax_gpu.py."""

from __future__ import annotations

import doctest
import inspect
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed; pip install jax")

import jax.numpy as jnp  # noqa: E402
from judge import judge, standard_attention, standard_gradients  # noqa: E402
from test_launch import gpu  # noqa: E402, F401  # a fixture

import cupyflash  # noqa: E402
import cupyflash.jax as subject  # noqa: E402
from cupyflash import ArgumentError, DtypeError, ShapeError, UnsupportedError, api, reference  # noqa: E402
from cupyflash.device import KNOWN  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
F32 = np.float32
NAMES = ("q", "k", "v", "bias", "alibi_slopes", "sink")


def normal(rng: np.random.Generator, *shape: int) -> Any:
    return rng.standard_normal(shape, dtype=F32)


def inputs(rng: np.random.Generator, sq: int = 9, sk: int = 13, batch: tuple[int, ...] = (2,)) -> dict[str, Any]:
    return {
        "q": normal(rng, *batch, sq, 4, 8),
        "k": normal(rng, *batch, sk, 2, 8),
        "v": normal(rng, *batch, sk, 2, 6),
    }


def options(rng: np.random.Generator, sq: int = 9, sk: int = 13) -> dict[str, dict[str, Any]]:
    return {
        "none": {},
        "causal": {"causal": True},
        "top_left": {"causal": "top_left", "window_size": [3, -1]},
        "window": {"window_size": (4, 2), "softmax_scale": 0.3},
        "softcap": {"softcap": 2.0},
        "bias": {"bias": normal(rng, 4, sq, sk)},
        "broadcast": {"bias": normal(rng, 2, 1, 1, sk)},
        "mask": {"mask": rng.random((2, 1, sq, sk)) < 0.7},
        "slopes": {"alibi_slopes": rng.uniform(0.1, 1, 4).astype(F32)},
        "slopes_by_batch": {"alibi_slopes": rng.uniform(0.1, 1, (2, 4)).astype(F32)},
        "sink": {"sink": normal(rng, 4)},
        "used": {"seqused_q": np.array([9, 4], np.int32), "seqused_k": np.array([13, 0], np.int32)},
        "every": {
            "causal": True,
            "window_size": (7, 0),
            "softcap": 5.0,
            "bias": normal(rng, 2, 1, sq, sk),
            "sink": normal(rng, 4),
            "alibi_slopes": rng.uniform(0.1, 1, 4).astype(F32),
            "mask": rng.random((1, sk)) < 0.8,
            "seqused_k": np.array([13, 8], np.int32),
        },
    }


OPTIONS = [*options(np.random.default_rng())]


def placed(given: dict[str, Any]) -> dict[str, Any]:
    return {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}


def call(given: dict[str, Any], attention: Callable[..., Any] = subject.attention, **more: Any) -> Any:
    rest = {name: x for name, x in given.items() if name not in "qkv"}
    return attention(given["q"], given["k"], given["v"], **rest, **more)


def gradients(given: dict[str, Any], dout: Any, dlse: Any, wrap: Callable[[Any], Any] = lambda f: f, **more: Any) -> dict[str, Any]:
    """Those of sum(out * dout) + sum(lse * dlse), for what can have one; dlse may be None."""
    wanted = {name: given[name] for name in NAMES if name in given}
    fixed = {name: x for name, x in given.items() if name not in wanted}

    def loss(wanted: dict[str, Any]) -> Any:
        if dlse is None:
            return (call({**wanted, **fixed}, **more) * dout).sum()
        out, lse, _ = call({**wanted, **fixed}, return_lse=True, **more)
        return (out * dout).sum() + jnp.where(jnp.isfinite(lse), lse * dlse, 0).sum()

    return wrap(jax.grad(loss))(wanted)


def agree(got: dict[str, Any], dout: Any, dlse: Any, given: dict[str, Any], name: str) -> None:
    """Gradients against the reference's, as close as the plain formula is."""
    arrays, rest = [given[n] for n in "qkv"], {n: x for n, x in given.items() if n not in "qkv"}
    expected = reference.attention_backward(dout, *arrays, dlse=dlse, **rest)
    plain = standard_gradients(dout, *arrays, dtype=F32, dlse=dlse, **rest)
    assert got
    for n, x in got.items():
        assert x.dtype == given[n].dtype
        judge(x, getattr(expected, f"d{n}"), plain[n], dtype=F32, name=f"{name} d{n}", kind="gradient")


# --- attention -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("which", OPTIONS)
def test_forward_and_gradients_of_all_options(rng: np.random.Generator, which: str, jit: bool) -> None:
    given = inputs(rng) | options(rng)[which]
    there = placed(given)
    statics = {name: x for name, x in there.items() if not isinstance(x, jax.Array)}

    def run(arrays: Any) -> Any:
        return call(arrays | statics, return_lse=True)

    out, lse, _ = (jax.jit(run) if jit else run)({name: x for name, x in there.items() if name not in statics})
    expected, expected_lse = call(given, reference.attention, return_lse=True)
    plain, plain_lse = call(given, standard_attention, dtype=F32)
    judge(out, expected, plain, dtype=F32, name=which)
    judge(lse, expected_lse, plain_lse, dtype=F32, name=which, kind="lse")
    dout, dlse = normal(rng, *out.shape), np.where(np.isfinite(expected_lse), normal(rng, *lse.shape), 0).astype(F32)
    for d in (None, dlse):
        agree(gradients(there, dout, d, jax.jit if jit else lambda f: f), dout, d, given, which)


@pytest.mark.parametrize("layout", ["bhsd", "sbhd"])
def test_layouts(rng: np.random.Generator, layout: str) -> None:
    given = {name: np.ascontiguousarray(np.einsum(f"bshd->{layout}", x)) for name, x in inputs(rng).items()}
    out = call(placed(given), layout=layout, causal=True)
    dout = normal(rng, *out.shape)
    judge(*(call(given, f, layout=layout, causal=True) for f in (lambda *a, **o: out, reference.attention)),
          call(given, standard_attention, dtype=F32, layout=layout, causal=True)[0], dtype=F32, name=layout)  # fmt: skip
    agree(gradients(placed(given), dout, None, layout=layout, causal=True), dout, None, given | {"layout": layout, "causal": True}, layout)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_kf_079_16_bits(rng: np.random.Generator, dtype: str) -> None:
    given = {name: np.asarray(jnp.asarray(x, dtype)) for name, x in inputs(rng).items()}
    out = jax.jit(subject.attention)(*placed(given).values())
    assert out.dtype == dtype
    judge(out, reference.attention(*given.values()), standard_attention(*given.values(), dtype=given["q"].dtype)[0],
          dtype=given["q"].dtype, name=dtype)  # fmt: skip
    dout = np.asarray(jnp.asarray(normal(rng, *out.shape), dtype))
    expected = reference.attention_backward(dout, *given.values())
    plain = standard_gradients(dout, *given.values(), dtype=dout.dtype)
    for name, x in gradients(placed(given), dout, None).items():
        judge(x, getattr(expected, f"d{name}"), plain[name], dtype=dout.dtype, name=name, kind="gradient")
    wide = call(placed(given), out_dtype=jnp.float32)
    assert wide.dtype == "float32"
    judge(wide, reference.attention(*given.values()), standard_attention(*given.values(), dtype=F32)[0], dtype=F32, name="wide")


def test_float64_where_jax_holds_it(rng: np.random.Generator) -> None:
    given = {name: x.astype(np.float64) for name, x in inputs(rng).items()}
    dout = rng.standard_normal((2, 9, 4, 6))
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        out, lse, _ = call(placed(given), return_lse=True)
        grads = gradients(placed(given), dout, None)
    assert out.dtype == lse.dtype == "float64"
    np.testing.assert_allclose(out, reference.attention(*given.values()), rtol=1e-12, atol=1e-13)
    expected = reference.attention_backward(dout, *given.values())
    for name, x in grads.items():
        np.testing.assert_allclose(x, getattr(expected, f"d{name}"), rtol=1e-11, atol=1e-12)
    with pytest.raises(DtypeError, match="jax_enable_x64"):
        call(placed(inputs(rng)), out_dtype="float64")


def test_as_jax_nn_under_jit_vmap_scan_and_checkpoint(rng: np.random.Generator) -> None:
    q, k, v = jnp.asarray(normal(rng, 3, 5, 2, 7, 4, 8))
    w = jnp.asarray(normal(rng, 8, 8) / 3)

    def loss(attend: Callable[..., Any], q: Any, k: Any, v: Any, w: Any) -> Any:
        step = jax.checkpoint(lambda x, kv: (attend(x @ w, *kv), None))
        return (jax.lax.scan(step, q[0], (k, v))[0] ** 2).sum()

    ours, theirs = (
        jax.jit(jax.grad(lambda *a, f=f: loss(f, *a), (0, 1, 2, 3)))(q, k, v, w)
        for f in (cupyflash.attention, jax.nn.dot_product_attention)
    )
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    mapped = jax.jit(jax.vmap(jax.vmap(cupyflash.attention)))(*(x[..., None, :, :, :] for x in (q, k, v)))
    np.testing.assert_allclose(mapped[:, :, 0], jax.vmap(jax.nn.dot_product_attention)(q, k, v), rtol=1e-4, atol=1e-6)


def test_only_the_gradients_that_jax_asks_for_are_computed(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    whole = subject.backward.attention_backward

    def recorded(*args: Any, wrt: tuple[str, ...], **more: Any) -> Any:
        asked.append(wrt)
        return whole(*args, wrt=wrt, **more)

    monkeypatch.setattr(subject.backward, "attention_backward", recorded)
    monkeypatch.setattr(subject, "_differentiable", subject._differentiable.__wrapped__)  # not one that is kept
    monkeypatch.setattr(subject.arrays, "prepared", lambda build, *args: build(*args))
    given = placed(inputs(rng) | {"bias": normal(rng, 9, 13)})
    jax.grad(lambda v: call(given | {"v": v}).sum())(given["v"])
    assert set(asked) == {("v",)}


# --- vmap ------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of q in each forward call of the host path."""
    shapes: list[tuple[int, ...]] = []
    whole = api.host.attention

    def counted(problem: Any, operands: Any, *rest: Any) -> Any:
        shapes.append(operands.q.shape)
        return whole(problem, operands, *rest)

    monkeypatch.setattr(api.host, "attention", counted)
    return shapes


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd"])
@pytest.mark.parametrize("batch", [(), (2,)], ids=["unbatched", "batched"])
def test_vmap_is_one_call(rng: np.random.Generator, calls: list[Any], batch: tuple[int, ...], layout: str) -> None:
    order = f"bshd->{layout}" if batch else f"shd->{layout.replace('b', '')}"
    each = [{n: np.ascontiguousarray(np.einsum(order, x)) for n, x in inputs(rng, batch=batch).items()} for _ in range(3)]
    stacked = {n: jnp.stack([x[n] for x in each]) for n in "qkv"}
    dout = normal(rng, 3, *call(each[0], layout=layout, attention=reference.attention).shape)

    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        (out, lse, _), pull = jax.vjp(lambda *a: subject.attention(*a, layout=layout, causal=True, return_lse=True), q, k, v)
        return out, pull(subject.AttentionResult(out=dout, lse=jnp.zeros_like(lse)))

    out, grads = jax.jit(jax.vmap(both))(*stacked.values(), dout)
    jax.block_until_ready(out)
    assert calls == [(3 * (batch[0] if batch else 1), 9, 4, 8)]
    for n in range(3):
        expected = reference.attention_backward(dout[n], *each[n].values(), layout=layout, causal=True)
        np.testing.assert_allclose(out[n], call(each[n], reference.attention, layout=layout, causal=True), rtol=1e-4, atol=1e-5)
        for got, want in zip(grads, expected, strict=False):
            np.testing.assert_allclose(got[n], want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("moving", ["none", "every", "k"])
@pytest.mark.parametrize("which", OPTIONS)
def test_vmap_of_options(rng: np.random.Generator, which: str, moving: str) -> None:
    """The three, or k alone, or all arrays have a mapped axis; gradients of the others are sums, or one an entry."""
    given = inputs(rng) | options(rng)[which]
    arrays = {n: x for n, x in given.items() if isinstance(x, np.ndarray)}
    moves = {"none": {*"qkv"}, "every": {*arrays}, "k": {"k"}}[moving]
    each = [given | {n: (rng.permutation(x.ravel()).reshape(x.shape)) for n, x in arrays.items() if n in moves} for _ in range(3)]
    dout = normal(rng, 2, 9, 4, 6)
    stacked = {n: jnp.stack([x[n] for x in each]) if n in moves else jnp.asarray(arrays[n]) for n in arrays}
    rest = {n: x for n, x in given.items() if n not in arrays}
    axes = {n: 0 if n in moves else None for n in arrays}
    got = jax.vmap(lambda x: gradients({**x, **rest}, dout, None), in_axes=(axes,))(stacked)
    for n in range(3):
        agree({name: x[n] for name, x in got.items()}, dout, None, each[n], f"{which} {moving}")


def test_vmap_over_cotangents(rng: np.random.Generator) -> None:
    given = placed(inputs(rng, 3, 4, ()))
    jacobian = jax.jacrev(lambda q: call(given | {"q": q}))(given["q"])
    expected = jax.jacrev(lambda q: jax.nn.dot_product_attention(q, given["k"], jnp.pad(given["v"], ((0, 0), (0, 0), (0, 2)))))(given["q"])
    np.testing.assert_allclose(jacobian, expected[:, :, :6], rtol=1e-4, atol=1e-5)


# --- packed sequences --------------------------------------------------------------------------------------------------------------------


def packed(rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    given = {"q": normal(rng, 12, 4, 8), "k": normal(rng, 15, 2, 8), "v": normal(rng, 15, 2, 6)}
    return given, {"cu_seqlens_q": np.array([0, 5, 5, 11], np.int32), "cu_seqlens_k": np.array([1, 4, 9, 15], np.int32)}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_packed_sequences_and_their_gradients(rng: np.random.Generator, jit: bool) -> None:
    given, cu = packed(rng)
    more = {"alibi_slopes": rng.uniform(0.1, 1, (3, 4)).astype(F32), "sink": normal(rng, 4)}
    dout = normal(rng, 12, 4, 6)

    def run(wanted: Any, offsets: Any) -> Any:
        return call(wanted, cupyflash.attention_varlen, **offsets, causal=True, max_seqlen_q=6)

    def loss(wanted: Any, offsets: Any) -> Any:
        return (run(wanted, offsets) * dout).sum()

    wrap = jax.jit if jit else lambda f: f
    there, offsets = placed(given | more), placed(cu)
    out, grads = wrap(run)(there, offsets), wrap(jax.grad(loss))(there, offsets)
    total = {n: np.zeros_like(x, np.float64) for n, x in (given | more).items()}
    expected = np.zeros((12, 4, 6))
    for b in range(3):
        rows, keys = (slice(*cu[f"cu_seqlens_{n}"][b : b + 2]) for n in "qk")
        alone = [given["q"][rows], given["k"][keys], given["v"][keys]]
        own = {"alibi_slopes": more["alibi_slopes"][b], "sink": more["sink"], "causal": True}
        expected[rows] = reference.attention(*alone, **own)
        found = reference.attention_backward(dout[rows], *alone, **own)
        for name, where, x in zip("qkv", (rows, keys, keys), found[:3], strict=True):
            total[name][where] += x
        total["alibi_slopes"][b] += found.dalibi_slopes
        total["sink"] += found.dsink
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    for name, x in grads.items():
        np.testing.assert_allclose(x, total[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_one_compilation_serves_all_lengths(rng: np.random.Generator) -> None:
    (q, k, v), cu = placed(packed(rng)[0]).values(), packed(rng)[1]["cu_seqlens_k"]
    q = k
    run = jax.jit(subject.attention_varlen)
    for offsets in (cu, np.array([0, 0, 7, 15], np.int32)):
        expected = cupyflash.attention_varlen(*(np.asarray(x) for x in (q, k, v)), offsets)
        np.testing.assert_allclose(run(q, k, v, offsets), expected, rtol=1e-6, atol=1e-6)
    assert run._cache_size() == 1


def test_packed_sequences_under_vmap(rng: np.random.Generator) -> None:
    given, cu = packed(rng)
    twice = {n: jnp.stack([x, x[::-1]]) for n, x in given.items()}
    grads = jax.vmap(jax.grad(lambda x: call(x, subject.attention_varlen, **cu).sum()))(twice)
    alone = jax.grad(lambda x: call(x, subject.attention_varlen, **cu).sum())({n: x[1] for n, x in twice.items()})
    for name, x in alone.items():
        np.testing.assert_allclose(grads[name][1], x, rtol=1e-5, atol=1e-6)


def test_pages_have_no_gradient(rng: np.random.Generator) -> None:
    q, pages = jnp.asarray(normal(rng, 5, 4, 8)), jnp.asarray(normal(rng, 3, 4, 2, 8))
    more = {"page_table": jnp.array([[2, 0]]), "seqused_k": np.array([7], np.int32)}
    cu = jnp.array([0, 5])
    out = jax.jit(lambda q: subject.attention_varlen(q, pages, pages, cu, **more))(q)
    keys = np.asarray(pages)[[2, 0]].reshape(8, 2, 8)[:7]
    np.testing.assert_allclose(out, reference.attention(np.asarray(q), keys, keys), rtol=1e-5, atol=1e-6)
    with pytest.raises(UnsupportedError, match="gradients of keys in pages are not built; gather the pages"):
        jax.grad(lambda q: subject.attention_varlen(q, pages, pages, cu, **more).sum())(q)


# --- caches ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", ["scan", "fori_loop"])
def test_decode_loop_under_jit(rng: np.random.Generator, loop: str) -> None:
    q, k, v = normal(rng, 5, 2, 1, 4, 8), normal(rng, 5, 2, 1, 2, 8), normal(rng, 5, 2, 1, 2, 6)
    k_cache, v_cache = normal(rng, 2, 9, 2, 8), normal(rng, 2, 9, 2, 6)
    lengths = np.array([3, 0], np.int32)

    def step(carry: Any, new: Any) -> Any:
        caches, lengths = carry
        q, k, v = new
        (out, lse, _), *caches = cupyflash.attention_with_kvcache(q, *caches, cache_seqlens=lengths, k_new=k, v_new=v, return_lse=True)
        return (caches, lengths + 1), (out, lse)

    @jax.jit
    def decode(caches: Any, lengths: Any, q: Any, k: Any, v: Any) -> Any:
        if loop == "scan":
            (caches, _), (outs, lses) = jax.lax.scan(step, (caches, lengths), (q, k, v))
            return caches, outs, lses

        def body(n: Any, carry: Any) -> Any:
            state, outs, lses = carry
            state, (out, lse) = step(state, (q[n], k[n], v[n]))
            return state, outs.at[n].set(out), lses.at[n].set(lse)

        (caches, _), outs, lses = jax.lax.fori_loop(0, 5, body, ((caches, lengths), jnp.zeros((5, 2, 1, 4, 6)), jnp.zeros((5, 2, 4, 1))))
        return caches, outs, lses

    there = [jnp.asarray(k_cache), jnp.asarray(v_cache)]
    caches, outs, lses = decode(there, lengths, q, k, v)
    np.testing.assert_array_equal(there[0], k_cache)  # what the caller holds is as it was
    for b, used in enumerate(lengths):
        keys, values = k_cache[b].copy(), v_cache[b].copy()
        for n in range(5):
            keys[used + n], values[used + n] = k[n, b, 0], v[n, b, 0]
            seen = slice(0, used + n + 1)
            out, lse = reference.attention(q[n, b], keys[seen], values[seen], return_lse=True)
            np.testing.assert_allclose(outs[n, b], out, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(lses[n, b], lse, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(caches[0][b], keys)
        np.testing.assert_array_equal(caches[1][b], values)


def test_donated_caches_are_written_in_place(rng: np.random.Generator) -> None:
    q, k, v = normal(rng, 2, 1, 4, 8), normal(rng, 2, 1, 2, 8), normal(rng, 2, 1, 2, 8)
    caches = [jnp.zeros((2, 9, 2, 8)) + n for n in range(2)]
    before = [x.unsafe_buffer_pointer() for x in caches]
    run = jax.jit(
        lambda q, caches, n, k, v: subject.attention_with_kvcache(q, *caches, cache_seqlens=n, k_new=k, v_new=v), donate_argnums=1
    )
    out, *caches = run(q, caches, jnp.array([4, 8]), k, v)
    assert [x.unsafe_buffer_pointer() for x in caches] == before
    np.testing.assert_array_equal(caches[0][0, 4], k[0, 0])
    assert float(caches[0][0, 5, 0, 0]) == 0
    expected = reference.attention(q[:1], np.asarray(caches[0][:1, :5]), np.asarray(caches[1][:1, :5]))
    np.testing.assert_allclose(out[:1], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("appends", [False, True])
def test_everything_that_a_cache_takes(rng: np.random.Generator, appends: bool) -> None:
    """As the call on NumPy arrays, which has tests of its own."""
    given = {"q": normal(rng, 2, 3, 4, 8), "k_cache": rng.integers(-99, 99, (6, 2, 4, 8)).astype(np.int8)}
    given |= {"v_cache": given["k_cache"][::-1].copy(), "cache_seqlens": np.array([5, 2], np.int32)}
    more = {"page_table": np.array([[0, 2, 4], [1, 5, 3]], np.int32), "cache_leftpad": np.array([1, 0], np.int32)}
    more |= {"rotary_cos": normal(rng, 12, 2), "rotary_sin": normal(rng, 12, 2), "rotary_positions": np.array([4, 1], np.int32)}
    more |= {"alibi_slopes": rng.uniform(0.1, 1, 4).astype(F32), "sink": normal(rng, 4), "mask": rng.random((3, 12)) < 0.8}
    more |= {"k_descale": np.array([0.01, 0.02], F32), "v_descale": 0.01, "kv_layout": "hnd", "softcap": 3.0, "window_size": [6, 0]}
    if appends:
        more |= {"k_new": normal(rng, 2, 3, 2, 8), "v_new": normal(rng, 2, 3, 2, 8)}
    in_jax = placed(given | more)
    first = [in_jax.pop(n) for n in ("q", "k_cache", "v_cache")]
    results = subject.attention_with_kvcache(*first, **in_jax)
    written = {n: x.copy() for n, x in given.items()}
    lengths = written.pop("cache_seqlens")
    out = cupyflash.attention_with_kvcache(*written.values(), cache_seqlens=lengths, **more)
    if not appends:
        np.testing.assert_array_equal(results, out)
        return
    for got, want in zip(results, (out, written["k_cache"], written["v_cache"]), strict=True):
        np.testing.assert_array_equal(got, want)
    assert not np.array_equal(written["k_cache"], given["k_cache"])


def test_caches_under_vmap_and_without_gradients(rng: np.random.Generator) -> None:
    q, k_cache, v_cache = (jnp.asarray(normal(rng, 3, 2, n, 2, 8)) for n in (1, 6, 6))
    lengths = jnp.array([[1, 2], [3, 4], [5, 6]])

    def run(q: Any, *caches: Any, lengths: Any = None) -> Any:
        return subject.attention_with_kvcache(q, *caches, cache_seqlens=lengths)

    out = jax.vmap(lambda q, k, v, n: run(q, k, v, lengths=n))(q, k_cache, v_cache, lengths)
    for n in range(3):
        np.testing.assert_array_equal(out[n], run(q[n], k_cache[n], v_cache[n], lengths=lengths[n]))
    with pytest.raises(UnsupportedError, match="attention over a cache has no gradient; that of attention and"):
        jax.grad(lambda q: run(q, k_cache[0], v_cache[0], lengths=lengths[0]).sum())(q[0])
    scaled = jax.grad(lambda s: (s * run(q[0], k_cache[0], v_cache[0], lengths=lengths[0])).sum())(2.0)  # beside what has one
    np.testing.assert_allclose(scaled, out[0].sum(), rtol=1e-5)


# --- jax.nn's function -------------------------------------------------------------------------------------------------------------------


def test_dot_product_attention_has_the_signature_of_jax_nn() -> None:
    ours, theirs = (inspect.signature(f).parameters.values() for f in (subject.dot_product_attention, jax.nn.dot_product_attention))
    assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]


USED: dict[str, Any] = {"query_seq_lengths": np.array([9, 6], np.int32), "key_value_seq_lengths": np.array([11, 7], np.int32)}


@pytest.mark.parametrize("sk", [9, 12, 7])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"is_causal": True},
        {"is_causal": True, "local_window_size": (2, 3)},
        {"local_window_size": 4},
        {"local_window_size": (6, 5)},
        {"local_window_size": (6, 5), **USED},
        {"local_window_size": (6, 5), "mask": True, **USED},
        {"is_causal": True, "scale": 0.2, **USED},
        {"bias": True, "mask": True},
    ],
    ids=lambda given: "-".join(given) or "none",
)
def test_dot_product_attention_as_jax_nn(rng: np.random.Generator, given: dict[str, Any], sk: int) -> None:
    q, k, v = (jnp.asarray(normal(rng, 2, s, h, 8)) for s, h in ((9, 4), (sk, 2), (sk, 2)))
    arrays = {"bias": normal(rng, 1, 4, 9, sk), "mask": (rng.random((2, 1, 9, sk)) < 0.7) | (np.arange(sk) < 1)}
    given = {n: arrays.get(n, x) for n, x in given.items()}
    dout = normal(rng, 2, 9, 4, 8)

    def run(f: Callable[..., Any]) -> Any:
        def loss(q: Any, k: Any, v: Any) -> Any:
            out, residual = f(q, k, v, **given, return_residual=True)
            return (out * dout * seen[..., None]).sum(), (out, residual)

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)

    # A row that sees nothing is another one in jax.nn, which takes the mean of all values for it.
    i, j = np.arange(9)[:, None], np.arange(sk)
    visible = np.broadcast_to(given.get("mask", True), (2, 1, 9, sk)).copy()
    if given.get("is_causal"):
        visible &= j <= i
    if (window := given.get("local_window_size")) is not None:
        left, right = (window, window) if isinstance(window, int) else window
        visible &= (j >= i - left) & (j <= i + right)
    if "query_seq_lengths" in given:
        visible &= i < given["query_seq_lengths"][:, None, None, None]
        visible &= j < given["key_value_seq_lengths"][:, None, None, None]
    seen = np.moveaxis(visible.any(-1), 1, 2)
    ((_, (out, residual)), grads), ((_, (their_out, their_residual)), their_grads) = (
        run(f) for f in (subject.dot_product_attention, jax.nn.dot_product_attention)
    )
    assert residual.shape == their_residual.shape == (2, 9, 4)
    hidden = ~np.broadcast_to(seen, residual.shape)
    np.testing.assert_allclose(np.where(hidden, 0, residual), np.where(hidden, 0, their_residual), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(out, np.where(hidden[..., None], 0, their_out), rtol=1e-4, atol=1e-5)
    assert np.isneginf(np.asarray(residual)[hidden]).all()
    for got, want in zip(grads, their_grads, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)


def test_dot_product_attention_of_one_batch_and_numpy_arrays(rng: np.random.Generator) -> None:
    q, k, v = normal(rng, 3, 9, 4, 8)
    for more in ({}, {"local_window_size": 3, "query_seq_lengths": np.array([5], np.int32)}):
        out, residual = subject.dot_product_attention(q, k, v, return_residual=True, implementation="cupyflash", **more)
        their_out, their_residual = jax.nn.dot_product_attention(q, k, v, return_residual=True, **more)
        assert residual.shape == (9, 4)
        rows = slice(0, 5) if more else slice(None)
        np.testing.assert_allclose(out, their_out, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(residual[rows], their_residual[rows], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("error", "message", "given"),
    [
        (ArgumentError, "implementation='cudnn' is none of this function's, None and 'cupyflash': jax.nn", {"implementation": "cudnn"}),
        (ArgumentError, r"local_window_size=2.5 must be an int or a pair", {"local_window_size": 2.5}),
        (ShapeError, r"local_window_size=\(2, -1\) must not be below 0", {"local_window_size": (2, -1)}),
        (UnsupportedError, r"local_window_size=\(1, 4\) without is_causal, of 9 queries and 7 keys.*mask=", {"local_window_size": (1, 4)}),
        (DtypeError, r"mask is float32: it must be bool", {"mask": np.zeros((9, 7), F32)}),
        (ArgumentError, r"dot_product_attention\(\) has no argument 'dropout'", {"dropout": 0.1}),
    ],
)
def test_dot_product_attention_says_what_it_does_not_take(
    rng: np.random.Generator, error: type[Exception], message: str, given: dict[str, Any]
) -> None:
    with pytest.raises(error, match=message):
        subject.dot_product_attention(normal(rng, 9, 4, 8), normal(rng, 7, 4, 8), normal(rng, 7, 4, 8), **given)


# --- errors ------------------------------------------------------------------------------------------------------------------------------

SHAPES = {"q": (2, 9, 4, 8), "k": (2, 13, 2, 8), "v": (2, 13, 2, 8)}
ERRORS: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (ShapeError, "k has 3 heads and q has 4", {"k": jnp.ones((2, 13, 3, 8)), "v": jnp.ones((2, 13, 3, 8))}),
    (ShapeError, "v has seqlen 12 and k has 13", {"v": jnp.ones((2, 12, 2, 8))}),
    (DtypeError, "k is float16 and q is float32", {"k": jnp.ones((2, 13, 2, 8), jnp.float16)}),
    (DtypeError, "q is int32: it must be one of float16", {n: jnp.ones(shape, jnp.int32) for n, shape in SHAPES.items()}),
    (DtypeError, "seqused_k is int64: it must be int32", {"seqused_k": np.ones(2, np.int64)}),
    (DtypeError, "mask is float32: it must be bool", {"mask": jnp.ones((9, 13))}),
    (ArgumentError, r"k is a numpy.ndarray: it must be a JAX array; jax.numpy.asarray\(k\)", {"k": np.ones((2, 13, 2, 8), F32)}),
    (ArgumentError, "sink is a builtins.list: it must be a JAX array", {"sink": [0.0] * 4}),
    (ArgumentError, "causal='left' is unknown", {"causal": "left"}),
    (ArgumentError, "softcap is a", {"softcap": np.ones(3)}),
    (ArgumentError, "softmax_scale is a", {"softmax_scale": jnp.ones(())}),
    (ArgumentError, "window_size=3 is ambiguous", {"window_size": 3}),
    (ArgumentError, r"attention\(\) has no argument 'out'; JAX arrays cannot be written", {"out": jnp.ones((2, 9, 4, 8))}),
    (ArgumentError, r"attention\(\) has no argument 'stream'; calls run on the stream that XLA", {"stream": 0}),
    (ArgumentError, r"attention\(\) has no argument 'is_causal'; it is called 'causal'", {"is_causal": True}),
    (UnsupportedError, "no kernel for head_dim 300", {n: jnp.ones((*shape[:3], 300)) for n, shape in SHAPES.items()}),
]


@pytest.mark.parametrize("where", ["eager", "jit", "gradient"])
@pytest.mark.parametrize(("error", "message", "given"), ERRORS, ids=[f"{e.__name__}-{m[:40]}" for e, m, _ in ERRORS])
def test_errors_are_ours_and_come_when_the_call_is_traced(error: type[Exception], message: str, given: dict[str, Any], where: str) -> None:
    every: dict[str, Any] = {n: jnp.ones(shape) for n, shape in SHAPES.items()} | given

    def run(x: Any) -> Any:
        return call({**every, "q": every["q"] + x.astype(every["q"].dtype)}).sum()

    with pytest.raises(error, match=message) as caught:
        {"eager": lambda: call(every), "jit": lambda: jax.eval_shape(run, jnp.ones(())), "gradient": lambda: jax.grad(run)(jnp.ones(()))}[
            where
        ]()
    assert isinstance(caught.value, cupyflash.CupyflashError)
    assert "\n" not in str(caught.value)


def test_errors_under_vmap_speak_of_the_shapes_of_one_call(rng: np.random.Generator) -> None:
    given = placed(inputs(rng, batch=(3, 2)))
    for error, message, more in (
        (ShapeError, r"bias has shape \(5, 1, 1, 13\)", {"bias": jnp.ones((5, 1, 1, 13))}),
        (ArgumentError, "layout='hdsb' is unknown", {"layout": "hdsb"}),
        (ShapeError, r"alibi_slopes has shape \(7,\)", {"alibi_slopes": jnp.ones(7)}),
    ):
        with pytest.raises(error, match=message):
            jax.vmap(lambda x, more=more: call(x | more))(given)


def test_deterministic_must_be_a_bool(rng: np.random.Generator) -> None:
    given = placed(inputs(rng))
    with pytest.raises(ArgumentError, match="deterministic='yes' must be True or False"):
        jax.grad(lambda q: call(given | {"q": q}, deterministic="yes").sum())(given["q"])


def test_second_order_gradients_are_refused_by_name(rng: np.random.Generator) -> None:
    given = placed(inputs(rng))

    def loss(q: Any) -> Any:
        return (call(given | {"q": q}) ** 2).sum()

    for twice in (jax.grad(lambda q: jax.grad(loss)(q).sum()), jax.jit(jax.hessian(loss))):
        with pytest.raises(UnsupportedError, match="attention has no second-order or forward-mode gradients"):
            twice(given["q"])


def test_arrays_of_other_libraries_do_not_mix_with_tracers(rng: np.random.Generator) -> None:
    q, k, v = inputs(rng).values()
    with pytest.raises(ArgumentError, match=r"k is a numpy.ndarray: it must be a JAX array"):
        jax.jit(lambda q: cupyflash.attention(q, k, v))(q)
    with pytest.raises(ArgumentError, match=r"q is a numpy.ndarray: it must be a JAX array"):
        jax.jit(lambda k: cupyflash.attention(q, k, v))(k)


def test_what_has_no_form_for_tracers_says_so(rng: np.random.Generator) -> None:
    q, k, v = placed(inputs(rng)).values()
    out, lse, _ = cupyflash.attention(q, k, v, return_lse=True)
    with pytest.raises(UnsupportedError, match=r"outs\[0\] is a JAX tracer, and merge_states has no form for that; call it outside"):
        jax.jit(lambda x: cupyflash.merge_states([x], [lse]))(out)


# --- sizes and dispatch ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sq", "sk", "batch"), [(0, 13, 2), (9, 0, 2), (9, 13, 0), (1, 1, 1)])
def test_sizes_of_zero_and_one(rng: np.random.Generator, sq: int, sk: int, batch: int) -> None:
    given = inputs(rng, sq, sk, (batch,))
    out, lse, _ = jax.jit(lambda *a: subject.attention(*a, return_lse=True))(*placed(given).values())
    for got, want in zip((out, lse), reference.attention(*given.values(), return_lse=True), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    grads = gradients(placed(given), np.ones(out.shape, F32), None, jax.jit)
    for n, want in zip("qkv", reference.attention_backward(np.ones(out.shape), *given.values()), strict=False):
        np.testing.assert_allclose(grads[n], want, rtol=1e-5, atol=1e-6)


def test_equal_calls_are_traced_once(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    given = placed(inputs(rng, 10, 11))
    call(given, causal=True)
    monkeypatch.setattr(subject, "buffer_callback", lambda *a, **o: pytest.fail("traced again"))
    call(given, causal=True)
    call(given, causal=True, softcap=None)
    with pytest.raises(pytest.fail.Exception, match="traced again"):
        call(given, causal="top_left")


def test_true_and_one_are_not_one_call(rng: np.random.Generator) -> None:
    given = placed(inputs(rng))
    call(given, causal=True)
    with pytest.raises(ArgumentError, match="causal=1 is unknown"):
        call(given, causal=1)


def test_concrete_arrays_of_a_cpu_need_no_callback(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "buffer_callback", lambda *a, **o: pytest.fail("a callback"))
    q, k, v = placed(inputs(rng, 6, 7)).values()
    assert isinstance(cupyflash.attention(q, k, v), jax.Array)


def test_command_buffers_are_asked_for_by_the_setting(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    assert subject.command_buffers
    seen: list[Any] = []
    whole = subject.buffer_callback
    monkeypatch.setattr(subject, "buffer_callback", lambda *a, **o: (seen.append(o["command_buffer_compatible"]), whole(*a, **o))[1])
    given = placed(inputs(rng, 4, 5))
    for setting in (False, True):
        monkeypatch.setattr(subject, "command_buffers", setting)
        call(given)
    assert seen == [False, True]


class Buffer:
    """Of XLA, on the device 0 of `test_launch.Gpu`."""

    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False)}

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


SHAPE, HALF = (2, 300, 4, 64), np.dtype(np.float16)
ON_A_GPU: list[tuple[Any, tuple[str, ...], dict[str, Any], int]] = [
    (api.attention, ("q", "k", "v"), {"return_lse": True}, 2),
    (subject.backward.attention_backward, ("dout", "q", "k", "v", "out", "lse"), {"wrt": ("q", "k", "v")}, 3),
    (api.attention_with_kvcache, ("q", "k_cache", "v_cache", "cache_seqlens", "k_new", "v_new"), {}, 1),
]


@pytest.mark.parametrize(("function", "names", "given", "results"), ON_A_GPU, ids=[f.__name__ for f, *_ in ON_A_GPU])
def test_on_a_gpu_kernels_run_on_the_stream_of_xla_and_write_its_outputs(
    gpu: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    function: Any,
    names: tuple[str, ...],
    given: dict[str, Any],
    results: int,
) -> None:
    backward = subject.backward
    monkeypatch.setattr(backward, "query", lambda device_id: KNOWN["90a"])
    monkeypatch.setattr(backward, "_prepare", subject.arrays.cached_by_kinds(backward._prepare.__wrapped__))
    shapes: dict[str, Any] = {"lse": ((2, 4, 300), np.dtype(F32)), "cache_seqlens": ((2,), np.dtype(np.int32))}
    kinds = [shapes.get(name, (SHAPE, HALF)) for name in names]
    first = 6 if "dout" in names else 3

    def call(xs: list[Any]) -> None:
        function(*xs[:first], **dict(zip(names[first:], xs[first:], strict=True)), **given)

    made = subject.arrays.traced(call, kinds, 0)
    assert len(made) > results or function is api.attention  # workspaces, too
    others = [SHAPE] * 2 if "dout" in names else [(2, 4, 300)] * (results - 1)
    assert [shape for shape, _ in made[:results]] == [SHAPE, *others]
    assert not gpu.launches
    monkeypatch.setattr(subject.arrays.sys.modules["cupy"].cuda, "alloc", lambda *_: pytest.fail("memory that is not XLA's"))
    monkeypatch.setattr("cupyflash.jit._load", lambda *_: pytest.fail("a kernel that was not loaded"))
    inputs = [Buffer((n + 1) << 28) for n in range(len(names))]
    outputs = [Buffer((n + 1) << 36) for n in range(len(made))]
    subject._callback(call, kinds, made, ())(types.SimpleNamespace(stream=55), outputs, *inputs)
    assert gpu.launches
    assert {launch.stream for launch in gpu.launches} == {55}
    packed = gpu.launches[-1].packed
    addresses = dict(zip(names, inputs, strict=True))
    for name in ("q", "k", "v"):
        cached = {"k": "k_cache", "v": "v_cache"}.get(name, name) if "k_cache" in names else name
        assert packed[name] == addresses[cached].__cuda_array_interface__["data"][0]
    if "dout" not in names:
        assert packed["out"] == 1 << 36
    assert (packed["lse"] == 2 << 36) == ("return_lse" in given)


def test_a_callback_on_another_kind_of_gpu_says_so(gpu: Any) -> None:  # noqa: F811
    kinds = [(SHAPE, HALF)] * 3
    callback = subject._callback(lambda xs: api.attention(*xs), kinds, [((2, 300, 4, 32), HALF)], ())
    with pytest.raises(cupyflash.StateError, match="the call was traced for another kind of GPU than it runs on"):
        callback(types.SimpleNamespace(stream=55), [Buffer(1 << 36)], *[Buffer(1 << 28)] * 3)
    assert not gpu.launches


TWO_DEVICES = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P, NamedSharding
import cupyflash
from cupyflash import jax as subject

mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
q, k, v = jax.random.normal(jax.random.key(0), (3, 4, 9, 4, 8))
bias = jax.random.normal(jax.random.key(1), (9, 9))
shapes = []
whole = cupyflash.api.host.attention
def counted(problem, operands, *rest):
    shapes.append(operands.q.shape)
    return whole(problem, operands, *rest)
cupyflash.api.host.attention = counted

def plain(q, k, v, bias):
    return (jax.nn.dot_product_attention(q, k, v, bias[None, None]) ** 2).sum()

expected = jax.grad(plain, (0, 1, 2, 3))(q, k, v, bias)
for check in (True, False):
    def sharded(q, k, v, bias):
        shard = jax.shard_map(lambda q, k, v, b: cupyflash.attention(q, k, v, bias=b), mesh=mesh, check_vma=check,
                              in_specs=(P("x"), P("x"), P("x"), P()), out_specs=P("x"))
        return (shard(q, k, v, bias) ** 2).sum()
    shapes.clear()
    got = jax.block_until_ready(jax.jit(jax.grad(sharded, (0, 1, 2, 3)))(q, k, v, bias))
    assert shapes == [(2, 9, 4, 8)] * 2, shapes
    for a, b in zip(got, expected):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
there = [jax.device_put(x, NamedSharding(mesh, P("x"))) for x in (q, k, v)]
out = jax.jit(subject.attention)(*there)  # gathered: right, and everything on each device
np.testing.assert_allclose(out, jax.nn.dot_product_attention(q, k, v), rtol=1e-4, atol=1e-5)
for attention in (cupyflash.attention, subject.attention):
    try:
        attention(*there)
    except cupyflash.ArgumentError as e:
        assert "q is sharded over 2 devices: call cupyflash on each shard, inside jax.shard_map" in str(e), e
    else:
        raise AssertionError
print("done")
"""


def fresh(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False
    )


def test_shard_map_over_two_devices() -> None:
    done = fresh(TWO_DEVICES, XLA_FLAGS="--xla_force_host_platform_device_count=2", JAX_PLATFORMS="cpu")
    assert done.stdout == "done\n", done.stderr


@pytest.mark.parametrize("missing", ["jax", "jax.experimental.buffer_callback"])
def test_without_jax_the_import_says_what_to_install(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None\nimport cupyflash\ntry: import cupyflash.jax\n"
    done = fresh(code + "except cupyflash.SetupError as e: print(e)")
    assert done.stdout.startswith("cupyflash.jax needs JAX 0.6.1 or newer: pip install -U jax"), done.stderr


def test_examples_run() -> None:
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner()
    for name in ("attention", "attention_varlen", "attention_with_kvcache", "dot_product_attention"):
        tests = finder.find(getattr(subject, name), name, module=False)
        assert sum(len(test.examples) for test in tests) > 1
        for test in tests:
            runner.run(test)
    assert runner.summarize().failed == 0
