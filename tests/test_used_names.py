"""What tests, benchmarks, experiments and notebooks use of our modules is there: no other test runs all of them."""

import ast
import importlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("latbench", "search", "cost_models", "sparse_kernels")
FILES = sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "cost_models").rglob("*.ipynb")])


def read_source(path: Path) -> str:
    """Return a file's Python; of a notebook that of its code cells, one after the other."""
    if path.suffix == ".py":
        return path.read_text()
    cells = [cell["source"] for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    return "\n".join("".join(lines) for lines in cells)


def import_ours(name: str) -> ModuleType | None:
    """Import a module of ours; return None where there is none of that name, or what it imports is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def find_modules(tree: ast.Module) -> Iterator[tuple[str, str, int]]:
    """Yield the local name, the dotted name and the line of whatever is imported from our packages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in PACKAGES:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}", node.lineno
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in PACKAGES and (alias.asname or "." not in alias.name):
                    yield alias.asname or alias.name, alias.name, node.lineno


def find_bound(tree: ast.Module) -> set[str]:
    """Return the names that arguments and assignments bind: such a name may be no module where it is used."""
    arguments = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    return arguments | {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    }


def find_missing(source: str) -> list[str]:
    """Return the names that a source takes from our modules and that these do not have."""
    tree = ast.parse(source)
    missing, bound = [], find_bound(tree)
    owners: dict[str, Any] = {}
    for local, dotted, line in find_modules(tree):
        package, _, name = dotted.rpartition(".")
        module = import_ours(dotted)
        parent = import_ours(package) if package else None
        if module is not None:
            owners[local] = module
        elif parent is not None and not hasattr(parent, name):
            missing.append(f"line {line}: {dotted}")
        elif inspect.isfunction(found := getattr(parent, name, None)):  # in the place of a module of that name
            owners[local] = found
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner, name = node.value.id, node.attr
        elif is_patch(node):
            owner, name = node.args[0].id, node.args[1].value
        else:
            continue
        if owner in owners and owner not in bound and not hasattr(owners[owner], name):
            missing.append(f"line {node.lineno}: {owners[owner].__name__}.{name}")
    return missing


def is_patch(node: ast.AST) -> bool:
    """Return whether a node is `monkeypatch.setattr(name, "attribute", ...)` or the like."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("setattr", "delattr")
        and len(node.args) > 1
        and isinstance(node.args[0], ast.Name)
        and isinstance(node.args[1], ast.Constant)
    )


@pytest.mark.filterwarnings("ignore")  # of what modules import
@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_of_our_modules_are_there(path: Path) -> None:
    assert not find_missing(read_source(path))


def test_missing_names_are_found() -> None:
    source = """
from latbench.tables import table as tables, no_table
from latbench.errors import BadData, NoSuchError
from latbench.cli.commands.layers import layers

def test(monkeypatch, files):
    tables.no_function()
    layers.no_such_layer()
    files.no_module_here()
    monkeypatch.setattr(tables, "no_name", 1)
    monkeypatch.setattr(tables, "read_table", 1)
"""
    assert {line.partition(": ")[2] for line in find_missing(source)} == {
        "latbench.tables.no_table",
        "latbench.errors.NoSuchError",
        "latbench.tables.table.no_function",
        "layers.no_such_layer",
        "latbench.tables.table.no_name",
    }
