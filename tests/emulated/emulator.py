"""The CUDA kernels on the CPU: the same source, compiled by g++ with stand-ins for what a GPU has (cuda.h) and for PTX (ptx.h).

`emulated()` makes `cupyflash.attention`, its backward and the calls over caches compute NumPy arrays so: checked, planned and packed as for
a GPU, and then run by a loop over threads. It shows on any machine whether kernels read and write the right places, and wait for the right
things; it knows nothing of speed, nor of memory fences (ptx.h).
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import itertools
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cupyflash import api, arrays, backward, cache, jit, launch, plan, problem, tensormap, variants
from cupyflash.device import KNOWN

HERE = Path(__file__).parent
COMPILER = shutil.which("g++") if sys.platform == "linux" else None  # version 12 or newer: it has _Float16
_OPTIONS = ("-std=c++20", "-O1", "-w", "-fno-strict-aliasing", "-ffp-contract=off", "-shared", "-fPIC")
# What ptx.h has instead of these two: types.cuh has conversions of fp16 in PTX.
_HALF = {
    'asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));': "y = static_cast<float>(bits_of<_Float16>(x.bits));",
    'asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));': "y.bits = bits_of<unsigned short>(static_cast<_Float16>(x));",
}
# What a tiled kernel calls to compute a row or key again that is not finite. No input of these tests asks for it; but what reads the wrong
# place reads NaN, and would be mended there.
_WAYS_OUT = (
    "__device__ void attend_row(const ForwardParams& p, int b, int h, int i) {",
    "__device__ void row_gradient(const BackwardParams& p, int b, int h, int i) {",
    "__device__ void key_gradient(const BackwardParams& p, int b, int h_kv, int j) {",
)


@functools.cache
def _folder() -> Path:
    """Of the compiled kernels, which take g++ two seconds each: kept for the next run, by their text."""
    folder = Path(tempfile.gettempdir()) / f"cupyflash-emulated-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    assert folder.stat().st_uid == os.getuid()
    return folder


def source_of(variant: variants.Variant, arch: str) -> str:
    """The text that jit.py renders, with ptx.h in the place of ptx.cuh and without the products, which ptx.h has as templates."""
    ptx = jit._paste(jit.source_root() / "primitives" / "ptx.cuh", {jit.source_root() / "primitives" / "types.cuh"})
    text = jit.render(variant, arch).source
    for product in jit._wgmma(variant):
        text = text.replace(product, "")
    if ptx in text:
        text = text.replace(ptx, (HERE / "ptx.h").read_text())
    for instruction, instead in _HALF.items():
        assert instruction in text
        text = text.replace(instruction, instead)
    text = re.sub(r"extern __shared__ __align__\(\d+\) char dynamic_smem\[\];", "char* const dynamic_smem = emulated::smem;", text)
    if not variant.family.endswith("simple"):
        for start in _WAYS_OUT:
            text = text.replace(start, f'{start}\n  throw emulated::Failure{{"a row or key left the range of the tiles"}};')
    assert "asm" not in re.sub(r"//.*", "", text)
    kind = re.search(rf"{variant.family}\(const __grid_constant__ cupyflash::(\w+) p", text)
    assert kind is not None
    maps = ", *static_cast<const cupyflash::TensorMaps*>(args[1])" if "TensorMaps& maps" in text else ""
    return f"""#include "cuda.h"
{text}
extern "C" const char* launch(void* const* args, int blocks, int threads, int order) {{
  static std::string failure;
  const auto& p = *static_cast<const cupyflash::{kind[1]}*>(args[0]);
  emulated::order = static_cast<emulated::Order>(order);
  failure = emulated::run(blocks, threads, [&] {{ {variant.family}(p{maps}); }});
  return failure.c_str();
}}
"""


def _gcc(source: Path, made: Path, *more: str) -> None:
    """Compile to a file that appears when it is whole, also where several processes compile the same."""
    assert COMPILER is not None
    unfinished = made.with_name(f"{os.getpid()}-{threading.get_ident()}-{made.name}")
    done = subprocess.run([COMPILER, *_OPTIONS, *more, str(source), "-o", str(unfinished)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{source}: {done.stderr[:2000]}"
    unfinished.replace(made)


@functools.cache
def _headers() -> Path:
    """A folder with cuda.h, also compiled: it takes longer than a kernel."""
    text = (HERE / "cuda.h").read_text()
    folder = _folder() / hashlib.sha256("\0".join((text, *_OPTIONS)).encode()).hexdigest()[:16]
    folder.mkdir(exist_ok=True)
    header = folder / "cuda.h"
    if not header.with_name("cuda.h.gch").exists():
        header.write_text(text)
        _gcc(header, header.with_name("cuda.h.gch"), "-x", "c++-header")
    return folder


@functools.cache
def compiled(variant: variants.Variant, arch: str) -> Any:
    """launch(args as the driver takes them, blocks, threads) -> what went wrong, or b"" """
    source, headers = source_of(variant, arch), _headers()
    library = headers / f"{hashlib.sha256(source.encode()).hexdigest()}.so"
    if not library.exists():
        text = library.with_name(f"{os.getpid()}-{library.stem}.cpp")
        text.write_text(source)
        _gcc(text, library, "-I", str(headers))
        text.unlink()
    function = ctypes.CDLL(str(library)).launch
    function.restype = ctypes.c_char_p
    function.argtypes = ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int
    return function


def _encode(view: Any, rows: int) -> bytes:
    """BoxMap in ptx.h, of a (B, S, H, D) view."""
    batch, seqlen, heads, dim = view.shape
    strides = [0 if n == 1 else 2 * s for n, s in zip(view.shape, view.strides, strict=True)]
    assert min(view.shape) > 0 and all(0 <= s < 1 << 40 and s % 16 == 0 for s in strides[:3]), "the driver refuses such a map"  # noqa: PT018
    box = struct.pack("<Q4q4qi", 0, dim, seqlen, heads, batch, 2, strides[1], strides[2], strides[0], rows)
    return box.ljust(tensormap.MAP_BYTES, b"\0")


def _replace_address(place: int, ptr: int) -> None:
    assert ptr % 16 == 0, "the driver refuses such an address"
    ctypes.c_uint64.from_address(place).value = ptr


def _launcher(schedule: plan.Plan, packing: launch.Packing, spec: Any, device_id: int, current_stream: Any) -> Callable[..., None]:
    def queue(addresses: tuple[int, ...], more: bytes = b"") -> None:
        args, _memory = launch._parameters.__wrapped__(packing, addresses, more)
        for step in schedule.steps:
            ran.append(step.variant.name)
            if wanted is not None:
                wanted.add((step.variant, spec.arch))
                continue
            assert step.grid[0] > 0, f"{step.variant.name}: a grid of no blocks is an error to the driver"
            failure = compiled(step.variant, spec.arch)(args, step.grid[0], step.threads, next(orders[step.variant.name]))
            assert not failure, f"{step.variant.name}: {failure.decode()}"

    return queue


# Of what a GPU queues, run by run of a kernel: loads late, or what reads shared memory late (cuda.h).
orders: dict[str, Iterator[int]] = collections.defaultdict(lambda: itertools.cycle((1, 2)))
ran: list[str] = []  # the kernels that ran, in order
wanted: set[tuple[variants.Variant, str]] | None = None  # of `compile_kernels_of`


def compile_kernels_of(calls: Callable[[], Any]) -> None:
    """Compile at once what these calls will launch; they run without computing, so that their results are NaN."""
    global wanted
    wanted = set()
    try:
        calls()
        found = sorted(wanted, key=str)
        if (
            os.environ.get("PYTEST_XDIST_WORKER") == "gw1"
        ):  # two processes begin at the two ends, and each finds what the other has compiled
            found.reverse()
    finally:
        wanted = None
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda kernel: compiled(*kernel), found))


def _allocator(made: Any, like: Any, real: Callable[..., Any] = arrays.allocator) -> Any:
    """Results and workspaces start as NaN."""
    num_bytes = math.prod(made.shape) * {"uint8": 1, **problem.ITEMSIZE}[made.dtype]

    make = real(made, like)

    def allocate(owner: Any) -> tuple[int, Any]:
        ptr, new = make(owner)
        ctypes.memset(ptr, 0xFF, num_bytes)
        return ptr, new

    return allocate


@contextlib.contextmanager
def emulated(*rows: variants.Row, arch: str = "90a", num_sms: int = 3, table: str = "FORWARD") -> Iterator[None]:
    """Calls with NumPy arrays run kernels, of these rows of a table where some are given, as on a GPU of so few SMs."""
    spec = dataclasses.replace(KNOWN[arch], num_sms=num_sms)

    with pytest.MonkeyPatch.context() as patch:
        for module in (api, backward, cache):
            patch.setattr(module, "HOST", None)  # no array lies there
            patch.setattr(module, "query", lambda device_id: spec)
        patch.setattr(launch, "check_process", lambda: None)
        patch.setattr(launch, "context_reader", lambda: int)
        patch.setattr(launch, "contexts", lambda device_id: {0})
        patch.setattr(launch, "launcher", _launcher)
        patch.setattr(arrays, "keep_if_captured", lambda workspaces, like: None)
        patch.setattr(arrays, "allocator", _allocator)
        patch.setattr(arrays, "stream_reader", lambda like: int)
        patch.setattr(tensormap, "encode", _encode)
        patch.setattr(tensormap, "replace_address", _replace_address)
        if rows:
            patch.setattr(plan, table, tuple(row._replace(longest=None) for row in rows))
            if table == "FORWARD":  # calls of few rows, too
                patch.setattr(plan, "DECODE", ())
        _forget()
        ran.clear()
        try:
            yield
        finally:
            patch.undo()
            _forget()


def _forget() -> None:
    for cached in itertools.chain.from_iterable(vars(module).values() for module in (api, backward, cache, plan)):
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()
