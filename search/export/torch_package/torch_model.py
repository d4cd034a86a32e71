"""A model exported to a package of torch, in Python: a callable of NumPy arrays, without Numba."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from latbench.base.deployed_forms import TORCH_PACKAGE
from latbench.errors import EnvironmentUnusable, UsageError
from search.export.array_model import ArrayInput, ArrayModel
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


class TorchModel(ArrayModel):
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
        super().__init__(folder, threads)
        manifest = read_manifest(self.folder)
        if checked:
            check_files(self.folder, manifest, [LIBRARY, PACKED, PACKAGE])
            if (here := name_torch_release()) != manifest[TORCH_PACKAGE]:
                raise EnvironmentUnusable(
                    f"{folder} was exported for torch {manifest[TORCH_PACKAGE]}, and here is {here}: install that "
                    "one, or export the model again"
                )
        self._inputs = [
            ArrayInput(each["name"], np.dtype(each["type"]), tuple(each["shape"])) for each in manifest["inputs"]
        ]
        self._load(manifest["namespace"])

    def _load(self, namespace: str) -> None:
        torch = _import_torch()
        torch.set_num_threads(self.threads)
        try:
            if not _is_defined(torch, namespace):  # else by a copy of this folder, with the same layers
                torch.ops.load_library(str(self.folder / LIBRARY))
            # What torch's own loader wraps: that one imports the compiler, which takes seconds.
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
        # torch warns of arrays that it must not write to.
        arrays = [np.require(each, requirements=["W"]) for each in self._read_inputs(inputs)]
        try:
            with torch.inference_mode():
                return [each.numpy() for each in self._package.run([*map(torch.from_numpy, arrays)])]
        except RuntimeError as error:
            raise UsageError(f"the model did not run: {_shorten(error)}") from error


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


def _shorten(error: Exception) -> str:
    """Return the first line of what torch says: those behind it name places in its own code."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
