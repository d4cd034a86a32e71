"""`latbench new` and `latbench check`, as a newcomer types them, and the inputs of `latbench trace`."""

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from latbench.workloads.workload import read_workload
from search.task import load_task
from sparse_kernels.shapes import LinearShape

TEMPLATES = Path(__file__).parents[3] / "search" / "templates"

TASK = """
import torch
from torch import nn
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
def example(): return (torch.ones(3, 4),)
def calibration(): return [torch.ones(2, 4)]
def loss(model, batch): return model(batch).square().mean()
def score(model): return -float(loss(model, calibration()[0]))
"""


@pytest.mark.parametrize("template", ["vision", "text"])
def test_new_writes_the_template_and_says_what_comes_next(latbench: Any, tmp_path: Path, template: str) -> None:
    path = tmp_path / "my_task.py"
    ran = latbench("new", path, "--template", template)
    assert ran.code == 0 and ran.out.splitlines()[-1] == f"Next: latbench check {path}"
    assert path.read_text() == (TEMPLATES / f"{template}_task.py").read_text()


def test_the_template_is_vision_unless_another_is_asked_for(latbench: Any, tmp_path: Path) -> None:
    latbench("new", tmp_path / "my_task.py")
    assert (tmp_path / "my_task.py").read_text() == (TEMPLATES / "vision_task.py").read_text()


def test_new_changes_no_file_that_is_there(latbench: Any, tmp_path: Path) -> None:
    path = tmp_path / "my_task.py"
    path.write_text("precious")
    assert "exists already and was not changed; give another name" in latbench("new", path).refused(2)
    assert path.read_text() == "precious"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("task", "a task is a Python file with a plain name such as my_task.py, not 'task'"),
        ("my-task.py", "with a plain name"),
        ("absent/my_task.py", "there is no folder"),
    ],
)
def test_new_refuses_in_a_sentence(latbench: Any, tmp_path: Path, name: str, sentence: str) -> None:
    assert sentence in latbench("new", tmp_path / name).refused(2)
    assert list(tmp_path.rglob("*.py")) == []


@pytest.mark.parametrize("template", ["vision", "text"])
def test_a_template_is_short_and_marks_what_to_replace(template: str) -> None:
    text = (TEMPLATES / f"{template}_task.py").read_text()
    assert sum(bool(line.strip()) for line in text.splitlines()) < 75
    assert text.count("REPLACE") >= 10 and "onnx" not in text.lower()
    for member in (
        "score_name",
        "excluded",
        "limits",
        "model()",
        "example()",
        "calibration()",
        "loss(model",
        "score(",
    ):
        assert f"\n{member}" in text or f"\ndef {member}" in text


def _shorten(path: Path) -> None:
    """Let a template train for two steps."""
    text = path.read_text()
    assert text.count("range(120)") == 1
    path.write_text(text.replace("range(120)", "range(2)"))


@pytest.mark.parametrize("template", ["vision", "text"])
def test_a_template_trains_once_and_is_the_same_task_in_another_process(
    latbench: Any, tmp_path: Path, template: str
) -> None:
    path = tmp_path / "my_task.py"
    latbench("new", path, "--template", template)
    _shorten(path)
    first = load_task(str(path)).model().state_dict()
    (tmp_path / "my_task.pt").rename(tmp_path / "kept.pt")
    trained_again = runpy.run_path(str(path))["model"]().state_dict()
    assert all((first[name] == trained_again[name]).all() for name in first)


