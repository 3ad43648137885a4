"""decode.cu on the CPU: parts of sequences, merged by whoever comes last."""

from __future__ import annotations

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

import cupyflash  # noqa: E402
from cupyflash import plan, variants  # noqa: E402
from cupyflash.variants import Row  # noqa: E402

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="g++ is not installed: it compiles the kernels for the CPU")
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
ROWS = [
    pytest.param(row, dtype, id=f"{row.head_dim}-{dtype}")
    for row, dtype in zip(variants.DECODE, ("bfloat16", "float16", "bfloat16"), strict=True)
]


@pytest.fixture(params=[{}, {"num_splits": 3}, {"split_size": 70}], ids=["shares", "splits", "size"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(plan, "forward", lambda problem, device: plan.decode(problem, device, **request.param))
    return request.param


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


@pytest.mark.parametrize(("row", "dtype"), ROWS)
def test_decode(row: Row, dtype: str, how: Any, rng: np.random.Generator) -> None:
    d = row.head_dim
    unit = row.config.warps * row.config.block_n
    for sq, sk, hq, hkv, num_sms in (
        (1, unit, 8, 2, 3),
        (1, 5 * unit + 13, 8, 2, 3),
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
