"""Caches as a caller meets them: errors, plans, libraries, what is written where, and when results have the same bits."""

from __future__ import annotations

import doctest
import inspect
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_arrays import FakeCupyArray, cupy  # noqa: F401  # a fixture
from test_known_failures import BOUNDS

import cupyflash
from cupyflash import ArgumentError, DeviceError, DtypeError, ShapeError, UnsupportedError, api, cache, host, host_cache, reference
from cupyflash.keywords import _CACHE, _PAGES, FOREIGN

F32 = np.float32
E4M3 = ml_dtypes.float8_e4m3fn


def normal(rng: np.random.Generator, *shape: int, dtype: Any = F32) -> Any:
    return rng.standard_normal(shape).astype(dtype)


def vector(*values: int) -> Any:
    return np.array(values, np.int32)


# --- errors ----------------------------------------------------------------------------------------------------------------------------

GIVEN: dict[str, Any] = {"q": (2, 1, 4, 8), "k_cache": (2, 6, 2, 8), "v_cache": (2, 6, 2, 8), "cache_seqlens": vector(3, 5)}
PAGES: dict[str, Any] = {"k_cache": (9, 4, 2, 8), "v_cache": (9, 4, 2, 8), "page_table": np.zeros((2, 3), np.int32)}
NEW: dict[str, Any] = {"k_new": np.ones((2, 1, 2, 8), F32), "v_new": np.ones((2, 1, 2, 8), F32)}
ROTARY: dict[str, Any] = {"rotary_cos": np.ones((9, 2), F32), "rotary_sin": np.ones((9, 2), F32)}
QUANTISED: dict[str, Any] = {"k_cache": np.ones((2, 6, 2, 8), np.int8), "v_cache": np.ones((2, 6, 2, 8), np.int8)}
PLAN = {"batch": 2, "num_heads_q": 4, "num_heads_kv": 2, "head_dim": 8, "max_seqlen_k": 6, "dtype": F32, "device": "host"}
READ_ONLY = np.ones((2, 6, 2, 8), F32)
READ_ONLY.flags.writeable = False
SAME = np.ones((2, 6, 2, 8), F32)
CASES: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (ShapeError, r"q has shape \(5, 4, 8\): it must have 4 axes, \(B, Sq, Hq, D\), or 3 with cu_seqlens_q", {"q": (5, 4, 8)}),
    (ShapeError, r"q has shape \(2, 1, 4, 8\): it must have 3 axes, \(Tq, Hq, D\), with cu_seqlens_q", {"cu_seqlens_q": vector(0, 1, 2)}),
    (ShapeError, r"cu_seqlens_q has shape \(0,\): it must be \(B \+ 1,\)", {"q": (2, 4, 8), "cu_seqlens_q": vector()}),
    (ShapeError, r"k_cache has shape \(6, 2, 8\): it must be \(B, Sc, Hkv, D\) or \(pages, page_size, Hkv, D\)", {"k_cache": (6, 2, 8)}),
    (ShapeError, r"k_cache has batch 3 and q has 2: .* cache_batch_idx= .*page_table=", {"k_cache": (3, 6, 2, 8), "v_cache": (3, 6, 2, 8)}),
    (ShapeError, r"k_cache has head_dim 16 and q has 8", {"k_cache": (2, 6, 2, 16)}),
    (ShapeError, r"v_cache has page_size 5 and k_cache has 6", {"v_cache": (2, 5, 2, 8)}),
    (ShapeError, r"v_cache has 1 heads and k_cache has 2", {"v_cache": (2, 6, 1, 8)}),
    (ShapeError, r"k_cache has 3 heads and q has 4: num_heads_q must be a multiple", {"k_cache": (2, 6, 3, 8), "v_cache": (2, 6, 3, 8)}),
    (ShapeError, r"k_cache has stride 2 on its last axis.*k_cache\.copy\(\)", {"k_cache": np.ones((2, 6, 2, 16), F32)[..., ::2]}),
    (ShapeError, r"page_table has shape \(3, 3\): it must be \(B, max_pages\) = \(2, max_pages\)",
     PAGES | {"page_table": np.zeros((3, 3), np.int32)}),
    (ShapeError, r"page_table has shape \(3,\)", PAGES | {"page_table": vector(1, 2, 3)}),
    (ShapeError, r"cache_seqlens has shape \(3,\): it must have shape \(B,\) = \(2,\)", {"cache_seqlens": vector(1, 2, 3)}),
    (ShapeError, r"cache_leftpad has shape \(1,\): it must have shape \(B,\)", {"cache_leftpad": vector(1)}),
    (ShapeError, r"k_new has shape \(2, 2, 8\): it must be \(B, Sn, Hkv, D\) = \(2, 0, 2, 8\)", NEW | {"k_new": np.ones((2, 2, 8), F32)}),
    (ShapeError, r"v_new has shape \(2, 3, 2, 8\): it must be .* = \(2, 1, 2, 8\)", NEW | {"v_new": np.ones((2, 3, 2, 8), F32)}),
    (ShapeError, r"rotary_cos has shape \(9, 5\): .* of at most head_dim = 8", ROTARY | {"rotary_cos": np.ones((9, 5), F32)}),
    (ShapeError, r"rotary_sin is float32 of shape \(8, 2\) and rotary_cos float32", ROTARY | {"rotary_sin": np.ones((8, 2), F32)}),
    (ShapeError, r"k_descale has shape \(3,\): it must have shape \(\), \(Hkv,\) or \(B, Hkv\) = \(\) or \(2,\) or \(2, 2\)",
     {"k_cache": np.ones((2, 6, 2, 8), np.int8), "v_cache": np.ones((2, 6, 2, 8), np.int8), "k_descale": np.ones(3, F32)}),
    (ShapeError, r"mask has shape \(2, 6\): it must broadcast to \(B, Hq, Sq, Sk\) = \(2, 4, 1, 6\)", {"mask": np.ones((2, 6), bool)}),
    (ShapeError, r"num_splits=0 must be at least 1", {"num_splits": 0}),
    (ShapeError, r"split_size=-2 must be at least 1", {"split_size": -2}),
    (ShapeError, r"k_cache is read-only: pass an array that can be written", NEW | {"k_cache": READ_ONLY}),
    (ShapeError, r"k_cache overlaps v_cache in memory", NEW | {"k_cache": SAME, "v_cache": SAME}),
    (ShapeError, r"out overlaps k_new in memory", NEW | {"q": (2, 1, 2, 8), "out": NEW["k_new"]}),
    (ShapeError, r"out has seqlen 2 and the result has 1", {"out": np.ones((2, 2, 4, 8), F32)}),
    (DtypeError, r"k_cache is float16 and q is float32: a cache must be of q's dtype, or float8_e4m3fn or int8",
     {"k_cache": np.ones((2, 6, 2, 8), np.float16)}),
    (DtypeError, r"v_cache is int8 and k_cache is float32: both must have one dtype", {"v_cache": np.ones((2, 6, 2, 8), np.int8)}),
    (DtypeError, r"k_new is float64: it must be float32", NEW | {"k_new": np.ones((2, 1, 2, 8))}),
    (DtypeError, r"cache_seqlens is int64: it must be int32", {"cache_seqlens": np.ones(2, np.int64)}),
    (DtypeError, r"page_table is int64: it must be int32", PAGES | {"page_table": np.zeros((2, 3), np.int64)}),
    (DtypeError, r"rotary_cos is float64: it must be float32", ROTARY | {"rotary_cos": np.ones((9, 2))}),
    (DtypeError, r"mask is float32: it must be bool", {"mask": np.ones((2, 1, 1, 6), F32)}),
    (DtypeError, r"q is int8: it must be one of float16", {"q": np.ones((2, 1, 4, 8), np.int8)}),
    (DtypeError, r"out is float16: it must be the dtype of q, float32", {"out": np.ones((2, 1, 4, 8), np.float16)}),
    (ArgumentError, r"cache_seqlens is a builtins.int: .*numpy.asarray\(cache_seqlens\)", {"cache_seqlens": 3}),
    (ArgumentError, r"cache_seqlens is a builtins.NoneType", {"cache_seqlens": None}),
    (ArgumentError, r"v_new is None and the other of k_new and v_new is not", {"k_new": NEW["k_new"]}),
    (ArgumentError, r"cache_batch_idx= and page_table= were given", PAGES | {"cache_batch_idx": vector(0, 1)}),
    (ArgumentError, r"rotary_cos= was given without rotary_sin=", {"rotary_cos": ROTARY["rotary_cos"]}),
    (ArgumentError, r"rotary_positions= was given without rotary_cos=", {"rotary_positions": vector(0, 1)}),
    (ArgumentError, r"rotary_interleaved=1 must be True or False", ROTARY | {"rotary_interleaved": 1}),
    (ArgumentError, r"v_descale= was given and k_cache is float32: scales are for caches of float8_e4m3fn or int8", {"v_descale": 0.5}),
    (ArgumentError, r"kv_layout='bhsd' is unknown: it is 'nhd' or 'hnd'", {"kv_layout": "bhsd"}),
    (ArgumentError, r"num_splits= and split_size= were given", {"num_splits": 2, "split_size": 64}),
    (ArgumentError, r"num_splits is a float: it must be an int, or None", {"num_splits": 2.0}),
    (ArgumentError, r"max_seqlen_q= was given without cu_seqlens_q=", {"max_seqlen_q": 3}),
    (ArgumentError, r"mask= was given for packed", {"q": (2, 4, 8), "cu_seqlens_q": vector(0, 1, 2), "mask": np.ones((1, 6), bool)}),
    (ArgumentError, r"plan is a int: it must be what cupyflash.plan_decode returned", {"plan": 3}),
    (ShapeError, r"plan was made for other calls: this one has batch=2, the plan 3; dtype=float32, the plan float16; make one by",
     {"plan": {"batch": 3, "dtype": "float16"}}),
    (ShapeError, r"plan was made for other calls: this one has page_size=None, the plan 4", {"plan": {"page_size": 4}}),
    (ShapeError, r"plan was made for other calls: this one has arrays in host memory, the plan device='sm_90a'",
     {"plan": {"device": "sm_90a"}}),
    (ShapeError, r"page_table has stride 2 on its last axis: it must be 1", PAGES | {"page_table": np.zeros((2, 6), np.int32)[:, ::2]}),
    (ShapeError, r"rotary_sin has stride 2 on its last axis: it must be 1", ROTARY | {"rotary_sin": np.ones((9, 4), F32)[:, ::2]}),
    (ArgumentError, r"k_descale is a bool: it must be a float", {"k_descale": True} | QUANTISED),
    (ShapeError, r"v_descale=inf must be finite", {"v_descale": float("inf")} | QUANTISED),
    (ShapeError, r"v_descale=1e\+39 must be finite in float32", {"v_descale": 1e39} | QUANTISED),
    (ShapeError, r"plan was made for other calls: this one has 12 slots a sequence, the plan max_seqlen_k=8",
     PAGES | {"plan": {"page_size": 4, "max_seqlen_k": 8}}),
    (DeviceError, r"stream= was given and the arrays are in host memory", {"stream": 0}),
    (UnsupportedError, r"no kernel for head_dim 577 over a cache: 576 is the largest",
     {"q": (2, 1, 4, 577), "k_cache": (2, 6, 2, 577), "v_cache": (2, 6, 2, 512)}),
    (UnsupportedError, r"no kernel for head_dim_v 513 over a cache: 512 is the largest", {"v_cache": (2, 6, 2, 513)}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "options"), CASES, ids=[f"{e.__name__}-{m[:40]}" for e, m, _ in CASES])
