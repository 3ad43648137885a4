"""Many requests that begin alike: a cascade reads the keys of the shared prefix once for all of them, not once for each.

    python -m bench.examples.shared_prefix              # in a checkout
    python -m cupyflash.bench.examples.shared_prefix    # installed
        --batch 32,128 --prefix 8k,32k --own 128        requests, tokens that they share, tokens of each alone; every combination
        --device gpu|host                               default the GPU, if there is one; its arrays are CuPy's, of float16
        --parts N                                       into how many the prefix is cut; default as many as fill the GPU
        --json FILE                                     JSON lines, the environment first

In each step of a decode every request has one new token, whose keys are in its pages already. One call of `attention_with_kvcache`
attends for all requests; pages of the prefix are stored once, but each request reads them for itself. The cascade (Hydragen, Juravsky et
al., arXiv 2402.05099; FlashInfer, Ye et al., arXiv 2501.01005) is three calls:

- dense `attention` over the prefix, not causal, whose query rows are those of all requests. Query heads that share a key head are rows,
  too: B requests of 32/8 heads are 4 B rows over 8 heads, so that a tile reads its keys once for 128 rows;
- `attention_with_kvcache` over the keys that each request has alone;
- `merge_states`, which weighs both by their LSE.

So few tiles would leave most SMs idle: the prefix is cut into parts, which are batch entries and merged as well. Keys read are P + B n in
place of B (P + n). It pays where P is long and B large, and takes the pages of the prefix to lie one behind the other. Three calls are
three times the host's time, which a CUDA graph saves. Both ways are timed in turn, without host time on a GPU, and their results compared.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import cupyflash

from .. import gpu
from ..cases import SEED, short
from ..machine import environment, usable_cores
from ..report import digits
from ..timing import HOST, Call, Place, measure

Array = Any  # numpy.ndarray or cupy.ndarray: the two share no base class

TILE_ROWS = 128
MOST_PARTS = 31  # with the requests' own keys as many as one kernel merges
AGREEMENT = {"float32": 1e-5, "float16": 2e-3}  # of the largest result: rounding of the parts, and of weights


class Model(NamedTuple):
    heads_q: int
    heads_kv: int
    head_dim: int
    page_size: int
    dtype: str


MODELS = {"gpu": Model(32, 8, 128, 64, "float16"), "host": Model(8, 2, 64, 16, "float32")}
DEFAULTS: dict[str, dict[str, tuple[int, ...]]] = {
    "gpu": {"batch": (32, 128), "prefix": (8192, 32768), "own": (128,)},
    "host": {"batch": (8,), "prefix": (1024,), "own": (32,)},
}


class Step(NamedTuple):
    """One step of a decode. The prefix is in the pages from `first` on, and behind it are each request's own, which `own_table` (B, pages)
    names; `table` and `lengths` are those of all its tokens."""

    q: Array  # (B, 1, Hq, D)
    k_cache: Array  # (pages, page_size, Hkv, D)
    v_cache: Array
    first: int
    prefix_pages: int
    table: Array
    lengths: Array
    own_table: Array
    own_lengths: Array


def one_call(step: Step) -> Array:
    """out (B, 1, Hq, D): each request reads all of its keys."""
    return cupyflash.attention_with_kvcache(step.q, step.k_cache, step.v_cache, cache_seqlens=step.lengths, page_table=step.table)


def cascade(step: Step, parts: int, xp: Any = np) -> Array:
    """The same, the prefix once for all requests; `parts` divides its pages."""
    B, _, Hq, D = step.q.shape
    Hkv = step.k_cache.shape[2]
    group = Hq // Hkv

    q = step.q.reshape(B, Hkv, group, D).swapaxes(1, 2)  # (B, group, Hkv, D): query heads of a key head are rows
    rows = xp.broadcast_to(q, (parts, *q.shape)).reshape(parts, B * group, Hkv, D)
    pages = slice(step.first, step.first + step.prefix_pages)
    k, v = (cache[pages].reshape(parts, -1, Hkv, D) for cache in (step.k_cache, step.v_cache))  # views
    shared = cupyflash.attention(rows, k, v, return_lse=True)

    own = cupyflash.attention_with_kvcache(
        step.q, step.k_cache, step.v_cache, cache_seqlens=step.own_lengths, page_table=step.own_table, return_lse=True
    )
    outs = [*shared.out.reshape(parts, *q.shape), own.out.reshape(B, Hkv, group, D).swapaxes(1, 2)]
    lses = [*shared.lse.reshape(parts, Hkv, B, group).swapaxes(1, 2), own.lse.reshape(B, Hkv, group)]
    out, _ = cupyflash.merge_states(outs, lses)
    return out.swapaxes(1, 2).reshape(B, 1, Hq, D)


def parts_of(pages: int, rows: int, heads_kv: int, workers: int) -> int:
    """Into how many parts to cut so many pages: as many as keep the SMs, or the cores, busy with tiles, and a divisor."""
    wanted = min(max(workers // (heads_kv * -(-rows // TILE_ROWS)), 1), MOST_PARTS)
    return next(n for n in range(wanted, 0, -1) if pages % n == 0)


def steps_of(model: Model, batch: int, prefix: int, own: int, caches: tuple[Array, Array], there: Callable[[Any], Array]) -> list[Step]:
    """Steps in different pages of the caches, as many as there is room for: taken in turn, none finds its keys in the L2."""
    size = model.page_size
    shared, alone = prefix // size, -(-own // size)
    needed = shared + batch * alone
    rng = np.random.default_rng(SEED)
    q = there(rng.standard_normal((batch, 1, model.heads_q, model.head_dim), dtype=np.float32).astype(model.dtype))
    found = []
    for first in range(0, len(caches[0]) - needed + 1, needed):
        prefix_table = np.tile(np.arange(first, first + shared, dtype=np.int32), (batch, 1))
        own_table = first + shared + rng.permutation(batch * alone).astype(np.int32).reshape(batch, alone)
        table = np.hstack([prefix_table, own_table])
        lengths, own_lengths = (there(np.full(batch, tokens, np.int32)) for tokens in (prefix + own, own))
        found.append(Step(q, *caches, first, shared, there(table), lengths, there(own_table), own_lengths))
    return found


def difference(a: Array, b: Array, place: Place) -> float:
    """The largest of a - b, over the largest of b."""
    a, b = place.fetch(a), place.fetch(b)
    return float(np.nan_to_num(np.abs(a - b).max(), nan=np.inf) / np.abs(b).max())


def compare(
    model: Model, steps: Sequence[Step], sizes: tuple[int, int, int], parts: int, place: Place, xp: Any, min_s: float
) -> dict[str, Any]:
    """What the two ways take and how far their results are apart, for a JSON line."""
    batch, prefix, own = sizes
    ways: dict[str, Callable[[Step], Call]] = {
        "one_call": lambda step: lambda: one_call(step),
        "cascade": lambda step: lambda: cascade(step, parts, xp),
    }
    with place:
        error = max(difference(cascade(step, parts, xp), one_call(step), place) for step in steps)
        timer = place.timers["events" if "events" in place.timers else "wall"]
        turns = {name: [bind(step) for step in steps] for name, bind in ways.items()}
        rounds = {name: timer(calls if place.arch else calls[:1]) for name, calls in turns.items()}
        timings = measure(rounds, min_s=min_s, max_s=4 * min_s)
    ms = {name: timing.ms for name, timing in timings.items()}
    return {
        "record": "shared_prefix",
        **dict(zip(("batch", "prefix", "own"), sizes, strict=True)),
        "parts": parts,
        **model._asdict(),
        **{f"{name}_ms": value for name, value in ms.items()},
        **{f"{name}_spread": timing.spread for name, timing in timings.items()},
        "gain": ms["one_call"] / ms["cascade"],
        "fewer_keys": batch * (prefix + own) / (prefix + batch * own),
        "error": error if np.isfinite(error) else None,
        "ok": error <= AGREEMENT[model.dtype],
    }


def as_sizes(text: str) -> tuple[int, ...]:
    """ "8k,32k" -> (8192, 32768)."""
    try:
        found = tuple(int(part[:-1]) * 1024 if part[-1:] == "k" else int(part) for part in text.split(","))
    except ValueError:
        found = (0,)
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 512, 8k or 8k,32k")
    return found


def asked(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, what was not given filled in."""
    parser = argparse.ArgumentParser(prog="shared_prefix", description="Time attention over a shared prefix, by one call and as a cascade.")
    parser.add_argument("--batch", type=as_sizes, metavar="32,128", help="requests")
    parser.add_argument("--prefix", type=as_sizes, metavar="8k,32k", help="tokens that all requests share")
    parser.add_argument("--own", type=as_sizes, metavar="128", help="tokens that each request has alone")
    parser.add_argument("--parts", type=int, metavar="N", help="into how many the prefix is cut; default as many as fill the GPU")
    parser.add_argument("--device", choices=("gpu", "host"), help="default the GPU, if there is one")
    parser.add_argument("--min-time", type=float, default=0.5, metavar="S", help="seconds of rounds; default 0.5")
    parser.add_argument("--json", type=Path, metavar="FILE", help="JSON lines, the environment first")
    chosen = parser.parse_args(arguments)
    chosen.device = chosen.device or ("host" if gpu.why_not() else "gpu")
    for name, value in DEFAULTS[chosen.device].items():
        setattr(chosen, name, getattr(chosen, name) or value)
    size = MODELS[chosen.device].page_size
    for prefix in chosen.prefix:
        if prefix % size:
            parser.error(f"argument --prefix: {prefix} is no multiple of {size}, the tokens of a page")
        if chosen.parts is not None and (not 1 <= chosen.parts <= MOST_PARTS or prefix // size % chosen.parts):
            parser.error(
                f"argument --parts: {chosen.parts} is not a divisor, up to {MOST_PARTS}, of the {prefix // size} pages of the prefix"
            )
    if chosen.json:
        try:
            chosen.json.write_text("")  # before the work, not after it
        except OSError as error:
            parser.error(f"argument --json: cannot write {chosen.json}: {error.strerror}")
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = asked(arguments)
    if chosen.device == "gpu" and (reason := gpu.why_not()):
        print(f"shared_prefix: --device gpu: {reason}", file=sys.stderr)
        return 3
    model, place, workers = MODELS[chosen.device], HOST, usable_cores()
    xp: Any = np
    if chosen.device == "gpu":
        place, xp = gpu.open_place(), importlib.import_module("cupy")
        workers = xp.cuda.Device().attributes["MultiProcessorCount"]
    pages = max(chosen.prefix) // model.page_size + max(chosen.batch) * -(-max(chosen.own) // model.page_size)
    shape = (pages, model.page_size, model.heads_kv, model.head_dim)
    rng = np.random.default_rng(SEED)
    with place:
        caches = tuple(place.put(rng.standard_normal(shape, dtype=np.float32).astype(model.dtype)) for _ in "kv")
    records = [environment()]
    print(f"{model.heads_q}/{model.heads_kv} heads, D {model.head_dim}, {model.dtype}")
    print(f"{'requests':>8}{'prefix':>7}{'own':>5}{'one call ms':>12}{'cascade ms':>11}{'gain':>7}{'error':>8}")
    for case in itertools.product(chosen.batch, chosen.prefix, chosen.own):
        batch, prefix, own = case
        with place:
            steps = steps_of(model, *case, caches, place.put)
        rows = batch * model.heads_q // model.heads_kv
        parts = chosen.parts or parts_of(prefix // model.page_size, rows, model.heads_kv, workers)
        found = compare(model, steps, case, parts, place, xp, chosen.min_time)
        records.append(found)
        times = f"{digits(found['one_call_ms']):>12}{digits(found['cascade_ms']):>11}{found['gain']:>6.2f}x"
        error = "inf" if found["error"] is None else f"{found['error']:.0e}"
        print(
            f"{batch:>8}{short(prefix):>7}{own:>5}{times}{error:>8}"
            + ("" if found["ok"] else f" WRONG: above {AGREEMENT[model.dtype]:.0e}")
        )
    if chosen.json:
        chosen.json.write_text("".join(json.dumps(record, allow_nan=False) + "\n" for record in records))
    return 0 if all(found["ok"] for found in records[1:]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
