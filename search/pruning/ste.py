"""Magnitude pruning straight through: the forward uses the largest weights, the gradient reaches all (Bengio 2013).

Masks are drawn from the dense weights, so that a dropped weight comes back when it has grown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from latbench.errors import UsageError
from search.pruning.pruner import DENSE, Pruner, Stage, When
from search.pruning.targets import Target


@dataclass(frozen=True, kw_only=True, eq=False)
class STE(Pruner):
    """After `dense`, a share of all steps, masks are drawn every `every` steps."""

    keeps_dense: ClassVar[bool] = True
    dense: float = 0.0
    every: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.dense <= 1:
            raise UsageError(f"the dense phase is a share of all steps, from 0 to 1, not {self.dense}")
        if self.every < 1:
            raise UsageError(f"masks are drawn every so many steps, at least 1, not {self.every}")

    def stage(self, target: Target, when: When) -> Stage:
        """Dense, then under masks that follow the weights."""
        start = round(self.dense * when.total)
        if when.step < start:
            return DENSE
        return Stage(target, backward=1.0, redraw=(when.step - start) % self.every == 0)