def test_error_names_the_argument_and_the_way_out(error: type[Exception], message: str, options: dict[str, Any]) -> None:
    """KF-114, KF-130 and their kind, before anything is written."""
    options = {**GIVEN, **options}
    if isinstance(options.get("plan"), dict):
        options["plan"] = cupyflash.plan_decode(**PLAN | options["plan"])
    arrays = [np.ones(x, F32) if isinstance(x, tuple) else x for x in (options.pop(name) for name in ("q", "k_cache", "v_cache"))]
    before = [x.copy() for x in (*arrays, *(x for x in options.values() if isinstance(x, np.ndarray)))]
    with pytest.raises(error, match=message) as caught:
        cupyflash.attention_with_kvcache(*arrays, **options)
    assert isinstance(caught.value, cupyflash.CupyflashError)
    assert "\n" not in str(caught.value)
    for x, old in zip((*arrays, *(x for x in options.values() if isinstance(x, np.ndarray))), before, strict=True):
        np.testing.assert_array_equal(x, old)


PACKED: dict[str, Any] = {"q": (3, 4, 8), "k": (9, 4, 2, 8), "v": (9, 4, 2, 8), "page_table": np.zeros((2, 3), np.int32)}


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (ArgumentError, "page_table= was given without seqused_k= or cu_seqlens_k=", {"seqused_k": None}),
        (ShapeError, r"k has shape \(36, 2, 8\): it must be .* \(pages, page_size, Hkv, D\)", {"k": (36, 2, 8)}),
        (ShapeError, r"q has shape \(1, 3, 4, 8\): it must have 3 axes", {"q": (1, 3, 4, 8)}),
        (ShapeError, r"page_table has shape \(1, 3\): it must be \(B, max_pages\) = \(2,", {"page_table": np.zeros((1, 3), np.int32)}),
        (ShapeError, r"cu_seqlens_k has shape \(2,\): it must have shape \(B \+ 1,\) = \(3,\)", {"cu_seqlens_k": vector(0, 1)}),
        (ShapeError, r"seqused_k has shape \(3,\)", {"seqused_k": vector(1, 2, 3)}),
        (ShapeError, r"max_seqlen_k=-1 must not be below 0", {"max_seqlen_k": -1}),
        (ArgumentError, r"cu_seqlens_q is a builtins.NoneType", {"cu_seqlens_q": None}),
        (DtypeError, r"k is float16 and q is float32: a cache must be of q's dtype", {"k": np.ones((9, 4, 2, 8), np.float16)}),
        (ArgumentError, r"causal='left' is unknown", {"causal": "left"}),
    ],
)
def test_error_of_packed_queries_over_pages(error: type[Exception], message: str, options: dict[str, Any]) -> None:
    options = {**PACKED, "cu_seqlens_q": vector(0, 2, 3), "seqused_k": vector(5, 6), **options}
    arrays = [np.ones(x, F32) if isinstance(x, tuple) else x for x in (options.pop(name) for name in "qkv")]
    with pytest.raises(error, match=message):
        cupyflash.attention_varlen(*arrays, **options)


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (ShapeError, "batch=0 must be at least 1", {"batch": 0}),
        (ShapeError, "page_size=-1 must be at least 1", {"page_size": -1}),
        (ShapeError, "num_heads_q must be a multiple of num_heads_kv", {"num_heads_kv": 3}),
        (DtypeError, "dtype is int8: it must be q's, one of float16", {"dtype": np.int8}),
        (ArgumentError, "head_dim is a float: it must be an int", {"head_dim": 8.0}),
        (ArgumentError, "dtype=3 is no dtype", {"dtype": 3}),
        (ArgumentError, "has no argument 'max_seqlens_k'; did you mean 'max_seqlen_k'?", {"max_seqlens_k": 3}),
        (DeviceError, "device='gpu' is unknown", {"device": "gpu"}),
        (DeviceError, "cuda_graph=True was given with device='host': graphs belong to a GPU", {"cuda_graph": True}),
        (DeviceError, "device='sm_70' is unknown: it is 'cuda'", {"device": "sm_70"}),
        (UnsupportedError, "no kernel for head_dim 600 over a cache", {"head_dim": 600, "device": "sm_90a"}),
        (UnsupportedError, "no kernel for head_dim 600 over a cache", {"head_dim": 600}),
    ],
)
def test_error_of_plan_decode(error: type[Exception], message: str, options: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        cupyflash.plan_decode(**PLAN | options)


def test_a_plan_says_what_it_was_made_for(rng: np.random.Generator) -> None:
    plan = cupyflash.plan_decode(**PLAN | {"page_size": np.int64(4), "head_dim": 576})
    assert (plan.batch, plan.page_size, plan.dtype, plan.device, plan.cuda_graph) == (2, 4, "float32", "host", False)
    plan.update(vector(3, 5))
    there = cupyflash.plan_decode(**PLAN | {"device": "sm_90a", "cuda_graph": True})
    assert (there.device, there.cuda_graph) == ("sm_90a", True)
    there.update(vector(3, 5))
    with pytest.raises(ShapeError, match=r"cache_seqlens has shape \(3,\): it must be \(2,\), for which the plan was made"):
        plan.update(vector(1, 2, 3))
    with pytest.raises(DtypeError, match="cache_seqlens is int64: it must be int32"):
        plan.update(np.ones(2, np.int64))
    given = [np.ones(GIVEN[name], F32) for name in ("q", "k_cache", "v_cache")]
    made = cupyflash.plan_decode(**PLAN | {"max_seqlen_k": 4096})
    for lengths in (vector(3, 5), vector(6, 0)):  # one plan for calls of any lengths
        made.update(lengths)
        results = [cupyflash.attention_with_kvcache(*given, cache_seqlens=lengths, plan=plan) for plan in (made, None)]
        np.testing.assert_array_equal(*results)


def test_arrays_of_one_call_lie_in_one_place(cupy: Any) -> None:  # noqa: F811
    q = cache.arrays.view(FakeCupyArray((2, 1, 4, 8), np.float16), "q")
    with pytest.raises(DeviceError, match="k_cache is in host memory and q on cuda:1"):
        cache.arrays.check_together({"q": q, "k_cache": q._replace(device_id=-1)})
    cache.arrays.check_together({"q": q, "page_table": cache.arrays.view(np.zeros((2, 3), np.int32), "page_table")})


# --- keywords --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("foreign", "ours"),
    [
        ("block_table", "it is called 'page_table', int32 of (B, max_pages)"),
        ("seqused_k", "it is called 'cache_seqlens', int32 of shape (B,), and does not count the new tokens"),
        ("k", "it is called 'k_new'"),
        ("layout", "it is called 'kv_layout': 'nhd' or 'hnd'"),
        ("rotary_seqlens", "it is called 'rotary_positions'"),
        ("bias", "scores over a cache take 'mask', 'alibi_slopes' and 'softcap', and no bias"),
        ("k_scale", "it is called 'k_descale'"),
        ("sm_scale", "it is called 'softmax_scale'"),
        ("cache_seqlen", "did you mean 'cache_seqlens'?"),
    ],
)
def test_kf_133_foreign_keywords_name_ours(foreign: str, ours: str) -> None:
    x = np.ones((2, 1, 2, 8), F32)
    with pytest.raises(TypeError) as caught:
        cupyflash.attention_with_kvcache(x, x, x, cache_seqlens=vector(1, 1), **{foreign: 1})
    assert str(caught.value).startswith(f"attention_with_kvcache() has no argument {foreign!r}; ")
    assert ours in str(caught.value)


