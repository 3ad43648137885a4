"""A server of many requests over one paged cache: continuous batching, chunked prompts, shared prefixes, eviction, preemption.

    python -m bench.examples.paged_server               # in a checkout
    python -m cupyflash.bench.examples.paged_server     # installed
        --requests N    how many, 1000 by default; --pages N how many pages the cache has; --seed N what is asked
        --device gpu    caches, tables and the call in GPU memory, on CuPy arrays of float16, for which there are tensor cores

Each step is one call of `cupyflash.attention_with_kvcache` for all requests that run: chunks of prompts and single new tokens, packed one
behind the other, which it rotates, appends to their pages and attends with. Around it is what a serving engine does, as vLLM (Kwon et
al., arXiv 2309.06180) and SGLang (Zheng et al., arXiv 2312.07104):

- a request is admitted when there is room in the batch and in the cache, and leaves when it has its tokens;
- full pages are known by the tokens up to their end, so a request whose prompt begins as another's did shares its pages and does not
  compute them again, also after the other has left: pages that nobody uses stay until their place is needed, the longest unused first;
- where no page is left, the request that came last gives its own back and waits; what it has generated so far becomes part of its prompt.

The model is one layer of attention with random weights, whose queries, keys and values depend on a token alone, and whose next token is the
likeliest one: little, but each token depends on all before it by way of the cache. A page that is given away is filled with NaN, so that
one stale read would show. Of every tenth request all generated rows are compared with dense attention in float64 over its tokens.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import cupyflash

from .. import gpu

Array = Any  # numpy.ndarray or cupy.ndarray: the two share no base class

VOCABULARY = 997
HEADS_Q, HEADS_KV, HEAD_DIM = 8, 2, 32
PAGE_SIZE = 16
MAX_BATCH = 24  # requests that run at once
MAX_TOKENS = 96  # of all of them in one step
MAX_CHUNK = 32  # of one request in one step
MAX_LENGTH = 512  # of a request, generated tokens too
CHECKED = 10  # every so many requests
# Of out, which is of order 1: float32 rounding over some hundred keys; in float16 that of out, 1e-3 where it is 2 to 4, and on a GPU of
# weights and turned queries, too.
AGREEMENT = {"float32": 2e-5, "float16": 3e-3}


class Model:
    """Tables of what each token of the vocabulary has for query, key and value, of `dtype`, a projection to the next token, and rotary
    tables."""

    def __init__(self, rng: np.random.Generator, dtype: str = "float32") -> None:
        def normal(*shape: int) -> Array:
            return rng.standard_normal(shape, dtype=np.float32)

        self.q = normal(VOCABULARY, HEADS_Q, HEAD_DIM).astype(dtype)
        self.k, self.v = normal(2, VOCABULARY, HEADS_KV, HEAD_DIM).astype(dtype)
        self.head = normal(HEADS_Q * HEAD_DIM, VOCABULARY)
        angles = np.arange(MAX_LENGTH)[:, None] * 10000.0 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def next_token(self, out: Array) -> int:
        """out (Hq, D) of the last token so far."""
        return int((out.reshape(-1) @ self.head).argmax())


@dataclass(eq=False)
class Request:
    tokens: list[int]  # the prompt, and what was generated
    wanted: int  # how many tokens it may have in the end
    arrival: int  # the step from which on it is known
    pages: list[int] = field(default_factory=list)
    cached: int = 0  # tokens whose keys are in its pages
    checked: bool = False
    rows: dict[int, Array] = field(default_factory=dict)  # of a checked one: out (Hq, D) of the tokens after which one was generated


class Pages:
    """Which pages are free, how many requests use each, and which hold the keys of tokens that may come again."""

    def __init__(self, num_pages: int) -> None:
        self.free = [*range(num_pages)]
        self.users = [0] * num_pages
        self.known: OrderedDict[tuple[int, ...], int] = OrderedDict()  # all tokens up to a page's end -> it; the longest unused comes first
        self.prefix: dict[int, tuple[int, ...]] = {}  # the way back

    @property
    def available(self) -> int:
        return len(self.free) + sum(not self.users[page] for page in self.prefix)

    def shared(self, tokens: Sequence[int]) -> list[int]:
        """The full pages that these tokens begin with and that are there already, with one user more."""
        found: list[int] = []
        while (page := self.known.get(tuple(tokens[: (len(found) + 1) * PAGE_SIZE]))) is not None and (len(found) + 1) * PAGE_SIZE <= len(
            tokens
        ):
            self.known.move_to_end(self.prefix[page])
            self.users[page] += 1
            found.append(page)
        return found

    def taken(self) -> tuple[int, bool] | None:
        """A page for one user, and whether it had to be forgotten for that; None where all are in use."""
        evicted = False
        if not self.free:
            unused = next((page for page in self.known.values() if not self.users[page]), None)
            if unused is None:
                return None
            del self.known[self.prefix.pop(unused)]
            self.free.append(unused)
            evicted = True
        page = self.free.pop()
        self.users[page] = 1
        return page, evicted

    def learn(self, page: int, tokens: Sequence[int]) -> None:
        """The page is full and ends with the last of these tokens. Another one may have come first: then that stays the known one."""
        prefix = tuple(tokens)
        if prefix not in self.known and page not in self.prefix:
            self.known[prefix], self.prefix[page] = page, prefix

    def release(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.users[page] -= 1
            if not self.users[page] and page not in self.prefix:
                self.free.append(page)


class Server:
    """`xp` is numpy or cupy: where the caches and the model's tables are, and what is called with them."""

    def __init__(self, model: Model, num_pages: int, xp: Any = np) -> None:
        self.model, self.xp = model, xp
        self.q, self.k, self.v, self.cos, self.sin = map(xp.asarray, (model.q, model.k, model.v, model.cos, model.sin))
        self.pages = Pages(num_pages)
        self.k_cache, self.v_cache = xp.full((2, num_pages, PAGE_SIZE, HEADS_KV, HEAD_DIM), np.nan, model.k.dtype)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order in which they came
        self.done: list[Request] = []
        self.counts: Counter[str] = Counter()

    def serve(self, requests: Sequence[Request]) -> None:
        coming = deque(sorted(requests, key=lambda request: request.arrival))
        while coming or self.waiting or self.running:
            while coming and coming[0].arrival <= self.counts["steps"]:
                self.waiting.append(coming.popleft())
            self.step()

    def step(self) -> None:
        self.counts["steps"] += 1
        while self.waiting and len(self.running) < MAX_BATCH:
            if self.running and self.pages.available * PAGE_SIZE < len(self.waiting[0].tokens):
                break  # it would only take from others, or have to go at once
            request = self.waiting.popleft()
            request.pages = self.pages.shared(request.tokens[:-1])  # at least one token is left, whose row gives the next one
            request.cached = len(request.pages) * PAGE_SIZE
            self.counts["shared tokens"] += request.cached
            self.running.append(request)
        if batch := self.schedule():
            out = self.attend(batch)
            self.advance(batch, out)

    def schedule(self) -> list[tuple[Request, int]]:
        """Which requests compute how many tokens in this step; they have the pages for them."""
        batch: list[tuple[Request, int]] = []
        left = MAX_TOKENS
        for request in [*self.running]:
            count = min(len(request.tokens) - request.cached, MAX_CHUNK, left)
            if request in self.running and count and self.has_pages(request, request.cached + count):
                batch.append((request, count))
                left -= count
        return batch

    def has_pages(self, request: Request, tokens: int) -> bool:
        """Give a request the pages for so many tokens, at the cost of those that came after it; False where it must wait itself."""
        while len(request.pages) * PAGE_SIZE < tokens:
            if (taken := self.pages.taken()) is not None:
                page, evicted = taken
                self.k_cache[page] = self.v_cache[page] = np.nan
                self.counts["evicted pages"] += evicted
                request.pages.append(page)
                continue
            last = self.running.pop()
            self.pages.release(last.pages)
            last.pages, last.cached = [], 0
            self.waiting.appendleft(last)
            self.counts["preempted"] += 1
            if last is request:
                if not self.running:
                    raise ValueError(f"{len(self.pages.users)} pages are too few for a request of {tokens} tokens")
                return False
        return True

    def attend(self, batch: Sequence[tuple[Request, int]]) -> Array:
        """One call for all: out (T, Hq, D), in host memory, of the T tokens that the batch computes, whose keys and values are in the cache
        then."""
        there = self.xp.asarray
        tokens = np.concatenate([request.tokens[request.cached : request.cached + count] for request, count in batch])
        page_table = np.full((len(batch), max(len(request.pages) for request, _ in batch)), -1, np.int32)
        for row, (request, _) in zip(page_table, batch, strict=True):
            row[: len(request.pages)] = request.pages
        self.counts["tokens"] += len(tokens)
        self.counts["largest batch"] = max(self.counts["largest batch"], len(batch))
        tokens = there(tokens)
        out = cupyflash.attention_with_kvcache(
            self.q[tokens],
            self.k_cache,
            self.v_cache,
            cache_seqlens=there(np.array([request.cached for request, _ in batch], np.int32)),
            k_new=self.k[tokens],
            v_new=self.v[tokens],
            page_table=there(page_table),
            cu_seqlens_q=there(np.cumsum([0, *(count for _, count in batch)], dtype=np.int32)),
            rotary_cos=self.cos,
            rotary_sin=self.sin,
        )
        return out if self.xp is np else self.xp.asnumpy(out)

    def advance(self, batch: Sequence[tuple[Request, int]], out: Array) -> None:
        end = 0
        for request, count in batch:
            end += count
            full = request.cached // PAGE_SIZE
            request.cached += count
            for n in range(full, request.cached // PAGE_SIZE):
                self.pages.learn(request.pages[n], request.tokens[: (n + 1) * PAGE_SIZE])
            if request.cached < len(request.tokens):
                continue  # more of the prompt is to come
            if request.checked:
                request.rows[request.cached - 1] = out[end - 1].copy()
            request.tokens.append(self.model.next_token(out[end - 1]))
            self.counts["generated"] += 1
            if len(request.tokens) == request.wanted:
                self.running.remove(request)
                self.pages.release(request.pages)
                self.done.append(request)


def error_of(model: Model, request: Request) -> float:
    """The largest difference of a request's rows from dense attention in float64 over its tokens, without a cache; but keys are rounded to
    their dtype, as one does it."""
    tokens = request.tokens[:-1]  # the last was generated, and nobody has attended with it
    turn = (model.cos.astype(float) + 1j * model.sin)[: len(tokens), None]

    def rotated(x: Array) -> Array:
        z = (x[..., : HEAD_DIM // 2] + 1j * x[..., HEAD_DIM // 2 :].astype(float)) * turn
        return np.concatenate([z.real, z.imag], axis=-1)

    q, k = rotated(model.q[tokens]), rotated(model.k[tokens]).astype(model.k.dtype).astype(float).repeat(HEADS_Q // HEADS_KV, axis=1)
    v = model.v[tokens].astype(float).repeat(HEADS_Q // HEADS_KV, axis=1)
    error = 0.0
    for i, row in request.rows.items():
        scores = np.einsum("hd,jhd->hj", q[i], k[: i + 1]) / np.sqrt(HEAD_DIM)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        difference = np.abs(row - np.einsum("hj,jhd->hd", weights, v[: i + 1])).max()
        error = max(error, float(np.nan_to_num(difference, nan=np.inf)))
    return error


def mix(rng: np.random.Generator, count: int) -> list[Request]:
    """Requests as a chat service has them: most begin with one of a few system prompts, some with nothing; short and long ones, and now and
    then one that was asked before, word by word. Some arrive in every step."""
    prompts = [rng.integers(VOCABULARY, size=n).tolist() for n in (0, 35, 64, 150)]
    requests: list[Request] = []
    arrival = 0
    for n in range(count):
        asked = prompts[rng.choice(4, p=[0.2, 0.3, 0.3, 0.2])] + rng.integers(VOCABULARY, size=int(rng.geometric(0.04))).tolist()
        if requests and rng.random() < 0.05:
            asked = [*requests[rng.integers(len(requests))].tokens]
        asked = asked[: MAX_LENGTH - 120]
        arrival += int(rng.random() < 0.5)
        requests.append(Request(asked, len(asked) + min(int(rng.geometric(0.05)), 120), arrival, checked=n % CHECKED == 0))
    return requests


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="paged_server", description="Serve requests over a paged cache, and check a sample in float64.")
    parser.add_argument("--requests", type=int, default=1000, help="how many; 1000 by default")
    parser.add_argument("--pages", type=int, default=80, help=f"of {PAGE_SIZE} tokens, of the cache; 80 by default")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--device", choices=("host", "gpu"), default="host", help="where the cache is: CuPy arrays of float16 on a GPU")
    chosen = parser.parse_args(arguments)
    xp, dtype = np, "float32"
    if chosen.device == "gpu":
        if reason := gpu.why_not():
            parser.error(f"--device gpu: {reason}")
        xp, dtype = importlib.import_module("cupy"), "float16"
    rng = np.random.default_rng(chosen.seed)
    model = Model(rng, dtype)
    server = Server(model, chosen.pages, xp)
    requests = mix(rng, chosen.requests)
    asked = sum(len(request.tokens) for request in requests)
    start = time.perf_counter()
    server.serve(requests)
    seconds = time.perf_counter() - start

    counts, checked = server.counts, [request for request in server.done if request.checked]
    error = max((error_of(model, request) for request in checked), default=0.0)
    rows, limit = sum(len(request.rows) for request in checked), AGREEMENT[dtype]
    print(f"{len(server.done)} of {len(requests)} requests, {asked} tokens of prompts, {counts['generated']} generated")
    print(f"{counts['steps']} steps of up to {counts['largest batch']} requests, {counts['tokens']} tokens computed in {seconds:.1f} s")
    print(
        f"{counts['shared tokens']} tokens found in shared pages, {counts['evicted pages']} pages evicted, {counts['preempted']} preempted"
    )
    print(f"{rows} rows of {len(checked)} requests checked: at most {error:.1e} from dense float64 (limit {limit:.0e})")
    return 0 if len(server.done) == len(requests) and error <= limit else 1


if __name__ == "__main__":
    raise SystemExit(main())
