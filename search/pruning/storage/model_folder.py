"""A pruned model on disk: a folder that is whole or absent.

    model.safetensors    the full state_dict, dense, exact zeros where a weight is pruned; what any reader of torch's
                         tensors takes, such as from_pretrained of transformers with a config.json beside
    masks.safetensors    a pruned layer's mask, numpy.packbits of (m, k), True = kept; metadata {layer: "m,k"}
    profile.json         the profile that it was pruned to
    manifest.json        version; what made it; scores; expected seconds; bytes and SHA-256 of each file above; each
                         layer's pattern, sparsity, kept weights, packed bytes and mask's hash, of N:M also what it
                         keeps along what; `packed`: bytes and SHA-256 of packed.safetensors, where that was written

Masks are saved as bits, because a kept weight may be zero too: zeros in weights cannot rebuild a mask.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from latbench.base.files import hash_file, is_left_behind, write_text_atomically
from latbench.errors import BadData, EnvironmentUnusable, UsageError
from search.artifacts.profile import LayerChoice, Profile, read_profile
from search.backends import OWN
from search.pruning.training.pruner import unwrapped
from sparse_kernels.convert import LayerPattern
from sparse_kernels.formats import NotOfPattern, pack
from sparse_kernels.nn import weight_matrix
from sparse_kernels.patterns import NM, BlockWise, Dense, Pattern, ShflBW, VectorNM, VectorWise, parse

VERSION = 2
FILES = ("model.safetensors", "masks.safetensors", "profile.json")
PACKED = "packed.safetensors"
# A mask that far from the profile's sparsity is another one; whole units can be that far off in a small layer alone.
FAR_FROM_TARGET, SMALL = 0.1, 4096


def save_pruned(
    folder: Path,
    model: nn.Module,
    masks: Mapping[str, Tensor],
    profile: Profile,
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """Write `folder` in place of what it was, and return its manifest: `facts` and what the weights say.

    What else lies in the folder stays there. A write that is killed leaves a folder that says so when it is read.
    Raises UsageError when `folder` is something else than a pruned model, and, naming the layer, for a mask that is
    missing, not of the profile's pattern along either axis or far from its sparsity, and for weights that a mask
    drops and that are not zero; EnvironmentUnusable when the disk refuses.
    """
    model, _ = unwrapped(model)
    folder = Path(folder).resolve()
    check_writable(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for leftover in filter(is_left_behind, beside(folder, r"\d+\.tmp")):  # of a prune that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        temporary = folder.parent / f".{folder.name}.{os.getpid()}.tmp"
        temporary.mkdir()
        try:
            save_file(unshared(model.state_dict()), temporary / "model.safetensors", metadata={"format": "pt"})
            bits = {layer: torch.from_numpy(np.packbits(mask.cpu().numpy())) for layer, mask in masks.items()}
            shapes = {layer: ",".join(map(str, mask.shape)) for layer, mask in masks.items()}
            # Without tensors and with empty metadata safetensors writes what it cannot read.
            save_file(bits, temporary / "masks.safetensors", metadata=shapes or None)
            profile.save(temporary / "profile.json")
            manifest = {
                "version": VERSION,
                **facts,
                "target": profile.target,
                "dense_seconds": profile.dense_seconds,
                "predicted_seconds": profile.predicted_seconds,
                "predicted_low": profile.predicted_low,
                "predicted_high": profile.predicted_high,
                "layers": layer_facts(model, masks, profile),
                "bytes": {name: (temporary / name).stat().st_size for name in FILES},
                "files": {name: hash_file(temporary / name) for name in FILES},
            }
            write_manifest(temporary, manifest)
            for name in FILES:  # safetensors makes its files private; these are as readable as any other
                (temporary / name).chmod((temporary / "manifest.json").stat().st_mode)
            folder.mkdir(exist_ok=True)
            (folder / PACKED).unlink(missing_ok=True)  # of the weights that were here
            for name in (*FILES, "manifest.json"):
                (temporary / name).replace(folder / name)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise EnvironmentUnusable(f"cannot write {folder}: {error}") from error
    return manifest


def unshared(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as safetensors takes them, in memory of their own; copied where they are not, and only there."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in state.items():
        place = tensor.untyped_storage().data_ptr()
        found[name] = (tensor.clone() if place in seen else tensor).detach().contiguous()
        seen.add(place)
    return found


def layer_facts(model: nn.Module, masks: Mapping[str, Tensor], profile: Profile) -> dict[str, dict[str, Any]]:
    """What the manifest says of each layer of the profile."""
    modules = dict(model.named_modules())
    facts: dict[str, dict[str, Any]] = {}
    for layer, choice in profile.layers.items():
        weight = weight_matrix(modules[layer]).float().cpu().contiguous().numpy()
        mask = masks[layer].cpu().numpy() if layer in masks else None
        pattern = parse(choice.pattern)
        if reason := _contradiction(weight, mask, choice):
            raise UsageError(f"layer {layer}: {reason}")
        along = {}
        if isinstance(pattern, NM | VectorNM) and mask is not None:
            along = {"keep": pattern.keep, "of": pattern.of, "along": _along(mask, pattern)}
        try:
            if mask is not None and along.get("along") == "outputs":  # as the transposed matrix is packed
                packed = pack(np.ascontiguousarray(weight.T), np.ascontiguousarray(mask.T), pattern)
            else:
                packed = pack(weight, mask, pattern)
        except NotOfPattern as error:
            raise UsageError(f"layer {layer}: its mask is not what the profile asks for: {error}") from error
        facts[layer] = along | {
            "pattern": choice.pattern,
            "sparsity": choice.sparsity,
            "kept_weights": weight.size if mask is None else int(mask.sum()),
            "weights": weight.size,
            "packed_bytes": packed.nbytes,
            "predicted_seconds": choice.seconds,
            "mask_sha256": None if mask is None else hashlib.sha256(np.packbits(mask).tobytes()).hexdigest(),
        }
    return facts


def _contradiction(weight: NDArray[np.float32], mask: NDArray[np.bool_] | None, choice: LayerChoice) -> str | None:
    """Why a layer's weight, mask (m, k) and choice do not go together; None if they do."""
    if mask is None:
        if isinstance(parse(choice.pattern), Dense):
            return None
        return f"the profile prunes it to {choice.pattern}, and there is no mask of it"
    if left := int(np.count_nonzero(weight[~mask])):
        return f"{left} weights that its mask drops are not zero: call finish() of the pruner before saving"
    dropped = 1 - mask.mean()
    if abs(dropped - choice.sparsity) > FAR_FROM_TARGET and mask.size >= SMALL:
        return f"its mask drops {dropped:.1%} of the weights, and the profile says {choice.sparsity:.1%}"
    return None


