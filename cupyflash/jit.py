"""Variant -> Unit (text and options) -> loaded kernel, through `cupy.RawModule`. Nothing here chooses: the variant says all."""

from __future__ import annotations

import functools
import hashlib
import re
import tempfile
import threading
from pathlib import Path
from typing import Any, NamedTuple

from cupyflash.environment import cache_dir
from cupyflash.errors import CompileError
from cupyflash.params import FORWARD
from cupyflash.variants import FwdConfig, Variant


class Unit(NamedTuple):
    """One compilation: a text that includes nothing, the options, and the kernel's name in it."""

    source: str
    options: tuple[str, ...]
    entry: str


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
    seen: set[Path] = set()
    primitives, kernels = source_root() / "primitives", source_root() / "kernels"
    parts = (_paste(primitives / "types.cuh", seen), _config(variant), _paste(kernels / f"{variant.family}.cu", seen), _checks(variant))
    options = ("--std=c++17", f"-arch=sm_{arch}") if arch.endswith("a") else ("--std=c++17",)
    return Unit("\n".join(parts), options, variant.family)


_TYPES = {"float16": "cupyflash::Half", "bfloat16": "cupyflash::BFloat16", "float32": "float", "float64": "double"}
_FLAGS = {
    "alibi": "kAlibi",
    "bias": "kBias",
    "causal": "kCausal",
    "local": "kLocal",
    "lse": "kWriteLse",
    "mask": "kMask",
    "sink": "kSink",
    "softcap": "kSoftcap",
    "unaligned": "kUnaligned",
    "used": "kUsed",
}


def _config(variant: Variant) -> str:
    """`struct Config`: the variant in C++, constant by constant."""
    flags = {flag.removesuffix("f32") for flag in variant.flags}
    out = next((flag.removeprefix("out") for flag in variant.flags if flag.startswith("out")), variant.dtype)
    types = {"Element": variant.dtype, "Out": out}
    types |= {name: "float32" if f"{name.lower()}f32" in variant.flags else variant.dtype for name in ("Bias", "Sink")}
    numbers = {"kHeadDim": variant.head_dim, "kHeadDimV": variant.head_dim_v}
    config = variant.config
    assert config is not None
    if isinstance(config, FwdConfig):
        numbers |= {"kBlockM": config.block_m, "kBlockN": config.block_n, "kStages": config.stages}
    numbers["kWarps"] = config.warps
    lines = [f"  using {name} = {_TYPES[dtype]};" for name, dtype in types.items()]
    lines += [f"  static constexpr int {name} = {value};" for name, value in numbers.items()]
    lines += [f"  static constexpr bool {name} = {'true' if flag in flags else 'false'};" for flag, name in _FLAGS.items()]
    return "\n".join((f"struct Config {{  // {variant.name}", *lines, "};"))


def _checks(variant: Variant) -> str:
    """Drift between the languages is a compile error."""
    checks = [f'static_assert(sizeof(cupyflash::ForwardParams) == {FORWARD.size}, "params.py and params.cuh differ");']
    if isinstance(variant.config, FwdConfig):
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


def digest(unit: Unit) -> str:
    """A name for the unit that changes with each byte that decides what runs."""
    return hashlib.sha256("\0".join((unit.source, *unit.options, unit.entry)).encode()).hexdigest()[:16]


class Kernel(NamedTuple):
    """A loaded kernel: the driver's handle, and the module that keeps it alive."""

    handle: int
    module: Any


_kernels: dict[tuple[Variant, int], Kernel] = {}
_locks: dict[tuple[Variant, int], threading.Lock] = {}
_locks_lock = threading.Lock()


def load(variant: Variant, arch: str, device_id: int) -> Kernel:
    """The kernel on a device, which must be the current one: a dict hit, or compiled or read from CuPy's disk cache once a process."""
    key = (variant, device_id)
    kernel = _kernels.get(key)
    if kernel is not None:
        return kernel
    with _locks_lock:
        lock = _locks.setdefault(key, threading.Lock())
    with lock:  # two threads that ask for one kernel compile it once
        if key not in _kernels:
            _kernels[key] = _load(variant, arch)
    return _kernels[key]


def _load(variant: Variant, arch: str) -> Kernel:
    import cupy
    from cupy.cuda import nvrtc

    unit = render(variant, arch)
    try:
        if arch.endswith("a") and nvrtc.getVersion() < (12, 9):
            # CuPy adds its own -arch behind ours; before 12.9 NVRTC takes only one, so the cubin is compiled past CuPy.
            module = cupy.RawModule(path=str(_cubin_file(unit, arch)))
        else:
            module = cupy.RawModule(code=unit.source, options=unit.options)
        function = module.get_function(unit.entry)
    except cupy.cuda.compiler.CompileException as e:
        raise _compile_error(variant, unit, e.get_message()) from e
    if variant.smem_bytes:
        function.max_dynamic_shared_size_bytes = variant.smem_bytes
    return Kernel(function.kernel.ptr, module)


def _cubin_file(unit: Unit, arch: str) -> Path:
    """The compiled unit as a file in the cache folder; its name is the digest of all that decides its bytes, so it is never rewritten."""
    from cupy.cuda import nvrtc

    folder = cache_dir()
    file = folder / f"{digest(unit)}-{arch}-{'.'.join(map(str, nvrtc.getVersion()))}.cubin"
    checksum = file.with_suffix(".sha256")
    # The driver crashes on a truncated file (seen on an H200), so it is read only if its checksum fits.
    if not (file.is_file() and checksum.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == checksum.read_text()):
        cubin, _ = compile_cubin(unit, arch)
        folder.mkdir(parents=True, exist_ok=True)
        for target, content in ((file, cubin), (checksum, hashlib.sha256(cubin).hexdigest().encode())):
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as part:
                part.write(content)
            Path(part.name).replace(target)
    return file


def compile_cubin(unit: Unit, arch: str, options: tuple[str, ...] = ()) -> tuple[bytes, str]:
    """(cubin, log) by NVRTC itself, which needs no GPU; the options are those that CuPy would add."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(unit.source, f"{unit.entry}.cu", (), ())
    ours = tuple(option for option in unit.options if not option.startswith("-arch"))
    try:
        nvrtc.compileProgram(program, (*ours, f"-arch=sm_{arch}", "-ftz=true", "--device-as-default-execution-space", *options))
        return nvrtc.getCUBIN(program) + b"\0", nvrtc.getProgramLog(program)  # getCUBIN drops the last byte of the ELF file
    except nvrtc.NVRTCError as e:
        raise CompileError(nvrtc.getProgramLog(program)) from e
    finally:
        nvrtc.destroyProgram(program)


def _compile_error(variant: Variant, unit: Unit, log: str) -> CompileError:
    with tempfile.NamedTemporaryFile("w", prefix=f"{variant.family}-", suffix=".cu", delete=False) as source:
        source.write(unit.source)
    first = next((line for line in log.splitlines() if "error" in line), log.strip())
    return CompileError(f"{variant.name} did not compile: {first} (source: {source.name}); please report it with cupyflash-bench doctor")
