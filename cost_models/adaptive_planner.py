"""Adaptive choice of the points to measure if all points take too long: anchors first, then the least certain points.

A curve is a layer shape, a pattern and an engine; its points differ in sparsity. Six anchors, spread evenly in the
logarithm of the density, bring 96% of the other points within 10% (224 published CPU curves). A curve gets more
points if its interval is wide, or if dense is about as fast, so that the comparison depends on them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Hashable, Iterable, Sequence

import numpy as np
import pandas as pd

from cost_models.estimators.anchored_lookup import AnchoredLookup
from cost_models.refusals import Uncalibrated
from cost_models.rows.row_keys import CURVE, KEY, extract_keys, extract_sparsities
from cost_models.rows.training_rows import select_training_rows
from latbench.tables.schema import FINISHED, TIMED
from latbench.tables.table import select_timed
from latbench.workloads.points import Point

ANCHORS = 6
COVERAGES = (0.9, 0.8)  # of the intervals: the first for which there are enough anchors
BATCH = 24  # points to measure before the table is read again, about a block


def select_anchors(points: Sequence[Point], count: int = ANCHORS) -> list[Point]:
    """Select `count` points of one curve, spread evenly in the logarithm of the density, with both ends."""
    rising = sorted(points, key=lambda point: point.sparsity)
    if len(rising) <= count:
        return rising
    axis = np.array([-math.log(1 - point.sparsity) for point in rising])
    selected: list[int] = []
    for target in np.linspace(axis[0], axis[-1], count):
        free = [i for i in range(len(rising)) if i not in selected]
        selected.append(min(free, key=lambda i: abs(axis[i] - target)))
    return [rising[i] for i in sorted(selected)]


class AdaptivePlanner:
    """Planner of a sweep that measures only the points whose time is uncertain.

    A sweep calls it with the table so far, until it returns no more points.

    Parameters
    ----------
    points : iterable of Point
        All points that may be measured.
    tolerance : float
        How far the 90% interval of a point (80% if there are few anchors) may reach above its prediction, as a share
        of it, for the point not to be measured. Twice as far if the interval does not hold the time of the fastest
        dense layer.
    batch : int
        The most points to return at once.

    Attributes
    ----------
    anchors : list of Point
        The points that are always measured.
    """

    def __init__(self, points: Iterable[Point], *, tolerance: float = 0.03, batch: int = BATCH) -> None:
        self.tolerance, self.batch = tolerance, batch
        self.curves: dict[tuple[Hashable, ...], list[Point]] = {}
        for point in points:
            self.curves.setdefault(_get_curve(point), []).append(point)
        self.anchors = [point for curve in self.curves.values() for point in select_anchors(curve)]
        self._asked: set[str] = set()

    def __call__(self, table: pd.DataFrame | None) -> list[Point]:
        """Return the points to measure next, without those that were returned before.

        Parameters
        ----------
        table : DataFrame or None
            The rows so far; None before the first.

        Returns
        -------
        list of Point
            The anchors that have no row, or a failed or noisy one. Once all were asked for, the least certain points,
            at most one a curve. Empty if every point is certain enough.
        """
        finished = set() if table is None else set(table["point_id"][table["status"].isin(FINISHED)])
        wanted = [point for point in self.anchors if point.id not in finished | self._asked]
        if not wanted and table is not None:
            tried = self._asked | set(table["point_id"])
            others = [point for curve in self.curves.values() for point in curve if point.id not in tried]
            wanted = self._find_least_certain(others, table)
        self._asked |= {point.id for point in wanted}
        return wanted

    def has_all_anchors(self, table: pd.DataFrame) -> bool:
        """Return whether every anchor has a row in the table."""
        return {point.id for point in self.anchors} <= set(table["point_id"])

    def _find_least_certain(self, points: Sequence[Point], table: pd.DataFrame) -> list[Point]:
        dense = _find_fastest_dense(table)
        best: dict[tuple[Hashable, ...], tuple[float, Point]] = {}
        for point, low, high in _predict_intervals(points, table):
            uncertainty = math.sqrt(high / low) - 1
            near_dense = low <= dense.get(_get_values(point.key(), _SHAPE), math.nan) <= high
            urgency = uncertainty if near_dense else uncertainty / 2
            if urgency > max(self.tolerance, best.get(_get_curve(point), (0.0, point))[0]):
                best[_get_curve(point)] = urgency, point
        ranked = sorted(best.values(), key=lambda scored: (-scored[0], scored[1].id))
        return [point for _, point in ranked[: self.batch]]


def _predict_intervals(points: Sequence[Point], table: pd.DataFrame) -> list[tuple[Point, float, float]]:
    """Return the points between measured ones of their curve, each with an interval of its seconds."""
    if not table["status"].isin(TIMED).any():
        return []
    X, seconds = select_training_rows(table)
    measured: dict[tuple[Hashable, ...], list[float]] = {}
    for curve, sparsity in zip(extract_keys(X, CURVE), extract_sparsities(X), strict=True):
        measured.setdefault(curve, []).append(sparsity)
    inside = [
        point
        for point in points
        if (known := measured.get(_get_curve(point))) is not None and min(known) < point.sparsity < max(known)
    ]
    if not inside:
        return []
    rows = pd.DataFrame([point.key() for point in inside], columns=KEY)
    model = AnchoredLookup().fit(X, seconds)
    for coverage in COVERAGES:
        with contextlib.suppress(Uncalibrated):
            low, high = model.predict_interval(rows, coverage)
            return list(zip(inside, low.tolist(), high.tolist(), strict=True))
    return []  # too few anchors to leave one out


_SHAPE = [*KEY[KEY.index("op") : KEY.index("pattern")], "threads"]


def _get_curve(point: Point) -> tuple[Hashable, ...]:
    return _get_values(point.key(), CURVE)


def _get_values(row: dict[str, Hashable], names: Sequence[str]) -> tuple[Hashable, ...]:
    return tuple(row.get(name) for name in names)


def _find_fastest_dense(table: pd.DataFrame) -> dict[tuple[Hashable, ...], float]:
    """Return the least seconds of a dense layer of each shape."""
    rows = select_timed(table)
    dense = rows[rows["pattern"] == "dense"]
    fastest: dict[tuple[Hashable, ...], float] = {}
    for shape, seconds in zip(extract_keys(dense, _SHAPE), dense["median_seconds"], strict=True):
        fastest[shape] = min(seconds, fastest.get(shape, math.inf))
    return fastest
