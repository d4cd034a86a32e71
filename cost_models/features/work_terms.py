"""Work terms of a layer: amounts whose weighted sum is its time, with one fitted rate (seconds a unit) for each.

The forms differ in their terms; each has all terms of the one before:

    plain   one call, multiplications (of each format), bytes of weight, input and output
    cached  multiplications whose weight or input does not fit into a cache of 1 to 256 MiB
    sized   multiplications beyond 1024, 4096 or 16384 output features, input features or tokens

One more form is for this project's own CPU kernels:

    kernels the loops, padding and copies of these kernels (`cost_models.features.cpu_kernel_work`)

The rates are fitted to a table and need no data sheet. No rate is negative, so more work never takes less time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from cost_models.features.cpu_kernel_work import count_kernel_work
from cost_models.features.layer_work import SIZES, LayerWork
from cost_models.features.pattern_structure import PatternStructure
from cost_models.rows.row_keys import FloatArray
from latbench.base.engine_registry import NUMBA

FORMS = ("plain", "cached", "sized")
OWN_KERNELS = "kernels"

_CACHE_BYTES = tuple(2**exponent for exponent in (20, 22, 24, 26, 28))
_LARGE = (1024, 4096, 16384)

# Long times do not determine the cost of a call, and an unconstrained fit may set it to zero. One extra equation says
# that a call takes about a third of a short measurement. Its weight is that of few rows: short times overrule it.
_CALL_SHARE, _CALL_WEIGHT = 0.3, 0.003
_STEPS = 6
_LARGE_ERROR = 0.1  # Huber's threshold in log seconds: a larger error counts linearly, not squared


def count_work(X: pd.DataFrame, form: str, formats: Sequence[str]) -> FloatArray:
    """Return the amounts of work of every row.

    Parameters
    ----------
    X : DataFrame of shape (rows, columns)
        Columns of `latbench.tables.schema.KEY_COLUMNS`.
    form : str
        One of FORMS, or OWN_KERNELS.
    formats : sequence of str
        Storage formats; each has a multiplication rate of its own.

    Returns
    -------
    ndarray of shape (rows, terms)
        The first column is 1, the call.
    """
    if form == OWN_KERNELS:
        return count_kernel_work(X, formats)
    format, work = PatternStructure.from_rows(X).format, LayerWork.from_rows(X)
    kept, m, k, n = work.flop_kept, *(X[name].to_numpy(np.float64) for name in SIZES)
    terms = [np.ones(len(X)), *(np.where(format == name, kept, 0.0) for name in formats)]
    terms += [work.weight_bytes, work.input_bytes, work.output_bytes]
    depth = FORMS.index(form)
    if depth >= FORMS.index("cached"):
        for traffic in (work.weight_bytes, work.input_bytes):
            terms += [kept * traffic / (traffic + cache) for cache in _CACHE_BYTES]
    if depth >= FORMS.index("sized"):
        terms += [kept * np.maximum(0.0, 1 - large / size) for size in (m, k, n) for large in _LARGE]
    return np.stack(terms, axis=1)


def find_kernel_form(X: pd.DataFrame) -> str | None:
    """Return OWN_KERNELS if all rows are of the backend numba, this project's CPU kernels; otherwise None."""
    return OWN_KERNELS if "backend" in X.columns and X["backend"].eq(NUMBA).all() else None


def fit_rates(work: FloatArray, seconds: FloatArray) -> FloatArray:
    """Fit non-negative rates so that `work @ rates` is close to `seconds` in ratio.

    Minimizes Huber's loss of log(predicted / measured) by Gauss-Newton steps, each a non-negative least-squares
    problem (Huber 1964; Lawson and Hanson 1974).

    Parameters
    ----------
    work : ndarray of shape (rows, terms)
        As `count_work` returns it.
    seconds : ndarray of shape (rows,)
        Measured seconds.

    Returns
    -------
    ndarray of shape (terms,)
        Seconds per unit of each term.
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
