"""Layer norm of a converted model, with the addition before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from sparse_kernels.cpu.runtime import threads
from sparse_kernels.fx_graphs import ADDITIONS, called_once, changed, hooked, is_proxy, only_user, record_call
from sparse_kernels.tensors.plain_tensors import address_of, is_plain


class FastLayerNorm(nn.LayerNorm):
    """torch's layer norm over the last dimension, of x or of x + added; float32 on a CPU by our kernel."""

    @classmethod
    def of(cls, norm: nn.LayerNorm) -> FastLayerNorm:
        """Return the same norm, with the same parameters."""
        fast = cls(norm.normalized_shape, norm.eps, elementwise_affine=False)
        fast.elementwise_affine = norm.elementwise_affine
        fast.weight, fast.bias = norm.weight, norm.bias
        return fast.train(norm.training)

    def forward(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """Return the norm of x + added; added: of x's shape, or of one that goes with it."""
        if is_proxy(x):
            recorded: Tensor = record_call(self, x, {} if added is None else {"added": added})
            return recorded
        weights = [self.weight, self.bias]
        if not all(_is_ours(each) for each in (x, added, *weights) if each is not None) or not x.numel():
            return super().forward(x if added is None else x + added)
        if x.shape[-1:] != self.normalized_shape or (added is not None and added.shape != x.shape):
            return super().forward(x if added is None else x + added)
        from sparse_kernels.cpu.kernels.layer_norm import NormCall, normalize_rows

        threads.set_thread_count(torch.get_num_threads())
        count = x.shape[-1]
        x, added = x.contiguous(), None if added is None else added.contiguous()
        gain = torch.ones(count) if self.weight is None else self.weight.contiguous()
        shift = torch.zeros(count) if self.bias is None else self.bias.contiguous()
        y = torch.empty_like(x)
        addresses = [0 if each is None else address_of(each) for each in (x, added, gain, shift, y)]
        normalize_rows(NormCall(*addresses), x.numel() // count, count, self.eps)
        return y


def _is_ours(x: Tensor) -> bool:
    """Return whether our kernel may read a tensor by its address: float32 numbers on a CPU, without gradients."""
    plain = x.dtype is torch.float32 and x.is_cpu and x.layout is torch.strided and is_plain(x) and not x.is_neg()
    return plain and not (torch.is_grad_enabled() and x.requires_grad)


def swap_norms(traced: fx.GraphModule) -> None:
    """Let our kernel compute the layer norms of a graph over the last dimension, with additions before, in place."""
    modules = dict(traced.named_modules(remove_duplicate=False))
    touched = changed(traced, modules)
    for node in called_once(traced, modules, nn.LayerNorm):
        name, norm = str(node.target), modules[str(node.target)]
        alone = len(node.args) == 1 and isinstance(node.args[0], fx.Node) and not node.kwargs
        if type(norm) is not nn.LayerNorm or len(norm.normalized_shape) != 1 or hooked(norm) or not alone:
            continue
        traced.set_submodule(name, FastLayerNorm.of(norm))
        total: Any = node.args[0]
        adds = total.target in ADDITIONS and total.op != "call_module" and len(total.args) == 2 and not total.kwargs
        if not adds or only_user(total) is not node or not all(isinstance(part, fx.Node) for part in total.args):
            continue
        if not touched & set(total.args):  # the sum will be computed later
            x, added = total.args
            node.args, node.kwargs = (x,), {"added": added}
            traced.graph.erase_node(total)
