"""What a user installs: the wheel built from this checkout, its files, and the command line from wheel, checkout and editable install."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

import pytest

from cupyflash import __version__

ROOT = Path(__file__).resolve().parents[2]
MAX_WHEEL_BYTES = 1_000_000
SOURCE_ROOT = "from cupyflash.jit import source_root; print(source_root())"


def run(*command: str | Path, cwd: Path, path: Path | None = None) -> str:
    """The output of a command that must succeed; `path` is what its Python looks into first."""
    environment = {**os.environ, "PYTHONPATH": str(path or ""), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, command))} in {cwd}:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by setuptools without a network, from a copy: a build folder left over in the checkout would slip old files into the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    ignored = shutil.ignore_patterns("*.egg-info", "__pycache__", "results")
    for name in ("cupyflash", "bench", "cuda_src"):
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder, tree, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed") / "site"
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", folder, wheel, cwd=folder.parent)
    return folder


def test_wheel_is_small_and_pure(wheel):
    assert wheel.name == f"cupyflash-{__version__}-py3-none-any.whl"
    assert wheel.stat().st_size < MAX_WHEEL_BYTES


def test_wheel_holds_every_source_file(wheel):
    """Each file of the three folders that a run needs, at its place in the installed package."""
    held = set(zipfile.ZipFile(wheel).namelist())
    expected = {f"cupyflash/{path.relative_to(ROOT / 'cupyflash')}" for path in (ROOT / "cupyflash").rglob("*.py")}
    expected |= {f"cupyflash/bench/{path.relative_to(ROOT / 'bench')}" for path in (ROOT / "bench").rglob("*.py")}
    expected |= {f"cupyflash/cuda_src/{path.relative_to(ROOT / 'cuda_src')}" for path in (ROOT / "cuda_src").rglob("*.cu*")}
    assert {"cupyflash/__init__.py", "cupyflash/bench/cli.py", "cupyflash/cuda_src/primitives/params.cuh"} <= expected
    assert not expected - held
    assert {"cupyflash/py.typed", "cupyflash/cuda_src/README.md"} <= held


def test_wheel_holds_nothing_else(wheel):
    """One package and its metadata: no top-level `bench`, `tests` or `cuda_src`, which would meet those of other projects."""
    assert {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()} == {"cupyflash", f"cupyflash-{__version__}.dist-info"}


def test_wheel_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        info = f"cupyflash-{__version__}.dist-info"
        assert "cupyflash-bench = cupyflash.bench.cli:main" in archive.read(f"{info}/entry_points.txt").decode()
        assert any(name.startswith(info) and name.endswith("LICENSE") for name in archive.namelist())


def test_installed_wheel_finds_its_sources(installed, tmp_path):
    found = run(sys.executable, "-c", SOURCE_ROOT, cwd=tmp_path, path=installed).strip()
    assert Path(found) == installed / "cupyflash" / "cuda_src"
    assert any(Path(found).rglob("*.cuh"))


def test_installed_wheel_has_its_command(installed, tmp_path):
    script = installed / "bin" / "cupyflash-bench"
    assert __version__ in run(sys.executable, script, "--version", cwd=tmp_path, path=installed)
    assert __version__ in run(sys.executable, "-m", "cupyflash.bench", "--version", cwd=tmp_path, path=installed)


def test_checkout_runs_without_an_install():
    assert __version__ in run(sys.executable, "-m", "bench", "--version", cwd=ROOT)
    assert Path(run(sys.executable, "-c", SOURCE_ROOT, cwd=ROOT).strip()) == ROOT / "cuda_src"


def test_editable_install(tmp_path):
    """The install that tests and development run on: the package maps two folders from elsewhere, and setuptools must find both."""
    if editable_root() != ROOT:
        pytest.skip("this Python has no editable install of this checkout; pip install -e '.[test]'")
    assert Path(run(sys.executable, "-c", SOURCE_ROOT, cwd=tmp_path).strip()) == ROOT / "cuda_src"
    assert __version__ in run(sys.executable, "-m", "cupyflash.bench", "--version", cwd=tmp_path)


def editable_root() -> Path | None:
    """The checkout that `pip install -e` tied to this Python, as PEP 610 records it."""
    # All of that name: the checkout on the path holds an egg-info of its own, which knows nothing of the install.
    for distribution in importlib.metadata.distributions(name="cupyflash"):
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        if origin.get("dir_info", {}).get("editable"):
            return Path(url2pathname(urlparse(origin["url"]).path)).resolve()
    return None
