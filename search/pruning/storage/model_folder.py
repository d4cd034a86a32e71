"""The folder of a pruned model, which is complete or absent.

    model.safetensors    the full state_dict, dense, with exact zeros for pruned weights, tied weights once; readable
                         by any reader of torch's tensors, such as from_pretrained of transformers with a config.json
                         beside it
    masks.safetensors    masks of pruned layers, numpy.packbits of (m, k), True = kept; metadata {layer: "m,k"}
    scales.safetensors   of layers in eight bits what a step of each row is worth, (m,) float32; metadata
                         {layer: "scale,zero"}, how their inputs are read: scale * (q - zero), q from 0 to 255
    profile.json         the profile
    manifest.json        version; how it was made; scores; expected seconds; bytes and SHA-256 of each file above; of
                         each layer the pattern, sparsity, precision, kept weights, packed bytes and hash of its mask,
                         and N, M and axis of N:M; `packed`: bytes and SHA-256 of packed.safetensors, if that was
                         written

Masks are stored as bits because a kept weight may be zero: the zeros of the weights do not define a mask. Weights in
eight bits are whole numbers of steps in model.safetensors, too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from latbench.base.engine_registry import BFLOAT16, FLOAT32, INT8
from latbench.base.files import hash_file, stage_folder, write_text_atomically
from latbench.errors import BadData, EnvironmentUnusable, UsageError
from search.artifacts.profile import LayerChoice, Profile, read_profile
from search.pruning.storage.tied_tensors import find_tied, read_state, separate_tensors
from search.pruning.training.pruner import unwrap_model
from sparse_kernels.convert import LayerPattern
from sparse_kernels.formats import NotOfPattern, Packed, pack
from sparse_kernels.formats.int8 import InputRange, Quantization, format_range, parse_range, round_to_steps
from sparse_kernels.patterns import NM, BlockWise, Dense, Pattern, ShflBW, VectorNM, VectorWise, parse
from sparse_kernels.prunable_layers import is_transposed, weight_matrix

VERSION = 3
FILES = ("model.safetensors", "masks.safetensors", "scales.safetensors", "profile.json")
PACKED = "packed.safetensors"
# A mask this far from the profile's sparsity is a wrong one, but for a small layer, where whole units may cause it.
FAR_FROM_TARGET, SMALL = 0.1, 4096


def save_pruned(
    folder: Path,
    model: nn.Module,
    masks: Mapping[str, Tensor],
    profile: Profile,
    facts: Mapping[str, Any],
    quantizations: Mapping[str, Quantization] = MappingProxyType({}),
) -> dict[str, Any]:
    """Save a pruned model in place of the one in the folder. Other files stay; an interrupted write is recognized.

    Parameters
    ----------
    folder : Path
        The folder; its parents are made.
    model : Module
        The model; weights that masks drop must be zero.
    masks : mapping of str to bool Tensor of shape (m, k)
        Masks by layer; True marks a kept weight.
    profile : Profile
        The profile that the model was pruned to.
    facts : mapping of str to object
        Further entries of the manifest.
    quantizations : mapping of str to Quantization
        How the layers in eight bits are read, each with a range for all inputs.

    Returns
    -------
    dict of str to object
        The manifest.

    Raises
    ------
    UsageError
        The folder holds something else than a pruned model, or the profile has no layer. Or the named layer's mask is
        missing, does not have the profile's pattern along either axis, is far from its sparsity, or drops weights
        that are not zero; or its quantization is missing or of other steps.
    EnvironmentUnusable
        The disk refuses the write.
    """
    if not profile.layers:
        raise UsageError("the profile has no layer, so nothing is pruned: give the options of at least one layer")
    model, _ = unwrap_model(model)
    check_writable(folder := Path(folder).resolve())
    try:
        with stage_folder(folder) as temporary:
            manifest = _write_files(temporary, model, masks, profile, facts, quantizations)
            folder.mkdir(exist_ok=True)
            (folder / PACKED).unlink(missing_ok=True)  # it holds the old weights
            for name in (*FILES, "manifest.json"):
                (temporary / name).replace(folder / name)
    except (OSError, SafetensorError) as error:
        raise EnvironmentUnusable(f"cannot write {folder}: {error}") from error
    return manifest


def _write_files(
    folder: Path,
    model: nn.Module,
    masks: Mapping[str, Tensor],
    profile: Profile,
    facts: Mapping[str, Any],
    quantizations: Mapping[str, Quantization],
) -> dict[str, Any]:
    """Write the files of a pruned model into an empty folder, and return the manifest."""
    state = model.state_dict()
    save_file(separate_tensors(state), folder / "model.safetensors", metadata={"format": "pt", **find_tied(state)})
    bits = {layer: torch.from_numpy(np.packbits(mask.cpu().numpy())) for layer, mask in masks.items()}
    shapes = {layer: ",".join(map(str, mask.shape)) for layer, mask in masks.items()}
    # safetensors cannot read a file that has neither tensors nor metadata.
    save_file(bits, folder / "masks.safetensors", metadata=shapes or None)
    scales = {layer: torch.from_numpy(np.array(each.scales)) for layer, each in quantizations.items()}
    ranges = {layer: format_range(get_range(each)) for layer, each in quantizations.items()}
    save_file(scales, folder / "scales.safetensors", metadata=ranges or None)
    profile.save(folder / "profile.json")
    manifest = {
        "version": VERSION,
        **facts,
        "target": profile.target,
        "dense_seconds": profile.dense_seconds,
        "predicted_seconds": profile.predicted_seconds,
        "predicted_low": profile.predicted_low,
        "predicted_high": profile.predicted_high,
        "layers": describe_layers(model, masks, profile, quantizations),
        "bytes": {name: (folder / name).stat().st_size for name in FILES},
        "files": {name: hash_file(folder / name) for name in FILES},
    }
    write_manifest(folder, manifest)
    for name in FILES:  # safetensors makes its files private
        (folder / name).chmod((folder / "manifest.json").stat().st_mode)
    return manifest


def get_range(quantization: Quantization) -> InputRange:
    """Return the range in which a layer reads its inputs. Raises UsageError if it has none for all of them."""
    if quantization.input_range is None:
        raise UsageError("a layer in eight bits needs one range for all of its inputs")
    return quantization.input_range


def describe_layers(
    model: nn.Module, masks: Mapping[str, Tensor], profile: Profile, quantizations: Mapping[str, Quantization]
) -> dict[str, dict[str, Any]]:
    """Return the manifest's entry of each layer of the profile."""
    modules = dict(model.named_modules())
    facts: dict[str, dict[str, Any]] = {}
    for layer, choice in profile.layers.items():
        weight = weight_matrix(modules[layer]).float().cpu().contiguous().numpy()
        mask = masks[layer].cpu().numpy() if layer in masks else None
        pattern = parse(choice.pattern)
        quantization = quantizations.get(layer)
        if reason := _explain_contradiction(weight, mask, choice) or _explain_steps(weight, quantization, choice):
            raise UsageError(f"layer {layer}: {reason}")
        groups = {}
        if isinstance(pattern, NM | VectorNM) and mask is not None:
            groups = {"keep": pattern.keep, "of": pattern.of, "along": _find_axis(mask, pattern)}
        try:
            if mask is not None and groups.get("along") == "outputs":  # pack the transposed matrix
                packed = pack(np.ascontiguousarray(weight.T), np.ascontiguousarray(mask.T), pattern)
            else:
                packed = pack(weight, mask, pattern)
        except NotOfPattern as error:
            raise UsageError(f"layer {layer}: its mask is not what the profile asks for: {error}") from error
        facts[layer] = groups | {
            **({"transposed": True} if is_transposed(modules[layer]) else {}),
            "pattern": choice.pattern,
            "sparsity": choice.sparsity,
            "precision": choice.precision,
            "kept_weights": weight.size if mask is None else int(mask.sum()),
            "weights": weight.size,
            "packed_bytes": _count_bytes(packed, quantization),
            "predicted_seconds": choice.seconds,
            "mask_sha256": None if mask is None else hashlib.sha256(np.packbits(mask).tobytes()).hexdigest(),
        }
    return facts


