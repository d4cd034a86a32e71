"""Objects of exported kernels: compiled once for each kernel, types and CPU level, then read from disk."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sparse_kernels.cpu.export.cpu_levels import list_host_levels
from sparse_kernels.cpu.export.kernel_objects import KernelObject, compile_kernel
from sparse_kernels.cpu.launch.parallel_kernel import ParallelKernel, build_parallel_kernel

if not list_host_levels():
    pytest.skip("no CPU level for which kernels are compiled ahead of time", allow_module_level=True)


def build_adding(constant: int) -> ParallelKernel:
    @build_parallel_kernel
    def add_constant(part: int, x: Any, parts: int) -> None:
        x[part] += constant

    return add_constant


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that are compiled from now on, with an empty cache."""
    monkeypatch.setenv("LATBENCH_CACHE", str(tmp_path / "cache"))
    found: list[str] = []
    compile_parts = ParallelKernel.compile_parts

    def noted(kernel: ParallelKernel, given: Any) -> Any:
        found.append(kernel.name)
        return compile_parts(kernel, given)

    monkeypatch.setattr(ParallelKernel, "compile_parts", noted)
    return found


def get(constant: int, level: int = 0, dtype: Any = np.float32) -> KernelObject:
    step: Any = SimpleNamespace(kernel=build_adding(constant), given=[np.zeros(3, dtype), 3])
    return compile_kernel(step, list_host_levels()[level])


def test_each_kernel_type_and_level_is_compiled_once(compiled: list[str]) -> None:
    seen = {get(1).content, get(2).content, get(1, dtype=np.float64).content}
    assert len(seen) == len(compiled) == 3
    assert {get(1).content, get(2).content, get(1, dtype=np.float64).content} == seen
    if len(list_host_levels()) > 1:
        assert get(1, level=1).symbols != get(1).symbols and len(compiled) == 4


def test_a_damaged_object_is_compiled_anew(compiled: list[str], tmp_path: Path) -> None:
    get(5)
    for path in (tmp_path / "cache" / "kernels").glob("*.nbc"):
        path.write_bytes(path.read_bytes()[:-1])
    again = get(5)
    assert len(compiled) == 2
    assert get(5) == again and len(compiled) == 2


def test_a_disk_that_takes_nothing_costs_a_compilation(compiled: list[str], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="compiled kernels cannot be kept"):
        get(7)
    assert len(compiled) == 1
