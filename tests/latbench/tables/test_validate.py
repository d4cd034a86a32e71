"""Validation: whatever is wrong with a table is found, and the sentence names the file and the row."""

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from latbench.base.environments import hash_environment
from latbench.errors import BadData
from latbench.machines.devices import describe_cpu_environment
from latbench.tables import validate
from latbench.tables.schema import SCHEMA
from latbench.tables.table import list_environment_files, list_environments, read_table
from latbench.tables.time_summary import summarise_sample_rows, summarise_samples
from latbench.tables.validate import validate_table
from latbench.tables.writer import write_environment, write_part, write_rows

CONV = {
    "op": "conv2d", "k": 72, "batch": 1, "c_in": 8, "h": 14, "w": 14, "c_out": 7, "kh": 3, "kw": 3,
    "stride_h": 1, "stride_w": 1, "padding_h": 1, "padding_w": 1, "dilation_h": 1, "dilation_w": 1,
}  # fmt: skip


def build_environment() -> dict[str, Any]:
    """Describe this machine as if its processes could use two processors."""
    found = describe_cpu_environment(2) | {"processors": 2}
    return found | {"env_id": hash_environment(found)}


def test_validate_praises_a_whole_table(latbench: Any, whole: Path) -> None:
    ran = latbench("validate", whole.parent)
    assert ran.code == 0 and "1 file: no faults found" in ran.out


def test_validate_goes_on_after_a_damaged_part(latbench: Any, tmp_path: Path, row: dict[str, Any]) -> None:
    known = {"run_id": "run", "env_id": build_environment()["env_id"], "timer": "perf_counter"}
    write_environment(tmp_path, build_environment())
    parts = [write_part(tmp_path, [row | known | {"m": m}]) for m in (1, 2)]
    parts[0].write_bytes(parts[0].read_bytes()[:-9])
    (tmp_path / "foreign.parquet").write_bytes(b"not parquet")
    ran = latbench("validate", tmp_path)
    assert "2 findings are corruption" in ran.refused(5)
    assert f"corrupt: {parts[0]}: damaged" in ran.out and "foreign.parquet" in ran.out
    assert str(parts[1]) not in ran.out


def test_validate_has_nothing_to_say_of_no_table(latbench: Any, tmp_path: Path) -> None:
    assert "no such table" in latbench("validate", tmp_path / "nowhere").refused(5)


@pytest.mark.parametrize(
    ("column", "value", "severity", "words"),
    [
        ("point_id", "0123456789abcdef", "corrupt", "its key hashes to"),
        ("status", "splendid", "corrupt", "unknown status 'splendid'"),
        ("status", "", "corrupt", "unknown status ''"),
        ("status", "error", "corrupt", "status error with a time: such a row has none"),
        ("m", 2**60 + 1, "corrupt", "its key hashes to"),
        ("pattern", "vector:99999999999999999999999", "corrupt", "at most 2147483647"),
        ("pattern", "checkers", "corrupt", "unknown pattern"),
        ("pattern", "profile", "corrupt", "profile is the pattern of no layer"),
        ("v", 16, "corrupt", "v is 16, and pattern vector:32 says 32"),
        ("median_seconds", 2.1e-3, "corrupt", "median_seconds is 0.0021, and its samples give 0.002"),
        ("samples_seconds", [1.0, -1.0], "corrupt", "positive finite seconds"),
        ("nnz", 92, "corrupt", "nnz 92 of 91 weights"),
        ("sparsity_actual", 0.1, "corrupt", "contradicts a sparsity of 0.1"),
    ],
)
def test_validate_sees_a_row_that_contradicts_itself(
    latbench: Any, tmp_path: Path, row: dict[str, Any], column: str, value: Any, severity: str, words: str
) -> None:
    whole = parquet.read_table(write_part(tmp_path, [row | {"nnz": 21, "sparsity_actual": 1 - 21 / 91}]))
    index, field = whole.column_names.index(column), SCHEMA.field(column)
    parquet.write_table(whole.set_column(index, field, pa.array([value], field.type)), tmp_path / "edited.parquet")
    ran = latbench("validate", tmp_path / "edited.parquet")
    ran.refused(5)
    assert severity in ran.out and words in ran.out


