"""Whole models as a GPU runs them: CUDA kernels on the emulated GPU, torch on the CPU, plain calls as graphs."""

import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emulated_machine import EmulatedTorchMachine
from made_profile import make_profile
from torch import nn

from latbench.backends.gpu.prepare_gpu_point import LastResult
from latbench.errors import EnvironmentUnusable
from latbench.timing.gpu_events import NotCaptured
from search.artifacts.layer_database import Database, hash_model
from search.problem.layers import DENSE_OPTION, Option
from search.pruning.one_shot.fill_database import fill_database
from search.pruning.storage.model_folder import load_pruned, save_pruned
from search.task import Task, load_task
from search.whole_model import convert_model, deployed_model, gpu_engines
from search.whole_model.model_engines import mask_at_random, prune_from_database
from sparse_kernels.nn import SparseLinear, sparse_conv, sparse_linear
from sparse_kernels.norm_folding import fold_norm
from sparse_kernels.oracle import WrongResult
from sparse_kernels.patterns import parse
from sparse_kernels.prunable_layers import set_weight_matrix, weight_matrix

TASK = """
import torch
from torch import nn
deploy_device, deploy_dtype = "cuda", torch.float16

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 32)
        self.up, self.down, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 5)
        self.norm = nn.LayerNorm(32)
    def forward(self, ids, scale):
        x = self.words(ids) * scale
        x = self.norm(x + self.down(torch.relu(self.up(x))))
        return {"all": self.head(x), "ids": ids}

def model():
    torch.manual_seed(0)
    return Net().eval()
def example():
    return {"ids": torch.arange(21).view(3, 7) % 11, "scale": torch.full((3, 7, 1), 0.5)}
def calibration(): return [example()]
def loss(model, batch): return model(**batch)["all"].square().mean()
def score(model):
    device = next(model.parameters()).device
    found = model(**{name: x.to(device) for name, x in example().items()})
    assert found["all"].dtype == torch.float32 and found["ids"].dtype == torch.int64
    return float(found["all"].sum())
"""
IMAGES = """
import torch
from torch import nn
def model():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3))
    net[1].running_mean.uniform_(-1, 1)
    return net.eval()
def example(): return (torch.linspace(-1, 1, 2 * 3 * 9 * 8).sin().view(2, 3, 9, 8),)
def calibration(): return [example()]
def loss(model, batch): return model(*batch).square().mean()
def score(model): return 1.0
"""
CHOICES = {"up": Option("vector:32", 0.5), "down": Option("nm:2:4", 0.5), "head": DENSE_OPTION}
HALF = "float16"


class HostDriver:
    """Of a GPU whose work is done when it was asked for; a graph is the call itself, and is counted."""

    l2_bytes = 1024

    def __init__(self) -> None:
        self.graphs = 0
        self.refusal = ""
        self.work: Any = None

    def flush(self) -> None:
        pass

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def capture(self, work: Any) -> Any:
        if self.refusal:
            raise RuntimeError(self.refusal)
        self.graphs, self.work = self.graphs + 1, work
        return work

    def wait(self) -> None:
        pass


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> HostDriver:
    found, machine = HostDriver(), EmulatedTorchMachine("sm_80")
    monkeypatch.setattr(convert_model, "GPU", "cpu")
    monkeypatch.setattr(gpu_engines, "open_torch_driver", lambda: found)
    for module in (sparse_linear, sparse_conv):
        monkeypatch.setattr(module, "machine_of", lambda device: machine)
    return found


@pytest.fixture
def task(tmp_path: Path) -> Task:
    (tmp_path / "net.py").write_text(TASK)
    return load_task(str(tmp_path / "net.py"))


@pytest.fixture
def folder(task: Task, tmp_path: Path) -> Path:
    """The task's model pruned by magnitude, for a GPU."""
    model, masks = task.model(), {}
    for name, option in CHOICES.items():
        matrix = weight_matrix(model.get_submodule(name))
        masks[name] = torch.from_numpy(parse(option.pattern).mask(matrix.square().numpy(), option.sparsity))
        set_weight_matrix(model.get_submodule(name), torch.where(masks[name], matrix, 0.0))
    choices = {name: (option.pattern, option.sparsity) for name, option in CHOICES.items()}
    made = make_profile(task.name, task.model(), choices)
    made = type(made)(**{**vars(made), "backend": "cupy", "precisions": HALF, "threads": 1, "device": "nvidia-h200"})
    masks.pop("head")
    save_pruned(tmp_path / "pruned", model, masks, made, {"task": task.name})
    return tmp_path / "pruned"


