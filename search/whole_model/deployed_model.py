"""A pruned model as a torch module that is ready to serve."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from latbench.base.engine_registry import is_deepsparse
from latbench.errors import BadData, EnvironmentUnusable, UsageError
from search.artifacts.profile import Profile, read_profile
from search.example_inputs import ExampleInputs
from search.model_weights import remove_compilation
from search.pruning.storage.model_folder import is_pruned, load_pruned, read_manifest
from search.user_code import call_user_code
from search.whole_model.convert_model import convert_for_example, convert_on_gpu
from sparse_kernels.convert import copy_model
from sparse_kernels.prunable_layers import bake_weights


def load_deployed(
    folder: str | Path,
    model: nn.Module,
    example: Tensor | tuple[Any, ...] | Mapping[str, Any],
    *,
    threads: int | None = None,
) -> nn.Module:
    """Load a pruned model as the fast torch module that `latbench verify` timed, as `load_model` says.

    Raises BadData if the folder is no pruned model, is damaged, or was pruned from another model. Raises UsageError
    if the model cannot be called with the example, or cannot be converted, or is for DeepSparse. Raises
    EnvironmentUnusable if it is for a GPU and there is none.
    """
    folder = Path(folder)
    profile = _read_profile(folder)
    inputs = _build_inputs(example)
    pruned = _copy_dense(model)
    pruned, choices = load_pruned(folder, pruned)
    deployment = profile.deployment
    if threads is not None or not deployment.on_gpu:
        torch.set_num_threads(profile.threads if threads is None else threads)
    if deployment.on_gpu and not torch.cuda.is_available():
        raise EnvironmentUnusable(
            f"{folder} was searched for a GPU, and torch finds none: `latbench doctor` says what is missing"
        )
    if deployment.on_gpu:
        inputs = inputs.map_tensors(_bring_to_cpu)
    with torch.no_grad():
        call_user_code("the model, called with the example inputs,", lambda: inputs.call(pruned))
    try:
        if deployment.on_gpu:
            return convert_on_gpu(pruned, choices, inputs, deployment.model_type)
        return convert_for_example(pruned, choices, inputs)
    except ValueError as error:
        raise UsageError(f"{folder} cannot be converted with this model: {error}") from error


def _read_profile(folder: Path) -> Profile:
    """Return the profile of a pruned model that a torch module can run."""
    if not is_pruned(folder) and is_pruned(folder / "pruned"):
        raise BadData(f"{folder} is the folder of a job: give the one of its pruned model, {folder / 'pruned'}")
    read_manifest(folder)
    profile = read_profile(folder / "profile.json")
    if is_deepsparse(profile.backend):
        raise UsageError(
            f"{folder} was pruned for DeepSparse, which runs no torch module: give it the file that `latbench prune "
            "--onnx` writes"
        )
    return profile


def _build_inputs(example: Any) -> ExampleInputs:
    if isinstance(example, Tensor):
        return ExampleInputs((example,))
    if isinstance(example, tuple):
        return ExampleInputs(example)
    if isinstance(example, Mapping) and all(isinstance(name, str) for name in example):
        return ExampleInputs(keywords=dict(example))
    raise UsageError(
        f"the example is a {type(example).__name__}; give a tensor, a tuple of the model's arguments, or a dict of "
        "its keywords"
    )


def _bring_to_cpu(tensor: Tensor) -> Tensor:
    """Return a tensor as the model on the CPU takes it, which is called before it is converted."""
    return tensor.cpu().float() if tensor.is_floating_point() else tensor.cpu()


def _copy_dense(model: nn.Module) -> nn.Module:
    """Return a copy of a user's model on the CPU, as a task's model is before it is pruned."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model is a {type(model).__name__}; give the dense torch.nn.Module that was pruned")
    try:
        copied = remove_compilation(copy_model(model)).cpu().eval()
        bake_weights(copied)
    except (ValueError, NotImplementedError) as error:
        raise UsageError(f"the model cannot be prepared: {error}") from error
    return copied
