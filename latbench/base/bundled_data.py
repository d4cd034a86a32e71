"""Data that comes with latbench: layer shapes of real networks, and tables that were measured on real machines.

The data lies in `datasets` beside the package, in a wheel in `latbench/datasets`. Every command that reads a table
accepts `bundled://NAME`.
"""

from __future__ import annotations

from pathlib import Path

from latbench.errors import EnvironmentUnusable, UsageError

SCHEME = "bundled"


def find_dataset_folder(name: str) -> Path:
    """Return the folder `datasets/name`. Raises EnvironmentUnusable where it is missing."""
    package = Path(__file__).parents[1]
    for parent in (package, package.parent):
        if (found := parent / "datasets" / name).is_dir():
            return found
    raise EnvironmentUnusable(
        f"no datasets/{name} beside {package}: the installation is incomplete, install latbench again"
    )


def list_bundled_tables() -> list[str]:
    """Return the names of the bundled tables, sorted."""
    return sorted(path.name for path in find_dataset_folder("measured").iterdir() if path.is_dir())


def find_bundled_table(name: str) -> Path:
    """Return the folder of a bundled table. Raises UsageError for an unknown name."""
    if name not in (known := list_bundled_tables()):
        raise UsageError(f"{SCHEME}://{name}: no such table; there are {', '.join(known)}")
    return find_dataset_folder("measured") / name


def is_bundled(place: object) -> bool:
    """Return whether a place, by any of its names, is a bundled table."""
    text = str(place)
    if "://" in text:
        return text.startswith(f"{SCHEME}://")
    return Path(text).resolve().parent == find_dataset_folder("measured").resolve()


def format_place(place: object) -> str:
    """Return a place as users name it: `bundled://NAME` for a bundled table, else its path or URI."""
    if isinstance(place, Path) and place.parent == find_dataset_folder("measured"):
        return f"{SCHEME}://{place.name}"
    return str(place)
