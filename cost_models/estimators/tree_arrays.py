"""Fitted trees as arrays: what scikit-learn holds, without its objects, so that a file can keep them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from cost_models.refusals import BadModel
from cost_models.rows.row_keys import FloatArray

_ROWS_AT_A_TIME = 4096
_DEEPEST = 1000  # a file might hold one long chain of nodes

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class TreeArrays:
    """Gradient-boosted trees, whose nodes lie one tree after the other.

    Attributes
    ----------
    baseline : float
        What is predicted without trees.
    roots : ndarray of int, shape (trees,)
        The first node of each tree.
    feature : ndarray of int, shape (nodes,)
        The feature that a node compares; -1 at a leaf.
    threshold : ndarray of shape (nodes,)
        A row goes left if its feature is at most this.
    missing_left : ndarray of bool, shape (nodes,)
        Whether a row without this feature goes left.
    left, right : ndarray of int, shape (nodes,)
        The next nodes, which lie behind; at a leaf the node itself.
    value : ndarray of shape (nodes,)
        What a leaf adds.
    """

    baseline: float
    roots: IntArray
    feature: IntArray
    threshold: FloatArray
    missing_left: npt.NDArray[np.bool_]
    left: IntArray
    right: IntArray
    value: FloatArray

    def __post_init__(self) -> None:
        arrays = self.feature, self.threshold, self.missing_left, self.left, self.right, self.value
        right = all(each.shape == (self.feature.size,) for each in arrays) and self.roots.ndim == 1
        numbers = self.feature, self.left, self.right, self.roots
        if not (right and all(each.dtype.kind == "i" for each in numbers)):
            raise BadModel("its trees are damaged")
        nodes = np.arange(len(self.feature))
        leaf = self.feature < 0
        for child in (self.left, self.right):
            # A child lies behind its node, so that every row comes to a leaf.
            right = right and bool(np.where(leaf, child == nodes, (child > nodes) & (child < len(nodes))).all())
        if not (right and ((self.roots >= 0) & (self.roots < len(nodes))).all()):
            raise BadModel("its trees are damaged")

    @classmethod
    def from_fitted(cls, fitted: Any) -> Self:
        """Return the trees of a fitted `HistGradientBoostingRegressor` without categorical features."""
        trees = [predictor.nodes for [predictor] in fitted._predictors]
        sizes = np.array([len(nodes) for nodes in trees], np.int32)
        roots = np.cumsum(sizes, dtype=np.int32) - sizes
        nodes = np.concatenate(trees)
        leaf, own = nodes["is_leaf"].astype(bool), np.arange(len(nodes), dtype=np.int32)
        behind = np.repeat(roots, sizes)
        left, right = (
            np.where(leaf, own, nodes[side].astype(np.int32) + behind).astype(np.int32) for side in ("left", "right")
        )
        return cls(
            float(np.asarray(fitted._baseline_prediction).item()),
            roots,
            np.where(leaf, -1, nodes["feature_idx"]).astype(np.int32),
            nodes["num_threshold"].astype(np.float64),
            nodes["missing_go_to_left"].astype(bool),
            left,
            right,
            nodes["value"].astype(np.float64),
        )

    def __call__(self, features: FloatArray) -> FloatArray:
        """Return the prediction for every row of `features` (rows, features), (rows,)."""
        parts = [
            self._predict(features[first : first + _ROWS_AT_A_TIME])
            for first in range(0, len(features), _ROWS_AT_A_TIME)
        ]
        return np.concatenate([np.empty(0), *parts])

    def _predict(self, features: FloatArray) -> FloatArray:
        if self.feature.max(initial=-1) >= features.shape[1]:
            raise BadModel("its trees have other features than its rows")
        rows = np.arange(len(features))[:, None]
        at = np.repeat(self.roots[None, :], len(features), axis=0)
        for _ in range(_DEEPEST):
            if (self.feature[at] < 0).all():
                break
            values = features[rows, np.maximum(self.feature[at], 0)]
            goes_left = np.where(np.isnan(values), self.missing_left[at], values <= self.threshold[at])
            at = np.where(goes_left, self.left[at], self.right[at])
        else:
            raise BadModel(f"its trees are deeper than {_DEEPEST}")
        return np.asarray(self.baseline + self.value[at].sum(axis=1), np.float64)
