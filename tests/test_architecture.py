"""The tree is what the architecture page says: every folder has its floor, and the rules of the house are kept."""

import ast
import functools
import re
import runpy
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
RULES = SimpleNamespace(**runpy.run_path(str(ROOT / "tests" / "house_rules.py")))


def contracts() -> list[dict[str, object]]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def floors() -> list[str]:
    (layers,) = (contract["layers"] for contract in contracts() if contract["type"] == "layers")
    assert isinstance(layers, list)
    return layers


@functools.cache
def find_places() -> dict[str, list[str]]:
    found: dict[str, list[str]] = RULES.find_places(ROOT)
    return found


def test_every_module_of_latbench_stands_on_one_of_at_most_twelve_floors() -> None:
    assert len(floors()) <= 12
    named = Counter(name.strip() for floor in floors() for name in floor.split("|"))
    assert max(named.values()) == 1
    found = [path for path in (ROOT / "latbench").iterdir() if path.is_dir() or path.suffix == ".py"]
    inside = {f"latbench.{path.stem}" for path in found}
    rooms = {name for name in inside if not name.endswith(("__init__", "__main__", "__pycache__"))}
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


@pytest.mark.parametrize("rule", RULES.RULES)
def test_no_place_breaks_a_rule(rule: str) -> None:
    places = find_places()[rule]
    assert not places, f"{rule}: {len(places)} places\n" + "\n".join(places)


@pytest.mark.parametrize(
    ("source", "places"),
    [
        ("known = engine == 'numba'", 1),
        ("known = engine in ('cupy',)", 1),
        ("known = times['torch']", 1),
        ("known = times.get('openvino', 0)", 1),
        ("known = {'torch': 1, 'numba': 2}", 1),
        ("known = ['cupy', 'cublas']", 1),
        ("match engine:\n    case 'deepsparse':\n        pass", 1),
        ("known = 'torch_gpu'", 1),
        ("known = engine == NUMBA", 0),
        ("known = 'torch' in sys.modules and environment.get('torch')", 0),
        ("known = ('torch', 'pandas')", 0),
        ("import_module('numba')", 0),
    ],
)
def test_a_decision_by_an_engines_name_is_found(source: str, places: int) -> None:
    found = RULES.find_engine_names({Path("latbench/new.py"): ast.parse(source)}, RULES.read_engine_names(ROOT))
    assert len(found) == places


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def host(): ...", ["host"]),
        ("def places(x) -> int: ...", ["places"]),
        ("def build_grid(): ...", []),
        ("def _places(): ...", []),
        ("def fills_threads(n) -> bool: ...", []),
        ("@vector_code(Form)\ndef row_tile(): ...", []),
        ("class Plan:\n    def launches(self): ...", []),
    ],
)
def test_a_kernel_function_without_a_verb_is_found(source: str, found: list[str]) -> None:
    trees = {Path("sparse_kernels/cpu/x.py"): ast.parse(source), Path("sparse_kernels/nn.py"): ast.parse(source)}
    assert [place.split()[-1] for place in RULES.find_verbless(trees, RULES.read_verbs())] == found


def test_the_picture_shows_the_imports_of_today() -> None:
    script = ROOT / "tests" / "architecture_picture.py"
    drawn = subprocess.run([sys.executable, "-P", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"```mermaid\n{drawn.stdout}```" in PAGE, f"paste what python -P {script.relative_to(ROOT)} prints"
