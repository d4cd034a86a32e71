"""Reference kernels in eight bits: what an `Int8Weight` means, in readable NumPy. Backend "reference"."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.formats import copy_packed, unpack
from sparse_kernels.formats.int8 import LARGEST, LEAST_STEP, MIDDLE, STEPS, InputRange, Int8Weight
from sparse_kernels.plan_protocol import Array, check_call
from sparse_kernels.reference import build_patches, finish
from sparse_kernels.shapes import Conv2dShape


@dataclass(frozen=True, eq=False)
class ReferenceInt8:
    """The plan of a layer in eight bits on the reference backend.

    shape: of a convolution, or None. weights_only: x is not rounded.
    """

    weight: Int8Weight
    layout: str
    shape: Conv2dShape | None = None
    weights_only: bool = False

    @property
    def kernel(self) -> str:
        """The format's name behind the backend's."""
        return f"reference.{'conv2d.' if self.shape else ''}{self.weight.pattern.format}.int8"

    @property
    def nbytes(self) -> int:
        """Bytes of the weight: one for each that is kept, and the scales."""
        return self.weight.packed.nnz + self.weight.scales.nbytes

    def __call__(
        self, x: Array, bias: Array | None = None, activation: str | None = None, out: Array | None = None
    ) -> Array:
        """Return activation(w @ x + bias), as `Plan` says."""
        (m, k), s = self.weight.shape, self.shape
        if s is None:
            check_call(x, (None, k), bias, activation, out, (None, m), m)
            multiply = multiply_exact_inputs if self.weights_only else multiply_int8
            y = finish(multiply(self.weight, x), bias, activation).T
        else:
            check_call(x, (None, s.c_in, s.h, s.w), bias, activation, out, (None, m, s.out_h, s.out_w), m)
            y = finish(multiply_int8(self.weight, build_patches(x, s).T), bias, activation)
            y = y.reshape(m, len(x), s.out_h, s.out_w).swapaxes(0, 1)
        if out is None:
            return np.ascontiguousarray(y)
        out[:] = y
        return out

    def copy(self) -> ReferenceInt8:
        """Return the same plan with weights of its own."""
        own = replace(self.weight, packed=copy_packed(self.weight.packed), scales=self.weight.scales.copy())
        return replace(self, weight=own)


def multiply_int8(weight: Int8Weight, x: Array) -> Array:
    """Return the product (m, n) of a weight (m, k) and x (n, k), read as bytes; float32."""
    whole = unpack(weight.packed).astype(np.int64)
    q, zero, steps = read_as_bytes(x, weight.input_range)
    sums: Array = (whole @ (q - zero).T).astype(np.float32)
    scales = weight.scales[:, None]
    result: Array = sums * scales * steps if weight.input_range is None else sums * (scales * steps)
    return result


def multiply_exact_inputs(weight: Int8Weight, x: Array) -> Array:
    """Return the product (m, n) of a weight (m, k) and x (n, k), which is not rounded; float32."""
    result: Array = (unpack(weight.packed) @ x.T) * weight.scales[:, None]
    return result


def read_as_bytes(x: Array, reading: InputRange | None) -> tuple[NDArray[np.int64], int, NDArray[np.float32]]:
    """Return q of x (n, k), from 0 to 255, its zero, and what a step of each token is worth, (n,) or (1,).

    Infinity is the end of the range, NaN is q = 0. A token that is read by its own largest value has a step that is
    not finite if that value is not.
    """
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        if reading is None:
            steps = (np.abs(x).max(axis=1, initial=0.0) * np.float32(1 / LARGEST)).astype(np.float32)
            steps = np.where(steps < LEAST_STEP, np.float32(LEAST_STEP), steps)
            zero, inverse = MIDDLE, np.float32(1) / steps[:, None]
        else:
            steps, zero = np.array([reading.scale], np.float32), reading.zero
            inverse = np.array([[1 / reading.scale]], np.float32)
        q = np.clip(np.rint(x * inverse + np.float32(zero)), 0, STEPS)
        return np.nan_to_num(q, nan=0.0).astype(np.int64), zero, steps


def prepare_int8_linear(weight: Int8Weight, layout: str, n: int) -> ReferenceInt8:
    """Return the plan of a linear layer; n changes nothing. Raises ValueError for a layout but token_major."""
    if layout != "token_major":
        raise ValueError(f"layers in eight bits take x token-major, not {layout}")
    return ReferenceInt8(weight, layout)


def prepare_int8_weights(weight: Int8Weight, layout: str, n: int) -> ReferenceInt8:
    """Return the plan of a linear layer whose inputs are not rounded. Raises ValueError as `prepare_int8_linear`."""
    return replace(prepare_int8_linear(weight, layout, n), weights_only=True)


def prepare_int8_conv2d(weight: Int8Weight, shape: Conv2dShape, layout: str) -> ReferenceInt8:
    """Return the plan of a convolution."""
    return ReferenceInt8(weight, layout, shape)
