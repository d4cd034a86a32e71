"""Layer-wise reconstruction: the kept weights that come nearest the dense layer's outputs.

min over W' with the mask of |W X - W' X|^2 + damping |W - W'|^2, the objective of AdaPrune (Hubara et al. 2021,
section 4; Frantar & Alistarh 2022) with a ridge. They run Adam on the inputs; it is a least-squares problem, and
with H = X X^T its normal equations are one small system a row, over its kept columns K: H[K, K] w'[K] = (H w)[K].

Rows that keep the same columns (vector, Shfl-BW and block patterns) share one matrix: a Cholesky factor each group.
Where every row has columns of its own, preconditioned conjugate gradients solve all rows at once, a product with H
an iteration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

DAMPING = 0.01
ITERATIONS = 40
# A small double-precision Cholesky runs at about a tenth of the rate of one large single-precision product.
CHOLESKY_COST = 10


@dataclass(frozen=True)
class Reconstruction:
    """A layer's option: weight (m, k) float32 with exact zeros, mask (m, k), |dy|^2/|y|^2 on calibration data."""

    weight: Tensor
    mask: Tensor
    error: float


def adaprune(
    weight: Tensor,
    mask: Tensor,
    hessian: Tensor,
    *,
    damping: float = DAMPING,
    iterations: int = ITERATIONS,
) -> Reconstruction:
    """Refit the kept weights of `weight` (m, k) to its dense outputs on inputs with `hessian` (k, k) float64.

    `damping` is the ridge, as a share of H's mean diagonal. The exact solution where it is cheaper than `iterations`
    conjugate-gradient steps, those otherwise.
    """
    ridge = damping * float(hessian.diagonal().mean())
    damped = hessian + ridge * torch.eye(len(hessian), dtype=hessian.dtype)
    groups = _rows_by_mask(mask)
    if ridge == 0 and not bool(hessian.any()):
        solution = weight  # no input ever reached this layer: any weight is right
    elif CHOLESKY_COST * _cholesky_flop(groups, mask) <= iterations * 2 * mask.numel() * mask.shape[1]:
        solution = _by_cholesky(weight, mask, damped, groups)
    else:
        solution = _by_conjugate_gradients(weight, mask, damped, iterations)
    solution = torch.where(mask, solution, 0.0)
    return Reconstruction(solution, mask, output_error(weight, solution, hessian))


def output_error(weight: Tensor, changed: Tensor, hessian: Tensor) -> float:
    """|dy|^2 / |y|^2 over the calibration data: tr(dW H dW^T) / tr(W H W^T), bias left out.

    0 if the outputs do not change, infinite if they change from zero.
    """
    moved = _energy(changed.double() - weight.double(), hessian)
    whole = _energy(weight.double(), hessian)
    if whole > 0:
        return moved / whole
    return 0.0 if moved == 0 else math.inf


def _energy(matrix: Tensor, hessian: Tensor) -> float:
    return max(0.0, float(((matrix @ hessian) * matrix).sum()))


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


def _by_cholesky(weight: Tensor, mask: Tensor, hessian: Tensor, groups: list[Tensor]) -> Tensor:
    solution = torch.zeros_like(weight)
    target = weight.double() @ hessian
    for rows in groups:
        columns = mask[rows[0]].nonzero().squeeze(1)
        factor = torch.linalg.cholesky(hessian[columns][:, columns])
        kept = torch.cholesky_solve(target[rows][:, columns].T, factor).T
        solution[rows[:, None], columns] = kept.to(weight.dtype)
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
