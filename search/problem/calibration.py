"""Correct a problem by measurements of whole models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from search.knapsack.arrays import Choice, sum_in_order
from search.problem.layers import ROUNDING, Interval, convert_to_interval
from search.problem.problem import Problem


def calibrate(problem: Problem, choice: Choice, measured: Interval, dense: Interval, dense_engine: str) -> Problem:
    """Return the problem corrected by one measured profile and by the dense model.

    All layers become slower or faster by one factor, so that the prediction for `choice` becomes `measured`.

    Parameters
    ----------
    problem
        The problem with its predicted seconds.
    choice
        The profile that was measured.
    measured
        Seconds of that profile. It contains the noise of the ratio to `dense`: both come from the same rounds.
    dense
        Seconds of the dense model.
    dense_engine
        The engine that ran the dense model.
    """
    fixed = min(problem.fixed.value, measured.low / 2)
    layers = _layer_seconds(problem, choice)
    if not layers > 0:  # nothing to correct but what is around them
        return replace(problem, fixed=measured, dense=convert_to_interval(dense.value), dense_engine=dense_engine)
    factor = Interval(*((end - fixed) / layers for end in measured.ends))
    return _scale_layers(problem, factor, convert_to_interval(fixed), dense.value, dense_engine)


def fit_line(problem: Problem, measured: Mapping[Choice, float], dense: float, dense_engine: str) -> Problem | None:
    """Return the problem whose seconds follow the line through two measured profiles exactly.

    `measured` maps the two profiles to their seconds. Return None where there is no such line, because the profile
    that was predicted to be slower was not.
    """
    (first, seconds), (second, others) = (
        (_layer_seconds(problem, choice), took) for choice, took in measured.items()
    )
    if not (second - first) * (others - seconds) > 0:
        return None
    scale = (others - seconds) / (second - first)
    return _scale_layers(
        problem, convert_to_interval(scale), convert_to_interval(seconds - scale * first), dense, dense_engine
    )


def ignore_intervals(problem: Problem) -> Problem:
    """Return the problem as if every number were exact: for a search whose result is measured anyway."""
    fixed = convert_to_interval(problem.fixed.value)
    return _scale_layers(problem, convert_to_interval(1.0), fixed, problem.dense.value, problem.dense_engine)


def allow_only_fastest(problem: Problem, target: float) -> Problem:
    """Return the problem with a dense model of which only the fastest profile reaches the target.

    Raises Infeasible.
    """
    slowest = problem.predict(problem.fastest()).high * (1 + ROUNDING)
    return replace(problem, dense=convert_to_interval(slowest * target))


def _layer_seconds(problem: Problem, choice: Choice) -> float:
    """Return the sum of the layers' seconds."""
    return sum_in_order(layer.seconds[j] for layer, j in zip(problem.layers, choice, strict=True))


def _scale_layers(problem: Problem, factor: Interval, fixed: Interval, dense: float, dense_engine: str) -> Problem:
    """Return the problem whose layers take `factor` times their seconds."""
    scaled = problem.change_layers(lambda it: replace(
        it, seconds=it.seconds * factor.value, low=it.seconds * factor.low, high=it.seconds * factor.high
    ))  # fmt: skip
    return replace(scaled, fixed=fixed, dense=convert_to_interval(dense), dense_engine=dense_engine)
