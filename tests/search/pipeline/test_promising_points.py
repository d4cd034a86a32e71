"""The points of a quick sweep: first each pattern once, then only what a search may choose."""

import pandas as pd
import pytest

from latbench.workloads.points import Point
from search.pipeline.promising_points import SPARSITIES, PromisingPoints
from sparse_kernels.patterns import Dense, parse
from sparse_kernels.shapes import LinearShape

SHAPE = LinearShape(64, 64, 32)
PATTERNS = ("unstructured", "shflbw:32", "vector:32", "block:32x32", "nm:2:4")


def points() -> list[Point]:
    dense = Point("cpu", "numba", "auto", SHAPE, Dense(), 0.0, 1)
    sparse = [
        Point("cpu", "numba", "auto", SHAPE, parse(spec), sparsity, 1)
        for spec in PATTERNS
        for sparsity in ((0.5,) if spec == "nm:2:4" else SPARSITIES)
    ]
    return [dense, *sparse]


def measured(chosen: list[Point], seconds: dict[str, float]) -> pd.DataFrame:
    rows = [
        {"point_id": point.id, "median_seconds": seconds[str(point.pattern)], "status": "ok", "started_at": 0}
        for point in chosen
    ]
    return pd.DataFrame(rows)


SECONDS = {
    "dense": 1.0, "unstructured": 0.6, "shflbw:32": 0.3, "vector:32": 0.29, "block:32x32": 0.2, "nm:2:4": 0.9,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "promising"),
    [
        # Shuffled vectors allow all that vectors do, at nearly the same time; blocks are much faster.
        ({}, {"dense", "unstructured", "shflbw:32", "block:32x32", "nm:2:4"}),
        ({"block:32x32": 0.28}, {"dense", "unstructured", "shflbw:32", "nm:2:4"}),
        ({"unstructured": 0.3}, {"dense", "unstructured", "block:32x32", "nm:2:4"}),  # free, and as fast as vectors
        ({"unstructured": 1.7, "nm:2:4": 1.5}, {"dense", "shflbw:32", "block:32x32", "nm:2:4"}),
    ],
)
def test_a_pattern_that_another_one_beats_is_measured_once(changed: dict[str, float], promising: set[str]) -> None:
    choose = PromisingPoints(points())
    first = choose(None)
    assert [(str(it.pattern), it.sparsity) for it in first] == [
        ("dense", 0.0), *((spec, 0.5 if spec == "nm:2:4" else 0.75) for spec in PATTERNS),
    ]  # fmt: skip
    table = measured(first, SECONDS | changed)
    second = choose(table)
    assert {str(point.pattern) for point in second} == promising
    assert {point.sparsity for point in second if str(point.pattern) == "block:32x32"} <= set(SPARSITIES)
    assert choose(table) == []


def test_without_a_dense_time_everything_is_measured() -> None:
    choose = PromisingPoints(points())
    table = measured([point for point in choose(None) if not isinstance(point.pattern, Dense)], SECONDS)
    assert choose(table) == points()
