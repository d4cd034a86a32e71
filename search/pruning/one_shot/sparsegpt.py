"""SparseGPT: one pass over the columns, with one H^-1 for all rows (Frantar & Alistarh 2023).

Columns are pruned from left to right. The columns to the right compensate for a dropped weight. With the upper
Cholesky factor U of H^-1, the inverse of H over the remaining columns is U_F^T U_F: no row needs its own inverse.

Masks are drawn during the pass. Each lazy block of about 128 columns draws by w^2 / U_jj^2, the loss of a weight at
that point. N:M patterns draw at the start of every group. A unit P of several columns has the score |U_PP^-T w_P|^2;
units of several rows add up theirs.

Every lazy block keeps its share of the units, so the layer reaches its sparsity exactly. An option takes m k^2
multiplications and memory for three (k, k) and two (m, k) matrices in float64.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from search.pruning.masks.prunable_units import PatternUnits, find_units
from search.pruning.one_shot.one_shot_pruner import OneShotPruner, PrunedWeight
from sparse_kernels.patterns import Pattern, ShflBW
from sparse_kernels.top_units import Mask, select_top

LAZY_COLUMNS = 128


class SparseGPT(OneShotPruner):
    """A dense layer, whose options share the factor of H^-1. Weights are not refitted afterwards."""

    def prune(self, pattern: Pattern, sparsity: float) -> PrunedWeight:
        """Prune column by column, from left to right."""
        units = find_units(pattern, sparsity)
        order = np.arange(len(self.weight))
        if isinstance(pattern, ShflBW):
            scores = self.weight.double().square() / self.factor.diagonal().square()
            order = pattern.order_rows(scores.numpy(), sparsity)
        pruned, kept = _prune_columns(self.weight[order].double(), self.factor, units, sparsity)
        weight, mask = torch.empty_like(pruned), torch.empty_like(kept)
        weight[order], mask[order] = pruned, kept
        return self.apply_mask(weight, mask)


def _prune_columns(weight: Tensor, factor: Tensor, units: PatternUnits, sparsity: float) -> tuple[Tensor, Tensor]:
    """Prune `weight` (m, k) float64 in place, from left to right; return it and its mask."""
    m, k = weight.shape
    mask = torch.ones(m, k, dtype=torch.bool)
    quotas = None if units.of else _BlockQuotas(units, _score_units(weight, factor, units), sparsity, m, k)
    step = units.of or units.width
    lazy = max(1, LAZY_COLUMNS // step) * step
    for start in range(0, k, lazy):
        end = min(start + lazy, k)
        # Views: the loop below writes to `weight`.
        w, u, kept = weight[:, start:end], factor[start:end, start:end], mask[:, start:end]
        if quotas is not None:
            drawn = quotas.draw(_score_units(w, u, units), start // units.width)
            kept.copy_(torch.from_numpy(units.expand(drawn, m, end - start)))
        errors = torch.zeros_like(w)
        for j in range(end - start):
            if units.of and j % units.of == 0:
                group = slice(j, j + units.of)
                drawn = _select_top_in_bands(_score_units(w[:, group], u[group, group], units), units)
                kept[:, group] = torch.from_numpy(units.expand(drawn, m, drawn.shape[1]))
            errors[:, j] = torch.where(kept[:, j], 0.0, w[:, j]) / u[j, j]
            w[:, j + 1 :].addr_(errors[:, j], u[j, j + 1 :], alpha=-1)
        w.masked_fill_(~kept, 0.0)
        weight[:, end:].addmm_(errors, factor[start:end, end:], alpha=-1)
    return weight, mask


class _BlockQuotas:
    """How many units of each size every lazy block keeps: its share of all kept units of the layer."""

    def __init__(self, units: PatternUnits, totals: NDArray[np.float64], sparsity: float, m: int, k: int) -> None:
        best = units.select_best(totals, m, k, sparsity)
        self.sizes = units.sizes(m, k)
        self.kept = {size: int(best[self.sizes == size].sum()) for size in np.unique(self.sizes)}
        self.drawn = dict.fromkeys(self.kept, 0)

    def draw(self, totals: NDArray[np.float64], first: int) -> Mask:
        """Return the units to keep of a lazy block that starts with unit `first`, by totals (bands, its units)."""
        end = first + totals.shape[1]
        kept = np.zeros(totals.shape, bool)
        for size, in_layer in self.kept.items():
            so_far = np.count_nonzero(self.sizes[:, :end] == size) / np.count_nonzero(self.sizes == size)
            here = np.nonzero(self.sizes[:, first:end] == size)
            count = math.floor(in_layer * so_far + 0.5) - self.drawn[size]
            kept[here] = select_top(totals[here], count)
            self.drawn[size] += count
        return kept


def _score_units(weight: Tensor, factor: Tensor, units: PatternUnits) -> NDArray[np.float64]:
    """Return the loss of each unit of `weight` (m, k) while all its columns remain, (bands, units)."""
    solved = torch.empty_like(weight)
    if units.width == 1:
        solved = weight / factor.diagonal()
    else:
        for start in range(0, weight.shape[1], units.width):
            at = slice(start, start + units.width)
            solved[:, at] = torch.linalg.solve_triangular(factor[at, at].mT, weight[:, at].mT, upper=False).mT
    return units.sum_scores(solved.square().numpy())


def _select_top_in_bands(totals: NDArray[np.float64], units: PatternUnits) -> Mask:
    """Return the units (bands, units of a group) that an N:M pattern keeps of one group."""
    kept = np.zeros(totals.shape, bool)
    best = np.argsort(-totals, axis=1, kind="stable")[:, : units.keeps_of(totals.shape[1])]
    np.put_along_axis(kept, best, True, axis=1)
    return kept
