"""The problem of a table that latbench measured: layers by their shapes, or by their names inside a network."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from latbench.errors import BadData, UsageError
from latbench.tables.schema import KEY_COLUMNS
from latbench.tables.storage import Place
from latbench.tables.table import read_table, select_timed
from latbench.workloads.workload import Workload, read_workload
from search.backends import in_table
from search.inputs.layer_options import CostModel, layers_inside, predicted_layers, rows_in_precision, swept_layers
from search.inputs.problem_builder import Seconds, build_problem, sum_dense_seconds
from search.problem.layers import CLOSE, DENSE, Interval, LayerOptions, Option, convert_to_interval, format_names
from search.problem.problem import Problem
from sparse_kernels.shapes import Shape

Layers = Mapping[str, Shape] | Workload | str

_SIZES = [field.name for field in KEY_COLUMNS]
_SIZES = _SIZES[_SIZES.index("m") : _SIZES.index("pattern")]


def problem_from_table(
    table: str | Path | Place | pd.DataFrame,
    layers: Layers | None = None,
    *,
    network: str | None = None,
    device: str | None = None,
    backend: str | None = None,
    threads: int | None = None,
    batch: int | None = None,
    model: CostModel | None = None,
    patterns: Sequence[str] | None = None,
    sparsities: Sequence[float] | None = None,
    coverage: float = 0.9,
    dense_seconds: Seconds | None = None,
    fixed_seconds: Seconds | None = None,
) -> Problem:
    """The problem of a table that latbench measured: a path, a URI, or its frame. Errors are NaN yet.

    By shape: `layers` are shapes by name, or a workload or its name; every pattern and sparsity measured of a shape
    is an option, or with a fitted cost model `model` what that covers (see
    `search.inputs.layer_options.predicted_layers`). By name, without `layers` or with a `network`: the times of
    layers inside it (imported, or from `latbench layers`), and of these shapes only, if `layers` are given. `device`,
    `backend`, `threads` and `batch` say which rows, where there are several.

    The dense model takes `dense_seconds`; else what it took as a whole inside the network, or the sum of the dense
    layers on the engine where that is least, and `fixed_seconds`. Raises BadData and UsageError.
    """
    rows = select_timed(table if isinstance(table, pd.DataFrame) else read_table(table)).reset_index(drop=True)
    shapes = None if layers is None else shapes_of(layers)
    if shapes is None or network is not None:
        if model is not None:
            raise UsageError("a cost model predicts layers by their shapes: give a workload, and no network")
        settings = {"network": network, "device": device, "backend": backend, "threads": threads, "batch": batch}
        found, whole, engine = _inside(rows, shapes, settings, coverage)
        if dense_seconds is not None:
            engine = DENSE
        elif whole is not None:
            dense_seconds = whole
            if fixed_seconds is None:
                # Medians of layers may add up to more than the median of their sums.
                fixed_seconds = max(0.0, whole - sum_dense_seconds(found).value)
    else:
        if batch is not None:
            raise UsageError("a batch (--batch) says which rows of a network: shapes have theirs")
        rows = rows[(rows["purpose"] == "sweep") & (rows["context"] != "network")]
        rows = narrowed(rows[rows["dtype_w"] == rows["dtype_a"]], {"device": device, "threads": threads})
        engine = backend or _sparse_backend(rows)
        own = rows_in_precision(rows[rows["backend"] == in_table(engine)], engine)
        if own.empty:
            raise BadData(f"the table holds no swept layer on {engine}")
        if model is None:
            found = swept_layers(own, shapes)
        else:
            found = predicted_layers(
                model, own, shapes, threads=int(own["threads"].iloc[0]), backend=engine, patterns=patterns,
                sparsities=sparsities, coverage=coverage,
            )  # fmt: skip
        if dense_seconds is not None:
            engine = DENSE
        else:
            # What may be multiplied in bfloat16 has rivals of either kind, what may not has those in float32.
            rivals = rows if engine == "numba-bf16" else rows_in_precision(rows, engine)
            dense, engine = _fastest_dense(rivals, shapes)
            fixed_seconds = convert_to_interval(fixed_seconds or 0.0)
            dense_seconds = dense + fixed_seconds
    if model is None:
        found = tuple(_only(layer, patterns, sparsities) for layer in found)
    return build_problem(found, dense_seconds=dense_seconds, fixed_seconds=fixed_seconds, dense_engine=engine)


def shapes_of(layers: Layers) -> dict[str, Shape]:
    """Shapes by name; of a workload, or of one by its name, each of a layer's `count` with a number."""
    if isinstance(layers, Mapping):
        return dict(layers)
    workload = layers if isinstance(layers, Workload) else read_workload(layers)
    return {
        layer.name if layer.count == 1 else f"{layer.name}#{i}": layer.shape
        for layer in workload.layers
        for i in range(1, layer.count + 1)
    }


