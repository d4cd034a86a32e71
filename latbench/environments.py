"""The environments of a table: what may change times although the device is the same, a row of env.parquet each."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any


def env_id(row: Mapping[str, Any]) -> str:
    """The hash of everything known in `row`: 16 hexadecimal digits; env_id itself and what is None do not count."""
    known = {name: value for name, value in row.items() if name != "env_id" and value is not None}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]


def faults(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """What is wrong with the rows of an env.parquet, a sentence each. Raises KeyError where they have no env_id."""
    rows = list(rows)
    found = []
    for number, row in enumerate(rows, start=1):
        if row["env_id"] != env_id(row):
            found.append(f"row {number} (environment {row['env_id']}): its content hashes to {env_id(row)}")
    repeated = [name for name, count in Counter(row["env_id"] for row in rows).items() if count > 1]
    return [*found, *(f"environment {name} is described more than once" for name in repeated)]
