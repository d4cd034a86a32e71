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
from search.problem.layers import Interval, LayerOptions

NAMED_LAYERS = 3
"""Number of slowest layers that a message names where a target is infeasible."""


@dataclass(frozen=True, repr=False)
class ModelTimes:
    """Layers to choose for, what the converted model takes beyond them, and the fastest dense model, in seconds.

    `fixed` may be negative: layers can be faster inside the model than on their own.
    """

    layers: tuple[LayerOptions, ...]
    fixed: Interval
    dense: Interval
    dense_engine: str

    def predict(self, choice: Choice) -> Interval:
        """Return the seconds of the converted model with these options."""
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
        """Return the speedup over the dense model.

        The ends of the interval combine the worst ends of both intervals, and the best ends.
        """
        dense = self.dense
        return Interval(
            _ratio(dense.value, seconds.value), _ratio(dense.low, seconds.high), _ratio(dense.high, seconds.low)
        )

    @property
    def safe_seconds(self) -> list[Floats]:
        """The upper ends of the options' seconds, an array (options,) for each layer. The budget limits their sum."""
        return [layer.high for layer in self.layers]

    @property
    def errors(self) -> list[Floats]:
        """The options' errors, an array (options,) for each layer."""
        return [layer.errors for layer in self.layers]

    @property
    def ceiling(self) -> float | None:
        """The speedup if the searched layers took no time; None if no other time is known."""
        return self.dense.value / self.fixed.value if self.fixed.value > 0 else None

    def budget(self, target: float) -> float:
        """Return the seconds that the layers may take together for a speedup of `target`.

        A profile keeps this budget exactly if `predict` and `speedup`, rounding included, say that it reaches
        `target`. Raises Infeasible where the fastest profile does not.
        """
        if not (is_finite(target) and target > 0):
            raise UsageError(f"the target must be a speedup such as 2, not {target}")
        if not 0 < self.dense.low < math.inf:
            raise BadData(f"the dense model takes {self.dense.low:g} s: a speedup needs a finite time above 0")
        whole = _find_largest(self.dense.low / target, lambda it: self.dense.low / it >= target)
        # Sums up to half a unit in the last place above the difference round to `whole`, about.
        budget = _find_largest(
            whole - self.fixed.high + math.ulp(whole) / 2, lambda it: it + self.fixed.high <= whole
        )
        fastest = sum_in_order(layer.high.min() for layer in self.layers)
        if budget < fastest:
            raise Infeasible(budget, fastest, self._describe_best(target))
        return budget

    def _describe_best(self, target: float) -> str:
        """Return the message for an infeasible target: the best speedup, and where its time goes."""
        choice = tuple(int(np.argmin(layer.high)) for layer in self.layers)
        best = self.speedup(self.predict(choice))
        width = f" ({best.low:.2f}-{best.high:.2f}x)" if best.low < best.high else ""
        sentence = f"target {target:g}x is infeasible: the best is {best.value:.2f}x{width}"
        if target <= best.value:
            sentence += ", and the lower end must reach the target (a lower --confidence narrows the interval)"
        if self.ceiling is not None and target > self.ceiling:
            sentence += f", and {self.ceiling:.2f}x if all layers took no time"
        return f"{sentence}{self.describe_remaining_time()}."

    def describe_remaining_time(self) -> str:
        """Return where the time of the fastest profile goes, in shares of the dense time: the end of a sentence."""
        choice = tuple(int(np.argmin(layer.high)) for layer in self.layers)
        share, sentence = self.fixed.value / self.dense.value, ""
        if share > 0:
            sentence += f"; {_percent(share)} of the time is in layers that cannot be pruned"
        left = [(layer.seconds[j] / self.dense.value, layer, j) for layer, j in zip(self.layers, choice, strict=True)]
        slowest = sorted(left, key=lambda entry: -entry[0])[:NAMED_LAYERS]
        if rest := sum(part for part, _, _ in left):
            named = ", ".join(f"{_percent(part)} in {layer.name} ({layer.options[j]})" for part, layer, j in slowest)
            others = "the others" if share > 0 else "the layers"
            sentence += f"; {_percent(rest)} is left in {others} at their fastest: {named}"
        return sentence


def _find_largest(near: float, holds: Callable[[float], bool]) -> float:
    """Return the largest number that the condition holds for. It is close to `near`, and all smaller ones hold."""
    while not holds(near):
        near = math.nextafter(near, -math.inf)
    while holds(math.nextafter(near, math.inf)):
        near = math.nextafter(near, math.inf)
    return near


def _percent(share: float) -> str:
    """Return a share above 0 as text."""
    return f"{share:.0%}" if share >= 0.005 else "under 1%"


def _ratio(above: float, below: float) -> float:
    """Return the ratio; infinity for a denominator of 0 or less."""
    return above / below if below > 0 else math.inf
