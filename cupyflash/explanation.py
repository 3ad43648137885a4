"""What one call moves, computes and launches, from its plan alone: `cupyflash.explain`.

Bytes are those of HBM, of launches that find their inputs there and leave all results there: none is in the L2 cache before a launch.
"""

from __future__ import annotations

import inspect
import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cupyflash.device import KNOWN, DeviceSpec, current, named
from cupyflash.environment import load_cupy
from cupyflash.errors import ArgumentError, DeviceError, ShapeError
from cupyflash.keywords import foreign_keyword
from cupyflash.plan import Plan, Step
from cupyflash.problem import ITEMSIZE, QUANTISED, AttentionProblem, BackwardProblem, CacheProblem
from cupyflash.sizes import Problem, planned, stated
from cupyflash.variants import BwdRowsConfig, BwdSm90Config, DecodeConfig, FwdConfig, Sm90Config

HOST_S = 17e-6  # what a warm call takes on the host (H200, bench/NOTES.md): below it, launches and not kernels decide


class Gpu(NamedTuple):
    """A GPU and what it reaches at best: FLOP/s of 16-bit products by tensor cores, of float32 and of float64, and bytes read a second."""

    name: str
    spec: DeviceSpec
    half: float | None
    single: float | None
    double: float | None
    bytes_per_s: float | None
    source: str

    def flops_per_s(self, dtype: str) -> float | None:
        return {"float32": self.single, "float64": self.double}.get(dtype, self.half)


# Dense, without sparsity and with float32 sums. H200: a matmul of 8192^3 in bfloat16 and a kernel that reads 4 GiB, at 700 W; float32 and
# float64 of it, and all of the others, from NVIDIA's data sheets and white papers of the Ampere, Hopper, Ada and Blackwell GPUs.
_SHEET = "data sheet"
GPUS = {
    "h200": Gpu("H200", KNOWN["90a"], 778e12, 67e12, 34e12, 4.72e12, "measured"),
    "h100": Gpu("H100 SXM", KNOWN["90a"], 989e12, 67e12, 34e12, 3.35e12, _SHEET),
    "a100": Gpu("A100 80 GB", KNOWN["80"], 312e12, 19.5e12, 9.7e12, 2.039e12, _SHEET),
    "b200": Gpu("B200", KNOWN["100"], 2250e12, 75e12, 37e12, 7.7e12, _SHEET),
    "rtx3090": Gpu("RTX 3090", DeviceSpec("86", 82, 101_376, 6 << 20), 71e12, 35.6e12, 0.556e12, 0.936e12, _SHEET),
    "rtx4090": Gpu("RTX 4090", KNOWN["89"], 165.2e12, 82.6e12, 1.29e12, 1.008e12, _SHEET),
    "rtx5090": Gpu("RTX 5090", KNOWN["120"], 209.5e12, 104.8e12, 1.64e12, 1.792e12, _SHEET),
}


def gpu_named(device: str) -> Gpu:
    """What `device` of `explain` names; DeviceError for what nobody knows."""
    spec, name = None, device
    if device == "cuda":
        spec, name = named(device), load_cupy().cuda.runtime.getDeviceProperties(current())["name"].decode()
    words = "".join(c for c in name.lower() if c.isalnum())
    known = next((gpu for key, gpu in GPUS.items() if re.search(rf"{key}(?!\d)", words)), None)
    if spec is None and known is None:
        try:
            spec = named(device)
        except DeviceError as e:
            raise DeviceError(f"{e}, or a GPU: {', '.join(map(repr, GPUS))}") from None
        known = next((gpu for gpu in GPUS.values() if gpu.spec.arch == spec.arch), None)
        name = known.name if known else name
    if known is None:
        assert spec is not None
        return Gpu(name, spec, None, None, None, None, "not known")
    return known._replace(name=name, spec=spec) if device == "cuda" and spec else known


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


