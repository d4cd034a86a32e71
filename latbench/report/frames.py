"""From a table's rows to what a report shows. Every function is pure: a DataFrame in, a tidy DataFrame out.

A table has the latest row of each point with each status; its texts may be categories, and are plain from `points`
on. A point is one timed row, the latest of its key. Its `shape` and `setting` are labels that stand for the layer's
shape columns and for how it was measured (device, threads, dtype, cache mode, ...): two times are compared only
within one setting and one shape. How activations lie is a kernel's choice: the fastest dense one may have another.
Times are in seconds, `low` and `high` bound the 95% interval of the median.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from latbench.base.number_format import format_threads
from latbench.tables.layer_columns import check_layers
from latbench.tables.schema import TIMED
from latbench.tables.table import select_timed

SHAPE = [
    "op", "m", "k", "n", "batch", "c_in", "h", "w", "c_out", "kh", "kw",
    "stride_h", "stride_w", "padding_h", "padding_w", "dilation_h", "dilation_w",
]  # fmt: skip
# Rounded weights are a kernel's choice, which the engine's name tells (numba bf16-weights). Rounded activations are a
# setting of their own, in which dense layers in float32 count, too.
SETTING = [
    "device", "threads", "dtype_a", "dtype_out", "epilogue", "context", "cache_mode", "launch_mode",
]  # fmt: skip
Label = Callable[[Mapping[Any, Any]], str]

LAYERS = ("linear", "conv2d")
NO_GAIN = 1e-9  # what a speedup is at least that nothing bounds
PLACE = ["setting", "shape"]
NOT_SHOWN = [
    "op", "m", "k", "n", "sparsity_actual", "backend", "flop", "bytes", "roofline_seconds", "dense_low", "dense_high",
]  # fmt: skip  # columns that no chart or table of single rows has: leaving them out takes a third off its time


def layer_rows(table: pd.DataFrame) -> pd.DataFrame:
    """The rows that time one layer of known shape, failures included: whole models and verifications are left out."""
    known = table[["m", "k", "n"]].notna().all(axis=1)
    return table[table["op"].isin(LAYERS) & (table["purpose"] != "verify") & known]


def timed_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """The table rows that hold a time, one a point; noisy (bool) is added."""
    return select_timed(rows).assign(noisy=lambda found: found["status"] == "noisy")


def points(table: pd.DataFrame, apart: Sequence[str] | None = None) -> pd.DataFrame:
    """One row a timed point, sorted by setting, shape, pattern, sparsity and kernel.

    Columns: setting, shape, op, m, k, n, pattern, format, sparsity (target), sparsity_actual, backend, engine,
    kernel, seconds, low, high (NaN where too few samples bound the median), noisy (bool); flop (of the kept
    weights), bytes (the least that must move) and roofline_seconds, NaN where the table does not tell.
    `apart`: the columns that a setting's label names, by default those of SETTING in which rows differ.
    Raises BadData for rows of what cannot be a layer.
    """
    rows = timed_rows(layer_rows(table))
    check_layers(rows)
    rows = with_rivals(rows)
    tidy = rows[["m", "k", "n", "sparsity_actual", "noisy"]].copy()
    for name, column in (("flop", "flop_nnz"), ("bytes", "bytes_min"), ("roofline_seconds", "roofline_seconds")):
        tidy[name] = rows[column].astype(float)
    for name in ("op", "pattern", "format", "backend"):
        tidy[name] = _text(rows, name)
    tidy["sparsity"] = rows["sparsity_target"].fillna(rows["sparsity_actual"]).fillna(0.0).round(6)
    names = zip(rows["backend"], _text(rows, "kernel_requested").fillna(""), strict=True)
    tidy["engine"] = pd.Series([engine_name(*pair) for pair in names], index=rows.index, dtype=object)
    tidy["kernel"] = _said(rows, "kernel_used").fillna(tidy["engine"])
    tidy["seconds"] = rows["median_seconds"]
    tidy["low"], tidy["high"] = rows["low_seconds"].astype(float), rows["high_seconds"].astype(float)
    known = ["op", *(name for name in SHAPE[1:] if rows[name].notna().any())]
    # Inside a running network a layer's place matters, which the column model says.
    known += ["context", "model"] if (rows["context"] == "network").any() else []
    tidy["shape"] = _labels(rows, known, shape_label)
    named = differing(rows) if apart is None else apart
    tidy["setting"] = _labels(rows, named, _setting_label(named)) if named else pd.Series("", rows.index, object)
    order = ["setting", "op", "m", "k", "n", "shape", "pattern", "sparsity", "kernel"]
    return tidy.sort_values(order).reset_index(drop=True)


def with_rivals(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows, with dense layers in float32 once more among those in bfloat16 of the same setting: what may be
    rounded need not be, and a speedup is over the fastest dense layer of either kind.
    """
    same = [name for name in SETTING if name != "dtype_a"]
    settings = rows.loc[rows["dtype_a"] == "bfloat16", same].drop_duplicates()
    dense = rows[(rows["pattern"] == "dense") & (rows["dtype_a"] == "float32")]
    lent = dense.merge(settings, on=same).assign(dtype_a="bfloat16")
    return pd.concat([rows, lent[rows.columns]], ignore_index=True) if len(lent) else rows


