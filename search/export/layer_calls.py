"""The layers that are exported: what a model calls them with, and what they give."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from latbench.errors import UsageError
from search.example_inputs import TensorCall
from search.user_code import call_user_code
from sparse_kernels.convert import LayerPattern
from sparse_kernels.cpu.export.layer_programs import ExportedLayer
from sparse_kernels.formats.int8 import quantize_packed
from sparse_kernels.nn.sparse_layer import INT8, pack_layer
from sparse_kernels.patterns import Dense
from sparse_kernels.prunable_layers import find_geometry
from sparse_kernels.shapes import Conv2dShape

Layers = Mapping[str, nn.Linear | nn.Conv2d]


@dataclass(frozen=True)
class LayerCalls:
    """What a layer is called with. sizes: tokens or images of a call. images: (channels, height, width) of one."""

    sizes: frozenset[int]
    images: frozenset[tuple[int, ...]]

    def find_image(self, name: str) -> tuple[int, ...]:
        """Return the shape of an image of the convolution `name`; () for a linear layer. Raises UsageError."""
        shapes = sorted(self.images)
        if len(shapes) > 1:
            sides = " and of ".join("x".join(map(str, shape)) for shape in shapes)
            raise UsageError(
                f"the model cannot be exported: convolution {name} gets images of {sides}, and an exported one has "
                "one size"
            )
        if shapes and len(shapes[0]) != 3:
            raise UsageError(f"the model cannot be exported: convolution {name} gets an image without a batch")
        return shapes[0] if shapes else ()


def build_exported_layer(
    name: str, module: nn.Linear | nn.Conv2d, choice: LayerPattern | None, x_shape: tuple[int, ...]
) -> ExportedLayer:
    """Return a layer with its packed weight, without activation. x_shape: of one image, of a convolution."""
    choice = choice or LayerPattern(Dense())
    packed: Any = pack_layer(module, choice.pattern, choice.mask)
    if choice.quantization is not None:
        packed = quantize_packed(packed, choice.quantization)
    bias = None if module.bias is None else module.bias.detach().float().numpy().copy()
    precision = "float32" if choice.precision == INT8 else choice.precision
    image = None
    if isinstance(module, nn.Conv2d):
        taps, stride, padding, dilation = find_geometry(module)
        c_in, h, w = x_shape
        image = Conv2dShape(1, c_in, h, w, module.out_channels, taps[0], taps[1], stride, padding, dilation)
    return ExportedLayer(name, packed, bias, precision=precision, image=image)


@dataclass(frozen=True)
class CalledLayers:
    """The pruned layers that a model calls, and the sizes of their calls."""

    modules: Layers
    calls: Mapping[str, LayerCalls]

    def list_sizes(self) -> dict[str, list[int]]:
        """List the tokens or images for which the kernels of each layer are chosen: one, and those of its calls."""
        return {name: sorted({1, *calls.sizes}) for name, calls in self.calls.items()}

    def build_layers(
        self, choices: Mapping[str, LayerPattern], activations: Mapping[str, str | None]
    ) -> list[ExportedLayer]:
        """Return the layers with their packed weights and their activations."""
        return [
            replace(
                build_exported_layer(name, module, choices[name], self.calls[name].find_image(name)),
                activation=activations[name],
            )
            for name, module in self.modules.items()
        ]


def find_called_layers(
    called: TensorCall, choices: Mapping[str, LayerPattern], inputs: Sequence[Sequence[Tensor]]
) -> CalledLayers:
    """Return the pruned layers of a model that it calls with these inputs. Raises UsageError if there are none."""
    modules: dict[str, Any] = {name: called.model.get_submodule(called.prefix + name) for name in choices}
    calls = call_user_code("the model, called with these batches,", lambda: record_calls(called, modules, inputs))
    if not calls:
        raise UsageError("the model cannot be exported: no layer of it was pruned")
    for name in calls:  # raises for images of several sizes
        calls[name].find_image(name)
    return CalledLayers({name: module for name, module in modules.items() if name in calls}, calls)


def record_calls(called: TensorCall, layers: Layers, batches: Sequence[Sequence[Tensor]]) -> dict[str, LayerCalls]:
    """Run the model on each batch; return what its layers are called with. Those that are not called are left out."""
    sizes: dict[str, set[int]] = {}
    images: dict[str, set[tuple[int, ...]]] = {}

    def note(name: str, x: Tensor) -> None:
        if isinstance(layers[name], nn.Conv2d):
            images.setdefault(name, set()).add(tuple(x.shape[1:]))
            sizes.setdefault(name, set()).add(len(x))
        else:
            sizes.setdefault(name, set()).add(math.prod(x.shape[:-1]))

    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs, name=name: note(name, inputs[0]))
        for name, layer in layers.items()
    ]
    try:
        with torch.no_grad():
            for tensors in batches:
                called.model(*(each.clone() for each in tensors))
    finally:
        for hook in hooks:
            hook.remove()
    return {name: LayerCalls(frozenset(found), frozenset(images.get(name, ()))) for name, found in sizes.items()}


def record_results(called: TensorCall, layers: Layers, tensors: Sequence[Tensor]) -> dict[str, list[tuple[int, ...]]]:
    """Return what each call of a layer gives: features, or the (channels, height, width) of a convolution."""
    found: dict[str, list[tuple[int, ...]]] = {name: [] for name in layers}

    def note(name: str, y: Tensor) -> None:
        found[name].append(tuple(y.shape[1:]) if isinstance(layers[name], nn.Conv2d) else (y.shape[-1],))

    hooks = [
        layer.register_forward_hook(lambda _, inputs, y, name=name: note(name, y)) for name, layer in layers.items()
    ]
    try:
        with torch.no_grad():
            called.model(*(each.clone() for each in tensors))
    finally:
        for hook in hooks:
            hook.remove()
    return found


def describe_layers(layers: Sequence[ExportedLayer]) -> dict[str, dict[str, Any]]:
    """Return what a manifest says of layers."""
    return {
        layer.name: {
            "shape": layer.weight.shape,
            "pattern": str(layer.weight.pattern),
            "activation": layer.activation,
        }
        for layer in layers
    }
