"""M-FAC and WoodFisher as scores of a pruner: w^2 / (2 [F^-1]_qq), and the update of the kept weights.

F, the empirical Fisher matrix, is made of the gradients of the latest optimizer steps. The paper's pruner collects
gradients of single batches of a fixed model, again within a pruning step. Here they come from training, at no extra
cost. So a pruner refuses these scores if a mask is due before the first step.

Memory: the pruner keeps those gradients of every layer, in the dtype of its weights, while more masks will be drawn.
Drawing a mask takes its layer's gradients once more, and about `fisher_blocks.CHUNK_BYTES` of float64.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from latbench.errors import UsageError
from search.pruning.saliency import dynamic_mfac, fisher_blocks, mfac, woodfisher


@dataclass(frozen=True)
class _Fisher:
    """A score by the Fisher matrix.

    Attributes
    ----------
    gradients : int
        Number of gradients in F.
    damping : float
        Weight of the identity in F.
    """

    inverse: ClassVar[ModuleType]
    gradients: int = 64
    damping: float = fisher_blocks.DAMPING

    def __post_init__(self) -> None:
        if self.gradients < 1 or getattr(self, "block", 1) < 1 or self.damping <= 0:
            raise UsageError("a Fisher matrix takes at least one gradient, blocks of at least 1, damping above 0")

    def scores(self, weight: Tensor, gradients: Tensor) -> Tensor:
        """Return the loss of dropping each weight alone, (m, k) float64."""
        return fisher_blocks.compute_scores(weight.double().flatten(), self._diagonal(gradients.flatten(1))).view_as(
            weight
        )

    def compensate(self, weight: Tensor, gradients: Tensor, mask: Tensor) -> Tensor:
        """Return the kept weights (m, k), moved to compensate for the dropped ones."""
        if not len(gradients):
            return torch.where(mask, weight, 0.0)
        updated = self._update(weight.flatten(), ~mask.flatten(), gradients.flatten(1))
        return updated.view_as(weight).to(weight.dtype)

    def _diagonal(self, rows: Tensor) -> Tensor:
        if not len(rows):  # before the first step F is the damping alone, and the scores are magnitudes
            return rows.new_full((rows.shape[1],), 1 / self.damping, dtype=torch.float64)
        # The diagonal is at least 1 / F_qq; rounding takes it below that if gradients are large beside the damping.
        least = fisher_blocks.compute_least_inverse(rows, self.damping)
        return torch.maximum(self.inverse.compute_inverse_diagonal(rows, **self._settings()), least)

    def _update(self, weights: Tensor, dropped: Tensor, rows: Tensor) -> Tensor:
        return fisher_blocks.update_weights(weights, dropped, rows, **self._settings())

    def _settings(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "gradients"}


@dataclass(frozen=True)
class MFAC(_Fisher):
    """Scores by the recursion of M-FAC, in blocks of `block` weights (Frantar et al. 2021)."""

    inverse: ClassVar[ModuleType] = mfac
    block: int = fisher_blocks.BLOCK


@dataclass(frozen=True)
class WoodFisher(_Fisher):
    """Scores by rank-one updates, in blocks of `block` weights (Singh & Alistarh 2020)."""

    inverse: ClassVar[ModuleType] = woodfisher
    block: int = fisher_blocks.BLOCK


@dataclass(frozen=True)
class DynamicMFAC(_Fisher):
    """Scores by Woodbury's identity, with the layer as one block (Frantar et al. 2021)."""

    inverse: ClassVar[ModuleType] = dynamic_mfac

    def _update(self, weights: Tensor, dropped: Tensor, rows: Tensor) -> Tensor:
        return dynamic_mfac.update_weights(weights, dropped, rows, damping=self.damping)
