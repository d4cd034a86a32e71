"""Errors of a cost model on layers that it was not fitted to: whole shapes or whole sparsities, never random rows.

Random rows would flatter a model. The neighbours of a held-out row, of the same shape and the next sparsity, would
stay in the training set. Intervals that are calibrated so cover far less of a new shape than they promise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from sklearn.base import clone
from sklearn.utils.parallel import Parallel, delayed

from cost_models.estimators.anchored_lookup import AnchoredLookup
from cost_models.estimators.hybrid import Hybrid
from cost_models.estimators.learned_model import LearnedModel
from cost_models.refusals import Unanchored, Uncalibrated
from cost_models.rows.row_keys import CURVE, SHAPE, FloatArray, RowMask, extract_keys, extract_sparsities
from cost_models.rows.training_rows import check_seconds
from cost_models.uncertainty.timing_noise import estimate_noise_floor

ANCHORS = 6
CostModel = AnchoredLookup | LearnedModel | Hybrid

Figures = dict[str, float | int | None]
"""Figures of merit by name, as `evaluate` returns them."""


class HeldOut(NamedTuple):
    """Outcome of a prediction of held-out rows.

    Attributes
    ----------
    errors : ndarray of shape (rows,)
        |predicted / measured - 1|.
    covered : ndarray of bool, shape (rows with an interval,)
        Whether the measured time lies inside the interval.
    widths : ndarray of shape (rows with an interval,)
        Width of the interval relative to the prediction.
    """

    errors: FloatArray
    covered: RowMask
    widths: FloatArray


def evaluate(estimator: CostModel, X: pd.DataFrame, y: npt.ArrayLike, coverage: float = 0.9) -> Figures:
    """Evaluate a fitted model on the parts of its training rows that it did not see.

    A learned model has predicted each shape by a fit without it; its intervals are calibrated on the shapes of the
    other folds. A hybrid is judged by its learned part. A look-up keeps six anchors of each curve, spread evenly over
    the measured sparsities, and predicts the other ones. Of a curve of at most six, one inner anchor at a time is
    left out.

    Parameters
    ----------
    estimator : CostModel
        The model, fitted to (X, y).
    X : DataFrame of shape (rows, columns)
        Columns of `latbench.tables.schema.KEY_COLUMNS`, one row a point.
    y : array_like of shape (rows,)
        Measured seconds.
    coverage : float
        Coverage of the intervals, in (0, 1).

    Returns
    -------
    dict of str to float, int or None
        Errors are |predicted / measured - 1|; a figure is None if nothing could be held out.

        - median, p90, mape: median, 90th percentile and mean of the errors
        - within_5, within_10: share of errors up to 0.05 and 0.10
        - coverage: share of measurements inside the interval of nominal_coverage
        - width: median of (high - low) / predicted; None, like coverage, if there were too few shapes for intervals
        - noise_floor: about the median error of a model that knows every true time
        - held_out: number of predicted rows
    """
    seconds = check_seconds(X, y)
    if isinstance(estimator, Hybrid):
        estimator = estimator.learned_
    if isinstance(estimator, LearnedModel):
        return _compute_figures(_collect_held_out_shapes(estimator, coverage), estimate_noise_floor(X), coverage)
    masks = list(split_by_sparsity(X))
    outcome = _concatenate(_predict_held_out(estimator, X, seconds, coverage, mask) for mask in masks)
    floor = estimate_noise_floor(X, np.any(masks, axis=0) if masks else None)
    return _compute_figures(outcome, floor, coverage)


def evaluate_held_out(
    estimator: LearnedModel,
    X: pd.DataFrame,
    y: npt.ArrayLike,
    held_out: Mapping[str, Sequence[RowMask]],
    coverage: float = 0.9,
    *,
    n_jobs: int | None = None,
) -> dict[str, Figures]:
    """Evaluate a model on given hold-outs: fit it without the rows of each mask, and predict these.

    The model may extrapolate, because a family of layers or an edge of the measured sizes requires it. Rows that it
    refuses even so do not count, such as an operation that only held-out rows have.

    Parameters
    ----------
    estimator : LearnedModel
        Settings of the model; it need not be fitted.
    X : DataFrame of shape (rows, columns)
        Columns of `latbench.tables.schema.KEY_COLUMNS`, one row a point.
    y : array_like of shape (rows,)
        Measured seconds.
    held_out : mapping of str to sequence of ndarray of bool, shape (rows,)
        Masks by name, as `build_hold_outs` returns them.
    coverage : float
        Coverage of the intervals, in (0, 1).
    n_jobs : int, optional
        Number of processes, as in scikit-learn.

    Returns
    -------
    dict of str to dict
        The figures of `evaluate` for each name; noise_floor is that of the held-out rows.
    """
    seconds = check_seconds(X, y)
    extrapolating = clone(estimator).set_params(allow_extrapolation=True)
    masks, none_held_out = [mask for named in held_out.values() for mask in named], np.zeros(len(X), bool)
    outcomes = iter(
        Parallel(n_jobs)(delayed(_predict_held_out)(extrapolating, X, seconds, coverage, mask) for mask in masks)
    )
    figures = {}
    for name, named in held_out.items():
        outcome = _concatenate(next(outcomes) for _ in named)
        floor = estimate_noise_floor(X, np.any([none_held_out, *named], axis=0))
        figures[name] = _compute_figures(outcome, floor, coverage)
    return figures


def split_by_sparsity(X: pd.DataFrame, anchors: int = ANCHORS) -> Iterator[RowMask]:
    """Yield the masks of rows to hold out of every curve, (rows,).

    A curve of more than `anchors` points keeps that many, spread evenly, in the first mask. Of a shorter curve each
    mask holds out one inner point.
    """
    sparsity = extract_sparsities(X)
    columns = [name for name in CURVE if name in X.columns]
    curves: dict[Any, list[int]] = {}
    for row, key in enumerate(extract_keys(X, columns)):
        curves.setdefault(key, []).append(row)
    ordered = [np.array(rows)[np.argsort(sparsity[rows], kind="stable")] for rows in curves.values()]
    for turn in range(1, anchors - 1):
        held_out = np.zeros(len(X), bool)
        for rows in ordered:
            if len(rows) > anchors and turn == 1:
                remaining = np.round(np.linspace(0, len(rows) - 1, anchors)).astype(int)
                held_out[np.delete(rows, remaining)] = True
            elif turn < len(rows) - 1 and len(rows) <= anchors:
                held_out[rows[turn]] = True
        if held_out.any():
            yield held_out


def _compute_figures(outcome: HeldOut, noise_floor: float | None, coverage: float) -> Figures:
    errors, covered, widths = outcome
    return {
        "median": _reduce(np.median, errors),
        "p90": _reduce(lambda values: np.quantile(values, 0.9), errors),
        "mape": _reduce(np.mean, errors),
        "within_5": _reduce(np.mean, errors <= 0.05),
        "within_10": _reduce(np.mean, errors <= 0.10),
        "coverage": _reduce(np.mean, covered),
        "nominal_coverage": coverage,
        "width": _reduce(np.median, widths),
        "noise_floor": noise_floor,
        "held_out": int(errors.size),
    }


def _reduce(figure: Any, values: npt.NDArray[Any]) -> float | None:
    return float(figure(values)) if values.size else None


def _collect_held_out_shapes(model: LearnedModel, coverage: float) -> HeldOut:
    """Return the held-out errors of the model's own folds, with intervals of the other folds."""
    known = ~np.isnan(model.held_out_errors_)
    if not known.any():  # a single shape cannot be held out
        return HeldOut(np.empty(0), np.empty(0, bool), np.empty(0))
    log_errors, fold = model.held_out_errors_[known], model.fold_[known]
    try:
        multiples = [model.find_multiple(coverage, number) for number in range(int(fold.max()) + 1)]
        half = np.array(multiples)[fold] * model.error_sizes_[known]
    except Uncalibrated:
        half = np.empty(0)
    return HeldOut(np.abs(np.expm1(log_errors)), np.abs(log_errors[: half.size]) <= half, 2 * np.sinh(half))


