"""Attention for arrays in host memory: FlashAttention's tiled online softmax (arXiv 2307.08691, algorithm 1) on NumPy and its BLAS.

One tile of scores exists at a time in each thread, so extra memory does not grow with Sq x Sk, and a tile of 512 kB stays in a core's
L2 where the three-step formula streams its whole score matrix through memory four times. Arithmetic is float32, float64 for float64
inputs.

Threads take tiles, each with a BLAS of one thread: NumPy's own functions use one core only, and a BLAS that splits products of this size
over its threads waits for the slowest of them 4000 times a call (5 to 18 times slower on a machine with other work). bench/NOTES.md has the
numbers. Every element of the result is computed by one thread.

A tile is `batch x kv heads x (group x query rows) x keys`: the query heads of a group share their keys, so they are rows of one matrix
product, and short sequences put many heads into one tile, so NumPy's cost of about 1 us a call is spread.

Packed sequences that follow one another and are equally long are a batch of a dense call, as views; all batches' tiles are in one list.

bfloat16 arrays arrive as their bits in uint16: widening is a shift, and narrowing rounds to nearest even, with no other package.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np

from cupyflash.problem import AttentionProblem, Operands

Array = np.ndarray[Any, Any]
R = TypeVar("R")
_log = logging.getLogger("cupyflash")

# Scores in one tile, and keys in it at most; measured in bench/NOTES.md. 16 threads of 512 kB tiles stay far below 64 MB.
_TILE = 1 << 17
_BLOCK_N = 256
_MAX_THREADS = 16
_SERIAL = 1 << 20  # below so many scores in all a call takes 2 ms or less, and starting threads is not worth it


def attention(problem: AttentionProblem, a: Operands, lse: Array | None) -> None:
    """Fill `a.out` (B, Sq, Hq, Dv) and, unless None, `lse` (B, Hq, Sq); every operand is a NumPy array in the axis order of Operands."""
    compute_batches(problem, batches(problem, a), a.out, lse)


def compute_batches(problem: AttentionProblem, found: list[Batch], out: Array, lse: Array | None, one_blas_thread: bool = False) -> None:
    """Fill `out`, of which each batch has a part, and `lse`; with `one_blas_thread` a batch gets the same bits whatever the others are."""
    if problem.packed:  # what belongs to no sequence
        out[...] = 0
        if lse is not None:
            lse[...] = -np.inf
    jobs = [_Job(batch, tile) for batch in found for tile in _query_tiles(batch)]

    def compute(job: _Job) -> None:
        batch, tile = job
        used_q, used_k = batch.used_q[tile.b.start], batch.used_k[tile.b.start]
        with np.errstate(all="ignore"):  # inf and NaN of the inputs travel as IEEE says; a warning about them would name no argument
            _one_tile(batch.p, batch.a, batch.heads_of(lse), tile, used_q, used_k)

    with workers(len(jobs), found, one_blas_thread) as run:
        for _ in run(compute, jobs):  # the loop raises what a tile raised
            pass


class Batch(NamedTuple):
    """Sequences of equal lengths, side by side in memory: all of a dense call, or packed ones that follow one another."""

    p: AttentionProblem  # of these sequences, as of a dense call
    a: Operands  # what is theirs, as views
    used_q: list[int]
    used_k: list[int]
    first: int = 0  # of the sequences
    first_row: int | None = None  # in packed arrays; None: arrays have a batch axis
    first_key: int | None = None

    @property
    def ragged(self) -> bool:
        """Whether a tile may have no more than one sequence."""
        return len({*zip(self.used_q, self.used_k, strict=True)}) > 1

    def rows_of(self, x: Any) -> Any:
        """What is theirs of an array (B, Sq, ...), packed (1, Tq, ...), as a view; of None, None."""
        return self._cut(x, self.first_row, self.p.seqlen_q)

    def keys_of(self, x: Any) -> Any:
        """The same of (B, Sk, ...)."""
        return self._cut(x, self.first_key, self.p.seqlen_k)

    def heads_of(self, x: Any) -> Any:
        """The same of (B, Hq, Sq)."""
        return None if x is None else self.rows_of(x.swapaxes(1, 2)).swapaxes(1, 2)

    def entries_of(self, x: Any) -> Any:
        """The same of (B, ...), which has an entry for each sequence also where they are packed."""
        return None if x is None else x[self.first : self.first + self.p.batch]

    def operands_of(self, a: Operands) -> Operands:
        q, k, v, out = self.rows_of(a.q), self.keys_of(a.k), self.keys_of(a.v), self.rows_of(a.out)
        return Operands(q, k, v, out, alibi_slopes=self.entries_of(a.alibi_slopes), sink=a.sink)

    def _cut(self, x: Any, first: int | None, seqlen: int) -> Any:
        if x is None or first is None:
            return self.entries_of(x)
        return x[0, first : first + self.p.batch * seqlen].reshape(self.p.batch, seqlen, *x.shape[2:])


def batches(p: AttentionProblem, a: Operands) -> list[Batch]:
    """The sequences of a call."""
    first_row, rows = offsets_of("cu_seqlens_q", a.cu_seqlens_q, p.batch, p.seqlen_q)
    first_key, keys = offsets_of("cu_seqlens_k", a.cu_seqlens_k, p.batch, p.seqlen_k)
    used_q: list[int] = used_lengths("seqused_q", a.seqused_q, rows).tolist()
    used_k: list[int] = used_lengths("seqused_k", a.seqused_k, keys).tolist()
    if not p.packed:
        return [Batch(p, a, used_q, used_k)]
    differs = (np.diff(rows) != 0) | (np.diff(keys) != 0)  # equal ones are side by side, or empty
    starts = [0, *(np.flatnonzero(differs) + 1).tolist(), p.batch] if p.batch else []
    found = []
    for n, end in itertools.pairwise(starts):
        theirs = p._replace(batch=end - n, seqlen_q=int(rows[n]), seqlen_k=int(keys[n]), packed=False)
        batch = Batch(theirs, a, used_q[n:end], used_k[n:end], n, int(first_row[n]), int(first_key[n]))
        found.append(batch._replace(a=batch.operands_of(a)))
    return found


class Job(Protocol):
    @property
    def num_scores(self) -> int: ...


J = TypeVar("J", bound=Job)


@contextlib.contextmanager
def workers(
    jobs: int, found: list[Batch], one_blas_thread: bool = False
) -> Iterator[Callable[[Callable[[J], R], Iterable[J]], Iterator[R]]]:
    """A `map` over jobs whose results come in order: on threads, each with a BLAS of one thread, where a call is long enough for them; in a
    shorter one BLAS is as it is, unless it must have one thread."""
    threads = min(jobs, _num_cpus(), _MAX_THREADS)
    if threads < 2 or sum(p.batch * p.num_heads_q * p.seqlen_q * p.seqlen_k for p, *_ in found) < _SERIAL:
        with contextlib.ExitStack() as stack:
            if one_blas_thread:
                stack.enter_context(_all_cores)
                stack.enter_context(_one_blas_thread())
            yield map
        return

    def run(compute: Callable[[J], R], jobs: Iterable[J]) -> Iterator[R]:
        def compute_alone(some: list[J]) -> list[R]:
            with _one_blas_thread():  # an OpenMP BLAS has a number of threads for each of ours
                return [compute(job) for job in some]

        return itertools.chain.from_iterable(pool.map(compute_alone, _some_at_a_time(jobs)))

    from concurrent.futures import ThreadPoolExecutor  # 2 ms of an import that calls on a GPU do not need

    with _all_cores, _one_blas_thread(), ThreadPoolExecutor(threads, thread_name_prefix="cupyflash") as pool:
        yield run


def _some_at_a_time(jobs: Iterable[J]) -> Iterator[list[J]]:
    """Full tiles one by one, small ones together: a thread would spend more time on taking one of a few scores than on computing it."""
    some, cost = [], 0
    for job in jobs:
        some.append(job)
        cost += job.num_scores + _TILE // 32  # NumPy's calls for a tile of one score take as long as those many scores
        if cost > _TILE // 4:
            yield some
            some, cost = [], 0
    if some:
        yield some


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


class _Job(NamedTuple):
    batch: Batch
    tile: Tile

    @property
    def num_scores(self) -> int:
        return num_scores(self.batch.p, self.tile, self.batch.p.seqlen_k)


def num_scores(p: AttentionProblem, tile: Tile, keys: int) -> int:
    sizes: list[int] = [s.stop - s.start for s in tile]
    return math.prod(sizes) * (p.num_heads_q // p.num_heads_kv) * keys


def _query_tiles(batch: Batch) -> Iterator[Tile]:
    p = batch.p
    group = p.num_heads_q // max(p.num_heads_kv, 1)
    block_n = min(max(p.seqlen_k, 1), _BLOCK_N)
    block_m = fit(p.seqlen_q, _TILE // (block_n * max(group, 1)))
    heads = fit(p.num_heads_kv, _TILE // (block_n * block_m * max(group, 1)))
    together = 1 if batch.ragged else fit(p.batch, _TILE // (block_n * block_m * max(group, 1) * heads))
    for b in blocks(p.batch, together):
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


def used_lengths(name: str, used: Array | None, lengths: Array) -> Array:
    """How much of each sequence is in use."""
    clamped = lengths if used is None else np.clip(used, 0, lengths)
    if used is not None and checks() and (clamped != used).any():
        most = lengths[0] if (lengths == lengths[0]).all() else lengths.tolist()
        _log.warning("%s holds %s: lengths are clamped to 0 <= length <= %s", name, used.tolist(), most)
    return clamped


def offsets_of(name: str, offsets: Array | None, batch: int, tokens: int) -> tuple[Array, Array]:
    """Where each sequence begins, and how long it is."""
    if offsets is None:
        return np.zeros(batch, np.int64), np.full(batch, tokens)
    offsets = offsets.astype(np.int64)
    begin = np.clip(offsets[:-1], 0, tokens)
    end = np.clip(offsets[1:], begin, tokens)
    if checks() and ((begin != offsets[:-1]) | (end != offsets[1:])).any():
        _log.warning("%s holds %s: offsets are clamped to 0 <= begin <= end <= %d", name, offsets.tolist(), tokens)
    return begin, end - begin


def checks() -> bool:
    return "check" in os.environ.get("CUPYFLASH_DEBUG", "").split(",")


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
