"""Fold a BatchNorm into the layer before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def fold_norm(layer: nn.Linear | nn.Conv1d | nn.Conv2d, norm: Any) -> Tensor:
    """Let the layer give what the norm made of its results, in place; return the factor of each of its outputs.

    Parameters
    ----------
    layer : Linear, Conv1d or Conv2d
        A layer with plain weights.
    norm : BatchNorm1d or BatchNorm2d
        A norm with running statistics, in eval mode, with or without a weight and a bias.
    """
    # In float32 at least: three roundings to half would be larger than what a folded norm may change.
    wide = torch.promote_types(layer.weight.dtype, torch.float32)
    with torch.no_grad():
        gain: Tensor = torch.rsqrt(norm.running_var.to(wide) + norm.eps)
        if norm.weight is not None:
            gain = gain * norm.weight
        moved = norm.running_mean.to(wide)
        shift = -moved * gain if layer.bias is None else (layer.bias.to(wide) - moved) * gain
        if norm.bias is not None:
            shift = shift + norm.bias
        scaled = layer.weight * gain.reshape(-1, *[1] * (layer.weight.ndim - 1))
    layer.weight = nn.Parameter(scaled.to(layer.weight.dtype), requires_grad=False)
    layer.bias = nn.Parameter(shift.to(layer.weight.dtype), requires_grad=False)
    return gain.detach()