def impossible(points: pd.DataFrame) -> pd.Series:
    """Whether each point has a time, an end of an interval or a roofline that is none: (points,) bool."""
    known = points[["seconds", "low", "high", "roofline_seconds"]]
    return ~(known.isna() | ((known > 0) & (known < np.inf))).all(axis=1)


def differing(*tables: pd.DataFrame) -> list[str]:
    """The columns of SETTING in which rows of these tables differ."""
    found = {name: pd.concat([pd.Series(table[name].unique(), dtype=object) for table in tables]) for name in SETTING}
    return [name for name, values in found.items() if values.nunique(dropna=False) > 1]


def engine_name(backend: str, kernel_requested: str) -> str:
    """`torch mkldnn`, or the backend's name alone where the kernel was left to it."""
    return backend if kernel_requested in ("", "auto", backend) else f"{backend} {kernel_requested}"


def settings(table: pd.DataFrame) -> dict[str, str]:
    """How every layer row was measured: column -> its value, or its values joined by commas."""
    rows = layer_rows(table)
    return {
        name: ", ".join(sorted(_plainly(value) for value in rows[name].dropna().unique()))
        for name in [*SETTING, "dtype_w", "layout"]
    }


def fastest_dense(points: pd.DataFrame) -> pd.DataFrame:
    """The fastest dense engine of each setting and shape.

    Columns: setting, shape, dense_engine, dense_seconds, dense_low, dense_high, dense_engines (how many were timed).
    """
    dense = points[points["pattern"] == "dense"]
    names = {"engine": "dense_engine", "seconds": "dense_seconds", "low": "dense_low", "high": "dense_high"}
    found = fastest(dense, PLACE)[[*PLACE, *names]].rename(columns=names)
    engines = dense.groupby(PLACE, sort=False)["engine"].nunique().rename("dense_engines")
    return found.merge(engines.reset_index(), on=PLACE)


def speedup(points: pd.DataFrame) -> pd.DataFrame:
    """The fastest kernel of each setting, shape, pattern and sparsity against the fastest dense engine there.

    Columns: those of `points` and `fastest_dense`, speedup (above 1 is a gain), speedup_low, speedup_high (both
    intervals at their worst and at their best; NaN where one time has none). Points of a shape that has no dense time
    are left out.
    """
    sparse = fastest(points[points["pattern"] != "dense"], [*PLACE, "pattern", "sparsity"])
    joined = sparse.merge(fastest_dense(points), on=PLACE, how="inner")
    joined["speedup"] = joined["dense_seconds"] / joined["seconds"]
    joined["speedup_low"] = joined["dense_low"] / joined["high"]
    joined["speedup_high"] = joined["dense_high"] / joined["low"]
    return joined


def break_even(speedups: pd.DataFrame) -> pd.DataFrame:
    """From which sparsity on each pattern is faster than dense, per setting and shape.

    Columns: setting, shape, pattern, format, break_even (NaN: never, see `crossings`), certain and possible (the
    same of the lower and of the upper ends of the speedups' intervals; without one nothing is certain), at_lowest
    (it pays already at the lowest sparsity measured, so the true value is that or less), best (the highest speedup),
    best_sparsity, sparsities (how many), judged (every speedup has an interval).
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
    tidy["break_even"] = crossings(sparsity, gain, starts)
    tidy["certain"] = crossings(sparsity, lower, starts)
    tidy["possible"] = crossings(sparsity, upper, starts)
    tidy["at_lowest"] = (gain[starts] >= 1) & (tidy["break_even"] == sparsity[starts])
    tidy = tidy.assign(best=gain[best], best_sparsity=sparsity[best], sparsities=ends - starts)
    known = ordered["speedup_low"].notna().to_numpy()
    return tidy.assign(judged=[bool(known[start:end].all()) for start, end in zip(starts, ends, strict=True)])


def crossings(sparsity: np.ndarray, gain: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Of each curve the sparsity from which `gain` stays at 1 or above up to the highest measured; NaN: it does not.

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


def earliest(speedups: pd.DataFrame) -> pd.DataFrame:
    """From which sparsity on some pattern is faster than dense, up to the highest measured of any, per place.

    At each sparsity the fastest pattern counts, and a pattern between its own lowest and highest sparsity alone: one
    that was timed at 50% says nothing of 90%. Columns: setting, shape, pattern (the one that pays first; empty where
    none does), break_even (NaN: never, see `crossings`), at_lowest (as in `break_even`).
    """
    found = []
    known = speedups[[*PLACE, "pattern", "sparsity", "speedup"]].sort_values("sparsity", kind="stable")
    for (setting, shape), rows in by_place(known).items():
        curves: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            curves.setdefault(row["pattern"], []).append((row["sparsity"], row["speedup"]))
        start, pattern, at_lowest = _first_to_pay({name: np.array(curve) for name, curve in curves.items()})
        found.append((setting, shape, pattern, start, at_lowest))
    return pd.DataFrame(found, columns=[*PLACE, "pattern", "break_even", "at_lowest"])


def _first_to_pay(curves: Mapping[str, np.ndarray]) -> tuple[float, str, bool]:
    """The sparsity from which the highest of these curves stays at 1 or above, whose it is there, and whether it is
    so from the first point on. A curve (points, 2) has sparsities, rising, and gains.
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
        (float(sparsities[above] - width * (high / (high - low))), name)  # of one that starts there, low is -inf
        for name, low, high in zip(names, gains[:, below], gains[:, above], strict=True)
        if high >= 0
    ]
    return *min(starts), False