def _explain_contradiction(
    weight: NDArray[np.float32], mask: NDArray[np.bool_] | None, choice: LayerChoice
) -> str | None:
    """Return why a layer's weight, mask (m, k) and choice contradict each other, or None."""
    if mask is None:
        if isinstance(parse(choice.pattern), Dense):
            return None
        return f"the profile prunes it to {choice.pattern}, and there is no mask of it"
    if left := int(np.count_nonzero(weight[~mask])):
        return f"{left} weights that its mask drops are not zero: call finish() of the pruner before saving"
    dropped, wanted = 1 - mask.mean(), (choice.sparsity, _find_dropped_share(choice, mask.shape[1]))
    if not min(wanted) - FAR_FROM_TARGET <= dropped <= max(wanted) + FAR_FROM_TARGET and mask.size >= SMALL:
        return f"its mask drops {dropped:.1%} of the weights, and the profile says {choice.sparsity:.1%}"
    return None


def _find_dropped_share(choice: LayerChoice, k: int) -> float:
    """Return the share of weights that a row of k columns drops: N:M keeps more of a last group that is not whole."""
    pattern = parse(choice.pattern)
    if not isinstance(pattern, NM | VectorNM):
        return choice.sparsity
    whole, last = divmod(k, pattern.of)
    return 1 - (whole * pattern.keep + NM(pattern.keep, pattern.of).keeps_of(last)) / k


