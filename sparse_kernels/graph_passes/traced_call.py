"""Graphs of modules that torch.fx alone cannot trace, for calls of the form that the example has.

torch.fx follows one way through a module. It stops where the code asks for the number of dimensions, or compares
sizes, and takes arguments that were left out for given ones. Modules of Transformers do all of that. Here each value
of the graph has the example's value beside it:

- Arguments that are no tensors, such as None, are constants.
- Shapes are as long as the example's; their sizes stay open.
- A comparison has the example's answer, and the graph asks for the same answer in each call.

A call of another form, or with another answer, is done by the module's own code, which is left as it was. Tracers and
compilers see that code, too.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import torch
from torch import fx, nn
from torch.fx.proxy import Attribute, TraceError

Form = tuple[Any, ...]
"""What two calls have in common that a graph can do: the kinds of their arguments, and the values of constants."""

_CONSTANTS = (bool, int, float, str, type(None))


class _OtherWay(Exception):
    """A comparison has another answer than in the example."""


def require(answer: Any, expected: bool) -> None:
    """Raise _OtherWay unless a comparison has the answer that a graph was made for."""
    if bool(answer) is not expected:
        raise _OtherWay


@dataclass(frozen=True)
class TracedCall:
    """A graph of what a module computes from the tensors of a call of this form."""

    graph: fx.GraphModule
    form: Form


def follow_call(module: nn.Module, call: TracedCall) -> None:
    """Let a module compute calls of the traced form by the graph, and others by its own code. In place.

    The module gets a class that is derived from its own. Who traces or compiles it sees its own code.
    """
    module.__dict__["traced_call"] = call  # no part of the module: its layers are
    module.__class__ = _derive_class(type(module))  # type: ignore[arg-type]


@cache
def _derive_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of modules that follow a call, derived from their own."""

    @wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call: TracedCall = self.__dict__["traced_call"]
        tensors: list[torch.Tensor] = []
        is_followed = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
        if not is_followed and find_form(args, kwargs, tensors) == call.form:
            with suppress(_OtherWay):
                return call.graph(*tensors)
        return kind.forward(self, *args, **kwargs)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        reduced: Any = nn.Module.__reduce_ex__(self, protocol)
        return _create, (kind,), *reduced[2:]

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {**names, "forward": forward, "__reduce_ex__": reduce})


def _create(kind: type[nn.Module]) -> nn.Module:
    """Return a module without state that follows a call, for copies and pickles."""
    derived = _derive_class(kind)  # type: ignore[arg-type]
    return derived.__new__(derived)


def trace_call(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TracedCall | None:
    """Trace a module with the arguments of a call; None where that is impossible.

    Parameters
    ----------
    module : nn.Module
        The module, converted so far. Its layers are shared with the graph.
    args, kwargs
        The arguments. They are not changed.
    """
    tensors: list[torch.Tensor] = []
    form = find_form(args, kwargs, tensors)
    if form != find_form(args, kwargs, []):
        return None  # an argument is no plain value, and a graph would keep this one
    tracer = _ExampleTracer(copy.deepcopy(args), copy.deepcopy(dict(kwargs)))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            graph = tracer.trace(module)
    except Exception:  # noqa: BLE001 - tracing runs foreign code on stand-in values: any failure means "cannot"
        return None
    asked = [node for node in graph.nodes if node.target is require]
    if asked and any(_changes_values(node, module) for node in graph.nodes):
        return None  # the module would begin with values that the graph has changed
    for node in asked:
        node.meta["is_wrapped"] = True  # a pickled graph is traced anew
    graph._tracer_cls = None  # by a tracer without an example
    return TracedCall(fx.GraphModule(module, graph, type(module).__name__), form)


def find_form(args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: list[torch.Tensor]) -> Form:
    """Return the form of a call, and add its tensors to `tensors` in their order.

    With an argument that is no plain value, such as a cache, no two calls have the same form.
    """

    def describe(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return torch.Tensor, value.ndim, value.dtype
        if isinstance(value, tuple | list) and type(value) in (tuple, list):
            return type(value), *map(describe, value)
        return (type(value), value) if type(value) in _CONSTANTS else object()

    return (*map(describe, args), *((name, describe(value)) for name, value in kwargs.items()))


def _changes_values(node: fx.Node, module: nn.Module) -> bool:
    """Return whether a node changes a value in place."""
    if node.op == "call_module":
        return bool(getattr(module.get_submodule(str(node.target)), "inplace", False))
    name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
    return (
        node.target in (operator.setitem, setattr)
        or (name.endswith("_") and not name.endswith("__"))
        or bool(node.kwargs.get("inplace"))
        or "out" in node.kwargs
    )


class _KnownProxy(fx.Proxy):
    """A value of a graph, beside which the example's value is known."""

    tracer: _ExampleTracer

    def __getattr__(self, name: str) -> _KnownAttribute:
        return _KnownAttribute(self, name)

    def __iter__(self) -> Iterator[Any]:
        return iter([self[i] for i in range(len(self))])  # type: ignore[index]

    def __len__(self) -> int:
        value = self.tracer.values[self.node]
        if not isinstance(value, tuple | list):
            raise TraceError("only the length of a shape, a tuple or a list is the same in every call")
        return len(value)

    def __bool__(self) -> bool:
        value = self.tracer.values[self.node]
        if not isinstance(value, bool):
            raise TraceError("only the answer of a comparison may decide about the way")
        self.tracer.create_proxy("call_function", require, (self, value), {})
        return value


class _KnownAttribute(_KnownProxy, Attribute):
    """An attribute of a value, which may be a method."""


class _ExampleTracer(fx.Tracer):
    """Traces one call, and computes it at the same time. `values`: what each node has in the example."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self._args, self._kwargs = args, kwargs
        self._tensors: list[torch.Tensor] = []
        self._computes = False
        self.values: dict[fx.Node, Any] = {}

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return what stands for a node's value while the module runs."""
        return _KnownProxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module is not opened: torch's own, and layers; opened are graphs of parts."""
        if isinstance(m, fx.GraphModule):
            return any("is_wrapped" in node.meta for node in m.graph.nodes)
        return m.__module__.startswith("sparse_kernels.") or super().is_leaf_module(m, module_qualified_name)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """Return the call with its tensors as placeholders."""

        def place(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                self._tensors.append(value)
                return self.create_proxy("placeholder", f"tensor_{len(self._tensors)}", (), {})
            return type(value)(map(place, value)) if isinstance(value, tuple | list) else value

        args = [place(value) for value in self._args]
        kwargs = {name: place(value) for name, value in self._kwargs.items()}
        return lambda root: root_fn(root, *args, **kwargs), [self.root]

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *more: Any, **named: Any) -> fx.Node:
        """Add a node to the graph, and compute its value."""
        node = super().create_node(kind, target, args, kwargs, *more, **named)
        if kind != "output":
            self._computes = True
            try:
                self.values[node] = self._compute(node)
            finally:
                self._computes = False
        return node

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Add the call of a module to the graph; a module that is called to compute a value just runs."""
        return forward(*args, **kwargs) if self._computes else super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Return an attribute of a module, or what stands for it."""
        return attr_val if self._computes else super().getattr(attr, attr_val, parameter_proxy_cache)

    def _compute(self, node: fx.Node) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
        match node.op:
            case "placeholder":
                return self._tensors[-1]
            case "call_function":
                return node.target(*args, **kwargs)  # type: ignore[operator]
            case "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            case "call_module":
                return self.root.get_submodule(str(node.target))(*args, **kwargs)
            case _:
                return operator.attrgetter(str(node.target))(self.root)