def _concatenate(outcomes: Iterable[HeldOut]) -> HeldOut:
    empty = HeldOut(np.empty(0), np.empty(0, bool), np.empty(0))
    return HeldOut(*(np.concatenate(parts) for parts in zip(empty, *outcomes, strict=True)))


def _predict_held_out(
    estimator: CostModel, X: pd.DataFrame, seconds: FloatArray, coverage: float, held_out: RowMask
) -> HeldOut:
    """Fit the model to the other rows, and predict the rows held out."""
    errors, covered, widths = np.empty(0), np.empty(0, bool), np.empty(0)
    rest, target = X[~held_out].reset_index(drop=True), X[held_out].reset_index(drop=True)
    truth = seconds[held_out]
    try:
        model = clone(estimator).fit(rest, seconds[~held_out])
    except Unanchored:
        return HeldOut(errors, covered, widths)
    accepted = _find_accepted(model, target)
    if accepted.any():
        target, truth = target[accepted].reset_index(drop=True), truth[accepted]
        predicted = model.predict(target)
        errors = np.abs(predicted / truth - 1)
        with contextlib.suppress(Uncalibrated):
            low, high = model.predict_interval(target, coverage)
            covered, widths = (low <= truth) & (truth <= high), (high - low) / predicted
    return HeldOut(errors, covered, widths)


def _find_accepted(model: CostModel, X: pd.DataFrame) -> RowMask:
    """Return which rows of X, (rows,), the model predicts. It tries one row of each kind, whatever its sizes."""
    columns = [name for name in CURVE if name in X.columns and (name == "op" or name not in SHAPE)]
    kinds = extract_keys(X, columns)
    accepted: dict[Any, bool] = {}
    for row, kind in enumerate(kinds):
        if kind not in accepted:
            try:
                model.predict(X.iloc[[row]])
            except Unanchored:
                accepted[kind] = False
            else:
                accepted[kind] = True
    return np.array([accepted[kind] for kind in kinds], bool)
