"""Gradients that are not finite, by the name of their parameter."""

from __future__ import annotations

import torch
from torch import nn


def bad_gradient(model: nn.Module) -> str | None:
    """Which gradient is not finite, as half a sentence; None if all are."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
            return f"the gradient of {name} holds NaN or infinite values"
    return None
