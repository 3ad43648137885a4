"""Attention over caches in host memory: new tokens are appended, then each sequence is computed alone, by the tiles of `host`.

A cache is pages (pages, page_size, Hkv, D) and, for each sequence, which of them are its own; without a page_table that is one page. Keys
are gathered a block at a time, into memory of one order and in the dtype of the arithmetic, so a sequence gets the same bits from pages of
any size, in any order and in any layout, from a cache of any length and beside whatever other sequences.

e4m3 arrives as its bits in uint8: a table of 256 numbers widens it, and a search among the midpoints of neighbours rounds to nearest even,
with no other package.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from cupyflash.host import Array, Batch, checks, compute_batches, offsets_of, store, used_lengths, widen
from cupyflash.problem import CacheOperands, CacheProblem, Operands

_log = logging.getLogger("cupyflash")

_MOST_TOKENS = (1 << 31) - 1  # offsets of keys in pages count what no array holds in one piece


def attention(problem: CacheProblem, a: Operands, c: CacheOperands, lse: Array | None) -> None:
    """Write new tokens into `a.k` and `a.v`, and fill `a.out` and, unless None, `lse`, as `host.attention`."""
    p = problem.attention
    sequences = _sequences(problem, a, c)
    with np.errstate(all="ignore"):
        for s in sequences:
            _append(problem, a, c, s)
    found = [_batch(problem, a, c, s) for s in sequences]
    compute_batches(p, found, a.out, lse, one_blas_thread=problem.split_size is not None)


class _Sequence(NamedTuple):
    """One sequence of a call: where its rows lie, and its slots, which are counted through its pages. `pages` holds what page_table has for
    its used slots, as it was given, or its one entry of the cache."""

    b: int
    first_row: int  # of its queries and its new tokens, where those are packed
    rows: int
    used_q: int
    pages: Array
    first: int  # slot of its first key
    held: int  # slots in use before the call
    new: int  # tokens to append, also such as have no slot left
    used: int  # slots in use then
    position: int  # of its first query, for rotary


def _sequences(problem: CacheProblem, a: Operands, c: CacheOperands) -> list[_Sequence]:
    p, (num_pages, page_size, _, _) = problem.attention, a.k.shape
    slots = np.full(p.batch, p.seqlen_k if num_pages else 0)
    first_row, rows = offsets_of("cu_seqlens_q", a.cu_seqlens_q, p.batch, p.seqlen_q)
    used_q = used_lengths("seqused_q", a.seqused_q, rows)
    held = slots
    if a.cu_seqlens_k is not None:
        _, keys = offsets_of("cu_seqlens_k", a.cu_seqlens_k, p.batch, _MOST_TOKENS)
        held = used_lengths("the lengths of cu_seqlens_k", keys, held)
    held = used_lengths("seqused_k", a.seqused_k, held)
    held = used_lengths("cache_seqlens", c.cache_seqlens, held)
    first = used_lengths("cache_leftpad", c.cache_leftpad, held) if c.cache_leftpad is not None else np.zeros_like(held)
    new = np.zeros_like(held) if c.k_new is None else rows if p.packed else np.full(p.batch, problem.seqlen_new)
    used = used_lengths("cache_seqlens with the new tokens", held + new, slots)
    position = held + new - rows if c.rotary_positions is None else c.rotary_positions
    found = []
    for b in range(p.batch):
        if c.page_table is not None:
            name, pages = "page_table", c.page_table[b, : -(-int(used[b]) // max(page_size, 1))]
        elif c.cache_batch_idx is not None:
            name, pages = "cache_batch_idx", c.cache_batch_idx[b : b + 1]
        else:
            name, pages = "the cache", np.array([b])
        if used[b] and checks() and ((pages < 0) | (pages >= num_pages)).any():
            _log.warning("%s has %s for sequence %d: entries are clamped to 0 <= entry < %d", name, pages.tolist(), b, num_pages)
        numbers = (int(x[b]) for x in (first, held, new, used, position))
        found.append(_Sequence(b, int(first_row[b]), int(rows[b]), int(used_q[b]), pages, *numbers))
    return found


def _append(problem: CacheProblem, a: Operands, c: CacheOperands, s: _Sequence) -> None:
    """Write the new tokens of a sequence into the slots behind those it has; what has no slot, or one outside of the cache, is dropped."""
    if not s.new:
        return
    p = problem.attention
    slots = np.arange(s.held, s.used)
    page, slot = np.divmod(slots, a.k.shape[1])
    pages = s.pages[page]
    there = (pages >= 0) & (pages < len(a.k))
    for cache, tokens, descale, is_key in ((a.k, c.k_new, c.k_descale, True), (a.v, c.v_new, c.v_descale, False)):
        of_sequence = tokens[0, s.first_row : s.first_row + s.new] if p.packed else tokens[s.b]
        x = widen(of_sequence[: len(slots)], p.dtype)
        if is_key and c.rotary_cos is not None:
            x = _rotated(problem, c, x, s.position + s.rows - s.new)
        if descale is not None:
            x = x / descale[s.b, :, None]
        cache[pages[there], slot[there]] = _narrow(x, problem.cache_dtype, cache.dtype)[there]


def _batch(problem: CacheProblem, a: Operands, c: CacheOperands, s: _Sequence) -> Batch:
    """A sequence as `host` computes it: q, k and v are read a tile at a time, and come in the dtype of the arithmetic."""
    p = problem.attention
    dtype = "float64" if p.dtype == "float64" else "float32"
    alone = p._replace(dtype=dtype, batch=1, seqlen_q=s.rows, seqlen_k=s.used - s.first, packed=False)
    batch = Batch(alone, a, [s.used_q], [s.used - s.first], s.b, s.first_row if p.packed else None)
    pages = np.clip(s.pages, 0, len(a.k) - 1)
    k, v = (
        _Keys(cache, pages, s.first, problem.cache_dtype, dtype, None if descale is None else descale[s.b])
        for cache, descale in ((a.k, c.k_descale), (a.v, c.v_descale))
    )
    mask = None if a.mask is None else batch.entries_of(a.mask)[..., s.first :]
    q = _Queries(batch.rows_of(a.q), problem, c, s.position)
    slopes = batch.entries_of(a.alibi_slopes)
    return batch._replace(a=Operands(q, k, v, batch.rows_of(a.out), mask=mask, alibi_slopes=slopes, sink=a.sink))


@dataclass(frozen=True, slots=True)
class _Queries:
    """The queries of a sequence, read as an array (1, Sq, Hq, D) is: widened and rotated."""

    rows: Array
    problem: CacheProblem
    c: CacheOperands
    position: int  # of the first

    def __getitem__(self, where: Any) -> Array:
        _, m, heads = where
        x = widen(self.rows[:, m, heads], self.problem.attention.dtype)
        return x if self.c.rotary_cos is None else _rotated(self.problem, self.c, x, self.position + m.start)


@dataclass(frozen=True, slots=True)
class _Keys:
    """The keys, or the values, of a sequence, read as an array (1, Sk, Hkv, D) is: gathered, widened, scaled."""

    cache: Array  # (pages, page_size, Hkv, D)
    pages: Array
    first: int  # slot of the first key
    cache_dtype: str
    dtype: str  # that they come in
    descale: Array | None  # (Hkv,)

    def __getitem__(self, where: Any) -> Array:
        _, n, heads = where
        page, slot = np.divmod(np.arange(self.first + n.start, self.first + n.stop), self.cache.shape[1])
        if page[0] == page[-1]:
            x = self.cache[self.pages[page[0]], slot[0] : slot[-1] + 1, heads].copy()
        else:
            x = np.ascontiguousarray(self.cache[self.pages[page], slot, heads])
        x = _E4M3[x] if self.cache_dtype == "float8_e4m3fn" else widen(x, self.cache_dtype)
        x = x.astype(self.dtype, copy=False)
        return (x if self.descale is None else x * self.descale[heads, None])[None]


def _rotated(problem: CacheProblem, c: CacheOperands, x: Array, position: int) -> Array:
    """Rotary embedding (RoFormer, arXiv 2104.09864) of x (..., tokens, heads, D), the first of which stands at `position`."""
    half = problem.rotary_dim // 2
    positions = np.arange(position, position + x.shape[-3])
    there = np.clip(positions, 0, len(c.rotary_cos) - 1)
    if checks() and (there != positions).any():
        _log.warning("tokens stand at %d to %d: positions are clamped to 0 <= position < %d", *positions[[0, -1]], len(c.rotary_cos))
    table_dtype = problem.attention.dtype if c.rotary_cos.dtype.itemsize == 2 else None
    cos, sin = (widen(table[there], table_dtype).astype(x.dtype, copy=False)[:, None] for table in (c.rotary_cos, c.rotary_sin))
    if problem.rotary_interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    turned: Array = x.copy()
    turned[..., first] = x[..., first] * cos - x[..., second] * sin
    turned[..., second] = x[..., first] * sin + x[..., second] * cos
    return turned


def _e4m3_values() -> Array:
    """The number of each of the 256 codes: sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinity, 0x7f and 0xff are NaN (arXiv
    2209.05433, section 3)."""
    exponent, mantissa = np.divmod(np.arange(128), 8)
    values = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    values[127] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


_E4M3 = _e4m3_values()
_E4M3_MIDPOINTS = (_E4M3[1:127] + _E4M3[:126]) / 2  # exact in float32


def _narrow(x: Array, dtype: str, stored: Any) -> Array:
    """Wide values as a cache of `dtype` stores them: rounded to nearest even, and to the largest where a quantised one has none so large.
    int8 has no NaN and stores 0, and e4m3 one without a sign."""
    if dtype == "int8":
        return np.clip(np.rint(np.where(np.isnan(x), 0, x)), -128, 127).astype(np.int8)
    if dtype == "float8_e4m3fn":
        size = np.abs(x)
        code = np.searchsorted(_E4M3_MIDPOINTS, size)
        code += (code % 2 == 1) & (size == _E4M3_MIDPOINTS[np.minimum(code, 125)])  # between an odd code and the even one above it
        return cast(Array, np.where(np.isnan(x), 127, code + 128 * np.signbit(x)).astype(np.uint8))
    narrow = np.empty(x.shape, stored)
    store(narrow, x, dtype)
    return narrow
