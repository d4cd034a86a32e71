"""M-FAC: the diagonal of the inverse of an empirical Fisher matrix, from the gradients alone (Frantar et al. 2021).

Static: for each block of weights the recursion v_i = H_{i-1}^-1 g_i, with
H^-1 x = x/damping - sum of v_i (v_i^T x) / (m + g_i^T v_i), in O(m^2 d).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from search.pruning.saliency.fisher_blocks import BLOCK, DAMPING, blocks_of


def inverse_diagonal(gradients: Tensor, *, damping: float = DAMPING, block: int = BLOCK) -> Tensor:
    """The diagonal (d,) float64 of the block-wise F^-1 of gradients (m, d). Raises BadData as `blocks_of` does."""
    parts = [1 / damping - v.square_().div_(q).sum(dim=1) for v, q in _static(gradients, damping, block)]
    return torch.cat([part.flatten() for part in parts])[: gradients.shape[1]]


def _static(gradients: Tensor, damping: float, block: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(v (blocks, m, block), m + g^T v (blocks, m, 1)), some blocks at a time."""
    m = len(gradients)
    for _, g in blocks_of(gradients, block, 24 * m):
        v = torch.empty_like(g)
        q = g.new_empty(len(g), m, 1)
        for i in range(m):
            latest, before = g[:, i : i + 1], v[:, :i]
            v[:, i : i + 1] = latest / damping - (latest @ before.mT / q[:, :i].mT) @ before
            q[:, i] = m + (latest * v[:, i : i + 1]).sum(dim=2)
        yield v, q
