"""A roofline with fitted rates: so much a call, a multiplication, a byte, and no rate but what the table shows.

Work and traffic add up instead of overlapping, which describes most measured kernels better than their maximum does,
and keeps the fit a convex one. Every rate is positive, so it extrapolates without surprises: it is what `Boosted`
corrects inside the measured range.

What it does not know: which kernel a library picks, and anything else but its sums of work. It says
so by its intervals.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from cost_models import frontier
from cost_models.learned import Learned
from cost_models.rows import Array, shape_groups
from cost_models.work import FORMS, amounts, fitted_rates

FEWEST_SHAPES = 50  # to choose a form by: a fifth of them is then ten


@dataclass(frozen=True)
class Rates:
    """Fitted rates of a form of work (`cost_models.work`), seconds a unit: rates (terms,)."""

    form: str
    formats: tuple[str, ...]
    rates: Array

    def __call__(self, X: pd.DataFrame) -> Array:
        """The logarithm of the seconds of every row of X, (rows,)."""
        return np.log(amounts(X, self.form, self.formats) @ self.rates)


class Roofline(Learned):
    """Sums of work at fitted rates, one model a device, backend and way of measuring.

    Parameters: form, of `cost_models.work.FORMS`; None takes the one that predicts the smallest and the largest fifth
    of the shapes best from the others, and `plain` where there are fewer than 50. Others as of `Learned`.
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

    def _learn(self, X: pd.DataFrame, seconds: Array) -> Rates:
        return fitted(X, seconds, tuple(sorted(self.encoder_.levels["format"])), self.form)


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
