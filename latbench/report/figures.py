"""The charts, as plain plotly figures (dicts of `data` and `layout`), built without plotly.

Colours are those of Okabe and Ito 2008, which stay apart for colour-blind readers. Symbols repeat the meaning of the
colour. Together with the dashes they tell apart the patterns of one format. A colour that depends on the reader's
light or dark theme is a token (`@ink`, `@muted`, `@panel`, `@gain-cell`, `@loss-cell`) that report.js replaces.
Plotly reads a little HTML in its texts, so every name from outside goes through `plain`.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from latbench.base.number_format import (
    choose_time_unit,
    format_percent,
    format_ratio,
    format_round_seconds,
    format_seconds,
)
from sparse_kernels.patterns import VectorNM

Figure = dict[str, Any]
Record = Mapping[str, Any]

COLOURS = {
    "unstructured": "#0072B2",
    "nm": "#E69F00",
    "vector": "#D55E00",
    "shflbw": "#CC79A7",
    "block": "#009E73",
    "dense": "#8C8C8C",
}
OTHER_COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#0072B2", "#D55E00")
SYMBOLS = {
    "unstructured": "circle", "nm": "square", "vector": "diamond", "shflbw": "triangle-up", "block": "cross",
    "dense": "hexagon",
}  # fmt: skip
OTHER_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star")
FILLS = ("", "-open", "-dot", "-open-dot")
DASHES = ("solid", "dash", "dot", "dashdot")
HATCHES = ("", "/", ".", "x", "-", "|", "+", "\\")
WHITE_ON = ("unstructured",)  # black text has a contrast of 4.5 or more on all others
LOSS, GAIN = "#D55E00", "#0072B2"
CELLS = [[0, "@loss-cell"], [0.5, "@panel"], [1, "@gain-cell"]]  # `@ink` can be read on all of it


@dataclass(frozen=True)
class Look:
    """How a pattern is drawn: `symbol`, `dash` and `hatch` (of bars) as plotly names them."""

    colour: str
    symbol: str
    dash: str
    hatch: str = ""


def assign_looks(patterns: Iterable[object]) -> dict[str, Look]:
    """Assign a look to each pattern: its format sets colour and symbol, its place in the format fill and dash.

    The first sixteen patterns of a format have distinct pairs of these; the first eight also have distinct bars.
    """
    seen: dict[str, int] = {}
    found = {}
    for pattern in sorted(set(map(str, patterns))):
        kind = find_format(pattern)
        index = seen[kind] = seen.get(kind, -1) + 1
        turn, place = divmod(index, len(FILLS))
        dash, hatch = DASHES[(place + turn) % len(DASHES)], HATCHES[index % len(HATCHES)]
        found[pattern] = Look(find_colour(kind), find_symbol(kind) + FILLS[place], dash, hatch)
    return found


def draw_shape(speedups: Sequence[Record], break_evens: Sequence[Record]) -> Figure:
    """Draw speedup over sparsity for one setting and shape, as lines by pattern and as a heat map.

    Both hold the rows of that shape alone, sparsity rising. Returns {lines: figure, heat: figure}.
    """
    return {"lines": _lines(speedups, break_evens), "heat": _heat(speedups)}


def _lines(speedups: Sequence[Record], break_evens: Sequence[Record]) -> Figure:
    data: list[Figure] = []
    look_of = assign_looks(start["pattern"] for start in break_evens)
    for start in sorted(break_evens, key=lambda row: str(row["pattern"])):
        rows = [row for row in speedups if row["pattern"] == start["pattern"]]
        look, name = look_of[str(start["pattern"])], escape_name(start["pattern"])
        data.append({
            "type": "scatter", "mode": "lines+markers", "name": name, "legendgroup": name,
            "x": round_values(100 * row["sparsity"] for row in rows),
            "y": round_values(row["speedup"] for row in rows),
            "error_y": {
                "type": "data", "array": round_error_bars(row["speedup_high"] - row["speedup"] for row in rows),
                "arrayminus": round_error_bars(row["speedup"] - row["speedup_low"] for row in rows),
                "thickness": 1, "width": 2,
            },
            **build_line_and_marker(look, 8),
            "text": [_point_text(row) for row in rows],
            "hovertemplate": f"<b>{name}</b> at %{{x:.3~f}}%<br>%{{y:.3~r}}× dense<br>%{{text}}<extra></extra>",
        })  # fmt: skip
        if not math.isnan(start["break_even"]) and not start["at_lowest"]:
            data.append({
                "type": "scatter", "mode": "markers", "name": f"{name} break-even", "legendgroup": name,
                "showlegend": False, "x": [round(100 * float(start["break_even"]), 2)], "y": [1],
                "marker": {"symbol": "circle-open", "size": 13, "color": look.colour, "line": {"width": 3}},
                "hovertemplate": f"<b>{name}</b> breaks even at %{{x:.3~r}}% sparsity<extra></extra>",
            })  # fmt: skip
    engine, seconds = escape_name(speedups[0]["dense_engine"]), format_seconds(speedups[0]["dense_seconds"])
    drawn = [row[name] for row in speedups for name in ("speedup", "speedup_low", "speedup_high")]
    lowest, highest = float(np.nanmin([0.9, *drawn])), float(np.nanmax([1.2, *drawn]))
    layout = {
        "xaxis": {"title": {"text": "sparsity"}, "ticksuffix": "%"},
        "yaxis": {
            "title": {"text": "speedup over dense"}, "type": "log",
            "range": [math.log10(lowest) - 0.05, math.log10(highest) + 0.08], **build_log_ticks(lowest, highest, "×"),
        },
        "shapes": [draw_line(y=1)],
        "annotations": [{
            "text": f"1× = fastest dense: {engine}, {seconds}", "xref": "paper", "x": 0, "xanchor": "left",
            "yref": "paper", "y": 1, "yanchor": "bottom", "showarrow": False, "font": {"size": 12, "color": "@muted"},
        }],
        "height": 480,
    }  # fmt: skip
    return {"data": data, "layout": layout}


def _heat(speedups: Sequence[Record]) -> Figure:
    patterns = sorted({str(row["pattern"]) for row in speedups}, reverse=True)  # plotly draws the first at the bottom
    sparsities = sorted({float(row["sparsity"]) for row in speedups})
    gains = {(str(row["pattern"]), float(row["sparsity"])): float(row["speedup"]) for row in speedups}
    grid = [[gains.get((pattern, sparsity)) for sparsity in sparsities] for pattern in patterns]
    limit = max(0.1, *(abs(math.log2(gain)) for gain in gains.values()))  # a range even where all equals dense
    heat = {
        "type": "heatmap",
        "x": [format_percent(sparsity) for sparsity in sparsities],
        "y": [escape_name(pattern) for pattern in patterns],
        "z": [[None if gain is None else round(math.log2(gain), 2) for gain in row] for row in grid],
        "text": [["" if gain is None else format_ratio(gain) for gain in row] for row in grid],
        "zmin": -limit, "zmax": limit, "xgap": 2, "ygap": 2, "showscale": False, "hoverongaps": False,
        "colorscale": CELLS, "texttemplate": "%{text}", "textfont": {"size": 12, "color": "@ink"},
        "hovertemplate": "<b>%{y}</b> at %{x}<br>%{text} dense<extra></extra>",
    }  # fmt: skip
    layout = {
        "xaxis": {"type": "category", "showgrid": False, "title": {"text": "sparsity"}},
        "yaxis": {"type": "category", "showgrid": False},
        "height": 90 + 34 * len(patterns),
        "margin": {"t": 12, "b": 48},
    }
    return {"data": [heat], "layout": layout}


def draw_noise(curve: pd.DataFrame) -> Figure:
    """Draw the share of points by the width of their 95% interval, a line for each backend."""
    data = []
    low, high = (float(100 * curve["width"].clip(lower=1e-5).agg(end)) for end in ("min", "max"))
    for index, (backend, rows) in enumerate(curve.groupby("backend", sort=True)):
        name, colour = escape_name(backend), OTHER_COLOURS[index % len(OTHER_COLOURS)]
        data.append({
            "type": "scatter", "mode": "lines", "name": name,
            "x": round_values(100 * rows["width"].clip(lower=1e-5)), "y": round_values(100 * rows["share"]),
            "line": {"color": colour, "width": 2, "dash": DASHES[index % len(DASHES)]},
            "hovertemplate": f"<b>{name}</b><br>%{{y:.0f}}% of the points within %{{x:.2~r}}%<extra></extra>",
        })  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": "width of the 95% interval,<br>relative to the median"}, "type": "log",
                  **build_log_ticks(low, high, "%")},
        "yaxis": {"title": {"text": "points"}, "ticksuffix": "%", "range": [0, 102]},
        "height": 340,
    }  # fmt: skip
    return {"data": data, "layout": layout}


def draw_model_errors(methods: Mapping[str, Mapping[str, float | int | None]]) -> Figure:
    """Draw median and 90% errors of each hold-out as bars, with the highest noise floor as a line."""
    names = ["<br>".join(textwrap.wrap(escape_name(method), 24)) for method in methods]
    colours = {"median": GAIN, "p90": "#56B4E9"}
    titles = {"median": "half of the points within", "p90": "nine of ten within"}
    data = [
        {
            "type": "bar", "orientation": "h", "name": titles[figure], "y": names,
            "x": [None if (s := found.get(figure)) is None else round(100 * s, 3) for found in methods.values()],
            "marker": {"color": colours[figure]},
            "hovertemplate": f"<b>%{{y}}</b><br>{titles[figure]} %{{x:.2~f}}%<extra></extra>",
        }
        for figure in ("p90", "median")  # plotly draws the first at the bottom
    ]  # fmt: skip
    floors = [floor for found in methods.values() if (floor := found.get("noise_floor")) is not None]
    floor = 100 * max(floors) if floors else None
    note = {
        "text": "noise floor", "x": floor, "xref": "x", "yref": "paper", "y": 1, "yanchor": "bottom",
        "showarrow": False, "font": {"size": 12, "color": "@ink"},
    }  # fmt: skip
    layout = {
        "barmode": "group",
        "xaxis": {"title": {"text": "error of the predicted time"}, "ticksuffix": "%", "rangemode": "tozero"},
        "yaxis": {"type": "category", "autorange": "reversed", "showgrid": False},
        "shapes": [] if floor is None else [draw_line(x=floor)],
        "annotations": [] if floor is None else [note],
        "legend": {"traceorder": "reversed"},
        "height": 170 + 60 * len(names),
    }
    return {"data": data, "layout": layout}


def draw_profile(layers: pd.DataFrame) -> Figure:
    """Draw the predicted seconds of each layer as bars with intervals, coloured by pattern, the first layer on top.

    Columns: name, pattern, sparsity, seconds, low, high.
    """
    scale, unit = choose_time_unit(float(layers["seconds"].max()))
    data = []
    look_of = assign_looks(layers["pattern"])
    for pattern, rows in layers.groupby("pattern", sort=True):
        name = escape_name(pattern)
        kind = find_format(pattern)
        data.append({
            "type": "bar", "orientation": "h", "name": name, "y": [escape_name(layer) for layer in rows["name"]],
            "x": round_values(rows["seconds"] / scale),
            "error_x": {
                "type": "data", "array": round_values((rows["high"] - rows["seconds"]) / scale),
                "arrayminus": round_values((rows["seconds"] - rows["low"]) / scale),
                "color": "@ink", "thickness": 1, "width": 3,
            },
            "marker": {"color": find_colour(kind), "pattern": {
                "shape": look_of[str(pattern)].hatch, "fillmode": "overlay", "solidity": 0.15, "size": 7,
                "fgcolor": "#ffffff" if kind in WHITE_ON else "#000000",
            }},
            "text": [format_percent(float(sparsity)) if sparsity else "dense" for sparsity in rows["sparsity"]],
            "textposition": "inside", "insidetextanchor": "start",
            "textfont": {"color": "#ffffff" if kind in WHITE_ON else "#000000"},
            "hovertemplate": f"<b>%{{y}}</b><br>{name}, %{{text}}<br>%{{x:.3~r}} {unit}<extra></extra>",
        })  # fmt: skip
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": f"predicted time, {unit}"}, "rangemode": "tozero"},
        "yaxis": {"type": "category", "categoryorder": "array", "showgrid": False,
                  "categoryarray": [escape_name(name) for name in reversed(layers["name"].tolist())]},
        "height": 150 + 26 * len(layers),
    }  # fmt: skip
    return {"data": data, "layout": layout}


def draw_promise(times: pd.DataFrame, target: float) -> Figure:
    """Draw the speedups of dense engines, prediction and measurement as bars, with a line at the target.

    Columns: those of `report_data.build_promise_times`.
    """
    colours = {"dense": COLOURS["dense"], "predicted": "#56B4E9", "measured": GAIN}
    data = [{
        "type": "bar", "orientation": "h", "y": [escape_name(name) for name in times["name"]],
        "x": round_values(times["speedup"]), "marker": {"color": [colours[kind] for kind in times["kind"]]},
        "error_x": {
            "type": "data", "array": round_values(times["speedup_high"] - times["speedup"]),
            "arrayminus": round_values(times["speedup"] - times["speedup_low"]),
            "color": "@ink", "thickness": 1.5, "width": 5,
        },
        "text": [format_seconds(*row) for row in times[["seconds", "low", "high"]].itertuples(index=False)],
        "textposition": "none", "hovertemplate": "<b>%{y}</b><br>%{x:.3~r}×, %{text}<extra></extra>",
        "showlegend": False,
    }]  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": "speedup over dense"}, "rangemode": "tozero"},
        "yaxis": {"type": "category", "autorange": "reversed", "showgrid": False},
        "shapes": [draw_line(x=target)],
        "annotations": [{
            "text": "target", "x": target, "xref": "x", "yref": "paper", "y": 1, "yanchor": "bottom",
            "showarrow": False, "font": {"size": 12, "color": "@ink"},
        }],
        "height": 130 + 40 * len(times),
    }  # fmt: skip
    return {"data": data, "layout": layout}


def _point_text(row: Record) -> str:
    text = f"{format_seconds(row['seconds'], row['low'], row['high'])}<br>{escape_name(row['kernel'])}"
    return text + "<br>noisy" if row["noisy"] else text


def draw_line(x: float | None = None, y: float | None = None) -> Figure:
    """Return a dashed line across the whole chart, vertical at `x` or horizontal at `y`."""
    place = {"x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1} if y is None else {
        "y0": y, "y1": y, "xref": "paper", "x0": 0, "x1": 1,
    }  # fmt: skip
    return {"type": "line", "line": {"color": "@ink", "width": 1.5, "dash": "dash"}, **place}


def build_log_ticks(low: float, high: float, suffix: str) -> Figure:
    """Build ticks 1, 2, 5 in every decade of an axis, more on a short axis and only 1 on a long one."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    digits: tuple[float, ...] = (1, 2, 5) if last - first <= 3 else (1,)
    if high < 6 * low:
        digits = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    ticks = [digit * 10.0**decade for decade in range(first, last + 1) for digit in digits]
    return {"tickvals": ticks, "ticktext": [f"{tick:g}{suffix}" for tick in ticks]}


