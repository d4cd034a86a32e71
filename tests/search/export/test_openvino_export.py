"""`latbench export --to openvino`: what is deployed computes the pruned model, in OpenVINO and nothing else."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
import torch
from chain_task import CHAIN_TASK, prune_chain
from encoder_task import ENCODER_LAYERS, ENCODER_TASK, make_inputs, make_task
from packages_alone import build_lonely_program, link_packages
from torch import nn

import latbench as lb
from latbench.cli.commands import export as export_module
from latbench.cli.commands.export import export as export_command
from latbench.errors import BadData, EnvironmentUnusable, LatbenchError, UsageError
from search.example_inputs import TensorCall
from search.export import export_model
from search.export.fork_gate import ForkGate
from search.export.free_sides import change_axis, try_other_sizes
from search.export.layer_calls import record_calls
from search.export.openvino import openvino_model
from search.export.openvino.openvino_graph import LayerGraph
from search.export.openvino.openvino_model import OpenVINOModel, list_exported_sizes
from search.pruning.storage.model_folder import load_pruned
from search.task import Task
from sparse_kernels.convert import convert
from sparse_kernels.cpu.export.cpu_levels import list_host_levels

if not list_host_levels():
    pytest.skip("no CPU level for which kernels are compiled ahead of time", allow_module_level=True)


def export_best(task: Task, pruned: Path, deploy: Path, **options: Any) -> Path:
    """Export for the most able level alone."""
    export_command(task.reference, pruned, deploy, to="openvino", level=[list_host_levels()[-1].name], **options)
    return deploy


def check(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    """An exported encoder, and its converted model."""
    folder = tmp_path_factory.mktemp("encoder")
    task = make_task(folder, ENCODER_TASK)
    pruned = prune_chain(folder / "pruned", task, layers=ENCODER_LAYERS)
    export_command(task.reference, pruned, folder / "deploy", threads=["2"])  # to OpenVINO, which is installed
    model, choices = load_pruned(pruned, task.model())
    return folder / "deploy", convert(model, choices, (), example_keywords=task.example().keywords)


@pytest.mark.slow
def test_a_model_that_is_no_chain_is_deployed(encoder: tuple[Path, nn.Module]) -> None:
    deploy, converted = encoder
    manifest = json.loads((deploy / "manifest.json").read_text())
    assert (manifest["form"], manifest["threads"]) == ("openvino", [1, 2])
    assert manifest["levels"] == [each.name for each in list_host_levels()]
    assert [(each["name"], each["shape"]) for each in manifest["inputs"]] == [("ids", "[?,?]"), ("mask", "[?,?]")]
    assert [each["name"] for each in manifest["outputs"]] == ["tokens", "pooled"]
    assert {name: facts["activation"] for name, facts in manifest["layers"].items()} == {
        name: "gelu" if name == "up" else None for name in ENCODER_LAYERS
    }
    # Sizes that nothing was compiled for, and none at all.
    for threads, batch, tokens in ((1, 2, 12), (2, 2, 12), (2, 1, 1), (2, 3, 29), (1, 1, 131), (2, 0, 5)):
        inputs = make_inputs(batch, tokens)
        expected = converted(**inputs)
        tokens_found, pooled = lb.load(deploy, threads=threads)(*(each.numpy() for each in inputs.values()))
        check(tokens_found, expected["tokens"])
        check(pooled, expected["pooled"])
    # Not what a dense model gives, nor one whose query, key and value are one layer.
    weights = ov.Core()
    weights.add_extension(str(deploy / "libmodel.so"))
    operations = [node.get_type_name() for node in weights.read_model(deploy / "model.xml").get_ops()]
    assert operations.count("SparseLayer") == len(ENCODER_LAYERS) and "Gelu" not in operations


def test_exported_sizes_are_those_of_the_example_and_other_batches() -> None:
    inputs = [{"example": [4, 12]}, {"example": [4]}, {"example": [7, 4]}, {"example": []}]
    assert list_exported_sizes({"inputs": inputs, "batches": [1, 4]}) == [
        ((4, 12), (4,), (7, 4), ()), ((1, 12), (1,), (7, 4), ())
    ]  # fmt: skip


@pytest.mark.slow
def test_other_sizes_run_a_model_of_their_own(encoder: tuple[Path, nn.Module]) -> None:
    model = OpenVINOModel(encoder[0], 1)
    assert len(model._compiled) == 1
    for batch, tokens, compiled in ((2, 12, 1), (3, 12, 2), (1, 5, 2), (2, 12, 2)):
        inputs = make_inputs(batch, tokens)
        check(model(*(each.numpy() for each in inputs.values()))[0], encoder[1](**inputs)["tokens"])
        assert len(model._compiled) == compiled


@pytest.mark.slow
def test_examples_need_openvino_alone(encoder: tuple[Path, nn.Module], tmp_path: Path) -> None:
    deploy = shutil.copytree(encoder[0], tmp_path / "moved")
    zeros = {"ids": torch.zeros(2, 12, dtype=torch.long), "mask": torch.zeros(2, 12)}
    expected = encoder[1](**zeros)["tokens"].flatten().numpy()
    program = f"""
