"""Losses are kept in a file, and several processes give the same ones as one."""

import itertools
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import pytest
import torch

from latbench.errors import BadData, EnvironmentUnusable, LatbenchError
from latbench.runners.worker_process import TaskFailed, WorkerDied
from search.artifacts.layer_database import Database, Entry, hash_model
from search.loss.cache import LossCache, hash_loss_inputs
from search.loss.evaluation_worker import EvaluatorSource
from search.loss.evaluator import LossEvaluator, ProfileOptions, move_to_device
from search.loss.parallel import ParallelEvaluator, Workers, _split
from search.loss.pools import open_pool
from search.loss.process_pool import _as_raised_there
from search.problem.layers import DENSE, Interval, LayerOptions, Option, tie_layers
from search.problem.problem import Problem
from search.strategies.run_strategy import StrategySettings, run_strategy
from search.task import Task, load_task
from sparse_kernels.formats.int8 import InputRange, Quantization, find_scales, round_to_steps
from sparse_kernels.prunable_layers import weight_matrix

TASK = load_task(str(Path(__file__).parents[1] / "pruning_task.py"))
OPTIONS = (Option(DENSE, 0.0), *(Option("unstructured", s) for s in (0.5, 0.75, 0.9)))
SECONDS = np.array([1.0, 0.6, 0.35, 0.2])
LAYERS = tuple(
    LayerOptions(name, OPTIONS, SECONDS, SECONDS, SECONDS, np.array([0.0, 0.1, 0.3, 0.7])) for name in ("conv", "fc")
)
PROBLEM = Problem(LAYERS, Interval(0.1, 0.1, 0.1), Interval(2.1, 2.1, 2.1), "torch")
PROFILE = (Option("unstructured", 0.5), Option(DENSE, 0.0))


@pytest.fixture
def database(tmp_path: Path) -> Database:
    model = TASK.model()
    made, generator = Database(tmp_path, hash_model(model)), np.random.default_rng(0)
    for layer in LAYERS:
        weight = weight_matrix(model.get_submodule(layer.name))
        for option in OPTIONS[1:]:
            mask = torch.from_numpy(generator.random(tuple(weight.shape)) > option.sparsity)
            made.put(layer.name, option, Entry(weight * mask, mask, 0.1))
    return made


@contextmanager
def evaluating(
    database: Database, cache: LossCache, processes: int = 1, pool: str = "cpu"
) -> Iterator[ParallelEvaluator]:
    with ParallelEvaluator(TASK, TASK.model(), LAYERS, database, cache, Workers(processes, pool)) as found:
        yield found


def cached(folder: Path, key: str = "key") -> LossCache:
    return LossCache([layer.name for layer in LAYERS], folder / "trials.jsonl", key)


def options_of_choice(choice: tuple[int, ...]) -> ProfileOptions:
    return tuple(OPTIONS[j] for j in choice)


def test_two_processes_give_the_same_losses_and_the_same_profile_as_one(database: Database, tmp_path: Path) -> None:
    every = [(i, j) for i in range(4) for j in range(4)]
    answers, found = [], []
    for processes in (1, 2):
        with evaluating(database, cached(tmp_path / str(processes)), processes) as evaluator:
            answers.append(
                evaluator.losses(every[:1], 1) + evaluator.losses(every, 3) + evaluator.losses(every[3:5], 6)
            )
            answers[-1] += evaluator.layer_shares((2, 1), 5)
            found.append(run_strategy(StrategySettings("staged", 8, 0), PROBLEM, 2.0, evaluator))
    assert answers[0] == answers[1]  # bit for bit
    assert found[0] == found[1]
    files = [(tmp_path / str(processes) / "trials.jsonl").read_text() for processes in (1, 2)]
    assert files[0] == files[1]


def test_shares_of_tied_layers_add_up_and_those_in_eight_bits_are_unknown(database: Database) -> None:
    def shares(layers: Sequence[LayerOptions], choice: tuple[int, ...]) -> list[float]:
        cache = LossCache([layer.name for layer in LAYERS])
        with ParallelEvaluator(TASK, TASK.model(), layers, database, cache) as evaluator:
            return evaluator.layer_shares(choice, 3)

    apart = shares(LAYERS, (2, 2))
    assert shares([tie_layers(LAYERS)], (2,)) == [pytest.approx(sum(apart))]
    in_bytes = Option("unstructured", 0.75, "int8")
    entry = database.get("conv", OPTIONS[2])
    quantization = Quantization(find_scales(entry.weight.numpy()), InputRange(1.0))
    weight = torch.from_numpy(round_to_steps(entry.weight.numpy(), quantization.scales))
    database.put("conv", in_bytes, Entry(weight, entry.mask, 0.1, quantization))
    narrow = replace(LAYERS[0], options=(*OPTIONS[:2], in_bytes, OPTIONS[3]))
    found = shares([narrow, LAYERS[1]], (2, 2))
    assert math.isnan(found[0]) and math.isfinite(found[1])


