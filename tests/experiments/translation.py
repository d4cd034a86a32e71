"""Which N:M training recipe is worth its FLOPs: Multi30k, German to English, a small Transformer with sparse FFNs.

    python tests/experiments/translation.py run RESULTS.jsonl [--hours 12] [--threads 2] [--only tune] [--scales 1,2]
    python tests/experiments/translation.py show RESULTS.jsonl

A Transformer of 2 + 2 layers, d 128, FFN 512, trained from scratch on words ($LATBENCH_DATA/multi30k). Its eight FFN
layers go to 1:16 (5 seeds), 1:8 and 2:4, the negative control (3 seeds each), by each method, at equal steps and at
equal training FLOPs of the FFN layers as `search.pruning.flops` counts them for transposable masks, as the papers do:
there is a kernel for the input gradient then, too (the softmax over words, dense in all, would hide the difference).
The seed fixes the weights, the order of sentences and dropout, so that methods
are compared in pairs. First each method gets the same number of trials at 1:16, judged on validation data with a seed
of their own; test data is only ever reported. BLEU is sacrebleu's, of greedy
translations in lower-cased words and marks, one reference.

Scales 0.25,0.5,1,2 repeat the comparison at four budgets.

A run is one JSON line; what is there is not run again, so the command may be stopped at any time. One run
takes at most three minutes on two cores.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
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
import torch
from sacrebleu import corpus_bleu
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from search.pruning.flops import count_forward, layer_cost, training_flop
from search.pruning.pruner import Pruner
from search.pruning.recipe import Recipe
from search.pruning.targets import Target, targets_of
from search.pruning.train import learning_rate
from sparse_kernels.patterns import NM, Unstructured, parse

PAD, START, END, UNKNOWN = range(4)
WIDTH, HIDDEN, HEADS, LAYERS = 128, 512, 4, 2
BATCH = 64
LONGEST = 40
STEPS = 1200  # of every method, at equal steps
DENSE_STEPS = 400  # FFN FLOPs of so many dense steps for every method, at equal FLOPs
TUNING_SEED = 1000
SEEDS = {"nm:1:16": 5, "nm:1:8": 3, "nm:2:4": 3}

# Each gets as many trials, of the learning rate and of what sets the method's strength.
Trials = list[tuple[float, dict[str, Any]]]
FOUR_RATES: Trials = [(rate, {}) for rate in (7e-4, 1.5e-3, 3e-3, 6e-3)]


def _grid(name: str, values: Sequence[Any]) -> Trials:
    return [(rate, {name: value}) for rate in (1.5e-3, 3e-3) for value in values]


# name: (the recipe's method, its settings, trials)
METHODS: dict[str, tuple[str | None, dict[str, Any], Trials]] = {
    "dense": (None, {}, FOUR_RATES),
    "unstructured": ("gmp", {"begin": 0.1, "initial": 0.0}, _grid("end", (0.5, 0.8))),
    "asp": ("asp", {}, _grid("dense", (0.3, 0.5))),
    "ste": ("ste", {}, FOUR_RATES),
    "sr-ste": ("sr_ste", {}, _grid("penalty", (2e-6, 2e-4))),
    "mask decay, linear": ("mask_decay", {"shape": "linear"}, _grid("final", (0.2, 0.4))),
    "mask decay, exponential": ("mask_decay", {"shape": "exponential"}, _grid("final", (0.2, 0.4))),
    "structure decay, stepwise": ("structure_decay", {"stages": "stepwise"}, _grid("final", (0.2, 0.4))),
    "structure decay, geometric": ("structure_decay", {"stages": "geometric"}, _grid("final", (0.2, 0.4))),
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.view(len(y), -1, HEADS, WIDTH // HEADS).transpose(1, 2)

        y = scaled_dot_product_attention(
            heads(self.query(x)), heads(self.key(memory)), heads(self.value(memory)), attn_mask=mask
        )
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Pre-norm attention and FFN; a decoder's looks at the memory between them."""

    def __init__(self, decoder: bool) -> None:
        super().__init__()
        self.own = Attention()
        self.cross = Attention() if decoder else None
        self.fc1, self.fc2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3 if decoder else 2))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor | None = None, seen: Tensor | None = None) -> Tensor:
        y = self.norms[0](x)
        x = x + self.dropout(self.own(y, y, mask))
        if self.cross is not None:
            assert memory is not None
            assert seen is not None
            x = x + self.dropout(self.cross(self.norms[1](x), memory, seen))
        return x + self.dropout(self.fc2(self.fc1(self.norms[-1](x)).relu()))


