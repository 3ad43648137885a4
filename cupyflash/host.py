"""Attention for arrays in host memory: FlashAttention's tiled online softmax (arXiv 2307.08691, algorithm 1) on NumPy and its BLAS.

One tile of scores exists at a time in each thread, so extra memory does not grow with Sq x Sk, and a tile of 512 kB stays in a core's
L2 where the three-step formula streams its whole score matrix through memory four times. Arithmetic is float32, float64 for float64
inputs.

Threads take tiles, each with a BLAS of one thread: NumPy's own functions use one core only, and a BLAS that splits products of this size
over its threads waits for the slowest of them 4000 times a call (5 to 18 times slower on a machine with other work). bench/NOTES.md has the
numbers. Every element of the result is computed by one thread.

A tile is `batch x kv heads x (group x query rows) x keys`: the query heads of a group share their keys, so they are rows of one matrix
product, and short sequences put many heads into one tile, so NumPy's cost of about 1 us a call is spread.

bfloat16 arrays arrive as their bits in uint16: widening is a shift, and narrowing rounds to nearest even, with no other package.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from cupyflash.problem import AttentionProblem, Operands

Array = np.ndarray[Any, Any]
T = TypeVar("T")
R = TypeVar("R")
_log = logging.getLogger("cupyflash")

# Scores in one tile, and keys in it at most; measured in bench/NOTES.md. 16 threads of 512 kB tiles stay far below 64 MB.
_TILE = 1 << 17
_BLOCK_N = 256
_MAX_THREADS = 16
_SERIAL = 1 << 20  # below so many scores in all a call takes 2 ms or less, and starting threads is not worth it


def attention(problem: AttentionProblem, a: Operands, lse: Array | None) -> None:
    """Fill `a.out` (B, Sq, Hq, Dv) and, unless None, `lse` (B, Hq, Sq); every operand is a NumPy array in the axis order of Operands."""
    p = problem
    used_q = used_lengths("seqused_q", a.seqused_q, p.seqlen_q, p.batch)
    used_k = used_lengths("seqused_k", a.seqused_k, p.seqlen_k, p.batch)
    tiles = list(_query_tiles(p, ragged=a.seqused_q is not None or a.seqused_k is not None))

    def compute(tile: Tile) -> None:
        with np.errstate(all="ignore"):  # inf and NaN of the inputs travel as IEEE says; a warning about them would name no argument
            _one_tile(p, a, lse, tile, used_q[tile.b.start], used_k[tile.b.start])

    with workers(len(tiles), scores=p.batch * p.num_heads_q * p.seqlen_q * p.seqlen_k) as run:
        for _ in run(compute, tiles):  # the loop raises what a tile raised
            pass


@contextlib.contextmanager
def workers(tiles: int, scores: int) -> Iterator[Callable[[Callable[[T], R], Iterable[T]], Iterator[R]]]:
    """A `map` over tiles whose results come in order: on threads, each with a BLAS of one thread, where a call is long enough for them."""
    threads = min(tiles, _num_cpus(), _MAX_THREADS)
    if threads < 2 or scores < _SERIAL:
        yield map
        return

    def run(compute: Callable[[T], R], tiles: Iterable[T]) -> Iterator[R]:
        def compute_alone(tile: T) -> R:
            with _one_blas_thread():  # an OpenMP BLAS has a number of threads for each of ours
                return compute(tile)

        return pool.map(compute_alone, tiles)

    from concurrent.futures import ThreadPoolExecutor  # 2 ms of an import that calls on a GPU do not need

    with _all_cores, _one_blas_thread(), ThreadPoolExecutor(threads, thread_name_prefix="cupyflash") as pool:
        yield run


# Most BLAS have one number of threads for the process, so calls that change it take turns; each keeps all cores busy anyway.
_all_cores = threading.Lock()


def _num_cpus() -> int:
    """The cores that this process may use, which a container or taskset may have made fewer than the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _one_blas_thread() -> Any:
    """A context in which BLAS uses one thread."""
    return _blas().limit(limits=1, user_api="blas")


@functools.cache
def _blas() -> Any:
    from threadpoolctl import ThreadpoolController  # with its search for libraries 8 ms: not before the first long call

    return ThreadpoolController()


class Tile(NamedTuple):
    b: slice  # batch
    h: slice  # key/value heads
    m: slice  # query rows


