"""Adapters of other libraries for `peers`: torch's own attention, FlashAttention, FlashInfer, xFormers, JAX and Triton."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

from . import gpu
from .cases import ITEMSIZE, CacheCase, Case, Inputs
from .peer import ONLY_PACKED, Peer, cache_cannot, formula_cannot
from .timing import Call, Place


def _no_torch() -> str | None:
    return None if gpu.torch_with_cuda() is not None else "torch with CUDA is not installed"


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # of what it is in
        return False


def _autograd(out: Any, leaves: Sequence[Any], dout: Any) -> Call:
    """torch's gradients of what a forward has recorded, again and again."""
    if not out.requires_grad:
        raise NotImplementedError("this build of it has no backward")
    return functools.partial(gpu.torch_with_cuda().autograd.grad, out, leaves, dout, retain_graph=True)


_NOT_DETERMINISTIC = "it is deterministic only where all of torch is, which is timed nowhere here"


class Sdpa(Peer):
    """torch's scaled_dot_product_attention with one of its backends, on transposed views of the same memory, which is how a (B, S, H, D)
    program calls it; `contiguous` copies them to (B, H, S, D) beforehand."""

    package = "torch"
    _BACKENDS = ("flash", "cudnn", "mem_efficient", "math")

    def __init__(self, name: str, backend: str, *, contiguous: bool = False) -> None:
        self.name, self.backend, self.contiguous = name, backend, contiguous

    def missing(self) -> str | None:
        return _no_torch()

    def why_not(self, case: Case, place: Place) -> str | None:
        if case.lengths:
            return "it takes packed sequences only as nested tensors, which are timed nowhere here"
        if case.window_size or case.softcap or case.extras:
            return "it has no window and no softcap, and its bias is timed nowhere here"
        if case.causal and case.seqlen_q != case.seqlen_k:
            return "its causal mask starts top left, ours ends bottom right: the same only for equal lengths"
        if case.deterministic:
            return _NOT_DETERMINISTIC
        return formula_cannot(case, 4, place) if self.backend == "math" else cache_cannot(case)

    def bind(self, case: Case, inputs: Inputs) -> Call:
        torch = gpu.torch_with_cuda()
        q, k, v, *dout = (
            x.detach().transpose(1, 2).contiguous() if self.contiguous else x.detach().transpose(1, 2)
            for x in (*inputs[:3], inputs.dout)
            if x is not None
        )
        # The switches, not the context manager sdpa_kernel, whose host time is a third of a whole call's.
        switches = [(getattr(torch.backends.cuda, f"enable_{name}_sdp"), name == self.backend) for name in self._BACKENDS]
        options = {"is_causal": case.causal, "scale": case.softmax_scale, "enable_gqa": case.num_heads_q != case.num_heads_kv}
        sdpa = torch.nn.functional.scaled_dot_product_attention

        def call() -> Any:
            for enable, on in switches:
                enable(on)
            return sdpa(q, k, v, **options).transpose(1, 2)

        if not case.backward:
            return call
        leaves = [x.requires_grad_() for x in (q, k, v)]
        gradients = _autograd(call(), leaves, dout[0].transpose(1, 2))
        return lambda: tuple(x.transpose(1, 2) for x in gradients())


class TorchVarlen(Peer):
    """torch's FlashAttention-2 for packed sequences: its `varlen_attn`, whose options are others in each version, or before torch 2.10 the
    operation that this calls. Both are differentiated by torch."""

    name, package, only_for = "torch-varlen", "torch", "packed"

    def missing(self) -> str | None:
        return _no_torch()

    def why_not(self, case: Case, place: Place) -> str | None:
        if not case.lengths:
            return ONLY_PACKED
        if case.softcap or case.extras:
            return "it has no softcap, bias or mask"
        return _NOT_DETERMINISTIC if case.deterministic else None

    def bind(self, case: Case, inputs: Inputs) -> Call:
        try:
            function = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        except ImportError:
            function = _varlen_of_aten
        left, right = (-1 if side is None else side for side in case.window_size or (None, None))
        options = _known(
            function,
            window_size=(left, 0 if case.causal else right),
            scale=case.softmax_scale,
            is_causal=case.causal,
            enable_gqa=case.num_heads_q != case.num_heads_kv,  # where this is no option, grouped heads are taken as they come
        )
        if (case.window_size or case.softmax_scale) and "window_size" not in options:
            raise NotImplementedError("this version of it has no window and no scale")
        offsets, longest = (inputs.options[name] for name in ("cu_seqlens_q", "max_seqlen_q"))
        arguments = offsets, offsets, longest, longest
        if not case.backward:
            return lambda: function(*inputs[:3], *arguments, **options)
        leaves = [x.detach().requires_grad_() for x in inputs[:3]]
        return _autograd(function(*leaves, *arguments, **options), leaves, inputs.dout)