class Translator(nn.Module):
    """Word numbers (n, s) and (n, t) to logits (n, t, words); the output layer shares the target's embedding."""

    def __init__(self, source_words: int, target_words: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(source_words, WIDTH), nn.Embedding(target_words, WIDTH)
        for embedding in (self.source, self.target):
            nn.init.normal_(embedding.weight, std=WIDTH**-0.5)
        self.encoder = nn.ModuleList(Layer(decoder=False) for _ in range(LAYERS))
        self.decoder = nn.ModuleList(Layer(decoder=True) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.dropout = nn.Dropout(0.1)
        place, wave = torch.arange(LONGEST + 2)[:, None], torch.arange(0, WIDTH, 2)
        angle = place * torch.exp(-math.log(10_000) / WIDTH * wave)
        self.register_buffer("places", torch.stack([angle.sin(), angle.cos()], dim=2).flatten(1))

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        seen = (source != PAD)[:, None, None, :]
        x = self._embedded(self.source, source)
        for layer in self.encoder:
            x = layer(x, seen)
        return self.norms[0](x), seen

    def decode(self, target: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
        t = target.shape[1]
        past = torch.ones(t, t, dtype=torch.bool).tril()[None, None]
        x = self._embedded(self.target, target)
        for layer in self.decoder:
            x = layer(x, past, memory, seen)
        return self.norms[1](x)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.decode(target, *self.encode(source)) @ self.target.weight.T

    def _embedded(self, embedding: nn.Embedding, words: Tensor) -> Tensor:
        places = self.get_buffer("places")
        return self.dropout(math.sqrt(WIDTH) * embedding(words) + places[: words.shape[1]])


@dataclass(frozen=True)
class Data:
    """Sentences as lists of word numbers, ends included; `references` are the test set's words."""

    pairs: dict[str, list[tuple[list[int], list[int]]]]
    source_words: int
    target_words: list[str]
    references: list[str]


def read_data() -> Data:
    """All of Multi30k; words seen fewer than three times in training are one."""
    folder = Path(os.environ.get("LATBENCH_DATA", "../shared/data")) / "multi30k"
    names = {"train": "train", "val": "val", "test": "test_2016_flickr"}
    words: dict[tuple[str, str], list[list[str]]] = {}
    for part, name in names.items():
        for language in ("de", "en"):
            with gzip.open(folder / f"{name}.{language}.gz", "rt", encoding="utf-8") as file:
                lines = file.read().rstrip("\n").split("\n")
            words[part, language] = [re.findall(r"\w+|[^\w\s]", line.lower())[: LONGEST - 1] for line in lines]
    vocabularies = {}
    for language in ("de", "en"):
        counts = Counter(word for sentence in words["train", language] for word in sentence)
        vocabularies[language] = ["<pad>", "<s>", "</s>", "<unk>", *sorted(w for w, n in counts.items() if n >= 3)]
    numbers = {language: {w: i for i, w in enumerate(vocabulary)} for language, vocabulary in vocabularies.items()}
    pairs = {
        part: [
            (
                [numbers["de"].get(w, UNKNOWN) for w in source] + [END],
                [START, *(numbers["en"].get(w, UNKNOWN) for w in target), END],
            )
            for source, target in zip(words[part, "de"], words[part, "en"], strict=True)
        ]
        for part in names
    }
    return Data(
        pairs, len(vocabularies["de"]), vocabularies["en"], [" ".join(sentence) for sentence in words["test", "en"]]
    )


def batches(data: Data, rng: np.random.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless training batches of sentences of like length, in random order."""
    pairs = data.pairs["train"]
    lengths = np.array([len(source) for source, _ in pairs])
    while True:
        order = np.argsort(lengths + rng.random(len(pairs)), kind="stable")
        groups = [order[i : i + BATCH] for i in range(0, len(order), BATCH)]
        for group in rng.permutation(len(groups)):
            yield padded([pairs[i][0] for i in groups[group]]), padded([pairs[i][1] for i in groups[group]])


def padded(sentences: Sequence[list[int]]) -> Tensor:
    longest = max(map(len, sentences))
    return torch.tensor([sentence + [PAD] * (longest - len(sentence)) for sentence in sentences])


def loss(model: Translator, source: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    logits = model(source, target[:, :-1])
    return cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD, reduction=reduction)


@torch.no_grad()
def mean_loss(model: Translator, data: Data, part: str) -> float:
    """Cross-entropy a word, in nats."""
    total, words = 0.0, 0
    for start in range(0, len(data.pairs[part]), 128):
        chosen = data.pairs[part][start : start + 128]
        source, target = padded([s for s, _ in chosen]), padded([t for _, t in chosen])
        total += loss(model, source, target, "sum").item()
        words += int((target[:, 1:] != PAD).sum())
    return total / words


@torch.no_grad()
def translations(model: Translator, data: Data) -> list[str]:
    """Greedy, of the test set; what has ended is decoded no further."""
    found: list[list[str]] = [[] for _ in data.pairs["test"]]
    for start in range(0, len(found), 250):
        memory, seen = model.encode(padded([s for s, _ in data.pairs["test"][start : start + 250]]))
        target = torch.full((len(memory), 1), START)
        going = torch.arange(start, start + len(memory))
        for _ in range(LONGEST):
            words = (model.decode(target, memory, seen)[:, -1] @ model.target.weight.T).argmax(dim=1)
            left = words != END
            target = torch.cat([target, words[:, None]], dim=1)[left]
            memory, seen, going = memory[left], seen[left], going[left]
            for sentence, word in zip(going.tolist(), words[left].tolist(), strict=True):
                found[sentence].append(data.target_words[word])
            if not len(going):
                break
    return [" ".join(words) for words in found]


def target_of(method: str, pattern: str) -> Target:
    nm = parse(pattern)
    sparsity: float = nm.sparsity  # type: ignore[union-attr]
    return Target(Unstructured(), sparsity) if method == "unstructured" else Target(nm, sparsity)


def counted_as(target: Target) -> Target:
    """The target whose FLOPs count."""
    return replace(target, along="both") if isinstance(target.pattern, NM) else target


def steps_of(pruner: Pruner | None, target: Target, mode: str, scale: float) -> int:
    """How many steps a mode allows: STEPS, or as many as the FFN FLOPs of DENSE_STEPS dense ones pay for; scaled."""
    if mode == "steps":
        return round(scale * STEPS)
    cost = 1.0 if pruner is None else layer_cost(pruner, counted_as(target), STEPS).total / 3
    return round(scale * DENSE_STEPS / cost)


def run(data: Data, key: dict[str, Any], rate: float, settings: dict[str, Any]) -> dict[str, Any]:
    """Train and judge one model."""
    name, fixed, _ = METHODS[key["method"]]
    recipe = Recipe(
        method=name or "gmp", settings={**fixed, **settings}, learning_rate=rate, steps=STEPS, warmup=100,
        clip_norm=1.0, seed=key["seed"],
    )  # fmt: skip
    pruner = None if name is None else recipe.pruner()
    target = target_of(key["method"], key["pattern"])
    steps = steps_of(pruner, target, key["mode"], key["scale"])
    recipe = Recipe(**{**recipe.facts(), "steps": steps})
    started = time.monotonic()
    torch.manual_seed(key["seed"])
    model = Translator(data.source_words, len(data.target_words))
    ffns = [n for n, m in model.named_modules() if n.endswith(("fc1", "fc2"))]
    targets = targets_of(dict.fromkeys(ffns, target), model)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(recipe, step))
    stream = batches(data, np.random.default_rng(key["seed"]))
    if pruner is not None:
        pruner.prepare(model, targets, total_steps=steps)
    model.train()
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
    model.eval()
    counted = count_forward(model, lambda: model(source, words))
    ffn = {layer: counted[layer] for layer in ffns}
    spent, dense = (
        training_flop(p, dict.fromkeys(targets, counted_as(target)), ffn, steps).total for p in (pruner, None)
    )
    kept = [float((model.get_submodule(layer).weight != 0).double().mean()) for layer in ffns]
    return {
        **key, "learning_rate": rate, "settings": settings, "steps": steps,
        "validation": mean_loss(model, data, "val"), "test": mean_loss(model, data, "test"),
        "bleu": corpus_bleu(translations(model, data), [data.references], tokenize="none", force=True).score,
        "density": statistics.fmean(kept),
        "relative_cost": spent / dense, "dense_steps": steps * spent / dense, "seconds": time.monotonic() - started,
    }  # fmt: skip


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The finished runs; a line that was cut off is none."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def tuned(rows: list[dict[str, Any]], method: str) -> tuple[float, dict[str, Any]]:
    """The trial with the least validation loss."""
    trials = [row for row in rows if row["part"] == "tune" and row["method"] == method]
    best = min(trials, key=lambda row: row["validation"])
    return best["learning_rate"], best["settings"]


def plan(part: str, scales: Sequence[float]) -> Iterator[tuple[dict[str, Any], int | None]]:
    """(key of a run, the trial it makes), in order."""
    if part == "tune":
        for method, (_, _, trials) in METHODS.items():
            for trial in range(len(trials)):
                yield {"part": "tune", "pattern": "nm:1:16", "method": method, "mode": "steps",
                       "seed": TUNING_SEED, "trial": trial, "scale": 1.0}, trial  # fmt: skip
        return
    for scale, (pattern, seeds) in itertools.product(scales, SEEDS.items()):
        for seed, mode, method in itertools.product(range(seeds), ("steps", "flop"), METHODS):
            if method == "dense" and pattern != "nm:1:16":
                continue  # the same for all patterns
            yield {"part": "main", "pattern": pattern, "method": method, "mode": mode, "seed": seed,
                   "trial": None, "scale": scale}, None  # fmt: skip


def run_all(path: Path, hours: float, parts: Sequence[str], scales: Sequence[float]) -> None:
    data = read_data()
    until = time.monotonic() + 3600 * hours
    for part in parts:
        for key, trial in plan(part, scales):
            rows = read_rows(path)
            if any(all(row.get(name) == value for name, value in key.items()) for row in rows):
                continue
            if time.monotonic() > until:
                print("time is up: the same command goes on from here")
                return
            rate, settings = METHODS[key["method"]][2][trial] if trial is not None else tuned(rows, key["method"])
            row = run(data, key, rate, settings)
            with path.open("a+", encoding="utf-8") as file:
                file.seek(0, os.SEEK_END)
                whole = file.tell() == 0 or path.read_bytes().endswith(b"\n")
                file.write(("" if whole else "\n") + json.dumps(row) + "\n")
            print(
                f"{key['pattern']:8} {key['method']:28} {key['mode']:6} seed {key['seed']}: test {row['test']:.4f}, "
                f"BLEU {row['bleu']:.1f}, {row['steps']} steps in {row['seconds']:.0f} s", flush=True,
            )  # fmt: skip


def show(path: Path) -> None:
    """Means over seeds, and the paired difference of log cross-entropy against SR-STE with its standard error."""
    rows = [row for row in read_rows(path) if row["part"] == "main"]
    for scale in sorted({row["scale"] for row in rows}):
        for pattern, mode in itertools.product(SEEDS, ("steps", "flop")):
            print(f"\n{pattern}, budget x {scale:g}, at equal {'steps' if mode == 'steps' else 'FFN FLOPs'}")
            print(f"{'method':28} {'steps':>6} {'FFN cost':>9} {'test':>8} {'BLEU':>6}  log test - log SR-STE's")
            chosen = {method: of_method(rows, method, pattern, mode, scale) for method in METHODS}
            for method, by_seed in chosen.items():
                if not by_seed:
                    continue
                steps, cost, test, score = (
                    statistics.fmean(row[name] for row in by_seed.values())
                    for name in ("steps", "relative_cost", "test", "bleu")
                )
                logs = [
                    math.log(row["test"]) - math.log(chosen["sr-ste"][seed]["test"])
                    for seed, row in by_seed.items()
                    if seed in chosen["sr-ste"]
                ]
                error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
                gap = f"{statistics.fmean(logs):+.4f} +- {error:.4f} ({len(logs)} seeds)" if logs else ""
                print(f"{method:28} {steps:6.0f} {cost:9.3f} {test:8.4f} {score:6.2f}  {gap}")


def of_method(
    rows: list[dict[str, Any]], method: str, pattern: str, mode: str, scale: float
) -> dict[int, dict[str, Any]]:
    """{seed: row}; dense training is the same whatever the pattern."""
    key = (method, "nm:1:16" if method == "dense" else pattern, mode, scale)
    found = [row for row in rows if (row["method"], row["pattern"], row["mode"], row["scale"]) == key]
    return {row["seed"]: row for row in found if row["seed"] < SEEDS[pattern]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("command", choices=["run", "show"])
    parser.add_argument("results", type=Path)
    parser.add_argument("--hours", type=float, default=12.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--scales", default="1", help="budgets, as multiples of the standard one")
    parser.add_argument("--only", choices=["tune", "main"])
    arguments = parser.parse_args()
    if arguments.command == "show":
        show(arguments.results)
        return
    torch.set_num_threads(arguments.threads)
    scales = [float(scale) for scale in arguments.scales.split(",")]
    run_all(arguments.results, arguments.hours, [arguments.only] if arguments.only else ["tune", "main"], scales)


if __name__ == "__main__":
    main()
