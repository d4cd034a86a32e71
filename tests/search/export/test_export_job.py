"""`latbench export`: what is deployed computes the pruned model, from C and from Python without latbench."""

from __future__ import annotations

import ctypes
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chain_task import CHAIN_TASK, prune_chain
from torch import nn

from latbench.cli.commands.export import export as export_command
from latbench.errors import EnvironmentUnusable, LatbenchError, UsageError
from search.export.c_library.c_export import _count_tokens
from search.export.c_library.model_chain import trace_chain
from search.export.export_steps import PrunedResults, compile_levels, replace_folder, spread_batches
from search.pruning.storage.model_folder import load_pruned
from search.task import Task, load_task
from sparse_kernels.convert import convert
from sparse_kernels.cpu.export.cpu_levels import list_host_levels
from sparse_kernels.cpu.export.exported_library import BAD_ARGUMENT, ExportedLibrary, _Error
from sparse_kernels.cpu.export.level_job import LevelFailure, LevelRequest
from sparse_kernels.cpu.export.shared_library import find_compiler

if not list_host_levels():
    pytest.skip("no CPU level for which kernels are compiled ahead of time", allow_module_level=True)


ERROR = ctypes.POINTER(_Error)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    path = tmp_path_factory.mktemp("task") / "chain_task.py"
    path.write_text(CHAIN_TASK)
    return load_task(str(path))


@pytest.mark.slow
def test_a_chain_is_deployed_and_right_without_latbench(task: Task, tmp_path: Path) -> None:
    pruned, deploy = prune_chain(tmp_path / "pruned", task), tmp_path / "deploy"
    export_command(task.reference, pruned, deploy, to="c", batch=["2", "5"], threads=["2"])
    manifest = json.loads((deploy / "manifest.json").read_text())
    assert (manifest["batches"], manifest["threads"]) == ([1, 2, 5], [1, 2])
    assert manifest["levels"] == [each.name for each in list_host_levels()]
    model, choices = load_pruned(pruned, task.model())
    converted = convert(model, choices, task.example().arguments)
    x = torch.randn(13, 3, 7, 6, generator=torch.Generator().manual_seed(13))
    expected = converted(x).numpy()
    library = ExportedLibrary(deploy / "libmodel.so", deploy / "model.latbench")
    for threads in (1, 2):
        np.testing.assert_allclose(library.run(x.numpy(), (3,), threads), expected, rtol=1e-4, atol=1e-5)
    check_refused_batches(library)
    check_c_example(deploy, x.numpy(), expected)
    python = subprocess.run([sys.executable, "-I", deploy / "example.py"], capture_output=True, text=True, check=True)
    zero = converted(torch.zeros(1, 3, 7, 6)).numpy()
    found = np.array(python.stdout.replace("[", " ").replace("]", " ").split(), float)
    np.testing.assert_allclose(found, zero[0], rtol=1e-4, atol=1e-5)
    # A second export takes its place.
    export_command(task.reference, pruned, deploy, to="c", level=manifest["levels"][:1])
    assert json.loads((deploy / "manifest.json").read_text())["levels"] == manifest["levels"][:1]


def check_refused_batches(library: ExportedLibrary) -> None:
    """No memory holds these batches; the code is the same as the error's."""
    for batch in (-1, 2**40, 2**62):
        error = ctypes.create_string_buffer(516)
        sizes = ctypes.c_int64(batch), ctypes.c_int64(3 * 7 * 6), ctypes.c_int64(3)
        code = library._library.latbench_run(
            library._handle, None, sizes[0], sizes[1], None, sizes[2], 1, ctypes.cast(error, ERROR)
        )
        assert code == int.from_bytes(error.raw[:4], "little") != 0
        if batch in (-1, 2**62):
            assert code == BAD_ARGUMENT and f"there cannot be a batch of {batch}".encode() in error.raw


def check_c_example(deploy: Path, x: np.ndarray, expected: np.ndarray) -> None:
    """Compile the example in C as its comment says, and compare what it writes."""
    command = [
        *find_compiler(),
        "-O2",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-I.",
        "main.c",
        "-o",
        "main",
        "-L.",
        "-lmodel",
        "-Wl,-rpath,$ORIGIN",
    ]
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
    for size, code in ((0, 5), (x[0].nbytes - 4, 5), (x.nbytes + 1, 5)):
        (deploy / "inputs.bin").write_bytes(bytes(size))
        command = ["./main", "inputs.bin", "outputs.bin"]
        failed = subprocess.run(command, cwd=deploy, capture_output=True, text=True, check=False)
        assert failed.returncode == code and f"it has {size} bytes, and must hold whole inputs" in failed.stderr
    if Path("/dev/full").exists():
        x.tofile(deploy / "inputs.bin")
        command = ["./main", "inputs.bin", "/dev/full"]
        failed = subprocess.run(command, cwd=deploy, capture_output=True, text=True, check=False)
        assert failed.returncode == 3 and "No space left" in failed.stderr


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int8", "bfloat16"])
def test_layers_that_round_are_deployed(task: Task, tmp_path: Path, precision: str) -> None:
    pruned, deploy = prune_chain(tmp_path / "pruned", task, precision), tmp_path / "deploy"
    level = list_host_levels()[-1].name
    export_command(task.reference, pruned, deploy, to="c", level=[level])
    manifest = json.loads((deploy / "manifest.json").read_text())
    model, choices = load_pruned(pruned, task.model())
    (x,) = task.example().arguments
    results = PrunedResults(model, convert(model, choices, (x,)))
    library = ExportedLibrary(deploy / "libmodel.so", deploy / "model.latbench")
    found = torch.from_numpy(library.run(x.numpy(), (3,)))
    right, apart = results.compare([found], [x])
    assert right and apart <= manifest["error"]
    # It rounds, as its conversion does: the model in float32 lies farther from it.
    with torch.no_grad():
        assert float((found - model(x)).abs().max()) > 10 * float((found - results.converted(x)).abs().max())


