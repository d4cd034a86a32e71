"""`validate_task` lists every fault of a task at once, each with its place, and what may be wrong as a note."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from search import validate_task as validation
from search.example_inputs import ExampleInputs
from search.task import load_task
from search.validate_task import TaskFindings, examine_task, validate_task

GOOD = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(12, 32), nn.Linear(32, 4)
    def forward(self, x):
        return self.head(self.first(x).relu())

G = torch.Generator().manual_seed(3)
WEIGHTS = [torch.randn(w.shape, generator=G) for w in Net().parameters()]
def model():
    net = Net()
    with torch.no_grad():
        for weight, trained in zip(net.parameters(), WEIGHTS): weight.copy_(trained)
    return net
def batches():
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(1))
    return [(x, model()(x).argmax(1)), (-x, model()(-x).argmax(1))]
def example(): return (torch.linspace(-1, 1, 60).view(5, 12),)
def calibration(): return batches()
def loss(model, batch): return nn.functional.cross_entropy(model(batch[0]), batch[1])
def score(model): return -float(loss(model, batches()[0]))
"""

FORWARD = "        return self.head(self.first(x).relu())"
MODEL = "    return net"
EXAMPLE = "def example(): return (torch.linspace(-1, 1, 60).view(5, 12),)"
DATA = "def calibration(): return batches()"
LOSS = "def loss(model, batch): return nn.functional.cross_entropy(model(batch[0]), batch[1])"
SCORE = "def score(model): return -float(loss(model, batches()[0]))"

Change = tuple[str, str]


def written(folder: Path, *changes: Change) -> str:
    text = GOOD
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    (folder / "mine.py").write_text(text)
    return str(folder / "mine.py")


