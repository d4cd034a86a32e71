"""The Python code of README.md and of the pages in docs runs. A slow test runs that of the tutorials.

Names that a page leaves to its readers, such as `model`, are given to its blocks.
"""

import ast
import importlib
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import made_profile
import numpy as np
import pytest
import torch

from latbench.base.public_names import PUBLIC_NAMES

ROOT = Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT)): re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
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


def block_with(page: str, text: str) -> str:
    (block,) = (block for block in PAGES[page] if text in block)
    return block


def missing_names(code: str) -> list[str]:
    """The names that a block imports, or takes from `latbench` as `lb`, and that are not there."""
    missing = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            missing += [f"{node.module}.{alias.name}" for alias in node.names if not hasattr(module, alias.name)]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "lb":
            known = hasattr(importlib.import_module("latbench"), node.attr)
            missing += [] if known else [f"latbench.{node.attr}"]
    return missing


@pytest.mark.parametrize("page", [page for page, blocks in PAGES.items() if blocks])
def test_every_name_is_there(page: str) -> None:
    assert [name for block in PAGES[page] for name in missing_names(block)] == []


def test_every_name_that_a_text_gives_is_public() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]
    given = {name for page in pages for name in re.findall(r"\blb\.(\w+)", page.read_text())}
    assert len(given) > 15 and given <= set(PUBLIC_NAMES)


def test_a_name_that_is_not_there_would_be_found() -> None:
    assert missing_names("from search import solve, nothing") == ["search.nothing"]
    assert missing_names("import latbench as lb\nlb.no_such_name(1)") == ["latbench.no_such_name"]


def test_the_pages_with_code_are_those_that_tests_run() -> None:
    by_hand = {"README.md", "docs/how-to/python_library.md", "docs/how-to/train_under_masks.md"}
    as_they_are = {"docs/how-to/bfloat16.md", "docs/how-to/int8.md", "docs/how-to/work_with_tables.md"}
    found = {page for page, blocks in PAGES.items() if blocks}
    assert found == by_hand | as_they_are | {page for page in found if page.startswith("docs/tutorials/")}


@pytest.mark.parametrize("page", ["bfloat16", "int8", "work_with_tables"])
def test_a_page_runs_as_it_is(page: str) -> None:
    values: dict[str, Any] = {}
    for block in PAGES[f"docs/how-to/{page}.md"]:
        exec(block, values)


@pytest.fixture
def readme_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The task of README.md as the file my_task.py of the current folder."""
    path = tmp_path / "my_task.py"
    path.write_text(block_with("README.md", "def calibration"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_task", raising=False)
    return path


def test_the_task_of_the_readme_is_a_task(readme_task: Path) -> None:
    from search.check_task import STEPS, check_task
    from search.task import load_task

    assert sum(bool(line.strip()) for line in readme_task.read_text().splitlines()) <= 15
    facts = check_task(load_task(str(readme_task)), set(STEPS) - {"training"})
    assert (facts.batch, facts.batches) == (64, 6)


def test_the_pruned_task_of_the_readme_is_loaded_as_shown(readme_task: Path) -> None:
    from search.pruning.storage.model_folder import save_pruned
    from search.task import load_task
    from sparse_kernels.patterns import VectorWise

    model = load_task(str(readme_task)).model()
    mask = torch.from_numpy(VectorWise(32).mask(model[2].weight.detach().abs().numpy(), 0.75))
    with torch.no_grad():
        model[2].weight *= mask
    profile = made_profile.make_profile("my_task", model, {"2": ("vector:32", 0.75)})
    save_pruned(Path("job/pruned"), model, {"2": mask}, profile, {})
    values: dict[str, Any] = {}
    exec(block_with("README.md", "lb.load("), values)
    (x,) = values["my_task"].example()
    torch.testing.assert_close(values["fast"](x), model(x).detach(), atol=1e-4, rtol=1e-4)


def test_the_library_runs_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, place in ((TABLE, "table"), (OTHER_TABLE, "other")):
        shutil.copytree(ROOT / "datasets" / "measured" / name, tmp_path / place)
    (tmp_path / "workload.yaml").write_text(WORKLOAD)
    monkeypatch.chdir(tmp_path)
    page = "docs/how-to/python_library.md"
    code = block_with(page, "problem.frontier()")
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
    for text in ("search.solve(", "prepare(", "read_table("):
        exec(block_with(page, text), values)
    assert values["y"].shape == (64, 256)
    assert len(values["frame"]) > 800


def named_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    names = {"fc1": torch.nn.Linear(64, 96), "relu": torch.nn.ReLU(), "fc2": torch.nn.Linear(96, 8)}
    model = torch.nn.Sequential()
    for name, module in names.items():
        model.add_module(name, module)
    return model.eval()


def test_a_model_is_converted_as_shown() -> None:
    model = named_model()
    values: dict[str, Any] = {"model": model, "example_input": torch.randn(16, 64)}
    exec(block_with("docs/how-to/python_library.md", "fast = convert("), values)
    with torch.no_grad():
        model.fc1.weight *= torch.from_numpy(values["mask"])  # type: ignore[operator, arg-type]
        expected = model(values["example_input"])
        found = values["fast"](values["example_input"])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_model_trains_under_masks_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = named_model()
    values: dict[str, Any] = {
        "model": model,
        "profile": made_profile.make_profile("made up", model, {"fc1": ("vector:32", 0.75)}),
        "steps": 8,
        "batches": list(torch.randn(8, 16, 64)),
        "optimizer": torch.optim.Adam(model.parameters()),
        "loss": lambda model, batch: model(batch).square().mean(),
    }
    for block in PAGES["docs/how-to/train_under_masks.md"]:
        exec(block, values)
    kept = values["pruner"].masks["fc1"]
    assert kept.float().mean().item() == 0.25
    assert not model.fc1.weight[~kept].any()  # type: ignore[index, union-attr]
    assert (tmp_path / "pruned" / "manifest.json").exists()
