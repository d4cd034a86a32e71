"""The layer database: each layer pruned in each way, computed once and read when it is needed.

    <folder>/database.json                          version; model_hash; made_by, the provenance of the entries: the
                                                    pruning method with a hash of the calibration data; dense_loss,
                                                    that of the first batch
    <folder>/<layer>/<pattern>@<sparsity>.safetensors, or ....int8.safetensors for an option in eight bits
        values (nnz,) float32     the kept weights, row after row of the matrix (m, k); int8 in eight bits
        mask   (bytes,) uint8     numpy.packbits of the mask (m, k), True = kept; zeros in weights cannot rebuild it
        scales (m,) float32       in eight bits: what 1 of each row is worth
        metadata                  shape "m,k"; error |dy|^2 / |y|^2 of the layer's outputs on the calibration data;
                                  in eight bits input "scale,zero", how inputs are read

Every file is whole or absent. A folder that was built from other weights, or in another way, is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from latbench.base.engine_registry import INT8
from latbench.base.files import remove_left_behind, write_atomically, write_text_atomically
from latbench.errors import BadData, EnvironmentUnusable
from search.problem.layers import Option
from sparse_kernels.formats.int8 import Quantization, format_range, parse_range

if TYPE_CHECKING:
    from torch import Tensor, nn

VERSION = 4
SAME_LOSS = 1e-4
"""Largest relative change of the dense model's loss by roundings."""


@dataclass(frozen=True)
class Entry:
    """One layer pruned in one way.

    Attributes
    ----------
    weight
        Tensor (m, k) float32, with exact zeros.
    mask
        Tensor (m, k) bool, True = kept.
    error
        Relative error |dy|^2 / |y|^2 of the layer's outputs.
    quantization
        How the layer is read in eight bits; None for another precision.
    """

    weight: Tensor
    mask: Tensor
    error: float
    quantization: Quantization | None = None


class Database:
    """The pruned layers of one model in a folder, all made by one method on the same data.

    Parameters
    ----------
    folder
        The folder; it need not exist yet.
    model_hash
        Hash of the dense model's weights (`hash_model`).
    provenance
        Pruning method and hash of the calibration data. A reader leaves it out: the attribute `provenance` then says
        how the entries were made.

    Raises
    ------
    BadData
        The folder has entries of another model, method or data, or of another version of latbench.
    """

    def __init__(self, folder: Path, model_hash: str, provenance: str = "") -> None:
        self.folder = Path(folder)
        self.model_hash = model_hash
        self.provenance = provenance
        if self._index.exists():
            self.provenance = _check_index(self._index, model_hash, provenance)

    @property
    def _index(self) -> Path:
        return self.folder / "database.json"

    def begin(self, dense_loss: float) -> None:
        """Note what the entries are of, before any is computed.

        Another program may have begun in the same folder meanwhile, and the code of the model may have changed.

        Parameters
        ----------
        dense_loss
            The loss of the dense model on the first batch.

        Raises
        ------
        BadData
            The folder has entries of another model, method, data or computation.
        """
        known = dense_loss if math.isfinite(dense_loss) else None
        if not self._index.exists():
            self._write_index(known)
        self.provenance = _check_index(self._index, self.model_hash, self.provenance, known)

    def _write_index(self, dense_loss: float | None) -> None:
        content = {
            "version": VERSION, "model_hash": self.model_hash, "made_by": self.provenance, "dense_loss": dense_loss,
        }  # fmt: skip
        write_text_atomically(self._index, json.dumps(content) + "\n")

    def has(self, layer: str, option: Option) -> bool:
        """Return whether there is such an entry, or the layer needs none because it does not change."""
        return option.in_database is None or self._path(layer, option).exists()

    def error(self, layer: str, option: Option) -> float:
        """Return the error of an option without reading its weights. Raises BadData as `get` does."""
        return 0.0 if option.in_database is None else _error(self._path(layer, option), self._metadata(layer, option))

    def get(self, layer: str, option: Option) -> Entry:
        """Return the entry of an option that changes the layer. Raises BadData if it is missing or damaged."""
        path, metadata = self._path(layer, option), self._metadata(layer, option)
        quantization = None
        try:
            m, k = map(int, metadata["shape"].split(","))
            with safe_open(path, "pt") as file:
                values, bits = file.get_tensor("values"), file.get_tensor("mask")
                if option.precision == INT8:
                    quantization = Quantization(file.get_tensor("scales").numpy(), parse_range(metadata["input"]))
            mask = torch.from_numpy(np.unpackbits(bits.numpy(), count=m * k).astype(bool)).view(m, k)
            weight = torch.zeros(m, k)
            weight[mask] = values.float()
            if quantization is not None:
                weight *= torch.from_numpy(quantization.scales)[:, None]
        except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
            raise _damaged(path) from error
        return Entry(weight, mask, _error(path, metadata), quantization)

    def put(self, layer: str, option: Option, entry: Entry) -> None:
        """Store an entry.

        Parameters
        ----------
        layer, option
            Key of the entry.
        entry
            Weight, mask and error. In eight bits the weight is whole numbers of steps, and inputs have one range.

        Raises
        ------
        EnvironmentUnusable
            The file cannot be written.
        """
        weight, mask, reading = entry.weight.detach(), entry.mask, entry.quantization
        if weight.shape != mask.shape or mask.dtype != torch.bool or weight.dtype != torch.float32:
            raise TypeError(
                "an entry is a float32 weight and a bool mask of one shape, "
                f"not {weight.dtype} {tuple(weight.shape)} and {mask.dtype} {tuple(mask.shape)}"
            )
        if (reading is None) != (option.precision != INT8):
            raise TypeError(f"an entry has a quantization if and only if it is in eight bits, not one of {option}")
        if not self._index.exists():
            self._write_index(None)
        tensors = {"mask": torch.from_numpy(np.packbits(mask.numpy()))}
        metadata = {"shape": ",".join(map(str, mask.shape)), "error": repr(float(entry.error))}
        if reading is not None:
            if reading.input_range is None:
                raise TypeError("an entry in eight bits has one range for all inputs")
            tensors["scales"] = torch.from_numpy(np.array(reading.scales))
            weight = (weight / tensors["scales"][:, None]).round().to(torch.int8)
            metadata["input"] = format_range(reading.input_range)
        tensors["values"] = weight[mask].contiguous()
        path = self._path(layer, option)
        try:
            write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata=metadata))
        except SafetensorError as error:
            raise EnvironmentUnusable(f"cannot write {path}: {error}") from error

    def tidy(self) -> None:
        """Remove unfinished files that killed builds left on this machine. Call it only while no build runs here."""
        for folder in (self.folder, *self.folder.glob("*/")):
            remove_left_behind(folder)

    def _path(self, layer: str, option: Option) -> Path:
        # Quoted, so that every layer name is one folder. Some file systems refuse the colons of a pattern.
        name = f"{option.pattern.replace(':', '-')}@{option.sparsity:.6g}"
        ending = ".int8.safetensors" if option.precision == INT8 else ".safetensors"
        return self.folder / quote(layer, safe="") / f"{name}{ending}"

    def _metadata(self, layer: str, option: Option) -> Mapping[str, str]:
        path = self._path(layer, option)
        if not path.exists():
            raise BadData(f"{self.folder} has no layer {layer} as {option}; `latbench search` builds it")
        try:
            with safe_open(path, "pt") as file:
                return file.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise _damaged(path) from error


