"""Swap sparse layers into a torch model and fold into them what follows: BatchNorm, bias, ReLU, GELU.

On a CPU attention without a mask is swapped for `nn.attention` too: torch's may take as long as all of the layers.

Folding needs to know that a layer's output goes nowhere else, which only a graph tells. So the model, or where it
cannot be traced the largest parts of it that can, becomes a torch.fx GraphModule; a traced part is kept only if it
gives the same result as the original on the example inputs. Layers in parts that resist are swapped without folding.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from sparse_kernels.nn import SparseConv2d, SparseLinear, attention, refuses
from sparse_kernels.patterns import Pattern


@dataclass(frozen=True)
class Choice:
    """What a layer becomes: its pattern and its mask (m, k), True where a weight is kept; None keeps all."""

    pattern: Pattern
    mask: np.ndarray | None = None


def convert(
    model: nn.Module,
    choices: Mapping[str, Choice],
    example_inputs: tuple[Any, ...],
    *,
    backend: str = "numba",
    tune: bool = False,
) -> nn.Module:
    """A copy of `model` for inference in which every named layer runs its sparse kernel.

    `choices` maps the names of Linear and Conv2d modules to their patterns; other layers stay torch's own, with
    BatchNorm folded where it follows directly. `example_inputs` are what the model is called with: they prove that
    the traced model is the same function. `tune`: linear layers try a few kernels at their first call and keep the
    fastest, backend `numba` only. Raises ValueError for a name that is no prunable layer.
    """
    model = copy.deepcopy(model).eval()
    modules = dict(model.named_modules())
    for name in choices:
        if name not in modules:
            raise ValueError(f"the model has no layer {name!r}")
        if (reason := refuses(modules[name])) is not None:
            raise ValueError(f"layer {name!r}: {reason}")
    calls = _record_calls(model, example_inputs)
    return _convert_part(model, "", dict(choices), calls, backend, tune)


def _convert_part(
    part: nn.Module, path: str, choices: dict[str, Choice], calls: dict[str, _Call], backend: str, tune: bool
) -> nn.Module:
    """Convert `part`, found at `path`, whole if it can be traced, else child by child."""
    prefix = f"{path}." if path else ""
    if path in choices:
        return _sparse(part, choices[path], None, backend, tune)
    if not any(True for _ in part.children()) or path not in calls:
        return part
    traced = _trace(part, calls[path])
    if traced is not None:
        inside = {name.removeprefix(prefix): c for name, c in choices.items() if name.startswith(prefix)}
        _swap(traced, inside, backend, tune)
        return traced
    for name, child in list(part.named_children()):
        setattr(part, name, _convert_part(child, prefix + name, choices, calls, backend, tune))
    return part


# ------------------------------------------------------------------------------------------------ tracing


@dataclass(frozen=True)
class _Call:
    """One call of a module in the example run."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


def _record_calls(model: nn.Module, example_inputs: tuple[Any, ...]) -> dict[str, _Call]:
    """The first call of each module that has children, in a run on the example inputs."""
    calls: dict[str, _Call] = {}
    handles = []
    for name, module in model.named_modules():
        if not any(True for _ in module.children()):
            continue

        def remember(_: nn.Module, args: Any, kwargs: Any, result: Any, name: str = name) -> None:
            # Modules may change their inputs in place (ReLU(inplace=True)), so what they saw is copied.
            calls.setdefault(name, _Call(copy.deepcopy(args), copy.deepcopy(kwargs), copy.deepcopy(result)))

        handles.append(module.register_forward_hook(remember, with_kwargs=True))
    try:
        with torch.no_grad():
            model(*copy.deepcopy(example_inputs))
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _trace(part: nn.Module, call: _Call) -> fx.GraphModule | None:
    """The part as a graph with its norms folded, as far as that is the same function; None if none is."""
    for fold in (True, False):
        try:
            traced = fx.symbolic_trace(copy.deepcopy(part))
            if fold:
                _fold_norms(traced)
            with torch.no_grad():
                result = traced(*copy.deepcopy(call.args), **copy.deepcopy(call.kwargs))
        except Exception:  # noqa: BLE001 - tracing runs foreign code on stand-in values: any failure means "cannot"
            continue
        if _same(result, call.result):
            return traced
    return None


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        # Folding a norm into a layer moves roundings: a few of them, in the tensor's own type.
        coarse = 16 * torch.finfo(a.dtype).eps if a.is_floating_point() else 0.0
        return torch.allclose(a, b, rtol=max(1e-4, coarse), atol=max(1e-5, coarse), equal_nan=True)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return type(a) is type(b) and bool(a == b)


