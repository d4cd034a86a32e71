"""The records of the columns: one source for the file format, the checks and the reference page."""

from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from latbench.tables.schema import COLUMN_GROUPS, COLUMNS, EVERY_ROW, SCHEMA, STATUSES, list_needed_columns
from latbench.tables.schema_page import format_schema_page
from latbench.tables.validate import validate_table

ROOT = Path(__file__).parents[3]
PUBLISHED = sorted((ROOT / "datasets" / "measured").glob("*/part-*.parquet"))


def test_the_reference_page_is_what_the_code_generates() -> None:
    page = (ROOT / "docs/reference/table.md").read_text()
    assert page == format_schema_page(), "make docs"


def test_every_column_has_one_record_with_a_description() -> None:
    assert list(COLUMNS) == SCHEMA.names and len(COLUMNS) == sum(map(len, COLUMN_GROUPS.values()))
    for column in COLUMNS.values():
        assert column.description.endswith("."), column.name
        assert not column.allowed or pa.types.is_string(column.type), column.name
        assert not column.limits or not pa.types.is_string(column.type), column.name
        assert not column.name.endswith("_seconds") or column.unit == "seconds", column.name
        assert not column.name.endswith("_bytes") or column.unit == "bytes", column.name
    assert all(f"`{status}`" in COLUMNS["status"].description for status in STATUSES)
    assert "point_id" in list_needed_columns(EVERY_ROW)


@pytest.mark.parametrize("part", PUBLISHED, ids=lambda part: f"{part.parent.name}-{part.stem[5:9]}")
def test_published_tables_have_the_columns_of_the_records(part: Path) -> None:
    assert parquet.read_schema(part).equals(SCHEMA, check_metadata=True)


@pytest.mark.parametrize("name", sorted({part.parent.name for part in PUBLISHED}))
def test_published_tables_are_valid(name: str) -> None:
    found = list(validate_table(ROOT / "datasets" / "measured" / name))
    assert [fault for fault in found if fault.severity == "corrupt"] == []
