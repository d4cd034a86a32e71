"""What packed weights take in memory."""

from __future__ import annotations

from functools import cache

import numpy as np

from search.problem.layers import Option
from sparse_kernels.formats import pack
from sparse_kernels.patterns import ShflBW, VectorWise, parse
from sparse_kernels.shapes import Shape


def weight_bytes(option: Option, shape: Shape) -> float:
    """Bytes of a weight as `sparse_kernels.formats` packs it: values, and what says where they are."""
    return float(_packed(option, shape.m, shape.k))


@cache
def _packed(option: Option, m: int, k: int) -> int:
    """Masks of one pattern and sparsity differ in what they keep, not in how much: that of equal scores will do."""
    pattern = parse(option.pattern)
    alike = VectorWise(pattern.v) if isinstance(pattern, ShflBW) else pattern  # packed the same, without the search
    mask = alike.mask(np.ones((m, k)), option.sparsity)
    return int(pack(mask.astype(np.float32), mask, alike).nbytes)
