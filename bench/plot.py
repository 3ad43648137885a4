"""`cupyflash-bench plot`: JSON lines as a picture, by matplotlib, or as bars in the terminal."""

from __future__ import annotations

import importlib
import importlib.util
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from .cases import DTYPES, CacheCase, Case, short
from .cli import GOOD, SETUP, all_of, as_pairs, as_sizes
from .peers import OURS
from .records import File, Result, origin, read
from .report import Report, console, digits

MODES = {"fwd": "Forward", "bwd": "Backward", "decode": "New tokens over a cache"}
# Okabe and Ito's colours, which are told apart with any kind of colour vision; the markers say it again.
LOOKS = {
    OURS: ("#D55E00", "o"),
    "sdpa-cudnn": ("#0072B2", "s"),
    "fa3": ("#009E73", "^"),
    "fa4": ("#CC79A7", "D"),
    "sdpa-flash": ("#56B4E9", "v"),
    "standard": ("#7F7F7F", "x"),
}
OTHERS = (("#E69F00", "P"), ("#000000", "*"), ("#B0A000", "h"), ("#5E3C99", "<"), ("#8C510A", ">"), ("#1B7837", "p"), ("#E7298A", "8"))
INK, PALE = "#333333", "#DDDDDD"
WIDTH_PX, DPI = 1200, 100
BAR = 40


class Panel(NamedTuple):
    """The cases that differ only in their length: for each peer its points (length, what is drawn)."""

    case: Case
    title: str
    lines: dict[str, list[tuple[int, float]]]
    length: str = ""  # what its x axis is, where not what the picture says


class Picture(NamedTuple):
    title: str
    unit: str
    length: str  # what the x axis is
    panels: list[Panel]
    ceiling: float | None
    source: str
    log: bool = False


@click.command("plot")
@all_of(
    click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)),
    click.option("--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.png|svg", help="Else bars in the terminal."),
    click.option("--time", "in_ms", is_flag=True, help="Milliseconds, instead of TFLOP/s (of decode TB/s)."),
    click.option("--mode", type=click.Choice([*MODES]), help="Which one, where the files have several."),
    click.option("--dim", callback=as_pairs, metavar="128,192-128", help="Only these head dims."),
    click.option("--tokens", callback=as_sizes, metavar="SIZES", help="Only cases with so many queries in all."),
    click.option("--peers", metavar="NAMES", help="Only these, of those in the files."),
)
def command(files: tuple[Path, ...], out: Path | None, in_ms: bool, peers: str | None, **only: Any) -> int:
    """Draw FILES of JSON lines over the sequence length: a panel for each head dim and mask, a line for each peer.

    PNG and SVG need matplotlib: pip install 'cupyflash[plot]'. Without it, and without --out, there are bars in the terminal. Of several
    runs of a case the last counts; cases that leave a panel with one length are not drawn, unless there are no others.
    """
    if out is not None and out.suffix not in (".png", ".svg"):
        raise click.BadParameter(f"{str(out)!r} ends neither in .png nor in .svg", param_hint="'--out'")
    picture = compose([read(path, last=True) for path in files], in_ms=in_ms, peers=peers, **only)
    if out is not None and importlib.util.find_spec("matplotlib") is not None:
        try:
            draw(picture, out)
        except OSError as error:
            raise click.BadParameter(f"cannot write {out}: {error.strerror}", param_hint="'--out'") from None
        click.echo(f"{out}: {len(picture.panels)} panels, {out.stat().st_size / 1e3:.0f} kB")
        return GOOD
    bars(Report(console()), picture)
    if out is not None:
        click.echo("cupyflash-bench: a picture needs matplotlib: pip install 'cupyflash[plot]'", err=True)
        return SETUP
    return GOOD


