"""Models as ONNX files for DeepSparse: what it reads, zeros that stay zeros, layers that are found again."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper, numpy_helper
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention

from latbench.errors import LatbenchError
from search.artifacts import onnx_export
from search.artifacts.onnx_export import export_onnx, find_layer_values
from search.artifacts.onnx_weights import list_weight_shapes, remove_copies, store_transposes_once
from search.example_inputs import list_tensors
from search.whole_model.model_engines import check_outputs
from sparse_kernels.oracle import WrongResult


class Inner(nn.Module):
    """Containers of containers, and a weight that belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.sequence = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
        self.several = nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 6))])
        self.free = nn.Parameter(torch.randn(4, 6))
        self.named = nn.ModuleDict({"last": nn.Linear(4, 4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.sequence(x)
        for module in self.several:
            x = module(x)
        result: torch.Tensor = self.named["last"](linear(x, self.free))
        return result


class Outer(nn.Module):
    """The same names at several places; called in another order than they were made."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.parts = nn.ModuleList([Inner(), Inner()])
        self.rest = nn.Sequential(Inner(), nn.Sequential(Inner()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in reversed(self.parts):
            x = part(x)
        result: torch.Tensor = self.head(self.rest(x))
        return result


class Images(nn.Module):
    """Convolutions with and without a norm to fold, a depthwise one, a layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8)
        self.point = nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        result: torch.Tensor = self.head(self.point(self.point(self.depthwise(x))).mean((2, 3)))
        return result


@pytest.fixture
def images(rng: np.random.Generator) -> nn.Module:
    torch.manual_seed(int(rng.integers(2**31)))
    model = Images()
    for _ in range(3):
        model(torch.randn(4, 3, 6, 6))  # norms that are not the identity
    return model.eval()


X = torch.linspace(-1, 1, 2 * 3 * 4).view(2, 3, 4)
PICTURES = torch.linspace(-1, 1, 2 * 3 * 6 * 6).view(2, 3, 6, 6)


def run(path: Path, x: torch.Tensor) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    result: np.ndarray = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    return result


def test_a_file_is_one_that_deepsparse_reads_and_computes_the_same(images: nn.Module, tmp_path: Path) -> None:
    export_onnx(images, (PICTURES,), tmp_path / "model.onnx")
    model = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    assert model.ir_version <= 9
    assert all(imported.version <= 19 for imported in model.opset_import)
    assert not any(weight.external_data for weight in model.graph.initializer)
    assert [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim] == [2, 3, 6, 6]
    assert list(tmp_path.iterdir()) == [tmp_path / "model.onnx"]
    with torch.no_grad():
        expected = images(PICTURES).numpy()
    np.testing.assert_allclose(run(tmp_path / "model.onnx", PICTURES), expected, rtol=1e-5, atol=1e-6)


def test_norms_are_written_out(tmp_path: Path) -> None:
    export_onnx(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)).eval(), (X,), tmp_path / "model.onnx")
    assert "LayerNormalization" not in {node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node}


def test_pruned_weights_stay_zero_where_a_norm_is_folded_into_them(images: nn.Module, tmp_path: Path) -> None:
    pruned = copy.deepcopy(images)
    weight = pruned.first.weight
    mask = torch.arange(weight.numel()).view_as(weight) % 3 == 0
    with torch.no_grad():
        weight.mul_(mask)
    export_onnx(pruned, (PICTURES,), tmp_path / "model.onnx")
    graph = onnx.load(tmp_path / "model.onnx").graph
    (value,) = [value for value, layer in find_layer_values(pruned, (PICTURES,), tmp_path / "model.onnx").items()
                if layer == "first"]  # fmt: skip
    (node,) = [node for node in graph.node if node.output[0] == value]
    (stored,) = [numpy_helper.to_array(it) for it in graph.initializer if it.name == node.input[1]]
    assert not np.array_equal(stored, weight.detach().numpy())  # folded
    np.testing.assert_array_equal(stored != 0, mask.numpy())


def test_layers_are_found_again_wherever_they_are(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Outer().eval()
    export_onnx(model, (X,), tmp_path / "model.onnx")
    found = find_layer_values(model, (X,), tmp_path / "model.onnx")
    graph = onnx.load(tmp_path / "model.onnx").graph
    weights = {it.name: numpy_helper.to_array(it) for it in graph.initializer}
    computed_by = {node.output[0]: node for node in graph.node}
    assert sorted(found.values()) == sorted(
        name for name, module in model.named_modules() if isinstance(module, nn.Linear)
    )
    for value, layer in found.items():
        stored, own = weights[computed_by[value].input[1]], model.get_submodule(layer).weight.detach().numpy()
        assert np.array_equal(stored, own) or np.array_equal(stored, own.T), layer


def test_a_layer_that_is_called_twice_computes_two_values(images: nn.Module, tmp_path: Path) -> None:
    export_onnx(images, (PICTURES,), tmp_path / "model.onnx")
    found = find_layer_values(images, (PICTURES,), tmp_path / "model.onnx")
    assert list(found.values()) == ["first", "depthwise", "point", "point", "head"]


def test_a_layer_without_surroundings_is_found(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3)).eval()
    export_onnx(model, (X[0],), tmp_path / "model.onnx")
    assert list(find_layer_values(model, (X[0],), tmp_path / "model.onnx").values()) == ["0"]


