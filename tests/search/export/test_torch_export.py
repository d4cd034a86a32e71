"""`latbench export --to torch`: what is deployed computes the pruned model, in torch and nothing else."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chain_task import CHAIN_TASK, prune_chain
from encoder_task import ENCODER_LAYERS, ENCODER_TASK, make_inputs, make_task
from packages_alone import build_lonely_program, link_packages
from torch import nn

import latbench as lb
from latbench.cli.commands.export import export as export_command
from latbench.errors import BadData, EnvironmentUnusable, UsageError
from search.example_inputs import TensorCall
from search.export.torch_package import torch_export, torch_model
from search.export.torch_package.torch_graph import PackageProgram
from search.export.torch_package.torch_model import TorchModel
from search.pruning.storage.model_folder import load_pruned
from search.task import Task
from sparse_kernels.convert import convert
from sparse_kernels.cpu.export.cpu_levels import list_host_levels

if not list_host_levels():
    pytest.skip("no CPU level for which kernels are compiled ahead of time", allow_module_level=True)


def export_best(task: Task, pruned: Path, deploy: Path, **options: Any) -> Path:
    """Export for the most able level alone."""
    export_command(task.reference, pruned, deploy, to="torch", level=[list_host_levels()[-1].name], **options)
    return deploy


def check(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    """An exported encoder, and its converted model."""
    folder = tmp_path_factory.mktemp("encoder")
    task = make_task(folder, ENCODER_TASK)
    pruned = prune_chain(folder / "pruned", task, layers=ENCODER_LAYERS)
    export_command(task.reference, pruned, folder / "deploy", to="torch", threads=["2"])
    model, choices = load_pruned(pruned, task.model())
    return folder / "deploy", convert(model, choices, (), example_keywords=task.example().keywords)


@pytest.mark.slow
def test_a_model_is_deployed_with_batches_and_tokens_of_any_number(encoder: tuple[Path, nn.Module]) -> None:
    deploy, converted = encoder
    manifest = json.loads((deploy / "manifest.json").read_text())
    assert (manifest["form"], manifest["threads"]) == ("torch", [1, 2])
    assert manifest["levels"] == [each.name for each in list_host_levels()]
    assert [(each["name"], each["shape"], each["type"]) for each in manifest["inputs"]] == [
        ("ids", [None, None], "int64"), ("mask", [None, None], "float32")
    ]  # fmt: skip
    assert [each["shape"] for each in manifest["outputs"]] == [[None, None, 32], [None, 32]]
    assert {name: facts["activation"] for name, facts in manifest["layers"].items()} == {
        name: "gelu" if name == "up" else None for name in ENCODER_LAYERS
    }
    for threads, batch, tokens in ((1, 2, 12), (2, 2, 12), (2, 1, 1), (2, 3, 29), (1, 1, 131), (2, 0, 5)):
        inputs = make_inputs(batch, tokens)
        expected = converted(**inputs)
        model = lb.load(deploy, threads=threads)
        tokens_found, pooled = model(*(each.numpy() for each in inputs.values()))
        check(tokens_found, expected["tokens"])
        check(pooled, expected["pooled"])
        assert torch.get_num_threads() == threads


@pytest.mark.slow
def test_examples_need_torch_alone(encoder: tuple[Path, nn.Module], tmp_path: Path) -> None:
    deploy = shutil.copytree(encoder[0], tmp_path / "moved")
    zeros = {"ids": torch.zeros(2, 12, dtype=torch.long), "mask": torch.zeros(2, 12)}
    expected = encoder[1](**zeros)["tokens"].flatten().numpy()
    program = f"""
