"""`attention_backward` and `attention_vjp`: their errors, results in the caller's arrays and libraries, memory, threads, any strides."""

from __future__ import annotations

import doctest
import itertools
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import threadpoolctl
from hypothesis import given, settings
from hypothesis import strategies as st
from test_strides import ORDERS, STEPS, view

import cupyflash
from cupyflash import ArgumentError, DtypeError, Gradients, ShapeError, UnsupportedError, backward, host, params, reference
from cupyflash.device import KNOWN

F32 = np.float32


def arrays(rng: np.random.Generator, sq: int = 5, sk: int = 7, dtype: Any = F32) -> list[Any]:
    """dout, q, k, v, out, lse."""
    q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in ((2, sq, 4, 8), (2, sk, 2, 8), (2, sk, 2, 6)))
    out, lse, _ = cupyflash.attention(q, k, v, return_lse=True)
    return [rng.standard_normal(out.shape).astype(dtype), q, k, v, out, lse]


# --- errors ----------------------------------------------------------------------------------------------------------------------------

SHAPE = {"dout": (2, 5, 4, 8), "q": (2, 5, 4, 8), "k": (2, 7, 2, 8), "v": (2, 7, 2, 8), "out": (2, 5, 4, 8), "lse": (2, 4, 5)}
ONES = {name: np.ones(shape, F32) for name, shape in SHAPE.items()}
ERRORS: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (ShapeError, r"dout has seqlen 6 and out has 5: they must be equal", {"dout": np.ones((2, 6, 4, 8), F32)}),
    (ShapeError, r"dout has 3 axes and q has 4", {"dout": np.ones((5, 4, 8), F32)}),
    (ShapeError, r"out has head_dim 6 and the result has 8", {"out": np.ones((2, 5, 4, 6), F32)}),
    (ShapeError, r"lse has shape \(2, 5, 4\): it must have shape \(B, Hq, Sq\) = \(2, 4, 5\), in", {"lse": np.ones((2, 5, 4), F32)}),
    (ShapeError, r"dlse has shape \(4, 5\): it must have shape \(B, Hq, Sq\)", {"dlse": np.ones((4, 5), F32)}),
    (ShapeError, r"dk has 4 heads and k has 2: they must be equal", {"dk": np.ones((2, 7, 4, 8), F32)}),
    (ShapeError, r"dv has stride 2 on its last axis: it must be 1", {"dv": np.ones((2, 7, 2, 16), F32)[..., ::2]}),
    (ShapeError, r"out has stride 2 on its last axis", {"out": np.ones((2, 5, 4, 16), F32)[..., ::2]}),
    (ShapeError, r"k has batch 3 and q has 2", {"k": np.ones((3, 7, 2, 8), F32)}),
    (ShapeError, r"dq overlaps q in memory: each result needs memory of its own", {"dq": ONES["q"]}),
    (ShapeError, r"dq overlaps dout in memory", {"dq": ONES["dout"]}),
    (ShapeError, r"dq has strides \(0, 8, 0, 1\)|dq is read-only", {"dq": np.broadcast_to(np.ones((1, 5, 1, 8), F32), (2, 5, 4, 8))}),
    (DtypeError, r"dout is float16 and out is float32: both must have one dtype", {"dout": np.ones((2, 5, 4, 8), np.float16)}),
    (DtypeError, r"out is int32: it must be what `attention` returned", {"out": np.ones((2, 5, 4, 8), np.int32)}),
    (DtypeError, r"lse is float64: it must be float32, to go with q of float32", {"lse": np.ones((2, 4, 5))}),
    (DtypeError, r"dlse is float16: it must be float32", {"dlse": np.ones((2, 4, 5), np.float16)}),
    (DtypeError, r"dq is float64: it must be the dtype of q, float32", {"dq": np.ones((2, 5, 4, 8))}),
    (ArgumentError, r"wrt='q' must be a tuple of names out of 'q', 'k', 'v', 'bias', 'alibi_slopes', 'sink'", {"wrt": "q"}),
    (ArgumentError, r"wrt=\('q', 'dk'\) must be a tuple of names", {"wrt": ("q", "dk")}),
    (ArgumentError, r"wrt=\('k', \['v'\]\) must be a tuple", {"wrt": ("k", ["v"])}),
    (ArgumentError, r"dq= was given and wrt=\('k',\) does not ask for it: add 'q'", {"wrt": ("k",), "dq": np.ones((2, 5, 4, 8), F32)}),
    (ArgumentError, r"deterministic='yes' must be True or False", {"deterministic": "yes"}),
    (ArgumentError, r"softcap is a ndarray", {"softcap": np.ones(3)}),
    (ArgumentError, r"lse is None: `attention` returns it with return_lse=True", {"lse": None}),
    (ArgumentError, r"out is a builtins.NoneType: it must be a CuPy", {"out": None}),
    (ArgumentError, r"attention_backward\(\) has no argument 'is_causal'; it is called 'causal'", {"is_causal": True}),
    (ArgumentError, r"attention_backward\(\) has no argument 'dbias'; did you mean 'bias'", {"dbias": None}),
    (cupyflash.DeviceError, r"stream= was given and the arrays are in host memory", {"stream": 0}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "options"), ERRORS, ids=[f"{e.__name__}-{m[:40]}" for e, m, _ in ERRORS])