def _along(mask: NDArray[np.bool_], pattern: NM | VectorNM) -> str:
    """Along which axes a mask (m, k) keeps at most N of M neighbours: "inputs", "outputs" or "both"."""
    if isinstance(pattern, VectorNM) or not _holds(mask.T, pattern):
        return "inputs"
    return "both" if _holds(mask, pattern) else "outputs"


def _holds(mask: NDArray[np.bool_], pattern: NM) -> bool:
    """Whether each group of M columns, of the last of a row what there is, keeps as many as the pattern allows."""
    starts = range(0, mask.shape[1], pattern.of)
    groups = (mask[:, start : start + pattern.of] for start in starts)
    return all(group.sum(axis=1).max(initial=0) <= pattern.keeps_of(group.shape[1]) for group in groups)


def check_writable(folder: Path) -> None:
    """Raise UsageError when `folder` is there and is something else than a pruned model or an empty folder."""
    if folder.exists() and not is_pruned(folder) and not (folder.is_dir() and not any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is no pruned model: give another output folder")


def is_pruned(folder: Path) -> bool:
    """Whether the folder looks like a pruned model of any version."""
    try:
        manifest = json.loads((Path(folder) / "manifest.json").read_text(encoding="utf-8"))
        return isinstance(manifest["version"], int) and set(FILES) <= set(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def beside(folder: Path, ending: str) -> list[Path]:
    """The hidden files of this folder that lie beside it: its name between dots, then the regular expression."""
    name = re.compile(rf"\.{re.escape(folder.name)}\.{ending}")
    return [path for path in folder.parent.iterdir() if name.fullmatch(path.name)]


def unchanged(folder: Path, inputs: str) -> bool:
    """Whether the folder is a whole pruned model that was made from these inputs (a hash)."""
    try:
        return read_manifest(folder).get("inputs") == inputs
    except BadData:
        return False


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest. Raises BadData when the folder is missing or foreign, or a file of it is missing or changed."""
    path = Path(folder) / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version, hashes = manifest["version"], dict(manifest["files"])
    except FileNotFoundError:
        raise BadData(f"{folder} is no pruned model: it has no manifest.json; `latbench prune` writes one") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadData(f"{path}: not the manifest of a pruned model ({type(error).__name__}: {error})") from None
    if version != VERSION:
        raise BadData(f"{path}: pruned model version {version}, this latbench reads {VERSION}; prune again")
    for name in FILES:
        file = Path(folder) / name
        if not file.is_file() or hash_file(file) != hashes.get(name):
            raise BadData(f"{file}: missing, or not as it was written; prune again")
    return dict(manifest)


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest in place of the one that is there. Raises EnvironmentUnusable when the disk refuses."""
    write_text_atomically(folder / "manifest.json", json.dumps(manifest, indent=2) + "\n")


def load_pruned(folder: Path, model: nn.Module) -> tuple[nn.Module, dict[str, LayerPattern]]:
    """Put the pruned weights into `model` (the task's), in place; returns it and {layer: pattern} for `convert`.

    The choices name every layer of the profile, dense ones too; dense is also a layer whose groups run along the
    outputs, which no kernel multiplies by. They are in the precision that the profile was searched for. Raises
    BadData when the folder is not a whole pruned model, or is one of another model, which is then left as it was.
    """
    folder = Path(folder)
    read_manifest(folder)
    profile = read_profile(folder / "profile.json")
    state = load_file(folder / "model.safetensors")
    shapes, own = ({name: tuple(it.shape) for name, it in each.items()} for each in (state, model.state_dict()))
    if unlike := sorted(name for name in {*shapes, *own} if shapes.get(name) != own.get(name)):
        there, here = (found.get(unlike[0], "missing") for found in (shapes, own))
        raise BadData(f"{folder}: pruned from another model than this task's: {unlike[0]} is {there}, here {here}")
    model.load_state_dict(state)
    masks = read_masks(folder)
    choices = {layer: layer_pattern(choice.pattern, masks.get(layer)) for layer, choice in profile.layers.items()}
    return model.eval(), in_precision(choices, profile.backend)


def in_precision(choices: Mapping[str, LayerPattern], backend: str) -> dict[str, LayerPattern]:
    """The choices as this backend of a search runs them: layers whose rows share columns in its precision."""
    precision = OWN.get(backend, "float32")
    return {
        name: replace(choice, precision=precision) if _share_columns(choice.pattern) else choice
        for name, choice in choices.items()
    }


def _share_columns(pattern: Pattern) -> bool:
    match pattern:
        case VectorWise() | ShflBW():
            return pattern.v > 1
        case BlockWise():
            return pattern.rows > 1
    return isinstance(pattern, Dense)


def layer_pattern(spec: str, mask: NDArray[np.bool_] | None) -> LayerPattern:
    """What `convert` is to make of a layer with this mask (m, k)."""
    pattern = parse(spec)
    if mask is not None and isinstance(pattern, NM | VectorNM) and _along(mask, pattern) == "outputs":
        return LayerPattern(Dense(), None)
    return LayerPattern(pattern, mask)


def read_masks(folder: Path) -> dict[str, NDArray[np.bool_]]:
    """{layer: mask (m, k), True = kept} of the pruned layers."""
    masks = {}
    with safe_open(folder / "masks.safetensors", "np") as file:
        for layer, shape in (file.metadata() or {}).items():
            m, k = map(int, shape.split(","))
            masks[layer] = np.unpackbits(file.get_tensor(layer), count=m * k).astype(bool).reshape(m, k)
    return masks