class NoOnnx(nn.Module):
    """What ONNX has no operator for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(x).real


def test_attention_is_written_out(tmp_path: Path) -> None:
    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return scaled_dot_product_attention(x, x, x)

    export_onnx(Attention(), (X,), tmp_path / "model.onnx")
    expected = scaled_dot_product_attention(X, X, X).numpy()
    np.testing.assert_allclose(run(tmp_path / "model.onnx", X), expected, rtol=1e-5, atol=1e-6)


def test_what_cannot_be_exported_is_said_in_a_line_and_nothing_is_left(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = "^the model cannot be exported to ONNX: UnsupportedOperatorError: .*fft_fft.* is not supported$"
    with pytest.raises(LatbenchError, match=said):
        export_onnx(NoOnnx(), (X,), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("output", "count"),
    [(X, 1), ((X, X), 2), ([X, (X,)], 2), ({"a": X, "b": None}, 1), (None, 0)],
)
def test_a_models_output_is_flat(output: Any, count: int) -> None:
    assert [tensor.shape for tensor in list_tensors(output)] == [tuple(X.shape)] * count


def test_wrong_outputs_are_told_from_rounded_ones(rng: np.random.Generator) -> None:
    y = rng.standard_normal((3, 5)).astype(np.float32)
    check_outputs([y * np.float32(1 + 1e-6)], [y], "it")
    check_outputs([np.zeros((0, 5), np.float32)], [np.zeros((0, 5), np.float32)], "it")
    wrong = [np.broadcast_to(y[:1], y.shape), y[::-1], y + 0.01 * np.abs(y).max(), np.full_like(y, np.nan)]
    for other in wrong:
        with pytest.raises(WrongResult, match="it and torch compute different outputs"):
            check_outputs([other], [y], "it")
    with pytest.raises(WrongResult, match=r"returns outputs of shapes \[\(5, 3\)\], torch \[\(3, 5\)\]"):
        check_outputs([y.T], [y], "it")
    with pytest.raises(WrongResult, match="returns outputs of shapes"):
        check_outputs([], [y], "it")


class Equal(nn.Module):
    """Layers that begin as clones of one, as nn.TransformerEncoder's do; one is called twice, one is not a clone."""

    def __init__(self) -> None:
        super().__init__()
        first = nn.Linear(4, 4)
        self.blocks = nn.Sequential(*(copy.deepcopy(first) for _ in range(3)))
        self.twice = copy.deepcopy(first)
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.twice(self.twice(self.blocks(x))))
        return result


