"""Tell tensors that kernels may read by address from all others.

A kernel reads and writes memory behind torch's back. That is right only for a tensor that is nothing but numbers in
memory, while nobody watches what is done with it. A fake or batched tensor has no numbers of its own. A tracer, such
as `torch.jit.trace`, `torch.export` or `make_fx`, would see the input and the result and nothing in between: it would
take the result for a constant. Everything that fails `is_plain` goes through torch's dispatcher, by the operators of
`nn.layer_operators`, which tracers see.

This module alone relies on private functions of torch. `tests/sparse_kernels/tensors/test_plain_tensors.py` says
what broke when a new torch comes:

- `torch._C._dispatch_isTensorSubclassLike`: subclasses, wrapped tensors, and modes of the dispatcher at work
- `torch._C._get_tracing_state`: `torch.jit.trace` at work
- `torch._C._len_torch_function_stack`: modes that watch torch's functions
- `torch.autograd.forward_ad._current_level`: forward-mode derivatives at work
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

_PLAIN_TYPES = (Tensor, nn.Parameter)

_is_compiled = torch.compiler.is_dynamo_compiling
_is_wrapped = torch._C._dispatch_isTensorSubclassLike
_find_jit_trace = torch._C._get_tracing_state
_count_function_modes = torch._C._len_torch_function_stack


def is_plain(x: Any) -> bool:
    """Return whether x is a tensor of numbers in memory that nobody watches: not while torch traces or compiles.

    True says nothing about its layout: sparse, nested and oneDNN tensors have no address, see `address_of`.
    """
    return (
        type(x) in _PLAIN_TYPES
        and not _is_compiled()
        and not _is_wrapped(x)
        and _find_jit_trace() is None
        and forward_ad._current_level < 0
        and not _count_function_modes()
    )


def has_tangent(x: Tensor) -> bool:
    """Return whether a tensor carries a forward-mode derivative."""
    if torch.compiler.is_dynamo_compiling() or forward_ad._current_level < 0:
        return False
    return forward_ad.unpack_dual(x).tangent is not None


def address_of(x: Tensor) -> int:
    """Return the address of a tensor's numbers; raise TypeError for one that has none."""
    try:
        address = x.data_ptr() if type(x) in _PLAIN_TYPES else 0
    except RuntimeError:  # torch's word for a tensor without storage
        address = 0
    if not address:
        raise TypeError(
            "a sparse layer computes with numbers: this tensor, or one made here, has none (fake or wrapped)"
        )
    return address
