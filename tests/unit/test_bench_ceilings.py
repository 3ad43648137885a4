"""cupyflash-bench ceilings: what is measured, where it is kept, and that tables divide by it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from bench import cli, gpu, limits, machine, timing

RATES = {"read": 10e9, "copy": 8e9, "matmul_fp32": 1e11}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "why_not", lambda: "no NVIDIA driver, so no GPU")
    monkeypatch.setattr(limits, "cpu_name", lambda: "CPU X")
    monkeypatch.setattr(limits, "usable_cores", lambda: 2)
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def rates(monkeypatch):
    """Rates that take no time."""
    monkeypatch.setattr(timing.Place, "rates", lambda place, *names, **how: dict(RATES))


def run(*arguments: str, **environment: str | None) -> Result:
    return CliRunner().invoke(cli.main, arguments, env={"NO_COLOR": None, "FORCE_COLOR": None, "COLUMNS": None, **environment})


@pytest.mark.usefixtures("rates")
def test_rates_are_printed_and_kept(folder):
    done = run("ceilings", "--json", "-")
    assert done.exit_code == 0
    assert done.stderr.splitlines()[:4] == [
        "CPU X, 2 cores",
        "  read              10.0 GB/s  memory, read once",
        "  copy              8.00 GB/s  memory, read and written",
        "  matmul fp32     100 GFLOP/s  BLAS, 1024 x 1024 x 1024",
    ]
    _, record = map(json.loads, done.stdout.splitlines())
    assert record == {"record": "rates", "place": "host", "device": "CPU X, 2 cores", **RATES}
    assert [path.name for path in folder.iterdir()] == ["cupyflash-ceilings.json"]
    kept = limits.stored(timing.HOST)
    assert kept.rates == RATES
    assert kept.ceilings == (1e11, 10e9)
    assert max(map(len, run("ceilings", COLUMNS="60").stdout.splitlines()[:4])) <= 60


@pytest.mark.usefixtures("rates")
def test_tables_divide_by_what_is_kept(monkeypatch):
    small = ("fwd", "--seqlen", "32", "--heads", "2", "--min-time", "0.01", "--rounds", "2", "--peers", "cupyflash", "--json", "-")
    monkeypatch.setattr(timing.Place, "ceilings", lambda place: timing.Ceilings(5e10, 1e9))
    before = run(*small)
    assert "peak  50.0 GFLOP/s matmul, 1.00 GB/s read, measured now" in before.stderr
    assert json.loads(before.stdout.splitlines()[1])["measured"] is None
    assert run("ceilings").exit_code == 0
    after = run(*small)
    day = limits.stored(timing.HOST).day
    assert f"peak  100 GFLOP/s matmul, 10.0 GB/s read, measured {day}" in after.stderr
    record = json.loads(after.stdout.splitlines()[1])
    assert record == {"record": "ceilings", "place": "host", "flops_per_s": 1e11, "bytes_per_s": 10e9, "measured": day}
    assert run("ceilings", "--forget").stdout == "nothing is kept of CPU X, 2 cores\n"
    assert "measured now" in run(*small).stderr


@pytest.mark.usefixtures("rates")
def test_devices_are_kept_apart(monkeypatch):
    assert run("ceilings").exit_code == 0
    monkeypatch.setattr(limits, "usable_cores", lambda: 64)
    assert limits.stored(timing.HOST) is None
    there = SimpleNamespace(arch="sm_90a")
    monkeypatch.setattr(limits, "nvidia_driver", lambda: machine.Driver("13.0", [machine.Gpu("NVIDIA H200", "sm_90", 1)]))
    limits.store(there, {"read": 4.6e12, "matmul_bf16": 7.8e14, "matmul_fp16": 7.7e14})
    assert limits.stored(there).ceilings == (7.8e14, 4.6e12)
    monkeypatch.setattr(limits, "usable_cores", lambda: 2)
    assert limits.stored(timing.HOST).rates == RATES


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"CPU X, 2 cores": 3}', '{"CPU X, 2 cores": {"rates": {"read": "x"}, "day": "d"}}'])
def test_a_damaged_file_is_no_file(folder, text):
    folder.mkdir()
    (folder / limits.FILE).write_text(text)
    assert limits.stored(timing.HOST) is None
    limits.store(timing.HOST, RATES)
    assert limits.stored(timing.HOST).rates == RATES


def test_host_rates_are_amounts_over_times(monkeypatch):
    """By a clock that gives each its milliseconds."""
    ms = {"read": 10.0, "copy": 40.0, "matmul_fp32": 20.0}
    monkeypatch.setattr(timing, "measure", lambda rounds, **how: {name: timing.Timing(ms[name], 0, None, None, 3) for name in rounds})
    assert timing.HOST.rates() == {
        "read": pytest.approx((1 << 27) / 10e-3),
        "copy": pytest.approx(2 * (1 << 27) / 40e-3),
        "matmul_fp32": pytest.approx(2 * 1024**3 / 20e-3),
    }
    assert timing.HOST.ceilings() == (pytest.approx(2 * 1024**3 / 20e-3), pytest.approx((1 << 27) / 10e-3))


def test_gpu_rates_are_amounts_over_times(monkeypatch):
    """Without a GPU: the copy reads one half of the array and writes the other; an empty kernel is no rate."""
    there = object.__new__(gpu.Gpu)
    pool = SimpleNamespace(free_all_blocks=lambda: None)
    there.__dict__.update(torch=None, _cupy=SimpleNamespace(get_default_memory_pool=lambda: pool))
    for name, value in {"__enter__": lambda self: self, "__exit__": lambda *_: None}.items():
        monkeypatch.setattr(gpu.Gpu, name, value)
    monkeypatch.setattr(there, "free_bytes", lambda: 100 << 30)
    ms = {"read": 1.0, "copy": 2.0, "matmul_bf16": 1.5, "launch_us": 0.002}
    times = {name: timing.Timing(one, 0, 3.0, None, 3) for name, one in ms.items()}
    monkeypatch.setattr(there, "_measured", lambda names, size, min_s: {name: times[name] for name in names if name in times})
    assert there.rates() == {
        "read": pytest.approx((4 << 30) / 1e-3),
        "copy": pytest.approx((4 << 30) / 2e-3),
        "matmul_bf16": pytest.approx(2 * 8192**3 / 1.5e-3),
        "launch_us": pytest.approx(2.0),
        "launch_host_us": 3.0,
    }
    assert there.ceilings() == (None, pytest.approx((4 << 30) / 1e-3))  # CuPy alone has no bfloat16 matmul


@pytest.mark.usefixtures("rates")
def test_what_goes_wrong_is_one_line(tmp_path):
    done = run("ceilings", "--device", "gpu")
    assert (done.exit_code, done.stderr.count("\n")) == (3, 1)
    assert "no GPU to use" in done.stderr
    (tmp_path / "file").write_text("")
    done = run("ceilings", CUPYFLASH_CACHE_DIR=str(tmp_path / "file" / "x"))
    assert (done.exit_code, done.stderr.count("\n"), "cannot keep the rates" in done.stderr) == (3, 1, True)
    for wrong in (["--device", "tpu"], ["--json", "/nowhere/x"], ["more"]):
        done = run("ceilings", *wrong)
        assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
