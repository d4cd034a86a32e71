"""WoodFisher: the inverse of an empirical Fisher matrix by rank-one updates (Singh & Alistarh 2020).

For each block of weights F^-1 starts as I/damping, and each gradient updates it:
F^-1 -= F^-1 g g^T F^-1 / (m + g^T F^-1 g). This takes O(m d block) multiplications; some blocks are held at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from search.pruning.saliency.fisher_blocks import BLOCK, DAMPING, split_blocks


def compute_inverse_diagonal(gradients: Tensor, *, damping: float = DAMPING, block: int = BLOCK) -> Tensor:
    """Return the diagonal (d,) float64 of the block-wise F^-1, for finite gradients (m, d)."""
    parts = [inverse.diagonal(dim1=1, dim2=2).flatten() for inverse in _compute_inverses(gradients, damping, block)]
    return torch.cat(parts)[: gradients.shape[1]]


def _compute_inverses(gradients: Tensor, damping: float, block: int) -> Iterator[Tensor]:
    """Yield F^-1 (blocks, block, block), some blocks at a time."""
    m = len(gradients)
    for _, g in split_blocks(gradients, block, 8 * (m + block)):
        inverse = (torch.eye(block, dtype=g.dtype, device=g.device) / damping).repeat(len(g), 1, 1)
        for i in range(m):
            latest = g[:, i, :, None]
            moved = inverse @ latest
            inverse.baddbmm_(moved / (m + latest.mT @ moved), moved.mT, alpha=-1)
        yield inverse
