"""The texts of options as values."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from latbench.cli.options.solve_options import SECOND_SETTINGS
from latbench.errors import UsageError


def parse_duration(text: str) -> float:
    """Return the seconds of a number with s, m or h behind it, or nothing for seconds.

    Raises UsageError for any other text.
    """
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([smh]?)", text.strip())
    if found is None:
        raise UsageError(f"a duration is a number followed by s, m or h, such as 90s or 10m, not {text!r}")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def parse_column_values(option: str, texts: Sequence[str] | None) -> dict[str, str]:
    """Return the value by column of a repeated option COLUMN=VALUE.

    Raises UsageError for a text of another form, or a column that is given twice.
    """
    found: dict[str, str] = {}
    for text in texts or ():
        column, separator, value = text.partition("=")
        if not (column and separator and value):
            raise UsageError(f"{option} takes COLUMN=VALUE, not {text!r}")
        if column in found:
            raise UsageError(f"{option} {column} is given twice: {found[column]} and {value}")
        found[column] = value
    return found


def parse_second_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Return the settings of --also-with by name. Raises UsageError for an unknown setting or a wrong value."""
    found = {}
    for text in texts:
        name, _, value = text.partition("=")
        key = name.replace("-", "_")
        try:
            found[key] = SECOND_SETTINGS[key](value)
        except (KeyError, ValueError):
            known = ", ".join(SECOND_SETTINGS)
            raise UsageError(f"--also-with takes {known}, as in batch=16, not {text!r}") from None
    return found


def parse_sizes(option: str, form: str, text: str, count: int | None = None) -> list[int]:
    """Return the whole numbers of a text such as 768x768x128.

    `form` describes the text for the message; `count` is how many numbers it has, None for any number of them.
    Raises UsageError for any other text, and for numbers below 1.
    """
    try:
        numbers = [int(number) for number in text.split("x")]
    except ValueError:
        numbers = []
    if not numbers or (count is not None and len(numbers) != count):
        raise UsageError(f"{option} takes {form}, not {text!r}")
    if min(numbers) < 1:
        raise UsageError(f"{option} takes numbers of at least 1, not {text}")
    return numbers


def check_share(option: str, value: float, *, zero: bool = False) -> None:
    """Raise UsageError unless a number lies between 0 and 1; `zero`: 0 itself is allowed."""
    if not (0 < value < 1 or (zero and value == 0)):
        below = "from 0 up to, but not including, 1" if zero else "between 0 and 1"
        raise UsageError(f"{option} is a share {below}, not {value:g}")


def check_positive(option: str, value: float) -> None:
    """Raise UsageError unless a share is positive and finite."""
    if not 0 < value < math.inf:
        raise UsageError(f"{option} is a positive share such as 0.02, not {value:g}")
