"""Where the CUDA sources are. The compiler's front (Variant -> text and options -> loaded kernel) joins here with the kernels."""

from __future__ import annotations

from pathlib import Path


def source_root() -> Path:
    """The folder of the CUDA sources: `cuda_src` in the installed package, else beside the package in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "cuda_src"
    return installed if installed.is_dir() else package.parent / "cuda_src"
