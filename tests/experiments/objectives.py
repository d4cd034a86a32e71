"""What a search should minimize: which cheap measure of a profile predicts its score after training?

    python tests/experiments/objectives.py draw TASK --job FOLDER --target 2 [--profiles 24]
    python tests/experiments/objectives.py train TASK --job FOLDER --target 2 [--steps 300] [--hours 1] [--threads 1]
    python tests/experiments/objectives.py show [TASK]

FOLDER is that of a `latbench run TASK`: its table, cost model, pruned layers and timings of whole models are used.
`draw` makes profiles of equal predicted time (TIME_SHARE of the budget at least). A third comes from the published
prior with random coefficients, a third from measured errors with random factors. The others are some that the staged
search tried, from its best to its worst. It computes the cheap measures of each:

    errors     the sum of the relative errors of the layers' outputs
    fisher     the squared changes of the weights, weighted by squared gradients of the dense model's loss
    alone      the sum of what each layer adds to the loss if only that layer is pruned
    loss       the calibration loss of the one-shot pruned model, which `latbench search` minimizes

`train` adds the score of each profile after METHODS: one-shot pruning alone; SHORT or --steps steps of distillation
under the one-shot masks; and GMP from the dense weights by the task's own loss. `show` prints Spearman's rank
correlations with a bootstrap interval, also among the half of the profiles with the least loss, and those of the
one-shot model's distance from the dense outputs. Results are kept as data. What is there is not done again, and
several `train` may run at once.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import runs
import torch
from runs import Row
from scipy.stats import spearmanr
from torch import nn

from latbench.cli.job.job_steps import QUICK_OPTION_SPARSITIES
from latbench.machines.devices import name_cpu
from latbench.machines.processors import count_cores
from latbench.tables.storage import parse_place
from search.artifacts.layer_database import Database
from search.deployment import Deployment
from search.knapsack.arrays import Choice, Floats
from search.loss.parallel import ParallelEvaluator, Workers
from search.pipeline.search_request import (
    CandidateOptions,
    Promise,
    SearchInputs,
    SearchPlan,
    SearchRequest,
    read_inputs,
)
from search.pipeline.search_setup import set_up_search
from search.problem.calibration import ignore_intervals
from search.problem.layers import Option
from search.problem.problem import Problem
from search.pruning.one_shot.stitch import stitch
from search.pruning.prune_model import tune_norms
from search.pruning.training.auto_recipe import draw_fresh_batches
from search.pruning.training.dense_teacher import OUTPUTS, DenseTeacher
from search.pruning.training.recipe import Recipe
from search.pruning.training.train import train
from search.strategies.evaluation_budget import ProfileEvaluator
from search.strategies.run_strategy import StrategySettings, build_quadratic_priors, run_strategy
from search.task import Task, load_task
from search.whole_model.end_to_end import ModelTimer
from sparse_kernels.prunable_layers import as_weight

RESULTS = Path(__file__).parent / "results"
TIME_SHARE = 0.98
EVALUATIONS = 100
SHORT = 30
FRESH_BATCHES = 8
"""Training batches for the distance from the dense model, which no training sees in this order."""

MEASURES = ("errors", "fisher", "alone", "loss")
UNTRAINED, SHORTLY, DISTILLED, BY_GMP = "one-shot", "distilled shortly", "distilled", "GMP"
METHODS = (UNTRAINED, SHORTLY, DISTILLED, BY_GMP)
RATES = {"resnet20": 3e-3, "minilm": 5e-4}
"""Adam's learning rates of distillation, near those that `--recipe auto` takes; 1e-3 for other tasks."""


