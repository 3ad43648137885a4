"""Calls over caches by the kernels, run on the CPU: those of tests/unit, with NaN in all memory that is nobody's, workspaces too.

Each call is also made on the host path, with copies of the caches: both must leave the same bytes in them.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "unit")]
import emulator  # noqa: E402
import test_known_failures_kvcache as failures  # noqa: E402
import test_kvcache  # noqa: E402
import test_kvcache_calls as calls  # noqa: E402
import test_kvcache_chunks as chunks  # noqa: E402
from emulator import emulated  # noqa: E402

import cupyflash  # noqa: E402
from cupyflash import plan, variants  # noqa: E402
from cupyflash.variants import Row, SimpleConfig  # noqa: E402

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="g++ is not installed: it compiles the kernels for the CPU")

E4M3 = ml_dtypes.float8_e4m3fn
over_cache, over_pages, plan_decode = cupyflash.attention_with_kvcache, cupyflash.attention_varlen, cupyflash.plan_decode


def copied(*views: np.ndarray) -> list[np.ndarray]:
    """Copies of views with the memory around them, in which those of one array have one."""
    memory: dict[int, np.ndarray] = {}
    found = []
    for x in views:
        base = test_kvcache.base(x)
        memory.setdefault(id(base), np.frombuffer(bytearray(base.tobytes("A")), np.uint8))
        offset = x.ctypes.data - base.ctypes.data
        found.append(np.ndarray(x.shape, x.dtype, memory[id(base)], offset, x.strides))
    return found


def by_kernels(q: Any, k_cache: Any, v_cache: Any, /, **options: Any) -> Any:
    """What stands in the place of `attention_with_kvcache` here."""
    offsets = options.get("cu_seqlens_q")
    alike = k_cache.nbytes < 1 << 24 and (offsets is None or (np.diff(offsets) >= 0).all())  # overlapping sequences have no one result
    there = copied(k_cache, v_cache) if alike else []
    with emulated():
        result = over_cache(q, k_cache, v_cache, **options)
    if alike and emulator.wanted is None:
        over_cache(q, *there, **options | {"out": None, "plan": None})
        for name, x, host in zip(("k_cache", "v_cache"), (k_cache, v_cache), there, strict=True):
            assert test_kvcache.base(x).tobytes("A") == test_kvcache.base(host).tobytes(), f"{name} differs from the host path's"
    return result


def paged_by_kernels(*arrays: Any, **options: Any) -> Any:
    with emulated():
        return over_pages(*arrays, **options)


@pytest.fixture(autouse=True)
def on_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    replace(monkeypatch)


def replace(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cupyflash, "attention_with_kvcache", by_kernels)
    patch.setattr(cupyflash, "attention_varlen", paged_by_kernels)
    patch.setattr(cupyflash, "plan_decode", lambda **how: plan_decode(**how | {"device": "sm_90a"}))
    patch.setattr(test_kvcache, "attended", lambda rows, dtype: rows.astype(dtype).astype(np.float64))


@pytest.fixture(scope="module", autouse=True)
def kernels(request: pytest.FixtureRequest) -> None:
    """Compile what the tests here will launch, on all cores."""

    def nothing(*_: Any, **__: Any) -> None:
        pass

    def every() -> None:
        for item in request.session.items:
            if item.path == request.path:
                with pytest.MonkeyPatch.context() as own, contextlib.suppress(AssertionError):  # nothing is computed
                    given = {"rng": np.random.default_rng(0), "monkeypatch": own}
                    given |= getattr(getattr(item, "callspec", None), "params", {})
                    item.obj(**{name: given[name] for name in inspect.signature(item.obj).parameters})

    with pytest.MonkeyPatch.context() as patch:
        replace(patch)
        for module, names in (
            (test_kvcache, ("judge", "check_appended")),
            (chunks, ("judge",)),
            (np.testing, ("assert_allclose", "assert_array_equal")),
        ):
            for name in names:
                patch.setattr(module, name, nothing)
        emulator.compile_kernels_of(every)


# Those cases first that have most pairs of options which no case before has: the covering arrays begin with them.
@pytest.mark.parametrize("case", test_kvcache.CASES[:10])
def test_pair(case: dict[str, Any], rng: np.random.Generator) -> None:
    test_kvcache.test_pair(case, rng)


@pytest.mark.parametrize("case", test_kvcache.PAGED_CASES[:4])
def test_pair_of_packed_queries_over_pages(case: dict[str, Any], rng: np.random.Generator) -> None:
    test_kvcache.test_pair_of_packed_queries_over_pages(case, rng)


CALLS = [
    (failures.test_kf_005_nan_behind_the_length_of_a_sequence, {"dtype": "bfloat16", "fill": np.nan}),
    (failures.test_kf_006_nan_in_the_last_slots_of_a_page, {"dtype": "float16", "fill": np.inf}),
    (failures.test_kf_005_006_also_under_pads_windows_and_with_appended_tokens, {"fill": np.nan}),
    (failures.test_kf_041_lengths_past_the_page_table_are_clamped, {}),
    *((failures.test_kf_042_what_is_appended_past_the_end_is_dropped, {"page_size": n, "kv_layout": "hnd"}) for n in (None, 4)),
    (failures.test_kf_042_nothing_is_written_through_an_entry_outside_of_the_cache, {}),
    *((failures.test_kf_043_an_empty_sequence, {"page_size": n}) for n in (None, 1)),
    (failures.test_kf_044_the_diagonal_counts_appended_tokens, {"dtype": "float32", "page_size": 4}),
    (failures.test_kf_045_the_length_of_the_buffer_changes_no_bit, {"splits": {}}),
    (failures.test_kf_046_packed_queries_of_several_lengths_over_pages, {}),
    (failures.test_kf_050_pages_of_a_large_pool_in_any_order, {"page_size": 16}),
    (failures.test_kf_057_a_sequence_without_keys_among_others, {}),
    (failures.test_kf_061_a_pool_of_more_than_2_31_elements, {}),
    *((failures.test_kf_130_offsets_that_decrease_or_leave_the_array, {"wrong": x}) for x in ([0, 9, 4, 12], [2**31 - 1, 0, -(2**31), 7])),
    (calls.test_the_tokens_of_a_prompt_have_the_same_keys_in_one_call_and_in_many, {}),
    (calls.test_latent_attention_reads_values_out_of_the_keys, {}),
]


@pytest.mark.parametrize(("call", "options"), CALLS, ids=[f"{call.__name__}-{'-'.join(map(str, how.values()))}" for call, how in CALLS])
def test_call(call: Any, options: dict[str, Any], rng: np.random.Generator) -> None:
    call(rng, **options)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("cache_dtype", [E4M3, np.int8])
def test_numbers_of_few_bits(cache_dtype: Any, dtype: Any, rng: np.random.Generator) -> None:
    """All 256 codes are read, and what lies on, and next to, the middles between them is rounded as on the host, NaN and infinities too."""
    codes = np.arange(256, dtype=np.uint8).view(cache_dtype)
    stored = np.tile(codes, (1, 1, 2, 1))
    scales = {"k_descale": 0.5, "v_descale": np.array([0.25, 3], np.float32)}
    zero = np.zeros((1, 1, 2, 1), dtype)
    out = cupyflash.attention_with_kvcache(zero, np.zeros((1, 1, 2, 1), cache_dtype), stored, cache_seqlens=calls.vector(1), **scales)
    if emulator.wanted is None:
        assert np.isnan(out[0, 0]).sum() == (4 if cache_dtype == E4M3 else 0)
        np.testing.assert_array_equal(out[0, 0], codes.astype(dtype) * scales["v_descale"][:, None])

    values = np.sort(codes.astype(dtype)[np.isfinite(codes.astype(dtype))])
    middles = (values[1:] + values[:-1]) / 2
    near = [np.nextafter(middles, dtype(x)) for x in (-1000, 1000)]
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-30, -1e-30, 449, 463.9, 464, 1e30], dtype)
    new = np.concatenate([values, middles, *near, special, rng.standard_normal(500) * 100]).astype(dtype)
    new = np.resize(new, (1, -(-new.size // 64), 1, 64))
    caches = [np.zeros(new.shape, cache_dtype) for _ in range(2)]
    scales = {"k_descale": 1.0, "v_descale": np.float32(1 / 3)}
    q = np.zeros((1, 1, 1, 64), dtype)
    cupyflash.attention_with_kvcache(q, *caches, cache_seqlens=calls.vector(0), k_new=new, v_new=new, **scales)


@pytest.mark.parametrize(("head_dim", "page_size"), [(64, 16), (64, 24), (64, 64), (128, 16)])
def test_bytes_in_small_pages(head_dim: int, page_size: int, rng: np.random.Generator) -> None:
    """A warp takes more keys at a time than it has lanes: each lane knows more than one page."""
    q = rng.standard_normal((2, 1, 8, head_dim)).astype(ml_dtypes.bfloat16)
    table = rng.permutation(20).reshape(2, 10).astype(np.int32)
    k_cache, v_cache = rng.integers(-127, 128, (2, 20, page_size, 2, head_dim)).astype(np.int8)
    options: dict[str, Any] = {"cache_seqlens": np.array([10 * page_size - 5, 37], np.int32), "page_table": table}
    options |= {"k_descale": 0.01, "v_descale": 0.01}
    out = cupyflash.attention_with_kvcache(q, k_cache, v_cache, **options)
    assert emulator.ran[-1].startswith("decode")
    expected = over_cache(q, k_cache, v_cache, **options)
    np.testing.assert_allclose(out.astype(np.float32), expected.astype(np.float32), atol=8e-3)  # an ulp of what lies in [1, 2)


def test_tables_of_any_rows_and_small_vectors_of_any_strides(rng: np.random.Generator) -> None:
    """Rows of a wider table, every other length, tables of a wider array, scales of a wider one."""
    wide = rng.permutation(24).reshape(3, 8).astype(np.int32)
    lengths = np.array([9, -1, 0, -1, 13, -1], np.int32)
    angles = np.arange(40)[:, None] * 0.7 ** np.arange(9)
    tables = [f(angles).astype(np.float32)[::2, 1:5] for f in (np.cos, np.sin)]
    scales = rng.uniform(0.01, 0.05, (6, 4)).astype(np.float32)
    given = {"page_table": wide[:, 2:7], "cache_seqlens": lengths[::2], "k_descale": scales[::2, ::2], "v_descale": scales[1::2, 1::2]}
    given |= {"cache_leftpad": calls.vector(1, 7, 0, 7, 20, 7)[::2], "rotary_positions": calls.vector(5, 7, 0, 7, 100, 7)[::2]}
    given |= dict(zip(("rotary_cos", "rotary_sin"), tables, strict=True))
    caches = [rng.integers(-99, 99, (24, 4, 2, 16)).astype(np.int8) for _ in range(2)]
    q, k_new, v_new = (calls.normal(rng, 3, 2, heads, 16) for heads in (4, 2, 2))
    expected = over_cache(q, *copied(*caches), k_new=k_new, v_new=v_new, **given)
    out = cupyflash.attention_with_kvcache(q, *caches, k_new=k_new, v_new=v_new, **given)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)


def test_packed_tokens_of_no_sequence(rng: np.random.Generator) -> None:
    """Before the first and behind the last offset: results are 0, and nothing of what lies there is appended."""
    offsets, held = calls.vector(2, 5, 5, 9), [7, 7, 4, 0, 17, 7, 7]  # nobody's lengths lie around those of the sequences
    tokens = [calls.normal(rng, 12, heads, 8) for heads in (4, 2, 2)]
    nobodys = np.r_[0, 1, 9:12]
    for x in tokens:
        x[nobodys] = np.nan
    q, k_new, v_new = tokens
    angles = np.arange(40)[:, None] * 0.7 ** np.arange(4)
    given = {"cache_seqlens": calls.vector(*held)[2:5], "page_table": rng.permutation(18).reshape(3, 6).astype(np.int32)}
    given |= {name: f(angles).astype(np.float32) for name, f in (("rotary_cos", np.cos), ("rotary_sin", np.sin))}
    given |= {"k_new": k_new, "v_new": v_new, "cu_seqlens_q": offsets, "alibi_slopes": rng.random((3, 4)).astype(np.float32)}
    caches = [calls.normal(rng, 18, 4, 2, 8) for _ in range(2)]
    expected = over_cache(q, *copied(*caches), **given)
    out, lse, _ = cupyflash.attention_with_kvcache(q, *caches, return_lse=True, **given)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(out[nobodys], 0)
    np.testing.assert_array_equal(lse[:, nobodys], -np.inf)


@pytest.mark.parametrize("shape", [(0, 4, 2, 8), (1, 0, 2, 8)])
def test_a_cache_without_slots(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    """Of no pages, though the table has room for some, or of pages without slots: rows see no key, and new tokens are dropped."""
    caches = [np.zeros(shape, np.float32) for _ in range(2)]
    q, new = calls.normal(rng, 1, 2, 4, 8), calls.normal(rng, 1, 2, 2, 8)
    given = {"cache_seqlens": calls.vector(3), "page_table": np.zeros((1, 2), np.int32)}
    for more in ({}, {"k_new": new, "v_new": new}):
        out, lse, _ = cupyflash.attention_with_kvcache(q, *caches, return_lse=True, **given, **more)
        np.testing.assert_array_equal(out, 0)
        np.testing.assert_array_equal(lse, -np.inf)


# --- chunks ------------------------------------------------------------------------------------------------------------------------------


def chunk_rows() -> list[Any]:
    """Rows of one width over a dense cache; of each width one of sm_90a over pages, which change but copies."""
    rows = [row for row in variants.FORWARD if not isinstance(row.config, SimpleConfig) and (row.arch or row.head_dim == 128)]
    first = {row.head_dim: row for row in reversed(rows) if row.arch}
    sizes: dict[Row, tuple[int | None, ...]] = {}
    for row in rows:
        dense = (None,) if row.head_dim == 128 and row.longest is None and (row.arch or row.options) else ()
        sizes[row] = (*dense, *((64,) if row.arch and row is first[row.head_dim] else ()))
    found = [(row, ("bfloat16", "float16")[n % 2], size) for n, row in enumerate(rows) for size in sizes[row]]
    names = [f"{row.family}-{row.head_dim}-{row.config.tile}{'-options' * row.options}-{dtype}-{size}" for row, dtype, size in found]
    return [pytest.param(*case, id=name) for case, name in zip(found, names, strict=True)]


@pytest.mark.parametrize(("row", "dtype", "page_size"), chunk_rows())
def test_chunks(row: Row, dtype: str, page_size: int | None, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "FORWARD", (row,))
    chunks.edges_agree(rng, dtype, page_size, row)
    assert row.family in emulator.ran[-1]
    assert ("paged" in emulator.ran[-1]) == bool(page_size)


CHUNKS = [
    *((chunks.test_packed_chunks, {"dtype": dtype, "page_size": n}) for dtype, n in (("float16", None), ("bfloat16", 16))),
    (chunks.test_chunks, {"dtype": "bfloat16", "page_size": 256}),
    (chunks.test_chunks_with_every_other_option, {"page_size": 16}),
    (chunks.test_a_mask_over_a_cache, {"page_size": None}),
    (chunks.test_the_length_of_the_buffer_changes_no_bit_of_a_chunk, {"page_size": 16}),
    (chunks.test_chunks_over_entries_of_a_cache, {"packed": True}),
    (chunks.test_chunks_in_heads_before_slots, {}),
    (chunks.test_pages_that_are_not_there, {}),
    *(
        (chunks.test_packed_chunks_over_pages_without_new_tokens, {"lengths": names})
        for names in (("seqused_k",), ("cu_seqlens_k", "seqused_q"))
    ),
    (chunks.test_chunks_whose_rows_are_not_whole_loads, {}),
]


@pytest.mark.parametrize(("call", "options"), CHUNKS, ids=[f"{call.__name__}-{'-'.join(map(str, how.values()))}" for call, how in CHUNKS])
def test_calls_of_chunks(call: Any, options: dict[str, Any], rng: np.random.Generator) -> None:
    call(rng=rng, **options)
    assert "fwd_sm90" in emulator.ran[-1]  # of the last call
