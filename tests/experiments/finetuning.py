"""What accuracy is left at a measured speedup: ResNet20 on CIFAR-10, one-shot and after equal training.

    python tests/experiments/finetuning.py build --table TABLE --cost-model MODEL --database FOLDER
    python tests/experiments/finetuning.py time --table TABLE --cost-model MODEL --database FOLDER [--minutes 60]
    python tests/experiments/finetuning.py train [--hours 6] [--threads 1]
    python tests/experiments/finetuning.py show [--csv accuracy.csv]

TABLE and MODEL are those of `latbench sweep` and `latbench fit` for this task. `build` prunes every layer to every
option of the table into the database; only `time` needs a quiet machine. It searches profiles whose speedups are
measured end to end, at all of SPEEDUPS: of all patterns together ("searched"), of one pattern and sparsity for all
layers ("uniform"), and of each pattern by itself. A speedup that is out of reach is a line that says so; it is tried
again once its .refused is deleted, with another `--confidence` perhaps. `train` prunes the searched and the uniform
profiles by every one-shot method (layer by layer, then batch norms), and trains every profile from the dense weights:
STEPS steps of 128 of 20,000 images, with the same rates for all: the searched and uniform ones by GMP, AC/DC and
M-FAC, those of one pattern by GMP and by mask decay, which fades whole vectors and blocks. It times nothing, and
several of it may run at once. `show` prints the tables; its file is what `latbench report --accuracy` charts.

A uniform profile is mostly faster than was asked, as there are few of them. So that a searched one is compared with
it at equal measured time, its accuracy is set against the line between the uniform ones just slower and faster, each
after the same training; what lies outside them is not compared.

Everything goes into `--results`, by default results/ beside this file: profiles into finetuning/, the rest into
finetuning.jsonl, a line a result. What is there is not made again, so that every command may be stopped at any time.
The accuracies are of 1,000 test images: a standard error of about one percent.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import runs
import torch
from runs import Row
from torch import nn

from latbench.errors import PromiseMissed
from latbench.machines.devices import name_cpu
from latbench.machines.processors import count_cores
from latbench.tables.storage import parse_place
from search.artifacts.layer_database import Database
from search.artifacts.profile import Profile, read_profile
from search.deployment import Deployment
from search.loss.parallel import Workers
from search.pipeline import search_job, search_request
from search.pipeline.search_request import CandidateOptions, Promise, SearchInputs, SearchPlan, SearchRequest
from search.pipeline.search_setup import build_layers
from search.pruning.one_shot.batchnorm import tune_batchnorm
from search.pruning.one_shot.fill_database import ONE_SHOT_METHODS, fill_database
from search.pruning.one_shot.global_adaprune import run_global_adaprune
from search.pruning.one_shot.hessian import compute_input_hessians
from search.pruning.training.recipe import Recipe
from search.pruning.training.train import train
from search.task import Task, load_task
from search.traced_layers import list_prunable_layers
from sparse_kernels.patterns import Dense, parse
from sparse_kernels.prunable_layers import set_weight_matrix, weight_matrix

RESULTS = Path(__file__).parent / "results"
RESNET20 = Path(__file__).parents[1] / "tasks" / "resnet20.py"
DATABASE_METHOD = "obs"
SPEEDUPS = (2.0, 1.75, 1.5, 1.25)
# Of both strategies, whatever the pattern; then of one pattern each: (strategy, patterns beside dense, None: all).
COMPARED: dict[str, tuple[str, tuple[str, ...] | None]] = {"searched": ("staged", None), "uniform": ("uniform", None)}
ALONE: dict[str, tuple[str, tuple[str, ...] | None]] = {
    pattern: ("staged", (pattern,)) for pattern in ("unstructured", "block:8x4", "vector:8", "shflbw:32")
}
JOINT = "obs, then all together"
ONE_SHOT = (*(method for method in ONE_SHOT_METHODS if method != "auto"), JOINT)
# What trains: (the recipe's method, its settings).
GRADUAL: dict[str, tuple[str, dict[str, Any]]] = {
    "GMP": ("gmp", {"end": 0.6}),
    "AC/DC": ("acdc", {}),
    "M-FAC": ("gmp", {"end": 0.6, "score": "mfac"}),
}
# N:M training's idea on whole vectors, beside GMP where one pattern is alone.
DECAY = "mask decay"
GRADUAL_ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "GMP": GRADUAL["GMP"],
    DECAY: ("mask_decay", {"shape": "exponential", "final": 0.4}),
}
STEPS = 312  # of 128 images: twice through 20,000
SEEDS = 3


def recipe(method: str, seed: int, steps: int) -> Recipe:
    name, settings = {**GRADUAL, **GRADUAL_ALONE}[method]
    return Recipe(
        method=name, settings=settings, steps=steps, learning_rate=0.02, optimizer="sgd", momentum=0.9,
        weight_decay=1e-4, warmup=min(20, steps), seed=seed,
    )  # fmt: skip


def read_inputs(arguments: argparse.Namespace) -> SearchInputs:
    task = load_task(str(RESNET20))
    return search_request.read_inputs(
        task, parse_place(arguments.table), arguments.cost_model, arguments.database, method=DATABASE_METHOD
    )


def build(inputs: SearchInputs, threads: int) -> None:
    """Prune all layers to all options of the table, so that `time` need not."""
    shapes = list_prunable_layers(inputs.task, inputs.model)
    layers = build_layers(inputs, Deployment(threads), CandidateOptions(), Promise(2.0).coverage, shapes)
    options = {layer.name: list(layer.options) for layer in layers}
    database = Database(inputs.database, inputs.model_hash, inputs.provenance)

    def progress(done: int, total: int) -> None:
        print(f"\r{done} of {total} options", end="", flush=True)

    fill_database(inputs.task, inputs.model, options, database, progress, method=inputs.method)
    print()


def search_all(
    inputs: SearchInputs, results: Path, threads: int, minutes: float, evaluations: int, confidence: float
) -> None:
    """Write the profiles that are not there yet, and begin none when the minutes are over."""
    folder = results / "finetuning"
    folder.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * minutes

    def refused(kind: str, speedup: float) -> Path:
        return profile_path(results, kind, speedup).with_suffix(".refused")

    def searched(kind: str, speedup: float) -> bool | None:
        """Whether there is a profile; None when time is up."""
        path = profile_path(results, kind, speedup)
        if path.exists() or refused(kind, speedup).exists():
            return path.exists()
        if time.monotonic() > until:
            return None
        strategy, patterns = {**COMPARED, **ALONE}[kind]
        request = SearchRequest(
            Promise(speedup, confidence),
            Deployment(threads),
            CandidateOptions(patterns and ("dense", *patterns)),
            SearchPlan(strategy, evaluations=evaluations, batches=4),
            Workers(threads),
        )
        started = time.monotonic()
        try:
            found = search_job.search(inputs, request)
        except PromiseMissed as error:  # Infeasible is one of them
            refused(kind, speedup).write_text(f"{error}\n")
            print(f"{path.stem}: {error} ({time.monotonic() - started:.0f} s)", flush=True)
            return False
        found.save(path)
        print(
            f"{path.stem}: {found.speedup[0]:.2f}x, loss {found.loss:.3f} ({time.monotonic() - started:.0f} s)",
            flush=True,
        )
        return True

    there = {speedup: searched("searched", speedup) for speedup in SPEEDUPS}
    # What all patterns together do not reach, none does alone.
    others = [
        searched(kind, speedup)
        for kind in ("uniform", *ALONE)
        for speedup, reached in there.items()
        if reached is not False
    ]
    if None in [*there.values(), *others]:
        print("time is up: the same command goes on from here")


def profile_path(results: Path, kind: str, speedup: float) -> Path:
    return results / "finetuning" / f"{kind.replace(':', '-')}_{speedup:g}x.json"


def found(results: Path) -> dict[str, Profile]:
    """The profiles that are there, by name: the compared ones, then those of one pattern."""
    files = {
        f"{kind} {speedup:g}x": profile_path(results, kind, speedup)
        for kinds in (COMPARED, ALONE)
        for speedup in SPEEDUPS
        for kind in kinds
    }
    return {name: read_profile(path) for name, path in files.items() if path.exists()}


def plan(names: Sequence[str], steps: int) -> list[Row]:
    """Keys of all results: one-shot methods, then training; a seed of everything before the next."""
    compared = [name for name in names if name.split()[0] in COMPARED]
    keys: list[Row] = [
        {"profile": name, "method": method, "seed": 0, "steps": 0} for name in compared for method in ONE_SHOT
    ]

    def trained(of: Sequence[str], methods: Sequence[str], seed: int) -> list[Row]:
        return [
            {"profile": name, "method": method, "seed": seed, "steps": steps} for name in of for method in methods
        ]

    keys += trained(compared, list(GRADUAL), 0)
    keys += trained([name for name in names if name not in compared], list(GRADUAL_ALONE), 0)
    for seed in range(1, SEEDS):
        keys += trained(compared, list(GRADUAL), seed)
    return keys


def one_shot(task: Task, chosen: Profile, method: str) -> nn.Module:
    """Every layer by itself, then, of one method, all together; then the batch norms."""
    model = task.model()
    modules = dict(model.named_modules())
    sparse = {name: choice for name, choice in chosen.layers.items() if not isinstance(parse(choice.pattern), Dense)}
    pruned = {}
    for name, hessian in compute_input_hessians(task, model, list(sparse), task.calibration()):
        problem = ONE_SHOT_METHODS["obs" if method == JOINT else method](
            weight_matrix(modules[name]).contiguous(), hessian
        )
        pruned[name] = problem.prune(parse(sparse[name].pattern), sparse[name].sparsity)
    for name, layer in pruned.items():
        set_weight_matrix(modules[name], layer.weight)
    if method == JOINT:
        masks = {name: layer.mask for name, layer in pruned.items()}
        run_global_adaprune(task, model, masks, task.calibration())
    tune_batchnorm(task, model, task.calibration())
    return model


def train_all(results: Path, hours: float, steps: int) -> None:
    """Add the results that are missing, while there is time."""
    task, profiles = load_task(str(RESNET20)), found(results)
    dense = task.score(task.model())

    def one(key: Row, rows: list[Row]) -> Row:
        chosen, started, facts = profiles[key["profile"]], time.process_time(), {}
        if key["method"] in ONE_SHOT:
            model = one_shot(task, chosen, key["method"])
        else:
            # The order in which convolutions sum, alone: steps of 0.42 s for 0.56 s on one core.
            model = task.model().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            facts = train(task, model, chosen, recipe(key["method"], key["seed"], steps)).to_dict()
        low, high = chosen.speedup[1:]
        row = {
            **key, "pattern": pattern_of(chosen), "speedup": chosen.speedup[0], "speedup_low": low,
            "speedup_high": high, "accuracy": task.score(model), "dense_accuracy": dense,
            "cpu_seconds": time.process_time() - started, "timed_on": chosen.device, "cpu": name_cpu(),
            "threads": torch.get_num_threads(), "torch": torch.__version__, **facts,
        }  # fmt: skip
        print(
            f"{key['profile']:20} {key['method']:22} seed {key['seed']}: {row['accuracy']:.3f} in "
            f"{row['cpu_seconds']:.0f} s of CPU", flush=True,
        )  # fmt: skip
        return row

    if not runs.run_missing(results / "finetuning.jsonl", plan(list(profiles), steps), one, hours):
        print("time is up: the same command goes on from here")


def pattern_of(chosen: Profile) -> str:
    """The pattern that the profile's sparse layers share, or "mixed"."""
    patterns = {choice.pattern for choice in chosen.layers.values()} - {"dense"}
    return patterns.pop() if len(patterns) == 1 else "mixed"


