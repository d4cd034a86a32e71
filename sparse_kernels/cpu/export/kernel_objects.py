"""Compile recorded kernels to object files that need neither Python nor Numba.

An object holds the functions of (address of a frame, part) that `native_call` runs, and what they call. Everything
else that Numba made around them is dropped. Objects are kept on disk beside Numba's kernels: an export mostly needs
those of earlier ones, and each takes seconds to compile.
"""

from __future__ import annotations

import hashlib
import struct
import warnings
from dataclasses import dataclass
from typing import Any

import llvmlite
import numba
from llvmlite import binding

from sparse_kernels.cpu.export.cpu_levels import CpuLevel, find_host_name
from sparse_kernels.cpu.launch.recording import RecordedStep
from sparse_kernels.cpu.runtime.cache_folder import find_user_cache
from sparse_kernels.cpu.runtime.kernel_cache import KernelFiles, describe_unkept

# What an object may ask of the C library: LLVM calls these for copies, and for functions without an instruction.
ALLOWED_SYMBOLS = frozenset({"memcpy", "memset", "memmove", "erff", "expf", "exp", "fmaf", "_GLOBAL_OFFSET_TABLE_"})


@dataclass(frozen=True)
class KernelObject:
    """An object file of one kernel. symbols: its functions, one for each stage."""

    content: bytes
    symbols: tuple[str, ...]


def compile_kernel(step: RecordedStep, level: CpuLevel) -> KernelObject:
    """Return the object of the kernel of this step, from disk if it was compiled before.

    The process must compile for this level (`compiler_settings`). Raises RuntimeError if the code needs anything but
    the C library.
    """
    folder = find_user_cache("kernels")
    files = KernelFiles(folder, f"{step.kernel.name}.{level.name}")
    types = tuple(map(numba.typeof, step.given))
    key = types, find_host_name(), level.llvm_features, llvmlite.__version__
    kept = files.load(key)
    if isinstance(kept, tuple):  # of plain values, which any version of this module reads
        return KernelObject(*kept)
    compiled = _compile(step, level)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.save(key, (compiled.content, compiled.symbols))
    except OSError as error:
        warnings.warn(describe_unkept(error), stacklevel=2)
    return compiled


def _compile(step: RecordedStep, level: CpuLevel) -> KernelObject:
    code, names = step.kernel.compile_parts(step.given)
    prefix = f"latbench_kernel_{hashlib.sha256((level.name + code).encode()).hexdigest()[:16]}"
    symbols = tuple(f"{prefix}_{stage}" for stage in range(len(names)))
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=find_host_name(), features=level.llvm_features, opt=3, reloc="pic", codemodel="small"
    )
    module = cut_functions(code, dict(zip(names, symbols, strict=True)), machine)
    content = machine.emit_object(module)
    if foreign := list_undefined_symbols(content) - ALLOWED_SYMBOLS:
        raise RuntimeError(f"a compiled kernel needs {', '.join(sorted(foreign))}, which only Numba has")
    return KernelObject(content, symbols)


def cut_functions(code: str, renamed: dict[str, str], machine: Any) -> Any:
    """Return the LLVM module of these functions, under new names, and of what they use."""
    module = binding.parse_assembly(code)
    for each in (*module.functions, *module.global_variables):
        if each.is_declaration:
            continue
        if each.name in renamed:
            each.name = renamed[each.name]
            each.linkage, each.visibility = "external", "hidden"
        else:
            each.linkage = "internal"
    module.verify()
    builder = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=0))
    passes = binding.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.add_strip_dead_prototype_pass()
    passes.run(module, builder)
    return module


_SYMBOL = struct.Struct("<IBBHQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL_TABLE = 2


def list_undefined_symbols(content: bytes) -> set[str]:
    """Return the names that a 64-bit ELF object needs from elsewhere."""
    (sections_at,) = struct.unpack_from("<Q", content, 40)
    size, count = struct.unpack_from("<HH", content, 58)
    sections = [_SECTION.unpack_from(content, sections_at + i * size) for i in range(count)]
    found = set()
    for _, kind, _, _, at, length, link, _, _, each in sections:
        if kind != _SYMBOL_TABLE:
            continue
        names_at = sections[link][4]
        for i in range(1, length // each):
            name, _, _, section, _, _ = _SYMBOL.unpack_from(content, at + i * each)
            if section == 0 and name:
                begin = names_at + name
                found.add(content[begin : content.index(b"\0", begin)].decode())
    return found
