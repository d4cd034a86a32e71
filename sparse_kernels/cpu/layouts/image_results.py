"""What a convolution makes of its sums, and where it leaves them: floats, bytes for others in eight bits, or both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sparse_kernels.cpu.layouts.padded_images import ImagePlaces
from sparse_kernels.formats.int8 import InputRange


class Finish(NamedTuple):
    """What becomes of sums.

    bias: address of the bias. activation: its place among `ACTIVATIONS`. added: address of what is added before; it
    lies as the results do, and 0 adds nothing.
    """

    bias: int
    activation: int
    added: int = 0


@dataclass(frozen=True)
class Leaving:
    """How results are left for convolutions in eight bits.

    Attributes
    ----------
    input_range
        How those read their inputs.
    floats
        Whether results are left as floats, too.
    """

    input_range: InputRange
    floats: bool


class Results(NamedTuple):
    """Where results are left.

    address: of images at these places; not written where `leaving` wants no floats. quads: address of the same images
    as quads (`ImagePlaces.quads`). leaving: how those are left; None leaves none.
    """

    address: int
    places: ImagePlaces
    quads: int = 0
    leaving: Leaving | None = None
