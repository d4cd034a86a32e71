"""Fixed work of a GPU's reference worker: its ceilings, and its pace during a sweep.

torch does the products, our kernels the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import cupy
import numpy as np
import torch

from latbench.backends.gpu.low_precision_layers import EIGHT_BITS
from latbench.base.engine_registry import BFLOAT16, FP8, INT8
from latbench.timing import gpu_ceilings
from latbench.timing.gpu_ceiling_kernels import FixedWork, build_multiply_adds, build_reads
from latbench.timing.gpu_ceilings import CeilingWork, GpuCeilings, build_call_timer, measure_gpu_ceilings
from latbench.timing.gpu_drivers import open_cupy_driver, open_torch_driver
from latbench.timing.gpu_events import Call, EventTimer
from sparse_kernels.cuda.machine import CupyMachine
from sparse_kernels.cuda.program import Operand

_FIRST = {BFLOAT16: (8, 0), INT8: (8, 0), FP8: (8, 9)}  # compute capability with which torch multiplies it


def measure_ceilings() -> GpuCeilings:
    """Measure the ceilings of this process's GPU. Raises where it or a library refuses."""
    return measure_gpu_ceilings(GpuWorks(max(gpu_ceilings.WORKING_SETS)))


def build_product() -> EventTimer:
    """Build a dense product, which is bound by the tensor cores."""
    return build_call_timer(GpuWorks(0).pace_product())


def build_sum() -> EventTimer:
    """Build reads of more than the L2 cache holds."""
    return build_call_timer(GpuWorks(gpu_ceilings.PACE_BYTES).reads(gpu_ceilings.PACE_BYTES))


class GpuWorks:
    """See CeilingWorks; `size` is the largest working set that is read, in bytes."""

    def __init__(self, size: int) -> None:
        self._machine = CupyMachine.current()
        self._driver = open_cupy_driver()
        self._words = cupy.ones(size // 4, cupy.uint32)

    def products(self, dtype: str) -> Iterator[CeilingWork]:
        """Yield products in both orders of the right operand, for which libraries have different kernels."""
        if torch.cuda.get_device_capability() < _FIRST.get(dtype, (0, 0)):
            return
        if dtype in EIGHT_BITS:
            if (call := _build_byte_product(dtype)) is not None:
                yield CeilingWork(2.0 * gpu_ceilings.PRODUCT_SIZE**3, call, open_torch_driver())
            return
        driver = open_torch_driver()
        size = gpu_ceilings.PRODUCT_SIZE
        left, right, out = (torch.zeros(size, size, dtype=getattr(torch, dtype), device="cuda") for _ in range(3))
        for operand in (right, right.T):
            yield CeilingWork(2.0 * size**3, lambda operand=operand: torch.mm(left, operand, out=out), driver)  # type: ignore[misc]

    def pace_product(self) -> CeilingWork:
        """See Works."""
        driver = open_torch_driver()
        size = gpu_ceilings.PACE_SIZE
        left, right, out = (torch.zeros(size, size, dtype=torch.float16, device="cuda") for _ in range(3))
        return CeilingWork(2.0 * size**3, lambda: torch.mm(left, right, out=out), driver)

    def multiply_adds(self) -> CeilingWork:
        """See Works."""
        return self._work(build_multiply_adds(self._machine.multiprocessors))

    def reads(self, size: int) -> CeilingWork:
        """See Works."""
        return self._work(build_reads(size, self._machine.multiprocessors))

    def _work(self, fixed: FixedWork) -> CeilingWork:
        """Return a launch whose result is right. Raises RuntimeError where it is wrong."""
        driver, results = open_cupy_driver(), cupy.empty(fixed.threads, fixed.dtype)
        kernel = self._machine.kernel(fixed.launch.variant, fixed.launch.shared_bytes)
        arrays = {Operand.X: self._words, Operand.OUT: results}
        arguments = tuple(
            np.uint64(arrays[it].data.ptr) if isinstance(it, Operand) else it for it in fixed.launch.arguments
        )

        def call() -> Any:
            kernel(fixed.launch.grid, fixed.launch.block, arguments)  # type: ignore[arg-type]
            return results

        call()
        driver.wait()
        if not bool((results == fixed.result).all()):
            raise RuntimeError(f"{fixed.launch.variant.name} left {results[0]} behind, not {fixed.result:g}")
        return CeilingWork(fixed.done, call, driver)


def _build_byte_product(dtype: str) -> Call | None:
    """Return a product of zeros in the one order of operands that all tensor cores take for bytes.

    None where torch refuses it: then the sweep has no points of this type either.
    """
    open_torch_driver()
    size = gpu_ceilings.PRODUCT_SIZE
    left, right = (torch.zeros(size, size, dtype=torch.int8, device="cuda") for _ in range(2))
    if dtype == INT8:
        call: Call = functools.partial(torch._int_mm, left, right.t())
    else:
        left, right = (each.view(torch.float8_e4m3fn) for each in (left, right))
        one = torch.ones((), device="cuda")
        call = functools.partial(
            torch._scaled_mm, left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    try:
        call()
    except (RuntimeError, NotImplementedError):
        return None
    return call