def test_error_names_the_argument_and_the_way_out(error: type[Exception], message: str, options: dict[str, Any]) -> None:
    given = [options.pop(name, x) if name in (options := dict(options)) else x for name, x in ONES.items()]
    options = {name: x for name, x in options.items() if name not in ONES}
    before = {name: x.copy() for name, x in options.items() if isinstance(x, np.ndarray)}
    with pytest.raises(error, match=message) as caught:
        cupyflash.attention_backward(*given, **options)
    assert isinstance(caught.value, cupyflash.CupyflashError)
    assert "\n" not in str(caught.value)
    for name, x in before.items():
        np.testing.assert_array_equal(options[name], x)


def test_results_may_not_overlap_each_other(rng: np.random.Generator) -> None:
    given = arrays(rng, sq=7)
    both = np.zeros((2, 7, 4, 8), F32)
    with pytest.raises(ShapeError, match="dq overlaps dk in memory"):
        cupyflash.attention_backward(*given, dq=both, dk=both[:, :, 1:3])
    cupyflash.attention_backward(*given, dk=both[:, :, :2])


def test_without_a_batch_axis_the_lse_has_none(rng: np.random.Generator) -> None:
    dout, q, k, v, out, lse = arrays(rng)
    grads = cupyflash.attention_backward(*(x[0] for x in (dout, q, k, v, out, lse)))
    assert grads.dq.shape == (5, 4, 8)
    np.testing.assert_allclose(grads.dk, cupyflash.attention_backward(dout, q, k, v, out, lse).dk[0], rtol=1e-5, atol=1e-6)
    with pytest.raises(ShapeError, match=r"lse has shape \(1, 4, 5\): it must have shape \(Hq, Sq\) = \(4, 5\)"):
        cupyflash.attention_backward(dout[0], q[0], k[0], v[0], out[0], lse[:1])


# --- what comes back -------------------------------------------------------------------------------------------------------------------


def test_only_what_is_asked_for_is_computed(rng: np.random.Generator) -> None:
    given = arrays(rng)
    options = {"bias": rng.standard_normal((5, 7)).astype(F32), "sink": np.zeros(4, F32)}
    full = cupyflash.attention_backward(*given, wrt=["q", "k", "v", "bias", "alibi_slopes", "sink"], **options)
    assert full.dalibi_slopes is None  # asked for, and not used
    for name in ("q", "k", "v", "bias", "sink"):
        grads = cupyflash.attention_backward(*given, wrt=(name,), **options)
        assert [field for field in Gradients._fields if getattr(grads, field) is not None] == [f"d{name}"]
        np.testing.assert_array_equal(getattr(grads, f"d{name}"), getattr(full, f"d{name}"))
    assert cupyflash.attention_backward(*given, **options)[3:] == (None, None, None)
    assert cupyflash.attention_backward(*given, wrt=()) == Gradients()


