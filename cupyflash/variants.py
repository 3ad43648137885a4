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


class Sm90Config(NamedTuple):
    """The Hopper forward: a warpgroup that copies, and one for each 64 of block_m query rows that walks block_n keys at a time."""

    block_m: int
    block_n: int
    stages: int  # tiles of K and of V
    stages_q: int = 1
    ping_pong: bool = False  # warpgroups take turns at the tensor cores
    persistent: bool = False  # one block an SM, which computes tile after tile
    cluster: int = 1  # blocks of neighbouring rows that copy K and V for each other

    @property
    def warps(self) -> int:
        return 4 * (1 + self.block_m // 64)

    @property
    def tile(self) -> str:
        extras = "p" * self.ping_pong + "t" * self.persistent + "c2" * (self.cluster == 2)
        return f"m{self.block_m}n{self.block_n}s{self.stages}q{self.stages_q}{extras}"


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


Config = SimpleConfig | FwdConfig | Sm90Config | BwdRowsConfig | BwdBiasConfig | BwdConfig


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
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        c = self.config
        if isinstance(c, Sm90Config):  # panels of 64 columns; then the barriers, and up to the next kilobyte
            keys = c.stages * c.block_n * (_panel_bytes(self.head_dim) + _panel_bytes(self.head_dim_v))
            queries = c.stages_q * c.block_m * _panel_bytes(self.head_dim)
            return -(-(queries + keys + 8 * (2 * c.stages_q + 4 * c.stages)) // 1024) * 1024
        if c is None or isinstance(c, SimpleConfig):
            return 0
        row, key = c.block_m * _pitch_bytes(self.head_dim), c.block_n * _pitch_bytes(self.head_dim)  # Q and K
        row_v, key_v = c.block_m * _pitch_bytes(self.head_dim_v), c.block_n * _pitch_bytes(self.head_dim_v)  # dO and V
        if isinstance(c, FwdConfig):
            return row + c.stages * (key + key_v)
        if isinstance(c, BwdRowsConfig):
            return row + row_v + c.stages * (key + key_v)
        if isinstance(c, BwdBiasConfig):
            return row + row_v + key + key_v + c.block_m * c.block_n * 4
        weights = 2 * c.block_m * _pitch_bytes(c.block_n)  # P and dS
        vectors = c.stages * c.block_m * 2 * 4  # reference and delta
        return key + key_v + c.stages * (row + row_v) + weights + vectors


def _pitch_bytes(width: int) -> int:
    """A row of a tile of 16-bit elements: swizzled where it is a multiple of 128 bytes, else padded by 16 (tile.cuh)."""
    return 2 * width + (0 if width % 64 == 0 else 16)


def _panel_bytes(width: int) -> int:
    """A row of a tile of 16-bit elements as tensor maps with 128-byte swizzle write it (wgmma.cuh)."""
    return -(-width // 64) * 128


_SHORT = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}


# What the rows that are not for `options` serve: nothing else joins the score, and every row of memory can be read 16 bytes at a time.
PLAIN = frozenset({"causal", "lse"})


class Row(NamedTuple):
    """One line of a table. It fits a problem whose head dims are at most `head_dim`, on a device of `capability` or newer that has the
    shared memory; only with `options` does it serve flags beyond PLAIN."""

    family: str
    dtypes: tuple[str, ...]
    head_dim: int
    capability: int
    options: bool
    config: Config
    why: str
    arch: str | None = None  # the only one that has its instructions
    causal: bool | None = None  # only causal calls, only others, or any
    dq: BwdRowsConfig | None = None  # of the kernel that a tiled backward has for dq alone


_HALF = ("float16", "bfloat16")
_ANY = ("float16", "bfloat16", "float32", "float64")


def _sm80(head_dim: int, options: bool, block_m: int, block_n: int, warps: int, why: str) -> Row:
    return Row("fwd_sm80", _HALF, head_dim, 80, options, FwdConfig(block_m, block_n, 2, warps), why)


def _sm90(head_dim: int, options: bool, block_m: int, block_n: int, why: str, causal: bool | None = None) -> Row:
    return Row("fwd_sm90", _HALF, head_dim, 90, options, Sm90Config(block_m, block_n, 2), why, "90a", causal)


# TFLOP/s are of an H200 (2026-11-29, bf16, one batch, S = 16384, heads x D = 2048, not causal), all rows of a width and torch's FA2 in one
# process. Spills are in the prologue and in what is read once a key block.
FORWARD = (
    _sm90(64, False, 192, 112, "543, against 513 for 192x128 with a row maximum in the loop; cuDNN 447"),
    _sm90(96, False, 128, 128, "not measured"),
    _sm90(128, False, 192, 80, "726, against 692 for 128x128 and 675 for 128x176; cuDNN 588", causal=False),
    _sm90(128, False, 128, 128, "673, against 640 for 192x80 and 666 for 128x176; cuDNN 510", causal=True),
    _sm90(192, False, 128, 112, "not measured"),
    _sm90(256, False, 128, 80, "722; cuDNN 614"),
    _sm90(128, True, 128, 128, "the same: all options together leave it without spills"),
    _sm90(256, True, 128, 48, "what all options together leave without spills"),
    _sm80(32, False, 128, 64, 4, "242, against 237 for 128x128; FA2 222"),
    _sm80(64, False, 128, 128, 4, "342, and 349 causal where 128x96 has 334, in spite of 20 to 44 bytes of spills; FA2 308"),
    _sm80(96, False, 128, 48, 4, "343, against 314 for 128x64 and 313 for 128x96; FA2 338"),
    _sm80(128, False, 128, 64, 4, "397, against 375 for 256x64 with 8 warps, in spite of 48 to 56 bytes of spills; FA2 357"),
    _sm80(192, False, 128, 32, 4, "339, against 299 for 128x64 with 8 warps and 210 for 64x64, in spite of 108 bytes of spills; FA2 326"),
    _sm80(256, False, 128, 64, 8, "301, against 250 for 128x32 and 229 for 64x64 with 4 warps; FA2 329; 196 kB of shared memory"),
    _sm80(128, True, 64, 64, 4, "the most that all options together leave without spills"),
    _sm80(256, True, 64, 32, 4, "the same at 256; 96 kB, for SMs of 100 kB as well"),
    Row("fwd_simple", _ANY, MAX_HEAD_DIM, 0, True, SimpleConfig(4), "one warp a row needs no tile to fit: for every dtype and GPU"),
)


def _bwd_sm80(head_dim: int, capability: int, options: bool, keys: str, rows: str, why: str) -> Row:
    """`keys` and `rows` are tiles as in the names of kernels: m64n64s2w4g222b2 of bwd_sm80, m128n32s2w4b2 of bwd_sm80_dq."""
    m, n, stages, warps, grids, blocks = map(int, re.findall(r"\d+", keys))
    grid_m, grid_n, grid_q = map(int, str(grids))
    config = BwdConfig(m, n, stages, warps, grid_m, grid_n, grid_q, blocks)
    return Row("bwd_sm80", _HALF, head_dim, capability, options, config, why, dq=BwdRowsConfig._make(map(int, re.findall(r"\d+", rows))))


# The kernel that computes dq, dk, dv and dbias; bwd_delta runs before it and bwd_sum after it, where sums over rows are asked for. A row of
# bwd_sm80 may launch bwd_sm80_dq, bwd_sm80_dbias and bwd_convert besides. Of one width the first that fits the shared memory: 228 kB an SM
# (Hopper and B200), 164 (A100) or 100 (sm_86, 89 and 120).
BACKWARD = (
    _bwd_sm80(32, 80, False, "m128n64s2w4g242b2", "m128n48s2w4b2", "not measured"),
    _bwd_sm80(64, 90, False, "m64n64s2w4g222b3", "m128n32s2w4b2", "not measured"),
    _bwd_sm80(64, 80, False, "m64n64s2w4g222b2", "m128n32s2w4b2", "not measured"),
    _bwd_sm80(96, 80, False, "m64n64s2w4g222b2", "m128n32s2w4b2", "not measured; spills 16 bytes, on Blackwell up to 28 bytes"),
    _bwd_sm80(128, 90, False, "m64n64s2w4g222b2", "m128n32s2w4b2", "not measured; on Blackwell dq alone spills up to 40 bytes"),
    _bwd_sm80(128, 80, False, "m64n128s2w8g242b1", "m128n32s2w4b2", "not measured; 165 kB"),
    _bwd_sm80(192, 80, False, "m64n64s2w8g242b1", "m128n32s2w8b1", "not measured; 165 kB"),
    _bwd_sm80(256, 80, False, "m64n64s2w8g222b1", "m128n32s2w8b1", "not measured; 214 kB; on Blackwell it spills up to 24 bytes"),
    _bwd_sm80(64, 80, True, "m64n64s2w4g222b2", "m128n32s2w4b2", "not measured"),
    _bwd_sm80(128, 90, True, "m64n64s2w4g222b2", "m64n64s2w4b2", "not measured; a bias alone spills 88 bytes"),
    _bwd_sm80(128, 80, True, "m32n64s2w4g222b2", "m64n64s2w4b2", "not measured; 98 kB, for SMs of 100 kB as well"),
    _bwd_sm80(256, 80, True, "m64n64s2w8g222b1", "m128n32s2w8b1", "not measured; 214 kB; on Blackwell it spills up to 104 bytes"),
    _bwd_sm80(256, 80, True, "m32n64s2w8g222b1", "m64n32s2w4b2", "not measured; 140 kB"),
    _bwd_sm80(256, 80, True, "m32n32s1w4g212b2", "m64n16s2w4b2", "not measured; 98 kB, for SMs of 100 kB as well"),
    Row("bwd_simple", _ANY, MAX_HEAD_DIM, 0, True, SimpleConfig(4), "one warp a row needs no tile to fit: for every dtype and GPU"),
)
