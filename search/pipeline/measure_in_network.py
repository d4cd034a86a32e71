"""What each layer takes inside the running network, at imposed sparsities: DeepSparse's own analysis as table rows.

Its layers timed alone say little about the network they are part of: what a layer takes depends on what runs before
and after it. So the whole model is run, with every weight treated as if a share of it were zero, and DeepSparse tells
how long each layer took. Such rows have the context `network` and name their layer, because its place counts.
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

from latbench.backends.cpu import deepsparse
from latbench.backends.cpu.deepsparse import Operation
from latbench.backends.cpu.deepsparse_environment import VERSION, Environment
from latbench.errors import EnvironmentUnusable
from latbench.machines.devices import describe_cpu_environment, name_cpu
from latbench.tables.point_ids import hash_key
from latbench.tables.table import read_table, select_timed
from latbench.tables.writer import date_after, find_newest_starts, write_environment, write_part
from latbench.workloads.points import convert_shape_to_columns
from search.artifacts.onnx_export import export, layer_values
from search.inputs.table_rows import read_network_rows, select_network_rows
from search.pipeline.search_job import prunable_layers
from search.progress import Progress
from search.task import Task
from search.whole_model.end_to_end import cpu_lock
from sparse_kernels.shapes import Shape

# SPDY's (Frantar & Alistarh 2022): each level keeps the same share of the one before, from 40% pruned to 99%.
SPDY_LEVELS = tuple(round(1 - 0.6 * (0.01 / 0.6) ** (i / 40), 4) for i in range(41))

END_TO_END_SECONDS = 0.5
ANALYSED_SECONDS = (
    0.5  # at least: the engine tells means, and one disturbance in a few milliseconds makes these useless
)


@dataclass(frozen=True)
class Settings:
    """Threads of the engine; the seed of the order in which sparsities take turns."""

    threads: int
    seed: int = 0


def measure(
    task: Task,
    folder: Path,
    environment: Environment,
    settings: Settings,
    runs: Mapping[float, int],
    *,
    anew: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> list[str]:
    """Time the layers of the task's model dense and at sparsities, so many `runs` each, into the table in `folder`.

    They take turns in a random order; each run is an analysis in a process of its own and gives one sample, a mean of
    calls. Every round begins with the dense model end to end and has a run of it. Samples that the table has already
    are kept beside the new ones, unless it is done `anew`; where it is interrupted, what was run is kept. Returns the
    layers that got no time at some sparsity, because DeepSparse ran them together with others; raises
    EnvironmentUnusable if those are all, or where DeepSparse cannot run the model.
    """
    model, inputs = task.model(), task.example()
    threads, batch = settings.threads, len(inputs[0])
    shapes = prunable_layers(task, model)
    analyses: dict[float, list[list[Operation]]] = {}
    end_to_end: list[float] = []
    calls = 0
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="latbench-onnx-") as temporary:
        path = Path(temporary) / "model.onnx"
        export(model, inputs, path)
        values = layer_values(model, inputs, path)
        arrays = [x.numpy() for x in inputs]
        with cpu_lock(progress):
            try:
                turns = _turns(runs, settings.seed)
                for done, sparsity in enumerate(turns):
                    progress("running the model at imposed sparsities", done, len(turns))
                    if sparsity is None:
                        with deepsparse.load_model(path, arrays, threads=threads, environment=environment) as whole:
                            end_to_end += whole.burst(END_TO_END_SECONDS).samples
                        calls = max(deepsparse.ANALYSED_CALLS, math.ceil(ANALYSED_SECONDS / min(end_to_end)))
                        continue
                    operations = deepsparse.time_operations(
                        path, arrays, threads=threads, environment=environment, sparsity=sparsity or None, calls=calls
                    )
                    analyses.setdefault(sparsity, []).append(operations)
            finally:
                if analyses:
                    found = rows(task.name, shapes, values, analyses, threads=threads, batch=batch, calls=calls)
                    found.append(end_to_end_row(task.name, end_to_end, threads=threads, batch=batch))
                    _write(folder, found, threads, anew)
    timed = {(row["model"], row["sparsity_target"]) for row in found}
    untimed = [name for name in shapes if any((f"{task.name}:{name}", level) not in timed for level in analyses)]
    if len(untimed) == len(shapes):
        raise EnvironmentUnusable(f"DeepSparse runs no layer of task {task.name} by itself: there are no layer times")
    return untimed


def of_task(task: Task, folder: Path, settings: Settings) -> pd.DataFrame:
    """The rows of the table in `folder` that are of the task's model as it is now, with these threads.

    Raises BadData for a folder that is no table.
    """
    inputs = task.example()
    shapes = prunable_layers(task, task.model())
    rows = read_network_rows(folder, threads=settings.threads)
    return select_network_rows(rows, task.name, shapes, threads=settings.threads, batch=len(inputs[0]))


def missing_runs(
    task: Task, folder: Path, settings: Settings, sparsities: Sequence[float], repeats: int
) -> dict[float, int]:
    """{sparsity: runs} that the table in `folder` lacks for `repeats` of each, of the task's model as it is now.

    Raises BadData for a folder that is no table.
    """
    known: dict[float, int] = {}
    if folder.exists() and any(folder.iterdir()):
        table = of_task(task, folder, settings)
        whole = table[(table["op"] == "model") & (table["purpose"] == "sweep")]
        known = dict(zip(whole["sparsity_target"], whole["sample_count"], strict=True))
    return {sparsity: repeats - known.get(sparsity, 0) for sparsity in sparsities if known.get(sparsity, 0) < repeats}


def _turns(runs: Mapping[float, int], seed: int) -> list[float | None]:
    """Sparsities in the order of their runs; each round begins with the model end to end (None) and has dense (0)."""
    order = random.Random(seed)
    turns: list[float | None] = []
    for number in range(max(runs.values())):
        one = [0.0, *(sparsity for sparsity, wanted in runs.items() if wanted > number)]
        order.shuffle(one)
        turns += [None, *one]
    return turns


def rows(
    network: str,
    shapes: Mapping[str, Shape],
    values: Mapping[str, str],
    analyses: Mapping[float, Sequence[Sequence[Operation]]],
    *,
    threads: int,
    batch: int,
    calls: int,
) -> list[dict[str, Any]]:
    """Table rows of analyses by sparsity (0: dense): the whole model's and, of those in `shapes`, each layer's.

    `values` says which layer computes which ONNX value; each analysis took the mean of `calls` calls. A layer has no
    row at a sparsity where an analysis lacks it.
    """
    constant = _constant(threads) | {
        "purpose": "sweep", "timer": "deepsparse", "inner_loops": calls,
    }  # fmt: skip
    found: list[dict[str, Any]] = []
    for sparsity, runs in sorted(analyses.items()):
        level = constant | {"pattern": "unstructured" if sparsity else "dense", "sparsity_target": sparsity}
        totals = [sum(operation.seconds for operation in operations) for operations in runs]
        found.append(level | {"op": "model", "model": network, "batch": batch, "samples_seconds": totals})
        layers = [by_layer(operations, values) for operations in runs]
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


def end_to_end_row(network: str, samples: Sequence[float], *, threads: int, batch: int) -> dict[str, Any]:
    """The row of the dense model called as a whole, as DeepSparse runs it when it is not analysed."""
    return _constant(threads) | {
        "purpose": "baseline", "op": "model", "model": network, "batch": batch, "pattern": "dense",
        "sparsity_target": 0.0, "timer": "perf_counter", "samples_seconds": list(samples),
    }  # fmt: skip


def _constant(threads: int) -> dict[str, Any]:
    return {
        "device": name_cpu(), "backend": "deepsparse", "backend_version": VERSION, "pattern_seed": 0,
        "dtype_w": "float32", "dtype_a": "float32", "dtype_out": "float32", "kernel_requested": "auto",
        "context": "network", "cache_mode": "warm", "launch_mode": "call", "threads": threads, "pinning": "none",
        "status": "ok", "stop_reason": "budget",
    }  # fmt: skip


def by_layer(operations: Iterable[Operation], values: Mapping[str, str]) -> dict[str, Operation]:
    """The operation of each layer; those that DeepSparse ran as one with another layer, or in parts, are left out."""
    found: dict[str, list[Operation]] = {}
    shared = set()
    for operation in operations:
        layers = {values[value] for value in operation.outputs if value in values}
        for layer in layers:
            found.setdefault(layer, []).append(operation)
        if len(layers) > 1:
            shared |= layers
    return {layer: them[0] for layer, them in found.items() if len(them) == 1 and layer not in shared}


def _write(folder: Path, found: Sequence[Mapping[str, Any]], threads: int, anew: bool) -> None:
    """Add `found` to the table, and to their samples those that it has of the same points, unless done `anew`."""
    earlier: dict[str, Any] = {}
    newest: dict[str, datetime] = {}
    if folder.exists() and any(folder.iterdir()):
        table = read_table(folder)
        newest = find_newest_starts(table, {hash_key(row) for row in found})
        if not anew:
            earlier = select_timed(table).set_index("point_id")["samples_seconds"].to_dict()
    found = [{**row, "samples_seconds": [*earlier.get(hash_key(row), ()), *row["samples_seconds"]]} for row in found]
    environment = describe_cpu_environment(threads)
    run = {"run_id": uuid4().hex[:12], "env_id": environment["env_id"], "block": 0}
    write_environment(folder, environment)
    write_part(folder, date_after(newest, ({**row, **run, "seq": i} for i, row in enumerate(found))))