def compose(
    files: Sequence[File],
    *,
    in_ms: bool,
    peers: str | None,
    mode: str | None,
    dim: tuple[tuple[int, int], ...] | None,
    tokens: tuple[int, ...] | None,
) -> Picture:
    """What is in the picture, before it is known how it is drawn."""
    found = {key: result for file in files for key, result in file.results.items()}
    kept = [
        result
        for result in found.values()
        if (dim is None or (result.case.head_dim, result.case.head_dim_v) in dim)
        and (tokens is None or result.case.tokens[0] in tokens)
        and (peers is None or result.peer in peers.split(","))
        and mode in (None, result.case.mode)
    ]
    modes = {result.case.mode for result in kept}
    if len(modes) != 1:
        why = f"there are {' and '.join(sorted(modes))} in it: choose one by --mode" if modes else "nothing is left to draw"
        raise click.BadParameter(why, param_hint="'--mode'" if modes else None)
    decode = modes == {"decode"}
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for result in kept:
        groups.setdefault(tuple(traits(result.case).values()), []).append(result)
    long = {key: group for key, group in groups.items() if len({length(result.case) for result in group}) > 1}
    ordered = sorted((long or groups).items(), key=lambda item: order(item[1][0].case))
    shared = set.intersection(*(set(traits(group[0].case).items()) for _, group in ordered))
    title = ", ".join(
        (MODES[modes.pop()], *(text for name, text in traits(ordered[0][1][0].case).items() if (name, text) in shared and text))
    )
    flops, read_ = (files[-1].ceilings.get(name) for name in ("flops_per_s", "bytes_per_s"))
    peak = read_ if decode else flops
    return Picture(
        title=title,
        unit="ms" if in_ms else "TB/s" if decode else "TFLOP/s",
        length="keys of all sequences" if decode else "sequence length",
        panels=[panel(group, shared, in_ms=in_ms) for _, group in ordered],
        ceiling=None if in_ms or not peak else peak / 1e12,
        source="; ".join(dict.fromkeys(map(origin, files))),
        log=in_ms,
    )


def length(case: Case) -> int:
    return case.tokens[1] if case.mode == "decode" else case.seqlen_q


def traits(case: Case) -> dict[str, str]:
    """What tells panels apart, each as its title says it."""
    heads = str(case.num_heads_q) + (f"/{case.num_heads_kv}" if case.num_heads_kv != case.num_heads_q else "")
    left, right = ("-" if side is None else str(side) for side in case.window_size or (None, None))
    cached = isinstance(case, CacheCase)
    kept = case.dtypes[1]
    return {
        "dtype": DTYPES[case.dtype],
        "packed": "" if not case.lengths else "packed sequences of one length" if case.equal else "packed sequences",
        "dim": f"D {case.head_dim}" + (f"-{case.head_dim_v}" if case.head_dim_v != case.head_dim else ""),
        "heads": f"{heads} heads",
        "mask": "causal" if case.causal else "" if case.mode == "decode" else "all keys",
        "window": f"window {left},{right}" if case.window_size else "",
        "softcap": f"softcap {case.softcap:g}" if case.softcap else "",
        "rows": f"{case.seqlen_q} new tokens" if cached and case.seqlen_q > 1 else "",
        "pages": f"pages of {case.page_size}" if isinstance(case, CacheCase) and case.page_size else "",
        "kept": f"{DTYPES.get(kept, kept.split('_')[0])} cache" if kept != case.dtype else "",
        "more": " ".join((*case.extras, *["deterministic"] * case.deterministic)),
    }


def order(case: Case) -> tuple[Any, ...]:
    """Masks are rows, head dims columns."""
    return case.causal, str(case.window_size), case.softcap or 0, case.head_dim, case.head_dim_v, case.num_heads_q, case.num_heads_kv


