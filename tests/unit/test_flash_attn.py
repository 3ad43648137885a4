"""`cupyflash.flash_attn`: each function under its own name and with its own order of arguments, against the formula in float64."""

from __future__ import annotations

import doctest
import inspect
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; pip install torch")

import cupyflash.flash_attn as fa  # noqa: E402
from cupyflash import ArgumentError, DtypeError, ShapeError, UnsupportedError  # noqa: E402

F64 = torch.float64
# What dense and packed functions take after their arrays, in flash_attn 2.8's order.
TAIL = ["dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic", "return_attn_probs"]
SIGNATURES = {
    "flash_attn_func": ["q", "k", "v", *TAIL],
    "flash_attn_varlen_func": [
        *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", *TAIL, "block_table"),
    ],
    "flash_attn_with_kvcache": [
        *("q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx", "cache_leftpad"),
        *("block_table", "softmax_scale", "causal", "window_size", "softcap", "rotary_interleaved", "alibi_slopes", "num_splits"),
        "return_softmax_lse",
    ],
}
DEFAULTS = {
    **dict.fromkeys(("softmax_scale", "alibi_slopes", "block_table", "cache_seqlens", "cache_batch_idx", "cache_leftpad"), None),
    **dict.fromkeys(("causal", "deterministic", "return_attn_probs", "return_softmax_lse"), False),
    **dict.fromkeys(("dropout_p", "softcap"), 0.0),
    "window_size": (-1, -1),
    "rotary_interleaved": True,
    "num_splits": 0,
}


def normal(*shape: int, seed: int = 0, grad: bool = False) -> Any:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed)).requires_grad_(grad)


def ints(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32)


