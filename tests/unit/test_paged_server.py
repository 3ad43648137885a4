"""The example of a server: its rows are those of dense attention, and what it counts did happen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyflash
from bench.examples import paged_server
from bench.examples.paged_server import PAGE_SIZE, Model, Pages, Request, Server


def served(count: int, pages: int, seed: int = 7, dtype: str = "float32") -> Server:
    rng = np.random.default_rng(seed)
    server, requests = Server(Model(rng, dtype), pages), paged_server.mix(rng, count)
    for request in requests:
        request.checked = True
    server.serve(requests)
    assert sorted(map(id, server.done)) == sorted(map(id, requests))
    return server


@pytest.mark.parametrize(("pages", "dtype"), [(32, "float32"), (64, "float32"), (64, "float16"), (400, "float32")])
def test_every_row_is_that_of_dense_attention(pages: int, dtype: str) -> None:
    """In pools so small that requests wait for each other, and in one where none must; in float16 as on a GPU."""
    server = served(40, pages, dtype=dtype)
    for request in server.done:
        assert len(request.tokens) == request.wanted
        assert len(request.rows) > 0
        assert paged_server.error_of(server.model, request) < paged_server.AGREEMENT[dtype]
    counts = server.counts
    assert counts["generated"] == sum(len(request.rows) for request in server.done)
    assert counts["shared tokens"] > 500
    assert (counts["evicted pages"] > 20) == (counts["preempted"] > 0) == (pages < 400)
    assert not any(server.pages.users)
    assert sorted([*server.pages.free, *server.pages.prefix]) == [*range(pages)]


def test_a_check_finds_a_wrong_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """One slot of a shared page is overwritten: the error is there to be seen."""
    attention = cupyflash.attention_with_kvcache

    def spoiled(q: Any, k_cache: Any, v_cache: Any, **options: Any) -> Any:
        out = attention(q, k_cache, v_cache, **options)
        k_cache[options["page_table"][0, 0], 0] += 1
        return out

    monkeypatch.setattr(cupyflash, "attention_with_kvcache", spoiled)
    server = served(5, 100)
    assert max(paged_server.error_of(server.model, request) for request in server.done) > 100 * paged_server.AGREEMENT["float32"]


def test_pages_are_shared_and_forgotten() -> None:
    pages, tokens = Pages(3), [*range(2 * PAGE_SIZE)]
    first, second = (pages.taken() for _ in range(2))
    assert (first, second) == ((2, False), (1, False))
    pages.learn(2, tokens[:PAGE_SIZE])
    pages.learn(1, tokens)
    assert pages.shared(tokens[:-1]) == [2]
    assert pages.shared([*tokens, 5]) == [2, 1]
    assert pages.shared(tokens[1:]) == []
    for used in ([2, 1], [2], [2, 1]):
        pages.release(used)
    assert pages.free == [0]  # the others may be asked for again
    assert pages.taken() == (0, False)
    assert pages.taken() == (2, True)
    assert pages.shared(tokens) == []  # a page is of no use without those before it
    assert pages.taken() == (1, True)
    assert pages.taken() is None


def test_a_request_that_no_pool_can_hold_is_an_error() -> None:
    server = Server(Model(np.random.default_rng(0)), 2)
    with pytest.raises(ValueError, match="2 pages are too few for a request of"):
        server.serve([Request([1] * 40, 50, 0)])


def test_a_gpu_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_server.gpu, "why_not", lambda: "no NVIDIA driver, so no GPU")
    with pytest.raises(SystemExit):
        paged_server.main(["--device", "gpu"])
    assert "--device gpu: no NVIDIA driver, so no GPU" in capsys.readouterr().err


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert paged_server.main(["--requests", "30", "--pages", "40"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("30 of 30 requests, ")
    assert "rows of 3 requests checked" in printed
