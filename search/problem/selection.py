"""Answers of a problem: one profile, or all efficient ones, as frames, plots and SPDY's text format."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from latbench.importers.text_formats import write_spdy_profile
from search.knapsack.arrays import Choice, Floats, sum_in_order
from search.knapsack.one_budget import solve
from search.knapsack.pareto import Frontier, frontier
from search.problem.layers import expand_choice
from search.problem.model_times import ModelTimes
from search.problem.plots import plot_choice, plot_trade_offs

if TYPE_CHECKING:
    import pandas as pd

    from search.problem.layers import Interval, Option


@dataclass(frozen=True, repr=False)
class Selection:
    """A profile: one option for each layer of a problem.

    Attributes
    ----------
    problem
        The problem that it answers.
    choice
        For each layer the index of its option.
    bound
        No profile within the same budget has a smaller error; -inf where nothing is proven.
    """

    problem: ModelTimes = field(repr=False, compare=False)
    choice: Choice
    bound: float

    def __repr__(self) -> str:
        proof = ", proven least" if self.bound == self.error else ""
        value, low, high = self.speedup.ends
        interval = "" if low == high else f" ({low:.4g} to {high:.4g})"
        return f"<Selection: {value:.4g}x{interval}, total error {self.error:.6g}{proof}>"

    @property
    def seconds(self) -> float:
        """The sum of the layers' seconds at their upper ends, which the budget limits."""
        return sum_in_order(t[j] for t, j in zip(self.problem.safe_seconds, self.choice, strict=True))

    @property
    def error(self) -> float:
        """The sum of the layers' errors."""
        return sum_in_order(e[j] for e, j in zip(self.problem.errors, self.choice, strict=True))

    @property
    def predicted(self) -> Interval:
        """The seconds of the whole model."""
        return self.problem.predict(self.choice)

    @property
    def speedup(self) -> Interval:
        """The speedup over the dense model; the promise is its lower end."""
        return self.problem.speedup(self.predicted)

    @property
    def options(self) -> dict[str, Option]:
        """The option of every searched layer, by name; tied layers have one entry each."""
        return expand_choice(self.problem.layers, self.choice)

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each layer: its option, seconds, low_seconds, high_seconds and error."""
        from search.problem.data_frames import build_choice_frame

        return build_choice_frame(self.problem.layers, self.choice)

    def plot(self) -> Any:
        """Return a plotly figure: the seconds of each layer beside its dense seconds."""
        speedup = self.speedup
        title = f"{speedup.value:.2f}x ({speedup.low:.2f}-{speedup.high:.2f}), error {self.error:.4g}"
        return plot_choice(self.problem.layers, self.choice, title)

    def save_spdy(self, path: str | Path) -> None:
        """Write SPDY's text format: each layer's sparsity, without its pattern.

        `Problem.selection` reads it back unless a layer has several patterns of that sparsity.
        """
        write_spdy_profile({name: option.sparsity for name, option in self.options.items()}, Path(path))


@dataclass(frozen=True, repr=False)
class TradeOffs:
    """The efficient profiles of a problem, the fastest first.

    Attributes
    ----------
    problem
        The problem that they answer.
    seconds
        Array (profiles,): seconds of the whole model, the upper ends.
    speedups
        Array (profiles,), falling: the lower ends, so each speedup can be promised.
    errors
        Array (profiles,), falling: total errors.
    exact
        Whether these are exact. If not, a profile may be faster than listed, by up to the requested resolution.
    """

    problem: ModelTimes = field(repr=False, compare=False)
    seconds: Floats
    speedups: Floats
    errors: Floats
    _layers: Frontier = field(repr=False, compare=False)
    exact: bool = True

    @classmethod
    def from_problem(cls, problem: ModelTimes, resolution: float = 0.0) -> TradeOffs:
        """Return the trade-offs of a problem, merged within `resolution` seconds.

        Raises BadProblem where there are too many to list.
        """
        layers = frontier(problem.safe_seconds, problem.errors, resolution=resolution)
        seconds = layers.seconds + problem.fixed.high
        with np.errstate(divide="ignore"):
            speedups = np.where(seconds > 0, problem.dense.low / seconds, np.inf)
        return cls(problem, seconds, speedups, layers.errors, layers, exact=not resolution)

    def __repr__(self) -> str:
        return f"<TradeOffs: {len(self):,} profiles from {self.speedups[0]:.4g}x to {self.speedups[-1]:.4g}x>"

    def __len__(self) -> int:
        return len(self.seconds)

    def profile(self, i: int) -> Selection:
        """Return the i-th profile; it is solved for on demand."""
        return Selection(self.problem, self._layers.choice(i), float(self.errors[i]) if self.exact else -math.inf)

    def at(self, target: float) -> Selection:
        """Return the profile of least error with a listed speedup of at least `target`. Raises Infeasible."""
        budget = self.problem.budget(target)
        fast = np.flatnonzero(self.speedups >= target)
        if not len(fast):  # only with a resolution, which rounds seconds up
            solution = solve(self.problem.safe_seconds, self.problem.errors, budget)
            return Selection(self.problem, solution.choice, solution.bound)
        return self.profile(int(fast[-1]))

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each profile: seconds, speedup, error."""
        import pandas as pd

        return pd.DataFrame({"seconds": self.seconds, "speedup": self.speedups, "error": self.errors})

    def plot(self) -> Any:
        """Return a plotly figure: the total error over the speedup."""
        return plot_trade_offs(self.speedups, self.errors)
