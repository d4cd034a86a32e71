"""What a layer's time is made of: amounts of work, each of which takes so many seconds a unit.

The forms differ in what they count, each with all of the one before:

    plain   a call, multiplications (of each format), bytes of weight, input and output
    cached  multiplications whose weight or input does not fit into a cache of 1 to 256 MiB
    sized   multiplications beyond 1024, 4096 or 16384 output features, input features or tokens

and one of its own for our CPU kernels:

    kernels what they are known to repeat, fill up and copy (`cost_models.loops`)

The rates are fitted to a table, so no data sheet is needed, and none is negative, so that more work takes longer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from cost_models import loops
from cost_models.features import SIZES, Physics, Structure
from cost_models.rows import Array
from latbench.base.engine_registry import NUMBA

FORMS = ("plain", "cached", "sized")
OWN_KERNELS = "kernels"

_CACHE_BYTES = tuple(2**exponent for exponent in (20, 22, 24, 26, 28))
_LARGE = (1024, 4096, 16384)

# Times far from a call's own say nothing about it, and without a word on it the fit may take it for nothing. It is
# said to be about a third of a short measurement, with the weight of few rows: any that do tell overrule it.
_CALL_SHARE, _CALL_WEIGHT = 0.3, 0.003
_STEPS = 6
_LARGE_ERROR = 0.1  # in log seconds; a larger one counts in proportion, not squared


def amounts(X: pd.DataFrame, form: str, formats: Sequence[str]) -> Array:
    """How much work every row of X is, (rows, terms), the call first; `formats` have rates of their own."""
    if form == OWN_KERNELS:
        return loops.amounts(X, formats)
    format, physics = Structure.of(X).format, Physics.of(X)
    kept, m, k, n = physics.flop_kept, *(X[name].to_numpy(np.float64) for name in SIZES)
    terms = [np.ones(len(X)), *(np.where(format == name, kept, 0.0) for name in formats)]
    terms += [physics.weight_bytes, physics.input_bytes, physics.output_bytes]
    depth = FORMS.index(form)
    if depth >= FORMS.index("cached"):
        for moved in (physics.weight_bytes, physics.input_bytes):
            terms += [kept * moved / (moved + cache) for cache in _CACHE_BYTES]
    if depth >= FORMS.index("sized"):
        terms += [kept * np.maximum(0.0, 1 - large / size) for size in (m, k, n) for large in _LARGE]
    return np.stack(terms, axis=1)


def own_form(X: pd.DataFrame) -> str | None:
    """The form of our CPU kernels where all rows of X are theirs."""
    return OWN_KERNELS if "backend" in X.columns and X["backend"].eq(NUMBA).all() else None


def fitted_rates(work: Array, seconds: Array) -> Array:
    """Seconds a unit of each term, (terms,), none negative, that bring `work @ rates` close to `seconds` in ratio.

    Huber's loss of log(predicted / measured), by Gauss-Newton steps; each is a non-negative least-squares problem.
    """
    scale = np.maximum(work.mean(axis=0), np.finfo(float).tiny)
    call = np.zeros((1, work.shape[1]))
    call[0, 0] = 1.0
    rows = np.concatenate([work / scale, call])
    truth = np.append(seconds, _CALL_SHARE * np.quantile(seconds, 0.01))
    trust = np.append(np.ones(len(seconds)), (_CALL_WEIGHT * len(seconds)) ** 0.5)
    predicted, weight = truth, trust
    for _ in range(_STEPS):
        rates, _ = nnls(rows * (weight / predicted)[:, None], weight * (1 + np.log(truth / predicted)))
        predicted = np.maximum(rows @ rates, 1e-3 * truth)
        error = np.abs(np.log(predicted / truth))
        weight = trust * np.sqrt(_LARGE_ERROR / np.maximum(error, _LARGE_ERROR))
    return np.asarray(rates / scale, dtype=np.float64)
