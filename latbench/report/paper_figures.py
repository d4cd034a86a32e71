"""Figures for papers, from the same frames as the page: PDF and SVG by matplotlib, and the data of each as CSV.

One column wide or two, colour-blind-safe, fonts embedded, and byte for byte the same for the same content.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from latbench.base.files import write_bytes_atomically, write_text_atomically
from latbench.base.number_format import choose_time_unit, format_percent
from latbench.errors import EnvironmentUnusable
from latbench.report import point_frames
from latbench.report.figures import (
    COLOURS,
    DASHES,
    GAIN,
    LOSS,
    OTHER_COLOURS,
    Look,
    assign_looks,
    find_colour,
    find_format,
    find_symbol,
    select_sample,
)
from latbench.report.pages import speedup_map
from latbench.report.report_data import ReportData
from latbench.report.report_inputs import ReportInputs
from latbench.report.sections import predictions, trade_off
from latbench.report.sections import roofline_chart as roofline

COLUMN, PAGE = 3.5, 7.0  # inches: the width of a column, and of both
STYLE: dict[Any, Any] = {
    "font.size": 8, "axes.titlesize": 8, "legend.fontsize": 7, "xtick.labelsize": 7, "ytick.labelsize": 7,
    "axes.spines.top": False, "axes.spines.right": False, "lines.linewidth": 1.2, "lines.markersize": 3.5,
    "pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "latbench", "figure.constrained_layout.use": True,
    "text.parse_math": False,
}  # fmt: skip
PANELS = 6  # shapes of the figure of speedups
MAP_ROWS = 24
MARKERS = {
    "circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "cross": "P", "hexagon": "h", "star": "*",
}  # fmt: skip
LINES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
FILLS = {"": "full", "-open": "none", "-dot": "left", "-open-dot": "bottom"}

Draw = Callable[[Any, pd.DataFrame], None]


@dataclass(frozen=True)
class Drawing:
    """A figure: its rows, the function that draws them with matplotlib, its height and width in inches."""

    rows: pd.DataFrame
    draw: Draw
    height: float
    width: float = COLUMN


def write_figures(content: ReportData, inputs: ReportInputs, folder: Path) -> list[Path]:
    """Write the files of every figure of the report, as `write_drawings`."""
    return write_drawings(list_drawings(content, inputs), folder)


def write_drawings(drawings: Mapping[str, Drawing], folder: Path) -> list[Path]:
    """Write NAME.pdf, NAME.svg and NAME.csv of every figure, and return the paths.

    Raises EnvironmentUnusable where matplotlib is not installed or the disk refuses.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EnvironmentUnusable(
            "--figures needs matplotlib, which is not installed: pip install 'latbench[figures]'"
        ) from error
    written = []
    for name, drawing in drawings.items():
        with mpl.rc_context(STYLE):
            figure = Figure(figsize=(drawing.width, drawing.height))
            drawing.draw(figure, drawing.rows)
            for kind, metadata in (("pdf", {"CreationDate": None}), ("svg", {"Date": None})):
                stream = io.BytesIO()
                figure.savefig(stream, format=kind, metadata=metadata)
                write_bytes_atomically(folder / f"{name}.{kind}", stream.getvalue())
        write_text_atomically(folder / f"{name}.csv", drawing.rows.to_csv(index=False))
        written += [folder / f"{name}.{kind}" for kind in ("pdf", "svg", "csv")]
    return written


