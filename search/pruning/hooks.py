"""Forward hooks by layer name, removed whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

Hook = Callable[[nn.Module, tuple[Any, ...], Any], None]


@contextmanager
def forward_hooks(model: nn.Module, hooks: Mapping[str, Hook]) -> Iterator[None]:
    """While the context is open, call `hooks[name](module, inputs, output)` after each call of that layer."""
    modules = dict(model.named_modules())

    def called(hook: Hook, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        hook(module, (*args, *kwargs.values()), output)

    handles = [
        modules[name].register_forward_hook(partial(called, hook), with_kwargs=True) for name, hook in hooks.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