def hash_model(model: nn.Module) -> str:
    """Return a hash of every parameter and buffer, 16 hexadecimal digits."""
    return hash_tensors(sorted(model.state_dict().items()))[:16]


def hash_tensors(named: Iterable[tuple[str, Tensor]]) -> str:
    """Return the SHA-256 of tensors on any device, with their names and types, in this order."""
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _check_index(path: Path, model_hash: str, provenance: str, dense_loss: float | None = None) -> str:
    """Return the provenance in the index at `path`.

    Raises BadData if the model differs, or a provenance or loss that is given.
    """
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        version = index["version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadData(f"{path} is not the index of a layer database") from error
    advice = "give another --database, or remove the folder to build it again"
    if version != VERSION:
        raise BadData(f"{path}: layer database version {version}, this latbench reads {VERSION}; {advice}")
    if (found := index.get("model_hash")) != model_hash:
        raise BadData(
            f"{path.parent} was built from a model with other weights ({found}, this one is {model_hash}); {advice}"
        )
    built = str(index.get("made_by", ""))
    if provenance and built != provenance:
        raise BadData(
            f"{path.parent} was built by another method, on other calibration data or by another version of latbench "
            f"({built or 'not recorded'}, this is {provenance}); {advice}"
        )
    known = index.get("dense_loss")
    if known is None or dense_loss is None or math.isclose(known, dense_loss, rel_tol=SAME_LOSS, abs_tol=1e-9):
        return built
    raise BadData(
        f"{path.parent} was built when the loss of the dense model was {known:.6g}, and it is {dense_loss:.6g} "
        f"now: the code of loss() or of the model has changed; {advice}"
    )


def _error(path: Path, metadata: Mapping[str, str]) -> float:
    try:
        return float(metadata["error"])
    except (KeyError, ValueError) as error:
        raise _damaged(path) from error


def _damaged(path: Path) -> BadData:
    return BadData(f"{path}: the file is damaged; delete it, and the next `latbench search` builds it again")
