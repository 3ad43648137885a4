"""The host path's gradients next to the formula's: `python -m bench.backward` (the command `bwd` will take its place).

Two formulas, as well as NumPy can do them: one that computes P again, as a function of (dout, q, k, v) has to, and one that was handed the
P of the forward, which is what keeping S x S numbers until the backward would buy.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np

import cupyflash

from .cases import Array, Case
from .timing import measure, wall

Three = tuple[Array, Array, Array]


def probabilities(case: Case, q: Array, k: Array, scale: float) -> Array:
    """(B, Hkv, group x Sq, Sk): every one at once; the query heads of a group are more rows of one matmul."""
    P: Array = np.matmul(_rows(q, k) * np.float32(scale), k.transpose(0, 2, 3, 1))
    if case.causal:
        hidden = np.arange(case.seqlen_k) > np.arange(case.seqlen_q)[:, None] + (case.seqlen_k - case.seqlen_q)
        np.copyto(P.reshape(len(q), q.shape[2], *hidden.shape), -np.inf, where=hidden)
    P -= P.max(axis=-1, keepdims=True)
    np.exp(P, out=P)
    P /= P.sum(axis=-1, keepdims=True)
    return P


def formula(dout: Array, q: Array, k: Array, v: Array, out: Array, P: Array, scale: float) -> Three:
    """(dq, dk, dv) as they lie after the products: dV = P^T dO, dS = P * (dO V^T - rowsum(dO * O)), dQ = scale dS K, dK = scale dS^T Q."""
    dO, K, V = _rows(dout, k), k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    dS = np.matmul(dO, V.swapaxes(-1, -2))
    dS -= np.einsum("bhsd,bhsd->bhs", dO, _rows(out, k))[..., None]
    dS *= P
    factor = np.float32(scale)
    return np.matmul(dS, K) * factor, np.matmul(dS.swapaxes(-1, -2), _rows(q, k)) * factor, np.matmul(P.swapaxes(-1, -2), dO)


def _rows(x: Array, k: Array) -> Array:
    """(B, S, Hq, D) as (B, Hkv, group x S, D)."""
    rows: Array = x.transpose(0, 2, 1, 3).reshape(len(x), k.shape[2], -1, x.shape[3])
    return rows


def _peak_mb(call: Callable[[], object]) -> float:
    tracemalloc.start()
    try:
        kept = call()
        del kept
        return tracemalloc.get_traced_memory()[1] / 1e6
    finally:
        tracemalloc.stop()


def main() -> None:
    lines = ["| case (float32) | forward ms | backward ms | formula ms | ratio | formula, P kept | ratio | held MB | formula MB |"]
    lines.append("|" + "---|" * 9)
    for seqlen, heads, heads_kv, dim, causal in (
        (512, 8, 8, 64, False),
        (1024, 8, 8, 64, True),
        (2048, 8, 8, 64, False),
        (2048, 4, 1, 128, True),
        (4096, 4, 4, 64, False),
        (4096, 4, 4, 64, True),
    ):
        case = Case(1, seqlen, seqlen, heads, heads_kv, dim, dim, "float32", causal=causal)
        q, k, v, options = case.inputs()
        out, lse, _ = cupyflash.attention(q, k, v, return_lse=True, **options)
        dout, scale = np.random.default_rng(1).standard_normal(out.shape, dtype=np.float32), dim**-0.5
        P = probabilities(case, q, k, scale)
        calls: dict[str, Callable[[], object]] = {
            "forward": lambda: cupyflash.attention(q, k, v, **options),  # noqa: B023 - called inside the loop
            "backward": lambda: cupyflash.attention_backward(dout, q, k, v, out, lse, **options),  # noqa: B023
            "formula": lambda: formula(dout, q, k, v, out, probabilities(case, q, k, scale), scale),  # noqa: B023
            "kept": lambda: formula(dout, q, k, v, out, P, scale),  # noqa: B023
        }
        ours, theirs = calls["backward"](), calls["formula"]()
        assert np.allclose(_rows(ours.dq, k), theirs[0], atol=1e-4)  # type: ignore[attr-defined,index]
        times = {name: timing.ms for name, timing in measure({name: wall([call]) for name, call in calls.items()}, max_s=4).items()}
        ratios = [times[name] / times["backward"] for name in ("formula", "kept")]
        memory = [_peak_mb(calls[name]) for name in ("backward", "formula")]
        label = case.label.removeprefix("fp32 ")
        cells = [f"{times['forward']:.0f}", f"{times['backward']:.0f}", f"{times['formula']:.0f}", f"{ratios[0]:.2f}x"]
        cells += [f"{times['kept']:.0f}", f"{ratios[1]:.2f}x", f"{memory[0]:.0f}", f"{memory[1]:.0f}"]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    print("\n".join(lines))  # noqa: T201


if __name__ == "__main__":
    main()
