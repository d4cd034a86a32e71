"""Compute a batch of images a few at a time, from the first layer of a converted model to its last image.

Layer by layer, a large batch leaves the caches between two layers. Few images at a time stay there, and their memory
serves the next ones.

`split_graph` finds the part of a graph that computes each image by itself. What follows, such as a classifier, whose
weights would be read in each turn, runs once for all images.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from sparse_kernels.cpu.layouts.padded_images import FramedImages, QuadImages
from sparse_kernels.fx_graphs import changed, element_wise, hooked
from sparse_kernels.graph_passes.pooling import channels_last
from sparse_kernels.nn.sparse_conv import SparseConv2d
from sparse_kernels.nn.sparse_layer import INT8, UNROUNDED
from sparse_kernels.tensors.padded_conv import OnFrames, framable, frame, max_pool, unframe

TURN_BYTES = 6 * 2**20
"""Bytes for each thread that the largest layer may read and write in a turn. A turn has an image a thread at least.

With more bytes the images leave the caches. With fewer the calls of the layers take too long. Measured with 16 images
in ResNet50 and MobileNetV1, and with 256 in ResNet20 (Granite Rapids, two cores).
"""

LEAST_TURNS = 2
"""A batch that needs fewer turns is computed at once."""

MOST_FLOAT_BYTES = 6 * 2**20
"""Turns pay in float32 if the largest layer reads and writes at most so many bytes of an image.

One larger image leaves the caches already, and to multiply it takes longer than to read it. In eight bits larger ones
gain, too.
"""

SMALLER = 4
"""What the turns leave has to be so many times smaller than what the largest layer reads and writes.

Larger results leave the caches in any case, and they are copied.
"""

KEPT_SIZES = 8
"""Sizes of images of which a model remembers how many bytes they take."""

_MODULES = (
    SparseConv2d, nn.Conv2d, OnFrames, nn.AvgPool2d, nn.MaxPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d,
)  # fmt: skip
_FUNCTIONS = (
    frame, unframe, max_pool, channels_last, F.avg_pool2d, F.max_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d,
)  # fmt: skip
_COMBINING = (operator.add, operator.iadd, operator.mul, operator.imul, torch.add, torch.mul, "add", "mul")
_FLATTEN = (torch.flatten, "flatten")
_AXES = 4  # of images
_BY_AXIS = (operator.getitem, F.pad, "mean", torch.cat)


@dataclass(frozen=True, eq=False)
class Split:
    """A graph in two parts.

    Attributes
    ----------
    images
        From a batch to the values that the rest reads, a tuple; each image by itself.
    rest
        From the batch and these values to the result.
    layers
        What both call, by name in the model.
    in_bytes
        Whether a convolution multiplies in eight bits.
    bytes_of
        Size of an image -> bytes that the layer with the largest images reads and writes for each; 0 where turns do
        not pay.
    """

    images: fx.GraphModule
    rest: fx.GraphModule
    layers: Mapping[str, nn.Module]
    in_bytes: bool
    bytes_of: dict[torch.Size, int] = field(default_factory=dict)


class ImageTurns(fx.GraphModule):
    """A graph that computes its batch a few images at a time where they do not fit into the caches otherwise."""

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """Return what the graph gives for these inputs."""
        if len(inputs) == 1 and not keywords and isinstance(inputs[0], Tensor) and inputs[0].ndim == 4:
            found = self._compute_in_turns(inputs[0])
            if found is not None:
                return found[0]
        return super().__call__(*inputs, **keywords)

    def recompile(self) -> Any:
        """Make the code anew, after the graph was changed."""
        _SPLITS.pop(self, None)
        return super().recompile()

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, super().__reduce__()[:2]

    def _compute_in_turns(self, x: Tensor) -> tuple[Any] | None:
        """Return the result in a tuple; None where the batch is better computed at once, or has to be."""
        if not framable(x) or UNROUNDED.get() or hooked(self):  # asked first, because torch.compile sees no further
            return None
        threads = torch.get_num_threads()
        if len(x) <= threads:
            return None
        split = self._find_split()
        if split is None:
            return None
        size = _find_bytes(split, x, threads)
        if len(x) * size < LEAST_TURNS * threads * TURN_BYTES:
            return None
        few = threads * max(1, TURN_BYTES // size)
        # Nearly equal turns, because plans are kept by the number of bits of a batch.
        turns = [split.images(some) for some in x.tensor_split(max(1, len(x) // few))]
        return (split.rest(x, *(torch.cat(values) for values in zip(*turns, strict=True))),)

    def _find_split(self) -> Split | None:
        """Return the two parts of the graph; None if there are none, or if hooks or norms want whole batches."""
        split = _SPLITS.get(self)
        modules = dict(self.named_modules(remove_duplicate=False))
        if split is None or any(modules.get(name) is not layer for name, layer in split.layers.items()):
            split = split_graph(self)
            if split is None:
                return None
            _SPLITS[self] = split
        for layer in split.layers.values():
            if hooked(layer) or (isinstance(layer, nn.BatchNorm2d) and layer.training):
                return None
        return split


_SPLITS: WeakKeyDictionary[ImageTurns, Split] = WeakKeyDictionary()
"""Kept beside the models: a copy or a pickle of a model makes its own."""


def _restore(build: Callable[..., fx.GraphModule], given: tuple[Any, ...]) -> ImageTurns:
    graph = build(*given)
    restored = ImageTurns(graph, graph.graph, type(graph).__name__)
    for kept in (graph._modules, graph._parameters, graph._buffers, vars(graph)):  # also what the graph does not call
        for name, value in list(kept.items()):
            if not hasattr(restored, name):
                setattr(restored, name, value)
    return restored


def take_turns(traced: fx.GraphModule) -> fx.GraphModule:
    """Return the graph as one that computes few images at a time, if it has such a part."""
    if split_graph(traced) is None:
        return traced
    return ImageTurns(traced, traced.graph, type(traced).__name__)


def split_graph(traced: fx.GraphModule) -> Split | None:
    """Return the two parts of a graph with one input; None where nothing is gained.

    The first part has all nodes that compute each image by itself from such nodes.
    """
    modules = dict(traced.named_modules(remove_duplicate=False))
    inputs = [node for node in traced.graph.nodes if node.op == "placeholder"]
    if len(inputs) != 1 or any(node.op == "get_attr" for node in traced.graph.nodes):
        return None  # a parameter may be replaced later by another one
    inside = dict.fromkeys(inputs)
    for node in traced.graph.nodes:
        if node.all_input_nodes and inside.keys() >= set(node.all_input_nodes) and _keeps_images(node, modules):
            inside[node] = None
    touched = changed(traced, modules)
    if any(node in inputs or not inside.keys() >= {node, *node.users} for node in touched):
        return None  # one part would see a value before the other has changed it
    layers = {str(node.target): modules[str(node.target)] for node in traced.graph.nodes if node.op == "call_module"}
    if not any(isinstance(modules.get(str(node.target)), SparseConv2d) for node in inside):
        return None
    read = [node for node in inside if node not in inputs and not inside.keys() >= set(node.users)]
    known: dict[fx.Node, fx.Node] = {}
    images, rest = fx.Graph(), fx.Graph()
    for node in inside:
        known[node] = images.node_copy(node, known.__getitem__)
    images.output(tuple(known[node] for node in read))
    known = {}
    for node in (*inputs, *read):
        known[node] = rest.placeholder(node.name)
    for node in traced.graph.nodes:
        if node not in inside:
            known[node] = rest.node_copy(node, known.__getitem__)
    in_bytes = any(isinstance(layer, SparseConv2d) and layer.precision == INT8 for layer in layers.values())
    return Split(fx.GraphModule(traced, images), fx.GraphModule(traced, rest), layers, in_bytes)


def _keeps_images(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Return whether a node computes each image of its inputs by itself, and has no memory."""
    if element_wise(node, modules):
        return True
    if node.op == "call_module":
        module = modules[str(node.target)]
        if isinstance(module, nn.Flatten):
            return module.start_dim == 1 and not hooked(module)
        whole = not getattr(module, "return_indices", False) and not hooked(module)
        return whole and (type(module) in _MODULES or _is_fixed_norm(module))
    if node.target in _FLATTEN:
        return node.args[1:] in ((1,), (1, -1)) and not node.kwargs
    if node.target in _BY_AXIS:
        return _leaves_first_axis(node)
    if node.target in _COMBINING:
        return len(node.args) == 2 and all(isinstance(each, fx.Node | int | float) for each in node.args)
    return node.target == "contiguous" or (node.target in _FUNCTIONS and "return_indices" not in node.kwargs)


