"""The kernels without a GPU: test_kernels.py in Numba's simulator, which must be chosen before Numba is imported."""

from pathlib import Path

import pytest
from pytest_again import run_pytest

TESTS = Path(__file__).with_name("test_kernels.py")


@pytest.mark.slow
@pytest.mark.parametrize("which", ["not slow", "slow"])
def test_kernels_hold_in_the_simulator(which):
    assert " passed" in run_pytest({"NUMBA_ENABLE_CUDASIM": "1"}, "-m", which, TESTS)
