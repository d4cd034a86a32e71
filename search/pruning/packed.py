"""A pruned model in one small file: the bits of each mask, and the weights that are kept.

    packed.safetensors
        <layer>.weight.values (nnz,)      the kept weights, row after row of the matrix (m, k)
        <layer>.weight.mask (bytes,)      numpy.packbits of the mask (m, k), True = kept
        everything else                   as in model.safetensors
        metadata                          {layer: pattern} of the profile's layers; format "pt"

At a sparsity s it takes 1 - s + 1/32 of the dense bytes. It is read without the folder that it was written from.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from latbench.errors import BadData, EnvironmentUnusable
from latbench.files import write_atomically
from search import profile as profiles
from search.pruning.folder import PACKED, read_masks
from sparse_kernels.convert import LayerPattern
from sparse_kernels.nn import as_matrix, as_weight
from sparse_kernels.patterns import parse


def write_packed(folder: Path) -> Path:
    """Write `packed.safetensors` into the folder of a pruned model, which is whole; returns its path.

    Raises EnvironmentUnusable when the disk refuses.
    """
    masks = read_masks(folder)
    pruned = {_weight_of(layer): mask for layer, mask in masks.items()}
    layers = profiles.load(folder / "profile.json").layers
    tensors = {}
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - a file is no mapping
            tensor = file.get_tensor(name)
            if name in pruned:
                tensors[f"{name}.values"] = as_matrix(tensor)[torch.from_numpy(pruned[name])]
                tensors[f"{name}.mask"] = torch.from_numpy(np.packbits(pruned[name]))
            else:
                tensors[name] = tensor
    metadata = {"format": "pt", **{_weight_of(layer): choice.pattern for layer, choice in layers.items()}}
    path = folder / PACKED
    try:
        write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata=metadata))
    except SafetensorError as error:
        raise EnvironmentUnusable(f"cannot write {path}: {error}") from error
    return path


def load_packed(path: Path, model: nn.Module) -> tuple[nn.Module, dict[str, LayerPattern]]:
    """Put the weights in a packed file into `model`, in place; returns it and {layer: pattern} as `load_pruned` does.

    Raises BadData when the file is missing or damaged, or is one of another model.
    """
    own = model.state_dict()
    choices: dict[str, LayerPattern] = {}
    try:
        with safe_open(path, "pt") as file:
            names, patterns = set(file.keys()), dict(file.metadata() or {})
            patterns.pop("format", None)
            wanted = [[name] if name in names else [f"{name}.values", f"{name}.mask"] for name in own]
            if {name for parts in wanted for name in parts} != names:
                raise BadData(f"{path}: not the packed weights of this model")
            for name, tensor in own.items():
                if name in names:
                    stored = file.get_tensor(name)
                else:
                    stored = torch.zeros_like(as_matrix(tensor))
                    bits = file.get_tensor(f"{name}.mask").numpy()
                    mask = np.unpackbits(bits, count=stored.numel()).astype(bool).reshape(stored.shape)
                    stored[torch.from_numpy(mask)] = file.get_tensor(f"{name}.values")
                    stored = as_weight(stored, tensor.shape)
                    choices[_layer_of(name)] = LayerPattern(parse(patterns[name]), mask)
                if stored.shape != tensor.shape:
                    raise BadData(f"{path}: not the packed weights of this model: {name} is {tuple(stored.shape)}")
                tensor.copy_(stored)
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        first = " ".join(str(error).split())[:200]
        raise BadData(f"{path}: not the packed weights of a model ({first})") from None
    return model.eval(), {_layer_of(name): LayerPattern(parse(spec)) for name, spec in patterns.items()} | choices


def _weight_of(layer: str) -> str:
    return f"{layer}.weight" if layer else "weight"


def _layer_of(weight: str) -> str:
    return weight.removesuffix("weight").removesuffix(".")
