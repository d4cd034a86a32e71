"""Look-up of measured curves: interpolates over sparsity for the measured shapes, and guesses no other shape.

The rows of one curve (equal keys but for the sparsity) are its anchors. Between them the logarithm of the seconds is
interpolated over the square root of the density by PCHIP (Fritsch and Carlson 1980). PCHIP overshoots no anchor and
does not force times to fall: measured times do rise where a kernel switches. Dense rows anchor no sparse curve. On
published CPU timings (224 curves, six anchors spread evenly in the logarithm of density) 97% of the held-out
sparsities come within 10%. With the dense time as one of the six it is 93%, so it is left out.

Shapes, patterns, threads and machines without measurements are refused.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from statistics import NormalDist
from typing import Self

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.interpolate import PchipInterpolator
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from cost_models.estimators.scored_regressor import ScoredRegressor
from cost_models.refusals import Ambiguous, Unanchored, Uncalibrated
from cost_models.rows.row_keys import CURVE, FloatArray, RowMask, describe_point, extract_keys, extract_sparsities
from cost_models.rows.training_rows import check_seconds
from cost_models.uncertainty.conformal import compute_conformal_quantile, fit_error_growth
from cost_models.uncertainty.timing_noise import estimate_noise

_LEAST_ERROR = 1e-6  # no clock is better: errors of zero would make every interval empty
_NEIGHBOURS = 2  # anchors on either side that set an interpolated value


@dataclass(frozen=True)
class MeasuredCurve:
    """One measured curve.

    Attributes
    ----------
    key : tuple
        Values of the columns that identify the curve.
    sparsity, log_seconds : ndarray of shape (anchors,)
        Rising sparsities, and the logarithm of the seconds at each.
    noise : ndarray of shape (anchors,)
        Standard deviation of each time in log seconds, or NaN.
    """

    key: tuple[Hashable, ...]
    sparsity: FloatArray
    log_seconds: FloatArray
    noise: FloatArray


@dataclass(frozen=True)
class LeaveOneOutErrors:
    """Errors at left-out inner anchors, for curves that are measured at the same sparsities.

    Attributes
    ----------
    errors : ndarray of shape (inner, curves)
        Absolute error of the interpolation at each inner anchor by the other anchors, in log seconds.
    distances : ndarray of shape (inner,)
        Distance of each inner anchor to the nearest other anchor.
    without : list of (ndarray of shape (inner - 1, curves), ndarray of shape (inner - 1,))
        For each inner anchor, the errors and distances of the other inner anchors if it was never measured.
    """

    errors: FloatArray
    distances: FloatArray
    without: list[tuple[FloatArray, FloatArray]]

    @classmethod
    def from_curves(cls, sparsity: FloatArray, log_seconds: FloatArray) -> Self:
        """Leave each inner anchor out, of rising sparsities (anchors,) and log seconds (anchors, curves)."""
        x, inner = _convert_to_axis(sparsity), range(1, len(sparsity) - 1)
        errors = _leave_out(x, log_seconds, inner)
        without = []
        for i in inner:
            fewer, values = np.delete(x, i), np.delete(log_seconds, i, axis=0)
            # Only the errors of the nearest anchors change.
            again = range(max(1, i - _NEIGHBOURS), min(len(fewer) - 1, i + _NEIGHBOURS))
            others = np.delete(errors, i - 1, axis=0)
            others[again.start - 1 : again.stop - 1] = _leave_out(fewer, values, again)
            without.append((others, _compute_distances(fewer)))
        return cls(errors, _compute_distances(x), without)


class AnchoredLookup(ScoredRegressor, BaseEstimator):
    """Measured curves, interpolated over sparsity. Rows without a measured curve are refused.

    Parameters
    ----------
    allow_extrapolation : bool
        Whether a sparsity outside a curve's measured range is predicted, on the straight line through the nearest two
        anchors; otherwise it is refused.

    Attributes
    ----------
    columns_ : list of str
        The key columns that identify a curve.
    curves_ : dict of tuple to curve
        The measured curves by key.
    scatter_ : tuple of float
        Typical error at distance 0 from an anchor, and its growth with the distance.
    usual_distance_ : float
        The median distance of left-out anchors.
    behaviour_ : dict of tuple to float
        By key, the error of a curve relative to the typical one.
    worst_behaviour_ : float
        The largest of these, for a curve of two anchors.
    scores_, score_curves_ : ndarray of shape (scores,)
        Errors of left-out anchors relative to the expected ones, and the number of each score's curve.
    """

    def __init__(self, allow_extrapolation: bool = False) -> None:
        self.allow_extrapolation = allow_extrapolation

    def fit(self, X: pd.DataFrame, y: npt.ArrayLike) -> Self:
        """Take the rows of X as anchors. Rows with equal keys are averaged.

        Parameters
        ----------
        X : DataFrame of shape (rows, columns)
            Columns of `latbench.tables.schema.KEY_COLUMNS`, one row a point; the noise of each time comes from its
            other columns (`cost_models.uncertainty.timing_noise`).
        y : array_like of shape (rows,)
            Measured seconds.

        Returns
        -------
        self

        Raises
        ------
        ValueError
            A time is not positive and finite.
        """
        log_seconds = np.log(check_seconds(X, y))
        self.columns_ = [name for name in CURVE if name in X.columns]
        noise = estimate_noise(X)
        anchors: dict[tuple[Hashable, ...], dict[float, list[tuple[float, float]]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for key, sparsity, value, deviation in zip(
            extract_keys(X, self.columns_), extract_sparsities(X), log_seconds, noise, strict=True
        ):
            anchors[key][float(sparsity)].append((float(value), float(deviation)))
        self.curves_ = {key: _build_curve(key, points) for key, points in anchors.items()}
        self._calibrate()
        return self

    def _calibrate(self) -> None:
        """Leave each inner anchor out, and score its error relative to the expected one.

        The expected error is the typical one at that distance from an anchor, times how the curve behaves elsewhere.
        The left-out anchor takes no part in either interpolation. Beside an outlier its neighbours have large errors
        too: judged with the outlier in place, a curve would seem to have announced the error.
        """
        groups: dict[tuple[float, ...], list[MeasuredCurve]] = defaultdict(list)
        for curve in self.curves_.values():
            if len(curve.sparsity) > 2:
                groups[tuple(curve.sparsity)].append(curve)
        left_out = [
            (
                curves,
                LeaveOneOutErrors.from_curves(
                    np.array(sparsity), np.stack([curve.log_seconds for curve in curves], axis=1)
                ),
            )
            for sparsity, curves in groups.items()
        ]
        distances = _concatenate(np.repeat(found.distances, len(curves)) for curves, found in left_out)
        errors = _concatenate(found.errors.ravel() for _, found in left_out)
        self.usual_distance_ = float(np.median(distances)) if distances.size else 0.0
        self.scatter_ = fit_error_growth(
            np.maximum(distances, self.usual_distance_), np.maximum(errors, _LEAST_ERROR)
        )
        scores: list[FloatArray] = []
        self.behaviour_: dict[tuple[Hashable, ...], float] = {}
        for curves, found in left_out:
            elsewhere = np.stack([self._compute_behaviour(*others) for others in found.without])
            expected = self._compute_typical_error(found.distances)[:, None] * elsewhere
            scores.append((found.errors / expected).T)
            behaviour = self._compute_behaviour(found.errors, found.distances)
            self.behaviour_ |= {curve.key: float(value) for curve, value in zip(curves, behaviour, strict=True)}
        # A curve of two anchors has no inner one to leave out: it counts as the worst of the others.
        self.worst_behaviour_ = max(self.behaviour_.values(), default=1.0)
        self.scores_ = _concatenate(group.ravel() for group in scores)
        per_curve = [group.shape[1] for group in scores for _ in group]
        self.score_curves_ = np.repeat(np.arange(len(per_curve)), per_curve)

    def _compute_typical_error(self, distances: FloatArray) -> FloatArray:
        """Return the typical error at these distances from an anchor; less than the usual distance counts as that."""
        near, further = self.scatter_
        typical: FloatArray = near + further * np.maximum(distances, self.usual_distance_)
        return typical

    def _compute_behaviour(self, errors: FloatArray, distances: FloatArray) -> FloatArray:
        """Return each curve's mean error relative to the typical one, (curves,), with one typical anchor added."""
        ratio = errors / self._compute_typical_error(distances)[:, None]
        return np.asarray((1 + ratio.sum(axis=0)) / (1 + len(ratio)), dtype=np.float64)

    def predict(self, X: pd.DataFrame) -> FloatArray:
        """Predict the seconds of every row of X.

        X may lack a key column if that leaves one matching curve a row.

        Parameters
        ----------
        X : DataFrame of shape (rows, columns)
            Columns of `latbench.tables.schema.KEY_COLUMNS`, one row a point.

        Returns
        -------
        ndarray of shape (rows,)
            Seconds.

        Raises
        ------
        Unanchored
            A row matches no measured curve or several, or its sparsity lies outside the curve's measured range.
        """
        seconds = np.empty(len(X))
        for curve, rows, sparsity in self._group_by_curve(X):
            seconds[rows] = np.exp(self._interpolate(curve, sparsity))
        return seconds

    def interpolate_some(self, most: int) -> FloatArray:
        """Return the seconds halfway between all neighbouring anchors of `most` curves at most, from all over."""
        curves = [curve for curve in self.curves_.values() if len(curve.sparsity) > 1]
        chosen = (
            [curves[i] for i in np.unique(np.linspace(0, max(len(curves) - 1, 0), most).astype(int))]
            if curves
            else []
        )
        return np.exp(
            _concatenate(self._interpolate(each, (each.sparsity[1:] + each.sparsity[:-1]) / 2) for each in chosen)
        )

    def predict_interval(self, X: pd.DataFrame, coverage: float = 0.9) -> tuple[FloatArray, FloatArray]:
        """Predict an interval for the time of every row of X.

        At a measured sparsity the interval comes from the noise of the measurement, taken as normal. It holds the
        true time, the mean of all measurements. Between measured sparsities it is calibrated on left-out anchors,
        curve by curve if there are enough. It holds a new measurement, with its noise. Beyond the measured range, if
        that is allowed, it spans the straight line and the last anchor, and has no known coverage.

        Parameters
        ----------
        X : DataFrame of shape (rows, columns)
            Columns of `latbench.tables.schema.KEY_COLUMNS`, one row a point.
        coverage : float
            Probability that the interval holds the time, in (0, 1).

        Returns
        -------
        low, high : ndarray of shape (rows,)
            Seconds.

        Raises
        ------
        Unanchored
            As `predict`.
        Uncalibrated
            Too few anchors could be left out for this coverage.
        """
        low, high = self.find_intervals(X, coverage)
        if np.isnan(low).any():
            self._compute_multiple(coverage)  # says what is missing
        return low, high

    def find_intervals(self, X: pd.DataFrame, coverage: float) -> tuple[FloatArray, FloatArray]:
        """Return the intervals of `predict_interval`, with NaN where too few anchors could be left out.

        Parameters
        ----------
        X : DataFrame of shape (rows, columns)
            Columns of `latbench.tables.schema.KEY_COLUMNS`, one row a point.
        coverage : float
            Probability that the interval holds the time, in (0, 1).

        Returns
        -------
        low, high : ndarray of shape (rows,)
            Seconds.

        Raises
        ------
        Unanchored
            As `predict`.
        """
        low, high = np.empty(len(X)), np.empty(len(X))
        multiple = cache(partial(self._find_multiple, coverage))
        for curve, rows, sparsity in self._group_by_curve(X):
            value = self._interpolate(curve, sparsity)
            nearest = curve.log_seconds[np.abs(sparsity[:, None] - curve.sparsity).argmin(axis=1)]
            outside = (sparsity < curve.sparsity[0]) | (sparsity > curve.sparsity[-1])
            half = self._half_width(curve, sparsity, coverage, multiple)
            low[rows] = np.exp(np.where(outside, np.minimum(value, nearest), value) - half)
            high[rows] = np.exp(np.where(outside, np.maximum(value, nearest), value) + half)
        return low, high

    def _half_width(
        self, curve: MeasuredCurve, sparsity: FloatArray, coverage: float, multiple: Callable[[], float]
    ) -> FloatArray:
        noise = np.full(len(sparsity), np.nan)
        row, anchor = np.nonzero(sparsity[:, None] == curve.sparsity)
        noise[row] = curve.noise[anchor] * NormalDist().inv_cdf(0.5 + coverage / 2)
        if not np.isnan(noise).any():
            return noise
        behaviour = self.behaviour_.get(curve.key, self.worst_behaviour_)
        distance = np.abs(_convert_to_axis(sparsity)[:, None] - _convert_to_axis(curve.sparsity)).min(axis=1)
        return np.where(np.isnan(noise), multiple() * behaviour * self._compute_typical_error(distance), noise)

    def _find_multiple(self, coverage: float) -> float:
        """Return the multiple of the expected error, or NaN where it is not known."""
        try:
            return self._compute_multiple(coverage)
        except Uncalibrated:
            return math.nan

    def _compute_multiple(self, coverage: float) -> float:
        """Return the multiple of the expected error that holds a new one with this probability."""
        try:
            return compute_conformal_quantile(self.scores_, coverage, groups=self.score_curves_)
        except Uncalibrated:  # too few curves: take all anchors as exchangeable, whichever curve they are of
            return compute_conformal_quantile(self.scores_, coverage)

    def covers(self, X: pd.DataFrame) -> RowMask:
        """Return whether each row of X, (rows,), lies on exactly one measured curve, between measured sparsities."""
        covered = np.zeros(len(X), bool)
        for _, curves, rows, sparsity in self._match_curves(X):
            if len(curves) == 1:
                covered[rows] = (sparsity >= curves[0].sparsity[0]) & (sparsity <= curves[0].sparsity[-1])
        return covered

    def _group_by_curve(self, X: pd.DataFrame) -> list[tuple[MeasuredCurve, npt.NDArray[np.int64], FloatArray]]:
        """Group the rows of X by curve: the curve, row numbers, sparsities. Raise Unanchored for none or several."""
        return [
            (self._check_match(key, curves), rows, sparsity) for key, curves, rows, sparsity in self._match_curves(X)
        ]

    def _match_curves(
        self, X: pd.DataFrame
    ) -> list[tuple[dict[str, Hashable], list[MeasuredCurve], npt.NDArray[np.int64], FloatArray]]:
        """Group the rows of X by key: the key, the curves that match it, row numbers, sparsities."""
        check_is_fitted(self)
        columns = [name for name in self.columns_ if name in X.columns]
        indices = [self.columns_.index(name) for name in columns]
        matching: dict[tuple[Hashable, ...], list[MeasuredCurve]] = defaultdict(list)
        for key, curve in self.curves_.items():
            matching[tuple(key[index] for index in indices)].append(curve)
        rows: dict[tuple[Hashable, ...], list[int]] = defaultdict(list)
        for number, key in enumerate(extract_keys(X, columns)):
            rows[key].append(number)
        sparsity = extract_sparsities(X)
        groups = []
        for key, numbers in rows.items():
            index = np.array(numbers)
            groups.append((dict(zip(columns, key, strict=True)), matching.get(key, []), index, sparsity[index]))
        return groups

    def _check_match(self, key: dict[str, Hashable], curves: list[MeasuredCurve]) -> MeasuredCurve:
        """Return the only curve; raise Unanchored, with the nearest curve or the ambiguous columns, otherwise."""
        if len(curves) == 1:
            return curves[0]
        if curves:
            known = {name: {curve.key[i] for curve in curves} for i, name in enumerate(self.columns_)}
            open_columns = {name: values for name, values in known.items() if len(values) > 1}
            which = "; ".join(f"{name} {_format_values(values)}" for name, values in open_columns.items())
            ways = [{name: curve.key[self.columns_.index(name)] for name in open_columns} for curve in curves]
            raise Ambiguous(f"{describe_point(key)} was measured in several ways: say which {which}", ways)
        measured = [dict(zip(self.columns_, values, strict=True)) for values in self.curves_]
        nearest = min(measured, key=lambda curve: _compute_key_distance(key, curve))
        differ = [f"{name} is {nearest[name]}, not {key[name]}" for name in key if nearest[name] != key[name]]
        raise Unanchored(
            f"nothing measured anchors {describe_point(key)}: in the nearest measured curve, "
            f"{describe_point(nearest)}, {'; '.join(differ)}; measure it"
        )

    def _interpolate(self, curve: MeasuredCurve, sparsity: FloatArray) -> FloatArray:
        """Return the logarithm of the curve's seconds at each sparsity."""
        outside = (sparsity < curve.sparsity[0]) | (sparsity > curve.sparsity[-1])
        if outside.any() and not self.allow_extrapolation:
            measured = " to ".join(f"{value:g}" for value in dict.fromkeys((curve.sparsity[0], curve.sparsity[-1])))
            name = describe_point(dict(zip(self.columns_, curve.key, strict=True)))
            raise Unanchored(
                f"{name} was measured at a sparsity of {measured}; {sparsity[outside][0]:g} lies outside: "
                "measure it, or allow extrapolation"
            )
        return _interpolate_curves(_convert_to_axis(curve.sparsity), curve.log_seconds, _convert_to_axis(sparsity))


