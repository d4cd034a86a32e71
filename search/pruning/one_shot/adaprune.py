"""AdaPrune: layer-wise reconstruction of the dense layer's outputs by the kept weights.

It minimizes |W X - W' X|^2 + damping |W - W'|^2 over weights W' with the mask. This is the objective of AdaPrune
(Hubara et al. 2021, section 4; Frantar & Alistarh 2022) with a ridge. The papers run Adam on the inputs, but it is a
least-squares problem. With H = X X^T its normal equations are one small system a row over its kept columns K:
H[K, K] w'[K] = (H w)[K].

As in SPDY (Frantar & Alistarh 2022, section 4) the sparsity is reached in levels. Each level drops the least of the
weights that were refitted at the level before, not of the dense ones. That lowers the error of the outputs by a
third.

Rows that keep the same columns (vector, Shfl-BW and block patterns) share one matrix: one Cholesky factor a group.
If every row has its own columns, preconditioned conjugate gradients solve all rows at once, with one product by H an
iteration.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from search.pruning.one_shot.magnitude import draw_magnitude_mask
from search.pruning.one_shot.one_shot_pruner import DAMPING, OneShotPruner, PrunedWeight
from sparse_kernels.patterns import NM, Pattern, VectorNM

ITERATIONS = 40
LEVEL_ITERATIONS = 10
"""Iterations of an intermediate level, which starts from the one before."""

SHARES = tuple(0.8**i for i in range(1, 21))
"""Share of weights that each level keeps. Factors of 0.9 would take twice as long, for 2 to 5% less error."""

# A small double-precision Cholesky runs at about a tenth of the rate of one large single-precision product.
CHOLESKY_COST = 10


class AdaPrune(OneShotPruner):
    """One dense layer's least-squares problem, to be solved for any number of masks.

    A fit is exact if that costs less than `iterations` conjugate-gradient steps, and always if `iterations` is
    infinite. Options of one pattern share levels: ask for them in the order of rising sparsities.

    Parameters
    ----------
    weight : Tensor of shape (m, k)
        Dense weight, float32.
    hessian : Tensor of shape (k, k)
        H, the sum of x x^T over the layer's inputs x, float64.
    damping : float
        Ridge, as a share of the mean diagonal of H.
    iterations : float
        The most conjugate-gradient steps of a fit.
    """

    def __init__(
        self, weight: Tensor, hessian: Tensor, *, damping: float = DAMPING, iterations: float = ITERATIONS
    ) -> None:
        super().__init__(weight, hessian, damping)
        self.iterations = iterations
        self.target = weight.double() @ self.damped
        self._levels: list[Level] = []
        self._refitted = weight  # of the last level

    def prune(self, pattern: Pattern, sparsity: float) -> PrunedWeight:
        """Drop the weights with the least w^2 H_jj and refit the others, level by level."""
        levels = list(list_levels(pattern, sparsity))
        if levels[: len(self._levels)] != self._levels:
            self._levels, self._refitted = [], self.weight
        for level in levels[len(self._levels) :]:
            mask = draw_magnitude_mask(self._refitted, *level, self.hessian)
            self._refitted = self._fit(mask, self._refitted, LEVEL_ITERATIONS)
            self._levels.append(level)
        mask = draw_magnitude_mask(self._refitted, pattern, sparsity, self.hessian)
        return self.apply_mask(self._fit(mask, self._refitted, self.iterations), mask)

    def fit(self, mask: Tensor) -> PrunedWeight:
        """Refit the weights that `mask` (m, k) keeps to the dense layer's outputs."""
        return self.apply_mask(self._fit(mask, self.weight, self.iterations), mask)

    def _fit(self, mask: Tensor, start: Tensor, iterations: float) -> Tensor:
        groups = _group_rows_by_mask(mask)
        if CHOLESKY_COST * _count_cholesky_flop(groups, mask) <= iterations * 2 * mask.numel() * mask.shape[1]:
            return _solve_by_cholesky(self.target, mask, self.damped, groups)
        return _solve_by_conjugate_gradients(self.weight, start, mask, self.damped, int(iterations))


Level = tuple[Pattern, float]
"""A pattern and its sparsity."""


def list_levels(pattern: Pattern, sparsity: float) -> Iterator[Level]:
    """Yield the levels before an option. They are the same for all sparsities of a pattern, up to the option."""
    if isinstance(pattern, NM | VectorNM):
        for keep in dict.fromkeys(int(share * pattern.of) for share in SHARES):
            if keep > pattern.keep:
                level = replace(pattern, keep=keep)
                yield level, level.sparsity
    else:
        yield from ((pattern, 1 - share) for share in SHARES if 1 - share < sparsity)


def _group_rows_by_mask(mask: Tensor) -> list[Tensor]:
    """Return the row numbers in groups of equal masks."""
    bits = np.packbits(mask.numpy(), axis=1)
    _, group_of = np.unique(bits, axis=0, return_inverse=True)
    order = np.argsort(group_of, kind="stable")
    ends = np.cumsum(np.bincount(group_of))
    return [torch.from_numpy(rows) for rows in np.split(order, ends[:-1])]


def _count_cholesky_flop(groups: list[Tensor], mask: Tensor) -> float:
    kept = [(int(mask[rows[0]].sum()), len(rows)) for rows in groups]
    return sum(k**3 / 3 + 2 * rows * k**2 for k, rows in kept)


def _solve_by_cholesky(target: Tensor, mask: Tensor, hessian: Tensor, groups: list[Tensor]) -> Tensor:
    solution = torch.zeros(target.shape)
    for rows in groups:
        columns = mask[rows[0]].nonzero().squeeze(1)
        factor = torch.linalg.cholesky(hessian[columns][:, columns])
        kept = torch.cholesky_solve(target[rows][:, columns].T, factor).T
        solution[rows[:, None], columns] = kept.float()
    return solution


def _solve_by_conjugate_gradients(
    weight: Tensor, start: Tensor, mask: Tensor, hessian: Tensor, iterations: int
) -> Tensor:
    """Solve every row's masked system at once in float32 (Saad 2003, algorithm 9.1).

    The preconditioner is the diagonal of H. It starts from `start` (m, k) under the mask. Each step can only lower
    the damped objective.
    """
    h = hessian.float()
    inverse_diagonal = 1 / h.diagonal()
    x = mask * start
    residual = ((weight - x) @ h).mul_(mask)
    z = residual * inverse_diagonal
    direction = z.clone()
    rz = (residual * z).sum(dim=1, keepdim=True)
    product = torch.empty_like(x)
    tiny = torch.finfo(h.dtype).tiny
    for _ in range(iterations):  # in place: at 4096 columns each of these takes 64 MiB
        torch.mm(direction, h, out=product).mul_(mask)
        step = rz / torch.mul(direction, product, out=z).sum(dim=1, keepdim=True).clamp_min(tiny)
        x += torch.mul(direction, step, out=z)
        residual -= product.mul_(step)
        torch.mul(residual, inverse_diagonal, out=z)
        next_rz = torch.mul(residual, z, out=product).sum(dim=1, keepdim=True)
        direction.mul_(next_rz / rz.clamp_min(tiny)).add_(z)
        rz = next_rz
    return x
