"""Sparse layers for torch models: what a pruned Linear or Conv2d is replaced by, for inference on a CPU.

A layer keeps its packed weight as buffers (so state_dict, deepcopy and pickling work as for any module) and a plan,
which is prepared at the first call and thrown away whenever the buffers change. The plan may hold the weights once
more, in the order its kernel reads them.

    y = SparseLinear.from_dense(linear, VectorWise(32), mask, activation="relu")(x)     # x (..., k) -> y (..., m)
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparse_kernels import prepare, prepare_conv2d
from sparse_kernels.formats import Packed, pack
from sparse_kernels.patterns import Pattern
from sparse_kernels.plan import Plan
from sparse_kernels.shapes import Conv2dShape

ACTIVATIONS = (None, "relu", "gelu")


def weight_matrix(module: nn.Module) -> Tensor:
    """The layer's weight as the matrix that is pruned and multiplied, (m, k).

    A convolution's is (c_out, kh*kw*c_in) with column (r*kw + s)*c_in + c. Shares memory only where torch can.
    """
    weight = _prunable(module).weight.detach()
    return weight if weight.ndim == 2 else weight.permute(0, 2, 3, 1).reshape(weight.shape[0], -1)


def set_weight_matrix(module: nn.Module, matrix: Tensor) -> None:
    """Write a matrix (m, k) of `weight_matrix`'s order back into the layer, in place."""
    weight = _prunable(module).weight
    if matrix.shape != (weight.shape[0], weight[0].numel()):
        raise ValueError(f"a matrix of {tuple(matrix.shape)} does not fit a weight of {tuple(weight.shape)}")
    with torch.no_grad():
        if weight.ndim == 2:
            weight.copy_(matrix)
        else:
            c_out, c_in, kh, kw = weight.shape
            weight.copy_(matrix.reshape(c_out, kh, kw, c_in).permute(0, 3, 1, 2))


def refuses(module: nn.Module) -> str | None:
    """Why this module cannot become a sparse layer, in a sentence; None if it can."""
    if isinstance(module, nn.Linear):
        return None
    if not isinstance(module, nn.Conv2d):
        return f"a {type(module).__name__} has no sparse kernel: only Linear and Conv2d have"
    if module.groups != 1:
        return f"a convolution in {module.groups} groups has no sparse kernel: it stays dense"
    if module.padding_mode != "zeros":
        return f"padding mode {module.padding_mode!r} has no sparse kernel: only zeros have"
    odd_reach = (d * (k - 1) % 2 for d, k in zip(module.dilation, module.kernel_size, strict=True))
    if module.padding == "same" and any(odd_reach):
        return "padding 'same' around an even kernel is asymmetric: no sparse kernel has that"
    return None


class _Sparse(nn.Module):
    """What both layer kinds share: packed buffers, a plan made late, inference only."""

    bias: Tensor | None

    def __init__(self, packed: Packed, bias: Tensor | None, activation: str | None, backend: str) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation {activation!r} is not one of {', '.join(map(str, ACTIVATIONS))}")
        self.shape: tuple[int, int] = packed.shape
        self.pattern: Pattern = packed.pattern
        self.activation = activation
        self.backend = backend
        self._format = type(packed)
        self._settings: dict[str, Any] = {}
        self._arrays: list[str] = []
        for field in dataclasses.fields(packed):
            value = getattr(packed, field.name)
            if isinstance(value, np.ndarray):
                self._arrays.append(field.name)
                self.register_buffer(field.name, torch.from_numpy(value.copy()))
            else:
                self._settings[field.name] = value
        self.register_buffer("bias", None if bias is None else bias.detach().clone().float())
        self._plan: Plan | None = None
        self._prepared_for: object = None

    @property
    def packed(self) -> Packed:
        """The packed weight, built from the buffers."""
        arrays = {name: getattr(self, name).numpy().copy() for name in self._arrays}
        return self._format(**self._settings, **arrays)

    @property
    def kernel(self) -> str | None:
        """Name of the kernel that runs this layer; None before the first call."""
        return None if self._plan is None else self._plan.kernel

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        m, k = self.shape
        return f"{m}x{k}, {self.pattern}, activation={self.activation}, backend={self.backend}"

    def _run(self, plan: Plan, x: Tensor, y: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.numpy()
        plan(x.detach().numpy(), bias=bias, activation=self.activation, out=y.numpy())
        return y

    def _refuse(self, x: Tensor) -> None:
        if torch.is_grad_enabled() and x.requires_grad:
            raise RuntimeError("sparse layers are for inference: call the model under torch.no_grad()")
        if x.dtype != torch.float32 or x.device.type != "cpu":
            raise TypeError(f"sparse layers take float32 tensors on the CPU, not {x.dtype} on {x.device}")

    def _forget_plan(self) -> None:
        self._plan, self._prepared_for = None, None

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        self._forget_plan()
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any) -> None:
        self._forget_plan()
        super()._load_from_state_dict(*args)

    def __getstate__(self) -> dict[str, Any]:
        # A plan holds compiled kernels: copies and pickles make their own.
        return {**self.__dict__, "_plan": None, "_prepared_for": None}


