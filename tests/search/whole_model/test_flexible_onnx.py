"""An ONNX file takes other batch sizes where it computes the same as torch there, and says why where it does not."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from search.example_inputs import ExampleInputs
from search.whole_model.flexible_onnx import export_flexible_onnx

onnxruntime = pytest.importorskip("onnxruntime")


class Scores(nn.Module):
    """Attention between tokens, with a mask that has a batch and positions that have none."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.inner(x) + positions
        weights = torch.softmax(x @ x.transpose(1, 2) + mask[:, None, :], -1)
        result: torch.Tensor = self.head((weights @ x).reshape(x.shape[0], -1, 6).mean(1))
        return result


class FixedBatch(nn.Module):
    """A model whose code names its batch, so torch itself refuses another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x.view(4, 5, 6))
        return result


class BakedIn(nn.Module):
    """A model whose batch a tracer takes for a constant: its export would be wrong for another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x) * float(int(x.shape[0]))
        return result


def make_inputs(rng: np.random.Generator) -> ExampleInputs:
    x = torch.from_numpy(rng.standard_normal((4, 5, 6)).astype(np.float32))
    mask = torch.from_numpy(rng.standard_normal((4, 5)).astype(np.float32))
    positions = torch.from_numpy(rng.standard_normal((5, 6)).astype(np.float32))
    return ExampleInputs((), {"x": x, "mask": mask, "positions": positions})


def list_shapes(path: Path) -> dict[str, list[int | str]]:
    """Shape of each input; an open dimension by its name."""
    return {
        given.name: [side.dim_param or side.dim_value for side in given.type.tensor_type.shape.dim]
        for given in onnx.load(path).graph.input
    }


@pytest.mark.parametrize("batch", [1, 3, 9])
def test_a_file_computes_what_torch_does_for_any_batch(batch: int, rng: np.random.Generator, tmp_path: Path) -> None:
    model, example, path = Scores().eval(), make_inputs(rng), tmp_path / "model.onnx"
    assert export_flexible_onnx(model, example, path) is None
    assert list_shapes(path) == {"x": ["batch", 5, 6], "mask": ["batch", 5], "positions": [5, 6]}
    rows = rng.integers(4, size=batch)
    feed = {name: example.keywords[name].numpy() for name in ("x", "mask", "positions")}
    feed |= {name: feed[name][rows] for name in ("x", "mask")}
    [found] = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, feed)
    with torch.no_grad():
        expected = model(**{name: torch.from_numpy(array) for name, array in feed.items()}).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (FixedBatch(), "the model raises RuntimeError"),
        (BakedIn(), "its export is wrong for a batch of 1"),
    ],
)
def test_a_model_that_needs_its_batch_gets_a_file_of_that_batch_and_the_reason(
    model: nn.Module, said: str, rng: np.random.Generator, tmp_path: Path
) -> None:
    example = ExampleInputs((make_inputs(rng).keywords["x"],))
    reason = export_flexible_onnx(model.eval(), example, tmp_path / "model.onnx")
    assert reason is not None and said in reason and "\n" not in reason
    assert list_shapes(tmp_path / "model.onnx") == {"input_1": [4, 5, 6]}
    assert list(tmp_path.iterdir()) == [tmp_path / "model.onnx"]
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    with torch.no_grad():
        expected = example.call(model).numpy()
    np.testing.assert_allclose(session.run(None, {"input_1": example.arguments[0].numpy()})[0], expected, rtol=1e-4)


def test_tensors_are_named_by_their_keywords_or_places() -> None:
    x = torch.zeros(2, 3)
    assert ExampleInputs((x, None, [x, x])).name_tensors() == ["input_1", "input_3_0", "input_3_1"]
    assert ExampleInputs((), {"ids": x, "past": {"keys": x}}).name_tensors() == ["ids", "past_keys"]
