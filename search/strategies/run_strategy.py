"""Find the profile of least loss within the budget, by one of five strategies.

- staged: an option for each layer. It learns from the losses of profiles what each layer adds.
- spdy: an option for each layer. SPDY's coefficient search as published, a baseline.
- evopress: an option for each layer. EvoPress's evolution of one profile, a baseline.
- once: the profile of least total error, solved for once without any loss.
- uniform: one pattern and sparsity in all layers, a baseline.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from search.knapsack.arrays import Choice, Floats, Solver
from search.problem.layers import list_options
from search.problem.priors import build_quadratic_prior
from search.problem.problem import Problem
from search.progress import Progress
from search.strategies.additive_loss import build_layer_priors
from search.strategies.evaluation_budget import BudgetExhausted, EvaluationBudget, ProfileEvaluator, SearchResult
from search.strategies.evopress import run_evopress
from search.strategies.spdy import run_spdy_search
from search.strategies.staged import run_staged_search

STRATEGIES = ("staged", "spdy", "evopress", "once", "uniform")

PUBLISHED = ("spdy", "evopress")
"""Strategies of other authors, which are baselines."""

NOT_DRAWN = ("solve once", "uniform")
"""Values of `found_by` of profiles that were not selected for their loss."""

FINALISTS = 8
"""Profiles that are evaluated on all batches at the end."""

STARTS = 2
"""Uniform profiles that the staged search starts with."""


@dataclass(frozen=True)
class StrategySettings:
    """How to search.

    Attributes
    ----------
    strategy
        One of STRATEGIES.
    evaluations
        Evaluations at most.
    seed
        Random seed.
    batches
        The first batches of the calibration data that an evaluation uses. If these are not all, the best profiles are
        evaluated on all batches at the end.
    deadline
        Reading of `clock` (seconds) after which no evaluation begins.
    clock
        Returns seconds.
    """

    strategy: str
    evaluations: int
    seed: int = 0
    batches: int | None = None
    deadline: float = math.inf
    clock: Callable[[], float] = time.monotonic


def run_strategy(
    settings: StrategySettings,
    problem: Problem,
    target: float,
    evaluator: ProfileEvaluator,
    *,
    known: Mapping[Choice, str] | None = None,
    missed: Collection[Choice] = (),
    progress: Progress = lambda what, done, total: None,
) -> SearchResult:
    """Find the profile of least loss that reaches a target. It also keeps the problem's second budget.

    Parameters
    ----------
    settings
        The strategy, its seed, and its limits.
    problem
        The problem with its errors.
    target
        The speedup over the dense model.
    evaluator
        Computes the losses of profiles.
    known
        Profiles that were evaluated before, and how they were found. Those that keep the budgets can be the result.
    missed
        Profiles that were measured to miss the target. One of them is the result only if there is no other.
    progress
        Receives what is done.

    Raises
    ------
    Infeasible
        No profile reaches the target.
    """

    def report(spent: float, best: float) -> None:
        progress(f"searching: calibration loss {best:.4f}", int(spent), settings.evaluations)

    solver = problem.solver(target, quick=True)
    reusable = {
        choice: found_by
        for choice, found_by in (known or {}).items()
        if _is_result(settings.strategy, found_by) and problem.keeps(choice, target)
    }
    budget = EvaluationBudget(
        evaluator, settings.evaluations, batches=settings.batches, known=reusable, deadline=settings.deadline,
        clock=settings.clock, report=report,
    )  # fmt: skip
    with contextlib.suppress(BudgetExhausted):
        _search(settings, problem, target, solver, budget)
    result = budget.result
    # The least of many losses on few images is too favourable, but not for profiles selected without their loss.
    ranked = sorted(result.trace, key=lambda profile: (profile.choice in missed, profile.loss))
    if budget.batches == evaluator.batches:
        return replace(result, choice=ranked[0].choice, loss=ranked[0].loss, found_by=ranked[0].found_by)
    finalists = [*ranked[:FINALISTS], *(it for it in ranked[FINALISTS:] if it.found_by in NOT_DRAWN)]
    progress(f"evaluating the best {len(finalists)} profiles on all calibration data", None, None)
    losses = evaluator.losses([profile.choice for profile in finalists], evaluator.batches)
    best, loss = min(zip(finalists, losses, strict=True), key=lambda pair: (pair[0].choice in missed, pair[1]))
    return replace(result, choice=best.choice, loss=loss, found_by=best.found_by)


def _is_result(strategy: str, found_by: str) -> bool:
    """Return whether a strategy accepts a known profile: published searches start only from their own."""
    return found_by == strategy if strategy in PUBLISHED else strategy != "once"


def _search(
    settings: StrategySettings, problem: Problem, target: float, solver: Solver, budget: EvaluationBudget
) -> None:
    """Evaluate the profiles of a strategy. Raises BudgetExhausted when the budget is used up."""
    rng = np.random.default_rng(settings.seed)
    if settings.strategy == "uniform":
        budget.losses(problem.uniform_profiles(target) or [problem.best_uniform(target)], found_by="uniform")
    elif settings.strategy == "once":
        budget.losses([problem.solve(target).choice], found_by="solve once")
    elif settings.strategy == "spdy":
        run_spdy_search(budget, solver, build_quadratic_priors(problem), rng)
    elif settings.strategy == "evopress":
        uniform = problem.uniform_profiles(target) or [problem.solve(target).choice]
        start = budget.best.choice if budget.known else uniform[0]  # a later round goes on
        run_evopress(budget, start, rank_options(problem, start), lambda choice: problem.keeps(choice, target), rng)
    else:
        starts = problem.uniform_profiles(target)[:STARTS]
        sparsities = [np.array([option.sparsity for option in layer.options]) for layer in problem.layers]
        priors = build_layer_priors(problem.errors, sparsities)
        run_staged_search(budget, solver, priors, rng, starts=starts)


def rank_options(problem: Problem, start: Choice) -> list[list[int]]:
    """Return the options of each layer from the slowest to the fastest.

    Left out are those that another option beats in everything that counts, unless `start` has them.
    """
    efficient = problem.without_dominated(by_errors=True)
    ranked = []
    for layer, left, own in zip(problem.layers, efficient.layers, start, strict=True):
        kept = [j for j, option in enumerate(layer.options) if option in left.options or j == own]
        ranked.append(sorted(kept, key=lambda j, layer=layer: (-layer.high[j], layer.errors[j])))  # type: ignore[misc]
    return ranked


def build_quadratic_priors(problem: Problem) -> list[Floats]:
    """Return SPDY's priors, an array (options,) for each layer: by the rank of a sparsity among those of all layers.

    Options that were left out of the problem do not count.
    """
    grid = [option.sparsity for option in list_options(problem.layers)]
    return [build_quadratic_prior([option.sparsity for option in layer.options], grid) for layer in problem.layers]
