"""Weights rounded to steps, whose later columns make up for earlier ones."""

import numpy as np
import pytest
import torch

from search.pruning.one_shot.exact_obs import ExactOBS
from search.pruning.one_shot.one_shot_pruner import PrunedWeight, compute_output_energy
from search.pruning.one_shot.round_weights import choose_scales, round_weight
from search.pruning.quantization.input_ranges import InputReading
from sparse_kernels.formats.int8 import InputRange
from sparse_kernels.patterns import parse


def draw_layer(m: int = 32, k: int = 48, rows: int = 400) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight (m, k), and inputs (rows, k) that depend on each other."""
    torch.manual_seed(0)
    return torch.randn(m, k), torch.randn(rows, k) @ torch.randn(k, k) * 0.3


@pytest.mark.parametrize("spec", ["block:8x4", "block:1x4", "unstructured"])
def test_weights_are_whole_numbers_of_steps_under_the_mask(spec: str) -> None:
    weight, x = draw_layer()
    pruner = ExactOBS(weight, (x.T @ x).double())
    pruned = pruner.prune(parse(spec), 0.5)
    found = round_weight(pruner, pruned, None)
    whole = found.weight.numpy() / found.scales[:, None]
    np.testing.assert_allclose(whole, np.rint(whole), atol=1e-4)
    assert np.abs(whole).max() <= 127 * (1 + 1e-6)
    assert not found.weight[~pruned.mask].any()


def test_columns_that_make_up_for_others_lose_less_than_the_nearest_steps() -> None:
    weight, x = draw_layer()
    pruner = ExactOBS(weight, (x.T @ x).double())
    pruned = PrunedWeight(weight, torch.ones_like(weight, dtype=torch.bool), 0.0)
    # Four bits, so that rounding is what counts: the same with fewer steps.
    scales = choose_scales(weight.double(), pruner.hessian.diagonal())
    nearest = (weight / scales[:, None]).round() * scales[:, None]
    found = round_weight(pruner, pruned, None)
    plain = compute_output_energy(nearest.float(), pruner.hessian, weight) / pruner.energy
    assert found.error < 0.8 * plain


def test_the_error_counts_what_inputs_lose() -> None:
    weight, x = draw_layer(rows=4000)
    pruner = ExactOBS(weight, (x.T @ x).double())
    pruned = pruner.prune(parse("block:8x4"), 0.5)
    chosen = InputRange.covering(float(x.min()), float(x.max()))
    reading = InputReading(chosen, chosen.scale**2 / 12, len(x))
    found = round_weight(pruner, pruned, reading)
    rounded = chosen.scale * (torch.round(x / chosen.scale + chosen.zero).clamp(0, 255) - chosen.zero)
    moved = (rounded @ found.weight.T - x @ weight.T).double().square().sum()
    measured = float(moved / (x @ weight.T).double().square().sum())
    assert found.error == pytest.approx(measured, rel=0.05)


def test_a_row_of_zeros_stays_zero() -> None:
    weight, x = draw_layer()
    weight[3] = 0
    pruner = ExactOBS(weight, (x.T @ x).double())
    pruned = PrunedWeight(weight, torch.ones_like(weight, dtype=torch.bool), 0.0)
    found = round_weight(pruner, pruned, None)
    assert not found.weight[3].any() and found.scales[3] == 1
