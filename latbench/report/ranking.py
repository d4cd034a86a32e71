"""Which kernel is fastest: all that were timed at one shape in one way, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from latbench.base.number_format import choose_time_unit, format_percent, format_ratio, format_seconds
from latbench.report import frames as data
from latbench.report.elements import Cell, Table, count_cell, table
from latbench.report.figures import Figure, colour, line_at, plain, reach, short

LEVELS = (0.5, 0.75, 0.9)  # or the nearest that were measured: more would bury the ranking

Record = Mapping[str, Any]


def ranked(points: pd.DataFrame) -> pd.DataFrame:
    """The fastest kernel of each engine and pattern, beside the others at the same setting, shape and sparsity.

    Columns: those of `data.points`, rank (from 1), behind (its seconds over those of the fastest, from 1).
    """
    best = data.fastest(points, [*data.PLACE, "pattern", "sparsity", "engine"])
    peers = best.groupby([*data.PLACE, "sparsity"])["seconds"]
    best["rank"] = peers.rank(method="first").astype(int)
    best["behind"] = best["seconds"] / peers.transform("min")
    return best


def at_levels(rows: pd.DataFrame, speedups: pd.DataFrame) -> pd.DataFrame:
    """Of ranked kernels, those at the sparsities that a ranking shows, and the dense ones."""
    return rows[(rows["pattern"] == "dense") | rows["sparsity"].isin(data.levels(speedups, LEVELS))]


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """How each engine and pattern ranks: sparsity, pattern, engine, shapes, first (in how many), behind (median)."""
    grouped = rows.groupby(["sparsity", "pattern", "engine"])
    tidy = grouped["rank"].agg(shapes="size", first=lambda ranks: int((ranks == 1).sum()))
    tidy["behind"] = grouped["behind"].median()
    return tidy.reset_index().sort_values(["sparsity", "behind"], kind="stable").reset_index(drop=True)


def summary_table(rows: pd.DataFrame) -> Table:
    """`summary` for the reader."""
    cells = [
        [Cell("dense" if row["pattern"] == "dense" else format_percent(row["sparsity"]), row["sparsity"]),
         row["pattern"], row["engine"], count_cell(row["shapes"]), count_cell(row["first"]),
         Cell("the fastest" if row["behind"] == 1 else format_ratio(row["behind"]), row["behind"])]
        for row in rows.to_dict("records")
    ]  # fmt: skip
    heads = ["#sparsity", "pattern", "engine", "#shapes", "#fastest in", "#median time over the fastest's"]
    return table(heads, cells)


def figure(rows: Sequence[Record], dense_seconds: float) -> Figure:
    """The kernels of one setting and shape, the fastest on top: bars with intervals, a line at the fastest dense."""
    ordered = sorted(rows, key=lambda row: float(row["seconds"]))
    scale, unit = choose_time_unit(max(float(row["seconds"]) for row in ordered))
    bars = {
        "type": "bar", "orientation": "h", "showlegend": False, "y": list(range(len(ordered))),
        "x": short(row["seconds"] / scale for row in ordered),
        "marker": {"color": [colour(row["format"]) for row in ordered]},
        "error_x": {
            "type": "data", "array": reach((row["high"] - row["seconds"]) / scale for row in ordered),
            "arrayminus": reach((row["seconds"] - row["low"]) / scale for row in ordered),
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
        "shapes": [line_at(x=dense_seconds / scale)],
        "annotations": [{
            "text": "fastest dense", "x": dense_seconds / scale, "xref": "x", "yref": "paper", "y": 1,
            "yanchor": "bottom", "showarrow": False, "font": {"size": 12, "color": "@muted"},
        }],
        "height": 110 + 22 * len(ordered),
    }  # fmt: skip
    return {"data": [bars], "layout": layout}


def _name(row: Record) -> str:
    sparse = "" if row["pattern"] == "dense" else f" {format_percent(row['sparsity'])}"
    return f"{plain(row['pattern'])}{sparse}, {plain(row['engine'])}"


def _hover(row: Record, dense_seconds: float) -> str:
    time = format_seconds(row["seconds"], row["low"], row["high"])
    gain = format_ratio(dense_seconds / row["seconds"])
    noisy = "<br>noisy" if row["noisy"] else ""
    return f"<b>{_name(row)}</b><br>{time}, {gain} the fastest dense<br>{plain(row['kernel'])}{noisy}"
