"""Denormal weights become zeros in converted models, as they slow down every product."""

import copy

import pytest
import torch
from torch import nn

from sparse_kernels.convert import LayerPattern, convert
from sparse_kernels.denormal_weights import count_denormals, drop_denormals, find_denormals
from sparse_kernels.patterns import Dense

LEAST_NORMAL = torch.finfo(torch.float32).tiny


def test_only_numbers_between_zero_and_the_least_normal_one_are_found() -> None:
    x = torch.tensor([0.0, 1e-40, -1e-45, LEAST_NORMAL, -LEAST_NORMAL, 1.0, torch.inf, torch.nan])
    assert find_denormals(x).tolist() == [False, True, True, False, False, False, False, False]
    assert not find_denormals(torch.ones(3, dtype=torch.int64)).any()


@pytest.mark.parametrize("inference", [False, True])
def test_they_are_counted_and_dropped_by_parameter(inference: bool) -> None:
    with torch.inference_mode(inference):
        model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
        with torch.no_grad():
            model[0].weight[0] = 1e-40
            model[2].bias[1] = -1e-42
    assert count_denormals(model) == {"0.weight": 8, "2.bias": 1}
    drop_denormals(model)
    assert count_denormals(model) == {} and (model[0].weight[0] == 0).all() and model[2].bias[1] == 0


@torch.no_grad()
def test_a_converted_model_has_none_also_where_a_norm_makes_them() -> None:
    """The first layer has them, the second gets them from the norm that is folded into it."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)
    ).eval()
    model[0].weight[0], model[3].weight[1] = 1e-40, 1e-37
    model[2].weight[1] *= 1e-2
    before, x = copy.deepcopy(model.state_dict()), torch.randn(2, 3, 9, 9)
    converted = convert(model, {"0": LayerPattern(Dense())}, (x,))
    stored = [*converted.parameters(), *converted.buffers()]
    assert not any(find_denormals(each).any() for each in stored)
    torch.testing.assert_close(converted(x), model(x), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
