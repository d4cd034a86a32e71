"""What accuracy is left at a measured speedup: ResNet20 on CIFAR-10, one-shot and after equal training.

    python tests/experiments/finetuning.py search FOLDER --table TABLE --model MODEL [--threads N]
    python tests/experiments/finetuning.py run FOLDER [--hours 6] [--only "searched 2x"]
    python tests/experiments/finetuning.py show FOLDER

`search` (on a quiet machine; TABLE and MODEL are those of `latbench sweep` and `latbench fit` for this task) writes
profiles whose speedups were measured end to end on this CPU: the searched one and the uniform one at 2x, which share
the layer database, and for each of the patterns by itself at several speedups. A speedup that a pattern cannot reach
is a line that says so. `run` prunes each 2x profile by every one-shot method (layer by layer, then batch norms), and
trains every profile by every gradual method from the dense weights: STEPS steps of BATCH images out of 20,000, with
the same rates for all. `show` prints the tables and writes FOLDER/accuracy.csv: pattern, method, speedup (as
measured), accuracy, seed; that file is what `latbench report` charts.

Each result is one line of FOLDER/results.jsonl; what is there is not run again, so that every command may be stopped
at any time. The accuracies are of 1,000 test images: a standard error of about one percent.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from latbench import devices, places
from latbench.errors import PromiseMissed
from search import job, profile
from search import task as tasks
from search.profile import Profile
from search.pruning.batchnorm import tune_batchnorm
from search.pruning.build import METHODS
from search.pruning.hessian import input_hessians
from search.pruning.recipe import Recipe
from search.pruning.train import train
from sparse_kernels.nn import set_weight_matrix, weight_matrix
from sparse_kernels.patterns import Dense, parse

RESNET20 = Path(__file__).parents[1] / "tasks" / "resnet20.py"
# Name: (strategy, patterns beside dense (None: all in the table), the speedup to promise).
PROFILES: dict[str, tuple[str, tuple[str, ...] | None, float]] = {
    "searched 2x": ("staged", None, 2.0),
    "uniform 2x": ("uniform", None, 2.0),
    **{
        f"{pattern} {speedup:g}x": ("staged", (pattern,), speedup)
        for pattern in ("unstructured", "block:8x4", "vector:8", "shflbw:32")
        for speedup in (1.25, 1.5, 2.0, 2.5)
    },
}
COMPARED = ("searched 2x", "uniform 2x")  # by every one-shot method, and by every gradual one with several seeds
# What trains: (the recipe's method, its settings).
GRADUAL: dict[str, tuple[str, dict[str, Any]]] = {
    "GMP": ("gmp", {"end": 0.6}),
    "AC/DC": ("acdc", {}),
    "M-FAC": ("gmp", {"end": 0.6, "score": "mfac"}),
}
STEPS = 780  # of 128 images: five times through 20,000
SEEDS = 3


def recipe(method: str, seed: int) -> Recipe:
    name, settings = GRADUAL[method]
    return Recipe(
        method=name, settings=settings, steps=STEPS, learning_rate=0.02, optimizer="sgd", momentum=0.9,
        weight_decay=1e-4, warmup=20, seed=seed,
    )  # fmt: skip


def search(folder: Path, table: str, model: Path, threads: int) -> None:
    """Write the profiles that are not there yet."""
    inputs = job.read_inputs(tasks.load(str(RESNET20)), places.at(table), model, folder / "database", method="obs")
    for name, (strategy, patterns, target) in PROFILES.items():
        path = folder / f"{name.replace(' ', '_').replace(':', '-')}.json"
        refused = path.with_suffix(".refused")
        if path.exists() or refused.exists():
            continue
        patterns = patterns and ("dense", *patterns)
        settings = job.Settings(
            target, threads, patterns=patterns, strategy=strategy, evaluations=100, batches=4, processes=threads
        )
        try:
            found = job.search(inputs, settings)
        except PromiseMissed as error:  # Infeasible is one of them
            refused.write_text(f"{error}\n")
            print(f"{name}: {error}", flush=True)
            continue
        found.save(path)
        print(f"{name}: {found.speedup[0]:.2f}x, loss {found.loss:.3f}", flush=True)


def found(folder: Path) -> dict[str, Profile]:
    """The profiles that are there, by name."""
    files = {name: folder / f"{name.replace(' ', '_').replace(':', '-')}.json" for name in PROFILES}
    return {name: profile.load(path) for name, path in files.items() if path.exists()}


def plan(names: list[str]) -> Iterator[dict[str, Any]]:
    """Keys of all results, what the issue of one-shot against gradual needs first."""
    compared = [name for name in names if name in COMPARED]
    yield from ({"profile": name, "method": method, "seed": 0} for name in compared for method in METHODS)
    for seed in range(SEEDS):
        yield from ({"profile": name, "method": method, "seed": seed} for name in compared for method in GRADUAL)
    yield from ({"profile": name, "method": "GMP", "seed": 0} for name in names if name not in COMPARED)


def one_shot(task: tasks.Task, chosen: Profile, method: str) -> nn.Module:
    """Every layer by itself, then the batch norms."""
    model = task.model()
    modules = dict(model.named_modules())
    sparse = {name: choice for name, choice in chosen.layers.items() if not isinstance(parse(choice.pattern), Dense)}
    weights = {}
    for name, hessian in input_hessians(task, model, list(sparse), task.calibration()):
        problem = METHODS[method](weight_matrix(modules[name]).contiguous(), hessian)
        weights[name] = problem.prune(parse(sparse[name].pattern), sparse[name].sparsity).weight
    for name, weight in weights.items():
        set_weight_matrix(modules[name], weight)
    tune_batchnorm(task, model, task.calibration())
    return model


def run(folder: Path, hours: float, only: str | None) -> None:
    """Add the results that are missing, while there is time."""
    path = folder / "results.jsonl"
    done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    task, profiles = tasks.load(str(RESNET20)), found(folder)
    dense = task.score(task.model())
    end = time.monotonic() + 3600 * hours
    for key in plan(list(profiles)):
        if any(key.items() <= row.items() for row in done) or only not in (None, key["profile"]):
            continue
        if time.monotonic() > end:
            print(f"{hours:g} hours are over; the same command goes on")
            return
        chosen, started, facts = profiles[key["profile"]], time.monotonic(), {}
        if key["method"] in METHODS:
            model = one_shot(task, chosen, key["method"])
        else:
            model = task.model()
            facts = train(task, model, chosen, recipe(key["method"], key["seed"])).facts()
        row = {
            **key, "pattern": pattern_of(chosen), "speedup": chosen.speedup[0], "speedup_low": chosen.speedup[1],
            "accuracy": task.score(model), "dense_accuracy": dense, "seconds": time.monotonic() - started, **facts,
        }  # fmt: skip
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{key['profile']:20} {key['method']:10} seed {key['seed']}: {row['accuracy']:.3f}", flush=True)


def pattern_of(chosen: Profile) -> str:
    """The pattern that the profile's sparse layers share, or "mixed"."""
    patterns = {choice.pattern for choice in chosen.layers.values()} - {"dense"}
    return patterns.pop() if len(patterns) == 1 else "mixed"


