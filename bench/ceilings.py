"""`cupyflash-bench ceilings`: what this machine reaches at best."""

from __future__ import annotations

from contextlib import ExitStack

import click

import cupyflash

from . import limits
from .cli import GOOD, device_option, json_option, open_place, open_report
from .machine import home_as_tilde
from .report import digits, si

MEANINGS = {
    "read": "memory, read once",
    "copy": "memory, read and written",
    "matmul_bf16": "cuBLAS, 8192 x 8192 x 8192",
    "matmul_fp16": "cuBLAS, 8192 x 8192 x 8192",
    "matmul_fp32": "BLAS, 1024 x 1024 x 1024",
    "launch_us": "from one empty kernel to the next",
    "launch_host_us": "of the host, to launch it",
}


@click.command("ceilings")
@device_option
@click.option("--forget", is_flag=True, help="Remove what is kept of this device, and measure nothing.")
@json_option
def command(device: str | None, forget: bool, json_file: str | None) -> int:
    """Measure memory, matmul and launches on this device, and keep the rates.

    The tables of later runs divide by them ("of peak"), and say so; without them each run measures its own, in half a second. They are
    kept in cupyflash-ceilings.json, beside the compiled kernels.
    """
    with ExitStack() as stack:
        place = open_place(device)
        report = open_report(json_file, stack)
        name = limits.device_name(place)
        try:
            if forget:
                limits.forget(place)
                report.say(f"nothing is kept of {name}")
                return GOOD
            report.say(name, "bold")
            rates = place.rates()
            for rate, value in rates.items():
                unit = "B/s" if rate in ("read", "copy") else "FLOP/s"
                text = f"{digits(value)} us" if rate.endswith("_us") else si(value, unit)
                report.say(f"  {rate.removesuffix('_us').replace('_', ' '):<14}{text:>13}  {MEANINGS[rate]}")
            file = limits.store(place, rates)
        except OSError as error:
            raise cupyflash.SetupError(f"cannot keep the rates: {error.strerror}: {home_as_tilde(str(error.filename))}") from None
        report.record({"record": "rates", "place": place.name, "device": name, **rates})
        report.say(f"kept in {home_as_tilde(str(file))}", "dim")
    return GOOD
