"""One layer at a time: H, saliency masks, and least squares, against NumPy done the long way."""

import copy
import itertools
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transposed_linear import Conv1D

from latbench.errors import BadData
from search.artifacts.layer_database import Database, hash_model
from search.problem.layers import Option
from search.pruning.calibration_hash import hash_batches
from search.pruning.one_shot import hessian as hessian_module
from search.pruning.one_shot.adaprune import AdaPrune
from search.pruning.one_shot.fill_database import LayerJob, fill_database, hash_pruning_inputs, prune_layer
from search.pruning.one_shot.hessian import compute_input_hessians, sum_input_squares
from search.pruning.one_shot.magnitude import draw_magnitude_mask
from search.pruning.one_shot.stitch import stitch
from search.pruning.quantization.input_ranges import measure_inputs
from search.task import Task, load_task
from sparse_kernels.patterns import NM, BlockWise, Pattern, ShflBW, Unstructured, VectorWise
from sparse_kernels.prunable_layers import set_weight_matrix, weight_matrix

TASK = Path(__file__).parents[2] / "pruning_task.py"
PATTERNS: list[tuple[Pattern, float]] = [
    (Unstructured(), 0.6),
    (NM(2, 4), 0.5),
    (BlockWise(4, 3), 0.5),
    (VectorWise(4), 0.7),
    (ShflBW(4), 0.7),
]


@pytest.fixture
def task() -> Task:
    return load_task(str(TASK))


def problem(rng: np.random.Generator, m: int, k: int, samples: int) -> tuple[Tensor, np.ndarray, Tensor]:
    """A weight, correlated inputs (k, samples) float64, and their H."""
    x = rng.standard_normal((k, k)) @ rng.standard_normal((k, samples))
    return torch.from_numpy(rng.standard_normal((m, k)).astype(np.float32)), x, torch.from_numpy(x @ x.T)


def patches(x: np.ndarray, conv: nn.Conv2d) -> np.ndarray:
    """The inputs of a convolution's matrix product, one loop an axis."""
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = conv.kernel_size, conv.stride, conv.padding, conv.dilation
    padded = np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)))
    rows = []
    for image in padded:
        for top in range(0, image.shape[1] - dh * (kh - 1), sh):
            for left in range(0, image.shape[2] - dw * (kw - 1), sw):
                taps = [image[:, top + r * dh, left + s * dw] for r in range(kh) for s in range(kw)]
                rows.append(np.concatenate(taps))
    return np.array(rows)


class Calls:
    """As much of a task as collecting inputs needs: batches are the model's input."""

    name = "calls"

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).sum()


