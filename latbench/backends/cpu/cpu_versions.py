"""Which versions the times of a CPU's table belong to: of an engine's package, and of latbench's kernels that ran.

A row of latbench's own kernels names each family that ran, with its fingerprint (`latbench.base.engine_version`).
Rows from before there were fingerprints name none: they timed unknown kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from latbench.backends.installed_engines import list_cpu_versions
from latbench.base.bundled_data import is_bundled
from latbench.base.engine_registry import CPU_ENGINES
from latbench.base.engine_version import EngineVersion, parse_engine_version
from latbench.tables.schema import TIMED
from latbench.tables.storage import Place, hide_secrets
from sparse_kernels.fingerprints.cpu_families import fingerprint_cpu_family

if TYPE_CHECKING:
    import pandas as pd

DECIDING = ["backend", "op", "status", "backend_version"]
"""The columns of a table that tell the version of a row."""


@dataclass(frozen=True)
class CpuVersions:
    """The versions that are here now.

    Attributes
    ----------
    packages
        By engine; None where one is not installed.
    """

    packages: Mapping[str, str | None]

    @classmethod
    def find(cls) -> CpuVersions:
        """Return the versions of this installation."""
        return cls(list_cpu_versions())

    def describe(self, backend: str, families: Sequence[str] = ()) -> str | None:
        """Return the text for a time that is measured now.

        Parameters
        ----------
        backend
            The engine.
        families
            The families of latbench's kernels that ran.

        Returns
        -------
        str or None
            None where the engine is not installed.
        """
        package = self.packages.get(backend)
        if package is None:
            return None
        digits = {family: fingerprint_cpu_family(family) for family in families}
        return str(EngineVersion(package, {name: known for name, known in digits.items() if known is not None}))

    def current(self, table: pd.DataFrame) -> NDArray[np.bool_]:
        """Return for each row whether it timed what is here now.

        Rows of engines that are not installed stay: nothing else is here.

        Parameters
        ----------
        table
            With the columns `DECIDING`.

        Returns
        -------
        numpy.ndarray
            bool (rows,)
        """
        return _decide(table, self._holds)

    def _holds(self, backend: str, op: str, status: str, text: str | None) -> bool:
        if (package := self.packages.get(backend)) is None:
            return True
        version = parse_engine_version(text)
        return version is not None and version.package == package and not _is_old_kernel(backend, op, status, text)


def find_old_kernels(table: pd.DataFrame) -> NDArray[np.bool_]:
    """Return for each row whether it timed CPU kernels of latbench of another version, or of an unknown one.

    Parameters
    ----------
    table
        With the columns `DECIDING`.

    Returns
    -------
    numpy.ndarray
        bool (rows,)
    """
    return _decide(table, _is_old_kernel)


def describe_old_kernels(table: pd.DataFrame, place: str | Place) -> str | None:
    """Return in words how many times of a table belong to other kernels than this installation's; None for none.

    Parameters
    ----------
    table
        One row a point, with the columns `DECIDING`.
    place
        Where the table is, for the advice. One that came with latbench cannot be measured again.
    """
    ours = [name for name, engine in CPU_ENGINES.items() if engine.ours]
    own = table[table["backend"].isin(ours) & table["status"].isin(TIMED)]
    old = own[find_old_kernels(own)]
    if old.empty:
        return None
    families: set[str] = set()
    for text in set(old["backend_version"]):
        version = parse_engine_version(text)
        parts = {} if version is None else version.parts
        families |= {name for name, digits in parts.items() if fingerprint_cpu_family(name) != digits} or {"unknown"}
    named = hide_secrets(str(place))
    advice = "" if is_bundled(place) else f"; `latbench sweep --cpu --refresh {named}` tells which have moved"
    return (
        f"{len(old)} of {len(own)} times of latbench's kernels are of other versions than the installed ones "
        f"({', '.join(sorted(families))}){advice}"
    )


def _is_old_kernel(backend: str, op: str, status: str, text: str | None) -> bool:
    engine = CPU_ENGINES.get(backend)
    if engine is None or not engine.ours or status not in TIMED or op == "model":
        return False
    version = parse_engine_version(text)
    if version is None:  # nobody says which version it is, as in tables made by hand
        return False
    return not version.parts or any(
        fingerprint_cpu_family(family) != digits for family, digits in version.parts.items()
    )


def _decide(table: pd.DataFrame, decide: Callable[[str, str, str, str | None], bool]) -> NDArray[np.bool_]:
    """Return what `decide` says of each row, asked once for rows that are alike."""
    if table.empty:
        return np.empty(0, bool)
    kinds = table.groupby(DECIDING, dropna=False, observed=True, sort=False).ngroup().to_numpy()
    _, first = np.unique(kinds, return_index=True)
    alike = table[DECIDING].iloc[first]
    decided = np.array([decide(*row) for row in zip(*(alike[name] for name in DECIDING), strict=True)], bool)
    found: NDArray[np.bool_] = decided[kinds]
    return found
