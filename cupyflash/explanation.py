"""What one call moves, computes and launches, from its plan alone: `cupyflash.explain`. What a kernel moves stands in traffic.py."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cupyflash.device import KNOWN, DeviceSpec, current, named
from cupyflash.environment import load_cupy
from cupyflash.errors import ArgumentError, DeviceError, ShapeError
from cupyflash.keywords import foreign_keyword
from cupyflash.problem import ITEMSIZE, AttentionProblem, BackwardProblem, CacheProblem
from cupyflash.sizes import Problem, planned, stated
from cupyflash.traffic import SCORES, Launch, Model, Pass, Traffic, flops_of_pair, forward_of, usable_l2

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
        return sum(moved.num_bytes for one in self.standard for moved in one.traffic if moved.tensor in SCORES)

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
        return self._bound(self.standard, SCORES if self.scores_fit else ())

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
        passes = f"{self.score_passes} passes over the scores are {_mb(self.score_bytes)} MB"
        said = [f"Standard attention moves {ratio:.3g} times the bytes: {passes}.", *self._times(), *self._limits()]
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
        yield from wrapped(
            "splits",
            f"the {'rows of the last tiles' if e.variant.startswith('bwd') else 'keys of a tile'} are shared by up to {e.splits} blocks",
        )
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
    Flash helps here. Standard attention moves 65 times the bytes: 4 passes over the scores are 4295 MB.
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
    p = problem if isinstance(problem, AttentionProblem) else forward_of(problem)
    counts = Counter((n, n) for n in lengths) if lengths else _lengths(problem)
    model = Model(problem, schedule, gpu.spec, counts)
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
        notes=tuple(_notes(problem, p, model, step.variant.family if step else "")),
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
    p = problem if isinstance(problem, AttentionProblem) else forward_of(problem)
    seqlen_q = p.seqlen_q // max(p.batch, 1) if p.packed else p.seqlen_q
    seqlen_k = p.seqlen_k // max(p.batch, 1) if p.packed and not isinstance(problem, CacheProblem) else p.seqlen_k
    return Counter({(seqlen_q, seqlen_k): p.batch})


def _is_decode(p: AttentionProblem) -> bool:
    return p.seqlen_q == 1 and not p.packed


def _case(problem: Problem, lengths: Counter[tuple[int, int]]) -> str:
    p = problem if isinstance(problem, AttentionProblem) else forward_of(problem)
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


def _notes(problem: Problem, p: AttentionProblem, model: Model, family: str) -> Iterable[str]:
    if p.seqused_q or p.seqused_k:
        yield "Used lengths are in device memory: counted as if all tokens were in use."
    if p.mask:
        yield "What a mask hides is counted as visible: the kernels compute it."
    if isinstance(problem, CacheProblem):
        yield "Each sequence is taken to have seqlen_k keys in the cache."
    masked = p.window_left is not None or p.window_right is not None
    if masked and family in _APART and model.sizes["k"] + model.sizes["v"] > usable_l2(model.spec):
        yield f"Under a mask, tiles that share keys or rows run apart in time, and the L2 loses these. {_APART[family]}"


# What Nsight Compute counted under masks (bench/NOTES.md, "Bytes by the model").
_OF_BACKWARD = "Counted on an H200, a causal backward moved 1.04 to 6.8 times the bytes told here, most with grouped heads."
_APART = {
    "fwd_sm90": "Counted on an H200, K and V were read 1.5 to 3.5 times, not once as told here.",
    "bwd_sm90": _OF_BACKWARD,
    "bwd_sm90_wide": _OF_BACKWARD,
}
