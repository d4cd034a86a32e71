"""Compiling kernels, and keeping them on disk for all processes.

Numba's own files for this have numbers, and an index says which is which. Processes that compile two tiles of one
kernel at the same time may take the same number, and from then on one tile is loaded for the other: wrong results,
and no error. Here a file's name says what it holds, so that processes that race write the same file, each in one
step; and it is loaded only if it is whole.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import tempfile
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core.caching import FunctionCache
from numba.core.serialize import dumps

# Of all sources of kernels: where one changes, kernels on disk are out of date.
SOURCES = Path(__file__).parents[1]
VERSION = zlib.crc32(b"".join(path.read_bytes() for path in sorted(SOURCES.rglob("*.py"))))

T = TypeVar("T")

_DIGEST = hashlib.sha256().digest_size


# How all of our functions are compiled: without the interpreter's lock, division by 0 as NumPy has it.
FLAGS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


def compiled(function: Callable[..., T], parallel: bool = False) -> Callable[..., T]:
    """The function, to be compiled at its first call, or loaded where a process has done that before.

    Its free variables are constants in it. Where nothing can be kept, it says so once, and compiles every time.
    """
    return kept(numba.njit(parallel=parallel, **FLAGS)(function), function)


def kept(dispatcher: Any, function: Callable[..., Any], also: str = "") -> Any:
    """The dispatcher, told to keep what it compiles: where and as what this function says, and `also`."""
    try:
        dispatcher._cache = _Cache(function, also)
    except RuntimeError as error:  # no folder that could be written to
        _warn(error)
    return dispatcher


class _Cache(FunctionCache):
    """As Numba's `cache=True`, but for the files and for disks that take nothing."""

    def __init__(self, function: Callable[..., Any], also: str) -> None:
        super().__init__(function)
        name = ".".join(filter(None, [self._impl.filename_base, also]))
        self._cache_file = _Files(Path(self._cache_path), name)  # type: ignore[assignment]

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _warn(error)


class _Files:
    """A file for each kernel, signature and processor: a checksum, then what Numba rebuilds the kernel from."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name

    def load(self, key: tuple[Any, ...]) -> Any:
        """What was saved for the key; None where nothing was, or not all of it is there."""
        try:
            content = self._path(key).read_bytes()
        except OSError:
            return None
        found, data = content[:_DIGEST], content[_DIGEST:]
        return pickle.loads(data) if found == hashlib.sha256(data).digest() else None

    def save(self, key: tuple[Any, ...], data: Any) -> None:
        """Write the file, in one step. Raises OSError."""
        content = dumps(data)
        handle, name = tempfile.mkstemp(dir=self._folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(content).digest() + content)
            Path(name).replace(self._path(key))
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def _path(self, key: tuple[Any, ...]) -> Path:
        # The signature's words name its types; the rest of the key are the processor, and hashes of the function's
        # code and of the constants in it.
        signature, *rest = key
        text = repr((VERSION, numba.__version__, str(signature), rest))
        return self._folder / f"{self._name}.{hashlib.sha256(text.encode()).hexdigest()[:32]}.nbc"


def _warn(error: Exception) -> None:
    warnings.warn(
        f"compiled kernels cannot be kept ({error}), so every process compiles them anew, for seconds each: "
        "NUMBA_CACHE_DIR names a folder for them",
        stacklevel=3,
    )
