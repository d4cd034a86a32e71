"""Where losses are evaluated: in processes of this machine, on its GPUs, or on a Ray cluster."""

from __future__ import annotations

import torch

from latbench.errors import EnvironmentUnusable
from search.loss.evaluation_worker import Panel
from search.loss.process_pool import Processes

PLACES = ("cpu", "gpu", "ray")
"""Where profiles are judged: in processes of this machine, one a GPU of this machine, one a CPU of a Ray cluster."""


def panel(place: str, processes: int) -> Panel:
    """Who judges at `place`, one of PLACES. Raises EnvironmentUnusable where there is nobody."""
    if place == "ray":
        from search.loss.ray_pool import OnRay

        return OnRay()
    if place == "gpu":
        if not (count := torch.cuda.device_count()):
            raise EnvironmentUnusable("--judges gpu needs a GPU that torch sees, and there is none")
        return Processes([f"cuda:{number}" for number in range(count)])
    return Processes(["cpu"] * processes)
