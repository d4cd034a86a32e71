"""Count the multiply-adds of a model, and where they are done: every matrix product and convolution of torch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, shape_wrapper

_ATEN = torch.ops.aten


class Product(NamedTuple):
    """Where a product is done.

    module: the path of the innermost module that is running. weight: that of the module with the parameter that is a
    factor; None for a product of activations.
    """

    module: str
    weight: str | None


def count_multiply_adds(model: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[Product, float]:
    """Return the multiply-adds of one call, by place."""
    owners = {
        parameter.untyped_storage().data_ptr(): name
        for name, module in reversed(list(model.named_modules()))
        for parameter in module._parameters.values()
        if parameter is not None
    }
    counter = _Counter(owners)
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: counter.running.append(name)))
        handles.append(module.register_forward_hook(lambda *_: counter.leave()))
    try:
        with torch.no_grad(), counter:
            model(*args, **keywords)
    finally:
        for handle in handles:
            handle.remove()
    return {product: flop / 2 for product, flop in counter.flop.items()}


class _Counter(TorchDispatchMode):
    """Adds up FLOP by product; owners: the module of a parameter, by the address of its memory."""

    def __init__(self, owners: Mapping[int, str]) -> None:
        super().__init__()
        self.owners = owners
        self.running: list[str] = []
        self.flop: dict[Product, float] = defaultdict(float)

    def leave(self) -> None:
        """Note that a module is done."""
        self.running.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if (formula := _FORMULAS.get(func._overloadpacket)) is not None:
            factors = [each for each in args if isinstance(each, Tensor) and each.ndim > 1]
            found = [self.owners.get(each.untyped_storage().data_ptr()) for each in factors]
            product = Product(self.running[-1], next((owner for owner in found if owner is not None), None))
            self.flop[product] += formula(*args, **kwargs, out_val=result)
        return result


def _count_attention(q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Return the FLOP of softmax(q @ k.T) @ v, from shapes (..., tokens, features)."""
    return 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


def _count_grouped(a: Any, b: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Return the FLOP of a product in which each row of a meets one of the matrices b (experts, k, m)."""
    return 2 * math.prod(a) * int(b[-1])


# torch counts attention on GPUs alone, and no products of experts.
_FORMULAS = {
    **flop_registry,
    _ATEN._scaled_dot_product_flash_attention_for_cpu: shape_wrapper(_count_attention),
    _ATEN._grouped_mm: shape_wrapper(_count_grouped),
}
