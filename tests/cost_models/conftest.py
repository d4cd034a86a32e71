"""A synthetic table: times from a formula, with noise whose size is known."""

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import pytest

SHAPES = [(m, k, n) for m in (64, 256, 1000) for k in (48, 320, 1024) for n in (1, 37, 128)]
SPARSITIES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


def _seconds(X: pd.DataFrame) -> np.ndarray:
    """A kernel that does 10 GFLOP/s on what is kept, moves 20 GB/s and costs a microsecond to call."""
    kept = X["m"] * X["k"] * (1 - X["sparsity_target"])
    moved = 4 * (1.5 * kept + X["k"] * X["n"] + X["m"] * X["n"])
    return (2 * kept * X["n"] / 10e9 + moved / 20e9 + 1e-6).to_numpy(float)


def _table(
    shapes: Sequence[tuple[int, int, int]] = SHAPES,
    patterns: Sequence[str] = ("vector:32", "unstructured"),
    sparsities: Sequence[float] = SPARSITIES,
) -> pd.DataFrame:
    """The key columns of a sweep of linear layers."""
    rows = [
        {"m": m, "k": k, "n": n, "pattern": pattern, "sparsity_target": sparsity}
        for m, k, n in shapes
        for pattern in patterns
        for sparsity in sparsities
    ]
    constant = {
        "purpose": "sweep", "device": "a-cpu", "backend": "numba", "op": "linear", "model": "",
        **dict.fromkeys(("batch", "c_in", "h", "w", "c_out", "kh", "kw"), np.nan),
        "dtype_w": "float32", "dtype_a": "float32", "dtype_out": "float32", "layout": "token_major",
        "epilogue": "bias", "kernel_requested": "auto", "context": "isolated", "cache_mode": "rotated",
        "launch_mode": "call", "threads": 2, "pattern_seed": 0,
    }  # fmt: skip
    return pd.DataFrame(rows).assign(**constant)


@pytest.fixture
def table() -> Callable[..., pd.DataFrame]:
    """Makes key columns: table(shapes=..., patterns=..., sparsities=...)."""
    return _table


@pytest.fixture
def seconds() -> Callable[[pd.DataFrame], np.ndarray]:
    """The true time of every row."""
    return _seconds


@pytest.fixture
def noisy(rng: np.random.Generator) -> tuple[pd.DataFrame, np.ndarray]:
    """(X, y) with 2% log-normal noise."""
    X = _table()
    return X, _seconds(X) * rng.lognormal(0, 0.02, len(X))
