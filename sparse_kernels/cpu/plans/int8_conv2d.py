"""Convolutions in eight bits on the CPU: images are read as bytes, four channels together, and then convolved.

A quad of channels takes the place of a float32 channel. So `plans.conv2d` lays out and convolves images of a quarter
of the channels, whose elements are multiplied four at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cpu.codegen.cpu_target import find_cpu_target
from sparse_kernels.cpu.codegen.tile_registers import ROWS, count_row_tiles
from sparse_kernels.cpu.codegen.vector_emitter import QUADS_BY_UNIT
from sparse_kernels.cpu.kernels import quad_images, row_panels
from sparse_kernels.cpu.kernels.unstructured_rows import SingleRows, build_single_rows
from sparse_kernels.cpu.launch.linear_call import Product, convert_arguments
from sparse_kernels.cpu.layouts.image_results import Finish, Leaving, Results
from sparse_kernels.cpu.layouts.padded_images import ImagePlaces
from sparse_kernels.cpu.layouts.panels import Panels, build_panels, count_group_rows
from sparse_kernels.cpu.layouts.quads import build_quad_arrays, build_quad_groups
from sparse_kernels.cpu.layouts.vector_grid import TILE
from sparse_kernels.cpu.matrix_unit.byte_panels import BytePanels, build_byte_panels
from sparse_kernels.cpu.matrix_unit.byte_tiles import HALVES, TOKENS
from sparse_kernels.cpu.plans.conv2d import CpuConv2dPlan, choose_positions, order_by_channel
from sparse_kernels.cpu.plans.int8_linear import MOST_SINGLE
from sparse_kernels.cpu.runtime.scratch_buffers import Pool, find_address
from sparse_kernels.cpu.runtime.threads import count_threads
from sparse_kernels.formats.int8 import QUAD, Int8Weight, fill_quad, fill_up
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
        threads = count_threads()
        read = self._readers.get((x_at, threads))
        if read is None:
            read = self._readers[x_at, threads] = self._bind_reader(x_at, threads)
        key = x_at.batch, x_at.margin
        room = self._pool.take(self._count_room(x_at), key)
        read(x + 4 * x_at.first, room.address + 4 * x_at.quads.first)
        self.run_quads(room.address, x_at, finish, y)
        self._pool.give_back(room, key)

    def bind_run(
        self, x_at: ImagePlaces, y_at: ImagePlaces, leaving: Leaving | None, threads: int, from_quads: bool = False
    ) -> Product:
        """Return what `run` does, or `run_quads` if x is quads already, as `CpuConv2dPlan.bind_run`."""
        convolve = self.quads.bind_run(x_at.quads, y_at, leaving, threads)
        if from_quads:
            return convolve
        read, size, pool = self._bind_reader(x_at, threads), self._count_room(x_at), self._pool
        key = x_at.batch, x_at.margin
        first, quads_first = 4 * x_at.first, 4 * x_at.quads.first

        def run(x: int, y: int, bias: int, activation: int, added: int, quads: int) -> bool:
            room = pool.take(size, key)
            read(x + first, room.address + quads_first)
            done = convolve(room.address, y, bias, activation, added, quads)
            pool.give_back(room, key)
            return done

        return run

    def _bind_reader(self, x_at: ImagePlaces, threads: int) -> Callable[..., bool]:
        """Return what reads images at these places as bytes, from and to the first position."""
        target, reading = self.quads.target, self.quads.quads.reading
        return quad_images.bind_kernel(x_at, x_at.quads, reading, target.lanes, target.fused, threads)

    def _count_room(self, x_at: ImagePlaces) -> int:
        """Return the elements of room for images at these places, read as bytes."""
        return x_at.quads.size + QUAD * self.quads.target.lanes

    def run_quads(self, x: int, x_at: ImagePlaces, finish: Finish, y: Results) -> None:
        """Do the same for images that are quads already, read in this layer's range; x_at: of the images."""
        self.quads.run(x, x_at.quads, finish, y)


