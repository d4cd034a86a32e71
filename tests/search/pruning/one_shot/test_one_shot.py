"""The one-shot methods against the same written the long way: an inverse taken anew at every step."""

import heapq
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from latbench.errors import BadData, LatbenchError, UsageError
from search.artifacts.layer_database import Database, hash_model
from search.problem.layers import Option
from search.pruning.masks.prunable_units import PatternUnits, find_units
from search.pruning.one_shot import auto_pruner, exact_obs, sparsegpt
from search.pruning.one_shot import fill_database as build
from search.pruning.one_shot.adaprune import AdaPrune
from search.pruning.one_shot.auto_pruner import AutoPruner
from search.pruning.one_shot.exact_obs import ExactOBS, eliminate
from search.pruning.one_shot.fill_database import ONE_SHOT_METHODS, fill_database, hash_pruning_inputs
from search.pruning.one_shot.magnitude import Magnitude
from search.pruning.one_shot.one_shot_pruner import OneShotPruner
from search.pruning.one_shot.sparsegpt import SparseGPT
from search.task import Task, load_task
from sparse_kernels.formats import pack, unpack
from sparse_kernels.patterns import NM, BlockWise, Dense, Pattern, ShflBW, Unstructured, VectorNM, VectorWise

PATTERNS: list[tuple[Pattern, float]] = [
    (Unstructured(), 0.6),
    (NM(2, 4), 0.5),
    (BlockWise(4, 3), 0.5),
    (VectorWise(4), 0.7),
    (VectorNM(4, 1, 4), 0.75),
    (ShflBW(4), 0.7),
]
EVEN: list[tuple[Pattern, float]] = [*PATTERNS[:2], (BlockWise(4, 4), 0.5), *PATTERNS[3:5]]


@pytest.fixture
def task() -> Task:
    return load_task(str(Path(__file__).parents[2] / "pruning_task.py"))


def layer(rng: np.random.Generator, m: int, k: int, samples: int) -> tuple[Tensor, Tensor]:
    """A weight and the H of correlated inputs."""
    x = rng.standard_normal((k, k)) @ rng.standard_normal((k, samples))
    return torch.from_numpy(rng.standard_normal((m, k)).astype(np.float32)), torch.from_numpy(x @ x.T)


class Band:
    """Rows that lose the same columns, pruned by the book: invert what is left of H, drop the cheapest, update."""

    def __init__(self, weight: np.ndarray, hessian: np.ndarray, units: PatternUnits) -> None:
        self.weight, self.hessian, self.units = weight.copy(), hessian, units
        columns = range(weight.shape[1])
        self.there = [list(columns[at : at + units.width]) for at in range(0, len(columns), units.width)]
        of = units.of or len(self.there)
        groups = [self.there[at : at + of] for at in range(0, len(self.there), of)]
        self.may_go = [len(group) - (units.keeps_of(len(group)) if units.of else 0) for group in groups]
        self.group = {unit[0]: number for number, group in enumerate(groups) for unit in group}

    def cheapest(self) -> tuple[float, list[int]] | None:
        left = list(chain.from_iterable(self.there))
        inverse = np.linalg.inv(self.hessian[np.ix_(left, left)]) if left else None
        losses = []
        for unit in self.there:
            if self.may_go[self.group[unit[0]]]:
                at = [left.index(column) for column in unit]
                pivot = np.linalg.inv(inverse[np.ix_(at, at)])
                losses.append((float(np.trace(self.weight[:, unit] @ pivot @ self.weight[:, unit].T)), unit))
        return min(losses, default=None)

    def drop(self, unit: list[int]) -> None:
        left = list(chain.from_iterable(self.there))
        inverse = np.linalg.inv(self.hessian[np.ix_(left, left)])
        at = [left.index(column) for column in unit]
        pivot = np.linalg.inv(inverse[np.ix_(at, at)])
        self.weight[:, left] -= self.weight[:, unit] @ pivot @ inverse[at]
        self.weight[:, unit] = 0
        self.there.remove(unit)
        self.may_go[self.group[unit[0]]] -= 1


