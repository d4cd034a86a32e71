"""The Python code of README.md runs with bundled tables, a small model and made-up numbers."""

import ast
import importlib
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[1]
TABLE, OTHER_TABLE = "amd-epyc-zen4-2-threads", "amd-epyc-zen5-2-threads"
WORKLOAD = """\
name: attention
source: made up
layers:
  - {name: block.q, op: linear, m: 768, k: 768, n: 128}
  - {name: block.k, op: linear, m: 768, k: 768, n: 128}
  - {name: block.v, op: linear, m: 768, k: 768, n: 128}
  - {name: up, op: linear, m: 3072, k: 768, n: 128}
  - {name: fc, op: linear, m: 768, k: 3072, n: 128}
"""


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


def block_with(text: str) -> str:
    (block,) = (block for block in blocks() if text in block)
    return block


def missing_imports(code: str) -> list[str]:
    """The names that a block imports and that are not there."""
    missing = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                if not hasattr(module, alias.name):
                    missing.append(f"{node.module}.{alias.name}")
    return missing


def test_every_import_is_there() -> None:
    assert len(blocks()) >= 4
    assert [name for block in blocks() for name in missing_imports(block)] == []
    assert missing_imports("from search import solve, nothing") == ["search.nothing"]


def test_the_library_runs_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, place in ((TABLE, "table"), (OTHER_TABLE, "other")):
        shutil.copytree(ROOT / "datasets" / "measured" / name, tmp_path / place)
    (tmp_path / "workload.yaml").write_text(WORKLOAD)
    monkeypatch.chdir(tmp_path)
    code = block_with("problem.frontier()")
    # The frontier of so many options takes minutes, and is what other tests are about.
    limited, found = code.index("problem = problem.limited"), code.index("found =")
    restricted = code[:found] + 'problem = problem.limited(patterns={"*": ["vector:32"]})\n' + code[found:]
    values: dict[str, Any] = {
        "seconds": [np.array([2.0, 1.0]), np.array([4.0, 3.0])],
        "errors": [np.array([0.0, 0.5]), np.array([0.0, 0.1])],
        "budget": 5.0,
        "other": [np.array([2.0, 1.0]), np.array([4.0, 3.0])],
        "other_budget": 5.5,
    }
    exec(code[:limited].replace('"table"', '"other"'), values)
    values["other_device"] = values.pop("problem").limited(
        tied_in_each=[["*.q", "*.k", "*.v"]], excluded=["fc"], maximum={"*": 0.9}, patterns={"*": ["vector:32"]}
    )
    exec(restricted, values)
    assert values["found"].speedup.low >= 2.0
    assert len(values["frame"]) > 800


def test_a_model_is_converted_as_shown() -> None:
    torch.manual_seed(0)
    names = {"fc1": torch.nn.Linear(64, 96), "relu": torch.nn.ReLU(), "fc2": torch.nn.Linear(96, 8)}
    model = torch.nn.Sequential()
    for name, module in names.items():
        model.add_module(name, module)
    values: dict[str, Any] = {"model": model.eval(), "example_input": torch.randn(16, 64)}
    exec(block_with("fast = convert("), values)
    with torch.no_grad():
        names["fc1"].weight *= torch.from_numpy(values["mask"])
        expected = model(values["example_input"])
    torch.testing.assert_close(values["fast"](values["example_input"]), expected, atol=1e-5, rtol=1e-5)
