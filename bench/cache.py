"""`cupyflash-bench cache`: the kernels that the library has compiled into files of its own, and no other file of their folder.

The folder is CUPYFLASH_CACHE_DIR, else CuPy's own, whose files have other names. Each of ours is a cubin and the SHA-256 of it behind.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import re
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click

import cupyflash

from .cases import CacheCase, Case
from .cli import FAILED, GOOD, as_pair, dtype_name, json_option, open_report
from .kernels import cache_dir
from .machine import home_as_tilde
from .peers import problem
from .presets import PRESETS
from .report import WIDE, Columns, digits, si

NAME = re.compile(r"(?P<family>\w+)-sm_(?P<arch>\w+)-nvrtc(?P<nvrtc>[\d.]+)-[0-9a-f]{32}\.cubin")
PART = re.compile(NAME.pattern + r"\.[0-9a-f]{16}\.part")  # what a process leaves that dies while it writes
LARGEST_BYTES = 64 << 20  # of a kernel in an archive; ours are below 1 MB


class Kernel(NamedTuple):
    path: Path
    family: str
    arch: str
    nvrtc: str
    num_bytes: int
    time: float
    whole: bool


def is_whole(content: bytes) -> bool:
    return len(content) > 32 and hashlib.sha256(content[:-32]).digest() == content[-32:]


def kernels(folder: Path) -> Iterator[Kernel]:
    """Ours in the folder, by name; what goes away meanwhile is left out."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if found := NAME.fullmatch(path.name):
            with contextlib.suppress(OSError):
                content = path.read_bytes()
                names = found["family"], found["arch"], found["nvrtc"]
                yield Kernel(path, *names, len(content), path.stat().st_mtime, is_whole(content))


