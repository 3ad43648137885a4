"""Tensor maps: what the tensor memory accelerator of sm_90 has to know of an array, encoded by the driver into 128 bytes.

A map depends on nothing but address, shape, strides and box, so it is encoded once for all calls of a shape: 5 us an array (H200's host).
Addresses are put in later, in a tenth of that, by the driver as well: nobody else knows the layout of a map.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from cupyflash.errors import LaunchError

MAP_BYTES = 128
_DTYPES = {"float16": 6, "bfloat16": 9}  # CU_TENSOR_MAP_DATA_TYPE_*
_SWIZZLE_128B, _L2_PROMOTION_128B = 3, 2
_COLUMNS = 64  # of 16 bits: the span of the swizzle


@functools.cache
def _driver() -> Any:
    driver = ctypes.PyDLL("libcuda.so.1")  # what is called here only fills memory, sooner than the GIL is given up and taken again
    driver.cuTensorMapReplaceAddress.argtypes = ctypes.c_void_p, ctypes.c_void_p  # 0.4 us less than converting each time
    return driver


def encode(view: Any, rows: int) -> bytes:
    """The map of a (B, S, H, D) view read in boxes of `rows` x 64 elements; its address is that of no array yet."""
    batch, seqlen, heads, dim = view.shape
    strides = [0 if n == 1 else 2 * s for n, s in zip(view.shape, view.strides, strict=True)]
    memory = (ctypes.c_uint64 * (MAP_BYTES // 4))()  # twice the size, for an aligned place in it
    place = -(-ctypes.addressof(memory) // MAP_BYTES) * MAP_BYTES
    code = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(place),
        _DTYPES[view.dtype],
        4,
        ctypes.c_void_p(1 << 20),
        (ctypes.c_uint64 * 4)(dim, seqlen, heads, batch),
        (ctypes.c_uint64 * 3)(strides[1], strides[2], strides[0]),
        (ctypes.c_uint32 * 4)(_COLUMNS, rows, 1, 1),
        (ctypes.c_uint32 * 4)(1, 1, 1, 1),
        0,
        _SWIZZLE_128B,
        _L2_PROMOTION_128B,
        0,
    )
    if code:
        what = f"shape {view.shape} and strides {view.strides}"
        raise LaunchError(f"the driver refused a tensor map of {what}: error {code}; please report it")
    return ctypes.string_at(place, MAP_BYTES)


def replace_address(place: int, ptr: int) -> None:
    """Put an array's address into the map at `place` in host memory, which is aligned to 64 bytes."""
    if code := _driver().cuTensorMapReplaceAddress(place, ptr):
        raise LaunchError(f"the driver refused address {ptr:#x} for a tensor map: error {code}; please report it")
