"""Reference kernels: what every format means, in readable NumPy. Backend "reference", float32, feature-major inside.

A convolution is an implicit GEMM whose input patches are written out, as `build_patches` says.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparse_kernels.formats import (
    BlockWeight,
    CSRWeight,
    DenseWeight,
    NMWeight,
    Packed,
    VectorWeight,
    copy_packed,
)
from sparse_kernels.plan_protocol import Array, check_call
from sparse_kernels.shapes import Conv2dShape


@dataclass(frozen=True, eq=False)
class ReferenceLinear:
    """A linear layer's plan on the reference backend."""

    packed: Packed
    layout: str

    @property
    def kernel(self) -> str:
        """The format's name behind the backend's."""
        return f"reference.{self.packed.pattern.format}"

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight."""
        return self.packed.nbytes

    def __call__(
        self, x: Array, bias: Array | None = None, activation: str | None = None, out: Array | None = None
    ) -> Array:
        """Return activation(w @ x + bias), as `Plan` says."""
        m, k = self.packed.shape
        if self.layout == "feature_major":
            check_call(x, (k, None), bias, activation, out, (m, None), m)
            y = finish(multiply(self.packed, x), bias, activation)
        else:
            check_call(x, (None, k), bias, activation, out, (None, m), m)
            y = finish(multiply(self.packed, x.T), bias, activation).T
        return _into(out, y)

    def copy(self) -> ReferenceLinear:
        """Return the same plan with weights of its own."""
        return ReferenceLinear(copy_packed(self.packed), self.layout)


@dataclass(frozen=True, eq=False)
class ReferenceConv2d:
    """A convolution's plan on the reference backend."""

    packed: Packed
    shape: Conv2dShape
    layout: str

    @property
    def kernel(self) -> str:
        """The format's name behind the backend's."""
        return f"reference.conv2d.{self.packed.pattern.format}"

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight."""
        return self.packed.nbytes

    def __call__(
        self, x: Array, bias: Array | None = None, activation: str | None = None, out: Array | None = None
    ) -> Array:
        """Return activation(convolution of x (batch, c_in, h, w) + bias), as `Plan` says."""
        s = self.shape
        check_call(x, (None, s.c_in, s.h, s.w), bias, activation, out, (None, s.c_out, s.out_h, s.out_w), s.c_out)
        y = finish(multiply(self.packed, build_patches(x, s)), bias, activation)
        return _into(out, y.reshape(s.c_out, len(x), s.out_h, s.out_w).swapaxes(0, 1))

    def copy(self) -> ReferenceConv2d:
        """Return the same plan with weights of its own."""
        return ReferenceConv2d(copy_packed(self.packed), self.shape, self.layout)


def prepare_reference_linear(packed: Packed, layout: str, n: int) -> ReferenceLinear:
    """Return the plan of a linear layer; n changes nothing."""
    return ReferenceLinear(packed, layout)


def prepare_conv2d(packed: Packed, shape: Conv2dShape, layout: str) -> ReferenceConv2d:
    """Return the plan of a convolution."""
    return ReferenceConv2d(packed, shape, layout)


def multiply(packed: Packed, x: Array) -> Array:
    """Return w (m, k) @ x float32 (k, n), float32 (m, n), each format as it is stored."""
    match packed:
        case DenseWeight():
            return packed.values @ x
        case CSRWeight():
            return _csr(packed, x)
        case NMWeight():
            return _nm(packed, x)
        case BlockWeight():
            return _block(packed, x)
        case VectorWeight():
            return _vector(packed, x)
    raise TypeError(f"a packed weight is needed, not {type(packed).__name__}")


def build_patches(x: np.ndarray, shape: Conv2dShape) -> np.ndarray:
    """Return what each output position reads of x (batch, c_in, h, w), zero outside: (kh*kw*c_in, batch*out_h*out_w).

    Row (r*kw + s)*c_in + c, column (image*out_h + i)*out_w + j. The dtype is that of x, the batch is that of x.
    """
    (down, right), (step_h, step_w), (apart_h, apart_w) = shape.padding, shape.stride, shape.dilation
    padded = np.pad(x, ((0, 0), (0, 0), (down, down), (right, right)))
    taps = np.empty((shape.kh, shape.kw, shape.c_in, len(x), shape.out_h, shape.out_w), x.dtype)
    for r in range(shape.kh):
        for s in range(shape.kw):
            rows = r * apart_h + step_h * np.arange(shape.out_h)
            columns = s * apart_w + step_w * np.arange(shape.out_w)
            taps[r, s] = padded[:, :, rows[:, None], columns].swapaxes(0, 1)
    return taps.reshape(shape.k, len(x) * shape.out_h * shape.out_w)


def finish(y: np.ndarray, bias: np.ndarray | None, activation: str | None) -> np.ndarray:
    """Return activation(y (m, n) + bias (m,)) in the dtype of y.

    activation: None, relu, or gelu = y/2 * (1 + erf(y / sqrt 2)).
    """
    if bias is not None:
        y = y + bias[:, None]
    if activation == "relu":
        y = np.maximum(y, 0)
    if activation == "gelu":
        from scipy.special import erf  # imported here, or every process that measures would import it

        y = y * (y.dtype.type(0.5) * (1 + erf(y * y.dtype.type(np.sqrt(0.5)))))
    return y


def _csr(packed: CSRWeight, x: Array) -> Array:
    y = np.zeros((packed.shape[0], x.shape[1]), np.float32)
    for row, (start, stop) in enumerate(zip(packed.indptr, packed.indptr[1:], strict=False)):
        y[row] = packed.values[start:stop] @ x[packed.indices[start:stop]]
    return y


def _nm(packed: NMWeight, x: Array) -> Array:
    y = np.zeros((packed.shape[0], x.shape[1]), np.float32)
    _, groups, keep = packed.values.shape
    for group in range(groups):
        for slot in range(keep):
            columns = group * packed.pattern.of + packed.offsets[:, group, slot].astype(np.int64)
            # An empty slot has value 0. It adds nothing, even where x is infinite.
            values = packed.values[:, group, slot, None]
            y += np.where(values == 0, np.float32(0), values * x[columns])
    return y


def _block(packed: BlockWeight, x: Array) -> Array:
    m = packed.shape[0]
    _, rows, cols = packed.values.shape
    y = np.zeros((m, x.shape[1]), np.float32)
    for block_row, (start, stop) in enumerate(zip(packed.indptr, packed.indptr[1:], strict=False)):
        of_row = y[block_row * rows : (block_row + 1) * rows]
        for block in range(start, stop):
            column = packed.indices[block] * cols
            of_column = x[column : column + cols]
            of_row += packed.values[block, : len(of_row), : len(of_column)] @ of_column
    return y


def _vector(packed: VectorWeight, x: Array) -> Array:
    y = np.zeros((packed.shape[0], x.shape[1]), np.float32)
    groups = packed.row_ids.reshape(-1, packed.pattern.v)
    for rows, start, stop in zip(groups, packed.indptr, packed.indptr[1:], strict=False):
        real = rows >= 0
        y[rows[real]] = packed.values[start:stop, real].T @ x[packed.indices[start:stop]]
    return y


def _into(out: Array | None, y: Array) -> Array:
    if out is None:
        return np.ascontiguousarray(y)
    out[:] = y
    return out
