"""Results outside the terminal's table: CSV, Markdown, and the command that times a case again."""

from __future__ import annotations

import csv
import shlex
from collections.abc import Iterable, Sequence
from typing import IO, Any

from .cases import CACHE_DTYPES, DTYPES, CacheCase, Case, short
from .peers import Comparison
from .report import digits, result_line, si


def lines(found: Iterable[Comparison]) -> list[dict[str, Any]]:
    return [result_line(one, outcome) for one in found for outcome in one.outcomes if outcome.timing]


def write_csv(found: Iterable[Comparison], file: IO[str]) -> None:
    """The result lines of --json, a column for each field that any of them has; lists with spaces between."""
    rows = lines(found)
    writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: " ".join(map(str, x)) if isinstance(x, list | tuple) else x for name, x in row.items()} for row in rows)


def write_md(found: Iterable[Comparison], file: IO[str]) -> None:
    """A row for each case and peer, as the table in the terminal has them."""
    print("| case | peer | ms | ± | rate | against the best other |", file=file)
    print("|---|---|---:|---:|---:|---:|", file=file)
    for one in found:
        for outcome in one.outcomes:
            timing, ratio = outcome.timing, outcome.ratio_to_best
            case = f"{one.case.mode} {one.case.label}"
            if timing is None:
                why = outcome.why_not or str(outcome.verdict)
                print(f"| {case} | {outcome.peer} | {why.replace('|', '/')} | | | |", file=file)
                continue
            of_bytes = one.case.mode == "decode"
            amount, unit = (one.case.num_bytes, "B/s") if of_bytes else (one.case.flops, "FLOP/s")
            rated = si(amount / timing.ms * 1e3, unit)
            cells = (case, outcome.peer, digits(timing.ms), f"{timing.spread:.1%}", rated, f"{ratio:.2f}x" if ratio else "")
            print(f"| {' | '.join(cells)} |", file=file)


def command_of(case: Case, peers: Sequence[str] = (), rest: Sequence[str] = ()) -> str:
    """The command that times the case alone, with these peers and whatever else was asked for."""
    heads = f"{case.num_heads_q}/{case.num_heads_kv}"
    dim = f"{case.head_dim}-{case.head_dim_v}"
    words = ["--heads", heads, "--dim", dim, "--dtype", DTYPES[case.dtype]]
    if isinstance(case, CacheCase):
        words = ["decode", "--cells", f"{case.batch}:{case.seqlen_k}", "--rows", str(case.seqlen_q), *words]
        words += ["--page-size", str(case.page_size)] if case.page_size else []
        words += ["--cache", CACHE_DTYPES[case.cache_dtype]] if case.cache_dtype else []
    else:
        words = ["compare", "--mode", "bwd" if case.backward else "fwd", *_sizes(case), *words, *["--causal"] * case.causal]
        words += ["--deterministic"] * case.deterministic
    if case.window_size is not None:
        words += ["--window", ",".join("-" if side is None else str(side) for side in case.window_size)]
    words += ["--softcap", f"{case.softcap:g}"] if case.softcap else []
    words += ["--sink"] * ("sink" in case.extras)
    return shlex.join(["cupyflash-bench", *words, *(("--peers", ",".join(peers)) if peers else ()), *rest])


def _sizes(case: Case) -> list[str]:
    if not case.lengths:
        return ["--batch", str(case.batch), "--seqlen", short(case.seqlen_q), "--seqlen-k", short(case.seqlen_k)]
    one_length = ["--seqlen" if case.equal else "--longest", str(case.seqlen_q)]
    return ["--varlen", "--tokens", str(case.tokens[0]), *one_length]
