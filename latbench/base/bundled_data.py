"""What latbench brings along: layer shapes of real networks, and tables measured on real machines to begin with.

They lie in `datasets` beside the package, in a wheel in `latbench/datasets`. Every command that reads a table takes
`bundled://NAME` for one of them.
"""

from __future__ import annotations

from pathlib import Path

from latbench.errors import EnvironmentUnusable, UsageError

SCHEME = "bundled"


def find_dataset_folder(name: str) -> Path:
    """The folder `datasets/name`. Raises EnvironmentUnusable where it is missing."""
    package = Path(__file__).parents[1]
    for parent in (package, package.parent):
        if (found := parent / "datasets" / name).is_dir():
            return found
    raise EnvironmentUnusable(f"no datasets/{name} beside {package}: latbench is not whole, install it again")


def list_bundled_tables() -> list[str]:
    """The names of the tables."""
    return sorted(path.name for path in find_dataset_folder("measured").iterdir() if path.is_dir())


def find_bundled_table(name: str) -> Path:
    """The folder of the table of that name. Raises UsageError, naming those that there are, for another."""
    if name not in (known := list_bundled_tables()):
        raise UsageError(f"{SCHEME}://{name}: no such table; there are {', '.join(known)}")
    return find_dataset_folder("measured") / name


def format_place(place: object) -> str:
    """A place as a person names it: `bundled://NAME` for a table that came with latbench, any other as it is."""
    if isinstance(place, Path) and place.parent == find_dataset_folder("measured"):
        return f"{SCHEME}://{place.name}"
    return str(place)