@dataclass(frozen=True)
class Explanation:
    """What `explain` found. `tiled` has a Pass for each of `launches`, `standard` one for each kernel of attention by whole matrices; times
    are bounds by FLOPs and bytes, in seconds, None where the ceilings are not known."""

    call: str  # "forward", "backward" or "decode"
    case: str
    dtype: str
    gpu: Gpu
    variant: str
    why: str
    splits: int
    launches: tuple[Launch, ...]
    visible_pairs: int  # (query, key) pairs of one head, in all sequences
    num_heads_q: int
    flops: int
    tiled: tuple[Pass, ...]
    standard: tuple[Pass, ...]
    scores: int  # elements of S, of all heads and sequences
    notes: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """What the library's kernels move."""
        return sum(one.num_bytes for one in self.tiled)

    @property
    def standard_bytes(self) -> int:
        """What attention by whole matrices moves."""
        return sum(one.num_bytes for one in self.standard)

    @property
    def score_bytes(self) -> int:
        """What of that is S and P, or in the backward P, dP and dS."""
        return sum(moved.num_bytes for one in self.standard for moved in one.traffic if moved.tensor in _SCORES)

    @property
    def score_passes(self) -> int:
        """How often standard attention moves as many elements as S has: 4 in the forward, 7 in the backward."""
        return self.score_bytes // (self.scores * ITEMSIZE[self.dtype]) if self.scores else 0

    @property
    def gain(self) -> float:
        """Bytes of S and P that are never moved, over those that are: S / D where Sq = Sk, D = Dv and all heads have keys of their own."""
        return self.score_bytes / self.num_bytes if self.num_bytes else 0.0

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.num_bytes if self.num_bytes else 0.0

    @property
    def ridge(self) -> float | None:
        """The intensity at which FLOPs and bytes of this GPU take equally long."""
        flops_per_s = self.gpu.flops_per_s(self.dtype)
        return flops_per_s / self.gpu.bytes_per_s if flops_per_s and self.gpu.bytes_per_s else None

    @property
    def seconds(self) -> float | None:
        return self._bound(self.tiled)

    @property
    def standard_seconds(self) -> float | None:
        """With S and P where they are if the L2 holds both: then no kernel waits for them."""
        return self._bound(self.standard, _SCORES if self.scores_fit else ())

    @property
    def scores_fit(self) -> bool:
        """Whether S and P are both in the L2 from one kernel to the next."""
        return 2 * self.scores * ITEMSIZE[self.dtype] <= usable_l2(self.gpu.spec)

    @property
    def bound(self) -> str | None:
        """What takes longer, "FLOPs" or "bytes"."""
        return None if self.ridge is None else "FLOPs" if self.intensity > self.ridge else "bytes"

    def _bound(self, passes: Iterable[Pass], without: Sequence[str] = ()) -> float | None:
        flops_per_s, bytes_per_s = self.gpu.flops_per_s(self.dtype), self.gpu.bytes_per_s
        if not flops_per_s or not bytes_per_s:
            return None
        return sum(
            max(one.flops / flops_per_s, sum(x.num_bytes for x in one.traffic if x.tensor not in without) / bytes_per_s) for one in passes
        )

    @property
    def helps(self) -> bool | None:
        """Whether tiles can have twice the speed of standard attention, of which more is left than its launches; None without ceilings."""
        if self.seconds is None or self.standard_seconds is None:
            return None
        return self.standard_seconds >= 2 * self.seconds and self.standard_seconds > HOST_S

    @property
    def verdict(self) -> tuple[str, ...]:
        """Sentences: whether tiles help, and what limits the call."""
        ratio = self.standard_bytes / self.num_bytes if self.num_bytes else 1.0
        scores = "P, dP and dS" if self.call == "backward" else "S and P"
        said = [
            f"Standard attention moves {ratio:.3g} times the bytes: {scores} {self.score_passes} times, {_mb(self.score_bytes)} MB.",
            *self._times(),
            *self._limits(),
        ]
        return ({None: "", True: "Flash helps here. ", False: "Flash does not help much here. "}[self.helps] + said[0], *said[1:])

    def _times(self) -> list[str]:
        if self.seconds is None or self.standard_seconds is None:
            return []
        faster = self.standard_seconds / self.seconds if self.seconds else 1.0
        return [f"At the ceilings it takes {_us(self.standard_seconds)} us, the tiles {_us(self.seconds)} us: {faster:.3g}x the speed."]

    def _limits(self) -> Iterable[str]:
        spec = self.gpu.spec
        keys = sum(moved.num_bytes for one in self.tiled for moved in one.traffic if moved.tensor in "kv")
        if self.call != "backward" and self.num_bytes and 2 * keys > self.num_bytes and self.bound != "FLOPs":
            yield (
                f"The call waits for K and V, {keys / self.num_bytes:.0%} of its bytes, which both read: fewer of them help, by fewer key "
                "heads or a cache of 8 bits."
            )
        if self.scores_fit and self.scores:
            size = 2 * self.scores * ITEMSIZE[self.dtype]
            yield f"S and P are {_mb(size)} MB and stay in the L2 of {_mb(spec.l2_bytes)} MB: standard attention does not wait for them."
        blocks = next((one.grid for one in self.launches if one.kernel == self.variant), spec.num_sms)
        if 10 * blocks < 9 * spec.num_sms:
            yield f"{blocks} blocks leave {spec.num_sms - blocks} of {spec.num_sms} SMs idle: more sequences or heads cost no time."
        if self.seconds is not None and self.seconds < HOST_S:
            yield f"{_us(self.seconds)} us are less than the host's {_us(HOST_S)} for a call: launches decide, and a CUDA graph saves them."

    def to_dict(self) -> dict[str, Any]:
        """For JSON: bytes and FLOPs as integers, times in seconds."""

        def passes(found: Iterable[Pass]) -> list[dict[str, Any]]:
            return [{**one._asdict(), "traffic": [moved._asdict() for moved in one.traffic]} for one in found]

        spec, gpu = self.gpu.spec, self.gpu
        device = {"name": gpu.name, "arch": spec.arch, "num_sms": spec.num_sms, "l2_bytes": spec.l2_bytes, "source": gpu.source}
        ceilings = {"flops_per_s": gpu.flops_per_s(self.dtype), "bytes_per_s": gpu.bytes_per_s}
        found = ("flops", "num_bytes", "standard_bytes", "score_bytes", "gain", "intensity", "ridge", "bound", "seconds")
        return {
            "call": self.call,
            "case": self.case,
            "device": device | ceilings,
            **{name: getattr(self, name) for name in ("variant", "why", "splits", "visible_pairs", "scores", *found)},
            **{name: getattr(self, name) for name in ("standard_seconds", "helps")},
            "verdict": list(self.verdict),
            "launches": [launch._asdict() for launch in self.launches],
            "tiled": passes(self.tiled),
            "standard": passes(self.standard),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = 100) -> str:
        """The report in lines of at most `width` characters, 60 or more."""
        return "\n".join(_report(self, width))


