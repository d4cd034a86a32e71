"""ExactOBS: weights go one after the other, each time the one whose loss the others can make up for best.

Removing the unit P of a row w costs w_P [H^-1_PP]^-1 w_P^T, once the other weights have moved to make up for it:
w -= w_P [H^-1_PP]^-1 H^-1_P, and H^-1 -= H^-1_,P [H^-1_PP]^-1 H^-1_P, for what is left (Frantar & Alistarh 2022,
"Optimal Brain Compression", section 4). The rows of a vector or block lose the same columns: they share H^-1, and
their losses add up. Every band of rows is eliminated to its end once, which gives the losses of all sparsities; the
units of the whole matrix then go in the order of a heap over the bands, that is of their running maxima. An N:M band
stops when its groups are down to N.

The weights that remain are the least squares of their mask, whatever the order in which the others went: `AdaPrune`
solves it. So a layer's database of all sparsities takes one elimination.

A unit's row of H^-1 is needed when it goes, everything else is not: downdates wait in `pending` and are applied 32 at
a time, as one product. Elimination takes about k^3 multiplications and 14 k^2 bytes a band (k = 4096: 235 MB, beside
five (k, k) and three (m, k) matrices in float64), a refit at most k^3/3 more.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from search.pruning.masks.prunable_units import Units, units_of
from search.pruning.one_shot.adaprune import AdaPrune
from search.pruning.one_shot.one_shot_pruner import DAMPING, Pruned
from sparse_kernels.patterns import Pattern, ShflBW
from sparse_kernels.shuffle import group_rows
from sparse_kernels.top_units import Mask

MEMORY_BYTES = 2**28
PENDING = 32
COMPACT = 0.75  # of the columns are left: the others are thrown out
# Units that tie keep the order in which they went; far below any difference that counts.
TIE = 1e-12


class ExactOBS(AdaPrune):
    """A dense layer whose weights can go one after the other.

    As many bands of rows are eliminated at once as `memory_bytes` allow, at least one.
    """

    def __init__(
        self, weight: Tensor, hessian: Tensor, *, damping: float = DAMPING, memory_bytes: int = MEMORY_BYTES
    ) -> None:
        super().__init__(weight, hessian, damping=damping, iterations=math.inf)
        self.memory_bytes = memory_bytes
        self._traces: dict[Units, NDArray[np.float64]] = {}

    def prune(self, pattern: Pattern, sparsity: float) -> Pruned:
        """Eliminate units until the pattern is reached, refit what remains."""
        return self.fit(torch.from_numpy(self.mask(pattern, sparsity)))

    def mask(self, pattern: Pattern, sparsity: float) -> Mask:
        """The mask (m, k) of what remains."""
        units = units_of(pattern, sparsity)
        m, k = self.weight.shape
        order = np.arange(m)
        if isinstance(pattern, ShflBW):
            saliency = self.weight.double().square() / self.inverse().diagonal()
            order = group_rows(saliency.numpy(), pattern.v, sparsity, np.random.default_rng(0))
            kept = units.best(self._trace(units, order), m, k, sparsity)
        elif units.of:
            kept = np.isinf(self._trace(units, order))
        else:
            if units not in self._traces:
                self._traces[units] = self._trace(units, order)
            kept = units.best(self._traces[units], m, k, sparsity)
        mask = np.empty((m, k), bool)
        mask[order] = units.spread(kept, m, k)
        return mask

    def _trace(self, units: Units, order: NDArray[np.int64]) -> NDArray[np.float64]:
        """At what loss each unit (bands, units) goes, rows taken in `order`; infinite where N:M keeps it."""
        m, k = self.weight.shape
        inverse = self.inverse()
        # What is missing at the edges is filled with weights that are zero, on inputs of their own: free to drop.
        bands, columns = -(-m // units.height), -(-k // units.width) * units.width
        whole = torch.zeros(bands * units.height, columns, dtype=torch.float64)
        whole[:m, :k] = self.weight[order]
        if columns > k:
            inverse = torch.block_diag(inverse, inverse.diagonal().mean() * torch.eye(columns - k).double())
        at_once = max(1, self.memory_bytes // (14 * columns**2))
        parts = whole.view(bands, units.height, columns).chunk(-(-bands // at_once))
        return torch.cat([eliminate(part, inverse, units) for part in parts]).numpy()


def eliminate(weight: Tensor, inverse: Tensor, units: Units) -> Tensor:
    """At what loss every unit goes, (bands, units) float64; infinite for what an N:M pattern keeps.

    `weight` (bands, height, columns) and `inverse` = H^-1 (columns, columns) float64, columns a multiple of
    units.width. Losses are running maxima along a band, so that no unit goes before those that went before it.
    """
    bands, _, columns = weight.shape
    width, count = units.width, columns // units.width
    group = torch.arange(count) // (units.of or count)
    lengths = group.bincount()
    may_go = torch.tensor([int(n) - units.keeps_of(int(n)) if units.of else int(n) for n in lengths])
    may_go, steps = may_go.repeat(bands, 1), int(may_go.sum())
    goes_at = torch.full((bands, count), math.inf, dtype=torch.float64)
    highest = torch.zeros(bands, dtype=torch.float64)

    band = torch.arange(bands)
    inverse, weight = inverse.repeat(bands, 1, 1), weight.clone()
    blocks = _diagonal_blocks(inverse, width)
    unit = torch.arange(count).repeat(bands, 1)  # which one is at each place
    there = torch.ones(bands, count, dtype=torch.bool)
    pending = torch.empty(bands, max(PENDING, width), columns, dtype=torch.float64)
    waiting = 0
    for step in range(steps):
        can_go = there & (may_go.gather(1, group[unit]) > 0)
        loss, place = _losses(weight, blocks).masked_fill(~can_go, math.inf).min(dim=1)
        highest = torch.maximum(highest, loss)
        gone = unit[band, place]
        goes_at[band, gone] = highest * (1 + TIE * step)
        may_go[band, group[gone]] -= 1
        there[band, place] = False

        at = place[:, None] * width + torch.arange(width)
        waits = pending[:, :waiting]
        rows = inverse[band[:, None], at] - _columns(waits, at).mT @ waits
        factor = torch.linalg.cholesky(_columns(rows, at))
        rows = torch.linalg.solve_triangular(factor, rows, upper=False)
        weight -= torch.linalg.solve_triangular(factor, _columns(weight, at).mT, upper=False).mT @ rows
        blocks -= _outer_blocks(rows, width)
        blocks[band, place] = torch.eye(width, dtype=torch.float64)  # of what is gone: anything that is invertible
        pending[:, waiting : waiting + width] = rows
        waiting += width

        if waiting + width <= pending.shape[1] or step == steps - 1:
            continue
        left = count - step - 1
        if left < COMPACT * there.shape[1]:
            places = there.nonzero()[:, 1].view(bands, left)
            at = (places[:, :, None] * width + torch.arange(width)).flatten(1)
            inverse = inverse[band[:, None, None], at[:, :, None], at[:, None, :]]
            pending, weight = _columns(pending, at), _columns(weight, at)
            blocks, unit = blocks[band[:, None], places], unit.gather(1, places)
            there = torch.ones_like(places, dtype=torch.bool)
        inverse.baddbmm_(pending[:, :waiting].mT, pending[:, :waiting], alpha=-1)
        waiting = 0
    return goes_at


def _columns(matrices: Tensor, at: Tensor) -> Tensor:
    """Of each matrix (bands, rows, columns) its own columns `at` (bands, chosen)."""
    return matrices.gather(2, at[:, None, :].expand(-1, matrices.shape[1], -1))


def _losses(weight: Tensor, blocks: Tensor) -> Tensor:
    """w_P [H^-1_PP]^-1 w_P^T of every unit, summed over a band's rows: (bands, units)."""
    bands, height, _ = weight.shape
    _, count, width, _ = blocks.shape
    if width == 1:
        return weight.square().sum(dim=1) / blocks[:, :, 0, 0]
    factor = torch.linalg.cholesky(blocks)
    parts = weight.view(bands, height, count, width).permute(0, 2, 3, 1)
    return torch.linalg.solve_triangular(factor, parts, upper=False).square().sum(dim=(2, 3))


def _diagonal_blocks(matrices: Tensor, width: int) -> Tensor:
    """(bands, units, width, width) of matrices (bands, columns, columns)."""
    bands, columns, _ = matrices.shape
    grid = matrices.view(bands, columns // width, width, columns // width, width)
    return grid.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).contiguous()


def _outer_blocks(rows: Tensor, width: int) -> Tensor:
    """The diagonal blocks of rows^T rows, rows (bands, width, columns)."""
    bands, _, columns = rows.shape
    if width == 1:
        return rows.square().view(bands, columns, 1, 1)
    parts = rows.view(bands, width, columns // width, width).permute(0, 2, 1, 3)
    return parts.mT @ parts
