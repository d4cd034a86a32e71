"""Dense models in eight bits, as OpenVINO's and ONNX Runtime's tools make them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from search.task import Task, load_task
from search.whole_model.int8_engines import (
    build_dense_onnxruntime_int8,
    build_dense_openvino_int8,
    list_calibration_calls,
    score_dense_int8,
)

TASK = Path(__file__).parents[1] / "pruning_task.py"


@pytest.mark.slow
@pytest.mark.parametrize("build", [build_dense_openvino_int8, build_dense_onnxruntime_int8])
def test_a_model_in_eight_bits_is_near_the_dense_one_and_not_the_same(build: Any, tmp_path: Path) -> None:
    task = load_task(str(TASK))
    run = build(str(TASK), 1, str(tmp_path))
    [found] = run()
    expected = task.example().call(task.model()).detach().numpy()
    off = np.abs(found - expected).max() / np.abs(expected).max()
    assert 1e-4 < off < 0.1
    assert np.array_equal(build(str(TASK), 1, str(tmp_path))()[0], found)  # made once


def cut(example: list[Tensor], called: list[list[Tensor]]) -> list[tuple[Tensor, ...]]:
    class Two(nn.Module):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return x.sum() * scale

    own = SimpleNamespace(
        calibration=lambda: called, loss=lambda model, batch: model(batch[0], scale=batch[1]), model=Two,
        example=lambda: {"x": example[0], "scale": example[1]}, score=lambda model: 0.0,
    )  # fmt: skip
    return list_calibration_calls(Task("t", "t", "s", own), Two())


def test_calls_of_larger_batches_are_cut_into_calls_of_the_examples_size() -> None:
    example, x, one = [torch.zeros(2, 3), torch.tensor(1.0)], torch.arange(15.0).view(5, 3), torch.tensor(2.0)
    found = cut(example, [[x, one]])
    assert [call[0].tolist() for call in found] == [x[:2].tolist(), x[2:4].tolist()]
    assert all(call[1] == one for call in found)


def test_calls_of_other_shapes_are_left_out_and_the_example_is_there_in_any_case() -> None:
    example = [torch.zeros(2, 3), torch.tensor(1.0)]
    odd = [torch.zeros(2, 4), torch.tensor(1.0)]
    assert [call[0].tolist() for call in cut(example, [odd])] == [example[0].tolist()]
    ones = [torch.ones(2, 3), torch.tensor(1.0)]
    assert [call[0].tolist() for call in cut(example, [odd, ones])] == [ones[0].tolist()]


MASKED = '''
import torch
from torch import nn

name, score_name = "masked", "nearness to the dense result"


class Encoder(nn.Module):
    """Attention over tokens, of which 0 is padding."""

    def __init__(self):
        super().__init__()
        self.words, self.queries, self.values = nn.Embedding(50, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, tokens):
        x, bias = self.words(tokens), (1 - (tokens != 0).float())[:, None, :] * -1e9
        return (self.queries(x) @ x.transpose(1, 2) + bias).softmax(-1) @ self.values(x)


def model():
    torch.manual_seed(0)
    encoder = Encoder()
    encoder.words.weight.data *= 2
    return encoder.eval()


def draw(seed):
    tokens = torch.randint(1, 50, (8, 12), generator=torch.Generator().manual_seed(seed))
    return tokens * (torch.arange(12) < 9)


def example():
    return (draw(0),)


def calibration():
    return [draw(seed) for seed in range(1, 9)]


def loss(network, tokens):
    return network(tokens).square().mean()


def score(network):
    expected = model()(draw(9))
    return 1 - float((network(draw(9)) - expected).norm() / expected.norm())
'''


@pytest.mark.slow
def test_a_mask_of_booleans_hides_no_scores_from_a_model_in_eight_bits(tmp_path: Path) -> None:
    path = tmp_path / "masked.py"
    path.write_text(MASKED)
    # Attention that gives all tokens the same weight would be off by about as much as the result is large.
    assert 0.9 < score_dense_int8(str(path), 1) < 1
