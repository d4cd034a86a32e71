"""Residual blocks in OpenVINO: layers compute their sums and ReLUs, and pooling computes strided shortcuts."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
import torch
from chain_task import prune_chain
from encoder_task import make_task
from torch import nn

from latbench.cli.commands.export import export as export_command
from search.example_inputs import TensorCall
from search.export.openvino.openvino_graph import LayerGraph
from search.export.openvino.openvino_model import OpenVINOModel
from search.export.openvino.strided_slices import pool_strided_slices
from search.pruning.storage.model_folder import load_pruned
from sparse_kernels.convert import convert
from sparse_kernels.cpu.export.cpu_levels import list_host_levels

operators = ov.opset13

# A block on its own input, one whose shortcut is strided and padded, one whose shortcut is a convolution, and a sum
# without a ReLU, of a linear layer.
RESIDUAL_TASK = """
import torch
from torch import nn
from torch.nn import functional as F

class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.c, self.d = nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.Conv2d(16, 16, 1)
        self.e, self.short = nn.Conv2d(16, 24, 1), nn.Conv2d(16, 24, 1)
        self.head = nn.Linear(24, 24)
    def forward(self, x):
        x = self.a(x).relu()
        x = (self.b(x) + x).relu()
        shortcut = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 4, 4))
        x = torch.relu(shortcut + self.d(self.c(x).relu()))
        x = (self.e(x) + self.short(x)).relu().mean((2, 3))
        return x + self.head(x)

def model():
    torch.manual_seed(0)
    return Blocks().eval()
def example():
    torch.manual_seed(1)
    return (torch.randn(5, 3, 9, 7),)
def calibration(): return [example()]
def loss(model, batch): return model(*batch).square().mean()
def score(model): return float(model(*example()).mean())
"""
RESIDUAL_LAYERS = {
    "b": "vector:8", "c": "vector:8", "d": "block:4x4", "e": "vector:8", "short": "vector:8", "head": "vector:8",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_residual_blocks_are_deployed_with_their_sums(tmp_path: Path, precision: str) -> None:
    if not list_host_levels():
        pytest.skip("no CPU level for which kernels are compiled ahead of time")
    task = make_task(tmp_path, RESIDUAL_TASK)
    pruned, deploy = prune_chain(tmp_path / "pruned", task, precision, RESIDUAL_LAYERS), tmp_path / "deploy"
    export_command(task.reference, pruned, deploy, to="openvino", level=[list_host_levels()[-1].name])
    layers = json.loads((deploy / "manifest.json").read_text())["layers"]
    assert {name for name, facts in layers.items() if facts["adds"]} == {"b", "d", "e", "head"}
    core = ov.Core()
    core.add_extension(str(deploy / "libmodel.so"))
    kinds = [node.get_type_name() for node in core.read_model(deploy / "model.xml").get_ops()]
    assert not {"Add", "Relu", "Slice"} & {*kinds} and kinds.count("SparseLayer") == 1 + len(RESIDUAL_LAYERS)
    model, choices = load_pruned(pruned, task.model())
    converted = convert(model, choices, task.example().arguments)
    for threads, batch in ((1, 5), (2, 1), (2, 7)):
        x = torch.randn(batch, 3, 9, 7)
        with torch.no_grad():
            expected = converted(x)
            rounding = float((expected - model(x)).abs().max()) if precision == "int8" else 0.0
        found = OpenVINOModel(deploy, threads)(x.numpy())
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 + rounding)


class Sums(nn.Module):
    """Sums that a layer may not take: of another shape, of a batch of one, beside another reader, twice the same."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d, self.e = (nn.Linear(8, 8) for _ in range(5))
        self.row, self.scalar = nn.Parameter(torch.ones(1, 8)), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x) + self.row
        z = self.b(y) + self.scalar
        again = self.c(z)
        doubled = self.d(again + z)
        return again - (doubled + doubled) + torch.nn.functional.gelu(self.e(x)) + z


