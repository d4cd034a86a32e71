"""What exported models have in common in Python: they take arrays by place or by name, and give arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from latbench.errors import UsageError


class ArrayInput(NamedTuple):
    """An input of a model. sides: None for one of any size; None for all where any number will do."""

    name: str
    dtype: np.dtype[Any]
    sides: tuple[int | None, ...] | None

    def read(self, given: ArrayLike, number: int) -> NDArray[Any]:
        """Return input `number` as the model takes it. Raises UsageError if it does not fit."""
        x = np.asarray(given)
        if x.dtype.kind != self.dtype.kind:
            raise UsageError(f"input {number} of the model is {self.dtype}, not {x.dtype}")
        sides = x.shape if self.sides is None else self.sides
        if len(sides) != x.ndim or any(side not in (None, own) for side, own in zip(sides, x.shape, strict=True)):
            shape = ",".join("?" if side is None else str(side) for side in sides)
            raise UsageError(f"input {number} of the model has the shape [{shape}], not {x.shape}")
        return np.require(x, self.dtype, ["C"])


class ArrayModel(ABC):
    """A model in the folder of its export: call it with inputs, get results.

    Parameters
    ----------
    folder : Path
        Folder of the exported model.
    threads : int
        Threads of a call, at least one.
    """

    def __init__(self, folder: Path, threads: int) -> None:
        if threads < 1:
            raise UsageError(f"a call has at least one thread, not {threads}")
        self.folder, self.threads = folder.resolve(), threads
        self._inputs: list[ArrayInput] = []

    @abstractmethod
    def run(self, *inputs: ArrayLike) -> list[NDArray[Any]]:
        """Return all results for these inputs, in the model's order. Raises UsageError for inputs that do not fit."""

    def _read_inputs(self, given: Sequence[ArrayLike]) -> list[NDArray[Any]]:
        if len(given) != len(self._inputs):
            raise UsageError(f"the model takes {len(self._inputs)} inputs, not {len(given)}")
        pairs = zip(self._inputs, given, strict=True)
        return [each.read(array, number) for number, (each, array) in enumerate(pairs, 1)]

    def __call__(self, *inputs: ArrayLike, **named: ArrayLike) -> Any:
        """Return the result for these inputs, by place or by name; a tuple, where the model has several results."""
        found = self.run(*inputs, *self._order(named, len(inputs)))
        return found[0] if len(found) == 1 else tuple(found)

    def _order(self, named: Mapping[str, ArrayLike], first: int) -> list[ArrayLike]:
        """Return inputs that were given by name in the order of the model, from number `first` on."""
        names = [each.name for each in self._inputs]
        if unknown := [name for name in named if name not in names[first:]]:
            raise UsageError(f"the model takes {', '.join(names)}, and not {unknown[0]} by name here")
        return [named[name] for name in names[first:] if name in named]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.folder)!r}, threads={self.threads})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder, self.threads)