def draw(inputs: SearchInputs, target: float, count: int, path: Path) -> None:
    """Write profiles of equal predicted time with their cheap measures."""
    if path.exists():
        raise SystemExit(f"{path} holds profiles, whose scores would not fit to others: delete both to draw anew")
    problem, parallel = set_up(inputs, target, SearchPlan(evaluations=EVALUATIONS, quick=True))
    with parallel as evaluator:
        choices = draw_choices(problem, target, count, evaluator)
        measured = measure(problem, choices, evaluator, inputs)
    records = []
    for choice, measures in zip(choices, measured, strict=True):
        options = {layer.name: layer.options[j] for layer, j in zip(problem.layers, choice, strict=True)}
        records.append({
            "options": {name: [it.pattern, it.sparsity, it.precision] for name, it in options.items()},
            "seconds": problem.predict(choice).value, **measures,
        })  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"target": target, "cpu": name_cpu(), "profiles": records}, indent=1) + "\n")


def set_up(inputs: SearchInputs, target: float, plan: SearchPlan) -> tuple[Problem, ParallelEvaluator]:
    """Prune the options of a job's table; return the problem by predicted times, and what evaluates its profiles."""
    candidates = CandidateOptions(sparsities=QUICK_OPTION_SPARSITIES)
    request = SearchRequest(Promise(target), Deployment(count_cores()), candidates, plan, Workers(count_cores()))
    with ModelTimer(count_cores()) as timer:
        setup = set_up_search(inputs, request, timer, progress=lambda *_: None)
    return ignore_intervals(setup.problem), setup.evaluator


def draw_choices(problem: Problem, target: float, count: int, evaluator: ProfileEvaluator) -> list[Choice]:
    """Return different profiles whose predicted times are nearly those of the target."""
    rng, solver = np.random.default_rng(0), problem.solver(target, quick=True)
    budget = problem.dense.value / target
    published, errors = build_quadratic_priors(problem), problem.errors

    def draw_uniform() -> Floats:
        return rng.random(len(errors))

    def draw_factors() -> Floats:
        return np.exp(rng.standard_normal(len(errors)))

    found: list[Choice] = []
    for priors, coefficients in ((published, draw_uniform), (errors, draw_factors)):
        wanted = len(found) + count // 3
        for _ in range(50 * count):
            weighted = [c * prior for c, prior in zip(coefficients(), priors, strict=True)]
            choice = solver(weighted).choice
            if choice not in found and problem.predict(choice).value >= TIME_SHARE * budget:
                found.append(choice)
            if len(found) == wanted:
                break
    searched = run_strategy(StrategySettings("staged", EVALUATIONS), problem, target, evaluator)
    ranked = [it.choice for it in sorted(searched.trace, key=lambda it: it.loss) if it.choice not in found]
    tried = [choice for choice in ranked if problem.predict(choice).value >= TIME_SHARE * budget]
    picks = np.linspace(0, len(tried) - 1, min(len(tried), count - len(found))).round().astype(int)
    return [*found, *(tried[i] for i in dict.fromkeys(picks.tolist()))]


def measure(
    problem: Problem, choices: Sequence[Choice], evaluator: ProfileEvaluator, inputs: SearchInputs
) -> list[dict[str, float]]:
    """Return the cheap measures of each profile."""
    dense = tuple(int(np.argmin(errors)) for errors in problem.errors)
    single = {
        (i, j): tuple(j if k == i else d for k, d in enumerate(dense)) for c in choices for i, j in enumerate(c)
    }
    losses = evaluator.losses([dense, *choices, *single.values()], evaluator.batches)
    base, of_profiles = losses[0], losses[1 : len(choices) + 1]
    alone = {key: loss - base for key, loss in zip(single, losses[len(choices) + 1 :], strict=True)}
    weighted = weigh_changes(problem, list(single), inputs)
    return [
        {
            "errors": float(sum(errors[j] for errors, j in zip(problem.errors, choice, strict=True))),
            "fisher": sum(weighted[i, j] for i, j in enumerate(choice)),
            "alone": sum(alone[i, j] for i, j in enumerate(choice)),
            "loss": loss,
        }
        for choice, loss in zip(choices, of_profiles, strict=True)
    ]


