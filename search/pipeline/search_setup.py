"""Set up a search: time whole models, prune layers, and build the problem and the evaluator of profiles.

For latbench's own kernels a cost model predicts each layer's seconds from its shape. For DeepSparse the table has the
seconds of the layers themselves, measured inside the network (`latbench layers`): there the position of a layer
counts, and nothing is predicted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cost_models.model_file import load
from latbench.backends.cpu.cpu_versions import describe_old_kernels
from latbench.errors import BadData, UsageError
from search.artifacts.layer_database import Database
from search.deployment import Deployment
from search.inputs import layer_errors
from search.inputs.gpu_rows import read_gpu_rows
from search.inputs.layer_builder import build_network_layers, build_predicted_layers
from search.inputs.layer_errors import read_errors
from search.inputs.table_rows import read_network_rows, read_sweep_rows, select_engine_rows
from search.loss.cache import LossCache
from search.loss.evaluation_conditions import compute_dense_loss
from search.loss.parallel import ParallelEvaluator
from search.loss.pools import open_pool
from search.pipeline.likely_options import select_likely_options
from search.pipeline.search_history import SearchHistory
from search.pipeline.search_request import CandidateOptions, SearchInputs, SearchRequest
from search.pipeline.speedup_loop import calibrate_to, pool_sessions, warn_of_noise
from search.problem.calibration import ignore_intervals
from search.problem.error_table import LayerErrors
from search.problem.layers import LayerOptions
from search.problem.problem import Problem
from search.problem.second_budget import build_model_budget
from search.progress import Progress
from search.pruning.one_shot.fill_database import fill_database
from search.strategies import chance_constraint as chance
from search.traced_layers import list_prunable_layers
from search.whole_model import overhead
from search.whole_model.end_to_end import ModelTimer
from search.whole_model.sessions import Session
from search.whole_model.timed_device import find_timed_device
from sparse_kernels.shapes import Shape

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class SearchSetup:
    """What a search begins with.

    Attributes
    ----------
    problem
        The problem with its errors.
    evaluator
        Computes the losses of profiles.
    layers
        The layers as predicted, each on its own.
    probes
        The session of the probe profiles.
    whole
        The line that was fitted to it.
    """

    problem: Problem
    evaluator: ParallelEvaluator
    layers: tuple[LayerOptions, ...]
    probes: Session
    whole: overhead.WholeModel


def set_up_search(
    inputs: SearchInputs,
    request: SearchRequest,
    timer: ModelTimer,
    *,
    remeasure: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> SearchSetup:
    """Time whole models and prune layers, unless that was done before; raise what `search` raises.

    The order of the steps reports faults of the inputs, and a target out of reach, before any long work.
    """
    task, promise, workers, history = inputs.task, request.promise, request.workers, SearchHistory(inputs, request)
    if promise.most_bytes is not None and request.deployment.on_gpu:
        backend = request.deployment.backend
        raise UsageError(f"--most-bytes does not go with {backend}: it counts weights as CPU kernels pack them")
    with open_pool(workers.pool, workers.processes):  # raises where there is no worker
        pass
    progress("reading the table", None, None)
    shapes = list_prunable_layers(task, inputs.model)
    compute_dense_loss(task, inputs.model, task.calibration()[0])
    source = request.candidates.errors
    given = None if source in layer_errors.KINDS else read_errors(Path(source))
    layers = build_layers(inputs, request.deployment, request.candidates, promise.coverage, shapes)
    task.limits.apply(layers)  # raises for limits that contradict each other
    database = Database(inputs.database, inputs.model_hash, inputs.provenance)
    probes = _find_probes(inputs, request.deployment, layers, history, timer, remeasure, progress)
    names = list(probes.profiles)  # from dense to the fastest
    warn_of_noise(pool_sessions([probes], names[len(names) // 2], promise.confidence).speedup, promise)
    whole = overhead.fit_whole_model(layers, probes, promise.coverage)
    verified = history.read_verifications()

    def limit(problem: Problem) -> Problem:
        problem = replace(problem, layers=task.limits.apply(problem.layers))
        if promise.most_bytes is not None:
            budget = build_model_budget(inputs.model, problem.layers, shapes, promise.most_bytes)
            problem = replace(problem, second_budget=budget)
        return problem if given is None else problem.with_errors(given)

    def select(problem: Problem) -> Problem:
        if request.plan.strategy == "uniform":  # it needs the same option everywhere, even a dominated one
            return problem
        return problem.without_dominated(by_errors=given is not None)

    # A target is refused only if it is out of reach at the favourable ends of the predictions. A verification says
    # nothing certain about other profiles, so the search times the fastest profile before it refuses a target.
    limit(whole.build_problem(layers)).check_could_reach(promise.target)
    problem = limit(_calibrate_by_verification(whole.build_problem(layers), verified, promise.confidence))
    prune = _Pruning(inputs, database, workers.prune_processes, progress)
    if request.plan.quick and request.plan.strategy != "uniform" and given is None:
        progress("estimating the errors of options", None, None)
        # Whole models are measured later: what is uncertain about single layers excludes no option here.
        problem = select_likely_options(select(ignore_intervals(problem)), task, inputs.model, promise.target)
    problem = prune.options(select(problem)) if given is not None else prune.with_errors(problem, select, source)
    if not verified:  # a verification moves all layers together
        problem = chance.assume_independent_times(problem, promise.target)
    names = [part.name for layer in problem.layers for part in layer.parts]
    cache = LossCache(names, inputs.database / "trials.jsonl", history.loss_key())
    evaluator = ParallelEvaluator(task, inputs.model, problem.layers, database, cache, workers, inputs.conditions)
    return SearchSetup(problem, evaluator, layers, probes, whole)


@dataclass(frozen=True)
class _Pruning:
    """Prunes options of layers into the database."""

    inputs: SearchInputs
    database: Database
    processes: int
    progress: Progress

    def options(self, problem: Problem) -> Problem:
        """Prune every option of the problem; return the problem."""
        options = {part.name: part.options for layer in problem.layers for part in layer.parts}
        fill_database(
            self.inputs.task, self.inputs.model, options, self.database,
            lambda done, total: self.progress("pruning layers into the database", done, total),
            method=self.inputs.method, processes=self.processes,
        )  # fmt: skip
        return problem

    def with_errors(self, possible: Problem, select: Callable[[Problem], Problem], kind: str) -> Problem:
        """Prune the selected options and return their problem, with errors of this kind.

        An option with an infinite error is dropped, and options that it dominated are pruned, too.
        """
        while True:
            problem = self.options(select(possible))
            errors = self._errors(problem, kind)
            if all(math.isfinite(error) for own in errors.values() for error in own.values()):
                return problem.with_errors(errors)
            possible = possible.without_infinite_errors(errors)

    def _errors(self, problem: Problem, kind: str) -> LayerErrors:
        if kind == "output":
            return layer_errors.read_output_errors(problem, self.database)
        return layer_errors.compute_weight_errors(problem, self.database, self.inputs.model)


def _calibrate_by_verification(problem: Problem, verified: Sequence[Session], confidence: float) -> Problem:
    """Return the problem corrected by the last verification of a profile that its layers can have."""
    for session in reversed(verified):
        [(name, options)] = session.profiles.items()
        try:
            choice = overhead.find_choice(problem.layers, options)
        except BadData:  # it still counts for profiles that are measured
            continue
        return calibrate_to(problem, choice, pool_sessions(verified, name, confidence))
    return problem


def build_layers(
    inputs: SearchInputs, deployment: Deployment, candidates: CandidateOptions, coverage: float,
    shapes: Mapping[str, Shape],
) -> tuple[LayerOptions, ...]:  # fmt: skip
    """Return the layers with their options' seconds on the backend.

    Raises BadData where the table has none for a layer.
    """
    threads, backend = deployment.threads, deployment.backend
    if inputs.cost_model is None:
        return build_network_layers(
            read_network_rows(inputs.table, threads=threads), inputs.task.name, shapes,
            threads=threads, batch=inputs.task.example().batch, coverage=coverage,
        )  # fmt: skip
    if deployment.on_gpu:
        engine = read_gpu_rows(inputs.table, set(shapes.values()), find_timed_device(deployment).name)
    else:
        rows = read_sweep_rows(inputs.table, set(shapes.values()), threads=threads, backends=[backend])
        engine = select_engine_rows(rows, deployment)
    if (old := describe_old_kernels(engine.rows, inputs.table)) is not None:
        _LOG.warning(old)
    return build_predicted_layers(
        load(inputs.cost_model, inputs.table), engine.with_patterns(candidates.patterns), shapes,
        sparsities=candidates.sparsities, coverage=coverage,
    )  # fmt: skip


def _find_probes(
    inputs: SearchInputs, deployment: Deployment, layers: Sequence[LayerOptions], history: SearchHistory,
    timer: ModelTimer, remeasure: bool, progress: Progress,
) -> Session:  # fmt: skip
    """Return the session of the probe profiles: a known one, or a new one that is kept."""
    if not remeasure and (known := history.read_probes()):
        return known
    with find_timed_device(deployment).lock(progress):
        session = overhead.time_probe_profiles(inputs.task, layers, deployment, timer, progress)
    history.write_probes(session)
    return session
