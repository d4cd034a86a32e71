"""What is no time, and what nothing explains."""

import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from latbench.tables.plausibility import explain_impossible, find_spikes
from latbench.tables.validate import validate_table
from latbench.tables.writer import write_part


@pytest.mark.parametrize("sample", [0.0, -1e-9, math.nan, math.inf])
def test_a_time_that_is_none_is_impossible(sample: float) -> None:
    assert "clock" in (explain_impossible([1e-3, sample, 1e-3], None) or "")


def test_faster_than_the_device_is_impossible_and_a_little_above_its_ceilings_is_not() -> None:
    assert explain_impossible([1e-3] * 9, roofline_seconds=1.2e-3) is None
    assert "1.3 times faster than this device can" in (explain_impossible([1e-3] * 9, roofline_seconds=1.3e-3) or "")
    assert explain_impossible([1e-3] * 9, roofline_seconds=None) is None


def test_one_short_sample_is_not_the_point() -> None:
    assert explain_impossible([1e-6, *[1e-3] * 9], roofline_seconds=1e-3) is None


def test_the_gate_judges_the_median_that_the_table_has() -> None:
    fast, slow = [1e-3] * 5, [2e-3] * 5  # the median is 1.5e-3, the upper one 2e-3
    assert "faster than this device can" in (explain_impossible([*fast, *slow], roofline_seconds=2e-3) or "")


def test_a_spike_lies_above_both_neighbours() -> None:
    assert find_spikes({0.5: 4.0, 0.75: 9.0, 0.9: 1.0, 0.95: 0.9}) == [0.75]
    assert find_spikes({0.5: 4.0, 0.75: 5.0, 0.9: 1.0}) == []
    assert find_spikes({0.95: 9.0, 0.5: 1.0}) == []  # an end has one neighbour
    assert find_spikes({0.5: 1.0, 0.6: 9.0, 0.7: 1.0, 0.8: 9.0, 0.9: 1.0}) == [0.6, 0.8]
    assert find_spikes({}) == []


COMPARED = {"roofline_seconds": 1.8e-3, "reference_seconds": 1.25, "reference_usual_seconds": 1.0}


def tampered(folder: Path, row: dict[str, Any], column: str, value: float) -> list[str]:
    """What is found in a table of `row` with one column replaced after it was computed."""
    path = write_part(folder, [row | COMPARED])
    table = parquet.read_table(path)
    place = table.column_names.index(column)
    parquet.write_table(table.set_column(place, table.schema.field(column), pa.array([value])), folder / "x.parquet")
    path.unlink()
    return [found.text for found in validate_table(folder) if found.severity == "corrupt"]


def test_validate_computes_what_follows_from_a_time(tmp_path: Path, row: dict[str, Any]) -> None:
    assert tampered(tmp_path / "a", row, "corrected_seconds", 1.6e-3) == []
    assert any("corrected_seconds" in text for text in tampered(tmp_path / "b", row, "corrected_seconds", 1.7e-3))
    assert any("utilisation" in text for text in tampered(tmp_path / "c", row, "utilisation", 0.5))


def test_validate_finds_times_above_the_roofline(tmp_path: Path, row: dict[str, Any]) -> None:
    write_part(tmp_path, [row | {"roofline_seconds": 2.4e-3}])
    assert not [found for found in validate_table(tmp_path) if found.severity == "corrupt"]
    write_part(tmp_path, [row | {"roofline_seconds": 2.6e-3}])
    found = [found.text for found in validate_table(tmp_path) if found.severity == "corrupt"]
    assert len(found) == 1 and "1.3 times faster than this device can" in found[0]
