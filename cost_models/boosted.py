"""A learned model: gradient-boosted trees on how far a layer's time is from its roofline, for unmeasured shapes.

Trees cannot extrapolate, so they learn the logarithm of seconds over a fitted roofline (`features.Encoder`), which
does. Intervals come from predictions for shapes that were left out, whole shapes at a time.

What it does not know: another device, backend, dtype or way of measuring (a model is of one), a kernel or format it
has not seen, sizes beyond those measured. It refuses them. Shapes that were measured are better served by
`AnchoredLookup`.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pandas as pd
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.utils.validation import check_is_fitted
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from cost_models.conformal import quantile
from cost_models.errors import MixedModes, Unanchored
from cost_models.features import SIZES, Encoder, with_structure
from cost_models.rows import Array, checked, describe, shape_groups, sparsities, split_by_shape

MODE = ("device", "backend", "dtype_w", "dtype_a", "dtype_out", "context", "cache_mode", "launch_mode")


class Boosted(RegressorMixin, BaseEstimator):
    """Gradient-boosted trees on log(seconds / roofline), one model a device, backend and way of measuring.

    Parameters: max_iter, learning_rate, max_leaf_nodes and min_samples_leaf of the trees; folds, in how many parts
    shapes are held out to calibrate intervals; allow_extrapolation, whether sizes beyond the measured range are
    predicted instead of refused; random_state, a whole number.

    Fitted: encoder_ and trees_; mode_, what all rows share; ranges_ and sparsity_ranges_, what was measured;
    held_out_errors_, log(predicted / measured) of every row by a model that did not see its shape, with the rows'
    shapes_ and fold_.
    """

    def __init__(
        self,
        max_iter: int = 150,
        learning_rate: float = 0.1,
        max_leaf_nodes: int = 31,
        min_samples_leaf: int = 5,
        folds: int = 5,
        allow_extrapolation: bool = False,
        random_state: int = 0,
    ) -> None:
        self.max_iter = max_iter
        self.learning_rate = learning_rate
        self.max_leaf_nodes = max_leaf_nodes
        self.min_samples_leaf = min_samples_leaf
        self.folds = folds
        self.allow_extrapolation = allow_extrapolation
        self.random_state = random_state

    def fit(self, X: pd.DataFrame, y: npt.ArrayLike) -> Self:
        """Learn from the rows of X (key columns, one row a point) with y seconds.

        Raises MixedModes for rows of several devices, backends, dtypes or ways of measuring, Unanchored for a layer
        of unknown shape, ValueError for times that are not positive and finite.
        """
        seconds = checked(X, y)
        _check_shapes(X)
        self.mode_ = {}
        for name in (name for name in MODE if name in X.columns):
            values = sorted(X[name].astype(str).unique())
            if len(values) > 1:
                raise MixedModes(f"one model cannot learn from {name} {' and '.join(values)}: fit them apart")
            self.mode_[name] = values[0]
        structured = with_structure(X)
        measured = [name for name in (*SIZES, "threads") if name in X.columns and X[name].notna().all()]
        self.ranges_ = {name: _range(X[name]) for name in measured}
        self.sparsity_ranges_ = {
            name: _range(group["sparsity_target"]) for name, group in structured.groupby("format", sort=True)
        }
        self.encoder_, self.trees_ = self._learn(X, seconds)
        self._calibrate(X, seconds)
        return self

    def _learn(self, X: pd.DataFrame, seconds: Array) -> tuple[Encoder, HistGradientBoostingRegressor]:
        encoder = Encoder(X, seconds)
        trees = HistGradientBoostingRegressor(
            max_iter=self.max_iter,
            learning_rate=self.learning_rate,
            max_leaf_nodes=self.max_leaf_nodes,
            min_samples_leaf=self.min_samples_leaf,
            early_stopping=False,
            random_state=self.random_state,
        )
        with _one_thread():
            return encoder, trees.fit(encoder.matrix(X), np.log(seconds / encoder.roofline(X)))

    def _calibrate(self, X: pd.DataFrame, seconds: Array) -> None:
        """Predict each shape with a model of the shapes in the other folds.

        Shapes at the edge of the measured range are among them, though a model would refuse them: what is learned
        here errs on the wide side.
        """
        self.shapes_ = shape_groups(X)
        self.fold_ = split_by_shape(self.shapes_, self.folds, self.random_state)
        self.held_out_errors_ = np.full(len(X), np.nan)
        for fold in range(int(self.fold_.max()) + 1 if self.fold_.any() else 0):
            held_out = self.fold_ == fold
            encoder, trees = self._learn(X[~held_out], seconds[~held_out])
            self.held_out_errors_[held_out] = _log_seconds(encoder, trees, X[held_out]) - np.log(seconds[held_out])

    def predict(self, X: pd.DataFrame) -> Array:
        """Seconds of every row of X, (rows,). Raises Unanchored for a row unlike what was measured."""
        check_is_fitted(self)
        self._check(X)
        if not len(X):
            return np.empty(0)
        return np.exp(_log_seconds(self.encoder_, self.trees_, X))

    def predict_interval(self, X: pd.DataFrame, coverage: float = 0.9) -> tuple[Array, Array]:
        """Seconds (low, high) of every row that hold a measurement of a new shape with probability `coverage`.

        Calibrated on left-out shapes (`conformal.quantile`). Raises Unanchored as `predict`, and Uncalibrated where
        too few shapes were measured.
        """
        predicted = self.predict(X)
        factor = np.exp(self.half_width(coverage))
        return predicted / factor, predicted * factor

    def half_width(self, coverage: float, without_fold: int = -1) -> float:
        """Half of every interval, in log seconds; for validation, without the held-out errors of one fold."""
        used = (self.fold_ != without_fold) & ~np.isnan(self.held_out_errors_)
        return quantile(np.abs(self.held_out_errors_[used]), coverage, groups=self.shapes_[used])

    def covers(self, X: pd.DataFrame) -> npt.NDArray[np.bool_]:
        """Whether each row of X, (rows,), is like those measured: predicted without extrapolating."""
        check_is_fitted(self)
        known = self._known(X)
        rows = zip(with_structure(X).to_dict("records"), sparsities(X), strict=True)
        sized = X[list(SIZES)].notna().all(axis=1).to_numpy()
        seen = [self._unseen(row, float(sparsity), known, extrapolate=False) is None for row, sparsity in rows]
        return np.asarray(sized & np.array(seen, bool))

    def _known(self, X: pd.DataFrame) -> dict[str, set[str]]:
        """The values seen of each column that has categories. Raises ValueError for a column that X lacks."""
        known = {name: {value} for name, value in self.mode_.items()} | self.encoder_.levels
        needed = {*known, *self.encoder_.numbers, *SIZES, "pattern"} - {"format", "unit_rows", "unit_columns"}
        if missing := needed - set(X.columns):
            raise ValueError(f"X has no column {', '.join(sorted(missing))}")
        return known

    def _check(self, X: pd.DataFrame) -> None:
        """Raises Unanchored, naming the row, for what was not seen, ValueError for a column that X lacks."""
        known = self._known(X)
        _check_shapes(X)
        for row, sparsity in zip(with_structure(X).to_dict("records"), sparsities(X), strict=True):
            problem = self._unseen(row, float(sparsity), known, self.allow_extrapolation)
            if problem:
                raise Unanchored(f"cannot predict {describe(row)}: {problem}")

    def _unseen(
        self, row: dict[Hashable, Any], sparsity: float, known: dict[str, set[str]], extrapolate: bool
    ) -> str | None:
        """Why the row is unlike what was measured, or None."""
        for name, values in known.items():
            if values and row[name] not in values:
                return f"{name} {row[name]} was not measured, only {', '.join(sorted(values))}"
        if extrapolate:
            return None
        for name, (low, high) in self.ranges_.items():
            value = float(row[name])
            if not low <= value <= high:
                octaves = np.log2(low / value if value < low else value / high)
                return (
                    f"{name} is {octaves:.1f} octaves outside the measured range of {low:g} to {high:g}; "
                    "measure it, or allow extrapolation"
                )
        low, high = self.sparsity_ranges_[row["format"]]
        if not low <= sparsity <= high:
            return (
                f"a sparsity of {sparsity:g} is outside the measured range of {low:g} to {high:g}; "
                "measure it, or allow extrapolation"
            )
        return None


def _log_seconds(encoder: Encoder, trees: HistGradientBoostingRegressor, X: pd.DataFrame) -> Array:
    with _one_thread():
        return np.asarray(trees.predict(encoder.matrix(X)) + np.log(encoder.roofline(X)), dtype=np.float64)


def _one_thread() -> AbstractContextManager[Any]:
    """A table is small: one thread is as fast, and OpenMP's spinning ones are 15 times slower on a busy machine."""
    limits: AbstractContextManager[Any] = threadpool_limits(1, user_api="openmp")
    return limits


def _check_shapes(X: pd.DataFrame) -> None:
    unknown = X[list(SIZES)].isna().any(axis=1)
    if unknown.any():
        row = X[unknown].iloc[0].dropna().to_dict()
        raise Unanchored(f"{describe(row)} has no known m, k and n to learn from or to predict by")


def _range(values: pd.Series) -> tuple[float, float]:
    return float(values.min()), float(values.max())
