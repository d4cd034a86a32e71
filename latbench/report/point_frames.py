"""Frames of points, speedups, break-evens and noise from the rows of a table; every function is pure.

A table has the latest row of each point with each status. Its texts may be categories, and are plain in the frame of
`build_points` and those after it. A point is one timed row, the latest of its key. Its `shape` and `setting` are
labels for the layer's shape columns and for how it was measured (device, threads, dtype, cache mode, ...). Two times
are compared only within one setting and one shape. The layout of activations is a kernel's choice: the fastest dense
kernel may have another. Times are in seconds; `low` and `high` bound the 95% interval of the median.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from latbench.base.engine_registry import BFLOAT16, FLOAT32, GPU_ENGINES, INT4, INT8
from latbench.base.number_format import format_threads
from latbench.tables.layer_columns import check_layers
from latbench.tables.schema import TIMED
from latbench.tables.table import select_timed

SHAPE = [
    "op", "m", "k", "n", "batch", "c_in", "h", "w", "c_out", "kh", "kw",
    "stride_h", "stride_w", "padding_h", "padding_w", "dilation_h", "dilation_w",
]  # fmt: skip
# Rounded weights are a kernel's choice, which the engine's name shows (numba bf16-weights). Rounded activations are a
# setting of their own, in which dense layers in float32 count, too.
SETTING = [
    "device", "threads", "dtype_a", "dtype_out", "epilogue", "context", "cache_mode", "launch_mode",
]  # fmt: skip
Label = Callable[[Mapping[Any, Any]], str]

LAYERS = ("linear", "conv2d")
NO_GAIN = 1e-9  # lower bound of a speedup without an interval
PLACE = ["setting", "shape"]
NOT_SHOWN = [
    "op", "m", "k", "n", "sparsity_actual", "backend", "flop", "bytes", "roofline_seconds", "dense_low", "dense_high",
]  # fmt: skip  # columns that no chart or table of single rows has: without them it takes a third less time


def select_layer_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Select the rows of one layer of known shape, failures included, without whole models and verifications."""
    known = table[["m", "k", "n"]].notna().all(axis=1)
    return table[table["op"].isin(LAYERS) & (table["purpose"] != "verify") & known]


