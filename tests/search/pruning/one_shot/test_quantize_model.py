"""Layers of a model in eight bits, from calls of it alone."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import latbench as lb
from latbench.errors import BadData, UsageError
from sparse_kernels.formats.int8 import find_scales, round_to_steps
from sparse_kernels.patterns import Dense, parse


@pytest.fixture
def model(rng: np.random.Generator) -> nn.Module:
    torch.manual_seed(int(rng.integers(2**31)))
    return nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 8)).eval()


def batches(rng: np.random.Generator, count: int) -> list[tuple[torch.Tensor]]:
    """Inputs whose columns depend on each other, as those of a network do."""
    mixed = rng.standard_normal((6, 24))
    return [
        (torch.from_numpy(rng.standard_normal((64, 6)) @ mixed + 0.1 * rng.standard_normal((64, 24))).float(),)
        for _ in range(count)
    ]


@pytest.mark.parametrize("spec", ["dense", "block:4x4", "vector:8"])
def test_a_rounded_model_computes_nearly_what_its_masks_leave(
    model: nn.Module, rng: np.random.Generator, spec: str
) -> None:
    pattern, calls = parse(spec), batches(rng, 4)
    weights = {name: model.get_submodule(name).weight.detach().numpy().copy() for name in ("0", "2")}
    masks = {name: None if spec == "dense" else pattern.mask(it**2, 0.5) for name, it in weights.items()}
    before = copy.deepcopy(model)
    choices = lb.quantize(model, {name: lb.LayerPattern(pattern, it) for name, it in masks.items()}, calls)
    for name, choice in choices.items():
        found = model.get_submodule(name).weight.detach().numpy()
        assert choice.precision == "int8" and choice.mask is masks[name]
        assert np.array_equal(round_to_steps(found, choice.quantization.scales), found)
        assert masks[name] is None or not found[~masks[name]].any()
    fast = lb.convert(model, choices, calls[0])
    [(x,)] = batches(rng, 1)
    plain = copy.deepcopy(before)
    with torch.no_grad():
        for name, mask in masks.items():  # only dropped and rounded to the nearest: nothing makes up for anything
            kept = weights[name] * (1 if mask is None else mask)
            plain.get_submodule(name).weight[:] = torch.from_numpy(round_to_steps(kept, find_scales(kept)))
        wanted = before(calls[0][0])
        lost = {
            kind: float((it(calls[0][0]) - wanted).norm() / wanted.norm()) for kind, it in (("q", fast), ("p", plain))
        }
        assert lost["q"] < (0.03 if spec == "dense" else lost["p"])
        assert torch.isfinite(fast(x)).all()


@pytest.mark.parametrize(
    ("name", "calls", "error", "said"),
    [
        ("1", 1, UsageError, "layer 1 cannot be rounded"),
        ("9", 1, UsageError, "layer 9 cannot be rounded: the model has no such layer"),
        ("0", 0, UsageError, "there are no batches"),
    ],
)
def test_what_cannot_be_rounded_is_named(
    model: nn.Module, rng: np.random.Generator, name: str, calls: int, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        lb.quantize(model, {name: lb.LayerPattern(Dense())}, batches(rng, calls))


@pytest.mark.parametrize("where", ["weight", "input"])
def test_what_is_no_number_is_refused_and_nothing_changes(
    model: nn.Module, rng: np.random.Generator, where: str
) -> None:
    calls: list[Any] = batches(rng, 1)
    with torch.no_grad():
        (model[2].weight if where == "weight" else calls[0][0])[0, 0] = torch.nan
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(BadData, match="NaN or infinite"):
        lb.quantize(model, {name: lb.LayerPattern(Dense()) for name in ("0", "2")}, calls)
    after = model.state_dict()
    assert all(torch.equal(after[name].nan_to_num(), it.nan_to_num()) for name, it in before.items())


def test_a_batch_that_is_no_tuple_and_a_pattern_without_a_mask_are_refused(model: nn.Module) -> None:
    with pytest.raises(UsageError, match=r"a batch is a tuple of arguments, such as \(x,\), not a Tensor"):
        lb.quantize(model, {"0": lb.LayerPattern(Dense())}, [torch.randn(2, 24)])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="layer '0' needs a LayerPattern"):
        lb.quantize(model, {"0": Dense()}, [(torch.randn(2, 24),)])  # type: ignore[dict-item]
