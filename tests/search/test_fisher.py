"""M-FAC and WoodFisher against the dense inverse of the Fisher matrix."""

from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from latbench.errors import BadData
from search.pruning import fisher, mfac, woodfisher
from search.pruning.mfac import DynamicMFAC

DAMPING = 0.01


def dense_inverse(gradients: Tensor, block: int) -> np.ndarray:
    """F^-1 (d, d), with zeros outside of the blocks."""
    g = gradients.double().numpy()
    m, d = g.shape
    inverse = np.zeros((d, d))
    for at in range(0, d, block):
        part = g[:, at : at + block]
        fisher_matrix = DAMPING * np.eye(part.shape[1]) + part.T @ part / m
        inverse[at : at + block, at : at + block] = np.linalg.inv(fisher_matrix)
    return inverse


def tolerance(gradients: Tensor) -> float:
    """Float64 rounding over m rank-one updates, amplified by the condition of F, at most |G|^2/(m damping) + 1."""
    m = len(gradients)
    condition = float(gradients.double().square().sum()) / m / DAMPING + 1
    return 10 * m * condition * np.finfo(np.float64).eps / DAMPING


@pytest.mark.parametrize("chunk_bytes", [1, 2**27])
@pytest.mark.parametrize(("m", "d", "block"), [(5, 12, 4), (3, 10, 4), (8, 3, 128), (1, 1, 1), (20, 30, 30)])
@pytest.mark.parametrize("method", [mfac, woodfisher], ids=["mfac", "woodfisher"])
def test_block_wise_is_the_dense_inverse_of_each_block(
    method: ModuleType, m: int, d: int, block: int, chunk_bytes: int,
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(fisher, "CHUNK_BYTES", chunk_bytes)
    gradients, x = torch.from_numpy(rng.standard_normal((m, d))), torch.from_numpy(rng.standard_normal(d))
    expected = dense_inverse(gradients, block)
    diagonal = method.inverse_diagonal(gradients, damping=DAMPING, block=block)
    product = method.inverse_times(gradients, x, damping=DAMPING, block=block)
    assert abs(diagonal.numpy() - np.diag(expected)).max() <= tolerance(gradients)
    assert abs(product.numpy() - expected @ x.numpy()).max() <= tolerance(gradients) * float(x.abs().sum())


@pytest.mark.parametrize("came", [1, 4, 6, 13])
def test_dynamic_mfac_is_static_mfac_of_the_latest_gradients(came: int, rng: np.random.Generator) -> None:
    gradients, x = torch.from_numpy(rng.standard_normal((came, 9))), torch.from_numpy(rng.standard_normal(9))
    dynamic = DynamicMFAC(6, 9, damping=DAMPING, dtype=torch.float64)
    for gradient in gradients:
        dynamic.add(gradient)
    latest = gradients[-6:]
    bound = tolerance(latest)
    static = mfac.inverse_diagonal(latest, damping=DAMPING, block=9)
    assert (dynamic.diagonal() - static).abs().max() <= bound
    product = mfac.inverse_times(latest, x, damping=DAMPING, block=9)
    assert (dynamic.times(x) - product).abs().max() <= bound * x.abs().sum()
    assert abs(dynamic.diagonal().numpy() - np.diag(dense_inverse(latest, 9))).max() <= bound


def test_a_replaced_gradient_is_forgotten(rng: np.random.Generator) -> None:
    gradients = torch.from_numpy(rng.standard_normal((4, 5)))
    dynamic = DynamicMFAC(4, 5, damping=DAMPING, dtype=torch.float64)
    for gradient in gradients:
        dynamic.add(gradient)
    gradients[2] = torch.from_numpy(rng.standard_normal(5))
    dynamic.replace(2, gradients[2])
    expected = np.diag(dense_inverse(gradients, 5))
    assert abs(dynamic.diagonal().numpy() - expected).max() <= tolerance(gradients)


def test_a_checkpoint_goes_on_as_if_nothing_had_been(rng: np.random.Generator) -> None:
    gradients = torch.from_numpy(rng.standard_normal((7, 5)).astype(np.float32))
    straight, first, resumed = (DynamicMFAC(4, 5) for _ in range(3))
    for gradient in gradients[:5]:
        straight.add(gradient)
        first.add(gradient)
    resumed.load_state_dict(first.state_dict())
    for gradient in gradients[5:]:
        straight.add(gradient)
        resumed.add(gradient)
    assert torch.equal(straight.diagonal(), resumed.diagonal())


def test_before_any_gradient_the_fisher_matrix_is_its_damping() -> None:
    dynamic = DynamicMFAC(3, 4, damping=0.5)
    assert torch.equal(dynamic.diagonal(), torch.full((4,), 2.0).double())
    assert torch.equal(dynamic.times(torch.ones(4)), torch.full((4,), 2.0).double())


def test_the_update_of_one_weight_a_block_is_optimal(rng: np.random.Generator) -> None:
    gradients = torch.from_numpy(rng.standard_normal((6, 10)))
    weights = torch.from_numpy(rng.standard_normal(10))
    inverse = dense_inverse(gradients, 5)
    dropped = torch.zeros(10, dtype=torch.bool)
    dropped[[1, 7]] = True
    diagonal = mfac.inverse_diagonal(gradients, damping=DAMPING, block=5)
    moved = fisher.update(
        weights, dropped, diagonal, lambda x: mfac.inverse_times(gradients, x, damping=DAMPING, block=5)
    )
    # The least of dw F dw / 2 with both weights at zero, solved for the others; its value is the sum of the scores.
    hessian = np.linalg.inv(inverse)
    kept = ~dropped.numpy()
    w = weights.numpy()
    expected = np.zeros(10)
    expected[kept] = np.linalg.solve(hessian[np.ix_(kept, kept)], hessian[kept] @ w)
    bound = tolerance(gradients) * abs(w).sum() / float(diagonal.min())
    assert abs(moved.numpy() - expected).max() <= bound
    step = moved.numpy() - w
    loss = step @ hessian @ step / 2
    assert loss == pytest.approx(float(fisher.scores(weights, diagonal)[dropped].sum()), rel=1e-8)
    assert not moved[dropped].any()


@pytest.mark.parametrize("method", [mfac, woodfisher], ids=["mfac", "woodfisher"])
def test_gradients_that_are_not_finite_are_refused(method: ModuleType) -> None:
    gradients = torch.zeros(2, 3)
    gradients[1, 1] = torch.nan
    with pytest.raises(BadData, match="the gradients hold NaN"):
        method.inverse_diagonal(gradients)
    with pytest.raises(BadData, match="the gradient holds NaN"):
        DynamicMFAC(2, 3).add(gradients[1])
