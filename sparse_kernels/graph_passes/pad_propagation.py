"""Choose which images of a converted model stay in frames from one sparse convolution to the next.

`cpu.layouts.padded_images` says what a frame is. Convolutions that keep the size of their images work from frames to
frames. One that pads its images gains by that, as it reads them where they lie. So its input is put in frames, and
with it

- what one convolution reads from another, and what one that keeps the size needs to write into frames,
- what is added to such a convolution's result, as a residual block does, and the sum: it is added before the result
  is stored.

Every other reader of a value in frames reads a copy without them. A value that comes from a layer of torch's is laid
into frames once, for all readers that work there.

A convolution in eight bits reads its input as bytes. So the convolution before it leaves bytes in frames: with floats
where anything else reads those, and in their place where nothing does.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from sparse_kernels.formats.int8 import InputRange
from sparse_kernels.fx_graphs import activation, call, changed, element_wise, erase, only_user, wrap
from sparse_kernels.nn import SparseConv2d
from sparse_kernels.tensors.padded_conv import OnFrames, frame, unframe

_ADD = (operator.add, torch.add, "add")

MOST_MARGIN = 4  # a convolution that pads more would make the frames of all others as wide


@dataclass(frozen=True)
class _Sum:
    """A sum that a convolution may take over: conv + added, then an activation, if only that reads it."""

    node: fx.Node
    conv: fx.Node
    added: fx.Node
    activated: fx.Node | None

    @property
    def result(self) -> fx.Node:
        return self.activated or self.node


def keep_frames(traced: fx.GraphModule) -> None:
    """Rewrite the graph so that images stay in frames where that pays, in place."""
    modules = dict(traced.named_modules(remove_duplicate=False))
    convs = [node for node in traced.graph.nodes if _sparse_conv(node, modules) is not None]
    keeping = {node for node in convs if _keeps_size(node, modules)}
    gaining = [node for node in convs if node in keeping and 0 < max(_layer(node, modules).padding) <= MOST_MARGIN]
    if not gaining:
        return
    margin = max(max(_layer(node, modules).padding) for node in gaining)
    framed, native, sums = _choose(traced, modules, convs, keeping, gaining)
    for each in sums:
        kind = None if each.activated is None else activation(each.activated, modules)
        # What is added may by now be another sum than the one that was found.
        [added] = [part for part in each.node.args if part is not each.conv]
        each.node.op, each.node.target, each.node.args = "call_module", each.conv.target, each.conv.args
        each.node.kwargs = {"added": added, "then": kind}
        traced.graph.erase_node(each.conv)
        if each.activated is not None:
            erase(traced, each.activated, each.node)
    # Sums stand for the convolutions that took them over, and for the activations that followed.
    stands = {each.conv: each.node for each in sums} | {each.result: each.node for each in sums}
    adding = {each.node for each in sums}
    knowing = {stands.get(node, node) for node in convs}
    at_work = {stands.get(node, node) for node in {*gaining, *(framed & keeping)}} | adding
    on_frames = {node for node in framed & native if stands.get(node, node) not in knowing}
    values = {stands.get(node, node) for node in framed}
    for value in [node for node in traced.graph.nodes if node in values]:
        if value in knowing:
            value.update_kwarg("margin", margin)
        if value in knowing or value in on_frames:
            _read(traced, value, unframe, (), set(value.users) - knowing - on_frames)
        else:
            _read(traced, value, frame, (margin,), set(value.users) & at_work)
    for node in on_frames:
        wrap(traced, node, modules, OnFrames)
    for value in knowing:
        _leave_bytes(value, modules)


def _leave_bytes(value: fx.Node, modules: dict[str, nn.Module]) -> None:
    """Let a convolution leave bytes for the convolutions in eight bits that read its result in frames, in place."""
    if "margin" not in value.kwargs:
        return
    ranges = {reader: _reads_bytes(reader, value, modules) for reader in value.users}
    known = Counter(each for each in ranges.values() if each is not None)
    if known:
        [(chosen, count)] = known.most_common(1)
        value.update_kwarg("leave", (chosen.scale, chosen.zero, count < len(ranges)))


def _reads_bytes(reader: fx.Node, value: fx.Node, modules: dict[str, nn.Module]) -> InputRange | None:
    """Return the range in which a node reads a value as bytes; None if it reads floats."""
    layer = modules.get(str(reader.target)) if reader.op == "call_module" else None
    if (
        type(layer) is not SparseConv2d
        or layer.backend != "numba"
        or reader.args != (value,)
        or reader.kwargs.get("added") is value
    ):
        return None
    return layer.input_range


def _choose(
    traced: fx.GraphModule,
    modules: dict[str, nn.Module],
    convs: list[fx.Node],
    keeping: set[fx.Node],
    gaining: list[fx.Node],
) -> tuple[set[fx.Node], set[fx.Node], list[_Sum]]:
    """(values to be in frames, values that are computed there if they are, sums that convolutions take over)."""
    touched = changed(traced, modules)
    candidates = _sums(traced, modules, keeping, touched)
    framed = {_input(node) for node in gaining}
    while True:
        before = len(framed)
        sums = [each for each in candidates if framed & {each.result, each.added, _input(each.conv)}]
        framed |= {value for each in sums for value in (each.result, each.added)}
        native = {*convs, *(each.result for each in sums)}
        for node in traced.graph.nodes:
            if node not in native and _keeps_zeros(node, modules) and _input(node) in native:
                native.add(node)
        framed |= {_input(node) for node in framed & native if _keeps_zeros(node, modules)}
        framed |= {_input(node) for node in keeping & framed} | {_input(node) for node in convs} & native
        if len(framed) == before:
            break
    return framed - touched, native, sums


def _sums(
    traced: fx.GraphModule, modules: dict[str, nn.Module], convs: set[fx.Node], touched: set[fx.Node]
) -> list[_Sum]:
    """Return the sums of which one part is the result of such a convolution, and read by nothing else.

    touched: what is changed in place. The convolution will run where the sum did, so it must not read such a value.
    """
    sums: list[_Sum] = []
    for node in traced.graph.nodes:
        if node.op == "call_module" or node.target not in _ADD or node.kwargs or len(node.args) != 2:
            continue
        for conv, added in (node.args, node.args[::-1]):
            alone = conv in convs and only_user(conv) is node and _layer(conv, modules).activation is None
            if not alone or not isinstance(added, fx.Node) or added is conv or {added, _input(conv)} & touched:
                continue
            reader = only_user(node)
            activated = reader if reader is not None and activation(reader, modules) is not None else None
            sums.append(_Sum(node, conv, added, activated))
            break
    return sums


def _read(
    traced: fx.GraphModule, value: fx.Node, function: Callable[..., Any], args: tuple[int, ...], readers: set[fx.Node]
) -> None:
    """Let the readers of a value read function(value, *args)."""
    if readers:
        with traced.graph.inserting_before(next(node for node in traced.graph.nodes if node in readers)):
            copy = call(traced, function, value, *args)
        for reader in readers:
            reader.replace_input_with(value, copy)


def _sparse_conv(node: fx.Node, modules: dict[str, nn.Module]) -> SparseConv2d | None:
    """Return the layer that a node calls, if that is a sparse convolution, with its input as the only argument."""
    layer = modules[str(node.target)] if node.op == "call_module" else None
    alone = len(node.args) == 1 and isinstance(node.args[0], fx.Node) and not node.kwargs
    return layer if type(layer) is SparseConv2d and alone else None


def _layer(node: fx.Node, modules: dict[str, nn.Module]) -> SparseConv2d:
    layer = modules[str(node.target)]
    assert isinstance(layer, SparseConv2d)
    return layer


def _keeps_size(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Return whether the convolution's output is as large as its input, whatever that is."""
    layer = _layer(node, modules)
    axes = zip(layer.kernel_size, layer.padding, layer.dilation, strict=True)
    return layer.stride == (1, 1) and all(2 * padding == dilation * (taps - 1) for taps, padding, dilation in axes)


def _keeps_zeros(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Return whether a node is element-wise and leaves zeros what they are."""
    if not element_wise(node, modules) or not isinstance(node.args[0], fx.Node):
        return False
    function = modules[node.target] if isinstance(node.target, str) else node.target
    return not function(torch.zeros(1, device="cpu"), *node.args[1:], **node.kwargs).any()


def _input(node: fx.Node) -> fx.Node:
    value = node.args[0]
    assert isinstance(value, fx.Node)
    return value
