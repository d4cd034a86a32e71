"""The speedup map: slices of pattern x sparsity x shape that the reader chooses, with the break-even line."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from latbench.base.number_format import format_percent, format_percent_rounded_up, format_ratio, format_seconds
from latbench.report import point_frames
from latbench.report.elements import Chart, Section
from latbench.report.figures import CELLS, Figure, escape_name
from latbench.report.report_data import ReportData

SHAPES = 40  # rows of a map: with more, labels overlap
SPARSITIES = 14  # columns of a map
FASTEST = "the fastest pattern"

Record = Mapping[str, Any]
Place = tuple[str, str]


def build_section(content: ReportData, places: Sequence[Place]) -> Section:
    """Build the section with every slice of the map at the first of `places`."""
    shown = list(places[:SHAPES])
    sentences = [
        "Colours and numbers are speedups over the fastest dense engine: blue is faster, orange is slower, and "
        "fainter colours are smaller differences. To the right of the line sparse stays faster up to the highest "
        "measured sparsity of the shape, or of the pattern that is shown. A line at the right edge means that no "
        "sparsity does. Its tooltip gives the break-even sparsity."
    ]
    if len(shown) < len(places):
        sentences.append(f"The map shows the {len(shown)} shapes with the longest dense time, of {len(places)}.")
    chart = Chart(
        "map", "Speedup at every shape, the longest dense time on top",
        choices=[(title, {"map": figure}) for title, figure in build_slices(content, shown)], label="Show",
    )  # fmt: skip
    return Section("map", "Map of speedups", sentences, [chart])


def build_slices(content: ReportData, places: Sequence[Place]) -> list[tuple[str, Figure]]:
    """Build the slices: by sparsity for the fastest and for each pattern, then by pattern at a few sparsities."""
    here = point_frames.select_places(content.speedups, places)
    earliest = content.starts.set_index(point_frames.PLACE)["break_even"].to_dict()
    of_pattern = {
        pattern: dict.fromkeys(places, math.nan) | own.set_index(point_frames.PLACE)["break_even"].to_dict()
        for pattern, own in point_frames.select_places(content.break_evens, places).groupby("pattern")
    }
    columns = select_spread(point_frames.list_common_sparsities(content.speedups))
    limit = max(0.1, float(np.abs(np.log2(here["speedup"])).max()))
    labels = [escape_name(point_frames.format_place(*place)) for place in places]

    def by_sparsity(rows: pd.DataFrame, begins: Mapping[Place, float]) -> Figure:
        found = {(*find_place(row), row["sparsity"]): row for row in rows.to_dict("records")}
        grid = [[found.get((*place, sparsity)) for sparsity in columns] for place in places]
        figure = _map(grid, [format_percent(sparsity) for sparsity in columns], labels, limit)
        figure["data"].append(_line([begins[place] for place in places], columns, labels))
        return figure

    figures = [(f"{FASTEST}, by sparsity", by_sparsity(point_frames.select_fastest_patterns(here), earliest))]
    for pattern, rows in here.groupby("pattern", sort=True):
        if rows["sparsity"].nunique() > 1:
            figures.append((f"{pattern}, by sparsity", by_sparsity(rows, of_pattern[pattern])))
    patterns = sorted(here["pattern"].unique())
    for level in point_frames.select_levels(here, (0.5, 0.75, 0.9)):
        found = {
            (*find_place(row), row["pattern"]): row for row in here[here["sparsity"] == level].to_dict("records")
        }
        own = [pattern for pattern in patterns if any(key[-1] == pattern for key in found)]
        grid = [[found.get((*place, pattern)) for pattern in own] for place in places]
        figures.append(
            (
                f"all patterns at {format_percent(level)}",
                _map(grid, list(map(escape_name, own)), labels, limit, "pattern"),
            )
        )
    return figures


def find_place(row: Mapping[Any, Any]) -> Place:
    """Return setting and shape of a row."""
    return row["setting"], row["shape"]


def select_spread(sparsities: np.ndarray) -> list[float]:
    """Select evenly spaced sparsities, as many as a map has columns."""
    if len(sparsities) <= SPARSITIES:
        return [float(value) for value in sparsities]
    kept = np.unique(np.round(np.linspace(0, len(sparsities) - 1, SPARSITIES)).astype(int))
    return [float(value) for value in sparsities[kept]]


def draw_heat_map(
    grid: Sequence[Sequence[tuple[float, str] | None]],
    columns: Sequence[str],
    rows: Sequence[str],
    limit: float,
    title: str = "sparsity",
) -> Figure:
    """Draw a map of ratios with their tooltips.

    `limit` is log2 of the ratio with the deepest colour; `title` names the columns. Axes count rows and columns from
    0, so that lines can be drawn between them.
    """
    heat = {
        "type": "heatmap", "x": list(range(len(columns))), "y": list(range(len(rows))),
        "z": [[None if cell is None else round(math.log2(cell[0]), 2) for cell in line] for line in grid],
        "text": [["" if cell is None else _brief(cell[0]) for cell in line] for line in grid],
        "hovertext": [["" if cell is None else cell[1] for cell in line] for line in grid],
        "zmin": -limit, "zmax": limit, "xgap": 2, "ygap": 2, "showscale": False, "hoverongaps": False,
        "colorscale": CELLS, "texttemplate": "%{text}", "textfont": {"size": 12, "color": "@ink"},
        "hovertemplate": "%{hovertext}<extra></extra>",
    }  # fmt: skip
    layout = {
        "xaxis": {
            "tickvals": list(range(len(columns))), "ticktext": list(columns), "showgrid": False, "side": "top",
            "range": [-0.5, len(columns) - 0.5], "title": {"text": title},
        },
        "yaxis": {
            "tickvals": list(range(len(rows))), "ticktext": list(rows), "showgrid": False,
            "range": [len(rows) - 0.5, -0.5],
        },
        "showlegend": False, "margin": {"t": 58, "b": 10}, "height": 74 + 30 * len(rows),
    }  # fmt: skip
    return {"data": [heat], "layout": layout}


def _brief(ratio: float) -> str:
    """Return a ratio as a text that fits into a cell."""
    return f"{ratio:.2f}×" if ratio < 10 else f"{ratio:.1f}×"


def _map(
    grid: Iterable[Sequence[Record | None]],
    columns: Sequence[str],
    rows: Sequence[str],
    limit: float,
    title: str = "sparsity",
) -> Figure:
    cells = [[None if row is None else (float(row["speedup"]), _hover(row)) for row in line] for line in grid]
    return draw_heat_map(cells, columns, rows, limit, title)


def _hover(row: Record) -> str:
    dense, sparsity = format_seconds(row["dense_seconds"]), format_percent(row["sparsity"])
    return (
        f"<b>{escape_name(row['shape'])}</b><br>{escape_name(row['pattern'])} at {sparsity}<br>"
        f"{format_ratio(row['speedup'], row['speedup_low'], row['speedup_high'])} dense<br>"
        f"{format_seconds(row['seconds'])} instead of {dense} "
        f"({escape_name(point_frames.name_baseline(row['dense_engine'], row['dense_dtype']))}){_over_any_type(row)}"
    )


def _over_any_type(row: Record) -> str:
    """Return the speedup over the fastest dense engine of any type, if that is faster than the baseline."""
    seconds = row["any_dense_seconds"]
    if not seconds < row["dense_seconds"]:
        return ""
    engine = escape_name(point_frames.name_baseline(row["any_dense_engine"], row["any_dense_dtype"]))
    return f"<br>{format_ratio(seconds / row['seconds'])} the fastest dense engine of any type ({engine})"


def _line(starts: Sequence[float], columns: Sequence[float], labels: Sequence[str]) -> Figure:
    """Draw the break-even of each row as a joined line; NaN (never) lies at the right edge."""
    x: list[float] = []
    y: list[float] = []
    text: list[str] = []
    for row, (start, label) in enumerate(zip(starts, labels, strict=True)):
        if math.isnan(start):
            place, said = len(columns) - 0.5, "not faster up to the highest measured sparsity"
        elif start <= columns[0]:
            place, said = -0.5, f"faster from {format_percent(columns[0])}, the lowest measured sparsity"
        else:
            place = int(np.searchsorted(columns, start - 1e-9)) - 0.5  # between cells: their numbers stay legible
            said = f"breaks even at {format_percent_rounded_up(start, 3)}"
        x += [place, place]
        y += [row - 0.5, row + 0.5]
        text += [f"<b>{label}</b><br>{said}"] * 2
    return {
        "type": "scatter", "mode": "lines", "name": "break-even", "x": x, "y": y, "text": text,
        "line": {"color": "@ink", "width": 3}, "hovertemplate": "%{text}<extra></extra>", "cliponaxis": False,
    }  # fmt: skip
