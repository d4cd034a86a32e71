"""Predicted against measured times of held-out points, by models of the same kind as the fitted one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from latbench.base.number_format import format_count, format_percent, format_seconds
from latbench.report import point_frames
from latbench.report.figures import (
    COLOURS,
    Figure,
    build_time_axis,
    draw_line,
    escape_name,
    find_colour,
    find_format,
    find_symbol,
    round_values,
    select_sample,
)

if TYPE_CHECKING:
    from cost_models.model_file import ModelFile

COVERAGE = 0.9
ROWS = 3000  # predicted at most, in whole shapes: fitting again to a long table takes minutes
POINTS = 1200  # drawn, each with an interval
FOLDS = 5

SPARSITIES, SHAPES = "held-out sparsities of measured shapes", "held-out shapes"


def build_frame(model: ModelFile, table: pd.DataFrame) -> pd.DataFrame:
    """Build a frame of predictions for held-out rows of the model's table, by models fitted to the other rows.

    A look-up holds out sparsities, because it interpolates over them. Any other model holds out a fifth of the
    shapes; a transfer does so for its own device. Random shapes represent a long table; rows without m, k and n are
    left out.

    Columns: held_out (sparsities or shapes), shape, pattern, format, engine, sparsity. Then measured, measured_low,
    measured_high, predicted, low and high in seconds. The interval has the coverage COVERAGE, and is NaN where too
    little was measured. Then ratio (predicted over measured) and inside (bool). It is empty where nothing can be held
    out.
    """
    from sklearn.base import clone

    from cost_models.estimators.anchored_lookup import AnchoredLookup
    from cost_models.estimators.transfer import Transfer
    from cost_models.evaluation.held_out_errors import split_by_sparsity
    from cost_models.rows.shape_groups import group_by_shape, split_by_shape
    from cost_models.rows.training_rows import select_training_rows

    X, y = select_training_rows(table, model.where)
    asked = X[["m", "k", "n"]].notna().all(axis=1).to_numpy()
    others = np.zeros(len(X), bool)  # rows of other devices, from which a transfer only learns
    if isinstance(model.estimator, Transfer):
        others = asked & X["device"].ne(model.estimator.device).to_numpy()
    some = _whole_shapes(X, asked & ~others) | _whole_shapes(X, others)
    X, y, others = point_frames.convert_categories(X[some]).reset_index(drop=True), y[some], others[some]
    if isinstance(model.estimator, AnchoredLookup):
        masks, held_out = list(split_by_sparsity(X)), SPARSITIES
    else:
        masks, held_out = [], SHAPES
        if not others.all() and (shapes := group_by_shape(X[~others])).max():
            masks = [np.zeros(len(X), bool)]
            masks[0][~others] = split_by_shape(shapes, FOLDS, 0) == 0
    parts = [_predicted(clone(model.estimator), X, y, mask) for mask in masks if mask.any() and not mask.all()]
    if not parts:
        return pd.DataFrame()
    return pd.concat(parts, ignore_index=True).assign(held_out=held_out)


def _whole_shapes(X: pd.DataFrame, among: np.ndarray) -> np.ndarray:
    """Return a mask of random whole shapes among the rows `among`, ROWS rows at most."""
    from cost_models.rows.shape_groups import group_by_shape

    if among.sum() <= ROWS:
        return among
    shapes = group_by_shape(X[among])
    order = np.random.default_rng(0).permutation(shapes.max() + 1)
    sizes = np.bincount(shapes)[order]
    kept = order[: max(2, int(np.searchsorted(np.cumsum(sizes), ROWS)))]
    found = among.copy()
    found[among] = np.isin(shapes, kept)
    return found


def _predicted(model: Any, X: pd.DataFrame, y: np.ndarray, held_out: np.ndarray) -> pd.DataFrame:
    from cost_models.refusals import Unanchored, Uncalibrated

    try:
        model.fit(X[~held_out].reset_index(drop=True), y[~held_out])
    except Unanchored:  # too few rows are left for a model of this kind
        return pd.DataFrame()
    known = np.flatnonzero(held_out)[model.covers(X[held_out])]  # a refused row is no error of the model
    rows, seconds = X.iloc[known].reset_index(drop=True), y[known]
    predicted = model.predict(rows)
    try:
        low, high = model.predict_interval(rows, COVERAGE)
    except Uncalibrated:
        low = high = np.full(len(rows), np.nan)
    names = zip(rows["backend"], rows["kernel_requested"].fillna(""), strict=True)
    return pd.DataFrame({
        "shape": [point_frames.format_shape(row) for row in rows.to_dict("records")],
        "pattern": rows["pattern"].to_numpy(), "format": list(map(find_format, rows["pattern"])),
        "engine": [point_frames.format_engine(*pair) for pair in names],
        "sparsity": rows["sparsity_target"].to_numpy(),
        "measured": seconds, "measured_low": rows["low_seconds"].to_numpy(float),
        "measured_high": rows["high_seconds"].to_numpy(float), "predicted": predicted, "low": low, "high": high,
        "ratio": predicted / seconds, "inside": (low <= seconds) & (seconds <= high),
    })  # fmt: skip


def format_coverage(rows: pd.DataFrame) -> str:
    """Return a sentence with the share of measurements inside their intervals."""
    known = rows["low"].notna()
    if not known.any():
        return "Too few points were measured for prediction intervals."
    inside, whole_shapes = float(rows.loc[known, "inside"].mean()), rows["held_out"].eq(SHAPES).all()
    return (
        f"The chart shows {format_count(int(known.sum()))} held-out points"
        f"{' (from a fifth of the shapes, without those that the model refuses)' if whole_shapes else ''} "
        f"with their {format_percent(COVERAGE)} intervals. "
        f"{format_percent(round(inside, 3))} of the measurements lie inside."
    )


def draw_figure(rows: pd.DataFrame) -> Figure:
    """Draw predicted over measured time by measured time, with intervals; a cross marks a point outside its own."""
    shown = select_sample(rows, POINTS)
    ratios = shown[["ratio"]].assign(low=shown["low"] / shown["measured"], high=shown["high"] / shown["measured"])
    lowest, highest = float(np.nanmin(ratios)), float(np.nanmax(ratios))
    traces = []
    for name in [*COLOURS, *sorted(set(shown["format"]) - set(COLOURS))]:
        own = shown[shown["format"] == name]
        if own.empty:
            continue
        # The legend shows the symbol of the first point.
        own = own.assign(missed=own["low"].notna() & ~own["inside"]).sort_values("missed", kind="stable")
        ends = ratios.loc[own.index]
        traces.append({
            "type": "scatter", "mode": "markers", "name": escape_name(name),
            "x": round_values(own["measured"]), "y": round_values(own["ratio"]),
            "error_y": {
                "type": "data", "array": _widths(ends["high"] - ends["ratio"]),
                "arrayminus": _widths(ends["ratio"] - ends["low"]), "thickness": 1, "width": 0,
            },
            "marker": {
                "color": find_colour(str(name)), "size": 8,
                "symbol": ["x" if wrong else find_symbol(str(name)) for wrong in own["missed"]],
            },
            "text": [_hover(row) for row in own.to_dict("records")], "hovertemplate": "%{text}<extra></extra>",
        })  # fmt: skip
    x = build_time_axis("measured time", float(shown["measured"].min()), float(shown["measured"].max()))
    ticks = _ratio_ticks(lowest, highest)
    layout = {
        "xaxis": x,
        "yaxis": {
            "title": {"text": "predicted over measured"}, "type": "log", **ticks,
            "range": [math.log10(lowest) - 0.01, math.log10(highest) + 0.01],
        },
        "shapes": [draw_line(y=1)], "height": 420,
    }  # fmt: skip
    return {"data": traces, "layout": layout}


def _widths(values: pd.Series) -> list[float]:
    return round_values(values.fillna(0.0))


def _ratio_ticks(low: float, high: float) -> Figure:
    """Build about ten ticks such as -10%, exact, +10%; factors such as 0.5× where errors exceed 2×."""
    if low < 0.5 or high > 2:
        steps = [step * 10.0**power for power in range(-3, 4) for step in (1, 2, 5)]
        ticks = [step for step in steps if low <= step <= high]
        return {"tickvals": ticks, "ticktext": ["exact" if tick == 1 else f"{tick:g}×" for tick in ticks]}
    widest = max(high - 1, 1 - low)
    step = next(step for step in (0.01, 0.02, 0.05, 0.1, 0.2) if widest / step <= 6)
    errors = np.arange(-math.floor((1 - low) / step), math.floor((high - 1) / step) + 1) * step
    return {
        "tickvals": [round(1 + error, 4) for error in errors],
        "ticktext": ["exact" if abs(error) < step / 2 else f"{100 * error:+.0f}%" for error in errors],
    }


def _hover(row: Mapping[Any, Any]) -> str:
    interval = "" if math.isnan(row["low"]) else f"<br>{'inside' if row['inside'] else 'outside'} the interval"
    return (
        f"<b>{escape_name(row['shape'])}</b><br>{escape_name(row['pattern'])} at {format_percent(row['sparsity'])}, "
        f"{escape_name(row['engine'])}"
        f"<br>measured {format_seconds(row['measured'], row['measured_low'], row['measured_high'])}"
        f"<br>predicted {format_seconds(row['predicted'], row['low'], row['high'])}: "
        f"{100 * (row['ratio'] - 1):+.1f}%{interval}"
    )
