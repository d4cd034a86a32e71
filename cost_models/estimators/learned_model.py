"""What learned models share: they know what they were shown, refuse the rest, and say how wrong they may be.

A subclass learns; this class holds shapes out to calibrate its intervals. Inside the measured range they come from
shapes left out at random, whole shapes at a time. Beyond it they come from the smallest or the largest shapes,
predicted from the others, and grow with the distance as much as they did there (`frontier`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pandas as pd
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_is_fitted

from cost_models.features import measured_ranges as frontier
from cost_models.features.layer_work import SIZES, Encoder, with_structure
from cost_models.refusals import BadRows, MixedModes, Unanchored
from cost_models.rows.row_keys import Array, checked, describe, keys, shape_groups, sparsities, split_by_shape
from cost_models.uncertainty.conformal import quantile

MODE = ("device", "backend", "dtype_w", "dtype_a", "dtype_out", "context", "cache_mode", "launch_mode")

Predict = Callable[[pd.DataFrame], Array]
"""The logarithm of the seconds of every row, (rows,)."""


class Learned(RegressorMixin, BaseEstimator, ABC):
    """A model of one device, backend and way of measuring that predicts unmeasured shapes.

    Parameters that subclasses have: folds, in how many parts shapes are held out to calibrate intervals;
    allow_extrapolation, whether sizes beyond the measured range are predicted instead of refused, and work further
    beyond it than could be tried (`frontier.Edge.reach`); random_state, a whole number.

    Fitted: mode_, what all rows share; encoder_, the categories and columns seen; kinds_, which categories were
    seen together, the values of kind_columns_; ranges_ and sparsity_ranges_, what was measured; predictor_;
    held_out_errors_, log(predicted / measured) of every row by a model that did not see its shape, with the rows'
    shapes_ and fold_; edges_, by side.
    """

    folds: int
    allow_extrapolation: bool
    random_state: int

    @abstractmethod
    def _learn(self, X: pd.DataFrame, seconds: Array) -> Predict:
        """What predicts, learned from rows of X with their seconds, which are like those remembered."""

    def fit(self, X: pd.DataFrame, y: npt.ArrayLike) -> Self:
        """Learn from the rows of X (key columns, one row a point) with y seconds.

        Raises MixedModes for rows of several devices, backends, dtypes or ways of measuring, Unanchored for a layer
        of unknown shape, ValueError for times that are not positive and finite.
        """
        seconds = checked(X, y)
        self.predictor_ = self.learn(X, seconds)
        self._calibrate(X, seconds)
        return self

    def learn(self, X: pd.DataFrame, seconds: Array) -> Predict:
        """What predicts the logarithm of seconds, learned from these rows; without intervals. Raises as `fit`."""
        check_shapes(X)
        self.mode_ = one_mode(X)
        self._remember(X)
        return self._learn(X, seconds)

    def _remember(self, X: pd.DataFrame) -> None:
        """Keep what of X makes a row like those measured."""
        self.encoder_ = Encoder(X)
        self.kind_columns_ = [name for name, values in self.encoder_.levels.items() if values]
        self.kinds_ = frozenset(keys(with_structure(X), self.kind_columns_))
        measured = [name for name in (*SIZES, "threads") if name in X.columns and X[name].notna().all()]
        self.ranges_ = frontier.ranges(X, measured)
        self.sparsity_ranges_ = {
            name: (float(group["sparsity_target"].min()), float(group["sparsity_target"].max()))
            for name, group in with_structure(X).groupby("format", sort=True)
        }

    def _calibrate(self, X: pd.DataFrame, seconds: Array) -> None:
        self.shapes_ = shape_groups(X)
        self.fold_ = split_by_shape(self.shapes_, self.folds, self.random_state)
        self.held_out_errors_ = np.full(len(X), np.nan)
        for fold in range(int(self.fold_.max()) + 1 if self.fold_.any() else 0):
            held_out = self.fold_ == fold
            self.held_out_errors_[held_out] = self._errors(X, seconds, held_out)
        self.edges_ = frontier.edges(X, lambda held_out: self._errors(X, seconds, held_out))

    def _errors(self, X: pd.DataFrame, seconds: Array, held_out: npt.NDArray[np.bool_]) -> Array:
        """log(predicted / measured) of the rows held out, by a model of the others."""
        predict = self._learn(X[~held_out], seconds[~held_out])
        return predict(X[held_out]) - np.log(seconds[held_out])

    def predict(self, X: pd.DataFrame) -> Array:
        """Seconds of every row of X, (rows,). Raises Unanchored for a row unlike what was measured."""
        check_is_fitted(self)
        self._check(X)
        return np.exp(self.predictor_(X)) if len(X) else np.empty(0)

    def predict_interval(self, X: pd.DataFrame, coverage: float = 0.9) -> tuple[Array, Array]:
        """Seconds (low, high) of every row that hold a measurement of a new shape with probability `coverage`.

        Calibrated on left-out shapes (`conformal.quantile`). Beyond the measured range (`octaves_outside`) it is
        wider (`frontier.Edge`), and promises no more than that going further is as hard as it was before. Raises
        Unanchored as `predict`, and Uncalibrated where too few shapes were measured.
        """
        predicted = self.predict(X)
        factor = np.exp(self._half_widths(X, coverage)) if len(X) else np.empty(0)
        return predicted / factor, predicted * factor

    def _half_widths(self, X: pd.DataFrame, coverage: float) -> Array:
        inside = self.half_width(coverage)
        half = np.full(len(X), inside)
        for side, away in self.octaves_outside(X).items():
            if (outside := away > 0).any():
                edge = self.edges_[side].half_width(away[outside], coverage)
                half[outside] = np.maximum(half[outside], edge)
        return half

    def half_width(self, coverage: float, without_fold: int = -1) -> float:
        """Half of an interval inside the measured range, in log seconds; for validation, without the held-out errors
        of one fold.
        """
        used = (self.fold_ != without_fold) & ~np.isnan(self.held_out_errors_)
        return quantile(np.abs(self.held_out_errors_[used]), coverage, groups=self.shapes_[used])

    def octaves_outside(self, X: pd.DataFrame) -> dict[str, Array]:
        """How far every row of X, (rows,), lies below ("smallest") and above ("largest") the measured ranges of m,
        k, n, threads, their work (multiplications), a convolution's kernel, stride and dilation, and a format's
        block sizes and density: the most octaves, 0 inside.
        """
        check_is_fitted(self)
        return frontier.octaves(X, self.ranges_)

    def covers(self, X: pd.DataFrame) -> npt.NDArray[np.bool_]:
        """Whether each row of X, (rows,), is like those measured: predicted without `allow_extrapolation`."""
        check_is_fitted(self, "edges_")
        return np.array([problem is None for problem in self._problems(X, extrapolate=False)], bool)

    def _check(self, X: pd.DataFrame) -> None:
        """Raises Unanchored, naming the row, for what was not seen, ValueError for a column that X lacks."""
        check_shapes(X)
        for number, problem in enumerate(self._problems(X, self.allow_extrapolation)):
            if problem:
                row = with_structure(X.iloc[[number]]).to_dict("records")[0]
                raise Unanchored(f"cannot predict {describe(row)}: {problem}")

    def _problems(self, X: pd.DataFrame, extrapolate: bool) -> list[str | None]:
        """Why each row is unlike what was measured, or None."""
        known = {name: {value} for name, value in self.mode_.items()} | self.encoder_.levels
        needed = {*known, *self.encoder_.numbers, *SIZES, "pattern"} - {"format", "unit_rows", "unit_columns"}
        if missing := needed - set(X.columns):
            raise ValueError(f"X has no column {', '.join(sorted(missing))}")
        structured = with_structure(X)
        rows = zip(structured.to_dict("records"), keys(structured, self.kind_columns_), strict=True)
        found = [self._unknown(row, kind, known) for row, kind in rows]
        if extrapolate:
            return found
        beyond = zip(found, structured["format"], sparsities(X), self._furthest(X), self._too_far(X), strict=True)
        return [problem or self._outside(*row) or too_far for problem, *row, too_far in beyond]

    def _unknown(
        self, row: dict[Hashable, Any], kind: tuple[Hashable, ...], known: dict[str, set[str]]
    ) -> str | None:
        """Why a row is of a kind that was not measured."""
        if any(row[name] != row[name] for name in SIZES):
            return "it has no known m, k and n"
        for name, values in known.items():
            if values and row[name] not in values:
                return f"{name} {row[name]} was not measured, only {', '.join(sorted(values))}"
        if kind not in self.kinds_:
            several = [name for name, values in self.encoder_.levels.items() if len(values) > 1 and name != "format"]
            said = " and ".join(f"{name} {row[name]}" for name in several)
            return f"nothing of format {row['format']} was measured with {said}; measure it"
        return None

    def _furthest(self, X: pd.DataFrame) -> list[tuple[str, float]]:
        """In what each row is furthest outside of what was measured, and by how many octaves; its work may be."""
        return frontier.furthest(X, {name: limits for name, limits in self.ranges_.items() if name != "flop"})

    def _too_far(self, X: pd.DataFrame) -> list[str | None]:
        """Why the work of each row is further from what was measured than a model of fewer shapes was asked for."""
        found: list[str | None] = [None] * len(X)
        for side, away in frontier.octaves(X, {"flop": self.ranges_["flop"]}).items():
            reach = self.edges_[side].reach
            for row in np.flatnonzero(away > reach):
                found[row] = (
                    f"its work is {away[row]:.1f} octaves outside the measured range, and how wrong that may be "
                    f"could be tried up to {reach:.1f}; measure it, or allow extrapolation"
                )
        return found

    def _outside(self, format: str, sparsity: float, furthest: tuple[str, float]) -> str | None:
        """Why a row of a measured kind lies outside of what was measured of it."""
        low, high = self.sparsity_ranges_[format]
        if not low <= sparsity <= high:
            return (
                f"a sparsity of {sparsity:g} is outside the measured range of {low:g} to {high:g}; "
                "measure it, or allow extrapolation"
            )
        name, octaves = furthest
        if octaves > 0:
            low, high = self.ranges_[name]
            return (
                f"{name} is {octaves:.1f} octaves outside the measured range of {low:g} to {high:g}; "
                "measure it, or allow extrapolation"
            )
        return None


def one_mode(X: pd.DataFrame) -> dict[str, str]:
    """What all rows share of MODE, as far as it is known. Raises MixedModes where they differ."""
    mode = {}
    for name in (name for name in MODE if name in X.columns):
        values = sorted(X[name].astype(object).where(X[name].notna(), "unknown").astype(str).unique())
        if len(values) > 1:
            raise MixedModes(
                f"one model cannot learn from {name} {' and '.join(values)}: fit them apart, with --where "
                f"{name}={values[0]}"
            )
        if values != ["unknown"]:
            mode[name] = values[0]
    return mode


def check_shapes(X: pd.DataFrame) -> None:
    """Raises Unanchored for a row without m, k and n, of at least 1, BadRows for columns that are not there."""
    if missing := {*SIZES, "pattern", "sparsity_target"} - set(X.columns):
        raise BadRows(f"X has no column {', '.join(sorted(missing))}")
    unknown = ~(X[list(SIZES)] >= 1).fillna(False).all(axis=1)
    if unknown.any():
        row = X[unknown].iloc[0].dropna().to_dict()
        raise Unanchored(f"{describe(row)} has no known m, k and n of at least 1 to learn from or to predict by")
