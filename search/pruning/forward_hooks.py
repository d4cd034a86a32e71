"""Forward hooks by layer name, which are removed in any case."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Hook = Callable[[nn.Module, tuple[Any, ...], Any], None]


@contextmanager
def register_forward_hooks(model: nn.Module, hooks: Mapping[str, Hook]) -> Iterator[None]:
    """Call `hooks[name](module, inputs, output)` after each call of that layer while the context is open.

    Torch's transformer layers then compute as in training. Their fast path skips the layers, or passes nested
    tensors.
    """
    modules = dict(model.named_modules())

    def call_hook(hook: Hook, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        hook(module, (*args, *kwargs.values()), output)

    handles = [
        modules[name].register_forward_hook(partial(call_hook, hook), with_kwargs=True)
        for name, hook in hooks.items()
    ]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for handle in handles:
            handle.remove()


def get_product(output: Any) -> Tensor:
    """Return the product with the weight from a layer's output; some subclasses return it first in a tuple."""
    product: Tensor = output[0] if isinstance(output, tuple) else output
    return product
