"""Fill the layer database: every asked-for option of every layer, pruned by one of the one-shot methods."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn

from latbench.errors import BadData, LatbenchError, UsageError
from latbench.machines.devices import count_cores
from latbench.runners.worker_process import TaskFailed, Worker, WorkerDied
from search.artifacts.layer_database import Database
from search.pruning.masks.layer_targets import target_of, targets_of
from search.pruning.one_shot.adaprune import AdaPrune
from search.pruning.one_shot.auto import Auto
from search.pruning.one_shot.base import OneShot
from search.pruning.one_shot.exact_obs import ExactOBS
from search.pruning.one_shot.hessian import input_hessians
from search.pruning.one_shot.magnitude import Magnitude
from search.pruning.one_shot.sparsegpt import SparseGPT
from search.task import Task
from sparse_kernels.nn import weight_matrix
from sparse_kernels.patterns import Dense, parse

Pair = tuple[str, float]
Options = Mapping[str, Sequence[Pair]]

ONE_SHOT_METHODS: dict[str, Callable[[Tensor, Tensor], OneShot]] = {
    "auto": Auto,
    "adaprune": AdaPrune,
    "obs": ExactOBS,
    "sparsegpt": SparseGPT,
    "magnitude": Magnitude,
}

DEFAULT_METHOD = "auto"
"""What is taken where nothing else is asked for."""

# Goes up when the same model and data would give other entries than before.
VERSION = 3

LAYER_SECONDS = 86400.0  # ExactOBS takes hours for a wide layer; a worker that hangs has to end some day


def describe_provenance(task: Task, method: str = DEFAULT_METHOD) -> str:
    """What the database's entries depend on beside the model: the method, and a hash of the calibration data."""
    digest = hashlib.sha256(f"{VERSION}".encode())
    for batch in task.calibration():
        _digest(batch, digest.update)
    return f"{method} {digest.hexdigest()[:16]}"


def build_database(
    task: Task,
    model: nn.Module,
    options: Options,
    database: Database,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    method: str = DEFAULT_METHOD,
    processes: int = 1,
) -> int:
    """Compute what `database` lacks of `options`, {layer: [(pattern, sparsity), ...]}; returns how many those were.

    Each entry is stored when it is done, so a build that was killed goes on from there. Dense options need no entry.
    With more than one of `processes`, each prunes a layer of its own. `progress` is told how many of all options are
    there. Raises UsageError for an unknown method or layer or a layer that cannot hold its pattern, BadData, naming
    the layer, for weights or calibration inputs that are not finite, and LatbenchError when a process dies.
    """
    if method not in ONE_SHOT_METHODS:
        raise UsageError(f"unknown method {method!r}: known are {', '.join(ONE_SHOT_METHODS)}")
    for layer, pairs in options.items():
        targets = [target_of(layer, pair) for pair in pairs]
        for target in {str(target.pattern): target for target in targets}.values():  # one of each fits or does not
            targets_of({layer: target}, model)
    wanted = {
        layer: [(spec, sparsity) for spec, sparsity in pairs if not isinstance(parse(spec), Dense)]
        for layer, pairs in options.items()
    }
    database.tidy()
    missing = {layer: [pair for pair in pairs if not database.has(layer, *pair)] for layer, pairs in wanted.items()}
    total = sum(map(len, wanted.values()))
    computed = 0
    there = total - sum(map(len, missing.values()))
    progress(there, total)
    layers = [layer for layer, pairs in missing.items() if pairs]
    modules = dict(model.named_modules())
    jobs = (
        (layer, weight_matrix(modules[layer]).contiguous(), hessian, missing[layer])
        for layer, hessian in input_hessians(task, model, layers, task.calibration())
    )
    processes = min(processes, len(layers))
    pruned = (
        _in_processes(jobs, database, method, processes) if processes > 1 else _one_by_one(jobs, database, method)
    )
    for stored in pruned:
        computed += stored
        progress(there + computed, total)
    return computed


Job = tuple[str, Tensor, Tensor, Sequence[Pair]]
"""A layer's name, weight (m, k), H (k, k) and missing options."""


def _one_by_one(jobs: Iterator[Job], database: Database, method: str) -> Iterator[int]:
    for job in jobs:
        for _ in _entries(job, database, method):
            yield 1


def _in_processes(jobs: Iterator[Job], database: Database, method: str, processes: int) -> Iterator[int]:
    """A layer a process; no layer's H is computed before a process is free for it."""
    place = (str(database.folder.resolve()), database.model_hash, database.provenance)
    threads = max(1, count_cores() // processes)
    idle: SimpleQueue[Worker] = SimpleQueue()
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(max_workers=processes))  # its threads outlive their workers
        for number in range(processes):
            idle.put(stack.enter_context(Worker(threads=threads, name=f"pruning {number + 1}")))

        def run(job: Job) -> int:
            worker = idle.get()
            try:
                stored = worker.call(
                    "search.pruning.one_shot.fill_database:prune_layer", job, place, method, timeout=LAYER_SECONDS
                )
            except TaskFailed as error:
                raise (BadData(error.message) if error.kind == "BadData" else _failed(job, error)) from error
            except WorkerDied as error:
                raise _failed(job, error) from error
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


def _failed(job: Job, error: LatbenchError) -> LatbenchError:
    return LatbenchError(
        f"layer {job[0]}: {error}; what is in the database stays, and the next run goes on from there"
    )


def prune_layer(job: Job, place: tuple[str, str, str], method: str) -> int:
    """Compute and store a layer's missing options in the database at `place`; returns how many."""
    folder, model_hash, made_by = place
    return sum(1 for _ in _entries(job, Database(Path(folder), model_hash, made_by), method))


def _entries(job: Job, database: Database, method: str) -> Iterator[None]:
    """Compute and store the options of a layer, one at a time."""
    layer, weight, hessian, pairs = job
    try:
        problem = ONE_SHOT_METHODS[method](weight, hessian)
        for spec, sparsity in sorted(pairs):  # rising sparsities share most
            pruned = problem.prune(parse(spec), sparsity)
            database.put(layer, spec, sparsity, pruned.weight, pruned.mask, pruned.error)
            yield
    except BadData as error:
        raise BadData(f"layer {layer}: {error}") from error


def _digest(value: Any, update: Callable[[bytes], None]) -> None:
    """Feed a batch to `update`: tensors by their content (a pickle of one holds addresses), containers by theirs."""
    if torch.is_tensor(value):
        array = value.detach().cpu().contiguous()
        update(f"{array.dtype} {tuple(array.shape)}".encode())
        update(array.view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key in value:
            _digest(key, update)
            _digest(value[key], update)
    elif isinstance(value, list | tuple):
        update(str(len(value)).encode())
        for item in value:
            _digest(item, update)
    else:
        update(pickle.dumps(value))
