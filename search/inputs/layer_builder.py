"""Build layers with their options and seconds from rows of a latency table: measured, predicted, inside a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from latbench.base.engine_registry import BFLOAT16, FLOAT32, INT8, runs_on_gpu
from latbench.errors import BadData, UsageError
from latbench.tables.schema import KEY_COLUMNS
from latbench.workloads.points import convert_shape_to_columns, format_shape, select_sparsities
from search.inputs.table_rows import (
    EngineRows,
    list_precisions_of_rows,
    select_default_kernels,
    select_network_rows,
    select_shape,
)
from search.knapsack.arrays import Floats
from search.problem.layers import CLOSE, DENSE, LayerOptions, Option
from sparse_kernels.patterns import parse
from sparse_kernels.shapes import Shape

_SIZES = [field.name for field in KEY_COLUMNS]
_SIZES = _SIZES[_SIZES.index("m") : _SIZES.index("pattern")]


SWEPT_BY = {FLOAT32: "", BFLOAT16: " --bf16", INT8: " --int8"}
"""The option of a sweep that times layers in a precision."""


class CostModel(Protocol):
    """A cost model. X is a frame with the table's columns; the answers are seconds."""

    def predict(self, X: pd.DataFrame) -> Floats:
        """Return the seconds of every row."""

    def predict_interval(self, X: pd.DataFrame, coverage: float) -> tuple[Floats, Floats]:
        """Return seconds (low, high) that contain a measurement with probability `coverage`."""

    def covers(self, X: pd.DataFrame) -> NDArray[np.bool_]:
        """Return whether the model predicts each row without extrapolation."""


def build_measured_layers(rows: pd.DataFrame, shapes: Mapping[str, Shape]) -> tuple[LayerOptions, ...]:
    """Return each layer with every option that the rows hold for its shape. Errors are NaN.

    Parameters
    ----------
    rows
        Timed rows of one engine with one number of threads.
    shapes
        Layer name -> shape.

    Raises
    ------
    BadData
        The rows hold nothing of a shape.
    """

    def build(name: str, shape: Shape) -> LayerOptions:
        own = select_shape(rows, shape)
        if own.empty:
            raise BadData(
                f"the table holds no time of layer {name} ({format_shape(shape)}): sweep its shape, or give "
                "a cost model"
            )
        seconds = own["median_seconds"].to_numpy(float)
        low, high = (own[column].to_numpy(float) for column in ("low_seconds", "high_seconds"))
        return _build_layer(own, seconds, np.fmin(low, seconds), np.fmax(high, seconds), shape)

    return _build_once(shapes, build)


def build_predicted_layers(
    model: CostModel,
    engine: EngineRows,
    shapes: Mapping[str, Shape],
    *,
    sparsities: Sequence[float] | None = None,
    coverage: float = 0.9,
) -> tuple[LayerOptions, ...]:
    """Return each layer with every pattern and sparsity that the rows hold for its shape, dense first.

    The cost model predicts the seconds. Errors are NaN.

    Parameters
    ----------
    model
        The cost model.
    engine
        Rows of the engine that runs the layers.
    shapes
        Layer name -> shape.
    sparsities
        Sparsities in place of those in the rows. The model must predict them without extrapolation; others are left
        out. A shape with no rows, or dense rows only, takes patterns and sparsities of other shapes in the same way.
    coverage
        Coverage of the prediction intervals.

    Raises
    ------
    BadData
        A layer has no dense time on this engine, or no layer has a time in one of its precisions.
    """

    def build(name: str, shape: Shape) -> LayerOptions:
        wanted = select_shape(engine.rows, shape)
        if sparsities is not None or set(wanted["pattern"]) <= {DENSE}:
            wanted = _make_covered_rows(model, engine.rows, shape, sparsities)
        if DENSE not in set(wanted["pattern"]):
            raise BadData(
                f"the table holds no valid dense time of layer {name} ({format_shape(shape)}) on {engine.backend} "
                f"with {engine.threads} threads, and the cost model knows none: sweep its workload on this machine "
                f"(latbench trace, then latbench sweep {_name_device(engine)} --workload)"
            )
        low, high = model.predict_interval(wanted, coverage)
        return _build_layer(wanted, np.asarray(model.predict(wanted)), low, high, shape)

    found = _build_once(shapes, build)
    check_precisions(found, engine)
    return found


def check_precisions(layers: Sequence[LayerOptions], engine: EngineRows) -> None:
    """Raise BadData if no layer has an option in one of the engine's precisions."""
    known = {option.precision for layer in layers for option in layer.options}
    for precision in engine.precisions:
        if precision not in known:
            raise BadData(
                f"the table holds no time of these layers in {precision} on {engine.backend} with {engine.threads} "
                f"threads: `latbench sweep {_name_device(engine)}{SWEPT_BY[precision]}` of their workload adds it"
            )


def _name_device(engine: EngineRows) -> str:
    """Return the option of a sweep that names the engine's device."""
    return "--gpu NAME" if runs_on_gpu(engine.backend) else "--cpu"


