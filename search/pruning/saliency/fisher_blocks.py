"""Optimal Brain Surgeon with the empirical Fisher matrix: scores and the update of weights, in blocks.

F = damping I + (1/n) sum of g g^T over n gradients g (d,) approximates the Hessian of the loss. Removing the weight q
costs w_q^2 / (2 [F^-1]_qq) (Hassibi & Stork 1993; Singh & Alistarh 2020). Removing the set D moves the kept set K by
F_KK^-1 F_KD w_D. `mfac` and `woodfisher` compute the diagonal of F^-1 for blocks of neighbouring weights, and
`dynamic_mfac` for a whole layer.

Let G_K and G_D be the columns of the kept and of the dropped weights in the gradients G (n, d). By the push-through
identity F_KK^-1 F_KD w_D = G_K^T (n damping I + G_K G_K^T)^-1 G_D w_D. So the update needs no inverse of F, in which
1/damping would cancel if gradients are large beside it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from latbench.errors import BadData

DAMPING = 1e-5  # like BLOCK, as in M-FAC's pruner (Frantar et al. 2021, appendix)
BLOCK = 128
CHUNK_BYTES = 2**27


def compute_scores(weights: Tensor, diagonal: Tensor) -> Tensor:
    """Return w^2 / (2 [F^-1]_qq), the loss of dropping each of the weights (d,), for the diagonal (d,) of F^-1."""
    return weights.square() / (2 * diagonal)


def compute_least_inverse(gradients: Tensor, damping: float) -> Tensor:
    """Return 1 / F_qq (d,) float64 for gradients (m, d): the lower bound of [F^-1]_qq."""
    m, _ = gradients.shape
    parts = gradients.split(count_columns_at_once(16 * m), dim=1)
    return torch.cat([m / (m * damping + part.double().square().sum(dim=0)) for part in parts])


def update_weights(
    weights: Tensor, dropped: Tensor, gradients: Tensor, *, damping: float = DAMPING, block: int = BLOCK
) -> Tensor:
    """Remove weights, and let the others compensate.

    One solve brings the kept weights to their least loss. M-FAC and WoodFisher add up the moves of the single dropped
    weights instead. That is close only while few weights of a block are dropped; M-FAC recomputes 16 times in a step.

    Parameters
    ----------
    weights : Tensor of shape (d,)
        The weights.
    dropped : bool Tensor of shape (d,)
        True marks a weight to remove.
    gradients : Tensor of shape (n, d)
        Gradients of F.
    damping : float
        Weight of the identity in F.
    block : int
        Weights of a block of F.

    Returns
    -------
    Tensor of shape (d,)
        The new weights, float64.
    """
    n = len(gradients)
    parts = []
    for at, g in split_blocks(gradients, block, 24 * n + 24 * n * n // block):
        gone, own = dropped[at], weights[at].double()
        lost = g @ reshape_to_blocks(torch.where(gone, own, 0.0), block)
        kept = g * reshape_to_blocks(~gone, block).mT
        share = torch.cholesky_solve(lost, factorize(kept @ kept.mT, damping))
        parts.append(torch.where(gone, 0.0, own + (kept.mT @ share).flatten()[: len(own)]))
    return torch.cat(parts)


def factorize(products: Tensor, damping: float) -> Tensor:
    """Return the lower Cholesky factors of n damping I + `products` (..., n, n), which are changed."""
    n, diagonal = products.shape[-1], products.diagonal(dim1=-2, dim2=-1)
    # Rounding in G G^T may exceed a small damping, but the factor must exist.
    rounding = 8 * torch.finfo(torch.float64).eps * diagonal.sum(dim=-1, keepdim=True)
    diagonal.add_(n * rounding.clamp_min(damping))
    lower: Tensor = torch.linalg.cholesky(products)
    return lower


def split_blocks(gradients: Tensor, block: int, bytes_a_weight: int) -> Iterator[tuple[slice, Tensor]]:
    """Split gradients (m, d) into blocks of `block` weights.

    Yields the weights, as a slice, and float64 gradients (blocks, m, block). As many blocks come at a time as fit
    CHUNK_BYTES at `bytes_a_weight`, at least one. Zeros fill the last block. Raises BadData if a gradient is not
    finite.
    """
    d = gradients.shape[1]
    step = count_columns_at_once(bytes_a_weight * block) * block
    for start in range(0, d, step):
        part = gradients[:, start : start + step].double()
        check_finite(part)
        width = part.shape[1]
        if width % block:
            part = torch.nn.functional.pad(part, (0, -width % block))
        yield slice(start, start + width), part.unflatten(1, (-1, block)).transpose(0, 1)


def count_columns_at_once(bytes_each: int) -> int:
    """Return how many columns fit half of CHUNK_BYTES, at least one: the next are made beside the last ones."""
    return max(1, CHUNK_BYTES // (2 * bytes_each))


def check_finite(gradients: Tensor) -> None:
    """Raise BadData if a gradient is not finite."""
    if not bool(torch.isfinite(gradients).all()):
        raise BadData("the gradients hold NaN or infinite values")


def reshape_to_blocks(x: Tensor, block: int) -> Tensor:
    """Return a vector (d,) in blocks as the gradients are: float64 (blocks, block, 1), the last filled with zeros."""
    return torch.nn.functional.pad(x.double(), (0, -len(x) % block)).view(-1, block, 1)
