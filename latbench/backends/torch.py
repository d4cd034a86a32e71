"""torch: `linear` is torch.nn.functional (linear and conv2d), `mkldnn` the modules of torch.utils.mkldnn.

The mkldnn modules hold their weights in oneDNN's blocked order; plain tensors go in and come out, so their time has
the conversion of the activations in it, as it has in a model where only some layers run this way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from latbench.backends import Engine, Layer, Unsupported, copies_for
from latbench.plan import Point
from sparse_kernels.nn import set_weight_matrix
from sparse_kernels.shapes import Conv2dShape, Shape


def prepare(point: Point, layer: Layer) -> Engine:
    """The dense layer in torch; Unsupported for any other pattern."""
    if str(point.pattern) != "dense":
        raise Unsupported(f"torch runs dense layers, not {point.pattern}")
    torch.set_num_threads(point.threads)
    x = torch.from_numpy(layer.x)
    copies = copies_for(layer.weight.nbytes)
    modules = [_module(point.shape, layer) for _ in range(copies)]
    if point.kernel == "mkldnn":
        calls = [_inference(module, x) for module in _to_mkldnn(modules)]
    else:
        calls = [_inference(_functional(module), x) for module in modules]
    kind = "conv2d" if isinstance(point.shape, Conv2dShape) else "linear"
    return Engine(f"torch.{'mkldnn.' if point.kernel == 'mkldnn' else ''}{kind}", layer.weight.nbytes, calls, _array)


def _module(shape: Shape, layer: Layer) -> torch.nn.Linear | torch.nn.Conv2d:
    module: torch.nn.Linear | torch.nn.Conv2d
    if isinstance(shape, Conv2dShape):
        module = torch.nn.Conv2d(
            shape.c_in, shape.c_out, (shape.kh, shape.kw), shape.stride, shape.padding, shape.dilation
        )
    else:
        module = torch.nn.Linear(shape.k, shape.m)
    set_weight_matrix(module, torch.from_numpy(layer.weight))
    with torch.no_grad():
        assert module.bias is not None
        module.bias.copy_(torch.from_numpy(layer.bias))
    return module.eval()


def _to_mkldnn(modules: list[torch.nn.Linear | torch.nn.Conv2d]) -> list[torch.nn.Module]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's module uses torch's own deprecated TorchScript
        from torch.utils import mkldnn

        return [mkldnn.to_mkldnn(module) for module in modules]


def _functional(module: torch.nn.Linear | torch.nn.Conv2d) -> Callable[[torch.Tensor], torch.Tensor]:
    weight, bias = module.weight.detach(), module.bias.detach() if module.bias is not None else None
    if isinstance(module, torch.nn.Linear):
        return lambda x: F.linear(x, weight, bias)
    stride, padding, dilation = module.stride, module.padding, module.dilation
    return lambda x: F.conv2d(x, weight, bias, stride, padding, dilation)


def _inference(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Callable[[], torch.Tensor]:
    def call() -> torch.Tensor:
        with torch.inference_mode():
            return run(x)

    return call


def _array(y: torch.Tensor) -> np.ndarray:
    return y.numpy()
