"""What is asked and done, again and again, when the graph of a traced model is rewritten."""

from __future__ import annotations

import operator
from collections import Counter
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
    """Whether a node changes the elements of its first argument, one by one and alike, and takes no other tensor."""
    values = [*node.args[1:], *node.kwargs.values()]
    if len(node.args) == 0 or any(isinstance(value, fx.Node) for value in values):
        return False
    if node.op == "call_module":
        return isinstance(modules[str(node.target)], _ELEMENT_WISE_MODULES)
    return node.op == "call_function" and node.target in _ELEMENT_WISE_FUNCTIONS


def called_once(traced: fx.GraphModule, modules: dict[str, nn.Module], kind: Any) -> list[fx.Node]:
    """The nodes that call a module of this kind which nothing else in the graph calls."""
    nodes = [node for node in traced.graph.nodes if node.op == "call_module"]
    calls = Counter(node.target for node in nodes)
    return [node for node in nodes if calls[node.target] == 1 and isinstance(modules[node.target], kind)]


def only_user(node: fx.Node) -> fx.Node | None:
    """The node that alone reads this one, if there is just one."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def activation(node: fx.Node, modules: dict[str, nn.Module]) -> str | None:
    """The name of the activation that this node is, if a kernel can run it in its epilogue."""
    if node.op == "call_module":
        module = modules[str(node.target)]
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


def tidy(traced: fx.GraphModule) -> None:
    """Drop what nothing calls any more, and make the code that runs."""
    traced.delete_all_unused_submodules()
    traced.graph.lint()
    traced.recompile()


def mutates(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Whether a node changes its first argument in place, as far as its name and settings tell."""
    if node.op == "call_module":
        return bool(getattr(modules[str(node.target)], "inplace", False))
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    in_place_operator = node.target in (operator.iadd, operator.isub, operator.imul, operator.itruediv)
    return in_place_operator or (name.endswith("_") and not name.endswith("__")) or bool(node.kwargs.get("inplace"))
