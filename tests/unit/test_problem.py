"""Bad arguments: one clear error that names the argument, what it was, what is needed and the way out, before anything is written."""

from __future__ import annotations

import inspect
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError, DeviceError, DtypeError, ShapeError
from cupyflash.problem import AttentionProblem, CacheOperands, Operands, cached, dense, pack_heads


def call(q: Any = (2, 5, 4, 8), k: Any = (2, 7, 2, 8), v: Any = None, dtype: Any = np.float32, **options: Any) -> Any:
    arrays = [np.ones(x, dtype) if isinstance(x, tuple) else x for x in (q, k, v or k)]
    return cupyflash.attention(*arrays, **options)


F32 = np.float32
CASES: list[tuple[type[Exception], str, dict[str, Any]]] = [
    # shapes
    (ShapeError, r"k has batch 3 and q has 2: they must be equal", {"k": (3, 7, 2, 8)}),
    (ShapeError, r"k has head_dim 16 and q has 8", {"k": (2, 7, 2, 16)}),
    (ShapeError, r"v has seqlen 6 and k has 7", {"v": (2, 6, 2, 8)}),
    (ShapeError, r"v has 4 heads and k has 2", {"v": (2, 7, 4, 8)}),
    (ShapeError, r"v has head_dim 0: it must be at least 1", {"v": (2, 7, 2, 0)}),
    (ShapeError, r"k has 0 heads and q has 4: num_heads_q must be a multiple", {"k": (2, 7, 0, 8)}),
    (ShapeError, r"q has shape \(5, 8\): it must have 4 axes in the order 'bshd', or 3", {"q": (5, 8)}),
    (ShapeError, r"k has 3 axes and q has 4", {"k": (7, 2, 8)}),
    (ShapeError, r"bias has shape \(5, 6\): it must broadcast to \(B, Hq, Sq, Sk\) = \(2, 4, 5, 7\)", {"bias": np.ones((5, 6), F32)}),
    (ShapeError, r"mask has shape \(2, 7\).*mask\[:, None, None, :\].*seqused_k", {"mask": np.ones((2, 7), bool)}),
    (ShapeError, r"bias has shape \(1, 2, 4, 5, 7\)", {"bias": np.ones((1, 2, 4, 5, 7), F32)}),
    (ShapeError, r"sink has shape \(2,\): it must have shape \(Hq,\) = \(4,\)", {"sink": np.ones(2, F32)}),
    (ShapeError, r"seqused_k has shape \(3,\): it must have shape \(B,\) = \(2,\)", {"seqused_k": np.ones(3, np.int32)}),
    (ShapeError, r"out has seqlen 7 and the result has 5", {"out": np.ones((2, 7, 4, 8), F32)}),
    # values
    (ShapeError, r"window_size=\(-1, -3\) has a distance below 0: only -1 or None means unlimited", {"window_size": (-1, -3)}),
    (ShapeError, r"softcap=0.0 must be greater than 0; None means", {"softcap": 0}),
    (ShapeError, r"softcap=-2.0 must be greater", {"softcap": -2.0}),
    (ShapeError, r"softmax_scale=nan must be finite", {"softmax_scale": float("nan")}),
    # dtypes
    (DtypeError, r"q is int32: it must be one of float16, bfloat16, float32, float64", {"dtype": np.int32}),
    (DtypeError, r"q is complex64", {"dtype": np.complex64}),
    (DtypeError, r"q is float32 in foreign byte order", {"dtype": ">f4"}),
    (DtypeError, r"k is float16 and q is float32: q, k and v must have one dtype", {"k": np.ones((2, 7, 2, 8), np.float16)}),
    (DtypeError, r"mask is float32: it must be bool.*use bias=", {"mask": np.ones((5, 7), F32)}),
    (DtypeError, r"bias is bool: it must be float32; for True/False use mask=", {"bias": np.ones((5, 7), bool)}),
    (DtypeError, r"bias is float16: it must be bfloat16 or float32", {"bias": np.ones((5, 7), np.float16), "dtype": ml_dtypes.bfloat16}),
    (DtypeError, r"alibi_slopes is float64: it must be float32", {"alibi_slopes": np.ones(4)}),
    (DtypeError, r"seqused_k is int64: it must be int32", {"seqused_k": np.ones(2, np.int64)}),
    (DtypeError, r"out is float16: it must be the dtype of q, float32; out_dtype='float16'", {"out": np.ones((2, 5, 4, 8), np.float16)}),
    (DtypeError, r"out_dtype is int8: it must be one of", {"out_dtype": "int8"}),
    # arguments
    (ArgumentError, r"window_size=128 is ambiguous: \(127, 0\) keeps 128 keys.*\(128, 0\) keeps 129", {"window_size": 128}),
    (ArgumentError, r"window_size=\(1, 2, 3\) must be a pair", {"window_size": (1, 2, 3)}),
    (ArgumentError, r"window_size=\(1.5, 0\) must be a pair", {"window_size": (1.5, 0)}),
    (ArgumentError, r"causal='topleft' is unknown: it is True, False, 'bottom_right'.*'top_left'", {"causal": "topleft"}),
    (ArgumentError, r"causal=2 is unknown", {"causal": 2}),
    (ArgumentError, r"layout='hsbd' is unknown: it is one of 'bshd', 'bhsd', 'sbhd'", {"layout": "hsbd"}),
    (ArgumentError, r"softcap is a ndarray: it must be a float", {"softcap": np.ones(3)}),
    (ArgumentError, r"softmax_scale is a str: it must be a float", {"softmax_scale": "0.1"}),
    (ArgumentError, r"q is a builtins.list: it must be a CuPy, PyTorch, JAX or NumPy array.*numpy.asarray\(q\)", {"q": [[1.0]]}),
    (ArgumentError, r"k is a builtins.NoneType", {"k": None, "v": (2, 7, 2, 8)}),
    (ArgumentError, r"out_dtype=Ellipsis is no dtype", {"out_dtype": ...}),
    (DeviceError, r"stream= was given and the arrays are in host memory", {"stream": 0}),
]


