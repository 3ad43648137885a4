"""(problem, device) -> Plan: which variant, which grid, which workspaces. Pure and cached; nothing else in cupyflash decides these."""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cupyflash.device import KNOWN, DeviceSpec
from cupyflash.errors import UnsupportedError
from cupyflash.problem import ITEMSIZE, MAX_PARTS, AttentionProblem, BackwardProblem, CacheProblem, MergeProblem, packs_heads
from cupyflash.variants import (
    BACKWARD,
    CACHED,
    DECODE,
    FORWARD,
    LATENT,
    MAX_HEAD_DIM,
    PLAIN,
    BwdConfig,
    BwdRowsConfig,
    BwdSm90Config,
    Config,
    DecodeConfig,
    FwdConfig,
    KeysOutsideConfig,
    Row,
    SimpleConfig,
    Sm90Config,
    Variant,
)


class Step(NamedTuple):
    """One launch: `threads` and dynamic shared memory of a block; `args` are the names of the buffers it reads and writes."""

    variant: Variant
    grid: tuple[int, int, int]
    threads: int
    smem_bytes: int
    args: tuple[str, ...]
    why: str
    boxes: tuple[tuple[str, int], ...] = ()  # the operands that are copied by tensor maps, and how many rows at a time


class Plan(NamedTuple):
    """The launches of one call in order, and the bytes of each workspace they share. No step: nothing is to be computed."""

    steps: tuple[Step, ...]
    workspaces: tuple[tuple[str, int], ...] = ()
    section: int = 1  # heads that the kernels of sm_90 take together in the order of their tiles; of packed sequences, tokens
    tiles: tuple[int, int] = (0, 0)  # of packed sequences: rows of those in the workspace row_tiles, keys of those in key_tiles
    sums: tuple[int, int] = (0, 0)  # of dq: columns, and rows of a head
    splits: tuple[int, int] = (0, 0)  # of decode: units of a split, or minus the splits of a sequence; and room for so many parts. Of the
    # backward how many tiles are split, and in how many parts


@functools.lru_cache(maxsize=4096)
def forward(problem: AttentionProblem, device: DeviceSpec) -> Plan:
    """The plan of one forward call; UnsupportedError where no variant serves it."""
    p = problem
    _check_head_dims(p)
    if device.arch == "host":
        return _on_host(p)
    if 0 in (p.num_heads_q, p.seqlen_q) or (p.batch == 0 and not p.packed):
        return Plan(())  # a grid of 0 is an error to the driver
    return decode(p, device) if _has_few_rows(p, device) else _in_tiles(p, device, FORWARD)


def _has_few_rows(p: AttentionProblem, device: DeviceSpec) -> bool:
    """Whether `decode` is sooner done than tiles with rows of one query head: up to 10 times as soon where there are too few tiles for all
    SMs, 2.4 where the heads of a group have a tile together, 1.2 with four rows. Elsewhere tiles are, up to 6 times (bench/NOTES.md)."""
    if p.packed or 0 in (p.seqlen_k, p.num_heads_kv) or not _decodes(p, device):
        return False
    heads, rows, group = p.num_heads_q, p.seqlen_q, p.num_heads_q // p.num_heads_kv
    if packs_heads(p):  # `supports` asks before a call has packed them, the call itself after
        heads, rows, group = p.num_heads_kv, group, 1
    few_tiles = 2 * p.batch * heads * _ceil_div(rows, 128) <= device.num_sms
    return group * rows <= (64 if few_tiles else 16 if group > 1 else 4)


def _on_host(p: AttentionProblem) -> Plan:
    args = tuple(name for name, used in _buffers(p).items() if used)
    variant = Variant("host", p.dtype, p.head_dim, p.head_dim_v, _flags(p))
    return Plan((Step(variant, (1, 1, 1), 0, 0, args, "the arrays are in host memory"),))


def _in_tiles(p: AttentionProblem, device: DeviceSpec, table: tuple[Row, ...], pages: CacheProblem | None = None) -> Plan:
    """The plan of many query rows: each head has tiles of its own. `pages` is the cache whose pages the keys lie in, if they do."""
    args = tuple(name for name, used in _buffers(p).items() if used)
    variant, row = _choose(p, device, table)
    if pages is not None:
        assert isinstance(variant.config, Sm90Config)
        page_rows = _page_rows(pages, variant.config.block_n)
        variant = variant._replace(flags=tuple(sorted((*variant.flags, "paged"))), config=variant.config._replace(page_rows=page_rows))
    tiles, section = _num_tiles(p, variant), 1
    if isinstance(variant.config, Sm90Config):  # a block for each SM, which takes tile after tile
        tiles = min(tiles, device.num_sms)
        section = _section(p, variant.config, tiles) if "causal" in variant.flags and not p.packed else 1
    step = Step(variant, (tiles, 1, 1), variant.threads, variant.smem_bytes, args, row.why, _boxes(variant))
    if not p.packed or isinstance(variant.config, SimpleConfig):
        return Plan((step,), _rows_between(p, variant), section)
    assert isinstance(variant.config, FwdConfig | Sm90Config)
    block_m = variant.config.block_m
    lists = (block_m, 0)
    workspaces = tuple(_list_bytes(p, lists).items())
    passing = p if pages is None else p._replace(seqlen_k=p.seqlen_k * p.batch)
    section = _section_of_tokens(passing, p.head_dim + p.head_dim_v, _SHARED_L2_BYTES)
    more = ("paged",) * (pages is not None)
    if isinstance(variant.config, Sm90Config) and {"causal", "local"}.intersection(variant.flags):
        more += ("fromlast",)
    return Plan((_listing(p, lists, args, more), step), workspaces, section, lists)


