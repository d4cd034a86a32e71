"""Tokens between two sparse layers of a converted model, as the CPU kernels read them.

A sparse layer on a CPU lays its tokens out in tiles, multiplies, and puts the result back in torch's order. Where
only element-wise functions stand before the next sparse layer, both ways can be saved. Then `convert` asks the first
layer to keep its tiles, and wraps the functions in `OnTiles`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparse_kernels.cpu.codegen.cpu_target import find_cpu_target
from sparse_kernels.cpu.kernels import token_blocks
from sparse_kernels.cpu.kernels.transpose_tiles import count_tile_tokens
from sparse_kernels.fx_graphs import is_proxy, record_call


@dataclass(frozen=True)
class TokenTiles:
    """Tokens (*lead, features) in layout token_blocked: values (tiles, features, tokens of a tile).

    What is beyond the last token means nothing.
    """

    values: Tensor
    lead: torch.Size


class OnTiles(nn.Module):
    """An element-wise function or module that takes tiles as well."""

    def __init__(self, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.function, self.args, self.kwargs = function, args, kwargs

    def forward(self, x: Tensor | TokenTiles) -> Tensor | TokenTiles:
        """Return the function of x, in the form that x has."""
        if is_proxy(x):
            recorded: Tensor | TokenTiles = record_call(self, x, {})
            return recorded
        if isinstance(x, TokenTiles):
            return TokenTiles(self.function(x.values, *self.args, **self.kwargs), x.lead)
        return self.function(x, *self.args, **self.kwargs)


def tiles_shape(n: int, features: int) -> tuple[int, int, int]:
    """Return the shape of tiles that hold n tokens."""
    tokens = count_tile_tokens()
    return -(-n // tokens), features, tokens


def worthwhile(n: int) -> bool:
    """Return whether n tokens are so many that kernels lay them out block by block with torch's threads."""
    return token_blocks.fills_threads(n, find_cpu_target().lanes, torch.get_num_threads())
