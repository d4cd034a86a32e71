"""The compile gate: every kernel for every architecture it claims, with no GPU.

    python tests/sparse_kernels/cuda/gate.py

A cubin passes if it compiles, keeps everything in registers (no spills, no stack), draws none of ptxas's warnings
that it serialised wgmma, and holds the tensor-core instruction that its variant names inside the kernel itself: some
instructions compile into ordinary arithmetic on machines that lack them. Then the planted bugs of mutations_*.py are
run in the emulator: each must be caught.

The kernels that a GPU machine needs can be compiled before it is there, and carried to it:

    python tests/sparse_kernels/cuda/gate.py --architecture sm_90a --folder build/carry/cubins
    LATBENCH_CACHE=build/carry latbench sweep ...    # there, with NVRTC of the same version
"""

from __future__ import annotations

import argparse
import functools
import itertools
import operator
import re
import struct
import sys
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).parent
ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(HERE / "emulator"), str(HERE / "mutations")]

import mutations  # noqa: E402

from latbench.timing import gpu_ceiling_kernels  # noqa: E402
from sparse_kernels.cuda import build  # noqa: E402
from sparse_kernels.cuda.program import Variant  # noqa: E402
from sparse_kernels.cuda.targets import ARCHITECTURES  # noqa: E402
from sparse_kernels.cuda.variants import FAMILIES, list_variants  # noqa: E402

CUBINS = ROOT / "build" / "cubins"

# wgmma is waited for after each one: the pipeline is lost. There are ten such warnings, C7510 to C7519 among them.
SERIALISED = re.compile(r"wgmma\.mma_async instructions are serialized|Potential Performance Loss")

INSTRUCTIONS = {
    "HMMA.884.F32": (0x236, 0, 0),
    "HMMA.1688.F32": (0x23C, 0xFF00, 0x1000),
    "HMMA.16816.F32": (0x23C, 0xFF00, 0x1800),
    "HMMA.SP.16832.F32": (0x23C, 0xFF00, 0x5A00),
    "HGMMA": (0x9F0, 0x200, 0x000),
    "HGMMA.SP": (0x9F0, 0x200, 0x200),
}
"""What tells an instruction of 128 bits: the lowest 12 of them, and of its upper half a mask and what is under it.

Read off the disassembler's output, with which a slow test compares this table; it knows the architectures from Turing
on, which all agree. Disassembling every cubin would take as long as compiling it.
"""


@dataclass(frozen=True)
class Verdict:
    """One cubin: what it needs, and in a sentence each, what is wrong."""

    kernel: str
    architecture: str
    registers: int
    spilled_bytes: int
    problems: tuple[str, ...]


def check(variant: Variant, architecture: str, folder: Path = CUBINS) -> Verdict:
    """Compile one variant for one architecture and look at what came out."""
    try:
        cubin = build.compile(variant, architecture, folder=folder)
    except build.BuildError as error:
        return Verdict(variant.name, architecture, 0, 0, (str(error),))
    problems = []
    if cubin.spilled_bytes:
        problems.append(f"{cubin.spilled_bytes} bytes are spilled")
    if cubin.stack_bytes:
        problems.append(f"{cubin.stack_bytes} bytes of stack a thread")
    if SERIALISED.search(cubin.log):
        problems.append("ptxas serialises wgmma")
    if variant.instruction and not holds(machine_code(cubin.path, variant.function), variant.instruction).any():
        problems.append(f"no {variant.instruction} in its code")
    return Verdict(variant.name, architecture, cubin.registers, cubin.spilled_bytes, tuple(problems))


def holds(code: NDArray[np.uint64], instruction: str) -> NDArray[np.bool_]:
    """Which instructions of a kernel (count, 2) are the one of that name."""
    opcode, mask, value = INSTRUCTIONS[instruction]
    return (code[:, 0] & 0xFFF == opcode) & (code[:, 1] & mask == value)


def machine_code(cubin: Path, function: str) -> NDArray[np.uint64]:
    """The instructions of a kernel, uint64 (count, 2), from the section of a 64-bit little-endian ELF file."""
    elf = cubin.read_bytes()
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    count, names = struct.unpack_from("<HH", elf, 0x3C)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + 64 * index) for index in range(count)]
    for name_offset, _, _, _, start, size in headers:
        name = elf[headers[names][4] + name_offset :].split(b"\0", 1)[0]
        if name == f".text.{function}".encode():
            return np.frombuffer(elf, "<u8", size // 8, start).reshape(-1, 2)
    raise ValueError(f"{cubin.name} holds no kernel {function}")


def cubins_of(family: str | None, architectures: Collection[str] | None) -> list[tuple[Variant, str]]:
    """Return the kernels of one family or of all, each with every architecture it is for or with the given ones."""
    every = list_variants((family,)) if family else [*list_variants(), *gpu_ceiling_kernels.VARIANTS]
    wanted = architectures or ARCHITECTURES
    return [(one, architecture) for one in every for architecture in one.architectures if architecture in wanted]


def main() -> int:
    """Return exit code 0 if all cubins pass and all planted bugs are caught."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile at once (default 2)")
    parser.add_argument("--family", choices=FAMILIES, help="only this family's kernels, and no planted bugs")
    parser.add_argument(
        "--architecture",
        action="append",
        choices=ARCHITECTURES,
        help="only kernels for this architecture, and no planted bugs; may be given several times",
    )
    parser.add_argument("--folder", type=Path, default=CUBINS, help="folder of the cubins (default build/cubins)")
    arguments = parser.parse_args()
    tasks = cubins_of(arguments.family, arguments.architecture)
    if not tasks:
        parser.error(f"{arguments.family} has no kernel for {', '.join(arguments.architecture)}")
    planted = [] if arguments.family or arguments.architecture else mutations.collect()
    # Those of one case together: what is right without a bug is found out once.
    by_case = [tuple(group) for _, group in itertools.groupby(planted, key=operator.attrgetter("case"))]
    with ProcessPoolExecutor(arguments.jobs) as pool:
        missing = pool.map(mutations.survivors, by_case)
        checked = functools.partial(check, folder=arguments.folder)
        verdicts = list(pool.map(checked, *zip(*tasks, strict=True), chunksize=4))
        missed = [mutation for group in missing for mutation in group]
    for verdict in verdicts:
        for problem in verdict.problems:
            print(f"{verdict.kernel} for {verdict.architecture}: {problem}")
    for mutation in missed:
        print(f"not caught: {mutation.bug} ({mutation.edit[0]!r} -> {mutation.edit[1]!r})")
    failed = sum(bool(verdict.problems) for verdict in verdicts)
    kernels, architectures = ({getattr(it, key) for it in verdicts} for key in ("kernel", "architecture"))
    print(
        f"gate: {len(kernels)} kernels, {len(architectures)} architectures, "
        f"{len(verdicts)} cubins, {failed} of them fail, {sum(it.spilled_bytes > 0 for it in verdicts)} spill, "
        f"{len(planted) - len(missed)} of {len(planted)} planted bugs caught"
    )
    return 1 if failed or missed else 0


if __name__ == "__main__":
    sys.exit(main())
