"""Every kernel of the tables, run on the CPU: at the edges of its tiles, with and without a causal mask, forward and backward.

What a GPU shows besides is in tests/gpu; these run where there is none, and so for each change.
"""

from __future__ import annotations

import ctypes
import inspect
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
from judge import judge, standard_attention, standard_gradients  # noqa: E402

import cupyflash  # noqa: E402
from cupyflash import params, plan, variants  # noqa: E402
from cupyflash.device import KNOWN  # noqa: E402
from cupyflash.variants import BwdSm90Config, Row, SimpleConfig  # noqa: E402

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="g++ is not installed: it compiles the kernels for the CPU")

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
PRIME = 149


@pytest.fixture(scope="module", autouse=True)
def kernels(request: pytest.FixtureRequest) -> None:
    """Compile what the tests here will launch, on all cores."""

    def calls() -> None:
        for item in request.session.items:
            if item.path == request.path and not {"deadlock", "order"}.intersection(item.name.split("_")):
                wanted = inspect.signature(item.obj).parameters
                given = {"rng": np.random.default_rng(0), "monkeypatch": patch, **getattr(getattr(item, "callspec", None), "params", {})}
                item.obj(**{name: given[name] for name in wanted})

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "judge", lambda *arrays, **options: None)
        emulator.compile_kernels_of(calls)


def tiled(table: tuple[Row, ...]) -> list[Any]:
    """A row of a table and the dtype that it is run in: each has one, and neighbours have different ones. Of rows that differ in tiles
    alone, all of which tests/gpu has, the first, and of one width those under a causal mask."""
    tiles = [row for row in table if not isinstance(row.config, SimpleConfig)]
    first = {(row.family, row.head_dims, row.options): row for row in reversed(tiles)}.values()
    rows = [row for row in tiles if row in first or (row.causal and row.head_dim == 128)]
    dtypes = ("bfloat16", "float16")
    named = [(row, dtypes[n % 2], f"{row.family}-{row.head_dim}-{row.config.tile}{'-options' * row.options}") for n, row in enumerate(rows)]
    return [pytest.param(row, dtype, id=f"{name}-{dtype}") for row, dtype, name in named]


def arch_of(row: Row) -> str:
    """The oldest that can run the row."""
    widest = variants.Variant(row.family, row.dtypes[0], *row.head_dims, (), row.config)
    smem_bytes = max(kernel.smem_bytes for kernel in (widest, *plan.companions(widest, row)))
    return row.arch or next(
        arch for arch in ("80", "90a") if KNOWN[arch].smem_bytes >= smem_bytes and KNOWN[arch].capability >= row.capability
    )


def lengths(m: int, n: int) -> list[tuple[int, int]]:
    """(Sq, Sk) around the edges of tiles of m rows and n keys, and enough of them that buffers are used again."""
    return [(1, n + 1), (m - 1, n - 1), (m, n), (m + 1, PRIME), (PRIME, 1), (4 * m + 1, n), (m, 6 * n + 1)]


def inputs(rng: np.random.Generator, dtype: str, sq: int, sk: int, d: int, dv: int) -> list[Any]:
    shapes = (1, sq, 2, d), (1, sk, 1, d), (1, sk, 1, dv)
    return [rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in shapes]


def masks(row: Row) -> list[bool]:
    """Without and under a causal mask, where the row knows both; of rows before sm_90a, which differ in tiles alone, those of D = 64."""
    both = not row.options and (row.arch or row.head_dim == 64)
    return [causal for causal in (False, True) if row.causal in (None, causal)][: 2 if both else 1]


def masked(causal: bool, sq: int) -> dict[str, Any]:
    """One row that ends at the last key sees all, so that it is not causal any more; the top left corner is another thing."""
    return {"causal": "top_left" if causal and sq == 1 else causal}


