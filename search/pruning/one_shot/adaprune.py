"""Layer-wise reconstruction: the kept weights that come nearest the dense layer's outputs.

min over W' with the mask of |W X - W' X|^2 + damping |W - W'|^2, the objective of AdaPrune (Hubara et al. 2021,
section 4; Frantar & Alistarh 2022) with a ridge. They run Adam on the inputs; it is a least-squares problem, and
with H = X X^T its normal equations are one small system a row, over its kept columns K: H[K, K] w'[K] = (H w)[K].

As in SPDY (Frantar & Alistarh 2022, section 4) the sparsity is reached in levels: what goes at each is the least of
the weights refitted at the one before, not of the dense ones. That takes a third off the error of the outputs.

Rows that keep the same columns (vector, Shfl-BW and block patterns) share one matrix: a Cholesky factor each group.
Where every row has columns of its own, preconditioned conjugate gradients solve all rows at once, a product with H
an iteration.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from search.pruning.one_shot.magnitude import magnitude
from search.pruning.one_shot.one_shot_pruner import DAMPING, OneShot, Pruned
from sparse_kernels.patterns import NM, Pattern, VectorNM

ITERATIONS = 40
# Of a level on the way, which starts from the one before.
LEVEL_ITERATIONS = 10
# What levels keep. Nine tenths from one to the next would take twice as long, for 2 to 5% less error.
SHARES = tuple(0.8**i for i in range(1, 21))
# A small double-precision Cholesky runs at about a tenth of the rate of one large single-precision product.
CHOLESKY_COST = 10


class AdaPrune(OneShot):
    """One dense layer's least-squares problem, ready to be solved for any number of masks.

    A fit is exact where that is cheaper than `iterations` conjugate-gradient steps (always where those are infinitely
    many), else those steps. Options of one pattern are cheapest with their sparsities rising: they share levels.
    """

    def __init__(
        self, weight: Tensor, hessian: Tensor, *, damping: float = DAMPING, iterations: float = ITERATIONS
    ) -> None:
        super().__init__(weight, hessian, damping)
        self.iterations = iterations
        self.target = weight.double() @ self.damped
        self._levels: list[Level] = []
        self._refitted = weight  # at the last of them

    def prune(self, pattern: Pattern, sparsity: float) -> Pruned:
        """Drop what has the least w^2 H_jj and refit, level by level."""
        levels = list(levels_to(pattern, sparsity))
        if levels[: len(self._levels)] != self._levels:
            self._levels, self._refitted = [], self.weight
        for level in levels[len(self._levels) :]:
            mask = magnitude(self._refitted, *level, self.hessian)
            self._refitted = self._fitted(mask, self._refitted, LEVEL_ITERATIONS)
            self._levels.append(level)
        mask = magnitude(self._refitted, pattern, sparsity, self.hessian)
        return self.masked(self._fitted(mask, self._refitted, self.iterations), mask)

    def fit(self, mask: Tensor) -> Pruned:
        """Refit the weights that `mask` (m, k) keeps to the dense layer's outputs."""
        return self.masked(self._fitted(mask, self.weight, self.iterations), mask)

    def _fitted(self, mask: Tensor, start: Tensor, iterations: float) -> Tensor:
        groups = _rows_by_mask(mask)
        if CHOLESKY_COST * _cholesky_flop(groups, mask) <= iterations * 2 * mask.numel() * mask.shape[1]:
            return _by_cholesky(self.target, mask, self.damped, groups)
        return _by_conjugate_gradients(self.weight, start, mask, self.damped, int(iterations))


Level = tuple[Pattern, float]
"""A pattern and the sparsity that is reached at it."""


def levels_to(pattern: Pattern, sparsity: float) -> Iterator[Level]:
    """The levels on the way to an option: the same for all sparsities of a pattern, as far as they go."""
    if isinstance(pattern, NM | VectorNM):
        for keep in dict.fromkeys(int(share * pattern.of) for share in SHARES):
            if keep > pattern.keep:
                level = replace(pattern, keep=keep)
                yield level, level.sparsity
    else:
        yield from ((pattern, 1 - share) for share in SHARES if 1 - share < sparsity)


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


def _by_conjugate_gradients(weight: Tensor, start: Tensor, mask: Tensor, hessian: Tensor, iterations: int) -> Tensor:
    """Every row's masked system at once, float32, with H's diagonal as preconditioner (Saad 2003, algorithm 9.1).

    Begins at `start` (m, k) under the mask; each step can only lower the damped objective.
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
        following = torch.mul(residual, z, out=product).sum(dim=1, keepdim=True)
        direction.mul_(following / rz.clamp_min(tiny)).add_(z)
        rz = following
    return x
