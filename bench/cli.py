"""The commands of cupyflash-bench: they read the options, call the modules that do the work, and answer with an exit code.

0: good; 1: a check failed; 2: a mistake in the command; 3: no GPU, or something in the setup is missing.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import math
import os
import site
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import IO, Any, TypeVar

import click

import cupyflash

from . import check as checking
from . import gpu, kernels, tables, tune
from . import peers as contestants
from .cases import (
    CACHE_DTYPES,
    DTYPES,
    CacheCase,
    Case,
    available_dtypes,
    check_suite,
    drawn_lengths,
    gpu_tour_suite,
    packed,
    short,
    tour_suite,
)
from .machine import diagnose, environment, nvidia_driver
from .peer import Peer
from .peers import LATE, OURS, PEERS, Comparison, Outcome
from .presets import preset_option
from .report import Report, console
from .timing import HOST, MIN_ROUNDS, Place

GOOD, FAILED, USAGE, SETUP = 0, 1, 2, 3
TOKENS, LONGEST = 32768, 8192  # of packed sequences, where nothing else is said
TOUR_S = 22.0  # a case that would not be over by then is left out: the tour promises half a minute, also on a slow machine


def as_sizes(ctx: click.Context, param: click.Parameter, value: str | None, *, least: int = 1) -> tuple[int, ...] | None:
    """Sizes in a list: "512", "4k", "1k,4k", "512:16k:x2" (each one twice the last)."""

    def size(text: str) -> int:
        number = int(text[:-1]) * 1024 if text[-1:] in ("k", "K") else int(text)
        if number < least:
            raise ValueError
        return number

    def sizes(part: str) -> list[int]:
        if ":" not in part:
            return [size(part)]
        first, last, factor = part.split(":")
        if not factor.startswith("x") or int(factor[1:]) < 2:
            raise ValueError
        powers = itertools.accumulate(itertools.repeat(int(factor[1:])), lambda number, by: number * by, initial=size(first))
        return list(itertools.takewhile(lambda number: number <= size(last), powers))

    if value is None:
        return None
    try:
        return tuple(number for part in value.split(",") for number in sizes(part))
    except ValueError:
        raise click.BadParameter(f"{value!r} is no size: write 512, 4k, 1k,4k or 512:16k:x2") from None


def as_size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    sizes = as_sizes(ctx, param, value)
    if sizes is not None and len(sizes) != 1:
        raise click.BadParameter(f"{value!r} is not one size: write 512 or 4k")
    return sizes[0] if sizes else None


def as_cells(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[tuple[int, int], ...] | None:
    """Sequences and keys in pairs: "1:64k,32:8k"."""
    if value is None:
        return None
    cells = [as_sizes(ctx, param, cell.replace(":", ",")) or () for cell in value.split(",")]
    if any(len(cell) != 2 for cell in cells):
        raise click.BadParameter(f"{value!r} has something else than sequences:keys: write 1:64k,32:8k")
    return tuple((batch, keys) for batch, keys in cells)


def as_pair(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, int]:
    """One number or two: heads "8" or "32/8", head dims "128" or "192-128"."""
    try:
        numbers = [int(part) for part in value.replace("-", "/").split("/")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or min(numbers) < 1:
        raise click.BadParameter(f"{value!r} is neither a number nor a pair such as {param.metavar}")
    return numbers[0], numbers[-1]


def as_pairs(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[tuple[int, int], ...] | None:
    return None if value is None else tuple(as_pair(ctx, param, part.replace("x", "/")) for part in value.split(","))


def as_heads(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, int] | None:
    """A pair, or None for "auto": as many as make heads x head dim 2048, the field's convention for comparing head dims."""
    return None if value == "auto" else as_pair(ctx, param, value)


def as_window(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int | None, int | None] | None:
    """LEFT,RIGHT: keys before the diagonal and after it, "-" for all of them."""
    if value is None:
        return None
    try:
        left, right = (None if side in ("-", "-1") else int(side) for side in value.split(","))
        if min(left or 0, right or 0) < 0:
            raise ValueError
    except ValueError:
        raise click.BadParameter(f"{value!r} is no window: write 4096,0 or -,0") from None
    return left, right


