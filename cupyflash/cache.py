"""Calls over a cache, checked, planned and computed, for `api.attention_with_kvcache` and `api.attention_varlen`; and decode plans."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cupyflash import arrays, launch, params, plan
from cupyflash.arrays import HOST, Array, ArrayView
from cupyflash.device import HOST_SPEC, named, query
from cupyflash.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from cupyflash.keywords import entry
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
        this plan. There is nothing else to do: no kernel needs it.
        """
        lengths = arrays.view(cache_seqlens, "cache_seqlens")
        if lengths.shape != (self.batch,):
            raise ShapeError(f"cache_seqlens has shape {lengths.shape}: it must be ({self.batch},), for which the plan was made")
        if lengths.dtype != "int32":
            raise DtypeError(f"cache_seqlens is {lengths.dtype}: it must be int32")
        if self.device == "host" and lengths.device_id != HOST:
            raise DeviceError(f"cache_seqlens is {arrays.place(lengths)} and the plan was made for device={self.device!r}")


@entry
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
    device : "host", "cuda" for the current GPU, or an architecture as "sm_90a".
    cuda_graph : whether calls will be captured in a CUDA graph; for a GPU only.

    Returns
    -------
    DecodePlan, for ``plan=``. ``plan.update(cache_seqlens)`` lays work out for new lengths without reading them on the host.

    Raises
    ------
    ShapeError, DtypeError, ArgumentError, DeviceError : sizes that no call can have, or no such device. UnsupportedError : no kernel.

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


def _check_plan(decode_plan: Any, problem: CacheProblem, q: ArrayView) -> None:
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
    if (decode_plan.device == "host") != (q.device_id == HOST):
        differs.append(f"arrays {arrays.place(q)}, the plan device={decode_plan.device!r}")
    if differs:
        raise ShapeError(f"plan was made for other calls: this one has {'; '.join(differs)}; make one by cupyflash.plan_decode")


Compute = Callable[[Mapping[str, Array], Any], tuple[Any, Any]]  # (arrays as they were read, `out`) -> (out, lse)


@dataclass(frozen=True, slots=True, eq=False)  # no two are equal: they are keys of `_check_apart`
class _Call:
    """All that calls of the same shapes, strides, dtypes and options share."""

    views: dict[str, ArrayView]  # of the arrays given, without addresses
    written: tuple[str, ...]  # which of them
    problem: CacheProblem
    device_id: int
    current_context: Callable[[], int]
    contexts: set[int]  # while one of these is the current one, `compute` can run as things are
    compute: Compute


_CALLED = {"k": "k_cache", "v": "v_cache"}  # what `attention_with_kvcache` calls these fields of Operands
_DESCALES = ("k_descale", "v_descale")


def attention(given: Mapping[str, Any], *, stream: Any, decode_plan: Any = None, **options: Any) -> tuple[Any, Any]:
    """(out, lse), lse None where it was not asked for. `given` has all arguments that are arrays by their names, None where not used; those
    named in `_CALLED` have that name where there are cache_seqlens. The options are those of `problem.cached`."""
    required = {"q", *_CALLED.values(), "cache_seqlens"} if "k_cache" in given else {"q", *_CALLED, "cu_seqlens_q"}
    read: dict[str, Array] = {}
    for name, array in given.items():
        if name in _DESCALES and isinstance(array, numbers.Real):
            options[name] = array
        elif array is not None or name in required:
            read[name] = arrays.read(array, name, stream)
    kinds = tuple([kind for _, kind, _ in read.values()])
    k, v = ("k_cache", "v_cache") if "k_cache" in given else ("k", "v")
    options["same_start"] = read[k][0] == read[v][0]
    call = arrays.prepared(_prepare, kinds, (*read,), (*options,), *options.values())
    if decode_plan is not None:
        _check_plan(decode_plan, call.problem, call.views["q"])
    out = given["out"]
    if call.written:
        _check_written(call, given, read)
    if stream is None and call.current_context() in call.contexts:
        return call.compute(read, out)
    with arrays.on_stream(stream, [*arrays.located(call.views, read.values()).values()]), launch.on_device(call.device_id):
        return call.compute(read, out)


