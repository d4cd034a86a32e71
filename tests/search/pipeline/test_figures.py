"""The scripts that show what the search is worth, on a toy: they run, and count as they say."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from latbench.errors import UsageError
from latbench.runners.worker import load_function
from search.knapsack.arrays import Choice
from search.problem.layers import DENSE, Interval, LayerOptions, Option
from search.problem.problem import Problem
from search.strategies.evaluation_budget import EvaluatedProfile, SearchResult

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OPTIONS = (Option(DENSE, 0.0), *(Option("vector:8", s) for s in (0.5, 0.75, 0.9)))
SECONDS = np.array([1.0, 0.6, 0.35, 0.2])
LAYERS = tuple(
    LayerOptions(f"fc{i}", OPTIONS, SECONDS, SECONDS, SECONDS, np.array([0.0, 0.1, 0.3, 0.7])) for i in range(5)
)
PROBLEM = Problem(LAYERS, Interval(0.1, 0.1, 0.1), Interval(5.1, 5.1, 5.1), "torch")


class Judge:
    batches = 4

    def losses(self, choices: Sequence[Choice], batches: int) -> list[float]:
        return [sum((i + 1) * float(SECONDS[j]) ** -0.5 for i, j in enumerate(choice)) for choice in choices]

    def layer_shares(self, choice: Choice, batches: int) -> list[float]:
        raise UsageError("a formula has no gradient")


def found(*trace: tuple[float, float]) -> SearchResult:
    made = tuple(EvaluatedProfile((i,), loss, "spdy", spent) for i, (loss, spent) in enumerate(trace))
    return SearchResult((0,), min(loss for loss, _ in trace), "spdy", made, trace[-1][1], False)


def test_evaluations_until_a_loss_was_reached() -> None:
    reached = load_function(f"{BENCHMARKS}/search_quality.py:reached")
    one = found((3.0, 1.0), (2.0, 2.5), (2.0, 3.0), (1.0, 4.0))
    assert [reached(one, loss) for loss in (5.0, 2.0, 1.5, 0.5)] == [1.0, 2.5, 4.0, math.inf]


def test_strategies_are_compared_at_equal_evaluations(capsys: pytest.CaptureFixture[str]) -> None:
    compare = load_function(f"{BENCHMARKS}/search_quality.py:compare")
    counts = compare((PROBLEM, Judge()), PROBLEM, Judge(), 2.0, "  60%", 3, 30)
    lines = capsys.readouterr().out.splitlines()
    assert len(counts) == len(lines) == 3
    for (ours, published, spent), line in zip(counts, lines, strict=True):
        assert published <= spent <= 30
        assert line.split()[-2:] == [f"{published:.1f}", f"{ours:.1f}"]
