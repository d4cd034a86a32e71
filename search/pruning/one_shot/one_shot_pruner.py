"""Base class of one-shot, layer-wise pruning: from a dense layer and its inputs to pruned weights.

A method is a class that takes a layer's weight and H. It computes once what all options share, and `prune(pattern,
sparsity)` returns an option. The methods are AdaPrune, ExactOBS, SparseGPT, Magnitude and AutoPruner.
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

DAMPING = 0.01
"""Ridge that makes H invertible, as a share of its mean diagonal; the value of SparseGPT and OBC."""

ENERGY_ROWS = 512


@dataclass(frozen=True)
class PrunedWeight:
    """One option of a layer.

    Attributes
    ----------
    weight : Tensor of shape (m, k)
        Weight with exact zeros, float32.
    mask : bool Tensor of shape (m, k)
        True marks a kept weight.
    error : float
        |dy|^2 / |y|^2 of the layer's outputs on calibration data.
    """

    weight: Tensor
    mask: Tensor
    error: float


class OneShotPruner(ABC):
    """A dense layer that can be pruned any number of times.

    Parameters
    ----------
    weight : Tensor of shape (m, k)
        Dense weight, float32.
    hessian : Tensor of shape (k, k)
        H, the sum of x x^T over the layer's inputs x, float64.
    damping : float
        Ridge, as a share of the mean diagonal of H.

    Raises
    ------
    BadData
        A weight is not finite.
    """

    def __init__(self, weight: Tensor, hessian: Tensor, damping: float = DAMPING) -> None:
        if not bool(torch.isfinite(weight).all()):
            raise BadData("the weights hold NaN or infinite values")
        self.weight, self.hessian = weight, hessian
        self.energy = compute_output_energy(weight, hessian)
        self.damping = damping

    @cached_property
    def damped(self) -> Tensor:
        """H with the ridge, (k, k) float64. It is as large as H, and computed only for methods that need it."""
        # If all inputs are zero, any weight is right: with this ridge the dense weight is selected.
        ridge = self.damping * float(self.hessian.diagonal().mean()) or 1.0
        damped = self.hessian.clone()
        damped.diagonal().add_(ridge)
        return damped

    @cached_property
    def factor(self) -> Tensor:
        """U, the upper Cholesky factor of the inverse of the damped H, (k, k) float64."""
        factor: Tensor = torch.linalg.cholesky(self.inverse(), upper=True)
        return factor

    def inverse(self) -> Tensor:
        """Return the inverse of the damped H, (k, k) float64, computed at each call."""
        return torch.cholesky_inverse(torch.linalg.cholesky(self.damped))

    @abstractmethod
    def prune(self, pattern: Pattern, sparsity: float) -> PrunedWeight:
        """Prune the layer to a pattern.

        Parameters
        ----------
        pattern : Pattern
            The sparsity pattern.
        sparsity : float
            Share of weights to drop, in [0, 1).

        Returns
        -------
        PrunedWeight
            Weight, mask and error.

        Raises
        ------
        ValueError
            The pattern does not have this sparsity.
        """

    def error(self, changed: Tensor) -> float:
        """Return |dy|^2 / |y|^2 over the calibration data for the weight `changed` (m, k), without bias.

        This is tr(dW H dW^T) / tr(W H W^T). It is 0 if no output changes, and infinite if outputs change that were
        all zero.
        """
        return self.compare_with_energy(compute_output_energy(changed, self.hessian, self.weight))

    def compare_with_energy(self, moved: float) -> float:
        """Return |dy|^2, by which the outputs move, as a share of |y|^2; see `error`."""
        if self.energy > 0:
            return moved / self.energy
        return 0.0 if moved == 0 else math.inf

    def apply_mask(self, weight: Tensor, mask: Tensor) -> PrunedWeight:
        """Return the option that keeps the weights (m, k) that `mask` (m, k) keeps."""
        kept = torch.where(mask, weight, 0.0).float()
        return PrunedWeight(kept, mask, self.error(kept))


def compute_output_energy(weight: Tensor, hessian: Tensor, away_from: Tensor | None = None) -> float:
    """Return |(weight - away_from) X|^2 = tr(dW H dW^T) in float64; `away_from` is 0 by default."""
    total = 0.0
    for at in range(0, len(weight), ENERGY_ROWS):
        part = weight[at : at + ENERGY_ROWS].double()
        if away_from is not None:
            part = part - away_from[at : at + ENERGY_ROWS].double()
        total += float(((part @ hessian) * part).sum())
    return max(0.0, total)
