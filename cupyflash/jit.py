"""Variant -> Unit (text and options) -> cubin -> loaded kernel. Nothing here chooses: the variant says all.

A kernel comes from our own file in `cache_dir()` where there is one, which `warmup` writes, else through `cupy.RawModule` and CuPy's disk
cache. Where CuPy cannot, for its NVRTC, its headers or its folder, it is compiled past CuPy into a file of ours, or into memory.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cupyflash.environment import cache_dir, load_cupy, load_nvrtc, warn_unwritable, why_unwritable
from cupyflash.errors import CompileError, DeviceError, StateError
from cupyflash.params import BACKWARD, CACHE, FORWARD, MERGE
from cupyflash.variants import BwdBiasConfig, BwdConfig, BwdRowsConfig, BwdSm90Config, DecodeConfig, SimpleConfig, Sm90Config, Variant


class Unit(NamedTuple):
    """One compilation: of which variant, a text that includes nothing, the architecture, and the kernel's name in the text."""

    variant: str
    source: str
    arch: str
    entry: str


# The options of each compilation, CuPy's or ours; its are given here for ours to be the same.
_OPTIONS = ("--std=c++17",)
_OPTIONS_OF_CUPY = ("-ftz=true", "--device-as-default-execution-space")


def source_root() -> Path:
    """The folder of the CUDA sources: `cuda_src` in the installed package, else beside the package in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "cuda_src"
    return installed if installed.is_dir() else package.parent / "cuda_src"


@functools.lru_cache
def render(variant: Variant, arch: str) -> Unit:
    """The text of a variant: the element types, the generated Config, and the kernel with its headers pasted in.

    CuPy's disk cache does not look into included files, so the text includes none; it depends on nothing but the sources and the
    variant, so equal text is an equal kernel.
    """
    types, kernel = _sources(variant.family)
    return Unit(variant.name, "\n".join((types, _config(variant, arch), kernel, _checks(variant))), arch, variant.family)


@functools.lru_cache
def _sources(family: str) -> tuple[str, str]:
    """The texts before and after the Config; read once a process, which is most of the 2 ms of the first `render`."""
    seen: set[Path] = set()
    return _paste(source_root() / "primitives" / "types.cuh", seen), _paste(source_root() / "kernels" / f"{family}.cu", seen)


_TYPES = {
    "float16": "cupyflash::Half",
    "bfloat16": "cupyflash::BFloat16",
    "float32": "float",
    "float64": "double",
    "float8_e4m3fn": "cupyflash::E4M3",
    "int8": "signed char",
}
_FLAGS = {
    "alibi": "kAlibi",
    "bias": "kBias",
    "causal": "kCausal",
    "dq": "kSumQ",
    "fromlast": "kFromLast",
    "local": "kLocal",
    "lse": "kWriteLse",
    "mask": "kMask",
    "packed": "kPacked",
    "paged": "kPaged",
    "sink": "kSink",
    "softcap": "kSoftcap",
    "splits": "kSplits",
    "unaligned": "kUnaligned",
    "used": "kUsed",
    "wholepages": "kWholePages",
}


def _config(variant: Variant, arch: str) -> str:
    """`struct Config`: the variant in C++, constant by constant."""
    flags = {flag.removesuffix("f32") for flag in variant.flags}
    types = {"Element": variant.dtype}
    for name in ("Out", "Cached"):
        named = (flag.removeprefix(name.lower()) for flag in variant.flags if flag.startswith(name.lower()))
        types[name] = next(named, variant.dtype)
    types |= {name: "float32" if f"{name.lower()}f32" in variant.flags else variant.dtype for name in ("Bias", "Sink", "Rotary")}
    numbers = {"kArch": int(arch.rstrip("af")), "kHeadDim": variant.head_dim, "kHeadDimV": variant.head_dim_v}
    config = variant.config
    assert config is not None
    if not isinstance(config, SimpleConfig):
        numbers |= {"kBlockM": config.block_m, "kBlockN": config.block_n}
    if not isinstance(config, SimpleConfig | BwdBiasConfig):
        numbers["kStages"] = config.stages
    if isinstance(config, Sm90Config):
        numbers |= {
            "kStagesQ": config.stages_q,
            "kPingPong": config.ping_pong,
            "kStoreMap": variant.store_map,
            "kOwnOut": config.own_out,
            "kPageRows": config.page_rows or config.block_n,
        }
    if isinstance(config, BwdConfig | BwdBiasConfig):
        numbers["kWarpsM"] = config.warps_m
    if isinstance(config, BwdConfig):
        numbers |= {"kWarpsN": config.warps_n, "kWarpsQ": config.warps_q}
    if isinstance(config, BwdConfig | BwdRowsConfig | DecodeConfig):
        numbers["kBlocks"] = config.blocks
    if isinstance(config, DecodeConfig):
        numbers |= {"kCluster": config.cluster, "kKeyWarps": config.unit // config.block_n}
    numbers["kWarps"] = config.warps
    if isinstance(config, BwdSm90Config):
        numbers["kKeyBuffers"] = config.key_buffers
    if isinstance(config, BwdConfig | BwdSm90Config) or variant.family == "bwd_convert":
        numbers["kPanels"] = "panels" in flags or (variant.family == "bwd_sm90" and variant.head_dim == 128)
    lines = [f"  using {name} = {_TYPES[dtype]};" for name, dtype in types.items()]
    lines += [f"  static constexpr int {name} = {value:d};" for name, value in numbers.items()]
    lines += [f"  static constexpr bool {name} = {'true' if flag in flags else 'false'};" for flag, name in _FLAGS.items()]
    products = _wgmma(variant)
    return "\n".join((*products, f"struct Config {{  // {variant.name}", *lines, "};"))


def _wgmma(variant: Variant) -> tuple[str, ...]:
    """The products of a variant as functions of one instruction each. wgmma names all of its registers, half as many as it is wide, so its
    text is made here for the widths in use. Both operands in shared memory: wgmma_ss, the right one with its rows along the reduction:
    wgmma_ss_t; the left one in registers, the right one so: wgmma_rs. Nothing for what does not use it."""
    config = variant.config
    latent = isinstance(config, DecodeConfig) and config.latent
    if not (latent or isinstance(config, Sm90Config | BwdSm90Config)):
        return ()
    element = _TYPES[variant.dtype]
    kind = {"float16": "f16", "bfloat16": "bf16"}[variant.dtype]

    def function(name: str, n: int, a: str, a_registers: int, a_operands: str, immediates: str) -> str:
        registers = n // 2
        d = ", ".join(f"%{i}" for i in range(registers))
        outputs = ", ".join(f'"+f"(d[{i // 4}][{i % 4}])' for i in range(registers))
        first = "{" + ", ".join(f"%{registers + i}" for i in range(4)) + "}" if a_registers == 4 else f"%{registers}"
        b = registers + a_registers
        return (
            f"namespace cupyflash {{\n"
            f"__device__ inline void {name}(float (&d)[{n // 8}][4], {a}, unsigned long long b, int accumulate, {element}) {{\n"
            f'  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{b + 1}, 0; wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} "\n'
            f'               "{{{d}}}, {first}, %{b}, p, {immediates}; }}"\n'
            f'               : {outputs}\n               : {a_operands}, "l"(b), "r"(accumulate));\n}}\n}}'
        )

    def in_memory(name: str, n: int, transposed: int) -> str:
        return function(name, n, "unsigned long long a", 1, '"l"(a)', f"1, 1, 0, {transposed}")

    def in_registers(n: int) -> str:
        return function("wgmma_rs", n, "const unsigned (&a)[4]", 4, '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])', "1, 1, 1")

    if isinstance(config, DecodeConfig):
        half = variant.head_dim_v // 2
        return in_memory("wgmma_ss", config.block_n, 0), in_memory("wgmma_ss_t", half, 1), in_registers(half)
    if isinstance(config, Sm90Config):
        return in_memory("wgmma_ss", config.block_n, 0), in_registers(variant.head_dim_v)
    assert isinstance(config, BwdSm90Config)
    width_q = variant.head_dim if config.block_m == 128 else 64  # of dQ at once
    widths = sorted({variant.head_dim, variant.head_dim_v})
    return in_memory("wgmma_ss", config.block_m, 0), in_memory("wgmma_ss_t", width_q, 1), *(in_registers(n) for n in widths)


def _checks(variant: Variant) -> str:
    """Drift between the languages is a compile error."""
    sizes = {"ForwardParams": FORWARD.size, "CacheParams": CACHE.size, "BackwardParams": BACKWARD.size, "MergeParams": MERGE.size}
    checks = [f'static_assert(sizeof(cupyflash::{name}) == {size}, "params.py and params.cuh differ");' for name, size in sizes.items()]
    if variant.smem_bytes:
        checks.append(f'static_assert(sizeof(cupyflash::Smem<Config>) == {variant.smem_bytes}, "variants.py and Smem differ");')
    return "\n".join(checks)


def _paste(path: Path, seen: set[Path]) -> str:
    """The file with each quoted include replaced by its text, once."""
    if path in seen:
        return ""
    seen.add(path)
    lines = []
    for line in path.read_text().splitlines():
        include = re.match(r'#include "(.+)"', line)
        if include:
            lines.append(_paste((path.parent / include[1]).resolve(), seen))
        elif line != "#pragma once":
            lines.append(line)
    return "\n".join(lines)


class Kernel(NamedTuple):
    """A loaded kernel: the driver's handle, and the function object that keeps its module alive."""

    handle: int
    function: Any


