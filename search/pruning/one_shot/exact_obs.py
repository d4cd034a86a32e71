"""ExactOBS: weights are dropped one after the other, each time the one whose loss the others can best compensate.

Removing the unit P of a row w costs w_P [H^-1_PP]^-1 w_P^T, after the other weights have moved to compensate for it:
w -= w_P [H^-1_PP]^-1 H^-1_P, and H^-1 -= H^-1_,P [H^-1_PP]^-1 H^-1_P, for the remaining ones (Frantar & Alistarh
2022, "Optimal Brain Compression", section 4). The rows of a vector or block lose the same columns: they share H^-1,
and their losses add up. Every band of rows is eliminated completely once, which gives the losses of all sparsities.
The units of the whole matrix are then dropped in the order of these losses, each at least that of the units before it
in its band. An N:M band stops when its groups are down to N.

The remaining weights are the least squares of their mask, whatever the order in which the others were dropped:
`AdaPrune` solves it. So all sparsities of a layer take one elimination.

Only a unit's own row of H^-1 is needed when it is dropped. The updates of other rows wait in `pending`, and 32 are
applied at a time as one product. Elimination takes about k^3 multiplications and 14 k^2 bytes a band (k = 4096: 235
MB, beside five (k, k) and three (m, k) matrices in float64). A refit takes at most k^3/3 more.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from search.pruning.masks.prunable_units import PatternUnits, find_units
from search.pruning.one_shot.adaprune import AdaPrune
from search.pruning.one_shot.one_shot_pruner import DAMPING, PrunedWeight
from sparse_kernels.patterns import Pattern, ShflBW
from sparse_kernels.top_units import Mask

MEMORY_BYTES = 2**28
PENDING = 32  # updates of H^-1 that are applied together
COMPACT = 0.75  # dropped columns are removed from the matrices below this share of remaining ones
TIE = 1e-12  # units with equal losses keep the order in which they were dropped; far below any real difference


class ExactOBS(AdaPrune):
    """A dense layer whose weights are dropped one after the other.

    Parameters
    ----------
    weight : Tensor of shape (m, k)
        Dense weight, float32.
    hessian : Tensor of shape (k, k)
        H, the sum of x x^T over the layer's inputs x, float64.
    damping : float
        Ridge, as a share of the mean diagonal of H.
    memory_bytes : int
        Memory of an elimination, which sets how many bands of rows are eliminated together; at least one is.
    """

    def __init__(
        self, weight: Tensor, hessian: Tensor, *, damping: float = DAMPING, memory_bytes: int = MEMORY_BYTES
    ) -> None:
        super().__init__(weight, hessian, damping=damping, iterations=math.inf)
        self.memory_bytes = memory_bytes
        self._traces: dict[PatternUnits, NDArray[np.float64]] = {}

    def prune(self, pattern: Pattern, sparsity: float) -> PrunedWeight:
        """Drop units until the pattern is reached, and refit the remaining weights."""
        return self.fit(torch.from_numpy(self.mask(pattern, sparsity)))

    def mask(self, pattern: Pattern, sparsity: float) -> Mask:
        """Return the mask (m, k) of the remaining weights."""
        units = find_units(pattern, sparsity)
        m, k = self.weight.shape
        order = np.arange(m)
        if isinstance(pattern, ShflBW):
            saliency = self.weight.double().square() / self.inverse().diagonal()
            order = pattern.order_rows(saliency.numpy(), sparsity)
            kept = units.select_best(self._trace_losses(units, order), m, k, sparsity)
        elif units.of:
            kept = np.isinf(self._trace_losses(units, order))
        else:
            if units not in self._traces:
                self._traces[units] = self._trace_losses(units, order)
            kept = units.select_best(self._traces[units], m, k, sparsity)
        mask = np.empty((m, k), bool)
        mask[order] = units.expand(kept, m, k)
        return mask

    def _trace_losses(self, units: PatternUnits, order: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return at which loss each unit (bands, units) is dropped, for rows in `order`; infinite if N:M keeps it."""
        m, k = self.weight.shape
        inverse = self.inverse()
        # Zero weights on inputs of their own fill the edges: they cost nothing to drop.
        bands, columns = -(-m // units.height), -(-k // units.width) * units.width
        whole = torch.zeros(bands * units.height, columns, dtype=torch.float64)
        whole[:m, :k] = self.weight[order]
        if columns > k:
            inverse = torch.block_diag(inverse, inverse.diagonal().mean() * torch.eye(columns - k).double())
        at_once = max(1, self.memory_bytes // (14 * columns**2))
        parts = whole.view(bands, units.height, columns).chunk(-(-bands // at_once))
        return torch.cat([eliminate(part, inverse, units) for part in parts]).numpy()


def eliminate(weight: Tensor, inverse: Tensor, units: PatternUnits) -> Tensor:
    """Return at which loss every unit is dropped; infinite if an N:M pattern keeps it.

    Parameters
    ----------
    weight : Tensor of shape (bands, height, columns)
        Dense weights, float64; columns are a multiple of `units.width`.
    inverse : Tensor of shape (columns, columns)
        H^-1, float64.
    units : PatternUnits
        Units of the pattern.

    Returns
    -------
    Tensor of shape (bands, units)
        Losses, float64, which rise in the order of elimination in a band.
    """
    bands, _, columns = weight.shape
    width, count = units.width, columns // units.width
    group = torch.arange(count) // (units.of or count)
    per_group = _count_droppable(units, group)
    droppable, steps = per_group.repeat(bands, 1), int(per_group.sum())
    dropped_at = torch.full((bands, count), math.inf, dtype=torch.float64)
    highest_loss = torch.zeros(bands, dtype=torch.float64)

    band = torch.arange(bands)
    inverse, weight = inverse.repeat(bands, 1, 1), weight.clone()
    blocks = _extract_diagonal_blocks(inverse, width)
    unit = torch.arange(count).repeat(bands, 1)  # the unit at each position
    present = torch.ones(bands, count, dtype=torch.bool)
    pending = torch.empty(bands, max(PENDING, width), columns, dtype=torch.float64)
    waiting = 0
    for step in range(steps):
        can_drop = present & (droppable.gather(1, group[unit]) > 0)
        loss, position = _compute_losses(weight, blocks).masked_fill(~can_drop, math.inf).min(dim=1)
        highest_loss = torch.maximum(highest_loss, loss)
        dropped_unit = unit[band, position]
        dropped_at[band, dropped_unit] = highest_loss * (1 + TIE * step)
        droppable[band, group[dropped_unit]] -= 1
        present[band, position] = False
        at = position[:, None] * width + torch.arange(width)
        rows = _compensate(weight, inverse, pending[:, :waiting], at)
        blocks -= _compute_outer_blocks(rows, width)
        blocks[band, position] = torch.eye(width, dtype=torch.float64)  # any invertible block for a dropped unit
        pending[:, waiting : waiting + width] = rows
        waiting += width

        if waiting + width <= pending.shape[1] or step == steps - 1:
            continue
        left = count - step - 1
        if left < COMPACT * present.shape[1]:
            positions = present.nonzero()[:, 1].view(bands, left)
            at = (positions[:, :, None] * width + torch.arange(width)).flatten(1)
            inverse = inverse[band[:, None, None], at[:, :, None], at[:, None, :]]
            pending, weight = _gather_columns(pending, at), _gather_columns(weight, at)
            blocks, unit = blocks[band[:, None], positions], unit.gather(1, positions)
            present = torch.ones_like(positions, dtype=torch.bool)
        inverse.baddbmm_(pending[:, :waiting].mT, pending[:, :waiting], alpha=-1)
        waiting = 0
    return dropped_at


def _compensate(weight: Tensor, inverse: Tensor, pending: Tensor, at: Tensor) -> Tensor:
    """Drop the columns `at` (bands, width) of weights, in place; the other columns compensate.

    Returns the rows of H^-1 at these columns, divided by their Cholesky factor: (bands, width, columns). `pending`
    are the earlier ones of them that `inverse` does not contain yet.
    """
    band = torch.arange(len(at))
    rows = inverse[band[:, None], at] - _gather_columns(pending, at).mT @ pending
    factor = torch.linalg.cholesky(_gather_columns(rows, at))
    solved: Tensor = torch.linalg.solve_triangular(factor, rows, upper=False)
    weight -= torch.linalg.solve_triangular(factor, _gather_columns(weight, at).mT, upper=False).mT @ solved
    return solved


def _count_droppable(units: PatternUnits, group: Tensor) -> Tensor:
    """Return how many units each group of a band may drop, (groups,), for each unit's group (units,)."""
    lengths = [int(length) for length in group.bincount()]
    return torch.tensor([length - units.keeps_of(length) if units.of else length for length in lengths])


def _gather_columns(matrices: Tensor, at: Tensor) -> Tensor:
    """Return of each matrix (bands, rows, columns) its own columns `at` (bands, selected)."""
    return matrices.gather(2, at[:, None, :].expand(-1, matrices.shape[1], -1))


def _compute_losses(weight: Tensor, blocks: Tensor) -> Tensor:
    """Return w_P [H^-1_PP]^-1 w_P^T of every unit, summed over a band's rows: (bands, units)."""
    bands, height, _ = weight.shape
    _, count, width, _ = blocks.shape
    if width == 1:
        return weight.square().sum(dim=1) / blocks[:, :, 0, 0]
    factor = torch.linalg.cholesky(blocks)
    parts = weight.view(bands, height, count, width).permute(0, 2, 3, 1)
    solved: Tensor = torch.linalg.solve_triangular(factor, parts, upper=False)
    return solved.square().sum(dim=(2, 3))


def _extract_diagonal_blocks(matrices: Tensor, width: int) -> Tensor:
    """Return the diagonal blocks (bands, units, width, width) of matrices (bands, columns, columns)."""
    bands, columns, _ = matrices.shape
    grid = matrices.view(bands, columns // width, width, columns // width, width)
    return grid.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).contiguous()


def _compute_outer_blocks(rows: Tensor, width: int) -> Tensor:
    """Return the diagonal blocks of rows^T rows, for rows (bands, width, columns)."""
    bands, _, columns = rows.shape
    if width == 1:
        return rows.square().view(bands, columns, 1, 1)
    parts = rows.view(bands, width, columns // width, width).permute(0, 2, 1, 3)
    return parts.mT @ parts
