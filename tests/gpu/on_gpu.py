"""The tests of the host path, run on a GPU: each array of a call is moved there with its strides, and the results are moved back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import cupy
import ml_dtypes
import numpy as np
import pytest

import cupyflash

host_attention = cupyflash.attention


class Move:
    """NumPy arrays to one library's arrays in GPU memory: the whole buffer under a view is moved, and the view taken there."""

    def __init__(self, library: str) -> None:
        self.library = library

    def there(self, x: Any) -> tuple[Any, Any]:
        """(the array on the GPU, its buffer there)."""
        base = x
        while hasattr(base, "base") and base.base is not None and not isinstance(base.base, bytes):
            base = base.base
        memory = cupy.asarray(base.ravel(order="K").view(np.uint8)) if base.size else cupy.empty(16, np.uint8)
        offset = x.ctypes.data - base.ctypes.data if x.size else 0
        array = cupy.ndarray(
            x.shape, x.dtype, cupy.cuda.MemoryPointer(memory.data.mem, memory.data.ptr - memory.data.mem.ptr + offset), x.strides
        )
        if self.library == "torch":
            import torch

            bits = {ml_dtypes.bfloat16: np.int16}.get(x.dtype.type)
            array = torch.from_dlpack(array.view(bits) if bits else array)
            array = array.view(torch.bfloat16) if bits else array
        return array, memory

    def back(self, y: Any) -> Any:
        if self.library == "torch":
            import torch

            if y.dtype == torch.bfloat16:
                return y.cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
            return y.cpu().numpy()
        strides = y.strides
        flat = cupy.asnumpy(y)
        order = sorted(range(y.ndim), key=lambda a: -strides[a])
        return flat.transpose(order).copy().transpose(np.argsort(order))

    def attention(self, q: Any, k: Any, v: Any, /, *, out: Any = None, **options: Any) -> Any:
        given = {name: self.there(x)[0] if isinstance(x, np.ndarray) else x for name, x in options.items()}
        arrays = [self.there(x)[0] if isinstance(x, np.ndarray) else x for x in (q, k, v)]
        target, memory = self.there(out) if isinstance(out, np.ndarray) else (out, None)
        result = host_attention(*arrays, out=target, **given)
        parts = result if isinstance(result, tuple) else (result,)
        if memory is not None:
            assert parts[0] is target
            base = out
            while base.base is not None:
                base = base.base
            base.ravel(order="K").view(np.uint8)[...] = cupy.asnumpy(memory)[: base.nbytes]
        host = [out if n == 0 and out is not None else None if y is None else self.back(y) for n, y in enumerate(parts)]
        return cupyflash.AttentionResult(*host) if isinstance(result, tuple) else host[0]


@pytest.fixture(autouse=True, params=["cupy", "torch"])
def on_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`cupyflash.attention` computes on the GPU for the length of a test."""
    if request.param == "torch":
        pytest.importorskip("torch")
    move = Move(request.param)

    @functools.wraps(host_attention)
    def attention(*arrays: Any, **options: Any) -> Any:
        return move.attention(*arrays, **options)

    monkeypatch.setattr(cupyflash, "attention", attention)
    return attention
