"""Predicted seconds of a whole model, and what they say about a speedup.

The seconds of a converted model are `fixed` plus the sum over its searched layers. The promise: they are at most
dense / target. Every number is an interval, and the unfavourable ends must keep the promise: the upper ends of the
layers and of `fixed` against the lower end of dense. Errors of several layers do not cancel here. What makes
predictions wrong (a machine that runs slower than when the table was made) moves all of them the same way. Where
whole models were timed, `search.strategies.chance_constraint` lets independent errors cancel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from latbench.errors import BadData, UsageError
from search.knapsack.arrays import Choice, Floats, Infeasible, is_finite, sum_in_order
from search.problem.layers import Interval, Layer

SLOWEST = 3
"""So many layers are named where a target is infeasible."""


@dataclass(frozen=True, repr=False)
class ModelTimes:
    """Layers to choose for, what the converted model takes beyond them, and the fastest dense model, in seconds.

    `fixed` may be negative: layers can be faster inside the model than on their own.
    """

    layers: tuple[Layer, ...]
    fixed: Interval
    dense: Interval
    dense_engine: str

    def predict(self, choice: Choice) -> Interval:
        """Seconds of the converted model with these options."""
        value, low, high = (
            sum_in_order(seconds[j] for seconds, j in zip(arrays, choice, strict=True)) + fixed
            for fixed, arrays in (
                (self.fixed.value, [layer.seconds for layer in self.layers]),
                (self.fixed.low, [layer.low for layer in self.layers]),
                (self.fixed.high, self.safe_seconds),
            )
        )
        return Interval(value, low, high)

    def speedup(self, seconds: Interval) -> Interval:
        """How much faster than the dense model that is, both intervals at their worst and at their best."""
        dense = self.dense
        return Interval(
            _ratio(dense.value, seconds.value), _ratio(dense.low, seconds.high), _ratio(dense.high, seconds.low)
        )

    @property
    def safe_seconds(self) -> list[Floats]:
        """The upper ends of the options' seconds, an array a layer: what is compared with the budget."""
        return [layer.high for layer in self.layers]

    @property
    def errors(self) -> list[Floats]:
        """The options' errors, an array a layer."""
        return [layer.errors for layer in self.layers]

    @property
    def ceiling(self) -> float | None:
        """The speedup if the searched layers took no time; None if nothing is left then."""
        return self.dense.value / self.fixed.value if self.fixed.value > 0 else None

    def budget(self, target: float) -> float:
        """The seconds that the layers may take together for a speedup of `target`. Raises Infeasible if too few.

        A profile is within it just where `predict` and `speedup`, rounding included, say that it reaches `target`.
        """
        if not (is_finite(target) and target > 0):
            raise UsageError(f"a target is a speedup such as 2, not {target}")
        if not 0 < self.dense.low < math.inf:
            raise BadData(f"the dense model takes {self.dense.low:g} s: there is no speedup over that")
        whole = _last(self.dense.low / target, lambda it: self.dense.low / it >= target)
        # Sums up to half a unit in the last place above the difference round to `whole`, about.
        budget = _last(whole - self.fixed.high + math.ulp(whole) / 2, lambda it: it + self.fixed.high <= whole)
        fastest = sum_in_order(layer.high.min() for layer in self.layers)
        if budget < fastest:
            raise Infeasible(budget, fastest, self._infeasible(target))
        return budget

    def _infeasible(self, target: float) -> str:
        """What the best is, and where its time goes."""
        choice = tuple(int(np.argmin(layer.high)) for layer in self.layers)
        best = self.speedup(self.predict(choice))
        width = f" ({best.low:.2f}-{best.high:.2f}x)" if best.low < best.high else ""
        sentence = f"target {target:g}x is infeasible: the best is {best.value:.2f}x{width}"
        if target <= best.value:
            sentence += ", and the lower end must reach the target (a lower --risk narrows the interval)"
        if self.ceiling is not None and target > self.ceiling:
            sentence += f", and {self.ceiling:.2f}x if all layers took no time"
        return f"{sentence}{self.where_time_goes()}."

    def where_time_goes(self) -> str:
        """Where the time of the fastest profile goes, in shares of the dense time: the end of a sentence."""
        choice = tuple(int(np.argmin(layer.high)) for layer in self.layers)
        share, sentence = self.fixed.value / self.dense.value, ""
        if share > 0:
            sentence += f"; {_percent(share)} of the time is in layers that cannot be pruned"
        left = [(layer.seconds[j] / self.dense.value, layer, j) for layer, j in zip(self.layers, choice, strict=True)]
        slowest = sorted(left, key=lambda one: -one[0])[:SLOWEST]
        if rest := sum(part for part, _, _ in left):
            named = ", ".join(f"{_percent(part)} in {layer.name} ({layer.options[j]})" for part, layer, j in slowest)
            others = "the others" if share > 0 else "the layers"
            sentence += f"; {_percent(rest)} is left in {others} at their fastest: {named}"
        return sentence


def _last(near: float, holds: Callable[[float], bool]) -> float:
    """The largest number that it holds for, which is not far from `near`; it holds for all that are smaller."""
    while not holds(near):
        near = math.nextafter(near, -math.inf)
    while holds(math.nextafter(near, math.inf)):
        near = math.nextafter(near, math.inf)
    return near


def _percent(share: float) -> str:
    """A share of more than 0 as a sentence says it."""
    return f"{share:.0%}" if share >= 0.005 else "under 1%"


def _ratio(above: float, below: float) -> float:
    return above / below if below > 0 else math.inf