def _build_curve(key: tuple[Hashable, ...], points: dict[float, list[tuple[float, float]]]) -> MeasuredCurve:
    """Return the curve of the (log seconds, noise) at each sparsity; several points of one sparsity are averaged."""
    ordered = sorted(points)
    values = np.array([np.mean([value for value, _ in points[sparsity]]) for sparsity in ordered])
    noise = np.array([np.mean([deviation for _, deviation in points[sparsity]]) for sparsity in ordered])
    return MeasuredCurve(key, np.array(ordered), values, noise)


def _convert_to_axis(sparsity: FloatArray) -> FloatArray:
    """Return the position on the axis of interpolation: minus the square root of the density, which rises."""
    axis: FloatArray = -np.sqrt(1 - sparsity)
    return axis


def _interpolate_curves(x: FloatArray, values: FloatArray, at: FloatArray) -> FloatArray:
    """Interpolate by PCHIP, and on straight lines beyond the ends; a single anchor gives a constant.

    `values` is (len(x),) or (len(x), curves); the result is (len(at),) or (len(at), curves).
    """
    if len(x) == 1:
        return np.repeat(values[:1], len(at), axis=0)
    inside = PchipInterpolator(x, values)(np.clip(at, x[0], x[-1]))
    left = np.multiply.outer(np.minimum(at - x[0], 0), (values[1] - values[0]) / (x[1] - x[0]))
    right = np.multiply.outer(np.maximum(at - x[-1], 0), (values[-1] - values[-2]) / (x[-1] - x[-2]))
    return np.asarray(inside + left + right, dtype=np.float64)


