"""Checks of what a task's `model()` returns, before anything is done with it: its weights are there and readable."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from latbench.errors import BadData
from sparse_kernels.prunable_layers import survey_layers

_LOAD = "return the model with its trained weights from model()"


def remove_compilation(model: nn.Module) -> nn.Module:
    """Return the model without torch.compile, which renames layers and hides them; nested modules change in place."""
    model = _get_original(model)
    for module in model.modules():
        module._compiled_call_impl = None  # of Module.compile()
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = _get_original(child)
    return model


def _get_original(module: nn.Module) -> nn.Module:
    while isinstance(original := module._modules.get("_orig_mod"), nn.Module):
        module = original
    return module


def check_weights(model: nn.Module, task: str) -> None:
    """Raise BadData, with the tensor's name, if a weight is missing, or no plain float32 tensor, or not finite."""
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if (reason := _find_missing(tensor)) is not None:
                raise BadData(f"task {task}: {kind} {name} {reason}")
    can_prune = bool(survey_layers(model).taken)
    for name, tensor in model.named_parameters():
        of_other_type = tensor.is_floating_point() and tensor.dtype != torch.float32
        if tensor.is_complex() or (of_other_type and not can_prune):  # beside float32 layers, such ones are left out
            kind = str(tensor.dtype).removeprefix("torch.")
            advice = "return a model of real numbers" if tensor.is_complex() else "return model.float()"
            raise BadData(f"task {task}: parameter {name} is {kind}; latbench prunes float32: {advice}")
        if not _is_finite(tensor, f"task {task}: parameter {name}"):
            raise BadData(f"task {task}: parameter {name} holds NaN or infinite values; {_LOAD}")
    for name, value in model.state_dict().items():
        if not torch.is_tensor(value):
            raise BadData(
                f"task {task}: the state_dict() of its model holds a {type(value).__name__} as {name}; latbench "
                "hashes and saves tensors alone: register a tensor buffer in place of it (a quantized model cannot "
                "be pruned)"
            )


def _find_missing(tensor: Tensor) -> str | None:
    """Return why the values of a tensor cannot be read; None if they can."""
    if is_lazy(tensor):
        return "is not initialised, because a lazy layer has not run yet; call the model once and " + _LOAD
    if tensor.is_meta:
        return f"is on the meta device and has no values; {_LOAD}"
    if tensor.device.type != "cpu":
        return f"is on device {tensor.device}; return model.cpu()"
    if tensor.layout != torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        return f"is a {kind} tensor; latbench prunes dense float32 weights: return the model as it was trained"
    return None


def _is_finite(tensor: Tensor, what: str) -> bool:
    try:
        return bool(torch.isfinite(tensor).all())
    except Exception as error:
        raise BadData(f"{what} cannot be read as numbers: {type(error).__name__}: {error}; {_LOAD}") from error