@pytest.mark.parametrize(("error", "message", "options"), CASES, ids=[f"{e.__name__}-{m[:40]}" for e, m, _ in CASES])
def test_error_names_the_argument_and_the_way_out(error: type[Exception], message: str, options: dict[str, Any]) -> None:
    """KF-015, KF-025, KF-129 and their kind."""
    out = options.get("out")
    before = None if out is None else out.copy()
    with pytest.raises(error, match=message) as caught:
        call(**options)
    assert isinstance(caught.value, cupyflash.CupyflashError)
    assert "\n" not in str(caught.value)
    if out is not None:
        np.testing.assert_array_equal(out, before)


def test_a_wrong_option_is_refused_also_after_a_right_one_that_equals_it() -> None:
    """Calls are cached by their arguments, and 1 == True."""
    call(causal=True)
    with pytest.raises(ArgumentError, match="causal=1 is unknown"):
        call(causal=1)


def test_errors_are_the_builtins_a_numpy_user_catches() -> None:
    bases = {
        ShapeError: ValueError,
        DtypeError: TypeError,
        ArgumentError: TypeError,
        DeviceError: ValueError,
        cupyflash.UnsupportedError: NotImplementedError,
        cupyflash.CompileError: RuntimeError,
        cupyflash.LaunchError: RuntimeError,
        cupyflash.StateError: RuntimeError,
        cupyflash.SetupError: ImportError,
    }
    for error, base in bases.items():
        assert issubclass(error, base)
        assert issubclass(error, cupyflash.CupyflashError)


def test_kf_132_options_are_keyword_only() -> None:
    x = np.ones((1, 2, 1, 4), F32)
    with pytest.raises(TypeError, match="positional"):
        cupyflash.attention(x, x, x, True)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("foreign", "ours"),
    [
        ("is_causal", "it is called 'causal' (bottom-right when lengths differ)"),
        ("sm_scale", "it is called 'softmax_scale'"),
        ("scale", "it is called 'softmax_scale'"),
        ("window", "it is called 'window_size'"),
        ("attn_mask", "a bool array is 'mask' (True: may attend), a float one to add is 'bias'"),
        ("key_padding_mask", "'seqused_k'"),
        ("descale_q", "fp8 inputs and their scales are not built yet"),
        ("block_table", "caches are what `cupyflash.attention_with_kvcache` takes"),
        ("dropout", "dropout is not built yet"),
        ("softmax_scal", "did you mean 'softmax_scale'?"),
        ("zzz", "it takes alibi_slopes, bias"),
    ],
)
def test_kf_133_foreign_keywords_name_ours(foreign: str, ours: str) -> None:
    x = np.ones((1, 2, 1, 4), F32)
    with pytest.raises(TypeError) as caught:
        cupyflash.attention(x, x, x, **{foreign: 1})
    assert str(caught.value).startswith(f"attention() has no argument {foreign!r}; ")
    assert ours in str(caught.value)


