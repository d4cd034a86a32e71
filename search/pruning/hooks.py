"""Forward hooks by layer name, removed whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

Hook = Callable[[nn.Module, tuple[Any, ...], Any], None]


@contextmanager
def forward_hooks(model: nn.Module, hooks: Mapping[str, Hook]) -> Iterator[None]:
    """While the context is open, call `hooks[name](module, inputs, output)` after each call of that layer."""
    modules = dict(model.named_modules())
    handles = [modules[name].register_forward_hook(hook) for name, hook in hooks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
