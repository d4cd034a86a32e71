"""A check of gradients that names the first parameter whose gradient is not finite."""

from __future__ import annotations

import torch
from torch import nn


def find_bad_gradient(model: nn.Module) -> str | None:
    """Return which gradient is not finite, as part of a sentence, or None."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
            return f"the gradient of {name} holds NaN or infinite values"
    return None
