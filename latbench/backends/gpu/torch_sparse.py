"""torch's sparse products: 2:4 by cuSPARSELt and CUTLASS, BSR by its Triton kernel.

Kernels: `cusparselt` and `cutlass` multiply 2:4 weights as torch's own modules do, token-major or feature-major;
`cusparselt_tuned` feature-major ones by the algorithm that cuSPARSELt's own search finds. In fp8 and int8 both take x
(n, k) and leave y (m, n), the one order that cuSPARSELt has for bytes, without scales. `torchao` is torchao's CUTLASS
kernel in fp8, with a scale for each output feature and token. `bsr` and `bsr_tuned` multiply block-wise ones, with
the parameters that torch chooses and with the best of a few. What they refuse becomes Unsupported with their own
words. torch's CSR sums in half precision, which no result may: `backends.cusparse` asks the same library for sums in
float32.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F

from latbench.backends.gpu.gpu_layers import GpuLayer
from latbench.backends.gpu.low_precision_layers import EIGHT_BITS, EightBits
from latbench.backends.gpu.prepare_gpu_point import GpuEngine, check_format, count_gpu_copies
from latbench.backends.gpu.torch_gpu import build_activations, convert_to_float64, copy_to_device
from latbench.backends.gpu.torch_low_precision import place, place_bytes
from latbench.backends.installed_engines import Unsupported
from latbench.base.engine_registry import FP8
from latbench.timing.fastest_candidate import find_fastest, time_briefly
from latbench.timing.gpu_drivers import open_torch_driver
from latbench.timing.gpu_events import Call
from latbench.workloads.points import Point
from sparse_kernels.formats import BlockWeight
from sparse_kernels.patterns import NM, BlockWise
from sparse_kernels.shapes import Conv2dShape

TUNE_SECONDS = 12.0  # most of them go into compiling; torch's own search takes half a minute and more


def prepare(point: Point, layer: GpuLayer) -> GpuEngine:
    """Prepare the sparse linear layer in torch. Raises Unsupported where torch has no kernel for it."""
    if isinstance(point.shape, Conv2dShape):
        raise Unsupported("torch has no sparse convolutions")
    if point.kernel not in _KERNELS:
        raise Unsupported(f"torch has no sparse kernel {point.kernel}: known are {', '.join(_KERNELS)}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that these are prototypes, in beta, not tuned
        build, weight_bytes = _KERNELS[point.kernel](point, layer)
        driver = open_torch_driver()
        calls = [build() for _ in range(count_gpu_copies(point, layer, weight_bytes, driver))]
    # cuSPARSELt turns bytes: y (m, n) of x (n, k).
    turned = point.layout == "token_major" and not _is_in_bytes(point)
    kernel = f"torch.{point.kernel}.{point.layout}"
    return GpuEngine(
        kernel, weight_bytes, calls, driver, convert_to_float64, lambda y: (y.T if turned else y).double(),
        scales=_find_scales(point, layer),
    )  # fmt: skip


Kernel = tuple[Callable[[], Call], int]
"""What builds a call on copies of its own, and the bytes of its weight."""

TORCHAO = "torchao"


def _is_in_bytes(point: Point) -> bool:
    return point.dtype_w in EIGHT_BITS and point.kernel != TORCHAO


def _find_scales(point: Point, layer: GpuLayer) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the scales that a kernel applies to a layer in eight bits; cuSPARSELt is given none."""
    if point.kernel != TORCHAO or not isinstance(layer.quantised, EightBits):
        return None
    return layer.quantised.weight_scales, layer.quantised.x_scales


# 2:4 --------------------------------------------------------------------------------------------------------------


def _semi_structured(point: Point, layer: GpuLayer) -> Kernel:
    """Multiply as torch's modules do: y lies in the order of memory that torch returns, perhaps after a copy."""
    if _is_in_bytes(point):
        return _cusparselt_bytes(point, layer)
    weight, x, weight_bytes = _two_of_four(point, layer)
    from torch.sparse import SparseSemiStructuredTensorCUSPARSELT, SparseSemiStructuredTensorCUTLASS

    kinds: dict[str, Any] = {
        "cusparselt": SparseSemiStructuredTensorCUSPARSELT,
        "cutlass": SparseSemiStructuredTensorCUTLASS,
    }

    def build() -> Call:
        packed, own_x = kinds[point.kernel].from_dense(weight), x.clone()
        if point.layout == "token_major":
            return _in_inference(lambda: F.linear(own_x, packed))
        return _in_inference(lambda: torch.mm(packed, own_x))

    _try(point, lambda: build()())
    return build, weight_bytes


