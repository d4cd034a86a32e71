"""Hashes of rows: equal for equal rows however they are stored, unlike for any change, and of points as point_id."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from latbench.tables.point_ids import hash_key, hash_keys
from latbench.tables.row_hashes import find_first_occurrences, hash_rows
from latbench.tables.schema import SCHEMA
from latbench.tables.table import read_arrow_table
from latbench.tables.writer import write_part


@pytest.fixture
def rows(row: dict[str, Any]) -> list[dict[str, Any]]:
    shared = row | {"started_at": datetime(2026, 1, 1, tzinfo=UTC)}
    return [shared, shared | {"m": 8, "status": "error", "samples_seconds": None}, shared | {"model": "täsk"}]


def _table(tmp_path: Path, rows: list[dict[str, Any]]) -> pa.Table:
    return read_arrow_table(write_part(tmp_path, rows))


def test_point_ids_of_a_table_are_those_of_its_rows(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    odd = rows[0] | {"sparsity_target": 0.1 + 0.2, "device": 'quo"te \\ ü', "layout": None, "threads": None}
    table = _table(tmp_path, [*rows, odd, rows[0] | {"sparsity_target": -0.0}])
    assert hash_keys(table) == table["point_id"].to_pylist() == [hash_key(r) for r in table.to_pylist()]


def test_a_hash_does_not_depend_on_how_a_table_is_stored(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    table = _table(tmp_path, rows)
    expected = hash_rows(table)
    assert expected.shape == (3, 2) and len(np.unique(expected)) == 6
    pieces = pa.concat_tables([table.slice(0, 1), table.slice(1, 2)])
    assert (hash_rows(pieces) == expected).all()
    assert (hash_rows(table.slice(1, 2)) == expected[1:]).all()
    assert (hash_rows(table.select(table.column_names[::-1])) == expected).all()
    assert (hash_rows(pa.Table.from_pandas(table.to_pandas()).cast(SCHEMA)) == expected).all()
    assert hash_rows(table.slice(0, 0)).shape == (0, 2)


@pytest.mark.parametrize("column", SCHEMA.names)
def test_any_change_of_a_row_changes_its_hash(tmp_path: Path, rows: list[dict[str, Any]], column: str) -> None:
    table = _table(tmp_path, rows)
    field = SCHEMA.field(column)
    for value in {
        pa.string(): ["", "\x00", "other", "t"], pa.int64(): [0, -1, 2**62], pa.float64(): [0.0, 1e-300, -0.75],
    }.get(field.type, [datetime(2026, 1, 1, microsecond=1, tzinfo=UTC)] if pa.types.is_timestamp(field.type) else [
        [], [0.0], [1e-3, 3e-3, 2e-3], [3e-3, 1e-3], [3e-3, 1e-3, 2e-3, 2e-3],
    ]):  # fmt: skip
        values = table[column].to_pylist()
        values[0] = value
        changed = table.set_column(table.column_names.index(column), field, pa.array(values, field.type))
        same = (hash_rows(changed) == hash_rows(table)).any(axis=1)
        assert same.tolist() == [values[0] == table[column][0].as_py(), True, True]


def test_values_that_change_columns_change_the_hash() -> None:
    table = pa.table({"a": [1, 2], "b": [2, 1], "c": ["x", ""], "d": ["", "x"]})
    swapped = pa.table({"a": [2, 1], "b": [1, 2], "c": ["", "x"], "d": ["x", ""]})
    assert not (hash_rows(table)[:, None] == hash_rows(table)[None, ::-1]).all()
    assert (hash_rows(table) == hash_rows(swapped)[::-1]).all()
    assert not (hash_rows(table) == hash_rows(swapped)).any()


def test_nothing_is_nothing_and_zero_has_no_sign() -> None:
    reals = pa.table({"x": pa.array([None, float("nan"), 0.0, -0.0, 1.0])})
    first, second, zero, other, one = hash_rows(reals).tolist()
    assert first == second and zero == other and first != zero != one


def test_millions_of_like_rows_have_unlike_hashes(rng: np.random.Generator) -> None:
    table = pa.table({"a": np.repeat(np.arange(1000), 200), "b": np.tile(np.arange(200) * 1e-6, 1000)})
    hashes = hash_rows(table)
    assert len(np.unique(hashes[:, 0])) == len(np.unique(hashes[:, 1])) == 200_000
    # Every bit is set in half of the rows, within six sigma.
    bits = ((hashes[:, :, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)).mean(axis=0)
    assert np.abs(bits - 0.5).max() < 6 * 0.5 / 200_000**0.5
    order = rng.permutation(200_000)
    first = find_first_occurrences(np.concatenate([hashes, hashes[order]]))
    assert first[:200_000].all() and not first[200_000:].any()
