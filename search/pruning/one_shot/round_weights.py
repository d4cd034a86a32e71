"""Round a pruned weight to steps of eight bits, so that later columns make up for the rounding of earlier ones.

Columns are rounded from left to right. What a column loses is compensated by the columns right of it, as in GPTQ
(Frantar et al. 2023, section 3) and, for pruning and rounding in one pass, Optimal Brain Compression (Frantar and
Alistarh 2022, section 5): with U the upper Cholesky factor of H^-1, an error e of column j changes the columns behind
it by -e / U_jj * U_j. Dropped weights are rounded to zero likewise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from search.pruning.one_shot.one_shot_pruner import OneShotPruner, PrunedWeight, compute_output_energy
from search.pruning.quantization.input_ranges import InputReading
from sparse_kernels.formats.int8 import LARGEST

LAZY_COLUMNS = 128
"""Columns whose errors reach the columns behind them together."""

SHRINKS = tuple(1 - 0.025 * step for step in range(17))
"""Shares of a row's largest weight that 127 steps may reach."""


@dataclass(frozen=True)
class RoundedWeight:
    """One option of a layer in eight bits.

    Attributes
    ----------
    weight : Tensor of shape (m, k)
        Whole numbers of steps, float32.
    error : float
        |dy|^2 / |y|^2 of the layer's outputs on calibration data, with what inputs lose.
    scales : float32 array (m,)
        The step of each row.
    """

    weight: Tensor
    error: float
    scales: NDArray[np.float32]


def choose_scales(weight: Tensor, diagonal: Tensor) -> Tensor:
    """Return the step of each row (m,) of least error of the outputs, as if inputs were independent.

    Parameters
    ----------
    weight : Tensor of shape (m, k)
        The weight.
    diagonal : Tensor of shape (k,)
        The diagonal of H: how much each column counts.
    """
    largest = weight.abs().amax(dim=1).double()
    best = torch.full_like(largest, torch.inf)
    scales = torch.ones_like(largest)
    for shrink in SHRINKS:
        tried = torch.where(largest > 0, largest * shrink / LARGEST, 1.0).float().double()
        whole = (weight / tried[:, None]).round().clamp(-LARGEST, LARGEST)
        lost = ((weight - whole * tried[:, None]).square() * diagonal).sum(dim=1)
        better = lost < best
        best, scales = torch.where(better, lost, best), torch.where(better, tried, scales)
    return scales


def round_weight(pruner: OneShotPruner, pruned: PrunedWeight, reading: InputReading | None) -> RoundedWeight:
    """Round a pruned weight to steps.

    Parameters
    ----------
    pruner : OneShotPruner
        The dense layer.
    pruned : PrunedWeight
        Its weight after pruning.
    reading : InputReading or None
        How inputs are read; None counts no error of inputs.

    Returns
    -------
    RoundedWeight
        The nearest weight in steps, as far as later columns can make up for earlier ones.
    """
    weight, factor = pruned.weight.double().clone(), pruner.factor
    scales = choose_scales(weight, pruner.hessian.diagonal())
    k = weight.shape[1]
    for start in range(0, k, LAZY_COLUMNS):
        end = min(start + LAZY_COLUMNS, k)
        errors = torch.empty(len(weight), end - start, dtype=torch.float64)
        for j in range(start, end):
            column = weight[:, j]
            whole = (column / scales).round().clamp(-LARGEST, LARGEST)
            rounded = torch.where(pruned.mask[:, j], whole * scales, 0.0)
            error = (column - rounded) / factor[j, j]
            weight[:, j] = rounded
            weight[:, j + 1 : end] -= error[:, None] * factor[j, j + 1 : end]
            errors[:, j - start] = error
        weight[:, end:] -= errors @ factor[start:end, end:]
    found = weight.float()
    lost = compute_output_energy(found, pruner.hessian, pruner.weight)
    if reading is not None:
        # Each input is off by an error of its own, which all weights of its column carry on.
        lost += reading.rows * reading.squared_error * float(found.double().square().sum())
    return RoundedWeight(found, pruner.compare_with_energy(lost), scales.float().numpy())