def as_share(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """ "3%" -> 0.03."""
    if value is None:
        return None
    try:
        share = float(value.removesuffix("%")) / 100
        if not (value.endswith("%") and 0 <= share < 10):
            raise ValueError
    except ValueError:
        raise click.BadParameter(f"{value!r} is no share: write 3%") from None
    return share


def dtype_name(text: str) -> str:
    """A dtype by its short or its long name."""
    name = {brief: name for name, brief in DTYPES.items()}.get(text, text)
    if name not in DTYPES:
        raise click.BadParameter(f"{text!r} is not one of {', '.join(DTYPES.values())}", param_hint="'--dtype'")
    return name


def as_names(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """Names of peers, or None for "all"."""
    if value is None:
        return ()
    known = dict.fromkeys(peer.name for peer in PEERS)
    names = value.split(",")
    if unknown := [name for name in names if name not in known and value != "all"]:
        raise click.BadParameter(f"there is no {unknown[0]!r} here, only {', '.join(known)}")
    return None if value == "all" else tuple(names)


def add_sites(ctx: click.Context, param: click.Parameter, folders: tuple[str, ...]) -> None:
    """In front of what is installed, and with the .pth files in them, which PYTHONPATH would not read."""
    ctx.meta["sites"] = folders
    for folder in folders:
        before = list(sys.path)
        site.addsitedir(os.path.abspath(folder))  # noqa: PTH100 - the one form that sys.path has
        sys.path[:] = [*(path for path in sys.path if path not in before), *before]


ELSEWHERE = (
    "cache",
    "ceilings",
    "diff",
    "explain",
    "lesson",
    "plot",
)  # commands in modules of their names, imported when they are asked for


class Commands(click.Group):
    """A group whose first command is the tour, whose mistakes are one line, and whose commands return their exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted((*super().list_commands(ctx), *ELSEWHERE))

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        found: click.Command | None = (
            importlib.import_module(f".{name}", __package__).command if name in ELSEWHERE else super().get_command(ctx, name)
        )
        return found

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {option for parameter in self.get_params(ctx) for option in parameter.opts}
        if not args or (args[0].startswith("-") and args[0].split("=")[0] not in own):
            args = ["tour", *args]
        return super().parse_args(ctx, args)

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> Any:
        try:
            sys.exit(super().main(args, *rest, **{**options, "standalone_mode": False}) or GOOD)
        except click.UsageError as error:
            command = error.ctx.command_path if error.ctx else "cupyflash-bench"
            message = " ".join(error.format_message().split()).rstrip(".")
            click.echo(f"{command}: {message} (see {command} --help)", err=True)
            sys.exit(USAGE)
        except cupyflash.SetupError as error:
            click.echo(f"cupyflash-bench: {error}", err=True)
            sys.exit(SETUP)
        except click.Abort:
            click.echo("cupyflash-bench: interrupted", err=True)
            sys.exit(130)  # as a shell reports SIGINT


F = TypeVar("F", bound=Callable[..., Any])


def json_option(function: F) -> F:
    text = "Write JSON lines to FILE, the environment first; '-' is stdout, and the table moves to stderr."
    return click.option("--json", "json_file", type=click.Path(dir_okay=False, allow_dash=True), metavar="FILE", help=text)(function)


def open_report(json_file: str | None, stack: ExitStack, *, stderr: bool = False, **more: Any) -> Report:
    """The report of a command, with the header record and what is `more` in it already in its JSON lines."""
    if json_file is None:
        return Report(console(stderr=stderr))
    report = Report(console(stderr=stderr or json_file == "-"), open_lines(json_file, stack, "--json"))
    report.record({**environment(), **more})
    return report


def open_lines(file: str, stack: ExitStack, option: str) -> IO[str]:
    """A file to write, "-" for stdout."""
    try:
        return stack.enter_context(click.open_file(file, "w", encoding="utf-8"))
    except OSError as error:
        raise click.BadParameter(f"cannot write {file}: {error.strerror}", param_hint=f"'{option}'") from None


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(cupyflash.__version__, message="cupyflash %(version)s")
def main() -> None:
    """Exact attention on this machine: what it costs, whether it is right, what is missing.

    Without a command: a tour of at most 30 seconds.

    Exit codes: 0 good, 1 a check failed, 2 a mistake in the command, 3 no GPU or something missing in the setup.
    """


def device_option(function: F) -> F:
    text = "Where the arrays are; by default in GPU memory, if there is a GPU."
    return click.option("--device", type=click.Choice(["gpu", "host"]), help=text)(function)


def open_place(device: str | None) -> Place:
    """The place that was asked for: SetupError where it is the GPU and there is none. A GPU that cannot be used is not passed over in
    silence."""
    if device is None and (reason := gpu.why_not()):
        if nvidia_driver().gpus:
            console(stderr=True).print(
                f"There is a GPU, and arrays are in host memory all the same: {reason}", style="yellow", markup=False
            )
        return HOST
    return HOST if device == "host" else gpu.open_place()


@main.command()
@device_option
@json_option
def tour(device: str | None, json_file: str | None) -> int:
    """What this machine does, in 30 seconds (the default)."""
    start = time.perf_counter()
    with ExitStack() as stack:
        report, place = open_report(json_file, stack), open_place(device)
        machine = environment()
        report.introduce(machine, place)
        if place.arch:
            suite, names, min_s = gpu_tour_suite(), [OURS, "standard", "sdpa-flash", "sdpa-cudnn"], 0.15
            compiled = cupyflash.warmup([contestants.problem(case) for case in suite])
            seconds = max((kernel.seconds for kernel in compiled if not kernel.cached), default=0.0)
            report.say(f"  nvrtc {len(compiled)} kernels, {seconds:.1f} s to compile, kept for the next time")
        else:
            suite, names, min_s = tour_suite(), [OURS, "standard"], 0.3
        found = run_timings(report, suite, contestants.peers_at(place.name, names), place, min_s=min_s, deadline=start + TOUR_S)
        report.memory_lesson(found)
        shapes = "--tokens 16k --seqlen 1k:16k:x2 --causal" if place.arch else "--seqlen 1k:4k:x2 --heads 8/2 --causal"
        report.next_steps(
            ("check", "is every option right on this machine?"),
            (f"{'compare' if place.arch else 'fwd'} {shapes}", "the same for your shapes"),
            ("doctor", "is everything there that the GPU needs?" if machine["devices"] else "what a GPU would need"),
        )
    return exit_code(found)


def data_options(dim: str) -> tuple[Callable[[F], F], ...]:
    return (
        click.option("--dim", callback=as_pairs, default=dim, show_default=True, metavar="192-128", help="Of q, k - of v; also 64,128."),
        click.option("--dtype", metavar="NAMES", help=f"A list of {', '.join(DTYPES.values())}; default bf16 on a GPU, fp32 on the host."),
    )


def peer_options(default: str | None) -> tuple[Callable[[F], F], ...]:
    names = ", ".join(dict.fromkeys(peer.name for peer in PEERS))
    return (
        click.option("--peers", callback=as_names, default=default, show_default=True, metavar="NAMES", help=f"all, or of {names}."),
        click.option(
            "--site",
            multiple=True,
            callback=add_sites,
            expose_value=False,
            is_eager=True,
            metavar="DIR",
            help="A folder of packages with peers, .pth files and all.",
        ),
    )


batch_option = click.option("--batch", callback=as_sizes, metavar="SIZES", help="Sequences; default 1.")
MASK_OPTIONS = (
    click.option("--window", callback=as_window, metavar="LEFT,RIGHT", help="Keys before and after the diagonal; - is all."),
    click.option("--softcap", type=click.FloatRange(min=0, min_open=True), metavar="C", help="Scores bounded to (-C, C)."),
    click.option("--sink", is_flag=True, help="A score for each head that only adds to the sum of the weights."),
)
HOW_OPTIONS = (
    click.option("--list-peers", is_flag=True, help="Say which peers are here, and why others are not."),
    click.option(
        "--timer", type=click.Choice(["graph", "events", "wall"]), help="Default graph on a GPU; wall is all there is on the host."
    ),
    click.option(
        *("--max-noise", "max_noise"),
        callback=as_share,
        default="5%",
        show_default=True,
        metavar="5%",
        help="Rounds go on for up to four times --min-time until spreads are below; ~ marks those that are not.",
    ),
    click.option("--repro", is_flag=True, help="Print the command that times a case alone above its rows."),
    click.option("--csv", "csv_file", type=click.Path(dir_okay=False, allow_dash=True), metavar="FILE", help="Write a table of results."),
    click.option("--md", "md_file", type=click.Path(dir_okay=False, allow_dash=True), metavar="FILE", help="The same in Markdown."),
)
ROUND_OPTIONS = (
    click.option("--cold/--warm", default=True, show_default=True, help="Inputs out of the GPU's L2 cache, or left in it."),
    click.option("--rounds", type=click.IntRange(min=1), default=MIN_ROUNDS, show_default=True, help="At least as many a peer."),
    click.option(
        "--min-time", type=click.FloatRange(min=0.01), default=0.5, show_default=True, metavar="S", help="Seconds of rounds a peer."
    ),
)
PACKED_OPTIONS = (
    click.option("--varlen", is_flag=True, help="Sequences of many lengths packed in an array, 32k --tokens in all; with --seqlen of one."),
    click.option("--longest", callback=as_size, metavar="SIZE", help="The longest sequence of --varlen; default 8k."),
)
CACHE_OPTIONS = (
    batch_option,
    click.option("--seqlen-k", callback=as_sizes, metavar="SIZES", help="Keys of each sequence in the cache; default 8k."),
    click.option("--cells", callback=as_cells, metavar="1:64k,32:8k", help="Pairs of the two, instead of every combination."),
    click.option(
        "--rows", callback=as_sizes, default="1", show_default=True, metavar="SIZES", help="New tokens of each sequence, its last; causal."
    ),
    click.option("--heads", callback=as_pairs, default="32/8", show_default=True, metavar="32/8,...", help="Query / key heads."),
    click.option(
        "--page-size",
        callback=functools.partial(as_sizes, least=0),
        default="0",
        show_default=True,
        metavar="SIZES",
        help="Slots of a page; pages lie in any order. 0: a cache without pages.",
    ),
    click.option("--cache", type=click.Choice([*CACHE_DTYPES.values()]), help="What the cache is kept in; default --dtype."),
)
SIZES = "SIZES are lists: 512, 4k, 1k,4k or 512:16k:x2 (each twice the last). Every combination is timed."


def all_of(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Options as one, listed by --help in this order."""

    def apply(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return apply


def case_options(*, tuning: bool = False) -> tuple[Callable[[F], F], ...]:
    """Shapes and masks; `variants` tunes for them, too."""
    return (
        batch_option,
        click.option("--seqlen", callback=as_sizes, metavar="SIZES", help="Queries, and keys as many; default 1k."),
        click.option("--seqlen-k", callback=as_sizes, metavar="SIZES", help="Keys, where they are not as many."),
        click.option("--tokens", callback=as_sizes, metavar="SIZES", help="As many sequences as make this many queries; not --batch."),
        *(() if tuning else (*PACKED_OPTIONS, preset_option)),
        click.option(
            "--heads", callback=as_heads, default="8", show_default=True, metavar="32/8", help="Query / key heads; auto: 2048 / dim."
        ),
        click.option("--causal", "causal", flag_value="yes", help="Bottom-right where the lengths differ."),
        click.option("--no-causal", "causal", flag_value="no", help="Every key is seen (the default)."),
        click.option("--both", "causal", flag_value="both", help="Causal and not, in turn."),
        *(MASK_OPTIONS[:2] if tuning else MASK_OPTIONS),
    )


def timing_options(default_peers: str | None, *, tuning: bool = False) -> Callable[[F], F]:
    """What `fwd`, `bwd` and `compare` share: all but the peers that they time when none is named. `variants` has those that mean something
    for tuning, and its own defaults of what it has without, too."""
    return all_of(
        *case_options(tuning=tuning),
        *(() if tuning else data_options("64")),
        *peer_options(default_peers),
        click.option("--family", metavar="NAME", help="Only kernels of this family: fwd_sm80, bwd_sm80, ..."),
        *(() if tuning else HOW_OPTIONS),
        *ROUND_OPTIONS,
        *(() if tuning else (device_option,)),
        json_option,
    )


@main.command(epilog=SIZES)
@timing_options(f"{OURS},standard")
def fwd(**options: Any) -> int:
    """Time the forward pass of your own shapes."""
    return time_cases(**options)


deterministic_option = click.option("--deterministic", is_flag=True, help="Gradients equal bit by bit in every run.")


@main.command(epilog=SIZES)
@timing_options(f"{OURS},standard")
@deterministic_option
def bwd(deterministic: bool, **options: Any) -> int:
    """Time the backward pass of your own shapes: dq, dk and dv, from what the forward has left."""
    return time_cases(backward=True, deterministic=deterministic, **options)


@main.command(epilog=SIZES)
@all_of(
    *CACHE_OPTIONS,
    preset_option,
    *data_options("128"),
    *MASK_OPTIONS,
    *peer_options("all"),
    *HOW_OPTIONS,
    *ROUND_OPTIONS,
    device_option,
    json_option,
)
def decode(**options: Any) -> int:
    """Time a few new tokens over a cache of keys, by every implementation found here.

    One token is a step of a decode, limited by the bytes of the cache; --rows 512 is a chunk of a prefill. The keys of the new tokens are
    in the cache already. Results are checked and peers found as `compare` does it.
    """
    return time_cases(cached=True, **options)


@main.command(epilog=SIZES)
@click.option("--mode", type=click.Choice(["fwd", "bwd"]), default="fwd", show_default=True, help="The forward pass, or the backward.")
@timing_options("all")
@deterministic_option
def compare(mode: str, deterministic: bool, **options: Any) -> int:
    """Time every implementation found here, side by side in one process.

    Each result is compared with float64 first; a wrong one is not timed. Peers that are not installed are looked for in the folders of
    --site, as `pip install --target DIR` makes them.
    """
    if deterministic and mode != "bwd":
        raise click.BadParameter("it is for --mode bwd: results of the forward always are", param_hint="'--deterministic'")
    return time_cases(backward=mode == "bwd", deterministic=deterministic, **options)


def time_cases(
    *,
    device: str | None,
    json_file: str | None,
    peers: tuple[str, ...] | None,
    list_peers: bool,
    timer: str | None,
    cold: bool,
    rounds: int,
    min_time: float,
    max_noise: float,
    repro: bool,
    csv_file: str | None,
    md_file: str | None,
    family: str | None = None,
    varlen: bool = False,
    cached: bool = False,
    backward: bool = False,
    **shapes: Any,
) -> int:
    """What fwd, bwd, decode and compare do."""
    place = open_place(device)
    chosen = contestants.peers_at(place.name, peers, keys="packed" if varlen else "cache" if cached else "")
    if list_peers:
        Report(console()).peers(contestants.versions(chosen))
        return GOOD
    if not chosen:
        raise click.BadParameter(f"none of {', '.join(peers or ())} computes on the {place.name}", param_hint="'--peers'")
    if timer is not None and timer not in place.timers:
        raise click.BadParameter(f"{timer!r} needs a GPU: the host path returns when its work is done", param_hint="'--timer'")
    check_family(family, place, "BACKWARD" if backward else "FORWARD")
    names = (shapes.pop("dtype") or "").split(",")  # "" is the place's default
    how: dict[str, Any] = {} if cached else {"varlen": varlen, "backward": backward}
    cases = [case for name in names for case in (cache_cases if cached else as_cases)(place, dtype=name, **how, **shapes)]
    if (json_file, csv_file, md_file).count("-") > 1:
        raise click.UsageError("only one of --json, --csv and --md can be stdout")
    with ExitStack() as stack:
        writers = {tables.write_csv: ("--csv", csv_file), tables.write_md: ("--md", md_file)}
        files = {write: open_lines(file, stack, option) for write, (option, file) in writers.items() if file}
        report = open_report(json_file, stack, stderr="-" in (csv_file, md_file), peers=contestants.versions(chosen), family=family)
        report.noise = max_noise
        if repro:
            report.command_of = functools.partial(tables.command_of, peers=[peer.name for peer in chosen], rest=as_asked())
        stack.enter_context(kernels.only_family(family))
        how = {"timer": timer, "cold": cold, "min_rounds": rounds, "min_s": min_time, "max_noise": max_noise}
        found = run_timings(report, cases, chosen, place, **how)
        for write, file in files.items():
            write(found, file)
    return exit_code(found)


def as_asked() -> list[str]:
    """The options of this command that are no case, as they were given."""
    context = click.get_current_context()
    names = ("device", "family", "timer", "cold", "rounds", "min_time", "max_noise")
    given = {name: context.params[name] for name in names if is_given(context, name)}
    sites = [word for folder in context.meta.get("sites", ()) for word in ("--site", folder)]
    spelled = {"cold": ["--cold" if given.get("cold") else "--warm"], "max_noise": ["--max-noise", f"{given.get('max_noise', 0) * 100:g}%"]}
    return sites + [word for name, x in given.items() for word in spelled.get(name, [f"--{name.replace('_', '-')}", str(x)])]


def is_given(context: click.Context, name: str) -> bool:
    sources = click.core.ParameterSource
    return context.get_parameter_source(name) not in (sources.DEFAULT, sources.DEFAULT_MAP, None) and name in context.params


def check_family(family: str | None, place: Place, table: str = "FORWARD") -> None:
    known = kernels.families(table)
    if family is not None and (place is HOST or family not in known):
        raise click.BadParameter(f"{family!r} is no family of GPU kernels here: {', '.join(known)}, on a GPU", param_hint="'--family'")


def as_cases(
    place: Place,
    *,
    batch: tuple[int, ...] | None,
    seqlen: tuple[int, ...] | None,
    seqlen_k: tuple[int, ...] | None,
    tokens: tuple[int, ...] | None,
    heads: tuple[int, int] | None,
    dim: tuple[tuple[int, int], ...],
    dtype: str | None,
    causal: str | None,
    window: tuple[int | None, int | None] | None,
    softcap: float | None,
    sink: bool = False,
    varlen: bool = False,
    longest: int | None = None,
    backward: bool = False,
    deterministic: bool = False,
) -> list[Case]:
    """Every combination of the options, the head dims outermost."""
    check_heads(*([heads] if heads else []))
    name = dtype_at(place, dtype)
    if varlen:
        shapes = packed_shapes(batch, seqlen, seqlen_k, tokens, longest)
    elif longest is not None:
        raise click.BadParameter("it is for --varlen", param_hint="'--longest'")
    else:
        shapes = dense_shapes(batch or (1,), seqlen or (1024,), seqlen_k, tokens)
    masks = {"both": (False, True), "yes": (True,)}.get(causal or "no", (False,))
    how: dict[str, Any] = {**masked_by(window, softcap, sink), "dtype": name, "backward": backward, "deterministic": deterministic}
    cases = []
    for (d, dv), masked, shape in itertools.product(dim, masks, shapes):
        hq, hkv = heads or (max(1, 2048 // d),) * 2
        cases.append(Case(num_heads_q=hq, num_heads_kv=hkv, head_dim=d, head_dim_v=dv, causal=masked, **shape, **how))
    return cases


def masked_by(window: tuple[int | None, int | None] | None, softcap: float | None, sink: bool) -> dict[str, Any]:
    return {"window_size": window, "softcap": softcap, "extras": ("sink",) if sink else ()}


def check_heads(*pairs: tuple[int, int]) -> None:
    for hq, hkv in pairs:
        if hq % hkv:
            raise click.BadParameter(f"{hq} query heads are no multiple of {hkv} key heads", param_hint="'--heads'")


def dtype_at(place: Place, dtype: str | None) -> str:
    """The dtype that was asked for, or the place's default."""
    name = dtype_name(dtype or ("bf16" if place.arch else "fp32"))
    if name not in available_dtypes() and not (place.arch and gpu.torch_with_cuda()):
        raise click.BadParameter("bfloat16 without torch needs ml_dtypes: pip install ml_dtypes", param_hint="'--dtype'")
    return name


def cache_cases(
    place: Place,
    *,
    batch: tuple[int, ...] | None,
    seqlen_k: tuple[int, ...] | None,
    cells: tuple[tuple[int, int], ...] | None,
    rows: tuple[int, ...],
    heads: tuple[tuple[int, int], ...],
    page_size: tuple[int, ...],
    cache: str | None,
    dim: tuple[tuple[int, int], ...],
    dtype: str | None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sink: bool = False,
) -> list[CacheCase]:
    """Every combination of the options, the head dims outermost, the pages innermost."""
    check_heads(*heads)
    if cells and (batch or seqlen_k):
        raise click.BadParameter("its pairs say what --batch and --seqlen-k would", param_hint="'--cells'")
    cells = cells or tuple(itertools.product(batch or (1,), seqlen_k or (8192,)))
    if max(rows) > min(keys for _, keys in cells):
        raise click.BadParameter("more new tokens than the cache has keys of a sequence, theirs among them", param_hint="'--rows'")
    if cache == "fp8" and not (gpu.torch_with_cuda() if place.arch else importlib.util.find_spec("ml_dtypes")):
        needed = "torch with CUDA" if place.arch else "ml_dtypes"
        raise click.BadParameter(f"fp8 needs {needed}, which is not installed", param_hint="'--cache'")
    name, kept = dtype_at(place, dtype), {brief: name for name, brief in CACHE_DTYPES.items()}.get(cache or "", "")
    how = masked_by(window, softcap, sink)
    return [
        CacheCase(b, n, keys, hq, hkv, d, dv, name, causal=n > 1, page_size=slots, cache_dtype=kept, **how)
        for (d, dv), (hq, hkv), (b, keys), n, slots in itertools.product(dim, heads, cells, rows, page_size)
    ]


def dense_shapes(
    batch: tuple[int, ...], seqlen: tuple[int, ...], seqlen_k: tuple[int, ...] | None, tokens: tuple[int, ...] | None
) -> list[dict[str, Any]]:
    if tokens is not None and min(tokens) < max(seqlen):
        raise click.BadParameter("fewer tokens than one sequence has", param_hint="'--tokens'")
    sizes = [(n // sq if tokens else n, sq, sk) for n in tokens or batch for sq in seqlen for sk in seqlen_k or (sq,)]
    return [dict(zip(("batch", "seqlen_q", "seqlen_k"), size, strict=True)) for size in sizes]


def packed_shapes(
    batch: tuple[int, ...] | None,
    seqlen: tuple[int, ...] | None,
    seqlen_k: tuple[int, ...] | None,
    tokens: tuple[int, ...] | None,
    longest: int | None,
) -> list[dict[str, Any]]:
    """With --varlen: sequences as they are drawn or, with --seqlen, as many of one length as the tokens make."""
    if batch is not None:
        raise click.BadParameter("with --varlen there are as many sequences as make --tokens", param_hint="'--batch'")
    if seqlen_k is not None:
        raise click.BadParameter("with --varlen the keys of a sequence are as many as its queries", param_hint="'--seqlen-k'")
    if seqlen is not None and longest is not None:
        raise click.BadParameter("with --seqlen all sequences have that length", param_hint="'--longest'")
    counts, longest = tokens or (TOKENS,), longest or LONGEST
    if min(counts) < max(seqlen or (longest,)):
        raise click.BadParameter(f"fewer tokens than the longest sequence has, {short(max(seqlen or (longest,)))}", param_hint="'--tokens'")
    if seqlen is not None:
        return [packed((n,) * (count // n)) for count in counts for n in seqlen]
    return [packed(drawn_lengths(count, longest)) for count in counts]


@main.command()
@click.option("--full", is_flag=True, help="Add long sequences and 400 random cases: half a minute.")
@device_option
@json_option
def check(full: bool, device: str | None, json_file: str | None) -> int:
    """Compare every option with float64 on this machine; exit code 1 if anything is wrong."""
    suite = check_suite(full=full)
    start = time.perf_counter()
    with ExitStack() as stack:
        report, place = open_report(json_file, stack), open_place(device)
        # On a GPU most of the time is NVRTC's, which compiles several variants at once; the host path has threads of its own.
        pool = stack.enter_context(ThreadPoolExecutor(min(8, os.cpu_count() or 1))) if place.arch else None
        report.start_checks(available_dtypes(), place)
        wrong, skipped, total = [], [], 0
        with report.progress(sum(map(len, suite.values()))):
            for group, cases in suite.items():
                report.advance(to=group)
                verdicts = []
                for case, verdict in zip(cases, (pool.map if pool else map)(lambda case: checking.run(case, place), cases), strict=True):
                    verdicts.append((case, verdict))
                    report.advance(1)
                report.checks(group, verdicts)
                wrong += [(case, verdict) for case, verdict in verdicts if not verdict.ok]
                skipped += [verdict for _, verdict in verdicts if verdict.skipped]
                total += len(cases)
        report.say()
        for case, verdict in wrong:
            report.say(f"FAIL {case.label}: {verdict}", "bold red")
            report.say(f"     {case}", "dim", paste=True)
        for note in sorted({verdict.note for verdict in skipped}):
            report.say(f"skip {note}", "yellow")
        passed = total - len(wrong) - len(skipped)
        rest = (f", {len(wrong)} FAILED" if wrong else "") + (f", {len(skipped)} not supported" if skipped else "")
        report.say(f"{passed} of {total} pass{rest}, {time.perf_counter() - start:.0f} s", "bold red" if wrong else "bold green")
    return FAILED if wrong else GOOD


@main.command()
def doctor() -> int:
    """Say what is installed and what is missing, to read or to paste in an issue.

    Works without a GPU and without CuPy. Exit code 0: arrays in GPU memory can be computed here; 3: not, and the text says why.
    """
    found, host = diagnose(), checking.run(checking.SMALL)
    on_gpu = None if found.problems else gpu.smoke()
    Report(console()).diagnosis(found, host, on_gpu)
    return FAILED if not host.ok or (on_gpu and not on_gpu.ok) else SETUP if found.problems else GOOD


@main.command(epilog=SIZES)
@click.option("--arch", metavar="NAME", help="sm_80, sm_90a, ...; default this GPU's, else sm_90a.")
@click.option("--dtype", default="bf16", show_default=True, metavar="NAMES", help=f"A list of {', '.join(DTYPES.values())}.")
@click.option("--dim", callback=as_pairs, metavar="DIMS", help="Only rows that serve these head dims; with --tune 64 by default.")
@click.option("--tune", "tuning", is_flag=True, help="Time the tiles that a row could have. All options below are for this.")
@click.option("--tiles", callback=as_pairs, metavar="128x80,...", help="Query rows x keys, instead of the rule's.")
@click.option(
    "--spills", type=click.IntRange(min=0), default=0, show_default=True, metavar="BYTES", help="As many are no reason to drop one."
)
@timing_options(None, tuning=True)
def variants(
    arch: str | None, dtype: str, dim: tuple[tuple[int, int], ...] | None, tuning: bool, json_file: str | None, **options: Any
) -> int:
    """The rows of the kernel tables: registers, shared memory, spills, and why each is there.

    Compiles all of them; needs NVRTC and no GPU. With --tune: every tile that the row of a case could have, on this GPU, compiled, checked
    against float64 and timed in turn, and the line for the table that comes out.
    """
    context = click.get_current_context()
    given = [name for name in ("arch", *options) if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT]
    if wrong := [name for name in given if (name == "arch") == tuning]:
        option = "--" + wrong[0].replace("_", "-")
        raise click.UsageError(f"{option} is not for --tune, which runs on this GPU" if tuning else f"{option} is for --tune")
    if tuning:
        return tune_rows(dtype, dim or ((64, 64),), json_file, **options)
    head_dim = max(map(max, dim)) if dim else None
    arch = (arch or next((found.arch for found in nvidia_driver().gpus), "sm_90a")).removeprefix("sm_")
    arch = f"{arch}a" if f"{arch}a" in kernels.architectures() else arch
    if arch not in kernels.architectures():
        known = ", ".join(f"sm_{known}" for known in kernels.architectures())
        raise click.BadParameter(f"'sm_{arch}' is none of {known}", param_hint="'--arch'")
    chosen = kernels.candidates(arch, tuple(map(dtype_name, dtype.split(","))), head_dim)
    if not chosen:
        raise click.BadParameter(f"no row serves {head_dim}", param_hint="'--dim'")
    failed = False
    with ExitStack() as stack:
        report = open_report(json_file, stack)
        report.start_kernels(arch)
        with report.progress(len(chosen)):
            for built in kernels.build(chosen, arch):
                report.kernel(built, arch)
                report.advance(1)
                failed |= built.error is not None
    return FAILED if failed else GOOD


def tune_rows(
    dtype: str,
    dim: tuple[tuple[int, int], ...],
    json_file: str | None,
    *,
    tiles: tuple[tuple[int, int], ...] | None,
    spills: int,
    peers: tuple[str, ...] | None,
    family: str | None,
    cold: bool,
    rounds: int,
    min_time: float,
    **shapes: Any,
) -> int:
    """What variants does with --tune."""
    if reason := gpu.why_not():
        raise cupyflash.SetupError(f"--tune times kernels on a GPU: {reason}")
    place = gpu.open_place()
    check_family(family, place)
    others = [peer for peer in contestants.peers_at(place.name, peers) if peer.name != OURS]
    cases = [case for name in dtype.split(",") for case in as_cases(place, dtype=name, dim=dim, **shapes)]
    try:
        for case in cases:
            kernels.present(contestants.problem(case), family)
    except cupyflash.UnsupportedError as error:
        raise click.BadParameter(error.reason, param_hint="'--family'" if family else "'--dim'") from None
    arch = (place.arch or "").removeprefix("sm_")
    chip = next((found.name.removeprefix("NVIDIA ") for found in nvidia_driver().gpus), f"sm_{arch}")
    how: dict[str, Any] = {"cold": cold, "min_rounds": rounds, "min_s": min_time}
    done = []
    with ExitStack() as stack:
        report = open_report(json_file, stack, peers=contestants.versions(others), family=family)
        report.start_tuning(arch)
        with report.progress(len(cases)):
            for case in cases:
                report.advance(to=f"{case.mode} {case.label}")
                tuned = tune.tune(case, others, place, family=family, tiles=tiles or (), spills=spills, **how)
                report.tuned(tuned, chip)
                report.advance(1)
                done.append(tuned.found)
    return exit_code(done)


def run_timings(
    report: Report,
    cases: Sequence[Case],
    peers: Sequence[Peer],
    place: Place,
    *,
    deadline: float | None = None,
    **options: Any,
) -> list[Comparison]:
    """Time the cases; print and record each as it is done."""
    report.start_timings(place, [peer.name for peer in peers], cases)
    found = []
    too_much = math.inf  # FLOPs of the first case that the deadline dropped: another as large is not even tried
    with report.progress(len(cases)):
        for case in cases:
            report.advance(to=f"{case.mode} {case.label}")
            if case.flops < too_much:
                one = contestants.compare(case, peers, place, deadline=deadline, **options)
                if any(outcome.why_not == LATE for outcome in one.outcomes):
                    too_much = case.flops
            else:
                one = Comparison(case, [Outcome(peer.name, why_not=LATE) for peer in peers])
            report.timings(one)
            report.advance(1)
            found.append(one)
    report.explain_columns({case.mode for case in cases})
    return found


def exit_code(found: Sequence[Comparison]) -> int:
    """A wrong result is a failed check; a peer that could not run is not."""
    return FAILED if any(outcome.verdict and not outcome.verdict.ok for one in found for outcome in one.outcomes) else GOOD
