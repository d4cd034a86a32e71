"""Eight digits that stand for the Numba kernels of a format on a GPU: they change with the compiled code."""

from __future__ import annotations

import functools

from sparse_kernels.fingerprints.python_code import ROOT, fingerprint_code

MODULES = {
    "dense": "dense", "vector": "vector", "shflbw": "vector", "vectornm": "vector", "block": "block", "nm": "nm",
    "unstructured": "csr",
}  # fmt: skip
"""The file of each format's kernels, in `sparse_kernels.numba_cuda`."""

# Every call is launched by the plan, which names the files of all formats: of it its own code alone counts.
_TRANSPOSES, _LAUNCHES = "transpose", "numba_cuda_plan"


@functools.cache
def fingerprint_module(module: str) -> str:
    """Return the fingerprint of the kernels in a file of `sparse_kernels.numba_cuda` (``vector``, without ``.py``).

    Returns
    -------
    str
        Eight hexadecimal digits.
    """
    names = {name: f"{ROOT.name}.numba_cuda.{name}" for name in (module, _TRANSPOSES, _LAUNCHES)}
    return fingerprint_code([names[module], names[_TRANSPOSES]], alone=[names[_LAUNCHES]])
