"""Select the rows of a latency table that a problem is made from: by engine, precision, shape and network."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from latbench.base.engine_registry import (
    DEEPSPARSE,
    FLOAT16,
    FLOAT32,
    GPU_ENGINES,
    NOT_IN_MODELS,
    NUMBA,
    PRECISIONS,
)
from latbench.errors import UsageError
from latbench.machines.devices import name_cpu
from latbench.tables.schema import KEY_COLUMNS, SCHEMA
from latbench.tables.storage import Place
from latbench.tables.table import select_rows, select_timed
from latbench.workloads.points import convert_shape_to_columns
from search.deployment import Deployment
from search.problem.layers import DENSE, format_names
from sparse_kernels.shapes import Shape

# The columns that a search needs, and those that distinguish rows of equal shape.
_COLUMNS = [
    *(field.name for field in KEY_COLUMNS), "point_id", "status", "started_at", "median_seconds", "backend_version",
]  # fmt: skip
_KIND = [
    "backend",
    "op",
    "pattern",
    "sparsity_target",
    "kernel_requested",
    "dtype_w",
    "dtype_a",
    "purpose",
    "status",
]


@dataclass(frozen=True)
class EngineRows:
    """Timed rows of one engine with one number of threads, in the precisions that a search may choose."""

    rows: pd.DataFrame
    backend: str
    threads: int
    precisions: tuple[str, ...] = (FLOAT32,)

    def with_patterns(self, patterns: Sequence[str] | None) -> EngineRows:
        """Return the rows of dense layers and of these patterns; None keeps all."""
        if patterns is None:
            return self
        return replace(self, rows=self.rows[self.rows["pattern"].isin([DENSE, *patterns])])


@dataclass(frozen=True)
class NetworkRows:
    """Timed rows of the layers inside one network, on one engine.

    `model_seconds` is the time of the whole dense model, where the table has it.
    """

    rows: pd.DataFrame
    network: str
    backend: str
    model_seconds: float | None


def read_sweep_rows(
    table: str | Place, shapes: Collection[Shape], *, threads: int, backends: Sequence[str], device: str | None = None
) -> pd.DataFrame:
    """Read the rows of these shapes on some engines, and one row of each kind of other shapes.

    For a shape that the table lacks, the other rows show which patterns and sparsities exist. Memory grows with the
    rows that are returned, not with the table. Raises BadData like `latbench.tables.table.read_table`.

    Parameters
    ----------
    table
        A path or URI.
    shapes
        Shapes of layers.
    threads
        Threads of the engines.
    backends
        The engines, as tables name them.
    device
        The GPU; None for a CPU, whichever it is.
    """
    sizes = {
        name: pa.array(sorted({convert_shape_to_columns(shape)[name] for shape in shapes}), pa.int64())
        for name in ("m", "k", "n")
    }
    kinds = _KIND if device is None else [*_KIND, "layout"]  # on a GPU models run one layout of several
    known: set[tuple[object, ...]] = set()

    def wanted(piece: pa.Table) -> pa.Array:
        ours = pc.and_(pc.is_in(piece["backend"], pa.array(backends)), pc.equal(piece["threads"], threads))
        if device is not None:
            ours = pc.and_(ours, pc.equal(piece["device"], device))
        mask = ours
        for name, values in sizes.items():
            mask = pc.and_(mask, pc.is_in(piece[name], values))
        found = pc.fill_null(mask, False).to_numpy().copy()
        numbered = piece.select(kinds).append_column("row", pa.array(np.arange(len(found)))).filter(ours)
        for kind in numbered.group_by(kinds).aggregate([("row", "min")]).to_pylist():
            row = kind.pop("row_min")
            if (values := tuple(kind.values())) not in known:
                known.add(values)
                found[row] = True
        return pa.array(found)

    return select_rows(table, _COLUMNS, wanted)


def read_network_rows(table: str | Place, *, threads: int) -> pd.DataFrame:
    """Read the rows that DeepSparse timed inside networks, with their samples.

    Raises BadData like `latbench.tables.table.read_table`.
    """

    def wanted(piece: pa.Table) -> pa.Array:
        ours = pc.and_(pc.equal(piece["backend"], DEEPSPARSE), pc.equal(piece["context"], "network"))
        return pc.and_(ours, pc.equal(piece["threads"], threads))

    return select_rows(table, SCHEMA.names, wanted)


def select_precisions(rows: pd.DataFrame, precisions: Sequence[str]) -> pd.DataFrame:
    """Return the rows whose weights and activations have one type; of our own CPU kernels in these types.

    Rows of kernels that a searched model does not run are not among them.
    """
    wanted = (rows["backend"] != NUMBA) | rows["dtype_a"].isin(precisions)
    alike = rows["dtype_w"] == rows["dtype_a"]
    return rows[alike & wanted & ~rows["kernel_requested"].isin(NOT_IN_MODELS)]


def list_precisions_of_rows(rows: pd.DataFrame) -> list[str]:
    """Return the precision of each row's option; only our own CPU kernels have several."""
    pairs = zip(rows["backend"], rows["dtype_a"], strict=True)
    return [str(dtype) if backend == NUMBA and dtype in PRECISIONS else FLOAT32 for backend, dtype in pairs]


