"""Where a layer's options and their seconds come from: rows of a table, or a cost model that learned from them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from latbench.errors import BadData
from latbench.machines.devices import name_cpu
from latbench.tables.schema import KEY_COLUMNS, SCHEMA
from latbench.tables.storage import Place
from latbench.tables.table import select_rows, select_timed
from latbench.workloads.points import convert_shape_to_columns, format_shape, select_sparsities
from search.backends import OWN, in_table
from search.knapsack.arrays import Floats
from search.problem.layers import DENSE, LayerOptions, Option
from sparse_kernels.patterns import parse
from sparse_kernels.shapes import Shape


class CostModel(Protocol):
    """What is asked of a cost model: X is a frame with the table's columns, the answers are seconds."""

    def predict(self, X: pd.DataFrame) -> Floats:
        """Seconds of every row."""

    def predict_interval(self, X: pd.DataFrame, coverage: float) -> tuple[Floats, Floats]:
        """Seconds (low, high) that hold a measurement with probability `coverage`."""

    def covers(self, X: pd.DataFrame) -> NDArray[np.bool_]:
        """Whether each row is one that the model predicts without extrapolating."""


# What a search needs of a table, and what tells rows apart that are alike but for their shape.
_COLUMNS = [*(field.name for field in KEY_COLUMNS), "point_id", "status", "started_at", "median_seconds"]
_KIND = ["op", "pattern", "sparsity_target", "kernel_requested", "dtype_w", "dtype_a", "purpose", "status"]


def swept_rows(table: str | Place, shapes: Collection[Shape], *, threads: int, backend: str) -> pd.DataFrame:
    """The rows of the table at a path or URI that `predicted_layers` looks at; all else is left unread as it comes.

    These are the rows of such sizes, and one of each kind of all others: for a shape that the table lacks they tell
    which patterns and sparsities there are. Memory grows with them, not with the table. Raises BadData as
    `read_table` does.
    """
    sizes = {
        name: pa.array(sorted({convert_shape_to_columns(shape)[name] for shape in shapes}), pa.int64())
        for name in ("m", "k", "n")
    }
    seen: set[tuple[object, ...]] = set()

    def wanted(piece: pa.Table) -> pa.Array:
        ours = pc.and_(pc.equal(piece["backend"], in_table(backend)), pc.equal(piece["threads"], threads))
        mask = ours
        for name, values in sizes.items():
            mask = pc.and_(mask, pc.is_in(piece[name], values))
        found = pc.fill_null(mask, False).to_numpy().copy()
        numbered = piece.select(_KIND).append_column("row", pa.array(np.arange(len(found)))).filter(ours)
        for one in numbered.group_by(_KIND).aggregate([("row", "min")]).to_pylist():
            row = one.pop("row_min")
            if (kind := tuple(one.values())) not in seen:
                seen.add(kind)
                found[row] = True
        return pa.array(found)

    return select_rows(table, _COLUMNS, wanted)


def in_network(table: str | Place, *, threads: int) -> pd.DataFrame:
    """The rows of the table at a path or URI that `network_rows` looks at, with their samples. Raises BadData."""

    def wanted(piece: pa.Table) -> pa.Array:
        ours = pc.and_(pc.equal(piece["backend"], "deepsparse"), pc.equal(piece["context"], "network"))
        return pc.and_(ours, pc.equal(piece["threads"], threads))

    return select_rows(table, SCHEMA.names, wanted)


