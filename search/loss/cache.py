"""A cache of losses, kept beside the layer database: what was evaluated once is not evaluated again.

    <database>/trials.jsonl    a line a profile and range of batches, in the order evaluated, only ever appended to:
        {"key": "...", "held": {layer: [pattern, sparsity, precision]}, "first": 0, "losses": [...]}
        key      what losses depend on beside the profile (see `hash_loss_inputs`); lines of other keys are skipped
        first    the number of the first batch; losses of the batches from there on

A search that was interrupted asks the cache for the same profiles again, and so goes on where it was. A killed
process may leave an incomplete line: it is dropped, and its profile is evaluated again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from latbench.errors import EnvironmentUnusable
from search.loss.evaluator import ProfileOptions
from search.problem.layers import Option
from search.source_code import read_model_sources, read_source
from search.task import Task

# Goes up when the same profile would be evaluated otherwise than before.
VERSION = 2


class LossCache:
    """Losses of profiles, batch by batch, in a file or in memory.

    Parameters
    ----------
    layers
        Names of the layers of a profile.
    path
        The file; None keeps the losses in memory alone.
    key
        What the losses depend on beside the profile.

    Raises
    ------
    EnvironmentUnusable
        The file cannot be read or written.
    """

    def __init__(self, layers: Sequence[str], path: Path | None = None, key: str = "") -> None:
        self._names, self._path, self._key = tuple(layers), path, key
        self._known: dict[ProfileOptions, list[float]] = {}
        self._last_line_is_incomplete = False
        if path is not None and path.exists():
            try:
                content = path.read_bytes()
            except OSError as error:
                raise EnvironmentUnusable(f"cannot read {path}: {error.strerror or error}") from error
            for line in content.splitlines():
                self._read(line)
            self._last_line_is_incomplete = bool(content) and not content.endswith(b"\n")

    def losses(self, profile: ProfileOptions) -> Sequence[float]:
        """Return the known losses of a profile: those of the first batches."""
        return self._known.get(profile, ())

    def add(self, profile: ProfileOptions, losses: Sequence[float]) -> None:
        """Keep the losses of the batches that follow the known ones."""
        if not losses:
            return
        known = self._known.setdefault(profile, [])
        self._write(profile, len(known), losses)
        known.extend(losses)

    def _write(self, profile: ProfileOptions, first: int, losses: Sequence[float]) -> None:
        if self._path is None:
            return
        options = dict(zip(self._names, map(astuple, profile), strict=True))
        line = json.dumps({"key": self._key, "held": options, "first": first, "losses": list(losses)})
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(("\n" if self._last_line_is_incomplete else "") + line + "\n")
        except OSError as error:
            raise EnvironmentUnusable(f"cannot write {self._path}: {error.strerror or error}") from error
        self._last_line_is_incomplete = False

    def _read(self, line: bytes) -> None:
        try:
            entry = json.loads(line)
            if entry["key"] != self._key or set(entry["held"]) != set(self._names):
                return
            held = (entry["held"][name] for name in self._names)
            profile = tuple(
                Option(str(pattern), float(sparsity), str(precision)) for pattern, sparsity, precision in held
            )
            first, losses = int(entry["first"]), [float(loss) for loss in entry["losses"]]
        except (ValueError, KeyError, TypeError, AttributeError):
            return
        known = self._known.setdefault(profile, [])
        if first == len(known):  # two searches may have evaluated the same at the same time
            known.extend(losses)


def hash_loss_inputs(task: Task, model: torch.nn.Module, model_hash: str, provenance: str) -> str:
    """Return a hash of what losses depend on: weights, pruned weights, data, torch's version, task and code.

    Code means the whole files that define the loss, the task and the classes of the model's modules: the rest of such
    a file may change a loss, too. Other files that they import are not part of the hash. A file may define several
    tasks.

    Parameters
    ----------
    task, model
        The task and its model.
    model_hash
        Hash of the model's weights.
    provenance
        Pruning method and calibration data, as `Database.provenance` has them.
    """
    sources = sorted({*_read_sources(task, "loss"), *read_model_sources(model)})
    attribute = task.reference.partition(":")[2]
    return _hash([VERSION, model_hash, provenance, sources, torch.__version__, attribute])


def hash_score_code(task: Task) -> str:
    """Return a hash of what scores depend on beside the model: the whole files that define them and the task."""
    return _hash(sorted(_read_sources(task, "score")))


def _read_sources(task: Task, function: str) -> set[str]:
    own = task.implementation
    return {read_source(getattr(own, function)), read_source(own if isinstance(own, ModuleType) else type(own))}


def _hash(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