def build_network_layers(
    table: pd.DataFrame, network: str, shapes: Mapping[str, Shape], *, threads: int, batch: int, coverage: float = 0.9
) -> tuple[LayerOptions, ...]:
    """Return `build_layers_inside` of the rows that `latbench layers` measured on this machine.

    Raises BadData for a layer without a dense time.
    """
    rows = select_network_rows(table, network, shapes, threads=threads, batch=batch)
    dense = set(rows.loc[rows["pattern"] == DENSE, "model"])
    for name in shapes:
        if f"{network}:{name}" not in dense:
            raise BadData(
                f"the table holds no dense time of layer {name} inside {network} on deepsparse with {threads} "
                f"threads and batch {batch}: `latbench layers` measures it, with --remeasure if it timed the "
                "other layers; a layer that DeepSparse never runs by itself must be one that the task excludes"
            )
    return build_layers_inside(rows, network, shapes, coverage)


def build_layers_inside(
    rows: pd.DataFrame, network: str, shapes: Mapping[str, Shape | None], coverage: float
) -> tuple[LayerOptions, ...]:
    """Return each layer with every sparsity that the rows hold for it inside the network, dense first.

    Seconds are measured, not predicted: they depend on the layer's position in the network. Errors are NaN.

    Parameters
    ----------
    rows
        Timed rows of layers inside networks.
    network
        The network's name.
    shapes
        Layer name -> shape; None counts rows of any shape.
    coverage
        Probability that an interval contains one more run. Its width comes from the distance of each run of any layer
        to the median of its other runs. Without repeated runs it is zero.

    Raises
    ------
    BadData
        A layer has no rows.
    """
    rows_of = {}
    for name, shape in shapes.items():
        own = rows[rows["model"] == f"{network}:{name}"]
        rows_of[name] = select_default_kernels(own) if shape is None else select_shape(own, shape)
        if rows_of[name].empty:
            raise BadData(f"the table holds no time of layer {name} inside {network}, of that shape")
    repeats = [
        samples[i] / np.median(np.delete(samples, i))
        for own in rows_of.values()
        for samples in own.loc[(own["purpose"] == "sweep") & (own["sample_count"] > 1), "samples_seconds"]
        for i in range(len(samples))
    ]
    low, high = np.quantile(repeats, [(1 - coverage) / 2, (1 + coverage) / 2]) if repeats else (1.0, 1.0)
    found = []
    for name, own in rows_of.items():
        seconds = own["median_seconds"].to_numpy(float)
        layer = _build_layer(own, seconds, seconds * min(low, 1.0), seconds * max(high, 1.0), shapes[name])
        found.append(replace(layer, name=name))
    return tuple(found)


def check_one_shape(rows: pd.DataFrame) -> None:
    """Raise UsageError where a layer inside a network has rows of several shapes."""
    several = rows.groupby("model", sort=False)[_SIZES].nunique(dropna=False).gt(1).any(axis=1)
    if several.any():
        raise UsageError(
            f"layer {several.idxmax()} has times of several shapes: give the shapes of the network's layers too, a "
            "workload (--workload beside --network)"
        )


def select_options(
    layer: LayerOptions, patterns: Sequence[str] | None, sparsities: Sequence[float] | None
) -> LayerOptions:
    """Return the layer with its dense option and the options with these patterns and sparsities; None keeps all."""

    def is_wanted(it: Option) -> bool:
        near = sparsities is None or min(abs(it.sparsity - sparsity) for sparsity in sparsities) <= CLOSE
        return it.pattern == DENSE or (near and (patterns is None or it.pattern in patterns))

    return layer.take([j for j, it in enumerate(layer.options) if is_wanted(it)])


def _build_once(shapes: Mapping[str, Shape], build: Callable[[str, Shape], LayerOptions]) -> tuple[LayerOptions, ...]:
    """Return a layer for each name; layers of one shape are built once."""
    known: dict[Shape, LayerOptions] = {}
    for name, shape in shapes.items():
        if shape not in known:
            known[shape] = build(name, shape)
    return tuple(replace(known[shape], name=name) for name, shape in shapes.items())


def _make_covered_rows(
    model: CostModel, rows: pd.DataFrame, shape: Shape, sparsities: Sequence[float] | None
) -> pd.DataFrame:
    """Return rows of a shape: the dense one if it was measured, and the options that the model covers.

    The options have these sparsities (None: those of other shapes). They are copies of measured rows of the same
    pattern, of this shape where it was measured dense and sparse.
    """
    own = select_shape(rows, shape)
    others = own if {DENSE} < set(own["pattern"]) else select_default_kernels(rows[rows["op"] == shape.op])
    made = []
    for (spec, _), measured in others.groupby(["pattern", "dtype_a"], sort=True):
        pattern = parse(str(spec))
        if pattern.refuses(shape) is not None:
            continue
        levels = (
            measured["sparsity_target"].unique() if sparsities is None else select_sparsities(pattern, sparsities)
        )
        made += [
            measured.head(1).assign(sparsity_target=float(level), **convert_shape_to_columns(shape))
            for level in levels
        ]
    dense = own[own["pattern"] == DENSE]
    if not made:
        return dense
    wanted = pd.concat(made, ignore_index=True)
    return select_default_kernels(pd.concat([dense, wanted[model.covers(wanted)]]))


def _build_layer(rows: pd.DataFrame, seconds: Floats, low: Floats, high: Floats, shape: Shape | None) -> LayerOptions:
    """Return a layer without a name whose options are in these rows."""
    options = tuple(
        Option(str(pattern), float(sparsity), precision)
        for pattern, sparsity, precision in zip(
            rows["pattern"], rows["sparsity_target"], list_precisions_of_rows(rows), strict=True
        )
    )
    return LayerOptions("", options, seconds, low, high, np.full(len(options), np.nan), shape=shape)
