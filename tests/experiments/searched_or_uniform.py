"""Is a searched profile more accurate than the best uniform one of the same time, one-shot and after training?

    python tests/experiments/searched_or_uniform.py search TASK --job FOLDER [--targets 1.5,2] [--seeds 5]
        [--kinds uniform,searched] [--evaluations 100]
    python tests/experiments/searched_or_uniform.py train TASK --job FOLDER [--steps 150] [--kinds uniform,searched]
        [--hours 1] [--threads 1]
    python tests/experiments/searched_or_uniform.py time TASK --job FOLDER [--kinds uniform,searched]
    python tests/experiments/searched_or_uniform.py equalize TASK --job FOLDER [--evaluations 100]
    python tests/experiments/searched_or_uniform.py show [NAME] [--csv FILE]

FOLDER is that of a `latbench run TASK`: its table, cost model, pruned layers and timings of whole models are used.
`search` prunes every option of the table. Uniform profiles have one pattern and sparsity; layers for which the
table has no such time take their fastest option that needs no more. The one with the least loss of those that reach
a target is compared. The searched one takes at most as long as that, by prediction. `uniform pattern` is searched
with the uniform profile's patterns alone, to tell what the choice of sparsities gives. `uniform sparsity` has one
sparsity and searched patterns, and layers for which the table has no such time have any: it is the best of all
sparsities, each of which gets as many evaluations as the others. Profiles are tried on half of many calibration
batches, as jobs do. What was searched with other --evaluations is kept.

`train` scores each profile one-shot, and after --steps steps of distillation under its masks. It also measures how
far its outputs are from the dense model's, on training batches, and a task's `ranking(model)`. Seeds are those of the
search and of the training, and pairs have the same. `time` measures all profiles in turns. Where the measured time of
profiles differs by over 2% from the uniform one's, `equalize` searches them again with as much less or more predicted
time, and drops their scores: `train` and `time` follow. `show` prints the differences of pairs with their standard
errors. What is there is not done again.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import runs
import torch
from objectives import (
    DISTILLED,
    EVALUATIONS,
    FRESH_BATCHES,
    RESULTS,
    UNTRAINED,
    measure_distance,
    prune_and_train,
    set_up,
)
from runs import Row

from latbench.cli.job.job_steps import ENOUGH_BATCHES
from latbench.machines.devices import name_cpu
from latbench.machines.processors import count_cores
from latbench.tables.storage import parse_place
from search.artifacts.layer_database import Database
from search.deployment import Deployment
from search.knapsack.arrays import Choice, Infeasible
from search.pipeline.search_request import (
    SearchInputs,
    SearchPlan,
    read_inputs,
)
from search.problem.layers import Option
from search.problem.problem import Problem
from search.pruning.training.auto_recipe import draw_fresh_batches
from search.pruning.training.dense_teacher import OUTPUTS, DenseTeacher
from search.strategies.evaluation_budget import ProfileEvaluator
from search.strategies.run_strategy import StrategySettings, run_strategy
from search.task import Task, load_task
from search.whole_model.end_to_end import ModelTimer
from search.whole_model.engine_builders import build_dense_engines, build_pruned_engines
from search.whole_model.timed_device import find_cpu
from sparse_kernels.patterns import Dense, parse

UNIFORM, SEARCHED, ONE_PATTERN, ONE_SPARSITY = "uniform", "searched", "uniform pattern", "uniform sparsity"
EQUAL = 1.02
"""Measured times that differ by a larger factor are not equal."""

KINDS = (UNIFORM, SEARCHED, ONE_PATTERN, ONE_SPARSITY)


def search_all(
    inputs: SearchInputs, targets: Sequence[float], seeds: int, kinds: Sequence[str], evaluations: int, path: Path
) -> None:
    """Write the profiles that are not there yet, in the share of time that `equalize` found for other seeds."""
    known = runs.read_rows(path)
    shares = {(row["kind"], row["target"]): row.get("share", 1.0) for row in known}
    keys = [
        {"task": inputs.task.name, "kind": kind, "target": target, "seed": seed}
        for target in targets
        for seed in range(seeds)
        for kind in kinds
    ]
    wanted = [
        key | {"share": shares.get((key["kind"], key["target"]), 1.0)} for key in runs.missing(keys, known)
    ]  # fmt: skip
    search_rows(inputs, wanted, evaluations, path)


def search_rows(inputs: SearchInputs, wanted: Sequence[Row], evaluations: int, path: Path) -> None:
    """Search the profiles of these keys, each in its `share` of the uniform profile's predicted time."""
    targets = dict.fromkeys(key["target"] for key in wanted)
    if not targets:
        return
    problem, parallel = set_up(inputs, max(targets), SearchPlan(UNIFORM, evaluations=evaluations))
    with parallel as evaluator:
        batches = evaluator.batches if evaluator.batches < ENOUGH_BATCHES else -(-evaluator.batches // 2)
        for target in targets:
            uniform = run_strategy(StrategySettings(UNIFORM, evaluations), problem, target, evaluator).choice
            for key in (key for key in wanted if key["target"] == target):
                settings = StrategySettings("staged", evaluations, key["seed"], batches)
                choice = find_profile(problem, uniform, key["kind"], settings, evaluator, key["share"])
                runs.add_row(path, key | describe(problem, choice, evaluator))
                print(key, flush=True)


def equalize(inputs: SearchInputs, evaluations: int, folder: Path) -> None:
    """Search profiles again whose measured time is not the uniform ones', in as much less or more predicted time."""
    path, scored, times = (
        folder / f"{inputs.task.name}-{name}" for name in ("profiles.jsonl", "scores.jsonl", "times.json")
    )
    rows, scores, seconds = runs.read_rows(path), runs.read_rows(scored), json.loads(times.read_text())["seconds"]
    again = []
    for kind, target, share in dict.fromkeys(map(searched_alike, rows)):
        own = [row for row in rows if searched_alike(row) == (kind, target, share) and name_engine(row) in seconds]
        ratios = [seconds[name_engine(row)] / seconds[name_engine({**row, "kind": UNIFORM})] for row in own]
        if ratios and not 1 / EQUAL <= (ratio := statistics.fmean(ratios)) <= EQUAL:
            names = ("task", "kind", "target", "seed")
            # Measured times change about twice as much as the share: the search then takes other patterns, too.
            again += [{n: row[n] for n in names} | {"share": share / math.sqrt(ratio)} for row in own]
    dropped = [{name: value for name, value in key.items() if name != "share"} for key in again]
    for file, kept in ((path, rows), (scored, scores)):
        left = [row for row in kept if not any(key.items() <= row.items() for key in dropped)]
        file.write_text("".join(json.dumps(row) + "\n" for row in left))
    if again:
        times.unlink()
    search_rows(inputs, again, evaluations, path)


def searched_alike(row: Row) -> tuple[str, float, float]:
    """Return what is the same for all seeds of a search."""
    return row["kind"], row["target"], row.get("share", 1.0)


def find_profile(
    problem: Problem, uniform: Choice, kind: str, settings: StrategySettings, evaluator: ProfileEvaluator,
    share: float = 1.0,
) -> Choice:  # fmt: skip
    """Return the uniform profile, or one that is searched and takes at most a share of its predicted time."""
    if kind == UNIFORM:
        return uniform
    target = problem.dense.value / problem.predict(uniform).value / share * (1 - 1e-9)  # roundings
    options = [layer.options[j] for layer, j in zip(problem.layers, uniform, strict=True)]
    if kind == ONE_PATTERN:
        patterns = {"dense", *(option.pattern for option in options)}
        allowed = [select_options(problem, lambda option: option.pattern in patterns)]
    elif kind == ONE_SPARSITY:
        sparsities = {option.sparsity for layer in problem.layers for option in layer.options if option.sparsity > 0}
        allowed = [select_options(problem, lambda it, s=s: it.sparsity == s) for s in sorted(sparsities)]  # type: ignore[misc]
    else:
        allowed = [problem]
    found = []
    for part in allowed:
        renumbered = _Renumbered(evaluator, problem, part)
        with contextlib.suppress(Infeasible):  # at so low a sparsity
            result = run_strategy(settings, part, target, renumbered)
            found.append((result.loss, translate(result.choice, part, problem)))
    return min(found)[1]


def select_options(problem: Problem, allowed: Callable[[Option], bool]) -> Problem:
    """Return the problem with these options alone; a layer without any of them keeps all."""
    return problem.change_layers(
        lambda layer: layer.take(
            [j for j, option in enumerate(layer.options) if allowed(option)] or range(len(layer.options))
        )
    )


def translate(choice: Choice, source: Problem, target: Problem) -> Choice:
    """Return the same options as numbers of another problem."""
    return tuple(
        own.options.index(other.options[j])
        for own, other, j in zip(target.layers, source.layers, choice, strict=True)
    )


class _Renumbered:
    """An evaluator of the options of another problem."""

    def __init__(self, evaluator: ProfileEvaluator, whole: Problem, part: Problem) -> None:
        self._evaluator, self._whole, self._part, self.batches = evaluator, whole, part, evaluator.batches

    def losses(self, choices: Sequence[Choice], batches: int) -> list[float]:
        return self._evaluator.losses([translate(it, self._part, self._whole) for it in choices], batches)

    def layer_shares(self, choice: Choice, batches: int) -> list[float]:
        return self._evaluator.layer_shares(translate(choice, self._part, self._whole), batches)


def describe(problem: Problem, choice: Choice, evaluator: ProfileEvaluator) -> Row:
    """Return the options of a profile, its loss and its predicted seconds."""
    [loss] = evaluator.losses([choice], evaluator.batches)
    options = {layer.name: layer.options[j] for layer, j in zip(problem.layers, choice, strict=True)}
    return {
        "loss": loss, "predicted_seconds": problem.predict(choice).value,
        "options": {name: [it.pattern, it.sparsity, it.precision] for name, it in options.items()},
    }  # fmt: skip


def name_engine(row: Row) -> str:
    """Return the name by which a profile is timed."""
    return f"{row['kind']} {row['target']:g}x seed {row['seed']}"


def read_options(row: Row) -> dict[str, Option]:
    return {name: Option(*option) for name, option in row["options"].items()}


def train_all(task: Task, database: Database, rows: Sequence[Row], path: Path, steps: int, hours: float) -> None:
    """Add the scores that are missing, while there is time. One-shot scores have no seed but the profile's."""
    names = ("task", "kind", "target", "seed")
    teacher, fresh = DenseTeacher(task, OUTPUTS), draw_fresh_batches(task, 0, FRESH_BATCHES)

    def one(key: Row, _: list[Row]) -> Row:
        began = time.process_time()
        profile = next(row for row in rows if {n: key[n] for n in names}.items() <= row.items())
        model = prune_and_train(task, read_options(profile), database, key["method"], key["steps"], key["seed"])
        measured = {"score": task.score(model), "distance": measure_distance(teacher, model, fresh)}
        if rank := getattr(task.implementation, "ranking", None):
            measured["ranking"] = rank(model)
        print(f"{key}: {measured}", flush=True)
        return key | measured | {"cpu_seconds": round(time.process_time() - began, 1)}

    keys = [
        {name: row[name] for name in names} | {"method": method, "steps": count}
        for method, count in ((UNTRAINED, 0), (DISTILLED, steps))
        for row in sorted(rows, key=lambda row: (row["seed"], row["target"]))
    ]
    if not runs.run_missing(path, keys, one, hours):
        print("time is up: the same command goes on from here")


def time_all(task: Task, rows: Sequence[Row], path: Path) -> None:
    """Measure all profiles in turns, equal ones once, and write the seconds of each."""
    if path.exists() and len(json.loads(path.read_text())["profiles"]) == len(rows):
        return
    deployment = Deployment(count_cores())
    first = {json.dumps(row["options"]): name_engine(row) for row in reversed(rows)}
    profiles = {name_engine(row): read_options(row) for row in rows if name_engine(row) in first.values()}
    engines = build_dense_engines(task, deployment) | build_pruned_engines(task, deployment, profiles)
    with ModelTimer(count_cores()) as timer, find_cpu().lock(lambda *_: None):
        timings = timer.time(engines, required=list(profiles))
    seconds = {name: timings.seconds(name, 0.9).value for name in timings.blocks}
    seconds |= {name_engine(row): seconds[first[json.dumps(row["options"])]] for row in rows}
    names = [name_engine(row) for row in rows]
    path.write_text(json.dumps({"cpu": name_cpu(), "profiles": names, "seconds": seconds}, indent=1) + "\n")


def show(folder: Path, wanted: str) -> None:
    """Print the differences of pairs."""
    for path in sorted(folder.glob(f"{wanted}-profiles.jsonl")):
        name = path.name.removesuffix("-profiles.jsonl")
        profiles, scores = runs.read_rows(path), runs.read_rows(folder / f"{name}-scores.jsonl")
        times = folder / f"{name}-times.json"
        seconds = json.loads(times.read_text())["seconds"] if times.exists() else {}
        for target in dict.fromkeys(row["target"] for row in profiles):
            own = [row for row in profiles if row["target"] == target]
            pattern = next(row for row in own if row["kind"] == UNIFORM)["options"]
            kinds = {
                (spec, f"{sparsity:.0%}")
                for spec, sparsity, _ in pattern.values()
                if not isinstance(parse(spec), Dense)
            }
            print(f"{name}, {target:g}x: uniform is {' and '.join(' at '.join(each) for each in sorted(kinds))}")
            for method in (UNTRAINED, DISTILLED):
                of_method = [row for row in scores if row["target"] == target and row["method"] == method]
                show_pairs(method, of_method, own, seconds, target)


def write_csv(folder: Path, wanted: str, file: Path) -> None:
    """Write the scores of one task's profiles that were timed, as `latbench report --accuracy` reads them."""
    if len(list(folder.glob(f"{wanted}-times.json"))) != 1:
        raise SystemExit("--csv writes the scores of one task: name it")
    with file.open("w", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow(["task", "pattern", "method", "target", "speedup", "accuracy", "seed"])
        for path in sorted(folder.glob(f"{wanted}-times.json")):
            name, seconds = path.name.removesuffix("-times.json"), json.loads(path.read_text())["seconds"]
            dense = min(value for engine, value in seconds.items() if engine.split()[0] not in KINDS)
            for row in runs.read_rows(folder / f"{name}-scores.jsonl"):
                engine = name_engine(row)
                if engine in seconds:
                    speedup = dense / seconds[engine]
                    writer.writerow(
                        [name, row["kind"], row["method"], row["target"], speedup, row["score"], row["seed"]]
                    )


def show_pairs(
    method: str, rows: Sequence[Row], profiles: Sequence[Row], seconds: Mapping[str, float], target: float
) -> None:
    """Print the scores of each kind, and their differences from the uniform profile's; of the longest training."""
    longest = max((row["steps"] for row in rows), default=0)
    scored = {(row["kind"], row["seed"]): row for row in rows if row["steps"] == longest}
    for kind in KINDS:
        of_kind = [row for (other, _), row in scored.items() if other == kind]
        if not of_kind:
            continue
        pairs = [(row, scored[UNIFORM, row["seed"]]) for row in of_kind if (UNIFORM, row["seed"]) in scored]
        text = f"  {method:10} {kind:16} {statistics.fmean(row['score'] for row in of_kind):.4f}"
        if kind != UNIFORM and pairs:
            differences = average([row["score"] - uniform["score"] for row, uniform in pairs])
            text += f", {differences} over uniform ({len(pairs)} pairs)"
        if kind != UNIFORM and pairs and all("ranking" in row for pair in pairs for row in pair):
            text += f", ranking {average([row['ranking'] - uniform['ranking'] for row, uniform in pairs])}"
        with_distance = [(a["distance"], b["distance"]) for a, b in pairs if "distance" in a and "distance" in b]
        if with_distance:
            text += f", distance {statistics.fmean(own for own, _ in with_distance):.4f}"
        if kind != UNIFORM and with_distance:
            text += f", {average([own / uniform - 1 for own, uniform in with_distance])} of uniform's"
        names = {row["seed"]: name_engine(row) for row in profiles if row["kind"] == kind}
        if ratios := [
            seconds[n] / seconds[f"{UNIFORM} {target:g}x seed {s}"] for s, n in names.items() if n in seconds
        ]:
            text += f", {min(ratios):.3f} to {max(ratios):.3f} of its measured time"
        print(text)


def parse_kinds(text: str) -> Sequence[str]:
    """Return the kinds that are named. `uniform` is always among them: others are compared with it."""
    named = [UNIFORM, *text.split(",")]
    if unknown := set(named) - set(KINDS):
        raise argparse.ArgumentTypeError(f"{min(unknown)!r} is none of {', '.join(KINDS)}")
    return [kind for kind in KINDS if kind in named]


def select_rows(path: Path, kinds: Sequence[str]) -> list[Row]:
    return [row for row in runs.read_rows(path) if row["kind"] in kinds]


def average(values: Sequence[float]) -> str:
    """Return the mean and its standard error."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{statistics.fmean(values):+.4f} +- {error:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("search", "train", "time", "equalize"):
        command = commands.add_parser(name)
        command.add_argument("task")
        command.add_argument("--job", type=Path, required=True)
    commands.choices["search"].add_argument(
        "--targets", type=lambda text: [float(each) for each in text.split(",")], default=[1.5, 2.0]
    )
    commands.choices["search"].add_argument("--seeds", type=int, default=5)
    for name in ("search", "equalize"):
        commands.choices[name].add_argument("--evaluations", type=int, default=EVALUATIONS)
    commands.choices["train"].add_argument("--steps", type=int, default=150)
    for name in ("search", "train", "time"):
        commands.choices[name].add_argument("--kinds", type=parse_kinds, default=KINDS)
    commands.choices["train"].add_argument("--hours", type=float, default=1.0)
    commands.choices["train"].add_argument("--threads", type=int, default=1)
    commands.add_parser("show").add_argument("name", nargs="?", default="*", help="of the task; default: all")
    commands.choices["show"].add_argument("--csv", type=Path, help="file for `latbench report --accuracy`")
    given = parser.parse_args()
    folder = RESULTS / "searched_or_uniform"
    if given.command == "show":
        show(folder, given.name)
        if given.csv is not None:
            write_csv(folder, given.name, given.csv)
        return
    folder.mkdir(parents=True, exist_ok=True)
    task = load_task(given.task)
    place, model = parse_place(given.job / "table"), given.job / "cost_model.json"
    inputs = read_inputs(task, place, model, given.job / "database")
    path = folder / f"{task.name}-profiles.jsonl"
    if given.command == "search":
        search_all(inputs, given.targets, given.seeds, given.kinds, given.evaluations, path)
    elif given.command == "equalize":
        equalize(inputs, given.evaluations, folder)
    elif given.command == "train":
        torch.set_num_threads(given.threads)
        database = Database(inputs.database, inputs.model_hash, inputs.provenance)
        train_all(
            task,
            database,
            select_rows(path, given.kinds),
            folder / f"{task.name}-scores.jsonl",
            given.steps,
            given.hours,
        )
    else:
        time_all(task, select_rows(path, given.kinds), folder / f"{task.name}-times.json")


if __name__ == "__main__":
    main()
