"""M-FAC and WoodFisher against the dense inverse of the Fisher matrix."""

import weakref
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from latbench.errors import BadData
from search.pruning.saliency import dynamic_mfac, fisher_blocks, mfac, woodfisher
from search.pruning.saliency.fisher import MFAC, DynamicMFAC, WoodFisher
from search.pruning.saliency.scores import Score

DAMPING = 0.01
SCORES = (MFAC, WoodFisher, DynamicMFAC)
IDS = ("mfac", "woodfisher", "dynamic")


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
    monkeypatch.setattr(fisher_blocks, "CHUNK_BYTES", chunk_bytes)
    gradients = torch.from_numpy(rng.standard_normal((m, d)))
    expected = dense_inverse(gradients, block)
    diagonal = method.compute_inverse_diagonal(gradients, damping=DAMPING, block=block)
    assert abs(diagonal.numpy() - np.diag(expected)).max() <= tolerance(gradients)


@pytest.mark.parametrize("chunk_bytes", [1, 2**27])
@pytest.mark.parametrize(("m", "d"), [(1, 1), (4, 9), (13, 9)])
def test_dynamic_mfac_is_static_mfac_in_one_block_and_the_dense_inverse(
    m: int, d: int, chunk_bytes: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is F^-1's diagonal; what is moved, F_KK^-1 F_KD w_D, is held against the dense matrix below."""
    monkeypatch.setattr(fisher_blocks, "CHUNK_BYTES", chunk_bytes)
    gradients, weight = torch.from_numpy(rng.standard_normal((m, d))), torch.from_numpy(rng.standard_normal(d))
    bound = tolerance(gradients)
    diagonal = dynamic_mfac.compute_inverse_diagonal(gradients, damping=DAMPING)
    expected = dense_inverse(gradients, d)
    assert abs(diagonal.numpy() - np.diag(expected)).max() <= bound
    assert (diagonal - mfac.compute_inverse_diagonal(gradients, damping=DAMPING, block=d)).abs().max() <= bound
    dropped = torch.arange(d) % 3 == 0
    moved = dynamic_mfac.update_weights(weight, dropped, gradients, damping=DAMPING)
    static = fisher_blocks.update_weights(weight, dropped, gradients, damping=DAMPING, block=d)
    size = float(weight.abs().sum()) * float(np.linalg.norm(np.linalg.inv(expected), 2))
    assert (moved - static).abs().max() <= bound * size


@pytest.mark.parametrize("score", SCORES, ids=IDS)
def test_gradients_that_dwarf_the_damping_leave_scores_that_are_not_negative(score: type[Score]) -> None:
    """One weight: F^-1 is 1 / (damping + g^2), which 1/damping - ... rounds to zero or below: not a cost."""
    gradients = torch.full((3, 1, 2), 1e9)
    gradients[:, 0, 1] = 0
    weight = torch.tensor([[2.0, 3.0]])
    found = score(damping=1e-5, **({} if score is DynamicMFAC else {"block": 1})).scores(weight, gradients)
    assert 1 < float(found[0, 0]) <= 2e18 * (1 + 1e-9)
    assert float(found[0, 1]) == pytest.approx(4.5e-5, rel=1e-6)


@pytest.mark.parametrize("score", SCORES, ids=IDS)
def test_before_any_gradient_scores_are_magnitudes(score: type[Score]) -> None:
    weight, none = torch.tensor([[2.0, -3.0]]), torch.zeros(0, 1, 2)
    mask = torch.tensor([[False, True]])
    assert score(damping=0.5).scores(weight, none).tolist() == [[1.0, 2.25]]
    assert score().compensate(weight, none, mask).tolist() == [[0.0, -3.0]]


@pytest.mark.parametrize("score", SCORES, ids=IDS)
@pytest.mark.parametrize("dropped", [[1, 7], [0, 1, 3, 5, 6, 8, 9], []], ids=["one_a_block", "most", "none"])
@pytest.mark.parametrize("chunk_bytes", [1, 2**27])
def test_the_update_is_optimal_however_many_are_dropped(
    score: type[Score],
    dropped: list[int],
    chunk_bytes: int,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The least of dw F dw / 2 with all the dropped at zero, solved for the others by the dense matrix."""
    monkeypatch.setattr(fisher_blocks, "CHUNK_BYTES", chunk_bytes)
    gradients, weight = (
        torch.from_numpy(rng.standard_normal((6, 2, 5))),
        torch.from_numpy(rng.standard_normal((2, 5))),
    )
    block = 10 if score is DynamicMFAC else 5
    made = score(damping=DAMPING, **({} if score is DynamicMFAC else {"block": block}))
    kept = np.ones(10, bool)
    kept[dropped] = False
    inverse = dense_inverse(gradients.flatten(1), block)
    hessian, w = np.linalg.inv(inverse), weight.flatten().numpy()
    expected = np.zeros(10)
    expected[kept] = np.linalg.solve(hessian[np.ix_(kept, kept)], hessian[kept] @ w)
    moved = made.compensate(weight, gradients, torch.from_numpy(kept).view(2, 5)).flatten().numpy()
    bound = tolerance(gradients) * abs(hessian @ w).sum()
    assert abs(moved - expected).max() <= bound
    assert not moved[dropped].any()
    if len(dropped) == 2 and block == 5:  # one a block: the loss is the sum of the scores
        step = moved - w
        scores = made.scores(weight, gradients).flatten()
        assert step @ hessian @ step / 2 == pytest.approx(float(scores[dropped].sum()), rel=1e-8)


@pytest.mark.parametrize("score", SCORES, ids=IDS)
@pytest.mark.parametrize("size", [1.0, 1e6, 1e12])
@pytest.mark.parametrize("count", [3, 7])
def test_the_update_is_the_least_loss_however_large_gradients_are(
    score: type[Score], size: float, count: int, rng: np.random.Generator
) -> None:
    """Of a loss that is summed, not averaged: beside the default damping F is g g^T, and the update least squares.

    Where more than four of ten are dropped, six gradients say more than the kept weights can follow.
    """
    gradients, weight = size * rng.standard_normal((6, 1, 10)), rng.standard_normal((1, 10))
    kept = np.ones((1, 10), bool)
    kept[0, :count] = False
    made = score(**({} if score is DynamicMFAC else {"block": 10}))
    moved = made.compensate(*map(torch.from_numpy, (weight, gradients, kept))).numpy()
    rows = gradients[:, 0] / size
    best = np.linalg.lstsq(rows[:, count:], rows[:, :count] @ weight[0, :count], rcond=None)[0]

    def loss(change: np.ndarray) -> float:
        return float(np.square(rows @ change).sum())

    # A damping of 1e-5, or of rounding in G G^T, is added to squares of about 1.
    allowed = loss(np.concatenate([-weight[0, :count], best])) * (1 + 1e-3) + 1e-4 * loss(-weight[0] * ~kept[0])
    assert loss((moved - weight)[0]) <= allowed
    assert not moved[~kept].any()


class Memory(TorchDispatchMode):
    """Adds up the bytes of the tensors that are alive, and were made under it."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            known = {it.untyped_storage().data_ptr() for it in args if isinstance(it, Tensor)}
            if out.untyped_storage().data_ptr() not in known:
                self.alive += out.nbytes
                self.most = max(self.most, self.alive)
                weakref.finalize(out, self.free, out.nbytes)
        return out

    def free(self, size: int) -> None:
        self.alive -= size


@pytest.mark.parametrize("score", SCORES, ids=IDS)
def test_memory_is_a_chunk_of_float64_and_a_few_numbers_a_weight(
    score: type[Score], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not m gradients of a layer in float64, nor a copy of them."""
    chunk, m, d = 2**17, 32, 2**11
    monkeypatch.setattr(fisher_blocks, "CHUNK_BYTES", chunk)
    generator = torch.Generator().manual_seed(0)
    weight, gradients = torch.randn(1, d, generator=generator), torch.randn(m, 1, d, generator=generator)
    mask = torch.rand(1, d, generator=generator) < 0.5
    made = score(gradients=m, **({} if score is DynamicMFAC else {"block": 16}))
    for run in (lambda: made.scores(weight, gradients), lambda: made.compensate(weight, gradients, mask)):
        with Memory() as memory:
            run()
        assert chunk / 8 < memory.most < chunk + 7 * 8 * d < 4 * m * d


@pytest.mark.parametrize("method", [mfac, woodfisher, dynamic_mfac], ids=IDS)
def test_gradients_that_are_not_finite_are_refused(method: ModuleType) -> None:
    gradients = torch.zeros(2, 3)
    gradients[1, 1] = torch.nan
    with pytest.raises(BadData, match="the gradients hold NaN"):
        method.compute_inverse_diagonal(gradients)
