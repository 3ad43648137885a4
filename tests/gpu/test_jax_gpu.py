"""cupyflash.jax on a GPU: right under XLA's transformations, in order on its stream, in its CUDA graphs, and quick on the host."""

from __future__ import annotations

import concurrent.futures
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / "unit")]
cupy = pytest.importorskip("cupy", reason="CuPy is not installed; pip install 'cupyflash[cuda13]'")
jax = pytest.importorskip("jax", reason="JAX is not installed; pip install jax")

import jax.numpy as jnp  # noqa: E402
from judge import judge, standard_attention, standard_gradients  # noqa: E402

import cupyflash  # noqa: E402
import cupyflash.jax as subject  # noqa: E402
from cupyflash import ShapeError, reference  # noqa: E402

pytestmark = pytest.mark.gpu

SQ, SK = 70, 130
NAMES = ("q", "k", "v", "bias", "alibi_slopes", "sink")


@pytest.fixture(autouse=True)
def on_a_gpu() -> None:
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX has no GPU; pip install 'jax[cuda13]'")


@pytest.fixture(params=[False, True], ids=["callbacks", "command_buffers"])
def command_buffers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(subject, "command_buffers", request.param)
    return bool(request.param)


@pytest.fixture
def callbacks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The stream of each callback that runs."""
    seen: list[int] = []
    whole = subject.arrays.in_xla

    def counted(*args: Any) -> None:
        seen.append(args[-1])
        whole(*args)

    monkeypatch.setattr(subject.arrays, "in_xla", counted)
    return seen


def tell(what: str) -> None:
    """For who reads the output: `pytest -s`."""
    sys.stdout.write(f"\n{what}\n")


def make(rng: np.random.Generator, dtype: Any, dim: int = 64) -> dict[str, Any]:
    shapes = {"q": (2, SQ, 4, dim), "k": (2, SK, 2, dim), "v": (2, SK, 2, dim)}
    return {n: np.asarray(jnp.asarray(rng.standard_normal(shape), dtype)) for n, shape in shapes.items()}


def options(rng: np.random.Generator) -> dict[str, dict[str, Any]]:
    return {
        "none": {},
        "causal": {"causal": True},
        "every": {
            "causal": True,
            "window_size": (90, 0),
            "softcap": 20.0,
            "bias": rng.standard_normal((4, SQ, SK)).astype(np.float32),
            "mask": rng.random((2, 1, 1, SK)) < 0.8,
            "alibi_slopes": rng.uniform(0.01, 0.3, (2, 4)).astype(np.float32),
            "sink": rng.standard_normal(4).astype(np.float32),
            "seqused_k": np.array([SK, 77], np.int32),
        },
    }


def placed(given: dict[str, Any]) -> dict[str, Any]:
    return {n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in given.items()}


def call(given: dict[str, Any], attention: Callable[..., Any] = subject.attention, **more: Any) -> Any:
    rest = {n: x for n, x in given.items() if n not in "qkv"}
    return attention(given["q"], given["k"], given["v"], **rest, **more)


def gradients(given: dict[str, Any], dout: Any, attention: Callable[..., Any] = subject.attention, **more: Any) -> Callable[..., Any]:
    fixed = {n: x for n, x in given.items() if n not in NAMES}
    return jax.grad(lambda wanted: (call({**wanted, **fixed}, attention, **more) * dout).sum().astype(jnp.float32))


def wanted(given: dict[str, Any]) -> dict[str, Any]:
    return {n: x for n, x in given.items() if n in NAMES}


@pytest.mark.parametrize("which", ["none", "causal", "every"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_forward_and_gradients_under_jit(rng: np.random.Generator, dtype: str, which: str, command_buffers: bool) -> None:
    given = make(rng, dtype) | options(rng)[which]
    there = placed(given)
    out = jax.jit(lambda x: call(x | {n: o for n, o in there.items() if n not in x}))(wanted(there))
    exact = np.dtype(given["q"].dtype)
    judge(out, call(given, reference.attention), call(given, standard_attention, dtype=exact)[0], dtype=exact, name=which)
    dout = np.asarray(jnp.asarray(rng.standard_normal(out.shape) / 4, dtype))  # a slope's gradient adds up all of it, and is near 0
    grads = jax.jit(gradients(there, dout))(wanted(there))
    arrays, rest = [given[n] for n in "qkv"], {n: x for n, x in given.items() if n not in "qkv"}
    expected = reference.attention_backward(dout, *arrays, **rest)
    plain = standard_gradients(dout, *arrays, dtype=exact, **rest)
    for n, x in grads.items():
        assert x.dtype == given[n].dtype
        judge(x, getattr(expected, f"d{n}"), plain[n], dtype=exact, name=f"{which} d{n}", kind="gradient")


def test_eager_calls_land_in_xla_and_give_the_bits_of_cupy(rng: np.random.Generator, callbacks: list[int]) -> None:
    given = make(rng, "float16")
    out, lse, _ = cupyflash.attention(*placed(given).values(), causal=True, return_lse=True)
    jax.block_until_ready(out)
    assert len(callbacks) == 1
    mine = cupyflash.attention(*[cupy.asarray(x) for x in given.values()], causal=True, return_lse=True)
    np.testing.assert_array_equal(out, cupy.asnumpy(mine.out))
    np.testing.assert_array_equal(lse, cupy.asnumpy(mine.lse))


def test_deterministic_gradients_have_the_same_bits(rng: np.random.Generator) -> None:
    given = placed(make(rng, "bfloat16"))
    run = jax.jit(gradients(given, 1, deterministic=True))
    first = run(given)
    for _ in range(5):
        for n, x in run(given).items():
            np.testing.assert_array_equal(x, first[n])


def test_float64_and_wide_results(rng: np.random.Generator) -> None:
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        given = make(rng, "float64")
        grads = jax.jit(gradients(placed(given), 1))(placed(given))
        expected = reference.attention_backward(np.ones((2, SQ, 4, 64)), *given.values())
        for n, x in grads.items():
            np.testing.assert_allclose(x, getattr(expected, f"d{n}"), rtol=1e-10, atol=1e-11)
    assert call(placed(make(rng, "bfloat16")), out_dtype="float32").dtype == "float32"


@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
def test_vmap_is_one_call(rng: np.random.Generator, layout: str, callbacks: list[int]) -> None:
    given = {n: jnp.asarray(rng.standard_normal((3, *np.moveaxis(x, 0, layout.index("b")).shape)), "float16") for n, x in
             make(rng, "float16").items()}  # fmt: skip
    out = jax.jit(jax.vmap(lambda x: call(x, layout=layout)))(given)
    jax.block_until_ready(out)
    assert len(callbacks) == 1
    grads = jax.jit(jax.vmap(gradients(given, 1, layout=layout)))(given)
    for n in range(3):
        alone = {name: x[n] for name, x in given.items()}
        np.testing.assert_array_equal(out[n], call(alone, layout=layout))
        for name, x in gradients(alone, 1, layout=layout)(alone).items():
            np.testing.assert_allclose(np.float32(grads[name][n]), np.float32(x), rtol=1e-2, atol=1e-2)


def test_scan_and_checkpoint(rng: np.random.Generator, command_buffers: bool) -> None:
    q, k, v = (jnp.asarray(rng.standard_normal((4, 2, 64, 4, 64)), "float32") for _ in range(3))

    def loss(attend: Callable[..., Any], q: Any, k: Any, v: Any) -> Any:
        step = jax.checkpoint(lambda x, kv: (attend(x, *kv), None))
        return (jax.lax.scan(step, q[0], (k, v))[0] ** 2).sum()

    ours, theirs = (
        jax.jit(jax.grad(lambda *a, f=f: loss(f, *a), (0, 1, 2)))(q, k, v) for f in (cupyflash.attention, _in_float64)
    )  # fmt: skip
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


def _in_float64(q: Any, k: Any, v: Any) -> Any:
    """Without TF32, which XLA takes for float32 by default."""
    with jax.default_matmul_precision("highest"):
        scores = jnp.einsum("bshd,bthd->bhst", q, k) / q.shape[-1] ** 0.5
        return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores, axis=-1), v)


def test_packed_sequences_and_their_gradients(rng: np.random.Generator, command_buffers: bool) -> None:
    q, k, v = (jnp.asarray(rng.standard_normal((200, heads, 64)), "bfloat16") for heads in (8, 2, 2))
    dout = jnp.asarray(rng.standard_normal((200, 8, 64)), "bfloat16")

    def loss(q: Any, k: Any, v: Any, cu: Any) -> Any:
        return (subject.attention_varlen(q, k, v, cu, causal=True) * dout).sum().astype("float32")

    run = jax.jit(jax.grad(loss, (0, 1, 2)))
    for offsets in ([0, 60, 60, 130, 200], [0, 1, 2, 150, 199]):
        cu = np.array(offsets, np.int32)
        grads = [np.float32(x) for x in run(q, k, v, cu)]
        on_host = [np.asarray(x) for x in (q, k, v)]
        _, pullback = cupyflash.attention_vjp(*on_host, cu_seqlens_q=cu, causal=True)
        for got, want in zip(grads, pullback(np.asarray(dout)), strict=False):
            np.testing.assert_allclose(got, np.float32(want), rtol=3e-2, atol=3e-2)


def test_decode_loop(rng: np.random.Generator, command_buffers: bool) -> None:
    steps, dtype = 6, "bfloat16"
    q, k, v = (np.asarray(jnp.asarray(rng.standard_normal((steps, 2, 1, heads, 64)), dtype)) for heads in (8, 2, 2))
    caches = [np.array(jnp.array(rng.standard_normal((2, 300, 2, 64)), dtype)) for _ in range(2)]
    lengths = np.array([250, 17], np.int32)

    def step(carry: Any, new: Any) -> Any:
        caches, lengths = carry
        out, *caches = cupyflash.attention_with_kvcache(new[0], *caches, cache_seqlens=lengths, k_new=new[1], v_new=new[2])
        return (caches, lengths + 1), out

    decode = jax.jit(lambda caches, lengths, *new: jax.lax.scan(step, (caches, lengths), new), donate_argnums=0)
    there = [jnp.asarray(x) for x in caches]
    before = [x.unsafe_buffer_pointer() for x in there]
    (got, _), outs = decode(there, lengths, q, k, v)
    tell(f"caches in place: {[x.unsafe_buffer_pointer() for x in got] == before}")
    for n in range(steps):
        out = cupyflash.attention_with_kvcache(q[n], *caches, cache_seqlens=lengths + n, k_new=k[n], v_new=v[n])
        np.testing.assert_allclose(np.float32(outs[n]), np.float32(out), rtol=2e-2, atol=2e-2)
    for x, want in zip(got, caches, strict=True):
        np.testing.assert_array_equal(x, want)


def test_donated_caches_are_written_in_place(rng: np.random.Generator) -> None:
    q, k, v = (jnp.asarray(rng.standard_normal((2, 1, heads, 64)), "float16") for heads in (8, 2, 2))
    caches = [jnp.zeros((2, 300, 2, 64), "float16") for _ in range(2)]
    before = [x.unsafe_buffer_pointer() for x in caches]
    lengths = jnp.array([4, 299])
    _, *caches = jax.jit(
        lambda caches, q, k, v, n: subject.attention_with_kvcache(q, *caches, cache_seqlens=n, k_new=k, v_new=v), donate_argnums=0
    )(caches, q, k, v, lengths)
    assert [x.unsafe_buffer_pointer() for x in caches] == before
    np.testing.assert_array_equal(caches[0][0, 4], k[0, 0])
    np.testing.assert_array_equal(caches[1][1, 299], v[1, 0])


@pytest.mark.parametrize("cache_dtype", ["int8", "float8_e4m3fn"])
def test_caches_of_8_bits_in_pages(rng: np.random.Generator, cache_dtype: str) -> None:
    q, k, v = (np.asarray(jnp.asarray(rng.standard_normal((2, 1, heads, 64)), "bfloat16")) for heads in (8, 2, 2))
    pages = [np.array(jnp.asarray(rng.integers(-100, 100, (8, 16, 2, 64)), cache_dtype)) for _ in range(2)]
    more: dict[str, Any] = {"page_table": np.array([[3, 1, 7], [0, 2, 5]], np.int32), "cache_seqlens": np.array([40, 16], np.int32)}
    more |= {"k_descale": 0.02, "v_descale": np.array([0.01, 0.03], np.float32), "k_new": k, "v_new": v}
    there = placed(more)
    out, *got = jax.jit(lambda q, *pages: subject.attention_with_kvcache(q, *pages, **there))(q, *pages)
    expected = cupyflash.attention_with_kvcache(q, *pages, **more)
    np.testing.assert_allclose(np.float32(out), np.float32(expected), rtol=2e-2, atol=2e-2)
    for x, want in zip(got, pages, strict=True):
        assert np.asarray(x).tobytes() == want.tobytes()


def test_calls_are_in_the_order_of_xla(rng: np.random.Generator, command_buffers: bool) -> None:
    """What comes before is slow and what comes after writes where the inputs were: stale or early reads would show."""
    x = jnp.asarray(rng.standard_normal((4096, 4096)), "float32")
    base = [jnp.asarray(rng.standard_normal((1, 512, 8, 64)), "float16") for _ in range(3)]

    def slow(x: Any) -> Any:
        for _ in range(4):
            x = jnp.tanh(x @ x)
        return x

    @jax.jit
    def run(x: Any, q: Any, k: Any, v: Any) -> Any:
        late = (slow(x)[0, 0] * 0 + 1).astype("float16")
        out = subject.attention(q * late, k * late, v * late)
        return subject.attention(out * late, k - late, v + late)

    expected = np.asarray(run(x, *base))
    for _ in range(20):
        np.testing.assert_array_equal(run(x, *base), expected)
    for _ in range(20):  # eager: the inputs are dropped at once
        late = jax.jit(lambda x: (slow(x)[0, 0] * 0 + 1).astype("float16"))(x)
        out = subject.attention(*(y * late for y in base))
        out = subject.attention(out * late, base[1] - late, base[2] + late)
        np.testing.assert_allclose(np.float32(out), np.float32(expected), atol=2e-3)


def test_command_buffers_replay_and_stay_right(rng: np.random.Generator, command_buffers: bool, callbacks: list[int]) -> None:
    """Training steps whose inputs change: with command buffers, XLA's graphs replay without Python, also into workspaces of theirs."""
    layers = 4
    w = jnp.asarray(rng.standard_normal((layers, 64, 64)) / 8, "float16")

    def loss(w: Any, q: Any, k: Any, v: Any) -> Any:
        for n in range(layers):
            q = subject.attention(q @ w[n], k, v, causal=True)
        return (q.astype("float32") ** 2).sum()

    step = jax.jit(jax.value_and_grad(loss))
    batches = [[jnp.asarray(rng.standard_normal((1, 256, 4, 64)), "float16") for _ in range(3)] for _ in range(5)]
    expected = [jax.tree.map(np.asarray, step(w, *batch)) for batch in batches]
    first = len(callbacks)
    for n in range(40):
        value, grad = step(w, *batches[n % 5])
        np.testing.assert_allclose(value, expected[n % 5][0], rtol=1e-5)
        np.testing.assert_allclose(np.float32(grad), np.float32(expected[n % 5][1]), rtol=2e-2, atol=2e-2)
    tell(f"{len(callbacks)} callbacks in 45 steps of {2 * layers} calls, {first} of them in the first 5")
    if command_buffers:
        assert len(callbacks) < 45 * 2 * layers
    else:
        assert len(callbacks) == 45 * 2 * layers


