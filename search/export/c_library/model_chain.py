"""A model as a chain of steps that the library in C knows: layers, sums, ReLU; the batch comes first in every value.

Traced by torch.fx. Activations that alone read a layer become part of it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from latbench.errors import UsageError
from search.export.layer_calls import build_exported_layer
from sparse_kernels.convert import LayerPattern
from sparse_kernels.cpu.export.layer_programs import ExportedLayer
from sparse_kernels.fx_graphs import activation, drop_identities, hooked, mutates
from sparse_kernels.prunable_layers import survey_layers
from sparse_kernels.same_results import FOLDED, same_results

LAYER, ADD, RELU = "layer", "add", "relu"

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ChainStep:
    """A step: `output` from `inputs`, numbers of values. layer: the layer's name. relu: of a sum."""

    kind: str
    inputs: tuple[int, ...]
    output: int
    layer: str = ""
    relu: bool = False


@dataclass
class ModelChain:
    """The steps of a model.

    shapes: of each value as its step gives it, or of the model's result, without the batch. The first value is x.
    result: the value that the model returns.
    """

    layers: list[ExportedLayer] = field(default_factory=list)
    steps: list[ChainStep] = field(default_factory=list)
    shapes: list[Shape] = field(default_factory=list)
    result: int = 0

    def count_floats(self, value: int) -> int:
        """Return the floats of a value of one input."""
        return math.prod(self.shapes[value])


def trace_chain(model: nn.Module, choices: Mapping[str, LayerPattern], x: Tensor) -> ModelChain:
    """Return the chain of a pruned model.

    Parameters
    ----------
    model : Module
        The pruned model, in eval mode.
    choices : mapping of str to LayerPattern
        Patterns of its pruned layers; the others are exported as dense ones.
    x : float32 Tensor (batch, ...)
        The input of a call.

    Returns
    -------
    ModelChain
        Its steps, for any batch.

    Raises
    ------
    UsageError
        The model is no such chain; the message names the first layer or function that is not supported.
    """
    try:
        graph = fx.symbolic_trace(model)
    except Exception as error:
        raise UsageError(f"the model cannot be exported: torch.fx cannot trace it ({error})") from error
    with torch.no_grad():  # a model may change its input, so each call has a copy
        if not same_results(graph(x.clone()), model(x.clone()), FOLDED):
            raise UsageError(
                "the model cannot be exported: what torch.fx traces gives other results than the model, as where "
                "y += x changes a value that is read afterwards; write y = y + x"
            )
    drop_identities(graph)
    with torch.no_grad():
        ShapeProp(graph).propagate(x.clone())
    return _ChainBuilder(graph, choices).build()


