"""What every plan does with the arguments of a call before a kernel may have them."""

from __future__ import annotations

import math

import numpy as np

from sparse_kernels.cpu.scratch import aligned
from sparse_kernels.plan import ACTIVATIONS, Array, check_call

# Elements from which on results start at a cache line: NumPy puts large arrays 16 bytes behind one, every vector that
# is stored then crosses two, and a layer of 3072 outputs takes a tenth longer.
LARGE = 2**16


def arguments(
    x: Array,
    x_shape: tuple[int | None, ...],
    bias: Array | None,
    activation: str | None,
    out: Array | None,
    y_shape: tuple[int | None, ...],
    features: int,
) -> tuple[Array, Array, Array, int]:
    """(x, y, bias, code of the activation) as kernels take them; refuses what `check_call` refuses.

    x and bias are C-contiguous, copied where they are not; y is `out` where given; no bias is `features` zeros.
    """
    check_call(x, x_shape, bias, activation, out, y_shape, features)
    free = x.shape[x_shape.index(None)]
    y = _empty([free if length is None else length for length in y_shape]) if out is None else out
    bias = np.zeros(features, np.float32) if bias is None else np.ascontiguousarray(bias)
    return np.ascontiguousarray(x), y, bias, ACTIVATIONS.index(activation)


def _empty(shape: list[int]) -> Array:
    """Room for a result, from the start of a cache line on where it is large."""
    size = math.prod(shape)
    return aligned(size).reshape(shape) if size > LARGE else np.empty(shape, np.float32)
