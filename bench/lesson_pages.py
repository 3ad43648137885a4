"""The lessons: of each its cases, its peers, and the page that is written of what was measured.

No measured number stands in the text here: all are of the file, or of `cupyflash.explain` at the ceilings that the file has.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from .cases import CacheCase, Case, short
from .peers import OURS
from .plot import Panel, Picture
from .records import File, origin
from .report import digits

STANDARD = "standard"


class Row(NamedTuple):
    """A case: milliseconds of each peer, microseconds of the host, and what `cupyflash.explain` says of the library's call."""

    case: Case
    ms: dict[str, float]
    host_us: dict[str, float]
    model: Any

    def gain(self, peer: str = OURS, over: str = STANDARD) -> float:
        return self.ms[over] / self.ms[peer]

    @property
    def bound_us(self) -> float:
        return 1e6 * float(self.model.seconds or 0)

    @property
    def bound_gain(self) -> float:
        """The gain at the ceilings."""
        return 1e6 * float(self.model.standard_seconds or 0) / self.bound_us

    @property
    def gain_of_calls(self) -> float:
        """The gain of calls one after another, each as slow as the GPU or the host, whichever takes longer."""
        took = {name: max(1e3 * ms, self.host_us.get(name, 0)) for name, ms in self.ms.items()}
        return took[STANDARD] / took[OURS]

    @property
    def blocks(self) -> int:
        return next(int(one.grid) for one in self.model.launches if one.kernel == self.model.variant)

    @property
    def idle(self) -> int:
        """SMs that have no block."""
        return max(int(self.model.gpu.spec.num_sms) - self.blocks, 0)

    @property
    def heads(self) -> str:
        q, kv = self.case.num_heads_q, self.case.num_heads_kv
        return f"{q}/{kv}" if kv != q else str(q)

    @property
    def length(self) -> str:
        return short(self.case.seqlen_q)


class Page(NamedTuple):
    """`text` stands before the table and the picture, `limits` after them: where it does not help. Empty lines part paragraphs."""

    title: str
    text: str
    head: str  # of the table, as Markdown has it
    cells: Sequence[tuple[str, ...]]
    picture: Picture
    limits: str


class Lesson(NamedTuple):
    about: str
    cases: tuple[Case, ...]
    peers: tuple[str, ...]  # those that are no peer of the bench are families of kernels
    page: Callable[[Sequence[Row], File], Page]
    optional: tuple[str, ...] = ()  # peers without whose times there is a page, too


# --- words ------------------------------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Three digits, as far as they say something: 64, 8.53, 0.5, 1234."""
    return f"{float(digits(value)):g}" if value < 1000 else digits(value)


def times(value: float) -> str:
    return f"{number(value)}x"


def mb(num_bytes: float) -> str:
    return number(num_bytes / 1e6)


def us(ms: float) -> str:
    return number(1e3 * ms)


def listed(words: Iterable[Any], none: str = "none") -> str:
    """ "a", "a and b", "a, b and c"."""
    *most, last = [str(word) for word in words] or [none]
    return f"{', '.join(most)} and {last}" if most else last


def span(values: Iterable[float]) -> str:
    """ "1.2 to 3.4", or one number where that is all."""
    ordered = sorted(values)
    return " to ".join(dict.fromkeys(map(number, (ordered[0], ordered[-1]))))


def at_lengths(some: Iterable[Row]) -> str:
    """ "S = 128 and 256 with 12 heads, 128 with 32 heads"."""
    groups = itertools.groupby(some, key=lambda row: row.heads)
    found = [f"{listed(row.length for row in group)} with {heads} heads" for heads, group in groups]
    return f"S = {', '.join(found)}" if found else "no length here"


# --- cases ------------------------------------------------------------------------------------------------------------------------


def square(batch: int, seqlen: int, num_heads: int, dim: int) -> Case:
    return Case(batch, seqlen, seqlen, num_heads, num_heads, dim, dim, "bfloat16")


