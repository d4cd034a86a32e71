"""Which weights to keep, by how large they are, or by how much their layer's output would miss them."""

from __future__ import annotations

import torch
from torch import Tensor

from latbench.errors import BadData
from search.pruning.one_shot.one_shot_pruner import OneShot, Pruned
from sparse_kernels.patterns import Pattern


def magnitude(weight: Tensor, pattern: Pattern, sparsity: float, hessian: Tensor | None = None) -> Tensor:
    """The mask (m, k), True = kept, of a weight (m, k) by w^2; with a Hessian (k, k) by w^2 H_jj.

    The second score is the energy that the weight adds to the output on calibration data (the square of Wanda's,
    Sun et al. 2023): a large weight on an input that is nearly always zero matters little. Squares, because a pattern
    adds up the scores of the weights that it keeps together. Raises BadData for weights that are not finite, and
    what `pattern.mask` raises for a sparsity or shape that the pattern cannot hold.
    """
    if not bool(torch.isfinite(weight).all()):
        raise BadData("the weights hold NaN or infinite values")
    scores = weight.detach().to(torch.float64, copy=True, memory_format=torch.contiguous_format).square_()
    if hessian is not None:
        scores *= hessian.diagonal()
    return torch.from_numpy(pattern.mask(scores.numpy(), sparsity))


class Magnitude(OneShot):
    """Keeps the largest weights as they are: the baseline of every other method."""

    def prune(self, pattern: Pattern, sparsity: float) -> Pruned:
        """Mask by w^2, nothing else."""
        return self.masked(self.weight, magnitude(self.weight, pattern, sparsity))
