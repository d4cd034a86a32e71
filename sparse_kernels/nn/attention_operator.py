"""Attention without a mask, at the speed of the sparse layers around it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_kernels.cpu.runtime import threads
from sparse_kernels.nn.sparse_layer import UNROUNDED
from sparse_kernels.tensors.plain_tensors import address_of, is_plain


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, may_round: bool = False) -> Tensor:
    """softmax(q @ k.T * scale) @ v for q (batch, heads, n, d), k and v (batch, heads, keys, d); by default 1/sqrt(d).

    What stands in a converted model where torch.nn.functional.scaled_dot_product_attention stood, without a mask:
    float32 on a CPU by `cpu.kernels.attention`, at the speed of the sparse layers around it; anything else by torch
    itself. The result lies in memory as (batch, n, heads, d), ready to be made one row a token. may_round: to eight
    bits, where that is faster.
    """
    all_three = q, k, v
    ours = all(
        isinstance(t, Tensor) and t.ndim == 4 and t.dtype is torch.float32 and t.is_cpu and t.numel()
        for t in all_three
    )
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in all_three)
    if not ours or needs_grad or not _fit(q.shape, k.shape, v.shape):
        return F.scaled_dot_product_attention(q, k, v, scale=scale)
    return (_attend if all(map(is_plain, all_three)) else attend)(q, k, v, scale, may_round)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None, may_round: bool) -> Tensor:
    from sparse_kernels.cpu.kernels.attention import run

    # A single element may have any stride: torch calls that contiguous, and `contiguous` would leave it.
    form = torch.contiguous_format
    q, k, v = [t if t.stride(-1) == 1 else t.clone(memory_format=form) for t in map(Tensor.resolve_neg, (q, k, v))]
    (batch, heads, n, d), keys, e = q.shape, k.shape[2], v.shape[3]
    y = q.new_empty(batch, n, heads, e)
    threads.set_thread_count(torch.get_num_threads())
    out = address_of(y), n * heads * e, e, heads * e
    run(_place(q), _place(k), _place(v), out, (batch, heads, n, d, keys, e), scale, may_round and not UNROUNDED.get())
    return y.transpose(1, 2)


def _place(x: Tensor) -> tuple[int, int, int, int]:
    batch, head, token, _ = x.stride()
    return address_of(x), batch, head, token


def _fit(q: torch.Size, k: torch.Size, v: torch.Size) -> bool:
    return q[:2] == k[:2] == v[:2] and q[3] == k[3] and k[2] == v[2]


@torch.library.custom_op("sparse_kernels::attention", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None, may_round: bool) -> Tensor:
    """`attention` as an operator, for all that traces, exports, compiles or transforms a model."""
    return _attend(q, k, v, scale, may_round)


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float | None, may_round: bool) -> Tensor:
    batch, heads, n, _ = q.shape
    return q.new_empty(batch, n, heads, v.shape[-1]).transpose(1, 2)


@attend.register_vmap
def _(
    info: Any, in_dims: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None, may_round: bool
) -> tuple[Tensor, int | None]:
    batched = [
        each.movedim(at, 0) if at is not None else each.expand(info.batch_size, *each.shape)
        for each, at in zip((q, k, v), in_dims, strict=False)
    ]
    y = attend(*(each.flatten(0, 1) for each in batched), scale, may_round)
    return y.unflatten(0, batched[0].shape[:2]), 0
