"""Which module may import which, read with `ast`; and what `import cupyflash` costs, measured in fresh processes.

The edges are the map of the library. A new one belongs here only after the question whether two modules should know each other.
"""

from __future__ import annotations

import ast
import graphlib
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "cupyflash"
BENCH = ROOT / "bench"

# Who may import whom inside cupyflash; `errors` and `_version` are open to all and import nothing.
ALLOWED = {
    # torch: what torch.compile traces in place of functions here, imported then
    "__init__": {"api", "backward", "cache", "environment", "packing", "reference", "torch", "explanation"},
    # device, params: what a cached call holds; jit, variants: what `warmup` compiles; sizes: what `supports` is asked about
    "api": {
        *("arrays", "cache", "problem", "plan", "launch", "host", "device", "keywords", "params", "jit", "variants", "tensormap"),
        "sizes",
    },
    "arrays": set(),
    # api: a vjp begins with a forward call; the rest as api
    "backward": {"api", "arrays", "problem", "plan", "launch", "host_backward", "device", "keywords", "params"},
    "cache": {"arrays", "problem", "plan", "launch", "host_cache", "device", "keywords", "params"},  # as api
    "device": {"environment"},  # how to get CuPy and NVRTC
    "environment": set(),
    "explanation": {"sizes", "traffic", "problem", "device", "environment", "keywords"},  # device, environment: which GPU is there
    "host": {"problem"},  # it computes what the problem says, so it reads its type
    "host_cache": {"host", "problem"},  # host computes what it has gathered
    "host_backward": {"host", "problem"},  # host: threads, tiles and the score step, which both directions share
    "jit": {"variants", "params", "environment"},  # environment: the cache folder, and how to get CuPy and NVRTC
    "keywords": {"arrays"},  # whose Elsewhere says where a call is computed
    # device: its type; environment: how to get CuPy; params: where in the struct an address lies
    "launch": {"jit", "tensormap", "plan", "device", "environment", "params"},
    "packing": {"arrays", "keywords"},
    "params": {"problem"},  # the struct is filled from a problem
    "plan": {"problem", "variants", "device"},
    "problem": set(),
    "reference": set(),
    "sizes": {"arrays", "device", "keywords", "plan", "problem", "variants"},
    "tensormap": set(),
    "variants": set(),
    # problem: names of what has a gradient; arrays: how results are stored, and those of a callback
    "torch": {"api", "arrays", "backward", "keywords", "problem"},
    "jax": {"api", "arrays", "backward", "keywords", "problem"},
    "traffic": {"device", "plan", "problem", "sizes", "variants"},  # it reads plans: tiles, workspaces, what a step is
    "transformers": {"torch"},  # where attention has its gradients
    "flash_attn": {"torch"},
}
OPEN_TO_ALL = {"errors", "_version"}

IMPORT_LIMIT_S = 0.060

FRAMEWORKS = {"torch", "jax", "jaxlib", "transformers", "flash_attn", "tensorflow"}
INTERFACES = {"torch", "jax", "transformers", "flash_attn"}  # the only modules that may import a framework
# What else may be imported beyond the standard library; a module that is absent here decides on plain values and imports nothing.
# Inside functions only: cupy, which costs 300 ms and may be absent, ml_dtypes, which may be absent, and threadpoolctl, which costs 5 ms.
NUMPY = {"arrays", "cache", "environment", "host", "host_backward", "host_cache", "packing", "plan", "reference"}
CUPY = {"arrays", "device", "environment", "jit", "launch"}
ML_DTYPES = {"arrays"}
THREADPOOLCTL = {"host"}
IN_FUNCTIONS = {"cupy": CUPY, "ml_dtypes": ML_DTYPES, "threadpoolctl": THREADPOOLCTL}


class Import(NamedTuple):
    module: str  # absolute and dotted, as in cupyflash.problem
    names: tuple[str, ...]  # of `from module import names`
    relative: bool
    in_function: bool
    line: int

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]


def imports(path: Path) -> list[Import]:
    """Every import of the file, also those inside functions and under TYPE_CHECKING."""
    found: list[Import] = []
    parents = path.relative_to(ROOT).parent.parts

    def visit(node: ast.AST, in_function: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, (), False, in_function, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) + 1 - node.level] if node.level else ()
            module = ".".join([*base, *filter(None, [node.module])])
            found.append(Import(module, tuple(alias.name for alias in node.names), node.level > 0, in_function, node.lineno))
        inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(path.read_text(), str(path)), False)
    return found


