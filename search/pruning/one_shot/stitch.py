"""Put pruned layers out of the database into a model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from search.artifacts.layer_database import Database
from sparse_kernels.nn import set_weight_matrix
from sparse_kernels.patterns import Dense, parse


def stitch(model: nn.Module, choices: Mapping[str, tuple[str, float]], database: Database) -> dict[str, Tensor]:
    """Write the chosen weights, {layer: (pattern, sparsity)}, into `model` in place; dense layers are left alone.

    Returns the masks (m, k) of the pruned layers. Raises BadData when the database lacks an entry.
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
