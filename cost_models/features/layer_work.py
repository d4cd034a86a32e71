"""What a learned model sees of a layer: work, traffic, tiles that do not come out even, and the pattern."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pandas as pd

from cost_models.refusals import BadRows
from cost_models.rows.row_keys import Array, sparsities
from latbench.tables import table as tables

SIZES = ("m", "k", "n")
CATEGORIES = ("op", "format", "layout", "epilogue", "kernel_requested")
_NUMBERS = ("unit_rows", "unit_columns", "kh", "kw", "stride_h", "c_in", "h", "w", "batch", "threads")
_TILES = {"m": (8, 32, 128), "k": (8, 32), "n": (8, 32, 128)}
_MULTIPROCESSORS = {
    "p4": 20, "p100": 56, "v100": 80, "t4": 40, "a10": 72, "a30": 56, "a40": 84, "a100": 108, "l4": 58, "l40": 142,
    "l40s": 142, "h100": 132, "h200": 132, "b200": 148,
}  # fmt: skip  # of data sheets, by a word of the device's name
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
        weight = _element_bytes(X, "dtype_w", np.full(len(X), 4.0))
        # Of weights alone rounded, activations stay float16 at least; where it is known, they say what they are.
        inputs = inputs * _element_bytes(X, "dtype_a", np.maximum(weight, 2.0))
        outputs = m * n * _element_bytes(X, "dtype_out", np.maximum(weight, 2.0))
        return cls(2 * m * k * n, 2 * m * k * n * density, weight * m * k * density, inputs, outputs)


def _element_bytes(X: pd.DataFrame, name: str, unknown: Array) -> Array:
    """Bytes of an element of this dtype column, (rows,); `unknown` (rows,) where a row does not say it."""
    if name not in X.columns:
        return unknown
    codes, dtypes = pd.factorize(X[name])  # -1 where it is missing
    if foreign := set(dtypes) - set(_BYTES):
        raise BadRows(f"{name} {foreign.pop()} has no known size, only {', '.join(_BYTES)} have")
    return np.where(codes < 0, unknown, np.array([*(_BYTES[dtype] for dtype in dtypes), np.nan])[codes])


def multiprocessors(X: pd.DataFrame) -> Array:
    """How many the GPU of every row has, each of them at work on a tile of outputs, (rows,); NaN of others."""
    if "device" not in X.columns:
        return np.full(len(X), np.nan)
    return np.array([_multiprocessors(device) for device in X["device"]])


@cache
def _multiprocessors(device: Any) -> float:
    words = str(device).split("-")
    return next((float(count) for name, count in _MULTIPROCESSORS.items() if name in words), np.nan)


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
        tiles = np.ceil(X["m"].to_numpy(np.float64) / 128) * np.ceil(X["n"].to_numpy(np.float64) / 128)
        at_once = multiprocessors(X)
        waves = np.ceil(tiles / at_once)
        columns += [tiles, waves, tiles / (waves * at_once)]
        columns += [X[name].to_numpy(np.float64) for name in self.numbers]
        columns += [(X[name] == level).to_numpy(float) for name in self.levels for level in sorted(self.levels[name])]
        return np.stack(columns, axis=1)


@dataclass(frozen=True)
class Structure:
    """What follows from the pattern of every row, (rows,) each: format, and rows and columns of its units."""

    format: npt.NDArray[np.object_]
    unit_rows: npt.NDArray[np.int64]
    unit_columns: npt.NDArray[np.int64]

    @classmethod
    def of(cls, X: pd.DataFrame) -> Self:
        """From the column pattern. ValueError for what is none, TypeError where it is missing."""
        codes, patterns = pd.factorize(X["pattern"].to_numpy(object), use_na_sentinel=False)
        found = [_structure(pattern) for pattern in patterns]
        return cls(
            np.array([format for format, *_ in found], object)[codes],
            np.array([rows for _, rows, _ in found], np.int64)[codes],
            np.array([columns for *_, columns in found], np.int64)[codes],
        )


def with_structure(X: pd.DataFrame) -> pd.DataFrame:
    """X with the columns of its `Structure`."""
    return X.assign(**vars(Structure.of(X)))


@cache
def _structure(pattern: str) -> tuple[str, int, int]:
    columns = tables.structure(pattern)
    return columns["format"], columns["block_h"] or columns["v"] or 1, columns["block_w"] or columns["nm_m"] or 1
