"""Features of a layer for learned models: sizes, work, traffic, tile quantization and the pattern."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import numpy as np
import pandas as pd

from cost_models.features.layer_work import SIZES, LayerWork
from cost_models.features.pattern_structure import add_structure
from cost_models.rows.row_keys import FloatArray, extract_sparsities

CATEGORIES = ("op", "format", "layout", "epilogue", "kernel_requested")
_NUMBERS = ("unit_rows", "unit_columns", "kh", "kw", "stride_h", "c_in", "h", "w", "batch", "threads")
_TILES = {"m": (8, 32, 128), "k": (8, 32), "n": (8, 32, 128)}
_MULTIPROCESSORS = {
    "p4": 20, "p100": 56, "v100": 80, "t4": 40, "a10": 72, "a30": 56, "a40": 84, "a100": 108, "l4": 58, "l40": 142,
    "l40s": 142, "h100": 132, "h200": 132, "b200": 148,
}  # fmt: skip  # from NVIDIA's data sheets, by a word of the device's name


def count_multiprocessors(X: pd.DataFrame) -> FloatArray:
    """Return the streaming multiprocessors of every row's GPU, (rows,); NaN for a CPU or an unknown GPU."""
    if "device" not in X.columns:
        return np.full(len(X), np.nan)
    return np.array([_look_up_multiprocessors(device) for device in X["device"]])


@cache
def _look_up_multiprocessors(device: Any) -> float:
    words = str(device).split("-")
    return next((float(count) for name, count in _MULTIPROCESSORS.items() if name in words), np.nan)


@dataclass(frozen=True)
class FeatureEncoder:
    """Encoder of rows as a matrix of numbers, with the categories and columns of the rows it was built from.

    Attributes
    ----------
    levels : mapping of str to set
        Values of each categorical column; each becomes one indicator feature.
    numbers : list of str
        Numeric columns that have a value.
    """

    levels: Mapping[str, frozenset[str]]
    numbers: list[str]

    @classmethod
    def from_rows(cls, X: pd.DataFrame) -> Self:
        """Return the encoder of rows like those of X."""
        X = add_structure(X)
        return cls(
            {name: frozenset(X[name].dropna().unique()) for name in CATEGORIES if name in X.columns},
            [name for name in _NUMBERS if name in X.columns and X[name].notna().any()],
        )

    def encode(self, X: pd.DataFrame) -> FloatArray:
        """Return the features of every row, (rows, features); NaN where a column does not apply to the row."""
        X = add_structure(X)
        work = LayerWork.from_rows(X)
        traffic = work.weight_bytes + work.input_bytes + work.output_bytes
        columns = [np.log2(X[name].to_numpy(np.float64)) for name in SIZES]
        columns += [
            extract_sparsities(X),
            np.log2(work.flop_kept + 1),
            np.log2(work.flop_dense),
            np.log2(traffic),
            np.log2((work.flop_kept + 1) / traffic),
        ]
        for name, tiles in _TILES.items():
            size = X[name].to_numpy(np.float64)
            columns += [np.ceil(size / tile) * tile / size for tile in tiles]
        tiles = np.ceil(X["m"].to_numpy(np.float64) / 128) * np.ceil(X["n"].to_numpy(np.float64) / 128)
        multiprocessors = count_multiprocessors(X)
        waves = np.ceil(tiles / multiprocessors)
        columns += [tiles, waves, tiles / (waves * multiprocessors)]
        columns += [X[name].to_numpy(np.float64) for name in self.numbers]
        columns += [(X[name] == level).to_numpy(float) for name in self.levels for level in sorted(self.levels[name])]
        return np.stack(columns, axis=1)
