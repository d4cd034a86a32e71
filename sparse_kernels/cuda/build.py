"""Kernels compiled by NVRTC to cubins, kept on disk.

NVRTC needs no GPU and no driver, so tests and GPU machines compile the same way. It is found in NVIDIA's wheels, in a
conda or system CUDA, or by LD_LIBRARY_PATH. The wheels are nvidia-cuda-nvrtc for CUDA 13, and nvidia-cuda-nvrtc-cu12
for CUDA 12, the last that knows Volta. A cubin's file name says what it was made from: source, headers, options,
compiler.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparse_kernels.cuda.program import Variant
from sparse_kernels.cuda.targets import ARCHITECTURES, OLDEST_NVRTC, TARGETS, GpuArchitecture
from sparse_kernels.registry import MissingLibrary, NoDevice

KERNELS = Path(__file__).parent / "device_code"

# CUDA's major versions that the kernels are compiled with, newest first, and where NVIDIA's wheels put each.
WHEEL_FOLDERS = {13: "cu13", 12: "cuda_nvrtc"}
PACKAGES = {13: "nvidia-cuda-nvrtc", 12: "nvidia-cuda-nvrtc-cu12"}


class BuildError(RuntimeError):
    """A kernel cannot be compiled; the message says which, for what, and why."""


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel: its file, its function there, and what the compiler said of the file."""

    path: Path
    function: str
    log: str

    @property
    def registers(self) -> int:
        """Registers of a thread."""
        return self._number(r"Used (\d+) registers")

    @property
    def stack_bytes(self) -> int:
        """Bytes of a thread's stack: local arrays that found no registers."""
        return self._number(r"(\d+) bytes stack frame")

    @property
    def spilled_bytes(self) -> int:
        """Bytes of registers stored to memory, and loaded again."""
        return self._number(r"(\d+) bytes spill stores") + self._number(r"(\d+) bytes spill loads")

    def _number(self, pattern: str) -> int:
        """Return a number that the log gives for the function."""
        own = self.log.partition(f"Compiling entry function '{self.function}'")[2].partition("Compiling entry")[0]
        found = re.search(pattern, own)
        if not found:
            raise BuildError(f"{self.path.name}: the compiler's log does not say {pattern!r} of {self.function}")
        return int(found[1])


@dataclass(frozen=True, eq=False)
class Nvrtc:
    """A loaded NVRTC library."""

    library: ctypes.CDLL
    path: str
    version: tuple[int, int]
    architectures: tuple[int, ...]  # 75 for sm_75

    def supports(self, architecture: str) -> bool:
        """Return whether it compiles for sm_80, sm_90a and so on."""
        major, minor = _target(architecture).capability
        return 10 * major + minor in self.architectures


def compile(variant: Variant, architecture: str, *, newest: int = 13, folder: Path | None = None) -> Cubin:
    """Return the variant for an architecture (sm_80, sm_90a), from the cache in `folder` where it is there already.

    newest: the newest CUDA major version whose cubins the driver loads. folder: the user's cache unless given.
    Raises BuildError, or MissingLibrary where there is no NVRTC for the architecture.
    """
    if architecture not in variant.architectures:
        raise BuildError(f"{variant.name} is for {', '.join(variant.architectures)}, not {architecture}")
    nvrtc = find_nvrtc(architecture, newest)
    source = (KERNELS / variant.source).read_text()
    options = compile_options(variant, architecture)
    folder = folder or find_cubin_folder()
    path = folder / f"{variant.function}-{architecture}-{_digest(source, options, nvrtc)}.cubin"
    log_path = path.with_suffix(".log")
    # The log is written first: where the cubin is, so is its log.
    if not path.exists():
        cubin, log = _compile(nvrtc, source, variant, architecture, options)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(log_path, log.encode())
        write_whole(path, cubin)
    return Cubin(path, variant.function, log_path.read_text())


def compile_options(variant: Variant, architecture: str) -> list[str]:
    """Return the options that NVRTC gets."""
    defines = [f"-D{key}={value}" for key, value in variant.defines.items()]
    return [f"-arch={architecture}", "-std=c++17", "--ptxas-options=-v", f"-I{KERNELS}", *defines]


