"""Many query tokens of each sequence over its cache, as a prompt has that comes in chunks. On a GPU other kernels serve them than a few.

Lengths are those around the edges of a block of keys; NaN in all slots that nobody owns, and no page in what a table has past a length.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from judge import judge, standard_attention
from test_known_failures_kvcache import Server, normal, vector

import cupyflash


def lengths_around(edge: int) -> list[int]:
    return [0, 1, edge - 1, edge, edge + 1, 149, 3 * edge + 5]


def chunks_agree(
    rng: np.random.Generator,
    dtype: str,
    page_size: int | None,
    lengths: list[int],
    rows: Any,  # of each sequence, or packed those of each
    *,
    dims: tuple[int, int] = (64, 64),
    heads: tuple[int, int] = (4, 2),
    new: bool = False,  # the rows are tokens that are appended
    entries: bool = False,  # of a cache of more
    kv_layout: str = "nhd",
    **options: Any,
) -> Any:
    """Attend and compare with float64; returns the result."""
    packed, of_each = not isinstance(rows, int), [rows] * len(lengths) if isinstance(rows, int) else rows
    used = [n + m * new for n, m in zip(lengths, of_each, strict=True)]
    server = Server(rng, lengths, page_size=page_size, slots=max(used) + 3, heads=heads[1], dim=dims[0], dtype=dtype)
    server.caches[1], server.keys[1] = server.caches[1][..., : dims[1]], [x[..., : dims[1]] for x in server.keys[1]]
    given = server.options | options
    if page_size:
        for row, n in zip(given["page_table"], used, strict=True):
            row[-(-n // page_size) :] = 2**31 - 1
    if entries:
        given["cache_batch_idx"] = rng.permutation(len(lengths) + 2)[: len(lengths)].astype(np.int32)
        for n, x in enumerate(server.caches):
            server.caches[n] = np.full((len(lengths) + 2, *x.shape[1:]), np.nan, x.dtype)
            server.caches[n][given["cache_batch_idx"]] = x
    if kv_layout == "hnd":
        server.caches = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in server.caches]
    first = np.cumsum([0, *of_each])
    shapes = (heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1])
    q, k_new, v_new = (normal(rng, first[-1], *shape, dtype=dtype) for shape in shapes)
    tokens = [x if packed else x.reshape(len(lengths), -1, *x.shape[1:]) for x in (q, k_new, v_new)]
    given |= {"cu_seqlens_q": first.astype(np.int32)} if packed else {}
    given |= dict(zip(("k_new", "v_new"), tokens[1:], strict=True)) if new else {}
    out, lse, _ = cupyflash.attention_with_kvcache(tokens[0], *server.caches, kv_layout=kv_layout, return_lse=True, **given)
    if not packed:
        lse = lse.swapaxes(0, 1).reshape(heads[0], -1)
    expected, standard = (np.zeros((first[-1], heads[0], dims[1])) for _ in range(2))
    of_nothing = options.get("sink", np.full(heads[0], -np.inf))
    expected_lse, standard_lse = (np.repeat(of_nothing[:, None].astype(np.float64), first[-1], axis=1) for _ in range(2))
    alone = {"causal": True} | options
    for b, n in enumerate(used):
        part = slice(first[b], first[b + 1])
        keys = [np.concatenate([x[b], y[part]])[None] if new else x[b][None] for x, y in zip(server.keys, (k_new, v_new), strict=True)]
        if n == 0 or not of_each[b]:
            continue
        for found, found_lse, kind in ((expected, expected_lse, np.dtype(np.float64)), (standard, standard_lse, q.dtype)):
            one, one_lse = standard_attention(*[x.astype(kind) for x in (q[part][None], *keys)], dtype=kind, **alone)
            found[part], found_lse[:, part] = one[0], one_lse[0]
    name = f"{dtype} pages of {page_size}, rows {rows}, {sorted(options)}"
    judge(out.reshape(expected.shape), expected, standard, dtype=q.dtype, name=name)
    judge(lse, expected_lse, standard_lse, dtype=q.dtype, name=name, kind="lse")
    return out


def edges_agree(rng: np.random.Generator, dtype: str, page_size: int | None, row: Any) -> None:
    """At the edges of the tiles of a row of the kernel table, of any kernel that serves calls with used lengths."""
    m, n, how = row.config.block_m, row.config.block_n, {"dims": row.head_dims, "heads": (2, 1)}
    if row.causal is not True:
        chunks_agree(rng, dtype, page_size, lengths_around(n), max(m - 1, 64), causal=False, **how)
    if row.causal is not False:
        window = {"window_size": (40, 0), "sink": np.array([0.5, -1], np.float32)}
        chunks_agree(rng, dtype, page_size, lengths_around(n), 65, **window, **how)
        chunks_agree(rng, dtype, page_size, [0, n - 1, 149], m + 1, new=True, **how)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("page_size", [None, 16, 48, 64, 100, 256])
def test_chunks(rng: np.random.Generator, dtype: str, page_size: int | None) -> None:
    """Without and with a causal mask, under a window, with a sink; appended."""
    chunks_agree(rng, dtype, page_size, lengths_around(64), 64, causal=False)
    chunks_agree(rng, dtype, page_size, lengths_around(80), 137)
    chunks_agree(rng, dtype, page_size, lengths_around(64), 70, window_size=(40, 0), sink=np.array([0.5, -1, 2, 0], np.float32))
    chunks_agree(rng, dtype, page_size, lengths_around(64), 67, new=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("page_size", [None, 16, 64, 100])
def test_packed_chunks(rng: np.random.Generator, dtype: str, page_size: int | None) -> None:
    """Of several lengths, among them none and one row."""
    rows = [65, 300, 0, 1, 149, 64, 9]
    chunks_agree(rng, dtype, page_size, lengths_around(64), rows)
    chunks_agree(rng, dtype, page_size, lengths_around(64), rows, causal=False, new=True)


@pytest.mark.parametrize("packed", [False, True])
def test_chunks_over_entries_of_a_cache(rng: np.random.Generator, packed: bool) -> None:
    rows = [65, 300, 0, 1, 149, 64, 9] if packed else 66
    for more in ({"kv_layout": "hnd"}, {"new": True}):
        chunks_agree(rng, "float16", None, lengths_around(64), rows, entries=True, **more)


def test_chunks_in_heads_before_slots(rng: np.random.Generator) -> None:
    for page_size in (None, 16):
        chunks_agree(rng, "bfloat16", page_size, lengths_around(64), 66, new=True, kv_layout="hnd")


def test_pages_that_are_not_there(rng: np.random.Generator) -> None:
    """Entries outside of the cache, where a sequence uses them, are those next to it."""
    table = np.array([[4, -1, 2, 2**31 - 1], [6, 1, -(2**31), 0]], np.int32)
    q, *caches = (normal(rng, *shape, dtype="float16") for shape in ((2, 70, 4, 64), (6, 32, 2, 64), (6, 32, 2, 64)))
    lengths = vector(128, 100)
    out = cupyflash.attention_with_kvcache(q, *caches, cache_seqlens=lengths, page_table=table)
    for b, n in enumerate(lengths):
        arrays = [q[b : b + 1], *(x[np.clip(table[b], 0, 5)].reshape(1, 128, 2, 64)[:, :n] for x in caches)]
        expected, _ = standard_attention(*[x.astype(np.float64) for x in arrays], dtype=np.float64, causal=True)
        standard, _ = standard_attention(*arrays, dtype=q.dtype, causal=True)
        judge(out[b : b + 1], expected, standard, dtype=q.dtype, name="pages that are not there")


@pytest.mark.parametrize("lengths", [("seqused_k",), ("cu_seqlens_k",), ("cu_seqlens_k", "seqused_k", "seqused_q")])
def test_packed_chunks_over_pages_without_new_tokens(rng: np.random.Generator, lengths: tuple[str, ...]) -> None:
    """`attention_varlen`, with lengths, with offsets, or both; rows of nobody before and behind the sequences, or not used."""
    first, used = vector(3, 70, 219, 219, 300), [77, 96, 5, 0]
    q, *caches = (normal(rng, *shape, dtype="bfloat16") for shape in ((305, 4, 64), (15, 32, 2, 64), (15, 32, 2, 64)))
    table = rng.permutation(15)[:12].reshape(4, 3).astype(np.int32)
    given = {"seqused_k": vector(*used), "cu_seqlens_k": np.cumsum([0, *used]).astype(np.int32), "seqused_q": vector(60, 149, 9, 80)}
    options = {name: given[name] for name in lengths}
    out, lse, _ = cupyflash.attention_varlen(q, *caches, first, page_table=table, causal=True, return_lse=True, **options)
    expected, standard = np.zeros(out.shape), np.zeros(out.shape)
    for b, n in enumerate(used):
        part = slice(first[b], min(first[b + 1], first[b] + options.get("seqused_q", np.diff(first))[b]))
        if n and part.stop > part.start:
            arrays = [q[None, part], *(x[table[b]].reshape(1, 96, 2, 64)[:, :n] for x in caches)]
            expected[part] = standard_attention(*[x.astype(np.float64) for x in arrays], dtype=np.float64, causal=True)[0][0]
            standard[part] = standard_attention(*arrays, dtype=q.dtype, causal=True)[0][0]
    judge(out, expected, standard, dtype=q.dtype, name=f"packed over pages, {lengths}")
    np.testing.assert_array_equal(lse[:, np.r_[:3, 300:305]], -np.inf)


@pytest.mark.parametrize("page_size", [None, 16])
def test_chunks_with_every_other_option(rng: np.random.Generator, page_size: int | None) -> None:
    slopes = np.array([0.05, 0.02, 0.1, 0], np.float32)
    chunks_agree(rng, "bfloat16", page_size, lengths_around(64), 66, alibi_slopes=slopes, softcap=5.0)


@pytest.mark.parametrize("page_size", [None, 16])
def test_a_mask_over_a_cache(rng: np.random.Generator, page_size: int | None) -> None:
    """Of few rows, too."""
    for rows in (1, 66):
        server = Server(rng, [30, 149], page_size=page_size, slots=160, dim=64, dtype="float16")
        q = normal(rng, 2, rows, 4, 64, dtype="float16")
        mask = rng.random((2, 1, rows, 160)) < 0.7
        out, _ = server.attend(q, mask=mask, causal=False)
        for b, n in enumerate(server.lengths):
            keys = [x[b][None] for x in server.keys]
            arrays = [q[b : b + 1], *keys]
            expected, _ = standard_attention(*[x.astype(np.float64) for x in arrays], dtype=np.float64, mask=mask[b : b + 1, ..., :n])
            standard, _ = standard_attention(*arrays, dtype=q.dtype, mask=mask[b : b + 1, ..., :n])
            judge(out[b : b + 1], expected, standard, dtype=q.dtype, name=f"mask over pages of {page_size}, {rows} rows")


@pytest.mark.parametrize("page_size", [None, 16])
def test_the_length_of_the_buffer_changes_no_bit_of_a_chunk(rng: np.random.Generator, page_size: int | None) -> None:
    q, results = normal(rng, 2, 70, 4, 64, dtype="float16"), []
    keys = [[normal(rng, n, 2, 64, dtype="float16") for n in (40, 200)] for _ in range(2)]
    for slots in (208, 2048):
        server = Server(rng, [40, 200], page_size=page_size, slots=slots, dim=64, dtype="float16")
        for cache, sequences in zip(server.caches, keys, strict=True):
            for row, values in zip(server.table, sequences, strict=True):
                for j, value in enumerate(values):
                    cache[row[j // cache.shape[1]], j % cache.shape[1]] = value
        results.append(server.attend(q))
    for first, second in zip(*results, strict=True):
        assert first.tobytes() == second.tobytes()


def test_chunks_whose_rows_are_not_whole_loads(rng: np.random.Generator) -> None:
    """Heads 60 wide in rows of 64: tensor maps can read them, but not what turned queries and new results of that width are."""
    server = Server(rng, [70, 100], slots=180, dim=64, dtype="float16")
    caches, keys = [x[..., :60] for x in server.caches], [[x[..., :60] for x in sequences] for sequences in server.keys]
    q = normal(rng, 2, 65, 4, 64, dtype="float16")[..., :60]
    unturned = {"rotary_cos": np.ones((200, 30), np.float16), "rotary_sin": np.zeros((200, 30), np.float16)}
    for more in ({}, unturned, {"out": np.full((2, 65, 4, 64), np.nan, np.float16)[..., :60]}):
        out = cupyflash.attention_with_kvcache(q, *caches, cache_seqlens=vector(70, 100), **more)
        for b in range(2):
            arrays = [q[b : b + 1], *(x[b][None] for x in keys)]
            expected, _ = standard_attention(*[x.astype(np.float64) for x in arrays], dtype=np.float64, causal=True)
            standard, _ = standard_attention(*arrays, dtype=q.dtype, causal=True)
            judge(out[b : b + 1], expected, standard, dtype=q.dtype, name=f"{sorted(more)}")
