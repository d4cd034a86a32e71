"""What every format asks of a weight and its mask, and how it keeps its arrays from being changed."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Weight = NDArray[np.float32]
Mask = NDArray[np.bool_]

_Array = TypeVar("_Array", bound=np.ndarray)


class NotOfPattern(ValueError):
    """A mask keeps weights that its pattern cannot store."""


def check_weight_and_mask(weight: Weight, mask: Mask) -> None:
    """Refuse what no format can pack.

    weight: float32 (m, k), m and k at least 1, without NaN or infinity. mask: bool (m, k).
    """
    if not isinstance(weight, np.ndarray) or weight.dtype != np.float32:
        raise TypeError(f"a weight must be a float32 array, not {getattr(weight, 'dtype', type(weight).__name__)}")
    if weight.ndim != 2 or min(weight.shape) < 1:
        raise ValueError(f"a weight must be a matrix (m, k) with at least one row and column, not {weight.shape}")
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
        raise TypeError(f"a mask must be a bool array, not {getattr(mask, 'dtype', type(mask).__name__)}")
    if mask.shape != weight.shape:
        raise ValueError(f"the mask is {mask.shape} and the weight {weight.shape}: they must agree")
    wrong = ~np.isfinite(weight)
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise ValueError(
            f"a weight must be finite: {np.count_nonzero(wrong)} elements are not, the first is "
            f"{weight[row, column]} at row {row}, column {column}"
        )


def check_compressed(indptr: NDArray[np.int64], indices: NDArray[np.int32], columns: int) -> None:
    """Refuse (ValueError) row ends and column numbers of stored arrays that are not what a format says of them."""
    if indptr[0] != 0 or (np.diff(indptr) < 0).any() or indptr[-1] != indices.size:
        raise ValueError(f"indptr must rise from 0 to {indices.size}, the number of indices")
    if indices.size and not 0 <= indices.min() <= indices.max() < columns:
        raise ValueError(f"indices must lie in 0 to {columns - 1}, not {indices.min()} to {indices.max()}")
    falls = np.diff(indices) <= 0
    falls[indptr[(indptr > 0) & (indptr < indices.size)] - 1] = False
    if falls.any():
        raise ValueError(f"indices must rise within a row, and do not at {np.argmax(falls) + 1}")


def freeze(array: _Array) -> _Array:
    """Return `array` itself, C-contiguous and read-only from now on; it must be the caller's own."""
    if not array.flags.c_contiguous:
        raise ValueError("only a C-contiguous array can be frozen")
    array.setflags(write=False)
    return array
