"""Rows of layers that were not measured, for a cost model to predict."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from cost_models.rows.row_keys import KEY, SHAPE
from latbench.errors import UsageError
from latbench.workloads.points import convert_shape_to_columns, parse_patterns, select_sparsities
from sparse_kernels.patterns import Pattern
from sparse_kernels.shapes import Conv2dShape, LinearShape, Shape

GivenShape = Shape | tuple[int, int, int]


def build_rows(
    *,
    shape: GivenShape | Sequence[GivenShape],
    pattern: str | Pattern | Sequence[str | Pattern],
    sparsity: float | Sequence[float] | None = None,
    measured: pd.DataFrame | None = None,
    **columns: Any,
) -> pd.DataFrame:
    """Build the rows of layers, as cost models predict them: one for each shape, pattern and sparsity.

    Parameters
    ----------
    shape : (m, k, n), LinearShape, Conv2dShape, or a sequence of them
        Output features, input features and tokens of a linear layer; or a shape of `sparse_kernels.shapes`.
    pattern : str, Pattern, or a sequence of them
        Such as "shflbw:32", "nm:2:4" or "dense".
    sparsity : float or sequence of float, optional
        Shares of dropped weights, in [0, 1). Patterns with a sparsity of their own, such as nm:2:4, keep to that.
    measured : DataFrame, optional
        The rows that the model was fitted to. Each key column with one value in those that fit is filled with it: the
        device, for example.
    **columns
        Values of further key columns, such as ``backend="numba"`` or ``threads=2``.

    Returns
    -------
    DataFrame
        Columns of `latbench.tables.schema.KEY_COLUMNS`, as far as they are known; the sparsity changes fastest.

    Raises
    ------
    UsageError
        A pattern is unknown, lacks a sparsity or does not suit a shape, or a column is no key column.

    Examples
    --------
    >>> import latbench as lb
    >>> X, y = lb.read_training_rows("bundled://amd-epyc-zen4-1-thread", {"backend": "numba"})
    >>> asked = lb.rows(shape=(768, 768, 128), pattern="shflbw:32", sparsity=[0.75, 0.9], measured=X)
    >>> slow, fast = lb.Boosted().fit(X, y).predict(asked)
    >>> bool(fast < slow)
    True
    """
    if unknown := [name for name in columns if name not in KEY]:
        raise UsageError(f"{unknown[0]} is no key column; these are {', '.join(KEY)}")
    shapes = [_convert_shape(each) for each in ([shape] if _is_shape(shape) else _listed(shape))]
    patterns = parse_patterns([str(each) for each in _listed(pattern)])
    given = [] if sparsity is None else [float(each) for each in _listed(sparsity)]
    if wrong := [each for each in given if not 0 <= each < 1]:
        raise UsageError(f"a sparsity lies between 0 and 1 (0.9 drops nine of ten weights), not {wrong[0]:g}")
    rows = []
    for layer, own in itertools.product(shapes, patterns):
        if (reason := own.refuses(layer)) is not None:
            raise UsageError(f"this layer cannot be {own}: {reason}")
        if not (sparsities := select_sparsities(own, given)):
            raise UsageError(f"{own} needs a sparsity")
        for each in sparsities:
            asked = {**convert_shape_to_columns(layer), "pattern": str(own), "sparsity_target": each, **columns}
            rows.append(asked if measured is None else _find_settled(measured, asked) | asked)
    return pd.DataFrame(rows)


def _is_shape(given: Any) -> bool:
    is_triple = isinstance(given, Sequence) and len(given) == 3 and all(isinstance(each, int) for each in given)
    return is_triple or isinstance(given, LinearShape | Conv2dShape)


def _convert_shape(given: Any) -> Shape:
    if isinstance(given, LinearShape | Conv2dShape):
        return given
    try:
        return LinearShape(*given)
    except (TypeError, ValueError):
        raise UsageError(f"a linear layer's shape is (m, k, n), whole numbers above 0, not {given!r}") from None


def _listed(given: Any) -> list[Any]:
    """Return what was given as a list, be it one value or several."""
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]


def select_fitting_rows(measured: pd.DataFrame, asked: Mapping[str, Any]) -> pd.DataFrame:
    """Select the measured rows that have the values asked for, but for sizes and sparsity.

    A value that no row has is ignored.
    """
    rows = measured
    for name in (name for name in asked if name == "op" or name not in (*SHAPE, "sparsity_target")):
        fitting = rows[rows[name] == asked[name]]
        rows = fitting if len(fitting) else rows
    return rows


def _find_settled(measured: pd.DataFrame, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the key columns with one value in all measured rows that fit what is asked, but for sizes and sparsity.

    A table of one device, for example, predicts for that device.
    """
    rows = select_fitting_rows(measured, asked)
    names = [name for name in KEY if name not in asked and name in rows.columns]
    return {name: rows[name].iloc[0] for name in names if rows[name].nunique(dropna=False) == 1}
