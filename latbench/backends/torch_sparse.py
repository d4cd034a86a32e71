"""torch's sparse products: 2:4 by cuSPARSELt and CUTLASS, BSR by its Triton kernel, CSR by cuSPARSE.

Kernels: `cusparselt` and `cutlass` multiply 2:4 weights, token-major as torch's own linear does it or feature-major;
`bsr` and `bsr_tuned` block-wise ones, with the parameters that torch chooses and the best found in a few seconds;
`csr` unstructured ones. What they refuse becomes Unsupported with their own words.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from latbench.backends import Unsupported
from latbench.backends.gpu import GpuEngine, copies, only
from latbench.backends.torch_gpu import activations, float64, on_device
from latbench.gpu_drivers import torch_driver
from latbench.gpu_layers import GpuLayer
from latbench.gpu_timing import Call
from latbench.plan import Point
from sparse_kernels.formats import BlockWeight, CSRWeight
from sparse_kernels.patterns import NM, BlockWise
from sparse_kernels.shapes import Conv2dShape

TUNE_SECONDS = 12.0  # the search of torch.sparse._triton_ops_meta takes half a minute and more
_TUNE_REPEATS = 10


def prepare(point: Point, layer: GpuLayer) -> GpuEngine:
    """The sparse linear layer in torch; Unsupported where torch has no kernel for it."""
    if isinstance(point.shape, Conv2dShape):
        raise Unsupported("torch has no sparse convolutions")
    if point.kernel not in _KERNELS:
        raise Unsupported(f"torch has no sparse kernel {point.kernel}: known are {', '.join(_KERNELS)}")
    build, weight_bytes = _KERNELS[point.kernel](point, layer)
    driver = torch_driver()
    calls = [build() for _ in range(copies(point, layer, weight_bytes, driver))]
    turned = point.layout == "token_major"
    kernel = f"torch.{point.kernel}.{point.layout}"
    return GpuEngine(kernel, weight_bytes, calls, driver, float64, lambda y: (y.T if turned else y).double())


Kernel = tuple[Callable[[], Call], int]
"""What builds a call on copies of its own, and the bytes of its weight."""


def _semi_structured(point: Point, layer: GpuLayer) -> Kernel:
    only(point, format="nm", layouts=("token_major", "feature_major"))
    if point.pattern != NM(2, 4):
        raise Unsupported(f"{point.kernel} multiplies 2:4 weights, not {point.pattern}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype, says torch
        from torch.sparse import SparseSemiStructuredTensorCUSPARSELT, SparseSemiStructuredTensorCUTLASS

    kinds: dict[str, Any] = {
        "cusparselt": SparseSemiStructuredTensorCUSPARSELT,
        "cutlass": SparseSemiStructuredTensorCUTLASS,
    }
    kind = kinds[point.kernel]

    def build() -> Call:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                weight = kind.from_dense(on_device(layer.weight, point.dtype))
            except (RuntimeError, NotImplementedError) as error:
                raise Unsupported(f"torch {point.kernel}: {error}") from error
        x = activations(point, layer)
        if point.layout == "token_major":
            return _in_inference(lambda: F.linear(x, weight))
        return _in_inference(lambda: torch.mm(weight, x))

    # Half of the values, and two bits for each: 9/16 of the dense weight.
    return build, 2 * layer.weight.size * 9 // 16


def _in_inference(run: Callable[[], torch.Tensor]) -> Call:
    def call() -> torch.Tensor:
        with torch.no_grad():
            return run()

    return call


def _bsr_weight(point: Point, layer: GpuLayer) -> tuple[Callable[[], torch.Tensor], int]:
    only(point, format="block", layouts=("feature_major",))
    pattern, packed = point.pattern, layer.packed
    assert isinstance(pattern, BlockWise) and isinstance(packed, BlockWeight)
    if point.shape.m % pattern.rows or point.shape.k % pattern.cols:
        raise Unsupported(f"torch's BSR needs whole blocks, and {pattern} does not divide {point.shape}")
    if point.shape.n % 16:
        raise Unsupported(f"torch's BSR kernel needs tokens in multiples of 16, not {point.shape.n}")

    def build() -> torch.Tensor:
        return torch.sparse_bsr_tensor(
            torch.from_numpy(packed.indptr).cuda(),
            torch.from_numpy(packed.indices).long().cuda(),
            on_device(packed.values, point.dtype),
            size=packed.shape,
        )

    return build, 2 * packed.values.size


def _bsr(point: Point, layer: GpuLayer) -> Kernel:
    weight, weight_bytes = _bsr_weight(point, layer)
    return lambda: _bsr_call(weight(), activations(point, layer), None), weight_bytes


def _bsr_tuned(point: Point, layer: GpuLayer) -> Kernel:
    weight, weight_bytes = _bsr_weight(point, layer)
    best = _tune(weight(), activations(point, layer))
    return lambda: _bsr_call(weight(), activations(point, layer), best), weight_bytes


def _bsr_call(weight: torch.Tensor, x: torch.Tensor, meta: dict[str, int] | None) -> Call:
    """The Triton kernel, with the parameters that torch chooses itself if `meta` is None."""
    try:
        from torch.sparse._triton_ops import bsr_dense_addmm
    except ImportError as error:
        raise Unsupported(f"torch's BSR kernel needs Triton: {error}") from error
    out = torch.empty(weight.shape[0], x.shape[1], dtype=x.dtype, device="cuda")
    return lambda: bsr_dense_addmm(out, weight, x, beta=0, out=out, meta=meta)


def _tune(weight: torch.Tensor, x: torch.Tensor) -> dict[str, int]:
    """Parameters of the Triton kernel by torch's own search, given a quick timing and TUNE_SECONDS.

    torch's wrapper of it, tune_bsr_dense_addmm, times every candidate for 0.6 s.
    """
    from torch.sparse._triton_ops_meta import minimize

    rows, n = weight.values().shape[-2], x.shape[1]
    start = {"GROUP_SIZE_ROW": 1, "SPLIT_N": max(n // rows, 1), "num_stages": 1, "num_warps": 4}
    end = time.monotonic() + TUNE_SECONDS

    def seconds(meta: dict[str, int]) -> float:
        return math.inf if time.monotonic() > end else _quick_seconds(_bsr_call(weight, x, meta))

    def step(name: str, value: int, direction: int, meta: dict[str, int], **_: object) -> int:
        return stepped(name, value, direction, n=n, rows=rows)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        best: dict[str, int] = minimize(seconds, start, start, step, max_step=1)[0]
    return best


def stepped(name: str, value: int, direction: int, *, n: int, rows: int) -> int:
    """The next value of a parameter up or down; the same where there is none. SPLIT_N divides n."""
    doubles = name in ("SPLIT_N", "num_warps")
    moved = (value * 2 if direction > 0 else value // 2) if doubles else value + direction
    moved = max(1, moved)
    if name == "SPLIT_N":
        moved = min(moved, max(n // rows, 1))
        return value if n % moved else moved
    return moved


def _quick_seconds(call: Call) -> float:
    driver = torch_driver()
    call()
    driver.flush()
    start = driver.mark()
    for _ in range(_TUNE_REPEATS):
        call()
    end = driver.mark()
    driver.wait()
    return driver.seconds(start, end) / _TUNE_REPEATS


def _csr(point: Point, layer: GpuLayer) -> Kernel:
    only(point, format="unstructured", layouts=("feature_major",))
    packed = layer.packed
    assert isinstance(packed, CSRWeight)

    def build() -> Call:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # in beta, says torch
            weight = torch.sparse_csr_tensor(
                torch.from_numpy(packed.indptr).int().cuda(),
                torch.from_numpy(packed.indices).cuda(),
                on_device(packed.values, point.dtype),
                size=packed.shape,
            )
        x = activations(point, layer)
        out = torch.zeros(packed.shape[0], x.shape[1], dtype=x.dtype, device="cuda")
        return lambda: torch.addmm(out, weight, x, beta=0, out=out)

    return build, 6 * packed.values.size


_KERNELS: dict[str, Callable[[Point, GpuLayer], Kernel]] = {
    "cusparselt": _semi_structured,
    "cutlass": _semi_structured,
    "bsr": _bsr,
    "bsr_tuned": _bsr_tuned,
    "csr": _csr,
}
