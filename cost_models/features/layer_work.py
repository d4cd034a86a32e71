"""Arithmetic and memory traffic that every kernel of a layer needs at least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import pandas as pd

from cost_models.refusals import BadRows
from cost_models.rows.row_keys import FloatArray, extract_sparsities

SIZES = ("m", "k", "n")
"""Output features, input features and tokens of the matrix product that a layer is."""

_ELEMENT_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, "int8": 1, "int8_wo": 1, "fp8": 1,
    "fp8_static": 1, "fp8_block": 1, "int4": 0.5, "int4_wo": 0.5, "nvfp4": 0.5,
}  # fmt: skip


@dataclass(frozen=True)
class LayerWork:
    """Arithmetic and traffic of every row.

    Attributes
    ----------
    flop_dense, flop_kept : ndarray of shape (rows,)
        Multiplications and additions of the dense layer, and of its kept weights.
    weight_bytes, input_bytes, output_bytes : ndarray of shape (rows,)
        Bytes of the kept weights, of the input and of the output.
    """

    flop_dense: FloatArray
    flop_kept: FloatArray
    weight_bytes: FloatArray
    input_bytes: FloatArray
    output_bytes: FloatArray

    @classmethod
    def from_rows(cls, X: pd.DataFrame) -> Self:
        """Return the work of m, k, n and sparsity_target. A convolution reads its image, not the k by n matrix."""
        m, k, n = (X[name].to_numpy(np.float64) for name in SIZES)
        density = 1 - extract_sparsities(X)
        inputs = k * n
        if {"batch", "c_in", "h", "w"} <= set(X.columns):
            image = np.prod([X[name].to_numpy(np.float64) for name in ("batch", "c_in", "h", "w")], axis=0)
            inputs = np.where(np.isnan(image), inputs, image)
        weight = _find_element_bytes(X, "dtype_w", np.full(len(X), 4.0))
        # With unknown activation dtypes: if only weights are quantized, activations have at least two bytes.
        inputs = inputs * _find_element_bytes(X, "dtype_a", np.maximum(weight, 2.0))
        outputs = m * n * _find_element_bytes(X, "dtype_out", np.maximum(weight, 2.0))
        return cls(2 * m * k * n, 2 * m * k * n * density, weight * m * k * density, inputs, outputs)


def count_flop(X: pd.DataFrame) -> FloatArray:
    """Return the multiplications and additions of every row's dense layer, (rows,)."""
    return LayerWork.from_rows(X).flop_dense


def _find_element_bytes(X: pd.DataFrame, name: str, unknown: FloatArray) -> FloatArray:
    """Return the bytes of one element of the dtype in column `name`, (rows,); `unknown` (rows,) fills the gaps."""
    if name not in X.columns:
        return unknown
    codes, dtypes = pd.factorize(X[name])  # -1 marks a missing value
    if foreign := set(dtypes) - set(_ELEMENT_BYTES):
        raise BadRows(f"{name} {foreign.pop()} has no known size, only {', '.join(_ELEMENT_BYTES)} have")
    return np.where(codes < 0, unknown, np.array([*(_ELEMENT_BYTES[dtype] for dtype in dtypes), np.nan])[codes])
