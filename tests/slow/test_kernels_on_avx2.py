"""The CPU's kernels on a processor with AVX2 and without AVX-512; and with threads of another kind."""

from pathlib import Path

import pytest
from cpu_kernel_tests import OF_EACH_KIND, run_kernel_tests

from sparse_kernels.cpu.codegen.cpu_target import find_cpu_target

HASWELL = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+sse4.2,+avx,+avx2,+fma,+bmi,+bmi2,+popcnt"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(find_cpu_target().name not in ("avx2", "avx512"), reason="needs AVX2")
def test_kernels_hold_with_vectors_of_eight(tmp_path: Path) -> None:
    run_kernel_tests({**HASWELL, "NUMBA_CACHE_DIR": str(tmp_path)}, "-k", OF_EACH_KIND)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_kernels_hold_on_threads_of_another_kind() -> None:
    run_kernel_tests({"NUMBA_THREADING_LAYER": "workqueue"}, "-k", OF_EACH_KIND)  # the same machine code
