"""Make a problem from a data frame with a row for each option.

The columns are:

    layer            text
    pattern          text    dense, vector:32, nm:2:4, ...
    sparsity         real    0 where the pattern is dense
    precision        text, optional: float32 (by default), bfloat16 or int8
    seconds          real
    low_seconds, high_seconds    real, optional: the interval of `seconds`
    error            real, optional: inf for an option that cannot be used; ignored for dense options
    tied             text, optional: layers with equal text here share one option
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd

from latbench.base.engine_registry import INT8
from latbench.errors import BadData
from search.inputs.problem_builder import Seconds, build_problem
from search.problem.error_table import list_precisions
from search.problem.layers import DENSE, LayerOptions, build_option, tie_layers
from search.problem.problem import Problem

REQUIRED = ("layer", "pattern", "sparsity", "seconds")
TEXTS = ("layer", "pattern", "precision", "tied")
"""Text columns, also where values look like numbers: layer 0.10 is not layer 0.1, and a layer may be called NA."""
NUMBERS = ("sparsity", "seconds", "low_seconds", "high_seconds", "error")
NO_NUMBER = ("", "nan", "NaN", "NA", "N/A", "null", "None")


def problem_from_frame(
    frame: pd.DataFrame,
    *,
    dense_seconds: Seconds | None = None,
    fixed_seconds: Seconds | None = None,
    dense_engine: str = DENSE,
) -> Problem:
    """Return the problem of a frame, with layers and options in the frame's order.

    Parameters
    ----------
    frame
        A frame with the columns that the module's docstring lists.
    dense_seconds
        Seconds of the dense model; by default the dense layers and `fixed_seconds` together.
    fixed_seconds
        Seconds of the converted model besides these layers; by default `dense_seconds` minus the dense layers.
    dense_engine
        The engine that runs the dense model.

    Raises
    ------
    BadData
        The frame lacks columns or holds impossible values. The message names the layer.
    UsageError
        A layer has no dense time to derive the times of the model from.
    """
    problem = build_problem(
        _build_layers(frame), dense_seconds=dense_seconds, fixed_seconds=fixed_seconds, dense_engine=dense_engine
    )
    changed = (frame["pattern"] != DENSE) | (np.array(list_precisions(frame)) == INT8)
    known = "error" in frame.columns and frame.loc[changed, "error"].notna().any()
    return problem.with_errors(frame) if known else problem


def read_frame(path: Path) -> pd.DataFrame:
    """Read the frame in a CSV or Parquet file. Raises BadData for any other file."""
    try:
        if path.suffix == ".parquet":
            return pd.read_parquet(path)
        missing = dict.fromkeys(TEXTS, "") | dict.fromkeys(NUMBERS, NO_NUMBER)
        return pd.read_csv(path, dtype=dict.fromkeys(TEXTS, str), keep_default_na=False, na_values=missing)
    except (OSError, ValueError) as error:
        raise BadData(f"{path}: no CSV or Parquet file that can be read: {error}") from error


def _build_layers(frame: pd.DataFrame) -> list[LayerOptions]:
    """Return the layers of a frame, tied as it says."""
    if missing := [name for name in REQUIRED if name not in frame.columns]:
        raise BadData(f"the frame has no column {', '.join(missing)}: a problem has {', '.join(REQUIRED)}")
    if frame.empty:
        raise BadData("the frame has no row")
    if frame["layer"].isna().any():
        raise BadData("the frame has a row without a layer")
    layers: dict[str, LayerOptions] = {}
    groups: dict[str, list[str]] = {}
    for name, own in frame.groupby("layer", sort=False):
        try:
            layer = layers[str(name)] = _build_layer(str(name), own)
        except (TypeError, ValueError) as error:
            raise BadData(f"layer {name}: {error}") from error
        several = own["tied"].fillna("").astype(str).unique() if "tied" in own.columns else [""]
        if len(several) > 1:
            raise BadData(f"layer {name} is tied to {several[0]!r} in one row and to {several[1]!r} in another")
        group = several[0]
        groups.setdefault(str(group) or f"\0{name}", []).append(layer.name)
    found = [[layers[name] for name in names] for names in groups.values()]
    return [tie_layers(group) if len(group) > 1 else group[0] for group in found]


def _build_layer(name: str, own: pd.DataFrame) -> LayerOptions:
    """Return the layer whose options are in these rows."""
    stored = own["pattern"].astype(str), own["sparsity"].astype(float), list_precisions(own)
    options = tuple(map(build_option, *stored))
    if twice := {str(it) for it in options if options.count(it) > 1}:
        raise BadData(f"layer {name} has {min(twice)} twice")
    seconds = own["seconds"].to_numpy(np.float64)
    low, high = (
        own[column].to_numpy(np.float64) if column in own.columns else seconds
        for column in ("low_seconds", "high_seconds")
    )
    for it, *values in zip(options, seconds, low, high, strict=True):
        if (
            not all(math.isfinite(value) and value >= 0 for value in values)
            or not values[1] <= values[0] <= values[2]
        ):
            raise BadData(
                f"layer {name} takes {values[0]:g} s ({values[1]:g} to {values[2]:g}) as {it}: seconds must be "
                "finite, at least 0, and within their interval"
            )
    errors = np.array([0.0 if it.in_database is None else math.nan for it in options])
    return LayerOptions(name, options, seconds, low, high, errors)
