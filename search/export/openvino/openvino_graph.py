"""A pruned model as a graph of OpenVINO, in which each pruned layer is one operation of latbench's own.

OpenVINO's importer traces the model with a stand-in for each of these layers, so that it never sees their weights.
What reads a layer alone becomes part of it: its ReLU or GELU, or the sum of a residual block, and its ReLU.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from latbench.base.quiet_openvino import import_openvino, keep_root_logger
from latbench.errors import UsageError
from search.example_inputs import TensorCall
from search.export.free_sides import list_along
from search.export.layer_calls import Layers, record_results
from search.export.openvino.strided_slices import pool_strided_slices

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


class _Sides(NamedTuple):
    """What a layer takes and gives. features: or channels of x. y: features, or (channels, height, width)."""

    features: int
    y: tuple[int, ...]


class _Placeholder(ov.Op):  # type: ignore[misc]
    """The operation of a layer, as long as there is no library that computes it.

    A second input is added to what the layer gives; `then` is the activation of the sum, "relu" or "".
    """

    class_type_info = ov.DiscreteTypeInfo(OPERATION, OPSET)

    def __init__(self, inputs: Sequence[ov.Output], layer: str, sides: _Sides, then: str = "") -> None:
        super().__init__(self)
        self.layer, self._sides, self._then = layer, sides, then
        self.set_arguments(inputs)
        self.constructor_validate_and_infer_types()

    def get_type_info(self) -> Any:
        return self.class_type_info

    def visit_attributes(self, visitor: Any) -> bool:
        """Tell the layer: OpenVINO merges operations of one input that differ in nothing."""
        visitor.on_attributes({"layer": self.layer, "then": self._then})
        return True

    def validate_and_infer_types(self) -> None:
        x = self.get_input_partial_shape(0)
        y, y_sides = ov.PartialShape.dynamic(), self._sides.y
        if x.rank.is_static:
            sides = list(x)
            if not sides[-1 if len(y_sides) == 1 else 1].compatible(ov.Dimension(self._sides.features)):
                raise RuntimeError(f"layer {self.layer} takes {self._sides.features} features, not {x}")
            y = ov.PartialShape([*(sides[:-1] if len(y_sides) == 1 else sides[:1]), *map(ov.Dimension, y_sides)])
        self.set_output_type(0, ov.Type.f32, y)

    def clone_with_new_inputs(self, inputs: Sequence[ov.Output]) -> ov.Node:
        return _Placeholder(inputs, self.layer, self._sides, self._then)

    def with_added(self, added: ov.Output, then: str) -> _Placeholder:
        """Return the operation that adds this, too."""
        return _Placeholder([self.input_value(0), added], self.layer, self._sides, then)


class _AddedSum(NamedTuple):
    """What a layer may add. node: the sum, or its ReLU. added: what is added to the layer's result."""

    node: ov.Node
    added: ov.Output

    @property
    def then(self) -> str:
        """The activation of the sum."""
        return "relu" if self.node.get_type_name() == "Relu" else ""


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
            features = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
            extensions.append(
                ConversionExtension(target, self._build_converter(name, _Sides(features, results[name][0])))
            )
        with _explain_importer():
            self.model: ov.Model = ov.convert_model(called.model, example_input=tuple(tensors), extension=extensions)
        self.activations: dict[str, str | None] = dict.fromkeys(layers)
        """Layer -> the activation that became part of it, or None."""
        self.sums: set[str] = set()
        """Layers that add something to their results."""
        read = {each.layer for each in self._placeholders if each.output(0).get_target_inputs()}
        if missing := [name for name in layers if name not in read]:
            raise UsageError(
                f"the model cannot be exported to OpenVINO: it multiplies by the weight of {missing[0]} without "
                "calling the layer"
            )
        self._absorb_activations()
        self._absorb_sums(tensors)
        pool_strided_slices(self.model)

    def _build_converter(self, name: str, sides: _Sides) -> Any:
        def convert(context: Any) -> list[ov.Output]:
            self._placeholders.append(_Placeholder([context.get_input(0)], name, sides))
            return list(self._placeholders[-1].outputs())

        return convert

    def _absorb_activations(self) -> None:
        """Make an activation part of a layer where it is what reads each call of the layer, alone."""
        readers: dict[str, list[ov.Node | None]] = {}
        for placeholder in self._placeholders:
            readers.setdefault(placeholder.layer, []).append(_find_reader(placeholder))
        for layer, nodes in readers.items():
            found = {None if node is None else _name_activation(node) for node in nodes}
            if len(found) == 1 and (activation := found.pop()) is not None:
                self.activations[layer] = activation
                for node in filter(None, nodes):
                    node.output(0).replace(node.input_value(0))

    def _absorb_sums(self, tensors: Sequence[Tensor]) -> None:
        """Make a sum, and its ReLU, part of the layer whose results it alone reads; of two layers, of the first.

        What is added has the shape of the result, whatever sizes the inputs have: nothing is broadcast.
        """
        alike = [each for each in self._placeholders if self.activations[each.layer] is None and _find_sum(each)]
        for shapes in _list_other_shapes(tensors) if alike else ():
            with contextlib.suppress(RuntimeError):  # the model does not take these sizes
                self.model.reshape(dict(enumerate(shapes)))
                alike = [each for each in alike if _adds_its_own_shape(each)]
        taken = {id(each) for each in alike}  # by itself: OpenVINO makes an operation of `==`
        for place, placeholder in enumerate(self._placeholders):
            if id(placeholder) in taken and (found := _find_sum(placeholder)) is not None:
                adding = placeholder.with_added(found.added, found.then)
                found.node.output(0).replace(adding.output(0))
                self._placeholders[place] = adding
                self.sums.add(placeholder.layer)
        self.set_free_axes(tensors, [])

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


