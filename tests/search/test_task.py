"""The task protocol: found wherever it lies, checked, and its failures said in one sentence."""

import math
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from latbench.errors import BadData, UsageError
from search.task import Task, load_task

GOOD = """
import torch
excluded = ("head",)
score_name = "accuracy"
def model(): return torch.nn.Sequential(torch.nn.Linear(3, 5)).train()
def example(): return (torch.ones(2, 3),)
def calibration(): return [(torch.ones(2, 3), torch.zeros(2, 5))]
def loss(model, batch): return ((model(batch[0]) - batch[1]) ** 2).mean()
def score(model): return 0.5
"""


def written(folder: Path, text: str, name: str = "little.py") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def task_of(**members: object) -> Task:
    return Task("here", "here", "score", types.SimpleNamespace(**members))


def test_a_file_is_a_task(tmp_path: Path) -> None:
    task = load_task(written(tmp_path, GOOD))
    assert (task.name, task.score_name, task.limits.excluded) == ("little", "accuracy", ("head",))
    model = task.model()
    assert not model.training
    assert task.loss(model, task.calibration()[0]).numel() == 1
    assert task.score(model) == 0.5


def test_a_relative_reference_works_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, GOOD)
    monkeypatch.chdir(tmp_path)
    reference = load_task("little.py").reference
    monkeypatch.chdir("/")
    assert load_task(reference).name == "little"


def test_an_attribute_of_a_module_is_a_task(tmp_path: Path) -> None:
    text = GOOD + "\nimport sys, types\nmine = types.SimpleNamespace(**vars(sys.modules[__name__]))\n"
    path = written(tmp_path, text, "many.py")
    assert load_task(path + ":mine").name == "mine"
    with pytest.raises(UsageError, match="no 'yours'"):
        load_task(path + ":yours")


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"lacks calibration\(\), loss\(model, batch\), score\(model\)"):
        load_task(written(tmp_path, "def model(): ...\ndef example(): ...\n"))


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(UsageError, match=r"there is no task 'no_such_task'; bundled tasks: .*my_task.py"):
        load_task("no_such_task")
    with pytest.raises(UsageError, match="no task file"):
        load_task("absent/file.py")


def test_an_import_inside_the_task_that_fails_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="ModuleNotFoundError: No module named 'not_there'"):
        load_task(written(tmp_path, "import not_there\n"))


def test_a_task_that_raises_is_said_with_its_line(tmp_path: Path) -> None:
    task = load_task(written(tmp_path, GOOD.replace("return 0.5", "raise KeyError('lost')")))
    with pytest.raises(UsageError, match=r"task little: score\(\) raised KeyError: 'lost' \(little.py:9\)"):
        task.score(task.model())


def test_what_a_task_returns_is_checked() -> None:
    bad = torch.nn.Linear(2, 2)
    with torch.no_grad():
        bad.weight[0, 0] = math.nan
    with pytest.raises(BadData, match="parameter weight holds NaN"):
        task_of(model=lambda: bad).model()
    with pytest.raises(BadData, match="float64"):
        task_of(model=lambda: torch.nn.Linear(2, 2).double()).model()
    with pytest.raises(UsageError, match="returned None"):
        task_of(model=lambda: None).model()
    with pytest.raises(
        UsageError, match=r"a tuple of the model's arguments or a dict of its keywords, not a Tensor.*return \(x,\)"
    ):
        task_of(example=lambda: torch.ones(1)).example()
    with pytest.raises(UsageError, match="no batch"):
        task_of(calibration=list).calibration()
    with pytest.raises(UsageError, match="scalar tensor"):
        task_of(loss=lambda model, batch: torch.ones(2)).loss(bad, None)
    with pytest.raises(BadData, match="nan"):
        task_of(score=lambda model: math.nan).score(bad)


def test_training_batches_are_optional(rng: np.random.Generator) -> None:
    without = task_of()
    assert not without.can_train
    with pytest.raises(UsageError, match="has no train_batches"):
        without.train_batches(rng)
    assert list(task_of(train_batches=lambda rng: [1, 2]).train_batches(rng)) == [1, 2]