def select_timed_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Select the rows that hold a time, one for each point, and add the column noisy (bool)."""
    return select_timed(rows).assign(noisy=lambda found: found["status"] == "noisy")


def build_points(table: pd.DataFrame, apart: Sequence[str] | None = None) -> pd.DataFrame:
    """Build a frame with a row for each timed point, sorted by setting, shape, pattern, sparsity and kernel.

    Columns: setting, shape, op, m, k, n, pattern, format, sparsity (target), sparsity_actual, backend, engine,
    kernel, dtype (of the weights). Then seconds, low and high (NaN where too few samples bound the median) and noisy
    (bool). Then flop (of the kept weights), bytes (the least that must move) and roofline_seconds, NaN where the
    table lacks them. Then those of `find_dense_of_any_type`.

    `apart` holds the columns that a setting's label names, by default those of SETTING in which rows differ. Raises
    BadData for rows that cannot be of a layer.
    """
    rows = select_timed_rows(select_layer_rows(table))
    check_layers(rows)
    rows = add_wider_rivals(rows.assign(**find_dense_of_any_type(rows)))
    tidy = rows[["m", "k", "n", "sparsity_actual", "noisy"]].copy()
    for name, column in (("flop", "flop_nnz"), ("bytes", "bytes_min"), ("roofline_seconds", "roofline_seconds")):
        tidy[name] = rows[column].astype(float)
    for name in ("op", "pattern", "format", "backend"):
        tidy[name] = _text(rows, name)
    tidy["sparsity"] = rows["sparsity_target"].fillna(rows["sparsity_actual"]).fillna(0.0).round(6)
    names = zip(rows["backend"], _text(rows, "kernel_requested").fillna(""), strict=True)
    tidy["engine"] = pd.Series([format_engine(*pair) for pair in names], index=rows.index, dtype=object)
    tidy["kernel"] = _text_or_none(rows, "kernel_used").fillna(tidy["engine"])
    tidy["dtype"] = _text(rows, "dtype_w")
    tidy[ANY_DENSE] = rows[ANY_DENSE]
    tidy["seconds"] = rows["median_seconds"]
    tidy["low"], tidy["high"] = rows["low_seconds"].astype(float), rows["high_seconds"].astype(float)
    known = ["op", *(name for name in SHAPE[1:] if rows[name].notna().any())]
    # Inside a running network the place of a layer matters, which the column model holds.
    known += ["context", "model"] if (rows["context"] == "network").any() else []
    tidy["shape"] = _labels(rows, known, format_shape)
    named = list_differing_columns(rows) if apart is None else apart
    tidy["setting"] = _labels(rows, named, _setting_label(named)) if named else pd.Series("", rows.index, object)
    order = ["setting", "op", "m", "k", "n", "shape", "pattern", "sparsity", "kernel"]
    return tidy.sort_values(order).reset_index(drop=True)


ANY_DENSE = ["any_dense_seconds", "any_dense_engine", "any_dense_dtype"]


def find_dense_of_any_type(rows: pd.DataFrame) -> pd.DataFrame:
    """Find the fastest dense layer of each row's shape and mode, whatever types it multiplies.

    Columns: any_dense_seconds, any_dense_engine and any_dense_dtype (of its weights); missing where there is none.
    """
    alike = [
        *SHAPE,
        "context",
        "model",
        *(name for name in SETTING if name not in ("dtype_a", "dtype_out", "context")),
    ]
    place = rows.groupby(alike, dropna=False, sort=False).ngroup()
    dense = rows[(rows["pattern"] == "dense") & rows["median_seconds"].notna()]
    fastest = dense.loc[dense["median_seconds"].groupby(place[dense.index]).idxmin()]
    names = zip(_text(fastest, "backend"), _text(fastest, "kernel_requested").fillna(""), strict=True)
    found = pd.DataFrame({
        "any_dense_seconds": fastest["median_seconds"].to_numpy(float),
        "any_dense_engine": [format_engine(*pair) for pair in names],
        "any_dense_dtype": _text(fastest, "dtype_w").to_numpy(object),
    }, index=place[fastest.index])  # fmt: skip
    return found.reindex(place).set_axis(rows.index)


WIDER = {BFLOAT16: (FLOAT32,), INT8: (FLOAT32, BFLOAT16)}
"""Types that are more precise than one that a sweep rounds to."""


def add_wider_rivals(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with dense layers of wider types repeated among the rounded layers of the same setting.

    So a speedup in bfloat16 is over the fastest dense layer in bfloat16 or float32, one in int8 over all three.
    """
    same, found = [name for name in SETTING if name != "dtype_a"], [rows]
    for dtype, wider in WIDER.items():
        settings = rows.loc[rows["dtype_a"] == dtype, same].drop_duplicates()
        dense = rows[(rows["pattern"] == "dense") & rows["dtype_a"].isin(wider)]
        lent = dense.merge(settings, on=same).assign(dtype_a=dtype)
        found += [lent[rows.columns]] if len(lent) else []
    return pd.concat(found, ignore_index=True) if len(found) > 1 else rows


def find_impossible(points: pd.DataFrame) -> pd.Series:
    """Return whether each point has an invalid time, interval or roofline: bool (points,)."""
    known = points[["seconds", "low", "high", "roofline_seconds"]]
    return ~(known.isna() | ((known > 0) & (known < np.inf))).all(axis=1)


def list_differing_columns(*tables: pd.DataFrame) -> list[str]:
    """List the columns of SETTING in which rows of these tables differ."""
    found = {name: pd.concat([pd.Series(table[name].unique(), dtype=object) for table in tables]) for name in SETTING}
    return [name for name, values in found.items() if values.nunique(dropna=False) > 1]


def has_weights_of_another_type(backends: pd.Series, dtypes: pd.Series) -> pd.Series:
    """Return whether rows of a GPU hold weights of fewer bits than they multiply: bool, by backend and weights."""
    return backends.isin(list(GPU_ENGINES)) & (dtypes == INT4)


def name_baseline(engine: str, dtype: str | None) -> str:
    """Return the name of a dense engine with the type of its weights, unless that is float32 or in its name."""
    return engine if dtype in (None, FLOAT32) or dtype in engine else f"{engine} in {dtype}"


