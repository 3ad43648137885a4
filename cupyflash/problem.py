"""One attention, stated and checked: every shape rule, every dtype rule of an argument and every message about them lives here.

Pure: it reads the shape, strides, dtype and address of views and never an element, so it decides the same for any library and any
device, and is tested without one. Formulas use Sq, Sk, Hq, Hkv, D, Dv as everywhere in cupyflash.
"""

from __future__ import annotations

import math
import numbers
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from cupyflash.errors import ArgumentError, DtypeError, ShapeError

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
QUANTISED = {"float8_e4m3fn": 1, "int8": 1}  # what a cache may be besides
_BYTES = ITEMSIZE | QUANTISED
Layout = Literal["bshd", "bhsd", "sbhd"]
Causal = bool | Literal["bottom_right", "top_left"]
Window = tuple[int | None, int | None]

# Where each layout keeps batch, sequence, heads and head_dim; a 3-D array is one batch and has no b.
_AXES = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3), "sbhd": (1, 0, 2, 3)}
_AXES_3D = {"bshd": (0, 1, 2), "bhsd": (1, 0, 2), "sbhd": (0, 1, 2)}


class Shaped(Protocol):
    """What this module reads of an array view; strides count elements."""

    @property
    def ptr(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    def _replace(self: V, *, shape: tuple[int, ...] = ..., strides: tuple[int, ...] = ...) -> V: ...


V = TypeVar("V", bound=Shaped)


class AttentionProblem(NamedTuple):
    """All that decides how one attention is computed: hashable, the key of the plan's cache.

    Lengths kept in device memory (`seqused_q`, `seqused_k`) appear only as "given"; seqlen_q and seqlen_k are their maximum.
    `causal=True` is `window_right=0`; a window that can hide nothing is None, so equal attentions are equal problems.

    `packed`: the sequences lie one behind the other in one batch entry. `batch` counts them, seqlen_q and seqlen_k count the tokens of
    all; how long each is stands in device memory (`cu_seqlens_q`, `cu_seqlens_k`).
    """

    dtype: str
    out_dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    softmax_scale: float
    softcap: float | None = None
    window_left: int | None = None  # keys before the diagonal that stay visible; None: all
    window_right: int | None = None  # keys after it
    top_left: bool = False  # the diagonal is j = i; else j = i + used_k - used_q
    alibi: bool = False
    bias: str | None = None  # dtype
    mask: bool = False
    sink: str | None = None  # dtype
    seqused_q: bool = False
    seqused_k: bool = False
    write_lse: bool = False
    aligned16: bool = True  # every row of q, k, v and out starts at a multiple of 16 bytes
    tensor_maps: bool = True  # tensor maps (TMA) can describe q, k, v and out
    packed: bool = False
    longest_q: int | None = None  # of packed sequences, as the caller says: a hint, never more than seqlen_q
    longest_k: int | None = None

    @property
    def lse_dtype(self) -> str:
        """float32, but float64 for float64 attention: a float32 LSE would cap its gradients at seven digits."""
        return _lse_dtype(self.dtype)


def _lse_dtype(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


class Operands(NamedTuple):
    """The views of one call in the axis order of the kernels: q, k, v, out (B, S, H, D); bias and mask (B, Hq, Sq, Sk) and
    alibi_slopes (B, Hq) with stride 0 on broadcast axes; sink (Hq,); seqused_* (B,). Packed: q, k, v, out (1, T, H, D) with a batch
    stride of 0, and cu_seqlens_* (B + 1,)."""

    q: Any
    k: Any
    v: Any
    out: Any = None
    bias: Any = None
    mask: Any = None
    alibi_slopes: Any = None
    sink: Any = None
    seqused_q: Any = None
    seqused_k: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None


MAX_PARTS = 32  # that one launch merges: its argument has an address and strides of each


class MergeProblem(NamedTuple):
    """All that decides how partial results are merged; hashable as AttentionProblem."""

    dtype: str
    parts: int
    batch: int
    seqlen: int
    num_heads: int
    head_dim_v: int
    aligned16: bool  # every row of outs and out starts at a multiple of 16 bytes, and none ends inside 16

    @property
    def lse_dtype(self) -> str:
        return _lse_dtype(self.dtype)

    @property
    def chunks(self) -> int:
        """Pieces of 16 bytes that a row has, the last of which may be cut off; a row without elements has one, for its LSE."""
        return max(-(-self.head_dim_v * ITEMSIZE[self.dtype] // 16), 1)


class MergeOperands(NamedTuple):
    """outs and out (B, S, H, Dv), lses and lse (B, H, S), of any strides; where the arrays have no B, that of the batch is 0."""

    outs: tuple[Any, ...]
    lses: tuple[Any, ...]
    out: Any = None
    lse: Any = None


class BackwardProblem(NamedTuple):
    """All that decides how the gradients of one attention are computed; hashable as AttentionProblem."""

    forward: AttentionProblem  # out_dtype is that of out and dout; aligned16 counts them and dq, dk, dv
    wrt: tuple[str, ...]  # which gradients: names of DIFFERENTIABLE that are arguments of the call, in its order
    dlse: bool = False  # a gradient arrives through the LSE
    deterministic: bool = False
    bias_shape: tuple[int, ...] = ()  # of dbias, with four axes: 1 where it is summed
    slopes_batch: int = 1  # of dalibi_slopes: 1 where one slope serves all batches


class BackwardOperands(NamedTuple):
    """What a backward call has beside the Operands of its forward call: dout (B, Sq, Hq, Dv), of any strides; lse and dlse (B, Hq, Sq);
    gradients in the axis order of what they belong to, dbias (B, Hq, Sq, Sk) and dalibi_slopes (B, Hq) with size 1 on summed axes.
    Packed: dout (1, Tq, Hq, Dv), lse and dlse (1, Hq, Tq)."""

    dout: Any
    lse: Any
    dlse: Any = None
    dq: Any = None
    dk: Any = None
    dv: Any = None
    dbias: Any = None
    dalibi_slopes: Any = None
    dsink: Any = None


class CacheProblem(NamedTuple):
    """All that decides how attention over a cache is computed; hashable as AttentionProblem."""

    attention: AttentionProblem  # seqlen_k counts the slots that a sequence may have, also where the rows of all are packed
    cache_dtype: str  # that of q, or one of QUANTISED
    page_size: int | None  # None: the slots of a sequence are one entry of the cache
    seqlen_new: int = 0  # tokens that are appended to each sequence; packed: to all
    rotary_dim: int = 0  # how many of the head_dim are rotated
    rotary_interleaved: bool = False
    rotary: str | None = None  # dtype of the tables
    batch_idx: bool = False
    leftpad: bool = False
    cu_seqlens_k: bool = False  # lengths are given as offsets
    k_descale: float = 1.0  # of all heads, where no array says it
    v_descale: float = 1.0
    num_splits: int | None = None
    split_size: int | None = None
    values_in_keys: bool = False  # V is the first columns of K, the same memory


class CacheOperands(NamedTuple):
    """What a call with a cache has beside its Operands, of which k and v are the cache (pages, page_size, Hkv, D), one page a sequence if
    it is not paged: k_new and v_new (B, Sn, Hkv, D), packed (1, Tq, Hkv, D); page_table (B, max_pages); cache_seqlens, cache_batch_idx,
    cache_leftpad and rotary_positions (B,); rotary_cos and rotary_sin (positions, rotary_dim / 2); k_descale and v_descale (B, Hkv).
    `cached` is given the latter as numbers, too, and puts these into the problem."""

    cache_seqlens: Any = None
    k_new: Any = None
    v_new: Any = None
    page_table: Any = None
    cache_batch_idx: Any = None
    cache_leftpad: Any = None
    rotary_cos: Any = None
    rotary_sin: Any = None
    rotary_positions: Any = None
    k_descale: Any = None
    v_descale: Any = None


DIFFERENTIABLE = ("q", "k", "v", "bias", "alibi_slopes", "sink")


def dense(
    arrays: Operands,
    *,
    layout: str = "bshd",
    causal: Causal = False,
    window_size: Window | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    out_dtype: str | None = None,
    return_lse: bool = False,
) -> tuple[AttentionProblem, Operands]:
    """Check the arguments of `attention` against each other; return the problem and its operands in the kernels' axis order."""
    _check_dtypes(arrays, out_dtype)
    if layout not in _AXES:
        raise ArgumentError(f"layout={layout!r} is unknown: it is one of {', '.join(map(repr, _AXES))}")
    return _state(arrays, layout, None, causal, window_size, softmax_scale, softcap, out_dtype, return_lse)


def varlen(
    arrays: Operands,
    *,
    causal: Causal = False,
    window_size: Window | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    out_dtype: str | None = None,
    return_lse: bool = False,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> tuple[AttentionProblem, Operands]:
    """The same for `attention_varlen`, whose q, k, v and out are (T, H, D). The operands have both cu_seqlens, also where k's were q's."""
    _check_dtypes(arrays, out_dtype)
    for name in ("q", "k", "v", "out"):
        view = getattr(arrays, name)
        if view is not None and len(view.shape) != 3:
            raise ShapeError(
                f"{name} has shape {view.shape}: packed sequences have 3 axes, (T, H, D), with one sequence behind the other; "
                "`attention` takes 4, one batch entry a sequence"
            )
    cu_seqlens_q, cu_seqlens_k = arrays.cu_seqlens_q, arrays.cu_seqlens_k
    for name, view in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if view is not None:
            _sequences(name, view)
    if cu_seqlens_k is None:
        cu_seqlens_k, rows, keys = cu_seqlens_q, arrays.q.shape[0], arrays.k.shape[0]
        if rows != keys:
            raise ShapeError(f"k has {keys} tokens and q has {rows}: without cu_seqlens_k the sequences of q are those of k, so pass it")
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise ShapeError(f"cu_seqlens_k has shape {cu_seqlens_k.shape} and cu_seqlens_q {cu_seqlens_q.shape}: both must be (B + 1,)")
    sequences = cu_seqlens_q.shape[0] - 1
    problem, operands = _state(arrays, "bshd", sequences, causal, window_size, softmax_scale, softcap, out_dtype, return_lse)
    problem = problem._replace(
        packed=True,
        longest_q=_length_hint("max_seqlen_q", max_seqlen_q, problem.seqlen_q),
        longest_k=_length_hint("max_seqlen_k", max_seqlen_k, problem.seqlen_k),
    )
    operands = operands._replace(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    return _of_no_sequence(problem, operands) if sequences == 0 else (problem, operands)


def _of_no_sequence(problem: AttentionProblem, operands: Operands) -> tuple[AttentionProblem, Operands]:
    """Of packed tokens: there is no sequence to have slopes or lengths, and nothing may be read of arrays that may be empty."""
    return (
        problem._replace(alibi=False, seqused_q=False, seqused_k=False),
        operands._replace(alibi_slopes=None, seqused_q=None, seqused_k=None),
    )


def _state(
    arrays: Operands,
    layout: str,
    sequences: int | None,  # packed: how many; else each batch entry is one
    causal: Any = False,
    window_size: Any = None,
    softmax_scale: Any = None,
    softcap: Any = None,
    out_dtype: str | None = None,
    return_lse: bool = False,
) -> tuple[AttentionProblem, Operands]:
    """What dense and packed calls have in common."""
    q, k, v = (to_bshd(view, name, layout, arrays.q) for name, view in (("q", arrays.q), ("k", arrays.k), ("v", arrays.v)))
    batch, seqlen_q, num_heads_q, head_dim = q.shape
    seqlen_k, num_heads_kv, head_dim_v = k.shape[1], k.shape[2], v.shape[3]
    _equal("k", "q", batch=(k.shape[0], batch), head_dim=(k.shape[3], head_dim))
    _equal("v", "k", batch=(v.shape[0], batch), seqlen=(v.shape[1], seqlen_k), heads=(v.shape[2], num_heads_kv))
    if head_dim == 0 or head_dim_v == 0:
        raise ShapeError(f"{'q' if head_dim == 0 else 'v'} has head_dim 0: it must be at least 1")
    _check_groups("k", num_heads_kv, num_heads_q)

    out = arrays.out
    if out is not None:
        out = to_bshd(out, "out", layout, arrays.q)
        _equal("out", "the result", **_axes(out.shape, (batch, seqlen_q, num_heads_q, head_dim_v)))
    if sequences is not None:
        batch = sequences
    left, right, top_left = _window(causal, window_size, seqlen_q, seqlen_k)
    # A result that is still to be made is compact.
    aligned16 = _aligned16(q, k, v) and (_aligned16(out) if out is not None else head_dim_v * ITEMSIZE[out_dtype or q.dtype] % 16 == 0)
    problem = AttentionProblem(
        dtype=q.dtype,
        out_dtype=out_dtype or q.dtype,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads_q=num_heads_q,
        num_heads_kv=num_heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        softmax_scale=1 / math.sqrt(head_dim) if softmax_scale is None else _real("softmax_scale", softmax_scale),
        softcap=None if softcap is None else _positive("softcap", softcap),
        window_left=left,
        window_right=right,
        top_left=top_left,
        alibi=arrays.alibi_slopes is not None,
        bias=arrays.bias.dtype if arrays.bias is not None else None,
        mask=arrays.mask is not None,
        sink=arrays.sink.dtype if arrays.sink is not None else None,
        seqused_q=arrays.seqused_q is not None,
        seqused_k=arrays.seqused_k is not None,
        write_lse=return_lse,
        tensor_maps=aligned16 and all(_mappable(view) for view in (q, k, v, out) if view is not None),
        aligned16=aligned16,
    )
    scores = (batch, num_heads_q, seqlen_q, seqlen_k)
    operands = Operands(
        q,
        k,
        v,
        out,
        bias=_broadcast("bias", arrays.bias, scores),
        mask=_broadcast("mask", arrays.mask, scores),
        alibi_slopes=_vector("alibi_slopes", arrays.alibi_slopes, (num_heads_q,), (batch, num_heads_q), names="(Hq,) or (B, Hq)"),
        sink=_vector("sink", arrays.sink, (num_heads_q,), names="(Hq,)"),
        seqused_q=_vector("seqused_q", arrays.seqused_q, (batch,), names="(B,)"),
        seqused_k=_vector("seqused_k", arrays.seqused_k, (batch,), names="(B,)"),
    )
    return problem, operands


def cached(
    arrays: Operands,
    more: CacheOperands,
    *,
    kv_layout: str = "nhd",
    rotary_interleaved: Any = False,
    num_splits: Any = None,
    split_size: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    out_dtype: str | None = None,
    same_start: bool = False,
    **options: Any,
) -> tuple[CacheProblem, Operands, CacheOperands]:
    """The same for `attention_with_kvcache`, which has cache_seqlens, and for `attention_varlen` with a page_table, which has not; more
    `options` are those of `dense`. `same_start`: k and v have one address, which views have not."""
    k_name, v_name = ("k", "v") if more.cache_seqlens is None else ("k_cache", "v_cache")
    q, packed = arrays.q, arrays.cu_seqlens_q is not None
    _check_dtypes(arrays._replace(k=q, v=q), out_dtype)
    _check_cache_dtypes(k_name, v_name, arrays, more)
    if kv_layout not in ("nhd", "hnd"):
        raise ArgumentError(f"kv_layout={kv_layout!r} is unknown: it is 'nhd' or 'hnd'")
    if len(q.shape) != (3 if packed else 4):
        rule = "3 axes, (Tq, Hq, D), with cu_seqlens_q" if packed else "4 axes, (B, Sq, Hq, D), or 3 with cu_seqlens_q, which says where"
        raise ShapeError(f"q has shape {q.shape}: it must have {rule}{'' if packed else ' each sequence begins'}")
    batch, tokens, num_heads_q, head_dim = (_sequences("cu_seqlens_q", arrays.cu_seqlens_q), *q.shape) if packed else q.shape
    k, v = (_as_pages(name, view, kv_layout) for name, view in ((k_name, arrays.k), (v_name, arrays.v)))
    num_pages, page_size, num_heads_kv, _ = k.shape
    _equal(k_name, "q", head_dim=(k.shape[3], head_dim))
    _equal(v_name, k_name, **{"number of entries": (v.shape[0], num_pages), "page_size": (v.shape[1], page_size)})
    _equal(v_name, k_name, heads=(v.shape[2], num_heads_kv))
    _check_groups(k_name, num_heads_kv, num_heads_q)
    if arrays.cu_seqlens_k is not None and arrays.cu_seqlens_k.shape != (batch + 1,):
        raise ShapeError(f"cu_seqlens_k has shape {arrays.cu_seqlens_k.shape}: it must have shape (B + 1,) = ({batch + 1},)")
    table = more.page_table
    if table is not None and (len(table.shape) != 2 or table.shape[0] != batch):
        raise ShapeError(f"page_table has shape {table.shape}: it must be (B, max_pages) = ({batch}, max_pages)")
    for name in ("page_table", "rotary_cos", "rotary_sin"):
        _check_last_axis(name, getattr(more, name))
    if table is not None and more.cache_batch_idx is not None:
        raise ArgumentError("cache_batch_idx= and page_table= were given: the rows of a page_table say whose pages are whose already")
    if table is None and more.cache_batch_idx is None and num_pages != batch:
        raise ShapeError(
            f"{k_name} has batch {num_pages} and q has {batch}: they must be equal, or cache_batch_idx= say which entry is whose, or "
            "page_table= which page is"
        )
    slots = page_size if table is None else page_size * table.shape[1]

    def of_each_sequence(view: V) -> V:  # the shape that it would have without pages; its places are in the pages alone
        shape = (slots, *view.shape[2:]) if packed else (batch, slots, *view.shape[2:])
        return view._replace(shape=shape, strides=(*[0] * (len(shape) - 1), 1))

    seen = arrays._replace(k=of_each_sequence(k), v=of_each_sequence(v))
    problem, operands = _state(seen, "bshd", batch if packed else None, out_dtype=out_dtype, **options)
    rotary_dim = _rotary_dim(more, head_dim)
    aligned16 = problem.aligned16 and _aligned16(k, v)
    problem = problem._replace(
        aligned16=aligned16,
        # Turned queries are compact.
        tensor_maps=problem.tensor_maps and aligned16 and _mappable(k) and _mappable(v) and not (rotary_dim and head_dim % 8),
        packed=packed,
    )
    if packed:
        problem = problem._replace(
            longest_q=_length_hint("max_seqlen_q", max_seqlen_q, tokens), longest_k=_length_hint("max_seqlen_k", max_seqlen_k, slots)
        )
    elif max_seqlen_q is not None:
        raise ArgumentError("max_seqlen_q= was given without cu_seqlens_q=: the shape of q says it")
    operands = operands._replace(k=k, v=v, cu_seqlens_q=arrays.cu_seqlens_q, cu_seqlens_k=arrays.cu_seqlens_k)
    if packed and batch == 0:
        problem, operands = _of_no_sequence(problem, operands)
    k_new, v_new = _new_tokens(more, problem, num_heads_kv)
    descales = {name: getattr(more, name) for name in ("k_descale", "v_descale")}
    descale_of_all = {name: _float32(name, x) for name, x in descales.items() if isinstance(x, numbers.Real)}
    shapes = (), (num_heads_kv,), (batch, num_heads_kv)
    more = more._replace(
        k_new=k_new,
        v_new=v_new,
        **{n: _vector(n, getattr(more, n), (batch,), names="(B,)") for n in _LENGTHS},
        **{n: None if n in descale_of_all else _vector(n, x, *shapes, names="(), (Hkv,) or (B, Hkv)") for n, x in descales.items()},
    )
    if num_splits is not None and split_size is not None:
        raise ArgumentError("num_splits= and split_size= were given: both say where keys are split, so give one")
    stated = CacheProblem(
        attention=problem,
        cache_dtype=k.dtype,
        page_size=None if table is None else page_size,
        seqlen_new=0 if k_new is None else k_new.shape[1],
        rotary_dim=rotary_dim,
        rotary_interleaved=_flag("rotary_interleaved", rotary_interleaved),
        rotary=None if more.rotary_cos is None else more.rotary_cos.dtype,
        batch_idx=more.cache_batch_idx is not None,
        leftpad=more.cache_leftpad is not None,
        cu_seqlens_k=arrays.cu_seqlens_k is not None,
        **descale_of_all,
        num_splits=_count("num_splits", num_splits),
        split_size=_count("split_size", split_size),
        values_in_keys=same_start and k.strides == v.strides and v.shape[3] <= k.shape[3],
    )
    return stated, operands, more


_LENGTHS = ("cache_seqlens", "cache_batch_idx", "cache_leftpad", "rotary_positions")


def _check_cache_dtypes(k_name: str, v_name: str, arrays: Operands, more: CacheOperands) -> None:
    q, k = arrays.q.dtype, arrays.k.dtype
    if k != q and k not in QUANTISED:
        raise DtypeError(f"{k_name} is {k} and q is {q}: a cache must be of q's dtype, or {' or '.join(QUANTISED)}")
    if arrays.v.dtype != k:
        raise DtypeError(f"{v_name} is {arrays.v.dtype} and {k_name} is {k}: both must have one dtype")
    if k not in QUANTISED and (more.k_descale is not None or more.v_descale is not None):
        name = "k_descale" if more.k_descale is not None else "v_descale"
        raise ArgumentError(f"{name}= was given and {k_name} is {k}: scales are for caches of {' or '.join(QUANTISED)}")
    allowed: dict[str, tuple[str, ...]] = dict.fromkeys(("page_table", *_LENGTHS), ("int32",))
    allowed |= dict.fromkeys(("k_descale", "v_descale"), ("float32",)) | dict.fromkeys(("k_new", "v_new"), (q,))
    allowed |= dict.fromkeys(("rotary_cos", "rotary_sin"), (q, "float32"))
    for name, dtypes in allowed.items():
        view = getattr(more, name)
        if view is not None and not isinstance(view, numbers.Real) and view.dtype not in dtypes:
            raise DtypeError(f"{name} is {view.dtype}: it must be {' or '.join(dict.fromkeys(dtypes))}")


def _as_pages(name: str, view: V, kv_layout: str) -> V:
    """A cache as (pages, page_size, Hkv, D), as a change of strides."""
    if len(view.shape) != 4:
        order = "(B, Sc, Hkv, D) or (pages, page_size, Hkv, D)" if kv_layout == "nhd" else "(B, Hkv, Sc, D) or (pages, Hkv, page_size, D)"
        raise ShapeError(f"{name} has shape {view.shape}: it must be {order} with kv_layout={kv_layout!r}")
    return to_bshd(view, name, "bshd" if kv_layout == "nhd" else "bhsd", view)


def _new_tokens(more: CacheOperands, p: AttentionProblem, num_heads_kv: int) -> tuple[Any, Any]:
    """k_new and v_new as (B, Sn, Hkv, D), packed (1, Tq, Hkv, D)."""
    given = {"k_new": more.k_new, "v_new": more.v_new}
    if None in given.values():
        missing = [name for name, view in given.items() if view is None]
        if len(missing) == 1:
            raise ArgumentError(f"{missing[0]} is None and the other of k_new and v_new is not: a token is appended to both caches")
        return None, None
    found = []
    tokens = p.seqlen_q if p.packed else more.k_new.shape[1] if len(more.k_new.shape) == 4 else 0
    for (name, view), dim in zip(given.items(), (p.head_dim, p.head_dim_v), strict=True):
        shape = (tokens, num_heads_kv, dim) if p.packed else (p.batch, tokens, num_heads_kv, dim)
        if view.shape != shape:
            rule = "(Tq, Hkv, D), as cu_seqlens_q says, " if p.packed else "(B, Sn, Hkv, D)"
            raise ShapeError(f"{name} has shape {view.shape}: it must be {rule} = {shape}")
        found.append(to_bshd(view, name, "bshd", view))
    return found[0], found[1]


def _rotary_dim(more: CacheOperands, head_dim: int) -> int:
    cos, sin = more.rotary_cos, more.rotary_sin
    if cos is None or sin is None:
        given = [name for name in ("rotary_cos", "rotary_sin", "rotary_positions") if getattr(more, name) is not None]
        if given:
            raise ArgumentError(f"{given[0]}= was given without {'rotary_sin' if cos is not None else 'rotary_cos'}=")
        return 0
    if len(cos.shape) != 2 or cos.shape[0] == 0 or not 0 < 2 * cos.shape[1] <= head_dim:
        raise ShapeError(f"rotary_cos has shape {cos.shape}: it must be (positions, rotary_dim / 2), of at most head_dim = {head_dim}")
    if sin.shape != cos.shape or sin.dtype != cos.dtype:
        raise ShapeError(f"rotary_sin is {sin.dtype} of shape {sin.shape} and rotary_cos {cos.dtype} of {cos.shape}: they must be alike")
    return int(2 * cos.shape[1])


def dense_backward(
    arrays: Operands,
    more: BackwardOperands,
    *,
    layout: str = "bshd",
    wrt: Any = DIFFERENTIABLE[:3],
    deterministic: Any = False,
    **options: Any,
) -> tuple[BackwardProblem, Operands, BackwardOperands]:
    """Check the arguments of `attention_backward` against each other, as `dense` or, with cu_seqlens_q, `varlen` does those of the forward
    call, whose options these are; dq, dk and dv may be absent."""
    names = differentiated(wrt)
    deterministic = _flag("deterministic", deterministic)
    out = arrays.out
    if out.dtype not in ITEMSIZE:
        raise DtypeError(f"out is {out.dtype}: it must be what `attention` returned, of {', '.join(ITEMSIZE)}")
    if arrays.cu_seqlens_q is None:
        problem, operands = dense(arrays, layout=layout, out_dtype=out.dtype, **options)
    else:
        problem, operands = varlen(arrays, out_dtype=out.dtype, **options)
    if more.dout.dtype != out.dtype:
        raise DtypeError(f"dout is {more.dout.dtype} and out is {out.dtype}: both must have one dtype")
    dout = to_bshd(more.dout, "dout", layout, arrays.q, dense_last=False)
    _equal("dout", "out", **_axes(dout.shape, operands.out.shape))
    lse = _vector_of_rows("lse", more.lse, problem, arrays.q)
    dlse = None if more.dlse is None else _vector_of_rows("dlse", more.dlse, problem, arrays.q)
    results = {}
    for name in ("q", "k", "v"):
        result = getattr(more, f"d{name}")
        if result is None:
            continue
        if name not in names:
            raise ArgumentError(f"d{name}= was given and wrt={wrt!r} does not ask for it: add {name!r}")
        if result.dtype != problem.dtype:
            raise DtypeError(f"d{name} is {result.dtype}: it must be the dtype of {name}, {problem.dtype}")
        result = to_bshd(result, f"d{name}", layout, arrays.q)
        _equal(f"d{name}", name, **_axes(result.shape, getattr(operands, name).shape))
        results[f"d{name}"] = result
    aligned16 = problem.aligned16 and dout.strides[-1] == 1 and _aligned16(dout, *results.values())
    used = tuple(name for name in DIFFERENTIABLE if name in names and getattr(arrays, name) is not None)
    asked = BackwardProblem(
        forward=problem._replace(
            aligned16=aligned16, tensor_maps=problem.tensor_maps and dout.strides[-1] == 1 and _aligned16(dout) and _mappable(dout)
        ),
        wrt=used,
        dlse=dlse is not None,
        deterministic=deterministic,
        bias_shape=(1,) * (4 - len(arrays.bias.shape)) + arrays.bias.shape if "bias" in used else (),
        slopes_batch=problem.batch if "alibi_slopes" in used and len(arrays.alibi_slopes.shape) == 2 else 1,
    )
    return asked, operands, BackwardOperands(dout, lse, dlse, **results)


def merging(arrays: MergeOperands) -> tuple[MergeProblem, MergeOperands]:
    """Check the arguments of `merge_states` against each other; out and lse may be absent."""
    first = arrays.outs[0]
    if len(first.shape) not in (3, 4) or first.dtype not in ITEMSIZE:
        raise ShapeError(
            f"outs[0] is {first.dtype} of shape {first.shape}: it must be (B, S, H, Dv) or (S, H, Dv), of {', '.join(ITEMSIZE)}"
        )
    lse_shape = (*first.shape[:-3], first.shape[-2], first.shape[-3])
    for name, view, shape, dtype in (
        *((f"outs[{n}]", view, first.shape, first.dtype) for n, view in enumerate(arrays.outs)),
        ("out", arrays.out, first.shape, first.dtype),
        *((f"lses[{n}]", view, lse_shape, _lse_dtype(first.dtype)) for n, view in enumerate(arrays.lses)),
        ("lse_out", arrays.lse, lse_shape, _lse_dtype(first.dtype)),
    ):
        if view is not None and view.shape != shape:
            raise ShapeError(f"{name} has shape {view.shape}: it must be {shape}, to go with outs[0] of shape {first.shape}")
        if view is not None and view.dtype != dtype:
            raise DtypeError(f"{name} is {view.dtype}: it must be {dtype}, to go with outs[0] of {first.dtype}")
    outs = tuple([to_axes(view, 4) for view in arrays.outs])
    lses = tuple([to_axes(view, 3) for view in arrays.lses])
    out = None if arrays.out is None else to_axes(arrays.out, 4)
    lse = None if arrays.lse is None else to_axes(arrays.lse, 3)
    rows = [*outs] if out is None else [*outs, out]
    whole = first.shape[-1] > 0 and first.shape[-1] * ITEMSIZE[first.dtype] % 16 == 0
    aligned16 = whole and all(view.strides[-1] == 1 for view in rows) and _aligned16(*rows)
    batch, seqlen, num_heads, head_dim_v = outs[0].shape
    problem = MergeProblem(first.dtype, len(outs), batch, seqlen, num_heads, head_dim_v, aligned16)
    return problem, MergeOperands(outs, lses, out, lse)


def to_axes(view: V, ndim: int) -> V:
    """`view` with as many axes, by leading ones of size 1 and stride 0."""
    missing = ndim - len(view.shape)
    return view._replace(shape=(1,) * missing + view.shape, strides=(0,) * missing + view.strides)


def gradient_axes(name: str, view: V, layout: str, q: Shaped) -> V:
    """A gradient, in the shape of what it belongs to, as BackwardOperands has it."""
    if name in ("dq", "dk", "dv"):
        return to_bshd(view, name, layout, q)
    return to_axes(view, {"dbias": 4, "dalibi_slopes": 2, "dsink": 1}[name])


def differentiated(wrt: Any) -> tuple[str, ...]:
    """`wrt` as a tuple, checked."""
    names = tuple(wrt) if isinstance(wrt, tuple | list) else (None,)
    if not all(name in DIFFERENTIABLE for name in names):
        raise ArgumentError(f"wrt={wrt!r} must be a tuple of names out of {', '.join(map(repr, DIFFERENTIABLE))}")
    return names


def packs_heads(p: AttentionProblem) -> bool:
    """Whether `pack_heads` has something to do: only where no option tells the rows apart."""
    told_apart = p.alibi or p.bias or p.mask or p.sink or p.seqused_q or p.window_left is not None or p.window_right is not None
    return p.seqlen_q == 1 and p.num_heads_q > p.num_heads_kv > 0 and not told_apart and not p.packed


def pack_heads(p: AttentionProblem, a: Operands) -> tuple[AttentionProblem, Operands]:
    """One query token of grouped heads as attention of `group` query rows of each key head: the same numbers in the same places, read as
    (B, group, Hkv, D), so that a tile reads a key head once and not once a query head."""
    group = p.num_heads_q // max(p.num_heads_kv, 1)
    if not packs_heads(p):
        return p, a

    def rows(view: V) -> V:
        batch, _, _, dim = view.shape
        stride_batch, _, stride_head, stride_dim = view.strides
        return view._replace(
            shape=(batch, group, p.num_heads_kv, dim), strides=(stride_batch, stride_head, group * stride_head, stride_dim)
        )

    return p._replace(seqlen_q=group, num_heads_q=p.num_heads_kv), a._replace(q=rows(a.q), out=rows(a.out))


def _check_dtypes(arrays: Operands, out_dtype: str | None) -> None:
    q = arrays.q.dtype
    for name in ("q", "k", "v"):
        dtype = getattr(arrays, name).dtype
        if dtype not in ITEMSIZE:
            raise DtypeError(f"{name} is {dtype}: it must be one of {', '.join(ITEMSIZE)}")
        if dtype != q:
            raise DtypeError(f"{name} is {dtype} and q is {q}: q, k and v must have one dtype")
    if out_dtype is not None and out_dtype not in ITEMSIZE:
        raise DtypeError(f"out_dtype is {out_dtype}: it must be one of {', '.join(ITEMSIZE)}")
    if arrays.out is not None and arrays.out.dtype != (out_dtype or q):
        asked = f"out_dtype={out_dtype!r}" if out_dtype else f"the dtype of q, {q}; out_dtype={arrays.out.dtype!r} asks for out's own"
        raise DtypeError(f"out is {arrays.out.dtype}: it must be {asked}")
    if arrays.mask is not None and arrays.mask.dtype != "bool":
        raise DtypeError(f"mask is {arrays.mask.dtype}: it must be bool, True where a query may attend; for numbers to add use bias=")
    allowed = {
        "bias": (q, "float32"),
        "alibi_slopes": ("float32",),
        "sink": (q, "float32"),
        "seqused_q": ("int32",),
        "seqused_k": ("int32",),
        "cu_seqlens_q": ("int32",),
        "cu_seqlens_k": ("int32",),
    }
    for name, dtypes in allowed.items():
        view = getattr(arrays, name)
        if view is not None and view.dtype not in dtypes:
            hint = "; for True/False use mask=" if name == "bias" and view.dtype == "bool" else ""
            raise DtypeError(f"{name} is {view.dtype}: it must be {' or '.join(dict.fromkeys(dtypes))}{hint}")


def to_bshd(view: V, name: str, layout: str, q: Shaped, *, dense_last: bool = True) -> V:
    """`view` with its axes in the order (B, S, H, D), as a change of strides; `q` is the view whose number of axes it must have."""
    ndim = len(view.shape)
    if ndim not in (3, 4):
        raise ShapeError(f"{name} has shape {view.shape}: it must have 4 axes in the order {layout!r}, or 3 for a single batch")
    if ndim != len(q.shape):
        raise ShapeError(f"{name} has {ndim} axes and q has {len(q.shape)}: both must have 4, or both 3 for a single batch")
    if dense_last:
        _check_last_axis(name, view)
    if ndim == 3:
        axes = _AXES_3D[layout]
        return view._replace(shape=(1, *(view.shape[a] for a in axes)), strides=(0, *(view.strides[a] for a in axes)))
    axes4 = _AXES[layout]
    return view._replace(shape=tuple(view.shape[a] for a in axes4), strides=tuple(view.strides[a] for a in axes4))


def _check_last_axis(name: str, view: Shaped | None) -> None:
    if view is not None and view.shape and view.strides[-1] != 1 and view.shape[-1] > 1 and 0 not in view.shape:
        raise ShapeError(
            f"{name} has stride {view.strides[-1]} on its last axis: it must be 1, and cupyflash never copies an input by itself; "
            f"pass {name}.copy() ({name}.contiguous() in torch)"
        )


def _sequences(name: str, offsets: Shaped) -> int:
    """How many sequences cu_seqlens_q or cu_seqlens_k speaks of."""
    if len(offsets.shape) != 1 or offsets.shape[0] == 0:
        raise ShapeError(f"{name} has shape {offsets.shape}: it must be (B + 1,), where each sequence begins and where the last ends")
    return offsets.shape[0] - 1


def _check_groups(name: str, num_heads_kv: int, num_heads_q: int) -> None:
    if num_heads_q != 0 and (num_heads_kv == 0 or num_heads_q % num_heads_kv):
        raise ShapeError(f"{name} has {num_heads_kv} heads and q has {num_heads_q}: num_heads_q must be a multiple of num_heads_kv")


def _equal(name: str, other: str, **axes: tuple[int, int]) -> None:
    for axis, (has, needs) in axes.items():
        if has != needs:
            words = (f"{has} heads", f"{needs}") if axis == "heads" else (f"{axis} {has}", f"{needs}")
            raise ShapeError(f"{name} has {words[0]} and {other} has {words[1]}: they must be equal")


def _axes(has: tuple[int, ...], needs: tuple[int, ...]) -> dict[str, tuple[int, int]]:
    """What `_equal` compares of two shapes (B, S, H, D)."""
    return dict(zip(("batch", "seqlen", "heads", "head_dim"), zip(has, needs, strict=True), strict=True))


def _broadcast(name: str, view: Any, scores: tuple[int, int, int, int]) -> Any:
    """A view of shape (B, Hq, Sq, Sk): an axis that the array lacks, or has with size 1, gets stride 0."""
    if view is None:
        return None
    missing = 4 - len(view.shape)
    shape = (1,) * missing + view.shape
    if missing < 0 or any(n not in (1, full) for n, full in zip(shape, scores, strict=False)):
        hint = ""
        if view.shape == (scores[0], scores[3]):
            hint = f"; a padding mask of shape (B, Sk) is {name}[:, None, None, :], or better seqused_k=lengths"
        raise ShapeError(f"{name} has shape {view.shape}: it must broadcast to (B, Hq, Sq, Sk) = {scores}{hint}")
    strides = (0,) * missing + view.strides
    return view._replace(shape=scores, strides=tuple(0 if n == 1 else s for n, s in zip(shape, strides, strict=True)))


def _vector(name: str, view: Any, *shapes: tuple[int, ...], names: str) -> Any:
    """A view of the last of `shapes`; the shorter form repeats over the leading axis."""
    if view is None:
        return None
    if view.shape not in shapes:
        raise ShapeError(f"{name} has shape {view.shape}: it must have shape {names} = {' or '.join(map(str, shapes))}")
    return view._replace(shape=shapes[-1], strides=(0,) * (len(shapes[-1]) - len(view.shape)) + view.strides)


def _vector_of_rows(name: str, view: V, p: AttentionProblem, q: Shaped) -> V:
    """lse or dlse as (B, Hq, Sq), in any layout; q without B has them without B. Packed as (1, Hq, Tq)."""
    missing = 4 - len(q.shape)
    shape = (1 if p.packed else p.batch, p.num_heads_q, p.seqlen_q)
    if view.shape != shape[missing:]:
        needed = "(Hq, Tq) = {}" if p.packed else "(Hq, Sq) = {}, in every layout" if missing else "(B, Hq, Sq) = {}, in every layout"
        raise ShapeError(f"{name} has shape {view.shape}: it must have shape {needed.format(shape[missing:])}")
    if view.dtype != p.lse_dtype:
        raise DtypeError(f"{name} is {view.dtype}: it must be {p.lse_dtype}, to go with q of {p.dtype}")
    return view._replace(shape=shape, strides=(0,) * missing + view.strides)


def _window(causal: Any, window_size: Any, seqlen_q: int, seqlen_k: int) -> tuple[int | None, int | None, bool]:
    if not (isinstance(causal, str) or _is_bool(causal)) or (isinstance(causal, str) and causal not in ("bottom_right", "top_left")):
        raise ArgumentError(f"causal={causal!r} is unknown: it is True, False, 'bottom_right' (what True means) or 'top_left'")
    left: int | None = None
    right: int | None = None
    if window_size is not None:
        if isinstance(window_size, numbers.Integral):
            n = int(window_size)
            raise ArgumentError(f"window_size={n} is ambiguous: ({n - 1}, 0) keeps {n} keys with the query's own, ({n}, 0) keeps {n + 1}")
        if not isinstance(window_size, tuple | list) or len(window_size) != 2:
            raise ArgumentError(f"window_size={window_size!r} must be a pair (left, right) of ints; None or -1 means unlimited")
        left, right = (_distance(window_size, n) for n in window_size)
    if causal:
        right = 0 if right is None else min(right, 0)
    # The diagonal runs from key Sk - Sq (or 0) to key Sk - 1 (or Sq - 1) at the furthest, also when seqused_* shorten it.
    if left is not None and left >= max(seqlen_q, seqlen_k):
        left = None
    if right is not None and (right >= seqlen_q + seqlen_k or (seqlen_q == 1 and causal != "top_left")):  # one row ends at the last key
        right = None
    return left, right, causal == "top_left"


def _distance(window_size: Any, n: Any) -> int | None:
    if n is None:
        return None
    if not isinstance(n, numbers.Integral) or _is_bool(n):
        raise ArgumentError(f"window_size={window_size!r} must be a pair (left, right) of ints; None or -1 means unlimited")
    if n < -1:
        raise ShapeError(f"window_size={window_size!r} has a distance below 0: only -1 or None means unlimited")
    return None if n == -1 else int(n)


def _length_hint(name: str, n: Any, tokens: int) -> int | None:
    if n is None:
        return None
    if not isinstance(n, numbers.Integral) or _is_bool(n):
        raise ArgumentError(f"{name} is a {type(n).__name__}: it must be an int, or None; it only helps to choose a kernel")
    if n < 0:
        raise ShapeError(f"{name}={int(n)} must not be below 0")
    return min(int(n), tokens)


def _count(name: str, n: Any) -> int | None:
    if n is None:
        return None
    if not isinstance(n, numbers.Integral) or _is_bool(n):
        raise ArgumentError(f"{name} is a {type(n).__name__}: it must be an int, or None")
    if n < 1:
        raise ShapeError(f"{name}={int(n)} must be at least 1; None leaves the choice to cupyflash")
    return int(n)


def _flag(name: str, x: Any) -> bool:
    if not _is_bool(x):
        raise ArgumentError(f"{name}={x!r} must be True or False")
    return bool(x)


def _is_bool(x: Any) -> bool:
    return isinstance(x, bool) or type(x).__name__ in ("bool", "bool_")


def _real(name: str, x: Any) -> float:
    if not isinstance(x, numbers.Real) or _is_bool(x):
        raise ArgumentError(f"{name} is a {type(x).__name__}: it must be a float")
    value = float(x)
    if not math.isfinite(value):
        raise ShapeError(f"{name}={value} must be finite")
    return value


def _float32(name: str, x: Any) -> float:
    value = _real(name, x)
    if abs(value) >= 2.0**128:
        raise ShapeError(f"{name}={value} must be finite in float32")
    return value


def _positive(name: str, x: Any) -> float:
    value = _real(name, x)
    if value <= 0:
        raise ShapeError(f"{name}={value} must be greater than 0; None means that it is not used")
    return value


def _aligned16(*views: Shaped) -> bool:
    """Whether every row of every view starts at a multiple of 16 bytes, so that kernels may load 16 at a time."""
    return all(
        view.ptr % 16 == 0 and all(s * _BYTES[view.dtype] % 16 == 0 or n == 1 for n, s in zip(view.shape[:-1], view.strides, strict=False))
        for view in views
    )


def _mappable(view: Shaped) -> bool:
    """What cuTensorMapEncodeTiled asks beyond alignment: no axis of size 0, strides from 0 to 2^40 bytes."""
    return all(n > 0 and (n == 1 or 0 <= s * _BYTES[view.dtype] < 1 << 40) for n, s in zip(view.shape, view.strides, strict=True))
