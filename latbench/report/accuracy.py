"""Accuracy against measured speedup, by pattern: results of experiments, a row a trained model.

A CSV or Parquet file with the columns

    pattern     text    dense, unstructured, vector:32, ...; dense rows are what all others are held against
    method      text    how it was pruned or trained
    speedup     real    measured, over the fastest dense engine
    accuracy    real    a share of one, or any score of which more is better
    seed        whole
    sparsity    real, optional: rows that differ in seed alone are one point; without it, those of equal speedup are

Other columns are left alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from latbench.errors import BadData
from latbench.report import units
from latbench.report.figures import DASHES, SYMBOLS, Figure, colour, plain, short
from latbench.report.views import Cell, Chart, Section, count_cell, table

COLUMNS = ("pattern", "method", "speedup", "accuracy", "seed")
DENSE = "dense"


def read(path: Path) -> pd.DataFrame:
    """The rows of such a file. Raises BadData, naming the column, for anything else."""
    try:
        frame = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    except FileNotFoundError:
        raise BadData(f"{path} does not exist: results have the columns {', '.join(COLUMNS)}") from None
    except (OSError, ValueError) as error:
        raise BadData(f"{path}: no CSV or Parquet file that can be read: {error}") from error
    if missing := [name for name in COLUMNS if name not in frame.columns]:
        raise BadData(f"{path}: it has no column {', '.join(missing)}; results have {', '.join(COLUMNS)}")
    if frame.empty:
        raise BadData(f"{path}: it holds no result")
    try:
        frame = frame.astype({"pattern": str, "method": str, "speedup": float, "accuracy": float})
    except ValueError as error:
        raise BadData(f"{path}: speedup and accuracy are numbers: {error}") from error
    if not (np.isfinite(frame[["speedup", "accuracy"]]).all(axis=None) and (frame["speedup"] > 0).all()):
        raise BadData(f"{path}: every speedup and accuracy must be finite, and speedups above 0")
    return frame


def tidy(results: pd.DataFrame) -> pd.DataFrame:
    """One row a point, over its seeds, by pattern, method and rising speedup.

    Columns: pattern, method, sparsity (NaN if unknown), seeds, speedup (median), speedup_low, speedup_high (the
    extremes), accuracy (mean), low, high: its 95% interval by Student's t, NaN with one seed.
    """
    by = ["pattern", "method", "sparsity" if "sparsity" in results.columns else "speedup"]
    rows = []
    for key, own in results.groupby(by, dropna=False, sort=True):
        values = own["accuracy"].to_numpy(float)
        half = math.nan
        if len(values) > 1:
            half = float(stdtrit(len(values) - 1, 0.975)) * float(values.std(ddof=1)) / math.sqrt(len(values))
        mean = float(values.mean())
        rows.append({
            "pattern": key[0], "method": key[1], "sparsity": key[2] if by[2] == "sparsity" else math.nan,
            "seeds": len(own), "speedup": float(own["speedup"].median()),
            "speedup_low": float(own["speedup"].min()), "speedup_high": float(own["speedup"].max()),
            "accuracy": mean, "low": mean - half, "high": mean + half,
        })  # fmt: skip
    return pd.DataFrame(rows).sort_values(["method", "pattern", "speedup"], kind="stable").reset_index(drop=True)


def section(points: pd.DataFrame) -> Section:
    """The chart, a choice a method, and all points as a table."""
    dense = points[points["pattern"] == DENSE]
    sparse = points[points["pattern"] != DENSE]
    share = bool(points["accuracy"].between(0, 1).all())
    sentences = [
        "Accuracy on the test data over the speedup that was measured against the fastest dense engine, each point "
        "the mean of its seeds with the 95% interval of that mean (Student's t; none where there is one seed). The "
        "dashed line is the dense model."
    ]
    if len(dense) and len(sparse):
        base = float(dense["accuracy"].max())
        kept = sparse[sparse["accuracy"] >= base - (0.01 if share else 0.01 * abs(base))]
        if len(kept):
            best = kept.loc[kept["speedup"].idxmax()]
            loss = "one percentage point" if share else "one percent"
            sentences.append(
                f"The fastest that loses no more than {loss} on average is {best['pattern']} with {best['method']}: "
                f"{units.ratio(best['speedup'])} at {said(best['accuracy'], share)}, {said(base, share)} dense."
            )
    methods = sorted(sparse["method"].unique())
    choices = [(method, {"accuracy": figure(sparse[sparse["method"] == method], dense, share)}) for method in methods]
    chart = Chart("accuracy", "Accuracy over measured speedup", choices=choices, label="Method")
    cells = [
        [row["pattern"], row["method"], Cell(units.percent(row["sparsity"]), row["sparsity"]),
         Cell(units.ratio(row["speedup"]), row["speedup"]),
         Cell(said(row["accuracy"], share, row["low"], row["high"]), row["accuracy"]), count_cell(row["seeds"])]
        for row in points.to_dict("records")
    ]  # fmt: skip
    heads = ["pattern", "method", "#sparsity", "#measured speedup", "#accuracy", "#seeds"]
    charts = [chart] if choices else []
    return Section("accuracy", "Accuracy against speedup", sentences, charts, [("Every point", table(heads, cells))])


def said(value: float, share: bool, low: float = math.nan, high: float = math.nan) -> str:
    """An accuracy as text, with its interval where there is one."""
    scale, unit, form = (100, "%", ".2f") if share else (1, "", ".4g")
    if math.isnan(low):
        return f"{scale * value:{form}}{unit}"
    return f"{scale * value:{form}}{unit} ({scale * low:{form}}–{scale * high:{form}})"


def figure(points: pd.DataFrame, dense: pd.DataFrame, share: bool) -> Figure:
    """One line a pattern, of the points of one method; the dense accuracy dashed."""
    scale = 100 if share else 1
    traces = []
    seen: dict[str, int] = {}
    for pattern, own in points.groupby("pattern", sort=True):
        family = str(pattern).split(":")[0]
        index = seen[family] = seen.get(family, -1) + 1
        half = (own["high"] - own["accuracy"]).fillna(0.0) * scale
        traces.append({
            "type": "scatter", "mode": "lines+markers", "name": plain(pattern),
            "x": short(own["speedup"]), "y": [round(scale * value, 4) for value in own["accuracy"]],
            "error_y": {"type": "data", "array": short(half), "thickness": 1, "width": 3},
            "line": {"color": colour(family), "width": 2, "dash": DASHES[index % len(DASHES)]},
            "marker": {"color": colour(family), "size": 9, "symbol": SYMBOLS[index % len(SYMBOLS)]},
            "text": [_hover(row, share) for row in own.to_dict("records")],
            "hovertemplate": "%{text}<extra></extra>",
        })  # fmt: skip
    base = None if dense.empty else scale * float(dense["accuracy"].max())
    layout: Figure = {
        "xaxis": {"title": {"text": "measured speedup"}, "ticksuffix": "×"},
        "yaxis": {"title": {"text": "accuracy"}, "ticksuffix": "%" if share else ""},
        "height": 440,
    }
    if base is not None:
        # A line of the figure's, not of the layout: so the axis always reaches it.
        ends = [min(1.0, float(points["speedup"].min())), float(points["speedup"].max())]
        traces.append({
            "type": "scatter", "mode": "lines", "name": "dense", "x": short(ends), "y": [round(base, 4)] * 2,
            "line": {"color": "@ink", "width": 1.5, "dash": "dash"},
            "hovertemplate": f"dense: {base:.4g}{'%' if share else ''}<extra></extra>",
        })  # fmt: skip
    return {"data": traces, "layout": layout}


def _hover(row: Mapping[Any, Any], share: bool) -> str:
    sparsity = "" if math.isnan(row["sparsity"]) else f" at {units.percent(row['sparsity'])}"
    seeds = "1 seed" if row["seeds"] == 1 else f"{row['seeds']} seeds"
    return (
        f"<b>{plain(row['pattern'])}</b>{sparsity}<br>{units.ratio(row['speedup'])}<br>"
        f"{said(row['accuracy'], share, row['low'], row['high'])}, {seeds}"
    )
