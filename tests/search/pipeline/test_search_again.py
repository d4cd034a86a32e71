"""A search that is repeated, interrupted, or goes on from a verification. The machine is a formula."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from latbench.cli.commands.search import search as search_command
from latbench.errors import BadData, EnvironmentUnusable, PromiseMissed, UsageError
from latbench.runners.worker import load_function
from search.artifacts.profile import Profile, read_profile
from search.deployment import Deployment
from search.knapsack.arrays import Infeasible
from search.loss.parallel import Workers
from search.pipeline import search_job, search_request, search_setup, verify
from search.pipeline.search_history import SearchHistory
from search.pipeline.search_request import CandidateOptions, Promise, SearchInputs, SearchPlan, SearchRequest
from search.pipeline.speedup_verdict import VERSION as VERDICT_VERSION
from search.problem.layers import DENSE, LayerOptions, Option
from search.pruning.one_shot.fill_database import fill_database
from search.task import load_task
from search.whole_model import overhead
from search.whole_model.end_to_end import BUILDS, EngineBuilder, ModelTimer
from search.whole_model.sessions import write_sessions
from search.whole_model.timings import Timings
from sparse_kernels.formats import pack
from sparse_kernels.patterns import parse

TASK = """
import torch
name = "little"
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(48, 32), torch.nn.ReLU(), torch.nn.Linear(32, 48)).eval()
def example(): return (torch.linspace(-1, 1, 64 * 48).sin().view(64, 48),)
def calibration(): return [example()]
def loss(model, batch): return (model(*batch) - reference(*batch)).square().mean()
def score(model): return 1.0
reference = model()
"""
OPTIONS = (Option(DENSE, 0.0), *(Option("unstructured", s) for s in (0.25, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9)))


def request(target: float = 2.0, **chosen: Any) -> SearchRequest:
    """Return a request from the fields of its parts."""
    chosen = {"threads": 1, "evaluations": 20} | chosen

    def part(kind: type[Any], *first: float) -> Any:
        return kind(*first, **{it.name: chosen[it.name] for it in fields(kind) if it.name in chosen})

    return SearchRequest(part(Promise, target), *map(part, (Deployment, CandidateOptions, SearchPlan, Workers)))


REQUEST = request()


class Machine:
    """Times engines by what they keep of the weights, `slowness` times as long as the table says; counts sessions."""

    def __init__(self, slowness: float = 1.0) -> None:
        self.slowness, self.sessions = slowness, 0

    def time_engines(self, engines: Mapping[str, EngineBuilder], **_: Any) -> Timings:
        self.sessions += 1
        blocks = {}
        for name, engine in engines.items():
            choices = engine.arguments[-1] if isinstance(engine.arguments[-1], Mapping) else None
            if engine.function == "search.whole_model.model_engines:build_folder_pruned":
                choices = read_profile(Path(engine.arguments[3]) / "profile.json").options
            seconds = 8e-3
            if engine.function == "search.whole_model.model_engines:build_layers_free":
                seconds = 1e-4
            elif choices is not None:
                seconds = 2e-4 + self.slowness * sum(4e-3 * (1 - option.sparsity) for option in choices.values())
            blocks[name] = [[seconds] * 5] * BUILDS
        return Timings(blocks, {}, tuple(range(BUILDS)))


Search = Callable[..., Profile]


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SearchInputs:
    (tmp_path / "little.py").write_text(TASK)
    task = load_task(str(tmp_path / "little.py"))
    seconds = np.array([4e-3 * (1 - option.sparsity) for option in OPTIONS])
    layers = tuple(LayerOptions(name, OPTIONS, *(seconds,) * 3, np.full(len(OPTIONS), np.nan)) for name in ("0", "2"))
    monkeypatch.setattr(search_setup, "build_layers", lambda *_: layers)
    monkeypatch.setattr(search_request, "hash_table", lambda _: "table")
    return search_request.read_inputs(task, tmp_path / "table", None, tmp_path / "database")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    monkeypatch.setenv("LATBENCH_LOCKS", str(tmp_path / "locks"))
    found = Machine()
    monkeypatch.setattr(ModelTimer, "time", lambda self, *given, **options: found.time_engines(*given, **options))
    return found


def test_the_same_search_again_times_nothing_and_finds_the_same(inputs: SearchInputs, machine: Machine) -> None:
    machine.slowness = 1.1
    first = search_job.search(inputs, REQUEST)
    timed = machine.sessions
    assert timed >= 3  # whole models, then two rounds at least
    machine.slowness = 3.0  # would show
    assert search_job.search(inputs, REQUEST) == first
    assert machine.sessions == timed
    assert search_job.search(inputs, REQUEST, remeasure=True) != first
    assert machine.sessions > timed


def test_the_ceiling_is_what_was_measured_with_layers_free(inputs: SearchInputs, machine: Machine) -> None:
    assert search_job.search(inputs, REQUEST).ceiling == pytest.approx(8e-3 / 1e-4)
    with pytest.raises(Infeasible, match=r"and 80\.00x if all layers took no time; 1% of the time is in layers that"):
        search_job.search(inputs, request(target=90.0))


def test_files_of_earlier_searches_are_found_again(inputs: SearchInputs) -> None:
    """Names and order of these keys are part of the names of files."""
    asked = request(
        1.7, threads=2, precisions=("float32", "int8"), patterns=("dense", "nm:2:4"), sparsities=(0.5,),
        errors="weight", strategy="spdy", seed=3, evaluations=50, batches=2, time_budget=9.0, processes=4, pool="gpu",
        confidence=0.8, most_bytes=1e6, quick=True,
    )  # fmt: skip
    assert json.dumps(asked.to_record()) == (
        '{"target": 1.7, "threads": 2, "patterns": ["dense", "nm:2:4"], "seed": 3, "evaluations": 50, "batches": 2, '
        '"confidence": 0.8, "strategy": "spdy", "backend": "numba", "sparsities": [0.5], "errors": "weight", '
        '"time_budget": 9.0, "processes": 0, "judges": "gpu", "most_bytes": 1000000.0, "quick": true, '
        '"precisions": ["float32", "int8"]}'
    )
    key = SearchHistory(inputs, asked).key()
    assert list(key) == [
        "models", "model_hash", "code", "device", "inputs", "threads", "backend", "form", "precisions", "engines",
        "table_hash", "cost_model", "patterns", "excluded", "sparsities",
    ]  # fmt: skip
    assert list(key["engines"]) == ["kernels", "torch", "onnxruntime", "openvino", "numba"]


def test_an_edited_loss_is_another_search(inputs: SearchInputs, machine: Machine) -> None:
    before = SearchHistory(inputs, REQUEST).digest()
    Path(inputs.task.reference).write_text(TASK.replace("- reference(", "- 2 * reference("))
    assert SearchHistory(inputs, REQUEST).digest() != before


def test_layers_are_pruned_in_as_many_processes_as_judge(
    inputs: SearchInputs, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def counted(*arguments: Any, processes: int, **options: Any) -> int:
        asked.append(processes)
        return fill_database(*arguments, **options)

    monkeypatch.setattr(search_setup, "fill_database", counted)
    search_setup.set_up_search(inputs, request(processes=3), ModelTimer(1))
    assert asked == [3]


def test_where_nobody_can_judge_that_is_said_first(inputs: SearchInputs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(EnvironmentUnusable, match="--judges gpu needs a GPU"):
        search_job.search(inputs, request(pool="gpu"))
    assert not inputs.database.exists()


def test_a_task_that_judges_nothing_is_refused(inputs: SearchInputs, machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "nan.py").write_text(TASK.replace("(model(*batch) -", "float('nan') * (model(*batch) -"))
    with pytest.raises(UsageError, match="the loss of task little is nan for its own dense model"):
        search_job.search(replace(inputs, task=load_task(str(tmp_path / "nan.py"))), REQUEST)
    assert machine.sessions == 0
    ruined = "(float('nan') if any((it == 0).any() for it in model.parameters()) else 0.0) + (model(*batch) -"
    (tmp_path / "ruined.py").write_text(TASK.replace("(model(*batch) -", ruined))
    with pytest.raises(PromiseMissed, match="every profile that was tried for 2x ruins the model"):
        search_job.search(replace(inputs, task=load_task(str(tmp_path / "ruined.py"))), REQUEST)


def test_an_interrupted_search_goes_on(
    inputs: SearchInputs, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.slowness = 1.1
    whole = search_job.search(inputs, REQUEST)
    needed = machine.sessions
    for path in inputs.database.glob("*.json"):
        if path.name != "database.json":
            path.unlink()

    def interrupted(engines: Mapping[str, EngineBuilder], **_: Any) -> Timings:
        if machine.sessions == needed + 2:
            raise KeyboardInterrupt
        return machine.time_engines(engines)

    with monkeypatch.context() as patched:
        patched.setattr(ModelTimer, "time", lambda self, *given, **options: interrupted(*given, **options))
        with pytest.raises(KeyboardInterrupt):
            search_job.search(inputs, REQUEST)
    assert search_job.search(inputs, REQUEST) == whole
    assert machine.sessions == 2 * needed


def test_another_target_is_another_search(inputs: SearchInputs, machine: Machine) -> None:
    search_job.search(inputs, REQUEST)
    timed = machine.sessions
    other = search_job.search(inputs, request(target=1.5))
    assert other.target == 1.5 and machine.sessions > timed


def verification(inputs: SearchInputs, machine: Machine, found: Profile, folder: Path, **others: Any) -> Path:
    """What `latbench verify` leaves of this profile on the machine."""
    chosen = found.options
    engines = {name: EngineBuilder(name, "", ("little",)) for name in ("torch", "openvino")}
    engines[verify.PRUNED] = EngineBuilder("pruned", "", (chosen,))
    session = verify.build_session(machine.time_engines(engines), chosen, engines)
    write_sessions([session], {**SearchHistory(inputs, REQUEST).conditions(), **others}, folder / verify.SESSION)
    return folder


def kept(found: Profile) -> float:
    return sum(1 - choice.sparsity for choice in found.layers.values())


def test_a_missed_verification_is_fed_back_and_stays_known(
    inputs: SearchInputs, machine: Machine, tmp_path: Path
) -> None:
    first = search_job.search(inputs, REQUEST)
    machine.slowness = 1.15
    SearchHistory(inputs, REQUEST).add_verification(verification(inputs, machine, first, tmp_path / "verify"))
    assert SearchHistory(inputs, REQUEST).digest() != first.inputs
    timed = machine.sessions
    again = search_job.search(inputs, REQUEST)
    assert 1 <= machine.sessions - timed <= 3  # whole models were known
    assert 8e-3 / (2e-4 + 1.15 * 4e-3 * kept(again)) >= 2.0
    assert kept(again) < kept(first)
    # Fed back twice, or not at all: it is known now, and of a good one it is told that it was good.
    SearchHistory(inputs, REQUEST).add_verification(tmp_path / "verify")
    assert SearchHistory(inputs, REQUEST).digest() == again.inputs
    SearchHistory(inputs, REQUEST).add_verification(verification(inputs, machine, again, tmp_path / "again"))
    third = search_job.search(inputs, REQUEST)
    assert 8e-3 / (2e-4 + 1.15 * 4e-3 * kept(third)) >= 2.0
    assert third.loss <= again.loss


def test_a_verification_that_was_met_leaves_nothing_to_refine(
    inputs: SearchInputs,
    machine: Machine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = search_job.search(inputs, REQUEST)
    folder = verification(inputs, machine, first, tmp_path / "verify")
    dense, pruned = [[8e-3] * 5] * 3, [[3.9e-3] * 5] * 3
    verdict = verify.build_verdict(
        inputs.task, first, first.deployment, Timings({"torch": dense, verify.PRUNED: pruned}, {}), (1.0, 0.9), "hash"
    )
    (folder / "verify.json").write_text(json.dumps({"version": VERDICT_VERSION, **asdict(verdict)}))
    monkeypatch.setattr(search_request, "read_inputs", lambda *_: inputs)
    searched: list[float] = []

    def search(inputs: SearchInputs, request: SearchRequest, **_: Any) -> Profile:
        searched.append(request.promise.target)
        return replace(first, inputs=SearchHistory(inputs, request).digest())

    monkeypatch.setattr(search_job, "search", search)

    def command(target: float, **more: Any) -> str:
        search_command(
            inputs.task.reference, "table", inputs.database, tmp_path / "p.json", target=target,
            model=tmp_path / "m.json", threads=1, refine=folder, **more,
        )  # fmt: skip
        return capsys.readouterr().out

    assert "p.json is written" in command(2.0)  # there is no profile yet
    assert f"{folder}: promise kept: 2.05x (2.05-2.05x) measured against torch, 2x promised: there" in command(2.0)
    assert searched == [2.0]
    command(2.5)  # another target
    command(2.0, most_bytes=1e6)  # another budget
    command(2.0, most_bytes=1e6)
    command(2.0, remeasure=True)
    (folder / "verify.json").write_text(
        json.dumps({"version": VERDICT_VERSION, **asdict(replace(verdict, outcome="missed"))})
    )
    command(2.0)
    assert searched == [2.0, 2.5, 2.0, 2.0] and len(SearchHistory(inputs, REQUEST).read_verifications()) == 1
    with pytest.raises(BadData, match="does not belong to this search: its backend is deepsparse"):
        folder = verification(inputs, machine, first, tmp_path / "verify", backend="deepsparse")
        SearchHistory(inputs, REQUEST).read_met_verdict(folder)


def test_a_search_goes_on_from_a_verification_until_it_is_met_or_out_of_reach(
    inputs: SearchInputs, machine: Machine, tmp_path: Path
) -> None:
    first = search_job.search(inputs, REQUEST)
    machine.slowness = 6.0  # as that profile says, nothing reaches the target
    SearchHistory(inputs, REQUEST).add_verification(verification(inputs, machine, first, tmp_path / "busy"))
    timed = machine.sessions
    with pytest.raises(
        PromiseMissed, match=r"no measured profile kept 2x: .*, the best reached 1\.6\dx.* it is out of reach"
    ):
        search_job.search(inputs, REQUEST)
    assert machine.sessions > timed
    machine.slowness = 1.0  # it had been busy
    again = search_job.search(inputs, REQUEST)
    assert 8e-3 / (2e-4 + 4e-3 * kept(again)) >= 2.0


def bytes_of(found: Profile) -> float:
    """By the formats themselves: dense layers hold 4 bytes a weight, sparse ones what is kept, and where it is."""
    shapes = {"0": (32, 48), "2": (48, 32)}
    total = 4.0 * (32 + 48)  # biases
    for name, choice in found.layers.items():
        mask = parse(choice.pattern).mask(np.ones(shapes[name]), choice.sparsity)
        total += pack(mask.astype(np.float32), mask, parse(choice.pattern)).nbytes
    return total


def test_a_search_keeps_a_budget_of_bytes_beside_the_target(inputs: SearchInputs, machine: Machine) -> None:
    free = search_job.search(inputs, REQUEST)
    assert (free.most_bytes, free.weight_bytes, free.dense_bytes) == (None, None, None)
    most = 0.8 * bytes_of(free)
    for strategy in ("staged", "uniform"):
        found = search_job.search(inputs, request(most_bytes=most, strategy=strategy))
        assert found.weight_bytes == bytes_of(found) <= found.most_bytes == most
        assert found.dense_bytes == 4 * (2 * 32 * 48 + 32 + 48)
        assert 8e-3 / (2e-4 + 4e-3 * kept(found)) >= 2.0
    timed = machine.sessions
    with pytest.raises(Infeasible, match=r"keeps bytes of all weights, 999: the .* that budget alone is too small"):
        search_job.search(inputs, request(most_bytes=999.0))
    assert machine.sessions == timed


def test_a_verified_profile_that_takes_too_many_bytes_is_no_answer(
    inputs: SearchInputs, machine: Machine, tmp_path: Path
) -> None:
    first = search_job.search(inputs, REQUEST)
    SearchHistory(inputs, REQUEST).add_verification(verification(inputs, machine, first, tmp_path / "verify"))
    found = search_job.search(inputs, request(most_bytes=0.8 * bytes_of(first)))
    assert bytes_of(found) <= 0.8 * bytes_of(first)


def test_options_that_a_verification_had_need_not_be_there(
    inputs: SearchInputs, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = search_job.search(inputs, REQUEST)
    SearchHistory(inputs, REQUEST).add_verification(verification(inputs, machine, first, tmp_path / "verify"))
    used = {choice.sparsity for choice in first.layers.values()}
    layers = search_setup.build_layers(inputs, REQUEST.deployment, REQUEST.candidates, 0.8, {})
    fewer = tuple(
        one.take([j for j, it in enumerate(one.options) if it.sparsity not in used - {0}]) for one in layers
    )
    monkeypatch.setattr(search_setup, "build_layers", lambda *_: fewer)
    inputs = replace(inputs, table_hash="another table")
    assert used.isdisjoint({choice.sparsity for choice in search_job.search(inputs, REQUEST).layers.values()} - {0})


def test_only_a_verification_under_the_same_conditions_is_fed_back(
    inputs: SearchInputs, machine: Machine, tmp_path: Path
) -> None:
    with pytest.raises(BadData, match=r"has no session\.json; `latbench verify` writes it"):
        SearchHistory(inputs, REQUEST).add_verification(tmp_path / "nothing")
    first = search_job.search(inputs, REQUEST)
    for other in ({"backend": "deepsparse"}, {"threads": 7}, {"model_hash": "another"}):
        folder = verification(inputs, machine, first, tmp_path / "verify", **other)
        [(name, value)] = other.items()
        with pytest.raises(BadData, match=f"does not belong to this search: its {name} is {value}, not "):
            SearchHistory(inputs, REQUEST).add_verification(folder)


def test_a_search_that_failed_is_measured_again(inputs: SearchInputs, machine: Machine) -> None:
    search_job.search(inputs, request(target=1.2))  # whole models are known now
    machine.slowness = 60.0
    with pytest.raises(PromiseMissed):
        search_job.search(inputs, REQUEST)
    machine.slowness = 1.0
    assert search_job.search(inputs, REQUEST).target == 2.0


# The benchmark of promises ------------------------------------------------------------------------------------------


def test_promises_are_counted_and_their_scatter_is_printed(
    inputs: SearchInputs,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ModelTimer, "call", lambda *_, **__: (1.0, 0.9))
    report = load_function(f"{Path(__file__).parents[2] / 'benchmarks' / 'jobs' / 'guarantee.py'}:report")
    report(inputs, request(target=1.2), 3, 0)
    *_, counted, scattered = capsys.readouterr().out.splitlines()
    assert counted.startswith("kept 3 of 3 (0 inconclusive, 0 refused); overshoot +")
    assert "0.00% between builds of a session" in scattered and "0.00% more between sessions" in scattered
    verified = len(list(inputs.database.glob("guarantee/*/verify/session.json")))
    assert verified == 3
    timed = machine.sessions
    report(inputs, request(target=1.2), 3, 0)  # goes on: all is known
    assert machine.sessions == timed
    assert capsys.readouterr().out.splitlines()[-2:] == [counted, scattered]


def test_times_of_another_model_code_or_type_of_inputs_are_measured_again(tmp_path: Path) -> None:
    """A forward() may change without its weights, in a file beside the task's."""
    net, task = tmp_path / "net.py", tmp_path / "mine.py"
    code = "import torch\nclass Net(torch.nn.Linear):\n    def forward(self, x): return super().forward(x)\n"
    lines = (
        "import torch, importlib.util, pathlib, sys",
        "spec = importlib.util.spec_from_file_location('net_beside', pathlib.Path(__file__).with_name('net.py'))",
        "beside = sys.modules['net_beside'] = importlib.util.module_from_spec(spec); spec.loader.exec_module(beside)",
        "def model(): torch.manual_seed(0); return beside.Net(4, 3).eval()",
        "def example(): return (torch.ones(2, 4, dtype=torch.float32),)",
        "def calibration(): return [example()]",
        "def loss(model, batch): return model(*batch).sum()",
        "def score(model): return 1.0",
    )

    def describe(own: str, beside: str) -> str:
        task.write_text(own)
        net.write_text(beside)
        found = load_task(str(task))
        return json.dumps(overhead.describe_conditions(found, found.model(), "hash", Deployment(1)), default=str)

    text = "\n".join(lines)
    first = describe(text, code)
    assert describe(text, code) == first
    assert describe(text, code.replace("(x)\n", "(x) * 2\n")) != first
    assert describe(text.replace("float32", "float64"), code) != first
