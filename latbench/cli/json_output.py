"""The output of --json: one JSON object on stdout, and nothing else there.

Keys are the names of the columns of a table or of the fields of the value that is shown. Times are numbers of seconds
and their keys end in `seconds`; sizes are bytes, shares lie between 0 and 1. What is unknown is null. Notes and
progress go to stderr, as does an error, which the exit code tells as well.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import typer


def print_json(document: Mapping[str, Any]) -> None:
    """Print the document as one JSON object."""
    typer.echo(json.dumps(convert_to_json_values(document), indent=2, allow_nan=False))


def convert_to_json_values(value: Any) -> Any:
    """Return a value as JSON holds it.

    Parameters
    ----------
    value
        A dataclass, named tuple, mapping, sequence, set, path, enumeration, number of NumPy or plain value.

    Returns
    -------
    Any
        Mappings, lists, texts, numbers, booleans and None only. A number that is not finite becomes None.

    Raises
    ------
    TypeError
        The value is of another kind.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: convert_to_json_values(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): convert_to_json_values(part) for key, part in value.items()}
    if hasattr(value, "_asdict"):
        return convert_to_json_values(value._asdict())
    if isinstance(value, Enum):
        return convert_to_json_values(value.value)
    if isinstance(value, list | tuple | set | frozenset):
        parts = sorted(value) if isinstance(value, set | frozenset) else value
        return [convert_to_json_values(part) for part in parts]
    if isinstance(value, PurePath):
        return str(value)
    if hasattr(value, "tolist"):  # an array or a number of NumPy
        return convert_to_json_values(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    raise TypeError(f"JSON has no form for a {type(value).__name__}")
