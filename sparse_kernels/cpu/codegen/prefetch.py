"""Fetch cache lines while tiles multiply: what will be read or written next, and lies far away.

A register tile waits for nothing while its columns are multiplied, so memory has time to bring something else. It has
to be asked evenly. AMD's cores drop what is fetched beyond the two dozen lines that they can wait for at once. That
is most of it where many are asked for in a row. 64 rows of 768 floats take 16.5 us to lay out from memory. They take
13.2 us if all were asked for just before, and 7 to 8 us with at least 25 cycles from one to the next. So a tile asks
for at most one line with each of its columns (`register_tiles.row_tile`).

A walk is what is fetched in the course of many tiles: runs of lines, `pitch` bytes from one run to the next, `stride`
bytes from one line of a run to the next. It is a plain tuple, which costs nothing in a compiled kernel:

    at       address of the run
    stride   bytes from line to line
    length   lines of a run
    pitch    bytes from run to run
    done     lines of this run that were asked for
    left     lines of all runs that were not
    each     how many of them a tile is to ask for
"""

from __future__ import annotations

from sparse_kernels.cpu.codegen.register_tiles import PACE_BITS, fetch
from sparse_kernels.cpu.runtime.kernel_cache import inline
from sparse_kernels.cpu.runtime.scratch_buffers import LINE

Walk = tuple[int, int, int, int, int, int, int]

LINE_BYTES = 4 * LINE

# Elements of x and y from which on a walk pays: 2 MB. Smaller arrays have often just been written and lie in the
# second-level cache. Fetching them again costs up to 6% (128 tokens).
FAR = 2**19


@inline
def fetch_now(at: int, size: int) -> None:
    """Fetch `size` bytes from the start of a cache line on, at once, which would be waited for line by line.

    The processor may drop some of many lines, as said above; the others are at hand.
    """
    for line in range(at, at + size, LINE_BYTES):
        fetch(line)


@inline
def start_standing(at: int) -> Walk:
    """Return a walk that goes nowhere; `at` is fetched over and over, so it should be at hand."""
    return at, 0, 1, 0, 0, 0, 0


@inline
def start_walk(at: int, stride: int, length: int, pitch: int, lines: int, tiles: int) -> Walk:
    """Return a walk over `lines` lines, `length` a run, in the course of `tiles` (>= 1) tiles that have columns
    enough.

    A tile stays in one run; as few tiles share each run, evenly, as it takes to be done in time.
    """
    each = max(1, (lines + tiles - 1) // tiles)
    turns = max(1, length // each)
    return at, stride, length, pitch, 0, lines, max(each, (length + turns - 1) // turns)


@inline
def advance(walk: Walk, columns: int) -> tuple[int, int, int, Walk]:
    """Return what a tile of so many columns fetches (line, stride, pace, as in `LineWalk`), and the walk behind
    it."""
    at, stride, length, pitch, done, left, each = walk
    lines = min(each, left, length - done, columns)
    line, pace = at + done * stride, ((lines << PACE_BITS) + columns - 1) // max(columns, 1)
    done += lines
    if done == length:
        at, done = at + pitch, 0
    return line, stride, pace, (at, stride, length, pitch, done, left - lines, each)
