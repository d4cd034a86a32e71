"""The problem to be solved: layers, their options with predicted seconds, and the seconds around them.

The seconds of a converted model are `fixed` plus the sum over its searched layers; the promise is that they are at
most dense / target. Every number is an interval, and it is the unfavourable ends that must keep the promise: the
upper ends of the layers and of `fixed` against the lower end of dense. Errors of several layers are not taken to
cancel, because what makes predictions wrong (a machine that runs slower than when the table was made) moves all of
them the same way; where whole models were timed and that is known, `chance.apart` lets them cancel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from latbench.errors import BadData, UsageError
from latbench.importers.text_formats import read_spdy_profile
from search.also import Also, bytes_of_weights, order_of
from search.knapsack.arrays import Choice, Floats, Infeasible, Solver, is_finite, sum_in_order
from search.knapsack.one_budget import solve
from search.knapsack.two_budgets import solve_two
from search.layers import (
    DENSE,
    DENSE_OPTION,
    ROUNDING,
    Interval,
    Layer,
    Option,
    as_free,
    every_option,
    interval,
    listed,
    place_of,
    uniform_choice,
)
from search.selection import Selection, TradeOffs
from search.spdy import quadratic_prior

if TYPE_CHECKING:
    import pandas as pd

    from latbench.tables.storage import Place
    from search.limits import Limits
    from sparse_kernels.shapes import Shape

SLOWEST = 3
"""So many layers are named where a target is infeasible."""

QUICK_STATES = 1000
"""States a layer of a `Problem.solver` that is to be quick under two budgets: within a thousandth of the least."""


@dataclass(frozen=True, repr=False)
class Problem:
    """Layers to choose for, what the converted model takes beyond them, and the fastest dense model, in seconds.

    `fixed` may be negative: layers can be faster inside the model than on their own. The seconds of layers that are
    `excluded`, and stay dense, are in it. `also` is a second budget, which every profile that is found keeps too.
    """

    layers: tuple[Layer, ...]
    fixed: Interval
    dense: Interval
    dense_engine: str
    excluded: tuple[Layer, ...] = ()
    also: Also | None = None

    def __repr__(self) -> str:
        options = sum(len(layer.options) for layer in self.layers)
        return (
            f"<Problem of {len(self.layers)} layers with {options:,} options: {self.dense.value:.4g} s dense, "
            f"{self.fixed.value:.4g} s of them not searched>"
        )

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

    def reachable(self, target: float) -> float:
        """The `budget` of a target that some profile keeps together with `also`.

        Raises Infeasible, saying which of both is too small. Where that was not settled, the solver says so.
        """
        budget = self.budget(target)
        if self.also is None:
            return budget
        if not math.isfinite(self.also.left):
            raise BadData(f"{self.also.what}: a budget is a finite number, not {self.also.budget:g}")
        costs, fixed, left = self.also.arrays(self.layers), self.also.fixed, self.also.left
        found, at_any_speed = solve(self.safe_seconds, costs, budget), sum_in_order(it.min() for it in costs)
        if found.bound <= left:
            return budget
        fault = "that budget alone is too small" if at_any_speed > left else "either budget alone can be kept"
        raise Infeasible(
            budget, sum_in_order(layer.high.min() for layer in self.layers),
            f"no profile that reaches {target:g}x keeps {self.also.what}, {self.also.budget:.6g}: the least that one "
            f"takes is {found.error + fixed:.6g}, and {at_any_speed + fixed:.6g} at whatever speed: {fault}",
        )  # fmt: skip

    def could_reach(self, target: float) -> None:
        """Raise Infeasible for a target that is out of reach even where every interval's favourable end is true."""
        best = self._changed(lambda it: replace(it, high=np.maximum(it.low, 0.0)))
        best = replace(best, fixed=interval(self.fixed.low), dense=interval(self.dense.high))
        try:
            best.reachable(target)
        except Infeasible:
            self.reachable(target)

    def keeps(self, choice: Choice, target: float) -> bool:
        """Whether the profile reaches the target, and keeps `also`. Raises Infeasible where none reaches it."""
        seconds = sum_in_order(t[j] for t, j in zip(self.safe_seconds, choice, strict=True))
        return seconds <= self.budget(target) and self.within_also(choice)

    def within_also(self, choice: Choice) -> bool:
        """Whether the profile keeps the second budget, if there is one."""
        return self.also is None or self.also.keeps(self.layers, choice)

    def solve(self, target: float, *, also: Also | None = None) -> Selection:
        """The profile of least total error that keeps the promise, and `also`, given here or the problem's own.

        Raises Infeasible, and UsageError where both are there.
        """
        self._check_errors()
        if also is not None and self.also is not None:
            raise UsageError(f"the problem keeps {self.also.what} already, and a profile can have one second budget")
        problem = self if also is None else replace(self, also=also)
        solution = problem.solver(target)(self.errors)
        return Selection(problem, solution.choice, solution.bound)

    def solver(self, target: float, *, quick: bool = False) -> Solver:
        """What finds the profile of least error that keeps the promise, and `also`, for any errors.

        `quick`: under a second budget it is not proven the least, but as good as few states make it; for searches
        that solve often. Raises Infeasible.
        """
        budget = self.reachable(target)
        if self.also is None:
            return lambda errors: solve(self.safe_seconds, errors, budget)
        costs, left = self.also.arrays(self.layers), self.also.left
        states = {"max_states": QUICK_STATES} if quick else {}
        return lambda errors: solve_two(self.safe_seconds, errors, budget, costs, left, **states)

    def frontier(self, resolution: float = 0.0) -> TradeOffs:
        """Every efficient trade-off between speedup and total error, profiles on demand.

        With a `resolution` in seconds, those that lie nearer to each other are one (`search.knapsack.pareto`): for
        predicted times, which may have millions. Raises UsageError where there is a second budget, BadProblem where
        there are too many to list.
        """
        self._check_errors()
        if self.also is not None:
            raise UsageError(f"a frontier is of seconds and errors: it cannot keep {self.also.what}")
        return TradeOffs.of(self, resolution)

    def within(self, target: float, what: str = "the other problem") -> Also:
        """The second budget of another problem: reach `target` here, too, on this device or at this batch.

        Both must have the same layers in the same order, tied alike. Raises Infeasible, saying `what` this is.
        """
        try:
            budget = self.budget(target)
        except Infeasible as error:
            raise Infeasible(error.budget, error.fastest_seconds, f"{what}: {error}") from error
        costs = {
            part.name: dict(zip(part.options, part.high.tolist(), strict=True))
            for layer in self.layers
            for part in layer.parts
        }
        return Also(costs, budget, f"the seconds for {target:g}x in {what}", order=order_of(self.layers))

    def bytes_within(self, budget: float, shapes: Mapping[str, Shape] | None = None) -> Also:
        """The second budget of packed weights, in bytes: of all layers, those that stay dense among them.

        `shapes` are of the layers of the model, by name, where the layers themselves do not know. Raises UsageError
        for a layer without a shape.
        """
        parts = [part for layer in (*self.layers, *self.excluded) for part in layer.parts]
        return bytes_of_weights(self.layers, {**{part.name: part.shape for part in parts}, **(shapes or {})}, budget)

    def limited(self, limits: Limits | str | Path | None = None, **stated: Any) -> Problem:
        """The problem under limits: of a YAML file, or stated with the same keys (see `search.limits`).

        problem.limited(excluded=["fc"], tied_in_each=[["*.q", "*.k", "*.v"]], minimum={"*": 0.5})
        """
        from search import limits as limiting

        given = limiting.read(Path(limits)) if isinstance(limits, str | Path) else limits or limiting.Limits()
        return (given + limiting.of(stated, "limits")).on(self)

    @property
    def errors_known(self) -> bool:
        """Whether every option has an error."""
        return not any(np.isnan(errors).any() for errors in self.errors)

    def _check_errors(self) -> None:
        if not self.errors_known:
            raise UsageError("errors are not known yet: give them by `with_errors`, or take SPDY's, `with_prior`")

    def selection(self, profile: Mapping[str, Option | tuple[str, float] | float] | str | Path) -> Selection:
        """The profile that gives each layer of the model an option, or one by its sparsity alone.

        Or the one in a file of SPDY's text format, as `Selection.save_spdy` writes it. A layer that it does not name
        stays dense. Raises UsageError for a layer or an option that is not there, for a sparsity that several
        patterns have, and for tied layers with unlike options; BadData for what is no such file.
        """
        if isinstance(profile, str | Path):
            profile = read_spdy_profile(Path(profile))
        known = [part.name for layer in self.layers for part in layer.parts]
        if unknown := [name for name in profile if name not in known]:
            raise UsageError(f"the profile names layer {unknown[0]}, and the problem has {listed(known)}")

        def place(layer: Layer) -> int:
            places = {place_of(part, profile.get(part.name, DENSE_OPTION)) for part in layer.parts}
            if len(places) > 1:
                raise UsageError(f"{', '.join(part.name for part in layer.parts)} are tied: they have one option")
            return places.pop()

        return Selection(self, tuple(map(place, self.layers)), -math.inf)

    def uniforms(self, target: float, pattern: str | None = None) -> list[Choice]:
        """For each pattern (or only `pattern`) the mildest sparsity that keeps the promise when all layers have it.

        The least error first; empty if no uniform profile is fast enough.
        """
        self.budget(target)
        found: dict[str, tuple[float, Choice]] = {}
        for option in every_option(self.layers):
            if option.pattern in found or pattern not in (None, option.pattern):
                continue
            choice = uniform_choice(self.layers, option)
            if self.keeps(choice, target):
                error = sum_in_order(e[j] for e, j in zip(self.errors, choice, strict=True))
                found[option.pattern] = error, choice
        return [choice for _, choice in sorted(found.values())]

    def uniform(self, target: float, pattern: str | None = None) -> Choice:
        """The best uniform profile: one pattern and sparsity everywhere, least total error. Raises Infeasible."""
        if pattern is not None and pattern not in {it.pattern for layer in self.layers for it in layer.options}:
            raise UsageError(f"no layer can be had as {pattern}")
        self.reachable(target)
        choices = self.uniforms(target, pattern)
        if not choices:
            raise Infeasible(
                self.budget(target), math.nan,
                f"no uniform {pattern or 'profile'} reaches {target:g}x" + (
                    f" and keeps {self.also.what}, {self.also.budget:.6g}" if self.also else ""
                ) + "; mixed profiles do",
            )  # fmt: skip
        return choices[0]

    def calibrated(self, choice: Choice, measured: Interval, dense: Interval, dense_engine: str) -> Problem:
        """The problem corrected by a measurement of the converted model with these options, and of the dense one.

        All layers are taken to be as much slower or faster than predicted as these were, so that the prediction for
        `choice` becomes `measured`. `measured` and `dense` come from the same rounds: the noise of their ratio is in
        `measured` alone.
        """
        fixed = min(self.fixed.value, measured.low / 2)
        layers = self._alone(choice)
        if not layers > 0:  # nothing to correct but what is around them
            return replace(self, fixed=measured, dense=interval(dense.value), dense_engine=dense_engine)
        by = Interval(*((end - fixed) / layers for end in measured.ends))
        return self._timed(by, interval(fixed), dense.value, dense_engine)

    def on_line(self, measured: Mapping[Choice, float], dense: float, dense_engine: str) -> Problem | None:
        """The problem whose seconds follow the line through two profiles that took so many `measured` ones, exactly.

        None where there is no such line, because the one that was predicted to be slower was not.
        """
        (first, seconds), (second, others) = ((self._alone(choice), took) for choice, took in measured.items())
        if not (second - first) * (others - seconds) > 0:
            return None
        scale = (others - seconds) / (second - first)
        return self._timed(interval(scale), interval(seconds - scale * first), dense, dense_engine)

    def fastest(self) -> Choice:
        """The fastest profile by what its layers take at most, of those that keep `also`. Raises Infeasible."""
        if self.also is None:
            return tuple(int(np.argmin(layer.high)) for layer in self.layers)
        return solve(self.also.arrays(self.layers), self.safe_seconds, self.also.left).choice

    def only_fastest(self, target: float) -> Problem:
        """The problem with a dense model of which only the fastest profile reaches the target. Raises Infeasible."""
        return replace(self, dense=interval(self.predict(self.fastest()).high * (1 + ROUNDING) * target))

    def certain(self) -> Problem:
        """The problem as if every number were exact: for a search whose result is measured anyway."""
        return self._timed(interval(1.0), interval(self.fixed.value), self.dense.value, self.dense_engine)

    def _alone(self, choice: Choice) -> float:
        """The layers' seconds."""
        return sum_in_order(layer.seconds[j] for layer, j in zip(self.layers, choice, strict=True))

    def _timed(self, by: Interval, fixed: Interval, dense: float, dense_engine: str) -> Problem:
        """The problem whose layers take their seconds times `by`."""
        timed = self._changed(lambda it: replace(
            it, seconds=it.seconds * by.value, low=it.seconds * by.low, high=it.seconds * by.high
        ))  # fmt: skip
        return replace(timed, fixed=fixed, dense=interval(dense), dense_engine=dense_engine)

    def _changed(self, change: Callable[[Layer], Layer]) -> Problem:
        """The problem with every layer of the model changed."""
        return replace(self, layers=tuple(layer.changed(change) for layer in self.layers))

    def without_hopeless(self, *, by_errors: bool = False) -> Problem:
        """Leave out what no efficient profile needs: by their errors, or before those are known.

        An option goes if another is no slower, takes no more of a second budget, and has no larger error; or without
        errors, if it drops no more and has a pattern that is at least as free. Dense stays.
        """
        costs = None if self.also is None else self.also.arrays(self.layers)

        def hopeful(i: int) -> list[int]:
            layer = self.layers[i]
            patterns = [option.pattern for option in layer.options]
            sparsity = np.array([option.sparsity for option in layer.options])
            if by_errors:
                no_worse = layer.errors[:, None] <= layer.errors
            else:
                no_worse = sparsity[:, None] <= sparsity
                no_worse &= np.array([[as_free(a, b) for b in patterns] for a in patterns])
            beats = no_worse & (layer.high[:, None] <= layer.high)
            if costs is not None:
                beats &= costs[i][:, None] <= costs[i]
            beats &= ~beats.T | np.tri(len(patterns), k=-1, dtype=bool).T  # of equal ones the first
            return np.flatnonzero(~beats.any(axis=0) | (np.array(patterns) == DENSE)).tolist()

        return replace(self, layers=tuple(it.take(hopeful(i)) for i, it in enumerate(self.layers)))

    def with_errors(self, errors: Mapping[str, Mapping[Option, float]] | pd.DataFrame) -> Problem:
        """The same problem with the options' errors; dense options have none, whatever is given.

        A frame has the columns layer, pattern, sparsity and error. Options whose error is infinite go: a layer whose
        outputs they ruin is not to be had. Raises BadData where an option has no error.
        """
        if not isinstance(errors, Mapping):
            from search.layer_errors import of_frame

            errors = of_frame(errors)
        given: Mapping[str, Mapping[Option, float]] = errors

        def known(part: Layer) -> Layer:
            own = given.get(part.name, {})
            found = [0.0 if it.pattern == DENSE else _error(own, it) for it in part.options]
            if missing := [it for it, error in zip(part.options, found, strict=True) if math.isnan(error)]:
                raise BadData(f"no error is given for layer {part.name} as {missing[0]}")
            return replace(part, errors=np.array(found))

        found = self._changed(known)
        return replace(self, layers=tuple(_finite(it, np.isfinite(it.errors).tolist()) for it in found.layers))

    def without_infinite(self, errors: Mapping[str, Mapping[Option, float]]) -> Problem:
        """Leave out the options whose error is infinite; what they beat may have hope without them."""

        def possible(layer: Layer) -> list[bool]:
            own = [errors.get(part.name, {}) for part in layer.parts]
            return [it.pattern == DENSE or all(of.get(it) != math.inf for of in own) for it in layer.options]

        return replace(self, layers=tuple(_finite(layer, possible(layer)) for layer in self.layers))

    def with_prior(self) -> Problem:
        """The same problem with SPDY's guess for errors: the square of a sparsity's place in its layer."""
        return self._changed(lambda it: replace(it, errors=quadratic_prior([own.sparsity for own in it.options])))

    def with_shapes(self, shapes: Mapping[str, Shape]) -> Problem:
        """The same problem with what is known of the layers' shapes, by name."""
        return self._changed(lambda it: replace(it, shape=shapes.get(it.name, it.shape)))

    def without(self, names: Collection[str]) -> Problem:
        """The problem in which these layers stay dense: their time is counted among what is not searched.

        Raises UsageError for a name that no layer has, a layer without a dense option, and where none is left.
        """
        if unknown := set(names) - {layer.name for layer in self.layers}:
            raise UsageError(f"no layer is called {min(unknown)}: there are {listed(it.name for it in self.layers)}")
        kept = tuple(layer for layer in self.layers if layer.name not in names)
        if not kept:
            raise UsageError("every layer is excluded: nothing is left to prune")
        gone = tuple(layer for layer in self.layers if layer.name in names)
        fixed = sum((layer.time(place_of(layer, DENSE_OPTION)) for layer in gone), start=self.fixed)
        also = self.also and self.also.without(part.name for layer in gone for part in layer.parts)
        return replace(self, layers=kept, fixed=fixed, excluded=(*self.excluded, *gone), also=also)

    # In and out ---------------------------------------------------------------------------------------------------

    @staticmethod
    def from_table(table: str | Path | Place | pd.DataFrame, layers: Any = None, **settings: Any) -> Problem:
        """The problem of a table that latbench measured; see `search.from_table.from_table`."""
        from search.from_table import from_table

        return from_table(table, layers, **settings)

    @staticmethod
    def from_frame(frame: pd.DataFrame, **settings: Any) -> Problem:
        """The problem of a frame with a row an option; see `search.frames.from_frame`."""
        from search.frames import from_frame

        return from_frame(frame, **settings)

    @staticmethod
    def from_spdy(path: str | Path, **settings: Any) -> Problem:
        """The problem of a SPDY timing file, with SPDY's guess for errors; see `search.timing_files.from_spdy`."""
        from search.timing_files import from_spdy

        return from_spdy(path, **settings)

    def to_frame(self) -> pd.DataFrame:
        """A row an option of the layers that are searched.

        `from_frame` reads it back with `dense_seconds=problem.dense, fixed_seconds=problem.fixed`: in these is what
        the excluded layers take.
        """
        from search import frames

        return frames.of_problem(self)

    def save_spdy(self, path: str | Path) -> None:
        """Write SPDY's timing file, which knows no patterns, intervals, errors. Raises UsageError, BadData."""
        from search.timing_files import write

        write(self, Path(path))

    def plot(self) -> Any:
        """Seconds over sparsity, a line a layer and pattern: a plotly figure."""
        from search import plots

        return plots.of_problem(self)


def _error(given: Mapping[Option, float], wanted: Option) -> float:
    """The error of this option, or of the one that is as near as a rounded number may be; NaN where there is none."""
    if wanted in given:
        return given[wanted]
    near = (error for it, error in given.items() if it.is_close(wanted))
    return next(near, math.nan)


def _finite(layer: Layer, possible: Sequence[bool]) -> Layer:
    """The layer with its possible options. Raises BadData where there is none."""
    if not any(possible):
        raise BadData(f"layer {layer.name} has no option whose error is finite")
    return layer.take(np.flatnonzero(possible).tolist())


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
