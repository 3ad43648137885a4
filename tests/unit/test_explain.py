"""cupyflash.explain and its command: numbers against sums made by hand, and against counting pair by pair."""

from __future__ import annotations

import inspect
import itertools
import json
from collections import Counter
from dataclasses import asdict, replace

import numpy as np
import pytest
from click.testing import CliRunner, Result

import cupyflash
from bench import cli, explain, gpu, kernels, ncu, timing
from bench.cases import CacheCase, Case, explain_suite
from cupyflash import sizes, traffic
from cupyflash.explanation import Explanation

BF16 = {"device": "h200", "dtype": "bfloat16"}
MB = 1 << 20


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(gpu, "why_not", lambda: "no NVIDIA driver, so no GPU")


def run(*arguments: str, **environment: str | None) -> Result:
    return CliRunner().invoke(
        cli.main, ("explain", *arguments), env={"NO_COLOR": None, "FORCE_COLOR": None, "COLUMNS": None, **environment}
    )


def moved(found: Explanation, kernel: str = "") -> dict[str, tuple[int, int]]:
    """Bytes read and written by tensor, of one kernel or of all."""
    passes = [one for one in found.tiled if one.kernel.startswith(kernel)]
    sums = {}
    for one in (one for kernel in passes for one in kernel.traffic):
        read, written = sums.get(one.tensor, (0, 0))
        sums[one.tensor] = read + one.read, written + one.written
    return sums


# --- pairs and FLOPs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seqlen", [(7, 7), (5, 2), (2, 5), (1, 9), (40, 6), (3, 0), (0, 3)])
def test_pairs_are_those_of_the_definition(seqlen):
    Sq, Sk = seqlen
    for left, right, top_left in itertools.product((None, 0, 1, 3, 50), (None, 0, 2, 50), (False, True)):
        offset = 0 if top_left else Sk - Sq
        i, j = np.arange(Sq)[:, None] + offset, np.arange(Sk)
        seen = (j >= i - Sk - Sq if left is None else j >= i - left) & (j <= (i + Sk + Sq if right is None else i + right))
        assert traffic.visible_pairs(Sq, Sk, left, right, top_left=top_left) == seen.sum(), (left, right, top_left)


