"""The one comparison that all tests use: a result against float64, with a limit that the tested dtype sets itself.

A result passes where its largest error is at most twice that of the plain three-step formula computed in the same dtype (the rule of
FlashAttention's own tests), and NaN, inf and -inf sit in the same places (FlashMLA's). No tolerance to tune: what cannot be computed
better in float16 is not asked of float16. A fixed bound caps the limit, so that a poor formula cannot excuse a poor result.

Nothing here imports the library under test, and `standard_attention` masks by grids where the library's reference loops over rows.
"""

from __future__ import annotations

from typing import Any, Literal

import ml_dtypes
import numpy as np

Kind = Literal["out", "lse", "gradient"]

# Largest difference from float64 that any result may have, absolute and relative at once: |error| <= bound * (1 + |expected|).
BOUND = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 2e-5, "float64": 1e-12}

# The formula is sometimes better than it deserves: exact with one key, lucky in few rows. A result may always be off by half an ulp of
# `dtype` at the largest value, which is one rounding, and by 16 eps of the arithmetic (float32; float64 for float64): scores of about 16,
# rounded, move their weights by that much. With 2 eps 4 of 3000 random float32 and float64 calls failed on nothing but luck.
FLOOR_EPS = 16


def judge(actual: Any, expected: Any, standard: Any, *, dtype: Any, name: str, kind: Kind = "out", exact_weights: bool = False) -> None:
    """Raise AssertionError unless `actual` is as close to `expected` as attention in `dtype` can be.

    actual, expected, standard: one shape. expected is float64 attention on the inputs as rounded to dtype; standard is the same
    attention from `standard_attention(..., dtype=dtype)`. Where that overflows, only the fixed bound counts.
    kind: an "out" row (last axis) that is expected to be all zero must be exactly zero: it saw no key. An "lse" is float32 for inputs
    of 16 bits. A "gradient" has twice the fixed bound.
    name: what is tested, such as the variant's name; it begins the message.
    exact_weights: the case gives the formula weights of exactly 0 and 1, which a kernel may have scaled by less than a power of two before
        it rounds them to 16 bits: half an ulp more.
    """
    dtype = np.dtype(dtype)
    got, want, plain = (np.asarray(x).astype(np.float64) for x in (actual, expected, standard))
    assert got.shape == want.shape == plain.shape, f"{name}: {kind} has shape {got.shape}, expected {want.shape}, standard {plain.shape}"
    same = (np.isnan(got) & np.isnan(want)) | (got == want)
    finite = np.isfinite(want)
    with np.errstate(invalid="ignore"):
        error = np.abs(got - want)
        standard_error = float(np.max(np.abs(plain - want), where=finite, initial=0.0))
    if not np.isfinite(standard_error):
        standard_error = np.inf

    size = np.abs(np.where(finite, want, 0))
    arithmetic = FLOOR_EPS * float(np.finfo(np.float64 if dtype == np.float64 else np.float32).eps)
    if kind == "lse":
        floor = arithmetic * (1 + size.max(initial=0))  # an LSE near 0 is a maximum and a logarithm that cancel
        cap = BOUND["float64"] * (1 + size) if dtype == np.float64 else 1e-4 + 2e-6 * size
    else:
        roundings = 2 if exact_weights else 1
        floor = (arithmetic + roundings * float(ml_dtypes.finfo(dtype).eps) / 2) * size.max(initial=0)
        cap = BOUND[dtype.name] * (1 + size) * (2 if kind == "gradient" else 1)
    limit = np.minimum(2 * standard_error + floor, cap)
    if kind == "out":
        limit = np.where((want == 0).all(axis=-1, keepdims=True), 0, limit)

    wrong = ~same & ~(finite & (error <= limit))  # a NaN in `got` has error NaN, which is not <= anything
    if wrong.any():
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{name}: {kind}{list(where)} is {got[where]!r}, expected {want[where]!r}: "
            f"error {error[where]:.3g}, limit {limit[where]:.3g} ({dtype.name} formula {standard_error:.3g}); "
            f"{np.count_nonzero(wrong)} of {wrong.size} wrong"
        )


