"""Ranges of what was measured, and by how many octaves (factors of two) a layer lies outside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from cost_models.features.layer_work import SIZES, count_flop
from cost_models.features.pattern_structure import add_structure
from cost_models.rows.row_keys import FloatArray, RowMask, extract_sparsities
from cost_models.rows.shape_groups import group_by_shape

SIDES = ("smallest", "largest")
"""The two sides of a range. A row below the range lies on the side of the smallest shapes."""

_OPERATIONS = {"linear": "linear layer", "conv2d": "convolution"}
_KERNEL = ("kh", "kw", "stride_h", "stride_w", "dilation_h", "dilation_w")
_STRUCTURE = {"unit_rows": "rows of a block", "unit_columns": "columns of a block"}
_LEAST_DENSITY = 2.0**-10  # lower densities count as this one, so that the distance stays finite

Ranges = Mapping[str, tuple[float, float]]
"""The least and the largest measured value, by name."""

Counts = Mapping[str, FloatArray]
"""The measured numbers of columns n, rising, by operation: tokens, or output positions of all images."""

LARGEST_GAP = 1.5
"""Octaves from the nearest measured number of columns of the same operation up to which a row is near to it."""


def select_outer_fifths(X: pd.DataFrame, count: int = 1) -> dict[str, RowMask]:
    """Select the rows of the shapes with the least and with the most multiplications.

    Parameters
    ----------
    X : DataFrame of shape (rows, columns)
        Columns of `latbench.tables.schema.KEY_COLUMNS`.
    count : int
        How many fifths of the shapes each side holds.

    Returns
    -------
    dict of str to ndarray of bool, shape (rows,)
        A mask for each of SIDES; all False for fewer than five shapes.
    """
    shapes = group_by_shape(X)
    _, first = np.unique(shapes, return_index=True)
    order = np.argsort(count_flop(X)[first], kind="stable")
    outside = len(order) // 5 * count
    return {
        "smallest": np.isin(shapes, order[:outside]),
        "largest": np.isin(shapes, order[len(order) - outside :]),
    }


def find_ranges(X: pd.DataFrame, names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return the least and the largest value in X of the columns `names` and of other quantities that set the time.

    Sizes are those of each operation: the tokens of a linear layer are not the positions of images. The others are
    the multiplications ("flop"), a convolution's kernel, stride and dilation, and the block size and density of each
    format.
    """
    return {
        name: (float(np.nanmin(values)), float(np.nanmax(values)))
        for name, values in _extract_quantities(X, names).items()
        if not np.isnan(values).all()
    }


def find_column_counts(X: pd.DataFrame) -> dict[str, FloatArray]:
    """Return the numbers of columns n in X by operation; "" is the operation of rows without one."""
    return {op: np.unique(X["n"].to_numpy(np.float64)[own]) for op, own in _group_by_operation(X).items()}


def find_usual_gap(X: pd.DataFrame) -> float:
    """Return the median distance, in octaves, of a shape's number of columns n from that of the nearest other shape.

    Shapes are of the same operation. 0 where most numbers belong to several shapes.
    """
    shapes, gaps = group_by_shape(X), []
    for own in _group_by_operation(X).values():
        counts = pd.DataFrame({"shape": shapes[own], "n": X["n"].to_numpy(np.float64)[own]}).drop_duplicates()
        ordered = np.sort(np.log2(counts["n"].to_numpy()))
        steps = np.concatenate([[np.inf], np.diff(ordered), [np.inf]])
        nearest = np.minimum(steps[:-1], steps[1:])
        gaps.append(nearest[np.isfinite(nearest)])
    found = np.concatenate(gaps)
    return float(np.median(found)) if found.size else 0.0


