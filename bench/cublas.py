"""Matrix products by the cuBLAS that CuPy has loaded, on strided views of its arrays.

cupy.matmul knows no bfloat16 and copies what is strided, and every wrapper of cuBLAS in CuPy refuses while a CUDA graph is recorded. So the
one function is called through ctypes, with CuPy's handle; it is recorded like any other work.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

_TYPES = {"float16": 2, "bfloat16": 14, "float32": 0, "float64": 1}  # cudaDataType
_COMPUTE_32F, _COMPUTE_64F = 68, 70  # cublasComputeType_t: sums in float32, and for float32 no TF32
_DEFAULT_ALGORITHM = -1
_WORKSPACE_BYTES = 32 << 20  # cuBLAS's own choice for Hopper; a graph would otherwise allocate some in every replay


def multiply(a: Any, b: Any, out: Any) -> None:
    """out = a @ b of (B, H, rows, columns) in one dtype, summed in float32 (float64 for float64), on CuPy's current stream.

    A call for each index of the shorter of the first two axes; the other one is its batch. Row-major C = A B is column-major Cᵀ = Bᵀ Aᵀ, so
    b comes first.
    """
    import cupy

    library, handle, workspace = _library(cupy.cuda.Device().id)
    outer, inner = (0, 1) if a.shape[0] <= a.shape[1] else (1, 0)
    name = a.dtype.name
    compute, real = (_COMPUTE_64F, ctypes.c_double) if name == "float64" else (_COMPUTE_32F, ctypes.c_float)
    (transpose_b, _), (transpose_a, _), (transpose_out, _) = matrices = [_as_column_major(x) for x in (b, a, out)]
    if transpose_out:
        raise ValueError("the rows of the result must be dense")

    def operand(x: Any, leading: int, index: int) -> tuple[Any, ...]:
        start = x.data.ptr + index * x.strides[outer]
        return ctypes.c_void_p(start), _TYPES[name], leading, ctypes.c_longlong(x.strides[inner] // x.itemsize)

    def ask(function: str, *arguments: Any) -> None:
        if status := getattr(library, function)(handle, *arguments):
            raise RuntimeError(f"{function} returned {status}")

    ask("cublasSetStream_v2", ctypes.c_void_p(cupy.cuda.get_current_stream().ptr))
    ask("cublasSetWorkspace_v2", ctypes.c_void_p(workspace.ptr), ctypes.c_size_t(_WORKSPACE_BYTES))
    for index in range(a.shape[outer]):
        first, second, result = (operand(x, leading, index) for x, (_, leading) in zip((b, a, out), matrices, strict=True))
        sizes = int(transpose_b), int(transpose_a), b.shape[3], a.shape[2], a.shape[3]
        one, zero, rest = ctypes.byref(real(1)), ctypes.byref(real(0)), (a.shape[inner], compute, _DEFAULT_ALGORITHM)
        ask("cublasGemmStridedBatchedEx", *sizes, one, *first, *second, zero, *result, *rest)


def _as_column_major(x: Any) -> tuple[bool, int]:
    """Whether BLAS must transpose the matrices of x to have xᵀ, and their leading dimension. An axis of length 1 may have any stride."""
    (rows, columns), (row_step, column_step) = x.shape[2:], (step // x.itemsize for step in x.strides[2:])
    if (column_step == 1 or columns == 1) and (row_step >= columns or rows == 1):
        return False, row_step if rows > 1 else columns
    if (row_step == 1 or rows == 1) and column_step >= rows:
        return True, column_step
    raise ValueError(f"no dense axis: shape {x.shape}, strides {x.strides}")


@functools.cache
def _library(device: int) -> tuple[Any, Any, Any]:
    """cuBLAS, CuPy's handle for the current device, and a workspace there. ImportError where CuPy finds no cuBLAS."""
    import cupy

    library = ctypes.CDLL(cupy.cuda.cublas.__file__)  # CuPy's module for it: symbols are also looked for in what that was linked to
    return library, ctypes.c_void_p(cupy.cuda.get_cublas_handle()), cupy.cuda.alloc(_WORKSPACE_BYTES)
