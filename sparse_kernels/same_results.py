"""Compare the results of two models, whatever they are: tensors in tuples, dictionaries, dataclasses, caches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

# How far results may lie apart, of their own size: a norm folded into a layer moves a few roundings, and kernels that
# add in another order move some in every layer.
FOLDED, CONVERTED = 1e-4, 1e-2
CHOSEN = 0.05  # of the whole numbers in a result, such as classes chosen, that roundings may change

_Seen = set[tuple[int, int]]


def same_results(a: Any, b: Any, tolerance: float) -> bool:
    """Return whether results agree but for roundings.

    Objects without an equality of their own, such as caches of keys and values, agree if all that they hold does.

    Parameters
    ----------
    a, b : object
        What two models returned.
    tolerance : float
        Relative to each number; a tenth of it counts relative to the largest number of the tensor. Up to FOLDED, what
        cannot be compared counts as different, and a list is no tuple, nor a dict one of a class of its own.
    """
    return _same(a, b, tolerance, set())


def _same(a: Any, b: Any, tolerance: float, seen: _Seen) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _same_tensors(a, b, tolerance)
    if isinstance(a, tuple | list | Mapping) and tolerance <= FOLDED and type(a) is not type(b):
        return False
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(_same(x, y, tolerance, seen) for x, y in zip(a, b, strict=True))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key], tolerance, seen) for key in a)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.dtype.kind in "biuf" and b.dtype.kind in "biuf":
        return _same_tensors(torch.from_numpy(a), torch.from_numpy(b), tolerance)
    if isinstance(a, float) and isinstance(b, float):
        return _same_tensors(torch.tensor(a), torch.tensor(b), tolerance)
    if type(a) is not type(b):
        return False
    if dataclasses.is_dataclass(a) or not _has_equality(type(a)):
        return _same_attributes(a, b, tolerance, seen)
    try:
        return bool(a == b)
    except Exception:  # noqa: BLE001 - foreign types may compare in any way
        return tolerance > FOLDED


def _has_equality(kind: type) -> bool:
    """Return whether a class says when its objects are equal."""
    return any("__eq__" in vars(each) for each in kind.__mro__ if each is not object)


def _same_tensors(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_complex():
        return _same_tensors(torch.view_as_real(a), torch.view_as_real(b), tolerance)
    if not a.is_floating_point():  # what is counted or chosen may hang on a rounding, but little of it
        return torch.equal(a, b) or (tolerance > FOLDED and float((a != b).float().mean()) <= CHOSEN)
    relative = max(tolerance, 32 * torch.finfo(a.dtype).eps)
    finite = b[torch.isfinite(b)]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=relative, atol=relative / 10 * largest, equal_nan=True)


def _same_attributes(a: Any, b: Any, tolerance: float, seen: _Seen) -> bool:
    """Return whether two objects of one class hold the same. A module or a pair that was met before is not opened."""
    if a is b or isinstance(a, nn.Module) or (id(a), id(b)) in seen:
        return True
    seen.add((id(a), id(b)))
    held, other = _list_attributes(a), _list_attributes(b)
    if not held:
        return tolerance > FOLDED
    return held.keys() == other.keys() and all(_same(held[name], other[name], tolerance, seen) for name in held)


def _list_attributes(it: Any) -> dict[str, Any]:
    """Return the attributes of an object by name, those in slots too."""
    slots = [name for kind in type(it).__mro__ for name in getattr(kind, "__slots__", ())]
    return {name: getattr(it, name) for name in slots if hasattr(it, name)} | dict(getattr(it, "__dict__", {}))
