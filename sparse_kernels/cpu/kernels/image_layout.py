"""Images laid out so that every tap of a convolution reads contiguous positions.

x (batch, c_in, h, w), padded with zeros, is split into stride_h * stride_w phases: phase (a, b) holds the padded rows
a, a + stride_h, ... and columns b, b + stride_w, ... Then the tap (r, s) of output position (i, j) lies in one phase,
at (i + r*dilation_h // stride_h, j + s*dilation_w // stride_w). So a step in j is a step of one element, as it is in
the output. Rows of a phase follow each other with a pitch, images with a pitch of rows. The zeros at the end of one
row (image) are those at the beginning of the next, so little is wasted on them.

The buffer is (phases, c_in, plane), plane = all images of one channel in one phase; threads may have one each. The
zeros are written once, when the buffer is made: laying out writes only what x holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cpu.codegen.register_tiles import copy_every_other, copy_float, copy_run
from sparse_kernels.cpu.codegen.vector_emitter import FLOATS
from sparse_kernels.cpu.launch.parallel_kernel import BoundKernel, ParallelKernel, build_parallel_kernel
from sparse_kernels.cpu.layouts.padded_images import ImagePlaces
from sparse_kernels.cpu.runtime.kernel_cache import inline
from sparse_kernels.cpu.runtime.threads import count_threads
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
def build_layout(shape: Conv2dShape, slack: int, pitch: int = 0) -> PhaseLayout:
    """Return the layout for shape.batch images; `slack` elements behind the last one may be read (and mean nothing).

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
        raise ValueError(
            f"a batch of {shape.batch} images is too large for this convolution, whose offsets have 31 bits: {shape}"
        )
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
    """Return the least distance from one row (image) to the next at which only zeros meet zeros, in all `phases`."""
    pitch = 1
    for phase in phases:
        positions = range(phase, length + 2 * padding, stride)
        inside = [padding <= position < padding + length for position in positions]
        if any(inside):
            before = inside.index(True)
            behind = inside[::-1].index(True)
            pitch = max(pitch, len(inside) - min(before, behind))
    return pitch


class ImageCopyCall(NamedTuple):
    """Addresses of the images and of their copy, of the first position in each."""

    x_at: int
    y_at: int


class ImageSteps(NamedTuple):
    """Elements from an image, a channel, a row, a phase to the next."""

    image: int
    channel: int
    row: int
    phase: int


class ImageCopyLayer(NamedTuple):
    """What a copy of images knows before it is called.

    x_steps, y_steps: of x and y. phases: int64 (stride_h, stride_w), as in `PhaseLayout`. padding: rows and columns.
    shape: (batch, channels, h, w). begins, ends: int64, the rows of all images that each part copies. part_stride:
    elements from the y of one part to that of the next. parts: threads.
    """

    x_steps: ImageSteps
    y_steps: ImageSteps
    phases: NDArray[np.int64]
    padding: tuple[int, int]
    shape: tuple[int, int, int, int]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    part_stride: int
    parts: int


@inline
def find_next_row(image: int, channel: int, row: int, channels: int, rows: int) -> Any:
    """Return the image, channel and row after these. To divide for each row takes longer than to read a short one."""
    row += 1
    if row == rows:
        row, channel = 0, channel + 1
        if channel == channels:
            channel, image = 0, image + 1
    return image, channel, row


@inline
def copy_strided(form: Any, stride: int, source_at: int, target_at: int, count: int) -> None:
    """Copy every `stride`-th of the elements at an address, `count` of them, one behind the other."""
    lanes, numbers, _, _ = form
    if stride == 1:
        copy_run(lanes, numbers, source_at, target_at, count)
    elif stride == 2:
        copy_every_other(lanes, numbers, source_at, target_at, count)
    else:
        for i in range(count):
            copy_float(source_at + i * stride * 4, target_at + i * 4)