def test_keywords_point_at_arguments_that_exist() -> None:
    known = set(inspect.signature(cupyflash.attention_with_kvcache).parameters)
    assert not known & (_CACHE | _PAGES).keys() - {"cu_seqlens_q"}
    values = {"nhd", "hnd"}
    for name, hint in (_CACHE | _PAGES).items():
        assert set(re.findall(r"'(\w+)'", hint)) <= known | values, name
    assert "page_table" in FOREIGN


def test_kf_132_options_are_keyword_only() -> None:
    x = np.ones((2, 1, 2, 8), F32)
    with pytest.raises(TypeError, match="positional"):
        cupyflash.attention_with_kvcache(x, x, x, vector(1, 1))  # type: ignore[misc]
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'cache_seqlens'"):
        cupyflash.attention_with_kvcache(x, x, x)  # type: ignore[call-arg]


def test_gradients_over_pages_are_refused_before_anything_is_computed() -> None:
    q, k = np.ones((3, 4, 8), F32), np.ones((9, 4, 2, 8), F32)
    with pytest.raises(UnsupportedError, match="page_table= was given: gradients of keys in pages are not built"):
        cupyflash.attention_vjp(q, k, k, cu_seqlens_q=vector(0, 3), page_table=np.zeros((1, 3), np.int32), seqused_k=vector(4))


