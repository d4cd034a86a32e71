"""Formats that store the kept weights of each pattern: one file a format, NumPy only."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from sparse_kernels.formats import bfloat16, block, csr, dense, nm, vector
from sparse_kernels.formats.block import BlockWeight
from sparse_kernels.formats.checks import Mask, NotOfPattern, Weight, freeze
from sparse_kernels.formats.csr import CSRWeight
from sparse_kernels.formats.dense import DenseWeight
from sparse_kernels.formats.nm import NMWeight
from sparse_kernels.formats.vector import VectorWeight
from sparse_kernels.patterns import NM, BlockWise, Dense, Pattern, ShflBW, Unstructured, VectorWise

Packed = DenseWeight | CSRWeight | NMWeight | BlockWeight | VectorWeight

__all__ = [
    "BlockWeight",
    "CSRWeight",
    "DenseWeight",
    "NMWeight",
    "NotOfPattern",
    "Packed",
    "VectorWeight",
    "check",
    "copied",
    "pack",
    "rounded",
    "unpack",
]


def pack(weight: Weight, mask: Mask | None, pattern: Pattern) -> Packed:
    """Store the kept elements of a weight in the pattern's format. Kept zeros stay kept.

    Parameters
    ----------
    weight : float32 array (m, k)
        Finite numbers.
    mask : bool array (m, k) or None
        True where an element is kept; None keeps everything.
    pattern : Pattern
        The pattern of the mask, such as ``VectorWise(32)``.

    Returns
    -------
    Packed
        The packed weight; its arrays are read-only.

    Raises
    ------
    NotOfPattern
        If the mask is not of the pattern (a ValueError).
    ValueError, TypeError
        If weight or mask has another type or shape, or a weight is not finite.
    """
    if mask is None:
        mask = np.ones(np.shape(weight), bool)
    match pattern:
        case Dense():
            return dense.pack(weight, mask, pattern)
        case Unstructured():
            return csr.pack(weight, mask, pattern)
        case NM():
            return nm.pack(weight, mask, pattern)
        case BlockWise():
            return block.pack(weight, mask, pattern)
        case VectorWise() | ShflBW():
            return vector.pack(weight, mask, pattern)
    raise TypeError(f"a pattern such as patterns.VectorWise(32) is needed, not {pattern!r}")


def unpack(packed: Packed) -> Weight:
    """Return the weight of a packed weight.

    Parameters
    ----------
    packed : Packed
        What `pack` returned.

    Returns
    -------
    float32 array (m, k)
        Zero where elements were dropped; a new array.
    """
    match packed:
        case DenseWeight():
            return dense.unpack(packed)
        case CSRWeight():
            return csr.unpack(packed)
        case NMWeight():
            return nm.unpack(packed)
        case BlockWeight():
            return block.unpack(packed)
        case VectorWeight():
            return vector.unpack(packed)
    raise TypeError(f"a packed weight is needed, not {type(packed).__name__}")


def check(packed: Packed) -> None:
    """Refuse (ValueError) a packed weight whose arrays, as from a damaged file, contradict each other.

    Kernels read and write where its indices tell them to.
    """
    match packed:
        case CSRWeight():
            csr.check(packed)
        case NMWeight():
            nm.check(packed)
        case BlockWeight():
            block.check(packed)
        case VectorWeight():
            vector.check(packed)


def copy_packed(packed: Packed) -> Packed:
    """Return the same packed weight in arrays of its own, at other addresses."""
    fields = {field.name: getattr(packed, field.name) for field in dataclasses.fields(packed)}
    own: dict[str, Any] = {name: freeze(it.copy()) for name, it in fields.items() if isinstance(it, np.ndarray)}
    return dataclasses.replace(packed, **own)


def round_packed(packed: Packed) -> Packed:
    """Return the same packed weight with every value rounded to the nearest bfloat16 (ties to even), held in float32.

    ValueError where a value is too large for bfloat16.
    """
    values = bfloat16.widen_bits(bfloat16.round_to_bits(packed.values))
    too_large = np.isinf(values)
    if too_large.any():
        raise ValueError(f"bfloat16 cannot hold the weight {packed.values[too_large][0]:g}")
    return dataclasses.replace(packed, values=freeze(values))
