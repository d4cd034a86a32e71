"""The Hessian of a layer's reconstruction error: H = sum of x x^T over its inputs x on calibration data.

A changed weight matrix W' moves the layer's outputs by exactly |(W' - W) X|^2 = tr((W' - W) H (W' - W)^T). So all
layer-wise methods (reconstruction, errors, saliencies) need H and not the inputs. An input of a convolution is one
unfolded patch, in the order of `weight_matrix`'s columns: (r*kw + s)*c_in + c. H is (k, k) float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold

from latbench.errors import BadData
from search.pruning.forward_hooks import register_forward_hooks
from search.task import CalibratedCalls
from sparse_kernels.prunable_layers import find_geometry, weight_matrix

MEMORY_BYTES = 2**29
"""Memory of all H in one pass: half of the memory of pruning beside twice a model's weights."""


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
            called.add(name)
            x = extract_input_rows(module, args[0].detach())
            sums[name] += (x.T @ x).double()

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


def extract_input_rows(module: nn.Module, x: Tensor) -> Tensor:
    """Return the inputs of the layer's matrix product as rows (n, k), in the order of `weight_matrix`'s columns."""
    if not isinstance(module, nn.Conv1d | nn.Conv2d):
        return x.reshape(-1, x.shape[-1])
    (kh, kw), stride, padding, dilation = find_geometry(module)
    if isinstance(module, nn.Conv1d):  # an image of one row
        x = x.unsqueeze(-2)
    if x.ndim == 3:  # one image without a batch
        x = x[None]
    patches = unfold(
        x, (kh, kw), dilation=dilation, padding=padding, stride=stride
    )  # (batch, c_in*kh*kw, positions), channel slowest
    patches = patches.view(x.shape[0], x.shape[1], kh * kw, -1)
    return patches.permute(0, 3, 2, 1).reshape(-1, kh * kw * x.shape[1])


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
