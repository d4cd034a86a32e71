"""Fill the layer database: prune every requested option of every layer by one of the one-shot methods.

An option in eight bits is the one in float32 with rounded weights. They are rounded one after the other, and the next
ones make up for what each loses (`search.pruning.one_shot.round_weights`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from latbench.base.engine_registry import INT8
from latbench.errors import BadData, LatbenchError, UsageError
from latbench.machines.processors import count_cores
from latbench.runners.worker_process import TaskFailed, Worker, WorkerDied
from search.artifacts.layer_database import Database, Entry
from search.problem.layers import DENSE, Option
from search.pruning.calibration_hash import check_batches, hash_batches
from search.pruning.masks.layer_targets import parse_target, resolve_targets
from search.pruning.one_shot.adaprune import AdaPrune
from search.pruning.one_shot.auto_pruner import AutoPruner
from search.pruning.one_shot.exact_obs import ExactOBS
from search.pruning.one_shot.hessian import compute_input_hessians
from search.pruning.one_shot.magnitude import Magnitude
from search.pruning.one_shot.one_shot_pruner import OneShotPruner, PrunedWeight
from search.pruning.one_shot.round_weights import round_weight
from search.pruning.one_shot.sparsegpt import SparseGPT
from search.pruning.quantization.input_ranges import InputReading, find_input_ranges
from search.task import Task
from sparse_kernels.formats.int8 import Quantization
from sparse_kernels.patterns import parse
from sparse_kernels.prunable_layers import weight_matrix

Options = Mapping[str, Sequence[Option]]

ONE_SHOT_METHODS: dict[str, Callable[[Tensor, Tensor], OneShotPruner]] = {
    "auto": AutoPruner,
    "adaprune": AdaPrune,
    "obs": ExactOBS,
    "sparsegpt": SparseGPT,
    "magnitude": Magnitude,
}

DEFAULT_METHOD = "auto"
"""The method if no other is requested."""

LAYER_SECONDS = 86400.0  # ExactOBS takes hours for a wide layer; a worker that hangs must end at last


def hash_pruning_inputs(task: Task, method: str = DEFAULT_METHOD, batches: Sequence[Any] | None = None) -> str:
    """Return the method and a hash of the calibration data: entries depend on them and on the model.

    batches: what calibration() returned; None calls it.
    """
    return f"{method} {hash_batches(task.name, task.calibration() if batches is None else batches)}"


def fill_database(
    task: Task,
    model: nn.Module,
    options: Options,
    database: Database,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    method: str = DEFAULT_METHOD,
    processes: int = 1,
) -> int:
    """Compute the options that the database lacks.

    Each entry is stored at once, so an interrupted run continues where it stopped. Options that leave a layer as it
    is need no entry.

    Parameters
    ----------
    task : Task
        The task, with its calibration data.
    model : Module
        The dense model.
    options : mapping of str to sequence of Option
        Options by layer.
    database : Database
        Where the entries are stored.
    progress : callable
        Called with the options in the database and all options.
    method : str
        A key of ONE_SHOT_METHODS.
    processes : int
        Worker processes.

    Returns
    -------
    int
        How many options were computed.

    Raises
    ------
    UsageError
        The method or a layer is unknown, a layer cannot hold its pattern, or calibration() returns other data now.
    BadData
        Weights or calibration inputs of the named layer are not finite, or the database is of other ones.
    LatbenchError
        A process died.
    """
    if method not in ONE_SHOT_METHODS:
        raise UsageError(f"unknown method {method!r}: known are {', '.join(ONE_SHOT_METHODS)}")
    _check_options(options, model)
    wanted = {layer: _list_entries(own) for layer, own in options.items()}
    database.tidy()
    _begin(task, model, database)
    missing = {layer: [it for it in own if not database.has(layer, it)] for layer, own in wanted.items()}
    total = sum(map(len, wanted.values()))
    stored = done = total - sum(map(len, missing.values()))
    progress(done, total)
    for count in _prune_layers(task, model, missing, database, method, processes):
        done += count
        progress(done, total)
    return done - stored


def _begin(task: Task, model: nn.Module, database: Database) -> None:
    """Check that the database is of this task, before hours are spent on it."""
    batches = task.calibration()
    check_batches(task.name, batches, database.provenance)
    with torch.no_grad():
        database.begin(float(task.loss(model, batches[0])))


def _list_entries(options: Sequence[Option]) -> list[Option]:
    """List the entries that these options need, each once."""
    return list(dict.fromkeys(it for option in options if (it := option.in_database) is not None))


def _check_options(options: Options, model: nn.Module) -> None:
    """Raise UsageError if a layer cannot hold one of its options."""
    for layer, own in options.items():
        targets = [parse_target(layer, (option.pattern, option.sparsity)) for option in own]
        by_pattern = {str(target.pattern): target for target in targets}
        for target in by_pattern.values():  # all sparsities of a pattern fit, or none
            resolve_targets({layer: target}, model)


def _prune_layers(
    task: Task, model: nn.Module, missing: Options, database: Database, method: str, processes: int
) -> Iterator[int]:
    """Compute and store the missing options; yield how many were stored since the last time."""
    layers = [layer for layer, own in missing.items() if own]
    in_bytes = [layer for layer in layers if any(option.precision == INT8 for option in missing[layer])]
    readings = find_input_ranges(task, model, in_bytes) if in_bytes else {}
    modules = dict(model.named_modules())
    jobs = (
        LayerJob(layer, weight_matrix(modules[layer]).contiguous(), hessian, missing[layer], readings.get(layer))
        for layer, hessian in compute_input_hessians(task, model, layers, task.calibration())
    )
    processes = min(processes, len(layers))
    if processes > 1:
        return _prune_in_processes(jobs, database, method, processes)
    return _prune_in_turn(jobs, database, method)


class LayerJob(NamedTuple):
    """A layer whose options are missing.

    Attributes
    ----------
    layer : str
        Its name.
    weight : Tensor of shape (m, k)
        The dense weight.
    hessian : Tensor of shape (k, k)
        H.
    options : sequence of Option
        What the database lacks.
    reading : InputReading or None
        How its inputs are read, where an option is in eight bits.
    """

    layer: str
    weight: Tensor
    hessian: Tensor
    options: Sequence[Option]
    reading: InputReading | None


def _prune_in_turn(jobs: Iterator[LayerJob], database: Database, method: str) -> Iterator[int]:
    for job in jobs:
        for _ in _compute_entries(job, database, method):
            yield 1


def _prune_in_processes(jobs: Iterator[LayerJob], database: Database, method: str, processes: int) -> Iterator[int]:
    """Prune one layer a process. H of a layer is computed once a process is free for it."""
    place = (str(database.folder.resolve()), database.model_hash, database.provenance)
    threads = max(1, count_cores() // processes)
    idle: SimpleQueue[Worker] = SimpleQueue()
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(max_workers=processes))  # its threads outlive their workers
        for number in range(processes):
            idle.put(stack.enter_context(Worker(threads=threads, name=f"pruning {number + 1}")))

        def run(job: LayerJob) -> int:
            worker = idle.get()
            try:
                stored = worker.call(
                    "search.pruning.one_shot.fill_database:prune_layer", job, place, method, timeout=LAYER_SECONDS
                )
            except TaskFailed as error:
                raise (BadData(error.message) if error.kind == "BadData" else _build_failure(job, error)) from error
            except WorkerDied as error:
                raise _build_failure(job, error) from error
            finally:
                idle.put(worker)
            return int(stored)

        running: set[Future[int]] = set()
        for job in jobs:
            running.add(pool.submit(run, job))
            while len(running) == processes:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        for future in running:
            yield future.result()


def _build_failure(job: LayerJob, error: LatbenchError) -> LatbenchError:
    return LatbenchError(
        f"layer {job.layer}: {error}; what is in the database stays, and the next run goes on from there"
    )


def prune_layer(job: LayerJob, place: tuple[str, str, str], method: str) -> int:
    """Compute and store a layer's missing options in the database at `place`; return how many."""
    folder, model_hash, provenance = place
    return sum(1 for _ in _compute_entries(job, Database(Path(folder), model_hash, provenance), method))


