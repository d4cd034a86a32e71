"""The texts of options as values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer

from latbench.errors import UsageError

COLUMN_VALUE = "COLUMN=VALUE,..."

SECOND_SETTINGS: dict[str, Callable[[str], Any]] = {
    "target": float, "workload": str, "model": Path, "network": str, "device": str, "backend": str, "threads": int,
    "batch": int, "dense_seconds": float, "fixed_seconds": float,
}  # fmt: skip
"""The settings that --also-with takes.

Both tables are of one model and one profile, so the settings of layers and options hold for both. How times were
taken is each table's own.
"""


def split_list(param: typer.CallbackParam, texts: list[str] | None) -> list[str] | None:
    """Return the values of an option that takes several: separated by commas, repeated, or both.

    This is the callback of every such option, so that all commands read lists alike. A value that is given twice
    counts once. Raises UsageError for an empty value.
    """
    return _split(max(param.opts, key=len), texts, lambda text: text.split(","))


def split_pairs(param: typer.CallbackParam, texts: list[str] | None) -> list[str] | None:
    """Return the values of an option that takes several NAME=VALUE, as `split_list`.

    A part without an equals sign belongs to the value before it, so a value may hold commas: partition=gpu,debug.
    """
    return _split(max(param.opts, key=len), texts, lambda text: re.split(r",(?=[^,=]*=)", text))


def _split(option: str, texts: list[str] | None, split: Callable[[str], list[str]]) -> list[str] | None:
    if not texts:
        return None
    values = [value.strip() for text in texts for value in split(text)]
    if "" in values:
        raise UsageError(f"{option} has an empty value in {','.join(texts)!r}: separate values by single commas")
    return list(dict.fromkeys(values))


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
