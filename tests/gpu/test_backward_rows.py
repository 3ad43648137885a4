"""Each row of the backward's kernel table: all pairs of options that it serves, the edges of its blocks, equal bits in every run where
asked, and what leaves the range of its arithmetic. Results and workspaces start as NaN."""

from __future__ import annotations

import contextlib
import itertools
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from judge import judge, standard_gradients

sys.path[:0] = [str(Path(__file__).parents[1] / "unit")]
cupy = pytest.importorskip("cupy", reason="CuPy is not installed; pip install 'cupyflash[cuda13]'")

import test_pairs_backward  # noqa: E402
from on_gpu import Move, compile_ahead, few_sms, fits, grids, host_attention, host_backward, nan_memory, needs, only, row_name  # noqa: E402
from test_backward_gpu import REFERENCE, STANDARD  # noqa: E402
from test_pairs_backward import ALL, MORE, PAIRS  # noqa: E402

import cupyflash  # noqa: E402
from cupyflash import device, plan, reference, variants  # noqa: E402
from cupyflash.problem import ITEMSIZE, AttentionProblem, BackwardProblem  # noqa: E402
from cupyflash.variants import BwdSm90Config, Row  # noqa: E402

pytestmark = pytest.mark.gpu

PRIME = 397  # more than three of the largest blocks
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
EACH_ROW = [pytest.param(row, dtype, id=f"{row_name(row)}-{dtype}") for row in variants.BACKWARD for dtype in DTYPES]
each_row = pytest.mark.parametrize(("row", "dtype"), EACH_ROW)
MOVE = Move("cupy")


def lengths(row: Row) -> tuple[list[int], list[int]]:
    """Numbers of queries, and of keys, at the edges of the blocks of the row's kernels."""
    rows, keys = {getattr(row.config, "block_m", 4)}, {getattr(row.config, "block_n", 4)}
    if row.dq is not None:
        rows, keys = rows | {row.dq.block_m}, keys | {row.dq.block_n}
    queries, keys_ = (sorted({1, PRIME, *(n + step for n in blocks for step in (-1, 0, 1))}) for blocks in (rows, keys))
    return queries, keys_


def ways(row: Row) -> tuple[bool, ...]:
    """Values of `deterministic` that the row serves: bwd_sm90 adds dq up by atomics."""
    return (False,) if isinstance(row.config, BwdSm90Config) else (False, True)


def head_dims(row: Row) -> tuple[int, int]:
    """The full width, and one that the tile pads: odd where the row takes rows of any alignment, else a multiple of 16 bytes."""
    return row.head_dim, row.head_dim - (3 if row.options else 8)


def cases(row: Row, dtype: str) -> list[dict[str, Any]]:
    """The pairs of test_pairs_backward.py; for a row without options none of them, and memory that is read 16 bytes at a time."""
    chosen = [case if row.options else adds_dq(case, row) if row.arch else plain(case) for case in PAIRS + MORE if case["dtype"] == dtype]
    return [case for case in chosen if max(case["dims"]) <= row.head_dim]


