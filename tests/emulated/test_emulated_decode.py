"""decode.cu and latent_sm90.cu on the CPU: parts of sequences, merged by whoever comes last."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

sys.path[:0] = [str(Path(__file__).parent)]
import emulator  # noqa: E402
from emulator import emulated  # noqa: E402
from judge import judge, standard_attention  # noqa: E402
from latents import MANY, SIZES, latents  # noqa: E402
from latents import WAYS as LATENT_WAYS  # noqa: E402

import cupyflash  # noqa: E402
from cupyflash import plan, variants  # noqa: E402
from cupyflash.variants import Row  # noqa: E402

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="g++ is not installed: it compiles the kernels for the CPU")
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
ROWS = [
    pytest.param(row, dtype, id=f"{row.config.tile}-{row.head_dim}-{dtype}")
    for row, dtype in zip(
        (row for row in variants.DECODE if row.family == "decode"), itertools.cycle(("bfloat16", "float16")), strict=False
    )
]


# Splits are the same code whatever the tile: one of each element type is enough.
HOWS = [{}, {"num_splits": 3}, {"split_size": 70}]
WAYS = [
    pytest.param(*param.values, how, id=f"{param.id}-{'-'.join(how) or 'shares'}")
    for n, param in enumerate(ROWS)
    for how in HOWS[: 3 if n < 2 else 1]
]


def agrees(row: Row, dtype: str, arrays: list[Any], options: dict[str, Any], num_sms: int) -> None:
    expected, lse = standard_attention(*[x.astype(np.float64) for x in arrays], dtype=np.float64, **options)
    standard, standard_lse = standard_attention(*arrays, dtype=arrays[0].dtype, **options)
    used = options.get("seqused_k")
    if used is not None:
        for b, n in enumerate(used):
            arrays[1][b, n:] = arrays[2][b, n:] = np.nan
    with emulated(row, arch="90a", table="DECODE", num_sms=num_sms):
        out, got, _ = cupyflash.attention(*arrays, return_lse=True, **options)
        assert emulator.ran[-1].startswith("decode__")
    name = f"decode {sorted(options)}"
    judge(out, expected, standard, dtype=arrays[0].dtype, name=name)
    judge(got, lse, standard_lse, dtype=arrays[0].dtype, name=name, kind="lse")


@pytest.mark.parametrize(("row", "dtype", "how"), WAYS)
def test_decode(row: Row, dtype: str, how: dict[str, int], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "forward", lambda problem, device: plan.decode(problem, device, **how))
    d = row.head_dim
    unit = row.config.warps * row.config.block_n
    for sq, sk, hq, hkv, num_sms in (
        (1, unit, 8, 2, 3),
        (1, 5 * unit + 13, 8, 2, 4),
        (3, unit + 1, 6, 1, 1),
        (1, 1, 2, 2, 2),
        (5, 3 * unit - 1, 8, 2, 4),
    ):
        make = lambda *shape: rng.standard_normal(shape).astype(DTYPES[dtype])  # noqa: E731
        arrays = [make(3, sq, hq, d), make(3, sk, hkv, d), make(3, sk, hkv, d - 8)]
        agrees(row, dtype, arrays, {"causal": True}, num_sms)
        options = {"window_size": (unit, 0), "softcap": 5.0, "alibi_slopes": rng.random(hq).astype(np.float32)}
        options |= {"sink": rng.standard_normal(hq).astype(np.float32), "seqused_k": np.array([sk, sk // 2, 0], np.int32)}
        agrees(row, dtype, [x.copy() for x in arrays], options, num_sms)


@pytest.mark.parametrize(("row", "dtype"), ROWS[:1])
def test_packed_and_one_sequence_alone(row: Row, dtype: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed sequences, some without keys or rows and tokens of nobody around them; with split_size each has the bits that it has alone."""
    monkeypatch.setattr(plan, "forward", lambda problem, device: plan.decode(problem, device, split_size=200))
    rows, keys = np.array([2, 5, 5, 9, 10], np.int32), np.array([3, 303, 900, 900, 1300], np.int32)
    make = lambda tokens, heads: rng.standard_normal((tokens, heads, 64)).astype(DTYPES[dtype])  # noqa: E731
    q, k, v = make(12, 8), make(1310, 2), make(1310, 2)
    q[:2] = q[10:] = k[:3] = k[1300:] = v[:3] = v[1300:] = np.nan
    with emulated(row, arch="90a", table="DECODE"):
        out, lse, _ = cupyflash.attention_varlen(q, k, v, rows, keys, causal=True, return_lse=True)
        alone = [
            cupyflash.attention(q[None, a:b], k[None, c:d], v[None, c:d], causal=True, return_lse=True)
            for a, b, c, d in zip(rows[:-1], rows[1:], keys[:-1], keys[1:], strict=True)
            if b > a
        ]
    assert emulator.ran[-1].startswith("decode__")
    assert (out[:2] == 0).all()
    assert (out[10:] == 0).all()
    np.testing.assert_array_equal(out[2:10], np.concatenate([x.out[0] for x in alone]))
    np.testing.assert_array_equal(lse[:, 2:10], np.concatenate([x.lse[0] for x in alone], axis=1))
    np.testing.assert_array_equal(lse[:, [0, 1, 10, 11]], -np.inf)
    for a, b, c, d in zip(rows[:-1], rows[1:], keys[:-1], keys[1:], strict=True):
        if b > a and d > c:
            arrays = [x[None, part] for x, part in ((q, slice(a, b)), (k, slice(c, d)), (v, slice(c, d)))]
            expected, _ = standard_attention(*[x.astype(np.float64) for x in arrays], dtype=np.float64, causal=True)
            standard, _ = standard_attention(*arrays, dtype=q.dtype, causal=True)
            judge(out[None, a:b], expected, standard, dtype=q.dtype, name="decode, packed")