def count_gap_octaves(X: pd.DataFrame, counts: Counts) -> dict[str, FloatArray]:
    """Return for each of SIDES how far each row is from the nearest measured number of columns of its operation.

    The unit is octaves. A row below the nearest number lies on the side of the smallest shapes. Rows of an operation
    without a measurement have 0.

    Parameters
    ----------
    X : DataFrame of shape (rows, columns)
        Columns of `latbench.tables.schema.KEY_COLUMNS`.
    counts : mapping of str to ndarray
        As `find_column_counts` returns them.

    Returns
    -------
    dict of str to ndarray of shape (rows,)
        Octaves, at least 0; one side of a row is 0.
    """
    away = np.zeros(len(X))
    for op, own in _group_by_operation(X).items():
        if op in counts and own.any():
            known, asked = np.log2(counts[op]), np.log2(X["n"].to_numpy(np.float64)[own])
            above = np.clip(np.searchsorted(known, asked), 1, max(len(known) - 1, 1)) % len(known)
            pair = np.stack([asked - known[above - 1], asked - known[above]])
            away[own] = pair[np.abs(pair).argmin(axis=0), np.arange(len(asked))]
    return {"smallest": np.maximum(-away, 0.0), "largest": np.maximum(away, 0.0)}


def _group_by_operation(X: pd.DataFrame) -> dict[str, RowMask]:
    """Return a mask of the rows of each operation."""
    if "op" not in X.columns:
        return {"": np.ones(len(X), bool)}
    operations = X["op"].astype(object).where(X["op"].notna(), "").astype(str)
    return {op: operations.eq(op).to_numpy() for op in sorted(operations.unique())}


def count_octaves_outside(X: pd.DataFrame, measured: Ranges) -> dict[str, FloatArray]:
    """Return for each of SIDES the most octaves by which each row exceeds the `measured` ranges; 0 inside."""
    _, below, above = _compare_with_ranges(X, measured)
    return {"smallest": below.max(axis=0, initial=0.0), "largest": above.max(axis=0, initial=0.0)}


def find_furthest(X: pd.DataFrame, measured: Ranges) -> list[tuple[str, float]]:
    """Return for each row the name of the range that it exceeds most, and by how many octaves; 0 inside."""
    names, below, above = _compare_with_ranges(X, measured)
    octaves = np.maximum(below, above)
    return [(names[index], float(octaves[index, row])) for row, index in enumerate(octaves.argmax(axis=0))]


def _compare_with_ranges(X: pd.DataFrame, measured: Ranges) -> tuple[list[str], FloatArray, FloatArray]:
    """Return the names in `measured`, and the octaves (names, rows) of each row below and above; at least 0."""
    quantities = _extract_quantities(X, [name for name in (*SIZES, "threads") if name in X.columns])
    unknown = np.full(len(X), np.nan)
    values = np.stack([quantities.get(name, unknown) for name in measured])
    low, high = (np.array([limits[end] for limits in measured.values()])[:, None] for end in (0, 1))
    # A quantity that does not apply to a row, such as the stride of a linear layer, is NaN: fmax makes it 0 octaves.
    return list(measured), np.fmax(np.log2(low / values), 0.0), np.fmax(np.log2(values / high), 0.0)


def _name_size(name: str, op: str) -> str:
    """Return what a size of an operation is called in messages."""
    return f"{name} of a {_OPERATIONS.get(op, op)}" if op else name


def _extract_quantities(X: pd.DataFrame, names: Sequence[str]) -> dict[str, FloatArray]:
    """Return by name the values, (rows,), that are compared with ranges; NaN where one does not apply to a row."""
    X = add_structure(X)
    quantities = {"flop": count_flop(X)}
    for name in names:
        values = X[name].to_numpy(np.float64)
        if name not in SIZES:
            quantities[name] = values
            continue
        for op, own in _group_by_operation(X).items():
            quantities[_name_size(name, op)] = np.where(own, values, np.nan)
    convolution = X["op"].eq("conv2d").to_numpy() if "op" in X.columns else np.zeros(len(X), bool)
    for name in _KERNEL:
        if name in X.columns:
            quantities[f"{name} of a convolution"] = np.where(convolution, X[name].to_numpy(np.float64), np.nan)
    density = np.maximum(1 - extract_sparsities(X), _LEAST_DENSITY)
    for format in sorted(set(X["format"])):
        own = X["format"].eq(format).to_numpy()
        quantities[f"density of {format}"] = np.where(own, density, np.nan)
        for name, words in _STRUCTURE.items():
            quantities[f"{words} of {format}"] = np.where(own, X[name].to_numpy(np.float64), np.nan)
    return quantities
