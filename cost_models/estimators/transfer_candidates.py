"""Candidate models of a new device, made of its anchors and of models of other devices, and their weighted mean.

The anchors are the rows of the new device. Candidates predict log seconds; `StackedModel` averages them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import pandas as pd

from cost_models.estimators.fitted_trees import TreeCorrection
from cost_models.estimators.learned_model import LogPredictor
from cost_models.estimators.roofline import WorkRates
from cost_models.estimators.tree_arrays import TreeArrays
from cost_models.features.feature_encoder import FeatureEncoder
from cost_models.features.layer_work import SIZES
from cost_models.features.work_terms import count_work, fit_rates
from cost_models.rows.row_keys import FloatArray, RowMask

_RIDGE = 3.0  # weight, in rows, of the prior that a source's error is the same for all sizes


@dataclass(frozen=True)
class SourceDevice:
    """Another device, whose model is transferred.

    Attributes
    ----------
    model : callable
        Its learned model: log seconds of every row, (rows,).
    rates : WorkRates
        Its roofline.
    """

    model: LogPredictor
    rates: WorkRates


@dataclass(frozen=True)
class CandidateInputs:
    """What candidates know of each row, computed once for all of them.

    Attributes
    ----------
    sizes : ndarray of shape (rows, 3)
        log2 of m, k and n.
    work : ndarray of shape (rows, terms)
        Amounts of work.
    features : ndarray of shape (rows, features)
        Features for trees.
    source_log_seconds : ndarray of shape (rows, sources)
        Predictions of the sources' models.
    source_corrections : ndarray of shape (rows, sources)
        How far each source's model is above its own roofline, in log seconds.
    """

    sizes: FloatArray
    work: FloatArray
    features: FloatArray
    source_log_seconds: FloatArray
    source_corrections: FloatArray

    def __getitem__(self, rows: RowMask) -> Self:
        return type(self)(**{name: values[rows] for name, values in vars(self).items()})


@dataclass(frozen=True)
class InputBuilder:
    """Builder of `CandidateInputs` from rows.

    Attributes
    ----------
    form : str
        Form of the work terms.
    formats : tuple of str
        Storage formats; each has a multiplication rate of its own.
    encoder : FeatureEncoder
        Encoder of the features for trees.
    sources : tuple of SourceDevice
        The other devices.
    """

    form: str
    formats: tuple[str, ...]
    encoder: FeatureEncoder
    sources: tuple[SourceDevice, ...]

    def __call__(self, X: pd.DataFrame) -> CandidateInputs:
        """Return the inputs of the rows of X."""
        log_seconds = np.stack([source.model(X) for source in self.sources], axis=1)
        rooflines = np.stack([source.rates(X) for source in self.sources], axis=1)
        return CandidateInputs(
            np.log2(X[list(SIZES)].to_numpy(np.float64)),
            count_work(X, self.form, self.formats),
            self.encoder.encode(X),
            log_seconds,
            log_seconds - rooflines,
        )


Candidate = Callable[[CandidateInputs], FloatArray]
"""Returns the logarithm of the seconds of every row, (rows,)."""


@dataclass(frozen=True)
class AnchorRoofline:
    """A roofline of the anchors alone: rates (terms,) in seconds per unit of work."""

    rates: FloatArray

    def __call__(self, inputs: CandidateInputs) -> FloatArray:
        """Return the logarithm of the seconds of every row, (rows,)."""
        return np.log(inputs.work @ self.rates)


@dataclass(frozen=True)
class AnchorTrees:
    """The roofline of the anchors, corrected by trees that are fitted to them."""

    roofline: AnchorRoofline
    trees: TreeCorrection | TreeArrays

    def __call__(self, inputs: CandidateInputs) -> FloatArray:
        """Return the logarithm of the seconds of every row, (rows,)."""
        return self.roofline(inputs) + self.trees(inputs.features)


@dataclass(frozen=True)
class ShiftedSource:
    """The model of a source plus a line in the logarithms of the sizes: its error on the anchors.

    Attributes
    ----------
    source : int
        Number of the source.
    centre : ndarray of shape (3,)
        log2 of m, k and n at which the line has its first coefficient.
    line : ndarray of shape (1 + 3,)
        Log seconds at `centre`, and the slopes.
    """

    source: int
    centre: FloatArray
    line: FloatArray

    def __call__(self, inputs: CandidateInputs) -> FloatArray:
        """Return the logarithm of the seconds of every row, (rows,)."""
        return inputs.source_log_seconds[:, self.source] + _build_design(inputs, self.centre) @ self.line


@dataclass(frozen=True)
class SourceCorrection:
    """The correction that a source's model makes to its own roofline, on top of a roofline of the anchors."""

    source: int
    roofline: AnchorRoofline

    def __call__(self, inputs: CandidateInputs) -> FloatArray:
        """Return the logarithm of the seconds of every row, (rows,)."""
        return inputs.source_corrections[:, self.source] + self.roofline(inputs)


@dataclass(frozen=True)
class StackedModel:
    """The weighted mean of the candidates' log seconds.

    Attributes
    ----------
    build_inputs : InputBuilder
        Makes what the candidates need.
    candidates : mapping of str to callable
        The candidates by name.
    weights : ndarray of shape (candidates,)
        Non-negative weights that add up to 1.
    """

    build_inputs: InputBuilder
    candidates: Mapping[str, Candidate]
    weights: FloatArray

    def __call__(self, X: pd.DataFrame) -> FloatArray:
        """Return the logarithm of the seconds of every row of X, (rows,)."""
        return predict_candidates(self.candidates, self.build_inputs(X)) @ self.weights


def predict_candidates(candidates: Mapping[str, Candidate], inputs: CandidateInputs) -> FloatArray:
    """Return the log seconds that every candidate predicts, (rows, candidates)."""
    return np.stack([candidate(inputs) for candidate in candidates.values()], axis=1)


def fit_anchor_roofline(inputs: CandidateInputs, log_seconds: FloatArray) -> AnchorRoofline:
    """Fit the rates of the anchors to their log seconds (rows,)."""
    return AnchorRoofline(fit_rates(inputs.work, np.exp(log_seconds)))


def fit_shifted_source(inputs: CandidateInputs, log_seconds: FloatArray, source: int) -> ShiftedSource:
    """Fit the line of a source's error on the anchors, by ridge regression that keeps it near constant."""
    centre = inputs.sizes.mean(axis=0)
    design = _build_design(inputs, centre)
    penalty = np.diag([0.0, *[_RIDGE] * len(SIZES)])
    error = log_seconds - inputs.source_log_seconds[:, source]
    line = np.linalg.solve(design.T @ design + penalty, design.T @ error)
    return ShiftedSource(source, centre, np.asarray(line, dtype=np.float64))


def _build_design(inputs: CandidateInputs, centre: FloatArray) -> FloatArray:
    return np.column_stack([np.ones(len(inputs.sizes)), inputs.sizes - centre])