def test_kernels_are_compiled_when_jax_traces(rng: np.random.Generator, callbacks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    given = placed(make(rng, "float16", 48))
    jax.jit(lambda x: call(x, softcap=7.0, window_size=(5, 3))).lower(given)
    from cupyflash import jit

    monkeypatch.setattr(jit, "_load", lambda *a: pytest.fail("loaded in a callback"))
    jax.block_until_ready(jax.jit(lambda x: call(x, softcap=7.0, window_size=(5, 3)))(given))
    assert len(callbacks) == 1


def test_errors_come_when_jax_traces(rng: np.random.Generator, callbacks: list[int]) -> None:
    q, k, v = placed(make(rng, "float16")).values()
    with pytest.raises(ShapeError, match="v has 2 heads and k has 1"):
        jax.eval_shape(subject.attention, q, k[:, :, :1], v)
    with pytest.raises(ShapeError, match="v has 2 heads and k has 1"):
        cupyflash.attention(q, k[:, :, :1], v)
    assert not callbacks


def test_threads(rng: np.random.Generator) -> None:
    given = [placed(make(rng, "float16")) for _ in range(4)]
    expected = [np.asarray(call(x)) for x in given]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for n, out in enumerate(pool.map(lambda n: np.asarray(call(given[n % 4])), range(80))):
            np.testing.assert_array_equal(out, expected[n % 4])


def test_two_gpus(rng: np.random.Generator) -> None:
    if len(jax.devices()) < 2:
        pytest.skip("one GPU; two are needed")
    from jax.sharding import PartitionSpec as P

    given = placed(make(rng, "float16"))
    expected = np.asarray(call(given))
    second = {n: jax.device_put(x, jax.devices()[1]) for n, x in given.items()}
    np.testing.assert_array_equal(call(second), expected)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    run = jax.jit(jax.shard_map(subject.attention, mesh=mesh, in_specs=(P("x"),) * 3, out_specs=P("x")))
    for _ in range(5):
        np.testing.assert_array_equal(run(*given.values()), expected)
    grads = jax.jit(jax.grad(lambda q, k, v: run(q, k, v).sum().astype("float32"), (0, 1, 2)))(*given.values())
    for got, want in zip(grads, gradients(given, 1)(given).values(), strict=True):
        np.testing.assert_allclose(np.float32(got), np.float32(want), rtol=1e-2, atol=1e-2)