def test_validate_suspects_times_in_another_unit(latbench: Any, tmp_path: Path, row: dict[str, Any]) -> None:
    big = {"m": 4096, "k": 4096, "n": 4096}
    write_part(tmp_path, [row | big | {"samples_seconds": [1e-9]}, row | {"samples_seconds": [7000.0]}])
    ran = latbench("validate", tmp_path)
    assert ran.code == 0 and ran.out.count("times are in seconds") == 2


def test_validate_notes_repeated_points(latbench: Any, tmp_path: Path, row: dict[str, Any]) -> None:
    write_part(tmp_path, [row, row])
    ran = latbench("validate", tmp_path)
    assert ran.code == 0 and "1 points have more than one row" in ran.out


@pytest.fixture
def rows(row: dict[str, Any], rng: np.random.Generator) -> list[dict[str, Any]]:
    """Three whole rows of one run; the second is the one that the tests damage."""
    run = {
        "run_id": "run",
        "env_id": build_environment()["env_id"],
        "nnz": 21,
        "sparsity_actual": 1 - 21 / 91,
    }
    run |= {"roofline_seconds": 1e-4, "reference_seconds": 1.1, "reference_usual_seconds": 1.0}
    run |= {"burst_error": 0.6, "timer": "perf_counter", "block": 0, "flop_dense": 910, "flop_nnz": 210}
    run |= {"bytes_min": 400}
    return [
        row
        | run
        | {"pattern_seed": seed, "samples_seconds": list(rng.lognormal(-7, 0.1, 9))}
        | {"started_at": datetime(2026, 1, 1, 12, 0, seed, tzinfo=UTC)}
        for seed in range(3)
    ]


@pytest.fixture
def whole(tmp_path: Path, rows: list[dict[str, Any]]) -> Path:
    """A part without a fault, in a table of its own."""
    write_environment(tmp_path / "whole", build_environment())
    part = write_part(tmp_path / "whole", rows)
    assert isinstance(part, Path)
    return part


def _edited(part: Path, column: str, value: Any) -> Path:
    """The table of `part` with another value in its second row, as someone who knows the format would write it."""
    content = parquet.read_table(part)
    values = content[column].to_pylist()
    values[1] = value
    field = SCHEMA.field(column)
    changed = content.set_column(content.column_names.index(column), field, pa.array(values, field.type))
    part.unlink()
    write_rows(part.parent, changed)
    return part.parent


def _found(path: Path, severity: str = "corrupt") -> list[str]:
    return [f"{found.path.name}: {found.text}" for found in validate_table(path) if found.severity == severity]


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("burst_error", 0.7, "low_seconds is"),
        ("burst_error", None, "low_seconds is"),
        ("burst_error", -1.0, "burst_error is -1"),
        ("reference_seconds", 1.2, "reference_ratio is 1.1, but the columns beside it"),
        ("reference_usual_seconds", 1.1, "corrected_seconds is"),
        ("reference_usual_seconds", None, "reference_ratio is 1.1, and the columns that it follows from are missing"),
        ("reference_usual_seconds", 0.0, "reference_usual_seconds is 0: it must be above 0"),
    ],
)
def test_what_an_interval_and_a_correction_follow_from_is_in_the_table(
    whole: Path, column: str, value: float | None, words: str
) -> None:
    assert any(words in text for text in _found(_edited(whole, column, value)))


