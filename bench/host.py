"""What a call takes on the host, from call to return, with a GPU that keeps up: in CuPy, in torch beside its own attention, and in JAX.

    python -m bench.host              # in a checkout
    python -m cupyflash.bench.host    # installed
        --json FILE    JSON lines, the environment first

All calls have the same small arrays, (1, 128, 4, 64) in bfloat16, and addresses that come back, as those of a training do. A round is a
hundred calls, begun with an empty queue; rounds of all calls take turns, so that a host that is slow for a second is slow for each of them.
Given are the median of 31 rounds and the best: hosts that others use, too, take up to twice as long for some seconds, all of Python
alike. Frameworks that are not installed are left out.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from typing import IO, Any, NamedTuple

import click
import numpy as np

import cupyflash

from .machine import environment

SHAPE = (1, 128, 4, 64)
Ways = dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]  # a call, and what waits until its results are there


class Taken(NamedTuple):
    """Microseconds of a call."""

    median: float
    best: float


def taken(ways: Ways, *, rounds: int = 31, count: int = 100) -> dict[str, Taken]:
    for call, wait in ways.values():
        wait([call() for _ in range(20)])
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (call, wait) in ways.items():
            start = time.perf_counter()
            for _ in range(count):
                made = call()
            took[name].append((time.perf_counter() - start) / count * 1e6)
            wait(made)
    return {name: Taken(statistics.median(times), min(times)) for name, times in took.items()}


def of_cupy() -> Ways:
    import cupy
    import ml_dtypes

    q, k, v = (cupy.asarray(np.ones(SHAPE, ml_dtypes.bfloat16)) for _ in "qkv")
    out = cupy.empty_like(q)

    def wait(_: Any) -> None:
        cupy.cuda.Device().synchronize()

    return {
        "cupy: attention": (lambda: cupyflash.attention(q, k, v, causal=True), wait),
        "cupy: attention, out=": (lambda: cupyflash.attention(q, k, v, causal=True, out=out), wait),
    }


def of_torch() -> Ways:
    import torch

    import cupyflash.torch as ours

    sdpa: Any = torch.nn.functional.scaled_dot_product_attention
    q, k, v = (torch.ones(SHAPE, dtype=torch.bfloat16, device="cuda") for _ in "qkv")
    x = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    heads_first = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    y = [tensor.detach().requires_grad_() for tensor in heads_first]
    out, torchs = ours.attention(*x, causal=True), sdpa(*y, is_causal=True)
    dout, dtorchs = torch.ones_like(out), torch.ones_like(torchs)

    def wait(_: Any) -> None:
        torch.cuda.synchronize()

    calls: dict[str, Callable[[], Any]] = {
        "attention": lambda: cupyflash.attention(q, k, v, causal=True),
        "cupyflash.torch.attention": lambda: ours.attention(q, k, v, causal=True),
        "scaled_dot_product_attention of torch": lambda: sdpa(*heads_first, is_causal=True),
        "cupyflash.torch.attention, with gradient": lambda: ours.attention(*x, causal=True),
        "attention, with gradient": lambda: cupyflash.attention(*x, causal=True),
        "scaled_dot_product_attention of torch, with gradient": lambda: sdpa(*y, is_causal=True),
        "backward of cupyflash.torch.attention": lambda: torch.autograd.grad(out, x, dout, retain_graph=True),
        "backward of scaled_dot_product_attention of torch": lambda: torch.autograd.grad(torchs, y, dtorchs, retain_graph=True),
    }
    return {f"torch: {name}": (call, wait) for name, call in calls.items()}


def of_jax() -> Ways:
    import jax
    from jax.experimental.buffer_callback import buffer_callback

    import cupyflash.jax as ours

    q, k, v = (jax.numpy.ones(SHAPE, "bfloat16") for _ in "qkv")
    like = jax.ShapeDtypeStruct(q.shape, q.dtype)

    def empty(*arrays: Any) -> Any:
        return buffer_callback(lambda ctx, out, *x: None, like, command_buffer_compatible=ours.command_buffers)(*arrays)

    attend = functools.partial(ours.attention, causal=True)
    gradients = jax.grad(lambda *x: attend(*x).sum(), (0, 1, 2))
    calls: dict[str, Callable[..., Any]] = {
        "an empty callback, jitted": jax.jit(empty),
        "attention, jitted": jax.jit(attend),
        "attention": attend,
        "attention and its gradients, jitted": jax.jit(gradients),
    }
    return {f"jax: {name}": (functools.partial(call, q, k, v), jax.block_until_ready) for name, call in calls.items()}


def every() -> Ways:
    """The calls of what is installed."""
    frameworks = {"cupy": of_cupy, "torch": of_torch, "jax": of_jax}
    return {call: way for name, of in frameworks.items() if importlib.util.find_spec(name) for call, way in of().items()}


@click.command()
@click.option("--json", "lines", type=click.File("w", lazy=False), metavar="FILE", help="write JSON lines to FILE, the environment first")
def main(lines: IO[str] | None) -> None:
    """What a call takes on the host, in each framework that is installed here with a GPU."""
    if lines:
        print(json.dumps(environment()), file=lines)
    click.echo(f"{'':<60} {'median':>7}    {'best':>7}")
    for call, us in taken(every()).items():
        click.echo(f"{call:<60} {us.median:7.1f}    {us.best:7.1f} us")
        if lines:
            print(json.dumps({"record": "host", "call": call, "us": round(us.median, 1), "best_us": round(us.best, 1)}), file=lines)


if __name__ == "__main__":
    main()
