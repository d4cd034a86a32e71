"""Which old times a refresh takes again, and what it says of the others."""

from typing import Any

import numpy as np
import pandas as pd
import pytest

from latbench.tables.compare import Change
from latbench.tables.schema import SCHEMA
from latbench.workloads.old_times import (
    POINTS_OF_GROUP,
    find_machine_part,
    judge_moves,
    name_group,
    read_point,
    sample_old_points,
    select_old_times,
)
from latbench.workloads.points import Point
from sparse_kernels.patterns import Dense, VectorWise
from sparse_kernels.shapes import Conv2dShape, LinearShape

ROWS, TOKENS = "numba.vector.rows8x2.avx512", "numba.vector.tokens8x2.avx512"


def build(point: Point, kernel: str = ROWS) -> dict[str, Any]:
    return dict.fromkeys(SCHEMA.names) | point.key() | {"point_id": point.id, "kernel_used": kernel}


def linear(m: int, backend: str = "numba", **options: Any) -> Point:
    pattern = VectorWise(8) if backend == "numba" else Dense()
    return Point("here", backend, "auto", LinearShape(m, 64, 32), pattern, 0.75, 2, **options)


POINTS = [
    linear(64),
    linear(64, dtype_w="int8", dtype_a="int8"),
    Point("here", "torch", "conv2d", Conv2dShape(2, 8, 9, 7, 16, 3, 1, (2, 1), (1, 0), (1, 2)), Dense(), 0.0, 1),
    Point("nvidia-h200", "cupy", "auto", LinearShape(64, 64, 8), VectorWise(64), 0.9, 1, cache_mode="warm",
          launch_mode="graph", dtype="float16", layout="feature_major"),
]  # fmt: skip


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_a_row_is_of_its_point(point: Point) -> None:
    assert read_point(build(point)) == point
    frame = pd.DataFrame([build(each) for each in POINTS])  # integers become floats beside missing ones
    assert [read_point(row) for row in frame.to_dict("records")] == POINTS


def test_a_row_that_no_sweep_names_has_no_point() -> None:
    assert read_point(build(linear(64)) | {"pattern": "profile"}) is None
    assert read_point(build(linear(64)) | {"m": None}) is None
    assert read_point(build(linear(64)) | {"epilogue": "none"}) is None  # another point than its id says


@pytest.mark.parametrize(
    ("backend", "op", "kernel", "group"),
    [
        ("numba", "conv2d", "numba.block.conv2d.rows8x2.avx512", "numba conv2d rows"),
        ("numba", "conv2d", "numba.block.conv2d.amx16x32", "numba conv2d amx"),
        ("numba", "linear", "numba.block.int8tokens16x1.avx512", "numba linear int8tokens"),
        ("numba", "linear", "numba.shflbw.few4x16.avx512", "numba linear few"),
        ("numba", "linear", None, "numba linear"),
        ("openvino", "linear", "auto", "openvino linear"),
        ("cupy", "linear", "cuda.vector_sm90+sum.sm_90a", "cupy linear vector_sm90"),
        ("cupy", "conv2d", "cuda.csr.sm_90a", "cupy conv2d csr"),
        ("someone", "linear", "kernel1", "someone linear"),
    ],
)
def test_groups_are_of_an_engine_and_a_kind_of_kernel(backend: str, op: str, kernel: str | None, group: str) -> None:
    row = {"backend": backend, "op": op, "kernel_used": kernel, "dtype_w": "float32", "dtype_out": "float32"}
    assert name_group(row) == group
    bytes_ = row | {"dtype_w": "int8"}
    assert name_group(bytes_) == group.replace(op, f"{op} int8")


