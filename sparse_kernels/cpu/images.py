"""Images laid out so that every tap of a convolution reads contiguous positions.

x (batch, c_in, h, w), padded with zeros, is split into stride_h * stride_w phases: phase (a, b) holds the padded rows
a, a + stride_h, ... and columns b, b + stride_w, ... Then the tap (r, s) of output position (i, j) lies in one phase
at (i + r*dilation_h // stride_h, j + s*dilation_w // stride_w), so a step in j is a step of one element, as it is in
the output. Rows of a phase follow each other with a pitch, images with a pitch of rows; zeros at the end of one row
(image) and at the beginning of the next are the same zeros where both exist, so little is wasted on them.

The buffer is (phases, c_in, plane), plane = all images of one channel in one phase. The zeros are written once, when
the buffer is made: filling writes only what x holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

from sparse_kernels.cpu.micro import copy_every_other, copy_run
from sparse_kernels.cpu.target import VERSION
from sparse_kernels.shapes import Conv2dShape


@dataclass(frozen=True, eq=False)
class Layout:
    """Where everything lies for one shape: element counts, and offsets (k,) of the taps from an output position.

    phases: int64 (stride_h, stride_w), the number of each phase that some tap reads, else -1.
    """

    phases: NDArray[np.int64]
    pitch: int
    image: int
    plane: int
    size: int
    offsets: NDArray[np.int32]


@lru_cache(maxsize=64)
def layout(shape: Conv2dShape, slack: int) -> Layout:
    """The layout for shape.batch images; `slack` elements behind the last one may be read (and mean nothing).

    ValueError where an offset does not fit 31 bits.
    """
    taps_h = _taps(shape.kh, shape.dilation[0], shape.stride[0])
    taps_w = _taps(shape.kw, shape.dilation[1], shape.stride[1])
    phases = np.full(shape.stride, -1, np.int64)
    used = sorted({(a, b) for a, _ in taps_h for b, _ in taps_w})
    for number, phase in enumerate(used):
        phases[phase] = number
    rows = _pitch(shape.h, shape.padding[0], shape.stride[0], {a for a, _ in taps_h})
    pitch = _pitch(shape.w, shape.padding[1], shape.stride[1], {b for b, _ in taps_w})
    longest = -(-(shape.h + 2 * shape.padding[0]) // shape.stride[0])
    widest = -(-(shape.w + 2 * shape.padding[1]) // shape.stride[1])
    image = rows * pitch
    plane = (shape.batch - 1) * image + (longest - 1) * pitch + widest
    size = len(used) * shape.c_in * plane + slack
    if size >= 2**31:
        raise ValueError(f"a batch of {shape.batch} images is too large for this convolution: {shape}")
    offsets = np.empty((shape.kh, shape.kw, shape.c_in), np.int64)
    for r, (a, down) in enumerate(taps_h):
        for s, (b, right) in enumerate(taps_w):
            first = phases[a, b] * shape.c_in * plane + down * pitch + right
            offsets[r, s] = first + np.arange(shape.c_in) * plane
    return Layout(phases, pitch, image, plane, size, offsets.ravel().astype(np.int32))


def _taps(taps: int, dilation: int, stride: int) -> list[tuple[int, int]]:
    """(phase, steps inside it) of each tap, along one axis."""
    return [((t * dilation) % stride, (t * dilation) // stride) for t in range(taps)]


def _pitch(length: int, padding: int, stride: int, phases: set[int]) -> int:
    """The least distance from one row (image) to the next at which only zeros meet zeros, in all `phases`."""
    pitch = 1
    for phase in phases:
        positions = range(phase, length + 2 * padding, stride)
        inside = [padding <= position < padding + length for position in positions]
        if any(inside):
            before = inside.index(True)
            behind = inside[::-1].index(True)
            pitch = max(pitch, len(inside) - min(before, behind))
    return pitch


@cache
def kernels(lanes: int) -> tuple[Callable[..., None], Callable[..., None]]:
    """(fill, collect), copying vectors of `lanes`."""
    version = VERSION

    @njit(parallel=True, cache=True, nogil=True, error_model="numpy")
    def fill(x, buffer, phases, plane, image, pitch, padding_h, padding_w, parts):  # type: ignore[no-untyped-def]
        """Write x (batch, c_in, h, w) into a buffer of this layout, whose other elements are zero."""
        batch, c_in, h, w = x.shape
        stride_h, stride_w = phases.shape
        flat = x.reshape(-1)
        x_at, buffer_at = x.ctypes.data, buffer.ctypes.data
        for part in prange(parts):
            # Rows of all images are shared, as the positions are when they are computed.
            begin, end = batch * h * part // parts, batch * h * (part + 1) // parts
            for b in range(begin // h, (end + h - 1) // h):
                first_row, stop_row = max(begin - b * h, 0), min(end - b * h, h)
                for c in range(c_in):
                    source, image_at = (b * c_in + c) * h * w, c * plane + b * image
                    for phase_w in range(stride_w):
                        first = (phase_w - padding_w) % stride_w
                        column, count = (first + padding_w) // stride_w, (w - first + stride_w - 1) // stride_w
                        for phase_h in range(stride_h):
                            number = phases[phase_h, phase_w]
                            if number < 0:
                                continue
                            start = first_row + (phase_h - padding_h - first_row) % stride_h
                            row = (start + padding_h) // stride_h
                            here = source + start * w + first
                            there = image_at + number * c_in * plane + row * pitch + column
                            for _ in range(start, stop_row, stride_h):
                                if stride_w == 1:
                                    copy_run(lanes, version, x_at + here * 4, buffer_at + there * 4, count)
                                elif stride_w == 2:
                                    copy_every_other(lanes, version, x_at + here * 4, buffer_at + there * 4, count)
                                else:
                                    for j in range(count):
                                        buffer[there + j] = flat[here + j * stride_w]
                                here += stride_h * w
                                there += pitch

    @njit(parallel=True, cache=True, nogil=True, error_model="numpy")
    def collect(flat, stride, image, pitch, y, parts):  # type: ignore[no-untyped-def]
        """y (batch, c_out, out_h, out_w) from its valid positions; row c of flat is at c * stride."""
        batch, c_out, out_h, out_w = y.shape
        flat_at, y_at = flat.ctypes.data, y.ctypes.data
        for part in prange(parts):
            begin, end = batch * out_h * part // parts, batch * out_h * (part + 1) // parts
            for b in range(begin // out_h, (end + out_h - 1) // out_h):
                first_row, stop_row = max(begin - b * out_h, 0), min(end - b * out_h, out_h)
                for c in range(c_out):
                    source, target = c * stride + b * image, (b * c_out + c) * out_h * out_w
                    for i in range(first_row, stop_row):
                        copy_run(
                            lanes, version, flat_at + (source + i * pitch) * 4, y_at + (target + i * out_w) * 4, out_w
                        )

    return fill, collect
