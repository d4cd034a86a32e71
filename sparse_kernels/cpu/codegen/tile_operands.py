"""What kernels hand to the emitters: NamedTuples, so that each argument says what it is.

In a kernel a field is an integer; in an emitter it is the LLVM value of that integer. Addresses are in bytes, sizes
and strides in elements. They are structures in registers, of which compiled code keeps nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Word = Any
"""An int64: an int to a kernel, an `ir.Value` to an emitter."""


class Matrix(NamedTuple):
    """Rows of float32.

    address: of the first element. stride: from one row to the next.
    """

    address: Word
    stride: Word


class TileWeights(NamedTuple):
    """The weights of a panel.

    values: address of the values, column after column. columns: address of the columns, or their offsets in x, int32.
    count: columns.
    """

    values: Word
    columns: Word
    count: Word


class TokenRows(NamedTuple):
    """Token-major rows that a tile reads or writes.

    address: of the first row. stride: from one row to the next. left: tokens (>= 1) from the first row on; beyond
    them the last one is read again, and nothing is written.
    """

    address: Word
    stride: Word
    left: Word


class TokenSums(NamedTuple):
    """Where `token_tile` leaves its sums.

    address: of the first token's. stride: from one token to the next. lanes_left: outputs; beyond them nothing is
    written, and no bias is read. add_present: 1 adds what lies there already, 0 does not look at it.
    """

    address: Word
    stride: Word
    lanes_left: Word
    add_present: Word


class QuadWorth(NamedTuple):
    """What sums of quads are worth: (sum + offset) * scale. Only code for quads looks at it.

    offsets: address of int32, from the first output on. scales: address of float32, likewise. token_scales: address
    of float32, a factor for each token from the first one on; 0 where all are 1.
    """

    offsets: Word
    scales: Word
    token_scales: Word


WORTH_OF_FLOATS = QuadWorth(0, 0, 0)
"""For code that does not look at it."""


class VectorInput(NamedTuple):
    """Vectors of positions of x.

    address: of x. scale: elements that a step of an offset is. starts: address of int64, where each vector starts.
    width: vectors.
    """

    address: Word
    scale: Word
    starts: Word
    width: Word


class QuadOutput(NamedTuple):
    """Where results are left as bytes, those of four rows in each 32 bits.

    address: of the quads. They lie as y does, with a row for each four of y's. starts: address of int64, where each
    vector starts. reading: address of float32 (2), 1 / scale and zero. padding: the 32 bits of lanes that are no
    position.
    """

    address: Word
    starts: Word
    reading: Word
    padding: Word


NO_QUADS = QuadOutput(0, 0, 0, 0)
"""For code that does not look at it."""


class FramedOutput(NamedTuple):
    """Vectors of positions of y, which may lie in frames of zeros.

    address: of y. stride: from one row to the next. starts: address of int64, where each vector starts. keep: address
    of int64, a bit for each lane that is a position; zero is written to the others. added: address of what is added
    to the sums, which lies as y does; 0 adds nothing. Only code for frames looks at `keep` and `added`. quads: a
    `QuadOutput`, for code that leaves quads.
    """

    address: Word
    stride: Word
    starts: Word
    keep: Word
    added: Word
    quads: Any


class PackedOutput(NamedTuple):
    """Vectors of positions of y without frames: the first three fields of `FramedOutput`."""

    address: Word
    stride: Word
    starts: Word


class Epilogue(NamedTuple):
    """How sums of outputs in order are finished.

    bias: address of the bias, from the first output on. activation: code of the activation. worth: of sums of quads,
    a `QuadWorth`.
    """

    bias: Word
    activation: Word
    worth: Any


class RowEpilogue(NamedTuple):
    """How sums of rows are finished and where they go.

    row_ids: address of int32, the row of y of each row; a negative one is not written. bias: address of the bias of
    row 0. activation: code of the activation. worth: of sums of quads, a `QuadWorth`.
    """

    row_ids: Word
    bias: Word
    activation: Word
    worth: Any


class LineWalk(NamedTuple):
    """Cache lines that a row tile fetches meanwhile, for others.

    line: address of the first. stride: bytes to the next. pace: lines for 2**PACE_BITS columns.
    """

    line: Word
    stride: Word
    pace: Word


class WeightFetch(NamedTuple):
    """What a token tile fetches for others.

    elsewhere: bytes from the weights of a column to the line that is fetched with it. cold: 1 if the weights of this
    panel have not been read yet, which matters only if they are fetched once.
    """

    elsewhere: Word
    cold: Word


class WaitingSums(NamedTuple):
    """Sums that wait in the order of the panels.

    address: of the sums. positions: address of uint32, where the sums of each row of y wait. count: rows of y.
    """

    address: Word
    positions: Word
    count: Word


class VectorSources(NamedTuple):
    """Vectors of positions that are copied out of x.

    address: of x. starts: address of int64, where each vector starts. offsets: address of int32, how far behind the
    start each column lies. count: columns.
    """

    address: Word
    starts: Word
    offsets: Word
    count: Word


class WeightStream(NamedTuple):
    """Rows of a stream of weights and columns.

    address: where the first row begins. rows: how many rows follow.
    """

    address: Word
    rows: Word


class StreamEpilogue(NamedTuple):
    """How sums of a stream are finished.

    add_present: 1 continues the sums that lie in y, 0 starts at zero. bias: address of the bias of row 0. activation:
    code of the activation. worth: of sums of quads, a `QuadWorth` from row 0 on.
    """

    add_present: Word
    bias: Word
    activation: Word
    worth: Any


class MatrixWeights(NamedTuple):
    """A panel of thirds of weights.

    values: address of the values. columns: address of int32, 32 for each step. steps: whole steps. all_steps: these
    and a narrow one, if there is one.
    """

    values: Word
    columns: Word
    steps: Word
    all_steps: Word


class SplitInput(NamedTuple):
    """Thirds of x.

    address: of the high ones. distance: bytes from one third to the next.
    """

    address: Word
    distance: Word


class NextTile(NamedTuple):
    """What the matrix tile after this one begins with.

    values: address of its values. columns: address of its columns. narrow: whether its first step is a narrow one. x:
    address of its thirds of x.
    """

    values: Word
    columns: Word
    narrow: Word
    x: Word


class QuadInput(NamedTuple):
    """Quads of x of two vectors of 16 tokens or positions.

    first, second: addresses, from which offsets of columns count.
    """

    first: Word
    second: Word


class NextQuads(NamedTuple):
    """What the tile of bytes after this one begins with.

    columns: address of its columns. first, second: addresses of its quads of x.
    """

    columns: Word
    first: Word
    second: Word


class GatherBuffers(NamedTuple):
    """Room for gathered columns: two buffers in turns.

    address: of GATHERED_BYTES twice, and for thirds an unread tile. phase: its lowest bit names the buffer that this
    tile begins with.
    """

    address: Word
    phase: Word


class MatrixSums(NamedTuple):
    """Where a matrix tile leaves its sums, 32 float32 or int32 a row.

    address: of the sums. halves: 1 or 2, of 16 tokens each.
    """

    address: Word
    halves: Word


class PositionSums(NamedTuple):
    """Sums of 32 positions for each row.

    address: of the sums. rows: how many rows there are.
    """

    address: Word
    rows: Word


class PositionOutput(NamedTuple):
    """A vector of 32 positions of y, which may lie in a frame of zeros.

    address: of the first position in row 0. stride: elements from one row to the next. keep: a bit for each lane that
    is a position. added: address of what is added, which lies as y does; 0 adds nothing.
    """

    address: Word
    stride: Word
    keep: Word
    added: Word
