"""The search as a user asks for it: from a task and a table to a profile whose promise was measured.

1. The pruned model is timed as a whole at a few profiles, beside the dense engines.
2. Every option that may pay is pruned into the layer database.
3. Profiles are searched, timed end to end against the dense engines, and searched again, until one was measured to
   keep the promise (`search.pipeline.speedup_loop`). Without such a measurement there is no profile.

Pruned layers, losses and timings are kept beside the database. The same search again, or one that was interrupted,
takes them from there. So do all later searches with verifications that were fed back
(`search.pipeline.search_history`).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from latbench.errors import PromiseMissed, UsageError
from search.artifacts.profile import LayerChoice, Profile
from search.deployment import Deployment
from search.knapsack.arrays import Choice, sum_in_order
from search.pipeline.search_history import SearchHistory
from search.pipeline.search_request import SearchInputs, SearchPlan, SearchRequest
from search.pipeline.search_setup import SearchSetup, set_up_search
from search.pipeline.speedup_loop import (
    MeasuredSpeedup,
    PromisedProfile,
    SearchRound,
    TargetMissed,
    is_verdict_clear,
    pool_sessions,
    run_speedup_loop,
    warn_of_noise,
    warn_of_overshoot,
)
from search.problem.layers import LayerOptions, expand_choice
from search.problem.problem import Problem
from search.problem.second_budget import count_model_bytes
from search.progress import Progress
from search.strategies.evaluation_budget import ProfileEvaluator, SearchResult
from search.strategies.run_strategy import StrategySettings, run_strategy
from search.whole_model import overhead
from search.whole_model.dense_rivals import find_fastest_dense, find_known_seconds, find_slower_engines
from search.whole_model.end_to_end import IsEnough, ModelTimer, RoundSchedule
from search.whole_model.engine_builders import build_dense_engines, build_pruned_engines
from search.whole_model.sessions import OptionsByLayer, Session, name_profile
from search.whole_model.timed_device import build_model_timer, find_timed_device
from search.whole_model.timings import Timings

MAX_VERIFIED = 2
"""Profiles of verifications, the last ones, that are timed beside what a search finds."""

ROUND_SCHEDULE = RoundSchedule(first=1)
"""A profile far from the target is told after one build. One near it needs all builds."""


class NearestProfile(PromiseMissed):
    """The target is out of reach. `profile` came nearest to it, with a lower target that it was measured to keep."""

    def __init__(self, sentence: str, profile: Profile) -> None:
        super().__init__(sentence)
        self.profile = profile


def search(
    inputs: SearchInputs,
    request: SearchRequest,
    *,
    remeasure: bool = False,
    timer: ModelTimer | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Profile:
    """Find the profile of least loss that was measured to reach the target.

    Parameters
    ----------
    inputs
        The task, the table, the cost model and the database (`read_inputs`).
    request
        The promise, and how to search for it.
    remeasure
        Time whole models again, although an earlier search has timed them.
    timer
        Times whole models; its processes serve a later verification, too. Default: one of this search.
    progress
        Called with the current step.

    Returns
    -------
    Profile
        The options of all layers, with the promise.

    Raises
    ------
    Infeasible
        No profile can reach the target.
    NearestProfile
        No measured profile reached it, and one was faster than dense.
    PromiseMissed
        No measured profile is faster than dense, or every profile that was tried ruins the model.
    BadData, UsageError
        The inputs do not fit together.
    """
    with contextlib.ExitStack() as stack:
        timer = timer or stack.enter_context(build_model_timer(request.deployment))
        setup = set_up_search(inputs, request, timer, remeasure=remeasure, progress=progress)
        return _find_profile(inputs, request, setup, timer, progress)


def _find_profile(
    inputs: SearchInputs, request: SearchRequest, setup: SearchSetup, timer: ModelTimer, progress: Progress
) -> Profile:
    """Search, time and correct, and return the profile that was measured to reach the target."""
    problem, evaluator, history = setup.problem, setup.evaluator, SearchHistory(inputs, request)
    digest, verified = history.digest(), history.read_verifications()

    def finish(promised: PromisedProfile) -> Profile:
        warn_of_overshoot(promised)
        additivity = compute_additivity(setup.layers, [setup.probes, *rounds.sessions])
        ceiling = setup.whole.ceiling
        return build_profile(inputs, request, promised, digest=digest, additivity=additivity, ceiling=ceiling)

    rounds = _RoundTimer(inputs, request, setup, timer, digest, verified, progress)
    try:
        with evaluator:
            search_round = build_search_round(request.plan, request.promise.target, evaluator, progress)
            choices = [one for one in _verified_choices(problem, verified) if problem.keeps_second_budget(one)]
            before = dict(zip(choices, evaluator.losses(choices, evaluator.batches), strict=True))
            promised = run_speedup_loop(problem, search_round, rounds.time, request.promise.target, before=before)
    except PromiseMissed as error:  # the machine may have been busy: the same search again measures again
        history.remove_rounds(digest)
        if isinstance(error, TargetMissed) and error.best is not None and math.isfinite(error.best.found.loss):
            raise NearestProfile(str(error), finish(error.best)) from error
        raise
    if not math.isfinite(promised.found.loss):
        raise PromiseMissed(
            f"every profile that was tried for {request.promise.target:g}x ruins the model: its loss is not finite; "
            "ask for a lower speedup, or exclude sensitive layers"
        )
    return finish(promised)


class _RoundTimer:
    """Times the profiles of a search side by side, and keeps the sessions; takes those of the same search again."""

    def __init__(
        self, inputs: SearchInputs, request: SearchRequest, setup: SearchSetup, timer: ModelTimer, digest: str,
        verified: Sequence[Session], progress: Progress,
    ) -> None:  # fmt: skip
        self._inputs, self._deployment, self._promise, self._timer = (
            inputs,
            request.deployment,
            request.promise,
            timer,
        )
        self._layers, self._verified, self._progress = setup.problem.layers, verified, progress
        self._probes = setup.probes
        self._history, self._digest = SearchHistory(inputs, request), digest
        self._earlier = self._history.read_rounds(digest)
        self.sessions: list[Session] = []

    def time(self, choices: Sequence[Choice]) -> list[MeasuredSpeedup]:
        """Return the speedups of these profiles, by this session and all before it."""
        options = [expand_choice(self._layers, choice) for choice in choices]
        profiles = {name_profile(it): it for it in options}
        number = len(self.sessions)
        if number < len(self._earlier) and set(self._earlier[number].profiles) == set(profiles):
            self.sessions.append(self._earlier[number])
        else:

            def is_clear(timings: Timings) -> bool:
                measured = self._pool([Session(profiles, timings)], list(profiles)[-1])
                return is_verdict_clear(measured.speedup, self._promise.target)

            before = [session.timings for session in (self._probes, *self._verified, *self.sessions)]
            timings = time_profiles(
                self._inputs, self._deployment, profiles, self._timer, is_clear, before=before,
                progress=self._progress,
            )  # fmt: skip
            self.sessions.append(Session(profiles, timings))
            self._history.write_rounds(self._digest, self.sessions)
        measured = [self._pool([], name) for name in profiles]
        warn_of_noise(measured[-1].speedup, self._promise)
        return measured

    def _pool(self, new: Sequence[Session], name: str) -> MeasuredSpeedup:
        return pool_sessions([*self._verified, *self.sessions, *new], name, self._promise.confidence)


def build_search_round(
    plan: SearchPlan, target: float, evaluator: ProfileEvaluator, progress: Progress,
    *, clock: Callable[[], float] = time.monotonic,
) -> SearchRound:  # fmt: skip
    """Return the function that searches one round of the speedup loop; its time budget runs from now on.

    Profiles that an earlier round evaluated count as found in later rounds, too, where they fit.
    """
    deadline = math.inf if plan.time_budget is None else clock() + plan.time_budget
    known: dict[Choice, str] = {}

    def search_round(problem: Problem, number: int, missed: Collection[Choice]) -> SearchResult:
        def tell(what: str, done: int | None, total: int | None) -> None:
            progress(what if number < 2 else f"{what}, round {number}", done, total)

        first = number == 0 and plan.strategy != "uniform"
        settings = StrategySettings(
            "once" if first else plan.strategy, plan.evaluations, plan.seed,
            batches=None if first else plan.batches, deadline=deadline, clock=clock,
        )  # fmt: skip
        found = run_strategy(settings, problem, target, evaluator, known=known, missed=missed, progress=tell)
        known.update({one.choice: one.found_by for one in found.trace})
        return found

    return search_round


def _verified_choices(problem: Problem, verified: Sequence[Session]) -> list[Choice]:
    """Return the profiles that were verified last, if the problem has their options."""
    found = []
    for session in verified[-MAX_VERIFIED:]:
        for options in session.profiles.values():
            with contextlib.suppress(UsageError):
                found.append(problem.selection(options).choice)
    return found


def compute_additivity(layers: Sequence[LayerOptions], sessions: Sequence[Session]) -> tuple[float, float]:
    """Return `overhead.compute_additivity` over all profiles that were timed.

    Parameters
    ----------
    layers
        The layers as predicted, each on its own.
    sessions
        The timings of whole models.
    """
    whole: dict[str, list[float]] = {}
    alone: dict[str, float] = {}
    for session in sessions:
        for name, options in session.profiles.items():
            alone[name] = overhead.sum_layer_seconds(layers, overhead.find_choice(layers, options))
            whole.setdefault(name, []).append(session.timings.seconds(name, 0.5).value)
    return overhead.compute_additivity(list(alone.values()), [float(np.median(whole[name])) for name in alone])


def time_profiles(
    inputs: SearchInputs,
    deployment: Deployment,
    profiles: Mapping[str, OptionsByLayer],
    timer: ModelTimer,
    is_clear: IsEnough,
    *,
    before: Sequence[Timings],
    progress: Progress,
) -> Timings:
    """Time the model with these options of the database against the dense engines, as `verify` does.

    Dense engines that are certainly slower than the fastest, by the sessions `before`, are left out. So are those of
    a GPU that could not run then, because to find that out again may take an hour. The timing ends after the first
    build for which `is_clear` returns True.
    """
    task, known = inputs.task, find_known_seconds(before)
    engines = build_dense_engines(task, deployment)
    failed = {name for timings in before for name in timings.left_out} if deployment.on_gpu else set()
    for name in find_slower_engines(before) | failed:
        engines.pop(name, None)
    database = str(inputs.database.resolve()), inputs.model_hash
    engines |= build_pruned_engines(task, deployment, profiles, database)
    with find_timed_device(deployment).lock(progress):
        required = [find_fastest_dense(before), *profiles]
        return timer.time(
            engines, required=required, schedule=ROUND_SCHEDULE, known=known, is_enough=is_clear, progress=progress
        )


def build_profile(
    inputs: SearchInputs,
    request: SearchRequest,
    promised: PromisedProfile,
    *,
    digest: str,
    additivity: tuple[float, float],
    ceiling: float | None,
) -> Profile:
    """Return the profile file of a promised profile."""
    problem, found, measured = promised.problem, promised.found, promised.measured
    promise, plan, deployment = request.promise, request.plan, request.deployment
    predicted = problem.predict(found.choice)
    layers = _describe_layers(problem, found.choice)
    error = sum_in_order(choice.error for choice in layers.values())
    budget = problem.second_budget
    return Profile(
        task=inputs.task.name,
        layers=layers,
        backend=deployment.backend,
        threads=deployment.threads,
        batch=inputs.task.example().batch,
        device=find_timed_device(deployment).name,
        target=promised.target,
        confidence=promise.confidence,
        dense_engine=measured.dense_engine,
        dense_seconds=measured.dense.value,
        dense_seconds_low=measured.dense.low,
        dense_seconds_high=measured.dense.high,
        fixed_seconds=problem.fixed.value,
        fixed_seconds_low=problem.fixed.low,
        fixed_seconds_high=problem.fixed.high,
        predicted_seconds=predicted.value,
        predicted_low=predicted.low,
        predicted_high=predicted.high,
        loss=found.loss,
        error=error,
        bound=min(error, promised.bound),  # the bound adds up tied layers first: the last bit may differ
        ceiling=ceiling,
        additivity_before=additivity[0],
        additivity_after=additivity[1],
        strategy=found.found_by + (", ended by the time budget" if found.out_of_time else ""),
        seed=plan.seed,
        most_bytes=promise.most_bytes,
        weight_bytes=budget.used(expand_choice(problem.layers, found.choice)) if budget else None,
        dense_bytes=float(count_model_bytes(inputs.model)) if budget else None,
        precisions=",".join(deployment.precisions),
        form=deployment.form,
        over=deployment.over,
        table_hash=inputs.table_hash,
        model_hash=inputs.model_hash,
        inputs=digest,
    )


def _describe_layers(problem: Problem, choice: Choice) -> dict[str, LayerChoice]:
    """Return the option of each layer, with its predicted seconds and its error."""
    return {
        part.name: LayerChoice(
            part.options[j].pattern, part.options[j].sparsity,
            float(part.seconds[j]), float(part.low[j]), float(part.high[j]), float(part.errors[j]),
            part.options[j].precision,
        )
        for layer, j in zip(problem.layers, choice, strict=True)
        for part in layer.parts
    }  # fmt: skip