def _compute_entries(job: LayerJob, database: Database, method: str) -> Iterator[None]:
    """Compute and store the options of a layer, one at a time."""
    try:
        pruner = ONE_SHOT_METHODS[method](job.weight, job.hessian)
        rising = sorted(job.options, key=lambda it: (it.pattern, it.sparsity))  # they share the most work
        for (spec, sparsity), alike in groupby(rising, key=lambda it: (it.pattern, it.sparsity)):
            pruned = _prune(pruner, database, job.layer, Option(spec, sparsity))
            for option in alike:
                entry = Entry(pruned.weight, pruned.mask, pruned.error)
                if option.precision == INT8:
                    assert job.reading is not None
                    rounded = round_weight(pruner, pruned, job.reading)
                    entry = Entry(
                        rounded.weight, pruned.mask, rounded.error, Quantization(rounded.scales, job.reading.range)
                    )
                database.put(job.layer, option, entry)
                yield
    except BadData as error:
        raise BadData(f"layer {job.layer}: {error}") from error
    except LinAlgError as error:
        raise BadData(
            f"layer {job.layer}: the matrix of products of its inputs on the calibration data cannot be inverted "
            f"({error}): compute its inputs in float32, or exclude it"
        ) from error


def _prune(pruner: OneShotPruner, database: Database, layer: str, option: Option) -> PrunedWeight:
    """Prune a layer to an option in float32, or read what an earlier run found."""
    if option.pattern == DENSE:
        return PrunedWeight(pruner.weight, torch.ones_like(pruner.weight, dtype=torch.bool), 0.0)
    if database.has(layer, option):
        known = database.get(layer, option)
        return PrunedWeight(known.weight, known.mask, known.error)
    return pruner.prune(parse(option.pattern), option.sparsity)
