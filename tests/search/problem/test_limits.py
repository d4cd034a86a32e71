"""Limits: tied, fixed, bounded and excluded layers, against all profiles that an independent check lets pass."""

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from latbench.errors import BadData, UsageError
from search.knapsack.arrays import Infeasible, sum_in_order
from search.problem.layers import DENSE, Interval, LayerOptions, Option
from search.problem.limits import Limits, parse_limits, read_limits
from search.problem.problem import Problem

OPTIONS = (
    Option(DENSE, 0.0), Option("nm:2:4", 0.5), Option("vector:8", 0.5), Option("vector:8", 0.75),
    Option("block:4x4", 0.9),
)  # fmt: skip
NAMES = ("block.0.q", "block.0.k", "block.1.q", "block.1.k", "head")


def problem(rng: np.random.Generator) -> Problem:
    """Times and errors in 64ths: sums are exact in any order."""
    layers = tuple(
        LayerOptions(name, OPTIONS, *(np.round(64 * rng.uniform(0.1, 1, len(OPTIONS))) / 64,) * 3, errors=np.append(
            0.0, np.round(64 * rng.random(len(OPTIONS) - 1)) / 64
        ))
        for name in NAMES
    )  # fmt: skip
    return Problem(layers, Interval(0.25, 0.25, 0.25), Interval(4.0, 4.0, 4.0), "torch")


Allowed = Callable[[dict[str, Option]], bool]


@pytest.mark.parametrize(
    ("stated", "allowed"),
    [
        ({"tied": [["block.0.q", "head"]]}, lambda it: it["block.0.q"] == it["head"]),
        ({"tied": [["block.*"]]}, lambda it: len({it[name] for name in NAMES[:4]}) == 1),
        (
            {"tied_in_each": [["*.q", "*.k"]]},
            lambda it: it["block.0.q"] == it["block.0.k"] and it["block.1.q"] == it["block.1.k"],
        ),
        (
            {"tied_in_each": [["block.?.[qk]", "block.?.[!k]"]], "tied": [["block.0.k", "block.1.q"]]},
            lambda it: it["block.0.k"] == it["block.1.q"],
        ),
        (
            {"tied": [["block.0.q", "head"], ["head", "block.1.k"]]},
            lambda it: it["block.0.q"] == it["head"] == it["block.1.k"],
        ),
        (
            {"fixed": {"*.q": "vector:8 at 0.75", "head": "nm:2:4"}},
            lambda it: it["block.0.q"] == it["block.1.q"] == OPTIONS[3] and it["head"] == OPTIONS[1],
        ),
        (
            {"minimum": {"*": 0.5, "head": 0.6}},
            lambda it: it["head"].sparsity >= 0.6 and all(one.sparsity >= 0.5 for one in it.values()),
        ),
        (
            {"maximum": {"block.*": 0.75, "block.0.*": 0.5}},
            lambda it: all(it[n].sparsity <= 0.75 for n in NAMES[:4])
            and all(it[n].sparsity <= 0.5 for n in NAMES[:2]),
        ),
        (
            {"patterns": {"*": ["vector:8", "nm:2:4"], "*.q": "vector:8"}},
            lambda it: all(one.pattern != "block:4x4" for one in it.values())
            and all(it[n].pattern in (DENSE, "vector:8") for n in ("block.0.q", "block.1.q")),
        ),
        ({"excluded": ["head", "block.1.*"]}, lambda it: all(it[n] == OPTIONS[0] for n in NAMES[2:])),
        (
            {"excluded": ["head"], "tied": [["*.q"]], "minimum": {"*": 0.5}, "maximum": {"*.k": 0.5}},
            lambda it: it["head"] == OPTIONS[0] and it["block.0.q"] == it["block.1.q"]
            and all(it[n].sparsity >= 0.5 for n in NAMES[:4]) and all(it[n].sparsity <= 0.5 for n in NAMES[1:4:2]),
        ),
    ],
)  # fmt: skip
def test_the_best_profile_under_limits_is_the_best_of_those_they_allow(
    stated: dict, allowed: Allowed, rng: np.random.Generator
) -> None:
    free = problem(rng)
    p = free.limited(parse_limits(stated, "here"))
    every = []
    for choice in itertools.product(range(len(OPTIONS)), repeat=len(NAMES)):
        if allowed({name: OPTIONS[j] for name, j in zip(NAMES, choice, strict=True)}):
            error = sum_in_order(layer.errors[j] for layer, j in zip(free.layers, choice, strict=True))
            every.append((free.speedup(free.predict(choice)).low, error))
    for target in (1.2, 1.5, 2.0, 3.0, max(every)[0]):
        fitting = [error for speedup, error in every if speedup >= target]
        if not fitting:
            with pytest.raises(Infeasible):
                p.solve(target)
            continue
        solution = p.solve(target)
        assert solution.error == solution.bound == min(fitting)
        assert solution.speedup.low >= target
        stays = {name: OPTIONS[0] for name in NAMES if name not in solution.options}
        whole = solution.options | stays
        assert allowed(whole)
        again = tuple(OPTIONS.index(whole[name]) for name in NAMES)
        assert free.predict(again) == solution.predicted
        for choice in p.uniform_profiles(target):
            assert p.speedup(p.predict(choice)).low >= target
    assert p.without_dominated().frontier().speedups[0] == p.frontier().speedups[0] == max(every)[0]