def test_wrong_results_are_found(task: Task) -> None:
    model = task.model()
    (x,) = task.example().arguments
    with torch.no_grad():
        expected = model(x)
    results = PrunedResults(model, model)
    swapped = expected[[1, 0, *range(2, len(expected))]]
    for wrong in (swapped, expected[:-1], torch.full_like(expected, math.nan), expected * 1.05):
        assert not results.compare([wrong], [x])[0]
    assert results.compare([expected], [x]) == (True, 0.0)


def test_inputs_of_a_check_cover_every_batch_and_a_sum() -> None:
    x = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    inputs = spread_batches([x, torch.arange(3), torch.tensor(2.0)], [1, 7])
    assert [[len(each) for each in tensors[:2]] for tensors in inputs] == [[1, 1], [7, 7], [8, 8]]
    for each, numbers, scalar in inputs:
        assert numbers.tolist() == [i % 3 for i in range(len(numbers))] and scalar == 2
        assert len({*map(tuple, each.tolist())}) == len(each) and each.abs().max() <= x.abs().max()


@pytest.mark.parametrize(("by_machine", "error"), [(True, EnvironmentUnusable), (False, RuntimeError)])
def test_a_level_that_does_not_compile_is_no_missed_promise(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_machine: bool, error: type[Exception]
) -> None:
    def fail(request: object) -> None:
        raise LevelFailure("it is broken", by_machine)

    monkeypatch.setattr("search.export.export_steps.compile_level", fail)
    with pytest.raises(error, match=r"could not be compiled for .*: it is broken") as caught:
        export_command(task.reference, prune_chain(tmp_path / "pruned", task), tmp_path / "deploy", to="c")
    assert getattr(caught.value, "exit_code", 70) != 1


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"to": "java"}, UsageError, "unknown form 'java': known are openvino, torch, c"),
        ({"level": ["x86-64-v9"]}, UsageError, "unknown CPU level 'x86-64-v9'"),
        ({"batch": ["0"]}, UsageError, "--batch takes whole numbers of at least 1, not '0'"),
        ({"threads": ["²"]}, UsageError, "--threads takes whole numbers of at least 1, not '²'"),
        ({"threads": ["two"]}, UsageError, "--threads takes whole numbers of at least 1, not 'two'"),
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
    monkeypatch.setattr("search.export.export_steps.list_host_levels", lambda: list_host_levels()[:1])
    with pytest.raises(EnvironmentUnusable, match="lacks the CPU level x86-64-v4, on which the export checks"):
        export_command(task.reference, tmp_path / "pruned", tmp_path / "deploy", level=["x86-64-v4"])


def test_a_machine_without_a_compiler_is_told_so(task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(EnvironmentUnusable, match="no C compiler was found: CC=no-such-compiler is not on the PATH"):
        export_command(task.reference, tmp_path / "pruned", tmp_path / "deploy")


@pytest.mark.parametrize("compiler", ["false", "env false"])
def test_a_compiler_that_builds_nothing_is_told_at_once(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(EnvironmentUnusable, match=f"{compiler} could not build the library"):
        export_command(task.reference, tmp_path / "pruned", tmp_path / "deploy")


def test_sizes_are_those_that_a_layer_sees(task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 6 tokens is a row of a linear layer; an image is one of a convolution."""
    asked: list[LevelRequest] = []

    def note(request: LevelRequest) -> None:
        asked.append(request)
        raise LevelFailure("enough", True)

    monkeypatch.setattr("search.export.export_steps.compile_level", note)
    torch.manual_seed(3)
    model, x = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Linear(6, 5)).eval(), torch.randn(2, 3, 7, 6)
    chain = trace_chain(model, {}, x)
    with pytest.raises(EnvironmentUnusable):
        compile_levels(list_host_levels()[:1], chain.layers, _count_tokens(chain, [1, 4]), [1], print)
    assert asked[0].sizes == {"0": [1, 4], "1": [1, 28, 112]}


def test_what_a_killed_export_left_goes_away(tmp_path: Path) -> None:
    left, foreign = tmp_path / ".deploy.999999999.abc.tmp", tmp_path / ".deploy.notes"
    left.mkdir()
    foreign.mkdir()
    with replace_folder(tmp_path / "deploy") as folder:
        assert folder.parent == tmp_path
        (folder / "manifest.json").write_text("{}")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".deploy.notes", "deploy"]


def test_a_fault_inside_an_export_is_no_fault_of_the_disk(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no library"), replace_folder(tmp_path / "deploy"):
        raise OSError("no library")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_holds_something_else_is_not_written_to(task: Task, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(UsageError, match="exists and is no exported model"):
        export_command(task.reference, tmp_path / "pruned", tmp_path)
