"""The public names for type checkers: `latbench.base.public_names` says where each is found."""

from cost_models.estimators.anchored_lookup import AnchoredLookup
from cost_models.estimators.boosted import Boosted
from cost_models.estimators.hybrid import Hybrid
from cost_models.estimators.roofline import Roofline
from cost_models.estimators.transfer import Transfer
from cost_models.rows.build_rows import build_rows as rows
from cost_models.rows.shape_groups import group_by_shape
from cost_models.rows.training_rows import read_training_rows
from latbench.tables.table import read_table
from search.export.load_model import load_model as load
from search.inputs.latency_table import problem_from_table
from search.inputs.option_frame import problem_from_frame
from search.inputs.spdy_timings import problem_from_spdy
from search.knapsack.one_budget import solve
from search.knapsack.pareto import frontier
from search.knapsack.two_budgets import solve_two
from search.problem.problem import Problem
from search.pruning.one_shot.quantize_model import quantize
from search.pruning.storage.model_folder import load_pruned, save_pruned
from sparse_kernels import patterns
from sparse_kernels.convert import LayerPattern, convert

__all__ = [
    "MOST_SEED",
    "AnchoredLookup",
    "Boosted",
    "Hybrid",
    "LayerPattern",
    "Problem",
    "Roofline",
    "Transfer",
    "__version__",
    "convert",
    "frontier",
    "group_by_shape",
    "load",
    "load_pruned",
    "patterns",
    "problem_from_frame",
    "problem_from_spdy",
    "problem_from_table",
    "quantize",
    "read_table",
    "read_training_rows",
    "rows",
    "save_pruned",
    "solve",
    "solve_two",
]  # fmt: skip

MOST_SEED: int
__version__: str
