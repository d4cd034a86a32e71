"""Errors that cost models raise. The command line prints their one sentence and exits with the code for bad data."""

from latbench.errors import BadData


class Unanchored(BadData, ValueError):
    """No measurement supports this prediction: its shape, kernel or sparsity lies outside the training rows."""


class Uncalibrated(BadData, ValueError):
    """Too few measurements to calibrate a prediction interval."""


class MixedModes(BadData, ValueError):
    """Rows of several devices, backends, dtypes or ways of measuring, which cannot share one model."""


class BadRows(BadData, ValueError):
    """Rows without the columns or values that a cost model needs."""


class BadModel(BadData, ValueError):
    """A model file that is missing, malformed, of another version or fitted to another table."""