@click.group("cache", invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> int:
    """The compiled kernels that the library keeps: list (the default), clear, export, import, warm.

    Their folder is CUPYFLASH_CACHE_DIR, else CuPy's own, in which nothing of CuPy's is touched.
    """
    return GOOD if ctx.invoked_subcommand else int(ctx.invoke(list_))


@command.command("list")
@json_option
def list_(json_file: str | None) -> int:
    """Every kernel: for which GPU, by which compiler, how large, how old, and whether it is whole."""
    folder = cache_dir()
    with ExitStack() as stack:
        report = open_report(json_file, stack)
        found = list(kernels(folder))
        report.say(f"{home_as_tilde(str(folder))}: {len(found)} kernels, {si(sum(one.num_bytes for one in found), 'B')}", "bold")
        rows = Columns(report.table, (("", 20, 0), ("for", 9, 0), ("NVRTC", 8, 0), ("size", 10, 0), ("written", 18, WIDE), ("", 10, 0)))
        for one in found:
            written = datetime.datetime.fromtimestamp(one.time)
            fields = {name: getattr(one, name) for name in ("family", "arch", "nvrtc", "num_bytes", "whole")}
            report.record({"record": "kernel", "file": one.path.name, "written": written.isoformat(timespec="seconds"), **fields})
            cells = [one.family, f"sm_{one.arch}", one.nvrtc, si(one.num_bytes, "B"), f"{written:%Y-%m-%d %H:%M}"]
            rows.row([*((cell, "") for cell in cells), ("", "") if one.whole else ("damaged", "bold red")])
        if damaged := sum(not one.whole for one in found):
            report.say(f"{damaged} damaged: calls compile such a kernel anew; `cupyflash-bench cache clear --damaged` removes the files")
    return GOOD


@command.command()
@click.option("--damaged", is_flag=True, help="Only those that are not whole.")
@click.option("--arch", metavar="NAME", help="Only those for this architecture: sm_90a, ...")
def clear(damaged: bool, arch: str | None) -> int:
    """Remove the kernels; the next calls compile them again, 1 to 3 s each."""
    folder = cache_dir()
    chosen = [one.path for one in kernels(folder) if not (damaged and one.whole) and arch in (None, f"sm_{one.arch}")]
    parts = [path for path in (folder.iterdir() if folder.is_dir() and arch is None else ()) if PART.fullmatch(path.name)]
    try:
        for path in (*chosen, *parts):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise cupyflash.SetupError(f"cannot remove {home_as_tilde(str(path))}: {error.strerror}") from None
    click.echo(f"{len(chosen)} kernels removed from {home_as_tilde(str(folder))}")
    return GOOD


@command.command("export")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def export(file: Path) -> int:
    """Pack the kernels into FILE, a zip, for a machine with the same version of NVRTC."""
    found = [one for one in kernels(cache_dir()) if one.whole]
    try:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for one in found:
                archive.write(one.path, one.path.name)
    except OSError as error:
        raise click.BadParameter(f"cannot write {file}: {error.strerror}", param_hint="'FILE'") from None
    click.echo(f"{len(found)} kernels, {si(file.stat().st_size, 'B')}, in {file}")
    return GOOD


@command.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def import_(file: Path) -> int:
    """Unpack the kernels of FILE, which `cache export` made, into the folder.

    They will run on the GPU: take them only from somebody you would take code from. Exit code 1: some were damaged, and left out.
    """
    folder = cache_dir()
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if strange := [
                member.filename for member in members if not NAME.fullmatch(member.filename) or member.file_size > LARGEST_BYTES
            ]:
                raise click.BadParameter(f"{file} has something else than kernels: {strange[0]!r}", param_hint="'FILE'")
            contents = {member.filename: archive.read(member) for member in members}
    except (zipfile.BadZipFile, RuntimeError, OSError) as error:
        raise click.BadParameter(f"{file} is no archive of kernels: {error}", param_hint="'FILE'") from None
    whole = {name: content for name, content in contents.items() if is_whole(content)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in whole.items():
            part = folder / f"{name}.{os.urandom(8).hex()}.part"  # in one step, as the library does it: other processes read there
            part.write_bytes(content)
            part.replace(folder / name)
    except OSError as error:
        raise cupyflash.SetupError(f"cannot write to {home_as_tilde(str(folder))}: {error.strerror}") from None
    click.echo(f"{len(whole)} kernels into {home_as_tilde(str(folder))}")
    if damaged := len(contents) - len(whole):
        click.echo(f"cupyflash-bench: {damaged} damaged, left out", err=True)
    return FAILED if damaged else GOOD


def as_presets(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    """Names of PRESETS; a model's name stands for both kinds of its layers."""
    names = value.split(",")
    if unknown := [name for name in names if name not in PRESETS]:
        raise click.BadParameter(f"{unknown[0]!r} is not one of {', '.join(PRESETS)}")
    return tuple(dict.fromkeys(name for model in names for name in (model, f"{model}-local") if name in PRESETS))


@command.command(epilog=f"Presets: {', '.join(PRESETS)}.")
@click.option("--preset", "presets", callback=as_presets, required=True, metavar="NAMES", help="Models, as `fwd --preset` takes them.")
@click.option("--arch", metavar="NAME", help="sm_80, sm_90a, ...; default this GPU.")
@click.option("--dtype", default="bf16", show_default=True, help="fp16 or bf16, as the model runs.")
@click.option("--training", is_flag=True, help="The backward, too.")
@click.option("--page-size", type=click.IntRange(min=1), help="Of a paged cache; default a cache without pages.")
@json_option
def warm(presets: tuple[str, ...], arch: str | None, dtype: str, training: bool, page_size: int | None, json_file: str | None) -> int:
    """Compile ahead what a model's calls will need: prefill, decode, chunks of a prefill over a cache.

    With --arch it needs CuPy and NVRTC, and no GPU. `cache export` then takes the kernels to where the GPU is.
    """
    name = dtype_name(dtype)
    cases = [case for preset in presets for case in model_cases(preset, name, training=training, page_size=page_size or 0)]
    target = arch or "cuda"
    asked, refused = [], []
    for call in map(problem, cases):
        answer = cupyflash.supports(device=target, **call)
        asked += [call] if answer else []
        refused += [] if answer else [str(answer.reason)]
    if not asked:
        reason = refused[0]
        raise click.BadParameter(reason, param_hint="'--arch'") if arch else cupyflash.SetupError(f"{reason}; --arch needs no GPU")
    with ExitStack() as stack:
        report = open_report(json_file, stack)
        built = cupyflash.warmup(asked, arch=arch)
        for one in built:
            report.record({"record": "warm", **one._asdict(), "path": str(one.path)})
            report.say(f"  {one.variant}: {'was there' if one.cached else f'{digits(one.seconds)} s'}", "dim" if one.cached else "")
        for reason in dict.fromkeys(refused):
            report.say(f"  not compiled: {reason}", "yellow")
        new = sum(not one.cached for one in built)
        report.say(f"{len(built)} kernels for {arch or 'this GPU'}, {new} of them compiled now", "bold")
    return GOOD


def model_cases(preset: str, dtype: str, *, training: bool, page_size: int) -> list[Case]:
    """The calls of a model with this kind of layer: a prefill, with `training` its gradients, and over a cache one token and many."""
    model = PRESETS[preset]

    def sizes(command: str) -> dict[str, Any]:
        found = model.options(command)
        pairs = [as_pair(None, None, found[name]) for name in ("heads", "dim")]  # type: ignore[arg-type]
        names = ("num_heads_q", "num_heads_kv", "head_dim", "head_dim_v")
        window = tuple(map(int, model.window.split(","))) if model.window else None
        how = {"window_size": window, "softcap": model.softcap, "extras": ("sink",) if model.sink else ()}
        return {**dict(zip(names, sum(pairs, ()), strict=True)), **how, "dtype": dtype}

    causal, lengths = model.causal == "yes", [int(model.seqlen)] if model.seqlen else [512, 4096, 16384]
    prefill = [Case(1, n, n, **sizes("fwd"), causal=causal) for n in lengths]
    gradients = [one for case in prefill for one in (replace(case, return_lse=True), replace(case, backward=True)) if training]
    if not causal:  # an encoder has no cache
        return [*prefill, *gradients]
    steps = [(batch, 1, keys) for batch in (1, 8, 64) for keys in (1024, 8192, 65536)]
    cached = [CacheCase(*step, **sizes("decode"), causal=step[1] > 1, page_size=page_size) for step in (*steps, (8, 512, 8192))]
    return [*prefill, *gradients, *cached]
