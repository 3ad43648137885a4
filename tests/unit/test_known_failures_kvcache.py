"""Failures that users of other libraries reported of caches, paging, splits and decoding, each a test that names its row (KF-nnn).

What only a GPU can show of these rows (memory checks, captured graphs, kernels that split) is in tests/gpu. Errors of arguments are in
test_kvcache_calls.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_known_failures import BOUNDS, DTYPES, poisoned

import cupyflash
from cupyflash import reference


def vector(*values: int) -> Any:
    return np.array(values, np.int32)


def normal(rng: np.random.Generator, *shape: int, dtype: str = "float32") -> Any:
    return rng.standard_normal(shape).astype(DTYPES[dtype])


class Server:
    """Sequences of random keys in a cache, dense or in pages of a shuffled table; all other slots hold `fill`."""

    def __init__(
        self,
        rng: np.random.Generator,
        lengths: Any,
        *,
        page_size: int | None = None,
        slots: int = 0,
        heads: int = 2,
        dim: int = 16,
        dtype: str = "float32",
        fill: float = np.nan,
        pages: int = 0,
    ) -> None:
        self.lengths, self.page_size = list(lengths), page_size
        slots = max(slots, *lengths)
        size = page_size or slots
        columns = -(-slots // size)
        count = max(len(self.lengths) * columns + 3, pages) if page_size else len(self.lengths)
        self.table = rng.permutation(count)[: len(self.lengths) * columns].reshape(-1, columns).astype(np.int32)
        if page_size is None:
            self.table = np.arange(count, dtype=np.int32)[:, None]
        self.caches = [np.full((count, size, heads, dim), fill, DTYPES[dtype]) for _ in range(2)]
        self.keys = [[normal(rng, n, heads, dim, dtype=dtype) for n in self.lengths] for _ in range(2)]
        for cache, sequences in zip(self.caches, self.keys, strict=True):
            for row, values in zip(self.table, sequences, strict=True):
                for j, value in enumerate(values):
                    cache[row[j // size], j % size] = value

    @property
    def options(self) -> dict[str, Any]:
        paged = {"page_table": self.table} if self.page_size else {}
        return {"cache_seqlens": vector(*self.lengths), **paged}

    def attend(self, q: Any, **options: Any) -> Any:
        """(out, lse), into NaN-filled memory."""
        out = poisoned((*q.shape[:-1], self.caches[1].shape[-1]), q.dtype)
        options = self.options | options
        result = cupyflash.attention_with_kvcache(q, *self.caches, out=out, return_lse=True, **options)
        assert result.out is out
        return out, result.lse

    def agrees(self, q: Any, new: Any = None, **options: Any) -> Any:
        """Attend, append `new` (k, v) before it, and compare each sequence with the float64 reference."""
        more = {} if new is None else {"k_new": new[0], "v_new": new[1]}
        out, lse = self.attend(q, **more, **options)
        known = {name: options[name] for name in ("window_size", "softcap", "softmax_scale", "sink") if name in options}
        bound = BOUNDS[q.dtype.name]
        for b in range(len(self.lengths)):
            k, v = (keys[b] for keys in self.keys)
            if new is not None:
                k, v = np.concatenate([k, new[0][b]]), np.concatenate([v, new[1][b]])
            expected, expected_lse = reference.attention(q[b], k, v, causal=options.get("causal", True), return_lse=True, **known)
            np.testing.assert_allclose(out[b].astype(np.float64), expected, rtol=bound, atol=bound)
            np.testing.assert_allclose(lse[b], expected_lse, rtol=2e-6, atol=1e-4)
        return out, lse


# --- slots that nobody owns --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fill", [np.nan, np.inf])
def test_kf_005_nan_behind_the_length_of_a_sequence(rng: np.random.Generator, dtype: str, fill: float) -> None:
    server = Server(rng, [1, 3], dtype=dtype, fill=fill)
    assert server.caches[0].shape[1] == 3
    server.agrees(normal(rng, 2, 1, 4, 16, dtype=dtype))
    server.agrees(normal(rng, 2, 5, 4, 16, dtype=dtype), causal=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fill", [np.nan, np.inf])
def test_kf_006_nan_in_the_last_slots_of_a_page(rng: np.random.Generator, dtype: str, fill: float) -> None:
    server = Server(rng, [13], page_size=4, dtype=dtype, fill=fill)
    for q_len in (1, 3, 14):
        server.agrees(normal(rng, 1, q_len, 4, 16, dtype=dtype))


@pytest.mark.parametrize("fill", [np.nan, np.inf])
def test_kf_005_006_also_under_pads_windows_and_with_appended_tokens(rng: np.random.Generator, fill: float) -> None:
    for page_size in (None, 1, 4):
        server = Server(rng, [7, 0, 3], page_size=page_size, slots=12, fill=fill)
        q, new = normal(rng, 3, 2, 4, 16), [normal(rng, 3, 2, 2, 16) for _ in range(2)]
        server.agrees(q, new, window_size=(3, 0))
        padded = Server(rng, [7, 5, 3], page_size=page_size, fill=fill)
        for cache in padded.caches:
            for b, pad in enumerate((2, 5, 0)):
                for j in range(pad):
                    cache[padded.table[b, j // cache.shape[1]], j % cache.shape[1]] = fill
        out, lse = padded.attend(q, cache_leftpad=vector(2, 5, 0))
        for b, pad in enumerate((2, 5, 0)):
            k, v = (keys[b][pad:] for keys in padded.keys)
            np.testing.assert_allclose(out[b], reference.attention(q[b], k, v, causal=True), rtol=2e-5, atol=2e-5)
        np.testing.assert_array_equal(lse[1], -np.inf)


# --- lengths --------------------------------------------------------------------------------------------------------------------------


def test_kf_012_one_query_sees_all_keys_in_every_entry_point(rng: np.random.Generator) -> None:
    server = Server(rng, [16], page_size=4)
    q = normal(rng, 1, 1, 4, 16)
    k, v = (keys[0] for keys in server.keys)
    expected = reference.attention(q[0], k, v)
    results = [
        cupyflash.attention(q[0], k, v, causal=True),
        cupyflash.attention_varlen(q[0], k, v, vector(0, 1), vector(0, 16), causal=True),
    ]
    paged = {"page_table": server.table, "seqused_k": vector(16)}
    results += [server.attend(q, **splits)[0][0] for splits in ({}, {"num_splits": 3}, {"split_size": 5})]
    results += [cupyflash.attention_varlen(q[0], *server.caches, vector(0, 1), causal=True, **paged)]
    for result in results:
        np.testing.assert_allclose(result, expected, rtol=2e-5, atol=2e-5)


def test_kf_041_lengths_past_the_page_table_are_clamped_and_reported(rng: np.random.Generator, monkeypatch: Any, caplog: Any) -> None:
    server, q = Server(rng, [32], page_size=16), normal(rng, 1, 1, 4, 16)
    assert server.table.shape == (1, 2)
    expected, _ = server.agrees(q)
    for length in (40, 2**31 - 1):
        out, _ = server.attend(q, cache_seqlens=vector(length))
        np.testing.assert_array_equal(out, expected)
    out, lse = server.attend(q, cache_seqlens=vector(-3))
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)
    monkeypatch.setenv("CUPYFLASH_DEBUG", "check")
    server.attend(q, cache_seqlens=vector(40))
    assert caplog.messages == ["cache_seqlens holds [40]: lengths are clamped to 0 <= length <= 32"]


@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("kv_layout", ["nhd", "hnd"])
def test_kf_042_what_is_appended_past_the_end_is_dropped(
    rng: np.random.Generator, page_size: int | None, kv_layout: str, monkeypatch: Any, caplog: Any
) -> None:
    """Canaries lie behind the cache and, where it is in pages, behind the table's row, which names them."""
    size = page_size or 8
    room = 8 // size
    canvas = np.full((2, room + 2, size, 2, 16), 7, np.float32)
    caches = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) if kv_layout == "hnd" else x for x in canvas]
    views = [x[1 : 1 + room] for x in caches]
    keys = [normal(rng, 8, 2, 16) for _ in range(2)]
    for view, values in zip(views, keys, strict=True):
        for j, value in enumerate(values):
            view[j // size, j % size] = value
    table = np.array([[0, 1, 2]], np.int32)[:, : room + 1]
    options: dict[str, Any] = {"kv_layout": kv_layout, "cache_seqlens": vector(8)}
    if page_size:
        options["page_table"] = table[:, :room]
    given = [x.swapaxes(1, 2) for x in views] if kv_layout == "hnd" else views
    before = [x.copy() for x in caches]
    q, new = normal(rng, 1, 1, 4, 16), normal(rng, 1, 1, 2, 16)
    out = cupyflash.attention_with_kvcache(q, *given, k_new=new, v_new=new, **options)
    np.testing.assert_allclose(out[0], reference.attention(q[0], *keys), rtol=2e-5, atol=2e-5)
    for x, old in zip(caches, before, strict=True):
        np.testing.assert_array_equal(x, old)
    monkeypatch.setenv("CUPYFLASH_DEBUG", "check")
    options["cache_seqlens"] = vector(7)  # of two tokens the first has a slot
    pair = normal(rng, 1, 2, 2, 16)
    cupyflash.attention_with_kvcache(normal(rng, 1, 2, 4, 16), *given, k_new=pair, v_new=pair, **options)
    assert caplog.messages == ["cache_seqlens with the new tokens holds [9]: lengths are clamped to 0 <= length <= 8"]
    for x, old in zip(caches, before, strict=True):
        old[room, (size - 1) % size] = pair[0, 0]
        np.testing.assert_array_equal(x, old)


def test_kf_042_nothing_is_written_through_an_entry_outside_of_the_cache(rng: np.random.Generator) -> None:
    q, new = normal(rng, 2, 1, 4, 16), normal(rng, 2, 1, 2, 16)
    for wrong in (-1, 5, 2**31 - 1, -(2**31)):
        pages, expected = np.zeros((2, 5, 4, 2, 16), np.float32), np.zeros((2, 5, 4, 2, 16), np.float32)
        expected[:, 3, 0] = new[1, 0]
        given = {"cache_seqlens": vector(4, 0), "k_new": new, "v_new": new}
        cupyflash.attention_with_kvcache(q, *pages, page_table=np.array([[2, wrong], [3, wrong]], np.int32), **given)
        np.testing.assert_array_equal(pages, expected)
        dense, expected = np.zeros((2, 5, 8, 2, 16), np.float32), np.zeros((2, 5, 8, 2, 16), np.float32)
        expected[:, 1, 0] = new[1, 0]
        cupyflash.attention_with_kvcache(q, *dense, cache_batch_idx=vector(wrong, 1), **given)
        np.testing.assert_array_equal(dense, expected)


@pytest.mark.parametrize("page_size", [None, 1, 4])
def test_kf_043_an_empty_sequence(rng: np.random.Generator, page_size: int | None) -> None:
    q, new = normal(rng, 2, 1, 4, 16), [normal(rng, 2, 1, 2, 16) for _ in range(2)]
    Server(rng, [0, 5], page_size=page_size, slots=8).agrees(q, new)
    out, lse = Server(rng, [0, 5], page_size=page_size, slots=8).agrees(q)
    np.testing.assert_array_equal(out[0], 0)
    np.testing.assert_array_equal(lse[0], -np.inf)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [None, 4])