def _varlen_of_aten(
    query: Any,
    key: Any,
    value: Any,
    cu_seq_q: Any,
    cu_seq_k: Any,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Any:
    flash = gpu.torch_with_cuda().ops.aten._flash_attention_forward
    sides = {"window_size_left": window_size[0], "window_size_right": window_size[1]}
    is_causal = window_size == (-1, 0)
    return flash(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, 0.0, is_causal, False, scale=scale, **sides)[0]


def _known(function: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """The options that this version of a function has."""
    names = inspect.signature(function).parameters
    return {name: option for name, option in options.items() if name in names}


class FlashAttention(Peer):
    """FlashAttention-2, -3 and -4: one signature, `window_size` of FA4 with None where the others have -1. That for packed sequences
    differs from version to version in the order of its arguments, not in their names. FA2 and FA3 have one for caches, and FA2 another
    name for the table of pages."""

    def __init__(self, name: str, module: str, package: str, unlimited: int | None) -> None:
        self.name, self.module, self.package, self.unlimited = name, module, package, unlimited
        self.has_caches = name in ("fa2", "fa3")

    def missing(self) -> str | None:
        return _no_torch() or (
            None if _found(self.module) else f"no module {self.module} ({self.package}); --site adds a folder of packages"
        )

    def why_not(self, case: Case, place: Place) -> str | None:
        return "its sinks are timed nowhere here" if case.extras else cache_cannot(case, pages=self.has_caches)

    def bind(self, case: Case, inputs: Inputs) -> Call:
        name = "flash_attn_varlen_func" if case.lengths else "flash_attn_func"
        if case.function == "attention_with_kvcache" and self.has_caches:
            name = "flash_attn_with_kvcache"
        function = getattr(importlib.import_module(self.module), name)
        left, right = (self.unlimited if side is None or side < 0 else side for side in case.window_size or (None, None))
        options = {"softmax_scale": case.softmax_scale, "causal": case.causal, "window_size": (left, right), "softcap": case.softcap or 0.0}
        cache = {name: x for name, x in inputs.options.items() if name in ("cache_seqlens", "page_table")}
        options |= _known(function, **cache, block_table=cache.get("page_table"))
        if case.lengths:
            offsets, longest = (inputs.options[name] for name in ("cu_seqlens_q", "max_seqlen_q"))
            options |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets} | _known(function, max_seqlen_q=longest, max_seqlen_k=longest)
        if case.mode == "decode" and self.name == "fa3":
            options["num_splits"] = 0  # its own choice, as in its function for caches; the default is never to split the keys
        if not case.backward:
            return lambda: function(*inputs[:3], **options)
        if case.deterministic:
            options["deterministic"] = True
        leaves = [x.detach().requires_grad_() for x in inputs[:3]]
        result = function(*leaves, **options)
        return _autograd(result[0] if isinstance(result, tuple) else result, leaves, inputs.dout)


class XFormers(Peer):
    """xFormers' memory_efficient_attention, by whichever of its kernels it prefers. Grouped heads have an axis of their own, along which
    keys are expanded; packed sequences are one, with a mask of blocks."""

    name = package = "xformers"

    def missing(self) -> str | None:
        return _no_torch() or (None if _found("xformers.ops") else "no module xformers; --site adds a folder of packages")

    def why_not(self, case: Case, place: Place) -> str | None:
        if case.window_size or case.softcap or case.extras:
            return "it has no softcap, and its windows and bias are timed nowhere here"
        return _NOT_DETERMINISTIC if case.deterministic else cache_cannot(case)

    def bind(self, case: Case, inputs: Inputs) -> Call:
        attention = importlib.import_module("xformers.ops").memory_efficient_attention
        masks = importlib.import_module("xformers.ops.fmha.attn_bias")
        bias = masks.LowerTriangularFromBottomRightMask() if case.causal else None
        if case.lengths:
            blocks = masks.BlockDiagonalMask.from_seqlens(list(case.lengths))
            bias = blocks.make_causal() if case.causal else blocks
        group = case.num_heads_q // case.num_heads_kv

        def with_groups(x: Any) -> Any:
            x = x[None] if case.lengths else x
            return x if group == 1 else x.unflatten(2, (case.num_heads_kv, -1)).expand(-1, -1, -1, group, -1)

        def call(q: Any, k: Any, v: Any) -> Any:
            return attention(*map(with_groups, (q, k, v)), attn_bias=bias, scale=case.softmax_scale).reshape(case.out_shape)

        if not case.backward:
            return functools.partial(call, *inputs[:3])
        leaves = [x.detach().requires_grad_() for x in inputs[:3]]
        return _autograd(call(*leaves), leaves, inputs.dout)


class FlashInfer(Peer):
    """FlashInfer: its wrapper for queries and keys that lie packed, where a batch axis is a split of the first one, and for one token that
    over pages, where an array is pages of 16. What a wrapper plans on the host comes before the call, and is the same for all inputs."""

    name, package = "flashinfer", "flashinfer-python"
    _planned: tuple[Case, Any] | None = None

    def missing(self) -> str | None:
        return _no_torch() or (None if _found("flashinfer") else "no module flashinfer; --site adds a folder of packages")

    def why_not(self, case: Case, place: Place) -> str | None:
        if case.backward:
            return "it has no backward"
        if case.extras:
            return "its sinks are timed nowhere here"
        if _side(case, 1) not in (-1, 0):
            return "its window ends at the diagonal, or has no end"
        if isinstance(case, CacheCase):
            if case.seqlen_q > 1 or case.head_dim != case.head_dim_v:
                return "its chunks, and values of another width, are timed nowhere here"
            if not case.page_size and case.seqlen_k % 16:
                return "as pages of 16 the keys of a sequence must be a multiple of that"
        return cache_cannot(case, pages=True)

    def bind(self, case: Case, inputs: Inputs) -> Call:
        if self._planned is None or self._planned[0] != case:
            self._planned = case, self._over_pages(case, inputs) if isinstance(case, CacheCase) else self._packed(case, inputs)
        run: Any = self._planned[1].run
        q, k, v = inputs[:3]
        if isinstance(case, CacheCase):
            pages = (k, v) if case.page_size else tuple(x.view(-1, 16, *x.shape[2:]) for x in (k, v))
            return lambda: run(q[:, 0], pages)[:, None]
        q, k, v = (x.view(-1, *x.shape[-2:]) for x in (q, k, v))
        return lambda: run(q, k, v).view(case.out_shape)

    def _packed(self, case: Case, inputs: Inputs) -> Any:
        torch = gpu.torch_with_cuda()
        equal = torch.arange(case.batch + 1, dtype=torch.int32)
        offsets = [torch.as_tensor(case.cu_seqlens) if case.lengths else equal * n for n in (case.seqlen_q, case.seqlen_k)]
        sizes = case.num_heads_q, case.num_heads_kv, case.head_dim, case.head_dim_v
        wrapper = importlib.import_module("flashinfer").BatchPrefillWithRaggedKVCacheWrapper(_workspace(), "NHD")
        options = {"sm_scale": case.softmax_scale, "logits_soft_cap": case.softcap, "window_left": _side(case, 0)}
        options["causal"] = case.causal or _side(case, 1) == 0
        wrapper.plan(*(x.to(inputs.q.device) for x in offsets), *sizes, **options, q_data_type=inputs.q.dtype, kv_data_type=inputs.k.dtype)
        return wrapper

    def _over_pages(self, case: CacheCase, inputs: Inputs) -> Any:
        torch = gpu.torch_with_cuda()
        table, size = inputs.options.get("page_table"), case.page_size or 16
        pages = -(-case.seqlen_k // size)
        begins = torch.arange(case.batch + 1, dtype=torch.int32) * pages
        indices = torch.arange(case.batch * pages, dtype=torch.int32) if table is None else table.flatten()
        last = torch.full((case.batch,), case.seqlen_k - (pages - 1) * size, dtype=torch.int32)
        grouped = case.num_heads_q > case.num_heads_kv
        wrapper = importlib.import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper(_workspace(), "NHD", use_tensor_cores=grouped)
        options = {"sm_scale": case.softmax_scale, "logits_soft_cap": case.softcap, "window_left": _side(case, 0)}
        where = (x.to(inputs.q.device) for x in (begins, indices, last))
        sizes = case.num_heads_q, case.num_heads_kv, case.head_dim, size
        wrapper.plan(*where, *sizes, **options, q_data_type=inputs.q.dtype, kv_data_type=inputs.k.dtype)
        return wrapper


def _side(case: Case, side: int) -> int:
    """Of a window, how many keys on that side; -1 is all."""
    keys = case.window_size[side] if case.window_size else None
    return -1 if keys is None else keys


@functools.cache
def _workspace() -> Any:
    torch = gpu.torch_with_cuda()
    return torch.zeros(128 << 20, dtype=torch.uint8, device="cuda")


class Jax(Peer):
    """jax.nn.dot_product_attention, jitted: by cuDNN for 16 bits, else as XLA compiles the formula. The arrays are the other peers' own, by
    DLPack, and so is the result, with which the stream of the place waits for JAX's."""

    name, package, own_queue = "jax", "jax", True

    def missing(self) -> str | None:
        if not _found("jax"):
            return "no module jax; --site adds a folder of packages"
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else it takes three quarters of the GPU's memory
        try:
            importlib.import_module("jax").devices("cuda")
        except RuntimeError as error:
            return f"it finds no GPU ({' '.join(str(error).split())[:90]})"
        return None

    def why_not(self, case: Case, place: Place) -> str | None:
        if case.lengths:
            return "its sequences have a batch axis"
        if case.window_size or case.softcap or case.extras:
            return "it has no softcap, and its window, bias and mask are timed nowhere here"
        if case.causal and case.seqlen_q != case.seqlen_k:
            return "its causal mask starts top left, ours ends bottom right: the same only for equal lengths"
        if case.head_dim != case.head_dim_v:
            return "its values are as wide as its keys"
        return "it is deterministic only by a flag of XLA's" if case.deterministic else cache_cannot(case)

    def bind(self, case: Case, inputs: Inputs) -> Call:
        jax = importlib.import_module("jax")
        back = importlib.import_module("torch" if hasattr(inputs.q, "requires_grad") else "cupy").from_dlpack
        q, k, v, *dout = (jax.dlpack.from_dlpack(x) for x in (*inputs[:3], inputs.dout) if x is not None)
        by = "cudnn" if ITEMSIZE[case.dtype] == 2 else "xla"
        attention = functools.partial(jax.nn.dot_product_attention, scale=case.softmax_scale, is_causal=case.causal, implementation=by)
        if not case.backward:
            forward = jax.jit(attention)
            return lambda: back(forward(q, k, v))
        pull = jax.jit(lambda *x: jax.vjp(attention, *x)[1])(q, k, v)  # what the forward leaves, as a tree of arrays
        gradients = jax.jit(lambda pull, dout: pull(dout))
        return lambda: tuple(map(back, gradients(pull, *dout)))


class Triton(Peer):
    """FlashAttention-2's forward in Triton, in the form of its tutorials (triton_form.py)."""

    name = package = "triton"

    def missing(self) -> str | None:
        return _no_torch() or (None if _found("triton") else "no module triton; --site adds a folder of packages")

    def why_not(self, case: Case, place: Place) -> str | None:
        if case.backward:
            return "only its forward is timed here"
        if case.lengths or case.window_size or case.softcap or case.extras:
            return "the form of the tutorial has no packed sequences, window, softcap, bias or mask"
        if ITEMSIZE[case.dtype] != 2 or case.head_dim != case.head_dim_v or case.head_dim not in (16, 32, 64, 128, 256):
            return "it takes 16 bits, and heads of 16, 32, 64, 128 or 256"
        return cache_cannot(case)

    def bind(self, case: Case, inputs: Inputs) -> Call:
        form = importlib.import_module(f"{__package__}.triton_form")
        scale = case.softmax_scale or case.head_dim**-0.5
        return functools.partial(form.attention, *inputs[:3], scale, causal=case.causal)
