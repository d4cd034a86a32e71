"""Inputs of layers as a product in eight bits reads them, while the model itself stays in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sparse_kernels.formats.int8 import STEPS, InputRange, Quantization


class _Read(torch.autograd.Function):
    """Gradients pass unchanged within the range, and not beyond it (Bengio et al. 2013, straight-through)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, zero: int) -> Tensor:
        q = torch.round(x / scale + zero)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward((q >= 0) & (q <= STEPS))
        read: Tensor = (q.clamp_(0, STEPS) - zero) * scale
        return read

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (inside,) = ctx.saved_tensors
        return gradient * inside, None, None


def read_in_steps(x: Tensor, reading: InputRange) -> Tensor:
    """Return x of any shape as a layer with this range reads it: whole numbers of steps, no further than its ends."""
    apply: Callable[..., Tensor] = _Read.apply
    return apply(x, reading.scale, reading.zero)


def read_arguments(
    reading: InputRange, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a layer's arguments, the first of which is its input, with the input as `read_in_steps` returns it."""
    if args:
        return (read_in_steps(args[0], reading), *args[1:]), dict(kwargs)
    first = next(iter(kwargs))
    return (), {**kwargs, first: read_in_steps(kwargs[first], reading)}


@contextmanager
def read_inputs_in_steps(model: nn.Module, quantizations: Mapping[str, Quantization]) -> Iterator[None]:
    """Let these layers read their inputs in steps while the context is open.

    Parameters
    ----------
    model : Module
        The model, whose weights may be whole numbers of steps already.
    quantizations : mapping of str to Quantization
        How layers are read, by name; those without one range for all inputs are refused.
    """
    with ExitStack() as stack:
        for name, each in quantizations.items():
            stack.callback(add_reading(model.get_submodule(name), each).remove)
        yield


def add_reading(layer: nn.Module, quantization: Quantization) -> torch.utils.hooks.RemovableHandle:
    """Let a layer read its inputs in steps until the handle is removed."""
    if quantization.input_range is None:
        raise ValueError("the layer has no range for all inputs")

    def hook(reading: InputRange, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return read_arguments(reading, args, kwargs)

    return layer.register_forward_pre_hook(partial(hook, quantization.input_range), with_kwargs=True)
