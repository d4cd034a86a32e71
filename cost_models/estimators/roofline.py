"""A roofline with fitted rates: so much a call, a multiplication, a byte, and no rate but what the table shows.

Work and traffic add up instead of overlapping, which describes most measured kernels better than their maximum does,
and keeps the fit a convex one. Every rate is positive, so it extrapolates without surprises: it is what `Boosted`
corrects inside the measured range. A kernel that was asked for, and a number of threads, has rates of its own.

What it does not know: which kernel a library picks, layouts, epilogues, and anything else but its sums of work. It
says so by its intervals.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from cost_models.estimators.learned_model import Learned
from cost_models.features import measured_ranges as frontier
from cost_models.features.layer_work import with_structure
from cost_models.features.work_terms import FORMS, amounts, fitted_rates
from cost_models.rows.row_keys import Array, keys, shape_groups

FEWEST_SHAPES = 50  # to choose a form by: a fifth of them is then ten

ENGINE = ("kernel_requested", "threads")  # as far as a table says them, their values have rates apart


@dataclass(frozen=True)
class Rates:
    """Fitted rates of a form of work (`cost_models.features.work_terms`), seconds a unit: rates (terms,)."""

    form: str
    formats: tuple[str, ...]
    rates: Array

    def __call__(self, X: pd.DataFrame) -> Array:
        """The logarithm of the seconds of every row of X, (rows,)."""
        return np.log(amounts(X, self.form, self.formats) @ self.rates)


@dataclass(frozen=True)
class Apart:
    """Rates of each engine, a value for each of `columns`; of all rows together for one that had none of a format."""

    columns: tuple[str, ...]
    engines: Mapping[tuple[Hashable, ...], Rates]
    known: frozenset[tuple[Hashable, ...]]
    together: Rates

    def __call__(self, X: pd.DataFrame) -> Array:
        """The logarithm of the seconds of every row of X, (rows,)."""
        log_seconds = self.together(X)
        for cell, rows in _rows_of(_cells(X, self.columns)).items():
            if cell in self.known:
                log_seconds[rows] = self.engines[cell[:-1]](X.iloc[rows])
        return log_seconds


class Roofline(Learned):
    """Sums of work at fitted rates, one model a device, backend and way of measuring.

    Parameters: form, of `cost_models.features.work_terms.FORMS`; None takes the one that predicts the smallest and the largest fifth
    of the shapes best from the others, and `plain` where there are fewer than 50. Others as of `Learned`.

    Fitted as `Learned`; engine_, which columns of ENGINE the rows have, and cells_, the values of these and of the
    format that were measured. Others are refused, extrapolating or not.
    """

    def __init__(
        self,
        form: str | None = "plain",
        folds: int = 5,
        allow_extrapolation: bool = False,
        random_state: int = 0,
    ) -> None:
        self.form = form
        self.folds = folds
        self.allow_extrapolation = allow_extrapolation
        self.random_state = random_state

    def _remember(self, X: pd.DataFrame) -> None:
        super()._remember(X)
        self.engine_ = tuple(name for name in ENGINE if name in X.columns and X[name].notna().any())
        self.cells_ = frozenset(_cells(X, self.engine_))

    def _learn(self, X: pd.DataFrame, seconds: Array) -> Rates | Apart:
        formats = tuple(sorted(self.encoder_.levels["format"]))
        together = fitted(X, seconds, formats, self.form)
        engines = _rows_of(keys(X, self.engine_))
        if len(engines) == 1:
            return together
        own = {name: fitted(X.iloc[rows], seconds[rows], formats, self.form) for name, rows in engines.items()}
        return Apart(self.engine_, own, frozenset(_cells(X, self.engine_)), together)

    def _problems(self, X: pd.DataFrame, extrapolate: bool) -> list[str | None]:
        found = super()._problems(X, extrapolate)
        cells = _cells(X, self.engine_)
        return [
            problem or (None if cell in self.cells_ else self._unmeasured(cell))
            for problem, cell in zip(found, cells, strict=True)
        ]

    def _unmeasured(self, cell: tuple[Hashable, ...]) -> str:
        *engine, format = cell
        said = " and ".join(f"{name} {value}" for name, value in zip(self.engine_, engine, strict=True))
        return f"nothing of format {format} was measured with {said}, and each has rates of its own; measure it"


def _rows_of(values: Iterable[tuple[Hashable, ...]]) -> dict[tuple[Hashable, ...], list[int]]:
    rows: dict[tuple[Hashable, ...], list[int]] = {}
    for row, value in enumerate(values):
        rows.setdefault(value, []).append(row)
    return rows


def _cells(X: pd.DataFrame, engine: tuple[str, ...]) -> list[tuple[Hashable, ...]]:
    """Each row's engine and format."""
    return keys(with_structure(X), [*engine, "format"])


def fitted(X: pd.DataFrame, seconds: Array, formats: tuple[str, ...], form: str | None) -> Rates:
    """The rates of a form of work, or of the one that extrapolates best."""
    form = form or _best_form(X, seconds, formats)
    return Rates(form, formats, fitted_rates(amounts(X, form, formats), seconds))


def _best_form(X: pd.DataFrame, seconds: Array, formats: tuple[str, ...]) -> str:
    if shape_groups(X).max() + 1 < FEWEST_SHAPES:
        return "plain"
    edges = frontier.fifths(X).values()
    errors = {}
    for form in FORMS:
        work = amounts(X, form, formats)
        predicted = (work[edge] @ fitted_rates(work[~edge], seconds[~edge]) for edge in edges)
        misses = (np.abs(np.log(p / seconds[edge])) for p, edge in zip(predicted, edges, strict=True))
        errors[form] = sum(float(np.median(miss)) for miss in misses)
    return min(errors, key=errors.__getitem__)