# --- the report -------------------------------------------------------------------------------------------------------------------


def _mb(num_bytes: float) -> str:
    mb = num_bytes / 1e6
    return f"{mb:.0f}" if mb >= 100 else f"{mb:.3g}"


def _us(seconds: float) -> str:
    us = seconds * 1e6
    return f"{us:.0f}" if us >= 100 else f"{us:.3g}"


def _report(e: Explanation, width: int) -> Iterable[str]:
    def wrapped(title: str, text: str) -> list[str]:
        return textwrap.wrap(text, width, initial_indent=f"  {title:<11}", subsequent_indent=" " * 13)

    yield from textwrap.wrap(f"{e.call} on {e.gpu.name}: {e.case}", width)
    yield from wrapped("variant", e.variant)
    yield from wrapped("why", e.why)
    yield ""
    yield "Launches"
    for one in e.launches:
        smem = f", {one.smem_bytes / 1024:.0f} KB shared, {one.blocks_per_sm} an SM" if one.smem_bytes else ""
        waves = f", {one.waves:.2f} waves" if e.gpu.spec.num_sms else ""
        sizes = f"{one.tiles} tiles, {one.grid} blocks of {one.threads} threads{smem}{waves}" if one.threads else "on the CPU's cores"
        family = one.kernel.partition("__")[0]
        yield from textwrap.wrap(sizes, width, initial_indent=f"  {family:<15}", subsequent_indent=" " * 17)
    if e.splits > 1:
        yield from wrapped("splits", f"the keys of a tile are shared by up to {e.splits} blocks")
    yield ""
    yield "HBM bytes, MB       tiles               standard"
    yield f"  {'':<13}{'read':>9}{'written':>11}{'read':>11}{'written':>11}"
    tiled, standard = _by_tensor(e.tiled), _by_tensor(e.standard)
    for name in (*dict.fromkeys((*tiled, *standard)), "total"):
        rows = [moved.get(name) for moved in (tiled, standard)]
        if name == "total":
            rows = [Traffic("", sum(x.read for x in of.values()), sum(x.written for x in of.values())) for of in (tiled, standard)]
        cells = [_mb(n) if n else "-" for row in rows for n in ((row.read, row.written) if row else (0, 0))]
        yield f"  {name:<13}{cells[0]:>9}{cells[1]:>11}{cells[2]:>11}{cells[3]:>11}"
    yield ""
    yield "Roofline"
    pairs = f"{e.flops / 1e9:.4g} GFLOP, {e.visible_pairs} visible pairs a head, {e.num_heads_q} heads"
    yield from wrapped("work", pairs)
    ridge = f"; {e.gpu.name} has {e.ridge:.0f}" if e.ridge else ""
    yield from wrapped("intensity", f"{e.intensity:.4g} FLOP a byte{ridge}")
    flops_per_s = e.gpu.flops_per_s(e.dtype)
    if flops_per_s and e.gpu.bytes_per_s and e.seconds is not None:
        source = f"{flops_per_s / 1e12:.4g} TFLOP/s, {e.gpu.bytes_per_s / 1e12:.3g} TB/s, {e.gpu.source}"
        yield from wrapped("time", f"{_us(e.seconds)} us at least, by {e.bound} ({source})")
    yield ""
    for line in (*e.verdict, *e.notes):
        yield from textwrap.wrap(line, width)


