"""The compile gate refuses what it is there to refuse, and nothing else."""

import importlib.util
import re
import subprocess
from pathlib import Path

import emulator
import gate
import mutations
import numpy as np
import pytest

from sparse_kernels.cuda import build
from sparse_kernels.cuda.program import Launch, Operand, Variant
from sparse_kernels.cuda.targets import ARCHITECTURES
from sparse_kernels.cuda.variants import list_variants

KERNELS = Path(emulator.__file__).parent / "kernels"


def variant(source, function, architectures, instruction="", **defines):
    return Variant(str(KERNELS / source), function, defines, architectures, instruction)


def problems(one, architecture, folder):
    needed = 12 if architecture == "sm_70" else 13
    if build.load_nvrtc(needed) is None:
        pytest.skip(f"needs {build.PACKAGES[needed]}")
    return gate.check(one, architecture, folder).problems


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90a", "sm_121"])
def test_a_kernel_in_registers_with_its_instruction_passes(tmp_path, architecture):
    assert problems(variant("gate.cu", "tensor", (architecture,), "HMMA.1688.F32"), architecture, tmp_path) == ()


@pytest.mark.parametrize(
    ("product", "instruction"), [(16816, "HMMA.16816.F32"), (1688, "HMMA.1688.F32"), (16832, "HMMA.SP.16832.F32")]
)
def test_an_instruction_is_told_from_the_others(tmp_path, product, instruction):
    for other in gate.INSTRUCTIONS:
        one = variant("products.cu", "product", ("sm_80",), other, PRODUCT=product)
        expected = () if other == instruction else (f"no {other} in its code",)
        assert problems(one, "sm_80", tmp_path) == expected


def test_spilled_registers_are_refused(tmp_path):
    found = problems(variant("gate.cu", "spills", ("sm_80",)), "sm_80", tmp_path)
    assert any(problem.endswith("bytes are spilled") and not problem.startswith("0") for problem in found)


def test_a_local_array_is_refused(tmp_path):
    assert "128 bytes of stack a thread" in problems(variant("gate.cu", "has_stack", ("sm_80",)), "sm_80", tmp_path)


def test_an_instruction_that_became_ordinary_arithmetic_is_refused(tmp_path):
    one = variant("products.cu", "product", ("sm_70", "sm_80"), "HMMA.884.F32", PRODUCT=884)
    assert problems(one, "sm_80", tmp_path) == ("no HMMA.884.F32 in its code",)


def test_voltas_own_instruction_is_found(tmp_path):
    one = variant("products.cu", "product", ("sm_70", "sm_80"), "HMMA.884.F32", PRODUCT=884)
    assert problems(one, "sm_70", tmp_path) == ()


def test_on_volta_ordinary_arithmetic_is_refused_too(tmp_path):
    one = variant("plain.cu", "plain", ("sm_70",), "HMMA.884.F32")
    assert problems(one, "sm_70", tmp_path) == ("no HMMA.884.F32 in its code",)


def test_an_instruction_in_a_neighbours_code_does_not_count(tmp_path):
    one = variant("gate.cu", "ordinary", ("sm_80",), "HMMA.1688.F32")
    assert problems(one, "sm_80", tmp_path) == ("no HMMA.1688.F32 in its code",)


def test_an_instruction_that_the_machine_lacks_is_refused(tmp_path):
    one = variant("products.cu", "product", ("sm_75",), "HMMA.16816.F32", PRODUCT=16816)
    (problem,) = problems(one, "sm_75", tmp_path)
    assert "does not compile for sm_75" in problem
    assert "requires .target sm_80" in problem


def test_the_gate_goes_through_every_kernel_of_every_architecture():
    every = gate.cubins_of(None, None)
    assert len({(one.name, architecture) for one, architecture in every}) == len(every)
    assert {architecture for _, architecture in every} == set(ARCHITECTURES)
    assert {one.function for one, _ in every} >= {"vector_matmul", "nm24", "csr", "read_pieces", "vector_sm90"}
    assert sum(len(gate.cubins_of(None, [architecture])) for architecture in ARCHITECTURES) == len(every)
    assert {(one.function, it) for one, it in gate.cubins_of("nm", ["sm_70", "sm_120"])} == {
        ("nm", "sm_70"),
        ("nm", "sm_120"),
        ("nm24", "sm_120"),
    }


