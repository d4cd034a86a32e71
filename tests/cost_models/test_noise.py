"""Noise: simulated measurements whose errors are known, against what their rows are taken to say."""

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from cost_models.uncertainty.timing_noise import estimate_noise, estimate_noise_floor
from latbench.tables.time_summary import summarise_samples

Table = Callable[..., pd.DataFrame]
Seconds = Callable[[pd.DataFrame], np.ndarray]


def _measured(X: pd.DataFrame, truth: np.ndarray, rng: np.random.Generator, *, within: float, halves: float,
              between: float) -> tuple[pd.DataFrame, np.ndarray]:  # fmt: skip
    """Rows of 30 samples: each scatters by `within`, each half by `halves` more, each row by `between` more."""
    rows, count = [], 30
    for _ in truth:
        speed = rng.lognormal(0, between)
        samples = speed * rng.lognormal(0, within, count) * np.repeat(rng.lognormal(0, halves, 2), count // 2)
        reference = speed * np.exp(rng.normal(0, 1e-4))
        drift = np.median(samples[count // 2 :]) / np.median(samples[: count // 2])
        rows.append(summarise_samples(list(samples)) | {"drift_ratio": drift, "reference_ratio": reference})
    found = pd.DataFrame(rows)
    seconds = truth * found["median_seconds"].to_numpy()
    columns = ["low_seconds", "high_seconds"]
    found[columns] = found[columns].mul(truth, axis=0)
    return pd.concat([X, found[[*columns, "drift_ratio", "reference_ratio"]]], axis=1), seconds


@pytest.mark.parametrize(
    ("within", "halves", "between"), [(0.05, 0.0, 0.0), (0.01, 0.03, 0.0), (0.01, 0.0, 0.03), (0.02, 0.02, 0.02)]
)
def test_the_floor_is_the_median_error_of_who_knows_the_truth(
    within: float, halves: float, between: float, table: Table, seconds: Seconds, rng: np.random.Generator
) -> None:
    X = table()
    truth = seconds(X)
    X, y = _measured(X, truth, rng, within=within, halves=halves, between=between)
    floor = estimate_noise_floor(X)
    assert floor is not None
    # 324 rows: their median error has a standard error of 0.8 / sqrt(324) = 5%. An interval by order statistics has
    # 95% and more, and of a median and of halves only the typical size is known: a quarter in all.
    assert floor == pytest.approx(np.median(np.abs(truth / y - 1)), rel=0.25)


def test_rows_of_unlike_noise_are_a_mixture(table: Table, rng: np.random.Generator) -> None:
    X = table(shapes=[(m, 8, 8) for m in range(1, 3001)], patterns=["dense"], sparsities=(0.0,))
    deviation = np.where(np.arange(len(X)) % 3 == 0, 0.3, 0.01)
    X = X.assign(low_seconds=np.exp(-1.959964 * deviation), high_seconds=np.exp(1.959964 * deviation))
    errors = np.abs(np.expm1(rng.normal(0, deviation)))
    np.testing.assert_allclose(estimate_noise(X), deviation, rtol=1e-6)
    # The median of 3000 draws, whose density there is about 25: a standard error of 0.5 / sqrt(3000) / 25 = 0.0004.
    assert estimate_noise_floor(X) == pytest.approx(np.median(errors), abs=4 * 0.0004)


def test_a_reference_that_differs_between_curves_is_no_noise(table: Table) -> None:
    X = table()
    bound = X.groupby(["m", "k", "n", "pattern"]).ngroup()
    X = X.assign(low_seconds=1 / 1.01, high_seconds=1.01, reference_ratio=1 + 0.1 * (bound % 5))
    assert estimate_noise_floor(X) == estimate_noise_floor(X.drop(columns="reference_ratio"))


def test_what_has_no_interval_has_no_floor(table: Table) -> None:
    X = table()
    assert estimate_noise_floor(X) is None and np.isnan(estimate_noise(X)).all()
    none = X.assign(low_seconds=np.nan, high_seconds=np.nan, drift_ratio=np.nan, reference_ratio=np.nan)
    assert estimate_noise_floor(none) is None


def test_some_rows_are_as_noisy_as_all_rows_tell(table: Table, seconds: Seconds, rng: np.random.Generator) -> None:
    """One row a curve says nothing of how the reference varies between the points of a curve."""
    X = table()
    X, _ = _measured(X, seconds(X), rng, within=0.001, halves=0.0, between=0.03)
    one = X["sparsity_target"].eq(X["sparsity_target"].iloc[0]).to_numpy()
    every, some, alone = estimate_noise_floor(X), estimate_noise_floor(X, one), estimate_noise_floor(X[one])
    assert every is not None and some == pytest.approx(every, rel=0.02)
    assert alone is not None and alone < every / 5
