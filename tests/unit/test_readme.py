"""The README tells the truth: its Python runs as it stands there, its commands exist, and CI runs them as written."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import cupyflash

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def blocks(*languages: str) -> list[str]:
    """The bodies of the fenced blocks in one of these languages."""
    return [body for language, body in re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL) if language in languages]


def commands() -> list[str]:
    """Each line of the shell blocks; in a `console` block those after a prompt."""
    shell = [line for block in blocks("sh") for line in block.splitlines()]
    return shell + [line[2:] for block in blocks("console") for line in block.splitlines() if line.startswith("$ ")]


EXAMPLES = blocks("python")
SETUPS = [command for command in commands() if command.startswith("python3 -m venv ")]
CALLS = [*commands(), *re.findall(r"`(cupyflash-bench[^`]*)`", README)]
# What follows the program's name in each call: "", "check --full"
BENCH_CALLS = sorted({call.strip() for command in CALLS for call in re.findall(r"cupyflash-bench\b([^&|;#]*)", command)})


def test_there_is_an_example():
    assert EXAMPLES


@pytest.mark.parametrize("code", EXAMPLES, ids=range(len(EXAMPLES)))
def test_python_runs_as_written(code, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{code}\n{done.stderr}"


def test_ci_runs_the_commands_as_written():
    printed = subprocess.run([ROOT / ".ci" / "run", "readme-commands"], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == SETUPS


def test_two_commands_try_and_test():
    """From a fresh clone: one to see it work, one to run the tests."""
    try_it, test_it = SETUPS
    assert try_it == "python3 -m venv .venv && .venv/bin/pip install '.[cuda13]' && .venv/bin/cupyflash-bench"
    assert test_it == "python3 -m venv .venv && .venv/bin/pip install -e '.[test,cuda13]' && .venv/bin/python -m pytest"


def test_extras_exist():
    pyproject = (ROOT / "pyproject.toml").read_text()
    named = {extra for part in re.findall(r"(?:cupyflash|\.)\[([\w,]+)\]", README) for extra in part.split(",")}
    assert {"test"} <= named
    assert not {extra for extra in named if not re.search(rf"^{extra} = \[", pyproject, re.MULTILINE)}


@pytest.mark.parametrize("call", BENCH_CALLS, ids=lambda call: call or "tour")
def test_bench_commands_exist(call):
    """With --help the command reads its options, refuses unknown ones, and runs nothing."""
    arguments = [sys.executable, "-m", "bench", *shlex.split(call), "--help"]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_links_and_names_exist():
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", README)
    assert not {target for target in targets if not (ROOT / target).exists()}
    names = re.findall(r"`cupyflash\.(\w+)", README)
    assert names
    assert not {name for name in names if not hasattr(cupyflash, name)}