# ------------------------------------------------------------------------------------------------ folding


def _fold_norms(traced: fx.GraphModule) -> None:
    """Fold each BatchNorm that is the only reader of a Linear or Conv2d into that layer, in place."""
    modules = dict(traced.named_modules())
    norms = _called_once(traced, modules, nn.BatchNorm1d | nn.BatchNorm2d)
    for node in _called_once(traced, modules, nn.Linear | nn.Conv2d):
        norm = _only_user(node)
        if norm not in norms:
            continue
        name, layer = str(node.target), modules[str(node.target)]
        fuse = fuse_linear_bn_eval if isinstance(layer, nn.Linear) else fuse_conv_bn_eval
        traced.set_submodule(name, fuse(layer, modules[str(norm.target)]))
        _erase(traced, norm, node)
    _tidy(traced)


def _swap(traced: fx.GraphModule, choices: Mapping[str, Choice], backend: str, tune: bool) -> None:
    """Replace the chosen layers by sparse ones, in place, each with the activation that alone reads it."""
    modules = dict(traced.named_modules())
    once = _called_once(traced, modules, nn.Linear | nn.Conv2d)
    activations = {}
    for node in once:
        reader = _only_user(node)
        if node.target in choices and reader is not None and (kind := _activation(reader, modules)) is not None:
            activations[node.target] = kind
            _erase(traced, reader, node)
    for name, choice in choices.items():
        traced.set_submodule(name, _sparse(modules[name], choice, activations.get(name), backend, tune))
    if choices and backend == "numba":
        _swap_attention(traced)
    _tidy(traced)


def _swap_attention(traced: fx.GraphModule) -> None:
    """Let `attention` do what torch's function does, where it is called with q, k, v and at most a scale."""
    for node in traced.graph.nodes:
        if node.op != "call_function" or node.target is not F.scaled_dot_product_attention or len(node.args) != 3:
            continue
        settings = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "enable_gqa": False, **node.kwargs}
        scale = settings.pop("scale", None)
        if list(settings.values()) == [None, 0.0, False, False] and (scale is None or isinstance(scale, float)):
            node.target, node.kwargs = attention, {"scale": scale}


def _sparse(module: nn.Module, choice: Choice, activation: str | None, backend: str, tune: bool) -> nn.Module:
    if isinstance(module, nn.Linear):
        return SparseLinear.from_dense(
            module, choice.pattern, choice.mask, activation=activation, backend=backend, tune=tune
        )
    assert isinstance(module, nn.Conv2d)
    return SparseConv2d.from_dense(module, choice.pattern, choice.mask, activation=activation, backend=backend)


def _called_once(traced: fx.GraphModule, modules: dict[str, nn.Module], kind: Any) -> list[fx.Node]:
    """The nodes that call a module of this kind which nothing else in the graph calls."""
    nodes = [node for node in traced.graph.nodes if node.op == "call_module"]
    calls = Counter(node.target for node in nodes)
    return [node for node in nodes if calls[node.target] == 1 and isinstance(modules[node.target], kind)]


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _activation(node: fx.Node, modules: dict[str, nn.Module]) -> str | None:
    """The name of the activation that this node is, if a kernel can run it in its epilogue."""
    if node.op == "call_module":
        module = modules[str(node.target)]
        if isinstance(module, nn.ReLU):
            return "relu"
        return "gelu" if isinstance(module, nn.GELU) and module.approximate == "none" else None
    if node.target in (F.relu, torch.relu, torch.relu_, "relu", "relu_"):
        return "relu"
    return "gelu" if node.target is F.gelu and node.kwargs.get("approximate", "none") == "none" else None


def _erase(traced: fx.GraphModule, node: fx.Node, source: fx.Node) -> None:
    """Drop `node`; who read it reads `source`."""
    node.replace_all_uses_with(source)
    traced.graph.erase_node(node)


def _tidy(traced: fx.GraphModule) -> None:
    traced.delete_all_unused_submodules()
    traced.graph.lint()
    traced.recompile()
