"""How near each kernel comes to what the device can do: the roofline (Williams, Waterman, Patterson 2009).

The roof of a row is its own: the least time that a sweep found possible for this very work, from operations on kept
weights and from bytes that must be read (`latbench.machines.ceilings`). A convolution's padding counts as no
operation there, so roofs are drawn point by point, and not as two lines that would be wrong for some.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from latbench.base.number_format import format_flop_rate, format_percent, format_seconds
from latbench.report.elements import Chart, Section, count_cell, share_cell, table
from latbench.report.figures import COLOURS, Figure, colour, log_ticks, plain, short, symbol, thinned

POINTS = 4000  # that the chart carries, some 150 bytes each


def tidy(points: pd.DataFrame) -> pd.DataFrame:
    """The points whose work is known.

    Columns: those of `data.points`, flop_per_byte, flop_per_second, roof_flop_per_second and share (of the roof), the
    last two NaN where no roofline was measured. Operations are those on kept weights.
    """
    known = points[(points["flop"] > 0) & (points["bytes"] > 0)]
    return known.assign(
        flop_per_byte=known["flop"] / known["bytes"],
        flop_per_second=known["flop"] / known["seconds"],
        roof_flop_per_second=known["flop"] / known["roofline_seconds"],
        share=known["roofline_seconds"] / known["seconds"],
    )


def shares(rows: pd.DataFrame) -> pd.DataFrame:
    """How near each engine and pattern came to its roof: engine, pattern, points, median, best (shares of it)."""
    grouped = rows.dropna(subset="share").groupby(["engine", "pattern"])["share"]
    found = grouped.agg(points="size", median="median", best="max").reset_index()
    return found.sort_values("median", ascending=False, kind="stable").reset_index(drop=True)


def section(points: pd.DataFrame) -> Section | None:
    """The plot, and a table of shares; None where the table does not tell what work was done."""
    rows = tidy(points)
    if rows.empty:
        return None
    near = shares(rows)
    sentences = [
        "Each point is a time: to the right, more operations for every byte that must be read; upwards, more "
        "operations a second. Only operations on kept weights count, so a sparse kernel may lie below a dense one "
        "and still be faster."
    ]
    if len(near):
        best, typical = near.iloc[0], format_percent(round(near["median"].iloc[0], 3))
        sentences.append(
            "A grey dash is the roof of a point: what this device could do at most for that work. "
            f"Nearest comes {best['pattern']} on {best['engine']}, with {typical} of its roof at the median; far "
            "from the roof there is room for a better kernel."
        )
    else:
        sentences.append("The table holds no roofline: its sweep did not measure what the device can do at most.")
    cells = [
        [row["engine"], row["pattern"], count_cell(row["points"]), share_cell(round(row["median"], 3)),
         share_cell(round(row["best"], 3))]
        for row in near.to_dict("records")
    ]  # fmt: skip
    heads = ["engine", "pattern", "#points", "#median share of the roof", "#best"]
    tables = [("How near the roof", table(heads, cells))] if cells else []
    chart = Chart("roofline", "Operations a second over operations a byte", figure(thinned(rows, POINTS)))
    return Section("roofline", "Roofline: how much is left in the kernels", sentences, [chart], tables)


def figure(rows: pd.DataFrame) -> Figure:
    """Points in the colour of their format, their roofs as dashes."""
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
            "type": "scatter", "mode": "markers", "name": plain(name), "x": short(own["flop_per_byte"]),
            "y": short(own["flop_per_second"] / 1e9),
            "marker": {
                "color": colour(str(name)), "size": 7, "opacity": 0.9,
                "symbol": symbol(str(name)) + ("-open" if name == "dense" else ""),
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
    return {"type": "log", "range": [math.log10(low) - 0.08, math.log10(high) + 0.1], **log_ticks(low, high, "")}


def _hover(row: Mapping[Any, Any]) -> str:
    what = f"{row['pattern']} at {format_percent(row['sparsity'])}" if row["sparsity"] else row["pattern"]
    share = float(row["share"])
    near = "" if math.isnan(share) else f", {format_percent(round(share, 3))} of its roof"
    return (
        f"<b>{plain(what)}</b>, {plain(row['engine'])}<br>{plain(row['shape'])}<br>"
        f"{format_seconds(row['seconds'])}: {format_flop_rate(row['flop_per_second'])}{near}"
    )
