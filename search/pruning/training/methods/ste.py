"""Magnitude pruning with a straight-through estimator: the gradient reaches all weights (Bengio et al. 2013).

The forward uses the largest weights. Masks are drawn from the dense weights, so a dropped weight returns when it has
grown.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from search.pruning.masks.layer_targets import LayerTarget
from search.pruning.training.phases import check_dense, check_every
from search.pruning.training.pruner import DENSE, Moment, Pruner, Stage


@dataclass(frozen=True, kw_only=True, eq=False)
class STE(Pruner):
    """Magnitude pruning with a straight-through estimator.

    Parameters
    ----------
    dense : float
        Dense phase at the start, as a share of all steps.
    every : int
        Steps between two masks.
    score : Score
        How much each weight matters.
    """

    keeps_dense: ClassVar[bool] = True
    dense: float = 0.0
    every: int = 1

    def __post_init__(self) -> None:
        check_dense(self.dense)
        check_every(self.every)

    def stage(self, target: LayerTarget, moment: Moment) -> Stage:
        """Return the dense stage, then the stage under masks that follow the weights."""
        start = round(self.dense * moment.total)
        if moment.step < start:
            return DENSE
        return Stage(target, backward=1.0, redraw=(moment.step - start) % self.every == 0)

    def list_stage_starts(self, target: LayerTarget, moment: Moment) -> Iterable[int]:
        """Return the step of the first mask."""
        return (round(self.dense * moment.total),)
