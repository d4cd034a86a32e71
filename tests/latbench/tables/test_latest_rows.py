"""One row a point, from any number of rows: the same as picking from the whole table at once."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from latbench.errors import BadData
from latbench.tables import latest_rows, table
from latbench.tables.latest_rows import read_latest, read_latest_arrow
from latbench.tables.schema import TIMED
from latbench.tables.table import BATCH_BYTES, read_part_batches, read_table, select_timed
from latbench.tables.writer import write_part

COLUMNS = ["point_id", "m", "batch", "threads", "flags", "status", "started_at", "median_seconds", "env_id"]


def timed(piece: pa.Table) -> pa.Array:
    import pyarrow.compute as pc

    return pc.is_in(piece["status"], pa.array(TIMED))


def repeated(row: dict[str, Any], rng: np.random.Generator, count: int) -> list[dict[str, Any]]:
    """Rows of nine points, each measured again and again, in no order of time."""
    began = datetime(2026, 1, 1, tzinfo=UTC)
    return [
        row
        | {
            "m": int(rng.integers(1, 10)), "batch": [None, 4, 2**24 + 1][int(rng.integers(3))], "flags": f"{number}",
            "status": ["ok", "noisy", "error"][int(rng.integers(3))], "env_id": None,
            "started_at": began + timedelta(seconds=int(rng.integers(count))), "samples_seconds": [1e-3 * number + 1],
        }
        for number in range(count)
    ]  # fmt: skip


def test_it_is_what_picking_from_the_whole_table_gives(
    tmp_path: Path, row: dict[str, Any], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "BATCH_ROWS", 7)
    monkeypatch.setattr(latest_rows, "_PENDING_ROWS", 11)
    rows = repeated(row, rng, 200)
    for start in range(0, 200, 25):
        write_part(tmp_path, rows[start : start + 25])
    expected = select_timed(read_table(tmp_path)).reset_index(drop=True)
    found = read_latest(tmp_path, COLUMNS, group_columns=["point_id"], accept=timed)
    assert len(found) == len(expected) < 30
    same = [name for name in COLUMNS if name not in ("point_id", "flags", "status", "env_id")]
    pd.testing.assert_frame_equal(found[same], expected[same], check_dtype=False)
    assert found["flags"].tolist() == expected["flags"].tolist()
    assert found["status"].tolist() == expected["status"].tolist()
    assert found["env_id"].isna().all()
    assert found["point_id"].nunique() == expected["point_id"].nunique()
    assert list(found["flags"].cat.categories) == sorted(found["flags"])


def test_the_rows_themselves_come_with_their_samples(
    tmp_path: Path, row: dict[str, Any], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "BATCH_ROWS", 7)
    rows = repeated(row, rng, 100)
    for start in range(0, 100, 25):
        write_part(tmp_path, rows[start : start + 25])
    expected = select_timed(read_table(tmp_path))[["point_id", "flags", "samples_seconds"]].reset_index(drop=True)
    found = read_latest_arrow(tmp_path, list(expected), group_columns=["point_id"], accept=timed).to_pandas()
    pd.testing.assert_frame_equal(found, expected)
    nothing = read_latest_arrow(
        tmp_path, ["m"], group_columns=["point_id"], accept=lambda piece: pa.repeat(False, piece.num_rows)
    )
    assert nothing.num_rows == 0 and nothing.column_names == ["m"]


def test_each_status_of_a_point_may_be_kept(tmp_path: Path, row: dict[str, Any], rng: np.random.Generator) -> None:
    write_part(tmp_path, repeated(row, rng, 100))
    every = read_table(tmp_path).sort_values("started_at", kind="stable")
    expected = every.drop_duplicates(["point_id", "status"], keep="last").sort_index()
    found = read_latest(
        tmp_path, COLUMNS, group_columns=["point_id", "status"], accept=lambda piece: pa.repeat(True, piece.num_rows)
    )
    assert found["flags"].tolist() == expected["flags"].tolist()


def test_a_table_without_a_useful_row_gives_none(tmp_path: Path, row: dict[str, Any]) -> None:
    write_part(tmp_path, [row | {"status": "error", "samples_seconds": None}])
    assert read_latest(tmp_path, COLUMNS, group_columns=["point_id"], accept=timed).empty
    with pytest.raises(BadData, match="no such table"):
        read_latest(tmp_path / "absent", COLUMNS, group_columns=["point_id"], accept=timed)


def test_sizes_are_exact_however_large(tmp_path: Path, row: dict[str, Any]) -> None:
    sizes = [None, 3, 2**24, 2**24 + 1]
    for number, size in enumerate(sizes):
        write_part(tmp_path, [row | {"m": number + 1, "batch": size, "k": 2**40 + number}])
    found = read_latest(tmp_path, ["m", "k", "batch"], group_columns=["point_id"], accept=timed).sort_values("m")
    assert found["k"].tolist() == [2**40 + number for number in range(4)]
    assert found["batch"].tolist()[1:] == sizes[1:] and np.isnan(found["batch"].iloc[0])


def test_rows_of_many_samples_come_in_smaller_pieces(
    tmp_path: Path, row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "BATCH_BYTES", 1 << 16)
    part = write_part(tmp_path, [row | {"m": m, "samples_seconds": [1e-3 + m] * 1000} for m in range(1, 41)])
    pieces = [piece for _, piece in read_part_batches(part)]
    assert max(piece.nbytes for piece in pieces) <= 1.5 * BATCH_BYTES
    assert sum(piece.num_rows for piece in pieces) == parquet.ParquetFile(part).metadata.num_rows
    assert len(list(read_part_batches(part, ["m", "median_seconds"]))) == 1