class SparseLinear(_Sparse):
    """`activation(x @ weight.T + bias)` for x (..., k) -> (..., m)."""

    @classmethod
    def from_dense(
        cls,
        linear: nn.Linear,
        pattern: Pattern,
        mask: np.ndarray | None,
        *,
        activation: str | None = None,
        backend: str = "numba",
    ) -> SparseLinear:
        """Pack a Linear's weight under a mask (m, k); mask None keeps every weight (pattern Dense)."""
        return cls(_pack(linear, pattern, mask), linear.bias, activation, backend)

    def forward(self, x: Tensor) -> Tensor:
        """Run the sparse kernel on token-major rows; any leading dimensions, none empty of meaning."""
        self._refuse(x)
        m, k = self.shape
        if x.shape[-1] != k:
            raise ValueError(f"this layer takes {k} features, the input has {x.shape[-1]}: {tuple(x.shape)}")
        rows = x.reshape(-1, k).contiguous()
        if self._plan is None:
            self._plan = prepare(self.packed, self.backend, "token_major", rows.shape[0])
        y = torch.empty(rows.shape[0], m)
        return self._run(self._plan, rows, y).view(*x.shape[:-1], m)


class SparseConv2d(_Sparse):
    """`activation(conv2d(x, weight, bias))` for x (batch, c_in, h, w) -> (batch, c_out, out_h, out_w)."""

    def __init__(
        self,
        packed: Packed,
        bias: Tensor | None,
        activation: str | None,
        backend: str,
        *,
        kernel_size: tuple[int, int],
        stride: tuple[int, int],
        padding: tuple[int, int],
        dilation: tuple[int, int],
    ) -> None:
        super().__init__(packed, bias, activation, backend)
        self.kernel_size, self.stride, self.padding, self.dilation = kernel_size, stride, padding, dilation

    @classmethod
    def from_dense(
        cls,
        conv: nn.Conv2d,
        pattern: Pattern,
        mask: np.ndarray | None,
        *,
        activation: str | None = None,
        backend: str = "numba",
    ) -> SparseConv2d:
        """Pack a Conv2d's weight under a mask (c_out, kh*kw*c_in); mask None keeps every weight."""
        kernel_size = (conv.kernel_size[0], conv.kernel_size[1])
        dilation = (conv.dilation[0], conv.dilation[1])
        return cls(
            _pack(conv, pattern, mask),
            conv.bias,
            activation,
            backend,
            kernel_size=kernel_size,
            stride=(conv.stride[0], conv.stride[1]),
            padding=symmetric_padding(conv),
            dilation=dilation,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Run the sparse kernel; a plan belongs to one input size, so a new size prepares anew."""
        self._refuse(x)
        batch, c_in, h, w = x.shape
        shape = Conv2dShape(
            batch, c_in, h, w, self.shape[0], *self.kernel_size, self.stride, self.padding, self.dilation
        )
        if shape.k != self.shape[1]:
            raise ValueError(f"this layer takes {self.shape[1] // (shape.kh * shape.kw)} channels, not {c_in}")
        if self._plan is None or self._prepared_for != shape:
            self._plan = prepare_conv2d(self.packed, shape, self.backend, "nchw")
            self._prepared_for = shape
        y = torch.empty(batch, self.shape[0], shape.out_h, shape.out_w)
        return self._run(self._plan, x.contiguous(), y)


def symmetric_padding(conv: nn.Conv2d) -> tuple[int, int]:
    """The convolution's zero padding (rows, columns), its words 'valid' and 'same' resolved."""
    if conv.padding == "valid":
        return (0, 0)
    if conv.padding == "same":
        same = [d * (k - 1) // 2 for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        return (same[0], same[1])
    return (int(conv.padding[0]), int(conv.padding[1]))


def _prunable(module: nn.Module) -> nn.Linear | nn.Conv2d:
    if (reason := refuses(module)) is not None:
        raise ValueError(reason)
    assert isinstance(module, nn.Linear | nn.Conv2d)
    return module


def _pack(module: nn.Module, pattern: Pattern, mask: np.ndarray | None) -> Packed:
    weight = weight_matrix(module).to(torch.float32).numpy()
    return pack(np.ascontiguousarray(weight), np.ones(weight.shape, bool) if mask is None else mask, pattern)
