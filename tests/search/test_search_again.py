"""A search that is repeated, interrupted, or goes on from a verification. The machine is a formula."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latbench.errors import BadData
from search import job, overhead, sessions, verify
from search import task as tasks
from search.end_to_end import PROCESSES, Engine, Timings
from search.job import Inputs, Settings
from search.problem import DENSE, Layer, Option
from search.profile import Profile

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
SETTINGS = Settings(2.0, threads=1, evaluations=20)


class Machine:
    """Times engines by what they keep of the weights, `slowness` times as long as the table says; counts sessions."""

    def __init__(self, slowness: float = 1.0) -> None:
        self.slowness, self.sessions = slowness, 0

    def time_engines(self, engines: Mapping[str, Engine], **_: Any) -> Timings:
        self.sessions += 1
        blocks = {}
        for name, engine in engines.items():
            choices = engine.arguments[-1] if isinstance(engine.arguments[-1], Mapping) else None
            seconds = 8e-3
            if choices is not None:
                seconds = 2e-4 + self.slowness * sum(4e-3 * (1 - sparsity) for _, sparsity in choices.values())
            blocks[name] = [[seconds] * 5] * PROCESSES
        return Timings(blocks, {}, tuple(range(PROCESSES)))


Search = Callable[..., Profile]


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inputs:
    (tmp_path / "little.py").write_text(TASK)
    task = tasks.load(str(tmp_path / "little.py"))
    seconds = np.array([4e-3 * (1 - option.sparsity) for option in OPTIONS])
    layers = tuple(Layer(name, OPTIONS, *(seconds,) * 3, np.full(len(OPTIONS), np.nan)) for name in ("0", "2"))
    monkeypatch.setattr(job, "timed_layers", lambda *_: layers)
    monkeypatch.setattr(job.tables, "table_hash", lambda _: "table")
    return job.read_inputs(task, tmp_path / "table", None, tmp_path / "database")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    for module in (overhead, job):
        monkeypatch.setattr(module, "time_engines", found.time_engines)
    return found


def test_the_same_search_again_times_nothing_and_finds_the_same(inputs: Inputs, machine: Machine) -> None:
    machine.slowness = 1.1
    first = job.search(inputs, SETTINGS)
    timed = machine.sessions
    assert timed >= 3  # whole models, then two rounds at least
    machine.slowness = 3.0  # would show
    assert job.search(inputs, SETTINGS) == first
    assert machine.sessions == timed
    assert job.search(inputs, SETTINGS, remeasure=True) != first
    assert machine.sessions > timed


def test_an_interrupted_search_goes_on(inputs: Inputs, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.slowness = 1.1
    whole = job.search(inputs, SETTINGS)
    needed = machine.sessions
    for path in inputs.database.glob("*.json"):
        if path.name != "database.json":
            path.unlink()

    def interrupted(engines: Mapping[str, Engine], **_: Any) -> Timings:
        if machine.sessions == needed + 2:
            raise KeyboardInterrupt
        return machine.time_engines(engines)

    with monkeypatch.context() as patched:
        for module in (overhead, job):
            patched.setattr(module, "time_engines", interrupted)
        with pytest.raises(KeyboardInterrupt):
            job.search(inputs, SETTINGS)
    assert job.search(inputs, SETTINGS) == whole
    assert machine.sessions == 2 * needed


def test_another_target_is_another_search(inputs: Inputs, machine: Machine) -> None:
    job.search(inputs, SETTINGS)
    timed = machine.sessions
    other = job.search(inputs, replace(SETTINGS, target=1.5))
    assert other.target == 1.5 and machine.sessions > timed


def test_a_missed_verification_is_fed_back(inputs: Inputs, machine: Machine, tmp_path: Path) -> None:
    first = job.search(inputs, SETTINGS)
    chosen = {name: (choice.pattern, choice.sparsity) for name, choice in first.layers.items()}
    machine.slowness = 1.15
    engines = {name: Engine(name, "", ("little",)) for name in ("torch", "openvino")}
    engines[verify.PRUNED] = Engine("pruned", "", (chosen,))
    session = verify.as_session(machine.time_engines(engines), chosen)
    key = {"task": "little", "backend": "numba", "model_hash": inputs.model_hash}
    sessions.write([session], key, tmp_path / "verify" / "session.json")
    inputs = replace(inputs, verified=job.read_verified(tmp_path / "verify", inputs))
    timed = machine.sessions
    again = job.search(inputs, SETTINGS)
    assert (
        machine.sessions == timed + 1 or machine.sessions == timed + 2
    )  # whole models were known, and how slow it is
    kept = sum(1 - choice.sparsity for choice in again.layers.values())
    assert 8e-3 / (2e-4 + 1.15 * 4e-3 * kept) >= 2.0
    assert kept < sum(1 - sparsity for _, sparsity in chosen.values())


def test_only_a_verification_of_this_model_is_fed_back(inputs: Inputs, tmp_path: Path) -> None:
    with pytest.raises(BadData, match="no verification of this version; `latbench verify` writes one"):
        job.read_verified(tmp_path / "verify", inputs)
    session = sessions.Session({}, Timings({}, {}))
    key = {"task": "little", "backend": "numba", "model_hash": "another"}
    sessions.write([session], key, tmp_path / "verify" / "session.json")
    with pytest.raises(BadData, match="is a verification of another model than that of task little"):
        job.read_verified(tmp_path / "verify", inputs)
