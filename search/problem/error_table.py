"""Errors of layers' options, and the data frame that holds them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from latbench.errors import BadData
from search.problem.layers import DENSE, Option, option

if TYPE_CHECKING:
    import pandas as pd

LayerErrors = dict[str, dict[Option, float]]
"""Layer name -> option -> error, which is infinite where the option cannot be used."""


def errors_from_frame(frame: pd.DataFrame) -> LayerErrors:
    """From the columns layer, pattern, sparsity, error; inf where an option is not to be had.

    Raises BadData for what is missing, blank, or given twice.
    """
    columns = ["layer", "pattern", "sparsity", "error"]
    if missing := [name for name in columns if name not in frame.columns]:
        raise BadData(f"errors have the columns {', '.join(columns)}: {', '.join(missing)} missing")
    if frame["layer"].isna().any():
        raise BadData("an error is given for no layer: its name is blank")
    errors: LayerErrors = {}
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
