"""Each row of the kernel table at the edges of its blocks, and with logits at the edges of what its arithmetic holds."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cupy", reason="CuPy is not installed; pip install 'cupyflash[cuda13]'")

from judge import standard_attention
from on_gpu import Move, agrees, compile_ahead, few_sms, fits, grids, needs, only, row_name

import cupyflash
from cupyflash import device, plan, variants
from cupyflash.problem import ITEMSIZE, AttentionProblem
from cupyflash.variants import Row

pytestmark = pytest.mark.gpu

PRIME = 397  # more than three of the largest blocks
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
PLAIN: tuple[dict[str, Any], ...] = ({}, {"causal": True, "return_lse": True})
WINDOW: dict[str, Any] = {"window_size": (90, 35), "return_lse": True}
EACH_ROW = [
    pytest.param(row, dtype, id=f"{row_name(row)}-{dtype}") for row in (*variants.FORWARD, *variants.LESSON) for dtype in row.dtypes
]
each_row = pytest.mark.parametrize(("row", "dtype"), EACH_ROW)


def blocks(row: Row) -> tuple[int, int]:
    """Queries of a block, and keys of a step: a warp of fwd_simple takes 32; fwd_keys_outside reads rows again after `kept`."""
    return getattr(row.config, "block_m", row.config.warps), getattr(row.config, "kept", getattr(row.config, "block_n", 32))


def head_dims(row: Row) -> tuple[tuple[int, int], tuple[int, int]]:
    """(D, Dv): the full width, and one that the tile pads: odd where the row takes rows of any alignment, else a multiple of 16 bytes."""
    less = 3 if row.options and not row.arch else 8
    d, dv = row.head_dims
    return (d, dv), (d - less, dv - less)


def options_of(row: Row) -> tuple[dict[str, Any], ...]:
    """Those that the row serves without being there for options."""
    windows = (WINDOW,) if "local" in variants.PLAIN.get(row.family, ()) else ()
    return tuple(options for options in (*PLAIN, *windows) if row.causal in (None, options != {}))


@pytest.fixture(scope="module", autouse=True)
def kernels(request: pytest.FixtureRequest) -> None:
    """Compile the kernels of all rows at once."""
    found = set()
    params = {tuple(item.callspec.params[name] for name in ("row", "dtype")) for item in request.session.items if item.path == request.path}
    for row, dtype in params:
        if fits(row):
            with only(row):
                for (d, dv), options in itertools.product(head_dims(row), options_of(row)):
                    plain = AttentionProblem(dtype, dtype, 1, PRIME, PRIME, 2, 1, d, dv, 1.0, aligned16=d * ITEMSIZE[dtype] % 16 == 0)
                    left, right = options.get("window_size", (None, 0 if options else None))
                    asked = plain._replace(window_left=left, window_right=right, write_lse=bool(options))
                    found |= {step.variant for step in plan.forward(asked, device.query(0)).steps}
    compile_ahead(found)


# The reference of float64 loops over rows, a minute for these.
@pytest.mark.parametrize(("row", "dtype"), [p for p in EACH_ROW if "float64" not in p.values])
def test_kf_072_lengths_around_the_blocks_of_each_row(row: Row, dtype: str, rng: np.random.Generator) -> None:
    needs(row)
    move = Move("cupy")
    lengths = [sorted({1, block - 1, block, block + 1, PRIME}) for block in blocks(row)]
    with only(row):
        for n, ((d, dv), sq, sk) in enumerate(itertools.product(head_dims(row), *lengths)):
            shapes = (1, sq, 2, d), (1, sk, 1, d), (1, sk, 1, dv)
            q, k, v = (rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in shapes)
            options = options_of(row)[n % len(options_of(row))]  # 25 pairs: another one at the other width
            if row.causal and sq == 1:  # to a single query no key is in the future: no call for this row
                continue
            agrees(move, q, k, v, name=f"D={d} Dv={dv} Sq={sq} Sk={sk} {options}", **options)


@pytest.mark.parametrize(("row", "dtype"), [p for p in EACH_ROW if p.values[0].arch and "bfloat16" in p.values])
def test_blocks_that_take_tile_after_tile(row: Row, dtype: str, rng: np.random.Generator) -> None:
    """Two heads of two batches by two blocks: all buffers used many times, and tiles among the others in which no row sees a key."""
    needs(row)
    move, (d, dv) = Move("cupy"), row.head_dims
    block_m, block_n = blocks(row)
    with few_sms(2) as planned, only(row):
        for options, (sq, sk) in itertools.product(options_of(row), ((1, PRIME), (block_m + 1, 1), (PRIME, block_n - 1), (PRIME, PRIME))):
            if row.causal and sq == 1:
                continue
            shapes = (2, sq, 2, d), (2, sk, 1, d), (2, sk, 1, dv)
            q, k, v = (rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in shapes)
            agrees(move, q, k, v, name=f"Sq={sq} Sk={sk} {options}", **options)
    assert grids(planned, "fwd_sm90") == {2}


def scores(kind: str, sk: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two columns of Q and K, and the sign of each row of Q in turn, whose product is the score of each key: exact in 16 bits."""
    j = np.arange(sk)
    zeros = np.zeros(sk)
    return {
        "rising": (2, 0, j // 4 * 0.5, zeros, (1,)),  # a new maximum in each step
        "falling": (2, 0, (sk - j) // 4 * 0.5, zeros, (1,)),
        "both": (2, 0, j // 4 * 0.5, zeros, (1, -1)),  # neighbours in a warp differ in when they rescale
        "steep": (240, 0, j // 2 * 1.0, zeros, (1,)),  # up to 47520
        "late": (240, 1, np.where(j == sk - 2, 250.0, 0), j % 5, (1,)),  # one key of 60000 in the last step
        "early": (240, 1, np.where(j == 1, 250.0, 0), j % 5, (1,)),
        "high": (240, 1, zeros + 250, -(j % 7), (1,)),  # about 60000, all of them
        "low": (240, 1, zeros - 250, j % 7, (1,)),  # about -60000
        # Each row jumps by 1.44 binary orders more than the one before it, up to 280, in the midst of the walk.
        "jump": (1, 0, np.where(j == sk // 2, 1.0, 0), zeros, tuple(n // 2 for n in range(400))),
        "opposite": (240, 0, np.where(j % 50 == 49, 250.0, -250.0), zeros, (1, -1)),
    }[kind]


KINDS = ("rising", "falling", "both", "steep", "late", "early", "high", "low", "jump", "opposite")


@each_row
def test_kf_008_logits_of_every_shape_and_size(row: Row, dtype: str, rng: np.random.Generator) -> None:
    needs(row)
    move, sq = Move("cupy"), 2 * blocks(row)[0] + 3
    with only(row):
        for kind, options in itertools.product(KINDS, options_of(row)):
            first, second, key_first, key_second, signs = scores(kind, PRIME)
            q, k = np.zeros((1, sq, 2, row.head_dim)), np.zeros((1, PRIME, 1, row.head_dim))
            q[..., 0], q[..., 1] = first * np.resize(signs, sq)[:, None], second
            k[0, :, 0, 0], k[0, :, 0, 1] = key_first, key_second
            v = rng.standard_normal((1, PRIME, 1, row.head_dims[1]))
            arrays = (x.astype(DTYPES[dtype]) for x in (q, k, v))
            # The maximum in log2 units is 86562, which float32 knows to 2^-8: the one key's weight is up to 2^(2^-8), and rounded as such.
            one_key = kind in ("late", "early", "jump")
            agrees(move, *arrays, name=f"{kind} {options}", exact_weights=one_key, softmax_scale=1.0, **options)


# Of the root mean square error by that of the result: what rounding the weights and the result costs, and a tenth to a fourth more. A
# largest weight that is anything but 1 where one key outweighs the others costs 1.5 times as much; single elements say little here, since
# of scores of hundreds the sums of the tensor cores lose as much as a weight's rounding.
OUTLIERS = {"float16": 2**-12.1, "bfloat16": 2**-9.1}


@pytest.mark.parametrize(("row", "dtype"), [p for p in EACH_ROW if OUTLIERS.keys() & set(p.values)])
def test_kf_008_outliers_among_rows_and_columns(row: Row, dtype: str, rng: np.random.Generator) -> None:
    """Rows jump at any place, by up to a hundred binary orders and more."""
    needs(row)
    move, (d, dv) = Move("cupy"), row.head_dims
    with only(row):
        for options in options_of(row):
            q, k, v = (rng.standard_normal((1, PRIME, *shape)) for shape in ((2, d), (1, d), (1, dv)))
            for x in (q, k, v):
                x[:, ::29] *= 5
                x[..., ::31] *= 3
            arrays = [x.astype(DTYPES[dtype]) for x in (q, k, v)]
            given = {name: x for name, x in options.items() if name != "return_lse"}
            expected, _ = standard_attention(*(x.astype(np.float64) for x in arrays), dtype=np.float64, **given)
            out = move.attention(*arrays, **given).astype(np.float64)
            error = np.sqrt(np.mean((out - expected) ** 2) / np.mean(expected**2))
            assert error < OUTLIERS[dtype], options


@each_row
def test_results_are_equal_bit_by_bit_from_run_to_run(row: Row, dtype: str, rng: np.random.Generator) -> None:
    """Rows that are computed again among them: blocks finish in any order, and no result may depend on it."""
    needs(row)
    move, (d, dv) = Move("cupy"), row.head_dims
    with only(row):
        for options in options_of(row):
            q, k, v = (rng.standard_normal((2, 5 * PRIME, *shape)) for shape in ((8, d), (2, d), (2, dv)))
            q[:, ::29] *= 20
            k[:, ::31] *= 20
            q, k, v = move(*(x.astype(DTYPES[dtype]) for x in (q, k, v)))
            first, *others = (cupyflash.attention(q, k, v, **options) for _ in range(4))
            for other in others:
                for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (first, other)), strict=True):
                    assert (a is None and b is None) or a.tobytes() == b.tobytes(), options


@each_row
def test_kf_007_equal_logits_of_the_largest_size(row: Row, dtype: str, rng: np.random.Generator) -> None:
    """Scores of 2^36 and 2^-36 times less: `s * scale_log2 - max * scale_log2` with one product rounded is off by thousands."""
    needs(row)
    move, (d, dv) = Move("cupy"), row.head_dims
    with only(row):
        for size, options in itertools.product((2.0**15, 2.0**-15), options_of(row)):
            q = np.full((1, PRIME, 2, d), size)
            v = rng.standard_normal((1, PRIME, 1, dv))
            arrays = (x.astype(DTYPES[dtype]) for x in (q, q[:, :, :1], v))
            agrees(move, *arrays, name=f"{size} {options}", **options)
            agrees(move, *(x.astype(DTYPES[dtype]) for x in (q, -q[:, :, :1], v)), name=f"-{size} {options}", **options)