def predicted_layers(
    model: CostModel,
    table: pd.DataFrame,
    shapes: Mapping[str, Shape],
    *,
    threads: int,
    backend: str = "numba",
    patterns: Sequence[str] | None = None,
    sparsities: Sequence[float] | None = None,
    coverage: float = 0.9,
) -> tuple[LayerOptions, ...]:
    """Each layer with every pattern and sparsity that the table holds for its shape, dense first; errors are NaN yet.

    With `sparsities`, these instead, as far as the model predicts them without extrapolating; and so for a shape of
    which the table holds nothing, or dense times only, with the patterns and sparsities of others. Rows in another
    precision than the backend's are no options. `patterns` narrows the rest. Raises BadData where a layer has no
    dense time on this backend with so many threads.
    """
    rows = select_timed(table)
    rows = rows[(rows["purpose"] == "sweep") & (rows["backend"] == in_table(backend)) & (rows["threads"] == threads)]
    rows = rows_in_precision(rows, backend)
    if patterns is not None:
        rows = rows[rows["pattern"].isin([DENSE, *patterns])]
    known: dict[Shape, LayerOptions] = {}
    for name, shape in shapes.items():
        if shape not in known:
            wanted = of_shape(rows, shape)
            if sparsities is not None or set(wanted["pattern"]) <= {DENSE}:
                wanted = _covered(model, rows, shape, sparsities)
            if DENSE not in set(wanted["pattern"]):
                raise BadData(
                    f"the table holds no valid dense time of layer {name} ({format_shape(shape)}) on {backend} with "
                    f"{threads} threads, and the cost model knows none: sweep its workload on this machine (latbench "
                    f"trace, then latbench sweep --workload{' --bf16' if backend == 'numba-bf16' else ''})"
                )
            low, high = model.predict_interval(wanted, coverage)
            known[shape] = _layer(name, wanted, np.asarray(model.predict(wanted)), low, high, shape)
    return tuple(replace(known[shape], name=name) for name, shape in shapes.items())


def rows_in_precision(rows: pd.DataFrame, backend: str) -> pd.DataFrame:
    """The rows whose numbers are what a backend of a search multiplies; of others than ours, those of one type."""
    if backend in OWN:
        return rows[rows[["dtype_w", "dtype_a"]].eq(OWN[backend]).all(axis=1)]
    return rows[rows["dtype_w"] == rows["dtype_a"]]


def swept_layers(table: pd.DataFrame, shapes: Mapping[str, Shape]) -> tuple[LayerOptions, ...]:
    """Each layer with every pattern and sparsity that these rows hold for its shape, as measured; errors are NaN yet.

    The rows are of one backend and so many threads. Raises BadData where they hold nothing of a shape.
    """
    known: dict[Shape, LayerOptions] = {}
    for name, shape in shapes.items():
        if shape in known:
            continue
        own = of_shape(table, shape)
        if own.empty:
            raise BadData(
                f"the table holds no time of layer {name} ({format_shape(shape)}): sweep its shape, or give a cost "
                "model"
            )
        seconds = own["median_seconds"].to_numpy(float)
        low, high = (own[column].to_numpy(float) for column in ("low_seconds", "high_seconds"))
        known[shape] = _layer(name, own, seconds, np.fmin(low, seconds), np.fmax(high, seconds), shape)
    return tuple(replace(known[shape], name=name) for name, shape in shapes.items())


def network_rows(
    table: pd.DataFrame, network: str, shapes: Mapping[str, Shape], *, threads: int, batch: int
) -> pd.DataFrame:
    """The rows that `latbench layers` measured of a network on this machine: of the whole, and of these layers."""
    rows = select_timed(table)
    rows = rows[(rows["context"] == "network") & (rows["purpose"] != "verify") & (rows["backend"] == "deepsparse")]
    rows = rows[(rows["threads"] == threads) & (rows["device"] == name_cpu())]
    whole = rows[(rows["op"] == "model") & (rows["model"] == network) & (rows["batch"] == batch)]
    layers = [of_shape(rows[rows["model"] == f"{network}:{name}"], shape) for name, shape in shapes.items()]
    return pd.concat([whole, *layers])


