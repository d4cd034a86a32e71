"""The exact multiple-choice knapsack on float seconds: one option a layer, least error, never over the budget.

A state is a pair (seconds, error) of the layers so far, summed in layer order with plain float addition. Rounding is
monotone (a <= b implies fl(a + x) <= fl(b + x)), so a state that another beats in both stays beaten whatever follows,
and keeping only the efficient ones loses nothing: the answer is exact for the very sums that a caller forms, from the
first layer to the last, and so is the comparison with the budget.

What keeps the states few: the linear relaxation of the layers still to come bounds every completion from below, a
greedy profile bounds the optimum from above, and a state whose lower bound is above that is dropped.

Sources: Kellerer, Pferschy, Pisinger 2004, "Knapsack Problems", chapter 11 (relaxation, reduction, Pareto states);
Sinha and Zoltners 1979 (only the lower convex hull of a layer's options matters to the relaxation).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from latbench.errors import BadData, PromiseMissed

Floats = NDArray[np.float64]
Places = NDArray[np.intp]
States = tuple[Floats, Floats]

EPS = float(np.finfo(np.float64).eps)


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

    choice: tuple[int, ...]
    seconds: float
    error: float
    bound: float


@dataclass(frozen=True)
class Options:
    """The efficient options of one layer: rising `seconds`, falling `errors`.

    `place` says where each is in the caller's arrays; `hull` lists the vertices of their lower convex hull.
    """

    seconds: Floats
    errors: Floats
    place: Places
    hull: Places


def solve(
    seconds: Sequence[ArrayLike], errors: Sequence[ArrayLike], budget: float, *, max_states: int = 50_000
) -> Solution:
    """The profile of least error that takes at most `budget` seconds; of equal ones the fastest.

    `seconds` (>= 0) and `errors` hold an array a layer, of any lengths. `max_states` bounds time and memory: beyond
    it the least promising states are dropped, and the solution's `bound` says what that may have cost.
    Raises BadProblem for what states no problem, Infeasible when nothing fits.
    """
    layers = efficient_options(seconds, errors)
    if not math.isfinite(budget):
        raise BadProblem(f"the budget must be a finite number of seconds, not {budget}")
    fastest = sum_in_order(layer.seconds[0] for layer in layers)
    if fastest > budget:
        raise Infeasible(float(budget), fastest)

    relaxation = Relaxation(layers)
    # Sums of the same numbers in another order differ by rounding: bounds are loosened by the most that can be.
    roundings = 4 * (len(layers) + len(relaxation.layer)) * EPS
    spare_seconds = roundings * budget
    spare_error = roundings * sum_in_order(np.abs(layer.errors).max() for layer in layers)
    start = greedy(layers, relaxation, budget - spare_seconds)
    ceiling = spare_error + sum_in_order(layer.errors[j] for layer, j in zip(layers, start, strict=True))

    states: list[States] = [(np.zeros(1), np.zeros(1))]
    least_dropped = math.inf
    possible = contenders(layers, relaxation.price(budget), budget, ceiling, roundings)
    added = [(layer.seconds[places], layer.errors[places]) for layer, places in zip(layers, possible, strict=True)]
    for depth, options in enumerate(added, start=1):
        spent, error = (np.add.outer(old, new).ravel() for old, new in zip(states[-1], options, strict=True))
        bound = error + relaxation.error_after(depth, budget + spare_seconds - spent)
        keep = np.flatnonzero(bound <= ceiling)
        keep = keep[efficient(spent[keep], error[keep])]
        if len(keep) > max_states:
            ranked = np.argsort(bound[keep], kind="stable")
            least_dropped = min(least_dropped, float(bound[keep[ranked[max_states]]]) - spare_error)
            keep = keep[np.sort(ranked[:max_states])]
        states.append((spent[keep], error[keep]))

    profiles = [start]
    spent, error = states[-1]
    fitting = np.flatnonzero(spent <= budget)
    if len(fitting):
        best = fitting[-1]  # seconds rise and errors fall along the states
        taken = trace_back(added, states, float(spent[best]), float(error[best]))
        profiles.append([int(places[i]) for places, i in zip(possible, taken, strict=True)])
    total_error, total_seconds, chosen = min(
        (
            sum_in_order(layer.errors[j] for layer, j in zip(layers, profile, strict=True)),
            sum_in_order(layer.seconds[j] for layer, j in zip(layers, profile, strict=True)),
            profile,
        )
        for profile in profiles
    )
    return Solution(
        choice=tuple(int(layer.place[j]) for layer, j in zip(layers, chosen, strict=True)),
        seconds=total_seconds,
        error=total_error,
        bound=min(total_error, least_dropped),
    )


def efficient_options(seconds: Sequence[ArrayLike], errors: Sequence[ArrayLike]) -> list[Options]:
    """Each layer's options without those that another beats in both. Raises BadProblem for what states no problem."""
    if len(seconds) != len(errors):
        raise BadProblem(f"seconds are given for {len(seconds)} layers, errors for {len(errors)}")
    if not len(seconds):
        raise BadProblem("there is no layer to choose for")
    layers = []
    for number, (raw_seconds, raw_errors) in enumerate(zip(seconds, errors, strict=True)):
        t, e = np.asarray(raw_seconds, np.float64), np.asarray(raw_errors, np.float64)
        if t.ndim != 1 or t.shape != e.shape or not len(t):
            raise BadProblem(
                f"layer {number} has seconds of shape {t.shape} and errors of shape {e.shape}: "
                "both must hold one number an option, and at least one"
            )
        if not (np.isfinite(t).all() and np.isfinite(e).all()):
            raise BadProblem(f"layer {number} has seconds or errors that are NaN or infinite")
        if t.min() < 0:
            raise BadProblem(f"layer {number} has negative seconds: {t.min():.6g}")
        place = efficient(t, e)
        layers.append(Options(t[place], e[place], place, lower_hull(t[place], e[place])))
    return layers


