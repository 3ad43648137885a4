"""The adapters of other libraries, without a GPU: JAX computes here as it does there, stand-ins with the signatures of FlashInfer 0.7 and
xFormers 0.0.35 compute by torch what they are asked for, and each result is judged as before a timing."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from test_bench import BACKWARD, CACHED, CHUNK, DECODE, PACKED, PAGED, SMALL, by_sequence, of_tensors, small, torch, with_signature

from bench import gpu, libraries, peers, report, timing

__all__ = ["of_tensors", "small", "torch"]
pytestmark = pytest.mark.usefixtures("small")
GROUPS = replace(SMALL, num_heads_q=4)


def timed(case, peer, place):
    (outcome,) = peers.compare(case, [peer], place, min_s=0.01).outcomes
    assert outcome.why_not is None
    assert outcome.verdict.ok, str(outcome.verdict)
    assert outcome.timing
    return outcome


def module_of(monkeypatch, name: str, **content):
    for n in range(1, name.count(".") + 2):
        parent = ".".join(name.split(".")[:n])
        monkeypatch.setitem(sys.modules, parent, sys.modules.get(parent, SimpleNamespace(__spec__="found", __path__=[])))
    vars(sys.modules[name]).update(content)


def attention(torch, q, k, v, *, causal, scale=None):
    """Of (B, S, H, D) tensors, bottom right."""
    heads = (x.transpose(1, 2) for x in (q, k, v))
    hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1]) if causal else None
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return sdpa(*heads, attn_mask=hidden, scale=scale, enable_gqa=q.shape[2] != k.shape[2]).transpose(1, 2)


# --- JAX -------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def jax(monkeypatch):
    jax = pytest.importorskip("jax", reason="JAX is not installed; pip install jax")
    monkeypatch.setattr(peers.Jax, "missing", lambda self: None)
    return jax


@pytest.mark.usefixtures("jax")
@pytest.mark.parametrize(
    "case", [SMALL, GROUPS, DECODE, replace(SMALL, softmax_scale=0.3, batch=2), BACKWARD, replace(GROUPS, backward=True)]
)
def test_jax(torch, of_tensors, case):
    assert timed(case, peers.Jax(), of_tensors(torch)).timer == "burst"


@pytest.mark.usefixtures("jax")
def test_jax_has_a_clock_of_its_own_and_no_ratio(torch, of_tensors):
    found = peers.compare(SMALL, [peers.CupyFlash(), peers.Sdpa("sdpa-math", "math"), peers.Jax()], of_tensors(torch), min_s=0.01)
    ours, sdpa, jax = found.outcomes
    assert ours.ratio_to_best == pytest.approx(sdpa.timing.ms / ours.timing.ms)
    assert sdpa.ratio_to_best == pytest.approx(1 / ours.ratio_to_best)
    assert jax.ratio_to_best is None
    assert report.notes(found) == ["jax by the wall clock"]
    assert [report.result_line(found, outcome)["timer"] for outcome in found.outcomes] == ["wall", "wall", "burst"]


def test_jax_without_a_gpu(monkeypatch):
    pytest.importorskip("jax", reason="JAX is not installed; pip install jax")
    assert "it finds no GPU" in peers.Jax().missing()
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: None)
    assert peers.Jax().missing() == "no module jax; --site adds a folder of packages"


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (PACKED, "batch axis"),
        (replace(SMALL, softcap=3.0), "no softcap"),
        (replace(SMALL, seqlen_k=77), "starts top left"),
        (replace(SMALL, head_dim_v=24), "as wide as"),
        (replace(BACKWARD, deterministic=True), "a flag of XLA's"),
        (PAGED, "as wide as"),
        (replace(PAGED, head_dim_v=16), "it takes no pages"),
    ],
)
def test_what_jax_cannot(case, reason):
    assert reason in peers.Jax().why_not(case, timing.HOST)


def test_a_burst_is_timed_with_its_wait():
    done = []
    tick = timing.burst([lambda: done.append("a"), lambda: done.append("b")], lambda: done.append("wait"))()
    assert done[:3] == ["a", "b", "wait"]  # warm-up
    assert done[-1] == "wait"
    assert 0 < tick.host_us / 1e3 <= tick.ms


# --- xFormers --------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def xformers(torch, monkeypatch):
    """Its function, of tensors (B, M, H, K) or (B, M, G, H, K), where H heads read one key head each of G."""

    class BlockDiagonalMask:
        causal = False

        @classmethod
        def from_seqlens(cls, q_seqlen, kv_seqlen=None, *, device=None):
            made = cls()
            made.offsets = torch.tensor([0, *q_seqlen]).cumsum(0)
            return made

        def make_causal(self):
            made = BlockDiagonalMask()
            made.offsets, made.causal = self.offsets, True
            return made

    class LowerTriangularFromBottomRightMask:
        pass

    def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None):
        if query.ndim == 5:
            query, key, value = (x.flatten(2, 3) for x in (query, key, value))
        assert query.shape[2] == key.shape[2]
        if isinstance(attn_bias, BlockDiagonalMask):
            given = dict(zip("qkv", (x[0] for x in (query, key, value)), strict=True))
            return by_sequence(torch, given, attn_bias.offsets, attn_bias.causal)[None]
        return attention(torch, query, key, value, causal=attn_bias is not None, scale=scale)

    masks = {"BlockDiagonalMask": BlockDiagonalMask, "LowerTriangularFromBottomRightMask": LowerTriangularFromBottomRightMask}
    module_of(monkeypatch, "xformers.ops.fmha.attn_bias", **masks)
    module_of(monkeypatch, "xformers.ops", memory_efficient_attention=memory_efficient_attention)


@pytest.mark.usefixtures("xformers")
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("case", [SMALL, replace(GROUPS, seqlen_k=77, softmax_scale=0.3), PACKED, replace(PACKED, causal=False)])
def test_xformers(torch, of_tensors, case, backward):
    timed(replace(case, backward=backward), peers.XFormers(), of_tensors(torch))


def test_what_xformers_cannot(torch):
    assert "no module xformers" in peers.XFormers().missing()
    for case, reason in (
        (replace(SMALL, softcap=3.0), "no softcap"),
        (replace(BACKWARD, deterministic=True), "determin"),
        (PAGED, "no pages"),
    ):
        assert reason in peers.XFormers().why_not(case, timing.HOST)


# --- FlashInfer ------------------------------------------------------------------------------------------------------------------------

RAGGED = (
    "qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, "
    "causal=False, pos_encoding_mode='NONE', use_fp16_qk_reduction=False, window_left=-1, logits_soft_cap=None, sm_scale=None, "
    "rope_scale=None, rope_theta=None, q_data_type='float16', kv_data_type=None"
)
PAGES = (
    "indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *, pos_encoding_mode='NONE', window_left=-1, "
    "window_right=-1, logits_soft_cap=None, q_data_type=None, kv_data_type=None, o_data_type=None, data_type=None, sm_scale=None"
)


@pytest.fixture
def flashinfer(torch, monkeypatch):
    """Its wrappers; the list has what each was planned for."""
    plans = []

    class Wrapper:
        def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False):
            assert kv_layout == "NHD"
            self.tensor_cores = use_tensor_cores

        def planned(self, arguments):
            self.of = arguments | {"tensor_cores": self.tensor_cores}
            plans.append(self.of)

    class Ragged(Wrapper):
        def plan(self, *arguments, **options):
            with_signature(RAGGED, self.planned)(*arguments, **options)

        def run(self, q, k, v):
            outs, of = [], self.of
            for b in range(len(of["qo_indptr"]) - 1):
                rows, keys = (slice(*of[name][b : b + 2].tolist()) for name in ("qo_indptr", "kv_indptr"))
                one = attention(torch, q[None, rows], k[None, keys], v[None, keys], causal=of["causal"], scale=of["sm_scale"])
                outs.append(one[0])
            return torch.cat(outs)

    class Paged(Wrapper):
        def plan(self, *arguments, **options):
            with_signature(PAGES, self.planned)(*arguments, **options)

        def run(self, q, paged_kv_cache):
            outs, of = [], self.of
            for b, last in enumerate(of["last_page_len"].tolist()):
                pages = of["indices"][slice(*of["indptr"][b : b + 2].tolist())]
                length = (len(pages) - 1) * of["page_size"] + last
                k, v = (x[pages].flatten(0, 1)[None, :length] for x in paged_kv_cache)
                assert paged_kv_cache[0].shape[1] == of["page_size"]
                outs.append(attention(torch, q[None, b : b + 1], k, v, causal=False, scale=of["sm_scale"])[0])
            return torch.cat(outs)

    module_of(monkeypatch, "flashinfer", BatchPrefillWithRaggedKVCacheWrapper=Ragged, BatchDecodeWithPagedKVCacheWrapper=Paged)
    monkeypatch.setattr(libraries, "_workspace", lambda: None)
    return plans


SQUARE = replace(CACHED, head_dim_v=16)


@pytest.mark.parametrize(
    "case",
    [
        *(SMALL, replace(GROUPS, seqlen_k=77, batch=2, softmax_scale=0.3), replace(SMALL, head_dim_v=24), PACKED, DECODE),
        *(replace(SQUARE, seqlen_k=64), replace(SQUARE, page_size=16), replace(SQUARE, page_size=5, num_heads_q=2)),
    ],
)
def test_flashinfer(torch, of_tensors, flashinfer, case):
    timed(case, peers.FlashInfer(), of_tensors(torch))
    (plan,) = flashinfer  # once for all inputs
    assert plan["tensor_cores"] is (case.function == "attention_with_kvcache" and case.num_heads_q > case.num_heads_kv)
    assert plan["q_data_type"] == torch.float32


@pytest.mark.usefixtures("flashinfer")
def test_flashinfer_is_told_of_window_and_softcap(flashinfer, torch):
    case = replace(SMALL, window_size=(7, None), softcap=3.0)
    q, k, v = (torch.zeros(shape) for shape in case.shapes)
    peers.FlashInfer().bind(case, peers.Inputs(q, k, v, {}))
    assert (flashinfer[0]["window_left"], flashinfer[0]["logits_soft_cap"]) == (7, 3.0)
    peers.FlashInfer().bind(replace(SMALL, causal=False, window_size=(7, 0)), peers.Inputs(q, k, v, {}))
    assert (flashinfer[1]["window_left"], flashinfer[1]["causal"]) == (7, True)
    assert peers.FlashInfer().why_not(replace(SMALL, window_size=(7, 0)), timing.HOST) is None


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (BACKWARD, "no backward"),
        (replace(SMALL, window_size=(3, 3)), "ends at the diagonal"),
        (replace(SMALL, extras=("sink",)), "sinks"),
        (CHUNK, "its chunks"),
        (CACHED, "another width"),
        (SQUARE, "pages of 16"),
        (replace(SQUARE, seqlen_k=64, cache_dtype="int8"), "q's dtype"),
    ],
)
def test_what_flashinfer_cannot(torch, case, reason):
    assert "no module flashinfer" in peers.FlashInfer().missing()
    assert reason in peers.FlashInfer().why_not(case, timing.HOST)


# --- FlashAttention-2, torch's formula, Triton -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [CACHED, PAGED])
def test_flash_attention_2_has_another_name_for_pages(torch, monkeypatch, case):
    given = {}
    arguments = (
        "q, k_cache, v_cache, cache_seqlens=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0"
    )
    function = with_signature(arguments, lambda arguments: given.update(arguments) or "out")
    monkeypatch.setitem(sys.modules, "flash_attn_fake", SimpleNamespace(flash_attn_with_kvcache=function, __spec__="found"))
    peer = peers.FlashAttention("fa2", "flash_attn_fake", "none", -1)
    assert peer.why_not(case, timing.HOST) is None
    inputs = case.inputs()
    assert peer.bind(case, inputs)() == "out"
    assert given["block_table"] is inputs.options.get("page_table")
    assert given["cache_seqlens"] is inputs.options["cache_seqlens"]


def test_fa4s_folder_is_no_flash_attention_2(torch, tmp_path, monkeypatch):
    """FA4 comes as flash_attn/cute, a namespace without FlashAttention-2 in it."""
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    importlib.invalidate_caches()
    (fa2,) = (peer for peer in peers.PEERS if peer.name == "fa2")
    assert "no module flash_attn.flash_attn_interface (flash-attn)" in fa2.missing()
    sys.modules.pop("flash_attn", None)


def test_torchs_formula_says_what_it_takes(torch, monkeypatch):
    monkeypatch.setattr(timing, "available_memory", lambda: 1 << 20)
    assert "its scores take" in peers.Sdpa("sdpa-math", "math").why_not(replace(SMALL, seqlen_q=4096, seqlen_k=4096), timing.HOST)


def test_what_the_triton_form_cannot(torch, monkeypatch):
    monkeypatch.setattr(gpu, "torch_with_cuda", lambda: None)
    assert peers.Triton().missing() == "torch with CUDA is not installed"
    half = replace(SMALL, dtype="float16")
    assert peers.Triton().why_not(half, timing.HOST) is None
    for case, reason in (
        (replace(half, backward=True), "only its forward"),
        (SMALL, "16 bits"),
        (replace(half, head_dim=96, head_dim_v=96), "heads of 16, 32"),
        (replace(half, window_size=(3, 0)), "no packed sequences, window"),
    ):
        assert reason in peers.Triton().why_not(case, timing.HOST)
