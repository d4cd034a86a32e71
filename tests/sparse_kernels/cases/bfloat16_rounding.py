"""What bfloat16 makes of numbers."""

from __future__ import annotations

import numpy as np
import torch


def nearest(x: np.ndarray) -> np.ndarray:
    """The nearest bfloat16 of each number, ties to even, as float32."""
    return torch.from_numpy(np.ascontiguousarray(x)).bfloat16().float().numpy()
