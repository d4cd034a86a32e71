"""Fine-tuning with gradual magnitude pruning: for the profiles that one-shot pruning cannot reach well enough.

Starts from the dense model, prunes along the cubic schedule over the first half of the steps and trains on under the
final masks. Adam with a cosine decay; batch norms train too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from latbench.errors import BadData
from search.pruning.gmp import GMP
from search.task import Task
from sparse_kernels.patterns import Pattern

LEARNING_RATE = 1e-3


def finetune(
    task: Task,
    model: nn.Module,
    targets: Mapping[str, tuple[Pattern, float]],
    *,
    steps: int,
    rng: np.random.Generator,
    learning_rate: float = LEARNING_RATE,
    progress: Callable[[int, int], None] = lambda step, steps: None,
) -> dict[str, Tensor]:
    """Prune the dense `model` to `targets`, {layer: (pattern, sparsity)}, while it trains; returns the final masks.

    In place; the model ends in eval mode. Raises UsageError when the task has no training batches, BadData when the
    loss is no longer finite.
    """
    batches = task.train_batches(rng)
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.5 + 0.5 * math.cos(math.pi * s / steps))
    gmp = GMP(model, targets, begin=0, end=max(1, steps // 2), every=max(1, steps // 40))
    model.train()
    for step in range(steps):
        loss = task.loss(model, next(batches))
        if not bool(torch.isfinite(loss)):
            raise BadData(f"fine-tuning diverged: the loss is {loss.item()} at step {step}; lower the learning rate")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        gmp.step(step)
        progress(step + 1, steps)
    model.eval()
    return gmp.masks