def show(results: Path, file: Path | None) -> None:
    rows = runs.read_rows(results / "finetuning.jsonl")
    if not rows:
        print(f"{results / 'finetuning.jsonl'} holds no result yet: `train` adds them")
    names = list(dict.fromkeys(row["profile"] for row in rows))
    for methods in (ONE_SHOT, tuple({**GRADUAL, **GRADUAL_ALONE})):
        chosen = [row for row in rows if row["method"] in methods]
        if not chosen:
            continue
        steps = max(row["steps"] for row in chosen)
        print(f"{f'after {steps} steps' if steps else 'one-shot'}; dense {chosen[0]['dense_accuracy']:.1%}; "
              "means of seeds with their range")  # fmt: skip
        print(f"{'profile':20} {'measured':>8} " + " ".join(f"{method:>22}" for method in methods))
        for name in names:
            own = [row for row in chosen if row["profile"] == name]
            if own:
                cells = (range_of([row["accuracy"] for row in own if row["method"] == method]) for method in methods)
                print(f"{name:20} {own[0]['speedup']:7.2f}x " + " ".join(f"{cell:>22}" for cell in cells))
        for method in methods:
            costs = [row["total"] / row["dense_total"] for row in chosen if row["method"] == method and row["steps"]]
            if costs:
                print(f"{method}: {min(costs):.0%} to {max(costs):.0%} of dense training's FLOP")
        for method in methods:
            if gaps := against_uniform(chosen, method):
                error = f" +- {statistics.stdev(gaps) / math.sqrt(len(gaps)):.1%}" if len(gaps) > 1 else ""
                print(
                    f"{method}: searched over uniform at equal time {statistics.fmean(gaps):+.1%}{error} "
                    f"({len(gaps)} paired)"
                )
        print()
    for path in sorted((results / "finetuning").glob("*.refused")):
        print(f"{path.stem}: {path.read_text().strip()}")
    if file is not None and rows:
        columns = ("pattern", "method", "speedup", "accuracy", "seed")
        dense = dict(zip(columns, ("dense", "dense", 1.0, rows[0]["dense_accuracy"], 0), strict=True))
        with file.open("w", newline="") as opened:
            writer = csv.DictWriter(opened, columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows([dense, *({**row, "pattern": row["profile"].split()[0]} for row in rows)])


def against_uniform(rows: Sequence[Row], method: str) -> list[float]:
    """By how much a searched profile's accuracy is above what a uniform one has at the same measured speedup, by the
    line between those just slower and just faster of the same seed; without searched ones that have none on a side.
    """
    gaps = []
    of_method = [row for row in rows if row["method"] == method]
    for row in of_method:
        uniform = sorted(
            (one["speedup"], one["accuracy"])
            for one in of_method
            if one["profile"].startswith("uniform") and one["seed"] == row["seed"]
        )
        speedups = [speedup for speedup, _ in uniform]
        if row["profile"].startswith("searched") and uniform and speedups[0] <= row["speedup"] <= speedups[-1]:
            accuracies = [accuracy for _, accuracy in uniform]
            gaps.append(row["accuracy"] - float(np.interp(row["speedup"], speedups, accuracies)))
    return gaps


def range_of(values: Sequence[float]) -> str:
    if not values:
        return ""
    mean = f"{statistics.fmean(values):.1%}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.1%}-{max(values):.1%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("build", "time", "train", "show"):
        command = commands.add_parser(name)
        command.add_argument("--results", type=Path, default=RESULTS)
        if name in ("build", "time"):
            command.add_argument("--table", required=True)
            command.add_argument("--cost-model", type=Path, required=True)
            command.add_argument("--database", type=Path, required=True)
            command.add_argument("--threads", type=int, default=count_cores(), help="of the table")
    commands.choices["time"].add_argument("--minutes", type=float, default=60.0)
    commands.choices["time"].add_argument("--evaluations", type=int, default=60)
    commands.choices["time"].add_argument("--confidence", type=float, default=0.9, help="as of `latbench search`")
    commands.choices["train"].add_argument("--hours", type=float, default=6.0)
    commands.choices["train"].add_argument("--threads", type=int, default=1)
    commands.choices["train"].add_argument("--steps", type=int, default=STEPS)
    commands.choices["show"].add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    match arguments.command:
        case "build":
            build(read_inputs(arguments), arguments.threads)
        case "time":
            search_all(
                read_inputs(arguments), arguments.results, arguments.threads, arguments.minutes,
                arguments.evaluations, arguments.confidence,
            )  # fmt: skip
        case "train":
            torch.set_num_threads(arguments.threads)
            train_all(arguments.results, arguments.hours, arguments.steps)
        case "show":
            show(arguments.results, arguments.csv)


if __name__ == "__main__":
    main()
