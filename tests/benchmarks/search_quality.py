"""What the search strategies find for the same money: calibration loss at equal evaluations.

    python tests/benchmarks/search_quality.py {resnet20,minilm} --table T --cost-model M --database D
        [--evaluations 200] [--shares 0.4,0.6,0.8] [--seeds 5] [--processes 2] [--method auto]

T and M come from `latbench trace`, `sweep` and `fit` for tests/tasks/<name>.py; what else is needed is made in D on
first use, and whole models are timed. A target is a share of the way from 1x to the fastest profile's speedup (the
ceiling, the speedup if all searched layers took no time, is printed too, but no profile reaches it): where the dense
model is fast enough, there is nothing to search. The share 0.6 is searched with as many seeds, others with one.
Calibration data: 512 images, 128 sentences. An evaluation is one profile on all of them; on fewer, their share.

Printed, a line a target and seed: the losses of the best uniform profile, of the knapsack solved once with the
published quadratic prior and with the measured errors, of the published search, of EvoPress's and of ours, which is
also run without gradients; what the published one and ours spent; after how many evaluations each was as good as the
published search was in the end; and last how often ours was no worse and needed at most half as many for it as the
published search needed, and as it spent.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from latbench.errors import UsageError
from latbench.machines.processors import count_cores
from latbench.tables.storage import parse_place
from search.artifacts.layer_database import Database
from search.deployment import Deployment
from search.knapsack.arrays import Choice, Infeasible
from search.knapsack.one_budget import solve
from search.loss.cache import LossCache
from search.loss.parallel import ParallelEvaluator, Workers
from search.pipeline.search_history import SearchHistory
from search.pipeline.search_request import Promise, SearchPlan, SearchRequest, read_inputs
from search.pipeline.search_setup import set_up_search
from search.problem.calibration import ignore_intervals
from search.problem.problem import Problem
from search.pruning.one_shot.fill_database import DEFAULT_METHOD, ONE_SHOT_METHODS
from search.strategies.evaluation_budget import ProfileEvaluator, SearchResult
from search.strategies.run_strategy import StrategySettings, build_quadratic_priors, run_strategy
from search.task import load_task
from search.whole_model.end_to_end import ModelTimer

TASKS = Path(__file__).parents[1] / "tasks"
SEVERAL_SEEDS_AT = 0.6


class Fewer:
    """A task with only the first batches of its calibration data."""

    def __init__(self, name: str, batches: int) -> None:
        self._task = load_task(str(TASKS / f"{name}.py")).implementation
        self._batches = batches

    def __getattr__(self, member: str) -> Any:
        return getattr(self._task, member)

    def calibration(self) -> list[Any]:
        return list(self._task.calibration()[: self._batches])


def __getattr__(name: str) -> Fewer:
    """The tasks `search_quality.py:resnet20` and `:minilm`, loaded when they are asked for."""
    if name in BATCHES:
        return Fewer(name, BATCHES[name])
    raise AttributeError(name)


BATCHES = {"resnet20": 4, "minilm": 4}  # of 128 images, of 32 sentences


class WithoutGradients:
    """An evaluator of a loss without gradient."""

    def __init__(self, evaluator: ProfileEvaluator) -> None:
        self.batches, self.losses = evaluator.batches, evaluator.losses

    def layer_shares(self, choice: Choice, batches: int) -> list[float]:
        raise UsageError("gradients are left out of this comparison")


def reached(found: SearchResult, loss: float) -> float:
    """The evaluations spent when the search was first as good as `loss`."""
    return next((one.spent for one in found.trace if one.loss <= loss), math.inf)


def compare(
    every: tuple[Problem, ProfileEvaluator],
    problem: Problem,
    evaluator: ProfileEvaluator,
    target: float,
    label: str,
    seeds: int,
    allowed: int,
) -> list[tuple[float, float, float]]:
    """Print the lines of one target; by seed after how many evaluations ours was as good as the published search was
    in the end, after how many that was itself, and how many it spent.

    `every` is the problem with every option, and its evaluator, for uniform profiles; the others leave out what is
    hopeless.
    """
    uniform = run_strategy(StrategySettings("uniform", allowed, 0), every[0], target, every[1]).loss
    quadratic = solve(problem.safe_seconds, build_quadratic_priors(problem), problem.budget(target)).choice
    (solved_quadratic,) = evaluator.losses([quadratic], evaluator.batches)
    solved = run_strategy(StrategySettings("once", 1, 0), problem, target, evaluator).loss
    found = []
    for seed in range(seeds):
        published, evolved, ours = (
            run_strategy(StrategySettings(strategy, allowed, seed), problem, target, evaluator)
            for strategy in ("spdy", "evopress", "staged")
        )
        without = run_strategy(
            StrategySettings("staged", allowed, seed), problem, target, WithoutGradients(evaluator)
        )
        needed = reached(ours, published.loss), reached(published, published.loss)
        found.append((*needed, published.spent))
        print(
            f"{label} {target:6.2f}x {seed:4} {uniform:9.4f} {solved_quadratic:9.4f} {solved:9.4f} "
            f"{published.loss:9.4f} {evolved.loss:9.4f} {ours.loss:9.4f} {without.loss:9.4f} "
            f"{ours.loss / published.loss:6.2f} {published.spent:9.1f} "
            f"{ours.spent:6.1f} {needed[1]:9.1f} {needed[0]:6.1f}",
            flush=True,
        )
    return found


def main() -> None:
    """Parse, prepare, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=sorted(BATCHES))
    for name in ("table", "cost-model", "database"):
        parser.add_argument(f"--{name}", required=True, type=Path)
    parser.add_argument("--evaluations", type=int, default=200)
    parser.add_argument("--shares", default="0.4,0.6,0.8")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--method", choices=sorted(ONE_SHOT_METHODS), default=DEFAULT_METHOD)
    given = parser.parse_args()

    task = load_task(f"{Path(__file__).resolve()}:{given.task}")
    inputs = read_inputs(task, parse_place(str(given.table)), given.cost_model, given.database, given.method)
    # The strategy "uniform" is given every option: others leave out what none of them would take.
    workers = Workers(given.processes)
    request = SearchRequest(
        Promise(1.0), Deployment(count_cores()), plan=SearchPlan(strategy="uniform"), workers=workers
    )
    with ModelTimer(count_cores()) as timer:
        setup = set_up_search(inputs, request, timer)
    every, evaluate_every = ignore_intervals(setup.problem), setup.evaluator
    problem = every.without_dominated()
    names = [part.name for layer in problem.layers for part in layer.parts]
    cache = LossCache(names, given.database / "trials.jsonl", SearchHistory(inputs, request).loss_key())
    database = Database(inputs.database, inputs.model_hash, inputs.provenance)
    evaluator = ParallelEvaluator(task, inputs.model, problem.layers, database, cache, workers)
    fastest = problem.speedup(problem.predict(tuple(int(layer.high.argmin()) for layer in problem.layers))).value
    print(
        f"{given.task}: {len(problem.layers)} layers, ceiling {problem.ceiling or math.inf:.2f}x, fastest profile "
        f"{fastest:.2f}x; {evaluator.batches} calibration batches, {given.evaluations} evaluations"
    )
    print(
        "share target  seed   uniform quadratic  measured published  evopress      ours no gradi.  ratio "
        "evaluations spent by each, and by each until it was as good as the published search in the end"
    )
    found: list[tuple[float, float, float]] = []
    with evaluate_every, evaluator:
        for share in map(float, given.shares.split(",")):
            seeds = given.seeds if share == SEVERAL_SEEDS_AT else 1
            target = 1 + share * (fastest - 1)
            try:
                label = f"{share:5.0%}"
                found += compare((every, evaluate_every), problem, evaluator, target, label, seeds, given.evaluations)
            except Infeasible as error:
                print(f"{share:5.0%} {target:6.2f}x {error}")
    for what, bar in (("needed for that", 1), ("spent", 2)):
        kept = sum(one[0] <= one[bar] / 2 for one in found)
        print(f"ours no worse, in half the evaluations that the published search {what}: {kept} of {len(found)}")


if __name__ == "__main__":
    main()
