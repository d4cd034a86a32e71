import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest

from sparse_kernels.formats import pack
from sparse_kernels.numba_cuda import library, plan
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
        plan.prepare(packed, "feature_major", 4)