def format_engine(backend: str, kernel_requested: str) -> str:
    """`torch mkldnn`, or the backend's name alone where the kernel was left to it."""
    return backend if kernel_requested in ("", "auto", backend) else f"{backend} {kernel_requested}"


def summarise_settings(table: pd.DataFrame) -> dict[str, str]:
    """Return the settings of layer rows: column -> its value, or its values joined by commas."""
    rows = select_layer_rows(table)
    return {
        name: ", ".join(sorted(_plainly(value) for value in rows[name].dropna().unique()))
        for name in [*SETTING, "dtype_w", "layout"]
    }


def select_fastest_dense(points: pd.DataFrame) -> pd.DataFrame:
    """Select the fastest dense engine of each setting and shape.

    On a GPU weights in four bits are of another type than a layer that is sparse in 16.

    Columns: setting, shape, dense_engine, dense_seconds, dense_low, dense_high, dense_dtype (of its weights),
    dense_engines (their number).
    """
    dense = points[(points["pattern"] == "dense") & ~has_weights_of_another_type(points["backend"], points["dtype"])]
    names = {
        "engine": "dense_engine", "seconds": "dense_seconds", "low": "dense_low", "high": "dense_high",
        "dtype": "dense_dtype",
    }  # fmt: skip
    found = select_fastest(dense, PLACE)[[*PLACE, *names]].rename(columns=names)
    engines = dense.groupby(PLACE, sort=False)["engine"].nunique().rename("dense_engines")
    return found.merge(engines.reset_index(), on=PLACE)


def build_speedups(points: pd.DataFrame) -> pd.DataFrame:
    """Build a frame of the fastest kernels by setting, shape, pattern and sparsity, and their speedups over dense.

    Columns: those of `build_points` and `select_fastest_dense`, speedup (above 1 is a gain), speedup_low,
    speedup_high. The last two have both intervals at their worst and at their best, NaN without an interval. Points
    of a shape without a dense time are left out.
    """
    sparse = select_fastest(points[points["pattern"] != "dense"], [*PLACE, "pattern", "sparsity"])
    joined = sparse.merge(select_fastest_dense(points), on=PLACE, how="inner")
    joined["speedup"] = joined["dense_seconds"] / joined["seconds"]
    joined["speedup_low"] = joined["dense_low"] / joined["high"]
    joined["speedup_high"] = joined["dense_high"] / joined["low"]
    return joined


def build_break_evens(speedups: pd.DataFrame) -> pd.DataFrame:
    """Build a frame with the sparsity from which each pattern is faster than dense, per setting and shape.

    Columns: setting, shape, pattern, format, break_even (NaN: never, see `find_crossings`). Then certain and
    possible: the same for the lower and the upper ends of the speedups' intervals; nothing is certain without one.
    Then at_lowest: it pays at the lowest measured sparsity, so the true value is that or less. Then best (the highest
    speedup), best_sparsity, sparsities (their number) and judged (every speedup has an interval).
    """
    ordered = speedups.sort_values([*PLACE, "pattern", "sparsity"], kind="stable").reset_index(drop=True)
    first = ~ordered.duplicated([*PLACE, "pattern"])
    starts = np.flatnonzero(first)
    sparsity, gain = (ordered[name].to_numpy(float) for name in ("sparsity", "speedup"))
    lower = ordered["speedup_low"].fillna(NO_GAIN).to_numpy(float)
    upper = ordered["speedup_high"].fillna(ordered["speedup"]).to_numpy(float)
    ends = np.append(starts[1:], len(ordered))[: len(starts)]  # none where there is no row
    best = [start + gain[start:end].argmax() for start, end in zip(starts, ends, strict=True)]
    tidy = ordered.loc[first, [*PLACE, "pattern", "format"]].reset_index(drop=True)
    tidy["break_even"] = find_crossings(sparsity, gain, starts)
    tidy["certain"] = find_crossings(sparsity, lower, starts)
    tidy["possible"] = find_crossings(sparsity, upper, starts)
    tidy["at_lowest"] = (gain[starts] >= 1) & (tidy["break_even"] == sparsity[starts])
    tidy = tidy.assign(best=gain[best], best_sparsity=sparsity[best], sparsities=ends - starts)
    known = ordered["speedup_low"].notna().to_numpy()
    return tidy.assign(judged=[bool(known[start:end].all()) for start, end in zip(starts, ends, strict=True)])


