"""Convert a pruned model to what is timed, verified and served, on a CPU or a GPU.

Its pruned layers run on latbench's kernels, and so do convolutions that read few channels, such as a network's first.
There torch's convolution takes longer than our dense one (`tests/benchmarks/jobs/first_convolutions.py`). The next
convolution also finds its input in the frames that it reads. On a GPU every layer that stays dense is torch's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from latbench.base.engine_registry import CUPY
from latbench.workloads.workload import trace_model
from search.example_inputs import ExampleInputs
from sparse_kernels.convert import LayerPattern, convert
from sparse_kernels.patterns import Dense
from sparse_kernels.shapes import Conv2dShape

FEW_CHANNELS = 4
"""Input channels, at most, of a convolution that runs on our dense kernel although it was not searched.

With more channels torch is faster on some processors.
"""

GPU = "cuda"
"""Where torch puts a model on the GPU of its process."""


def convert_for_example(model: nn.Module, choices: Mapping[str, LayerPattern], example: ExampleInputs) -> nn.Module:
    """Return the model converted to `choices`, and proved on the example inputs.

    Convolutions that read few channels are converted, too, and stay dense.

    Parameters
    ----------
    model : Module
        The pruned model. It is not changed.
    choices : mapping of str to LayerPattern
        The patterns of its pruned layers.
    example : ExampleInputs
        The arguments of a call.

    Raises
    ------
    ValueError
        As `sparse_kernels.convert.convert`.
    """
    choices = add_first_convolutions(model, choices, example)
    return convert(model, choices, example.arguments, example_keywords=example.keywords)


def convert_on_gpu(
    model: nn.Module, choices: Mapping[str, LayerPattern], example: ExampleInputs, precision: str
) -> nn.Module:
    """Return the model on the GPU, converted to the sparse ones of `choices`, and proved on the example inputs.

    Parameters
    ----------
    model : Module
        The pruned model on the CPU. It is moved.
    choices : mapping of str to LayerPattern
        The patterns of its pruned layers.
    example : ExampleInputs
        The arguments of a call, on the CPU.
    precision : str
        The type that weights and inputs get, such as float16.

    Raises
    ------
    ValueError
        As `sparse_kernels.convert.convert`.
    """
    sparse = {name: choice for name, choice in choices.items() if not isinstance(choice.pattern, Dense)}
    placed = place_inputs(example, precision)
    return convert(
        place_model(model, precision), sparse, placed.arguments, example_keywords=placed.keywords, backend=CUPY
    )


class ForwardAlone(nn.Module):
    """A model of which only its call is left, as of one on a GPU that is called from the CPU.

    Whoever asks where its tensors are finds the CPU, and moves nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.held = (model,)  # in a tuple, so that it is no part of this module
        self.place = nn.Parameter(torch.empty(0), requires_grad=False)
        self.eval()

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Return what the model returns."""
        return self.held[0](*arguments, **keywords)


def place_model(model: nn.Module, precision: str) -> nn.Module:
    """Return the model on the GPU, ready to infer, with its floats in this type."""
    return model.to(GPU, getattr(torch, precision)).eval()


def place_inputs(inputs: ExampleInputs, precision: str) -> ExampleInputs:
    """Return the inputs on the GPU, floats in this type."""
    dtype = getattr(torch, precision)

    def place(tensor: Tensor) -> Tensor:
        return tensor.to(GPU, dtype) if tensor.is_floating_point() else tensor.to(GPU)

    return inputs.map_tensors(place)


def add_first_convolutions(
    model: nn.Module, choices: Mapping[str, LayerPattern], example: ExampleInputs
) -> dict[str, LayerPattern]:
    """Return the choices with convolutions that read few channels, which stay dense and run on our kernel."""
    traced, _ = trace_model(model, example.arguments, keywords=example.keywords)
    first = {layer.name: LayerPattern(Dense()) for layer in traced.layers if _reads_few_channels(layer.shape)}
    return {**first, **choices}


def _reads_few_channels(shape: object) -> bool:
    return isinstance(shape, Conv2dShape) and shape.c_in <= FEW_CHANNELS