def last_result(driver: HostDriver) -> Any:
    """What the model that was captured last computed: repeated calls of it are one graph."""
    if isinstance(driver.work, LastResult):
        return driver.work.last
    [calls] = [cell.cell_contents for cell in driver.work.__closure__]
    return calls[0].last


def assert_alike(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Four roundings to half on the way to a result, each 2^-11 of values as large as the largest."""
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=float(expected.abs().max()) * 8 * 2**-11)


def test_a_pruned_model_is_timed_as_a_graph_and_computes_what_torch_does(
    task: Task, folder: Path, driver: HostDriver
) -> None:
    timed = gpu_engines.build_folder_on_gpu(task.reference, HALF, str(folder))
    assert driver.graphs == 1 and timed.facts["timer"] == "cuda_event"
    assert min(timed.burst(0.001).samples) > 0
    pruned, choices = load_pruned(folder, task.model())
    converted = convert_model.convert_on_gpu(task.model(), choices, task.example(), HALF)
    kinds = {name: type(converted.get_submodule(name)) for name in CHOICES}
    assert kinds == {"up": SparseLinear, "down": SparseLinear, "head": nn.Linear}
    with torch.no_grad():
        expected = task.example().call(pruned)["all"]
        pruned, choices = load_pruned(folder, task.model())
        converted = convert_model.convert_on_gpu(pruned, choices, task.example(), HALF)
        found = convert_model.place_inputs(task.example(), HALF).call(converted)
    assert_alike(found["all"], expected)
    assert found["ids"].dtype == torch.int64


def test_without_a_gpu_a_model_for_one_is_refused(task: Task, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EnvironmentUnusable, match="was searched for a GPU, and torch finds none"):
        deployed_model.load_deployed(folder, task.model(), dict(task.example().keywords))


def test_a_loaded_model_is_the_one_that_was_timed(task: Task, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    example = dict(convert_model.place_inputs(task.example(), HALF).keywords)  # as the docstring asks for
    fast = deployed_model.load_deployed(folder, task.model(), example)
    pruned, _ = load_pruned(folder, task.model())
    with torch.no_grad():
        expected = task.example().call(pruned)["all"]
    assert_alike(convert_model.place_inputs(task.example(), HALF).call(fast)["all"], expected)


def test_profiles_are_built_with_random_masks_and_from_the_database(
    task: Task, tmp_path: Path, driver: HostDriver
) -> None:
    model, folder = task.model(), tmp_path / "database"
    options = {name: (option,) for name, option in CHOICES.items()}
    fill_database(task, model, options, Database(folder, hash_model(model)), lambda *_: None)
    given = task.reference, str(folder), hash_model(model), CHOICES
    for build, (pruned, _, example) in (
        (lambda: gpu_engines.build_random_on_gpu(task.reference, HALF, CHOICES), mask_at_random(given[0], CHOICES)),
        (lambda: gpu_engines.build_database_on_gpu(given[0], HALF, *given[1:]), prune_from_database(*given)),
    ):
        build()
        with torch.no_grad():
            assert_alike(last_result(driver)["all"], example.call(pruned)["all"])
    assert driver.graphs == 2


def test_free_layers_compute_once(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for kind, name in ((SparseLinear, "_multiply"), (nn.Linear, "forward")):
        original = getattr(kind, name)

        def counted(self: Any, *given: Any, original: Any = original, kind: Any = kind) -> Any:
            calls.append(kind.__name__)
            return original(self, *given)

        monkeypatch.setattr(kind, name, counted)
    converted = []
    convert = convert_model.convert_on_gpu

    def kept(*given: Any) -> nn.Module:
        converted.append(convert(*given))
        calls.clear()
        return converted[-1]

    monkeypatch.setattr(gpu_engines, "convert_on_gpu", kept)
    timed = gpu_engines.build_free_on_gpu(task.reference, HALF, CHOICES)
    timed.burst(0.001)
    assert sorted(calls) == ["Linear", "SparseLinear", "SparseLinear"]


def test_both_models_are_scored_on_the_gpu_as_the_task_calls_them(task: Task, folder: Path) -> None:
    dense, pruned = gpu_engines.score_on_gpu(task.reference, HALF, str(folder))
    of_pruned, _ = load_pruned(folder, task.model())
    for found, model in ((dense, task.model()), (pruned, of_pruned)):
        assert found == pytest.approx(task.score(model), abs=0.2)  # 105 results of about 1, rounded to half
    assert abs(dense - pruned) > 0.2


def test_a_call_that_cannot_be_captured_is_told_with_the_reason(task: Task, driver: HostDriver) -> None:
    driver.refusal = "operation not permitted when stream\nis capturing"
    message = "by torch cannot be captured into a CUDA graph: operation not permitted when stream is capturing"
    with pytest.raises(NotCaptured, match=message):
        gpu_engines.build_dense_torch_gpu(task.reference, HALF)


@pytest.mark.parametrize("wrong", [False, True])
def test_compiled_engines_must_agree_with_torch(task: Task, monkeypatch: pytest.MonkeyPatch, wrong: bool) -> None:
    def change(run: Any) -> Any:
        def changed(**given: Any) -> Any:
            found = run(**given)
            return {**found, "all": found["all"] + (0.5 * found["all"].abs().max() if wrong else 0)}

        return changed

    asked: dict[str, Any] = {}

    def compile_exported(exported: Any, **options: Any) -> Any:
        asked.update(options)
        return change(exported.module())

    tensorrt = types.SimpleNamespace(dynamo=types.SimpleNamespace(compile=compile_exported))
    monkeypatch.setitem(sys.modules, "torch_tensorrt", tensorrt)
    monkeypatch.setattr(torch, "compile", lambda model, mode: change(model))
    for build in (gpu_engines.build_dense_torch_gpu_compiled, gpu_engines.build_dense_tensorrt):
        if wrong:
            with pytest.raises(WrongResult, match="and torch compute different outputs"):
                build(task.reference, HALF)
        else:
            assert build(task.reference, HALF).inner_loops >= 1
    assert (
        asked["use_explicit_typing"]
        and asked["min_block_size"] == 1
        and list(asked["kwarg_inputs"]) == ["ids", "scale"]
    )


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_every_engine_runs_in_the_type_that_is_asked_for(task: Task, driver: HostDriver, precision: str) -> None:
    for build in (gpu_engines.build_dense_torch_gpu, gpu_engines.build_dense_torch_gpu_folded):
        build(task.reference, precision)
        assert last_result(driver)["all"].dtype == getattr(torch, precision)
    gpu_engines.build_random_on_gpu(task.reference, precision, CHOICES)
    assert last_result(driver)["all"].dtype == getattr(torch, precision)


def test_norms_are_folded_and_images_lie_in_channels_last_where_torch_competes(
    tmp_path: Path, driver: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "images.py").write_text(IMAGES)
    folded = []
    convert = gpu_engines.convert_on_gpu
    monkeypatch.setattr(gpu_engines, "convert_on_gpu", lambda *given: folded.append(convert(*given)) or folded[-1])
    gpu_engines.build_dense_torch_gpu_folded(str(tmp_path / "images.py"), HALF)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded[0].modules())
    assert last_result(driver).is_contiguous(memory_format=torch.channels_last)
    task = load_task(str(tmp_path / "images.py"))
    with torch.no_grad():
        assert_alike(last_result(driver), task.example().call(task.model()))


def test_a_model_that_views_images_in_their_order_competes_in_that_order(tmp_path: Path, driver: HostDriver) -> None:
    viewed = IMAGES.replace("nn.Conv2d(8, 6, 3))", "nn.Conv2d(8, 6, 3), View())")
    view = "class View(nn.Module):\n    def forward(self, x): return x.view(len(x), -1)\n"
    (tmp_path / "viewed.py").write_text(f"from torch import nn\n{view}{viewed}")
    gpu_engines.build_dense_torch_gpu_folded(str(tmp_path / "viewed.py"), HALF)
    task = load_task(str(tmp_path / "viewed.py"))
    with torch.no_grad():
        assert_alike(last_result(driver), task.example().call(task.model()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_norm_is_folded_without_further_roundings(dtype: torch.dtype, rng: np.random.Generator) -> None:
    torch.manual_seed(int(rng.integers(2**31)))
    layer, norm = nn.Linear(8, 64).to(dtype), nn.BatchNorm1d(64).to(dtype).eval()
    for values in (norm.running_mean, norm.running_var, norm.weight.data, norm.bias.data):
        values.uniform_(0.1, 3)
    gain = (norm.running_var.double() + norm.eps).rsqrt() * norm.weight.double()
    weight, shift = layer.weight.double() * gain[:, None], (layer.bias.double() - norm.running_mean.double()) * gain
    fold_norm(layer, norm)
    eps = torch.finfo(dtype).eps / 2 * 1.01  # one rounding to the type, and a little of float32's
    torch.testing.assert_close(layer.weight.double(), weight, rtol=eps, atol=0)
    expected = shift + norm.bias.double()
    torch.testing.assert_close(layer.bias.double(), expected, rtol=eps, atol=1e-6)
