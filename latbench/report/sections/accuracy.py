"""The section of accuracy against measured speedup, by pattern: results of experiments, a row for each trained model.

A CSV or Parquet file with the columns

    pattern     text    dense, unstructured, vector:32, ...; dense rows are the baseline
    method      text    method of pruning or training
    speedup     real    measured, over the fastest dense engine
    accuracy    real    a share of one, or any score that should be high
    seed        whole
    sparsity    real, optional: rows that differ only in seed are one point; without it, rows of equal speedup are
    target      real, optional: the speedup asked for. Rows of one target, method and seed are compared with the one
                whose pattern is `uniform`; without sparsity, rows that differ only in seed are one point. So a file
                holds one task

Other columns are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from latbench.base.number_format import NOTHING, format_percent, format_ratio
from latbench.errors import BadData
from latbench.report.elements import Cell, Chart, Section, Table, build_count_cell, build_table
from latbench.report.figures import (
    DASHES,
    OTHER_COLOURS,
    OTHER_SYMBOLS,
    Figure,
    Look,
    assign_looks,
    build_line_and_marker,
    build_log_ticks,
    escape_name,
    round_values,
)

COLUMNS = ("pattern", "method", "speedup", "accuracy", "seed")
DENSE = "dense"
UNIFORM = "uniform"
"""The pattern of profiles with one pattern and sparsity in all layers. Others of a target are paired with it."""


def read_results(path: Path) -> pd.DataFrame:
    """Read the rows of such a file. Raises BadData, with the name of the column, for any other file."""
    try:
        frame = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    except FileNotFoundError:
        raise BadData(f"{path} does not exist: results need the columns {', '.join(COLUMNS)}") from None
    except (OSError, ValueError) as error:
        raise BadData(f"{path} cannot be read as a CSV or Parquet file: {error}") from error
    if missing := [name for name in COLUMNS if name not in frame.columns]:
        raise BadData(f"{path} has no column {', '.join(missing)}; results need {', '.join(COLUMNS)}")
    if frame.empty:
        raise BadData(f"{path} holds no result")
    try:
        numbers = [name for name in ("speedup", "accuracy", "sparsity", "target") if name in frame.columns]
        frame = frame.astype({"pattern": str, "method": str} | dict.fromkeys(numbers, float))
    except ValueError as error:
        raise BadData(f"{path}: {', '.join(numbers)} are numbers, such as 0.75: {error}") from error
    if not (np.isfinite(frame[["speedup", "accuracy"]]).all(axis=None) and (frame["speedup"] > 0).all()):
        raise BadData(f"{path}: every speedup and accuracy must be finite, and speedups above 0")
    if wrong := [share for share in frame.get("sparsity", ()) if share < 0 or share > 1]:
        raise BadData(f"{path}: a sparsity is a share from 0 to 1, such as 0.75, not {wrong[0]:g}")
    return frame


def build_frame(results: pd.DataFrame) -> pd.DataFrame:
    """Build a frame with a row for each point, over its seeds, by pattern, method and rising speedup.

    Columns: pattern, method, sparsity (NaN if unknown), seeds, speedup (median), speedup_low, speedup_high (the
    extremes), accuracy (mean), low, high: its 95% interval by Student's t, NaN with one seed.
    """
    whole = [name for name in ("sparsity", "target") if name in results and results[name].notna().any()]
    by = ["pattern", "method", whole[0] if whole else "speedup"]
    if by[2] == "target" and results["target"].isna().any():  # such as that of the dense model
        results = results.assign(target=results["target"].fillna(results["speedup"]))
    rows = []
    for key, own in results.groupby(by, dropna=False, sort=True):
        values = own["accuracy"].to_numpy(float)
        mean, half = float(values.mean()), _find_half_width(values)
        rows.append({
            "pattern": key[0], "method": key[1], "sparsity": key[2] if by[2] == "sparsity" else math.nan,
            "seeds": len(own), "speedup": float(own["speedup"].median()),
            "speedup_low": float(own["speedup"].min()), "speedup_high": float(own["speedup"].max()),
            "accuracy": mean, "low": mean - half, "high": mean + half,
        })  # fmt: skip
    return pd.DataFrame(rows).sort_values(["method", "pattern", "speedup"], kind="stable").reset_index(drop=True)


def _find_half_width(values: NDArray[np.float64]) -> float:
    """Return half the width of the 95% interval of a mean by Student's t; NaN for a single value."""
    from scipy.special import stdtrit  # late, because its import takes longer than most reports

    if len(values) < 2:
        return math.nan
    return float(stdtrit(len(values) - 1, 0.975)) * float(values.std(ddof=1)) / math.sqrt(len(values))