def _cusparselt_tuned(point: Point, layer: GpuLayer) -> Kernel:
    """Call cuSPARSELt directly: y (m, n) lies row by row, with no copy after it.

    Feature-major only: for token-major products its search ends in an internal error that breaks the CUDA context (an
    H200, torch 2.11, every shape).
    """
    if _is_in_bytes(point):
        return _cusparselt_bytes(point, layer)
    check_format(point, format="nm", layouts=("feature_major",))
    weight, x, weight_bytes = _two_of_four(point, layer)

    def search() -> tuple[int, int, int]:
        # torch._cslt_sparse_mm_search finds the same, but keeps the splits of k that belong to it to itself.
        find = torch._C._cusparselt.mm_search  # type: ignore[attr-defined]
        algorithm, splits, mode, _ = find(torch._cslt_compress(weight), x, None, None, None, False)
        return algorithm, splits, mode

    best = _try(point, search)

    def build() -> Call:
        packed, own_x = torch._cslt_compress(weight), x.clone()
        return _in_inference(lambda: torch._cslt_sparse_mm(packed, own_x, None, None, None, False, *best))

    return build, weight_bytes


def _cusparselt_bytes(point: Point, layer: GpuLayer) -> Kernel:
    """Multiply bytes by cuSPARSELt's default algorithm, or by the one that its search finds."""
    _check_two_of_four(point, ("token_major",))
    weight, x = place_bytes(layer, point.dtype_w)
    out = getattr(torch, point.dtype)

    def search() -> tuple[int, int, int]:
        find = torch._C._cusparselt.mm_search  # type: ignore[attr-defined]
        algorithm, splits, mode, _ = find(torch._cslt_compress(weight), x.t(), None, None, out, False)
        return algorithm, splits, mode

    best = _try(point, search) if point.kernel == "cusparselt_tuned" else ()

    def build() -> Call:
        packed, own_x = torch._cslt_compress(weight), x.clone()
        return _in_inference(lambda: torch._cslt_sparse_mm(packed, own_x.t(), None, None, out, False, *best))

    _try(point, lambda: build()())
    # Half of the values, and two bits for each: 10/16 of the dense weight.
    return build, layer.weight.size * 10 // 16


def _torchao(point: Point, layer: GpuLayer) -> Kernel:
    """Multiply fp8 by the CUTLASS kernel of torchao, where it is installed."""
    _check_two_of_four(point, ("token_major",))
    if point.dtype_w != FP8 or not isinstance(layer.quantised, EightBits):
        raise Unsupported(f"torchao's 2:4 kernel multiplies fp8, not {point.dtype_w}")
    try:
        operators: Any = importlib.import_module("torchao.ops")
    except ImportError as error:
        raise Unsupported(f"torchao's 2:4 kernel needs torchao: pip install torchao ({error})") from error
    weight, x = place_bytes(layer, FP8)
    weight_scales, x_scales = place(layer.quantised.weight_scales), place(layer.quantised.x_scales)

    def build() -> Call:
        packed, meta = operators.to_sparse_semi_structured_cutlass_sm9x_f8(weight)
        own_x = x.clone()
        return _in_inference(
            lambda: operators.rowwise_scaled_linear_sparse_cutlass_f8f8(
                own_x, x_scales, packed, meta, weight_scales, out_dtype=torch.bfloat16
            )
        )

    _try(point, lambda: build()())
    return build, layer.weight.size * 10 // 16 + 4 * weight_scales.numel()


def _check_two_of_four(point: Point, layouts: Sequence[str]) -> None:
    """Raise Unsupported unless a point has 2:4 weights and one of these layouts."""
    check_format(point, format="nm", layouts=layouts)
    if point.pattern != NM(2, 4):
        raise Unsupported(f"{point.kernel} multiplies 2:4 weights, not {point.pattern}")


