"""Stitch pruned layers of the database into a model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from search.artifacts.layer_database import Database
from sparse_kernels.patterns import Dense, parse
from sparse_kernels.prunable_layers import set_weight_matrix


def stitch(model: nn.Module, choices: Mapping[str, tuple[str, float]], database: Database) -> dict[str, Tensor]:
    """Write the chosen weights into the model, in place; dense layers do not change.

    Parameters
    ----------
    model : Module
        The dense model.
    choices : mapping of str to (str, float)
        Pattern and sparsity by layer.
    database : Database
        Pruned weights of each layer.

    Returns
    -------
    dict of str to bool Tensor of shape (m, k)
        Masks of the pruned layers.

    Raises
    ------
    BadData
        The database lacks an entry.
    """
    modules = dict(model.named_modules())
    masks = {}
    for layer, (pattern, sparsity) in choices.items():
        if isinstance(parse(pattern), Dense):
            continue
        entry = database.get(layer, pattern, sparsity)
        set_weight_matrix(modules[layer], entry.weight)
        masks[layer] = entry.mask
    return masks
