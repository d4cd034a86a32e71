"""`import latbench as lb`: every name, what it loads, and what it costs."""

import ast
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import latbench
from latbench.base.public_names import PUBLIC_NAMES, find_public

HEAVY = {
    "torch",
    "numpy",
    "pandas",
    "numba",
    "sklearn",
    "scipy",
    "pyarrow",
    "search",
    "cost_models",
    "sparse_kernels",
}


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_every_name_is_what_its_module_has(name: str) -> None:
    module, _, attribute = PUBLIC_NAMES[name].partition(":")
    found = getattr(latbench, name)
    assert found is getattr(sys.modules[module], attribute) if attribute else found is sys.modules[module]
    assert found is find_public(name)


def test_the_version_is_that_of_the_installed_package() -> None:
    assert latbench.__version__ == importlib.metadata.version("latbench")


def test_all_names_are_listed_and_others_are_refused() -> None:
    unknown = "find"
    assert {*PUBLIC_NAMES, "__version__", "MOST_SEED"} <= set(dir(latbench))
    with pytest.raises(AttributeError, match=r"no attribute 'find'; it has load, .*Transfer"):
        getattr(latbench, unknown)


def test_type_checkers_are_told_the_same() -> None:
    stub = ast.parse(Path(latbench.__file__).with_suffix(".pyi").read_text())
    told = {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert told == {**PUBLIC_NAMES, "patterns": "sparse_kernels:patterns"}
    [named] = [node.value for node in stub.body if isinstance(node, ast.Assign)]
    assert set(ast.literal_eval(named)) == {*PUBLIC_NAMES, "MOST_SEED", "__version__"}


def test_the_import_loads_nothing_heavy() -> None:
    script = "import sys, latbench as lb; dir(lb); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not HEAVY & {name.partition(".")[0] for name in done.stdout.split()}


def test_a_name_loads_no_more_than_it_needs() -> None:
    script = "import sys, latbench as lb; lb.read_table; lb.solve; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"torch", "numba", "sklearn"} & set(done.stdout.split())