def formula(
    q: Any, k: Any, v: Any, *, scale: Any = None, causal: bool = False, window: Any = (-1, -1), cap: float = 0.0, slopes: Any = None
) -> Any:
    """(out, lse) of one batch (B, S, H, D) by the whole matrix of scores."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if cap:
        scores = cap * torch.tanh(scores / cap)
    i, j = (torch.arange(x.shape[1], device=q.device) for x in (q, k))
    i = i[:, None] + k.shape[1] - q.shape[1]
    if slopes is not None:
        scores = scores - (slopes if slopes.dim() == 2 else slopes[None])[..., None, None].to(q) * (i - j).abs()
    left, right = window
    hidden = (j > i if causal else torch.zeros_like(j > i)) | ((j < i - left) & (left >= 0)) | ((j > i + right) & (right >= 0))
    scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - torch.where(lse.isfinite(), lse, 0)[..., None]).exp()
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse


def close(got: Any, want: Any, bound: float = 1e-11) -> None:
    torch.testing.assert_close(got, want, rtol=bound, atol=bound)


def gradients(results: Any, inputs: list[Any]) -> Any:
    """Of a sum that weighs out and lse by numbers of their own."""
    total = sum((x * normal(*x.shape, seed=9).to(x.device)).sum() for x in results)
    return torch.autograd.grad(total, inputs)


OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"causal": True, "softmax_scale": 0.3}, {"causal": True, "scale": 0.3}),
    ({"window_size": [3, 2], "softcap": -1.0}, {"window": (3, 2)}),
    ({"causal": True, "window_size": (4, -1), "softcap": 1.5, "deterministic": True}, {"causal": True, "window": (4, -1), "cap": 1.5}),
    ({"alibi_slopes": torch.tensor([0.5, 0.1, 0.3, 0.02])}, {"slopes": torch.tensor([0.5, 0.1, 0.3, 0.02])}),
]


@pytest.mark.parametrize(("name", "names"), SIGNATURES.items())
def test_arguments_come_in_the_packages_order_with_its_defaults(name: str, names: list[str]) -> None:
    parameters = inspect.signature(getattr(fa, name)).parameters
    positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == names
    assert {n: parameters[n].default for n in names if n in DEFAULTS} == {n: x for n, x in DEFAULTS.items() if n in names}


@pytest.mark.parametrize(("given", "meant"), OPTIONS)
@pytest.mark.parametrize("lengths", [(11, 11), (5, 13), (7, 3)])
def test_dense(given: dict[str, Any], meant: dict[str, Any], lengths: tuple[int, int]) -> None:
    q, k, v = normal(2, lengths[0], 4, 8, grad=True), *(normal(2, lengths[1], 2, 8, seed=s, grad=True) for s in (1, 2))
    out, lse, dmask = fa.flash_attn_func(q, k, v, **given, return_attn_probs=True)
    want, want_lse = formula(q, k, v, **meant)
    assert dmask is None
    close(out, want)
    close(lse, want_lse)
    assert torch.equal(fa.flash_attn_func(q, k, v, **given), out)
    seen = torch.isfinite(want_lse)  # a gradient through an LSE of -inf is none
    got, wanted = (gradients([o, ls[seen]], [q, k, v]) for o, ls in ((out, lse), (want, want_lse)))
    for g, w in zip(got, wanted, strict=True):
        close(g, w)


@pytest.mark.parametrize(("given", "meant"), OPTIONS)
def test_packed_arguments_are_read_in_place_and_have_one_gradient(given: dict[str, Any], meant: dict[str, Any]) -> None:
    q, kv = normal(2, 9, 4, 8, grad=True), normal(2, 11, 2, 2, 8, seed=1, grad=True)
    got, want = fa.flash_attn_kvpacked_func(q, kv, **given), formula(q, *kv.unbind(2), **meant)[0]
    close(got, want)
    for g, w in zip(gradients([got], [q, kv]), gradients([want], [q, kv]), strict=True):
        close(g, w)
    qkv = normal(2, 9, 3, 4, 8, grad=True)
    got, want = fa.flash_attn_qkvpacked_func(qkv, **given), formula(*qkv.unbind(2), **meant)[0]
    close(got, want)
    close(*(gradients([x], [qkv])[0] for x in (got, want)))
    grouped = normal(2, 9, 8, 8, grad=True)
    got, want = fa.flash_attn_qkvpacked_func(grouped, num_heads_q=4, **given), formula(*grouped.split((4, 2, 2), 2), **meant)[0]
    close(got, want)
    close(*(gradients([x], [grouped])[0] for x in (got, want)))


def apart(q: Any, k: Any, v: Any, lengths_q: list[int], lengths_k: list[int], **meant: Any) -> tuple[Any, Any]:
    sequences = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
    parts = [formula(*(x[None] for x in three), **meant) for three in sequences]
    return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)


@pytest.mark.parametrize(("given", "meant"), OPTIONS)
def test_varlen(given: dict[str, Any], meant: dict[str, Any]) -> None:
    q, k, v = normal(11, 4, 8, grad=True), *(normal(13, 2, 8, seed=s, grad=True) for s in (1, 2))
    out, lse, dmask = fa.flash_attn_varlen_func(q, k, v, ints(0, 3, 3, 11), ints(0, 3, 5, 13), 8, 8, **given, return_attn_probs=True)
    want, want_lse = apart(q, k, v, [3, 0, 8], [3, 2, 8], **meant)
    assert dmask is None
    close(out, want)
    close(lse, want_lse)
    for g, w in zip(gradients([out, lse], [q, k, v]), gradients([want, want_lse], [q, k, v]), strict=True):
        close(g, w)


@pytest.mark.parametrize(("given", "meant"), OPTIONS)
def test_varlen_of_packed_arguments(given: dict[str, Any], meant: dict[str, Any]) -> None:
    offsets = ints(0, 3, 11)
    q, kv, qkv = normal(11, 4, 8, grad=True), normal(11, 2, 2, 8, seed=1, grad=True), normal(11, 3, 4, 8, seed=2, grad=True)
    got = fa.flash_attn_varlen_kvpacked_func(q, kv, offsets, offsets, 8, 8, **given)
    want = apart(q, *kv.unbind(1), [3, 8], [3, 8], **meant)[0]
    close(got, want)
    for g, w in zip(gradients([got], [q, kv]), gradients([want], [q, kv]), strict=True):
        close(g, w)
    got, want = fa.flash_attn_varlen_qkvpacked_func(qkv, offsets, 8, **given), apart(*qkv.unbind(1), [3, 8], [3, 8], **meant)[0]
    close(got, want)
    close(*(gradients([x], [qkv])[0] for x in (got, want)))


def test_every_argument_by_place() -> None:
    """As old code calls: nothing by name."""
    q, k, v = (normal(2, 7, 4, 8, seed=s) for s in range(3))
    slopes, offsets = torch.tensor([0.5, 0.1, 0.3, 0.02]), ints(0, 7, 14)
    meant = {"scale": 0.3, "causal": True, "window": (3, 0), "cap": 2.0}
    tail = (0.0, 0.3, True, (3, 0), 2.0, slopes, True, True)
    want, want_lse = formula(q, k, v, slopes=slopes, **meant)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    for out, lse, dmask in (
        fa.flash_attn_func(q, k, v, *tail),
        fa.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), *tail),
        fa.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), *tail),
        fa.flash_attn_varlen_func(*flat, offsets, offsets, 7, 7, *tail),
        fa.flash_attn_varlen_kvpacked_func(flat[0], torch.stack(flat[1:], 1), offsets, offsets, 7, 7, *tail),
        fa.flash_attn_varlen_qkvpacked_func(torch.stack(flat, 1), offsets, 7, *tail),
    ):
        close(out.view_as(want), want)
        close(lse if lse.dim() == 3 else lse.unflatten(1, (2, 7)).transpose(0, 1), want_lse)
        assert dmask is None
    nothing_new = (None,) * 4
    got = fa.flash_attn_with_kvcache(q, k, v, *nothing_new, 7, None, None, None, *tail[1:5], True, slopes, 0, False)
    close(got, want)


def test_a_sink_takes_its_share() -> None:
    q, k, v, sink = normal(2, 5, 4, 8), normal(2, 5, 4, 8, seed=1), normal(2, 5, 4, 8, seed=2), torch.tensor([0.5, -1, 2, 0])
    want, lse = formula(q, k, v)
    share = torch.sigmoid(lse - sink.double()[:, None])
    close(fa.flash_attn_func(q, k, v, s_aux=sink), want * share.transpose(1, 2)[..., None])


# --- caches ----------------------------------------------------------------------------------------------------------------------------


def rotated(x: Any, angles: Any, begin: int, interleaved: bool) -> Any:
    """The tokens of one sequence (S, H, D), whose first stands at `begin`; angles are (positions, rotary_dim / 2)."""
    at = angles[begin : begin + len(x), None]
    half = at.shape[-1]
    y = x.clone()
    a, b = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    y[..., a], y[..., b] = x[..., a] * at.cos() - x[..., b] * at.sin(), x[..., a] * at.sin() + x[..., b] * at.cos()
    return y


@pytest.mark.parametrize("paged", [False, "block_table", "page_table"])
@pytest.mark.parametrize("rotary", [None, False, True])
@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize(("given", "meant"), OPTIONS[1:4:2])
def test_a_cache_is_appended_to_rotated_and_attended(paged: Any, rotary: Any, new: int, given: Any, meant: Any) -> None:
    """Causal, as the queries are the new tokens. What is in the cache afterwards is compared, too."""
    given = {name: x for name, x in given.items() if name != "deterministic"}
    held, slots, size = [5, 0, 9], 16, 4
    q, k, v = normal(3, new, 4, 8), normal(3, new, 2, 8, seed=1), normal(3, new, 2, 8, seed=2)
    angles = normal(slots, 3, seed=5)
    before = normal(2, 3, slots, 2, 8, seed=6)
    options = {"cache_seqlens": ints(*held)}
    if paged:
        order = torch.randperm(3 * slots // size, generator=torch.Generator().manual_seed(1))
        caches = torch.empty(2, len(order), size, 2, 8, dtype=F64)
        caches[:, order] = before.reshape(2, -1, size, 2, 8)
        options[paged] = order.view(3, -1).int()
    else:
        caches = before.clone()
    if rotary is not None:
        options |= {"rotary_cos": angles.cos().float(), "rotary_sin": angles.sin().float(), "rotary_interleaved": rotary}
    out, lse = fa.flash_attn_with_kvcache(q, *caches, k, v, **options, **given, return_softmax_lse=True)
    after = caches[:, order].reshape(before.shape) if paged else caches
    for b, n in enumerate(held):
        turned = [x[b] if rotary is None else rotated(x[b], angles, n, rotary) for x in (q, k)]
        keys = torch.cat([before[0, b, :n], turned[1]])
        bound = 1e-11 if rotary is None else 1e-6  # cosines are float32
        close(after[0, b, : n + new], keys, bound)
        close(after[1, b, : n + new], torch.cat([before[1, b, :n], v[b]]))
        assert torch.equal(after[:, b, n + new :], before[:, b, n + new :])
        want, want_lse = formula(turned[0][None], keys[None], after[1, b, None, : n + new], **meant)
        close(out[b, None], want, bound)
        close(lse[b, None], want_lse, bound)


def test_lengths_of_a_cache() -> None:
    """None is all of it, an int is that of every sequence; entries may be chosen, and begin with slots that hold nothing."""
    q, k_cache, v_cache = normal(2, 1, 4, 8), normal(4, 9, 2, 8, seed=1), normal(4, 9, 2, 8, seed=2)
    close(fa.flash_attn_with_kvcache(q, k_cache[:2], v_cache[:2]), formula(q, k_cache[:2], v_cache[:2])[0])
    close(fa.flash_attn_with_kvcache(q, k_cache[:2], v_cache[:2], cache_seqlens=4), formula(q, k_cache[:2, :4], v_cache[:2, :4])[0])
    pages = torch.arange(4).view(2, 2).int()
    flat = [x.reshape(2, 18, 2, 8) for x in (k_cache, v_cache)]
    close(fa.flash_attn_with_kvcache(q, k_cache, v_cache, block_table=pages), formula(q, *flat)[0])
    got = fa.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=7, cache_batch_idx=ints(3, 1), cache_leftpad=ints(2, 2))
    close(got, formula(q, k_cache[[3, 1], 2:7], v_cache[[3, 1], 2:7])[0])


def test_packed_queries_over_a_cache() -> None:
    q, k_cache, v_cache = normal(5, 4, 8), normal(2, 9, 2, 8, seed=1), normal(2, 9, 2, 8, seed=2)
    got = fa.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=6, cu_seqlens_q=ints(0, 2, 5), max_seqlen_q=3, causal=True)
    for b, rows in enumerate((slice(0, 2), slice(2, 5))):
        close(got[None, rows], formula(q[None, rows], k_cache[b, None, :6], v_cache[b, None, :6], causal=True)[0])


def test_varlen_over_pages() -> None:
    q, pages = normal(5, 4, 8), normal(2, 6, 4, 2, 8, seed=1)
    table = ints(5, 0, 3, 1, 4, 2).view(2, 3)
    got = fa.flash_attn_varlen_func(q, *pages, ints(0, 2, 5), ints(0, 7, 18), 3, 11, causal=True, block_table=table)
    keys = [pages[:, table[b].long()].reshape(2, 12, 2, 8)[:, None, :n] for b, n in ((0, 7), (1, 11))]
    want = [formula(q[None, s], *keys[b], causal=True)[0][0] for b, s in enumerate((slice(0, 2), slice(2, 5)))]
    close(got, torch.cat(want))
    used = fa.flash_attn_varlen_func(q, *pages, ints(0, 2, 5), None, 3, 11, causal=True, block_table=table, seqused_k=ints(7, 11))
    assert torch.equal(used, got)


@pytest.mark.parametrize("shape", [(), (2,), (3, 2)])
def test_kf_125_126_descales_of_a_cache_in_float8(shape: tuple[int, ...]) -> None:
    """What each number of the cache is to be multiplied by: one, one for each key head, or for each of every sequence."""
    q = normal(3, 2, 4, 8)
    caches = [normal(3, 9, 2, 8, seed=s).to(torch.float8_e4m3fn) for s in (1, 2)]
    descales = [torch.rand(shape, generator=torch.Generator().manual_seed(s)) + 0.5 for s in (3, 4)]
    got = fa.flash_attn_with_kvcache(q, *caches, k_descale=descales[0], v_descale=descales[1], causal=True)
    wide = [x.to(F64) * d.double().expand(3, 2)[:, None, :, None] for x, d in zip(caches, descales, strict=True)]
    close(got, formula(q, *wide, causal=True)[0], 1e-6)


def test_kf_126_128_a_wrong_number_of_descales() -> None:
    q, cache = normal(3, 1, 4, 8), normal(3, 9, 2, 8).to(torch.float8_e4m3fn)
    for shape in ((3,), (4, 2), (3, 4)):
        with pytest.raises(ShapeError, match=r"k_descale has shape \(.*\).* \(3, 2\)"):
            fa.flash_attn_with_kvcache(q, cache, cache, k_descale=torch.ones(shape), v_descale=torch.ones(2))


def test_kf_127_float8_inputs_are_refused_and_never_computed_otherwise() -> None:
    x = normal(1, 3, 2, 8).to(torch.float8_e4m3fn)
    with pytest.raises(UnsupportedError, match="fp8 is built for the caches of flash_attn_with_kvcache alone"):
        fa.flash_attn_func(x, x, x, q_descale=torch.ones(1, 2), k_descale=torch.ones(1, 2), v_descale=torch.ones(1, 2))
    with pytest.raises(DtypeError, match="q is float8_e4m3fn"):
        fa.flash_attn_func(x, x, x)


# --- padding ---------------------------------------------------------------------------------------------------------------------------


def test_padding_is_taken_out_and_put_back() -> None:
    x = normal(3, 5, 2, 4, grad=True)
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]])
    flat, indices, cu_seqlens, longest, used = fa.bert_padding.unpad_input(x, mask)
    assert torch.equal(flat, torch.cat([x[0, :3], x[2, 1:]]))
    assert indices.tolist() == [0, 1, 2, 11, 12, 13, 14]
    assert (cu_seqlens.tolist(), cu_seqlens.dtype, longest, used.tolist()) == ([0, 3, 3, 7], torch.int32, 4, [3, 0, 4])
    back = fa.bert_padding.pad_input(flat, indices, 3, 5)
    assert torch.equal(back, x * mask[..., None, None])
    (grad,) = torch.autograd.grad((back * x.detach()).sum(), x)
    assert torch.equal(grad, (x * mask[..., None, None]).detach())
    assert torch.equal(fa.index_first_axis(x.flatten(0, 1), indices), flat)
    unused = torch.zeros_like(mask)
    unused[0, 4] = unused[1, 2] = 1
    _, indices, cu_seqlens, longest, used = fa.unpad_input(x, mask.bool(), unused)
    assert indices.tolist() == [0, 1, 2, 4, 7, 11, 12, 13, 14]
    assert (cu_seqlens.tolist(), longest, used.tolist()) == ([0, 4, 5, 9], 4, [3, 0, 4])
    assert fa.unpad_input(x[:0], mask[:0])[2:4] == (ints(0), 0)


def test_code_that_imports_the_package_gets_this_one() -> None:
    code = (
        "import torch, cupyflash.flash_attn as ours; ours.install(); ours.install()\n"
        "import flash_attn\n"
        "from flash_attn import flash_attn_func\n"
        "from flash_attn.flash_attn_interface import flash_attn_varlen_func\n"
        "from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input\n"
        "assert flash_attn is ours and flash_attn_func is ours.flash_attn_func\n"
        "print(flash_attn.__version__)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.startswith("2.8.3+cupyflash.")


def test_installing_over_an_imported_package_is_an_error() -> None:
    code = "import sys, types, cupyflash.flash_attn as ours; sys.modules['flash_attn'] = types.ModuleType('flash_attn')\n"
    code += "try: ours.install()\nexcept Exception as e: print(type(e).__name__, e)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.startswith("StateError flash_attn is imported already: call cupyflash.flash_attn.install() before")


# --- errors ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout_p": 0.1}, "dropout_p is 0.1, and there is nothing for it; pass 0.0: dropout is not built yet"),
        ({"qv": torch.ones(1)}, "qv is a tensor, and there is nothing for it; scores are the same with qv concatenated to q"),
        ({"q_descale": torch.ones(1)}, "q_descale is a tensor, .*fp8 is built for the caches"),
        ({"attention_chunk": 64}, "attention_chunk is 64, .*pass 0"),
        ({"num_splits": 4}, "num_splits is 4, .*pass 0 or 1"),
        ({"pack_gqa": False}, "pack_gqa is False, .*pass None"),
        ({"sm_margin": 8}, "sm_margin is 8, .*pass 0"),
    ],
)
def test_what_is_not_built_is_refused_and_as_by_default_taken(options: dict[str, Any], message: str) -> None:
    x = normal(1, 3, 2, 8)
    offsets = ints(0, 3)
    for call in (
        lambda **o: fa.flash_attn_func(x, x, x, **o),
        lambda **o: fa.flash_attn_kvpacked_func(x, torch.stack([x, x], 2), **o),
        lambda **o: fa.flash_attn_varlen_func(x[0], x[0], x[0], offsets, offsets, 3, 3, **o),
    ):
        with pytest.raises(UnsupportedError, match=message):
            call(**options)
        name = next(iter(options))
        call(**{name: {"num_splits": 1, "pack_gqa": None, "qv": None, "q_descale": None}.get(name, 0)})


def test_a_qv_concatenated_has_its_scores() -> None:
    """What the message says."""
    q, k, qv, v = normal(1, 3, 2, 8), normal(1, 3, 2, 8, seed=1), normal(1, 3, 2, 4, seed=2), normal(1, 3, 2, 4, seed=3)
    got = fa.flash_attn_func(torch.cat([q, qv], -1), torch.cat([k, v], -1), v, softmax_scale=0.3)
    scores = 0.3 * (torch.einsum("bihd,bjhd->bhij", q, k) + torch.einsum("bihd,bjhd->bhij", qv, v))
    close(got, torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v))


def test_wrong_calls_say_what_is_wrong() -> None:
    x, cache = normal(1, 3, 2, 8), normal(1, 9, 2, 8)
    angles, rotary = torch.ones(9, 2), "rotary_cos"
    rope = {"rotary_cos": angles, "rotary_sin": angles, "cache_seqlens": 3}
    cases: list[tuple[type[Exception], str, Any]] = [
        (ArgumentError, "no function of flash_attn 2 or 3 has an argument 'scale'", lambda: fa.flash_attn_func(x, x, x, scale=1)),
        (ShapeError, r"kv has shape \(1, 3, 2, 8\): it must be \(B, S, 2, H, D\)", lambda: fa.flash_attn_kvpacked_func(x, x)),
        (ShapeError, r"qkv has shape .*: it must be \(T, 3, H, D\)", lambda: fa.flash_attn_varlen_qkvpacked_func(x[0, :2], ints(0, 1), 1)),
        (ShapeError, "num_heads_q=1 it must be", lambda: fa.flash_attn_qkvpacked_func(x, num_heads_q=1)),
        (ArgumentError, "k= was given without cache_seqlens=", lambda: fa.flash_attn_with_kvcache(x, cache, cache, x, x)),
        (ArgumentError, f"{rotary}= was given without k=", lambda: fa.flash_attn_with_kvcache(x, cache, cache, causal=True, **rope)),
        (UnsupportedError, "3 queries and 2 new tokens",
         lambda: fa.flash_attn_with_kvcache(x, cache, cache, x[:, :2], x[:, :2], causal=True, **rope)),
        (UnsupportedError, "turns all queries to one position", lambda: fa.flash_attn_with_kvcache(x, cache, cache, x, x, **rope)),
        (UnsupportedError, "cu_seqlens_k_new is a tensor",
         lambda: fa.flash_attn_with_kvcache(x, cache, cache, x, x, cache_seqlens=1, cu_seqlens_k_new=ints(0, 3))),
        (ArgumentError, "block_table= and page_table= are one argument",
         lambda: fa.flash_attn_with_kvcache(x, cache, cache, block_table=ints(0)[None], page_table=ints(0)[None])),
        (UnsupportedError, "scheduler_metadata is a tensor",
         lambda: fa.flash_attn_with_kvcache(x, cache, cache, scheduler_metadata=ints(0))),
    ]  # fmt: skip
    cases += [(ArgumentError, "window_size=128 is ambiguous", lambda: fa.flash_attn_func(x, x, x, window_size=128))]
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            call()
    assert torch.equal(cache, normal(1, 9, 2, 8))


def test_examples_of_the_docstrings() -> None:
    assert doctest.testmod(fa).failed == 0
