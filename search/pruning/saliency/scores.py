"""Scores of weights, by which a pruner draws masks: how much the loss of each weight would cost.

A score may need gradients. A pruner then keeps the latest ones of each layer, one an optimizer step, and passes them
as (gradients, m, k). They are averaged over accumulated batches and ranks, unscaled and masked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor


class Score(Protocol):
    """A measure of how much each weight matters, and of how the others compensate for dropped ones."""

    @property
    def gradients(self) -> int:
        """Number of the latest gradients that the score needs."""

    def scores(self, weight: Tensor, gradients: Tensor) -> Tensor:
        """Return non-negative scores (m, k), higher for weights that matter more. Patterns add them up over units."""

    def compensate(self, weight: Tensor, gradients: Tensor, mask: Tensor) -> Tensor:
        """Return the weights (m, k) without those outside `mask`; the kept ones may compensate for them."""


@dataclass(frozen=True)
class MagnitudeScore:
    """The score w^2: a large weight matters. The kept weights do not compensate."""

    gradients: ClassVar[int] = 0

    def scores(self, weight: Tensor, gradients: Tensor) -> Tensor:
        """Return the squares, float64."""
        return weight.double().square()

    def compensate(self, weight: Tensor, gradients: Tensor, mask: Tensor) -> Tensor:
        """Return the kept weights unchanged."""
        return torch.where(mask, weight, 0.0)
