"""Problems from tables, frames and SPDY's timing files, and as frames again.

A frame has a row an option:

    layer            text
    pattern          text    dense, vector:32, nm:2:4, ...
    sparsity         real    0 where the pattern is dense
    seconds          real
    low_seconds, high_seconds    real, optional: the interval of `seconds`
    error            real, optional: dense options have none, whatever it says
    tied             text, optional: layers with the same text here have one option
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from latbench import tables, workloads
from latbench.errors import BadData, UsageError
from latbench.interchange import SpdyTimings, read_spdy
from latbench.places import Place
from latbench.workloads import Workload
from search.layers import DENSE, DENSE_OPTION, Interval, Layer, Option, listed, option, tie
from search.options import CostModel, of_shape, one_each, predicted_layers
from search.problem import Problem
from sparse_kernels.shapes import Shape

if TYPE_CHECKING:
    from search.selection import Selection, TradeOffs

REQUIRED = ("layer", "pattern", "sparsity", "seconds")

Seconds = float | Interval


def from_frame(
    frame: pd.DataFrame,
    *,
    dense_seconds: Seconds | None = None,
    fixed_seconds: Seconds | None = None,
    dense_engine: str = DENSE,
) -> Problem:
    """The problem of a frame as the module says; layers and options in the frame's order.

    `dense_seconds` are of the whole dense model, `fixed_seconds` what it takes beside these layers. Where one of them
    is missing it follows from the other and the sum of the dense layers; where both are, nothing else takes time.
    Raises BadData, naming the layer, for what is no such frame, and where `fixed_seconds` follow to be negative.
    """
    layers = tuple(_layers(frame))
    if dense_seconds is not None and not 0 < _interval(dense_seconds).low < math.inf:
        raise BadData(f"a dense model takes more than no time, not {_interval(dense_seconds).low:g} s")
    if dense_seconds is None or fixed_seconds is None:
        every = _dense_of(layers)
        if dense_seconds is None:
            dense_seconds = _sum(every, _interval(fixed_seconds or 0.0))
        else:
            fixed = _interval(dense_seconds).value - every.value
            if fixed < 0:
                raise BadData(
                    f"the dense model takes {_interval(dense_seconds).value:.4g} s, its layers on their own "
                    f"{every.value:.4g} s: say what the pruned model takes beside them (fixed seconds)"
                )
            fixed_seconds = Interval(fixed, fixed, fixed)
    return Problem(layers, _interval(fixed_seconds or 0.0), _interval(dense_seconds), dense_engine)


def _layers(frame: pd.DataFrame) -> list[Layer]:
    if missing := [name for name in REQUIRED if name not in frame.columns]:
        raise BadData(f"the frame has no column {', '.join(missing)}: a problem has {', '.join(REQUIRED)}")
    if frame.empty:
        raise BadData("the frame has no row")
    layers: dict[str, Layer] = {}
    groups: dict[str, list[str]] = {}
    for name, own in frame.groupby("layer", sort=False):
        layer = _layer(str(name), own)
        layers[layer.name] = layer
        group = own["tied"].fillna("").iloc[0] if "tied" in own.columns else ""
        groups.setdefault(str(group) or f"\0{name}", []).append(layer.name)
    found = [[layers[name] for name in names] for names in groups.values()]
    return [tie(group) if len(group) > 1 else group[0] for group in found]


def _layer(name: str, own: pd.DataFrame) -> Layer:
    options = tuple(map(_option, [name] * len(own), own["pattern"], own["sparsity"]))
    if twice := {str(it) for it in options if options.count(it) > 1}:
        raise BadData(f"layer {name} has {min(twice)} twice")
    seconds = own["seconds"].to_numpy(np.float64)
    low, high = (
        own[column].to_numpy(np.float64) if column in own.columns else seconds
        for column in ("low_seconds", "high_seconds")
    )
    for it, *values in zip(options, seconds, low, high, strict=True):
        if (
            not all(math.isfinite(value) and value >= 0 for value in values)
            or not values[1] <= values[0] <= values[2]
        ):
            raise BadData(
                f"layer {name} takes {values[0]:g} s ({values[1]:g} to {values[2]:g}) as {it}: seconds must be "
                "finite, at least 0, and within their interval"
            )
    errors = own["error"].to_numpy(np.float64) if "error" in own.columns else np.full(len(own), np.nan)
    return Layer(name, options, seconds, low, high, np.where([it.pattern == DENSE for it in options], 0.0, errors))


def _option(name: str, spec: Any, sparsity: Any) -> Option:
    try:
        return option(str(spec), float(sparsity))
    except ValueError as error:
        raise BadData(f"layer {name}: {error}") from error


def _dense_of(layers: Sequence[Layer]) -> Interval:
    """The sum of the dense layers. Raises UsageError where one has no dense time."""
    places = []
    for layer in layers:
        if DENSE_OPTION not in layer.options:
            raise UsageError(f"layer {layer.name} has no dense time: give dense_seconds and fixed_seconds")
        places.append(layer.options.index(DENSE_OPTION))
    every = [
        Interval(float(layer.seconds[j]), float(layer.low[j]), float(layer.high[j]))
        for layer, j in zip(layers, places, strict=True)
    ]
    return functools.reduce(_sum, every)


def _interval(seconds: Seconds) -> Interval:
    return seconds if isinstance(seconds, Interval) else Interval(float(seconds), float(seconds), float(seconds))


def _sum(a: Interval, b: Interval) -> Interval:
    return Interval(a.value + b.value, a.low + b.low, a.high + b.high)


# SPDY --------------------------------------------------------------------------------------------------------------


def from_spdy(
    path: str | Path,
    *,
    pattern: str = "unstructured",
    dense_seconds: Seconds | None = None,
    fixed_seconds: Seconds | None = None,
) -> Problem:
    """The problem of a SPDY timing file, whose sparse options have this pattern; its errors are SPDY's guess.

    By default the dense model takes the file's `base`, and `base` - `prunable` is fixed. A sparsity that is timed
    twice has the median. Raises BadData as `read_spdy` does.
    """
    timings = read_spdy(Path(path))
    rows = [
        (name, pattern if sparsity else DENSE, sparsity, seconds)
        for name, points in timings.layers.items()
        for seconds, sparsity in points
    ]
    frame = pd.DataFrame(rows, columns=list(REQUIRED))
    frame = frame.groupby(list(REQUIRED[:3]), sort=False, as_index=False)["seconds"].median()
    return from_frame(
        frame,
        dense_seconds=timings.base if dense_seconds is None else dense_seconds,
        fixed_seconds=timings.fixed if fixed_seconds is None else fixed_seconds,
        dense_engine="the dense model",
    ).with_prior()


def spdy_timings_of(problem: Problem) -> SpdyTimings:
    """The seconds of a problem as SPDY has them. Raises UsageError where options differ by their pattern only."""
    layers: dict[str, tuple[tuple[float, float], ...]] = {}
    for part in itertools.chain.from_iterable(layer.parts for layer in problem.layers):
        sparsities = [it.sparsity for it in part.options]
        if len(set(sparsities)) < len(sparsities):
            raise UsageError(f"layer {part.name} has options that differ by their pattern only: SPDY knows none")
        layers[part.name] = tuple(zip(part.seconds.tolist(), sparsities, strict=True))
    return SpdyTimings(problem.dense.value, problem.dense.value - problem.fixed.value, layers)


def read(
    source: str,
    *,
    pattern: str = "unstructured",
    dense_seconds: float | None = None,
    fixed_seconds: float | None = None,
    **of_table: Any,
) -> Problem:
    """The problem of whatever lies there: a CSV or Parquet frame, SPDY's timing file, or a table of latbench.

    `pattern` is about timing files, `of_table` about tables: what else `from_table` takes, None for its defaults.
    Raises UsageError for arguments about tables where there is none; else as what reads it does.
    """
    path = Path(source)
    of_table = {name: value for name, value in of_table.items() if value is not None}
    frame = _frame_in(path)
    if not path.is_file() or (frame is not None and "layer" not in frame.columns and path.suffix != ".csv"):
        return from_table(source, dense_seconds=dense_seconds, fixed_seconds=fixed_seconds, **of_table)
    if of_table:
        given = ", ".join(of_table)
        raise UsageError(f"{path} is no table that latbench measured: it does not go with {given}")
    if frame is None:
        return from_spdy(path, pattern=pattern, dense_seconds=dense_seconds, fixed_seconds=fixed_seconds)
    return from_frame(frame, dense_seconds=dense_seconds, fixed_seconds=fixed_seconds)


def _frame_in(path: Path) -> pd.DataFrame | None:
    """What is in a CSV or Parquet file. Raises BadData where that cannot be read."""
    try:
        if path.is_file() and path.suffix == ".csv":
            return pd.read_csv(path)
        if path.is_file() and path.suffix == ".parquet":
            return pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise BadData(f"{path}: it cannot be read: {error}") from error
    return None


# Tables ------------------------------------------------------------------------------------------------------------


def from_table(
    table: str | Path | Place | pd.DataFrame,
    layers: Mapping[str, Shape] | Workload | str | None = None,
    *,
    network: str | None = None,
    device: str | None = None,
    backend: str | None = None,
    threads: int | None = None,
    model: CostModel | None = None,
    patterns: Sequence[str] | None = None,
    sparsities: Sequence[float] | None = None,
    coverage: float = 0.9,
    dense_seconds: Seconds | None = None,
    fixed_seconds: Seconds | None = None,
) -> Problem:
    """The problem of a table that latbench measured: a path, a URI, or its frame. Errors are NaN yet.

    By shape: `layers` are shapes by name, or a workload or its name; every pattern and sparsity measured of a shape
    is an option, or with a fitted cost model `model` what that covers (see `search.options.predicted_layers`). By
    name: of `network`, the times of its layers inside it (imported, or from `latbench layers`); needless where the
    table has one network. `device`, `backend` and `threads` say which rows, where there are several.

    The dense model takes `dense_seconds`; else what it took as a whole inside the network, or the sum of the dense
    layers on the engine where that is least, and `fixed_seconds`. Raises BadData and UsageError.
    """
    rows = tables.timed(table if isinstance(table, pd.DataFrame) else tables.read(table))
    settings = {"device": device, "threads": threads}
    if layers is None:
        frame, whole = _of_network(
            _narrowed(rows[rows["context"] == "network"], settings), network, backend, patterns
        )
        if dense_seconds is None and fixed_seconds is None:
            dense_seconds = whole
        return from_frame(frame, dense_seconds=dense_seconds, fixed_seconds=fixed_seconds)
    shapes = _shapes(layers)
    rows = _narrowed(rows[(rows["purpose"] == "sweep") & (rows["context"] != "network")], settings)
    own = rows[rows["backend"] == (backend or _sparse_backend(rows))]
    if own.empty:
        raise BadData(f"the table holds no swept layer on {backend}")
    if model is not None:
        found = predicted_layers(
            model, own, shapes, threads=int(own["threads"].iloc[0]), backend=str(own["backend"].iloc[0]),
            patterns=patterns, sparsities=sparsities, coverage=coverage,
        )  # fmt: skip
        frame = pd.concat([_frame_of(layer) for layer in found], ignore_index=True)
    else:
        by_shape = {shape: of_shape(own, shape) for shape in set(shapes.values())}
        by_name = {name: by_shape[shape] for name, shape in shapes.items()}
        if missing := [name for name, options in by_name.items() if options.empty]:
            raise BadData(
                f"the table holds no time of layer {listed(missing)}: sweep its shape, or give a cost model"
            )
        frame = pd.concat([_options(name, options, patterns, sparsities) for name, options in by_name.items()])
    engine = str(own["backend"].iloc[0])
    if dense_seconds is None:
        dense, engine = _fastest_dense(rows, shapes)
        fixed_seconds = _interval(fixed_seconds or 0.0)
        dense_seconds = _sum(dense, fixed_seconds)
    return from_frame(frame, dense_seconds=dense_seconds, fixed_seconds=fixed_seconds, dense_engine=engine)


def _narrowed(rows: pd.DataFrame, wanted: Mapping[str, Any]) -> pd.DataFrame:
    """The rows with these values. Raises UsageError where a value is not given and there are several."""
    for column, value in wanted.items():
        found = sorted(rows[column].dropna().unique())
        if value is None and len(found) > 1:
            raise UsageError(f"the table has {column} {' and '.join(map(str, found))}: say which, {column}=...")
        if value is not None:
            rows = rows[rows[column] == value]
            if rows.empty:
                raise UsageError(f"the table has no {column} {value}, but {listed(map(str, found))}")
    return rows


def _sparse_backend(rows: pd.DataFrame) -> str:
    found = sorted(rows.loc[rows["pattern"] != DENSE, "backend"].unique())
    if len(found) != 1:
        raise UsageError(f"sparse layers were timed on {' and '.join(found) or 'no backend'}: say which, backend=...")
    return str(found[0])


def _of_network(
    rows: pd.DataFrame, network: str | None, backend: str | None, patterns: Sequence[str] | None
) -> tuple[pd.DataFrame, float | None]:
    """The options of a network's layers, timed inside it, and the whole dense model's seconds, if known."""
    rows = _narrowed(rows[rows["purpose"] != "verify"], {"backend": backend})
    of_layers = rows[rows["op"] != "model"]
    networks, names = (of_layers["model"].map(lambda text, i=i: str(text).partition(":")[i]) for i in (0, 2))
    known = sorted(networks.unique())
    if network is None and len(known) != 1:
        raise UsageError(
            f"the table has layers inside {' and '.join(known) or 'no network'}: say which, network=..., or give the "
            "shapes of layers, such as a workload"
        )
    network = network or known[0]
    own = of_layers[networks == network]
    if own.empty:
        raise UsageError(f"the table has no layers inside {network}, but inside {listed(known) or 'no network'}")
    grouped = own.groupby(names.loc[own.index], sort=False)
    frame = pd.concat([_options(str(name), one_each(options), patterns, None) for name, options in grouped])
    # The whole model by the clock that timed its layers; baselines are of another.
    timed = rows["purpose"].isin(("sweep", "import")) & (rows["op"] == "model") & (rows["pattern"] == DENSE)
    whole = rows[timed & (rows["model"] == network)]
    return frame, None if whole.empty else float(whole["median_seconds"].iloc[-1])


def _shapes(layers: Mapping[str, Shape] | Workload | str) -> dict[str, Shape]:
    if isinstance(layers, Mapping):
        return dict(layers)
    workload = layers if isinstance(layers, Workload) else workloads.load(layers)
    return {
        layer.name if layer.count == 1 else f"{layer.name}#{i}": layer.shape
        for layer in workload.layers
        for i in range(1, layer.count + 1)
    }


def _options(
    name: str, rows: pd.DataFrame, patterns: Sequence[str] | None, sparsities: Sequence[float] | None
) -> pd.DataFrame:
    """The frame of one layer from rows of a table, one an option."""
    dense = rows["pattern"] == DENSE
    if patterns is not None:
        rows = rows[dense | rows["pattern"].isin(patterns)]
    if sparsities is not None:
        near = np.isclose(rows["sparsity_target"].to_numpy()[:, None], np.asarray(sparsities), atol=1e-6).any(axis=1)
        rows = rows[dense.loc[rows.index] | near]
    seconds = rows["median_seconds"]
    return pd.DataFrame({
        "layer": name, "pattern": rows["pattern"], "sparsity": rows["sparsity_target"], "seconds": seconds,
        "low_seconds": np.fmin(rows["low_seconds"].fillna(seconds), seconds),
        "high_seconds": np.fmax(rows["high_seconds"].fillna(seconds), seconds),
    })  # fmt: skip


def _fastest_dense(rows: pd.DataFrame, shapes: Mapping[str, Shape]) -> tuple[Interval, str]:
    """The sum of the dense layers on the engine where it is least, each with that engine's fastest kernel."""
    sums: dict[str, Interval] = {}
    for engine, own in rows[rows["pattern"] == DENSE].groupby("backend"):
        fastest = {shape: of_shape(own.assign(kernel_requested="auto"), shape) for shape in set(shapes.values())}
        if not any(found.empty for found in fastest.values()):
            times = {
                shape: Interval(*_options("", found, None, None).iloc[0, 3:]) for shape, found in fastest.items()
            }
            sums[str(engine)] = functools.reduce(_sum, (times[shape] for shape in shapes.values()))
    if not sums:
        raise BadData("no engine's dense times of all layers are in the table: give dense_seconds")
    engine = min(sums, key=lambda name: sums[name].value)
    return sums[engine], engine