def find_crossings(sparsity: np.ndarray, gain: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Find the sparsity of each curve from which `gain` stays at 1 or above up to the highest measured one, or NaN.

    `sparsity` and `gain` (p,) hold one curve after the other, whose first points are `starts` (c,); in each, sparsity
    rises. Between two points log(gain) is taken as linear. Speedups are not monotone (a kernel may switch), so the
    last crossing counts: below it there may be isolated gains, above it there are no losses.
    """
    if not len(starts):
        return np.array([])
    ends = np.append(starts[1:], len(gain))
    last = np.maximum.reduceat(np.where(gain < 1, np.arange(len(gain)), -1), starts)
    found = np.where(last < starts, sparsity[starts], np.nan)
    inside = np.flatnonzero((last >= starts) & (last < ends - 1))
    lower, upper = last[inside], last[inside] + 1
    below, above = np.log(gain[lower]), np.log(gain[upper])
    found[inside] = sparsity[lower] + (sparsity[upper] - sparsity[lower]) * below / (below - above)
    return found


def build_earliest_starts(speedups: pd.DataFrame) -> pd.DataFrame:
    """Build a frame with the sparsity from which some pattern is faster than dense, per setting and shape.

    At each sparsity the fastest pattern counts, and a pattern only between its own lowest and highest sparsity: a
    time at 50% says nothing about 90%. Columns: setting, shape, pattern (the one that pays first; empty where
    none does), break_even (NaN: never, see `find_crossings`), at_lowest (as in `build_break_evens`).
    """
    found = []
    known = speedups[[*PLACE, "pattern", "sparsity", "speedup"]].sort_values("sparsity", kind="stable")
    for (setting, shape), rows in group_by_place(known).items():
        curves: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            curves.setdefault(row["pattern"], []).append((row["sparsity"], row["speedup"]))
        start, pattern, at_lowest = _first_to_pay({name: np.array(curve) for name, curve in curves.items()})
        found.append((setting, shape, pattern, start, at_lowest))
    return pd.DataFrame(found, columns=[*PLACE, "pattern", "break_even", "at_lowest"])


def _first_to_pay(curves: Mapping[str, np.ndarray]) -> tuple[float, str, bool]:
    """Find the sparsity from which the highest of these curves stays at 1 or above.

    Returns it, the name of the highest curve there, and whether this holds from the first point on. A curve
    (points, 2) has rising sparsities and their gains.
    """
    sparsities = np.unique(np.concatenate([curve[:, 0] for curve in curves.values()]))
    names = list(curves)
    gains = np.array([
        np.interp(sparsities, curve[:, 0], np.log(curve[:, 1]), left=-np.inf, right=-np.inf)
        for curve in curves.values()
    ])  # fmt: skip
    losses = np.flatnonzero(gains.max(axis=0) < 0)
    if not len(losses):
        return float(sparsities[0]), names[int(gains[:, 0].argmax())], True
    below, above = int(losses[-1]), int(losses[-1]) + 1
    if above == len(sparsities):
        return math.nan, "", False
    width = sparsities[above] - sparsities[below]
    starts = [
        (float(sparsities[above] - width * (high / (high - low))), name)  # low is -inf for a curve that starts there
        for name, low, high in zip(names, gains[:, below], gains[:, above], strict=True)
        if high >= 0
    ]
    return *min(starts), False


def select_fastest_patterns(speedups: pd.DataFrame) -> pd.DataFrame:
    """Select the row of `speedups` with the highest speedup for each setting, shape and sparsity."""
    best = speedups.groupby([*PLACE, "sparsity"], sort=False)["speedup"].idxmax()
    return speedups.loc[best].sort_values([*PLACE, "sparsity"]).reset_index(drop=True)


def list_places(speedups: pd.DataFrame) -> list[tuple[str, str]]:
    """List the (setting, shape) pairs, the longest dense time first."""
    dense = speedups.groupby(PLACE)["dense_seconds"].first()
    return list(dense.sort_values(ascending=False, kind="stable").index)


def select_places(frame: pd.DataFrame, places: Sequence[tuple[str, str]]) -> pd.DataFrame:
    """Select the rows of `frame` at these settings and shapes."""
    some = frame[
        frame["shape"].isin({shape for _, shape in places})
    ]  # fast, and leaves few rows for the slower selection
    return some[pd.MultiIndex.from_frame(some[PLACE]).isin(list(places))]


def convert_categories(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame with texts instead of categories."""
    categories = [name for name in frame.columns if isinstance(frame[name].dtype, pd.CategoricalDtype)]
    return frame.astype(dict.fromkeys(categories, object))


def group_by_place(frame: pd.DataFrame) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Group the rows of `frame` without NOT_SHOWN by setting and shape, as dicts: many small frames would be slow."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    rows: list[dict[Any, Any]] = frame.drop(columns=NOT_SHOWN, errors="ignore").to_dict("records")
    for row in rows:
        found.setdefault((row["setting"], row["shape"]), []).append(row)
    return found


def format_place(setting: str, shape: str) -> str:
    """Return a label of a shape and its setting; the setting is empty where all rows share one."""
    return f"{shape} ({setting})" if setting else shape


def select_levels(speedups: pd.DataFrame, wanted: Sequence[float] = (0.5, 0.75, 0.9, 0.95, 0.98)) -> list[float]:
    """Select the sparsities to show side by side: all that most shapes have, or those nearest to `wanted`."""
    common = list_common_sparsities(speedups)
    if len(common) <= len(wanted):
        return sorted(common.tolist())
    return sorted({float(common[np.abs(common - value).argmin()]) for value in wanted})


def list_common_sparsities(speedups: pd.DataFrame) -> np.ndarray:
    """List the sparsities, rising, that at least half as many shapes have as the most frequent one."""
    shapes = speedups.groupby("sparsity")["shape"].nunique()
    return shapes[shapes >= shapes.max() / 2].index.to_numpy(float) if len(shapes) else np.array([])


def build_noise(table: pd.DataFrame) -> pd.DataFrame:
    """Build a frame of the relative widths of 95% intervals by backend and format.

    Columns: backend, format, rows, median, p90, largest (shares of one), noisy (rows that did not converge).
    """
    rows = _with_width(table)
    grouped = rows.groupby(["backend", "format"])
    tidy = grouped["width"].agg(rows="size", median="median", p90=lambda w: w.quantile(0.9), largest="max")
    tidy["noisy"] = grouped["noisy"].sum().astype(int)
    return tidy.reset_index()


def build_noise_curve(table: pd.DataFrame, steps: int = 101) -> pd.DataFrame:
    """Build a frame of the share of rows with an interval of at most a width: columns backend, width, share."""
    shares = np.linspace(0, 1, steps)
    parts = [
        pd.DataFrame({"backend": backend, "width": rows["width"].quantile(shares).to_numpy(), "share": shares})
        for backend, rows in _with_width(table).groupby("backend")
    ]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["backend", "width", "share"])