def _two_of_four(point: Point, layer: GpuLayer) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the dense weight and x on the device, and the bytes of the compressed weight."""
    _check_two_of_four(point, ("token_major", "feature_major"))
    # Half of the values, and two bits for each: 9/16 of the dense weight.
    return copy_to_device(layer.weight, point.dtype), build_activations(point, layer), 2 * layer.weight.size * 9 // 16


Result = TypeVar("Result")


def _try(point: Point, run: Callable[[], Result]) -> Result:
    """Return what `run` returns. Raises Unsupported with torch's words where it refuses.

    Some libraries refuse a GPU only when they multiply, not when they compress.
    """
    try:
        with torch.no_grad():
            return run()
    except torch.OutOfMemoryError:  # says nothing of what torch supports, and is tried again
        raise
    except (RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
        raise Unsupported(f"torch {point.kernel}: {error}") from error


def _in_inference(run: Callable[[], torch.Tensor]) -> Call:
    def call() -> torch.Tensor:
        with torch.no_grad():
            return run()

    return call


# Block-wise -------------------------------------------------------------------------------------------------------

Meta = dict[str, int]
"""Parameters of torch's Triton kernel."""


def _bsr_weight(point: Point, layer: GpuLayer) -> tuple[torch.Tensor, int]:
    check_format(point, format="block", layouts=("feature_major",))
    pattern, packed = point.pattern, layer.packed
    assert isinstance(pattern, BlockWise) and isinstance(packed, BlockWeight)
    if point.shape.m % pattern.rows or point.shape.k % pattern.cols:
        raise Unsupported(f"torch's BSR needs whole blocks, and {pattern} does not divide {point.shape}")
    if point.shape.n % 16:
        raise Unsupported(f"torch's BSR kernel needs tokens in multiples of 16, not {point.shape.n}")
    values = copy_to_device(packed.values, point.dtype)  # first: it makes the driver's stream the current one
    weight = torch.sparse_bsr_tensor(
        torch.from_numpy(packed.indptr).cuda(),
        torch.from_numpy(packed.indices).long().cuda(),
        values,
        size=packed.shape,
    )
    return weight, 2 * packed.values.size


def _bsr(point: Point, layer: GpuLayer) -> Kernel:
    weight, weight_bytes = _bsr_weight(point, layer)
    x = build_activations(point, layer)
    return lambda: _bsr_call(weight.clone(), x.clone(), None), weight_bytes


def _bsr_tuned(point: Point, layer: GpuLayer) -> Kernel:
    weight, weight_bytes = _bsr_weight(point, layer)
    x = build_activations(point, layer)
    candidates = list_parameters(weight.values().shape[-2], x.shape[1])
    driver = open_torch_driver()
    best = find_fastest(candidates, lambda meta: time_briefly(_bsr_call(weight, x, meta), driver), limit=TUNE_SECONDS)
    return lambda: _bsr_call(weight.clone(), x.clone(), best), weight_bytes


def _bsr_call(weight: torch.Tensor, x: torch.Tensor, meta: Meta | None) -> Call:
    """Return a call of the Triton kernel, with torch's own choice of parameters if `meta` is None."""
    try:
        from torch.sparse._triton_ops import bsr_dense_addmm
    except ImportError as error:
        raise Unsupported(f"torch's BSR kernel needs Triton: {error}") from error
    out = torch.empty(weight.shape[0], x.shape[1], dtype=x.dtype, device="cuda")
    return lambda: bsr_dense_addmm(out, weight, x, beta=0, out=out, meta=meta)


def list_parameters(rows: int, n: int) -> list[Meta | None]:
    """List parameters worth trying for blocks of `rows` rows and n tokens; first None, torch's own choice.

    A program multiplies a row of blocks by n // SPLIT_N tokens, which must be a power of two.
    """
    found: list[Meta | None] = [None]
    for tokens in (64, 128, 256):
        for stages, warps in ((2, 4), (4, 4), (3, 8)):
            if n % tokens == 0 and rows * tokens <= 2**15:  # more sums than registers hold
                found.append({"SPLIT_N": n // tokens, "GROUP_SIZE_ROW": 4, "num_stages": stages, "num_warps": warps})
    return found


_KERNELS: dict[str, Callable[[Point, GpuLayer], Kernel]] = {
    "cusparselt": _semi_structured,
    "cusparselt_tuned": _cusparselt_tuned,
    "cutlass": _semi_structured,
    TORCHAO: _torchao,
    "bsr": _bsr,
    "bsr_tuned": _bsr_tuned,
}
