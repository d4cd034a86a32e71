"""Sparse layers for torch models: replacements of a pruned Linear, Conv1d or Conv2d, for inference.

    y = SparseLinear.from_dense(linear, VectorWise(32), mask, activation="relu")(x)     # x (..., k) -> y (..., m)

A layer keeps its packed weight as buffers, so state_dict, deepcopy and pickling work as for any module. It makes a
plan at the first call. It drops the plan when the module is moved, cast or loaded, but not when a buffer is written
to. The plan may hold the weights once more, in the order its kernel reads them.

Backends `numba` and `reference` take float32 tensors on a CPU. Backend `cupy` takes float16 and bfloat16 tensors on a
CUDA GPU. Its kernels read and write feature-major, so a result is a transposed view. A layer copies nothing if its
input is such a view, from another sparse layer or through element-wise operations; it transposes other inputs first.
Work goes to torch's current stream. Call a layer once with inputs of the same shape before a CUDA graph captures it.
Capture again after its weights have changed, because a graph keeps the plan that it captured.

On a CPU a layer keeps a plan for small and one for large batches, or one for each of the latest image sizes. A
SparseLinear with tune=True (backend `numba`) tries a few kernels at its first call, see `cpu.plans.autotune`. It
tries again for about twice or half as many tokens. A process that has called layers may fork, and its children may
call them (`cpu.runtime.threads`).

Whatever watches torch's operators sees a layer as one of them (`nn.layer_operators`): `torch.compile`,
`torch.export`, `torch.jit.trace`, `make_fx`, vmap. What they make holds the packed weight, and needs
`import sparse_kernels.nn` in the process that runs it. `torch.fx.symbolic_trace` sees a layer as a module.
`torch.jit.script` and the exporters to ONNX are refused in a sentence.
"""

from sparse_kernels.nn.attention_operator import attention
from sparse_kernels.nn.sparse_conv import SparseConv1d, SparseConv2d
from sparse_kernels.nn.sparse_layer import PackedWeight, SparseLayer
from sparse_kernels.nn.sparse_linear import SparseLinear

__all__ = ["PackedWeight", "SparseConv1d", "SparseConv2d", "SparseLayer", "SparseLinear", "attention"]
