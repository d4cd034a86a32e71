"""A new device from a few measurements there and many elsewhere.

What was measured on other devices tells how time goes with shape, the few rows of the new one (its anchors) how fast
it is. Each other device gives a `Boosted` model, which is taken over in two ways: as it is, with its error on the
anchors fitted by a straight line in the logarithms of m, k and n, held near constant (ridge); and as what it corrects
of its own roofline, on top of one of the anchors, whose rates for calls, bytes and each format are fitted to what the
correction leaves. A roofline and a `Boosted` model of the anchors alone stand beside them. The logarithms of all
are averaged with the weights that predict left-out anchors best (stacking, Wolpert 1992), none negative, so that an
unlike device counts for nothing.

What it does not know: what the anchors do not say something about. Formats, kernels and operations of which none
was measured on the new device are refused, however well the others know them; sizes beyond the anchors' are
extrapolated to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import nnls

from cost_models import roofline
from cost_models.boosted import Boosted
from cost_models.errors import BadRows, Unanchored
from cost_models.features import SIZES, with_structure
from cost_models.learned import Learned, Predict, check_shapes, one_mode
from cost_models.roofline import Rates
from cost_models.rows import Array, checked, shape_groups, split_by_shape
from cost_models.work import own_form

FEWEST_ANCHORS = 5
ENOUGH_TREES = 40  # for the anchors, which are few and are learned from dozens of times over
_RIDGE = 3.0  # as many rows as say that the error is the same everywhere
_SUM = 100.0  # how strictly weights add up to one


@dataclass(frozen=True)
class Tilted:
    """A source's model and its error on the anchors, a line: log seconds at `centre`, and slopes (1 + sizes,)."""

    source: Predict
    centre: Array
    line: Array

    def __call__(self, X: pd.DataFrame) -> Array:
        """The logarithm of the seconds of every row of X, (rows,)."""
        return self.source(X) + _design(X, self.centre) @ self.line


@dataclass(frozen=True)
class Source:
    """Another device: its model, and its roofline."""

    model: Predict
    rates: Rates


@dataclass(frozen=True)
class Lent:
    """What a source corrects of its roofline, on top of rates of the anchors."""

    source: Source
    rates: Rates

    def __call__(self, X: pd.DataFrame) -> Array:
        """The logarithm of the seconds of every row of X, (rows,)."""
        return self.rates(X) + self.source.model(X) - self.source.rates(X)


@dataclass(frozen=True)
class Stacked:
    """The weighted mean of the logarithms of candidates, by name; weights (candidates,)."""

    candidates: Mapping[str, Predict]
    weights: Array

    def __call__(self, X: pd.DataFrame) -> Array:
        """The logarithm of the seconds of every row of X, (rows,)."""
        return np.stack([candidate(X) for candidate in self.candidates.values()], axis=1) @ self.weights


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
        return Source(model, _rates(rows, times))

    def _alone(self, X: pd.DataFrame, seconds: Array) -> dict[str, Predict]:
        """What these rows tell without any other device."""
        boosted = Boosted(max_iter=min(self.max_iter, ENOUGH_TREES), random_state=self.random_state)
        return {"roofline": _rates(X, seconds), "boosted": boosted.learn(X, seconds)}

    def _learn(self, X: pd.DataFrame, seconds: Array) -> Stacked:
        log_seconds = np.log(seconds)
        told = {name: source.model(X) for name, source in self.sources_.items()}
        correction = {name: told[name] - source.rates(X) for name, source in self.sources_.items()}

        def candidates(
            rows: npt.NDArray[np.bool_],
        ) -> tuple[dict[str, Predict], list[tuple[Array, Array]], list[Rates]]:
            """What is learned from these rows: by themselves, and of each source its error's line and lent rates."""
            lines = [_error_line(X[rows], (log_seconds - log_told)[rows]) for log_told in told.values()]
            lent = [_rates(X[rows], (seconds / np.exp(log))[rows]) for log in correction.values()]
            return self._alone(X[rows], seconds[rows]), lines, lent

        fold = split_by_shape(shape_groups(X), self.folds, self.random_state)
        left_out = np.empty((len(X), 2 + 2 * len(told)))  # two of the anchors alone, two of each other device
        for held_out in (fold == number for number in range(int(fold.max()) + 1)):
            alone, lines, lent = candidates(~held_out)
            asked = X[held_out]
            predicted = [predict(asked) for predict in alone.values()]
            predicted += [
                log_told[held_out] + _design(asked, centre) @ line
                for log_told, (centre, line) in zip(told.values(), lines, strict=True)
            ]
            predicted += [rates(asked) + log[held_out] for log, rates in zip(correction.values(), lent, strict=True)]
            left_out[held_out] = np.column_stack(predicted)
        weights, _ = nnls(
            np.vstack([left_out - log_seconds[:, None], np.full((1, left_out.shape[1]), _SUM)]),
            np.append(np.zeros(len(X)), _SUM),
        )
        alone, lines, lent = candidates(np.ones(len(X), bool))
        sources = self.sources_.items()
        found = alone | {
            name: Tilted(source.model, *line) for (name, source), line in zip(sources, lines, strict=True)
        }
        found |= {f"{name}, lent": Lent(source, rates) for (name, source), rates in zip(sources, lent, strict=True)}
        return Stacked(found, weights / weights.sum())


def _rates(X: pd.DataFrame, seconds: Array) -> Rates:
    """The sums of work of these rows, of the formats that they have."""
    formats = tuple(sorted(set(with_structure(X)["format"])))
    return roofline.fitted(X, seconds, formats, own_form(X) or "plain")


def _error_line(X: pd.DataFrame, error: Array) -> tuple[Array, Array]:
    """Where a source's error on the anchors is centred, (sizes,), and its line, (1 + sizes,)."""
    centre = np.log2(X[list(SIZES)].to_numpy(np.float64)).mean(axis=0)
    design = _design(X, centre)
    penalty = np.diag([0.0, *[_RIDGE] * len(SIZES)])
    line = np.linalg.solve(design.T @ design + penalty, design.T @ error)
    return centre, np.asarray(line, dtype=np.float64)


def _design(X: pd.DataFrame, centre: Array) -> Array:
    return np.column_stack([np.ones(len(X)), np.log2(X[list(SIZES)].to_numpy(np.float64)) - centre])
