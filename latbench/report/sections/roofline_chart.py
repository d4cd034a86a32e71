"""The roofline section: how close each kernel comes to the limits of the device (Williams, Waterman, Patterson 2009).

Each point has a roof of its own: the least possible time for its work, from operations on kept weights and bytes that
must be read (`latbench.machines.ceilings`). The padding of a convolution counts as no operation, so roofs are drawn
point by point: two common lines would be wrong for some points.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from latbench.base.number_format import format_flop_rate, format_percent, format_seconds
from latbench.report.elements import Chart, Section, build_count_cell, build_share_cell, build_table
from latbench.report.figures import (
    COLOURS,
    Figure,
    build_log_ticks,
    escape_name,
    find_colour,
    find_symbol,
    round_values,
    select_sample,
)

POINTS = 4000  # drawn, about 150 bytes each


def build_frame(points: pd.DataFrame) -> pd.DataFrame:
    """Build a frame of the points whose work is known.

    Columns: those of `point_frames.build_points`, flop_per_byte, flop_per_second, roof_flop_per_second and share (of
    the roof). The last two are NaN where no roofline was measured. Operations are those on kept weights.
    """
    known = points[(points["flop"] > 0) & (points["bytes"] > 0)]
    return known.assign(
        flop_per_byte=known["flop"] / known["bytes"],
        flop_per_second=known["flop"] / known["seconds"],
        roof_flop_per_second=known["flop"] / known["roofline_seconds"],
        share=known["roofline_seconds"] / known["seconds"],
    )


def build_shares(rows: pd.DataFrame) -> pd.DataFrame:
    """Build a frame of the shares of the roof: engine, pattern, points, median, best."""
    grouped = rows.dropna(subset="share").groupby(["engine", "pattern"])["share"]
    found = grouped.agg(points="size", median="median", best="max").reset_index()
    return found.sort_values("median", ascending=False, kind="stable").reset_index(drop=True)


def build_section(points: pd.DataFrame) -> Section | None:
    """Build the section with a plot and a table of shares; None where the amounts of work are unknown."""
    rows = build_frame(points)
    if rows.empty:
        return None
    near = build_shares(rows)
    sentences = [
        "Each point is one measured time: operations per byte that must be read (x) and operations per second (y). "
        "Only operations on kept weights count, so a sparse kernel may lie below a dense one and still be faster."
    ]
    if len(near):
        best, typical = near.iloc[0], format_percent(round(near["median"].iloc[0], 3))
        sentences.append(
            "A grey dash is the roof of a point: the upper bound of this device for that work. "
            f"Closest is {best['pattern']} on {best['engine']}, with {typical} of its roof at the median. Far below "
            "the roof a better kernel is possible."
        )
    else:
        sentences.append("The table holds no roofline, because its sweep did not measure the limits of the device.")
    cells = [
        [row["engine"], row["pattern"], build_count_cell(row["points"]), build_share_cell(round(row["median"], 3)),
         build_share_cell(round(row["best"], 3))]
        for row in near.to_dict("records")
    ]  # fmt: skip
    heads = ["engine", "pattern", "#points", "#median share of the roof", "#best"]
    tables = [("Share of the roof", build_table(heads, cells))] if cells else []
    chart = Chart(
        "roofline", "Operations per second over operations per byte", draw_figure(select_sample(rows, POINTS))
    )
    return Section("roofline", "Roofline: room for faster kernels", sentences, [chart], tables)


def draw_figure(rows: pd.DataFrame) -> Figure:
    """Draw points in the colour of their format, and their roofs as dashes."""
    traces = []
    roofs = rows.dropna(subset="roof_flop_per_second")[["flop_per_byte", "roof_flop_per_second"]]
    roofs = roofs.map(lambda value: float(f"{value:.2g}")).drop_duplicates()
    if len(roofs):
        traces.append({
            "type": "scatter", "mode": "markers", "name": "roof", "hoverinfo": "skip",
            "x": roofs["flop_per_byte"].tolist(), "y": (roofs["roof_flop_per_second"] / 1e9).tolist(),
            "marker": {"symbol": "line-ew-open", "size": 11, "color": "@muted", "line": {"width": 2}},
        })  # fmt: skip
    order = {name: place for place, name in enumerate(COLOURS)}
    for name, own in sorted(rows.groupby("format"), key=lambda item: order.get(str(item[0]), len(order))):
        traces.append({
            "type": "scatter", "mode": "markers", "name": escape_name(name), "x": round_values(own["flop_per_byte"]),
            "y": round_values(own["flop_per_second"] / 1e9),
            "marker": {
                "color": find_colour(str(name)), "size": 7, "opacity": 0.9,
                "symbol": find_symbol(str(name)) + ("-open" if name == "dense" else ""),
            } | ({"color": "@ink", "line": {"width": 1.5}} if name == "dense" else {}),
            "text": [_hover(row) for row in own.to_dict("records")], "hovertemplate": "%{text}<extra></extra>",
        })  # fmt: skip
    highest = max(rows["flop_per_second"].max(), roofs["roof_flop_per_second"].max() if len(roofs) else 0) / 1e9
    y = (float(rows["flop_per_second"].min() / 1e9), float(highest))
    x = (float(rows["flop_per_byte"].min()), float(rows["flop_per_byte"].max()))
    layout = {
        "xaxis": {"title": {"text": "operations on kept weights per byte"}, **_axis(x)},
        "yaxis": {"title": {"text": "GFLOP/s"}, **_axis(y)},
        "height": 460,
    }
    return {"data": traces, "layout": layout}


def _axis(ends: tuple[float, float]) -> Figure:
    low, high = ends
    return {
        "type": "log",
        "range": [math.log10(low) - 0.08, math.log10(high) + 0.1],
        **build_log_ticks(low, high, ""),
    }


def _hover(row: Mapping[Any, Any]) -> str:
    what = f"{row['pattern']} at {format_percent(row['sparsity'])}" if row["sparsity"] else row["pattern"]
    share = float(row["share"])
    near = "" if math.isnan(share) else f", {format_percent(round(share, 3))} of its roof"
    return (
        f"<b>{escape_name(what)}</b>, {escape_name(row['engine'])}<br>{escape_name(row['shape'])}<br>"
        f"{format_seconds(row['seconds'])}: {format_flop_rate(row['flop_per_second'])}{near}"
    )
