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

from latbench.base.number_format import NOTHING, format_percent, format_ratio
from latbench.errors import BadData
from latbench.report.elements import Cell, Chart, Section, Table, count_cell, table
from latbench.report.figures import (
    DASHES,
    OTHER_COLOURS,
    OTHER_SYMBOLS,
    Figure,
    Look,
    line_and_marker,
    log_ticks,
    looks,
    plain,
    short,
)

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
        numbers = [name for name in ("speedup", "accuracy", "sparsity") if name in frame.columns]
        frame = frame.astype({"pattern": str, "method": str} | dict.fromkeys(numbers, float))
    except ValueError as error:
        raise BadData(f"{path}: {', '.join(numbers)} are numbers, such as 0.75: {error}") from error
    if not (np.isfinite(frame[["speedup", "accuracy"]]).all(axis=None) and (frame["speedup"] > 0).all()):
        raise BadData(f"{path}: every speedup and accuracy must be finite, and speedups above 0")
    if wrong := [share for share in frame.get("sparsity", ()) if share < 0 or share > 1]:
        raise BadData(f"{path}: a sparsity is a share from 0 to 1, such as 0.75, not {wrong[0]:g}")
    return frame


def tidy(results: pd.DataFrame) -> pd.DataFrame:
    """One row a point, over its seeds, by pattern, method and rising speedup.

    Columns: pattern, method, sparsity (NaN if unknown), seeds, speedup (median), speedup_low, speedup_high (the
    extremes), accuracy (mean), low, high: its 95% interval by Student's t, NaN with one seed.
    """
    from scipy.special import stdtrit  # here: it takes longer to import than most tables to report

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
    """The chart, a choice a method and a choice a pattern; what keeps the accuracy; and all points as a table."""
    dense = points[points["pattern"] == DENSE]
    sparse = points[points["pattern"] != DENSE]
    share = bool(points["accuracy"].between(0, 1).all())
    base = float(dense["accuracy"].max()) if len(dense) else math.nan
    sentences = [
        "Accuracy on the test data over the speedup that was measured against the fastest dense engine, each point "
        "the mean of its seeds with the 95% interval of that mean (Student's t; none where there is one seed). The "
        "dashed line is the dense model. Further right is faster, further up more accurate."
    ]
    tables = []
    if len(dense) and len(sparse):
        loss = "one percentage point" if share else "one percent"
        best = _fastest(sparse, base, share)
        sentences.append(
            f"Nothing loses less than {loss} on average."
            if best is None
            else f"The fastest that loses no more than {loss} on average is {best['pattern']} with {best['method']}: "
            f"{format_ratio(best['speedup'])} at {said(best['accuracy'], share)}, {said(base, share)} dense."
        )
        tables.append((f"The highest speedup that loses no more than {loss}", _kept(sparse, base, share)))
    cells = [
        [row["pattern"], row["method"], Cell(format_percent(row["sparsity"]), row["sparsity"]),
         Cell(format_ratio(row["speedup"]), row["speedup"]),
         Cell(said(row["accuracy"], share, row["low"], row["high"]), row["accuracy"]),
         _difference(row["accuracy"] - base, share), count_cell(row["seeds"])]
        for row in points.to_dict("records")
    ]  # fmt: skip
    against = "#against dense, percentage points" if share else "#against dense"
    heads = ["pattern", "method", "#sparsity", "#measured speedup", "#accuracy", against, "#seeds"]
    tables.append(("Every point", table(heads, cells)))
    charts = []
    if len(sparse):
        chosen = choices(sparse, dense, share)
        charts.append(Chart("accuracy", "Accuracy over measured speedup", choices=chosen, label="Show"))
    return Section("accuracy", "Accuracy against speedup", sentences, charts, tables)


def choices(sparse: pd.DataFrame, dense: pd.DataFrame, share: bool) -> list[tuple[str, dict[str, Figure]]]:
    """A figure a method with a line a pattern; where there are several methods, also a figure a pattern."""
    by_method = [
        (f"{method}, every pattern", {"accuracy": figure(own, dense, share, "pattern")})
        for method, own in sparse.groupby("method", sort=True)
    ]
    if len(by_method) == 1:
        return by_method
    return by_method + [
        (f"{pattern}, every method", {"accuracy": figure(own, dense, share, "method")})
        for pattern, own in sparse.groupby("pattern", sort=True)
    ]


