"""The table: what is written comes back, what is damaged is refused, in one sentence with the file's name."""

import math
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyarrow import parquet

from latbench.base.median_interval import bound_median
from latbench.errors import BadData, EnvironmentUnusable
from latbench.tables.point_ids import hash_key
from latbench.tables.schema import KEY_COLUMNS, SCHEMA, SCHEMA_VERSION
from latbench.tables.storage import UNFINISHED
from latbench.tables.table import (
    GrowingTable,
    hash_table,
    list_environments,
    read_batches,
    read_environments,
    read_table,
    select_rows,
    select_timed,
)
from latbench.tables.time_summary import summarise_samples
from latbench.tables.writer import date_after, find_newest_starts, mark_unfinished, write_environment, write_part


def test_what_is_written_comes_back(tmp_path: Path, row: dict[str, Any]) -> None:
    failed = row | {"m": 8, "status": "error", "samples_seconds": None, "error": "boom"}
    path = write_part(tmp_path / "table", [row, failed])
    assert path.parent == tmp_path / "table"
    frame = read_table(tmp_path / "table")
    assert list(frame.columns) == SCHEMA.names
    first = frame.iloc[0]
    assert {name: first[name] for name in row if name != "samples_seconds"} == {
        name: value for name, value in row.items() if name != "samples_seconds"
    }
    assert first["samples_seconds"].tolist() == row["samples_seconds"]  # raw, in the order they were taken
    assert first["median_seconds"] == 2e-3
    assert (first["format"], first["v"], first["schema_version"]) == ("vector", 32, SCHEMA_VERSION)
    assert math.isnan(first["block_h"]) and math.isnan(frame.iloc[1]["median_seconds"])
    assert frame.iloc[1]["error"] == "boom"
    pd.testing.assert_frame_equal(frame, read_table(path))


def _two_parts(folder: Path, row: dict[str, Any]) -> str:
    """A table of two parts, one with a failure; what other readers are given of it."""
    write_part(folder, [row])
    write_part(folder, [row | {"m": 8, "status": "oom", "samples_seconds": None}])
    return f"{folder}/part-*.parquet"


def test_parts_open_in_plain_pandas(tmp_path: Path, row: dict[str, Any]) -> None:
    _two_parts(tmp_path, row)
    frame = pd.read_parquet(sorted(tmp_path.glob("part-*.parquet"))).sort_values("m")
    assert frame["m"].tolist() == [7, 8] and frame["median_seconds"].iloc[0] == 2e-3
    assert frame["samples_seconds"].iloc[0].tolist() == row["samples_seconds"]


def test_parts_open_in_plain_polars(tmp_path: Path, row: dict[str, Any]) -> None:
    polars = pytest.importorskip("polars")
    frame = polars.read_parquet(_two_parts(tmp_path, row)).sort("m")
    assert frame["m"].to_list() == [7, 8] and frame["median_seconds"].to_list() == [2e-3, None]
    assert frame["samples_seconds"].to_list() == [row["samples_seconds"], None]


def test_parts_open_in_plain_duckdb(tmp_path: Path, row: dict[str, Any]) -> None:
    duckdb = pytest.importorskip("duckdb")
    query = f"SELECT m, median_seconds, samples_seconds FROM '{_two_parts(tmp_path, row)}' ORDER BY m"
    assert duckdb.sql(query).fetchall() == [(7, 2e-3, row["samples_seconds"]), (8, None, None)]


def test_the_environment_is_beside_the_rows_not_among_them(tmp_path: Path, row: dict[str, Any]) -> None:
    part = write_part(tmp_path, [row | {"env_id": "a"}])
    assert read_environments(tmp_path).empty
    for env_id in ("a", "b", "a"):
        write_environment(tmp_path, {"env_id": env_id, "python": "3.11"})
    assert len(read_table(tmp_path)) == 1
    assert read_environments(tmp_path)["env_id"].tolist() == ["a", "b"]
    assert read_environments(part)["env_id"].tolist() == ["a", "b"]


def test_environments_of_unlike_machines_lie_side_by_side_and_damage_is_repaired(tmp_path: Path) -> None:
    write_environment(tmp_path, {"env_id": "a", "governor": "powersave", "driver": 580, "load": None})
    write_environment(tmp_path, {"env_id": "b", "governor": 7})
    wanted = [{"env_id": "a", "governor": "powersave", "driver": 580}, {"env_id": "b", "governor": 7}]
    assert list_environments(tmp_path) == wanted
    (tmp_path / "env-b.json").write_bytes(b"{")
    write_environment(tmp_path, {"env_id": "b", "governor": 7})
    assert list_environments(tmp_path) == wanted


