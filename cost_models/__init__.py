"""Cost models: seconds of a layer that was not measured, with an interval, as scikit-learn estimators."""

from cost_models.adaptive_planner import Adaptive
from cost_models.estimators.anchored_lookup import AnchoredLookup
from cost_models.estimators.boosted import Boosted
from cost_models.estimators.hybrid import Hybrid
from cost_models.estimators.roofline import Roofline
from cost_models.estimators.transfer import Transfer
from cost_models.evaluation.held_out_errors import CostModel, validate, validate_held_out
from cost_models.evaluation.hold_outs import hold_outs
from cost_models.model_file import ModelFile, load, read, save
from cost_models.refusals import BadModel, MixedModes, Unanchored, Uncalibrated
from cost_models.rows.row_keys import read_training_rows, training_rows

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
