"""Run the quick tests of the CPU's kernels again, as they are on another processor or with other threads."""

from collections.abc import Mapping
from pathlib import Path

from pytest_again import run_pytest

TESTS = Path(__file__).parents[2]

# What takes long on another processor is to compile: of linear layers an odd pattern in all layouts, and one of each
# other kind of kernel in the plain ones.
OF_EACH_KIND = (
    "block:3x5 or (unstructured or shflbw:32 or vector:32) and (token_major or feature_major)"
    " or conv2d and not any_shape or attention_is_that_of or micro or plan_for_one and unstructured"
)
# Of processors that hardly anybody has left: that vectors of any width are right, not every use of them.
OF_EACH_WIDTH = (
    "nothing_is_dropped and (block:3x5 or unstructured) and (token_major or feature_major)"
    " or convolution_is_that_of_torch or attention_is_that_of or micro or int8_conv2d and exact_whole_numbers"
)


def run_kernel_tests(environment: Mapping[str, str], *chosen: str) -> None:
    """Run them, or those `chosen` of them, in a process with these variables; raise AssertionError if one fails."""
    others = ("test_third_linear", "test_third_conv2d", "test_autotune")
    every = (TESTS / "sparse_kernels/cpu").rglob("test_*.py")
    run_pytest(environment, "-m", "not slow", *chosen, *(path for path in every if path.stem not in others))
