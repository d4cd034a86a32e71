"""What a problem answers with: one profile, or all efficient ones, as frames, as plots and in SPDY's text format."""

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
from search.problem.layers import options_of
from search.problem.model_times import ModelTimes
from search.problem.plots import plot_choice, plot_trade_offs

if TYPE_CHECKING:
    import pandas as pd

    from search.problem.layers import Interval, Option


@dataclass(frozen=True, repr=False)
class Selection:
    """One option a layer of `problem`, as places among its options.

    No profile within the same budget has an error below `bound`, which is -inf where nothing is proven.
    """

    problem: ModelTimes = field(repr=False, compare=False)
    choice: Choice
    bound: float

    def __repr__(self) -> str:
        proof = ", proven least" if self.bound == self.error else ""
        return f"<Selection: {self.speedup.low:.4g}x, total error {self.error:.6g}{proof}>"

    @property
    def seconds(self) -> float:
        """The layers' seconds at their upper ends: what was compared with the budget."""
        return sum_in_order(t[j] for t, j in zip(self.problem.safe_seconds, self.choice, strict=True))

    @property
    def error(self) -> float:
        """The sum of the layers' errors."""
        return sum_in_order(e[j] for e, j in zip(self.problem.errors, self.choice, strict=True))

    @property
    def predicted(self) -> Interval:
        """Seconds of the whole model."""
        return self.problem.predict(self.choice)

    @property
    def speedup(self) -> Interval:
        """Over the dense model; the promise is its lower end."""
        return self.problem.speedup(self.predicted)

    @property
    def options(self) -> dict[str, Option]:
        """Every layer of the model that was chosen for, and its option; tied layers one by one."""
        return options_of(self.problem.layers, self.choice)

    def to_frame(self) -> pd.DataFrame:
        """A row a layer: layer, pattern, sparsity, seconds, low_seconds, high_seconds, error."""
        from search.problem.data_frames import frame_of_choice

        return frame_of_choice(self.problem.layers, self.choice)

    def plot(self) -> Any:
        """What each layer takes, beside its dense time: a plotly figure."""
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
    """The efficient profiles of `problem`, the fastest first: (profiles,) falling `speedups` and `errors`.

    `seconds` are the whole model's. Both are the unfavourable ends, so each speedup is one that can be promised.
    Where they are not `exact`, a profile may be faster than is listed by the resolution that was asked for.
    """

    problem: ModelTimes = field(repr=False, compare=False)
    seconds: Floats
    speedups: Floats
    errors: Floats
    _layers: Frontier = field(repr=False, compare=False)
    exact: bool = True

    @classmethod
    def of(cls, problem: ModelTimes, resolution: float = 0.0) -> TradeOffs:
        """Raises BadProblem where there are too many to list."""
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
        """The i-th profile; solved for on demand."""
        return Selection(self.problem, self._layers.choice(i), float(self.errors[i]) if self.exact else -math.inf)

    def at(self, target: float) -> Selection:
        """The profile of least error that is listed as at least `target` times as fast. Raises Infeasible."""
        budget = self.problem.budget(target)
        fast = np.flatnonzero(self.speedups >= target)
        if not len(fast):  # only where seconds are listed too high
            solution = solve(self.problem.safe_seconds, self.problem.errors, budget)
            return Selection(self.problem, solution.choice, solution.bound)
        return self.profile(int(fast[-1]))

    def to_frame(self) -> pd.DataFrame:
        """A row a profile: seconds, speedup, error."""
        import pandas as pd

        return pd.DataFrame({"seconds": self.seconds, "speedup": self.speedups, "error": self.errors})

    def plot(self) -> Any:
        """Total error over speedup: a plotly figure."""
        return plot_trade_offs(self.speedups, self.errors)
