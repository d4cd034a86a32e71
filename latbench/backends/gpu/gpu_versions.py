"""What a row of a GPU's table timed, by version: the text in its column `backend_version`.

    2.11.0 (cublas 13.1.0, driver 580.159.04)                        torch's dense product
    14.2.0 (driver 580.159.04, nvrtc 13.0, vector_sm90 caa235b3)     our kernels, by family

A library, the driver, or the family of our kernels that ran (and those that were asked before it and refused): where
one of them has another version now, the row is of something else, and a sweep measures its point again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from latbench.base.engine_registry import CUDA_KERNELS, GPU_ENGINES, NUMBA_CUDA_KERNELS
from latbench.base.engine_version import EngineVersion, parse_engine_version
from latbench.workloads.points import Point

if TYPE_CHECKING:
    import pandas as pd

DRIVER = "driver"
_NUMBA = "numba_"  # before the name of a file of sparse_kernels.numba_cuda
_DECIDING = ["backend", "kernel_requested", "op", "format", "n", "backend_version"]  # what `current` reads


@dataclass(frozen=True)
class Versions:
    """The versions that are here now.

    Parameters
    ----------
    packages
        By backend, of those that are installed.
    libraries
        By the names of `latbench.machines.cuda_libraries`, and the driver's; None where it is not known.
    loaded
        The same by process, as it has loaded them: torch and CuPy may each bring a library of their own.
    architecture
        What our CUDA kernels are compiled for; None where there are none for this GPU.
    """

    packages: Mapping[str, str]
    libraries: Mapping[str, str | None] = field(default_factory=dict)
    loaded: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    architecture: str | None = None

    def text(self, point: Point, families: Sequence[str] | None = None) -> str | None:
        """Return the text for a point that is measured now.

        Parameters
        ----------
        point
            What is measured.
        families
            Our kernel families that were asked until one ran it; by default all that may.

        Returns
        -------
        str or None
            None where its backend is not installed.
        """
        package = self.packages.get(point.backend)
        if package is None:
            return None
        asked = (
            list_kernel_families(point.backend, point.shape.op, point.pattern.format, point.shape.n)
            if families is None
            else families
        )
        parts = {**self._libraries(point.backend, point.kernel), **self._fingerprints(asked)}
        return str(EngineVersion(package, parts))

    def current(self, table: pd.DataFrame) -> NDArray[np.bool_]:
        """Return whether each row of a table timed what is here now.

        Parameters
        ----------
        table
            With the columns backend, kernel_requested, op, format, n and backend_version.

        Returns
        -------
        numpy.ndarray
            bool (rows,)
        """
        rows = list(zip(*(table[name] for name in _DECIDING), strict=True))
        known = {row: self._holds(*row) for row in set(rows)}
        return np.array([known[row] for row in rows], bool)

    def _holds(self, backend: str, kernel: str, op: str, format: str, n: int, text: str | None) -> bool:
        found = parse_engine_version(text)
        if found is None or backend not in GPU_ENGINES or found.package != self.packages.get(backend):
            return False
        parts = found.parts
        libraries = self._libraries(backend, kernel)
        families = [name for name in parts if name not in libraries]
        # The first of those that are asked now, until one ran it. Of a layer that none takes, a row names none.
        asked = list_kernel_families(backend, op, format, n)
        first = set(families) == set(asked[: len(families)]) and bool(families) == bool(asked)
        return first and parts == {**libraries, **self._fingerprints(families)}

    def _libraries(self, backend: str, kernel: str) -> dict[str, str]:
        of_kernel, loaded = GPU_ENGINES[backend].libraries, self.loaded.get(GPU_ENGINES[backend].process, {})
        names = (DRIVER, *of_kernel.get(kernel, of_kernel.get("", ())))
        known = {name: loaded.get(name) or self.libraries.get(name) for name in names}
        return {name: version for name, version in known.items() if version is not None}

    def _fingerprints(self, families: Sequence[str]) -> dict[str, str]:
        """Return the fingerprint by family, without families that do not exist (any more)."""
        from sparse_kernels.cuda import family_fingerprint as cuda
        from sparse_kernels.cuda.variants import FAMILIES
        from sparse_kernels.fingerprints import numba_cuda_formats as numba

        found = {}
        for name in families:
            module = name.removeprefix(_NUMBA)
            if name in FAMILIES and self.architecture is not None:
                found[name] = cuda.fingerprint_family(name, self.architecture)
            elif name != module and module in numba.MODULES.values():
                found[name] = numba.fingerprint_module(module)
        return found


def list_kernel_families(backend: str, op: str, format: str, n: int) -> tuple[str, ...]:
    """Return our kernel families that may run a layer of n columns, in the order in which they are asked.

    () of other backends.
    """
    from sparse_kernels.cuda import family_fingerprint as cuda
    from sparse_kernels.fingerprints import numba_cuda_formats as numba

    kernels = GPU_ENGINES[backend].kernels if backend in GPU_ENGINES else ""
    if kernels == CUDA_KERNELS:
        return cuda.list_families(op, format, n)
    if kernels == NUMBA_CUDA_KERNELS and format in numba.MODULES:
        return (_NUMBA + numba.MODULES[format],)
    return ()
