"""Compile kernels, and keep them on disk for all processes.

Numba's own cache numbers its files, and an index says which number is which kernel. Two processes that compile two
tiles of one kernel at the same time may take the same number. From then on one tile is loaded for the other: wrong
results, and no error. Here a file's name says what it holds, so processes that race write the same file, each in one
step. A file is loaded only if it is whole.

Numba would also put them beside the sources, where an uninstall leaves them. Ours lie in the user's cache folder, and
installations of the same version share them.
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
from typing import Any, TypeVar, cast

import numba

from sparse_kernels.cpu.runtime.cache_folder import find_user_cache
from sparse_kernels.cpu.runtime.numba_internals import (
    FunctionCache,
    attach_cache,
    build_cache_implementation,
    serialize,
)

# Sources of all kernels: after a change of one, kernels on disk are out of date.
SOURCES = Path(__file__).parents[1]
VERSION = zlib.crc32(b"".join(path.read_bytes() for path in sorted(SOURCES.rglob("*.py"))))

F = TypeVar("F", bound=Callable[..., Any])

_DIGEST = hashlib.sha256().digest_size


# How all of our functions are compiled: without the interpreter's lock, with division by 0 as in NumPy, and without
# what lets C call them.
FLAGS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}


def inline(function: F) -> F:
    """Return a function that kernels inline before they are typed, so that literals stay literals in it."""
    return cast(F, numba.njit(inline="always")(function))


def compile_cached(function: F, parallel: bool = False) -> F:
    """Return the function, compiled at its first call, or loaded from disk if a process has compiled it before.

    Its free variables are constants. Where the disk takes nothing, it warns once and compiles in every process.
    """
    return cast(F, cache_on_disk(numba.njit(parallel=parallel, **FLAGS)(function), function))


def cache_on_disk(dispatcher: Any, function: Callable[..., Any], suffix: str = "") -> Any:
    """Return the dispatcher, which now keeps what it compiles under the name of `function` and a suffix."""
    try:
        attach_cache(dispatcher, _Cache(function, suffix))
    except RuntimeError as error:  # no folder that could be written to
        warnings.warn(describe_unkept(error), stacklevel=2)
    return dispatcher


class _Cache(FunctionCache):
    """Numba's `cache=True` with files of our own, for disks that may refuse to write."""

    _impl_class = build_cache_implementation(lambda: find_user_cache("kernels"))

    def __init__(self, function: Callable[..., Any], suffix: str) -> None:
        inherited: Any = super()  # Numba's class has no types
        inherited.__init__(function)
        name = ".".join(filter(None, [self._impl.filename_base, suffix]))
        stamp = self._impl.locator.get_source_stamp()
        self._cache_file = KernelFiles(Path(self._cache_path), name, stamp)  # type: ignore[assignment]

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            inherited: Any = super()
            inherited.save_overload(sig, data)
        except OSError as error:
            warnings.warn(describe_unkept(error), stacklevel=2)


class KernelFiles:
    """A file for each kernel, signature and processor: a checksum, then what a kernel is rebuilt from."""

    def __init__(self, folder: Path, name: str, stamp: bytes = b"") -> None:
        self._folder, self._name, self._stamp = folder, name, stamp

    def load(self, key: tuple[Any, ...]) -> Any:
        """Return what was saved for the key; None if nothing was saved, or the file is damaged."""
        try:
            content = self._path(key).read_bytes()
        except OSError:
            return None
        found, data = content[:_DIGEST], content[_DIGEST:]
        return pickle.loads(data) if found == hashlib.sha256(data).digest() else None

    def save(self, key: tuple[Any, ...], data: Any) -> None:
        """Write the file, in one step. Raises OSError."""
        content = serialize(data)
        handle, name = tempfile.mkstemp(dir=self._folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(content).digest() + content)
            Path(name).replace(self._path(key))
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def _path(self, key: tuple[Any, ...]) -> Path:
        # The text of the signature names its types. The rest of the key is the processor, and hashes of the
        # function's code and of the constants in it. The stamp is of the function's source file: those of other
        # packages are not in VERSION.
        signature, *rest = key
        text = repr((VERSION, self._stamp, numba.__version__, str(signature), rest))
        return self._folder / f"{self._name}.{hashlib.sha256(text.encode()).hexdigest()[:32]}.nbc"


def describe_unkept(error: Exception) -> str:
    """Return a warning for a disk that keeps no kernels."""
    return (
        f"compiled kernels cannot be kept ({error}), so every process compiles them anew, which takes seconds each: "
        "set LATBENCH_CACHE to a folder for them"
    )