def count_statuses(table: pd.DataFrame) -> pd.DataFrame:
    """Count layer rows by backend (rows) and status (columns); the column `rows` has the sums."""
    rows = select_layer_rows(table)
    counted = rows.groupby([_text(rows, "backend"), _text(rows, "status")]).size().unstack(fill_value=0)
    counted.columns.name = None
    counted.insert(0, "rows", counted.sum(axis=1))
    return counted.reset_index()


def count_failures(table: pd.DataFrame) -> pd.DataFrame:
    """Count layer rows without a usable time, most frequent first: backend, pattern, status, reason, rows."""
    rows = select_layer_rows(table)
    rows = rows[~rows["status"].isin(TIMED)]
    reason = (
        _text_or_none(rows, "error")
        .fillna(_text_or_none(rows, "flags"))
        .fillna("no reason recorded")
        .rename("reason")
    )
    by = [*(_text(rows, name) for name in ("backend", "pattern", "status")), reason]
    grouped = rows.groupby(by, dropna=False).size()
    tidy = grouped.rename("rows").reset_index()
    return tidy.sort_values(["rows", "backend", "pattern"], ascending=[False, True, True]).reset_index(drop=True)


def count_without_dense(points: pd.DataFrame) -> int:
    """Count the sparse points at a shape without a dense time in the same setting."""
    sparse = points[points["pattern"] != "dense"]
    known = sparse.merge(select_fastest_dense(points)[PLACE], on=PLACE)
    return len(sparse) - len(known)


