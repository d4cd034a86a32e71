"""Losses are kept in a file, and several processes give the same ones as one."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from latbench.errors import EnvironmentUnusable
from latbench.runners.local import TaskFailed
from search import task as tasks
from search.database import Database, model_hash
from search.judges import Judges, _split
from search.problem import DENSE, Interval, Layer, Option, Problem
from search.strategies import find
from search.trials import Trials, key_of
from sparse_kernels.nn import weight_matrix

TASK = tasks.load(str(Path(__file__).parent / "pruning_task.py"))
OPTIONS = (Option(DENSE, 0.0), *(Option("unstructured", s) for s in (0.5, 0.75, 0.9)))
SECONDS = np.array([1.0, 0.6, 0.35, 0.2])
LAYERS = tuple(
    Layer(name, OPTIONS, SECONDS, SECONDS, SECONDS, np.array([0.0, 0.1, 0.3, 0.7])) for name in ("conv", "fc")
)
PROBLEM = Problem(LAYERS, Interval(0.1, 0.1, 0.1), Interval(2.1, 2.1, 2.1), "torch")
HELD = (("unstructured", 0.5), (DENSE, 0.0))


@pytest.fixture
def database(tmp_path: Path) -> Database:
    model = TASK.model()
    made, generator = Database(tmp_path, model_hash(model)), np.random.default_rng(0)
    for layer in LAYERS:
        weight = weight_matrix(model.get_submodule(layer.name))
        for option in OPTIONS[1:]:
            mask = torch.from_numpy(generator.random(tuple(weight.shape)) > option.sparsity)
            made.put(layer.name, option.pattern, option.sparsity, weight * mask, mask, 0.1)
    return made


@contextmanager
def judges(database: Database, trials: Trials, processes: int = 1) -> Iterator[Judges]:
    with Judges(TASK, TASK.model(), LAYERS, database, trials, processes=processes) as found:
        yield found


def trials(folder: Path, key: str = "key") -> Trials:
    return Trials([layer.name for layer in LAYERS], folder / "trials.jsonl", key)


def test_two_processes_give_the_same_losses_and_the_same_profile_as_one(database: Database, tmp_path: Path) -> None:
    every = [(i, j) for i in range(4) for j in range(4)]
    answers, found = [], []
    for processes in (1, 2):
        with judges(database, trials(tmp_path / str(processes)), processes) as judge:
            answers.append(judge.losses(every[:1], 1) + judge.losses(every, 3) + judge.losses(every[3:5], 6))
            found.append(find("staged", PROBLEM, 2.0, judge, seed=0, evaluations=8))
    assert answers[0] == answers[1]  # bit for bit
    assert found[0] == found[1]
    files = [(tmp_path / str(processes) / "trials.jsonl").read_text() for processes in (1, 2)]
    assert files[0] == files[1]


def test_what_fails_in_a_process_is_said(database: Database, tmp_path: Path) -> None:
    (database.folder / "fc" / "unstructured@0.9.safetensors").write_bytes(b"damaged")
    with judges(database, trials(tmp_path), 2) as judge, pytest.raises(TaskFailed, match=r"fc.*damaged; delete it"):
        judge.losses([(0, 0), (0, 3)], 2)


def test_an_interrupted_search_goes_on_where_it_was_and_finds_the_same(database: Database, tmp_path: Path) -> None:
    with judges(database, Trials(["conv", "fc"])) as judge:
        expected = find("staged", PROBLEM, 2.0, judge, seed=3, evaluations=8)

    class Interrupted(Exception):
        pass

    def stop_at_four(what: str, done: int | None, total: int | None) -> None:
        if done is not None and done >= 4:
            raise Interrupted

    with judges(database, trials(tmp_path)) as judge, pytest.raises(Interrupted):
        find("staged", PROBLEM, 2.0, judge, seed=3, evaluations=8, progress=stop_at_four)
    path = tmp_path / "trials.jsonl"
    before = path.read_bytes()
    path.write_bytes(before[:-20])  # killed in the middle of a line
    whole = len(before.splitlines()) - 1
    with judges(database, trials(tmp_path)) as judge:
        assert find("staged", PROBLEM, 2.0, judge, seed=3, evaluations=8) == expected
    after = path.read_bytes().splitlines()
    assert after[:whole] == before.splitlines()[:whole]
    judged = [tuple(json.loads(line)[part] for part in ("held", "first")) for line in after if line.endswith(b"}")]
    assert len({str(one) for one in judged}) == len(judged)  # nothing was judged twice
    with judges(database, trials(tmp_path)) as judge:  # and a third time nothing is
        assert find("staged", PROBLEM, 2.0, judge, seed=3, evaluations=8) == expected
    assert path.read_bytes().splitlines() == after


def test_losses_are_known_again_batch_by_batch(tmp_path: Path) -> None:
    written = trials(tmp_path)
    written.add(HELD, [0.25, 1e-300])
    written.add(HELD, [float("inf")])
    assert list(trials(tmp_path).losses(HELD)) == [0.25, 1e-300, float("inf")]
    assert list(trials(tmp_path).losses(HELD[::-1])) == []
    assert list(trials(tmp_path, "another").losses(HELD)) == []


@pytest.mark.parametrize("damage", [b"", b"{", b'{"key": "key", "held": 3}\n', b"\xff\xfe\n", b'{"key": "key"}'])
def test_a_damaged_end_is_dropped_and_the_file_goes_on(tmp_path: Path, damage: bytes) -> None:
    trials(tmp_path).add(HELD, [0.5])
    path = tmp_path / "trials.jsonl"
    path.write_bytes(path.read_bytes() + damage)
    found = trials(tmp_path)
    assert list(found.losses(HELD)) == [0.5]
    found.add(HELD, [0.75])
    assert list(trials(tmp_path).losses(HELD)) == [0.5, 0.75]


def test_two_searches_that_judged_the_same_agree(tmp_path: Path) -> None:
    one, other = trials(tmp_path), trials(tmp_path)
    one.add(HELD, [0.5, 0.6])
    other.add(HELD, [0.5])
    other.add(HELD, [0.6, 0.7])
    found = trials(tmp_path)
    assert list(found.losses(HELD)) == [0.5, 0.6]
    found.add(HELD, [0.7])
    assert list(trials(tmp_path).losses(HELD)) == [0.5, 0.6, 0.7]


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "trials.jsonl").mkdir()
    with pytest.raises(EnvironmentUnusable, match=r"cannot read .*trials.jsonl"):
        trials(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentUnusable, match=r"cannot write .*trials.jsonl"):
        trials(tmp_path / "file").add(HELD, [1.0])


def test_the_key_is_of_weights_recipe_and_loss() -> None:
    keys = {
        key_of(TASK, "a", "r"),
        key_of(TASK, "b", "r"),
        key_of(TASK, "a", "s"),
        key_of(tasks.load("digits"), "a", "r"),
    }
    assert len(keys) == 4
    assert key_of(TASK, "a", "r") in keys


@pytest.mark.parametrize("parts", [1, 2, 3, 9])
def test_stretches_are_all_the_numbers_in_order(parts: int) -> None:
    stretches = list(_split(range(2, 7), parts))
    assert [number for stretch in stretches for number in stretch] == [2, 3, 4, 5, 6]
    assert len(stretches) == min(parts, 5)
