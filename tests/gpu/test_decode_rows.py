"""Each row of DECODE at the edges of its units: dense caches, pages, bytes and splits; slots that are nobody's hold NaN."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cupy", reason="CuPy is not installed; pip install 'cupyflash[cuda13]'")

from judge import judge, standard_attention
from latents import MANY, SIZES, WAYS, latents
from on_gpu import LIBRARIES, Move, compile_ahead, fits, nan_memory, needs, only, row_name

from cupyflash import api, attention_with_kvcache, device, launch, variants
from cupyflash.variants import Row

pytestmark = pytest.mark.gpu

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
PRIME = 1009
CACHES: tuple[dict[str, Any], ...] = (
    *({}, {"page_size": 32}, {"page_size": 24}, {"cache_dtype": "int8"}, {"cache_dtype": "float8_e4m3fn"}),
    *({"page_size": size, "cache_dtype": dtype} for size, dtype in ((24, "int8"), (64, "int8"), (16, "float8_e4m3fn"))),
)
SPLITS: tuple[dict[str, Any], ...] = ({}, {"num_splits": 3}, {"split_size": 200})
OPTIONS: tuple[tuple[str, ...], ...] = ((), ("causal",), ("window_size", "sink"), ("softcap", "alibi_slopes"))
EACH_ROW = [
    pytest.param(row, dtype, id=f"{row_name(row)}-{dtype}")
    for row in variants.DECODE
    for dtype in (row.dtypes if row.config.cluster in (1, 16) else row.dtypes[1:])  # type: ignore[union-attr]
]


def unit(row: Row) -> int:
    return row.config.warps * row.config.block_n  # type: ignore[union-attr]


def sizes(row: Row) -> tuple[int, int]:
    """Sequences and key heads: one of as many as fill the GPU, where there are clusters."""
    cluster = row.config.cluster  # type: ignore[union-attr]
    return (1, device.query(0).num_sms // cluster) if cluster > 1 else (3, 2)


def calls(row: Row) -> Iterator[tuple[dict[str, Any], dict[str, Any], tuple[str, ...], int, int]]:
    """(cache, splits, options, query tokens, head_dim)."""
    ways = itertools.product(CACHES, SPLITS if sizes(row)[0] > 1 else SPLITS[:1])
    for n, (cache, splits) in enumerate(ways):
        yield cache, splits, OPTIONS[n % len(OPTIONS)], 1 + n % 2, row.head_dim - 8 * (n % 2)


@pytest.fixture(scope="module", autouse=True)
def kernels(request: pytest.FixtureRequest) -> None:
    """Compile the kernels of all rows at once."""
    found: set[variants.Variant] = set()
    params = [item.callspec.params for item in request.session.items if item.path == request.path]
    for row, dtype in {(given["row"], given["dtype"]) for given in params if "row" in given}:
        batch, heads = sizes(row)
        with only(row, table="DECODE"):
            for cache, splits, options, tokens, d in calls(row):
                given = {"causal": True, "window_size": (400, 0), "softcap": 5.0, "sink": True, "alibi_slopes": True}
                asked: dict[str, Any] = {name: given[name] for name in options} | cache | splits
                asked |= {"batch": batch, "seqlen_q": tokens, "seqlen_k": PRIME, "num_heads_q": 2 * heads, "num_heads_kv": heads}
                found |= set(api.supports(head_dim=d, dtype=dtype, device="cuda", cached=True, return_lse=True, **asked).variants)
    compile_ahead(found)


def in_memory(
    rng: np.random.Generator, lengths: np.ndarray, arrays: list[np.ndarray], page_size: int | None
) -> tuple[list[np.ndarray], Any]:
    """Caches of K and V with room for more, and the table of pages that come in any order; what is nobody's holds NaN, or 99 of int8."""
    batch, longest = arrays[0].shape[:2]
    size = page_size or longest + 5
    pages = -(-longest // size) + bool(page_size)
    table = rng.permutation(batch * pages)[: batch * pages].reshape(batch, pages) if page_size else np.arange(batch)[:, None]
    caches = []
    for x in arrays:
        cache = np.full((batch * pages, size, *x.shape[2:]), 99 if x.dtype == np.int8 else np.nan, x.dtype)
        for b, length in enumerate(lengths):
            slots = np.arange(length)
            cache[table[b, slots // size], slots % size] = x[b, :length]
        caches.append(cache)
    return caches, table.astype(np.int32) if page_size else None


@pytest.mark.parametrize(("row", "dtype"), EACH_ROW)
def test_lengths_around_the_units_of_each_row(row: Row, dtype: str, rng: np.random.Generator) -> None:
    needs(row)
    move, (batch, heads) = Move("cupy"), sizes(row)
    for cache, splits, names, tokens, d in calls(row):
        held, scale = np.dtype(cache.get("cache_dtype", dtype)), 0.03 if "int8" in cache.values() else 1.0
        for longest in sorted({1, unit(row) - 1, unit(row), unit(row) + 1, PRIME}):
            lengths = np.array([longest, max(longest // 3, 1), 0][:batch], np.int32)
            q = rng.standard_normal((batch, tokens, 2 * heads, d)).astype(DTYPES[dtype])
            k, v = (np.clip(x / scale, -127, 127).astype(held) for x in rng.standard_normal((2, batch, longest, heads, d)))
            given: dict[str, Any] = {"causal": True, "window_size": (400, 0), "softcap": 5.0}
            given |= {"sink": rng.standard_normal(2 * heads).astype(np.float32), "alibi_slopes": rng.random(2 * heads).astype(np.float32)}
            options = {"causal": False} | {name: given[name] for name in names}
            caches, table = in_memory(rng, lengths, [k, v], cache.get("page_size"))
            more = {"page_table": table, **({"k_descale": scale, "v_descale": scale} if "cache_dtype" in cache else {})}
            with only(row, table="DECODE"), nan_memory():
                out, lse, _ = move.attention_with_kvcache(q, *caches, cache_seqlens=lengths, return_lse=True, **options, **splits, **more)
            wide = [q.astype(np.float64), k.astype(np.float64) * scale, v.astype(np.float64) * scale]
            expected, expected_lse = standard_attention(*wide, dtype=np.float64, seqused_k=lengths, **options)
            standard, standard_lse = standard_attention(*wide, dtype=q.dtype, seqused_k=lengths, **options)
            name = f"{row_name(row)} D={d} Sk={longest} {cache} {splits} {names}"
            judge(out, expected, standard, dtype=q.dtype, name=name)
            judge(lse, expected_lse, standard_lse, dtype=q.dtype, name=name, kind="lse")


@pytest.mark.parametrize("elsewhere", [False, True], ids=["values_in_keys", "values_elsewhere"])
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("way", WAYS)
def test_latent_heads(way: Any, library: str, elsewhere: bool, rng: np.random.Generator) -> None:
    """Where values are columns of the keys by a kernel that reads them once, else by one warp a row."""
    move, families = Move(library), []
    launch_of = launch.launcher

    def noted(schedule: Any, *more: Any) -> Any:
        families.append(schedule.steps[0].variant.family)
        return launch_of(schedule, *more)

    (row,) = variants.LATENT
    for size in (*SIZES, *MANY, (1, 128, (9000, 1, 700))):  # parts for each SM
        for call in latents(rng, way, size):
            (cache,) = move(call.cache)
            values = move(call.cache[..., : call.dv].copy())[0] if elsewhere else cache[..., : call.dv]
            options = {name: move(x)[0] if isinstance(x, np.ndarray) else x for name, x in call.options.items()}
            with pytest.MonkeyPatch.context() as patch, nan_memory():
                patch.setattr(launch, "launcher", noted)
                out, lse, _ = attention_with_kvcache(*move(call.q), cache, values, return_lse=True, **options)
            call.judge(move.back(out), move.back(lse))
    assert set(families) == ({"latent_sm90"} if fits(row) and not elsewhere else {"fwd_simple"})


@pytest.mark.parametrize("splits", [*SPLITS, {"num_splits": 1}], ids=str)
@pytest.mark.parametrize(("batch", "d"), [(1, 64), (3, 64), (1, 576), (3, 576)])
def test_nan_makes_nan_of_the_rows_that_see_it(batch: int, d: int, splits: dict[str, int], rng: np.random.Generator) -> None:
    """In one query, or in the keys of a part alone, which may have no other weights: neither is taken for a part without keys."""
    move, length = Move("cupy"), 5000
    for where in ("query", "keys"):
        q, k = rng.standard_normal((batch, 1, 4, d)), rng.standard_normal((batch, length, 1, d))
        (q[0, 0, 1] if where == "query" else k[0, 4000:])[:] = np.nan
        wanted = np.zeros((batch, 1, 4), bool)
        wanted[0, 0, 1 if where == "query" else slice(None)] = True
        q, cache = move(q.astype(np.float16), k.astype(np.float16))
        lengths = move(np.full(batch, length, np.int32))[0]
        with nan_memory():
            out, lse, _ = attention_with_kvcache(q, cache, cache[..., : min(d, 512)], cache_seqlens=lengths, return_lse=True, **splits)
        np.testing.assert_array_equal(np.isnan(move.back(out)), np.broadcast_to(wanted[..., None], out.shape), err_msg=where)
        np.testing.assert_array_equal(np.isnan(move.back(lse)), wanted.swapaxes(1, 2), err_msg=where)


FEW = [(1, 1, 8, 8), (1, 4, 32, 8), (3, 4, 8, 2), (1, 64, 2, 2), (1, 17, 6, 2)]  # (batch, query tokens, heads, key heads)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("batch", "tokens", "heads", "heads_kv"), FEW)
def test_dense_calls_of_few_rows(library: str, batch: int, tokens: int, heads: int, heads_kv: int, rng: np.random.Generator) -> None:
    move, d = Move(library), 64
    for sk, options in itertools.product((1, 512, PRIME), ({}, {"causal": True, "sink": True}, {"window_size": (100, 3), "softcap": 3.0})):
        q = rng.standard_normal((batch, tokens, heads, d)).astype(DTYPES["bfloat16"])
        k, v = rng.standard_normal((2, batch, sk, heads_kv, d)).astype(DTYPES["bfloat16"])
        used = {"seqused_k": np.array([sk, 0, sk // 2][:batch], np.int32)}
        given = options | used | ({"sink": rng.standard_normal(heads).astype(np.float32)} if "sink" in options else {})
        with nan_memory():
            out, lse, _ = move.attention(q, k, v, return_lse=True, **given)
        wide = [x.astype(np.float64) for x in (q, k, v)]
        expected, expected_lse = standard_attention(*wide, dtype=np.float64, **given)
        standard, standard_lse = standard_attention(*wide, dtype=q.dtype, **given)
        judge(out, expected, standard, dtype=q.dtype, name=f"{sk} {options}")
        judge(lse, expected_lse, standard_lse, dtype=q.dtype, name=f"{sk} {options}", kind="lse")
