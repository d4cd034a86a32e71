"""The CPU's kernels on the least processor that runs 64-bit x86: vectors of four, no fused multiply-adds."""

import platform
from pathlib import Path

import pytest
from cpu_kernel_tests import OF_EACH_WIDTH, run_kernel_tests


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86 only")
def test_kernels_hold_without_wide_vectors(tmp_path: Path) -> None:
    run_kernel_tests({"NUMBA_CPU_NAME": "generic", "NUMBA_CACHE_DIR": str(tmp_path)}, "-k", OF_EACH_WIDTH)
