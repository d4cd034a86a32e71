"""Which function prepares which format, for which operation, on which backend; imported only when asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparse_kernels.plan_protocol import Plan

KERNELS = {
    ("dense", "linear", "reference"): "sparse_kernels.reference:prepare_reference_linear",
    ("unstructured", "linear", "reference"): "sparse_kernels.reference:prepare_reference_linear",
    ("nm", "linear", "reference"): "sparse_kernels.reference:prepare_reference_linear",
    ("block", "linear", "reference"): "sparse_kernels.reference:prepare_reference_linear",
    ("vector", "linear", "reference"): "sparse_kernels.reference:prepare_reference_linear",
    ("shflbw", "linear", "reference"): "sparse_kernels.reference:prepare_reference_linear",
    ("dense", "conv2d", "reference"): "sparse_kernels.reference:prepare_conv2d",
    ("unstructured", "conv2d", "reference"): "sparse_kernels.reference:prepare_conv2d",
    ("nm", "conv2d", "reference"): "sparse_kernels.reference:prepare_conv2d",
    ("block", "conv2d", "reference"): "sparse_kernels.reference:prepare_conv2d",
    ("vector", "conv2d", "reference"): "sparse_kernels.reference:prepare_conv2d",
    ("shflbw", "conv2d", "reference"): "sparse_kernels.reference:prepare_conv2d",
    ("int8", "linear", "reference"): "sparse_kernels.int8.int8_reference:prepare_int8_linear",
    ("int8-weights", "linear", "reference"): "sparse_kernels.int8.int8_reference:prepare_int8_weights",
    ("int8-weights", "linear", "numba"): "sparse_kernels.cpu.plans.linear:prepare_int8_weights",
    ("int8", "conv2d", "reference"): "sparse_kernels.int8.int8_reference:prepare_int8_conv2d",
    ("int8", "linear", "numba"): "sparse_kernels.cpu.plans.int8_linear:prepare_int8_linear",
    ("int8", "conv2d", "numba"): "sparse_kernels.cpu.plans.int8_conv2d:prepare_int8_conv2d",
    ("dense", "linear", "numba"): "sparse_kernels.cpu.plans.autotune:prepare_or_tune",
    ("unstructured", "linear", "numba"): "sparse_kernels.cpu.plans.autotune:prepare_or_tune",
    ("nm", "linear", "numba"): "sparse_kernels.cpu.plans.autotune:prepare_or_tune",
    ("block", "linear", "numba"): "sparse_kernels.cpu.plans.autotune:prepare_or_tune",
    ("vector", "linear", "numba"): "sparse_kernels.cpu.plans.autotune:prepare_or_tune",
    ("shflbw", "linear", "numba"): "sparse_kernels.cpu.plans.autotune:prepare_or_tune",
    ("dense", "conv2d", "numba"): "sparse_kernels.cpu.plans.conv2d:prepare_conv2d",
    ("unstructured", "conv2d", "numba"): "sparse_kernels.cpu.plans.conv2d:prepare_conv2d",
    ("nm", "conv2d", "numba"): "sparse_kernels.cpu.plans.conv2d:prepare_conv2d",
    ("block", "conv2d", "numba"): "sparse_kernels.cpu.plans.conv2d:prepare_conv2d",
    ("vector", "conv2d", "numba"): "sparse_kernels.cpu.plans.conv2d:prepare_conv2d",
    ("shflbw", "conv2d", "numba"): "sparse_kernels.cpu.plans.conv2d:prepare_conv2d",
    ("dense", "linear", "cupy"): "sparse_kernels.cuda.cuda_plan:prepare_cuda_linear",
    ("unstructured", "linear", "cupy"): "sparse_kernels.cuda.cuda_plan:prepare_cuda_linear",
    ("nm", "linear", "cupy"): "sparse_kernels.cuda.cuda_plan:prepare_cuda_linear",
    ("block", "linear", "cupy"): "sparse_kernels.cuda.cuda_plan:prepare_cuda_linear",
    ("vector", "linear", "cupy"): "sparse_kernels.cuda.cuda_plan:prepare_cuda_linear",
    ("shflbw", "linear", "cupy"): "sparse_kernels.cuda.cuda_plan:prepare_cuda_linear",
    ("dense", "conv2d", "cupy"): "sparse_kernels.cuda.cuda_plan:prepare_conv2d",
    ("block", "conv2d", "cupy"): "sparse_kernels.cuda.cuda_plan:prepare_conv2d",
    ("vector", "conv2d", "cupy"): "sparse_kernels.cuda.cuda_plan:prepare_conv2d",
    ("shflbw", "conv2d", "cupy"): "sparse_kernels.cuda.cuda_plan:prepare_conv2d",
    ("dense", "linear", "numba_cuda"): "sparse_kernels.numba_cuda.numba_cuda_plan:prepare_numba_cuda_linear",
    ("unstructured", "linear", "numba_cuda"): "sparse_kernels.numba_cuda.numba_cuda_plan:prepare_numba_cuda_linear",
    ("nm", "linear", "numba_cuda"): "sparse_kernels.numba_cuda.numba_cuda_plan:prepare_numba_cuda_linear",
    ("block", "linear", "numba_cuda"): "sparse_kernels.numba_cuda.numba_cuda_plan:prepare_numba_cuda_linear",
    ("vector", "linear", "numba_cuda"): "sparse_kernels.numba_cuda.numba_cuda_plan:prepare_numba_cuda_linear",
    ("shflbw", "linear", "numba_cuda"): "sparse_kernels.numba_cuda.numba_cuda_plan:prepare_numba_cuda_linear",
    ("dense", "conv2d", "numba_cuda"): "sparse_kernels.numba_cuda.numba_cuda_plan:prepare_conv2d",
    ("unstructured", "conv2d", "numba_cuda"): "sparse_kernels.numba_cuda.numba_cuda_plan:prepare_conv2d",
    ("nm", "conv2d", "numba_cuda"): "sparse_kernels.numba_cuda.numba_cuda_plan:prepare_conv2d",
    ("block", "conv2d", "numba_cuda"): "sparse_kernels.numba_cuda.numba_cuda_plan:prepare_conv2d",
    ("vector", "conv2d", "numba_cuda"): "sparse_kernels.numba_cuda.numba_cuda_plan:prepare_conv2d",
    ("shflbw", "conv2d", "numba_cuda"): "sparse_kernels.numba_cuda.numba_cuda_plan:prepare_conv2d",
}


class UnknownKernel(ValueError):
    """No kernel is registered for a format, operation and backend."""


class MissingLibrary(ImportError):
    """A backend needs a library that is not installed."""


class NoDevice(RuntimeError):
    """There is no GPU that a backend's kernels run on."""


def find_kernel(format: str, op: str, backend: str) -> Callable[..., Plan]:
    """Return the function that prepares a plan for `format` (of a pattern), `op` (linear, conv2d) and `backend`.

    Raises UnknownKernel, which lists what is known, and MissingLibrary, which says what to install.
    """
    target = KERNELS.get((format, op, backend))
    if target is None:
        backends = sorted({known[2] for known in KERNELS if known[:2] == (format, op)})
        if backends:
            raise UnknownKernel(f"no backend {backend!r} for {format} {op}: known are {', '.join(backends)}")
        known_pairs = ", ".join(sorted({f"{known[0]} {known[1]}" for known in KERNELS}))
        raise UnknownKernel(f"no kernel for {format} {op}: known are {known_pairs}")
    module, function = target.split(":")
    try:
        prepare: Callable[..., Plan] = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] == "sparse_kernels":
            raise
        raise MissingLibrary(
            f"backend {backend!r} needs {error.name}, which is not installed: pip install {error.name}"
        ) from error
    return prepare