def by_the_book(weight: Tensor, damped: Tensor, units: PatternUnits, drops: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights and mask after the `drops` cheapest units went, one after the other, of all bands together."""
    m = len(weight)
    w, h = weight.double().numpy(), damped.numpy()
    bands = [Band(w[at : at + units.height], h, units) for at in range(0, m, units.height)]
    heap = [(*first, number) for number, band in enumerate(bands) if (first := band.cheapest())]
    heapq.heapify(heap)
    for _ in range(drops):
        _, unit, number = heapq.heappop(heap)
        bands[number].drop(unit)
        if following := bands[number].cheapest():
            heapq.heappush(heap, (*following, number))
    mask = np.zeros(weight.shape, bool)
    for number, band in enumerate(bands):
        mask[number * units.height : (number + 1) * units.height, list(chain.from_iterable(band.there))] = True
    return np.concatenate([band.weight for band in bands]), mask


@pytest.mark.parametrize("pending", [1, 3, 32])
@pytest.mark.parametrize(("pattern", "sparsity"), EVEN, ids=str)
def test_exact_obs_is_brute_force_obs(
    pattern: Pattern, sparsity: float, pending: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exact_obs, "PENDING", pending)
    weight, hessian = layer(rng, 8, 12, 40)
    units = find_units(pattern, sparsity)
    method = ExactOBS(weight, hessian)
    found = method.prune(pattern, sparsity)
    drops = int((~found.mask).sum()) // (units.height * units.width)
    expected, mask = by_the_book(weight, method.damped, units, drops)
    assert np.array_equal(found.mask.numpy(), mask)
    # Rounding to float32, on float64 solutions whose own error, eps times a condition of k/damping, is far below.
    assert abs(found.weight.numpy() - expected).max() <= 2 * np.finfo(np.float32).eps * abs(expected).max()


@pytest.mark.parametrize("shape", [(5, 10), (1, 7), (9, 1)], ids=str)
@pytest.mark.parametrize(("pattern", "sparsity"), PATTERNS[:5], ids=str)
def test_edges_are_eliminated_as_smaller_units(
    pattern: Pattern, sparsity: float, shape: tuple[int, int], rng: np.random.Generator
) -> None:
    weight, hessian = layer(rng, *shape, 40)
    units = find_units(pattern, sparsity)
    method = ExactOBS(weight, hessian)
    goes_at = method._trace_losses(units, np.arange(shape[0]))
    for number, at in enumerate(range(0, shape[0], units.height)):
        band = Band(weight[at : at + units.height].double().numpy(), method.damped.numpy(), units)
        highest = 0.0
        for unit in np.argsort(goes_at[number])[: np.isfinite(goes_at[number]).sum()]:
            loss, columns = band.cheapest()
            assert columns[0] == unit * units.width
            highest = max(highest, loss)
            assert goes_at[number, unit] == pytest.approx(highest, rel=1e-9)
            band.drop(columns)
        assert band.cheapest() is None


def test_little_memory_means_fewer_bands_at_once_and_the_same_masks(rng: np.random.Generator) -> None:
    weight, hessian = layer(rng, 12, 16, 40)
    for pattern, sparsity in PATTERNS:
        at_once, one_by_one = ExactOBS(weight, hessian), ExactOBS(weight, hessian, memory_bytes=1)
        assert np.array_equal(at_once.mask(pattern, sparsity), one_by_one.mask(pattern, sparsity))


def test_one_elimination_serves_all_sparsities(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hessian = layer(rng, 8, 12, 40)
    calls: list[PatternUnits] = []
    monkeypatch.setattr(exact_obs, "eliminate", lambda *args: (calls.append(args[2]), eliminate(*args))[1])
    method = ExactOBS(weight, hessian)
    masks = [method.mask(Unstructured(), sparsity) for sparsity in (0.3, 0.6, 0.9)]
    assert calls == [PatternUnits()]
    assert (masks[0] >= masks[1]).all()
    assert (masks[1] >= masks[2]).all()


def settled_by_the_book(weight: Tensor, damped: Tensor, mask: Tensor) -> np.ndarray:
    """Column by column, with the inverse of what is left of H taken anew."""
    w, h = weight.double().numpy().copy(), damped.numpy()
    for j in range(w.shape[1]):
        inverse = np.linalg.inv(h[j:, j:])
        gone = np.where(mask[:, j], 0, w[:, j])
        w[:, j:] -= np.outer(gone / inverse[0, 0], inverse[0])
        w[~mask[:, j].numpy(), j] = 0
    return w


@pytest.mark.parametrize("lazy", [1, 5, 128])
@pytest.mark.parametrize(("pattern", "sparsity"), PATTERNS, ids=str)
def test_sparsegpt_settles_column_after_column(
    pattern: Pattern, sparsity: float, lazy: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparsegpt, "LAZY_COLUMNS", lazy)
    weight, hessian = layer(rng, 9, 14, 40)
    method = SparseGPT(weight, hessian)
    found = method.prune(pattern, sparsity)
    expected = settled_by_the_book(weight, method.damped, found.mask)
    assert abs(found.weight.numpy() - expected).max() <= 2 * np.finfo(np.float32).eps * abs(expected).max()


def test_sparsegpt_draws_by_what_a_unit_costs_when_its_turn_comes(rng: np.random.Generator) -> None:
    weight, hessian = layer(rng, 8, 12, 40)
    method = SparseGPT(weight, hessian)
    for pattern, sparsity in ((Unstructured(), 0.6), (VectorWise(4), 0.5), (BlockWise(4, 3), 0.5)):
        units = find_units(pattern, sparsity)
        costs = np.empty((8, 12))
        for at in range(0, 12, units.width):
            inverse = np.linalg.inv(method.damped[at:, at:].numpy())[: units.width, : units.width]
            w = weight[:, at : at + units.width].double().numpy()
            costs[:, at : at + units.width] = ((w @ np.linalg.inv(inverse)) * w).sum(axis=1, keepdims=True)
        assert np.array_equal(method.prune(pattern, sparsity).mask.numpy(), pattern.mask(costs, sparsity))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("pattern", "sparsity"), PATTERNS, ids=str)
def test_exact_obs_errs_least_then_sparsegpt_then_magnitude(pattern: Pattern, sparsity: float, seed: int) -> None:
    """No theorem: where H is nearly singular, SparseGPT's one-sided repair may leave it behind magnitude."""
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((48, 200))
    for i in range(1, 48):
        inputs[i] = 0.7 * inputs[i - 1] + np.sqrt(1 - 0.7**2) * inputs[i]  # neighbours alike, as in images and sound
    hessian = torch.from_numpy(inputs @ inputs.T)
    weight = torch.from_numpy(rng.standard_normal((32, 48)).astype(np.float32))
    exact, gpt, magnitude = (
        method(weight, hessian).prune(pattern, sparsity) for method in (ExactOBS, SparseGPT, Magnitude)
    )
    # As they are, and with the least squares of each one's mask, which ExactOBS's weights are already.
    assert exact.error <= gpt.error <= magnitude.error
    refit = AdaPrune(weight, hessian, iterations=np.inf).fit
    assert exact.error == refit(exact.mask).error
    assert exact.error <= refit(gpt.mask).error <= gpt.error
    assert exact.error <= refit(magnitude.mask).error <= magnitude.error


@pytest.mark.parametrize("shape", [(32, 48), (9, 14), (7, 1), (1, 7), (33, 130)], ids=str)
@pytest.mark.parametrize("method", ONE_SHOT_METHODS)
def test_masks_are_of_their_pattern_at_their_sparsity(
    method: str, shape: tuple[int, int], rng: np.random.Generator
) -> None:
    weight, hessian = layer(rng, *shape, 40)
    problem = ONE_SHOT_METHODS[method](weight, hessian)
    for pattern, sparsity in [*PATTERNS, (Unstructured(), 0.0), (VectorWise(4), 1.0)]:
        found = problem.prune(pattern, sparsity)
        mask = found.mask.numpy()
        assert not found.weight[~found.mask].any()
        assert found.weight.dtype == torch.float32
        if isinstance(pattern, ShflBW):
            packed = pack(np.where(mask, 1, 0).astype(np.float32), mask, pattern)  # refuses what is none of it
            assert np.array_equal(unpack(packed) != 0, mask)
            assert mask.sum() == pattern.mask(np.ones(shape), sparsity).sum()
        else:
            # The pattern's own best mask for scores of 1 and 0 can only be the very same.
            assert np.array_equal(pattern.mask(mask.astype(float), sparsity), mask)


@pytest.mark.parametrize("method", ONE_SHOT_METHODS)
def test_layers_without_input_and_with_dead_or_equal_inputs_are_pruned_too(
    method: str, rng: np.random.Generator
) -> None:
    weight, hessian = layer(rng, 8, 12, 40)
    for pattern, sparsity in PATTERNS:
        nothing = ONE_SHOT_METHODS[method](weight, torch.zeros_like(hessian)).prune(pattern, sparsity)
        assert nothing.error == 0
        assert torch.equal(nothing.weight, torch.where(nothing.mask, weight, 0.0))
        mixed = torch.from_numpy(rng.standard_normal((12, 3)))
        mixed[:4] = 0  # four inputs that are always zero, of eight only three differ
        singular = ONE_SHOT_METHODS[method](weight, mixed @ mixed.T).prune(pattern, sparsity)
        assert np.isfinite(singular.error)
        assert bool(torch.isfinite(singular.weight).all())


@pytest.mark.parametrize("method", ONE_SHOT_METHODS)
def test_another_sparsity_than_the_patterns_is_refused(method: str, rng: np.random.Generator) -> None:
    problem = ONE_SHOT_METHODS[method](*layer(rng, 4, 8, 20))
    with pytest.raises(ValueError, match=r"nm:2:4 has sparsity 0.5 and no other, not 0.25"):
        problem.prune(NM(2, 4), 0.25)
    with pytest.raises(ValueError, match="between 0 and 1"):
        problem.prune(Unstructured(), 1.5)


def test_dense_has_no_units() -> None:
    with pytest.raises(ValueError, match="nothing to prune"):
        find_units(Dense(), 0.0)


OPTIONS = {
    "conv": [Option("dense", 0.0), Option("vector:4", 0.75)],
    "fc": [Option("unstructured", 0.5), Option("shflbw:4", 0.5)],
}


@pytest.mark.parametrize("method", ONE_SHOT_METHODS)
def test_a_database_is_of_one_method(method: str, task: Task, tmp_path: Path) -> None:
    model = task.model()
    database = Database(tmp_path, hash_model(model), hash_pruning_inputs(task, method))
    assert fill_database(task, model, OPTIONS, database, method=method) == 3
    assert fill_database(task, model, OPTIONS, database, method=method) == 0
    other = next(name for name in ONE_SHOT_METHODS if name != method)
    with pytest.raises(
        BadData, match=rf"built by another method.* \({method} [0-9a-f]+, this is {other} [0-9a-f]+\)"
    ):
        Database(tmp_path, hash_model(model), hash_pruning_inputs(task, other))
    assert Database(tmp_path, hash_model(model)).provenance == hash_pruning_inputs(task, method)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"conv": OPTIONS["conv"], "conv9": [Option("vector:4", 0.5)]},
            "the model has no layer 'conv9': it has conv, fc",
        ),
        ({"norm": [Option("unstructured", 0.5)]}, "layer norm: a BatchNorm2d has no sparse kernel"),
        (
            {"conv": [Option("vector:4", 0.5), Option("nm:2:4", 0.5)]},
            "layer conv: nm:2:4 needs input channels in multiples of 4",
        ),
        ({"fc": [Option("block:16x72", 0.5)]}, "layer fc: one block of block:16x72 covers the whole 16x72 layer"),
        ({"fc": [Option("nm:2:4", 0.75)]}, "layer fc: nm:2:4 has sparsity 0.5 and no other, not 0.75"),
        (
            {"fc": [Option("nm:2:4", 0.75), Option("nm:2:4", 0.5)]},
            "layer fc: nm:2:4 has sparsity 0.5 and no other, not 0.75",
        ),
        ({"fc": [Option("nm:2", 0.5)]}, "unknown pattern 'nm:2'"),
    ],
)  # fmt: skip
def test_layers_that_cannot_be_pruned_so_are_named_before_any_work(
    options: dict[str, list[tuple[str, float]]], sentence: str, task: Task, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=sentence):
        fill_database(task, task.model(), options, Database(tmp_path, "x"), method="magnitude")
    assert not list(tmp_path.iterdir())