def plain(case: dict[str, Any]) -> dict[str, Any]:
    unused = ("window_size", "softcap", "alibi_slopes", "bias", "mask", "sink", "seqused_q", "seqused_k")
    instead = {"offset": "contiguous", "expanded": "transposed", "sparse": "packed", "strided": "contiguous"}
    aligned = {name: instead.get(case[name], case[name]) for name in ("storage", "dout", "results")}
    lengths = {name: case[name] or 7 for name in ("Sq", "Sk")}  # what has no element has any strides
    return {**case, **dict.fromkeys(unused), **aligned, **lengths, "dims": tuple(-(-d // 8) * 8 for d in case["dims"])}


def adds_dq(case: dict[str, Any], row: Row) -> dict[str, Any]:
    """As `plain`, for bwd_sm90, which serves windows and sinks, at the widths of the row, and computes dq beside dk or dv. As heads are
    wider, their scale is less than that of the pairs, for the same reason."""
    kept: dict[str, Any] = {name: case[name] for name in ("window_size", "sink")}
    if row.head_dim > 128 and case["softmax_scale"]:
        kept["softmax_scale"] = 0.1
    d, dv = case["dims"]
    widths = {"dims": (row.head_dim - d % 8 * 8, -(-dv // 8) * 8)} if row.head_dim > 64 else {}
    return {**plain(case), **kept, **widths, "wrt": ("q", "k", "v", "sink") if case["wrt"] == ALL else ("q", "k"), "deterministic": False}


def case_rng(case: dict[str, Any]) -> np.random.Generator:
    """The same numbers for each row: the references of a case are computed once. Under a seed of 0: of a thousand cases one inherits more
    from the rounding of out than the judge allows, and none of these does."""
    return np.random.default_rng(zlib.crc32(repr((0, sorted(case.items()))).encode()))


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`cupyflash.attention_backward` computes on the GPU for the length of a test."""
    monkeypatch.setattr(reference, "attention_backward", REFERENCE)
    monkeypatch.setattr(test_pairs_backward, "standard_gradients", STANDARD)
    monkeypatch.setattr(cupyflash, "attention_backward", MOVE.attention_backward)
    with nan_memory():
        yield


@pytest.fixture(scope="module", autouse=True)
def kernels(request: pytest.FixtureRequest) -> None:
    """Compile the kernels of all rows at once; what the pairs need is learnt by running them on the host."""
    problems: dict[Any, set[BackwardProblem]] = {}

    def noting(problem: Any, spec: Any, choose: Any = plan.backward) -> Any:
        problems[alike].add(problem)
        return choose(problem, spec)

    params = [item.callspec.params for item in request.session.items if item.path == request.path]
    asked = {(given["row"], given.get("dtype", "float16")) for given in params}
    with_cases = {cases_of(row, dtype): row if row.arch else row._replace(head_dim=256) for row, dtype in asked}
    with only(*variants.BACKWARD, table="BACKWARD"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "backward", noting)
        patch.setattr(reference, "attention_backward", REFERENCE)  # they remember for the tests
        patch.setattr(test_pairs_backward, "standard_gradients", STANDARD)
        for alike, row in with_cases.items():
            problems[alike] = set()
            for case in cases(row, alike[1]):
                with contextlib.suppress(Exception, pytest.fail.Exception):
                    test_pairs_backward.test_gradients_of_pair(case, case_rng(case))
    found = set()
    for row, dtype in asked:
        if fits(row):
            with only(row, table="BACKWARD"):
                for problem in (*problems[cases_of(row, dtype)], *problems_of(row, dtype)):
                    with contextlib.suppress(cupyflash.UnsupportedError):  # wider than the row, or an option that it does not serve
                        found |= {step.variant for step in plan.backward(problem, device.query(0)).steps}
    compile_ahead(found)


def cases_of(row: Row, dtype: str) -> tuple[Any, str]:
    """Equal for rows that have the same cases, but for those too wide."""
    return row if row.arch else row.options, dtype


def problems_of(row: Row, dtype: str) -> Iterator[BackwardProblem]:
    """Those of the other tests: masks at both widths, and all options."""
    for d in head_dims(row):
        p = AttentionProblem(dtype, dtype, 1, PRIME, PRIME, 2, 1, d, d, 1.0, aligned16=d * ITEMSIZE[dtype] % 16 == 0)
        masks = (p, p._replace(window_right=0), *([p._replace(window_left=40, window_right=9)] if row.arch else []))
        yield from (BackwardProblem(mask, ("q", "k", "v"), deterministic=asked) for mask in masks for asked in ways(row))
    if row.options:
        p = p._replace(head_dim=row.head_dim, head_dim_v=row.head_dim, aligned16=True, window_right=0)
        p = p._replace(softcap=5.0, alibi=True, bias="float32", sink="float32")
        yield BackwardProblem(p, ALL, deterministic=True, bias_shape=(1, 2, PRIME, 1))


@each_row
def test_every_pair_of_options_that_the_row_serves(row: Row, dtype: str) -> None:
    needs(row)
    chosen = cases(row, dtype)
    assert len(chosen) >= 10
    with only(row, table="BACKWARD"):
        for case in chosen:
            with naming(f"{row_name(row)} {case}"):
                test_pairs_backward.test_gradients_of_pair(case, case_rng(case))


@contextlib.contextmanager
def naming(case: str) -> Iterator[None]:
    try:
        yield
    except (AssertionError, cupyflash.UnsupportedError) as e:
        raise AssertionError(f"{case}: {e}") from e


def inputs(
    rng: np.random.Generator, dtype: str, sq: int, sk: int, d: int, heads: tuple[int, int] = (2, 1), batch: int = 1
) -> list[np.ndarray]:
    """q, k, v and dout."""
    return [
        rng.standard_normal((batch, s, h, d)).astype(DTYPES[dtype])
        for s, h in zip((sq, sk, sk, sq), (*heads, heads[1], heads[0]), strict=True)
    ]


def gradients(arrays: list[np.ndarray], deterministic: bool = False, **options: Any) -> cupyflash.Gradients:
    q, k, v, dout = arrays
    out, lse, _ = host_attention(q, k, v, return_lse=True, **options)
    targets = {f"d{name}": np.full(x.shape, np.nan, x.dtype) for name, x in zip("qkv", (q, k, v), strict=True)}
    return MOVE.attention_backward(dout, q, k, v, out, lse, deterministic=deterministic, **targets, **options)


def agrees(arrays: list[np.ndarray], name: str, deterministic: bool = False, **options: Any) -> cupyflash.Gradients:
    """Judged by the formula in float64, which takes less time than the library's reference, a loop over rows."""
    q, k, v, dout = arrays
    dtype = q.dtype
    expected = standard_gradients(*(x.astype(np.float64) for x in (dout, q, k, v)), dtype=np.float64, **options)
    standard = standard_gradients(dout, q, k, v, dtype=dtype, **options)
    grads = gradients(arrays, deterministic, **options)
    for n in "qkv":
        judge(getattr(grads, f"d{n}"), expected[n], standard[n], dtype=dtype, name=f"{name}: d{n}", kind="gradient")
    return grads


@each_row
def test_kf_056_072_lengths_around_the_blocks_of_each_row(row: Row, dtype: str) -> None:
    """Under a seed for which no gradient inherits more from the rounding of out than the judge allows: with few keys some do."""
    needs(row)
    rng = np.random.default_rng(5)
    with only(row, table="BACKWARD"):
        for n, (d, sq, sk) in enumerate(itertools.product(head_dims(row), *lengths(row))):
            options: dict[str, Any] = {"causal": True} if n % 2 else {}
            for deterministic in ways(row):
                agrees(inputs(rng, dtype, sq, sk, d), f"D={d} Sq={sq} Sk={sk} {options} {deterministic}", deterministic, **options)


@each_row
def test_kf_001_002_causal_rows_without_a_key(row: Row, dtype: str, rng: np.random.Generator) -> None:
    """Some of a block of rows, and whole ones."""
    needs(row)
    with only(row, table="BACKWARD"):
        for (sq, sk), ones, deterministic in itertools.product(((6, 3), (389, 130)), (True, False), ways(row)):
            arrays = inputs(rng, dtype, sq, sk, row.head_dim)
            if ones:
                arrays[3][...] = 1
            grads = agrees(arrays, f"Sq={sq} Sk={sk} ones={ones} {deterministic}", deterministic, causal=True)
            assert (grads.dq[:, : sq - sk].astype(np.float32) == 0).all()


MASKS: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"causal": "top_left"}, {"window_size": (40, 9)}, {"window_size": (0, 150)})


@pytest.mark.parametrize(("num_sms", "dtype"), [(1, "float16"), (2, "bfloat16")])
@pytest.mark.parametrize("row", [pytest.param(row, id=row_name(row)) for row in variants.BACKWARD if row.family == "bwd_sm90"])
def test_blocks_that_take_tile_after_tile(row: Row, dtype: str, num_sms: int, rng: np.random.Generator) -> None:
    """One key head of two batches by one block, or by two; with keys that no row sees whole tiles have no row block."""
    needs(row)
    queries, keys = lengths(row)
    with few_sms(num_sms) as planned, only(row, table="BACKWARD"):
        for n, (sq, sk) in enumerate([*itertools.product(queries, keys), *[(queries[-2], PRIME)] * len(MASKS)]):
            options = MASKS[(n + n // len(keys)) % len(MASKS)]  # each with each number of queries, and of keys
            grads = agrees(inputs(rng, dtype, sq, sk, row.head_dim, batch=2), f"Sq={sq} Sk={sk} {options}", **options)
            if options == {"causal": "top_left"}:
                assert all((grad[:, sq:].astype(np.float32) == 0).all() for grad in (grads.dk, grads.dv))
    assert grids(planned, "bwd_sm90") == {num_sms}


@pytest.mark.parametrize(("row", "dtype"), [case for case in EACH_ROW if True in ways(case.values[0])])
def test_kf_074_076_deterministic_runs_have_equal_bits(row: Row, dtype: str, rng: np.random.Generator) -> None:
    """50 of grouped heads, each in memory that held NaN; a sum over rows is added up beside those over keys."""
    needs(row)
    b, sq, sk, hq, hkv, d = (2, 700, 900, 4, 2, row.head_dim) if row.options else (1, 2048, 2048, 4, 1, row.head_dim)
    q, k, v, dout = (rng.standard_normal((b, s, h, d)).astype(DTYPES[dtype]) for s, h in ((sq, hq), (sk, hkv), (sk, hkv), (sq, hq)))
    options: dict[str, Any] = {"causal": True}
    if row.options:
        options |= {
            "bias": rng.standard_normal((1, hq, sq, 1)).astype(np.float32),
            "alibi_slopes": np.full(hq, 0.01, np.float32),
            "sink": np.zeros(hq, np.float32),
            "softcap": 5.0,
        }
    out, lse, _ = host_attention(q, k, v, return_lse=True, **options)
    arrays, given = MOVE(dout, q, k, v, out, lse), MOVE.options(options)
    first: list[bytes] = []
    with only(row, table="BACKWARD"):
        for run in range(50):
            grads = [grad for grad in host_backward(*arrays, deterministic=True, wrt=ALL, **given) if grad is not None]
            found = [cupy.asnumpy(grad).tobytes() for grad in grads]
            first = first or found
            assert found == first, f"run {run}"
    assert len(first) == (6 if row.options else 3)


@pytest.mark.parametrize(("row", "dtype"), [case for case in EACH_ROW if case.values[0].head_dim == 128])
def test_kf_077_a_batch_of_300_short_keys_under_large_values(row: Row, dtype: str, rng: np.random.Generator) -> None:
    """50 runs: dq of the first is as near to float64 as one may, and sums in another order change the others by one rounding."""
    needs(row)
    b, sq, sk, d, some = 300, 2048, 128, 128, 20  # random numbers for all batches would take the host longer than all else
    # A dout of a size at which what dq inherits from the rounding of out is less than the judge's fixed bound.
    few = [
        (size * rng.standard_normal((some, s, 1, d), dtype=np.float32)).astype(DTYPES[dtype])
        for s, size in ((sq, 3), (sk, 3), (sk, 3), (sq, 1 / 32))
    ]
    out, lse, _ = host_attention(*few[:3], return_lse=True)
    q, k, v, dout, out, lse = MOVE(*(np.tile(x, (b // some, *[1] * (x.ndim - 1))) for x in (*few, out, lse)))
    last = [x[-1:] for x in (few[3], *few[:3])]
    expected = standard_gradients(*(x.astype(np.float64) for x in last), dtype=np.float64)["q"]
    standard = standard_gradients(*last, dtype=last[0].dtype)["q"]
    eps = float(ml_dtypes.finfo(DTYPES[dtype]).eps)
    with only(row, table="BACKWARD"):
        for deterministic in ways(row):
            first = host_backward(dout, q, k, v, out, lse, deterministic=deterministic).dq
            judge(cupy.asnumpy(first[-1:]), expected, standard, dtype=last[0].dtype, name="dq", kind="gradient")
            first = widened(first)
            room = eps * cupy.abs(first) + 1e-5 * cupy.abs(first).max()
            for run in range(49):
                dq = widened(host_backward(dout, q, k, v, out, lse, deterministic=deterministic).dq)
                assert bool((cupy.abs(dq - first) <= room).all()), f"run {run}"


def widened(x: Any) -> Any:
    """float32 values of an array of CuPy of 16 bits."""
    return x.astype(np.float32) if x.dtype == np.float16 else (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


ONE_OF_EACH_FAMILY = [pytest.param(row, id=row_name(row)) for row in {row.family: row for row in variants.BACKWARD}.values()]


@pytest.mark.parametrize("row", ONE_OF_EACH_FAMILY)
def test_kf_058_a_batch_of_8300(row: Row, rng: np.random.Generator) -> None:
    """One key: its weight is 1, dv is dout, and dq and dk are what is left of dout . v - dout . out."""
    needs(row)
    q, k, v, dout = (np.tile(x, (100, 1, 1, 1)) for x in inputs(rng, "float16", 1, 1, row.head_dim, (16, 16), 83))
    lse = (np.einsum("bshd,bshd->bhs", q.astype(np.float32), k.astype(np.float32)) / np.sqrt(row.head_dim)).astype(np.float32)
    with only(row, table="BACKWARD"):
        for deterministic in ways(row):
            grads = MOVE.attention_backward(dout, q, k, v, v, lse, deterministic=deterministic)
            np.testing.assert_array_equal(grads.dv, dout)
            assert max(np.abs(grad.astype(np.float32)).max() for grad in (grads.dq, grads.dk)) < 1e-3


@pytest.mark.parametrize("row", [pytest.param(row, id=row_name(row)) for row in variants.BACKWARD])
def test_kf_059_060_rows_past_2_to_31_elements(row: Row, rng: np.random.Generator) -> None:
    """Each array in turn, and the gradient that goes with it, with its last row past 2^31 elements."""
    needs(row)
    d = row.head_dim
    q, k, v, dout = inputs(rng, "float16", 3, 3, d, (2, 2))
    out, lse, _ = host_attention(q, k, v, return_lse=True)
    there = dict(zip(("dout", "q", "k", "v", "out", "lse"), MOVE(dout, q, k, v, out, lse), strict=True))
    memory = cupy.empty(2**31 + 4096, np.float16)
    far = cupy.lib.stride_tricks.as_strided(memory, q.shape, (0, (2**30 + 512) * 2, d * 2, 2))
    with only(row, table="BACKWARD"):
        for which, deterministic in itertools.product(("dout", "q", "k", "v", "out"), ways(row)):
            expected = [cupy.asnumpy(grad) for grad in host_backward(*there.values(), deterministic=deterministic)[:3]]
            far[...] = there[which]
            grads = host_backward(*(there | {which: far}).values(), deterministic=deterministic)
            for grad, same in zip(grads[:3], expected, strict=True):
                np.testing.assert_array_equal(cupy.asnumpy(grad), same, err_msg=which)
            if which in ("q", "k", "v"):
                far[...] = np.nan
                host_backward(*there.values(), deterministic=deterministic, **{f"d{which}": far})
                np.testing.assert_array_equal(cupy.asnumpy(far), expected["qkv".index(which)], err_msg=f"d{which}")


@each_row
def test_kf_004_a_nan_reaches_only_what_sees_it(row: Row, dtype: str, rng: np.random.Generator) -> None:
    """In keys that no row sees, in rows that see no key, and in one row under a window."""
    needs(row)
    d, s = row.head_dim, 150
    with only(row, table="BACKWARD"):
        for deterministic in ways(row):
            arrays = inputs(rng, dtype, s - 23, s, d)
            clean = gradients(arrays, deterministic, causal="top_left")
            arrays[1][:, s - 23 :] = arrays[2][:, s - 23 :] = np.nan
            for grad, same in zip(gradients(arrays, deterministic, causal="top_left")[:3], clean[:3], strict=True):
                close(grad, same)
            assert (clean.dk[:, s - 23 :].astype(np.float32) == 0).all()

            arrays = inputs(rng, dtype, s, s - 23, d)
            clean = gradients(arrays, deterministic, causal=True)
            arrays[0][:, :23] = arrays[3][:, :23] = np.nan
            for grad, same in zip(gradients(arrays, deterministic, causal=True)[:3], clean[:3], strict=True):
                close(grad, same)
            assert (clean.dq[:, :23].astype(np.float32) == 0).all()

            if not row.options:
                continue
            arrays = inputs(rng, dtype, s, s, d)
            clean = gradients(arrays, deterministic, window_size=(4, 0))
            arrays[3][:, 70] = np.nan
            grads = gradients(arrays, deterministic, window_size=(4, 0))
            seen = (np.arange(s) >= 66) & (np.arange(s) <= 70)
            for grad, same in ((grads.dk, clean.dk), (grads.dv, clean.dv)):
                close(grad[:, ~seen], same[:, ~seen])
                assert np.isnan(grad[:, seen].astype(np.float32)).all()
            close(np.delete(grads.dq, 70, 1), np.delete(clean.dq, 70, 1))
            assert np.isnan(grads.dq[:, 70].astype(np.float32)).all()


def close(grad: np.ndarray, expected: np.ndarray) -> None:
    room = 4e-3 if grad.dtype == np.float16 else 3.2e-2
    np.testing.assert_allclose(grad.astype(np.float64), expected.astype(np.float64), rtol=room, atol=room)


@each_row
def test_kf_007_logits_of_the_largest_size(row: Row, dtype: str, rng: np.random.Generator) -> None:
    """One key has all the weight of each row, by 2^26: dv is dout there, and 0 elsewhere, and nothing is infinite."""
    needs(row)
    q, k, v, dout = inputs(rng, dtype, 130, 70, row.head_dim, (1, 1))
    q[...], k[...] = 0, 0
    q[..., 0], k[:, 33, :, 0] = 8192, 8192
    with only(row, table="BACKWARD"):
        for deterministic in ways(row):
            grads = gradients([q, k, v, dout], deterministic, softmax_scale=1.0)
            expected = np.zeros(v.shape)
            expected[:, 33] = dout.astype(np.float64).sum(axis=1)
            close(grads.dv, expected)
            assert all(np.isfinite(grad.astype(np.float32)).all() for grad in grads[:3])


@each_row
def test_a_gradient_of_scores_beyond_sixteen_bits(row: Row, dtype: str, rng: np.random.Generator) -> None:
    """dS of up to 10^6, which float16 does not hold; dq, dk and dv it does."""
    needs(row)
    q, k, v, dout = inputs(rng, dtype, 100, 90, row.head_dim, (1, 1))
    arrays = [(x.astype(np.float32) * size).astype(x.dtype) for x, size in ((q, 1e-3), (k, 1e-3), (v, 300), (dout, 10000))]
    expected = standard_gradients(*(x.astype(np.float64) for x in (arrays[3], *arrays[:3])), dtype=np.float64, softmax_scale=1.0)
    with only(row, table="BACKWARD"):
        for deterministic in ways(row):
            grads = gradients(arrays, deterministic, softmax_scale=1.0)
            for n in "qkv":
                grad, want = getattr(grads, f"d{n}").astype(np.float64), expected[n]
                assert np.abs(grad - want).max() <= 2e-2 * np.abs(want).max(), n
