"""(problem, device) -> Plan: which variant, which grid, which workspaces. Pure and cached; nothing else in cupyflash decides these."""

from __future__ import annotations

import functools
from typing import NamedTuple

from cupyflash.device import KNOWN, DeviceSpec
from cupyflash.errors import UnsupportedError
from cupyflash.problem import AttentionProblem, BackwardProblem
from cupyflash.variants import FORWARD, MAX_HEAD_DIM, PLAIN, FwdConfig, Row, SimpleConfig, Variant


class Step(NamedTuple):
    """One launch: `threads` and dynamic shared memory of a block; `args` are the names of the buffers it reads and writes."""

    variant: Variant
    grid: tuple[int, int, int]
    threads: int
    smem_bytes: int
    args: tuple[str, ...]
    why: str


class Plan(NamedTuple):
    """The launches of one call in order, and the bytes of each workspace they share. No step: nothing is to be computed."""

    steps: tuple[Step, ...]
    workspaces: tuple[tuple[str, int], ...] = ()


@functools.lru_cache(maxsize=4096)
def forward(problem: AttentionProblem, device: DeviceSpec) -> Plan:
    """The plan of one forward call; UnsupportedError where no variant serves it."""
    p = problem
    _check_head_dims(p)
    args = tuple(name for name, used in _buffers(p).items() if used)
    if device.arch == "host":
        variant = Variant("host", p.dtype, p.head_dim, p.head_dim_v, _flags(p))
        return Plan((Step(variant, (1, 1, 1), 0, 0, args, "the arrays are in host memory"),))
    if 0 in (p.batch, p.num_heads_q, p.seqlen_q):
        return Plan(())  # a grid of 0 is an error to the driver
    variant, why = _choose(p, device)
    return Plan((Step(variant, (_num_tiles(p, variant), 1, 1), variant.threads, variant.smem_bytes, args, why),))


@functools.lru_cache(maxsize=4096)
def backward(problem: BackwardProblem, device: DeviceSpec) -> Plan:
    """The plan of one backward call; UnsupportedError where no variant serves it."""
    p = problem.forward
    _check_head_dims(p)
    if device.arch == "host":
        variant = Variant("host", p.dtype, p.head_dim, p.head_dim_v, _flags(p))
        return Plan((Step(variant, (1, 1, 1), 0, 0, (), "the arrays are in host memory"),))
    raise UnsupportedError(
        "attention_backward has no kernel yet for arrays in GPU memory", ("cupy.asnumpy(x) and tensor.cpu() give arrays that work",)
    )


def _check_head_dims(p: AttentionProblem) -> None:
    if max(p.head_dim, p.head_dim_v) > MAX_HEAD_DIM:
        name, dim = ("head_dim", p.head_dim) if p.head_dim > MAX_HEAD_DIM else ("head_dim_v", p.head_dim_v)
        raise UnsupportedError(f"no kernel for {name} {dim}: {MAX_HEAD_DIM} is the largest for forward and backward")


def _choose(p: AttentionProblem, device: DeviceSpec) -> tuple[Variant, str]:
    too_big = ""
    for row in FORWARD:
        if p.dtype not in row.dtypes or max(p.head_dim, p.head_dim_v) > row.head_dim or device.capability < row.capability:
            continue
        variant = _variant(p, row)
        if not (row.options or PLAIN.issuperset(variant.flags)):
            continue
        if variant.smem_bytes <= device.smem_bytes:
            return variant, row.why
        too_big = too_big or f"; {variant.name} would need {variant.smem_bytes} bytes of shared memory and a block has {device.smem_bytes}"
    raise UnsupportedError(
        f"no kernel for {p.dtype} with head_dim {p.head_dim} and head_dim_v {p.head_dim_v} on sm_{device.arch}{too_big}",
        (f"architectures served: {', '.join(f'sm_{arch}' for arch in KNOWN)}",),
    )


def _variant(p: AttentionProblem, row: Row) -> Variant:
    # mma.sync multiplies 16 wide, and a warp of fwd_simple holds 32 elements a register: tiles are padded, the true D stays a parameter.
    step = 16 if isinstance(row.config, FwdConfig) else 32
    aligned = p.aligned16 and p.head_dim % 8 == 0 and p.head_dim_v % 8 == 0  # whole 16-byte loads, no row ends inside one
    flags = _flags(p) if aligned or isinstance(row.config, SimpleConfig) else tuple(sorted((*_flags(p), "unaligned")))
    return Variant(row.family, p.dtype, _round_up(p.head_dim, step), _round_up(p.head_dim_v, step), flags, row.config)


def _flags(p: AttentionProblem) -> tuple[str, ...]:
    """The options that change the instruction stream, sorted; a bias or sink of the inputs' dtype needs no name of its own."""
    on = {
        "alibi": p.alibi,
        "bias": p.bias is not None and p.bias == p.dtype,
        "biasf32": p.bias is not None and p.bias != p.dtype,
        "causal": p.window_left is None and p.window_right == 0,
        "local": p.window_left is not None or p.window_right not in (None, 0),
        "lse": p.write_lse,
        "mask": p.mask,
        f"out{p.out_dtype}": p.out_dtype != p.dtype,
        "sink": p.sink is not None and p.sink == p.dtype,
        "sinkf32": p.sink is not None and p.sink != p.dtype,
        "softcap": p.softcap is not None,
        "used": p.seqused_q or p.seqused_k,
    }
    return tuple(flag for flag, used in sorted(on.items()) if used)


def _buffers(p: AttentionProblem) -> dict[str, bool]:
    return {
        "q": True,
        "k": True,
        "v": True,
        "out": True,
        "lse": p.write_lse,
        "bias": p.bias is not None,
        "mask": p.mask,
        "alibi_slopes": p.alibi,
        "sink": p.sink is not None,
        "seqused_q": p.seqused_q,
        "seqused_k": p.seqused_k,
    }


def _num_tiles(p: AttentionProblem, variant: Variant) -> int:
    """Blocks of a one-dimensional grid, which may be 2^31 - 1 long; y and z end at 65535, fewer than some batch x heads."""
    heads = p.batch * p.num_heads_q
    if isinstance(variant.config, FwdConfig):
        return -(-p.seqlen_q // variant.config.block_m) * heads
    assert isinstance(variant.config, SimpleConfig)
    return -(-p.seqlen_q * heads // variant.config.warps)


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step
