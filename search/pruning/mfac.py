"""M-FAC: the inverse of an empirical Fisher matrix times a vector, from the gradients alone (Frantar et al. 2021).

Static: for each block of weights the recursion v_i = H_{i-1}^-1 g_i, with
H^-1 x = x/damping - sum of v_i (v_i^T x) / (m + g_i^T v_i), in O(m^2 d). Dynamic: a ring buffer of the latest m
gradients, no blocks; by Woodbury's identity only the m x m matrix G G^T is kept beside them, of which one row changes
when a gradient comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from latbench.errors import BadData
from search.pruning.fisher import BLOCK, DAMPING, blocks_of


def inverse_diagonal(gradients: Tensor, *, damping: float = DAMPING, block: int = BLOCK) -> Tensor:
    """The diagonal (d,) float64 of the block-wise F^-1 of gradients (m, d). Raises BadData as `blocks_of` does."""
    parts = [1 / damping - (v.square() / q).sum(dim=1) for _, v, q in _static(gradients, damping, block)]
    return torch.cat([part.flatten() for part in parts])[: gradients.shape[1]]


def inverse_times(gradients: Tensor, x: Tensor, *, damping: float = DAMPING, block: int = BLOCK) -> Tensor:
    """F^-1 x (d,) float64, for the block-wise F^-1 of gradients (m, d) and x (d,)."""
    parts = []
    for at, v, q in _static(gradients, damping, block):
        part = x[at].double()
        padded = torch.nn.functional.pad(part, (0, -len(part) % block)).view(-1, block, 1)
        parts.append((padded / damping - v.mT @ (v @ padded / q)).flatten()[: len(part)])
    return torch.cat(parts)


def _static(gradients: Tensor, damping: float, block: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(weights, v (blocks, m, block), m + g^T v (blocks, m, 1)), some blocks at a time."""
    m = len(gradients)
    for at, g in blocks_of(gradients, block, 16 * m):
        v = torch.empty_like(g)
        q = torch.empty(len(g), m, 1, dtype=g.dtype)
        for i in range(m):
            latest, before = g[:, i : i + 1], v[:, :i]
            v[:, i : i + 1] = latest / damping - (latest @ before.mT / q[:, :i].mT) @ before
            q[:, i] = m + (latest * v[:, i : i + 1]).sum(dim=2)
        yield at, v, q


class DynamicMFAC:
    """F^-1 of the latest `m` gradients of `d` weights, not cut into blocks; as many as have come until then."""

    def __init__(self, m: int, d: int, *, damping: float = DAMPING, dtype: torch.dtype = torch.float32) -> None:
        self.damping = damping
        self.gradients = torch.zeros(m, d, dtype=dtype)
        self.products = torch.zeros(m, m, dtype=torch.float64)  # G G^T
        self.came = 0

    def add(self, gradient: Tensor) -> None:
        """Take a gradient (d,) in, in place of the oldest once there are m. Raises BadData if it is not finite."""
        self.replace(self.came % len(self.gradients), gradient)
        self.came += 1

    def replace(self, i: int, gradient: Tensor) -> None:
        """Put a gradient (d,) in row `i` of the buffer."""
        if not bool(torch.isfinite(gradient).all()):
            raise BadData("the gradient holds NaN or infinite values")
        self.gradients[i] = gradient
        self.products[i] = (self.gradients @ self.gradients[i]).double()
        self.products[:, i] = self.products[i]

    def diagonal(self) -> Tensor:
        """The diagonal (d,) float64 of F^-1."""
        held = self.gradients[: self._held].double()
        solved = torch.linalg.solve_triangular(self._factor(), held, upper=False)
        return (1 - solved.square().sum(dim=0) / self.damping) / self.damping

    def times(self, x: Tensor) -> Tensor:
        """F^-1 x, (d,) float64."""
        held, x = self.gradients[: self._held].double(), x.double()
        share = torch.cholesky_solve((held @ x)[:, None], self._factor())[:, 0]
        return (x - held.T @ share / self.damping) / self.damping

    def state_dict(self) -> dict[str, Any]:
        """What has come so far, for a checkpoint."""
        return {"gradients": self.gradients, "products": self.products, "came": self.came}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint of the same m and d."""
        self.gradients.copy_(state["gradients"])
        self.products.copy_(state["products"])
        self.came = int(state["came"])

    @property
    def _held(self) -> int:
        return min(self.came, len(self.gradients))

    def _factor(self) -> Tensor:
        """The lower Cholesky factor of n I + G G^T / damping over the n gradients that are there."""
        n = self._held
        return torch.linalg.cholesky(n * torch.eye(n, dtype=torch.float64) + self.products[:n, :n] / self.damping)
