"""merge_states.cu on the CPU: every test of tests/unit/test_merge.py, with NaN in memory that is made for results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "unit")]
import emulator  # noqa: E402
from emulator import emulated  # noqa: E402
from test_known_failures import test_kf_009_merging_states_without_keys  # noqa: E402, F401
from test_merge import *  # noqa: E402, F403
from test_merge import DTYPES, MAX_PARTS, states  # noqa: E402

import cupyflash  # noqa: E402
from cupyflash import UnsupportedError  # noqa: E402

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="g++ is not installed: it compiles the kernels for the CPU")
on_host = cupyflash.merge_states


def by_kernel(outs: Any, lses: Any, **targets: Any) -> Any:
    with emulated():
        result = on_host(outs, lses, **targets)
    assert len(emulator.ran) == (0 not in lses[0].shape)
    return result


@pytest.fixture(autouse=True)
def on_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupyflash, "merge_states", by_kernel)


@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_pieces_of_16_bytes_are_read_at_once(rng: np.random.Generator, dtype: str) -> None:
    width = 16 // np.dtype(DTYPES[dtype]).itemsize
    for dim in (1, width - 1, width, width + 1, 3 * width):
        cupyflash.merge_states(*states(rng, 2, (1, 3, 2, dim), DTYPES[dtype]))
        assert emulator.ran[-1].endswith("__unaligned") == (dim % width > 0)


def test_more_parts_than_a_launch_takes(rng: np.random.Generator) -> None:
    outs, lses = states(rng, MAX_PARTS + 1, (1, 3, 2, 8), np.float32)
    out = np.full_like(outs[0], 7)
    with pytest.raises(UnsupportedError, match=r"outs holds 33 arrays: 32 are merged at once in GPU memory.*groups of up to 32"):
        cupyflash.merge_states(outs, lses, out=out)
    assert (out == 7).all()
    groups = [cupyflash.merge_states(outs[n::2], lses[n::2]) for n in range(2)]
    merged, lse = cupyflash.merge_states([group[0] for group in groups], [group[1] for group in groups])
    expected, expected_lse = on_host(outs, lses)
    np.testing.assert_allclose(merged, expected, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-6, atol=2e-6)