def test_a_table_that_is_not_written_to_its_end_is_refused(tmp_path: Path, row: dict[str, Any]) -> None:
    with pytest.raises(KeyboardInterrupt), mark_unfinished(tmp_path):
        write_part(tmp_path, [row])
        raise KeyboardInterrupt
    assert "unfinished" in _refusal(tmp_path)
    with mark_unfinished(tmp_path):
        write_part(tmp_path, [row | {"m": 8}])
    assert len(read_table(tmp_path)) == 2


def test_what_is_being_written_is_not_read(tmp_path: Path, row: dict[str, Any]) -> None:
    part = write_part(tmp_path, [row])
    (tmp_path / f".{part.name}.xyz.tmp").write_bytes(part.read_bytes()[:100])
    (tmp_path / "part-1.parquet.tmp").write_bytes(b"half")
    assert len(read_table(tmp_path)) == 1


def test_equal_rows_have_one_id_however_they_are_typed(row: dict[str, Any]) -> None:
    wanted = hash_key(row)
    assert len(wanted) == 16 and int(wanted, 16) >= 0
    assert hash_key(row | {"m": 7.0, "batch": float("nan"), "c_in": None, "status": "error"}) == wanted
    assert hash_key(row | {"sparsity_target": 0.5 + 0.25}) == wanted
    assert hash_key(row | {"sparsity_target": np.float64(0.75), "k": np.int64(13)}) == wanted


@pytest.mark.parametrize("column", [field.name for field in KEY_COLUMNS])
def test_every_key_column_makes_another_point(row: dict[str, Any], column: str) -> None:
    changed = "other" if SCHEMA.field(column).type == pa.string() else 3
    assert hash_key(row | {column: changed}) != hash_key(row)


def test_ids_survive_a_round_trip(tmp_path: Path, row: dict[str, Any]) -> None:
    conv = dict.fromkeys(("batch", "c_in", "h", "w", "c_out", "kh", "kw", "stride_h", "stride_w"), 3)
    write_part(tmp_path, [row, row | conv | {"op": "conv2d"}])  # whole numbers beside nulls become reals
    frame = read_table(tmp_path)
    assert [hash_key(found) for _, found in frame.iterrows()] == frame["point_id"].tolist()


def test_the_summary_is_that_of_numpy(rng: np.random.Generator) -> None:
    samples = rng.lognormal(size=101)
    summary = summarise_samples(samples)
    assert summary["median_seconds"] == np.median(samples)
    assert summary["mean_seconds"] == pytest.approx(samples.mean(), rel=1e-12)
    assert summary["std_seconds"] == pytest.approx(np.std(samples, ddof=1), rel=1e-12)
    assert (summary["q25_seconds"], summary["q75_seconds"]) == tuple(np.quantile(samples, [0.25, 0.75]))
    assert summary["sample_count"] == 101


@pytest.mark.parametrize(("count", "rank"), [(6, 0), (8, 0), (9, 1), (20, 5), (100, 39)])
def test_the_interval_of_the_median_is_the_tabulated_one(count: int, rank: int) -> None:
    # Ranks from the table of the sign test at 5%, two-sided (Conover, table A3), here counted from 0.
    samples = np.arange(1.0, count + 1)
    summary = summarise_samples(samples)
    assert (summary["low_seconds"], summary["high_seconds"]) == (samples[rank], samples[-1 - rank])


def test_the_interval_covers_the_median_as_often_as_it_says(rng: np.random.Generator) -> None:
    runs = 2000
    hits = 0
    for _ in range(runs):
        summary = summarise_samples(rng.exponential(size=15))
        hits += summary["low_seconds"] <= math.log(2) <= summary["high_seconds"]
    # 96.5% for 15 samples; the test's own scatter is 0.4% (one sigma), so 95% minus four of it.
    assert hits / runs > 0.933


def test_the_interval_is_the_exact_one_of_the_binomial_distribution() -> None:
    for count in (6, 7, 50, 51, 400, 3001):
        low, high = bound_median(np.arange(count, dtype=float))
        assert low is not None and high == count - 1 - low
        outside = [sum(math.comb(count, i) for i in range(int(low) + extra)) for extra in (1, 2)]
        assert outside[0] * 40 <= 2**count < outside[1] * 40


