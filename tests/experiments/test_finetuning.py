"""What the fine-tuning experiment times, what it trains and what it says, with searches and training made up."""

import importlib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch import nn

from latbench.errors import PromiseMissed
from latbench.report.sections import accuracy
from search.artifacts.profile import LayerChoice, Profile


@pytest.fixture
def experiment(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return importlib.import_module("finetuning")


def example(request: Any) -> Profile:
    pattern = (request.candidates.patterns or ("dense", "vector:8"))[1]
    return Profile(
        task="resnet20", layers={"conv": LayerChoice(pattern, 0.9, 1e-3, 9e-4, 1.1e-3, 0.1)}, backend="numba",
        threads=2, batch=16, device="some-cpu", target=request.promise.target, confidence=0.9, dense_engine="torch",
        dense_seconds=4e-3, dense_seconds_low=4e-3, dense_seconds_high=4e-3, fixed_seconds=1e-3,
        fixed_seconds_low=1e-3, fixed_seconds_high=1e-3, predicted_seconds=4e-3 / request.promise.target,
        predicted_low=1e-3, predicted_high=4e-3, loss=0.1, error=0.1, bound=0.1, ceiling=None,
        additivity_before=0.1, additivity_after=0.1, strategy=request.plan.strategy, seed=0, table_hash="aa",
        model_hash="bb", inputs="cc",
    )  # fmt: skip


@pytest.fixture
def searches(experiment: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """What was searched for, (strategy or pattern, speedup): mixed patterns reach 1.75x, others 1.5x."""
    asked: list[tuple[str, float]] = []

    def search(inputs: Any, request: Any) -> Profile:
        kind = request.candidates.patterns[1] if request.candidates.patterns else request.plan.strategy
        asked.append((kind, request.promise.target))
        if request.promise.target > (1.75 if kind == "staged" else 1.5):
            raise PromiseMissed("out of reach")
        return example(request)

    monkeypatch.setattr(experiment.search_job, "search", search)
    return asked


def test_all_speedups_are_searched_for_but_those_that_even_mixed_patterns_do_not_reach(
    experiment: ModuleType, searches: list[tuple[str, float]], tmp_path: Path
) -> None:
    experiment.search_all(None, tmp_path, 2, 60.0, 60, 0.9)
    assert searches[:4] == [("staged", 2.0), ("staged", 1.75), ("staged", 1.5), ("staged", 1.25)]
    assert set(searches[4:]) == {
        (kind, speedup) for kind in ("uniform", *experiment.ALONE) for speedup in (1.75, 1.5, 1.25)
    }
    assert set(experiment.found(tmp_path)) == {
        "searched 1.75x", *(f"{kind} {speedup}x" for kind in ("searched", "uniform", *experiment.ALONE)
                            for speedup in (1.5, 1.25)),
    }  # fmt: skip


def test_what_was_found_or_refused_is_not_searched_again(
    experiment: ModuleType, searches: list[tuple[str, float]], tmp_path: Path
) -> None:
    experiment.search_all(None, tmp_path, 2, 0.0, 60, 0.9)
    assert not searches  # no minutes, no search
    experiment.search_all(None, tmp_path, 2, 60.0, 60, 0.9)
    before = len(searches)
    experiment.search_all(None, tmp_path, 2, 60.0, 60, 0.9)
    assert len(searches) == before


def test_where_nothing_was_trained_that_is_said(
    experiment: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment.show(tmp_path, tmp_path / "accuracy.csv")
    assert "finetuning.jsonl holds no result yet: `train` adds them" in capsys.readouterr().out
    assert not (tmp_path / "accuracy.csv").exists()


def test_results_are_trained_once_and_shown_in_pairs(
    experiment: ModuleType,
    searches: list[tuple[str, float]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    experiment.search_all(None, tmp_path, 2, 60.0, 60, 0.9)
    scores = {"searched": 0.9, "uniform": 0.88}
    trained: list[str] = []
    task = SimpleNamespace(model=nn.Module, score=lambda model: getattr(model, "score", 0.92))

    def train(task: Any, model: Any, chosen: Profile, recipe: Any) -> Any:
        trained.append(recipe.method)
        model.score = scores["uniform" if chosen.strategy == "uniform" else "searched"] + recipe.seed / 100
        return SimpleNamespace(to_dict=lambda: {"total": 1.0, "dense_total": 4.0})

    monkeypatch.setattr(experiment, "load_task", lambda name: task)
    monkeypatch.setattr(experiment, "train", train)
    monkeypatch.setattr(experiment, "one_shot", lambda task, chosen, method: SimpleNamespace(score=0.5))
    experiment.train_all(tmp_path, 1.0, 10)
    experiment.train_all(tmp_path, 1.0, 10)
    assert len(trained) == 5 * len(experiment.GRADUAL) * experiment.SEEDS + 2 * len(experiment.ALONE) * len(
        experiment.GRADUAL_ALONE
    )
    capsys.readouterr()
    experiment.show(tmp_path, tmp_path / "accuracy.csv")
    shown = capsys.readouterr().out
    # The searched 1.75x is faster than any uniform one.
    assert "AC/DC: searched over uniform at equal time +2.0% +- 0.0% (6 paired)" in shown
    assert "searched_2x: out of reach" in shown
    assert "mask decay: 25% to 25% of dense training's FLOP" in shown
    points = accuracy.build_frame(accuracy.read_results(tmp_path / "accuracy.csv"))
    assert set(points["pattern"]) == {"dense", "searched", "uniform", *experiment.ALONE}


def test_a_searched_profile_is_set_against_the_line_between_the_uniform_ones_just_slower_and_faster(
    experiment: ModuleType,
) -> None:
    def row(profile: str, speedup: float, accuracy: float, seed: int = 0) -> dict[str, Any]:
        return {"profile": profile, "method": "GMP", "speedup": speedup, "accuracy": accuracy, "seed": seed}

    uniform = [row("uniform 1.75x", 2.0, 0.6), row("uniform 1.5x", 1.6, 0.8), row("uniform 1.25x", 1.2, 0.9)]
    searched = [row("searched 1.75x", 1.9, 0.7), row("searched 2x", 2.1, 0.9), row("searched 1.5x", 1.6, 0.8, seed=1)]
    assert experiment.against_uniform([*uniform, *searched], "GMP") == pytest.approx([0.7 - 0.65])
    assert experiment.against_uniform([*uniform, *searched], "AC/DC") == []
