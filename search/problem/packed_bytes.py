"""Count the bytes of packed weights."""

from __future__ import annotations

from functools import cache

import numpy as np

from latbench.base.engine_registry import INT8
from search.problem.layers import Option
from sparse_kernels.formats import pack
from sparse_kernels.patterns import Pattern, ShflBW, VectorWise, parse
from sparse_kernels.shapes import Shape
from sparse_kernels.top_units import Scores


def count_weight_bytes(option: Option, shape: Shape) -> float:
    """Return the most bytes that a layer's weight takes as `sparse_kernels.formats` packs it.

    Values and their positions count. In eight bits a value takes one byte, and each row has a scale.
    """
    packed, values = _packed(option.pattern, option.sparsity, shape.m, shape.k)
    return float(packed - 3 * values + 4 * shape.m if option.precision == INT8 else packed)


@cache
def _packed(spec: str, sparsity: float, m: int, k: int) -> tuple[int, int]:
    """Return the most bytes that a mask of this pattern and sparsity takes, and how many values are among them.

    Vectors and blocks that the shape cuts off are packed whole, and hold fewer weights. A mask that keeps all of them
    therefore keeps the most, and takes the most bytes. Where the shape cuts nothing off, all masks take the same.
    """
    pattern = parse(spec)
    alike = pattern.in_order if isinstance(pattern, ShflBW) else pattern  # no more bytes, without a search of rows
    mask = alike.mask(_favour_cut_units(alike, m, k), sparsity)
    packed = pack(mask.astype(np.float32), mask, alike)
    return int(packed.nbytes), int(packed.values.size)


def _favour_cut_units(pattern: Pattern, m: int, k: int) -> Scores:
    """Return scores (m, k) by which a mask first keeps the vectors or blocks that the shape cuts off most."""
    rows = pattern.v if isinstance(pattern, VectorWise) else getattr(pattern, "rows", 1)
    columns = getattr(pattern, "cols", 1)
    weights = np.outer(_measure_units(m, rows), _measure_units(k, columns))
    return 1 / weights**2  # a unit's sum falls with its size


def _measure_units(length: int, size: int) -> Scores:
    """Return for each row, or column, how many the vector or block around it has, (length,)."""
    sizes = np.full(length, float(size))
    sizes[length - length % size :] = length % size
    return sizes
