"""Calls over latent heads, whose values are the first columns of their keys, and the judgement of their results."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from judge import judge, standard_attention

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
WAYS: list[tuple[str, tuple[int, int], dict[str, int]]] = [
    ("bfloat16", (576, 512), {}),
    ("float16", (576, 512), {"page_size": 24, "num_splits": 3}),
    ("bfloat16", (576, 512), {"page_size": 64, "split_size": 100}),
    ("float16", (320, 248), {"page_size": 1}),
]
# (query tokens, query heads, keys of each sequence): around a unit of 64 keys, and more rows than the 64 of a tile.
SIZES = [(1, 16, (65, 1, 0)), (2, 40, (64, 200, 63)), (1, 3, (131,))]
# One sequence in more parts than are merged at once; more sequences than a warp looks at alone, some of them in parts.
MANY = [(1, 3, (64 * 16 + 9,)), (1, 2, (*[1] * 31, 300, 0, 70))]


class Latents(NamedTuple):
    """What a call is given; `keys` are those of the sequences without what is nobody's, which is NaN in the cache."""

    q: np.ndarray
    cache: np.ndarray
    keys: np.ndarray
    options: dict[str, Any]
    dv: int
    dtype: str

    def judge(self, out: np.ndarray, lse: np.ndarray) -> None:
        names = ("causal", "window_size", "softcap", "alibi_slopes", "sink")
        options = {"causal": True} | {name: x for name, x in self.options.items() if name in names}
        for b, length in enumerate(self.options["cache_seqlens"]):
            one, keys = slice(b, b + 1), self.keys[b : b + 1, :length]
            arrays = [self.q[one], keys, keys[..., : self.dv]]
            expected, expected_lse = standard_attention(*[x.astype(np.float64) for x in arrays], dtype=np.float64, **options)
            standard, standard_lse = standard_attention(*arrays, dtype=self.q.dtype, **options)
            name = f"latents {b} {sorted(self.options)}"
            judge(out[one], expected, standard, dtype=self.q.dtype, name=name)
            judge(lse[one], expected_lse, standard_lse, dtype=self.q.dtype, name=name, kind="lse")


def latents(
    rng: np.random.Generator, way: tuple[str, tuple[int, int], dict[str, int]], size: tuple[int, int, tuple[int, ...]]
) -> list[Latents]:
    """Two calls: plain, and with all options."""
    (dtype, (d, dv), how), (tokens, heads, lengths) = way, size
    q = rng.standard_normal((len(lengths), tokens, heads, d)).astype(DTYPES[dtype])
    keys = rng.standard_normal((len(lengths), max(lengths), 1, d)).astype(DTYPES[dtype])
    page_size = how.get("page_size") or max(lengths) + 5
    pages = -(-max(lengths) // page_size)
    table = rng.permutation(len(lengths) * pages).reshape(len(lengths), pages).astype(np.int32)
    cache = np.full((len(lengths) * pages, page_size, 1, d), np.nan, keys.dtype)
    for b, length in enumerate(lengths):
        slots = np.arange(length)
        cache[table[b, slots // page_size], slots % page_size] = keys[b, :length]
    given: dict[str, Any] = {"page_table": table} if "page_size" in how else {"cache_batch_idx": table[:, 0].copy()}
    given |= {"cache_seqlens": np.array(lengths, np.int32)} | {name: n for name, n in how.items() if name != "page_size"}
    every = {"window_size": (70, 0), "softcap": 5.0, "alibi_slopes": rng.random(heads).astype(np.float32)}
    every |= {"sink": rng.standard_normal(heads).astype(np.float32)}
    return [Latents(q, cache, keys, given | options, dv, dtype) for options in ({"causal": False}, every)]
