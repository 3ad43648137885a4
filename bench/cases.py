"""Case: one attention to time or to check, and the named suites; shapes appear nowhere else in the bench."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupyflash.traffic import flops_of_pair, visible_pairs

Array = NDArray[Any]

DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}  # name -> what the tables print
CACHE_DTYPES = {"float8_e4m3fn": "fp8", "int8": "int8"}  # what a cache may be kept in beside these
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "float8_e4m3fn": 1, "int8": 1}
DESCALE = 1 / 16  # of keys and values in CACHE_DTYPES: normal ones are then numbers up to a hundred, which both have
EXTRAS = ("alibi", "bias", "mask", "sink", "seqused")
SEED = 2026  # of everything that is drawn once for all machines


class Inputs(NamedTuple):
    """The arrays of a case, of whatever library the place where they are has; `options` are the keywords that the case's `function` takes,
    `dout` is the gradient of its result for a case of the backward."""

    q: Any
    k: Any
    v: Any
    options: dict[str, Any]
    dout: Any = None


@dataclass(frozen=True)
class Case:
    """Sizes and options of one attention, or with `backward` of its gradients of q, k and v, from what the forward has left. `extras` names
    the options that are arrays (of EXTRAS); `inputs` makes them.

    With `lengths`, those of queries and of keys alike, the sequences are packed one behind the other in arrays without a batch axis. Then
    `batch` counts them and both seqlens are the longest: `packed` gives these fields."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str
    causal: bool = False
    window_size: tuple[int | None, int | None] | None = None
    softmax_scale: float | None = None
    softcap: float | None = None
    extras: tuple[str, ...] = ()
    return_lse: bool = False
    backward: bool = False
    deterministic: bool = False  # gradients equal bit by bit in every run
    lengths: tuple[int, ...] = ()

    @property
    def mode(self) -> str:
        """One query token against a cache reads K and V once and is limited by bytes; everything else by FLOPs."""
        return "bwd" if self.backward else "decode" if self.seqlen_q == 1 and not self.lengths else "fwd"

    @property
    def function(self) -> str:
        """The name of the library's function that computes it, or for the backward the forward before it."""
        return "attention_varlen" if self.lengths else "attention"

    @property
    def dtypes(self) -> tuple[str, str, str]:
        """Of q, k and v."""
        return self.dtype, self.dtype, self.dtype

    @property
    def equal(self) -> bool:
        """Whether all sequences have one length, as they have where there is a batch axis."""
        return len(set(self.lengths)) <= 1

    @property
    def tokens(self) -> tuple[int, int]:
        """Queries and keys of all sequences."""
        return (sum(self.lengths),) * 2 if self.lengths else (self.batch * self.seqlen_q, self.batch * self.seqlen_k)

    @cached_property
    def cu_seqlens(self) -> Array:
        """Where each packed sequence begins, and where the last ends."""
        return np.cumsum((0, *self.lengths), dtype=np.int32)

    def alone(self, b: int) -> Case:
        """Sequence b as a case with a batch axis of 1."""
        return self._of_length(self.lengths[b]) if self.lengths else replace(self, batch=1)

    def _of_length(self, n: int) -> Case:
        return replace(self, batch=1, seqlen_q=n, seqlen_k=n, lengths=())

    def at(self, b: int, rows: slice, head: int) -> tuple[Any, ...]:
        """Where rows of sequence b, queries or keys, are in an array of all sequences. The slice ends in that sequence."""
        if not self.lengths:
            return b, rows, head
        first = int(self.cu_seqlens[b])
        return slice(first + rows.start, first + rows.stop, rows.step), head

    def keys_at(self, inputs: Inputs, b: int, keys: slice, head: int) -> tuple[Any, Any]:
        """Keys of sequence b and their values, of one key head, where the inputs are."""
        where = self.at(b, keys, head)
        return inputs.k[where], inputs.v[where]

    def visible_keys(self) -> tuple[Array, Array]:
        """The first key that each query of a sequence sees, and one past its last: what causal and window leave. `extras` do not count.
        Packed sequences differ: ask `alone`."""
        diagonal = np.arange(self.seqlen_q, dtype=np.int64) + (self.seqlen_k - self.seqlen_q)
        left, right = self.window_size or (None, None)
        if self.causal:
            right = 0 if right is None or right < 0 else min(right, 0)
        first = np.zeros_like(diagonal) if left is None or left < 0 else np.maximum(diagonal - left, 0)
        last = np.full_like(diagonal, self.seqlen_k - 1) if right is None or right < 0 else np.minimum(diagonal + right, self.seqlen_k - 1)
        return first, np.maximum(last + 1, first)

    @cached_property
    def visible_pairs(self) -> int:
        """(query, key) pairs of one head, in all sequences, that are visible: exactly, not S²/2."""
        if self.lengths:
            return sum(count * self._of_length(n).visible_pairs for n, count in Counter(self.lengths).items())
        left, right = (None if side is None or side < 0 else side for side in self.window_size or (None, None))
        return self.batch * visible_pairs(self.seqlen_q, self.seqlen_k, left, 0 if self.causal else right)

    @property
    def flops(self) -> int:
        """Of all visible pairs and query heads, by the field's convention (`flops_of_pair`)."""
        each = flops_of_pair(self.head_dim, self.head_dim_v, ("q", "k", "v") if self.backward else ())
        return each * self.visible_pairs * self.num_heads_q

    @cached_property
    def num_keys(self) -> int:
        """Keys of all sequences, of one key head, that any query sees: of a window over a long cache the last few."""
        if self.window_size is None:
            return self.tokens[1]
        if self.lengths:
            return sum(count * self._of_length(n).num_keys for n, count in Counter(self.lengths).items())
        first, end = self.visible_keys()
        return self.batch * max(int(end.max() - first.min()), 0)

    @property
    def latent(self) -> bool:
        """Whether the values are the first columns of the keys, the same memory."""
        return False

    @property
    def num_bytes(self) -> int:
        """q, k, v and out, and of a backward their gradients, each once: the least that any implementation moves. Keys that no query sees
        do not count."""
        rows_q, rows_k = self.tokens[0] * self.num_heads_q, self.num_keys * self.num_heads_kv
        size_q, size_k, _ = (ITEMSIZE[name] for name in self.dtypes)
        width = self.head_dim + self.head_dim_v
        return (rows_q * size_q * width + rows_k * size_k * (self.head_dim if self.latent else width)) * (2 if self.backward else 1)

    @property
    def num_scores(self) -> int:
        """Every score of every head: what the three-step formula holds at its peak."""
        return self.num_heads_q * (sum(n * n for n in self.lengths) or self.batch * self.seqlen_q * self.seqlen_k)

    @property
    def label(self) -> str:
        """The case in one short line, as tables and failures print it."""
        heads = f"H {self.num_heads_q}" + (f"/{self.num_heads_kv}" if self.num_heads_kv != self.num_heads_q else "")
        dim = f"D {self.head_dim}" + (f"-{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        seqlen = short(self.seqlen_q) + (f"x{short(self.seqlen_k)}" if self.seqlen_k != self.seqlen_q else "")
        sizes = f"B {self.batch} S {seqlen}"
        if self.lengths:
            sequences = "sequence" if self.batch == 1 else "sequences"
            sizes = f"{short(self.tokens[0])} tokens in {self.batch} {sequences}{' of' if self.equal else ', longest'} {seqlen},"
        words = [f"{DTYPES[self.dtype]} {sizes} {heads} {dim}"]
        words += ["causal"] * self.causal
        if self.window_size is not None:
            words.append("window {},{}".format(*("-" if side is None else side for side in self.window_size)))
        if self.softmax_scale is not None:
            words.append(f"scale {self.softmax_scale:g}")
        if self.softcap is not None:
            words.append(f"softcap {self.softcap:g}")
        return " ".join((*words, *self.extras, *["deterministic"] * self.deterministic))

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of q, k and v: (B, S, H, D), packed (T, H, D)."""
        tokens_q, tokens_k = [(n,) for n in self.tokens] if self.lengths else [(self.batch, n) for n in (self.seqlen_q, self.seqlen_k)]
        rows_k = (*tokens_k, self.num_heads_kv)
        return (*tokens_q, self.num_heads_q, self.head_dim), (*rows_k, self.head_dim), (*rows_k, self.head_dim_v)

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (*self.shapes[0][:-1], self.head_dim_v)

    @property
    def options(self) -> dict[str, Any]:
        """The keywords that are no arrays and that all functions have in common."""
        names = ("window_size", "softmax_scale", "softcap")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {"causal": self.causal, **given, **({"return_lse": True} if self.return_lse else {})}

    @property
    def packing(self) -> dict[str, Any]:
        """The keywords that say where in the arrays the sequences are; none where a batch axis says it."""
        return {"cu_seqlens_q": self.cu_seqlens, "max_seqlen_q": self.seqlen_q, "max_seqlen_k": self.seqlen_k} if self.lengths else {}

    @property
    def sink(self) -> dict[str, Array]:
        """The keyword of sinks, a normal number for each query head, where there are some."""
        normal = np.random.default_rng(SEED).standard_normal(self.num_heads_q, dtype=np.float32)
        return {"sink": normal} if "sink" in self.extras else {}

    def inputs(self, seed: int = 0) -> Inputs:
        """Normal q, k, v and dout and the arrays of `extras` in host memory, the same for the same seed."""
        rng = np.random.default_rng(seed)
        B, Sq, Sk, Hq = self.batch, self.seqlen_q, self.seqlen_k, self.num_heads_q

        def normal(*shape: int, dtype: str = self.dtype) -> Array:
            x = rng.standard_normal(shape, dtype=np.float32)
            return (x / DESCALE if dtype in CACHE_DTYPES else x).astype(numpy_dtype(dtype), copy=False)

        q, k, v = (normal(*shape, dtype=dtype) for shape, dtype in zip(self.shapes, self.dtypes, strict=True))
        v = k[..., : self.head_dim_v] if self.latent else v
        options = {**self.options, **self.packing, **self.sink}
        if "alibi" in self.extras:  # the paper's slopes: 2^(-8/H), 2^(-16/H), ...
            options["alibi_slopes"] = np.exp2(-8.0 / Hq * np.arange(1, Hq + 1)).astype(np.float32)
        if "bias" in self.extras:
            options["bias"] = normal(1, Hq, Sq, Sk)
        if "mask" in self.extras:  # two of three keys; one row of each batch element sees none
            options["mask"] = rng.random((B, 1, Sq, Sk)) < 2 / 3
            options["mask"][:, :, Sq // 2] = False
        if "seqused" in self.extras:  # all of the first, nothing of the last, something of those between
            options["seqused_q"] = np.linspace(Sq, 0, B).astype(np.int32)
            options["seqused_k"] = np.linspace(Sk, 0, B).astype(np.int32)
        return Inputs(q, k, v, options, normal(*self.out_shape) if self.backward else None)


@dataclass(frozen=True)
class CacheCase(Case):
    """Attention of each sequence's last `seqlen_q` tokens over the `seqlen_k` keys that a cache holds of it, theirs among them: one token
    of a decode, or a chunk of a prefill.

    The cache is one array with a batch axis or, with a `page_size`, pages in any order. `cache_dtype` is one of CACHE_DTYPES, whose numbers
    times DESCALE are keys and values, or "" for q's."""

    page_size: int = 0
    cache_dtype: str = ""

    @property
    def mode(self) -> str:
        return "decode"

    @property
    def latent(self) -> bool:
        """As of DeepSeek-V3, 576 and 512 wide; nothing else is wider than 256."""
        return self.head_dim > 256 and self.head_dim_v < self.head_dim

    @property
    def function(self) -> str:
        return "attention_with_kvcache"

    @property
    def dtypes(self) -> tuple[str, str, str]:
        kept = self.cache_dtype or self.dtype
        return self.dtype, kept, kept

    @cached_property
    def page_table(self) -> Array:
        """(B, pages of a sequence): the pages of all sequences, shuffled."""
        pages = -(-self.seqlen_k // self.page_size)
        return np.random.default_rng(SEED).permutation(self.batch * pages).astype(np.int32).reshape(self.batch, pages)

    @property
    def label(self) -> str:
        kept = [CACHE_DTYPES[self.cache_dtype]] if self.cache_dtype else []
        return " ".join((f"{super().label},", *kept, f"pages of {self.page_size}" if self.page_size else "cache"))

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        q, *cache = super().shapes
        if not self.page_size:
            return q, *cache
        return q, *((self.page_table.size, self.page_size, *shape[2:]) for shape in cache)

    @property
    def packing(self) -> dict[str, Any]:
        pages = {"page_table": self.page_table} if self.page_size else {}
        scales = {"k_descale": DESCALE, "v_descale": DESCALE} if self.cache_dtype else {}
        return {"cache_seqlens": np.full(self.batch, self.seqlen_k, np.int32), **pages, **scales}

    def keys_at(self, inputs: Inputs, b: int, keys: slice, head: int) -> tuple[Any, Any]:
        if not self.page_size:
            return super().keys_at(inputs, b, keys, head)
        pages = inputs.options["page_table"][b]  # of the library of k and v, which alone can be their index
        k, v = (x[:, :, head][pages].reshape(-1, x.shape[-1])[keys] for x in (inputs.k, inputs.v))
        return k, v


def packed(lengths: tuple[int, ...]) -> dict[str, Any]:
    """The fields of a Case that sequences of these lengths, one behind the other, make."""
    longest = max(lengths)
    return {"batch": len(lengths), "seqlen_q": longest, "seqlen_k": longest, "lengths": lengths}


@lru_cache(maxsize=64)
def drawn_lengths(tokens: int, longest: int) -> tuple[int, ...]:
    """Lengths of sequences as a batch of training text has them: many short ones and a few long ones.

    Log-normal with a median of longest/16 and a sigma of 1, none above `longest`, which is always one of them; in any order. They add up to
    `tokens`, to which the last that was drawn is cut. The same on each machine, with the seed SEED.
    """
    rng = np.random.default_rng(SEED)
    lengths, left = [longest], tokens - longest
    while left > 0:
        lengths.append(min(max(round(rng.lognormal(math.log(longest / 16), 1.0)), 1), longest, left))
        left -= lengths[-1]
    return tuple(lengths[n] for n in rng.permutation(len(lengths)))


def short(size: int) -> str:
    """1536 -> "1536", 4096 -> "4k": what `--seqlen` takes, too."""
    return f"{size // 1024}k" if size and size % 1024 == 0 else str(size)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype of that name; bfloat16 and float8 are ml_dtypes' (ImportError where that is not installed)."""
    return np.dtype(getattr(importlib.import_module("ml_dtypes"), name) if name in ("bfloat16", "float8_e4m3fn") else name)


def available_dtypes() -> tuple[str, ...]:
    return tuple(name for name in DTYPES if name != "bfloat16" or importlib.util.find_spec("ml_dtypes"))


_TOUR = Case(batch=1, seqlen_q=1024, seqlen_k=1024, num_heads_q=8, num_heads_kv=8, head_dim=64, head_dim_v=64, dtype="float32")


def tour_suite() -> tuple[Case, ...]:
    """Prefill short and long, all keys and causal, grouped heads, and a decode step: about 10 s on two cores, 60 GFLOP in all."""
    return (
        replace(_TOUR, seqlen_q=512, seqlen_k=512),
        replace(_TOUR, causal=True),
        replace(_TOUR, num_heads_q=4, num_heads_kv=1, seqlen_q=2048, seqlen_k=2048, head_dim=128, head_dim_v=128, causal=True),
        replace(_TOUR, num_heads_q=4, num_heads_kv=4, seqlen_q=4096, seqlen_k=4096),
        replace(_TOUR, num_heads_q=4, num_heads_kv=4, seqlen_q=4096, seqlen_k=4096, causal=True),
        replace(_TOUR, batch=4, num_heads_kv=2, seqlen_q=1, seqlen_k=8192, head_dim=128, head_dim_v=128),
    )


def gpu_tour_suite() -> tuple[Case, ...]:
    """Prefill of many sequences and of a long one, all keys and causal, grouped heads, narrow heads, and two decode steps; bfloat16."""
    base = replace(_TOUR, dtype="bfloat16", num_heads_q=16, num_heads_kv=16, head_dim=128, head_dim_v=128)
    return (
        replace(base, batch=16, causal=True),
        replace(base, batch=4, num_heads_q=32, num_heads_kv=8, seqlen_q=4096, seqlen_k=4096, causal=True),
        replace(base, num_heads_q=32, num_heads_kv=32, head_dim=64, head_dim_v=64, seqlen_q=8192, seqlen_k=8192),
        replace(base, seqlen_q=16384, seqlen_k=16384, causal=True),
        replace(base, batch=8, num_heads_q=32, num_heads_kv=8, seqlen_q=1, seqlen_k=8192),
        replace(base, num_heads_q=32, num_heads_kv=8, seqlen_q=1, seqlen_k=65536),
    )


def explain_suite() -> tuple[Case, ...]:
    """Three of the forward, two of the backward and two of a decode whose results are 268 MB or more, over four times the L2 of an H200:
    what stays in it of the last writes is then a small part, so that bytes can be compared with those that Nsight Compute counts. Of causal
    calls only one of short sequences: NOTES.md says how far the model is off where tiles that share keys are far from one another."""
    base = replace(_TOUR, dtype="bfloat16", batch=16, num_heads_q=32, num_heads_kv=32, head_dim=128, head_dim_v=128)
    long, middle, short = (replace(base, seqlen_q=n, seqlen_k=n) for n in (8192, 4096, 1024))
    return (
        middle,
        replace(long, batch=8, num_heads_kv=8),
        replace(long, head_dim=64, head_dim_v=64),
        replace(middle, batch=8, backward=True),
        replace(short, batch=32, causal=True, backward=True),
        CacheCase(8192, 1, 512, 128, 8, 128, 128, "bfloat16"),
        CacheCase(32768, 1, 256, 32, 8, 128, 128, "bfloat16", page_size=16),
    )


_CHECK = Case(1, 67, 67, 2, 2, 64, 64, "float32", return_lse=True)


def check_suite(*, full: bool = False) -> dict[str, tuple[Case, ...]]:
    """Every option alone and the pairs that have broken other libraries, in each dtype, by group; `full` adds long and random ones."""
    groups = {**_check_groups(), **(_long_groups() if full else {})}
    suite = {name: tuple(replace(case, dtype=dtype) for dtype in available_dtypes() for case in cases) for name, cases in groups.items()}
    return {**suite, "at random": tuple(_random_cases(400))} if full else suite


def _check_groups() -> dict[str, list[Case]]:
    def each(field: str, *values: Any, **changes: Any) -> list[Case]:
        """One case for each value; seqlen, heads and dim stand for their pairs of fields."""
        pairs = {"seqlen": ("seqlen_q", "seqlen_k"), "heads": ("num_heads_q", "num_heads_kv"), "dim": ("head_dim", "head_dim_v")}
        cases = []
        for value in values:
            fields: dict[str, Any] = {}
            for name, chosen in {**changes, field: value}.items():
                fields.update(zip(pairs[name], chosen, strict=True) if name in pairs else {name: chosen})
            cases.append(replace(_CHECK, **fields))
        return cases

    more_keys, more_queries = (66, 130), (130, 66)
    return {
        # Around a tile's edge, one key, no key at all, one query against many keys (decode).
        "lengths": each("seqlen", (67, 67), (1, 1), (127, 129), (128, 128), (257, 1), (1, 1000), (64, 0), (301, 293)),
        # The diagonal ends bottom right; with more queries than keys the first rows see nothing.
        "causal": each("seqlen", (67, 67), (128, 128), (1, 300), (5, 2), more_keys, more_queries, causal=True),
        "head dims": each("dim", (1, 1), (7, 7), (40, 40), (80, 80), (128, 128), (192, 128), (256, 256), (64, 17), causal=True),
        "grouped heads": each("heads", (8, 2), (6, 1), (6, 3), causal=True) + each("heads", (8, 2), (6, 1), seqlen=(1, 300), batch=2),
        "window": each("window_size", (16, 0), (0, 0), (None, 8), (20, None), (5, 3), seqlen=more_keys)
        + each("window_size", (16, 0), (5, 3), (20, None), seqlen=more_queries, causal=True)
        + each("window_size", (32, 64), seqlen=(129, 32)),  # rows whose window holds no key
        # Scores of size 30 under a cap of 15; of size 1000 without one: the maximum must be taken off before exp.
        "scale, softcap": each("causal", False, True, softcap=15.0, softmax_scale=4.0) + each("softmax_scale", 0.3, 4.0, 125.0),
        **{extra: each("causal", False, True, extras=(extra,), batch=3, seqlen=(66, 75), heads=(4, 2)) for extra in EXTRAS},
        "together": each("extras", ("sink",), ("bias", "mask"), causal=True, seqlen=more_queries)  # rows that see the sink alone
        + each("extras", ("alibi", "seqused"), EXTRAS, batch=3, causal=True, seqlen=more_keys, window_size=(50, None), softcap=20.0),
    }


def _long_groups() -> dict[str, list[Case]]:
    long, lengths = replace(_CHECK, num_heads_kv=1), ((2048, 2048), (1, 65536), (1000, 4099))
    return {"long": [replace(long, seqlen_q=q, seqlen_k=k, causal=causal) for q, k in lengths for causal in (False, True)]}


def _random_cases(count: int) -> list[Case]:
    """Shapes and options drawn at random with a fixed seed: combinations that nobody thought of, the same on each machine."""
    rng = np.random.default_rng(SEED)

    def one_of(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    cases = []
    for _ in range(count):
        group, heads_kv, dim = one_of(1, 1, 2, 4), one_of(1, 2, 3), int(rng.integers(1, 161))
        cases.append(
            Case(
                batch=one_of(1, 2, 3),
                seqlen_q=int(rng.integers(1, 200)),
                seqlen_k=int(rng.integers(0, 300)),
                num_heads_q=group * heads_kv,
                num_heads_kv=heads_kv,
                head_dim=dim,
                head_dim_v=one_of(dim, dim, int(rng.integers(1, 161))),
                dtype=one_of(*available_dtypes()),
                causal=one_of(False, True),
                window_size=one_of(None, None, (int(rng.integers(0, 100)), None), (int(rng.integers(0, 100)), int(rng.integers(0, 100)))),
                softcap=one_of(None, None, None, 15.0),
                extras=tuple(extra for extra in EXTRAS if rng.random() < 0.2),
                return_lse=True,
            )
        )
    return cases