def _leaves_first_axis(node: fx.Node) -> bool:
    """Return whether a node does nothing along the first axis of images: a slice, padding, a mean, or `torch.cat`."""
    given: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if node.target is torch.cat:
        return bool(given == 1)
    if not isinstance(given, tuple | list) or not given:
        return False
    if node.target is operator.getitem:
        plain = all(isinstance(each, slice) for each in given)
        return plain and bool(given[0] == slice(None)) and len(given) <= _AXES
    if node.target is F.pad:
        return len(given) <= 2 * (_AXES - 1)
    return all(isinstance(axis, int) and axis % _AXES > 0 for axis in given)


def _is_fixed_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm that takes the mean and the variance that it was trained to."""
    return isinstance(module, nn.BatchNorm2d) and not module.training and module.running_mean is not None


def _find_bytes(split: Split, x: Tensor, threads: int) -> int:
    """Return what `Split.bytes_of` knows of images of this size; run a few to see."""
    known = split.bytes_of.get(x.shape[1:])
    if known is None:
        some = x[:threads].clone()  # a function may change it in place
        measured = _Sizes(split.images)
        results = measured.run(some)
        small = all(isinstance(each, Tensor) for each in results) and _count_bytes(results) <= measured.most / SMALLER
        size = measured.most // len(some)
        pays = small and measured.apart and (split.in_bytes or size <= MOST_FLOAT_BYTES)
        known = size if pays else 0
        for oldest in list(split.bytes_of)[: 1 - KEPT_SIZES]:
            split.bytes_of.pop(oldest, None)
        split.bytes_of[x.shape[1:]] = known
    return known


class _Sizes(fx.Interpreter):
    """Runs a graph, and keeps the most bytes that a node reads and writes.

    apart: values have as many axes as `_keeps_images` takes for granted, so no node mixes images.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.most, self.apart = 0, True

    def run_node(self, n: fx.Node) -> Any:
        """Run a node as usual."""
        result = super().run_node(n)
        if n.op != "output":
            read = [self.env[each] for each in n.all_input_nodes]
            self.most = max(self.most, _count_bytes([result, *read]))
            axes = {value.ndim if isinstance(value, Tensor) else _AXES for value in read}
            self.apart &= len(axes) <= 1 and (n.target not in _BY_AXIS or axes == {_AXES})
        return result


def _count_bytes(values: Iterable[Any]) -> int:
    """Return the bytes of images, in frames or not."""
    total = 0
    for value in values:
        if isinstance(value, Tensor):
            total += value.numel() * value.element_size()
        elif isinstance(value, QuadImages):
            total += 4 * value.places.quads.size
        elif isinstance(value, FramedImages):
            total += 4 * value.places.size + (0 if value.in_quads is None else 4 * value.places.quads.size)
    return total
