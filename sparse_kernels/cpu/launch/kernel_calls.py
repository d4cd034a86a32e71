"""What each call of a kernel brings: NamedTuples of addresses and numbers, all int64.

Addresses are in bytes. The activation is its place among `plan_protocol.ACTIVATIONS`.
"""

from __future__ import annotations

from typing import NamedTuple


class LinearCall(NamedTuple):
    """A call of a linear layer by one kernel, which starts with the scratch memory that it needs.

    scratch_at: address of scratch memory, at a cache line. x_at, y_at, bias_at: addresses of x, y and the bias (m).
    """

    scratch_at: int
    x_at: int
    y_at: int
    bias_at: int
    activation: int


class ProductCall(NamedTuple):
    """A product of vectors of positions.

    x_at, y_at, bias_at: addresses of x, y and the bias (m). added_at: address of what is added to y, which lies as y
    does; 0 adds nothing. quads_at: address of quads, for kernels that leave them.
    """

    x_at: int
    y_at: int
    bias_at: int
    activation: int
    added_at: int
    quads_at: int


class ScratchProductCall(NamedTuple):
    """The same by a kernel that needs scratch memory. scratch_at: its address, at a cache line."""

    x_at: int
    y_at: int
    bias_at: int
    activation: int
    added_at: int
    quads_at: int
    scratch_at: int