@pytest.mark.parametrize("out_dtype", ["float16", ml_dtypes.bfloat16, "float64"])
def test_out_in_another_dtype(rng: np.random.Generator, out_dtype: Any) -> None:
    _, q, k, v, _, _ = arrays(rng)
    out, lse, _ = cupyflash.attention(q, k, v, out_dtype=out_dtype, return_lse=True)
    dout = rng.standard_normal(out.shape).astype(out.dtype)
    grads = cupyflash.attention_backward(dout, q, k, v, out, lse)
    assert grads.dq.dtype == F32
    bound = 1e-5 if out_dtype == "float64" else 2e-2
    np.testing.assert_allclose(grads.dq, reference.attention_backward(dout, q, k, v).dq, rtol=bound, atol=bound)


@pytest.mark.parametrize("return_lse", [False, True])
def test_vjp_is_forward_and_backward(rng: np.random.Generator, return_lse: bool) -> None:
    dout, q, k, v, _, lse = arrays(rng)
    options = {"causal": True, "sink": np.ones(4, F32), "window_size": [3, 1]}
    out, pullback = cupyflash.attention_vjp(q, k, v, return_lse=return_lse, wrt=("q", "sink"), **options)
    expected = cupyflash.attention(q, k, v, return_lse=True, **options)
    assert isinstance(out, cupyflash.AttentionResult) == return_lse
    np.testing.assert_array_equal(out[0] if return_lse else out, expected.out)
    dlse = rng.standard_normal(lse.shape).astype(F32)
    for through_lse in (None, dlse):
        grads = pullback(dout) if through_lse is None else pullback(dout, through_lse)
        same = cupyflash.attention_backward(dout, q, k, v, expected.out, expected.lse, dlse=through_lse, wrt=("q", "sink"), **options)
        assert grads.dk is None
        np.testing.assert_array_equal(grads.dq, same.dq)
        np.testing.assert_array_equal(grads.dsink, same.dsink)
    target = np.empty_like(expected.out)
    assert cupyflash.attention_vjp(q, k, v, out=target)[0] is target


