"""A model exported to C, in Python: a callable of NumPy arrays, without torch, Numba or the rest of latbench."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from latbench.errors import BadData, EnvironmentUnusable, UsageError
from search.export.export_manifest import LIBRARY, PACKED, check_files, read_manifest
from sparse_kernels.cpu.export.exported_library import UNUSABLE, ExportedLibrary, LibraryError


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
        manifest = read_manifest(self.folder)
        check_files(self.folder, manifest, [LIBRARY, PACKED])
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
