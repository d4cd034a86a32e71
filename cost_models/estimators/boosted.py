"""A learned model: gradient-boosted trees on how far a layer's time is from its work, for unmeasured shapes.

Trees cannot extrapolate, so they learn the logarithm of seconds over sums of work, which do.
Beyond the measured range they keep the correction of its edge. Of our own CPU kernels it is known what work they do
(`loops`); of others it is a fitted roofline.

What it does not know: another device, backend, dtype or way of measuring (a model is of one), a kernel or format it
has not seen. It refuses them. Shapes that were measured are better served by `AnchoredLookup`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
from sklearn.ensemble import HistGradientBoostingRegressor
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

from cost_models.estimators import roofline
from cost_models.estimators.learned_model import Learned
from cost_models.estimators.roofline import Rates
from cost_models.features.layer_work import Encoder
from cost_models.features.work_terms import own_form
from cost_models.rows.row_keys import Array

LEAF = 5  # rows of a leaf, at least


@dataclass(frozen=True)
class Trees:
    """What corrects the logarithm of seconds: fitted by `grown`."""

    fitted: HistGradientBoostingRegressor

    def __call__(self, features: Array) -> Array:
        """The correction of every row of `features` (rows, features), (rows,)."""
        with _one_thread():
            return np.asarray(self.fitted.predict(features), dtype=np.float64)


def grown(features: Array, correction: Array, min_samples_leaf: int = LEAF, **parameters: Any) -> Trees:
    """Trees that tell `correction` (rows,) from `features` (rows, features); parameters: scikit-learn's."""
    # Absolute errors: single measurements go wrong by much. 3-14% better on five GPUs timed once a shape.
    trees = HistGradientBoostingRegressor(
        loss="absolute_error", early_stopping=False, min_samples_leaf=min_samples_leaf, **parameters
    )
    # What means nothing for any of these rows: scikit-learn cannot bin it.
    known = np.where(np.isnan(features).all(axis=0), 0.0, features)
    with _one_thread():
        trees.fit(known, correction)
    return Trees(trees)


@dataclass(frozen=True)
class Corrected:
    """Sums of work, and the trees that correct their logarithm."""

    base: Rates
    encoder: Encoder
    trees: Trees

    def __call__(self, X: pd.DataFrame) -> Array:
        """The logarithm of the seconds of every row of X, (rows,)."""
        return self.base(X) + self.trees(self.encoder.matrix(X))


class Boosted(Learned):
    """Gradient-boosted trees on log(seconds / sums of work), one model a device, backend and way of measuring.

    Parameters: max_iter, learning_rate, max_leaf_nodes and min_samples_leaf of the trees; form of the sums, of
    `cost_models.features.work_terms`: None takes that of our kernels for backend numba, else the one that `Roofline` would choose.
    Others as of `Learned`.
    """

    def __init__(
        self,
        max_iter: int = 150,
        learning_rate: float = 0.1,
        max_leaf_nodes: int = 31,
        min_samples_leaf: int = LEAF,
        form: str | None = None,
        folds: int = 5,
        allow_extrapolation: bool = False,
        random_state: int = 0,
    ) -> None:
        self.max_iter = max_iter
        self.learning_rate = learning_rate
        self.max_leaf_nodes = max_leaf_nodes
        self.min_samples_leaf = min_samples_leaf
        self.form = form
        self.folds = folds
        self.allow_extrapolation = allow_extrapolation
        self.random_state = random_state

    def _learn(self, X: pd.DataFrame, seconds: Array) -> Corrected:
        formats = tuple(sorted(self.encoder_.levels["format"]))
        base = roofline.fitted(X, seconds, formats, self.form or own_form(X))
        trees = grown(
            self.encoder_.matrix(X),
            np.log(seconds) - base(X),
            max_iter=self.max_iter,
            learning_rate=self.learning_rate,
            max_leaf_nodes=self.max_leaf_nodes,
            min_samples_leaf=self.min_samples_leaf,
            random_state=self.random_state,
        )
        return Corrected(base, self.encoder_, trees)


def _one_thread() -> AbstractContextManager[Any]:
    """A table is small: one thread is as fast, and OpenMP's spinning ones are 15 times slower on a busy machine."""
    limits: AbstractContextManager[Any] = _pools().limit(limits=1, user_api="openmp")
    return limits


@cache
def _pools() -> ThreadpoolController:
    """The pools of the libraries that are loaded, scikit-learn's among them; to look for them takes 4 ms."""
    return ThreadpoolController()
