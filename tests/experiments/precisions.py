"""Accuracy at the same measured time: profiles in float32 beside profiles that mix float32 and eight bits.

    python tests/experiments/precisions.py tests/tasks/resnet20.py -o FOLDER [--float32 1.2,1.5,2]
        [--mixed 0.8,0.95,1.1] [--seeds 3] [--evaluations 200]

Layers are timed as `latbench run --precision int8` times them. Then profiles are searched in float32 alone, for
speedups over the fastest dense engine in float32, and in float32 and eight bits, for speedups over the fastest dense
engine of both. Each profile is pruned as `latbench prune` does it; the seed is that of the search and of the tuning.
At the end all pruned models and all dense engines are timed in turns, and each pruned model is scored as converted.

A line a profile in float32: the best score of a mixed profile of the same seed that takes no longer, and how much
faster a mixed profile that loses no more is. What is in FOLDER is not done again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from latbench.base.engine_registry import DENSE_INT8, FLOAT32, INT8, NUMBA, TORCH
from latbench.cli.job.job_steps import Job, JobSettings
from latbench.machines.processors import count_cores
from latbench.tables.storage import parse_place
from search.deployment import Deployment
from search.knapsack.arrays import Infeasible
from search.loss.parallel import Workers
from search.pipeline.prune_to_folder import PruneRequest, prune_to_folder
from search.pipeline.search_history import SearchHistory
from search.pipeline.search_job import build_profile
from search.pipeline.search_request import (
    CandidateOptions,
    Promise,
    SearchInputs,
    SearchPlan,
    SearchRequest,
    read_inputs,
)
from search.pipeline.search_setup import set_up_search
from search.pipeline.speedup_loop import MeasuredSpeedup, PromisedProfile
from search.problem.calibration import ignore_intervals
from search.strategies.run_strategy import StrategySettings, run_strategy
from search.task import Task
from search.whole_model.end_to_end import EngineBuilder, ModelTimer
from search.whole_model.engine_builders import build_dense_engines
from search.whole_model.timed_device import find_cpu

COVERAGE = 0.9
SAME = 1.02
"""A mixed profile takes no longer if it takes at most this share of the time: two timings of one model differ so."""


@dataclass(frozen=True)
class Wanted:
    """A profile to search, and what was found of it."""

    precisions: tuple[str, ...]
    target: float
    seed: int

    @property
    def name(self) -> str:
        return f"{'+'.join(self.precisions)} {self.target:g}x seed {self.seed}"


@dataclass(frozen=True)
class Outcome:
    """A pruned model: its measured seconds and its score."""

    wanted: Wanted
    seconds: float
    score: float


def tell(what: str, done: int | None, total: int | None) -> None:
    if done is None:
        print(f"  {what}", flush=True)


def prune(wanted: Wanted, inputs: SearchInputs, timer: ModelTimer, evaluations: int, folder: Path) -> Path:
    """Search the profile by predicted seconds, prune the model to it, and return the folder of the pruned model."""
    output = folder / wanted.name.replace(" ", "-")
    path = output / "profile.json"
    if not path.exists():
        request = SearchRequest(
            Promise(wanted.target),
            Deployment(count_cores(), NUMBA, wanted.precisions),
            CandidateOptions(),
            SearchPlan(seed=wanted.seed, evaluations=evaluations, quick=True),
            Workers(count_cores()),
        )
        setup = set_up_search(inputs, request, timer, progress=tell)
        problem = ignore_intervals(setup.problem)
        with setup.evaluator as evaluator:
            settings = StrategySettings("staged", evaluations, wanted.seed)
            found = run_strategy(settings, problem, wanted.target, evaluator)
        as_predicted = problem.speedup(problem.predict(found.choice))
        measured = MeasuredSpeedup(as_predicted, problem.dense, problem.dense_engine)
        profile = build_profile(  # no error is below 0
            inputs, request, PromisedProfile(problem, found, 0.0, measured, wanted.target),
            digest=SearchHistory(inputs, request).digest(), additivity=(0.0, 0.0), ceiling=None,
        )  # fmt: skip
        output.mkdir(parents=True, exist_ok=True)
        profile.save(path)
    prune_to_folder(inputs.task, path, inputs.database, output / "pruned", PruneRequest(seed=wanted.seed))
    return output / "pruned"


def measure(
    task: Task, pruned: dict[Wanted, Path], timer: ModelTimer
) -> tuple[list[Outcome], dict[str, float], dict[str, float]]:
    """Time all models in turns, and score them; the outcomes, the dense engines' seconds, and the dense scores."""
    threads = count_cores()
    engines = build_dense_engines(task, Deployment(threads, NUMBA, (FLOAT32, INT8)))
    dense = list(engines)
    for wanted, folder in pruned.items():
        arguments = (task.reference, threads, NUMBA, str(folder.resolve()), str(folder.resolve() / "pruned.onnx"))
        engines[wanted.name] = EngineBuilder(
            "pruned", "search.whole_model.model_engines:build_folder_pruned", arguments
        )
    with find_cpu().lock(tell):
        timings = timer.time(engines, required=[TORCH, *(it.name for it in pruned)])
    outcomes, scores = [], {}
    for wanted, folder in pruned.items():
        scores[FLOAT32], score = timer.call(
            TORCH, "search.whole_model.model_engines:score_models",
            task.reference, threads, NUMBA, str(folder.resolve()), timeout=3600,
        )  # fmt: skip
        outcomes.append(Outcome(wanted, timings.seconds(wanted.name, COVERAGE).value, score))
    scores[INT8] = timer.call(
        DENSE_INT8, "search.whole_model.int8_engines:score_dense_int8", task.reference, threads, timeout=3600
    )
    return outcomes, {name: timings.seconds(name, COVERAGE).value for name in dense if name in timings.blocks}, scores