def test_kf_044_the_diagonal_counts_appended_tokens(rng: np.random.Generator, dtype: str, page_size: int | None) -> None:
    q, new = normal(rng, 2, 2, 4, 16, dtype=dtype), [normal(rng, 2, 2, 2, 16, dtype=dtype) for _ in range(2)]
    Server(rng, [9, 4], page_size=page_size, slots=16, dtype=dtype).agrees(q, new)
    more = [normal(rng, 2, 3, 2, 16, dtype=dtype) for _ in range(2)]  # other numbers of queries than of new tokens
    Server(rng, [9, 4], page_size=page_size, slots=16, dtype=dtype).agrees(q, more)
    Server(rng, [9, 4], page_size=page_size, slots=16, dtype=dtype).agrees(q, more, window_size=(2, 0), softcap=3.0)


@pytest.mark.parametrize("splits", [{}, {"num_splits": 1}, {"num_splits": 4}, {"split_size": 16}])
def test_kf_045_the_length_of_the_buffer_changes_no_bit(rng: np.random.Generator, splits: dict[str, int]) -> None:
    q = normal(rng, 1, 1, 4, 16)
    short = Server(rng, [40], slots=64)
    long = [np.full((1, 4096, 2, 16), np.nan, np.float32) for _ in range(2)]
    for x, y in zip(long, short.caches, strict=True):
        x[:, :64] = y
    out, lse = short.agrees(q, **splits)
    again = cupyflash.attention_with_kvcache(q, *long, cache_seqlens=vector(40), return_lse=True, **splits)
    assert (again.out.tobytes(), again.lse.tobytes()) == (out.tobytes(), lse.tobytes())