import runpy, sys
import torch
torch.set_printoptions(threshold=10**6, linewidth=10**6, precision=6)
runpy.run_path({str(deploy / "example.py")!r})
print([*sys.modules])
"""
    arguments = build_lonely_program(link_packages(tmp_path / "packages", "torch"), program)
    told = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True).stdout
    assert "'numba'" not in told and "'latbench'" not in told and "sparse_kernels" not in told
    lonely = build_lonely_program(tmp_path / "packages", "import latbench")
    assert subprocess.run([sys.executable, *lonely], capture_output=True, check=False).returncode == 1
    numbers = told.split("[[[")[1].split("]")[0].replace(",", " ").split()
    check(np.array(numbers, float), expected[:32])
    package = Path(torch.__file__).parent
    headers = [f"-I{package / 'include'}", f"-I{package / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{package / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl", f"-Wl,-rpath,{package / 'lib'}"]
    subprocess.run(
        ["c++", "-std=c++20", "-O0", *headers, "main.cpp", "-o", "main", *libraries], cwd=deploy, check=True
    )
    told = subprocess.run(["./main", "2"], cwd=deploy, capture_output=True, text=True, check=True).stdout
    check(np.array(told.splitlines()[0].split("]")[1].split(), float), expected[:8])
    (deploy / "model.latbench").unlink()
    failed = subprocess.run(["./main"], cwd=deploy, capture_output=True, text=True, check=False)
    assert failed.returncode == 1 and "No such file" in failed.stderr


@pytest.mark.slow
def test_threads_processes_and_forks_share_it(encoder: tuple[Path, nn.Module]) -> None:
    inputs = make_inputs(3, 40)
    arrays, expected = [each.numpy() for each in inputs.values()], encoder[1](**inputs)["tokens"].numpy()
    model = lb.load(encoder[0], threads=2)
    check(pickle.loads(pickle.dumps(model))(*arrays)[0], expected)
    found: list[np.ndarray] = []
    callers = [threading.Thread(target=lambda: found.extend(model(*arrays)[0] for _ in range(20))) for _ in range(12)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(found) == 240
    for each in found:
        check(each, expected)
    program = f"""
import os, signal, sys
import numpy as np
import latbench as lb
model = lb.load({str(encoder[0])!r}, threads=2)
arrays = np.load(sys.argv[1])
ids, mask = arrays["ids"], arrays["mask"]
expected = model(ids, mask)[0]
children = []
for number in range(4):
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # one that waits for ever ends
        os._exit(0 if all(np.array_equal(model(ids, mask=mask)[0], expected) for _ in range(20)) else 1)
    children.append(child)
