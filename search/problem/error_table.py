"""Errors of layers' options, and the data frame that holds them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from latbench.base.engine_registry import FLOAT32
from latbench.errors import BadData
from search.problem.layers import Option, build_option

if TYPE_CHECKING:
    import pandas as pd

LayerErrors = dict[str, dict[Option, float]]
"""Layer name -> option -> error, which is infinite where the option cannot be used."""


def convert_frame_to_errors(frame: pd.DataFrame) -> LayerErrors:
    """Return the errors in a frame with the columns layer, pattern, sparsity and error, and optionally precision.

    An infinite error marks an option that cannot be used. Raises BadData for values that are missing, blank or given
    twice.
    """
    columns = ["layer", "pattern", "sparsity", "error"]
    if missing := [name for name in columns if name not in frame.columns]:
        raise BadData(f"errors have the columns {', '.join(columns)}: {', '.join(missing)} missing")
    precisions = list_precisions(frame)
    if frame["layer"].isna().any():
        raise BadData("the frame gives an error for a layer whose name is blank")
    errors: LayerErrors = {}
    for (name, pattern, sparsity, error), precision in zip(
        frame[columns].itertuples(index=False), precisions, strict=True
    ):
        try:
            it, value = build_option(str(pattern), float(sparsity), precision), float(error)
        except (TypeError, ValueError) as refusal:
            raise BadData(f"layer {name}: {refusal}") from refusal
        own = errors.setdefault(str(name), {})
        if it in own:
            raise BadData(f"layer {name} has two errors as {it}")
        if math.isnan(value) and it.in_database is not None:
            raise BadData(f"layer {name} has no error as {it}: write inf for an option that cannot be used")
        own[it] = value
    return errors


def list_precisions(frame: pd.DataFrame) -> list[str]:
    """Return the precision of each row of a frame; float32 where the column lacks or is blank."""
    if "precision" not in frame.columns:
        return [FLOAT32] * len(frame)
    return [str(each) or FLOAT32 for each in frame["precision"].astype(object).where(frame["precision"].notna(), "")]