def test_a_sum_of_another_shape_or_beside_another_reader_stays() -> None:
    torch.manual_seed(2)
    model, x = Sums().eval(), torch.randn(1, 8)
    layers: Any = {name: model.get_submodule(name) for name in "abcde"}
    graph = LayerGraph(TensorCall(model, (x,), ""), layers, (x,))
    assert graph.sums == set() and graph.activations["e"] == "gelu"


class Context(nn.Module):
    """Something of another input is added, which may be broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        return self.a(x) + context


class Pooled(nn.Module):
    """Tokens of a batch of one are rows, to which their mean is added."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x.flatten(0, 1)) + x.mean(1)


@pytest.mark.parametrize(
    ("model", "shapes"),
    [(Context(), [(1, 8), (1, 8)]), (Context(), [(3, 8), (3, 8)]), (Pooled(), [(1, 5, 8)]), (Pooled(), [(1, 1, 8)])],
)
def test_what_other_sizes_would_broadcast_is_not_added(model: nn.Module, shapes: list[tuple[int, ...]]) -> None:
    tensors = tuple(torch.randn(shape) for shape in shapes)
    model = copy.deepcopy(model).eval()
    layers: Any = {"a": model.get_submodule("a")}
    graph = LayerGraph(TensorCall(model, tensors, ""), layers, tensors)
    assert graph.sums == set()


def test_of_two_layers_one_adds_the_other_and_each_call_of_a_layer_adds_its_own() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = (self.a(x) + self.b(x)).relu()
            return (self.c(y) + y).relu() * (x + self.c(x))

    model, x = Pair().eval(), torch.randn(2, 8)
    layers: Any = {name: model.get_submodule(name) for name in "abc"}
    graph = LayerGraph(TensorCall(model, (x,), ""), layers, (x,))
    kinds = [node.get_type_name() for node in graph.model.get_ops()]
    assert graph.sums in ({"a", "c"}, {"b", "c"}) and kinds.count("SparseLayer") == 4
    assert "Add" not in kinds and "Relu" not in kinds
    inputs = [node.get_input_size() for node in graph.model.get_ops() if node.get_type_name() == "SparseLayer"]
    assert sorted(inputs) == [1, 2, 2, 2]


def build_slice(starts: list[int], steps: list[int], axes: list[int], ends: list[int] | None = None) -> ov.Model:
    """Return the model of one slice of images (1, 2, 5, 7)."""
    x = operators.parameter([1, 2, 5, 7], np.float32)
    ends = [2**62] * len(axes) if ends is None else ends
    return ov.Model([operators.slice(x, *map(np.array, (starts, ends, steps, axes)))], [x], "slice")


@pytest.mark.parametrize(
    ("starts", "steps", "axes"),
    [([0, 0], [2, 2], [2, 3]), ([0], [3], [-1]), ([0, 0], [4, 3], [-1, -2]), ([0], [9], [2])],
)
def test_rows_and_columns_at_steps_are_the_same_numbers_by_pooling(
    starts: list[int], steps: list[int], axes: list[int], rng: np.random.Generator
) -> None:
    x = rng.standard_normal((1, 2, 5, 7)).astype(np.float32)
    x[0, 0, 0, :4] = np.nan, np.inf, -np.inf, np.finfo(np.float32).max
    x[0, 1, 4, 6] = np.nan
    model = build_slice(starts, steps, axes)
    expected = ov.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})([x])[0].copy()
    assert pool_strided_slices(model) == 1
    found = ov.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})([x])[0]
    np.testing.assert_array_equal(found, expected)
    assert np.isnan(found).any()


@pytest.mark.parametrize(
    ("starts", "steps", "axes", "ends"),
    [
        ([1], [2], [2], None), ([0], [2], [1], None), ([0], [2], [0], None), ([0], [1], [2], None),
        ([0], [2], [3], [6]), ([-1], [-1], [2], [-(2**62)]),
    ],
)  # fmt: skip
def test_other_slices_stay(starts: list[int], steps: list[int], axes: list[int], ends: list[int] | None) -> None:
    assert pool_strided_slices(build_slice(starts, steps, axes, ends)) == 0
