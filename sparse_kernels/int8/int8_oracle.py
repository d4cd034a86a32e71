"""The right result of a layer in eight bits, and how far from it a right kernel may be.

A kernel reads each x as the whole number q from 0 to 255 that is nearest to x / scale + zero. It sums whole numbers
exactly, so there is one right sum.

What follows the sum is float32. It rounds at most seven times by u = 2**-24 of |sum| * scale and |bias| (Higham 2002,
section 3.1): the sum as a float, what 1 is worth, their product, a token's step (twice), the product with it, and the
bias.

Only where x lies between two steps, nearly in the middle, are both right: a kernel multiplies by 1 / scale, rounded.
Such an x may shift the result by what a step of it is worth. Tests whose x lie on steps leave no such room.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.formats import unpack
from sparse_kernels.formats.int8 import LARGEST, LEAST_STEP, MIDDLE, STEPS, Int8Weight
from sparse_kernels.oracle import GELU_EVALUATION, GELU_SLOPE, UNIT_ROUNDOFF, compare_results
from sparse_kernels.reference import build_patches, finish
from sparse_kernels.shapes import Conv2dShape

ROUNDINGS = 7
"""Of a result, as the module says."""

TEN_DEVIATIONS = 10 * (2 / 12) ** 0.5
"""Of the difference of two roundings to a step, each off by up to half of one."""

READING_ERROR = 4 * STEPS * UNIT_ROUNDOFF
"""How far x / scale + zero may be from what a kernel computes, in steps: four roundings of at most 255."""


def check_int8(
    y: np.ndarray,
    weight: Int8Weight,
    x: np.ndarray,
    *,
    bias: np.ndarray | None = None,
    activation: str | None = None,
    slack: float = 0.0,
) -> float:
    """Raise WrongResult unless y (n, m) is the layer's result for x (n, k), both token-major.

    slack: 1 allows another library to round each x to another step than this project does, 0 does not. Then errors
    of a result are sums of independent errors of steps; ten standard deviations of that sum are allowed. Returns the
    largest error relative to the scale on which float32 rounds.
    """
    expected, bound, scale = _expected(weight, x, bias, activation, slack)
    return compare_results(y.T, expected, bound, scale)


def check_int8_conv2d(
    y: np.ndarray,
    weight: Int8Weight,
    shape: Conv2dShape,
    x: np.ndarray,
    *,
    bias: np.ndarray | None = None,
    activation: str | None = None,
    slack: float = 0.0,
) -> float:
    """Return the same for a convolution: x (batch, c_in, h, w), y (batch, c_out, out_h, out_w)."""
    columns = y.swapaxes(0, 1).reshape(shape.c_out, -1)
    patches = np.ascontiguousarray(build_patches(x, shape).T)
    return compare_results(columns, *_expected(weight, patches, bias, activation, slack))


def _expected(
    weight: Int8Weight, x: np.ndarray, bias: np.ndarray | None, activation: str | None, slack: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return what y (m, n) must be, how far from it y may be, and the scale of its rounding errors."""
    whole = unpack(weight.packed).astype(np.float64)
    x = x.astype(np.float64)
    if weight.input_range is None:
        zero = MIDDLE
        steps = np.maximum(np.abs(x).max(axis=1, initial=0.0) / LARGEST, LEAST_STEP)[:, None]
    else:
        zero = weight.input_range.zero
        steps = np.full((len(x), 1), float(np.float32(weight.input_range.scale)))
    place = np.clip(x / steps + zero, 0, STEPS)
    q = np.rint(place)
    unsure = np.abs(np.abs(place - q) - 0.5) <= READING_ERROR
    worth = weight.scales.astype(np.float64)[:, None] * steps.T
    sums = whole @ (q - zero).T
    added = None if bias is None else bias.astype(np.float64)
    before = finish(sums * worth, added, None)
    scale = finish(np.abs(sums) * worth, None if added is None else np.abs(added), None)
    gamma = ROUNDINGS * UNIT_ROUNDOFF / (1 - ROUNDINGS * UNIT_ROUNDOFF)
    other_steps = (np.abs(whole) @ unsure.T) * worth
    bound = gamma * (scale + other_steps) + other_steps
    bound += slack * TEN_DEVIATIONS * np.sqrt((whole**2).sum(axis=1, keepdims=True)) * worth
    if activation == "gelu":
        bound = GELU_SLOPE * bound + GELU_EVALUATION * (np.abs(before) + bound)
    return finish(before, None, activation), bound, scale
