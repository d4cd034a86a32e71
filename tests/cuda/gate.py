"""The compile gate: every kernel for every architecture it claims, with no GPU. `python tests/cuda/gate.py`.

A cubin passes if it compiles, keeps everything in registers (no spills, no stack, no local memory), draws none of
ptxas's warnings that it serialised wgmma, and holds the tensor-core instruction that its variant names inside the
kernel itself: some instructions compile into ordinary arithmetic on machines that lack them. Then the planted bugs of
mutations_*.py are run in the emulator: each must be caught.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import struct
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(HERE), str(HERE / "emulator")]

from sparse_kernels.cuda import build  # noqa: E402
from sparse_kernels.cuda.program import Variant  # noqa: E402
from sparse_kernels.registry import MissingLibrary  # noqa: E402

CUBINS = ROOT / "build" / "cubins"

# wgmma is waited for after each one: the pipeline is lost. NVIDIA, "Potential Performance Loss".
SERIALISED = re.compile(r"C7510|C7517")

# A line of SASS: address, perhaps a predicate, name.
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)

# The disassembler knows nothing before Turing. On Volta an instruction's code is in the lowest 12 of its 128 bits.
VOLTA_OPCODES = {"HMMA": 0x236}
INSTRUCTION_BYTES = 16


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
    problems += [f"{found} bytes of {kind} a thread" for kind, found in memory(cubin.path, variant.function).items()]
    if SERIALISED.search(cubin.log):
        problems.append("ptxas serialises wgmma")
    if variant.instruction and not holds(cubin.path, variant.function, architecture, variant.instruction):
        problems.append(f"no {variant.instruction} in its code")
    return Verdict(variant.name, architecture, cubin.registers, cubin.spilled_bytes, tuple(problems))


def memory(cubin: Path, function: str) -> dict[str, int]:
    """Bytes of stack and local memory that a kernel's thread needs, those that are not 0."""
    usage = _output("cuobjdump", "--dump-resource-usage", str(cubin))
    found = re.search(rf"Function {re.escape(function)}:\s+REG:\d+ STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    if found is None:
        raise ValueError(f"{cubin.name} holds no kernel {function}")
    return {
        kind: int(count)
        for kind, count in zip(("stack", "local memory"), found.groups(), strict=True)
        if count != "0"
    }


def holds(cubin: Path, function: str, architecture: str, instruction: str) -> bool:
    """Whether a kernel's machine code holds an instruction whose name starts so, such as HMMA.SP."""
    if architecture == "sm_70":
        code = _section(cubin.read_bytes(), f".text.{function}")
        starts = range(0, len(code), INSTRUCTION_BYTES)
        return VOLTA_OPCODES[instruction.split(".")[0]] in {
            struct.unpack_from("<H", code, start)[0] & 0xFFF for start in starts
        }
    return any(f"{name}.".startswith(f"{instruction}.") for name in instructions(cubin, function))


def instructions(cubin: Path, function: str) -> list[str]:
    """The names of a kernel's instructions, each once; kept beside the cubin, as disassembling takes longest."""
    names = cubin.with_suffix(".names")
    if not names.exists():
        # -ndf: no analysis of the flow of data, which is not needed here.
        text = _output("nvdisasm", "-c", "-ndf", str(cubin))
        section = re.search(rf"^\.text\.{re.escape(function)}:$(.*?)(?=^\.text\.|\Z)", text, re.DOTALL | re.MULTILINE)
        if section is None:
            raise ValueError(f"{cubin.name} holds no code of {function}")
        build.write_whole(names, "\n".join(sorted(set(INSTRUCTION.findall(section[1])))).encode())
    return names.read_text().split("\n")


def _section(elf: bytes, name: str) -> bytes:
    """The bytes of a section of a 64-bit little-endian ELF file."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    count, names = struct.unpack_from("<HH", elf, 0x3C)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + 64 * index) for index in range(count)]
    for name_offset, _, _, _, start, size in headers:
        text = elf[headers[names][4] + name_offset :].split(b"\0", 1)[0]
        if text == name.encode():
            return elf[start : start + size]
    raise ValueError(f"no section {name}")


def _output(tool: str, *arguments: str) -> str:
    """What a tool of CUDA's prints."""
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    paths = [path for root in roots for path in Path(root).glob(f"*/bin/{tool}")]
    program = str(paths[0]) if paths else shutil.which(tool)
    if program is None:
        raise MissingLibrary(f"the gate needs {tool}: pip install nvidia-cuda-{tool}")
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=True).stdout


def main() -> int:
    """Exit code 0 if all cubins pass and all planted bugs are caught."""
    import mutations

    from sparse_kernels.cuda.variants import FAMILIES, all_variants

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile at once (default 2)")
    parser.add_argument("--family", choices=FAMILIES, help="only this family's kernels, and no planted bugs")
    arguments = parser.parse_args()
    families = (arguments.family,) if arguments.family else FAMILIES
    tasks = [(variant, architecture) for variant in all_variants(families) for architecture in variant.architectures]
    planted = [] if arguments.family else mutations.collect()
    with ProcessPoolExecutor(arguments.jobs) as pool:
        verdicts = list(pool.map(check, *zip(*tasks, strict=True), chunksize=4))
        survived = list(pool.map(mutations.survives, planted))
    for verdict in verdicts:
        for problem in verdict.problems:
            print(f"{verdict.kernel} for {verdict.architecture}: {problem}")
    missed = [mutation for mutation, survives in zip(planted, survived, strict=True) if survives]
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