@pytest.mark.parametrize("images_together", [1, 3, 4])
@pytest.mark.parametrize("settings", [{}, {"stride": (2, 1), "padding": (0, 1)}, {"dilation": (1, 2), "padding": 2}])
def test_a_convolutions_hessian_is_that_of_its_patches(
    settings: dict, images_together: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    conv = nn.Conv2d(3, 5, (3, 2), **settings).requires_grad_(False)
    x = rng.standard_normal((4, 3, 8, 7)).astype(np.float32)
    model = nn.Sequential(conv)
    rows = patches(x, conv).astype(np.float64)
    monkeypatch.setattr(hessian_module, "CACHED_BYTES", images_together * rows.size // len(x) * x.itemsize)
    ((name, hessian),) = compute_input_hessians(Calls(), model, ["0"], [torch.from_numpy(x)])  # type: ignore[arg-type]
    assert name == "0"
    assert sum_input_squares(conv, torch.from_numpy(x)).numpy() == pytest.approx((rows**2).sum(axis=0), rel=1e-6)
    # A float32 product over the patches: n eps sum |x||x|.
    bound = len(rows) * np.finfo(np.float32).eps * (abs(rows).T @ abs(rows))
    assert (abs(hessian.numpy() - rows.T @ rows) <= bound).all()
    # And the patches are in the order of the weight's columns: H gives the energy of the outputs.
    matrix = weight_matrix(conv).double()
    outputs = conv(torch.from_numpy(x)).double() - conv.bias.double()[:, None, None]
    assert float(((matrix @ hessian) * matrix).sum()) == pytest.approx(float(outputs.square().sum()), rel=1e-4)


@pytest.mark.parametrize(
    ("layer", "size"),
    [
        (nn.Conv1d(3, 5, 4, stride=2, padding=1, dilation=2), (4, 3, 15)), (nn.Conv1d(3, 5, 1), (3, 15)),
        (Conv1D(6, 6), (4, 7, 6)),
    ],
)  # fmt: skip
def test_a_hessian_gives_the_energy_of_the_outputs_in_the_order_of_the_matrix(
    layer: nn.Module, size: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    layer.requires_grad_(False).bias.zero_()
    x = torch.randn(size)
    ((_, hessian),) = compute_input_hessians(Calls(), nn.Sequential(layer), ["0"], [x])  # type: ignore[arg-type]
    matrix = weight_matrix(layer).double()
    for rows in (matrix, matrix[:1], matrix * torch.rand_like(matrix).round()):
        own = copy.deepcopy(layer)
        set_weight_matrix(own, torch.cat([rows, matrix[len(rows) :]]).float())
        outputs = own(x).double().movedim(1 if own.weight.ndim == 3 and x.ndim == 3 else -1, 0)
        if x.ndim == 2:
            outputs = own(x).double()
        energy = float(outputs[: len(rows)].square().sum())
        assert float(((rows @ hessian) * rows).sum()) == pytest.approx(energy, rel=1e-4)


def test_an_image_without_a_batch_is_one(task: Task) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 4, 3, padding=1)
    images = torch.randn(2, 4, 4, 6)

    def hessian(batches: list[Tensor]) -> Tensor:
        own = replace(task, implementation=SimpleNamespace(loss=lambda net, x: net(x).sum()))
        [(_, found)] = compute_input_hessians(own, nn.Sequential(layer), ["0"], batches)
        return found

    # Products of float32, 36 of each image: rounding of the largest entries, about 50.
    torch.testing.assert_close(hessian(list(images)), hessian([images]), rtol=1e-5, atol=50 * 36 * 2**-24)


def test_a_transformer_that_is_given_padding_is_seen_as_in_training(task: Task) -> None:
    """Its fast path would hand nested tensors to the layers."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()
    padding = torch.tensor([[False, False, True], [False, True, True]])
    own = replace(
        task, implementation=SimpleNamespace(loss=lambda net, x: net(x, src_key_padding_mask=padding).sum())
    )
    [(name, found)] = compute_input_hessians(own, model, ["layers.0.linear1"], [torch.randn(2, 3, 8)])
    assert name == "layers.0.linear1" and found.shape == (8, 8) and float(found.trace()) > 0
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_linear_layers_hessian_counts_every_token() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    x = torch.arange(24, dtype=torch.float32).view(2, 4, 3)
    ((_, hessian),) = compute_input_hessians(Calls(), model, ["0"], [x, x])  # type: ignore[arg-type]
    rows = x.reshape(-1, 3).double()
    assert torch.equal(hessian, 2 * rows.T @ rows)  # small whole numbers: exact


def test_a_layer_that_is_given_its_input_by_name_is_seen_too() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(input=x)

    x = torch.arange(8.0).view(2, 4)
    ((_, hessian),) = compute_input_hessians(Calls(), Named(), ["fc"], [x])  # type: ignore[arg-type]
    assert torch.equal(hessian, (x.T @ x).double())


def test_little_memory_means_more_passes_and_the_same_hessians(task: Task) -> None:
    model, layers = task.model(), ["conv", "fc", "head"]
    at_once = dict(compute_input_hessians(task, model, layers, task.calibration()))
    one_by_one = dict(compute_input_hessians(task, model, layers, task.calibration(), memory_bytes=1))
    assert list(at_once) == list(one_by_one) == layers
    assert all(torch.equal(at_once[name], one_by_one[name]) for name in layers)


def test_inputs_that_are_not_finite_are_refused_by_name(task: Task) -> None:
    model = task.model()
    with torch.no_grad():
        model.get_parameter("norm.weight")[0] = torch.nan
    with pytest.raises(BadData, match="layer fc: its inputs on the calibration data hold NaN"):
        list(compute_input_hessians(task, model, ["fc"], task.calibration()))


def test_a_layer_that_is_never_called_is_named(task: Task) -> None:
    model = task.model()
    model.unused = nn.Linear(2, 2)
    with pytest.raises(BadData, match="layer unused is never called"):
        list(compute_input_hessians(task, model, ["unused"], task.calibration()))


def test_magnitude_keeps_the_largest_and_saliency_what_the_inputs_use(rng: np.random.Generator) -> None:
    weight = torch.from_numpy(rng.standard_normal((5, 8)).astype(np.float32))
    mask = draw_magnitude_mask(weight, Unstructured(), 0.75)
    assert mask.sum() == 10
    assert weight[mask].abs().min() > weight[~mask].abs().max()
    dead = torch.diag(torch.tensor([0.0] * 4 + [1.0] * 4, dtype=torch.float64))  # inputs 0..3 are always zero
    assert not draw_magnitude_mask(weight, Unstructured(), 0.5, dead)[:, :4].any()


@pytest.mark.parametrize("iterations", [0, 200], ids=["cholesky is cheaper", "conjugate gradients"])
@pytest.mark.parametrize(("pattern", "sparsity"), PATTERNS, ids=str)
def test_adaprune_is_least_squares_row_by_row(
    pattern: Pattern, sparsity: float, iterations: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x, hessian = problem(rng, 12, 9, 40)
    mask = draw_magnitude_mask(weight, pattern, sparsity, hessian)
    monkeypatch.setattr("search.pruning.one_shot.adaprune.CHOLESKY_COST", 1e9 if iterations else 0)
    ridge = 0.01 * float(hessian.diagonal().mean())
    result = AdaPrune(weight, hessian, iterations=iterations).fit(mask)
    assert torch.equal(result.weight != 0, mask)
    # The ridge is nine more samples, sqrt(ridge) times the unit vectors.
    samples = np.hstack([x, np.sqrt(ridge) * np.eye(9)])
    expected = np.zeros((12, 9))
    for row in range(12):
        kept = mask[row].numpy()
        outputs = weight[row].double().numpy() @ samples
        expected[row, kept] = np.linalg.lstsq(samples[kept].T, outputs, rcond=None)[0]
    # float32 rounding, amplified by the condition number of the damped H, at most k/0.01.
    tolerance = 9 / 0.01 * np.finfo(np.float32).eps * 10
    assert abs(result.weight.numpy() - expected).max() < tolerance * abs(expected).max()
    # The error is that of the outputs themselves.
    moved = (result.weight.double().numpy() - weight.double().numpy()) @ x
    whole = weight.double().numpy() @ x
    assert result.error == pytest.approx((moved**2).sum() / (whole**2).sum(), rel=1e-9)


@pytest.mark.parametrize(("pattern", "sparsity"), PATTERNS, ids=str)
def test_adaprune_is_better_than_magnitude_alone(pattern: Pattern, sparsity: float, rng: np.random.Generator) -> None:
    weight, _, hessian = problem(rng, 24, 30, 200)
    mask = draw_magnitude_mask(weight, pattern, sparsity, hessian)
    layer = AdaPrune(weight, hessian)
    assert layer.fit(mask).error < layer.error(torch.where(mask, weight, 0.0))


@pytest.mark.parametrize(
    ("pattern", "sparsity", "levels"),
    [(Unstructured(), 0.5, [0.2, 0.36, 0.488, 0.5]), (NM(1, 8), 0.875, [0.25, 0.375, 0.5, 0.625, 0.75, 0.875])],
    ids=str,
)
def test_adaprune_drops_at_each_level_the_least_of_what_was_refitted_before(
    pattern: Pattern, sparsity: float, levels: list[float], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("search.pruning.one_shot.adaprune.CHOLESKY_COST", 0)  # exact at every level
    weight, x, hessian = problem(rng, 6, 16, 60)
    samples = np.hstack([x, np.sqrt(0.01 * float(hessian.diagonal().mean())) * np.eye(16)])
    outputs = weight.double().numpy() @ samples
    group = 8 if isinstance(pattern, NM) else weight.numel()
    fitted = weight.double().numpy()
    for level in levels:
        scores = (fitted**2 * (x**2).sum(axis=1)).reshape(-1, group)
        last = round(level * group)
        dropped = np.zeros(scores.shape, bool)
        np.put_along_axis(dropped, np.argsort(scores, axis=1)[:, :last], True, axis=1)
        kept = ~dropped.reshape(fitted.shape)
        fitted = np.zeros(fitted.shape)
        for row in range(6):
            fitted[row, kept[row]] = np.linalg.lstsq(samples[kept[row]].T, outputs[row], rcond=None)[0]
    result = AdaPrune(weight, hessian).prune(pattern, sparsity)
    assert np.array_equal(result.mask.numpy(), kept)
    # Conditioned by at most k/0.01 as above; the last level's weights are rounded to float32.
    assert abs(result.weight.numpy() - fitted).max() < 16 / 0.01 * np.finfo(np.float32).eps * abs(fitted).max()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("pattern", "sparsity"), [(Unstructured(), 0.9), (NM(1, 8), 0.875), (VectorWise(4), 0.8)], ids=str
)
def test_adaprune_in_levels_loses_less_than_all_at_once(pattern: Pattern, sparsity: float, seed: int) -> None:
    weight, _, hessian = problem(np.random.default_rng(seed), 32, 64, 300)
    layer = AdaPrune(weight, hessian)
    at_once = layer.fit(draw_magnitude_mask(weight, pattern, sparsity, hessian))
    assert layer.prune(pattern, sparsity).error < at_once.error


@pytest.mark.parametrize("pattern", [Unstructured(), VectorWise(4), ShflBW(4)], ids=str)
def test_an_option_of_adaprune_is_the_same_whatever_was_asked_before(
    pattern: Pattern, rng: np.random.Generator
) -> None:
    weight, _, hessian = problem(rng, 12, 20, 100)
    layer = AdaPrune(weight, hessian)
    for sparsity in (0.5, 0.9, 0.5, 0.75, 0.0, 1.0, 0.9):
        alone = AdaPrune(weight, hessian).prune(pattern, sparsity)
        assert torch.equal(layer.prune(pattern, sparsity).weight, alone.weight)
        layer.prune(NM(2, 4), 0.5)


@pytest.mark.parametrize("density", [0.0, 1.0])
def test_nothing_kept_loses_everything_and_all_kept_nothing(density: float, rng: np.random.Generator) -> None:
    weight, _, hessian = problem(rng, 3, 5, 20)
    result = AdaPrune(weight, hessian).fit(torch.full((3, 5), density == 1))
    assert result.error == pytest.approx(1 - density, abs=1e-9)


def test_a_layer_without_input_changes_nothing(rng: np.random.Generator) -> None:
    weight, _, hessian = problem(rng, 3, 5, 20)
    mask = draw_magnitude_mask(weight, Unstructured(), 0.5)
    result = AdaPrune(weight, torch.zeros_like(hessian)).fit(mask)
    assert result.error == 0
    assert torch.equal(result.weight, torch.where(mask, weight, 0.0))


OPTIONS = [Option("dense", 0.0), Option("unstructured", 0.5), Option("vector:4", 0.75)]


def test_a_database_holds_every_option_and_a_killed_build_goes_on(task: Task, tmp_path: Path) -> None:
    model = task.model()
    options = {"conv": OPTIONS, "fc": OPTIONS}

    def die(done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    killed = Database(tmp_path / "killed", hash_model(model))
    with pytest.raises(KeyboardInterrupt):
        fill_database(task, model, options, killed, die)
    seen: list[tuple[int, int]] = []
    assert fill_database(task, model, options, killed, lambda done, total: seen.append((done, total))) == 1
    assert seen == [(3, 4), (4, 4)]
    assert fill_database(task, model, options, killed) == 0
    whole = Database(tmp_path / "whole", hash_model(model))
    assert fill_database(task, model, options, whole) == 4
    for layer in options:
        for option in OPTIONS[1:]:
            assert torch.equal(killed.get(layer, option).weight, whole.get(layer, option).weight)


@pytest.mark.slow
def test_a_build_that_the_system_kills_in_mid_write_goes_on_and_loses_nothing(task: Task, tmp_path: Path) -> None:
    model, options = task.model(), {"conv": OPTIONS, "fc": OPTIONS}
    dying = (
        "import os, signal\n"
        "from pathlib import Path\n"
        "from search.artifacts import layer_database as database\n"
        "from search.pruning.one_shot.fill_database import fill_database\n"
        "from search.problem.layers import Option\n"
        "from search.task import load_task\n"
        "write, written = database.save_file, []\n"
        "def save(tensors, path, **more):\n"
        "    if len(written) == 2:\n"
        "        path.write_bytes(b'half')\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    written.append(write(tensors, path, **more))\n"
        "database.save_file = save\n"
        f"task = load_task({str(TASK)!r})\n"
        f"there = database.Database(Path('killed'), {hash_model(model)!r})\n"
        f"fill_database(task, task.model(), {options!r}, there)\n"
    )
    killed = subprocess.run([sys.executable, "-c", dying], cwd=tmp_path, check=False)
    assert killed.returncode == -signal.SIGKILL
    folder = tmp_path / "killed"
    entries = {path: path.read_bytes() for path in folder.rglob("*.safetensors")}
    times = [path.stat().st_mtime_ns for path in entries]
    assert len(entries) == 2
    assert [path.read_bytes() for path in folder.rglob("*.tmp")] == [b"half"]
    seen: list[tuple[int, int]] = []
    goes_on, whole = (Database(tmp_path / name, hash_model(model)) for name in ("killed", "whole"))
    assert fill_database(task, model, options, goes_on, lambda *it: seen.append(it)) == 2
    assert seen == [(2, 4), (3, 4), (4, 4)]
    assert [path.stat().st_mtime_ns for path in entries] == times
    fill_database(task, model, options, whole)
    left, expected = ({it.relative_to(each) for it in each.rglob("*")} for each in (folder, whole.folder))
    assert left == expected
    for layer, option in itertools.product(options, OPTIONS[1:]):
        one, other = (it.get(layer, option) for it in (goes_on, whole))
        assert torch.equal(one.weight, other.weight) and torch.equal(one.mask, other.mask)
        assert one.error == other.error


def test_the_error_in_the_database_is_that_of_the_layers_outputs(task: Task, tmp_path: Path) -> None:
    model = task.model()
    database = Database(tmp_path, hash_model(model))
    fill_database(task, model, {"conv": OPTIONS}, database)
    pruned = task.model()
    masks = stitch(pruned, {"conv": OPTIONS[2], "fc": OPTIONS[0]}, database).masks
    assert list(masks) == ["conv"]
    assert torch.equal(weight_matrix(pruned.get_submodule("fc")), weight_matrix(model.get_submodule("fc")))
    x = torch.cat([images for images, _ in task.calibration()])
    y, changed = (net.get_submodule("conv")(x).detach().double() for net in (model, pruned))
    assert database.error("conv", OPTIONS[2]) == pytest.approx(
        float((changed - y).square().sum() / y.square().sum()), rel=1e-4
    )


def test_what_made_a_database_is_of_the_calibration_data(rng: np.random.Generator) -> None:
    def of(*batches: object) -> str:
        return hash_pruning_inputs(Task("", "", "", SimpleNamespace(calibration=lambda: list(batches))))

    x = torch.from_numpy(rng.standard_normal((3, 4)))
    batch = {"x": x, "kind": ["a", 1]}
    assert of(batch) == of({"x": x.clone(), "kind": ["a", 1]})
    others = [{"x": x + 1, "kind": ["a", 1]}, {"x": x.T, "kind": ["a", 1]}, {"x": x, "kind": ["a", 2]}, x, x.float()]
    assert len({of(batch), of(batch, batch), *map(of, others)}) == 2 + len(others)


def test_weights_that_are_not_finite_are_refused_by_name(task: Task, tmp_path: Path) -> None:
    model = task.model()
    with torch.no_grad():
        model.get_parameter("fc.weight")[3, 5] = torch.nan
    with pytest.raises(BadData, match="layer fc: the weights hold NaN"):
        fill_database(task, model, {"fc": OPTIONS}, Database(tmp_path, "x"))


@dataclass
class Graph:
    """A batch that is an object of the user's."""

    x: Tensor
    name: str


def test_batches_that_are_objects_have_a_hash_of_their_content(rng: np.random.Generator) -> None:
    x = torch.from_numpy(rng.standard_normal((3, 4)))
    assert hash_batches("t", [Graph(x, "a")]) == hash_batches("t", [Graph(x.clone(), "a")])
    assert len({hash_batches("t", [Graph(y, name)]) for y, name in ((x, "a"), (x + 1, "a"), (x, "b"))}) == 3


def test_a_layer_that_gets_no_row_counts_as_never_called(rng: np.random.Generator) -> None:
    model, x = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)]).eval(), torch.from_numpy(rng.standard_normal((6, 4)))

    def loss(model: Any, batch: Tensor) -> Tensor:
        return model[0](batch).sum() + model[1](batch[:0]).sum()  # an expert without tokens

    task = Task("t", "t", "s", SimpleNamespace(calibration=lambda: [x.float()], loss=loss))
    with pytest.raises(BadData, match="layer 1 is never called on the calibration data of task t: exclude it"):
        list(compute_input_hessians(task, model, ["0", "1"], task.calibration()))
    with pytest.raises(BadData, match="layer 1 is never called on the calibration data of task t: exclude it"):
        measure_inputs(task, model, ["0", "1"])


def test_products_of_inputs_are_in_float32_whatever_the_model_computes_in(rng: np.random.Generator) -> None:
    """In bfloat16 they are no more a covariance: its least eigenvalues become negative."""
    model, x = nn.Sequential(nn.Linear(64, 3)).eval(), torch.from_numpy(rng.random((256, 64))).float()

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(batch).sum()

    task = Task("t", "t", "s", SimpleNamespace(calibration=lambda: [x], loss=loss))
    [(_, hessian)] = compute_input_hessians(task, model, ["0"], [x])
    torch.testing.assert_close(hessian, x.double().T @ x.double(), rtol=1e-5, atol=0)


def test_inputs_whose_products_cannot_be_inverted_are_named(tmp_path: Path, rng: np.random.Generator) -> None:
    weight = torch.from_numpy(rng.standard_normal((3, 4))).float()
    job = LayerJob("fc", weight, -torch.eye(4, dtype=torch.float64), [Option("unstructured", 0.5)], None)
    with pytest.raises(BadData, match=r"^layer fc: the matrix of products of its inputs .* cannot be inverted"):
        prune_layer(job, (str(tmp_path), "hash", "obs x"), "obs")
