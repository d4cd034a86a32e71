"""Predicted against measured: what the cost model says of points that it did not see when it was fitted for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from latbench.base.number_format import format_count, format_percent, format_seconds
from latbench.report import frames as data
from latbench.report.figures import COLOURS, Figure, colour, family, line_at, plain, short, symbol, thinned, time_axis

if TYPE_CHECKING:
    from cost_models.storage import ModelFile

COVERAGE = 0.9
ROWS = 3000  # whole shapes up to so many rows are predicted: fitting again to a long table takes minutes
POINTS = 1200  # that the chart carries, each with an interval
FOLDS = 5

SPARSITIES, SHAPES = "held-out sparsities of measured shapes", "held-out shapes"


def tidy(model: ModelFile, table: pd.DataFrame) -> pd.DataFrame:
    """Predictions for held-out rows of the model's own table, by models of its kind that were fitted to the others.

    A look-up leaves out sparsities, as it is used; any other model a fifth of the shapes, a transfer of those of its
    own device. Of a long table some shapes, drawn at random, stand for all; rows that do not tell m, k and n are
    left out. Columns: held_out (which of the two), shape, pattern, format, engine, sparsity; measured, measured_low,
    measured_high, predicted, low, high in seconds, with an interval of COVERAGE that is NaN where too little was
    measured for one; ratio (predicted over measured), inside (bool). Empty where nothing can be held out.
    """
    from sklearn.base import clone

    from cost_models import AnchoredLookup, Transfer
    from cost_models.rows import shape_groups, split_by_shape, training_rows
    from cost_models.validation import by_sparsity

    X, y = training_rows(table, model.where)
    asked = X[["m", "k", "n"]].notna().all(axis=1).to_numpy()
    others = np.zeros(len(X), bool)  # that a transfer learns from, and does not predict
    if isinstance(model.estimator, Transfer):
        others = asked & X["device"].ne(model.estimator.device).to_numpy()
    some = _whole_shapes(X, asked & ~others) | _whole_shapes(X, others)
    X, y, others = data.plain(X[some]).reset_index(drop=True), y[some], others[some]
    if isinstance(model.estimator, AnchoredLookup):
        masks, held_out = list(by_sparsity(X)), SPARSITIES
    else:
        masks, held_out = [], SHAPES
        if not others.all() and (shapes := shape_groups(X[~others])).max():
            masks = [np.zeros(len(X), bool)]
            masks[0][~others] = split_by_shape(shapes, FOLDS, 0) == 0
    parts = [_predicted(clone(model.estimator), X, y, mask) for mask in masks if mask.any() and not mask.all()]
    if not parts:
        return pd.DataFrame()
    return pd.concat(parts, ignore_index=True).assign(held_out=held_out)


def _whole_shapes(X: pd.DataFrame, among: np.ndarray) -> np.ndarray:
    """Which of the rows `among` (mask) belong to shapes, drawn at random, of no more than ROWS rows together."""
    from cost_models.rows import shape_groups

    if among.sum() <= ROWS:
        return among
    shapes = shape_groups(X[among])
    order = np.random.default_rng(0).permutation(shapes.max() + 1)
    sizes = np.bincount(shapes)[order]
    kept = order[: max(2, int(np.searchsorted(np.cumsum(sizes), ROWS)))]
    found = among.copy()
    found[among] = np.isin(shapes, kept)
    return found


def _predicted(model: Any, X: pd.DataFrame, y: np.ndarray, held_out: np.ndarray) -> pd.DataFrame:
    from cost_models import Unanchored, Uncalibrated

    try:
        model.fit(X[~held_out].reset_index(drop=True), y[~held_out])
    except Unanchored:  # what is left says too little for a model of this kind
        return pd.DataFrame()
    known = np.flatnonzero(held_out)[model.covers(X[held_out])]  # what it would refuse is no error of its own
    rows, seconds = X.iloc[known].reset_index(drop=True), y[known]
    predicted = model.predict(rows)
    try:
        low, high = model.predict_interval(rows, COVERAGE)
    except Uncalibrated:
        low = high = np.full(len(rows), np.nan)
    names = zip(rows["backend"], rows["kernel_requested"].fillna(""), strict=True)
    return pd.DataFrame({
        "shape": [data.shape_label(row) for row in rows.to_dict("records")],
        "pattern": rows["pattern"].to_numpy(), "format": list(map(family, rows["pattern"])),
        "engine": [data.engine_name(*pair) for pair in names], "sparsity": rows["sparsity_target"].to_numpy(),
        "measured": seconds, "measured_low": rows["low_seconds"].to_numpy(float),
        "measured_high": rows["high_seconds"].to_numpy(float), "predicted": predicted, "low": low, "high": high,
        "ratio": predicted / seconds, "inside": (low <= seconds) & (seconds <= high),
    })  # fmt: skip


def sentence(rows: pd.DataFrame) -> str:
    """How many intervals hold."""
    known = rows["low"].notna()
    if not known.any():
        return "Too little was measured for intervals."
    inside, whole_shapes = float(rows.loc[known, "inside"].mean()), rows["held_out"].eq(SHAPES).all()
    return (
        f"Below, {format_count(int(known.sum()))} held-out points"
        f"{' of a fifth of the shapes, those that the model does not refuse,' if whole_shapes else ''} "
        f"with their {format_percent(COVERAGE)} intervals: "
        f"{format_percent(round(inside, 3))} of the measurements lie inside."
    )


def figure(rows: pd.DataFrame) -> Figure:
    """Predicted over measured time, with its interval, by measured time; a cross where the interval fails to hold."""
    shown = thinned(rows, POINTS)
    ratios = shown[["ratio"]].assign(low=shown["low"] / shown["measured"], high=shown["high"] / shown["measured"])
    lowest, highest = float(np.nanmin(ratios)), float(np.nanmax(ratios))
    traces = []
    for name in [*COLOURS, *sorted(set(shown["format"]) - set(COLOURS))]:
        own = shown[shown["format"] == name]
        if own.empty:
            continue
        # The legend shows the first one's symbol.
        own = own.assign(missed=own["low"].notna() & ~own["inside"]).sort_values("missed", kind="stable")
        ends = ratios.loc[own.index]
        traces.append({
            "type": "scatter", "mode": "markers", "name": plain(name),
            "x": short(own["measured"]), "y": short(own["ratio"]),
            "error_y": {
                "type": "data", "array": _widths(ends["high"] - ends["ratio"]),
                "arrayminus": _widths(ends["ratio"] - ends["low"]), "thickness": 1, "width": 0,
            },
            "marker": {
                "color": colour(str(name)), "size": 8,
                "symbol": ["x" if wrong else symbol(str(name)) for wrong in own["missed"]],
            },
            "text": [_hover(row) for row in own.to_dict("records")], "hovertemplate": "%{text}<extra></extra>",
        })  # fmt: skip
    x = time_axis("measured time", float(shown["measured"].min()), float(shown["measured"].max()))
    ticks = _ratio_ticks(lowest, highest)
    layout = {
        "xaxis": x,
        "yaxis": {
            "title": {"text": "predicted over measured"}, "type": "log", **ticks,
            "range": [math.log10(lowest) - 0.01, math.log10(highest) + 0.01],
        },
        "shapes": [line_at(y=1)], "height": 420,
    }  # fmt: skip
    return {"data": traces, "layout": layout}


def _widths(values: pd.Series) -> list[float]:
    return short(values.fillna(0.0))


def _ratio_ticks(low: float, high: float) -> Figure:
    """-20%, -10%, exact, +10%, ... as far apart as leaves some ten of them; 0.5×, 5× where some are off by 2×."""
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
        f"<b>{plain(row['shape'])}</b><br>{plain(row['pattern'])} at {format_percent(row['sparsity'])}, "
        f"{plain(row['engine'])}"
        f"<br>measured {format_seconds(row['measured'], row['measured_low'], row['measured_high'])}"
        f"<br>predicted {format_seconds(row['predicted'], row['low'], row['high'])}: "
        f"{100 * (row['ratio'] - 1):+.1f}%{interval}"
    )
