"""GPU memory as a `timing.Place`: inputs made where they are used, three timers that count no host time, ceilings, peak memory.

A kernel of some microseconds is shorter than the host's time to queue it, so a clock around calls would measure Python. `graph` records
the calls of a round in a CUDA graph and replays it; `events` queues them behind a kernel that spins until all are queued. Both read two
events on the stream around at least ROUND_MS of work. `wall` is what a caller waits for a single call.

torch is used where it is installed with CUDA: then every peer gets torch tensors, all over the same memory. CuPy is there always.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext, suppress
from typing import Any

import numpy as np

import cupyflash

from . import check, cublas, nvml
from .cases import CACHE_DTYPES, DESCALE, Case, Inputs
from .machine import nvidia_driver
from .timing import Call, CaptureError, Ceilings, Place, Round, Tick, Timing, measure

ROUND_MS = 5.0  # work between two events: their own cost, some microseconds, is then below a thousandth
MAX_CALLS = 400  # in a round: the driver's queue holds about a thousand kernels, and a call may be more than one
MAX_SETS = 256
MAX_SPIN_US = 200_000.0
BURST = 24, 200  # calls without a wait between them, for their host time: enough to be warm, and no more than the queue holds
BURST_MS = 250.0

_KERNELS = r"""
extern "C" __global__ void spin(long long ns) {
  long long start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - start < ns);
}