def build_pairs(results: pd.DataFrame) -> pd.DataFrame:
    """Build a frame of differences from the uniform profile of the same target, method and seed; empty without any.

    Columns: target, method, pattern, pairs, difference (mean), low, high: its 95% interval by Student's t, NaN with
    one pair, and time_low, time_high: the extremes of the time over that of the uniform profile.
    """
    keys = ["target", "method", "seed"]
    if "target" not in results.columns:
        return pd.DataFrame()
    uniform = results[results["pattern"] == UNIFORM].drop_duplicates(keys)
    others = results[~results["pattern"].isin([UNIFORM, DENSE])]
    both = others.merge(uniform[[*keys, "accuracy", "speedup"]], on=keys, suffixes=("", "_uniform"))
    rows = []
    for (target, method, pattern), own in both.groupby(["target", "method", "pattern"], sort=True):
        values = (own["accuracy"] - own["accuracy_uniform"]).to_numpy(float)
        mean, half, times = float(values.mean()), _find_half_width(values), own["speedup_uniform"] / own["speedup"]
        rows.append({
            "target": target, "method": method, "pattern": pattern, "pairs": len(own), "difference": mean,
            "low": mean - half, "high": mean + half, "time_low": times.min(), "time_high": times.max(),
        })  # fmt: skip
    return pd.DataFrame(rows)


def build_section(points: pd.DataFrame, pairs: pd.DataFrame | None = None) -> Section:
    """Build the section: a chart by method or pattern, the fastest points that keep the accuracy, and all points.

    `pairs` is the frame of `build_pairs`; a table shows it where it is not empty.
    """
    dense = points[points["pattern"] == DENSE]
    sparse = points[points["pattern"] != DENSE]
    share = bool(points["accuracy"].between(0, 1).all())
    base = float(dense["accuracy"].max()) if len(dense) else math.nan
    sentences = [
        "Accuracy on the test data over the measured speedup against the fastest dense engine. A point is the mean "
        "of its seeds with the 95% interval of that mean (Student's t; none for a single seed). The dashed line is "
        "the dense model. Points to the right are faster, points above are more accurate."
    ]
    tables = []
    if len(dense) and len(sparse):
        loss = "one percentage point" if share else "one percent"
        best = _fastest(sparse, base, share)
        sentences.append(
            f"Every point loses more than {loss} on average."
            if best is None
            else f"The fastest point that loses at most {loss} on average is {best['pattern']} "
            f"with {best['method']}: "
            f"{format_ratio(best['speedup'])} at "
            f"{format_accuracy(best['accuracy'], share)}, {format_accuracy(base, share)} dense."
        )
        tables.append((f"Highest speedup that loses at most {loss}", _build_best_table(sparse, base, share)))
    if pairs is not None and len(pairs):
        sentences.append(
            "Differences from the uniform profile, better above zero, are means over pairs of one seed, with the 95% "
            "interval over seeds. All seeds are scored on the same test data, so the whole uncertainty is larger."
        )
        tables.append(("Against the uniform profile of the same target", _build_pairs_table(pairs, share)))
    cells = [
        [row["pattern"], row["method"], Cell(format_percent(row["sparsity"]), row["sparsity"]),
         Cell(format_ratio(row["speedup"]), row["speedup"]),
         Cell(format_accuracy(row["accuracy"], share, row["low"], row["high"]), row["accuracy"]),
         _difference(row["accuracy"] - base, share), build_count_cell(row["seeds"])]
        for row in points.to_dict("records")
    ]  # fmt: skip
    against = "#against dense, percentage points" if share else "#against dense"
    heads = ["pattern", "method", "#sparsity", "#measured speedup", "#accuracy", against, "#seeds"]
    tables.append(("Every point", build_table(heads, cells)))
    charts = []
    if len(sparse):
        chosen = build_choices(sparse, dense, share)
        charts.append(Chart("accuracy", "Accuracy by measured speedup", choices=chosen, label="Show"))
    return Section("accuracy", "Accuracy against speedup", sentences, charts, tables)


def build_choices(sparse: pd.DataFrame, dense: pd.DataFrame, share: bool) -> list[tuple[str, dict[str, Figure]]]:
    """Build a figure for each method with a line for each pattern; for several methods also one for each pattern."""
    by_method = [
        (f"{method}, every pattern", {"accuracy": draw_figure(own, dense, share, "pattern")})
        for method, own in sparse.groupby("method", sort=True)
    ]
    if len(by_method) == 1:
        return by_method
    return by_method + [
        (f"{pattern}, every method", {"accuracy": draw_figure(own, dense, share, "method")})
        for pattern, own in sparse.groupby("pattern", sort=True)
    ]


def _fastest(points: pd.DataFrame, base: float, share: bool) -> dict[Any, Any] | None:
    """Return the fastest point that loses at most one percentage point, or one percent of a score."""
    kept = points[points["accuracy"] >= base - (0.01 if share else 0.01 * abs(base))]
    return kept.loc[kept["speedup"].idxmax()].to_dict() if len(kept) else None