def compare(outcomes: Sequence[Outcome]) -> None:
    """Print each profile in float32 beside the mixed ones of its seed."""
    gains, ratios = [], []
    print(f"\n{'profile in float32':>28} {'ms':>8} {'score':>8} {'mixed, no slower':>17} {'no worse':>9}")
    for one in outcomes:
        if one.wanted.precisions != (FLOAT32,):
            continue
        mixed = [it for it in outcomes if it.wanted.precisions != (FLOAT32,) and it.wanted.seed == one.wanted.seed]
        as_fast = [it.score for it in mixed if it.seconds <= SAME * one.seconds]
        as_good = [it.seconds for it in mixed if it.score >= one.score]
        gain = max(as_fast) - one.score if as_fast else np.nan
        ratio = one.seconds / min(as_good) if as_good else np.nan
        gains.append(gain)
        ratios.append(ratio)
        print(
            f"{one.wanted.name:>28} {1e3 * one.seconds:8.3f} {one.score:8.4f} {format_known(gain, '+.4f'):>17} "
            f"{format_known(ratio, '.2f'):>9}",
            flush=True,
        )
    middle, share = (float(np.nanmedian(each)) if not np.isnan(each).all() else np.nan for each in (gains, ratios))
    print(
        f"median gain at the same time {format_known(middle, '+.4f')}, speedup at the same score "
        f"{format_known(share, '.2f')}"
    )


def format_known(number: float, form: str) -> str:
    """A number as text; `none` where no mixed profile is as fast, or as good."""
    return "none" if np.isnan(number) else format(number, form)


def numbers(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


def main() -> None:
    """Parse, measure layers, search, prune, time, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task")
    parser.add_argument("-o", "--output", required=True, type=Path)
    parser.add_argument("--float32", type=numbers, default=[1.2, 1.5, 2.0])
    parser.add_argument("--mixed", type=numbers, default=[0.8, 0.95, 1.1])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--evaluations", type=int, default=200)
    given = parser.parse_args()
    folder = given.output
    folder.mkdir(parents=True, exist_ok=True)
    with Job(given.task, folder, JobSettings(max(given.float32), precisions=(FLOAT32, INT8))) as job:
        job.trace_layers(tell)
        job.time_layers(tell)
        job.fit_cost_model(tell)
        task = job.task
    inputs = read_inputs(task, parse_place(folder / "table"), folder / "cost_model.json", folder / "database")
    kinds = [((FLOAT32,), target) for target in given.float32] + [((FLOAT32, INT8), target) for target in given.mixed]
    every = [Wanted(kind, target, seed) for seed in range(given.seeds) for kind, target in kinds]
    with ModelTimer(count_cores()) as timer:
        pruned = {}
        for wanted in every:
            print(wanted.name, flush=True)
            try:
                pruned[wanted] = prune(wanted, inputs, timer, given.evaluations, folder)
            except Infeasible as error:
                print(f"  left out: {error}", flush=True)
        outcomes, dense, scores = measure(task, pruned, timer)
    print(f"\ndense scores: {json.dumps(scores)}")
    for name, seconds in sorted(dense.items(), key=lambda pair: pair[1]):
        print(f"{name:>28} {1e3 * seconds:8.3f} ms")
    for one in outcomes:
        print(f"{one.wanted.name:>28} {1e3 * one.seconds:8.3f} ms {one.score:8.4f}")
    compare(outcomes)


if __name__ == "__main__":
    main()
