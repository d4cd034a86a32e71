"""M-FAC and WoodFisher as scores of a pruner: w^2 / (2 [F^-1]_qq), and the update of what is kept.

F is made of the latest `gradients` optimizer steps. The paper's pruner takes single batches' gradients of a fixed
model, and collects them anew within a pruning step; these come from training as it goes on, at no extra cost. So a
pruner refuses them for masks that are due before the first step.

Memory: those gradients of every layer, in its weights' type, for as long as masks are to be drawn; while one is
drawn, its layer's once more, about `fisher.CHUNK_BYTES` of float64 and some numbers a weight.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from latbench.errors import UsageError
from search.pruning.saliency import dynamic_mfac, mfac, woodfisher
from search.pruning.saliency import fisher_blocks as fisher


@dataclass(frozen=True)
class _Fisher:
    """`damping`, and `block` where there is one, are those of F."""

    inverse: ClassVar[ModuleType]
    gradients: int = 64
    damping: float = fisher.DAMPING

    def __post_init__(self) -> None:
        if self.gradients < 1 or getattr(self, "block", 1) < 1 or self.damping <= 0:
            raise UsageError("a Fisher matrix takes at least one gradient, blocks of at least 1, damping above 0")

    def scores(self, weight: Tensor, gradients: Tensor) -> Tensor:
        """The loss of dropping each weight alone, (m, k) float64."""
        return fisher.scores(weight.double().flatten(), self._diagonal(gradients.flatten(1))).view_as(weight)

    def compensate(self, weight: Tensor, gradients: Tensor, mask: Tensor) -> Tensor:
        """The kept weights, moved to make up for those that are dropped."""
        if not len(gradients):
            return torch.where(mask, weight, 0.0)
        updated = self._updated(weight.flatten(), ~mask.flatten(), gradients.flatten(1))
        return updated.view_as(weight).to(weight.dtype)

    def _diagonal(self, rows: Tensor) -> Tensor:
        if not len(rows):  # before the first step: F is damping alone, the scores are magnitudes
            return rows.new_full((rows.shape[1],), 1 / self.damping, dtype=torch.float64)
        # At least 1 / F_qq, below which only rounding takes it, where gradients are large beside the damping.
        least = fisher.least_inverse(rows, self.damping)
        return torch.maximum(self.inverse.inverse_diagonal(rows, **self._settings()), least)

    def _updated(self, weights: Tensor, dropped: Tensor, rows: Tensor) -> Tensor:
        return fisher.update(weights, dropped, rows, **self._settings())

    def _settings(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "gradients"}


@dataclass(frozen=True)
class MFAC(_Fisher):
    """By M-FAC's recursion (Frantar et al. 2021)."""

    inverse: ClassVar[ModuleType] = mfac
    block: int = fisher.BLOCK


@dataclass(frozen=True)
class WoodFisher(_Fisher):
    """By rank-one updates (Singh & Alistarh 2020)."""

    inverse: ClassVar[ModuleType] = woodfisher
    block: int = fisher.BLOCK


@dataclass(frozen=True)
class DynamicMFAC(_Fisher):
    """By Woodbury's identity, the layer as one block (Frantar et al. 2021)."""

    inverse: ClassVar[ModuleType] = dynamic_mfac

    def _updated(self, weights: Tensor, dropped: Tensor, rows: Tensor) -> Tensor:
        return dynamic_mfac.update(weights, dropped, rows, damping=self.damping)