def test_a_keyword_for_an_array_is_refused_as_well() -> None:
    x = np.ones((1, 2, 1, 4), F32)
    with pytest.raises(TypeError, match=r"attention\(\) has no argument 'v'; it takes alibi_slopes, "):
        cupyflash.attention(x, x, x, v=x)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'v'"):
        cupyflash.attention(x, x, v=x)
    parameters = inspect.signature(cupyflash.attention).parameters
    assert {p.kind for p in parameters.values()} == {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.KEYWORD_ONLY}


def test_foreign_keywords_point_at_arguments_that_exist() -> None:
    import re

    from cupyflash.keywords import FOREIGN

    known = set(inspect.signature(cupyflash.attention).parameters)
    values = {"bshd", "bhsd", "sbhd"}
    for foreign, hint in FOREIGN.items():
        assert foreign not in known
        assert set(re.findall(r"'(\w+)'", hint)) <= known | values


def problem(**options: Any) -> AttentionProblem:
    from cupyflash.arrays import view

    q, k = np.ones((2, 5, 4, 8), F32), np.ones((2, 7, 2, 8), F32)
    return dense(Operands(view(q, "q"), view(k, "k"), view(k, "v")), **options)[0]


def test_equal_attentions_are_equal_problems() -> None:
    assert problem() == problem(window_size=(-1, None)) == problem(window_size=(7, 12)) == problem(softmax_scale=1 / 8**0.5)
    assert problem(causal=True) == problem(window_size=(None, 0)) == problem(causal="bottom_right", window_size=[40, 3])
    assert problem(causal=np.True_) == problem(causal=True)
    assert problem(causal="top_left") != problem(causal=True)
    assert problem(window_size=(6, 11)) != problem()
    assert hash(problem()) == hash(problem())


def test_one_query_sees_to_the_end_of_a_window_on_its_right() -> None:
    from cupyflash.arrays import view

    q, k = np.ones((2, 1, 4, 8), F32), np.ones((2, 7, 2, 8), F32)

    def one(**options: Any) -> AttentionProblem:
        return dense(Operands(view(q, "q"), view(k, "k"), view(k, "v")), **options)[0]

    assert one() == one(causal=True) == one(window_size=(None, 0)) == one(window_size=(9, 3))
    assert one(causal="top_left") != one()
    assert one(window_size=(3, 0)) != one()


def test_heads_of_a_group_become_rows_where_nothing_tells_them_apart() -> None:
    from cupyflash.arrays import view

    q, k = np.arange(2 * 6 * 8, dtype=F32).reshape(2, 1, 6, 8), np.ones((2, 7, 2, 8), F32)
    p, a = dense(Operands(view(q, "q"), view(k, "k"), view(k, "v"), out=view(np.empty_like(q), "out")), causal=True)
    packed, rows = pack_heads(p, a)
    assert (packed.seqlen_q, packed.num_heads_q, packed.num_heads_kv) == (3, 2, 2)
    as_rows = np.lib.stride_tricks.as_strided(q, rows.q.shape, [4 * s for s in rows.q.strides])
    np.testing.assert_array_equal(as_rows, q.reshape(2, 2, 3, 8).swapaxes(1, 2))
    assert rows.out.shape == rows.q.shape
    assert rows.k == a.k
    for told_apart in ({"alibi": True}, {"bias": "float32"}, {"mask": True}, {"sink": "float32"}, {"window_left": 3}, {"seqused_q": True}):
        assert pack_heads(p._replace(**told_apart), a) == (p._replace(**told_apart), a)
    assert pack_heads(p._replace(num_heads_kv=6), a)[1] is a


