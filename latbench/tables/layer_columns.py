"""Columns that follow from a layer's pattern, and the check that a row's layer can exist."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from latbench.errors import BadData
from latbench.tables.schema import COLUMNS
from sparse_kernels.patterns import NM, BlockWise, ShflBW, VectorNM, VectorWise, parse

if TYPE_CHECKING:
    import pandas as pd


def derive_pattern_columns(pattern: str) -> dict[str, Any]:
    """Return the columns that follow from a pattern's spec: format, block_h, block_w, v, nm_n, nm_m.

    All are None for `profile`, the pattern of a model whose layers differ. Raises ValueError for an unknown pattern.
    """
    empty: dict[str, Any] = dict.fromkeys(("format", "block_h", "block_w", "v", "nm_n", "nm_m"))
    if pattern == "profile":
        return empty
    parsed = parse(pattern)
    match parsed:
        case BlockWise():
            sizes = {"block_h": parsed.rows, "block_w": parsed.cols}
        case VectorNM():
            sizes = {"v": parsed.v, "nm_n": parsed.keep, "nm_m": parsed.of}
        case VectorWise():
            sizes = {"v": parsed.v}
        case ShflBW():
            sizes = {"v": parsed.v} if parsed.cols == 1 else {"v": parsed.v, "block_w": parsed.cols}
        case NM():
            sizes = {"nm_n": parsed.keep, "nm_m": parsed.of}
        case _:
            sizes = {}
    return empty | {"format": parsed.format} | sizes


def check_layers(layers: pd.DataFrame) -> None:
    """Raise BadData for rows whose pattern, size or sparsity no layer can have.

    `latbench validate` finds more, and names the files. Imported rows may lack sizes.
    """
    wrong = [f"pattern {pattern}" for pattern in layers["pattern"].unique() if not _is_pattern(pattern)]
    for name in ("m", "k", "n", "sparsity_target"):
        values = layers[name].to_numpy(np.float64, na_value=np.nan)
        least, most = COLUMNS[name].minimum, COLUMNS[name].maximum or np.inf
        wrong += [f"{name} {value:g}" for value in values[(values < least) | (values > most)][:1]]
    if wrong:
        raise BadData(f"the table holds layers that cannot be, such as of {wrong[0]}: `latbench validate` names them")


def _is_pattern(spec: object) -> bool:
    try:
        return isinstance(spec, str) and derive_pattern_columns(spec)["format"] is not None
    except ValueError:
        return False
