"""Options that several commands take."""

from __future__ import annotations

from collections.abc import Sequence

from latbench.errors import UsageError


def values_by_column(option: str, texts: Sequence[str] | None) -> dict[str, str]:
    """What `option COLUMN=VALUE`, repeated, says. UsageError for a text that is none, or a column given twice."""
    found: dict[str, str] = {}
    for text in texts or ():
        column, separator, value = text.partition("=")
        if not (column and separator and value):
            raise UsageError(f"{option} is COLUMN=VALUE, not {text!r}")
        if column in found:
            raise UsageError(f"{option} {column} is given twice: {found[column]} and {value}")
        found[column] = value
    return found
