"""Bytes of weights as a second budget."""

import numpy as np
import pytest

from latbench.errors import UsageError
from search.knapsack.arrays import Infeasible
from search.problem.layers import DENSE, Interval, LayerOptions, Option
from search.problem.packed_bytes import count_weight_bytes
from search.problem.problem import Problem
from sparse_kernels.formats import pack
from sparse_kernels.patterns import parse
from sparse_kernels.shapes import LinearShape

SPECS = ["unstructured", "vector:4", "shflbw:4", "block:4x4", "block:4x8", "nm:2:4", "vectornm:4:2:4"]


def packed_bytes(spec: str, scores: np.ndarray, sparsity: float) -> int:
    mask = parse(spec).mask(scores, sparsity)
    return int(pack(mask.astype(np.float32), mask, parse(spec)).nbytes)


@pytest.mark.parametrize("spec", SPECS)
def test_bytes_are_those_of_any_mask_of_the_pattern(spec: str, rng: np.random.Generator) -> None:
    # Positions may take a few bytes more or less.
    counted = count_weight_bytes(Option(spec, 0.5), LinearShape(m=16, k=24, n=3))
    assert counted == pytest.approx(packed_bytes(spec, rng.random((16, 24)), 0.5), abs=16)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("m", "k"), [(13, 7), (17, 33), (5, 3), (31, 29)])
def test_no_mask_takes_more_where_the_pattern_does_not_divide_the_shape(
    spec: str, m: int, k: int, rng: np.random.Generator
) -> None:
    counted = count_weight_bytes(Option(spec, 0.5), LinearShape(m=m, k=k, n=3))
    at_the_edges = np.add.outer(np.arange(m) ** 8.0, np.arange(k) ** 8.0)
    drawn = [rng.random((m, k)) ** 3 for _ in range(20)]
    assert max(packed_bytes(spec, scores, 0.5) for scores in [at_the_edges, *drawn]) <= counted


OPTIONS = (Option(DENSE, 0.0), Option("unstructured", 0.5), Option("vector:4", 0.75))
SHAPES = {"a": LinearShape(m=16, k=16, n=1), "b": LinearShape(m=16, k=16, n=1), "c": LinearShape(m=8, k=24, n=1)}


def problem() -> Problem:
    t, e = np.array([4.0, 1.0, 1.0]), np.array([0.0, 1.0, 3.0])
    layers = tuple(LayerOptions(name, OPTIONS, t, t, t, e) for name in SHAPES)
    return Problem(layers, Interval(0, 0, 0), Interval(12, 12, 12), "torch")


def test_the_lightest_profile_is_found_within_both_budgets() -> None:
    p = problem()
    heavy = sum(count_weight_bytes(OPTIONS[1], shape) for shape in SHAPES.values())
    assert p.solve(4.0).options == dict.fromkeys("abc", OPTIONS[1])
    assert p.solve(4.0, second_budget=p.byte_budget(heavy, SHAPES)).error == 3.0
    budget = p.byte_budget(heavy - 1, SHAPES)
    light = p.solve(4.0, second_budget=budget)
    assert sorted(map(str, light.options.values())) == [
        "unstructured at 0.5",
        "unstructured at 0.5",
        "vector:4 at 0.75",
    ]
    assert budget.used(light.options) == sum(
        count_weight_bytes(it, SHAPES[name]) for name, it in light.options.items()
    )


@pytest.mark.parametrize("known", ["given", "to the layers"])
def test_layers_that_stay_dense_weigh_the_same_excluded_or_not(known: str) -> None:
    given = SHAPES if known == "given" else None
    free = problem() if given else problem().with_shapes(SHAPES)
    excluded, fixed = free.limited(excluded=["b", "c"]), free.limited(fixed={"b": "dense", "c": "dense"})
    dense = sum(count_weight_bytes(OPTIONS[0], shape) for shape in SHAPES.values())
    for used in (dense, dense - 1, dense - count_weight_bytes(OPTIONS[0], SHAPES["a"]) - 1):
        answers = []
        for p in (excluded, fixed):
            try:
                answers.append(p.solve(1.0, second_budget=p.byte_budget(used, given)).options["a"])
            except Infeasible as refused:
                answers.append(str(refused))
        assert answers[0] == answers[1]
    assert f"keeps bytes of weights, {used:.6g}: the least that one takes is" in answers[0]


def test_a_layer_whose_shape_nobody_knows_is_named() -> None:
    with pytest.raises(UsageError, match="bytes of weights: the shape of layer b is unknown"):
        problem().byte_budget(1e6, {"a": SHAPES["a"], "c": SHAPES["c"]})
    with pytest.raises(UsageError, match="the shape of layer c is unknown"):
        p = problem().limited(excluded=["c"])
        p.byte_budget(1e6, {"a": SHAPES["a"], "b": SHAPES["b"]})


def test_in_eight_bits_a_value_takes_a_byte_and_a_row_a_scale() -> None:
    shape = LinearShape(64, 96, 1)
    for spec, sparsity in (("block:4x4", 0.5), ("dense", 0.0), ("unstructured", 0.75)):
        wide, narrow = (count_weight_bytes(Option(spec, sparsity, each), shape) for each in ("float32", "int8"))
        kept = round(64 * 96 * (1 - sparsity))
        assert narrow == wide - 3 * kept + 64 * 4
