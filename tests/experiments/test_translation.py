"""The parts of the translation experiment that results hang on, and how its runs share the work."""

import importlib
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

WORDS = ["<pad>", "<s>", "</s>", "<unk>", *(f"word{i}" for i in range(26))]


@pytest.fixture
def experiment(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("sacrebleu")
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return importlib.import_module("translation")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return importlib.import_module("runs")


def made_up(experiment: ModuleType, rng: np.random.Generator, pairs: int) -> Any:
    def sentence(most: int) -> list[int]:
        return [int(word) for word in rng.integers(4, 30, rng.integers(1, most))]

    part = [([*sentence(9), 2], [1, *sentence(9), 2]) for _ in range(pairs)]
    return experiment.Data({"train": part, "val": part, "test": part}, 30, WORDS, ["word1"] * pairs)


def test_the_loss_and_its_gradients_are_those_of_cross_entropy(
    experiment: ModuleType, rng: np.random.Generator
) -> None:
    x, embeddings = (torch.from_numpy(rng.normal(size=(n, 8))).requires_grad_() for n in (11, 30))
    words = torch.from_numpy(rng.integers(0, 5, 11))  # some are padding
    given = torch.autograd.grad(3 * experiment.WordLoss.apply(x, embeddings, words), (x, embeddings))
    wanted = torch.autograd.grad(3 * cross_entropy(x @ embeddings.T, words, ignore_index=0), (x, embeddings))
    torch.testing.assert_close(given, wanted)
    torch.testing.assert_close(
        experiment.WordLoss.apply(x, embeddings, words), cross_entropy(x @ embeddings.T, words, ignore_index=0)
    )


def test_a_sentence_decoded_word_by_word_is_what_the_whole_gives(
    experiment: ModuleType, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "LONGEST", 8)
    torch.manual_seed(0)
    data = made_up(experiment, rng, 2)
    model = experiment.Translator(30, 30)
    found = experiment.translations(model, data)
    for (source, _), words in zip(data.pairs["test"], found, strict=True):
        target = [1]  # greedily, the whole sentence anew for every word, without padding
        while len(target) <= experiment.LONGEST and target[-1] != 2:
            states = model(torch.tensor([source]), torch.tensor([target]))
            target.append(int((states[0, -1] @ model.target.weight.T).argmax()))
        assert words.split() == [WORDS[word] for word in target[1:] if word != 2]


def test_batches_have_few_shapes_and_lose_no_sentence(experiment: ModuleType, rng: np.random.Generator) -> None:
    data = made_up(experiment, rng, 3000)
    seen: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
    shapes = set()
    for _, (source, target) in zip(range(60), experiment.batches(data, rng), strict=False):
        shapes.add((source.shape, target.shape))
        for one, other in zip(source.tolist(), target.tolist(), strict=True):
            seen[tuple(w for w in one if w), tuple(w for w in other if w)] += 1
    assert len(shapes) <= 9
    assert all(source[1] % 4 == 0 and target[1] % 4 == 1 for source, target in shapes)
    given = Counter((tuple(source), tuple(target)) for source, target in data.pairs["train"])
    assert set(seen) <= set(given)
    passes = sum(seen.values()) / 3000
    assert all(count <= (int(passes) + 2) * given[pair] for pair, count in seen.items())


def test_every_method_gets_as_many_trials(experiment: ModuleType) -> None:
    assert len({len(trials) for _, _, trials in experiment.METHODS.values()}) == 1
    keys = [json.dumps(key) for key in experiment.plan()]
    assert len(set(keys)) == len(keys)


def test_a_method_is_run_with_the_trial_of_least_validation_loss(experiment: ModuleType) -> None:
    rows = [
        {"part": "tune", "method": "ASP", "trial": i, "validation": loss, "learning_rate": i, "settings": {"a": i}}
        for i, loss in enumerate((3.0, 2.0, 2.5, 4.0))
    ]
    assert experiment.tuned(rows[:3], "ASP") is None
    assert experiment.tuned(rows, "ASP") == (1, {"a": 1})


def test_runs_go_on_after_a_line_that_was_cut_off(runs: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"run": 0, "value": 1}\n{"run": 1, "va')
    keys = [{"run": i} for i in range(3)]
    assert runs.run_missing(path, keys, lambda key, rows: {**key, "value": len(rows)}, 1.0)
    assert runs.read_rows(path) == [{"run": 0, "value": 1}, {"run": 1, "value": 1}, {"run": 2, "value": 2}]


OTHER = """
import runs, sys
from pathlib import Path

def slow(key, rows):
    print("begun", flush=True)
    sys.stdin.readline()
    return {**key, "by": "other"}

runs.run_missing(Path(sys.argv[1]), [{"run": 0}], slow, 1.0)
"""


def test_what_another_process_is_at_is_left_to_it(runs: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    command = [sys.executable, "-c", OTHER, str(path)]
    with subprocess.Popen(
        command, cwd=Path(__file__).parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "begun\n"

        def quick(key: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
            assert other.stdin is not None
            other.stdin.write("\n")
            other.stdin.flush()
            return {**key, "by": "this"}

        assert runs.run_missing(path, [{"run": 0}, {"run": 1}], quick, 1.0, wait_seconds=0.01)
    assert sorted((row["run"], row["by"]) for row in runs.read_rows(path)) == [(0, "other"), (1, "this")]


def test_what_waits_for_another_run_is_done_after_it(runs: ModuleType, tmp_path: Path) -> None:
    keys = [{"run": "main"}, {"run": "trial"}]
    path = tmp_path / "results.jsonl"
    assert runs.run_missing(
        path, keys, lambda key, rows: key, 1.0, ready=lambda key, rows: key["run"] == "trial" or bool(rows)
    )
    assert [row["run"] for row in runs.read_rows(path)] == ["trial", "main"]
