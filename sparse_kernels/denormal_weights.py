"""Weights below 2**-126, which training with weight decay leaves in dead channels.

IEEE 754 calls such numbers denormal. Intel's processors multiply them in microcode, one after the other. So a layer
takes many times as long, in torch as in our own kernels. They are too small to change a result.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def find_denormals(x: Tensor) -> Tensor:
    """Return where the numbers of a tensor are denormal; nowhere if its type is no float.

    Parameters
    ----------
    x : Tensor
        Any tensor.

    Returns
    -------
    bool Tensor
        Of the same shape.
    """
    if not x.is_floating_point():
        return torch.zeros_like(x, dtype=torch.bool)
    return (x != 0) & (x.abs() < torch.finfo(x.dtype).tiny)


def count_denormals(model: nn.Module) -> dict[str, int]:
    """Return the number of denormal weights by the name of the parameter, without parameters that have none."""
    counts = {name: int(find_denormals(weight.detach()).sum()) for name, weight in model.named_parameters()}
    return {name: count for name, count in counts.items() if count}


def drop_denormals(model: nn.Module) -> None:
    """Set the denormal weights of a model to zero, in place."""
    for weight in model.parameters():
        small = find_denormals(weight.detach())
        if small.any():
            with torch.inference_mode(weight.is_inference()), torch.no_grad():
                weight.masked_fill_(small, 0.0)
