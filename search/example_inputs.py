"""The inputs that a task's model is called with: positional arguments, or keywords.

Tensors may lie in tuples, lists and mappings. Every other value (None, a number, a flag) is handed on as it is. The
batch is the first dimension of the first tensor that has one, in the order of the arguments.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ExampleInputs:
    """The arguments and keywords of one call of a model."""

    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def call(self, model: Callable[..., Any]) -> Any:
        """Return what the model returns for these inputs."""
        return model(*self.arguments, **self.keywords)

    def tensors(self) -> list[Tensor]:
        """Return all tensors, in order."""
        return [tensor for _, tensor in self._walk()]

    def map_tensors(self, function: Callable[[Tensor], Any]) -> ExampleInputs:
        """Return the same inputs with `function(tensor)` in place of each tensor."""
        keywords = {name: _map(value, function) for name, value in self.keywords.items()}
        return ExampleInputs(tuple(_map(value, function) for value in self.arguments), keywords)

    def find_batch(self) -> tuple[str, int] | None:
        """Return the place and the size of the batch; None without a tensor that has a dimension."""
        return next(((place, len(tensor)) for place, tensor in self._walk() if tensor.ndim), None)

    def name_tensors(self) -> list[str]:
        """Return a name for each tensor, in order: that of its keyword, or input_1, input_2, ... for arguments."""
        places = (place.removeprefix("keyword ").replace("argument ", "input_") for place, _ in self._walk())
        return [re.sub(r"\W+", "_", place).strip("_") for place in places]

    @property
    def batch(self) -> int:
        """Size of the batch. `Task.example` makes sure that there is one."""
        found = self.find_batch()
        assert found is not None
        return found[1]

    def describe(self) -> Any:
        """Return the inputs with shapes in place of tensors, for a file: a list, or a mapping of keywords."""
        return _describe(dict(self.keywords) if self.keywords else list(self.arguments))

    def describe_tensors(self) -> dict[str, str]:
        """Return the shape and the element type of each tensor, such as 16x1x8x8 float32, by its place."""
        return {
            place: f"{'x'.join(map(str, tensor.shape))} {str(tensor.dtype).removeprefix('torch.')}"
            for place, tensor in self._walk()
        }

    def _walk(self) -> Iterator[tuple[str, Tensor]]:
        for number, value in enumerate(self.arguments, start=1):
            yield from _walk(value, f"argument {number}")
        for name, value in self.keywords.items():
            yield from _walk(value, f"keyword {name}")


class TensorCall(NamedTuple):
    """A model whose arguments are `tensors`, for exporters. Names of its layers begin with `prefix`."""

    model: nn.Module
    tensors: tuple[Tensor, ...]
    prefix: str


def convert_to_tensor_call(model: nn.Module, example: ExampleInputs) -> TensorCall:
    """Return the model as it is if its inputs are positional tensors; else one that puts tensors in their places."""
    if not example.keywords and all(torch.is_tensor(value) for value in example.arguments):
        return TensorCall(model, example.arguments, "")
    return TensorCall(_PlacedTensors(model, example).eval(), tuple(example.tensors()), "model.")


class _PlacedTensors(nn.Module):
    """A model that takes the tensors of its inputs one by one; all other values are those of the example."""

    def __init__(self, model: nn.Module, example: ExampleInputs) -> None:
        super().__init__()
        self.model = model
        self._example = example

    def forward(self, *tensors: Tensor) -> Any:
        left = iter(tensors)
        return self._example.map_tensors(lambda _: next(left)).call(self.model)


def list_tensors(output: Any) -> list[Tensor]:
    """List the tensors in what a model returns, in order: in tuples, lists and mappings."""
    if torch.is_tensor(output):
        return [output]
    parts = output.values() if isinstance(output, Mapping) else output if isinstance(output, list | tuple) else ()
    return [tensor for part in parts for tensor in list_tensors(part)]


def _walk(value: Any, place: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the place and the tensor of each tensor in a value."""
    if torch.is_tensor(value):
        yield place, value
    elif isinstance(value, Mapping):
        for key in value:
            yield from _walk(value[key], f"{place}[{key!r}]")
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _walk(part, f"{place}[{number}]")


def _map(value: Any, function: Callable[[Tensor], Any]) -> Any:
    if torch.is_tensor(value):
        return function(value)
    if isinstance(value, Mapping):
        parts = {key: _map(value[key], function) for key in value}
        if type(value) is dict:
            return parts
        changed: Any = copy.copy(value)  # of its own class, whose attributes a model may read
        for key, part in parts.items():
            changed[key] = part
        return changed
    if isinstance(value, list | tuple):
        items = [_map(part, function) for part in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _describe(value: Any) -> Any:
    if torch.is_tensor(value):
        return list(value.shape)
    if isinstance(value, Mapping):
        return {str(key): _describe(value[key]) for key in value}
    if isinstance(value, list | tuple):
        return [_describe(part) for part in value]
    return value if value is None or isinstance(value, bool | int | float | str) else type(value).__name__
