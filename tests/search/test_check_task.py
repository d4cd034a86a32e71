"""A task is checked before anything is timed: each fault of it becomes one sentence, with its place."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from made_profile import make_profile

from latbench.cli.commands.layers import layers
from latbench.cli.commands.prune import prune
from latbench.cli.commands.search import search
from latbench.cli.commands.trace import trace
from latbench.cli.commands.verify import verify
from latbench.errors import BadData, LatbenchError, UsageError
from search import check_task as checks
from search.artifacts.layer_database import Database, hash_model
from search.check_task import STEPS, check_score, check_task
from search.loss.evaluation_conditions import EvaluationConditions
from search.problem.layers import Option
from search.pruning.one_shot.fill_database import fill_database, hash_pruning_inputs
from search.pruning.storage.model_folder import save_pruned
from search.task import Task, load_task

GOOD = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(12, 32), nn.Linear(32, 4)
        self.extra()
    def extra(self): pass
    def forward(self, x):
        return self.head(self.first(x).relu())

def model():
    torch.manual_seed(0)
    return Net().eval()
def batches():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 12, generator=generator), torch.randint(0, 4, (8,), generator=generator)) for _ in "ab"]
def example(): return (torch.linspace(-1, 1, 60).view(5, 12),)
def calibration(): return batches()
def train_batches(rng): return iter(batches())
def loss(model, batch): return nn.functional.cross_entropy(model(batch[0]), batch[1])
def score(model): return -float(loss(model, batches()[0]))
"""

Change = tuple[str, str]


def written(folder: Path, *changes: Change) -> str:
    text = GOOD
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    (folder / "mine.py").write_text(text)
    return str(folder / "mine.py")


def failed(folder: Path, change: Change, steps: Sequence[str]) -> str:
    with pytest.raises(LatbenchError) as caught:
        check_task(load_task(written(folder, change)), steps)
    assert "\n" not in str(caught.value).strip()
    return str(caught.value)


def test_a_good_task_passes_every_step(tmp_path: Path) -> None:
    facts = check_task(load_task(written(tmp_path)))
    assert (facts.batch_place, facts.batch, facts.batches) == ("argument 1", 5, 2)
    assert facts.conditions == EvaluationConditions()


def test_facts_of_steps_that_were_not_asked_for_are_none(tmp_path: Path) -> None:
    broken = ("def loss(model, batch): return", "def loss(model, batch): return undefined +")
    facts = check_task(load_task(written(tmp_path, broken)), ["example"])
    assert facts.batches is None and facts.conditions is None


