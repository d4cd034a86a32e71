"""Count the bytes of packed weights."""

from __future__ import annotations

from functools import cache

import numpy as np

from search.problem.layers import Option
from sparse_kernels.formats import pack
from sparse_kernels.patterns import ShflBW, VectorWise, parse
from sparse_kernels.shapes import Shape


def count_weight_bytes(option: Option, shape: Shape) -> float:
    """Return the bytes of a layer's weight as `sparse_kernels.formats` packs it: values and their positions."""
    return float(_packed(option, shape.m, shape.k))


@cache
def _packed(option: Option, m: int, k: int) -> int:
    """Return the bytes of the mask of equal scores.

    All masks of a pattern and sparsity keep equally many vectors or blocks. Where the pattern does not divide
    the shape, masks may keep more or fewer of the cut ones. They take a few bytes more.
    """
    pattern = parse(option.pattern)
    alike = VectorWise(pattern.v) if isinstance(pattern, ShflBW) else pattern  # equal bytes, without a search of rows
    mask = alike.mask(np.ones((m, k)), option.sparsity)
    return int(pack(mask.astype(np.float32), mask, alike).nbytes)
