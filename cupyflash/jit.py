"""Variant -> Unit (text and options) -> loaded kernel, through `cupy.RawModule`. Nothing here chooses: the variant says all."""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path
from typing import Any, NamedTuple

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
    options = ("--std=c++17", "--ptxas-options=-v", f"-arch=sm_{arch}") if arch.endswith("a") else ("--std=c++17", "--ptxas-options=-v")
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


def compile_cubin(unit: Unit, arch: str) -> tuple[bytes, str]:
    """(cubin, log) by NVRTC itself: needs no GPU."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(unit.source, f"{unit.entry}.cu", (), ())
    options = tuple(o for o in unit.options if not o.startswith("-arch"))
    try:
        nvrtc.compileProgram(program, (*options, f"-arch=sm_{arch}", "-ftz=true", "--device-as-default-execution-space"))
        return nvrtc.getCUBIN(program), nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError as e:
        raise RuntimeError(nvrtc.getProgramLog(program)) from e
    finally:
        nvrtc.destroyProgram(program)


def load(variant: Variant, arch: str) -> Any:
    import cupy

    unit = render(variant, arch)
    module = cupy.RawModule(code=unit.source, options=unit.options)
    kernel = module.get_function(unit.entry)
    if variant.smem_bytes:
        kernel.max_dynamic_shared_size_bytes = variant.smem_bytes
    return kernel
