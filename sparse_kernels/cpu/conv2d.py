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

from sparse_kernels.cpu import images, rows, single
from sparse_kernels.cpu.call import arguments
from sparse_kernels.cpu.panels import Groups, Panels, group_height, groups, panels
from sparse_kernels.cpu.scratch import Pool
from sparse_kernels.cpu.single import SingleRows, single_rows
from sparse_kernels.cpu.target import Target, host
from sparse_kernels.cpu.threads import exclusive
from sparse_kernels.cpu.vectors import TILE, Vectors, columns
from sparse_kernels.formats import Packed
from sparse_kernels.plan import Array
from sparse_kernels.shapes import Conv2dShape

# What it costs to collect valid positions afterwards, and to compute with vectors of half the width where the unit
# works in halves anyway, as a factor on the time: measured on Zen 4.
COLLECTING, HALF_WIDTH = 1.05, 1.12

# Elements of x and y of the images that are worked on at a time: 2 MB, the second-level caches of two cores.
IMAGES_CACHED = 500_000

# Batches whose places a plan remembers.
REMEMBERED = 8


@dataclass(frozen=True, eq=False)
class Positions(Vectors):
    """The vectors of positions.

    image, pitch: of the flat y that is collected afterwards; 0 where y is written directly.
    """

    image: int = 0
    pitch: int = 0


@dataclass(frozen=True, eq=False)
class Placed:
    """What a plan knows about one batch: the places of everything.

    weights: panels with offsets for columns; single rows as they are. offsets: int32 (k,), how far behind a vector of
    positions each column lies. where is None if x is read in place. columns: how many vectors of x a vector may read.
    """

    weights: Panels | SingleRows
    offsets: NDArray[np.int32]
    where: images.Layout | None
    at: Positions
    columns: int


@dataclass(frozen=True, eq=False)
class Conv2dPlan:
    """A convolution's plan: weights as panels, and what it knows of each batch it has met."""

    shape: Conv2dShape
    panels: Panels | SingleRows
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
        y_shape = (None, s.c_out, s.out_h, s.out_w)
        x, y, bias, code = arguments(x, (None, s.c_in, s.h, s.w), bias, activation, out, y_shape, s.c_out)
        batch = x.shape[0]
        if batch == 0:
            return y
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
        return replace(self, panels=self.panels.copy(), _pool=Pool(), _placed={})

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
        x, flat_y, fused = source.reshape(-1), result.reshape(-1), self.target.fused
        weights, offsets, vectors = placed.weights, placed.offsets, self.tile[1]
        if isinstance(weights, SingleRows):
            single.multiply_gathered(weights, fused, at, x, offsets, flat_y, bias, activation, self._pool)
        else:
            rows.multiply(weights, vectors, fused, at, x, flat_y, bias, activation, placed.columns)
        if at.pitch:
            collect(result, at.y_stride, at.image, at.pitch, y, threads)
            self._pool.give_back(result, -batch)
        if where is not None:
            self._pool.give_back(source, batch)

    def _place(self, shape: Conv2dShape) -> Placed:
        """Everything for this shape's batch."""
        if in_place(shape, self.target):
            where = None
            offsets = columns(shape.c_in, shape.h * shape.w)
            channels = shape.c_in
        else:
            where = images.layout(shape, self.target.lanes)
            offsets = where.offsets.reshape(-1, shape.c_in).T.ravel()
            channels = shape.c_in * (int(where.phases.max()) + 1)
        at = positions(shape, self.target, not isinstance(self.panels, SingleRows))
        weights = self.panels if isinstance(self.panels, SingleRows) else self.panels.placed(offsets)
        return Placed(weights, offsets, where, at, channels)


def prepare(packed: Packed, shape: Conv2dShape, layout: str) -> Conv2dPlan:
    """The plan of a convolution for about shape.batch images."""
    target = host()
    height = group_height(packed)
    by_channel = _by_channel(groups(packed), shape)
    weights: Panels | SingleRows
    if height == 1:
        some = replace(shape, batch=max(1, shape.batch))
        tile_rows, vectors = 1, min(TILE, positions(some, target, halves=False).x_starts.size)
        weights = single_rows(by_channel, shape.k, vectors * target.lanes)
    else:
        tile_rows, vectors = rows.tile(height, target)
        weights = panels(by_channel, tile_rows)
    name = f"numba.{packed.pattern.format}.conv2d.rows{tile_rows}x{vectors}.{target.name}"
    return Conv2dPlan(shape, weights, (tile_rows, vectors), target, name, layout)


def _by_channel(groups: Groups, shape: Conv2dShape) -> Groups:
    """The groups with columns numbered by channel, then tap: taps of a channel read nearly the same of x."""
    numbers = groups.columns % shape.c_in * (shape.kh * shape.kw) + groups.columns // shape.c_in
    group = np.repeat(np.arange(groups.indptr.size - 1), np.diff(groups.indptr))
    order = np.lexsort((numbers, group))
    return replace(groups, columns=numbers[order], values=groups.values[order])


def in_place(shape: Conv2dShape, target: Target) -> bool:
    """Whether x can be read as it lies: no tap but one, no padding, and room for a vector in an image."""
    unpadded = shape.kh == shape.kw == 1 and shape.stride == (1, 1) and shape.padding == (0, 0)
    return unpadded and target.lanes <= shape.h * shape.w < 2**31 // shape.c_in


@lru_cache(maxsize=256)
def positions(shape: Conv2dShape, target: Target, halves: bool = True) -> Positions:
    """The cheapest vectors that cover all output positions; halves: of half the width too, where that pays."""
    widths = (target.lanes, target.lanes // 2) if target.halves and halves else (target.lanes,)
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
        x_starts, y_starts = _flat(b * shape.c_in * size + run), _flat(b * shape.c_out * size + run)
        return [Positions(lanes, x_starts, 1, y_starts, size)]
    where = images.layout(shape, target.lanes)
    length = (shape.out_h - 1) * where.pitch + shape.out_w
    vectors = np.arange(-(-length // lanes)) * lanes
    image = vectors.size * lanes
    x_starts, y_starts = _flat(b * where.image + vectors), _flat(b * image + vectors)
    flat = Positions(lanes, x_starts, 1, y_starts, shape.batch * image, image=image, pitch=where.pitch)
    if shape.out_w < lanes:
        return [flat]
    i = np.arange(shape.out_h)[:, None]
    run = _run(shape.out_w, lanes)
    x_starts = (b[:, :, None] * where.image + i * where.pitch + run).ravel()
    y_starts = (b[:, :, None] * (shape.c_out * size) + i * shape.out_w + run).ravel()
    return [flat, Positions(lanes, x_starts.astype(np.int64), 1, y_starts.astype(np.int64), size)]


def _run(length: int, lanes: int) -> NDArray[np.int64]:
    """Starts of vectors that cover `length` >= lanes positions and nothing else: the last one overlaps."""
    return np.minimum(np.arange(-(-length // lanes), dtype=np.int64) * lanes, length - lanes)


def _flat(starts: NDArray[np.int64]) -> NDArray[np.int64]:
    return starts.ravel().astype(np.int64)