def test_auto_is_exact_obs_where_its_bands_are_few_and_adaprune_elsewhere(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, hessian = layer(rng, 9, 12, 40)
    found = AutoPruner(weight, hessian)
    bands = {Unstructured(): 9, NM(2, 4): 9, VectorWise(4): 3, ShflBW(4): 3, BlockWise(4, 3): 3}
    for pattern, count in bands.items():
        assert found.count_multiplications(pattern, 0.5) == count * 12**3
    monkeypatch.setattr(auto_pruner, "MULTIPLICATIONS", 3 * 12**3)
    for pattern, count in bands.items():
        expected = (ExactOBS if count == 3 else AdaPrune)(weight, hessian).prune(pattern, 0.5)
        assert torch.equal(found.prune(pattern, 0.5).weight, expected.weight)


def test_an_unknown_method_is_refused(task: Task, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="unknown method 'guess': known are auto, adaprune, obs, sparsegpt, magnitude"
    ):
        fill_database(task, task.model(), OPTIONS, Database(tmp_path, "x"), method="guess")


@pytest.mark.parametrize("method", ONE_SHOT_METHODS)
def test_weights_that_are_not_finite_are_refused_by_name(method: str, task: Task, tmp_path: Path) -> None:
    model = task.model()
    with torch.no_grad():
        model.get_parameter("fc.weight")[3, 5] = torch.nan
    with pytest.raises(BadData, match=r"^layer fc: the weights hold NaN or infinite values$"):
        fill_database(task, model, OPTIONS, Database(tmp_path, "x"), method=method)


def test_several_processes_fill_the_same_database(task: Task, tmp_path: Path) -> None:
    model = task.model()
    alone, together = (Database(tmp_path / name, hash_model(model)) for name in ("alone", "together"))
    seen: list[tuple[int, int]] = []
    fill_database(task, model, OPTIONS, alone, method="obs")
    tell = lambda done, total: seen.append((done, total))  # noqa: E731
    assert fill_database(task, model, OPTIONS, together, tell, method="obs", processes=2) == 3
    assert seen[0] == (0, 3)
    assert seen[-1] == (3, 3)
    for name, options in OPTIONS.items():
        for option in options:
            if option.pattern != "dense":
                one, other = alone.get(name, option), together.get(name, option)
                assert torch.equal(one.mask, other.mask)
                torch.testing.assert_close(one.weight, other.weight)  # the number of threads decides how BLAS rounds
    with torch.no_grad():
        model.get_parameter("fc.weight")[3, 5] = torch.nan
    with pytest.raises(BadData, match=r"^layer fc: the weights hold NaN or infinite values$"):
        fill_database(task, model, OPTIONS, Database(tmp_path / "bad", "x"), method="obs", processes=2)


def test_a_process_that_dies_is_said_with_its_layer(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object, **__: object) -> None:
        raise build.WorkerDied("oom", "the pruning 1 worker was killed, most likely because memory ran out")

    monkeypatch.setattr(build.Worker, "call", die)
    with pytest.raises(LatbenchError, match=r"layer (conv|fc): .* memory ran out; what is in the database stays"):
        fill_database(task, task.model(), OPTIONS, Database(tmp_path, "x"), method="obs", processes=2)


def test_every_method_says_what_it_is() -> None:
    assert all(issubclass(method, OneShotPruner) and method.__doc__ for method in ONE_SHOT_METHODS.values())  # type: ignore[arg-type]


def test_layers_of_another_loss_are_not_taken_for_those_of_this_one(task: Task, tmp_path: Path) -> None:
    """The inputs of layers may be others, too: preprocessing belongs to loss()."""
    database = Database(tmp_path, hash_model(task.model()))
    assert fill_database(task, task.model(), {"fc": OPTIONS["fc"]}, database, method="magnitude")
    members = {**vars(task.implementation), "loss": lambda model, batch: task.loss(model, (batch[0] / 255, batch[1]))}
    edited = replace(task, implementation=SimpleNamespace(**members))
    with pytest.raises(BadData, match="the loss of the dense model was"):
        fill_database(edited, task.model(), {"fc": OPTIONS["fc"]}, database, method="magnitude")