def measured_layers(
    table: pd.DataFrame, network: str, shapes: Mapping[str, Shape], *, threads: int, batch: int, coverage: float = 0.9
) -> tuple[LayerOptions, ...]:
    """`layers_inside` of what `latbench layers` measured on this machine. Raises BadData without a dense time."""
    rows = network_rows(table, network, shapes, threads=threads, batch=batch)
    dense = set(rows.loc[rows["pattern"] == DENSE, "model"])
    for name in shapes:
        if f"{network}:{name}" not in dense:
            raise BadData(
                f"the table holds no dense time of layer {name} inside {network} on deepsparse with {threads} "
                f"threads and batch {batch}: `latbench layers` measures it, with --remeasure if it timed the "
                "other layers; a layer that DeepSparse never runs by itself must be one that the task excludes"
            )
    return layers_inside(rows, network, shapes, coverage)


def layers_inside(
    rows: pd.DataFrame, network: str, shapes: Mapping[str, Shape | None], coverage: float
) -> tuple[LayerOptions, ...]:
    """Each layer with every sparsity that the rows hold for it inside the network, dense first; errors are NaN yet.

    Its seconds are measured, not predicted: a layer's place counts. Without a shape (None) all of its rows count.
    Intervals hold one more run with probability `coverage`, from how far each run of any layer was from the median of
    its others; without width where nothing was run twice. Raises BadData for a layer without rows.
    """
    of_layers = {}
    for name, shape in shapes.items():
        own = rows[rows["model"] == f"{network}:{name}"]
        of_layers[name] = one_each(own) if shape is None else of_shape(own, shape)
        if of_layers[name].empty:
            raise BadData(f"the table holds no time of layer {name} inside {network}, of that shape")
    again = [
        samples[i] / np.median(np.delete(samples, i))
        for own in of_layers.values()
        for samples in own.loc[(own["purpose"] == "sweep") & (own["sample_count"] > 1), "samples_seconds"]
        for i in range(len(samples))
    ]
    low, high = np.quantile(again, [(1 - coverage) / 2, (1 + coverage) / 2]) if again else (1.0, 1.0)
    found = []
    for name, own in of_layers.items():
        seconds = own["median_seconds"].to_numpy(float)
        found.append(_layer(name, own, seconds, seconds * min(low, 1.0), seconds * max(high, 1.0), shapes[name]))
    return tuple(found)


def of_shape(rows: pd.DataFrame, shape: Shape) -> pd.DataFrame:
    """The rows of this shape, as `one_each` takes them."""
    for column, value in convert_shape_to_columns(shape).items():
        rows = rows[rows[column] == value]
    return one_each(rows)


def one_each(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a pattern and sparsity, dense first: the kernel that a model runs by default, else the fastest."""
    rows = rows.assign(_other=rows["kernel_requested"] != "auto", _sparse=rows["pattern"] != DENSE)
    rows = rows.sort_values(["_sparse", "sparsity_target", "pattern", "_other", "median_seconds"], kind="stable")
    return rows.drop_duplicates(["pattern", "sparsity_target"]).drop(columns=["_other", "_sparse"])


def _covered(model: CostModel, rows: pd.DataFrame, shape: Shape, sparsities: Sequence[float] | None) -> pd.DataFrame:
    """Rows of this shape: dense if that was measured, and at these sparsities (None: those of other shapes) what the
    model covers.

    These are made from measured ones of the same pattern, of this shape where it was measured dense and sparse.
    """
    own = of_shape(rows, shape)
    others = own if {DENSE} < set(own["pattern"]) else one_each(rows[rows["op"] == shape.op])
    made = []
    for spec, measured in others.groupby("pattern", sort=True):
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
    return one_each(pd.concat([dense, wanted[model.covers(wanted)]]))


def _layer(
    name: str, rows: pd.DataFrame, seconds: Floats, low: Floats, high: Floats, shape: Shape | None
) -> LayerOptions:
    """The layer whose options are in these rows."""
    options = tuple(
        Option(str(pattern), float(sparsity))
        for pattern, sparsity in zip(rows["pattern"], rows["sparsity_target"], strict=True)
    )
    return LayerOptions(name, options, seconds, low, high, np.full(len(options), np.nan), shape=shape)
