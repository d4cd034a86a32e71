"""torch on a CPU, sparse: CSR for unstructured and N:M weights, BSR for square blocks, multiplied by MKL.

F.linear with a sparse weight makes MKL multiply columns one after the other, which takes several times as long as
weight @ x^T. So this module uses that product. The transposition of the result to token-major order counts as time.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch

from latbench.backends.cpu.compressed_weight import compress_weight
from latbench.backends.cpu.prepare_point import Engine, SyntheticLayer, count_copies
from latbench.backends.cpu.torch import Run, wrap_inference
from latbench.backends.installed_engines import Unsupported
from latbench.workloads.points import Point
from sparse_kernels.formats import BlockWeight, CSRWeight


def prepare(point: Point, layer: SyntheticLayer) -> Engine:
    """Prepare the sparse linear layer in torch.

    Raises Unsupported without MKL, and as MKL or `compress_weight` do.
    """
    packed = compress_weight(point, layer)
    if not torch.backends.mkl.is_available():
        raise Unsupported("torch multiplies sparse matrices by MKL, and this build of torch has none")
    if isinstance(packed, BlockWeight) and packed.pattern.rows != packed.pattern.cols:
        raise Unsupported(f"MKL, by which torch multiplies blocks, takes square ones, not {packed.pattern}")
    torch.set_num_threads(point.threads)
    x, bias = torch.from_numpy(layer.x), torch.from_numpy(layer.bias)[:, None]
    weight_bytes = packed.values.nbytes + packed.indices.nbytes + packed.indptr.nbytes // 2
    calls = [wrap_inference(_linear(_matrix(packed), bias), x) for _ in range(count_copies(weight_bytes))]
    kernel = "torch_sparse_cpu.bsr" if isinstance(packed, BlockWeight) else "torch_sparse_cpu.csr"
    return Engine(kernel, weight_bytes, calls, torch.Tensor.numpy)


def _matrix(packed: CSRWeight | BlockWeight) -> torch.Tensor:
    build = torch.sparse_bsr_tensor if isinstance(packed, BlockWeight) else torch.sparse_csr_tensor
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that CSR tensors are in beta
        return build(
            torch.from_numpy(packed.indptr.astype(np.int32)),  # as MKL takes them: others are converted in every call
            torch.from_numpy(packed.indices.copy()),
            torch.from_numpy(packed.values.copy()),
            size=packed.shape,
        )


def _linear(weight: torch.Tensor, bias: torch.Tensor) -> Run:
    """Return the product that maps x (n, k) to y (n, m), row by row, with weight (m, k) and bias (m, 1)."""
    return lambda x: torch.addmm(bias, weight, x.t()).t().contiguous()
