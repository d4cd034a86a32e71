"""Two-dimensional convolutions on the CPU, NCHW in and out: any pattern, by the kernel over rows, without im2col.

The rows of the weight are output channels, the vector runs along output positions, and a column of the weight is an
element offset from the position: channel and tap together. Where positions start:

in place   1x1, stride 1, no padding: x and y as they lie, each image a run of positions
row by row images re-laid (`images`), a vector never leaves a row of the output: it is stored to y directly
flat       images re-laid, vectors run over the ends of rows; the valid positions are collected afterwards
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

import numba
import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cpu import images, rows
from sparse_kernels.cpu.linear import contiguous_bias
from sparse_kernels.cpu.panels import Groups, Panels, group_height, groups, panels
from sparse_kernels.cpu.scratch import Pool
from sparse_kernels.cpu.target import Target, host
from sparse_kernels.cpu.threads import exclusive
from sparse_kernels.formats import Packed
from sparse_kernels.plan import ACTIVATIONS, Array, check_call
from sparse_kernels.shapes import Conv2dShape

# Elements of x that stay in the second-level cache beside the weights: 400 KB.
CACHED = 100_000

# What it costs to collect valid positions afterwards, and to compute with vectors of half the width where the unit
# works in halves anyway, as a factor on the time: measured on Zen 4.
COLLECTING, HALF_WIDTH = 1.05, 1.12

# Elements of x and y of the images that are worked on at a time: 2 MB, the second-level caches of two cores.
IMAGES_CACHED = 500_000

# Batches whose places a plan remembers.
REMEMBERED = 8


@dataclass(frozen=True, eq=False)
class Positions:
    """The vectors of positions: their starts in x and in y (int64), and the stride of rows in y.

    lanes: of a vector. image, pitch: of the flat y that is collected afterwards; 0 where y is written directly.
    """

    lanes: int
    x_starts: NDArray[np.int64]
    y_starts: NDArray[np.int64]
    y_stride: int
    image: int = 0
    pitch: int = 0


@dataclass(frozen=True, eq=False)
class Placed:
    """What a plan knows about one batch: panels with offsets for columns, and the places of everything.

    where is None if x is read in place. cached: vectors whose x stays in the second-level cache.
    """

    weights: tuple[np.ndarray, ...]
    where: images.Layout | None
    at: Positions
    cached: int


@dataclass(frozen=True, eq=False)
class Conv2dPlan:
    """A convolution's plan: weights as panels, and what it knows of each batch it has met."""

    shape: Conv2dShape
    panels: Panels
    tile: tuple[int, int]  # rows, vectors
    target: Target
    kernel: str
    layout: str
    _pool: Pool = field(default_factory=Pool)
    _placed: dict[int, Placed] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as the kernel reads them."""
        return self.panels.nbytes

    def __call__(
        self, x: Array, bias: Array | None = None, activation: str | None = None, out: Array | None = None
    ) -> Array:
        """activation(convolution of x + bias), as `Plan` says; x that is not C-contiguous is copied."""
        s = self.shape
        check_call(x, (None, s.c_in, s.h, s.w), bias, activation, out, (None, s.c_out, s.out_h, s.out_w), s.c_out)
        batch = x.shape[0]
        y = np.empty((batch, s.c_out, s.out_h, s.out_w), np.float32) if out is None else out
        if batch == 0:
            return y
        x, bias, code = np.ascontiguousarray(x), contiguous_bias(bias, s.c_out), ACTIVATIONS.index(activation)
        # A few images at a time, so that what one step writes is in the cache when the next one reads it.
        threads = numba.get_num_threads()
        rounds = -(-batch * (s.c_in * s.h * s.w + s.c_out * s.out_h * s.out_w) // IMAGES_CACHED)
        step = -(-batch // (rounds * threads)) * threads
        with exclusive():
            for first in range(0, batch, step):
                self._run(x[first : first + step], bias, code, y[first : first + step])
        return y

    def copy(self) -> Conv2dPlan:
        """The same plan with weights of its own."""
        return Conv2dPlan(self.shape, self.panels.copy(), self.tile, self.target, self.kernel, self.layout)

    def _run(self, x: Array, bias: Array, activation: int, y: Array) -> None:
        batch = x.shape[0]
        placed = self._placed.get(batch)
        if placed is None:
            for oldest in list(self._placed)[: 1 - REMEMBERED]:
                self._placed.pop(oldest, None)
            placed = self._placed[batch] = self._place(replace(self.shape, batch=batch))
        where, at = placed.where, placed.at
        threads = numba.get_num_threads()
        fill, collect = images.kernels(self.target.lanes)
        source, result = x, y
        if where is not None:
            source = self._pool.take(where.size, batch)
            fill(x, source, where.phases, where.plane, where.image, where.pitch, *self.shape.padding, threads)
        if at.pitch:
            result = self._pool.take(self.shape.c_out * at.y_stride, -batch)
        rows.kernel(*self.tile, at.lanes, self.target.fused)(
            placed.weights,
            source.reshape(-1),
            1,
            at.x_starts,
            result.reshape(-1),
            at.y_stride,
            at.y_starts,
            bias,
            activation,
            rows.block(at.x_starts.size, self.tile[1], placed.cached, threads),
            threads,
        )
        if at.pitch:
            collect(result, at.y_stride, at.image, at.pitch, y, threads)
            self._pool.give_back(result, -batch)
        if where is not None:
            self._pool.give_back(source, batch)

    def _place(self, shape: Conv2dShape) -> Placed:
        """Everything for this shape's batch."""
        if in_place(shape, self.target):
            where = None
            offsets = (np.arange(shape.c_in) * (shape.h * shape.w)).astype(np.int32)
            channels = shape.c_in
        else:
            where = images.layout(shape, self.target.lanes)
            offsets = where.offsets
            channels = shape.c_in * (int(where.phases.max()) + 1)
        table, values, columns, work, row_ids = self.panels.arrays
        at = positions(shape, self.target)
        weights = (table, values, offsets[columns], work, row_ids)
        return Placed(weights, where, at, CACHED // (channels * at.lanes))


def prepare(packed: Packed, shape: Conv2dShape, layout: str) -> Conv2dPlan:
    """The plan of a convolution for about shape.batch images."""
    target = host()
    tile = rows.tile(group_height(packed), target)
    name = f"numba.{packed.pattern.format}.conv2d.rows{tile[0]}x{tile[1]}.{target.name}"
    cut = panels(_by_channel(groups(packed), shape.c_in), tile[0])
    return Conv2dPlan(shape, cut, tile, target, name, layout)


def _by_channel(groups: Groups, c_in: int) -> Groups:
    """The groups with their columns sorted by channel, then tap: taps of a channel read nearly the same of x."""
    group = np.repeat(np.arange(groups.indptr.size - 1), np.diff(groups.indptr))
    order = np.lexsort((groups.columns // c_in, groups.columns % c_in, group))
    return replace(groups, columns=groups.columns[order], values=groups.values[order])


def in_place(shape: Conv2dShape, target: Target) -> bool:
    """Whether x can be read as it lies: no tap but one, no padding, and room for a vector in an image."""
    unpadded = shape.kh == shape.kw == 1 and shape.stride == (1, 1) and shape.padding == (0, 0)
    return unpadded and target.lanes <= shape.h * shape.w < 2**31 // shape.c_in


@lru_cache(maxsize=256)
def positions(shape: Conv2dShape, target: Target) -> Positions:
    """The cheapest vectors that cover all output positions."""
    widths = (target.lanes, target.lanes // 2) if target.halves else (target.lanes,)
    choices = [choice for lanes in widths for choice in _coverings(shape, lanes, target)]

    def cost(at: Positions) -> float:
        collected = COLLECTING if at.pitch else 1.0
        return at.x_starts.size * at.lanes * collected * (HALF_WIDTH if at.lanes < target.lanes else 1.0)

    return min(choices, key=cost)


def _coverings(shape: Conv2dShape, lanes: int, target: Target) -> list[Positions]:
    """The ways to cover the output with vectors of `lanes`."""
    b = np.arange(shape.batch)[:, None]
    size = shape.out_h * shape.out_w
    if in_place(shape, target):
        run = _run(size, lanes)
        return [Positions(lanes, _flat(b * shape.c_in * size + run), _flat(b * shape.c_out * size + run), size)]
    where = images.layout(shape, target.lanes)
    length = (shape.out_h - 1) * where.pitch + shape.out_w
    vectors = np.arange(-(-length // lanes)) * lanes
    image = vectors.size * lanes
    flat = Positions(
        lanes, _flat(b * where.image + vectors), _flat(b * image + vectors), shape.batch * image, image, where.pitch
    )
    if shape.out_w < lanes:
        return [flat]
    i = np.arange(shape.out_h)[:, None]
    run = _run(shape.out_w, lanes)
    x_starts = (b[:, :, None] * where.image + i * where.pitch + run).ravel()
    y_starts = (b[:, :, None] * (shape.c_out * size) + i * shape.out_w + run).ravel()
    return [flat, Positions(lanes, x_starts.astype(np.int64), y_starts.astype(np.int64), size)]


def _run(length: int, lanes: int) -> NDArray[np.int64]:
    """Starts of vectors that cover `length` >= lanes positions and nothing else: the last one overlaps."""
    return np.minimum(np.arange(-(-length // lanes), dtype=np.int64) * lanes, length - lanes)


def _flat(starts: NDArray[np.int64]) -> NDArray[np.int64]:
    return starts.ravel().astype(np.int64)
