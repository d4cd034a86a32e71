"""The search as a user asks for it: from a task and a table to a profile whose promise was measured.

For latbench's own kernels a cost model predicts each layer's seconds from its shape. For DeepSparse the table holds
the layer's own, taken inside the network (`latbench layers`): there a layer's place counts, and nothing is predicted.

1. The pruned model is timed whole at a few profiles, beside the dense engines (kept for the next search).
2. Every option that may pay is pruned into the layer database (kept, too).
3. The profile of least summed error that should fit is timed end to end, and the prediction corrected by that.
4. The coefficient search finds the profile of least calibration loss whose predicted seconds fit. Where it looked at
   part of the calibration data only, the best it found are judged by all of it.
5. That very profile is timed end to end against dense, beside those before it, which are thus timed again. If the
   promise does not hold there, or holds with much to spare, the prediction is corrected once more and the search
   goes again, a few rounds. Only a profile that was measured to keep the promise is returned: the guarantee is
   measured, or it is not given.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import cost_models
from latbench import devices, tables, workloads
from latbench.errors import PromiseMissed, UsageError
from latbench.files import sha256
from latbench.places import Place
from search import overhead
from search.database import Database, model_hash
from search.end_to_end import PROCESSES, Engine, Progress, Timings, cpu_lock, pooled, time_engines, unseen
from search.engines import DENSE_ENGINES
from search.judge import Judge
from search.problem import (
    DENSE,
    Choice,
    Interval,
    Layer,
    Option,
    Problem,
    in_network,
    measured_layers,
    predicted_layers,
    swept_rows,
)
from search.profile import LayerChoice, Profile
from search.pruning.build import build_database, recipe
from search.solve import Infeasible, sum_in_order
from search.spdy import Evaluation, Found
from search.strategies import FOUND_BY, find
from search.task import Task
from sparse_kernels.shapes import Shape

# A profile that is faster than it has to be by more than this gave away accuracy for nothing.
TO_SPARE = 0.03
ROUNDS = 3

# A dense engine that took so many times as long as the fastest is no rival while profiles are compared.
HOPELESS = 1.3


@dataclass(frozen=True)
class Settings:
    """What a user may choose.

    `batches` is how many of the calibration batches judge a profile that the search tries (None: all); the best of
    them are judged by all. `risk` is the coverage of the intervals whose unfavourable ends keep the promise.
    `method` is how layers are pruned, one of `search.pruning.build.METHODS`.
    """

    target: float
    threads: int
    patterns: tuple[str, ...] | None = None
    seed: int = 0
    evaluations: int = 200
    batches: int | None = None
    risk: float = 0.9
    strategy: str = "spdy"
    backend: str = "numba"
    method: str = "adaprune"


@dataclass(frozen=True)
class Inputs:
    """The task's model and what was measured for its layers, with the hashes that say which they are.

    There is no cost model where the table holds the layers' own times.
    """

    task: Task
    model: Any
    table: Place
    cost_model: Path | None
    database: Path
    model_hash: str
    table_hash: str
    recipe: str

    def key(self, settings: Settings) -> dict[str, Any]:
        """What the whole-model times depend on."""
        return {
            "model_hash": self.model_hash, "table_hash": self.table_hash,
            "cost_model": sha256(self.cost_model)[:16] if self.cost_model else None,
            "device": devices.cpu_device(), "inputs": [list(x.shape) for x in self.task.example()],
            "threads": settings.threads, "backend": settings.backend, "risk": settings.risk,
            "patterns": list(settings.patterns) if settings.patterns else None, "excluded": list(self.task.excluded),
        }  # fmt: skip

    def digest(self, settings: Settings) -> str:
        """What the profile depends on."""
        parts = [self.key(settings), asdict(settings), self.recipe]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def read_inputs(
    task: Task, table: Place, cost_model: Path | None, database: Path, method: str = "adaprune"
) -> Inputs:
    """Load the model and hash what is given. Raises what these raise when they are missing or damaged."""
    model = task.model()
    hashes = model_hash(model), tables.table_hash(table), recipe(task, method)
    return Inputs(task, model, table, cost_model, database, *hashes)


def search(
    inputs: Inputs,
    settings: Settings,
    *,
    remeasure: bool = False,
    processes: int = 1,
    progress: Progress = lambda what, done, total: None,
) -> Profile:
    """The profile of least loss that was measured to be `settings.target` times as fast as the fastest dense engine.

    Raises Infeasible when no profile can be, PromiseMissed when none was, and BadData for inputs that do not fit.
    """
    problem, judge, whole = prepare(inputs, settings, remeasure=remeasure, processes=processes, progress=progress)
    sessions: list[Timings] = []
    known = {engine: seconds.value for engine, seconds in whole.dense.items()}

    def measure(choices: Sequence[Choice]) -> list[Measured]:
        sessions.append(time_profiles(inputs, settings, problem.layers, choices, known, progress))
        return [measured(sessions, choice, settings.risk) for choice in choices]

    kept = keep_promise(problem, judge, measure, settings, progress, quick=judge.quick)
    return _profile(inputs, settings, kept)


def prepare(
    inputs: Inputs,
    settings: Settings,
    *,
    remeasure: bool = False,
    processes: int = 1,
    progress: Progress = lambda what, done, total: None,
) -> tuple[Problem, Judge, overhead.WholeModel]:
    """What a search begins with: the problem with its errors, who judges profiles, and what whole models take.

    Whole models are timed, and layers pruned, in so many processes, unless that was done before. Raises as `search`
    does.
    """
    task = inputs.task
    progress("reading the table", None, None)
    shapes = prunable_layers(task, inputs.model)
    with torch.inference_mode():
        task.loss(inputs.model, task.calibration()[0])  # a task that cannot be judged is refused before any work
    layers = timed_layers(inputs, settings, shapes)
    database = Database(inputs.database, inputs.model_hash, inputs.recipe)
    whole = _whole_model(inputs, settings, layers, remeasure, progress)
    problem = whole.problem(layers)
    if settings.strategy != "uniform":  # which has one option everywhere, also where another would be better
        problem = problem.without_hopeless()
    problem.certain().budget(settings.target)  # Infeasible is said before an hour of pruning, not after

    options = {
        layer.name: [(option.pattern, option.sparsity) for option in layer.options] for layer in problem.layers
    }
    build_database(
        task, inputs.model, options, database,
        lambda done, total: progress("pruning layers into the database", done, total),
        method=settings.method, processes=processes,
    )  # fmt: skip
    problem = problem.with_errors(_errors(problem, database))
    return problem, Judge(task, inputs.model, problem.layers, database, settings.batches), whole


def timed_layers(inputs: Inputs, settings: Settings, shapes: Mapping[str, Shape]) -> tuple[Layer, ...]:
    """The layers with their options' seconds on the backend. Raises BadData where the table has none for a layer."""
    if inputs.cost_model is None:
        return measured_layers(
            in_network(inputs.table, threads=settings.threads), inputs.task.name, shapes,
            threads=settings.threads, batch=len(inputs.task.example()[0]), coverage=settings.risk,
        )  # fmt: skip
    rows = swept_rows(inputs.table, set(shapes.values()), threads=settings.threads, backend=settings.backend)
    return predicted_layers(
        cost_models.load(inputs.cost_model, inputs.table), rows, shapes,
        threads=settings.threads, backend=settings.backend, patterns=settings.patterns, coverage=settings.risk,
    )  # fmt: skip