def standard_attention(
    q: Any,
    k: Any,
    v: Any,
    /,
    *,
    dtype: Any,
    causal: bool | str = False,
    window_size: Any = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    sink: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    layout: str = "bshd",
) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of S = q k^T, P = softmax(S), out = P v, with S and P stored in `dtype` after every step as unfused operations would.

    Each step is float32 arithmetic on values of `dtype` (float64 for float64), which is what 16-bit hardware does. Arguments and shapes
    are those of the library's `attention`. Give it clean inputs: a NaN in a hidden key makes it NaN, and then only `BOUND` judges.
    """
    options = (causal, window_size, softmax_scale, softcap, bias, mask, alibi_slopes, sink, seqused_q, seqused_k, layout)
    grid = _Grid(q, k, v, np.dtype(dtype), *options)
    return grid.to_caller(grid.out), grid.lse[0] if grid.unbatched else grid.lse


def standard_gradients(dout: Any, q: Any, k: Any, v: Any, /, *, dtype: Any, dlse: Any = None, **options: Any) -> dict[str, np.ndarray]:
    """The gradients of all of q, k, v, bias, alibi_slopes and sink that are given, by the name of each: unfused, as `standard_attention`.

    dP = dout v^T, dS = P * (dP - rowsum(dout * out) + dlse), dv = P^T dout, dq = scale dS k, dk = scale dS^T q, each stored in `dtype`;
    sums over the query heads of a group, and over the axes along which something was broadcast, are float32 (float64 for float64).
    """
    names = ("causal", "window_size", "softmax_scale", "softcap", "bias", "mask", "alibi_slopes", "sink", "seqused_q", "seqused_k")
    grid = _Grid(q, k, v, np.dtype(dtype), *(options.get(name) for name in names), options.get("layout", "bshd"))
    stored, P = grid.stored, grid.P
    B, Hq, Sq, Sk = P.shape
    with np.errstate(all="ignore"):
        dO = grid.as_bhsd(dout)
        delta = (dO * grid.out).sum(axis=-1, keepdims=True)
        if dlse is not None:
            delta = delta - np.asarray(dlse).reshape(B, Hq, Sq, 1).astype(grid.work)
        dS = np.where(P > 0, stored(P * (stored(grid.product(dO, grid.V.swapaxes(-1, -2))) - delta)), grid.work(0))
        raw = stored(dS * grid.cap_slope)
        dQ = stored(grid.scale * grid.product(raw, grid.K))
        dK, dV = stored(grid.scale * (raw.swapaxes(-1, -2) @ grid.Q)), stored(P.swapaxes(-1, -2) @ dO)
    Hkv = Hq // grid.group
    dK, dV = (x.reshape(B, Hkv, grid.group, Sk, x.shape[-1]).sum(axis=2) for x in (dK, dV))
    found = {name: grid.to_caller(x) for name, x in zip("qkv", (dQ, dK, dV), strict=True)}
    if (bias := options.get("bias")) is not None:
        shape = (1,) * (4 - np.ndim(bias)) + np.shape(bias)
        found["bias"] = dS.sum(axis=tuple(a for a in range(4) if shape[a] == 1), keepdims=True).reshape(np.shape(bias))
    if (slopes := options.get("alibi_slopes")) is not None:
        by_head = -(dS * np.abs(grid.beyond)).sum(axis=(2, 3))
        found["alibi_slopes"] = by_head.sum(axis=0) if np.ndim(slopes) == 1 else by_head
    if options.get("sink") is not None:
        found["sink"] = -np.where(grid.sink_weight > 0, grid.sink_weight * delta, 0).sum(axis=(0, 2, 3))
    return found


class _Grid:
    """Every score of one attention at once, (B, Hq, Sq, Sk), and what follows from them, in `work` arithmetic on values of `dtype`."""

    def __init__(
        self,
        q: Any,
        k: Any,
        v: Any,
        dtype: Any,
        causal: Any,
        window_size: Any,
        softmax_scale: Any,
        softcap: Any,
        bias: Any,
        mask: Any,
        alibi_slopes: Any,
        sink: Any,
        seqused_q: Any,
        seqused_k: Any,
        layout: str,
    ) -> None:
        self.dtype, self.layout, self.unbatched = dtype, layout, np.ndim(q) == 3
        self.work = work = np.float64 if dtype == np.float64 else np.float32
        stored = self.stored
        Q, K, V = (self.as_bhsd(x) for x in (q, k, v))
        (B, Hq, Sq, D), (Hkv, Sk) = Q.shape, K.shape[1:3]
        self.group = Hq // Hkv if Hkv else 1
        self.scale = work(D**-0.5 if softmax_scale is None else softmax_scale)

        used_q = np.clip(np.full(B, Sq) if seqused_q is None else np.asarray(seqused_q), 0, Sq).astype(int).reshape(B, 1, 1, 1)
        used_k = np.clip(np.full(B, Sk) if seqused_k is None else np.asarray(seqused_k), 0, Sk).astype(int).reshape(B, 1, 1, 1)
        i, j = np.arange(Sq)[:, None], np.arange(Sk)
        beyond = j - i - (0 if causal == "top_left" else used_k - used_q)  # how far right of the diagonal; (B, 1, Sq, Sk)
        left, right = (None if w == -1 else w for w in (window_size or (None, None)))
        visible = (i < used_q) & (j < used_k)
        if causal:
            visible = visible & (beyond <= 0)
        if left is not None:
            visible = visible & (beyond >= -left)
        if right is not None:
            visible = visible & (beyond <= right)
        if mask is not None:
            visible = visible & np.asarray(mask)

        with np.errstate(all="ignore"):
            S = stored(self.scale * self.product(Q, K.swapaxes(-1, -2)))
            self.cap_slope = np.ones((), work)
            if softcap is not None:
                tanh = np.tanh(S / work(softcap))
                S, self.cap_slope = stored(work(softcap) * tanh), 1 - tanh * tanh
            if alibi_slopes is not None:
                S = stored(S - np.asarray(alibi_slopes).astype(work).reshape(-1, Hq, 1, 1) * np.abs(beyond).astype(work))
            if bias is not None:
                S = stored(S + np.asarray(bias).astype(work))
            S = np.where(visible, S, work(-np.inf))
            extra = np.full(Hq, -np.inf) if sink is None else np.asarray(sink).astype(np.float64)
            last = np.where(i < used_q, extra.reshape(Hq, 1, 1), -np.inf).astype(work)  # the sink's column, (B, Hq, Sq, 1)
            top = np.maximum(S.max(axis=-1, keepdims=True, initial=-np.inf), last)
            P = np.exp(S - np.where(top == -np.inf, 0, top))
            sink_weight = np.exp(last - np.where(top == -np.inf, 0, top))
            total = P.sum(axis=-1, keepdims=True) + sink_weight
            self.P = stored(P / np.where(total == 0, 1, total))
            self.sink_weight = sink_weight / np.where(total == 0, 1, total)
            self.out = stored(self.product(self.P, V))
            self.lse = (top + np.log(total))[..., 0]
        self.Q, self.K, self.V, self.beyond = Q, K, V, beyond

    def product(self, rows: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Of each query head's matrix and its key head's, which is not repeated: 128 heads of 9000 keys would be 5 GB."""
        B, Hq, Sq, n = rows.shape
        return (rows.reshape(B, keys.shape[1], self.group * Sq, n) @ keys).reshape(B, Hq, Sq, keys.shape[-1])

    def stored(self, x: np.ndarray) -> np.ndarray:
        return x.astype(self.dtype).astype(self.work)

    def as_bhsd(self, x: Any) -> np.ndarray:
        x = self.stored(np.asarray(x))
        return np.einsum(f"{self.layout}->bhsd", np.expand_dims(x, self.layout.index("b")) if self.unbatched else x)

    def to_caller(self, x: np.ndarray) -> np.ndarray:
        x = np.einsum(f"bhsd->{self.layout}", x)
        return x.squeeze(self.layout.index("b")) if self.unbatched else x