def test_one_architectures_cubins_are_written_to_the_folder_that_was_named(monkeypatch, tmp_path, capsys):
    if build.load_nvrtc(13) is None:
        pytest.skip(f"needs {build.PACKAGES[13]}")
    options = ["--family", "csr", "--architecture", "sm_120", "--architecture", "sm_121", "--folder", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["gate.py", *options])
    assert gate.main() == 0
    assert "6 kernels, 2 architectures, 12 cubins, 0 of them fail, 0 spill, 0 of 0" in capsys.readouterr().out
    assert len(list(tmp_path.glob("csr-sm_120-*.cubin"))) == len(list(tmp_path.glob("csr-sm_121-*.cubin"))) == 6


def test_a_family_without_kernels_for_an_architecture_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gate.py", "--family", "nm_sm90", "--architecture", "sm_80"])
    with pytest.raises(SystemExit):
        gate.main()
    assert "nm_sm90 has no kernel for sm_80" in capsys.readouterr().err


def one_of_each():
    """A variant of every kernel and instruction, and an architecture that the disassembler knows."""
    found = {
        (one.function, one.instruction, architecture): (one, architecture)
        for one in list_variants()
        for architecture in one.architectures
        if architecture != "sm_70"
    }
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "architecture"), one_of_each(), ids=lambda it: it if isinstance(it, str) else it.function
)
def test_the_disassembler_names_the_same_instructions(one, architecture):
    cubin = build.compile(one, architecture, folder=gate.CUBINS)
    code = gate.machine_code(cubin.path, one.function)
    text = printed("nvdisasm", "-c", "-hex", str(cubin.path))
    line = r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*).*/\* 0x([0-9a-f]{16}) \*/$"
    found = re.findall(line, text, re.MULTILINE)
    assert [int(word, 16) for _, word in found] == code[:, 0].tolist()
    for instruction in gate.INSTRUCTIONS:
        dense = ("HGMMA" if instruction == "HGMMA" else instruction, "HGMMA.SP" if instruction == "HGMMA" else "no")
        named = [f"{name}.".startswith(f"{dense[0]}.") and not name.startswith(dense[1]) for name, _ in found]
        assert gate.holds(code, instruction).tolist() == named, instruction
    assert not one.instruction or gate.holds(code, one.instruction).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "architecture"), one_of_each(), ids=lambda it: it if isinstance(it, str) else it.function
)
def test_a_kernel_without_a_stack_has_no_local_memory(one, architecture):
    cubin = build.compile(one, architecture, folder=gate.CUBINS)
    usage = printed("cuobjdump", "--dump-resource-usage", str(cubin.path))
    found = re.search(rf"Function {one.function}:\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert [int(it) for it in found.groups()] == [cubin.registers, cubin.stack_bytes, 0]


def printed(tool, *arguments):
    """What a tool of CUDA's prints."""
    spec = importlib.util.find_spec("nvidia")
    paths = [path for root in spec.submodule_search_locations for path in Path(root).glob(f"*/bin/{tool}")]
    if not paths:
        pytest.skip(f"needs nvidia-cuda-{tool}")
    return subprocess.run([paths[0], *arguments], capture_output=True, text=True, check=True).stdout


COUNT = Launch(variant("scratch.cu", "count", ("sm_80",)), (1, 1, 1), (32, 1, 1), 0, (), scratch_bytes=4)


def counting_case(count):
    arguments = (Operand.SCRATCH, Operand.OUT, Operand.BIAS, np.int32(True))
    launch = Launch(COUNT.variant, COUNT.grid, COUNT.block, 0, arguments, scratch_bytes=4)
    out = np.empty(1, np.float32)
    return mutations.Case([launch], np.zeros(1, np.float16), None, out, np.array([float(count)]), np.zeros(1))


def right_case():
    return counting_case(32)


def wrong_case():
    return counting_case(33)


def test_a_bug_that_no_seed_shows_survives():
    seen = mutations.Mutation("counts twice", right_case, ("1.0f", "2.0f"))
    nothing = mutations.Mutation("a comment", right_case, ("// Adds", "// adds"))
    assert mutations.survivors([seen, nothing]) == [nothing]


def test_a_case_that_is_wrong_by_itself_proves_nothing():
    with pytest.raises(ValueError, match="wrong_case is wrong without a planted bug"):
        mutations.survivors([mutations.Mutation("counts twice", wrong_case, ("1.0f", "2.0f"))])


def test_a_bug_that_does_not_compile_is_an_error_and_not_caught():
    with pytest.raises(emulator.CompilationError):
        mutations.survivors([mutations.Mutation("no code", right_case, ("1.0f", "no_such_name"))])