def test_a_million_samples_are_no_wait() -> None:
    # Exact integers took minutes; the normal approximation of the rank is off by one or two here.
    low, _ = bound_median(np.arange(1_000_000, dtype=float))
    assert low == pytest.approx(500_000 - 1.959964 / 2 * 1000, abs=3)


def test_the_interval_reaches_as_far_as_bursts_disagree() -> None:
    samples = [1e-3 + 1e-6 * step for step in range(41)]  # the median is 1.02e-3, known to 1% and less
    alone, apart, narrow = (summarise_samples(samples, error) for error in (None, 0.25, 0.001))
    assert (apart["low_seconds"], apart["high_seconds"]) == (1.02e-3 / 1.25, 1.02e-3 * 1.25)
    assert {**alone, "low_seconds": 0, "high_seconds": 0} == {**apart, "low_seconds": 0, "high_seconds": 0}
    assert narrow == alone
    assert summarise_samples(samples[:5], 0.25)["low_seconds"] is None  # too few stay too few


def test_too_few_samples_have_no_interval() -> None:
    summary = summarise_samples([1.0, 2.0, 3.0, 4.0, 5.0])
    assert summary["low_seconds"] is None and summary["high_seconds"] is None
    assert summarise_samples([1.0])["std_seconds"] is None


