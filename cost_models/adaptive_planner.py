"""What to measure next, where measuring everything takes too long: anchors, then what they say least about.

A curve is a layer shape, a pattern and an engine; its points differ in sparsity. Six anchors spread evenly in the
logarithm of density bring 96% of the others within 10% (224 published CPU curves). Where they do not, or where the
answer hangs on it because dense is about as fast, the curve gets more.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Hashable, Iterable, Sequence

import numpy as np
import pandas as pd

from cost_models.estimators.anchored_lookup import AnchoredLookup
from cost_models.refusals import Uncalibrated
from cost_models.rows.row_keys import CURVE, KEY, keys, sparsities, training_rows
from latbench.sweeping.sweep import FINISHED
from latbench.tables import table as tables
from latbench.workloads.points import Point

ANCHORS = 6
COVERAGES = (0.9, 0.8)  # of the intervals that tell what is known: the first for which there are enough anchors
BATCH = 24  # points before the table is looked at again: a block's worth


def anchors(points: Sequence[Point], count: int = ANCHORS) -> list[Point]:
    """Of one curve's points, `count` whose densities are spread evenly in the logarithm, the ends among them."""
    rising = sorted(points, key=lambda point: point.sparsity)
    if len(rising) <= count:
        return rising
    place = np.array([-math.log(1 - point.sparsity) for point in rising])
    chosen: list[int] = []
    for wanted in np.linspace(place[0], place[-1], count):
        free = [i for i in range(len(rising)) if i not in chosen]
        chosen.append(min(free, key=lambda i: abs(place[i] - wanted)))
    return [rising[i] for i in sorted(chosen)]


class Adaptive:
    """Asks for `points` as far as they tell something: a `choose` of latbench.sweeping.sweep.

    tolerance: how far, as a factor less 1, the 90% interval of a point (80% where anchors are few) may reach above
    its prediction without being measured; twice that far where it does not hold the time of the fastest dense layer.
    """

    def __init__(self, points: Iterable[Point], *, tolerance: float = 0.03, batch: int = BATCH) -> None:
        self.tolerance, self.batch = tolerance, batch
        self.curves: dict[tuple[Hashable, ...], list[Point]] = {}
        for point in points:
            self.curves.setdefault(_curve(point), []).append(point)
        self.anchors = [point for curve in self.curves.values() for point in anchors(curve)]
        self._asked: set[str] = set()

    def __call__(self, table: pd.DataFrame | None) -> list[Point]:
        """The anchors that the table has not, or has as failed or noisy; when they were asked for, the points that it
        says least about, one a curve; none when it says enough about all. Nothing is asked for twice.
        """
        finished = set() if table is None else set(table["point_id"][table["status"].isin(FINISHED)])
        wanted = [point for point in self.anchors if point.id not in finished | self._asked]
        if not wanted and table is not None:
            tried = self._asked | set(table["point_id"])
            others = [point for curve in self.curves.values() for point in curve if point.id not in tried]
            wanted = self._least_known(others, table)
        self._asked |= {point.id for point in wanted}
        return wanted

    def anchored(self, table: pd.DataFrame) -> bool:
        """Whether every anchor has a row."""
        return {point.id for point in self.anchors} <= set(table["point_id"])

    def _least_known(self, points: Sequence[Point], table: pd.DataFrame) -> list[Point]:
        dense = _fastest_dense(table)
        best: dict[tuple[Hashable, ...], tuple[float, Point]] = {}
        for point, low, high in _intervals(points, table):
            unsure = math.sqrt(high / low) - 1
            near = low <= dense.get(_values(point.key(), _SHAPE), math.nan) <= high
            urgency = unsure if near else unsure / 2
            if urgency > max(self.tolerance, best.get(_curve(point), (0.0, point))[0]):
                best[_curve(point)] = urgency, point
        ranked = sorted(best.values(), key=lambda scored: (-scored[0], scored[1].id))
        return [point for _, point in ranked[: self.batch]]


def _intervals(points: Sequence[Point], table: pd.DataFrame) -> list[tuple[Point, float, float]]:
    """The points between measured ones of their curve, with the seconds that the time of each lies between."""
    if not table["status"].isin(tables.TIMED).any():  # there is nothing to be unsure of
        return []
    X, seconds = training_rows(table)
    measured: dict[tuple[Hashable, ...], list[float]] = {}
    for curve, sparsity in zip(keys(X, CURVE), sparsities(X), strict=True):
        measured.setdefault(curve, []).append(sparsity)
    inside = [
        point
        for point in points
        if (known := measured.get(_curve(point))) is not None and min(known) < point.sparsity < max(known)
    ]
    if not inside:
        return []
    asked = pd.DataFrame([point.key() for point in inside], columns=KEY)
    model = AnchoredLookup().fit(X, seconds)
    for coverage in COVERAGES:
        with contextlib.suppress(Uncalibrated):
            low, high = model.predict_interval(asked, coverage)
            return list(zip(inside, low.tolist(), high.tolist(), strict=True))
    return []  # so few anchors that none could be left out


_SHAPE = [*KEY[KEY.index("op") : KEY.index("pattern")], "threads"]


def _curve(point: Point) -> tuple[Hashable, ...]:
    return _values(point.key(), CURVE)


def _values(row: dict[str, Hashable], names: Sequence[str]) -> tuple[Hashable, ...]:
    return tuple(row.get(name) for name in names)


def _fastest_dense(table: pd.DataFrame) -> dict[tuple[Hashable, ...], float]:
    """The least seconds of a dense layer of each shape."""
    rows = tables.timed(table)
    dense = rows[rows["pattern"] == "dense"]
    fastest: dict[tuple[Hashable, ...], float] = {}
    for shape, seconds in zip(keys(dense, _SHAPE), dense["median_seconds"], strict=True):
        fastest[shape] = min(seconds, fastest.get(shape, math.inf))
    return fastest
