"""Run the quick tests of the CPU's kernels again, as they are on another processor or with other threads."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

TESTS = Path(__file__).parents[2]

# What takes long on another processor is to compile: of linear layers an odd pattern in all layouts, and one of each
# other kind of kernel in the plain ones.
OF_EACH_KIND = (
    "block:3x5 or (unstructured or shflbw:32 or vector:32) and (token_major or feature_major)"
    " or conv2d and not any_shape or attention_is_that_of or micro or plan_for_one and unstructured"
)


def run_kernel_tests(environment: Mapping[str, str], *chosen: str) -> None:
    """Run them, or those `chosen` of them, in a process with these variables; raise AssertionError if one fails."""
    others = ("test_amx_linear", "test_amx_conv2d", "test_autotune")
    every = (TESTS / "sparse_kernels/cpu").rglob("test_*.py")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", *chosen,
         *(str(path) for path in every if path.stem not in others)],
        env={**os.environ, **environment}, cwd=TESTS.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-3000:]
