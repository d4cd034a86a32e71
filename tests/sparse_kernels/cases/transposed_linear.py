"""Conv1D of transformers without transformers: GPT-2's linear layer, whose weight is (k, m)."""

import torch
from torch import Tensor, nn


class Conv1D(nn.Module):
    """A linear layer of k inputs and m outputs."""

    __module__ = "transformers.pytorch_utils"

    def __init__(self, m: int, k: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(k, m)), nn.Parameter(torch.randn(m))

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight + bias for x (..., k)."""
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)
