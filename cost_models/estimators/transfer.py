"""A new device from a few measurements there and many elsewhere.

What was measured on other devices tells how time goes with shape, the few rows of the new one (its anchors) how fast
it is. Each other device gives a `Boosted` model, which is taken over in two ways: as it is, with its error on the
anchors fitted by a straight line in the logarithms of m, k and n, held near constant (ridge); and as what it corrects
of its own roofline, on top of one of the anchors, whose rates for calls, bytes and each format are fitted to what the
correction leaves. A roofline of the anchors alone, and the same corrected by trees, stand beside them. The logarithms
of all are averaged with the weights that predict left-out anchors best (stacking, Wolpert 1992), none negative, so
that an unlike device counts for nothing.

What it does not know: what the anchors do not say something about. Formats, kernels and operations of which none
was measured on the new device are refused, however well the others know them; sizes beyond the anchors' are
extrapolated to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import nnls

from cost_models.estimators import roofline
from cost_models.estimators.boosted import Boosted, Trees, grown
from cost_models.estimators.learned_model import Learned, Predict, check_shapes, one_mode
from cost_models.estimators.roofline import Rates
from cost_models.features.layer_work import SIZES, Encoder, Structure
from cost_models.features.work_terms import amounts, fitted_rates, own_form
from cost_models.refusals import BadRows, Unanchored
from cost_models.rows.row_keys import Array, checked, shape_groups, split_by_shape

FEWEST_ANCHORS = 5
ENOUGH_TREES = 40  # for the anchors, which are few and are learned from dozens of times over
_RIDGE = 3.0  # as many rows as say that the error is the same everywhere
_SUM = 100.0  # how strictly weights add up to one


@dataclass(frozen=True)
class Source:
    """Another device: its model, and its roofline."""

    model: Predict
    rates: Rates


@dataclass(frozen=True)
class Seen:
    """What candidates are told of layers, worked out once for all of them: log2 of the sizes, sums of work, features
    for trees, and of each source its log seconds and what its model corrects of its roofline; (rows, any) each.
    """

    sizes: Array
    work: Array
    features: Array
    told: Array
    correction: Array

    def __getitem__(self, rows: npt.NDArray[np.bool_]) -> Self:
        return type(self)(**{name: values[rows] for name, values in vars(self).items()})


@dataclass(frozen=True)
class Eye:
    """How layers are seen: work of a form, for each of `formats`, an encoder's features, and the sources."""

    form: str
    formats: tuple[str, ...]
    encoder: Encoder
    sources: tuple[Source, ...]

    def __call__(self, X: pd.DataFrame) -> Seen:
        """What there is to see of every row of X."""
        told = np.stack([source.model(X) for source in self.sources], axis=1)
        own = np.stack([source.rates(X) for source in self.sources], axis=1)
        return Seen(
            np.log2(X[list(SIZES)].to_numpy(np.float64)),
            amounts(X, self.form, self.formats),
            self.encoder.matrix(X),
            told,
            told - own,
        )


Candidate = Callable[[Seen], Array]
"""The logarithm of the seconds of every row, (rows,)."""


@dataclass(frozen=True)
class Summed:
    """Sums of work at rates (terms,), seconds a unit."""

    rates: Array

    def __call__(self, seen: Seen) -> Array:
        """As `Candidate`."""
        return np.log(seen.work @ self.rates)


@dataclass(frozen=True)
class Grown:
    """The same, corrected by trees."""

    base: Summed
    trees: Trees

    def __call__(self, seen: Seen) -> Array:
        """As `Candidate`."""
        return self.base(seen) + self.trees(seen.features)


@dataclass(frozen=True)
class Tilted:
    """The model of a source (its number) and its error on the anchors, a line: log seconds at `centre`, and slopes
    (1 + sizes,).
    """

    source: int
    centre: Array
    line: Array

    def __call__(self, seen: Seen) -> Array:
        """As `Candidate`."""
        return seen.told[:, self.source] + _design(seen, self.centre) @ self.line


@dataclass(frozen=True)
class Lent:
    """What a source (its number) corrects of its roofline, on top of rates of the anchors."""

    source: int
    base: Summed

    def __call__(self, seen: Seen) -> Array:
        """As `Candidate`."""
        return seen.correction[:, self.source] + self.base(seen)


@dataclass(frozen=True)
class Stacked:
    """The weighted mean of the logarithms of candidates, by name, of what the eye sees; weights (candidates,)."""

    eye: Eye
    candidates: Mapping[str, Candidate]
    weights: Array

    def __call__(self, X: pd.DataFrame) -> Array:
        """The logarithm of the seconds of every row of X, (rows,)."""
        return _each(self.candidates, self.eye(X)) @ self.weights


