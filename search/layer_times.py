"""What each layer takes inside the running network, at imposed sparsities: DeepSparse's own analysis as table rows.

Its layers timed alone say little about the network they are part of: what a layer takes depends on what runs before
and after it. So the whole model is run, with every weight treated as if a share of it were zero, and DeepSparse tells
how long each layer took. Such rows have the context `network` and name their layer, because its place counts.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from latbench import devices, tables
from latbench.backends import deepsparse
from latbench.backends.deepsparse import Operation
from latbench.backends.deepsparse_environment import VERSION, Environment
from latbench.errors import EnvironmentUnusable
from latbench.plan import shape_columns
from latbench.runners.local import device_lock
from search.end_to_end import Progress
from search.job import prunable_layers
from search.onnx_export import export, layer_values
from search.task import Task
from sparse_kernels.shapes import Shape

# SPDY's (Frantar & Alistarh 2022): each level keeps the same share of the one before, from 40% pruned to 99%.
SPDY_LEVELS = tuple(round(1 - 0.6 * (0.01 / 0.6) ** (i / 40), 4) for i in range(41))


@dataclass(frozen=True)
class Settings:
    """Threads of the engine; how often each sparsity is run; the seed of the order in which they take turns."""

    threads: int
    repeats: int = 3
    seed: int = 0


def measure(
    task: Task,
    folder: Path,
    environment: Environment,
    settings: Settings,
    sparsities: Sequence[float],
    *,
    progress: Progress = lambda what, done, total: None,
) -> list[str]:
    """Time the layers of the task's model dense and at `sparsities`, and add rows to the table in `folder`.

    All sparsities take turns, `settings.repeats` times in a random order; each analysis is a process of its own and
    gives one sample, a mean of calls. Where it is interrupted, whole rounds are kept. Returns the layers that got no
    time at some sparsity, because DeepSparse ran them together with others; raises EnvironmentUnusable if those are
    all, or where DeepSparse cannot run the model.
    """
    model, inputs = task.model(), task.example()
    shapes = prunable_layers(task, model)
    levels = [0.0, *sparsities]
    rounds: list[dict[float, list[Operation]]] = []
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="latbench-onnx-") as temporary:
        path = Path(temporary) / "model.onnx"
        export(model, inputs, path)
        values = layer_values(model, inputs, path)
        arrays = [x.numpy() for x in inputs]
        order = random.Random(settings.seed)

        def analysed(sparsity: float, done: int) -> list[Operation]:
            progress("running the model at imposed sparsities", done, settings.repeats * len(levels))
            return deepsparse.analyse(
                path, arrays, threads=settings.threads, environment=environment, sparsity=sparsity or None
            )

        progress(f"waiting for {devices.cpu_device()}", None, None)
        with device_lock(devices.cpu_device()):
            try:
                for number in range(settings.repeats):
                    order.shuffle(levels)
                    start = number * len(levels)
                    rounds.append({sparsity: analysed(sparsity, start + i) for i, sparsity in enumerate(levels)})
            finally:
                if rounds:
                    analyses = {level: [taken[level] for taken in rounds] for level in sorted(levels)}
                    found = rows(task.name, shapes, values, analyses, threads=settings.threads, batch=len(inputs[0]))
                    _write(folder, found, settings.threads)
    timed = {(row["model"], row["sparsity_target"]) for row in found}
    untimed = [name for name in shapes if any((f"{task.name}:{name}", level) not in timed for level in levels)]
    if len(untimed) == len(shapes):
        raise EnvironmentUnusable(f"DeepSparse runs no layer of task {task.name} by itself: there are no layer times")
    return untimed


def missing_levels(task: Task, folder: Path, settings: Settings, sparsities: Sequence[float]) -> list[float]:
    """Those of `sparsities` at which the table in `folder` lacks the task's model, run as often as asked for.

    Raises BadData for a folder that is no table.
    """
    if not folder.exists() or not any(folder.iterdir()):
        return list(sparsities)
    table = tables.timed(tables.read(folder))
    wanted = {
        "op": "model", "model": task.name, "backend": "deepsparse", "purpose": "sweep", "threads": settings.threads,
        "device": devices.cpu_device(), "batch": len(task.example()[0]),
    }  # fmt: skip
    for column, value in wanted.items():
        table = table[table[column] == value]
    known = set(table.loc[table["sample_count"] >= settings.repeats, "sparsity_target"])
    return [sparsity for sparsity in sparsities if sparsity not in known]


def rows(
    network: str,
    shapes: Mapping[str, Shape],
    values: Mapping[str, str],
    analyses: Mapping[float, Sequence[Sequence[Operation]]],
    *,
    threads: int,
    batch: int,
) -> list[dict[str, Any]]:
    """Table rows of analyses by sparsity (0: dense): the whole model's and, of those in `shapes`, each layer's.

    `values` says which layer computes which ONNX value. A layer has no row at a sparsity where an analysis lacks it.
    """
    constant = {
        "purpose": "sweep", "device": devices.cpu_device(), "backend": "deepsparse", "backend_version": VERSION,
        "pattern_seed": 0, "dtype_w": "float32", "dtype_a": "float32", "dtype_out": "float32",
        "kernel_requested": "auto", "context": "network", "cache_mode": "warm", "launch_mode": "call",
        "threads": threads, "timer": "deepsparse", "pinning": "none", "inner_loops": deepsparse.ANALYSED_CALLS,
        "status": "ok", "stop_reason": "budget",
    }  # fmt: skip
    found: list[dict[str, Any]] = []
    for sparsity, runs in analyses.items():
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
                | shape_columns(shape)
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


def _write(folder: Path, found: Sequence[Mapping[str, Any]], threads: int) -> None:
    environment = devices.environment(threads)
    run = {"run_id": uuid4().hex[:12], "env_id": environment["env_id"], "block": 0}
    tables.write_environment(folder, environment)
    tables.write_part(folder, [{**row, **run, "seq": i} for i, row in enumerate(found)])
