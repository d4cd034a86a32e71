"""What packed weights take in memory: bytes of each option of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np

from search.layers import Layer, Option
from sparse_kernels.formats import pack
from sparse_kernels.patterns import ShflBW, VectorWise, parse
from sparse_kernels.shapes import Shape


def weight_bytes(layer: Layer, shape: Shape) -> dict[Option, float]:
    """Bytes of the layer's weight as `sparse_kernels.formats` packs it: values, and what says where they are."""
    return {option: float(_packed(option, shape.m, shape.k)) for option in layer.options}


def of_layers(layers: tuple[Layer, ...], shapes: Mapping[str, Shape]) -> dict[str, dict[Option, float]]:
    """The same for the layers of the model that these stand for."""
    return {part.name: weight_bytes(part, shapes[part.name]) for layer in layers for part in layer.parts}


@cache
def _packed(option: Option, m: int, k: int) -> int:
    """Masks of one pattern and sparsity differ in what they keep, not in how much: that of equal scores will do."""
    pattern = parse(option.pattern)
    alike = VectorWise(pattern.v) if isinstance(pattern, ShflBW) else pattern  # packed the same, without the search
    mask = alike.mask(np.ones((m, k)), option.sparsity)
    return int(pack(mask.astype(np.float32), mask, alike).nbytes)
