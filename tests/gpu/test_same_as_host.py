"""Every test of known failures and of pairs of options, on the GPU, through CuPy and torch, for the chosen kernel and for fwd_simple."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / "unit")]
pytest.importorskip("cupy", reason="CuPy is not installed; pip install 'cupyflash[cuda13]'")

import test_pairs  # noqa: E402
from on_gpu import compile_ahead, on_gpu, only, run_each_once  # noqa: E402, F401
from test_known_failures import *  # noqa: E402, F403
from test_pairs import *  # noqa: E402, F403

import cupyflash  # noqa: E402
from cupyflash import device, plan, reference, variants  # noqa: E402

pytestmark = pytest.mark.gpu

# Those that this GPU's calls choose, and each family that is in their shadow.
KERNELS = {"chosen": variants.FORWARD} | {
    name: tuple(row for row in variants.FORWARD if row.family in families)
    for name, families in {"fwd_sm80": ("fwd_sm80", "fwd_simple"), "fwd_simple": ("fwd_simple",)}.items()
}
WAYS = {"cupy", "torch", *KERNELS}  # the parameters that a test gets here


@pytest.fixture(autouse=True, params=KERNELS)
def kernel(request: pytest.FixtureRequest, on_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:  # noqa: F811
    monkeypatch.setattr(reference, "attention", REFERENCE)
    monkeypatch.setattr(test_pairs, "standard_attention", STANDARD)
    calls = []
    monkeypatch.setattr(cupyflash, "attention", lambda *a, **o: (on_gpu(*a, **o), calls.append(1))[0])
    cupyflash.attention.__doc__ = on_gpu.__doc__  # a test reads it
    with only(*KERNELS[request.param]):
        yield
        assert plan.forward.cache_info().misses or not calls, "no call was planned anew: they may have run another kernel than this"


def seeded(item: Any, ways: set[str] = WAYS) -> np.random.Generator:
    """The same random numbers for each way of running a case: its references are computed once."""
    name, _, parameters = item.name.rstrip("]").partition("[")
    case = "-".join(part for part in parameters.split("-") if part not in ways)
    return np.random.default_rng(zlib.crc32(f"{name}[{case}".encode()))


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    return seeded(request.node)


def remembered(compute: Callable[..., Any]) -> Callable[..., Any]:
    results: dict[bytes, Any] = {}

    def attention(*arrays: Any, **options: Any) -> Any:
        key = hashlib.sha1(pickle.dumps((arrays, options))).digest()
        if key not in results:
            results[key] = compute(*arrays, **options)
        return results[key]

    return attention


REFERENCE, STANDARD = remembered(reference.attention), remembered(test_pairs.standard_attention)


@pytest.fixture(scope="module", autouse=True)
def kernels(request: pytest.FixtureRequest) -> None:
    """Compile what the tests here will launch: some 360 kernels, two minutes one after another.

    Which ones is learnt by running each test once on the host, in five seconds, and noting what is planned.
    """
    problems = {}

    def noting(problem: Any, spec: Any, choose: Any = plan.forward) -> Any:
        problems[problem] = None
        return choose(problem, spec)

    with only(*variants.FORWARD), pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "forward", noting)
        run_each_once(request, seeded)
    found = set()
    for rows in KERNELS.values():
        with only(*rows):
            for problem in problems:
                with contextlib.suppress(cupyflash.UnsupportedError):
                    found |= {step.variant for step in plan.forward(problem, device.query(0)).steps}
    compile_ahead(found)


# It makes 4 GB on the host and would move them; test_large.py has it on the GPU.
del test_kf_065_batches_more_than_2_to_31_elements_apart  # noqa: F821


def test_kf_028_bytes_that_do_not_align() -> None:
    """On a GPU an element must start at a multiple of its size."""
    odd = np.frombuffer(bytes(1 + 5 * 8 * 4), np.uint8)[1:].view(np.float32).reshape(1, 5, 1, 8)
    with pytest.raises(cupyflash.ShapeError, match=r"q starts at address .*, inside an element of float32.* pass q\.copy\(\)"):
        cupyflash.attention(odd, odd, odd)


def test_kf_063_a_failed_computation_raises_and_returns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.ones((1, 8, 2, 8), np.float16)
    with only(*plan.FORWARD), monkeypatch.context() as patch:
        patch.setattr(variants.Variant, "threads", 2048)  # more than a block can have
        with pytest.raises(cupyflash.LaunchError, match=r"the driver refused fwd_.* on a grid of"):
            cupyflash.attention(x, x, x)
    np.testing.assert_array_equal(cupyflash.attention(x, x, x), x)  # and the process goes on
