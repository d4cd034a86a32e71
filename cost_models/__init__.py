"""Cost models: scikit-learn estimators that predict the seconds of layers without a measurement, with intervals."""

from cost_models.adaptive_planner import AdaptivePlanner
from cost_models.estimators.anchored_lookup import AnchoredLookup
from cost_models.estimators.boosted import Boosted
from cost_models.estimators.hybrid import Hybrid
from cost_models.estimators.roofline import Roofline
from cost_models.estimators.transfer import Transfer
from cost_models.evaluation.held_out_errors import CostModel, evaluate, evaluate_held_out
from cost_models.evaluation.hold_outs import build_hold_outs
from cost_models.model_file import ModelFile, load, read, save
from cost_models.refusals import BadModel, MixedModes, Unanchored, Uncalibrated
from cost_models.rows.training_rows import read_training_rows, select_training_rows

__all__ = [
    "AdaptivePlanner",
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
    "build_hold_outs",
    "evaluate",
    "evaluate_held_out",
    "load",
    "read",
    "read_training_rows",
    "save",
    "select_training_rows",
]
