"""Run tests again in a process of its own, where Numba was told something else before it was imported."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def run_pytest(environment: Mapping[str, str], *arguments: str | Path) -> str:
    """Run pytest with these variables; return what it printed, or raise AssertionError if a test failed.

    The test that calls has the time limit: kernels that are compiled anew take longer than those in a cache.
    """
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "--timeout=0", *map(str, arguments)],
        env={**os.environ, **environment}, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    return result.stdout
