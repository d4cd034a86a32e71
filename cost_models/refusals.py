"""Errors that cost models raise. The command line prints their one sentence and exits with the code for bad data."""

from collections.abc import Hashable, Mapping, Sequence

from latbench.errors import BadData


class Unanchored(BadData, ValueError):
    """No measurement supports this prediction: its shape, kernel or sparsity lies outside the training rows."""


class Ambiguous(Unanchored):
    """Several measurements fit a row that leaves columns open.

    Attributes
    ----------
    ways : list of dict
        For each measurement that fits, its values of the columns that are open.
    """

    def __init__(self, message: str, ways: Sequence[Mapping[str, Hashable]]) -> None:
        super().__init__(message)
        self.ways = list(ways)


class Uncalibrated(BadData, ValueError):
    """Too few measurements to calibrate a prediction interval."""


class MixedModes(BadData, ValueError):
    """Rows of several devices, backends, dtypes or ways of measuring, which cannot share one model."""


class BadRows(BadData, ValueError):
    """Rows without the columns or values that a cost model needs."""


class MissingColumns(BadRows):
    """Rows without columns that a learned model needs; `columns` are their names."""

    def __init__(self, columns: Sequence[str]) -> None:
        super().__init__(f"X has no column {', '.join(columns)}")
        self.columns = list(columns)


class BadModel(BadData, ValueError):
    """A model file that is missing, malformed, of another version or fitted to another table."""