import runpy, sys
import numpy
numpy.set_printoptions(threshold=10**6, linewidth=10**6)
runpy.run_path({str(deploy / "example.py")!r})
print([*sys.modules])
"""
    arguments = build_lonely_program(link_packages(tmp_path / "packages", "openvino"), program)
    told = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True).stdout
    assert "'numba'" not in told and "'latbench'" not in told and "sparse_kernels" not in told
    lonely = build_lonely_program(tmp_path / "packages", "import latbench")
    assert subprocess.run([sys.executable, *lonely], capture_output=True, check=False).returncode == 1
    numbers = told.split("[[[")[1].split("]")[0].split()
    check(np.array(numbers, float), expected[:32])
    libraries = Path(ov.__file__).parent / "libs"
    command = [
        "c++", "-std=c++17", "-O1", f"-I{libraries.parent / 'include'}", "main.cpp", "-o", "main",
        *map(str, libraries.glob("libopenvino.so.*")), f"-Wl,-rpath,{libraries}",
    ]  # fmt: skip
    subprocess.run(command, cwd=deploy, check=True)
    told = subprocess.run(["./main", "2"], cwd=deploy, capture_output=True, text=True, check=True).stdout
    check(np.array(told.splitlines()[0].split("]")[1].split(), float), expected[:8])
    (deploy / "model.latbench").unlink()
    failed = subprocess.run(["./main"], cwd=deploy, capture_output=True, text=True, check=False)
    assert failed.returncode == 1 and "No such file" in failed.stderr


def test_a_fork_waits_for_calls_and_calls_for_a_fork() -> None:
    gate, inside, ended, seen = ForkGate(), threading.Event(), threading.Event(), []

    def call() -> None:
        with gate:
            inside.set()
            ended.wait(20)
            seen.append("called")

    def fork() -> None:
        gate.shut()
        seen.append("forked")
        gate.open()

    first = threading.Thread(target=call)
    first.start()
    assert inside.wait(20)
    forking = threading.Thread(target=fork)
    forking.start()
    while not gate._forking:
        time.sleep(0.001)
    late = threading.Thread(target=call)
    late.start()
    late.join(0.05)
    assert late.is_alive() and not seen  # nobody gets in, and nobody forks
    ended.set()
    for thread in (first, forking, late):
        thread.join(20)
    assert seen == ["called", "forked", "called"]


@pytest.mark.slow
def test_threads_processes_and_forks_share_it(encoder: tuple[Path, nn.Module]) -> None:
    inputs = make_inputs(3, 40)
    arrays, expected = [each.numpy() for each in inputs.values()], encoder[1](**inputs)["tokens"].numpy()
    model = lb.load(encoder[0], threads=2)
    check(pickle.loads(pickle.dumps(model))(*arrays)[0], expected)
    found: list[np.ndarray] = []
    callers = [threading.Thread(target=lambda: found.extend(model(*arrays)[0] for _ in range(20))) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(found) == 160
    for each in found:
        check(each, expected)
    program = f"""
import os, signal, sys, threading
import numpy as np
import latbench as lb
from pathlib import Path
model = lb.load({str(encoder[0])!r}, threads=2)
arrays = np.load(sys.argv[1])
ids, mask = arrays["ids"], arrays["mask"]
expected = model(ids, mask)[0]
ended = threading.Event()
def call():
    while not ended.is_set():
        model(ids, mask)
