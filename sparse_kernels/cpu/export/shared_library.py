"""Link compiled kernels and the runtime in C into one shared library, with the machine's own C compiler."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparse_kernels.cpu.export.level_job import CompiledLevel
from sparse_kernels.cpu.export.library_id import RUNTIME, compute_library_id

HEADER = RUNTIME / "latbench.h"
EXTENSIONS = Path(__file__).parent / "extensions"
OPENVINO_LAYER, TORCH_LAYER = EXTENSIONS / "openvino_layer.cpp", EXTENSIONS / "torch_layer.cpp"
_COMPILERS, CPP_COMPILERS = ("cc", "gcc", "g++", "clang"), ("c++", "g++", "clang++")
_FLAGS = (
    "-std=gnu11",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
    "-shared",
    "-Wl,-z,noexecstack",
    "-Wl,-z,defs",
    "-Wl,-Bsymbolic",  # another exported library in the process has functions of the same names
)


class NoCompiler(Exception):
    """A machine without a C compiler, or one that refused. The message is one sentence."""


@dataclass(frozen=True)
class Extension:
    """What makes the library an extension of an engine: a file in C++, folders of headers, and libraries.

    definitions: macros of the file, such as the number of the export. standard: that of the engine's headers.
    """

    source: Path
    includes: Sequence[Path]
    libraries: Sequence[Path]
    definitions: Mapping[str, str]
    standard: str = "c++17"


def find_compiler(variable: str = "CC", usual: Sequence[str] = _COMPILERS) -> list[str]:
    """Return a compiler's command: that of the variable, else the first of the usual names. Raises NoCompiler."""
    wanted = os.environ.get(variable, "").strip()
    try:
        first, *settings = shlex.split(wanted) or [""]
    except ValueError as error:
        raise NoCompiler(f"{variable}={wanted} is no command: {error}") from None
    for name in [first] if wanted else usual:
        if found := shutil.which(name):
            return [found, *settings]
    language = "C++" if usual is CPP_COMPILERS else "C"
    missing = f"{variable}={wanted} is not" if wanted else f"none of {', '.join(usual)} is"
    raise NoCompiler(f"no {language} compiler was found: {missing} on the PATH; install g++, or set {variable}")


def check_compiler(extension: Extension | None = None) -> None:
    """Build a library without kernels, which says early whether kernels can be linked. Raises NoCompiler."""
    with tempfile.TemporaryDirectory(prefix="latbench-check-") as name:
        link_library(Path(name) / "library.so", [], extension=extension)


def link_library(
    path: Path, levels: Sequence[CompiledLevel], sources: Sequence[Path] = (), extension: Extension | None = None
) -> None:
    """Write the shared library of these levels; `sources` are C files that become part of it. Raises NoCompiler."""
    compiler = find_compiler()
    with tempfile.TemporaryDirectory(prefix="latbench-link-") as name:
        folder = Path(name)
        parts = [*sources, *((extension.source,) if extension else ())]
        table = generate_kernel_table(levels, compute_library_id(levels, parts))
        (folder / "kernel_table.c").write_text(table, encoding="utf-8")
        files = [folder / "kernel_table.c", *sorted(RUNTIME.glob("*.c")), *sources]
        for number, each in enumerate(each for level in levels for each in level.objects):
            files.append(folder / f"kernel_{number}.o")
            files[-1].write_bytes(each.content)
        if extension is not None:
            files.append(_compile_extension(folder / "extension.o", extension))
        language = ("-x", "c") if compiler[-1].endswith("++") else ()
        compiled = [file for file in files if file.suffix == ".c"]
        objects = [file for file in files if file.suffix == ".o"]
        command = [*compiler, *_FLAGS, f"-I{RUNTIME}", "-o", str(path), *language, *map(str, compiled)]
        command += [*(("-x", "none") if language else ()), *map(str, objects), "-lm"]
        command += [*map(str, extension.libraries), "-lstdc++"] if extension else []
        _run_compiler(compiler, command)


def _compile_extension(path: Path, extension: Extension) -> Path:
    compiler = find_compiler("CXX", CPP_COMPILERS)
    includes = [f"-isystem{each}" for each in extension.includes]
    settings = [
        f"-std={extension.standard}",
        "-O2",
        "-fPIC",
        "-fvisibility=hidden",
        "-pthread",
        f"-I{RUNTIME}",
        *includes,
    ]
    settings += [f"-D{name}={value}" for name, value in extension.definitions.items()]
    _run_compiler(compiler, [*compiler, *settings, "-c", str(extension.source), "-o", str(path)])
    return path


def _run_compiler(compiler: Sequence[str], command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "error" in line or "undefined" in line] or ["no reason"]
        raise NoCompiler(f"{shlex.join(compiler)} could not build the library: {said[0]}")


def find_needed_libc(library: Path) -> str:
    """Return the C library that a shared library needs: "glibc" and its least version, or "no glibc"."""
    versions = re.findall(rb"\0GLIBC_(\d+)\.(\d+)", library.read_bytes())
    if not versions:
        return "no glibc"
    return "glibc {}.{}".format(*max((int(major), int(minor)) for major, minor in versions))


def generate_kernel_table(levels: Sequence[CompiledLevel], library: int) -> str:
    """Return the C file that lists the functions of all kernels, by the numbers that the packed file has.

    library: its number, as `compute_library_id` gives it.
    """
    symbols = [symbol for each in levels for symbol in each.symbols]
    declared = "\n".join(f"void {each}(int64_t, int64_t);" for each in symbols)
    listed = ", ".join(symbols) or "0"
    return f"""#include "packed_file.h"
{declared}
const kernel_part latbench_functions[] = {{{listed}}};
const uint64_t latbench_function_count = {len(symbols)};
const uint64_t latbench_library = {library:#x}ULL;
"""
