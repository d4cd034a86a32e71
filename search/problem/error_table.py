"""Errors of layers' options, and the data frame that holds them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from latbench.errors import BadData
from search.problem.layers import DENSE, Option, build_option

if TYPE_CHECKING:
    import pandas as pd

LayerErrors = dict[str, dict[Option, float]]
"""Layer name -> option -> error, which is infinite where the option cannot be used."""


def convert_frame_to_errors(frame: pd.DataFrame) -> LayerErrors:
    """Return the errors in a frame with the columns layer, pattern, sparsity and error.

    An infinite error marks an option that cannot be used. Raises BadData for values that are missing, blank or given
    twice.
    """
    columns = ["layer", "pattern", "sparsity", "error"]
    if missing := [name for name in columns if name not in frame.columns]:
        raise BadData(f"errors have the columns {', '.join(columns)}: {', '.join(missing)} missing")
    if frame["layer"].isna().any():
        raise BadData("the frame gives an error for a layer whose name is blank")
    errors: LayerErrors = {}
    for name, pattern, sparsity, error in frame[columns].itertuples(index=False):
        try:
            it, value = build_option(str(pattern), float(sparsity)), float(error)
        except (TypeError, ValueError) as refusal:
            raise BadData(f"layer {name}: {refusal}") from refusal
        own = errors.setdefault(str(name), {})
        if it in own:
            raise BadData(f"layer {name} has two errors as {it}")
        if math.isnan(value) and it.pattern != DENSE:
            raise BadData(f"layer {name} has no error as {it}: write inf for an option that cannot be used")
        own[it] = value
    return errors
