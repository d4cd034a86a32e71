"""The Hessian of a layer's reconstruction error: H = sum of x x^T over its inputs x on calibration data.

A changed weight matrix W' moves the layer's outputs by exactly |(W' - W) X|^2 = tr((W' - W) H (W' - W)^T). So all
layer-wise methods (reconstruction, errors, saliencies) need H and not the inputs. An input of a convolution is one
unfolded patch, in the order of `weight_matrix`'s columns: (r*kw + s)*c_in + c. H is (k, k) float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold

from latbench.errors import BadData
from search.pruning.forward_hooks import register_forward_hooks
from search.task import CalibratedCalls
from sparse_kernels.prunable_layers import find_geometry, weight_matrix

MEMORY_BYTES = 2**29
"""Memory of all H in one pass: half of the memory of pruning beside twice a model's weights."""

CACHED_BYTES = 2**20
"""Bytes of patches that are cut out of images at a time: about the second-level cache of a core."""


def compute_input_hessians(
    task: CalibratedCalls,
    model: nn.Module,
    layers: Sequence[str],
    batches: Sequence[Any],
    memory_bytes: int = MEMORY_BYTES,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and H of each layer, in order.

    Parameters
    ----------
    task : CalibratedCalls
        The task, whose `loss` calls the model on a batch.
    model : Module
        The dense model.
    layers : sequence of str
        Names of Linear and Conv2d layers.
    batches : sequence
        Calibration batches.
    memory_bytes : int
        Memory of all H in one pass over the batches. A pass serves as many layers as fit, at least one.

    Yields
    ------
    name : str
        Name of the layer.
    hessian : Tensor of shape (k, k)
        H, float64.

    Raises
    ------
    BadData
        A layer's inputs are not finite, or the model never calls it.
    """
    modules = dict(model.named_modules())
    sizes = {name: weight_matrix(modules[name]).shape[1] for name in layers}
    for group in _group_layers(sizes, memory_bytes):
        sums = {name: torch.zeros(sizes[name], sizes[name], dtype=torch.float64) for name in group}
        called: set[str] = set()

        def add(name: str, module: nn.Module, args: tuple[Any, ...], _: Any, sums=sums, called=called) -> None:  # type: ignore[no-untyped-def]
            if args[0].numel():  # an expert may get no token
                called.add(name)
            sums[name] += multiply_inputs(module, args[0].detach())

        with torch.no_grad(), register_forward_hooks(model, {name: partial(add, name) for name in group}):
            for batch in batches:
                task.loss(model, batch)
        for name in group:
            hessian = sums.pop(name)
            if name not in called:
                raise BadData(f"layer {name} is never called on the calibration data of task {task.name}: exclude it")
            if not bool(torch.isfinite(hessian).all()):
                raise BadData(f"layer {name}: its inputs on the calibration data hold NaN or infinite values")
            yield name, hessian


def multiply_inputs(module: nn.Module, x: Tensor) -> Tensor:
    """Return the sum of x x^T over the inputs of the layer's matrix product, (k, k) float64.

    Its products are at least float32, whatever the type of the inputs or a torch.autocast around the layer.
    """
    with torch.autocast(x.device.type, enabled=False):
        return _multiply(module, x.double() if x.dtype == torch.float64 else x.float())


def _multiply(module: nn.Module, x: Tensor) -> Tensor:
    if not _is_convolution(module):
        rows = x.reshape(-1, x.shape[-1])
        return (rows.T @ rows).double()
    x = _as_images(module, x)
    k, positions = _unfold(module, x[:1]).shape[1:]
    # A product of few columns would spend its time on writing the result.
    together = max(CACHED_BYTES // (x.element_size() * k * positions), -(-4 * k // max(positions, 1)))
    total = torch.zeros(k, k, dtype=torch.float64)
    for images in x.split(together):  # patches that stay in a cache are multiplied before they leave it
        columns = _unfold(module, images).transpose(0, 1).flatten(1)
        total += (columns @ columns.T).double()
    channels, taps = x.shape[1], k // x.shape[1]
    return total.view(channels, taps, channels, taps).permute(1, 0, 3, 2).reshape(k, k)


def sum_input_squares(module: nn.Module, x: Tensor) -> Tensor:
    """Return the sum of squares of each input of the layer's matrix product, (k,) float64: the diagonal of its H.

    The patches of all images are added up before they are cut out.
    """
    if _is_convolution(module):
        x = _as_images(module, x).double().square().sum(dim=0, keepdim=True)
        squares: Tensor = extract_input_rows(module, x).sum(dim=0)
        return squares
    return x.reshape(-1, x.shape[-1]).double().square().sum(dim=0)


def extract_input_rows(module: nn.Module, x: Tensor) -> Tensor:
    """Return the inputs of the layer's matrix product as rows (n, k), in the order of `weight_matrix`'s columns."""
    if not _is_convolution(module):
        return x.reshape(-1, x.shape[-1])
    x = _as_images(module, x)
    patches = _unfold(module, x)
    apart = patches.view(len(x), x.shape[1], patches.shape[1] // x.shape[1], patches.shape[2])
    return apart.permute(0, 3, 2, 1).reshape(-1, patches.shape[1])


def _is_convolution(module: nn.Module) -> TypeGuard[nn.Conv1d | nn.Conv2d]:
    """Return whether the inputs of the layer's matrix product are patches of images."""
    return isinstance(module, nn.Conv1d | nn.Conv2d)


def _as_images(module: nn.Module, x: Tensor) -> Tensor:
    """Return the inputs of a convolution as images (batch, c_in, h, w)."""
    if isinstance(module, nn.Conv1d):  # an image of one row
        x = x.unsqueeze(-2)
    return x[None] if x.ndim == 3 else x  # one image without a batch


def _unfold(module: nn.Conv1d | nn.Conv2d, images: Tensor) -> Tensor:
    """Return the patches that a convolution multiplies, (batch, c_in*kh*kw, positions), channel slowest."""
    kernel, stride, padding, dilation = find_geometry(module)
    return unfold(images, kernel, dilation=dilation, padding=padding, stride=stride)


def _group_layers(sizes: dict[str, int], memory_bytes: int) -> Iterator[list[str]]:
    """Group the layers, in order, so that the Hessians of a group fit the memory."""
    group: list[str] = []
    used = 0
    for name, k in sizes.items():
        needed = 8 * k * k
        if group and used + needed > memory_bytes:
            yield group
            group, used = [], 0
        group.append(name)
        used += needed
    if group:
        yield group