def _rows_between(p: AttentionProblem, variant: Variant) -> tuple[tuple[str, int], ...]:
    """What `fwd_keys_outside` keeps of each row between its tiles of keys: O, and its maximum and sum, in float32."""
    c = variant.config
    if not isinstance(c, KeysOutsideConfig):
        return ()
    rows = p.batch * p.num_heads_q * _round_up(p.seqlen_q, c.block_m)
    return ("part_out", rows * variant.head_dim_v * 4), ("part_lse", rows * 2 * 4)


def _page_rows(problem: CacheProblem, block_n: int) -> int:
    """How many keys a box has: those that lie together both in a page and in a block of keys. Behind a page that has all slots of a
    sequence the accelerator reads zeros."""
    one_page = problem.page_size in (None, problem.attention.seqlen_k)
    return block_n if one_page else math.gcd(problem.page_size or 0, block_n)


def _decodes(p: AttentionProblem, device: DeviceSpec) -> bool:
    """Whether `decode` has a row for a problem."""
    rows = (row for row in DECODE if p.dtype in row.dtypes and device.capability >= row.capability)
    return not (p.bias or p.mask) and max(p.head_dim, p.head_dim_v) <= max((row.head_dim for row in rows), default=0)


def decode(
    p: AttentionProblem,
    device: DeviceSpec,
    split_size: int | None = None,
    num_splits: int | None = None,
    flags: tuple[str, ...] = (),
    page_size: int | None = None,
    table: tuple[Row, ...] | None = None,
) -> Plan:
    """The plan of few query rows over many keys: the heads that read a key head are rows of one tile, and blocks share the keys. The table
    is DECODE, or LATENT."""
    group_rows = p.num_heads_q // max(p.num_heads_kv, 1) * p.seqlen_q
    tiles = p.num_heads_kv * _ceil_div(group_rows, 16) if p.batch == 1 and not (p.packed or split_size or num_splits) else 0
    if split_size or num_splits:
        flags = (*flags, "splits")
    variant, row = _choose(p, device, table or _decode_rows(tiles, device, flags), flags)
    c = variant.config
    assert isinstance(c, DecodeConfig)
    if page_size and page_size % c.block_n == 0:  # the keys that a warp takes at a time lie in one
        variant = variant._replace(flags=(*variant.flags, "wholepages"))
    args = tuple(name for name, used in _buffers(p).items() if used)
    if c.cluster > 1:
        return Plan((Step(variant, (tiles * c.cluster, 1, 1), variant.threads, variant.smem_bytes, args, row.why),))
    unit, batches = c.unit, 1 if p.packed else p.batch
    tiles = batches * p.num_heads_kv * (_ceil_div(group_rows, c.block_m) + (min(p.batch + 1, p.seqlen_q) if p.packed else 0))
    # Two blocks an SM hide from one another where they begin and end something; with little to begin, one has less to merge, but cannot
    # widen bytes as fast as they come.
    units = _ceil_div(p.seqlen_k, unit)
    share = (variant.quantised and tiles * units > 16 * device.num_sms) or tiles > 2 * device.num_sms
    blocks = _even(device.num_sms * (min(c.blocks, 2) if share else 1), tiles)
    # A team of blocks reads heads that lie side by side: as many as divide the heads and leave at most 4 % of the blocks.
    team = max(n for n in range(1, 33) if max(p.num_heads_kv, 1) % n == 0 and 25 * (blocks % n) <= blocks)
    blocks -= blocks % team
    split_units = _ceil_div(split_size, unit) if split_size else 0
    most = min(num_splits, units) if num_splits else _ceil_div(units, split_units) if split_units else 0
    parts = tiles * most if most else 2 * blocks
    step = Step(variant, (blocks, 1, 1), variant.threads, variant.smem_bytes, args, row.why)
    workspaces = (("part_out", parts * c.block_m * variant.head_dim_v * 4), ("part_lse", parts * c.block_m * 4))
    splits = split_units or -(num_splits or 0), parts
    if c.latent:
        merge = variant._replace(family="latent_merge", config=c._replace(warps=4))
        blocks = max(8 * device.num_sms, tiles)
        after = Step(merge, (blocks, 1, 1), merge.threads, 0, args, "parts that several blocks have, by all SMs")
        return Plan((step, after), workspaces, team, splits=splits)
    begin = Variant("decode_begin", "float32", 0, 0, (), _BY_WARPS)
    before = Step(begin, (_ceil_div(parts, begin.threads), 1, 1), begin.threads, 0, args, "counters of parts")
    return Plan((before, step), (*workspaces, ("arrived", parts * 4)), team, splits=splits)


