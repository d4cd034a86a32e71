"""Hashes of calibration data: pruned layers and losses belong to the batches that they were found on."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from latbench.errors import UsageError
from search.user_code import call_user_code

VERSION = 5
"""Rises whenever the same model and data give other entries of the layer database than before."""


def hash_batches(task: str, batches: Sequence[Any]) -> str:
    """Return a hash of the batches of a task's calibration(), 16 hexadecimal digits. Raises UsageError."""
    digest = hashlib.sha256(f"{VERSION}".encode())
    for batch in batches:
        what = f"task {task}: hashing a batch of calibration()"
        call_user_code(
            what, partial(_update_digest, batch, digest.update), "; a batch holds tensors and plain values"
        )
    return digest.hexdigest()[:16]


def check_batches(task: str, batches: Sequence[Any], provenance: str) -> None:
    """Raise UsageError if the batches are not those of a database's provenance, `method hash`; empty: any are."""
    if provenance and hash_batches(task, batches) != provenance.rpartition(" ")[2]:
        raise UsageError(
            f"task {task}: calibration() returned other data than at an earlier call, so losses of profiles cannot "
            "be compared; return the same batches in every call and process, such as by a generator with a fixed seed"
        )


def _update_digest(value: Any, update: Callable[[bytes], None]) -> None:
    """Feed a batch to `update` by its content: pickles of tensors hold addresses."""
    if torch.is_tensor(value):
        array = value.detach().cpu().contiguous()
        update(f"{array.dtype} {tuple(array.shape)}".encode())
        update(array.view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key in value:
            _update_digest(key, update)
            _update_digest(value[key], update)
    elif isinstance(value, list | tuple):
        update(str(len(value)).encode())
        for item in value:
            _update_digest(item, update)
    else:
        content = io.BytesIO()
        _ContentPickler(content, update).dump(value)
        update(content.getvalue())


class _ContentPickler(pickle.Pickler):
    """Pickles an object, and feeds the tensors in it to `update`."""

    def __init__(self, file: io.BytesIO, update: Callable[[bytes], None]) -> None:
        super().__init__(file)
        self._update = update

    def persistent_id(self, value: Any) -> str | None:
        """Return what stands for a tensor; None for another value, which is pickled as usual."""
        if not torch.is_tensor(value):
            return None
        _update_digest(value, self._update)
        return "tensor"
