"""How good is a model on what it has not seen: always by whole shapes, or by whole sparsities, never by random rows.

Random rows would flatter: the neighbours of a held-out row, same shape and next sparsity, would stay in the training
set, and intervals calibrated so cover far less of a new shape than they say.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from sklearn.base import clone
from sklearn.utils.parallel import Parallel, delayed

from cost_models.estimators.anchored_lookup import AnchoredLookup
from cost_models.estimators.hybrid import Hybrid
from cost_models.estimators.learned_model import Learned
from cost_models.refusals import Unanchored, Uncalibrated
from cost_models.rows.row_keys import CURVE, SHAPE, Array, checked, keys, sparsities
from cost_models.uncertainty import timing_noise as noise

ANCHORS = 6
Mask = npt.NDArray[np.bool_]
CostModel = AnchoredLookup | Learned | Hybrid
Outcome = tuple[Array, Mask, Array]
"""Errors of what was held out; of the rows that have an interval, whether they are inside, and its relative width."""

Figures = dict[str, float | int | None]


def validate(estimator: CostModel, X: pd.DataFrame, y: npt.ArrayLike, coverage: float = 0.9) -> Figures:
    """Errors of `estimator`, fitted to (X, y), on the parts of (X, y) that it did not see.

    A learned model predicted shapes that were held out when it was fitted; their intervals are calibrated on the
    shapes of other folds. A hybrid is judged by its learned part. A look-up predicts the other sparsities of curves
    of which it keeps six anchors, spread evenly over those measured; a curve of no more than six leaves out one inner
    anchor at a time.

    Errors are |predicted / measured - 1|. Returns median, p90, mape (their mean), within_5 and within_10 (shares),
    coverage (the share inside the interval of nominal_coverage), width (median of (high - low) / predicted; both None
    where too little was measured for intervals), noise_floor (`noise.floor` of the rows held out: about what the
    median error of a model would be that knew every true time) and held_out, how many rows were predicted; all
    figures are None where nothing could be held out.
    """
    seconds = checked(X, y)
    if isinstance(estimator, Hybrid):
        estimator = estimator.learned_
    if isinstance(estimator, Learned):
        return _figures(_held_out_shapes(estimator, coverage), noise.floor(X), coverage)
    masks = list(by_sparsity(X))
    outcome = _joined(_without(estimator, X, seconds, coverage, mask) for mask in masks)
    return _figures(outcome, noise.floor(X, np.any(masks, axis=0) if masks else None), coverage)


def validate_held_out(
    estimator: Learned,
    X: pd.DataFrame,
    y: npt.ArrayLike,
    held_out: Mapping[str, Sequence[Mask]],
    coverage: float = 0.9,
    *,
    n_jobs: int | None = None,
) -> dict[str, Figures]:
    """Errors of `estimator`, fitted again without each mask (rows,) of `held_out` in turn, on what was held out; by
    name, as `hold_outs` gives masks by name.

    It may extrapolate: that is what a family of layers or an edge of the measured sizes asks of it. What it refuses
    even so, such as an operation that only the rows held out have, does not count. Figures as of `validate`, the
    noise that of the rows held out. `n_jobs` processes fit, as in scikit-learn.
    """
    seconds = checked(X, y)
    bold = clone(estimator).set_params(allow_extrapolation=True)
    every, nothing = [mask for masks in held_out.values() for mask in masks], np.zeros(len(X), bool)
    outcomes = iter(Parallel(n_jobs)(delayed(_without)(bold, X, seconds, coverage, mask) for mask in every))
    return {
        name: _figures(
            _joined(next(outcomes) for _ in masks), noise.floor(X, np.any([nothing, *masks], axis=0)), coverage
        )
        for name, masks in held_out.items()
    }


def _figures(outcome: Outcome, noise_floor: float | None, coverage: float) -> Figures:
    errors, covered, widths = outcome
    return {
        "median": _over(np.median, errors),
        "p90": _over(lambda values: np.quantile(values, 0.9), errors),
        "mape": _over(np.mean, errors),
        "within_5": _over(np.mean, errors <= 0.05),
        "within_10": _over(np.mean, errors <= 0.10),
        "coverage": _over(np.mean, covered),
        "nominal_coverage": coverage,
        "width": _over(np.median, widths),
        "noise_floor": noise_floor,
        "held_out": int(errors.size),
    }


def _held_out_shapes(model: Learned, coverage: float) -> Outcome:
    log_errors = model.held_out_errors_
    if np.isnan(log_errors).any():  # one shape alone
        return np.empty(0), np.empty(0, bool), np.empty(0)
    try:
        half = np.array([model.half_width(coverage, fold) for fold in range(int(model.fold_.max()) + 1)])[model.fold_]
    except Uncalibrated:
        half = np.empty(0)
    return np.abs(np.expm1(log_errors)), np.abs(log_errors[: half.size]) <= half, 2 * np.sinh(half)


def _joined(outcomes: Iterable[Outcome]) -> Outcome:
    nothing = np.empty(0), np.empty(0, bool), np.empty(0)
    errors, covered, widths = (np.concatenate(parts) for parts in zip(nothing, *outcomes, strict=True))
    return errors, covered, widths


def _without(estimator: CostModel, X: pd.DataFrame, seconds: Array, coverage: float, held_out: Mask) -> Outcome:
    """What a model of the other rows makes of those held out."""
    errors, covered, widths = np.empty(0), np.empty(0, bool), np.empty(0)
    rest, asked = X[~held_out].reset_index(drop=True), X[held_out].reset_index(drop=True)
    truth = seconds[held_out]
    try:
        model = clone(estimator).fit(rest, seconds[~held_out])
    except Unanchored:
        return errors, covered, widths
    known = _accepted(model, asked)
    if known.any():
        asked, truth = asked[known].reset_index(drop=True), truth[known]
        predicted = model.predict(asked)
        errors = np.abs(predicted / truth - 1)
        with contextlib.suppress(Uncalibrated):
            low, high = model.predict_interval(asked, coverage)
            covered, widths = (low <= truth) & (truth <= high), (high - low) / predicted
    return errors, covered, widths


def _accepted(model: CostModel, X: pd.DataFrame) -> Mask:
    """Which rows of X, (rows,), `model` predicts; one of each kind that differs in more than sizes is tried."""
    kinds = keys(X, [name for name in CURVE if name in X.columns and (name == "op" or name not in SHAPE)])
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


def by_sparsity(X: pd.DataFrame, anchors: int = ANCHORS) -> Iterator[Mask]:
    """Rows to hold out of every curve so that `anchors` of it stay, or all but one where it has no more than that."""
    sparsity = sparsities(X)
    columns = [name for name in CURVE if name in X.columns]
    curves: dict[Any, list[int]] = {}
    for row, key in enumerate(keys(X, columns)):
        curves.setdefault(key, []).append(row)
    ordered = [np.array(rows)[np.argsort(sparsity[rows], kind="stable")] for rows in curves.values()]
    for turn in range(1, anchors - 1):
        held_out = np.zeros(len(X), bool)
        for rows in ordered:
            if len(rows) > anchors and turn == 1:
                kept = np.round(np.linspace(0, len(rows) - 1, anchors)).astype(int)
                held_out[np.delete(rows, kept)] = True
            elif turn < len(rows) - 1 and len(rows) <= anchors:
                held_out[rows[turn]] = True
        if held_out.any():
            yield held_out


def _over(figure: Any, values: npt.NDArray[Any]) -> float | None:
    return float(figure(values)) if values.size else None
