"""Every test of caches on the GPU, through CuPy and torch: by the kernels that calls choose and, where that is another, by the one that
takes one warp a row. Besides: captured graphs whose lengths, pages and live sequences change, vectors in NumPy, and other streams."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / "unit")]
cupy = pytest.importorskip("cupy", reason="CuPy is not installed; pip install 'cupyflash[cuda13]'")

import ml_dtypes  # noqa: E402
import test_kvcache  # noqa: E402
import test_kvcache_calls  # noqa: E402
from on_gpu import (  # noqa: E402
    LIBRARIES,
    Move,
    compile_ahead,
    host_kvcache,
    host_merge,
    host_varlen,
    nan_memory,
    needs,
    only,
    row_name,
    run_each_once,
)
from test_graphs import Graph, overwrite  # noqa: E402
from test_known_failures_kvcache import *  # noqa: E402, F403
from test_known_failures_kvcache import vector  # noqa: E402
from test_kvcache import *  # noqa: E402, F403
from test_kvcache_calls import (  # noqa: E402, F401
    normal,
    paged,
    test_a_cascade_over_a_shared_prefix_is_the_whole,
    test_a_chunk_of_more_rows_than_a_tile_has,
    test_a_sequence_has_the_same_bits_in_pages_of_any_size_and_in_a_dense_cache,
    test_latent_attention_reads_values_out_of_the_keys,
    test_quantised_caches_stand_for_what_was_written,
    test_the_tokens_of_a_prompt_have_the_same_keys_in_one_call_and_in_many,
    test_with_split_size_a_sequence_has_the_same_bits_in_every_batch,
)
from test_kvcache_chunks import *  # noqa: E402, F403
from test_kvcache_chunks import edges_agree  # noqa: E402
from test_same_as_host import seeded as seeded_of_ways  # noqa: E402

import cupyflash  # noqa: E402
from cupyflash import StateError, UnsupportedError, device, launch, plan, variants  # noqa: E402

pytestmark = pytest.mark.gpu

KERNELS = {"chosen": variants.CACHED} | ({"simple": variants.CACHED[-1:]} if len(variants.CACHED) > 1 else {})
WAYS = {*LIBRARIES, *KERNELS}
host_plan = cupyflash.plan_decode


def seeded(item: Any) -> np.random.Generator:
    return seeded_of_ways(item, WAYS)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    return seeded(request.node)


@pytest.fixture(autouse=True, params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Iterator[None]:
    with only(*KERNELS[request.param], table="CACHED"), nan_memory():
        yield


@pytest.fixture(autouse=True, params=LIBRARIES)
def on_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Move]:
    """The functions of caches compute on the GPU for the length of a test."""
    move, calls, launches, parameters = Move(request.param), [], [], launch._parameters
    monkeypatch.setattr(launch, "_parameters", lambda *args: (launches.append(1), parameters(*args))[1])

    def moved(host: Any, there: Any) -> Any:
        @functools.wraps(host)
        def call(*arrays: Any, **options: Any) -> Any:
            result = there(*arrays, **options)
            calls.append(1)
            return result

        return call

    monkeypatch.setattr(cupyflash, "attention_with_kvcache", moved(host_kvcache, move.attention_with_kvcache))
    monkeypatch.setattr(cupyflash, "attention_varlen", moved(host_varlen, move.attention_varlen))
    monkeypatch.setattr(cupyflash, "merge_states", moved(host_merge, move.merge_states))
    monkeypatch.setattr(cupyflash, "plan_decode", lambda **how: host_plan(**how | {"device": "cuda"}))
    monkeypatch.setattr(test_kvcache, "attended", lambda rows, dtype: rows.astype(dtype).astype(np.float64))
    weights = {dtype: float(ml_dtypes.finfo(dtype).eps) / 2 for dtype in ("float16", "bfloat16")}
    monkeypatch.setattr(test_kvcache_calls, "weights_bound", lambda dtype, bound: weights.get(dtype.name, bound))
    yield move
    assert launches or not calls, "no call launched anything: they may have run on the host"


@pytest.fixture(scope="module", autouse=True)
def kernels(request: pytest.FixtureRequest) -> None:
    """Compile what the tests here will launch; which kernels is learnt by running each test once on the host."""
    problems: dict[Any, None] = {}
    choose = plan.cached
    with only(*variants.CACHED, table="CACHED"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "cached", lambda problem, spec: (problems.setdefault(problem), choose(problem, spec))[1])
        run_each_once(request, seeded)
    found = set()
    for table in KERNELS.values():
        with only(*table, table="CACHED"):
            for problem in problems:
                with contextlib.suppress(UnsupportedError):
                    found |= {step.variant for step in plan.cached(problem, device.query(0)).steps}
    compile_ahead(found)


# --- chunks ----------------------------------------------------------------------------------------------------------------------------


CHUNKS = [row for row in variants.FORWARD if row.arch or (row.family == "fwd_sm80" and row.options)]
CHUNKS_OF_PAGES = [(row, page_size) for row in CHUNKS for page_size in (None, 16, 64) if row.arch or not page_size]


@pytest.mark.parametrize(("row", "page_size"), CHUNKS_OF_PAGES, ids=lambda x: row_name(x) if isinstance(x, variants.Row) else str(x))
def test_chunks_by_each_row(row: variants.Row, page_size: int | None, rng: np.random.Generator) -> None:
    needs(row)
    with only(row):
        edges_agree(rng, "bfloat16", page_size, row)


@pytest.mark.usefixtures("returns_memory")
def test_pages_of_a_large_cache(on_gpu: Move, rng: np.random.Generator) -> None:
    """More tiles than a GPU has SMs, of sequences that share pages, in a pool of more than 2^31 elements, else NaN: as over the same keys
    without pages."""
    shape = (-(-(1 << 31) // (16 * 2 * 64)) + 9, 16, 2, 64)
    held = np.r_[:500, shape[0] - 500 : shape[0]]
    table, lengths = rng.choice(held, (8, 256)).astype(np.int32), vector(4096, 4095, 513, 512, 511, 1, 0, 3001)
    q = normal(rng, 8, 512, 8, 64, dtype="float16")
    pools, dense = [], []
    for _ in range(2):
        pages = normal(rng, 1000, *shape[1:], dtype="float16")
        pool = cupy.full(shape, np.nan, np.float16)
        pool[cupy.asarray(held)] = cupy.asarray(pages)
        dense.append(pages[np.searchsorted(held, table)].reshape(8, 4096, 2, 64))
        if on_gpu.library == "torch":
            import torch

            pool = torch.from_dlpack(pool)
        pools.append(pool)
    there, pages_there, lengths_there, *dense_there = on_gpu(q, table, lengths, *dense)
    expected = on_gpu.back(host_kvcache(there, *dense_there, cache_seqlens=lengths_there))
    out = on_gpu.back(host_kvcache(there, *pools, cache_seqlens=lengths_there, page_table=pages_there))
    np.testing.assert_allclose(out.astype(float), expected.astype(float), rtol=2e-3, atol=2e-3)


# --- graphs ----------------------------------------------------------------------------------------------------------------------------


def serving(rng: np.random.Generator, lengths: Any, rows: Any) -> dict[str, np.ndarray]:
    """One step of a server of four places: `rows` tokens of each, behind the `lengths` it has, in pages that change with each step."""
    angles = np.arange(99)[:, None] * 0.7 ** np.arange(16)
    tables = {"rotary_cos": np.cos(angles).astype(np.float32), "rotary_sin": np.sin(angles).astype(np.float32)}
    offsets = np.r_[0, np.cumsum(rows)].astype(np.int32)
    tokens = {name: normal(rng, 8, heads, 64, dtype="float16") for name, heads in (("q", 4), ("k_new", 2), ("v_new", 2))}
    caches = {name: normal(rng, 24, 16, 2, 64, dtype="float16") for name in ("k_cache", "v_cache")}
    table = rng.permutation(24)[:20].reshape(4, 5).astype(np.int32)
    return tokens | caches | tables | {"page_table": table, "cache_seqlens": vector(*lengths), "cu_seqlens_q": offsets}


def called(given: dict[str, Any]) -> Any:
    arrays = [given[name] for name in ("q", "k_cache", "v_cache")]
    return host_kvcache(*arrays, return_lse=True, **{name: x for name, x in given.items() if name not in ("q", "k_cache", "v_cache")})


def test_a_replayed_graph_reads_new_lengths_pages_and_sequences(on_gpu: Move, rng: np.random.Generator) -> None:
    """KF-094: tokens are appended and attended over in each replay, as a fresh call does it; places without tokens are left alone."""
    steps = [
        serving(rng, (0, 0, 0, 0), (2, 2, 2, 2)),
        serving(rng, (70, 79, 3, 17), (1, 5, 0, 2)),
        serving(rng, (5, 0, 0, 0), (1, 0, 0, 0)),
    ]
    given = dict(zip(steps[0], on_gpu(*(x.copy() for x in steps[0].values())), strict=True))
    called(given)  # compiles
    graph = Graph(on_gpu.library)
    out, lse, _ = graph.capture(lambda: called(given))
    for step in steps:
        for name, x in step.items():
            overwrite(on_gpu, given[name], x)
        graph.replay()
        fresh = dict(zip(step, on_gpu(*(x.copy() for x in step.values())), strict=True))
        expected = called(fresh)
        for got, want in ((out, expected.out), (lse, expected.lse), *((given[name], fresh[name]) for name in ("k_cache", "v_cache"))):
            assert on_gpu.back(got).tobytes() == on_gpu.back(want).tobytes()


# --- vectors and streams -----------------------------------------------------------------------------------------------------------------


def test_small_vectors_may_be_in_host_memory(on_gpu: Move, rng: np.random.Generator) -> None:
    step = serving(rng, (5, 0, 31, 1), (2, 1, 2, 3))
    small = {name: step[name] for name in ("page_table", "cache_seqlens", "cu_seqlens_q")}
    results = []
    for vectors in (small, dict(zip(small, on_gpu(*small.values()), strict=True))):
        given = dict(zip(step, on_gpu(*(x.copy() for x in step.values())), strict=True)) | vectors
        result = called(given)
        results.append([on_gpu.back(x).tobytes() for x in (result.out, result.lse, given["k_cache"], given["v_cache"])])
    assert results[0] == results[1]
    given = dict(zip(step, on_gpu(*step.values()), strict=True)) | small
    with pytest.raises(StateError, match="is a NumPy array, and its copy to the GPU must not be captured"):
        Graph(on_gpu.library).capture(lambda: called(given))


def test_a_call_is_queued_on_its_stream(on_gpu: Move, rng: np.random.Generator) -> None:
    """What a stream computes before the call, it reads."""
    step = serving(rng, (5, 0, 31, 1), (2, 1, 2, 3))
    expected = called(dict(zip(step, on_gpu(*(x.copy() for x in step.values())), strict=True)))
    given = dict(zip(step, on_gpu(*(x.copy() for x in step.values())), strict=True))
    (q,) = on_gpu(np.zeros_like(step["q"]))
    if on_gpu.library == "torch":
        import torch

        stream: Any = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            q.copy_(given["q"])
    else:
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.runtime.deviceSynchronize()
        with stream:
            q[...] = given["q"]
    result = called(given | {"q": q, "stream": stream})
    stream.synchronize()
    for got, want in zip(result[:2], expected[:2], strict=True):
        assert on_gpu.back(got).tobytes() == on_gpu.back(want).tobytes()
