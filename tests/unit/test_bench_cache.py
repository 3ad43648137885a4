"""cupyflash-bench cache: over files that look like the library's own, beside others that are not touched."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

import cupyflash
from bench import cache, cli, kernels
from cupyflash import jit

ARCHES = ("sm_90a", "sm_80")


def run(*arguments: str, **environment: str | None) -> Result:
    arguments = tuple(map(str, arguments))
    return CliRunner().invoke(cli.main, ("cache", *arguments), env={"NO_COLOR": None, "COLUMNS": None, **environment})


def name(family: str = "fwd_sm90", arch: str = "90a", text: str = "x") -> str:
    """As jit names its files."""
    return f"{family}-sm_{arch}-nvrtc13.0-{hashlib.sha256(text.encode()).hexdigest()[:32]}.cubin"


def whole(cubin: bytes) -> bytes:
    return cubin + hashlib.sha256(cubin).digest()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two kernels, one of them damaged, a part of one, and what is not ours."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(folder))
    (folder / name()).write_bytes(whole(b"one" * 1000))
    (folder / name("decode", "80")).write_bytes(whole(b"two")[:-1])
    (folder / f"{name()}.{'0' * 16}.part").write_bytes(b"o")
    (folder / "0123456789abcdef_2.cubin").write_bytes(b"CuPy's")
    (folder / "cupyflash-ceilings.json").write_text("{}")
    return folder


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


OTHERS = {"0123456789abcdef_2.cubin", "cupyflash-ceilings.json"}


def test_the_files_are_those_that_the_library_writes(folder, monkeypatch):
    """Written by it, found by us, read by it again."""
    monkeypatch.setattr(jit, "load_nvrtc", lambda: SimpleNamespace(getVersion=lambda: (13, 0)))
    unit = jit.Unit("variant", "source", "90a", "fwd_sm80")
    jit._store(jit._file_name(unit), b"cubin")
    (found,) = [one for one in cache.kernels(folder) if one.family == "fwd_sm80"]
    assert (found.arch, found.nvrtc, found.num_bytes, found.whole) == ("90a", "13.0", 37, True)
    assert found.path.name == jit._file_name(unit)
    part = folder / f"{found.path.name}.{b'12345678'.hex()}.part"
    assert cache.PART.fullmatch(part.name)
    assert kernels.cache_dir() == folder


@pytest.mark.parametrize("arguments", [(), ("list",)])
def test_list(folder, arguments):
    done = run(*arguments)
    assert done.exit_code == 0
    first, _, decode, fwd, damaged, *_ = done.stdout.splitlines()
    assert first.endswith("kernels: 2 kernels, 3.07 kB")
    assert decode.split()[:5] == ["decode", "sm_80", "13.0", "34.0", "B"]
    assert decode.endswith("damaged")
    assert fwd.split()[:5] == ["fwd_sm90", "sm_90a", "13.0", "3.03", "kB"]
    assert damaged.startswith("1 damaged")
    assert max(map(len, run("list", COLUMNS="60").stdout.splitlines())) <= 60


def test_list_as_json(folder):
    done = run("list", "--json", "-")
    _, *records = map(json.loads, done.stdout.splitlines())
    assert [(record["family"], record["arch"], record["whole"]) for record in records] == [
        ("decode", "80", False),
        ("fwd_sm90", "90a", True),
    ]


def test_a_folder_that_is_not_there_is_empty(tmp_path):
    done = run("list", CUPYFLASH_CACHE_DIR=str(tmp_path / "none"))
    assert (done.exit_code, "0 kernels" in done.stdout) == (0, True)
    assert run("clear", CUPYFLASH_CACHE_DIR=str(tmp_path / "none")).exit_code == 0
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("options", "gone"),
    [
        ((), {name(), name("decode", "80"), f"{name()}.{'0' * 16}.part"}),
        (("--damaged",), {name("decode", "80"), f"{name()}.{'0' * 16}.part"}),
        (("--arch", "sm_90a"), {name()}),
        (("--arch", "sm_75"), set()),
    ],
)
def test_clear_takes_ours_alone(folder, options, gone):
    before = left(folder)
    assert run("clear", *options).exit_code == 0
    assert before - left(folder) == gone
    assert left(folder) >= OTHERS
    assert (folder / "0123456789abcdef_2.cubin").read_bytes() == b"CuPy's"


def test_export_and_import(folder, tmp_path, monkeypatch):
    file = tmp_path / "kernels.zip"
    assert "1 kernels" in run("export", file).stdout  # the damaged one stays
    assert zipfile.ZipFile(file).namelist() == [name()]
    done = run("import", file, CUPYFLASH_CACHE_DIR=str(tmp_path / "there" / "deep"))
    assert done.exit_code == 0
    assert left(tmp_path / "there" / "deep") == {name()}
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "there" / "deep"))
    assert jit._stored(name()) == b"one" * 1000


def archive(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    return path


@pytest.mark.parametrize("member", ["../" + name(), "a/" + name(), "x.cubin", name() + ".part", "/" + name()])
def test_import_takes_nothing_but_kernels(folder, tmp_path, member):
    before = left(folder)
    done = run("import", archive(tmp_path / "a.zip", **{name(text="y"): whole(b"y"), member: whole(b"x")}))
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "has something else than kernels" in done.stderr
    assert left(folder) == before
    assert left(tmp_path) == {"kernels", "a.zip"}


def test_import_leaves_out_what_is_damaged(folder, tmp_path):
    done = run("import", archive(tmp_path / "a.zip", **{name(text="y"): whole(b"y"), name(text="z"): whole(b"z")[:-1]}))
    assert done.exit_code == 1
    assert done.stderr == "cupyflash-bench: 1 damaged, left out\n"
    assert name(text="y") in left(folder)
    assert name(text="z") not in left(folder)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing"], "No such command 'nothing'"),
        (["import", "nowhere.zip"], "'nowhere.zip' does not exist"),
        (["import", __file__], "is no archive of kernels: File is not a zip file"),
        (["export", "/nowhere/a.zip"], "cannot write /nowhere/a.zip: No such file"),
        (["export"], "Missing argument 'FILE'"),
        (["list", "--json", "/nowhere/x"], "cannot write /nowhere/x"),
        (["warm"], "Missing option '--preset'"),
        (["warm", "--preset", "gpt-5"], "'--preset': 'gpt-5' is not one of llama3-8b, "),
        (["warm", "--preset", "vit-l", "--arch", "sm_7"], "'--arch': device='sm_7' is unknown"),
        (["warm", "--preset", "vit-l", "--dtype", "fp8"], "'fp8' is not one of"),
        (["warm", "--preset", "vit-l", "--page-size", "0"], "'--page-size': 0 is not in the range"),
    ],
)
def test_mistakes_are_one_line(folder, arguments, says):
    done = run(*arguments)
    assert done.exit_code == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_folder_that_cannot_be_written_is_a_setup_problem(tmp_path):
    (tmp_path / "file").write_text("")
    done = run("import", archive(tmp_path / "a.zip", **{name(): whole(b"y")}), CUPYFLASH_CACHE_DIR=str(tmp_path / "file" / "x"))
    assert (done.exit_code, done.stderr.count("\n"), "cannot write to" in done.stderr) == (3, 1, True)


def test_warm_asks_for_the_models_calls(folder, monkeypatch):
    asked = {}

    def warmup(problems, arch):
        asked.update(problems=problems, arch=arch)
        return [SimpleNamespace(variant="v", cached=False, seconds=1.5, _asdict=lambda: {"variant": "v"}, path=folder)]

    monkeypatch.setattr(cupyflash, "warmup", warmup)
    done = run("warm", "--preset", "gpt-oss-20b", "--arch", "sm_90a", "--training", "--page-size", "64")
    assert done.exit_code == 0, done.output
    assert done.stdout == "  v: 1.50 s\n1 kernels for sm_90a, 1 of them compiled now\n"
    calls = asked["problems"]
    assert asked["arch"] == "sm_90a"
    assert all((call["num_heads_q"], call["num_heads_kv"], call["head_dim"], call["sink"]) == (64, 8, 64, True) for call in calls)
    assert {call.get("window_size") for call in calls} == {None, (127, 0)}  # both kinds of its layers
    assert {call.get("page_size") for call in calls if call.get("cached")} == {64}
    assert {call.get("wrt") for call in calls} == {None, ("q", "k", "v")}
    assert {call["dtype"] for call in calls} == {"bfloat16"}
    assert all(cupyflash.supports(device="sm_90a", **call) for call in calls)


def test_warm_without_a_gpu_names_the_way(folder):
    if cupyflash.supports(head_dim=64, device="cuda"):
        pytest.skip("there is a GPU")
    done = run("warm", "--preset", "vit-l")
    assert (done.exit_code, done.stderr.count("\n")) == (3, 1)
    assert done.stderr.endswith("; --arch needs no GPU\n")


def test_warm_compiles_into_the_folder(folder):
    """Six seconds of NVRTC, once."""
    try:
        cupyflash.environment.load_nvrtc()
    except cupyflash.SetupError as error:
        pytest.skip(str(error))
    done = run("warm", "--preset", "vit-l", "--arch", "sm_80")
    assert done.exit_code == 0, done.output
    built = [one for one in cache.kernels(folder) if one.family == "fwd_sm80" and one.arch == "80"]
    assert built
    assert all(one.whole for one in built)
    assert "0 of them compiled now" in run("warm", "--preset", "vit-l", "--arch", "sm_80").stdout