def _leave_out(x: FloatArray, values: FloatArray, left_out: Iterable[int]) -> FloatArray:
    """Return how far each left-out row of `values` (len(x), curves) is from the interpolation of the other rows."""
    errors = [
        _interpolate_curves(np.delete(x, i), np.delete(values, i, axis=0), x[i : i + 1])[0] - values[i]
        for i in left_out
    ]
    distances: FloatArray = np.abs(np.array(errors)).reshape(-1, values.shape[1])
    return distances


def _concatenate(arrays: Iterable[FloatArray]) -> FloatArray:
    return np.concatenate([np.empty(0), *arrays])


def _compute_distances(x: FloatArray) -> FloatArray:
    """Return the distance of each inner value to its nearer neighbour, (len(x) - 2,)."""
    steps = np.diff(x)
    return np.asarray(np.minimum(steps[:-1], steps[1:]), dtype=np.float64)


def _compute_key_distance(key: dict[str, Hashable], curve: dict[str, Hashable]) -> tuple[int, float]:
    """Return in how many columns the curve differs, and by how many powers of e in those that are counts."""
    differ = [(value, curve[name]) for name, value in key.items() if curve[name] != value]
    counts = [(a, b) for a, b in differ if isinstance(a, int) and isinstance(b, int) and a > 0 and b > 0]
    return len(differ), sum(abs(math.log(a / b)) for a, b in counts)


def _format_values(values: set[Hashable]) -> str:
    return " or ".join(sorted(str(value) for value in values))
