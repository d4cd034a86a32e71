"""Tied tensors in safetensors files: stored once, under the first of their names.

The metadata maps each other name to the stored one, as `safetensors.torch.save_model` does. So its `load_model`, and
`from_pretrained` of transformers, read such a file into a model whose weights are tied.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor


def find_tied(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Return {name: first name of the same tensor} for every other name of a tensor. Views are other tensors."""
    first: dict[tuple[object, ...], str] = {}
    found = {}
    for name, tensor in state.items():
        if tensor.numel():  # tensors without elements have no address
            place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if (kept := first.setdefault(place, name)) != name:
                found[name] = kept
    return found


def separate_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return each tensor once and with memory of its own, as safetensors needs; only views are copied."""
    tied = find_tied(state)
    found: dict[str, Tensor] = {}
    used: set[int] = set()
    for name, tensor in state.items():
        if name not in tied:
            address = tensor.untyped_storage().data_ptr()
            found[name] = (tensor.clone() if address in used else tensor).detach().contiguous()
            used.add(address)
    return found


def read_state(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors in a file by all of their names, and {name: first name} of the tied ones.

    Raises SafetensorError or OSError for a file that cannot be read.
    """
    with safe_open(path, "pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a file is no mapping
        tied = {name: kept for name, kept in (file.metadata() or {}).items() if kept in state and name not in state}
    return {**state, **{name: state[kept] for name, kept in tied.items()}}, tied
