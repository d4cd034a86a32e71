"""Kernels on a CPU: launches are compiled by g++ and run by emulator.cpp, thread by thread in a random order.

The result is what a GPU computes, in the order of additions of this emulator. A deadlock, threads that part at a
collective, an access outside of an array or a misaligned one raises EmulatorError with the kernel's line.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sparse_kernels.cuda.program import Launch, Operand, Variant

HERE = Path(__file__).parent
KERNELS = Path(__file__).parents[4] / "sparse_kernels" / "cuda" / "device_code"
CACHE = Path(__file__).parents[4] / "build" / "emulator"

COMPILER = os.environ.get("CXX", "g++")
FLAGS = ("-g1", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-DHOST_EMULATOR", f"-I{HERE}", f"-I{KERNELS}")
# longjmp goes from stack to stack, which the fortified one takes for an error.
MACHINE_FLAGS = ("-O3", "-Wall", "-Wextra", "-U_FORTIFY_SOURCE")
# Misaligned accesses and indices outside of C arrays, static shared memory included, become faults.
KERNEL_FLAGS = (
    "-O1",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-Wno-unused-function",
    "-Wno-unused-variable",
    "-fsanitize=alignment,bounds",
    "-fsanitize-undefined-trap-on-error",
)

VALUE, READ_ONLY, WRITABLE = range(3)
MAX_PARAMETERS = 64

Mutation = tuple[str, str]
"""A planted bug: text of the source, and what stands in its place."""


class EmulatorError(RuntimeError):
    """A kernel did what no kernel may; the message says what, and where."""


class CompilationError(EmulatorError):
    """A kernel does not compile on the host; the message holds the compiler's."""


class _Argument(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("bytes", ctypes.c_uint64), ("kind", ctypes.c_int))


class _Request(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("count", ctypes.c_int),
        ("arguments", ctypes.POINTER(_Argument)),
    )


class _Error(ctypes.Structure):
    _fields_ = (("message", ctypes.c_char * 1024), ("offset", ctypes.c_uint64))


def run(
    launches: Sequence[Launch],
    x: NDArray[np.generic],
    out: NDArray[np.generic],
    bias: NDArray[np.generic] | None = None,
    *,
    seed: int,
    mutate: Mutation | None = None,
) -> None:
    """Run a program's launches on x, to `out`, whose elements, like scratch, are NaN bits before the first.

    `seed` decides the order of threads and blocks and when copies land. With `mutate` the sources of the launches are
    compiled with its second text in all places of the first, or the headers where a source does not hold it; one at
    least must hold it.
    """
    for array in (x, out):
        if not array.flags.c_contiguous:
            raise ValueError("x and out must be C-contiguous")
    if mutate is not None and not any(_mutated(launch.variant, mutate) for launch in launches):
        raise ValueError(f"no source of these launches holds {mutate[0]!r}")
    out.view(np.uint8).fill(0xFF)
    scratch = np.full(max((launch.scratch_bytes for launch in launches), default=0), 0xFF, np.uint8)
    operands = {Operand.X: x, Operand.OUT: out, Operand.BIAS: bias, Operand.SCRATCH: scratch}
    for index, it in enumerate(launches):
        launch(it, operands, seed=seed + index, mutate=mutate)


def launch(
    launch: Launch,
    operands: Mapping[Operand, NDArray[np.generic] | None],
    *,
    seed: int,
    mutate: Mutation | None = None,
) -> None:
    """One launch on operands as they are; OUT and SCRATCH alone may be written."""
    path = library(launch.variant, mutate)
    kernel = _load(path)
    sizes = (ctypes.c_size_t * MAX_PARAMETERS)()
    count = kernel.parameters(sizes)
    name = launch.variant.name
    if count != len(launch.arguments):
        raise EmulatorError(f"{name} has {count} parameters, the launch gives {len(launch.arguments)}")
    arguments = (_Argument * count)()
    alive = []
    for index, argument in enumerate(launch.arguments):
        value = operands[argument] if isinstance(argument, Operand) else argument
        if value is not None and not isinstance(value, np.ndarray):
            value = np.array(value)
            kind, size = VALUE, value.nbytes
        else:
            writable = argument is Operand.OUT or argument is Operand.SCRATCH
            kind, size = WRITABLE if writable else READ_ONLY, ctypes.sizeof(ctypes.c_void_p)
        if size != sizes[index]:
            raise EmulatorError(f"{name}: argument {index} has {size} bytes, the parameter {sizes[index]}")
        if value is not None and not value.flags.c_contiguous:
            raise ValueError(f"{name}: argument {index} is not C-contiguous")
        alive.append(value)
        arguments[index] = (
            _Argument(None, 0, kind) if value is None else _Argument(value.ctypes.data, value.nbytes, kind)
        )
    request = _Request(launch.grid, launch.block, launch.shared_bytes, seed, count, arguments)
    error = _Error()
    if kernel.launch(ctypes.byref(request), ctypes.byref(error)):
        raise EmulatorError(f"{_line(path, error.offset)}{error.message.decode()} [{name}]")


