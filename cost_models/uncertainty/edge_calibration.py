"""Calibration of intervals beyond the measured range: how wrong a model is for smaller or larger shapes.

Shapes are ordered by work. On either side the outermost one, two or three fifths of the shapes are left out. These
are nested rings around a core. A model of the core predicts each ring. The growth of its errors with the distance
gives a model of all shapes its interval beyond the edge; the worst ring decides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import pandas as pd

from cost_models.features.layer_work import SIZES
from cost_models.features.measured_ranges import SIDES, count_octaves_outside, find_ranges, select_outer_fifths
from cost_models.refusals import Uncalibrated
from cost_models.rows.row_keys import FloatArray, RowMask
from cost_models.rows.shape_groups import Groups, group_by_shape
from cost_models.uncertainty.conformal import compute_conformal_quantile, fit_error_growth

RINGS = 3


@dataclass(frozen=True)
class Ring:
    """Errors of a core's model on the rows of a ring around it.

    Attributes
    ----------
    errors : ndarray of shape (rows,)
        |log(predicted / measured)|.
    octaves : ndarray of shape (rows,)
        By how many octaves the rows lie beyond the core.
    shapes : ndarray of int, shape (rows,)
        Number of each row's layer shape.
    work_octaves : float
        The most octaves by which the work of a row lies beyond the core's.
    """

    errors: FloatArray
    octaves: FloatArray
    shapes: Groups
    work_octaves: float


@dataclass(frozen=True)
class Edge:
    """One side of the measured range: its rings and the line of typical errors beyond it.

    Attributes
    ----------
    rings : tuple of Ring
        From one fifth of the shapes to three.
    at_edge, per_octave : float
        Typical error at the edge, and its growth per octave, in log seconds.
    """

    rings: tuple[Ring, ...]
    at_edge: float
    per_octave: float

    @classmethod
    def from_rings(cls, rings: Sequence[Ring]) -> Self:
        """Return the edge whose typical errors are fitted to the rings."""
        octaves = np.concatenate([np.empty(0), *(ring.octaves for ring in rings)])
        errors = np.concatenate([np.empty(0), *(ring.errors for ring in rings)])
        return cls(tuple(rings), *fit_error_growth(octaves, errors))

    @property
    def reach(self) -> float:
        """The most octaves beyond a core's work at which a model was tested; 0 if nothing could be left out."""
        return max((ring.work_octaves for ring in self.rings), default=0.0)

    def half_width(self, octaves: FloatArray, coverage: float) -> FloatArray:
        """Return half of the interval at so many octaves beyond the edge, in log seconds.

        For each ring this finds the multiple of the typical error that would have covered the share `coverage` of its
        shapes. The largest multiple counts.

        Parameters
        ----------
        octaves : ndarray of shape (rows,)
            Distance of each row beyond the edge.
        coverage : float
            Coverage of the interval, in (0, 1).

        Returns
        -------
        ndarray of shape (rows,)
            Half-widths in log seconds.

        Raises
        ------
        Uncalibrated
            No ring has enough shapes for this coverage.
        """
        multiple = self._find_multiple(coverage)
        if multiple is None:
            most = max((len(set(ring.shapes)) for ring in self.rings), default=0)
            raise Uncalibrated(
                f"beyond the measured range an interval of {coverage * 100:g}% needs more than the {most} shapes "
                "that could be left out at this edge: measure more, or ask for a lower coverage"
            )
        return multiple * self._compute_typical_error(octaves)

    def compute_widening(self, octaves: FloatArray, coverage: float) -> FloatArray:
        """Return by how much half of an interval grows over so many octaves beyond the edge, in log seconds, (rows,).

        It is 0 where errors did not grow, and where no ring has enough shapes for this coverage.
        """
        return (self._find_multiple(coverage) or 0.0) * self.per_octave * octaves

    def _find_multiple(self, coverage: float) -> float | None:
        """Return the multiple of the typical error that covers the worst ring; None where none has enough shapes."""
        multiples = []
        for ring in self.rings:
            scores = ring.errors / self._compute_typical_error(ring.octaves)
            with contextlib.suppress(Uncalibrated):
                multiples.append(compute_conformal_quantile(scores, coverage, groups=ring.shapes))
        return max(multiples, default=None)

    def _compute_typical_error(self, octaves: FloatArray) -> FloatArray:
        return self.at_edge + self.per_octave * octaves


def calibrate_edges(X: pd.DataFrame, predict_errors: Callable[[RowMask], FloatArray]) -> dict[str, Edge]:
    """Calibrate the edge of X on each of SIDES.

    Parameters
    ----------
    X : DataFrame of shape (rows, columns)
        The training rows.
    predict_errors : callable
        Takes a mask (rows,) of rows to hold out. Returns log(predicted / measured) of these rows, in order, by a
        model of the other rows.

    Returns
    -------
    dict of str to Edge
        One edge for each of SIDES; without rings for fewer than five shapes.
    """
    shapes = group_by_shape(X)
    rings: dict[str, list[Ring]] = {side: [] for side in SIDES}
    for count in range(1, RINGS + 1):
        for side, outside in select_outer_fifths(X, count).items():
            if outside.any():
                core = find_ranges(X[~outside], SIZES)
                octaves = count_octaves_outside(X[outside], core)[side]
                work_octaves = count_octaves_outside(X[outside], {"flop": core["flop"]})[side]
                errors = np.abs(predict_errors(outside))
                rings[side].append(Ring(errors, octaves, shapes[outside], float(work_octaves.max())))
    return {side: Edge.from_rings(found) for side, found in rings.items()}
