"""Questions about the graph of a traced model, and edits of it, for all that rewrites graphs."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

_ELEMENT_WISE_MODULES = (
    nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Identity, nn.LeakyReLU, nn.Mish, nn.ReLU, nn.ReLU6,
    nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Tanh,
)  # fmt: skip
_ELEMENT_WISE_FUNCTIONS = (
    F.elu, F.gelu, F.hardsigmoid, F.hardswish, F.hardtanh, F.leaky_relu, F.mish, F.relu, F.relu6, F.selu, F.silu,
    F.sigmoid, F.softplus, F.tanh, torch.relu, torch.sigmoid, torch.tanh,
)  # fmt: skip


def element_wise(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Return whether a node is an element-wise function of its first argument, and takes no other tensor."""
    values = [*node.args[1:], *node.kwargs.values()]
    if len(node.args) == 0 or any(isinstance(value, fx.Node) for value in values):
        return False
    if node.op == "call_module":
        module = modules[str(node.target)]
        return isinstance(module, _ELEMENT_WISE_MODULES) and not hooked(module)
    return node.op == "call_function" and node.target in _ELEMENT_WISE_FUNCTIONS


def hooked(module: nn.Module) -> bool:
    """Return whether a module has hooks, which see its inputs or results: then it stays, and gets torch's tensors."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def called_once(traced: fx.GraphModule, modules: dict[str, nn.Module], kind: Any) -> list[fx.Node]:
    """Return the nodes that call a module of this kind which nothing else in the graph calls."""
    nodes = [node for node in traced.graph.nodes if node.op == "call_module"]
    calls = Counter(node.target for node in nodes)
    return [node for node in nodes if calls[node.target] == 1 and isinstance(modules[node.target], kind)]


def only_user(node: fx.Node) -> fx.Node | None:
    """Return the node that alone reads this one, if there is just one."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def activation(node: fx.Node, modules: dict[str, nn.Module]) -> str | None:
    """Return the name of the activation that this node is, if a kernel can run it in its epilogue."""
    if node.op == "call_module":
        module = modules[str(node.target)]
        if hooked(module):
            return None
        if isinstance(module, nn.ReLU):
            return "relu"
        return "gelu" if isinstance(module, nn.GELU) and module.approximate == "none" else None
    if node.target in (F.relu, torch.relu, torch.relu_, "relu", "relu_"):
        return "relu"
    return "gelu" if node.target is F.gelu and node.kwargs.get("approximate", "none") == "none" else None


def erase(traced: fx.GraphModule, node: fx.Node, source: fx.Node) -> None:
    """Drop `node`; who read it reads `source`."""
    node.replace_all_uses_with(source)
    traced.graph.erase_node(node)


def drop_identities(traced: fx.GraphModule) -> None:
    """Drop the calls that give their input as it is: nn.Identity, and dropout outside of training. In place."""
    modules = dict(traced.named_modules(remove_duplicate=False))
    for node in list(traced.graph.nodes):
        if _is_identity(node, modules) and isinstance(node.args[0], fx.Node):
            erase(traced, node, node.args[0])


def _is_identity(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if not node.args:
        return False
    if node.op == "call_module":
        module = modules[str(node.target)]
        drops = isinstance(module, nn.modules.dropout._DropoutNd) and not module.training
        return (drops or type(module) is nn.Identity) and not hooked(module)
    training = node.kwargs.get("training", node.args[2] if len(node.args) > 2 else True)
    return node.target is F.dropout and training is False


def tidy(traced: fx.GraphModule) -> None:
    """Drop what nothing calls any more, and make the code that runs."""
    traced.delete_all_unused_submodules()
    traced.graph.lint()
    traced.recompile()


def call(traced: fx.GraphModule, function: Callable[..., Any], *args: Any) -> fx.Node:
    """Return a new node that calls a function of ours.

    Pickling traces a model anew; the call stays one node then.
    """
    node = traced.graph.call_function(function, args)
    node.meta["is_wrapped"] = True
    return node


def is_proxy(x: Any) -> bool:
    """Return whether x stands for a value while torch.fx traces a model."""
    return isinstance(x, fx.Proxy)


def record_call(module: nn.Module, x: Any, keywords: Mapping[str, Any]) -> Any:
    """Return what stands for the module's result for a proxy x: the module is one call in the graph."""
    tracer: Any = x.tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(module), (x,), dict(keywords))


def wrap(traced: fx.GraphModule, node: fx.Node, modules: dict[str, nn.Module], kind: type[nn.Module]) -> None:
    """Let kind(function, *further arguments) take the place of the element-wise function or module of a node."""
    function = modules[node.target] if isinstance(node.target, str) else node.target
    name = f"{node.name}_{kind.__name__.lower()}"
    traced.add_submodule(name, kind(function, *node.args[1:], **node.kwargs))
    node.op, node.target, node.args, node.kwargs = "call_module", name, (node.args[0],), {}


def changed(traced: fx.GraphModule, modules: dict[str, nn.Module]) -> set[fx.Node]:
    """Return the values that somebody changes in place while others may still read them, as far as names tell.

    A change reaches whatever a value may be a view or another name of.
    """
    found: set[fx.Node] = set()

    def mark(value: fx.Node, by: fx.Node | None) -> None:
        if value in found:
            return
        if set(value.users) != {by}:
            found.add(value)
        if not _is_new(value, modules):
            for source in value.all_input_nodes:
                mark(source, None)

    for node in traced.graph.nodes:
        if (out := node.kwargs.get("out")) is not None and isinstance(out, fx.Node):
            mark(out, None)
        if mutates(node, modules) and node.args and isinstance(node.args[0], fx.Node):
            mark(node.args[0], node)
    return found


_IN_PLACE = {getattr(operator, name) for name in dir(operator) if name.startswith("i") and name[1:] in dir(operator)}
_NEW_FUNCTIONS = (
    operator.add, operator.sub, operator.mul, operator.truediv, torch.add, torch.sub, torch.mul, torch.div,
    torch.cat, F.conv2d, F.linear, F.max_pool2d, F.avg_pool2d, F.interpolate,
)  # fmt: skip
_NEW_MODULES = (nn.Conv2d, nn.Linear, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.BatchNorm2d, nn.LayerNorm)


def _is_new(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Return whether a node certainly gives memory of its own, and no view or other name of what it reads."""
    if mutates(node, modules) or node.op == "call_method":
        return False
    if node.op == "call_module":
        module = modules[str(node.target)]
        ours = type(module).__module__.startswith("sparse_kernels.")
        return (
            ours
            or isinstance(module, _NEW_MODULES)
            or (element_wise(node, modules) and type(module) is not nn.Identity)
        )
    return node.target in _NEW_FUNCTIONS or element_wise(node, modules)


def mutates(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Return whether a node changes its first argument in place, as far as its name and settings tell."""
    if node.op == "call_module":
        return bool(getattr(modules[str(node.target)], "inplace", False))
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or node.kwargs.get("inplace") is True
    return in_place or name.startswith("__i") or node.target in _IN_PLACE or node.target is operator.setitem
