"""The public functions of the backward: gradients from what a forward call left, and both in one. Straight lines, as in api.py."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cupyflash import arrays, launch, params, plan
from cupyflash.api import Call, attention, attention_varlen
from cupyflash.arrays import HOST, Array, ArrayView
from cupyflash.device import HOST_SPEC, query
from cupyflash.errors import ArgumentError, UnsupportedError
from cupyflash.keywords import entry, refuse_unpacked
from cupyflash.problem import BackwardOperands, BackwardProblem, Causal, Operands, Window, dense_backward, differentiated, gradient_axes


class Gradients(NamedTuple):
    """Each in the shape, dtype and library of what it belongs to; None where it was not asked for, or its option was not used."""

    dq: Any = None
    dk: Any = None
    dv: Any = None
    dbias: Any = None
    dalibi_slopes: Any = None
    dsink: Any = None


@entry
def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    /,
    *,
    dlse: Any = None,
    wrt: Sequence[str] = ("q", "k", "v"),
    causal: Causal = False,
    window_size: Window | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    sink: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    layout: str = "bshd",
    deterministic: bool = False,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    stream: Any = None,
) -> Gradients:
    """Gradients of sum(out * dout) + sum(lse * dlse), where (out, lse) is what `attention` returned for the same arguments; with
    cu_seqlens_q, what `attention_varlen` did.

    Scores are computed again tile by tile from q, k and lse, so nothing of size Sq x Sk is kept or made, but for dbias. With
    ``p = exp(s - lse)`` and ``delta_i = dout_i . out_i - dlse_i``: ``dv_j = sum_i p_ij dout_i``, ``ds_ij = p_ij (dout_i . v_j - delta_i)``,
    and dq, dk follow from ds (FlashAttention-2, Dao, arXiv 2307.08691, algorithm 2).

    Parameters
    ----------
    dout : (B, Sq, Hq, Dv), gradient of out, in its layout and dtype. Any strides, also 0, as the gradient of a sum has.
    q, k, v and the options from causal to layout : as given to `attention`, or to `attention_varlen`. Then dout, q and out are (Tq, H, D),
        k and v (Tk, H, D), lse and dlse (Hq, Tq), and cu_seqlens_q says which rows are a sequence; bias, mask and layout are not for those.
    out : (B, Sq, Hq, Dv), as `attention` returned it, in whatever out_dtype. Its rounding enters every gradient.
    lse : (B, Hq, Sq), (Hq, Sq) for 3-D inputs: float32, float64 for float64 inputs; as `attention` returned it. Any strides.
    dlse : gradient that arrives through the LSE, shaped and typed as lse; default 0.
    wrt : which gradients are wanted, names out of "q", "k", "v", "bias", "alibi_slopes", "sink". What is not named is not computed: dbias
        may be as large as Sq x Sk.
    deterministic : results are equal bit by bit in every run on the same machine. In host memory they always are, on any number of cores.
        In GPU memory all but dq of 16-bit inputs always are; that is added up by atomics or, with True, computed by a kernel of its own:
        seven matrix products in place of five.
    dq, dk, dv : arrays for these gradients, returned as such; as `out` of `attention`, and not overlapping each other.
    stream : as in `attention`. In the capture of a CUDA graph of CuPy's the call keeps its workspaces, 4 bytes an element of q and some a
        row, until the process ends.

    Returns
    -------
    Gradients(dq, dk, dv, dbias, dalibi_slopes, dsink) : each in the shape, layout and dtype of its input, dq, dk and dv stored in its axis
        order where it is dense; None where `wrt` does not name it or the option is not used. dk and dv are summed over the query heads of a
        group, dbias and dalibi_slopes over the axes along which they were broadcast: in float32, float64 for float64 inputs.

    A row whose lse is -inf, one past seqused_q and one of no sequence contribute exactly 0, whatever dout and dlse hold there. What no row
    sees has gradients of exactly 0. What lies in places that a row does not see, NaN included, never enters through that row.

    Raises
    ------
    ShapeError, DtypeError, ArgumentError, DeviceError, UnsupportedError : as `attention`, before anything is computed.

    Examples
    --------
    >>> import numpy as np, cupyflash
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 64, 8, 32), dtype=np.float32)
    >>> sink = np.zeros(8, np.float32)
    >>> out, lse, _ = cupyflash.attention(q, k, v, causal=True, sink=sink, return_lse=True)
    >>> grads = cupyflash.attention_backward(dout, q, k, v, out, lse, causal=True, sink=sink, wrt=("q", "k", "v", "sink"))
    >>> grads.dq.shape, grads.dsink.shape, grads.dbias
    ((1, 64, 8, 32), (8,), None)
    """
    if lse is None:
        raise ArgumentError("lse is None: `attention` returns it with return_lse=True")
    if cu_seqlens_q is not None:
        refuse_unpacked(bias=bias, mask=mask, layout=layout)
    for name, option in (("cu_seqlens_k", cu_seqlens_k), ("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if cu_seqlens_q is None and option is not None:
            raise ArgumentError(f"{name}= was given without cu_seqlens_q=, which says where the rows of each packed sequence begin")
    every = (q, k, v, out, bias, mask, alibi_slopes, sink, seqused_q, seqused_k, dout, lse, dlse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k)
    given = [
        None if array is None and name not in _REQUIRED else arrays.read(array, name, stream)
        for array, name in zip(every, _NAMES, strict=True)
    ]
    kinds = tuple([array and array[1] for array in given])
    window = tuple(window_size) if isinstance(window_size, list) else window_size
    names = tuple(wrt) if isinstance(wrt, list) else wrt
    options = (layout, causal, window, softmax_scale, softcap, names, deterministic, max_seqlen_q, max_seqlen_k)
    call = arrays.prepared(_prepare, kinds, *options)
    if cu_seqlens_k is None:
        given[-1] = given[-2]
    if not (dq is dk is dv is None):
        views = arrays.located(call.views, given)
        for name, array in (("dq", dq), ("dk", dk), ("dv", dv)):
            if name in views:
                arrays.check_out(name, array, views[name], views)
    if stream is None and call.current_context() in call.contexts:
        return call.compute(given)  # type: ignore[no-any-return]
    with arrays.on_stream(stream, [*arrays.located(call.views, given).values()]), launch.on_device(call.device_id):
        return call.compute(given)  # type: ignore[no-any-return]


def attention_vjp(
    q: Any, k: Any, v: Any, /, *, wrt: Sequence[str] = ("q", "k", "v"), deterministic: bool = False, **options: Any
) -> tuple[Any, Callable[..., Gradients]]:
    """Attention, and the function that carries a gradient of its result back: JAX's words, for any library's arrays.

    Parameters
    ----------
    q, k, v and the options : as in `attention` or, with cu_seqlens_q by its name among them, as in `attention_varlen`.
    wrt, deterministic : as in `attention_backward`.

    Returns
    -------
    (out, pullback) : out is what that function returns, AttentionResult(out, lse, max_logits=None) with return_lse. ``pullback(dout,
        dlse=None)`` gives the Gradients of `attention_backward`, any number of times. It holds q, k, v, the arrays among the options, out
        and lse, and reads them when called: do not write into them before.

    Raises
    ------
    As `attention`; pullback as `attention_backward`.

    Examples
    --------
    >>> import numpy as np, cupyflash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 64, 8, 32), dtype=np.float32)
    >>> out, pullback = cupyflash.attention_vjp(q, k, v, causal=True)
    >>> grads = pullback(np.ones_like(out))  # of out.sum()
    >>> grads.dk.shape
    (1, 64, 8, 32)
    """
    differentiated(wrt)
    if options.get("page_table") is not None:
        raise UnsupportedError(
            "page_table= was given: gradients of keys in pages are not built", ("gather the pages, and pass them packed",)
        )
    return_lse = options.pop("return_lse", False)
    forward: Any = attention if options.get("cu_seqlens_q") is None else attention_varlen
    result = forward(q, k, v, return_lse=True, **options)
    kept = {name: option for name, option in options.items() if name not in ("out", "out_dtype")}

    def pullback(dout: Any, dlse: Any = None) -> Gradients:
        return attention_backward(dout, q, k, v, result.out, result.lse, dlse=dlse, wrt=wrt, deterministic=deterministic, **kept)

    return (result if return_lse else result.out), pullback


_NAMES = (*Operands._fields[:-2], *BackwardOperands._fields[:6], *Operands._fields[-2:])  # cu_seqlens_k at the end: None stands for q's
_REQUIRED = frozenset({"q", "k", "v", "out", "dout"})


@arrays.cached_by_kinds
def _prepare(
    kinds: tuple[arrays.Kind | None, ...],
    layout: str,
    causal: Causal,
    window_size: Window | None,
    softmax_scale: float | None,
    softcap: float | None,
    wrt: tuple[str, ...],
    deterministic: bool,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> Call:
    """Check and plan a call."""
    views = {name: arrays.describe(kind, name) for name, kind in zip(_NAMES, kinds, strict=True) if kind is not None}
    arrays.check_together(views)
    like = views["q"]
    given = {  # a NumPy vector beside GPU arrays as it will be on the device
        name: view if view.device_id == like.device_id else arrays.fresh(view, view.shape, view.dtype) for name, view in views.items()
    }
    packed = "cu_seqlens_q" in views
    problem, operands, more = dense_backward(
        Operands(*[given.get(name) for name in Operands._fields]),
        BackwardOperands(*[given.get(name) for name in BackwardOperands._fields[:6]]),
        layout=layout,
        wrt=wrt,
        deterministic=deterministic,
        causal=causal,
        window_size=window_size,
        softmax_scale=softmax_scale,
        softcap=softcap,
        **({"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k} if packed else {}),
    )
    if packed:
        views.setdefault("cu_seqlens_k", views["cu_seqlens_q"])
    results = {}
    for name in problem.wrt:
        x = given[name]
        results[f"d{name}"] = made = arrays.fresh(like, x.shape, x.dtype, arrays.storage_order(x) if name in ("q", "k", "v") else None)
        if getattr(more, f"d{name}") is None:
            more = more._replace(**{f"d{name}": gradient_axes(f"d{name}", made, layout, like)})
    if like.device_id == HOST:
        return Call(views, HOST, int, {0}, _on_host(problem, operands, more, views, results, layout))
    compute = _on_gpu(problem, operands, more, views, results)
    return Call(views, like.device_id, launch.context_reader(), launch.contexts(like.device_id), compute)


Compute = Callable[[list[Array | None]], Gradients]  # of the arrays as they were read, in the order of _NAMES


def _on_gpu(
    problem: BackwardProblem, operands: Operands, more: BackwardOperands, views: dict[str, ArrayView], results: dict[str, ArrayView]
) -> Compute:
    """What computes calls on a GPU, which must be the current one."""
    launch.check_process()
    like = views["q"]
    device = query(like.device_id)
    schedule = plan.backward(problem, device)
    numbers = (
        params.numbers(problem.forward, operands, schedule.section, schedule.tiles),
        params.backward_numbers(problem, more, schedule.sums, schedule.splits),
    )
    maps = launch.maps_of(schedule, operands._asdict() | {"dout": more.dout}, like.device_id)
    packing = launch.Packing("Q" * len(params.POINTER_NAMES), numbers, params.BACKWARD.size, *maps)
    queue = launch.launcher(schedule, packing, device, like.device_id, arrays.stream_reader(like))
    host_vectors = [n for n, name in enumerate(_NAMES) if name in views and views[name].device_id != like.device_id]
    made_results = [(name, _NAMES.index(name) if name in _NAMES else -1, arrays.allocator(x, like)) for name, x in results.items()]
    make_workspaces = arrays.workspaces(schedule.workspaces, like)
    # Addresses as they are found in a call, one behind the other; the first is that of what is not there.
    order = ["", *[name if name not in results else "" for name in _NAMES], *results, *dict(schedule.workspaces)]
    places = {name: n for n, name in enumerate(order) if name}
    of_forward = operator.itemgetter(*[places.get(name, 0) for name in params.POINTER_NAMES])
    of_backward = operator.itemgetter(*[places.get(name, 0) for name in params.BACKWARD_POINTER_NAMES])

    def compute(given: list[Any]) -> Gradients:
        owner = given[0][2]
        for at in host_vectors:
            given[at] = arrays.to_device(given[at][2], like._replace(owner=owner), _NAMES[at])
        addresses = [0, *[0 if x is None else x[0] for x in given]]
        gradients = {}
        for name, n, allocate in made_results:
            ptr, *_, gradients[name] = (given[n] if n >= 0 else None) or allocate(owner)
            addresses.append(ptr)
        places, made = make_workspaces(owner)
        arrays.keep_if_captured(made, like)
        addresses += places
        queue(of_forward(addresses), params.backward_pointers(of_backward(addresses)))
        return Gradients(**gradients)

    return compute


def _on_host(
    problem: BackwardProblem,
    operands: Operands,
    more: BackwardOperands,
    views: dict[str, ArrayView],
    results: dict[str, ArrayView],
    layout: str,
) -> Compute:
    from cupyflash import host_backward  # 3 ms of an import of the package

    plan.backward(problem, HOST_SPEC)
    allocators = {name: arrays.allocator(x, views["q"]) for name, x in results.items()}

    def compute(given: list[Any]) -> Gradients:
        there = arrays.located(views, given)
        like = there["q"]

        def at(name: str, shaped: Any) -> Any:
            return shaped and arrays.on_host(shaped._replace(owner=there[name].owner))

        made = {name: there.get(name) or results[name]._replace(owner=allocate(like.owner)[1]) for name, allocate in allocators.items()}
        asked = {name: arrays.on_host(gradient_axes(name, view, layout, like)) for name, view in made.items()}
        arguments = Operands(*[at(name, shaped) for name, shaped in zip(Operands._fields, operands, strict=True)])
        rest = [at(name, getattr(more, name)) for name in ("dout", "lse", "dlse")]
        host_backward.attention_backward(problem, arguments, BackwardOperands(*rest, **asked))
        return Gradients(**{name: arrays.give_back(view.owner, like) for name, view in made.items()})

    return compute