def weigh_changes(
    problem: Problem, options: Sequence[tuple[int, int]], inputs: SearchInputs
) -> dict[tuple[int, int], float]:
    """Return for (layer, option) the squared changes of its weights times mean squared gradients at the dense model.

    The diagonal of the empirical Fisher information, by batches.
    """
    model, database = inputs.task.model(), Database(inputs.database, inputs.model_hash, inputs.provenance)
    names = [layer.name for layer in problem.layers]
    weights: list[Any] = [model.get_submodule(name).weight for name in names]
    squares = [torch.zeros_like(weight) for weight in weights]
    batches = inputs.task.calibration()
    for batch in batches:
        gradients = torch.autograd.grad(inputs.task.loss(model, batch), weights)
        for square, gradient in zip(squares, gradients, strict=True):
            square += gradient.square() / len(batches)
    found = {}
    for i, j in options:
        option = problem.layers[i].options[j]
        found[i, j] = 0.0
        if option.in_database is not None:
            stored = as_weight(model.get_submodule(names[i]), database.get(names[i], option.in_database).weight)
            found[i, j] = float((squares[i] * (stored - weights[i].detach()).square()).sum())
    return found


def train_all(
    task: Task, database: Database, target: float, profiles: Sequence[Row], path: Path, steps: int, hours: float
) -> None:
    """Add the scores that are missing, while there is time."""
    teacher, fresh = DenseTeacher(task, OUTPUTS), draw_fresh_batches(task, 0, FRESH_BATCHES)

    def one(key: Row, rows: list[Row]) -> Row:
        began = time.process_time()
        options = {name: Option(*option) for name, option in profiles[key["profile"]]["options"].items()}
        model = prune_and_train(task, options, database, key["method"], key["steps"])
        row = {
            **key, "score": task.score(model), "distance": measure_distance(teacher, model, fresh),
            "cpu_seconds": round(time.process_time() - began, 1),
        }  # fmt: skip
        print(f"{task.name} profile {key['profile']} {key['method']}: {row['score']:.4f}", flush=True)
        return row

    keys = [
        {"task": task.name, "target": target, "profile": number, "method": method, "steps": count}
        for method, count in zip(METHODS, (0, SHORT, steps, steps), strict=True)
        for number in range(len(profiles))
    ]
    if not runs.run_missing(path, keys, one, hours):
        print("time is up: the same command goes on from here")


def measure_distance(teacher: DenseTeacher, model: nn.Module, batches: Sequence[Any]) -> float:
    """Return the mean distance of a model's outputs from the dense model's."""
    with torch.no_grad():
        return float(np.mean([teacher.compute_loss(model, batch).item() for batch in batches]))


def prune_and_train(
    task: Task, options: Mapping[str, Option], database: Database, method: str, steps: int, seed: int = 0
) -> nn.Module:
    """Return the model of a profile after a method."""
    model = task.model()
    targets = {name: (option.pattern, option.sparsity) for name, option in options.items()}
    if method == BY_GMP:
        train(task, model, targets, Recipe(method="gmp", steps=steps, seed=seed))
        return model
    start = stitch(model, options, database)
    tune_norms(task, model, task.calibration())
    if method != UNTRAINED:
        rate = RATES.get(task.name, 1e-3)
        recipe = Recipe(
            method="held", start="one_shot", distill="layers", steps=steps, learning_rate=rate,
            warmup=steps // 20, seed=seed,
        )  # fmt: skip
        train(task, model, targets, recipe, start=start)
    return model