def every_option(rng: np.random.Generator, sq: int, sk: int) -> dict[str, Any]:
    return {
        "window_size": (20, 30),
        "softcap": 5.0,
        "alibi_slopes": np.array([0.05, 0.02], np.float32),
        "bias": rng.standard_normal((1, 1, sq, sk)).astype(np.float32),
        "mask": rng.random((1, 1, 1, sk)) < 0.8,
        "sink": rng.standard_normal(2).astype(np.float32),
        "seqused_q": np.array([max(sq - 3, 0)], np.int32),
        "seqused_k": np.array([max(sk - 5, 0)], np.int32),
    }


def agrees(row: Row, dtype: str, arrays: list[Any], options: dict[str, Any]) -> None:
    with emulated(row, arch=arch_of(row)):
        out, lse, _ = cupyflash.attention(*arrays, return_lse=True, **options)
        assert row.family in emulator.ran[-1]
    wide = [x.astype(np.float64) for x in arrays]
    expected, expected_lse = standard_attention(*wide, dtype=np.float64, **options)
    standard, standard_lse = standard_attention(*arrays, dtype=DTYPES[dtype], **options)
    name = f"{row.family} {arrays[0].shape} {arrays[1].shape} {sorted(options)}"
    judge(out, expected, standard, dtype=DTYPES[dtype], name=name)
    judge(lse, expected_lse, standard_lse, dtype=DTYPES[dtype], name=name, kind="lse")


@pytest.mark.parametrize(("row", "dtype"), tiled(variants.FORWARD))
def test_forward(row: Row, dtype: str, rng: np.random.Generator) -> None:
    d, dv = row.head_dims
    for causal in masks(row):
        for sq, sk in lengths(row.config.block_m, row.config.block_n):
            agrees(row, dtype, inputs(rng, dtype, sq, sk, d, dv), masked(causal, sq))
    q, k, v = inputs(rng, dtype, 70, PRIME, d, dv)
    k[:, :40] *= 12  # keys are walked from the last one down: these outweigh all before them
    agrees(row, dtype, [q, k, v], masked(masks(row)[0], 70))
    if row.options:
        agrees(row, dtype, inputs(rng, dtype, 70, PRIME, d, dv - 8), every_option(rng, 70, PRIME))


@pytest.mark.parametrize(("row", "dtype"), tiled(variants.LESSON))
def test_keys_outside(row: Row, dtype: str, rng: np.random.Generator) -> None:
    """Rows come back from memory for each tile of keys: one tile, the edges of the second, and in between those that see no key of it."""
    d, m, n = row.head_dim, row.config.block_m, row.config.kept
    for sq, sk in ((1, n + 1), (m - 1, n - 1), (m, n), (m + 1, 2 * n + 1), (PRIME, 1), (PRIME, n + PRIME), (2 * n + m, n + 1)):
        for causal in (False, True):
            agrees(row, dtype, inputs(rng, dtype, sq, sk, d, d), masked(causal, sq))
    agrees(row, dtype, inputs(rng, dtype, PRIME, n + PRIME, d - 8, d - 8), {"causal": "top_left", "softmax_scale": -0.2})
    for outweighed in (slice(None, 40), slice(n, None)):  # by keys of the other tile
        q, k, v = inputs(rng, dtype, 70, n + PRIME, d, d)
        k[:, outweighed] *= 12
        agrees(row, dtype, [q, k, v], {})


def gradients_agree(row: Row, dtype: str, arrays: list[Any], options: dict[str, Any], rng: np.random.Generator, **how: Any) -> None:
    q, k, v = arrays
    wide = [x.astype(np.float64) for x in arrays]
    out, lse = (x.astype(y) for x, y in zip(standard_attention(*wide, dtype=np.float64, **options), (q.dtype, np.float32), strict=True))
    dout = rng.standard_normal(out.shape).astype(q.dtype)
    wrt = ("q", "k", "v", *(name for name in ("bias", "alibi_slopes", "sink") if name in options))
    with emulated(row, arch=arch_of(row), table="BACKWARD"):
        grads = cupyflash.attention_backward(dout, q, k, v, out, lse, wrt=wrt, **how, **options)
        assert any(row.family in kernel for kernel in emulator.ran)
    expected = standard_gradients(dout.astype(np.float64), *wide, dtype=np.float64, **options)
    standard = standard_gradients(dout, q, k, v, dtype=q.dtype, **options)
    for name in wrt:
        label = f"{row.family} d{name} {q.shape} {k.shape} {sorted(options)} {how}"
        judge(getattr(grads, f"d{name}"), expected[name], standard[name], dtype=q.dtype, name=label, kind="gradient")


