"""ExactOBS where a layer is small enough for it, AdaPrune where it is not.

ExactOBS keeps most, and takes about k^3 multiplications for each band of rows that a pattern's units share: a
3072x768 layer has 3072 bands for single weights, and 96 for vectors of 32. So it is decided for each pattern.
"""

from __future__ import annotations

import math

from search.pruning.masks.prunable_units import units_of
from search.pruning.one_shot.adaprune import ITERATIONS, AdaPrune
from search.pruning.one_shot.exact_obs import ExactOBS
from search.pruning.one_shot.one_shot_pruner import Pruned
from sparse_kernels.patterns import Pattern

MULTIPLICATIONS = 3e10
"""Of an elimination; so many take 11 to 30 s (1.0 to 2.8e9 a second on two busy cores, 32x288 to 3072x768 layers).

Afterwards an option's refit takes up to 2/5 of that again. AdaPrune takes a sixth to two fifths of both, for errors
that are a few percent larger, 10 to 60% at half of the weights. All layers of ResNet20 are below it (1.2e10, 4.4 s),
BERT's 768x768 ones in vectors of 16 rows and more, its 3072x768 ones are not.
"""


class Auto(ExactOBS):
    """A dense layer whose weights go one after the other where that can be afforded, and at once elsewhere."""

    def prune(self, pattern: Pattern, sparsity: float) -> Pruned:
        """By ExactOBS if it can be afforded, else by AdaPrune."""
        exact = self.multiplications(pattern, sparsity) <= MULTIPLICATIONS
        self.iterations = math.inf if exact else ITERATIONS
        return (ExactOBS if exact else AdaPrune).prune(self, pattern, sparsity)

    def multiplications(self, pattern: Pattern, sparsity: float) -> float:
        """What the elimination of all bands takes."""
        m, k = self.weight.shape
        return -(-m // units_of(pattern, sparsity).height) * float(k) ** 3