def select_fastest(points: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Select the fastest of `points` for each value of the columns `by`."""
    return points.loc[points.groupby(by, sort=False)["seconds"].idxmin()].reset_index(drop=True)


def _text(rows: pd.DataFrame, name: str) -> pd.Series:
    """Return a column of texts or categories as plain texts."""
    return rows[name].astype(object)


def _text_or_none(rows: pd.DataFrame, name: str) -> pd.Series:
    """Return a column of texts with None for empty texts."""
    found = _text(rows, name)
    return found.where(found.notna() & (found != ""), None)


def count_contested(speedups: pd.DataFrame) -> tuple[int, int, int]:
    """Count the settings, shapes and sparsities where the intervals of the fastest two patterns overlap.

    Returns that number, the number where one interval is unknown, and the number where there are two patterns.
    """
    by = [*PLACE, "sparsity"]
    ordered = speedups.sort_values([*by, "seconds"])
    first = np.flatnonzero(~ordered.duplicated(by))
    last = np.append(first[1:], len(ordered))[: len(first)] - 1
    first = first[last > first]
    high, low = ordered["high"].to_numpy()[first], ordered["low"].to_numpy()[first + 1]
    unknown = np.isnan(high) | np.isnan(low)
    return int((~unknown & (high >= low)).sum()), int(unknown.sum()), len(first)


def list_pace(table: pd.DataFrame) -> pd.Series:
    """List the slowdown of fixed work beside each timed point; empty where unknown."""
    return select_timed_rows(select_layer_rows(table))["reference_ratio"].dropna().astype(float)


def count_flags(table: pd.DataFrame) -> dict[str, int]:
    """Count the timed points with each flag, most frequent first."""
    said = select_timed_rows(select_layer_rows(table))["flags"].dropna().astype(str)
    flags = said[said != ""].str.split("+").explode()
    return {str(flag): int(count) for flag, count in flags[~flags.str.contains("=")].value_counts().items()}


def _with_width(table: pd.DataFrame) -> pd.DataFrame:
    rows = select_timed_rows(select_layer_rows(table))
    width = (rows["high_seconds"] - rows["low_seconds"]) / rows["median_seconds"]
    return rows.assign(width=width).dropna(subset="width")


def _labels(rows: pd.DataFrame, columns: Sequence[str], label: Label) -> pd.Series:
    """Return `label(row)` of each distinct combination of `columns`, for every row."""
    group = rows.groupby(list(columns), dropna=False, sort=False).ngroup()
    first = rows[~group.duplicated()]
    names = {group.loc[key]: label(row) for key, row in zip(first.index, first.to_dict("records"), strict=True)}
    return group.map(names).astype(object)


def format_shape(row: Mapping[Any, Any]) -> str:
    """Return a layer's shape in words, such as `linear 768 → 3072, n=128`, from the columns in SHAPE.

    Inside a running network the name of the layer follows.
    """
    place = f", {row['model']}" if row.get("context") == "network" and row.get("model") else ""
    if row["op"] == "linear":
        return f"linear {int(row['k'])} → {int(row['m'])}, n={int(row['n'])}{place}"
    kh, kw, h, w = (int(row[name]) for name in ("kh", "kw", "h", "w"))
    text = f"conv {kh}×{kw}, {int(row['c_in'])} → {int(row['c_out'])}, {h}×{w}, batch {int(row['batch'])}"
    usual = {"stride": (1, 1), "padding": (kh // 2, kw // 2), "dilation": (1, 1)}
    for name, expected in usual.items():
        pair = (int(row[f"{name}_h"]), int(row[f"{name}_w"]))
        if pair != expected:
            text += f", {name} {pair[0]}" if pair[0] == pair[1] else f", {name} {pair[0]}×{pair[1]}"
    return text + place


def _value_label(name: str, value: Any) -> str:
    if value is None or value != value:
        return f"{name.replace('_', ' ')} unknown"
    return format_threads(_plainly(value)) if name == "threads" else str(value)


def _plainly(value: Any) -> str:
    """Return a number without a fraction as a whole one: a column with gaps has floats."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _setting_label(apart: Sequence[str]) -> Label:
    """Return a function that formats the values of the columns `apart`."""

    def label(row: Mapping[Any, Any]) -> str:
        return ", ".join(_value_label(name, row[name]) for name in apart)

    return label