@pytest.mark.parametrize("processes", [1, 2])
def test_what_fails_is_said_alike_here_and_in_a_process(database: Database, tmp_path: Path, processes: int) -> None:
    (database.folder / "fc" / "unstructured@0.9.safetensors").write_bytes(b"damaged")
    said = pytest.raises(BadData, match=r"^(?!BadData).*fc.*damaged; delete it")
    with evaluating(database, cached(tmp_path), processes) as evaluator, said as raised:
        evaluator.losses([(0, 0), (0, 3)], 2)
    assert raised.value.exit_code == 5


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_a_number_is_infinite(bad: float, database: Database, tmp_path: Path) -> None:
    known = cached(tmp_path)
    known.add(PROFILE, [0.5, bad])
    with evaluating(database, known) as evaluator:
        assert evaluator.losses([(1, 0)], 1) == [0.5]
        assert evaluator.losses([(1, 0)], 2) == [math.inf]


def test_what_one_judge_here_answered_is_kept_when_it_is_interrupted(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with evaluating(database, cached(tmp_path / "whole")) as evaluator:
        evaluator.losses([(1, 0), (2, 0)], 4)
    calls = itertools.count()
    whole = LossEvaluator.losses

    def interrupted(self: LossEvaluator, held: ProfileOptions, batches: range) -> list[float]:
        if next(calls) == 6:
            raise KeyboardInterrupt
        return whole(self, held, batches)

    monkeypatch.setattr(LossEvaluator, "losses", interrupted)
    with evaluating(database, cached(tmp_path)) as evaluator, pytest.raises(KeyboardInterrupt):
        evaluator.losses([(1, 0), (2, 0)], 4)
    found, expected = cached(tmp_path), cached(tmp_path / "whole")
    for choice, count in (((1, 0), 4), ((2, 0), 2)):
        assert (
            list(found.losses(options_of_choice(choice))) == list(expected.losses(options_of_choice(choice)))[:count]
        )


class Elsewhere:
    """Two judges who answered some of what they were given when the wait for an answer was interrupted or failed."""

    workers = 2

    def __init__(self, waiting: BaseException) -> None:
        self._waiting, self._given = waiting, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, source: EvaluatorSource, profile: ProfileOptions, batches: range) -> tuple[int, range]:
        self._given += 1
        return self._given, batches

    def is_done(self, given: tuple[int, range]) -> bool:
        return given[0] not in (2, 6)

    def result(self, given: tuple[int, range]) -> list[float]:
        if not self.is_done(given):
            raise self._waiting
        if given[0] == 3:
            raise BadData("damaged")
        return [given[0] + number / 10 for number in given[1]]

    def cancel(self, given: tuple[int, range]) -> None:
        pass