def list_drawings(content: ReportData, inputs: ReportInputs) -> dict[str, Drawing]:
    """List the figures by name, in the order of the page."""
    found: dict[str, Drawing] = {}
    if content.times is not None and inputs.verdict is not None:
        target = inputs.verdict.target
        found["promise"] = Drawing(
            content.times, lambda figure, rows: _speedup_bars(figure, rows, target), 0.8 + 0.24 * len(content.times)
        )
    if content.layers is not None:
        found["profile"] = Drawing(content.layers, _profile, 0.9 + 0.16 * len(content.layers))
    if content.trade_offs is not None and inputs.profile is not None:
        chosen = inputs.profile
        point = (chosen.predicted_seconds, chosen.predicted_low, chosen.predicted_high, chosen.error)
        found["frontier"] = Drawing(content.trade_offs, lambda figure, rows: _frontier(figure, rows, point), 3.0)
    if content.accuracy is not None:
        methods = content.accuracy.loc[content.accuracy["pattern"] != "dense", "method"].nunique()
        found["accuracy"] = Drawing(content.accuracy, _accuracy, 0.4 + 2.0 * max(1, methods))
    shown = point_frames.select_places(content.speedups, content.places[:PANELS])
    found["speedup"] = Drawing(shown, _speedups, 0.7 + 1.5 * math.ceil(min(PANELS, len(content.places)) / 3), PAGE)
    places = content.places[:MAP_ROWS]
    best = point_frames.select_places(point_frames.select_fastest_patterns(content.speedups), places)
    rows = best.merge(content.starts[[*point_frames.PLACE, "break_even"]], on=point_frames.PLACE)
    found["map"] = Drawing(rows, lambda figure, rows: _map(figure, rows, places), 0.8 + 0.22 * len(places), PAGE)
    if len(content.roofline):
        found["roofline"] = Drawing(content.roofline, _roofline, 2.6)
    if content.held_out is not None:
        found["predictions"] = Drawing(content.held_out, _predictions, 2.4)
    if len(content.noise_curve):
        found["noise"] = Drawing(content.noise_curve, _noise, 2.2)
    return found


def _speedup_bars(figure: Any, rows: pd.DataFrame, target: float) -> None:
    axes = figure.subplots()
    colours = {"dense": COLOURS["dense"], "predicted": OTHER_COLOURS[0], "measured": GAIN}
    shown = rows[["speedup", "speedup_low", "speedup_high"]].set_axis(["seconds", "low", "high"], axis=1)
    _bars(axes, shown, 1.0, [colours[kind] for kind in rows["kind"]], list(rows["name"]))
    axes.axvline(target, color="black", linestyle="--", linewidth=0.8)
    axes.set_xlabel("speedup over dense (dashed: target)")


def _profile(figure: Any, rows: pd.DataFrame) -> None:
    axes = figure.subplots()
    scale, unit = choose_time_unit(float(rows["seconds"].max()))
    names = [
        f"{row.name_} {row.pattern}" + (f" {format_percent(row.sparsity)}" if row.sparsity else "")
        for row in rows.rename(columns={"name": "name_"}).itertuples()
    ]
    _bars(axes, rows, scale, [find_colour(find_format(pattern)) for pattern in rows["pattern"]], names)
    axes.set_xlabel(f"predicted time, {unit}")


def _bars(axes: Any, rows: pd.DataFrame, scale: float, colours: list[str], names: list[str]) -> None:
    ends = np.abs(np.stack([rows["seconds"] - rows["low"], rows["high"] - rows["seconds"]])) / scale
    axes.barh(range(len(rows)), rows["seconds"] / scale, color=colours, xerr=ends, error_kw={"elinewidth": 0.8})
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()


def _frontier(figure: Any, rows: pd.DataFrame, chosen: tuple[float, float, float, float]) -> None:
    axes = figure.subplots()
    rows = rows[rows["error"] > 0]
    line = rows[rows["kind"] == trade_off.EFFICIENT]
    axes.step(line["seconds"] * 1e3, line["error"], where="post", color="black", label="least error")
    uniform = rows[rows["kind"] == trade_off.UNIFORM]
    look_of = assign_looks(uniform["pattern"])
    for pattern, own in uniform.groupby("pattern", sort=True):
        style = _style(look_of[str(pattern)]) | {"linestyle": ""}
        axes.plot(own["seconds"] * 1e3, own["error"], label=f"all {pattern}", **style)
    *ends, error = chosen
    seconds, low, high = (1e3 * end for end in ends)
    axes.errorbar(
        [seconds], [error], xerr=[[seconds - low], [high - seconds]], fmt="*", markersize=9, color=GAIN,
        markeredgecolor="black", markeredgewidth=0.5, label="chosen",
    )  # fmt: skip
    axes.set(xlabel="whole model, ms", ylabel="total error of layers", xscale="log", yscale="log")
    label_plain_ticks(axes.xaxis)
    draw_legend_above(figure, [axes], columns=3)


