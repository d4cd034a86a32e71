"""The edge of what was measured: which shapes lie there, how far beyond it others do, and how wrong a model is there.

Shapes are ordered by work. A model of the inner ones is asked for those further out, on either side, with one, two or
three fifths of the shapes left out: nested rings. How its errors grow with the distance, and how large they are for
it, is what a model of all shapes is given as its interval beyond the edge, as bad as at the worst of the rings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import pandas as pd

from cost_models.features.layer_work import SIZES, Physics, with_structure
from cost_models.refusals import Uncalibrated
from cost_models.rows.row_keys import Array, shape_groups, sparsities
from cost_models.uncertainty.conformal import quantile, scatter

SIDES = ("smallest", "largest")
RINGS = 3

_KERNEL = ("kh", "kw", "stride_h", "stride_w", "dilation_h", "dilation_w")
_STRUCTURE = {"unit_rows": "rows of a block", "unit_columns": "columns of a block"}
_LEAST_DENSITY = 2.0**-10  # nothing is further from what was measured for being emptier still

Mask = npt.NDArray[np.bool_]
Ranges = Mapping[str, tuple[float, float]]


def fifths(X: pd.DataFrame, count: int = 1) -> dict[str, Mask]:
    """By side, (rows,) whether a row's shape is of the `count` fifths with the least or most multiplications; none of
    few.
    """
    shapes = shape_groups(X)
    _, first = np.unique(shapes, return_index=True)
    order = np.argsort(flop(X)[first], kind="stable")
    outside = len(order) // 5 * count
    return {
        "smallest": np.isin(shapes, order[:outside]),
        "largest": np.isin(shapes, order[len(order) - outside :]),
    }


def flop(X: pd.DataFrame) -> Array:
    """Multiplications and additions of the dense layer of every row, (rows,)."""
    return Physics.of(X).flop_dense


# Distance ---------------------------------------------------------------------------------------------------------


def ranges(X: pd.DataFrame, names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """The least and the largest value, in X, of each column in `names` and of what else a layer's time hangs on.

    That is its multiplications, the kernel, stride and dilation of a convolution, and for each format the size of its
    blocks and the density.
    """
    return {
        name: (float(np.nanmin(values)), float(np.nanmax(values)))
        for name, values in _measures(X, names).items()
        if not np.isnan(values).all()
    }


def octaves(X: pd.DataFrame, measured: Ranges) -> dict[str, Array]:
    """By side, (rows,) how many octaves a row is below or above the `measured` ranges where it is furthest; or 0."""
    _, below, above = _outside(X, measured)
    return {"smallest": below.max(axis=0, initial=0.0), "largest": above.max(axis=0, initial=0.0)}


def furthest(X: pd.DataFrame, measured: Ranges) -> list[tuple[str, float]]:
    """For every row of X, in what it is furthest outside the `measured` ranges, and by how many octaves; 0 inside."""
    names, below, above = _outside(X, measured)
    away = np.maximum(below, above)
    return [(names[place], float(away[place, row])) for row, place in enumerate(away.argmax(axis=0))]


def _outside(X: pd.DataFrame, measured: Ranges) -> tuple[list[str], Array, Array]:
    """The names in `measured`, and by how many octaves each row is (names, rows) below and above; at least 0."""
    found = _measures(X, [name for name in measured if name in X.columns])
    unknown = np.full(len(X), np.nan)
    values = np.stack([found.get(name, unknown) for name in measured])
    low, high = (np.array([limits[end] for limits in measured.values()])[:, None] for end in (0, 1))
    # What means nothing for a row, such as the stride of a linear layer, is NaN and outside of nothing.
    return list(measured), np.fmax(np.log2(low / values), 0.0), np.fmax(np.log2(values / high), 0.0)


def _measures(X: pd.DataFrame, names: Sequence[str]) -> dict[str, Array]:
    """By name, (rows,) what is compared with its range; NaN where it means nothing for a row."""
    X = with_structure(X)
    found = {name: X[name].to_numpy(np.float64) for name in names} | {"flop": flop(X)}
    convolution = X["op"].eq("conv2d").to_numpy() if "op" in X.columns else np.zeros(len(X), bool)
    for name in _KERNEL:
        if name in X.columns:
            found[f"{name} of a convolution"] = np.where(convolution, X[name].to_numpy(np.float64), np.nan)
    density = np.maximum(1 - sparsities(X), _LEAST_DENSITY)
    for format in sorted(set(X["format"])):
        own = X["format"].eq(format).to_numpy()
        found[f"density of {format}"] = np.where(own, density, np.nan)
        for name, words in _STRUCTURE.items():
            found[f"{words} of {format}"] = np.where(own, X[name].to_numpy(np.float64), np.nan)
    return found


# Calibration ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ring:
    """|log(predicted / measured)| of rows outside a core by a model of the core, (rows,); by how many octaves the
    rows lie beyond it, and their shapes; and the most octaves by which their work does.
    """

    errors: Array
    octaves: Array
    shapes: npt.NDArray[np.int64]
    work: float


@dataclass(frozen=True)
class Edge:
    """One side of what was measured: nested rings, and the typical error at the edge and per octave beyond it."""

    rings: tuple[Ring, ...]
    at_edge: float
    per_octave: float

    @classmethod
    def of(cls, rings: Sequence[Ring]) -> Self:
        """With the typical errors that the rings show."""
        away = np.concatenate([np.empty(0), *(ring.octaves for ring in rings)])
        errors = np.concatenate([np.empty(0), *(ring.errors for ring in rings)])
        return cls(tuple(rings), *scatter(away, errors))

    @property
    def reach(self) -> float:
        """How many octaves beyond a core's work a model of it could be tried; 0 where nothing could be left out."""
        return max((ring.work for ring in self.rings), default=0.0)

    def half_width(self, octaves: Array, coverage: float) -> Array:
        """Half of the interval of rows so many octaves beyond the edge, (rows,), in log seconds.

        Each ring, taken for the next one, would have needed some multiple of the typical error to hold this share of
        its shapes; the largest multiple is taken. Raises Uncalibrated where no ring has shapes enough to tell.
        """
        multiples = []
        for ring in self.rings:
            try:
                multiples.append(quantile(ring.errors / self._typical(ring.octaves), coverage, groups=ring.shapes))
            except Uncalibrated:
                continue
        if not multiples:
            most = max((len(set(ring.shapes)) for ring in self.rings), default=0)
            raise Uncalibrated(
                f"beyond the measured range an interval of {coverage * 100:g}% needs more than the {most} shapes "
                "that could be left out at this edge: measure more, or ask for a lower coverage"
            )
        return max(multiples) * self._typical(octaves)

    def _typical(self, octaves: Array) -> Array:
        return self.at_edge + self.per_octave * octaves


def edges(X: pd.DataFrame, errors: Callable[[Mask], Array]) -> dict[str, Edge]:
    """By side, the edge of X.

    errors: log(predicted / measured) of the rows of a mask, in their order, by a model of the other rows.
    """
    shapes = shape_groups(X)
    rings: dict[str, list[Ring]] = {side: [] for side in SIDES}
    for count in range(1, RINGS + 1):
        for side, outside in fifths(X, count).items():
            if outside.any():
                core = ranges(X[~outside], SIZES)
                away, work = (octaves(X[outside], of)[side] for of in (core, {"flop": core["flop"]}))
                rings[side].append(Ring(np.abs(errors(outside)), away, shapes[outside], float(work.max())))
    return {side: Edge.of(found) for side, found in rings.items()}
