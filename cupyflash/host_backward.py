"""Gradients of attention for arrays in host memory: FlashAttention-2's backward (arXiv 2307.08691, algorithm 2) on NumPy and its BLAS.

No score is kept between forward and backward: a tile of P is computed again as exp(S - LSE), so extra memory does not grow with Sq x Sk.
With delta_i = dO_i . O_i - dLSE_i, which holds all that a row needs to know of its other keys::

    P = exp(S - LSE)    dV += P^T dO    dP = dO V^T    dS = P * (dP - delta)    dQ += scale dS K    dK += scale dS^T Q

A block of keys at a time, of packed sequences one of each, tiles of query rows run on threads. Each tile owns its rows of dQ for as long
as the block lasts; its parts of dK and dV are added, in the order of the tiles, by the thread that called. So no sum depends on which
thread is faster, and results are equal bit by bit in every run, on any number of cores.

A place that a row does not see has P = dS = 0, whatever lies there: products take care of NaN as `host.weigh` does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from cupyflash import host
from cupyflash.host import Array, Batch, Tile
from cupyflash.problem import AttentionProblem, BackwardOperands, BackwardProblem, Operands

# Scores in one tile, and keys in it at most; a tile of P and one of dP live at a time. Measured in bench/NOTES.md.
_TILE = 1 << 17
_BLOCK_N = 256


class _Rows(NamedTuple):
    """What is known of each query row before its keys are visited: (B, Hq, Sq) each."""

    lse: Array  # +inf for a row that sees no key, or is past its used length: P is exactly 0 then
    delta: Array  # 0 for such a row
    empty: Array  # which these are


class _Part(NamedTuple):
    """What a tile adds to gradients that others add to as well; None where not asked for."""

    dk: Array | None  # (batch, kv_heads, keys, D)
    dv: Array | None
    dbias: Array | None  # (batch, heads, rows, keys), 1 where it is summed
    dalibi_slopes: Array | None  # (batch, heads)


def attention_backward(problem: BackwardProblem, a: Operands, g: BackwardOperands) -> None:
    """Fill the gradients of `g` that are not None; every operand is a NumPy array in the axis order of Operands and BackwardOperands."""
    p = problem.forward
    batches = host.batches(p, a)
    with np.errstate(all="ignore"):  # as in `host.attention`
        rows = _rows(p, a, g, batches)
        if g.dsink is not None:
            weight = np.exp(host.widen(a.sink, p.sink).astype(rows.lse.dtype)[:, None] - rows.lse)
            host.store(g.dsink, -np.einsum("bhs,bhs->h", weight, rows.delta, dtype=np.float64), p.sink or "")
        sums = g._replace(
            dq=_accumulator(g.dq, p.dtype, rows),
            dbias=_accumulator(g.dbias, p.bias, rows),
            dalibi_slopes=None if g.dalibi_slopes is None else np.zeros((p.batch, p.num_heads_q)),
        )
        for result in (g.dk, g.dv):
            if p.packed and result is not None:  # what belongs to no sequence
                result[...] = 0

        def compute(job: _Job) -> _Part:
            with np.errstate(all="ignore"):
                return _one_tile(job)

        works = [_work(batch, sums, rows) for batch in batches]
        with host.workers(sum(work.geometry.num_tiles for work in works), batches) as run:
            for start in range(0, max((batch.p.seqlen_k for batch in batches), default=0), _BLOCK_N):
                works = [work for work in works if start < work.batch.p.seqlen_k]
                jobs = [list(_jobs(work, start)) for work in works]
                parts = run(compute, itertools.chain(*jobs))
                for work, theirs in zip(works, jobs, strict=True):
                    _add_up(work, start, zip(theirs, parts, strict=False))
        for result, total, dtype in ((g.dq, sums.dq, p.dtype), (g.dbias, sums.dbias, p.bias)):
            if result is not None and result is not total:
                host.store(result, total, dtype or "")
        if g.dalibi_slopes is not None:
            slopes = sums.dalibi_slopes
            g.dalibi_slopes[...] = slopes.sum(axis=0, keepdims=True) if len(g.dalibi_slopes) == 1 else slopes


def _rows(p: AttentionProblem, a: Operands, g: BackwardOperands, batches: list[Batch]) -> _Rows:
    lse = np.full(g.lse.shape, -np.inf, g.lse.dtype)
    for batch in batches:
        theirs, given = batch.heads_of(lse), batch.heads_of(g.lse)
        for b, used in enumerate(batch.used_q):
            theirs[b, :, :used] = given[b, :, :used]
    empty = lse == -np.inf
    delta = np.empty_like(lse)
    for m in host.blocks(p.seqlen_q, host.fit(p.seqlen_q, _TILE // max(len(lse) * p.num_heads_q * p.head_dim_v, 1))):
        dO, O = (host.widen(x[:, m], p.out_dtype).astype(lse.dtype, copy=False) for x in (g.dout, a.out))  # noqa: E741
        delta[:, :, m] = np.einsum("bshd,bshd->bhs", dO, O)
    if g.dlse is not None:
        delta -= g.dlse
    delta[empty] = 0
    lse[empty] = np.inf
    return _Rows(lse, delta, empty)


def _accumulator(result: Array | None, dtype: str | None, rows: _Rows) -> Any:
    """Where a gradient is summed, zeroed: itself, or for one of a narrower dtype an array of the dtype of the arithmetic."""
    if result is None:
        return None
    if dtype != rows.lse.dtype.name:
        return np.zeros(result.shape, rows.lse.dtype)
    result[...] = 0
    return result


def _add(total: Any, place: tuple[slice, ...], part: Array | None) -> None:
    """Add a tile's part where it belongs; an axis that is summed has size 1."""
    if part is not None:
        total[tuple(slice(1) if size == 1 else where for where, size in zip(place, total.shape, strict=False))] += part


