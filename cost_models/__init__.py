"""Cost models: seconds of a layer that was not measured, with an interval, as scikit-learn estimators."""

from cost_models.errors import BadModel, MixedModes, Unanchored, Uncalibrated
from cost_models.lookup import AnchoredLookup
from cost_models.rows import training_rows

__all__ = ["AnchoredLookup", "BadModel", "MixedModes", "Unanchored", "Uncalibrated", "training_rows"]
