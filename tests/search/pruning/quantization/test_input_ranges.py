"""Ranges in which layers read their inputs."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from latbench.errors import BadData, UsageError
from search.pruning.quantization.input_ranges import (
    RANGE_METHODS,
    estimate_reading_error,
    find_input_ranges,
    measure_inputs,
)
from search.task import Task


def build_task(model: nn.Module, batches: list[torch.Tensor]) -> Task:
    """A task whose calibration data are these batches."""
    own = SimpleNamespace(
        model=lambda: model, calibration=lambda: batches, loss=lambda model, batch: model(batch).square().mean(),
        score=lambda model: 0.0, example=lambda: (batches[0],),
    )  # fmt: skip
    return Task("ranges", "ranges", "score", own)


class Net(nn.Module):
    """A convolution and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1, stride=2), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.conv(x)).mean((2, 3)))


@pytest.fixture
def batches() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(4, 3, 9, 9) for _ in range(3)]


def test_the_inputs_of_all_batches_are_counted(batches: list[torch.Tensor]) -> None:
    torch.manual_seed(0)
    found = measure_inputs(build_task(Net(), batches), Net(), ["conv", "head"])
    every = torch.cat(batches)
    assert (found["conv"].low, found["conv"].high) == (float(every.min()), float(every.max()))
    assert found["conv"].counts.sum() == every.numel()
    assert found["conv"].rows == 12 * 5 * 5 and found["head"].rows == 12
    assert found["head"].low == 0  # behind a ReLU


def read(x: np.ndarray, reading: Any) -> np.ndarray:
    return reading.scale * (np.clip(np.rint(x / reading.scale) + reading.zero, 0, 255) - reading.zero)


def test_the_estimated_error_is_that_of_reading(batches: list[torch.Tensor]) -> None:
    found = measure_inputs(build_task(Net(), batches), Net(), ["conv"])["conv"]
    x = torch.cat(batches).double().numpy()
    for method in RANGE_METHODS.values():
        reading = method(found)
        measured = float(((x - read(x, reading)) ** 2).mean())
        # The estimate knows inputs by parts of the range: 1 / 2048 of it, an eighth of a step.
        assert estimate_reading_error(found, reading) == pytest.approx(measured, rel=0.05)


def test_the_range_of_least_error_is_no_worse_than_any_and_ignores_what_is_rare(batches: list[torch.Tensor]) -> None:
    batches = [batch.repeat(20, 1, 1, 1) for batch in batches]
    batches[0][0, 0, 0, 0] = 400.0  # one of 58,320
    task = build_task(Net(), batches)
    found = {method: find_input_ranges(task, Net(), ["conv"], method)["conv"] for method in RANGE_METHODS}
    errors = {method: reading.squared_error for method, reading in found.items()}
    assert errors["mse"] == min(errors.values())
    assert found["percentile"].range.scale < 0.1 * found["minmax"].range.scale


def test_only_zeros_are_read_as_zeros() -> None:
    task = build_task(Net(), [torch.zeros(2, 3, 9, 9)])
    for method in RANGE_METHODS:
        assert find_input_ranges(task, Net(), ["conv"], method)["conv"].range.scale == 1.0


def test_what_has_no_range_is_refused(batches: list[torch.Tensor]) -> None:
    task = build_task(Net(), batches)
    with pytest.raises(UsageError, match="known are minmax, percentile, mse"):
        find_input_ranges(task, Net(), ["conv"], "entropy")
    model = Net()
    model.unused = nn.Linear(2, 2)
    with pytest.raises(BadData, match="layer unused is never called"):
        find_input_ranges(task, model, ["unused"])
    with pytest.raises(BadData, match="hold NaN or infinite values"):
        find_input_ranges(build_task(Net(), [torch.full((1, 3, 9, 9), torch.nan)]), Net(), ["conv"])
