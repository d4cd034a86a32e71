"""Functions and modules that code names in strings are there.

Workers, registries and the entry point import a function by "module:function", and engines a module by its dotted
name. Nothing else tells when such a name is stale before the code runs, some of it on a GPU only.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from latbench.base.engine_registry import CPU_ENGINES, GPU_ENGINES
from latbench.sweeping.gpu_roofline import GpuPace
from latbench.sweeping.roofline_pace import REFERENCE_KERNELS, CpuPace
from search.whole_model.model_engines import DENSE_ENGINES

ROOT = Path(__file__).parents[1]
PACKAGES = ("latbench", "search", "cost_models", "sparse_kernels")
NAME = re.compile(rf"(?:{'|'.join(PACKAGES)})(?:\.\w+)*:\w+")


def named(source: str) -> Iterator[str]:
    """Every string of a module that is "module:function"."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and NAME.fullmatch(node.value):
            yield node.value


def is_there(name: str) -> bool:
    """Whether a module of this tree defines the function, without importing what it needs."""
    module, _, function = name.partition(":")
    path = ROOT / module.replace(".", "/")
    files = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
    if not files:
        return False
    body = ast.parse(files[0].read_text()).body
    return not function or any(
        isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == function for node in body
    )


def every_name() -> list[str]:
    sources = [path.read_text() for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    paces = [f"{pace.module}:{kernel}" for pace in (CpuPace, GpuPace) for kernel in REFERENCE_KERNELS]
    engines = [f"{engine.module}:prepare" for engine in (*CPU_ENGINES.values(), *GPU_ENGINES.values())]
    found = {name for source in sources for name in named(source)}
    return sorted({*found, *scripts.values(), *paces, *engines, *DENSE_ENGINES.values()})


@pytest.mark.parametrize("name", every_name())
def test_a_function_that_is_named_in_a_string_is_there(name: str) -> None:
    assert is_there(name)


def test_all_of_them_are_found() -> None:
    assert len(every_name()) > 40


@pytest.mark.parametrize(
    "name",
    [
        "latbench.sweeping.sweep:no_such_function",
        "latbench.no_such_module:prepare",
        "latbench:prepare",
        "latbench.backends:prepare",
    ],
)
def test_a_stale_name_is_found(name: str) -> None:
    assert list(named(f"task = {name!r}")) == [name] and not is_there(name)


def test_a_path_or_a_sentence_is_no_name() -> None:
    assert not list(named("x = ['my_task.py:task', 'package.module:task', 'latbench: a refusal', 'latbench:']"))
