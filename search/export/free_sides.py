"""Which sides of a model's inputs may have other sizes: the batch, and the tokens behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from search.export.export_steps import spread_batches

BATCH, TOKENS = 0, 1


def try_other_sizes(model: Callable[..., Any], tensors: Sequence[Tensor]) -> dict[int, list[Tensor]]:
    """Return inputs of another size for each axis, BATCH and TOKENS, along which the model takes such."""
    found = {}
    for axis in (BATCH, TOKENS):
        changed = change_axis(tensors, axis)
        if changed is None:
            continue
        try:
            with torch.no_grad():
                model(*(each.clone() for each in changed))
        except Exception:  # noqa: BLE001 - the user's model may raise anything
            continue
        found[axis] = changed
    return found


def change_axis(tensors: Sequence[Tensor], axis: int) -> list[Tensor] | None:
    """Return the inputs with one more in the batch, or with half of the tokens; None where that cannot be."""
    along = list_along(tensors, axis)
    if not any(along):
        return None
    if axis == BATCH:
        return spread_batches(tensors, [len(tensors[along.index(True)])])[-1]
    half = tensors[along.index(True)].shape[axis] // 2
    if not half:
        return None
    return [
        each.narrow(axis, 0, half).contiguous() if has else each for each, has in zip(tensors, along, strict=True)
    ]


def list_along(tensors: Sequence[Tensor], axis: int) -> list[bool]:
    """Return for each tensor whether it has this axis, of the size that the first has which does.

    Images have no tokens.
    """
    has = [each.ndim > axis and (axis == BATCH or each.ndim <= 3) for each in tensors]
    if True not in has:
        return has
    size = tensors[has.index(True)].shape[axis]
    return [yes and each.shape[axis] == size for each, yes in zip(tensors, has, strict=True)]