@pytest.mark.parametrize(("row", "dtype"), tiled(variants.BACKWARD))
def test_backward(row: Row, dtype: str, rng: np.random.Generator) -> None:
    d = row.head_dim
    atomics = [] if isinstance(row.config, BwdSm90Config) else [True]
    for causal in masks(row):
        for sq, sk in lengths(row.config.block_m, row.config.block_n):
            gradients_agree(row, dtype, inputs(rng, dtype, sq, sk, d, d), masked(causal, sq), rng)
        for deterministic in atomics:
            gradients_agree(row, dtype, inputs(rng, dtype, 70, PRIME, d, d - 8), masked(causal, 70), rng, deterministic=deterministic)
    if row.options:  # of some seeds the gradient of a slope inherits more from the rounding of out than the judge allows; not of this one
        rng = np.random.default_rng(1)
        gradients_agree(row, dtype, inputs(rng, dtype, 33, 50, d, d - 8), every_option(rng, 33, 50), rng)


# Sequences of all kinds: before the first and behind the last one lie tokens of nobody, an empty one is among them, and a row of one token.
OFFSETS = np.array([3, 10, 10, 75, 203, 204], np.int32)
TOKENS = 210


def packed_agrees(row: Row, backward_row: Row, dtype: str, options: dict[str, Any], rng: np.random.Generator, **how: Any) -> None:
    """Forward and backward, with NaN in what no sequence uses, against the formula for each sequence alone."""
    d, dv = row.head_dims
    q, k, v = (x[0] for x in inputs(rng, dtype, TOKENS, TOKENS, d, min(dv, backward_row.head_dim)))
    dout = rng.standard_normal((*q.shape[:-1], v.shape[-1])).astype(q.dtype)
    used = [options.get(f"seqused_{name}", np.diff(OFFSETS)) for name in "qk"]
    parts = [(slice(begin, begin + m), slice(begin, begin + n)) for begin, m, n in zip(OFFSETS[:-1], *used, strict=True)]
    expected, standard = ([np.zeros(x.shape, np.float64) for x in (dout, q, k, v)] for _ in range(2))
    lse, standard_lse = (np.full((2, TOKENS), -np.inf) for _ in range(2))
    sums = [{name: np.zeros(2) for name in {"sink"} & set(options)} for _ in range(2)]
    for rows, keys in parts:
        if rows.start == rows.stop or keys.start == keys.stop:
            continue
        arrays = [x[None, part] for x, part in ((q, rows), (k, keys), (v, keys))]
        given = {name: x for name, x in options.items() if not name.startswith("seqused")}
        for found, of_heads, dt in ((expected, sums[0], np.float64), (standard, sums[1], q.dtype)):
            cast = [x.astype(dt) for x in arrays]
            out, row_lse = standard_attention(*cast, dtype=dt, **given)
            grads = standard_gradients(dout[None, rows].astype(dt), *cast, dtype=dt, **given)
            for total, part, x in zip(found, (rows, rows, keys, keys), (out, *(grads[name] for name in "qkv")), strict=True):
                total[part] = x[0]
            for given_name, total in of_heads.items():
                total += grads[given_name]
            (lse if dt is np.float64 else standard_lse)[:, rows] = row_lse[0]
    nobodys = [np.ones(TOKENS, bool) for _ in "qk"]
    for rows, keys in parts:
        nobodys[0][rows] = nobodys[1][keys] = False
    for x, which in ((q, 0), (dout, 0), (k, 1), (v, 1)):
        x[nobodys[which]] = np.nan
    name = f"{row.family} packed {sorted(options)}"
    with emulated(row, arch=arch_of(row)):
        got, got_lse, _ = cupyflash.attention_varlen(q, k, v, OFFSETS, return_lse=True, **options)
        assert "packed" in emulator.ran[-1]
    judge(got, expected[0], standard[0], dtype=q.dtype, name=name)
    judge(got_lse, lse, standard_lse, dtype=q.dtype, name=name, kind="lse")
    out = expected[0].astype(q.dtype)
    out[nobodys[0]] = np.nan
    lse[:, nobodys[0]] = np.nan
    how["wrt"] = ("q", "k", "v", *sums[0])
    with emulated(backward_row, arch=arch_of(backward_row), table="BACKWARD"):
        grads = cupyflash.attention_backward(dout, q, k, v, out, lse.astype(np.float32), cu_seqlens_q=OFFSETS, **how, **options)
        assert any(backward_row.family in kernel and "packed" in kernel for kernel in emulator.ran)
    for n, x in enumerate(grads[:3], 1):
        judge(x, expected[n], standard[n], dtype=q.dtype, name=f"{name} d{'qkv'[n - 1]}", kind="gradient")
    if sums[0]:
        judge(grads.dsink, sums[0]["sink"], sums[1]["sink"], dtype=q.dtype, name=f"{name} dsink", kind="gradient")