MODEL = "    return Net().eval()"
DATA = "def calibration(): return batches()"
TRAIN = "return iter(batches())"
FORWARD = "        return self.head(self.first(x).relu())"
EXTRA = "    def extra(self): pass"
LOSS = "def loss(model, batch): return"
SCORE = "def score(model): return -float(loss(model, batches()[0]))"
EXAMPLE = "def example(): return (torch.linspace(-1, 1, 60).view(5, 12),)"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            (FORWARD, "        return self.head(x)"),
            r"called with the inputs of example\(\), raised RuntimeError: .*\(mine.py:12\)",
        ),
        ((FORWARD, "        import sys; sys.exit(3)"), r"raised SystemExit: 3 \(mine.py:12\)"),
        (
            (EXAMPLE, "def example(): return {'y': torch.ones(5, 12)}"),
            "raised TypeError: .*unexpected keyword argument 'y'",
        ),
        (
            (EXAMPLE, "def example(): return (torch.ones(()),)"),
            r"example\(\) returned no batch: give it a tensor",
        ),
        ((EXAMPLE, "def example(): return (None, 3)"), r"example\(\) returned no batch"),
        ((EXAMPLE, "def example(): return (torch.ones(0, 12),)"), r"example\(\) returned no batch"),
        ((EXAMPLE, "def example(): return {1: torch.ones(5, 12)}"), r"a dict of its keywords, not a dict"),
        (
            (EXAMPLE, "def example(): return (torch.ones(5, 12, device='meta'),)"),
            r"returned a tensor on meta; return x.cpu\(\)",
        ),
        ((EXAMPLE, "def example(): return torch.lod(3)"), r"example\(\) raised AttributeError: .*\(mine.py:20\)"),
        (
            (MODEL, "    return Net().half()"),
            r"parameter first.weight is float16; latbench prunes float32: return model.float\(\)",
        ),
        ((MODEL, "    return Net().to(torch.complex64)"), "parameter first.weight is complex64"),
        ((MODEL, "    return Net().to('meta')"), "parameter first.weight is on the meta device and has no values"),
        (
            (EXTRA, "    def extra(self): self.register_buffer('table', torch.ones(2, device='meta'))"),
            "buffer table is on the meta device",
        ),
        (
            (EXTRA, "    def extra(self): self.w = nn.Parameter(torch.eye(3).to_sparse())"),
            "parameter w is a sparse_coo tensor",
        ),
        (
            (MODEL, "    return torch.ao.quantization.quantize_dynamic(Net().eval(), {nn.Linear})"),
            r"a quantized model cannot be pruned",
        ),
        (
            (EXTRA, "    extra = get_extra_state = lambda self: {'scale': 1}"),
            r"state_dict\(\) of its model holds a dict as _extra_state; latbench hashes and",
        ),
        (
            (EXTRA, "    extra = lambda self: 0\n    def state_dict(self, *_, **__): raise OSError('disk')"),
            r"state_dict\(\) of its model raised OSError: disk \(mine.py:11\)",
        ),
        (
            (EXTRA, "    extra = lambda self: 0\n    def eval(self): raise OSError('no')"),
            r"model\(\) raised OSError: no \(mine.py:11\)",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_model_or_an_example_that_cannot_be_used_is_said(change: Change, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(LatbenchError, match=sentence):
        check_task(load_task(written(tmp_path, change)), ["example"])


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_layer_that_never_ran_is_said(tmp_path: Path) -> None:
    sentence = failed(tmp_path, ("nn.Linear(12, 32)", "nn.LazyLinear(32)"), ["example"])
    assert "parameter first.weight is not initialised, because a lazy layer has not run yet" in sentence


@pytest.mark.parametrize(
    "change",
    [
        (EXTRA, "    def extra(self): self.index = nn.Parameter(torch.arange(4), requires_grad=False)"),
        (MODEL, "    net = Net()\n    net.eval = lambda: None\n    return net"),  # nothing in place of itself
        (MODEL, "    return torch.compile(Net().eval())"),
        (EXTRA, "    def extra(self): self.first = torch.compile(self.first)"),
        (EXTRA, "    def extra(self): self.first.compile()"),
        (FORWARD, "        self.seen = self.first(x)\n        return self.head(self.seen.relu())"),
        (EXAMPLE, "def example(): return (torch.ones(5, 12, requires_grad=True),)"),
        (DATA, "def calibration(): yield from batches()"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_is_unusual_and_right_passes(change: Change, tmp_path: Path) -> None:
    task = load_task(written(tmp_path, change))
    check_task(task, ["copy", "loss", "layer_gradients", "training"])
    assert {"first.weight", "first.bias"} < dict(task.model().named_parameters()).keys()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("inside", [True, False])
def test_a_compiled_model_is_the_model_that_was_compiled(inside: bool, tmp_path: Path) -> None:
    change = (MODEL, "    net = Net().eval()\n    net.head = torch.compile(net.head)\n    return net")
    task = load_task(written(tmp_path, change if inside else (MODEL, "    return torch.compile(Net().eval())")))
    plain, x = load_task(written(tmp_path)).model(), torch.ones(2, 12)
    with torch.no_grad():
        assert torch.equal(task.model()(x), plain(x))
    assert task.model().state_dict().keys() == plain.state_dict().keys()


def test_what_cannot_be_copied_is_named(tmp_path: Path) -> None:
    lock = (EXTRA, "    def extra(self):\n        import threading\n        self.first.lock = threading.Lock()")
    sentence = failed(tmp_path, lock, ["copy"])
    assert "its model cannot be copied, which conversion needs: attribute first.lock (lock) raised" in sentence


def test_a_model_that_keeps_an_activation_passes_though_torch_copies_none_with_a_gradient(tmp_path: Path) -> None:
    keeps = (FORWARD, "        self.seen = self.first(x)\n        return self.head(self.seen.relu())")
    check_task(load_task(written(tmp_path, keeps)), ["copy", "score"])


def test_other_weights_at_the_second_call_are_said(tmp_path: Path) -> None:
    sentence = failed(tmp_path, ("    torch.manual_seed(0)\n", ""), ["copy"])
    assert "model() returned other weights at its second call; load them from a file, or seed" in sentence


def test_one_model_for_all_calls_is_said(tmp_path: Path) -> None:
    cached = ("def model():\n", "import functools\n@functools.cache\ndef model():\n")
    assigned = "    net = Net()\n    net.load_state_dict(W, assign=True)\n    return net\nW = Net().state_dict()"
    for change in (cached, (MODEL, assigned)):
        sentence = failed(tmp_path, change, ["copy"])
        assert "model() returned the same weights in memory at its second call" in sentence


def test_a_batch_that_cannot_be_hashed_is_said(tmp_path: Path) -> None:
    lock = (DATA, "def calibration():\n    import threading\n    return [(batches()[0], threading.Lock())]")
    with pytest.raises(
        UsageError, match=r"hashing a batch of calibration\(\) raised TypeError: cannot pickle.* plain"
    ):
        hash_pruning_inputs(load_task(written(tmp_path, lock)))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ((LOSS, "def loss(model, batch): return undefined *"), r"loss\(\) raised NameError: .*\(mine.py:23\)"),
        (
            (LOSS, "def loss(model, batch): return float('nan') *"),
            "its own dense model, so no profile can be evaluated",
        ),
        ((LOSS, "def loss(model, batch): return torch.ones(2) *"), r"loss\(\) must return a scalar tensor"),
        (
            (DATA, "def calibration(): return torch.ones(4, 12)"),
            r"calibration\(\) must return a list of batches, not a Tensor",
        ),
        ((DATA, "def calibration(): return {'x': 1}"), "must return a list of batches, not a dict"),
        ((DATA, "def calibration(): return 3"), "must return a list of batches, not an int"),
        (
            (DATA, "def calibration():\n    yield batches()[0]\n    raise OSError('lost')"),
            r"calibration\(\) raised OSError: lost \(mine.py:23\)",
        ),
    ],
)
def test_a_loss_or_data_that_cannot_be_used_are_said(change: Change, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=sentence):
        check_task(load_task(written(tmp_path, change)), ["loss"])


NO_GRAD = (LOSS, "@torch.no_grad()\n" + LOSS)
DETACHED = (LOSS, "def loss(model, batch): return torch.tensor(1.0) if model(batch[0]) is None else 0 *")


def test_a_loss_without_gradients_is_said_where_they_are_needed(tmp_path: Path) -> None:
    joint = failed(tmp_path, NO_GRAD, ["layer_gradients"])
    assert (
        "loss() runs without gradients, as under torch.no_grad, and the joint" in joint
        and "latbench prune --no-global" in joint
    )
    trained = failed(tmp_path, NO_GRAD, ["training"])
    assert "loss() returned a tensor without a gradient, and training needs one" in trained
    assert "leave --recipe out" in trained
    check_task(load_task(written(tmp_path, NO_GRAD)), ["loss", "score"])  # nothing else needs a gradient


def test_a_detached_loss_is_enough_for_joint_tuning_alone(tmp_path: Path) -> None:
    detached = (LOSS, "def loss(model, batch): return model(batch[0]).square().mean().detach()\n#")
    check_task(load_task(written(tmp_path, detached)), ["layer_gradients"])
    assert "without a gradient" in failed(tmp_path, detached, ["training"])


def test_a_loss_that_runs_no_layer_is_said(tmp_path: Path) -> None:
    sentence = failed(tmp_path, (LOSS, "def loss(model, batch): return torch.ones(()) or"), ["layer_gradients"])
    assert "loss() calls no layer of the model" in sentence


def test_frozen_models_need_no_gradient(tmp_path: Path) -> None:
    frozen = (EXTRA, "    def extra(self): self.requires_grad_(False)")
    check_task(load_task(written(tmp_path, frozen)), ["layer_gradients", "training"])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ((TRAIN, "return iter(())"), r"train_batches\(\) returned no batch"),
        ((TRAIN, "yield lost"), r"train_batches\(\) raised NameError: .*\(mine.py:22\)"),
        ((TRAIN, "return None"), r"train_batches\(\) raised TypeError: 'NoneType' object is not iterable"),
        (
            (FORWARD, "        return self.head(self.first(x).relu_().mul_(2).exp().add_(1))"),
            r"the gradient of loss\(\) raised RuntimeError: .*inplace",
        ),
        (
            (FORWARD, "        assert not self.training, 'eval only'\n" + FORWARD),
            r"loss\(\) raised AssertionError: eval only \(mine.py:12\)",
        ),
    ],
)
def test_training_that_would_fail_is_said(change: Change, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=sentence):
        check_task(load_task(written(tmp_path, change)), ["training"])


def test_a_score_that_a_converted_model_breaks_is_said(tmp_path: Path) -> None:
    reads = (SCORE, "def score(model): return float(model.first.in_features + model.describe())")
    method = (EXTRA, EXTRA + "\n    def describe(self): return 1")
    with pytest.raises(UsageError, match="with a converted model, which keeps its forward alone: let score"):
        check_score(written(tmp_path, reads, method), ["first", "head"])


def test_a_score_may_only_call_a_model_that_runs_elsewhere(tmp_path: Path) -> None:
    path = written(tmp_path, (SCORE, "def score(model): return float(model.first.in_features)"))
    check_score(path, ["first", "head"])
    with pytest.raises(UsageError, match="with a converted model, which keeps its forward alone: let score"):
        check_score(path, ["first", "head"], by_forward=True)


@pytest.mark.parametrize("code", ["None", "'high'", "torch.ones(2)"])
def test_a_score_that_is_no_number_is_said_without_blaming_the_conversion(code: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"score\(\) must return one number, not") as caught:
        check_score(written(tmp_path, (SCORE, f"def score(model): return {code}")), ["first", "head"])
    assert "converted" not in str(caught.value)


def test_faults_of_the_score_come_back_from_its_process(tmp_path: Path) -> None:
    assert "score() raised KeyError: 'labels' (mine.py:24)" in failed(
        tmp_path, (SCORE, "def score(model): return {}['labels']"), ["score"]
    )


def test_a_long_score_is_ended_once_it_called_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "SCORE_SECONDS", -1.0)
    endless = "def score(model):\n  while 1:\n    try: model(batches()[0][0])\n    except Exception: pass"
    check_score(written(tmp_path, (SCORE, endless)), ["first", "head"])