_kernels: dict[tuple[Variant, int], Kernel] = {}
_locks: dict[tuple[Variant, int], threading.Lock] = {}
_locks_lock = threading.Lock()


def load(variant: Variant, arch: str, device_id: int, stream: int = 0) -> Kernel:
    """The kernel on a device, which must be the current one: a dict hit, or read or compiled once a process.

    StateError where that once would fall into the capture of `stream`.
    """
    key = (variant, device_id)
    kernel = _kernels.get(key)
    if kernel is not None:
        return kernel
    with _locks_lock:
        lock = _locks.setdefault(key, threading.Lock())
    with lock:  # two threads that ask for one kernel compile it once
        if key not in _kernels:
            _kernels[key] = _load(variant, arch, stream)
    return _kernels[key]


_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES of cuda.h
_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14


def _load(variant: Variant, arch: str, stream: int) -> Kernel:
    cuda = load_cupy().cuda
    if _is_capturing(cuda.runtime, stream):
        raise StateError(
            f"{variant.name} is not loaded yet, and what that takes must not be captured: make the call once, or call "
            "cupyflash.warmup(...), before the capture"
        )
    unit = render(variant, arch)
    cubin = _stored(_file_name(unit))
    try:
        function = _through_cupy(unit) if cubin is None else None
        if function is None:
            module = cuda.Module()  # of bytes, so what was verified is what is loaded: the driver crashes on a file that is cut off
            module.load(cubin or build(unit).cubin)
            function = module.get_function(unit.entry)
        if variant.smem_bytes:
            cuda.driver.funcSetAttribute(function.ptr, _MAX_DYNAMIC_SHARED_SIZE_BYTES, variant.smem_bytes)
        if isinstance(variant.config, DecodeConfig) and variant.config.cluster > 8:  # that every GPU can do
            cuda.driver.funcSetAttribute(function.ptr, _NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
    except cuda.driver.CUDADriverError as e:
        runs, compiled = cuda.runtime.driverGetVersion(), ".".join(map(str, cuda.nvrtc.getVersion()))
        raise DeviceError(
            f"the driver refused to load {variant.name}, compiled by NVRTC {compiled} for sm_{arch}: {e}; "
            f"the driver runs CUDA {runs // 1000}.{runs % 1000 // 10}"
        ) from e
    return Kernel(function.ptr, function)


def _is_capturing(runtime: Any, stream: int) -> bool:
    try:
        return bool(runtime.streamIsCapturing(stream))
    except runtime.CUDARuntimeError as e:
        if "StreamCapture" in str(e):  # the default stream cannot be asked while another one that waits for it is capturing
            return True
        raise


def _through_cupy(unit: Unit) -> Any:
    """The kernel by RawModule, or None where CuPy cannot compile it."""
    cupy = load_cupy()
    options: tuple[str, ...] = _OPTIONS
    if unit.arch.endswith("a"):
        # CuPy adds an -arch without the letter behind ours. NVRTC takes the letter from either since 12.9, and refuses two before.
        if load_nvrtc().getVersion() < (12, 9):
            return None
        options += (f"-arch=sm_{unit.arch}",)
    try:
        return cupy.RawModule(code=unit.source, options=options).get_function(unit.entry).kernel
    except cupy.cuda.compiler.CompileException as e:
        raise _compile_error(unit, e.get_message()) from e
    except (cupy.cuda.driver.CUDADriverError, cupy.cuda.runtime.CUDARuntimeError):
        raise
    except (RuntimeError, OSError):  # it finds no CUDA headers, which it wants and the kernels do not; its folder cannot be written
        return None


class Cubin(NamedTuple):
    """A unit compiled by `build`, whether it was there already, and where it lies: None is in memory."""

    cubin: bytes
    path: Path | None
    cached: bool
    seconds: float


def build(unit: Unit) -> Cubin:
    """The unit compiled past CuPy: read from our own file, else compiled and written there. It needs no GPU."""
    start = time.perf_counter()
    name = _file_name(unit)
    cubin = _stored(name)
    cached = cubin is not None
    if cubin is None:
        cubin, _ = compile_cubin(unit)
        _store(name, cubin)
    path = None if name in _in_memory else cache_dir() / name
    return Cubin(cubin, path, cached, time.perf_counter() - start)


def build_all(variants: Sequence[Variant], arch: str, device_id: int | None) -> list[Cubin]:
    """`build` each on all cores, since NVRTC scales over threads; then load them on the device, if any."""
    load_nvrtc()  # here, for its time to be no kernel's
    from concurrent.futures import ThreadPoolExecutor  # 2 ms of an import that a call does not need

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        cubins = list(pool.map(build, (render(variant, arch) for variant in variants)))
    if device_id is not None:
        load_cupy().cuda.runtime.setDevice(device_id)  # binds its context to this thread
        for variant in variants:
            load(variant, arch, device_id)
    return cubins


def compile_cubin(unit: Unit, options: tuple[str, ...] = ()) -> tuple[bytes, str]:
    """(cubin, log) by NVRTC itself."""
    nvrtc = load_nvrtc()
    program = nvrtc.createProgram(unit.source, f"{unit.entry}.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*_OPTIONS, *_OPTIONS_OF_CUPY, f"-arch=sm_{unit.arch}", *options))
        return nvrtc.getCUBIN(program) + b"\0", nvrtc.getProgramLog(program)  # getCUBIN drops the last byte of the ELF file
    except nvrtc.NVRTCError as e:
        raise _compile_error(unit, nvrtc.getProgramLog(program)) from e
    finally:
        nvrtc.destroyProgram(program)


def _compile_error(unit: Unit, log: str) -> CompileError:
    import tempfile

    with tempfile.NamedTemporaryFile("w", prefix=f"{unit.entry}-", suffix=".cu", delete=False) as source:
        source.write(unit.source)
    first = next((line for line in log.splitlines() if "error" in line), log.strip())
    return CompileError(f"{unit.variant} did not compile: {first} (source: {source.name}); please report it with cupyflash-bench doctor")


# Our own files. Each is a cubin and the SHA-256 of it; its name says all that decides its bytes, so it is never rewritten with others.
_in_memory: dict[str, bytes] = {}  # those that could not be written


def _sha256(content: bytes) -> Any:
    import hashlib  # 3 ms, which an import for arrays in host memory need not wait for

    return hashlib.sha256(content)


def _file_name(unit: Unit) -> str:
    """The name of the unit's file: a change to any byte that decides what runs changes it, and no time or path does."""
    version = ".".join(map(str, load_nvrtc().getVersion()))
    decides = (unit.source, unit.arch, unit.entry, version, *_OPTIONS, *_OPTIONS_OF_CUPY)
    digest = _sha256("\0".join(decides).encode()).hexdigest()
    return f"{unit.entry}-sm_{unit.arch}-nvrtc{version}-{digest[:32]}.cubin"


def _stored(name: str) -> bytes | None:
    """The cubin of a file that is whole, or None."""
    if name in _in_memory:
        return _in_memory[name]
    try:
        content = (cache_dir() / name).read_bytes()
    except OSError:
        return None
    cubin, digest = content[:-32], content[-32:]
    return cubin if _sha256(cubin).digest() == digest else None


def _store(name: str, cubin: bytes) -> None:
    """Write the file in one step, so that no one reads a part of it; keep it in memory where that fails."""
    folder = cache_dir()
    why = why_unwritable(folder)
    if why is None:
        part = folder / f"{name}.{os.urandom(8).hex()}.part"  # no temporary file, which no other user could read
        try:
            part.write_bytes(cubin + _sha256(cubin).digest())
            part.replace(folder / name)
            return
        except OSError as e:  # a full disk
            why = e.strerror
            with contextlib.suppress(OSError):
                part.unlink()
    _in_memory[name] = cubin
    warn_unwritable(folder, why)
