"""Convolutions by the matrix unit (`amx`): vectors of 32 positions along its columns; threads share positions.

A thread takes a block of positions at a time: part of an image, or a few whole ones. It splits what they read of x
into thirds, plane by plane (a plane is a channel, or one phase of it: `images`), which then stay in the second-level
cache, passes the panels over them, and finishes each tile's sums into y. A tap reads x at any distance from a
position, so thirds lie as x does: all high ones, then all middle ones, then all low ones, each (planes, segments),
where a segment is what the block has of an image.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cpu.codegen import amx_tiles as amx
from sparse_kernels.cpu.codegen.amx_tiles import GATHERED_BYTES, ROWS, TILE_BYTES, TOKENS
from sparse_kernels.cpu.kernels.amx_linear import MatrixPanels
from sparse_kernels.cpu.launch.linear_call import Product
from sparse_kernels.cpu.launch.parallel_kernel import ParallelKernel, in_parts
from sparse_kernels.cpu.layouts.vector_grid import VectorGrid
from sparse_kernels.cpu.runtime.scratch_buffers import borrow, give_back

# Positions of a vector.
LANES = TOKENS

# Bytes of split x of a block: what stays in the second-level cache while weights pass by.
CACHED_BYTES = 1_000_000

# What a thread needs beside split x: the tiles' configuration, gathered columns, an unread tile, sums of 32 rows.
FIXED_BYTES = amx.SAVED_BYTES + 2 * GATHERED_BYTES + TILE_BYTES + 4 * TILE_BYTES


@dataclass(frozen=True, eq=False)
class Blocks:
    """How the positions of a batch are cut into blocks, and where what a block reads lies in split x.

    offsets: int32 (k,), where each column lies, from where its position does. per_image: vectors of an image. size:
    vectors of a block, at most `per_image`; or if that is all of them, images: of a block. planes: of x, plane_size
    elements apart. before: where a tap reads first, from a position. reach: how far taps of a plane lie apart.
    segment, plane: elements of split x that one of them takes.
    """

    offsets: NDArray[np.int32]
    per_image: int
    size: int
    images: int
    planes: int
    plane_size: int
    before: int
    reach: int
    segment: int
    plane: int

    @property
    def third_bytes(self) -> int:
        """From one third of x to the next."""
        return self.planes * self.plane * 2

    @property
    def thread_bytes(self) -> int:
        """What a thread needs: whole cache lines."""
        return FIXED_BYTES + 3 * self.third_bytes


def blocks(
    x_starts: NDArray[np.int64], images: int, plane_of: NDArray[np.int64], tap: NDArray[np.int64], plane_size: int
) -> Blocks:
    """For vectors of `images` images that start there in x; plane_of, tap (k,): of each column, and where in it."""
    per_image = x_starts.size // images
    starts, planes = x_starts[:per_image] - x_starts[0], int(plane_of.max()) + 1
    before = int(tap.min())
    reach = int(tap.max()) - before

    def segment(size: int) -> int:
        """Elements that so many vectors read, the most of any."""
        return _whole_vectors(int((starts[size - 1 :] - starts[: per_image - size + 1]).max()) + LANES + reach)

    def bytes_of(size: int) -> int:
        return 3 * 2 * planes * segment(size)

    fitting = bisect_right(range(1, per_image + 1), CACHED_BYTES, key=bytes_of)
    size = -(-per_image // -(-per_image // max(1, fitting)))  # in even blocks
    together = max(1, min(images, CACHED_BYTES // bytes_of(size))) if size == per_image else 1
    # An odd number of cache lines from plane to plane: the planes of a position are in different sets of a cache.
    plane = together * segment(size) | LANES
    offsets = plane_of * plane + (tap - before)
    return Blocks(
        offsets.astype(np.int32), per_image, size, together, planes, plane_size, before, reach, segment(size), plane
    )


def _whole_vectors(elements: int) -> int:
    return -(-elements // LANES) * LANES


def prepared(
    panels: MatrixPanels, cut: Blocks, at: VectorGrid, x_size: int, threads: int, emulated: bool = False
) -> Product:
    """The product at these vectors of LANES positions; false if not all sums were finite. x_size: elements of x."""
    parts, framed = min(threads, at.x_starts.size), at.keep is not None
    bound = kernel(panels.row_tiles, framed, emulated).bound(
        "x_at y_at bias_at activation added_at scratch_at", weights=panels.arrays, row_ids=panels.row_ids,
        x_size=x_size, x_starts=at.x_starts, y_stride=at.y_stride, y_starts=at.y_starts,
        keep=at.y_starts if at.keep is None else at.keep, cut=(cut.per_image, cut.size, cut.images),
        source=(cut.planes, cut.plane_size, cut.before, cut.reach),
        split=(cut.segment, cut.plane, cut.thread_bytes), parts=parts,
    )  # fmt: skip

    def product(x: int, y: int, bias: int, activation: int, added: int) -> bool:
        scratch = borrow(parts * cut.thread_bytes // 4)
        finite = bound(x, y, bias, activation, added, scratch.at)
        give_back(scratch)
        return finite

    return product


@cache
def kernel(row_tiles: int, framed: bool, emulated: bool = False) -> ParallelKernel:
    """The compiled loops for panels of so many tiles.

    Called with (panels.arrays, panels.row_ids, x, its elements, starts of vectors in x, y, elements of y a row step
    is, starts of vectors in y, lanes of them to keep, what is added to y, bias (m), activation code, scratch at a
    cache line, and of `Blocks` (per_image, size, images), (planes, plane_size, before, reach), (segment, plane,
    thread_bytes), and parts). x, y, bias, scratch and what is added: addresses, of which 0 adds nothing. Starts,
    lanes to keep: int64.
    """
    if not (emulated or amx.available()):
        raise RuntimeError("this process has no matrix unit")
    emulate, frames, rows = int(emulated), int(framed), row_tiles * ROWS

    @in_parts
    def multiply(  # type: ignore[no-untyped-def]
        part, weights, row_ids, x_at, x_size, x_starts, y_at, y_stride, y_starts, keep, added_at, bias_at, activation,
        scratch_at, cut, source, split, parts,
    ):  # fmt: skip
        values, columns, table = weights
        per_image, size, images = cut
        planes, plane_size, before, reach = source
        segment, plane, thread_bytes = split
        values_at, columns_at, ids_at = values.ctypes.data, columns.ctypes.data, row_ids.ctypes.data
        panels, total = table.shape[0], x_starts.size
        distance = planes * plane * 2
        flags = np.zeros(1, np.int32)
        places = np.empty(images * per_image, np.int64)  # where each vector of a block lies
        saved = scratch_at + part * thread_bytes
        gathered = saved + amx.SAVED_BYTES
        sums = gathered + 2 * GATHERED_BYTES + TILE_BYTES
        thirds = sums + 4 * TILE_BYTES
        flag = flags.ctypes.data
        first, end = total * part // parts, total * (part + 1) // parts
        amx.begin(emulate, saved)
        while first < end:
            # Images that are not cut, or what the thread has of them; or what is left of one, in even blocks.
            stop = min((first // per_image + images) * per_image, end)
            count = 1 if images > 1 else (stop - first + size - 1) // size
            stop = first + (stop - first + count - 1) // count
            begin, number = first, 0
            while begin < stop:
                behind = min((begin // per_image + 1) * per_image, stop)
                start = x_starts[begin] + before
                vectors = (x_starts[behind - 1] + TOKENS + reach - x_starts[begin] + TOKENS - 1) // TOKENS
                for p in range(planes):
                    here = start + p * plane_size
                    there = thirds + (p * plane + number * segment) * 2
                    amx.split_run(x_at + here * 4, vectors, x_size - here, there, distance)
                for v in range(begin, behind):
                    places[v - first] = thirds + (number * segment + x_starts[v] - x_starts[begin]) * 2
                begin = behind
                number += 1
            phase = 0
            amx.gather(columns_at + table[0, 1] * 4, table[0, 2] == 0, places[0], distance, gathered)
            for panel in range(panels):
                steps, all_steps = table[panel, 2], table[panel, 3]
                for v in range(first, stop):
                    # What comes after this tile: the next vector, or the first one with the next panel.
                    next_v, then = v + 1 - first, panel
                    if v + 1 == stop:
                        next_v, then = 0, min(panel + 1, panels - 1)
                    amx.matrix_tile(
                        emulate, row_tiles, 2, values_at + table[panel, 0], columns_at + table[panel, 1] * 4,
                        steps, all_steps, places[v - first], distance,
                        values_at + table[then, 0], columns_at + table[then, 1] * 4, table[then, 2] == 0,
                        places[next_v], gathered, phase, sums,
                    )  # fmt: skip
                    phase += all_steps
                    place = y_starts[v] * 4
                    amx.finish_positions(
                        frames, sums, rows, ids_at + panel * rows * 4, bias_at, activation, keep[v],
                        added_at + place if added_at else 0, y_at + place, y_stride, flag,
                    )  # fmt: skip
            first = stop
        amx.end(emulate, saved)
        return flags[0]

    return multiply