class _ChainBuilder:
    """Reads a traced graph node by node.

    Several nodes may be names of one value: a layer, the activation that became part of it, and what flattens it.
    """

    def __init__(self, graph: fx.GraphModule, choices: Mapping[str, LayerPattern]) -> None:
        self._graph, self._choices = graph, choices
        self._modules = dict(graph.named_modules(remove_duplicate=False))
        self._left_out = survey_layers(graph).left_out
        self._values: dict[fx.Node, int] = {}
        self._order = {node: number for number, node in enumerate(graph.graph.nodes)}
        self._chain = ModelChain()

    def build(self) -> ModelChain:
        chain = self._chain
        inputs = [node for node in self._graph.graph.nodes if node.op == "placeholder"]
        if len(inputs) != 1:
            raise UsageError(f"the model cannot be exported: it has {len(inputs)} inputs, and a chain has one")
        for node in self._graph.graph.nodes:
            if node.op == "output":
                if not isinstance(node.args[0], fx.Node):
                    raise UsageError("the model cannot be exported: its result is no single tensor")
                chain.result = self._values[node.args[0]]
                if chain.result:
                    chain.shapes[chain.result] = _read_shape(node.args[0])
                break
            shape = _read_shape(node)
            self._refuse_late_readers(node)
            self._values[node] = self._new_value(shape) if node.op == "placeholder" else self._read(node, shape)
        if not chain.layers or chain.result == 0:
            raise UsageError("the model cannot be exported: no layer of it computes its result")
        return chain

    def _new_value(self, shape: Shape) -> int:
        self._chain.shapes.append(shape)
        return len(self._chain.shapes) - 1

    def _read(self, node: fx.Node, shape: Shape) -> int:
        """Return the value of a node, whose steps are added to the chain."""
        module = self._get_module(node)
        if module is not None and hooked(module):
            raise UsageError(f"the model cannot be exported to C: {node.target} has hooks; remove them first")
        if not node.args or not isinstance(node.args[0], fx.Node) or (module is not None and node.kwargs):
            raise self._refuse(node, module)
        if isinstance(module, nn.Linear | nn.Conv2d):
            return self._add_layer(node, module, shape)
        if self._is_flatten(node):
            return self._values[node.args[0]]  # the same floats under another name
        if (name := activation(node, self._modules)) is not None:
            return self._add_activation(node, name, shape)
        if _is_sum(node):
            return self._add_sum(node, shape)
        raise self._refuse(node, module)

    def _get_module(self, node: fx.Node) -> nn.Module | None:
        return self._modules.get(str(node.target)) if node.op == "call_module" else None

    def _is_flatten(self, node: fx.Node) -> bool:
        """Return whether a node flattens everything but the batch."""
        module = self._get_module(node)
        if isinstance(module, nn.Flatten):
            return module.start_dim == 1 and module.end_dim == -1
        called = node.target is torch.flatten or (node.op == "call_method" and node.target == "flatten")
        return called and node.kwargs == {} and tuple(node.args[1:]) == (1,)

    def _list_readers(self, value: int) -> set[fx.Node]:
        """Return the nodes that read a value under any of its names. To give it another name is no reading."""
        names = [node for node, number in self._values.items() if number == value]
        return {reader for name in names for reader in self._follow(name)} - {*names}

    def _follow(self, name: fx.Node) -> Iterator[fx.Node]:
        for user in name.users:
            if self._is_flatten(user):
                yield from self._follow(user)
            else:
                yield user

    def _refuse_late_readers(self, node: fx.Node) -> None:
        """Raise UsageError if a node changes in place what a later node reads under another name."""
        if node.op == "placeholder" or not mutates(node, self._modules):
            return
        changed = node.args[0] if node.args else None
        if not isinstance(changed, fx.Node):
            raise self._refuse(node, self._get_module(node))
        late = [each for each in self._list_readers(self._values[changed]) if self._order[each] > self._order[node]]
        if late:
            raise UsageError(
                f"the model cannot be exported to C: {node.name} changes a value in place, which {late[0].name} "
                "reads afterwards; let it return a new value"
            )

    def _refuse(self, node: fx.Node, module: nn.Module | None) -> UsageError:
        what = f"{node.target} ({type(module).__name__})" if module is not None else _name_function(node)
        reason = self._left_out.get(str(node.target), "") if module is not None else ""
        return UsageError(
            f"the model cannot be exported to C: {what} is not supported{reason and ', ' + reason}; a chain has "
            "linear layers, convolutions, ReLU, GELU behind a layer, sums of two values, and flatten"
        )

    def _add_layer(self, node: fx.Node, module: nn.Linear | nn.Conv2d, shape: Shape) -> int:
        name = str(node.target)
        if name in self._left_out:
            raise self._refuse(node, module)
        if any(each.name == name for each in self._chain.layers):
            raise UsageError(f"the model cannot be exported to C: it calls layer {name} twice, and a chain once")
        before = node.args[0]
        assert isinstance(before, fx.Node)
        source, x_shape = self._values[before], _read_shape(before)
        if isinstance(module, nn.Conv2d) and len(x_shape) != 3:
            raise UsageError(f"the model cannot be exported to C: convolution {name} gets an image without a batch")
        self._chain.layers.append(build_exported_layer(name, module, self._choices.get(name), x_shape))
        output = self._new_value(shape)
        self._chain.steps.append(ChainStep(LAYER, (source,), output, name))
        return output

    def _add_activation(self, node: fx.Node, name: str, shape: Shape) -> int:
        before, chain = node.args[0], self._chain
        assert isinstance(before, fx.Node)
        source = self._values[before]
        last = chain.steps[-1] if chain.steps else None
        alone = self._list_readers(source) == {node} and last is not None and last.output == source
        if alone and last is not None and last.kind == LAYER and chain.layers[-1].activation is None:
            chain.layers[-1] = replace(chain.layers[-1], activation=name)
            return source
        if name != "relu":
            raise self._refuse(node, self._get_module(node))
        if alone and last is not None and last.kind == ADD:
            chain.steps[-1] = replace(last, relu=True)
            return source
        output = self._new_value(shape)
        chain.steps.append(ChainStep(RELU, (source,), output, relu=True))
        return output

    def _add_sum(self, node: fx.Node, shape: Shape) -> int:
        a, b = node.args
        if not (isinstance(a, fx.Node) and isinstance(b, fx.Node) and _read_shape(a) == _read_shape(b) == shape):
            raise self._refuse(node, None)
        output = self._new_value(shape)
        self._chain.steps.append(ChainStep(ADD, (self._values[a], self._values[b]), output))
        return output


def _read_shape(node: fx.Node) -> Shape:
    """Return the shape of a node's value without the batch."""
    facts = node.meta.get("tensor_meta")
    shape = getattr(facts, "shape", None)
    if shape is None or getattr(facts, "dtype", None) != torch.float32 or len(shape) < 2:
        raise UsageError(
            f"the model cannot be exported to C: {node.target} is no float32 tensor of two or more dimensions"
        )
    return tuple(int(side) for side in shape[1:])


def _is_sum(node: fx.Node) -> bool:
    called = node.op == "call_function" and node.target in (operator.add, operator.iadd, torch.add)
    return (
        (called or (node.op == "call_method" and node.target in ("add", "add_")))
        and len(node.args) == 2
        and (node.kwargs == {})
    )


def _name_function(node: fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target))
