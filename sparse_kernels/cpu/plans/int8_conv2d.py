"""Convolutions in eight bits on the CPU: images are read as bytes, four channels together, and then convolved.

A quad of channels takes the place of a float32 channel. So `plans.conv2d` lays out and convolves images of a quarter
of the channels, whose elements are multiplied four at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from sparse_kernels.cpu.codegen.cpu_target import find_cpu_target
from sparse_kernels.cpu.kernels import quad_images, row_panels
from sparse_kernels.cpu.kernels.unstructured_rows import SingleRows, build_single_rows
from sparse_kernels.cpu.launch.linear_call import convert_arguments
from sparse_kernels.cpu.layouts.image_results import Finish, Results
from sparse_kernels.cpu.layouts.padded_images import ImagePlaces
from sparse_kernels.cpu.layouts.panels import Panels, build_panels
from sparse_kernels.cpu.layouts.quads import build_quad_arrays, build_quad_groups
from sparse_kernels.cpu.layouts.vector_grid import TILE
from sparse_kernels.cpu.plans.conv2d import CpuConv2dPlan, choose_positions, order_by_channel
from sparse_kernels.cpu.plans.int8_linear import MOST_SINGLE
from sparse_kernels.cpu.runtime.scratch_buffers import Pool, find_address
from sparse_kernels.cpu.runtime.threads import count_threads
from sparse_kernels.formats.int8 import QUAD, Int8Weight, fill_up
from sparse_kernels.plan_protocol import Array
from sparse_kernels.shapes import Conv2dShape


@dataclass(frozen=True, eq=False)
class QuadConv2dPlan:
    """A convolution in eight bits.

    shape: of the convolution of floats. quads: the plan that convolves quads of channels.
    """

    shape: Conv2dShape
    quads: CpuConv2dPlan
    kernel: str
    layout: str
    _pool: Pool
    _readers: dict[tuple[ImagePlaces, int], Callable[..., bool]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as the kernel reads them."""
        return self.quads.nbytes

    def __getstate__(self) -> dict[str, object]:
        # Leave out compiled kernels and buffers: copies and pickles make them again.
        return {**self.__dict__, "_readers": {}, "_pool": Pool(self.quads.padding)}

    def copy(self) -> QuadConv2dPlan:
        """Return the same plan with weights of its own."""
        return replace(self, quads=self.quads.copy(), _pool=Pool(self.quads.padding), _readers={})

    def __call__(
        self, x: Array, bias: Array | None = None, activation: str | None = None, out: Array | None = None
    ) -> Array:
        """activation(convolution of x + bias), as `Plan` says; x that is not C-contiguous is copied."""
        s = self.shape
        y_shape = (None, s.c_out, s.out_h, s.out_w)
        x, y, bias, code = convert_arguments(x, (None, s.c_in, s.h, s.w), bias, activation, out, y_shape, s.c_out)
        if y.size:
            batch = x.shape[0]
            x_address, bias_address, y_address = find_address(x), find_address(bias), find_address(y)
            self.run(
                x_address, self.x_places(batch), Finish(bias_address, code), Results(y_address, self.y_places(batch))
            )
        return y

    def x_places(self, batch: int, margin: int | None = None) -> ImagePlaces:
        """Return the places of x of a batch, in frames of this margin or as torch has it."""
        return ImagePlaces(batch, self.shape.c_in, self.shape.h, self.shape.w, margin)

    def y_places(self, batch: int, margin: int | None = None) -> ImagePlaces:
        """Return the places of y of a batch, in frames of this margin or as torch has it."""
        return self.quads.y_places(batch, margin)

    def can_add(self, x: ImagePlaces, y: ImagePlaces) -> bool:
        """Return whether something can be added to y on the way: if y, in frames, is written directly."""
        return self.quads.can_add(x.quads, y)

    def can_leave(self, x: ImagePlaces, y: ImagePlaces) -> bool:
        """Return whether `run` can leave results as quads, as `CpuConv2dPlan.can_leave`."""
        return self.quads.can_leave(x.quads, y)

    def run(self, x: int, x_at: ImagePlaces, finish: Finish, y: Results) -> None:
        """Convolve images at addresses of arrays that are right, as `CpuConv2dPlan.run`."""
        threads, places = count_threads(), x_at.quads
        read = self._readers.get((x_at, threads))
        if read is None:
            reading = self.quads.quads.reading
            target = self.quads.target
            read = quad_images.bind_kernel(x_at, places, reading, target.lanes, target.fused, threads)
            self._readers[x_at, threads] = read
        key = x_at.batch, x_at.margin
        room = self._pool.take(places.size + QUAD * self.quads.target.lanes, key)
        read(x + 4 * x_at.first, room.address + 4 * places.first)
        self.run_quads(room.address, x_at, finish, y)
        self._pool.give_back(room, key)

    def run_quads(self, x: int, x_at: ImagePlaces, finish: Finish, y: Results) -> None:
        """Do the same for images that are quads already, read in this layer's range; x_at: of the images."""
        self.quads.run(x, x_at.quads, finish, y)


def prepare_int8_conv2d(weight: Int8Weight, shape: Conv2dShape, layout: str) -> QuadConv2dPlan:
    """Return the plan of a convolution in eight bits for about shape.batch images.

    Raises ValueError unless the weight says how x is read: images have one range, found from calibration data.
    """
    if weight.input_range is None:
        raise ValueError("a convolution in eight bits needs an input range, which calibration data gives")
    target, taps = find_cpu_target(), shape.kh * shape.kw
    narrow = replace(shape, c_in=-(-shape.c_in // QUAD))
    groups = build_quad_groups(weight, shape.c_in)
    if groups.height == 1 and groups.columns.size >= MOST_SINGLE * shape.m * narrow.c_in * taps:
        groups = build_quad_groups(fill_up(weight), shape.c_in)
    by_channel = order_by_channel(groups, narrow)
    weights: Panels | SingleRows
    if groups.height == 1:
        some = replace(narrow, batch=max(1, shape.batch))
        tile_rows, vectors = 1, min(TILE, choose_positions(some, target, halves=False).x_starts.size)
        weights = build_single_rows(by_channel, narrow.k, vectors * target.lanes)
        rows = np.arange(shape.m, dtype=np.int32)
    else:
        tile_rows, vectors = row_panels.choose_tile(groups.height, target)
        weights = build_panels(by_channel, tile_rows)
        rows = weights.row_ids
    name = f"numba.{weight.pattern.format}.conv2d.int8rows{tile_rows}x{vectors}.{target.name}"
    padding = weight.input_range.zero * 0x01010101
    quads = CpuConv2dPlan(
        narrow, weights, (tile_rows, vectors), target, name, layout, numbers=target.quads,
        quads=build_quad_arrays(weight, rows), padding=padding, _pool=Pool(padding),
    )  # fmt: skip
    return QuadConv2dPlan(shape, quads, name, layout, Pool(padding))
