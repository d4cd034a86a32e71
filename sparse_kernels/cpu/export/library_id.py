"""The number by which a packed file knows its library, and the library its file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from sparse_kernels.cpu.export.level_job import CompiledLevel

VERSION = 1
RUNTIME = Path(__file__).parent / "runtime"


def compute_library_id(levels: Sequence[CompiledLevel], sources: Sequence[Path] = ()) -> int:
    """Return the number of all that a library and its packed file must agree on.

    These are the functions and their order, the layers, the runtime, and the C files of the model.
    """
    digest = hashlib.sha256(f"{VERSION}\n".encode())
    for each in levels:
        digest.update(f"{each.level.name} {each.symbols} {each.layers}\n".encode())
    for path in (*sorted(RUNTIME.iterdir()), *sources):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return int.from_bytes(digest.digest()[:8], "little")
