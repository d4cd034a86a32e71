"""Every loss that a search was told, kept beside the layer database: what was judged once is not judged again.

    <database>/trials.jsonl    a line a profile and stretch of batches, in the order judged, only ever appended to:
        {"key": "...", "held": {layer: "pattern@sparsity"}, "first": 0, "losses": [...]}
        key      what losses depend on beside the profile (see `key_of`); lines of other keys are passed over
        first    the number of the first batch; losses of the batches from there on

A search that was interrupted asks again for what it had asked, is answered from here, and so goes on where it was. A
line that is no whole one was being written when its process was killed: it is dropped, and judged again.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import linecache
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from latbench.errors import EnvironmentUnusable
from search.loss.evaluator import Held
from search.task import Task

# Goes up when the same profile would be judged otherwise than before.
VERSION = 1


class Trials:
    """Losses batch by batch of the profiles judged under `key`, in `path` or, without one, in memory alone.

    `layers` are the names of a profile's layers. Raises EnvironmentUnusable where the file cannot be read or written.
    """

    def __init__(self, layers: Sequence[str], path: Path | None = None, key: str = "") -> None:
        self._names, self._path, self._key = tuple(layers), path, key
        self._known: dict[Held, list[float]] = {}
        self._broken = False  # whether the file's last line lacks its end
        if path is not None and path.exists():
            try:
                content = path.read_bytes()
            except OSError as error:
                raise EnvironmentUnusable(f"cannot read {path}: {error.strerror or error}") from error
            for line in content.splitlines():
                self._read(line)
            self._broken = bool(content) and not content.endswith(b"\n")

    def losses(self, held: Held) -> Sequence[float]:
        """The losses of the first batches, as many as are known."""
        return self._known.get(held, ())

    def add(self, held: Held, losses: Sequence[float]) -> None:
        """Keep the losses of the batches that follow the known ones, if there are any."""
        if not losses:
            return
        known = self._known.setdefault(held, [])
        self._write(held, len(known), losses)
        known.extend(losses)

    def _write(self, held: Held, first: int, losses: Sequence[float]) -> None:
        if self._path is None:
            return
        options = dict(zip(self._names, (f"{pattern}@{sparsity!r}" for pattern, sparsity in held), strict=True))
        line = json.dumps({"key": self._key, "held": options, "first": first, "losses": list(losses)})
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(("\n" if self._broken else "") + line + "\n")
        except OSError as error:
            raise EnvironmentUnusable(f"cannot write {self._path}: {error.strerror or error}") from error
        self._broken = False

    def _read(self, line: bytes) -> None:
        try:
            entry = json.loads(line)
            if entry["key"] != self._key or set(entry["held"]) != set(self._names):
                return
            options = (entry["held"][name].rsplit("@", 1) for name in self._names)
            held = tuple((pattern, float(sparsity)) for pattern, sparsity in options)
            first, losses = int(entry["first"]), [float(loss) for loss in entry["losses"]]
        except (ValueError, KeyError, TypeError, AttributeError):
            return
        known = self._known.setdefault(held, [])
        if first == len(known):  # two searches may have judged the same at the same time
            known.extend(losses)


def key_of(task: Task, model: torch.nn.Module, model_hash: str, made_by: str) -> str:
    """A hash of what the losses of a profile depend on: weights, pruned weights, data, torch's version, and code.

    Of code it is the files, whole, that define the loss, the task and the classes of the model's modules: whatever
    they use of their own file may change what comes out. Other files that they import are not looked at.
    """
    sources = sorted({*_sources(task, "loss"), *map(_file_of, map(type, model.modules()))})
    return _hash([VERSION, model_hash, made_by, sources, torch.__version__])


def code_of(task: Task) -> str:
    """A hash of what scores depend on beside the model: the files, whole, that define them and the task."""
    return _hash(sorted(_sources(task, "score")))


def _sources(task: Task, function: str) -> set[str]:
    own = task.implementation
    return {_file_of(getattr(own, function)), _file_of(own if isinstance(own, ModuleType) else type(own))}


def _hash(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _file_of(defined: Any) -> str:
    """The source that a function, class or module is defined in; empty where it is not to be had."""
    try:
        path = inspect.getsourcefile(inspect.unwrap(defined)) or ""
    except (OSError, TypeError):
        return ""
    if Path(path).is_file():
        return Path(path).read_text(encoding="utf-8", errors="replace")
    return "".join(linecache.getlines(path))  # a notebook's cell
