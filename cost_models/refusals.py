"""What a cost model refuses, in one sentence; the command line prints it and exits with the code of bad data."""

from latbench.errors import BadData


class Unanchored(BadData, ValueError):
    """Nothing that was measured anchors this prediction."""


class Uncalibrated(BadData, ValueError):
    """Too little was measured to say how wrong a prediction may be."""


class MixedModes(BadData, ValueError):
    """Rows that must not share one model: another device, backend or way of measuring."""


class BadRows(BadData, ValueError):
    """Rows that say nothing a model could learn from or predict."""


class BadModel(BadData, ValueError):
    """A model file is missing, foreign, of another version or of another table."""
