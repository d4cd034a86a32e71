"""Call an exported library from Python, by ctypes: layers by name, NumPy arrays in and out.

It needs neither Numba nor a compiler. Calls release Python's lock, so threads may call one model at the same time.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from ctypes import POINTER, byref, c_char, c_char_p, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from sparse_kernels.plan_protocol import Array

BAD_ARGUMENT, UNUSABLE, BAD_FILE = 2, 3, 5


class LibraryError(Exception):
    """What the library refused. code: as `latbench.h` lists them."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class _Error(ctypes.Structure):
    _fields_ = (("code", c_int), ("text", c_char * 512))


class _LayerFacts(ctypes.Structure):
    _fields_ = (
        ("name", c_char_p), ("kind", c_int), ("outputs", c_int64), ("inputs", c_int64), ("x", c_int64 * 3),
        ("y", c_int64 * 3),
    )  # fmt: skip


_loads = itertools.count()


def find_new_path(library: Path) -> str:
    """Return a path of the library that this process has not used yet.

    A system's loader knows libraries by their paths. It would give the one that lay there before, where an export has
    replaced it.
    """
    return f"{library.parent}/{'./' * next(_loads)}{library.name}"


class ExportedLibrary:
    """A model of an exported library, opened from its packed file."""

    def __init__(self, library: Path, packed: Path, level: str | None = None) -> None:
        """Open a packed file for the most able CPU level, or the one that is named. Raises LibraryError."""
        self._handle: int | None = None
        self._library: Any = ctypes.CDLL(find_new_path(library))
        _declare(self._library)
        error = _Error()
        self._handle = self._library.latbench_open(
            str(packed).encode(), None if level is None else level.encode(), byref(error)
        )
        if not self._handle:
            _refuse(error)

    @property
    def level(self) -> str:
        """The CPU level in use."""
        name: bytes = self._library.latbench_level(self._get_handle())
        return name.decode()

    @property
    def layers(self) -> list[str]:
        """The names of the layers."""
        return [
            self._describe(i).name.decode() for i in range(self._library.latbench_count_layers(self._get_handle()))
        ]

    def name_kernel(self, name: str, size: int, threads: int = 1) -> str:
        """Return the name of the kernel that runs so many tokens or images of a layer. Raises LibraryError."""
        layer = self._find(name)
        found: bytes | None = self._library.latbench_kernel(self._handle, layer, size, threads)
        if found is None:
            raise LibraryError(BAD_ARGUMENT, f"no kernel runs {size} tokens or images in {threads} threads")
        return found.decode()

    def linear(self, name: str, x: Array, threads: int = 1) -> Array:
        """Return the result of a linear layer for x (tokens, features). Raises LibraryError."""
        layer, x = self._find(name), _read_floats(x, "tokens, features")
        y, error = np.empty((x.shape[0], self._describe(layer).outputs), np.float32), _Error()
        if self._library.latbench_linear(
            self._handle, layer, x.ctypes.data, *x.shape, y.ctypes.data, y.shape[1], threads, byref(error)
        ):
            _refuse(error)
        return y

    def conv2d(self, name: str, x: Array, threads: int = 1) -> Array:
        """Return the result of a convolution for images (batch, channels, height, width). Raises LibraryError."""
        layer, x = self._find(name), _read_floats(x, "batch, channels, height, width")
        y, error = np.empty((x.shape[0], *self._describe(layer).y), np.float32), _Error()
        if self._library.latbench_conv2d(
            self._handle, layer, x.ctypes.data, *x.shape, y.ctypes.data, y.size, threads, byref(error)
        ):
            _refuse(error)
        return y

    def run(self, x: Array, outputs: tuple[int, ...], threads: int = 1) -> Array:
        """Return the results of the whole chain for x (batch, ...), `outputs` each. Raises LibraryError."""
        handle = self._get_handle()
        x = np.ascontiguousarray(x, np.float32)
        y, error = np.empty((x.shape[0], *outputs), np.float32), _Error()
        inputs = math.prod(x.shape[1:])
        if self._library.latbench_run(
            handle, x.ctypes.data, x.shape[0], inputs, y.ctypes.data, math.prod(outputs), threads, byref(error)
        ):
            _refuse(error)
        return y

    def close(self) -> None:
        """Close the model; it cannot be called any more."""
        handle, self._handle = self._handle, None
        if handle:
            self._library.latbench_close(handle)

    def __del__(self) -> None:
        self.close()

    def _get_handle(self) -> int:
        if self._handle is None:
            raise LibraryError(BAD_ARGUMENT, "the model is closed: open it again")
        return self._handle

    def _find(self, name: str) -> int:
        layer: int = self._library.latbench_find(self._get_handle(), name.encode())
        if layer < 0:
            raise LibraryError(BAD_ARGUMENT, f"there is no layer {name!r}: the model has {', '.join(self.layers)}")
        return layer

    def _describe(self, layer: int) -> Any:
        found, error = _LayerFacts(), _Error()
        if self._library.latbench_describe(self._handle, layer, byref(found), byref(error)):
            _refuse(error)
        return found


def _declare(library: Any) -> None:
    """Declare the functions of `latbench.h`: ctypes would pass addresses as int."""
    error, floats = POINTER(_Error), c_void_p
    library.latbench_open.restype, library.latbench_open.argtypes = c_void_p, [c_char_p, c_char_p, error]
    library.latbench_close.restype, library.latbench_close.argtypes = None, [c_void_p]
    library.latbench_level.restype, library.latbench_level.argtypes = c_char_p, [c_void_p]
    library.latbench_kernel.restype = c_char_p
    library.latbench_kernel.argtypes = [c_void_p, c_int, c_int64, c_int]
    library.latbench_count_layers.argtypes = [c_void_p]
    library.latbench_find.argtypes = [c_void_p, c_char_p]
    library.latbench_describe.argtypes = [c_void_p, c_int, POINTER(_LayerFacts), error]
    library.latbench_linear.argtypes = [c_void_p, c_int, floats, *[c_int64] * 2, floats, c_int64, c_int, error]
    library.latbench_conv2d.argtypes = [c_void_p, c_int, floats, *[c_int64] * 4, floats, c_int64, c_int, error]
    if hasattr(library, "latbench_run"):  # only of whole models
        library.latbench_run.argtypes = [c_void_p, floats, *[c_int64] * 2, floats, c_int64, c_int, error]


def _read_floats(x: Array, sides: str) -> Array:
    """Return x as C takes it. Raises LibraryError unless it has these sides."""
    if x.ndim != sides.count(",") + 1:
        raise LibraryError(BAD_ARGUMENT, f"x has {x.ndim} dimensions, and the layer takes ({sides})")
    return np.ascontiguousarray(x, np.float32)


def _refuse(error: _Error) -> None:
    raise LibraryError(error.code, error.text.decode())