@pytest.mark.parametrize(
    ("machine", "verdict"),
    [
        ((2.0, 1.95, 2.05), "SAME"),
        ((1.0, 0.99, 1.01), "SLOWER"),
        ((2.0, 1.0, 4.0), "UNCLEAR"),
        ((4.0, 3.8, 4.2), "FASTER"),
    ],
)
def test_the_machine_has_its_part(machine: tuple[float, float, float], verdict: str) -> None:
    old = old_rows(12)
    twice = changes(old, {"numba linear rows": [2.0] * 9, "torch linear": [machine[1], machine[2]]})
    torch_alone = [each for each in twice if each.key["backend"] == "torch"]
    assert find_machine_part(torch_alone) == (pytest.approx((machine[1] + machine[2]) / 2), machine[1], machine[2])
    assert find_machine_part([]) is None
    moves = judge_moves(old, twice, machine)
    assert (moves[0].verdict, moves[0].ratio) == (verdict, 2.0 / machine[0])


def test_an_old_time_that_readers_take_is_old() -> None:
    """A noisy time, or a failure, of today's kernels does not replace it; a settled one does."""
    start = pd.Timestamp("2026-11-01", tz="UTC")
    frame = pd.DataFrame([
        {"point_id": point, "op": "linear", "status": status, "started_at": start + pd.Timedelta(hours=hour)}
        for hour, (point, status) in enumerate([
            ("a", "ok"), ("a", "ok"), ("b", "ok"), ("b", "noisy"), ("c", "spike"), ("c", "ok"), ("d", "noisy"),
            ("d", "noisy"),
        ])
    ]).assign(row=range(8))  # fmt: skip
    current = np.array([False, True, False, True, True, False, False, True])
    assert select_old_times(frame, current)["row"].tolist() == [2, 5]
    models = select_old_times(frame.assign(op="model"), current)
    assert models.empty and "_current" not in models


def old_rows(count: int) -> pd.DataFrame:
    found = [build(linear(8 * m)) for m in range(1, count + 1)]
    return pd.DataFrame([*found, *(build(linear(8 * m, "torch"), "linear") for m in (1, 2)),
                         build(linear(9999), TOKENS)])  # fmt: skip


def test_a_few_points_of_each_group_are_taken() -> None:
    sample = sample_old_points(old_rows(40), seed=3)
    by_engine = pd.Series([point.backend for point in sample]).value_counts()
    assert by_engine.to_dict() == {"numba": POINTS_OF_GROUP + 1, "torch": 2}
    assert sample == sample_old_points(old_rows(40).iloc[::-1], seed=3) != sample_old_points(old_rows(40), seed=4)
    assert len({point.id for point in sample}) == len(sample)


def changes(old: pd.DataFrame, ratios: dict[str, list[float]]) -> list[Change]:
    found, left = [], {name: list(each) for name, each in ratios.items()}
    for row in old.to_dict("records"):
        if left.get(name_group(row)):
            key = {str(name): value for name, value in row.items() if name not in ("point_id", "kernel_used")}
            point = read_point(row)
            assert point is not None
            found.append(Change(key | point.key(), "SAME", 1.0, 1.0, left[name_group(row)].pop()))
    return found


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        (np.linspace(0.45, 0.6, 9), "FASTER"),
        (np.linspace(1.1, 1.9, 9), "SLOWER"),
        (np.linspace(0.97, 1.03, 9), "SAME"),
        (np.linspace(0.8, 1.2, 9), "UNCLEAR"),
        ([0.5] * 5, "UNCLEAR"),  # too few for an interval
        ([0.5] * 6, "FASTER"),
        ([1.0] * 8 + [3.0], "SAME"),  # one point that a neighbour disturbed
        ([], "UNCLEAR"),
    ],
)
def test_a_group_has_moved_if_its_median_has(ratios: Any, verdict: str) -> None:
    old = old_rows(12)
    [rows, *others] = judge_moves(old, changes(old, {"numba linear rows": list(ratios)}))
    assert (rows.group, rows.old, rows.timed, rows.verdict) == ("numba linear rows", 12, len(ratios), verdict)
    assert len(ratios) == 0 or rows.low <= rows.ratio == np.median(ratios) <= rows.high
    assert [(each.group, each.old, each.timed, each.verdict) for each in others] == [
        ("torch linear", 2, 0, "UNCLEAR"), ("numba linear tokens", 1, 0, "UNCLEAR"),
    ]  # fmt: skip
