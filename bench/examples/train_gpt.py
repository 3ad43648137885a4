"""A GPT trained with the attention of `cupyflash.torch`, and again with backends of torch's own: do the losses go the same way?

    python -m bench.examples.train_gpt              # in a checkout
    python -m cupyflash.bench.examples.train_gpt    # installed
        --attention NAME...   which to train with: cupyflash, or cudnn, flash, efficient or math, the backends of torch's SDPA; one that is
                              named twice trains twice
        --steps N             200 by default
        --compile             torch.compile the model
        --deterministic       no run of cupyflash differs from another by a bit, at a cost: dq is computed by a kernel of its own
        --json                one JSON object in place of the table
        --png FILE            draw the losses (pip install 'cupyflash[plot]')

On a GPU it is 12 layers of 12 query heads and 4 key heads, D = 64, in bfloat16 autocast, on 16 rows of 1024 bytes a step; on a CPU 2
layers of 2 heads in float32, on 4 rows of 64, so that it ends within seconds. The text is what `help()` knows of Python's topics, half a
megabyte that comes with every Python; a token is a byte. All runs begin with the same weights and read the same rows, so that their losses
differ by rounding alone. Rounding grows from step to step, as in any training: the measure of how much it may is the difference between
two of torch's own backends, and between two runs of one, whose backward adds in no fixed order.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import pydoc_data.topics
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cupyflash.torch  # first: where there is no PyTorch it says how to get it

import torch  # isort: skip
from torch.nn import functional as F  # noqa: N812  # as in all of its documentation
from torch.nn.attention import SDPBackend, sdpa_kernel

Attention = Callable[[Any, Any, Any], Any]  # q (B, T, Hq, D), k and v (B, T, Hkv, D) -> (B, T, Hq, D), causal

HEAD_DIM = 64
WARMUP = 40  # steps in which the learning rate rises, and which are not timed, if there are twice as many
TURN = 20  # steps that one training takes before the next has its turn
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True)
class Config:
    layers: int
    heads: int
    heads_kv: int
    batch: int
    length: int
    rate: float = 6e-4  # of learning

    @property
    def width(self) -> int:
        return self.heads * HEAD_DIM


# Of 12 layers the losses jump with a rate of 6e-4, when it has risen, and runs of one backend came 0.06 apart there.
CONFIGS = {"cuda": Config(12, 12, 4, 16, 1024, 3e-4), "cpu": Config(2, 2, 1, 4, 64)}


def flash_attention(q: Any, k: Any, v: Any) -> Any:
    return cupyflash.torch.attention(q, k, v, causal=True)


def torchs_attention(backend: SDPBackend) -> Attention:
    def attention(q: Any, k: Any, v: Any) -> Any:
        if backend == SDPBackend.EFFICIENT_ATTENTION:  # which has no grouped heads
            k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)

    return attention


class Block(torch.nn.Module):
    """Attention and a layer of 4 x width, each after a norm and added to what came in."""

    def __init__(self, config: Config, attention: Attention) -> None:
        super().__init__()
        width, self.attention = config.width, attention
        self.heads = [config.heads, config.heads_kv, config.heads_kv]
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(width) for _ in range(2)])
        self.qkv = torch.nn.Linear(width, sum(self.heads) * HEAD_DIM, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (-1, HEAD_DIM)).split(self.heads, dim=2)  # three views, which are not copied
        x = x + self.out(self.attention(q, k, v).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(torch.nn.Module):
    """GPT-2's layers (Radford et al. 2019) over bytes, with grouped key heads (arXiv 2305.13245)."""

    def __init__(self, config: Config, attention: Attention) -> None:
        super().__init__()
        self.bytes = torch.nn.Embedding(256, config.width)
        self.positions = torch.nn.Embedding(config.length, config.width)
        self.blocks = torch.nn.ModuleList([Block(config, attention) for _ in range(config.layers)])
        self.norm = torch.nn.LayerNorm(config.width)
        self.head = torch.nn.Linear(config.width, 256, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Any, targets: Any) -> Any:
        """The mean loss in nats a byte."""
        x = self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def text() -> Any:
    """(bytes,) int64: what Python's help says of its topics, one behind the other."""
    topics = pydoc_data.topics.topics
    return torch.frombuffer(bytearray("\n\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8).long()


def rows(config: Config, steps: int, seed: int) -> Iterator[tuple[Any, Any]]:
    """The same tokens and targets (B, T) of each step for the same seed."""
    generator, data = torch.Generator().manual_seed(seed), text()
    for _ in range(steps):
        starts = torch.randint(len(data) - config.length, (config.batch, 1), generator=generator)
        window = data[starts + torch.arange(config.length + 1)]
        yield window[:, :-1], window[:, 1:]


@dataclass
class Run:
    losses: list[float]
    step_ms: float  # the median of turns


def train(config: Config, attention: Attention, *, steps: int, **options: Any) -> Run:
    """One training alone."""
    return train_in_turns(config, {"": attention}, steps=steps, **options)[""]


def train_in_turns(config: Config, attentions: dict[str, Attention], *, steps: int, **options: Any) -> dict[str, Run]:
    """Trainings that take turns of some steps, so that a machine that is slow for seconds is slow for all of them."""
    trainings = {name: training(config, attention, steps=steps, **options) for name, attention in attentions.items()}
    turns: dict[str, list[tuple[list[float], float]]] = {name: [] for name in trainings}
    for _ in range(0, steps, TURN):
        for name, one in trainings.items():
            turns[name].append(next(one))
    untimed = WARMUP // TURN if steps >= 2 * WARMUP else 0
    return {
        name: Run([loss for losses, _ in taken for loss in losses], statistics.median(ms for _, ms in taken[untimed:]))
        for name, taken in turns.items()
    }


def training(
    config: Config, attention: Attention, *, steps: int, seed: int = 0, device: str = "cpu", compiled: str | None = None
) -> Iterator[tuple[list[float], float]]:
    """The losses of a turn and the milliseconds of a step in it, turn by turn; `compiled` is a mode of torch.compile."""
    torch.manual_seed(seed)
    model: Any = GPT(config, attention).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=config.rate, betas=(0.9, 0.95), weight_decay=0.1, fused=device == "cuda")
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, start_factor=1 / WARMUP, total_iters=WARMUP)
    forward = torch.compile(model, mode=compiled) if compiled else model
    data = [(tokens.to(device), targets.to(device)) for tokens, targets in rows(config, steps, seed)]
    for first in range(0, steps, TURN):
        turn = data[first : first + TURN]
        losses: list[Any] = []
        start = now(device)
        for tokens, targets in turn:  # in which the host waits for nothing
            with torch.autocast(device, torch.bfloat16) if device == "cuda" else contextlib.nullcontext():
                loss = forward(tokens, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            optimiser.zero_grad()
            schedule.step()
            losses.append(loss.detach().clone())  # in a CUDA graph the next step writes where this one did
        ms = (now(device) - start) / len(turn) * 1e3
        yield torch.stack(losses).tolist(), ms


def now(device: str) -> float:
    """Seconds, when all that was queued is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def difference(a: Run, b: Run) -> float:
    """The largest between the losses of two runs at one step."""
    return max(abs(x - y) for x, y in zip(a.losses, b.losses, strict=True))


def draw(runs: dict[str, Run], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, run in runs.items():
        axes.plot(run.losses, label=f"{name}, {run.step_ms:.1f} ms a step", linewidth=1)
    axes.set(xlabel="step", ylabel="loss in nats a byte")
    axes.legend()
    figure.savefig(path, dpi=150)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="train_gpt", description="Train a small GPT with cupyflash and with torch's own attention.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    others = ["cudnn", "flash", "efficient", "flash"] if device == "cuda" else ["flash", "math"]
    parser.add_argument("--attention", nargs="+", choices=["cupyflash", *BACKENDS], default=["cupyflash", *others])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cuda", "cpu"], default=device)
    modes = ["default", "reduce-overhead"]
    parser.add_argument(
        "--compile", nargs="?", const="default", choices=modes, help="torch.compile it, with CUDA graphs by reduce-overhead"
    )
    parser.add_argument("--deterministic", action="store_true", help="runs of cupyflash repeat bit by bit")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the losses")
    asked = parser.parse_args(arguments)

    if asked.png and not importlib.util.find_spec("matplotlib"):
        parser.error("--png needs matplotlib: pip install 'cupyflash[plot]'")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to be deterministic
    config, named = CONFIGS[asked.device], {}
    for n, kind in enumerate(asked.attention):
        name = kind if kind not in named else f"{kind} {asked.attention[: n + 1].count(kind)}"
        named[name] = flash_attention if kind == "cupyflash" else torchs_attention(BACKENDS[kind])
    before = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    torch.use_deterministic_algorithms(asked.deterministic, warn_only=True)
    if asked.device == "cpu":
        torch.set_num_threads(1)  # idle threads of torch wait by spinning: on two busy cores a step of 23 ms took 1100 beside one of them
    try:
        runs = train_in_turns(config, named, steps=asked.steps, seed=asked.seed, device=asked.device, compiled=asked.compile)
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.set_num_threads(before[1])
    pairs = [(a, b) for n, a in enumerate(runs) for b in [*runs][n + 1 :]]
    differences = {f"{a} - {b}": difference(runs[a], runs[b]) for a, b in pairs}
    if asked.json:
        where = torch.cuda.get_device_name() if asked.device == "cuda" else "cpu"
        facts = {"device": where, "torch": torch.__version__, "config": asdict(config), "steps": asked.steps, "compiled": asked.compile}
        every = {name: asdict(run) for name, run in runs.items()}
        print(json.dumps(facts | {"deterministic": asked.deterministic, "runs": every, "largest difference": differences}))
    else:
        for name, run in runs.items():
            print(f"{name:<10} loss {run.losses[0]:.4f} -> {run.losses[-1]:.4f}   {run.step_ms:8.2f} ms a step")
        for pair, largest in differences.items():
            print(f"largest difference of the losses, {pair:<22} {largest:.2e}")
        of_ours = [pair for pair in differences if "cupyflash" in pair]
        for what, some in (("of cupyflash and a run of torch's", of_ours), ("of two runs of torch's", differences.keys() - of_ours)):
            if some:
                print(f"largest difference {what:<38} {max(differences[pair] for pair in some):.2e}")
    if asked.png:
        draw(runs, asked.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
