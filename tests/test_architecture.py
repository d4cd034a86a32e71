"""The tree is what the architecture page says: every folder has its floor, and no folder is crowded."""

import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("latbench", "search", "cost_models", "sparse_kernels")
PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
MOST_FILES = 16  # in a folder, but for commands
CROWDED = {"search": 34, "latbench/backends": 24, "latbench/report": 17}
"""Folders that still hold more, and how many they may hold until they are split: the numbers only fall."""


def contracts() -> list[dict[str, object]]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def floors() -> list[str]:
    (layers,) = (contract["layers"] for contract in contracts() if contract["type"] == "layers")
    assert isinstance(layers, list)
    return layers


def folders() -> list[Path]:
    every = (path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return sorted(set(every))


def test_every_module_of_latbench_stands_on_one_of_at_most_twelve_floors() -> None:
    assert len(floors()) <= 12
    named = Counter(name.strip() for floor in floors() for name in floor.split("|"))
    assert max(named.values()) == 1
    inside = {f"latbench.{path.stem if path.is_file() else path.name}" for path in (ROOT / "latbench").iterdir()}
    rooms = {name for name in inside if not name.endswith(("__init__", "__pycache__", "py.typed"))}
    assert rooms == {name for name in named if name.startswith("latbench")}


def test_the_page_names_every_floor_and_every_file_that_it_names_is_there() -> None:
    for floor in floors():
        for name in floor.split("|"):
            assert f"`{name.strip().replace('.', '/')}`" in PAGE, name
    paths = re.findall(r"`((?:latbench|search|cost_models|sparse_kernels)/[\w/]+(?:\.py)?)`", PAGE)
    assert len(paths) > 20
    for path in paths:
        found = ROOT / path.replace("ENGINE", "numba")
        assert found.exists() or found.with_suffix(".py").exists(), path


@pytest.mark.parametrize("folder", folders(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_folder_holds_few_files(folder: Path) -> None:
    name = str(folder.relative_to(ROOT))
    files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    if name != "latbench/cli/commands":
        assert len(files) <= CROWDED.get(name, MOST_FILES)
