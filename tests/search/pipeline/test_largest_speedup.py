"""The fastest profile that loses at most so much: the target itself is searched."""

from pathlib import Path
from typing import Any

import pytest

from latbench.cli.commands.search import search
from latbench.errors import UsageError
from search.knapsack.arrays import Infeasible
from search.pipeline.largest_speedup import AllowedDrop, find_largest, lower_target, parse_drop


@pytest.mark.parametrize("edge", [1.06, 1.7, 3.3])
def test_bisection_finds_the_edge_within_a_few_per_cent(edge: float) -> None:
    asked: list[float] = []

    def is_good(value: float) -> bool:
        asked.append(value)
        return value <= edge

    found = find_largest(is_good, 1.05, 4.0)
    assert found is not None and edge / 1.03 <= found <= edge
    assert len(asked) <= 7


def test_nothing_is_found_where_even_the_least_target_is_too_much_or_beyond_reach() -> None:
    def infeasible(value: float) -> bool:
        if value > 1.5:
            raise Infeasible(1.0, 2.0)
        return True

    assert find_largest(lambda value: False, 1.05, 4.0) is None
    assert find_largest(lambda value: True, 1.05, 1.0) is None
    found = find_largest(infeasible, 1.05, 4.0)
    assert found is not None and 1.4 < found <= 1.5


def test_a_target_is_lowered_by_what_the_whole_model_gains_less_than_predicted() -> None:
    assert lower_target(5.0, good=5.0, predicted=6.25, failures=0) == pytest.approx(4.0)  # 5 / 6.25 of it


def test_a_target_is_lowered_in_growing_steps_and_never_below_the_least() -> None:
    target, targets = 4.0, []
    for failures in range(4):
        target = lower_target(target, good=5.0, predicted=4.0, failures=failures)
        targets.append(target / 4.0)
    assert targets == pytest.approx([0.95, 0.95**3, 0.95**7, 0.95**15])
    assert lower_target(1.1, good=1.0, predicted=9.0, failures=0) == 1.05


@pytest.mark.parametrize(
    ("text", "dense", "least"), [("1%", 0.9, 0.891), ("0.01", 0.9, 0.89), ("2 %", -10.0, -10.2), (".5", 70.0, 69.5)]
)
def test_a_drop_is_a_share_of_the_score_or_a_difference(text: str, dense: float, least: float) -> None:
    assert parse_drop(text).least(dense) == pytest.approx(least)


@pytest.mark.parametrize("text", ["", "one", "-1%", "0", "1%%", "1 percent"])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--max-drop takes a share such as 1%"):
        parse_drop(text)


def test_a_share_is_of_the_dense_score() -> None:
    assert AllowedDrop(0.1, relative=True).least(80.0) == pytest.approx(72.0)


@pytest.mark.parametrize("option", [{"remeasure": True}, {"time_budget": "5m"}, {"refine": Path("verify")}])
def test_options_of_one_target_are_refused(option: dict[str, Any]) -> None:
    """They would do nothing: the target itself is searched."""
    [name] = option
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} belongs to a --target"):
        search(
            "digits",
            "table",
            Path("database"),
            Path("profile.json"),
            max_drop="1%",
            model=Path("model.json"),
            **option,
        )
