"""Masks by the magnitude of weights, or by their contribution to the layer's output."""

from __future__ import annotations

import torch
from torch import Tensor

from latbench.errors import BadData
from search.pruning.one_shot.one_shot_pruner import OneShotPruner, PrunedWeight
from sparse_kernels.patterns import Pattern


def draw_magnitude_mask(weight: Tensor, pattern: Pattern, sparsity: float, hessian: Tensor | None = None) -> Tensor:
    """Draw a mask by w^2, or by w^2 H_jj if there is a Hessian.

    The second score is the energy that the weight adds to the output on calibration data, the square of Wanda's (Sun
    et al. 2023). A large weight on an input that is nearly always zero matters little. Scores are squares because a
    pattern adds up those of the weights that it keeps together.

    Parameters
    ----------
    weight : Tensor of shape (m, k)
        The weights.
    pattern : Pattern
        The sparsity pattern.
    sparsity : float
        Share of weights to drop, in [0, 1).
    hessian : Tensor of shape (k, k), optional
        H of the layer's inputs.

    Returns
    -------
    bool Tensor of shape (m, k)
        True marks a kept weight.

    Raises
    ------
    BadData
        A weight is not finite.
    ValueError
        The pattern does not have this sparsity or cannot hold this shape.
    """
    if not bool(torch.isfinite(weight).all()):
        raise BadData("the weights hold NaN or infinite values")
    scores = weight.detach().to(torch.float64, copy=True, memory_format=torch.contiguous_format).square_()
    if hessian is not None:
        scores *= hessian.diagonal()
    return torch.from_numpy(pattern.mask(scores.numpy(), sparsity))


class Magnitude(OneShotPruner):
    """The baseline of every other method: the largest weights are kept as they are."""

    def prune(self, pattern: Pattern, sparsity: float) -> PrunedWeight:
        """Mask by w^2, without changes to the kept weights."""
        return self.apply_mask(self.weight, draw_magnitude_mask(self.weight, pattern, sparsity))