print([os.waitpid(child, 0)[1] for child in children], np.array_equal(model(ids, mask)[0], expected))
print([name for name in "numba llvmlite pandas pyarrow sklearn scipy typer".split() if name in sys.modules])
print("torch._inductor" in sys.modules)
"""
    file = encoder[0].parent / "arrays.npz"
    np.savez(file, **dict(zip(inputs, arrays, strict=True)))
    told = subprocess.run(
        [sys.executable, "-c", program, str(file)], capture_output=True, text=True, check=True, timeout=120
    )
    assert told.stdout.split("\n")[:3] == ["[0, 0, 0, 0] True", "[]", "False"]


@pytest.mark.slow
def test_what_does_not_fit_is_refused_in_a_sentence(
    encoder: tuple[Path, nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lb.load(encoder[0])
    ids, mask = (each.numpy() for each in make_inputs(2, 12).values())
    for wrong, why in (((ids,), "takes 2 inputs, not 1"), ((ids * 1.0, mask), "input 1 of the model is int64, not"),
                       ((ids[0], mask), r"has the shape \[\?,\?\]")):  # fmt: skip
        with pytest.raises(UsageError, match=why):
            model(*wrong)
    check(model(ids.astype(np.int32), mask.astype(np.float64))[0], model(ids, mask)[0])
    check(model(ids, mask=mask)[0], model(mask=mask, ids=ids)[0])
    with pytest.raises(UsageError, match="takes ids, mask, and not words by name"):
        model(ids, words=mask)
    with pytest.raises(UsageError, match="at least one thread, not 0"):
        lb.load(encoder[0], threads=0)
    for name in ("libmodel.so", "model.latbench", "model.pt2"):
        damaged = shutil.copytree(encoder[0], tmp_path / name)
        content = bytearray((damaged / name).read_bytes())
        content[len(content) // 2] ^= 1
        (damaged / name).write_bytes(content)
        with pytest.raises(BadData, match=f"{name} is missing or was changed"):
            lb.load(damaged)
    monkeypatch.setattr(torch_model, "name_torch_release", lambda: "2.0.0")
    with pytest.raises(EnvironmentUnusable, match=r"was exported for torch .*, and here is 2\.0\.0"):
        lb.load(encoder[0])


@pytest.mark.slow
def test_models_of_one_program_keep_their_own_weights(encoder: tuple[Path, nn.Module], tmp_path: Path) -> None:
    """A copy of an export, and another export of the same layers, in the same process."""
    task = make_task(tmp_path, ENCODER_TASK.replace("manual_seed(0)", "manual_seed(7)"))
    pruned = prune_chain(tmp_path / "pruned", task, layers=ENCODER_LAYERS)
    other = export_best(task, pruned, tmp_path / "other")
    arrays = [each.numpy() for each in make_inputs(2, 12).values()]
    model, choices = load_pruned(pruned, task.model())
    converted = convert(model, choices, (), example_keywords=task.example().keywords)
    models = [lb.load(encoder[0]), lb.load(shutil.copytree(encoder[0], tmp_path / "copy")), lb.load(other)]
    expected = [each(**make_inputs(2, 12))["tokens"].numpy() for each in (encoder[1], encoder[1], converted)]
    assert np.abs(expected[0] - expected[2]).max() > 0.1
    for _ in range(2):
        for each, wanted in zip(models, expected, strict=True):
            check(each(*arrays)[0], wanted)


@pytest.mark.slow
def test_convolutions_and_batches_are_deployed(tmp_path: Path) -> None:
    task = make_task(tmp_path, CHAIN_TASK)
    pruned = prune_chain(tmp_path / "pruned", task, layers={"0": "vector:8", "3": "vector:8", "4.fc1": "vector:16"})
    deploy = export_best(task, pruned, tmp_path / "deploy", batch=["2"])
    manifest = json.loads((deploy / "manifest.json").read_text())
    assert manifest["batches"] == [2, 5] and manifest["layers"]["0"]["activation"] == "relu"
    model, choices = load_pruned(pruned, task.model())
    converted, x = convert(model, choices, task.example().arguments), torch.randn(7, 3, 7, 6)
    for size in (7, 1):
        check(TorchModel(deploy, 2)(x[:size].numpy()), converted(x[:size]))
    with pytest.raises(UsageError, match=r"has the shape \[\?,3,7,6\]"):
        lb.load(deploy)(x[:, :, :6].numpy())


class Shared(nn.Module):
    """A layer that is called twice: before a ReLU, and before a sum; and another, whose result has two readers."""

    def __init__(self, twice: bool = True) -> None:
        super().__init__()
        self.a, self.b, self.c, self.twice = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.a(x))
        z = self.b(y)
        again = self.a(z) if self.twice else z
        return again + torch.relu(z) + torch.relu(self.c(x)) + torch.nn.functional.gelu(z, approximate="tanh")


@pytest.mark.parametrize("twice", [True, False])
def test_an_activation_is_absorbed_where_it_alone_reads_each_call(twice: bool) -> None:
    torch.manual_seed(5)
    model, x = Shared(twice).eval(), torch.randn(2, 8)
    layers: Any = {name: model.get_submodule(name) for name in ("a", "b", "c")}
    program = PackageProgram(TensorCall(model, (x,), ""), layers, (x,), {})
    assert program.activations == {"a": None if twice else "relu", "b": None, "c": "relu"}
    called = [str(node.target) for node in program.program.graph.nodes if node.op == "call_function"]
    assert sum("latbench_traced.layer" in each for each in called) == 3 + twice
    assert called.count("aten.relu.default") == 1 + twice
    assert not hasattr(torch.ops, "latbench_traced") or not hasattr(torch.ops.latbench_traced, "layer")


def test_an_activation_that_is_the_result_is_absorbed() -> None:
    model, x = nn.Sequential(nn.Linear(8, 4), nn.ReLU(inplace=True)).eval(), torch.randn(2, 8)
    layers: Any = {"0": model[0]}
    program = PackageProgram(TensorCall(model, (x,), ""), layers, (x,), {0: (torch.randn(3, 8),)})
    assert program.activations == {"0": "relu"}
    assert program.describe_results() == [{"shape": [None, 4], "type": "float32"}]
    assert program.list_free_axes() == [[0]]


def test_what_torch_cannot_trace_is_refused() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if self.a(x).sum().item() > 0 else -x

    model, x = Odd().eval(), torch.eye(8)
    with pytest.raises(UsageError, match="cannot be exported to torch, which cannot trace it"):
        PackageProgram(TensorCall(model, (x,), ""), {"a": model.a}, (x,), {})


def test_a_torch_without_headers_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    with pytest.raises(EnvironmentUnusable, match=r"no .*stable/library\.h; install torch 2\.10 or later"):
        torch_export.check_torch()
