"""Every test of merging on the GPU, through CuPy and torch; and merging in graphs, on other streams and without waiting."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / "unit")]
cupy = pytest.importorskip("cupy", reason="CuPy is not installed; pip install 'cupyflash[cuda13]'")

from on_gpu import Move, host_merge, nan_memory, on_gpu, spin  # noqa: E402, F401
from test_graphs import Graph, overwrite  # noqa: E402
from test_merge import *  # noqa: E402, F403
from test_merge import states  # noqa: E402
from test_streams import BUSY_MS, Side, copy  # noqa: E402

import cupyflash  # noqa: E402
from cupyflash import ArgumentError, DeviceError, UnsupportedError, launch  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def launches(on_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:  # noqa: F811
    """In NaN-filled memory, and what ends well was launched."""
    merge, parameters, merged, launched = cupyflash.merge_states, launch._parameters, [], []
    monkeypatch.setattr(launch, "_parameters", lambda *args: (launched.append(1), parameters(*args))[1])

    def merge_states(outs: Any, lses: Any, **targets: Any) -> Any:
        results = merge(outs, lses, **targets)
        merged.append(1)
        return results

    monkeypatch.setattr(cupyflash, "merge_states", merge_states)
    with nan_memory():
        yield
    assert launched or not merged, "no call launched anything: they may have run on the host"


@pytest.fixture
def move(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Move:
    """What takes arrays to the library of `on_gpu`, whose arrays `merge_states` is given as they are."""
    monkeypatch.setattr(cupyflash, "merge_states", host_merge)
    return Move(request.node.callspec.params["on_gpu"])


def parts_of(rng: np.random.Generator) -> list[np.ndarray]:
    """Three outs, then three lses."""
    outs, lses = states(rng, 3, (2, 300, 4, 64), np.float16)
    return [*outs, *lses]


def test_a_replayed_graph_merges_what_the_parts_hold_then(move: Move, rng: np.random.Generator) -> None:
    parts = move(*parts_of(rng))
    out, lse = cupyflash.merge_states(parts[:3], parts[3:])  # loads the kernel
    graph = Graph(move.library)
    graph.capture(lambda: cupyflash.merge_states(parts[:3], parts[3:], out=out, lse_out=lse))
    for _ in range(3):
        values = parts_of(rng)
        for part, new in zip(parts, values, strict=True):
            overwrite(move, part, new)
        for target in (out, lse):
            overwrite(move, target, np.full(target.shape, np.nan, move.back(target).dtype))
        graph.replay()
        expected = move.merge_states(values[:3], values[3:])
        assert [move.back(out).tobytes(), move.back(lse).tobytes()] == [x.tobytes() for x in expected]


def test_a_merge_is_queued_on_the_current_stream_and_waits_for_nothing(move: Move, rng: np.random.Generator) -> None:
    values = parts_of(rng)
    parts = move(*values)
    expected = [move.back(x) for x in cupyflash.merge_states(parts[:3], parts[3:])]
    targets = [part * float("nan") for part in parts]
    for target in targets:
        copy(target, target * 1)  # CuPy compiles its kernels
    side = Side(move.library)
    spin(0, 1)
    with side.current():
        cupyflash.merge_states(targets[:3], targets[3:])  # the side stream's share of the allocator
    cupy.cuda.runtime.deviceSynchronize()
    with side.current():
        spin(side.handle, BUSY_MS)
        for target, part in zip(targets, parts, strict=True):
            copy(target, part)
        results = cupyflash.merge_states(targets[:3], targets[3:])
        assert side.busy(), "the call waited for the stream, or the stream did not spin"
    side.synchronize()
    for result, x in zip(results, expected, strict=True):
        np.testing.assert_array_equal(move.back(result), x)


def test_what_fails_leaves_the_targets_alone(move: Move, rng: np.random.Generator) -> None:
    parts = move(*parts_of(rng))
    out, lse = move(np.full((2, 300, 4, 64), 7, np.float16), np.full((2, 4, 300), 7, np.float32))
    elsewhere = cupy.asnumpy(parts[1]) if move.library == "cupy" else parts[1].cpu()
    with pytest.raises(UnsupportedError, match="outs holds 33 arrays"):
        cupyflash.merge_states(parts[:3] * 11, parts[3:] * 11, out=out, lse_out=lse)
    with pytest.raises((ArgumentError, DeviceError), match=r"outs\[1\] is (a numpy array|in host memory) and outs\[0\]"):
        cupyflash.merge_states([parts[0], elsewhere], parts[3:5], out=out, lse_out=lse)
    for target in (out, lse):
        assert (move.back(target) == 7).all()