def _even(blocks: int, tiles: int) -> int:
    """At most 4 % fewer blocks, if each then has whole tiles, or each tile whole blocks: less is left in parts, and fewer parts merged."""
    return next((n for n in range(blocks, blocks - blocks // 25 - 1, -1) if tiles % n == 0 or n % max(tiles, 1) == 0), blocks)


def _is_latent(problem: CacheProblem, device: DeviceSpec) -> bool:
    """Whether LATENT has a row for a problem: values in the keys, which are wider than other rows take them. Some 64 columns of a key are
    no values."""
    p, (row,) = problem.attention, LATENT
    if not problem.values_in_keys or p.bias or p.mask or problem.cache_dtype != p.dtype or not _aligned(p) or not p.num_heads_q:
        return False
    wide = MAX_HEAD_DIM < p.head_dim <= row.head_dims[0] and p.head_dim_v <= row.head_dims[1]
    return wide and _round_up(p.head_dim_v, 128) + 64 <= _round_up(p.head_dim, 64) and p.dtype in row.dtypes and row.arch == device.arch


def _decode_rows(tiles: int, device: DeviceSpec, flags: tuple[str, ...]) -> tuple[Row, ...]:
    """Those rows of DECODE that serve one sequence of so many tiles, or none if 0: in clusters if these fill nine tenths of the SMs, one
    block each. Of a cache of 8 bits twice as many keys are as many bytes."""
    configs = {row: row.config for row in DECODE if isinstance(row.config, DecodeConfig)}
    size = max((c.cluster for c in configs.values() if 0.9 * device.num_sms <= c.cluster * tiles <= device.num_sms), default=1)
    times = 2 if any(flag.startswith("cached") for flag in flags) else 1
    return tuple(row._replace(config=c._replace(block_n=times * c.block_n)) for row, c in configs.items() if c.cluster in (size, 1))


@functools.lru_cache(maxsize=4096)
def backward(problem: BackwardProblem, device: DeviceSpec) -> Plan:
    """The plan of one backward call; UnsupportedError where no variant serves it."""
    p = problem.forward
    _check_head_dims(p)
    if device.arch == "host":
        variant = Variant("host", p.dtype, p.head_dim, p.head_dim_v, _flags(p))
        return Plan((Step(variant, (1, 1, 1), 0, 0, (), "the arrays are in host memory"),))
    batches = 1 if p.packed else p.batch  # of the arrays
    rows = batches * p.num_heads_q * p.seqlen_q
    slopes, sinks = ("alibi_slopes" in problem.wrt) * problem.slopes_batch * p.num_heads_q, ("sink" in problem.wrt) * p.num_heads_q
    sums_q = bool({"k", "v"}.intersection(problem.wrt)) and "q" in problem.wrt and not (problem.deterministic or slopes)
    sums_q = sums_q and (not p.packed or p.seqlen_q >= _SHORT_SEQUENCES * p.batch)
    variant, row = _choose(p, device, BACKWARD if sums_q else tuple(r for r in BACKWARD if not isinstance(r.config, BwdSm90Config)))
    tiled = isinstance(variant.config, BwdConfig | BwdSm90Config)
    sums_q = sums_q and tiled
    sums = variant.head_dim, _sum_rows(p, variant)
    splits = _splits(p, variant, device.num_sms)
    if tiled:
        gradients = _tiled(problem, variant, row, sums_q, device.num_sms, splits)
    else:
        results = rows + batches * p.num_heads_kv * p.seqlen_k + math.prod(problem.bias_shape or (0,))
        gradients = ((variant, _blocks_of(variant, results), row.why),)
    kernels = (_delta(p, variant, sums_q), *gradients, _sum(variant, slopes, sinks))
    args = (*(name for name, used in _buffers(p).items() if used), "lse", "dout", *(f"d{name}" for name in problem.wrt))
    steps = tuple(
        Step(v, (_grid(v, blocks), 1, 1), v.threads, v.smem_bytes, args, reason, _boxes(v)) for v, blocks, reason in kernels if blocks
    )
    row_bytes = rows * (8 if p.dtype == "float64" else 4)
    workspaces = {
        "row_lse": row_bytes,
        "row_delta": row_bytes,
        "row_slope": row_bytes if slopes else 0,
        "row_sink": row_bytes if sinks else 0,
        "row_reference": row_bytes if tiled else 0,
        "dq_sum": batches * p.num_heads_q * math.prod(sums) * 4 if sums_q else 0,
        "next_tile": 4 + 4 * splits[0] if isinstance(variant.config, BwdSm90Config) else 0,
        "part_sums": math.prod(splits) * 512 * (variant.head_dim + variant.head_dim_v) if splits[0] else 0,
    }
    tiles = (0, 0)
    if p.packed and tiled and any(tiles := _listed(gradients)):
        steps = (_listing(p, tiles, args), *steps)
        workspaces |= _list_bytes(p, tiles)
    section = _section_of_tokens(p, 3 * p.head_dim + p.head_dim_v, _SUMMED_L2_BYTES // 2) if p.packed else 1
    if isinstance(variant.config, BwdSm90Config) and not p.packed:
        section = _section_of_keys(p, variant.config, "causal" in variant.flags, device.num_sms)
    kept = tuple((name, num_bytes) for name, num_bytes in workspaces.items() if num_bytes or name in ("row_lse", "row_delta"))
    return Plan(steps, kept, section, tiles, sums, splits)


@functools.lru_cache(maxsize=4096)
def cached(problem: CacheProblem, device: DeviceSpec) -> Plan:
    """The plan of one call over a cache; UnsupportedError where no variant serves it. On a GPU the last row of CACHED serves whatever the
    host path does; where tokens are appended, rotated or counted, a kernel before it does that."""
    p = problem.attention
    for name, dim, most in zip(("head_dim", "head_dim_v"), (p.head_dim, p.head_dim_v), CACHED[-1].head_dims, strict=True):
        if dim > most:
            raise UnsupportedError(f"no kernel for {name} {dim} over a cache: {most} is the largest")
    if device.arch == "host":
        return _on_host(p)
    steps, workspaces = _appending(problem)
    attends = 0 not in (p.num_heads_q, p.seqlen_q) and (p.batch or p.packed)
    schedule = _over_cache(problem, device) if attends else Plan(())
    kept = tuple((name, num_bytes) for name, num_bytes in workspaces.items() if num_bytes)
    return schedule._replace(steps=(*steps, *schedule.steps), workspaces=(*kept, *schedule.workspaces))


def _over_cache(problem: CacheProblem, device: DeviceSpec) -> Plan:
    """The attention of a call over a cache, by one of three kernels: tiles of query rows, `decode`, or one warp a row."""
    p = problem.attention._replace(seqused_k=True)  # lengths are always given
    if rows := _rows_over_cache(problem, device):
        return _in_tiles(p, device, rows, problem if _is_paged(problem) else None)
    latent = _is_latent(problem, device)
    if latent or _decodes(p, device):
        table = LATENT if latent else None
        return decode(p, device, problem.split_size, problem.num_splits, _cache_flags(problem), problem.page_size, table)
    variant, row = _choose(p, device, CACHED, _cache_flags(problem))
    args = tuple(name for name, used in _buffers(p).items() if used)
    return Plan((Step(variant, (_num_tiles(p, variant), 1, 1), variant.threads, variant.smem_bytes, args, row.why),))


# A tile of the forward is 64 to 256 tokens of one query head, a tile of `decode` 16 rows: tokens of all query heads of a key head. So a
# head of the cache is read ceil(tokens / 128) x group times by the one and ceil(tokens x group / 16) times by the other, whose products are
# those of mma.sync. At 64 tokens the first takes 0.17 to 0.45 times as long (H200, 16 and 64 sequences of 128 to 16k keys); only of one
# sequence alone, whose tiles do not fill the GPU, decode is 1.2 to 2.7 times as fast.
_CHUNK = 64


def _rows_over_cache(problem: CacheProblem, device: DeviceSpec) -> tuple[Row, ...]:
    """Those rows of FORWARD whose tiles a call over a cache takes; none where they cannot read its keys, and none where `decode` serves it
    and has few query tokens, or splits to make as only it does. Of packed sequences the mean counts, since no host knows more. Pages are
    read by tensor maps alone, 16 keys at a time or more."""
    p = problem.attention
    if problem.cache_dtype != p.dtype or max(p.head_dim, p.head_dim_v) > MAX_HEAD_DIM:
        return ()
    tokens = p.seqlen_q // max(p.batch, 1) if p.packed else p.seqlen_q
    splits = problem.split_size is not None or problem.num_splits not in (None, 1)
    if (tokens < _CHUNK or splits) and _decodes(p, device):
        return ()
    rows = tuple(row for row in FORWARD if p.dtype in row.dtypes)
    if not _is_paged(problem):
        return tuple(row for row in rows if row.longest is None)  # how many slots are in use, no host knows
    if not p.tensor_maps or problem.leftpad or _page_rows(problem, 16) != 16:
        return ()

    def order(row: Row) -> tuple[bool, int, int, bool]:
        box = _page_rows(problem, row.config.block_n) if isinstance(row.config, Sm90Config) else 0
        return row.options, row.head_dim, -min(box, 64), problem.page_size is None and row.longest is not None

    # Of a width large boxes first: in boxes of 16 rows a chunk of 512 tokens took 1.5 times as long as in boxes of 64.
    return tuple(row._replace(longest=None) for row in sorted(rows, key=order) if row.arch == device.arch)


def _appending(problem: CacheProblem) -> tuple[tuple[Step, ...], dict[str, int]]:
    """The kernel before the attention over a cache, and its workspaces, where there is anything to do for it."""
    p = problem.attention
    if not p.batch or not (problem.seqlen_new or problem.rotary_dim or problem.cu_seqlens_k):
        return (), {}
    batches = 1 if p.packed else p.batch
    flags = ("paged", *_quantised(problem), *(("packed",) if p.packed else ()))
    if problem.rotary not in (None, p.dtype):
        flags += ("rotaryf32",)
    variant = Variant("cache_append", p.dtype, 0, 0, tuple(sorted(flags)), _BY_WARPS)
    queries = batches * p.seqlen_q * p.num_heads_q if problem.rotary_dim else 0
    rows = _grid(variant, queries + 2 * batches * problem.seqlen_new * p.num_heads_kv)
    blocks = _blocks_of(variant, rows + _ceil_div(p.batch, 32))
    return (Step(variant, (blocks, 1, 1), variant.threads, 0, (), "new tokens, rotation and lengths"),), {
        "rotated_q": queries * p.head_dim * ITEMSIZE[p.dtype],
        "used_k": 4 * p.batch,
        "first_k": 4 * p.batch if problem.leftpad else 0,
    }


def _cache_flags(problem: CacheProblem) -> tuple[str, ...]:
    return (*_quantised(problem), *(("paged",) if _is_paged(problem) else ()))


def _is_paged(problem: CacheProblem) -> bool:
    """A cache that is not is what attention takes anyway, where nothing else is said of it."""
    return problem.page_size is not None or problem.batch_idx or problem.leftpad or problem.attention.packed


def _quantised(problem: CacheProblem) -> tuple[str, ...]:
    return () if problem.cache_dtype == problem.attention.dtype else (f"cached{problem.cache_dtype}",)


@functools.lru_cache(maxsize=4096)
def merging(problem: MergeProblem, device: DeviceSpec) -> Plan:
    """The plan of merging partial results on a GPU; UnsupportedError for more of them than a launch takes: groups merged here
    would be rounded in between."""
    p = problem
    if p.parts > MAX_PARTS:
        raise UnsupportedError(
            f"outs holds {p.parts} arrays: {MAX_PARTS} are merged at once in GPU memory",
            (f"merge groups of up to {MAX_PARTS}, then their results; with outs of float32 little is rounded in between",),
        )
    variant = Variant("merge_states", p.dtype, 0, 0, () if p.aligned16 else ("unaligned",), _BY_WARPS)
    blocks = _ceil_div(_grid(variant, p.batch * p.seqlen * p.num_heads * p.chunks), variant.threads)
    return Plan((Step(variant, (blocks, 1, 1), variant.threads, 0, (), "16 bytes of a row a thread"),) if blocks else ())


# Below so many rows a packed sequence, dq has a kernel of its own: its sums begin anew every 64 rows of each.
_SHORT_SEQUENCES = 128
# Of the 50 MB of an H200. Where sums are added to as well 16 MB against 32 are 3 to 5 % at S = 512 (D = 128, 256), and level from 1k on; 64
# take 4 to 30 % longer. Packed sequences, all heads of which are a section: 8 MB are 3 to 7 % at 512, and level from 1k on (2026-12-01).
_SHARED_L2_BYTES, _SUMMED_L2_BYTES = 32 << 20, 16 << 20


def _section(p: AttentionProblem, c: Sm90Config, blocks: int) -> int:
    """How many heads a causal forward of persistent blocks takes together: those whose K and V share the L2, but so that the blocks get
    equal loads. Each takes every `blocks`-th tile, there and back, in the order of `Tiles` in fwd_sm90.cu: near one another sizes differ by
    3 % (D = 128, S = 1024), and some bring one block 1.8 times the mean."""
    heads, head_bytes = p.batch * p.num_heads_q, 2 * p.seqlen_k * (p.head_dim + p.head_dim_v) * p.num_heads_kv // p.num_heads_q
    last = p.seqlen_q - np.arange(_ceil_div(p.seqlen_q, c.block_m)) * c.block_m + _diagonal(p)  # of the last tile first
    keys = -(-np.clip(last, 0, p.seqlen_k) // c.block_n)

    def largest_load(tiles: np.ndarray) -> float:
        turn, place = np.divmod(np.arange(len(tiles)), blocks)
        loads = np.bincount(np.where(turn % 2 == 1, blocks - 1 - place, place), tiles, blocks)
        return float(loads.max() / loads.mean())

    return _balanced(keys, heads, _SHARED_L2_BYTES / max(head_bytes, 1), largest_load, (1 << 17) // (heads * len(keys)))


def _section_of_keys(p: AttentionProblem, c: BwdSm90Config, causal: bool, blocks: int) -> int:
    """The same for the backward, of key heads whose Q, dO and sums of dQ share the L2, one query head of each at a time; a block that is
    free takes the next tile. Few heads of many query heads each are what needs it: 8 x 8 at S = 4096 took 1.56 times the mean. Without a
    mask loads are equal anyway, but blocks of several heads add to different sums: 0 to 2 % (D = 128, 256)."""
    heads, fit = p.batch * p.num_heads_kv, _SUMMED_L2_BYTES / max(2 * p.seqlen_q * (3 * p.head_dim + p.head_dim_v), 1)
    if not causal:
        return max(min(int(fit), heads), 1)
    first = np.clip(np.arange(_ceil_div(p.seqlen_k, c.block_n)) * c.block_n - _diagonal(p), 0, p.seqlen_q)
    rows = _ceil_div(p.seqlen_q, c.block_m) - first // c.block_m

    def largest_load(tiles: np.ndarray) -> float:
        loads = [0.0] * blocks
        for tile in tiles[: 16 * blocks]:  # after so many the loads are about equal
            heapq.heapreplace(loads, loads[0] + tile)
        return max(loads) * blocks / sum(loads)

    return _balanced(rows * (p.num_heads_q // p.num_heads_kv), heads, fit, largest_load)


def _section_of_tokens(p: AttentionProblem, columns: int, num_bytes: int) -> int:
    """How many tokens packed sequences have whose `columns` columns of all heads, 2 bytes each, take so many bytes of the L2; but no more
    sections than packed_tiles.cu has room for."""
    return max(num_bytes // max(2 * columns * p.num_heads_kv, 1), _ceil_div(max(p.seqlen_q, p.seqlen_k), 63), 1)


def _splits(p: AttentionProblem, variant: Variant, blocks: int) -> tuple[int, int]:
    """How many of the last tiles of a backward are dealt out in parts of their rows, and in how many: where all tiles are as long, those of
    the last round would leave blocks without work. The cost is in row blocks, 2.2-2.4 us each on an H200: of the last round, of parts of 64
    or 128 kB to be left and added up, and something of every tile for a kernel that can."""
    c = variant.config
    if variant.family != "bwd_sm90" or {"packed", "causal", "local"}.intersection(variant.flags):
        return 0, 1
    assert isinstance(c, BwdSm90Config)
    tiles = p.batch * p.num_heads_kv * _ceil_div(p.seqlen_k, c.block_n)
    rows = _ceil_div(p.seqlen_q, c.block_m) * (p.num_heads_q // max(p.num_heads_kv, 1))
    split = tiles % blocks if tiles > blocks else tiles

    def cost(parts: int) -> float:
        return _ceil_div(split * parts, blocks) * _ceil_div(rows, parts) + (1 + parts / 2 + 0.2 * (tiles // blocks) if parts > 1 else 0)

    most = min(16, rows, 3 * blocks // max(split, 1))
    parts = min(range(1, max(most, 1) + 1), key=cost)
    return (split, parts) if parts > 1 else (0, 1)


def _diagonal(p: AttentionProblem) -> int:
    """j - i on the diagonal."""
    return 0 if p.top_left else p.seqlen_k - p.seqlen_q


def _balanced(lengths: np.ndarray, heads: int, sharing: float, largest_load: Callable[[np.ndarray], float], tries: int = 8) -> int:
    """The section for which the largest load is the least, if in doubt the largest of no more heads than are `sharing` the L2. `lengths`
    are those of a head's tiles, falling; the tiles of all heads come section by section, falling in the last one, rising in the one before
    it, and so on. Beside a few sections that share the heads evenly so many are tried, up to twice what shares the L2. Eight times that
    made 8 x 4096 of 16 heads of 128 take 1.36 times as long in the backward, whatever their load (H200)."""
    if not len(lengths):
        return 1
    fit = max(min(int(sharing), heads), 1)
    costs = lengths + 1.5  # what a tile takes besides its loop
    shown = min(heads, max((1 << 17) // len(lengths), 1))  # enough to know

    def load(section: int) -> float:
        sections = _ceil_div(shown, section)
        falls = [(sections - 1 - n) % 2 == 0 for n in range(sections)]
        wide = [min(section, shown - n * section) for n in range(sections)]
        tiles = np.concatenate([np.repeat(costs if fall else costs[::-1], width) for fall, width in zip(falls, wide, strict=True)])
        return largest_load(tiles) * (1 if section <= fit else 1 + 0.03 * max(section / fit - 1, 1))

    evenly = {_ceil_div(heads, _ceil_div(heads, fit) + n) for n in range(7)} | {min(heads, fit << n) for n in range(1, 4)}
    more = range(1, min(2 * fit, heads) + 1)
    tried = evenly.union(more[:: _ceil_div(len(more), max(tries, 1))])
    return min(sorted(tried, key=lambda section: (section > fit, -section)), key=load)


def _boxes(variant: Variant) -> tuple[tuple[str, int], ...]:
    c = variant.config
    if isinstance(c, BwdSm90Config):
        return ("q", c.block_m), ("k", c.block_n), ("v", c.block_n), ("dout", c.block_m)
    if not isinstance(c, Sm90Config):
        return ()
    keys = c.page_rows or c.block_n
    boxes: tuple[tuple[str, int], ...] = (("q", c.block_m), ("k", keys), ("v", keys))
    return (*boxes, ("out", 8 if c.own_out else 16)) if variant.store_map else boxes  # rows of a warp


_Launch = tuple[Variant, int, str]  # how many blocks, and why


def rounding(variant: Variant) -> Variant:
    """The kernel that makes dq of the sums that a tiled one has added up."""
    flags = tuple(sorted((*variant.flags, "panels"))) if _has_panels(variant) else variant.flags
    return variant._replace(family="bwd_convert", flags=flags, config=_BY_WARPS)


def companions(variant: Variant, row: Row) -> tuple[Variant, ...]:
    """The other kernels with tiles that a row may launch beside its own: for dq alone, and for the gradient of a bias."""
    c = variant.config
    if not isinstance(c, BwdConfig):
        return ()
    return (
        variant._replace(family=f"{variant.family}_dq", config=row.dq),
        variant._replace(family=f"{variant.family}_dbias", config=c.bias),
    )


def _tiled(
    problem: BackwardProblem, variant: Variant, row: Row, sums_q: bool, num_sms: int, splits: tuple[int, int]
) -> tuple[_Launch, ...]:
    """The kernels of a tiled row. With `sums_q` the first also adds up dq, by atomics, and is followed by what rounds it."""
    p, c = problem.forward, variant.config
    assert isinstance(c, BwdConfig | BwdSm90Config)
    batches = 1 if p.packed else p.batch
    heads = batches * p.num_heads_q
    launches: list[_Launch] = []
    if {"k", "v"}.intersection(problem.wrt):
        blocks = batches * p.num_heads_kv * _num_blocks(p, p.seqlen_k, c.block_n)
        if isinstance(c, BwdSm90Config):  # a block for each SM, which takes tile after tile
            blocks = min(_grid(variant, blocks + splits[0] * (splits[1] - 1)), num_sms)
        more = ["dq"] * (sums_q and isinstance(c, BwdConfig)) + ["splits"] * (splits[0] > 0)  # those of sm_90 always add up dq
        launches.append((variant._replace(flags=tuple(sorted((*variant.flags, *more)))), blocks, row.why))
    if sums_q:
        convert = rounding(variant)
        blocks = _grid(convert, heads * _ceil_div(_sum_rows(p, variant) if p.packed else p.seqlen_q, 16 * _BY_WARPS.warps))
        launches.append((convert, blocks, "dq from its sums"))
    if isinstance(c, BwdConfig):
        assert row.dq is not None
        dq, dbias = companions(variant, row)
        if not sums_q and {"q", "alibi_slopes"}.intersection(problem.wrt):
            blocks = heads * _num_blocks(p, p.seqlen_q, row.dq.block_m)
            launches.append((dq, blocks, "dq in one order of additions"))
        if "bias" in problem.wrt:
            *axes, sq, sk = problem.bias_shape
            blocks = math.prod(axes) * _ceil_div(sq, c.block_m) * _ceil_div(sk, c.block_n)
            launches.append((dbias, blocks, "dbias, a tile a block"))
    return tuple(launches)


_BY_WARPS = SimpleConfig(4)


_DELTA_ELEMENTS = 1024  # of the rows of a warp of bwd_delta


def _delta(p: AttentionProblem, variant: Variant, sums_q: bool) -> _Launch:
    """The kernel before `variant`, which shares a warp out among as many rows as the width of O leaves."""
    flags = [flag for flag in variant.flags if flag.startswith(("out", "packed", "sink", "used"))]
    if not _aligned(p):
        flags.append("unaligned")
    width = max(64, 1 << (p.head_dim_v - 1).bit_length())
    delta = Variant("bwd_delta", p.dtype, width, width, tuple(sorted(flags)), _BY_WARPS)
    length = _sum_rows(p, variant) if p.packed and sums_q else p.seqlen_q  # it also zeroes those sums
    blocks = (1 if p.packed else p.batch) * p.num_heads_q * _ceil_div(length, _BY_WARPS.warps * _DELTA_ELEMENTS // width)
    return delta, _grid(delta, blocks), "what each row must know of its other keys"


def _sum(variant: Variant, slopes: int, sinks: int) -> _Launch:
    """The kernel after `variant` that adds up what it left of each row: no head dim changes its code, and few flags do. Slopes of no packed
    sequence have a gradient, too, of 0."""
    flags = {flag for flag in variant.flags if flag.startswith(("packed", "sink"))} | ({"alibi"} if slopes else set())
    sums = variant._replace(family="bwd_sum", head_dim=0, head_dim_v=0, flags=tuple(sorted(flags)), config=_BY_WARPS)
    return sums, _blocks_of(sums, slopes + sinks), "sums over rows, in one order"


def _blocks_of(variant: Variant, warps: int) -> int:
    assert isinstance(variant.config, SimpleConfig)
    return _grid(variant, _ceil_div(warps, variant.config.warps))


def _grid(variant: Variant, blocks: int) -> int:
    if blocks >= 1 << 31:
        raise UnsupportedError(f"{variant.name} would need {blocks} blocks and a grid has 2^31 - 1", ("calls on fewer heads or batches",))
    return blocks


def _check_head_dims(p: AttentionProblem) -> None:
    if max(p.head_dim, p.head_dim_v) > MAX_HEAD_DIM:
        name, dim = ("head_dim", p.head_dim) if p.head_dim > MAX_HEAD_DIM else ("head_dim_v", p.head_dim_v)
        raise UnsupportedError(f"no kernel for {name} {dim}: {MAX_HEAD_DIM} is the largest for forward and backward")


def _choose(p: AttentionProblem, device: DeviceSpec, table: tuple[Row, ...], flags: tuple[str, ...] = ()) -> tuple[Variant, Row]:
    """The first row that serves a problem; its variant has `flags` besides those of the problem."""
    too_big = ""
    for row in table:
        if p.dtype not in row.dtypes or device.capability < row.capability:
            continue
        if p.head_dim > row.head_dims[0] or p.head_dim_v > row.head_dims[1]:
            continue
        if row.arch not in (None, device.arch) or (isinstance(row.config, Sm90Config | BwdSm90Config) and not p.tensor_maps):
            continue
        variant = _variant(p, row)
        variant = variant._replace(flags=tuple(sorted((*variant.flags, *flags))))
        if not (row.options or PLAIN[row.family].issuperset(variant.flags)):
            continue
        if row.causal not in (None, "causal" in variant.flags or "local" in variant.flags):
            continue
        if row.longest is not None and _most(p, row.config) > row.longest:
            continue
        if isinstance(row.config, BwdSm90Config) and not row.config.serves(variant.head_dim, variant.head_dim_v):
            continue
        smem_bytes = max(v.smem_bytes for v in (variant, *companions(variant, row)))
        if smem_bytes <= device.smem_bytes:
            return variant, row
        too_big = too_big or f"; {variant.name} would need {smem_bytes} bytes of shared memory and a block has {device.smem_bytes}"
    raise UnsupportedError(
        f"no kernel for {p.dtype} with head_dim {p.head_dim} and head_dim_v {p.head_dim_v} on sm_{device.arch}{too_big}",
        (f"architectures served: {', '.join(f'sm_{arch}' for arch in KNOWN)}",),
    )


def _most(p: AttentionProblem, config: Config) -> int:
    """How many keys a row sees at most; for the backward on Hopper how many rows, of all query heads that read it, see a key. Of packed
    sequences as many as the caller says or, without a word, twice their mean."""
    if isinstance(config, BwdSm90Config):
        most, hint, heads = p.seqlen_q, p.longest_q, p.num_heads_q // p.num_heads_kv
    else:
        most, hint, heads = p.seqlen_k, p.longest_k, 1
    if p.packed:
        most = min(most, _ceil_div(2 * most, max(p.batch, 1)) if hint is None else hint)
    if p.window_left is not None and p.window_right is not None:
        most = min(most, p.window_left + 1 + p.window_right)
    return most * heads


def _variant(p: AttentionProblem, row: Row) -> Variant:
    # mma.sync and wgmma multiply 16 wide, rows of bytes 32 at a time, and a warp of fwd_simple holds 32 elements a register: tiles are
    # padded, the true D stays a parameter.
    latent = isinstance(row.config, DecodeConfig) and row.config.latent  # whose tiles are panels of 64, of values twice as many
    step = 64 if latent else 32 if isinstance(row.config, SimpleConfig | DecodeConfig) else 16
    flags = _flags(p) if _aligned(p) or isinstance(row.config, SimpleConfig) else tuple(sorted((*_flags(p), "unaligned")))
    head_dim = _round_up(p.head_dim, step)
    if isinstance(row.config, BwdSm90Config):
        head_dim = row.config.width(head_dim)
    return Variant(row.family, p.dtype, head_dim, _round_up(p.head_dim_v, 2 * step if latent else step), flags, row.config)


def _aligned(p: AttentionProblem) -> bool:
    """Whether rows are whole 16-byte loads, and none ends inside one."""
    return p.aligned16 and p.head_dim % 8 == 0 and p.head_dim_v % 8 == 0


def _flags(p: AttentionProblem) -> tuple[str, ...]:
    """The options that change the instruction stream, sorted; a bias or sink of the inputs' dtype needs no name of its own."""
    on = {
        "alibi": p.alibi,
        "bias": p.bias is not None and p.bias == p.dtype,
        "biasf32": p.bias is not None and p.bias != p.dtype,
        "causal": p.window_left is None and p.window_right == 0,
        "local": p.window_left is not None or p.window_right not in (None, 0),
        "lse": p.write_lse,
        "mask": p.mask,
        "packed": p.packed,
        f"out{p.out_dtype}": p.out_dtype != p.dtype,
        "sink": p.sink is not None and p.sink == p.dtype,
        "sinkf32": p.sink is not None and p.sink != p.dtype,
        "softcap": p.softcap is not None,
        "used": p.seqused_q or p.seqused_k,
    }
    return tuple(flag for flag, used in sorted(on.items()) if used)


def _buffers(p: AttentionProblem) -> dict[str, bool]:
    return {
        "q": True,
        "k": True,
        "v": True,
        "out": True,
        "lse": p.write_lse,
        "bias": p.bias is not None,
        "mask": p.mask,
        "alibi_slopes": p.alibi,
        "sink": p.sink is not None,
        "seqused_q": p.seqused_q,
        "seqused_k": p.seqused_k,
    }


def _num_tiles(p: AttentionProblem, variant: Variant) -> int:
    """Blocks of a one-dimensional grid, which may be 2^31 - 1 long; y and z end at 65535, fewer than some batch x heads."""
    heads = p.num_heads_q * (1 if p.packed else p.batch)
    if isinstance(variant.config, FwdConfig | Sm90Config):
        return _grid(variant, _num_blocks(p, p.seqlen_q, variant.config.block_m) * heads)
    if isinstance(variant.config, KeysOutsideConfig):
        return _grid(variant, heads)
    return _blocks_of(variant, p.seqlen_q * heads)


def _num_blocks(p: AttentionProblem, length: int, size: int) -> int:
    """Blocks of rows or keys of a head; at most, where sequences are packed."""
    return _most_tiles(length, p.batch, size) if p.packed else _ceil_div(length, size)


def _has_panels(variant: Variant) -> bool:
    """Whether the sums of dq lie in panels of 64 rows and columns: each of two warpgroups has its columns."""
    return variant.family == "bwd_sm90" and variant.head_dim == 128


def _sum_rows(p: AttentionProblem, variant: Variant) -> int:
    """Rows that the sums of dq have of a head, of which blocks of 64 are whole. Packed: each sequence, and what lies before and behind them
    all, begins with a tile, or panel, of its own: `sum_rows_before` in work.cuh."""
    whole = 64 if not p.packed or _has_panels(variant) else 16
    return _round_up(p.seqlen_q, whole) + (whole * (p.batch + 1) + 64 - whole if p.packed else 0)


def _listed(launches: tuple[_Launch, ...]) -> tuple[int, int]:
    """How many rows the tiles have that a kernel takes from the list of blocks of rows, and how many keys those of the other list."""
    rows = [v.config.block_m for v, _, _ in launches if isinstance(v.config, BwdRowsConfig)]
    keys = [v.config.block_n for v, _, _ in launches if isinstance(v.config, BwdConfig | BwdSm90Config) and v.family != "bwd_convert"]
    return (rows or [0])[0], (keys or [0])[0]


def _most_tiles(tokens: int, sequences: int, size: int) -> int:
    """How many tiles packed sequences have at most: `most_tiles` in work.cuh."""
    return tokens // size + min(sequences + 2, tokens)


def _list_bytes(p: AttentionProblem, tiles: tuple[int, int]) -> dict[str, int]:
    """Of each TileList in work.cuh."""
    sides = {"row_tiles": (tiles[0], p.seqlen_q, p.num_heads_q), "key_tiles": (tiles[1], p.seqlen_k, p.num_heads_kv)}
    return {name: 16 + 32 * heads * _most_tiles(tokens, p.batch, size) for name, (size, tokens, heads) in sides.items() if size}


def _listing(p: AttentionProblem, tiles: tuple[int, int], args: tuple[str, ...], more: tuple[str, ...] = ()) -> Step:
    """The kernel before those whose tiles it lists: a block for each head and list. It takes any mask as a window."""
    flags = tuple(sorted(("local", "packed", "used", *more)))
    variant = Variant("packed_tiles", "float32", 0, 0, flags, SimpleConfig(8))
    blocks = (p.num_heads_q if tiles[0] else 0) + (p.num_heads_kv if tiles[1] else 0)
    return Step(variant, (blocks, 1, 1), variant.threads, 0, args, "the order of the tiles")


def _ceil_div(n: int, step: int) -> int:
    return -(-n // step)


def _round_up(n: int, step: int) -> int:
    return _ceil_div(n, step) * step