@pytest.mark.parametrize("waiting", [KeyboardInterrupt(), LatbenchError("lost")])
def test_what_judges_elsewhere_answered_is_kept_when_the_wait_is_interrupted(
    waiting: BaseException, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("search.loss.parallel.open_pool", lambda kind, processes: Elsewhere(waiting))
    known = cached(tmp_path)
    known.add(PROFILE, [0.5, 0.5, 0.5])
    choices = [(2, 0), (1, 0), (3, 0), (0, 1), (0, 2), (0, 3)]
    with evaluating(database, known, 2) as evaluator, pytest.raises(type(waiting)):
        evaluator.losses(choices, 4)
    found = cached(tmp_path)
    kept = [list(found.losses(options_of_choice(choice))) for choice in choices]
    # A part a profile, as there are more profiles than judges: the second was waited for, the third is damaged, the
    # sixth is not there yet.
    assert kept == [[1.0, 1.1, 1.2, 1.3], [0.5, 0.5, 0.5], [], [4.0, 4.1, 4.2, 4.3], [5.0, 5.1, 5.2, 5.3], []]


@pytest.mark.parametrize(
    "error",
    [WorkerDied("oom", "the evaluator 0 worker was killed"), TaskFailed("MemoryError", "Unable to allocate", "")],
)
def test_where_memory_ran_out_fewer_processes_are_advised(error: WorkerDied | TaskFailed) -> None:
    said = _as_raised_there(error)
    assert isinstance(said, EnvironmentUnusable)
    assert str(said).startswith(str(error)) and str(said).endswith(
        "; fewer processes need less memory (`latbench search --processes`)"
    )


def test_what_nobody_foresaw_stays_what_it_was() -> None:
    for error in (WorkerDied("crash", "ended by signal 11"), TaskFailed("ZeroDivisionError", "division by zero", "")):
        assert _as_raised_there(error) is error


def test_every_gpu_has_a_process_and_without_one_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(EnvironmentUnusable, match="needs a GPU, but torch finds none"):
        open_pool("gpu", 4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with open_pool("gpu", 1) as found:
        assert found.workers == 3


class Pair(NamedTuple):
    x: torch.Tensor
    label: int


def test_batches_move_with_whatever_holds_their_tensors() -> None:
    x = torch.zeros(2)
    moved = move_to_device([Pair(x, 3), {"x": (x, "text")}, None], "meta")
    assert isinstance(moved, list) and isinstance(moved[0], Pair) and isinstance(moved[1]["x"], tuple)
    assert [it.device.type for it in (moved[0].x, moved[1]["x"][0])] == ["meta", "meta"]
    assert (moved[0].label, moved[1]["x"][1], moved[2]) == (3, "text", None)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # its nodes' processes import torch one by one, beside all else that runs meanwhile
def test_a_ray_cluster_gives_the_same_losses_and_a_lost_node_costs_none() -> None:
    """Run the check below in a process of its own, and once more if a signal ends it: Ray's C++ part may do that."""
    inside = ("-p", "no:xdist", "-o", "python_functions=losses_on_*", "--override-ini", "timeout=580", __file__)
    command = [sys.executable, "-X", "faulthandler", "-m", "pytest", "-q", *inside]
    for _ in range(2):
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode >= 0:
            break
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert "1 passed" in ended.stdout


def losses_on_a_ray_cluster_are_the_same_and_a_lost_node_costs_none(
    ray_head: Any, database: Database, tmp_path: Path
) -> None:
    _, other = ray_head.small_node(num_cpus=1), ray_head.small_node(num_cpus=1)
    every = [(i, j) for i in range(4) for j in range(4)]
    with evaluating(database, cached(tmp_path / "here")) as evaluator:
        expected = evaluator.losses(every, 3)
    with evaluating(database, cached(tmp_path / "there"), pool="ray") as evaluator:
        found = evaluator.losses(every[:6], 3)
        ray_head.remove_node(other, allow_graceful=False)
        assert found + evaluator.losses(every[6:], 3) == expected
    (database.folder / "fc" / "unstructured@0.9.safetensors").write_bytes(b"damaged")
    said = pytest.raises(BadData, match=r"^[^\n]*fc[^\n]*damaged; delete it")
    with evaluating(database, cached(tmp_path / "damaged"), pool="ray") as evaluator, said:
        evaluator.losses([(0, 0), (0, 3)], 2)


@pytest.mark.slow
def test_an_interrupted_search_goes_on_where_it_was_and_finds_the_same(database: Database, tmp_path: Path) -> None:
    with evaluating(database, LossCache(["conv", "fc"])) as evaluator:
        expected = run_strategy(StrategySettings("staged", 8, 3), PROBLEM, 2.0, evaluator)

    class Interrupted(Exception):
        pass

    def stop_at_four(what: str, done: int | None, total: int | None) -> None:
        if done is not None and done >= 4:
            raise Interrupted

    with evaluating(database, cached(tmp_path)) as evaluator, pytest.raises(Interrupted):
        run_strategy(StrategySettings("staged", 8, 3), PROBLEM, 2.0, evaluator, progress=stop_at_four)
    path = tmp_path / "trials.jsonl"
    before = path.read_bytes()
    path.write_bytes(before[:-20])  # killed in the middle of a line
    whole = len(before.splitlines()) - 1
    with evaluating(database, cached(tmp_path)) as evaluator:
        assert run_strategy(StrategySettings("staged", 8, 3), PROBLEM, 2.0, evaluator) == expected
    after = path.read_bytes().splitlines()
    assert after[:whole] == before.splitlines()[:whole]
    judged = [tuple(json.loads(line)[part] for part in ("held", "first")) for line in after if line.endswith(b"}")]
    assert len({str(one) for one in judged}) == len(judged)  # nothing was judged twice
    with evaluating(database, cached(tmp_path)) as evaluator:  # and a third time nothing is
        assert run_strategy(StrategySettings("staged", 8, 3), PROBLEM, 2.0, evaluator) == expected
    assert path.read_bytes().splitlines() == after


def test_losses_are_known_again_batch_by_batch(tmp_path: Path) -> None:
    written = cached(tmp_path)
    written.add(PROFILE, [0.25, 1e-300])
    written.add(PROFILE, [float("inf")])
    assert list(cached(tmp_path).losses(PROFILE)) == [0.25, 1e-300, float("inf")]
    assert list(cached(tmp_path).losses(PROFILE[::-1])) == []
    assert list(cached(tmp_path, "another").losses(PROFILE)) == []


@pytest.mark.parametrize("damage", [b"", b"{", b'{"key": "key", "held": 3}\n', b"\xff\xfe\n", b'{"key": "key"}'])
def test_a_damaged_end_is_dropped_and_the_file_goes_on(tmp_path: Path, damage: bytes) -> None:
    cached(tmp_path).add(PROFILE, [0.5])
    path = tmp_path / "trials.jsonl"
    path.write_bytes(path.read_bytes() + damage)
    found = cached(tmp_path)
    assert list(found.losses(PROFILE)) == [0.5]
    found.add(PROFILE, [0.75])
    assert list(cached(tmp_path).losses(PROFILE)) == [0.5, 0.75]


def test_two_searches_that_judged_the_same_agree(tmp_path: Path) -> None:
    one, other = cached(tmp_path), cached(tmp_path)
    one.add(PROFILE, [0.5, 0.6])
    other.add(PROFILE, [0.5])
    other.add(PROFILE, [0.6, 0.7])
    found = cached(tmp_path)
    assert list(found.losses(PROFILE)) == [0.5, 0.6]
    found.add(PROFILE, [0.7])
    assert list(cached(tmp_path).losses(PROFILE)) == [0.5, 0.6, 0.7]


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "trials.jsonl").mkdir()
    with pytest.raises(EnvironmentUnusable, match=r"cannot read .*trials.jsonl"):
        cached(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentUnusable, match=r"cannot write .*trials.jsonl"):
        cached(tmp_path / "file").add(PROFILE, [1.0])


EDITED = """
import torch
name = "edited"
class Model(torch.nn.Sequential):
    def forward(self, x):
        return super().forward(x) * 2
def model(): return Model(torch.nn.Linear(4, 4)).eval()
def example(): return (torch.zeros(2, 4),)
def calibration(): return [example()]
SMOOTHING = 0.1
def smoothed(y): return y * (1 - SMOOTHING)
def loss(model, batch): return smoothed(model(*batch)).sum()
def score(model): return 1.0
"""


def key(task: Task, model_hash: str = "a", provenance: str = "r") -> str:
    return hash_loss_inputs(task, task.model(), model_hash, provenance)


def test_the_key_is_of_weights_of_what_made_the_database_and_of_the_task(tmp_path: Path) -> None:
    (tmp_path / "edited.py").write_text(EDITED)
    keys = {key(TASK), key(TASK, "b"), key(TASK, "a", "s"), key(load_task(str(tmp_path / "edited.py")))}
    assert len(keys) == 4
    assert key(TASK) in keys


@pytest.mark.parametrize(
    ("was", "becomes"),
    [("SMOOTHING = 0.1", "SMOOTHING = 0.2"), ("(1 - S", "(2 - S"), ("(x) * 2", "(x) * 3"), ("", "")],
)
def test_the_key_changes_with_whatever_the_loss_uses_in_the_task_s_file(
    tmp_path: Path, was: str, becomes: str
) -> None:
    path = tmp_path / "edited.py"
    path.write_text(EDITED)
    before = key(load_task(str(path)))
    path.write_text(EDITED.replace(was, becomes))
    assert (key(load_task(str(path))) == before) == (was == becomes)


def test_the_key_changes_with_the_file_of_the_model_s_class(tmp_path: Path) -> None:
    (tmp_path / "edited_network.py").write_text(EDITED)
    path = tmp_path / "edited_task.py"
    path.write_text(EDITED.replace("import torch", "import torch\nimport edited_network").replace(
        "return Model(", "return edited_network.Model("
    ))  # fmt: skip
    before = key(load_task(str(path)))
    (tmp_path / "edited_network.py").write_text(EDITED.replace("(x) * 2", "(x) * 30"))
    assert key(load_task(str(path))) != before


@pytest.mark.parametrize("parts", [1, 2, 3, 9])
def test_stretches_are_all_the_numbers_in_order(parts: int) -> None:
    stretches = list(_split(range(2, 7), parts))
    assert [number for stretch in stretches for number in stretch] == [2, 3, 4, 5, 6]
    assert len(stretches) == min(parts, 5)
