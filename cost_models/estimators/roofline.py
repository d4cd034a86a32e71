"""A roofline with fitted rates: one rate for a call, a multiplication and a byte, all taken from the table.

Work and traffic add up instead of overlapping (Williams, Waterman and Patterson 2009 take their maximum). The sum
describes most measured kernels better than the maximum, and the fit is convex. Rates are not negative, so predictions
beyond the measured range rise with the work. `Boosted` corrects this model inside the range. Each requested kernel
and each number of threads has its own rates.

Not modelled: which kernel a library selects, layouts, epilogues, and all that its sums of work leave out. The
intervals show it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from cost_models.estimators.learned_model import LearnedModel
from cost_models.features.measured_ranges import select_outer_fifths
from cost_models.features.pattern_structure import add_structure
from cost_models.features.work_terms import FORMS, count_work, fit_rates
from cost_models.rows.row_keys import FloatArray, extract_keys
from cost_models.rows.shape_groups import count_shapes

FEWEST_SHAPES = 50  # to select a form: a fifth of them is then ten

ENGINE_COLUMNS = ("kernel_requested", "threads")
"""Columns whose values have separate rates, if the table has them."""


@dataclass(frozen=True)
class WorkRates:
    """Fitted rates of the work terms of a form.

    Attributes
    ----------
    form : str
        A form of `cost_models.features.work_terms`.
    formats : tuple of str
        Storage formats; each has a multiplication rate of its own.
    rates : ndarray of shape (terms,)
        Seconds per unit of work.
    """

    form: str
    formats: tuple[str, ...]
    rates: FloatArray

    def __call__(self, X: pd.DataFrame) -> FloatArray:
        """Return the logarithm of the seconds of every row of X, (rows,)."""
        return np.log(count_work(X, self.form, self.formats) @ self.rates)


@dataclass(frozen=True)
class RatesByEngine:
    """Separate rates for each engine, a combination of values of `columns`.

    Attributes
    ----------
    columns : tuple of str
        The columns that identify an engine.
    engines : mapping of tuple to WorkRates
        Rates by engine.
    measured : frozenset of tuple
        The measured combinations of engine and format.
    pooled : WorkRates
        Rates of all rows, for an engine without measurements of a format.
    """

    columns: tuple[str, ...]
    engines: Mapping[tuple[Hashable, ...], WorkRates]
    measured: frozenset[tuple[Hashable, ...]]
    pooled: WorkRates

    def __call__(self, X: pd.DataFrame) -> FloatArray:
        """Return the logarithm of the seconds of every row of X, (rows,)."""
        log_seconds = self.pooled(X)
        for key, rows in _group_rows(_extract_engine_formats(X, self.columns)).items():
            if key in self.measured:
                log_seconds[rows] = self.engines[key[:-1]](X.iloc[rows])
        return log_seconds


class Roofline(LearnedModel):
    """Sums of work at fitted rates, for one device, backend and way of measuring.

    Parameters
    ----------
    form : str or None
        One of `cost_models.features.work_terms.FORMS`. None selects the form that predicts the smallest and the
        largest fifth of the shapes best from the others; for fewer than 50 shapes it selects "plain".
    folds, allow_extrapolation, random_state
        As of `LearnedModel`.

    Attributes
    ----------
    engine_columns_ : tuple of str
        Those of ENGINE_COLUMNS that the training rows have.
    engine_formats_ : frozenset of tuple
        The measured combinations of their values and the format. Others are refused, extrapolating or not.

    See Also
    --------
    LearnedModel : The other fitted attributes, and the methods.
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
        self.engine_columns_ = tuple(name for name in ENGINE_COLUMNS if name in X.columns and X[name].notna().any())
        self.engine_formats_ = frozenset(_extract_engine_formats(X, self.engine_columns_))

    def _learn(self, X: pd.DataFrame, seconds: FloatArray) -> WorkRates | RatesByEngine:
        formats = tuple(sorted(self.encoder_.levels["format"]))
        pooled = fit_work_rates(X, seconds, formats, self.form)
        engines = _group_rows(extract_keys(X, self.engine_columns_))
        if len(engines) == 1:
            return pooled
        rates = {
            engine: fit_work_rates(X.iloc[rows], seconds[rows], formats, self.form)
            for engine, rows in engines.items()
        }
        measured = frozenset(_extract_engine_formats(X, self.engine_columns_))
        return RatesByEngine(self.engine_columns_, rates, measured, pooled)

    def _find_problems(self, X: pd.DataFrame, extrapolate: bool) -> list[str | None]:
        problems = super()._find_problems(X, extrapolate)
        engine_formats = _extract_engine_formats(X, self.engine_columns_)
        return [
            problem or (None if key in self.engine_formats_ else self._explain_unmeasured(key))
            for problem, key in zip(problems, engine_formats, strict=True)
        ]

    def _explain_unmeasured(self, engine_format: tuple[Hashable, ...]) -> str:
        *engine, format = engine_format
        values = " and ".join(f"{name} {value}" for name, value in zip(self.engine_columns_, engine, strict=True))
        return f"nothing of format {format} was measured with {values}, and each has rates of its own; measure it"


def fit_work_rates(X: pd.DataFrame, seconds: FloatArray, formats: tuple[str, ...], form: str | None) -> WorkRates:
    """Fit the rates of a form of work to X and seconds (rows,); None selects the form that extrapolates best."""
    form = form or select_form(X, seconds, formats)
    return WorkRates(form, formats, fit_rates(count_work(X, form, formats), seconds))


def select_form(X: pd.DataFrame, seconds: FloatArray, formats: tuple[str, ...]) -> str:
    """Return the form of work that predicts the smallest and the largest fifth of the shapes best from the others."""
    if count_shapes(X) < FEWEST_SHAPES:
        return "plain"
    edges = select_outer_fifths(X).values()
    errors = {}
    for form in FORMS:
        work = count_work(X, form, formats)
        predicted = (work[edge] @ fit_rates(work[~edge], seconds[~edge]) for edge in edges)
        edge_errors = (np.abs(np.log(p / seconds[edge])) for p, edge in zip(predicted, edges, strict=True))
        errors[form] = sum(float(np.median(error)) for error in edge_errors)
    return min(errors, key=errors.__getitem__)


def _group_rows(keys: Iterable[tuple[Hashable, ...]]) -> dict[tuple[Hashable, ...], list[int]]:
    """Return the row numbers of each key."""
    rows: dict[tuple[Hashable, ...], list[int]] = {}
    for row, key in enumerate(keys):
        rows.setdefault(key, []).append(row)
    return rows


def _extract_engine_formats(X: pd.DataFrame, engine: tuple[str, ...]) -> list[tuple[Hashable, ...]]:
    """Return the engine and the format of each row."""
    return extract_keys(add_structure(X), [*engine, "format"])
