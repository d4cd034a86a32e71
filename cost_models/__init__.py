"""Cost models: seconds of a layer that was not measured, with an interval, as scikit-learn estimators."""

from cost_models.boosted import Boosted
from cost_models.choosing import Adaptive
from cost_models.errors import BadModel, MixedModes, Unanchored, Uncalibrated
from cost_models.lookup import AnchoredLookup
from cost_models.rows import read_training_rows, training_rows
from cost_models.storage import ModelFile, load, read, save
from cost_models.validation import validate

__all__ = [
    "Adaptive",
    "AnchoredLookup",
    "BadModel",
    "Boosted",
    "MixedModes",
    "ModelFile",
    "Unanchored",
    "Uncalibrated",
    "load",
    "read",
    "read_training_rows",
    "save",
    "training_rows",
    "validate",
]
