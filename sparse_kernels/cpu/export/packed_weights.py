"""The packed file: a head, a table of CPU levels, and a section for each (`weight_section`).

head    "LATBENCH", version, bytes of the file, checksum, id of the library, levels, 0, 0
level   name (32 bytes, filled up with zeros), features (`cpu_levels.FEATURE_BITS`), place and bytes of the section,
        number of its first function in the library

The file is a multiple of 4096 bytes. Its checksum is that of the file in which the checksum is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sparse_kernels.cpu.export.checksum import ROW_BYTES, compute_checksum
from sparse_kernels.cpu.export.level_job import CompiledLevel
from sparse_kernels.cpu.export.library_id import VERSION, compute_library_id

MAGIC = int.from_bytes(b"LATBENCH", "little")
CHECKSUM_WORD = 3
_HEAD_BYTES, _LEVEL_BYTES, _NAME_BYTES = 64, 64, 32


def build_packed_file(levels: Sequence[CompiledLevel], sources: Sequence[Path] = ()) -> bytes:
    """Return the content of the packed file of these levels, from the least to the most able.

    sources: the C files that are part of its library.
    """
    at = -(-(_HEAD_BYTES + _LEVEL_BYTES * len(levels)) // ROW_BYTES) * ROW_BYTES
    table, sections, first = b"", b"", 0
    for each in levels:
        name = each.level.name.encode().ljust(_NAME_BYTES, b"\0")
        words = np.array([each.level.bits, at + len(sections), len(each.section), first], np.uint64)
        table += name + words.tobytes()
        sections += each.section.ljust(-(-len(each.section) // ROW_BYTES) * ROW_BYTES, b"\0")
        first += len(each.symbols)
    library = compute_library_id(levels, sources)
    head = np.array([MAGIC, VERSION, at + len(sections), 0, library, len(levels), 0, 0], np.uint64)
    return seal((head.tobytes() + table).ljust(at, b"\0") + sections)


def read_checksum(content: bytes) -> int:
    """Return the checksum that the head of a packed file tells."""
    return int(np.frombuffer(content[:_HEAD_BYTES], np.uint64)[CHECKSUM_WORD])


def seal(content: bytes) -> bytes:
    """Return the content of a packed file with its checksum."""
    words = np.frombuffer(bytearray(content), np.uint64)
    words[CHECKSUM_WORD] = 0
    words[CHECKSUM_WORD] = compute_checksum(words.view(np.uint8))
    return words.tobytes()
