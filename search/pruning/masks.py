"""Masks that hold: zeros that stay zero whatever an optimizer does."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sparse_kernels.nn import set_weight_matrix, weight_matrix


def apply_masks(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Set the pruned weights of each named layer to exactly zero, in place; masks are (m, k), True = kept."""
    modules = dict(model.named_modules())
    for name, mask in masks.items():
        matrix = weight_matrix(modules[name])
        set_weight_matrix(modules[name], torch.where(mask, matrix, 0.0))


def as_matrix(weight: Tensor) -> Tensor:
    """A weight, or what has its shape, as the matrix (m, k) of `weight_matrix`."""
    return weight if weight.ndim == 2 else weight.permute(0, 2, 3, 1).reshape(weight.shape[0], -1)


def as_weight(matrix: Tensor, shape: torch.Size) -> Tensor:
    """`as_matrix` undone: a matrix (m, k) in the shape of the layer's weight."""
    if len(shape) == 2:
        return matrix
    c_out, c_in, kh, kw = shape
    return matrix.reshape(c_out, kh, kw, c_in).permute(0, 3, 1, 2).contiguous()
