"""Optimal Brain Surgeon with the empirical Fisher matrix: scores and the update, given any inverse of it.

F = damping I + (1/n) sum of g g^T over n gradients g (d,) stands for the Hessian of the loss. Removing the weight q
costs w_q^2 / (2 [F^-1]_qq) (Hassibi & Stork 1993; Singh & Alistarh 2020). Removing many, D, moves the kept ones, K,
by F_KK^-1 F_KD w_D. `mfac` and `woodfisher` give the diagonal of F^-1 for blocks of neighbouring weights each on its
own, `dynamic_mfac` that of a whole layer.

With G_K and G_D the columns of the kept and the dropped weights in the gradients G (n, d),
F_KK^-1 F_KD w_D = G_K^T (n damping I + G_K G_K^T)^-1 G_D w_D, by the push-through identity: what is moved takes no
inverse of F, in which 1/damping would cancel where gradients are large beside it.
"""

from __future__ import annotations

from collections.abc import Iterator

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


def least_inverse(gradients: Tensor, damping: float) -> Tensor:
    """1 / F_qq (d,) float64 of gradients (m, d): what [F^-1]_qq cannot be below."""
    m, _ = gradients.shape
    parts = gradients.split(columns_at_once(16 * m), dim=1)
    return torch.cat([m / (m * damping + part.double().square().sum(dim=0)) for part in parts])


def update(
    weights: Tensor, dropped: Tensor, gradients: Tensor, *, damping: float = DAMPING, block: int = BLOCK
) -> Tensor:
    """`weights` (d,) float64 once those of `dropped` (d,) bool are gone and the others make up for them.

    F is that of gradients (n, d), in blocks of `block` weights. The kept weights reach their least loss in one solve.
    M-FAC and WoodFisher add up what each dropped weight alone would move, which is near that only while few in a
    block are dropped; M-FAC recomputes 16 times in a pruning step.
    """
    n = len(gradients)
    parts = []
    for at, g in blocks_of(gradients, block, 24 * n + 24 * n * n // block):
        gone, own = dropped[at], weights[at].double()
        lost = g @ columns_of(torch.where(gone, own, 0.0), block)
        kept = g * columns_of(~gone, block).mT
        share = torch.cholesky_solve(lost, factor(kept @ kept.mT, damping))
        parts.append(torch.where(gone, 0.0, own + (kept.mT @ share).flatten()[: len(own)]))
    return torch.cat(parts)


def factor(products: Tensor, damping: float) -> Tensor:
    """The lower Cholesky factors of n damping I + `products` (..., n, n), which are changed."""
    n, diagonal = products.shape[-1], products.diagonal(dim1=-2, dim2=-1)
    # Rounding in G G^T may outweigh a damping that is small beside it; the factor must exist.
    rounding = 8 * torch.finfo(torch.float64).eps * diagonal.sum(dim=-1, keepdim=True)
    diagonal.add_(n * rounding.clamp_min(damping))
    return torch.linalg.cholesky(products)


def blocks_of(gradients: Tensor, block: int, bytes_a_weight: int) -> Iterator[tuple[slice, Tensor]]:
    """Cut gradients (m, d) into blocks of `block` weights: (weights, float64 (blocks, m, block)), some at a time.

    As many as fit CHUNK_BYTES at `bytes_a_weight`, at least one. The last block is filled with zeros. Raises BadData
    for gradients that are not finite.
    """
    d = gradients.shape[1]
    step = columns_at_once(bytes_a_weight * block) * block
    for start in range(0, d, step):
        part = gradients[:, start : start + step].double()
        check_finite(part)
        width = part.shape[1]
        if width % block:
            part = torch.nn.functional.pad(part, (0, -width % block))
        yield slice(start, start + width), part.unflatten(1, (-1, block)).transpose(0, 1)


def columns_at_once(bytes_each: int) -> int:
    """How many fit CHUNK_BYTES, at least one, where those before are alive while the next are made."""
    return max(1, CHUNK_BYTES // (2 * bytes_each))


def check_finite(gradients: Tensor) -> None:
    """Raise BadData for gradients that are not finite."""
    if not bool(torch.isfinite(gradients).all()):
        raise BadData("the gradients hold NaN or infinite values")


def columns_of(x: Tensor, block: int) -> Tensor:
    """A vector (d,) cut like gradients: float64 (blocks, block, 1), the last filled with zeros."""
    return torch.nn.functional.pad(x.double(), (0, -len(x) % block)).view(-1, block, 1)
