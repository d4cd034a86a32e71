"""An exported model in Python: a callable of NumPy arrays, without torch, Numba or anything else of latbench's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from latbench.base.files import hash_file
from latbench.errors import BadData, EnvironmentUnusable, UsageError
from sparse_kernels.cpu.export.exported_library import UNUSABLE, ExportedLibrary, LibraryError

MANIFEST, LIBRARY, PACKED = "manifest.json", "libmodel.so", "model.latbench"


def is_exported(folder: Path) -> bool:
    """Return whether the folder holds an exported model."""
    return (folder / MANIFEST).is_file() and (folder / PACKED).is_file()


class ExportedModel:
    """A model that `latbench export` wrote: call it with inputs, get results.

    Threads of a process may call it at the same time, and a process may fork after it was loaded. A pickle holds its
    folder, so a spawned process loads it again.

    Parameters
    ----------
    folder : Path
        Folder of the exported model.
    threads : int
        Threads of a call.

    Raises
    ------
    BadData
        A file is missing or damaged, or does not belong to the others.
    EnvironmentUnusable
        This machine lacks each CPU level of the model, or the C library that it needs.
    """

    def __init__(self, folder: Path, threads: int = 1) -> None:
        if threads < 1:
            raise UsageError(f"a call has at least one thread, not {threads}")
        self.folder, self.threads = folder.resolve(), threads
        manifest = _read_manifest(self.folder)
        self.input_shape: tuple[int, ...] = tuple(manifest["input"])
        """Of one input of a batch."""
        self.output_shape: tuple[int, ...] = tuple(manifest["output"])
        """Of one result."""
        try:
            self._library = ExportedLibrary(self.folder / LIBRARY, self.folder / PACKED)
        except LibraryError as error:
            kind = EnvironmentUnusable if error.code == UNUSABLE else BadData
            raise kind(f"{folder} cannot be loaded: {error}") from error
        except OSError as error:  # of the loader of libraries: another processor or an older C library
            raise EnvironmentUnusable(
                f"{folder / LIBRARY} cannot be loaded here: {error}; it needs {manifest.get('libc')}"
            ) from error

    @property
    def level(self) -> str:
        """The CPU level whose kernels run here."""
        return self._library.level

    def __call__(self, x: ArrayLike) -> NDArray[np.float32]:
        """Return the results (batch, *output_shape) for inputs x (batch, *input_shape), floats. Raises UsageError."""
        given = np.asarray(x)
        if given.dtype.kind != "f":
            raise UsageError(f"the model takes floating-point numbers, not {given.dtype}")
        if given.shape[1:] != self.input_shape or not given.ndim:
            sides = ", ".join(["batch", *map(str, self.input_shape)])
            raise UsageError(f"the model takes inputs of shape ({sides}), not {given.shape}")
        try:
            return self._library.run(given, self.output_shape, self.threads)
        except LibraryError as error:
            raise EnvironmentUnusable(f"the model did not run: {error}") from error

    def __repr__(self) -> str:
        return f"ExportedModel({str(self.folder)!r}, threads={self.threads})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder, self.threads)


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of an exported model whose files are those that it lists."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        listed = {name: manifest["files"][name] for name in (LIBRARY, PACKED)}
        manifest["input"], manifest["output"]
    except (ValueError, KeyError, TypeError) as error:
        raise BadData(f"{folder / MANIFEST} is no manifest of an exported model: export the model again") from error
    except OSError as error:
        raise BadData(f"{folder} is no exported model: {error}") from error
    for name, digest in listed.items():
        path = folder / name
        if not path.is_file() or hash_file(path) != digest:
            raise BadData(f"{path} is missing or was changed after the export: export the model again")
    return manifest