class _Geometry(NamedTuple):
    """How many batches, kv heads and query rows a tile has at most."""

    batches: int
    heads: int
    block_m: int
    num_tiles: int  # of a block of keys


def _geometry(batch: Batch) -> _Geometry:
    p = batch.p
    group = max(p.num_heads_q // max(p.num_heads_kv, 1), 1)
    block_n = host.fit(p.seqlen_k, _BLOCK_N)
    block_m = host.fit(p.seqlen_q, _TILE // (block_n * group))
    heads = host.fit(p.num_heads_kv, _TILE // (block_n * block_m * group))
    batches = 1 if batch.ragged else host.fit(p.batch, _TILE // (block_n * block_m * group * heads))
    return _Geometry(batches, heads, block_m, -(-p.batch // batches) * -(-p.num_heads_kv // heads) * -(-p.seqlen_q // block_m))


class _Work(NamedTuple):
    """A batch, and what is theirs of the arrays of the backward, as views."""

    batch: Batch
    g: BackwardOperands  # dq, dbias and dalibi_slopes are those that are added up
    rows: _Rows
    geometry: _Geometry


def _work(batch: Batch, g: BackwardOperands, rows: _Rows) -> _Work:
    theirs = g._replace(
        dout=batch.rows_of(g.dout),
        dq=batch.rows_of(g.dq),
        dk=batch.keys_of(g.dk),
        dv=batch.keys_of(g.dv),
        dalibi_slopes=batch.entries_of(g.dalibi_slopes),
    )
    return _Work(batch, theirs, _Rows(*map(batch.heads_of, rows)), _geometry(batch))


class _Job(NamedTuple):
    work: _Work
    tile: Tile
    keys: slice
    offset: int  # of the diagonal: it is j = i + offset

    @property
    def num_scores(self) -> int:
        return host.num_scores(self.work.batch.p, self.tile, self.keys.stop - self.keys.start)


def _jobs(work: _Work, start: int) -> Iterator[_Job]:
    """The tiles that a block of keys has, each with its keys: used ones, and rows that see one of them."""
    batch, geometry = work.batch, work.geometry
    p, used_q, used_k = batch.p, batch.used_q, batch.used_k
    for b in host.blocks(p.batch, geometry.batches):
        keys = slice(start, min(start + _BLOCK_N, used_k[b.start]))
        if keys.start >= keys.stop:
            continue
        offset = 0 if p.top_left else used_k[b.start] - used_q[b.start]
        first, last = _visible_rows(p, keys, offset, used_q[b.start])
        for h in host.blocks(p.num_heads_kv, geometry.heads):
            for row in range(first, last, geometry.block_m):
                yield _Job(work, Tile(b, h, slice(row, min(row + geometry.block_m, last))), keys, offset)


def _add_up(work: _Work, start: int, parts: Iterable[tuple[_Job, _Part]]) -> None:
    """Add the parts of the tiles of a block of keys in their order, and store the dk and dv that are complete then."""
    p, g = work.batch.p, work.g
    n = slice(start, min(start + _BLOCK_N, p.seqlen_k))
    dk, dv = (np.zeros((p.batch, p.num_heads_kv, n.stop - n.start, dim), work.rows.lse.dtype) for dim in (p.head_dim, p.head_dim_v))
    for (_, (b, h, m), keys, _), part in parts:
        heads, inside = _query_heads(p, h), slice(keys.stop - keys.start)
        _add(dk, (b, h, inside), part.dk)
        _add(dv, (b, h, inside), part.dv)
        _add(g.dbias, (b, heads, m, keys), part.dbias)
        _add(g.dalibi_slopes, (b, heads), part.dalibi_slopes)
    for result, total in ((g.dk, dk), (g.dv, dv)):
        if result is not None:
            host.store(result[:, n], total.transpose(0, 2, 1, 3), p.dtype)


def _visible_rows(p: AttentionProblem, n: slice, offset: int, used_q: int) -> tuple[int, int]:
    """The range of query rows that may see some key of the block; the counterpart of `host.visible_keys`."""
    first = 0 if p.window_right is None else max(n.start - offset - p.window_right, 0)
    last = used_q if p.window_left is None else min(n.stop - offset + p.window_left, used_q)
    return first, last


def _query_heads(p: AttentionProblem, h: slice) -> slice:
    group = p.num_heads_q // p.num_heads_kv
    return slice(h.start * group, h.stop * group)


def _one_tile(job: _Job) -> _Part:
    (batch, g, rows, _), tile, n, offset = job
    p, a = batch.p, batch.a
    b, h, m = tile
    heads = _query_heads(p, h)
    group = p.num_heads_q // p.num_heads_kv
    scale = host.real(p, p.softmax_scale)
    rQ = host.as_rows(host.widen(a.q[b, m, heads], p.dtype) * scale, group)  # (batch, kv_heads, group x rows, D)
    rdO = host.as_rows(host.widen(g.dout[b, m, heads], p.out_dtype).astype(rQ.dtype, copy=False), group)
    rK = host.widen(a.k[b, n, h], p.dtype).transpose(0, 2, 1, 3)  # (batch, kv_heads, keys, D)
    rV = host.widen(a.v[b, n, h], p.dtype).transpose(0, 2, 1, 3)
    lse, delta, empty = (x[b, heads, m].reshape(rQ.shape[:3]) for x in rows)

    rS = np.matmul(rQ, rK.swapaxes(-1, -2))
    grid = (*rS.shape[:2], group, m.stop - m.start, n.stop - n.start)
    cap_slope = None
    if p.softcap is not None:
        host.softcap_step(p, rS)
        cap_slope = 1 - np.square(rS / host.real(p, p.softcap))
    seen = host.score_step(p, a, rS.reshape(grid), tile, heads, n, offset)
    hidden = None if seen is None else ~seen.reshape(rS.shape)
    if empty.any():
        hidden = empty[..., None] | (False if hidden is None else hidden)
        hidden = np.broadcast_to(hidden, rS.shape)
    visible = None if hidden is None else ~hidden
    visible_t = None if visible is None else visible.swapaxes(-1, -2)

    rS -= lse[..., None]
    rP = np.exp(rS, out=rS)
    if hidden is not None:
        np.copyto(rP, 0, where=hidden)
        if cap_slope is not None:
            np.copyto(cap_slope, 0, where=hidden)
    dv = host.weigh(rP.swapaxes(-1, -2), rdO, visible_t) if g.dv is not None else None
    if g.dq is g.dk is g.dbias is g.dalibi_slopes is None:
        return _Part(None, dv, None, None)

    rdS = np.matmul(rdO, rV.swapaxes(-1, -2))
    rdS -= delta[..., None]
    rdS *= rP
    if hidden is not None:
        np.copyto(rdS, 0, where=hidden)
    by_head = rdS.reshape(grid[0], grid[1] * group, *grid[3:])  # (batch, heads, rows, keys)
    dbias = dslopes = None
    if g.dbias is not None:
        dbias = by_head.sum(axis=tuple(axis for axis in range(4) if g.dbias.shape[axis] == 1), keepdims=True)
    if g.dalibi_slopes is not None:
        distance = np.abs(np.arange(m.start, m.stop)[:, None] + offset - np.arange(n.start, n.stop))
        dslopes = -np.einsum("bhij,ij->bh", by_head, distance, dtype=np.float64)
    if cap_slope is not None:
        rdS *= cap_slope
    if g.dq is not None:
        g.dq[b, m, heads] += host.from_rows(host.weigh(rdS, rK, visible) * scale, group)
    dk = host.weigh(rdS.swapaxes(-1, -2), rQ, visible_t) if g.dk is not None else None
    return _Part(dk, dv, dbias, dslopes)
