"""Arrays on a GPU that is not the current one. With one GPU in the machine all of this is skipped, visibly."""

from __future__ import annotations

import concurrent.futures
import itertools
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed; pip install 'cupyflash[cuda13]'")

from on_gpu import LIBRARIES, TORCH, Move, agrees  # noqa: E402

import cupyflash  # noqa: E402


def num_gpus() -> int:
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(num_gpus() < 2, reason=f"needs 2 GPUs, this machine has {num_gpus()}")]


@pytest.fixture(autouse=True)
def current_device_is_left_as_it_was() -> Any:
    cupy.cuda.Device(0).use()
    yield
    assert cupy.cuda.runtime.getDevice() == 0


def on(device: int, library: str, *arrays: Any) -> list[Any]:
    """Arrays on that device, while device 0 stays the current one."""
    if library == "torch":
        torch = pytest.importorskip("torch", reason=TORCH)
        return [torch.from_numpy(x).to(f"cuda:{device}") for x in arrays]
    with cupy.cuda.Device(device):
        moved = [cupy.asarray(x) for x in arrays]
        cupy.cuda.runtime.deviceSynchronize()
    return moved


def device_of(array: Any) -> int:
    return int(array.device.id if isinstance(array, cupy.ndarray) else array.get_device())


def back(array: Any) -> np.ndarray:
    if not isinstance(array, cupy.ndarray):
        return array.cpu().numpy()
    with array.device:
        return cupy.asnumpy(array)


def make(rng: np.random.Generator, d: int = 64) -> Any:
    return rng.standard_normal((3, 1, 100, 2, d)).astype(np.float16)


@pytest.mark.parametrize("options", ["plain", "every"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_kf_095_arrays_on_another_device_than_the_current(rng: np.random.Generator, library: str, options: str) -> None:
    values = make(rng)
    given: dict[str, Any] = {"causal": True, "return_lse": True}
    moved = dict(given)
    if options == "every":  # a NumPy vector goes to the arrays' device, too
        vectors = {"bias": rng.standard_normal((100, 100)).astype(np.float16), "sink": rng.standard_normal(2).astype(np.float32)}
        moved |= dict(zip(vectors, on(1, library, *vectors.values()), strict=True)) | {"seqused_k": np.array([77], np.int32)}
        given |= vectors | {"seqused_k": np.array([77], np.int32)}
    out, lse, _ = cupyflash.attention(*on(1, library, *values), **moved)
    assert cupy.cuda.runtime.getDevice() == 0
    assert device_of(out) == device_of(lse) == 1
    here = Move(library)
    agrees(here, *values, name="cuda:0", **given)
    merged, merged_lse = cupyflash.merge_states([out, out], [lse, lse])
    assert cupy.cuda.runtime.getDevice() == 0
    assert device_of(merged) == device_of(merged_lse) == 1
    np.testing.assert_array_equal(back(merged), back(out))
    expected = here.attention(*values, **given)
    assert back(out).tobytes() == expected.out.tobytes()
    assert back(lse).tobytes() == expected.lse.tobytes()
    (target,) = on(1, library, np.full(values[0].shape, np.nan, np.float16))
    assert cupyflash.attention(*on(1, library, *values), **moved, out=target).out is target
    assert back(target).tobytes() == expected.out.tobytes()


@pytest.mark.parametrize("library", LIBRARIES)
def test_kf_096_one_device_after_another(rng: np.random.Generator, library: str) -> None:
    values = make(rng)
    results = [cupyflash.attention(*on(device, library, *values)) for device in (0, 1, 0, 1, 1, 0)]
    assert [device_of(out) for out in results] == [0, 1, 0, 1, 1, 0]
    assert {back(out).tobytes() for out in results} == {Move(library).attention(*values).tobytes()}


@pytest.mark.parametrize("library", LIBRARIES)
def test_kf_097_threads_on_two_devices(rng: np.random.Generator, library: str) -> None:
    """The first calls, which load the kernels, are concurrent."""
    cases = [make(rng, d) for d in {"cupy": (32, 64, 96, 128), "torch": (16, 48, 80, 112)}[library]]
    arrays = {(n, device): on(device, library, *case) for n, case in enumerate(cases) for device in (0, 1)}
    start = threading.Barrier(4)

    def calls(thread: int) -> list[tuple[int, Any]]:
        start.wait()
        turns = ((n % 4, (n // 4 + thread) % 2) for n in range(thread, 200 + thread))
        return [(n, cupyflash.attention(*arrays[n, device], softcap=11.0)) for n, device in turns]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(itertools.chain(*pool.map(calls, range(4))))
    for device in (0, 1):
        with cupy.cuda.Device(device):
            cupy.cuda.runtime.deviceSynchronize()
    for n, case in enumerate(cases):
        agrees(Move(library), *case, name=f"case {n}", softcap=11.0)
        assert {back(out).tobytes() for m, out in results if m == n} == {Move(library).attention(*case, softcap=11.0).tobytes()}


def test_arrays_of_two_devices_do_not_mix(rng: np.random.Generator) -> None:
    for library in LIBRARIES:
        q, k, v = make(rng)
        with pytest.raises(cupyflash.DeviceError, match="k is on cuda:1 and q on cuda:0: move one of them"):
            cupyflash.attention(*on(0, library, q), *on(1, library, k, v))


ONLY_ONE = """
import contextlib, ctypes
import cupyflash
{make}


def contexts():
    driver, device, flags, active = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    for ordinal in (0, 1):
        assert driver.cuDeviceGet(ctypes.byref(device), ordinal) == 0
        assert driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
        yield active.value


with {current}:
    x = make()
    before = [*contexts()]
    out = cupyflash.attention(x, x, x, causal=True)
    assert bool((out == 1).all())
print(before, [*contexts()])
"""
MAKE = {
    "cupy": ("import cupy\ncupy.cuda.Device(1).use()\nmake = lambda: cupy.ones((1, 99, 2, 64), cupy.float16)", "contextlib.nullcontext()"),
    "torch": ("import torch\nmake = lambda: torch.ones(1, 99, 2, 64, dtype=torch.float16, device='cuda:1')", "contextlib.nullcontext()"),
    "torch as current": (
        "import torch\nmake = lambda: torch.ones(1, 99, 2, 64, dtype=torch.float16, device='cuda')",
        "torch.cuda.device(1)",
    ),
}


@pytest.mark.parametrize("way", MAKE)
def test_kf_100_a_device_that_is_not_used_gets_no_context(way: str) -> None:
    """A context is 500 MB of a GPU that somebody else may be using."""
    if way.startswith("torch"):
        pytest.importorskip("torch", reason=TORCH)
    make, current = MAKE[way]
    run = subprocess.run((sys.executable, "-c", ONLY_ONE.format(make=make, current=current)), capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "[0, 1] [0, 1]\n"  # before the call and after it
