"""The ranking: kernels of one shape and setting, the fastest first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from latbench.base.number_format import choose_time_unit, format_percent, format_ratio, format_seconds
from latbench.report import point_frames
from latbench.report.elements import Cell, Table, build_count_cell, build_table
from latbench.report.figures import Figure, draw_line, escape_name, find_colour, round_error_bars, round_values

LEVELS = (0.5, 0.75, 0.9)  # sparsities shown, or the nearest measured ones

Record = Mapping[str, Any]


def rank_kernels(points: pd.DataFrame) -> pd.DataFrame:
    """Rank the fastest kernels of each engine and pattern at equal setting, shape and sparsity.

    Columns: those of `point_frames.build_points`, rank (from 1), behind (seconds over those of the fastest).
    """
    best = point_frames.select_fastest(points, [*point_frames.PLACE, "pattern", "sparsity", "engine"])
    peers = best.groupby([*point_frames.PLACE, "sparsity"])["seconds"]
    best["rank"] = peers.rank(method="first").astype(int)
    best["behind"] = best["seconds"] / peers.transform("min")
    return best


def select_levels(rows: pd.DataFrame, speedups: pd.DataFrame) -> pd.DataFrame:
    """Select the ranked kernels that are dense, or at a sparsity that the ranking shows."""
    return rows[(rows["pattern"] == "dense") | rows["sparsity"].isin(point_frames.select_levels(speedups, LEVELS))]


def build_summary(rows: pd.DataFrame) -> pd.DataFrame:
    """Build a frame of ranks: sparsity, pattern, engine, shapes, first (number of shapes), behind (median)."""
    grouped = rows.groupby(["sparsity", "pattern", "engine"])
    tidy = grouped["rank"].agg(shapes="size", first=lambda ranks: int((ranks == 1).sum()))
    tidy["behind"] = grouped["behind"].median()
    return tidy.reset_index().sort_values(["sparsity", "behind"], kind="stable").reset_index(drop=True)


def build_summary_table(rows: pd.DataFrame) -> Table:
    """Build the table of the ranks of `build_summary`."""
    cells = [
        [Cell("dense" if row["pattern"] == "dense" else format_percent(row["sparsity"]), row["sparsity"]),
         row["pattern"], row["engine"], build_count_cell(row["shapes"]), build_count_cell(row["first"]),
         Cell("the fastest" if row["behind"] == 1 else format_ratio(row["behind"]), row["behind"])]
        for row in rows.to_dict("records")
    ]  # fmt: skip
    heads = ["#sparsity", "pattern", "engine", "#shapes", "#fastest in", "#median time / fastest time"]
    return build_table(heads, cells)


def draw_figure(rows: Sequence[Record], dense_seconds: float) -> Figure:
    """Draw the kernels of one setting and shape as bars with intervals, the fastest on top."""
    ordered = sorted(rows, key=lambda row: float(row["seconds"]))
    scale, unit = choose_time_unit(max(float(row["seconds"]) for row in ordered))
    bars = {
        "type": "bar", "orientation": "h", "showlegend": False, "y": list(range(len(ordered))),
        "x": round_values(row["seconds"] / scale for row in ordered),
        "marker": {"color": [find_colour(row["format"]) for row in ordered]},
        "error_x": {
            "type": "data", "array": round_error_bars((row["high"] - row["seconds"]) / scale for row in ordered),
            "arrayminus": round_error_bars((row["seconds"] - row["low"]) / scale for row in ordered),
            "color": "@ink", "thickness": 1, "width": 3,
        },
        "text": [_hover(row, dense_seconds) for row in ordered], "textposition": "none",
        "hovertemplate": "%{text}<extra></extra>",
    }  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": f"time, {unit}"}, "rangemode": "tozero"},
        "yaxis": {
            "tickvals": list(range(len(ordered))), "ticktext": [_name(row) for row in ordered], "showgrid": False,
            "range": [len(ordered) - 0.5, -0.5],
        },
        "shapes": [draw_line(x=dense_seconds / scale)],
        "annotations": [{
            "text": "fastest dense", "x": dense_seconds / scale, "xref": "x", "yref": "paper", "y": 1,
            "yanchor": "bottom", "showarrow": False, "font": {"size": 12, "color": "@muted"},
        }],
        "height": 110 + 22 * len(ordered),
    }  # fmt: skip
    return {"data": [bars], "layout": layout}


def _name(row: Record) -> str:
    sparse = "" if row["pattern"] == "dense" else f" {format_percent(row['sparsity'])}"
    return f"{escape_name(row['pattern'])}{sparse}, {escape_name(row['engine'])}"


def _hover(row: Record, dense_seconds: float) -> str:
    time = format_seconds(row["seconds"], row["low"], row["high"])
    gain = format_ratio(dense_seconds / row["seconds"])
    noisy = "<br>noisy" if row["noisy"] else ""
    return f"<b>{_name(row)}</b><br>{time}, {gain} the fastest dense<br>{escape_name(row['kernel'])}{noisy}"