# Out ---------------------------------------------------------------------------------------------------------------


def of_problem(problem: Problem) -> pd.DataFrame:
    """`Problem.to_frame`."""
    frames = [
        _frame_of(part).assign(tied=layer.name if layer.tied else "")
        for layer in problem.layers
        for part in layer.parts
    ]
    return pd.concat(frames, ignore_index=True)


def of_selection(selection: Selection) -> pd.DataFrame:
    """`Selection.to_frame`."""
    chosen = zip(selection.problem.layers, selection.choice, strict=True)
    frames = [_frame_of(part.take([j])) for layer, j in chosen for part in layer.parts]
    return pd.concat(frames, ignore_index=True)


def of_trade_offs(trade_offs: TradeOffs) -> pd.DataFrame:
    """`TradeOffs.to_frame`."""
    return pd.DataFrame({
        "seconds": trade_offs.seconds, "speedup": trade_offs.speedups, "error": trade_offs.errors,
    })  # fmt: skip


def _frame_of(layer: Layer) -> pd.DataFrame:
    return pd.DataFrame({
        "layer": layer.name,
        "pattern": [it.pattern for it in layer.options],
        "sparsity": [it.sparsity for it in layer.options],
        "seconds": layer.seconds, "low_seconds": layer.low, "high_seconds": layer.high, "error": layer.errors,
    })  # fmt: skip
