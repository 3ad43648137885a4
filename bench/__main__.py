"""`python -m bench`: the command line of a checkout that is not installed."""

from __future__ import annotations

from .cli import main

main(prog_name="python -m bench")
