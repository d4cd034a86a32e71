"""numba.cuda, or a sentence about what is missing: the package when a kernel is asked for, a GPU when one is run."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numba
import numpy as np

from sparse_kernels.registry import MissingLibrary, NoDevice

__all__ = ["NoDevice", "cuda", "float32", "int32", "require_device"]

# Numba still ships an old numba.cuda of its own, which would be imported without numba-cuda: look for the package.
if importlib.util.find_spec("numba_cuda") is None:
    raise MissingLibrary("backend 'numba_cuda' needs numba-cuda, which is not installed: pip install numba-cuda")

# When it first compiles, numba-cuda registers np.row_stack, at least up to 0.30.4, the newest when this was written.
# NumPy 2.5 has removed that other name of np.vstack, so that no kernel would compile. Remove this with the first
# numba-cuda that supports NumPy 2.5.
if not hasattr(np, "row_stack"):
    np.row_stack = np.vstack  # noqa: NPY201

float32, int32 = numba.float32, numba.int32

cuda: Any = importlib.import_module("numba.cuda")  # without types, because kernels are no ordinary Python

# A small layer fills no GPU. That is no mistake, so do not warn at every call.
config: Any = importlib.import_module("numba.cuda.core.config")
config.CUDA_LOW_OCCUPANCY_WARNINGS = 0


def require_device() -> None:
    """Raise NoDevice where no kernel can run; the simulator of numba.cuda counts as a GPU."""
    if not cuda.is_available():
        raise NoDevice("backend 'numba_cuda' found no NVIDIA GPU that it can use: see what nvidia-smi says")