def test_no_limits_change_nothing(rng: np.random.Generator) -> None:
    p = problem(rng)
    assert Limits().apply(p.layers) == p.layers


def test_limits_may_be_set_in_steps(rng: np.random.Generator) -> None:
    p = problem(rng)
    stated = ({"tied": [["block.0.q", "head"]]}, {"minimum": {"head": 0.6}}, {"tied": [["head", "block.1.k"]]})
    steps = p
    for one in stated:
        steps = steps.limited(**one)
    at_once = p.limited(minimum={"head": 0.6}, tied=[["block.0.q", "block.1.k", "head"]])
    assert [it.name for it in steps.layers] == [it.name for it in at_once.layers]
    target = 0.9 * at_once.speedup(at_once.predict(at_once.fastest())).low
    assert steps.solve(target) == at_once.solve(target)
    with pytest.raises(
        UsageError, match=r"layer block\.0\.q and 1 tied to it is tied already: it cannot be excluded now"
    ):
        p.limited(**stated[0]).limited(excluded=["head"])


def test_limits_of_a_task_and_of_a_file_hold_both(tmp_path: Path, rng: np.random.Generator) -> None:
    (tmp_path / "limits.yaml").write_text("tied:\n  - [block.0.q, block.0.k]\nmaximum: {head: 0.5}\n")
    both = parse_limits({"maximum": {"head": 0.75}}, "task") + read_limits(tmp_path / "limits.yaml")
    p = problem(rng).limited(both)
    assert [len(layer.parts) for layer in p.layers] == [2, 1, 1, 1]
    assert [it.sparsity for it in p.layers[-1].options] == [0.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"minimum": {"block.7.*": 0.5}}, r"minimum: no layer is called 'block.7.\*'; the model has block.0.*head"),
        ({"tied": [["block.0.q", "tail"]]}, "tied: no layer is called 'tail'"),
        ({"tied_in_each": [["*.v", "*.k"]]}, r"tied_in_each: no layer is called '\*.v'"),
        ({"excluded": ["tail"]}, "excluded: no layer is called 'tail'"),
        ({"fixed": {"block.[2-1].q": "dense"}}, r"fixed: no layer is called 'block.\[2-1\].q'"),
        ({"fixed": {"block.[[a].q": "dense"}}, r"fixed: no layer is called 'block.\[\[a\].q'"),
        ({"excluded": ["*"]}, "every layer is excluded"),
        ({"excluded": ["head"], "fixed": {"head": "dense"}}, "layer head is excluded, and fixed names it"),
        (
            {"minimum": {"*": 0.75}, "maximum": {"head": 0.5}},
            "layer head must have a sparsity of at least 0.75 and of at most 0.5",
        ),
        ({"fixed": {"head": "dense", "h*": "nm:2:4"}}, "layer head is fixed to dense and to nm:2:4 at 0.5"),
        (
            {"fixed": {"head": "dense"}, "minimum": {"*": 0.5}},
            "the limits leave layer head no option: it has dense, nm:2:4 at 0.5, ",
        ),
        ({"fixed": {"head": "vector:8 at 0.6"}}, "the limits leave layer head no option"),
        (
            {"fixed": {"head": "nm:2:4", "block.0.q": "dense"}, "tied": [["head", "block.0.q"]]},
            "block.0.q, head are tied, and have no option",
        ),
    ],
)  # fmt: skip
def test_limits_that_cannot_hold_are_refused_in_a_line(stated: dict, said: str, rng: np.random.Generator) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        problem(rng).limited(parse_limits(stated, "here"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a", "limits must be a mapping with keys among tied, tied_in_each, fixed,"),
        ("tie: [[a, b]]", "unknown key 'tie' (tied?); known are tied,"),
        ("tied: [a, b]", "item 1 of tied must be a list of names, not 'a'"),
        ("tied: a", "tied must be a list of groups, which are lists of layers, not 'a'"),
        ("tied: [[a, 1]]", "item 2 of item 1 of tied must be a text that is not empty, not 1"),
        ("minimum: [a]", "minimum must be a mapping from layers to sparsities, not ['a']"),
        ("minimum: {1: 0.5}", "minimum must be a mapping from layers to sparsities, not {1: 0.5}"),
        ("minimum: {a: half}", "minimum of 'a' must be a number from 0 to 1, not 'half'"),
        ("maximum: {a: 1.5}", "maximum of 'a' must be a number from 0 to 1, not 1.5"),
        ("maximum: {a: yes}", "maximum of 'a' must be a number from 0 to 1, not True"),
        ("fixed: {a: vector:8}", "fixed of 'a': vector:8 needs a sparsity, such as `vector:8 at 0.75`"),
        ("fixed: {a: vector:8 at x}", "the sparsity of fixed of 'a' must be a number from 0 to 1, not 'x'"),
        ("fixed: {a: rows}", "rows"),
        ("patterns: {a: [rows]}", "rows"),
        ("excluded: a", "excluded must be a list of names, not 'a'"),
        ("fixed: {a: dense, a: dense}", "'a' is given twice"),
        ("fixed: {", "not readable YAML"),
    ],
)
def test_a_file_that_states_no_limits_is_refused_with_its_name(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "limits.yaml"
    path.write_text(text)
    with pytest.raises(BadData) as refused:
        read_limits(path)
    assert str(path) in str(refused.value) and said in str(refused.value)
    with pytest.raises(BadData, match="no such file"):
        read_limits(tmp_path / "none.yaml")
