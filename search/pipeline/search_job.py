"""The search as a user asks for it: from a task and a table to a profile whose promise was measured.

For latbench's own kernels a cost model predicts each layer's seconds from its shape. For DeepSparse the table holds
the layer's own, taken inside the network (`latbench layers`): there a layer's place counts, and nothing is predicted.

1. The pruned model is timed whole at a few profiles, beside the dense engines (kept for the next search).
2. Every option that may pay is pruned into the layer database (kept, too).
3. Profiles are searched, timed end to end against the dense engines, and searched again, until one was measured to
   keep the promise (`search.pipeline.speedup_loop`): the guarantee is measured, or it is not given. What was judged
   is kept.

What was timed is kept beside the database: the same search again, or one that was interrupted, takes it from there.
So is what verifications found that were fed back (`feed_back`): all later searches under the same conditions know it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cost_models
from latbench.base.engine_registry import NUMBA
from latbench.base.files import hash_file
from latbench.errors import BadData, PromiseMissed, UsageError
from latbench.machines.devices import name_cpu
from latbench.tables.storage import Place
from latbench.tables.table import hash_table
from latbench.workloads.workload import trace_model
from search.artifacts.layer_database import Database, model_hash
from search.artifacts.profile import LayerChoice, Profile
from search.inputs import layer_errors
from search.inputs.layer_builder import build_network_layers, build_predicted_layers
from search.inputs.layer_errors import read_errors
from search.inputs.table_rows import read_network_rows, read_sweep_rows, select_engine_rows
from search.knapsack.arrays import Choice, sum_in_order
from search.loss.cache import Trials, key_of
from search.loss.parallel import Judges
from search.loss.pools import panel
from search.pipeline.speedup_loop import Kept, Measured, Search, corrected, keep_promise, measured
from search.pipeline.verify import SESSION, Verdict
from search.pipeline.verify import load as load_verdict
from search.problem.layers import LayerOptions, Option, expand_choice
from search.problem.problem import Problem
from search.problem.second_budget import build_model_budget, count_model_bytes
from search.progress import Progress
from search.pruning.one_shot.fill_database import DEFAULT_METHOD, fill_database, hash_pruning_inputs
from search.strategies import chance_constraint as chance
from search.strategies.evaluation_budget import ProfileEvaluator, SearchResult
from search.strategies.run_strategy import StrategySettings, run_strategy
from search.task import Task
from search.whole_model import confidence as risk
from search.whole_model import overhead, sessions
from search.whole_model.end_to_end import Engine, Timings, cpu_lock, time_engines
from search.whole_model.sessions import Chosen, Session
from sparse_kernels.shapes import Shape

VERIFIED = 2
"""So many profiles that were verified and fed back are timed beside what a search finds."""

# A dense engine that took so many times as long as the fastest is no rival while profiles are compared.
HOPELESS = 1.3


@dataclass(frozen=True)
class Settings:
    """What a user may choose.

    `batches` is how many of the calibration batches judge a profile that the search tries (None: all); the best of
    them are judged by all. `risk` is how likely the promise shall be met when it is verified. `sparsities` are looked
    at instead of those in the table, as far as the cost model knows; `errors` of layers are of their outputs, of
    their weights, or in a file (`search.inputs.layer_errors`). `most_bytes` is what the weights of the whole pruned
    model may take (`search.problem.second_budget.build_model_budget`), None for whatever they do. `time_budget` is in
    seconds, once layers are pruned and whole models timed: after so long no profile is tried any more, though those
    found are timed. `processes` prune layers and judge profiles; or these are judged elsewhere, `judges` is one of
    `search.loss.parallel.PLACES`. Both change no more than roundings.
    """

    target: float
    threads: int
    patterns: tuple[str, ...] | None = None
    seed: int = 0
    evaluations: int = 200
    batches: int | None = None
    risk: float = 0.9
    strategy: str = "staged"
    backend: str = NUMBA
    sparsities: tuple[float, ...] | None = None
    errors: str = "output"
    time_budget: float | None = None
    processes: int = 1
    judges: str = "cpu"
    most_bytes: float | None = None


@dataclass(frozen=True)
class Inputs:
    """The task's model and what was measured for its layers, with the hashes that say which they are.

    There is no cost model where the table holds the layers' own times. `method` is how layers are pruned, one of
    `search.pruning.one_shot.fill_database.ONE_SHOT_METHODS`.
    """

    task: Task
    model: Any
    table: Place
    cost_model: Path | None
    database: Path
    model_hash: str
    table_hash: str
    made_by: str
    method: str = DEFAULT_METHOD

    def judged(self, settings: Settings) -> str:
        """What losses depend on beside the profile: a hash, and where they are judged."""
        return f"{key_of(self.task, self.model, self.model_hash, self.made_by)} {settings.judges}"

    def conditions(self, settings: Settings) -> dict[str, Any]:
        """What whole-model times depend on, whatever the layers become."""
        return overhead.conditions(self.task, self.model_hash, settings.threads, settings.backend)

    def key(self, settings: Settings) -> dict[str, Any]:
        """What the choice of profiles that are timed first depends on, too."""
        return {
            **self.conditions(settings), "probes": overhead.VERSION, "table_hash": self.table_hash,
            "cost_model": hash_file(self.cost_model)[:16] if self.cost_model else None,
            "patterns": list(settings.patterns) if settings.patterns else None,
            "excluded": list(self.task.limits.excluded),
            "sparsities": list(settings.sparsities) if settings.sparsities else None,
        }  # fmt: skip

    def digest(self, settings: Settings) -> str:
        """What the profile depends on: also what was timed before it is searched."""
        timed = [*sessions.read(self.probes(settings), self.key(settings)), *self.verified(settings)]
        errors = None if settings.errors in layer_errors.KINDS else hash_file(Path(settings.errors))
        asked = {**asdict(settings), "processes": 0}  # which are no part of the question
        parts = [self.key(settings), asked, self.judged(settings), asdict(self.task.limits), errors]
        return _hash([*parts, [sessions.digest(one) for one in timed]])

    def probes(self, settings: Settings) -> Path:
        """Where the timings of whole models are kept that a search begins with."""
        return self.database / f"whole_model-{_hash(self.key(settings))}.json"

    def verified(self, settings: Settings) -> list[Session]:
        """The verifications under the same conditions that were fed back."""
        return sessions.read(self._verified(settings), self.conditions(settings))

    def feed_back(self, folder: Path, settings: Settings) -> None:
        """Keep what the verification in `folder` timed, for all searches under the same conditions.

        Raises BadData as `met` does.
        """
        sessions.add(self._verification(folder, settings), self.conditions(settings), self._verified(settings))

    def met(self, folder: Path, settings: Settings) -> Verdict | None:
        """The verdict of the verification in `folder` where that met the very target of `settings`.

        Raises BadData for a folder that has none, or one of other conditions.
        """
        self._verification(folder, settings)
        verdict = load_verdict(folder / "verify.json")
        return verdict if verdict is not None and verdict.met and verdict.target == settings.target else None

    def _verification(self, folder: Path, settings: Settings) -> Session:
        found = sessions.load(folder / SESSION)
        if found is None:
            raise BadData(f"{folder} holds no {SESSION}, which `latbench verify` writes there")
        key, [session] = found
        wanted = json.loads(json.dumps(self.conditions(settings)))
        if other := [name for name in wanted if key.get(name) != wanted[name]]:
            raise BadData(
                f"the verification in {folder} does not go with this search: its {other[0]} is "
                f"{key.get(other[0])}, not {wanted[other[0]]}"
            )
        return session

    def _verified(self, settings: Settings) -> Path:
        return self.database / f"verified-{_hash(self.conditions(settings))}.json"


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def read_inputs(
    task: Task, table: Place, cost_model: Path | None, database: Path, method: str = DEFAULT_METHOD
) -> Inputs:
    """Load the model and hash what is given. Raises what these raise when they are missing or damaged."""
    model = task.model()
    hashes = model_hash(model), hash_table(table), hash_pruning_inputs(task, method)
    return Inputs(task, model, table, cost_model, database, *hashes, method)


def search(
    inputs: Inputs,
    settings: Settings,
    *,
    remeasure: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> Profile:
    """The profile of least loss that was measured to be `settings.target` times as fast as the fastest dense engine.

    Raises Infeasible when no profile can be, PromiseMissed when none was, or all that were tried ruin the model, and
    BadData for inputs that do not fit.
    """
    ready = prepare(inputs, settings, remeasure=remeasure, progress=progress)
    problem, judge = ready.problem, ready.judge
    known = {engine: seconds.value for engine, seconds in ready.whole.dense.items()}
    digest, verified = inputs.digest(settings), inputs.verified(settings)
    path, key = inputs.database / f"sessions-{digest}.json", inputs.key(settings)
    kept_before = sessions.read(path, key)
    taken: list[Session] = []

    def measure(choices: Sequence[Choice]) -> list[Measured]:
        chosen = [overhead.by_name(problem.layers, choice) for choice in choices]
        wanted = {sessions.profile_name(one): one for one in chosen}
        if len(taken) < len(kept_before) and set(kept_before[len(taken)].profiles) == set(wanted):
            taken.append(kept_before[len(taken)])
        else:
            timings = time_profiles(inputs, settings, wanted, known, progress)
            taken.append(Session(wanted, timings))
            sessions.write(taken, key, path)
        return [measured([*verified, *taken], name, settings.risk) for name in wanted]

    try:
        with judge:
            looked_for = searcher(settings, judge, progress)
            choices = [one for one in _choices(problem, verified) if problem.keeps_second_budget(one)]
            before = dict(zip(choices, judge.losses(choices, judge.batches), strict=True))
            kept = keep_promise(problem, looked_for, measure, settings.target, before=before)
    except PromiseMissed:  # asked again, it is measured again: the machine may have been busy
        path.unlink(missing_ok=True)
        raise
    if not math.isfinite(kept.found.loss):
        raise PromiseMissed(
            f"every profile that was tried for {settings.target:g}x ruins the model: its loss is not finite"
        )
    return _profile(
        inputs, digest, settings, kept, additivity(ready.layers, [ready.probes, *taken]), ready.whole.ceiling
    )


def searcher(
    settings: Settings, judge: ProfileEvaluator, progress: Progress, *, clock: Callable[[], float] = time.monotonic
) -> Search:
    """What searches a profile for `keep_promise`, round by round; its time runs from now on.

    Profiles that a round judged count as found in those after it, too, where they fit.
    """
    deadline = math.inf if settings.time_budget is None else clock() + settings.time_budget
    known: dict[Choice, str] = {}

    def one_round(problem: Problem, number: int, missed: Collection[Choice]) -> SearchResult:
        def tell(what: str, done: int | None, total: int | None) -> None:
            progress(what if number < 2 else f"{what}, round {number}", done, total)

        first = number == 0 and settings.strategy != "uniform"
        strategy = StrategySettings(
            "once" if first else settings.strategy, settings.evaluations, settings.seed,
            batches=None if first else settings.batches, deadline=deadline, clock=clock,
        )  # fmt: skip
        found = run_strategy(strategy, problem, settings.target, judge, known=known, missed=missed, progress=tell)
        known.update({one.choice: one.found_by for one in found.trace})
        return found

    return one_round


def _choices(problem: Problem, verified: Sequence[Session]) -> list[Choice]:
    """The profiles that were verified last, as far as the problem has their options."""
    found = []
    for session in verified[-VERIFIED:]:
        for chosen in session.profiles.values():
            with contextlib.suppress(UsageError):
                found.append(problem.selection({name: Option(*it) for name, it in chosen.items()}).choice)
    return found


def additivity(layers: Sequence[LayerOptions], timed: Sequence[Session]) -> tuple[float, float]:
    """`overhead.additivity` over all profiles that were timed whole; `layers` are as predicted, each on its own."""
    whole: dict[str, list[float]] = {}
    alone: dict[str, float] = {}
    for session in timed:
        for name, chosen in session.profiles.items():
            alone[name] = overhead.seconds_of(layers, overhead.choice_of(layers, chosen))
            whole.setdefault(name, []).append(session.timings.seconds(name, 0.5).value)
    return overhead.additivity(list(alone.values()), [float(np.median(whole[name])) for name in alone])


@dataclass(frozen=True)
class Ready:
    """What a search begins with: the problem with its errors, and who judges profiles.

    Also `layers` as predicted, each on its own, the session in which whole models were timed, and its line.
    """

    problem: Problem
    judge: Judges
    layers: tuple[LayerOptions, ...]
    probes: Session
    whole: overhead.WholeModel


def prepare(
    inputs: Inputs,
    settings: Settings,
    *,
    remeasure: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> Ready:
    """Whole models are timed, and layers pruned, unless that was done before. Raises as `search` does."""
    task = inputs.task
    with panel(settings.judges, settings.processes):  # where nobody can judge, that is said first
        pass
    progress("reading the table", None, None)
    shapes = prunable_layers(task, inputs.model)
    with torch.inference_mode():
        dense_loss = float(task.loss(inputs.model, task.calibration()[0]))
    if not math.isfinite(dense_loss):  # a task that cannot be judged is refused before any work
        raise UsageError(
            f"the loss of task {task.name} is {dense_loss} for its own dense model: nothing can be judged"
        )
    given = None if settings.errors in layer_errors.KINDS else read_errors(Path(settings.errors))
    layers = timed_layers(inputs, settings, shapes)
    task.limits.apply(layers)  # what they contradict is said before anything is timed
    database = Database(inputs.database, inputs.model_hash, inputs.made_by)
    probes = _whole_model(inputs, settings, layers, remeasure, progress)
    whole = overhead.whole_model(layers, probes, risk.coverage(settings.risk))
    verified = inputs.verified(settings)

    def as_asked(problem: Problem) -> Problem:
        problem = replace(problem, layers=task.limits.apply(problem.layers))
        if settings.most_bytes is not None:
            also = build_model_budget(inputs.model, problem.layers, shapes, settings.most_bytes)
            problem = replace(problem, second_budget=also)
        return problem if given is None else problem.with_errors(given)

    def hopeful(problem: Problem) -> Problem:
        if settings.strategy == "uniform":  # which has one option everywhere, also where another would be better
            return problem
        return problem.without_dominated(by_errors=given is not None)

    # Infeasible is said before an hour of pruning, not after. Where favourable ends leave it open, and of what a
    # verification says of other profiles than its own, the fastest is timed before a target is refused.
    as_asked(whole.problem(layers)).check_could_reach(settings.target)
    possible = as_asked(_as_verified(whole.problem(layers), verified, settings.risk))
    while True:
        problem = hopeful(possible)
        options = {
            part.name: [(option.pattern, option.sparsity) for option in part.options]
            for layer in problem.layers
            for part in layer.parts
        }
        fill_database(
            task, inputs.model, options, database,
            lambda done, total: progress("pruning layers into the database", done, total),
            method=inputs.method, processes=settings.processes,
        )  # fmt: skip
        if given is not None:
            break
        if settings.errors == "output":
            errors = layer_errors.read_output_errors(problem, database)
        else:
            errors = layer_errors.compute_weight_errors(problem, database, inputs.model)
        if all(math.isfinite(error) for own in errors.values() for error in own.values()):
            problem = problem.with_errors(errors)
            break
        possible = possible.without_infinite_errors(errors)  # what those beat is pruned, too
    if not verified:  # which moved all layers together
        problem = chance.assume_independent_times(problem, settings.target)
    names = [part.name for layer in problem.layers for part in layer.parts]
    trials = Trials(names, inputs.database / "trials.jsonl", inputs.judged(settings))
    judge = Judges(
        task, inputs.model, problem.layers, database, trials, processes=settings.processes, place=settings.judges
    )
    return Ready(problem, judge, layers, probes, whole)


def _as_verified(problem: Problem, verified: Sequence[Session], probability: float) -> Problem:
    """The problem corrected by the last verification of a profile that its layers can have."""
    for session in reversed(verified):
        [(name, chosen)] = session.profiles.items()
        try:
            choice = overhead.choice_of(problem.layers, chosen)
        except BadData:  # what it says of other profiles counts all the same, when they are measured
            continue
        return corrected(problem, choice, measured(verified, name, probability))
    return problem


def timed_layers(inputs: Inputs, settings: Settings, shapes: Mapping[str, Shape]) -> tuple[LayerOptions, ...]:
    """The layers with their options' seconds on the backend. Raises BadData where the table has none for a layer."""
    if inputs.cost_model is None:
        return build_network_layers(
            read_network_rows(inputs.table, threads=settings.threads), inputs.task.name, shapes,
            threads=settings.threads, batch=len(inputs.task.example()[0]), coverage=risk.coverage(settings.risk),
        )  # fmt: skip
    rows = read_sweep_rows(inputs.table, set(shapes.values()), threads=settings.threads, backend=settings.backend)
    engine = select_engine_rows(rows, backend=settings.backend, threads=settings.threads)
    return build_predicted_layers(
        cost_models.load(inputs.cost_model, inputs.table), engine.with_patterns(settings.patterns), shapes,
        sparsities=settings.sparsities, coverage=risk.coverage(settings.risk),
    )  # fmt: skip


