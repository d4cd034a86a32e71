"""What tiles fetch while they multiply: every line of a walk once, never more of them than a tile has columns."""

from itertools import chain

import pytest

from sparse_kernels.cpu import ahead
from sparse_kernels.cpu.micro import PACE_BITS

walk, step, standing = (function.py_func for function in (ahead.walk, ahead.step, ahead.standing))


def lines_of(fetched, columns: int) -> list[int]:
    """The lines that `row_tile` asks for with its columns, each once."""
    line, stride, pace, _ = fetched
    return list(dict.fromkeys(line + (c * pace >> PACE_BITS) * stride for c in range(columns))) if pace else []


@pytest.mark.parametrize(("runs", "length"), [(1, 40), (5, 8), (3, 1), (7, 3)])
@pytest.mark.parametrize("columns", [1, 7, 100])
def test_tiles_ask_for_every_line_once_and_in_order(runs: int, length: int, columns: int) -> None:
    going, asked = walk(1000, 64, length, 4096, runs * length, 2), []
    while len(list(chain(*asked))) < runs * length:
        fetched = step(going, columns)
        asked.append(lines_of(fetched, columns))
        assert 1 <= len(asked[-1]) <= columns
        going = fetched[3]
    assert list(chain(*asked)) == [1000 + run * 4096 + i * 64 for run in range(runs) for i in range(length)]
    assert not lines_of(step(going, columns), columns)


def test_lines_are_asked_for_in_as_many_tiles_as_was_said_where_they_have_columns_enough() -> None:
    going = walk(0, 64, 90, 0, 90, 20)
    for _ in range(18):  # five each
        fetched = step(going, 8)
        going = fetched[3]
        assert len(lines_of(fetched, 8)) == 5
    assert not lines_of(step(going, 8), 8)


def test_who_stands_asks_for_nothing_new() -> None:
    line, _, pace, still = step(standing(640), 12)
    assert (line, pace) == (640, 0) and still == standing(640)


def test_a_tile_without_columns_asks_for_nothing() -> None:
    going = walk(0, 64, 9, 0, 9, 3)
    assert not lines_of(step(going, 0), 0) and step(going, 0)[3] == going
