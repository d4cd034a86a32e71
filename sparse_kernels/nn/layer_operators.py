"""Sparse layers as operators of torch, for all that traces, exports, compiles or transforms a model.

    sparse_kernels::linear(x, arrays, bias, description) -> y
    sparse_kernels::convolution(x, arrays, bias, description) -> y

An operator takes the packed weight's arrays as tensors, and a text that says what they are. So a traced, compiled or
exported graph holds the weights itself: it can be saved, and loaded by a process that imports `sparse_kernels.nn`.
In the process that made it, the layer that owns the arrays is found again, with its plans.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sparse_kernels.nn.sparse_layer import LAYERS, ONE_WEIGHT, SparseLayer
from sparse_kernels.tensors.plain_tensors import has_tangent

Versions = list[int | None]


class _Rebuilt(NamedTuple):
    """A layer that was made for arrays without one, and what they were then."""

    layer: SparseLayer
    description: str
    versions: Versions


_rebuilt = WeakTensorKeyDictionary()


def find_layer(arrays: list[Tensor], bias: Tensor | None, description: str) -> SparseLayer:
    """Return the layer that owns these arrays; one that is made of them where there is none, or they have changed."""
    tensors = arrays if bias is None else [*arrays, bias]
    versions = [None if tensor.is_inference() else tensor._version for tensor in tensors]
    reference = LAYERS.get(arrays[0])
    layer: SparseLayer | None = reference() if reference is not None else None
    if layer is not None and layer.is_made_of(arrays, bias, description):
        layer.note_versions(versions)
        return layer
    found: _Rebuilt | None = _rebuilt.get(arrays[0])
    if found is None or (found.description, found.versions) != (description, versions):
        kind = SparseLayer.kinds[_read(description)["kind"]]
        found = _rebuilt[arrays[0]] = _Rebuilt(kind.rebuild(arrays, bias, description), description, versions)
    return found.layer


def _multiply(x: Tensor, arrays: list[Tensor], bias: Tensor | None, description: str) -> Tensor:
    _refuse_onnx()
    result: Tensor = find_layer(arrays, bias, description).compute(x)
    return result


def _shape(x: Tensor, arrays: list[Tensor], bias: Tensor | None, description: str) -> Tensor:
    _refuse_onnx()
    known = _read(description)
    return SparseLayer.kinds[known["kind"]].fake_result(x, known)


@cache
def _read(description: str) -> dict[str, Any]:
    known: dict[str, Any] = json.loads(description)
    return known


@torch.library.custom_op("sparse_kernels::linear", mutates_args=())
def apply_linear(x: Tensor, arrays: list[Tensor], bias: Tensor | None, description: str) -> Tensor:
    """Return the result of a sparse linear layer for x (..., k)."""
    return _multiply(x, arrays, bias, description)


@torch.library.custom_op("sparse_kernels::convolution", mutates_args=())
def apply_convolution(x: Tensor, arrays: list[Tensor], bias: Tensor | None, description: str) -> Tensor:
    """Return the result of a sparse convolution for x (batch, c_in, ...)."""
    return _multiply(x, arrays, bias, description)


apply_linear.register_fake(_shape)
apply_convolution.register_fake(_shape)


@apply_linear.register_vmap
def _(
    info: Any, in_dims: Any, x: Tensor, arrays: list[Tensor], bias: Tensor | None, description: str
) -> tuple[Tensor, int | None]:
    at = _find_batch(in_dims)
    return apply_linear(x.movedim(at, 0), arrays, bias, description), 0


@apply_convolution.register_vmap
def _(
    info: Any, in_dims: Any, x: Tensor, arrays: list[Tensor], bias: Tensor | None, description: str
) -> tuple[Tensor, int | None]:
    x = x.movedim(_find_batch(in_dims), 0)
    if x.ndim == _read(description)["dimensions"]:  # single images, which make a batch
        return apply_convolution(x, arrays, bias, description), 0
    y = apply_convolution(x.flatten(0, 1), arrays, bias, description)
    return y.unflatten(0, x.shape[:2]), 0


def _find_batch(in_dims: Any) -> int:
    """Return the axis of x that vmap maps; refuse weights that differ along it."""
    at, arrays, bias, _ = in_dims
    if any(each is not None for each in arrays) or bias is not None:
        raise RuntimeError(ONE_WEIGHT)
    return int(at)


def call_operator(operator: Any, layer: SparseLayer, x: Tensor) -> Tensor:
    """Return the result for a tensor that kernels may not read by address, through torch's dispatcher.

    Raises RuntimeError for a tensor with a forward-mode derivative: a sparse layer would drop it.
    """
    if has_tangent(x):
        raise RuntimeError("sparse layers are for inference: they compute no derivatives, forward-mode ones neither")
    result: Tensor = operator(x, *layer.operands())
    return result


def _refuse_onnx() -> None:
    """Raise RuntimeError if an exporter to ONNX is at work: both of torch's run operators on their way."""
    if torch.onnx.is_in_onnx_export():
        raise RuntimeError(
            "a sparse layer has no ONNX form: export the pruned model before it is converted, as "
            "`latbench prune --onnx` does"
        )