def _fastest(points: pd.DataFrame, base: float, share: bool) -> dict[Any, Any] | None:
    """The point with the highest speedup of those that lose one percentage point at most, or one percent."""
    kept = points[points["accuracy"] >= base - (0.01 if share else 0.01 * abs(base))]
    return kept.loc[kept["speedup"].idxmax()].to_dict() if len(kept) else None


def _kept(sparse: pd.DataFrame, base: float, share: bool) -> Table:
    """A row a pattern, a column a method: the fastest that keeps the accuracy."""
    methods = sorted(sparse["method"].unique())
    rows: list[list[Cell | str]] = []
    for pattern, own in sparse.groupby("pattern", sort=True):
        cells = []
        for method in methods:
            tried = own[own["method"] == method]
            best = _fastest(tried, base, share)
            if best is None:
                cells.append(Cell("none", 0.0) if len(tried) else Cell(NOTHING))
            else:
                at = "" if math.isnan(best["sparsity"]) else f" at {format_percent(best['sparsity'])}"
                cells.append(Cell(format_ratio(best["speedup"]), best["speedup"], said(best["accuracy"], share) + at))
        rows.append([str(pattern), *cells])
    return table(["pattern", *(f"#{method}" for method in methods)], rows)


def _difference(value: float, share: bool) -> Cell:
    """How much better or worse than dense, in percentage points of a share."""
    if math.isnan(value):
        return Cell(NOTHING)
    return Cell(f"{100 * value:+.2f}" if share else f"{value:+.3g}", value)


def said(value: float, share: bool, low: float = math.nan, high: float = math.nan) -> str:
    """An accuracy as text, with its interval where there is one."""
    scale, unit, form = (100, "%", ".2f") if share else (1, "", ".4g")
    if math.isnan(low):
        return f"{scale * value:{form}}{unit}"
    return f"{scale * value:{form}}{unit} ({scale * low:{form}}–{scale * high:{form}})"


def figure(points: pd.DataFrame, dense: pd.DataFrame, share: bool, by: str) -> Figure:
    """One line for each value of the column `by`, pattern or method; the dense accuracy dashed."""
    scale = 100 if share else 1
    traces: list[Figure] = []
    look_of = looks(points["pattern"])
    for index, (name, own) in enumerate(points.groupby(by, sort=True)):
        half = (own["high"] - own["accuracy"]).fillna(0.0) * scale
        other = Look(*(kinds[index % len(kinds)] for kinds in (OTHER_COLOURS, OTHER_SYMBOLS, DASHES)))
        traces.append({
            "type": "scatter", "mode": "lines+markers", "name": plain(name),
            "x": short(own["speedup"]), "y": [round(scale * value, 4) for value in own["accuracy"]],
            "error_y": {"type": "data", "array": short(half), "thickness": 1, "width": 3},
            **line_and_marker(look_of[str(name)] if by == "pattern" else other, 9),
            "text": [_hover(row, share) for row in own.to_dict("records")],
            "hovertemplate": "%{text}<extra></extra>",
        })  # fmt: skip
    lowest, highest = min(1.0, float(points["speedup"].min())), max(1.0, float(points["speedup"].max()))
    layout: Figure = {
        "xaxis": {
            "title": {"text": "measured speedup<br>over the fastest dense engine"}, "type": "log",
            "range": [math.log10(lowest) - 0.03, math.log10(highest) + 0.03], **log_ticks(lowest, highest, "×"),
        },
        "yaxis": {"title": {"text": "accuracy"}, "ticksuffix": "%" if share else ""},
        "height": 440,
    }  # fmt: skip
    if len(dense):
        base = scale * float(dense["accuracy"].max())
        # A line of the figure's, not of the layout: so the axis always reaches it.
        traces.append({
            "type": "scatter", "mode": "lines", "name": "dense", "x": short([lowest, highest]),
            "y": [round(base, 4)] * 2, "line": {"color": "@ink", "width": 1.5, "dash": "dash"},
            "hovertemplate": f"dense: {base:.4g}{'%' if share else ''}<extra></extra>",
        })  # fmt: skip
    return {"data": traces, "layout": layout}


def _hover(row: Mapping[Any, Any], share: bool) -> str:
    sparsity = "" if math.isnan(row["sparsity"]) else f" at {format_percent(row['sparsity'])}"
    seeds = "1 seed" if row["seeds"] == 1 else f"{row['seeds']} seeds"
    return (
        f"<b>{plain(row['pattern'])}</b>{sparsity}, {plain(row['method'])}<br>{format_ratio(row['speedup'])}<br>"
        f"{said(row['accuracy'], share, row['low'], row['high'])}, {seeds}"
    )
