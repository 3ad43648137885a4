"""Any view with a dense last axis is read in place: whatever its order, steps and direction, it computes what its copy does."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import cupyflash

STEPS = st.tuples(*[st.sampled_from([1, 2, 3, -1, -2])] * 3)
ORDERS = st.permutations([0, 1, 2])


def view(rng: np.random.Generator, shape: tuple[int, ...], order: list[int], steps: tuple[int, ...], offset: int, dtype: str) -> Any:
    """Random values of a shape (B, S, H, D), lying in NaN-filled memory in this order of axes, every step-th of it, D dense."""
    room = [n * abs(step) for n, step in zip(shape, steps, strict=False)]
    memory = np.full([*(room[a] for a in order), shape[3] + offset], np.nan, dtype)
    x = memory.transpose(*np.argsort(order), 3)[(*tuple(slice(None, None, step) for step in steps), slice(offset, None))]
    x[...] = rng.standard_normal(shape)
    assert x.shape == shape
    return x


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    sizes=st.tuples(
        st.integers(1, 3), st.integers(1, 20), st.integers(1, 40), st.integers(1, 3), st.sampled_from([1, 2]), st.integers(1, 40)
    ),
    orders=st.tuples(ORDERS, ORDERS, ORDERS, ORDERS),
    steps=st.tuples(STEPS, STEPS, STEPS),
    offset=st.integers(0, 3),
    dtype=st.sampled_from(["float16", "float32", "float64"]),
    causal=st.booleans(),
)
def test_a_view_computes_what_its_copy_does(sizes: Any, orders: Any, steps: Any, offset: int, dtype: str, causal: bool) -> None:
    batch, sq, sk, heads, group, d = sizes
    rng = np.random.default_rng(0)
    shapes = ((batch, sq, heads * group, d), (batch, sk, heads, d), (batch, sk, heads, d))
    q, k, v = (view(rng, shape, o, s, offset, dtype) for shape, o, s in zip(shapes, orders, steps, strict=False))
    out = view(rng, q.shape, orders[3], (1, 2, 1), offset, dtype)
    expected = cupyflash.attention(q.copy(), k.copy(), v.copy(), causal=causal)
    assert cupyflash.attention(q, k, v, causal=causal, out=out) is out
    np.testing.assert_allclose(out, expected, rtol={"float16": 1e-3, "float32": 1e-5, "float64": 1e-13}[dtype], atol=1e-6)
