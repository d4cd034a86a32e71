"""What the solvers of the knapsack share: plain arrays, sums in layer order, a solution, and how a problem fails."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latbench.errors import BadData, PromiseMissed

Choice = tuple[int, ...]
"""One option a layer, as places in the layers' arrays."""

Floats = NDArray[np.float64]
Places = NDArray[np.intp]
Labels = tuple[Floats, Floats, NDArray[np.int64], float]

EPS = float(np.finfo(np.float64).eps)

LEAST_SECONDS = 1e-300


class BadProblem(BadData, ValueError):
    """The arrays do not state a problem: ragged, empty, negative or not finite."""


class Infeasible(PromiseMissed):
    """No profile fits the budget; the fastest one takes `fastest_seconds`."""

    def __init__(self, budget: float, fastest_seconds: float, sentence: str | None = None) -> None:
        super().__init__(sentence or f"no profile fits {budget:.6g} s: the fastest one takes {fastest_seconds:.6g} s")
        self.budget = budget
        self.fastest_seconds = fastest_seconds


@dataclass(frozen=True)
class Solution:
    """One option a layer. `seconds` and `error` are the sums in layer order; no profile that fits is below `bound`.

    `bound == error` certifies the optimum; it is smaller only where `max_states` cut the search short.
    """

    choice: Choice
    seconds: float
    error: float
    bound: float


Solver = Callable[[Sequence[Floats]], Solution]
"""What finds the profile of least error within its budgets, for errors that hold an array a layer."""


def is_finite(value: Any) -> bool:
    """Whether this is a number, and finite."""
    return isinstance(value, numbers.Real) and math.isfinite(value)


def sum_in_order(values: Iterable[float]) -> float:
    """Plain float addition from the first to the last: the sum that the budget is compared with."""
    total = 0.0
    for value in values:
        total += float(value)
    return total