@pytest.fixture
def pruning(tmp_path: Path) -> Callable[..., None]:
    """`latbench prune` of a task with a change, to a profile of its first layer."""

    def prune_with(change: Change, **options: Any) -> None:
        path = written(tmp_path, change)
        task, wanted = load_task(path), {"first": ("unstructured", 0.5)}
        model = task.model()
        make_profile("mine", model, wanted).save(tmp_path / "profile.json")
        database = Database(tmp_path / "database", hash_model(model))
        fill_database(task, model, {"first": [Option(*wanted["first"])]}, database)
        prune(path, tmp_path / "profile.json", database.folder, tmp_path / "pruned", **options)

    return prune_with


def test_prune_checks_what_its_stages_need(pruning: Callable[..., None], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="use `latbench prune --no-global`"):
        pruning(NO_GRAD)
    assert not (tmp_path / "pruned").exists()
    pruning(NO_GRAD, joint=False)
    assert (tmp_path / "pruned").exists()


class Checked(Exception):
    pass


def test_search_verify_and_layers_check_a_task_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, asked = written(tmp_path), []

    def check(task: Task, steps: Sequence[str], **_: object) -> None:
        asked.append((task.name, *steps))
        raise Checked

    monkeypatch.setattr(checks, "check_task", check)
    monkeypatch.setattr("latbench.backends.cpu.deepsparse_environment.find_environment", lambda: None)
    model = load_task(path).model()
    save_pruned(tmp_path / "pruned", model, {}, make_profile("mine", model, {"first": ("dense", 0.0)}), {})
    for command in (
        lambda: search(
            path, str(tmp_path / "t"), tmp_path / "d", tmp_path / "p.json", target=2.0, model=tmp_path / "m.json"
        ),
        lambda: verify(path, tmp_path / "pruned", tmp_path / "verify"),
        lambda: layers(path, tmp_path / "layers"),
    ):
        with pytest.raises(Checked):
            command()
    assert asked == [("mine", "copy"), ("mine", "copy", "score"), ("mine", "example")]