def prunable_layers(task: Task, model: Any) -> dict[str, Shape]:
    """The layers to choose for, by name: what can be pruned, but for those that are excluded. Raises UsageError."""
    traced, skipped = trace_model(model, task.example())
    shapes = {layer.name: layer.shape for layer in traced.layers}
    shapes = {name: shapes[name] for name in task.limits.select_included(list(shapes), [name for name, _ in skipped])}
    if not shapes:
        raise UsageError(f"the model of task {task.name} has no layer that can be pruned")
    return shapes


def time_profiles(
    inputs: Inputs, settings: Settings, profiles: Mapping[str, Chosen], known: Mapping[str, float], progress: Progress
) -> Timings:
    """Time the model with these options of the database against the dense engines, as `verify` will.

    Without those that are known to be so much slower than the fastest that they will not be it.
    """
    task, fastest = inputs.task, min(known, key=known.__getitem__, default="torch")
    engines = {
        name: engine
        for name, engine in overhead.dense_engines(task, settings.threads, settings.backend).items()
        if name not in known or known[name] <= HOPELESS * known[fastest]
    }
    database = str(inputs.database.resolve())
    for name, chosen in profiles.items():
        arguments = (task.reference, settings.threads, settings.backend, database, inputs.model_hash, chosen)
        engines[name] = Engine("pruned", "search.whole_model.model_engines:database_pruned", arguments)
    with cpu_lock(progress):
        required = [fastest, *profiles]
        return time_engines(engines, threads=settings.threads, required=required, known=known, progress=progress)