@pytest.fixture
def without_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out what runs in another process."""
    monkeypatch.setattr(validation._Steps, "try_other_process", lambda *_: None)


def listed(found: TaskFindings) -> list[tuple[str, str]]:
    return [(fault.place, fault.sentence) for fault in found.faults]


def test_facts_of_a_good_task(tmp_path: Path) -> None:
    found = validate_task(written(tmp_path))
    assert (listed(found), found.notes) == ([], [])
    assert found.functions == ["model", "example", "calibration", "loss", "score"]
    assert (found.kind, found.parameters) == ("Net", 13 * 32 + 33 * 4)
    assert found.inputs == {"argument 1": "5x12 float32"}
    assert (found.batch_place, found.batch, found.batches) == ("argument 1", 5, 2)
    assert list(found.layers) == ["first", "head"] and found.share == 1
    task = load_task(written(tmp_path))
    with torch.no_grad():
        loss = float(task.loss(task.model(), task.calibration()[0]))
    assert found.loss == pytest.approx(loss) and found.score == pytest.approx(-loss)
    assert found.score_seconds is not None and found.score_seconds > 0


def test_faults_of_several_functions_are_listed_at_once(tmp_path: Path, without_process: None) -> None:
    path = written(
        tmp_path,
        (EXAMPLE, "def example(): return [1]"),
        (DATA, "def calibration(): return []"),
        (SCORE, "def score(): return 1"),
    )
    assert listed(validate_task(path)) == [
        ("mine.py:25", "the task has score(), and it is called as score(model)"),
        (
            "mine.py:22",
            "example() must return a tuple of the model's arguments or a dict of its keywords, not a list; for one "
            "argument x, return (x,)",
        ),
        ("mine.py:23", "calibration() returned no batch"),
    ]


def test_what_cannot_be_imported_is_one_fault(tmp_path: Path) -> None:
    (fault,) = validate_task(written(tmp_path, ("import torch\n", "import torch, not_installed\n"))).faults
    assert fault.place == "" and "No module named 'not_installed' (mine.py:2)" in fault.sentence


RANDOM_MODEL = (MODEL, "    return Net()")
ONE_BATCH = (DATA, "def calibration(): return batches()[0]")


@pytest.mark.parametrize(
    ("change", "place", "sentence"),
    [
        ((EXAMPLE, "def example(): return (torch.ones(5, 13),)"), "mine.py:22", "shapes cannot be multiplied"),
        (RANDOM_MODEL, "mine.py:14", "model() returned other weights at its second call; load them from a file"),
        ((MODEL, "    return Net"), "mine.py:14", "model() returned the class Net, not an object of torch.nn.Module"),
        (
            (MODEL, "    return net.double()"),
            "mine.py:14",
            "is float64; latbench prunes float32: return model.float()",
        ),
        (
            (FORWARD, "        return self.head(nn.functional.dropout(self.first(x)))"),
            "mine.py:14",
            "the model gives another result for the same inputs at its second call, as with functional dropout",
        ),
        (
            (DATA, "B = iter(batches())\ndef calibration(): return B"),
            "mine.py:24",
            "calibration() returned no batch at its second call, as an iterator does that is used up; return a list",
        ),
        (
            (DATA, "def calibration(): return [(torch.randn(8, 12), batches()[0][1])]"),
            "mine.py:23",
            "calibration() returned other batches at its second call; every process must get the same",
        ),
        (
            (DATA, "def calibration():\n    import threading\n    return [(*batches()[0], threading.Lock())]"),
            "mine.py:23",
            "hashing a batch of calibration() raised",
        ),
        (
            (LOSS, "def loss(model, batch): return model(batch[0]).relu()"),
            "mine.py:24",
            "loss() must return a scalar tensor, not a Tensor of shape (8, 4); return its mean",
        ),
        (
            (LOSS, "def loss(model, batch): return model(batch[0]).mean().item()"),
            "mine.py:24",
            "loss() must return a scalar tensor, not a float; item() and float() drop its gradients",
        ),
        (
            (LOSS, "def loss(model, batch): return model(batch[0]).mean().to('meta')"),
            "mine.py:24",
            "loss() returned a tensor on the meta device, which has no value",
        ),
        (
            (LOSS, "def loss(model, batch): return model(batch[0]).mean() * torch.rand(())"),
            "mine.py:24",
            "losses of a search are compared, so leave random numbers out",
        ),
        (
            (LOSS, "@torch.no_grad()\n" + LOSS),
            "mine.py:24",
            "loss() runs without gradients, as under torch.no_grad, and the joint tuning of all layers",
        ),
        (
            (LOSS, "def loss(batch): return 0"),
            "mine.py:24",
            "the task has loss(batch), and it is called as loss(model, batch)",
        ),
        (
            (SCORE, ""),
            "mine.py",
            "the task lacks score(model); `latbench new FILE.py` writes a file with all of them",
        ),
        (("def model", "excluded = ('haed',)\ndef model"), "mine.py", "no layer is called 'haed'"),
        (
            ("def model", "excluded = ('*',)\ndef model"),
            "mine.py:15",
            "the model has no layer that can be pruned; the list of its layers says why",
        ),
        (
            (SCORE, SCORE + "\ndef train_batches(rng): return iter(())"),
            "mine.py:26",
            "train_batches() returned no batch",
        ),
        (
            (MODEL, "    net.load_state_dict({})\n    return net"),
            "mine.py:14",
            "model() raised RuntimeError: Error(s) in loading state_dict for Net: Missing key(s)",
        ),
    ],
)
def test_a_fault_is_named_with_its_place(
    change: Change, place: str, sentence: str, tmp_path: Path, without_process: None
) -> None:
    torch.manual_seed(0)
    faults = listed(validate_task(written(tmp_path, change)))
    assert any(where == place and sentence in said for where, said in faults), faults
    assert not any("\n" in said for _, said in faults)


def test_the_parts_of_one_batch_are_recognised(tmp_path: Path, without_process: None) -> None:
    found = validate_task(written(tmp_path, ONE_BATCH))
    assert "loss() raised" in found.faults[0].sentence
    assert "If these are the parts of one batch, return a list of batches: [(x, y)]." in found.notes[-1]


def test_an_example_without_its_batch_is_noted(tmp_path: Path, without_process: None) -> None:
    (note,) = validate_task(written(tmp_path, (EXAMPLE, "def example(): return (torch.ones(12),)"))).notes
    assert "example() has the shape (12,), and that of a calibration batch (8, 12)" in note


@pytest.mark.parametrize(
    ("example", "batch", "count"),
    [
        (torch.ones(2, 3), torch.ones(5, 3), 0),
        (torch.ones(2, 3), (torch.ones(5, 4), 1), 1),
        (torch.ones(2, 3).long(), torch.ones(5, 9).long(), 0),  # texts differ in length
        (torch.ones(2).long(), torch.ones(5, 9).long(), 1),
        (torch.ones(2, 3), {"labels": torch.ones(5).long()}, 0),
        (torch.ones(2, 3), "no tensor", 0),
    ],
)
def test_sizes_of_example_and_calibration_are_compared(example: torch.Tensor, batch: Any, count: int) -> None:
    assert len(validation._note_sizes(ExampleInputs((example,)), batch)) == count


def test_faults_of_a_score_and_of_other_processes_are_found(tmp_path: Path) -> None:
    process = (MODEL, "    import os\n    net.head.bias.data[0] = os.getpid()\n    return net")
    path = written(tmp_path, process, (SCORE, "def score(model): return None"))
    assert listed(validate_task(path)) == [
        ("mine.py:27", "score() must return one number, not None"),
        (
            "mine.py:14",
            "model() returned other weights in another process; every process must get the same, so load it from a "
            "file, or draw it with a generator of a fixed seed",
        ),
    ]


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ([(SCORE, SCORE.replace("-float", "float"))], "Is a higher score better? If not, return its negative."),
        ([(MODEL, "    for w in net.parameters(): w.data /= 1e3\n    return net")], "Does model() load the trained"),
    ],
)
def test_a_score_of_the_wrong_sign_and_weights_that_are_not_trained_are_noted(
    changes: list[Change], note: str, tmp_path: Path
) -> None:
    labels = ("    return [(x, model()(x).argmax(1)), (-x, model()(-x).argmax(1))]", "    return [(x, LABELS)]")
    known = (
        "def example",
        "X = torch.randn(8, 12, generator=torch.Generator().manual_seed(1))\nLABELS = (X @ WEIGHTS[0].T + WEIGHTS[1])"
        ".relu().matmul(WEIGHTS[2].T).add(WEIGHTS[3]).argmax(1)\ndef example",
    )
    found = validate_task(written(tmp_path, labels, known, *changes))
    assert listed(found) == []
    assert any(note in it for it in found.notes), found.notes


def test_a_slow_score_is_noted_and_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "SLOW_SCORE_SECONDS", 0.0)
    seen = examine_task(written(tmp_path), ["first"], True, True)
    assert seen["faults"] == [] and seen["damaged_score"] is None and seen["damaged_loss"] > 0
    assert "score() takes" in validation._note_quality(TaskFindings(), seen)[-1]


def test_a_score_that_only_a_converted_model_breaks_is_said(tmp_path: Path) -> None:
    method = (FORWARD, FORWARD + "\n    def describe(self): return 1")
    path = written(tmp_path, method, (SCORE, "def score(model): return float(model.describe())"))
    ((member, sentence),) = examine_task(path, ["first"], True, True)["faults"]
    assert member == "score" and "with a converted model, which keeps its forward alone; let score()" in sentence


class Attention(nn.Module):
    """One product of weights, and two of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x)[:, None]
        return nn.functional.scaled_dot_product_attention(q, q, q)


