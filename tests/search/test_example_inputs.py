"""Inputs of a model may be keywords and lie in dicts: the batch is found, and exporters get tensors alone."""

from collections import UserDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from search.artifacts.onnx_export import export_onnx, find_layer_values
from search.example_inputs import ExampleInputs, convert_to_tensor_call
from search.whole_model.model_engines import export_once

X = torch.linspace(-1, 1, 24).view(4, 6)
Pair = namedtuple("Pair", "left right")


class Nested(nn.Module):
    """A model of keywords: a dict of tensors, an optional mask, a number and a flag."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, scale: float = 1.0, *, batch: dict[str, Any], mask: Tensor | None = None, turn: bool) -> Tensor:
        y = self.second(self.first(batch["x"]).relu() * scale)
        y = y if mask is None else y * mask
        return -y if turn else y


NESTED = ExampleInputs(keywords={"mask": torch.tensor(2.0), "batch": {"x": X, "n": 3}, "scale": 0.5, "turn": True})


@pytest.mark.parametrize(
    ("inputs", "place", "size"),
    [
        (ExampleInputs((X,)), "argument 1", 4),
        (ExampleInputs((torch.tensor(3.0), X)), "argument 2", 4),
        (ExampleInputs((None, 7, [True, {"x": X}])), "argument 3[1]['x']", 4),
        (ExampleInputs((Pair(None, X),)), "argument 1[1]", 4),
        (ExampleInputs((UserDict(x=X),)), "argument 1['x']", 4),
        (ExampleInputs((X.T,), {"x": X}), "argument 1", 6),
        (ExampleInputs(keywords={"flag": None, "ids": X}), "keyword ids", 4),
        (NESTED, "keyword batch['x']", 4),
    ],
)
def test_the_batch_is_the_first_dimension_of_the_first_tensor_that_has_one(
    inputs: ExampleInputs, place: str, size: int
) -> None:
    assert inputs.find_batch() == (place, size) and inputs.batch == size


@pytest.mark.parametrize("arguments", [(), (None,), (torch.tensor(1.0),), ({"n": 3},)])
def test_inputs_without_a_batch_are_told_apart(arguments: tuple[Any, ...]) -> None:
    assert ExampleInputs(arguments).find_batch() is None


def test_mapped_inputs_keep_their_structure_and_classes() -> None:
    given = ExampleInputs((Pair(X, 7), UserDict(x=X), [None, (X,)]), {"flag": True})
    found = given.map_tensors(lambda tensor: tensor + 1)
    pair, mapping, (nothing, (last,)) = found.arguments
    assert isinstance(pair, Pair) and pair.right == 7 and isinstance(mapping, UserDict) and nothing is None
    assert all(torch.equal(it, X + 1) for it in (pair.left, mapping["x"], last)) and found.keywords == {"flag": True}
    assert all(tensor is X for tensor in given.tensors())  # what was given did not change


def test_positional_tensors_are_described_by_their_shapes_as_before() -> None:
    assert ExampleInputs((X, X.T)).describe() == [[4, 6], [6, 4]]


def test_descriptions_tell_inputs_apart_that_have_the_same_tensors() -> None:
    given = [((X, None), {}), ((X,), {}), ((), {"x": X}), (({"x": X},), {}), ((), {"y": X})]
    assert len({str(ExampleInputs(*one).describe()) for one in given}) == 5


def test_a_model_of_positional_tensors_is_exported_as_it_is() -> None:
    model = nn.Linear(6, 2)
    called = convert_to_tensor_call(model, ExampleInputs((X,)))
    assert called.model is model and called.tensors == (X,) and called.prefix == ""


@pytest.mark.parametrize("newer", [True, False])
def test_both_exporters_take_nested_keywords(newer: bool, tmp_path: Path) -> None:
    model = Nested().eval()
    called = convert_to_tensor_call(model, NESTED)
    path = tmp_path / "model.onnx"
    if newer:
        assert export_once(called.model, called.tensors, tmp_path) == path
    else:
        export_onnx(called.model, called.tensors, path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feed = {it.name: x.numpy() for it, x in zip(session.get_inputs(), called.tensors, strict=True)}
    (found,) = session.run(None, feed)
    with torch.no_grad():
        expected = model(0.5, batch={"x": X}, mask=torch.tensor(2.0), turn=True)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-6)


def test_layers_of_an_export_with_keywords_are_found_under_their_own_names(tmp_path: Path) -> None:
    called = convert_to_tensor_call(Nested().eval(), NESTED)
    export_onnx(called.model, called.tensors, tmp_path / "model.onnx")
    values = find_layer_values(called.model, called.tensors, tmp_path / "model.onnx")
    assert [name.removeprefix(called.prefix) for name in values.values()] == ["first", "second"]
