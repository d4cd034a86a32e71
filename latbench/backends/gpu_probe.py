"""Before the first point: does each engine really reach the GPU? Runs in the process that will time the engine.

An engine that is installed may still be of no use: built without CUDA, for a newer driver, without a library that it
opens late, or without a kernel for this GPU. Each is asked for a small result here. What it says then is one sentence
for the user, instead of an error in every row.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from latbench.backends.on_gpu import BACKENDS
from latbench.machines import cuda_libraries as libraries

SIZE = 32  # rows and columns of what is multiplied: its products are exact in every arithmetic


@dataclass(frozen=True)
class Probed:
    """What a process found.

    Attributes
    ----------
    refusals
        Why an engine cannot be used, by backend; without those that can.
    libraries
        The versions of the libraries that the process has loaded.
    architecture
        What our CUDA kernels are compiled for; None where they are not among its engines.
    """

    refusals: dict[str, str]
    libraries: dict[str, str | None]
    architecture: str | None = None


def probe(names: Sequence[str]) -> Probed:
    """Ask each of these backends for a small result on the GPU; all that they load stays loaded."""
    refusals: dict[str, str] = {}
    architecture: str | None = None
    for name in names:
        try:
            importlib.import_module(BACKENDS[name].module)
            architecture = _PROBES[name]() or architecture
        except Exception as error:  # noqa: BLE001 - what libraries raise has no base class in common
            refusals[name] = sentence(error)
    return Probed(refusals, libraries.versions(), architecture)


def load(modules: Sequence[str]) -> None:
    """Import modules and start CUDA, so that the first request need not wait for it."""
    for module in modules:
        importlib.import_module(module)
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.synchronize()
    elif "cupy" in sys.modules:
        sys.modules["cupy"].cuda.Device().synchronize()


def sentence(error: BaseException) -> str:
    """What an exception says, in one line: which library is missing, or its first paragraph."""
    if (missing := libraries.not_loaded(str(error))) is not None:
        return missing
    paragraph = str(error).strip().split("\n\n")[0]
    text = " ".join(paragraph.split())
    return text if text else type(error).__name__


class Refused(Exception):
    """An engine that is installed and of no use here; the message is for the user."""


def _torch() -> None:
    import torch

    if torch.version.cuda is None:
        raise Refused(
            f"torch {torch.__version__} is built without CUDA: install a CUDA build, as pytorch.org/get-started says"
        )
    ones = torch.ones(SIZE, SIZE, dtype=torch.float16, device="cuda")
    _check("torch", float(torch.mm(ones, ones).double().sum()))


def _torch_sparse() -> None:
    _torch()


def _cupy_product() -> None:
    """The product in float64 that checks results, and one in float16; both are cuBLAS's."""
    import cupy

    for dtype in (cupy.float16, cupy.float64):
        ones = cupy.ones((SIZE, SIZE), dtype)
        _check("CuPy", float(cupy.matmul(ones, ones).astype(cupy.float64).sum()))


def _cusparse() -> None:
    _cupy_product()
    from cupy.cuda.device import get_cusparse_handle

    get_cusparse_handle()


def _our_kernels() -> str:
    from sparse_kernels.cuda import build
    from sparse_kernels.cuda.machine import CupyMachine

    machine = CupyMachine.current()
    build.find_nvrtc(machine.architecture, machine.newest)
    _cupy_product()
    return machine.architecture


def _numba() -> None:
    from sparse_kernels.numba_cuda.library import cuda, require_device

    require_device()
    there = cuda.to_device(np.ones(SIZE, np.float32))
    _check("numba-cuda", SIZE**2 * float(there.copy_to_host().sum()))
    _cupy_product()  # its results are checked by CuPy


def _check(name: str, total: float) -> None:
    if total != SIZE**3:
        raise Refused(f"{name} computes a wrong sum on this GPU: {total:g}, not {SIZE**3}")


_PROBES: dict[str, Callable[[], str | None]] = {
    "torch_gpu": _torch,
    "torch_sparse": _torch_sparse,
    "cublas": _cupy_product,
    "cusparse": _cusparse,
    "cupy": _our_kernels,
    "numba_cuda": _numba,
}
