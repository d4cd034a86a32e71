"""Time the layers of a model inside the running network, at imposed sparsities, by DeepSparse's own analysis.

The time of a layer alone says little about the network: it depends on what runs before and after the layer. So the
whole model runs, with a share of every weight treated as zero, and DeepSparse reports the time of each layer. The
rows have the context `network` and name their layer, because its position counts.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pandas as pd
from numpy.typing import NDArray

from latbench.backends.cpu import deepsparse
from latbench.backends.cpu.deepsparse import Operation
from latbench.backends.cpu.deepsparse_environment import VERSION, Environment
from latbench.base.engine_registry import DEEPSPARSE
from latbench.errors import EnvironmentUnusable
from latbench.machines.devices import describe_cpu_environment, name_cpu
from latbench.machines.processors import check_threads
from latbench.tables.point_ids import hash_key
from latbench.tables.table import read_table, select_timed
from latbench.tables.writer import date_after, find_newest_starts, write_environment, write_part
from latbench.workloads.points import convert_shape_to_columns
from search.artifacts.onnx_export import export_onnx, find_layer_values
from search.example_inputs import convert_to_tensor_call
from search.inputs.table_rows import read_network_rows, select_network_rows
from search.progress import Progress
from search.task import Task
from search.traced_layers import list_prunable_layers
from search.whole_model.model_engines import convert_to_arrays
from search.whole_model.timed_device import find_cpu
from sparse_kernels.shapes import Shape

SPDY_LEVELS = tuple(round(1 - 0.6 * (0.01 / 0.6) ** (i / 40), 4) for i in range(41))
"""SPDY's sparsities (Frantar & Alistarh 2022), from 40 to 99%: each keeps the same share of the one before."""

END_TO_END_SECONDS = 0.5

MIN_ANALYSIS_SECONDS = 0.5
"""DeepSparse reports means, and one disturbance in a few milliseconds would make them useless."""


@dataclass(frozen=True)
class RunSchedule:
    """How often the model is analysed.

    Attributes
    ----------
    runs
        Sparsity -> number of analyses.
    seed
        Seed of the order in which sparsities take turns.
    """

    runs: Mapping[float, int]
    seed: int = 0

    def turns(self) -> list[float | None]:
        """Return the sparsities in the order of their runs.

        Each round begins with the model end to end (None) and has one dense run (0).
        """
        order = random.Random(self.seed)
        turns: list[float | None] = []
        for number in range(max(self.runs.values())):
            sparsities = [0.0, *(sparsity for sparsity, wanted in self.runs.items() if wanted > number)]
            order.shuffle(sparsities)
            turns += [None, *sparsities]
        return turns