def efficient(seconds: Floats, errors: Floats) -> Places:
    """Places of the pairs that none beats in both, by rising seconds, so falling error; of equal pairs the first."""
    order = np.lexsort((errors, seconds))
    ordered = errors[order]
    keep = np.ones(len(order), bool)
    keep[1:] = ordered[1:] < np.minimum.accumulate(ordered)[:-1]
    return order[keep]


def lower_hull(seconds: Floats, errors: Floats) -> Places:
    """Places of the lower convex hull's vertices, for rising seconds and falling errors (Andrew's monotone chain)."""
    x, y = seconds.tolist(), errors.tolist()
    hull: list[int] = []
    for j in range(len(x)):
        while len(hull) > 1:
            a, b = hull[-2:]
            if (y[b] - y[a]) * (x[j] - x[a]) < (y[j] - y[a]) * (x[b] - x[a]):
                break
            hull.pop()
        hull.append(j)
    return np.array(hull, np.intp)


def sum_in_order(values: Iterable[float]) -> float:
    """Plain float addition from the first to the last: the sum that the budget is compared with."""
    total = 0.0
    for value in values:
        total += float(value)
    return total


class Relaxation:
    """The linear relaxation: layers may mix options. Its steps, the one that gains most a second first.

    Step i moves `layer[i]` along one edge of its hull: `seconds[i]` more for `gain[i]` less error.
    """

    def __init__(self, layers: Sequence[Options]) -> None:
        seconds = [np.diff(layer.seconds[layer.hull]) for layer in layers]
        gain = [-np.diff(layer.errors[layer.hull]) for layer in layers]
        owner = np.repeat(np.arange(len(layers)), [len(edges) for edges in seconds])
        # Along one layer rates fall, and a stable sort keeps its edges in order where rates round to equals.
        with np.errstate(over="ignore"):
            rate = np.concatenate(gain) / np.concatenate(seconds)
        order = np.argsort(-rate, kind="stable")
        self.layer, self.seconds, self.gain, self.rate = (
            values[order] for values in (owner, np.concatenate(seconds), np.concatenate(gain), rate)
        )
        self._fastest_seconds = _sums_from([layer.seconds[0] for layer in layers])
        self._fastest_error = _sums_from([layer.errors[0] for layer in layers])

    def price(self, budget: float) -> float:
        """What a second is worth at the budget, in error: the rate of the step that does not fit whole."""
        unfit = np.flatnonzero(self._fastest_seconds[0] + np.cumsum(self.seconds) > budget)
        return float(self.rate[unfit[0]]) if len(unfit) else 0.0

    def error_after(self, depth: int, seconds_left: Floats) -> Floats:
        """The least error of layers `depth`, `depth` + 1, ... within `seconds_left`; inf where they do not fit."""
        open_ = self.layer >= depth
        seconds = np.cumsum(np.append(self._fastest_seconds[depth], self.seconds[open_]))
        error = np.cumsum(np.append(self._fastest_error[depth], -self.gain[open_]))
        return np.interp(seconds_left, seconds, error, left=math.inf)