def test_trace_says_a_users_exception_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"task mine: the model, .* raised RuntimeError: .*\(mine.py:12\)"):
        trace(written(tmp_path, (FORWARD, "        return self.head(x)")))
    with pytest.raises(BadData, match="is float16; latbench prunes float32"):
        trace(written(tmp_path, (MODEL, "    return Net().half()")))


def test_a_task_of_keywords_passes_every_step(tmp_path: Path) -> None:
    keywords = (EXAMPLE, "def example(): return {'mask': None, 'x': {'x': torch.ones(5, 12)}}")
    forward = ("    def forward(self, x):", "    def forward(self, x, mask=None):\n        x = x['x']")
    calls = ("model(batch[0])", "model(x={'x': batch[0]})")
    facts = check_task(load_task(written(tmp_path, keywords, forward, calls)), STEPS)
    assert (facts.batch_place, facts.batch) == ("keyword x['x']", 5)


def test_a_model_may_count_its_calls(tmp_path: Path) -> None:
    """Its buffers differ from those of a fresh model only because it ran."""
    extra = (EXTRA, "    def extra(self): self.register_buffer('calls', torch.zeros(()))")
    forward = (FORWARD, "        self.calls += 1\n        return self.head(self.first(x).relu())")
    check_task(load_task(written(tmp_path, extra, forward)), ["copy"])