def show(path: Path, wanted: str | None) -> None:
    """Print rank correlations of cheap measures, and of scores after less training, with scores after training."""
    rows = runs.read_rows(path)
    for name, target in dict.fromkeys((row["task"], row["target"]) for row in rows):
        if wanted not in (None, name):
            continue
        drawn = json.loads(profiles_path(name, target).read_text())
        own = [row for row in rows if (row["task"], row["target"]) == (name, target)]
        scores = {
            method: {row["profile"]: row["score"] for row in own if row["method"] == method} for method in METHODS
        }
        steps = max(row["steps"] for row in own)
        print(f"{name}, {len(drawn['profiles'])} profiles of {drawn['target']:g}x, {steps} steps; medians and ranges")
        for method, of_method in scores.items():
            if of_method:
                values = list(of_method.values())
                print(f"  {method:18} {np.median(values):.4f} ({min(values):.4f}-{max(values):.4f})")
        outcomes = [method for method in (UNTRAINED, DISTILLED, BY_GMP) if scores[method]]
        print(f"  {'rank correlation of':22} " + " ".join(f"{'with ' + method:>26}" for method in outcomes))
        better: dict[str, Mapping[int, float]] = {
            measure: {i: -profile[measure] for i, profile in enumerate(drawn["profiles"])} for measure in MEASURES
        }
        best = np.median([-loss for loss in better["loss"].values()])
        better["loss, better half"] = {i: loss for i, loss in better["loss"].items() if -loss <= best}
        distances = {row["profile"]: row["distance"] for row in own if row["method"] == UNTRAINED}
        better["distance from dense"] = {i: -distance for i, distance in distances.items()}
        better |= {method: scores[method] for method in (UNTRAINED, SHORTLY, DISTILLED) if scores[method]}
        for measure, values_of in better.items():
            cells = (correlate(values_of, scores[method]) if method != measure else "" for method in outcomes)
            print(f"  {measure:22} " + " ".join(f"{cell:>26}" for cell in cells))
        print()


def correlate(a: Mapping[int, float], b: Mapping[int, float]) -> str:
    """Return Spearman's rank correlation over the profiles that have both, with its bootstrap interval of 90%."""
    both = sorted(a.keys() & b.keys())
    x, y = (np.array([values[i] for i in both]) for values in (a, b))
    if len(both) < 4:
        return ""
    rng = np.random.default_rng(0)
    draws = []
    for _ in range(1000):
        chosen = rng.integers(0, len(both), len(both))
        if len(set(x[chosen])) > 1 and len(set(y[chosen])) > 1:
            draws.append(spearmanr(x[chosen], y[chosen]).statistic)
    low, high = np.quantile(draws, (0.05, 0.95)) if draws else (math.nan, math.nan)
    return f"{spearmanr(x, y).statistic:+.2f} ({low:+.2f} to {high:+.2f})"


def profiles_path(name: str, target: float) -> Path:
    return RESULTS / "objectives" / f"{name}-{target:g}x.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("draw", "train"):
        command = commands.add_parser(name)
        command.add_argument("task")
        command.add_argument("--job", type=Path, required=True)
        command.add_argument("--target", type=float, default=2.0)
    commands.choices["draw"].add_argument("--profiles", type=int, default=24)
    commands.choices["train"].add_argument("--steps", type=int, default=300)
    commands.choices["train"].add_argument("--hours", type=float, default=1.0)
    commands.choices["train"].add_argument("--threads", type=int, default=1)
    commands.add_parser("show").add_argument("task", nargs="?")
    given = parser.parse_args()
    results = RESULTS / "objectives.jsonl"
    if given.command == "show":
        show(results, given.task)
        return
    task = load_task(given.task)
    inputs = read_inputs(
        task, parse_place(given.job / "table"), given.job / "cost_model.json", given.job / "database"
    )
    if given.command == "draw":
        draw(inputs, given.target, given.profiles, profiles_path(task.name, given.target))
        return
    torch.set_num_threads(given.threads)
    drawn = json.loads(profiles_path(task.name, given.target).read_text())["profiles"]
    database = Database(inputs.database, inputs.model_hash, inputs.provenance)
    train_all(task, database, given.target, drawn, results, given.steps, given.hours)


if __name__ == "__main__":
    main()