@pytest.mark.parametrize(
    ("way", "sizes"),
    [*((way, zip(SIZES, (3, 4, 2), strict=True)) for way in LATENT_WAYS), (LATENT_WAYS[0], zip(MANY, (20, 12), strict=True))],
)
def test_latent_heads(way: Any, sizes: Any, rng: np.random.Generator) -> None:
    for size, num_sms in sizes:
        for call in latents(rng, way, size):
            with emulated(num_sms=num_sms):
                out, lse, _ = cupyflash.attention_with_kvcache(
                    call.q, call.cache, call.cache[..., : call.dv], return_lse=True, **call.options
                )
            assert [name.partition("__")[0] for name in emulator.ran[-2:]] == ["latent_sm90", "latent_merge"]
            call.judge(out, lse)


@pytest.mark.parametrize("where", ["query", "keys"])
@pytest.mark.parametrize("d", [64, 576])
def test_whoever_merges_sees_the_nan_of_a_part(d: int, where: str, rng: np.random.Generator) -> None:
    """In a query, or in the keys of a part alone: the row goes the way out, which is not emulated (tests/gpu has what becomes of it)."""
    make = lambda *shape: rng.standard_normal(shape).astype(np.float16)  # noqa: E731
    q, k = make(1, 1, 4, d), make(1, 700, 1, d)
    v = k[..., :512] if d == 576 else make(1, 700, 1, d)
    (q[0, 0, 1] if where == "query" else k[0, 600:])[:] = np.nan
    with emulated(num_sms=6), pytest.raises(AssertionError, match="left the range"):
        cupyflash.attention_with_kvcache(q, k, v, cache_seqlens=np.array([700], np.int32), num_splits=3)


def test_packed_queries_over_latent_heads(rng: np.random.Generator) -> None:
    """With tokens of no sequence around them."""
    make = lambda *shape: rng.standard_normal(shape).astype(np.float16)  # noqa: E731
    q, k, lengths, cu_seqlens = make(6, 4, 576), make(2, 70, 1, 576), np.array([70, 9], np.int32), np.array([1, 4, 5], np.int32)
    with emulated():
        out = cupyflash.attention_with_kvcache(q, k, k[..., :512], cache_seqlens=lengths, cu_seqlens_q=cu_seqlens)
    assert [name.partition("__")[0] for name in emulator.ran[-2:]] == ["latent_sm90", "latent_merge"]
    assert (out[[0, 5]] == 0).all()
    for b, (first, last) in enumerate(itertools.pairwise(cu_seqlens)):
        arrays = [q[None, first:last], k[b : b + 1, : lengths[b]], k[b : b + 1, : lengths[b], :, :512]]
        expected, _ = standard_attention(*[x.astype(np.float64) for x in arrays], dtype=np.float64, causal=True)
        standard, _ = standard_attention(*arrays, dtype=q.dtype, causal=True)
        judge(out[None, first:last], expected, standard, dtype=q.dtype, name="latent, packed")
