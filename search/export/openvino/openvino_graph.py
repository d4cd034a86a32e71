"""A pruned model as a graph of OpenVINO, in which each pruned layer is one operation of latbench's own.

OpenVINO's importer traces the model with a stand-in for each of these layers, so that it never sees their weights.
What reads a layer alone and is its ReLU or GELU becomes part of it.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from latbench.base.quiet_openvino import import_openvino, keep_root_logger
from latbench.errors import UsageError
from search.example_inputs import TensorCall
from search.export.free_sides import list_along
from search.export.layer_calls import Layers, record_results

if TYPE_CHECKING:
    import openvino as ov
else:
    ov = import_openvino()

OPERATION, OPSET = "SparseLayer", "latbench"
"""The operation, as `openvino_layer.cpp` has it. The file of a graph names it, so writing one needs no library.

In the file the opset has the number of the export behind its name.
"""


class _StandIn(nn.Module):
    """A module that calls a layer, whose parameters are none of the model's.

    OpenVINO's importer cannot trace a replaced module that has parameters of its own, nor two calls of the same ones:
    a layer that is called several times has a copy for each.
    """

    def __init__(self, layer: nn.Module, calls: int) -> None:
        super().__init__()
        layer.requires_grad_(False)
        self._first = (layer,)  # in a tuple, where torch does not look for modules
        self._layers = itertools.cycle([layer, *(copy.deepcopy(layer) for _ in range(calls - 1))])

    def forward(self, x: Tensor) -> Any:
        return next(self._layers)(x)

    def __getattr__(self, name: str) -> Any:
        """Return what the layer has: a model may ask for the type of its weight."""
        return getattr(self.__dict__["_first"][0], name)


class _Placeholder(ov.Op):  # type: ignore[misc]
    """The operation of a layer, as long as there is no library that computes it."""

    class_type_info = ov.DiscreteTypeInfo(OPERATION, OPSET)

    def __init__(self, inputs: Sequence[ov.Output], layer: str, shape: tuple[int | None, ...]) -> None:
        super().__init__(self)
        self.layer, self._shape = layer, shape
        self.set_arguments(inputs)
        self.constructor_validate_and_infer_types()

    def get_type_info(self) -> Any:
        return self.class_type_info

    def visit_attributes(self, visitor: Any) -> bool:
        """Tell the layer: OpenVINO merges operations of one input that differ in nothing."""
        visitor.on_attributes({"layer": self.layer})
        return True

    def validate_and_infer_types(self) -> None:
        x = self.get_input_partial_shape(0)
        if x.rank.is_dynamic:
            y = ov.PartialShape.dynamic()
        elif len(self._shape) == 1:
            y = ov.PartialShape([*list(x)[:-1], ov.Dimension(self._shape[0])])
        else:
            y = ov.PartialShape([x[0], *map(ov.Dimension, self._shape)])
        self.set_output_type(0, ov.Type.f32, y)

    def clone_with_new_inputs(self, inputs: Sequence[ov.Output]) -> ov.Node:
        return _Placeholder(inputs, self.layer, self._shape)


class LayerGraph:
    """The graph of a model, with an operation of ours for each call of its layers.

    Parameters
    ----------
    called : TensorCall
        The model. It may be changed here: give a copy.
    layers : mapping of str to Module
        The linear layers and convolutions to replace, by their names in `called`.
    tensors : sequence of Tensor
        Its inputs.

    Raises
    ------
    UsageError
        OpenVINO cannot import the model, or the model multiplies by the weight of a layer without calling it.
    """

    def __init__(self, called: TensorCall, layers: Layers, tensors: Sequence[Tensor]) -> None:
        results = record_results(called, layers, tensors)
        called.model.requires_grad_(False)
        self._placeholders: list[_Placeholder] = []
        """One a call of a layer. The graph gives their nodes without what Python knows of them."""
        from openvino.frontend.pytorch import ConversionExtension, ModuleExtension

        extensions: list[Any] = []
        for number, (name, layer) in enumerate(layers.items()):
            stand_in, target = _StandIn(layer, len(results[name])), f"{OPSET}::layer_{number}"
            called.model.set_submodule(called.prefix + name, stand_in)
            extensions.append(ModuleExtension(stand_in, target))
            extensions.append(ConversionExtension(target, self._build_converter(name, results[name][0])))
        with _explain_importer():
            self.model: ov.Model = ov.convert_model(called.model, example_input=tuple(tensors), extension=extensions)
        self.activations: dict[str, str | None] = dict.fromkeys(layers)
        """Layer -> the activation that became part of it, or None."""
        read = {each.layer for each in self._placeholders if each.output(0).get_target_inputs()}
        if missing := [name for name in layers if name not in read]:
            raise UsageError(
                f"the model cannot be exported to OpenVINO: it multiplies by the weight of {missing[0]} without "
                "calling the layer"
            )
        self._absorb_activations()

    def _build_converter(self, name: str, shape: tuple[int, ...]) -> Any:
        def convert(context: Any) -> list[ov.Output]:
            self._placeholders.append(_Placeholder([context.get_input(0)], name, shape))
            return list(self._placeholders[-1].outputs())

        return convert

    def _absorb_activations(self) -> None:
        """Make an activation part of a layer where it is what reads each call of the layer, alone."""
        readers: dict[str, list[ov.Node]] = {}
        for placeholder in self._placeholders:
            inputs = list(placeholder.output(0).get_target_inputs())
            readers.setdefault(placeholder.layer, []).append(inputs[0].get_node() if len(inputs) == 1 else None)
        for layer, nodes in readers.items():
            found = {None if node is None else _name_activation(node) for node in nodes}
            if len(found) == 1 and (activation := found.pop()) is not None:
                self.activations[layer] = activation
                for node in nodes:
                    node.output(0).replace(node.input_value(0))

    def set_free_axes(self, tensors: Sequence[Tensor], axes: Sequence[int]) -> None:
        """Let inputs have any size along these axes, and the sizes of these tensors along the others."""
        along = {axis: list_along(tensors, axis) for axis in axes}
        shapes = {}
        for number, tensor in enumerate(tensors):
            free = {axis for axis in axes if along[axis][number]}
            sides = [ov.Dimension() if axis in free else ov.Dimension(side) for axis, side in enumerate(tensor.shape)]
            shapes[number] = ov.PartialShape(sides)
        self.model.reshape(shapes)

    def name_ports(self, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        """Name the inputs and the results, as far as there are names."""
        for ports, names in ((self.model.inputs, inputs), (self.model.outputs, outputs)):
            for port, name in zip(ports, names, strict=False):
                port.get_tensor().set_names({name})

    def save(self, path: Path, opset: str) -> None:
        """Write the graph to a file, and its weights to one beside it; `opset` is that of the export."""
        ov.serialize(self.model, path, path.with_suffix(".bin"))
        text, mark = path.read_text(encoding="utf-8"), f'type="{OPERATION}" version="{OPSET}"'
        path.write_text(text.replace(mark, f'type="{OPERATION}" version="{opset}"'), encoding="utf-8")


def _name_activation(node: ov.Node) -> str | None:
    """Return the activation that a node computes, if a layer can compute it."""
    kind = node.get_type_name()
    if kind == "Relu":
        return "relu"
    exact = kind == "Gelu" and str(node.get_attributes().get("approximation_mode", "")).lower() == "erf"
    return "gelu" if exact else None


@contextmanager
def _explain_importer() -> Iterator[None]:
    """Turn what OpenVINO's importer refuses into a sentence."""
    try:
        with keep_root_logger(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's advice to the importer's developers
            yield
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        # What torch said comes behind what the importer did.
        said = lines[(lines.index("Exception:") + 1) % len(lines)] if "Exception:" in lines else lines[0]
        raise UsageError(f"the model cannot be exported to OpenVINO, which cannot import it: {said}") from error
