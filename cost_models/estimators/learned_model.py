"""Base class of the models that predict unmeasured shapes: it refuses unknown rows and calibrates intervals.

A subclass fits a predictor; this class holds whole shapes out to calibrate it. Inside the measured range, intervals
come from shapes that are held out at random. Beyond it, they come from the smallest or the largest shapes, predicted
from the others (`cost_models.uncertainty.edge_calibration`). They grow with the distance as the errors did there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pandas as pd
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from cost_models.estimators.error_size import learn_error_sizes
from cost_models.estimators.scored_regressor import ScoredRegressor
from cost_models.features import measured_ranges
from cost_models.features.feature_encoder import FeatureEncoder
from cost_models.features.layer_work import SIZES
from cost_models.features.pattern_structure import add_structure
from cost_models.refusals import BadRows, MissingColumns, MixedModes, Unanchored
from cost_models.rows.row_keys import FloatArray, RowMask, describe_point, extract_keys, extract_sparsities
from cost_models.rows.shape_groups import group_by_shape, select_shapes, split_by_shape
from cost_models.rows.training_rows import check_seconds
from cost_models.uncertainty.conformal import compute_conformal_quantile
from cost_models.uncertainty.edge_calibration import calibrate_edges

MODE = ("device", "backend", "dtype_w", "dtype_a", "dtype_out", "context", "cache_mode", "launch_mode")
"""Columns in which all rows of one model must agree."""

LogPredictor = Callable[[pd.DataFrame], FloatArray]
"""Returns the logarithm of the seconds of every row, (rows,)."""


ENOUGH_ROWS = 10_000
"""Rows whose errors calibrate intervals: of a larger table not all folds are held out, and some shapes give edges."""


class LearnedModel(ScoredRegressor, BaseEstimator, ABC):
    """A model of one device, backend and way of measuring that predicts unmeasured shapes.

    Parameters
    ----------
    folds : int
        Number of cross-validation folds of shapes that calibrate the intervals.
    allow_extrapolation : bool
        Whether rows beyond the measured range are predicted; otherwise they are refused.
    random_state : int
        Seed of the folds and of the fit.

    Attributes
    ----------
    mode_ : dict of str to str
        The values of MODE that all training rows share.
    encoder_ : FeatureEncoder
        The categories and columns of the training rows.
    kind_columns_, kinds_ : list of str, frozenset of tuple
        Categorical columns, and the combinations of their values in the training rows.
    ranges_, sparsity_ranges_ : dict of str to (float, float)
        Measured ranges by quantity, and of the sparsity by format.
    column_counts_, usual_gap_ : dict of str to ndarray, float
        Measured numbers of columns n by operation, and how far a shape typically is from those of other shapes.
    predictor_ : callable
        Returns the logarithm of the seconds of every row, (rows,).
    held_out_errors_ : ndarray of shape (rows,)
        log(predicted / measured) of every training row by a model that did not see its shape; NaN where it was not
        held out.
    shapes_, fold_ : ndarray of int, shape (rows,)
        Layer shape and fold of every training row.
    error_size_, error_sizes_ : ErrorSize or None, ndarray of shape (rows,)
        The typical error of a row in log seconds, None where that is not learned; and that of every training row by
        the errors of the other folds, or 1.
    edges_ : dict of str to Edge
        Calibration beyond the measured range, by side.
    """

    folds: int
    allow_extrapolation: bool
    random_state: int

    @abstractmethod
    def _learn(self, X: pd.DataFrame, seconds: FloatArray) -> LogPredictor:
        """Return a predictor fitted to rows of X, which are of the remembered kinds, with their seconds (rows,)."""

    def fit(self, X: pd.DataFrame, y: npt.ArrayLike) -> Self:
        """Fit the model and calibrate its intervals.

        Parameters
        ----------
        X : DataFrame of shape (rows, columns)
            Columns of `latbench.tables.schema.KEY_COLUMNS`, one row a point.
        y : array_like of shape (rows,)
            Measured seconds.

        Returns
        -------
        self

        Raises
        ------
        MixedModes
            The rows are of several devices, backends, dtypes or ways of measuring.
        Unanchored
            A layer has no known shape.
        ValueError
            A time is not positive and finite.
        """
        seconds = check_seconds(X, y)
        self.predictor_ = self.learn(X, seconds)
        self._calibrate(X, seconds)
        return self

    def learn(self, X: pd.DataFrame, seconds: FloatArray) -> LogPredictor:
        """Fit the model without intervals, and return its predictor. Raises as `fit`."""
        check_shapes(X)
        self.mode_ = check_one_mode(X)
        self._remember(X)
        self._prepare(X, seconds)
        return self._learn(X, seconds)

    def _prepare(self, X: pd.DataFrame, seconds: FloatArray) -> None:
        """Choose once what all fits share, with or without held-out shapes."""

    def _remember(self, X: pd.DataFrame) -> None:
        """Store the kinds and ranges of the rows of X; rows outside them are refused later."""
        self.encoder_ = FeatureEncoder.from_rows(X)
        self.kind_columns_ = [name for name, values in self.encoder_.levels.items() if values]
        self.kinds_ = frozenset(extract_keys(add_structure(X), self.kind_columns_))
        measured = [name for name in (*SIZES, "threads") if name in X.columns and X[name].notna().all()]
        self.ranges_ = measured_ranges.find_ranges(X, measured)
        self.column_counts_ = measured_ranges.find_column_counts(X)
        self.usual_gap_ = measured_ranges.find_usual_gap(X)
        self.sparsity_ranges_ = {
            name: (float(group["sparsity_target"].min()), float(group["sparsity_target"].max()))
            for name, group in add_structure(X).groupby("format", sort=True)
        }

    def _calibrate(self, X: pd.DataFrame, seconds: FloatArray) -> None:
        self.shapes_ = group_by_shape(X)
        self.fold_ = split_by_shape(self.shapes_, self.folds, self.random_state)
        self.held_out_errors_ = np.full(len(X), np.nan)
        for fold in range(int(self.fold_.max()) + 1 if self.fold_.any() else 0):
            if fold > 1 and np.isfinite(self.held_out_errors_).sum() >= ENOUGH_ROWS:
                break
            held_out = self.fold_ == fold
            self.held_out_errors_[held_out] = self._predict_errors(X, seconds, held_out)
        self.error_size_, self.error_sizes_ = learn_error_sizes(
            self.encoder_.encode(X), self.held_out_errors_, self.shapes_, self.fold_
        )
        some = select_shapes(self.shapes_, ENOUGH_ROWS, self.random_state)
        rows, times = X[some].reset_index(drop=True), seconds[some]
        self.edges_ = calibrate_edges(rows, lambda held_out: self._predict_errors(rows, times, held_out))

    def _predict_errors(self, X: pd.DataFrame, seconds: FloatArray, held_out: RowMask) -> FloatArray:
        """Return log(predicted / measured) of the rows held out, by a model of the other rows."""
        predict = self._learn(X[~held_out], seconds[~held_out])
        return predict(X[held_out]) - np.log(seconds[held_out])

    def predict(self, X: pd.DataFrame) -> FloatArray:
        """Predict the seconds of every row of X.

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
            A row is unlike the training rows; the message names it.
        """
        check_is_fitted(self)
        self._check(X)
        return np.exp(self.predictor_(X)) if len(X) else np.empty(0)

    def predict_interval(self, X: pd.DataFrame, coverage: float = 0.9) -> tuple[FloatArray, FloatArray]:
        """Predict an interval for a new measurement of every row of X.

        The interval is calibrated on held-out shapes. It is wider for rows like those with larger errors, where these
        can be told apart (`cost_models.estimators.error_size`). Beyond the measured range (`octaves_outside`) it is
        wider. There it assumes that going further is as hard as it was from the inner shapes to the outer ones.
        Between measured numbers of columns it widens as much as errors grew there. The distance that the held-out
        shapes had from each other is free.

        Parameters
        ----------
        X : DataFrame of shape (rows, columns)
            Columns of `latbench.tables.schema.KEY_COLUMNS`, one row a point.
        coverage : float
            Probability that the interval holds a measurement of a new shape, in (0, 1).

        Returns
        -------
        low, high : ndarray of shape (rows,)
            Seconds.

        Raises
        ------
        Unanchored
            A row is unlike the training rows.
        Uncalibrated
            Too few shapes were measured for this coverage.
        """
        predicted = self.predict(X)
        factor = np.exp(self.half_widths(X, coverage)) if len(X) else np.empty(0)
        return predicted / factor, predicted * factor

    def half_widths(self, X: pd.DataFrame, coverage: float) -> FloatArray:
        """Return half of the interval of every row of X in log seconds, (rows,).

        Parameters
        ----------
        X : DataFrame of shape (rows, columns)
            Columns of `latbench.tables.schema.KEY_COLUMNS`, one row a point.
        coverage : float
            Coverage of the intervals, in (0, 1).

        Raises
        ------
        Uncalibrated
            Too few shapes were measured for this coverage.
        """
        half = np.full(len(X), self.find_multiple(coverage))
        if self.error_size_ is not None:
            half *= self.error_size_(self.encoder_.encode(X))
        gaps = measured_ranges.count_gap_octaves(X, self.column_counts_)
        for side, octaves in self.octaves_outside(X).items():
            further = np.where(octaves > 0, 0.0, np.maximum(gaps[side] - self.usual_gap_, 0.0))
            if (further > 0).any():
                half += self.edges_[side].compute_widening(further, coverage)
            if (outside := octaves > 0).any():
                edge = self.edges_[side].half_width(octaves[outside], coverage)
                half[outside] = np.maximum(half[outside], edge)
        return half

    def find_multiple(self, coverage: float, without_fold: int = -1) -> float:
        """Return how many typical errors half of an interval inside the measured range spans, in log seconds.

        Parameters
        ----------
        coverage : float
            Coverage of the interval, in (0, 1).
        without_fold : int, optional
            Leave out the held-out errors of this fold, to validate the interval on it.
        """
        used = (self.fold_ != without_fold) & ~np.isnan(self.held_out_errors_)
        scores = np.abs(self.held_out_errors_[used]) / self.error_sizes_[used]
        return compute_conformal_quantile(scores, coverage, groups=self.shapes_[used])

    def octaves_outside(self, X: pd.DataFrame) -> dict[str, FloatArray]:
        """Return by how many octaves every row lies below ("smallest") and above ("largest") the measured ranges.

        The range that a row exceeds most counts: m, k and n of its operation, threads, the multiplications, a
        convolution's kernel, stride and dilation, and the block size and density of a format. Arrays have shape
        (rows,); 0 is inside.
        """
        check_is_fitted(self)
        return measured_ranges.count_octaves_outside(X, self.ranges_)

    def covers(self, X: pd.DataFrame) -> RowMask:
        """Return whether each row of X, (rows,), is predicted without `allow_extrapolation`."""
        check_is_fitted(self, "edges_")
        return np.array([problem is None for problem in self._find_problems(X, extrapolate=False)], bool)

    def _check(self, X: pd.DataFrame) -> None:
        """Raise Unanchored for the first unknown row, and MissingColumns for rows without a column."""
        check_shapes(X)
        for number, problem in enumerate(self._find_problems(X, self.allow_extrapolation)):
            if problem:
                row = add_structure(X.iloc[[number]]).to_dict("records")[0]
                raise Unanchored(f"cannot predict {describe_point(row)}: {problem}")

    def _find_problems(self, X: pd.DataFrame, extrapolate: bool) -> list[str | None]:
        """Return why each row cannot be predicted, or None."""
        modes = {name: frozenset([value]) for name, value in self.mode_.items()}
        known = {**modes, **self.encoder_.levels}
        needed = {*known, *self.encoder_.numbers, *SIZES, "pattern"} - {"format", "unit_rows", "unit_columns"}
        if missing := needed - set(X.columns):
            raise MissingColumns(sorted(missing))
        structured = add_structure(X)
        rows = zip(structured.to_dict("records"), extract_keys(structured, self.kind_columns_), strict=True)
        problems = [self._explain_unknown_kind(row, kind, known) for row, kind in rows]
        if extrapolate:
            return problems
        limits = zip(
            structured["format"], extract_sparsities(X), self._find_furthest(X), self._explain_gaps(X),
            self._explain_excess_work(X), strict=True,
        )  # fmt: skip
        return [
            problem or self._explain_outside(format, sparsity, furthest) or gap or excess_work
            for problem, (format, sparsity, furthest, gap, excess_work) in zip(problems, limits, strict=True)
        ]

    def _explain_unknown_kind(
        self, row: dict[Hashable, Any], kind: tuple[Hashable, ...], known: Mapping[str, frozenset[str]]
    ) -> str | None:
        """Return why a row is of a kind that was not measured, or None."""
        if any(row[name] != row[name] for name in SIZES):
            return "it has no known m, k and n"
        for name, values in known.items():
            if values and row[name] not in values:
                return f"{name} {row[name]} was not measured, only {', '.join(sorted(values))}"
        if kind not in self.kinds_:
            several = [name for name, values in self.encoder_.levels.items() if len(values) > 1 and name != "format"]
            combination = " and ".join(f"{name} {row[name]}" for name in several)
            return f"nothing of format {row['format']} was measured with {combination}; measure it"
        return None

    def _find_furthest(self, X: pd.DataFrame) -> list[tuple[str, float]]:
        """Return the range that each row exceeds most, but for the work, and by how many octaves."""
        ranges = {name: limits for name, limits in self.ranges_.items() if name != "flop"}
        return measured_ranges.find_furthest(X, ranges)

    def _explain_gaps(self, X: pd.DataFrame) -> list[str | None]:
        """Return why each row is too far from the measured numbers of columns of its operation, or None."""
        gaps = measured_ranges.count_gap_octaves(X, self.column_counts_)
        octaves = np.maximum(gaps["smallest"], gaps["largest"])
        problems: list[str | None] = [None] * len(X)
        for row in np.flatnonzero(octaves > measured_ranges.LARGEST_GAP):
            problems[row] = (
                f"n is {octaves[row]:.1f} octaves from the nearest one that was measured with this operation; "
                "measure it, or allow extrapolation"
            )
        return problems

    def _explain_excess_work(self, X: pd.DataFrame) -> list[str | None]:
        """Return why the work of each row is further from the measured range than calibration reached, or None."""
        problems: list[str | None] = [None] * len(X)
        outside = measured_ranges.count_octaves_outside(X, {"flop": self.ranges_["flop"]})
        for side, octaves in outside.items():
            reach = self.edges_[side].reach
            for row in np.flatnonzero(octaves > reach):
                problems[row] = (
                    f"its work is {octaves[row]:.1f} octaves outside the measured range, and how wrong that may be "
                    f"could be tried up to {reach:.1f}; measure it, or allow extrapolation"
                )
        return problems

    def _explain_outside(self, format: str, sparsity: float, furthest: tuple[str, float]) -> str | None:
        """Return why a row of a measured kind lies outside the measured ranges, or None."""
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


def check_one_mode(X: pd.DataFrame) -> dict[str, str]:
    """Return the known values of MODE that all rows share. Raises MixedModes if rows differ in one."""
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
    """Raise Unanchored for a row without m, k and n of at least 1, and BadRows for missing columns."""
    if missing := {*SIZES, "pattern", "sparsity_target"} - set(X.columns):
        raise BadRows(f"X has no column {', '.join(sorted(missing))}")
    unknown = ~(X[list(SIZES)] >= 1).fillna(False).all(axis=1)
    if unknown.any():
        row = X[unknown].iloc[0].dropna().to_dict()
        raise Unanchored(
            f"{describe_point(row)} has no known m, k and n of at least 1 to learn from or to predict by"
        )