def _check_written(call: _Call, given: Mapping[str, Any], read: Mapping[str, Array]) -> None:
    """Results and, where tokens are appended, caches can be written and share no memory with other arrays."""
    for name in call.written:
        _, kind, owner = read[name]
        arrays.check_writable(name, given[name], kind[0], owner)
    _check_apart(call, tuple([ptr for ptr, *_ in read.values()]))


@functools.lru_cache(maxsize=2048)  # a model's calls find their arrays in the same places again and again
def _check_apart(call: _Call, addresses: tuple[int, ...]) -> None:
    views = {name: view._replace(ptr=ptr) for (name, view), ptr in zip(call.views.items(), addresses, strict=True)}
    for name in call.written:
        arrays.check_apart(name, views[name], views)


@arrays.cached_by_kinds
def _prepare(kinds: tuple[arrays.Kind, ...], names: tuple[str, ...], option_names: tuple[str, ...], *values: Any) -> _Call:
    """Check and plan a call."""
    views = {name: arrays.describe(kind, name) for name, kind in zip(names, kinds, strict=True)}
    arrays.check_together(views)
    like = views["q"]
    there = {  # a NumPy vector beside GPU arrays as it will be on the device
        name: view if view.device_id == like.device_id else arrays.fresh(view, view.shape, view.dtype) for name, view in views.items()
    }
    options = dict(zip(option_names, values, strict=True))
    descales = {name: options.pop(name) for name in _DESCALES if name in options}
    problem, operands, more = cached(
        Operands(*[there.get(name, there.get(_CALLED.get(name, name))) for name in Operands._fields]),
        CacheOperands(*[there.get(name, descales.get(name)) for name in CacheOperands._fields]),
        **options,
    )
    p = problem.attention
    out = arrays.fresh(like, (*like.shape[:-1], p.head_dim_v), p.out_dtype, arrays.storage_order(like))
    if operands.out is None:
        operands = operands._replace(out=to_bshd(out, "out", "bshd", like))
    lse_shape = (p.batch, p.num_heads_q, p.seqlen_q)[p.packed :]
    lse = arrays.fresh(like, lse_shape, p.lse_dtype) if p.write_lse else None
    written = (*(("out",) if "out" in views else ()), *(_CALLED.values() if "k_new" in views else ()))
    if like.device_id == HOST:
        compute = _on_host(problem, operands, more, like, out, lse)
        return _Call(views, written, problem, HOST, int, {0}, compute)  # int() is 0, which is no context
    host_vectors = [name for name, view in views.items() if view.device_id != like.device_id]
    compute = _on_gpu(problem, operands, more, like, out, lse, host_vectors)
    return _Call(views, written, problem, like.device_id, launch.context_reader(), launch.contexts(like.device_id), compute)