@pytest.mark.parametrize("samples", [[], [1.0, float("nan")], [0.0, 1.0], [-1.0], [float("inf")]])
def test_samples_that_are_no_times_are_refused(samples: list[float]) -> None:
    with pytest.raises(ValueError, match="positive finite seconds"):
        summarise_samples(samples)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"speed": 3}, "no column speed"),
        ({"status": "fine"}, "status must be one of"),
        ({"samples_seconds": None}, "needs samples_seconds"),
        ({"m": "seven"}, "seven"),
        ({"block": "first"}, "does not fit the table"),
        ({"pattern": "vectorial"}, "unknown pattern"),
    ],
)
def test_a_wrong_row_is_refused_and_nothing_written(
    tmp_path: Path, row: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        write_part(tmp_path, [row | change])
    assert list(tmp_path.iterdir()) == []


def test_the_hash_knows_rows_not_files(tmp_path: Path, row: dict[str, Any]) -> None:
    rows = [row | {"m": m, "started_at": pd.Timestamp("2026-01-01", tz="UTC")} for m in (1, 2, 3)]
    write_part(tmp_path / "one", rows)
    for each in reversed(rows):
        write_part(tmp_path / "many", [each])
    assert hash_table(tmp_path / "one") == hash_table(tmp_path / "many")
    write_part(tmp_path / "many", [rows[0] | {"threads": 1}])
    assert hash_table(tmp_path / "one") != hash_table(tmp_path / "many")


def test_a_points_time_is_its_latest_ok_row_or_else_its_latest_noisy_one(tmp_path: Path, row: dict[str, Any]) -> None:
    def at(day: int, **change: Any) -> dict[str, Any]:
        return row | {"started_at": pd.Timestamp(2026, 1, day, tz="UTC")} | change

    write_part(
        tmp_path,
        [
            at(2, samples_seconds=[2.0]),
            at(1, samples_seconds=[1.0]),
            at(3, status="noisy", samples_seconds=[3.0]),
            at(4, status="error", samples_seconds=None),
            at(1, m=8, status="timeout", samples_seconds=None),
            at(1, m=9, status="noisy", samples_seconds=[5.0]),
        ],
    )
    assert sorted(select_timed(read_table(tmp_path))["median_seconds"]) == [2.0, 5.0]


def _refusal(path: Path) -> str:
    with pytest.raises(BadData) as caught:
        read_table(path)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_missing_or_empty_table_is_said(tmp_path: Path) -> None:
    assert "no such table" in _refusal(tmp_path / "nowhere")
    assert "latbench sweep" in _refusal(tmp_path)
    write_environment(tmp_path, {"env_id": "a"})
    assert "empty table" in _refusal(tmp_path)


def test_foreign_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("hello")
    assert "text.parquet: not a readable Parquet file" in _refusal(tmp_path)
    (tmp_path / "zero.parquet").touch()
    assert "zero.parquet: not a readable" in _refusal(tmp_path / "zero.parquet")
    parquet.write_table(pa.table({"x": [1]}), tmp_path / "foreign.parquet")
    assert "foreign.parquet: not a latbench table (its columns are x ...)" in _refusal(tmp_path / "foreign.parquet")


def test_another_version_is_refused_with_both_numbers(tmp_path: Path, row: dict[str, Any]) -> None:
    table = parquet.read_table(write_part(tmp_path, [row]))
    newer = table.set_column(0, "schema_version", pa.array([7])).rename_columns(
        [*table.column_names[:-1], "column_of_the_future"]
    )
    parquet.write_table(newer, tmp_path / "newer.parquet")
    assert _refusal(tmp_path / "newer.parquet") == (
        f"{tmp_path / 'newer.parquet'}: table version 7, this latbench reads {SCHEMA_VERSION}"
    )


def test_a_missing_column_or_a_wrong_type_is_named(tmp_path: Path, row: dict[str, Any]) -> None:
    table = parquet.read_table(write_part(tmp_path, [row]))
    parquet.write_table(table.drop_columns(["threads"]), tmp_path / "a.parquet")
    assert "no column threads" in _refusal(tmp_path / "a.parquet")
    index = table.column_names.index("m")
    parquet.write_table(table.set_column(index, "m", pa.array(["seven"])), tmp_path / "b.parquet")
    assert "column m does not hold int64" in _refusal(tmp_path / "b.parquet")


def test_an_ok_row_without_a_time_is_refused(tmp_path: Path, row: dict[str, Any]) -> None:
    table = parquet.read_table(write_part(tmp_path, [row]))
    index = table.column_names.index("median_seconds")
    for name, value in (("nan", math.nan), ("null", None), ("zero", 0.0)):
        changed = table.set_column(index, "median_seconds", pa.array([value], pa.float64()))
        parquet.write_table(changed, tmp_path / f"{name}.parquet")
        assert "status ok and no positive time" in _refusal(tmp_path / f"{name}.parquet")


def test_a_table_that_pandas_rewrote_is_still_one(tmp_path: Path, row: dict[str, Any]) -> None:
    write_part(tmp_path / "table", [row, row | {"m": 8, "status": "oom", "samples_seconds": None}])
    frame = read_table(tmp_path / "table")
    frame.to_parquet(tmp_path / "rewritten.parquet")
    pd.testing.assert_frame_equal(read_table(tmp_path / "rewritten.parquet"), frame)


def test_a_truncated_part_is_refused_wherever_it_ends(tmp_path: Path, row: dict[str, Any]) -> None:
    part = write_part(tmp_path, [row])
    content = part.read_bytes()
    for length in (0, 1, 4, len(content) // 2, len(content) - 8, len(content) - 1):
        part.write_bytes(content[:length])
        assert part.name in _refusal(tmp_path)


def test_any_flipped_bit_is_seen(tmp_path: Path, row: dict[str, Any], rng: np.random.Generator) -> None:
    part = write_part(tmp_path, [row])
    content = part.read_bytes()
    for position in rng.integers(0, len(content), 64):
        damaged = bytearray(content)
        damaged[position] ^= 1 << int(rng.integers(8))
        part.write_bytes(damaged)
        assert "damaged" in _refusal(tmp_path)


def test_damage_without_the_telling_name_never_escapes_as_another_error(
    tmp_path: Path, row: dict[str, Any], rng: np.random.Generator
) -> None:
    content = write_part(tmp_path / "table", [row]).read_bytes()
    copied = tmp_path / "copy.parquet"
    for position in rng.integers(0, len(content), 200):
        damaged = bytearray(content)
        damaged[position] ^= 0xFF
        copied.write_bytes(damaged)
        try:
            read_table(copied)  # damage to a statistic or a comment changes no row
        except BadData as error:
            assert "copy.parquet" in str(error)


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, row: dict[str, Any]) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(EnvironmentUnusable, match="cannot write"):
        write_part(tmp_path / "file" / "table", [row])


def test_what_a_time_is_compared_with_is_computed_once(tmp_path: Path, row: dict[str, Any]) -> None:
    compared = {"roofline_seconds": 1.8e-3, "reference_seconds": 1.25, "reference_usual_seconds": 1.0}
    write_part(tmp_path, [row | compared, row | {"m": 8}])
    first, second = (found for _, found in read_table(tmp_path).iterrows())
    assert (first["median_seconds"], first["corrected_seconds"]) == (2e-3, 2e-3 / 1.25)
    assert first["utilisation"] == 1.8e-3 / 2e-3
    assert math.isnan(second["corrected_seconds"]) and math.isnan(second["utilisation"])


def test_what_is_impossible_or_a_spike_is_no_time(tmp_path: Path, row: dict[str, Any]) -> None:
    write_part(tmp_path, [row | {"status": "impossible"}, row | {"status": "spike", "m": 8}, row | {"m": 9}])
    assert select_timed(read_table(tmp_path))["m"].tolist() == [9]


def test_a_new_row_is_after_those_of_its_point(tmp_path: Path, row: dict[str, Any]) -> None:
    """As on a machine whose clock is right, whose clock was set back, and of a point that is new."""
    then = datetime(2026, 6, 1, tzinfo=UTC)
    write_part(tmp_path, [row | {"started_at": then - timedelta(days=day)} for day in range(3)])
    write_part(tmp_path, [row | {"m": 9, "started_at": then}])
    ids = {hash_key(row), hash_key(row | {"m": 11})}
    newest = find_newest_starts(read_table(tmp_path), ids)
    assert newest == {hash_key(row): then}
    later, earlier, other = date_after(
        newest,
        [
            row | {"started_at": then + timedelta(days=1)},
            row | {"started_at": then - timedelta(days=1), "flags": "preempted", "samples_seconds": [5e-3]},
            row | {"m": 11, "started_at": then - timedelta(days=9)},
        ],
    )
    assert later["started_at"] == then + timedelta(days=1) and other["started_at"] == then - timedelta(days=9)
    assert later["flags"] is other["flags"] is None
    assert earlier["started_at"] > then and earlier["flags"] == "preempted+clock_set_back"
    write_part(tmp_path, [earlier])
    seconds = select_timed(read_table(tmp_path)).set_index("m")["median_seconds"]
    assert seconds[row["m"]] == 5e-3


def test_a_table_that_is_damaged_while_it_grows_says_so_and_goes_on(tmp_path: Path, row: dict[str, Any]) -> None:
    growing = GrowingTable(tmp_path, ["m"])
    write_part(tmp_path, [row])
    assert list(growing.frame()["m"]) == [7] and growing.damage is None  # type: ignore[index]
    part = Path(str(write_part(tmp_path, [row | {"m": 8}])))
    whole = part.read_bytes()
    part.write_bytes(whole[:-20])
    write_part(tmp_path, [row | {"m": 9}])
    assert sorted(growing.frame()["m"]) == [7, 9] and part.name in str(growing.damage)  # type: ignore[index]
    with pytest.raises(BadData, match=part.name):
        GrowingTable(tmp_path, ["m"]).frame()
    part.write_bytes(whole)
    assert sorted(growing.frame()["m"]) == [7, 8, 9] and growing.damage is None  # type: ignore[index]
    (tmp_path / UNFINISHED).touch()
    assert sorted(growing.frame()["m"]) == [7, 8, 9] and "unfinished" in str(growing.damage)  # type: ignore[index]


def test_only_the_rows_that_are_wanted_come_in(
    tmp_path: Path, row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("latbench.tables.table.BATCH_ROWS", 3)
    write_part(tmp_path, [row | {"m": m, "batch": m if m % 2 else None} for m in range(1, 20)])
    found = select_rows(tmp_path, ["m"], lambda piece: pc.greater(piece["batch"], 7), ["batch"])
    assert found["m"].tolist() == [9, 11, 13, 15, 17, 19] and list(found) == ["m"]
    assert select_rows(tmp_path, ["m"], lambda piece: pc.greater(piece["m"], 99)).empty


def test_a_table_that_grows_is_read_once(
    tmp_path: Path, row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    batches = read_batches
    monkeypatch.setattr(
        "latbench.tables.table.read_batches", lambda part, columns: read.append(part.name) or batches(part, columns)
    )
    growing = GrowingTable(tmp_path, ["m", "status"])
    assert growing.frame() is None
    first = write_part(tmp_path, [row, row | {"m": 8}])
    assert growing.frame() is growing.frame()
    second = write_part(tmp_path, [row | {"m": 9}])
    frame = growing.frame()
    assert frame is not None and sorted(frame["m"]) == [7, 8, 9] and list(frame.columns) == ["m", "status"]
    assert read == [first.name, second.name]
    Path(str(first)).unlink()
    assert list(growing.frame()["m"]) == [9] and len(read) == 2  # type: ignore[index]
    Path(str(second)).rename(tmp_path / "by-hand.parquet")  # may change, its name tells nothing
    assert list(growing.frame()["m"]) == list(growing.frame()["m"]) == [9] and len(read) == 4  # type: ignore[index]
