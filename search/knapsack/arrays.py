"""Types that all solvers of the knapsack share: arrays, options, the relaxation, a solution and the errors."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from latbench.errors import BadData, PromiseMissed

Choice = tuple[int, ...]
"""A profile: for each layer the index of its option."""

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


class BadProblem(BadData, ValueError):
    """Arrays that state no problem: ragged, empty, negative or not finite."""


class Infeasible(PromiseMissed):
    """No profile keeps the budget.

    Attributes
    ----------
    budget
        Seconds.
    fastest_seconds
        Seconds of the fastest profile.
    """

    def __init__(self, budget: float, fastest_seconds: float, sentence: str | None = None) -> None:
        super().__init__(sentence or f"no profile fits {budget:.6g} s: the fastest one takes {fastest_seconds:.6g} s")
        self.budget = budget
        self.fastest_seconds = fastest_seconds


@dataclass(frozen=True)
class Solution:
    """The profile that a solver found.

    Attributes
    ----------
    choice
        For each layer the index of its option.
    seconds, error
        Sums over the layers, in layer order.
    bound
        No profile that keeps the budget has a smaller error. `bound == error` certifies the optimum. The bound is
        smaller only where `max_states` cut the search short.
    """

    choice: Choice
    seconds: float
    error: float
    bound: float


Solver = Callable[[Sequence[Floats]], Solution]
"""Finds the profile of least error within its budgets. The argument holds an array of errors for each layer."""


OptionArrays = tuple[Floats, Floats, Indices]
RelaxationArrays = tuple[Indices, Floats, Floats, Floats, Floats]


class FlatOptions(NamedTuple):
    """The options of all layers in flat arrays, one layer after the other.

    Those of layer l lie from first[l] to first[l + 1]. `layer` holds the layer of each option, `position` its index
    in the caller's array of that layer.
    """

    seconds: Floats
    errors: Floats
    layer: Indices
    position: Indices
    first: Indices

    @property
    def arrays(self) -> OptionArrays:
        """Seconds, errors and first."""
        return self.seconds, self.errors, self.first

    def select(self, kept: NDArray[np.bool_]) -> FlatOptions:
        """Return the options marked in `kept`, at least one a layer."""
        layer = self.layer[kept]
        first = np.searchsorted(layer, np.arange(len(self.first)))
        return FlatOptions(self.seconds[kept], self.errors[kept], layer, self.position[kept], first)

    def sum_profile(self, taken: Indices) -> tuple[float, float, Choice]:
        """Return error, seconds and choice of a profile; `taken` holds one option a layer."""
        error, seconds = sum_in_order(self.errors[taken].tolist()), sum_in_order(self.seconds[taken].tolist())
        return error, seconds, tuple(self.position[taken].tolist())


class Relaxation(NamedTuple):
    """The linear relaxation, in which a layer may mix options, as steps from the fastest profile.

    Step i moves `layer[i]` along one edge of its convex hull to option `to[i]`. It takes `seconds[i]` more and gains
    `gain[i]` in error; `rate` is gain by seconds. The steps with the highest rates come first. Entry d of
    `fastest_seconds` and `fastest_error` sums the fastest options of the layers from d on.
    """

    layer: Indices
    seconds: Floats
    gain: Floats
    rate: Floats
    to: Indices
    fastest_seconds: Floats
    fastest_error: Floats

    @property
    def arrays(self) -> RelaxationArrays:
        """Layer, seconds and gain of the steps, and the sums of the fastest options."""
        return self.layer, self.seconds, self.gain, self.fastest_seconds, self.fastest_error

    def price(self, budget: float) -> float:
        """Return the value of a second at the budget, in error: the rate of the first step that does not fit."""
        unfit = np.flatnonzero(self.fastest_seconds[0] + np.cumsum(self.seconds) > budget)
        return float(self.rate[unfit[0]]) if len(unfit) else 0.0


def is_finite(value: Any) -> bool:
    """Return whether this is a finite number."""
    return isinstance(value, numbers.Real) and math.isfinite(value)


def sum_in_order(values: Iterable[float]) -> float:
    """Return the sum by plain float addition from first to last: the sum that is compared with the budget."""
    total = 0.0
    for value in values:
        total += float(value)
    return total
