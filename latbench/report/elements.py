"""The pieces a section is made of: tables, tiles and charts, as values without any HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from latbench.base.number_format import format_count, format_percent


@dataclass(frozen=True)
class Cell:
    """One table cell. The column sorts by `value`; `tint` in [-1, 1] colours a loss (below 0) or a gain."""

    text: str
    value: float | str | None = None
    detail: str = ""
    tint: float = 0.0


@dataclass(frozen=True)
class Column:
    """A column's heading; numbers are set flush right."""

    title: str
    number: bool = False


@dataclass(frozen=True)
class Table:
    """A table that the reader can sort by any column. One of plain facts has no heading; one of `cards` shows each
    row as a card where there is no room for columns.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    heading: bool = True
    cards: bool = False


@dataclass(frozen=True)
class Tile:
    """One figure of the first page, and what it means."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class Section:
    """One section: a heading, sentences, tiles, charts by the name report.js finds them under, tables with captions,
    and notes in small print.
    """

    anchor: str
    title: str
    sentences: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[tuple[str, Table]] = ()
    tiles: Sequence[Tile] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Chart:
    """A chart and its caption. With `choices` it shows one of several, chosen by the reader: each is one figure or
    more by the name of the part of the chart that they are; `titles` head the parts.
    """

    name: str
    caption: str
    figure: dict[str, Any] | None = None
    choices: Sequence[tuple[str, Mapping[str, dict[str, Any]]]] = ()
    label: str = ""
    titles: Mapping[str, str] = field(default_factory=dict)

    @property
    def parts(self) -> list[str]:
        """The names of its parts, empty for a single figure."""
        return list(self.choices[0][1]) if self.choices else []


def table(columns: Iterable[str], rows: Iterable[Sequence[Cell | str]]) -> Table:
    """A table from titles and cells; a title that starts with `#` heads a column of numbers, a text is a cell."""
    heads = [Column(title.removeprefix("#"), title.startswith("#")) for title in columns]
    return Table(heads, [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows])


def facts(pairs: Iterable[tuple[str, object]]) -> Table:
    """Names and values, without a heading."""
    return replace(table(["what", "value"], [[name, str(value)] for name, value in pairs]), heading=False)


def share_cell(value: float | None) -> Cell:
    """A share of one, in percent."""
    return Cell(format_percent(value), value)


def count_cell(value: int) -> Cell:
    """A count."""
    return Cell(format_count(value), value)
