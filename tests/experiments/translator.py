"""A task for latbench: a Transformer that translates Multi30k from German to English, in words.

`model()` trains it on first use, in ten minutes on two cores, and keeps the weights in latbench's cache folder. Data
and vocabularies are those of `translation.py`. A batch is a pair of word numbers: German (n, s), and English
(n, t + 1), of which the model gets all but the last. It returns logits (n, t, words).
"""

import hashlib
from collections.abc import Iterator
from functools import cache

import filelock
import numpy as np
import torch
from sacrebleu import corpus_bleu
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from translation import (
    LONGEST,
    PAD,
    TOKENS,
    Data,
    Size,
    Translator,
    WordLoss,
    batches,
    padded,
    read_data,
    translations,
)

from latbench.base.files import find_cache_folder, write_atomically

Batch = tuple[Tensor, Tensor]

name = "translator"
score_name = "BLEU on 1,000 test sentences"

SIZE = Size(width=256, hidden=1024, heads=4, layers=3)
STEPS, RATE, SEED = 1500, 2e-3, 2026
CALIBRATION_BATCHES = 12
SENTENCES, WORDS = 16, 16
"""What is timed: so many sentences, of so many words in either language."""


class WithHead(Translator):
    """A translator whose last layer has weights of its own, so that it can be pruned."""

    def __init__(self, data: Data) -> None:
        super().__init__(data.source_words, len(data.target_words), SIZE)
        self.head = nn.Linear(SIZE.width, len(data.target_words), bias=False)

    def guess_words(self, states: Tensor) -> Tensor:
        logits: Tensor = self.head(states)
        return logits

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.guess_words(super().forward(source, target))


def model() -> nn.Module:
    depends = repr((SIZE, STEPS, RATE, SEED, TOKENS, _data().source_words, len(_data().target_words))).encode()
    path = find_cache_folder() / "tasks" / f"{name}-{hashlib.sha256(depends).hexdigest()[:12]}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(path.with_suffix(".lock")):
        if not path.exists():
            weights = _train()
            write_atomically(path, lambda temporary: save_file(weights, temporary))
    network = WithHead(_data())
    network.load_state_dict(load_file(path))
    return network.eval()


def example() -> tuple[Tensor, Tensor]:
    sources, targets = zip(*_data().pairs["test"][:SENTENCES], strict=True)
    return padded(sources, LONGEST)[:, :WORDS], padded(targets, LONGEST + 1)[:, :WORDS]


def calibration() -> list[Batch]:
    stream = train_batches(np.random.default_rng(0))
    return [next(stream) for _ in range(CALIBRATION_BATCHES)]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy a word, in nats."""
    source, target = batch
    return cross_entropy(model(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD)


def score(model: WithHead) -> float:
    """sacrebleu's, of greedy translations in lower-cased words and marks."""
    return corpus_bleu(translations(model, _data()), [_data().references], tokenize="none", force=True).score


def train_batches(rng: np.random.Generator) -> Iterator[Batch]:
    return batches(_data(), rng)


def _train() -> dict[str, Tensor]:
    """The weights of a translator whose last layer is its English embedding, which becomes the head's, too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        network = Translator(_data().source_words, len(_data().target_words), SIZE)
    optimizer = torch.optim.Adam(network.parameters(), RATE, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS, pct_start=0.1)
    stream = train_batches(np.random.default_rng(SEED))
    for _ in range(STEPS):
        source, target = next(stream)
        optimizer.zero_grad()
        states = network(source, target[:, :-1]).flatten(0, 1)
        WordLoss.apply(states, network.target.weight, target[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    weights = network.state_dict()
    return {**weights, "head.weight": weights["target.weight"].clone()}


@cache
def _data() -> Data:
    return read_data()
