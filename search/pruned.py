"""A pruned model on disk: dense weights with exact zeros, masks, the profile they follow.

<folder>/model.safetensors    the model's whole state_dict
<folder>/masks.safetensors    a uint8 tensor a pruned layer: numpy.packbits of its mask (m, k), True = kept; the
                              metadata hold the shapes as JSON. Zeros alone could not rebuild a mask.
<folder>/profile.json         see search.profile
<folder>/manifest.json        how it was made, and `files`: the SHA-256 of the other three
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from latbench.errors import BadData
from latbench.files import sha256, write_atomically, write_text_atomically
from search import profile as profiles
from search.profile import Profile
from sparse_kernels.convert import Choice, convert
from sparse_kernels.nn import weight_matrix
from sparse_kernels.patterns import parse

FILES = ("model.safetensors", "masks.safetensors", "profile.json")


@dataclass(frozen=True)
class Pruned:
    """A pruned model (a torch module with dense weights), its masks (m, k) by layer, its profile and manifest."""

    model: nn.Module
    masks: Mapping[str, Tensor]
    profile: Profile
    manifest: Mapping[str, Any]

    def convert(self, example: tuple[Tensor, ...]) -> nn.Module:
        """The model as it is deployed and timed: every layer of the profile runs on its backend, dense ones too."""
        choices = {
            name: Choice(parse(choice.pattern), self.masks[name].numpy() if name in self.masks else None)
            for name, choice in self.profile.layers.items()
        }
        return convert(self.model, choices, example, backend=self.profile.backend)


def save(
    folder: Path, model: nn.Module, masks: Mapping[str, Tensor], profile: Profile, manifest: Mapping[str, Any]
) -> None:
    """Write the folder; the manifest last, so that a folder that has one is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}
    write_atomically(folder / "model.safetensors", lambda path: save_file(state, path))
    bits = {name: torch.from_numpy(np.packbits(mask.numpy())) for name, mask in masks.items()}
    shapes = json.dumps({name: tuple(mask.shape) for name, mask in masks.items()})
    write_atomically(folder / "masks.safetensors", lambda path: save_file(bits, path, metadata={"shapes": shapes}))
    profile.save(folder / "profile.json")
    content = {**manifest, "files": {name: sha256(folder / name) for name in FILES}}
    write_text_atomically(folder / "manifest.json", json.dumps(content, indent=2) + "\n")


def load(folder: Path, model: nn.Module) -> Pruned:
    """Read the folder into `model` (in place), which must have the architecture that was pruned.

    Raises BadData when something is missing, is not what the manifest lists, or does not fit.
    """
    manifest = read_manifest(folder)
    profile = profiles.load(folder / "profile.json")
    try:
        model.load_state_dict(load_file(folder / "model.safetensors"))
        masks = _masks(folder / "masks.safetensors")
    except (SafetensorError, RuntimeError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise BadData(f"{folder}: its weights do not fit the task's model: {reason}") from error
    modules = dict(model.named_modules())
    for name, choice in profile.layers.items():
        if name not in modules:
            raise BadData(f"{folder}: the task's model has no layer {name}")
        if choice.pattern == "dense":
            continue
        if name not in masks:
            raise BadData(f"{folder}: layer {name} has no mask")
        matrix = weight_matrix(modules[name])
        if masks[name].shape != matrix.shape or bool(matrix[~masks[name]].any()):
            raise BadData(f"{folder}: layer {name} has weights where its mask has none")
    return Pruned(model.eval(), masks, profile, manifest)


def read_manifest(folder: Path) -> Mapping[str, Any]:
    """The manifest, once the files are found to be those it lists. Raises BadData."""
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        listed = dict(manifest["files"])
    except FileNotFoundError:
        raise BadData(f"{folder} is no pruned model (it has no manifest.json): `latbench prune` writes one") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadData(f"{path}: not the manifest of a pruned model") from error
    for name in FILES:
        if not (folder / name).is_file():
            raise BadData(f"{folder}: {name} is missing; prune again")
        if sha256(folder / name) != listed.get(name):
            raise BadData(f"{folder / name} is not the file that was written: damaged or edited; prune again")
    return dict(manifest)


def _masks(path: Path) -> dict[str, Tensor]:
    masks = {}
    with safe_open(path, "pt") as file:
        for name, (m, k) in json.loads(file.metadata()["shapes"]).items():
            bits = np.unpackbits(file.get_tensor(name).numpy(), count=m * k)
            masks[name] = torch.from_numpy(bits.astype(bool)).view(m, k)
    return masks