def _build_best_table(sparse: pd.DataFrame, base: float, share: bool) -> Table:
    """Build a table of the fastest points that keep the accuracy: patterns in rows, methods in columns."""
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
                cells.append(
                    Cell(
                        format_ratio(best["speedup"]), best["speedup"], format_accuracy(best["accuracy"], share) + at
                    )
                )
        rows.append([str(pattern), *cells])
    return build_table(["pattern", *(f"#{method}" for method in methods)], rows)


def _build_pairs_table(pairs: pd.DataFrame, share: bool) -> Table:
    """Build a table of the differences of pairs, with their intervals."""
    scale, form = (100, ".2f") if share else (1, ".3g")
    rows: list[list[Cell | str]] = []
    for row in pairs.to_dict("records"):
        mean, low, high = (scale * row[name] for name in ("difference", "low", "high"))
        interval = "" if math.isnan(low) else f" ({low:+{form}} to {high:+{form}})"
        times = f"{row['time_low']:.3f}–{row['time_high']:.3f}"
        rows.append([
            Cell(format_ratio(row["target"]), row["target"]), row["method"], row["pattern"],
            Cell(f"{mean:+{form}}{interval}", row["difference"]), Cell(times, row["time_high"]),
            build_count_cell(row["pairs"]),
        ])  # fmt: skip
    difference = "#difference, percentage points" if share else "#difference"
    return build_table(["#target", "method", "profile", difference, "#time over uniform", "#pairs"], rows)


def _difference(value: float, share: bool) -> Cell:
    """Return the difference from dense, in percentage points for a share."""
    if math.isnan(value):
        return Cell(NOTHING)
    return Cell(f"{100 * value:+.2f}" if share else f"{value:+.3g}", value)


def format_accuracy(value: float, share: bool, low: float = math.nan, high: float = math.nan) -> str:
    """Return an accuracy as text, with its interval if there is one."""
    scale, unit, form = (100, "%", ".2f") if share else (1, "", ".4g")
    if math.isnan(low):
        return f"{scale * value:{form}}{unit}"
    return f"{scale * value:{form}}{unit} ({scale * low:{form}}–{scale * high:{form}})"


def draw_figure(points: pd.DataFrame, dense: pd.DataFrame, share: bool, by: str) -> Figure:
    """Draw a line for each value of the column `by` (pattern or method), and the dense accuracy dashed."""
    scale = 100 if share else 1
    traces: list[Figure] = []
    look_of = assign_looks(points["pattern"])
    for index, (name, own) in enumerate(points.groupby(by, sort=True)):
        half = (own["high"] - own["accuracy"]).fillna(0.0) * scale
        other = Look(*(kinds[index % len(kinds)] for kinds in (OTHER_COLOURS, OTHER_SYMBOLS, DASHES)))
        traces.append({
            "type": "scatter", "mode": "lines+markers", "name": escape_name(name),
            "x": round_values(own["speedup"]), "y": [round(scale * value, 4) for value in own["accuracy"]],
            "error_y": {"type": "data", "array": round_values(half), "thickness": 1, "width": 3},
            **build_line_and_marker(look_of[str(name)] if by == "pattern" else other, 9),
            "text": [_hover(row, share) for row in own.to_dict("records")],
            "hovertemplate": "%{text}<extra></extra>",
        })  # fmt: skip
    lowest, highest = min(1.0, float(points["speedup"].min())), max(1.0, float(points["speedup"].max()))
    layout: Figure = {
        "xaxis": {
            "title": {"text": "measured speedup<br>over the fastest dense engine"}, "type": "log",
            "range": [math.log10(lowest) - 0.03, math.log10(highest) + 0.03], **build_log_ticks(lowest, highest, "×"),
        },
        "yaxis": {"title": {"text": "accuracy"}, "ticksuffix": "%" if share else ""},
        "height": 440,
    }  # fmt: skip
    if len(dense):
        base = scale * float(dense["accuracy"].max())
        # A trace and not a shape of the layout, so that the axis always reaches it.
        traces.append({
            "type": "scatter", "mode": "lines", "name": "dense", "x": round_values([lowest, highest]),
            "y": [round(base, 4)] * 2, "line": {"color": "@ink", "width": 1.5, "dash": "dash"},
            "hovertemplate": f"dense: {base:.4g}{'%' if share else ''}<extra></extra>",
        })  # fmt: skip
    return {"data": traces, "layout": layout}


def _hover(row: Mapping[Any, Any], share: bool) -> str:
    sparsity = "" if math.isnan(row["sparsity"]) else f" at {format_percent(row['sparsity'])}"
    seeds = "1 seed" if row["seeds"] == 1 else f"{row['seeds']} seeds"
    return (
        f"<b>{escape_name(row['pattern'])}</b>{sparsity}, {escape_name(row['method'])}<br>"
        f"{format_ratio(row['speedup'])}<br>"
        f"{format_accuracy(row['accuracy'], share, row['low'], row['high'])}, {seeds}"
    )