@inline
def copy_channel(form: Any, source_at: int, target_at: int, layer: ImageCopyLayer, rows: tuple[int, int]) -> None:
    """Copy rows of one channel of an image, from one to before another, to the phases that hold them.

    The strides are literals: to divide by what is not takes longer than to copy a short row.
    """
    phases, x_row, y_row = layer.phases, layer.x_steps.row, layer.y_steps.row
    _, _, stride_h, stride_w = form
    down, right = layer.padding
    for phase_w in range(stride_w):
        first = (phase_w - right) % stride_w
        column, count = (first + right) // stride_w, (layer.shape[3] - first + stride_w - 1) // stride_w
        for phase_h in range(stride_h):
            number = phases[phase_h, phase_w]
            start = rows[0] + (phase_h - down - rows[0]) % stride_h
            x_at = source_at + (start * x_row + first) * 4
            y_at = target_at + (number * layer.y_steps.phase + (start + down) // stride_h * y_row + column) * 4
            for _ in range(start, rows[1] if number >= 0 else start, stride_h):
                copy_strided(form, stride_w, x_at, y_at, count)
                x_at += stride_h * x_row * 4
                y_at += y_row * 4


@cache
def build_kernel(lanes: int, numbers: int, strides: tuple[int, int]) -> ParallelKernel:
    """Return the copy of images from one layout to another, vectors of `lanes` at a time.

    numbers: what tiles multiply that read the copy; pairs need strides of 1 and 2. strides: of the phases of y. It is
    called with `ImageCopyCall` and `ImageCopyLayer`. Position (i, j) of x goes where (i + padding[0], j + padding[1])
    lies in y. Nothing else of y is touched.
    """
    form = (lanes, numbers, *strides)

    @build_parallel_kernel
    def copy(part: int, call: ImageCopyCall, layer: ImageCopyLayer) -> None:
        _, channels, h, _ = layer.shape
        x_steps, y_steps = layer.x_steps, layer.y_steps
        begin, end, y_at = layer.begins[part], layer.ends[part], call.y_at + part * layer.part_stride * 4
        for b in range(begin // h, (end + h - 1) // h):
            rows = max(begin - b * h, 0), min(end - b * h, h)
            for c in range(channels):
                source_at = call.x_at + (b * x_steps.image + c * x_steps.channel) * 4
                target_at = y_at + (b * y_steps.image + c * y_steps.channel) * 4
                copy_channel(form, source_at, target_at, layer, rows)

    return copy


def copy_images(lanes: int, x: int, x_places: ImagePlaces, y: int, y_places: ImagePlaces) -> None:
    """Copy images from one address to another, each lying as its places say; frames of y stay as they are."""
    _bind_copy(lanes, x_places, y_places, count_threads())(x + 4 * x_places.first, y + 4 * y_places.first)


@lru_cache(maxsize=64)
def _bind_copy(lanes: int, x_places: ImagePlaces, y_places: ImagePlaces, parts: int) -> BoundKernel:
    """Return the copy from one address to another."""
    begins, ends = split_rows(x_places.batch * x_places.h, parts)
    x_steps, y_steps = build_image_steps(x_places), build_image_steps(y_places)
    layer = ImageCopyLayer(x_steps, y_steps, ONE_PHASE, (0, 0), x_places.shape, begins, ends, 0, parts)
    return build_kernel(lanes, FLOATS, (1, 1)).bind(ImageCopyCall, layer)


@lru_cache(maxsize=64)
def split_rows(rows: int, parts: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (begins, ends) of rows shared evenly."""
    bounds = rows * np.arange(parts + 1) // parts
    return bounds[:-1].copy(), bounds[1:].copy()


def find_rows_read(
    shape: Conv2dShape, where: PhaseLayout, x_starts: NDArray[np.int64], lanes: int, shares: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (begins, ends) of the rows of all images that each part reads.

    shares: each part has vectors from one of them to the next.

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


def build_image_steps(places: ImagePlaces) -> ImageSteps:
    """Return the steps of images at these places, which have one phase."""
    return ImageSteps(places.image, places.channel, places.row, 0)
