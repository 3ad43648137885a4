"""From a variant to a loaded kernel without a GPU: NVRTC compiles for real, and stand-ins take the place of the driver."""

from __future__ import annotations

import contextlib
import doctest
import importlib.metadata
import itertools
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cupyflash
from cupyflash import CompileError, DeviceError, SetupError, StateError, UnsupportedError, api, device, environment, jit
from cupyflash.device import KNOWN
from cupyflash.variants import BACKWARD, CACHED, FORWARD, SimpleConfig, Variant

cupy = pytest.importorskip("cupy", reason="CuPy is not installed; pip install 'cupyflash[cuda13]'")

ROOT = Path(__file__).resolve().parents[2]
CALL = {"head_dim": 32, "dtype": "float32"}  # of the smallest kernel: 0.2 s to compile
VARIANT = Variant("fwd_simple", "float32", 32, 32, (), SimpleConfig(4))
UNIT = jit.render(VARIANT, "80")
PIP_LINE = r"pip install 'cupyflash\[cuda\d\d\]'"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that is not there yet, and a process that has met no other."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(folder))
    monkeypatch.setattr(jit, "_in_memory", {})
    monkeypatch.setattr(environment, "_warned", False)
    return folder


# Prints, as JSON, the reports of two equal calls of `warmup` and what was logged.
WARM = f"""
import json, logging, sys
messages = []
handler = logging.Handler()
handler.emit = lambda record: messages.append(record.getMessage())
logging.getLogger("cupyflash").addHandler(handler)
import cupyflash
reports = [cupyflash.warmup({CALL!r}, arch="sm_80")[0] for _ in range(2)]
print(json.dumps([*reports, messages]))
"""