def test_rows_on_16_byte_boundaries() -> None:
    from cupyflash.arrays import view

    def aligned(shape: tuple[int, ...], dtype: Any, offset: int = 0) -> bool:
        size = int(np.prod(shape))
        raw = np.ones(size + 16 + offset, dtype)
        start = -(raw.ctypes.data // raw.itemsize) % (16 // raw.itemsize) + offset
        x = view(raw[start : start + size].reshape(shape), "q")
        return dense(Operands(x, x, x))[0].aligned16

    assert aligned((1, 3, 2, 8), np.float16)
    assert not aligned((1, 3, 2, 12), np.float16)
    assert aligned((1, 3, 2, 4), F32)
    assert not aligned((1, 3, 2, 4), F32, offset=1)


def test_tensor_maps_describe_rows_on_16_byte_boundaries_of_results_too() -> None:
    """A result that is still to be made has rows without gaps."""
    from cupyflash.arrays import view

    wide = np.zeros((1, 3, 2, 64), np.float16)
    whole, narrow = view(wide, "q"), view(wide[..., :60], "v")
    assert dense(Operands(whole, whole, whole))[0].tensor_maps
    assert not dense(Operands(whole, whole, narrow))[0].tensor_maps
    assert dense(Operands(whole, whole, narrow, out=narrow))[0].tensor_maps

    lengths = view(np.zeros(1, np.int32), "cache_seqlens")

    def over_cache(q: Any, v: Any, **more: Any) -> bool:
        return cached(Operands(q, q, v, out=v), CacheOperands(lengths, **more))[0].attention.tensor_maps

    turned = dict.fromkeys(("rotary_cos", "rotary_sin"), view(np.ones((3, 30), np.float16), "rotary_cos"))
    assert over_cache(whole, narrow)
    assert over_cache(whole, narrow, **turned)
    assert over_cache(narrow, narrow)
    assert not over_cache(narrow, narrow, **turned)  # turned queries are compact
    empty = view(np.zeros((0, 16, 2, 64), np.float16), "k_cache")
    table = view(np.zeros((1, 2), np.int32), "page_table")
    assert not cached(Operands(whole, empty, empty), CacheOperands(lengths, page_table=table))[0].attention.tensor_maps


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd"])
@pytest.mark.parametrize("ndim", [3, 4])
def test_layouts_are_strides_only(rng: np.random.Generator, layout: str, ndim: int) -> None:
    axes = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3), "sbhd": (1, 0, 2, 3)}[layout]
    q, k = rng.standard_normal((2, 5, 4, 8)).astype(F32), rng.standard_normal((2, 7, 2, 8)).astype(F32)
    if ndim == 3:
        axes = {"bshd": (0, 1, 2), "bhsd": (1, 0, 2), "sbhd": (0, 1, 2)}[layout]
        q, k = q[0], k[0]
    expected, lse, _ = cupyflash.attention(q, k, k, causal=True, return_lse=True)
    assert lse.shape == (q.shape[-2], q.shape[-3]) if ndim == 3 else (2, 4, 5)
    out, same_lse, _ = cupyflash.attention(*(x.transpose(axes) for x in (q, k, k)), causal=True, layout=layout, return_lse=True)
    np.testing.assert_array_equal(out, expected.transpose(axes))
    np.testing.assert_array_equal(same_lse, lse)
    batch = [x[None] if ndim == 3 else x for x in (q, k, k)]
    np.testing.assert_array_equal(cupyflash.attention(*batch, causal=True).reshape(q.shape), expected)


@pytest.mark.parametrize("out_dtype", ["float32", np.float16, ml_dtypes.bfloat16, np.dtype("float64")])
def test_out_dtype_in_anyones_words(rng: np.random.Generator, out_dtype: Any) -> None:
    q = rng.standard_normal((1, 5, 2, 8)).astype(np.float16)
    out = cupyflash.attention(q, q, q, out_dtype=out_dtype)
    assert out.dtype == np.dtype(out_dtype)
    np.testing.assert_allclose(out.astype(np.float64), cupyflash.reference.attention(q, q, q), rtol=1e-2, atol=1e-2)


def test_float32_results_of_half_inputs_are_not_rounded_to_half(rng: np.random.Generator) -> None:
    q = rng.standard_normal((1, 50, 2, 8)).astype(np.float16)
    out = cupyflash.attention(q, q, q, out_dtype="float32")
    np.testing.assert_allclose(out, cupyflash.reference.attention(q, q, q), rtol=1e-5, atol=1e-6)


def test_used_lengths_past_the_allocation_are_clamped_and_reported(rng: np.random.Generator, monkeypatch: Any, caplog: Any) -> None:
    q = rng.standard_normal((2, 5, 1, 8)).astype(F32)
    used = np.array([9, -3], np.int32)
    monkeypatch.setenv("CUPYFLASH_DEBUG", "check")
    out = cupyflash.attention(q, q, q, seqused_k=used)
    np.testing.assert_array_equal(out, cupyflash.attention(q, q, q, seqused_k=np.array([5, 0], np.int32)))
    assert "seqused_k holds [9, -3]: lengths are clamped to 0 <= length <= 5" in caplog.text