def test_a_whole_table_has_no_fault(whole: Path) -> None:
    assert list(validate_table(whole.parent)) == []
    assert list(validate_table(whole)) == []


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("point_id", "0123456789abcdef", "its key hashes to"),
        ("threads", 3, "its key hashes to"),  # a key that was edited
        ("point_id", None, "point_id is null"),
        ("device", None, "device is null"),
        ("started_at", None, "started_at is null"),
        ("pattern", None, "pattern is null"),
        ("status", None, "status is null"),
        ("status", "splendid", "unknown status 'splendid'"),
        ("pattern", "checkers", "unknown pattern"),
        ("format", "dense", "format is dense, and pattern vector:32 says vector"),
        ("v", None, "v is None, and pattern vector:32 says 32"),
        ("block_h", 4, "block_h is 4, and pattern vector:32 says None"),
        ("m", 0, "m is 0"),
        ("k", -13, "k is -13"),
        ("sparsity_target", 75.0, "sparsity_target is 75: it must be between 0 and 1"),
        ("sparsity_target", None, "sparsity_target is null"),
        ("sparsity_actual", -0.1, "sparsity_actual is -0.1: it must be between 0 and 1"),
        ("nnz", 92, "nnz 92 of 91 weights"),
        ("median_seconds", -1e-3, "median_seconds is -0.001: it must be above 0"),
        ("median_seconds", 0.0, "median_seconds is 0: it must be above 0"),
        ("median_seconds", math.nan, "median_seconds is nan: it must be above 0"),
        ("median_seconds", math.inf, "median_seconds is inf: it must be above 0"),
        ("median_seconds", None, "status ok and no time"),
        ("min_seconds", 0.0, "min_seconds is 0: it must be above 0"),
        ("high_seconds", -1.0, "high_seconds is -1: it must be above 0"),
        ("median_seconds", 1e-3, "median_seconds is 0.001, and its samples give"),
        *((f"{name}_seconds", 1e-3, "and its samples give") for name in ("min", "mean", "q25", "q75", "p95", "std")),
        ("low_seconds", None, "low_seconds is nan, and its samples give"),
        ("high_seconds", 1e-3, "high_seconds is 0.001, and its samples give"),
        ("corrected_seconds", 1e-3, "corrected_seconds is 0.001, but the columns beside it"),
        ("utilisation", 0.9, "utilisation is 0.9, but the columns beside it"),
        ("roofline_seconds", 1.0, "times faster than this device can"),
        ("sample_count", 8, "sample_count is 8, and it has 9"),
        ("samples_seconds", [1e-3, -1e-3] * 4 + [1e-3], "samples must be positive finite seconds"),
        ("samples_seconds", [1e-3, 0.0] * 4 + [1e-3], "samples must be positive finite seconds"),
        ("samples_seconds", [1e-3, math.nan] * 4 + [1e-3], "samples must be positive finite seconds"),
        ("samples_seconds", [1e-3, None] * 4 + [1e-3], "samples must be positive finite seconds"),
        ("samples_seconds", [1e-3] * 9, "median_seconds is"),
        ("samples_seconds", [], "sample_count is 9, and it has 0"),
        ("flop_dense", 909, "flop_dense is 909: it must be two for each weight and position"),
        ("flop_nnz", 212, "flop_nnz is 212: it must be two for each weight and position"),
        ("n", None, "n is null"),
        ("threads", None, "threads is null"),
        ("context", None, "context is null"),
        ("threads", 0, "threads is 0"),
        ("pattern_seed", -1, "pattern_seed is -1"),
        ("weight_copies", 0, "weight_copies is 0"),
        ("inner_loops", 0, "inner_loops is 0"),
        ("discarded_samples", -1, "discarded_samples is -1"),
        ("bytes_min", 0, "bytes_min is 0"),
        ("roofline_seconds", -1e-4, "roofline_seconds is -0.0001"),
        ("clock_hertz", 0.0, "clock_hertz is 0"),
        ("steal_fraction", 1.5, "steal_fraction is 1.5: it must be between 0 and 1"),
        ("load", math.inf, "load is inf"),
        ("drift_ratio", -1.0, "drift_ratio is -1"),
    ],
)
def test_a_row_that_is_wrong_is_named(whole: Path, column: str, value: Any, words: str) -> None:
    folder = _edited(whole, column, value)
    found = [text for text in _found(folder) if words in text]
    assert found, _found(folder)
    [part] = folder.glob("part-*.parquet")
    assert found[0].startswith(f"{part.name}: row 2 (point ")
    assert all(": row 2 (" in text for text in _found(folder))


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("op", "convolution", "op is convolution, and latbench writes linear, conv2d, model"),
        ("context", "netwrok", "context is netwrok, and latbench writes isolated, network"),
        ("stop_reason", "tired", "stop_reason is tired"),
        (
            "started_at",
            datetime(1970, 1, 2, tzinfo=UTC),
            "started_at is 1970-01-02 00:00:00+00:00: a clock was wrong",
        ),
        ("started_at", datetime.now(UTC) + timedelta(days=9), "a clock was wrong"),
    ],
)
def test_a_row_that_is_odd_is_suspected(whole: Path, column: str, value: Any, words: str) -> None:
    assert any(words in text for text in _found(_edited(whole, column, value), "suspect"))


@pytest.mark.parametrize("column", ["run_id", "env_id", "timer"])
def test_a_time_of_unknown_origin_is_noted(whole: Path, column: str) -> None:
    notes = _found(_edited(whole, column, None), "note")
    assert [note for note in notes if f"1 times have no {column}: their origin" in note]


