"""Read images as bytes, four channels together: each position becomes a quad, 32 bits, as a convolution reads it."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cpu.codegen.quantize import ChannelRun, QuantizeForm, quantize_channels
from sparse_kernels.cpu.kernels.image_layout import ImageCopyCall, ImageSteps, build_image_steps, find_next_row
from sparse_kernels.cpu.launch.parallel_kernel import BoundKernel, ParallelKernel, build_parallel_kernel
from sparse_kernels.cpu.layouts.padded_images import ImagePlaces
from sparse_kernels.formats.int8 import QUAD


class QuadImageLayer(NamedTuple):
    """What the kernel knows before it is called.

    x_steps: of the images. y_steps: of the quads. batch, channels: of the images. rows, length: of each channel.
    reading: float32 (2), 1 / scale and zero. parts: threads.
    """

    x_steps: ImageSteps
    y_steps: ImageSteps
    batch: int
    channels: int
    rows: int
    length: int
    reading: NDArray[np.float32]
    parts: int


def bind_kernel(
    x: ImagePlaces, y: ImagePlaces, reading: NDArray[np.float32], lanes: int, fused: bool, threads: int
) -> BoundKernel:
    """Return the function of the addresses of images and of quads, of the first position in each."""
    rows, length = x.h, x.w
    together = x.row == x.w and y.row == y.w  # rows follow each other
    if together and x.batch * y.channels >= threads:
        rows, length = 1, x.h * x.w
    layer = QuadImageLayer(
        build_image_steps(x), build_image_steps(y), x.batch, x.channels, rows, length, reading, threads
    )
    return build_kernel(lanes, fused).bind(ImageCopyCall, layer)


@cache
def build_kernel(lanes: int, fused: bool) -> ParallelKernel:
    """Return the loop over images, fours of channels, and rows; it is called with `ImageCopyCall`."""
    form = tuple(QuantizeForm(lanes, int(fused), 0))

    @build_parallel_kernel
    def read(part: int, call: ImageCopyCall, layer: QuadImageLayer) -> None:
        x_steps, y_steps, rows = layer.x_steps, layer.y_steps, layer.rows
        quads = (layer.channels + QUAD - 1) // QUAD
        items, reading_at = layer.batch * quads * rows, layer.reading.ctypes.data
        begin, end = items * part // layer.parts, items * (part + 1) // layer.parts
        b, quad, row = begin // rows // quads, begin // rows % quads, begin % rows
        for _ in range(begin, end):
            behind = b * x_steps.image + quad * QUAD * x_steps.channel + row * x_steps.row
            source = ChannelRun(call.x_at + behind * 4, x_steps.channel, layer.channels - quad * QUAD)
            target_at = call.y_at + (b * y_steps.image + quad * y_steps.channel + row * y_steps.row) * 4
            quantize_channels(form, source, target_at, layer.length, reading_at)
            b, quad, row = find_next_row(b, quad, row, quads, rows)

    return read
