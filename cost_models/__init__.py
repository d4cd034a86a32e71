"""Cost models: seconds of a layer that was not measured, with an interval, as scikit-learn estimators."""

from cost_models.boosted import Boosted
from cost_models.choosing import Adaptive
from cost_models.errors import BadModel, MixedModes, Unanchored, Uncalibrated
from cost_models.hold_outs import hold_outs
from cost_models.hybrid import Hybrid
from cost_models.lookup import AnchoredLookup
from cost_models.roofline import Roofline
from cost_models.rows import read_training_rows, training_rows
from cost_models.storage import ModelFile, load, read, save
from cost_models.transfer import Transfer
from cost_models.validation import CostModel, validate, validate_held_out

__all__ = [
    "Adaptive",
    "AnchoredLookup",
    "BadModel",
    "Boosted",
    "CostModel",
    "Hybrid",
    "MixedModes",
    "ModelFile",
    "Roofline",
    "Transfer",
    "Unanchored",
    "Uncalibrated",
    "hold_outs",
    "load",
    "read",
    "read_training_rows",
    "save",
    "training_rows",
    "validate",
    "validate_held_out",
]
