"""Whole models as workers build them: what they share, and what it takes when sparse layers are free."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from latbench.backends.cpu import openvino
from search.example_inputs import list_tensors
from search.problem.layers import DENSE, Option
from search.pruning.storage.model_folder import build_layer_pattern
from search.whole_model.model_engines import (
    build_dense_numba_bf16,
    build_dense_openvino_bf16,
    build_dense_torch,
    build_dense_torch_bf16,
    build_layers_free,
    build_random_pruned,
    check_outputs,
    convert_to_arrays,
    export_once,
)
from search.whole_model.sessions import OptionsByLayer
from sparse_kernels.cpu.runtime import threads as threads_of_kernels
from sparse_kernels.nn import sparse_conv, sparse_layer, sparse_linear
from sparse_kernels.oracle import WrongResult

TASK = str(Path(__file__).parents[1] / "pruning_task.py")
# One input through two layers of one convolution: it is asked for outputs of two sizes.
TWICE = f"""
import torch
from search.task import load_task
base = load_task({TASK!r})
calibration, loss, score = base.calibration, base.loss, base.score
class Twice(torch.torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(6, 6, 3, padding=1)
    def forward(self, x):
        return self.conv(x).sum(), self.conv(torch.nn.functional.max_pool2d(x, 2)).sum()
def model():
    torch.manual_seed(0)
    return Twice().eval()
def example(): return base.example()
"""

# The first convolution is not searched: it runs on our kernels, and is part of the rest.
FIRST = f"""
import torch
from search.task import load_task
base = load_task({TASK!r})
calibration, loss, score = base.calibration, base.loss, base.score
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 6, 3), torch.nn.ReLU(), torch.nn.Conv2d(6, 8, 3)).eval()
def example(): return (base.example().arguments[0][:, :3],)
"""
TASKS = {"twice": TWICE, "first": FIRST}


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one whenever a sparse layer computes on the CPU."""
    found: list[int] = []
    set_thread_count: Callable[[int], Any] = threads_of_kernels.set_thread_count

    def counted(threads: int) -> Any:
        found.append(threads)
        return set_thread_count(threads)

    for module in (sparse_layer, sparse_linear, sparse_conv):
        monkeypatch.setattr(module, "threads", SimpleNamespace(set_thread_count=counted))  # as layers know it
    return found


def tensors(output: Any) -> list[torch.Tensor]:
    return list(output) if isinstance(output, tuple) else [output]


@pytest.mark.parametrize(
    ("task", "choices", "layers", "rest"),
    [
        (TASK, {"conv": Option("vector:4", 0.5), "fc": Option(DENSE, 0.0)}, 2, 0),
        ("twice", {"conv": Option("unstructured", 0.5)}, 2, 0),
        ("first", {"2": Option("unstructured", 0.5)}, 1, 1),
    ],
    ids=["layers of two kinds", "a layer called twice", "a first layer that is not searched"],
)
def test_free_layers_compute_once_and_the_rest_as_always(
    task: str, choices: OptionsByLayer, layers: int, rest: int, computed: list[int], tmp_path: Path
) -> None:
    if task in TASKS:
        path = tmp_path / f"{task}.py"
        path.write_text(TASKS[task])
        task = str(path)
    pruned: Any = build_random_pruned(task, 1, "numba", choices)
    free = build_layers_free(task, 1, choices)
    expected, first = tensors(pruned()), tensors(free())
    computed.clear()
    again = tensors(free())
    assert len(computed) == rest
    computed.clear()
    for a, b, c in zip(expected, first, again, strict=True):
        torch.testing.assert_close(b, a)
        torch.testing.assert_close(c, b, rtol=0, atol=0)
    pruned()  # others in this process compute
    assert len(computed) == layers + rest


CHOICES = {"conv": Option("vector:4", 0.5), "fc": Option("vector:8", 0.5)}
HALVES = {name: replace(option, precision="bfloat16") for name, option in CHOICES.items()}


def test_in_bfloat16_layers_are_whose_rows_share_columns() -> None:
    specs = ["dense", "vector:8", "shflbw:4", "block:4x4", "vector:1", "unstructured", "nm:2:4"]
    found = [build_layer_pattern(spec, "bfloat16", None).precision for spec in specs]
    assert found == ["bfloat16"] * 4 + ["float32"] * 3


def test_models_in_bfloat16_are_near_those_in_float32_and_not_the_same() -> None:
    dense: Any = build_dense_torch(TASK, 1)
    exact: Any = build_random_pruned(TASK, 1, "numba", CHOICES)
    for expected, build in (
        (dense(), partial(build_dense_torch_bf16, TASK, 1)),
        (dense(), partial(build_dense_numba_bf16, TASK, 1)),
        (exact(), partial(build_random_pruned, TASK, 1, "numba", HALVES)),
        (exact(), partial(build_layers_free, TASK, 1, HALVES)),
    ):
        run: Any = build()
        found = run().float()
        check_outputs([found.numpy()], convert_to_arrays(list_tensors(expected)), "this", 0.05)
        with pytest.raises(WrongResult):
            check_outputs([found.numpy()], convert_to_arrays(list_tensors(expected)), "this", 1e-6)


def test_openvino_computes_a_model_in_bfloat16_where_the_processor_can(tmp_path: Path) -> None:
    run: Any = build_dense_openvino_bf16(TASK, 1, str(tmp_path))
    exact: Any = build_dense_torch(TASK, 1)
    found, expected = run(), convert_to_arrays(list_tensors(exact()))
    check_outputs(found, expected, "OpenVINO", 0.05)
    if "BF16" in openvino.openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        with pytest.raises(WrongResult):
            check_outputs(found, expected, "OpenVINO", 1e-5)


def test_a_model_is_exported_once_for_all_engines_of_a_timing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def export(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...], path: str, **_: Any) -> None:
        asked.append(path)
        Path(path).write_bytes(b"half")
        if len(asked) == 1:
            raise RuntimeError("no such operator")
        time.sleep(0.05)
        Path(path + ".data").write_bytes(b"weights")
        Path(path).write_bytes(b"whole")

    monkeypatch.setattr("torch.onnx.export", export)
    with pytest.raises(RuntimeError, match="no such operator"):
        export_once(torch.nn.Linear(1, 1), (), tmp_path)
    assert not (tmp_path / "model.onnx").exists()
    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(lambda _: export_once(torch.nn.Linear(1, 1), (), tmp_path), range(3)))
    assert len(asked) == 2  # one that failed, one for the three
    assert {path.read_bytes() for path in paths} == {b"whole"}
    exported = {path.name for path in tmp_path.iterdir() if path.suffix != ".lock"}
    assert exported == {"model.onnx", "model.onnx.data"}
