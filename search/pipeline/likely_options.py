"""Options that a search is likely to choose, found by cheap errors before any layer is pruned.

Pruning a layer well takes far longer than drawing a mask. So the error of each option is estimated first, from its
mask: the share of the output's energy that the dropped weights carry, the sum of w_ij^2 x_j^2 over them (Wanda: Sun
et al. 2023, section 3). Correlations between inputs, and what the other weights compensate for, are left out. Both
change an error much, but the errors of one layer alike.

The solver's choice follows a price of time: in each layer it takes the option with the least cost, error + price *
seconds. So the best option of each pattern is kept at a few prices around the one that meets the target. It goes
where another pattern is far better. `PRICE_RANGE` leaves room for layers that matter more or less than their error
says, and `TOLERANCE` for the estimates of different patterns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from search.knapsack.arrays import Floats
from search.problem.error_table import LayerErrors
from search.problem.layers import DENSE, Option
from search.problem.problem import Problem
from search.pruning.forward_hooks import register_forward_hooks
from search.pruning.one_shot.hessian import extract_input_rows
from search.task import Task
from sparse_kernels.patterns import ShflBW, VectorWise, parse
from sparse_kernels.prunable_layers import weight_matrix
from sparse_kernels.top_units import Mask

PRICE_RANGE = 2.5
"""Factor by which a layer's price of time may differ from the common one, either way."""

TOLERANCE = 1.3
"""Factor by which the cost of a pattern may be above that of the best one."""

PRICES = 3


def select_likely_options(problem: Problem, task: Task, model: nn.Module, target: float) -> Problem:
    """Return the problem without the options that a search for this target is unlikely to choose.

    Dense and the fastest option of each layer stay. A problem with a second budget stays as it is, and so does one
    whose target is out of reach as predicted.

    Parameters
    ----------
    problem
        The problem, whose errors may be unknown.
    task, model
        The task and its dense model.
    target
        The speedup to reach.
    """
    if problem.second_budget is not None:
        return problem
    known = problem.with_errors(estimate_errors(problem, task, model))
    seconds_left = problem.dense.value / target - problem.fixed.value
    price = find_price([layer.seconds for layer in known.layers], known.errors, seconds_left)
    if price is None:
        return problem
    prices = np.geomspace(price / PRICE_RANGE, price * PRICE_RANGE, PRICES)
    layers = []
    for layer, errors in zip(problem.layers, known.errors, strict=True):
        likely = _find_likely([option.pattern for option in layer.options], layer.seconds, errors, prices)
        likely |= {j for j, option in enumerate(layer.options) if option.pattern == DENSE}
        layers.append(layer.take(sorted(likely | {int(np.argmin(layer.high))})))
    return replace(problem, layers=tuple(layers))


def _find_likely(patterns: Sequence[str], seconds: Floats, errors: Floats, prices: Floats) -> set[int]:
    """Return the options that are the best of their pattern at one of the prices, and hardly worse than the best."""
    likely: set[int] = set()
    for price in prices:
        cost = errors + price * seconds
        for pattern in set(patterns):
            own = [j for j, name in enumerate(patterns) if name == pattern]
            best = own[int(np.argmin(cost[own]))]
            if cost[best] <= TOLERANCE * cost.min():
                likely.add(best)
    return likely


def find_price(seconds: Sequence[Floats], errors: Sequence[Floats], budget: float) -> float | None:
    """Return the least price (error a second) at which the cheapest options of all layers keep the budget.

    None where even the fastest options do not, or where the options of least error do.

    Parameters
    ----------
    seconds, errors
        An array (options,) for each layer.
    budget
        Seconds.
    """

    def spend(price: float) -> float:
        choice = [int(np.argmin(e + price * t)) for t, e in zip(seconds, errors, strict=True)]
        return sum(float(t[j]) for t, j in zip(seconds, choice, strict=True))

    scale = sum(float(e.max()) for e in errors) / sum(float(t.max()) for t in seconds)
    low, high = 1e-9 * scale, 1e9 * scale
    if not (scale > 0 and spend(low) > budget >= spend(high)):
        return None
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if spend(middle) <= budget else (middle, high)
    return high


def estimate_errors(problem: Problem, task: Task, model: nn.Module) -> LayerErrors:
    """Return for each sparse option the share of the output's energy that its mask drops, in [0, 1]."""
    energies = measure_input_energies(task, model, [part.name for layer in problem.layers for part in layer.parts])
    found: LayerErrors = {}
    for part in (part for layer in problem.layers for part in layer.parts):
        weight = weight_matrix(model.get_submodule(part.name)).double()
        scores = (weight.square() * energies[part.name]).numpy()
        whole = float(scores.sum()) or 1.0
        found[part.name] = {
            option: float(scores[~_draw_mask(option, scores)].sum()) / whole
            for option in part.options
            if option.pattern != DENSE
        }
    return found


def _draw_mask(option: Option, scores: Floats) -> Mask:
    """Draw the mask of an option; that of vectors for shuffled ones, whose groups take seconds to find."""
    pattern = parse(option.pattern)
    return (VectorWise(pattern.v) if isinstance(pattern, ShflBW) else pattern).mask(scores, option.sparsity)


def measure_input_energies(task: Task, model: nn.Module, layers: Sequence[str]) -> dict[str, Tensor]:
    """Return for each layer the sum of squares of each of its inputs over the calibration data, (k,) float64."""
    modules = dict(model.named_modules())
    sums = {name: torch.zeros(weight_matrix(modules[name]).shape[1], dtype=torch.float64) for name in layers}

    def add(name: str, module: nn.Module, args: tuple[Any, ...], _: Any) -> None:
        sums[name] += extract_input_rows(module, args[0].detach()).double().square().sum(dim=0)

    with torch.no_grad(), register_forward_hooks(model, {name: partial(add, name) for name in layers}):
        for batch in task.calibration():
            task.loss(model, batch)
    return sums
