"""The reference page of the table's columns, generated from their records.

`make docs` writes it to docs/reference/table.md.
"""

from __future__ import annotations

import sys

import pyarrow as pa

from latbench.tables.schema import COLUMN_GROUPS, SCHEMA_VERSION, TableColumn

_HEAD = f"""# Table columns

A table is a folder of `part-*.parquet` files, or one Parquet file. Every row has the columns below, version
{SCHEMA_VERSION}. Rows with equal key columns measure the same point. `latbench validate TABLE` checks the limits.
`read_table` in `latbench.tables.table` reads a table as a pandas frame.

This page is generated: `make docs`.
"""

_TYPES = {"string": "text", "int64": "integer", "double": "number"}


def format_schema_page() -> str:
    """Return the page as Markdown."""
    parts = [_HEAD]
    for title, columns in COLUMN_GROUPS.items():
        rows = "\n".join(map(_format_row, columns))
        parts.append(
            f"## {title}\n\n| column | type | unit | values | required in | meaning |\n|{'---|' * 6}\n{rows}\n"
        )
    return "\n".join(parts)


def _format_row(column: TableColumn) -> str:
    values = ", ".join(f"`{word}`" for word in column.allowed) or column.limits
    cells = (f"`{column.name}`", _format_type(column.type), column.unit, values, column.needed, column.description)
    return "| " + " | ".join(cells) + " |"


def _format_type(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return "list of numbers"
    return "time" if pa.types.is_timestamp(kind) else _TYPES[str(kind)]


if __name__ == "__main__":
    sys.stdout.write(format_schema_page())
