"""M-FAC and WoodFisher as scores of a pruner: w^2 / (2 [F^-1]_qq), and the update of what is kept.

F is made of the latest `gradients` optimizer steps, block by block. The paper's pruner takes single batches'
gradients of a fixed model; these come from training as it goes on, at no extra cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from search.pruning import fisher, mfac, woodfisher


@dataclass(frozen=True)
class _Fisher:
    """`damping` and `block` are those of F."""

    inverse: ClassVar[ModuleType]
    gradients: int = 64
    damping: float = fisher.DAMPING
    block: int = fisher.BLOCK

    def scores(self, weight: Tensor, gradients: Tensor) -> Tensor:
        """The loss of dropping each weight alone, (m, k) float64."""
        found = fisher.scores(weight.double().flatten(), self._diagonal(gradients))
        return found.view_as(weight)

    def compensate(self, weight: Tensor, gradients: Tensor, mask: Tensor) -> Tensor:
        """The kept weights after each dropped one's own update; weights that were zero before make none."""
        if not len(gradients):
            return torch.where(mask, weight, 0.0)
        rows = gradients.flatten(1)
        updated = fisher.update(
            weight.double().flatten(), (~mask & (weight != 0)).flatten(), self._diagonal(gradients),
            lambda x: self.inverse.inverse_times(rows, x, damping=self.damping, block=self.block),
        )  # fmt: skip
        return torch.where(mask, updated.view_as(weight).to(weight.dtype), 0.0)

    def _diagonal(self, gradients: Tensor) -> Tensor:
        if not len(gradients):  # before the first step: F is damping alone, the scores are magnitudes
            return torch.full((gradients.shape[1] * gradients.shape[2],), 1 / self.damping, dtype=torch.float64)
        diagonal: Tensor = self.inverse.inverse_diagonal(gradients.flatten(1), damping=self.damping, block=self.block)
        return diagonal


@dataclass(frozen=True)
class MFAC(_Fisher):
    """By M-FAC's recursion (Frantar et al. 2021)."""

    inverse: ClassVar[ModuleType] = mfac


@dataclass(frozen=True)
class WoodFisher(_Fisher):
    """By rank-one updates (Singh & Alistarh 2020)."""

    inverse: ClassVar[ModuleType] = woodfisher
