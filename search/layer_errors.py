"""What each option costs its layer in error: of its outputs, of its weights, or as a user says."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from latbench.errors import BadData
from search.layers import DENSE, Option, option
from search.problem import Problem

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from search.database import Database

KINDS = ("output", "weight")

Errors = dict[str, dict[Option, float]]


def output_errors(problem: Problem, database: Database) -> Errors:
    """|dy|^2 / |y|^2 of each layer's outputs on the calibration data, as the database has them."""
    return _each(problem, lambda layer, it: database.error(layer, it.pattern, it.sparsity))


def weight_errors(problem: Problem, database: Database, model: nn.Module) -> Errors:
    """|dW|^2 / |W|^2 of each layer, from the pruned weights in the database and the dense ones of `model`."""
    from sparse_kernels.nn import weight_matrix

    def error(layer: str, it: Option) -> float:
        dense = weight_matrix(model.get_submodule(layer)).double().numpy()
        pruned = database.get(layer, it.pattern, it.sparsity).weight.double().numpy()
        whole = float((dense**2).sum())
        return float(((pruned - dense) ** 2).sum()) / whole if whole else 0.0

    return _each(problem, error)


def read(path: Path) -> Errors:
    """A user's own, from a CSV or Parquet file with the columns of `of_frame`. Raises BadData."""
    from search import frames

    frame = frames.load(path)
    try:
        return of_frame(frame)
    except BadData as error:
        raise BadData(f"{path}: {error}") from error


def of_frame(frame: pd.DataFrame) -> Errors:
    """From the columns layer, pattern, sparsity, error; inf where an option is not to be had.

    Raises BadData for what is missing, blank, or given twice.
    """
    columns = ["layer", "pattern", "sparsity", "error"]
    if missing := [name for name in columns if name not in frame.columns]:
        raise BadData(f"errors have the columns {', '.join(columns)}: {', '.join(missing)} missing")
    if frame["layer"].isna().any():
        raise BadData("an error is given for no layer: its name is blank")
    errors: Errors = {}
    for name, pattern, sparsity, error in frame[columns].itertuples(index=False):
        try:
            it, value = option(str(pattern), float(sparsity)), float(error)
        except (TypeError, ValueError) as refusal:
            raise BadData(f"layer {name}: {refusal}") from refusal
        own = errors.setdefault(str(name), {})
        if it in own:
            raise BadData(f"layer {name} has two errors as {it}")
        if math.isnan(value) and it.pattern != DENSE:
            raise BadData(f"layer {name} has no error as {it}: write inf where it is not to be had")
        own[it] = value
    return errors


def _each(problem: Problem, error: Callable[[str, Option], float]) -> Errors:
    """NaN, of outputs that overflow, is infinite: that option is not to be had."""

    def known(layer: str, it: Option) -> float:
        value = error(layer, it)
        return math.inf if math.isnan(value) else value

    return {
        part.name: {it: known(part.name, it) for it in part.options if it.pattern != DENSE}
        for layer in problem.layers
        for part in layer.parts
    }