def packed_agrees(server: Server, q: Any, cu_seqlens_q: Any, **options: Any) -> Any:
    out, lse = server.attend(q, cu_seqlens_q=cu_seqlens_q, **options)
    for b, (k, v) in enumerate(zip(*server.keys, strict=True)):
        rows = slice(*cu_seqlens_q[b : b + 2])
        expected, expected_lse = reference.attention(q[rows], k, v, causal=True, return_lse=True)
        np.testing.assert_allclose(out[rows], expected, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(lse[:, rows], expected_lse, rtol=2e-6, atol=1e-4)
    return out


def test_kf_046_packed_queries_of_several_lengths_over_pages(rng: np.random.Generator) -> None:
    server, q, cu_seqlens_q = Server(rng, [30, 9, 55], page_size=16), normal(rng, 6, 4, 16), vector(0, 2, 3, 6)
    expected = packed_agrees(server, q, cu_seqlens_q)
    for splits in ({"num_splits": 4}, {"split_size": 16}):
        np.testing.assert_allclose(packed_agrees(server, q, cu_seqlens_q, **splits), expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [None, 16])
def test_kf_047_048_049_numbers_of_splits(rng: np.random.Generator, dtype: str, page_size: int | None) -> None:
    """Also more than there are tiles; and out is the same whether the LSE is asked for or not."""
    server, q = Server(rng, [40, 600], page_size=page_size, dtype=dtype), normal(rng, 2, 1, 4, 16, dtype=dtype)
    one, _ = server.agrees(q, num_splits=1)
    for splits in (2, 3, 4, 7, 8, 64):
        out, _ = server.agrees(q, num_splits=splits)
        np.testing.assert_allclose(out.astype(float), one.astype(float), rtol=BOUNDS[dtype], atol=BOUNDS[dtype])
        alone = cupyflash.attention_with_kvcache(q, *server.caches, num_splits=splits, **server.options)
        np.testing.assert_array_equal(alone, out)


@pytest.mark.parametrize("page_size", [1, 16, 32, 64, 256])
def test_kf_050_pages_of_a_large_pool_in_any_order(rng: np.random.Generator, page_size: int) -> None:
    server = Server(rng, [300, 1, 257], page_size=page_size, heads=1, dim=8, pages=2048)
    assert len(server.caches[0]) >= 2048
    q = normal(rng, 3, 2, 2, 8)
    out, _ = server.agrees(q)
    dense = [np.full((3, 300, 1, 8), np.nan, np.float32) for _ in range(2)]
    for x, keys in zip(dense, server.keys, strict=True):
        for row, values in zip(x, keys, strict=True):
            row[: len(values)] = values
    np.testing.assert_array_equal(cupyflash.attention_with_kvcache(q, *dense, cache_seqlens=vector(*server.lengths)), out)


def test_kf_051_a_hint_changes_no_bit(rng: np.random.Generator) -> None:
    server, q = Server(rng, [40, 700], page_size=16), normal(rng, 3, 4, 16)
    options = {"page_table": server.table, "seqused_k": vector(*server.lengths), "causal": True}
    results = [
        cupyflash.attention_varlen(q, *server.caches, vector(0, 1, 3), max_seqlen_q=n, max_seqlen_k=n, **options)
        for n in (None, 1, 64, 4096)
    ]
    results.append(server.attend(q, cu_seqlens_q=vector(0, 1, 3), max_seqlen_q=1)[0])
    assert len({result.tobytes() for result in results}) == 1


def test_kf_052_053_the_lse_is_the_natural_logarithm_in_every_form(rng: np.random.Generator) -> None:
    """Dense, packed, decoding, in parts, and of quantised caches: float32, a row for each token and none for padding."""
    for dtype in (*DTYPES, "float8_e4m3fn", "int8"):
        quantised = dtype not in DTYPES
        server = Server(rng, [3, 9], page_size=4, dtype="float32" if quantised else dtype)
        q = normal(rng, 12, 4, 16, dtype="float32" if quantised else dtype)
        caches, keys = server.caches, server.keys[0]
        if quantised:
            scale = {"float8_e4m3fn": 1, "int8": 32}[dtype]
            with np.errstate(invalid="ignore"):
                stored = getattr(ml_dtypes, dtype, np.int8)
                server.caches = caches = [np.rint(x * scale).astype(stored) if scale > 1 else x.astype(stored) for x in caches]
            keys = [(np.rint(k * scale) if scale > 1 else k).astype(stored).astype(float) / scale for k in keys]
            options = {"k_descale": 1 / scale}
        else:
            options = {}
        _, lse = server.attend(q, cu_seqlens_q=vector(0, 3, 12), causal=False, **options)
        assert lse.shape == (4, 12)
        assert lse.dtype == (np.float64 if dtype == "float64" else np.float32)
        for s, k in zip((slice(0, 3), slice(3, 12)), keys, strict=True):
            scores = np.einsum("ihd,jhd->hij", q[s].astype(float), np.repeat(k, 2, axis=1).astype(float)) / 4
            np.testing.assert_allclose(lse[:, s], np.log(np.exp(scores).sum(-1)), rtol=2e-6, atol=1e-4)
        for splits in ({"num_splits": 3}, {"split_size": 2}):
            _, dense = server.attend(q.reshape(2, 6, 4, 16), causal=False, **splits, **options)
            assert dense.shape == (2, 4, 6)
            np.testing.assert_allclose(dense[0, :, :3], lse[:, :3], rtol=2e-6, atol=1e-4)


def test_kf_057_a_sequence_without_keys_among_others(rng: np.random.Generator) -> None:
    """Its rows are 0 and -inf, and count for nothing where they are merged with a part that has keys."""
    server, q = Server(rng, [5, 0, 9], page_size=4), normal(rng, 3, 2, 4, 16)
    out, lse = server.agrees(q)
    np.testing.assert_array_equal(lse[1], -np.inf)
    other = Server(rng, [3, 7, 2]).agrees(q, causal=False)
    merged = cupyflash.merge_states([out, other[0]], [lse, other[1]])
    np.testing.assert_array_equal(merged[0][1], other[0][1])
    np.testing.assert_array_equal(merged[1][1], other[1][1])


def test_kf_061_a_pool_of_more_than_2_31_elements(rng: np.random.Generator) -> None:
    """The same keys in its first and in its last pages. Of 2.2 GB of zeros only the pages in use are ever touched."""
    shape = (16500, 64, 8, 256)
    assert np.prod(shape, dtype=np.int64) > 1 << 31
    k_cache, v_cache = np.zeros(shape, np.int8), np.zeros(shape, np.int8)
    keys = rng.integers(-127, 128, (2, 100, 8, 256))
    tables = np.array([[0, 1], [16498, 16499]], np.int32)
    for cache, values in zip((k_cache, v_cache), keys, strict=True):
        for row in tables:
            cache[row[0]], cache[row[1], :36] = values[:64], values[64:]
    q = np.repeat(normal(rng, 1, 1, 8, 256), 2, axis=0)
    options: dict[str, Any] = {"page_table": tables, "k_descale": 0.01, "v_descale": 0.01}
    out = cupyflash.attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=vector(100, 100), **options)
    np.testing.assert_array_equal(out[0], out[1])
    np.testing.assert_allclose(out[0], reference.attention(q[0], *keys * np.float32(0.01).astype(float)), rtol=2e-5, atol=2e-5)
    new = normal(rng, 2, 1, 8, 256)
    cupyflash.attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=vector(100, 100), k_new=new, v_new=new, **options)
    np.testing.assert_array_equal(k_cache[16499, 36], np.clip(np.rint(new[1, 0] / np.float32(0.01)), -128, 127))
    assert not k_cache[1, 37:].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_kf_078_every_run_has_the_same_bits(rng: np.random.Generator, dtype: str) -> None:
    server, q = Server(rng, [700, 33], page_size=16, dtype=dtype), normal(rng, 2, 1, 8, 16, dtype=dtype)
    for splits in (1, 2, 5, 8, 32):
        runs = [server.attend(q, num_splits=splits) for _ in range(4)]
        assert len({(out.tobytes(), lse.tobytes()) for out, lse in runs}) == 1
        assert np.isfinite(runs[0][0].astype(float)).all()


