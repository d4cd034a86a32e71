"""A look-up that interpolates what was measured: no shape is guessed, only sparsities between measured ones.

The rows of one curve (equal keys but for the sparsity) are its anchors. Between them the logarithm of the seconds is
interpolated over the square root of the density by PCHIP (Fritsch and Carlson 1980), which overshoots no anchor and
forces nothing to fall: measured times do rise at times, where a kernel switches. Dense rows anchor no sparse curve.
On published CPU timings (224 curves, six anchors spread evenly in the logarithm of density) 97% of the held-out
sparsities come within 10%; with the dense time as one of the six it is 93%, so it is left out.

What it does not know: shapes, patterns, threads or machines that were not measured. It refuses them.
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
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_is_fitted

from cost_models.refusals import Unanchored, Uncalibrated
from cost_models.rows.row_keys import CURVE, Array, checked, describe, keys, sparsities
from cost_models.uncertainty.conformal import quantile, scatter
from cost_models.uncertainty.timing_noise import deviations

# Curves without a single wiggle would make every interval empty: no clock is that good.
_LEAST_ERROR = 1e-6
_REACH = 2  # anchors on either side that an interpolated value hangs on


@dataclass(frozen=True)
class _Curve:
    """One measured curve: rising sparsities, log seconds, and the noise of each (standard deviation, or NaN)."""

    key: tuple[Hashable, ...]
    sparsity: Array
    log_seconds: Array
    noise: Array


@dataclass(frozen=True)
class LeftOut:
    """What the other anchors say of each inner one, of curves that are measured at the same sparsities.

    errors (inner, curves): how far off, in log seconds; distances (inner,): to the nearest other anchor. without: for
    each inner anchor, both of the other inner ones when it was never measured, (inner - 1, curves) and (inner - 1,).
    """

    errors: Array
    distances: Array
    without: list[tuple[Array, Array]]

    @classmethod
    def of(cls, sparsity: Array, log_seconds: Array) -> Self:
        """From rising sparsities (anchors,) and the curves' times (anchors, curves)."""
        x, inner = _abscissa(sparsity), range(1, len(sparsity) - 1)
        errors = _misses(x, log_seconds, inner)
        without = []
        for i in inner:
            fewer, theirs = np.delete(x, i), np.delete(log_seconds, i, axis=0)
            again = range(max(1, i - _REACH), min(len(fewer) - 1, i + _REACH))  # the others are missed as before
            others = np.delete(errors, i - 1, axis=0)
            others[again.start - 1 : again.stop - 1] = _misses(fewer, theirs, again)
            without.append((others, _distances(fewer)))
        return cls(errors, _distances(x), without)


