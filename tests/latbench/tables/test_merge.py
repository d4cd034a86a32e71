"""Merging: every row once, one device and one way of measuring a table, whatever the size."""

import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from latbench.tables import merge
from latbench.tables.merge import merge_tables
from latbench.tables.schema import SCHEMA_VERSION
from latbench.tables.table import has_table, hash_table, read_arrow_table, read_environments, read_table
from latbench.tables.writer import write_environment, write_part, write_rows


@pytest.fixture
def two_tables(tmp_path: Path, row: dict[str, Any]) -> tuple[Path, Path]:
    write_part(tmp_path / "a", [row])
    write_part(tmp_path / "b", [row | {"m": 8}])
    return tmp_path / "a", tmp_path / "b"


def test_a_merge_keeps_every_row_once(tmp_path: Path, row: dict[str, Any]) -> None:
    shared = row | {"started_at": pd.Timestamp("2026-01-01", tz="UTC")}
    write_part(tmp_path / "a", [shared, row | {"m": 1}])
    write_part(tmp_path / "b", [shared, row | {"m": 2}])
    write_environment(tmp_path / "a", {"env_id": "x", "python": "3.11"})
    write_environment(tmp_path / "b", {"env_id": "y", "numpy": "2"})
    merged = merge_tables([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert (merged.rows, merged.read) == (3, 4)
    assert sorted(read_table(tmp_path / "out")["m"]) == [1, 2, 7]
    assert sorted(read_environments(tmp_path / "out")["env_id"]) == ["x", "y"]


def test_a_large_merge_is_written_in_parts(
    tmp_path: Path, row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge, "PART_ROWS", 4)
    monkeypatch.setattr("latbench.tables.table.BATCH_ROWS", 3)
    write_part(tmp_path / "a", [row | {"m": m} for m in range(1, 8)])
    write_part(tmp_path / "b", [row | {"m": m} for m in range(8, 12)])
    merged = merge_tables([tmp_path / "a", tmp_path / "b", tmp_path / "a"], tmp_path / "out")
    assert [parquet.ParquetFile(part).metadata.num_rows for part in merged.parts] == [4, 4, 3]
    assert sorted(read_table(tmp_path / "out")["m"]) == list(range(1, 12))
    assert hash_table(tmp_path / "out") == hash_table(
        merge_tables([tmp_path / "b", tmp_path / "a"], tmp_path / "other").parts[0].parent
    )


def test_an_interrupted_merge_leaves_no_table_that_looks_whole(
    latbench: Any, tmp_path: Path, row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge, "PART_ROWS", 1)
    write_part(tmp_path / "a", [row | {"m": m} for m in (1, 2, 3)])
    write, out = write_rows, tmp_path / "out"

    def interrupted(folder: Path, table: pa.Table) -> Any:
        if has_table(folder) and len(list(folder.glob("part-*"))) == 2:
            raise KeyboardInterrupt
        return write(folder, table)

    monkeypatch.setattr("latbench.tables.merge.write_rows", interrupted)
    assert latbench("merge", tmp_path / "a", "-o", out).code == 4
    monkeypatch.undo()
    assert len(list(out.glob("part-*.parquet"))) == 2
    for command in (("validate", out), ("report", out), ("merge", out, "-o", tmp_path / "other")):
        assert "out: unfinished, `latbench merge` still writes it" in latbench(*command).refused(5)
    assert "exists already" in latbench("merge", tmp_path / "a", "-o", out).refused(2)
    shutil.rmtree(out)
    assert latbench("merge", tmp_path / "a", "-o", out).code == 0
    assert hash_table(out) == hash_table(tmp_path / "a")


def test_parts_of_a_merge_are_bounded_by_bytes_too(
    tmp_path: Path, row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge, "PART_BYTES", 100_000)
    rows = [row | {"m": m, "samples_seconds": [1e-3 + m] * 2000} for m in range(1, 21)]  # 16 kB each
    write_part(tmp_path / "a", rows)
    merged = merge_tables([tmp_path / "a"], tmp_path / "out")
    assert all(read_arrow_table(part).nbytes <= 100_000 for part in merged.parts) and len(merged.parts) < 6
    assert sorted(read_table(tmp_path / "out")["m"]) == list(range(1, 21))


def test_merge_makes_one_table(latbench: Any, two_tables: tuple[Path, Path], tmp_path: Path) -> None:
    ran = latbench("merge", *two_tables, "-o", tmp_path / "out")
    assert ran.code == 0 and "2 rows of 2" in ran.out
    assert sorted(read_table(tmp_path / "out")["m"]) == [7, 8]
    assert "exists already" in latbench("merge", *two_tables, "-o", tmp_path / "out").refused(2)


def test_merge_refuses_unlike_devices(
    latbench: Any, two_tables: tuple[Path, Path], tmp_path: Path, row: dict[str, Any]
) -> None:
    write_part(tmp_path / "c", [row | {"device": "nvidia-h200"}])
    sources = (two_tables[0], tmp_path / "c")
    assert "unlike devices" in latbench("merge", *sources, "-o", tmp_path / "out").refused(2)
    assert not (tmp_path / "out").exists()
    assert latbench("merge", *sources, "-o", tmp_path / "out", "--allow-mixed").code == 0


def test_merge_refuses_another_schema_version(latbench: Any, two_tables: tuple[Path, Path], tmp_path: Path) -> None:
    whole = parquet.read_table(two_tables[0])
    parquet.write_table(whole.set_column(0, "schema_version", pa.array([7])), tmp_path / "newer.parquet")
    ran = latbench("merge", two_tables[0], tmp_path / "newer.parquet", "-o", tmp_path / "out")
    assert f"newer.parquet: table version 7, this latbench reads {SCHEMA_VERSION}" in ran.refused(5)


@pytest.mark.parametrize(("column", "value"), [("cache_mode", "warm"), ("threads", 1), ("launch_mode", "graph")])
def test_merge_refuses_unlike_modes(
    latbench: Any, two_tables: tuple[Path, Path], tmp_path: Path, row: dict[str, Any], column: str, value: Any
) -> None:
    write_part(tmp_path / "c", [row | {column: value}])
    refused = latbench("merge", *two_tables, tmp_path / "c", "-o", tmp_path / "out").refused(2)
    assert f"unlike modes: {column} is {row[column]} in {two_tables[0]}, and {value} in {tmp_path / 'c'}" in refused
    assert not (tmp_path / "out").exists()
    assert latbench("merge", *two_tables, tmp_path / "c", "-o", tmp_path / "out", "--allow-mixed").code == 0
    write_part(tmp_path / "c", [row | {"m": 9}])  # now it holds both modes
    assert latbench("merge", *two_tables, tmp_path / "c", "-o", tmp_path / "both").code == 0
