"""The error of each option of a layer: of its outputs, of its weights, or from a user's file."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from latbench.errors import BadData
from search.inputs.option_frame import read_frame
from search.problem.error_table import LayerErrors, convert_frame_to_errors
from search.problem.layers import Option
from search.problem.problem import Problem

if TYPE_CHECKING:
    from torch import nn

    from search.artifacts.layer_database import Database

KINDS = ("output", "weight")


def read_output_errors(problem: Problem, database: Database) -> LayerErrors:
    """Read |dy|^2 / |y|^2 of each layer's outputs y on the calibration data from the database."""
    return _collect(problem, database.error)


def compute_weight_errors(problem: Problem, database: Database, model: nn.Module) -> LayerErrors:
    """Return |dW|^2 / |W|^2 of each layer, from the pruned weights in the database and the dense ones of `model`.

    What layers in eight bits lose of their inputs does not count.
    """
    from sparse_kernels.prunable_layers import weight_matrix

    def error(layer: str, it: Option) -> float:
        dense = weight_matrix(model.get_submodule(layer)).double().numpy()
        pruned = database.get(layer, it).weight.double().numpy()
        whole = float((dense**2).sum())
        return float(((pruned - dense) ** 2).sum()) / whole if whole else 0.0

    return _collect(problem, error)


def read_errors(path: Path) -> LayerErrors:
    """Read errors from a CSV or Parquet file with the columns of `convert_frame_to_errors`. Raises BadData."""
    frame = read_frame(path)
    try:
        return convert_frame_to_errors(frame)
    except BadData as error:
        raise BadData(f"{path}: {error}") from error


def _collect(problem: Problem, error: Callable[[str, Option], float]) -> LayerErrors:
    """Return the errors of all options that change a layer; NaN, from outputs that overflow, becomes infinity."""

    def compute(layer: str, it: Option) -> float:
        value = error(layer, it)
        return math.inf if math.isnan(value) else value

    return {
        part.name: {it: compute(part.name, it) for it in part.options if it.in_database is not None}
        for layer in problem.layers
        for part in layer.parts
    }
