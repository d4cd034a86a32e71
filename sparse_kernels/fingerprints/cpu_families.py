"""Eight digits that stand for a family of CPU kernels: they change with the code that Numba compiles for it.

A family is a file of kernels, in `cpu.kernels` or `cpu.matrix_unit`. What its kernels use of other files counts, and
so does what launches them. How a plan chooses among kernels does not: a measured row names the kernel that ran.
"""

from __future__ import annotations

import functools

from sparse_kernels.fingerprints.python_code import ROOT, fingerprint_code

FOLDERS = ("cpu.kernels", "cpu.matrix_unit")

UNRUN = (
    "sparse_kernels.cpu.launch.recording",
    "sparse_kernels.cpu.runtime.kernel_cache",
    "sparse_kernels.cpu.runtime.openmp_forks",
)
"""What writes down calls in place of running them, what keeps kernels on disk, and what runs at forks."""


@functools.cache
def fingerprint_cpu_family(family: str) -> str | None:
    """Return the fingerprint of a family, such as ``token_blocks``; None if there is none of that name (any more).

    Returns
    -------
    str or None
        Eight hexadecimal digits.
    """
    for folder in FOLDERS:
        if family.isidentifier() and (ROOT.joinpath(*folder.split(".")) / f"{family}.py").is_file():
            return fingerprint_code([f"{ROOT.name}.{folder}.{family}"], unrun=UNRUN)
    return None