def library(variant: Variant, mutate: Mutation | None = None) -> Path:
    """The variant as a shared library, compiled if it is not there yet."""
    mutated = _mutated(variant, mutate) if mutate else {}
    flags = (
        *FLAGS,
        *KERNEL_FLAGS,
        f"-DKERNEL={variant.function}",
        *(f"-D{k}={v}" for k, v in variant.defines.items()),
    )
    headers = sorted([*KERNELS.glob("*.cuh"), *HERE.glob("*.h"), *HERE.glob("*.cpp")])
    texts = (path.read_text() for path in (KERNELS / variant.source, *headers))
    key = _digest(*texts, *mutated.values(), *flags, _compiler_version())
    target = CACHE / f"{variant.function}-{key}.so"
    if not target.exists():
        source = KERNELS / variant.source
        if mutated:
            # All beside each other: a file finds those it includes in its own folder first.
            folder = CACHE / f"{variant.function}-{key}"
            folder.mkdir(parents=True, exist_ok=True)
            for path in (source, *KERNELS.glob("*.cuh")):
                (folder / path.name).write_text(mutated.get(path.name) or path.read_text())
            source = folder / source.name
        _compile(
            [
                COMPILER,
                *flags,
                f'-DKERNEL_SOURCE="{source}"',
                "-shared",
                str(HERE / "entry.cpp"),
                *map(str, _machine()),
                "-ldl",
            ],
            target,
        )
    return target


@functools.cache
def _machine() -> list[Path]:
    """The emulator itself, as object files that every library is linked with."""
    headers = [path.read_text() for path in sorted(HERE.glob("*.h"))]
    objects = []
    for source in (HERE / "emulator.cpp", HERE / "products.cpp"):
        key = _digest(source.read_text(), *headers, *FLAGS, *MACHINE_FLAGS, _compiler_version())
        objects.append(CACHE / f"{source.stem}-{key}.o")
        if not objects[-1].exists():
            CACHE.mkdir(parents=True, exist_ok=True)
            _compile([COMPILER, *FLAGS, *MACHINE_FLAGS, "-c", str(source)], objects[-1])
    return objects


def _compile(command: list[str], target: Path) -> None:
    """Run the compiler to `target`, which appears whole: several processes may do the same at once."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        result = Path(folder) / target.name
        done = subprocess.run([*command, "-o", str(result)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompilationError(f"{target.name} does not compile:\n{done.stderr}")
        result.replace(target)


@functools.cache
def _load(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path))


@functools.cache
def _compiler_version() -> str:
    return subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True).stdout


def _mutated(variant: Variant, mutate: Mutation) -> dict[str, str]:
    """The texts of the files that a planted bug changes, by name: the source, or else the headers."""
    for paths in ([KERNELS / variant.source], KERNELS.glob("*.cuh")):
        texts = {path.name: path.read_text() for path in paths}
        if found := {name: text.replace(*mutate) for name, text in texts.items() if mutate[0] in text}:
            return found
    return {}


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _line(path: Path, offset: int) -> str:
    """Where in the kernel an instruction of the library comes from, as `file:line: `; empty where nobody knows."""
    if not offset or not shutil.which("addr2line"):
        return ""
    # A return address belongs to the call before it.
    command = ["addr2line", "-i", "-e", str(path), hex(offset - 1)]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")
    lines = [line.partition(" (")[0] for line in found if line and not line.startswith("?")]
    # Inlined calls come first: the primitive, then the kernel that called it.
    kernel = [line for line in lines if Path(line).parent != HERE]
    return f"{Path(kernel[0]).name}: " if kernel else ""
