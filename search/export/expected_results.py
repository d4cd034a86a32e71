"""What an exported model must compute: its results for the task's example, kept beside it.

`expected.npz` has the inputs and, for each result, that of the pruned model and that of its conversion in torch. So
the machine that serves can compare, also without the pruned weights.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from latbench.errors import BadData
from search.export.export_manifest import EXPECTED
from sparse_kernels.same_results import CONVERTED, same_results

PARTS = ("inputs", "converted", "pruned")


def compare_results(
    found: Sequence[Tensor], converted: Sequence[Tensor], pruned: Sequence[Tensor]
) -> tuple[bool, float]:
    """Return whether results are right, and how far they lie from the converted model's, as a share of its largest.

    Layers in eight bits and in bfloat16 round their inputs. An input near the middle of two steps may go to the other
    one in the exported model, for its own roundings. All roundings together are what separates the converted model
    from the pruned one, so they bound what some of them do.

    Parameters
    ----------
    found : sequence of Tensor
        The exported model's results.
    converted : sequence of Tensor
        The same of the converted model, which rounds as the export does.
    pruned : sequence of Tensor
        The same of the pruned model, which does not round.
    """
    if [each.shape for each in found] != [each.shape for each in converted]:
        return False, math.inf
    right, worst = True, 0.0
    for y, wanted, unrounded in zip(*(map(_widen, each) for each in (found, converted, pruned)), strict=True):
        apart = float((y - wanted).abs().max()) if y.numel() else 0.0
        rounded = float((wanted - unrounded).abs().max()) if y.numel() else 0.0
        right = right and (apart <= rounded or same_results(y, wanted, CONVERTED))
        worst = max(worst, apart / (float(wanted.abs().max()) or 1.0) if y.numel() else 0.0)
    return right, worst


def _widen(result: Tensor) -> Tensor:
    """Return a result as floats, which can be subtracted, whatever it was."""
    return result if result.is_floating_point() else result.double()


@dataclass(frozen=True)
class ExpectedResults:
    """Inputs of a call, and the results of the pruned model and of its conversion."""

    inputs: list[Tensor]
    converted: list[Tensor]
    pruned: list[Tensor]

    def compare(self, found: Sequence[NDArray[np.generic]]) -> tuple[bool, float]:
        """Return what `compare_results` says of an exported model's results for these inputs."""
        return compare_results([torch.from_numpy(each) for each in found], self.converted, self.pruned)

    def save(self, folder: Path) -> None:
        """Write the file into the folder of an exported model."""
        arrays = {
            f"{name}_{i}": (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()
            for name in PARTS
            for i, tensor in enumerate(getattr(self, name))
        }
        with (folder / EXPECTED).open("wb") as file:
            np.savez_compressed(file, **arrays)


def read_expected(folder: Path) -> ExpectedResults:
    """Read the expected results of an exported model. Raises BadData if the file is damaged."""
    try:
        with (folder / EXPECTED).open("rb") as file, np.load(file) as arrays:
            parts = [[torch.from_numpy(each) for each in _list(arrays, name)] for name in PARTS]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise BadData(f"{folder / EXPECTED} cannot be read: {error}; export the model again") from error
    return ExpectedResults(*parts)


def _list(arrays: Mapping[str, NDArray[np.generic]], name: str) -> Iterator[NDArray[np.generic]]:
    for i in count():
        if f"{name}_{i}" not in arrays:
            return
        yield arrays[f"{name}_{i}"]
