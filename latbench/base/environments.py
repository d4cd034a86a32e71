"""Environments of a table: everything that may change times although the device is the same.

Each environment is described in a file of its own, env-<env_id>.json, named by the hash of its content. Files are
never changed, so any number of sweeps on any number of machines can add environments to one table.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

ENVIRONMENT_FILE = re.compile(r"env-([^/]+)\.json")


def hash_environment(row: Mapping[str, Any]) -> str:
    """Return the hash of an environment: 16 hexadecimal digits. env_id itself and None values do not count."""
    known = {name: value for name, value in row.items() if name != "env_id" and value is not None}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]


def format_file_name(env_id: str) -> str:
    """Return the name of the file that describes this environment."""
    return f"env-{env_id}.json"


def format_environment(row: Mapping[str, Any]) -> bytes:
    """Return the content of the environment's file, without None values."""
    known = {name: value for name, value in row.items() if value is not None}
    return (json.dumps(known, indent=2) + "\n").encode()


def parse_environment(name: str, content: bytes) -> dict[str, Any]:
    """Return the environment in a file called `name`. Raises ValueError, in a sentence, for other content."""
    try:
        row = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not readable JSON ({str(error).splitlines()[0]})") from error
    if not isinstance(row, dict) or not all(isinstance(value, str | int | float) for value in row.values()):
        raise ValueError("not the description of an environment: that is an object of texts and numbers")
    if format_file_name(str(row.get("env_id"))) != name:
        raise ValueError(f"it describes environment {row.get('env_id')}, which does not match its name")
    return row


def find_fault(row: Mapping[str, Any]) -> str | None:
    """Return what is wrong with an environment that was read; None if it is unchanged."""
    found = hash_environment(row)
    return None if found == row["env_id"] else f"environment {row['env_id']}: its content hashes to {found}"
