"""Stitch pruned layers of the database into a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from search.artifacts.layer_database import Database
from search.problem.layers import DENSE, Option
from sparse_kernels.formats.int8 import Quantization
from sparse_kernels.prunable_layers import set_weight_matrix


@dataclass(frozen=True)
class StitchedLayers:
    """What is known of the layers that were stitched into a model.

    Attributes
    ----------
    masks : dict of str to bool Tensor of shape (m, k)
        Masks of the pruned layers.
    quantizations : dict of str to Quantization
        How the layers in eight bits are read; their weights are whole numbers of steps.
    """

    masks: dict[str, Tensor] = field(default_factory=dict)
    quantizations: dict[str, Quantization] = field(default_factory=dict)


def stitch(model: nn.Module, choices: Mapping[str, Option], database: Database) -> StitchedLayers:
    """Write the chosen weights into the model, in place; layers that stay dense do not change.

    Parameters
    ----------
    model : Module
        The dense model.
    choices : mapping of str to Option
        The option of each layer.
    database : Database
        Pruned weights of each layer.

    Returns
    -------
    StitchedLayers
        Masks, and how layers in eight bits are read.

    Raises
    ------
    BadData
        The database lacks an entry.
    """
    modules = dict(model.named_modules())
    stitched = StitchedLayers()
    for layer, option in choices.items():
        if option.in_database is None:
            continue
        entry = database.get(layer, option)
        set_weight_matrix(modules[layer], entry.weight)
        if option.pattern != DENSE:
            stitched.masks[layer] = entry.mask
        if entry.quantization is not None:
            stitched.quantizations[layer] = entry.quantization
    return stitched
