"""SparseGPT: one pass over the columns, one H^-1 for all rows.

Columns are settled from the left to the right; what a dropped weight leaves undone, the columns to its right make up
for (Frantar & Alistarh 2023). With the upper Cholesky factor U of H^-1, the inverse of H over the columns that are
not settled yet is U_F^T U_F: no row needs an inverse of its own. Masks are drawn where the pass has come to: for each
lazy block of about 128 columns by w^2 / U_jj^2, which is what a weight's loss costs then; for N:M at the start of
every group. A unit P of several columns is scored by |U_PP^-T w_P|^2, units of several rows add up.

Every lazy block keeps its share of the units, so that the layer ends at its sparsity exactly. Takes m k^2
multiplications an option; memory for three (k, k) and two (m, k) matrices in float64.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from search.pruning.masks.prunable_units import Units, units_of
from search.pruning.one_shot.one_shot_pruner import DAMPING, OneShot, Pruned
from sparse_kernels.patterns import Pattern, ShflBW
from sparse_kernels.shuffle import group_rows
from sparse_kernels.top_units import Mask, top

LAZY_COLUMNS = 128


class SparseGPT(OneShot):
    """A dense layer, and the factor of H^-1 that all its options share. Weights are not refitted afterwards."""

    def __init__(self, weight: Tensor, hessian: Tensor, *, damping: float = DAMPING) -> None:
        super().__init__(weight, hessian, damping)
        self.factor = torch.linalg.cholesky(self.inverse(), upper=True)

    def prune(self, pattern: Pattern, sparsity: float) -> Pruned:
        """Prune column by column."""
        units = units_of(pattern, sparsity)
        order = np.arange(len(self.weight))
        if isinstance(pattern, ShflBW):
            scores = self.weight.double().square() / self.factor.diagonal().square()
            order = group_rows(scores.numpy(), pattern.v, sparsity, np.random.default_rng(0))
        pruned, kept = _pass(self.weight[order].double(), self.factor, units, sparsity)
        weight, mask = torch.empty_like(pruned), torch.empty_like(kept)
        weight[order], mask[order] = pruned, kept
        return self.masked(weight, mask)


def _pass(weight: Tensor, factor: Tensor, units: Units, sparsity: float) -> tuple[Tensor, Tensor]:
    """Prune `weight` (m, k) float64 in place, from the left to the right; returns it and its mask."""
    m, k = weight.shape
    mask = torch.ones(m, k, dtype=torch.bool)
    shares = None if units.of else _Shares(units, _totals(weight, factor, units), sparsity, m, k)
    together = units.of or units.width
    lazy = max(1, LAZY_COLUMNS // together) * together
    for start in range(0, k, lazy):
        end = min(start + lazy, k)
        # Views: columns that are settled in the loop below are settled in `weight`.
        w, u, kept = weight[:, start:end], factor[start:end, start:end], mask[:, start:end]
        if shares is not None:
            drawn = shares.draw(_totals(w, u, units), start // units.width)
            kept.copy_(torch.from_numpy(units.spread(drawn, m, end - start)))
        undone = torch.zeros_like(w)
        for j in range(end - start):
            if units.of and j % units.of == 0:
                group = slice(j, j + units.of)
                drawn = _top_in_bands(_totals(w[:, group], u[group, group], units), units)
                kept[:, group] = torch.from_numpy(units.spread(drawn, m, drawn.shape[1]))
            undone[:, j] = torch.where(kept[:, j], 0.0, w[:, j]) / u[j, j]
            w[:, j + 1 :].addr_(undone[:, j], u[j, j + 1 :], alpha=-1)
        w.masked_fill_(~kept, 0.0)
        weight[:, end:].addmm_(undone, factor[start:end, end:], alpha=-1)
    return weight, mask


class _Shares:
    """How many units every lazy block keeps: its share of what the whole layer keeps, for each size of unit."""

    def __init__(self, units: Units, totals: NDArray[np.float64], sparsity: float, m: int, k: int) -> None:
        best = units.best(totals, m, k, sparsity)
        self.sizes = units.sizes(m, k)
        self.wanted = {size: int(best[self.sizes == size].sum()) for size in np.unique(self.sizes)}
        self.drawn = dict.fromkeys(self.wanted, 0)

    def draw(self, totals: NDArray[np.float64], first: int) -> Mask:
        """The units to keep of a lazy block, totals (bands, its units), whose first unit is number `first`."""
        end = first + totals.shape[1]
        kept = np.zeros(totals.shape, bool)
        for size, wanted in self.wanted.items():
            so_far = np.count_nonzero(self.sizes[:, :end] == size) / np.count_nonzero(self.sizes == size)
            here = np.nonzero(self.sizes[:, first:end] == size)
            count = math.floor(wanted * so_far + 0.5) - self.drawn[size]
            kept[here] = top(totals[here], count)
            self.drawn[size] += count
        return kept


def _totals(weight: Tensor, factor: Tensor, units: Units) -> NDArray[np.float64]:
    """What each unit of `weight` (m, k) costs where all its columns are still open: (bands, units)."""
    solved = torch.empty_like(weight)
    if units.width == 1:
        solved = weight / factor.diagonal()
    else:
        for start in range(0, weight.shape[1], units.width):
            at = slice(start, start + units.width)
            solved[:, at] = torch.linalg.solve_triangular(factor[at, at].mT, weight[:, at].mT, upper=False).mT
    return units.totals(solved.square().numpy())


def _top_in_bands(totals: NDArray[np.float64], units: Units) -> Mask:
    """The units (bands, a group's units) that an N:M pattern keeps of one group."""
    kept = np.zeros(totals.shape, bool)
    best = np.argsort(-totals, axis=1, kind="stable")[:, : units.keeps_of(totals.shape[1])]
    np.put_along_axis(kept, best, True, axis=1)
    return kept
