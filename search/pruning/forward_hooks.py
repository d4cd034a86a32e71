"""Forward hooks by layer name, removed whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Hook = Callable[[nn.Module, tuple[Any, ...], Any], None]


@contextmanager
def forward_hooks(model: nn.Module, hooks: Mapping[str, Hook]) -> Iterator[None]:
    """While the context is open, call `hooks[name](module, inputs, output)` after each call of that layer.

    Transformer layers of torch then compute as they do in training: their fast path calls no layer, or with nested
    tensors.
    """
    modules = dict(model.named_modules())

    def called(hook: Hook, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        hook(module, (*args, *kwargs.values()), output)

    handles = [
        modules[name].register_forward_hook(partial(called, hook), with_kwargs=True) for name, hook in hooks.items()
    ]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for handle in handles:
            handle.remove()


def product_of(output: Any) -> Tensor:
    """What a layer made with its weight: of a tuple, as some subclasses return, the first."""
    product: Tensor = output[0] if isinstance(output, tuple) else output
    return product
