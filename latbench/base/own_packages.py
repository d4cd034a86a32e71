"""The packages of this project beside files of a user with the same names.

A user's `search.py` beside a task or a server script is found under the name of our package `search`. Then both share
the name: `import search` gives the user's module with its own attributes alone, and our modules below that name, such
as `search.problem.limits`, are found through its `__path__`. Our code imports only such modules, never a name from
`search` itself.

A module in a user's file runs at the first use of one of its names, because nothing may ever import it. Where a
user's package holds a module that ours holds too, nobody can tell which is meant: that is refused.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from latbench.errors import UsageError

FOLDER = Path(__file__).resolve().parents[2]
"""The folder that holds our packages."""

NAMES = ("search", "cost_models", "sparse_kernels")
"""Our packages beside `latbench`."""

_waiting: set[str] = set()
_lock = threading.RLock()


def share_names(folder: Path | None = None) -> None:
    """Let our packages be imported beside a user's modules with their names.

    Parameters
    ----------
    folder
        Where the user's modules lie, which then come before ours. By default those count that Python would find now.

    Raises
    ------
    UsageError
        A user's package has modules that ours has too. The message names the file to rename.
    """
    for name in NAMES:
        if (spec := _find_foreign(name, folder)) is None:
            continue
        if any(_list_modules(Path(place)) for place in spec.submodule_search_locations or ()) or spec.origin:
            _refuse_same_modules(name, spec)
            _share(name, spec)
        elif name not in sys.modules:  # a folder of other files, such as data, that Python would take for ours
            _import_own(name)


def _find_foreign(name: str, folder: Path | None) -> ModuleSpec | None:
    """Return where a module that is not ours would come from; None if there is none, or it is shared already."""
    loaded = sys.modules.get(name)
    try:
        spec = importlib.util.find_spec(name) if folder is None else PathFinder.find_spec(name, [str(folder)])
    except (ValueError, ImportError):  # a module that was made by hand
        return None
    if spec is None or (isinstance(loaded, _SharedModule) and loaded.__spec__ == spec):
        return None
    found = [Path(place) for place in spec.submodule_search_locations or [spec.origin or ""]]
    if any(_is_ours(name, place) or (place.parent / "latbench" / "__init__.py").is_file() for place in found):
        return None
    return spec


def _is_ours(name: str, place: Path) -> bool:
    return place.resolve() == FOLDER / name


def _list_modules(folder: Path) -> set[str]:
    """List the names of the modules and packages in a folder."""
    if not folder.is_dir():
        return set()
    files = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/*.py")}
    return files - {"__init__", "__main__"}


def _refuse_same_modules(name: str, spec: ModuleSpec) -> None:
    for place in map(Path, spec.submodule_search_locations or ()):
        if same := sorted(_list_modules(place) & _list_modules(FOLDER / name)):
            raise UsageError(
                f"{place / same[0]} has the name of a module of latbench, {name}.{same[0]}, so one of both could not "
                f"be imported: rename the folder {place}"
            )


def _import_own(name: str) -> None:
    spec = importlib.util.spec_from_file_location(name, FOLDER / name / "__init__.py")
    assert spec is not None and spec.loader is not None  # a .py file always has both
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


def _share(name: str, spec: ModuleSpec) -> None:
    """Put the user's module in place, loaded or still to be run, with the way to ours."""
    module = sys.modules.get(name)
    if module is None or module.__spec__ != spec:
        module = importlib.util.module_from_spec(spec)
        _waiting.add(name)
        sys.modules[name] = module
    paths = [str(place) for place in spec.submodule_search_locations or ()]
    module.__path__ = [*paths, str(FOLDER / name)]
    if type(module) is ModuleType:
        module.__class__ = _SharedModule


class _SharedModule(ModuleType):
    """A user's module that has the name of one of our packages."""

    def __getattr__(self, name: str) -> Any:
        """Run the module if it has not run yet."""
        with _lock:
            if self.__name__ in _waiting and self.__spec__ is not None and self.__spec__.loader is not None:
                _waiting.discard(self.__name__)
                try:
                    self.__spec__.loader.exec_module(self)
                except BaseException:
                    _waiting.add(self.__name__)
                    raise
        if name in self.__dict__:
            return self.__dict__[name]
        inner = self.__dict__.get("__getattr__")
        if inner is not None:
            return inner(name)
        raise AttributeError(
            f"module {self.__name__!r} has no attribute {name!r}, see {self.__dict__.get('__file__')}"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        """Do as modules do, but for our modules, which imports would set as attributes."""
        ours = isinstance(value, ModuleType) and value is sys.modules.get(f"{self.__name__}.{name}")
        if not (ours and str(getattr(value, "__file__", "")).startswith(str(FOLDER / self.__name__))):
            super().__setattr__(name, value)