class Transfer(Learned):
    """Predicts `device` from its few rows and the many of others, all in one X, with the column device.

    Parameters: device, the one to predict; max_iter of the others' trees; the rest as of `Learned`.

    Fitted as `Learned`, on the rows of `device`; sources_ are the models of the other devices by name. Rows must
    be of one backend, dtype and way of measuring.
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
        """Learn from the rows of X (key columns, one row a point) with y seconds.

        Raises Unanchored for fewer than five shapes of the device, BadRows where no other device has rows, MixedModes
        and ValueError as `Learned.fit`.
        """
        seconds = checked(X, y)
        check_shapes(X)
        ours = X["device"].eq(self.device).to_numpy()
        anchors = X[ours].reset_index(drop=True)
        others = sorted(set(X["device"][~ours]))
        if not others:
            raise BadRows(f"there are no rows of a device other than {self.device} to learn from")
        if not len(anchors) or shape_groups(anchors).max() + 1 < FEWEST_ANCHORS:
            raise Unanchored(
                f"fewer than {FEWEST_ANCHORS} shapes were measured on {self.device or 'the new device'}, too few to "
                f"anchor it; there are rows of {', '.join(others)}"
            )
        self.mode_ = one_mode(X.drop(columns="device")) | {"device": self.device}
        self._remember(anchors)
        self.sources_ = {name: self._source(X, seconds, name) for name in others}
        self.predictor_ = self._learn(anchors, seconds[ours])
        self._calibrate(anchors, seconds[ours])
        return self

    def _source(self, X: pd.DataFrame, seconds: Array, device: str) -> Source:
        own = X["device"].eq(device).to_numpy()
        rows, times = X[own].reset_index(drop=True), seconds[own]
        model = Boosted(max_iter=self.max_iter, random_state=self.random_state).learn(rows, times)
        formats = tuple(sorted(set(Structure.of(rows).format)))
        return Source(model, roofline.fitted(rows, times, formats, own_form(rows) or "plain"))

    def _learn(self, X: pd.DataFrame, seconds: Array) -> Stacked:
        formats = tuple(sorted(self.encoder_.levels["format"]))
        eye = Eye(own_form(X) or "plain", formats, self.encoder_, tuple(self.sources_.values()))
        seen, log_seconds = eye(X), np.log(seconds)
        fold = split_by_shape(shape_groups(X), self.folds, self.random_state)
        left_out = np.empty((len(X), 2 + 2 * len(eye.sources)))
        for held_out in (fold == number for number in range(int(fold.max()) + 1)):
            found = self._candidates(seen[~held_out], log_seconds[~held_out])
            left_out[held_out] = _each(found, seen[held_out])
        weights, _ = nnls(
            np.vstack([left_out - log_seconds[:, None], np.full((1, left_out.shape[1]), _SUM)]),
            np.append(np.zeros(len(X)), _SUM),
        )
        return Stacked(eye, self._candidates(seen, log_seconds), weights / weights.sum())

    def _candidates(self, seen: Seen, log_seconds: Array) -> dict[str, Candidate]:
        """What is learned from these layers: by themselves, two, and with the help of each source, two."""
        alone = _summed(seen, log_seconds)
        trees = grown(
            seen.features,
            log_seconds - alone(seen),
            max_iter=min(self.max_iter, ENOUGH_TREES),
            random_state=self.random_state,
        )
        found: dict[str, Candidate] = {"roofline": alone, "boosted": Grown(alone, trees)}
        for number, name in enumerate(self.sources_):
            found[name] = _tilted(seen, log_seconds, number)
            found[f"{name}, lent"] = Lent(number, _summed(seen, log_seconds - seen.correction[:, number]))
        return found


def _each(candidates: Mapping[str, Candidate], seen: Seen) -> Array:
    """What every candidate predicts, (rows, candidates)."""
    return np.stack([candidate(seen) for candidate in candidates.values()], axis=1)


def _summed(seen: Seen, log_seconds: Array) -> Summed:
    return Summed(fitted_rates(seen.work, np.exp(log_seconds)))


def _tilted(seen: Seen, log_seconds: Array, source: int) -> Tilted:
    """A source's model, and the line of its error on these layers."""
    centre = seen.sizes.mean(axis=0)
    design = _design(seen, centre)
    penalty = np.diag([0.0, *[_RIDGE] * len(SIZES)])
    line = np.linalg.solve(design.T @ design + penalty, design.T @ (log_seconds - seen.told[:, source]))
    return Tilted(source, centre, np.asarray(line, dtype=np.float64))


def _design(seen: Seen, centre: Array) -> Array:
    return np.column_stack([np.ones(len(seen.sizes)), seen.sizes - centre])
