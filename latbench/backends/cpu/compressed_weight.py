"""Weights as libraries of sparse matrices take them: compressed sparse rows (CSR), or blocks of them (BSR)."""

from __future__ import annotations

from latbench.backends.cpu.prepare_point import SyntheticLayer
from latbench.backends.installed_engines import Unsupported
from latbench.workloads.points import Point
from sparse_kernels.formats import BlockWeight, CSRWeight, pack
from sparse_kernels.patterns import NM, BlockWise, Unstructured
from sparse_kernels.shapes import Conv2dShape


def compress_weight(point: Point, layer: SyntheticLayer) -> CSRWeight | BlockWeight:
    """Return the weight of a linear layer by elements (unstructured, N:M) or in whole blocks (block-wise).

    Raises Unsupported for convolutions, for other patterns, and where blocks reach past the weight.
    """
    pattern, shape, packed = point.pattern, point.shape, layer.packed
    if isinstance(shape, Conv2dShape):
        raise Unsupported(f"{point.backend} has no sparse convolutions")
    if isinstance(pattern, NM):
        packed = pack(layer.weight, layer.weight != 0, Unstructured())
    if isinstance(pattern, BlockWise) and (shape.m % pattern.rows or shape.k % pattern.cols):
        raise Unsupported(f"{point.backend} needs whole blocks, and {pattern} does not divide {shape.m} x {shape.k}")
    if not isinstance(packed, CSRWeight | BlockWeight):
        raise Unsupported(f"{point.backend} runs unstructured, N:M and block-wise linear layers, not {pattern}")
    return packed