class AnchoredLookup(RegressorMixin, BaseEstimator):
    """Measured curves, interpolated over sparsity; refuses what nothing anchors.

    Parameters: allow_extrapolation, whether a sparsity outside a curve's measured range is predicted, on the straight
    line through the nearest two anchors, instead of refused.

    Fitted: columns_, the key columns that tell curves apart; curves_; scatter_ and usual_distance_, the typical error
    by distance from an anchor; behaviour_, by curve, how its errors compare with that, and worst_behaviour_; scores_
    and score_curves_.
    """

    def __init__(self, allow_extrapolation: bool = False) -> None:
        self.allow_extrapolation = allow_extrapolation

    def fit(self, X: pd.DataFrame, y: npt.ArrayLike) -> Self:
        """Take the rows of X (key columns, one row a point) with y seconds as anchors.

        Equal keys are averaged. The noise of each time is as `cost_models.uncertainty.timing_noise` has it. Raises ValueError for times
        that are not positive and finite.
        """
        log_seconds = np.log(checked(X, y))
        self.columns_ = [name for name in CURVE if name in X.columns]
        noise = deviations(X)
        anchors: dict[tuple[Hashable, ...], dict[float, list[tuple[float, float]]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for key, sparsity, value, spread in zip(
            keys(X, self.columns_), sparsities(X), log_seconds, noise, strict=True
        ):
            anchors[key][float(sparsity)].append((float(value), float(spread)))
        self.curves_ = {key: _curve(key, points) for key, points in anchors.items()}
        self._calibrate()
        return self

    def _calibrate(self) -> None:
        """Leave each inner anchor out; a score is its error in units of what was to be expected there.

        That is the typical error so far from an anchor, times how the curve behaves elsewhere. The anchor left out
        takes no part in either interpolation: beside a wild anchor its neighbours are missed too, so that a curve
        which is judged with it in place would seem to have announced its error.
        """
        alike: dict[tuple[float, ...], list[_Curve]] = defaultdict(list)
        for curve in self.curves_.values():
            if len(curve.sparsity) > 2:
                alike[tuple(curve.sparsity)].append(curve)
        every = [
            (curves, LeftOut.of(np.array(sparsity), np.stack([curve.log_seconds for curve in curves], axis=1)))
            for sparsity, curves in alike.items()
        ]
        distances = _joined(np.repeat(found.distances, len(curves)) for curves, found in every)
        errors = _joined(found.errors.ravel() for _, found in every)
        self.usual_distance_ = float(np.median(distances)) if distances.size else 0.0
        self.scatter_ = scatter(np.maximum(distances, self.usual_distance_), np.maximum(errors, _LEAST_ERROR))
        scores: list[Array] = []
        self.behaviour_: dict[tuple[Hashable, ...], float] = {}
        for curves, found in every:
            others = np.stack([self._behaviour(*rest) for rest in found.without])
            scores.append((found.errors / (self._typical(found.distances)[:, None] * others)).T)
            behaviour = self._behaviour(found.errors, found.distances)
            self.behaviour_ |= {curve.key: float(value) for curve, value in zip(curves, behaviour, strict=True)}
        # A curve of two anchors has none to leave out: it may behave as badly as the worst that has.
        self.worst_behaviour_ = max(self.behaviour_.values(), default=1.0)
        self.scores_ = _joined(one.ravel() for one in scores)
        self.score_curves_ = np.repeat(np.arange(sum(len(one) for one in scores)), [
            one.shape[1] for one in scores for _ in one
        ])  # fmt: skip

    def _typical(self, distances: Array) -> Array:
        """The error to be expected so far from an anchor; nearer than most of those left out, what theirs are."""
        near, further = self.scatter_
        return near + further * np.maximum(distances, self.usual_distance_)

    def _behaviour(self, errors: Array, distances: Array) -> Array:
        """Each curve's mean error in units of the typical one, (curves,), as if one more anchor had been typical."""
        ratio = errors / self._typical(distances)[:, None]
        return np.asarray((1 + ratio.sum(axis=0)) / (1 + len(ratio)), dtype=np.float64)

    def predict(self, X: pd.DataFrame) -> Array:
        """Seconds of every row of X, (rows,).

        A key column that X lacks must not matter: if curves that differ only there match, the row is refused as
        ambiguous. Raises Unanchored for a row that no measured curve, or no measured sparsity of it, anchors.
        """
        seconds = np.empty(len(X))
        for curve, rows, sparsity in self._by_curve(X):
            seconds[rows] = np.exp(self._evaluate(curve, sparsity))
        return seconds

    def predict_interval(self, X: pd.DataFrame, coverage: float = 0.9) -> tuple[Array, Array]:
        """Seconds (low, high) of every row, with probability `coverage`: of what was measured the true time, of other
        sparsities a measurement.

        A measured sparsity has its measured noise, read as normal: the interval holds what the layer takes, the mean
        of all measurements. One between is calibrated on left-out anchors (`conformal.quantile`, curve by curve where
        there are enough): it holds a new measurement, noise and all. Beyond the measured range, if that is allowed,
        the interval spans the straight line and the last anchor, and promises nothing. Raises Unanchored as
        `predict`, and Uncalibrated where too few anchors could be left out.
        """
        low, high = np.empty(len(X)), np.empty(len(X))
        multiple = cache(partial(self._multiple, coverage))
        for curve, rows, sparsity in self._by_curve(X):
            value = self._evaluate(curve, sparsity)
            nearest = curve.log_seconds[np.abs(sparsity[:, None] - curve.sparsity).argmin(axis=1)]
            outside = (sparsity < curve.sparsity[0]) | (sparsity > curve.sparsity[-1])
            half = self._half_width(curve, sparsity, coverage, multiple)
            low[rows] = np.exp(np.where(outside, np.minimum(value, nearest), value) - half)
            high[rows] = np.exp(np.where(outside, np.maximum(value, nearest), value) + half)
        return low, high

    def _half_width(self, curve: _Curve, sparsity: Array, coverage: float, multiple: Callable[[], float]) -> Array:
        noise = np.full(len(sparsity), np.nan)
        row, anchor = np.nonzero(sparsity[:, None] == curve.sparsity)
        noise[row] = curve.noise[anchor] * NormalDist().inv_cdf(0.5 + coverage / 2)
        if not np.isnan(noise).any():
            return noise
        behaviour = self.behaviour_.get(curve.key, self.worst_behaviour_)
        distance = np.abs(_abscissa(sparsity)[:, None] - _abscissa(curve.sparsity)).min(axis=1)
        return np.where(np.isnan(noise), multiple() * behaviour * self._typical(distance), noise)

    def _multiple(self, coverage: float) -> float:
        """How many times the expected error holds a new one with this probability."""
        try:
            return quantile(self.scores_, coverage, groups=self.score_curves_)
        except Uncalibrated:  # few curves: their anchors are taken to be alike, whichever curve they are of
            return quantile(self.scores_, coverage)

    def covers(self, X: pd.DataFrame) -> npt.NDArray[np.bool_]:
        """Whether each row of X, (rows,), lies on one measured curve, between measured sparsities."""
        covered = np.zeros(len(X), bool)
        for _, curves, rows, sparsity in self._matching(X):
            if len(curves) == 1:
                covered[rows] = (sparsity >= curves[0].sparsity[0]) & (sparsity <= curves[0].sparsity[-1])
        return covered

    def _by_curve(self, X: pd.DataFrame) -> list[tuple[_Curve, npt.NDArray[np.int64], Array]]:
        """The rows of X gathered by the curve that anchors them: curve, row numbers, sparsities."""
        return [(self._one(key, curves), rows, sparsity) for key, curves, rows, sparsity in self._matching(X)]

    def _matching(
        self, X: pd.DataFrame
    ) -> list[tuple[dict[str, Hashable], list[_Curve], npt.NDArray[np.int64], Array]]:
        """The rows of X gathered by key: that key, the curves that match it, row numbers, sparsities."""
        check_is_fitted(self)
        asked = [name for name in self.columns_ if name in X.columns]
        places = [self.columns_.index(name) for name in asked]
        matching: dict[tuple[Hashable, ...], list[_Curve]] = defaultdict(list)
        for key, curve in self.curves_.items():
            matching[tuple(key[place] for place in places)].append(curve)
        rows: dict[tuple[Hashable, ...], list[int]] = defaultdict(list)
        for number, key in enumerate(keys(X, asked)):
            rows[key].append(number)
        sparsity = sparsities(X)
        gathered = []
        for key, numbers in rows.items():
            index = np.array(numbers)
            gathered.append((dict(zip(asked, key, strict=True)), matching.get(key, []), index, sparsity[index]))
        return gathered

    def _one(self, asked: dict[str, Hashable], found: list[_Curve]) -> _Curve:
        if len(found) == 1:
            return found[0]
        if found:
            known = {name: {curve.key[i] for curve in found} for i, name in enumerate(self.columns_)}
            differ = [f"{name} {_listed(values)}" for name, values in known.items() if len(values) > 1]
            raise Unanchored(f"{describe(asked)} was measured in several ways: say which {'; '.join(differ)}")
        curves = [dict(zip(self.columns_, key, strict=True)) for key in self.curves_]
        nearest = min(curves, key=lambda curve: _distance(asked, curve))
        differ = [f"{name} is {nearest[name]}, not {asked[name]}" for name in asked if nearest[name] != asked[name]]
        raise Unanchored(
            f"nothing measured anchors {describe(asked)}: in the nearest measured curve, {describe(nearest)}, "
            f"{'; '.join(differ)}; measure it"
        )

    def _evaluate(self, curve: _Curve, sparsity: Array) -> Array:
        outside = (sparsity < curve.sparsity[0]) | (sparsity > curve.sparsity[-1])
        if outside.any() and not self.allow_extrapolation:
            measured = " to ".join(f"{value:g}" for value in dict.fromkeys((curve.sparsity[0], curve.sparsity[-1])))
            name = describe(dict(zip(self.columns_, curve.key, strict=True)))
            raise Unanchored(
                f"{name} was measured at a sparsity of {measured}; {sparsity[outside][0]:g} lies outside: "
                "measure it, or allow extrapolation"
            )
        return _interpolate(_abscissa(curve.sparsity), curve.log_seconds, _abscissa(sparsity))


def _curve(key: tuple[Hashable, ...], points: dict[float, list[tuple[float, float]]]) -> _Curve:
    ordered = sorted(points)
    values = np.array([np.mean([value for value, _ in points[sparsity]]) for sparsity in ordered])
    noise = np.array([np.mean([spread for _, spread in points[sparsity]]) for sparsity in ordered])
    return _Curve(key, np.array(ordered), values, noise)


def _abscissa(sparsity: Array) -> Array:
    """Where a sparsity lies on the axis of interpolation: minus the square root of its density, so that it rises."""
    return -np.sqrt(1 - sparsity)


def _interpolate(x: Array, values: Array, at: Array) -> Array:
    """PCHIP through (x, values), and straight lines beyond its ends; one anchor holds everywhere. (len(at),), or one
    row a place and one column a curve where values are (len(x), curves).
    """
    if len(x) == 1:
        return np.repeat(values[:1], len(at), axis=0)
    inside = PchipInterpolator(x, values)(np.clip(at, x[0], x[-1]))
    left = np.multiply.outer(np.minimum(at - x[0], 0), (values[1] - values[0]) / (x[1] - x[0]))
    right = np.multiply.outer(np.maximum(at - x[-1], 0), (values[-1] - values[-2]) / (x[-1] - x[-2]))
    return np.asarray(inside + left + right, dtype=np.float64)


def _misses(x: Array, values: Array, left_out: Iterable[int]) -> Array:
    """How far each row of `values` (len(x), curves) in `left_out` is from what the other rows say there."""
    misses = [
        _interpolate(np.delete(x, i), np.delete(values, i, axis=0), x[i : i + 1])[0] - values[i] for i in left_out
    ]
    return np.abs(np.array(misses)).reshape(-1, values.shape[1])


def _joined(parts: Iterable[Array]) -> Array:
    return np.concatenate([np.empty(0), *parts])


def _distances(x: Array) -> Array:
    """From each inner value to its nearer neighbour, (len(x) - 2,)."""
    steps = np.diff(x)
    return np.asarray(np.minimum(steps[:-1], steps[1:]), dtype=np.float64)


def _distance(asked: dict[str, Hashable], curve: dict[str, Hashable]) -> tuple[int, float]:
    """How unlike a curve is: in how many columns, and by how many powers of e where both are counts."""
    differ = [(value, curve[name]) for name, value in asked.items() if curve[name] != value]
    counts = [(a, b) for a, b in differ if isinstance(a, int) and isinstance(b, int) and a > 0 and b > 0]
    return len(differ), sum(abs(math.log(a / b)) for a, b in counts)


def _listed(values: set[Hashable]) -> str:
    return " or ".join(sorted(str(value) for value in values))
