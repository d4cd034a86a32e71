"""Batch-norm tuning: a pruned network's activations have other means and variances than the dense network's.

The running statistics are reset and estimated again on calibration batches, with equal weights (Hubara et al. 2021,
section 4.2; Frantar & Alistarh 2022, appendix). Weights do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from search.task import Task


def list_batchnorms(model: nn.Module) -> list[_BatchNorm]:
    """List the batch norms that can be tuned: those with running statistics."""
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]


def tune_batchnorm(task: Task, model: nn.Module, batches: Sequence[Any]) -> None:
    """Estimate the statistics of every batch norm again, in place; the model is in eval mode afterwards.

    A norm that the loss never calls keeps its statistics.
    """
    norms = list_batchnorms(model)
    momenta = [norm.momentum for norm in norms]
    before = [{name: buffer.clone() for name, buffer in norm.named_buffers()} for norm in norms]
    model.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # torch: the plain average over batches
        norm.train()
    try:
        if norms:
            with torch.no_grad():
                for batch in batches:
                    task.loss(model, batch)
    finally:
        for norm, momentum, statistics in zip(norms, momenta, before, strict=True):
            norm.momentum = momentum
            if not norm.num_batches_tracked:
                norm.load_state_dict(statistics, strict=False)
        model.eval()
