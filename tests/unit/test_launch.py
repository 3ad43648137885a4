"""What a call on a GPU gives the driver, and when, on stand-ins for the driver, for CuPy and for its arrays."""

from __future__ import annotations

import ctypes
import os
import random
import struct
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import LaunchError, ShapeError, StateError, UnsupportedError, api, arrays, cache, jit, launch, params, tensormap
from cupyflash.device import KNOWN
from cupyflash.problem import MAX_PARTS

FIELDS = [name for name, _ in params.FORWARD_FIELDS]
MERGE_FIELDS = [name for name, _ in params.MERGE_FIELDS]
APPEND_FIELDS = [name for name, _ in params.CACHE_FIELDS[len(FIELDS) :]]
HANDLES = {"cache_append": -1, "merge_states": -2}  # of kernels whose argument is more than the forward's, or another
MAP = tensormap.MAP_BYTES
F32 = np.float32


class Array:
    """cupy.ndarray of the device 0, in host memory."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, memory: Any = None, strides: Any = None) -> None:
        self.data = memory or alloc(16 * int(np.prod(shape)))
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.strides = strides or np.empty(shape, dtype).strides


def alloc(num_bytes: int) -> Any:
    memory = np.zeros(num_bytes + 16, np.uint8)
    return types.SimpleNamespace(ptr=-(-memory.ctypes.data // 16) * 16, device_id=0, memory=memory)


class DriverError(Exception):
    pass


class Gpu:
    """The functions of the driver and the runtime that are called; each launch is kept as what the driver would read then."""

    CUDADriverError = DriverError

    def __init__(self) -> None:
        self.launches: list[Any] = []
        self.stream, self.replaced, self.bound, self.fails = 7, 0, [], False
        self.here = threading.local()  # the context of a thread: 100 and the device's id

    def launchKernel(self, handle: int, x: int, y: int, z: int, *rest: int) -> None:  # noqa: N802
        if self.fails:
            raise DriverError("CUDA_ERROR_INVALID_VALUE")
        *_, stream, address, extra = rest
        first, second = struct.unpack("<2Q", ctypes.string_at(address, 16))
        packed = dict(zip(FIELDS, params.FORWARD.unpack(ctypes.string_at(first, params.FORWARD.size)), strict=True))
        if handle == HANDLES["merge_states"]:
            packed = dict(zip(MERGE_FIELDS, params.MERGE.unpack(ctypes.string_at(first, params.MERGE.size)), strict=True))
        if handle == HANDLES["cache_append"]:
            every = params.CACHE.unpack(ctypes.string_at(first, params.CACHE.size))[len(FIELDS) :]
            packed = dict(zip(APPEND_FIELDS, every, strict=True)) | {"forward": packed}
        maps = b"" if second == first else ctypes.string_at(second, 4 * MAP)
        assert second % 64 == extra == 0
        self.launches.append(types.SimpleNamespace(handle=handle, grid=(x, y, z), stream=stream, packed=packed, maps=maps))

    def ctxGetCurrent(self) -> int:  # noqa: N802
        return getattr(self.here, "context", 0)

    def ctxSetCurrent(self, context: int) -> None:  # noqa: N802
        self.here.context = context

    def getDevice(self) -> int:  # noqa: N802
        return max(self.ctxGetCurrent() - 100, 0)

    def setDevice(self, device_id: int) -> None:  # noqa: N802
        self.bound.append(device_id)
        self.here.context = 100 + device_id

    def get_current_stream(self, device_id: int) -> Any:
        return types.SimpleNamespace(ptr=self.stream)

    # Of libcuda. A map begins with the address; what it was encoded from follows.
    def cuTensorMapEncodeTiled(self, place: Any, *given: Any) -> int:  # noqa: N802
        if not self.ctxGetCurrent():
            return 201  # CUDA_ERROR_INVALID_CONTEXT
        shape, strides = (np.array(array[:], np.uint64).tobytes() for array in given[3:5])
        ctypes.memmove(place, (bytes(8) + shape + strides).ljust(MAP, b"."), MAP)
        return 0

    def cuTensorMapReplaceAddress(self, place: int, address: int) -> int:  # noqa: N802
        self.replaced += 1
        ctypes.c_uint64.from_address(place).value = address
        return 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    this = Gpu()
    cupy = types.ModuleType("cupy")
    cupy.ndarray, cupy.cuda = (
        Array,
        types.SimpleNamespace(  # type: ignore[attr-defined]
            driver=this, runtime=this, alloc=alloc, get_current_stream=this.get_current_stream
        ),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(arrays, "READERS", arrays._Readers())
    for module, name in ((api, "_prepare"), (api, "_prepare_merge"), (cache, "_prepare")):
        monkeypatch.setattr(module, name, arrays.cached_by_kinds(getattr(module, name).__wrapped__))
    for module in (api, cache):
        monkeypatch.setattr(module, "query", lambda device_id: KNOWN["90a"])
    monkeypatch.setattr(launch, "_cuda", lambda: (this, this))
    monkeypatch.setattr(launch, "_first_process", None)
    monkeypatch.setattr(tensormap, "_driver", lambda: this)
    monkeypatch.setattr(jit, "_kernels", {})
    monkeypatch.setattr(jit, "_load", lambda variant, *_: jit.Kernel(HANDLES.get(variant.family, len(variant.name)), None))
    launch.contexts.cache_clear()
    launch._parameters.cache_clear()
    return this


def make(seqlen: int = 96, heads: int = 2) -> list[Array]:
    return [Array((1, seqlen, heads, 64), np.float16) for _ in range(3)]


def maps_of(call: Any) -> list[tuple[int, tuple[int, ...]]]:
    """The address and the shape (D, S, H, B) in each map of a launch."""
    return [(words[0], words[1:5]) for words in struct.iter_unpack("<16Q", call.maps)]


# --- a call's parameters ---------------------------------------------------------------------------------------------------------------


def test_a_launch_has_the_addresses_of_its_call(gpu: Gpu) -> None:
    q, k, v = make()
    out = cupyflash.attention(q, k, v)
    lse = cupyflash.attention(q, k, v, return_lse=True).lse
    mask, target = Array((96, 96), np.bool_), Array((1, 96, 2, 64), np.float16)
    assert cupyflash.attention(q, k, v, mask=mask, out=target) is target
    plain, with_lse, with_mask = (call.packed for call in gpu.launches)
    for packed in (plain, with_lse, with_mask):
        assert [packed[name] for name in ("q", "k", "v")] == [x.data.ptr for x in (q, k, v)]
        assert [packed[name] for name in ("q_stride_seq", "seqlen_k", "num_heads_q")] == [128, 96, 2]
    assert [plain[name] for name in ("out", "lse", "mask", "bias")] == [out.data.ptr, 0, 0, 0]
    assert [with_lse[name] for name in ("lse", "mask", "lse")] == [lse.data.ptr, 0, lse.data.ptr]
    assert [with_mask[name] for name in ("out", "mask", "bias", "lse")] == [target.data.ptr, mask.data.ptr, 0, 0]
    assert [call.stream for call in gpu.launches] == [7, 7, 7]


def test_addresses_are_put_into_tensor_maps_once(gpu: Gpu) -> None:
    inputs, others, target = make(), make(), Array((1, 96, 2, 64), np.float16)
    for arguments in (inputs, others, inputs, others):
        cupyflash.attention(*arguments, out=target)
    assert gpu.replaced == 8
    for call, arguments in zip(gpu.launches, (inputs, others, inputs, others), strict=True):
        assert maps_of(call) == [(x.data.ptr, (64, 96, 2, 1)) for x in (*arguments, target)]


def test_an_address_that_comes_back_with_another_shape_has_a_map_of_its_own(gpu: Gpu) -> None:
    memory, target = [alloc(1 << 16) for _ in range(3)], alloc(1 << 16)
    for seqlen, heads in ((96, 2), (192, 1), (96, 2), (65, 3)):
        shape = (1, seqlen, heads, 64)
        cupyflash.attention(*(Array(shape, np.float16, m) for m in memory), out=Array(shape, np.float16, target))
        assert maps_of(gpu.launches[-1]) == [(m.ptr, (64, seqlen, heads, 1)) for m in (*memory, target)]
        assert [gpu.launches[-1].packed[name] for name in ("seqlen_q", "q_stride_seq")] == [seqlen, heads * 64]


def test_what_is_kept_of_addresses_is_bounded(gpu: Gpu) -> None:
    most = launch._parameters.cache_info().maxsize
    assert most is not None
    cupyflash.attention(*make())
    queue = launch.launcher(*launched(gpu))
    for address in range(most + 100):
        queue((address, 1, 2, 3))
    assert launch._parameters.cache_info().currsize == most
    queue((0, 1, 2, 3))  # one of those that went
    assert gpu.launches[-1].packed["q"] == 0


def packed_inputs(tokens: int = 100, sequences: int = 3) -> list[Array]:
    """q, k, v, and the offsets of each."""
    return [*(Array((tokens, 2, 64), np.float16) for _ in range(3)), *(Array((sequences + 1,), np.int32) for _ in range(2))]


def test_a_packed_call_has_its_offsets_and_a_list_of_tiles(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "is_capturing", lambda like: False)
    q, k, v, cu_q, cu_k = packed_inputs()
    used, target = Array((3,), np.int32), Array((100, 2, 64), np.float16)
    assert cupyflash.attention_varlen(q, k, v, cu_q, cu_k, seqused_k=used, out=target) is target
    out, lse, _ = cupyflash.attention_varlen(q, k, v, cu_q, return_lse=True, causal=True)
    first, second = gpu.launches[1].packed, gpu.launches[3].packed  # each behind the one that lists the tiles
    assert [call.packed for call in gpu.launches] == [first, first, second, second]
    for packed in (first, second):
        assert [packed[name] for name in ("q", "k", "v")] == [x.data.ptr for x in (q, k, v)]
        assert [packed[name] for name in ("batch", "seqlen_q", "seqlen_k", "q_stride_batch", "cu_seqlens_q_stride")] == [3, 100, 100, 0, 1]
        assert packed["row_tiles"] not in (0, first["lse"], first["out"], second["lse"], second["out"])
    assert [first[name] for name in ("cu_seqlens_q", "cu_seqlens_k")] == [cu_q.data.ptr, cu_k.data.ptr]
    assert [first[name] for name in ("seqused_q", "seqused_k", "out", "lse")] == [0, used.data.ptr, target.data.ptr, 0]
    assert [second[name] for name in ("cu_seqlens_q", "cu_seqlens_k")] == [cu_q.data.ptr] * 2
    assert [second[name] for name in ("seqused_k", "out", "lse")] == [0, out.data.ptr, lse.data.ptr]
    assert lse.shape == (2, 100)


def test_offsets_in_numpy_are_copied_to_the_device(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "is_capturing", lambda like: False)
    copies: list[Any] = []

    def to_device(vector: Any, like: Any, name: str) -> Any:
        copies.append((name, vector, there := Array(vector.shape, vector.dtype)))
        return arrays.read(there, name)

    monkeypatch.setattr(arrays, "to_device", to_device)
    q, k, v, *_ = packed_inputs()
    for offsets in ([np.zeros(4, np.int32)], [np.zeros(4, np.int32), np.ones(4, np.int32)]):
        cupyflash.attention_varlen(q, k, v, *offsets)
        assert [(name, vector) for name, vector, _ in copies] == [("cu_seqlens_q", offsets[0]), ("cu_seqlens_k", offsets[-1])]
        assert [gpu.launches[-1].packed[name] for name, *_ in copies] == [there.data.ptr for *_, there in copies]
        copies.clear()


def test_a_captured_call_keeps_its_workspace(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[Any] = []
    monkeypatch.setattr(arrays, "_captured", captured)
    monkeypatch.setattr(arrays, "is_capturing", lambda like: True)
    cupyflash.attention_varlen(*packed_inputs())
    cupyflash.attention(*make())  # has none
    (made,) = captured
    assert made.data.ptr == gpu.launches[1].packed["row_tiles"]


def test_no_sequence_has_no_lengths_and_no_slopes(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "is_capturing", lambda like: False)
    each = {"alibi_slopes": Array((0, 2), np.float32), "seqused_q": Array((0,), np.int32), "sink": Array((2,), np.float32)}
    cupyflash.attention_varlen(*packed_inputs(sequences=0), **each)
    packed = gpu.launches[-1].packed
    assert [packed[name] for name in ("alibi_slopes", "seqused_q", "sink", "batch")] == [0, 0, each["sink"].data.ptr, 0]


# --- caches ----------------------------------------------------------------------------------------------------------------------------


def over_cache(**options: Any) -> tuple[dict[str, Any], Any]:
    """A call of one token for each of two sequences, by the names of its arrays, and what it returned."""
    given = {name: Array((9, 16, 2, 64), np.float16) for name in ("k_cache", "v_cache")}
    given |= {"q": Array((2, 1, 4, 64), np.float16), "cache_seqlens": Array((2,), np.int32), "page_table": Array((2, 4), np.int32)}
    given |= options
    return given, cupyflash.attention_with_kvcache(
        *(given[name] for name in ("q", "k_cache", "v_cache")),
        **{name: x for name, x in given.items() if name not in ("q", "k_cache", "v_cache")},
    )


def test_attention_over_a_cache_reads_it_where_it_is(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "is_capturing", lambda like: False)
    given, out = over_cache(cache_leftpad=Array((2,), np.int32))
    begin, call = gpu.launches
    assert begin.packed == call.packed
    named = {"q": "q", "k": "k_cache", "v": "v_cache", "seqused_k": "cache_seqlens", "page_table": "page_table", "first_k": "cache_leftpad"}
    assert {field: call.packed[field] for field in named} == {field: given[name].data.ptr for field, name in named.items()}
    assert call.packed["out"] == out.data.ptr
    numbers = {"page_size": 16, "num_pages": 9, "seqlen_k": 64, "page_table_stride": 4, "k_stride_batch": 2048, "k_descale_of_all": 1}
    assert {name: call.packed[name] for name in numbers} == numbers
    assert out.shape == (2, 1, 4, 64)
    given, _ = over_cache(page_table=None, cache_batch_idx=Array((2,), np.int32))
    packed = gpu.launches[-1].packed
    numbers = {"page_table": given["cache_batch_idx"].data.ptr, "page_table_stride": 1, "page_size": 16, "seqlen_k": 16, "first_k": 0}
    assert {name: packed[name] for name in numbers} == numbers


def test_what_is_appended_is_there_before_the_attention(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launches share one argument; the second reads from the workspaces that the first fills."""
    captured: list[Any] = []
    monkeypatch.setattr(arrays, "_captured", captured)
    monkeypatch.setattr(arrays, "is_capturing", lambda like: True)
    options: dict[str, Any] = {name: Array((2, 1, 2, 64), np.float16) for name in ("k_new", "v_new")}
    options |= {
        "cache_leftpad": Array((2,), np.int32),
        "rotary_cos": Array((99, 16), np.float32),
        "rotary_sin": Array((99, 16), np.float32),
    }
    caches: dict[str, Any] = {name: Array((9, 16, 2, 64), np.int8) for name in ("k_cache", "v_cache")}
    given, _ = over_cache(**options, **caches, k_descale=0.25, v_descale=Array((2, 2), np.float32))
    append, _, attention = gpu.launches
    assert append.packed["forward"] == attention.packed
    ((made,),) = captured
    places = [append.packed[name] - made.data.ptr for name in ("rotated_q", "used_k", "first_k")]
    assert places == [0, 1024, 1280]  # of 2 x 4 x 64 halves, 2 ints and 2 ints
    places = [attention.packed[name] - made.data.ptr for name in ("q", "seqused_k", "first_k", "part_out", "part_lse", "arrived")]
    assert places[:4] == [0, 1024, 1280, 1536]
    assert 1536 < places[4] < places[5] < made.shape[0]
    names = ("q", "k_new", "v_new", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_leftpad", "k_cache", "v_cache")
    assert [append.packed[name] for name in names] == [given[name].data.ptr for name in names]
    numbers = {
        "seqlen_new": 1,
        "rotary_dim": 32,
        "rotary_length": 99,
        "rotary_interleaved": 0,
        "rotary_cos_stride": 16,
        "q_stride_head": 64,
    }
    assert {name: append.packed[name] for name in numbers} == numbers
    numbers = {"k_descale": 0, "k_descale_of_all": 0.25, "v_descale": given["v_descale"].data.ptr, "v_descale_stride_batch": 2}
    assert {name: attention.packed[name] for name in numbers} == numbers


def test_calls_over_caches_of_a_kind_are_prepared_once(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "is_capturing", lambda like: False)
    new = {name: Array((2, 1, 2, 64), np.float16) for name in ("k_new", "v_new")}
    for _ in range(3):
        over_cache(**new)
    assert cache._prepare.cache_info().misses == 1
    shared = Array((9, 16, 2, 64), np.float16)
    with pytest.raises(ShapeError, match="k_cache overlaps v_cache in memory"):  # although one of its kind was in order
        over_cache(**new, k_cache=shared, v_cache=shared)
    assert len(gpu.launches) == 9


def test_vectors_in_host_memory_are_copied_beside_a_cache(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: dict[str, Any] = {}

    def to_device(vector: Any, like: Any, name: str) -> Any:
        copies[name] = Array(vector.shape, vector.dtype)
        return arrays.read(copies[name], name)

    monkeypatch.setattr(arrays, "to_device", to_device)
    monkeypatch.setattr(arrays, "is_capturing", lambda like: False)
    over_cache(cache_seqlens=np.ones(2, np.int32), page_table=np.zeros((2, 8), np.int32)[:, ::2])
    packed = gpu.launches[-1].packed
    assert (packed["seqused_k"], packed["page_table"]) == tuple(copies[name].data.ptr for name in ("cache_seqlens", "page_table"))
    assert packed["page_table_stride"] == 4
    q, pages = Array((3, 4, 64), np.float16), Array((9, 16, 2, 64), np.float16)
    vectors = {"page_table": np.zeros((2, 4), np.int32), "cu_seqlens_k": np.zeros(3, np.int32)}
    cupyflash.attention_varlen(q, pages, Array(pages.shape, np.float16), np.array([0, 1, 3], np.int32), **vectors)
    append, _, attention = gpu.launches[-3:]
    assert append.packed["forward"] == attention.packed
    assert append.packed["cache_seqlens"] == 0
    assert attention.packed["seqused_k"] == append.packed["used_k"] != 0
    assert [attention.packed[name] for name in ("cu_seqlens_q", "cu_seqlens_k")] == [
        copies[n].data.ptr for n in ("cu_seqlens_q", "cu_seqlens_k")
    ]


def test_tensor_maps_of_a_chunk_are_of_what_is_appended_and_turned(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "is_capturing", lambda like: False)
    caches = {name: Array((2, 160, 2, 64), np.float16) for name in ("k_cache", "v_cache")}
    tokens = {name: Array((2, 70, heads, 64), np.float16) for name, heads in (("q", 4), ("k_new", 2), ("v_new", 2))}
    tables = {name: Array((999, 16), np.float32) for name in ("rotary_cos", "rotary_sin")}
    _, out = over_cache(**caches, **tokens, **tables, page_table=None)
    append, attention = gpu.launches
    assert append.packed["forward"] == attention.packed
    assert attention.packed["q"] == append.packed["rotated_q"] != tokens["q"].data.ptr
    rows = [(append.packed["rotated_q"], (64, 70, 4, 2)), *((x.data.ptr, (64, 160, 2, 2)) for x in caches.values())]
    assert maps_of(attention) == [*rows, (out.data.ptr, (64, 70, 4, 2))]


# --- merging ---------------------------------------------------------------------------------------------------------------------------


def test_parts_are_merged_where_they_are(gpu: Gpu) -> None:
    """One launch, prepared once for parts of a kind, and an address and strides for each part."""
    for parts in (2, 2, MAX_PARTS):
        outs, lses = ([Array(shape, dtype) for _ in range(parts)] for shape, dtype in (((2, 9, 4, 64), np.float16), ((2, 4, 9), F32)))
        outs[1].strides = outs[1].strides[0], 128, 9 * 128, 2  # (B, H, S, Dv) in memory
        out, lse = cupyflash.merge_states(outs, lses)
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((2, 9, 4, 64), np.float16, (2, 4, 9), F32)
        packed = gpu.launches[-1].packed
        addresses = [packed["out"], packed["lse"], *[packed[f"outs[{n}]"] for n in range(MAX_PARTS)]]
        addresses += [packed[f"lses[{n}]"] for n in range(MAX_PARTS)]
        absent = [0] * (MAX_PARTS - parts)
        assert addresses == [out.data.ptr, lse.data.ptr, *[x.data.ptr for x in outs], *absent, *[x.data.ptr for x in lses], *absent]
        numbers = {"parts": parts, "batch": 2, "seqlen": 9, "num_heads": 4, "head_dim_v": 64, "chunks": 8}
        numbers |= {"out_stride_seq": 256, "outs_stride_seq[0]": 256, "outs_stride_seq[1]": 64, "outs_stride_head[1]": 576}
        numbers |= {"lses_stride_head[1]": 9, "outs_stride_dim[1]": 1, "lse_stride_batch": 36}
        assert {name: packed[name] for name in numbers} == numbers
        assert gpu.launches[-1].grid == (-(-2 * 9 * 4 * 8 // 128), 1, 1)
    assert api._prepare_merge.cache_info().misses == len(gpu.launches) - 1 == 2


def test_a_merge_that_fails_launches_nothing(gpu: Gpu) -> None:
    out, lse = Array((1, 3, 4, 8), np.float16), Array((1, 4, 3), F32)
    with pytest.raises(UnsupportedError, match=r"outs holds 33 arrays: 32 are merged at once in GPU memory.*groups of up to 32"):
        cupyflash.merge_states([out] * 33, [lse] * 33)
    with pytest.raises(ShapeError, match=r"lse_out overlaps lses\[0\]"):
        cupyflash.merge_states([out], [lse], lse_out=lse)
    assert cupyflash.merge_states([Array((1, 0, 4, 8), np.float16)], [Array((1, 4, 0), F32)])[1].shape == (1, 4, 0)
    assert not gpu.launches


def launched(gpu: Gpu) -> Any:
    """What a launcher of fwd_sm80, which has no maps, is made of."""
    problem = api.dense(api.Operands(*(arrays.describe(arrays.read(x, "x")[1], "x") for x in make())))[0]
    schedule = api.plan.forward(problem, KNOWN["80"])
    packing = launch.Packing(f"4Q{params.POINTERS.size - 32}x", (bytes(params.FORWARD.size - params.POINTERS.size),), params.FORWARD.size)
    return schedule, packing, KNOWN["80"], 0, lambda: 9


def test_threads_have_parameters_of_their_own(gpu: Gpu) -> None:
    """Calls of one kind and of two, in turn, with few addresses that recur and with ever new ones."""
    inputs = [make(seqlen) for seqlen in (96, 128) for _ in range(4)]
    expected: dict[int, Any] = {x[0].data.ptr: (x[0].shape[1], [y.data.ptr for y in x]) for x in inputs}
    errors: list[Any] = []

    def calls(seed: int) -> None:
        try:
            turns = random.Random(seed)
            for _ in range(300):
                cupyflash.attention(*turns.choice(inputs))
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=calls, args=(seed,)) for seed in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors
    assert len(gpu.launches) == 2400
    for call in gpu.launches:
        seqlen, pointers = expected[call.packed["q"]]
        assert [call.packed[name] for name in ("q", "k", "v", "seqlen_k")] == [*pointers, seqlen]
        assert maps_of(call) == [(ptr, (64, seqlen, 2, 1)) for ptr in (*pointers, call.packed["out"])]


def test_a_refused_launch_names_the_kernel(gpu: Gpu) -> None:
    gpu.fails = True
    with pytest.raises(LaunchError, match=r"the driver refused fwd_sm90__.* on a grid of \(\d+, 1, 1\): CUDA_ERROR_INVALID_VALUE"):
        cupyflash.attention(*make())
    gpu.fails = False
    cupyflash.attention(*make())
    assert len(gpu.launches) == 1


def test_a_kernel_that_could_not_be_loaded_is_loaded_by_the_next_call(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def capturing(*_: Any) -> Any:
        raise StateError("in a capture")

    inputs = make()
    with monkeypatch.context() as patch:
        patch.setattr(jit, "_load", capturing)
        with pytest.raises(StateError):
            cupyflash.attention(*inputs)
    cupyflash.attention(*inputs)
    monkeypatch.setattr(jit, "load", capturing)  # and never asked for again
    cupyflash.attention(*inputs)
    assert len(gpu.launches) == 2


# --- where it runs -----------------------------------------------------------------------------------------------------------------------


def test_a_thread_without_a_context_gets_one_once(gpu: Gpu) -> None:
    inputs = make()
    for _ in range(3):
        cupyflash.attention(*inputs)
    assert (gpu.bound, gpu.ctxGetCurrent()) == ([0], 100)
    thread = threading.Thread(target=cupyflash.attention, args=inputs)
    thread.start()
    thread.join()
    assert gpu.bound == [0, 0]
    assert len(gpu.launches) == 4


def test_a_first_call_in_a_thread_without_a_context(gpu: Gpu) -> None:
    """The driver encodes no tensor map there."""
    failures: list[Exception] = []

    def call() -> None:
        try:
            cupyflash.attention(*make())
        except Exception as e:
            failures.append(e)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert failures == []
    assert len(gpu.launches) == 1


def test_another_current_device_is_left_as_it_was(gpu: Gpu) -> None:
    gpu.here.context = 103
    for _ in range(2):
        cupyflash.attention(*make())
    assert (gpu.bound, gpu.ctxGetCurrent()) == ([0, 0, 0], 103)  # the first call encodes maps besides
    gpu.here.context = 55  # of somebody else, and of device 0
    cupyflash.attention(*make())
    cupyflash.attention(*make())
    assert (gpu.bound, gpu.ctxGetCurrent()) == ([0, 0, 0], 55)
    gpu.fails = True
    gpu.here.context = 103
    with pytest.raises(LaunchError):
        cupyflash.attention(*make())
    assert gpu.ctxGetCurrent() == 103


# --- forked processes --------------------------------------------------------------------------------------------------------------------

FORK = """
import os
import numpy as np
import cupyflash
from cupyflash import StateError, api, backward, launch

x = np.ones((1, 4, 1, 8), np.float32)
out, lse, _ = cupyflash.attention(x, x, x, return_lse=True)
cupyflash.attention_backward(out, x, x, x, out, lse)
launch.check_process()
caches = api._prepare, backward._prepare
assert all(cached.cache_info().currsize for cached in caches)
if pid := os.fork():
    assert os.waitpid(pid, 0)[1] == 0
    assert all(cached.cache_info().currsize for cached in caches)
    launch.check_process()
    print("done")
else:
    try:
        assert not any(cached.cache_info().currsize for cached in caches)  # the next call on a GPU is prepared anew, and asks:
        try:
            launch.check_process()
        except StateError as e:
            assert "fork" in str(e)
        else:
            raise AssertionError
        cupyflash.attention(x, x, x)  # in host memory nothing is lost
        os._exit(0)
    finally:
        os._exit(1)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_kf_099_a_forked_process_prepares_its_calls_anew() -> None:
    root = Path(cupyflash.__file__).parents[1]
    run = subprocess.run((sys.executable, "-c", FORK), cwd=root, capture_output=True, text=True, timeout=60)
    assert (run.stdout, run.stderr) == ("done\n", "")


def test_a_call_is_refused_where_the_process_is(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_first_process", os.getpid() + 1)
    for _ in range(2):
        with pytest.raises(StateError, match="forked"):
            cupyflash.attention(*make())
    with pytest.raises(cupyflash.ShapeError):  # a wrong call is a wrong one first
        cupyflash.attention(*make()[:2], Array((1, 63, 2, 64), np.float16))
    assert not gpu.launches
