"""The vector unit that compiled kernels run on: what Numba generates code for, which NUMBA_CPU_NAME may lower."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sparse_kernels.cpu.codegen import tile_registers
from sparse_kernels.cpu.codegen.arm_dot_products import find_arm_quads
from sparse_kernels.cpu.codegen.vector_emitter import (
    QUADS_BY_BYTE,
    QUADS_BY_PAIRS,
    QUADS_BY_SIGNED,
    QUADS_BY_UNIT,
)
from sparse_kernels.cpu.runtime.numba_internals import read_compile_target, read_llvm_features


@dataclass(frozen=True)
class CpuTarget:
    """A vector unit.

    name: as plan.kernel says it. lanes: float32 in a vector. registers: vectors it holds. fused: it has fused
    multiply-adds. halves: it works on wide vectors in two halves, so vectors of half the lanes cost half. shared: it
    adds integers too, as Intel's does, so a pass over a column costs more than its multiply-adds. matrix: there is a
    matrix unit beside it (`tile_registers`). pairs: it multiplies pairs of bfloat16 (AVX512-BF16), twice as many as
    float32. quads: how it multiplies quads of bytes best.
    """

    name: str
    lanes: int
    registers: int
    fused: bool
    halves: bool = False
    shared: bool = False
    matrix: bool = False
    pairs: bool = False
    quads: int = QUADS_BY_BYTE

    @property
    def whole(self) -> bool:
        """Whether it works on 512 bits at once and does nothing else with that: AMD's since Zen 5.

        Its multiply-adds take half the time of a unit that works in halves, so more of them wait for the caches.
        """
        return self.lanes == 16 and not self.halves and not self.shared

    @property
    def byte_name(self) -> str:
        """The name with what multiplies quads of bytes, as plans in eight bits say it."""
        units = {QUADS_BY_UNIT: "i8mm" if self.name == "neon" else "vnni", QUADS_BY_SIGNED: "dotprod"}
        return self.name + units.get(self.quads, "")


# Lanes of the narrowest vectors: 128 bits.
NARROWEST = 4

_LAST_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")


@cache
def count_rotated_bytes() -> int:
    """Return how many bytes of weights must be read before the same ones come from memory again, as in a large model.

    Three times the third-level cache of a core; 64 MiB where the system does not tell. A cache that evicts a random
    line still holds 6% of them then. With one and a half times its size it would hold 42%.
    """
    text = _LAST_CACHE.read_text().strip() if _LAST_CACHE.exists() else ""
    return int(text[:-1]) * 2**10 * 3 if text.endswith("K") and text[:-1].isdigit() else 64 * 2**20


@cache
def find_cpu_target() -> CpuTarget:
    """Return the vector unit of this process.

    A fused multiply-add that the target lacks would become one library call a lane, a hundred times slower: then
    kernels multiply and add. AArch64 always has one, and 32 registers of 128 bits.
    """
    compiled_for = read_compile_target()
    _, cpu, has = compiled_for
    if compiled_for.is_arm:
        return CpuTarget("neon", 4, 32, fused=True, quads=find_arm_quads(compiled_for, read_llvm_features()))
    quads = QUADS_BY_UNIT if {"avx512vnni", "avx512vl"} <= has or "avxvnni" in has else QUADS_BY_PAIRS
    if {"avx512f", "avx512vl", "avx512dq", "avx512bw"} <= has:
        # LLVM's names of AMD's processors with AVX-512 start so; all others are Intel's.
        of_amd = cpu.startswith("znver")
        return CpuTarget(
            "avx512", 16, 32, fused=True, halves=cpu == "znver4", shared=not of_amd,
            matrix=tile_registers.is_available(), pairs="avx512bf16" in has,
            quads=quads,
        )  # fmt: skip
    if "avx2" in has and "fma" in has:
        return CpuTarget("avx2", 8, 16, fused=True, quads=quads)
    if "avx" in has:
        return CpuTarget("avx", 8, 16, fused=False)
    return CpuTarget("simd128", 4, 16, fused=False, quads=QUADS_BY_PAIRS)
