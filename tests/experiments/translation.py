"""Which N:M training recipe is worth its FLOPs: Multi30k, German to English, a small Transformer with sparse FFNs.

    python tests/experiments/translation.py run [RESULTS.jsonl] [--hours 12] [--threads 1]
    python tests/experiments/translation.py show [RESULTS.jsonl]

A Transformer of 2 + 2 layers, d 128, FFN 512, trained from scratch on words ($LATBENCH_DATA/multi30k). Its eight FFN
layers go to 1:16 (5 seeds), 1:8 and 2:4, the negative control (3 seeds each), by each method, at equal steps and at
equal training FLOPs of the FFN layers as `search.pruning.training.flops` counts them for transposable masks, as the
papers do: there is a kernel for the input gradient then, too (the softmax over words, dense in all, would hide the
difference). The seed fixes the weights and the order of sentences, so that methods are compared in pairs. First each
method gets the same number of trials, at 1:16 and equal steps, judged on validation data with a seed of their own;
test data is only ever reported. BLEU is sacrebleu's, of greedy translations in lower-cased words and marks, one
reference.

A run is one JSON line of RESULTS, by default results/translation.jsonl beside this file. What is there is not run
again: the command may be stopped at any time and goes on anywhere, and several of it may run at once on one machine,
which take different runs. A run takes 60 to 100 s on one core with bfloat16 matrix units, which float32 products then
use, 90 to 150 s without; with MALLOC_MMAP_THRESHOLD_=2147483647 MALLOC_TRIM_THRESHOLD_=2147483647 in the environment
a tenth less, as memory is kept between steps.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import math
import os
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import runs
import torch
from runs import Row
from sacrebleu import corpus_bleu
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from latbench.machines.devices import name_cpu
from search.pruning.masks.layer_targets import LayerTarget, resolve_targets
from search.pruning.training.flops import compute_layer_cost, compute_training_flop, count_forward_flop
from search.pruning.training.pruner import Pruner
from search.pruning.training.recipe import Recipe
from search.pruning.training.train import compute_learning_rate_factor
from sparse_kernels.patterns import NM, Unstructured, parse

RESULTS = Path(__file__).parent / "results" / "translation.jsonl"
PAD, START, END, UNKNOWN = range(4)
LONGEST = 40
TOKENS = 1024  # of a batch, in the longer language, padding among them
ROUND = 4  # lengths are multiples of it
STEPS = 600  # of every method, at equal steps
DENSE_STEPS = 300  # FFN FLOPs of so many dense steps for every method, at equal FLOPs
TUNING_SEED = 1000
SEEDS = {"nm:1:16": 5, "nm:1:8": 3, "nm:2:4": 3}
MODES = ("steps", "flop")

# Each gets as many trials, of the learning rate and of what sets the method's strength.
Trials = list[tuple[float, dict[str, Any]]]


def _grid(name: str, values: Sequence[Any]) -> Trials:
    return [(rate, {name: value}) for rate in (2e-3, 4e-3) for value in values]


# name: (the recipe's method, its settings, trials)
METHODS: dict[str, tuple[str | None, dict[str, Any], Trials]] = {
    "dense": (None, {}, [(rate, {}) for rate in (1e-3, 2e-3, 4e-3, 8e-3)]),
    "unstructured": ("gmp", {"begin": 0.1, "initial": 0.0}, _grid("end", (0.5, 0.8))),
    "ASP": ("asp", {}, _grid("dense", (0.3, 0.5))),
    "SR-STE": ("sr_ste", {}, _grid("penalty", (2e-4, 2e-3))),
    "mask decay": ("mask_decay", {"shape": "exponential"}, _grid("final", (0.2, 0.4))),
    "structure decay": ("structure_decay", {"stages": "stepwise"}, _grid("final", (0.2, 0.4))),
}
BASELINE = "SR-STE"  # differences are from it


KeysValues = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Size:
    """Widths of a Transformer, its heads, and its layers on either side."""

    width: int = 128
    hidden: int = 512
    heads: int = 4
    layers: int = 2


class Attention(nn.Module):
    """Written out: torch's own takes several times as long for sentences of a dozen words on a CPU."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.query, self.key, self.value, self.out = (nn.Linear(size.width, size.width) for _ in range(4))

    def keys_values(self, memory: Tensor) -> KeysValues:
        return self._split(self.key(memory)), self._split(self.value(memory))

    def forward(self, x: Tensor, memory: KeysValues, hidden: Tensor | None) -> Tensor:
        """What x (n, t, width) finds in the memory (n, heads, s, .), but where it is `hidden`."""
        keys, values = memory
        scores = (self.size.width // self.size.heads) ** -0.5 * self._split(self.query(x)) @ keys.transpose(2, 3)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -1e9)
        found: Tensor = self.out((scores.softmax(dim=3) @ values).transpose(1, 2).flatten(2))
        return found

    def _split(self, y: Tensor) -> Tensor:
        heads: Tensor = y.unflatten(2, (self.size.heads, -1))
        return heads.transpose(1, 2)


class Layer(nn.Module):
    """Pre-norm attention and FFN; a decoder's looks at the memory between them."""

    def __init__(self, size: Size, decoder: bool) -> None:
        super().__init__()
        self.own = Attention(size)
        self.cross = Attention(size) if decoder else None
        self.fc1, self.fc2 = nn.Linear(size.width, size.hidden), nn.Linear(size.hidden, size.width)
        self.norms = nn.ModuleList(nn.LayerNorm(size.width) for _ in range(3 if decoder else 2))

    def remember(self, memory: Tensor) -> KeysValues:
        """Keys and values of the memory that a decoder's layer looks at."""
        assert self.cross is not None
        return self.cross.keys_values(memory)

    def forward(
        self,
        x: Tensor,
        hidden: Tensor | None,
        memory: KeysValues | None = None,
        memory_hidden: Tensor | None = None,
        past: list[Tensor] | None = None,
    ) -> Tensor:
        """`past` are the keys and values of words before x; x's own are added to them."""
        y = self.norms[0](x)
        keys, values = self.own.keys_values(y)
        if past is not None:
            keys, values = torch.cat([past[0], keys], dim=2), torch.cat([past[1], values], dim=2)
            past[:] = keys, values
        x = x + self.own(y, (keys, values), hidden)
        if self.cross is not None:
            assert memory is not None
            x = x + self.cross(self.norms[1](x), memory, memory_hidden)
        widened: Tensor = self.fc2(self.fc1(self.norms[-1](x)).relu())
        return x + widened


class Translator(nn.Module):
    """Word numbers (n, s) and (n, t) to states (n, t, width); `target.weight` is the last layer, too."""

    def __init__(self, source_words: int, target_words: int, size: Size = Size()) -> None:
        super().__init__()
        width = size.width
        self.source, self.target = nn.Embedding(source_words, width), nn.Embedding(target_words, width)
        for embedding in (self.source, self.target):
            nn.init.normal_(embedding.weight, std=width**-0.5)
        self.encoder = nn.ModuleList(Layer(size, decoder=False) for _ in range(size.layers))
        self.decoder = nn.ModuleList(Layer(size, decoder=True) for _ in range(size.layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        place, wave = torch.arange(LONGEST + 2)[:, None], torch.arange(0, width, 2)
        angle = place * torch.exp(-math.log(10_000) / width * wave)
        self.register_buffer("places", torch.stack([angle.sin(), angle.cos()], dim=2).flatten(1))

    def encode(self, source: Tensor) -> tuple[list[KeysValues], Tensor]:
        """The memory of each decoder layer, and where it is hidden."""
        hidden = (source == PAD)[:, None, None, :]
        x = self._embedded(self.source, source)
        for layer in self.encoder:
            x = layer(x, hidden)
        x = self.norms[0](x)
        return [layer.remember(x) for layer in self.decoder if isinstance(layer, Layer)], hidden

    def decode(
        self, target: Tensor, memories: list[KeysValues], hidden: Tensor, pasts: list[list[Tensor]] | None = None
    ) -> Tensor:
        """Of all words, or of the one that follows `pasts`."""
        if pasts is None:
            future = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
            x = self._embedded(self.target, target)
        else:
            future = None
            x = self._embedded(self.target, target, first=pasts[0][0].shape[2])
        for i, (layer, memory) in enumerate(zip(self.decoder, memories, strict=True)):
            x = layer(x, future, memory, hidden, None if pasts is None else pasts[i])
        states: Tensor = self.norms[1](x)
        return states

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.decode(target, *self.encode(source))

    def guess_words(self, states: Tensor) -> Tensor:
        """States (..., width) to logits (..., words)."""
        return states @ self.target.weight.T

    def _embedded(self, embedding: nn.Embedding, words: Tensor, first: int = 0) -> Tensor:
        places = self.get_buffer("places")
        embedded: Tensor = embedding(words)
        return math.sqrt(embedding.embedding_dim) * embedded + places[first : first + words.shape[1]]


class WordLoss(torch.autograd.Function):
    """Mean cross-entropy of words (n,), but PAD, from states x (n, width) and embeddings (words, width).

    The gradients are made with the loss, from one softmax: log_softmax and its derivative pass over the logits,
    by far the largest array of a step, four times more.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, embeddings: Tensor, words: Tensor) -> Tensor:
        logits = x @ embeddings.T
        chances = torch.softmax(logits, dim=1, out=logits)
        real = (words != PAD).float()[:, None]
        own = chances.gather(1, words[:, None])
        chances.scatter_add_(1, words[:, None], torch.full_like(own, -1.0))
        count = real.sum()
        ctx.save_for_backward(chances @ embeddings * (real / count), chances.T @ (x * (real / count)))
        return -(own.clamp_min(1e-30).log() * real).sum() / count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        to_x, to_embeddings = ctx.saved_tensors
        return gradient * to_x, gradient * to_embeddings, None


@dataclass(frozen=True)
class Data:
    """Sentences as lists of word numbers, ends included; `references` are the test set's words."""

    pairs: dict[str, list[tuple[list[int], list[int]]]]
    source_words: int
    target_words: list[str]
    references: list[str]


def read_data() -> Data:
    """All of Multi30k; words seen fewer than five times in training are one."""
    folder = Path(os.environ.get("LATBENCH_DATA", "../shared/data")) / "multi30k"
    names = {"train": "train", "val": "val", "test": "test_2016_flickr"}
    words: dict[tuple[str, str], list[list[str]]] = {}
    for part, name in names.items():
        for language in ("de", "en"):
            with gzip.open(folder / f"{name}.{language}.gz", "rt", encoding="utf-8") as file:
                lines = file.read().rstrip("\n").split("\n")
            words[part, language] = [re.findall(r"\w+|[^\w\s]", line.lower()) for line in lines]
    vocabularies = {}
    for language in ("de", "en"):
        counts = Counter(word for sentence in words["train", language] for word in sentence)
        vocabularies[language] = ["<pad>", "<s>", "</s>", "<unk>", *sorted(w for w, n in counts.items() if n >= 5)]
    numbers = {language: {w: i for i, w in enumerate(vocabulary)} for language, vocabulary in vocabularies.items()}
    pairs = {
        part: [
            (
                [*(numbers["de"].get(w, UNKNOWN) for w in source[: LONGEST - 1]), END],
                [START, *(numbers["en"].get(w, UNKNOWN) for w in target[: LONGEST - 1]), END],
            )
            for source, target in zip(words[part, "de"], words[part, "en"], strict=True)
        ]
        for part in names
    }
    return Data(
        pairs, len(vocabularies["de"]), vocabularies["en"], [" ".join(sentence) for sentence in words["test", "en"]]
    )


def batches(data: Data, rng: np.random.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless training batches of about TOKENS words, in random order; each of sentences of like length.

    Lengths are rounded up to multiples of ROUND: libraries prepare for every new shape.
    """
    waiting: dict[tuple[int, int], list[int]] = {}
    pairs = data.pairs["train"]
    while True:
        for i in rng.permutation(len(pairs)):
            source, target = pairs[i]
            shape = (-(-len(source) // ROUND) * ROUND, -(-(len(target) - 1) // ROUND) * ROUND)
            group = waiting.setdefault(shape, [])
            group.append(i)
            if len(group) == TOKENS // max(shape):
                yield (
                    padded([pairs[j][0] for j in group], shape[0]),
                    padded([pairs[j][1] for j in group], shape[1] + 1),
                )
                group.clear()


def padded(sentences: Sequence[list[int]], length: int | None = None) -> Tensor:
    length = length or max(map(len, sentences))
    return torch.tensor([sentence + [PAD] * (length - len(sentence)) for sentence in sentences])


def loss(model: Translator, source: Tensor, target: Tensor) -> Tensor:
    states: Tensor = model(source, target[:, :-1])
    found: Tensor = WordLoss.apply(states.flatten(0, 1), model.target.weight, target[:, 1:].flatten())  # type: ignore[no-untyped-call]
    return found


@torch.no_grad()
def mean_loss(model: Translator, data: Data, part: str) -> float:
    """Cross-entropy a word, in nats."""
    total, count = 0.0, 0
    pairs = sorted(data.pairs[part], key=lambda pair: len(pair[0]))
    for start in range(0, len(pairs), 100):
        source, target = (padded(side) for side in zip(*pairs[start : start + 100], strict=True))
        words = target[:, 1:].flatten()
        logits = model.guess_words(model(source, target[:, :-1]).flatten(0, 1))
        total += cross_entropy(logits, words, ignore_index=PAD, reduction="sum").item()
        count += int((words != PAD).sum())
    return total / count


@torch.no_grad()
def translations(model: Translator, data: Data) -> list[str]:
    """Greedy, of the test set."""
    sources = padded([source for source, _ in data.pairs["test"]])
    memories, hidden = model.encode(sources)
    nothing = memories[0][0][:, :, :0]
    pasts = [[nothing, nothing] for _ in memories]
    words = torch.full((len(sources), 1), START)
    found: list[list[int]] = []
    ended = torch.zeros(len(sources), dtype=torch.bool)
    while len(found) < LONGEST and not ended.all():
        words = model.guess_words(model.decode(words, memories, hidden, pasts)).argmax(dim=2)
        ended |= words[:, 0] == END
        found.append(words[:, 0].tolist())
    sentences = (itertools.takewhile(lambda word: word != END, column) for column in zip(*found, strict=True))
    return [" ".join(data.target_words[word] for word in sentence) for sentence in sentences]


def target_of(method: str, pattern: str) -> LayerTarget:
    nm = parse(pattern)
    sparsity: float = nm.sparsity  # type: ignore[union-attr]
    return LayerTarget(Unstructured(), sparsity) if method == "unstructured" else LayerTarget(nm, sparsity)


def counted_as(target: LayerTarget) -> LayerTarget:
    """The target whose FLOPs count."""
    return replace(target, along="both") if isinstance(target.pattern, NM) else target


def steps_of(pruner: Pruner | None, target: LayerTarget, mode: str) -> int:
    """How many steps a mode allows: STEPS, or as many as the FFN FLOPs of DENSE_STEPS dense ones pay for."""
    if mode == "steps":
        return STEPS
    cost = 1.0 if pruner is None else compute_layer_cost(pruner, counted_as(target), STEPS).total / 3
    return round(DENSE_STEPS / cost)


def run(data: Data, key: dict[str, Any], rate: float, settings: dict[str, Any]) -> dict[str, Any]:
    """Train and judge one model."""
    name, fixed, _ = METHODS[key["method"]]
    recipe = Recipe(
        method=name or "gmp", settings={**fixed, **settings}, learning_rate=rate, steps=STEPS, warmup=60,
        clip_norm=1.0, seed=key["seed"],
    )  # fmt: skip
    pruner = None if name is None else recipe.build_pruner()
    target = target_of(key["method"], key["pattern"])
    steps = steps_of(pruner, target, key["mode"])
    recipe = replace(recipe, steps=steps)
    started = time.process_time()
    torch.manual_seed(key["seed"])
    model = Translator(data.source_words, len(data.target_words))
    ffns = [n for n, m in model.named_modules() if n.endswith(("fc1", "fc2"))]
    targets = resolve_targets(dict.fromkeys(ffns, target), model)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: compute_learning_rate_factor(recipe, step))
    stream = batches(data, np.random.default_rng(key["seed"]))
    if pruner is not None:
        pruner.prepare(model, targets, total_steps=steps)
    for _ in range(steps):
        source, words = next(stream)
        optimizer.zero_grad()
        loss(model, source, words).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if pruner is not None:
            pruner.step()
    if pruner is not None:
        pruner.finish()
    counted = count_forward_flop(model, lambda: model(source, words[:, :-1]))
    ffn = {layer: counted[layer] for layer in ffns}
    spent, dense = (
        compute_training_flop(p, dict.fromkeys(targets, counted_as(target)), ffn, steps).total for p in (pruner, None)
    )
    kept = [float((model.get_parameter(f"{layer}.weight") != 0).double().mean()) for layer in ffns]
    return {
        **key, "learning_rate": rate, "settings": settings, "steps": steps,
        "validation": mean_loss(model, data, "val"), "test": mean_loss(model, data, "test"),
        "bleu": corpus_bleu(translations(model, data), [data.references], tokenize="none", force=True).score,
        "density": statistics.fmean(kept),
        "relative_cost": spent / dense, "dense_steps": steps * spent / dense,
        "cpu_seconds": time.process_time() - started, "cpu": name_cpu(),
        "threads": torch.get_num_threads(), "torch": torch.__version__,
    }  # fmt: skip


def plan() -> list[Row]:
    """The keys of all runs, in order: trials, then 1:16, then the others."""
    found: list[Row] = [
        {"part": "tune", "pattern": "nm:1:16", "method": method, "mode": "steps", "seed": TUNING_SEED, "trial": trial}
        for method, (_, _, trials) in METHODS.items()
        for trial in range(len(trials))
    ]
    for seed, pattern, mode, method in itertools.chain(
        itertools.product(range(SEEDS["nm:1:16"]), ["nm:1:16"], MODES, METHODS),
        itertools.product(range(SEEDS["nm:1:8"]), ["nm:1:8", "nm:2:4"], MODES, METHODS),
    ):
        if method != "dense" or pattern == "nm:1:16":  # which is the same for all patterns
            found.append(
                {"part": "main", "pattern": pattern, "method": method, "mode": mode, "seed": seed, "trial": None}
            )
    return found


def tuned(rows: list[dict[str, Any]], method: str) -> tuple[float, dict[str, Any]] | None:
    """The trial with the least validation loss; None while trials are missing."""
    trials = {row["trial"]: row for row in rows if row["part"] == "tune" and row["method"] == method}
    if len(trials) < len(METHODS[method][2]):
        return None
    best = min(trials.values(), key=lambda row: row["validation"])
    return best["learning_rate"], best["settings"]


def run_all(path: Path, hours: float) -> None:
    data = read_data()

    def ready(key: Row, rows: list[Row]) -> bool:
        return key["part"] == "tune" or tuned(rows, key["method"]) is not None

    def one(key: Row, rows: list[Row]) -> Row:
        chosen = METHODS[key["method"]][2][key["trial"]] if key["part"] == "tune" else tuned(rows, key["method"])
        assert chosen is not None
        row = run(data, key, *chosen)
        print(
            f"{key['pattern']:8} {key['method']:16} {key['mode']:6} seed {key['seed']}: "
            f"validation {row['validation']:.4f}, BLEU {row['bleu']:.1f}, {row['steps']} steps in "
            f"{row['cpu_seconds']:.0f} s of CPU", flush=True,
        )  # fmt: skip
        return row

    if not runs.run_missing(path, plan(), one, hours, ready=ready):
        print("time is up: the same command goes on from here")


def show(path: Path) -> None:
    """Tables of the means over seeds, and of paired differences with their standard errors."""
    rows = runs.read_rows(path)
    for method in METHODS:
        if (chosen := tuned(rows, method)) is not None:
            print(f"{method}: learning rate {chosen[0]:g}, {chosen[1] or 'nothing else to set'}")
    main = [row for row in rows if row["part"] == "main"]
    for pattern, mode in itertools.product(SEEDS, MODES):
        chosen_rows = {method: of_method(main, method, pattern, mode) for method in METHODS}
        if not any(by_seed for method, by_seed in chosen_rows.items() if method != "dense"):
            continue
        print(f"\n{pattern}, at equal {'steps' if mode == 'steps' else 'FFN FLOPs'}; differences from {BASELINE}'s")
        print(f"{'method':16} {'seeds':>5} {'steps':>6} {'FFN cost':>8} {'test loss':>9} {'BLEU':>5}   "
              f"{'log test loss':>18}  {'BLEU':>15}")  # fmt: skip
        for method, by_seed in chosen_rows.items():
            if by_seed:
                means = [
                    statistics.fmean(row[name] for row in by_seed.values())
                    for name in ("steps", "relative_cost", "test", "bleu")
                ]
                pairs = [(row, other) for seed, row in by_seed.items() if (other := chosen_rows[BASELINE].get(seed))]
                logs = difference([math.log(row["test"] / other["test"]) for row, other in pairs], 4)
                scores = difference([row["bleu"] - other["bleu"] for row, other in pairs], 2)
                print(
                    f"{method:16} {len(by_seed):5} {means[0]:6.0f} {means[1]:8.3f} {means[2]:9.4f} {means[3]:5.1f}   "
                    f"{logs:>18}  {scores:>15}"
                )


def difference(values: list[float], digits: int) -> str:
    """The mean of paired differences and its standard error."""
    if not values or not any(values):
        return ""
    mean = f"{statistics.fmean(values):+.{digits}f}"
    return mean if len(values) < 2 else f"{mean} +- {statistics.stdev(values) / math.sqrt(len(values)):.{digits}f}"


def of_method(rows: list[dict[str, Any]], method: str, pattern: str, mode: str) -> dict[int, dict[str, Any]]:
    """{seed: row}; dense training is the same whatever the pattern."""
    key = (method, "nm:1:16" if method == "dense" else pattern, mode)
    found = [row for row in rows if (row["method"], row["pattern"], row["mode"]) == key]
    return {row["seed"]: row for row in found if row["seed"] < SEEDS[pattern]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "show"])
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS)
    parser.add_argument("--hours", type=float, default=12.0)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.command == "show":
        show(arguments.results)
        return
    torch.set_num_threads(arguments.threads)
    torch.set_float32_matmul_precision("medium")  # bfloat16 factors where the CPU has units for them, sums in float32
    run_all(arguments.results, arguments.hours)


if __name__ == "__main__":
    main()
