"""`latbench export`: what is deployed computes the pruned model, from C and from Python without latbench."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_profile import make_profile

from latbench.cli.commands.export import export as export_command
from latbench.errors import EnvironmentUnusable, LatbenchError, UsageError
from search.pruning.storage.model_folder import load_pruned, save_pruned
from search.task import Task, load_task
from sparse_kernels.convert import convert
from sparse_kernels.cpu.export.cpu_levels import list_host_levels
from sparse_kernels.cpu.export.exported_library import ExportedLibrary
from sparse_kernels.patterns import parse
from sparse_kernels.prunable_layers import set_weight_matrix, weight_matrix

TASK = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(40, 64), nn.Linear(64, 40)
    def forward(self, x):
        return torch.relu(x + self.fc2(torch.relu(self.fc1(x))))

def model():
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 8, 3, stride=2, padding=1)
    return nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(8 * 12, 40), Block(), nn.Linear(40, 3)).eval()
def example():
    torch.manual_seed(1)
    return (torch.randn(5, 3, 7, 6),)
def calibration(): return [example()]
def loss(model, batch): return model(*batch).square().mean()
def score(model): return float(model(*example()).mean())
"""

if not list_host_levels():
    pytest.skip("no CPU level for which kernels are compiled ahead of time", allow_module_level=True)


def prune(folder: Path, task: Task) -> Path:
    """Prune two layers of the task by magnitude."""
    model, masks, choices = task.model(), {}, {}
    for layer, spec in (("3", "vector:8"), ("4.fc1", "vector:16")):
        module = model.get_submodule(layer)
        matrix = weight_matrix(module)
        masks[layer] = torch.from_numpy(parse(spec).mask(matrix.square().numpy(), 0.75))
        set_weight_matrix(module, torch.where(masks[layer], matrix, 0.0))
        choices[layer] = (spec, 0.75)
    save_pruned(folder, model, masks, make_profile("chain", model, choices), {"task": "chain"})
    return folder


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    path = tmp_path_factory.mktemp("task") / "chain_task.py"
    path.write_text(TASK)
    return load_task(str(path))


@pytest.mark.slow
def test_a_chain_is_deployed_and_right_without_latbench(task: Task, tmp_path: Path) -> None:
    pruned, deploy = prune(tmp_path / "pruned", task), tmp_path / "deploy"
    export_command(task.reference, pruned, deploy, batch=["2", "5"], threads=["2"])
    manifest = json.loads((deploy / "manifest.json").read_text())
    assert (manifest["batches"], manifest["threads"]) == ([1, 2, 5], [1, 2])
    assert manifest["levels"] == [each.name for each in list_host_levels()]
    model, choices = load_pruned(pruned, task.model())
    converted = convert(model, choices, task.example().arguments)
    x = torch.randn(13, 3, 7, 6)
    expected = converted(x).numpy()
    library = ExportedLibrary(deploy / "libmodel.so", deploy / "model.latbench")
    for threads in (1, 2):
        np.testing.assert_allclose(library.run(x.numpy(), (3,), threads), expected, rtol=1e-4, atol=1e-5)
    check_c_example(deploy, x.numpy(), expected)
    python = subprocess.run([sys.executable, "-I", deploy / "example.py"], capture_output=True, text=True, check=True)
    zero = converted(torch.zeros(1, 3, 7, 6)).numpy()
    found = np.array(python.stdout.replace("[", " ").replace("]", " ").split(), float)
    np.testing.assert_allclose(found, zero[0], rtol=1e-4, atol=1e-5)
    # A second export takes its place.
    export_command(task.reference, pruned, deploy, level=manifest["levels"][:1])
    assert json.loads((deploy / "manifest.json").read_text())["levels"] == manifest["levels"][:1]


def check_c_example(deploy: Path, x: np.ndarray, expected: np.ndarray) -> None:
    """Compile the example in C as its comment says, and compare what it writes."""
    command = ["cc", "-O2", "-Wall", "-Werror", "-I.", "main.c", "-o", "main", "-L.", "-lmodel", "-Wl,-rpath,$ORIGIN"]
    subprocess.run(command, cwd=deploy, check=True)
    x.tofile(deploy / "inputs.bin")
    subprocess.run(["./main", "inputs.bin", "outputs.bin", "2"], cwd=deploy, check=True)
    found = np.fromfile(deploy / "outputs.bin", np.float32).reshape(expected.shape)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    (deploy / "model.latbench").rename(deploy / "moved")
    failed = subprocess.run(
        ["./main", "inputs.bin", "outputs.bin"], cwd=deploy, capture_output=True, text=True, check=False
    )
    (deploy / "moved").rename(deploy / "model.latbench")
    assert failed.returncode == 3 and "No such file" in failed.stderr


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"to": "java"}, UsageError, "unknown form 'java': known are c"),
        ({"level": ["x86-64-v9"]}, UsageError, "unknown CPU level 'x86-64-v9'"),
        ({"batch": ["0"]}, UsageError, "--batch takes whole numbers from 1 on, not '0'"),
        ({"threads": ["two"]}, UsageError, "--threads takes whole numbers from 1 on, not 'two'"),
    ],
)
def test_a_wrong_request_is_refused_in_a_sentence(
    task: Task, tmp_path: Path, options: dict[str, Any], error: type[LatbenchError], said: str
) -> None:
    with pytest.raises(error, match=said):
        export_command(task.reference, tmp_path / "pruned", tmp_path / "deploy", **options)
    assert not (tmp_path / "deploy").exists()


def test_a_level_that_this_machine_lacks_is_refused(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("search.export.export_job.list_host_levels", lambda: list_host_levels()[:1])
    with pytest.raises(EnvironmentUnusable, match="lacks the CPU level x86-64-v4, on which the export checks"):
        export_command(task.reference, tmp_path / "pruned", tmp_path / "deploy", level=["x86-64-v4"])


def test_a_machine_without_a_compiler_is_told_so(task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(EnvironmentUnusable, match="no C compiler was found: CC=no-such-compiler is not on the PATH"):
        export_command(task.reference, tmp_path / "pruned", tmp_path / "deploy")


def test_a_folder_that_holds_something_else_is_not_written_to(task: Task, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(UsageError, match="exists and is no exported model"):
        export_command(task.reference, tmp_path / "pruned", tmp_path)
