"""The identity of a point: the hash of its key columns."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from latbench.tables.schema import KEY_COLUMNS


def hash_key(row: Mapping[str, Any]) -> str:
    """Return the hash of the key columns of a row: 16 hexadecimal digits, equal for a dict and a frame's row.

    None, NaN and missing values are equal; so are 3 and 3.0. Floats count to nine digits.
    """
    key = [_canonical(field.type, row.get(field.name)) for field in KEY_COLUMNS]
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]


def _canonical(kind: pa.DataType, value: Any) -> str | int | None:
    value = convert_to_plain(kind, value)
    return f"{value + 0.0:.9g}" if isinstance(value, float) else value


def convert_to_plain(kind: pa.DataType, value: Any) -> str | int | float | None:
    """Return a value of a text, integer or float column as Python's own type, whatever a frame made of it.

    NaN becomes None.
    """
    if value is None or value != value:
        return None
    if pa.types.is_integer(kind):
        return int(value)
    return float(value) if pa.types.is_floating(kind) else str(value)


def hash_keys(table: pa.Table) -> list[str]:
    """Return the hash of the key columns of every row of `table`, as `hash_key` gives it."""
    texts = [_json_texts(table[field.name].combine_chunks(), field.type) for field in KEY_COLUMNS]
    keys = pc.binary_join_element_wise(*texts, ", ")
    return [hashlib.sha256(f"[{key}]".encode()).hexdigest()[:16] for key in keys.to_pylist()]


def _json_texts(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return each value of a key column as JSON. Keys repeat few values, so each is formatted once."""
    encoded = column.dictionary_encode()
    values = [json.dumps(_canonical(kind, value)) for value in encoded.dictionary.to_pylist()]
    return pa.array([*values, "null"]).take(encoded.indices.fill_null(len(values)))
