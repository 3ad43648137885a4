"""Every pair of options of `cupyflash.attention_with_kvcache` on NumPy arrays, and of `attention_varlen` with pages, against float64.

A plain loop gathers the keys of each sequence out of what the call left in the cache, rotation is by complex numbers, and the reference
computes each sequence alone. All memory starts as NaN: slots nobody owns, pages nobody has, what lies around the cache, and the result.
The call may write the slots of its new tokens; every other byte of every array must stay.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from judge import judge, standard_attention
from test_pairs import stored
from test_varlen import pairs_and_more, stored_tokens

import cupyflash
from cupyflash import reference

# Slots of each sequence in use before the call; the room of 31 is prime, so no page but of 1 and 31 slots ends there.
ROOM = 31
LENGTHS = {"one": (17,), "mixed": (9, 0, 31, 4), "past the end": (31, 28, 40, 3), "empty": (0, 0), "uneven": (1, 30, 2), "none": ()}
ROWS = {1: (1, 1, 1, 1), 3: (3, 3, 3, 3), 0: (0, 0, 0, 0), "ragged": (1, 0, 5, 2), "chunks": (9, 1, 2, 7)}
E4M3 = ml_dtypes.float8_e4m3fn
OPTIONS = {
    "dtype": ("float16", "bfloat16", "float32", "float64"),
    "cache": ("own", "float8_e4m3fn", "int8"),
    "descale": (None, "scalar", "0", "h", "bh"),
    "lengths": tuple(LENGTHS),
    "rows": tuple(ROWS),
    "new": (None, "as q", 2),  # tokens to append
    "pages": (None, 1, 4, 16, 31, 64),
    "batch_idx": (False, True),
    "leftpad": (None, (0, 2, 9, 40)),
    "rotary": (None, "halves", "pairs"),
    "rotary_dim": ("all", "half", 2),
    "rotary_dtype": ("float32", "own"),
    "positions": (None, (5, 0, 60, 2)),
    "heads": ((1, 1), (3, 3), (4, 2), (6, 1)),
    "dims": ((8, 8), (64, 64), (6, 3), (34, 40)),
    "causal": (True, False, "top_left"),
    "window_size": (None, (3, 0), (0, 2), (None, 4), (30, -1)),
    "softmax_scale": (None, 0.3),
    "softcap": (None, 2.5),
    "alibi_slopes": (None, "h", "bh"),
    "mask": (None, "bhqk", "qk", "b11k"),
    "sink": (None, "float32", "own"),
    "kv_layout": ("nhd", "hnd"),
    "splits": ({}, {"num_splits": 1}, {"num_splits": 5}, {"split_size": 64}),
    "plan": (False, True),
    "storage": ("apart", "one array", "transposed", "offset"),
    "out": (None, "contiguous", "strided"),
    "return_lse": (False, True),
}
PAIRS, CASES = pairs_and_more(OPTIONS, 0, 120)


def build(case, rng):
    """All that a call takes, by name; and of each sequence its rows, its slots, and its options alone."""
    dtype, (Hq, Hkv), (D, Dv) = np.dtype(case["dtype"]), case["heads"], case["dims"]
    held = LENGTHS[case["lengths"]]
    B = len(held)
    rows = ROWS[case["rows"]][:B]
    packed = isinstance(case["rows"], str)
    new = rows if case["new"] == "as q" or (packed and case["new"]) else (case["new"] or 0,) * B
    cache_dtype = dtype if case["cache"] == "own" else np.dtype(E4M3) if case["cache"] != "int8" else np.dtype(np.int8)

    def normal(*shape, dtype=dtype):
        return rng.standard_normal(shape).astype(dtype)

    size = case["pages"]
    max_pages = -(-ROOM // size) if size else 1
    slots = max_pages * size if size else ROOM
    num_pages = B * max_pages + 3 if size or case["batch_idx"] else B
    table = rng.permutation(num_pages)[: B * max_pages].reshape(B, max_pages).astype(np.int32)
    if not (size or case["batch_idx"]):
        table = np.arange(B, dtype=np.int32)[:, None]
    given = SimpleNamespace(slots=slots, table=table, size=size or ROOM, num_pages=num_pages)

    total = sum(rows)
    q = normal(total, Hq, D) if packed else normal(B, rows[0] if B else 2, Hq, D)
    options = {name: case[name] for name in ("causal", "window_size", "softmax_scale", "softcap")}
    call = dict(options)
    call["cache_seqlens"] = np.array(held, np.int32)
    if case["new"]:
        shape = (total,) if packed else (B, new[0] if B else 2)
        call |= {"k_new": normal(*shape, Hkv, D), "v_new": normal(*shape, Hkv, Dv)}
    if packed:
        call["cu_seqlens_q"] = np.cumsum([0, *rows]).astype(np.int32)
    if size:
        call["page_table"] = table.copy()
        for b, n in enumerate(held):  # what lies past the length is not read
            used = min(min(n, slots) + new[b], slots)
            call["page_table"][b, -(-used // size) :] = rng.choice([-1, 2**31 - 1, num_pages])
    elif case["batch_idx"]:
        call["cache_batch_idx"] = table[:, 0].copy()
    pad = np.array((case["leftpad"] or (0, 0, 0, 0))[:B], np.int32)
    if case["leftpad"]:
        call["cache_leftpad"] = pad
    descale = {}
    if cache_dtype != dtype and case["descale"]:
        shape = {"scalar": (), "0": (), "h": (Hkv,), "bh": (B, Hkv)}[case["descale"]]
        for name in ("k_descale", "v_descale"):
            scale = rng.uniform(0.01, 0.05, shape).astype(np.float32)
            call[name] = float(scale) if case["descale"] == "scalar" else scale if np.ndim(scale) else np.array(scale)
            descale[name] = np.broadcast_to(np.float32(scale), (B, Hkv)).astype(np.float64)
    for name in ("k_descale", "v_descale"):
        descale.setdefault(name, np.ones((B, Hkv)))
    if case["rotary"]:
        half = {"all": D // 2, "half": max(D // 4, 1), 2: 1}[case["rotary_dim"]]
        angle = np.arange(80)[:, None] * 0.7 ** np.arange(1, half + 1)
        table_dtype = dtype if case["rotary_dtype"] == "own" else np.float32
        call |= {"rotary_cos": np.cos(angle).astype(table_dtype), "rotary_sin": np.sin(angle).astype(table_dtype)}
        call["rotary_interleaved"] = case["rotary"] == "pairs"
        if case["positions"]:
            call["rotary_positions"] = np.array(case["positions"][:B], np.int32)
    if case["alibi_slopes"]:
        call["alibi_slopes"] = rng.uniform(0.01, 0.5, (B, Hq) if case["alibi_slopes"] == "bh" else (Hq,)).astype(np.float32)
    if case["sink"]:
        call["sink"] = normal(Hq, dtype=dtype if case["sink"] == "own" else np.float32)
    if case["mask"] and not packed:
        axes = {"b": B, "h": Hq, "q": q.shape[1], "k": slots, "1": 1}
        call["mask"] = rng.random([axes[axis] for axis in case["mask"]]) < 0.7
    call |= case["splits"]
    if case["kv_layout"] == "hnd":
        call["kv_layout"] = "hnd"
    if case["plan"] and B:  # of the host; where a test is run on a GPU, `cupyflash.plan_decode` is one that plans for that
        made = {"batch": B, "num_heads_q": Hq, "num_heads_kv": Hkv, "head_dim": D, "max_seqlen_k": ROOM, "page_size": size}
        call["plan"] = cupyflash.plan_decode(**made, dtype=dtype, device="host")

    given.sequences = []
    for b in range(B):
        n = min(held[b], slots)
        used = min(n + new[b], slots)
        first = call["rotary_positions"][b] if "rotary_positions" in call else n + new[b] - rows[b]
        alone = dict(options)
        if case["alibi_slopes"]:
            alone["alibi_slopes"] = call["alibi_slopes"][b] if case["alibi_slopes"] == "bh" else call["alibi_slopes"]
        if case["sink"]:
            alone["sink"] = call["sink"]
        begin = min(pad[b], n)
        if "mask" in call:
            mask = np.broadcast_to(call["mask"], (B, Hq, q.shape[1], slots))[b : b + 1]
            alone["mask"] = mask[0, :, :, begin:used][None]
        start = sum(rows[:b])
        where = slice(start, start + rows[b]) if packed else b
        more = {
            "where": where,
            "held": n,
            "new": new[b],
            "used": used,
            "begin": begin,
            "position": first,
            "rows": rows[b],
            "options": alone,
        }
        given.sequences.append(SimpleNamespace(b=b, descale={name: scale[b] for name, scale in descale.items()}, **more))
    given.dtype, given.cache_dtype, given.packed, given.q, given.call = dtype, cache_dtype, packed, q, call
    return given


def memory(given, dims, storage, layout, rng):
    """k_cache, v_cache and all the memory that they lie in; filled with NaN (int8: 99) where no sequence has a key."""
    (D, Dv), Hkv = dims, given.heads_kv
    fill = 99 if given.cache_dtype == np.int8 else np.nan
    caches = []
    for dim in (D, Dv):
        x = np.full((given.num_pages, given.size, Hkv, dim), fill, given.cache_dtype)
        for s in given.sequences:
            for j in range(s.begin, s.held):
                x[given.table[s.b, j // given.size], j % given.size] = key(rng, (Hkv, dim), given)
        caches.append(x)
    if storage == "one array" and Dv == D:  # K beside V, page by page
        whole = np.stack(caches, axis=1)
        views = [whole[:, 0], whole[:, 1]]
    else:
        with np.errstate(invalid="ignore"):  # int8 has no NaN
            views = [stored(x, {"one array": "contiguous", "apart": "contiguous"}.get(storage, storage), "bshd") for x in caches]
    if layout == "hnd":
        views = [x.swapaxes(1, 2) for x in views]
        if storage == "apart":
            views = [np.ascontiguousarray(x) for x in views]
    return views, [base(x) for x in views]


def key(rng, shape, given):
    """Numbers as a cache holds them. Without a scale they are small: float32 scores of hundreds are wrong by more than any bound."""
    scaled = "k_descale" in given.call
    if given.cache_dtype == np.int8:
        return rng.integers(*((-100, 100) if scaled else (-2, 3)), shape)
    return rng.standard_normal(shape) * (30 if given.cache_dtype == E4M3 and scaled else 1)


def base(x):
    while isinstance(x.base, np.ndarray):
        x = x.base
    return x


def rotated(x, cos, sin, positions, interleaved):
    """x (tokens, heads, D) in float64, by complex numbers."""
    half = cos.shape[1]
    turn = (cos.astype(float) + 1j * sin.astype(float))[np.clip(positions, 0, len(cos) - 1)][:, None]
    x = x.astype(np.float64)
    pair = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    z = (x[..., pair[0]] + 1j * x[..., pair[1]]) * turn
    x[..., pair[0]], x[..., pair[1]] = z.real, z.imag
    return x


def turned(given, x, first):
    c = given.call
    if "rotary_cos" not in c:
        return x.astype(np.float64)
    return rotated(x, c["rotary_cos"], c["rotary_sin"], np.arange(first, first + len(x)), c["rotary_interleaved"])


def attended(rows, dtype):
    """Turned queries as the attention takes them. The host path turns a tile at a time, and rounds nothing in between; a GPU leaves them in
    a workspace of q's dtype, and its tests put that in the place of this function."""
    return rows


