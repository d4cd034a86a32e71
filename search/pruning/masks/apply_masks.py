"""Apply masks: set pruned weights to zero."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sparse_kernels.prunable_layers import set_weight_matrix, weight_matrix


def apply_masks(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Set the pruned weights of each named layer to exactly zero, in place; masks are (m, k), True = kept."""
    modules = dict(model.named_modules())
    for name, mask in masks.items():
        matrix = weight_matrix(modules[name])
        set_weight_matrix(modules[name], torch.where(mask, matrix, 0.0))
