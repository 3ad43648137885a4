"""(problem, device) -> Plan: which variant, which grid, which workspaces. Pure and cached; nothing else in cupyflash decides these."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from cupyflash.device import KNOWN, DeviceSpec
from cupyflash.errors import UnsupportedError
from cupyflash.problem import AttentionProblem, BackwardProblem
from cupyflash.variants import BACKWARD, FORWARD, MAX_HEAD_DIM, PLAIN, FwdConfig, Row, SimpleConfig, Sm90Config, Variant


class Step(NamedTuple):
    """One launch: `threads` and dynamic shared memory of a block; `args` are the names of the buffers it reads and writes."""

    variant: Variant
    grid: tuple[int, int, int]
    threads: int
    smem_bytes: int
    args: tuple[str, ...]
    why: str
    boxes: tuple[tuple[str, int], ...] = ()  # the operands that are copied by tensor maps, and how many rows at a time


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
    variant, why = _choose(p, device, FORWARD)
    boxes: tuple[tuple[str, int], ...] = ()
    if isinstance(variant.config, Sm90Config):
        boxes = (("q", variant.config.block_m), ("k", variant.config.block_n), ("v", variant.config.block_n))
        if variant.store_map:
            boxes += (("out", 8 if variant.config.own_out else 16),)  # rows of a warp
    tiles = _num_tiles(p, variant)
    if isinstance(variant.config, Sm90Config):  # a block for each SM, which takes tile after tile
        tiles = min(tiles, device.num_sms)
    return Plan((Step(variant, (tiles, 1, 1), variant.threads, variant.smem_bytes, args, why, boxes),))


@functools.lru_cache(maxsize=4096)
def backward(problem: BackwardProblem, device: DeviceSpec) -> Plan:
    """The plan of one backward call; UnsupportedError where no variant serves it."""
    p = problem.forward
    _check_head_dims(p)
    if device.arch == "host":
        variant = Variant("host", p.dtype, p.head_dim, p.head_dim_v, _flags(p))
        return Plan((Step(variant, (1, 1, 1), 0, 0, (), "the arrays are in host memory"),))
    variant, why = _choose(p, device, BACKWARD)
    rows = p.batch * p.num_heads_q * p.seqlen_q
    slopes, sinks = ("alibi_slopes" in problem.wrt) * problem.slopes_batch * p.num_heads_q, ("sink" in problem.wrt) * p.num_heads_q
    results = rows + p.batch * p.num_heads_kv * p.seqlen_k + math.prod(problem.bias_shape or (0,))  # a warp for each
    kernels = (
        (_by_rows(variant, "bwd_delta", "out", "sink", "used"), rows, "what each row must know of its other keys"),
        (variant, results, why),
        (_by_rows(variant, "bwd_sum", "alibi", "sink"), slopes + sinks, "sums over rows, in one order"),
    )
    args = (*(name for name, used in _buffers(p).items() if used), "lse", "dout", *(f"d{name}" for name in problem.wrt))
    steps = tuple(Step(v, (_blocks_of(v, warps), 1, 1), v.threads, 0, args, reason) for v, warps, reason in kernels if warps)
    row_bytes = rows * (8 if p.dtype == "float64" else 4)
    wanted = {"row_lse": True, "row_delta": True, "row_slope": slopes, "row_sink": sinks}
    return Plan(steps, tuple((name, row_bytes) for name, used in wanted.items() if used))


def _by_rows(variant: Variant, family: str, *flags: str) -> Variant:
    """The kernel before or after `variant` that works on rows: only the flags that begin so change its code, and no head dim does."""
    return variant._replace(family=family, head_dim=0, head_dim_v=0, flags=tuple(f for f in variant.flags if f.startswith(flags)))


def _blocks_of(variant: Variant, warps: int) -> int:
    assert isinstance(variant.config, SimpleConfig)
    blocks = -(-warps // variant.config.warps)
    if blocks >= 1 << 31:
        raise UnsupportedError(f"{variant.name} would need {blocks} blocks and a grid has 2^31 - 1", ("calls on fewer heads or batches",))
    return blocks


def _check_head_dims(p: AttentionProblem) -> None:
    if max(p.head_dim, p.head_dim_v) > MAX_HEAD_DIM:
        name, dim = ("head_dim", p.head_dim) if p.head_dim > MAX_HEAD_DIM else ("head_dim_v", p.head_dim_v)
        raise UnsupportedError(f"no kernel for {name} {dim}: {MAX_HEAD_DIM} is the largest for forward and backward")


def _choose(p: AttentionProblem, device: DeviceSpec, table: tuple[Row, ...]) -> tuple[Variant, str]:
    too_big = ""
    for row in table:
        if p.dtype not in row.dtypes or device.capability < row.capability:
            continue
        if p.head_dim > row.head_dims[0] or p.head_dim_v > row.head_dims[1]:
            continue
        if row.arch not in (None, device.arch) or (row.arch and not p.tensor_maps):
            continue
        variant = _variant(p, row)
        if not (row.options or PLAIN[row.family].issuperset(variant.flags)):
            continue
        if row.causal not in (None, "causal" in variant.flags or "local" in variant.flags):
            continue
        if row.longest is not None and _most_keys(p) > row.longest:
            continue
        if variant.smem_bytes <= device.smem_bytes:
            return variant, row.why
        too_big = too_big or f"; {variant.name} would need {variant.smem_bytes} bytes of shared memory and a block has {device.smem_bytes}"
    raise UnsupportedError(
        f"no kernel for {p.dtype} with head_dim {p.head_dim} and head_dim_v {p.head_dim_v} on sm_{device.arch}{too_big}",
        (f"architectures served: {', '.join(f'sm_{arch}' for arch in KNOWN)}",),
    )


def _most_keys(p: AttentionProblem) -> int:
    """How many keys a row sees at most."""
    if p.window_left is None or p.window_right is None:
        return p.seqlen_k
    return min(p.seqlen_k, p.window_left + 1 + p.window_right)


def _variant(p: AttentionProblem, row: Row) -> Variant:
    # mma.sync and wgmma multiply 16 wide, and a warp of fwd_simple holds 32 elements a register: tiles are padded, the true D stays a
    # parameter.
    step = 32 if isinstance(row.config, SimpleConfig) else 16
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
    if isinstance(variant.config, FwdConfig | Sm90Config):
        return -(-p.seqlen_q // variant.config.block_m) * heads
    return _blocks_of(variant, p.seqlen_q * heads)


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step
