"""The layers of a task's model that can be pruned, with their shapes on the example inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from latbench.errors import UsageError
from latbench.workloads.workload import trace_model
from search.task import Task
from sparse_kernels.shapes import Shape

if TYPE_CHECKING:
    from torch import nn


def list_prunable_layers(task: Task, model: nn.Module) -> dict[str, Shape]:
    """Return the shapes by name of the layers that can be pruned and are not excluded. Raises UsageError if none."""
    example = task.example()
    traced, skipped = trace_model(model, example.arguments, keywords=example.keywords)
    shapes = {layer.name: layer.shape for layer in traced.layers}
    included = task.limits.select_included(list(shapes), [name for name, _ in skipped])
    shapes = {name: shapes[name] for name in included}
    if not shapes:
        raise UsageError(f"the model of task {task.name} has no layer that can be pruned")
    return shapes
