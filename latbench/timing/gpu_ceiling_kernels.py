"""The kernels of gpu_ceilings.cu and their launches as plain values: their work and their results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sparse_kernels.cuda.program import Launch, Operand, Variant
from sparse_kernels.cuda.targets import ARCHITECTURES

THREADS = 512  # per block
BLOCKS = 2  # per multiprocessor: 1024 threads, which fit on Turing, keep any multiprocessor busy
CHAINS = 8  # per thread: with all threads, more than latency x units
STEPS = 2**14  # per chain: at least a third of a millisecond, so that the launch is negligible
FACTOR = 0.5  # s = s / 2 + 1 / 2 ends at 1, whatever it starts with
PIECE_BYTES = 16  # the widest load of a thread
READ_BYTES = 2**30  # least bytes per launch, for the same reason

SOURCE = Path(__file__).with_name("gpu_ceilings.cu")
_DEFINES = {"THREADS": THREADS, "CHAINS": CHAINS}
MULTIPLY_ADDS = Variant(str(SOURCE), "multiply_adds", _DEFINES, ARCHITECTURES)
READ_PIECES = Variant(str(SOURCE), "read_pieces", _DEFINES, ARCHITECTURES)
VARIANTS = (MULTIPLY_ADDS, READ_PIECES)


@dataclass(frozen=True)
class FixedWork:
    """A launch with a known amount of work and a known result.

    Parameters
    ----------
    launch
        The launch.
    done
        Operations, or bytes that it reads.
    threads
        Elements of OUT, one per thread.
    dtype
        Their type.
    result
        Their value. For reads, all words of X are 1.
    """

    launch: Launch
    done: float
    threads: int
    dtype: str
    result: float


def build_multiply_adds(multiprocessors: int, steps: int = STEPS) -> FixedWork:
    """Return chains of float32 multiply-adds on every ordinary core; `steps` of 32 or more end at 1."""
    threads = THREADS * BLOCKS * multiprocessors
    arguments = (Operand.OUT, np.int32(steps), np.float32(FACTOR))
    done = 2.0 * CHAINS * steps * threads
    return FixedWork(_launch(MULTIPLY_ADDS, multiprocessors, arguments), done, threads, "float32", float(CHAINS))


def build_reads(size: int, multiprocessors: int, least: int = READ_BYTES) -> FixedWork:
    """Return reads of the first `size` bytes of X, a power of two, repeated until `least` bytes are read."""
    threads = THREADS * BLOCKS * multiprocessors
    count = -(-max(least, size) // (PIECE_BYTES * threads))
    arguments = (Operand.X, Operand.OUT, np.uint32(size // PIECE_BYTES - 1), np.int32(count))
    done = float(PIECE_BYTES * threads * count)
    return FixedWork(
        _launch(READ_PIECES, multiprocessors, arguments), done, threads, "uint32", PIECE_BYTES / 4 * count
    )


def _launch(variant: Variant, multiprocessors: int, arguments: tuple[Operand | np.generic, ...]) -> Launch:
    return Launch(variant, (BLOCKS * multiprocessors, 1, 1), (THREADS, 1, 1), 0, arguments)