def test_what_is_wrong_everywhere_is_not_told_of_every_row(
    whole: Path, monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]]
) -> None:
    monkeypatch.setattr(validate, "MOST_OF_A_FILE", 2)
    write_part(whole.parent, [row | {"pattern_seed": 10 + i, "m": 0} for i in range(3) for row in rows])
    found = _found(whole.parent)
    assert len(found) == 3 and found[2].endswith("more findings of this kind are not listed")


def test_a_part_that_was_deleted_is_missed(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    write_environment(tmp_path, build_environment())
    parts = [write_part(tmp_path, [row | {"block": block}]) for block, row in enumerate(rows)]
    assert list(validate_table(tmp_path)) == []
    assert isinstance(parts[1], Path)
    parts[1].unlink()
    [found] = _found(tmp_path, "note")
    assert "run run has rows of 2 blocks, and 1 more were written: parts are missing" in found


@pytest.mark.parametrize("column", ["batch", "c_in", "h", "stride_w", "dilation_h"])
def test_a_convolution_without_a_size_is_named(tmp_path: Path, rows: list[dict[str, Any]], column: str) -> None:
    sparse = {"nnz": None, "sparsity_actual": None, "flop_dense": None, "flop_nnz": None}
    write_part(tmp_path, [rows[0], rows[1] | CONV | sparse | {column: None}])
    [found] = _found(tmp_path)
    assert "row 2 (point " in found and found.endswith(f"{column} is null")


def test_a_convolution_whose_matrix_is_not_its_own_is_named(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    sparse = {"nnz": None, "sparsity_actual": None, "flop_dense": None, "flop_nnz": None}
    write_part(tmp_path, [rows[0], rows[1] | CONV | {"k": 71} | sparse])
    [found] = _found(tmp_path)
    assert "row 2 (point " in found and "k is 71, but the convolution has 3x3x8" in found


def test_what_contradicts_an_earlier_row_is_named_with_it(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    first = write_part(tmp_path, rows)
    write_part(tmp_path, [rows[2], rows[1] | {"samples_seconds": [5e-3]}])
    [found] = _found(tmp_path)
    assert "the same measurement as in row 2 of " in found and found.count("part-") == 2 and first.name in found
    notes = _found(tmp_path, "note")
    assert any("1 rows are there more than once" in note for note in notes)
    assert any("2 points have more than one row" in note for note in notes)


def test_measuring_a_point_again_is_no_contradiction(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    later = rows[1]["started_at"] + timedelta(minutes=1)
    write_part(tmp_path, [*rows, rows[1] | {"started_at": later, "samples_seconds": [5e-3]}])
    assert _found(tmp_path) == []


def test_a_row_cannot_have_more_threads_than_its_process_had(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    environment = build_environment()
    older = {name: value for name, value in environment.items() if name != "processors"}
    older["env_id"] = hash_environment(older)
    for each in (environment, older):
        write_environment(tmp_path, each)
    of_three = [
        row | {"threads": 3, "env_id": its["env_id"]} for row, its in zip(rows, (environment, older), strict=False)
    ]
    part = write_part(tmp_path, [*of_three, rows[2] | {"threads": 2, "env_id": environment["env_id"]}])
    [found] = [finding for finding in validate_table(tmp_path) if "threads" in finding.text]
    assert (found.path, found.severity) == (part, "corrupt")
    assert found.text.endswith("threads is 3, and this process could use 2 processors")


def test_an_environment_that_is_edited_or_lost_is_named(whole: Path) -> None:
    [environment] = list_environments(whole.parent)
    env_id, edited = environment["env_id"], environment | {"governor": "made up"}
    write_environment(whole.parent, edited)
    [found] = _found(whole.parent)
    assert found == f"env-{env_id}.json: environment {env_id}: its content hashes to {hash_environment(edited)}"
    (whole.parent / f"env-{env_id}.json").unlink()
    [lost] = _found(whole.parent, "suspect")
    assert lost == f"{whole.name}: environment {env_id} is not described: there is no env-{env_id}.json"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not readable JSON"),
        (b"\xff\x00", "not readable JSON"),
        (b'{"env_id": "x", "python":', "not readable JSON"),
        (b"[1, 2]", "not the description of an environment"),
        (b'{"env_id": ["x"]}', "not the description of an environment"),
        (b'{"python": "3.11"}', "it describes environment None, which does not match its name"),
        (b'{"env_id": "y"}', "it describes environment y, which does not match its name"),
    ],
)
def test_a_damaged_environment_is_named(whole: Path, content: bytes, words: str) -> None:
    [file] = list_environment_files(whole)
    (file.parent / "env-x.json").write_bytes(content)
    [found] = _found(whole.parent)
    assert found.startswith("env-x.json: ") and words in found
    with pytest.raises(BadData, match=r"env-x\.json: .*; delete it, and a sweep describes its machine again"):
        list_environments(whole.parent)


def _truncated(part: Path) -> None:
    part.write_bytes(part.read_bytes()[:-100])


def _flipped(part: Path) -> None:
    content = bytearray(part.read_bytes())
    content[len(content) // 3] ^= 4
    part.write_bytes(content)


def _rewritten(change: Callable[[pa.Table], pa.Table]) -> Callable[[Path], None]:
    def damage(part: Path) -> None:
        content = part.parent / "content"
        parquet.write_table(change(parquet.read_table(part)), content)
        part.unlink()
        content.rename(part.with_name("edited.parquet"))

    return damage


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (_truncated, "damaged, truncated or edited"),
    "a flipped bit": (_flipped, "damaged, truncated or edited"),
    "empty": (lambda part: part.write_bytes(b""), "damaged, truncated or edited"),
    "another name": (lambda part: part.rename(part.with_name(f"part-{'0' * 16}.parquet")), "damaged, truncated or"),
    "text": (lambda part: (part.parent / "x.parquet").write_text("m,k,n"), "not a readable Parquet file"),
    "foreign": (_rewritten(lambda _: pa.table({"a": [1], "b": [2]})), "not a latbench table (its columns are a, b"),
    "a column less": (_rewritten(lambda table: table.drop_columns(["nnz"])), "it has no column nnz"),
    "a text for a number": (
        _rewritten(lambda table: table.set_column(table.column_names.index("m"), "m", pa.array(["x"] * 3))),
        "column m does not hold int64",
    ),
    "a fraction for a whole": (
        _rewritten(lambda table: table.set_column(table.column_names.index("m"), "m", pa.array([1.5] * 3))),
        "column m does not hold int64",
    ),
    "another version": (
        _rewritten(lambda table: table.set_column(0, "schema_version", pa.array([9] * 3))),
        "table version 9, this latbench reads",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_named_and_the_others_are_still_checked(
    latbench: Any, whole: Path, rows: list[dict[str, Any]], name: str
) -> None:
    damage, words = DAMAGES[name]
    other = write_part(
        whole.parent,
        [rows[0] | {"m": 9, "nnz": 9, "sparsity_actual": 1 - 9 / 117} | {"flop_dense": 1170, "flop_nnz": 90}],
    )
    damage(whole)
    found = [text for text in _found(whole.parent) if words in text]
    assert len(found) == 1, _found(whole.parent)
    assert not any(text.startswith(other.name) for text in _found(whole.parent))
    assert "corruption" in latbench("validate", whole.parent).refused(5)


def test_flipped_bits_in_a_file_without_a_telling_name_never_pass_as_another_time(
    whole: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    content, copy = whole.read_bytes(), tmp_path / "copy.parquet"
    expected = read_table(whole)
    found = 0
    for position in rng.integers(0, len(content), 120):
        damaged = bytearray(content)
        damaged[position] ^= 1 << int(rng.integers(8))
        copy.write_bytes(damaged)
        if _found(copy):
            found += 1
        else:  # such as in the name of the program that wrote it
            pd.testing.assert_frame_equal(read_table(copy), expected)
    assert found > 60


def test_findings_do_not_depend_on_how_a_file_is_cut(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _edited(whole, "median_seconds", 1e-3)
    expected = [str(found) for found in validate_table(folder)]
    monkeypatch.setattr("latbench.tables.table.BATCH_ROWS", 1)
    assert [str(found) for found in validate_table(folder)] == expected and expected


def test_a_summary_of_many_rows_is_that_of_each(rng: np.random.Generator) -> None:
    for count in (1, 2, 5, 6, 7, 50):
        samples = rng.lognormal(size=(20, count))
        errors = np.where(rng.random(20) < 0.5, np.nan, rng.random(20))
        found = summarise_sample_rows(samples, errors)
        for index, row_samples in enumerate(samples):
            error = None if math.isnan(errors[index]) else errors[index]
            for name, value in summarise_samples(row_samples, error).items():
                if name != "sample_count":
                    expected = math.nan if value is None else value
                    assert found[name][index] == pytest.approx(expected, rel=1e-12, nan_ok=True)
