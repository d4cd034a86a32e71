"""The elements of a section: tables, tiles and charts, as values without HTML."""

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
    """A table that the reader can sort by any column.

    A table of plain facts has no heading. With `cards` each row becomes a card on a narrow screen.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    heading: bool = True
    cards: bool = False


@dataclass(frozen=True)
class FigureTile:
    """One number at the top of the page, with its meaning."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class Section:
    """One section: a heading, sentences, tiles, charts, tables with captions, and notes in small print."""

    anchor: str
    title: str
    sentences: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[tuple[str, Table]] = ()
    tiles: Sequence[FigureTile] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Chart:
    """A chart and its caption.

    With `choices` the reader chooses one of several. Each choice holds figures by the name of their part of the
    chart; `titles` head the parts.
    """

    name: str
    caption: str
    figure: dict[str, Any] | None = None
    choices: Sequence[tuple[str, Mapping[str, dict[str, Any]]]] = ()
    label: str = ""
    titles: Mapping[str, str] = field(default_factory=dict)

    @property
    def parts(self) -> list[str]:
        """The names of the parts; empty for a single figure."""
        return list(self.choices[0][1]) if self.choices else []


def build_table(columns: Iterable[str], rows: Iterable[Sequence[Cell | str]]) -> Table:
    """Build a table from titles and cells; a title that starts with `#` heads a column of numbers."""
    heads = [Column(title.removeprefix("#"), title.startswith("#")) for title in columns]
    return Table(heads, [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows])


def build_facts(pairs: Iterable[tuple[str, object]]) -> Table:
    """Build a table of names and values without a heading."""
    return replace(build_table(["what", "value"], [[name, str(value)] for name, value in pairs]), heading=False)


def build_share_cell(value: float | None) -> Cell:
    """Return a cell with a share of one in percent."""
    return Cell(format_percent(value), value)


def build_count_cell(value: int) -> Cell:
    """Return a cell with a count."""
    return Cell(format_count(value), value)
