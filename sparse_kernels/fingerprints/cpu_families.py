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
    "sparse_kernels.cpu.runtime.kernel_cache.cache_on_disk",
    "sparse_kernels.cpu.runtime.openmp_forks",
)
"""What writes down calls in place of running them, what keeps kernels on disk, and what runs at forks."""

LINEAR_CALL = "sparse_kernels.cpu.launch.linear_call"
"""What every call of a linear layer runs through, compiled too: no kernel names it."""

OF_IMAGES = ("image_layout", "quad_images", "max_pooling", "third_conv2d", "byte_conv2d")
"""Families that linear layers do not run."""


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
            called = [] if family in OF_IMAGES else [LINEAR_CALL]
            return fingerprint_code([f"{ROOT.name}.{folder}.{family}", *called], unrun=UNRUN)
    return None
