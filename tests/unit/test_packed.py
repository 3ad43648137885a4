"""Packed sequences as a caller meets them: errors, libraries, `pack` and `unpack`, and how they run on the host path."""

from __future__ import annotations

import concurrent.futures
import doctest
import inspect
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_known_failures_varlen import agrees, all_same, compute, inputs, offsets

import cupyflash
from cupyflash import ArgumentError, DtypeError, Gradients, ShapeError, api, host, packing
from cupyflash.keywords import _NOT_PACKED, _OFFSETS, FOREIGN
from cupyflash.problem import Operands, pack_heads, varlen

F32 = np.float32
CU = np.array([0, 2, 5], np.int32)

# --- errors ----------------------------------------------------------------------------------------------------------------------------

GIVEN: dict[str, Any] = {"q": (5, 4, 8), "k": (5, 2, 8), "v": (5, 2, 8)}
CASES: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (ShapeError, r"q has shape \(1, 5, 4, 8\): packed sequences have 3 axes, \(T, H, D\).*`attention` takes 4", {"q": (1, 5, 4, 8)}),
    (ShapeError, r"v has shape \(5, 8\): packed sequences have 3 axes", {"v": (5, 8)}),
    (ShapeError, r"out has shape \(1, 5, 4, 8\): packed sequences have 3 axes", {"out": np.ones((1, 5, 4, 8), F32)}),
    (ShapeError, r"k has 7 tokens and q has 5: without cu_seqlens_k .* so pass it", {"k": (7, 2, 8), "v": (7, 2, 8)}),
    (ShapeError, r"v has seqlen 4 and k has 5: they must be equal", {"v": (4, 2, 8)}),
    (ShapeError, r"k has 3 heads and q has 4", {"k": (5, 3, 8), "v": (5, 3, 8)}),
    (ShapeError, r"k has head_dim 16 and q has 8", {"k": (5, 2, 16)}),
    (ShapeError, r"out has seqlen 6 and the result has 5", {"out": np.ones((6, 4, 8), F32)}),
    (ShapeError, r"cu_seqlens_q has shape \(0,\): it must be \(B \+ 1,\), where each sequence begins", {"cu_seqlens_q": CU[:0]}),
    (ShapeError, r"cu_seqlens_q has shape \(1, 3\): it must be \(B \+ 1,\)", {"cu_seqlens_q": CU[None]}),
    (ShapeError, r"cu_seqlens_k has shape \(\): it must be \(B \+ 1,\)", {"cu_seqlens_k": CU[:1].reshape(())}),
    (ShapeError, r"cu_seqlens_k has shape \(2,\) and cu_seqlens_q \(3,\): both must be", {"cu_seqlens_k": CU[:2]}),
    (ShapeError, r"seqused_q has shape \(3,\): it must have shape \(B,\) = \(2,\)", {"seqused_q": CU}),
    (ShapeError, r"alibi_slopes has shape \(3, 4\).*\(Hq,\) or \(B, Hq\) = \(4,\) or \(2, 4\)", {"alibi_slopes": np.ones((3, 4), F32)}),
    (ShapeError, r"max_seqlen_q=-1 must not be below 0", {"max_seqlen_q": -1}),
    (ShapeError, r"window_size=\(-1, -3\) has a distance below 0", {"window_size": (-1, -3)}),
    (ShapeError, r"q has stride 2 on its last axis: it must be 1.*q\.copy\(\)", {"q": np.ones((5, 4, 16), F32)[..., ::2]}),
    (DtypeError, r"cu_seqlens_q is int64: it must be int32", {"cu_seqlens_q": CU.astype(np.int64)}),
    (DtypeError, r"cu_seqlens_k is float32: it must be int32", {"cu_seqlens_k": CU.astype(F32)}),
    (DtypeError, r"cu_seqlens_q is uint32: it must be int32", {"cu_seqlens_q": CU.astype(np.uint32)}),
    (DtypeError, r"seqused_k is int64: it must be int32", {"seqused_k": np.ones(2, np.int64)}),
    (DtypeError, r"alibi_slopes is float16: it must be float32", {"alibi_slopes": np.ones(4, np.float16)}),
    (DtypeError, r"q is int32: it must be one of float16", {"q": np.ones((5, 4, 8), np.int32)}),
    (DtypeError, r"k is float64 and q is float32", {"k": np.ones((5, 2, 8))}),
    (DtypeError, r"out is float16: it must be the dtype of q, float32", {"out": np.ones((5, 4, 8), np.float16)}),
    (ArgumentError, r"cu_seqlens_q is a builtins.list: .*numpy.asarray\(cu_seqlens_q\)", {"cu_seqlens_q": [0, 2, 5]}),
    (ArgumentError, r"cu_seqlens_q is a builtins.NoneType", {"cu_seqlens_q": None}),
    (ArgumentError, r"max_seqlen_k is a float: it must be an int, or None", {"max_seqlen_k": 2.0}),
    (ArgumentError, r"max_seqlen_q is a ndarray: it must be an int", {"max_seqlen_q": np.array(3)}),
    (ArgumentError, r"max_seqlen_q is a bool: it must be an int", {"max_seqlen_q": True}),
    (ArgumentError, r"softcap is a ndarray", {"softcap": np.ones(3)}),
    (ArgumentError, r"causal='topleft' is unknown", {"causal": "topleft"}),
    (cupyflash.DeviceError, r"stream= was given and the arrays are in host memory", {"stream": 0}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "options"), CASES, ids=[f"{e.__name__}-{m[:40]}" for e, m, _ in CASES])
