"""Weights in eight bits as panels of quads: four columns beside each other, a byte each, in the place of a float32.

A quad is kept if any of its columns is, for any row of the group. So patterns whose columns come in fours
(`block:32x4`) keep just their weights, and others multiply zeros.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cpu.codegen.vector_emitter import QUADS_BY_SIGNED
from sparse_kernels.cpu.layouts.panels import Groups, build_groups
from sparse_kernels.formats import unpack
from sparse_kernels.formats.int8 import MIDDLE, QUAD, InputRange, Int8Weight


class QuadArrays(NamedTuple):
    """What sums of quads are worth, for the rows of all panels; empty arrays where tiles multiply floats.

    offsets: int32, added to the sums. scales: float32, the worth of 1. reading: float32 (2), how x is read: 1 / scale
    and zero.
    """

    offsets: NDArray[np.int32]
    scales: NDArray[np.float32]
    reading: NDArray[np.float32]

    def copy(self) -> QuadArrays:
        """Return the same with arrays of its own."""
        return QuadArrays(self.offsets.copy(), self.scales.copy(), self.reading.copy())


FLOATS_ONLY = QuadArrays(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.float32))


class QuadLayout(NamedTuple):
    """How results are left as quads, beside floats or in their place.

    starts: int64 (vectors), where each vector of positions starts. reading: float32 (2), 1 / scale and zero. padding:
    the 32 bits of lanes that are no position.
    """

    starts: NDArray[np.int64]
    reading: NDArray[np.float32]
    padding: int


LEAVES_NONE = QuadLayout(np.empty(0, np.int64), np.empty(0, np.float32), 0)


def build_reading(input_range: InputRange) -> NDArray[np.float32]:
    """Return a range as kernels take it: 1 / scale and zero."""
    return np.array([1 / input_range.scale, input_range.zero], np.float32)


def build_quad_groups(weight: Int8Weight, run: int) -> Groups:
    """Return the groups of a weight with quads as columns; values are four bytes each in the place of a float32.

    run: columns that lie beside each other: all of a linear layer, the channels of each tap of a convolution. Each
    run begins with a new quad.
    """
    groups = build_groups(weight.packed)
    column = groups.columns % run
    quads = groups.columns // run * -(-run // QUAD) + column // QUAD
    group_of = np.repeat(np.arange(groups.indptr.size - 1), np.diff(groups.indptr))
    keys, place = np.unique(group_of * np.int64(2**32) + quads, return_inverse=True)  # rising by group, then by quad
    values = np.zeros((keys.size, groups.height, QUAD), np.int8)
    values[place, :, column % QUAD] = groups.values
    indptr = np.searchsorted(keys >> 32, np.arange(groups.indptr.size)).astype(np.int64)
    columns = (keys & (2**32 - 1)).astype(np.int32)
    return replace(groups, indptr=indptr, columns=columns, values=values.view(np.float32)[:, :, 0])


def build_quad_arrays(weight: Int8Weight, row_ids: NDArray[np.int32], numbers: int) -> QuadArrays:
    """Return what sums are worth for these rows of the weight, -1 for none, and how x is read.

    numbers: how quads are multiplied. QUADS_BY_SIGNED leaves out 128 of each x.
    """
    reading = weight.input_range or InputRange(1.0, MIDDLE)
    left_out = MIDDLE if numbers == QUADS_BY_SIGNED else 0
    sums = unpack(weight.packed).sum(axis=1, dtype=np.float64)
    offsets, scales = np.zeros(row_ids.size, np.int32), np.zeros(row_ids.size, np.float32)
    exist = row_ids >= 0
    offsets[exist] = ((left_out - reading.zero) * sums)[row_ids[exist]]
    scales[exist] = (weight.scales * np.float32(reading.scale))[row_ids[exist]]
    return QuadArrays(offsets, scales, build_reading(reading))
