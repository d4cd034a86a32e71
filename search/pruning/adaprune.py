"""Layer-wise reconstruction: the kept weights that come nearest the dense layer's outputs.

min over W' with the mask of |W X - W' X|^2 + damping |W - W'|^2, the objective of AdaPrune (Hubara et al. 2021,
section 4; Frantar & Alistarh 2022) with a ridge. They run Adam on the inputs; it is a least-squares problem, and
with H = X X^T its normal equations are one small system a row, over its kept columns K: H[K, K] w'[K] = (H w)[K].

Rows that keep the same columns (vector, Shfl-BW and block patterns) share one matrix: a Cholesky factor each group.
Where every row has columns of its own, preconditioned conjugate gradients solve all rows at once, a product with H
an iteration.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from search.pruning.magnitude import magnitude
from search.pruning.oneshot import DAMPING, OneShot, Pruned
from sparse_kernels.patterns import Pattern

ITERATIONS = 40
# A small double-precision Cholesky runs at about a tenth of the rate of one large single-precision product.
CHOLESKY_COST = 10


class AdaPrune(OneShot):
    """One dense layer's least-squares problem, ready to be solved for any number of masks.

    A fit is exact where that is cheaper than `iterations` conjugate-gradient steps (always where those are infinitely
    many), else those steps. `prune` draws the mask by w^2 H_jj.
    """

    def __init__(
        self, weight: Tensor, hessian: Tensor, *, damping: float = DAMPING, iterations: float = ITERATIONS
    ) -> None:
        super().__init__(weight, hessian, damping)
        self.iterations = iterations
        self.target = weight.double() @ self.damped

    def prune(self, pattern: Pattern, sparsity: float) -> Pruned:
        """Mask by saliency, then refit."""
        return self.fit(magnitude(self.weight, pattern, sparsity, self.hessian))

    def fit(self, mask: Tensor) -> Pruned:
        """Refit the weights that `mask` (m, k) keeps to the dense layer's outputs."""
        groups = _rows_by_mask(mask)
        if CHOLESKY_COST * _cholesky_flop(groups, mask) <= self.iterations * 2 * mask.numel() * mask.shape[1]:
            return self.masked(_by_cholesky(self.target, mask, self.damped, groups), mask)
        return self.masked(_by_conjugate_gradients(self.weight, mask, self.damped, int(self.iterations)), mask)


def _rows_by_mask(mask: Tensor) -> list[Tensor]:
    """The rows' numbers, grouped by equal masks."""
    bits = np.packbits(mask.numpy(), axis=1)
    _, group_of = np.unique(bits, axis=0, return_inverse=True)
    order = np.argsort(group_of, kind="stable")
    ends = np.cumsum(np.bincount(group_of))
    return [torch.from_numpy(rows) for rows in np.split(order, ends[:-1])]


def _cholesky_flop(groups: list[Tensor], mask: Tensor) -> float:
    kept = [(int(mask[rows[0]].sum()), len(rows)) for rows in groups]
    return sum(k**3 / 3 + 2 * rows * k**2 for k, rows in kept)


def _by_cholesky(target: Tensor, mask: Tensor, hessian: Tensor, groups: list[Tensor]) -> Tensor:
    solution = torch.zeros(target.shape)
    for rows in groups:
        columns = mask[rows[0]].nonzero().squeeze(1)
        factor = torch.linalg.cholesky(hessian[columns][:, columns])
        kept = torch.cholesky_solve(target[rows][:, columns].T, factor).T
        solution[rows[:, None], columns] = kept.float()
    return solution


def _by_conjugate_gradients(weight: Tensor, mask: Tensor, hessian: Tensor, iterations: int) -> Tensor:
    """Every row's masked system at once, float32, with H's diagonal as preconditioner (Saad 2003, algorithm 9.1).

    Starts from the dense weights under the mask; each step can only lower the damped objective.
    """
    h = hessian.float()
    inverse_diagonal = 1 / h.diagonal()
    kept = mask.to(h.dtype)
    x = kept * weight
    residual = kept * ((weight - x) @ h)
    z = residual * inverse_diagonal
    direction = z.clone()
    rz = (residual * z).sum(dim=1, keepdim=True)
    tiny = torch.finfo(h.dtype).tiny
    for _ in range(iterations):
        product = kept * (direction @ h)
        step = rz / (direction * product).sum(dim=1, keepdim=True).clamp_min(tiny)
        x += step * direction
        residual -= step * product
        z = residual * inverse_diagonal
        following = (residual * z).sum(dim=1, keepdim=True)
        direction = z + (following / rz.clamp_min(tiny)) * direction
        rz = following
    return x
