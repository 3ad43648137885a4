"""The compiled forms of attention: their configurations, their names, and the tables that choose among them.

A Variant holds all that the compiled code depends on and nothing that is a run-time number. A table is read top to bottom, the first
row that fits wins; `why` is the reason for the row, and where it was measured the chip and the number.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class SimpleConfig:
    """`fwd_simple`: one warp computes one query row; `warps` of them share a block only to fill the SM."""

    warps: int

    @property
    def tile(self) -> str:
        return f"w{self.warps}"


@dataclass(frozen=True)
class FwdConfig:
    """A tiled forward: a block of `warps` warps walks block_n keys at a time for block_m query rows; K and V have `stages` buffers."""

    block_m: int
    block_n: int
    stages: int
    warps: int

    @property
    def tile(self) -> str:
        return f"m{self.block_m}n{self.block_n}s{self.stages}w{self.warps}"


@dataclass(frozen=True)
class Variant:
    """head_dim and head_dim_v are the widths of the tiles: the true ones, rounded up to what the family computes in."""

    family: str
    dtype: str
    head_dim: int
    head_dim_v: int
    flags: tuple[str, ...] = ()  # sorted
    config: SimpleConfig | FwdConfig | None = None  # the host path has none

    @property
    def name(self) -> str:
        """The name everywhere: errors, test ids, bench rows, profiles. Family, data, tile, flags that are on."""
        dims = f"d{self.head_dim}" if self.head_dim == self.head_dim_v else f"d{self.head_dim}v{self.head_dim_v}"
        parts = [self.family, f"{_SHORT[self.dtype]}_{dims}"]
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
        """Dynamic shared memory of a block: the tile of Q, and `stages` tiles of K and of V."""
        c = self.config
        if not isinstance(c, FwdConfig):
            return 0
        keys = c.stages * c.block_n * (_pitch_bytes(self.head_dim) + _pitch_bytes(self.head_dim_v))
        return c.block_m * _pitch_bytes(self.head_dim) + keys


def _pitch_bytes(width: int) -> int:
    """A row of a tile of 16-bit elements: swizzled where it is a multiple of 128 bytes, else padded by 16 (tile.cuh)."""
    return 2 * width + (0 if width % 64 == 0 else 16)


_SHORT = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}


@dataclass(frozen=True)
class Row:
    """One line of a table: it fits a problem whose head dims are at most `head_dim` on a device of `capability` or newer."""

    family: str
    dtypes: tuple[str, ...]
    head_dim: int
    capability: int
    config: SimpleConfig | FwdConfig
    why: str


_HALF = ("float16", "bfloat16")
_ANY = ("float16", "bfloat16", "float32", "float64")

_SM80 = "by arithmetic, not measured yet: "
FORWARD = (
    Row("fwd_sm80", _HALF, 32, 80, FwdConfig(128, 128, 2, 4), _SM80 + "40 kB, four blocks an SM of 164 kB; 16 accumulators of O a thread"),
    Row("fwd_sm80", _HALF, 64, 80, FwdConfig(128, 64, 2, 4), _SM80 + "48 kB, two blocks even on an SM of 100 kB"),
    Row("fwd_sm80", _HALF, 96, 80, FwdConfig(128, 64, 2, 4), _SM80 + "72 kB, one block on an SM of 100 kB, two on one of 164 kB"),
    Row("fwd_sm80", _HALF, 128, 80, FwdConfig(128, 64, 2, 4), _SM80 + "96 kB, the most that one block of 99 kB holds"),
    Row("fwd_sm80", _HALF, 192, 80, FwdConfig(64, 64, 2, 4), _SM80 + "120 kB; taller tiles would spill O"),
    Row("fwd_sm80", _HALF, 192, 80, FwdConfig(64, 32, 2, 4), _SM80 + "72 kB, for SMs of 100 kB"),
    Row("fwd_sm80", _HALF, 256, 80, FwdConfig(64, 64, 2, 4), _SM80 + "160 kB; taller tiles would spill O"),
    Row("fwd_sm80", _HALF, 256, 80, FwdConfig(64, 32, 2, 4), _SM80 + "96 kB, for SMs of 100 kB"),
    Row("fwd_simple", _ANY, MAX_HEAD_DIM, 0, SimpleConfig(4), "one warp a row needs no tile to fit: the fallback for every dtype and GPU"),
)
