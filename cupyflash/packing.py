"""Arrays of any lengths one behind the other, and apart again: by the caller's own library, where the arrays are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from cupyflash import arrays
from cupyflash.errors import ArgumentError, DtypeError, ShapeError
from cupyflash.keywords import entry


@entry
def pack(sequences: Sequence[Any], /) -> tuple[Any, Any]:
    """Put arrays of any lengths one behind the other, as `attention_varlen` takes them.

    Parameters
    ----------
    sequences : B arrays (len_b, ...), at least one, of one library, device, dtype and shape but for their lengths, which may be 0.

    Returns
    -------
    (packed, cu_seqlens) : packed is (T, ...), T the sum of the lengths, a copy made by the arrays' own library. cu_seqlens is (B + 1,),
        int32, in that library and place: sequence b is ``packed[cu_seqlens[b]:cu_seqlens[b + 1]]``.

    Raises
    ------
    ShapeError, DtypeError, ArgumentError, DeviceError : arrays that do not go together, naming the first such.
    StateError : in the capture of a CUDA graph, since the lengths are copied to the GPU.

    Examples
    --------
    >>> import numpy as np, cupyflash
    >>> packed, cu_seqlens = cupyflash.pack([np.ones((3, 8, 64)), np.ones((0, 8, 64)), np.ones((7, 8, 64))])
    >>> packed.shape, cu_seqlens
    ((10, 8, 64), array([ 0,  3,  3, 10], dtype=int32))
    """
    views = {f"sequences[{n}]": arrays.view(x, f"sequences[{n}]") for n, x in enumerate(sequences)}
    if not views:
        raise ArgumentError("sequences is empty: there must be at least one array, which says of what library, dtype and shape they are")
    arrays.check_together(views)
    like = views["sequences[0]"]
    for name, view in views.items():
        if not view.shape or view.shape[1:] != like.shape[1:]:
            raise ShapeError(
                f"{name} has shape {view.shape} and sequences[0] {like.shape}: all must be (length, ...), equal but for length"
            )
        if view.dtype != like.dtype:
            raise DtypeError(f"{name} is {view.dtype} and sequences[0] is {like.dtype}: all must have one dtype")
    offsets = [0, *itertools.accumulate(view.shape[0] for view in views.values())]
    if offsets[-1] >= 1 << 31:
        raise ShapeError(f"sequences have {offsets[-1]} tokens in all: offsets of int32 end at 2^31 - 1")
    return arrays.concatenate([*views.values()]), arrays.vector(np.array(offsets, np.int32), like, "cu_seqlens")


@entry
def unpack(packed: Any, cu_seqlens: Any, /) -> list[Any]:
    """The sequences of a packed array, as views of it; of a JAX array, which has no views, as copies.

    The offsets are read by the host: of arrays in GPU memory that waits for what is queued before, and cannot be captured.

    Parameters
    ----------
    packed : (T, ...), as `pack` made it, or of `attention_varlen`: an array of any library.
    cu_seqlens : (B + 1,), int32 or int64, not decreasing, within 0 to T; of any library, in any place.

    Returns
    -------
    B arrays ``packed[cu_seqlens[b]:cu_seqlens[b + 1]]``.

    Raises
    ------
    ShapeError : offsets that decrease, or lie outside of the array. DtypeError, ArgumentError : as `attention`.

    Examples
    --------
    >>> import numpy as np, cupyflash
    >>> packed, cu_seqlens = cupyflash.pack([np.zeros(2), np.zeros(0), np.ones(1)])
    >>> cupyflash.unpack(packed, cu_seqlens)
    [array([0., 0.]), array([], dtype=float64), array([1.])]
    """
    whole, view = arrays.view(packed, "packed"), arrays.view(cu_seqlens, "cu_seqlens")
    if not whole.shape:
        raise ShapeError("packed has no axis: it must be (T, ...)")
    if len(view.shape) != 1 or not view.shape[0]:
        raise ShapeError(f"cu_seqlens has shape {view.shape}: it must be (B + 1,), where each sequence begins and where the last ends")
    if view.dtype not in ("int32", "int64"):
        raise DtypeError(f"cu_seqlens is {view.dtype}: it must be int32 or int64")
    offsets: list[int] = view.owner.tolist()
    if offsets != sorted(offsets) or offsets[0] < 0 or offsets[-1] > whole.shape[0]:
        raise ShapeError(f"cu_seqlens holds {offsets}: offsets must not decrease, and lie in 0 to {whole.shape[0]}")
    return [whole.owner[begin:end] for begin, end in itertools.pairwise(offsets)]