def fastest_pattern(speedups: pd.DataFrame) -> pd.DataFrame:
    """The row of `speedups` with the highest speedup of each setting, shape and sparsity."""
    best = speedups.groupby([*PLACE, "sparsity"], sort=False)["speedup"].idxmax()
    return speedups.loc[best].sort_values([*PLACE, "sparsity"]).reset_index(drop=True)


def places(speedups: pd.DataFrame) -> list[tuple[str, str]]:
    """The (setting, shape) pairs, the one with the longest dense time first."""
    dense = speedups.groupby(PLACE)["dense_seconds"].first()
    return list(dense.sort_values(ascending=False, kind="stable").index)


def at(frame: pd.DataFrame, places: Sequence[tuple[str, str]]) -> pd.DataFrame:
    """The rows of `frame` at these settings and shapes."""
    some = frame[frame["shape"].isin({shape for _, shape in places})]  # cheap, and leaves few to look up by both
    return some[pd.MultiIndex.from_frame(some[PLACE]).isin(list(places))]


def plain(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with texts where it had categories."""
    categories = [name for name in frame.columns if isinstance(frame[name].dtype, pd.CategoricalDtype)]
    return frame.astype(dict.fromkeys(categories, object))


def by_place(frame: pd.DataFrame) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The rows of `frame`, less NOT_SHOWN, as dicts by setting and shape: thousands of small frames would be slow."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    rows: list[dict[Any, Any]] = frame.drop(columns=NOT_SHOWN, errors="ignore").to_dict("records")
    for row in rows:
        found.setdefault((row["setting"], row["shape"]), []).append(row)
    return found


def place_label(setting: str, shape: str) -> str:
    """A shape with its setting, which is empty where all rows share one."""
    return f"{shape} ({setting})" if setting else shape


def levels(speedups: pd.DataFrame, wanted: Sequence[float] = (0.5, 0.75, 0.9, 0.95, 0.98)) -> list[float]:
    """The sparsities to show side by side: of those measured at most shapes, all or else the nearest to `wanted`."""
    common = common_sparsities(speedups)
    if len(common) <= len(wanted):
        return sorted(common.tolist())
    return sorted({float(common[np.abs(common - value).argmin()]) for value in wanted})


def common_sparsities(speedups: pd.DataFrame) -> np.ndarray:
    """The sparsities, rising, that were measured at half as many shapes as the most frequent one, or more."""
    shapes = speedups.groupby("sparsity")["shape"].nunique()
    return shapes[shapes >= shapes.max() / 2].index.to_numpy(float) if len(shapes) else np.array([])


def noise(table: pd.DataFrame) -> pd.DataFrame:
    """How wide the 95% interval of the median is, relative to it, by backend and format.

    Columns: backend, format, rows, median, p90, largest (shares of one), noisy (rows that did not converge).
    """
    rows = _with_width(table)
    grouped = rows.groupby(["backend", "format"])
    tidy = grouped["width"].agg(rows="size", median="median", p90=lambda w: w.quantile(0.9), largest="max")
    tidy["noisy"] = grouped["noisy"].sum().astype(int)
    return tidy.reset_index()


def noise_curve(table: pd.DataFrame, steps: int = 101) -> pd.DataFrame:
    """The share of rows whose relative interval is at most `width`, per backend: columns backend, width, share."""
    shares = np.linspace(0, 1, steps)
    parts = [
        pd.DataFrame({"backend": backend, "width": rows["width"].quantile(shares).to_numpy(), "share": shares})
        for backend, rows in _with_width(table).groupby("backend")
    ]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["backend", "width", "share"])


def statuses(table: pd.DataFrame) -> pd.DataFrame:
    """How many layer rows ended how: one row a backend, one column a status, a column `rows` with the sum."""
    rows = layer_rows(table)
    counted = rows.groupby([_text(rows, "backend"), _text(rows, "status")]).size().unstack(fill_value=0)
    counted.columns.name = None
    counted.insert(0, "rows", counted.sum(axis=1))
    return counted.reset_index()


def failures(table: pd.DataFrame) -> pd.DataFrame:
    """The layer rows with no time to use, by reason, most frequent first: backend, pattern, status, reason, rows."""
    rows = layer_rows(table)
    rows = rows[~rows["status"].isin(TIMED)]
    reason = _said(rows, "error").fillna(_said(rows, "flags")).fillna("no reason recorded").rename("reason")
    by = [*(_text(rows, name) for name in ("backend", "pattern", "status")), reason]
    grouped = rows.groupby(by, dropna=False).size()
    tidy = grouped.rename("rows").reset_index()
    return tidy.sort_values(["rows", "backend", "pattern"], ascending=[False, True, True]).reset_index(drop=True)


def without_dense(points: pd.DataFrame) -> int:
    """How many sparse points stand at a shape where no dense engine was timed in the same setting."""
    sparse = points[points["pattern"] != "dense"]
    known = sparse.merge(fastest_dense(points)[PLACE], on=PLACE)
    return len(sparse) - len(known)


def fastest(points: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """The fastest of `points` for each value of the columns `by`."""
    return points.loc[points.groupby(by, sort=False)["seconds"].idxmin()].reset_index(drop=True)


def _text(rows: pd.DataFrame, name: str) -> pd.Series:
    """A column of texts, or of categories that are texts, as plain texts."""
    return rows[name].astype(object)


def _said(rows: pd.DataFrame, name: str) -> pd.Series:
    """The same, where an empty text is as good as none."""
    found = _text(rows, name)
    return found.where(found.notna() & (found != ""), None)


def contested(speedups: pd.DataFrame) -> tuple[int, int, int]:
    """At how many settings, shapes and sparsities the intervals of the fastest two patterns overlap; at how many
    one of them has none; and at how many there are two.
    """
    by = [*PLACE, "sparsity"]
    ordered = speedups.sort_values([*by, "seconds"])
    first = np.flatnonzero(~ordered.duplicated(by))
    last = np.append(first[1:], len(ordered))[: len(first)] - 1
    first = first[last > first]
    high, low = ordered["high"].to_numpy()[first], ordered["low"].to_numpy()[first + 1]
    unknown = np.isnan(high) | np.isnan(low)
    return int((~unknown & (high >= low)).sum()), int(unknown.sum()), len(first)


def pace(table: pd.DataFrame) -> pd.Series:
    """How much slower than usual the machine was beside each timed point, as fixed work told; empty where unknown."""
    return timed_rows(layer_rows(table))["reference_ratio"].dropna().astype(float)


def flag_counts(table: pd.DataFrame) -> dict[str, int]:
    """How many timed points carry each flag, most frequent first."""
    said = timed_rows(layer_rows(table))["flags"].dropna().astype(str)
    flags = said[said != ""].str.split("+").explode()
    return {str(flag): int(count) for flag, count in flags[~flags.str.contains("=")].value_counts().items()}


def _with_width(table: pd.DataFrame) -> pd.DataFrame:
    rows = timed_rows(layer_rows(table))
    width = (rows["high_seconds"] - rows["low_seconds"]) / rows["median_seconds"]
    return rows.assign(width=width).dropna(subset="width")


def _labels(rows: pd.DataFrame, columns: Sequence[str], label: Label) -> pd.Series:
    """`label(row)` of each distinct combination of `columns`, spread over the rows."""
    group = rows.groupby(list(columns), dropna=False, sort=False).ngroup()
    first = rows[~group.duplicated()]
    names = {group.loc[key]: label(row) for key, row in zip(first.index, first.to_dict("records"), strict=True)}
    return group.map(names).astype(object)


def shape_label(row: Mapping[Any, Any]) -> str:
    """A layer's shape in words: `linear 768 → 3072, n=128`, from the columns in SHAPE; of a layer inside a running
    network, which it is, too.
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
    """A number without a fraction as a whole one: a column that lacks some is of floats."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _setting_label(apart: Sequence[str]) -> Label:
    """A function that gives the values of the columns `apart` in words."""

    def label(row: Mapping[Any, Any]) -> str:
        return ", ".join(_value_label(name, row[name]) for name in apart)

    return label
