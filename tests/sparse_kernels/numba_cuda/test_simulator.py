"""The kernels without a GPU: test_kernels.py in Numba's simulator, which must be chosen before Numba is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).with_name("test_kernels.py")


@pytest.mark.slow
@pytest.mark.parametrize("which", ["not slow", "slow"])
def test_kernels_hold_in_the_simulator(which):
    command = [sys.executable, "-m", "pytest", "-q", "-m", which, str(TESTS)]
    result = subprocess.run(
        command,
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