extern "C" __global__ void read_all(const uint4* data, long long count, unsigned* out) {
  unsigned seen = 0;
  const long long step = (long long)gridDim.x * blockDim.x;
  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  for (; i + 7 * step < count; i += 8 * step) {
    uint4 x[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = __ldcs(data + i + j * step);
#pragma unroll
    for (int j = 0; j < 8; ++j) seen ^= x[j].x ^ x[j].y ^ x[j].z ^ x[j].w;
  }
  if (seen == 0x9e3779b9u) *out = seen;  // never true of zeros, which the compiler cannot know
}
"""


def why_not() -> str | None:
    """Why nothing can be computed in GPU memory here, or None. Makes no context where there is no GPU."""
    driver = nvidia_driver()
    if not driver.gpus:
        return driver.error or ("the driver lists no GPU" if driver.cuda else "no NVIDIA driver, so no GPU")
    # The library's own check: CuPy is there and loads, the driver is new enough for it, NVRTC compiles for this GPU.
    answer = cupyflash.supports(head_dim=64, device="cuda")
    return None if answer else answer.reason


def open_place() -> Gpu:
    """The place; SetupError with the reason where there is none."""
    if reason := why_not():
        raise cupyflash.SetupError(f"no GPU to use ({reason}); --device host computes in host memory")
    return Gpu()


def smoke() -> check.Verdict:
    """One small attention on the GPU: compiled, run and judged."""
    try:
        return check.run(check.SMALL, open_place())
    except Exception as error:  # whatever CuPy throws where its parts do not fit together is the answer
        return check.failure(check.SMALL, error)


@functools.cache
def torch_with_cuda() -> Any:
    """The module, or None. Imported before anything asks CuPy for cuBLAS: CuPy then finds the one that torch has loaded."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return torch if torch.cuda.is_available() else None


@functools.cache
def why_no_cublas() -> str | None:
    """Why `cublas.multiply` cannot work here, or None."""
    import cupy

    ones = cupy.ones((1, 1, 16, 16), cupy.float16)
    try:
        cublas.multiply(ones, ones, cupy.empty_like(ones))
    except (ImportError, AttributeError, RuntimeError, OSError) as error:
        return f"CuPy finds no cuBLAS ({' '.join(str(error).split())[:90]})"
    return None


class Gpu(Place):
    """The current device, on a stream of its own; inside `with`, that stream is the current one of CuPy and of torch."""

    name = "gpu"

    def __init__(self) -> None:
        self.torch = torch_with_cuda()
        import cupy

        self._cupy = cupy
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._entered: list[ExitStack] = []
        self._slowed: set[str] = set()
        self._spin, self._read_all = (cupy.RawKernel(_KERNELS, name) for name in ("spin", "read_all"))
        self.timers = {"graph": self._graph, "events": self._events, "wall": self._wall}
        device, runtime = cupy.cuda.Device().id, cupy.cuda.runtime
        properties = runtime.getDeviceProperties(device)
        self.arch = f"sm_{properties['major']}{properties['minor']}" + ("a" if properties["major"] == 9 else "")
        # Twice the L2: in a cache that is not quite least-recently-used, once is not enough to have passed everything over.
        self.cache_bytes = 2 * properties["l2CacheSize"]
        try:
            self._sensor: nvml.Sensor | None = nvml.Sensor(runtime.deviceGetPCIBusId(device))
        except OSError:
            self._sensor = None

    def __enter__(self) -> Gpu:
        stack = ExitStack()
        stack.enter_context(self._stream)
        if self.torch is not None:
            stack.enter_context(self.torch.cuda.stream(self.torch.cuda.ExternalStream(self._stream.ptr)))
        self._entered.append(stack)
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.pop().close()

    # Arrays ---------------------------------------------------------------------------------------------------------------------

    def inputs(self, case: Case, *, cold: bool = True) -> list[Inputs]:
        """Normal q, k, v, dout, and where the sequences are, which all sets share: torch tensors where there is torch, else CuPy arrays."""
        sets = min(MAX_SETS, -(-self.cache_bytes // max(case.num_bytes, 1))) if cold else 1
        shapes = (*case.shapes, case.out_shape) if case.backward else case.shapes
        given = {**case.options, **case.packing, **case.sink}
        options = {name: self._put(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
        kinds = [*zip(shapes, (*case.dtypes, case.dtype), strict=False)]
        arrays = ([self._normal(*kind, len(kinds) * n + i) for i, kind in enumerate(kinds)] for n in range(sets))
        return [Inputs(q, k, k[..., : case.head_dim_v] if case.latent else v, options, *dout) for q, k, v, *dout in arrays]

    def _put(self, array: Any) -> Any:
        """A NumPy array as one of the library that the inputs are of."""
        return self.put(array) if self.torch is None else self.torch.as_tensor(array, device="cuda")

    def _normal(self, shape: tuple[int, ...], dtype: str, seed: int) -> Any:
        if dtype in CACHE_DTYPES:
            x = self._normal(shape, "float16", seed)
            x /= DESCALE
            return x.to(getattr(self.torch, dtype)) if self.torch is not None else x.astype(dtype)
        if self.torch is not None:
            generator = self.torch.Generator(device="cuda").manual_seed(seed)
            return self.torch.randn(shape, dtype=getattr(self.torch, dtype), device="cuda", generator=generator)
        x = self._cupy.empty(shape, _bfloat16() if dtype == "bfloat16" else dtype)
        _normal_kernel()(seed, x)
        return x

    def put(self, array: Any) -> Any:
        return self._cupy.asarray(_as_bits(array)).view(array.dtype)

    def fetch(self, array: Any) -> Any:
        if self.torch is not None and isinstance(array, self.torch.Tensor):
            return array.to(self.torch.float64).cpu().numpy()
        return self._cupy.asnumpy(_as_bits(array)).view(array.dtype).astype(np.float64)

    def keep_rows(self, array: Any, rows: Sequence[slice]) -> Any:
        bits = _as_bits(array) if isinstance(array, self._cupy.ndarray) else array
        kept = bits * 0
        for some in rows:
            kept[..., some, :, :] = bits[..., some, :, :]
        return kept if bits is array else kept.view(array.dtype)

    def wait(self) -> None:
        self._stream.synchronize()

    # Timers ---------------------------------------------------------------------------------------------------------------------

    def _events(self, calls: Sequence[Call]) -> Round:
        count, ms = self._count(calls)
        return self._between_events(calls, _in_turn(calls, count), count, ms)

    def _graph(self, calls: Sequence[Call]) -> Round:
        count, ms = self._count(calls)
        try:
            replay = self._capture(_in_turn(calls, count))
        except Exception as error:  # each library has its own way to say that its call does more than queue kernels
            self.wait()
            raise CaptureError(" ".join(f"{type(error).__name__}: {error}".split())[:100]) from error
        return self._between_events(calls, replay, count, ms)

    def _wall(self, calls: Sequence[Call]) -> Round:
        following = itertools.cycle(calls)

        def round_() -> Tick:
            call = next(following)
            start = time.perf_counter()
            call()
            host_s = time.perf_counter() - start
            self.wait()
            return Tick((time.perf_counter() - start) * 1e3, host_s * 1e6, self._clock_mhz())

        return round_

    def _between_events(self, calls: Sequence[Call], work: Call, count: int, call_ms: float) -> Round:
        """Rounds of `work`, which is `count` calls; before the first one the calls' host time, which is every round's."""
        spin_us = [50.0]  # what it has grown to stays for the next rounds
        host_us = functools.cache(lambda: self._host_us(calls, count, call_ms))

        def round_() -> Tick:
            of_host = host_us()
            ms, clock_mhz = self._behind_spin(work, spin_us)
            return Tick(ms / count, of_host, clock_mhz)

        return round_

    def _host_us(self, calls: Sequence[Call], count: int, call_ms: float) -> float:
        """Microseconds of the host from a call to its return, in a burst of calls: after a wait for the GPU, the driver's thread has slept
        and the CPU's caches have gone cold, which costs ten times the call itself. How far the GPU falls behind meanwhile is no matter."""
        fewest, most = BURST
        burst = max(4, min(max(fewest, count), most, int(BURST_MS / max(call_ms, 1e-4))))
        times_us = []
        for call in itertools.islice(itertools.cycle(calls), burst):
            start = time.perf_counter()
            call()
            times_us.append((time.perf_counter() - start) * 1e6)
        self.wait()
        return float(np.median(times_us[burst // 4 :]))

    def _behind_spin(self, work: Call, spin_us: list[float]) -> tuple[float, float | None]:
        """Milliseconds of the work on the GPU, and the clock meanwhile. If the spin was over before all was queued, it is doubled and
        the round taken again; work that waits for the GPU in itself outlasts any spin and is timed as it comes."""
        first, last = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        while True:
            self._spin((1,), (1,), (int(spin_us[0] * 1e3),))
            first.record(self._stream)
            work()
            last.record(self._stream)
            queued_in_time = not first.done
            clock_mhz = self._clock_mhz()  # here, while the GPU works
            last.synchronize()
            if queued_in_time or spin_us[0] >= MAX_SPIN_US:
                return self._cupy.cuda.get_elapsed_time(first, last), clock_mhz
            spin_us[0] *= 2

    def _count(self, calls: Sequence[Call]) -> tuple[int, float]:
        """Calls in a round, as many as take ROUND_MS, in whole turns through the buffers; and milliseconds of one."""
        for call in calls[:3]:
            call()
        some = min(len(calls), 50)
        ms = self._behind_spin(_in_turn(calls, some), [100.0])[0] / some
        turns = max(1, min(round(ROUND_MS / max(ms * len(calls), 1e-4) + 0.5), MAX_CALLS // len(calls)))
        return turns * len(calls), ms

    def _capture(self, work: Call) -> Call:
        """Record the work and return what replays it.

        What the work allocates stays the graph's own: torch's tensors in a pool that lives as long, CuPy's arrays, and what torch's
        threads of the backward allocate, in blocks that the calls before have left and that only results of later calls can take, which
        nobody reads. Not by torch.cuda.graph: where a capture fails, that leaves torch's allocator unfit for the next one.
        """
        pool = self.torch.cuda.MemPool() if self.torch is not None else None
        with nullcontext() if pool is None else self.torch.cuda.use_mem_pool(pool):
            self._stream.begin_capture()
            try:
                work()
            except BaseException:
                with suppress(Exception):  # the capture is invalid by now; the work's own error says more
                    self._stream.end_capture()
                raise
            graph = self._stream.end_capture()
        graph.upload(self._stream)
        kept = (graph, pool)
        return lambda: kept[0].launch(self._stream)

    def _clock_mhz(self) -> int | None:
        if self._sensor is None:
            return None
        self._slowed |= self._sensor.slowed()
        return self._sensor.clock_mhz()

    def slowed(self) -> str:
        since, self._slowed = self._slowed, set()
        return " and ".join(sorted(since))

    # What the machine has -------------------------------------------------------------------------------------------------------

    def peak_bytes(self, call: Call) -> int:
        """The call runs on an empty CuPy pool, whose size afterwards is the most that it held, and under torch's own count."""
        pool, torch = self._cupy.cuda.MemoryPool(), self.torch
        before = 0
        if torch is not None:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        with self._cupy.cuda.using_allocator(pool.malloc):
            result = call()
        self.wait()
        del result
        return int(pool.total_bytes()) + (torch.cuda.max_memory_allocated() - before if torch is not None else 0)

    def free_bytes(self) -> int:
        """What can still be allocated: free on the device, or held by the two pools without use."""
        pool = self._cupy.get_default_memory_pool()
        idle = pool.free_bytes()
        if self.torch is not None:
            idle += self.torch.cuda.memory_reserved() - self.torch.cuda.memory_allocated()
        return int(self._cupy.cuda.runtime.memGetInfo()[0]) + int(idle)

    def ceilings(self) -> Ceilings:
        """The two rates that tables divide by: half a second."""
        matmul = "matmul_bf16" if self.torch is not None else "matmul_fp16"
        found = self.rates((matmul, "read"), min_s=0.1)
        return Ceilings(found.get(matmul), found["read"])

    def rates(
        self, names: Sequence[str] = ("read", "copy", "matmul_bf16", "matmul_fp16", "launch_us"), *, min_s: float = 0.5
    ) -> dict[str, float]:
        """FLOP/s and bytes/s at best, by name: matmuls of 8192³ by cuBLAS, through torch or CuPy (float16 alone), a kernel that reads 4 GiB
        and a copy from one half of them to the other; and microseconds of an empty kernel, on the GPU and on the host."""
        with self:
            size = min(4 << 30, self.free_bytes() // 4) & -(1 << 20)
            found = self._measured(names, size, min_s)
        self._cupy.get_default_memory_pool().free_all_blocks()  # else the rest would have 4 GiB less
        launch = found.pop("launch_us", None)
        rates = {name: (2 * 8192**3 if "matmul" in name else size) / timing.ms * 1e3 for name, timing in found.items()}
        return {**rates, **({"launch_us": launch.ms * 1e3, "launch_host_us": launch.host_us or 0.0} if launch else {})}

    def _measured(self, names: Sequence[str], size: int, min_s: float) -> dict[str, Timing]:
        """The timings of `rates`, as far as they can be made here; its arrays are free again afterwards."""
        data, seen = self._cupy.zeros(size // 4, self._cupy.uint32), self._cupy.zeros(1, self._cupy.uint32)
        blocks = 16 * self._cupy.cuda.Device().attributes["MultiProcessorCount"]
        half, runtime = size // 2, self._cupy.cuda.runtime
        kind = runtime.memcpyDeviceToDevice
        calls: dict[str, Call | None] = {
            "read": lambda: self._read_all((blocks,), (256,), (data, size // 16, seen)),
            "copy": lambda: runtime.memcpyAsync(data.data.ptr + half, data.data.ptr, half, kind, self._stream.ptr),
            "launch_us": lambda: self._spin((1,), (1,), (0,)),
            **{name: self._matmul(8192, name.removeprefix("matmul_")) for name in names if name.startswith("matmul_")},
        }
        return measure({name: self._events([call]) for name in names if (call := calls[name])}, min_s=min_s, max_s=3 * min_s)

    def _matmul(self, n: int, dtype: str) -> Call | None:
        if self.torch is None and (dtype != "fp16" or why_no_cublas()):
            return None
        name = {"bf16": "bfloat16", "fp16": "float16"}[dtype]
        a, b = (self._normal((1, 1, n, n), name, seed) for seed in (1, 2))
        if self.torch is None:
            return functools.partial(cublas.multiply, a, b, self._cupy.empty_like(a))
        return functools.partial(self.torch.matmul, a, b, out=self.torch.empty_like(a))


def _in_turn(calls: Sequence[Call], count: int) -> Call:
    """`count` calls, over and over again; no result is kept, so all of them find the same memory free."""

    def work() -> None:
        for call in itertools.islice(itertools.cycle(calls), count):
            call()

    return work


@functools.cache
def _normal_kernel() -> Any:
    """Box and Muller's normal numbers from hashed indices: cuRAND is one more wheel, and some machines have none."""
    import cupy

    return cupy.ElementwiseKernel(
        "uint64 seed",
        "T y",
        """
        unsigned long long z = (seed << 40) + i;
        unsigned u[2];
        for (int n = 0; n < 2; ++n) {  // splitmix64
          z += 0x9e3779b97f4a7c15ull;
          unsigned long long x = z;
          x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
          x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
          u[n] = (unsigned)((x ^ (x >> 31)) >> 32);
          z = x;
        }
        y = T(sqrtf(-2 * logf((u[0] + 1.0f) / 4294967808.0f)) * cospif(u[1] / 2147483648.0f));
        """,
        "normal",
    )


def _as_bits(array: Any) -> Any:
    """bfloat16 as integers of its size, which every version of CuPy copies."""
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


def _bfloat16() -> Any:
    try:
        from ml_dtypes import bfloat16
    except ImportError as error:
        raise cupyflash.SetupError("bfloat16 arrays of CuPy need ml_dtypes: pip install ml_dtypes") from error
    return bfloat16
