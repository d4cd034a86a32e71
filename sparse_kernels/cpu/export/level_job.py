"""A process that compiles layers for one CPU level: `python -m sparse_kernels.cpu.export.level_job FOLDER`.

Numba compiles for one processor in a process, so each level has a process of its own. `request.pickle` in the folder
is a `LevelRequest`; the process writes `answer.pickle`, a `CompiledLevel`.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numba

from sparse_kernels.cpu.export.cpu_levels import CpuLevel
from sparse_kernels.cpu.export.kernel_objects import KernelObject, compile_kernel
from sparse_kernels.cpu.export.layer_programs import ExportedLayer, ProgramStep, record_programs
from sparse_kernels.cpu.export.weight_section import SectionWriter


@dataclass(frozen=True)
class LevelRequest:
    """What to compile. sizes: tokens or images of a call, by layer. threads: numbers of threads."""

    level: CpuLevel
    layers: Sequence[ExportedLayer]
    sizes: Mapping[str, Sequence[int]]
    threads: Sequence[int]


@dataclass(frozen=True)
class CompiledLevel:
    """The section of a level, and its objects.

    symbols: the functions that the section calls, by number. layers: a line on each layer, with its name and shape.
    """

    level: CpuLevel
    section: bytes
    objects: list[KernelObject]
    symbols: list[str]
    layers: list[str]


class LevelFailure(Exception):
    """A process that did not compile its level. The message is the last line that it said.

    by_machine: whether the machine ended it, for want of memory or disk.
    """

    def __init__(self, text: str, by_machine: bool) -> None:
        super().__init__(text)
        self.by_machine = by_machine


_NO_ROOM = 3  # exit code of a process that lacks memory or disk


def compile_level(request: LevelRequest) -> CompiledLevel:
    """Compile a level in a process of its own. Raises LevelFailure."""
    with tempfile.TemporaryDirectory(prefix="latbench-export-") as name:
        folder = Path(name)
        (folder / "request.pickle").write_bytes(pickle.dumps(request))
        settings = {"NUMBA_NUM_THREADS": str(max(request.threads)), **request.level.compiler_settings}
        command = [sys.executable, "-P", "-m", "sparse_kernels.cpu.export.level_job", name]
        done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=False)
        if done.returncode:
            said = done.stderr.strip().splitlines()
            by_machine = done.returncode < 0 or done.returncode == _NO_ROOM
            if done.returncode < 0:
                said = [f"signal {-done.returncode} ended the process: is there memory enough?"]
            raise LevelFailure(said[-1] if said else f"the process ended with {done.returncode}", by_machine)
        answer: CompiledLevel = pickle.loads((folder / "answer.pickle").read_bytes())
        return answer


class KernelTable:
    """The functions of a level: each kernel is compiled once for the types of its arguments."""

    def __init__(self, level: CpuLevel) -> None:
        self._level = level
        self._known: dict[object, tuple[object, KernelObject]] = {}
        self.objects: list[KernelObject] = []
        self.symbols: list[str] = []

    def find_functions(self, step: ProgramStep) -> list[int]:
        """Return the numbers of the functions of a step's stages; compile them if they are new."""
        recorded = step.recorded
        key = id(recorded.kernel), tuple(map(numba.typeof, recorded.given))
        if key not in self._known:
            compiled = compile_kernel(recorded, self._level)
            self._known[key] = recorded.kernel, compiled  # kept alive, so that no other takes over its id
            if compiled.symbols[0] not in self.symbols:
                self.objects.append(compiled)
                self.symbols += compiled.symbols
        _, compiled = self._known[key]
        return [self.symbols.index(symbol) for symbol in compiled.symbols]


def build_level(request: LevelRequest) -> CompiledLevel:
    """Compile a level in this process, which must compile for it."""
    table = KernelTable(request.level)
    writer = SectionWriter(table.find_functions)
    layers = [(each, record_programs(each, request.sizes[each.name], request.threads)) for each in request.layers]
    section = writer.finish(layers, lambda: len(table.symbols))
    facts = [f"{each.name!r} {each.weight.shape} {each.activation} {each.image}" for each in request.layers]
    return CompiledLevel(request.level, section, table.objects, table.symbols, facts)


def _run(folder: Path) -> None:
    try:
        request: LevelRequest = pickle.loads((folder / "request.pickle").read_bytes())
        (folder / "answer.pickle").write_bytes(pickle.dumps(build_level(request)))
    except (MemoryError, OSError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(_NO_ROOM)


if __name__ == "__main__":
    # As a module of its package, not as __main__: what is pickled must be found by others.
    from sparse_kernels.cpu.export import level_job

    level_job._run(Path(sys.argv[1]))
