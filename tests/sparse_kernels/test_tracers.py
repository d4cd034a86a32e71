"""Whatever traces, exports, compiles or transforms a converted model gives what the model gives, or is refused.

Every way is tried on inputs that were not traced: a result that was taken for a constant would stay what it was.
"""

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from sparse_kernels.convert import LayerPattern, convert
from sparse_kernels.nn import SparseLayer, SparseLinear
from sparse_kernels.patterns import Dense, parse
from sparse_kernels.prunable_layers import survey_layers, weight_matrix

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
    pytest.mark.filterwarnings("ignore:The feature will be removed:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:You are using the legacy TorchScript-based ONNX export:DeprecationWarning"),
]


class Attends(nn.Module):
    """Heads of attention between two sparse layers."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.query(x).view(*x.shape[:2], 3, 4, 8)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(33, 24)), (4, 33)),
    "tokens in tiles": (lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 24)), (130, 32)),
    "images in frames": (
        lambda: nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)), (2, 4, 9, 7),
    ),
    "pooled images": (
        lambda: nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.MaxPool2d(3, 2, 1), nn.Conv2d(8, 8, 3, padding=1)),
        (2, 4, 9, 7),
    ),
    "sequences": (
        lambda: nn.Sequential(
            nn.Conv1d(4, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 8, 5, stride=2)
        ),
        (2, 4, 13),
    ),
    "attention": (Attends, (2, 19, 32)),
    "torch's encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2, enable_nested_tensor=False
        ),
        (2, 11, 32),
    ),
}  # fmt: skip


def export(model: nn.Module, x: Tensor, **settings: Any) -> nn.Module:
    return torch.export.export(model, (x,), **settings).module()


def save_exported(model: nn.Module, x: Tensor) -> nn.Module:
    torch.export.save(torch.export.export(model, (x,)), file := io.BytesIO())
    file.seek(0)
    return torch.export.load(file).module()


def save_traced(model: nn.Module, x: Tensor) -> nn.Module:
    torch.jit.save(torch.jit.trace(model, (x,)), file := io.BytesIO())
    file.seek(0)
    return torch.jit.load(file)


def export_any_batch(model: nn.Module, x: Tensor) -> nn.Module:
    batch = torch.export.Dim("batch", min=2, max=512)
    return torch.export.export(model, (x,), dynamic_shapes=({0: batch},)).module()


def count_operations(model: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    def counted(other: Tensor) -> Tensor:
        with FlopCounterMode(display=False):
            return model(other)

    return counted


def on_a_device(model: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    def called(other: Tensor) -> Tensor:
        with torch.device("cpu"):
            return model(other)

    return called


TRACERS: dict[str, Callable[[nn.Module, Tensor], Callable[[Tensor], Tensor]]] = {
    "jit.trace": lambda model, x: torch.jit.trace(model, (x,)),
    "jit.trace, saved": save_traced,
    "make_fx": lambda model, x: make_fx(model)(x),
    "export": export,
    "export, strict": lambda model, x: export(model, x, strict=True),
    "export of any batch": export_any_batch,
    "export, saved": save_exported,
    "compile": lambda model, x: torch.compile(model, backend="aot_eager"),
    "functionalize": lambda model, x: torch.func.functionalize(model),
    "vmap": lambda model, x: lambda other: torch.vmap(model)(other[:, None])[:, 0],
    "operations counted": count_operations,
    "a device's context": on_a_device,
}


def converted(model: nn.Module, size: tuple[int, ...], spec: str = "vector:8") -> tuple[nn.Module, Tensor, Tensor]:
    """A converted model with every layer at half its weights, its example input, and another input."""
    torch.manual_seed(0)
    choices = {}
    for name, layer in survey_layers(model.eval()).taken.items():
        pattern = parse(spec)
        sparsity = 0.0 if isinstance(pattern, Dense) else 0.5
        choices[name] = LayerPattern(pattern, pattern.mask(weight_matrix(layer).abs().double().numpy(), sparsity))
    x = torch.randn(size)
    return convert(model, choices, (x,)), x, torch.randn(size)


QUICK = ("tokens in tiles", "images in frames")


@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in MODELS]
)
@torch.no_grad()
def test_what_a_tracer_makes_of_a_model_is_the_model(name: str, tracer: str) -> None:
    make, size = MODELS[name]
    model, x, other = converted(make(), size)
    assert any(isinstance(module, SparseLayer) for module in model.modules())
    torch._dynamo.reset()
    made = TRACERS[tracer](model, x)
    torch.testing.assert_close(made(other), model(other), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", ["unstructured", "nm:2:4", "block:4x4", "shflbw:8", "dense"])
@torch.no_grad()
def test_an_operator_rebuilds_layers_of_every_format(spec: str) -> None:
    model, x, other = converted(nn.Sequential(nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 8)), (5, 32), spec)
    torch.testing.assert_close(save_traced(model, x)(other), model(other), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_another_process_runs_what_was_exported_and_traced(tmp_path: Path) -> None:
    model, x, other = converted(*(MODELS["images in frames"][0](), MODELS["images in frames"][1]))
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "exported.pt2")
    torch.jit.save(torch.jit.trace(model, (x,)), str(tmp_path / "traced.pt"))
    torch.save({"x": other, "y": model(other)}, tmp_path / "example.pt")
    script = """