def of_tokens(*lengths: int, tokens: int = 16384) -> tuple[Case, ...]:
    """heads x D = 2048, the field's convention for comparing head dims."""
    return tuple(square(tokens // n, n, 2048 // dim, dim) for dim in (64, 128) for n in lengths)


def batch_cases() -> tuple[Case, ...]:
    """Short sequences in larger and larger batches, then prefill and decode with 32, 8 and 1 key heads."""
    encoders = [square(batch, n, 12, 64) for n in (128, 512) for batch in (1, 8, 64, 512)]
    prefill = [replace(square(4, 4096, 32, 128), num_heads_kv=heads, causal=True) for heads in (32, 8, 1)]
    return (*encoders, *prefill, *(CacheCase(32, 1, 8192, 32, heads, 128, 128, "bfloat16") for heads in (32, 8, 1)))


def by_dim(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    narrow, wide = ([row for row in rows if row.case.head_dim == dim] for dim in (64, 128))
    return narrow, wide


def panel(
    some: Sequence[Row],
    lines: dict[str, Callable[[Row], float]],
    *,
    title: str = "",
    x: Callable[[Row], int] = lambda row: row.case.seqlen_q,
    length: str = "",
) -> Panel:
    first = some[0]
    points = {name: sorted((x(row), y(row)) for row in some) for name, y in lines.items()}
    return Panel(first.case, title or f"{first.heads} heads, D {first.case.head_dim}", points, length)


def picture(title: str, unit: str, panels: list[Panel], file: File) -> Picture:
    return Picture(title, unit, "sequence length", panels, None, origin(file), log=True)


# --- pages ------------------------------------------------------------------------------------------------------------------------


def traffic(rows: Sequence[Row], file: File) -> Page:
    narrow, wide = by_dim(rows)
    few, many = (next(row for row in narrow if row.case.seqlen_q == n) for n in (512, 4096))
    first, last = narrow[0], narrow[-1]
    flops_per_s, bytes_per_s = many.model.gpu.flops_per_s("bfloat16") or 1, many.model.gpu.bytes_per_s or 1
    ratios = {dim: number((8 / bytes_per_s) / (4 * dim / flops_per_s)) for dim in (64, 128)}
    slow = listed(
        (f"S = {row.length} with D = {row.case.head_dim} ({times(row.gain())})" for row in rows if row.gain() < 2), "no length here"
    )
    text = f"""
        Standard attention is three steps with the scores in memory between them. It writes S = Q Kᵀ, reads S, writes P = softmax(S) and
        reads P: 4 S² elements of a head. Tiles keep scores on the chip. They read q, k and v and write out: 4 S D elements.

        So for each byte that is moved S / D bytes are not. At D = 64 that is {times(few.model.gain)} with S = {few.length} and
        {times(many.model.gain)} with S = {many.length}. There S and P are {mb(many.model.score_bytes)} of the
        {mb(many.model.standard_bytes)} MB of standard attention; the tiles move {mb(many.model.num_bytes)} MB.

        Bytes are not time. From S = {first.length} to {last.length} with D = 64 the bytes gain {times(first.model.gain)} to
        {times(last.model.gain)}, and the time gains {times(first.gain())} to {times(last.gain())}. Once bytes are few, the products are
        the limit, and they grow as S², too. For each score 8 bytes at {number(bytes_per_s / 1e12)} TB/s stand against 4 D FLOPs at
        {number(flops_per_s / 1e12)} TFLOP/s, which is {ratios[64]} to 1 at D = 64. Standard attention has the products beside that. The
        one that is timed here passes over the scores six times, since the maximum and the sum of a row are passes of their own.
    """
    limits = f"""
        Wide heads gain less: from D = 64 to 128 both S / D and the ratio above halve, the latter from {ratios[64]} to {ratios[128]}.
        Measured are {span(row.gain() for row in narrow)} times with D = 64 and {span(row.gain() for row in wide)} times with D = 128.

        Less than 2x is gained with {slow}. All of these calls fill the GPU. The lesson `short` has calls that do not, and `batch` has
        one token over a cache, where scores are few.
    """
    head = "D | heads | B | S | standard MB | tiles MB | S and P / tiles | standard ms | tiles ms | gain at ceilings | gain measured"
    cells = [
        (
            *(str(row.case.head_dim), row.heads, str(row.case.batch), row.length),
            *(mb(row.model.standard_bytes), mb(row.model.num_bytes), times(row.model.gain)),
            *(digits(row.ms[STANDARD]), digits(row.ms[OURS]), times(row.bound_gain), times(row.gain())),
        )
        for row in rows
    ]
    lines: dict[str, Callable[[Row], float]] = {
        "bytes": lambda row: row.model.gain,
        "time at the ceilings": lambda row: row.bound_gain,
        "time measured": Row.gain,
    }
    plot = picture("What tiles save, in bytes and in time", "times", [panel(narrow, lines), panel(wide, lines)], file)
    return Page("Traffic: 4 S² elements that need not move", text, head, cells, plot, limits)


def short_sequences(rows: Sequence[Row], file: File) -> Page:
    first, sms = rows[0], rows[0].model.gpu.spec.num_sms
    fitting = at_lengths(row for row in rows if row.model.scores_fit)
    hosted = at_lengths(row for row in rows if row.host_us.get(OURS, 0) > 1e3 * row.ms[OURS])
    few, lost = (at_lengths(row for row in rows if row.gain() < least) for least in (2, 1))
    hosts = {name: span(row.host_us.get(name, 0) for row in rows) for name in (OURS, STANDARD)}
    text = f"""
        One sequence of {first.length} tokens, {first.heads} heads, D = {first.case.head_dim}, is {first.blocks} blocks of a kernel, and
        {first.idle} of {sms} SMs are idle. By bytes and FLOPs it could take {number(first.bound_us)} us. It takes {us(first.ms[OURS])}
        us, since a kernel has to start, wait for its first tile, and end. Standard attention takes {us(first.ms[STANDARD])} us.

        S and P stay in the L2 at {fitting}. There standard attention does not wait for them, and what tiles save is launches: one kernel
        in place of several.

        The host takes {hosts[OURS]} us for a call of the library and {hosts[STANDARD]} us for the kernels of standard attention. That is
        more than the GPU takes for the library's kernel at {hosted}. Calls one after another take the host's time there, and the last
        column is what they gain. A CUDA graph takes the host out of it.
    """
    limits = f"""
        On the GPU the gain is below 2 at {few}, and standard attention is the faster one at {lost}.

        More work a call is what helps: a batch, or sequences packed in one array (`attention_varlen`). The lesson `batch` has what that
        gains.
    """
    head = "heads | D | S | blocks | idle SMs | bound us | tiles us | standard us | gain | host us | standard host us | gain of calls"
    cells = [
        (
            *(row.heads, str(row.case.head_dim), row.length, str(row.blocks), str(row.idle)),
            *(number(row.bound_us), us(row.ms[OURS]), us(row.ms[STANDARD]), times(row.gain())),
            *(number(row.host_us.get(name, 0)) for name in (OURS, STANDARD)),
            times(row.gain_of_calls),
        )
        for row in rows
    ]
    lines: dict[str, Callable[[Row], float]] = {
        OURS: lambda row: 1e3 * row.ms[OURS],
        STANDARD: lambda row: 1e3 * row.ms[STANDARD],
        "host of cupyflash": lambda row: row.host_us.get(OURS, 0),
        "host of standard": lambda row: row.host_us.get(STANDARD, 0),
        "bound": lambda row: row.bound_us,
    }
    plot = picture("One short sequence, on the GPU and on its host", "us", [panel(some, lines) for some in by_dim(rows)], file)
    return Page("Short sequences: where launches decide", text, head, cells, plot, limits)


def batch(rows: Sequence[Row], file: File) -> Page:
    encoders, others = by_dim(rows)
    groups = [[row for row in encoders if row.length == n] for n in dict.fromkeys(row.length for row in encoders)]
    prefill, decode = ([row for row in others if row.case.mode == mode] for mode in ("fwd", "decode"))
    prompt, token = prefill[0], decode[0]
    bytes_per_s = token.model.gpu.bytes_per_s or 1
    rates = listed(f"{row.model.num_bytes / row.ms[OURS] * 1e3 / bytes_per_s:.0%}" for row in decode)
    gains = listed(times(row.gain()) for row in decode)

    def grown(some: Sequence[Row]) -> str:
        one, most = some[0], some[-1]
        more, longer = most.case.batch / one.case.batch, most.ms[OURS] / one.ms[OURS]
        gained = f"{listed(times(row.gain()) for row in some)} in batches of {listed(row.case.batch for row in some)}"
        return f"With S = {one.length}, {number(more)} times the sequences take {number(longer)} times as long, and tiles gain {gained}."

    def worth(row: Row, first: Row) -> str:
        fewer, faster = first.model.num_bytes / row.model.num_bytes, first.ms[OURS] / row.ms[OURS]
        return f"with {row.case.num_heads_kv} it moves {number(fewer)} times fewer bytes and is {number(faster)} times as fast"

    text = f"""
        A batch fills the SMs that one short sequence leaves idle. {" ".join(map(grown, groups))}

        A causal prefill of {prompt.case.batch} x {prompt.length} tokens has {number(prompt.model.intensity)} FLOPs for each byte, and
        the GPU is in balance at {number(prompt.model.ridge or 0)}. FLOPs are the limit, and fewer key heads save none: it takes
        {listed(f"{number(row.ms[OURS])} ms with {row.case.num_heads_kv}" for row in prefill)}.

        A decode, one token over {short(token.case.seqlen_k)} keys in each of {token.case.batch} sequences, has
        {number(token.model.intensity)} FLOPs a byte with {token.case.num_heads_kv} key heads. It waits for K and V, and fewer key heads
        save just these: {"; ".join(worth(row, token) for row in decode[1:])}. The library moves these bytes at {rates} of the rate at
        which this GPU reads memory.
    """
    limits = f"""
        In a decode standard attention moves hardly more bytes: {mb(token.model.score_bytes)} MB of scores beside
        {mb(token.model.num_bytes)} MB that both move. Tiles cannot help there as they do in a prefill. What is gained all the same,
        {gains} with {listed(row.case.num_heads_kv for row in decode)} key heads, is how well these bytes are read.

        Key heads that are shared are worth little to a prefill, and to a decode only as long as enough bytes are left to read. With
        {decode[-1].case.num_heads_kv} the tiles move {mb(decode[-1].model.num_bytes)} MB and standard attention
        {mb(decode[-1].model.standard_bytes)}.
    """
    head = "call | heads | D | B | queries | keys | standard MB | tiles MB | standard ms | tiles ms | gain | limit"
    cells = [
        (
            "decode" if row.case.mode == "decode" else "causal" if row.case.causal else "all keys",
            *(row.heads, str(row.case.head_dim), str(row.case.batch), row.length, short(row.case.seqlen_k)),
            *(mb(row.model.standard_bytes), mb(row.model.num_bytes), digits(row.ms[STANDARD]), digits(row.ms[OURS])),
            *(times(row.gain()), str(row.model.bound or "")),
        )
        for row in rows
    ]
    lines: dict[str, Callable[[Row], float]] = {OURS: lambda row: row.ms[OURS], STANDARD: lambda row: row.ms[STANDARD]}
    panels = [
        panel(some, lines, title=f"S {some[0].length}, 12 heads, D 64", x=lambda row: row.case.batch, length="sequences") for some in groups
    ]
    for name, some in (("Prefill", prefill), ("Decode", decode)):
        panels.append(panel(some, lines, title=f"{name}, 32 heads, D 128", x=lambda row: row.case.num_heads_kv, length="key heads"))
    plot = picture("Larger batches, and fewer key heads", "ms", panels, file)
    return Page("Batches, prefill and decode, and what shared key heads are worth", text, head, cells, plot, limits)


KEYS_OUTSIDE, QUERIES_OUTSIDE, OVERLAP = "fwd_keys_outside", "fwd_sm80", "fwd_sm90"
STEPS = {
    STANDARD: "whole scores",
    KEYS_OUTSIDE: "keys outside",
    QUERIES_OUTSIDE: "queries outside",
    OVERLAP: "overlap",
}
IDEAS = {
    KEYS_OUTSIDE: "Tiles with the loop over keys outside, as in FlashAttention 1 (arXiv 2205.14135): no score goes to memory, but "
    "out and the state of its rows are read and written again for each tile of keys",
    QUERIES_OUTSIDE: "The loop over queries outside, as in FlashAttention 2 (arXiv 2307.08691): a block keeps its rows of out in "
    "registers, writes them once, and needs nothing of other blocks",
    OVERLAP: "Overlap on Hopper, as in FlashAttention 3 (arXiv 2407.08608): one warp copies tiles ahead, and while one warpgroup "
    "has its softmax another has the tensor cores",
}


def steps(rows: Sequence[Row], file: File) -> Page:
    names = [name for name in STEPS if any(name in row.ms for row in rows)]
    pairs = [(old, new, [row for row in rows if {old, new} <= row.ms.keys()]) for old, new in itertools.pairwise(names)]
    whole = [row for row in rows if {names[0], names[-1]} <= row.ms.keys()]
    worth = "\n\n".join(f"- {IDEAS[new]}. {span(row.gain(new, old) for row in both)} times the speed." for old, new, both in pairs if both)
    together = listed(f"{times(row.gain(names[-1], names[0]))} at S = {row.length}" for row in by_dim(whole)[0])
    slower = listed(
        (
            f"{STEPS[new]} at S = {row.length} with D = {row.case.head_dim} ({times(row.gain(new, old))})"
            for old, new, both in pairs
            for row in both
            if row.gain(new, old) < 1
        ),
        "no step in any of these cases",
    )
    text = f"""
        The same attention in {len(names)} forms, from {STEPS[names[0]]} in memory on, each with one idea more than the one before it:

        {worth}

        All steps together are {together} with D = 64.
    """
    limits = f"""
        Slower than the step before it is {slower}.

        These steps are for calls that fill the GPU. They do little for one short sequence or for one token over a cache: the lessons
        `short` and `batch` have such calls.
    """

    def rate(row: Row, name: str) -> float:
        return row.case.flops / row.ms[name] / 1e9

    def drawn(some: Sequence[Row]) -> dict[str, list[tuple[int, float]]]:
        timed = {name: [row for row in some if name in row.ms] for name in names}
        return {STEPS[name]: [(row.case.seqlen_q, rate(row, name)) for row in found] for name, found in timed.items() if found}

    cells = [
        (
            *(str(row.case.head_dim), row.heads, str(row.case.batch), row.length),
            *(number(rate(row, name)) if name in row.ms else "-" for name in names),
        )
        for row in rows
    ]
    panels = [panel(some, {})._replace(lines=drawn(some)) for some in by_dim(rows)]
    ceiling = file.ceilings.get("flops_per_s")
    plot = picture("What each step is worth", "TFLOP/s", panels, file)._replace(ceiling=ceiling and ceiling / 1e12, log=False)
    head = " | ".join(("D", "heads", "B", "S", *(f"{STEPS[name]}, TFLOP/s" for name in names)))
    return Page("Steps: what each idea is worth", text, head, cells, plot, limits)


LESSONS = {
    "traffic": Lesson("bytes and time saved, by sequence length", of_tokens(512, 1024, 2048, 4096, 8192), (OURS, STANDARD), traffic),
    "short": Lesson(
        "one short sequence, where launches decide",
        tuple(square(1, n, *shape) for shape in ((12, 64), (32, 128)) for n in (128, 256, 512, 1024, 2048, 4096)),
        (OURS, STANDARD),
        short_sequences,
    ),
    "batch": Lesson("large batches, prefill and decode, shared key heads", batch_cases(), (OURS, STANDARD), batch),
    "steps": Lesson("what each idea is worth", of_tokens(1024, 4096, 16384), tuple(STEPS), steps, tuple(IDEAS)),
}