def _count_bytes(packed: Packed, quantization: Quantization | None) -> int:
    """Return the bytes of a packed weight; in eight bits a value takes one byte, and each row has a scale."""
    return (
        packed.nbytes if quantization is None else packed.nbytes - 3 * packed.values.size + quantization.scales.nbytes
    )


def _explain_steps(weight: NDArray[np.float32], quantization: Quantization | None, choice: LayerChoice) -> str | None:
    """Return why a layer's weight (m, k) is not what its quantization says, or None."""
    if choice.precision != INT8:
        return (
            None if quantization is None else f"it has a quantization, and the profile has it in {choice.precision}"
        )
    if quantization is None:
        return "the profile has it in int8, and there is no quantization of it"
    if quantization.scales.shape != (len(weight),):
        return f"its quantization has {quantization.scales.size} scales, and its weight {len(weight)} rows"
    if not np.array_equal(round_to_steps(weight, quantization.scales), weight):
        return (
            "its weights are not whole numbers of steps: round them with sparse_kernels.formats.int8.round_to_steps"
        )
    return None


def _find_axis(mask: NDArray[np.bool_], pattern: NM | VectorNM) -> str:
    """Return the axes along which a mask (m, k) keeps at most N of M neighbours: "inputs", "outputs" or "both"."""
    if isinstance(pattern, VectorNM) or not _keeps_nm(mask.T, pattern):
        return "inputs"
    return "both" if _keeps_nm(mask, pattern) else "outputs"


def _keeps_nm(mask: NDArray[np.bool_], pattern: NM) -> bool:
    """Return whether each group of M columns keeps as few as the pattern allows; the last group may be shorter."""
    starts = range(0, mask.shape[1], pattern.of)
    groups = (mask[:, start : start + pattern.of] for start in starts)
    return all(group.sum(axis=1).max(initial=0) <= pattern.keeps_of(group.shape[1]) for group in groups)