def gather(given, view, s, first, last):
    """Slots first to last of a sequence as the cache holds them, (slots, Hkv, dim)."""
    page = view.swapaxes(1, 2) if given.call.get("kv_layout") == "hnd" else view
    rows = [page[given.table[s.b, j // given.size], j % given.size] for j in range(first, last)]
    return np.array(rows).reshape(last - first, page.shape[2], page.shape[3])


def spacing(x, dtype):
    """The distance from |x| to the next number of the dtype, at least its smallest."""
    if dtype == np.int8:
        return np.ones_like(x)
    info = ml_dtypes.finfo(dtype)
    return np.maximum(2.0 ** np.floor(np.log2(np.maximum(np.abs(x), 1e-300))) * float(info.eps), float(info.smallest_subnormal))


@pytest.mark.parametrize("case", CASES)
def test_pair(case, rng):
    given = build(case, rng)
    given.heads_kv = case["heads"][1]
    (k_cache, v_cache), bases = memory(given, case["dims"], case["storage"], case["kv_layout"], rng)
    call, q, dtype = given.call, given.q, given.dtype
    shape = (*q.shape[:-1], case["dims"][1])
    q = stored_tokens(q, "offset") if given.packed else stored(q, "offset", "bshd")
    arrays = [q, *(x for x in call.values() if isinstance(x, np.ndarray))]
    before = [x.tobytes() for x in arrays]
    old = [x.copy() for x in bases]
    out = None
    if case["out"]:
        room = 3 if case["out"] == "strided" else 0
        out = np.full((*shape[:-1], shape[-1] + room), np.nan, dtype)[..., : shape[-1]]

    result = cupyflash.attention_with_kvcache(q, k_cache, v_cache, out=out, return_lse=case["return_lse"], **call)

    lse = None
    if case["return_lse"]:
        assert result.max_logits is None
        result, lse = result.out, result.lse
    assert type(result) is np.ndarray
    assert (result.dtype, result.shape) == (dtype, shape)
    assert out is None or result is out
    assert [x.tobytes() for x in arrays] == before

    expected, standard = np.zeros(shape), np.zeros(shape)
    lse_shape = (shape[1], shape[0]) if given.packed else (shape[0], shape[2], shape[1])
    expected_lse, standard_lse = np.full(lse_shape, -np.inf), np.full(lse_shape, -np.inf)
    for s in given.sequences:
        check_appended(given, s, k_cache, v_cache)
        k, v = (
            gather(given, view, s, s.begin, s.used).astype(np.float64) * s.descale[name][:, None]
            for name, view in (("k_descale", k_cache), ("v_descale", v_cache))
        )
        rows = attended(turned(given, q[s.where], s.position), dtype)
        expected[s.where], one_lse = reference.attention(rows, k, v, return_lse=True, **s.options)
        standard[s.where], plain_lse = standard_attention(rows, k, v, dtype=dtype, **s.options)
        where = (slice(None), s.where) if given.packed else s.where
        expected_lse[where], standard_lse[where] = one_lse, plain_lse
    judge(result, expected, standard, dtype=dtype, name="attention_with_kvcache")
    if lse is not None:
        assert lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
        judge(lse, expected_lse, standard_lse, dtype=dtype, name="attention_with_kvcache", kind="lse")
    if case["out"] == "strided" and result.size:
        assert np.isnan(result.base[..., -3:].astype(np.float32)).all()
    for s in given.sequences:  # put back what was appended: then nothing else may differ
        for view in (k_cache, v_cache):
            page = view.swapaxes(1, 2) if case["kv_layout"] == "hnd" else view
            for j in range(s.held, s.used):
                page[given.table[s.b, j // given.size], j % given.size] = 99 if given.cache_dtype == np.int8 else np.nan
    assert [x.tobytes() for x in bases] == [x.tobytes() for x in old]


def check_appended(given, s, k_cache, v_cache):
    """The new tokens of a sequence lie in its slots: the nearest numbers of the cache's dtype, one off where a rotation was rounded."""
    if "k_new" not in given.call:
        return
    written = s.used - s.held
    for name, view in (("k", k_cache), ("v", v_cache)):
        x = given.call[f"{name}_new"][s.where]
        exact = turned(given, x, s.position + s.rows - s.new) if name == "k" else x.astype(np.float64)
        exact = (exact / s.descale[f"{name}_descale"][:, None])[:written]
        top = {"int8": 127, "float8_e4m3fn": 448}.get(given.cache_dtype.name, np.inf)
        exact = np.clip(exact, -top - (top == 127), top)
        got = gather(given, view, s, s.held, s.used).astype(np.float64)
        arithmetic = 4e-7 * np.abs(exact).max(axis=-1, keepdims=True, initial=0)  # float32's
        assert (np.abs(got - exact) <= 0.5000001 * spacing(exact, given.cache_dtype) + arithmetic).all()


# `attention_varlen` with pages: rows and keys of each sequence, the keys as offsets, as used lengths, or as both.
KEYS = {"one": (17,), "mixed": (9, 0, 64, 4), "empty": (0, 0), "uneven": (1, 300, 2), "none": ()}
PAGED = {
    "dtype": ("float16", "bfloat16", "float32", "float64"),
    "keys": tuple(KEYS),
    "rows": ((1, 0, 5, 2), (9, 1, 2, 7), (1, 1, 1, 1)),
    "given": ("seqused_k", "cu_seqlens_k", "both", "too long"),
    "seqused_q": (None, (0.6, 1.0), (9.0, 0.0)),
    "page_size": (1, 7, 64),
    "heads": ((1, 1), (4, 2), (6, 1)),
    "dims": ((8, 8), (64, 64), (5, 3)),
    "causal": (True, False, "top_left"),
    "window_size": (None, (3, 0), (17, 5)),
    "softcap": (None, 2.5),
    "alibi_slopes": (None, "h", "bh"),
    "sink": (None, "float32", "own"),
    "transposed": (False, True),
    "max_seqlen": (None, 0, 1000),
    "out_dtype": (None, "float32"),
    "return_lse": (False, True),
}
PAGED_PAIRS, PAGED_CASES = pairs_and_more(PAGED, 1, 60)


@pytest.mark.parametrize("case", PAGED_CASES)
def test_pair_of_packed_queries_over_pages(case, rng):
    dtype, (Hq, Hkv), (D, Dv), size = np.dtype(case["dtype"]), case["heads"], case["dims"], case["page_size"]
    keys = KEYS[case["keys"]]
    B = len(keys)
    rows = case["rows"][:B]
    max_pages = -(-max(keys, default=0) // size) + 1
    slots = max_pages * size
    num_pages = B * max_pages + 2
    table = rng.permutation(num_pages)[: B * max_pages].reshape(B, max_pages).astype(np.int32)
    pages = [np.full((num_pages, Hkv, size, dim) if case["transposed"] else (num_pages, size, Hkv, dim), np.nan, dtype) for dim in (D, Dv)]
    pages = [x.swapaxes(1, 2) if case["transposed"] else x for x in pages]
    q = rng.standard_normal((sum(rows), Hq, D)).astype(dtype)
    shape = (len(q), Hq, Dv)
    options = {name: case[name] for name in ("causal", "window_size", "softcap")}
    call = dict(options) | {"max_seqlen_q": case["max_seqlen"], "max_seqlen_k": case["max_seqlen"], "out_dtype": case["out_dtype"]}
    if case["alibi_slopes"]:
        call["alibi_slopes"] = rng.uniform(0.01, 0.5, (B, Hq) if case["alibi_slopes"] == "bh" else (Hq,)).astype(np.float32)
    if case["sink"]:
        call["sink"] = rng.standard_normal(Hq).astype(dtype if case["sink"] == "own" else np.float32)
    if case["seqused_q"]:
        call["seqused_q"] = np.array([int(part * n) for part, n in zip(itertools.cycle(case["seqused_q"]), rows, strict=False)], np.int32)
    used = list(keys)
    if case["given"] == "seqused_k":
        call["seqused_k"] = np.array(keys, np.int32)
    elif case["given"] == "too long":
        used = [slots] * B
        call["seqused_k"] = np.full(B, 2**31 - 1, np.int32)
    else:
        call["cu_seqlens_k"] = np.cumsum([5, *keys]).astype(np.int32)
        if case["given"] == "both":
            used = [n // 2 for n in keys]
            call["seqused_k"] = np.array(used, np.int32)
    cu_seqlens_q = np.cumsum([0, *rows]).astype(np.int32)
    expected, standard = np.zeros(shape), np.zeros(shape)
    expected_lse, standard_lse = np.full((Hq, len(q)), -np.inf), np.full((Hq, len(q)), -np.inf)
    for b, n in enumerate(used):
        for j in range(n):
            for x in pages:
                x[table[b, j // size], j % size] = rng.standard_normal(x.shape[2:])
        k, v = ([x[table[b, j // size], j % size] for j in range(n)] for x in pages)
        k, v = np.array(k, dtype).reshape(n, Hkv, D), np.array(v, dtype).reshape(n, Hkv, Dv)
        table[b, -(-n // size) :] = -7
        alone = dict(options) | {name: call[name] for name in ("sink",) if name in call}
        if case["alibi_slopes"]:
            alone["alibi_slopes"] = call["alibi_slopes"][b] if case["alibi_slopes"] == "bh" else call["alibi_slopes"]
        where = slice(cu_seqlens_q[b], cu_seqlens_q[b + 1])
        if case["seqused_q"]:
            alone["seqused_q"] = call["seqused_q"][b : b + 1]
        expected[where], expected_lse[:, where] = reference.attention(q[where], k, v, return_lse=True, **alone)
        standard[where], standard_lse[:, where] = standard_attention(q[where], k, v, dtype=dtype, **alone)
    before = [x.tobytes() for x in (*pages, table)]

    result = cupyflash.attention_varlen(q, *pages, cu_seqlens_q, page_table=table, return_lse=case["return_lse"], **call)

    lse = None
    if case["return_lse"]:
        result, lse = result.out, result.lse
    out_dtype = np.dtype(case["out_dtype"] or dtype)
    assert (result.dtype, result.shape) == (out_dtype, shape)
    judge(result, expected, standard, dtype=out_dtype if out_dtype.itemsize < dtype.itemsize else dtype, name="attention_varlen, pages")
    if lse is not None:
        judge(lse, expected_lse, standard_lse, dtype=dtype, name="attention_varlen, pages", kind="lse")
    assert [x.tobytes() for x in (*pages, table)] == before


@pytest.mark.parametrize(("options", "pairs"), [(OPTIONS, PAIRS), (PAGED, PAGED_PAIRS)], ids=["kvcache", "varlen"])
def test_the_covering_array_has_every_pair(options, pairs):
    for one, other in itertools.combinations(options, 2):
        values = (tuple(map(str, options[name])) for name in (one, other))
        assert set(itertools.product(*values)) == {(str(case[one]), str(case[other])) for case in pairs}, (one, other)