def _find_reader(node: ov.Node) -> ov.Node | None:
    """Return what reads the result of a node, if there is one such reader."""
    inputs = list(node.output(0).get_target_inputs())
    return inputs[0].get_node() if len(inputs) == 1 else None


def _find_sum(placeholder: _Placeholder) -> _AddedSum | None:
    """Return the sum that alone reads a layer's result, if the layer can compute it."""
    node = _find_reader(placeholder)
    if node is None or node.get_type_name() != "Add":
        return None
    # By the names of nodes: the graph gives them anew at each call.
    name = placeholder.get_name()
    [added] = [each for each in map(node.input_value, (0, 1)) if each.get_node().get_name() != name]
    if added.get_element_type() != ov.Type.f32:
        return None
    activated = _find_reader(node)
    return _AddedSum(node if activated is None or activated.get_type_name() != "Relu" else activated, added)


def _adds_its_own_shape(placeholder: _Placeholder) -> bool:
    """Return whether what is added to a layer's result has its shape, without a free side."""
    found, result = _find_sum(placeholder), placeholder.output(0).get_partial_shape()
    return found is not None and result.is_static and found.added.get_partial_shape() == result


def _list_other_shapes(tensors: Sequence[Tensor]) -> Iterator[list[ov.PartialShape]]:
    """List shapes of the inputs: the given ones, one more along an axis of them together, other sides of each alone.

    A side of one is broadcast.
    """
    own = [list(tensor.shape) for tensor in tensors]
    places = [(number, axis) for number, sides in enumerate(own) for axis in range(min(2, len(sides)))]
    changes: list[dict[tuple[int, int], int]] = [{}]
    for axis in (0, 1):
        along = list_along(tensors, axis)
        changes.append({place: own[place[0]][axis] + 1 for place in places if place[1] == axis and along[place[0]]})
    changes += [{place: side} for place in places for side in (own[place[0]][place[1]] + 1, 1)]
    for changed in changes:
        yield [
            ov.PartialShape([changed.get((number, axis), side) for axis, side in enumerate(sides)])
            for number, sides in enumerate(own)
        ]


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
