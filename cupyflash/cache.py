"""Calls over a cache, checked, planned and computed, for `api.attention_with_kvcache` and `api.attention_varlen`; and decode plans."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from cupyflash import arrays, plan
from cupyflash.arrays import HOST, ArrayView
from cupyflash.device import HOST_SPEC, named, query
from cupyflash.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from cupyflash.keywords import names_foreign_keywords
from cupyflash.problem import ITEMSIZE, CacheOperands, CacheProblem, Operands, cached, to_bshd


class DecodePlan(NamedTuple):
    """What `plan_decode` makes: a workspace, and what it was made for."""

    batch: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    page_size: int | None
    max_seqlen_k: int
    dtype: str
    device: str
    cuda_graph: bool

    def update(self, cache_seqlens: Any) -> None:
        """Lay the splits out for new lengths, where the arrays are; results are right without, only slower.

        cache_seqlens : (B,), int32, as the next calls will have them. ShapeError, DtypeError or DeviceError where they cannot be those of
        this plan. In host memory there is nothing else to do.
        """
        lengths = arrays.view(cache_seqlens, "cache_seqlens")
        if lengths.shape != (self.batch,):
            raise ShapeError(f"cache_seqlens has shape {lengths.shape}: it must be ({self.batch},), for which the plan was made")
        if lengths.dtype != "int32":
            raise DtypeError(f"cache_seqlens is {lengths.dtype}: it must be int32")
        if lengths.device_id != HOST:
            raise DeviceError(f"cache_seqlens is {arrays.place(lengths)} and the plan was made for device={self.device!r}")


@names_foreign_keywords
def plan_decode(
    *,
    batch: int,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int,
    page_size: int | None = None,
    max_seqlen_k: int,
    dtype: Any,
    device: str,
    cuda_graph: bool = False,
) -> DecodePlan:
    """A plan that many calls of `attention_with_kvcache` share: those of all layers of a model, and of all steps. No call needs one.

    Parameters
    ----------
    batch, num_heads_q, num_heads_kv, head_dim : as the calls will have them.
    page_size : of a paged cache, else None.
    max_seqlen_k : the most slots that a sequence may have: ``max_pages * page_size``, or Sc of a cache that is not paged.
    dtype : q's, a name or a dtype of any library.
    device : "host"; "cuda" and architectures as "sm_90a" are not served yet.
    cuda_graph : whether calls will be captured in a CUDA graph; for a GPU only.

    Returns
    -------
    DecodePlan, for ``plan=``. ``plan.update(cache_seqlens)`` lays work out for new lengths without reading them on the host.

    Raises
    ------
    ShapeError, DtypeError, ArgumentError, DeviceError : sizes that no call can have. UnsupportedError : a device that is not served.

    Examples
    --------
    >>> import numpy as np, cupyflash
    >>> plan = cupyflash.plan_decode(
    ...     batch=2, num_heads_q=8, num_heads_kv=2, head_dim=64, page_size=16, max_seqlen_k=1024, dtype=np.float32, device="host"
    ... )
    >>> plan.update(np.array([900, 17], np.int32))
    >>> plan.num_heads_q, plan.dtype
    (8, 'float32')
    """
    name = arrays.dtype_name(dtype, "dtype")
    if name not in ITEMSIZE:
        raise DtypeError(f"dtype is {name}: it must be q's, one of {', '.join(ITEMSIZE)}")
    sizes = {"batch": batch, "num_heads_q": num_heads_q, "num_heads_kv": num_heads_kv, "head_dim": head_dim, "max_seqlen_k": max_seqlen_k}
    sizes |= {} if page_size is None else {"page_size": page_size}
    for what, size in sizes.items():
        if not isinstance(size, numbers.Integral) or isinstance(size, bool):
            raise ArgumentError(f"{what} is a {type(size).__name__}: it must be an int")
        if size < 1:
            raise ShapeError(f"{what}={size} must be at least 1")
    spec = named(str(device))
    if cuda_graph and spec is HOST_SPEC:
        raise DeviceError("cuda_graph=True was given with device='host': graphs belong to a GPU")
    slots = (batch, max_seqlen_k) if page_size is None else (1, page_size)
    table = None if page_size is None else _contiguous((batch, -(-max_seqlen_k // page_size)), "int32")
    shapes = (batch, 1, num_heads_q, head_dim), (*slots, num_heads_kv, head_dim), (*slots, num_heads_kv, 1)  # it is for values of any width
    call = Operands(*[_contiguous(shape, name) for shape in shapes]), CacheOperands(_contiguous((batch,), "int32"), page_table=table)
    plan.cached(cached(*call)[0], spec)
    return DecodePlan(batch, num_heads_q, num_heads_kv, head_dim, page_size, max_seqlen_k, name, str(device), bool(cuda_graph))


def _contiguous(shape: tuple[int, ...], dtype: str) -> ArrayView:
    return ArrayView(0, shape, arrays.strides_of(shape, None), dtype, HOST, "numpy", None)


def _check_plan(decode_plan: Any, problem: CacheProblem) -> None:
    """One error for all in which a plan differs from the call that it is given to."""
    if not isinstance(decode_plan, DecodePlan):
        raise ArgumentError(f"plan is a {type(decode_plan).__name__}: it must be what cupyflash.plan_decode returned")
    p = problem.attention
    needed = {
        "batch": p.batch,
        "num_heads_q": p.num_heads_q,
        "num_heads_kv": p.num_heads_kv,
        "head_dim": p.head_dim,
        "page_size": problem.page_size,
        "dtype": p.dtype,
    }
    differs = [f"{name}={n}, the plan {getattr(decode_plan, name)}" for name, n in needed.items() if n != getattr(decode_plan, name)]
    page_size = problem.page_size or 1
    if p.seqlen_k > -(-decode_plan.max_seqlen_k // page_size) * page_size:
        differs.append(f"{p.seqlen_k} slots a sequence, the plan max_seqlen_k={decode_plan.max_seqlen_k}")
    if differs:
        raise ShapeError(f"plan was made for other calls: this one has {'; '.join(differs)}; make one by cupyflash.plan_decode")


class _Call(NamedTuple):
    """All that calls of the same shapes, strides, dtypes and options share; views without addresses."""

    views: dict[str, ArrayView]  # of the arrays given
    problem: CacheProblem
    operands: Operands
    more: CacheOperands
    out: ArrayView
    lse: ArrayView | None


_CALLED = {"k": "k_cache", "v": "v_cache"}  # what `attention_with_kvcache` calls these fields of Operands


def attention(given: Mapping[str, Any], *, stream: Any, decode_plan: Any = None, **options: Any) -> tuple[Any, Any]:
    """(out, lse), lse None where it was not asked for. `given` has all arguments that are arrays by their names, None where not used; those
    named in `_CALLED` have that name where there are cache_seqlens. The options are those of `problem.cached`."""
    required = {"q", *_CALLED.values(), "cache_seqlens"} if "k_cache" in given else {"q", *_CALLED, "cu_seqlens_q"}
    read = {}
    for name, array in given.items():
        if name in ("k_descale", "v_descale") and isinstance(array, numbers.Real):
            array = np.array(array, np.float32)
        if array is not None or name in required:
            read[name] = arrays.read(array, name, stream)
    kinds = tuple([kind for _, kind, _ in read.values()])
    call = arrays.prepared(_prepare, kinds, (*read,), (*options,), *options.values())
    views = arrays.located(call.views, read.values())
    like, out = views["q"], given["out"]
    if decode_plan is not None:
        _check_plan(decode_plan, call.problem)
    for name in ("out", *(_CALLED.values() if "k_new" in views else ())):
        if name in views:
            arrays.check_out(name, given[name], views[name], views)
    with arrays.on_stream(stream, [*views.values()]):
        made, lse = _made(call.out, like) if out is None else views["out"], _made(call.lse, like)
        _run_on_host(call, views, made, lse)
        return arrays.give_back(made.owner, like) if out is None else out, lse and arrays.give_back(lse.owner, like)


def _made(view: Any, like: ArrayView) -> Any:
    if view is None:
        return None
    ptr, owner = arrays.allocator(view, like)(like.owner)
    return view._replace(ptr=ptr, owner=owner)


@arrays.cached_by_kinds
def _prepare(kinds: tuple[arrays.Kind, ...], names: tuple[str, ...], option_names: tuple[str, ...], *values: Any) -> _Call:
    """Check and plan a call."""
    views = {name: arrays.describe(kind, name) for name, kind in zip(names, kinds, strict=True)}
    arrays.check_together(views)
    like = views["q"]
    options = dict(zip(option_names, values, strict=True))
    problem, operands, more = cached(
        Operands(*[views.get(name, views.get(_CALLED.get(name, name))) for name in Operands._fields]),
        CacheOperands(*[views.get(name) for name in CacheOperands._fields]),
        **options,
    )
    plan.cached(problem, query(like.device_id))
    p = problem.attention
    out = arrays.fresh(like, (*like.shape[:-1], p.head_dim_v), p.out_dtype, arrays.storage_order(like))
    if operands.out is None:
        operands = operands._replace(out=to_bshd(out, "out", "bshd", like))
    lse_shape = (p.batch, p.num_heads_q, p.seqlen_q)[p.packed :]
    return _Call(views, problem, operands, more, out, arrays.fresh(like, lse_shape, p.lse_dtype) if p.write_lse else None)


def _run_on_host(call: _Call, views: Mapping[str, ArrayView], out: ArrayView, lse: ArrayView | None) -> None:
    from cupyflash import host_cache  # 1 ms of an import of the package

    def at(field: str, shaped: Any) -> Any:
        if shaped is None:
            return None
        owner = out.owner if field == "out" else views[field if field in views else _CALLED[field]].owner
        return arrays.on_host(shaped._replace(owner=owner))

    operands = Operands(*[at(name, shaped) for name, shaped in zip(Operands._fields, call.operands, strict=True)])
    more = CacheOperands(*[at(name, shaped) for name, shaped in zip(CacheOperands._fields, call.more, strict=True)])
    rows = None if lse is None else arrays.on_host(lse)
    host_cache.attention(call.problem, operands, more, rows if rows is None or rows.ndim == 3 else rows[None])
