"""Figures for papers of two tables side by side: the map of ratios and every shared point."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from latbench.report import point_frames
from latbench.report.figures import find_colour, find_symbol, select_sample
from latbench.report.pages import speedup_map
from latbench.report.pages.comparison import POINTS, Side, build_pairs, select_fastest_of_either
from latbench.report.paper_figures import (
    MAP_ROWS,
    MARKERS,
    PAGE,
    Drawing,
    draw_legend_above,
    draw_ratio_grid,
    label_plain_ticks,
)


def list_comparison_drawings(first: Side, second: Side) -> dict[str, Drawing]:
    """List the figures of a comparison by name, in the order of the page; a ratio above 1 favours the first side.

    `ratio_map` has the fastest pattern of each side at each shape and sparsity, for the slowest shapes. `ratios` has
    every shared point. Raises BadData where no point is shared.
    """
    pairs = build_pairs(first, second)
    order = pairs.groupby(point_frames.PLACE)["second"].max().sort_values(ascending=False, kind="stable")
    places = list(order.index[:MAP_ROWS])
    best = select_fastest_of_either(point_frames.select_places(pairs, places), [*point_frames.PLACE, "sparsity"])
    title = f"times as fast on {first.name}\nas on {second.name}"
    return {
        "ratio_map": Drawing(
            best, lambda figure, rows: _draw_map(figure, rows, places, title), 0.8 + 0.22 * len(places), PAGE
        ),
        "ratios": Drawing(pairs, lambda figure, rows: _draw_points(figure, rows, title, second.name), 2.6),
    }


def _draw_map(figure: Any, rows: pd.DataFrame, places: list[tuple[str, str]], title: str) -> None:
    axes = figure.subplots()
    columns = speedup_map.select_spread(np.sort(rows["sparsity"].unique()))
    ratios = {(row.setting, row.shape, row.sparsity): row.ratio for row in rows.itertuples()}
    grid = np.array([[ratios.get((*place, sparsity), np.nan) for sparsity in columns] for place in places])
    draw_ratio_grid(axes, grid, columns, places)
    axes.set(title=title, xlabel="sparsity")


def _draw_points(figure: Any, rows: pd.DataFrame, title: str, other: str) -> None:
    axes = figure.subplots()
    rows = select_sample(rows, POINTS)  # the data beside it has all
    for name, own in rows.groupby("format", sort=True):
        style = {"color": find_colour(str(name)), "label": str(name), "markersize": 2.5, "alpha": 0.7}
        axes.plot(own["second"] * 1e6, own["ratio"], MARKERS[find_symbol(str(name))], **style)
    axes.axhline(1, color="black", linestyle="--", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel=f"time on {other}, µs", ylabel="times as fast")
    axes.set_title(title, fontsize=7)
    label_plain_ticks(axes.xaxis)
    label_plain_ticks(axes.yaxis)
    draw_legend_above(figure, [axes], columns=3)
