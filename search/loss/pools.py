"""The kinds of pools that evaluate losses: processes of this machine, its GPUs, or a Ray cluster."""

from __future__ import annotations

import torch

from latbench.errors import EnvironmentUnusable
from search.loss.evaluation_worker import EvaluatorPool
from search.loss.process_pool import ProcessPool

POOL_KINDS = ("cpu", "gpu", "ray")
"""Processes of this machine; one process for each of its GPUs; one process for each CPU of a Ray cluster."""


def open_pool(kind: str, processes: int) -> EvaluatorPool:
    """Return the pool of evaluators of this kind, one of POOL_KINDS.

    Raises EnvironmentUnusable if it has no worker.
    """
    if kind == "ray":
        from search.loss.ray_pool import RayPool

        return RayPool()
    if kind == "gpu":
        if not (count := torch.cuda.device_count()):
            raise EnvironmentUnusable("--judges gpu needs a GPU, but torch finds none; use --judges cpu")
        return ProcessPool([f"cuda:{number}" for number in range(count)])
    return ProcessPool(["cpu"] * processes)
