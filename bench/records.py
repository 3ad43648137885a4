"""JSON lines read back: the runs in a file that the bench has written, and the case and the numbers of each result."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from .cases import CacheCase, Case, drawn_lengths, packed

HOW = {"timer", "cold"}
NEEDED = {"mode", "peer", "dtype", "head_dim", "num_heads_q", "num_heads_kv", "batch", "seqlen_q", "seqlen_k", "ms", "spread"}


class Result(NamedTuple):
    """What one peer did with one case: the median of its runs where a file has several, and the largest of their spreads or, where that is
    larger, what lies between the fastest and the slowest of them over that median."""

    case: Case
    peer: str
    ms: float
    spread: float
    how: dict[str, Any]  # timer and cold, where the file says them
    runs: int = 1
    host_us: float | None = None


class File(NamedTuple):
    """`environment` is the first header; results are by case and peer, in the order of the file."""

    path: Path
    environment: dict[str, Any]
    ceilings: dict[str, Any]
    results: dict[tuple[Case, str], Result]


def read(path: Path, *, last: bool = False) -> File:
    """The file, its runs of one case joined or only the `last` of them; click.BadParameter with its name and the line where it is none of
    the bench's."""
    environment: dict[str, Any] = {}
    ceilings: dict[str, Any] = {}
    found: dict[tuple[Case, str], list[Result]] = {}
    try:
        lines = map(str.strip, path.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is no text'}") from None
    for number, line in enumerate(lines, 1):
        record = _record(f"{path}, line {number},", line)
        kind = record.get("record")
        if kind == "environment":
            environment = environment or record
        elif kind == "ceilings":
            ceilings = ceilings or record
        elif kind is None:
            result: Result = record["result"]
            found.setdefault((result.case, result.peer), []).append(result)
    if not found:
        raise click.BadParameter(f"{path} has no timings: write one with --json {path}")
    return File(path, environment, ceilings, {key: _joined(runs[-1:] if last else runs) for key, runs in found.items()})


def _record(where: str, line: str) -> dict[str, Any]:
    """The object of a line, a timing as its `result`."""
    try:
        record = json.loads(line or '{"record": "empty"}')
        if not isinstance(record, dict):
            raise ValueError("no object")
        return {"result": _result(record)} if record.get("record") is None else record
    except (ValueError, TypeError, KeyError) as error:
        why = "no JSON" if isinstance(error, json.JSONDecodeError) else str(error)
        raise click.BadParameter(f"{where} is no line of this bench: {why}") from None


def _result(record: dict[str, Any]) -> Result:
    if missing := sorted(NEEDED - record.keys()):
        raise ValueError(f"it has no {missing[0]}")
    ms, spread = float(record["ms"]), float(record["spread"])
    if not (ms > 0 and spread >= 0):
        raise ValueError(f"ms {ms:g}, spread {spread:g}")
    how = {name: record[name] for name in HOW if record.get(name) is not None}
    return Result(case_of(record), str(record["peer"]), ms, spread, how, host_us=record.get("host_us"))


def _joined(runs: list[Result]) -> Result:
    times = [run.ms for run in runs]
    ms = float(np.median(times))
    spread = max(max(run.spread for run in runs), (max(times) - min(times)) / ms)
    return runs[-1]._replace(ms=ms, spread=spread, runs=len(runs))


def case_of(record: dict[str, Any]) -> Case:
    """The case whose fields `report.case_fields` has written."""
    cached = "cache_dtype" in record
    kind = CacheCase if cached else Case
    known = {field.name for field in fields(kind)} - {"lengths"}
    given = {name: _tuples(value) for name, value in record.items() if name in known and value is not None}
    given.setdefault("head_dim_v", given["head_dim"])
    if cached and given.get("cache_dtype") == given["dtype"]:
        del given["cache_dtype"]
    if record.get("tokens"):
        given |= packed(_lengths(record))
    return kind(**given, backward=record["mode"] == "bwd")


def _lengths(record: dict[str, Any]) -> tuple[int, ...]:
    if record.get("lengths"):
        return tuple(record["lengths"])
    tokens, longest = record["tokens"], record["longest"]
    return drawn_lengths(tokens, longest) if record.get("seed") else (longest,) * (tokens // longest)


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def origin(file: File) -> str:
    """Where and when a file was made, in one line."""
    found = file.environment
    devices = found.get("devices") or []
    where = devices[0]["name"] if file.ceilings.get("place") != "host" and devices else found.get("cpu")
    peers = found.get("peers") or {"cupyflash": found.get("cupyflash")}
    versions = (f"{name} {version}" for name, version in peers.items() if version and not str(version).startswith("not found"))
    return ", ".join(str(part) for part in (where, found.get("time", "")[:10], *versions) if part) or "no header"


def in_both(files: Iterable[File]) -> list[tuple[Case, str]]:
    """The keys that all files have, in the order of the first."""
    first, *others = (file.results for file in files)
    return [key for key in first if all(key in other for other in others)]