@pytest.mark.parametrize(
    ("build", "size", "flop"),
    [
        (lambda: nn.Linear(6, 4, bias=False), (5, 6), 2 * 5 * 6 * 4),
        (lambda: nn.Conv2d(3, 4, 3, bias=False), (2, 3, 5, 5), 2 * 2 * 9 * 3 * 4 * 9),
        (Attention, (2, 7, 8), 2 * 2 * 7 * 8 * 8 + 2 * 2 * (2 * 7 * 7 * 8)),
    ],
)
def test_flop_are_those_of_every_product(build: Callable[[], nn.Module], size: tuple[int, ...], flop: int) -> None:
    assert validation._count_flop(build().eval(), ExampleInputs((torch.ones(size),))) == flop


def test_a_small_share_of_prunable_layers_is_noted(tmp_path: Path, without_process: None) -> None:
    found = validate_task(written(tmp_path, ("def model", "excluded = ('first',)\ndef model")))
    assert found.share == pytest.approx(4 / 16)
    assert found.left_out == {"first": "the task excludes it"}
    assert "make the model at most about 1.3 times as fast" in found.notes[0]


def test_denormal_weights_are_noted(tmp_path: Path, without_process: None) -> None:
    dying = "    with torch.no_grad(): net.first.weight[:2] = 1e-40; net.head.bias[0] = 1e-41\n" + MODEL
    (note,) = validate_task(written(tmp_path, (MODEL, dying))).notes
    assert note.startswith("25 weights are below 1.2e-38, in first.weight and 1 more. Many processors")