def test_kf_094_a_plan_serves_lengths_that_grow(rng: np.random.Generator) -> None:
    """From one key to 4096, in the same arrays, as between replays of a captured graph."""
    server, q = Server(rng, [4096, 4096], page_size=64), normal(rng, 2, 1, 4, 16)
    plan = cupyflash.plan_decode(
        batch=2, num_heads_q=4, num_heads_kv=2, head_dim=16, page_size=64, max_seqlen_k=4096, dtype="float32", device="host"
    )
    lengths = vector(1, 1)
    for used in ((1, 1), (4096, 1), (7, 4095), (0, 64)):
        lengths[...] = used
        plan.update(lengths)
        out, lse = server.attend(q, cache_seqlens=lengths, plan=plan)
        for b, n in enumerate(used):
            expected, expected_lse = reference.attention(q[b], *(keys[b][:n] for keys in server.keys), return_lse=True)
            np.testing.assert_allclose(out[b], expected, rtol=2e-5, atol=2e-5)
            np.testing.assert_allclose(lse[b], expected_lse, rtol=2e-6, atol=1e-4)


def test_kf_124_flops_are_those_of_the_true_lengths() -> None:
    from bench import cases

    lengths = (1, 4096, 100)
    case = cases.Case(num_heads_q=4, num_heads_kv=2, head_dim=64, head_dim_v=64, dtype="float16", **cases.packed(lengths))
    assert case.flops == 4 * 64 * 4 * sum(n * n for n in lengths)


@pytest.mark.parametrize("wrong", [[0, 9, 4, 12], [-3, 5, 12, 12], [0, 5, 99, 100], [2**31 - 1, 0, -(2**31), 7], [12, 12, 0, 0]])
def test_kf_130_offsets_that_decrease_or_leave_the_array(rng: np.random.Generator, wrong: list[int]) -> None:
    """As everywhere, they are clamped: nothing outside of q and out is read or written, and every row is."""
    server = Server(rng, [8, 3, 8], page_size=4, slots=20)
    canvas = np.full((3, 14, 4, 16), 7, np.float32)
    q, out, new = canvas[0, 1:13], canvas[1, 1:13], canvas[2, 1:13, :2]
    q[...], out[...], new[...] = 1, np.nan, 2
    call: Callable[..., Any] = cupyflash.attention_with_kvcache
    call(q, *server.caches, out=out, cu_seqlens_q=vector(*wrong), k_new=new, v_new=new, **server.options)
    assert np.isfinite(out).all()
    for around in itertools.chain(canvas[:, 0], canvas[:, 13]):
        np.testing.assert_array_equal(around, 7)
