"""A pruned model as a graph of torch.export, in which each pruned layer is one call of latbench's own operator.

Tracing meets a stand-in for each of these layers, so the graph never holds their weights. What reads a layer alone
and is its ReLU or GELU becomes part of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from latbench.errors import UsageError
from search.example_inputs import TensorCall, list_tensors
from search.export.free_sides import list_along
from search.export.layer_calls import Layers, record_results
from sparse_kernels.fx_graphs import only_user

OPERATOR, NAMESPACE = "layer", "latbench"
"""The operator, as `torch_layer.cpp` has it, and the beginning of its namespace; the number of the export follows."""

SCHEMA = f"{OPERATOR}(Tensor x, int number) -> Tensor"

_LEAST_TRACED = 2
"""Sides of one are constants to torch.export, so free sides are traced with this size at least."""


class _OperatorCall(nn.Module):
    """A module that calls the operator of a layer, and answers what a model asks of the layer."""

    def __init__(self, layer: nn.Module, operator: Any, number: int) -> None:
        super().__init__()
        self._first = (layer,)  # in a tuple, where torch does not look for modules
        self._operator, self._number = operator, number

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self._operator(x, self._number)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_first"][0], name)


class _ListedResults(nn.Module):
    """A model that returns the tensors of its results in a tuple, in order."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(list_tensors(self.model(*tensors)))


class PackageProgram:
    """The exported program of a model, with a call of our operator for each call of its layers.

    Parameters
    ----------
    called : TensorCall
        The model. It is changed here: give a copy.
    layers : mapping of str to Module
        The linear layers and convolutions to replace, by their names in `called`.
    tensors : sequence of Tensor
        Its inputs.
    others : mapping of int to sequence of Tensor
        Axis -> inputs of another size along it; such axes are free, where torch.export can leave them free.

    Raises
    ------
    UsageError
        torch.export cannot trace the model.
    """

    def __init__(
        self, called: TensorCall, layers: Layers, tensors: Sequence[Tensor], others: Mapping[int, Sequence[Tensor]]
    ) -> None:
        results = record_results(called, layers, tensors)
        self._shapes = [results[name][0] for name in layers]
        """Features of the results of a linear layer, or (channels, height, width) of those of a convolution."""
        called.model.requires_grad_(False)
        with self.define_operator("traced") as operator:
            for number, (name, layer) in enumerate(layers.items()):
                called.model.set_submodule(called.prefix + name, _OperatorCall(layer, operator, number))
            self.program = _trace(_ListedResults(called.model).eval(), tensors, others)
            self._nodes = [node for node in self.program.graph.nodes if node.target is operator]
        self.activations: dict[str, str | None] = dict.fromkeys(layers)
        """Layer -> the activation that became part of it, or None."""
        self._absorb_activations(list(layers))

    @contextmanager
    def define_operator(self, number: str) -> Iterator[Any]:
        """Define the operator in the namespace of this number, without what computes it, and forget it afterwards."""
        namespace = f"{NAMESPACE}_{number}"
        library = torch.library.Library(namespace, "FRAGMENT")
        library.define(SCHEMA)
        torch.library.register_fake(f"{namespace}::{OPERATOR}", self._infer, lib=library)
        try:
            yield getattr(getattr(torch.ops, namespace), OPERATOR).default
        finally:
            library._destroy()
            delattr(torch.ops, namespace)

    def _infer(self, x: Tensor, number: int) -> Tensor:
        shape = self._shapes[number]
        return x.new_empty([*(x.shape[:-1] if len(shape) == 1 else x.shape[:1]), *shape])

    def _absorb_activations(self, names: Sequence[str]) -> None:
        """Make an activation part of a layer where it is what reads each call of the layer, alone."""
        calls: dict[str, list[fx.Node]] = {}
        for node in self._nodes:
            calls.setdefault(names[node.args[1]], []).append(node)
        for name, nodes in calls.items():
            readers = [only_user(node) for node in nodes]
            found = {None if reader is None else _name_activation(reader) for reader in readers}
            if len(found) == 1 and (activation := found.pop()) is not None:
                self.activations[name] = activation
                for node, reader in zip(nodes, readers, strict=True):
                    assert reader is not None
                    self.program.graph_signature.replace_all_uses(reader.name, node.name)
                    reader.replace_all_uses_with(node)
                    self.program.graph.erase_node(reader)
        self.program.graph_module.recompile()

    def compile(self, number: str, path: Path, march: str, bits: int) -> None:
        """Compile the program ahead of time to a package, which calls the operator of the export's number.

        Parameters
        ----------
        number : str
            The number of the export.
        path : Path
            The package to write, a .pt2 file.
        march : str
            The processor for which g++ compiles what lies between the layers.
        bits : int
            Width of its vectors.
        """
        import torch._inductor

        with self.define_operator(number) as operator, warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # advice to torch's own developers
            for node in self._nodes:
                node.target = operator
            self.program.graph_module.recompile()
            settings = {"cpp.dynamic_threads": True, "cpp.march": march, "cpp.simdlen": bits}
            torch._inductor.aoti_compile_and_package(self.program, package_path=str(path), inductor_configs=settings)

    def describe_results(self) -> list[dict[str, Any]]:
        """Return the shape and the type of each result; a side of no fixed size is None."""
        named = {node.name: node.meta["val"] for node in self.program.graph.nodes if "val" in node.meta}
        results = [named[name] for name in self.program.graph_signature.user_outputs]
        return [
            {
                "shape": [side if isinstance(side, int) else None for side in each.shape],
                "type": str(each.dtype).removeprefix("torch."),
            }
            for each in results
        ]

    def list_free_axes(self) -> list[list[int]]:
        """List the axes of each input that take other sizes."""
        inputs = [node for node in self.program.graph.nodes if node.name in self.program.graph_signature.user_inputs]
        return [
            [axis for axis, side in enumerate(node.meta["val"].shape) if not isinstance(side, int)] for node in inputs
        ]


def _trace(
    model: nn.Module, tensors: Sequence[Tensor], others: Mapping[int, Sequence[Tensor]]
) -> torch.export.ExportedProgram:
    """Trace the model, with the axes of `others` free as far as torch.export can leave them free."""
    along = {axis: list_along(tensors, axis) for axis in others}
    sides = tuple(
        {axis: torch.export.Dim.AUTO for axis in others if along[axis][number]} for number in range(len(tensors))
    )
    given = tuple(others[0]) if 0 in others and _has_short_side(tensors, others) else tuple(tensors)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            return torch.export.export(model, given, dynamic_shapes=(sides,) if any(sides) else None)
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise UsageError(f"the model cannot be exported to torch, which cannot trace it: {lines[0]}") from error


def _has_short_side(tensors: Sequence[Tensor], others: Mapping[int, Sequence[Tensor]]) -> bool:
    return any(
        tensor.shape[axis] < _LEAST_TRACED
        for axis in others
        for tensor, has in zip(tensors, list_along(tensors, axis), strict=True)
        if has
    )


def _name_activation(node: fx.Node) -> str | None:
    """Return the activation that a node computes, if a layer can compute it."""
    aten = torch.ops.aten
    if node.target in (aten.relu.default, aten.relu_.default):
        return "relu"
    exact = node.target is aten.gelu.default and node.kwargs.get("approximate", "none") == "none"
    return "gelu" if exact else None
