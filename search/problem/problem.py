"""The problem to solve: which option for each layer, under a budget of seconds and perhaps a second one."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from latbench.errors import BadData, UsageError
from latbench.importers.text_formats import read_spdy_profile
from search.knapsack.arrays import Choice, Infeasible, Solver, sum_in_order
from search.knapsack.one_budget import solve
from search.knapsack.two_budgets import solve_two
from search.problem.error_table import convert_frame_to_errors
from search.problem.layers import (
    DENSE_OPTION,
    LayerOptions,
    Option,
    build_uniform_choice,
    convert_to_interval,
    find_option,
    format_names,
    list_options,
)
from search.problem.limits import Limits, parse_limits, read_limits
from search.problem.model_times import ModelTimes
from search.problem.plots import plot_options
from search.problem.priors import build_quadratic_prior
from search.problem.second_budget import SecondBudget, build_weight_budget, list_tied_names
from search.problem.selection import Selection, TradeOffs
from search.problem.spdy_export import write_spdy_timings

if TYPE_CHECKING:
    import pandas as pd

    from sparse_kernels.shapes import Shape

QUICK_STATES = 1000
"""States a layer of a quick `Problem.solver` under two budgets. It comes within a thousandth of the least error."""


@dataclass(frozen=True, repr=False)
class Problem(ModelTimes):
    """Predicted times of a model, and the choice that is open for its layers.

    `fixed` contains the seconds of `excluded` layers, which stay dense. Every profile that is found keeps the
    `second_budget` too.

    Attributes
    ----------
    layers
        The layers to choose for, with their options, seconds and errors.
    fixed
        Seconds of the converted model beside these layers.
    dense
        Seconds of the fastest dense model.
    dense_engine
        The engine that runs that dense model.
    excluded
        Layers that stay dense.
    second_budget
        A second budget: bytes of weights, or seconds on another device or at another batch.
    """

    excluded: tuple[LayerOptions, ...] = ()
    second_budget: SecondBudget | None = None

    def __repr__(self) -> str:
        options = sum(len(layer.options) for layer in self.layers)
        return (
            f"<Problem of {len(self.layers)} layers with {options:,} options: {self.dense.value:.4g} s dense, "
            f"{self.fixed.value:.4g} s of them not searched>"
        )

    # Budgets --------------------------------------------------------------------------------------------------------

    def reachable(self, target: float) -> float:
        """Return the `budget` (seconds) of a target that some profile reaches within the second budget too.

        Raises
        ------
        Infeasible
            No such profile exists. The message says which of both budgets is too small. It may also be raised where
            the solver could not settle the question.
        """
        budget, second = self.budget(target), self.second_budget
        if second is None:
            return budget
        if not math.isfinite(second.left):
            raise BadData(f"{second.name}: the budget must be a finite number, not {second.budget:g}")
        costs = second.arrays(self.layers)
        found, at_any_speed = solve(self.safe_seconds, costs, budget), sum_in_order(it.min() for it in costs)
        if found.bound <= second.left:
            return budget
        fault = "that budget alone is too small" if at_any_speed > second.left else "either budget alone can be kept"
        raise Infeasible(
            budget, sum_in_order(layer.high.min() for layer in self.layers),
            f"no profile that reaches {target:g}x keeps {second.name}, {second.budget:.6g}: the least that one takes "
            f"is {found.error + second.fixed:.6g}, and {at_any_speed + second.fixed:.6g} at whatever speed: {fault}",
        )  # fmt: skip

    def check_could_reach(self, target: float) -> None:
        """Raise Infeasible for a target out of reach even if the favourable end of every interval is true."""
        best = self.change_layers(lambda it: replace(it, high=np.maximum(it.low, 0.0)))
        best = replace(best, fixed=convert_to_interval(self.fixed.low), dense=convert_to_interval(self.dense.high))
        try:
            best.reachable(target)
        except Infeasible:
            self.reachable(target)

    def keeps(self, choice: Choice, target: float) -> bool:
        """Return whether a profile reaches the target and keeps the second budget.

        Raises Infeasible where no profile reaches the target.
        """
        seconds = sum_in_order(t[j] for t, j in zip(self.safe_seconds, choice, strict=True))
        return seconds <= self.budget(target) and self.keeps_second_budget(choice)

    def keeps_second_budget(self, choice: Choice) -> bool:
        """Return whether a profile keeps the second budget, if there is one."""
        return self.second_budget is None or self.second_budget.keeps(self.layers, choice)

    def as_second_budget(self, target: float, name: str = "the other problem") -> SecondBudget:
        """Return the second budget "reach `target` on this device or at this batch too", for another problem.

        Both problems must have the same layers in the same order, with the same ties.

        Parameters
        ----------
        target
            The speedup to reach here.
        name
            The name of this problem in messages.

        Raises
        ------
        Infeasible
            No profile reaches the target here.
        """
        try:
            budget = self.budget(target)
        except Infeasible as error:
            raise Infeasible(error.budget, error.fastest_seconds, f"{name}: {error}") from error
        costs = {
            part.name: dict(zip(part.options, part.high.tolist(), strict=True))
            for layer in self.layers
            for part in layer.parts
        }
        return SecondBudget(
            costs, budget, f"the seconds for {target:g}x in {name}", order=list_tied_names(self.layers)
        )

    def byte_budget(self, budget: float, shapes: Mapping[str, Shape] | None = None) -> SecondBudget:
        """Return the second budget of packed weights (bytes): of all layers, also those that stay dense.

        Parameters
        ----------
        budget
            Bytes that all weights may take together.
        shapes
            Shapes of the model's layers by name, where the layers do not know theirs.

        Raises
        ------
        UsageError
            The shape of a layer is unknown.
        """
        parts = [part for layer in (*self.layers, *self.excluded) for part in layer.parts]
        return build_weight_budget(
            self.layers, {**{part.name: part.shape for part in parts}, **(shapes or {})}, budget
        )

    # Solutions ------------------------------------------------------------------------------------------------------

    def solve(self, target: float, *, second_budget: SecondBudget | None = None) -> Selection:
        """Return the profile of least total error that keeps the promise.

        Parameters
        ----------
        target
            The speedup over the dense model.
        second_budget
            A budget to keep too, where the problem has none of its own.

        Raises
        ------
        Infeasible
            No profile reaches the target.
        UsageError
            Errors are unknown, or there are two second budgets.
        """
        self._check_errors()
        if second_budget is not None and self.second_budget is not None:
            raise UsageError(
                f"the problem keeps {self.second_budget.name} already, and a profile can have one second budget"
            )
        problem = self if second_budget is None else replace(self, second_budget=second_budget)
        solution = problem.solver(target)(self.errors)
        return Selection(problem, solution.choice, solution.bound)

    def solver(self, target: float, *, quick: bool = False) -> Solver:
        """Return the function that finds, for any errors, the profile of least error that keeps all budgets.

        Parameters
        ----------
        target
            The speedup over the dense model.
        quick
            Under a second budget, give up the proof and use few states: for searches that solve often.

        Raises
        ------
        Infeasible
            No profile reaches the target.
        """
        budget = self.reachable(target)
        if self.second_budget is None:
            return lambda errors: solve(self.safe_seconds, errors, budget)
        costs, left = self.second_budget.arrays(self.layers), self.second_budget.left
        states = {"max_states": QUICK_STATES} if quick else {}
        return lambda errors: solve_two(self.safe_seconds, errors, budget, costs, left, **states)

    def frontier(self, resolution: float = 0.0) -> TradeOffs:
        """Return every efficient trade-off between speedup and total error; profiles follow on demand.

        Parameters
        ----------
        resolution
            Seconds. Trade-offs nearer to each other than this count as one (`search.knapsack.pareto`). Predicted
            times may have millions of them.

        Raises
        ------
        UsageError
            There is a second budget, or errors are unknown.
        BadProblem
            There are too many trade-offs to list.
        """
        self._check_errors()
        if self.second_budget is not None:
            raise UsageError(
                f"a frontier cannot keep a second budget ({self.second_budget.name}): solve for single targets"
            )
        return TradeOffs.from_problem(self, resolution)

    def selection(self, profile: Mapping[str, Option | tuple[str, float] | float] | str | Path) -> Selection:
        """Return a given profile as a solution of this problem.

        Parameters
        ----------
        profile
            Layer name -> option, or the sparsity alone; or a file in SPDY's text format, as `Selection.save_spdy`
            writes it. Layers without an entry stay dense.

        Raises
        ------
        UsageError
            A layer or option is unknown, a sparsity belongs to several patterns, or tied layers differ.
        BadData
            The file has another format.
        """
        if isinstance(profile, str | Path):
            profile = read_spdy_profile(Path(profile))
        known = [part.name for layer in self.layers for part in layer.parts]
        if unknown := [name for name in profile if name not in known]:
            raise UsageError(f"the profile names layer {unknown[0]}, and the problem has {format_names(known)}")

        def find(layer: LayerOptions) -> int:
            indices = {find_option(part, profile.get(part.name, DENSE_OPTION)) for part in layer.parts}
            if len(indices) > 1:
                raise UsageError(f"{', '.join(part.name for part in layer.parts)} are tied: give them one option")
            return indices.pop()

        return Selection(self, tuple(map(find, self.layers)), -math.inf)

    def uniform_profiles(self, target: float, pattern: str | None = None) -> list[Choice]:
        """Return for each pattern (or only `pattern`) the lowest sparsity that keeps the promise in all layers.

        The profile of least error comes first. The list is empty if no uniform profile is fast enough.
        """
        self.budget(target)
        found: dict[str, tuple[float, Choice]] = {}
        for option in list_options(self.layers):
            if option.pattern in found or pattern not in (None, option.pattern):
                continue
            choice = build_uniform_choice(self.layers, option)
            if self.keeps(choice, target):
                error = sum_in_order(e[j] for e, j in zip(self.errors, choice, strict=True))
                found[option.pattern] = error, choice
        return [choice for _, choice in sorted(found.values())]

    def best_uniform(self, target: float, pattern: str | None = None) -> Choice:
        """Return the uniform profile of least total error: one pattern and sparsity everywhere.

        Raises Infeasible where no uniform profile keeps the budgets, UsageError for a pattern that no layer has.
        """
        if pattern is not None and pattern not in {it.pattern for layer in self.layers for it in layer.options}:
            raise UsageError(f"no layer has an option with pattern {pattern}")
        self.reachable(target)
        choices = self.uniform_profiles(target, pattern)
        if not choices:
            second = self.second_budget
            raise Infeasible(
                self.budget(target), math.nan,
                f"no uniform {pattern or 'profile'} reaches {target:g}x"
                + (f" and keeps {second.name}, {second.budget:.6g}" if second else "")
                + "; mixed profiles do",
            )  # fmt: skip
        return choices[0]

    def fastest(self) -> Choice:
        """Return the profile with the least upper seconds of those that keep the second budget. Raises Infeasible."""
        if self.second_budget is None:
            return tuple(int(np.argmin(layer.high)) for layer in self.layers)
        return solve(self.second_budget.arrays(self.layers), self.safe_seconds, self.second_budget.left).choice

    # Changed copies -------------------------------------------------------------------------------------------------

    def limited(self, limits: Limits | str | Path | None = None, **stated: Any) -> Problem:
        """Return the problem under limits. Excluded layers become part of the time that is not searched.

        Parameters
        ----------
        limits
            Limits, or a YAML file of them.
        **stated
            Limits by the keys of such a file (see `search.problem.limits`).

        Raises
        ------
        UsageError
            A name matches nothing, limits contradict each other, or a layer is left without an option.

        Examples
        --------
        >>> problem.limited(excluded=["fc"], tied_in_each=[["*.q", "*.k", "*.v"]], minimum={"*": 0.5})
        """
        given = read_limits(Path(limits)) if isinstance(limits, str | Path) else limits or Limits()
        combined = given + parse_limits(stated, "limits")
        names = [part.name for layer in self.layers for part in layer.parts]
        excluded = set(names) - set(combined.select_included(names))
        for layer in self.layers:
            if layer.tied and excluded & {part.name for part in layer.parts}:
                raise UsageError(f"layer {layer.name} is tied already: it cannot be excluded now")
        left = self.without(excluded)
        return replace(left, layers=combined.apply(left.layers, excluded))

    def without(self, names: Collection[str]) -> Problem:
        """Return the problem in which these layers stay dense; their seconds become part of `fixed`.

        Raises UsageError for an unknown layer, a layer without a dense option, and where no layer is left.
        """
        if unknown := set(names) - {layer.name for layer in self.layers}:
            known = format_names(layer.name for layer in self.layers)
            raise UsageError(f"no layer is called {min(unknown)}: the problem has {known}")
        left = tuple(layer for layer in self.layers if layer.name not in names)
        if not left:
            raise UsageError("every layer is excluded: nothing is left to prune")
        removed = tuple(layer for layer in self.layers if layer.name in names)
        fixed = sum((layer.time(find_option(layer, DENSE_OPTION)) for layer in removed), start=self.fixed)
        parts = [part.name for layer in removed for part in layer.parts]
        second = self.second_budget and self.second_budget.without(parts)
        return replace(self, layers=left, fixed=fixed, excluded=(*self.excluded, *removed), second_budget=second)

    def without_dominated(self, *, by_errors: bool = False) -> Problem:
        """Leave out the options that no efficient profile needs. Dense stays, but in eight bits.

        An option goes if another one is no slower, takes no more of a second budget, and has no larger error. Before
        errors are known: if another one needs no more (`Option.needs_no_more`).

        Parameters
        ----------
        by_errors
            Compare errors, not sparsities, patterns and precisions.
        """
        costs = None if self.second_budget is None else self.second_budget.arrays(self.layers)

        def needed(i: int) -> list[int]:
            layer = self.layers[i]
            options = layer.options
            if by_errors:
                no_worse = layer.errors[:, None] <= layer.errors
            else:
                no_worse = np.array([[a.needs_no_more(b) for b in options] for a in options])
            beats = no_worse & (layer.high[:, None] <= layer.high)
            if costs is not None:
                beats &= costs[i][:, None] <= costs[i]
            beats &= ~beats.T | np.tri(len(options), k=-1, dtype=bool).T  # of equal ones the first
            unchanged = np.array([option.in_database is None for option in options])
            return np.flatnonzero(~beats.any(axis=0) | unchanged).tolist()

        return replace(self, layers=tuple(it.take(needed(i)) for i, it in enumerate(self.layers)))

    def with_errors(self, errors: Mapping[str, Mapping[Option, float]] | pd.DataFrame) -> Problem:
        """Return the problem with the options' errors. Layers that stay dense have none, whatever is given.

        Options with an infinite error are left out: they ruin the outputs of their layer. What is given for float32
        holds for bfloat16, too.

        Parameters
        ----------
        errors
            Layer name -> option -> error, or a frame with the columns layer, pattern, sparsity and error, and
            precision where it is not float32.

        Raises
        ------
        BadData
            An option has no error, or a layer has no option with a finite one.
        """
        given = errors if isinstance(errors, Mapping) else convert_frame_to_errors(errors)

        def known(part: LayerOptions) -> LayerOptions:
            own = given.get(part.name, {})
            found = [0.0 if it.in_database is None else _find_error(own, it) for it in part.options]
            if missing := [it for it, error in zip(part.options, found, strict=True) if math.isnan(error)]:
                raise BadData(f"no error is given for layer {part.name} as {missing[0]}")
            return replace(part, errors=np.array(found))

        found = self.change_layers(known)
        return replace(self, layers=tuple(_take_finite(it, np.isfinite(it.errors).tolist()) for it in found.layers))

    def without_infinite_errors(self, errors: Mapping[str, Mapping[Option, float]]) -> Problem:
        """Leave out the options with an infinite error, before other options are compared with them."""

        def possible(layer: LayerOptions) -> list[bool]:
            own = [errors.get(part.name, {}) for part in layer.parts]
            return [all(_find_error(known, it) != math.inf for known in own) for it in layer.options]

        return replace(self, layers=tuple(_take_finite(layer, possible(layer)) for layer in self.layers))

    def with_prior(self) -> Problem:
        """Return the problem with SPDY's prior for errors: the square of a sparsity's rank in its layer."""
        return self.change_layers(
            lambda it: replace(it, errors=build_quadratic_prior([own.sparsity for own in it.options]))
        )

    def with_shapes(self, shapes: Mapping[str, Shape]) -> Problem:
        """Return the problem with shapes of layers, by name."""
        return self.change_layers(lambda it: replace(it, shape=shapes.get(it.name, it.shape)))

    def change_layers(self, change: Callable[[LayerOptions], LayerOptions]) -> Problem:
        """Return the problem with every layer of the model changed."""
        return replace(self, layers=tuple(layer.change_parts(change) for layer in self.layers))

    # Errors ---------------------------------------------------------------------------------------------------------

    @property
    def errors_known(self) -> bool:
        """Whether every option has an error."""
        return not any(np.isnan(errors).any() for errors in self.errors)

    def _check_errors(self) -> None:
        if not self.errors_known:
            raise UsageError("errors are unknown: give them by `with_errors`, or take SPDY's by `with_prior`")

    # Output ---------------------------------------------------------------------------------------------------------

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each option of the layers that are searched.

        `search.inputs.problem_from_frame` reads the frame back, with `dense_seconds=problem.dense` and
        `fixed_seconds=problem.fixed`. These contain the seconds of excluded layers.
        """
        from search.problem.data_frames import build_layer_frame

        return build_layer_frame(self.layers)

    def save_spdy(self, path: str | Path) -> None:
        """Write SPDY's timing file, which has no patterns, intervals or errors.

        Raises UsageError for what the format cannot express, BadData for a name that it cannot hold.
        """
        write_spdy_timings(self.layers, self.dense.value, self.fixed.value, Path(path))

    def plot(self) -> Any:
        """Return a plotly figure: seconds over sparsity, a line for each layer and pattern."""
        return plot_options(self.layers)


def _find_error(given: Mapping[Option, float], wanted: Option) -> float:
    """Return the error of this option, or of one whose sparsity differs by rounding only; NaN if there is none."""
    for each in (wanted, wanted.in_database):
        if each is None:
            return 0.0
        if each in given:
            return given[each]
        near = [error for it, error in given.items() if it.is_close(each)]
        if near:
            return near[0]
    return math.nan


def _take_finite(layer: LayerOptions, possible: Sequence[bool]) -> LayerOptions:
    """Return the layer with its possible options. Raises BadData where there is none."""
    if not any(possible):
        raise BadData(f"layer {layer.name} has no option whose error is finite")
    return layer.take(np.flatnonzero(possible).tolist())