def start(code: str, cwd: Path | str = "/", **variables: str | None) -> subprocess.Popen[str]:
    """A fresh interpreter with these environment variables more; None takes one away."""
    variables = {"PYTHONPATH": str(ROOT), "CUPY_CACHE_DIR": None, "CUPYFLASH_CACHE_DIR": None, **variables}
    given = {name: value for name, value in {**os.environ, **variables}.items() if value is not None}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.Popen(command, cwd=cwd, env=given, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def run(code: str, cwd: Path | str = "/", **variables: str | None) -> Any:
    """What the code prints as JSON."""
    process = start(code, cwd, **variables)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return json.loads(out)


def warm(code: str = WARM, cwd: Path | str = "/", **variables: str | None) -> tuple[cupyflash.Report, cupyflash.Report, list[str]]:
    first, second, messages = run(code, cwd, **variables)
    return cupyflash.Report(*first), cupyflash.Report(*second), messages


# --- the text and its name -----------------------------------------------------------------------------------------------------------


def every_variant() -> Iterator[Variant]:
    for row, dtype in itertools.chain.from_iterable(itertools.product([row], row.dtypes) for row in (*FORWARD, *CACHED, *BACKWARD)):
        for flags in ((), ("causal", "lse"), ("alibi", "bias", "mask", "sink", "used"), ("cachedint8", "paged")):
            yield Variant(row.family, dtype, *row.head_dims, flags, row.config)


def test_kf_109_the_text_includes_nothing(tmp_path: Path) -> None:
    """So no mix of CUDA versions among the include folders can matter, and CuPy's cache, which does not look into includes, is right."""
    for variant in every_variant():
        assert "#include" not in jit.render(variant, "90a").source
    for name in ("cuda_fp16.h", "cuda_bf16.h", "cuda.h", "stdint.h"):
        (tmp_path / name).write_text("#error another version\n")
    assert jit.compile_cubin(UNIT, (f"-I{tmp_path}",))[0]


def test_kf_105_a_changed_byte_with_an_old_time_is_another_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def name() -> str:
        jit.render.cache_clear()
        jit._sources.cache_clear()
        return jit._file_name(jit.render(VARIANT, "80"))

    before = name()
    sources = Path(shutil.copytree(jit.source_root(), tmp_path / "sources"))
    monkeypatch.setattr(jit, "source_root", lambda: sources)
    try:
        assert name() == before  # whatever the path is
        for header in (*sources.rglob("params.cuh"), *sources.rglob("fwd_simple.cu")):
            then = header.stat()
            header.write_text(header.read_text().replace("{", "{ ", 1))
            os.utime(header, ns=(then.st_atime_ns, then.st_mtime_ns))
            after = name()
            assert after != before
            before = after
    finally:
        monkeypatch.undo()
        name()


def test_kf_107_each_architecture_and_nvrtc_has_its_own_file(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {jit._file_name(jit.render(VARIANT, arch)) for arch in ("80", "86", "90", "90a", "100", "120")}
    monkeypatch.setattr(cupy.cuda.nvrtc, "getVersion", lambda: (12, 9))
    names.add(jit._file_name(UNIT))
    monkeypatch.setattr(jit, "_OPTIONS", ("--std=c++20",))
    names.add(jit._file_name(UNIT))
    assert len(names) == 8


def test_each_variant_has_its_own_file() -> None:
    variants = set(every_variant())
    assert len({jit._file_name(jit.render(variant, "90a")) for variant in variants}) == len(variants)


def test_a_rendering_is_cheap() -> None:
    """Part of the 5 ms of a further variant's first call: 0.1 ms seen, once the sources were read."""
    jit.render(VARIANT, "86")
    spent = []
    for arch in ("80", "86", "89", "100"):
        start_s = time.perf_counter()
        jit._file_name(jit.render.__wrapped__(VARIANT, arch))
        spent.append(time.perf_counter() - start_s)
    assert min(spent) < 0.001


# --- files ---------------------------------------------------------------------------------------------------------------------------


def test_kf_106_a_second_process_calls_no_compiler(cache: Path) -> None:
    first, again, _ = warm(CUPYFLASH_CACHE_DIR=str(cache))
    assert (first.cached, again.cached) == (False, True)
    without = "from cupy.cuda import nvrtc\nnvrtc.compileProgram = None\n"
    second, _, messages = warm(without + WARM, CUPYFLASH_CACHE_DIR=str(cache))
    assert (second.cached, second.path, messages) == (True, first.path, [])
    assert second.seconds < 0.05


def test_kf_104_a_damaged_file_is_rebuilt(cache: Path) -> None:
    whole = jit.build(UNIT)
    assert whole.path is not None
    content = whole.path.read_bytes()
    flipped = content[:1000] + bytes([content[1000] ^ 1]) + content[1001:]
    damaged = [content[:n] for n in (0, 1, 31, 32, 33, len(content) // 2, len(content) - 1)]
    for wrong in (*damaged, flipped, b"\0" * len(content)):
        whole.path.write_bytes(wrong)
        assert jit._stored(whole.path.name) is None
    built = jit.build(UNIT)
    assert (built.cubin, built.cached) == (whole.cubin, False)
    assert whole.path.read_bytes() == content
    assert jit.build(UNIT).cached
    assert [file.name for file in cache.iterdir()] == [whole.path.name]


def test_a_file_is_readable_for_others(cache: Path) -> None:
    """One that was written into an image by one user serves the others."""
    mask = os.umask(0o022)
    try:
        path = jit.build(UNIT).path
    finally:
        os.umask(mask)
    assert path is not None
    assert path.stat().st_mode & 0o777 == 0o644


def test_kf_101_102_sixteen_processes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a folder that is not there (101), and on one that is, with the folder for temporary files (102)."""
    (tmp_path / "there").mkdir()
    (tmp_path / "tmp").mkdir()
    code = f"""
        import json, multiprocessing, os
        import cupyflash

        def work(barrier, queue):
            barrier.wait()
            queue.put(cupyflash.warmup({CALL!r}, arch="sm_80")[0])

        if __name__ == "__main__":
            cupyflash.environment.load_nvrtc()
            fork = multiprocessing.get_context("fork")
            found = []
            for folder in ("absent", "there"):
                os.environ["CUPYFLASH_CACHE_DIR"] = os.path.join({str(tmp_path)!r}, folder)
                barrier, queue = fork.Barrier(16), fork.Queue()
                workers = [fork.Process(target=work, args=(barrier, queue)) for _ in range(16)]
                for worker in workers: worker.start()
                found.append([queue.get(timeout=60) for _ in workers])
                for worker in workers: worker.join()
            print(json.dumps(found))
    """
    for reports in run(code, TMPDIR=str(tmp_path / "tmp")):
        (path,) = {cupyflash.Report(*report).path for report in reports}
        assert [file.name for file in Path(path).parent.iterdir()] == [Path(path).name]
        monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(Path(path).parent))
        assert jit._stored(Path(path).name)


KILLED = """
import os, pathlib, signal
from cupy.cuda import nvrtc

def die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)

def write_half(path, content):
    with open(path, "wb") as file:
        file.write(content[: len(content) // 2])
    die()

"""


@pytest.mark.parametrize(
    ("when", "left"), [("nvrtc.compileProgram = die", 0), ("pathlib.Path.write_bytes = write_half", 1)], ids=["compiling", "writing"]
)
def test_kf_110_a_killed_process_is_in_no_ones_way(cache: Path, when: str, left: int) -> None:
    process = start(f"{KILLED}{when}\n{WARM}", CUPYFLASH_CACHE_DIR=str(cache))
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert len(list(cache.glob("*"))) == left
    first, second, messages = warm(CUPYFLASH_CACHE_DIR=str(cache))
    assert (first.cached, second.cached, messages) == (False, True, [])
    assert first.seconds < 5


# In /proc and /sys no one can make a folder, not even root.
@pytest.mark.parametrize("home", ["/proc/nonexistent", "/sys", None], ids=["nonexistent", "read-only", "unset"])
def test_kf_103_without_a_home_kernels_are_in_memory_with_one_warning(home: str | None, tmp_path: Path) -> None:
    code = WARM
    if home is None:  # and without an entry for the user, as where a container was started with --user
        code = "import os\nos.path.expanduser = lambda path: path\n" + WARM
    first, second, messages = warm(code, tmp_path, HOME=home)
    assert (first.cached, first.path, second.cached, second.path) == (False, None, True, None)
    assert len(messages) == 1
    assert re.search(r"cannot be written \(.*\): set CUPYFLASH_CACHE_DIR to a folder that can", messages[0])
    first, _, messages = warm(code, tmp_path, HOME=home, CUPYFLASH_CACHE_DIR=str(tmp_path / "mine"))
    assert (Path(first.path or "").parent, messages) == (tmp_path / "mine", [])
    assert [folder.name for folder in tmp_path.iterdir()] == ["mine"]


def test_kf_103_one_warning_is_enough(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", "/sys/mine")
    with caplog.at_level(logging.WARNING, "cupyflash"):
        built = [jit.build(jit.render(VARIANT, arch)) for arch in ("80", "86")]
    assert [cubin.path for cubin in built] == [None, None]
    assert len(caplog.messages) == 1


def test_kf_111_variables_set_after_the_import_are_honoured(tmp_path: Path) -> None:
    assert cupyflash.show_config(mode="dicts")["cache_dir"] == str(tmp_path / "cache")  # type: ignore[index]
    code = "import os, cupyflash\nos.environ['{}'] = {!r}\n" + WARM.replace("{", "{{").replace("}", "}}")
    for variable in ("CUPYFLASH_CACHE_DIR", "CUPY_CACHE_DIR"):
        folder = tmp_path / variable
        first, _, _ = warm(code.format(variable, str(folder)))
        assert Path(first.path or "").parent == folder


def test_kf_112_paths_with_spaces(tmp_path: Path) -> None:
    tree, folder = tmp_path / "an install" / "in here", tmp_path / "a cache" / "of kernels"
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("cupyflash", "cuda_src"):
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    temporary = tmp_path / "temporary files"
    temporary.mkdir()
    where = f"import cupyflash\nassert cupyflash.__file__.startswith({str(tree)!r})\n"
    first, second, _ = warm(where + WARM, PYTHONPATH=str(tree), CUPYFLASH_CACHE_DIR=str(folder), TMPDIR=str(temporary))
    assert Path(first.path or "").parent == folder
    assert second.cached


def test_kf_113_no_nvcc_on_the_path(cache: Path) -> None:
    nothing = {name: None for name in os.environ if name.startswith("CUDA_")}
    first, _, messages = warm(**nothing, PATH="", CUPYFLASH_CACHE_DIR=str(cache))
    assert (first.path is not None, messages) == (True, [])


# --- loading, with a stand-in for the driver -------------------------------------------------------------------------------------------


class FakeGpu:
    """Takes the place of what a GPU would answer; keeps what was loaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loaded: list[bytes] = []
        self.raw: list[dict[str, Any]] = []
        self.smem: list[tuple[int, int, int]] = []
        self.capturing: list[int] = []
        self.raw_error: Exception | None = None
        gpu = self

        class Module:
            def load(self, cubin: bytes) -> None:
                gpu.loaded.append(cubin)

            def get_function(self, name: str) -> Any:
                return types.SimpleNamespace(ptr=len(gpu.loaded), name=name)

        class RawModule:
            def __init__(self, **arguments: Any) -> None:
                if gpu.raw_error:
                    raise gpu.raw_error
                gpu.raw.append(arguments)

            def get_function(self, name: str) -> Any:
                return types.SimpleNamespace(kernel=types.SimpleNamespace(ptr=100 + len(gpu.raw), name=name))

        monkeypatch.setattr(cupy.cuda, "Module", Module)
        monkeypatch.setattr(cupy, "RawModule", RawModule)
        monkeypatch.setattr(cupy.cuda.driver, "funcSetAttribute", lambda *arguments: self.smem.append(arguments))
        monkeypatch.setattr(cupy.cuda.runtime, "streamIsCapturing", lambda stream: stream in self.capturing)
        monkeypatch.setattr(jit, "_kernels", {})


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu(monkeypatch)


def test_without_a_file_cupy_compiles(gpu: FakeGpu, cache: Path) -> None:
    assert jit.load(VARIANT, "80", 0).handle == 101
    assert jit.load(VARIANT, "80", 0).handle == 101
    assert gpu.raw == [{"code": UNIT.source, "options": ("--std=c++17",)}]
    assert not gpu.loaded
    assert not cache.exists()


def test_our_own_file_comes_first(gpu: FakeGpu) -> None:
    built = jit.build(UNIT)
    assert jit.load(VARIANT, "80", 0).handle == 1
    assert (gpu.loaded, gpu.raw) == ([built.cubin], [])


def test_the_shared_memory_of_a_tile_is_asked_for(gpu: FakeGpu) -> None:
    row = FORWARD[0]
    variant = Variant(row.family, "float16", *row.head_dims, (), row.config)
    assert gpu.smem == [(jit.load(variant, "80", 0).handle, 8, variant.smem_bytes)]


def test_the_letter_of_an_architecture_is_an_option(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy.cuda.nvrtc, "getVersion", lambda: (12, 9))
    jit.load(VARIANT, "90a", 0)
    assert gpu.raw[0]["options"] == ("--std=c++17", "-arch=sm_90a")


def test_before_nvrtc_12_9_the_letter_of_an_architecture_needs_a_file(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(cupy.cuda.nvrtc, "getVersion", lambda: (12, 8))
    jit.load(VARIANT, "90a", 0)
    jit.load(VARIANT, "80", 1)
    assert (len(gpu.loaded), len(gpu.raw)) == (1, 1)
    assert [file.name.startswith("fwd_simple-sm_90a-nvrtc12.8-") for file in cache.iterdir()] == [True]


@pytest.mark.parametrize("error", [RuntimeError("Failed to find CUDA headers."), PermissionError(13, "Permission denied")])
def test_kf_108_without_headers_or_a_folder_of_cupys_it_is_compiled_past_it(gpu: FakeGpu, error: Exception) -> None:
    gpu.raw_error = error
    jit.load(VARIANT, "80", 0)
    assert gpu.loaded == [jit.build(UNIT).cubin]


def test_a_refused_compilation_names_variant_error_and_source(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    wrong = UNIT._replace(source=UNIT.source + "\nint main( {}\n")
    gpu.raw_error = cupy.cuda.compiler.CompileException("kern.cu(3): error: no such thing\n", wrong.source, "kern.cu", ())
    for compile_it in (jit.compile_cubin, jit._through_cupy):
        with pytest.raises(CompileError, match=rf"^{VARIANT.name} did not compile: .*error.* \(source: .*\); please report") as caught:
            compile_it(wrong)
        source = re.search(r"source: (.*?)\)", str(caught.value))
        assert source is not None
        assert Path(source[1]).read_text() == wrong.source


def test_a_refused_module_names_the_versions(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    class DriverError(RuntimeError):  # the real one asks the driver for its text
        pass

    class Module:
        def load(self, cubin: bytes) -> None:
            raise DriverError("CUDA_ERROR_NO_BINARY_FOR_GPU")

    monkeypatch.setattr(cupy.cuda.driver, "CUDADriverError", DriverError)
    jit.build(UNIT)
    monkeypatch.setattr(cupy.cuda, "Module", Module)
    monkeypatch.setattr(cupy.cuda.runtime, "driverGetVersion", lambda: 12040)
    with pytest.raises(DeviceError, match=rf"refused to load {VARIANT.name}, compiled by NVRTC \d+\.\d+ for sm_80.*CUDA 12\.4$"):
        jit.load(VARIANT, "80", 0)


def test_kf_093_a_first_call_inside_a_capture_is_told_to_warm_up(gpu: FakeGpu) -> None:
    gpu.capturing.append(7)
    with pytest.raises(StateError, match=rf"{VARIANT.name} is not loaded yet.*call cupyflash\.warmup\(\.\.\.\), before the capture"):
        jit.load(VARIANT, "80", 0, 7)
    assert not gpu.raw
    loaded = jit.load(VARIANT, "80", 0, 8)
    assert jit.load(VARIANT, "80", 0, 7) is loaded  # a loaded kernel asks no one


def test_kf_093_the_default_stream_cannot_be_asked_while_another_one_captures(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(stream: int) -> None:
        raise cupy.cuda.runtime.CUDARuntimeError(906)  # cudaErrorStreamCaptureImplicit

    monkeypatch.setattr(cupy.cuda.runtime, "streamIsCapturing", ask)
    with pytest.raises(StateError):
        jit.load(VARIANT, "80", 0)


def test_threads_that_ask_for_one_kernel_compile_it_once(gpu: FakeGpu) -> None:
    threads = [threading.Thread(target=jit.load, args=(VARIANT, "80", 0)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(gpu.raw) == 1


def test_cupy_and_we_compile_the_same_bytes(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its -arch=sm_90 behind our -arch=sm_90a leaves the letter, which is what TMA and wgmma need; its options are those of our own."""
    from cupy._core import core
    from cupy.cuda import _compiler_cache, compiler, function

    class Image(function.Module):
        bits = b""

        def load(self, cubin: bytes) -> None:
            self.bits = cubin

        def _set_mapping(self, mapping: Any) -> None:
            pass

    monkeypatch.setattr(compiler, "_kernel_cache_backend", _compiler_cache.DiskKernelCacheBackend(str(tmp_path / "cupy")))
    monkeypatch.setattr(compiler, "function", types.SimpleNamespace(Module=Image))
    create = cupy.cuda.nvrtc.createProgram
    monkeypatch.setattr(cupy.cuda.nvrtc, "createProgram", lambda text, name, *headers: create(text, "one name", *headers))
    for arch, of_cupy in (("90a", "90"), ("80", "80")):
        monkeypatch.setattr(compiler, "_get_arch", lambda of_cupy=of_cupy: of_cupy)
        monkeypatch.setattr(compiler, "_get_arch_for_options_for_nvrtc", lambda _=None, of_cupy=of_cupy: (f"-arch=sm_{of_cupy}", "cubin"))
        unit = jit.render(VARIANT, arch)
        if jit._through_cupy(unit) is None:
            assert cupy.cuda.nvrtc.getVersion() < (12, 9)
            continue
        module = core.compile_with_cache(unit.source, gpu.raw[-1]["options"], prepend_cupy_headers=False)
        assert module.bits + b"\0" == jit.compile_cubin(unit)[0]


# --- warmup --------------------------------------------------------------------------------------------------------------------------


def test_warmup_compiles_what_calls_would_need(cache: Path) -> None:
    calls = [{"head_dim": 32, "dtype": dtype, "seqlen_q": n} for dtype in ("float32", "float64") for n in (7, 9)]
    reports = cupyflash.warmup(calls, arch="sm_90")
    assert [(report.variant, report.arch, report.cached) for report in reports] == [
        ("fwd_simple__f32_d32__w4", "sm_90a", False),
        ("fwd_simple__f64_d32__w4", "sm_90a", False),
    ]
    assert {report.path for report in reports} == {str(file) for file in cache.iterdir()}
    assert cupyflash.warmup({"head_dim": 32, "dtype": "float32", "batch": 0}, arch="sm_90a") == []


def test_warmup_compiles_what_backward_calls_would_need(cache: Path) -> None:
    reports = cupyflash.warmup({**CALL, "sink": True, "wrt": ("q", "sink")}, arch="sm_80")
    assert [report.variant for report in reports] == [
        "bwd_delta__f32_d64__w4__sink",
        "bwd_simple__f32_d32__w4__sink",
        "bwd_sum__f32__w4__sink",
    ]
    assert {report.path for report in reports} == {str(file) for file in cache.iterdir()}


def test_warmup_for_this_gpu_loads_what_calls_then_find(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, answer in (("getDeviceCount", 1), ("getDevice", 0), ("setDevice", None)):
        monkeypatch.setattr(cupy.cuda.runtime, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(device, "query", lambda device_id: KNOWN["80"])
    (report,) = cupyflash.warmup(CALL)
    assert (report.variant, report.arch) == (VARIANT.name, "sm_80")
    gpu.capturing.append(0)
    assert jit.load(VARIANT, "80", 0).handle == 1
    assert not gpu.raw


def test_warmup_says_what_it_cannot_do() -> None:
    with pytest.raises(UnsupportedError, match="no kernel for head_dim 300"):
        cupyflash.warmup({"head_dim": 300}, arch="sm_80")
    with pytest.raises(cupyflash.ArgumentError, match="'is_causal'; it is called 'causal'"):
        cupyflash.warmup({"head_dim": 64, "is_causal": True}, arch="sm_80")
    with pytest.raises(DeviceError, match=r"device='sm_75' is unknown: it is .* one of 'sm_80'.*'sm_90a'"):
        cupyflash.warmup({"head_dim": 64}, arch="sm_75")
    with pytest.raises(DeviceError, match="arch='host' has nothing to compile"):
        cupyflash.warmup({"head_dim": 64}, arch="host")


def test_the_example_of_warmup_runs() -> None:
    (test,) = doctest.DocTestFinder(recurse=False).find(cupyflash.warmup, "warmup")
    assert doctest.DocTestRunner().run(test) == doctest.TestResults(0, 3)
    assert doctest.testmod(environment).failed == 0


# --- devices and installations ---------------------------------------------------------------------------------------------------------


def test_kf_115_the_tile_fits_the_shared_memory_of_each_device() -> None:
    for arch, spec in KNOWN.items():
        for head_dim in (64, 128, 256):
            (variant,) = cupyflash.supports(head_dim=head_dim, dtype="bfloat16", device=f"sm_{arch}").variants
            assert 0 < variant.smem_bytes <= spec.smem_bytes
    large, small = (cupyflash.supports(head_dim=256, device=name).variants[0] for name in ("sm_90a", "sm_86"))
    assert large.smem_bytes > KNOWN["86"].smem_bytes >= small.smem_bytes


@pytest.mark.parametrize(
    ("capability", "way_out"), [((13, 0), r"pip install -U 'cupyflash\[cuda13\]'"), ((6, 1), r"pip install 'cupyflash\[cuda12\]'")]
)
def test_kf_118_a_gpu_that_nvrtc_cannot_compile_for(capability: tuple[int, int], way_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = {"name": b"NVIDIA Imaginary", "major": capability[0], "minor": capability[1]}
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceProperties", lambda _: properties)
    monkeypatch.setattr(cupy.cuda.nvrtc, "getVersion", lambda: (13, 0))
    monkeypatch.setattr(cupy.cuda.nvrtc, "getSupportedArchs", lambda: (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121))
    device.query.cache_clear()
    message = r"NVIDIA Imaginary has compute capability {}\.{}, and NVRTC 13\.0 compiles the kernels for 7\.5 to 12\.1: {}"
    with pytest.raises(DeviceError, match=message.format(*capability, way_out)):
        device.query(0)


@pytest.mark.parametrize(
    ("status", "driver", "message"), [(35, 0, "no NVIDIA driver is loaded.*--gpus all"), (100, 13000, "no GPU can be used.*nvidia-smi -L")]
)
def test_kf_116_without_a_gpu_or_a_driver(status: int, driver: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def count() -> None:
        raise cupy.cuda.runtime.CUDARuntimeError(status)

    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", count)
    monkeypatch.setattr(cupy.cuda.runtime, "driverGetVersion", lambda: driver)
    for call in (lambda: cupyflash.warmup(CALL), device.current):
        with pytest.raises(DeviceError, match=f"^{message}[^\n]*$"):
            call()


def test_kf_116_without_cupy_one_line_says_what_to_install(tmp_path: Path) -> None:
    absent = "import sys\nsys.modules['cupy'] = None\n"
    code = """
        import json, cupyflash
        try: cupyflash.warmup({"head_dim": 64}, arch="sm_80")
        except cupyflash.SetupError as e: print(json.dumps([str(e), cupyflash.show_config(mode="dicts")["cupy"]]))
    """
    message, found = run(absent + textwrap.dedent(code), HOME="/sys")
    assert re.fullmatch(rf"kernels run through CuPy, which is not installed: {PIP_LINE}.*", message)
    assert found is None
    (tmp_path / "sitecustomize.py").write_text(absent)
    for option in ("--help", "--version"):
        command = [sys.executable, "-m", "bench", option]
        subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=True, capture_output=True)


def test_kf_116_without_nvrtc_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise RuntimeError('Failure finding "libnvrtc.so"\nin many places')

    monkeypatch.setattr(cupy.cuda.nvrtc, "getVersion", absent)
    with pytest.raises(SetupError, match=rf"^NVRTC, which compiles the kernels, is not found: {PIP_LINE}[^\n]*$"):
        cupyflash.warmup(CALL, arch="sm_80")


def test_kf_117_two_cupy_packages_are_named(tmp_path: Path) -> None:
    """They overwrite each other's files, so what does not load is neither."""
    for name in ("cupy_cuda12x", "cupy_cuda13x"):
        info = tmp_path / f"{name}-14.2.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 14.2.0\n")
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").write_text(
        "raise ImportError('====\\nFailed to import CuPy.\\n\\nlibcudart.so.12: no such file\\n====')"
    )
    code = """
        import json, cupyflash
        try: cupyflash.warmup({"head_dim": 64}, arch="sm_80")
        except cupyflash.SetupError as e: print(json.dumps(str(e)))
    """
    message = run(code, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}", CUPY_CACHE_DIR=str(tmp_path / "kernels"))
    assert re.fullmatch(
        r"CuPy does not load: libcudart\.so\.12: no such file; cupy-cuda12x and cupy-cuda13x are both installed and overwrite each other: "
        rf"pip uninstall -y cupy-cuda12x cupy-cuda13x && {PIP_LINE} .*",
        message,
    )


def test_the_pip_line_is_that_of_the_installed_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = [types.SimpleNamespace(name=name) for name in ("numpy", "cupy-cuda12x", "cupyflash")]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: installed)
    assert str(environment.setup_error("so")) == "so: pip install 'cupyflash[cuda12]'"


def test_names_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.named("host") is device.HOST_SPEC
    assert device.named("sm_90") is device.named("90a") is KNOWN["90a"]
    monkeypatch.setattr(device, "current", lambda: 3)
    monkeypatch.setattr(device, "query", {3: KNOWN["120"]}.get)
    assert device.named("cuda") is KNOWN["120"]
    with contextlib.suppress(SetupError):
        assert api.supports(head_dim=64, device="cuda").variants