def _accuracy(figure: Any, rows: pd.DataFrame) -> None:
    sparse, dense = rows[rows["pattern"] != "dense"], rows[rows["pattern"] == "dense"]
    scale = 100 if rows["accuracy"].between(0, 1).all() else 1
    methods = sorted(sparse["method"].unique())
    panels = np.atleast_1d(figure.subplots(max(1, len(methods)), 1, sharex=True, sharey=True))
    look_of = assign_looks(sparse["pattern"])
    for axes, method in zip(panels, methods, strict=False):
        for pattern, line in sparse[sparse["method"] == method].groupby("pattern", sort=True):
            half = (line["high"] - line["accuracy"]).fillna(0.0) * scale
            axes.errorbar(
                line["speedup"], line["accuracy"] * scale, yerr=half, label=str(pattern), elinewidth=0.6,
                **_style(look_of[str(pattern)]),
            )  # fmt: skip
        if len(dense):
            axes.axhline(scale * dense["accuracy"].max(), color="black", linestyle="--", linewidth=0.8, label="dense")
        axes.set(title=method, ylabel="accuracy, %" if scale == 100 else "accuracy", xscale="log")
        label_plain_ticks(axes.xaxis)
    panels[-1].set_xlabel("measured speedup over the fastest dense engine (×)")
    draw_legend_above(figure, panels, columns=3)


def _style(look: Look) -> dict[str, Any]:
    """Return matplotlib's arguments for the look of a pattern on the page."""
    shape = look.symbol.removesuffix("-dot").removesuffix("-open")
    fill = FILLS[look.symbol.removeprefix(shape)]
    return {"color": look.colour, "linestyle": LINES[look.dash], "marker": MARKERS[shape], "fillstyle": fill}


def label_plain_ticks(axis: Any) -> None:
    """Label 1, 2, 5, 10 on a logarithmic axis, only 1 and 10 on a long one, without powers of ten."""

    def between(value: float, _: Any) -> str:
        low, high = axis.get_view_interval()
        return f"{value:g}" if f"{value:e}"[0] in "25" and high < 500 * low else ""

    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(between)


def draw_legend_above(figure: Any, panels: Iterable[Any], columns: int) -> None:
    """Draw one legend for all panels above them."""
    handles: dict[str, Any] = {}
    for axes in panels:
        handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(list(handles.values()), list(handles), loc="outside upper center", ncols=columns, frameon=False)


def _speedups(figure: Any, rows: pd.DataFrame) -> None:
    places = point_frames.list_places(rows)
    columns = min(3, len(places))
    grid = figure.subplots(math.ceil(len(places) / columns), columns, sharex=True, sharey=True, squeeze=False)
    panels = grid.ravel()
    look_of = assign_looks(rows["pattern"])
    for axes, (setting, shape) in zip(panels, places, strict=False):
        own = rows[(rows["setting"] == setting) & (rows["shape"] == shape)]
        for pattern, look in look_of.items():
            line = own[own["pattern"] == pattern].sort_values("sparsity")
            if len(line):
                ends = np.abs(
                    np.stack([line["speedup"] - line["speedup_low"], line["speedup_high"] - line["speedup"]])
                )
                axes.errorbar(
                    100 * line["sparsity"], line["speedup"], yerr=ends, label=pattern, elinewidth=0.6,
                    **_style(look),
                )  # fmt: skip
        axes.axhline(1, color="black", linestyle="--", linewidth=0.8)
        axes.set_yscale("log")
        label_plain_ticks(axes.yaxis)
        axes.set_title(point_frames.format_place(setting, shape), fontsize=6)
    for empty in range(len(places), len(panels)):  # the panel above one is the last of its column
        panels[empty].set_visible(False)
        panels[empty - columns].xaxis.set_tick_params(labelbottom=True)
    figure.supxlabel("sparsity, %", fontsize=8)
    figure.supylabel("speedup over the fastest dense engine", fontsize=8)
    draw_legend_above(figure, panels[: len(places)], columns=4)


def _map(figure: Any, rows: pd.DataFrame, places: list[tuple[str, str]]) -> None:
    axes = figure.subplots()
    columns = speedup_map.select_spread(point_frames.list_common_sparsities(rows))
    gains = {(row.setting, row.shape, row.sparsity): row.speedup for row in rows.itertuples()}
    starts = {(row.setting, row.shape): row.break_even for row in rows.itertuples()}
    grid = np.array([[gains.get((*place, sparsity), math.nan) for sparsity in columns] for place in places])
    draw_ratio_grid(axes, grid, columns, places)
    x = np.array([_position(starts[place], columns) for place in places])
    axes.plot(np.repeat(x, 2), np.arange(len(places)).repeat(2) + np.tile([-0.5, 0.5], len(places)), color="black")
    axes.set_title("speedup of the fastest pattern over the fastest dense engine")
    axes.set_xlabel("sparsity (line: break-even)")


