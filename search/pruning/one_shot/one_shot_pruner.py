"""One-shot, layer-wise pruning: a dense layer and what it sees in, its pruned options out.

Every method is a class that is given a layer's weight and H, does once what all options share, and answers
`prune(pattern, sparsity)`: AdaPrune, ExactOBS, SparseGPT, Magnitude, and Auto, which chooses between two of them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from latbench.errors import BadData
from sparse_kernels.patterns import Pattern

# The ridge that makes H invertible, as a share of its mean diagonal: what SparseGPT and OBC take.
DAMPING = 0.01
ENERGY_ROWS = 512


@dataclass(frozen=True)
class Pruned:
    """A layer's option: weight (m, k) float32 with exact zeros, mask (m, k), |dy|^2/|y|^2 on calibration data."""

    weight: Tensor
    mask: Tensor
    error: float


class OneShot(ABC):
    """A dense layer, `weight` (m, k) float32 and `hessian` (k, k) float64, ready to be pruned any number of times.

    The ridge is `damping` times H's mean diagonal. Raises BadData for weights that are not finite.
    """

    def __init__(self, weight: Tensor, hessian: Tensor, damping: float = DAMPING) -> None:
        if not bool(torch.isfinite(weight).all()):
            raise BadData("the weights hold NaN or infinite values")
        self.weight, self.hessian = weight, hessian
        self.energy = output_energy(weight, hessian)
        self.damping = damping

    @cached_property
    def damped(self) -> Tensor:
        """H with the ridge, (k, k) float64: as large as H, and made only where a method asks for it."""
        # Where no input but zeros ever reached the layer any weight is right: then the nearest to the dense one is.
        ridge = self.damping * float(self.hessian.diagonal().mean()) or 1.0
        damped = self.hessian.clone()
        damped.diagonal().add_(ridge)
        return damped

    def inverse(self) -> Tensor:
        """The inverse of the damped H, (k, k) float64; made anew at each call."""
        return torch.cholesky_inverse(torch.linalg.cholesky(self.damped))

    @abstractmethod
    def prune(self, pattern: Pattern, sparsity: float) -> Pruned:
        """The layer pruned to a pattern. Raises ValueError for a sparsity that the pattern does not have."""

    def error(self, changed: Tensor) -> float:
        """|dy|^2 / |y|^2 over the calibration data if the weight became `changed` (m, k), bias left out.

        Exactly tr(dW H dW^T) / tr(W H W^T); 0 if no output changes, infinite if outputs change that were all zero.
        """
        moved = output_energy(changed, self.hessian, self.weight)
        if self.energy > 0:
            return moved / self.energy
        return 0.0 if moved == 0 else math.inf

    def masked(self, weight: Tensor, mask: Tensor) -> Pruned:
        """The option that keeps of `weight` (m, k) what `mask` says."""
        kept = torch.where(mask, weight, 0.0).float()
        return Pruned(kept, mask, self.error(kept))


def output_energy(weight: Tensor, hessian: Tensor, away_from: Tensor | None = None) -> float:
    """|(weight - away_from) X|^2 = tr(dW H dW^T) in float64, away from zero by default; some rows at a time."""
    total = 0.0
    for at in range(0, len(weight), ENERGY_ROWS):
        part = weight[at : at + ENERGY_ROWS].double()
        if away_from is not None:
            part = part - away_from[at : at + ENERGY_ROWS].double()
        total += float(((part @ hessian) * part).sum())
    return max(0.0, total)