def test_vjp_refuses_what_its_parts_refuse(rng: np.random.Generator) -> None:
    _, q, k, v, _, _ = arrays(rng)
    with pytest.raises(ArgumentError, match=r"attention\(\) has no argument 'is_causal'"):
        cupyflash.attention_vjp(q, k, v, is_causal=True)
    with pytest.raises(ArgumentError, match="wrt='sink' must be a tuple"):
        cupyflash.attention_vjp(q, k, v, wrt="sink")
    with pytest.raises(DtypeError, match="k is float64 and q is float32"):  # which is a TypeError, as a foreign keyword is
        cupyflash.attention_vjp(q, k.astype(np.float64), v, causal=True)
    pullback = cupyflash.attention_vjp(q, k, v)[1]
    with pytest.raises(DtypeError, match="dout is float64 and out is float32"):
        pullback(np.ones((2, 5, 4, 6)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_torch_cpu_tensors(rng: np.random.Generator, dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed; pip install torch")
    _, q, k, v, _, _ = (torch.from_numpy(x).to(getattr(torch, dtype)) for x in arrays(rng))
    bias = torch.from_numpy(rng.standard_normal((4, 5, 7))).to(q.dtype)
    out, pullback = cupyflash.attention_vjp(q, k, v, bias=bias, causal=True, wrt=("q", "k", "v", "bias"))
    grads = pullback(torch.ones((), dtype=q.dtype).expand(out.shape))  # as torch's own gradient of a sum is
    wide = [x.double().requires_grad_() for x in (q, k, v, bias)]
    scores = torch.einsum("bshd,bthd->bhst", wide[0], wide[1].repeat_interleave(2, 2)) / 8**0.5 + wide[3]
    weights = scores.masked_fill(torch.arange(7) > torch.arange(5)[:, None] + 2, -torch.inf).softmax(-1)
    torch.einsum("bhst,bthd->bshd", weights, wide[2].repeat_interleave(2, 2)).sum().backward()
    bound = {"float16": 4e-3, "bfloat16": 3.2e-2, "float32": 4e-5, "float64": 2e-12}[dtype]
    for grad, x in zip(grads[:4], wide, strict=True):
        assert (type(grad), grad.dtype) == (torch.Tensor, q.dtype)
        np.testing.assert_allclose(grad.double().numpy(), x.grad.numpy(), rtol=bound, atol=bound)


def test_torch_tensors_that_require_grad_are_refused(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed; pip install torch")
    given = [torch.from_numpy(x) for x in arrays(rng)]
    given[2].requires_grad_()
    with pytest.raises(UnsupportedError, match=r"k requires grad"):
        cupyflash.attention_backward(*given)
    with torch.no_grad():
        cupyflash.attention_backward(*given)


def test_jax_cpu_arrays(rng: np.random.Generator) -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed; pip install jax")
    given = arrays(rng)
    there = [jax.numpy.asarray(x) for x in given]
    grads = cupyflash.attention_backward(*there)
    for grad, same in zip(grads[:3], cupyflash.attention_backward(*given)[:3], strict=True):
        assert isinstance(grad, jax.Array)
        np.testing.assert_array_equal(np.asarray(grad), same)
    swapped = [x.swapaxes(1, 2) for x in there[:5]]
    grads = cupyflash.attention_backward(*swapped, there[5], layout="bhsd")
    np.testing.assert_allclose(np.asarray(grads.dk).swapaxes(1, 2), cupyflash.attention_backward(*given).dk, rtol=1e-5, atol=1e-6)
    with pytest.raises(ArgumentError, match="dq= is a JAX array: JAX arrays cannot be written"):
        cupyflash.attention_backward(*there, dq=there[1])


def test_a_dout_that_runs_backwards(rng: np.random.Generator) -> None:
    dout, *given = arrays(rng)
    turned = dout[:, ::-1, :, ::-1]
    for grad, same in zip(
        cupyflash.attention_backward(turned, *given)[:3], cupyflash.attention_backward(turned.copy(), *given)[:3], strict=True
    ):
        np.testing.assert_allclose(grad, same, rtol=1e-5, atol=1e-6)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    sizes=st.tuples(
        st.integers(1, 3), st.integers(1, 20), st.integers(1, 40), st.integers(1, 3), st.sampled_from([1, 2]), st.integers(1, 40)
    ),
    orders=st.tuples(*[ORDERS] * 6),
    steps=st.tuples(*[STEPS] * 5),
    offset=st.integers(0, 3),
    dtype=st.sampled_from(["float16", "float32", "float64"]),
    causal=st.booleans(),
)
def test_a_view_has_the_gradients_of_its_copy(sizes: Any, orders: Any, steps: Any, offset: int, dtype: str, causal: bool) -> None:
    batch, sq, sk, heads, group, d = sizes
    rng = np.random.default_rng(0)
    rows, keys = (batch, sq, heads * group, d), (batch, sk, heads, d)
    q, k, v, dout, out = (
        view(rng, shape, o, s, offset, dtype) for shape, o, s in zip((rows, keys, keys, rows, rows), orders, steps, strict=False)
    )
    result, lse, _ = cupyflash.attention(q.copy(), k.copy(), v.copy(), causal=causal, return_lse=True)
    out[...] = result
    dk = view(rng, keys, orders[5], (1, 2, 1), offset, dtype)
    expected = cupyflash.attention_backward(dout.copy(), q.copy(), k.copy(), v.copy(), result, lse, causal=causal)
    grads = cupyflash.attention_backward(dout, q, k, v, out, lse, causal=causal, dk=dk)
    assert grads.dk is dk
    for grad, same in zip(grads[:3], expected[:3], strict=True):
        np.testing.assert_allclose(grad, same, rtol={"float16": 2e-3, "float32": 1e-4, "float64": 1e-12}[dtype], atol=1e-5)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What calls give the launcher; arrays in host memory stand in for those on a GPU. Every other call is captured."""
    calls: list[Any] = []
    monkeypatch.setattr(backward, "HOST", None)
    monkeypatch.setattr(backward, "query", lambda device_id: KNOWN["90a"])
    monkeypatch.setattr(backward.launch, "check_process", lambda: None)
    monkeypatch.setattr(backward.launch, "context_reader", lambda: int)
    monkeypatch.setattr(backward.launch, "contexts", lambda device_id: {0})
    monkeypatch.setattr(backward.arrays, "stream_reader", lambda like: lambda: 7)
    capturing = itertools.cycle((False, True))
    monkeypatch.setattr(backward.arrays, "is_capturing", lambda like: next(capturing))
    monkeypatch.setattr(backward.arrays, "_captured", [])

    def launcher(*given: Any) -> Any:
        return lambda *addresses: calls.append((*given, *addresses))

    monkeypatch.setattr(backward.launch, "launcher", launcher)
    monkeypatch.setattr(backward, "_prepare", backward._prepare.__wrapped__)
    return calls


def argument(packing: Any, addresses: Any, more: Any) -> dict[str, Any]:
    """The argument of the kernels, by the names of its fields."""
    names = [name for name, _ in params.BACKWARD_FIELDS]
    content = packing.content.pack(b"\0" * len(packing.maps), *addresses, more.join(packing.numbers), 0, 0)
    return dict(zip(names, params.BACKWARD.unpack(content[len(packing.maps) : -16]), strict=True))


def test_what_a_call_on_a_gpu_launches(rng: np.random.Generator, launched: list[Any]) -> None:
    """The argument of the kernels holds each array and workspace under its name."""
    dout, q, k, v, out, lse = arrays(rng, sq=6, sk=9)
    bias, slopes, dk = rng.standard_normal((6, 9)).astype(F32), np.ones((2, 4), F32), np.empty((2, 2, 9, 8), F32).swapaxes(1, 2)
    options: dict[str, Any] = {"bias": bias, "alibi_slopes": slopes, "causal": True, "wrt": ("q", "k", "bias", "alibi_slopes"), "dk": dk}
    grads = cupyflash.attention_backward(dout, q, k, v, out, lse, **options)
    assert grads.dk is dk
    ((schedule, packing, spec, _, stream, addresses, more),) = launched
    assert [step.variant.family for step in schedule.steps] == ["bwd_delta", "bwd_simple", "bwd_sum"]
    assert (spec, stream()) == (KNOWN["90a"], 7)
    packed = argument(packing, addresses, more)
    known = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout, "dq": grads.dq, "dk": dk, "dbias": grads.dbias, "bias": bias}
    assert {name: packed[name] for name in known} == {name: x.ctypes.data for name, x in known.items()}
    assert packed["dalibi_slopes"] == grads.dalibi_slopes.ctypes.data
    assert [packed[name] for name in ("dv", "dlse", "dsink", "row_sink", "sink")] == [0] * 5
    assert all(packed[name] for name in ("row_lse", "row_delta", "row_slope"))
    assert [packed[f"dk_stride_{axis}"] for axis in ("batch", "seq", "head")] == [144, 8, 72]
    assert [packed[name] for name in ("dbias_batch", "dbias_heads", "dbias_q", "dbias_k", "dalibi_batch")] == [1, 1, 6, 9, 2]
    assert (packed["window_right"], packed["seqlen_q"], packed["seqlen_k"]) == (0, 6, 9)
    assert backward.arrays._captured == []
    cupyflash.attention_backward(dout, q, k, v, out, lse, **options)  # captured: a replay writes to its workspaces again
    (made,) = backward.arrays._captured  # one array, where each begins at a multiple of 256 bytes: 192 of 48 rows
    packed = argument(packing, *launched[-1][-2:])
    assert [packed[name] - made.ctypes.data for name in ("row_lse", "row_delta", "row_slope")] == [0, 256, 512]
    assert made.nbytes == 768


def test_what_a_packed_call_on_a_gpu_launches(rng: np.random.Generator, launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward, "query", lambda device_id: KNOWN["80"])  # whose kernels have no tensor maps, for which a driver is needed
    dout, q, k, v, out = rng.standard_normal((5, 300, 4, 64)).astype(np.float16)
    lse, cu_q, cu_k = np.zeros((4, 300), F32), np.array([0, 100, 299], np.int32), np.array([3, 200, 300], np.int32)
    for deterministic, offsets in ((False, (cu_q, cu_k)), (True, (cu_q, None))):
        more = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), offsets, strict=True))
        grads = cupyflash.attention_backward(dout, q, k, v, out, lse, causal=True, deterministic=deterministic, **more)
        schedule, packing, *_, addresses, pointers = launched[-1]
        packed = argument(packing, addresses, pointers)
        known = {"q": q, "out": out, "lse": lse, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_q if deterministic else cu_k, "dv": grads.dv}
        assert {name: packed[name] for name in known} == {name: x.ctypes.data for name, x in known.items()}
        assert [packed[name] for name in ("batch", "seqlen_q", "q_stride_batch", "lse_stride_batch", "lse_stride_head")] == [
            2,
            300,
            0,
            0,
            300,
        ]
        workspaces = {name for name, _ in schedule.workspaces}
        assert "key_tiles" in workspaces
        for name in ("row_tiles", "key_tiles", "row_lse", "dq_sum"):
            assert bool(packed[name]) == (name in workspaces)
    assert [made.nbytes for made in backward.arrays._captured] == [sum(-(-n // 256) * 256 for _, n in schedule.workspaces)]


# --- how it runs -----------------------------------------------------------------------------------------------------------------------


def peak_bytes(seqlen: int, dtype: Any = F32, **options: Any) -> int:
    dout, q, k, v, out = np.zeros((5, 1, seqlen, 4, 64), dtype)
    lse = np.zeros((1, 4, seqlen), F32)
    tracemalloc.start()
    try:
        cupyflash.attention_backward(dout, q, k, v, out, lse, **options)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_extra_memory_grows_with_the_gradients_only() -> None:
    small, large = (peak_bytes(seqlen, causal=True) for seqlen in (2048, 6144))
    assert large < 80 << 20  # one score matrix alone: 604 MB
    assert large - small < 2 * 3 * 4096 * 4 * 64 * 4  # twice the growth of dq, dk and dv


def test_sixteen_bits_need_one_wider_gradient_more() -> None:
    small, large = (peak_bytes(seqlen, np.float16, window_size=(255, 0)) for seqlen in (4096, 16384))
    assert large - small < 2 * 12288 * 4 * 64 * (3 * 2 + 4)  # dq is summed in float32
    assert large < 160 << 20  # one score matrix alone: 4.3 GB


@pytest.mark.parametrize("cpus", [1, 2, 5])
def test_results_do_not_depend_on_the_number_of_threads(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, cpus: int) -> None:
    q, k, v, dout = rng.standard_normal((4, 1, 1100, 4, 16)).astype(F32)
    assert host._SERIAL < 4 * 1100**2
    options: dict[str, Any] = {"bias": rng.standard_normal((1, 1100)).astype(F32), "alibi_slopes": np.full(4, 0.01, F32), "causal": True}
    out, lse, _ = cupyflash.attention(q, k, v, return_lse=True, **options)
    wrt = ("q", "k", "v", "bias", "alibi_slopes")
    expected = cupyflash.attention_backward(dout, q, k, v, out, lse, wrt=wrt, **options)
    monkeypatch.setattr(host, "_num_cpus", lambda: cpus)
    with threadpoolctl.threadpool_limits(1, user_api="blas"):  # one CPU runs tiles in turn, with BLAS as it is
        grads = cupyflash.attention_backward(dout, q, k, v, out, lse, wrt=wrt, **options)
    for grad, same in zip(grads[:5], expected[:5], strict=True):
        np.testing.assert_array_equal(grad, same)


def test_a_failure_in_a_thread_arrives_and_blas_has_its_threads_back(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    given = arrays(rng, sq=1100, sk=1100)
    monkeypatch.setattr(host, "_num_cpus", lambda: 2)

    def fails(*_: Any) -> None:
        raise MemoryError

    def threads() -> list[int]:
        return [lib["num_threads"] for lib in threadpoolctl.threadpool_info() if lib["user_api"] == "blas"]

    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        before = threads()
        monkeypatch.setattr(host, "score_step", fails)
        with pytest.raises(MemoryError):
            cupyflash.attention_backward(*given)
        assert threads() == before


def test_no_warning_of_numpy_reaches_the_caller(rng: np.random.Generator) -> None:
    given = arrays(rng, dtype=np.float16)
    given[2][0, 0], given[3][0, 1] = np.nan, np.inf  # warnings are errors in every test
    cupyflash.attention_backward(*given, wrt=("q", "k", "v", "sink"), sink=np.full(4, -np.inf, F32), causal=True)


def test_examples_of_the_docstrings() -> None:
    failed, tried = doctest.testmod(backward)
    assert tried >= 8
    assert failed == 0
