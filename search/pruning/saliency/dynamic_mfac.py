"""Dynamic M-FAC: the inverse of an empirical Fisher matrix that is not cut into blocks (Frantar et al. 2021).

By Woodbury's identity F^-1 = (I - G^T (m damping I + G G^T)^-1 G) / damping, G the latest m gradients (m, d): only an
m x m matrix is factorised. The ring buffer of gradients is the pruner's. The paper keeps G G^T too and renews a row a
gradient, for an optimizer that needs F^-1 at every step; masks are drawn every m steps or so, when all rows are new.

G stays in its own type, float32 as a rule, and is not copied. Products and solves are float64, of as many columns at
a time as take `fisher.CHUNK_BYTES`: that, three m x m matrices and three vectors of d numbers are all the memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from search.pruning.saliency.fisher_blocks import DAMPING, check_finite, columns_at_once, factor


def inverse_diagonal(gradients: Tensor, *, damping: float = DAMPING) -> Tensor:
    """The diagonal (d,) float64 of F^-1, of gradients (m, d). Raises BadData for gradients that are not finite."""
    products = gradients.new_zeros(len(gradients), len(gradients), dtype=torch.float64)
    for _, part in _parts(gradients):
        products += part @ part.T
    lower = factor(products, damping)

    def taken(part: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(lower, part, upper=False).square_().sum(dim=0)

    return torch.cat([(1 - taken(part)) / damping for _, part in _parts(gradients)])


def update(weights: Tensor, dropped: Tensor, gradients: Tensor, *, damping: float = DAMPING) -> Tensor:
    """`fisher.update` with the F of gradients (m, d) that is one block.

    The same sums over columns, some at a time.
    """
    m = len(gradients)
    products, lost = weights.new_zeros(m, m, dtype=torch.float64), weights.new_zeros(m, dtype=torch.float64)
    for at, part in _parts(gradients):
        lost += part @ torch.where(dropped[at], weights[at].double(), 0.0)
        kept = part.masked_fill_(dropped[at], 0.0)
        products += kept @ kept.T
    share = torch.cholesky_solve(lost[:, None], factor(products, damping))[:, 0]
    moved = weights.to(torch.float64, copy=True)
    for at, part in _parts(gradients):
        moved[at] += share @ part
    return moved.masked_fill_(dropped, 0.0)


def _parts(gradients: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(columns, gradients (m, columns) float64 that may be written to), as CHUNK_BYTES allows."""
    m, d = gradients.shape
    columns = columns_at_once(16 * m)
    for start in range(0, d, columns):
        part = gradients[:, start : start + columns].to(torch.float64, copy=True)
        check_finite(part)
        yield slice(start, start + columns), part
