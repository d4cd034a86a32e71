"""Images in frames of zeros: what lies between two convolutions of a converted model.

A convolution reads zeros around each image. In a frame they are there. Every row of an image is followed by `margin`
zeros, and every image of a channel by as many rows of zeros. Some come before the first image. So two neighbours
share the zeros between them. A convolution with stride 1 whose output is as large as its input reads such images
where they lie. Each channel and tap has a fixed distance. It writes its results into the same kind of frame: nothing
is laid out, nothing collected. What it computes where there is no position is written as zero.

Images start at a cache line. Who makes a frame has zeros in it; who writes into one keeps them.

Convolutions in eight bits read images as quads: four channels together, a byte each. Their frames hold the byte of 0.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from sparse_kernels.cpu.runtime.scratch_buffers import LINE, allocate_aligned, find_address
from sparse_kernels.formats.int8 import QUAD, InputRange, fill_quad
from sparse_kernels.plan_protocol import Array

# Bytes of unused frames that are kept for the next call.
KEPT = 512 * 2**20


@dataclass(frozen=True)
class ImagePlaces:
    """Where images (batch, channels, h, w) lie in a flat array; margin None: as torch has them, without a frame."""

    batch: int
    channels: int
    h: int
    w: int
    margin: int | None = None

    def __hash__(self) -> int:
        # Each call of a layer looks places up several times.
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # None has another hash in every process, and this one may be pickled.
        return hash((self.batch, self.channels, self.h, self.w, -1 if self.margin is None else self.margin))

    @cached_property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, channels, h, w)."""
        return self.batch, self.channels, self.h, self.w

    @cached_property
    def row(self) -> int:
        """Elements from one row to the next."""
        return self.w + (self.margin or 0)

    @cached_property
    def channel(self) -> int:
        """Elements from one channel to the next."""
        rows = (self.h + (self.margin or 0)) * self.row
        return rows if self.margin is None else _whole_lines(rows)

    @cached_property
    def image(self) -> int:
        """Elements from one image to the next."""
        return self.channels * self.channel

    @cached_property
    def first(self) -> int:
        """Where the first position is; before it lies the upper left of the frame."""
        return _whole_lines((self.margin or 0) * (self.row + 1))

    @cached_property
    def size(self) -> int:
        """Elements of the array: a vector may be read at any position that a tap reaches."""
        behind = 0 if self.margin is None else self.first + LINE
        return self.first + self.batch * self.image + behind

    @cached_property
    def quads(self) -> ImagePlaces:
        """The places of the same images as quads."""
        return replace(self, channels=-(-self.channels // QUAD))

    def of_batch(self, batch: int) -> ImagePlaces:
        """Return the same for another number of images."""
        return self if batch == self.batch else replace(self, batch=batch)


def _whole_lines(elements: int) -> int:
    return -(-elements // LINE) * LINE


Kind = tuple[ImagePlaces, int]
"""What makes frames alike: where images lie in them, and the 32 bits of what lies between."""


class Home:
    """Where frames of one kind come from and go back to: those that nobody uses wait here.

    A frame just given back is the likeliest to lie in a cache, so it goes out first. Giving back is one step of a
    deque, because it may happen at any time, even while this thread takes a frame: when Python collects garbage.

    free: (array, its address).
    """

    __slots__ = ("_spare", "free", "kind", "nbytes")

    def __init__(self, spare: Spare, kind: Kind) -> None:
        self._spare, self.kind, self.nbytes = spare, kind, 4 * kind[0].size
        self.free: deque[tuple[Array, int]] = deque()

    def take(self) -> tuple[Array, int]:
        """Return a frame and its address."""
        if self._spare.allocated_bytes <= KEPT:  # so no frame has to go
            try:
                return self.free.pop()
            except IndexError:
                pass
        return self._spare.allocate(self)


class Spare:
    """The homes of all kinds of frames; the kind whose frames were last allocated is at the end.

    allocated_bytes: of frames, in use or not.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._homes: dict[Kind, Home] = {}
        self.allocated_bytes = 0

    def find_home(self, places: ImagePlaces, padding: int) -> Home:
        """Return the home of frames of images at these places."""
        home = self._homes.get((places, padding))
        if home is None:
            with self._turn:
                home = self._homes.setdefault((places, padding), Home(self, (places, padding)))
        return home

    def allocate(self, home: Home) -> tuple[Array, int]:
        """Return a frame, a new one if none waits; give up those that wait where they are too many."""
        with self._turn:
            # With more than KEPT every frame is taken here, so the kind unused for longest comes first.
            self._homes[home.kind] = self._homes.pop(home.kind, home)
            self._give_up(home)
            with contextlib.suppress(IndexError):
                return home.free.pop()
        places, padding = home.kind
        new: Array = allocate_aligned(places.size)
        if padding:
            new.view(np.uint32)[:] = padding
        with self._turn:
            self.allocated_bytes += home.nbytes
        return new, find_address(new)

    def _give_up(self, wanted: Home) -> None:
        """Give up frames until those that wait are no more than KEPT, those of a wanted kind last."""
        unused = sum(each.nbytes * len(each.free) for each in self._homes.values())
        for each in [*self._homes.values()]:
            while unused > KEPT and each is not wanted:
                try:
                    each.free.pop()
                except IndexError:  # another thread may just have taken the last one
                    break
                unused -= each.nbytes
                self.allocated_bytes -= each.nbytes


_spare = Spare()


class Frame:
    """Memory of images in a frame. It is another's as soon as this object is gone: keep no view of it.

    array, address: of the memory.
    """

    def __init__(self, home: Home) -> None:
        self._taken = self.array, self.address = home.take()
        self._give_back = home.free.append

    def __reduce__(self) -> tuple[Callable[..., Frame], tuple[object, ...]]:
        # A copy has memory of its own, at an address of its own.
        return _copy_frame, (type(self), self._arguments, self.array)

    @property
    def _arguments(self) -> tuple[object, ...]:
        """What the object was made with."""
        raise NotImplementedError

    def __del__(self) -> None:
        # When Python exits, the names of the module may be gone before this object is.
        give_back = self.__dict__.get("_give_back")
        if give_back is not None:  # else it was never made
            give_back(self._taken)


def _copy_frame(kind: Callable[..., Frame], arguments: tuple[object, ...], array: Array) -> Frame:
    copied = kind(*arguments)
    copied.array[:] = array
    return copied


def find_floats_home(places: ImagePlaces) -> Home:
    """Return the home of `FramedImages` at these places."""
    return _spare.find_home(places, 0)


def find_quads_home(places: ImagePlaces, input_range: InputRange) -> Home:
    """Return the home of `QuadImages` of images at these places, read in this range."""
    return _spare.find_home(places.quads, fill_quad(input_range))


class FramedImages(Frame):
    """Images in a frame of zeros, float32.

    places: of the images. home: that of the frame, if it is known. in_quads: the same images as convolutions in eight
    bits read them, if they were left so.
    """

    in_quads: QuadImages | None = None

    def __init__(self, places: ImagePlaces, home: Home | None = None) -> None:
        super().__init__(home or find_floats_home(places))
        self.places = places

    @property
    def _arguments(self) -> tuple[object, ...]:
        return (self.places,)


class QuadImages(Frame):
    """Images in a frame as quads, read in a range.

    places: of the images, not of the quads. home: that of the frame, if it is known.
    """

    def __init__(self, places: ImagePlaces, input_range: InputRange, home: Home | None = None) -> None:
        super().__init__(home or find_quads_home(places, input_range))
        self.places, self.input_range = places, input_range

    @property
    def _arguments(self) -> tuple[object, ...]:
        return self.places, self.input_range
