"""How a processor of the AArch64 kind multiplies quads of bytes: which of its dot products Numba may generate.

LLVM says it nowhere. The name of a processor implies instructions that its list of features leaves out. So a sum of
products is compiled, and read.
"""

from __future__ import annotations

from llvmlite import binding

from sparse_kernels.cpu.codegen.vector_emitter import QUADS_BY_BYTE, QUADS_BY_SIGNED, QUADS_BY_UNIT
from sparse_kernels.cpu.runtime.numba_internals import CompileTarget

_SUM_OF_PRODUCTS = """
define i32 @sum(<16 x i8> %x, <16 x i8> %w) {{
  %a = {extended} <16 x i8> %x to <16 x i32>
  %b = sext <16 x i8> %w to <16 x i32>
  %products = mul <16 x i32> %a, %b
  %total = call i32 @llvm.vector.reduce.add.v16i32(<16 x i32> %products)
  ret i32 %total
}}
declare i32 @llvm.vector.reduce.add.v16i32(<16 x i32>)
"""


def find_arm_quads(target: CompileTarget, llvm_features: str) -> int:
    """Return how quads are multiplied best: by `usdot` (FEAT_I8MM), by `sdot` (FEAT_DotProd), or byte by byte."""
    if _compiles_to(target, llvm_features, "zext", "usdot"):
        return QUADS_BY_UNIT
    return QUADS_BY_SIGNED if _compiles_to(target, llvm_features, "sext", "sdot") else QUADS_BY_BYTE


def _compiles_to(target: CompileTarget, llvm_features: str, extended: str, instruction: str) -> bool:
    """Return whether LLVM multiplies x, extended in this way, with signed bytes by this instruction."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    machine = binding.Target.from_triple(target.triple).create_target_machine(cpu=target.cpu, features=llvm_features)
    module = binding.parse_assembly(_SUM_OF_PRODUCTS.format(extended=extended))
    module.triple = target.triple
    words = machine.emit_assembly(module).split()
    return not {instruction, f"{instruction}.4s"}.isdisjoint(words)  # as Linux and macOS write it
