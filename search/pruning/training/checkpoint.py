"""Checkpoints of an interrupted training: one file holds all that it depends on, and is written atomically."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch

from latbench.base.files import write_atomically
from latbench.errors import BadData

SECONDS = 60.0


class Stateful(Protocol):
    """A model, optimizer, schedule or pruner."""

    def state_dict(self) -> Any:
        """Return tensors and plain values."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Continue from a `state_dict`."""


class Checkpoint:
    """The checkpoint file of one training run.

    Parameters
    ----------
    path : Path
        The file; its name should hold a hash of what the run depends on.
    seconds : float
        Shortest time between two writes, in seconds.
    clock : callable
        Returns the time in seconds.
    """

    def __init__(self, path: Path, *, seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self.path, self.seconds, self.clock = path, seconds, clock
        self.written = clock()

    def save_if_due(self, step: int, parts: Mapping[str, Stateful], facts: Mapping[str, Any]) -> None:
        """Save the parts, torch's generator and `facts` after `step` steps, if it is time."""
        if self.clock() - self.written < self.seconds:
            return
        content = {
            "step": step,
            "facts": dict(facts),
            "generator": torch.get_rng_state(),
            "parts": {name: part.state_dict() for name, part in parts.items()},
        }
        write_atomically(self.path, lambda path: _save(content, path))
        self.written = self.clock()

    def load(self, parts: Mapping[str, Stateful]) -> tuple[int, dict[str, Any], torch.Tensor | None]:
        """Restore the parts, and return the finished steps, the facts and the state of the generator.

        Returns (0, {}, None) without a file. Raises BadData if the file is damaged.
        """
        if not self.path.exists():
            return 0, {}, None
        try:
            content = torch.load(self.path, map_location="cpu", weights_only=True)
            for name, part in parts.items():
                part.load_state_dict(content["parts"][name])
            return int(content["step"]), dict(content["facts"]), content["generator"]
        except (OSError, RuntimeError, ValueError, LookupError, TypeError, EOFError, UnpicklingError) as error:
            first = " ".join(str(error).split())[:200]
            raise BadData(f"{self.path}: damaged ({first}); delete it to train from the start") from error

    def remove(self) -> None:
        """Remove the file: the run is complete."""
        self.path.unlink(missing_ok=True)


def _save(content: Any, path: Path) -> None:
    try:
        torch.save(content, path)
    except RuntimeError as error:  # torch raises it for a full disk
        raise OSError(" ".join(str(error).split())[:200]) from error
