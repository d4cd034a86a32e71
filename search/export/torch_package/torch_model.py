"""A model exported to a package of torch, in Python: a callable of NumPy arrays, without Numba."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from latbench.base.deployed_forms import TORCH_PACKAGE
from latbench.errors import EnvironmentUnusable, UsageError
from search.export.export_manifest import LIBRARY, PACKAGE, PACKED, check_files, read_manifest
from search.export.fork_gate import ForkGate
from sparse_kernels.cpu.runtime.openmp_forks import close_pool

MOST_CALLS = 8
"""Threads that may be inside one model at the same time; others wait for them."""


def name_torch_release() -> str:
    """Return the release of the installed torch, such as 2.13.0. Raises EnvironmentUnusable if there is none."""
    version: str = _import_torch().__version__
    return version.partition("+")[0]


def _close_pool() -> None:
    """End the threads of torch's OpenMP, which torch shows to all libraries."""
    close_pool(ctypes.CDLL(None))


_gate = ForkGate(before=_close_pool)


def _import_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise EnvironmentUnusable(f"torch is not installed: pip install torch ({error})") from error
    return torch


class TorchModel:
    """A model that `latbench export --to torch` wrote: call it with inputs, get results.

    Threads of a process may call it at the same time. A process may fork after it was loaded. A pickle holds its
    folder, so a spawned process loads it anew.

    Parameters
    ----------
    folder : Path
        Folder of the exported model.
    threads : int
        Threads of a call. They are torch's, so they hold for all that torch does in this process.
    checked : bool
        Whether the files must be those of the manifest.

    Raises
    ------
    BadData
        A file is missing or damaged, or does not belong to the others.
    EnvironmentUnusable
        This machine lacks each CPU level of the model, the C library that it needs, or the torch that it is for.
    """

    def __init__(self, folder: Path, threads: int = 1, *, checked: bool = True) -> None:
        if threads < 1:
            raise UsageError(f"a call has at least one thread, not {threads}")
        self.folder, self.threads = folder.resolve(), threads
        manifest = read_manifest(self.folder)
        if checked:
            check_files(self.folder, manifest, [LIBRARY, PACKED, PACKAGE])
            if (here := name_torch_release()) != manifest[TORCH_PACKAGE]:
                raise EnvironmentUnusable(
                    f"{folder} was exported for torch {manifest[TORCH_PACKAGE]}, and here is {here}: install that "
                    "one, or export the model again"
                )
        self._inputs: list[dict[str, Any]] = manifest["inputs"]
        self._load(manifest["namespace"])

    def _load(self, namespace: str) -> None:
        torch = _import_torch()
        torch.set_num_threads(self.threads)
        try:
            if not _is_defined(torch, namespace):  # else by a copy of this folder, with the same layers
                torch.ops.load_library(str(self.folder / LIBRARY))
            # What torch.export's loader wraps. That one imports the compiler, and compiles to name this processor.
            package = str(self.folder / PACKAGE)
            self._package: Any = torch._C._aoti.AOTIModelPackageLoader(package, "model", False, MOST_CALLS, -1)
        except (RuntimeError, OSError) as error:
            raise EnvironmentUnusable(f"{self.folder} cannot be loaded: {_shorten(error)}") from error

    def run(self, *inputs: ArrayLike) -> list[NDArray[Any]]:
        """Return all results for these inputs, in the model's order. Raises UsageError for inputs that do not fit."""
        with _gate:
            return self._call(inputs)

    def _call(self, inputs: Sequence[ArrayLike]) -> list[NDArray[Any]]:
        torch = _import_torch()
        if len(inputs) != len(self._inputs):
            raise UsageError(f"the model takes {len(self._inputs)} inputs, not {len(inputs)}")
        arrays = [
            _read_input(each, port, i) for i, (each, port) in enumerate(zip(inputs, self._inputs, strict=True), 1)
        ]
        try:
            with torch.inference_mode():
                return [each.numpy() for each in self._package.run([*map(torch.from_numpy, arrays)])]
        except RuntimeError as error:
            raise UsageError(f"the model did not run: {_shorten(error)}") from error

    def __call__(self, *inputs: ArrayLike, **named: ArrayLike) -> Any:
        """Return the result for these inputs, by place or by name; a tuple, where the model has several results."""
        found = self.run(*inputs, *self._order(named, len(inputs)))
        return found[0] if len(found) == 1 else tuple(found)

    def _order(self, named: Mapping[str, ArrayLike], first: int) -> list[ArrayLike]:
        """Return inputs that were given by name in the order of the model, from number `first` on."""
        names = [each["name"] for each in self._inputs]
        if unknown := [name for name in named if name not in names[first:]]:
            raise UsageError(f"the model takes {', '.join(names)}, and not {unknown[0]} by name here")
        return [named[name] for name in names[first:] if name in named]

    def __repr__(self) -> str:
        return f"TorchModel({str(self.folder)!r}, threads={self.threads})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder, self.threads)


def run_package(folder: str, threads: int, inputs: list[list[NDArray[Any]]]) -> list[list[NDArray[Any]]]:
    """Return the results of a deployed model for each of the inputs."""
    model = TorchModel(Path(folder), threads, checked=False)
    return [model.run(*each) for each in inputs]


def _is_defined(torch: Any, namespace: str) -> bool:
    try:
        torch._C._dispatch_find_schema_or_throw(f"{namespace}::layer", "")
    except RuntimeError:
        return False
    return True


def _read_input(given: ArrayLike, port: Mapping[str, Any], number: int) -> NDArray[Any]:
    """Return an input as the model takes it."""
    x, wanted = np.asarray(given), np.dtype(port["type"])
    if x.dtype.kind != wanted.kind:
        raise UsageError(f"input {number} of the model is {wanted}, not {x.dtype}")
    sides: list[int | None] = port["shape"]
    if len(sides) != x.ndim or any(side not in (None, own) for side, own in zip(sides, x.shape, strict=True)):
        shape = ",".join("?" if side is None else str(side) for side in sides)
        raise UsageError(f"input {number} of the model has the shape [{shape}], not {x.shape}")
    return np.require(x, wanted, ["C", "W"])


def _shorten(error: Exception) -> str:
    """Return the first line of what torch says: those behind it name places in its own code."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