import sys, torch, sparse_kernels.nn
folder = sys.argv[1]
example = torch.load(folder + "/example.pt")
with torch.no_grad():
    for model in (torch.export.load(folder + "/exported.pt2").module(), torch.jit.load(folder + "/traced.pt")):
        torch.testing.assert_close(model(example["x"]), example["y"], rtol=1e-4, atol=1e-5)
"""
    done = subprocess.run([sys.executable, "-P", "-c", script, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("torch's encoder", "attention")])
@torch.no_grad()
def test_a_graph_of_fx_calls_the_layers_as_modules(name: str) -> None:
    make, size = MODELS[name]
    model, _, other = converted(make(), size)
    traced = torch.fx.symbolic_trace(model)
    called = [traced.get_submodule(node.target) for node in traced.graph.nodes if node.op == "call_module"]
    assert sum(isinstance(module, SparseLayer) for module in called) == len(survey_layers(make()).taken)
    torch.testing.assert_close(traced(other), model(other), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_tensors_without_numbers_have_the_shape_of_the_result(name: str) -> None:
    make, size = MODELS[name]
    model, _, other = converted(make(), size)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = model(mode.from_tensor(other))
    real = model(other)
    assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


@pytest.mark.parametrize("dynamo", [False, True], ids=["older exporter", "newer exporter"])
@torch.no_grad()
def test_exporters_to_onnx_are_refused_and_told_the_way(dynamo: bool) -> None:
    model, x, _ = converted(MODELS["tokens in tiles"][0](), (130, 32))
    with pytest.raises(Exception, match="latbench prune --onnx"):
        torch.onnx.export(model, (x,), io.BytesIO(), dynamo=dynamo, verbose=False)


@torch.no_grad()
def test_openvino_names_the_operator_that_it_lacks() -> None:
    openvino = pytest.importorskip("openvino")
    model, x, _ = converted(MODELS["linear"][0](), (4, 33))
    with pytest.raises(Exception, match="No conversion rule found for operations: sparse_kernels::linear"):
        openvino.convert_model(model, example_input=(x,))


@torch.no_grad()
def test_script_is_refused_and_told_the_way() -> None:
    model, _, _ = converted(MODELS["linear"][0](), (4, 33))
    with pytest.raises(RuntimeError, match=r"use torch\.jit\.trace or torch\.export"):
        torch.jit.script(model)


def test_derivatives_are_refused_of_every_kind() -> None:
    layer = SparseLinear.from_dense(nn.Linear(8, 6), Dense(), None)
    x = torch.randn(3, 8)
    with pytest.raises(RuntimeError, match="for inference"):
        layer(x.clone().requires_grad_())
    with pytest.raises(RuntimeError, match="for inference"):
        torch.func.grad(lambda given: layer(given).sum())(x)
    with pytest.raises(RuntimeError, match="for inference"):
        torch.func.jvp(layer, (x,), (torch.ones_like(x),))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="for inference"):
        layer(forward_ad.make_dual(x, torch.ones_like(x)))
    with forward_ad.dual_level():
        torch.testing.assert_close(layer(x), layer.forward(x))


@torch.no_grad()
def test_other_weights_for_one_call_are_used_in_that_call_alone() -> None:
    layer = SparseLinear.from_dense(nn.Linear(16, 6), Dense(), None)
    x = torch.randn(5, 16)
    before = layer(x)
    values, bias = layer.get_buffer("values"), layer.get_buffer("bias")
    for other in ({"values": 2 * values, "bias": 2 * bias}, {"bias": bias + before.new_tensor(1.0)}):
        expected = 2 * before if "values" in other else before + 1
        torch.testing.assert_close(torch.func.functional_call(layer, other, (x,)), expected)
    assert torch.equal(layer(x), before)


@torch.no_grad()
def test_an_operator_sees_weights_that_were_written_to() -> None:
    model, x, other = converted(MODELS["linear"][0](), (4, 33))
    traced = torch.jit.trace(model, (x,))
    before = traced(other)
    for tensor in traced.state_dict().values():
        if tensor.is_floating_point():
            tensor.mul_(2)
    torch.testing.assert_close(traced(other), 2 * before)


@torch.no_grad()
def test_vmap_takes_single_images_and_refuses_weights_of_an_ensemble() -> None:
    model, _, other = converted(MODELS["images in frames"][0](), (2, 4, 9, 7))
    torch.testing.assert_close(torch.vmap(model)(other), model(other), rtol=1e-4, atol=1e-5)
    layers = [SparseLinear.from_dense(nn.Linear(8, 6), Dense(), None) for _ in range(2)]
    parameters, buffers = torch.func.stack_module_state(layers)
    with pytest.raises(RuntimeError, match="one after the other"):
        torch.vmap(lambda held, x: torch.func.functional_call(layers[0], held, (x,)), in_dims=(0, None))(
            {**parameters, **buffers}, torch.randn(3, 8)
        )
