"""Every test of known failures and of pairs of options, on the GPU, through CuPy and torch, for the chosen kernel and for fwd_simple."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "unit")]
pytest.importorskip("cupy", reason="CuPy is not installed; pip install 'cupyflash[cuda13]'")

from on_gpu import on_gpu  # noqa: E402, F401
from test_known_failures import *  # noqa: E402, F403
from test_pairs import *  # noqa: E402, F403

import cupyflash  # noqa: E402
from cupyflash import plan, variants  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, params=["chosen", "fwd_simple"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "fwd_simple":
        monkeypatch.setattr(plan, "FORWARD", tuple(row for row in variants.FORWARD if row.family == "fwd_simple"))
    plan.forward.cache_clear()
    yield
    plan.forward.cache_clear()


def test_kf_028_bytes_that_do_not_align() -> None:
    """On a GPU an element must start at a multiple of its size."""
    odd = np.frombuffer(bytes(1 + 5 * 8 * 4), np.uint8)[1:].view(np.float32).reshape(1, 5, 1, 8)
    with pytest.raises(cupyflash.ShapeError, match=r"q starts at address .*, inside an element of float32.* pass q\.copy\(\)"):
        cupyflash.attention(odd, odd, odd)


def test_kf_063_a_failed_computation_raises_and_returns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.ones((1, 8, 2, 8), np.float16)
    with monkeypatch.context() as patch:
        patch.setattr(variants.Variant, "threads", 2048)  # more than a block can have
        with pytest.raises(cupyflash.LaunchError, match=r"the driver refused fwd_.* on a grid of"):
            cupyflash.attention(x, x, x)
    np.testing.assert_array_equal(cupyflash.attention(x, x, x), x)  # and the process goes on
