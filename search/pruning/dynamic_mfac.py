"""Dynamic M-FAC: the inverse of an empirical Fisher matrix that is not cut into blocks (Frantar et al. 2021).

By Woodbury's identity F^-1 = (I - G^T (m damping I + G G^T)^-1 G) / damping, G the latest m gradients (m, d): only an
m x m matrix is factorised. The ring buffer of gradients is the pruner's. The paper keeps G G^T too and renews a row a
gradient, for an optimizer that needs F^-1 at every step; masks are drawn every m steps or so, when all rows are new.
"""

from __future__ import annotations

import torch
from torch import Tensor

from latbench.errors import BadData
from search.pruning.fisher import DAMPING

COLUMNS = 2**16  # weights that are held in float64 at a time


def inverse_diagonal(gradients: Tensor, *, damping: float = DAMPING) -> Tensor:
    """The diagonal (d,) float64 of F^-1, of gradients (m, d). Raises BadData for gradients that are not finite."""
    factor = _factor(gradients, damping)
    return torch.cat(
        [
            (1 - torch.linalg.solve_triangular(factor, part.double(), upper=False).square().sum(dim=0)) / damping
            for part in gradients.split(COLUMNS, dim=1)
        ]
    )


def inverse_times(gradients: Tensor, x: Tensor, *, damping: float = DAMPING) -> Tensor:
    """F^-1 x (d,) float64, for the F^-1 of gradients (m, d) and x (d,)."""
    factor = _factor(gradients, damping)
    parts = list(zip(gradients.split(COLUMNS, dim=1), x.double().split(COLUMNS), strict=True))
    seen = torch.stack([part.double() @ own for part, own in parts]).sum(dim=0)
    share = torch.cholesky_solve(seen[:, None], factor)[:, 0]
    return torch.cat([(own - part.double().T @ share) / damping for part, own in parts])


def _factor(gradients: Tensor, damping: float) -> Tensor:
    """The lower Cholesky factor of m damping I + G G^T."""
    if not bool(torch.isfinite(gradients).all()):
        raise BadData("the gradients hold NaN or infinite values")
    m = len(gradients)
    products = torch.stack([part.double() @ part.double().T for part in gradients.split(COLUMNS, dim=1)]).sum(dim=0)
    # Rounding in G G^T may outweigh a damping that is small beside it; the factor must exist.
    rounding = 8 * torch.finfo(torch.float64).eps * float(products.diagonal().sum())
    products.diagonal().add_(m * max(damping, rounding))
    return torch.linalg.cholesky(products)