def narrowed(rows: pd.DataFrame, wanted: Mapping[str, Any]) -> pd.DataFrame:
    """The rows with these values. Raises UsageError where a value is not given and there are several."""
    for column, value in wanted.items():
        found = sorted(rows[column].dropna().unique())
        if value is None and len(found) > 1:
            every = " and ".join(f"{one:g}" if isinstance(one, float) else str(one) for one in found)
            raise UsageError(f"the table has {column} {every}: say which, {column}=... (--{column})")
        if value is not None:
            rows = rows[rows[column] == value]
            if rows.empty:
                raise UsageError(f"the table has no {column} {value}, but {format_names(map(str, found)) or 'none'}")
    return rows


def _inside(
    rows: pd.DataFrame, shapes: Mapping[str, Shape] | None, settings: Mapping[str, Any], coverage: float
) -> tuple[tuple[LayerOptions, ...], float | None, str]:
    """The layers of a network, the whole dense model's seconds if they are known, and the backend of both."""
    rows = rows[(rows["context"] == "network") & (rows["purpose"] != "verify")]
    if (rows["op"] == "model").all():
        raise UsageError("the table has no layers inside a network: give the shapes of layers, such as a workload")
    # A run is of one batch, and its rows of the whole model say which: the shape of a linear layer does not.
    runs = rows[rows["op"] == "model"].dropna(subset=["run_id", "batch"]).drop_duplicates("run_id")
    names = rows["model"].astype(str).str.partition(":")
    marked = rows.assign(network=names[0], batch=rows["run_id"].map(runs.set_index("run_id")["batch"]))
    of_layers = narrowed(marked[marked["op"] != "model"], settings)
    network, backend = map(str, of_layers[["network", "backend"]].iloc[0])
    own = rows.loc[of_layers.index]
    wanted: Mapping[str, Shape | None] = shapes or dict.fromkeys(names[2][own.index])
    several = own.groupby("model", sort=False)[_SIZES].nunique(dropna=False).gt(1).any(axis=1)
    if shapes is None and several.any():
        raise UsageError(
            f"layer {several.idxmax()} has times of several shapes: give the shapes of the network's layers too, a "
            "workload (--workload beside --network)"
        )
    # The whole model by the clock that timed its layers; baselines are of another.
    whole = marked[(marked["op"] == "model") & (marked["pattern"] == DENSE) & (marked["purpose"] != "baseline")]
    whole = whole.merge(of_layers[list(settings)].drop_duplicates())
    seconds = None if whole.empty else float(whole["median_seconds"].iloc[-1])
    return layers_inside(own, network, wanted, coverage), seconds, backend


def _sparse_backend(rows: pd.DataFrame) -> str:
    found = sorted(rows.loc[rows["pattern"] != DENSE, "backend"].unique())
    if len(found) != 1:
        every = " and ".join(found) or "no backend"
        raise UsageError(f"sparse layers were timed on {every}: say which, backend=... (--backend)")
    return str(found[0])


def _fastest_dense(rows: pd.DataFrame, shapes: Mapping[str, Shape]) -> tuple[Interval, str]:
    """The sum of the dense layers on the engine where it is least, each with that engine's fastest kernel."""
    sums: dict[str, Interval] = {}
    for engine, own in rows[rows["pattern"] == DENSE].groupby("backend"):
        with contextlib.suppress(BadData):  # an engine that lacks a layer is no rival
            sums[str(engine)] = sum_dense_seconds(swept_layers(own.assign(kernel_requested="auto"), shapes))
    if not sums:
        raise BadData("no engine's dense times of all layers are in the table: give dense_seconds (--dense-seconds)")
    engine = min(sums, key=lambda name: sums[name].value)
    return sums[engine], engine


def _only(layer: LayerOptions, patterns: Sequence[str] | None, sparsities: Sequence[float] | None) -> LayerOptions:
    """The layer with dense and what has these patterns and sparsities."""

    def wanted(it: Option) -> bool:
        near = sparsities is None or min(abs(it.sparsity - one) for one in sparsities) <= CLOSE
        return it.pattern == DENSE or (near and (patterns is None or it.pattern in patterns))

    return layer.take([j for j, it in enumerate(layer.options) if wanted(it)])