def _sums_from(values: list[float]) -> Floats:
    """Entry d is the sum of the values from d on; the last entry is 0."""
    return np.append(np.cumsum(values[::-1])[::-1], 0.0)


def contenders(
    layers: Sequence[Options], price: float, budget: float, ceiling: float, roundings: float
) -> list[Places]:
    """The places of each layer's options that a profile with an error up to `ceiling` can have.

    With seconds paid for at any price >= 0, the sum of the layers' least costs, less the budget's price, bounds the
    error from below; an option that costs more than its layer's least raises that bound by the difference.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        costs = [layer.errors + price * layer.seconds for layer in layers]
        least = sum_in_order(cost.min() for cost in costs) - price * budget
        spare = roundings * (sum_in_order(np.abs(cost).max() for cost in costs) + price * budget)
    if not math.isfinite(spare):  # options a rounding apart in seconds have no price
        return [np.arange(len(cost)) for cost in costs]
    return [np.flatnonzero(cost - cost.min() <= ceiling - least + spare) for cost in costs]


def greedy(layers: Sequence[Options], relaxation: Relaxation, budget: float) -> list[int]:
    """A good profile: the relaxation's steps while they fit, then the move that gains most until none fits."""
    choice = [0] * len(layers)
    edge = [0] * len(layers)
    left = budget - sum_in_order(layer.seconds[0] for layer in layers)
    for layer, seconds in zip(relaxation.layer.tolist(), relaxation.seconds.tolist(), strict=True):
        if seconds > left:
            break
        left -= seconds
        edge[layer] += 1
        choice[layer] = int(layers[layer].hull[edge[layer]])
    while True:
        best_gain, best_layer, best_place = 0.0, -1, -1
        for number, options in enumerate(layers):
            here = choice[number]
            last = int(np.searchsorted(options.seconds, options.seconds[here] + left, side="right")) - 1
            if last > here and options.errors[here] - options.errors[last] > best_gain:
                best_gain, best_layer, best_place = options.errors[here] - options.errors[last], number, last
        if best_layer < 0:
            return choice
        options = layers[best_layer]
        left -= float(options.seconds[best_place] - options.seconds[choice[best_layer]])
        choice[best_layer] = best_place


def trace_back(added: Sequence[States], states: Sequence[States], seconds: float, error: float) -> list[int]:
    """Which of the options `added` at each layer lead to the last state (seconds, error).

    The same additions give the same floats, so equality finds them.
    """
    taken = []
    for (layer_seconds, layer_errors), (spent, errors) in zip(reversed(added), reversed(states[:-1]), strict=True):
        reached = (np.add.outer(spent, layer_seconds) == seconds) & (np.add.outer(errors, layer_errors) == error)
        state, option = np.unravel_index(int(reached.argmax()), reached.shape)
        taken.append(int(option))
        seconds, error = float(spent[state]), float(errors[state])
    return taken[::-1]
