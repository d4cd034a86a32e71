"""Layouts of x and y, as far as kernels must know them: two, with three small device functions each.

A kernel computes y (m, n) = w (m, k) @ x (k, n) and asks its layout for all else:

- place(source, y, column): where a column of the product is; each thread asks once
- read(source, feature, place): the element of x that this feature and place mean, as float32
- write(y, row, place, value): write an element of y

`source` is a tuple, x first. The functions are inlined into the kernel: nothing is called when it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.numba_cuda.library import cuda, float32
from sparse_kernels.shapes import Conv2dShape


@dataclass(frozen=True)
class ActivationLayout:
    """A name and the three device functions of the module's docstring."""

    name: str
    place: Callable[..., Any]
    read: Callable[..., Any]
    write: Callable[..., Any]


@cuda.jit(device=True, inline="always")
def place_of_token(source, y, column):  # type: ignore[no-untyped-def]
    """Return the column, which is the token."""
    return column


@cuda.jit(device=True, inline="always")
def read_matrix(source, feature, column):  # type: ignore[no-untyped-def]
    """Return an element of x; source: (x (k, n),)."""
    return float32(source[0][feature, column])


@cuda.jit(device=True, inline="always")
def write_matrix(y, row, column, value):  # type: ignore[no-untyped-def]
    """Write an element of y (m, n)."""
    y[row, column] = value


@cuda.jit(device=True, inline="always")
def place_of_output(source, y, column):  # type: ignore[no-untyped-def]
    """Return (image, i, j) of y: columns run through the positions of an image, then through the images."""
    out_h, out_w = y.shape[2], y.shape[3]
    line = column // out_w
    return line // out_h, line % out_h, column % out_w


@cuda.jit(device=True, inline="always")
def read_images(source, feature, place):  # type: ignore[no-untyped-def]
    """Return what the tap `feature` sees from this output position, zero in the padding.

    source: (x (batch, c_in, h, w), taps, stride down, stride right). No patch is ever written out: that the product
    is a matrix product is only in how elements are addressed.
    """
    x, taps, stride_down, stride_right = source
    image, i, j = place
    row = i * stride_down + taps[feature, 1]
    column = j * stride_right + taps[feature, 2]
    value = float32(0)
    if 0 <= row < x.shape[2] and 0 <= column < x.shape[3]:
        value = float32(x[image, taps[feature, 0], row, column])
    return value


@cuda.jit(device=True, inline="always")
def write_images(y, channel, place, value):  # type: ignore[no-untyped-def]
    """Write an element of y (batch, c_out, out_h, out_w)."""
    image, i, j = place
    y[image, channel, i, j] = value


MATRIX = ActivationLayout("feature_major", place_of_token, read_matrix, write_matrix)
IMAGES = ActivationLayout("nchw", place_of_output, read_images, write_images)


def build_taps(shape: Conv2dShape) -> NDArray[np.int32]:
    """Return what each feature of a convolution looks at, int32 (k, 3): channel, rows down, columns right.

    Feature (r*kw + s)*c_in + c. Seen from the position times the stride: the padding is already taken off.
    """
    r, s, channel = np.indices((shape.kh, shape.kw, shape.c_in)).reshape(3, -1)
    down = r * shape.dilation[0] - shape.padding[0]
    right = s * shape.dilation[1] - shape.padding[1]
    return np.stack([channel, down, right], axis=1).astype(np.int32)
