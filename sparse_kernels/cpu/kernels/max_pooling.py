"""Max pooling of images as torch has them or in frames, row by row of the result."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

from sparse_kernels.cpu.codegen.cpu_target import find_cpu_target
from sparse_kernels.cpu.codegen.pool_rows import PooledRows, PoolForm, PoolLine, pool_rows
from sparse_kernels.cpu.kernels.image_layout import ImageSteps, build_image_steps, find_next_row
from sparse_kernels.cpu.launch.parallel_kernel import BoundKernel, ParallelKernel, build_parallel_kernel
from sparse_kernels.cpu.layouts.padded_images import ImagePlaces
from sparse_kernels.cpu.runtime.scratch_buffers import LINE, Pool
from sparse_kernels.cpu.runtime.threads import count_threads

MINUS_INFINITY = 0xFF800000

_lines = Pool(MINUS_INFINITY)


@dataclass(frozen=True)
class PoolWindow:
    """Windows of a max pooling, rows before columns.

    Attributes
    ----------
    taps
        Elements of a window.
    stride
        Steps from one window to the next; 1 or 2 along a row.
    padding
        Elements of minus infinity around an image.
    """

    taps: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    def count(self, h: int, w: int) -> tuple[int, int]:
        """Return how many windows there are in an image, down and along."""
        sides = zip((h, w), self.taps, self.stride, self.padding, strict=True)
        down, along = ((size + 2 * pad - taps) // step + 1 for size, taps, step, pad in sides)
        return down, along


class PoolCall(NamedTuple):
    """Addresses of the first position of x and of y, and of the lines of all parts."""

    x_at: int
    y_at: int
    lines_at: int


class PoolLayer(NamedTuple):
    """What the kernel knows before it is called.

    x_steps, y_steps: of x and y. channels: of each image. x_size, y_size: height and width. stride, padding: of
    windows, down and along. rows: of a window. planes: images times channels. elements: of each part's line. parts:
    threads.
    """

    x_steps: ImageSteps
    y_steps: ImageSteps
    channels: int
    x_size: tuple[int, int]
    y_size: tuple[int, int]
    rows: int
    stride: int
    padding: tuple[int, int]
    planes: int
    elements: int
    parts: int


def pool_images(window: PoolWindow, x: int, x_at: ImagePlaces, y: int, y_at: ImagePlaces) -> None:
    """Pool images from one address to another, each lying as its places say; frames of y stay as they are."""
    threads = count_threads()
    pool, needed = _bind_pooling(window, x_at, y_at, threads)
    key = x_at.w, window.padding[1]  # where a line's minus infinity lies
    lines = _lines.take(needed, key)
    pool(x + 4 * x_at.first, y + 4 * y_at.first, lines.address)
    _lines.give_back(lines, key)


@lru_cache(maxsize=64)
def _bind_pooling(window: PoolWindow, x: ImagePlaces, y: ImagePlaces, threads: int) -> tuple[BoundKernel, int]:
    """Return the kernel, and how many elements the lines of all its parts have."""
    target = find_cpu_target()
    elements = -(-(x.w + 2 * window.padding[1] + 2 * target.lanes) // LINE) * LINE + LINE
    layer = PoolLayer(
        x_steps=build_image_steps(x), y_steps=build_image_steps(y), channels=x.channels, x_size=(x.h, x.w),
        y_size=(y.h, y.w), rows=window.taps[0], stride=window.stride[0], padding=window.padding,
        planes=x.batch * x.channels, elements=elements, parts=threads,
    )  # fmt: skip
    kernel = build_kernel(target.lanes, window.taps[1], window.stride[1])
    return kernel.bind(PoolCall, layer), threads * elements


@cache
def build_kernel(lanes: int, taps: int, stride: int) -> ParallelKernel:
    """Return the loop over rows of results, for windows of so many columns; it is called with `PoolCall`."""
    form = tuple(PoolForm(lanes, taps, stride))

    @build_parallel_kernel
    def pool(part: int, call: PoolCall, layer: PoolLayer) -> None:
        x_steps, y_steps, (down, along) = layer.x_steps, layer.y_steps, layer.padding
        (h, w), (out_h, out_w) = layer.x_size, layer.y_size
        begin_at = call.lines_at + part * layer.elements * 4
        line = PoolLine(begin_at + along * 4, begin_at)
        items = layer.planes * out_h
        begin, end_item = items * part // layer.parts, items * (part + 1) // layer.parts
        b, channel, row = begin // out_h // layer.channels, begin // out_h % layer.channels, begin % out_h
        for _ in range(begin, end_item):
            above = row * layer.stride - down
            first, end = max(above, 0), min(above + layer.rows, h)
            behind = b * x_steps.image + channel * x_steps.channel + first * x_steps.row
            source = PooledRows(call.x_at + behind * 4, x_steps.row, end - first, w)
            to = b * y_steps.image + channel * y_steps.channel + row * y_steps.row
            pool_rows(form, source, line, call.y_at + to * 4, out_w)
            b, channel, row = find_next_row(b, channel, row, layer.channels, out_h)

    return pool