def find_cubin_folder() -> Path:
    """Return where cubins are kept: LATBENCH_CACHE or the user's cache folder."""
    cache = os.environ.get("LATBENCH_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (Path(cache) if cache else home / "latbench") / "cubins"


def find_nvrtc(architecture: str, newest: int = 13) -> Nvrtc:
    """Return the newest NVRTC that compiles for an architecture and a driver of CUDA `newest`.

    Raises MissingLibrary, which says what was found and what to install, or NoDevice where the driver is too old.
    """
    known_by = _target(architecture).nvrtc
    usable = [major for major in known_by if major <= newest]
    if not usable:
        raise NoDevice(
            f"the driver is for CUDA {newest}, and kernels for {architecture} need CUDA {min(known_by)} or newer: "
            "update the driver"
        )
    found = []
    for major in WHEEL_FOLDERS:
        if major <= newest and (nvrtc := load_nvrtc(major)) is not None:
            if nvrtc.supports(architecture):
                return nvrtc
            found.append(nvrtc)
    known = "".join(f" ({it.path} {it.version[0]}.{it.version[1]} does not)" for it in found)
    wanted = max(usable)
    package = f"{PACKAGES[wanted]}>={'.'.join(map(str, known_by[wanted]))}"
    raise MissingLibrary(f"no NVRTC that compiles for {architecture}{known}: pip install '{package}'")


def select_compilable(architectures: Sequence[str], newest: int = 13) -> str:
    """Return the first of these architectures that there is an NVRTC for.

    So a GPU whose own architecture the installed NVRTC is too old for gets code of an older one that it runs: sm_120
    for sm_121. Raises what find_nvrtc raises for the first where there is an NVRTC for none.
    """
    reasons = []
    for architecture in architectures:
        try:
            find_nvrtc(architecture, newest)
        except (MissingLibrary, NoDevice) as error:
            reasons.append(error)
        else:
            return architecture
    raise reasons[0]


@functools.cache
def load_nvrtc(major: int) -> Nvrtc | None:
    """Return NVRTC of a CUDA major version, not older than OLDEST_NVRTC; None where there is none on this machine."""
    for path in _candidates(major):
        try:
            # NVRTC looks for its builtins by name only: where they lie beside it, they are there already.
            for builtins in sorted(Path(path).parent.glob(f"libnvrtc-builtins.so.{major}.*")) if "/" in path else ():
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            library = ctypes.CDLL(path)
        except OSError:
            continue
        numbers = ctypes.c_int(), ctypes.c_int()
        library.nvrtcVersion(ctypes.byref(numbers[0]), ctypes.byref(numbers[1]))
        version = (numbers[0].value, numbers[1].value)
        if version < OLDEST_NVRTC[major]:
            continue
        count = ctypes.c_int()
        library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
        architectures = (ctypes.c_int * count.value)()
        library.nvrtcGetSupportedArchs(architectures)
        return Nvrtc(library, path, version, tuple(architectures))
    return None


def _candidates(major: int) -> Iterator[str]:
    """Yield where NVRTC may be: wheels, then what the loader finds by itself, then conda's and the system's CUDA."""
    name = f"libnvrtc.so.{major}"
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        path = Path(root) / WHEEL_FOLDERS[major] / "lib" / name
        if path.exists():
            yield str(path)
    yield name
    for variable, default in (("CUDA_HOME", ""), ("CUDA_PATH", ""), ("CONDA_PREFIX", ""), ("", "/usr/local/cuda")):
        root = os.environ.get(variable) or default
        for path in (Path(root) / "lib64" / name, Path(root) / "lib" / name):
            if root and path.exists():
                yield str(path)


def _compile(nvrtc: Nvrtc, source: str, variant: Variant, architecture: str, options: list[str]) -> tuple[bytes, str]:
    """Return the cubin and the log."""
    library, program = nvrtc.library, ctypes.c_void_p()
    encoded = [option.encode() for option in options]
    status = library.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), variant.source.encode(), 0, None, None
    )
    if status:
        raise BuildError(f"{variant.source}: NVRTC makes no program of it (error {status})")
    try:
        status = library.nvrtcCompileProgram(program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded))
        log = _text(library, "ProgramLog", program).decode(errors="replace")
        if status:
            raise BuildError(f"{variant.name} does not compile for {architecture}: {_first_error(log)}")
        return _bytes(library, "CUBIN", program), log
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _bytes(library: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    """Return what nvrtcGet<what> gives."""
    size = ctypes.c_size_t()
    status = getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    status = status or getattr(library, f"nvrtcGet{what}")(program, buffer)
    if status:
        raise BuildError(f"NVRTC gives no {what} (error {status})")
    return buffer.raw


def _text(library: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    """Return the same without the closing zero."""
    return _bytes(library, what, program).rstrip(b"\0")


def _first_error(log: str) -> str:
    """Return the first line of a log that says error, or its first line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()] or ["no reason is given"]
    return next((line for line in lines if "error" in line), lines[0])


def _digest(source: str, options: list[str], nvrtc: Nvrtc) -> str:
    """Return the hash of everything the cubin depends on: the text of the headers, but not their folder."""
    headers = [path.read_text() for path in sorted(KERNELS.glob("*.cuh"))]
    settings = [option for option in options if not option.startswith("-I")]
    parts = [source, *headers, *settings, f"nvrtc {nvrtc.version[0]}.{nvrtc.version[1]}"]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that others see all of it or nothing."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        temporary = Path(file.name)
        try:
            file.write(content)
            file.close()
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _target(architecture: str) -> GpuArchitecture:
    if architecture not in TARGETS:
        raise BuildError(f"no kernel is compiled for {architecture!r}: known are {', '.join(ARCHITECTURES)}")
    return TARGETS[architecture]
