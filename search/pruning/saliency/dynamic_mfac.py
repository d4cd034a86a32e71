"""Dynamic M-FAC: the inverse of an empirical Fisher matrix that is not cut into blocks (Frantar et al. 2021).

By Woodbury's identity F^-1 = (I - G^T (m damping I + G G^T)^-1 G) / damping, with the latest gradients G (m, d). So
only an m x m matrix is factorized. The pruner keeps these gradients. The paper also keeps G G^T and updates one
row a gradient, because its optimizer needs F^-1 at every step. Here masks are drawn about every m steps, after all
rows have changed.

G keeps its own dtype, usually float32, and is not copied. Products and solves are float64, for as many columns at a
time as fit `fisher_blocks.CHUNK_BYTES`. Three m x m matrices and three vectors of d numbers are all further memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from search.pruning.saliency.fisher_blocks import DAMPING, check_finite, count_columns_at_once, factorize


def compute_inverse_diagonal(gradients: Tensor, *, damping: float = DAMPING) -> Tensor:
    """Return the diagonal (d,) float64 of F^-1, for gradients (m, d). Raises BadData if a gradient is not finite."""
    products = gradients.new_zeros(len(gradients), len(gradients), dtype=torch.float64)
    for _, part in _split_columns(gradients):
        products += part @ part.T
    lower = factorize(products, damping)

    def reduce(part: Tensor) -> Tensor:
        solved: Tensor = torch.linalg.solve_triangular(lower, part, upper=False)
        return solved.square_().sum(dim=0)

    return torch.cat([(1 - reduce(part)) / damping for _, part in _split_columns(gradients)])


def update_weights(weights: Tensor, dropped: Tensor, gradients: Tensor, *, damping: float = DAMPING) -> Tensor:
    """Return `weights` (d,) float64 after those of `dropped` (d,) bool are removed and the others compensate.

    It is `fisher_blocks.update_weights` with one block, for gradients (m, d). The sums go over some columns at a
    time.
    """
    m = len(gradients)
    products, lost = weights.new_zeros(m, m, dtype=torch.float64), weights.new_zeros(m, dtype=torch.float64)
    for at, part in _split_columns(gradients):
        lost += part @ torch.where(dropped[at], weights[at].double(), 0.0)
        kept = part.masked_fill_(dropped[at], 0.0)
        products += kept @ kept.T
    share = torch.cholesky_solve(lost[:, None], factorize(products, damping))[:, 0]
    moved = weights.to(torch.float64, copy=True)
    for at, part in _split_columns(gradients):
        moved[at] += share @ part
    return moved.masked_fill_(dropped, 0.0)


def _split_columns(gradients: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield the columns, as a slice, and their gradients (m, columns) in float64, which may be changed."""
    m, d = gradients.shape
    columns = count_columns_at_once(16 * m)
    for start in range(0, d, columns):
        part = gradients[:, start : start + columns].to(torch.float64, copy=True)
        check_finite(part)
        yield slice(start, start + columns), part
