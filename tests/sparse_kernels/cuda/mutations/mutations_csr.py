"""A whole-number layer for the CSR kernel, and bugs to plant in it, each of which must be caught."""

from __future__ import annotations

import functools

import numpy as np
from mutations import Case, Mutation
from mutations_nm import exact_case, pruned, whole_numbers

from sparse_kernels.cuda import csr
from sparse_kernels.patterns import Unstructured


def case_of(
    rng: np.random.Generator, size: tuple[int, int, int], dtype: str = "float16", *, sparsity: float = 0.7
) -> Case:
    """A layer of size (m, k, n)."""
    m, k, n = size
    packed, weight = pruned(rng, Unstructured(), whole_numbers(rng, (m, k), 100), sparsity)
    launches = csr.build_program(packed, dtype, "sm_80", n).launches(n, None)
    return exact_case(launches, weight, whole_numbers(rng, (k, n), 4), whole_numbers(rng, m, 1000), dtype)


@functools.cache
def aligned() -> Case:
    """Rows and strips that do not come out even."""
    return case_of(np.random.default_rng(1), (37, 90, 136))


MUTATIONS = [
    Mutation(bug, aligned, edit)
    for bug, edit in {
        "rows left in sorted order": ("static_cast<u64>(row) * n", "static_cast<u64>(sorted_row) * n"),
        "bias in sorted order": ("bias[row]", "bias[sorted_row]"),
        "last element lost": ("i < end; ++i", "i + 1 < end; ++i"),
        "rows past the last": ("if (sorted_row >= m || column >= n) return;", "if (column >= n) return;"),
        "columns past the last": ("if (sorted_row >= m || column >= n) return;", "if (sorted_row >= m) return;"),
        "the lane's columns of x and out differ": ("x += column;", "x += column ^ VECTOR;"),
        "strips overlap": ("blockIdx.x / row_blocks * STRIP", "blockIdx.x / row_blocks * (STRIP / 2)"),
        "x's first row for all": ("static_cast<u64>(element.x) * n", "static_cast<u64>(0) * n"),
        "bias dropped": ("sums[c] += shift;", ";"),
    }.items()
]
