"""The part of a packed file for one CPU level: what its kernels read, and how each layer calls them.

All numbers are words of 64 bits, little-endian; all places are bytes from the start of the section. Tables, as
`packed_file.h` has them:

section   functions, layers, place of the layers, kept buffers, bytes of the section, 0, 0, 0
layer     place and length of the name, kind (1 linear, 2 conv2d), activation, outputs, inputs, then channels, height
          and width of x and of y (0 for linear), place of the bias, place and number of the programs, 0
program   tokens or images, threads, place and length of the kernel's name, place and number of the buffers, place
          and number of the steps, bytes of the buffers that are not kept, 0
buffer    bytes, number among the kept ones and 1 (0: not kept), fill, place among those that are not kept
step      place and words of the frame, word where parts note, place and number of the stages, place and number of the
          relocations, place and number of the varying words, 0
stage     function, parts
relocation      word of the frame, place in the section
varying word    word of the frame, where and offset (`layer_programs.Place`)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cpu.export.layer_programs import ExportedLayer, LayerProgram, ProgramBuffer, ProgramStep
from sparse_kernels.cpu.runtime.scratch_buffers import ALIGNMENT
from sparse_kernels.plan_protocol import ACTIVATIONS

LINEAR, CONV2D = 1, 2
HEAD_WORDS = 8

# Bytes behind an array that a vector may read: its longest, so that no read leaves the file.
_BEHIND = 64


class SectionWriter:
    """Section in the making. Equal arrays are stored once."""

    def __init__(self, find_functions: Callable[[ProgramStep], Sequence[int]]) -> None:
        """find_functions: the numbers of the functions of a step's stages."""
        self._find_functions = find_functions
        self._pieces: list[bytes] = [bytes(8 * HEAD_WORDS)]
        self._size = 8 * HEAD_WORDS
        self._known: dict[bytes, int] = {}
        self._kept = 0

    def finish(
        self, layers: Sequence[tuple[ExportedLayer, Sequence[LayerProgram]]], count_functions: Callable[[], int]
    ) -> bytes:
        """Return the section of these layers; count_functions: how many functions there are once all are known."""
        entries = [self._add_layer(layer, programs) for layer, programs in layers]
        layers_at = self._add_words(entries)
        self._pieces.append(bytes(_BEHIND))
        size = self._size + _BEHIND
        head = np.array([count_functions(), len(entries), layers_at, self._kept, size, 0, 0, 0], np.uint64)
        self._pieces[0] = head.tobytes()
        return b"".join(self._pieces)

    def _add(self, content: bytes, alignment: int) -> int:
        """Append bytes and return their place; what is there already is not stored again."""
        key = hashlib.sha256(content).digest()
        at = self._known.get(key)
        if at is not None and at % alignment == 0:
            return at
        gap = -self._size % alignment
        at = self._known[key] = self._size + gap
        self._pieces += [bytes(gap), content]
        self._size = at + len(content)
        return at

    def _add_array(self, array: NDArray[np.generic]) -> int:
        # Vectors may read behind the last element, and a prefetch may, too.
        return self._add(np.ascontiguousarray(array).tobytes() + bytes(_BEHIND), ALIGNMENT)

    def _add_words(self, rows: Sequence[Sequence[int]]) -> int:
        words = np.array([word % 2**64 for row in rows for word in row], np.uint64)
        return self._add(words.tobytes(), 8)

    def _add_text(self, text: str) -> list[int]:
        content = text.encode()
        return [self._add(content + b"\0", 8), len(content)]

    def _add_layer(self, layer: ExportedLayer, programs: Sequence[LayerProgram]) -> list[int]:
        (m, k), image = layer.weight.shape, layer.image
        bias = np.zeros(m, np.float32) if layer.bias is None else layer.bias
        sides = [0] * 6
        if image is not None:
            sides = [image.c_in, image.h, image.w, image.c_out, image.out_h, image.out_w]
        table = self._add_words([self._add_program(each) for each in programs])
        kind = LINEAR if image is None else CONV2D
        activation = ACTIVATIONS.index(layer.activation)
        bias_at = self._add_array(bias)
        return [*self._add_text(layer.name), kind, activation, m, k, *sides, bias_at, table, len(programs), 0]

    def _add_program(self, program: LayerProgram) -> list[int]:
        buffers, behind = [], 0
        for buffer in program.buffers:
            entry, behind = self._add_buffer(buffer, behind)
            buffers.append(entry)
        steps = [self._add_step(step) for step in program.steps]
        return [
            program.size, program.threads, *self._add_text(program.kernel), self._add_words(buffers), len(buffers),
            self._add_words(steps), len(steps), behind, 0,
        ]  # fmt: skip

    def _add_buffer(self, buffer: ProgramBuffer, behind: int) -> tuple[list[int], int]:
        """Return the entry of a buffer, and the bytes of those that are not kept with it."""
        size = -(-(buffer.size_bytes + _BEHIND) // ALIGNMENT) * ALIGNMENT
        if buffer.fill is None:
            return [size, 0, 0, behind], behind + size
        self._kept += 1
        return [size, self._kept, buffer.fill, 0], behind

    def _add_step(self, step: ProgramStep) -> list[int]:
        frame, counts = step.recorded.frame, step.recorded.counts
        stages = list(zip(self._find_functions(step), counts, strict=True))
        relocations = [(word, self._add_array(array)) for word, array in frame.arrays.items()]
        varying = [(word, *place) for word, place in step.varying]
        return [
            self._add_words([frame.words]), len(frame.words), frame.noted, self._add_words(stages), len(stages),
            self._add_words(relocations), len(relocations), self._add_words(varying), len(varying), 0,
        ]  # fmt: skip