def test_error_names_the_argument_and_the_way_out(error: type[Exception], message: str, options: dict[str, Any]) -> None:
    """KF-114, KF-130 and their kind."""
    options = {"cu_seqlens_q": CU, **GIVEN, **options}
    arrays = [np.ones(x, F32) if isinstance(x, tuple) else x for x in (options.pop(name) for name in "qkv")]
    out = options.get("out")
    before = None if out is None else out.copy()
    with pytest.raises(error, match=message) as caught:
        cupyflash.attention_varlen(*arrays, **options)
    assert isinstance(caught.value, cupyflash.CupyflashError)
    assert "\n" not in str(caught.value)
    if out is not None:
        np.testing.assert_array_equal(out, before)


X = np.ones((5, 2, 8), F32)
LSE = np.ones((2, 5), F32)


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (ArgumentError, "mask= was given for packed sequences: .* pad them for `cupyflash.attention` .mask_mod is not", {"mask": X > 0}),
        (ArgumentError, "bias= was given for packed sequences: .* pad them for `cupyflash.attention` .score_mod is not", {"bias": X}),
        (ArgumentError, r"layout= was given for packed sequences: packed arrays are \(T, H, D\)", {"layout": "bhsd"}),
        (ArgumentError, "cu_seqlens_k= was given without cu_seqlens_q=", {"cu_seqlens_q": None, "cu_seqlens_k": CU}),
        (ArgumentError, "max_seqlen_q= was given without cu_seqlens_q=", {"cu_seqlens_q": None, "max_seqlen_q": 3}),
        (ArgumentError, "max_seqlen_k= was given without cu_seqlens_q=", {"cu_seqlens_q": None, "max_seqlen_k": 3}),
        (ArgumentError, "has no argument 'qo_indptr'; it is called 'cu_seqlens_q'", {"qo_indptr": CU}),
        (ShapeError, r"cu_seqlens_k has shape \(2,\) and cu_seqlens_q \(3,\)", {"cu_seqlens_k": CU[:2]}),
        (ShapeError, r"dlse has shape \(5, 2\): it must have shape \(Hq, Tq\) = \(2, 5\)$", {"dlse": LSE.T}),
        (ShapeError, r"dk has seqlen 6 and k has 5", {"dk": np.ones((6, 2, 8), F32)}),
        (ShapeError, r"dq overlaps q in memory", {"dq": X}),
        (DtypeError, r"cu_seqlens_q is int64: it must be int32", {"cu_seqlens_q": CU.astype(np.int64)}),
    ],
)
def test_error_of_the_backward(error: type[Exception], message: str, options: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        cupyflash.attention_backward(X.copy(), X, X, X, X.copy(), LSE, **{"cu_seqlens_q": CU, **options})


def test_the_backward_takes_arrays_of_3_axes() -> None:
    with pytest.raises(ShapeError, match=r"q has shape \(1, 5, 2, 8\): packed sequences have 3 axes"):
        cupyflash.attention_backward(X[None], X[None], X[None], X[None], X[None], LSE, cu_seqlens_q=CU)
    with pytest.raises(ShapeError, match=r"dout has 4 axes and q has 3"):
        cupyflash.attention_backward(X[None], X, X, X, X.copy(), LSE, cu_seqlens_q=CU)


@pytest.mark.parametrize(
    ("foreign", "ours"),
    [
        ("mask", "packed sequences have no common Sq x Sk for it; pad them for `cupyflash.attention` (mask_mod is not built yet)"),
        ("attn_mask", "no common Sq x Sk"),
        ("bias", "packed sequences have no common Sq x Sk for it; pad them for `cupyflash.attention` (score_mod is not built yet)"),
        ("layout", "packed arrays are (T, H, D); their strides are free"),
        ("cu_seqlens", "it is called 'cu_seqlens_q', int32 of shape (B + 1,)"),
        ("kv_indptr", "it is called 'cu_seqlens_k'"),
        ("max_q", "it is called 'max_seqlen_q'"),
        ("key_padding_mask", "'seqused_k' says how many keys"),
        ("is_causal", "it is called 'causal'"),
        ("block_table", "it is called 'page_table', int32 of (B, max_pages)"),
        ("max_seqlen_g", "did you mean 'max_seqlen_q'?"),
    ],
)
def test_kf_133_foreign_keywords_name_ours(foreign: str, ours: str) -> None:
    for call in (cupyflash.attention_varlen, cupyflash.attention_vjp):
        with pytest.raises(TypeError) as caught:
            call(X, X, X, cu_seqlens_q=CU, **{foreign: 1})
        assert str(caught.value).startswith(f"attention_varlen() has no argument {foreign!r}; ")
        assert ours in str(caught.value)


@pytest.mark.parametrize("foreign", ["cu_seqlens_q", "cu_seqlens_k", "cu_seqlens", "qo_indptr", "max_seqlen_q", "max_seqlen_k"])
def test_attention_names_the_function_for_packed_sequences(foreign: str) -> None:
    with pytest.raises(ArgumentError, match=f"has no argument '{foreign}'; packed sequences are what `cupyflash.attention_varlen` takes"):
        cupyflash.attention(X, X, X, **{foreign: CU})


def test_keywords_point_at_arguments_that_exist() -> None:
    known = set(inspect.signature(cupyflash.attention_varlen).parameters)
    meanings = FOREIGN | _OFFSETS | _NOT_PACKED
    assert not known & (_OFFSETS | _NOT_PACKED).keys()
    for name, hint in meanings.items():
        if name not in known:
            assert set(re.findall(r"'(\w+)'", hint)) <= known, name


def test_kf_132_options_are_keyword_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        cupyflash.attention_varlen(X, X, X, CU, CU, 3)  # type: ignore[misc]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'cu_seqlens_q'"):
        cupyflash.attention_varlen(X, X, X)  # type: ignore[call-arg]
    options = [name for name in inspect.signature(cupyflash.attention).parameters if name not in ("mask", "bias", "layout")]
    here = [name for name in inspect.signature(cupyflash.attention_varlen).parameters if "seqlen" not in name and name != "page_table"]
    assert here == options


def test_offsets_and_lengths_out_of_range_are_reported(rng: np.random.Generator, monkeypatch: Any, caplog: Any) -> None:
    arrays = inputs(rng, 12, 12)[:3]
    wrong = np.array([-1, 9, 4, 13], np.int32)
    cupyflash.attention_varlen(*arrays, wrong)
    cupyflash.attention_varlen(*arrays, offsets([5, 7]), seqused_k=np.array([6, -1], np.int32))
    assert not caplog.records
    monkeypatch.setenv("CUPYFLASH_DEBUG", "log,check")
    cupyflash.attention_varlen(*arrays, offsets([12]), wrong[[0, 3]])
    assert caplog.messages == ["cu_seqlens_k holds [-1, 13]: offsets are clamped to 0 <= begin <= end <= 12"]
    caplog.clear()
    cupyflash.attention_varlen(*arrays, offsets([5, 7]), seqused_k=np.array([6, -1], np.int32))
    assert caplog.messages == ["seqused_k holds [6, -1]: lengths are clamped to 0 <= length <= [5, 7]"]
    caplog.clear()
    cupyflash.attention_varlen(*arrays, offsets([5, 7], 0), seqused_k=np.array([5, 0], np.int32))
    assert not caplog.records


@pytest.mark.parametrize("cu_q", [[0, 9, 4, 12], [-3, 5, 12, 12], [0, 5, 99, 100], [2**31 - 1, 0, -(2**31), 7], [12, 12, 0, 0]])
def test_clamped_offsets_leave_nothing_unwritten(rng: np.random.Generator, cu_q: list[int]) -> None:
    arrays, cu, regular = inputs(rng, 12, 12), np.array(cu_q, np.int32), offsets([3, 4, 5])
    for cu_seqlens in ((cu, cu), (cu, regular), (regular, cu)):
        out, lse, grads = compute(*arrays, *cu_seqlens)
        assert not any(np.isnan(x).any() for x in (out, lse, *grads[:3]))


# --- the problem ------------------------------------------------------------------------------------------------------------------------


def problem(tokens_q: int = 5, tokens_k: int = 7, sequences: int = 2, **options: Any) -> Any:
    from cupyflash.arrays import view

    arrays = {"q": np.ones((tokens_q, 4, 8), F32), "k": np.ones((tokens_k, 2, 8), F32), "v": np.ones((tokens_k, 2, 8), F32)}
    arrays |= {name: np.zeros(sequences + 1, np.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    arrays |= {name: options.pop(name) for name in ("alibi_slopes", "seqused_q", "seqused_k") if name in options}
    return varlen(Operands(**{name: view(x, name) for name, x in arrays.items()}), **options)


def test_a_packed_problem_counts_sequences_and_tokens() -> None:
    p, a = problem(max_seqlen_q=3, max_seqlen_k=100)
    assert (p.packed, p.batch, p.seqlen_q, p.seqlen_k, p.longest_q, p.longest_k) == (True, 2, 5, 7, 3, 7)
    assert (a.q.shape, a.q.strides) == ((1, 5, 4, 8), (0, 32, 8, 1))
    assert a.cu_seqlens_q.shape == a.cu_seqlens_k.shape == (3,)
    assert problem()[0].longest_q is None
    one, operands = problem(tokens_q=1)
    assert pack_heads(one, operands) == (one, operands)  # which a single query of grouped heads else is


def test_equal_attentions_are_equal_problems() -> None:
    assert problem()[0] == problem(window_size=(7, 12))[0] == problem(window_size=(-1, None))[0]
    assert problem(causal=True)[0] == problem(window_size=(None, 0))[0] != problem()[0]
    assert problem(tokens_q=1, causal=True)[0] == problem(tokens_q=1)[0]  # each sequence has one row at most, which sees all


def test_without_a_sequence_nothing_of_one_is_left() -> None:
    each = {"alibi_slopes": np.ones((0, 4), F32), "seqused_q": np.ones(0, np.int32), "seqused_k": np.ones(0, np.int32)}
    p, a = problem(sequences=0, **each)
    assert (p.batch, p.alibi, p.seqused_q, p.seqused_k) == (0, False, False, False)
    assert a.alibi_slopes is a.seqused_q is a.seqused_k is None
    with pytest.raises(ShapeError, match="seqused_q has shape"):
        problem(sequences=0, seqused_q=np.ones(1, np.int32))


@pytest.mark.parametrize("device", ["host", "sm_80", "sm_90a"])
def test_supports_packed_calls(device: str) -> None:
    options: dict[str, Any] = {"head_dim": 64, "dtype": "float16", "device": device, "packed": True}
    answer = cupyflash.supports(**options, batch=3, alibi_slopes=True, seqused_k=True, sink=True, causal=True)
    assert answer
    assert "packed" in answer.reason
    assert "packed" in cupyflash.supports(**options, wrt=("q", "k", "v")).reason
    for name in ("bias", "mask"):
        refused = cupyflash.supports(**options, **{name: True})
        assert not refused
        assert refused.reason.startswith(f"{name}= was given for packed sequences")


# --- what comes back --------------------------------------------------------------------------------------------------------------------


def test_only_what_is_asked_for_is_computed(rng: np.random.Generator) -> None:
    q, k, v, dout = inputs(rng, 12, 12)
    cu, sink = offsets([3, 0, 9]), np.zeros(4, F32)
    out, lse, full = compute(q, k, v, dout, cu, sink=sink)
    assert full.dalibi_slopes is None  # asked for, and not used
    assert full.dbias is None
    for name in ("q", "k", "v", "sink"):
        grads = cupyflash.attention_backward(dout, q, k, v, out, lse, wrt=(name,), cu_seqlens_q=cu, sink=sink)
        assert [field for field in Gradients._fields if getattr(grads, field) is not None] == [f"d{name}"]
        np.testing.assert_array_equal(getattr(grads, f"d{name}"), getattr(full, f"d{name}"))
    assert cupyflash.attention_backward(dout, q, k, v, out, lse, wrt=(), cu_seqlens_q=cu) == Gradients()


@pytest.mark.parametrize("return_lse", [False, True])
def test_vjp_is_forward_and_backward(rng: np.random.Generator, return_lse: bool) -> None:
    q, k, v, dout = inputs(rng, 12, 15)
    options = {"cu_seqlens_q": offsets([3, 9]), "cu_seqlens_k": offsets([8, 7]), "max_seqlen_q": 9, "causal": True, "window_size": [3, 1]}
    target = np.empty_like(dout)
    out, pullback = cupyflash.attention_vjp(q, k, v, return_lse=return_lse, out=target, wrt=("q", "v"), **options)
    expected = cupyflash.attention_varlen(q, k, v, return_lse=True, **options)
    assert isinstance(out, cupyflash.AttentionResult) == return_lse
    assert (out.out if return_lse else out) is target
    np.testing.assert_array_equal(target, expected.out)
    dlse = rng.standard_normal(expected.lse.shape).astype(F32)
    same = cupyflash.attention_backward(dout, q, k, v, expected.out, expected.lse, dlse=dlse, wrt=("q", "v"), **options)
    grads = pullback(dout, dlse)
    assert grads.dk is None
    np.testing.assert_array_equal(grads.dq, same.dq)
    np.testing.assert_array_equal(grads.dv, same.dv)


@pytest.mark.parametrize("out_dtype", ["float16", ml_dtypes.bfloat16, "float64"])
def test_out_in_another_dtype(rng: np.random.Generator, out_dtype: Any) -> None:
    q, k, v, dout = inputs(rng, 12, 12)
    cu = offsets([3, 9])
    out, lse, _ = cupyflash.attention_varlen(q, k, v, cu, out_dtype=out_dtype, return_lse=True)
    assert out.dtype == np.dtype(out_dtype)
    expected, _, grads = compute(q, k, v, dout, cu)
    np.testing.assert_array_equal(out, expected.astype(out.dtype))
    rough = cupyflash.attention_backward(dout.astype(out.dtype), q, k, v, out, lse, cu_seqlens_q=cu)
    bound = 1e-5 if out_dtype == "float64" else 3e-2
    np.testing.assert_allclose(rough.dq, grads.dq, rtol=bound, atol=bound)


@pytest.mark.parametrize("numpy_offsets", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_torch_cpu_tensors(rng: np.random.Generator, dtype: str, numpy_offsets: bool) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed; pip install torch")
    given = inputs(rng, 12, 15, dtype="float32")
    q, k, v, dout = (torch.from_numpy(x).to(getattr(torch, dtype)) for x in given)
    cu = [offsets([3, 9]), offsets([8, 7])]
    slopes = np.full((2, 4), 0.1, F32)
    options: dict[str, Any] = {"alibi_slopes": slopes if numpy_offsets else torch.from_numpy(slopes), "causal": True}
    options |= zip(("cu_seqlens_q", "cu_seqlens_k"), cu if numpy_offsets else map(torch.from_numpy, cu), strict=True)
    out, pullback = cupyflash.attention_vjp(q, k, v, wrt=("q", "k", "v", "alibi_slopes"), return_lse=True, **options)
    bits = [x.double().numpy() for x in (q, k, v, dout)]
    expected = compute(*bits, *cu, causal=True, alibi_slopes=slopes)
    bound = {"float16": 4e-3, "bfloat16": 3.2e-2, "float32": 4e-5, "float64": 1e-12}[dtype]
    grads = pullback(dout)
    for got, want in zip(
        (out.out, out.lse, *grads[:3], grads.dalibi_slopes), (*expected[:2], *expected[2][:3], expected[2][4]), strict=True
    ):
        assert type(got) is torch.Tensor
        np.testing.assert_allclose(got.double().numpy(), want, rtol=bound, atol=bound)
    target = torch.empty_like(out.out)
    assert cupyflash.attention_varlen(q, k, v, **options, out=target) is target


def test_torch_tensors_that_require_grad_have_gradients() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed; pip install torch")
    x = torch.ones(5, 2, 8)
    assert cupyflash.attention_varlen(x, x, x.clone().requires_grad_(), torch.from_numpy(CU)).requires_grad


@pytest.mark.parametrize("numpy_offsets", [False, True])
def test_jax_cpu_arrays(rng: np.random.Generator, numpy_offsets: bool) -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed; pip install jax")
    given = inputs(rng, 12, 12)
    cu = offsets([3, 9])
    there = [jax.numpy.asarray(x) for x in given]
    out, pullback = cupyflash.attention_vjp(*there[:3], cu_seqlens_q=cu if numpy_offsets else jax.numpy.asarray(cu), return_lse=True)
    expected = compute(*given, cu)
    for got, want in zip((out.out, out.lse, *pullback(there[3])[:3]), (*expected[:2], *expected[2][:3]), strict=True):
        assert isinstance(got, jax.Array)
        np.testing.assert_array_equal(np.asarray(got), want)
    with pytest.raises(ArgumentError, match="out= is a JAX array: JAX arrays cannot be written"):
        cupyflash.attention_varlen(*there[:3], cu, out=there[0])


def test_mixed_libraries_are_named() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed; pip install torch")
    with pytest.raises(ArgumentError, match=r"cu_seqlens_q is a torch array and q a numpy one: a call takes arrays of one library"):
        cupyflash.attention_varlen(X, X, X, torch.from_numpy(CU))


def test_bfloat16_is_that_of_ml_dtypes(rng: np.random.Generator) -> None:
    x = np.ones((4, 1, 4), ml_dtypes.bfloat16)
    assert cupyflash.attention_varlen(x, x, x, offsets([4])).dtype == ml_dtypes.bfloat16


def test_an_exporter_of_dlpack(rng: np.random.Generator) -> None:
    class Exporter:
        def __init__(self, x: Any) -> None:
            self.x = x

        def __dlpack__(self, **options: Any) -> Any:
            return self.x.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self.x.__dlpack_device__()

    q, k, v, _ = inputs(rng, 12, 12)
    cu = offsets([3, 9])
    out = cupyflash.attention_varlen(*map(Exporter, (q, k, v, cu)))
    np.testing.assert_array_equal(out, cupyflash.attention_varlen(q, k, v, cu))


# --- pack and unpack --------------------------------------------------------------------------------------------------------------------


def parts(rng: np.random.Generator, lengths: Any = (3, 0, 1, 7), dtype: str = "float32") -> list[Any]:
    return [rng.standard_normal((n, 2, 8)).astype(dtype) for n in lengths]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int64"])
def test_packing_and_back(rng: np.random.Generator, dtype: str) -> None:
    sequences = parts(rng, dtype=dtype)
    packed, cu_seqlens = cupyflash.pack(sequences)
    assert (packed.shape, packed.dtype) == ((11, 2, 8), np.dtype(dtype))
    assert cu_seqlens.dtype == np.int32
    np.testing.assert_array_equal(cu_seqlens, [0, 3, 3, 4, 11])
    back = cupyflash.unpack(packed, cu_seqlens)
    for x, y in zip(back, sequences, strict=True):
        np.testing.assert_array_equal(x, y)
    back[3][...] = 5
    assert (packed[4:] == 5).all()  # views
    for inside, x in zip(cupyflash.unpack(packed, np.array([2, 3, 10])), (packed[2:3], packed[3:10]), strict=True):
        np.testing.assert_array_equal(inside, x)


def test_packing_strided_and_flat_arrays(rng: np.random.Generator) -> None:
    whole = rng.standard_normal((9, 3, 8))
    packed, cu_seqlens = cupyflash.pack((whole[::-2, 1:], whole[:2, :2]))
    np.testing.assert_array_equal(packed, np.concatenate([whole[::-2, 1:], whole[:2, :2]]))
    tokens, _ = cupyflash.pack([np.arange(3), np.arange(2)])
    np.testing.assert_array_equal(tokens, [0, 1, 2, 0, 1])
    np.testing.assert_array_equal(cu_seqlens, [0, 5, 7])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_packing_torch_tensors(rng: np.random.Generator, dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed; pip install torch")
    sequences = [torch.from_numpy(x).to(getattr(torch, dtype)) for x in parts(rng)]
    packed, cu_seqlens = cupyflash.pack(sequences)
    assert (type(packed), packed.dtype, cu_seqlens.dtype) == (torch.Tensor, sequences[0].dtype, torch.int32)
    assert cu_seqlens.tolist() == [0, 3, 3, 4, 11]
    out = cupyflash.attention_varlen(packed, packed, packed, cu_seqlens)
    for x, y, alone in zip(cupyflash.unpack(packed, cu_seqlens), sequences, cupyflash.unpack(out, cu_seqlens.numpy()), strict=True):
        assert torch.equal(x, y)
        assert x.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()
        torch.testing.assert_close(alone, cupyflash.attention(y, y, y))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_packing_jax_arrays(rng: np.random.Generator, dtype: str) -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed; pip install jax")
    sequences = [jax.numpy.asarray(x, dtype) for x in parts(rng)]
    packed, cu_seqlens = cupyflash.pack(sequences)
    assert isinstance(packed, jax.Array)
    assert isinstance(cu_seqlens, jax.Array)
    assert (packed.dtype, cu_seqlens.dtype) == (sequences[0].dtype, np.int32)
    assert packed.devices() == cu_seqlens.devices() == sequences[0].devices()
    for x, y in zip(cupyflash.unpack(packed, cu_seqlens), sequences, strict=True):
        assert isinstance(x, jax.Array)
        np.testing.assert_array_equal(x, y)


def test_what_pack_and_unpack_refuse(rng: np.random.Generator) -> None:
    x = np.ones((4, 2, 8), F32)
    cases: list[tuple[Any, str, Any]] = [
        (ArgumentError, "sequences is empty: there must be at least one array", lambda: cupyflash.pack([])),
        (ArgumentError, r"sequences\[1\] is a builtins.list", lambda: cupyflash.pack([x, [1]])),
        (ShapeError, r"sequences\[1\] has shape \(4, 1, 8\) and sequences\[0\] \(4, 2, 8\)", lambda: cupyflash.pack([x, x[:, :1]])),
        (ShapeError, r"sequences\[0\] has shape \(\)", lambda: cupyflash.pack([np.ones(())])),
        (DtypeError, r"sequences\[2\] is float64 and sequences\[0\] is float32", lambda: cupyflash.pack([x, x, x.astype(float)])),
        (ArgumentError, "cu_seqlens is a builtins.list", lambda: cupyflash.unpack(x, [0, 4])),
        (ShapeError, r"cu_seqlens holds \[0, 3, 2\]: offsets must not decrease", lambda: cupyflash.unpack(x, np.array([0, 3, 2]))),
        (ShapeError, r"cu_seqlens holds \[0, 5\]: .* lie in 0 to 4", lambda: cupyflash.unpack(x, np.array([0, 5]))),
        (ShapeError, r"cu_seqlens holds \[-1, 4\]", lambda: cupyflash.unpack(x, np.array([-1, 4]))),
        (ShapeError, r"cu_seqlens has shape \(0,\)", lambda: cupyflash.unpack(x, CU[:0])),
        (DtypeError, r"cu_seqlens is float32: it must be int32 or int64", lambda: cupyflash.unpack(x, CU.astype(F32))),
        (ShapeError, r"packed has no axis", lambda: cupyflash.unpack(np.ones(()), CU)),
    ]  # fmt: skip
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            call()
    many = np.broadcast_to(np.zeros((), np.int8), (2**30, 1))  # no memory of its own
    with pytest.raises(ShapeError, match="2147483648 tokens in all: offsets of int32 end"):
        cupyflash.pack([many, many])


# --- how it runs -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cpus", [1, 2, 5])
def test_results_do_not_depend_on_the_number_of_threads(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, cpus: int) -> None:
    import threadpoolctl

    lengths = [1100, 1, 0, 300, 300, *rng.integers(1, 9, 200), 513]
    cu = offsets(lengths)
    arrays = inputs(rng, cu[-1], cu[-1])
    options: dict[str, Any] = {"causal": True, "alibi_slopes": np.full((len(lengths), 4), 0.01, F32), "sink": np.ones(4, F32)}
    out, lse, expected = compute(*arrays, cu, **options)
    monkeypatch.setattr(host, "_num_cpus", lambda: cpus)
    with threadpoolctl.threadpool_limits(1, user_api="blas"):  # one CPU runs tiles in turn, with BLAS as it is
        again, same_lse, grads = compute(*arrays, cu, **options)
    for got, want in zip((again, same_lse, *grads), (out, lse, *expected), strict=True):
        np.testing.assert_array_equal(got, want)


def test_many_sequences_share_one_pool(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a thread takes many short ones at a time, and long ones tile by tile."""
    pools: list[int] = []
    taken: list[int] = []

    class Pool(concurrent.futures.ThreadPoolExecutor):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            pools.append(0)
            super().__init__(*arguments, **options)

        def map(self, compute: Any, some: Any) -> Any:  # type: ignore[override]
            some = list(some)
            taken.append(len(some))
            return super().map(compute, some)

    monkeypatch.setattr(concurrent.futures, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(host, "_num_cpus", lambda: 3)
    cu = offsets([600, *rng.integers(1, 30, 2000)])
    q, k, v, dout = inputs(rng, cu[-1], cu[-1])
    out, lse, _ = cupyflash.attention_varlen(q, k, v, cu, return_lse=True)
    assert len(pools) == 1
    assert 100 < sum(taken) < 1000
    taken.clear()
    cupyflash.attention_backward(dout, q, k, v, out, lse, cu_seqlens_q=cu)
    assert len(pools) == 2
    assert len(taken) == 3  # blocks of keys of the longest
    assert taken[1] < 20


def test_a_failure_in_a_thread_arrives(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise MemoryError

    cu = offsets([1100, 3])
    q, k, v, dout = inputs(rng, 1103, 1103)
    out, lse, _ = cupyflash.attention_varlen(q, k, v, cu, return_lse=True)
    monkeypatch.setattr(host, "_num_cpus", lambda: 2)
    monkeypatch.setattr(host, "score_step", fails)
    with pytest.raises(MemoryError):
        cupyflash.attention_varlen(q, k, v, cu)
    with pytest.raises(MemoryError):
        cupyflash.attention_backward(dout, q, k, v, out, lse, cu_seqlens_q=cu)


def test_equal_neighbours_are_one_batch() -> None:
    x = np.zeros((30, 1, 4), F32)
    p, _ = problem(sequences=6)
    for lengths_q, lengths_k, sizes in (
        ([2] * 6, [3] * 6, [6]),
        ([2, 2, 1, 1, 1, 3], [2] * 6, [2, 3, 1]),
        ([0] * 6, [2, 2, 2, 1, 1, 2], [3, 2, 1]),
    ):
        a = Operands(x[None], x[None], x[None], x[None], cu_seqlens_q=offsets(lengths_q), cu_seqlens_k=offsets(lengths_k))
        found = host.batches(p._replace(seqlen_q=30, seqlen_k=30), a)
        assert [batch.p.batch for batch in found] == sizes
        for batch in found:
            assert batch.a.q.shape == (batch.p.batch, lengths_q[batch.first], 1, 4)
            assert np.shares_memory(batch.a.k, x)


def test_lengths_are_never_below_zero() -> None:
    p, x = problem(sequences=4)[0], np.zeros((12, 1, 4), F32)
    cu = np.array([2, 9, 4, 99, 5], np.int32)
    a = Operands(x[None], x[None], x[None], x[None], cu_seqlens_q=cu, cu_seqlens_k=cu)
    found = host.batches(p._replace(seqlen_q=12, seqlen_k=12), a)
    assert [(batch.first_row, batch.p.seqlen_q, batch.p.seqlen_k) for batch in found] == [(2, 7, 7), (9, 0, 0), (4, 8, 8), (12, 0, 0)]


def test_any_strides_and_directions(rng: np.random.Generator) -> None:
    cu = offsets([7, 7, 6])
    agrees(*[x[::-2] for x in inputs(rng, 40, 40)], cu, causal=True)
    agrees(*[x[:, ::-1] for x in inputs(rng, 20, 20)], cu, causal=True)
    dout, *arrays = (x[2] for x in np.broadcast_arrays(*[np.stack([x] * 3) for x in inputs(rng, 20, 20, (2, 2))]))
    agrees(*arrays, dout, cu)


def test_kf_059_065_tokens_past_2_to_31_elements(rng: np.random.Generator) -> None:
    arrays = inputs(rng, 3, 3, (2, 2), (8, 8), "float16")
    apart = np.empty(2**31 + 4096, np.float16)  # pages that are not touched cost nothing
    far = np.lib.stride_tricks.as_strided(apart, arrays[0].shape, ((2**30 + 512) * 2, 16, 2))
    cu = offsets([1, 2])
    expected = compute(*arrays, cu)
    for n in range(4):
        far[...] = arrays[n]
        all_same(compute(*[far if m == n else x for m, x in enumerate(arrays)], cu), expected)


def test_no_warning_of_numpy_reaches_the_caller(rng: np.random.Generator) -> None:
    q, k, v, dout = inputs(rng, 8, 8, dtype="float16")
    k[0], v[1] = np.nan, np.inf  # warnings are errors in every test
    compute(q, k, v, dout, offsets([3, 4]), sink=np.full(4, -np.inf, F32), causal=True)


def test_examples_of_the_docstrings() -> None:
    for module, at_least in ((packing, 4), (api, 6)):
        finder = doctest.DocTestFinder()
        names = ("attention_varlen", "pack", "unpack")
        tests = [test for test in finder.find(module) if test.name.rpartition(".")[2] in names]
        results = [doctest.DocTestRunner().run(test) for test in tests]
        assert sum(result.attempted for result in results) >= at_least
        assert not any(result.failed for result in results)