def prunable_layers(task: Task, model: Any) -> dict[str, Shape]:
    """The layers to choose for, by name: what can be pruned, but for the task's `excluded`. Raises UsageError."""
    traced, skipped = workloads.trace(model, task.example())
    known = {layer.name for layer in traced.layers} | {name for name, _ in skipped}
    if unknown := [name for name in task.excluded if name not in known]:
        raise UsageError(f"task {task.name} excludes {', '.join(unknown)}, which its model does not have")
    shapes = {layer.name: layer.shape for layer in traced.layers if layer.name not in task.excluded}
    if not shapes:
        raise UsageError(f"the model of task {task.name} has no layer that can be pruned")
    return shapes


@dataclass(frozen=True)
class Measured:
    """A profile timed end to end: its speedup over `dense_engine`, whose seconds are of the same rounds."""

    speedup: Interval
    dense: Interval
    dense_engine: str

    @property
    def seconds(self) -> Interval:
        """The pruned model's seconds beside dense ones of `dense.value`: the ratio, which is known best."""
        dense = self.dense.value
        return Interval(dense / self.speedup.value, dense / self.speedup.high, dense / self.speedup.low)


@dataclass(frozen=True)
class Tried:
    """A profile that a search found, and the least error that its budget allowed."""

    found: Found
    bound: float


@dataclass(frozen=True)
class Kept:
    """A profile that was measured to keep the promise, and the problem that predicts just that for it."""

    problem: Problem
    found: Found
    bound: float
    measured: Measured


