"""Arm's dot products: which processors have them, and that products of quads become nothing else."""

import re

import pytest
from llvmlite import binding, ir

from sparse_kernels.cpu.codegen import cpu_target, vector_emitter
from sparse_kernels.cpu.codegen.arm_dot_products import find_arm_quads
from sparse_kernels.cpu.codegen.vector_emitter import QUADS_BY_BYTE, QUADS_BY_SIGNED, QUADS_BY_UNIT, Emitter
from sparse_kernels.cpu.runtime.numba_internals import CompileTarget

LINUX, MAC = "aarch64-unknown-linux-gnu", "arm64-apple-darwin24.0.0"


def arm(cpu: str, triple: str = LINUX) -> CompileTarget:
    return CompileTarget(triple, cpu, frozenset())


@pytest.mark.parametrize(
    ("target", "features", "quads", "name"),
    [
        (arm("generic"), "", QUADS_BY_BYTE, "neon"),
        (arm("cortex-a72"), "", QUADS_BY_BYTE, "neon"),
        (arm("neoverse-n1"), "", QUADS_BY_SIGNED, "neondotprod"),
        (arm("generic"), "+neon,+dotprod", QUADS_BY_SIGNED, "neondotprod"),
        (arm("apple-m1", MAC), "", QUADS_BY_SIGNED, "neondotprod"),
        (arm("neoverse-v1"), "", QUADS_BY_UNIT, "neoni8mm"),
        (arm("neoverse-v1"), "+neon,-i8mm", QUADS_BY_SIGNED, "neondotprod"),
        (arm("apple-m2", MAC), "", QUADS_BY_UNIT, "neoni8mm"),
    ],
    ids=lambda value: value.cpu if isinstance(value, CompileTarget) else value if isinstance(value, str) else None,
)
def test_the_name_of_a_processor_or_its_features_tell(
    monkeypatch: pytest.MonkeyPatch, target: CompileTarget, features: str, quads: int, name: str
) -> None:
    assert find_arm_quads(target, features) == quads
    monkeypatch.setattr(cpu_target, "read_compile_target", lambda: target)
    monkeypatch.setattr(cpu_target, "read_llvm_features", lambda: features)
    found = cpu_target.find_cpu_target.__wrapped__()
    assert (found.name, found.byte_name, found.lanes) == ("neon", name, 4)


@pytest.mark.parametrize(
    ("cpu", "numbers", "instructions"),
    [("neoverse-v1", QUADS_BY_UNIT, ["usdot"]), ("neoverse-n1", QUADS_BY_SIGNED, ["eor", "sdot"])],
)
def test_a_product_of_quads_is_one_dot_product(
    monkeypatch: pytest.MonkeyPatch, cpu: str, numbers: int, instructions: list[str]
) -> None:
    monkeypatch.setattr(vector_emitter, "read_compile_target", lambda: arm(cpu))
    vector = ir.VectorType(ir.FloatType(), 4)
    module = ir.Module()
    module.triple = LINUX
    function = ir.Function(module, ir.FunctionType(vector, [vector] * 3), "product")
    builder = ir.IRBuilder(function.append_basic_block())
    builder.ret(Emitter(builder, 4, True).multiply_quads(*function.args, numbers))
    machine = binding.Target.from_triple(LINUX).create_target_machine(cpu=cpu)
    code = machine.emit_assembly(binding.parse_assembly(str(module)))
    found = re.findall(r"^\t([a-z]\w*)\t", code.split("product:")[1], re.MULTILINE)
    assert [each for each in found if each in ("eor", "sdot", "udot", "usdot", "mla", "mul", "smull")] == instructions
