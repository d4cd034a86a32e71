"""One small file of a pruned model: the bits of each mask, and the kept weights.

    packed.safetensors
        <layer>.weight.values (nnz,)      the kept weights, row after row of the matrix (m, k); int8 in eight bits
        <layer>.weight.mask (m, k/8)      numpy.packbits of each row of the mask (m, k), True = kept
        <layer>.weight.scales (m,)        in eight bits what 1 of each row is worth, float32
        all other tensors                 as in model.safetensors
        metadata                          {weight: pattern precision} of the profile's layers, in eight bits with
                                          "scale,zero" of their inputs; tied: JSON of {name: stored name} of tied
                                          tensors; format "pt"; sha256 of all this

At a sparsity s it takes 1 - s + 1/32 of the dense bytes. In eight bits it is (1 - s) / 4 + 1/32. It is read without
its folder: its own checksum tells whether it is undamaged. The folder's manifest has the SHA-256 of the whole file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from latbench.base.files import hash_file, remove_left_behind, write_atomically
from latbench.errors import BadData, EnvironmentUnusable
from search.artifacts.layer_database import hash_tensors
from search.artifacts.profile import LayerChoice, read_profile
from search.pruning.storage.model_folder import (
    PACKED,
    build_layer_pattern,
    get_range,
    read_manifest,
    read_masks,
    read_quantizations,
    write_manifest,
)
from search.pruning.storage.tied_tensors import read_state, separate_tensors
from sparse_kernels.convert import LayerPattern
from sparse_kernels.formats.int8 import Quantization, format_range, parse_range
from sparse_kernels.prunable_layers import as_matrix, as_weight, to_matrix

_TIED = "tied"
ADVICE = "copy it again, or write it anew with `latbench prune --packed`"


def save_packed(folder: Path) -> Path:
    """Save `packed.safetensors` into the folder of a pruned model, and add its bytes and SHA-256 to the manifest.

    Parameters
    ----------
    folder : Path
        Folder of a complete pruned model.

    Returns
    -------
    Path
        The packed file.

    Raises
    ------
    BadData
        The folder is no complete pruned model.
    EnvironmentUnusable
        The disk refuses the write.
    """
    manifest = read_manifest(folder)
    masks, quantizations = read_masks(folder), read_quantizations(folder)
    layers = read_profile(folder / "profile.json").layers
    state, tied = read_state(folder / "model.safetensors")
    pruned = {_get_weight_name(layer): mask for layer, mask in masks.items()}
    scales = {_get_weight_name(layer): torch.from_numpy(each.scales) for layer, each in quantizations.items()}
    changed = pruned.keys() | scales.keys()
    tied = {name: kept for name, kept in tied.items() if not changed & {name, kept}}
    tensors = {}
    for name, tensor in state.items():
        if name in pruned or name in scales:
            matrix = to_matrix(tensor, manifest["layers"][_get_layer_name(name)].get("transposed", False))
            mask = pruned.get(name, np.ones(matrix.shape, bool))
            if name in scales:
                matrix = (matrix.float() / scales[name][:, None]).round().to(torch.int8)
                tensors[f"{name}.scales"] = scales[name]
            tensors[f"{name}.values"] = matrix[torch.from_numpy(mask)]
            tensors[f"{name}.mask"] = torch.from_numpy(np.packbits(mask, axis=1))
        elif name not in tied:
            tensors[name] = tensor
    tensors = separate_tensors(tensors)
    patterns = {
        _get_weight_name(layer): _format_kind(choice, quantizations.get(layer)) for layer, choice in layers.items()
    }
    patterns |= {_TIED: json.dumps(tied)} if tied else {}
    metadata = {"format": "pt", "sha256": _compute_checksum(tensors.items(), patterns), **patterns}
    path = folder / PACKED
    for name in (PACKED, "manifest.json"):
        remove_left_behind(folder, name)
    try:
        write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata=metadata))
    except SafetensorError as error:
        raise EnvironmentUnusable(f"cannot write {path}: {error}") from error
    write_manifest(folder, {**manifest, "packed": {"bytes": path.stat().st_size, "sha256": hash_file(path)}})
    return path


def load_packed(path: Path, model: nn.Module) -> tuple[nn.Module, dict[str, LayerPattern]]:
    """Load the weights of a packed file into the model, in place.

    Parameters
    ----------
    path : Path
        The packed file.
    model : Module
        The task's dense model. It stays unchanged if the file does not fit it.

    Returns
    -------
    model : Module
        The same model, in eval mode.
    choices : dict of str to LayerPattern
        Pattern of every layer of the profile, as `load_pruned` returns them.

    Raises
    ------
    BadData
        The file is missing or damaged, or is one of another model.
    """
    path = Path(path)
    damaged = BadData(f"{path}: not as it was written: {ADVICE}")
    if path.is_file() and not _is_as_listed(path):
        raise damaged
    own = model.state_dict()
    try:
        with safe_open(path, "pt") as file:
            names, patterns = set(file.keys()), dict(file.metadata() or {})
            patterns.pop("format", None)
            checksum = patterns.pop("sha256", None)
            stored = {name: name for name in own} | json.loads(patterns.get(_TIED, "{}"))
            wanted = [_list_parts(name, names) for name in stored.values()]
            if stored.keys() != own.keys() or {name for parts in wanted for name in parts} != names:
                raise BadData(f"{path}: not the packed weights of this model")
            if _compute_checksum(((name, file.get_tensor(name)) for name in names), patterns) != checksum:
                raise damaged
            patterns.pop(_TIED, None)
            choices = {_get_layer_name(name): _read_pattern(file, name, text) for name, text in patterns.items()}
            masks = {}
            for name, tensor in own.items():  # check all before any weight changes
                if stored[name] in names:
                    fits = file.get_slice(stored[name]).get_shape() == list(tensor.shape)
                elif fits := (mask := _read_mask(file, model, name, tensor)) is not None:
                    masks[name] = mask
                    choices[_get_layer_name(name)] = _read_pattern(file, name, patterns[name], mask)
                if not fits:
                    raise BadData(f"{path}: not the packed weights of this model: {name} is of another shape")
            for name, tensor in own.items():
                whole = name not in masks
                tensor.copy_(
                    file.get_tensor(stored[name]) if whole else _unpack_weight(file, model, name, masks[name])
                )
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        first = " ".join(str(error).split())[:200]
        raise BadData(f"{path}: not the packed weights of a model ({first}): {ADVICE}") from None
    return model.eval(), choices


def _list_parts(name: str, names: Collection[str]) -> list[str]:
    """List the tensors in which a packed file with these names has a weight."""
    if name in names:
        return [name]
    scales = [f"{name}.scales"] if f"{name}.scales" in names else []
    return [f"{name}.values", f"{name}.mask", *scales]


def _format_kind(choice: LayerChoice, quantization: Quantization | None) -> str:
    """Return a layer's pattern and precision as text, and how its inputs are read in eight bits."""
    parts = [
        choice.pattern,
        choice.precision,
        *([] if quantization is None else [format_range(get_range(quantization))]),
    ]
    return " ".join(parts)


