"""Images laid out so that every tap of a convolution reads contiguous positions.

x (batch, c_in, h, w), padded with zeros, is split into stride_h * stride_w phases: phase (a, b) holds the padded rows
a, a + stride_h, ... and columns b, b + stride_w, ... Then the tap (r, s) of output position (i, j) lies in one phase
at (i + r*dilation_h // stride_h, j + s*dilation_w // stride_w), so a step in j is a step of one element, as it is in
the output. Rows of a phase follow each other with a pitch, images with a pitch of rows; zeros at the end of one row
(image) and at the beginning of the next are the same zeros where both exist, so little is wasted on them.

The buffer is (phases, c_in, plane), plane = all images of one channel in one phase; threads may have one each. The
zeros are written once, when the buffer is made: laying out writes only what x holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise

import numpy as np
from numba import carray
from numpy.typing import NDArray

from sparse_kernels.cpu.codegen.register_tiles import copy_every_other, copy_run, floats_at
from sparse_kernels.cpu.codegen.vector_emitter import FLOATS
from sparse_kernels.cpu.launch.parallel_kernel import BoundKernel, ParallelKernel, in_parts
from sparse_kernels.cpu.layouts.padded_images import Places
from sparse_kernels.cpu.runtime.threads import count
from sparse_kernels.shapes import Conv2dShape

ONE_PHASE = np.zeros((1, 1), np.int64)


@dataclass(frozen=True, eq=False)
class PhaseLayout:
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
def layout(shape: Conv2dShape, slack: int, pitch: int = 0) -> PhaseLayout:
    """The layout for shape.batch images; `slack` elements behind the last one may be read (and mean nothing).

    pitch: the least distance from one row to the next. ValueError where an offset does not fit 31 bits.
    """
    taps_h = _taps(shape.kh, shape.dilation[0], shape.stride[0])
    taps_w = _taps(shape.kw, shape.dilation[1], shape.stride[1])
    phases = np.full(shape.stride, -1, np.int64)
    used = sorted({(a, b) for a, _ in taps_h for b, _ in taps_w})
    for number, phase in enumerate(used):
        phases[phase] = number
    rows = _pitch(shape.h, shape.padding[0], shape.stride[0], {a for a, _ in taps_h})
    pitch = max(pitch, _pitch(shape.w, shape.padding[1], shape.stride[1], {b for b, _ in taps_w}))
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
    return PhaseLayout(phases, pitch, image, plane, size, offsets.ravel().astype(np.int32))


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
def lay_out(lanes: int, numbers: int) -> ParallelKernel:
    """The compiled copy of images from one layout to another, vectors of `lanes` at a time; to what tiles of such
    `numbers` read, which pairs do with strides of 1 and 2 only.

    Called with (x, x_steps, y, y_steps, phases, padding, (batch, channels, h, w), begins, ends, apart, parts): x and
    y addresses; x_steps: from an image, a channel, a row to the next; y_steps: these and from a phase to the next;
    phases (stride_h, stride_w); begins, ends: int64, the rows of all images that each part copies, to a y that begins
    `apart` elements behind that of the part before.
    Position (i, j) of x goes where (i + padding[0], j + padding[1]) lies in y. Nothing else of y is touched.
    """

    @in_parts
    def copy(part, x_at, x_steps, y_at, y_steps, phases, padding, shape, begins, ends, apart, parts):  # type: ignore[no-untyped-def]
        _, channels, h, w = shape
        stride_h, stride_w = phases.shape
        begin, end, y_here = begins[part], ends[part], y_at + part * apart * 4
        for b in range(begin // h, (end + h - 1) // h):
            first_row, stop_row = max(begin - b * h, 0), min(end - b * h, h)
            for c in range(channels):
                source, target = b * x_steps[0] + c * x_steps[1], b * y_steps[0] + c * y_steps[1]
                for phase_w in range(stride_w):
                    first = (phase_w - padding[1]) % stride_w
                    column, count = (first + padding[1]) // stride_w, (w - first + stride_w - 1) // stride_w
                    for phase_h in range(stride_h):
                        number = phases[phase_h, phase_w]
                        if number < 0:
                            continue
                        start = first_row + (phase_h - padding[0] - first_row) % stride_h
                        row = (start + padding[0]) // stride_h
                        here = source + start * x_steps[2] + first
                        there = target + number * y_steps[3] + row * y_steps[2] + column
                        for _ in range(start, stop_row, stride_h):
                            if stride_w == 1:
                                copy_run(lanes, numbers, x_at + here * 4, y_here + there * 4, count)
                            elif stride_w == 2:
                                copy_every_other(lanes, numbers, x_at + here * 4, y_here + there * 4, count)
                            else:
                                x = carray(floats_at(x_at + here * 4), (count - 1) * stride_w + 1)
                                y = carray(floats_at(y_here + there * 4), count)
                                for j in range(count):
                                    y[j] = x[j * stride_w]
                            here += stride_h * x_steps[2]
                            there += y_steps[2]

    return copy


def copy(lanes: int, x: int, x_places: Places, y: int, y_places: Places) -> None:
    """Copy images from one address to another, each lying as its places say; frames of y stay as they are."""
    _copying(lanes, x_places, y_places, count())(x + 4 * x_places.first, y + 4 * y_places.first)


@lru_cache(maxsize=64)
def _copying(lanes: int, x_places: Places, y_places: Places, parts: int) -> BoundKernel:
    """The copy from one address to another."""
    begins, ends = even_rows(x_places.batch * x_places.h, parts)
    return lay_out(lanes, FLOATS).bound(
        "x_at y_at", x_steps=steps(x_places), y_steps=(*steps(y_places), 0), phases=ONE_PHASE, padding=(0, 0),
        shape=x_places.shape, begins=begins, ends=ends, apart=0, parts=parts,
    )  # fmt: skip


@lru_cache(maxsize=64)
def even_rows(rows: int, parts: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(begins, ends) of rows shared evenly."""
    bounds = rows * np.arange(parts + 1) // parts
    return bounds[:-1].copy(), bounds[1:].copy()


def rows_read(
    shape: Conv2dShape, where: PhaseLayout, x_starts: NDArray[np.int64], lanes: int, shares: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(begins, ends) of the rows of all images that each part reads: it has vectors from one of `shares` to the next.

    x_starts: where vectors of `lanes` positions start in x as it is laid out here, as many for each image.
    """
    image = np.arange(x_starts.size) // (x_starts.size // shape.batch)
    inside = x_starts - image * where.image
    down = (shape.kh - 1) * shape.dilation[0] // shape.stride[0]
    first = inside // where.pitch * shape.stride[0] - shape.padding[0]
    stop = ((inside + lanes - 1) // where.pitch + down + 1) * shape.stride[0] - shape.padding[0]
    first, stop = (image * shape.h + np.clip(rows, 0, shape.h) for rows in (first, stop))
    parts = [(first[a], stop[b - 1]) if a < b else (0, 0) for a, b in pairwise(shares)]
    begins, ends = np.array(parts, np.int64).T.copy()
    return begins, ends


def steps(places: Places) -> tuple[int, int, int]:
    """Elements from an image, a channel, a row to the next."""
    return places.image, places.channel, places.row
