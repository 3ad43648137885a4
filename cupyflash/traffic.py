"""Bytes of HBM, FLOPs and launches of the kernels of one plan, and of attention by whole matrices beside it.

A kernel that moves something new needs a word here. Bytes are those of launches that find nothing in the L2 and leave nothing there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cupyflash.device import DeviceSpec
from cupyflash.plan import Plan, Step
from cupyflash.problem import ITEMSIZE, QUANTISED, AttentionProblem, BackwardProblem, CacheProblem
from cupyflash.sizes import Problem
from cupyflash.variants import BwdRowsConfig, BwdSm90Config, DecodeConfig, FwdConfig, KeysOutsideConfig, Sm90Config


class Traffic(NamedTuple):
    """Bytes of one tensor that a kernel reads from HBM and writes there."""

    tensor: str
    read: int
    written: int

    @property
    def num_bytes(self) -> int:
        return self.read + self.written


class Pass(NamedTuple):
    """One kernel: the products it computes, and what it moves."""

    kernel: str
    flops: int
    traffic: tuple[Traffic, ...]

    @property
    def num_bytes(self) -> int:
        return sum(moved.num_bytes for moved in self.traffic)


class Launch(NamedTuple):
    """How a kernel is launched. `tiles`: pieces of work, which the blocks share; `waves`: how often they fill all SMs; `blocks_per_sm`: at
    most, by shared memory, threads and what the kernel was compiled for."""

    kernel: str
    why: str
    grid: int
    tiles: int
    waves: float
    threads: int
    smem_bytes: int
    blocks_per_sm: int


def visible_pairs(seqlen_q: int, seqlen_k: int, left: int | None = None, right: int | None = None, *, top_left: bool = False) -> int:
    """(query, key) pairs of one head of a sequence that a window leaves, `left` keys before the diagonal and `right` after it; None: all.

    >>> visible_pairs(4, 4, right=0)  # causal: 1 + 2 + 3 + 4
    10
    """

    def until(distance: int) -> int:  # pairs with j - i <= distance: row i has i + distance + 1 of them, between 0 and seqlen_k
        def rows(n: int) -> int:  # of the numbers 1 ... n, none taken as more than seqlen_k, the sum
            steep = max(min(n, seqlen_k), 0)
            return steep * (steep + 1) // 2 + max(n - steep, 0) * seqlen_k

        return rows(seqlen_q + distance) - rows(distance)

    diagonal = 0 if top_left else seqlen_k - seqlen_q
    seen = seqlen_q * seqlen_k if right is None else until(diagonal + right)
    return seen if left is None else seen - until(diagonal - left - 1)


def flops_of_pair(head_dim: int, head_dim_v: int, wrt: Sequence[str] = ()) -> int:
    """FLOPs of a pair and query head: 2 D for the score and 2 Dv for the sum; of a backward 2 D for the score again, for dq and for dk,
    2 Dv for dP and for dv: 2.5 times as many where D = Dv. Softmax itself is not counted."""
    if not wrt:
        return 2 * (head_dim + head_dim_v)
    others = any(name != "v" for name in wrt)
    return 2 * (head_dim * (1 + ("q" in wrt) + ("k" in wrt)) + head_dim_v * (others + ("v" in wrt)))


SCORES = ("S", "P", "dP", "dS")
_BYTES = ITEMSIZE | QUANTISED


def usable_l2(spec: DeviceSpec) -> int:
    """What of the L2 holds what blocks share: 32 of the 50 MB of an H200, as the plan has it."""
    return spec.l2_bytes * 16 // 25


class Model:
    """Bytes and FLOPs of the kernels of one call. `lengths` counts its sequences by (Sq, Sk)."""

    def __init__(self, problem: Problem, schedule: Plan, spec: DeviceSpec, lengths: Counter[tuple[int, int]]) -> None:
        self.p = p = problem if isinstance(problem, AttentionProblem) else forward_of(problem)
        self.problem, self.spec, self.lengths = problem, spec, lengths
        self.workspaces, self.parts = dict(schedule.workspaces), schedule.splits[1]
        self.wrt = problem.wrt if isinstance(problem, BackwardProblem) else ()
        window = p.window_left, p.window_right
        self.pairs = sum(count * visible_pairs(*sizes, *window, top_left=p.top_left) for sizes, count in lengths.items())
        self.scores = p.num_heads_q * sum(count * sq * sk for (sq, sk), count in lengths.items())
        self.rows = p.num_heads_q * sum(count * sq for (sq, _), count in lengths.items())
        keys = sum(count * sk for (_, sk), count in lengths.items())
        seen = sum(count * self._keys_seen(*sizes) for sizes, count in lengths.items())
        cache = problem if isinstance(problem, CacheProblem) else None
        size, kept = ITEMSIZE[p.dtype], _BYTES[cache.cache_dtype if cache else p.dtype]
        own_v = 0 if cache and cache.values_in_keys else p.head_dim_v  # columns of V that K has not
        out = ITEMSIZE[p.out_dtype]
        lse = 8 if p.dtype == "float64" else 4
        self.sizes = {
            "q": self.rows * p.head_dim * size,
            "k": seen * p.num_heads_kv * p.head_dim * kept,
            "v": seen * p.num_heads_kv * own_v * kept,
            "out": self.rows * p.head_dim_v * out,
            "dout": self.rows * p.head_dim_v * out,
            "lse": self.rows * lse,
            "bias": self._scores_given(_BYTES[p.bias]) if p.bias else 0,
            "mask": self._scores_given(1) if p.mask else 0,
            "dq": self.rows * p.head_dim * size,
            "dk": keys * p.num_heads_kv * p.head_dim * size,
            "dv": keys * p.num_heads_kv * p.head_dim_v * size,
            "dbias": math.prod(problem.bias_shape) * size if isinstance(problem, BackwardProblem) and problem.bias_shape else 0,
            "page_table": 4 * p.batch * -(-p.seqlen_k // cache.page_size) if cache and cache.page_size else 0,
        }
        self.longest_q, self.longest_k = (max((sizes[side] for sizes in lengths), default=0) for side in (0, 1))
        self.key_bytes = self._keys_seen(self.longest_q, self.longest_k) * (p.head_dim + own_v) * kept  # of a head of a sequence
        self.group = p.num_heads_q // max(p.num_heads_kv, 1)

    def _keys_seen(self, seqlen_q: int, seqlen_k: int) -> int:
        """Keys that at least one row of a sequence sees."""
        p, diagonal = self.p, 0 if self.p.top_left else seqlen_k - seqlen_q
        first = 0 if p.window_left is None else max(diagonal - p.window_left, 0)
        end = seqlen_k if p.window_right is None else min(diagonal + seqlen_q + p.window_right, seqlen_k)
        return max(end - first, 0)

    def _scores_given(self, itemsize: int) -> int:
        """Of an array that all batches and heads share: the shape (Sq, Sk) that a call has which is only stated."""
        return self.p.seqlen_q * self.p.seqlen_k * itemsize

    def tiles(self, step: Step) -> int:
        """Pieces of work of a launch, as its blocks take them."""
        c, p = step.variant.config, self.p

        def blocks(side: int, size: int) -> int:
            return sum(count * -(-sizes[side] // size) for sizes, count in self.lengths.items())

        if isinstance(c, BwdRowsConfig | FwdConfig | Sm90Config):
            return blocks(0, c.block_m) * p.num_heads_q
        if isinstance(c, BwdSm90Config) or step.variant.family == "bwd_sm80":
            return blocks(1, c.block_n) * p.num_heads_kv  # type: ignore[union-attr]
        if isinstance(c, DecodeConfig):
            return p.num_heads_kv * sum(count * -(-self.group * sq // c.block_m) for (sq, _), count in self.lengths.items())
        return math.prod(step.grid)

    def launch(self, step: Step) -> Launch:
        v, spec, grid = step.variant, self.spec, math.prod(step.grid)
        if not step.threads:
            return Launch(v.name, step.why, 1, 1, 1.0, 0, 0, 0)
        per_sm = blocks_per_sm(step, spec)
        tiles = self.tiles(step)
        work = max(tiles, grid) if isinstance(v.config, Sm90Config | BwdSm90Config) else grid  # fewer tiles than blocks are split
        return Launch(v.name, step.why, grid, tiles, work / (spec.num_sms * per_sm), step.threads, step.smem_bytes, per_sm)

    def splits(self, step: Step) -> int:
        """Blocks that share the keys of a tile; of the last tiles of a backward, the rows."""
        c, p = step.variant.config, self.p
        if isinstance(c, BwdSm90Config) and "splits" in step.variant.flags:
            return self.parts
        if not isinstance(c, DecodeConfig):
            return 1
        if c.cluster > 1:
            return c.cluster
        unit = c.unit
        problem = self.problem
        units = -(-p.seqlen_k // unit)
        if isinstance(problem, CacheProblem) and problem.split_size:
            return -(-p.seqlen_k // (-(-problem.split_size // unit) * unit))
        if isinstance(problem, CacheProblem) and problem.num_splits:
            return min(problem.num_splits, units)
        return min(-(-math.prod(step.grid) // max(self.tiles(step), 1)), units)

    def passes(self, step: Step, set_bytes: int, readers: int) -> int:
        """How often HBM is read for what `readers` tiles read: once where they run at the same time or the L2 holds it, else as often as
        all SMs are filled with them."""
        slots = max(self.spec.num_sms * blocks_per_sm(step, self.spec), 1) if step.threads else readers
        return 1 if readers <= slots or set_bytes <= usable_l2(self.spec) else -(-readers // slots)

    def tiled(self, step: Step) -> Pass:
        family = step.variant.family
        if family == "host":
            moved = self._backward_at_once() if self.wrt else self._attends(step)
        elif family in ("fwd_simple", "fwd_sm80", "fwd_sm90", "decode", "decode_cluster", "latent_sm90"):
            moved = self._attends(step)
        else:
            of: dict[str, Callable[[Step], list[Traffic]]] = {
                "packed_tiles": self._lists,
                "decode_begin": lambda _: [self._work("arrived", written=1)],
                "latent_merge": lambda _: [],  # it reads parts while they are in the L2, and the rows of O are counted before it
                "cache_append": self._appends,
                "fwd_keys_outside": self._keys_outside,
                "bwd_delta": self._delta,
                "bwd_convert": lambda _: [self._work("dq_sum", read=1), self._write("dq")],
                "bwd_sum": lambda _: [self._work(name, read=1) for name in ("row_slope", "row_sink")],
            }
            moved = of.get(family, self._gradients)(step)
        return Pass(step.variant.name, self._flops(step), tuple(one for one in moved if one.num_bytes))

    def _flops(self, step: Step) -> int:
        """What a kernel computes of visible pairs, scores again where it needs them."""
        family, p, wrt = step.variant.family, self.p, self.wrt
        if family in ("packed_tiles", "decode_begin", "latent_merge", "cache_append", "bwd_delta", "bwd_convert", "bwd_sum"):
            return 0
        if not wrt or family == "bwd_sm80_dbias":
            each = flops_of_pair(p.head_dim, p.head_dim_v)
        elif family == "bwd_sm80_dq":
            each = flops_of_pair(p.head_dim, p.head_dim_v, ("q",))
        elif family == "bwd_sm80" and "dq" not in step.variant.flags:
            each = flops_of_pair(p.head_dim, p.head_dim_v, ("k", "v"))
        else:
            each = flops_of_pair(p.head_dim, p.head_dim_v, wrt)
        return each * self.pairs * p.num_heads_q

    def _read(self, *names: str, times: int = 1) -> list[Traffic]:
        return [Traffic(name, times * self.sizes[name], 0) for name in names]

    def _write(self, name: str) -> Traffic:
        return Traffic(name, 0, self.sizes[name])

    def _work(self, name: str, read: int = 0, written: int = 0) -> Traffic:
        size = self.workspaces.get(name, 0)
        return Traffic(name, read * size, written * size)

    def _attends(self, step: Step) -> list[Traffic]:
        c = step.variant.config
        times = 1
        if isinstance(c, DecodeConfig):  # the rows of a head that pass one another's keys are taken one block after another
            blocks = -(-self.group * self.longest_q // c.block_m)
            together = self.key_bytes * min(math.prod(step.grid), self.p.num_heads_kv * sum(self.lengths.values()))
            times = 1 if together <= usable_l2(self.spec) else blocks
        elif c is not None:
            rows = c.block_m if isinstance(c, FwdConfig | Sm90Config) else c.warps
            times = self.passes(step, self.key_bytes, self.group * -(-self.longest_q // rows))
        rotated = self.workspaces.get("rotated_q", 0)
        moved = [Traffic("rotated_q", rotated, 0)] if rotated else self._read("q")
        moved += [*self._read("k", "v", times=times), *self._read("bias", "mask", "page_table")]
        moved += [self._work("row_tiles", read=1), self._write("out"), *([self._write("lse")] if self.p.write_lse else [])]
        return [*moved, *self._parts(step)]

    def _keys_outside(self, step: Step) -> list[Traffic]:
        """A head's blocks of rows pass by once for each tile of keys that they see. What they bring and take goes through HBM where the L2
        has no room for that of all heads at work."""
        c, p = step.variant.config, self.p
        assert isinstance(c, KeysOutsideConfig)
        heads = min(math.prod(step.grid), self.spec.num_sms * blocks_per_sm(step, self.spec))
        at_work = heads * p.seqlen_q * (p.head_dim * ITEMSIZE[p.dtype] + step.variant.head_dim_v * 4)
        diagonal = p.seqlen_k if p.window_right is None else 0 if p.top_left else p.seqlen_k - p.seqlen_q
        ends = [min(first + c.block_m, p.seqlen_q) for first in range(0, p.seqlen_q, c.block_m)]
        visits = sum(max(-(-min(end + diagonal, p.seqlen_k) // c.kept), 1) for end in ends)
        blocks, again = len(ends), visits - len(ends)
        far = at_work > usable_l2(self.spec)
        read, written = (again, again) if far else (0, min(again, blocks))
        moved = [Traffic("q", self.sizes["q"] * (visits if far else blocks) // blocks, 0), *self._read("k", "v")]
        moved += [Traffic(name, size * read // blocks, size * written // blocks) for name, size in self.workspaces.items()]
        return [*moved, self._write("out"), *([self._write("lse")] if p.write_lse else [])]

    def _parts(self, step: Step) -> list[Traffic]:
        """What blocks leave of a tile whose keys they share: at most two parts a block, or as many as blocks and tiles. They are read while
        they are in the L2."""
        c = step.variant.config
        if not isinstance(c, DecodeConfig) or c.cluster > 1 or "part_lse" not in self.workspaces:
            return []
        room = self.workspaces["part_lse"] // (4 * c.block_m)
        used = room if "splits" in step.variant.flags else min(room, math.prod(step.grid) + self.tiles(step))
        return [Traffic(name, 0, self.workspaces[name] * used // room) for name in ("part_out", "part_lse")]

    def _lists(self, step: Step) -> list[Traffic]:
        return [self._work(name, written=1) for name in ("row_tiles", "key_tiles")]

    def _appends(self, step: Step) -> list[Traffic]:
        problem, p = self.problem, self.p
        assert isinstance(problem, CacheProblem)
        tokens = problem.seqlen_new * (1 if p.packed else p.batch) * p.num_heads_kv
        moved = []
        for name, dim in (("k", p.head_dim), ("v", p.head_dim_v)):
            moved += [
                Traffic(f"{name}_new", tokens * dim * ITEMSIZE[p.dtype], 0),
                Traffic(name, 0, tokens * dim * _BYTES[problem.cache_dtype]),
            ]
        return [*moved, *(self._read("q") if problem.rotary_dim else []), self._work("rotated_q", written=1)]

    def _delta(self, step: Step) -> list[Traffic]:
        assert isinstance(self.problem, BackwardProblem)
        dlse = [Traffic("dlse", self.sizes["lse"], 0)] if self.problem.dlse else []
        made = ("row_lse", "row_delta", "row_reference", "row_sink", "dq_sum")
        return [*self._read("out", "dout", "lse"), *dlse, *(self._work(name, written=1) for name in made)]

    def _gradients(self, step: Step) -> list[Traffic]:
        """Of the kernels that multiply. Tiles of keys walk over rows, tiles of rows over keys, which all of them read."""
        family, c, p = step.variant.family, step.variant.config, self.p
        adds = family.startswith("bwd_sm90") or "dq" in step.variant.flags
        tiled = family != "bwd_simple"
        vectors = ("row_reference" if tiled and family != "bwd_sm80_dbias" else "row_lse", "row_delta")
        row = (p.head_dim + p.head_dim_v) * ITEMSIZE[p.dtype] + (step.variant.head_dim * 4 if adds else 0)
        over_keys = over_rows = 1
        if family == "bwd_sm80_dq":
            over_keys = self.passes(step, self.key_bytes, self.group * -(-self.longest_q // c.block_m))  # type: ignore[union-attr]
        elif tiled:
            over_rows = self.passes(step, row * self.longest_q, -(-self.longest_k // c.block_n))  # type: ignore[union-attr]
        moved = [*self._read("q", "dout", times=over_rows), *self._read("k", "v", times=over_keys), *self._read("bias", "mask")]
        moved += [self._work(name, read=over_rows) for name in vectors]
        moved += [self._work("row_tiles" if isinstance(c, BwdRowsConfig) else "key_tiles", read=1)]
        if adds:
            moved += [self._work("dq_sum", read=over_rows, written=over_rows), self._work("part_sums", read=1, written=1)]
        made = {"bwd_sm80_dq": ("q",), "bwd_sm80_dbias": ("bias",), "bwd_simple": ("q", "k", "v", "bias")}.get(family, ("k", "v"))
        moved += [self._write(f"d{name}") for name in made if name in self.wrt]
        return [*moved, *([self._work("row_slope", written=1)] if family == "bwd_sm80_dq" else [])]

    def _backward_at_once(self) -> list[Traffic]:
        return [
            *self._read("q", "k", "v", "out", "dout", "lse"),
            *(self._write(f"d{name}") for name in self.wrt if f"d{name}" in self.sizes),
        ]

    def standard(self) -> tuple[Pass, ...]:
        """Attention by whole matrices in q's dtype, a kernel for each product and one for the softmax (FlashAttention, arXiv 2205.14135,
        algorithms 0 and 3): no score is left out, and the backward has P from the forward."""
        p, size = self.p, self.scores * ITEMSIZE[self.p.dtype]

        def of(kernel: str, dim: int, read: Sequence[str], written: str) -> Pass:
            sizes = self.sizes | dict.fromkeys(SCORES, size)
            moved = [*(Traffic(name, sizes[name], 0) for name in read), Traffic(written, 0, sizes[written])]
            return Pass(kernel, 2 * dim * self.scores, tuple(one for one in moved if one.num_bytes))

        D, Dv, wrt = p.head_dim, p.head_dim_v, self.wrt
        if not wrt:
            return (
                of("S = Q K^T", D, ("q", "k"), "S"),
                of("P = softmax(S)", 0, ("S", "bias", "mask"), "P"),
                of("O = P V", Dv, ("P", "v"), "out"),
            )
        return (
            *([of("dV = P^T dO", Dv, ("P", "dout"), "dv")] if "v" in wrt else []),
            of("dP = dO V^T", Dv, ("dout", "v"), "dP"),
            of("dS = P (dP - delta)", 0, ("P", "dP"), "dS"),
            *([of("dQ = dS K", D, ("dS", "k"), "dq")] if "q" in wrt else []),
            *([of("dK = dS^T Q", D, ("dS", "q"), "dk")] if "k" in wrt else []),
        )


def forward_of(problem: BackwardProblem | CacheProblem) -> AttentionProblem:
    return problem.forward if isinstance(problem, BackwardProblem) else problem.attention


def blocks_per_sm(step: Step, spec: DeviceSpec) -> int:
    """At most; registers may allow fewer. An SM has 1 kB of shared memory more than a block may have, and each block takes 1 kB besides its
    own; threads: CUDA C++ programming guide, technical specifications by compute capability."""
    config = step.variant.config
    if isinstance(config, Sm90Config | BwdSm90Config) or getattr(config, "cluster", 1) > 1:
        return 1
    threads = 1536 if spec.capability in (86, 89, 120) else 2048
    by_smem = (spec.smem_bytes + 1024) // (step.smem_bytes + 1024) if step.smem_bytes else 32
    return max(min(by_smem, threads // step.threads, getattr(config, "blocks", 32)), 1)