def _on_gpu(
    problem: CacheProblem,
    operands: Operands,
    more: CacheOperands,
    like: ArrayView,
    out_view: ArrayView,
    lse_view: ArrayView | None,
    host_vectors: list[str],  # which arrays are NumPy's beside GPU arrays
) -> Compute:
    """What computes calls on a GPU, which must be the current one."""
    launch.check_process()
    if operands.k.shape[0] == 0:  # a table may have room for pages that no cache has
        problem = problem._replace(attention=problem.attention._replace(seqlen_k=0))
    device = query(like.device_id)
    schedule = plan.cached(problem, device)
    workspaces = dict(schedule.workspaces)
    appends = "used_k" in workspaces
    descales = problem.k_descale, problem.v_descale
    seen, pages = _left_for_attention(problem, operands, more, like, workspaces)
    numbers: tuple[bytes, ...] = (
        params.numbers(problem.attention, seen, schedule.section, schedule.tiles, pages, descales, schedule.splits),
    )
    lengths = "seqused_k" if more.cache_seqlens is None else "cache_seqlens"  # in use before the call
    if appends:
        given = operands.seqused_k if more.cache_seqlens is None else more.cache_seqlens
        numbers += (params.cache_numbers(problem, operands.q, given, more),)
    maps = launch.maps_of(schedule, seen._asdict(), like.device_id)
    packing = launch.Packing("Q" * len(params.POINTER_NAMES), numbers, (params.CACHE if appends else params.FORWARD).size, *maps)
    queue = launch.launcher(schedule, packing, device, like.device_id, arrays.stream_reader(like))
    allocate_out, allocate_lse = arrays.allocator(out_view, like), lse_view and arrays.allocator(lse_view, like)
    make_workspaces = arrays.workspaces(schedule.workspaces, like) if workspaces else None
    # Where the addresses of both structs come from: names of arrays and workspaces.
    others = {
        "q": "rotated_q" if "rotated_q" in workspaces else "q",
        "k": "k" if more.cache_seqlens is None else "k_cache",
        "v": "v" if more.cache_seqlens is None else "v_cache",
        "seqused_k": "used_k" if appends else lengths,
        "first_k": "first_k" if appends else "cache_leftpad",
        "page_table": "cache_batch_idx" if more.page_table is None else "page_table",
    }
    sources = [others.get(name, name) for name in params.POINTER_NAMES]
    sources_of_append = [lengths if name == "cache_seqlens" else name for name in params.CACHE_POINTER_NAMES]

    def compute(read: Mapping[str, Array], out: Any) -> tuple[Any, Any]:
        q, lse, made = read["q"][2], None, []
        addresses = {name: array[0] for name, array in read.items()}
        for name in host_vectors:
            addresses[name], _, owner = arrays.to_device(read[name][2], like._replace(owner=q), name)
            made.append(owner)
        if out is None:
            addresses["out"], out = allocate_out(q)
        if allocate_lse is not None:
            addresses["lse"], lse = allocate_lse(q)
        if make_workspaces is not None:
            found, owner = make_workspaces(q)
            addresses.update(zip(workspaces, found, strict=True))
            arrays.keep_if_captured([*made, owner], like)
        of_append = params.cache_pointers([addresses.get(name, 0) for name in sources_of_append]) if appends else b""
        queue(tuple([addresses.get(name, 0) for name in sources]), of_append)
        return out, lse

    return compute


def _left_for_attention(
    problem: CacheProblem, operands: Operands, more: CacheOperands, like: ArrayView, workspaces: Mapping[str, int]
) -> tuple[Operands, CacheOperands]:
    """The operands of a call as the attention reads them: the kernel before it leaves queries, lengths and left padding in workspaces."""
    vector = arrays.fresh(like, (problem.attention.batch,), "int32")
    if "rotated_q" in workspaces:
        q = arrays.fresh(like, operands.q.shape, like.dtype)
        operands = operands._replace(q=q._replace(strides=(0, *q.strides[1:])) if problem.attention.packed else q)
    if "used_k" in workspaces:
        return operands._replace(seqused_k=vector), more._replace(cache_leftpad=more.cache_leftpad and vector)
    return operands if more.cache_seqlens is None else operands._replace(seqused_k=more.cache_seqlens), more


def _on_host(
    problem: CacheProblem, operands: Operands, more: CacheOperands, like: ArrayView, out_view: ArrayView, lse_view: ArrayView | None
) -> Compute:
    from cupyflash import host_cache  # 1 ms of an import of the package

    plan.cached(problem, HOST_SPEC)
    p, num_heads_kv = problem.attention, operands.k.shape[2]
    allocate_out, allocate_lse = arrays.allocator(out_view, like), lse_view and arrays.allocator(lse_view, like)
    of_all = {name: x for name, x in (("k_descale", problem.k_descale), ("v_descale", problem.v_descale)) if x != 1}
    descales = {name: np.full((p.batch, num_heads_kv), x, np.float32) for name, x in of_all.items()}

    def compute(read: Mapping[str, Array], out: Any) -> tuple[Any, Any]:
        q = read["q"][2]
        owners = {name: array[2] for name, array in read.items()}
        owners["out"] = made = allocate_out(q)[1] if out is None else out
        lse = allocate_lse(q)[1] if allocate_lse is not None else None

        def at(name: str, shaped: Any) -> Any:
            return shaped and arrays.on_host(shaped._replace(owner=owners[name if name in owners else _CALLED[name]]))

        rows = lse_view and arrays.on_host(lse_view._replace(owner=lse))
        host_cache.attention(
            problem,
            Operands(*map(at, Operands._fields, operands)),
            CacheOperands(*map(at, CacheOperands._fields, more))._replace(**descales),
            rows if rows is None or rows.ndim == 3 else rows[None],
        )
        this = like._replace(owner=q)
        return arrays.give_back(made, this) if out is None else out, None if lse is None else arrays.give_back(lse, this)

    return compute
