"""Fill the layer database: every asked-for option of every layer, masked by saliency and refitted by AdaPrune."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from latbench.errors import BadData
from search.database import Database
from search.pruning.adaprune import AdaPrune
from search.pruning.hessian import input_hessians
from search.pruning.magnitude import magnitude
from search.task import Task
from sparse_kernels.nn import weight_matrix
from sparse_kernels.patterns import Dense, parse

Options = Mapping[str, Sequence[tuple[str, float]]]

# Goes up when the same model and data would give other entries than before.
VERSION = 1


def recipe(task: Task) -> str:
    """A hash of what the database's entries depend on beside the model: the calibration data, and how it is used."""
    digest = hashlib.sha256(str(VERSION).encode())
    for batch in task.calibration():
        _digest(batch, digest.update)
    return digest.hexdigest()[:16]


def build_database(
    task: Task,
    model: nn.Module,
    options: Options,
    database: Database,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Compute what `database` lacks of `options`, {layer: [(pattern, sparsity), ...]}; returns how many those were.

    Each entry is stored when it is done, so a build that was killed goes on from there. Dense options need no entry.
    `progress` is told how many of all options are there. Raises BadData, naming the layer, for weights or calibration
    inputs that are not finite.
    """
    wanted = {
        layer: [(spec, sparsity) for spec, sparsity in pairs if not isinstance(parse(spec), Dense)]
        for layer, pairs in options.items()
    }
    missing = {layer: [pair for pair in pairs if not database.has(layer, *pair)] for layer, pairs in wanted.items()}
    total = sum(map(len, wanted.values()))
    computed = 0
    there = total - sum(map(len, missing.values()))
    progress(there, total)
    layers = [layer for layer, pairs in missing.items() if pairs]
    modules = dict(model.named_modules())
    for layer, hessian in input_hessians(task, model, layers, task.calibration()):
        weight = weight_matrix(modules[layer]).contiguous()
        problem = AdaPrune(weight, hessian)
        for spec, sparsity in missing[layer]:
            try:
                mask = magnitude(weight, parse(spec), sparsity, hessian)
            except BadData as error:
                raise BadData(f"layer {layer}: {error}") from error
            result = problem.fit(mask)
            database.put(layer, spec, sparsity, result.weight, result.mask, result.error)
            computed += 1
            progress(there + computed, total)
    return computed


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