# --- the same bits ---------------------------------------------------------------------------------------------------------------------


def paged(rng: np.random.Generator, lengths: Any, page_size: int, heads: int = 2, dim: int = 16, dtype: Any = F32, room: int = 0) -> Any:
    """k_cache, v_cache and page_table of sequences of random keys, and those keys (len, heads, dim): NaN in all other slots."""
    needed = [-(-n // page_size) for n in lengths]
    order = rng.permutation(sum(needed) + 5).astype(np.int32)
    table = np.full((len(lengths), max(needed) + room), -1, np.int32)
    caches = [np.full((len(order), page_size, heads, dim), np.nan, dtype) for _ in range(2)]
    sequences = []
    for b, n in enumerate(lengths):
        table[b, : needed[b]], order = order[: needed[b]], order[needed[b] :]
        keys = [normal(rng, n, heads, dim, dtype=dtype) for _ in range(2)]
        sequences.append(keys)
        for x, values in zip(caches, keys, strict=True):
            put(x, table[b], values)
    return *caches, table, sequences


def put(pages: Any, table: Any, values: Any) -> None:
    for j, value in enumerate(values):
        pages[table[j // pages.shape[1]], j % pages.shape[1]] = value


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_sequence_has_the_same_bits_in_pages_of_any_size_and_in_a_dense_cache(rng: np.random.Generator, dtype: str) -> None:
    dtype = np.dtype(dtype)
    lengths = [700, 3, 300]
    q = normal(rng, 3, 5, 4, 16, dtype=dtype)
    k_cache, v_cache, table, sequences = paged(rng, lengths, 16, dtype=dtype)
    used = vector(*lengths)
    expected = cupyflash.attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=used, page_table=table)
    for n, (out, (k, v)) in enumerate(zip(expected, sequences, strict=True)):
        want = reference.attention(q[n], k, v, causal=True)
        np.testing.assert_allclose(out.astype(float), want, rtol=BOUNDS[dtype.name], atol=BOUNDS[dtype.name])
    for size in (1, 7, 64, 256, 1000):
        pages = [np.full((x := -(-700 // size)) * 3 and (3 * x, size, 2, 16), np.nan, dtype) for _ in range(2)]
        other = rng.permutation(3 * x).reshape(3, x).astype(np.int32)
        for row, keys in zip(other, sequences, strict=True):
            for cached, values in zip(pages, keys, strict=True):
                put(cached, row, values)
        layouts = (pages, "nhd"), ([np.ascontiguousarray(cached.swapaxes(1, 2)) for cached in pages], "hnd")
        for (keys, values), layout in layouts:
            out = cupyflash.attention_with_kvcache(q, keys, values, cache_seqlens=used, page_table=other, kv_layout=layout)
            assert out.tobytes() == expected.tobytes()
    for room in (700, 4096):
        dense = [np.full((3, room, 2, 16), np.nan, dtype) for _ in range(2)]
        for n, keys in enumerate(sequences):
            for cached, values in zip(dense, keys, strict=True):
                cached[n, : len(values)] = values
        out = cupyflash.attention_with_kvcache(q, *dense, cache_seqlens=used)
        assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_with_split_size_a_sequence_has_the_same_bits_in_every_batch(rng: np.random.Generator, dtype: str) -> None:
    """Alone, where a call is too short for threads, and among others that make it long; dense and packed, at any place."""
    lengths = [900, 2000, 1, 65, 1500, 900]
    q = normal(rng, 6, 3, 8, 64, dtype=dtype)
    k_cache, v_cache, table, _ = paged(rng, lengths, 16, 2, 64, dtype)
    cache = {"cache_seqlens": vector(*lengths), "page_table": table}
    sink, slopes = normal(rng, 8), rng.random((6, 8)).astype(F32)
    options = {"split_size": 256, "sink": sink, "return_lse": True, "window_size": (1200, 0)}
    whole, lse, _ = cupyflash.attention_with_kvcache(q, k_cache, v_cache, **cache, alibi_slopes=slopes, **options)
    for chosen in ([0], [1], [2], [3], [5, 4], [4, 1, 4, 0], [1] * 9):
        some = {name: x[chosen] for name, x in cache.items()} | {"alibi_slopes": slopes[chosen]}
        out, part, _ = cupyflash.attention_with_kvcache(q[chosen], k_cache, v_cache, **some, **options)
        assert out.tobytes() == whole[chosen].tobytes()
        assert part.tobytes() == lse[chosen].tobytes()
        flat = q[chosen].reshape(-1, 8, 64)
        cu_seqlens_q = np.arange(0, 3 * len(chosen) + 1, 3, dtype=np.int32)
        out, part, _ = cupyflash.attention_with_kvcache(flat, k_cache, v_cache, cu_seqlens_q=cu_seqlens_q, **some, **options)
        assert out.tobytes() == whole[chosen].tobytes()
        assert part.swapaxes(0, 1).reshape(len(chosen), 3, 8).swapaxes(1, 2).tobytes() == lse[chosen].tobytes()


def test_the_tokens_of_a_prompt_have_the_same_keys_in_one_call_and_in_many(rng: np.random.Generator) -> None:
    """A prompt at once, in chunks, and token by token: the cache has the same bits, and out the same rows within rounding."""
    q, k, v = (normal(rng, 1, 23, heads, 16) for heads in (4, 2, 2))
    angle = np.arange(64)[:, None] * 0.5 ** np.arange(8)
    options = {"rotary_cos": np.cos(angle).astype(F32), "rotary_sin": np.sin(angle).astype(F32), "page_table": vector(3, 1, 0)[None]}
    results = []
    for chunks in ([23], [9, 14], [1] * 23):
        caches, lengths, rows = [np.full((5, 8, 2, 16), np.nan, F32) for _ in range(2)], vector(0), []
        for n in chunks:
            new = slice(lengths[0], lengths[0] + n)
            given = {"cache_seqlens": lengths, "k_new": k[:, new], "v_new": v[:, new]}
            rows.append(cupyflash.attention_with_kvcache(q[:, new], *caches, **given, **options))
            lengths += n
        results.append((np.concatenate(rows, axis=1), *caches))
    for out, k_cache, v_cache in results:
        assert (k_cache.tobytes(), v_cache.tobytes()) == tuple(x.tobytes() for x in results[0][1:])
        np.testing.assert_allclose(out, results[0][0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_chunk_of_more_rows_than_a_tile_has(rng: np.random.Generator, interleaved: bool) -> None:
    """Rotated by real products of the table, chunk rows of a tile each at their own positions; 128 rows are a tile here."""
    q, k, v = (normal(rng, 1, 700, heads, 16) for heads in (8, 2, 2))
    angle = np.arange(700)[:, None] * 0.3 ** np.arange(8)

    def rotated(x: Any) -> Any:
        pairs = x.astype(float).reshape(1, 700, -1, 8, 2) if interleaved else x.astype(float).reshape(1, 700, -1, 2, 8).swapaxes(-1, -2)
        z = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angle)[:, None]
        return np.stack([z.real, z.imag], axis=-1 if interleaved else -2).reshape(x.shape)

    caches, tables = [np.full((1, 700, 2, 16), np.nan, F32) for _ in range(2)], {"rotary_cos": np.cos(angle), "rotary_sin": np.sin(angle)}
    options = {name: x.astype(F32) for name, x in tables.items()} | {"rotary_interleaved": interleaved}
    for chunk in (slice(0, 333), slice(333, 700)):
        new = {"k_new": k[:, chunk], "v_new": v[:, chunk]}
        out = cupyflash.attention_with_kvcache(q[:, chunk], *caches, cache_seqlens=vector(chunk.start), **new, **options)
        expected = reference.attention(rotated(q)[:, chunk], rotated(k)[:, : chunk.stop], v[:, : chunk.stop], causal=True)
        np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)


def test_with_split_size_blas_has_one_thread_in_short_calls_too(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its results may have other bits with more."""
    seen: list[bool] = []
    one_thread = host._one_blas_thread
    monkeypatch.setattr(host, "_one_blas_thread", lambda: seen.append(True) or one_thread())
    q, k = normal(rng, 1, 1, 2, 8), normal(rng, 1, 9, 2, 8)
    cupyflash.attention_with_kvcache(q, k, k, cache_seqlens=vector(9))
    assert not seen
    cupyflash.attention_with_kvcache(q, k, k, cache_seqlens=vector(9), split_size=64)
    assert seen


# --- caches of few bits ------------------------------------------------------------------------------------------------------------------


def test_e4m3_is_that_of_ml_dtypes(rng: np.random.Generator) -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = codes.view(E4M3).astype(F32)
    np.testing.assert_array_equal(host_cache._E4M3, values)
    middles = (values[:126] + values[1:127]) / 2
    x = np.concatenate(
        [values[:127], middles, np.nextafter(middles, F32(0)), np.nextafter(middles, F32(999)), rng.uniform(-448, 448, 10000)]
    )
    x = np.concatenate([x, -x]).astype(F32)
    np.testing.assert_array_equal(host_cache._narrow(x, "float8_e4m3fn", np.uint8), x.astype(E4M3).view(np.uint8))
    large = np.array([449, 1e9, np.inf, -500, -np.inf, np.nan], F32)
    np.testing.assert_array_equal(
        host_cache._narrow(large, "float8_e4m3fn", np.uint8).view(E4M3).astype(F32), [448, 448, 448, -448, -448, np.nan]
    )
    np.testing.assert_array_equal(
        host_cache._narrow(np.append(large, [0.5, 1.5, -2.5]), "int8", np.int8), [127] * 3 + [-128] * 2 + [0, 0, 2, -2]
    )


@pytest.mark.parametrize("cache_dtype", [E4M3, np.int8])
def test_quantised_caches_stand_for_what_was_written(rng: np.random.Generator, cache_dtype: Any) -> None:
    """A prompt and ten tokens, with scales for what they hold: about as far from unquantised attention as one step of the cache's dtype."""
    q, k, v = (normal(rng, 2, 50, heads, 32, dtype=np.float16) for heads in (4, 2, 2))
    v[:, :, 1] *= 5
    scale = {E4M3: 448, np.int8: 127}[cache_dtype]
    descale = {f"{name}_descale": (np.abs(x).max(axis=(1, 3)) / scale).astype(F32) for name, x in (("k", k), ("v", v))}
    k_cache, v_cache = np.zeros((2, 64, 2, 32), cache_dtype), np.zeros((2, 64, 2, 32), cache_dtype)
    lengths, rows = vector(0, 0), []
    for n in (40, *[1] * 10):
        new = slice(lengths[0], lengths[0] + n)
        given = {"cache_seqlens": lengths, "k_new": k[:, new], "v_new": v[:, new], **descale}
        rows.append(cupyflash.attention_with_kvcache(q[:, new], k_cache, v_cache, **given))
        lengths += n
    expected = reference.attention(q, k, v, causal=True)
    step = {E4M3: 2**-4, np.int8: 1 / 254}[cache_dtype]
    error = np.abs(np.concatenate(rows, axis=1) - expected).max(axis=(0, 1, 3)).reshape(2, 2)  # of the rows of each key head
    error /= np.abs(v).max(axis=(0, 1, 3)).astype(float)[:, None]
    assert (error > 1e-3).all()
    assert (error < 5 * step).all()


def test_latent_attention_reads_values_out_of_the_keys(rng: np.random.Generator) -> None:
    """DeepSeek's, with projections absorbed: D = 576, and the values are 512 columns of the keys, the same memory."""
    q, latent = normal(rng, 2, 1, 16, 576), normal(rng, 2, 40, 1, 576)
    options = {"cache_seqlens": vector(40, 13), "softmax_scale": 192**-0.5}
    out = cupyflash.attention_with_kvcache(q, latent, latent[..., :512], **options)
    expected = reference.attention(q, latent, latent[..., :512], seqused_k=vector(40, 13), softmax_scale=192**-0.5)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)


# --- parts -----------------------------------------------------------------------------------------------------------------------------


def weights_bound(dtype, bound):
    """How far a result may be off that is not rounded to q's dtype itself. The host path's weights are float32; tensor cores multiply
    weights of q's dtype, and the tests of a GPU put half a unit of those in the place of this function."""
    return bound


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_cascade_over_a_shared_prefix_is_the_whole(rng: np.random.Generator, dtype: str, rows: int) -> None:
    """The recipe of `merge_states`: the prefix once for the rows of all requests, what is each one's own, and both merged."""
    dtype, lengths, prefix, size = np.dtype(dtype), vector(5, 21, 0, 33), 48, 16
    k_cache, v_cache, own, sequences = paged(rng, lengths + rows, size, dtype=dtype)
    shared = rng.permutation(20)[: prefix // size].astype(np.int32)
    k_pages, v_pages = (np.concatenate([x, np.full((20, size, 2, 16), np.nan, dtype)]) for x in (k_cache, v_cache))
    shared += len(k_cache)
    before = [normal(rng, prefix, 2, 16, dtype=dtype) for _ in range(2)]
    for pages, values in zip((k_pages, v_pages), before, strict=True):
        put(pages, shared, values)
    q = normal(rng, 4 * rows, 4, 16, dtype=dtype)
    cu_seqlens_q = np.arange(0, 4 * rows + 1, rows, dtype=np.int32)

    wide = {"return_lse": True, "out_dtype": "float32" if dtype.itemsize < 4 else None}
    of_all = cupyflash.attention_varlen(q, k_pages, v_pages, vector(0, 4 * rows), page_table=shared[None], seqused_k=vector(prefix), **wide)
    of_each = cupyflash.attention_varlen(q, k_pages, v_pages, cu_seqlens_q, page_table=own, seqused_k=lengths + rows, causal=True, **wide)
    out, lse = cupyflash.merge_states([of_all.out, of_each.out], [of_all.lse, of_each.lse])

    tables = np.concatenate([np.broadcast_to(shared, (4, len(shared))), own], axis=1)
    whole = cupyflash.attention_varlen(
        q, k_pages, v_pages, cu_seqlens_q, page_table=tables, seqused_k=lengths + rows + prefix, causal=True, **wide
    )
    for b, keys in enumerate(sequences):
        where = slice(*cu_seqlens_q[b : b + 2])
        every = [np.concatenate(parts) for parts in zip(before, keys, strict=True)]
        expected, expected_lse = reference.attention(q[where], *every, causal=True, return_lse=True)
        bound = 2e-5 if dtype != np.float64 else 1e-12
        for result, result_lse in ((out, lse), (whole.out, whole.lse)):
            np.testing.assert_allclose(result[where], expected, rtol=bound, atol=weights_bound(dtype, bound))
            np.testing.assert_allclose(result_lse[:, where], expected_lse, rtol=bound, atol=bound)


# --- libraries ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("cache_dtype", [None, "float8_e4m3fn", "int8"])
@pytest.mark.parametrize("numpy_vectors", [False, True])
def test_torch_cpu_tensors(rng: np.random.Generator, dtype: str, cache_dtype: str | None, numpy_vectors: bool) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed; pip install torch")
    q, k_new, v_new = (torch.from_numpy(normal(rng, 2, 3, heads, 16)).to(getattr(torch, dtype)) for heads in (4, 2, 2))
    k_cache, v_cache = (torch.zeros(9, 4, 2, 16, dtype=getattr(torch, cache_dtype or dtype)) for _ in range(2))
    vectors: dict[str, Any] = {"cache_seqlens": vector(0, 2), "page_table": np.array([[8, 1], [3, 2]], np.int32)}
    if cache_dtype:
        vectors |= {"k_descale": np.full(2, 0.03, F32), "v_descale": np.full((2, 2), 0.05, F32)}
    given = dict(vectors) if numpy_vectors else {name: torch.from_numpy(x) for name, x in vectors.items()}
    out, lse, _ = cupyflash.attention_with_kvcache(q, k_cache, v_cache, k_new=k_new, v_new=v_new, **given, return_lse=True)
    assert type(out) is type(lse) is torch.Tensor
    assert out.dtype == q.dtype
    name = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    there = [x.double().numpy().astype(name) for x in (q, k_new, v_new)]
    caches = [np.zeros((9, 4, 2, 16), np.dtype(cache_dtype or name)) for _ in range(2)]
    expected = cupyflash.attention_with_kvcache(there[0], *caches, k_new=there[1], v_new=there[2], **vectors)
    np.testing.assert_array_equal(out.double().numpy(), expected.astype(float))
    for tensor, x in zip((k_cache, v_cache), caches, strict=True):
        np.testing.assert_array_equal(tensor.double().numpy(), x.astype(float))
        assert x.astype(float).any()
    target = torch.empty_like(q)
    assert cupyflash.attention_with_kvcache(q, k_cache, v_cache, **given, out=target) is target


def test_jax_cpu_arrays_are_read_and_never_written(rng: np.random.Generator) -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed; pip install jax")
    q, k, v = normal(rng, 2, 1, 4, 16), normal(rng, 2, 9, 2, 16), normal(rng, 2, 9, 2, 16)
    there = [jax.numpy.asarray(x) for x in (q, k, v)]
    out = cupyflash.attention_with_kvcache(*there, cache_seqlens=vector(4, 9))
    assert isinstance(out, jax.Array)
    np.testing.assert_array_equal(np.asarray(out), cupyflash.attention_with_kvcache(q, k, v, cache_seqlens=vector(4, 9)))
    new = {"k_new": jax.numpy.asarray(k[:, :1]), "v_new": jax.numpy.asarray(v[:, :1])}
    with pytest.raises(ArgumentError, match=r"k_cache= is a JAX array: JAX arrays cannot be written, cupyflash.jax.attention_with_kvcache"):
        cupyflash.attention_with_kvcache(*there, cache_seqlens=vector(4, 5), **new)


def test_mixed_libraries_are_named() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed; pip install torch")
    x = np.ones((2, 1, 2, 8), F32)
    with pytest.raises(ArgumentError, match=r"k_cache is a torch array and q a numpy one: a call takes arrays of one library"):
        cupyflash.attention_with_kvcache(x, torch.from_numpy(x), torch.from_numpy(x), cache_seqlens=vector(1, 1))


def test_what_is_out_of_range_is_reported(rng: np.random.Generator, monkeypatch: Any, caplog: Any) -> None:
    q, k_cache, v_cache = normal(rng, 1, 2, 2, 8), *(normal(rng, 3, 4, 2, 8) for _ in range(2))
    table = vector(1, 7)[None]
    angle = np.ones((6, 2), F32)
    new = {"k_new": q, "v_new": q, "rotary_cos": angle, "rotary_sin": angle}

    def call(length: int, **options: Any) -> None:
        cupyflash.attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=vector(length), page_table=table, **options)

    call(9)
    call(7, **new)
    assert not caplog.records
    monkeypatch.setenv("CUPYFLASH_DEBUG", "check")
    call(9)
    call(2, cache_leftpad=vector(3))
    call(7, **new)
    assert caplog.messages == [
        "cache_seqlens holds [9]: lengths are clamped to 0 <= length <= 8",
        "page_table has [1, 7] for sequence 0: entries are clamped to 0 <= entry < 3",
        "cache_leftpad holds [3]: lengths are clamped to 0 <= length <= 2",
        "cache_seqlens with the new tokens holds [9]: lengths are clamped to 0 <= length <= 8",
        "page_table has [1, 7] for sequence 0: entries are clamped to 0 <= entry < 3",
        "tokens stand at 7 to 7: positions are clamped to 0 <= position < 6",
        "tokens stand at 7 to 8: positions are clamped to 0 <= position < 6",
    ]


def test_examples_of_the_docstrings() -> None:
    for module in (api, cache):
        assert doctest.testmod(module).failed == 0