@pytest.mark.parametrize("x", [X, X[0]], ids=["matmul", "gemm"])
def test_layers_with_equal_weights_are_all_found(x: torch.Tensor, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Equal().eval()
    path = tmp_path / "model.onnx"
    export_onnx(model, (x,), path)
    found = find_layer_values(model, (x,), path)
    assert list(found.values()) == ["blocks.0", "blocks.1", "blocks.2", "twice", "twice", "head"]
    graph = onnx.load(path).graph
    assert "Identity" not in {node.op_type for node in graph.node}
    assert len([weight for weight in graph.initializer if len(weight.dims) == 2]) == 2
    with torch.no_grad():
        np.testing.assert_allclose(run(path, x), model(x).numpy(), rtol=1e-5, atol=1e-6)


def test_layers_are_found_behind_copies_of_their_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file as the exporter leaves it: equal weights are read from Identity operations."""
    model = Equal().eval()
    path = tmp_path / "model.onnx"
    monkeypatch.setattr(onnx_export, "remove_copies", lambda graph: None)
    export_onnx(model, (X,), path)
    assert "Identity" in {node.op_type for node in onnx.load(path).graph.node}
    assert len(find_layer_values(model, (X,), path)) == 6


class Encoder(nn.Module):
    """Four clones of a layer of torch's own transformer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.body(x))
        return result


def test_every_layer_of_a_new_transformer_is_found(tmp_path: Path) -> None:
    model, x = Encoder().eval(), torch.linspace(-1, 1, 2 * 3 * 8).view(2, 3, 8)
    export_onnx(model, (x,), tmp_path / "model.onnx")
    expected = [f"body.layers.{block}.linear{number}" for block in range(4) for number in (1, 2)]
    assert list(find_layer_values(model, (x,), tmp_path / "model.onnx").values()) == [*expected, "head"]


class Tied(nn.Module):
    """An embedding that is tied to the output."""

    def __init__(self, biased: bool) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(3000, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 3000, bias=biased)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.layer(self.embedding(tokens)))
        return result


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(2, 9), (9,)])
def test_a_weight_that_is_read_transposed_too_is_stored_once(
    biased: bool, shape: tuple[int, ...], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, tokens = Tied(biased).eval(), torch.arange(9).expand(shape).contiguous()
    path = tmp_path / "model.onnx"
    export_onnx(model, (tokens,), path)
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert size < path.stat().st_size < size + 4096
    assert list(find_layer_values(model, (tokens,), path).values()) == ["layer", "head"]
    onnx.checker.check_model(onnx.load(path), full_check=True)
    with torch.no_grad():
        np.testing.assert_allclose(run(path, tokens), model(tokens).numpy(), rtol=1e-5, atol=1e-5)


def test_an_engine_can_have_the_weight_of_each_layer_as_the_layer_reads_it(tmp_path: Path) -> None:
    model, tokens = Tied(False).eval(), torch.arange(18).view(2, 9)
    path = tmp_path / "model.onnx"
    export_onnx(model, (tokens,), path, transposes_once=False)
    graph = onnx.load(path).graph
    stored = {weight.name for weight in graph.initializer}
    assert all(node.input[1] in stored for node in graph.node if node.op_type == "MatMul")
    assert list(find_layer_values(model, (tokens,), path).values()) == ["layer", "head"]


def build_graph(*nodes: onnx.NodeProto, outputs: tuple[str, ...] = ("y",), **weights: np.ndarray) -> onnx.GraphProto:
    """Return a graph of these operations and weights, from the input x."""
    kind = onnx.TensorProto.FLOAT
    return helper.make_graph(
        list(nodes), "g", [helper.make_tensor_value_info("x", kind, [2, 32])],
        [helper.make_tensor_value_info(name, kind, None) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )  # fmt: skip


def test_copies_of_copies_and_in_branches_are_removed_and_outputs_stay(rng: np.random.Generator) -> None:
    w = rng.standard_normal((32, 32)).astype(np.float32)
    branch = helper.make_graph(
        [helper.make_node("MatMul", ["x", "again"], ["inner"])], "branch", [],
        [helper.make_tensor_value_info("inner", onnx.TensorProto.FLOAT, None)],
    )  # fmt: skip
    graph = build_graph(
        helper.make_node("Identity", ["w"], ["copy"]),
        helper.make_node("Identity", ["copy"], ["again"]),
        helper.make_node("Identity", ["w"], ["shown"]),
        helper.make_node("Identity", ["x"], ["same"]),
        helper.make_node("If", ["yes"], ["y"], then_branch=branch, else_branch=branch),
        outputs=("y", "shown"), w=w, yes=np.array(True),
    )  # fmt: skip
    remove_copies(graph)
    assert [(node.op_type, list(node.output)) for node in graph.node] == [
        ("Identity", ["shown"]), ("Identity", ["same"]), ("If", ["y"]),
    ]  # fmt: skip
    assert [list(attribute.g.node[0].input) for attribute in graph.node[-1].attribute] == [["x", "w"]] * 2


def test_only_matrices_that_matmul_alone_reads_are_replaced_by_transposes(rng: np.random.Generator) -> None:
    w = rng.standard_normal((32, 32)).astype(np.float32)
    symmetric = (w + w.T).astype(np.float32)
    small = w[:4, :4].copy()
    graph = build_graph(
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("MatMul", ["a", "turned"], ["b"]),
        helper.make_node("MatMul", ["b", "s"], ["c"]),
        helper.make_node("Add", ["c", "added"], ["d"]),
        helper.make_node("MatMul", ["tiny", "tinier"], ["e"]),
        helper.make_node("Identity", ["d"], ["y"]),
        w=w, turned=w.T.copy(), s=symmetric, added=w.T.copy() + 1, tiny=small, tinier=small.T.copy(),
    )  # fmt: skip
    store_transposes_once(graph)
    [transpose] = [node for node in graph.node if node.op_type == "Transpose"]
    assert {transpose.input[0], transpose.output[0]} == {"w", "turned"}
    assert len(graph.initializer) == 5
    shapes = list_weight_shapes(graph)
    assert shapes["turned"] == [32, 32] and "y" not in shapes