def _read_pattern(file: Any, name: str, text: str, mask: NDArray[np.bool_] | None = None) -> LayerPattern:
    """Return what `convert` makes of a weight in an open packed file; text: of `_format_kind`."""
    spec, precision, *read = text.split()
    quantization = None
    if read:
        quantization = Quantization(file.get_tensor(f"{name}.scales").numpy(), parse_range(read[0]))
    return build_layer_pattern(spec, precision, None if spec == "dense" else mask, quantization)


def _read_mask(file: Any, model: nn.Module, name: str, tensor: Tensor) -> NDArray[np.bool_] | None:
    """Return the mask (m, k) of a weight in an open packed file; None if it or its values do not fit `tensor`."""
    m, k = as_matrix(model.get_submodule(_get_layer_name(name)), tensor).shape
    bits = file.get_tensor(f"{name}.mask").numpy()
    if bits.shape != (m, -(-k // 8)):
        return None
    mask: NDArray[np.bool_] = np.unpackbits(bits, axis=1, count=k).astype(bool)
    return mask if file.get_slice(f"{name}.values").get_shape() == [np.count_nonzero(mask)] else None


def _unpack_weight(file: Any, model: nn.Module, name: str, mask: NDArray[np.bool_]) -> Tensor:
    """Return the weight `name` of an open packed file as the model has it, for its mask (m, k)."""
    values = file.get_tensor(f"{name}.values")
    matrix = values.new_zeros(mask.shape)
    matrix[torch.from_numpy(mask)] = values
    if values.dtype == torch.int8:
        matrix = matrix.float() * file.get_tensor(f"{name}.scales")[:, None]
    return as_weight(model.get_submodule(_get_layer_name(name)), matrix)


def _compute_checksum(tensors: Iterable[tuple[str, Tensor]], patterns: Mapping[str, str]) -> str:
    """Return the SHA-256 of the content of a packed file, in any order."""
    each = {name: hash_tensors([(name, tensor)]) for name, tensor in tensors}
    return hashlib.sha256(json.dumps([each, patterns], sort_keys=True).encode()).hexdigest()


def _is_as_listed(path: Path) -> bool:
    """Return whether the manifest beside the file lists it so; True without a manifest, after a move."""
    try:
        listed = json.loads((path.parent / "manifest.json").read_text(encoding="utf-8"))["packed"]["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return True
    return path.name != PACKED or hash_file(path) == listed


def _get_weight_name(layer: str) -> str:
    return f"{layer}.weight" if layer else "weight"


def _get_layer_name(weight: str) -> str:
    return weight.removesuffix("weight").removesuffix(".")
