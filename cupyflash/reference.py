"""Attention and its gradients from the definition, in float64 NumPy: what every other implementation is measured against.

For each batch, head and query row it gathers the keys that this row sees, and works on those alone: what lies in a key that nobody may
see, NaN or inf, cannot reach a result because it is never read. It shares no line with the kernels or with the host path, since a shared
mistake would hide itself. It is slow (tens of microseconds a row) and does without blocks, online softmax or clever broadcasting.

Which keys a row sees, with a length that differs (o: seen). The diagonal of `causal`, `window_size` and ALiBi is j = i + offset; by default
it ends in the bottom right corner, offset = used_k - used_q::

    seqlen_q=2, seqlen_k=5, causal=True    seqlen_q=5, seqlen_k=2, causal=True    seqlen_q=2, seqlen_k=5, causal="top_left"
           k 0 1 2 3 4                            k 0 1                                   k 0 1 2 3 4
       q 0   o o o o .                        q 0   . .  out 0, LSE -inf              q 0   o . . . .
       q 1   o o o o o                        q 1   . .  out 0, LSE -inf              q 1   o o . . .
                                              q 2   . .  out 0, LSE -inf
                                              q 3   o .
                                              q 4   o o
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array: TypeAlias = NDArray[np.float64]

__all__ = ["Gradients", "attention", "attention_backward"]


class Gradients(NamedTuple):
    """Gradients in the shapes of their inputs; None where the option was not used."""

    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None
    dalibi_slopes: Array | None
    dsink: Array | None


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    /,
    *,
    causal: bool | str = False,
    window_size: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    sink: ArrayLike | None = None,
    seqused_q: ArrayLike | None = None,
    seqused_k: ArrayLike | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """softmax(softmax_scale * q k^T) v, row by row, in float64.

    The order of the options: `s = softmax_scale * (q . k)` -> softcap -> ALiBi -> bias -> causal, window, mask and used lengths -> sink
    -> softmax -> `@ v`. Standard attention is arXiv 1706.03762 eq. 1; soft caps are arXiv 2408.00118 section 2, ALiBi arXiv 2108.12409,
    shared key heads (GQA) arXiv 2305.13245.

    Parameters
    ----------
    q : (B, Sq, Hq, D), anything that `np.asarray` takes; like every input cast to float64.
    k, v : (B, Sk, Hkv, D) and (B, Sk, Hkv, Dv); query head h reads key head h // (Hq // Hkv).
    causal : False, True (which is "bottom_right") or "top_left": key j is seen where ``j <= i + offset``, with
        offset = used_k - used_q of that sequence, or 0 for "top_left".
    window_size : (left, right), inclusive distances from ``j = i + offset``; None or -1 is unlimited. With causal, right is at most 0.
    softmax_scale : default 1 / sqrt(D).
    softcap : c > 0 bounds scores to (-c, c) by ``s = c * tanh(s / c)``.
    bias : broadcastable to (B, Hq, Sq, Sk) in every layout; added. -inf gives its key the weight 0, but does not hide a NaN in it.
    mask : bool, broadcastable to (B, Hq, Sq, Sk) in every layout; True where a query may see a key.
    alibi_slopes : (Hq,) or (B, Hq): adds ``-slope * abs(i + offset - j)``.
    sink : (Hq,): one more key with this logit, not scaled or capped, and value zero.
    seqused_q, seqused_k : (B,), int: rows and keys in use, clamped to [0, Sq] and [0, Sk].
    layout : axis order of q, k, v and out: "bshd", "bhsd" or "sbhd". 3-D inputs, without B, are one batch.
    return_lse : also return the natural log of each row's softmax denominator, sink included.

    Returns
    -------
    out : (B, Sq, Hq, Dv) in the layout of the call, float64. Or, with return_lse, (out, lse) : lse is (B, Hq, Sq), (Hq, Sq) for 3-D
        inputs, in every layout, float64.

    A row that sees no key, or only scores of -inf, has out 0 and lse -inf; with a sink out 0 and lse = sink. Rows past seqused_q have
    out 0 and lse -inf.

    Raises
    ------
    ValueError : shapes that do not fit, an unknown layout or causal, a window distance below -1, a mask that is not bool.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import reference
    >>> q, k = np.zeros((1, 2, 1, 4)), np.zeros((1, 3, 1, 4))  # all scores equal: each row is the mean of the values it sees
    >>> v = np.array([10.0, 20.0, 60.0]).reshape(1, 3, 1, 1)
    >>> out, lse = reference.attention(q, k, v, causal=True, return_lse=True)
    >>> out[0, :, 0, 0]
    array([15., 30.])
    >>> np.exp(lse).round(12)
    array([[[2., 3.]]])
    """
    problem = _Problem(q, k, v, causal, window_size, softmax_scale, softcap, bias, mask, alibi_slopes, sink, seqused_q, seqused_k, layout)
    batch, heads, rows, _ = problem.q.shape
    out = np.zeros((batch, heads, rows, problem.v.shape[-1]))
    lse = np.full((batch, heads, rows), -np.inf)
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and inf in visible keys are results, not mistakes
        for b, h, i in problem.rows():
            row = problem.row(b, h, i)
            out[b, h, i] = row.weights @ problem.v[b, h // problem.group, row.keys]
            lse[b, h, i] = row.lse
    out = problem.to_caller(out)
    return (out, lse[0] if problem.unbatched else lse) if return_lse else out


def attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    /,
    *,
    dlse: ArrayLike | None = None,
    causal: bool | str = False,
    window_size: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    sink: ArrayLike | None = None,
    seqused_q: ArrayLike | None = None,
    seqused_k: ArrayLike | None = None,
    layout: str = "bshd",
) -> Gradients:
    """Gradients of sum(out * dout) + sum(lse * dlse), row by row, in float64.

    With p_j = exp(s_j - lse) and out = sum_j p_j v_j, a row has ds_j = p_j * (dout . v_j - dout . out + dlse); a sink is a key with v = 0
    (arXiv 2205.14135 appendix B.2, and there is one term more when the LSE itself is used).

    Parameters
    ----------
    dout : gradient of out, in its shape and layout.
    q, k, v and the options from causal to layout : as given to `attention`.
    dlse : gradient that arrives through the LSE, in the shape of lse; default 0.

    Returns
    -------
    Gradients(dq, dk, dv, dbias, dalibi_slopes, dsink) : each in the shape of its input, float64; None for options not given. dk and dv
        are summed over the query heads of a group, dbias and dalibi_slopes over the axes along which they were broadcast.

    A row with lse -inf contributes exactly 0, whatever dout and dlse hold there; what no row sees has gradients of exactly 0.

    Raises
    ------
    ValueError : as `attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import reference
    >>> q, k, v = np.zeros((1, 2, 1, 4)), np.zeros((1, 3, 1, 4)), np.zeros((1, 3, 1, 1))
    >>> grads = reference.attention_backward(np.array([4.0, 6.0]).reshape(1, 2, 1, 1), q, k, v, causal=True)
    >>> grads.dv[0, :, 0, 0]  # 4/2 + 6/3, twice, and 6/3 for the key that only the last row sees
    array([4., 4., 2.])
    >>> grads.dsink is None
    True
    """
    problem = _Problem(q, k, v, causal, window_size, softmax_scale, softcap, bias, mask, alibi_slopes, sink, seqused_q, seqused_k, layout)
    batch, heads, rows, _ = problem.q.shape
    gout = problem.to_bhsd("dout", dout)
    _expect("dout, as (B, H, S, D),", gout.shape, (batch, heads, rows, problem.v.shape[-1]))
    glse = np.zeros((batch, heads, rows)) if dlse is None else np.asarray(dlse, np.float64)
    if dlse is not None and problem.unbatched:
        glse = glse[None]
    _expect("dlse", glse.shape, (batch, heads, rows))

    dq, dk, dv = np.zeros_like(problem.q), np.zeros_like(problem.k), np.zeros_like(problem.v)
    dbias = np.zeros((batch, heads, rows, problem.k.shape[2]) if bias is not None else 0)
    dslopes, dsink = np.zeros((batch, heads)), np.zeros(heads)
    with np.errstate(invalid="ignore", over="ignore"):
        for b, h, i in problem.rows():
            row, kv = problem.row(b, h, i), h // problem.group
            if row.lse == -np.inf:
                continue
            keys, values = problem.k[b, kv, row.keys], problem.v[b, kv, row.keys]
            towards_lse = glse[b, h, i] - gout[b, h, i] @ (row.weights @ values)
            ds = row.weights * (values @ gout[b, h, i] + towards_lse)
            draw = problem.scale * ds * row.cap_slope
            dq[b, h, i] = draw @ keys
            dk[b, kv, row.keys] += np.outer(draw, problem.q[b, h, i])
            dv[b, kv, row.keys] += np.outer(row.weights, gout[b, h, i])
            dslopes[b, h] -= ds @ row.distance
            dsink[h] += row.sink_weight * towards_lse
            if bias is not None:
                dbias[b, h, i, row.keys] = ds
    return Gradients(
        problem.to_caller(dq),
        problem.to_caller(dk),
        problem.to_caller(dv),
        None if bias is None else _sum_to(dbias, np.shape(bias)),
        None if alibi_slopes is None else _sum_to(dslopes, np.shape(alibi_slopes)),
        None if sink is None else dsink,
    )


class _Row(NamedTuple):
    """One query row and the n keys it sees."""

    keys: NDArray[np.intp]  # (n,)
    distance: Array  # (n,) abs(i + offset - j)
    cap_slope: Array  # (n,) derivative of the soft cap
    weights: Array  # (n,) softmax; with sink_weight they sum to 1
    sink_weight: float
    lse: float


class _Problem:
    """The arguments of one call, checked, with arrays in (batch, head, sequence, dim) order."""

    def __init__(
        self,
        q: ArrayLike,
        k: ArrayLike,
        v: ArrayLike,
        causal: bool | str,
        window_size: tuple[int | None, int | None] | None,
        softmax_scale: float | None,
        softcap: float | None,
        bias: ArrayLike | None,
        mask: ArrayLike | None,
        alibi_slopes: ArrayLike | None,
        sink: ArrayLike | None,
        seqused_q: ArrayLike | None,
        seqused_k: ArrayLike | None,
        layout: str,
    ) -> None:
        if layout not in ("bshd", "bhsd", "sbhd"):
            raise ValueError(f'layout is {layout!r}: it must be "bshd", "bhsd" or "sbhd"')
        if causal not in (False, True, "bottom_right", "top_left"):
            raise ValueError(f'causal is {causal!r}: it must be True, False, "bottom_right" or "top_left"')
        if softcap is not None and not softcap > 0:
            raise ValueError(f"softcap is {softcap}: it must be above 0, or None")
        self.layout, self.unbatched = layout, np.ndim(q) == 3
        self.q, self.k, self.v = self.to_bhsd("q", q), self.to_bhsd("k", k), self.to_bhsd("v", v)
        (batch, heads_q, rows, dim), (_, heads_kv, keys, _) = self.q.shape, self.k.shape
        _expect("k, as (B, H, S, D),", self.k.shape, (batch, heads_kv, keys, dim))
        _expect("v, as (B, H, S, D),", self.v.shape, (batch, heads_kv, keys, self.v.shape[-1]))
        if dim == 0:
            raise ValueError("q has head_dim 0: it must be at least 1")
        if heads_q % heads_kv if heads_kv else heads_q:
            raise ValueError(f"k has {heads_kv} heads and q has {heads_q}: num_heads_q must be a multiple of num_heads_kv")
        self.group = heads_q // max(heads_kv, 1)
        self.scale = dim**-0.5 if softmax_scale is None else float(softmax_scale)
        self.softcap = softcap
        self.left, self.right = (np.inf if w is None or w == -1 else w for w in window_size or (None, None))
        if min(self.left, self.right) < 0:
            raise ValueError(f"window_size is {window_size}: a distance is 0 or more, and only -1 or None is unlimited")
        if causal:
            self.right = 0
        self.used_q, self.used_k = _lengths("seqused_q", seqused_q, batch, rows), _lengths("seqused_k", seqused_k, batch, keys)
        self.offset = np.zeros(batch, np.int64) if causal == "top_left" else self.used_k - self.used_q

        scores = (batch, heads_q, rows, keys)
        self.bias = None if bias is None else np.broadcast_to(np.asarray(bias, np.float64), scores)
        self.mask = None if mask is None else np.broadcast_to(np.asarray(mask), scores)
        if self.mask is not None and self.mask.dtype != np.bool_:
            raise ValueError(f"mask is {self.mask.dtype}: it must be bool, True where a query may see a key; for numbers use bias")
        self.sink = np.full(heads_q, -np.inf) if sink is None else np.asarray(sink, np.float64)
        _expect("sink", self.sink.shape, (heads_q,))
        slopes = np.zeros(heads_q) if alibi_slopes is None else np.asarray(alibi_slopes, np.float64)
        if slopes.shape not in ((heads_q,), (batch, heads_q)):
            raise ValueError(f"alibi_slopes has shape {slopes.shape}: it must be {(heads_q,)} or {(batch, heads_q)}")
        self.slopes = np.broadcast_to(slopes, (batch, heads_q))

    def to_bhsd(self, name: str, array: ArrayLike) -> Array:
        """The caller's array as (batch, head, sequence, dim)."""
        x = np.asarray(array, np.float64)
        if x.ndim != 4 - self.unbatched:
            raise ValueError(f"{name} has shape {x.shape}: q, k, v and dout must all have 4 dimensions, or all 3 (one batch)")
        if self.unbatched:
            x = np.expand_dims(x, self.layout.index("b"))
        return np.transpose(x, [self.layout.index(axis) for axis in "bhsd"])

    def to_caller(self, x: Array) -> Array:
        """The way back of `to_bhsd`."""
        x = np.transpose(x, ["bhsd".index(axis) for axis in self.layout])
        return np.squeeze(x, self.layout.index("b")) if self.unbatched else x

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """(b, h, i) of every row within its used length."""
        for b, used in enumerate(self.used_q.tolist()):
            for h in range(self.q.shape[1]):
                for i in range(used):
                    yield b, h, i

    def row(self, b: int, h: int, i: int) -> _Row:
        diagonal = i + int(self.offset[b])
        j = np.arange(self.used_k[b])
        seen = (diagonal - j <= self.left) & (j - diagonal <= self.right)
        if self.mask is not None:
            seen &= self.mask[b, h, i, : len(j)]
        keys = j[seen]

        scores = self.scale * (self.k[b, h // self.group, keys] @ self.q[b, h, i])
        cap_slope = np.ones_like(scores)
        if self.softcap is not None:
            tanh = np.tanh(scores / self.softcap)
            scores, cap_slope = self.softcap * tanh, 1 - tanh * tanh
        distance = np.abs(diagonal - keys).astype(np.float64)
        scores = scores - self.slopes[b, h] * distance
        if self.bias is not None:
            scores = scores + self.bias[b, h, i, keys]

        highest = np.maximum(scores.max(initial=-np.inf), self.sink[h])
        if highest == -np.inf:
            nothing = np.zeros(0)
            return _Row(keys[:0], nothing, nothing, nothing, 0.0, -np.inf)
        weights, sink_weight = np.exp(scores - highest), np.exp(self.sink[h] - highest)
        total = weights.sum() + sink_weight
        return _Row(keys, distance, cap_slope, weights / total, sink_weight / total, highest + np.log(total))


def _expect(name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if shape != wanted:
        raise ValueError(f"{name} has shape {shape}: with the other arguments it must be {wanted}")


def _lengths(name: str, used: ArrayLike | None, batch: int, allocated: int) -> NDArray[np.int64]:
    lengths = np.full(batch, allocated) if used is None else np.asarray(used)
    if lengths.shape != (batch,) or lengths.dtype.kind not in "iu":
        raise ValueError(f"{name} is {lengths.dtype} of shape {lengths.shape}: it must be integers of shape {(batch,)}")
    return lengths.astype(np.int64).clip(0, allocated)


def _sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """The transpose of `np.broadcast_to`: sums x over the axes along which `shape` was broadcast."""
    new = x.ndim - len(shape)
    axes = (*range(new), *(new + axis for axis, length in enumerate(shape) if length == 1))
    summed: Array = x.sum(axis=axes, keepdims=True)
    return summed.reshape(shape)
