"""Adaptive sweeps: anchors first, then what is least known, on times from a formula."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from cost_models.adaptive_planner import ANCHORS, AdaptivePlanner, select_anchors
from latbench.errors import BadData
from latbench.tables.table import read_table
from latbench.tables.writer import write_part
from latbench.workloads.points import FINE_SPARSITIES, Point, PointSetup, select_points
from sparse_kernels.patterns import NM, Dense, VectorWise
from sparse_kernels.shapes import LinearShape, Shape

Seconds = Callable[[Point], float]


def points(
    shapes: Sequence[Shape] = (LinearShape(64, 64, 8),), sparsities: Sequence[float] = FINE_SPARSITIES
) -> list[Point]:
    curves = [(Dense(), (0.0,)), (VectorWise(8), sparsities)]
    return [
        Point("a-cpu", "numba", "auto", shape, pattern, sparsity, 1)
        for shape in shapes
        for pattern, levels in curves
        for sparsity in levels
    ]


def smooth(point: Point) -> float:
    return 1e-3 * (1.05 - point.sparsity) if point.sparsity else 1.0


def stepped(point: Point) -> float:
    """Another kernel from 0.7 on."""
    return smooth(point) * (0.5 if point.sparsity > 0.7 else 1.0)


def measured(folder: Path, found: Sequence[Point], seconds: Seconds) -> pd.DataFrame:
    rows = [
        {**point.key(), "status": "ok", "samples_seconds": [seconds(point) * (1 + 1e-3 * i) for i in range(10)]}
        for point in found
    ]
    write_part(folder, rows)
    return read_table(folder)


def swept(folder: Path, choose: AdaptivePlanner, seconds: Seconds, most: int = 1000) -> list[list[Point]]:
    """What is asked for, round by round, as latbench.sweeping.sweep asks."""
    rounds: list[list[Point]] = []
    table = None
    tried: set[str] = set()
    while (fresh := [point for point in choose(table) if point.id not in tried]) and len(tried) < most:
        rounds.append(fresh)
        tried |= {point.id for point in fresh}
        table = measured(folder, fresh, seconds)
    return rounds


def test_anchors_are_spread_over_the_density_with_the_ends_among_them() -> None:
    curve = [point for point in points() if point.sparsity]
    found = [point.sparsity for point in select_anchors(curve)]
    assert len(found) == ANCHORS == len(set(found)) and found == sorted(found)
    assert (found[0], found[-1]) == (FINE_SPARSITIES[0], FINE_SPARSITIES[-1])
    steps = np.diff([-math.log(1 - sparsity) for sparsity in found])
    assert steps.max() / steps.min() < 3


def test_a_curve_of_few_points_is_anchored_by_all() -> None:
    few = points(sparsities=(0.5, 0.9))
    assert AdaptivePlanner(few).anchors == few


def test_the_anchors_come_first_for_every_curve(tmp_path: Path) -> None:
    shapes = [LinearShape(m, 64, 8) for m in (64, 128, 256)]
    choose = AdaptivePlanner(points(shapes))
    first = choose(None)
    assert len(first) == len(shapes) * (1 + ANCHORS)
    half = measured(tmp_path, first[:8], smooth)
    assert AdaptivePlanner(points(shapes))(half) == first[8:]


def test_an_anchor_that_is_noisy_is_asked_for_again_once_a_run(tmp_path: Path) -> None:
    every = AdaptivePlanner(points())(None)
    rows = [{**p.key(), "status": "ok", "samples_seconds": [smooth(p)] * 10} for p in every]
    rows[2]["status"] = "noisy"
    write_part(tmp_path, rows)
    choose, table = AdaptivePlanner(points()), read_table(tmp_path)
    assert choose(table) == [every[2]]
    assert every[2] not in choose(table)


def test_what_anchors_predict_well_is_not_measured(tmp_path: Path) -> None:
    rounds = swept(tmp_path, AdaptivePlanner(points([LinearShape(m, 64, 8) for m in (64, 128, 256, 512)])), smooth)
    assert len(rounds) == 1


def test_a_step_is_looked_at_more_closely(tmp_path: Path) -> None:
    shapes = [LinearShape(m, 64, 8) for m in (64, 128, 256, 512)]

    def seconds(point: Point) -> float:
        return stepped(point) if point.shape == shapes[0] else smooth(point)

    rounds = swept(tmp_path, AdaptivePlanner(points(shapes)), seconds)
    asked = [point for later in rounds[1:] for point in later]
    assert asked and sum(point.shape == shapes[0] for point in asked) > len(asked) / 2
    assert all(len({point.shape for point in later}) == len(later) for later in rounds[1:])  # one a curve


def test_break_even_is_looked_at_more_closely_than_the_rest(tmp_path: Path) -> None:
    shapes = [LinearShape(m, 64, 8) for m in (64, 128, 256, 512)]

    def wavy(point: Point) -> float:
        """As fast as dense at a sparsity of about 0.75, in the first shape alone."""
        if not point.sparsity:
            return 3e-4 if point.shape == shapes[0] else 1.0
        return smooth(point) * (1 + 0.1 * math.sin(40 * point.sparsity))

    rounds = swept(tmp_path, AdaptivePlanner(points(shapes), tolerance=0.1), wavy)
    asked = [point for later in rounds[1:] for point in later]
    assert asked and asked[0].shape == shapes[0] and 0.65 <= asked[0].sparsity <= 0.85


def test_it_ends_and_never_asks_for_what_was_tried(tmp_path: Path) -> None:
    def wild(point: Point) -> float:
        return 1e-3 * (2 + math.sin(1e3 * point.sparsity))

    every = points()
    rounds = swept(tmp_path, AdaptivePlanner(every, tolerance=1e-9), wild)
    asked = [point for each in rounds for point in each]
    assert len(asked) == len(set(asked)) <= len(every)


def test_a_table_without_times_ends_it(tmp_path: Path) -> None:
    choose = AdaptivePlanner(points())
    write_part(tmp_path, [{**point.key(), "status": "error"} for point in choose.anchors])
    assert choose(read_table(tmp_path)) == choose.anchors  # errors may be gone
    assert choose(read_table(tmp_path)) == []


def test_patterns_of_one_sparsity_have_one_anchor() -> None:
    two_of_four = Point("a-cpu", "numba", "auto", LinearShape(8, 8, 8), NM(2, 4), 0.5, 1)
    assert AdaptivePlanner([two_of_four]).anchors == [two_of_four]


def test_the_command_lines_points_are_anchored_by_six_a_curve() -> None:
    setup = PointSetup("a-cpu", threads=1, backends=["numba"])
    every = select_points(["transformer-base"], ["vector:32"], [], setup, default_sparsities=FINE_SPARSITIES)
    curves = len({point.shape for point in every})
    assert len(every) == curves * len(FINE_SPARSITIES) and len(AdaptivePlanner(every).anchors) == curves * ANCHORS


def test_a_row_without_a_sparsity_is_refused_in_a_sentence(tmp_path: Path) -> None:
    found = points()
    choose = AdaptivePlanner(found)
    table = measured(tmp_path, choose(None), smooth)
    table.loc[table["pattern"] != "dense", "sparsity_target"] = None
    with pytest.raises(
        BadData, match=r"must lie in \[0, 1\], and it is nan in 6 rows: `latbench validate` names them"
    ):
        choose(table)


def test_a_row_that_cannot_be_a_layer_is_refused_in_a_sentence(tmp_path: Path) -> None:
    choose = AdaptivePlanner(points())
    table = measured(tmp_path, choose(None), smooth)
    table.loc[table.index[0], "m"] = 0
    with pytest.raises(BadData, match="layers that cannot be, such as of m 0: `latbench validate` names them"):
        choose(table)
