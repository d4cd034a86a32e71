"""SciPy: CSR for unstructured and N:M weights, BSR for block-wise ones, multiplied by its only thread.

It takes x feature-major: the transposition of x and of the result counts as time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy import sparse

from latbench.backends.cpu.compressed_weight import compress_weight
from latbench.backends.cpu.prepare_point import Engine, SyntheticLayer, count_copies
from latbench.backends.installed_engines import Unsupported
from latbench.workloads.points import Point
from sparse_kernels.formats import BlockWeight, CSRWeight


def prepare(point: Point, layer: SyntheticLayer) -> Engine:
    """Prepare the sparse linear layer in SciPy.

    Raises Unsupported for several threads, and as `compress_weight` does.
    """
    packed = compress_weight(point, layer)
    if point.threads != 1:
        raise Unsupported(f"scipy multiplies with one thread, not {point.threads}: measure it with --threads 1")
    weights = [_matrix(packed)]
    weight_bytes = sum(part.nbytes for part in (weights[0].data, weights[0].indices, weights[0].indptr))
    weights += [_matrix(packed) for _ in range(count_copies(weight_bytes) - 1)]
    kernel = "scipy.bsr" if isinstance(packed, BlockWeight) else "scipy.csr"
    return Engine(kernel, weight_bytes, [_call(weight, layer) for weight in weights])


def _matrix(packed: CSRWeight | BlockWeight) -> sparse.sparray:
    kind = sparse.bsr_array if isinstance(packed, BlockWeight) else sparse.csr_array
    # It multiplies by indices of 64 bits if either array of them has these.
    return kind((packed.values, packed.indices, packed.indptr.astype(np.int32)), packed.shape, copy=True)


def _call(weight: sparse.sparray, layer: SyntheticLayer) -> Callable[[], np.ndarray]:
    x, bias = layer.x, layer.bias

    def call() -> np.ndarray:
        y = np.ascontiguousarray((weight @ x.T).T)
        y += bias
        return y

    return call