def test_check_lists_facts_and_says_what_comes_next(latbench: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    ran = latbench("check", tmp_path / "mine.py", "--threads", 1)
    assert ran.code == 0
    lines = {" ".join(line.split()) for line in ran.out.splitlines()}
    assert {
        "functions model, example, calibration, loss, score",
        "model Sequential, 58 parameters",
        "input argument 1: 3x4 float32",
        "batch 3, the first dimension of argument 1",
        "calibration 1 batch",
        "layers 2 can be pruned, with 100% of the model's multiplications",
        "0 linear 8x4 on 3",
        "2 linear 2x8 on 3",
        f"The task is ready. Next: latbench run {tmp_path / 'mine.py'} --target 2",
    } < lines


def test_check_names_the_first_command_of_a_task_for_a_gpu(latbench: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK + '\ndeploy_device = "cuda"\n')
    ran = latbench("check", tmp_path / "mine.py", "--threads", 1)
    assert f"Next: latbench trace {tmp_path / 'mine.py'} -o my_layers.yaml" in ran.out


def test_check_lists_every_fault_and_exits_with_2(latbench: Any, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    text = TASK.replace("(torch.ones(3, 4),)", "torch.ones(3, 4)").replace("[torch.ones(2, 4)]", "None")
    path.write_text(text)
    ran = latbench("check", path)
    assert f"{path}: 2 faults; correct what is listed, then type `latbench check" in ran.refused(2)
    assert "fault: mine.py:7: example() must return a tuple" in ran.out
    assert "fault: mine.py:8: calibration() must return a list of batches, not None" in ran.out
    assert "ready" not in ran.out
    described = latbench("check", path, "--json")
    assert described.code == 2
    assert [fault["place"] for fault in json.loads(described.out)["faults"]] == ["mine.py:7", "mine.py:8"]


def test_check_describes_a_task_as_json(latbench: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    found = json.loads(latbench("check", tmp_path / "mine.py", "--json").out)
    assert (found["faults"], found["share"], found["batch"]) == ([], 1.0, 3)
    assert found["layers"] == {"0": "linear 8x4 on 3", "2": "linear 2x8 on 3"}


NETWORK = """
import torch
from torch import nn
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(9, 6), nn.Linear(6, 4)
    def forward(self, ids, mask=None):
        assert ids.dtype == torch.int64 and len(ids.unique()) > 1
        assert mask is None or (mask.dtype == torch.bool and mask.all())
        return self.layer(self.table(ids))
def encoder(): return Encoder()
"""


@pytest.fixture
def traced(latbench: Any, tmp_path: Path) -> Callable[..., Any]:
    """Runs `latbench trace` on the encoder with these input shapes."""
    (tmp_path / "nets_of_tokens.py").write_text(NETWORK)

    def run(*shapes: str, more: tuple[object, ...] = ()) -> Any:
        inputs = [text for shape in shapes for text in ("--input-shape", shape)]
        target = f"{tmp_path / 'nets_of_tokens.py'}:encoder"
        return latbench("trace", target, *inputs, *more, "-o", tmp_path / "w.yaml")

    return run


@pytest.mark.parametrize(
    ("shapes", "more", "tokens"),
    [
        (["ids:2x16:int64:9"], (), 32),
        (["2x16:int64:9"], (), 32),
        (["ids:2x16:int64:9", "mask:2x16:bool"], (), 32),
        (["2x16:int64:9", "mask:2x16:bool"], ("--batch", 3), 48),
    ],
)
def test_trace_takes_token_ids_and_masks_by_name_and_by_position(
    traced: Callable[..., Any], tmp_path: Path, shapes: list[str], more: tuple[object, ...], tokens: int
) -> None:
    assert traced(*shapes, more=more).code == 0
    (layer,) = read_workload(tmp_path / "w.yaml").layers
    assert layer.shape == LinearShape(4, 6, tokens)


@pytest.mark.parametrize(
    ("shapes", "sentence"),
    [
        (["ids:2x16:int64:9", "ids:2x16"], "gives the input ids twice"),
        (["ids:2x16:int8:9"], "takes the types float32, int64, int32, bool, not 'int8'"),
        (["ids:2x16:float32:9"], "a bound is a positive whole number after int64 or int32"),
        (["ids:2x16:int64:0"], "a bound is a positive whole number"),
        (["ids:2x16:int64:9:9"], "or NAME:SIZES:TYPE:BOUND such as ids:1x128:int64:30522, not"),
        (["ids"], "takes sizes joined by x such as 1x3x224x224, or NAME:SIZES:TYPE:BOUND"),
        (["ids:"], "takes sizes joined by x"),
        (["ids:2x0:int64:9"], "takes numbers of at least 1"),
        (["ids:2x16:int64:90"], "running the model raised IndexError: index out of range"),
        (["words:2x16:int64:9"], "got an unexpected keyword argument 'words'"),
    ],
)
def test_trace_refuses_other_inputs_in_a_sentence(
    traced: Callable[..., Any], shapes: list[str], sentence: str
) -> None:
    assert sentence in traced(*shapes).refused(2)