def own_modules(found: Import) -> set[str]:
    """The modules of cupyflash that an import names: `from cupyflash import host` names host, as `import cupyflash.host` does."""
    if found.package != "cupyflash":
        return set()
    if found.module != "cupyflash":
        return {found.module.split(".")[1]}
    return {name if (PACKAGE / f"{name}.py").exists() else "__init__" for name in found.names or ("__init__",)}


MODULES = sorted(PACKAGE.glob("*.py"))
BENCH_FILES = sorted(BENCH.rglob("*.py"))


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.mark.parametrize("path", MODULES, ids=names(MODULES))
def test_modules_import_only_what_the_map_allows(path):
    if path.stem in OPEN_TO_ALL:
        allowed = set()
    else:
        assert path.stem in ALLOWED, f"{path.name} is no part of the map yet: give it a row in ALLOWED"
        allowed = ALLOWED[path.stem] | OPEN_TO_ALL
    wrong = {f"line {found.line}: {target}" for found in imports(path) for target in own_modules(found) - allowed}
    assert not wrong, f"{path.stem} may import {sorted(allowed)}"


def test_the_map_has_no_cycle():
    assert list(graphlib.TopologicalSorter(ALLOWED).static_order())


@pytest.mark.parametrize("path", MODULES, ids=names(MODULES))
def test_foreign_packages_are_imported_only_where_they_belong(path):
    allowed = {"cupyflash"} | ({"numpy"} if path.stem in NUMPY else set()) | (FRAMEWORKS | {"numpy"} if path.stem in INTERFACES else set())
    allowed_in_functions = {package for package, users in IN_FUNCTIONS.items() if path.stem in users}
    wrong = {
        f"line {found.line}: {found.module}{'' if found.in_function else ', at module level'}"
        for found in imports(path)
        if found.package not in sys.stdlib_module_names | allowed and not (found.in_function and found.package in allowed_in_functions)
    }
    assert not wrong


# What lists the kernel tables, and times one family of them, and what counts FLOPs look behind the public names; nothing is measured there.
BEHIND_THE_NAMES = {
    "kernels.py": {"api", "backward", "device", "environment", "jit", "plan", "problem", "variants"},
    "cases.py": {"traffic"},
}


@pytest.mark.parametrize("path", BENCH_FILES, ids=names(BENCH_FILES))
def test_bench_uses_only_public_names(path):
    """A measurement through a private door would not be what a user gets."""
    import cupyflash  # here, so that a broken package still leaves the other tests their say

    public = set(cupyflash.__all__) | INTERFACES | BEHIND_THE_NAMES.get(path.name, set())
    used = {(found.line, name) for found in imports(path) if found.module == "cupyflash" for name in found.names}
    used |= {(found.line, found.module.split(".")[1]) for found in imports(path) if found.module.startswith("cupyflash.")}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "cupyflash":
            used.add((node.lineno, node.attr))
    assert not {f"line {line}: cupyflash.{name}" for line, name in used if name not in public}


@pytest.mark.parametrize("path", BENCH_FILES, ids=names(BENCH_FILES))
def test_bench_imports_itself_relatively(path):
    """It is `bench` in a checkout and `cupyflash.bench` in an install."""
    assert not {f"line {found.line}: {found.module}" for found in imports(path) if found.package == "bench" and not found.relative}
    assert not {f"line {found.line}: {found.module}" for found in imports(path) if found.module.startswith("cupyflash.bench")}


def run_fresh(code: str, **environment: str) -> str:
    """What a new interpreter prints, in which nothing is imported yet; in the checkout, so that it needs no install."""
    command = (sys.executable, "-c", code)
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=True).stdout


def test_import_loads_nothing_heavy():
    heavy = FRAMEWORKS | {"cupy", "ml_dtypes", "click", "rich", "bench", "cupyflash.bench"}
    loaded = run_fresh("import sys, cupyflash; print(*sys.modules)").split()
    assert not heavy & set(loaded)


def test_import_adds_little_to_numpys(tmp_path):
    """At most 60 ms beyond `import numpy`: the median of 9 processes, and the best of three medians, of CPU time, as machines are busy:
    beside two other test runs 15 ms took 130. With bytecode, which pip makes when it installs and which some machines keep Python from
    writing: without it 35 ms more."""
    bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    code = "import time, numpy; start = time.process_time(); import cupyflash; print(time.process_time() - start)"
    run_fresh(code, **bytecode)
    medians = []
    for _ in range(3):
        medians.append(statistics.median(float(run_fresh(code, **bytecode)) for _ in range(9)))
        if medians[-1] <= IMPORT_LIMIT_S:
            return
    pytest.fail(f"import cupyflash took {[f'{median * 1e3:.0f} ms' for median in medians]} after numpy; the limit is 60 ms")
