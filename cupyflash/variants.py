"""The compiled forms of attention: their configurations, their names, and the tables that choose among them.

A Variant holds all that the compiled code depends on and nothing that is a run-time number. A table is read top to bottom, the first
row that fits wins; `why` is the reason for the row, and where it was measured the chip and the number.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_HEAD_DIM = 256


class SimpleConfig(NamedTuple):
    """`fwd_simple` and its like: one warp computes one row of a result; `warps` of them share a block only to fill the SM."""

    warps: int

    @property
    def tile(self) -> str:
        return f"w{self.warps}"


class FwdConfig(NamedTuple):
    """A tiled forward: a block of `warps` warps walks block_n keys at a time for block_m query rows; K and V have `stages` buffers."""

    block_m: int
    block_n: int
    stages: int
    warps: int

    @property
    def tile(self) -> str:
        return f"m{self.block_m}n{self.block_n}s{self.stages}w{self.warps}"


class KeysOutsideConfig(NamedTuple):
    """`fwd_keys_outside`: a block keeps `stages` x block_n keys, and all query rows of a head pass by, block_m at a time, 16 a warp."""

    block_m: int
    block_n: int
    stages: int

    @property
    def warps(self) -> int:
        return self.block_m // 16

    @property
    def kept(self) -> int:
        """Keys that are in shared memory at once."""
        return self.stages * self.block_n

    @property
    def tile(self) -> str:
        return f"m{self.block_m}n{self.block_n}s{self.stages}"


class Sm90Config(NamedTuple):
    """The Hopper forward: a warpgroup that copies, and one for each 64 of block_m query rows that walks block_n keys at a time."""

    block_m: int
    block_n: int
    stages: int  # tiles of K and of V
    stages_q: int = 1
    ping_pong: bool = False  # warpgroups take turns at the tensor cores
    own_out: bool = False  # rows leave through memory of their own, so that Q's is free for the next tile after the last product
    page_rows: int = 0  # of a cache in pages: keys that are copied at once

    @property
    def warps(self) -> int:
        return 4 * (1 + self.block_m // 64)

    @property
    def tile(self) -> str:
        extras = "p" * self.ping_pong + "o" * self.own_out + f"r{self.page_rows}" * (self.page_rows > 0)
        return f"m{self.block_m}n{self.block_n}s{self.stages}q{self.stages_q}{extras}"


class DecodeConfig(NamedTuple):
    """`decode`: a tile of block_m query rows, against which each of `warps` warps walks block_n keys of its own at a time, kept in `stages`
    buffers. `blocks` of them share an SM; `decode_cluster` has `cluster` of them in a cluster; of `latent_sm90` all warps have all keys."""

    block_m: int
    block_n: int
    stages: int
    warps: int
    blocks: int
    cluster: int = 1
    latent: bool = False

    @property
    def tile(self) -> str:
        return f"m{self.block_m}n{self.block_n}s{self.stages}w{self.warps}b{self.blocks}" + f"c{self.cluster}" * (self.cluster > 1)

    @property
    def unit(self) -> int:
        """Keys that a block takes at a time."""
        return self.block_n * (1 if self.latent else self.warps)


class BwdRowsConfig(NamedTuple):
    """`bwd_sm80_dq`: a block of `warps` warps walks block_n keys at a time for block_m query rows; K and V have `stages` buffers. Registers
    are kept to what lets `blocks` blocks share an SM."""

    block_m: int
    block_n: int
    stages: int
    warps: int
    blocks: int

    @property
    def tile(self) -> str:
        return f"m{self.block_m}n{self.block_n}s{self.stages}w{self.warps}b{self.blocks}"


class BwdBiasConfig(NamedTuple):
    """`bwd_sm80_dbias`: a block of `warps` warps, warps_m of them along the query rows, for block_m x block_n elements."""

    block_m: int
    block_n: int
    warps: int
    warps_m: int

    @property
    def tile(self) -> str:
        return f"m{self.block_m}n{self.block_n}w{self.warps}g{self.warps_m}"


class BwdConfig(NamedTuple):
    """`bwd_sm80`: a block of `warps` warps walks block_m query rows at a time for block_n keys; Q and dO have `stages` buffers.

    The warps share each product by rows and columns: S and dP have warps_m of them along the query rows, dK and dV warps_n along the keys,
    dQ warps_q along the query rows. Registers are kept to what lets `blocks` blocks share an SM.
    """

    block_m: int
    block_n: int
    stages: int
    warps: int
    warps_m: int
    warps_n: int
    warps_q: int
    blocks: int

    @property
    def tile(self) -> str:
        return f"m{self.block_m}n{self.block_n}s{self.stages}w{self.warps}g{self.warps_m}{self.warps_n}{self.warps_q}b{self.blocks}"

    @property
    def bias(self) -> BwdBiasConfig:
        """The tile of `bwd_sm80_dbias`: 16 x 16 elements of it are the least that a warp can have."""
        return BwdBiasConfig(self.block_m, self.block_n, min(8, self.block_m * self.block_n // 256), 2)


class BwdSm90Config(NamedTuple):
    """`bwd_sm90`: a warpgroup that copies, and two with 64 of block_n keys each, whom block_m query rows at a time pass by; Q and dO have
    `stages` buffers. `bwd_sm90_wide`: the two share the products of 64 keys."""

    block_m: int
    block_n: int
    stages: int
    key_buffers: int = 1  # two, for short walks: K and V of the next tile are there when it begins

    @property
    def warps(self) -> int:
        return 12

    @property
    def tile(self) -> str:
        return f"m{self.block_m}n{self.block_n}s{self.stages}" + "k2" * (self.key_buffers == 2)

    @property
    def wide(self) -> bool:
        return self.block_n == 64

    def serves(self, head_dim: int, head_dim_v: int = 0) -> bool:
        """Of dQ a warpgroup computes 64 rows, of any width up to 64 columns, or 64 of 128 columns; of wide heads 64 once or twice."""
        if self.wide:
            return head_dim > 64 and max(head_dim, head_dim_v) > 128
        return (head_dim <= 64) == (self.block_m == 128)

    def width(self, head_dim: int) -> int:
        """Of the tiles of Q, K and dQ."""
        return head_dim if self.wide or self.block_m == 128 else 128


Forward = SimpleConfig | FwdConfig | KeysOutsideConfig | Sm90Config | DecodeConfig
Config = Forward | BwdRowsConfig | BwdBiasConfig | BwdConfig | BwdSm90Config


class Variant(NamedTuple):
    """head_dim and head_dim_v are the widths of the tiles: the true ones, rounded up to what the family computes in; 0 for a kernel whose
    code does not depend on them."""

    family: str
    dtype: str
    head_dim: int
    head_dim_v: int
    flags: tuple[str, ...] = ()  # sorted
    config: Config | None = None  # the host path has none

    @property
    def name(self) -> str:
        """The name everywhere: errors, test ids, bench rows, profiles. Family, data, tile, flags that are on."""
        dims = f"d{self.head_dim}" if self.head_dim == self.head_dim_v else f"d{self.head_dim}v{self.head_dim_v}"
        parts = [self.family, f"{_SHORT[self.dtype]}_{dims}" if self.head_dim else _SHORT[self.dtype]]
        if self.config is not None:
            parts.append(self.config.tile)
        if self.flags:
            parts.append("_".join(self.flags))
        return "__".join(parts)

    @property
    def threads(self) -> int:
        return 32 * self.config.warps if self.config is not None else 0

    @property
    def quantised(self) -> bool:
        """Whether K and V are a cache of 8-bit numbers."""
        return any(flag.startswith("cached") for flag in self.flags)

    @property
    def store_map(self) -> bool:
        """Whether the tensor memory accelerator writes the result: through the memory of Q's tile, where it must fit."""
        half = not {"outfloat32", "outfloat64"} & set(self.flags)
        return isinstance(self.config, Sm90Config) and half and _panel_bytes(self.head_dim_v) <= _panel_bytes(self.head_dim)

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        c = self.config
        if isinstance(c, Sm90Config):  # panels of 64 columns; then barriers and works, and up to the next kilobyte
            keys = c.stages * c.block_n * (_panel_bytes(self.head_dim) + _panel_bytes(self.head_dim_v))
            queries = c.stages_q * c.block_m * _panel_bytes(self.head_dim)
            results = c.block_m // 2 * _panel_bytes(self.head_dim_v) if c.own_out else 1024  # 8 rows a warp of 16
            works = 3 * 80 if "packed" in self.flags else 2 * 64  # Work in work.cuh
            return -(-(queries + keys + results + 8 * (2 * c.stages_q + 4 * c.stages + 1) + works) // 1024) * 1024
        if isinstance(c, BwdSm90Config):  # as above; dS, P of wide heads, LSE and delta, barriers
            operands = (c.key_buffers * c.block_n + c.stages * c.block_m) * (_panel_bytes(self.head_dim) + _panel_bytes(self.head_dim_v))
            weights = (2 if c.wide or c.key_buffers == 2 else 3) * c.block_m * _panel_bytes(c.block_n) + c.wide * c.block_m * c.block_n * 4
            sums = 0 if c.wide else 4 * c.block_m * self.head_dim
            rest = c.stages * c.block_m * 2 * 4 + 8 * (3 * c.key_buffers + 4 * c.stages + 7)
            return -(-(operands + weights + sums + rest) // 1024) * 1024
        if c is None or isinstance(c, SimpleConfig) or self.family == "latent_merge":
            return 0
        row, row_v = c.block_m * _pitch_bytes(self.head_dim), c.block_m * _pitch_bytes(self.head_dim_v)  # Q and dO
        narrow = 2 if self.quantised else 1  # K and V of 8 bits are tiles half as wide
        key, key_v = c.block_n * _pitch_bytes(self.head_dim // narrow), c.block_n * _pitch_bytes(self.head_dim_v // narrow)
        if isinstance(c, FwdConfig):
            return row + c.stages * (key + key_v)
        if isinstance(c, KeysOutsideConfig):
            return 2 * row + c.stages * (key + key_v)
        if isinstance(c, DecodeConfig) and c.latent:  # O lies in place of the buffers, P in them; references, sums, barriers; shares
            rest = 6 * c.block_m * 4 + 4 * 8 + (c.warps + 4 + -(-c.block_m // 32)) * 4
            operands = (c.block_m + c.stages * c.block_n) * _panel_bytes(self.head_dim)
            return _round_up(operands + rest, 1024)
        if isinstance(c, DecodeConfig):  # in place of the buffers, O of the warps in float; references, sums, shares
            merged = c.warps * c.block_m * (self.head_dim_v + 8) * 4
            rest = c.warps * (2 * c.block_m + 1) * 4 + 20 + 3 * c.block_m * 4
            return _round_up(row + max(c.warps * c.stages * (key + key_v), _round_up(merged, 128)) + rest, 128)
        if isinstance(c, BwdRowsConfig):
            return row + row_v + c.stages * (key + key_v)
        if isinstance(c, BwdBiasConfig):
            return row + row_v + key + key_v + c.block_m * c.block_n * 4
        weights = 2 * c.block_m * _pitch_bytes(c.block_n)  # P and dS
        vectors = c.stages * c.block_m * 2 * 4  # reference and delta
        return key + key_v + c.stages * (row + row_v) + weights + vectors


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step


def _pitch_bytes(width: int) -> int:
    """A row of a tile of 16-bit elements: swizzled where it is a multiple of 128 bytes, else padded by 16 (tile.cuh)."""
    return 2 * width + (0 if width % 64 == 0 else 16)


def _panel_bytes(width: int) -> int:
    """A row of a tile of 16-bit elements as tensor maps with 128-byte swizzle write it (wgmma.cuh)."""
    return -(-width // 64) * 128


_SHORT = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}


# What the rows that are not for `options` serve: nothing else joins the score, and every row of memory can be read 16 bytes at a time. In
# fwd_sm90 a window, a sink and used lengths take no registers from the loop.
PLAIN = {
    "fwd_sm80": frozenset({"causal", "lse", "packed"}),
    "fwd_keys_outside": frozenset({"causal", "lse"}),
    "fwd_sm90": frozenset({"causal", "lse", "local", "packed", "sink", "sinkf32", "used"}),
    "bwd_sm80": frozenset({"causal", "packed"}),
    "bwd_sm90": frozenset({"causal", "local", "packed", "sink", "sinkf32"}),
    "bwd_sm90_wide": frozenset({"causal", "local", "packed", "sink", "sinkf32"}),
}


class Row(NamedTuple):
    """One line of a table. It fits a problem whose head dims are at most `head_dims`, on a device of `capability` or newer that has the
    shared memory; only with `options` does it serve flags beyond its family's PLAIN."""

    family: str
    dtypes: tuple[str, ...]
    head_dim: int
    capability: int
    options: bool
    config: Config
    why: str
    arch: str | None = None  # the only one that has its instructions
    causal: bool | None = None  # only calls under a causal mask or a window, only others, or any
    longest: int | None = None  # only calls of which a row sees at most so many keys, or that many rows a key
    narrow_v: int | None = None  # only values of at most so many columns
    dq: BwdRowsConfig | None = None  # of bwd_sm80_dq, for calls whose dq is not added up by atomics

    @property
    def head_dims(self) -> tuple[int, int]:
        """The widest it serves: (head_dim, head_dim_v)."""
        return self.head_dim, self.narrow_v or self.head_dim


_HALF = ("float16", "bfloat16")
_ANY = ("float16", "bfloat16", "float32", "float64")


def _sm80(head_dim: int, options: bool, block_m: int, block_n: int, warps: int, why: str) -> Row:
    return Row("fwd_sm80", _HALF, head_dim, 80, options, FwdConfig(block_m, block_n, 2, warps), why)


def _sm90(
    head_dim: int,
    options: bool,
    config: Sm90Config,
    why: str,
    causal: bool | None = None,
    longest: int | None = None,
    narrow_v: int | None = None,
) -> Row:
    return Row("fwd_sm90", _HALF, head_dim, 90, options, config, why, "90a", causal, longest, narrow_v)


# With two tiles of Q; with one of Q, and rows of O in memory of their own. Ping-pong: `turns`.
def _two_q(block_m: int, block_n: int, stages: int = 2, turns: bool = False) -> Sm90Config:
    return Sm90Config(block_m, block_n, stages, 2, turns)


def _own_out(block_m: int, block_n: int, stages: int = 2, turns: bool = False) -> Sm90Config:
    return Sm90Config(block_m, block_n, stages, 1, turns, own_out=True)


# TFLOP/s are of an H200 (2026-11-30, bf16, 16384 tokens, S = 16384 where nothing else is said, heads x D = 2048; those of fwd_sm80 not
# causal), all rows of a width and the peer in one process. Spills are in the prologue and in what is read once a key block.
FORWARD = (
    _sm90(64, False, _own_out(256, 64, 3, turns=True), "570; 562 for 192x128; at S = 1024 509 and 433; FA3 535, cuDNN 401", causal=False),
    _sm90(64, False, _own_out(256, 64, 3), "532; 514 for 192x96; at S = 1024 384 and 319; FA3 511, cuDNN 309", causal=True),
    _sm90(96, False, _two_q(192, 64, 3, turns=True), "642; 654 for 192x80; at S = 512 431 and 391; FA3 502 and 370", causal=False),
    _sm90(96, False, _two_q(192, 64, 3), "at S = 1024 375, 344 for 192x80; FA3 346", causal=True, longest=2048),
    _sm90(96, False, _two_q(192, 80), "595; 577 for 128x128, 565 for 192x64; FA3 495", causal=True),
    _sm90(128, False, _two_q(128, 96, 3), "at S = 1024 589, 568 for 192x64; FA3 552", causal=False, longest=1024),
    _sm90(128, False, _two_q(192, 64, 3, turns=True), "725; 726 for 192x80; at S = 2048 673 and 669; FA3 658 and 604", causal=False),
    _sm90(128, False, _two_q(192, 64, 4), "at S = 1024 440; 433 with three stages, 409 for 192x80; FA3 442", causal=True, longest=2048),
    _sm90(128, False, _two_q(192, 80), "723; 701 for 192x64; at S = 4096 620 and 613; FA3 696 and 620", causal=True),
    _sm90(192, False, _own_out(128, 96), "772; 752 for 192x64; at S = 1024 627 and 587; FA3 620 and 484", causal=False, narrow_v=128),
    _sm90(192, False, _own_out(192, 64), "696; 665 for 128x96; at S = 1024 432 and 402; FA3 626 and 391", causal=True, narrow_v=128),
    _sm90(192, False, _own_out(128, 64), "739, as all others; at S = 1024 626, 621 for 128x96; FA3 708 and 561", causal=False),
    _sm90(192, False, _own_out(128, 64), "at S = 2048 545, 537 for 128x96; FA3 532", causal=True, longest=2048),
    _sm90(192, False, _own_out(128, 80), "688; 675 for 128x64; at S = 4096 621 and 603; FA3 714 and 627", causal=True),
    _sm90(256, False, _own_out(128, 64), "756; 754 for 128x80; at S = 1024 633; FA3 743 and 613", causal=False),
    _sm90(256, False, _own_out(128, 64), "at S = 4096 640 and 634; FA3 627", causal=True, longest=8192),
    _sm90(256, False, Sm90Config(128, 80, 2), "731; 720 for 128x64; FA3 733", causal=True),
    # With ALiBi under a causal mask at 16k, and with a bias at S = 4096.
    _sm90(64, True, _own_out(192, 64, 3), "367 and 102; 331 and 61 for 128x80; all options together leave it without spills"),
    _sm90(128, True, _two_q(128, 96), "540 and 126; 519 and 116 for 128x80; all options together leave it without spills"),
    _sm90(256, True, _own_out(128, 48), "603 and 236; 506 and 241 for 128x32; a bias alone spills 92 bytes, all options together none"),
    _sm80(32, False, 128, 64, 4, "242, against 237 for 128x128; FA2 222"),
    _sm80(64, False, 128, 128, 4, "342, and 349 causal where 128x96 has 334, in spite of 16 to 24 bytes of spills (sm_100: 84); FA2 308"),
    _sm80(96, False, 128, 48, 4, "343, against 314 for 128x64 and 313 for 128x96; FA2 338"),
    _sm80(128, False, 128, 64, 4, "397, against 375 for 256x64 with 8 warps, in spite of 28 to 56 bytes of spills; FA2 357"),
    _sm80(192, False, 128, 32, 4, "339, against 299 for 128x64 with 8 warps and 210 for 64x64, with 40 to 100 bytes of spills; FA2 326"),
    _sm80(256, False, 128, 64, 8, "301, against 250 for 128x32 and 229 for 64x64 with 4 warps; FA2 329; 196 kB of shared memory"),
    _sm80(128, True, 64, 64, 4, "the most that all options together leave without spills"),
    _sm80(256, True, 64, 32, 4, "the same at 256; 96 kB, for SMs of 100 kB as well"),
    Row("fwd_simple", _ANY, MAX_HEAD_DIM, 0, True, SimpleConfig(4), "one warp a row needs no tile to fit: for every dtype and GPU"),
)


def _keys_outside(head_dim: int, block_m: int, block_n: int, stages: int, why: str) -> Row:
    return Row("fwd_keys_outside", _HALF, head_dim, 80, False, KeysOutsideConfig(block_m, block_n, stages), why)


# For comparison alone: no call comes to these but where a timing asks for their family (only_family in bench/kernels.py). Not measured.
LESSON = (
    _keys_outside(64, 128, 64, 8, "512 keys are what 164 kB have room for"),
    _keys_outside(64, 128, 64, 4, "256 keys, for SMs of 100 kB"),
    _keys_outside(128, 128, 64, 4, "256 keys are what 228 kB have room for"),
    _keys_outside(128, 64, 64, 2, "128 keys, for SMs of 100 kB as well"),
)

# Over caches. Heads of 576, values of 512: the latent attention of DeepSeek-V3 (arXiv 2412.19437) with its projections absorbed, 512 latent
# columns, which are the values too, and 64 rotated ones.
CACHED = (
    Row(
        *("fwd_simple", _ANY, 576, 0, True, SimpleConfig(4)),
        "one warp a row needs no tile to fit: for every dtype, cache and GPU; float64 spills up to 24 bytes at 576",
        narrow_v=512,
    ),
)


def _decode(head_dim: int, config: DecodeConfig, why: str) -> Row:
    return Row("decode", _HALF, head_dim, 80, True, config, why)


def _cluster(head_dim: int, config: DecodeConfig, why: str) -> tuple[Row, ...]:
    """In clusters of three sizes."""
    sizes = (config._replace(cluster=n) for n in (16, 8, 4))
    return tuple(Row("decode_cluster", _HALF, head_dim, 90, True, c, why, "90a", longest=8192) for c in sizes)


# Few query rows over many keys; of a cache of 8 bits tiles have twice as many (plan.py). Microseconds on an H200, bf16, one token, heads
# 32/8, as (batch, keys); cuDNN's beside them.
DECODE = (
    *_cluster(64, DecodeConfig(16, 32, 3, 4, 2), "not measured; the same as of 128"),
    *_cluster(128, DecodeConfig(16, 16, 3, 4, 2), "(1, 1k) 6.6, 8.1 without clusters, cuDNN 6.7; at 64k they are slower, 76 and 66"),
    *_cluster(256, DecodeConfig(16, 16, 2, 4, 1), "not measured; the same as of 128"),
    _decode(64, DecodeConfig(16, 32, 3, 4, 2), "(32, 8k) 123, 150 for 2 stages, 136 for 16 keys; cuDNN 119; (128, 8k) 472 as cuDNN"),
    _decode(128, DecodeConfig(16, 16, 3, 4, 2), "(32, 8k) 237, 267 for 3 blocks an SM; cuDNN 237; (128, 8k) 936 of 4.59 TB/s"),
    _decode(64, DecodeConfig(16, 32, 2, 4, 1), "not measured; 68 kB, for SMs of 100 kB"),
    _decode(128, DecodeConfig(16, 16, 2, 4, 1), "not measured; 70 kB, for SMs of 100 kB"),
    _decode(256, DecodeConfig(16, 16, 2, 4, 1), "(32, 8k) 468, 604 for 2 warps and 2 blocks an SM; cuDNN 635"),
    _decode(256, DecodeConfig(16, 16, 2, 2, 1), "not measured; 74 kB, for SMs of 100 kB; all options together spill 12 bytes on Blackwell"),
)


# Latent heads, whose values are the first columns of their keys, in an array of one key head or more.
LATENT = (
    Row(
        *("latent_sm90", _HALF, 576, 90, True, DecodeConfig(64, 64, 2, 12, 1, latent=True)),
        *("390 TFLOP/s at (32, 8k) of 128 heads; 218 kB; all options together spill 620 bytes", "90a"),
        narrow_v=512,
    ),
)


def _bwd_sm90(family: str, head_dim: int, config: BwdSm90Config, why: str, longest: int | None = None) -> Row:
    return Row(family, _HALF, head_dim, 90, False, config, why, "90a", longest=longest)


def _bwd_sm80(head_dim: int, capability: int, options: bool, keys: str, rows: str, why: str) -> Row:
    """`keys` and `rows` are tiles as in the names of kernels: m64n64s2w4g222b2 of bwd_sm80, m128n32s2w4b2 of bwd_sm80_dq."""
    m, n, stages, warps, grids, blocks = map(int, re.findall(r"\d+", keys))
    grid_m, grid_n, grid_q = map(int, str(grids))
    config = BwdConfig(m, n, stages, warps, grid_m, grid_n, grid_q, blocks)
    return Row("bwd_sm80", _HALF, head_dim, capability, options, config, why, dq=BwdRowsConfig._make(map(int, re.findall(r"\d+", rows))))


# The kernel that computes dq, dk, dv and dbias; bwd_delta runs before it and bwd_sum after it, where sums over rows are asked for. A row of
# bwd_sm80 may launch bwd_sm80_dq, bwd_sm80_dbias and bwd_convert besides. Of one width the first that fits the shared memory: 228 kB an SM
# (Hopper and B200), 164 (A100) or 100 (sm_86, 89 and 120). TFLOP/s as above (256: 2026-12-01), without a mask and causal.
BACKWARD = (
    # Their spills are in the thread that copies, which has 24 registers, in what a tile begins with, and where a key is computed again.
    _bwd_sm90("bwd_sm90", 64, BwdSm90Config(128, 128, 2, 2), "at S = 1024 1.5 %, at 2048 -2 and -3 % over one buffer; spills", 1024),
    _bwd_sm90("bwd_sm90", 64, BwdSm90Config(128, 128, 2), "533 and 530, 517 and 503 for two key buffers; cuDNN 434 and 412; spills"),
    _bwd_sm90("bwd_sm90", 128, BwdSm90Config(64, 128, 2), "611 and 598; at S = 1024 453 and 334; cuDNN 538, 519, 410 and 303; spills"),
    _bwd_sm90("bwd_sm90_wide", 192, BwdSm90Config(64, 64, 3), "513 and 509; FA2 255 and 269; 226 kB; spills"),
    _bwd_sm90("bwd_sm90_wide", 256, BwdSm90Config(64, 64, 2), "causal 438; at S = 1024 343 and 271; cuDNN 383, 295 and 247; spills"),
    _bwd_sm80(32, 80, False, "m128n64s2w4g242b2", "m128n48s2w4b2", "not measured"),
    _bwd_sm80(64, 90, False, "m64n64s2w4g222b3", "m128n32s2w4b2", "298 and 288; 290 and 281 for two blocks an SM; FA2 288 and 276"),
    _bwd_sm80(64, 80, False, "m64n64s2w4g222b2", "m128n32s2w4b2", "not measured"),
    _bwd_sm80(96, 80, False, "m64n64s2w4g222b2", "m128n32s2w4b2", "not measured; spills 16 bytes, on Blackwell up to 28 bytes"),
    _bwd_sm80(128, 80, False, "m64n128s2w8g242b1", "m128n32s2w4b2", "330, FA2 307; dq alone spills up to 40 bytes on Blackwell"),
    _bwd_sm80(192, 80, False, "m64n64s2w8g242b1", "m128n32s2w8b1", "not measured; 165 kB"),
    _bwd_sm80(256, 80, False, "m64n64s2w8g222b1", "m128n32s2w8b1", "250, FA2 263; 214 kB; on Blackwell it spills up to 36 bytes"),
    _bwd_sm80(64, 80, True, "m64n64s2w4g222b2", "m128n32s2w4b2", "not measured"),
    _bwd_sm80(128, 90, True, "m64n64s2w4g222b2", "m64n64s2w4b2", "not measured; a bias alone spills 88 bytes"),
    _bwd_sm80(128, 80, True, "m32n64s2w4g222b2", "m64n64s2w4b2", "not measured; 98 kB, for SMs of 100 kB, where up to 8 bytes of spills"),
    _bwd_sm80(256, 80, True, "m64n64s2w8g222b1", "m128n32s2w8b1", "not measured; 214 kB; on Blackwell it spills up to 104 bytes"),
    _bwd_sm80(256, 80, True, "m32n64s2w8g222b1", "m64n32s2w4b2", "not measured; 140 kB"),
    _bwd_sm80(256, 80, True, "m32n32s1w4g212b2", "m64n16s2w4b2", "not measured; 98 kB, for SMs of 100 kB as well"),
    Row("bwd_simple", _ANY, MAX_HEAD_DIM, 0, True, SimpleConfig(4), "one warp a row needs no tile to fit: for every dtype and GPU"),
)