def panel(group: Sequence[Result], shared: set[tuple[str, str]], *, in_ms: bool) -> Panel:
    case = group[0].case
    lines: dict[str, list[tuple[int, float]]] = {}
    for one in group:
        amount = one.case.num_bytes if case.mode == "decode" else one.case.flops
        lines.setdefault(one.peer, []).append((length(one.case), one.ms if in_ms else amount / one.ms / 1e9))
    title = ", ".join(text for name, text in traits(case).items() if (name, text) not in shared and text)
    return Panel(case, title, {peer: sorted(points) for peer, points in lines.items()})


def looks(picture: Picture) -> dict[str, tuple[str, str]]:
    """A colour and a marker for each peer, ours first; the known ones have the same in every picture."""
    names = dict.fromkeys(name for panel in picture.panels for name in panel.lines)
    others = iter(OTHERS * (len(names) // len(OTHERS) + 1))
    found = {name: LOOKS.get(name) or next(others) for name in names}
    return dict(sorted(found.items(), key=lambda item: item[0] != OURS))


def draw(picture: Picture, out: Path) -> None:
    """By matplotlib, without a display; the same bytes for the same numbers."""
    matplotlib = importlib.import_module("matplotlib")
    figure_of = importlib.import_module("matplotlib.figure").Figure
    count = len(picture.panels)
    dims = len({(one.case.head_dim, one.case.head_dim_v, one.case.num_heads_q, one.case.num_heads_kv) for one in picture.panels})
    columns = dims if dims <= 4 and count % dims == 0 else min(count, 3)
    rows = -(-count // columns)
    style = {
        "font.size": 10,
        "svg.fonttype": "none",
        "svg.hashsalt": "cupyflash",
        "font.sans-serif": ["DejaVu Sans", "Verdana"],
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
    }
    with matplotlib.rc_context(style):
        height = 2.75 * rows + 1.35
        figure = figure_of(figsize=(WIDTH_PX / DPI, height), dpi=DPI)
        # Margins in inches, not by a layout engine, whose solver rounds differently from one run to the next.
        left = 0.75 if picture.log else 0.62  # 0.005 is wider than 500
        figure.subplots_adjust(left * DPI / WIDTH_PX, 0.75 / height, 1 - 0.1 * DPI / WIDTH_PX, 1 - 1.12 / height, 0.06, 0.3)
        axes = figure.subplots(rows, columns, squeeze=False, sharey=True).ravel()
        look = looks(picture)
        for ax, one in zip(axes, picture.panels, strict=False):
            _draw_panel(ax, one, look, picture)
        for ax in axes[count:]:
            ax.set_axis_off()
        for ax in axes[::columns]:
            ax.set_ylabel(picture.unit)
        for n, (ax, one) in enumerate(zip(axes, picture.panels, strict=False)):
            if n >= count - columns or one.length:
                ax.set_xlabel(one.length or picture.length)
        better = "lower" if picture.unit in ("ms", "us") else "higher"
        figure.text(0.012, 1 - 0.3 / height, picture.title, fontsize=14, fontweight="bold", va="center")
        figure.text(0.012, 0.17 / height, f"{picture.source}. {better.capitalize()} is better.", fontsize=7.5, color="#777777", va="center")
        handles = {line.get_label(): line for ax in axes for line in ax.get_lines() if line.get_label() in look}
        figure.legend(
            [handles[name] for name in look],
            list(look),
            loc="center left",
            bbox_to_anchor=(0.005, 1 - 0.65 / height),
            ncols=len(look),
            frameon=False,
            handlelength=2.2,
            columnspacing=1.8,
            fontsize=11,
        )
        if out.suffix == ".svg":
            figure.savefig(text := io.StringIO(), format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
            out.write_text(compact(text.getvalue()))
            return
        figure.savefig(drawn := io.BytesIO(), format="png")
        # Pillow is there with matplotlib; a palette makes the file a third.
        importlib.import_module("PIL.Image").open(drawn).convert("RGB").quantize(48).save(out, optimize=True)


def _draw_panel(ax: Any, one: Panel, look: dict[str, tuple[str, str]], picture: Picture) -> None:
    for name, (color, marker) in reversed(look.items()):  # ours last, on top
        if name in one.lines:
            x, y = zip(*one.lines[name], strict=True)
            ours = name == OURS
            ax.plot(x, y, color=color, marker=marker, label=name, lw=2.8 if ours else 1.5, ms=6.5 if ours else 5, alpha=1 if ours else 0.9)
    lengths = sorted({x for points in one.lines.values() for x, _ in points})
    ax.set_xscale("log", base=2)
    ax.set_xticks(spaced(lengths))
    ax.set_xticks([], minor=True)
    ax.xaxis.set_major_formatter(lambda x, _: thousands(round(x)))
    if picture.log:
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(importlib.import_module("matplotlib.ticker").LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        ax.set_yticks([], minor=True)
    else:
        ax.set_ylim(bottom=0)
    if picture.ceiling:
        what = "read" if picture.unit == "TB/s" else "matmul"
        ax.axhline(picture.ceiling, color="#999999", lw=1, ls=(0, (5, 4)), zorder=0)
        label = f"{what} {digits(picture.ceiling)}"
        ax.annotate(
            label, (1, picture.ceiling), (-2, 2), ("axes fraction", "data"), "offset points", ha="right", fontsize=8, color="#777777"
        )
        ax.set_ylim(top=1.12 * max(picture.ceiling, *(y for points in one.lines.values() for _, y in points)))
    ax.set_title(one.title, fontsize=11, loc="left")
    ax.grid(axis="y", color=PALE, lw=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(length=0)


def spaced(lengths: list[int], most: int = 7) -> list[int]:
    """Those that have room for their names on a logarithmic axis, from the last on."""
    gap = (lengths[-1] / lengths[0]) ** (1 / most)
    kept = lengths[-1:]
    for x in reversed(lengths[:-1]):
        if kept[0] / x >= gap * 0.999:
            kept.insert(0, x)
    return kept


def thousands(size: int) -> str:
    """4096 -> "4k", 1048576 -> "1M"."""
    return f"{size >> 20}M" if size and size % (1 << 20) == 0 else short(size)


def bars(report: Report, picture: Picture) -> None:
    """A bar for each point, in the panels' order; plain signs where the terminal has no others."""
    report.say(f"{picture.title}: {picture.unit}", "bold")
    names = max(len(name) for one in picture.panels for name in one.lines)
    room = max(min(BAR, report.table.width - names - 20), 4)
    most = max(y for one in picture.panels for points in one.lines.values() for _, y in points)
    sign = "#" if report.table.options.ascii_only else "█"
    for one in picture.panels:
        report.say(f"\n  {one.title or picture.title}", "cyan")
        for x in sorted({x for points in one.lines.values() for x, _ in points}):
            head = thousands(x)
            for name in looks(picture):
                for at, y in one.lines.get(name, []):
                    if at == x:
                        bar = sign * max(round(room * y / most), 1)
                        report.say(f"  {head:>6}  {name:<{names}}  {bar} {digits(y)}", "bold" if name == OURS else "")
                        head = ""
    report.say(f"\n{picture.source}", "dim")


def compact(svg: str) -> str:
    """The same picture in less than half of the bytes: styles that elements share are classes, and hundredths of a point are enough."""
    classes: dict[str, str] = {}
    svg = re.sub(r'(?<=<)(\w[^<>]*?) style="([^"]*)"', lambda m: f'{m[1]} class="{classes.setdefault(m[2], f"c{len(classes)}")}"', svg)
    svg = svg.replace("</style>", "".join(f".{name}{{{style}}}" for style, name in classes.items()) + "</style>", 1)
    svg = re.sub(r"\s*\n\s*", " ", svg).replace("> <", ">\n<")
    named = set(re.findall(r"#([\w-]+)", svg))
    svg = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in named else "", svg)
    return re.sub(r"(\.\d\d)\d+", r"\1", svg) + "\n"
