"""The structure that a sparsity pattern gives a weight: its format and the size of its blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Self

import numpy as np
import numpy.typing as npt
import pandas as pd

from latbench.tables.layer_columns import derive_pattern_columns


@dataclass(frozen=True)
class PatternStructure:
    """The format and block size that follow from the pattern of every row.

    Attributes
    ----------
    format : ndarray of object, shape (rows,)
        Storage format, such as "nm" or "shflbw".
    unit_rows, unit_columns : ndarray of int, shape (rows,)
        Rows and columns of a block that is kept or pruned as a whole; 1 where the pattern has none.
    """

    format: npt.NDArray[np.object_]
    unit_rows: npt.NDArray[np.int64]
    unit_columns: npt.NDArray[np.int64]

    @classmethod
    def from_rows(cls, X: pd.DataFrame) -> Self:
        """Return the structure of the column `pattern`.

        Raises ValueError for an unknown pattern and TypeError for a missing one.
        """
        codes, patterns = pd.factorize(X["pattern"].to_numpy(object), use_na_sentinel=False)
        structures = [_parse_structure(pattern) for pattern in patterns]
        return cls(
            np.array([format for format, *_ in structures], object)[codes],
            np.array([rows for _, rows, _ in structures], np.int64)[codes],
            np.array([columns for *_, columns in structures], np.int64)[codes],
        )


def add_structure(X: pd.DataFrame) -> pd.DataFrame:
    """Return a copy of X with the columns format, unit_rows and unit_columns of its `PatternStructure`."""
    return X.assign(**vars(PatternStructure.from_rows(X)))


@cache
def _parse_structure(pattern: str) -> tuple[str, int, int]:
    columns = derive_pattern_columns(pattern)
    return columns["format"], columns["block_h"] or columns["v"] or 1, columns["block_w"] or columns["nm_m"] or 1
