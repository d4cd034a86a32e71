"""CPU levels for which kernels are compiled ahead of time, from the least to the most able.

A level is the instruction sets that code of it may use. The library in C knows them by the bits of FEATURE_BITS, and
asks the processor for them before it runs anything.

Within a level, tiles and the order of instructions suit the processor that exports, as in a converted torch module.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import binding

_V2 = (
    "64bit", "sse", "sse2", "sse3", "ssse3", "sse4.1", "sse4.2", "popcnt", "cx16", "cx8", "fxsr", "sahf", "mmx",
    "cmov",
)  # fmt: skip
_V3 = (*_V2, "avx", "avx2", "fma", "bmi", "bmi2", "f16c", "lzcnt", "movbe", "xsave")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")

# Of every 64-bit processor; some systems do not report them.
_NOT_REPORTED = frozenset({"64bit", "sse", "cx8", "fxsr", "sahf", "mmx", "cmov"})

# What the library asks the processor for, and the bits by which it knows it (`cpu_features.c`).
FEATURE_BITS = {
    "avx2": 0, "fma": 1, "bmi": 2, "bmi2": 3, "f16c": 4, "avx512f": 5, "avx512bw": 6, "avx512cd": 7, "avx512dq": 8,
    "avx512vl": 9, "avx512vnni": 10, "avx512bf16": 11, "lzcnt": 12, "popcnt": 13, "movbe": 14, "xsave": 15,
    "cx16": 16,
}  # fmt: skip


@dataclass(frozen=True)
class CpuLevel:
    """A CPU level. name: as users give it. features: instruction sets that code may use."""

    name: str
    features: tuple[str, ...]

    @property
    def bits(self) -> int:
        """The features as the library knows them."""
        return sum(1 << bit for name, bit in FEATURE_BITS.items() if name in self.features)

    @property
    def compiler_settings(self) -> dict[str, str]:
        """Numba's environment variables that make it compile for this level."""
        return {"NUMBA_CPU_NAME": find_host_name(), "NUMBA_CPU_FEATURES": self.llvm_features}

    @property
    def llvm_features(self) -> str:
        """The features as LLVM takes them: those of the level, and none of the others that this processor has."""
        others = {*binding.get_host_cpu_features()} - {*self.features}
        if "avx512f" in self.features:
            others.discard("evex512")  # LLVM 18 to 20 name the long registers of AVX-512 so
        return ",".join([*(f"+{each}" for each in self.features), *(f"-{each}" for each in sorted(others))])


LEVELS = (
    CpuLevel("x86-64-v3", _V3),
    CpuLevel("x86-64-v4", _V4),
    CpuLevel("x86-64-v4-vnni-bf16", (*_V4, "avx512vnni", "avx512bf16")),
)


def find_host_name() -> str:
    """Return LLVM's name of this processor."""
    name: str = binding.get_host_cpu_name()
    return name


def find_level(name: str) -> CpuLevel:
    """Return the level of this name. Raises ValueError with the known names."""
    for level in LEVELS:
        if level.name == name:
            return level
    raise ValueError(f"unknown CPU level {name!r}: known are {', '.join(each.name for each in LEVELS)}")


def list_host_levels() -> list[CpuLevel]:
    """Return the levels that this machine has; none on another architecture than x86-64."""
    if not binding.get_process_triple().startswith("x86_64"):
        return []
    has = {name for name, is_there in binding.get_host_cpu_features().items() if is_there}
    return [level for level in LEVELS if {*level.features} - _NOT_REPORTED <= has]
