import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from sparse_kernels.formats import pack
from sparse_kernels.numba_cuda import library, numba_cuda_plan
from sparse_kernels.patterns import VectorWise
from sparse_kernels.registry import MissingLibrary


def test_a_missing_numba_cuda_is_said_even_where_numba_has_an_old_one(monkeypatch):
    find = importlib.util.find_spec
    spec = find("sparse_kernels.numba_cuda.library")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "numba_cuda" else find(name))
    with pytest.raises(MissingLibrary, match="pip install numba-cuda"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_a_machine_without_gpu_is_told_so(monkeypatch):
    monkeypatch.setattr(library, "cuda", SimpleNamespace(is_available=lambda: False))
    packed = pack(np.ones((8, 4), np.float32), None, VectorWise(8))
    with pytest.raises(library.NoDevice, match="no NVIDIA GPU"):
        numba_cuda_plan.prepare_numba_cuda_linear(packed, "feature_major", 4)


def test_kernels_compile_where_numpy_has_no_row_stack():
    # In a process of its own: what numba-cuda registers, it registers once. NVVM need not be there.
    code = """
import numpy as np
if hasattr(np, "row_stack"):
    del np.row_stack
from sparse_kernels.numba_cuda.library import cuda, float32
from numba.cuda.cudadrv.error import NvvmSupportError
def kernel(y):
    y[cuda.grid(1)] = 1
try:
    cuda.compile_ptx(kernel, (float32[::1],), cc=(9, 0))
except NvvmSupportError:
    pass
"""
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
