"""What tiles fetch while they multiply: every line of a walk once, never more of them than a tile has columns."""

from itertools import chain

import pytest

from sparse_kernels.cpu.codegen import prefetch
from sparse_kernels.cpu.codegen.register_tiles import PACE_BITS
from sparse_kernels.cpu.kernels import token_blocks
from sparse_kernels.cpu.layouts import vector_grid

walk, step, standing = (
    function.py_func for function in (prefetch.start_walk, prefetch.advance, prefetch.start_standing)
)


def lines_of(fetched, columns: int) -> list[int]:
    """The lines that `row_tile` asks for with its columns, each once."""
    line, stride, pace, _ = fetched
    return list(dict.fromkeys(line + (c * pace >> PACE_BITS) * stride for c in range(columns))) if pace else []


@pytest.mark.parametrize(("runs", "length"), [(1, 40), (5, 8), (3, 1), (7, 3)])
@pytest.mark.parametrize("columns", [1, 7, 100, 5000])
def test_tiles_ask_for_every_line_once_and_in_order(runs: int, length: int, columns: int) -> None:
    going, asked = walk(1000, 64, length, 4096, runs * length, 2), []
    while len(list(chain(*asked))) < runs * length:
        fetched = step(going, columns)
        asked.append(lines_of(fetched, columns))
        assert 1 <= len(asked[-1]) <= columns
        going = fetched[3]
    assert list(chain(*asked)) == [1000 + run * 4096 + i * 64 for run in range(runs) for i in range(length)]
    assert not lines_of(step(going, columns), columns)


@pytest.mark.parametrize(("runs", "length", "tiles"), [(1, 90, 20), (48, 32, 64), (5, 7, 9), (3, 40, 3), (9, 4, 2)])
def test_all_is_asked_for_in_as_many_tiles_as_was_said_as_far_as_a_tile_a_run_allows(
    runs: int, length: int, tiles: int
) -> None:
    going = walk(0, 64, length, 4096, runs * length, tiles)
    for _ in range(max(tiles, runs)):
        going = step(going, 1000)[3]
    assert not lines_of(step(going, 1000), 1000)


@pytest.mark.parametrize("columns", [1, 2, 273, 1000, 5000])
def test_as_many_lines_as_columns_come_out_exactly(columns: int) -> None:
    for lines in {1, 2, columns // 2, columns - 1, columns} - {0}:
        if lines <= columns:
            assert len(lines_of(step(walk(0, 64, lines, 0, lines, 1), columns), columns)) == lines


def test_who_stands_asks_for_nothing_new() -> None:
    line, _, pace, still = step(standing(640), 12)
    assert (line, pace) == (640, 0) and still == standing(640)


def test_a_tile_without_columns_asks_for_nothing() -> None:
    going = walk(0, 64, 9, 0, 9, 3)
    assert not lines_of(step(going, 0), 0) and step(going, 0)[3] == going


def asked(going) -> set[int]:
    """Numbers of the lines of a whole walk, from address 0 on."""
    found: set[int] = set()
    while lines := lines_of(fetched := step(going, 10_000), 10_000):
        found.update(line // prefetch.LINE_BYTES for line in lines)
        going = fetched[3]
    return found


@pytest.mark.parametrize(("begin", "end"), [(0, 32), (32, 95), (7, 8)])
def test_the_rows_of_the_next_block_are_those_that_it_reads(begin: int, end: int) -> None:
    k = 48  # whole lines
    assert asked(token_blocks.walk_token_rows.py_func(0, k, begin, end, 3)) == set(
        range(begin * k // 16, end * k // 16)
    )


@pytest.mark.parametrize(("begin", "end"), [(0, 32), (32, 95), (7, 8)])
def test_the_lines_of_y_are_those_that_the_block_fills(begin: int, end: int) -> None:
    m = 48
    assert asked(token_blocks.walk_output_strips.py_func(0, m, begin, end, 3)) == set(
        range(begin * m // 16, end * m // 16)
    )


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize(
    ("begin", "end", "reached"), [(4, 8, 8), (8, 20, 20), (4, 10, 8), (2, 4, 4), (5, 7, 7), (6, 12, 8)]
)
def test_the_tiles_of_the_next_block_are_those_that_it_copies(lanes: int, begin: int, end: int, reached: int) -> None:
    """As far as `reached`: of a part of a tile only that much is foreseen."""
    k = 20
    starts = vector_grid.build_token_blocked_grid(6, lanes, k, k).x_starts
    going = token_blocks.walk_token_tiles.py_func(lanes, int(starts[begin]) * 4, k, begin, end, 3)
    elements = (starts[v] + c * vector_grid.TILE * lanes for v in range(begin, reached) for c in range(k))
    assert asked(going) == {int(element) * 4 // prefetch.LINE_BYTES for element in elements}
