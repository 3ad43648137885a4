"""Every test of known failures and of pairs of options of the backward, on the GPU, through CuPy and torch, for the chosen kernel and for
bwd_simple; forward calls are the host's. What a call makes, results and workspaces, starts as NaN."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
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

import test_known_failures_backward  # noqa: E402
import test_pairs_backward  # noqa: E402
from on_gpu import LIBRARIES, Move, compile_ahead, host_backward, host_vjp, nan_memory, only, run_each_once  # noqa: E402
from test_known_failures_backward import *  # noqa: E402, F403
from test_pairs_backward import *  # noqa: E402, F403

import cupyflash  # noqa: E402
from cupyflash import UnsupportedError, device, launch, plan, reference, variants  # noqa: E402

pytestmark = pytest.mark.gpu

KERNELS = {"chosen": variants.BACKWARD, "bwd_simple": variants.BACKWARD[-1:]}
WAYS = {*LIBRARIES, *KERNELS}  # the parameters that a test gets here


@pytest.fixture(autouse=True, params=KERNELS)
def kernel(request: pytest.FixtureRequest, on_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(test_known_failures_backward, "same", same_in_the_dtype)
    with only(*KERNELS[request.param], table="BACKWARD"), nan_memory():
        yield


def same_in_the_dtype(grad: np.ndarray, expected: np.ndarray, rounding: float = 0) -> None:
    """A tiled kernel adds up dq in no fixed order, and computes what a NaN has touched again in another one."""
    room = 2 * test_known_failures_backward.BOUNDS[grad.dtype.name] if grad.dtype.itemsize == 2 else rounding
    np.testing.assert_allclose(grad.astype(np.float64), expected.astype(np.float64), rtol=room, atol=room)


def seeded(item: Any) -> np.random.Generator:
    """The same random numbers for each way of running a case: its references are computed once."""
    name, _, parameters = item.name.rstrip("]").partition("[")
    case = "-".join(part for part in parameters.split("-") if part not in WAYS)
    return np.random.default_rng(zlib.crc32(f"{name}[{case}".encode()))


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    return seeded(request.node)


def remembered(compute: Callable[..., Any]) -> Callable[..., Any]:
    results: dict[bytes, Any] = {}

    @functools.wraps(compute)
    def once(*arrays: Any, **options: Any) -> Any:
        key = hashlib.sha1(pickle.dumps((arrays, options))).digest()
        if key not in results:
            results[key] = compute(*arrays, **options)
        return results[key]

    return once


REFERENCE, STANDARD = remembered(reference.attention_backward), remembered(test_pairs_backward.standard_gradients)


@pytest.fixture(autouse=True, params=LIBRARIES)
def on_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Move]:
    """`cupyflash.attention_backward` and `attention_vjp` compute on the GPU for the length of a test."""
    move, calls, launches, parameters = Move(request.param), [], [], launch._parameters
    monkeypatch.setattr(reference, "attention_backward", REFERENCE)
    monkeypatch.setattr(test_pairs_backward, "standard_gradients", STANDARD)
    monkeypatch.setattr(launch, "_parameters", lambda *args: (launches.append(1), parameters(*args))[1])

    @functools.wraps(host_backward)
    def attention_backward(*arrays: Any, **options: Any) -> Any:
        grads = move.attention_backward(*arrays, **options)
        calls.append(1)
        return grads

    @functools.wraps(host_vjp)
    def attention_vjp(*arrays: Any, **options: Any) -> Any:
        return move.attention_vjp(*arrays, **options)

    monkeypatch.setattr(cupyflash, "attention_backward", attention_backward)
    monkeypatch.setattr(cupyflash, "attention_vjp", attention_vjp)
    yield move
    assert len(launches) >= len(calls), "a backward call launched nothing: it may have run on the host"


@pytest.fixture(scope="module", autouse=True)
def kernels(request: pytest.FixtureRequest) -> None:
    """Compile what the tests here will launch; which kernels is learnt by running each test once on the host."""
    problems = {}

    def noting(problem: Any, spec: Any, choose: Any = plan.backward) -> Any:
        problems[problem] = None
        return choose(problem, spec)

    with only(*variants.BACKWARD, table="BACKWARD"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "backward", noting)
        patch.setattr(reference, "attention_backward", REFERENCE)  # they remember for the tests
        patch.setattr(test_pairs_backward, "standard_gradients", STANDARD)
        run_each_once(request, seeded)
    found = set()
    for rows, problem in itertools.product(KERNELS.values(), problems):
        with only(*rows, table="BACKWARD"), contextlib.suppress(UnsupportedError):
            found |= {step.variant for step in plan.backward(problem, device.query(0)).steps}
    compile_ahead(found)


# They make 4 GB on the host and would move them; test_backward_rows.py has them on the GPU, and a batch of 8300 that is not expanded.
del test_kf_059_a_dout_whose_rows_lie_past_2_to_31_elements  # noqa: F821
del test_kf_060_keys_stored_by_sequence_past_2_to_31_elements  # noqa: F821
