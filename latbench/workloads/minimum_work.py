"""The least work of a layer: operations and inputs that no engine can leave out.

Taps of a convolution that fall on its padding need no operation, and inputs that no kept weight reaches need not be
read. A ceiling that counted them would call fast kernels impossible.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.shapes import Conv2dShape, Shape


def compute_inside_share(shape: Shape) -> float:
    """Return the share of all (output position, tap) pairs that do not fall on padding; 1 for a linear layer."""
    if not isinstance(shape, Conv2dShape):
        return 1.0
    inside = [sum(len(hit) for hit in taps) for taps in _inputs_hit(shape)]
    rows, columns = (len(taps) for taps in _inputs_hit(shape))
    return inside[0] * inside[1] * shape.batch / (rows * columns * shape.n)


def count_inputs_read(shape: Shape, kept: NDArray[np.bool_]) -> int:
    """Return how many elements of the activations the kept weights, bool (m, k), reach."""
    used = kept.any(axis=0)
    if not isinstance(shape, Conv2dShape):
        return int(used.sum()) * shape.n
    read = np.zeros((shape.c_in, shape.h, shape.w), bool)
    by_row, by_column = _inputs_hit(shape)
    taps = used.reshape(shape.kh, shape.kw, shape.c_in)
    for r, rows in enumerate(by_row):
        for s, columns in enumerate(by_column):
            read[np.ix_(np.flatnonzero(taps[r, s]), rows, columns)] = True
    return int(read.sum()) * shape.batch


def _inputs_hit(shape: Conv2dShape) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int64]]]:
    """Return the inputs of every tap along height, and along width, over all output positions."""
    along = []
    for axis, (size, taps) in enumerate(((shape.h, shape.kh), (shape.w, shape.kw))):
        stride, padding, dilation = shape.stride[axis], shape.padding[axis], shape.dilation[axis]
        outputs = (size + 2 * padding - dilation * (taps - 1) - 1) // stride + 1
        starts = np.arange(outputs) * stride - padding
        hits = [starts + dilation * tap for tap in range(taps)]
        along.append([hit[(hit >= 0) & (hit < size)] for hit in hits])
    return along[0], along[1]
