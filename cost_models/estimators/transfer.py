"""Transfer of cost models to a new device, from a few measurements there and many on other devices.

The other devices tell how time changes with the shape. The few rows of the new one, its anchors, tell how fast it is.
Each other device has a `Boosted` model, which is used in two ways. One takes its predictions and adds its error on
the anchors: a line in the logarithms of m, k and n, held near constant by a ridge penalty. The other takes the
correction that the model makes to its own roofline, on top of a roofline of the anchors. A roofline of the anchors
alone, and the same corrected by trees, are further candidates. The log seconds of all candidates are averaged with
the non-negative weights that predict left-out anchors best (stacking, Wolpert 1992). An unlike device then gets no
weight.

Formats, kernels and operations without a measurement on the new device are refused, even if other devices have them.
Sizes beyond the anchors' are extrapolated to.
"""

from __future__ import annotations

from typing import Self

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import nnls

from cost_models.estimators.boosted import Boosted
from cost_models.estimators.fitted_trees import fit_trees
from cost_models.estimators.learned_model import LearnedModel, check_one_mode, check_shapes
from cost_models.estimators.roofline import fit_work_rates
from cost_models.estimators.transfer_candidates import (
    AnchorTrees,
    Candidate,
    CandidateInputs,
    InputBuilder,
    SourceCorrection,
    SourceDevice,
    StackedModel,
    fit_anchor_roofline,
    fit_shifted_source,
    predict_candidates,
)
from cost_models.features.pattern_structure import PatternStructure
from cost_models.features.work_terms import find_kernel_form
from cost_models.refusals import BadRows, Unanchored
from cost_models.rows.row_keys import FloatArray
from cost_models.rows.shape_groups import count_shapes, group_by_shape, split_by_shape
from cost_models.rows.training_rows import check_seconds

FEWEST_ANCHORS = 5
ENOUGH_TREES = 40  # for the anchors: they are few, and are fitted dozens of times
_SUM_WEIGHT = 100.0  # weight of the equation that the candidates' weights add up to one


class Transfer(LearnedModel):
    """A model of one device, learned from its few rows and from many rows of other devices.

    Rows must be of one backend, dtype and way of measuring.

    Parameters
    ----------
    device : str
        The device to predict, a value of the column `device`.
    max_iter : int
        Number of trees of the other devices' models.
    folds, allow_extrapolation, random_state
        As of `LearnedModel`.

    Attributes
    ----------
    sources_ : dict of str to SourceDevice
        The models of the other devices, by name.

    See Also
    --------
    LearnedModel : The other fitted attributes, which are of the rows of `device`, and the methods.
    """

    def __init__(
        self,
        device: str = "",
        max_iter: int = 150,
        folds: int = 5,
        allow_extrapolation: bool = False,
        random_state: int = 0,
    ) -> None:
        self.device = device
        self.max_iter = max_iter
        self.folds = folds
        self.allow_extrapolation = allow_extrapolation
        self.random_state = random_state

    def fit(self, X: pd.DataFrame, y: npt.ArrayLike) -> Self:
        """Fit the model to the rows of all devices.

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
        Unanchored
            The device has fewer than five shapes, or a layer has no known shape.
        BadRows
            No other device has rows.
        MixedModes
            The rows are of several backends, dtypes or ways of measuring.
        ValueError
            A time is not positive and finite.
        """
        seconds = check_seconds(X, y)
        check_shapes(X)
        of_device = X["device"].eq(self.device).to_numpy()
        anchors = X[of_device].reset_index(drop=True)
        others = sorted(set(X["device"][~of_device]))
        if not others:
            raise BadRows(f"there are no rows of a device other than {self.device} to learn from")
        if not len(anchors) or count_shapes(anchors) < FEWEST_ANCHORS:
            raise Unanchored(
                f"fewer than {FEWEST_ANCHORS} shapes were measured on {self.device or 'the new device'}, too few to "
                f"anchor it; there are rows of {', '.join(others)}"
            )
        self.mode_ = check_one_mode(X.drop(columns="device")) | {"device": self.device}
        self._remember(anchors)
        self.sources_ = {name: self._fit_source(X, seconds, name) for name in others}
        self.predictor_ = self._learn(anchors, seconds[of_device])
        self._calibrate(anchors, seconds[of_device])
        return self

    def _fit_source(self, X: pd.DataFrame, seconds: FloatArray, device: str) -> SourceDevice:
        own = X["device"].eq(device).to_numpy()
        rows, times = X[own].reset_index(drop=True), seconds[own]
        model = Boosted(max_iter=self.max_iter, random_state=self.random_state).learn(rows, times)
        formats = tuple(sorted(set(PatternStructure.from_rows(rows).format)))
        return SourceDevice(model, fit_work_rates(rows, times, formats, find_kernel_form(rows) or "plain"))

    def _learn(self, X: pd.DataFrame, seconds: FloatArray) -> StackedModel:
        formats = tuple(sorted(self.encoder_.levels["format"]))
        build_inputs = InputBuilder(
            find_kernel_form(X) or "plain", formats, self.encoder_, tuple(self.sources_.values())
        )
        inputs, log_seconds = build_inputs(X), np.log(seconds)
        fold = split_by_shape(group_by_shape(X), self.folds, self.random_state)
        predicted = np.empty((len(X), 2 + 2 * len(self.sources_)))
        for held_out in (fold == number for number in range(int(fold.max()) + 1)):
            candidates = self._fit_candidates(inputs[~held_out], log_seconds[~held_out])
            predicted[held_out] = predict_candidates(candidates, inputs[held_out])
        weights, _ = nnls(
            np.vstack([predicted - log_seconds[:, None], np.full((1, predicted.shape[1]), _SUM_WEIGHT)]),
            np.append(np.zeros(len(X)), _SUM_WEIGHT),
        )
        return StackedModel(build_inputs, self._fit_candidates(inputs, log_seconds), weights / weights.sum())

    def _fit_candidates(self, inputs: CandidateInputs, log_seconds: FloatArray) -> dict[str, Candidate]:
        """Fit two candidates to the anchors alone, and two with each source."""
        roofline = fit_anchor_roofline(inputs, log_seconds)
        trees = fit_trees(
            inputs.features,
            log_seconds - roofline(inputs),
            max_iter=min(self.max_iter, ENOUGH_TREES),
            random_state=self.random_state,
        )
        candidates: dict[str, Candidate] = {"roofline": roofline, "boosted": AnchorTrees(roofline, trees)}
        for number, name in enumerate(self.sources_):
            candidates[name] = fit_shifted_source(inputs, log_seconds, number)
            remainder = log_seconds - inputs.source_corrections[:, number]
            candidates[f"{name}, corrected"] = SourceCorrection(number, fit_anchor_roofline(inputs, remainder))
        return candidates
