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
from collections.abc import Hashable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Self

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.interpolate import PchipInterpolator
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_is_fitted

from cost_models.conformal import quantile
from cost_models.errors import Unanchored
from cost_models.rows import CURVE, Array, checked, describe, keys, sparsities

# Curves without a single wiggle would make every interval empty: no clock is that good.
_LEAST_SCALE = 1e-6


@dataclass(frozen=True)
class _Curve:
    """One measured curve: rising sparsities, log seconds, and the noise of each (95% half-width in log, or NaN)."""

    key: tuple[Hashable, ...]
    sparsity: Array
    log_seconds: Array
    noise: Array

    def held_out_errors(self) -> Array:
        """How far each inner anchor is from what the others predict for it, in log seconds."""
        x = _abscissa(self.sparsity)
        inner = range(1, len(x) - 1)
        others = ((np.delete(x, i), np.delete(self.log_seconds, i)) for i in inner)
        predicted = [float(_interpolate(*other, x[i : i + 1])[0]) for i, other in zip(inner, others, strict=True)]
        return np.abs(np.array(predicted) - self.log_seconds[1:-1])


class AnchoredLookup(RegressorMixin, BaseEstimator):
    """Measured curves, interpolated over sparsity; refuses what nothing anchors.

    Parameters: allow_extrapolation, whether a sparsity outside a curve's measured range is predicted, on the straight
    line through the nearest two anchors, instead of refused.

    Fitted: columns_, the key columns that tell curves apart; curves_; scores_ and scale_, what intervals come from.
    """

    def __init__(self, allow_extrapolation: bool = False) -> None:
        self.allow_extrapolation = allow_extrapolation

    def fit(self, X: pd.DataFrame, y: npt.ArrayLike) -> Self:
        """Take the rows of X (key columns, one row a point) with y seconds as anchors.

        low_seconds and high_seconds, where X has them, are the 95% interval of each time and become its noise, wider
        by how much the machine drifted while measuring (drift_ratio, the table's typical one). Equal keys are
        averaged. Raises ValueError for times that are not positive and finite.
        """
        log_seconds = np.log(checked(X, y))
        self.columns_ = [name for name in CURVE if name in X.columns]
        noise = np.full(len(X), np.nan)
        if {"low_seconds", "high_seconds"} <= set(X.columns):
            noise = np.log(X["high_seconds"].to_numpy(float) / X["low_seconds"].to_numpy(float)) / 2
        if "drift_ratio" in X.columns:
            noise = np.hypot(noise, _drift(X["drift_ratio"].dropna().to_numpy(float)))
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
        """Leave each inner anchor out; a score is its error in units of how badly the rest of its curve behaves.

        A left-out anchor lies in a gap twice as wide as a real one, which errs on the wide side. That the anchors of
        a curve are alike errs on the narrow one, and outweighs it where few curves were measured.
        """
        errors = {key: curve.held_out_errors() for key, curve in self.curves_.items()}
        known = np.concatenate([np.empty(0), *errors.values()])
        self.scale_ = max(float(np.median(known)), _LEAST_SCALE) if known.size else _LEAST_SCALE
        scores = [
            error / (self.scale_ + (float(np.delete(curve, i).mean()) if curve.size > 1 else 0.0))
            for curve in errors.values()
            for i, error in enumerate(curve)
        ]
        self.scores_ = np.sort(np.array(scores))
        self.curve_scales_ = {key: self.scale_ + float(curve.mean()) for key, curve in errors.items() if curve.size}

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
        """Seconds (low, high) of every row that hold a new measurement with probability `coverage`.

        A measured sparsity has its measured noise, read as normal; one between is calibrated on left-out anchors
        (`conformal.quantile`), which includes noise. Beyond the measured range, if that is allowed, the interval
        spans the straight line and the last anchor, and promises nothing. Raises Unanchored as `predict`, and
        Uncalibrated where too few anchors could be left out.
        """
        low, high = np.empty(len(X)), np.empty(len(X))
        for curve, rows, sparsity in self._by_curve(X):
            value = self._evaluate(curve, sparsity)
            nearest = curve.log_seconds[np.abs(sparsity[:, None] - curve.sparsity).argmin(axis=1)]
            outside = (sparsity < curve.sparsity[0]) | (sparsity > curve.sparsity[-1])
            half = self._half_width(curve, sparsity, coverage)
            low[rows] = np.exp(np.where(outside, np.minimum(value, nearest), value) - half)
            high[rows] = np.exp(np.where(outside, np.maximum(value, nearest), value) + half)
        return low, high

    def _half_width(self, curve: _Curve, sparsity: Array, coverage: float) -> Array:
        noise = np.full(len(sparsity), np.nan)
        row, anchor = np.nonzero(sparsity[:, None] == curve.sparsity)
        normal = NormalDist()
        noise[row] = curve.noise[anchor] * normal.inv_cdf(0.5 + coverage / 2) / normal.inv_cdf(0.975)
        if not np.isnan(noise).any():
            return noise
        # A curve of two anchors has none to leave out: it may behave as badly as the worst that has.
        scale = self.curve_scales_.get(curve.key, max(self.curve_scales_.values(), default=np.nan))
        return np.where(np.isnan(noise), quantile(self.scores_, coverage) * scale, noise)

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


def _drift(ratios: Array) -> float:
    """The 95% half-width, in log, that drift adds to a median; ratios: later half of the samples over the earlier.

    Two halves that differ with a standard deviation d leave their mean one of d / 2. d is estimated by the median
    absolute value, which a few interrupted measurements do not move.
    """
    if not ratios.size:
        return 0.0
    deviation = NormalDist().inv_cdf(0.75) ** -1 * float(np.median(np.abs(np.log(ratios))))
    return NormalDist().inv_cdf(0.975) * deviation / 2


def _abscissa(sparsity: Array) -> Array:
    """Where a sparsity lies on the axis of interpolation: minus the square root of its density, so that it rises."""
    return -np.sqrt(1 - sparsity)


def _interpolate(x: Array, values: Array, at: Array) -> Array:
    """PCHIP through (x, values), and straight lines beyond its ends; one anchor holds everywhere."""
    if len(x) == 1:
        return np.full(len(at), values[0])
    inside = PchipInterpolator(x, values)(np.clip(at, x[0], x[-1]))
    left = (values[1] - values[0]) / (x[1] - x[0]) * np.minimum(at - x[0], 0)
    right = (values[-1] - values[-2]) / (x[-1] - x[-2]) * np.maximum(at - x[-1], 0)
    return np.asarray(inside + left + right, dtype=np.float64)


def _distance(asked: dict[str, Hashable], curve: dict[str, Hashable]) -> tuple[int, float]:
    """How unlike a curve is: in how many columns, and by how many powers of e where both are counts."""
    differ = [(value, curve[name]) for name, value in asked.items() if curve[name] != value]
    counts = [(a, b) for a, b in differ if isinstance(a, int) and isinstance(b, int) and a > 0 and b > 0]
    return len(differ), sum(abs(math.log(a / b)) for a, b in counts)


def _listed(values: set[Hashable]) -> str:
    return " or ".join(sorted(str(value) for value in values))