def keep_promise(
    problem: Problem,
    judge: Callable[[Choice], float],
    measure: Callable[[Sequence[Choice]], list[Measured]],
    settings: Settings,
    progress: Progress,
    *,
    quick: Callable[[Choice], float] | None = None,
) -> Kept:
    """Search, measure, correct the prediction, search again; the profile of least loss among those that held.

    The first profile is the solver's own, which costs no search and shows how predictions fare where it counts.
    `judge` is the loss of a profile, `quick` a cheaper stand-in for it while many are tried; `measure` times profiles
    side by side and answers with all that it knows of each by then. Raises Infeasible or PromiseMissed if none held
    after a few rounds.
    """
    tried: dict[Choice, Tried] = {}
    times: dict[Choice, Measured] = {}
    if not _fits(problem, settings.target):
        # The predictions are too uncertain to promise it, yet it may be so: measuring will tell.
        problem = problem.certain()
    for number in range(1 + ROUNDS):
        try:
            solution = problem.solve(settings.target)
            if number == 0 and settings.strategy == "spdy":
                loss = judge(solution.choice)
                found = Found(solution.choice, loss, "equal", (Evaluation(solution.choice, loss, "equal"),))
            else:
                found = find(
                    settings.strategy, problem, settings.target, judge, quick or judge,
                    seed=settings.seed, evaluations=settings.evaluations, progress=_round(progress, number),
                )  # fmt: skip
        except Infeasible:
            if not any(one.speedup.low >= settings.target for one in times.values()):
                raise
            break
        if found.choice in tried:
            break
        tried[found.choice] = Tried(found, solution.bound)  # the bound of the budget that this round had
        times = dict(zip(tried, measure(list(tried)), strict=True))
        latest = times[found.choice]
        if number > 0 and settings.target <= latest.speedup.low <= settings.target * (1 + TO_SPARE):
            break
        problem = _corrected(problem, found.choice, latest)
    held = [choice for choice, one in times.items() if one.speedup.low >= settings.target]
    if not held:
        fastest = max(times.values(), key=lambda one: one.speedup.low).speedup
        raise PromiseMissed(
            f"{settings.target:g}x was not kept when it was measured: of {len(tried)} profiles that should have, the "
            f"best reached {fastest.value:.2f}x ({fastest.low:.2f}-{fastest.high:.2f}x) end to end; ask for less, or "
            "search again with --remeasure when the machine is quiet"
        )
    best = min(held, key=lambda choice: tried[choice].found.loss)
    return Kept(_corrected(problem, best, times[best]), tried[best].found, tried[best].bound, times[best])


def _corrected(problem: Problem, choice: Choice, measured: Measured) -> Problem:
    return problem.calibrated(choice, measured.seconds, measured.dense, measured.dense_engine)


def _round(progress: Progress, number: int) -> Progress:
    """Progress of a search that goes again."""
    return progress if number < 2 else lambda what, done, total: progress(f"{what}, round {number}", done, total)


def _fits(problem: Problem, target: float) -> bool:
    try:
        problem.budget(target)
    except Infeasible:
        return False
    return True


def time_profiles(
    inputs: Inputs,
    settings: Settings,
    layers: Sequence[Layer],
    choices: Sequence[Choice],
    known: Mapping[str, float],
    progress: Progress,
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
    for choice in choices:
        chosen = overhead.by_name(layers, choice)
        arguments = (task.reference, settings.threads, settings.backend, database, inputs.model_hash, chosen)
        engines[str(choice)] = Engine("pruned", "search.engines:database_pruned", arguments)
    with cpu_lock(progress):
        required = [fastest, *map(str, choices)]
        return time_engines(engines, threads=settings.threads, required=required, known=known, progress=progress)


def measured(sessions: Sequence[Timings], choice: Choice, coverage: float) -> Measured:
    """What all the sessions that timed this profile say of it."""
    own = [session for session in sessions if str(choice) in session.blocks]
    dense = own[-1].fastest(list(DENSE_ENGINES))
    together = pooled(own, [dense, str(choice)])
    speedup = together.speedup(str(choice), dense, coverage)
    room = unseen(PROCESSES * len(own))
    wider = Interval(speedup.value, speedup.low * (1 - room), speedup.high * (1 + room))
    return Measured(wider, together.seconds(dense, coverage), dense)


def _whole_model(
    inputs: Inputs, settings: Settings, layers: Sequence[Layer], remeasure: bool, progress: Progress
) -> overhead.WholeModel:
    path = inputs.database / "whole_model.json"
    known = None if remeasure else overhead.load(path, inputs.key(settings))
    if known is not None:
        return known
    with cpu_lock(progress):
        whole = overhead.measure_whole_model(
            inputs.task, layers,
            threads=settings.threads, backend=settings.backend, coverage=settings.risk, progress=progress,
        )  # fmt: skip
    overhead.save(whole, inputs.key(settings), path)
    return whole


def _errors(problem: Problem, database: Database) -> dict[str, dict[Option, float]]:
    return {
        layer.name: {
            option: database.error(layer.name, option.pattern, option.sparsity)
            for option in layer.options
            if option.pattern != DENSE
        }
        for layer in problem.layers
    }


def _profile(inputs: Inputs, settings: Settings, kept: Kept) -> Profile:
    problem, found = kept.problem, kept.found
    predicted = problem.predict(found.choice)
    chosen = {
        layer.name: LayerChoice(
            layer.options[j].pattern, layer.options[j].sparsity,
            float(layer.seconds[j]), float(layer.low[j]), float(layer.high[j]), float(layer.errors[j]),
        )
        for layer, j in zip(problem.layers, found.choice, strict=True)
    }  # fmt: skip
    return Profile(
        task=inputs.task.name,
        layers=chosen,
        backend=settings.backend,
        threads=settings.threads,
        batch=int(inputs.task.example()[0].shape[0]),
        device=devices.cpu_device(),
        target=settings.target,
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
        error=sum_in_order(choice.error for choice in chosen.values()),
        bound=kept.bound,
        ceiling=problem.ceiling,
        strategy=FOUND_BY[found.found_by],
        seed=settings.seed,
        table_hash=inputs.table_hash,
        model_hash=inputs.model_hash,
        inputs=inputs.digest(settings),
    )
