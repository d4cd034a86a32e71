"""Norms are folded into the layers before them where that is the same model, and are left where it is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from search.example_inputs import ExampleInputs
from search.export.fold_norms import fold_norms
from sparse_kernels.convert import LayerPattern
from sparse_kernels.formats.int8 import InputRange, Quantization, find_scales, round_to_steps
from sparse_kernels.patterns import parse
from sparse_kernels.prunable_layers import set_weight_matrix, weight_matrix


class Net(nn.Module):
    """Norms behind a convolution and a linear layer; `reader` says who else reads the convolution."""

    def __init__(self, reader: str = "") -> None:
        super().__init__()
        torch.manual_seed(11)
        self.conv, self.bn = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.fc, self.norm = nn.Linear(8, 6), nn.BatchNorm1d(6, affine=False)
        self.reader = reader
        for norm in (self.bn, self.norm):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
        self.bn.weight.data.normal_()
        self.bn.bias.data.normal_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        if self.reader == "sum":
            y = self.bn(y) + y
        elif self.reader == "relu":
            y = self.bn(torch.relu(y))
        elif self.reader == "twice":
            y = self.bn(y) + self.bn(self.conv(x + 1))
        else:
            y = self.bn(y)
        return self.norm(self.fc(torch.relu(y).mean((2, 3))))


def list_norms(model: nn.Module) -> list[str]:
    return [name for name, each in model.named_modules() if isinstance(each, nn.BatchNorm1d | nn.BatchNorm2d)]


@pytest.mark.parametrize(("reader", "left"), [("", []), ("sum", ["bn"]), ("relu", ["bn"]), ("twice", ["bn"])])
def test_a_norm_is_folded_where_it_alone_reads_a_layer(reader: str, left: list[str]) -> None:
    model, x = Net(reader).eval(), torch.randn(4, 3, 7, 6, generator=torch.Generator().manual_seed(2))
    folded, choices = fold_norms(model, {}, ExampleInputs((x,)))
    assert list_norms(folded) == left and list_norms(model) == ["bn", "norm"] and choices == {}
    with torch.no_grad():
        torch.testing.assert_close(folded(x + 0.5), model(x + 0.5), rtol=1e-4, atol=1e-5)


def test_steps_of_bytes_follow_the_norm() -> None:
    model, x = Net().eval(), torch.randn(4, 3, 7, 6, generator=torch.Generator().manual_seed(2))
    assert float(model.bn.weight.detach().min()) < 0  # a row changes its sign
    matrix = weight_matrix(model.conv)
    mask = parse("vector:8").mask(matrix.square().numpy(), 0.5)
    kept = torch.where(torch.from_numpy(mask), matrix, 0.0)
    scales = find_scales(kept.numpy())
    set_weight_matrix(model.conv, torch.from_numpy(round_to_steps(kept.numpy(), scales)))
    given = {"conv": LayerPattern(parse("vector:8"), mask, "int8", Quantization(scales, InputRange.covering(-4, 4)))}
    folded, choices = fold_norms(model, given, ExampleInputs((x,)))
    found: Any = choices["conv"].quantization
    steps = weight_matrix(folded.get_submodule("conv")).numpy() / found.scales[:, None]
    np.testing.assert_allclose(steps, np.rint(steps), atol=1e-3)
    before = np.rint(weight_matrix(model.conv).numpy() / scales[:, None])
    assert (np.abs(np.rint(steps)) == np.abs(before)).all() and (found.scales > 0).all()
    assert np.array_equal(given["conv"].quantization.scales, scales)  # type: ignore[union-attr]


def test_a_norm_that_computes_its_own_statistics_stays() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False)).eval(), torch.randn(5, 4)
    assert list_norms(fold_norms(model, {}, ExampleInputs((x,)))[0]) == ["1"]
