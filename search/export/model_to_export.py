"""What is exported: a pruned model from its folder, or one that a search times and never prunes to a folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from latbench.base.engine_registry import NUMBA
from latbench.errors import UsageError
from search.artifacts.profile import read_profile
from search.example_inputs import ExampleInputs
from search.export.export_manifest import PROFILE
from search.export.fold_norms import fold_norms
from search.pruning.storage.model_folder import load_pruned
from search.task import Task
from search.whole_model.convert_model import add_first_convolutions
from sparse_kernels.convert import LayerPattern, convert
from sparse_kernels.prunable_layers import bake_weights


@dataclass(frozen=True)
class ModelToExport:
    """A pruned model.

    Attributes
    ----------
    task
        Name of its task.
    pruned
        The model with its pruned weights, as plain tensors.
    model
        The same model with its norms folded into layers.
    choices
        Layer name of `model` -> its pattern and mask.
    example
        Inputs of a call.
    threads
        Threads of a call.
    folder
        The folder of `latbench prune`; None for a model that is only timed, and promises nothing.
    """

    task: str
    pruned: nn.Module
    model: nn.Module
    choices: Mapping[str, LayerPattern]
    example: ExampleInputs
    threads: int
    folder: Path | None = None

    def convert(self) -> nn.Module:
        """Return the converted model: its layers round as the exported ones do. Raises UsageError if none can be."""
        copied = self.example.map_tensors(lambda each: each.clone())
        try:
            return convert(self.model, self.choices, copied.arguments, example_keywords=copied.keywords)
        except ValueError as error:
            raise UsageError(f"the model cannot be exported: {error}") from error


def prepare_model(
    task: Task, model: nn.Module, choices: Mapping[str, LayerPattern], threads: int, folder: Path | None = None
) -> ModelToExport:
    """Return what is exported of a pruned model: all layers that run on latbench's kernels, with norms folded in."""
    bake_weights(model)
    example = task.example()
    folded, chosen = fold_norms(model, add_first_convolutions(model, choices, example), example)
    return ModelToExport(task.name, model, folded, chosen, example, threads, folder)


def read_pruned_model(task: Task, folder: Path) -> ModelToExport:
    """Read the pruned model of a task from its folder.

    Raises BadData if it is damaged or of another model, UsageError if it was searched for a GPU.
    """
    model, choices = load_pruned(folder, task.model())
    profile = read_profile(folder / PROFILE)
    if profile.deployment.on_gpu:
        raise UsageError(
            f"{folder} was searched for a GPU, and exports run on CPUs: search with --backend {NUMBA}, or load it "
            "with latbench.load"
        )
    return prepare_model(task, model, choices, profile.threads, folder)
