"""How the profile of least loss within the budget is looked for.

staged    every layer an option of its own: learnt from the losses of profiles what each layer adds, in stages
spdy      every layer an option of its own: SPDY's coefficient search as published, to compare with
once      the profile of least summed error, solved for once: no loss is looked at
uniform   one pattern and sparsity everywhere, to compare with
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import numpy as np

from search.knapsack.arrays import Choice, Floats
from search.problem.layers import list_options
from search.problem.priors import build_quadratic_prior
from search.problem.problem import Problem
from search.progress import Progress
from search.strategies.additive_loss import build_layer_priors
from search.strategies.evaluation_budget import BudgetExhausted, EvaluationBudget, ProfileEvaluator, SearchResult
from search.strategies.spdy import run_spdy_search
from search.strategies.staged import run_staged_search

STRATEGIES = ("staged", "spdy", "once", "uniform")

NOT_DRAWN = ("solve once", "uniform")
"""What says of an evaluation that its profile was not chosen for its loss."""

FINALISTS = 8

STARTS = 2
"""Uniform profiles that the staged search begins with."""


def run_strategy(
    strategy: str,
    problem: Problem,
    target: float,
    judge: ProfileEvaluator,
    *,
    seed: int,
    evaluations: int,
    batches: int | None = None,
    known: Mapping[Choice, str] | None = None,
    missed: Collection[Choice] = (),
    deadline: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
    progress: Progress = lambda what, done, total: None,
) -> SearchResult:
    """The profile of least loss that `strategy` finds for a speedup of `target`.

    It may spend `evaluations` on the first `batches` of the calibration data (all, if None; else the best it found
    are judged by all in the end), and begins none when `clock` has passed `deadline`. `known` profiles, which were
    judged before, are among what it found, with how they were found then, as far as they fit. Those that `missed`
    are not taken for the best while there is another. A second budget of the problem is kept, too. Raises Infeasible.
    """

    def tell(spent: float, best: float) -> None:
        progress(f"searching: calibration loss {best:.4f}", int(spent), evaluations)

    solver, rng = problem.solver(target, quick=True), np.random.default_rng(seed)

    def fits(choice: Choice) -> bool:
        return problem.keeps(choice, target)

    def counts(found_by: str) -> bool:
        """Whether what was found so may be this strategy's find: the published search has no start but its own."""
        return found_by == "spdy" if strategy == "spdy" else strategy != "once"

    account = EvaluationBudget(
        judge, evaluations, batches=batches, deadline=deadline, clock=clock, tell=tell,
        known={choice: found_by for choice, found_by in (known or {}).items() if counts(found_by) and fits(choice)},
    )  # fmt: skip
    with contextlib.suppress(BudgetExhausted):
        if strategy == "uniform":
            account.losses(problem.uniform_profiles(target) or [problem.best_uniform(target)], found_by="uniform")
        elif strategy == "once":
            account.losses([problem.solve(target).choice], found_by="solve once")
        elif strategy == "spdy":
            run_spdy_search(account, solver, build_quadratic_priors(problem), rng)
        else:
            starts = problem.uniform_profiles(target)[:STARTS]
            sparsities = [np.array([option.sparsity for option in layer.options]) for layer in problem.layers]
            priors = build_layer_priors(problem.errors, sparsities)
            run_staged_search(account, solver, priors, rng, starts=starts)
    found = account.found
    # The least of many losses on few images flatters its profile, and so less those that were not drawn to be least.
    ranked = sorted(found.trace, key=lambda one: (one.choice in missed, one.loss))
    if account.batches == judge.batches:
        return replace(found, choice=ranked[0].choice, loss=ranked[0].loss, found_by=ranked[0].found_by)
    finalists = [*ranked[:FINALISTS], *(one for one in ranked[FINALISTS:] if one.found_by in NOT_DRAWN)]
    progress(f"judging the best {len(finalists)} by all calibration data", None, None)
    losses = judge.losses([one.choice for one in finalists], judge.batches)
    best, loss = min(zip(finalists, losses, strict=True), key=lambda one: (one[0].choice in missed, one[1]))
    return replace(found, choice=best.choice, loss=loss, found_by=best.found_by)


def build_quadratic_priors(problem: Problem) -> list[Floats]:
    """The published priors, an array a layer: by the place of each sparsity among all that any layer has.

    That is a grid of those that are left where options were left out that cannot pay.
    """
    grid = [option.sparsity for option in list_options(problem.layers)]
    return [build_quadratic_prior([option.sparsity for option in layer.options], grid) for layer in problem.layers]