def show(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    print(f"dense {rows[0]['dense_accuracy']:.1%}; {STEPS} steps of training; means of seeds with their range")
    methods = [*METHODS, *GRADUAL]
    print(f"{'profile':20} {'measured':>8} " + " ".join(f"{method:>18}" for method in methods))
    for name in PROFILES:
        own = [row for row in rows if row["profile"] == name]
        if own:
            cells = (range_of([row["accuracy"] for row in own if row["method"] == method]) for method in methods)
            print(f"{name:20} {own[0]['speedup']:7.2f}x " + " ".join(f"{cell:>18}" for cell in cells))
    for refused in sorted(folder.glob("*.refused")):
        print(f"{refused.stem}: {refused.read_text().strip()}")
    with (folder / "accuracy.csv").open("w", newline="") as file:
        names = ("profile", "pattern", "method", "speedup", "accuracy", "seed")
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def range_of(values: list[float]) -> str:
    if not values:
        return ""
    mean = f"{statistics.fmean(values):.1%}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.1%}-{max(values):.1%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("search", "run", "show"):
        commands.add_parser(name).add_argument("folder", type=Path)
    searching, running = commands.choices["search"], commands.choices["run"]
    searching.add_argument("--table", required=True)
    searching.add_argument("--model", type=Path, required=True)
    searching.add_argument("--threads", type=int, default=devices.cores())
    running.add_argument("--hours", type=float, default=6.0)
    running.add_argument("--only", choices=list(PROFILES))
    arguments = parser.parse_args()
    match arguments.command:
        case "search":
            arguments.folder.mkdir(parents=True, exist_ok=True)
            search(arguments.folder, arguments.table, arguments.model, arguments.threads)
        case "run":
            run(arguments.folder, arguments.hours, arguments.only)
        case "show":
            show(arguments.folder)


if __name__ == "__main__":
    main()