def select_engine_rows(table: pd.DataFrame, deployment: Deployment) -> EngineRows:
    """Return the timed rows of sweeps on one engine with one number of threads, in its precisions."""
    threads, backend, precisions = deployment.threads, deployment.backend, deployment.precisions
    rows = select_timed(table)
    rows = rows[(rows["purpose"] == "sweep") & (rows["backend"] == backend) & (rows["threads"] == threads)]
    return EngineRows(select_precisions(rows, precisions), backend, threads, precisions)


def select_sweep_rows(rows: pd.DataFrame, *, device: str | None, threads: int | None) -> pd.DataFrame:
    """Return the timed rows of sweeps of single layers, whose weights and activations have one type.

    Of the rows of a GPU's engines these are the ones in float16, where there are any: dense layers in fewer bits are
    no baseline of sparse ones in float16. Raises UsageError where the table has several devices or numbers of
    threads, and none is given.
    """
    rows = rows[(rows["purpose"] == "sweep") & (rows["context"] != "network") & (rows["dtype_w"] == rows["dtype_a"])]
    on_gpu, half = rows["backend"].isin(list(GPU_ENGINES)), rows["dtype_a"] == FLOAT16
    kept = rows[~on_gpu | half] if (on_gpu & half).any() else rows
    return select_values(kept, {"device": device, "threads": threads})


def select_values(rows: pd.DataFrame, wanted: Mapping[str, Any]) -> pd.DataFrame:
    """Return the rows with these values of columns.

    A value of None stands for the only one in the table. Raises UsageError where there are several, and where no row
    has the value.
    """
    for column, value in wanted.items():
        found = sorted(rows[column].dropna().unique())
        if value is None and len(found) > 1:
            values = " and ".join(f"{it:g}" if isinstance(it, float) else str(it) for it in found)
            raise UsageError(f"the table has {column} {values}: choose one, {column}=... (--{column})")
        if value is not None:
            rows = rows[rows[column] == value]
            if rows.empty:
                known = format_names(map(str, found)) or "none"
                raise UsageError(f"the table has no {column} {value}, but {known}")
    return rows


def select_inside_network(rows: pd.DataFrame, wanted: Mapping[str, Any]) -> NetworkRows:
    """Return the timed rows of layers inside a network.

    Parameters
    ----------
    rows
        Timed rows of a table.
    wanted
        Values of network, device, backend, threads and batch; None for the only one in the table.

    Raises
    ------
    UsageError
        The table has no layers inside a network, or several networks, devices, ... to choose from.
    """
    rows = rows[(rows["context"] == "network") & (rows["purpose"] != "verify")]
    if (rows["op"] == "model").all():
        raise UsageError("the table has no layers inside a network: give the shapes of layers, such as a workload")
    # All rows of a run have one batch. The rows of the whole model state it; the shape of a linear layer does not.
    runs = rows[rows["op"] == "model"].dropna(subset=["run_id", "batch"]).drop_duplicates("run_id")
    network_names = rows["model"].astype(str).str.partition(":")[0]
    batches = rows["run_id"].map(runs.set_index("run_id")["batch"])
    marked = rows.assign(network=network_names, batch=batches)
    layers = select_values(marked[marked["op"] != "model"], wanted)
    network, backend = map(str, layers[["network", "backend"]].iloc[0])
    # Take the whole model's time by the clock that timed its layers; baselines have another clock.
    whole = marked[(marked["op"] == "model") & (marked["pattern"] == DENSE) & (marked["purpose"] != "baseline")]
    whole = whole.merge(layers[list(wanted)].drop_duplicates())
    seconds = None if whole.empty else float(whole["median_seconds"].iloc[-1])
    return NetworkRows(rows.loc[layers.index], network, backend, seconds)


def select_network_rows(
    table: pd.DataFrame, network: str, shapes: Mapping[str, Shape], *, threads: int, batch: int
) -> pd.DataFrame:
    """Return the rows that `latbench layers` measured on this machine: of the network, and of these layers in it."""
    rows = select_timed(table)
    rows = rows[(rows["context"] == "network") & (rows["purpose"] != "verify") & (rows["backend"] == DEEPSPARSE)]
    rows = rows[(rows["threads"] == threads) & (rows["device"] == name_cpu())]
    whole = rows[(rows["op"] == "model") & (rows["model"] == network) & (rows["batch"] == batch)]
    layers = [select_shape(rows[rows["model"] == f"{network}:{name}"], shape) for name, shape in shapes.items()]
    return pd.concat([whole, *layers])


def select_shape(rows: pd.DataFrame, shape: Shape) -> pd.DataFrame:
    """Return the rows of a shape, one for each option (`select_default_kernels`)."""
    for column, value in convert_shape_to_columns(shape).items():
        rows = rows[rows[column] == value]
    return select_default_kernels(rows)


def select_default_kernels(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each pattern, sparsity and precision, dense first.

    It is the row of the kernel that a model runs by default; without one, the fastest.
    """
    rows = rows.assign(
        _other=rows["kernel_requested"] != "auto", _sparse=rows["pattern"] != DENSE,
        _precision=list_precisions_of_rows(rows),
    )  # fmt: skip
    rows = rows.sort_values(["_sparse", "sparsity_target", "pattern", "_other", "median_seconds"], kind="stable")
    rows = rows.drop_duplicates(["pattern", "sparsity_target", "_precision"])
    return rows.drop(columns=["_other", "_sparse", "_precision"])