def packed_rows() -> list[Any]:
    """A row of sm_90a of each width with one of the other direction that serves its head dims; of the others, which differ in tiles alone,
    those of D = 64."""
    forward, backward = (
        [row for row in table if not isinstance(row.config, SimpleConfig)] for table in (variants.FORWARD, variants.BACKWARD)
    )

    def partner(row: Row, table: list[Row]) -> Row:
        alike = [r for r in table if r.head_dim == row.head_dim and r.options == row.options and r.narrow_v is None]
        return next((r for r in alike if r.causal is not True and arch_of(r) == arch_of(row)), alike[0] if alike else table[-1])

    each = [row for row in forward if row.longest is None and row.causal is not True]
    found = [(row, partner(row, backward)) for row in each] + [(partner(row, forward), row) for row in backward]
    found = [(f, b) for f, b in found if f.head_dim == b.head_dim and (f.head_dim == 64 or "90a" in (f.arch, b.arch))]
    dtypes = ("bfloat16", "float16")
    return [
        pytest.param(f, b, dtypes[n % 2], id=f"{f.family}-{f.config.tile}-{b.family}-{b.head_dim}-{b.config.tile}-{dtypes[n % 2]}")
        for n, (f, b) in enumerate(dict.fromkeys(found))
    ]


@pytest.mark.parametrize(("row", "backward_row", "dtype"), packed_rows())
def test_packed(row: Row, backward_row: Row, dtype: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_SHORT_SEQUENCES", 0)  # so that dq is summed up as that of long sequences
    monkeypatch.setattr(plan, "_SHARED_L2_BYTES", 60 * 4 * 128)  # so that there are several sections, and such that take one head at a time
    packed_agrees(row, backward_row, dtype, {"causal": bool(row.causal)}, rng)
    if row.options:
        rows = np.array([5, 0, 60, 100, 1], np.int32)
        options = {"window_size": (20, 9), "softcap": 5.0, "seqused_q": rows, "seqused_k": np.minimum(rows + 2, np.diff(OFFSETS))}
        options["sink"] = np.array([0.5, -1], np.float32)
        packed_agrees(row, backward_row, dtype, options, rng, deterministic=True)


@pytest.mark.parametrize(("family", "arch"), [("fwd_sm80", "80"), ("fwd_sm90", "90a")])
def test_the_order_of_packed_tiles(family: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tile of every head is listed once: sections of long sequences before those of short ones, in each as many heads at a time as
    share the L2, the longest tiles first. Those of fwd_sm90 end with the last row, the others begin with the first one."""
    row = next(row for row in variants.FORWARD if row.family == family and row.head_dim == 64 and row.causal is not False)
    heads, size, lengths = 4, row.config.block_m, np.array([130, 17, 900, 0, 140, 1, 520])
    monkeypatch.setattr(plan, "_SHARED_L2_BYTES", 300 * 2 * (64 + 64) * heads)  # 300 tokens of all heads
    real, found = emulator.compiled, []

    def compiled(variant: variants.Variant, arch: str) -> Any:
        def run(args: Any, *how: int) -> bytes:
            if variant.family != "packed_tiles":
                return b""
            failure = real(variant, arch)(args, *how)
            of_kernel = ctypes.c_uint64.from_address(ctypes.addressof(args) if hasattr(args, "_length_") else args).value
            tiles = ctypes.c_uint64.from_address(of_kernel + params.offset_of("row_tiles")).value
            numbers = (ctypes.c_int * (4 + 8 * ctypes.c_int.from_address(tiles).value)).from_address(tiles)
            found.append(np.array(numbers[4:]).reshape(-1, 8))
            return failure

        return run

    monkeypatch.setattr(emulator, "compiled", compiled)
    q = np.zeros((lengths.sum(), heads, 64), np.float16)
    with emulated(row, arch=arch):
        cupyflash.attention_varlen(q, q, q, np.r_[0, np.cumsum(lengths)].astype(np.int32), causal=True)

    tiles = [(head // heads - 1, head % heads, first) for head, first in found[0][:, :2].tolist()]
    first_rows = [range(length % -size if family == "fwd_sm90" else 0, length, size) for length in lengths.tolist()]
    assert sorted(tiles) == [(b, h, first) for b, rows in enumerate(first_rows) for h in range(heads) for first in rows]
    order = [b for b, _ in itertools.groupby(tiles, key=lambda tile: tile[0])]
    assert order[:2] == [2, 6]  # 900 and 520 tokens are sections of their own
    last = sum(len(first_rows[b]) for b in (0, 1, 5))
    assert {b for b, *_ in tiles[-last * heads :]} == {0, 1, 5}  # and 130, 17 and 1 come last
    for b, together in ((2, 2), (6, 2)):  # 900 are three times, and 520 twice what fits
        mine = [(h, first) for tile, h, first in tiles if tile == b]
        for first in range(0, heads, together):
            group, mine = mine[: len(mine) * together // (heads - first)], mine[len(mine) * together // (heads - first) :]
            assert {h for h, _ in group} == {*range(first, first + together)}
            seen = [min(first + size, lengths[b]) for _, first in group]
            assert all(later <= earlier + lengths[b] / 15 for earlier, later in itertools.pairwise(seen))


@pytest.mark.parametrize("row", [variants.FORWARD[-1]], ids=["fwd_simple"])
def test_one_warp_a_row(row: Row, rng: np.random.Generator) -> None:
    for dtype, options in (("float32", {"causal": True}), ("float16", every_option(rng, 9, 40))):
        arrays = inputs(rng, dtype, 9, 40, 33, 20)
        agrees(row, dtype, arrays, options)
        gradients_agree(variants.BACKWARD[-1], dtype, [x[:, :20] for x in arrays], {"causal": True}, rng)


def test_a_deadlock_is_reported(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that waits for more than comes: the last arrival of each thread at a named barrier is left out."""
    render = emulator.source_of
    broken = ("named_barrier_arrive(1 + (g ^ 1), 256);", "")
    monkeypatch.setattr(emulator, "source_of", lambda variant, arch: render(variant, arch).replace(*broken))
    emulator.compiled.cache_clear()
    row = next(row for row in variants.BACKWARD if row.family == "bwd_sm90")
    with pytest.raises(AssertionError, match=r"bwd_sm90.*deadlock: .* threads of block \d wait, one for a named barrier"):
        gradients_agree(row, "bfloat16", inputs(rng, "bfloat16", 40, 40, 64, 64), {}, rng)
    emulator.compiled.cache_clear()
