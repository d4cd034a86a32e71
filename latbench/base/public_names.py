"""The names that `import latbench as lb` gives, and where each is defined. They are imported at their first use.

The stub `latbench/__init__.pyi` states the same for type checkers.
"""

from __future__ import annotations

import importlib
from typing import Any

PUBLIC_NAMES = {
    # a pruned model of one's own
    "load": "search.export.load_model:load_model",
    "load_pruned": "search.pruning.storage.model_folder:load_pruned",
    "save_pruned": "search.pruning.storage.model_folder:save_pruned",
    "convert": "sparse_kernels.convert:convert",
    "LayerPattern": "sparse_kernels.convert:LayerPattern",
    "quantize": "search.pruning.one_shot.quantize_model:quantize",
    "patterns": "sparse_kernels.patterns",
    # which option each layer takes
    "Problem": "search.problem.problem:Problem",
    "problem_from_table": "search.inputs.latency_table:problem_from_table",
    "problem_from_frame": "search.inputs.option_frame:problem_from_frame",
    "problem_from_spdy": "search.inputs.spdy_timings:problem_from_spdy",
    "solve": "search.knapsack.one_budget:solve",
    "solve_two": "search.knapsack.two_budgets:solve_two",
    "frontier": "search.knapsack.pareto:frontier",
    # tables, and models that predict what they lack
    "read_table": "latbench.tables.table:read_table",
    "read_training_rows": "cost_models.rows.training_rows:read_training_rows",
    "rows": "cost_models.rows.build_rows:build_rows",
    "group_by_shape": "cost_models.rows.shape_groups:group_by_shape",
    "AnchoredLookup": "cost_models.estimators.anchored_lookup:AnchoredLookup",
    "Boosted": "cost_models.estimators.boosted:Boosted",
    "Hybrid": "cost_models.estimators.hybrid:Hybrid",
    "Roofline": "cost_models.estimators.roofline:Roofline",
    "Transfer": "cost_models.estimators.transfer:Transfer",
}
"""Name -> "module:attribute", or a module."""


def find_public(name: str) -> Any:
    """Return what a public name stands for. Raises AttributeError for another name."""
    if name == "__version__":
        from importlib.metadata import version

        return version("latbench")
    if name not in PUBLIC_NAMES:
        raise AttributeError(f"module 'latbench' has no attribute {name!r}; it has {', '.join(PUBLIC_NAMES)}")
    module, _, attribute = PUBLIC_NAMES[name].partition(":")
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found