def build_time_axis(title: str, low: float, high: float) -> Figure:
    """Build a logarithmic axis of seconds from `low` to `high` with ticks in µs, ms or s."""
    ticks = build_log_ticks(low, high, "")["tickvals"]
    return {
        "title": {"text": title}, "type": "log",
        "tickvals": ticks, "ticktext": [format_round_seconds(tick) for tick in ticks],
        "range": [math.log10(low) - 0.05, math.log10(high) + 0.05],
    }  # fmt: skip


def find_format(pattern: object) -> str:
    """Find the format of a pattern by its name."""
    name = str(pattern).split(":")[0]
    return VectorNM.format if name == "vectornm" else name


def find_colour(pattern_format: str) -> str:
    """Return the colour of a format; other formats share one."""
    return COLOURS.get(pattern_format, OTHER_COLOURS[0])


def find_symbol(pattern_format: str) -> str:
    """Return the symbol of a format; other formats share one."""
    return SYMBOLS.get(pattern_format, "star")


def build_line_and_marker(look: Look, size: int) -> Figure:
    """`line` and `marker` of a trace; an open marker has a line that is seen."""
    marker = {"color": look.colour, "size": size, "symbol": look.symbol}
    if "open" in look.symbol:
        marker["line"] = {"width": 2}
    return {"line": {"color": look.colour, "width": 2, "dash": look.dash}, "marker": marker}


def select_sample(frame: pd.DataFrame, most: int, seed: int = 0) -> pd.DataFrame:
    """Select at most `most` random rows of `frame`, in their order."""
    return frame if len(frame) <= most else frame.sample(most, random_state=seed).sort_index()


def round_values(values: Iterable[float]) -> list[float]:
    """Four significant digits: what a screen can show, at a third of the bytes."""
    return [float(f"{value:.4g}") for value in values]


def round_error_bars(values: Iterable[float]) -> list[float]:
    """Return the lengths of error bars as `round_values` does; zero without an interval."""
    return [0.0 if math.isnan(value) else float(f"{value:.4g}") for value in values]


def escape_name(name: object) -> str:
    """Escape a name for plotly, which reads some HTML in its texts."""
    return html.escape(str(name), quote=False)
