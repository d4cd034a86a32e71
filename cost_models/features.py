"""What a learned model sees of a layer: work, traffic, tiles that do not come out even, and the pattern."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import numpy as np
import pandas as pd

from cost_models.errors import BadRows
from cost_models.rows import Array, sparsities
from latbench import tables

SIZES = ("m", "k", "n")
CATEGORIES = ("op", "format", "layout", "epilogue", "kernel_requested")
_NUMBERS = ("unit_rows", "unit_columns", "kh", "kw", "stride_h", "c_in", "h", "w", "batch", "threads")
_TILES = {"m": (8, 32, 128), "k": (8, 32), "n": (8, 32, 128)}
_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "int8_wo": 1, "fp8": 1, "fp8_static": 1,
    "fp8_block": 1, "int4_wo": 0.5, "nvfp4": 0.5,
}  # fmt: skip


@dataclass(frozen=True)
class Physics:
    """What every row must do, (rows,) each: multiplications and additions, and bytes of weight, input and output."""

    flop_dense: Array
    flop_kept: Array
    weight_bytes: Array
    input_bytes: Array
    output_bytes: Array

    @classmethod
    def of(cls, X: pd.DataFrame) -> Self:
        """From m, k, n and sparsity_target; a convolution reads its image, not the k by n matrix it stands for."""
        m, k, n = (X[name].to_numpy(np.float64) for name in SIZES)
        density = 1 - sparsities(X)
        inputs = k * n
        if {"batch", "c_in", "h", "w"} <= set(X.columns):
            image = np.prod([X[name].to_numpy(np.float64) for name in ("batch", "c_in", "h", "w")], axis=0)
            inputs = np.where(np.isnan(image), inputs, image)
        element = np.full(len(X), 4.0)
        if "dtype_w" in X.columns:
            if unknown := set(X["dtype_w"]) - set(_BYTES):
                raise BadRows(f"dtype_w {unknown.pop()} has no known size, only {', '.join(_BYTES)} have")
            element = X["dtype_w"].map(_BYTES).to_numpy(np.float64)
        return cls(
            2 * m * k * n, 2 * m * k * n * density, element * m * k * density, element * inputs, element * m * n
        )


class Encoder:
    """Turns rows into a matrix of numbers, with the categories and the columns of the rows it was made from."""

    def __init__(self, X: pd.DataFrame) -> None:
        X = with_structure(X)
        self.levels = {name: set(X[name].dropna().unique()) for name in CATEGORIES if name in X.columns}
        self.numbers = [name for name in _NUMBERS if name in X.columns and X[name].notna().any()]

    def matrix(self, X: pd.DataFrame) -> Array:
        """The features of every row, (rows, features); NaN where a column means nothing for the row."""
        X = with_structure(X)
        physics = Physics.of(X)
        moved = physics.weight_bytes + physics.input_bytes + physics.output_bytes
        columns = [np.log2(X[name].to_numpy(np.float64)) for name in SIZES]
        columns += [
            sparsities(X),
            np.log2(physics.flop_kept + 1),
            np.log2(physics.flop_dense),
            np.log2(moved),
            np.log2((physics.flop_kept + 1) / moved),
        ]
        for name, tiles in _TILES.items():
            size = X[name].to_numpy(np.float64)
            columns += [np.ceil(size / tile) * tile / size for tile in tiles]
        columns.append(np.ceil(X["m"].to_numpy(np.float64) / 128) * np.ceil(X["n"].to_numpy(np.float64) / 128))
        columns += [X[name].to_numpy(np.float64) for name in self.numbers]
        columns += [(X[name] == level).to_numpy(float) for name in self.levels for level in sorted(self.levels[name])]
        return np.stack(columns, axis=1)


def with_structure(X: pd.DataFrame) -> pd.DataFrame:
    """X with what follows from its pattern column: format, unit_rows and unit_columns. ValueError for no pattern."""
    found = [_structure(pattern) for pattern in X["pattern"]]
    return X.assign(**{name: [row[name] for row in found] for name in ("format", "unit_rows", "unit_columns")})


@cache
def _structure(pattern: str) -> dict[str, Any]:
    columns = tables.structure(pattern)
    return {
        "format": columns["format"],
        "unit_rows": columns["block_h"] or columns["v"] or 1,
        "unit_columns": columns["block_w"] or columns["nm_m"] or 1,
    }