def draw_ratio_grid(axes: Any, grid: np.ndarray, columns: list[float], places: list[tuple[str, str]]) -> None:
    """Draw ratios (places, sparsities) as coloured cells with their numbers: blue above 1, orange below."""
    from matplotlib.colors import LinearSegmentedColormap

    limit = max(0.1, float(np.nanmax(np.abs(np.log2(grid)))))
    scale = LinearSegmentedColormap.from_list("gain", [LOSS, "#f7f7f7", GAIN])
    axes.imshow(np.log2(grid), cmap=scale, vmin=-limit, vmax=limit, aspect="auto")
    for (row, column), gain in np.ndenumerate(grid):
        if not math.isnan(gain):
            dark = abs(math.log2(gain)) > 0.7 * limit
            axes.text(
                column,
                row,
                f"{gain:.2f}" if gain < 0.95 else f"{gain:.1f}" if gain < 9.95 else f"{gain:.0f}",
                ha="center",
                va="center",
                fontsize=6,
                color="white" if dark else "black",
            )
    axes.set_xticks(range(len(columns)), [format_percent(sparsity) if sparsity else "dense" for sparsity in columns])
    axes.set_yticks(range(len(places)), [point_frames.format_place(*place) for place in places])


def _position(start: float, columns: list[float]) -> float:
    if math.isnan(start):
        return len(columns) - 0.5
    return int(np.searchsorted(columns, start - 1e-9)) - 0.5  # between cells


def _roofline(figure: Any, rows: pd.DataFrame) -> None:
    rows = select_sample(rows, roofline.POINTS)  # the data beside it has all
    axes = figure.subplots()
    axes.plot(rows["flop_per_byte"], rows["roof_flop_per_second"] / 1e9, "_", color="0.6", label="roof")
    for name, own in rows.groupby("format", sort=True):
        axes.plot(
            own["flop_per_byte"],
            own["flop_per_second"] / 1e9,
            MARKERS[find_symbol(str(name))],
            color=find_colour(str(name)),
            label=str(name),
            markersize=2.5,
            alpha=0.7,
        )
    axes.set(xscale="log", yscale="log", xlabel="operations on kept weights per byte", ylabel="GFLOP/s")
    axes.legend(frameon=False)


def _predictions(figure: Any, rows: pd.DataFrame) -> None:
    rows = select_sample(rows, predictions.POINTS)
    axes = figure.subplots()
    for name, own in rows.groupby("format", sort=True):
        ends = np.abs(np.stack([own["predicted"] - own["low"], own["high"] - own["predicted"]])) / own[
            "measured"
        ].to_numpy(float)
        axes.errorbar(
            own["measured"] * 1e6, own["ratio"], yerr=np.nan_to_num(ends), fmt=MARKERS[find_symbol(str(name))],
            color=find_colour(str(name)), label=str(name), elinewidth=0.5, markersize=2.5,
        )  # fmt: skip
    axes.axhline(1, color="black", linestyle="--", linewidth=0.8)
    axes.set(xscale="log", xlabel="measured, µs", ylabel="predicted / measured")
    label_plain_ticks(axes.xaxis)
    draw_legend_above(figure, [axes], columns=3)


def _noise(figure: Any, rows: pd.DataFrame) -> None:
    axes = figure.subplots()
    for index, (backend, own) in enumerate(rows.groupby("backend", sort=True)):
        axes.plot(
            100 * own["width"].clip(lower=1e-5), 100 * own["share"], label=str(backend),
            color=OTHER_COLOURS[index % len(OTHER_COLOURS)], linestyle=LINES[DASHES[index % len(DASHES)]],
        )  # fmt: skip
    axes.set(xscale="log", xlabel="width of the 95% interval, % of the median", ylabel="points, %")
    label_plain_ticks(axes.xaxis)
    axes.legend(frameon=False)
