"""What a weight's loss would cost: the scores by which masks are drawn, as plain objects that a pruner is given.

A score that needs gradients says how many; a pruner then keeps the latest so many of each layer's, one an optimizer
step (averaged over accumulated batches and ranks, unscaled, masked), and hands them over as (gradients, m, k).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor


class Score(Protocol):
    """How much each weight matters, and what dropping some of them does to the others."""

    @property
    def gradients(self) -> int:
        """How many of the latest gradients it wants to see."""

    def scores(self, weight: Tensor, gradients: Tensor) -> Tensor:
        """Scores (m, k), not negative, the larger the more a weight matters; patterns add them up over units."""

    def compensate(self, weight: Tensor, gradients: Tensor, mask: Tensor) -> Tensor:
        """The weights (m, k) after those outside `mask` were dropped: the kept ones may make up for them."""


@dataclass(frozen=True)
class MagnitudeScore:
    """w^2: a large weight matters. Nothing is made up for."""

    gradients: ClassVar[int] = 0

    def scores(self, weight: Tensor, gradients: Tensor) -> Tensor:
        """The squares, float64."""
        return weight.double().square()

    def compensate(self, weight: Tensor, gradients: Tensor, mask: Tensor) -> Tensor:
        """The kept weights as they are."""
        return torch.where(mask, weight, 0.0)
