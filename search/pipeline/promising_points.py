"""Choice of the points that a search needs: each pattern at one sparsity first, then those that may be chosen.

A search chooses among latbench's own kernels, so no other engine is timed here; whole models are compared with every
dense engine later. A pattern is not measured further where it is far slower than dense. Nor is it where another
pattern, which is at least as free, is as fast. Each precision is judged by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd

from latbench.base.engine_registry import NOT_IN_MODELS
from latbench.tables.table import select_timed
from latbench.workloads.points import Point
from search.problem.layers import is_at_least_as_free
from sparse_kernels.patterns import Dense, Pattern
from sparse_kernels.shapes import Shape

FIRST_SPARSITY = 0.75

SPARSITIES = (0.5, FIRST_SPARSITY, 0.9, 0.95)
"""Sparsities of a pattern that is measured further; a cost model interpolates between them."""

AS_FAST = 1.1
"""A pattern up to this many times as slow as another counts as equally fast."""

TOO_SLOW = 1.6
"""A pattern this many times as slow as dense at FIRST_SPARSITY hardly pays at any sparsity."""


class PromisingPoints:
    """Chooser of points for a sweep, which calls it with the table so far until it returns none.

    Parameters
    ----------
    points
        All points that may be measured, of one engine.
    """

    def __init__(self, points: Iterable[Point]) -> None:
        self._points = [point for point in points if point.kernel not in NOT_IN_MODELS]
        self._calls = 0

    def __call__(self, table: pd.DataFrame | None) -> list[Point]:
        """Return the first points, then those of the promising patterns, then none.

        Parameters
        ----------
        table
            The rows so far; None before the first.
        """
        self._calls += 1
        if self._calls == 1:
            return [point for point in self._points if self._is_first(point)]
        if self._calls > 2 or table is None:
            return []
        rows = select_timed(table)
        seconds = dict(zip(rows["point_id"], rows["median_seconds"], strict=True))
        return [
            point
            for shape, precision in dict.fromkeys((point.shape, point.dtype_a) for point in self._points)
            for point in self._select_promising(shape, precision, seconds)
        ]

    def _is_first(self, point: Point) -> bool:
        """Return whether a point is the first of its shape and pattern: at FIRST_SPARSITY, or the nearest one."""
        own = [it.sparsity for it in self._points if _key(it) == _key(point)]
        return point.sparsity == min(own, key=lambda sparsity: abs(sparsity - FIRST_SPARSITY))

    def _select_promising(self, shape: Shape, precision: str, seconds: dict[str, float]) -> list[Point]:
        """Return the points of the promising patterns of a shape, those measured first among them."""
        own = [point for point in self._points if (point.shape, point.dtype_a) == (shape, precision)]
        first = [point for point in own if self._is_first(point) and point.id in seconds]
        dense = min((seconds[point.id] for point in first if isinstance(point.pattern, Dense)), default=None)
        if dense is None:
            return own
        promising = {
            point.pattern
            for point in first
            if seconds[point.id] <= TOO_SLOW * dense and not _is_dominated(point, first, seconds)
        }
        return [point for point in own if point.pattern in promising]


def _key(point: Point) -> tuple[Shape, Pattern, str]:
    return point.shape, point.pattern, point.dtype_a


def _is_dominated(point: Point, others: Sequence[Point], seconds: dict[str, float]) -> bool:
    """Return whether another pattern at the same sparsity is at least as free, and as fast."""
    return any(
        other.pattern != point.pattern
        and other.sparsity == point.sparsity
        and is_at_least_as_free(other.pattern, point.pattern)
        and seconds[other.id] <= AS_FAST * seconds[point.id]
        for other in others
    )