def prepare_int8_conv2d(weight: Int8Weight, shape: Conv2dShape, layout: str) -> QuadConv2dPlan:
    """Return the plan of a convolution in eight bits for about shape.batch images.

    Raises ValueError unless the weight says how x is read: images have one range, found from calibration data.
    """
    if weight.input_range is None:
        raise ValueError("a convolution in eight bits needs an input range, which calibration data gives")
    tiles = choose_matrix_tiles(weight)
    if tiles is not None:
        return build_matrix_plan(weight, shape, layout, tiles)
    return build_vector_plan(weight, shape, layout)


LEAST_KEPT = 30
"""Weights of a row from which on the matrix unit is faster than vectors.

To finish a row's sums takes longer than to multiply fewer. ResNet50's convolutions have 1.1 to 2.7 times the speed at
75% and 90% sparsity above this limit, and 0.8 to 1.2 times below it; dense ones have 1.7 to 3.3 times (one image,
Granite Rapids; the command is `tests/benchmarks/matrix_unit.py --int8 --workload resnet50`).
"""


def choose_matrix_tiles(weight: Int8Weight) -> int | None:
    """Return the tiles of rows in a panel of the matrix unit.

    None where vectors are faster, or alone can multiply this weight.
    """
    if not find_cpu_target().matrix or weight.packed.nnz < LEAST_KEPT * weight.shape[0]:
        return None
    return count_row_tiles(count_group_rows(weight.packed))


def build_matrix_plan(
    weight: Int8Weight, shape: Conv2dShape, layout: str, tiles: int, emulated: bool = False
) -> QuadConv2dPlan:
    """Return the plan by the matrix unit, with so many tiles of rows in a panel."""
    narrow = _narrow(shape)
    by_channel = order_by_channel(build_quad_groups(weight, shape.c_in), narrow)
    weights = build_byte_panels(by_channel, tiles, shape.m)
    name = f"numba.{weight.pattern.format}.conv2d.int8amx{tiles * ROWS}x{TOKENS}"
    kernel = QuadKernel(name, (tiles * ROWS, HALVES), emulated)
    return _build_plan(weight, shape, layout, weights, weights.row_ids, kernel)


def build_vector_plan(weight: Int8Weight, shape: Conv2dShape, layout: str) -> QuadConv2dPlan:
    """Return the plan by the vector unit."""
    target, taps, narrow = find_cpu_target(), shape.kh * shape.kw, _narrow(shape)
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
    name = f"numba.{weight.pattern.format}.conv2d.int8rows{tile_rows}x{vectors}.{target.byte_name}"
    return _build_plan(weight, shape, layout, weights, rows, QuadKernel(name, (tile_rows, vectors)))


def _narrow(shape: Conv2dShape) -> Conv2dShape:
    """Return the convolution of quads: a quarter of the channels."""
    return replace(shape, c_in=-(-shape.c_in // QUAD))


class QuadKernel(NamedTuple):
    """What multiplies quads: its name, rows and vectors of a tile, and whether the matrix unit is emulated."""

    name: str
    tile: tuple[int, int]
    emulated: bool = False


def _build_plan(
    weight: Int8Weight, shape: Conv2dShape, layout: str, weights: Panels | SingleRows | BytePanels,
    rows: NDArray[np.int32], kernel: QuadKernel,
) -> QuadConv2dPlan:  # fmt: skip
    """Return the plan for weights as panels; rows: of the weight, those of all panels."""
    assert weight.input_range is not None
    padding, target = fill_quad(weight.input_range), find_cpu_target()
    numbers = target.quads
    if isinstance(weights, BytePanels):
        # Vectors have 16 positions and x no sign, also where the unit is emulated on another processor.
        target, numbers = replace(target, lanes=ROWS, halves=False), QUADS_BY_UNIT
    quads = CpuConv2dPlan(
        _narrow(shape), weights, kernel.tile, target, kernel.name, layout, emulated=kernel.emulated,
        numbers=target.quads, quads=build_quad_arrays(weight, rows, numbers), padding=padding, _pool=Pool(padding),
    )  # fmt: skip
    return QuadConv2dPlan(shape, quads, kernel.name, layout, Pool(padding))