def _by_tensor(passes: Iterable[Pass]) -> dict[str, Traffic]:
    found: dict[str, Traffic] = {}
    for moved in (moved for one in passes for moved in one.traffic):
        before = found.get(moved.tensor, Traffic(moved.tensor, 0, 0))
        found[moved.tensor] = Traffic(moved.tensor, before.read + moved.read, before.written + moved.written)
    return found


# --- FLOPs ------------------------------------------------------------------------------------------------------------------------


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


# --- bytes ------------------------------------------------------------------------------------------------------------------------

_SCORES = ("S", "P", "dP", "dS")
_BYTES = ITEMSIZE | QUANTISED


def usable_l2(spec: DeviceSpec) -> int:
    """What of the L2 holds what blocks share: 32 of the 50 MB of an H200, as the plan has it."""
    return spec.l2_bytes * 16 // 25


class _Model:
    """Bytes and FLOPs of the kernels of one call. `lengths` counts its sequences by (Sq, Sk)."""

    def __init__(self, problem: Problem, schedule: Plan, spec: DeviceSpec, lengths: Counter[tuple[int, int]]) -> None:
        self.p = p = problem if isinstance(problem, AttentionProblem) else _forward_of(problem)
        self.problem, self.spec, self.lengths = problem, spec, lengths
        self.workspaces = dict(schedule.workspaces)
        self.wrt = problem.wrt if isinstance(problem, BackwardProblem) else ()
        window = p.window_left, p.window_right
        self.pairs = sum(count * visible_pairs(*sizes, *window, top_left=p.top_left) for sizes, count in lengths.items())
        self.scores = p.num_heads_q * sum(count * sq * sk for (sq, sk), count in lengths.items())
        self.rows = p.num_heads_q * sum(count * sq for (sq, _), count in lengths.items())
        keys = sum(count * sk for (_, sk), count in lengths.items())
        seen = sum(count * self._keys_seen(*sizes) for sizes, count in lengths.items())
        cache = problem if isinstance(problem, CacheProblem) else None
        size, kept = ITEMSIZE[p.dtype], _BYTES[cache.cache_dtype if cache else p.dtype]
        out = ITEMSIZE[p.out_dtype]
        lse = 8 if p.dtype == "float64" else 4
        self.sizes = {
            "q": self.rows * p.head_dim * size,
            "k": seen * p.num_heads_kv * p.head_dim * kept,
            "v": seen * p.num_heads_kv * p.head_dim_v * kept,
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
        self.key_bytes = self._keys_seen(self.longest_q, self.longest_k) * (p.head_dim + p.head_dim_v) * kept  # of a head of a sequence
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
        work = tiles if isinstance(v.config, Sm90Config | BwdSm90Config) else grid
        return Launch(v.name, step.why, grid, tiles, work / (spec.num_sms * per_sm), step.threads, step.smem_bytes, per_sm)

    def splits(self, step: Step) -> int:
        """Blocks that share the keys of a tile."""
        c, p = step.variant.config, self.p
        if not isinstance(c, DecodeConfig):
            return 1
        if c.cluster > 1:
            return c.cluster
        unit = c.warps * c.block_n
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
        elif family in ("fwd_simple", "fwd_sm80", "fwd_sm90", "decode", "decode_cluster"):
            moved = self._attends(step)
        else:
            of: dict[str, Callable[[Step], list[Traffic]]] = {
                "packed_tiles": self._lists,
                "decode_begin": lambda _: [self._work("arrived", written=1)],
                "cache_append": self._appends,
                "bwd_delta": self._delta,
                "bwd_convert": lambda _: [self._work("dq_sum", read=1), self._write("dq")],
                "bwd_sum": lambda _: [self._work(name, read=1) for name in ("row_slope", "row_sink")],
            }
            moved = of.get(family, self._gradients)(step)
        return Pass(step.variant.name, self._flops(step), tuple(one for one in moved if one.num_bytes))

    def _flops(self, step: Step) -> int:
        """What a kernel computes of visible pairs, scores again where it needs them."""
        family, p, wrt = step.variant.family, self.p, self.wrt
        if family in ("packed_tiles", "decode_begin", "cache_append", "bwd_delta", "bwd_convert", "bwd_sum"):
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

    def _parts(self, step: Step) -> list[Traffic]:
        """What blocks leave of a tile whose keys they share: at most two parts a block, or as many as blocks and tiles. They are read while
        they are in the L2."""
        c, room = step.variant.config, self.workspaces.get("arrived", 0) // 4
        if not isinstance(c, DecodeConfig) or c.cluster > 1 or not room:
            return []
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
            moved.append(self._work("dq_sum", read=over_rows, written=over_rows))
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
            sizes = self.sizes | dict.fromkeys(_SCORES, size)
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


def _forward_of(problem: BackwardProblem | CacheProblem) -> AttentionProblem:
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


# --- explain ----------------------------------------------------------------------------------------------------------------------


def explain(*, device: str = "cuda", lengths: Sequence[int] | None = None, **sizes: Any) -> Explanation:
    """What one call launches, computes and moves, beside standard attention, without arrays and, with a named device, without a GPU.

    Parameters
    ----------
    device : "cuda" for the current GPU, an architecture as "sm_90a", the name of a GPU as "h200", or "host".
    lengths : of packed sequences, queries and keys alike, in place of batch, seqlen_q, seqlen_k and packed.
    deterministic : of a backward, as in `attention_backward`.
    All others are keywords of `supports`: sizes and options, `wrt` for a backward, `cached=True` for a call over a cache, which holds
    seqlen_k keys a sequence.

    Returns
    -------
    An Explanation: `launches` (kernel, grid, tiles, waves, shared memory), `flops` over the exact number of `visible_pairs`, `tiled` and
    `standard`, bytes of HBM by kernel and tensor, `num_bytes`, `standard_bytes`, `gain`, `intensity` in FLOPs a byte, `seconds` and
    `standard_seconds`, bounds by the ceilings of the GPU (measured on an H200, else from data sheets), and `verdict`. str() is a report,
    `to_dict()` is for JSON.

    Raises
    ------
    UnsupportedError, ShapeError, DtypeError, ArgumentError : as the call. DeviceError : for a device that is not known or not there.

    Notes
    -----
    Bytes are those of launches that find nothing in the L2. Keys that many tiles of a head read come from HBM once if the tiles run at once
    or the L2 holds the keys of the head. Standard attention writes and reads S and P (FlashAttention, arXiv 2205.14135, section 3.2).
    FLOPs: 2 (D + Dv) a visible pair and query head, of a backward 2 (3 D + 2 Dv).

    Examples
    --------
    >>> import cupyflash
    >>> found = cupyflash.explain(device="h200", head_dim=64, dtype="bfloat16", batch=4, seqlen_q=4096)
    >>> found.flops, found.num_bytes, found.gain
    (137438953472, 67108864, 64.0)
    >>> print(found.verdict[0])
    Flash helps here. Standard attention moves 65 times the bytes: S and P 4 times, 4295 MB.
    """
    unknown = [name for name in sizes if name not in inspect.signature(stated).parameters]
    if unknown:
        raise foreign_keyword(explain, {unknown[0]: None})
    gpu = gpu_named(device)
    if lengths is not None:
        lengths = _checked(lengths, sizes)
        sizes |= {"batch": len(lengths), "seqlen_q": max(lengths), "seqlen_k": max(lengths), "packed": True}
    problem = stated(**sizes)
    if lengths is not None:
        problem = _of_tokens(problem, sum(lengths))
    schedule = planned(problem, gpu.spec)
    p = problem if isinstance(problem, AttentionProblem) else _forward_of(problem)
    counts = Counter((n, n) for n in lengths) if lengths else _lengths(problem)
    model = _Model(problem, schedule, gpu.spec, counts)
    tiled = tuple(map(model.tiled, schedule.steps))
    main = max(range(len(tiled)), key=lambda n: tiled[n].flops, default=None)
    step = None if main is None else schedule.steps[main]
    return Explanation(
        call="backward" if model.wrt else "decode" if isinstance(problem, CacheProblem) or _is_decode(p) else "forward",
        case=_case(problem, counts),
        dtype=p.dtype,
        gpu=gpu,
        variant=step.variant.name if step else "none",
        why=step.why if step else "nothing is to be computed",
        splits=model.splits(step) if step else 1,
        launches=tuple(map(model.launch, schedule.steps)),
        visible_pairs=model.pairs,
        num_heads_q=p.num_heads_q,
        flops=flops_of_pair(p.head_dim, p.head_dim_v, model.wrt) * model.pairs * p.num_heads_q,
        tiled=tiled,
        standard=model.standard(),
        scores=model.scores,
        notes=tuple(_notes(problem, p)),
    )


explain.__signature__ = inspect.signature(explain).replace(  # type: ignore[attr-defined]
    parameters=[
        *(one for one in inspect.signature(explain).parameters.values() if one.kind is not one.VAR_KEYWORD),
        *inspect.signature(stated).parameters.values(),
    ]
)


def _checked(lengths: Sequence[int], sizes: dict[str, Any]) -> tuple[int, ...]:
    if given := [name for name in ("batch", "seqlen_q", "seqlen_k", "cached") if name in sizes]:
        raise ArgumentError(f"lengths= and {given[0]}= were given: lengths= says how long the packed sequences of a call are")
    if not lengths or min(lengths) < 0:
        raise ShapeError(f"lengths={tuple(lengths)!r} must be one length, 0 or more, for each of one or more sequences")
    return tuple(map(int, lengths))


def _of_tokens(problem: Problem, tokens: int) -> Problem:
    if isinstance(problem, BackwardProblem):
        return problem._replace(forward=problem.forward._replace(seqlen_q=tokens, seqlen_k=tokens))
    assert isinstance(problem, AttentionProblem)
    return problem._replace(seqlen_q=tokens, seqlen_k=tokens)


def _lengths(problem: Problem) -> Counter[tuple[int, int]]:
    """Sequences of one length, counted by (Sq, Sk)."""
    p = problem if isinstance(problem, AttentionProblem) else _forward_of(problem)
    seqlen_q = p.seqlen_q // max(p.batch, 1) if p.packed else p.seqlen_q
    seqlen_k = p.seqlen_k // max(p.batch, 1) if p.packed and not isinstance(problem, CacheProblem) else p.seqlen_k
    return Counter({(seqlen_q, seqlen_k): p.batch})


def _is_decode(p: AttentionProblem) -> bool:
    return p.seqlen_q == 1 and not p.packed


def _case(problem: Problem, lengths: Counter[tuple[int, int]]) -> str:
    p = problem if isinstance(problem, AttentionProblem) else _forward_of(problem)
    (seqlen_q, seqlen_k), longest = max(lengths), "longest " if len(lengths) > 1 else ""
    words = [f"{p.dtype} B {p.batch} Sq {longest}{seqlen_q} Sk {longest}{seqlen_k} Hq {p.num_heads_q} Hkv {p.num_heads_kv} D {p.head_dim}"]
    words += [f"Dv {p.head_dim_v}"] * (p.head_dim_v != p.head_dim)
    words += ["causal"] * (p.window_left is None and p.window_right == 0)
    if p.window_left is not None or p.window_right not in (None, 0):
        words.append("window {},{}".format(*("-" if side is None else side for side in (p.window_left, p.window_right))))
    words += ["packed"] * p.packed
    if isinstance(problem, CacheProblem):
        words.append("cache" + (f" in pages of {problem.page_size}" if problem.page_size else ""))
        words += [f"of {problem.cache_dtype}"] * (problem.cache_dtype != p.dtype)
    if isinstance(problem, BackwardProblem):
        words.append("wrt " + ",".join(problem.wrt))
    return " ".join(words)


def _notes(problem: Problem, p: AttentionProblem) -> Iterable[str]:
    if p.seqused_q or p.seqused_k:
        yield "Used lengths are in device memory: counted as if all tokens were in use."
    if p.mask:
        yield "What a mask hides is counted as visible: the kernels compute it."
    if isinstance(problem, CacheProblem):
        yield "Each sequence is taken to have seqlen_k keys in the cache."
