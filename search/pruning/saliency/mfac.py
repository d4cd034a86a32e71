"""M-FAC: the diagonal of the inverse of an empirical Fisher matrix, from the gradients alone (Frantar et al. 2021).

This is the static algorithm, in O(m^2 d). For each block of weights v_i = H_{i-1}^-1 g_i. The inverse is
H^-1 x = x/damping - sum of v_i (v_i^T x) / (m + g_i^T v_i).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from search.pruning.saliency.fisher_blocks import BLOCK, DAMPING, split_blocks


def compute_inverse_diagonal(gradients: Tensor, *, damping: float = DAMPING, block: int = BLOCK) -> Tensor:
    """Return the diagonal (d,) float64 of the block-wise F^-1, for finite gradients (m, d)."""
    parts = [1 / damping - v.square_().div_(q).sum(dim=1) for v, q in _compute_recursion(gradients, damping, block)]
    return torch.cat([part.flatten() for part in parts])[: gradients.shape[1]]


def _compute_recursion(gradients: Tensor, damping: float, block: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield v (blocks, m, block) and m + g^T v (blocks, m, 1), some blocks at a time."""
    m = len(gradients)
    for _, g in split_blocks(gradients, block, 24 * m):
        v = torch.empty_like(g)
        q = g.new_empty(len(g), m, 1)
        for i in range(m):
            latest, before = g[:, i : i + 1], v[:, :i]
            v[:, i : i + 1] = latest / damping - (latest @ before.mT / q[:, :i].mT) @ before
            q[:, i] = m + (latest * v[:, i : i + 1]).sum(dim=2)
        yield v, q