def _query_tiles(p: AttentionProblem, ragged: bool) -> Iterator[Tile]:
    group = p.num_heads_q // max(p.num_heads_kv, 1)
    block_n = min(max(p.seqlen_k, 1), _BLOCK_N)
    block_m = fit(p.seqlen_q, _TILE // (block_n * max(group, 1)))
    heads = fit(p.num_heads_kv, _TILE // (block_n * block_m * max(group, 1)))
    batches = 1 if ragged else fit(p.batch, _TILE // (block_n * block_m * max(group, 1) * heads))
    for b in blocks(p.batch, batches):
        for h in blocks(p.num_heads_kv, heads):
            for m in reversed(list(blocks(p.seqlen_q, block_m))):  # under a causal mask the last rows take longest: start them first
                yield Tile(b, h, m)


def fit(n: int, limit: int) -> int:
    return max(1, min(n, limit))


def blocks(n: int, block: int) -> Iterator[slice]:
    return (slice(start, min(start + block, n)) for start in range(0, n, block))


def _one_tile(p: AttentionProblem, a: Operands, lse: Array | None, tile: Tile, used_q: int, used_k: int) -> None:
    b, h, m = tile
    group = p.num_heads_q // p.num_heads_kv
    heads = slice(h.start * group, h.stop * group)
    batch, kv_heads, rows = b.stop - b.start, h.stop - h.start, m.stop - m.start
    grid = (batch, kv_heads, group, rows)  # one softmax each
    flat = (batch, kv_heads, group * rows)

    rQ = as_rows(widen(a.q[b, m, heads], p.dtype) * real(p, p.softmax_scale), group)
    rO = np.zeros((*flat, p.head_dim_v), rQ.dtype)
    row_max = np.full(flat, -np.inf, rQ.dtype)
    row_sum = np.zeros(flat, rQ.dtype)
    if a.sink is not None:  # one more key, of value zero: the state after having seen it alone
        sink = widen(a.sink[heads], p.sink).astype(rQ.dtype).reshape(1, kv_heads, group, 1)
        row_max[:] = np.broadcast_to(sink, grid).reshape(flat)
        row_sum[:] = row_max > -np.inf

    offset = 0 if p.top_left else used_k - used_q
    first, last = visible_keys(p, m, offset, used_k)
    for n in (slice(start, min(start + _BLOCK_N, last)) for start in range(first, last, _BLOCK_N)):
        rK = widen(a.k[b, n, h], p.dtype).transpose(0, 2, 3, 1)  # (batch, kv_heads, D, keys)
        rV = widen(a.v[b, n, h], p.dtype).transpose(0, 2, 1, 3)
        rS = np.matmul(rQ, rK)
        if p.softcap is not None:
            softcap_step(p, rS)
        visible = score_step(p, a, rS.reshape(*grid, n.stop - n.start), tile, heads, n, offset)

        new_max = np.maximum(row_max, rS.max(axis=-1))
        reference = np.where(new_max == -np.inf, rQ.dtype.type(0), new_max)  # no key yet: exp(-inf - 0) = 0, not exp(-inf + inf)
        rS -= reference[..., None]
        rP = np.exp(rS, out=rS)
        rescale = np.exp(row_max - reference)
        row_sum = row_sum * rescale + rP.sum(axis=-1)
        rO *= rescale[..., None]
        rO += weigh(rP, rV, visible)
        row_max = new_max

    rO /= np.where(row_sum == 0, rQ.dtype.type(1), row_sum)[..., None]
    row_lse = row_max + np.log(row_sum)  # a row without a key: -inf + log(0) = -inf, and rO is still zero
    out, row_lse = from_rows(rO, group), row_lse.reshape(batch, kv_heads * group, rows)
    unused = max(used_q - m.start, 0)
    out[:, unused:] = 0
    row_lse[..., unused:] = -np.inf
    store(a.out[b, m, heads], out, p.out_dtype)
    if lse is not None:
        lse[b, heads, m] = row_lse


def as_rows(x: Array, group: int) -> Array:
    """(batch, rows, heads, D) as the left side of a tile's product: (batch, kv_heads, group x rows, D), compact."""
    batch, rows, heads, dim = x.shape
    split = x.reshape(batch, rows, heads // group, group, dim).transpose(0, 2, 3, 1, 4)
    return cast(Array, split.reshape(batch, heads // group, group * rows, dim))


def from_rows(x: Array, group: int) -> Array:
    """The way back of `as_rows`."""
    batch, kv_heads, rows, dim = x.shape
    split = x.reshape(batch, kv_heads, group, rows // group, dim)
    return cast(Array, split.transpose(0, 3, 1, 2, 4).reshape(batch, rows // group, kv_heads * group, dim))


def visible_keys(p: AttentionProblem, m: slice, offset: int, used_k: int) -> tuple[int, int]:
    """The range of keys that some row of the tile may see."""
    first = 0 if p.window_left is None else max(m.start + offset - p.window_left, 0)
    last = used_k if p.window_right is None else min(m.stop + offset + p.window_right, used_k)
    return first, last


def softcap_step(p: AttentionProblem, rS: Array) -> None:
    """Scaled scores in place: c tanh(s / c)."""
    cap = real(p, p.softcap or 0.0)
    rS /= cap
    np.tanh(rS, out=rS)
    rS *= cap


def score_step(p: AttentionProblem, a: Operands, rS: Array, tile: Tile, heads: slice, n: slice, offset: int) -> Array | None:
    """Capped scores (batch, kv_heads, group, rows, keys) in place: ALiBi, bias, mask; which are visible, None where all are."""
    b, _, m = tile
    split = rS.shape[:3]  # (batch, kv_heads, group): the query heads of a score operand
    rows, keys = rS.shape[3:]
    cut_left = p.window_left is not None and m.stop - 1 + offset - n.start > p.window_left
    cut_right = p.window_right is not None and m.start + offset - (n.stop - 1) < -p.window_right
    if cut_left or cut_right or a.alibi_slopes is not None:
        distance = np.arange(m.start, m.stop)[:, None] + offset - np.arange(n.start, n.stop)  # i + offset - j
    if a.alibi_slopes is not None:
        slopes = a.alibi_slopes[b, heads].reshape(*split, 1, 1).astype(rS.dtype)
        rS -= slopes * np.abs(distance).astype(rS.dtype)
    if a.bias is not None:
        rS += widen(a.bias[b, heads, m, n], p.bias).reshape(*split, rows, keys)
    conditions = []
    if cut_left:
        conditions.append(distance <= p.window_left)
    if cut_right:
        conditions.append(distance >= -(p.window_right or 0))
    if a.mask is not None:
        conditions.append(a.mask[b, heads, m, n].reshape(*split, rows, keys))
    visible: Array | None = functools.reduce(np.logical_and, conditions) if conditions else None
    if visible is not None:
        visible = np.broadcast_to(visible, rS.shape)
        np.copyto(rS, -np.inf, where=~visible)
    return visible


def weigh(rP: Array, rV: Array, visible: Array | None) -> Array:
    """P V in which a NaN or an infinity of V reaches only the rows that see its key: 0 x NaN is NaN in a matrix product."""
    if visible is None or np.isfinite(rV).all():
        return cast(Array, np.matmul(rP, rV))
    finite = np.isfinite(rV)
    rO: Array = np.matmul(rP, np.where(finite, rV, 0))
    seen = visible.reshape(rP.shape)
    for b, h, j in np.argwhere(~finite.all(axis=-1)):
        special = np.where(finite[b, h, j], 0, rV[b, h, j])
        rO[b, h] += np.where(seen[b, h, :, j, None], rP[b, h, :, j, None] * special, 0)
    return rO


def merge(outs: list[Array], lses: list[Array], out: Array, lse: Array, dtype: str) -> None:
    """Softmax-weighted mean of partial results over disjoint keys; outs (..., S, H, Dv), lses (..., H, S); dtype names that of the outs."""
    with np.errstate(all="ignore"):
        stacked = np.stack(lses)
        top = stacked.max(axis=0)
        weights = np.exp(stacked - np.where(top == -np.inf, 0, top))
        total = weights.sum(axis=0)
        weights /= np.where(total == 0, 1, total)
        merged = np.zeros(out.shape, stacked.dtype)
        for part, weight in zip(outs, np.swapaxes(weights, -1, -2)[..., None], strict=True):
            merged += np.where(weight == 0, 0, weight * widen(part, dtype).astype(stacked.dtype, copy=False))
        lse[...] = top + np.log(total)
        store(out, merged, dtype)


def used_lengths(name: str, used: Array | None, seqlen: int, batch: int) -> list[int]:
    if used is None:
        return [seqlen] * batch
    if "check" in os.environ.get("CUPYFLASH_DEBUG", "").split(",") and ((used < 0) | (used > seqlen)).any():
        _log.warning("%s holds %s: lengths are clamped to 0 <= length <= %d", name, used.tolist(), seqlen)
    return [int(n) for n in np.clip(used, 0, seqlen)]


def real(p: AttentionProblem, x: float) -> Any:
    return np.float64(x) if p.dtype == "float64" else np.float32(x)


def widen(x: Array, dtype: str | None) -> Array:
    """float32 of 16-bit values, exactly; wider types as they are."""
    if dtype == "bfloat16":
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32) if dtype == "float16" else x


def store(out: Array, x: Array, dtype: str) -> None:
    if dtype != "bfloat16":
        out[...] = x
        return
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    out[...] = np.where(np.isnan(x), 0x7FC0, rounded)  # adding to a NaN's bits could carry it into an infinity