def _whole_model(
    inputs: Inputs, settings: Settings, layers: Sequence[LayerOptions], remeasure: bool, progress: Progress
) -> Session:
    key = inputs.key(settings)
    if not remeasure and (known := sessions.read(inputs.probes(settings), key)):
        return known[0]
    with cpu_lock(progress):
        session = overhead.measure_whole_model(
            inputs.task, layers, threads=settings.threads, backend=settings.backend, progress=progress
        )
    sessions.write([session], key, inputs.probes(settings))
    return session


def _profile(
    inputs: Inputs, digest: str, settings: Settings, kept: Kept, additive: tuple[float, float], ceiling: float | None
) -> Profile:
    problem, found = kept.problem, kept.found
    predicted = problem.predict(found.choice)
    chosen = {
        part.name: LayerChoice(
            part.options[j].pattern, part.options[j].sparsity,
            float(part.seconds[j]), float(part.low[j]), float(part.high[j]), float(part.errors[j]),
        )
        for layer, j in zip(problem.layers, found.choice, strict=True)
        for part in layer.parts
    }  # fmt: skip
    error = sum_in_order(choice.error for choice in chosen.values())
    return Profile(
        task=inputs.task.name,
        layers=chosen,
        backend=settings.backend,
        threads=settings.threads,
        batch=int(inputs.task.example()[0].shape[0]),
        device=name_cpu(),
        target=settings.target,
        risk=settings.risk,
        dense_engine=kept.measured.dense_engine,
        dense_seconds=kept.measured.dense.value,
        dense_seconds_low=kept.measured.dense.low,
        dense_seconds_high=kept.measured.dense.high,
        fixed_seconds=problem.fixed.value,
        fixed_seconds_low=problem.fixed.low,
        fixed_seconds_high=problem.fixed.high,
        predicted_seconds=predicted.value,
        predicted_low=predicted.low,
        predicted_high=predicted.high,
        loss=found.loss,
        error=error,
        bound=min(error, kept.bound),  # which adds up tied layers first
        ceiling=ceiling,
        additivity_before=additive[0],
        additivity_after=additive[1],
        strategy=found.found_by + (", ended by the time budget" if found.out_of_time else ""),
        seed=settings.seed,
        most_bytes=settings.most_bytes,
        weight_bytes=problem.second_budget.used(expand_choice(problem.layers, found.choice))
        if problem.second_budget
        else None,
        dense_bytes=float(count_model_bytes(inputs.model)) if problem.second_budget else None,
        table_hash=inputs.table_hash,
        model_hash=inputs.model_hash,
        inputs=digest,
    )