def test_flops_by_hand():
    """KF-119, KF-120, KF-124."""
    base = {**BF16, "head_dim": 128, "batch": 2, "num_heads_q": 4, "seqlen_q": 4096}
    full = cupyflash.explain(**base)
    assert (full.visible_pairs, full.flops) == (2 * 4096**2, 4 * 128 * 4 * 2 * 4096**2)
    causal = cupyflash.explain(**base, causal=True)
    assert causal.visible_pairs == 2 * (4096 * 4097 // 2)
    assert cupyflash.explain(**base, causal=True, wrt=("q", "k", "v")).flops == 2.5 * causal.flops
    window = cupyflash.explain(**base, causal=True, window_size=(1000, 0))
    assert window.visible_pairs == 2 * (1001 * 1002 // 2 + (4096 - 1001) * 1001)
    wide = cupyflash.explain(**{**base, "head_dim": 192}, head_dim_v=128)
    assert wide.flops == 2 * (192 + 128) * 4 * 2 * 4096**2
    assert cupyflash.explain(**base, wrt=("q",)).flops == (2 * 128 * 3) * 4 * 2 * 4096**2  # S, dP and dQ
    decode = {"batch": 8, "num_heads_q": 32, "num_heads_kv": 8, "seqlen_q": 1, "seqlen_k": 4096, "head_dim": 128}
    assert cupyflash.explain(**BF16, **decode).flops == 536_870_912
    lengths = cupyflash.explain(**BF16, head_dim=64, num_heads_q=2, causal=True, lengths=(1, 4096, 100))
    assert lengths.visible_pairs == 1 + 4096 * 4097 // 2 + 100 * 101 // 2
    assert lengths.flops == 4 * 64 * 2 * lengths.visible_pairs


# --- bytes --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seqlen", "head_dim", "gain"), [(4096, 64, 64), (512, 64, 8), (4096, 128, 32), (1024, 256, 4)])
def test_the_gain_is_s_over_d(seqlen, head_dim, gain):
    """S and P are written and read: 4 S² elements, where the tiles move q, k, v and out, 4 S D."""
    found = cupyflash.explain(**BF16, head_dim=head_dim, batch=3, num_heads_q=5, seqlen_q=seqlen)
    heads = 3 * 5
    assert found.score_bytes == 4 * heads * seqlen**2 * 2
    assert (found.num_bytes, found.score_passes) == (4 * heads * seqlen * head_dim * 2, 4)
    assert found.standard_bytes == found.score_bytes + found.num_bytes
    assert found.gain == gain


def test_bytes_of_the_forward():
    found = cupyflash.explain(**BF16, head_dim=128, head_dim_v=64, batch=2, seqlen_q=1000, seqlen_k=300, num_heads_q=8, num_heads_kv=2)
    assert moved(found) == {
        "q": (2 * 1000 * 8 * 128 * 2, 0),
        "k": (2 * 300 * 2 * 128 * 2, 0),  # heads of a group read one key head
        "v": (2 * 300 * 2 * 64 * 2, 0),
        "out": (0, 2 * 1000 * 8 * 64 * 2),
    }
    kept = cupyflash.explain(**BF16, head_dim=64, batch=2, seqlen_q=512, return_lse=True, out_dtype="float32")
    assert moved(kept)["lse"] == (0, 2 * 512 * 8 * 4)
    assert moved(kept)["out"] == (0, 2 * 512 * 8 * 64 * 4)


def test_keys_outside_a_window_are_not_read():
    found = cupyflash.explain(**BF16, head_dim=128, seqlen_q=2048, seqlen_k=8192, causal=True, window_size=(1023, 0))
    assert moved(found)["k"] == ((1023 + 2048) * 8 * 128 * 2, 0)


def test_keys_that_no_cache_holds_are_read_again():
    """512k keys of one head are 268 MB, and 1366 tiles of 192 rows are 11 times as many as fill 132 SMs; an eighth of the keys fits."""
    long = {**BF16, "head_dim": 128, "num_heads_q": 1}
    found = cupyflash.explain(**long, seqlen_q=1 << 19)
    assert found.launches[0].tiles == -(-(1 << 19) // 192)
    assert moved(found)["k"] == (-(-found.launches[0].tiles // 132) * (1 << 19) * 128 * 2, 0)
    assert moved(cupyflash.explain(**long, seqlen_q=1 << 16))["k"] == ((1 << 16) * 128 * 2, 0)


def test_bytes_of_keys_outside():
    """Of FlashAttention's algorithm 1: rows come and go for each tile of 256 keys that they see, but where the L2 has room for them."""
    with kernels.only_family("fwd_keys_outside"):
        full, causal = (
            cupyflash.explain(**BF16, head_dim=128, batch=2, num_heads_q=8, num_heads_kv=2, seqlen_q=4096, causal=causal, return_lse=True)
            for causal in (False, True)
        )
        few = cupyflash.explain(**BF16, head_dim=128, num_heads_q=8, num_heads_kv=2, seqlen_q=4096)
    row, rows, keys = 2 * 8 * 4096, 2 * 8 * 4096 * 128, 2 * 2 * 4096 * 128
    seen = sum(-(-128 * n // 256) for n in range(1, 33)) / 32  # tiles by a block of 128 rows, on average
    for found, visits in ((full, 16), (causal, seen)):
        assert moved(found) == {
            "q": (visits * rows * 2, 0),
            "k": (keys * 2, 0),
            "v": (keys * 2, 0),
            "part_out": ((visits - 1) * rows * 4,) * 2,
            "part_lse": ((visits - 1) * row * 8,) * 2,
            "out": (0, rows * 2),
            "lse": (0, row * 4),
        }
    assert (full.launches[0].grid, full.launches[0].tiles) == (16, 16)
    assert (moved(few)["q"], moved(few)["part_out"]) == ((8 * 4096 * 128 * 2, 0), (0, 8 * 4096 * 128 * 4))  # 25 MB


def test_bytes_of_the_backward():
    B, S, Hq, Hkv, D = 2, 2048, 8, 2, 128
    found = cupyflash.explain(**BF16, head_dim=D, batch=B, seqlen_q=S, num_heads_q=Hq, num_heads_kv=Hkv, causal=True, wrt=("q", "k", "v"))
    row, rows, keys, sums = B * S * Hq * 4, B * S * Hq * D * 2, B * S * Hkv * D * 2, B * S * Hq * D * 4
    assert [one.kernel.partition("__")[0] for one in found.tiled] == ["bwd_delta", "bwd_sm90", "bwd_convert"]
    assert moved(found, "bwd_delta") == {
        "out": (rows, 0),
        "dout": (rows, 0),
        "lse": (row, 0),
        "dq_sum": (0, sums),
        **dict.fromkeys(("row_lse", "row_delta", "row_reference"), (0, row)),
    }
    main = moved(found, "bwd_sm90")
    assert (main.pop("row_delta"), main.pop("row_reference")) == ((row, 0), (row, 0))
    assert main == {
        "q": (rows, 0),
        "dout": (rows, 0),
        "k": (keys, 0),
        "v": (keys, 0),
        "dk": (0, keys),
        "dv": (0, keys),
        "dq_sum": (sums, sums),
    }
    assert moved(found, "bwd_convert") == {"dq_sum": (sums, 0), "dq": (0, rows)}
    # Standard: P twice, dP written and read, dS written and read twice; dout twice, the others once.
    assert found.score_bytes == 7 * B * Hq * S * S * 2
    assert found.standard_bytes == found.score_bytes + 4 * rows + 4 * keys


def test_bytes_of_tiles_that_are_split():
    found = cupyflash.explain(**BF16, head_dim=128, seqlen_q=2048, num_heads_q=4, wrt=("q", "k", "v"))
    sums = 64 * 2 * 128 * (128 + 128) * 4  # of 4 x 16 tiles of 128 keys, in two parts each
    assert moved(found, "bwd_sm90")["part_sums"] == (sums, sums)
    assert found.splits == 2
    assert found.launches[1].waves == 128 / 132  # blocks that each have a part


def test_a_deterministic_backward_has_a_kernel_of_its_own_for_dq():
    found = cupyflash.explain(**BF16, head_dim=64, seqlen_q=512, wrt=("q", "k", "v"), deterministic=True)
    assert [one.kernel.partition("__")[0] for one in found.tiled] == ["bwd_delta", "bwd_sm80", "bwd_sm80_dq"]
    assert "dq_sum" not in moved(found)
    assert [one.flops for one in found.tiled] == [0, 4 * found.flops // 5, 3 * found.flops // 5]  # S and dP twice


def test_bytes_of_a_decode_in_pages():
    found = cupyflash.explain(
        **BF16, head_dim=128, batch=4, num_heads_q=32, num_heads_kv=8, seqlen_q=1, seqlen_k=8192, cached=True, page_size=16
    )
    of = moved(found, "decode__")
    parts = of.pop("part_out")[1] + of.pop("part_lse")[1]
    assert of == {
        "q": (4 * 32 * 128 * 2, 0),
        "k": (4 * 8192 * 8 * 128 * 2, 0),
        "v": (4 * 8192 * 8 * 128 * 2, 0),
        "out": (0, 4 * 32 * 128 * 2),
        "page_table": (4 * 512 * 4, 0),
    }
    blocks = found.launches[-1].grid
    assert found.splits == blocks // 32 == 4  # 4 sequences of 8 key heads
    assert 0 < parts <= 2 * blocks * 16 * (128 + 1) * 4  # two a block, of 16 rows
    assert found.call == "decode"
    narrow = cupyflash.explain(**BF16, head_dim=128, batch=4, seqlen_q=1, seqlen_k=8192, cached=True, cache_dtype="int8")
    assert moved(narrow)["k"] == (4 * 8192 * 8 * 128, 0)
    new = cupyflash.explain(**BF16, head_dim=128, seqlen_q=1, seqlen_k=512, cached=True, seqlen_new=1, rotary_dim=64)
    assert moved(new, "cache_append")["k_new"] == (8 * 128 * 2, 0)
    assert moved(new, "decode")["rotated_q"] == (8 * 128 * 2, 0)


# --- launches, times and the verdict ------------------------------------------------------------------------------------------


def test_launches_are_those_of_the_plan():
    found = cupyflash.explain(**BF16, head_dim=128, batch=4, seqlen_q=4096, causal=True)
    (launch,) = found.launches
    assert (launch.grid, launch.tiles, launch.blocks_per_sm) == (132, 4 * 8 * -(-4096 // 192), 1)
    assert launch.waves == launch.tiles / 132
    assert launch.kernel == found.variant == "fwd_sm90__bf16_d128__m192n80s2q2__causal"
    ampere = cupyflash.explain(device="a100", dtype="bfloat16", head_dim=128, seqlen_q=4096).launches[0]
    assert (ampere.grid, ampere.smem_bytes, ampere.blocks_per_sm) == (8 * 32, (128 + 4 * 64) * 256, 1)


def test_problems_are_those_of_supports():
    """The keywords that both take lead to the same kernels."""
    calls = (
        {"causal": True, "seqlen_q": 1, "seqlen_k": 4096, "num_heads_kv": 2},
        {"packed": True, "batch": 7, "window_size": (128, 0)},
        {"wrt": ("q", "k", "v", "bias"), "bias": True, "mask": True, "sink": True},
        {"cached": True, "page_size": 16, "seqlen_q": 4, "seqlen_new": 4, "rotary_dim": 32, "cache_dtype": "int8"},
        {"cached": True, "packed": True, "batch": 3, "seqlen_q": 100, "seqlen_k": 5000},
        {"dtype": "float64", "alibi_slopes": True, "wrt": ("alibi_slopes",), "softcap": 3.0},
    )
    for device, call in itertools.product(("sm_80", "sm_90a", "sm_120", "host"), calls):
        variants = cupyflash.supports(device=device, head_dim=64, **call).variants
        found = cupyflash.explain(device=device, head_dim=64, **call)
        assert [launch.kernel for launch in found.launches] == [variant.name for variant in variants], call
        json.dumps(found.to_dict(), allow_nan=False)
    own = inspect.signature(cupyflash.supports).parameters.keys() - {"device"}
    assert inspect.signature(sizes.stated).parameters.keys() == own | {"deterministic"}


def test_times_are_the_larger_of_two():
    found = cupyflash.explain(**BF16, head_dim=128, batch=8, seqlen_q=4096)
    assert found.seconds == found.flops / 778e12
    assert found.bound == "FLOPs"
    assert found.ridge == pytest.approx(778 / 4.72)
    S, sizes_ = 8 * 8 * 4096**2 * 2, 8 * 8 * 4096 * 128 * 2
    products, softmax = max(found.flops / 2 / 778e12, (S + 2 * sizes_) / 4.72e12), 2 * S / 4.72e12
    assert found.standard_seconds == pytest.approx(2 * products + softmax)
    single = cupyflash.explain(device="h200", dtype="float32", head_dim=128)
    assert single.seconds == single.flops / 67e12  # not by tensor cores


def test_where_flash_does_not_help():
    helps = {
        (4, 4096): True,
        (64, 512): True,  # S and P of a large batch are past the L2
        (1, 512): False,
        (1, 128): False,
    }
    for (batch, seqlen), expected in helps.items():
        assert cupyflash.explain(**BF16, head_dim=64, batch=batch, seqlen_q=seqlen).helps is expected, (batch, seqlen)
    short = " ".join(cupyflash.explain(**BF16, head_dim=64, seqlen_q=256).verdict)
    assert "does not help much" in short
    assert "S and P are 2.1 MB and stay in the L2" in short  # 2 * 8 * 256² * 2
    assert "8 blocks leave 124 of 132 SMs idle" in short
    decode = cupyflash.explain(**BF16, head_dim=128, batch=64, num_heads_q=32, num_heads_kv=8, seqlen_q=1, seqlen_k=8192, cached=True)
    assert "waits for K and V" in " ".join(decode.verdict)
    assert not decode.helps
    assert decode.standard_bytes < 1.2 * decode.num_bytes


@pytest.mark.parametrize(
    ("name", "gpu_name", "arch"), [("h100", "H100 SXM", "90a"), ("sm_90", "H200", "90a"), ("NVIDIA A100-SXM4-80GB", "A100 80 GB", "80")]
)
def test_devices_by_name(name, gpu_name, arch):
    found = cupyflash.explain(device=name, head_dim=64).gpu
    assert (found.name, found.spec.arch) == (gpu_name, arch)


@pytest.mark.parametrize(
    ("error", "text", "keywords"),
    [
        (cupyflash.DeviceError, "'rtx4090'", {"device": "gtx"}),
        (cupyflash.ArgumentError, r"explain\(\) has no argument 'is_causal'", {"is_causal": True}),
        (cupyflash.UnsupportedError, "256 is the largest", {"head_dim": 300}),
        (cupyflash.ShapeError, "multiple of num_heads_kv", {"num_heads_kv": 3}),
        (cupyflash.ArgumentError, "lengths= and batch= were given", {"lengths": (1,), "batch": 1}),
        (cupyflash.ShapeError, "one length", {"lengths": ()}),
    ],
)
def test_errors(error, text, keywords):
    with pytest.raises(error, match=text):
        cupyflash.explain(**{"device": "h200", "head_dim": 64, **keywords})


def test_the_report_fits_its_width():
    for width, call in itertools.product((60, 100), ({"wrt": ("q", "k", "v")}, {"cached": True, "page_size": 16}, {"lengths": (3, 5000)})):
        lines = cupyflash.explain(**BF16, head_dim=128, **call).text(width).splitlines()
        assert max(map(len, lines)) <= width
    found = cupyflash.explain(**BF16, head_dim=64, batch=4, seqlen_q=4096)
    assert str(found) == found.text()
    assert "  total             50.3       16.8       2198       2164" in str(found)


# --- the command --------------------------------------------------------------------------------------------------------------


def test_a_sweep(tmp_path):
    done = run("--device", "h100", "--seqlen", "512,4k", "--both", "--json", str(tmp_path / "x.jsonl"), COLUMNS="60")
    assert done.exit_code == 0, done.output
    assert max(map(len, done.output.splitlines())) <= 60
    header, *found = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert header["record"] == "environment"
    assert [(one["seqlen_q"], one["causal"], one["gain"]) for one in found] == [
        *[(512, False, 8.0), (4096, False, 64.0)],
        *[(512, True, 8.0), (4096, True, 64.0)],
    ]
    assert found[1]["flops"] == 4 * 64 * 8 * 4096**2
    assert "\x1b" not in run("--device", "h100", NO_COLOR="1").output


def test_flags_reach_the_call():
    assert "of an H200" in run().output
    assert "bwd_sm80_dq" in run("--mode", "bwd", "--deterministic", "--device", "h200").output
    assert "packed" in run("--varlen", "--device", "h200").output
    output = run("--cache-len", "4k", "--page-size", "16", "--cache", "fp8", "--heads", "32/8", "--dim", "128", "--device", "h200").output
    assert "cache in pages of 16 of float8_e4m3fn" in " ".join(output.split())
    assert "not known" not in run("--device", "sm_80").output
    assert run("--device", "host").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--device", "gtx"), "'rtx4090'"),
        (("--dim", "300"), "256 is the largest"),
        (("--page-size", "16"), "add --cache-len"),
        (("--cache-len", "4k", "--causal"), "'--causal'"),
        (("--cache-len", "4k", "--mode", "bwd"), "'--mode'"),
        (("--deterministic",), "--mode bwd"),
        (("--cases", "acceptance", "--seqlen", "1k"), "--cases says what --seqlen would"),
        (("--cases", "other"), "acceptance"),
        (("--seqlen", "x"), "no size"),
        (("--measure", "--device", "h200"), "'--measure'"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments, text):
    done = run(*arguments)
    assert done.exit_code == 2
    assert text in done.output
    assert len(done.output.splitlines()) == 1


def test_to_measure_needs_a_gpu():
    done = run("--measure")
    assert (done.exit_code, len(done.output.splitlines())) == (3, 1)


# --- what ncu counts ----------------------------------------------------------------------------------------------------------

FIELDS = (
    *("ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size", "Grid Size", "Device", "CC"),
    *("Section Name", "Metric Name", "Metric Unit", "Metric Value"),
)


def csv_of(*launches: tuple[str, str, str]) -> str:
    """As `ncu --csv --print-units base` prints it."""
    rows = [FIELDS]
    for n, (kernel, read, written) in enumerate(launches):
        for metric, value in ((ncu.READ, read), (ncu.WRITTEN, written)):
            place = ("1", "13", "(128, 1, 1)", "(16384, 1, 1)", "0", "9.0", "Command line profiler metrics")
            rows.append((str(n), "812", "python3.11", "127.0.0.1", kernel, *place, metric, "byte", value))
    said = '==PROF== Connected to process 812 (/usr/bin/python3.11)\n==PROF== Profiling "bwd_delta" - 0: 0%....100% - 1 pass\n'
    return said + "==PROF== Disconnected from process 812\n" + "".join(",".join(f'"{cell}"' for cell in row) + "\n" for row in rows)


def test_ncu_is_read():
    text = csv_of(("bwd_delta", "541,065,216", "549,453,824"), ("bwd_sm90(Maps, Params)", "12", "3.0"))
    assert ncu.parse(text) == [("bwd_delta", 541_065_216, 549_453_824), ("bwd_sm90", 12, 3)]
    assert ncu.parse("==ERROR== no\n") == []
    with pytest.raises(ncu.NcuError, match="'n/a' of dram__bytes_read"):
        ncu.parse(csv_of(("bwd_delta", "n/a", "1")))


def fake_ncu(tmp_path, monkeypatch, text: str, code: int = 0) -> None:
    program = tmp_path / "ncu"
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {tmp_path}/given\ncat <<'END'\n{text}\nEND\nexit {code}\n")
    program.chmod(0o755)
    monkeypatch.setattr(ncu, "find", lambda: str(program))


def test_ncu_is_asked_about_the_case(tmp_path, monkeypatch):
    case = CacheCase(2, 1, 64, 4, 2, 16, 16, "float32", page_size=16)
    fake_ncu(tmp_path, monkeypatch, csv_of(("decode", "1,000", "24")))
    assert ncu.count(case) == [("decode", 1000, 24)]
    given = (tmp_path / "given").read_text().splitlines()
    assert given[-3:-1] == ["-m", "bench.ncu"]
    assert {"--cache-control", "all", "--profile-from-start", "off"} <= set(given)
    for one in (case, *explain_suite(), Case(1, 8, 8, 1, 1, 8, 8, "float32", window_size=(None, 3))):
        assert ncu.case_of(json.dumps(asdict(one))) == one
    fake_ncu(tmp_path, monkeypatch, "==ERROR== ERR_NVGPUCTRPERM - no permission", 1)
    with pytest.raises(ncu.NcuError, match="run as root"):
        ncu.count(case)
    fake_ncu(tmp_path, monkeypatch, "==ERROR== The application returned an error code (1).", 1)
    with pytest.raises(ncu.NcuError, match="returned an error code"):
        ncu.count(case)


def test_ncu_may_be_absent(monkeypatch):
    monkeypatch.setattr(ncu.shutil, "which", lambda name: None)
    monkeypatch.setattr(ncu, "PLACES", ())
    with pytest.raises(ncu.NcuError, match="not installed"):
        ncu.count(Case(1, 8, 8, 1, 1, 8, 8, "float32"))


@pytest.fixture
def measuring(monkeypatch):
    """The command on a place that says to be a GPU: its arrays are small and in host memory."""
    case = Case(1, 48, 48, 2, 2, 16, 16, "float32")
    monkeypatch.setattr(gpu, "open_place", lambda: timing.HOST)
    monkeypatch.setattr(timing.Place, "ceilings", lambda place: timing.Ceilings(1e11, 1e10))
    monkeypatch.setitem(explain.SUITES, "acceptance", lambda: (case,))
    monkeypatch.setattr(timing, "WARM_UP_S", 0.0)
    return cupyflash.explain(device="h200", **explain.keywords(case)).num_bytes


@pytest.mark.parametrize(("times", "code"), [(1.0, 0), (1.09, 0), (0.92, 0), (1.2, 1), (0.8, 1)])
def test_model_and_counts_are_compared(measuring, monkeypatch, tmp_path, times, code):
    counted = round(measuring * times)
    monkeypatch.setattr(ncu, "find", lambda: "ncu")
    monkeypatch.setattr(ncu, "count", lambda case: [ncu.Counted("fwd_simple", counted - 5, 5)])
    done = run("--cases", "acceptance", "--measure", "--json", str(tmp_path / "x.jsonl"))
    assert done.exit_code == code, done.output
    assert f"{1 / times:.2f} of it" in done.output
    found = json.loads((tmp_path / "x.jsonl").read_text().splitlines()[1])
    assert found["measured"]["num_bytes"] == counted
    assert found["measured"]["model_over_counted"] == pytest.approx(1 / times, rel=1e-3)
    assert found["measured"]["ms"] > 0
    assert found["device"]["source"] == "measured now"


def test_a_time_without_ncu(measuring, monkeypatch):
    monkeypatch.setattr(ncu, "find", lambda: None)
    done = run("--measure", "--seqlen", "48", "--dim", "16", "--dtype", "fp32")
    assert done.exit_code == 0, done.output
    assert "not counted: ncu" in done.output
    assert run("--measure", "--cases", "acceptance").exit_code == 3


def test_what_the_model_does_not_count_is_said():
    """Under a mask, of keys that do not fit the L2, by the kernels of which bytes were counted so."""

    def notes(**sizes):
        return cupyflash.explain(**BF16 | {"head_dim": 128, "batch": 8, "seqlen_q": 4096, "num_heads_q": 16} | sizes).notes

    wrt = ("q", "k", "v")
    assert ["K and V were read" in note for note in notes(causal=True)] == [True]
    assert ["a causal backward moved" in note for note in notes(window_size=(100, 0), wrt=wrt)] == [True]
    assert notes() == notes(wrt=wrt) == notes(causal=True, batch=1) == notes(causal=True, device="a100") == ()


def test_the_acceptance_cases():
    """Seven, whose results are past four times the L2 of an H200."""
    cases = explain_suite()
    assert Counter(case.mode for case in cases) == {"fwd": 3, "bwd": 2, "decode": 2}
    for case in cases:
        tokens, _ = case.tokens
        assert tokens * case.num_heads_q * case.head_dim_v * 2 > 4 * 50 * MB
        found = cupyflash.explain(device="h200", **explain.keywords(case))
        assert found.flops == case.flops
        assert found.num_bytes >= case.num_bytes
    assert replace(cases[-1], page_size=0).label != cases[-1].label
