"""Optimal Brain Surgeon with the empirical Fisher matrix: scores and the update, given any inverse of it.

F = damping I + (1/n) sum of g g^T over n gradients g (d,) stands for the Hessian of the loss. Removing the weight q
costs w_q^2 / (2 [F^-1]_qq) and moves the others by -w_q F^-1 e_q / [F^-1]_qq (Hassibi & Stork 1993; Singh & Alistarh
2020). `mfac` and `woodfisher` give F^-1 in two ways, for blocks of neighbouring weights each on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from latbench.errors import BadData

# What M-FAC's pruner takes (Frantar et al. 2021, appendix).
DAMPING = 1e-5
BLOCK = 128
CHUNK_BYTES = 2**27


def scores(weights: Tensor, diagonal: Tensor) -> Tensor:
    """w^2 / (2 [F^-1]_qq) of weights (d,), with the diagonal (d,) of F^-1: the loss of dropping each alone."""
    return weights.square() / (2 * diagonal)


def update(weights: Tensor, dropped: Tensor, diagonal: Tensor, inverse_times: Callable[[Tensor], Tensor]) -> Tensor:
    """`weights` (d,) once those of `dropped` (d,) bool are gone and each one's own update is added to the others.

    `inverse_times` multiplies a vector (d,) by F^-1. The single updates are summed, as M-FAC and WoodFisher do: exact
    for one weight a block, and near it where the dropped hardly depend on each other.
    """
    share = torch.where(dropped, weights / diagonal, 0.0)
    return torch.where(dropped, 0.0, weights - inverse_times(share).to(weights.dtype))


def blocks_of(gradients: Tensor, block: int, bytes_a_weight: int) -> Iterator[tuple[slice, Tensor]]:
    """Cut gradients (m, d) into blocks of `block` weights: (weights, float64 (blocks, m, block)), some at a time.

    As many as fit CHUNK_BYTES at `bytes_a_weight`, at least one. The last block is filled with zeros. Raises BadData
    for gradients that are not finite.
    """
    if not bool(torch.isfinite(gradients).all()):
        raise BadData("the gradients hold NaN or infinite values")
    m, d = gradients.shape
    step = max(1, CHUNK_BYTES // (bytes_a_weight * block)) * block
    for start in range(0, d, step):
        part = gradients[:, start : start + step].double()
        width = part.shape[1]
        padded = torch.nn.functional.pad(part, (0, -width % block))
        yield slice(start, start + width), padded.view(m, -1, block).transpose(0, 1)