def check_writable(folder: Path) -> None:
    """Raise UsageError if the folder exists and is neither a pruned model nor empty."""
    if folder.exists() and not is_pruned(folder) and not (folder.is_dir() and not any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is no pruned model: give another output folder")


def is_pruned(folder: Path) -> bool:
    """Return whether the folder looks like a pruned model of any version."""
    try:
        manifest = json.loads((Path(folder) / "manifest.json").read_text(encoding="utf-8"))
        return isinstance(manifest["version"], int) and set(FILES) <= set(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def is_unchanged(folder: Path, inputs: str) -> bool:
    """Return whether the folder is a complete pruned model that was made from these inputs (a hash)."""
    try:
        return read_manifest(folder).get("inputs") == inputs
    except BadData:
        return False


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest and check the files of the folder.

    Raises BadData if the folder or a file of it is missing or changed, or is no pruned model.
    """
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


def hash_manifest(folder: Path) -> str:
    """Return a hash of the pruned model in `folder`: its manifest lists the hashes of its files. Raises BadData.

    The packed file is not part of it: it has the same weights, and may be written later.
    """
    manifest = {name: value for name, value in read_manifest(folder).items() if name != "packed"}
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:16]


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest, atomically. Raises EnvironmentUnusable if the disk refuses."""
    write_text_atomically(folder / "manifest.json", json.dumps(manifest, indent=2) + "\n")


def load_pruned(folder: Path, model: nn.Module) -> tuple[nn.Module, dict[str, LayerPattern]]:
    """Load the pruned weights into the model, in place.

    Parameters
    ----------
    folder : Path
        Folder of a pruned model.
    model : Module
        The dense model that was pruned. It stays unchanged if the folder does not fit it.

    Returns
    -------
    model : Module
        The same model, in eval mode.
    choices : dict of str to LayerPattern
        Pattern of every layer of the profile, for `convert`, in its precision. A layer whose groups run along the
        outputs counts as dense, because no kernel multiplies by it.

    Raises
    ------
    BadData
        The folder is no complete pruned model, or is one of another model.
    """
    folder = Path(folder)
    read_manifest(folder)
    profile = read_profile(folder / "profile.json")
    state, _ = read_state(folder / "model.safetensors")
    saved, own = ({name: _describe(it) for name, it in each.items()} for each in (state, model.state_dict()))
    if unlike := sorted(name for name in {*saved, *own} if saved.get(name) != own.get(name)):
        there, here = (found.get(unlike[0], "missing") for found in (saved, own))
        raise BadData(f"{folder}: pruned from another model than the given one: {unlike[0]} is {there}, here {here}")
    model.load_state_dict(state)
    masks, quantizations = read_masks(folder), read_quantizations(folder)
    choices = {
        layer: build_layer_pattern(choice.pattern, choice.precision, masks.get(layer), quantizations.get(layer))
        for layer, choice in profile.layers.items()
    }
    return model.eval(), choices


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def _share_columns(pattern: Pattern) -> bool:
    match pattern:
        case VectorWise() | ShflBW():
            return pattern.v > 1
        case BlockWise():
            return pattern.rows > 1
    return isinstance(pattern, Dense)


def build_layer_pattern(
    spec: str, precision: str, mask: NDArray[np.bool_] | None, quantization: Quantization | None = None
) -> LayerPattern:
    """Return what `convert` makes of a layer with this pattern, precision, mask (m, k) and quantization.

    Layers whose rows share no columns have no kernel in bfloat16, and stay in float32.
    """
    pattern = parse(spec)
    if mask is not None and isinstance(pattern, NM | VectorNM) and _find_axis(mask, pattern) == "outputs":
        pattern, mask = Dense(), None
    if precision == BFLOAT16 and not _share_columns(pattern):
        precision = FLOAT32
    return LayerPattern(pattern, mask, precision, quantization)


def read_masks(folder: Path) -> dict[str, NDArray[np.bool_]]:
    """Read the masks (m, k) of the pruned layers, by layer; True = kept."""
    masks = {}
    with safe_open(folder / "masks.safetensors", "np") as file:
        for layer, shape in (file.metadata() or {}).items():
            m, k = map(int, shape.split(","))
            masks[layer] = np.unpackbits(file.get_tensor(layer), count=m * k).astype(bool).reshape(m, k)
    return masks


def read_quantizations(folder: Path) -> dict[str, Quantization]:
    """Read how the layers in eight bits are read, by layer."""
    with safe_open(folder / "scales.safetensors", "np") as file:
        return {
            layer: Quantization(file.get_tensor(layer), parse_range(text))
            for layer, text in (file.metadata() or {}).items()
        }
