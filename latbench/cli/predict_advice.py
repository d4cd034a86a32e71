"""What to add to an incomplete `latbench predict`: the option for each column that is open, and its known values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from cost_models.evaluation.held_out_errors import CostModel

OPTIONS = {"pattern": "--pattern", "backend": "--backend", "kernel_requested": "--kernel", "threads": "--threads"}
"""The option of a column; any other column is given by --where."""

MOST_VALUES = 12  # named one by one; of more values only the ends are named


def list_ways(measured: pd.DataFrame, asked: Mapping[str, Any], columns: Sequence[str]) -> list[dict[str, Any]]:
    """List the measured values of `columns` that occur together, in rows that fit the query.

    Sizes and sparsity of a query may be new, so rows need not have them.
    """
    from cost_models.rows.build_rows import select_fitting_rows
    from cost_models.rows.row_keys import normalize_key_value

    rows = select_fitting_rows(measured, asked)
    known = [name for name in columns if name in rows.columns]
    unique = rows[known].drop_duplicates().to_dict("records")
    return [{str(name): normalize_key_value(value) for name, value in way.items()} for way in unique]


def describe_ways(ways: Sequence[Mapping[str, Any]]) -> str:
    """Return which options settle a query that was measured in several ways, with their known values."""
    columns = [name for name in ways[0] if len({way[name] for way in ways}) > 1]
    options = [f"{_option(name)} ({format_values({way[name] for way in ways})})" for name in columns]
    example = " ".join(_format_choice(name, ways[0][name]) for name in columns)
    return f"add {' and '.join(options)}, such as {example}"


def describe_unmeasured(measured: pd.DataFrame, asked: Mapping[str, Any], given: Sequence[str]) -> str | None:
    """Return which value of the options `given` was not measured for a layer that is; None where it is the layer.

    The values of one column are known if rows have the query's values in all other columns but the sparsity.
    """
    from cost_models.rows.row_keys import extract_keys, normalize_key_value

    for name in given:
        others = [other for other in asked if other not in (name, "sparsity_target")]
        wanted = tuple(normalize_key_value(asked[other]) for other in others)
        fits = [key == wanted for key in extract_keys(measured, others)]
        if known := {normalize_key_value(value) for value in measured.loc[fits, name]}:
            return f"this layer was not measured with {_format_choice(name, asked[name])}, only with " + (
                format_values(known)
            )
    return None


def describe_sparsities(measured: pd.DataFrame, pattern: str) -> str:
    """Return the sparsities at which a pattern was measured, as a text that begins with a colon; empty for none."""
    found = {float(value) for value in measured.loc[measured["pattern"] == pattern, "sparsity_target"]}
    return f": {format_values(found)} were measured" if found else ""


def suggest_estimator(model: CostModel) -> str:
    """Return what predicts layers that were not measured, for a model that does not."""
    from cost_models.estimators.anchored_lookup import AnchoredLookup

    return ", or predict it by a model of `latbench fit --estimator hybrid`" * isinstance(model, AnchoredLookup)


def format_values(values: set[Any]) -> str:
    """Return values as `1, 2 or 4`, or as `0.1 to 0.9` if there are many."""
    ordered = sorted(values, key=lambda value: (value is None, not isinstance(value, int | float), value))
    texts = [f"{value:g}" if isinstance(value, float) else str(value) for value in ordered]
    if len(texts) > MOST_VALUES:
        return f"{texts[0]} to {texts[-1]}"
    return " or ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))


def _option(name: str) -> str:
    return OPTIONS.get(name, f"--where {name}=")


def _format_choice(name: str, value: Any) -> str:
    """Return an option with its value, as typed."""
    option = _option(name)
    return f"{option}{value}" if option.endswith("=") else f"{option} {value}"