def time_layers_in_network(
    task: Task,
    folder: Path,
    environment: Environment,
    schedule: RunSchedule,
    *,
    threads: int,
    remeasure: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> list[str]:
    """Time the layers of the task's model, dense and at sparsities, into the table in `folder`.

    Each run is an analysis in a process of its own, and gives one sample. An interrupt keeps the finished runs.

    Parameters
    ----------
    task, folder
        The task whose model is timed, and the folder of the table.
    environment
        DeepSparse's Python environment.
    schedule
        The sparsities, and the number of runs of each.
    threads
        Threads of the engine.
    remeasure
        Drop the samples that the table has already.
    progress
        Called with the current step.

    Returns
    -------
    list of str
        Layers without a time at some sparsity, because DeepSparse ran them together with others.

    Raises
    ------
    EnvironmentUnusable
        No layer has a time, or DeepSparse cannot run the model.
    """
    model, example = task.model(), task.example()
    shapes, called = list_prunable_layers(task, model), convert_to_tensor_call(model, example)
    with tempfile.TemporaryDirectory(prefix="latbench-onnx-") as temporary:
        path = Path(temporary) / "model.onnx"
        export_onnx(called.model, called.tensors, path, transposes_once=False)  # DeepSparse prunes stored weights
        found = find_layer_values(called.model, called.tensors, path)
        values = {value: name.removeprefix(called.prefix) for value, name in found.items()}
        network = _Network(path, convert_to_arrays(called.tensors), threads, environment, example.batch)
        with find_cpu().lock(progress):
            try:
                network.run(schedule.turns(), progress)
            finally:
                if rows := network.rows(task.name, shapes, values):
                    _write_rows(folder, rows, threads, remeasure)
    timed = {(row["model"], row["sparsity_target"]) for row in rows}
    untimed = [
        name for name in shapes if not timed.issuperset((f"{task.name}:{name}", it) for it in network.analyses)
    ]
    if len(untimed) == len(shapes):
        raise EnvironmentUnusable(f"DeepSparse runs no layer of task {task.name} by itself: there are no layer times")
    return untimed


class _Network:
    """An exported model on DeepSparse, and the samples taken of it."""

    def __init__(
        self, path: Path, arrays: Sequence[NDArray[Any]], threads: int, environment: Environment, batch: int
    ) -> None:
        check_threads(threads, f"{threads} threads")
        self._path, self._arrays, self._threads, self._environment = path, arrays, threads, environment
        self._batch = batch
        self.analyses: dict[float, list[list[Operation]]] = {}
        self.end_to_end: list[float] = []
        self.calls = 0

    def run(self, turns: Sequence[float | None], progress: Progress) -> None:
        """Run the model at these sparsities; None stands for the dense model end to end."""
        for done, sparsity in enumerate(turns):
            progress("running the model at imposed sparsities", done, len(turns))
            if sparsity is None:
                self._time_end_to_end()
            else:
                self.analyses.setdefault(sparsity, []).append(self._analyse(sparsity))

    def rows(self, name: str, shapes: Mapping[str, Shape], values: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return the samples as table rows; `values` maps ONNX values to the layers that compute them."""
        if not self.analyses:
            return []
        threads, batch = self._threads, self._batch
        rows = build_layer_rows(name, shapes, values, self.analyses, threads=threads, batch=batch, calls=self.calls)
        return [*rows, build_model_row(name, self.end_to_end, threads=threads, batch=batch)]

    def _time_end_to_end(self) -> None:
        """Sample the dense model, and find how many calls an analysis needs."""
        with deepsparse.load_model(
            self._path, self._arrays, threads=self._threads, environment=self._environment
        ) as whole:
            self.end_to_end += whole.burst(END_TO_END_SECONDS).samples
        needed = math.ceil(MIN_ANALYSIS_SECONDS / min(self.end_to_end))
        self.calls = max(deepsparse.ANALYSED_CALLS, needed)

    def _analyse(self, sparsity: float) -> list[Operation]:
        return deepsparse.time_operations(
            self._path, self._arrays, threads=self._threads, environment=self._environment,
            sparsity=sparsity or None, calls=self.calls,
        )  # fmt: skip


def select_task_rows(task: Task, folder: Path, threads: int) -> pd.DataFrame:
    """Return the rows of the table in `folder` that belong to the task's model as it is now, with these threads.

    Raises BadData if the folder is no table.
    """
    shapes = list_prunable_layers(task, task.model())
    rows = read_network_rows(folder, threads=threads)
    return select_network_rows(rows, task.name, shapes, threads=threads, batch=task.example().batch)


def count_missing_runs(
    task: Task, folder: Path, threads: int, sparsities: Sequence[float], repeats: int
) -> dict[float, int]:
    """Return {sparsity: runs} that the table in `folder` lacks for `repeats` runs of each sparsity.

    Only runs of the task's model as it is now count. Raises BadData if the folder is no table.
    """
    known: dict[float, int] = {}
    if folder.exists() and any(folder.iterdir()):
        table = select_task_rows(task, folder, threads)
        whole = table[(table["op"] == "model") & (table["purpose"] == "sweep")]
        known = dict(zip(whole["sparsity_target"], whole["sample_count"], strict=True))
    return {sparsity: repeats - known.get(sparsity, 0) for sparsity in sparsities if known.get(sparsity, 0) < repeats}


def build_layer_rows(
    network: str,
    shapes: Mapping[str, Shape],
    values: Mapping[str, str],
    analyses: Mapping[float, Sequence[Sequence[Operation]]],
    *,
    threads: int,
    batch: int,
    calls: int,
) -> list[dict[str, Any]]:
    """Return table rows of the whole model and of each layer, at each sparsity.

    A layer has no row at a sparsity where an analysis lacks it.

    Parameters
    ----------
    network
        Name of the model.
    shapes
        Layer -> shape.
    values
        ONNX value -> the layer that computes it.
    analyses
        Sparsity (0: dense) -> its analyses.
    threads, batch
        Threads of the engine and size of the batch.
    calls
        Calls whose mean an analysis took.
    """
    constant = _constant_columns(threads) | {"purpose": "sweep", "timer": DEEPSPARSE, "inner_loops": calls}
    found: list[dict[str, Any]] = []
    for sparsity, runs in sorted(analyses.items()):
        level = constant | {"pattern": "unstructured" if sparsity else "dense", "sparsity_target": sparsity}
        totals = [sum(operation.seconds for operation in operations) for operations in runs]
        found.append(level | {"op": "model", "model": network, "batch": batch, "samples_seconds": totals})
        layers = [match_operations(operations, values) for operations in runs]
        for name, shape in shapes.items():
            if not all(name in layer for layer in layers):
                continue
            last = layers[-1][name]
            nnz = round((1 - last.sparsity) * shape.m * shape.k)
            found.append(
                level
                | convert_shape_to_columns(shape)
                | {
                    "model": f"{network}:{name}",
                    "kernel_used": last.kernel,
                    "sparsity_actual": 1 - nnz / (shape.m * shape.k),
                    "nnz": nnz,
                    "flop_dense": 2 * shape.m * shape.k * shape.n,
                    "flop_nnz": 2 * nnz * shape.n,
                    "samples_seconds": [layer[name].seconds for layer in layers],
                }
            )
    return found


def build_model_row(network: str, samples: Sequence[float], *, threads: int, batch: int) -> dict[str, Any]:
    """Return the row of the dense model end to end, as DeepSparse runs it without analysis."""
    return _constant_columns(threads) | {
        "purpose": "baseline", "op": "model", "model": network, "batch": batch, "pattern": "dense",
        "sparsity_target": 0.0, "timer": "perf_counter", "samples_seconds": list(samples),
    }  # fmt: skip


def _constant_columns(threads: int) -> dict[str, Any]:
    return {
        "device": name_cpu(), "backend": DEEPSPARSE, "backend_version": VERSION, "pattern_seed": 0,
        "dtype_w": "float32", "dtype_a": "float32", "dtype_out": "float32", "kernel_requested": "auto",
        "context": "network", "cache_mode": "warm", "launch_mode": "call", "threads": threads, "pinning": "none",
        "status": "ok", "stop_reason": "budget",
    }  # fmt: skip


def match_operations(operations: Iterable[Operation], values: Mapping[str, str]) -> dict[str, Operation]:
    """Return {layer: operation}, without layers that DeepSparse ran together with another layer, or in parts.

    `values` maps ONNX values to the layers that compute them.
    """
    found: dict[str, list[Operation]] = {}
    shared = set()
    for operation in operations:
        layers = {values[value] for value in operation.outputs if value in values}
        for layer in layers:
            found.setdefault(layer, []).append(operation)
        if len(layers) > 1:
            shared |= layers
    return {layer: them[0] for layer, them in found.items() if len(them) == 1 and layer not in shared}


def _write_rows(folder: Path, rows: Sequence[Mapping[str, Any]], threads: int, remeasure: bool) -> None:
    """Add rows to the table. Unless `remeasure`, they keep the samples that the table has of the same points."""
    earlier: dict[str, Any] = {}
    newest: dict[str, datetime] = {}
    if folder.exists() and any(folder.iterdir()):
        table = read_table(folder)
        newest = find_newest_starts(table, {hash_key(row) for row in rows})
        if not remeasure:
            earlier = select_timed(table).set_index("point_id")["samples_seconds"].to_dict()
    rows = [{**row, "samples_seconds": [*earlier.get(hash_key(row), ()), *row["samples_seconds"]]} for row in rows]
    environment = describe_cpu_environment(threads)
    run = {"run_id": uuid4().hex[:12], "env_id": environment["env_id"], "block": 0}
    write_environment(folder, environment)
    write_part(folder, date_after(newest, ({**row, **run, "seq": i} for i, row in enumerate(rows))))
