"""Magnitude pruning straight through: the forward uses the largest weights, the gradient reaches all (Bengio 2013).

Masks are drawn from the dense weights, so that a dropped weight comes back when it has grown.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from search.pruning.masks.layer_targets import Target
from search.pruning.training.phases import check_dense, check_every
from search.pruning.training.pruner import DENSE, Pruner, Stage, When


@dataclass(frozen=True, kw_only=True, eq=False)
class STE(Pruner):
    """After `dense`, a share of all steps, masks are drawn every `every` steps."""

    keeps_dense: ClassVar[bool] = True
    dense: float = 0.0
    every: int = 1

    def __post_init__(self) -> None:
        check_dense(self.dense)
        check_every(self.every)

    def stage(self, target: Target, when: When) -> Stage:
        """Dense, then under masks that follow the weights."""
        start = round(self.dense * when.total)
        if when.step < start:
            return DENSE
        return Stage(target, backward=1.0, redraw=(when.step - start) % self.every == 0)

    def changes(self, target: Target, when: When) -> Iterable[int]:
        """Where the first mask is drawn."""
        return (round(self.dense * when.total),)
