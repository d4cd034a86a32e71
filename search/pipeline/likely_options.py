"""Options that a search is likely to choose, found by cheap errors before any layer is pruned.

Pruning a layer well takes far longer than drawing a mask. So the error of each option is estimated first, from its
mask: the share of the output's energy that the dropped weights carry, the sum of w_ij^2 x_j^2 over them (Wanda: Sun
et al. 2023, section 3). Correlations between inputs, and what the other weights compensate for, are left out. Both
change an error much, but the errors of one layer alike. In eight bits the rounding of weights and of inputs is added:
a twelfth of a squared step each, with steps that reach the largest.

Then the exact solver is asked many times, each time with other errors and another target nearby: a layer may matter
more or less than its error says, and the estimates of different patterns are off by different factors. The options
that it chooses most often are likely to be chosen with the true errors, too.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from latbench.base.engine_registry import INT8
from latbench.errors import BadData
from search.knapsack.arrays import Choice, Floats, Infeasible
from search.knapsack.one_budget import solve
from search.problem.error_table import LayerErrors
from search.problem.layers import Option
from search.problem.problem import Problem
from search.pruning.forward_hooks import register_forward_hooks
from search.pruning.one_shot.hessian import sum_input_squares
from search.pruning.quantization.input_ranges import InputReading, find_input_ranges
from search.task import Task
from sparse_kernels.formats.int8 import LARGEST
from sparse_kernels.patterns import Dense, ShflBW, parse
from sparse_kernels.prunable_layers import weight_matrix
from sparse_kernels.top_units import Mask

DRAWS = 32

LAYER_SPREAD, PATTERN_SPREAD = math.log(2.0), math.log(1.3)
"""Standard deviations of log errors: of all options of a layer, and of those of one pattern in it."""

TARGETS = (0.9, 1.4)
"""Multiples of the target between which the solver is asked: predictions of whole models are corrected later."""

MOST_OPTIONS = 6
"""Options of a layer that stay, at most, beside dense and the fastest one."""


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
    chosen: list[Counter[int]] = [Counter() for _ in known.layers]
    for choice in _draw_choices(known, target, np.random.default_rng(0)):
        for counts, option in zip(chosen, choice, strict=True):
            counts[option] += 1
    if not any(chosen):
        return problem
    layers = []
    for layer, counts in zip(problem.layers, chosen, strict=True):
        likely = {option for option, _ in counts.most_common(MOST_OPTIONS)}
        likely |= {j for j, option in enumerate(layer.options) if option.in_database is None}
        layers.append(layer.take(sorted(likely | {int(np.argmin(layer.high))})))
    return replace(problem, layers=tuple(layers))


def _draw_choices(problem: Problem, target: float, rng: np.random.Generator) -> Iterator[Choice]:
    """Yield what the solver chooses: first for the target and the errors as they are, then for others nearby."""
    patterns = [[f"{it.pattern} {it.precision}" for it in layer.options] for layer in problem.layers]
    for draw in range(DRAWS):
        factor, errors = 1.0, problem.errors
        if draw:
            factor = float(rng.uniform(*TARGETS))
            errors = [own * _draw_factors(names, rng) for own, names in zip(errors, patterns, strict=True)]
        budget = problem.dense.value / (factor * target) - problem.fixed.value
        with contextlib.suppress(Infeasible):
            yield solve([layer.seconds for layer in problem.layers], errors, budget).choice


def _draw_factors(patterns: Sequence[str], rng: np.random.Generator) -> Floats:
    """Draw the factors of a layer's errors: one of the layer, times one of each pattern and precision."""
    own = {pattern: rng.normal(0.0, PATTERN_SPREAD) for pattern in dict.fromkeys(patterns)}
    return np.exp(rng.normal(0.0, LAYER_SPREAD) + np.array([own[pattern] for pattern in patterns]))


def estimate_errors(problem: Problem, task: Task, model: nn.Module) -> LayerErrors:
    """Return for each option that changes its layer the share of the output's energy that it loses."""
    parts = [part for layer in problem.layers for part in layer.parts]
    energies = measure_input_energies(task, model, [part.name for part in parts])
    in_bytes = [part.name for part in parts if any(option.precision == INT8 for option in part.options)]
    readings = find_input_ranges(task, model, in_bytes, "minmax") if in_bytes else {}
    found: LayerErrors = {}
    for part in parts:
        weight = weight_matrix(model.get_submodule(part.name)).double()
        scores = (weight.square() * energies[part.name]).numpy()
        whole = float(scores.sum()) or 1.0
        known: dict[tuple[str, float], Mask] = {}
        own = found.setdefault(part.name, {})
        for option in part.options:
            if option.in_database is None:
                continue
            key = option.pattern, option.sparsity
            if key not in known:
                known[key] = _draw_mask(option, scores)
            lost = float(scores[~known[key]].sum())
            if option.precision == INT8:
                lost += _estimate_rounding(weight.numpy(), known[key], energies[part.name], readings[part.name])
            own[option] = lost / whole
    return found


def _estimate_rounding(weight: Floats, mask: Mask, energies: Tensor, reading: InputReading) -> float:
    """Estimate the energy that a layer's output loses if its kept weights and its inputs are rounded to steps."""
    kept = np.where(mask, weight, 0.0)
    steps = np.abs(kept).max(axis=1, initial=0.0) / LARGEST
    by_weights = float((steps[:, None] ** 2 / 12 * mask * energies.numpy()).sum())
    return by_weights + reading.rows * reading.squared_error * float((kept**2).sum())


def _draw_mask(option: Option, scores: Floats) -> Mask:
    """Draw the mask of an option; that of vectors for shuffled ones, whose groups take seconds to find."""
    pattern = parse(option.pattern)
    if isinstance(pattern, Dense):
        return np.ones(scores.shape, bool)
    return (pattern.in_order if isinstance(pattern, ShflBW) else pattern).mask(scores, option.sparsity)


def measure_input_energies(task: Task, model: nn.Module, layers: Sequence[str]) -> dict[str, Tensor]:
    """Return for each layer the sum of squares of each of its inputs over the calibration data, (k,) float64.

    Raises BadData if inputs are not finite.
    """
    modules = dict(model.named_modules())
    sums = {name: torch.zeros(weight_matrix(modules[name]).shape[1], dtype=torch.float64) for name in layers}

    def add(name: str, module: nn.Module, args: tuple[Any, ...], _: Any) -> None:
        sums[name] += sum_input_squares(module, args[0].detach())

    with torch.no_grad(), register_forward_hooks(model, {name: partial(add, name) for name in layers}):
        for batch in task.calibration():
            task.loss(model, batch)
    for name, energies in sums.items():
        if not bool(torch.isfinite(energies).all()):
            raise BadData(f"layer {name}: its inputs on the calibration data hold NaN or infinite values")
    return sums
