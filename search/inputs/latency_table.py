"""Make a problem from a table that latbench measured: layers by their shapes, or by their names inside a network."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict, Unpack

import pandas as pd

from latbench.base.engine_registry import FLOAT32, NUMBA, find_narrowest, list_as_precise
from latbench.errors import BadData, UsageError
from latbench.tables.storage import Place
from latbench.tables.table import read_table, select_timed
from latbench.workloads.workload import Workload, read_workload
from search.inputs.layer_builder import (
    CostModel,
    build_layers_inside,
    build_measured_layers,
    build_predicted_layers,
    check_one_shape,
    check_precisions,
    select_options,
)
from search.inputs.problem_builder import Seconds, build_problem, sum_dense_seconds
from search.inputs.table_rows import (
    EngineRows,
    select_inside_network,
    select_precisions,
    select_sweep_rows,
)
from search.problem.layers import DENSE, Interval, LayerOptions, convert_to_interval
from search.problem.problem import Problem
from sparse_kernels.shapes import Shape

Layers = Mapping[str, Shape] | Workload | str


class TableSelection(TypedDict, total=False):
    """Keywords of `problem_from_table` that select rows and options of a table.

    Attributes
    ----------
    network
        The network whose layers to take, from `latbench layers` or imported.
    device, backend, threads
        The rows to take.
    batch
        The batch to take; for networks only, as shapes contain their own.
    patterns
        Patterns to take besides dense; all by default.
    sparsities
        Sparsities to take; all by default. With a cost model: the sparsities to predict.
    precisions
        Types in which our own CPU kernels may multiply; float32 by default. For shapes only.
    """

    network: str | None
    device: str | None
    backend: str | None
    threads: int | None
    batch: int | None
    patterns: Sequence[str] | None
    sparsities: Sequence[float] | None
    precisions: Sequence[str] | None


class ModelSeconds(TypedDict):
    """Seconds of the whole model that a user states; None to derive them."""

    dense_seconds: Seconds | None
    fixed_seconds: Seconds | None


def problem_from_table(
    table: str | Path | Place | pd.DataFrame,
    layers: Layers | None = None,
    *,
    model: CostModel | None = None,
    coverage: float = 0.9,
    dense_seconds: Seconds | None = None,
    fixed_seconds: Seconds | None = None,
    **selection: Unpack[TableSelection],
) -> Problem:
    """Return the problem of a table that latbench measured. Its errors are NaN.

    With `layers` and no network, layers are known by their shapes: every pattern and sparsity measured of a shape is
    an option. Otherwise they are known by their names inside a network; `layers` then limits them to these shapes.

    Parameters
    ----------
    table
        A path, a URI, or the table's frame.
    layers
        Shapes by layer name, a workload, or its name.
    model
        A fitted cost model, to predict options instead of taking measured ones (`build_predicted_layers`).
    coverage
        Coverage of the prediction intervals.
    dense_seconds
        Seconds of the dense model; by default of the whole model in the table, or the least sum of dense layers.
    fixed_seconds
        Seconds of the converted model besides these layers.
    **selection
        The rows and options to take, needed where the table has several: network, device, backend, threads, batch,
        patterns, sparsities, precisions (see `TableSelection`).

    Raises
    ------
    BadData
        The table is damaged, or lacks a layer or a dense time.
    UsageError
        The keywords do not determine the rows, or do not fit together.

    Examples
    --------
    >>> problem_from_table("table", "bert-base", device="epyc-9r14", backend="numba", threads=2)
    """
    if unknown := selection.keys() - TableSelection.__annotations__.keys():
        raise TypeError(f"problem_from_table() got an unexpected keyword argument {min(unknown)!r}")
    rows = select_timed(table if isinstance(table, pd.DataFrame) else read_table(table)).reset_index(drop=True)
    shapes = None if layers is None else list_shapes(layers)
    stated: ModelSeconds = {"dense_seconds": dense_seconds, "fixed_seconds": fixed_seconds}
    if shapes is None or selection.get("network") is not None:
        if model is not None:
            raise UsageError("a cost model predicts layers by their shapes: give a workload, and no network")
        return _build_from_network(rows, shapes, selection, coverage, stated)
    if selection.get("batch") is not None:
        raise UsageError("a batch (--batch) selects rows of a network; shapes contain their own")
    return _build_from_shapes(rows, shapes, model, coverage, selection, stated)


def list_shapes(layers: Layers) -> dict[str, Shape]:
    """Return shapes by layer name. A workload's layer with a `count` above 1 gives numbered names.

    Raises UsageError if a layer of the workload has several token counts.
    """
    if isinstance(layers, Mapping):
        return dict(layers)
    workload = layers if isinstance(layers, Workload) else read_workload(layers)
    shapes = workload.shapes()
    return {
        layer.name if layer.count == 1 else f"{layer.name}#{i}": shapes[layer.name]
        for layer in workload.layers
        for i in range(1, layer.count + 1)
    }


def _build_from_network(
    rows: pd.DataFrame, shapes: Mapping[str, Shape] | None, selection: TableSelection, coverage: float,
    stated: ModelSeconds,
) -> Problem:  # fmt: skip
    """Return the problem of the layers inside a network; without shapes, of all its layers."""
    wanted = {name: selection.get(name) for name in ("network", "device", "backend", "threads", "batch")}
    inside = select_inside_network(rows, wanted)
    if shapes is None:
        check_one_shape(inside.rows)
    names = inside.rows["model"].astype(str).str.partition(":")[2]
    every: Mapping[str, Shape | None] = shapes or dict.fromkeys(names)
    layers = tuple(
        select_options(layer, selection.get("patterns"), selection.get("sparsities"))
        for layer in build_layers_inside(inside.rows, inside.network, every, coverage)
    )
    dense, fixed = stated["dense_seconds"], stated["fixed_seconds"]
    if dense is not None:
        return build_problem(layers, dense_seconds=dense, fixed_seconds=fixed)
    if inside.model_seconds is not None and fixed is None:
        # Medians of layers may add up to more than the median of their sums.
        fixed = max(0.0, inside.model_seconds - sum_dense_seconds(layers).value)
    return build_problem(layers, dense_seconds=inside.model_seconds, fixed_seconds=fixed, dense_engine=inside.backend)


def _build_from_shapes(
    rows: pd.DataFrame, shapes: Mapping[str, Shape], model: CostModel | None, coverage: float,
    selection: TableSelection, stated: ModelSeconds,
) -> Problem:  # fmt: skip
    """Return the problem of layers with these shapes, as measured or as a cost model predicts."""
    swept = select_sweep_rows(rows, device=selection.get("device"), threads=selection.get("threads"))
    engine = _select_engine(swept, selection.get("backend"), tuple(selection.get("precisions") or (FLOAT32,)))
    patterns, sparsities = selection.get("patterns"), selection.get("sparsities")
    if model is None:
        measured = build_measured_layers(engine.rows, shapes)
        found = tuple(select_options(layer, patterns, sparsities) for layer in measured)
        check_precisions(found, engine)
    else:
        found = build_predicted_layers(
            model, engine.with_patterns(patterns), shapes, sparsities=sparsities, coverage=coverage
        )
    return _build_with_fastest_dense(found, swept, engine, shapes, stated)


def _select_engine(swept: pd.DataFrame, backend: str | None, precisions: tuple[str, ...]) -> EngineRows:
    """Return the rows of an engine; by default of the only one that timed sparse layers."""
    if backend is None:
        found = sorted(swept.loc[swept["pattern"] != DENSE, "backend"].unique())
        if len(found) != 1:
            names = " and ".join(found) or "no backend"
            raise UsageError(f"sparse layers were timed on {names}: choose one, backend=... (--backend)")
        backend = str(found[0])
    rows = select_precisions(swept[swept["backend"] == backend], precisions)
    if rows.empty:
        raise BadData(f"the table holds no swept layer on {backend} in {' or '.join(precisions)}")
    return EngineRows(rows, backend, int(rows["threads"].iloc[0]), precisions)


def _build_with_fastest_dense(
    layers: tuple[LayerOptions, ...], swept: pd.DataFrame, engine: EngineRows, shapes: Mapping[str, Shape],
    stated: ModelSeconds,
) -> Problem:  # fmt: skip
    """Return the problem whose dense model is the stated one, or runs on the fastest engine of the table."""
    if stated["dense_seconds"] is not None:
        return build_problem(layers, **stated)
    # A model on our kernels competes with dense engines that round no further than it may.
    allowed = list_as_precise(find_narrowest(engine.precisions))
    rivals = swept[swept["dtype_a"].isin(allowed)] if engine.backend == NUMBA else swept
    dense, name = _find_fastest_dense(rivals, shapes)
    fixed = convert_to_interval(stated["fixed_seconds"] or 0.0)
    return build_problem(layers, dense_seconds=dense + fixed, fixed_seconds=fixed, dense_engine=name)


def _find_fastest_dense(rows: pd.DataFrame, shapes: Mapping[str, Shape]) -> tuple[Interval, str]:
    """Return the least sum of dense layers on one engine, each with its fastest kernel, and that engine."""
    sums: dict[str, Interval] = {}
    for engine, own in rows[rows["pattern"] == DENSE].groupby("backend"):
        with contextlib.suppress(BadData):  # an engine that lacks a layer does not compete
            alike = own.assign(kernel_requested="auto", dtype_a=FLOAT32)  # so that the fastest of all counts
            sums[str(engine)] = sum_dense_seconds(build_measured_layers(alike, shapes))
    if not sums:
        raise BadData("no engine's dense times of all layers are in the table: give dense_seconds (--dense-seconds)")
    engine = min(sums, key=lambda name: sums[name].value)
    return sums[engine], engine