callers = [threading.Thread(target=call) for _ in range(4)]  # a lock of theirs must not be copied
for caller in callers:
    caller.start()
children = []
for number in range(5):
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # one that waits for ever ends
        if number == 4:  # never calls it
            del model
            os._exit(0)
        os._exit(0 if all(np.array_equal(model(ids, mask=mask)[0], expected) for _ in range(20)) else 1)
    children.append(child)
told = [os.waitpid(child, 0)[1] for child in children]
ended.set()
for caller in callers:
    caller.join()
print(told, np.array_equal(model(ids, mask)[0], expected))
heavy = "torch numba llvmlite pandas pyarrow sklearn scipy typer rich".split()
print([name for name in heavy if name in sys.modules])
"""
    file = encoder[0].parent / "arrays.npz"
    np.savez(file, **dict(zip(inputs, arrays, strict=True)))
    told = subprocess.run(
        [sys.executable, "-c", program, str(file)], capture_output=True, text=True, check=True, timeout=120
    )
    assert told.stdout.split("\n")[:2] == ["[0, 0, 0, 0, 0] True", "[]"]


@pytest.mark.slow
def test_what_does_not_fit_is_refused_in_a_sentence(
    encoder: tuple[Path, nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lb.load(encoder[0])
    ids, mask = (each.numpy() for each in make_inputs(2, 12).values())
    for wrong, why in (((ids,), "takes 2 inputs, not 1"), ((ids * 1.0, mask), "input 1 of the model is int64, not"),
                       ((ids[0], mask), "has the shape")):  # fmt: skip
        with pytest.raises(UsageError, match=why):
            model(*wrong)
    check(model(ids.astype(np.int32), mask.astype(np.float64))[0], model(ids, mask)[0])
    check(model(ids, mask=mask)[0], model(mask=mask, ids=ids)[0])
    with pytest.raises(UsageError, match="takes ids, mask, and not words by name"):
        model(ids, words=mask)
    with pytest.raises(UsageError, match="at least one thread, not 0"):
        lb.load(encoder[0], threads=0)
    for name in ("libmodel.so", "model.latbench", "model.xml", "model.bin"):
        damaged = shutil.copytree(encoder[0], tmp_path / name)
        content = bytearray((damaged / name).read_bytes())
        content[len(content) // 2] ^= 1
        (damaged / name).write_bytes(content)
        with pytest.raises(BadData, match=f"{name} is missing or was changed"):
            lb.load(damaged)
    monkeypatch.setenv("LATBENCH_LEVEL", "x86-64-v9")
    with pytest.raises(EnvironmentUnusable, match="x86-64-v9"):
        lb.load(encoder[0])
    monkeypatch.setattr(openvino_model, "name_release", lambda: "2025.0.0")
    with pytest.raises(EnvironmentUnusable, match=r"was exported for OpenVINO .*, and here is 2025\.0\.0"):
        lb.load(encoder[0])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_convolutions_and_batches_are_deployed(tmp_path: Path, precision: str) -> None:
    task = make_task(tmp_path, CHAIN_TASK)
    pruned = prune_chain(
        tmp_path / "pruned", task, precision, {"0": "vector:8", "3": "vector:8", "4.fc1": "vector:16"}
    )
    deploy = export_best(task, pruned, tmp_path / "deploy", batch=["2"])
    manifest = json.loads((deploy / "manifest.json").read_text())
    assert manifest["batches"] == [2, 5] and manifest["layers"]["0"]["activation"] == "relu"
    model, choices = load_pruned(pruned, task.model())
    converted, x = convert(model, choices, task.example().arguments), torch.randn(7, 3, 7, 6).clamp(-2, 2)
    found = OpenVINOModel(deploy, 2)(x.numpy())
    with torch.no_grad():
        rounding = float((converted(x) - model(x)).abs().max()) if precision == "int8" else 0.0
    np.testing.assert_allclose(found, converted(x), rtol=1e-4, atol=1e-5 + rounding)
    with pytest.raises(UsageError, match=r"has the shape \[\?,3,7,6\]"):
        lb.load(deploy)(x[:, :, :6].numpy())
    # A second export, to C, leaves nothing of the first.
    export_command(task.reference, pruned, deploy, to="c", level=[manifest["levels"][0]])
    assert not (deploy / "model.xml").exists() and (deploy / "model.c").is_file()
    np.testing.assert_allclose(lb.load(deploy)(x.numpy()), converted(x), rtol=1e-4, atol=1e-5 + rounding)


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
    called = TensorCall(model, (x,), "")
    layers: Any = {name: model.get_submodule(name) for name in ("a", "b", "c")}
    calls = record_calls(called, layers, [(x,), (x[:1],)])
    assert {name: each.sizes for name, each in calls.items()} == {name: {1, 2} for name in layers}
    graph = LayerGraph(called, layers, (x,))
    assert graph.activations == {"a": None if twice else "relu", "b": None, "c": "relu"}
    kinds = [node.get_type_name() for node in graph.model.get_ops()]
    assert kinds.count("SparseLayer") == 3 + twice and kinds.count("Relu") == 1 + twice


def test_layers_of_one_input_stay_apart() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) - self.b(x)

    model, x = Pair().eval(), torch.randn(2, 8)
    layers: Any = {"a": model.a, "b": model.b}
    graph = LayerGraph(TensorCall(model, (x,), ""), layers, (x,))
    kinds = [node.get_type_name() for node in graph.model.get_ops()]
    assert kinds.count("SparseLayer") == 2


@pytest.mark.parametrize(
    ("sides", "said"),
    [((1, 3, 8, 8), "convolution 0 gets images of 3x4x4 and of 3x8x8"), ((3, 8, 8), "of 4x4 and of 8x8")],
)
def test_a_convolution_of_two_sizes_is_refused(sides: tuple[int, ...], said: str) -> None:
    conv: Any = nn.Conv2d(3, 3, 3, padding=1)
    calls = record_calls(
        TensorCall(nn.Sequential(conv, nn.MaxPool2d(2), conv), (), ""), {"0": conv}, [(torch.randn(sides),)]
    )
    with pytest.raises(UsageError, match=said):
        calls["0"].find_image("0")


def test_a_convolution_without_a_batch_is_refused() -> None:
    conv: Any = nn.Conv2d(3, 3, 3)
    calls = record_calls(TensorCall(conv, (), ""), {"": conv}, [(torch.randn(3, 8, 8),)])
    with pytest.raises(UsageError, match="gets an image without a batch"):
        calls[""].find_image("")


class Weights(nn.Module):
    """A layer whose weight is asked for its type; with `bypass`, the weight is multiplied by in place of a call."""

    def __init__(self, bypass: bool) -> None:
        super().__init__()
        self.a, self.bypass = nn.Linear(8, 8), bypass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x.to(self.a.weight.dtype))
        return x @ self.a.weight if self.bypass else y


def test_a_model_may_look_at_the_weight_of_a_layer_but_must_call_it() -> None:
    x = torch.randn(2, 8)
    looking, bypassing = Weights(False).eval(), Weights(True).eval()
    graph = LayerGraph(TensorCall(looking, (x,), ""), {"a": looking.a}, (x,))
    assert [node.get_type_name() for node in graph.model.get_ops()].count("SparseLayer") == 1
    with pytest.raises(UsageError, match="multiplies by the weight of a without calling the layer"):
        LayerGraph(TensorCall(bypassing, (x,), ""), {"a": bypassing.a}, (x,))


def test_sides_that_a_model_fixes_are_no_free_ones() -> None:
    def of_batch(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x @ torch.ones(6, 2) + y

    x, y = torch.randn(4, 6), torch.randn(4, 2)
    assert [*try_other_sizes(of_batch, (x, y))] == [0]
    assert [*try_other_sizes(lambda ids, mask: ids * mask, (torch.ones(1, 7), torch.ones(1, 7)))] == [0, 1]
    assert [*try_other_sizes(lambda x: x.reshape(4, 6), (x,))] == []
    assert [*try_other_sizes(lambda x: x.mean((2, 3)), (torch.randn(1, 8, 4, 4),))] == [0]  # no tokens in images
    half = change_axis((torch.ones(1, 7), torch.ones(3), torch.tensor(1.0)), 1)
    assert half is not None and [tuple(each.shape) for each in half] == [(1, 3), (3,), ()]
    assert change_axis((torch.ones(5, 1),), 1) is None


def test_what_openvino_cannot_import_is_refused() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.eigvals(self.a(x)).real

    model, x, root = Odd().eval(), torch.eye(8), logging.getLogger()
    before = root.level, root.filters[:], root.handlers[:]
    with pytest.raises(UsageError, match="cannot be exported to OpenVINO, which cannot import it"):
        LayerGraph(TensorCall(model, (x,), ""), {"a": model.a}, (x,))
    assert (root.level, root.filters, root.handlers) == before  # the user's warnings are still seen


@pytest.mark.parametrize(
    ("to", "installed", "error", "said"),
    [("openvino", False, EnvironmentUnusable, "needs OpenVINO: pip install openvino, or take the form c"),
     (None, False, BadData, "pruned"), (None, True, BadData, "pruned")],
)  # fmt: skip
def test_the_form_is_openvino_where_it_is_installed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    to: str | None,
    installed: bool,
    error: type[LatbenchError],
    said: str,
) -> None:
    asked: list[str] = []
    for module in (export_module, export_model):
        monkeypatch.setattr(module, "find_spec", lambda name: object() if installed else None)
    check = export_model.check_form
    monkeypatch.setattr(export_model, "check_form", lambda form: asked.append(form) or check(form))
    task = make_task(tmp_path, CHAIN_TASK)
    with pytest.raises(error, match=said):
        export_command(task.reference, tmp_path / "pruned", tmp_path / "deploy", to=to)
    assert asked[:1] == ["openvino" if installed or to else "c"]
    assert os.environ.get("LATBENCH_LEVEL") is None


@pytest.mark.slow
def test_models_of_one_program_keep_their_own_weights(encoder: tuple[Path, nn.Module], tmp_path: Path) -> None:
    """Another export of the same layers, added to the same Core; and one that takes the place of an earlier one."""
    task = make_task(tmp_path, ENCODER_TASK.replace("manual_seed(0)", "manual_seed(7)"))
    pruned = prune_chain(tmp_path / "pruned", task, layers=ENCODER_LAYERS)
    replaced = shutil.copytree(encoder[0], tmp_path / "replaced")
    arrays = [each.numpy() for each in make_inputs(2, 12).values()]
    before = lb.load(replaced)
    expected: list[Any] = [before(*arrays)[0], None]
    export_best(task, pruned, replaced)
    model, choices = load_pruned(pruned, task.model())
    converted = convert(model, choices, (), example_keywords=task.example().keywords)
    expected[1] = converted(**make_inputs(2, 12))["tokens"].numpy()
    assert np.abs(expected[0] - expected[1]).max() > 0.1
    check(before(*arrays)[0], expected[0])
    with pytest.raises(EnvironmentUnusable, match="has loaded an earlier export from there"):
        lb.load(replaced)
    replaced = shutil.copytree(replaced, tmp_path / "elsewhere")
    check(lb.load(replaced)(*arrays)[0], expected[1])
    core, settings = ov.Core(), {"INFERENCE_PRECISION_HINT": "f32"}
    for folder in (encoder[0], replaced):
        core.add_extension(str(folder / "libmodel.so"))
    for folder, wanted in zip((encoder[0], replaced), expected, strict=True):
        compiled = core.compile_model(core.read_model(folder / "model.xml"), "CPU", settings)
        check(compiled(arrays)[0], wanted)
    shutil.copy(encoder[0] / "model.latbench", replaced / "model.latbench")
    with pytest.raises(BadData, match=r"model\.latbench is missing or was changed"):
        lb.load(replaced)


@pytest.mark.slow
def test_a_side_that_tracing_fixes_is_fixed_in_the_file(tmp_path: Path) -> None:
    text = (
        CHAIN_TASK.replace("return nn.Sequential(conv,", "return Scaled(conv,")
        + """
class Scaled(nn.Sequential):
    def forward(self, x):
        return super().forward(x) * len(x)  # a number, once it is traced
"""
    )
    task = make_task(tmp_path, text)
    deploy = export_best(task, prune_chain(tmp_path / "pruned", task), tmp_path / "deploy")
    assert json.loads((deploy / "manifest.json").read_text())["inputs"][0]["shape"] == "[5,3,7,6]"
    x = task.example().arguments[0].numpy()
    with pytest.raises(UsageError, match=r"has the shape \[5,3,7,6\], not \(4, 3, 7, 6\)"):
        lb.load(deploy)(x[:4])
    assert lb.load(deploy)(x).shape == (5, 3)
